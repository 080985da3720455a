"""Tensors that a checkpoint keeps for its backward past all hooks, so that the report has them.

[Note: past the hooks] Of what checkpoint() is given, only tensors that are positional arguments themselves go through
saved-tensor hooks (torch 2.13). Its closure keeps the rest as it is: keywords, containers among the arguments, and what
its function brings along, which is bound by functools.partial or closed over. A non-reentrant checkpoint may have no
positional tensor at all, so it is met where it saves its inputs; a reentrant one has no graph then, and keeps nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..distributed import local_part
from .accounting import Ledger
from .aliases import Memory, span
from .checkpoint import checkpoint_call, in_backward, inside_checkpoint, watch_selective
from .naming import Namer
from .parameters import ParameterIdentity


class _Listeners(threading.local):
    def __init__(self) -> None:
        self.notes: list[Callable[[FrameType], None]] = []


_listeners = _Listeners()


@contextmanager
def told_of_checkpoints(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Have note(frame) called for every non-reentrant checkpoint that opens in this thread and is not inside another.

    frame: of the code that saves the checkpoint's inputs; its block has yet to run. The innermost context is told.
    """
    _tell()
    _listeners.notes.append(note)
    try:
        yield
    finally:
        _listeners.notes.remove(note)


@cache
def _tell() -> None:
    """Let checkpoints tell: once, for the rest of the process, and without effect while nobody listens.

    A torch whose checkpoints have no such method has them met by their positional tensors alone.
    """
    save_inputs = getattr(torch_checkpoint._CheckpointFrame, "save_inputs", None)
    if save_inputs is None:
        return

    @torch._disable_dynamo
    @wraps(save_inputs)
    def saving(self: Any, *args: Any) -> None:
        save_inputs(self, *args)
        if _listeners.notes and not in_backward() and not inside_checkpoint():
            _listeners.notes[-1](sys._getframe(1))

    torch_checkpoint._CheckpointFrame.save_inputs = saving  # type: ignore[method-assign]


class Bypassing:
    """Rows of the report for what checkpoints keep exactly, out of reach of hooks."""

    def __init__(
        self, parameters: ParameterIdentity, namer: Namer, ledger: Ledger, memory_of: Callable[[Tensor], Memory]
    ) -> None:
        self._parameters, self._namer, self._ledger, self._memory_of = parameters, namer, ledger, memory_of

    def note(self, frame: FrameType) -> None:
        """Add what a checkpoint holds, and what its policy will keep. frame: as told_of_checkpoints gives it."""
        watch_selective(frame, self._add)
        call = checkpoint_call(frame)
        if call is not None:
            self.add_held(call)

    def add_held(self, call: FrameType) -> None:
        """Add what a checkpoint() call keeps past the hooks. Asked again it adds nothing."""
        for given, tensor in held_tensors(call):
            self._add(tensor, f"BlockInput ({given})")

    def _add(self, tensor: Tensor, operator: str) -> None:
        local = tensor if type(tensor) is Tensor else local_part(tensor)
        if local is None or self._parameters.is_parameter(tensor, None):
            return
        memory, part = self._memory_of(local), (int(local.storage_offset()), span(local))
        if part not in memory.bypassing:
            memory.bypassing.add(part)
            self._ledger.add(local, self._namer.bypassing(operator), memory, local)


def held_tensors(call: FrameType) -> Iterator[tuple[str, Tensor]]:
    """(what it was given as, tensor) of all that a checkpoint() call keeps past the hooks. See [Note: past the hooks].

    call: its frame. Only torch's checkpoint has keywords apart: a framework's own passes them on among `args`.
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
