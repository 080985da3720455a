"""What tests of the command line share: jobs as a user's file has them, and a way to run a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gact_dist.cli.app import app

JOBS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x).mean()


def small(batch=32):
    torch.manual_seed(0)
    return Net(), (torch.randn(batch, 64), torch.randint(0, 4, (batch,)))


def as_mapping():
    model, (x, labels) = small()
    return model, {"x": x, "labels": labels}


def with_loss():
    model, (x, labels) = small()
    return model, x, lambda batch: nn.functional.cross_entropy(model(batch), labels)


def reads_a_value():
    model, batch = small()
    return model, batch, lambda batch: model(*batch) * batch[0].sum().item()


def of_two_kinds():
    import transformers

    return transformers.CLIPConfig()


def talks(batch=32):
    import os

    print("a line of the job's own")
    os.system("echo a line of a program that it starts")
    return small(batch)


def of_small_tensors():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.randn(4, 8), lambda batch: model(batch).square().mean()


def too_large():
    model, batch = small()
    return model, batch, lambda batch: model(*batch) + torch.zeros(1 << 50).sum()


def other():
    return Other(), torch.randn(4, 8)


def without_loss():
    model, (x, _) = small()
    return model, x


def only_a_model():
    return small()[0]


def with_a_name():
    return (*small(), "loss")


def of_two(batch, sequence):
    return small(batch)


def not_finite():
    model, (x, labels) = small()
    return model, x, lambda batch: model(batch).mean() * float("nan")


def no_loss_fn():
    model, (x, labels) = small()
    return model, x, lambda batch: "loss"


def raises():
    return nn.Linear(3, 3), open("/nowhere/at/all")


def fails_in_forward():
    model, _ = small()
    return model, (torch.randn(2, 5), torch.tensor([0, 1]))


def of_another_call():
    return Other(), (torch.randn(4, 8), torch.randint(0, 2, (4,)))


def of_another_name():
    return Other(), {"inputs": torch.randn(4, 8)}


def frozen():
    model, batch = small()
    return model.requires_grad_(False), batch


a_number = 3
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A file of a user's functions."""
    path = tmp_path / "jobs_of_user.py"
    path.write_text(JOBS)
    return path


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run a command; exceptions that are not for the user's eyes are raised."""

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)

    return call


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., Any]:
    """Run a command with --json: its value. It must succeed."""

    def call(*arguments: object) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return call
