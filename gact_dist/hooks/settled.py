"""What is saved in the same way step after step, recognised by a few looks.

[Note: settled] To find the name and the role of a tensor, and that it is neither a parameter nor of the batch, takes
walks of the call stack and of the graph, and looks into a dozen tables, which the kernels of a job have pushed out of
the processor's caches. In a job's steps nearly all of it comes out as in the step before. So what was seen of a save
and what followed is kept, and with it what was saved next. The pack hook first compares what it sees with what is
expected: the frames up to the user's line, the module, the nodes that made the tensor, its type, shape and strides.
Whatever the long way looks at is compared, follows from what is compared, or is looked up as ever: whether the memory
is stored already, of the model, made from parameters alone, or of the batch. What is made again has a recipe that is
found by a few looks as well ([Note: recipes again] in recipes_again.py). If anything differs the tensor goes the long
way, and the order is taken up behind what that finds. Only plain saves are settled: a checkpoint's inputs, custom
functions, compiled regions, subclasses and complex tensors go the long way every time. A forward that shows roles or
readers, a measurement, a new plan, and a state that is loaded make the hooks forget all of it. Where Function.apply has
no frame (torch 2.14) everything goes the long way as long as a custom function is about to save.

The comparison itself is in csrc/hooks. Where that was not built everything goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from .. import codec
from .._short_ways import native_base
from .._torch_internals import (
    RESHAPES,
    function_modes,
    graph_task_id,
    likeness,
    saves_own_result,
    unpin_storage,
)
from .aliases import NOTHING, StorageRecord, alias_at, find_stored, note_part, span_of_all
from .call_stack import frames_to_user
from .fused_attention import OPERATORS as FUSED_ATTENTION
from .handles import Kept, Stored, View, base_of, empty_like
from .naming import Entry, passes_on
from .one_bit import shows_reads
from .parameters import FROM_ACTIVATIONS, evidence_of_activations
from .roles import Role

_Save: Any = native_base("Save")
_Saves: Any = native_base("Saves")
_Pin: Any = native_base("Pin")
_RELU = "ReluBackward0"
_UNSETTLED = (Role.UNREAD, Role.LOG_SOFTMAX, Role.ONE_BIT)


class Settled(_Save):
    """One save of an earlier step, with all that a tensor is compared with which may be the same save of a later one.

    What becomes of it is set by the hooks: the name of what is stored, or of what holds the memory already (is_alias);
    its role; its place among those of the same name (series, occurrence); and what becomes of it whatever else is saved
    (again), None where the hooks have to see.
    """

    layer: Any
    next: Any

    def __init__(self, tensor: Tensor, frames: tuple[tuple[CodeType, int], ...], stack: Sequence[Entry]) -> None:
        """frames: up to the user's line. stack: modules with hooks."""
        self.frames, self.innermost, self.layer = frames, stack[-1] if stack else None, None
        self.is_like = likeness(tensor)
        node, base = tensor.grad_fn, tensor._base
        source = node if base is None else base.grad_fn
        self.node_type, self.number = type(node), tensor.output_nr
        self.base_type = None if base is None else type(source)
        self.base_numel = 0 if base is None else base.numel()
        self.below = None
        if source is not None and source.name() in RESHAPES:
            self.below = type(source.next_functions[0][0])
        operator = "" if node is None else node.name()
        self.is_relu, self.is_attention = operator == _RELU, operator in FUSED_ATTENTION
        self.has_graph = node is not None
        self.evidence = evidence_of_activations(node)  # that it is not made from parameters alone
        self.span, self.empty = span_of_all(tensor), empty_like(tensor)
        self.is_part = base is not None and base.numel() != tensor.numel()  # of a larger tensor

    def within(self, entry: Entry, stack: Sequence[Entry]) -> None:
        """It is saved in the forward of a layer without hooks, which the last frame runs."""
        self.layer, self.innermost = entry[1], stack[-2] if len(stack) > 1 else None


class SettledSaves(_Saves):
    """Those of a job's steps, each with what was saved next. See [Note: settled]."""

    first: Any
    latest: Any
    expected: Any

    def __init__(self) -> None:
        self.settles = False
        self._known: dict[Any, Settled] = {}
        self._surroundings: list[str] = []
        self.graph_task_id, self.function_modes = graph_task_id, function_modes
        self.parameter_type, self.tensor_type, self.kept_type = nn.Parameter, Tensor, Kept
        self.from_activations = FROM_ACTIVATIONS
        self.find_stored, self.saves_own_result, self.note_part = find_stored, saves_own_result, note_part
        self.record_type, self.handle_type, self.nothing, self.alias = StorageRecord, Stored, NOTHING, _alias_of
        self.packer_type = codec.Packer
        self.pin_type, self.unpin = _Pin, unpin_storage
        self.forget()

    def open(self, **surroundings: Any) -> None:
        """From now on what is saved settles, and what has settled goes the short way.

        surroundings: what it looks into meanwhile, and what does the rest; see Saves in csrc/hooks.
        """
        self._surroundings = [*surroundings]
        for name, value in surroundings.items():
            setattr(self, name, value)
        self.settles = True

    def close(self) -> None:
        """Undo open(). A graph owns the pack hook, and with it this."""
        self.settles = False
        for name in self._surroundings:
            setattr(self, name, None)

    def begin(self) -> None:
        """A step begins."""
        self.latest, self.expected = None, self.first

    def forget(self) -> None:
        """Roles or the plan may have changed."""
        self._known.clear()
        self.first = self.latest = self.expected = None

    def settle(self, key: Any, met: Settled) -> None:
        """Something has gone the long way, and was plain. key: tells it from the others of a step."""
        known = self._known.get(key)
        met.next = None if known is None else known.next
        self._known[key] = met
        if self.latest is None:
            self.first = met
        else:
            self.latest.next = met
        self.latest, self.expected = met, met.next


def _alias_of(tensor: Tensor, expected: Settled, found: tuple[Any, int, int]) -> View | None:
    """What the graph is to hold of a tensor whose memory was found in what expected says; None if it is in another."""
    base = base_of(found[0])
    return alias_at(found, tensor) if type(base) is Stored and base.name == expected.name else None


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
