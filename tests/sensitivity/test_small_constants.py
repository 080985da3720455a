"""Tables without a graph, such as those of rotary embeddings, which only a perturbation of each block could measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.sensitivity import walk

WIDTH, STEPS = 32, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * table


class Model(nn.Module):
    """Its layers share a table that it makes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(-1.0, 1.3, WIDTH).cos()
        for layer in self.layers:
            x = layer(x, table)
        return x.square().mean()


def adapted(rows: int, monkeypatch) -> tuple[Any, list[str]]:
    """(controller of a job that has adapted, names of what was perturbed)"""
    perturbed: list[str] = []
    real = walk.Walk._shown

    def noted(self, one, *rest):
        perturbed.append(self._name_of(one.first))
        return real(self, one, *rest)

    monkeypatch.setattr(walk.Walk, "_shown", noted)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(rows, WIDTH)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=16))
    for _ in range(STEPS):
        with gact.step(model, x):
            loss = model(x)
        loss.backward()
    return gact, perturbed


@pytest.mark.parametrize(("rows", "is_small"), [(8, False), (512, True)])
def test_a_table_of_less_than_a_thousandth_of_a_step_is_stored_exactly_and_costs_no_backward(
    rows, is_small, monkeypatch
):
    gact, perturbed = adapted(rows, monkeypatch)
    [table] = [row for row in gact.report().rows if row.shape == (WIDTH,)]
    assert table.codec == ("exact" if is_small else "quantised")
    assert set(perturbed) == (set() if is_small else {table.name})
    assert (table.name in gact.plan) is not is_small
    assert len([row for row in gact.report().rows if row.codec == "quantised"]) >= 3
    gact.detach()


def test_a_run_that_is_resumed_stores_it_exactly_from_its_first_step_on(monkeypatch):
    gact, _ = adapted(512, monkeypatch)
    state = gact.state_dict()
    gact.detach()
    model, x = Model(), torch.randn(512, WIDTH)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=16))
    gact.load_state_dict(state)
    with gact.step(model, x):
        model(x).backward()
    [table] = [row for row in gact.report().rows if row.shape == (WIDTH,)]
    assert table.codec == "exact"
