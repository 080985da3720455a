"""The products of random directions with the Jacobians of a model's backward, one block at a time.

[Note: block by block] Let the forward be blocks and what lies between them. Each block runs alone three times, keeping
only its inputs x (and later d, the gradient at its outputs) in between:

    forward           y = f(x)                          noted: the names of what it saves
    first walk        last block first: f again, and its backward at d gives e, the gradient at x
    second walk       first block first: f again, its backward again with create_graph, (e, g) = b(d, h)
                      with the saved tensors h; and for each direction v
                      J^T v = d(<u, e> + <v, g>) / dh       the products of this block's saved tensors
                      w     = d(<u, e> + <v, g>) / dd       for the blocks after it

u is the tangent of x when all parameters move along v. What lies between blocks is a part of the graph with heads,
where gradients enter, and tails, where they leave. It is differentiated in the same way, and turns the w of the blocks
before it into the u of the block after it. These are the numbers of one double backward of the whole, bit for bit, but
only one block's graph and one block's parameters are there at a time, and the gradient never exists as a whole. No
operator needs a forward derivative.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from .. import codec
from .._patches import replaced
from .._torch_internals import checkpoint_calls, keeps_tensors
from ..distributed import gathered, unwrap, user_path
from ..hooks import (
    Noted,
    Recorded,
    Replaceable,
    Replay,
    Replayed,
    ReplayError,
    SavedTensorHooks,
    View,
    made_from_parameters,
    map_tensors,
    origin,
    producer,
    tensors_of,
)
from .autograd_graph import float32_parts, scalar
from .measuring_mode import MeasuringMode
from .perturbation import from_change, own_bits, rounding_of, square_distance, widest_inexact
from .surroundings import Surroundings, copied

_log = logging.getLogger(__name__)
_ERROR_NODES = ("torch::autograd::Error", "torch::autograd::DelayedError", "torch::autograd::NotImplemented")


class OpaqueError(RuntimeError):
    """A part of a model has an operator whose backward cannot be differentiated."""


class CutError(RuntimeError):
    """A block cannot be run alone."""

    def __init__(self, block: _Visit, why: Exception) -> None:
        super().__init__(str(why))
        self._modules = block.modules

    def concerns(self, block: nn.Module) -> bool:
        """Whether it was this block; all of them, where it was no module but a function that is checkpointed."""
        return not self._modules or any(module is block for module in self._modules)


# -- cuts in a graph ------------------------------------------------------------------------------------------------


@cache
def _source(name: str) -> Any:
    """A function that starts a graph anew at a tensor, under the name of the node that made the tensor before.

    What it returns shares the tensor's memory; its node holds nothing.
    """

    class Source(Function):
        @staticmethod
        def forward(ctx: Any, start: Tensor, tensor: Tensor) -> Tensor:
            return tensor.data

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
            return None, None

    Source._backward_cls.__name__ = name
    return Source


def _cut(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor with a graph that starts here. like: the tensor that it stands for, itself by default."""
    made = tensor if like is None else like
    node = producer(origin(made)) if made.grad_fn is not None else None
    name = "Source" if node is None else node.name()
    return _source(name).apply(torch.zeros((), requires_grad=True), tensor.detach())


def _may_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor is computed from activations; parameters, and what is made of them, are no boundaries."""
    return tensor.requires_grad and tensor.grad_fn is not None and not made_from_parameters(tensor.grad_fn)


class _Boundary:
    """A tensor at the border of a block, until the block runs again."""

    def __init__(self, tensor: Tensor, bits: int | None, seed: int) -> None:
        self._packed: codec.Packed | None = None
        self._tensor: Tensor | None = None
        if bits is not None and tensor.is_floating_point() and type(tensor) is Tensor:
            with torch.no_grad():
                self._packed = codec.pack(tensor.detach(), bits, seed)
        else:
            self._tensor, self._version = tensor.detach(), tensor._version

    def value(self) -> Tensor:
        """Raises ReplayError if it was modified in place meanwhile."""
        if self._packed is not None:
            return codec.unpack(self._packed)
        if self._tensor is None or self._tensor._version != self._version:
            raise ReplayError("an input was modified in place after the block had run")
        return self._tensor


@dataclass(eq=False)
class _Exit:
    """An output of a block, where the graph of what follows starts."""

    edge: GradientEdge
    gradient: Tensor | None = None
    tangents: list[Tensor] | None = None
    """one for each direction"""

    def add(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


# -- parts of a walk ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Between:
    """What lies between some blocks and one that follows, or the loss: a part of the forward's own graph."""

    heads: list[GradientEdge]
    tails: list[_Exit]
    leaves: list[tuple[str, GradientEdge]]
    nodes: list[Any]
    used: set[Replayed] = field(default_factory=set)
    entering: list[Any] = field(default_factory=list)
    """boundaries of the gradients at its heads, None where there is none; empty before the loss"""


