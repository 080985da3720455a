"""A gradient under rounding, several times, one block at a time.

[Note: rounded walk] A backward under rounding visits the blocks from the last to the first. Each runs again as in
walk.py, but what it saves is stored as a step would store it, and its backward turns the gradient at its outputs into
that at its inputs. All passes walk side by side, each with other random numbers. So the gradients of one parameter are
there for all passes at the same time, and only their contributions to the two moments remain. A parameter that several
parts of the model use is the exception: the gradients of each pass are summed until the last of these parts is visited.
A pass may also store nothing rounded: comparison.py has the others beside it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from .. import codec
from ..distributed import gathered, whole_value
from ..hooks import Content, Draw, Noted, Replaceable, ReplayError, StoredAgain, Way, decoded, shares_memory
from ..policies import Moments
from .autograd_graph import BackwardError, added, any_made_before, float32_parts, values_of
from .blocks import Between, BlockForward, CutError, Exit, Visit
from .parts import Part, present
from .pieces import Pieces

_log = logging.getLogger(__name__)


class RunningMoments:
    """Of gradients, or the same part of each, that come one by one."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros((), device="cpu")
        self.scatter = 0.0
        """sum of their squared distances from the mean"""

    def add(self, _: int, gradient: Tensor) -> None:
        """That of one more pass, in float32."""
        self.count += 1
        if self.count == 1:
            self.mean = gradient
            return
        apart = gradient - self.mean
        self.scatter += whole_value(values_of(apart).square().sum()) * (self.count - 1) / self.count
        self.mean = self.mean + apart / self.count


class RunningComparison:
    """Of gradients, or the same part of each, with that of pass 0; they come in any order."""

    def __init__(self) -> None:
        self._exact: Tensor | None = None
        self._before: list[Tensor] = []
        self.square = 0.0
        """squared norm of that of pass 0"""
        self.error = 0.0
        """sum of the others' squared distances from it"""

    def add(self, number: int, gradient: Tensor) -> None:
        """That of one more pass, in float32."""
        if number == 0:
            self._exact, self.square = gradient, squared_distance(gradient)
            while self._before:
                self.error += squared_distance(self._before.pop(), gradient)
        elif self._exact is None:
            self._before.append(gradient)
        else:
            self.error += squared_distance(gradient, self._exact)

    def finish(self) -> None:
        """When all have come: where pass 0 had none, it is zero."""
        self.error += sum(map(squared_distance, self._before))


def squared_distance(gradient: Tensor, other: Tensor | None = None) -> float:
    """|gradient - other|^2, other being zero by default. A collective call for distributed tensors.

    In float64, in which the square of a finite float32 is finite; slice by slice, as a copy of the gradient of a large
    vocabulary could be the peak of a step.
    """
    norms = []
    for part, zero in zip(_slices(gradient), repeat(None) if other is None else _slices(other), strict=False):
        apart = part if zero is None else part - zero
        norms.append(torch.linalg.vector_norm(values_of(apart), dtype=torch.float64))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return whole_value(norm) ** 2


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    """Of a few elements each, whatever the strides; a distributed and a sparse tensor as they are."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.numel() <= _SLICE_NUMEL:
        return [tensor]
    length = max(tensor.shape)
    return tensor.split(max(1, length * _SLICE_NUMEL // tensor.numel()), tensor.shape.index(length))


_SLICE_NUMEL = 2**20
_Running = TypeVar("_Running", RunningMoments, RunningComparison)


class GradientsInParts(ABC, Generic[_Running]):
    """What is learnt of several gradients that come in parts, with no whole gradient there at any time."""

    def __init__(self, uses: Counter[Any], passes: int) -> None:
        """uses: by parameter, how many parts of a model use it."""
        self._left = uses
        self._shared = {key for key, count in uses.items() if count > 1}
        self._passes = passes
        self._sums: dict[Any, list[Tensor | None]] = {}
        self._running: dict[Any, _Running] = {}

    @abstractmethod
    def _start(self) -> _Running:
        """For a parameter whose first gradient comes."""

    @abstractmethod
    def _finish(self, running: _Running) -> None:
        """All gradients of a parameter have come."""

    def add(self, key: Any, number: int, gradient: Tensor | None) -> None:
        """What one part of the model contributes to a parameter's gradient in one pass."""
        if gradient is None:
            return
        gradient = float32_parts(gradient)
        if key not in self._shared:
            self._one_more(key, number, gradient)
            return
        sums = self._sums.setdefault(key, [None] * self._passes)
        before = sums[number]
        sums[number] = gradient if before is None else added(before, gradient)

    def leave(self, keys: Iterable[Any]) -> None:
        """One part of the model, with these parameters, has contributed all it will."""
        for key in keys:
            self._left[key] -= 1
            if self._left[key] == 0:
                self._complete(key)

    def _one_more(self, key: Any, number: int, gradient: Tensor) -> None:
        if key not in self._running:
            self._running[key] = self._start()
        self._running[key].add(number, gradient)

    def _complete(self, key: Any) -> None:
        for number, gradient in enumerate(self._sums.pop(key, ())):
            if gradient is not None:
                self._one_more(key, number, gradient)
        running = self._running.pop(key, None)
        if running is not None:
            self._finish(running)

    def _complete_all(self) -> None:
        """When all parts have been visited."""
        for key in [*self._sums, *self._running]:
            self._complete(key)


