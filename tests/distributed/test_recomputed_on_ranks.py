"""What checkpointed blocks save while they run again, on two ranks: plans agree, in the job and under sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import wrapped
from small_models import gpt, loss_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gact_dist
from gact_dist import Config

STEPS = 4


def trained(wrapper: str, config: Config) -> tuple[dict, list[float]]:
    """(plan, losses) of a rank."""
    torch.manual_seed(0)
    model, batch = gpt()
    model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    torch.manual_seed(dist.get_rank())
    batch = tuple(tensor[torch.randperm(len(tensor))] for tensor in batch)
    model = wrapped.WRAPPERS[wrapper](model, model.blocks)
    gact = gact_dist.attach(model, config=config)
    losses = wrapped.losses_of(gact, model, loss_of(model), batch, STEPS)
    return gact.plan, losses


@pytest.mark.parametrize("wrapper", wrapped.WRAPPERS)
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