@dataclass(eq=False)
class _Visit:
    """One run of a block."""

    function: Callable[..., Any]
    modules: list[nn.Module]
    arguments: tuple[tuple, dict]
    """as they were, with boundaries in place of the tensors that were cut"""
    surroundings: Surroundings
    checkpointed: bool
    inputs: list[tuple[int, Any, GradientEdge]] = field(default_factory=list)
    """(index among the tensors of the arguments, _Boundary or what a checkpoint recorded, edge of the graph before)"""
    outcomes: list[Any] = field(default_factory=list)
    own: set[Noted] = field(default_factory=set)
    exits: list[tuple[int, _Exit]] = field(default_factory=list)
    """(index among the tensors of the outputs, exit)"""
    before: _Between | None = None
    gradients: list[Any] = field(default_factory=list)
    """boundaries: of the gradient at each exit, None where there is none"""

    def recorded(self) -> set[Any]:
        """What the block saves, in whichever part of the model it was stored first."""
        views = (outcome.base for outcome in self.outcomes if isinstance(outcome, View))
        return {*self.own, *views, *(kept.handle for _, kept, _ in self.inputs if isinstance(kept, Recorded))}


class Measured(NamedTuple):
    """What the second walk found of one compressible tensor."""

    first: Any
    """as in Walk.found"""
    tensor: Tensor | None
    """as it is; None if the loss does not depend on it"""
    weight: Tensor | None
    """mean square of its products with the directions"""
    variance: Tensor | None
    """float64 [8], where it was perturbed instead"""


class Tally:
    """What is known of one saved tensor: the products of all that reads it."""

    def __init__(self) -> None:
        self.uses = 0
        """parts of the walk that have yet to add to it"""
        self.tensor: Tensor | None = None
        self.squares: Tensor | None = None
        self.sums: list[Tensor] = []
        """products that are not complete yet, one for each direction, laid out as the tensor"""

    def add(self, product: Tensor, view: View | None, direction: int, directions: int) -> None:
        """One product, in the shape of the tensor or of a view of it."""
        if self.uses == 1 and not self.sums:
            square = product.square() / directions
            self.squares = square if self.squares is None else self.squares.add_(square)
            return
        while len(self.sums) < directions:
            self.sums.append(torch.zeros_like(product if self.tensor is None else self.tensor, dtype=product.dtype))
        total = self.sums[direction]
        (total if view is None else total.as_strided(view.size, view.stride, view.offset)).add_(product)

    def weight(self) -> Tensor | None:
        """Mean square of the complete products over the directions; None if all of them are zero."""
        if self.sums:
            self.squares = torch.stack([total.square() for total in self.sums]).mean(0)
            self.sums = []
        return self.squares if self.squares is not None and bool(self.squares.any()) else None


