"""Tensors that a forward writes to, though they outlive it: their contents are kept when that happens.

[Note: written in place] An average of another network's weights, a normalised weight, a queue of keys: some forwards
change parameters or tensors of their own, in place or by giving them other data. To copy them all beforehand would take
the model's memory once more. A function mode sees each call by which Python code writes to a tensor, and copies what it
is about to change. Versions show what was changed in another way.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._torch_internals import is_inside_transform, set_version, storage_id
from ..distributed import say_once
from .attributes import Drawn

_log = logging.getLogger(__name__)
_OPERATORS = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
})  # fmt: skip
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_DATA: Any = Tensor.data


class InPlace(TorchFunctionMode):
    """Within the context what is written to some tensors is noted, and no hook is added to any tensor; restore() sets
    the tensors back. See [Note: written in place]."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = list({id(tensor): tensor for tensor in tensors if _has_memory(tensor)}.values())
        self._known = set(map(id, self._tensors))
        self._versions = [tensor._version for tensor in self._tensors]
        self._by_storage: dict[int, list[Tensor]] = {}
        for tensor in self._tensors:
            self._by_storage.setdefault(storage_id(tensor), []).append(tensor)
        self._contents: list[tuple[Tensor, Tensor]] = []  # (in the memory as it was, what was in it)
        self._data: list[tuple[Tensor, Tensor]] = []  # (tensor, in the memory that it had)
        self._generators: dict[torch.Generator, Drawn] = {}

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(function, "__name__", "")
        if name[-1:] == "_":
            if name == "__set__":
                if getattr(function, "__self__", None) is _DATA and id(args[0]) in self._known:
                    self._data.append((args[0], args[0].detach()))
            elif name in _OPERATORS or not name.endswith("__"):
                self._keep(args)
        elif name[:8] == "register" and function in _HOOKS:
            return RemovableHandle(OrderedDict())
        if not kwargs:
            return function(*args)
        if "out" in kwargs:
            self._keep((kwargs["out"],))
        generator = kwargs.get("generator")
        if generator is not None and generator not in self._generators:
            self._generators[generator] = Drawn(generator.get_state, generator.set_state)
        return function(*args, **kwargs)

    def _keep(self, values: Iterable[Any]) -> None:
        for tensor in _tensors(values):
            if _has_memory(tensor):
                for known in self._by_storage.pop(storage_id(tensor), ()):
                    memory = _memory(known)
                    self._contents.append((memory, memory.clone()))

    def restore(self) -> None:
        """Set back what was written to."""
        for tensor, before in reversed(self._data):
            tensor.data = before
        for memory, before in reversed(self._contents):
            memory.copy_(before)
        kept = {storage_id(memory) for memory, _ in self._contents}
        unknown = []
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version and storage_id(tensor) in kept:
                set_version(tensor, version)
            elif tensor._version != version:
                unknown.append(tuple(tensor.shape))
        for state in self._generators.values():
            state.restore()
        if unknown:
            say_once(
                _log,
                "while it was measured, the model's forward changed tensors of shapes %s in place in a way that cannot "
                "be undone: they are as after one more forward",
                unknown,
            )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _memory(tensor: Tensor) -> Tensor:
    """What lies between a tensor's first and last element, each place once: an expanded one shares them."""
    if tensor.numel() == 0:
        return tensor.detach()
    places = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((1 + places,), (1,))


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta or is_lazy(tensor):
        return False
    return not is_inside_transform(tensor)
