"""A job with one operator of which the result is derived, and how far its gradient is from the exact one."""

from __future__ import annotations

import torch
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.policies import Plan

WIDTH, TOKENS = 64, 256


class Lambda(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.parts)


class Job:
    """Two linear layers with something between them."""

    def __init__(self, between, **config):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), between, nn.Linear(WIDTH, WIDTH))
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        self.x = torch.randn(TOKENS, WIDTH)
        self.gact = gact_dist.attach(self.model, config=Config(policy="uniform", bits=4, derive=True, **config))

    def gradient(self, stored_exactly=()):
        """Of one step. stored_exactly: names that are."""
        hooks = self.gact._schedule.hooks
        hooks.plan = Plan(dict.fromkeys(stored_exactly), 4)
        torch.manual_seed(1)
        self.model.zero_grad()
        with self.gact.step():
            loss = self.model(self.x).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def untouched(self):
        torch.manual_seed(1)
        return torch.autograd.grad(self.model(self.x).square().mean(), self.model.parameters())

    def rows(self, kind):
        return [row for row in self.gact.report().rows if row.codec == kind]


def distance(gradient, exact):
    error = sum(float((one - other).double().square().sum()) for one, other in zip(gradient, exact, strict=True))
    return (error / sum(float(other.double().square().sum()) for other in exact)) ** 0.5


def check_made_again(job: Job, count: int, least: float) -> None:
    """So many tensors are derived: from sources that are stored exactly as they were, up to a few roundings of float32,
    and from rounded ones at a distance of `least` or more."""
    job.gradient()
    job.gradient()
    derived, sources = job.rows("derived"), job.rows("quantised")
    assert len(derived) == count
    assert all(row.bits == 0 and row.bytes <= 2 * 4 * WIDTH for row in derived)
    exact = job.untouched()
    assert distance(job.gradient(row.name for row in sources), exact) < 1e-5
    assert least < distance(job.gradient(), exact) < 0.3
