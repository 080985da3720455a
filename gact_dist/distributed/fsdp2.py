"""fully_shard (FSDP2): DTensor parameters and hooks on the modules themselves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from .framework import Framework, OptionalClass

_MODULE = OptionalClass("torch.distributed.fsdp", "FSDPModule")


class Fsdp2(Framework):
    """Modules that fully_shard was applied to."""

    name = "FSDP"
    forwarding_nodes = ("RegisterPostBackwardFunctionBackward",)
    hook_modules = ("torch.distributed.fsdp", "torch.distributed._composable")

    def unit(self, module: nn.Module) -> nn.Module | None:
        return module if _MODULE.made(module) else None

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        units: list[Any] = [module for module in modules if _MODULE.made(module)]
        for module in units:
            module._get_fsdp_state()._lazy_init()  # of the root before its first forward; otherwise it does nothing
        sharded = [module for module in units if _is_sharded(module)]
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()

    def sharding_groups(self, model: nn.Module) -> list[Any]:
        infos = [group.mesh_info for group in _groups(model)]
        return [info.shard_process_group for info in infos if hasattr(info, "shard_process_group")]

    def hook_casts(self, module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
        if not _MODULE.made(module):
            return None, None
        policy = cast(Any, module)._get_fsdp_state()._mp_policy
        return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def meshes_gathered(model: nn.Module) -> list[Any]:
    """The device meshes over which parameters are gathered before they are used."""
    return [group.mesh_info.mesh for group in _groups(model)]


def _groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that are gathered as one; what several modules share is there for each."""
    return [
        group
        for module in model.modules()
        if _MODULE.made(module)
        for group in groups_of(cast(Any, module)._get_fsdp_state())
    ]


def groups_of(state: Any) -> list[Any]:
    """Those that are a unit's own: several where it has parameters for different meshes. state: of the unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # an older torch (2.11) has one, or none
    return [] if group is None else [group]


def _is_sharded(module: Any) -> bool:
    return any(not group.is_unsharded for group in groups_of(module._get_fsdp_state()))
