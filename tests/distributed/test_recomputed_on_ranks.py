"""What checkpointed blocks save while they run again, on two ranks: plans agree, in the job and under sharding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from small_models import gpt, loss_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config

STEPS = 4


def fsdp1(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({CheckpointWrapper})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy)


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
}


def trained(wrapper: str, config: Config) -> tuple[dict, list[float]]:
    """(plan, losses) of a rank."""
    torch.manual_seed(0)
    model, batch = gpt()
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    torch.manual_seed(dist.get_rank())
    batch = tuple(tensor[torch.randperm(len(tensor))] for tensor in batch)
    model = WRAPPERS[wrapper](model)
    gact = gact_dist.attach(model, config=config)
    loss_fn, optimizer, losses = loss_of(model), torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(STEPS):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return gact.plan, losses


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_recomputed_blocks_are_compressed_on_all_ranks_alike(ranks, wrapper):
    untouched = ranks(trained, wrapper, Config(policy="off"))
    exact = ranks(trained, wrapper, Config(policy="exact", recomputed=True))
    compressed = ranks(trained, wrapper, Config(bits=6, min_numel=16, recomputed=True))
    assert compressed[0][0] == compressed[1][0]
    assert sum("~" in name for name in compressed[0][0]) > 5
    for rank in range(2):
        first, last = untouched[rank][1][0], untouched[rank][1][-1]
        assert exact[rank][1] == untouched[rank][1]
        assert compressed[rank][1] == pytest.approx(untouched[rank][1], abs=0.05 * abs(first - last))
