"""A forward of a model whose blocks keep only their inputs, and can run again one by one.

[Note: cuts] In that forward a block gets its inputs, and what follows gets its outputs, as tensors whose graph starts
anew: what is left of the model's graph is what lies between blocks, and the graph of a block exists while it runs. What
starts a graph has the name of the node that made the tensor, so that saved tensors have the names and roles of the
forward. A further run of a block finds the random numbers, autocast and buffers of the first, and saves the same
tensors in the same order ([Note: replay] in hooks/replay.py).

[Note: open blocks] A checkpoint whose block is not compressed makes all that it saves again in the backward, from its
inputs. Where its block runs again here, it runs once and keeps what it saves exactly: through the checkpoint each
derivative would run it anew, and hold it once more. Only a perturbation of its inputs has to be seen by a checkpoint
that does run anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import codec
from .._patches import replaced
from .._torch_internals import (
    RESPECTS_HOOKS,
    checkpoint_calls,
    inputs_of,
    next_sequence_number,
    run_by,
    storage_id,
    storage_reference,
)
from ..distributed import gathered, least_of_ranks, sharding, tensor_parallel_groups, unwrap, user_path
from ..hooks import (
    LEAVES_CHECKPOINT,
    STARTS,
    Adding,
    Noted,
    Recorded,
    Replaceable,
    Replay,
    Replayed,
    ReplayError,
    Results,
    SavedTensorHooks,
    Taking,
    Way,
    exponent_of,
    firsts_of,
    kept_exactly,
    made_again,
    made_from_parameters,
    map_tensors,
    note_saved_in_block,
    nothing_kept,
    origin,
    policy_of,
    producer,
    replaying,
    running_with,
    tensors_of,
    told_of_checkpoints,
)
from .autograd_graph import scalar
from .measuring_mode import MeasuringMode, NoMode
from .parts import Part
from .surroundings import Generators, Surroundings, copied

_AT_ONCE = 1 << 16  # elements
_WORTH_MEASURING = 1000
"""of what a step keeps, a tensor without a graph that is a smaller part is stored exactly: a table of sines"""


class CutError(RuntimeError):
    """A block cannot be run alone."""

    def __init__(self, block: Visit, why: Exception) -> None:
        super().__init__(str(why))
        self._modules = block.modules

    def concerns(self, block: nn.Module) -> bool:
        """Whether it was this block; all of them, where it was no module but a function that is checkpointed."""
        return not self._modules or any(module is block for module in self._modules)


@dataclass(eq=False)
class Exit:
    """An output of a block, where the graph of what follows starts."""

    edge: GradientEdge
    gradient: Tensor | None = None
    tangents: list[Tensor] | None = None
    """one for each direction"""
    readers: int = 0
    """parts of the graph that have yet to use the tangents"""

    def add(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(eq=False)
class Between:
    """What lies between some blocks and one that follows, or the loss: a part of the forward's own graph."""

    heads: list[GradientEdge]
    tails: list[Exit]
    leaves: list[tuple[str, GradientEdge]]
    nodes: list[Any]
    used: set[Replayed] = field(default_factory=set)
    entering: list[Any] = field(default_factory=list)
    """boundaries of the gradients at its heads, None where there is none; empty before the loss"""


