"""Activations that write over their input: what they save is a clone of it, which has an edge of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gact_dist
from gact_dist import Config

ROWS, WIDTH = 64, 48
DRAWS = 60


@pytest.mark.parametrize(
    "activation", [nn.SiLU, nn.Hardswish, nn.ELU, nn.Mish, nn.CELU], ids=lambda activation: activation.__name__
)
@pytest.mark.parametrize("inplace", [False, True])
def test_the_measured_error_is_the_predicted_one(activation, inplace):
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), activation(inplace=inplace), nn.Linear(64, 32), nn.Tanh()
    model, x = nn.Sequential(*layers, nn.Linear(32, 8)), torch.randn(ROWS, WIDTH)
    parameters = list(model.parameters())
    gact = gact_dist.attach(model, config=Config(bits=5, min_numel=16, calibration_samples=ROWS, noise_limit=0))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def gradient(loss: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])

    exact = gradient(loss_fn(x))
    with gact.step(loss_fn, x):
        gradient(loss_fn(x))
    errors = []
    for _ in range(DRAWS):
        with gact.step():
            loss = loss_fn(x)
        errors.append(float((gradient(loss) - exact).square().sum()))
    # DRAWS squared norms of some tens of dimensions leave 0.05; the curvature at 5 bits a tenth
    assert sum(errors) / DRAWS == pytest.approx(gact.adaptation.predicted_variance, rel=0.3)
