"""DeepSpeed: its engine, ZeRO-3's partitioned parameters, and its checkpoint()."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from os import sep
from typing import Any

import torch
from torch import Tensor, nn

from .framework import Framework, OptionalClass, replaced

_ENGINE = OptionalClass("deepspeed", "DeepSpeedEngine")
_CHECKPOINT = OptionalClass("deepspeed.runtime.activation_checkpointing.checkpointing", "CheckpointFunction")
_STORES_INPUTS = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING")


class Zero(Framework):
    """DeepSpeedEngine, which wraps a model at every stage of ZeRO; at the third it splits parameters."""

    name = "ZeRO-3"
    forwarding_nodes = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
    operator_aliases = (("LinearFunctionForZeroStage3", "Addmm"),)
    plumbing = (f"{sep}deepspeed{sep}runtime{sep}",)
    hook_modules = ("deepspeed",)
    checkpoint_files = ("deepspeed/runtime/activation_checkpointing/checkpointing.py",)
    checkpoint_savers = (__file__,)

    def inner(self, module: nn.Module) -> nn.Module | None:
        return module.module if _ENGINE.made(module) else None  # type: ignore[return-value]

    def shards(self, model: nn.Module) -> bool:
        return bool(_partitioned(model))

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:
        partitioned = _partitioned(model)
        return sys.modules["deepspeed"].zero.GatheredParameters(partitioned) if partitioned else nullcontext()

    def plain_forward(self) -> AbstractContextManager[None]:
        return replaced(_ENGINE.get(), "forward", _forward) if _ENGINE.loaded() else nullcontext()

    def checkpoints_as(self, checkpoint: Callable[..., Any]) -> AbstractContextManager[None]:
        def apply(function: Callable[..., Any], all_outputs: list, *args: Any) -> Any:
            outputs = checkpoint(function, *args)
            all_outputs += [outputs] if isinstance(outputs, Tensor) else outputs
            return outputs

        return replaced(_CHECKPOINT.get(), "apply", staticmethod(apply)) if _CHECKPOINT.loaded() else nullcontext()

    @contextmanager
    def offering_inputs(self, pack: Callable[[Tensor], Any]) -> Iterator[None]:
        """DeepSpeed's checkpoint keeps block inputs past all hooks: see _Offer."""
        if not _CHECKPOINT.loaded():
            yield
            return
        _offer.open(pack)
        try:
            yield
        finally:
            _offer.close(pack)


def _partitioned(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    autocast: Any = nullcontext()
    if self.torch_autocast_enabled():
        autocast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
    with autocast:
        return self.module(*inputs, **kwargs)


class _Offer:
    """The pack hooks, of all threads, that take the inputs of DeepSpeed's checkpoints; replaces forward while any do.

    Counted rather than nested: contexts of two threads may end in any order.
    """

    def __init__(self) -> None:
        self._packs: list[Callable[[Tensor], Any]] = []
        self._lock = threading.Lock()
        self._original: Any = None

    def open(self, pack: Callable[[Tensor], Any]) -> None:
        function = _CHECKPOINT.get()
        with self._lock:
            if not self._packs:
                self._original = vars(function)["forward"]
                function.forward = staticmethod(self._offering(function.forward))
            self._packs.append(pack)

    def close(self, pack: Callable[[Tensor], Any]) -> None:
        with self._lock:
            self._packs.remove(pack)
            if not self._packs:
                _CHECKPOINT.get().forward = self._original

    def _offering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def keeping(ctx: Any, *args: Any) -> Any:
            outputs = forward(ctx, *args)
            innermost = torch._C._autograd._top_saved_tensors_default_hooks(False)
            if innermost is not None and innermost[0] in self._packs and not _stores_inputs_itself():
                ctx.deepspeed_saved_tensors = _BlockInputs.packed(ctx.deepspeed_saved_tensors, innermost[0])
            return outputs

        return keeping


_offer = _Offer()


def _stores_inputs_itself() -> bool:
    """Whether DeepSpeed is told to partition block inputs or to move them to the host."""
    settings = sys.modules[_CHECKPOINT.module]
    return any(getattr(settings, name) for name in _STORES_INPUTS)


class _BlockInputs(tuple[Any, ...]):
    """Compressed inputs of a checkpointed block, in the place where DeepSpeed keeps the tensors themselves.

    They are restored when DeepSpeed's backward first iterates over them; it does so twice, and drops them at its end.
    """

    _restored: tuple[Tensor, ...] | None = None

    @classmethod
    def packed(cls, tensors: Iterable[Tensor], pack: Callable[[Tensor], Any]) -> "_BlockInputs":
        return cls((pack(tensor), tensor.requires_grad) for tensor in tensors)

    def __iter__(self) -> Iterator[Tensor]:
        if self._restored is None:
            kept = super().__iter__()
            self._restored = tuple(handle.restore().requires_grad_(needs_grad) for handle, needs_grad in kept)
        return iter(self._restored)
