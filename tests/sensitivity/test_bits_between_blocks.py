"""What a step keeps in one bit of each element is held so between blocks while it is measured and compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from live_storages import StorageCount
from torch import nn

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import compared, measure
from gact_dist.sensitivity.blocks import BlockForward

ROWS, WIDTH, BLOCKS = 256, 32, 8
OF_TENSOR = ROWS * WIDTH * 4

ACTIVATIONS = {
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "relu in place": lambda x: F.relu_(x.clone()),
    "where": lambda x: torch.where(x > 0, x, x.sin()),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Convolutions(nn.Module):
    """Dropout and an activation between blocks, as in a GNN."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.activation = activation

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(self.activation(layer(x)), 0.3)
        return x.square().mean()


def job(activation: str) -> tuple[SavedTensorHooks, Convolutions, torch.Tensor]:
    torch.manual_seed(0)
    model = Convolutions(ACTIVATIONS[activation])
    hooks = SavedTensorHooks(model, Config.from_level("L2", min_numel=16), 0)
    x = torch.randn(ROWS, WIDTH)
    with hooks.rehearsal(Plan(default=4)):
        model(x)
    return hooks, model, x


def results(hooks, model, x):
    measured = measure(hooks, model, lambda: model(x), seed=1)
    found = compared(hooks, model, lambda: model(x), Plan(default=4), draw=1)
    return {item.name: item.variance.tolist() for item in measured}, found.error, found.square


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_are_those_of_tensors_held_as_they_are(activation, monkeypatch):
    packed = results(*job(activation))
    monkeypatch.setattr(BlockForward, "_matches_values", True)
    assert packed == results(*job(activation))
    assert all(sum(variance) > 0.0 for variance in packed[0].values())


@pytest.mark.parametrize("what", ["measured", "compared"])
def test_they_take_a_bit_of_memory(what, monkeypatch):
    def peak() -> int:
        hooks, model, x = job("relu")
        with StorageCount(model, x) as count:
            if what == "measured":
                measure(hooks, model, lambda: model(x), seed=1)
            else:
                compared(hooks, model, lambda: model(x), Plan(default=4), draw=1)
        return count.peak_bytes

    packed = peak()
    monkeypatch.setattr(BlockForward, "_matches_values", True)
    assert peak() - packed > 1.5 * BLOCKS * OF_TENSOR  # a result of relu and a dropout's noise for each block
