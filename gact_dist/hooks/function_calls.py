"""Calls of custom autograd functions, as a pack hook finds them while they save.

[Note: calls without a frame] While a function saves, forward() has returned. Where Function.apply is written in Python
(torch 2.13), its frame calls the pack hook and shows the function and what it was given. Where it is written in C++
(2.14) there is no frame, and a program that holds `scale = Scale.apply` cannot be given another. But every function
calls ctx.save_for_backward() inside forward() or setup_context(), whose frames show what the function was given. That
is remembered by the instruction that called apply, which is also the one that saves. forward() may have assigned
another tensor to the name of an argument. One that does not require a gradient although the argument did is left out,
and the argument counts as an input that is not known: more is kept exactly then, never less. A view, as wrappers of
kernels make them, shows the memory of the argument and not its shape. Where `apply` of the class is replaced
([Note: functions again]) that is what knows the arguments.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .._patches import SharedPatch
from .._torch_internals import (
    APPLY_HAS_FRAME,
    COMPILED_FUNCTIONS,
    PLAIN_OR_PARAMETER,
    function_of_context,
    in_backward,
    node_of,
    storage_id,
    untraced,
)
from ..distributed import operator_aliases
from .checkpoint import inside_checkpoint
from .roles import leaves_of

_KNOWN_FUNCTIONS = frozenset(operator_aliases())
_APPLY_CODE = getattr(torch.autograd.Function.apply, "__code__", None)


class FunctionCall(NamedTuple):
    """A call of Function.apply that is saving."""

    identity: Any
    """the same object for all that one call saves"""
    function: type
    given: Any
    """what it was given, in containers"""
    unknown: int = 0
    """how many further tensors it was given"""

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.__name__

    def operands(self) -> Iterator[Tensor]:
        """The tensors that it was given, as far as they are known."""
        for leaf in leaves_of(self.given):
            if type(leaf) in PLAIN_OR_PARAMETER and leaf.layout == torch.strided and not leaf.is_nested:
                yield leaf

    def inputs(self) -> int:
        """How many activations it was given: numbers in several places that are no parameters."""
        found = {
            storage_id(operand)
            for operand in self.operands()
            if operand.is_floating_point() and operand.numel() > 1 and not isinstance(operand, torch.nn.Parameter)
        }
        return len(found) + self.unknown


def call_of_frame(frame: FrameType) -> FunctionCall | None:
    """The call of a custom function whose frame of Function.apply this is."""
    function = frame.f_locals.get("cls")
    if function is None or not _is_custom(function):
        return None
    return FunctionCall(frame, function, (frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})))


def call_without_frame(frame: FrameType, tensor: Tensor) -> FunctionCall | None:
    """The call of a custom function that is saving a tensor now. See [Note: calls without a frame].

    frame: of the caller of a pack hook.
    """
    if not _remembered.calls:
        return None
    place, storage = (id(frame), frame.f_lasti), storage_id(tensor)
    for index in reversed(range(len(_remembered.calls))):
        callers, saves, call = _remembered.calls[index]
        if place in callers and storage in saves:
            saves.remove(storage)
            if not saves:
                del _remembered.calls[index]
            return call
    return None


def remembered_calls() -> list[Any]:
    """Those of this thread that are about to save, as far as is known: a list that changes."""
    return _remembered.calls


@contextmanager
def calls_remembered(recomputed: bool = False) -> Iterator[None]:
    """Within the context call_without_frame() finds the calls of this thread, where they have no frames.

    recomputed: whether those of a block that runs again in a backward.
    """
    if APPLY_HAS_FRAME:
        yield
        return
    try:
        with _SAVES.listening(FunctionCtx, (threading.get_ident(), _remember if recomputed else _remember_in_forward)):
            yield
    finally:
        _remembered.calls.clear()


_Place = tuple[int, int]
"""(id of a frame, its instruction)"""


class GivenToFunction(NamedTuple):
    """A call of a custom function, as it may be made again."""

    function: Any
    """its class"""
    arguments: list[Any]
    """without a graph"""
    saved: dict[int, int]
    """of the arguments that it saves, perhaps in another shape, the number among all that it saves"""
    computes: bool
    """whether it saves anything else"""


@contextmanager
def given_to_functions(note: Callable[[Any, GivenToFunction], None]) -> Iterator[None]:
    """Within the context note(node, call) is told of the calls of custom functions in this thread that save tensors.

    Of those of which all is known that they were given, and which are given plain tensors. What they are given they
    may write over later. A view of an argument that forward() has made, where nothing has a graph, is saved with one.
    """
    with _SAVES.listening(FunctionCtx, (threading.get_ident(), partial(_tell, note))):
        yield


def _telling(save_for_backward: Callable[..., None], listeners: list[Any]) -> Any:
    """FunctionCtx.save_for_backward that also tells of the call."""

    @untraced
    @wraps(save_for_backward)
    def telling(self: Any, *tensors: Any) -> None:
        for told in {told for thread, told in listeners if thread == threading.get_ident()}:
            tensors = told(self, tensors, sys._getframe(1))
        save_for_backward(self, *tensors)

    return telling


_SAVES = SharedPatch("save_for_backward", _telling)


def _tell(
    note: Callable[[Any, GivenToFunction], None], context: Any, tensors: tuple[Any, ...], frame: FrameType
) -> tuple[Any, ...]:
    """What is to be saved in place of some tensors. frame: of the code that saves."""
    arguments = None if in_backward() else _given(context, frame)
    if arguments is None:
        return tensors
    saved = {
        place: number
        for number, tensor in enumerate(tensors)
        for place, argument in enumerate(arguments)
        if isinstance(argument, Tensor) and isinstance(tensor, Tensor) and _is_same(argument, tensor)
    }
    given = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]
    computes = any(isinstance(tensor, Tensor) and number not in saved.values() for number, tensor in enumerate(tensors))
    note(context, GivenToFunction(function_of_context(context), given, saved, computes))
    return tuple(_with_graph(arguments, saved, tensors))


def _with_graph(arguments: list[Any], saved: dict[int, int], tensors: tuple[Any, ...]) -> list[Any]:
    """What is saved, with the graph of the argument where forward() has made a view of it."""
    found = [*tensors]
    for place, number in saved.items():
        argument, tensor = arguments[place], tensors[number]
        is_view = tensor.shape != argument.shape or argument.grad_fn is not None
        if argument.requires_grad and tensor.grad_fn is None and is_view:
            with torch.enable_grad():
                found[number] = argument.view(tensor.shape)
    return found


def _given(context: Any, frame: FrameType) -> list[Any] | None:
    """What a call was given, if all of that is known. frame: of the code that saves."""
    function = function_of_context(context)
    if function is None or not _is_custom(function) or not any(context.needs_input_grad):
        return None
    has_backward = getattr(function, "vjp", None) is getattr(torch.autograd.Function, "vjp", None)
    if not has_backward or getattr(function, "boxed_grads_call", False):  # its backward is called in another way
        return None
    _, method, forward = _frames_around(frame, function)
    if forward is None:
        return None
    applied = forward.f_back
    if applied is not None and applied.f_code is _APPLY_CODE:
        arguments = list(applied.f_locals.get("args", ()))
    elif (known := _arguments_of(function)) is not None:
        arguments = known
    else:
        arguments = _arguments(forward, method)
        pairs = zip(context.needs_input_grad, arguments, strict=False)
        if any(needs_gradient and not _is_argument(value) for needs_gradient, value in pairs):
            return None
    if len(arguments) != len(context.needs_input_grad) or not all(map(is_plain, arguments)):
        return None
    return arguments


def is_plain(argument: Any) -> bool:
    """Whether an argument of a function is no tensor, or one with strided memory of its own."""
    if not isinstance(argument, Tensor):
        return True
    return type(argument) in PLAIN_OR_PARAMETER and argument.layout is torch.strided and not argument.is_nested


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same elements in the same order."""
    if type(other) not in PLAIN_OR_PARAMETER or other.layout is not torch.strided or one.dtype != other.dtype:
        return False
    if one.storage_offset() != other.storage_offset() or storage_id(one) != storage_id(other):
        return False
    if one.shape == other.shape:
        return one.stride() == other.stride()
    return one.numel() == other.numel() and one.is_contiguous() and other.is_contiguous()


