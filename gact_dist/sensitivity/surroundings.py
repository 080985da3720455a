"""What the result of a block depends on besides its inputs, so that it can run again and do the same."""

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._patches import replaced
from .attributes import Attributes

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class Generators:
    """The states of the generators of torch (every device in use), Python and NumPy."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class Surroundings:
    """Of one run of a block: random numbers, autocast, and the attributes and buffers that the block changes."""

    def __init__(self, modules: list[nn.Module], devices: list[str]) -> None:
        """modules: whose buffers the block may write. devices: the types of its inputs' devices."""
        self._generators = Generators()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in sorted({"cpu", *devices})
        ]
        owners = {id(owner): owner for module in modules for owner in module.modules() if owner._buffers}
        self._attributes = Attributes(owner for module in modules for owner in module.modules())
        self._buffers = [
            (owner, name, buffer, buffer._version, buffer.detach().clone())
            for owner in owners.values()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def settle(self) -> None:
        """After the run: only what it changed needs to be set back."""
        self._attributes.settle()
        self._buffers = [
            entry
            for entry in self._buffers
            if entry[0]._buffers.get(entry[1]) is not entry[2] or entry[2]._version != entry[3]
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the context everything is as it was before the run."""
        self._generators.restore()
        self._attributes.restore()
        for owner, name, _, _, before in self._buffers:
            owner._buffers[name] = before.clone()
        with ExitStack() as stack:
            for device, enabled, dtype in self._autocast:
                # without its cache, which would keep a copy of every weight
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def copied(arguments: Any) -> Any:
    """Arguments of a function with everything copied that it might change, but for tensors and modules.

    A key-value cache, a list that layers append to: a second run must find them as the first did.
    """
    if _is_plain(arguments):
        return arguments
    with ExitStack() as stack:
        for kind in (Tensor, nn.Parameter, nn.Module):
            stack.enter_context(replaced(kind, "__deepcopy__", _itself))
        try:
            return copy.deepcopy(arguments)
        except (TypeError, AttributeError, RuntimeError, copy.Error):  # a lock, a generator, a process group
            return arguments


def _itself(self: Any, _: dict) -> Any:
    return self


def _is_plain(value: Any) -> bool:
    if isinstance(value, (Tensor, *_PLAIN)):
        return True
    if type(value) is tuple:
        return all(_is_plain(part) for part in value)
    return type(value) is dict and all(_is_plain(part) for part in value.values())
