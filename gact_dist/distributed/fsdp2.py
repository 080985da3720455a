"""fully_shard (FSDP2): DTensor parameters and hooks on the modules themselves."""

from collections.abc import Iterator
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

    def shards(self, model: nn.Module) -> bool:
        return any(_MODULE.made(module) for module in model.modules())

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        sharding: list[Any] = [module for module in model.modules() if _MODULE.made(module)]
        roots = _outermost(sharding)
        for module in roots:
            module._get_fsdp_state()._lazy_init()  # before the first forward; afterwards it does nothing
        sharded = [module for module in sharding if _is_sharded(module)]
        for module in sharded:
            module.unshard()
        try:
            yield
        finally:
            for module in sharded:
                module.reshard()

    def hook_casts(self, module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
        if not _MODULE.made(module):
            return None, None
        policy = cast(Any, module)._get_fsdp_state()._mp_policy
        return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def meshes_gathered(model: nn.Module) -> list[Any]:
    """The device meshes over which parameters are gathered before they are used."""
    return [
        group.mesh_info.mesh
        for module in model.modules()
        if _MODULE.made(module)
        for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups
    ]


def _outermost(chosen: list[Any]) -> list[Any]:
    below = {id(inner) for module in chosen for inner in module.modules() if inner is not module}
    return [module for module in chosen if id(module) not in below]


def _is_sharded(module: Any) -> bool:
    return any(not group.is_unsharded for group in module._get_fsdp_state()._fsdp_param_groups)
