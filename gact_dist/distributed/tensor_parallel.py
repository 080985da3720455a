"""Tensor parallelism: DTensors whose shards take part in a forward without being gathered."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from .framework import Framework, OptionalClass
from .fsdp2 import meshes_gathered

_DTENSOR = OptionalClass("torch.distributed.tensor", "DTensor")
_PENDING = OptionalClass("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


class TensorParallel(Framework):
    """parallelize_module, and DTensor parameters in general."""

    name = "tensor parallelism"

    def shards(self, model: nn.Module) -> bool:
        return any(_DTENSOR.made(parameter) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor | None:
    """This rank's part of a distributed tensor, or of one whose collective is in flight; None for a plain tensor."""
    if _PENDING.made(tensor):
        return cast(Any, tensor).wait()
    if _DTENSOR.made(tensor):
        local = cast(Any, tensor)._local_tensor
        return local.wait() if _PENDING.made(local) else local
    return None


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its local part, or itself where it is a plain one."""
    local = local_part(tensor)
    return tensor if local is None else local


def distributed_again(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that turns a local part back into a distributed tensor like the one given here."""
    if not _DTENSOR.made(tensor):
        return lambda local: local
    like = cast(Any, tensor)
    place = {"device_mesh": like.device_mesh, "placements": like.placements}
    whole = {"shape": like.shape, "stride": like.stride()}
    return lambda local: _DTENSOR.get().from_local(local, **place, **whole, run_check=False)


def tensor_parallel_groups(model: nn.Module) -> list[Any]:
    """The process groups over which parameters are split without being gathered for a forward (tensor parallelism).

    Their ranks see the same examples and hold the same replicated parameters, so they must round alike.
    """
    if not _DTENSOR.loaded():
        return []
    gathered = {name for mesh in meshes_gathered(model) for name in _dimensions(mesh)}
    groups: dict[str, Any] = {}
    for parameter in model.parameters():
        if _DTENSOR.made(parameter):
            mesh = cast(Any, parameter).device_mesh
            for dimension, name in enumerate(_dimensions(mesh)):
                if name not in gathered:
                    group = mesh.get_group(dimension)
                    groups[group.group_name] = group
    return list(groups.values())


def _dimensions(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dimension {number}" for number in range(mesh.ndim))
