"""What a step has saved of the tensor that an edge of the graph gives.

[Note: edges] Sums, cat, casts and views save none of their operands, and a product with a number saves only the number.
The graph shows the edges that they have for operands, and a pack hook sees by its node which edge a tensor comes from.
So each node notes what the graph holds of its results. The notes refer weakly to handles: a node that owned a handle
would be owned by it where an operator saves its own result. They are of one value, for what modifies a tensor in place
with a graph gives it a node of its own; one that was modified without a graph is not used.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from .._torch_internals import node_of
from .handles import Stored, base_of

_HANDLE = "gact_dist: saved as"


def note_saved(tensor: Tensor, handle: Any) -> None:
    """A tensor is saved now, and the graph holds a handle in its place that restores its values."""
    node = node_of(tensor)
    if node is not None:
        node.metadata[mark_of(tensor)] = ref(handle)


def mark_of(tensor: Tensor) -> tuple[str, int]:
    """The key under which the node of a tensor notes a weak reference to its handle."""
    return _HANDLE, tensor.output_nr


def saved_at(edge: tuple[Any, int]) -> Any:
    """The handle of what an edge gives; None if it is not saved, or was modified since."""
    node, number = edge
    metadata = getattr(node, "metadata", None)
    reference = None if metadata is None else metadata.get((_HANDLE, number))
    handle = None if reference is None else reference()
    base = base_of(handle)
    return None if isinstance(base, Stored) and base.is_modified else handle
