"""Hooks of the package on a user's modules: a copy of a module does not have them.

[Note: copies] copy.deepcopy, pickle and torch.save take along what a module's hooks refer to: here the controller, its
tables of weak references to storages, process groups. The copy, an average of the weights for instance, would be
compressed by a controller that belongs to another model. So while the package has hooks on any module, what nn.Module
reduces to is without them, also where a class collects its state itself, as nn.LSTM does. A class that copies itself
gets a function that does nothing in their place.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import finalize

from torch import nn

_TABLES = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip
_CALL = "_call_impl"
_registered = 0


class OwnHook(ABC):
    """A hook that copies of its module leave out."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


class OwnCall:
    """Calls a module as the module itself does, with a function that is told of a forward that did not finish.

    torch runs a module's hooks after an error, but not after Ctrl-C or sys.exit().
    """

    def __init__(self, module: nn.Module, interrupted: Callable[[], None]) -> None:
        self._module, self._interrupted = module, interrupted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        finished = False
        try:
            result = type(self._module)._call_impl(self._module, *args, **kwargs)
            finished = True
        finally:
            if not finished:
                self._interrupted()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self._module)._call_impl, memo[id(self._module)])

    def __reduce__(self) -> Any:
        return getattr, (self._module, _CALL)


class Registration:
    """What keeps hooks on a module; remove() takes them off."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo
        _count(1)
        self._counted = finalize(self, _count, -1)  # a model may be dropped with its hooks
        self._counted.atexit = False

    def remove(self) -> None:
        """Take them off; calling it again does nothing."""
        if self._undo is not None:
            self._undo()
            self._undo = None
            self._counted()


def before_forward(module: nn.Module, hook: OwnHook, **options: Any) -> Registration:
    """As register_forward_pre_hook."""
    return Registration(module.register_forward_pre_hook(hook, **options).remove)


def after_forward(module: nn.Module, hook: OwnHook, **options: Any) -> Registration:
    """As register_forward_hook."""
    return Registration(module.register_forward_hook(hook, **options).remove)


def on_interrupt(module: nn.Module, interrupted: Callable[[], None]) -> Registration:
    """Have a function called when a forward of a module does not finish. See OwnCall."""
    attributes = vars(module)
    if _CALL in attributes:  # another controller's, or a user's own: neither is replaced
        return Registration(lambda: None)
    attributes[_CALL] = call = OwnCall(module, interrupted)

    def undo() -> None:
        if attributes.get(_CALL) is call:
            del attributes[_CALL]

    return Registration(undo)


class Calling(OwnHook):
    """A hook that calls a function."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """In place of a hook in the copy of a module."""


def _nothing() -> Callable[..., None]:
    return nothing


_MODULE: Any = nn.Module


def _count(change: int) -> None:
    """nn.Module reduces to a state without the package's hooks while there are any."""
    global _registered
    before, _registered = _registered, _registered + change
    if _registered and not before:
        _MODULE.__reduce_ex__ = _reduced_without_own_hooks
    elif before and not _registered:
        del _MODULE.__reduce_ex__


def _reduced_without_own_hooks(module: nn.Module, protocol: Any) -> Any:
    reduced = super(nn.Module, module).__reduce_ex__(protocol)
    if not isinstance(reduced, tuple):
        return reduced
    made, arguments, *state = reduced
    arguments = tuple(map(_without_own_hooks, arguments))  # where a class reduces itself, as GraphModule does
    if state and isinstance(state[0], tuple):  # of a class with slots
        state[0] = tuple(map(_without_own_hooks, state[0]))
    elif state:
        state[0] = _without_own_hooks(state[0])
    return made, arguments, *state


def _without_own_hooks(attributes: Any) -> Any:
    """attributes: of a module; anything else is returned as it is."""
    if not isinstance(attributes, dict):
        return attributes
    found = (attributes.get("_forward_pre_hooks") or {}, attributes.get("_forward_hooks") or {})
    own = {key for hooks in found for key, hook in hooks.items() if isinstance(hook, OwnHook)}
    call = isinstance(attributes.get(_CALL), OwnCall)
    if not own and not call:
        return attributes
    kept = {name: value for name, value in attributes.items() if not (call and name == _CALL)}
    for name in _TABLES:
        if not own.isdisjoint(kept.get(name) or ()):
            kept[name] = OrderedDict((key, value) for key, value in kept[name].items() if key not in own)
    return kept
