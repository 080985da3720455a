"""Gradient checkpointing as saved-tensor hooks see it.

[Note: nesting] Around a checkpoint the hooks see the block's positional tensor inputs, which is what should be
compressed. Inside, the innermost hooks win: checkpoint's own (non-reentrant) would be shadowed by ours, everything
would be stored and nothing recomputed; in reentrant mode the forward saves nothing and the recomputation, which is
freed at once, would be packed for nothing. So hooks that are opened inside a checkpointed function are refused. While a
backward runs, only what it saves itself is packed: with create_graph=True, for the backward through it. Grad mode does
not tell the two apart, as it is on in a recomputation too; the innermost frame of a checkpoint or a backward does.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.autograd.function as autograd_function
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from .. import distributed
from .._torch_internals import (
    POLICY_SEES_RESULT,
    KeepingMode,
    bypass_hooks,
    in_backward,
    innermost_hooks,
    modes_of_checkpoint,
)

_FILES = (torch_checkpoint.__file__, *distributed.checkpoint_files())
SAVERS = {
    torch_checkpoint.__file__,
    autograd_function.__file__,
    *distributed.checkpoint_savers(),
}


def inside_checkpoint() -> bool:
    """Whether the function of a non-reentrant checkpoint is running: its hooks are the innermost then."""
    top = innermost_hooks()
    return top is not None and getattr(top[0], "__module__", "") == torch_checkpoint.__name__


def refuse_inside_checkpoint() -> None:
    """Raise RuntimeError where hooks opened now would defeat a checkpoint. See [Note: nesting]."""
    inside = inside_checkpoint()
    if inside or in_backward():
        where = (
            "inside a checkpointed function" if inside else "while a backward pass recomputes a checkpointed function"
        )
        raise RuntimeError(
            f"gact_dist's hooks were opened {where}: everything in it would be stored and nothing recomputed. Open the "
            "step around the checkpoint instead: with gact.step(...): loss = model(batch), with checkpoint(...) inside "
            "the model; the inputs of each checkpointed block are then compressed"
        )


def running_checkpoints() -> list[FrameType]:
    """The frames of all running checkpoint() calls, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_checkpoint_call(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def checkpoint_call(frame: FrameType) -> FrameType | None:
    """The call of checkpoint() that a frame belongs to."""
    caller: FrameType | None = frame
    while caller is not None and not is_checkpoint_call(caller):
        caller = caller.f_back
    return caller


def is_checkpoint_call(frame: FrameType) -> bool:
    """Whether a frame is that of a call of checkpoint()."""
    return frame.f_code.co_name == "checkpoint" and frame.f_code.co_filename.endswith(_FILES)


def recomputing() -> bool:
    """Whether a checkpoint is fetching the tensors that it recomputes a block from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_checkpoint(frame):
            return True
        frame = frame.f_back
    return False


def is_of_checkpoint(frame: FrameType) -> bool:
    """Whether a frame is one of a checkpoint's functions."""
    return frame.f_code.co_filename.endswith(_FILES)


class _WatchedPolicy:
    """The policy function of a selective checkpoint, which says what it keeps."""

    def __init__(self, policy: Callable[..., Any], note: Callable[[Tensor, str], None]) -> None:
        self._policy, self._note = policy, note
        self._saves = False  # what runs now

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        decision = self._policy(context, operator, *args, **kwargs)
        self._saves = decision is True or decision in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        if POLICY_SEES_RESULT:
            self.note(operator, context.op_output)
        return decision

    def note(self, operator: Any, result: Any) -> None:
        """An operator has run about which the policy was asked last."""
        if self._saves:
            self._saves = False
            tree_map_only(Tensor, lambda tensor: self._note(tensor, str(operator)), result)


class _ShowsResult:
    """What a checkpoint's mode for the forward becomes besides where its policy does not see results."""

    policy_fn: _WatchedPolicy

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        dispatch: Any = super()
        result = dispatch.__torch_dispatch__(func, types, args, kwargs)
        self.policy_fn.note(func, result)
        return result


def watch_selective(frame: FrameType, note: Callable[[Tensor, str], None]) -> None:
    """Have note(tensor, operator) called for all that the checkpoint whose input is being saved keeps by its policy.

    That bypasses every hook: it stays exact, in a cache of the checkpoint. frame: of the caller of a pack hook.
    """
    modes = modes_of_checkpoint(frame)
    if modes is not None and isinstance(modes[0], KeepingMode):
        mode: Any = modes[0]
        if not isinstance(mode.policy_fn, _WatchedPolicy):
            mode.policy_fn = _WatchedPolicy(mode.policy_fn, note)
            if not POLICY_SEES_RESULT:
                mode.__class__ = type(type(mode).__name__, (_ShowsResult, type(mode)), {})
        bypass_hooks(mode)
