"""A gradient under rounding, several times, one block at a time.

[Note: rounded walk] A backward under rounding visits the blocks from the last to the first. Each runs again as in
walk.py, but what it saves is stored as a step would store it, and its backward turns the gradient at its outputs into
that at its inputs. All passes walk side by side, each with other random numbers. So the gradients of one parameter are
there for all passes at the same time, and only their contributions to the two moments remain. A parameter that several
parts of the model use is the exception: the gradients of each pass are summed until the last of these parts is visited.
A pass may also store nothing rounded: comparison.py has the others beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .. import codec
from ..distributed import gathered, whole_value
from ..hooks import Draw, Replaceable, StoredAgain
from ..policies import Moments
from .autograd_graph import added, float32_parts, values_of
from .blocks import Between, BlockForward, Exit, Visit
from .parts import Part, present


class RunningMoments:
    """Of gradients, or the same part of each, that come one by one."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor = torch.zeros((), device="cpu")
        self.scatter = 0.0
        """sum of their squared distances from the mean"""

    def add(self, gradient: Tensor) -> None:
        """One more, in float32."""
        self.count += 1
        if self.count == 1:
            self.mean = gradient
            return
        apart = gradient - self.mean
        self.scatter += whole_value(values_of(apart).square().sum()) * (self.count - 1) / self.count
        self.mean = self.mean + apart / self.count


class RunningComparison:
    """Of gradients, or the same part of each, with the first one."""

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self.square = 0.0
        """squared norm of the first"""
        self.error = 0.0
        """sum of the others' squared distances from it"""

    def add(self, gradient: Tensor) -> None:
        """One more, in float32."""
        if self._first is None:
            self._first, self.square = gradient, squared_norm(gradient)
        else:
            self.error += squared_norm(gradient - self._first)


def squared_norm(gradient: Tensor) -> float:
    """In float64, in which the square of a finite float32 is finite. A collective call for a distributed tensor."""
    return whole_value(torch.linalg.vector_norm(values_of(gradient), dtype=torch.float64)) ** 2


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
        """What one part of the model contributes to a parameter's gradient in one pass; passes come in their order."""
        if gradient is None:
            return
        gradient = float32_parts(gradient)
        if key not in self._shared:
            self._one_more(key, gradient)
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

    def _one_more(self, key: Any, gradient: Tensor) -> None:
        if key not in self._running:
            self._running[key] = self._start()
        self._running[key].add(gradient)

    def _complete(self, key: Any) -> None:
        for gradient in self._sums.pop(key, ()):
            if gradient is not None:
                self._one_more(key, gradient)
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
    """How far the later gradients are from the first."""

    def __init__(self, uses: Counter[Any], passes: int) -> None:
        super().__init__(uses, passes)
        self._error = self._square = 0.0

    def _start(self) -> RunningComparison:
        return RunningComparison()

    def _finish(self, running: RunningComparison) -> None:
        self._error += running.error
        self._square += running.square

    def result(self) -> tuple[float, float]:
        """(mean squared distance from the first gradient, its squared norm), when all parts have been visited."""
        self._complete_all()
        return self._error / (self._passes - 1), self._square


class RoundedWalk:
    """The walk over the blocks of one forward. See [Note: rounded walk]."""

    def __init__(self, forward: BlockForward, draws: Sequence[Draw | None]) -> None:
        """forward: that has run and has its graph. draws: one for each pass, None: nothing is rounded."""
        self._forward, self._draws = forward, draws
        self._between = [{} if draw is None else draw.payloads(forward.between) for draw in draws]
        self._gradients: dict[Exit, list[Tensor | None]] = {}
        self._uses = Counter(self._leaves_of(forward.last))
        for visit in forward.visits:
            self._uses.update(visit.leaves)
            self._uses.update(self._leaves_of(visit.before))
        self._found: GradientsInParts[Any]

    def moments(self) -> Moments:
        """Of the gradient of all parameters, over the passes."""
        self._found = found = GradientMoments(self._uses, len(self._draws))
        self._walk()
        return found.moments()

    def comparison(self) -> tuple[float, float]:
        """Of the gradient of all parameters in the later passes with that in the first. See GradientComparison."""
        self._found = found = GradientComparison(self._uses, len(self._draws))
        self._walk()
        return found.result()

    def _walk(self) -> None:
        self._flow(self._forward.last, [[]] * len(self._draws))
        for visit in reversed(self._forward.visits):
            gradients = [self._gradients.pop(end, [None] * len(self._draws)) for _, end in visit.exits]
            if any(gradient is not None for passes in gradients for gradient in passes):
                self._flow(visit.before, self._through(visit, gradients))
            else:
                self._found.leave(self._leaves_of(visit.before))
            self._found.leave(visit.leaves)

    def _leaves_of(self, between: Between | None) -> list[Any]:
        """In an order that all ranks have: what is complete takes collectives under tensor parallelism."""
        leaves = [] if between is None else between.leaves
        return list(dict.fromkeys(self._forward.key_of(edge) for _, edge in leaves))

    def _through(self, visit: Visit, gradients: Sequence[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """For each pass the gradients at a block's inputs. gradients: at each of its exits, for each pass."""
        found = []
        with ExitStack() as stack:
            for module in visit.modules:  # once for all passes
                stack.enter_context(gathered(module))
            for number in range(len(self._draws)):
                entering = [passes[number] for passes in gradients]
                found.append(self._one_pass_through(visit, number, entering))
        return found

    def _one_pass_through(self, visit: Visit, number: int, entering: Sequence[Tensor | None]) -> list[Tensor | None]:
        draw = self._draws[number]
        keep: Callable[[Tensor, Any], Any] = _as_it_is if draw is None else StoredAgain(draw)
        with self._rounded(number), self._forward.again(visit, keep) as (part, _, _):
            heads, given = present(part.heads, entering)
            return self._gradients_of(Part(heads, part.tails, part.leaves, ()), given, number)

    def _flow(self, between: Between | None, entering: Sequence[Sequence[Tensor | None]]) -> None:
        """The gradients at the exits above a part of the forward's graph. entering: for each pass, at its heads."""
        if between is None:
            return
        for number, gradients in enumerate(entering):
            heads, given = present(between.heads, gradients)
            if not heads:
                continue
            with self._rounded(number):
                part = Part(heads, [end.edge for end in between.tails], between.leaves, ())
                found = self._gradients_of(part, given, number)
            for end, gradient in zip(between.tails, found, strict=False):
                self._add_to(end, number, gradient)
        self._found.leave(self._leaves_of(between))

    def _gradients_of(self, part: Part, entering: Sequence[Tensor] | None, number: int) -> list[Tensor | None]:
        """The gradients at a part's tails; those of its parameters are added to what is found."""
        found = part.gradients(entering)
        count = len(part.tails)
        for (_, edge), gradient in zip(part.leaves, found[count:], strict=False):
            self._found.add(self._forward.key_of(edge), number, gradient)
        return found[:count]

    def _add_to(self, end: Exit, number: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            sums = self._gradients.setdefault(end, [None] * len(self._draws))
            before = sums[number]
            sums[number] = gradient if before is None else before + gradient

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


def _as_it_is(tensor: Tensor, _: Any) -> Replaceable:
    return Replaceable(tensor)


def _decode(handle: Replaceable, payload: Tensor | codec.Packed) -> None:
    if handle.replacement is None:
        handle.replacement = payload if isinstance(payload, Tensor) else codec.unpack(payload)
