"""Where in a program a tensor is saved: one walk of the call stack for each saved tensor."""

import sys
import threading
from enum import Enum
from types import CodeType, FrameType
from typing import NamedTuple

import torch
import torch.autograd.function as autograd_function
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from .._paths import PACKAGE_ROOT
from .._torch_internals import APPLY_HAS_FRAME, DIRECTORY, creates_graph, is_backward_call
from ..distributed import plumbing
from .checkpoint import SAVERS, is_checkpoint_call, is_of_checkpoint
from .compiled import BETWEEN_HOOK_AND_REGION, behind_compiler, compiled_region
from .function_calls import FunctionCall, call_of_frame, call_without_frame
from .roles import outside_observer

_PLUMBING = (
    *(f"{DIRECTORY}/{part}" for part in ("nn/functional.py", "overrides.py", "autograd/", "_ops.py", "_tensor.py")),
    *(f"{DIRECTORY}/{part}" for part in ("utils/", "_jit_internal.py", "amp/", "_compile.py")),
    *(f"{DIRECTORY}/{part}" for part in ("_dynamo/", "_functorch/")),
    PACKAGE_ROOT,
)
_WRAPPERS = plumbing()


class CallSite(NamedTuple):
    """What the frames above a pack hook show."""

    line: str | None
    """of the user's code, counted from the start of its function; None in a compiled region"""
    region: nn.Module | None = None
    """the module whose compiled forward is saving, None where something else saves"""
    checkpoint: FrameType | None = None
    """the call of checkpoint() whose block's input is being saved, None where something else saves"""
    function: FunctionCall | None = None
    """the call of a custom function that is saving, None where something else saves"""
    in_backward: bool = False
    """whether a backward with create_graph=True is saving; the line is that of its call"""
    workspace: bool = False
    """whether an operator saves what it alone can read"""


def caller() -> FrameType | None:
    """The frame that called the caller of this function; None in a thread that has no other Python frame.

    torch.jit.fork and the autograd engine of an accelerator run operators, and with them hooks, in such threads.
    """
    hook = sys._getframe(1)
    return hook.f_back


def call_site(frame: FrameType, tensor: Tensor) -> CallSite:
    """Walk up to the first frame outside plumbing. frame: of the caller of a pack hook. tensor: that it was given."""
    if APPLY_HAS_FRAME:
        known = _sites.get((id(frame.f_code), frame.f_lasti))  # of users' code alone
        if known is not None:
            return known[1]
    if _kind(frame.f_code) is _Kind.SAVES:
        frame = behind_compiler(frame)
        site = _call_site_of_library(frame)
    else:
        site = _site_above(frame)
    call = None if APPLY_HAS_FRAME else call_without_frame(frame, tensor)
    if call is None or site.region is not None or site.checkpoint is not None:
        return site
    return site._replace(function=call)


def site_in_checkpoint(frame: FrameType, tensor: Tensor) -> CallSite:
    """The same inside of a checkpoint. Where its function is one of torch no line of the user's leads to what it saves,
    neither in the forward, where one calls the checkpoint, nor in the backward."""
    site = call_site(frame, tensor)
    is_apply = frame.f_code.co_filename == autograd_function.__file__
    if is_apply and getattr(frame.f_locals.get("cls"), "__module__", "") == torch_checkpoint.__name__:
        return site  # an input of a checkpoint inside of it
    above: FrameType | None = frame
    while above is not None and _kind(above.f_code) is not _Kind.USERS:
        if is_of_checkpoint(above):
            call = call_of_frame(frame) if is_apply else site.function
            return site._replace(line=None, checkpoint=None, function=call)
        above = above.f_back
    return site


_HAVE_WORKSPACES = [
    function.__code__ for function in (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward, nn.functional.batch_norm)
]


