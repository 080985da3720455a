"""Memory that is too little on one rank: all ranks take fewer samples at once, and hold one plan."""

from __future__ import annotations

import small_models
import torch
import torch.distributed as dist
from scarce_memory import Scarce
from torch.nn.parallel import DistributedDataParallel

import gact_dist


def calibrated(batches: list[int], fitting: list[int]) -> tuple:
    """Under DDP, with so many samples in the batch of a rank, of which so many fit."""
    rank = dist.get_rank()
    model, batch = small_models.gpt(batch=batches[rank])
    ddp = DistributedDataParallel(model)
    config = gact_dist.Config(policy="gact", min_numel=16, noise_limit=0, derive=False)  # no forward but those measured
    gact = gact_dist.attach(ddp, config=config)
    scarce = Scarce(ddp, gact, fitting[rank])
    loss_of = small_models.loss_of(ddp)
    for _ in range(2):
        gact.calibrate(loss_of, batch)
    torch.distributed.barrier()
    return gact.plan, gact.adaptation.predicted_variance, scarce.seen


def test_one_rank_without_memory_makes_all_take_fewer_samples_at_once(ranks):
    (plan, variance, seen), (other_plan, other_variance, other_seen) = ranks(calibrated, [16, 8], [16, 1])
    # 8 samples in parts of a quarter of the batch, then of half of that, also the second time
    assert seen == [4, 4, *8 * [2]]
    assert other_seen == [2, *16 * [1]]
    assert plan == other_plan != {}
    assert variance == other_variance


def test_a_rank_whose_memory_is_never_enough_has_its_plan_from_the_other(ranks):
    (plan, _, seen), (other_plan, _, other_seen) = ranks(calibrated, [16, 8], [16, 0])
    # one sample at a time, then by perturbation, which is where the second time goes on
    assert seen == [4, 4, *4 * [2], *32 * [1]]
    assert other_seen == [2, *5 * [1]]
    assert plan == other_plan != {}
