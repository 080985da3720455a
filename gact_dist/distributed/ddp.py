"""DistributedDataParallel, and DataParallel before it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map_only

from .._patches import SharedPatch, replaced
from .framework import Framework


class Ddp(Framework):
    """Wrappers that hold whole parameters and average gradients."""

    name = "DDP"
    forwarding_nodes = ("_DDPSinkBackward",)

    def inner(self, module: nn.Module) -> nn.Module | None:
        return module.module if isinstance(module, (DistributedDataParallel, DataParallel)) else None

    def plain_forward(self) -> AbstractContextManager[None]:
        return replaced(DistributedDataParallel, "forward", _forward)


class Joins:
    """Notices when DDP's join() begins and ends around the steps of a model.

    [Note: join] Ranks with fewer batches leave the loop of join() earlier and shadow DDP's collectives until the others
    have finished. Nothing tells the others, so no adaptation may begin there. All ranks enter and leave the context
    together; steps in it are not counted, as ranks have different numbers of them.
    """

    def __init__(self, model: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """begin, end: called when a context is made, and when its last rank has no batches left."""
        self._wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._begin, self._end, self._open = begin, end, False
        self._listening = ExitStack()
        if self._wrappers:
            self._listening.enter_context(_join_hook.listening(DistributedDataParallel, ref(self)))

    @property
    def inside(self) -> bool:
        """Whether ranks may run out of batches now."""
        return self._open and any(wrapper._join_config.enable for wrapper in self._wrappers)

    def close(self) -> None:
        """Notice nothing from now on."""
        self._listening.close()
        self._open = False

    def entered(self, wrapper: DistributedDataParallel, hook: JoinHook) -> JoinHook:
        """A wrapper takes part in a context by this hook."""
        if not any(wrapper is own for own in self._wrappers):
            return hook
        if not self._open:
            self._begin()
        self._open = True
        return _WatchedHook(hook, self._left)

    def _left(self) -> None:
        if self._open:
            self._open = False
            self._end()


class _WatchedHook(JoinHook):
    """A wrapper's own hook, which also says when the context ends."""

    def __init__(self, hook: JoinHook, left: Callable[[], None]) -> None:
        self._hook, self._left = hook, left

    def main_hook(self) -> None:
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._left()


def _watched_join_hook(original: Callable[..., JoinHook], listeners: list[Any]) -> Callable[..., JoinHook]:
    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> JoinHook:
        hook = original(self, **kwargs)
        for listener in list(listeners):
            joins = listener()
            hook = hook if joins is None else joins.entered(self, hook)
        return hook

    return join_hook


_join_hook = SharedPatch("join_hook", _watched_join_hook)


def _forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = self.device_ids[0]
        inputs, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (inputs, kwargs))
    return self.module(*inputs, **kwargs)
