"""Every storage of a job: when it came and went, what made it, and for which module and line.

[Note: tracking] A storage is met where an operator returns or takes it, and a weak reference to it says when it is
freed: the way of torch's MemTracker. That one attributes memory to modules alone, visits every module after every
operator, and knows neither operators nor lines nor what hooks for saved tensors make. This one only writes down what
happens. What a storage was for follows from its whole life, so it is decided when the step is over.

A backward has no Python frames of the model. Its operators belong to the module and line whose forward made the node
that runs: the node's number says which.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules

from .._patches import replaced
from .._paths import PACKAGE_ROOT
from .._torch_internals import (
    DIRECTORY,
    PLAIN_OR_PARAMETER,
    DispatchMode,
    current_fake_mode,
    is_fake,
    next_sequence_number,
    node_in_backward,
    number_of,
    waits_for_collective,
)
from ..hooks import Streamed, parts_of

_DEVICE = torch.ops.prim.device.default


class Origin(Enum):
    """Whose code made a storage."""

    JOB = "job"
    SHARDING = "sharding"  # FSDP, DDP: gathered parameters, buffers of collectives
    COMPRESSION = "compression"  # gact_dist: payloads, and what is decoded from them


class Phase(Enum):
    """Of a step."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Site(NamedTuple):
    """For which module and line of the user's a storage was made."""

    module: str = ""
    line: str = ""


@dataclass(slots=True)
class Storage:
    """One storage of the job."""

    operator: str
    """that returned it; "" of one that was there before"""
    site: Site
    origin: Origin
    phase: Phase
    step: int
    device: str
    """its type"""
    recomputed: bool = False
    """whether it was made by a forward within a backward"""
    kind: str = ""
    """what it is, where an object of the job says so: a parameter, a gradient"""


class Event(NamedTuple):
    """The bytes of a storage change."""

    time: int
    """operators run so far"""
    storage: int
    """its number"""
    nbytes: int
    """from now on"""


class Mark(NamedTuple):
    """A phase begins."""

    event: int
    """the number of the first event in it"""
    time: int
    """operators run so far"""
    phase: Phase
    step: int
    """0 while the job is built"""


class _Whose(Enum):
    """Whose a frame is."""

    USER = 0
    LIBRARY = 1
    SHARDING = 2
    COMPRESSION = 3
    ENGINE = 4


_ORIGINS = {_Whose.SHARDING: Origin.SHARDING, _Whose.COMPRESSION: Origin.COMPRESSION}
_FOLDERS = (
    (os.path.join(DIRECTORY, "distributed", "fsdp"), _Whose.SHARDING),
    (os.path.join(DIRECTORY, "nn", "parallel"), _Whose.SHARDING),
    (DIRECTORY, _Whose.LIBRARY),
    (__file__, _Whose.LIBRARY),
    (os.path.dirname(__file__), _Whose.ENGINE),
    (os.path.join(PACKAGE_ROOT, "cli"), _Whose.ENGINE),
    (os.path.join(PACKAGE_ROOT, "hooks", "roles.py"), _Whose.LIBRARY),  # its observer stands between every two calls
    (PACKAGE_ROOT, _Whose.COMPRESSION),
    ("<", _Whose.LIBRARY),
)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _whose(path: str) -> _Whose:
    for folder, whose in _FOLDERS:
        if path.startswith(folder):
            return whose
    installed = path.startswith(_PACKAGES)
    return _Whose.LIBRARY if path.startswith(_STANDARD) and not installed else _Whose.USER


def _short(path: str) -> str:
    """A file as people name it: without the folder that packages are installed in, or the current one."""
    for folder in (*_PACKAGES, os.getcwd()):
        if path.startswith(folder + os.sep):
            return path[len(folder) + 1 :]
    return path


