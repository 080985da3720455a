"""DeepSpeed: its engine, ZeRO-3's partitioned parameters, and its checkpoint()."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from os import sep
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._patches import SharedPatch, replaced
from .._torch_internals import innermost_hooks
from .framework import Framework, OptionalClass

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
        return cast(nn.Module, module.module) if _ENGINE.made(module) else None

    def shards(self, model: nn.Module) -> bool:
        return any(_is_partitioned(parameter) for parameter in model.parameters())

    def gathered(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        own = (parameter for module in modules for parameter in module.parameters(recurse=False))
        released = [parameter for parameter in own if _is_partitioned(parameter) and _is_released(parameter)]
        return sys.modules["deepspeed"].zero.GatheredParameters(released) if released else nullcontext()

    def sharding_groups(self, model: nn.Module) -> list[Any]:
        return [cast(Any, p).ds_process_group for p in model.parameters() if _is_partitioned(p)]

    def plain_forward(self) -> AbstractContextManager[None]:
        return replaced(_ENGINE.get(), "forward", _forward) if _ENGINE.loaded() else nullcontext()

    def steps_optimizer(self, module: nn.Module) -> bool:
        return _ENGINE.made(module)

    def checkpoints_as(self, checkpoint: Callable[..., Any]) -> AbstractContextManager[None]:
        def apply(function: Callable[..., Any], all_outputs: list, *args: Any) -> Any:
            outputs = checkpoint(function, *args)
            all_outputs += [outputs] if isinstance(outputs, Tensor) else outputs
            return outputs

        return replaced(_CHECKPOINT.get(), "apply", staticmethod(apply)) if _CHECKPOINT.loaded() else nullcontext()

    def offering_inputs(self, pack: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
        """DeepSpeed's checkpoint keeps block inputs past all hooks: see _offering."""
        return _OFFER.listening(_CHECKPOINT.get(), pack) if _CHECKPOINT.loaded() else nullcontext()


def _is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _is_released(parameter: Any) -> bool:
    """Small ones persist, and those that two modules share may have been gathered for the other."""
    return bool(parameter.ds_status.name == "NOT_AVAILABLE")


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    autocast: Any = nullcontext()
    if self.torch_autocast_enabled():
        autocast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
    with autocast:
        return self.module(*inputs, **kwargs)


def _offering(forward: Callable[..., Any], packs: list[Any]) -> Any:
    """The forward of DeepSpeed's checkpoint, which hands block inputs to the innermost hooks if packs has them."""

    @wraps(forward)
    def keeping(ctx: Any, *args: Any) -> Any:
        outputs = forward(ctx, *args)
        innermost = innermost_hooks()
        if innermost is not None and innermost[0] in packs and not _stores_inputs_itself():
            ctx.deepspeed_saved_tensors = _BlockInputs.packed(ctx.deepspeed_saved_tensors, innermost[0])
        return outputs

    return staticmethod(keeping)


_OFFER = SharedPatch("forward", _offering)


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