class _Remembered(NamedTuple):
    """A call that is about to save."""

    callers: set[_Place]
    """where apply may have been called: one place, unless forward() shows no frame that is known to be its own"""
    saves: list[int]
    """the storages of what has yet to be saved"""
    call: FunctionCall


class _Calls(threading.local):
    def __init__(self) -> None:  # both: innermost last
        self.calls: list[_Remembered] = []
        self.known: list[tuple[type, Sequence[Any]]] = []
        """(function, arguments) of those that run, where that is known"""


_remembered = _Calls()


def _is_custom(function: type) -> bool:
    """Whether a function is neither ours nor known of a framework."""
    return function.__name__ not in _KNOWN_FUNCTIONS and function.__module__.partition(".")[0] != _OWN


_OWN = __name__.partition(".")[0]


def _remember_in_forward(context: Any, tensors: tuple[Any, ...], frame: FrameType) -> tuple[Any, ...]:
    return tensors if in_backward() or inside_checkpoint() else _remember(context, tensors, frame)


def _remember(context: Any, tensors: tuple[Any, ...], frame: FrameType) -> tuple[Any, ...]:
    """Remember a call, if one of its inputs needs a gradient: then it will save. Returns what it saves.

    frame: of the code that saves.
    """
    function = function_of_context(context)
    if function is None or not _is_custom(function) or function.__module__.startswith(COMPILED_FUNCTIONS):
        return tensors
    if not any(context.needs_input_grad):
        return tensors
    around, method, forward = _frames_around(frame, function)
    # what is not around this call has ended without saving all, by an exception
    _remembered.calls[:] = [other for other in _remembered.calls if not other.callers.isdisjoint(around)]
    given: list[Any] = []
    unknown = len(context.needs_input_grad)
    if forward is not None:
        caller = forward.f_back
        around = set() if caller is None else {(id(caller), caller.f_lasti)}
        known = _arguments_of(function)
        given, unknown = _trusted(context, _arguments(forward, method)) if known is None else (known, 0)
    saves = [storage_id(tensor) for tensor in tensors if type(tensor) in PLAIN_OR_PARAMETER]
    _remembered.calls.append(_Remembered(around, saves, FunctionCall(object(), function, given, unknown)))
    return tensors


