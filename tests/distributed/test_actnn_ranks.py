"""Policy actnn on two ranks: one plan from everybody's samples, and what is known of a sample is known to all."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import count_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config
from gact_dist.distributed import collectives as sync

CONFIG = Config(policy="actnn", bits=2, adapt_interval=3, adapt_tolerance=0, min_numel=64, calibration_samples=16)
SAMPLES = 16


def batch_of(rank, step):
    """Samples of a rank that differ thirtyfold in size, and their numbers: the other rank never sees them."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = torch.logspace(-1, 0.5, SAMPLES)[torch.randperm(SAMPLES, generator=generator)]
    inputs = torch.randn(SAMPLES, 64, generator=generator) * size[:, None] * (1 + rank)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return (inputs, labels), torch.arange(SAMPLES) + SAMPLES * (2 * (step % 4) + rank)


def session(follow=False):
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    )
    gact = gact_dist.attach(model, config=CONFIG)
    if follow:
        gact.follow()

    def loss_fn(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return model, gact, loss_fn


def trained():
    """(plans, collectives of each step's forward, gradient sizes right after an adaptation, gradient) of a rank."""
    model, gact, loss_fn = session()
    plans, collectives = [], []
    for step in range(7):
        batch, index = batch_of(dist.get_rank(), step)
        with count_collectives() as count, gact.step(loss_fn, batch, sample_index=index):
            loss = loss_fn(batch)
        model.zero_grad()
        loss.backward()
        plans.append(gact.plan)
        collectives.append(count.total)
    gact.calibrate(loss_fn, batch)
    sizes = gact._schedule.hooks.encoder.examples.gradients.sizes
    return plans, collectives, sizes, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_ranks_share_a_plan_and_what_they_know_of_samples(ranks):
    (plans, collectives, sizes, gradient), other = ranks(trained)
    assert plans == other[0]
    assert any(isinstance(bits, tuple) for bits in plans[-1].values())
    assert len({str(plan) for plan in plans}) >= 2  # steps 1, 4 and 7 adapt
    assert collectives == other[1]
    # none in steps without an adaptation; in the second step DDP itself exchanges the order of its buckets
    assert [collectives[step] > 0 for step in (0, 2, 3, 4, 5, 6)] == [True, False, True, False, False, True]
    assert torch.equal(sizes, other[2])
    assert (sizes[: 8 * SAMPLES] > 0).all()  # both ranks' samples of four different steps
    assert torch.equal(gradient, other[3])


def followed():
    _, gact, loss_fn = session(follow=True)
    for step in range(5):
        loss_fn(batch_of(dist.get_rank(), step)[0]).backward()
    return gact.plan, {row.codec for row in gact.report().rows}


def test_a_followed_job_has_bits_for_samples_too(ranks):
    (plan, kinds), other = ranks(followed)
    assert plan == other[0]
    assert "mixed" in kinds


def shared():
    """Sizes of a rank that knows three samples, one that knows another number of them, and of ranks without any."""
    mine = [torch.tensor([1.0, 0.0, 4.0]), torch.tensor([3.0, 0.0, 0.0, 5.0, 0.0])][dist.get_rank()]
    one_sided = mine if dist.get_rank() == 0 else None
    found = [sync.mean_of_positive(values, [None]) for values in (mine, one_sided, None)]
    return [None if values is None else values.tolist() for values in found]


def test_a_mean_is_over_the_ranks_that_have_a_value(ranks):
    expected = [[2.0, 0.0, 4.0, 5.0, 0.0], [1.0, 0.0, 4.0], None]
    assert ranks(shared) == [expected, expected]