class GradientMoments(GradientsInParts[RunningMoments]):
    """The moments of gradients that differ in their rounding."""

    def __init__(self, uses: Counter[Any], passes: int) -> None:
        super().__init__(uses, passes)
        self._scatter = self._square = 0.0

    def _start(self) -> RunningMoments:
        return RunningMoments()

    def _finish(self, running: RunningMoments) -> None:
        self._scatter += running.scatter
        self._square += whole_value(values_of(running.mean).square().sum())

    def moments(self) -> Moments:
        """When all parts have been visited."""
        self._complete_all()
        noise = self._scatter / (self._passes - 1)
        return Moments(noise, self._square - noise / self._passes)


class GradientComparison(GradientsInParts[RunningComparison]):
    """How far the gradients of other passes are from that of pass 0."""

    def __init__(self, uses: Counter[Any], passes: int) -> None:
        super().__init__(uses, passes)
        self._error = self._square = 0.0

    def _start(self) -> RunningComparison:
        return RunningComparison()

    def _finish(self, running: RunningComparison) -> None:
        running.finish()
        self._error += running.error
        self._square += running.square

    def result(self) -> tuple[float, float]:
        """(mean squared distance from the gradient of pass 0, its squared norm), when all parts have been visited."""
        self._complete_all()
        return self._error / (self._passes - 1), self._square


class RoundedForward(BlockForward):
    """A forward for a rounded walk, in which blocks run again from rounded inputs.

    What a selective checkpoint keeps is made from exact ones, as in a step, and held until the walk comes to its block.
    """

    def _keep_result(self, tensor: Tensor, operator: Any, way: Way) -> Any:
        kept = super()._keep_result(tensor, operator, way)
        holds = isinstance(kept, Noted) and way is not Way.AGAIN and not shares_memory(operator)
        if holds and self._current is not None:
            self._current.results[kept] = self.boundary(tensor)
        return kept


