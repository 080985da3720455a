"""Parts of a graph that are differentiated twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._errors import first_line, is_out_of_memory
from .._torch_internals import once, repeated_dimensions
from ..distributed import any_rank, differentiable_twice, own_part, part_of_gradient
from ..hooks import ReadOnce, Recorded, Replayed, read_once
from .autograd_graph import backward, name_of, watched
from .by_differences import by_differences, learn, noted


class OpaqueError(RuntimeError):
    """A part of a model has an operator whose backward cannot be differentiated."""


@dataclass(eq=False)
class Part:
    """A part of the graph that is differentiated twice: gradients enter at its heads, leave at its tails and leaves."""

    heads: list[Any]
    tails: Sequence[GradientEdge]
    leaves: Sequence[tuple[str, GradientEdge]]
    nodes: Sequence[Any]
    is_open: bool = False
    """whether some of what it saves is not looked at, because the job makes it again in its backward: what that is made
    of moves it"""

    def gradients(
        self, entering: Sequence[Tensor] | None, create_graph: bool = False, retain_graph: bool = True
    ) -> list[Tensor | None]:
        """At tails, then leaves. Raises BackwardError."""
        inputs = [*self.tails, *(edge for _, edge in self.leaves)]
        if not inputs:
            return []
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": True}
        with backward():
            return list(torch.autograd.grad(self.heads, inputs, entering, **options))

    def differentiable_gradients(
        self, entering: Sequence[Tensor] | None, groups: Sequence[Any] = ()
    ) -> tuple[list[Gradient | None], ReadOnce]:
        """The graph of the same, and what holds what that has saved. Raises OpaqueError if some backward leaves it or
        refuses, on all ranks of groups. A custom function whose backward does is differentiated by differences.

        If it does not run at all, the plain backward of a perturbation raises the error.
        """
        functions = [] if groups else noted(self.nodes)  # ranks of groups would have to find the same ones
        while True:
            opaque: list[Any] = []
            error: OpaqueError | None = None
            found: list[Gradient | None] = []
            derivable = by_differences(functions, self.is_open), differentiable_twice(self.nodes)
            with derivable[0], derivable[1], watched(self.nodes, opaque), read_once() as held:
                try:
                    with refused():
                        found = list(map(_without_values, self.gradients(entering, create_graph=True)))
                except OpaqueError as refusal:
                    error = refusal
            if not learn(functions, opaque, error):
                break
        if error is not None:
            reason, error = str(error), None  # whose traceback leads back here, and so would keep all that is here
            raise OpaqueError(reason)
        if any_rank([bool(opaque)], groups)[0]:
            names = ", ".join(sorted(set(map(name_of, opaque)))) or "an operator on another rank"
            raise OpaqueError(f"backward of {names} has no derivative")
        return found, held


class Gradient(NamedTuple):
    """A gradient that can be differentiated."""

    edge: GradientEdge
    like: Tensor
    """of its shape, type and device; the gradient itself where it is distributed"""


def _without_values(gradient: Tensor | None) -> Gradient | None:
    if gradient is None or not gradient.requires_grad:
        return None
    is_plain = type(gradient) is Tensor
    if not is_plain:
        return Gradient(get_gradient_edge(gradient), gradient.detach())
    like = torch.empty((), dtype=gradient.dtype, device=gradient.device)  # strided, as a sparse one cannot be expanded
    return Gradient(get_gradient_edge(gradient), like.expand(gradient.shape))


def present(heads: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[list[Any], list[Tensor] | None]:
    """The heads that a gradient enters at, and these gradients."""
    if not gradients:
        return list(heads), None
    pairs = [(head, gradient) for head, gradient in zip(heads, gradients, strict=True) if gradient is not None]
    return [head for head, _ in pairs], [gradient for _, gradient in pairs]


@contextmanager
def cut_off(found: Sequence[Replayed]) -> Iterator[None]:
    """Within the context nothing flows back from one saved tensor into what it was computed from.

    Where only parts of a result are saved, or one bit of each element as relu does, other tensors may be derived from
    what the result was computed from: what flows into all else goes on.
    """
    saved = saved_by_edge(found)
    with _changed_at({edge: partial(_without, [item.record for item in items]) for edge, items in saved.items()}):
        yield


def saved_by_edge(found: Iterable[Replayed]) -> dict[tuple[Any, int], list[Replayed]]:
    """Of saved tensors those with values that others may be derived from."""
    saved: dict[tuple[Any, int], list[Replayed]] = defaultdict(list)
    for item in found:
        if item.record.node is not None and not item.record.is_one_bit:
            saved[edge_of(item)].append(item)
    return saved


@contextmanager
def closed_to(edges: Iterable[Any]) -> Iterator[None]:
    """Within the context backwards end at these edges, (node, number of its output, ...)."""
    with _changed_at({(node, number): _nothing for node, number, *_ in edges}):
        yield


@contextmanager
def _changed_at(changes: Mapping[tuple[Any, int], Callable[[Tensor], Tensor | None]]) -> Iterator[None]:
    """Within the context what backwards bring to some edges is replaced. changes: by edge."""
    outputs: dict[Any, dict[int, Callable[[Tensor], Tensor | None]]] = defaultdict(dict)
    for (node, number), change in changes.items():
        outputs[node][number] = change
    handles = [node.register_prehook(partial(_changed, by_number)) for node, by_number in outputs.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _changed(changes: Mapping[int, Callable[[Tensor], Tensor | None]], inputs: Sequence[Tensor | None]) -> tuple:
    return tuple(
        changes[number](value) if value is not None and number in changes else value
        for number, value in enumerate(inputs)
    )


def _nothing(_: Tensor) -> None:
    return None


def _without(records: Sequence[Recorded], values: Tensor) -> Tensor | None:
    """An edge's values without those under saved tensors; None if these are all.

    records: of the tensors, which were saved of what the edge gives.
    """
    whole, places = records[0].origin, parts_saved(records)
    if not places or type(values) is not Tensor or values.shape != whole.shape:
        return None
    left = _laid_out_as(whole, values)
    for shape, stride, offset in places:
        left.as_strided(shape, stride, offset - whole.storage_offset()).zero_()
    return left


def parts_saved(records: Sequence[Recorded]) -> set[tuple[Any, ...]]:
    """The places (shape, stride, offset) of what was saved of one tensor, if that is not all of it; else none."""
    whole = records[0].origin
    tensors = [once(record.tensor) for record in records]
    places = {(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors}
    is_all = sum(prod(shape) for shape, _, _ in places) >= whole.numel()
    return set() if is_all or type(whole) is not Tensor or repeated_dimensions(whole) else places


def _laid_out_as(whole: Tensor, values: Tensor) -> Tensor:
    """Values of a tensor's shape in its strides, in memory of their own; the sum over the copies of what is
    repeated."""
    laid_out = torch.empty_strided(whole.shape, whole.stride(), dtype=values.dtype, device=values.device)
    repeats = repeated_dimensions(whole)
    once(laid_out).copy_(values.sum(repeats, keepdim=True) if repeats else values)
    return laid_out


def seen_through(record: Recorded, product: Tensor) -> Tensor:
    """The part of an edge's values that lies under the saved view, in the view's shape; the sum over the copies of what
    is repeated."""
    origin, tensor, product = own_part(record.origin), record.tensor, part_of_gradient(product, record.origin)
    if product.shape != origin.shape:  # which is that of what was expanded: see [Note: repeated] in hooks/repeated.py
        product = product.reshape(origin.shape)
    if origin.shape == tensor.shape and origin.stride() == tensor.stride() == product.stride():
        return product
    offset = tensor.storage_offset() - origin.storage_offset()
    return _laid_out_as(origin, product).as_strided(tensor.shape, tensor.stride(), offset)


def repeated_as(values: Tensor, tensor: Tensor) -> Tensor:
    """Values of a tensor's shape, repeated in memory where it repeats its elements."""
    shape = once(tensor).shape
    return values if shape == values.shape else values[tuple(map(slice, shape))].expand(values.shape)


def edge_of(item: Replayed) -> tuple[Any, int]:
    """Where the saved tensor, or what it is a view of, was made."""
    return item.record.node, item.record.output_number


@contextmanager
def refused() -> Iterator[None]:
    """An operator that refuses to be differentiated raises OpaqueError; too little memory is what it is."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise OpaqueError(f"no one-pass sensitivity ({first_line(error)})") from error
