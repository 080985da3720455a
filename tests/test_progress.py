"""What is logged as a job goes on: one line at attach, one after the first step, one after each adaptation; scalars."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from messages import Messages
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gact_dist import Config, attach

SMALL = Config.from_level("L2", adapt_interval=2, min_numel=16)


ATTACHED = "attached to Sequential: policy gact, 4 bits (float32 that is rounded takes 7.5 times less)"


def lines_of_job(config: Config, steps: int, wrap: bool) -> list[str]:
    torch.manual_seed(3)
    with Messages(logging.INFO, "gact_dist.steps.progress") as said:
        model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
        model = DistributedDataParallel(model) if wrap else model
        gact = attach(model, config=config).follow()
        for _ in range(steps):
            cross_entropy(model(torch.randn(16, 32)), torch.arange(16) % 10).backward()
        gact.detach()
    return said.texts


def test_one_line_at_attach_one_for_the_first_step_and_one_for_each_adaptation():
    attached, first, *adapted = lines_of_job(SMALL, 6, wrap=False)
    assert attached == ATTACHED
    assert first.startswith("step 1: ")
    assert "MiB kept for backward in place of" in first
    assert [line.split(";")[0].split(",")[0] for line in adapted][:2] == ["step 2: new plan", "step 4: plan kept"]
    assert all("ratio" in line for line in adapted)


def test_what_is_said_of_other_settings():
    assert lines_of_job(Config(policy="off"), 2, wrap=False) == ["attached to Sequential: nothing is compressed"]
    assert lines_of_job(Config(policy="exact"), 2, wrap=False)[0] == "attached to Sequential: policy exact"
    texts = lines_of_job(Config(policy="acgc", error=0.5, min_numel=16), 1, wrap=False)
    assert texts[0] == "attached to Sequential: policy acgc, error 0.5"


def said_on_a_rank() -> tuple[int, list[str]]:
    return dist.get_rank(), lines_of_job(SMALL, 3, wrap=True)


def test_only_the_first_rank_says_it(ranks):
    (_, first), (_, second) = ranks(said_on_a_rank)
    assert first[0] == f"{ATTACHED}, one plan for 2 ranks"
    assert len(first) == 3
    assert second == []


class WritesUnseen(nn.Module):
    """Its forward changes a tensor of its own as an extension's kernel would: that cannot be seen and undone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(32, 10), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            self.count.add_(1)
        return self.layer(x)


def warned_of_in_place() -> tuple[int, list[str]]:
    """(adaptations, what was said) where each adaptation finds the same."""
    torch.manual_seed(3)
    with Messages(of="gact_dist.sensitivity.in_place") as said:
        gact = attach(DistributedDataParallel(model := WritesUnseen()), config=SMALL)

        def loss_fn(batch: torch.Tensor) -> torch.Tensor:
            return cross_entropy(model(batch), torch.arange(16)[: len(batch)] % 10)

        for _ in range(3):
            gact.calibrate(loss_fn, torch.randn(16, 32))
        return len(gact.history), said.texts


def test_what_every_adaptation_of_every_rank_finds_is_said_once_by_the_first(ranks):
    (adaptations, first), (_, second) = ranks(warned_of_in_place)
    assert adaptations == 3
    assert len(first) == 1
    assert "changed tensors of shapes [(3,)] in place in a way that cannot be undone" in first[0]
    assert second == []


def test_scalars_follow_the_report_and_the_adaptation():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    gact = attach(model, config=SMALL)

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(batch), torch.arange(16)[: len(batch)] % 10)

    assert set(gact.scalars()) == {"gact/retained_bytes", "gact/exact_bytes", "gact/ratio", "gact/peak_bytes"}
    batch = torch.randn(16, 32)
    with gact.step(loss_fn, batch):
        loss = loss_fn(batch)
    loss.backward()
    scalars, report = gact.scalars(), gact.report()
    assert scalars["gact/retained_bytes"] == report.retained_bytes > 0
    assert scalars["gact/exact_bytes"] == report.exact_bytes > report.retained_bytes
    assert scalars["gact/ratio"] == pytest.approx(report.ratio)
    assert scalars["gact/average_bits"] == gact.adaptation.average_bits
    assert scalars["gact/predicted_variance"] == gact.adaptation.predicted_variance
    assert scalars["gact/peak_bytes"] > 2**20
    assert "gact/gradient_error" not in scalars