class RoundedWalk:
    """The walk over the blocks of one forward. See [Note: rounded walk]."""

    def __init__(self, forward: BlockForward, draws: Sequence[Draw]) -> None:
        """forward: that has run and has its graph, which is freed on the way. draws: one for each pass."""
        self._forward, self._draws = forward, draws
        self._between = [draw.payloads(forward.between) for draw in draws]
        forward.leave_to_graph()
        self._read_again = _shared_parts(forward)
        self._gradients: dict[tuple[Exit, int], Tensor] = {}
        """by exit and pass"""
        self._uses = Counter(self._leaves_of(forward.last))
        for visit in forward.visits:
            self._uses.update(visit.leaves)
            self._uses.update(self._leaves_of(visit.before))
        self._found: GradientsInParts[Any]
        self._pieces: Mapping[Visit, list[set[Any]]] = {}

    def moments(self) -> Moments:
        """Of the gradient of all parameters, over the passes."""
        self._found = found = GradientMoments(self._uses, len(self._draws))
        self._walk()
        return found.moments()

    def comparison(self, pieces: Mapping[Visit, list[set[Any]]]) -> tuple[float, float]:
        """Of the gradient of all parameters in other passes with that in pass 0. See GradientComparison.

        pieces: of blocks in which pass 0, which rounds nothing, is to hold no more at once ([Note: pieces] in
        pieces.py).
        """
        self._pieces = pieces
        self._found = found = GradientComparison(self._uses, len(self._draws))
        self._walk()
        return found.result()

    def _walk(self) -> None:
        between: Between | None = self._forward.last
        entering: list[list[Tensor | None] | None] = [[] for _ in self._draws]
        visits = self._forward.visits
        while visits:
            visit = visits.pop()
            entering = self._through(visit, between, entering)
            self._found.leave(visit.leaves)
            between = visit.before
        for number in range(len(self._draws)):
            self._flow(between, number, entering.pop(0))

    def _leaves_of(self, between: Between | None) -> list[Any]:
        """In an order that all ranks have: what is complete takes collectives under tensor parallelism."""
        leaves = [] if between is None else between.leaves
        return list(dict.fromkeys(self._forward.key_of(edge) for _, edge in leaves))

    def _through(
        self, visit: Visit, between: Between | None, entering: list[list[Tensor | None] | None]
    ) -> list[list[Tensor | None] | None]:
        """For each pass the gradients at a block's inputs, None where none reaches it. entering: those at the heads of
        what lies between the block and the one that follows; they are let go of.

        One pass after the other takes both, so that a gradient at a block's outputs is there for one pass at a time:
        that at the logits of a language model is of all words.
        """
        found: list[list[Tensor | None] | None] = []
        is_reached = False
        with ExitStack() as stack:
            for number in range(len(self._draws)):
                self._flow(between, number, entering.pop(0))
                at_outputs = [self._gradients.pop((end, number), None) for _, end in visit.exits]
                if all(gradient is None for gradient in at_outputs):
                    found.append(None)
                    continue
                if not is_reached:
                    is_reached = True
                    for module in visit.modules:  # once for all passes
                        stack.enter_context(gathered(module))
                at_inputs = self._in_pieces(visit, at_outputs) if number == 0 and visit in self._pieces else None
                if at_inputs is None:
                    at_inputs = self._one_pass_through(visit, number, at_outputs)
                found.append(at_inputs)
        return found

    def _in_pieces(self, visit: Visit, entering: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """The gradients of pass 0 at a block's inputs; None where it has to be taken as a whole."""
        keep = StoredAgain(self._draws[0])
        try:
            with self._rounded(0):
                pieces = Pieces(partial(self._forward.again, visit), self._pieces[visit], keep, bool(visit.outer))
                found = pieces.gradients(entering)
        except (ReplayError, CutError, BackwardError) as error:
            _log.debug("%s: comparing a block as a whole", error)
            return None
        finally:
            visit.made = []
        return self._contributed(found, pieces.leaves, 0)

    def _one_pass_through(self, visit: Visit, number: int, entering: list[Tensor | None]) -> list[Tensor | None]:
        """The graph alone holds what the block saves and what enters it, and frees that as the backward goes on."""
        keep = StoredAgain(self._draws[number])
        with self._rounded(number), self._forward.again(visit, keep) as (part, replay, _):
            if number + 1 == len(self._draws):
                visit.release_inputs()
            if replay is not None:
                replay.forget()
            keep.forget()
            visit.made = []
            heads, given = present(part.heads, entering)
            if not heads:
                return [None] * len(part.tails)
            root = _Entry.apply(given, *heads)
            for held in (part.heads, heads, entering):
                held.clear()
            part = Part([root], part.tails, part.leaves, ())
            return self._gradients_of(part, None, number, retain_graph=bool(visit.outer))

    def _flow(self, between: Between | None, number: int, entering: list[Tensor | None] | None) -> None:
        """The gradients at the exits above a part of the forward's graph, in one pass. entering: at its heads."""
        if between is None:
            return
        is_last = number + 1 == len(self._draws)
        heads, given = ([], None) if entering is None else present(between.heads, entering)
        if heads:
            retain_graph = not is_last or between in self._read_again
            retain_graph = retain_graph or any_made_before(between.nodes, self._forward.began)
            with self._rounded(number):
                part = Part(heads, [end.edge for end in between.tails], between.leaves, ())
                found = self._gradients_of(part, given, number, retain_graph)
            for end, gradient in zip(between.tails, found, strict=False):
                self._add_to(end, number, gradient)
        if is_last:
            self._found.leave(self._leaves_of(between))

    def _gradients_of(
        self, part: Part, entering: Sequence[Tensor] | None, number: int, retain_graph: bool = True
    ) -> list[Tensor | None]:
        """The gradients at a part's tails; those of its parameters are added to what is found."""
        return self._contributed(part.gradients(entering, retain_graph=retain_graph), part.leaves, number)

    def _contributed(
        self, found: list[Tensor | None], leaves: Sequence[tuple[str, GradientEdge]], number: int
    ) -> list[Tensor | None]:
        """Add the gradients at some leaves, which come last; the others are left."""
        count = len(found) - len(leaves)
        for (_, edge), gradient in zip(leaves, found[count:], strict=True):
            self._found.add(self._forward.key_of(edge), number, gradient)
        return found[:count]

    def _add_to(self, end: Exit, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            before = self._gradients.get((end, number))
            self._gradients[end, number] = gradient if before is None else before + gradient

    @contextmanager
    def _rounded(self, number: int) -> Iterator[None]:
        """Within the context what lies between blocks is as one pass stores it, decoded where it is used."""
        for handle, payload in self._between[number].items():
            handle.on_restore = partial(_decode, handle, payload)
        try:
            yield
        finally:
            for handle in self._between[number]:
                handle.on_restore = handle.replacement = None


class _Entry(Function):
    """A scalar whose backward passes given gradients to some tensors, and holds them no longer."""

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *heads: Tensor) -> Tensor:
        ctx.given = given
        return torch.zeros((), device=heads[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        given = None, *ctx.given
        ctx.given.clear()
        return given


def _shared_parts(forward: BlockForward) -> set[Between]:
    """What lies between blocks and has nodes in common with others, or with blocks."""
    parts = [forward.last, *(visit.before for visit in forward.visits if visit.before is not None)]
    nodes = [{node for node in part.nodes if not hasattr(node, "variable")} for part in parts]
    uses = Counter(node for found in (*nodes, *(visit.outer for visit in forward.visits)) for node in found)
    return {part for part, found in zip(parts, nodes, strict=True) if any(uses[node] > 1 for node in found)}


def _decode(handle: Replaceable, payload: Content) -> None:
    if handle.replacement is not None:
        return
    if isinstance(payload, codec.Packed) and payload.scheme is codec.Scheme.SAMPLED:
        handle.replacement = payload  # the only reader of a log-softmax decodes some rows at a time
    else:
        handle.replacement = decoded(payload)