@dataclass(eq=False)
class _Part:
    """A part of the graph that is differentiated twice: gradients enter at its heads, leave at its tails and leaves."""

    heads: Sequence[Any]
    tails: Sequence[GradientEdge]
    leaves: Sequence[tuple[str, GradientEdge]]
    nodes: Sequence[Any]

    def gradients(self, entering: Sequence[Tensor] | None, create_graph: bool = False) -> list[Tensor | None]:
        """At tails, then leaves."""
        inputs = [*self.tails, *(edge for _, edge in self.leaves)]
        if not inputs:
            return []
        return list(
            torch.autograd.grad(
                self.heads, inputs, entering, retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        )


class Walk:
    """One forward of a model in which its blocks are noted, and the two walks over them. See [Note: block by block]."""

    def __init__(
        self,
        hooks: SavedTensorHooks,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        mode: MeasuringMode,
        *,
        seed: int,
        directions: int,
        boundary_bits: int | None = None,
    ) -> None:
        """boundary_bits: at which tensors at the borders of blocks are kept, None for exactly."""
        self._hooks, self._blocks, self._mode = hooks, blocks, mode
        self._seed, self._directions, self._boundary_bits = seed, directions, boundary_bits
        self._paths = {id(module): path for path, module in unwrap(model).named_modules(remove_duplicate=False)}
        self._model = unwrap(model)
        self._names: dict[int, str] = {}
        self._visits: list[_Visit] = []
        self._exits: dict[Any, _Exit] = {}
        self._current: _Visit | None = None
        self._passing = False  # a region that is not cut is running
        self._open = ExitStack()  # of the current visit, or for what is gathered outside of one until the end
        self.found: list[Recorded | Noted] = []
        self._between_blocks: list[Replayed] = []

    # -- forward --------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self, run: Callable[[], Any], fraction: float) -> Iterator[None]:
        """Run the forward; within the context its graph is there. run: returns the loss, or calls backward on it."""
        with ExitStack() as self._open:
            self._names = _names_of(self._paths, [self._model])  # of the job: sharding may change them to gather
            again: list[Replayed] = []
            recording = self._hooks.recording(self._mode, fraction, again=again)
            with recording as self.found, self._intercepted():
                result = run()
            own = [Replayed(record, record.handle, None) for record in self.found if isinstance(record, Recorded)]
            self._between_blocks = [*own, *again]
            self._mode.on_discrete = None
            root = scalar(self._mode.root_of(result))
            self._last = self._between([get_gradient_edge(root)])
            for visit in self._visits:
                visit.before = self._between([head for _, _, head in visit.inputs])
            self._number()
            yield

    def _number(self) -> None:
        """Number the compressible tensors in the order of the forward. What the graph holds of each stands for it."""
        held = [(record.handle if isinstance(record, Recorded) else record, record) for record in self.found]
        compressible = [(key, record) for key, record in held if record.compressible]
        self._numbers = {key: number for number, (key, _) in enumerate(compressible)}
        self._firsts = dict(compressible)

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(replaced(block, "forward", self._at_block(block)))
            if self._blocks:
                stack.enter_context(checkpoint_calls(self._at_checkpoint))
            yield

    def _at_block(self, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        @wraps(forward)
        def visit(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                with gathered(block):
                    return forward(*args, **kwargs)
            if self._current is None and not self._passing:
                return self._visit(forward, [block], args, kwargs, False)
            self._gather(block)
            return forward(*args, **kwargs)

        return visit

    def _gather(self, block: nn.Module) -> None:
        """What a block inside of another, or of a checkpoint, needs stays as long as what is around it."""
        modules = [] if self._current is None else self._current.modules
        if not any(module is block for module in modules):
            modules.append(block)
            self._open.enter_context(gathered(block))

    def _at_checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """In place of torch.utils.checkpoint.checkpoint: outside of blocks, what it runs is a block."""
        if self._current is not None or self._passing or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kw)
        if "context_fn" in kw or kw.get("use_reentrant", True) is not False:  # reentrant ones come back as others
            self._passing = "context_fn" in kw
            try:
                return checkpoint(function, *args, **kw)
            finally:
                self._passing = False
        known = len(self.found)

        def visit(*inputs: Any, **named: Any) -> Any:
            kept = [record for record in self.found[known:] if isinstance(record, Recorded)]
            return self._visit(function, [], inputs, named, True, kept)

        return checkpoint(visit, *args, **kw)

    def _visit(
        self,
        function: Callable[..., Any],
        modules: list[nn.Module],
        args: tuple,
        kwargs: dict,
        checkpointed: bool,
        kept: Sequence[Recorded] = (),
    ) -> Any:
        tensors = tensors_of((args, kwargs))
        chosen = {number: tensor for number, tensor in enumerate(tensors) if _may_be_cut(tensor)}
        arguments = _substituted(copied((args, kwargs)), dict.fromkeys(chosen, _NOTHING))
        outer, self._open = self._open, ExitStack()
        with self._open:
            try:
                for module in modules:
                    self._open.enter_context(gathered(module))
                around = Surroundings(modules, [tensor.device.type for tensor in tensors])
                visit = _Visit(function, modules, arguments, around, checkpointed)
                for number, tensor in chosen.items():
                    visit.inputs.append((number, self._kept(tensor, kept), get_gradient_edge(tensor)))
                cut = {number: _cut(tensor) for number, tensor in chosen.items()}
                args, kwargs = _substituted((args, kwargs), cut)
                known = len(self.found)
                self._current = visit
                with _nothing_kept() if checkpointed else self._hooks.noting(visit.outcomes):
                    outputs = function(*args, **kwargs)
            finally:
                self._current, self._open = None, outer
        if any(tensor._version for tensor in cut.values()):
            raise CutError(visit, ReplayError("it modifies an input in place"))
        visit.own = {record for record in self.found[known:] if isinstance(record, Noted)}
        around.settle()
        self._visits.append(visit)
        ends = {}
        for number, tensor in enumerate(tensors_of(outputs)):
            if _may_be_cut(tensor):
                ends[number] = start = _cut(tensor)
                edge = get_gradient_edge(start)
                self._exits[edge.node] = last = _Exit(edge)
                visit.exits.append((number, last))
        return _substituted(outputs, ends)

    def _kept(self, tensor: Tensor, kept: Sequence[Recorded]) -> Any:
        """What stands for an input until its block runs again: what the checkpoint keeps of it, or a boundary."""
        for record in kept:
            same = record.tensor.data_ptr() == tensor.data_ptr() and record.tensor.shape == tensor.shape
            if same and record.tensor.stride() == tensor.stride():
                return record
        return self._boundary(tensor)

    def _boundary(self, tensor: Tensor) -> _Boundary:
        return _Boundary(tensor, self._boundary_bits, self._seed + len(self._visits))

    def _between(self, heads: Sequence[GradientEdge]) -> _Between:
        nodes, tails, leaves = self._reach([head.node for head in heads])
        return _Between(list(heads), tails, leaves, nodes)

    def _reach(self, roots: Sequence[Any], ends: Sequence[Any] = ()) -> tuple[list, list, list]:
        """(nodes, exits, leaves) below some nodes, as far as the exits of blocks. ends: nodes to stop at."""
        nodes: dict[Any, None] = dict.fromkeys(ends)
        tails: list[_Exit] = []
        leaves: list[tuple[str, GradientEdge]] = []
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node is None or node in nodes:
                continue
            nodes[node] = None
            if node in self._exits:
                tails.append(self._exits[node])
            elif hasattr(node, "variable"):
                name = self._names.get(id(node.variable))
                if name is not None or isinstance(node.variable, nn.Parameter) or not self._names:
                    leaves.append((name or f"leaf {len(leaves)}", GradientEdge(node, 0)))
            else:
                pending += [below for below, _ in node.next_functions]
        return [node for node in nodes if node not in self._exits], tails, leaves

    # -- a block again ----------------------------------------------------------------------------------------------

    @contextmanager
    def _again(self, visit: _Visit, exact: bool) -> Iterator[tuple[_Part, Replay | None, list[Tensor]]]:
        """Within the context the block has its graph. exact: its saved tensors are kept beside their rounded values."""
        with ExitStack() as stack:
            for module in visit.modules:
                stack.enter_context(gathered(module))
            try:
                outputs, inputs, replay = self._run(visit, exact)
            except ReplayError as error:
                raise CutError(visit, error) from error
            heads = [outputs[number] for number, _ in visit.exits]
            self._names.update(_names_of(self._paths, visit.modules))
            ends = [tensor.grad_fn for tensor in inputs]
            nodes, _, leaves = self._reach([head.grad_fn for head in heads], ends)
            yield _Part(heads, [get_gradient_edge(tensor) for tensor in inputs], leaves, nodes), replay, inputs

    def _run(self, visit: _Visit, exact: bool) -> tuple[list[Tensor], list[Tensor], Replay | None]:
        values = {number: _cut(_value(kept)) for number, kept, _ in visit.inputs}
        args, kwargs = _substituted(copied(visit.arguments), values)
        replay = None if visit.checkpointed else Replay(visit.outcomes, visit.own, partial(self._keep, exact))
        with ExitStack() as stack:
            stack.enter_context(visit.surroundings.again())
            if replay is not None:
                stack.enter_context(replay.hooks())
            stack.enter_context(self._mode)
            outputs = tensors_of(visit.function(*args, **kwargs))
        if any(number >= len(outputs) or not outputs[number].requires_grad for number, _ in visit.exits):
            raise ReplayError("it returned something else")
        return outputs, list(values.values()), replay

    def _keep(self, exact: bool, tensor: Tensor, first: Any) -> Replaceable:
        number = self._numbers.get(first)
        if number is None:
            return Replaceable(tensor)
        rounded = self._rounded(tensor, self._name_of(first), number)
        handle = Replaceable(tensor if exact or rounded is None else rounded)
        if exact:
            handle.replacement = rounded
        return handle

    def _name_of(self, key: Any) -> str:
        return self._firsts[key].name

    def _rounded(self, tensor: Tensor, name: str, number: int) -> Tensor | None:
        """A tensor as the current plan has it; see [Note: operating point] in one_pass.py."""
        bits = self._hooks.plan.bits_of(name)
        return None if bits is None else self.round(tensor, bits, number)

    def round(self, tensor: Tensor, bits: Any, number: int) -> Tensor:
        """A tensor rounded to some bits; a different number gives a different rounding."""
        with torch.no_grad():
            return codec.unpack(self._hooks.encoder.pack(tensor.detach(), bits, self._seed + number))

    # -- the first walk -----------------------------------------------------------------------------------------------

    def first(self) -> None:
        """From the last block to the first: the gradient at each block's outputs."""
        for item in self._between_blocks:
            number = self._numbers.get(item.first)
            if number is not None:
                item.record.replacement = self._rounded(item.record.tensor, item.record.name, number)
        self._flow(self._last, None)
        for visit in reversed(self._visits):
            gradients = [end.gradient for _, end in visit.exits]
            for _, end in visit.exits:
                end.gradient = None
            if visit.before is None or not any(gradient is not None for gradient in gradients):
                continue
            visit.gradients = [None if gradient is None else self._boundary(gradient) for gradient in gradients]
            if visit.before.tails or visit.before.leaves or visit.before.nodes:
                self._first_of(visit, visit.before, gradients)

    def _first_of(self, visit: _Visit, before: _Between, gradients: list[Tensor | None]) -> None:
        with self._again(visit, exact=False) as (part, _, _):
            heads, entering = _present(part.heads, gradients)
            found = _Part(heads, part.tails, (), ()).gradients(entering)
        before.entering = [None if gradient is None else self._boundary(gradient) for gradient in found]
        self._flow(before, found)

    def _flow(self, between: _Between, entering: list[Tensor | None] | None) -> None:
        """The gradients at the exits above a part of the forward's graph, and which records it reads."""
        heads, given = (between.heads, None) if entering is None else _present(between.heads, entering)
        if not heads:
            return
        for item in self._between_blocks:
            item.record.handle.on_restore = partial(between.used.add, item)
        try:
            found = _Part(heads, [end.edge for end in between.tails], between.leaves, ()).gradients(given)
        finally:
            for item in self._between_blocks:
                item.record.handle.on_restore = None
        for end, gradient in zip(between.tails, found, strict=False):
            end.add(gradient)

    # -- the second walk ----------------------------------------------------------------------------------------------

    def second(self) -> Iterator[Measured]:
        """From the first block to the last: what was measured of each compressible tensor, as it is complete."""
        self._count_uses()
        for visit in self._visits:
            if visit.before is not None and visit.gradients:
                yield from self._second_of(visit, visit.before)
        yield from self._second_between(self._last)[1]
        for key in list(self._tallies):  # the loss does not depend on these
            yield Measured(self._firsts[key], None, None, None)

    def _count_uses(self) -> None:
        self._tallies = {key: Tally() for key in self._numbers}
        for item in self._between_blocks:
            if item.view is None and item.first in self._tallies:
                self._tallies[item.first].tensor = item.record.tensor
        parts: list[set[Any]] = [{item.first for item in self._last.used}]
        for visit in self._visits:
            if visit.before is not None and visit.gradients:
                parts.append({item.first for item in visit.before.used})
                parts.append(visit.recorded())
        for key in (key for part in parts for key in part if key in self._tallies):
            self._tallies[key].uses += 1

    def _second_between(self, between: _Between) -> tuple[list[Any], list[Measured]]:
        """(the tangents at its heads, None where there is none; what is complete with it)."""
        given = [_value(kept) for kept in between.entering]
        heads, entering = _present(between.heads, given)
        part = _Part(heads, [end.edge for end in between.tails], between.leaves, between.nodes)
        tangents = [end.tangents for end in between.tails]
        used = [item for item in self._between_blocks if item in between.used]
        opaque = False
        try:
            found = self._transposed(part, entering, tangents, used)
        except OpaqueError as error:
            if between is not self._last or not self._visits:
                raise  # the blocks after it need its tangents; or the whole model is one part
            _log.info("%s: what the loss saves is measured by perturbation", error)
            found, opaque = [], True
        entered = iter(found)
        filled = [None if gradient is None else next(entered) for gradient in given]
        return filled, list(self._completed(part, entering, tangents, used, opaque))

    def _second_of(self, visit: _Visit, before: _Between) -> Iterator[Measured]:
        tangents, measured = self._second_between(before)
        yield from measured
        gradients = [_value(kept) for kept in visit.gradients]
        visit.gradients = []
        with self._again(visit, exact=True) as (part, replay, inputs):
            part.heads, entering = _present(part.heads, gradients)
            if replay is None:
                found = [
                    Replayed(_input_record(kept, cut), kept.handle, None)
                    for (_, kept, _), cut in zip(visit.inputs, inputs, strict=True)
                    if isinstance(kept, Recorded)
                ]
            else:
                found = replay.found
            opaque = False
            try:
                entered = self._transposed(part, entering, tangents, found, cuts=replay is not None)
            except OpaqueError as error:
                _log.info("%s: what its block saves is measured by perturbation", error)
                entered, opaque = self._by_difference(visit, gradients, tangents), True
            reached = [end for (_, end), gradient in zip(visit.exits, gradients, strict=True) if gradient is not None]
            for end, tangent in zip(reached, entered, strict=True):
                end.tangents = tangent
            yield from self._completed(part, entering, tangents, found, opaque)

    def _transposed(
        self,
        part: _Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        cuts: bool = True,
    ) -> list[list[Tensor] | None]:
        """Add the products of what a part saved; returns the tangents at its heads, for each direction, None where the
        gradient does not depend on what enters there.

        cuts: whether products of one saved tensor with another, through the forward, are left out.
        Raises OpaqueError if its backward cannot be differentiated.
        """
        for item in found:
            tally = self._tallies.get(item.first)
            if tally is not None and tally.tensor is None:
                tally.tensor, item.view = item.record.tensor, None
        sources = [] if entering is None else [_cut(gradient) for gradient in entering]
        leaving = self._differentiable(part, sources if entering is not None else None)
        wanted = [item for item in found if item.first in self._tallies and item.record.node is not None]
        edges = list(dict.fromkeys((item.record.node, item.record.output_number) for item in wanted))
        inputs = [*map(get_gradient_edge, sources), *(GradientEdge(*edge) for edge in edges)]
        entered: list[list[Tensor]] = [[] for _ in sources]
        with _cut_off(found if cuts else ()):
            for direction in range(self._directions):
                products = self._products(part, leaving, tangents, inputs, direction)
                for place, tangent in zip(entered, products, strict=False):
                    place.append(torch.zeros(()) if tangent is None else tangent.detach())
                by_edge = dict(zip(edges, products[len(sources) :], strict=True))
                for item in wanted:
                    product = by_edge[item.record.node, item.record.output_number]
                    if product is not None and not product.is_complex():  # complex ones are perturbed
                        seen = seen_through(item.record, product.detach().float())
                        self._tallies[item.first].add(seen, item.view, direction, self._directions)
        return [place if any(tangent.dim() for tangent in place) else None for place in entered]

    def _differentiable(self, part: _Part, entering: Sequence[Tensor] | None) -> list[Tensor | None]:
        """The gradients of a part with their graph. Raises OpaqueError if some backward leaves it or refuses.

        If it does not run at all, the plain backward of a perturbation raises the error.
        """
        opaque: list[str] = []
        handles = [node.register_hook(_watch(node, opaque)) for node in part.nodes]
        try:
            with _refused():
                found = part.gradients(entering, create_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        if opaque:
            raise OpaqueError(f"backward of {', '.join(sorted(set(opaque)))} has no derivative")
        return found

    def _products(
        self,
        part: _Part,
        leaving: Sequence[Tensor | None],
        tangents: Sequence[list[Tensor] | None],
        inputs: Sequence[GradientEdge],
        direction: int,
    ) -> Sequence[Tensor | None]:
        outputs, weights = [], []
        for number, gradient in enumerate(leaving):
            if gradient is None or not gradient.requires_grad:
                continue
            if number < len(part.tails):
                tangent = tangents[number]
                weight = None if tangent is None or not tangent[direction].dim() else tangent[direction]
            else:
                weight = self._direction(*part.leaves[number - len(part.tails)], gradient, direction)
            if weight is not None:
                outputs.append(gradient)
                weights.append(weight.to(gradient.dtype).reshape(gradient.shape))
        if not outputs or not inputs:
            return [None] * len(inputs)
        with _refused():
            return torch.autograd.grad(outputs, inputs, weights, retain_graph=True, allow_unused=True)

    def _direction(self, name: str, edge: GradientEdge, gradient: Tensor, number: int) -> Tensor:
        """The part of a random direction that belongs to one parameter: made when it is needed, kept nowhere.

        Random numbers of variance one, for real and imaginary parts alike.
        """
        text = f"{self._seed} {number} {name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        generator = torch.Generator(device=gradient.device).manual_seed(seed)
        shape = (*gradient.shape, 2) if gradient.is_complex() else gradient.shape
        direction = torch.randn(shape, generator=generator, device=gradient.device)
        return torch.view_as_complex(direction) if gradient.is_complex() else direction

    def _completed(
        self,
        part: _Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        opaque: bool,
    ) -> Iterator[Measured]:
        """Of the tensors that a part saved, those that no other part adds to."""
        missed = []
        for item in {item.first: item for item in found}.values():
            tally = self._tallies.get(item.first)
            if tally is None:
                continue
            tally.uses -= 1
            if tally.uses > 0:
                continue
            weight = tally.weight()
            if weight is None or opaque:
                missed.append(item)
            else:
                yield Measured(self._firsts[item.first], tally.tensor, weight, None)
            del self._tallies[item.first]
        for item in missed:
            yield self._perturbed(part, entering, tangents, item, 1 if opaque else self._directions)

    def _perturbed(
        self,
        part: _Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        item: Replayed,
        draws: int,
    ) -> Measured:
        """The effect of another rounding of one saved tensor; see [Note: perturbation] in perturbation.py.

        On the gradients of the part's parameters it is seen as it is; on those of all parameters before it, through its
        products with their tangents.
        """
        record, name = item.record, self._name_of(item.first)
        rounding = rounding_of(record.tensor, None, self._hooks.encoder)
        bits = widest_inexact(own_bits(self._hooks.plan, name), rounding)
        number, all_of_them = self._numbers[item.first], len(self._numbers)
        usual, change = record.replacement, 0.0
        try:
            record.replacement = self.round(record.tensor, bits, number)
            before = part.gradients(entering)
            for draw in range(1, draws + 1):
                record.replacement = self.round(record.tensor, bits, number + draw * all_of_them)
                moved = part.gradients(entering)
                change += self._distance(part, moved, before, tangents) / draws
                before = moved
        finally:
            record.replacement = usual
        return Measured(self._firsts[item.first], record.tensor, None, from_change(change, rounding, bits))

    def _distance(
        self,
        part: _Part,
        moved: Sequence[Tensor | None],
        before: Sequence[Tensor | None],
        tangents: Sequence[list[Tensor] | None],
    ) -> float:
        count = len(part.tails)
        total = square_distance(moved[count:], before[count:])
        for direction in range(self._directions):
            along = 0.0
            for new, old, tangent in zip(moved[:count], before[:count], tangents, strict=True):
                if new is not None and old is not None and tangent is not None and tangent[direction].dim():
                    along += float((float32_parts(new - old) * float32_parts(tangent[direction])).sum())
            total += along**2 / self._directions
        return total

    def _by_difference(
        self, visit: _Visit, gradients: Sequence[Tensor | None], tangents: Sequence[list[Tensor] | None]
    ) -> list[list[Tensor] | None]:
        """The tangents at the outputs of a block whose backward cannot be differentiated, by central differences."""
        if len(visit.modules) != 1:
            raise OpaqueError("a checkpointed function has a backward that cannot be differentiated")
        module, found = visit.modules[0], []
        with gathered(module), torch.no_grad():
            self._names.update(_names_of(self._paths, visit.modules))
            values = [_value(kept) for _, kept, _ in visit.inputs]
            for direction in range(self._directions):
                along = {
                    name: self._direction(self._names[id(p)], _NO_EDGE, p, direction)
                    for name, p in module.named_parameters()
                    if p.requires_grad
                }
                ways = [None if tangent is None else tangent[direction] for tangent in tangents]
                step = _step_of(module, along, values, ways)
                ahead, behind = (self._shifted(visit, along, values, ways, sign * step) for sign in (1.0, -1.0))
                found.append([(a.float() - b.float()) / (2 * step) for a, b in zip(ahead, behind, strict=True)])
        reached = [n for n, gradient in enumerate(gradients) if gradient is not None]
        return [[outputs[n] for outputs in found] for n in reached]

    def _shifted(
        self,
        visit: _Visit,
        along: dict[str, Tensor],
        values: Sequence[Tensor],
        ways: Sequence[Tensor | None],
        step: float,
    ) -> list[Tensor]:
        """The block's outputs with its parameters and inputs moved along some directions."""
        module = visit.modules[0]
        parameters = dict(module.named_parameters())
        moved = {name: parameters[name] + (step * way).to(parameters[name].dtype) for name, way in along.items()}
        inputs = {
            number: value if way is None or not way.dim() else value + (step * way).to(value.dtype)
            for (number, _, _), value, way in zip(visit.inputs, values, ways, strict=True)
        }
        args, kwargs = _substituted(copied(visit.arguments), inputs)
        with visit.surroundings.again(), self._mode:
            outputs = tensors_of(torch.func.functional_call(module, moved, args, kwargs))
        return [outputs[number] for number, _ in visit.exits]


_NOTHING = torch.empty(0)
_NO_EDGE: Any = None


def _step_of(module: nn.Module, along: dict[str, Tensor], values: Sequence[Tensor], ways: Sequence[Any]) -> float:
    """How far to go along a direction: a hundredth of what is moved, a tenth of it in low precision."""
    parameters = dict(module.named_parameters())
    pairs: list[tuple[Tensor, Any]] = [(parameters[name], way) for name, way in along.items()]
    pairs += [(value, way) for value, way in zip(values, ways, strict=True) if way is not None and way.dim()]
    ratios = [float(value.float().norm() / way.float().norm()) for value, way in pairs if bool(way.any())]
    low = any(value.dtype in (torch.bfloat16, torch.float16) for value, _ in pairs)
    usable = [ratio for ratio in ratios if ratio > 0.0]
    return (0.1 if low else 0.01) * min(usable, default=1.0)


def _names_of(paths: dict[int, str], modules: Sequence[nn.Module]) -> dict[int, str]:
    """The names of parameters by their ids, which sharding may change whenever it gathers."""
    found: dict[int, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), user_path(".".join(filter(None, (paths.get(id(module)), name)))))
    return found


def _substituted(structure: Any, tensors: dict[int, Tensor]) -> Any:
    """The same structure with some of its tensors, by their number, replaced."""
    numbers = count()
    return map_tensors(structure, lambda tensor: tensors.get(next(numbers), tensor)) if tensors else structure


def _value(kept: Any) -> Any:
    """The tensor that a boundary, or the record of a checkpoint's input, stands for."""
    if kept is None:
        return None
    return kept.handle.restore() if isinstance(kept, Recorded) else kept.value()


def _present(heads: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[list[Any], list[Tensor] | None]:
    """The heads that a gradient enters at, and these gradients."""
    if not gradients:
        return list(heads), None
    pairs = [(head, gradient) for head, gradient in zip(heads, gradients, strict=True) if gradient is not None]
    return [head for head, _ in pairs], [gradient for _, gradient in pairs]


def _input_record(kept: Recorded, cut: Tensor) -> Recorded:
    return Recorded(kept.name, kept.handle, cut.detach(), cut.grad_fn, 0, kept.compressible)


def _nothing_kept() -> Any:
    """A context in which graphs keep nothing: of a block that a checkpoint recomputes anyway."""
    nothing: Any = lambda _: None  # noqa: E731
    return saved_tensors_hooks(nothing, nothing)


@contextmanager
def _cut_off(found: Sequence[Replayed]) -> Iterator[None]:
    """Within the context nothing flows back from one saved tensor into what it was computed from."""
    outputs: dict[Any, set[int]] = defaultdict(set)
    for item in found:
        if item.record.node is not None:
            outputs[item.record.node].add(item.record.output_number)
    handles = [node.register_prehook(_without(numbers)) for node, numbers in outputs.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without(numbers: set[int]) -> Callable[[Sequence[Tensor]], tuple]:
    def prehook(inputs: Sequence[Tensor]) -> tuple:
        return tuple(None if number in numbers else value for number, value in enumerate(inputs))

    return prehook


def seen_through(record: Recorded, product: Tensor) -> Tensor:
    """The part of an edge's values that lies under the saved view, in the view's shape."""
    origin, tensor = record.origin, record.tensor
    if origin.shape == tensor.shape and origin.stride() == tensor.stride() == product.stride():
        return product
    laid_out = torch.empty_strided(origin.shape, origin.stride(), dtype=product.dtype, device=product.device)
    laid_out.copy_(product)
    return laid_out.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - origin.storage_offset())


def _watch(node: Any, opaque: list[str]) -> Callable[..., None]:
    """A hook that notes a node whose results do not depend, for autograd, on what they are computed from."""

    def hook(results: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        for result in results:
            if result is None:
                continue
            if result.grad_fn is not None:
                underivable = result.grad_fn.name() in _ERROR_NODES
            else:
                varies = any(gradient is not None and gradient.requires_grad for gradient in given)
                varies = varies or (isinstance(node, BackwardCFunction) and keeps_tensors(node))
                underivable = varies and not result.requires_grad and bool(result.any())
            if underivable:
                opaque.append(node.name())

    return hook


@contextmanager
def _refused() -> Iterator[None]:
    """An operator that refuses to be differentiated raises OpaqueError; too little memory is what it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise OpaqueError(f"no one-pass sensitivity ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
