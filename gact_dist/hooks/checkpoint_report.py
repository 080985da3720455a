"""Tensors that a checkpoint keeps for its backward where no hook sees them, so that the report has them.

[Note: past the hooks] Of what checkpoint() is given, only tensors that are positional arguments themselves go through
saved-tensor hooks (torch 2.13). Its closure keeps the rest as it is: keywords, containers among the arguments, and what
its function brings along, which is bound by functools.partial or closed over. A non-reentrant checkpoint may have no
positional tensor at all, so it is met where it saves its inputs; a reentrant one has no graph then, and keeps nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from .._patches import SharedPatch
from .._torch_internals import PLAIN, CheckpointHooks, in_backward, untraced
from ..distributed import local_part
from .aliases import span
from .checkpoint import checkpoint_call, inside_checkpoint, watch_selective
from .parameters import ParameterRecognition


def _telling(init: Callable[..., None], listeners: list[tuple[int, Callable[[FrameType, Any], None]]]) -> Any:
    """CheckpointHooks.__init__ that also tells its thread's innermost listener of the call that the hooks are of."""

    @untraced
    @wraps(init)
    def opening(self: Any, call: Any, *others: Any) -> None:
        init(self, call, *others)
        thread = threading.get_ident()
        note = next((note for owner, note in reversed(listeners) if owner == thread), None)
        if note is not None and not in_backward() and not inside_checkpoint():
            note(sys._getframe(1), call)

    return opening


_TELL = SharedPatch("__init__", _telling)


def told_of_checkpoints(note: Callable[[FrameType, Any], None]) -> AbstractContextManager[None]:
    """Have note(frame, call) called for every non-reentrant checkpoint that opens in this thread and is not inside
    another.

    frame: of the code that has saved the checkpoint's inputs; its block has yet to run. call: the checkpoint's own
    state of this call. The innermost context is told.
    """
    return _TELL.listening(CheckpointHooks, (threading.get_ident(), note))


class Bypassing:
    """Rows of the report for what checkpoints keep exactly, out of reach of hooks."""

    def __init__(self, parameters: ParameterRecognition, note: Callable[[Tensor, str, tuple[int, int]], None]) -> None:
        """note: called with a tensor, the operator to name it after, and its part of the storage: (offset, span)."""
        self._parameters, self._note = parameters, note

    def watch(self, frame: FrameType) -> None:
        """Add what a checkpoint's policy will keep. frame: as told_of_checkpoints gives it."""
        watch_selective(frame, self.add)

    def note(self, frame: FrameType) -> None:
        """Add what a checkpoint holds. frame: as told_of_checkpoints gives it."""
        call = checkpoint_call(frame)
        if call is not None:
            self.add_held(call)

    def add_held(self, call: FrameType) -> None:
        """Add what a checkpoint() call keeps past the hooks. A second call for it adds nothing."""
        for given, tensor in held_tensors(call):
            self.add(tensor, f"BlockInput ({given})")

    def add(self, tensor: Tensor, operator: str) -> None:
        """Add a tensor that is kept as it is. operator: that has returned it, or what it is."""
        local = tensor if type(tensor) in PLAIN else local_part(tensor)
        if local is None or self._parameters.is_parameter(tensor, None):
            return
        self._note(local, operator, (int(local.storage_offset()), span(local)))


def held_tensors(call: FrameType) -> Iterator[tuple[str, Tensor]]:
    """(the name it was given under, tensor) for all that a checkpoint() call keeps. See [Note: past the hooks].

    call: its frame. Only torch's checkpoint has separate keywords: a framework's own passes them on among `args`.
    """
    given = call.f_locals
    held = [(f"argument {i}", value) for i, value in enumerate(given["args"]) if not isinstance(value, Tensor)]
    if call.f_code.co_filename == torch_checkpoint.__file__:
        held += [(f"keyword {name}", value) for name, value in given["kwargs"].items()]
    held += _bindings(given["function"], set())
    for label, value in held:
        for path, leaf in tree_flatten_with_path(value)[0]:
            if isinstance(leaf, Tensor):
                yield label + keystr(path), leaf


def _bindings(function: Any, met: set[int]) -> list[tuple[str, Any]]:
    """(name, value) of what a function brings along, and the functions among that, and so on."""
    if id(function) in met:
        return []
    met.add(id(function))
    if isinstance(function, MethodType):
        return _bindings(function.__func__, met)
    found: list[tuple[str, Any]] = []
    if isinstance(function, partial):
        found += [(f"partial {i}", value) for i, value in enumerate(function.args)]
        found += [(f"partial {name}", value) for name, value in function.keywords.items()]
        found += _bindings(function.func, met)
    elif isinstance(function, FunctionType):
        found += [(f"closure {name}", value) for name, value in _closed_over(function)]
    for _, value in tuple(found):
        found += _bindings(value, met)
    return found


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing was assigned to the variable yet
            continue
