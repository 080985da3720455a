"""What several blocks read is kept once at their borders."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import blocks, compared, comparison, measure

WIDTH, BLOCKS = 16, 4


class Layer(nn.Module):
    """Adds to a tensor that is given to all layers; changes it first where it is the one that does."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(WIDTH, WIDTH), changes

    def forward(self, x, first):
        if self.changes:
            first.add_(1.0)
        return torch.tanh(self.linear(x) + first)


class Stack(nn.Module):
    def __init__(self, changing: int | None) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(number == changing) for number in range(BLOCKS))

    def forward(self, x):
        x = torch.sin(self.head(x))
        first = torch.cos(x)
        for layer in self.layers:
            x = layer(x, first)
        return x.square().mean()


@pytest.fixture
def copies(monkeypatch) -> list[float]:
    """The first element of each tensor that was kept at a border."""
    kept: list[float] = []
    for module, name in ((comparison, "_Copy"), (blocks, "_Boundary")):
        original = getattr(module, name)

        class Noted(original):
            def __init__(self, tensor, *form):
                super().__init__(tensor, *form)
                if tensor.dim():
                    kept.append(float(tensor.detach().flatten()[0]))

        monkeypatch.setattr(module, name, Noted)
    return kept


def job(changing: int | None) -> tuple[SavedTensorHooks, Stack, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack(changing)
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4), 0)
    x = torch.randn(32, WIDTH)
    with hooks.rehearsal(Plan(default=4)):
        model(x)
    return hooks, model, x


def test_a_comparison_keeps_one_copy_of_what_several_blocks_read(copies):
    hooks, model, x = job(None)
    assert compared(hooks, model, lambda: model(x), Plan(), draw=1).error == 0.0
    assert len(copies) == BLOCKS + 1


@pytest.mark.parametrize("changing", [0, 2, 3])
def test_what_a_block_changes_is_as_it_was_for_the_others(changing):
    hooks, model, x = job(changing)
    found = compared(hooks, model, lambda: model(x), Plan(), draw=1)
    assert found.error == 0.0
    gradient = torch.autograd.grad(model(x), list(model.parameters()))
    assert found.square == pytest.approx(sum(float(part.square().sum()) for part in gradient), rel=1e-5)


def test_a_measurement_does_the_same(copies):
    hooks, model, x = job(None)
    measure(hooks, model, lambda: model(x), seed=1)
    first = float(torch.cos(torch.sin(model.head(x))).detach().flatten()[0])
    assert copies.count(first) == 1