@dataclass(eq=False)
class Visit:
    """One run of a block."""

    function: Callable[..., Any]
    modules: list[nn.Module]
    arguments: tuple[tuple, dict]
    """as they were, with boundaries in place of the tensors that were cut"""
    surroundings: Surroundings
    checkpointed: bool
    opaque: bool
    """whether what it saves is not looked at, as a checkpoint recomputes it and keeps it exactly"""
    is_open: bool = False
    """whether that holds of some of what it saves, once it has run again"""
    inputs: list[tuple[int, Any, GradientEdge]] = field(default_factory=list)
    """(index among the tensors of arguments, what stands for it, edge of the graph before), see BlockForward._kept"""
    outcomes: list[Any] = field(default_factory=list)
    own: set[Noted] = field(default_factory=set)
    exits: list[tuple[int, Exit]] = field(default_factory=list)
    """(index among the tensors of the outputs, exit)"""
    shapes: list[tuple[int, torch.Size]] = field(default_factory=list)
    """the indices of inputs and exits, each with the shape of its tensor"""
    before: Between | None = None
    leaves: list[Any] = field(default_factory=list)
    """keys of the parameters that it uses, see BlockForward.key_of()"""
    selective: list[Results] = field(default_factory=list)
    """what selective checkpoints in it keep, or it itself as one, in their order"""
    results: dict[Any, Any] = field(default_factory=dict)
    """of that, boundaries of what is held, by what stands for each, see RoundedForward; the rest is made again"""
    made: list[Replayed] = field(default_factory=list)
    """of that, what its latest run has made again"""
    held: dict[Any, Any] = field(default_factory=dict)
    """of that, the handles that further runs use, by what stands for each"""
    outer: set[Any] = field(default_factory=set)
    """nodes that were there before it ran: of what is made from parameters once, and used by several blocks"""
    gradients: list[Any] = field(default_factory=list)
    """boundaries: of the gradient at each exit, None where there is none"""

    def release_inputs(self) -> None:
        """It will not run again."""
        self.arguments, self.inputs = ((), {}), []
        self.made, self.held, self.results = [], {}, {}

    def recorded(self) -> set[Any]:
        """What the block saves, in whichever part of the model it was stored first."""
        return {
            *self.own,
            *firsts_of(self.outcomes),
            *(kept.first for _, kept, _ in self.inputs if isinstance(kept, Replayed)),
        }