def is_workspace(frame: FrameType, tensor: Tensor) -> bool:
    """Whether a tensor of bytes is the workspace of an operator. frame: of the caller of a pack hook.

    Recurrent networks of oneDNN and cuDNN have some, and cuDNN's BatchNorm. The functions of torch that call these
    have no other tensors of bytes to give them; those of a user (a mask, an image) are saved by other operators.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        return False
    code = outside_observer(frame).f_code
    return any(code is known for known in _HAVE_WORKSPACES)


def site_in_backward(frame: FrameType | None, thread: int) -> CallSite | None:
    """Where autograd.grad() or backward() was called with create_graph=True, if that is why a tensor is saved now.

    None in a plain backward, and where a block is recomputed; see [Note: nesting] in checkpoint.py. frame: of the
    caller of a pack hook, None if it shows none. thread: the one that runs the step. On an accelerator the engine calls
    hooks in threads of its own, which show no caller, while the step's thread waits in the call.
    """
    call = _backward_call(frame)
    if call is None and thread != threading.get_ident():
        call = _backward_call(sys._current_frames().get(thread))
    if call is None or not is_backward_call(call) or not creates_graph(call):
        return None
    return _site_above(call)._replace(in_backward=True)


def is_users(code: CodeType) -> bool:
    """Whether a function is the user's, or a module's of torch, and no plumbing between these and an operator."""
    return _kind(code) is _Kind.USERS


def frames_to_user(frame: FrameType) -> tuple[tuple[CodeType, int], ...]:
    """(code, instruction) of the frames that call_site() looks at, if these are plumbing and the user's alone; else ().

    frame: of the caller of a pack hook.
    """
    found = [(frame.f_code, frame.f_lasti)]
    while _kind(frame.f_code) is _Kind.PLUMBING and frame.f_back is not None:
        frame = frame.f_back
        found.append((frame.f_code, frame.f_lasti))
    return tuple(found) if _kind(frame.f_code) is _Kind.USERS else ()


def current_line() -> str | None:
    """The line of the user's code that is running, as CallSite has it."""
    return _site_above(sys._getframe(1)).line


class _Kind(Enum):
    """What a function is, by the file that it stands in."""

    USERS = 0  # the user's, or a module's of torch
    PLUMBING = 1  # between the user's code and an operator
    SAVES = 2  # plumbing that saves tensors in Python, or keeps the compiler off a hook


_NOWHERE = CallSite(None)
# keyed by id, with the code object kept beside it: hashing a code object walks all of its constants every time
_kinds: dict[int, tuple[CodeType, _Kind]] = {}
_sites: dict[tuple[int, int], tuple[CodeType, CallSite]] = {}


def _kind(code: CodeType) -> _Kind:
    known = _kinds.get(id(code))
    if known is None:
        path, kind = code.co_filename, _Kind.USERS
        if path in SAVERS or path.startswith(BETWEEN_HOOK_AND_REGION):
            kind = _Kind.SAVES
        elif path.startswith(_PLUMBING) or any(part in path for part in _WRAPPERS):
            kind = _Kind.PLUMBING
        known = _kinds[id(code)] = (code, kind)
    return known[1]


def _site_above(frame: FrameType | None) -> CallSite:
    """Of the first frame, from this one up, that is the user's."""
    while frame is not None and _kind(frame.f_code) is not _Kind.USERS:
        frame = frame.f_back
    return _NOWHERE if frame is None else _site(frame.f_code, frame.f_lasti)


def _backward_call(frame: FrameType | None) -> FrameType | None:
    """The innermost call of a backward around a frame, or a frame of a checkpoint's if that comes first."""
    while frame is not None and not is_backward_call(frame) and not is_of_checkpoint(frame):
        frame = frame.f_back
    return frame


def _site(code: CodeType, instruction: int) -> CallSite:
    known = _sites.get((id(code), instruction))
    if known is None:
        line = next((row for start, stop, row in code.co_lines() if start <= instruction < stop and row), None)
        offset = (line or code.co_firstlineno) - code.co_firstlineno
        text = str(offset) if code.co_name == "forward" else f"{code.co_name}+{offset}"
        known = _sites[id(code), instruction] = (code, CallSite(text))
    return known[1]


def _call_site_of_library(frame: FrameType) -> CallSite:
    """Of a tensor that a compiled region or a checkpoint may be saving, or any other function written in Python."""
    region = compiled_region(frame)
    if region is not None:
        return CallSite(None, region)
    found: FrameType | None = frame
    while frame.f_code.co_filename in SAVERS and found is not None and _kind(found.f_code) is not _Kind.USERS:
        if is_checkpoint_call(found):
            return CallSite(_site_above(found).line, None, found)
        found = found.f_back
    is_apply = frame.f_code.co_filename == autograd_function.__file__
    return _site_above(frame)._replace(function=call_of_frame(frame) if is_apply else None)
