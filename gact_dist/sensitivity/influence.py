"""Which parameters' gradients each saved tensor moves; tensors that move different ones can share a backward.

[Note: influence] Rounding a saved tensor with another seed changes what the nodes that saved it return, on some of
their edges: for the input of a linear or a convolution that is the edge to the weight alone, for what a norm or an
activation saved the edge to everything before it. From there it can move the gradients of the parameters that the edge
leads to, and no others. Which edges change is seen in the first backward: each node, once it has run, is called again
with either rounding in place, so no table of operators is needed. If two tensors move disjoint sets of parameters,
neither changes the input of the other's nodes, for then it would also move what these lead to. So a backward with both
tensors rounded anew moves the parameters of each by exactly as much as that tensor alone does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..hooks import Recorded, recomputing
from .autograd_graph import leaves_below


class Influence:
    """Observes one backward of a recorded graph."""

    def __init__(self, nodes: Sequence[Any], leaves: Sequence[Tensor], other: Callable[[Recorded], Tensor]) -> None:
        """nodes: of the graph. leaves: the parameters. other: the tensor that is to replace a recorded one."""
        self._nodes, self._leaves, self._other = nodes, leaves, other
        self._below = leaves_below(nodes, leaves)
        self._node: Any = None
        self._restored: dict[Any, list[Recorded]] = defaultdict(list)
        self.moved: dict[Recorded, int] = {}
        """for each record, the parameters whose gradients it moves: bit k for the k-th leaf"""

    def backward(self, loss: Tensor, records: Sequence[Recorded]) -> tuple[Tensor | None, ...]:
        """The gradient of the leaves; afterwards `moved` is known for these records. The graph is retained."""
        self.moved = dict.fromkeys(records, 0)
        removable = []
        for node in self._nodes:
            removable.append(node.register_prehook(partial(self._enter, node)))
            removable.append(node.register_hook(partial(self._leave, node)))
        for record in records:
            record.handle.on_restore = partial(self._restore, record)
        try:
            return torch.autograd.grad(loss, self._leaves, retain_graph=True, allow_unused=True)
        finally:
            for handle in removable:
                handle.remove()
            for record in records:
                record.handle.on_restore = None

    def _enter(self, node: Any, _: Sequence[Tensor | None]) -> None:
        self._node = node

    def _restore(self, record: Recorded) -> None:
        if self._node is None or recomputing():  # a checkpoint's input is used by all nodes of the block
            self.moved[record] = (1 << len(self._leaves)) - 1
        else:
            self._restored[self._node].append(record)

    def _leave(self, node: Any, results: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        self._node = None
        for record in dict.fromkeys(self._restored.pop(node, ())):
            changed = [True] * len(results)
            if not isinstance(node, BackwardCFunction):  # code of the user's, that may do more than return something
                changed = self._changed(node, record, given)
            for (below, _), differs in zip(node.next_functions, changed, strict=True):
                self.moved[record] |= self._below[below] if differs and below is not None else 0

    def _changed(self, node: Any, record: Recorded, given: Sequence[Tensor | None]) -> list[bool]:
        """Whether the node returns something else on each edge if the record is replaced."""
        rounded, watch = record.replacement, record.handle.on_restore
        record.handle.on_restore = None
        try:
            usual = node(*given)
            record.replacement = self._other(record)
            others = node(*given)
        finally:
            record.replacement, record.handle.on_restore = rounded, watch
        if not isinstance(usual, tuple):
            usual, others = (usual,), (others,)
        return [_differ(one, other) for one, other in zip(usual, others, strict=True)]


def disjoint(moved: dict[Recorded, int]) -> list[list[Recorded]]:
    """The records that move anything, in groups whose members move different parameters; first fit, in their order."""
    groups: list[tuple[int, list[Recorded]]] = []
    for record, leaves in moved.items():
        if not leaves:
            continue
        fitting = next((number for number, (taken, _) in enumerate(groups) if not taken & leaves), None)
        if fitting is None:
            groups.append((leaves, [record]))
        else:
            taken, members = groups[fitting]
            groups[fitting] = (taken | leaves, [*members, record])
    return [members for _, members in groups]


def _differ(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is not second
    return type(first) is not Tensor or type(second) is not Tensor or not torch.equal(first, second)