class BlockForward:
    """One forward of a model, cut at its blocks. See [Note: cuts]."""

    _matches_values = False
    """whether what is saved is recognised elsewhere by its values"""

    def __init__(
        self,
        hooks: SavedTensorHooks,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        mode: MeasuringMode,
        *,
        boundary_bits: int | None,
        seed: int,
    ) -> None:
        """boundary_bits: at which tensors at the borders of blocks are kept, None for exactly. seed: of their noise."""
        self._hooks, self._blocks, self.mode = hooks, blocks, mode
        self._boundary_bits, self._seed = boundary_bits, seed
        self._paths = {id(module): path for path, module in unwrap(model).named_modules(remove_duplicate=False)}
        self._model = unwrap(model)
        self._tied = _tied(self._model)
        self._renews_parameters = sharding(model) is not None  # whenever they are gathered
        self.groups = tensor_parallel_groups(model)
        """of ranks that run the same collectives, and so must come to the same decisions"""
        self.names: dict[int, str] = {}
        """of parameters, by their ids"""
        self.visits: list[Visit] = []
        self.found: list[Recorded | Noted] = []
        """all that the forward saved, in its order"""
        self.between: list[Replayed] = []
        """what was saved outside of blocks"""
        self.numbers: dict[Any, int] = {}
        """of the compressible tensors, by what the graph holds of each"""
        self.firsts: dict[Any, Recorded | Noted] = {}
        """what is rounded, derived or may be sampled, in the same way"""
        self.derived: set[Any] = set()
        """of the tensors that a step derives, in the same way"""
        self.one: Tensor = torch.ones((), device="cpu")
        """the gradient of the loss"""
        self.began = 0
        """next_sequence_number() before the forward"""
        self._at_borders: dict[Any, tuple[Any, Any]] = {}  # while the forward runs: (weak reference, what is kept)
        self._aliases: list[Replayed] = []  # what lies outside of blocks in memory that something else has saved
        self._exits: dict[Any, Exit] = {}
        self._current: Visit | None = None
        self._passing = False  # a region that is not cut is running
        self._reentrant = False  # or a reentrant checkpoint
        self._open = ExitStack()  # of the current visit, or for what is gathered outside of one until the end

    # -- forward --------------------------------------------------------------------------------------------------

    @contextmanager
    def run(self, forward: Callable[[], Any], fraction: float) -> Iterator[None]:
        """Run forward(), which returns the loss or calls backward on it; within the context its graph is there."""
        self.began = next_sequence_number()
        with ExitStack() as self._open:
            self.learn_names([self._model])  # which sharding may change to gather them
            root = self._recorded(forward, fraction)
            self.one = torch.ones_like(root.detach())
            self._cut_between(get_gradient_edge(root))
            self._number()
            yield

    def _recorded(self, forward: Callable[[], Any], fraction: float) -> Tensor:
        """Run forward(); its loss."""
        observer = None if self._runs_compiled else self.mode
        packs = not self._matches_values
        recording = self._hooks.recording(observer, fraction, again=self._aliases, packs_bits=packs)
        with recording as self.found, self._intercepted():
            result = forward()
        self._at_borders.clear()
        self.between, self._aliases = [*_recorded(self.found), *self._aliases], []
        self.mode.on_discrete, self.mode.observes = None, False
        if not self.mode.inner_backward:  # as it has no blocks, and is measured in another way
            self._keep_small_constants(fraction)
        return scalar(self.mode.root_of(result))

    def _keep_small_constants(self, fraction: float) -> None:
        """What has no graph can only be perturbed, which takes two backwards of each block that reads it."""
        sizes = [record.nbytes for record in self.found]
        least = least_of_ranks(sum(sizes) / fraction / _WORTH_MEASURING, self.groups)
        for record, size in zip(self.found, sizes, strict=True):
            if record.compressible and not record.has_graph and size < least:
                record.keep_exactly()
                self._hooks.keep_exactly(record.name)

    def _see(self, noted: Noted, tensor: Tensor) -> None:
        """What a block saves, while it is there."""

    def _leave_block(self) -> None:
        """A block has run, and its graph is still there."""

    def _cut_between(self, root: GradientEdge) -> None:
        self.last = self._part_before([root])
        for visit in self.visits:
            visit.before = self._part_before([head for _, _, head in visit.inputs])

    @property
    def runs_collectives(self) -> bool:
        """Whether a block that runs again may wait for other ranks to do the same."""
        return self._renews_parameters or synchronises(self._model) or bool(self.groups)

    def leave_to_graph(self) -> None:
        """From now on the graph alone holds what was saved between blocks, and what is known of it is forgotten."""
        self.found, self.between, self.firsts, self.numbers, self.derived = [], [], {}, {}, set()

    def learn_names(self, modules: Sequence[nn.Module]) -> None:
        """The names of the parameters in some modules, which may be other objects whenever they are gathered."""
        found: dict[int, str] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                path = user_path(".".join(filter(None, (self._paths.get(id(module)), name))))
                found.setdefault(id(parameter), self._tied.get(path, path))
        self.names.update(found)

    def _number(self) -> None:
        """Number the compressible tensors in the order of the forward. What the graph holds of each stands for it."""
        held = [(record.handle if isinstance(record, Recorded) else record, record) for record in self.found]
        compressible = [(key, record) for key, record in held if record.compressible]
        self.numbers = {key: number for number, (key, _) in enumerate(compressible)}
        changed = (pair for pair in held if pair[1].compressible or pair[1].derived or pair[1].is_log_softmax)
        self.firsts = dict(changed)
        self.derived = {key for key, record in held if record.derived}

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(replaced(block, *self._entry_of(block)))
            if self._blocks or self._hooks.compresses_results:
                stack.enter_context(checkpoint_calls(self._at_checkpoint))
            yield

    @property
    def _runs_compiled(self) -> bool:
        return isinstance(self.mode, NoMode)

    def _entry_of(self, block: nn.Module) -> tuple[str, Callable[..., Any]]:
        """The attribute that runs a block, and what cuts the forward there."""
        name, function = run_by(block) if self._runs_compiled else ("forward", block.forward)
        return name, self._at_block(block, function)

    def _at_block(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def visit(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                with self._gathered(block):
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
            self._open.enter_context(self._gathered(block))

    @contextmanager
    def _gathered(self, block: nn.Module) -> Iterator[None]:
        """gathered(), unobserved: the decisions that ranks take in it are not those of the model."""
        with ExitStack() as stack:
            with self._unobserved():
                stack.enter_context(gathered(block))
            try:
                yield
            finally:
                with self._unobserved():
                    stack.close()

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        noting, self.mode.on_discrete = self.mode.on_discrete, None
        try:
            yield
        finally:
            self.mode.on_discrete = noting

    def _at_checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """In place of torch.utils.checkpoint.checkpoint: outside of blocks, what it runs is a block."""
        if self._passing or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kw)
        results = self._results(kw)
        if results is not None:
            kw = _without_contexts(kw)
        if self._current is not None:
            if results is not None:
                self._current.selective.append(results)
                return checkpoint(running_with(partial(Adding, results), function), *args, **kw)
            if not self._hooks.compresses_recomputed:
                return checkpoint(function, *args, **kw)
            noting = self._hooks.noting(self._current.outcomes, recomputed=True)
            return self._checkpoint_inside(noting, None, checkpoint, function, *args, **kw)
        if not self._blocks and results is None:
            return checkpoint(function, *args, **kw)
        if "context_fn" in kw or kw.get("use_reentrant", True) is not False:  # reentrant ones come back as others
            self._passing, self._reentrant = "context_fn" in kw, True
            try:
                return checkpoint(function, *args, **kw)
            finally:
                self._passing = self._reentrant = False
        known, aliases = len(self.found), len(self._aliases)

        def visit(*inputs: Any, **named: Any) -> Any:
            kept = [*_recorded(self.found[known:]), *self._aliases[aliases:]]
            return self._visit(function, [], inputs, named, True, kept, results)

        return checkpoint(visit, *args, **kw)

    def _results(self, kw: dict[str, Any]) -> Results | None:
        """For what a selective checkpoint keeps, None for one that is left as it is, or another. kw: of its call."""
        compresses = self._hooks.compresses_results and kw.get(RESPECTS_HOOKS) is not False
        policy = policy_of(kw.get("context_fn")) if compresses else None
        if policy is None:
            return None
        exactly = self._hooks.keeps_results_exactly
        return Results(policy, self._keep_result, self._hooks.note_discrete, exactly)

    def _keep_result(self, tensor: Tensor, operator: Any, way: Way) -> Any:
        """As SavedTensorHooks.keep_result()."""
        return self._hooks.keep_result(tensor, operator, way)

    def _checkpoint_inside(
        self,
        hooks: AbstractContextManager[None],
        calls: list[Any] | None,
        checkpoint: Callable[..., Any],
        function: Callable[..., Any],
        *args: Any,
        looks: bool = True,
        **kw: Any,
    ) -> Any:
        """In place of torch.utils.checkpoint.checkpoint inside of a block.

        hooks: for what it would recompute. calls: receives the states of checkpoints; given where a block runs again,
        as its backward will recompute it from what is kept of its inputs. looks: whether what it saves when it runs
        again is rounded, and so looked at.
        """
        if self._passing or not torch.is_grad_enabled():
            return checkpoint(function, *args, **kw)
        if kw.get("use_reentrant", True) is not False and not looks:
            return checkpoint(function, *args, **kw)  # comes back as another
        with self._passed():  # checkpoints inside of it, and what a reentrant one comes back as, are left alone
            if "context_fn" in kw or kw.get("use_reentrant", True) is not False:
                return checkpoint(function, *args, **kw)

            def block(*inputs: Any, **named: Any) -> Any:
                kept = inputs_of(calls.pop()) if calls else inputs
                values = None if looks else _values_of(function, inputs, kept, named)
                with hooks:
                    outputs = function(*kept, **named)
                if values is not None:
                    _set_values(outputs, values)
                return outputs

            return checkpoint(block, *args, **kw)

    @contextmanager
    def _checkpoints_again(
        self, visit: Visit, replay: Replay, opens: bool, taking: Sequence[Callable[[], Taking]]
    ) -> Iterator[None]:
        """Within the context a block runs again, in which there may be checkpoints. See [Note: open blocks].

        opens: as for part_of(). taking: contexts for selective checkpoints, in their order.
        """
        calls: list[Any] = []
        selective = iter(taking)

        @contextmanager
        def exactly() -> Iterator[None]:
            visit.is_open = True
            with kept_exactly():
                yield

        @contextmanager
        def exactly_with(mode: Callable[[], Taking]) -> Iterator[None]:
            with exactly(), mode():
                yield

        def again(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
            is_outermost = not self._passing and torch.is_grad_enabled()
            is_selective = is_outermost and self._results(kw) is not None
            recomputed = self._hooks.compresses_recomputed and not is_selective
            mode = next(selective) if is_selective else None
            if mode is not None:
                kw = _without_contexts(kw)
            if not opens and not recomputed:
                return checkpoint(function if mode is None else running_with(mode, function), *args, **kw)
            hooks: AbstractContextManager[None] = exactly() if mode is None else exactly_with(mode)
            if recomputed:
                hooks = replaying(replay, whole=False, compiled=self._runs_compiled)
            outputs = self._checkpoint_inside(hooks, calls, checkpoint, function, *args, looks=recomputed, **kw)
            return map_tensors(outputs, lambda tensor: _Leaves.apply(tensor) if tensor.requires_grad else tensor)

        with told_of_checkpoints(lambda _, call: calls.append(call)), checkpoint_calls(again):
            yield

    @contextmanager
    def _passed(self) -> Iterator[None]:
        """Within the context no region is cut, and no checkpoint looked into."""
        before, self._passing = self._passing, True
        try:
            yield
        finally:
            self._passing = before

    def _visit(
        self,
        function: Callable[..., Any],
        modules: list[nn.Module],
        args: tuple,
        kwargs: dict,
        checkpointed: bool,
        kept: Sequence[Replayed] = (),
        results: Results | None = None,
    ) -> Any:
        """results: of a selective checkpoint."""
        tensors = tensors_of((args, kwargs))
        exact = self._reentrant or results is not None or not self._hooks.compresses_recomputed
        opaque = checkpointed and exact
        chosen = {
            number: tensor
            for number, tensor in enumerate(tensors)
            if _may_be_cut(tensor) or (checkpointed and self._is_leaf(tensor))
        }
        arguments = substituted(copied((args, kwargs)), dict.fromkeys(chosen, _NOTHING))
        outer, self._open = self._open, ExitStack()
        with self._open:
            try:
                for module in modules:
                    self._open.enter_context(self._gathered(module))
                around = Surroundings(modules, [tensor.device.type for tensor in tensors])
                visit = Visit(function, modules, arguments, around, checkpointed, opaque)
                if results is not None:
                    visit.selective.append(results)
                    function = running_with(partial(Adding, results), function)
                for number, tensor in chosen.items():
                    visit.inputs.append((number, self._kept(tensor, kept), get_gradient_edge(tensor)))
                    visit.shapes.append((number, tensor.shape))
                starts = {number: cut(tensor) for number, tensor in chosen.items()}
                args, kwargs = substituted((args, kwargs), starts)
                known = len(self.found)
                self._current = visit
                started = next_sequence_number()
                noting = self._hooks.noting(visit.outcomes, checkpointed, self._see)
                with nothing_kept() if opaque else noting, self._passed() if checkpointed else nullcontext():
                    outputs = function(*args, **kwargs)
                self._note_graph(visit, outputs, list(starts.values()), started)
                self._leave_block()
                for number, start in starts.items():
                    note_saved_in_block(start, chosen[number])
            finally:
                self._current, self._open = None, outer
        if any(tensor._version for tensor in starts.values()):
            raise CutError(visit, ReplayError("it modifies an input in place"))
        visit.own = {record for record in self.found[known:] if isinstance(record, Noted)}
        around.settle()
        self.visits.append(visit)
        ends = {}
        for number, tensor in enumerate(tensors_of(outputs)):
            if _may_be_cut(tensor):
                ends[number] = start = cut(tensor)
                edge = get_gradient_edge(start)
                self._exits[edge.node] = last = Exit(edge)
                visit.exits.append((number, last))
                visit.shapes.append((number, tensor.shape))
        return substituted(outputs, ends)

    def _is_leaf(self, tensor: Tensor) -> bool:
        """Whether a graph of the user's starts at a tensor, as under adapters at the output of a frozen embedding.

        A checkpoint keeps it as a block input; where it is cut, products at the block's start are those of that input.
        """
        is_parameter = isinstance(tensor, nn.Parameter) or id(tensor) in self.names
        return tensor.requires_grad and tensor.is_leaf and not is_parameter

    def _note_graph(self, visit: Visit, outputs: Any, starts: Sequence[Tensor], started: int) -> None:
        """started: the number of the first node that the block made."""
        self.learn_names(visit.modules)
        heads = [tensor.grad_fn for tensor in tensors_of(outputs) if _may_be_cut(tensor)]
        nodes, _, leaves = self._reach(heads, [start.grad_fn for start in starts])
        visit.leaves = list(dict.fromkeys(self.key_of(edge) for _, edge in leaves))
        ends = {start.grad_fn for start in starts}
        visit.outer = {node for node in nodes if node._sequence_nr() < started and node not in ends}

    def key_of(self, leaf: GradientEdge) -> Any:
        """What stands for a parameter in every part of the graph: its name; for one that has none, its identity."""
        node: Any = leaf.node
        return self.names.get(id(node.variable), id(node.variable))

    def _kept(self, tensor: Tensor, kept: Sequence[Replayed]) -> Any:
        """What stands for an input until its block runs again: what the checkpoint keeps of it, or a boundary."""
        for item in kept:
            own = item.record.tensor
            if own.data_ptr() == tensor.data_ptr() and own.shape == tensor.shape and own.stride() == tensor.stride():
                return item
        if type(tensor) is not Tensor:
            return self.boundary(tensor)
        form = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        key = storage_id(tensor), tensor._version, *form
        if key not in self._at_borders:  # several blocks may read it; one that modifies an input cannot be cut
            self._at_borders[key] = storage_reference(tensor), self.boundary(tensor)
        return self._at_borders[key][1]

    def boundary(self, tensor: Tensor) -> Any:
        """What stands for a tensor until value_of() gives it back."""
        return _Boundary(tensor, self._boundary_bits, self._seed + len(self.visits))

    def _part_before(self, heads: Sequence[GradientEdge]) -> Between:
        nodes, tails, leaves = self._reach([head.node for head in heads])
        return Between(list(heads), tails, leaves, nodes)

    def _reach(self, roots: Sequence[Any], ends: Sequence[Any] = ()) -> tuple[list, list, list]:
        """(nodes, exits, leaves) below some nodes, as far as the exits of blocks. ends: nodes to stop at."""
        nodes: dict[Any, None] = dict.fromkeys(ends)
        tails: list[Exit] = []
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
                name = self.names.get(id(node.variable))
                if name is not None or isinstance(node.variable, nn.Parameter) or not self.names:
                    leaves.append((name or f"leaf {len(leaves)}", GradientEdge(node, 0)))
            else:
                pending += [below for below, _ in node.next_functions]
        return [node for node in nodes if node not in self._exits], tails, leaves

    # -- a block again ----------------------------------------------------------------------------------------------

    @contextmanager
    def again(
        self, visit: Visit, keep: Callable[[Tensor, Any, Tensor], Any]
    ) -> Iterator[tuple[Part, Replay | None, list[Tensor]]]:
        """Within the context the block has its graph. keep: as for Replay, what that holds of each saved tensor."""
        with ExitStack() as stack:
            for module in visit.modules:
                stack.enter_context(gathered(module))
            yield self.part_of(visit, keep)

    def part_of(
        self, visit: Visit, keep: Callable[[Tensor, Any, Tensor], Any], opens: bool = True
    ) -> tuple[Part, Replay | None, list[Tensor]]:
        """As again(), where what the block needs is there. opens: see [Note: open blocks]; false where its checkpoints
        are to make what they save again in every backward."""
        try:
            outputs, inputs, replay = self._run(visit, keep, opens)
        except ReplayError as error:
            raise CutError(visit, error) from error
        heads = [outputs[number] for number, _ in visit.exits]
        del outputs
        if self._renews_parameters:
            self.learn_names(visit.modules)
        ends = [tensor.grad_fn for tensor in inputs]
        nodes, _, leaves = self._reach([head.grad_fn for head in heads], ends)
        tails = [get_gradient_edge(tensor) for tensor in inputs]
        return Part(heads, tails, leaves, nodes, visit.is_open), replay, inputs

    def _run(
        self, visit: Visit, keep: Callable[[Tensor, Any, Tensor], Any], opens: bool
    ) -> tuple[list[Tensor], list[Tensor], Replay | None]:
        values = {number: cut(value_of(kept)) for number, kept, _ in visit.inputs}
        args, kwargs = substituted(copied(visit.arguments), values)
        replay = None if visit.opaque else Replay(visit.outcomes, visit.own, keep)
        visit.is_open = visit.opaque
        made: list[tuple[Tensor, Any, Any]] = []
        taking = [partial(Taking, results, partial(self._place, visit, keep, made)) for results in visit.selective]
        with ExitStack() as stack:
            stack.enter_context(visit.surroundings.again())
            stack.enter_context(self._hooks.functions_again.block(visit.checkpointed))
            if replay is not None:
                stack.enter_context(replaying(replay, compiled=self._runs_compiled))
                if visit.checkpointed:
                    stack.enter_context(self._passed())
                elif opens or self._hooks.compresses_recomputed or taking:
                    stack.enter_context(self._checkpoints_again(visit, replay, opens, taking))
            else:
                stack.enter_context(kept_exactly())
            stack.enter_context(self.mode)
            if visit.checkpointed:
                for mode in taking:
                    stack.enter_context(mode())
            outputs = tensors_of(visit.function(*args, **kwargs))
        visit.made = [made_again(tensor, first, handle) for tensor, first, handle in made if tensor.requires_grad]
        if any(number >= len(outputs) or not outputs[number].requires_grad for number, _ in visit.exits):
            raise ReplayError("it returned something else")
        return outputs, list(values.values()), replay

    @staticmethod
    def _place(
        visit: Visit,
        keep: Callable[[Tensor, Any, Tensor], Any],
        made: list[tuple[Tensor, Any, Any]],
        tensor: Tensor,
        first: Any,
    ) -> None:
        """A block runs again and has made what a selective checkpoint keeps. first: what the forward made of it."""
        if not isinstance(first, Noted):  # as it is
            made.append((tensor, first, Replaceable(tensor)))
            return
        handle, value = visit.held.get(first), tensor
        if handle is None:
            value = value_of(visit.results[first]) if first in visit.results else tensor
            handle = keep(value, first, value)
        made.append((tensor, first, handle))
        if not isinstance(handle, Noted):  # as it is where this run keeps nothing of it
            value = handle.restore_memory() if isinstance(handle, Replaceable) else handle.restore()
        if value.data_ptr() != tensor.data_ptr():
            if first not in visit.held and isinstance(handle, Replaceable) and handle.replacement is not None:
                handle.content = tensor.clone()  # as it is
            tensor.copy_(value)


def synchronises(model: nn.Module) -> bool:
    """Whether ranks wait for each other in a forward of the model, and so have to run as many."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def _without_contexts(kw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kw.items() if name not in ("context_fn", RESPECTS_HOOKS)}


def _values_of(function: Callable[..., Any], inputs: tuple, kept: tuple, named: dict) -> list[Tensor] | None:
    """What a checkpoint computes, which its block goes on with; None if what it kept of its inputs, from which it makes
    its graph again, gives the same."""
    if all(one.data_ptr() == other.data_ptr() for one, other in zip(tensors_of(inputs), tensors_of(kept), strict=True)):
        return None
    generators = Generators()
    with torch.no_grad():
        values = tensors_of(function(*inputs, **named))
    generators.restore()
    return values


def _set_values(outputs: Any, values: Sequence[Tensor]) -> None:
    for output, value in zip(tensors_of(outputs), values, strict=True):
        if output.requires_grad:
            output.data = value


def _recorded(found: Sequence[Recorded | Noted]) -> list[Replayed]:
    return [Replayed(record, record.handle, None) for record in found if isinstance(record, Recorded)]


def _tied(model: nn.Module) -> dict[str, str]:
    """Of each parameter that several modules share: its other names, and the one that stands for all of them."""
    first: dict[int, str] = {}
    tied = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = user_path(path)
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


class _Leaves(Function):
    """Identity at what a checkpoint hands out: an edge for what is stored outside, of its own.

    Inside, operators may save the same tensor, as a fused attention does its output. That is made again from the
    checkpoint's inputs, which it moves, while what is stored outside moves nothing else.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # no view, which would forbid operations in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


_Leaves._backward_cls.__name__ = LEAVES_CHECKPOINT


@cache
def _source(name: str, exponent: float | None) -> Any:
    """A function that starts a graph anew at a tensor, under the name of the node that made the tensor before.

    exponent: see exponent_of(). What it returns shares the tensor's memory; its node holds nothing.
    """

    class Source(Function):
        @staticmethod
        def forward(ctx: Any, start: Tensor, tensor: Tensor) -> Tensor:
            return tensor.data

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
            return None, None

    Source._backward_cls.__name__ = name
    node: Any = Source._backward_cls
    setattr(node, STARTS, True)
    if exponent is not None:
        node._saved_exponent = exponent
    return Source


def cut(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor with a graph that starts here. like: the tensor that it stands for, itself by default."""
    made = tensor if like is None else like
    node = producer(origin(made)) if made.grad_fn is not None else None
    name = "Source" if node is None else node.name()
    return _source(name, exponent_of(node)).apply(torch.zeros((), requires_grad=True, device="cpu"), tensor.detach())


def _may_be_cut(tensor: Tensor) -> bool:
    """Whether a tensor is computed from activations; parameters, and what is made of them, are no boundaries."""
    return tensor.requires_grad and tensor.grad_fn is not None and not made_from_parameters(tensor.grad_fn)


class _Boundary:
    """A tensor at the border of a block, until the block runs again.

    [Note: on no grid] What is kept is the root of each element, with its sign. Values decoded from 8 bits themselves
    lie where 8 bits can store them, so a block that saves its input would seem to lose nothing by that width, and too
    little by 7. The squares of such values lie on no grid. Zeros, signs and infinities stay, and the error is much like
    that of 8 bits.
    """

    def __init__(self, tensor: Tensor, bits: int | None, seed: int) -> None:
        """bits: None for exactly. seed: of the rounding."""
        self._packed: codec.Packed | None = None
        self._tensor: Tensor | None = None
        if bits is not None and tensor.is_floating_point() and type(tensor) is Tensor:
            with torch.no_grad():
                self._packed = codec.pack(_root(tensor), bits, seed)
        else:
            self._tensor, self._version = tensor.detach(), tensor._version

    def value(self) -> Tensor:
        """Raises ReplayError if it was modified in place meanwhile."""
        if self._packed is not None:
            return _squared(codec.unpack(self._packed))
        if self._tensor is None or self._tensor._version != self._version:
            raise ReplayError("an input was modified in place after the block had run")
        return self._tensor


def _root(tensor: Tensor) -> Tensor:
    """The root of each element, with its sign, in the tensor's strides."""
    root = codec.unpack(codec.borrow(tensor))
    for values in _pieces(root):
        values.copy_(values.abs().sqrt_().copysign_(values))
    return root


def _squared(root: Tensor) -> Tensor:
    """The inverse of _root(), in place. What rounding took beyond the largest finite value becomes that."""
    looks = root.device.type == "cpu"  # elsewhere the host would have to wait
    for values in _pieces(root):
        square = values.abs().mul_(values)
        if looks and bool(square.sum(dtype=torch.float32).isfinite()):
            values.copy_(square)
            continue
        largest = torch.finfo(root.dtype).max
        torch.where(values.isfinite(), square.clamp(-largest, largest), square, out=values)
    return root


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Of a tensor's memory; on a CPU so small that what is computed of one stays in a core's cache."""
    memory = _memory(tensor)
    return memory.split(_AT_ONCE) if tensor.device.type == "cpu" else [memory]


def _memory(tensor: Tensor) -> Tensor:
    """All that a tensor's storage holds, in one dimension."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def substituted(structure: Any, tensors: dict[int, Tensor]) -> Any:
    """The same structure with some of its tensors, by their number, replaced."""
    numbers = count()
    return map_tensors(structure, lambda tensor: tensors.get(next(numbers), tensor)) if tensors else structure


def value_of(kept: Any) -> Any:
    """The tensor that a boundary, or the record of a checkpoint's input, stands for; None for None."""
    if kept is None:
        return None
    return kept.record.handle.restore() if isinstance(kept, Replayed) else kept.value()


_NOTHING = torch.empty(0, device="cpu")
