"""DeepSpeed: its engine, ZeRO-3's partitioned parameters, and its checkpoint()."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from os import sep
from typing import Any

import torch
from torch import Tensor, nn

from .framework import Framework, OptionalClass, replaced

_ENGINE = OptionalClass("deepspeed", "DeepSpeedEngine")
_CHECKPOINT = OptionalClass("deepspeed.runtime.activation_checkpointing.checkpointing", "CheckpointFunction")


class Zero(Framework):
    """DeepSpeedEngine, which wraps a model at every stage of ZeRO; at the third it splits parameters."""

    name = "ZeRO-3"
    forwarding_nodes = ("PreBackwardFunctionForModuleBackward", "PostBackwardFunctionModuleBackward")
    operator_aliases = (("LinearFunctionForZeroStage3", "Addmm"),)
    plumbing = (f"{sep}deepspeed{sep}runtime{sep}",)
    hook_modules = ("deepspeed",)
    checkpoint_files = ("deepspeed/runtime/activation_checkpointing/checkpointing.py",)

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


def _partitioned(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    autocast: Any = nullcontext()
    if self.torch_autocast_enabled():
        autocast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
    with autocast:
        return self.module(*inputs, **kwargs)
