"""What a step has saved of the tensor that an edge of the graph gives.

[Note: edges] Sums, cat, casts and views save none of their operands, and a product with a number saves only the number.
The graph shows the edges that they have for operands, and a pack hook sees by its node which edge a tensor comes from.
So each node notes what the graph holds of its results. The notes refer weakly to handles: a node that owned a handle
would be owned by it where an operator saves its own result. They are of one value, for what modifies a tensor in place
with a graph gives it a node of its own; one that was modified without a graph is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor, nn

from .._torch_internals import PLAIN_OR_PARAMETER, node_of, saved_handle
from .handles import Stored, base_of
from .hidden_scores import Masks

_HANDLE = "gact_dist: saved as"
_ELSEWHERE = "gact_dist: saved in a block"
VARIABLE = "variable"
"""in place of the name of a saved tensor: the leaf whose gradient a node accumulates"""
ADDED = "gact_dist: added to the scores"
"""the same: what attention has added to the scores of a softmax"""
_Made = TypeVar("_Made")


def note_saved(tensor: Tensor, handle: Any) -> None:
    """A tensor is saved now, and the graph holds a handle in its place that restores its values."""
    node = node_of(tensor)
    if node is not None:
        node.metadata[mark_of(tensor)] = ref(handle)


def mark_of(tensor: Tensor) -> tuple[str, int]:
    """The key under which the node of a tensor notes a weak reference to its handle."""
    return mark_at(tensor.output_nr)


def mark_at(number: int) -> tuple[str, int]:
    """The same of one of a node's results."""
    return _HANDLE, number


def saved_at(edge: tuple[Any, int]) -> Any:
    """The handle of what an edge gives; None if it is not saved, or was modified since."""
    node, number = edge
    metadata = getattr(node, "metadata", None)
    reference = None if metadata is None else metadata.get((_HANDLE, number))  # mark_at(), without a call each
    handle = None if reference is None else reference()
    base = base_of(handle)
    return None if isinstance(base, Stored) and base.is_modified else handle


def note_saved_elsewhere(edge: tuple[Any, int]) -> None:
    """What an edge gives is an input of a block, which is cut off, and saved there."""
    node, number = edge
    if node is not None and saved_at(edge) is None:
        node.metadata[_ELSEWHERE, number] = True


def is_saved_elsewhere(edge: tuple[Any, int]) -> bool:
    """Whether note_saved_elsewhere() was called for an edge."""
    node, number = edge
    return (_ELSEWHERE, number) in getattr(node, "metadata", ())


def vector_of_parameter(parameter: Any, shape: Sequence[int]) -> Tensor | None:
    """A copy of a parameter in a shape; None of anything else, and where sharding has taken it away."""
    is_there = isinstance(parameter, nn.Parameter) and type(parameter) in PLAIN_OR_PARAMETER
    if not is_there or parameter.untyped_storage().nbytes() < parameter.nbytes or parameter.numel() != prod(shape):
        return None
    return parameter.detach().clone().reshape(shape)


class Reads:
    """Notes what is read of a graph to find a recipe, and what is made of that; see RecipeAgain in recipes_again.py."""

    def __init__(self, note_mask: Callable[[Tensor], None] | None = None) -> None:
        """note_mask: what notes on the softmax that gives probabilities what attention has added to their scores."""
        self.note_mask = note_mask
        self.handles: list[tuple[Any, str | int, Any]] = []
        """(node, name of a saved tensor or number of an output, what the graph holds in its place)"""
        self.made: list[tuple[Any, Any, str | None]] = []
        """(operand of a recipe, node, what of it the operand was made of; None: the whole)"""
        self.masks: Masks | None = None
        """of probabilities, as far as this step is observed"""

    def saved(self, node: Any, slot: str) -> Any:
        """See saved_handle()."""
        handle = saved_handle(node, slot)
        self.handles.append((node, slot, handle))
        return handle

    def at(self, edge: tuple[Any, int]) -> Any:
        """See saved_at()."""
        handle = saved_at(edge)
        self.handles.append((*edge, handle))
        return handle

    def copied(self, operand: _Made, node: Any, slot: str) -> _Made:
        """It is a copy of a vector that a node saved, or of its VARIABLE."""
        self.made.append((operand, node, slot))
        return operand

    def added(self, mask: _Made, node: Any) -> _Made:
        """It is what was noted as added to the scores of a softmax."""
        self.made.append((mask, node, ADDED))
        return mask

    def attention(self, result: _Made, node: Any) -> _Made:
        """It runs the attention of a node again."""
        self.made.append((result, node, None))
        return result
