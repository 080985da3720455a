"""What modules hold besides parameters, buffers and submodules, noted so that it can be set back.

[Note: plain attributes] A forward may count its calls, keep a cache or a running value, draw from a generator of its
own. Copying all that a module holds would take its memory twice. So only the containers are copied, not what is in
them: the attributes of each module, and the lists, mappings, sets and objects that these lead to. The same is done for
what a user's forward and forward hooks close over and for the global variables that they name. What is in
a tensor is kept only if the forward writes to it; see in_place.py.
"""

import inspect
import random
import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import framework_libraries

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, ModuleType)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_LONGEST = 10_000  # of the containers whose items are looked at
_DEEPEST = 2  # objects that lead to one another: a cache, and its layers
_OURS = frozenset({"_parameters", "_buffers", "_modules", "forward", "_call_impl", "_compiled_call_impl"})
"""attributes of modules that others set back, or that are replaced while a model is measured"""
_LIBRARIES = frozenset({"gact_dist", "torch", "numpy"}) | framework_libraries() | sys.stdlib_module_names
"""whose objects are not looked into"""


class Attributes:
    """The attributes of some modules, and what these lead to. See [Note: plain attributes]."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        """those that were met"""
        self.modules: list[nn.Module] = []
        """those given, and others that they hold without having registered them"""
        self._entries: list[_Entry] = []
        self._met: set[int] = set()
        for module in modules:
            self._note_module(module)

    def restore(self) -> None:
        """Set everything back that has changed."""
        for entry in self._entries:
            entry.restore()

    def settle(self) -> None:
        """Forget what has not changed."""
        self._entries = [entry for entry in self._entries if entry.changed()]
        self.tensors.clear()
        self.modules.clear()

    def _note_module(self, module: nn.Module) -> None:
        if id(module) in self._met:
            return
        self._met.add(id(module))
        self.modules.append(module)
        attributes = vars(module)
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        mine = {key: value for key, value in attributes.items() if key not in _OURS and not key.endswith("_hooks")}
        self._entries.append(_Mapping(attributes, mine, frozenset(attributes) - frozenset(mine)))
        for value in mine.values():
            self._note(value, _DEEPEST)
        # a scripted module has a forward of its own
        for function in (getattr(type(module), "forward", None), *hooks):
            self._note_function(function)

    def _note(self, value: Any, depth: int) -> None:
        """depth: of the objects that are looked into."""
        if isinstance(value, _PLAIN) or id(value) in self._met:
            return
        if isinstance(value, nn.Module):
            self._note_hidden(value)
            return
        self._met.add(id(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, (dict, list, deque, set, tuple)):
            self._note_container(value, depth)
        elif (state := _state_of(value)) is not None:
            self._entries.append(state)
        elif depth and _is_looked_into(value):
            attributes = vars(value)
            self._entries.append(_Mapping(attributes, dict(attributes)))
            for item in attributes.copy().values():
                self._note(item, depth - 1)

    def _note_hidden(self, module: nn.Module) -> None:
        """A module in a list, say, which keeps its parameters from those of the model."""
        if id(module) not in self._met:
            for inner in module.modules():
                self._note_module(inner)
            self.tensors += module.parameters()

    def _note_container(self, value: Any, depth: int) -> None:
        if isinstance(value, dict):  # which may make what it is asked for: transformers' table of activations
            self._entries.append(_Mapping(value, dict(dict.items(value))))
        elif isinstance(value, (list, deque)):
            self._entries.append(_Sequence(value))
        elif isinstance(value, set):
            self._entries.append(_Set(value))
        if len(value) <= _LONGEST:
            for item in list(dict.values(value) if isinstance(value, dict) else value):
                self._note(item, depth)

    def _note_function(self, function: Any) -> None:
        """What a user's function can change without being given it."""
        while isinstance(function, partial):
            for item in (*function.args, *function.keywords.values()):
                self._note(item, 1)
            function = function.func
        if isinstance(function, MethodType):
            self._note(function.__self__, 1)
            function = function.__func__
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or id(function) in self._met or _library(function) in _LIBRARIES:
            return
        self._met.add(id(function))
        for cell in function.__closure__ or ():
            self._entries.append(_Cell(cell))
            self._note(self._entries[-1].before, 1)
        scope = function.__globals__
        named = {name: scope[name] for name in function.__code__.co_names if name in scope}
        changing = {name: value for name, value in named.items() if not callable(value)}
        self._entries.append(_Mapping(scope, changing, frozenset(scope) - frozenset(changing), removes=False))
        for value in changing.values():
            if isinstance(value, (dict, list, deque, set)):
                self._note(value, 0)


class _Entry(ABC):
    """One thing that may change, and what it was before."""

    before: Any

    @abstractmethod
    def changed(self) -> bool: ...

    @abstractmethod
    def restore(self) -> None: ...


class _Mapping(_Entry):
    def __init__(
        self, mapping: dict, before: dict, left_alone: frozenset[Any] = frozenset(), *, removes: bool = True
    ) -> None:
        """left_alone: keys that are not compared. removes: whether keys that were added are taken out."""
        self._mapping, self.before, self._left_alone, self._removes = mapping, before, left_alone, removes

    def changed(self) -> bool:
        added = self._removes and len(self._mapping) != len(self.before) + len(self._left_alone)
        return added or any(dict.get(self._mapping, key, self) is not value for key, value in self.before.items())

    def restore(self) -> None:
        if not self.changed():
            return
        if self._left_alone:
            if self._removes:
                for key in [key for key in self._mapping if key not in self.before and key not in self._left_alone]:
                    del self._mapping[key]
            self._mapping.update(self.before)
            return
        base: Any = OrderedDict if isinstance(self._mapping, OrderedDict) else dict
        base.clear(self._mapping)
        base.update(self._mapping, self.before)


class _Sequence(_Entry):
    def __init__(self, sequence: list | deque) -> None:
        self._sequence, self.before = sequence, list(sequence)

    def changed(self) -> bool:
        same = len(self._sequence) == len(self.before)
        return not (same and all(now is before for now, before in zip(self._sequence, self.before, strict=True)))

    def restore(self) -> None:
        if self.changed():
            self._sequence.clear()
            self._sequence.extend(self.before)


class _Set(_Entry):
    def __init__(self, items: set) -> None:
        self._items, self.before = items, set(items)

    def changed(self) -> bool:
        return self._items != self.before

    def restore(self) -> None:
        if self.changed():
            self._items.clear()
            self._items.update(self.before)


class _Cell(_Entry):
    """A variable that a function closes over."""

    def __init__(self, cell: CellType) -> None:
        self._cell, self.before = cell, self._contents(cell)

    @staticmethod
    def _contents(cell: CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # nothing was assigned to the variable yet
            return CellType

    def changed(self) -> bool:
        return self._contents(self._cell) is not self.before

    def restore(self) -> None:
        if self.changed() and self.before is not CellType:
            self._cell.cell_contents = self.before


class Drawn(_Entry):
    """The state of a generator of random numbers."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], Any]) -> None:
        self._get, self._set, self.before = get, set_, get()

    def changed(self) -> bool:
        return True

    def restore(self) -> None:
        self._set(self.before)


def _state_of(value: Any) -> Drawn | None:
    """The state of a generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return Drawn(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Drawn(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return Drawn(value.get_state, value.set_state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Drawn(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, SimpleNamespace):
        return True
    return isinstance(getattr(value, "__dict__", None), dict) and _library(type(value)) not in _LIBRARIES


def _library(made: Any) -> str:
    return str(getattr(made, "__module__", "")).partition(".")[0]
