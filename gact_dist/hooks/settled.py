"""What is saved in the same way step after step, recognised by a few looks.

[Note: settled] To find the name and the role of a tensor, and that it is neither a parameter nor of the batch, takes
walks of the call stack and of the graph, and looks into a dozen tables, which the kernels of a job have pushed out of
the processor's caches. In a job's steps nearly all of it comes out as in the step before. So what was seen of a save
and what followed is kept, and with it what was saved next. The pack hook first compares what it sees with what is
expected: the frames up to the user's line, the module, the nodes that made the tensor, its type, shape and strides.
Whatever the long way looks at is compared, follows from what is compared, or is looked up as ever: whether the memory
is stored already, of the model, made from parameters alone, or of the batch. If anything differs the tensor goes the
long way, and the order is taken up behind what that finds. Only plain saves are settled: a checkpoint's inputs, custom
functions, compiled regions, subclasses and complex tensors go the long way every time. A forward that shows roles or
readers, a measurement, a new plan, and a state that is loaded make the hooks forget all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from .._torch_internals import RESHAPES, likeness
from .aliases import span_of_all
from .call_stack import frames_to_user
from .fused_attention import OPERATORS as FUSED_ATTENTION
from .naming import Entry, Series, passes_on
from .one_bit import shows_reads
from .parameters import evidence_of_activations
from .roles import Role
from .sinks import Again

_RELU = "ReluBackward0"
_UNSETTLED = (Role.UNREAD, Role.LOG_SOFTMAX, Role.ONE_BIT)


class Settled:
    """One save of an earlier step."""

    __slots__ = (
        "_base_node", "_base_numel", "_below", "_frames", "_innermost", "_is_like", "_layer", "_node", "_number",
        "again", "evidence", "has_graph", "is_alias", "is_attention", "is_part", "is_relu", "name", "next",
        "occurrence", "role", "series", "span",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, frames: tuple[tuple[CodeType, int], ...], stack: Sequence[Entry]) -> None:
        self._frames, self._innermost = frames, stack[-1] if stack else None
        self._layer: nn.Module | None = None
        self._is_like = likeness(tensor)
        node, base = tensor.grad_fn, tensor._base
        source = node if base is None else base.grad_fn
        self._node, self._number = type(node), tensor.output_nr
        self._base_node = None if base is None else type(source)
        self._base_numel = 0 if base is None else base.numel()
        self._below: type | None = None
        if source is not None and source.name() in RESHAPES:
            self._below = type(source.next_functions[0][0])
        operator = "" if node is None else node.name()
        self.is_relu, self.is_attention = operator == _RELU, operator in FUSED_ATTENTION
        self.has_graph = node is not None
        self.evidence = evidence_of_activations(node)
        """how to see that it is not made from parameters alone"""
        self.span = span_of_all(tensor)
        """elements of memory between its first and its last, if all are its own; else None"""
        self.again: Again | None = None
        """what becomes of it whatever else is saved"""
        self.name = ""
        """of what is stored, or of what holds the memory already"""
        self.role: Role | None = None
        self.is_alias = False
        """whether another handle holds the memory"""
        self.is_part = base is not None and base.numel() != tensor.numel()
        """whether it is a part of a larger tensor"""
        self.series, self.occurrence = _NO_SERIES, 0
        self.next: Settled | None = None
        """what was saved after it"""

    def within(self, entry: Entry, stack: Sequence[Entry]) -> None:
        """It is saved in the forward of a layer without hooks, which the last frame runs."""
        self._layer, self._innermost = entry[1], stack[-2] if len(stack) > 1 else None

    def matches(
        self, tensor: Tensor, node: Any, base: Tensor | None, frame: FrameType | None, stack: Sequence[Entry]
    ) -> bool:
        """Whether a tensor is saved as that one was.

        node, base: its grad_fn and _base. frame: of the pack hook's caller. stack: modules with hooks.
        """
        last = frame
        for code, instruction in self._frames:
            if frame is None or frame.f_code is not code or frame.f_lasti != instruction:
                return False
            last, frame = frame, frame.f_back
        if (stack[-1] if stack else None) is not self._innermost or not self._is_like(tensor):
            return False
        if type(node) is not self._node or tensor.output_nr != self._number:
            return False
        if base is None:
            if self._base_node is not None:
                return False
        else:
            node = base.grad_fn
            if node is None or type(node) is not self._base_node or base.numel() != self._base_numel:
                return False
        if self._below is not None and type(node.next_functions[0][0]) is not self._below:
            return False
        return self._layer is None or (last is not None and last.f_locals.get("self") is self._layer)


_NO_SERIES = Series()


class SettledSaves:
    """Those of a job's steps, each with what was saved next. See [Note: settled]."""

    def __init__(self) -> None:
        self._known: dict[Any, Settled] = {}
        self._first: Settled | None = None
        self._latest: Settled | None = None
        self.expected: Settled | None = None
        """what the step saves next if it is like the one before"""

    def begin(self) -> None:
        """A step begins."""
        self._latest, self.expected = None, self._first

    def forget(self) -> None:
        """Roles or the plan may have changed."""
        self._known.clear()
        self._first = self._latest = self.expected = None

    def advance(self, met: Settled) -> None:
        """What was expected has been saved."""
        self._latest, self.expected = met, met.next

    def settle(self, key: Any, met: Settled) -> None:
        """Something has gone the long way, and was plain. key: tells it from the others of a step."""
        known = self._known.get(key)
        met.next = None if known is None else known.next
        self._known[key] = met
        if self._latest is None:
            self._first = met
        else:
            self._latest.next = met
        self.advance(met)


def settled(
    tensor: Tensor, frame: FrameType, entry: Entry | None, stack: Sequence[Entry], is_alias: bool
) -> Settled | None:
    """What to compare a tensor with that is saved in the next step; None where that would not tell enough.

    frame: of the pack hook's caller. entry: of the layer without hooks that is running, on the stack as well. is_alias:
    whether another handle holds the memory; of a part of a larger tensor that may be stored instead, the hooks count
    how much is saved.
    """
    frames = frames_to_user(frame)
    if not frames or type(tensor) is not Tensor or tensor.is_complex() or tensor.is_neg() or shows_reads(frame):
        return None
    node, base = tensor.grad_fn, tensor._base
    source = node if base is None else base.grad_fn
    if base is not None and source is None:
        return None
    if node is None and tensor.requires_grad:
        return None
    for each in (node, source):
        if each is not None and (type(each).__name__ != each.name() or passes_on(each)):
            return None  # a class of many operators, or a node that only hands on what another made
    met = Settled(tensor, frames, stack)
    met.is_alias = is_alias
    if entry is not None:
        met.within(entry, stack)
    return met


def may_settle(role: Role | None) -> bool:
    """Whether a tensor of a role can be settled."""
    return role not in _UNSETTLED
