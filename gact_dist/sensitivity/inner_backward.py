"""Sensitivity where the forward runs a backward with create_graph=True.

[Note: inner backward] A gradient penalty, an inner step of MAML and a Hessian-vector product run a backward within the
forward. It reads saved tensors as they are stored, rounded. Everything that is computed from its results depends on
this rounding: what is saved later, and the loss. The backward of the loss then reads the same tensors again. So the
effect of a tensor's rounding is that of all its reads, also through tensors that are saved later, and the flow through
these must not be cut as in [Note: double backward] in one_pass.py. But autograd wires every read of a tensor to the
node that produced it, and there the gradients of its reads are added to those of its exact uses. They are told apart
by the nodes that a backward has made: an edge from such a node to one that the same backward has not made is a read.
What flows along all edges of this kind, and along no other, is J^T v.
The inner backward has run with exact tensors when the pass begins, so J is taken at these, whatever the current plan.
A tensor that the pass does not reach gets a forward and a backward of its own, in which it alone is rounded. If others
were rounded too, those that are saved later would be rounded differently whenever it is, and their error would be
counted again: up to 1.8 times the variance for a gradient penalty. Fused operators are not replaced, as the inner
backward needs their own derivatives. With a checkpoint in the forward every tensor is measured in this way.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._errors import first_line, is_out_of_memory
from .._torch_internals import in_backward, next_sequence_number
from ..hooks import BACKWARDS, Recorded, SavedTensorHooks
from .autograd_graph import (
    ExamplesRefusedError,
    MeasurementError,
    gradients_of_parameters,
    name_of,
    nodes_below,
    parameters_among,
    scalar,
    watched,
)
from .blocks import BlockForward
from .by_differences import given_noted
from .checkpoint import measurable
from .isolation import untouched
from .measuring_mode import MeasuringMode
from .parts import seen_through
from .perturbation import from_change, square_distance, widest_inexact
from .surroundings import Generators

_log = logging.getLogger(__name__)
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "View", "ReshapeAlias", "Transpose", "T", "Permute", "Slice", "Select", "Squeeze", "Unsqueeze", "Expand",
        "Alias", "AsStrided", "Diagonal", "Unfold",
    )
    for number in range(4)
)  # fmt: skip
_VIEWS_AMONG_SEVERAL = ("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0")
_FORWARD, _OUTER = 0, -1

Edge = tuple[Any, int]
"""a node of an autograd graph and the number of its output"""


class InnerBackwardError(Exception):
    """The forward that is to be cut at blocks runs a backward, which goes through all of it."""

    def __str__(self) -> str:
        return "the forward runs a backward with create_graph=True, which is measured with the whole model at once"


@contextmanager
def run_alone_in_blocks(
    cut: BlockForward,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Callable[[], Any],
    fraction: float,
    generators: Generators | None = None,
) -> Iterator[None]:
    """Within the context a forward that is cut at blocks has run, with the job left untouched.

    forward, fraction: as for BlockForward.run. generators: of the random numbers it is to draw, by default those that
    come next. What a backward within the forward raises at the border of a block is an InnerBackwardError: a probe
    batch takes it for examples that the model does not run on.
    """
    mode = cut.mode
    try:
        with given_noted(), untouched(model, blocks), measurable(mode):
            if generators is not None:
                generators.restore()
            with cut.run(forward, fraction):
                if mode.inner_backward:
                    raise InnerBackwardError
                yield
    except (RuntimeError, ExamplesRefusedError, MeasurementError) as error:
        if mode.inner_backward and not is_out_of_memory(error):
            raise InnerBackwardError from error
        raise


class InnerBackwards(MeasuringMode):
    """Notes which nodes of a graph the backwards within a forward have made."""

    def __init__(self) -> None:
        super().__init__(differentiable=False)
        self.made_by: dict[Any, int] = {}
        """for each such node the number of the backward"""
        self.opaque: list[str] = []
        """what keeps the derivative from being taken; empty in most jobs"""
        self._number = 0

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if in_backward():
            # what is recomputed from a rounded input is read as if it were exact, and may be stored as well
            self.opaque.append("a checkpointed function")
        if function not in BACKWARDS or not kwargs.get("create_graph"):
            return super().call(function, args, kwargs)
        roots = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        if not all(isinstance(root, Tensor) for root in roots) or _has_graph(kwargs):
            self.opaque.append("grad_outputs with a graph")
            return super().call(function, args, kwargs)
        before = nodes_below(roots)
        opaque: list[Any] = []
        with watched(before, opaque):
            found = super().call(function, args, kwargs)
        self.opaque += map(name_of, opaque)
        self._number += 1
        results = _gradients_of_leaves(before) if found is None else [part for part in found if part is not None]
        for node in set(nodes_below(results)).difference(before):
            self.made_by.setdefault(node, self._number)
        return found

    def close(self) -> None:
        """Let go of the graph: a checkpoint in it holds the mode that it recomputes under."""
        self.made_by.clear()


def _has_graph(kwargs: dict) -> bool:
    """Whether the gradients that a backward starts with have a graph: they enter it as they are, unread."""
    given = [kwargs.get(name) for name in ("grad_outputs", "grad_tensors", "gradient")]
    flat = [part for item in given for part in (item if isinstance(item, Sequence) else [item])]
    return any(isinstance(part, Tensor) and part.requires_grad for part in flat)


def _gradients_of_leaves(nodes: Sequence[Any]) -> list[Tensor]:
    gradients = [node.variable.grad for node in nodes if hasattr(node, "variable")]
    return [gradient for gradient in gradients if gradient is not None]


class _Read(NamedTuple):
    """The edge along which a node that a backward has made sends the gradient of a saved tensor that it read."""

    place: int
    """among the results of the node"""
    views: list[Any]
    """nodes between the tensor as it was read and the edge"""
    edge: Edge


class ReadProducts:
    """Products of random directions with the Jacobians of the reads of saved tensors. See [Note: inner backward]."""

    def __init__(self, loss: Tensor, wanted: Sequence[Recorded], inner: InnerBackwards, seed: int) -> None:
        """wanted: with a node."""
        self._edges: dict[Edge, list[Recorded]] = {}
        for record in wanted:
            self._edges.setdefault((record.node, record.output_number), []).append(record)
        self._made_by, self._seed = dict(inner.made_by), seed
        self._unclear: set[Edge] = set()
        nodes = nodes_below([loss])
        opaque: list[Any] = []
        with watched(nodes, opaque):
            found = torch.autograd.grad(loss, parameters_among(nodes), create_graph=True, allow_unused=True)
        inner.opaque += map(name_of, opaque)
        self._gradients = [part for part in found if part is not None and part.requires_grad]
        if inner.opaque:
            names = ", ".join(sorted(set(inner.opaque)))
            _log.debug("backward of %s has no derivative: measuring by perturbation", names)
            self._gradients = []
        for node in set(nodes_below(self._gradients)).difference(nodes):
            self._made_by.setdefault(node, _OUTER)

    def squares(self, probes: int) -> dict[Recorded, Tensor]:
        """The mean of (J^T v)^2 over the probes, in the shape of the saved tensor, of those that the pass reaches."""
        squares: dict[Recorded, Tensor] = {}
        sums: dict[Edge, Tensor] = {}
        handles = [node.register_hook(partial(_collect, reads, sums)) for node, reads in self._reads().items()]
        generators: dict[torch.device, torch.Generator] = {}
        try:
            for _ in range(probes if self._gradients and self._edges else 0):
                sums.clear()
                self._backward(generators)
                for edge in sums.keys() - self._unclear:
                    for record in self._edges[edge]:
                        square = seen_through(record, sums[edge].float()).square() / probes
                        squares[record] = squares[record] + square if record in squares else square
        finally:
            for handle in handles:
                handle.remove()
        return {record: square for record, square in squares.items() if bool(square.any())}

    def _backward(self, generators: dict[torch.device, torch.Generator]) -> None:
        terms = []
        for gradient in self._gradients:
            device = gradient.device
            if device not in generators:
                generators[device] = torch.Generator(device=device).manual_seed(self._seed & (2**63 - 1))
            direction = torch.randn(gradient.shape, generator=generators[device], device=device)
            terms.append((gradient * direction.to(gradient.dtype)).sum(dtype=torch.float32))
        edges = [GradientEdge(*edge) for edge in self._edges]
        torch.autograd.grad(torch.stack(terms).sum(), edges, retain_graph=True, allow_unused=True)

    def _reads(self) -> dict[Any, list[_Read]]:
        """The reads of each node that a backward has made."""
        found = defaultdict(list)
        for node, number in self._made_by.items():
            for place, edge in enumerate(node.next_functions):
                if edge[0] is None or self._made_by.get(edge[0]) == number:
                    continue
                read = self._read(place, edge)
                if read is None:
                    continue
                found[node].append(read)
                if node.name().endswith("NormBackwardBackward0"):  # see [Note: differentiable replacements]
                    self._unclear.add(read.edge)
        return found

    def _read(self, place: int, edge: Edge) -> _Read | None:
        """The read of one of the wanted tensors, or of a view of one."""
        views, clear = [], True
        while edge not in self._edges:
            node = edge[0]
            if node is None or node.name() not in (*_VIEWS, *_VIEWS_AMONG_SEVERAL):
                return None
            clear &= node.name() in _VIEWS
            views.append(node)
            edge = node.next_functions[0]
            if self._made_by.get(node, _FORWARD) not in (_FORWARD, self._made_by.get(edge[0])):
                return None  # a view of what another backward has read: the view's node has the read
        if clear:
            return _Read(place, views, edge)
        self._unclear.add(edge)
        return None


def _collect(reads: Sequence[_Read], sums: dict[Edge, Tensor], results: Sequence[Tensor | None], _: Any) -> None:
    """A hook of a node that reads saved tensors."""
    for place, views, edge in reads:
        gradient = results[place]
        if gradient is None:
            continue
        for view in views:
            gradient = view(gradient)
        sums[edge] = sums[edge] + gradient if edge in sums else gradient.detach()


def squared_products(
    loss: Tensor, records: Sequence[Recorded], inner: InnerBackwards, seed: int, probes: int
) -> dict[Recorded, Tensor]:
    """For the records that one pass reaches, the mean of (J^T v)^2 over some directions, in their own shape."""
    real = [record for record in records if record.node is not None and not record.tensor.is_complex()]
    try:
        return ReadProducts(loss, real, inner, seed).squares(probes)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        _log.debug("one-pass sensitivity is not possible here (%s): measuring by perturbation", first_line(error))
        return {}


class Reruns:
    """Forwards of one model, each with a backward, in which chosen saved tensors are rounded."""

    def __init__(
        self, hooks: SavedTensorHooks, model: nn.Module, forward: Callable[[], Tensor | None], fraction: float
    ) -> None:
        """forward, fraction: as for one_pass.measure."""
        self._hooks, self._model, self._forward, self._fraction = hooks, model, forward, fraction

    @contextmanager
    def recorded(
        self, mode: MeasuringMode, rounded: dict[str, tuple[int, int]]
    ) -> Iterator[tuple[Tensor, list[Recorded]]]:
        """The loss and the saved tensors of a forward. rounded: name -> (bits, seed) of those that are rounded."""
        with untouched(self._model), measurable(mode):
            with self._hooks.recording(mode, self._fraction, rounded) as records:
                result = self._forward()
            yield scalar(mode.root_of(result)), [record for record in records if isinstance(record, Recorded)]

    def gradients(self, rounded: dict[str, tuple[int, int]]) -> list[Tensor | None]:
        """The gradients of the parameters with some tensors rounded."""
        began = next_sequence_number()
        with self.recorded(MeasuringMode(differentiable=False), rounded) as (loss, _):
            return gradients_of_parameters(loss, began)


def perturb_by_rerun(
    reruns: Reruns, wanted: dict[str, Tensor], bits_of: Callable[[str], int], seed: int
) -> dict[str, Tensor]:
    """By name, the variance that tensors add to the gradient, as from_change has it.

    wanted: what rounding_of() gives for each. bits_of: the width to which a tensor is rounded.
    """
    found: dict[str, Tensor] = {}
    exact = reruns.gradients({}) if wanted else []
    for number, (name, rounding) in enumerate(wanted.items()):
        bits = widest_inexact(bits_of(name), rounding)
        alone = reruns.gradients({name: (bits, seed + number)})
        found[name] = from_change(2.0 * square_distance(alone, exact), rounding, bits)
    return found
