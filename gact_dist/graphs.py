"""What can be read off an autograd graph."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn


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
