"""The predicted peak of a step beside a measured one, on one process and on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_storages import StorageCount, allocated_peaks
from small_models import SmallCNN, TinyGPT
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist.profile import Settings, profile

TOLERATED = 0.05
RANKS = 2
LEVELS = ("untouched", "L2")


def gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, 65))
    return TinyGPT(256, 64, 3), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    model = nn.Sequential(blocks, nn.LayerNorm(128), nn.Linear(128, 10))
    return model, (torch.randn(1024, 128), torch.randint(0, 10, (1024,)))


def cnn() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return SmallCNN(16), (torch.randn(16, 1, 16, 16), torch.randint(0, 10, (16,)))


def wide() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """What its linear layers and GELU read is large enough to be decoded as they go on."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.LayerNorm(256), nn.Linear(256, 10))
    return model, (torch.randn(1024, 256), torch.randint(0, 10, (1024,)))


JOBS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "gpt": gpt,
    "mlp": mlp,
    "wide": wide,
    "cnn": cnn,
}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def build(name: str) -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    model, batch = JOBS[name]()
    return model, batch, partial(loss_of, model)


def measured(name: str, layout: str | None, level: str, in_operators: bool = True) -> int:
    """Live bytes at the peak of a step after all adaptations. in_operators: with what they allocate within."""
    model, batch = JOBS[name]()
    job: nn.Module = model
    buckets: list[Tensor] = []
    if layout == "fsdp2":
        for block in model.blocks if isinstance(model, TinyGPT) else model[0]:
            fully_shard(block)
        fully_shard(model)
    elif layout == "ddp":
        job = DistributedDataParallel(model)
        buckets = [torch.empty_like(parameter) for parameter in model.parameters()]  # what its reducer has made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = gact_dist.Config.from_level("L0" if level == "untouched" else level, noise_limit=0.0)
    gact = gact_dist.attach(job, config=config)
    loss_fn = partial(loss_of, job)

    def step() -> None:
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    assert level == "untouched" or gact.adaptation is not None
    if in_operators:
        return min(allocated_peaks(step, 2, model, optimizer, batch, buckets))
    with StorageCount(model, optimizer, batch) as count:
        step()
    return count.peak_bytes


def assert_predicted(name: str, layout: str | None, truths: dict[str, int]) -> None:
    settings = Settings(fake=True, layout=layout, world_size=1 if layout is None else RANKS)
    predicted = profile(partial(build, name), LEVELS, settings)
    errors = {level: predicted.level(level).peak_bytes / truth - 1 for level, truth in truths.items()}
    assert max(map(abs, errors.values())) <= TOLERATED, errors
    assert truths["L2"] < truths["untouched"]


@pytest.mark.parametrize("name", ["gpt", "mlp", "wide"])
def test_peak_of_one_process_is_that_of_the_allocator(name):
    assert_predicted(name, None, {level: measured(name, None, level) for level in LEVELS})


def test_peak_of_convolutions_is_that_of_live_storages():
    """Their operators allocate much within themselves, which no tensor shows."""
    assert_predicted("cnn", None, {level: measured("cnn", None, level, in_operators=False) for level in LEVELS})


@pytest.mark.parametrize(("name", "layout"), [("gpt", "fsdp2"), ("mlp", "ddp")])
def test_peak_on_two_ranks_is_that_of_the_allocator(ranks, name, layout):
    found = {level: ranks(measured, name, layout, level, world_size=RANKS) for level in LEVELS}
    assert_predicted(name, layout, {level: max(peaks) for level, peaks in found.items()})