class Tracker(DispatchMode):
    """A dispatch mode that writes down the life of every storage that it meets. See [Note: tracking]."""

    leaves_streamed = True
    """see hooks/streamed.py"""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.marks = [Mark(0, 0, Phase.BUILD, 0)]
        self.time = 0
        self._alive: dict[int, tuple[int, Any]] = {}  # id of a storage -> (number, weak reference)
        self._nbytes: list[int] = []
        self._names: Mapping[nn.Module, str] = {}
        self._running: list[str] = []  # modules, innermost last
        self._sites: dict[int, Site] = {}  # by the number of the node that the forward made there
        self._owners: dict[int, str] = {}
        self._whose: dict[CodeType, tuple[_Whose, str]] = {}
        self._fake_mode: Any = None

    # -- contexts -----------------------------------------------------------------------------------------------

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Within the context storages are followed; the fake mode that is on, if any, is that of the job."""
        self._fake_mode = current_fake_mode()
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._meet_storage(storage, storage.device.type, "", None)
            return result

        with ExitStack() as stack:
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
            before = modules.register_module_forward_pre_hook(self._enter_module)
            after = modules.register_module_forward_hook(self._leave_module, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
            stack.enter_context(self)
            yield

    def name_modules(self, names: Mapping[nn.Module, str]) -> None:
        """From now on modules are called by these names, their paths in the user's model."""
        self._names = names
        self._owners = {
            id(tensor): name for module, name in names.items() for tensor in module.parameters(recurse=False)
        }

    def begin(self, phase: Phase, step: int) -> None:
        """A phase begins."""
        if phase is Phase.FORWARD:
            self._sites.clear()
        self._running.clear()
        self.marks.append(Mark(len(self.events), self.time, phase, step))

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        self._running.append((self._running[-1] if self._running else "") if name is None else name)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    # -- storages -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is _DEVICE and is_fake(args[0]):  # which most calls are
            return args[0].device
        if DTensor in types or Streamed in types:
            return NotImplemented  # its own dispatch comes first, and calls operators on the local parts, or on pieces
        fake = current_fake_mode()
        result = args[0] if fake and waits_for_collective(function) else function(*args, **(kwargs or {}))
        if fake is self._fake_mode:  # else DTensor only looks for a shape
            self._ran(function, args, kwargs, result)
        return result

    def _ran(self, function: Any, args: tuple, kwargs: dict | None, result: Any) -> None:
        self.time += 1
        if self.marks[-1].phase is Phase.FORWARD and torch.is_grad_enabled():
            number = next_sequence_number() - 1
            if number not in self._sites:
                self._sites[number] = self._site()[0]
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, "", None)
        for tensor in _tensors(result):
            self._meet(tensor, function.name(), self._site)

    def _meet(self, tensor: Tensor, operator: str, find: Any) -> None:
        parts = (tensor,) if type(tensor) in PLAIN_OR_PARAMETER and tensor.layout == torch.strided else parts_of(tensor)
        for part in parts:
            self._meet_storage(part.untyped_storage(), part.device.type, operator, find)

    def _meet_storage(self, storage: Any, device: str, operator: str, find: Any) -> int:
        """The number of a storage. find: gives the site of a new one, None of one that was there before."""
        known, nbytes = self._alive.get(id(storage)), storage.nbytes()
        if known is not None:
            if self._nbytes[known[0]] != nbytes:
                self._change(known[0], nbytes)
            return known[0]
        number = len(self.storages)
        phase, step = self.marks[-1].phase, self.marks[-1].step
        if find is None:
            made = Storage(operator, Site(), Origin.JOB, Phase.BUILD, 0, device)
        else:
            site, origin = find()
            recomputed = phase is Phase.BACKWARD and bool(self._running)
            made = Storage(operator, site, origin, phase, step, device, recomputed)
        self.storages.append(made)
        self._nbytes.append(0)
        self._alive[id(storage)] = number, weakref.ref(storage, partial(self._freed, number, id(storage)))
        self._change(number, nbytes)
        return number

    def _change(self, number: int, nbytes: int) -> None:
        self._nbytes[number] = nbytes
        self.events.append(Event(self.time, number, nbytes))

    def _freed(self, number: int, key: int, _: Any) -> None:
        self._change(number, 0)
        if key in self._alive and self._alive[key][0] == number:
            del self._alive[key]

    def mark(self, tensor: Tensor, kind: str, module: str = "") -> None:
        """Say what a tensor is, and which module it belongs to."""
        for part in parts_of(tensor):
            made = self.storages[self._meet_storage(part.untyped_storage(), part.device.type, "", None)]
            if not made.kind:
                made.kind, made.site = kind, Site(module, made.site.line)

    # -- sites --------------------------------------------------------------------------------------------------

    def _site(self) -> tuple[Site, Origin]:
        line, origin = self._frames()
        if self.marks[-1].phase is Phase.BACKWARD and not self._running:
            return self._site_in_backward(), origin
        return Site(self._running[-1] if self._running else "", line), origin

    def _site_in_backward(self) -> Site:
        node = node_in_backward()
        if node is None:
            return Site()
        variable = getattr(node, "variable", None)  # of the node that accumulates a gradient
        if variable is not None:
            return Site(self._owners.get(id(variable), ""))
        return self._sites.get(number_of(node), Site())

    def _frames(self) -> tuple[str, Origin]:
        """The innermost line of the user's, and whose code it called."""
        frame: Any = sys._getframe(1)
        origin = Origin.JOB
        while frame is not None:
            known = self._whose.get(frame.f_code)
            if known is None:
                path = frame.f_code.co_filename
                known = self._whose[frame.f_code] = _whose(path), _short(path)
            whose, path = known
            if whose is _Whose.USER:
                return f"{path}:{frame.f_lineno}", origin
            if whose is _Whose.ENGINE:
                break
            if origin is Origin.JOB:
                origin = _ORIGINS.get(whose, origin)
            frame = frame.f_back
        return "", origin


def _tensors(value: Any) -> Iterator[Tensor]:
    """What an operator takes or returns: tensors, and lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if item is not None:
                yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
