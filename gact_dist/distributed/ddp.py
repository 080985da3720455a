"""DistributedDataParallel, and DataParallel before it."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map_only

from .._patches import replaced
from .framework import Framework


class Ddp(Framework):
    """Wrappers that hold whole parameters and average gradients."""

    name = "DDP"
    forwarding_nodes = ("_DDPSinkBackward",)

    def inner(self, module: nn.Module) -> nn.Module | None:
        return module.module if isinstance(module, (DistributedDataParallel, DataParallel)) else None

    def plain_forward(self) -> AbstractContextManager[None]:
        return replaced(DistributedDataParallel, "forward", _forward)


def _forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = self.device_ids[0]
        inputs, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (inputs, kwargs))
    return self.module(*inputs, **kwargs)
