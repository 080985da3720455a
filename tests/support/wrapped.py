"""Models with what a data-parallel job puts around them, and a short training loop for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

Blocks = Sequence[nn.Module]


def ddp(model: nn.Module, _: Blocks) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module, blocks: Blocks) -> nn.Module:
    policy = ModuleWrapPolicy({type(blocks[0])})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy)


def fsdp2(model: nn.Module, blocks: Blocks) -> nn.Module:
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module, Blocks], nn.Module]] = {"DDP": ddp, "FSDP1": fsdp1, "FSDP2": fsdp2}
"""each takes a model and the blocks that are units of their own"""


def losses_of(gact: Any, model: nn.Module, loss_fn: Callable[[Any], torch.Tensor], batch: Any, steps: int) -> list:
    """The losses of some steps of SGD on one batch."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(steps):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