def _frames_around(frame: FrameType, function: type) -> tuple[set[_Place], str, FrameType | None]:
    """(the place of each frame from this one up, which of a function's methods was met first, its frame)."""
    own = {getattr(getattr(function, name), "__code__", None): name for name in ("forward", "setup_context")}
    around: set[_Place] = set()
    method, found = "", None
    caller: FrameType | None = frame
    while caller is not None:
        around.add((id(caller), caller.f_lasti))
        if found is None and caller.f_code in own:
            method, found = own[caller.f_code], caller
        caller = caller.f_back
    return around, method, found


def _arguments(frame: FrameType, method: str) -> list[Any]:
    """What apply was given, as the frame of forward() or of setup_context() has it now."""
    code, found = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    if method == "setup_context":
        return list(found.get(names[1], ())) if len(names) > 1 else []
    values = [found.get(name) for name in names]
    if code.co_flags & _VARARGS:
        values += found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return values[1:]  # the first is the context


_VARARGS = 0x04  # inspect.CO_VARARGS


def _trusted(context: Any, arguments: list[Any]) -> tuple[list[Any], int]:
    """(what a call was given, how many of its tensors are not known). See [Note: calls without a frame]."""
    trusted, unknown = [], 0
    for needs_gradient, value in zip_longest(context.needs_input_grad, arguments, fillvalue=None):
        if not needs_gradient or _is_argument(value):
            trusted.append(value)
        elif isinstance(value, Tensor) and value.requires_grad:
            trusted.append(value._base)
        else:
            unknown += 1
    return trusted, unknown


def _is_argument(value: Any) -> bool:
    """Whether a value may be what a call was given, and required a gradient: it does, and is no view that forward() has
    made, where nothing has a graph."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return False
    return value._base is None or not value._base.requires_grad or node_of(value) is not None


@contextmanager
def arguments_known(function: type, arguments: Sequence[Any]) -> Iterator[None]:
    """Within the context a function is called with these arguments."""
    _remembered.known.append((function, arguments))
    try:
        yield
    finally:
        _remembered.known.pop()


def _arguments_of(function: type) -> list[Any] | None:
    """Of the call of a function that is running; None if they are not known."""
    known = _remembered.known
    return [*known[-1][1]] if known and known[-1][0] is function else None
