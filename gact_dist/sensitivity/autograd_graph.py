"""What an autograd graph shows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from .._errors import first_line, is_out_of_memory
from .._torch_internals import keeps_tensors, number_of, saved_slots
from ..distributed import own_part

_ERROR_NODES = ("torch::autograd::Error", "torch::autograd::DelayedError", "torch::autograd::NotImplemented")


def scalar(loss: Any) -> Tensor:
    """A loss as it is. Raises ValueError unless it is a scalar with a graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss function gave {got}, expected a scalar loss that depends on the model's parameters; return the "
            "loss from loss_fn(batch), or call backward() on it inside the closure"
        )
    return loss


def nodes_below(roots: Iterable[Tensor]) -> list[Any]:
    """Every node of the graph of some tensors."""
    seen: dict[Any, None] = {}
    pending = [root.grad_fn for root in roots]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [below for below, _ in node.next_functions]
    return list(seen)


def parameters_among(nodes: Sequence[Any]) -> list[Tensor]:
    """The leaves of a graph that are parameters (all leaves, where parameters are plain tensors)."""
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)] or leaves


class MeasurementError(Exception):
    """A model cannot be measured in the way that was asked for."""


class ExamplesRefusedError(Exception):
    """A model cannot be measured on some examples; on others it may be."""


class BackwardError(MeasurementError, RuntimeError):
    """A plain backward raised an error. Some run only once, as their second run finds what the first has overwritten;
    of an error that any backward raises the job's own will tell."""


@contextmanager
def backward() -> Iterator[None]:
    """Within the context an error of torch, or of a custom function, is a BackwardError."""
    try:
        yield
    except RuntimeError as error:
        is_ours = type(error) not in (RuntimeError, NotImplementedError)
        if is_ours or is_out_of_memory(error):
            raise
        raise BackwardError(first_line(error)) from error


def any_made_before(nodes: Iterable[Any], number: int) -> bool:
    """Whether any node that may keep tensors was made before a forward: it is the job's, whose own backward needs them.

    number: next_sequence_number() before the forward. A node that another thread made may count as one. The casts of
    weights that autocast makes once for several forwards keep nothing.
    """
    before = (node for node in nodes if number_of(node) < number)
    return any(isinstance(node, BackwardCFunction) or saved_slots(node) for node in before)


def gradients_of_parameters(loss: Tensor, began: int) -> list[Tensor | None]:
    """Of the parameters that a loss depends on; frees its graph, but not that of the job which it may go on in.
    Raises BackwardError.

    began: next_sequence_number() before the forward.
    """
    nodes = nodes_below([loss])
    retain_graph = any_made_before(nodes, began)
    with backward():
        return list(torch.autograd.grad(loss, parameters_among(nodes), retain_graph=retain_graph, allow_unused=True))


def float32_parts(gradient: Tensor) -> Tensor:
    """A gradient in float32, that of a complex parameter as its real and imaginary parts [..., 2]."""
    return torch.view_as_real(gradient.resolve_conj()).float() if gradient.is_complex() else gradient.float()


def values_of(gradient: Tensor) -> Tensor:
    """The elements of a gradient; of a sparse one those that it holds, each once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def added(gradient: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, of which one may be sparse: that of an embedding whose weight is used elsewhere too."""
    return other + gradient if gradient.is_sparse else gradient + other


def leading_to(ends: Iterable[Any], nodes: Sequence[Any]) -> set[Any]:
    """Those of some nodes from which a backward comes to one of the ends."""
    above: dict[Any, list[Any]] = {}
    for node in nodes:
        for below, _ in node.next_functions:
            above.setdefault(below, []).append(node)
    found: set[Any] = set()
    pending = list(ends)
    while pending:
        for node in above.get(pending.pop(), ()):
            if node not in found:
                found.add(node)
                pending.append(node)
    return found


def leaves_below(nodes: Sequence[Any], leaves: Sequence[Tensor]) -> dict[Any, int]:
    """For every node, the leaves that it leads to: bit k for the k-th leaf, zero for none."""
    bits = {id(leaf): 1 << number for number, leaf in enumerate(leaves)}
    found: dict[Any, int] = {}
    for start in nodes:
        pending = [start]
        while pending:
            node = pending[-1]
            below = [following for following, _ in node.next_functions if following is not None]
            unknown = [] if node in found else [following for following in below if following not in found]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            if node not in found:
                own = bits.get(id(node.variable), 0) if hasattr(node, "variable") else 0
                found[node] = reduce(or_, (found[following] for following in below), own)
    return found


@contextmanager
def watched(nodes: Iterable[Any], opaque: list[Any]) -> Iterator[None]:
    """Within the context backwards with create_graph=True add the nodes whose results have no derivative.

    Such is a kernel that autograd cannot see.
    """
    handles = [node.register_hook(_watch(node, opaque)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def name_of(node: Any) -> str:
    """As autograd has it."""
    return str(node.name())


def _watch(node: Any, opaque: list[Any]) -> Callable[..., None]:
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
                underivable = varies and not result.requires_grad and bool(own_part(result).any())
            if underivable:
                opaque.append(node)

    return hook
