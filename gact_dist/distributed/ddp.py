"""DistributedDataParallel, and DataParallel before it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol
from weakref import ref

from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook
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


class JoinListener(Protocol):
    """What is told of DDP's join()."""

    def join_begins(self) -> None:
        """A context is made."""

    def rank_leaves(self) -> None:
        """This rank has no batches left in it, or leaves it by an exception."""

    def join_ends(self) -> None:
        """No rank has any left."""

    def join_breaks(self) -> None:
        """An exception has ended it on this rank."""


class Joins:
    """Notices when DDP's join() begins and ends around the steps of a model.

    [Note: join] Ranks with fewer batches leave the loop of join() earlier and shadow DDP's collectives until the others
    have finished. Ours would be taken for DDP's. So a rank that has no batches left says so where the ranks meet before
    each collective of ours ([Note: meeting] in collectives.py), and from there on nothing is measured until all ranks
    have left. Each rank comes to that meeting, or leaves it, once in a context.
    """

    def __init__(self, model: nn.Module, listener: JoinListener) -> None:
        self._wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._listener, self._open = listener, False
        self._listening = ExitStack()
        if self._wrappers:
            self._listening.enter_context(_join_hook.listening(DistributedDataParallel, ref(self)))
            self._listening.enter_context(_join_exit.listening(Join, ref(self)))

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
        if not self._holds(wrapper):
            return hook
        if not self._open:
            self._listener.join_begins()
        self._open = True
        return _WatchedHook(hook, self._left)

    def leaving(self, context: Join) -> None:
        """This rank leaves a context, and may have to shadow the others for a while."""
        if self._takes_part(context):
            self._listener.rank_leaves()

    def broken(self, context: Join) -> None:
        """A context has ended by an exception."""
        if self._takes_part(context):
            self._open = False
            self._listener.join_breaks()

    def _takes_part(self, context: Join) -> bool:
        return self.inside and any(self._holds(joinable) for joinable in context._joinables)

    def _holds(self, wrapper: object) -> bool:
        return any(wrapper is own for own in self._wrappers)

    def _left(self) -> None:
        if self._open:
            self._open = False
            self._listener.join_ends()


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


def _watched_exit(original: Callable[..., None], listeners: list[Any]) -> Callable[..., None]:
    def __exit__(self: Join, kind: type[BaseException] | None, *error: Any) -> None:
        joins = [own for listener in listeners if (own := listener()) is not None]
        broken = True  # the method itself raises where the context is to end with its first rank
        for own in joins:
            own.leaving(self)
        try:
            original(self, kind, *error)
            broken = kind is not None
        finally:
            for own in joins if broken else ():
                own.broken(self)

    return __exit__


_join_hook = SharedPatch("join_hook", _watched_join_hook)
_join_exit = SharedPatch("__exit__", _watched_exit)


def _forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = self.device_ids[0]
        inputs, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (inputs, kwargs))
    return self.module(*inputs, **kwargs)
