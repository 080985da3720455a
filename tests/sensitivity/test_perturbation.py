"""Perturbation: passes that differ in one rounding alone; and where it takes over from the one pass."""

from __future__ import annotations

import logging
import random

import numpy
import pytest
import small_models
import torch
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import parts
from gact_dist.sensitivity.one_pass import measure


class LayerDrop(nn.Module):
    """Linear layers, every one of which is left out of a forward with probability one half (Fan et al., 2020)."""

    def __init__(self, kept):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.head = nn.Linear(32, 10)
        self.head.compile(backend="eager")
        self.kept = kept

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.kept() else x
        return self.head(x)


@pytest.mark.parametrize("generator", ["random", "numpy"])
def test_layers_that_python_or_numpy_drop_are_the_same_in_every_pass(generator):
    """A model with compiled parts runs its forward again for every tensor."""
    batch = (torch.randn(64, 32), torch.randint(0, 10, (64,)))
    seed, draw = {"random": (random.seed, random.random), "numpy": (numpy.random.seed, numpy.random.rand)}[generator]
    seed(3)
    decisions = [draw() < 0.5 for _ in range(6)]
    assert 0 < sum(decisions) < 6
    remaining = []

    def fixed():
        remaining[:] = remaining or decisions
        return remaining.pop(0)

    found = []
    for kept in (fixed, lambda: draw() < 0.5):
        model = LayerDrop(kept)
        loss_fn = small_models.loss_of(model)
        hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
        seed(3)
        measured = measure(hooks, model, lambda loss_fn=loss_fn: loss_fn(batch), seed=1)
        found.append({item.name: item.variance.tolist() for item in measured})
        hooks.close()
    assert found[0] == found[1]
    assert len(found[0]) == sum(decisions)  # each saves its result; the batch is nobody's to round


class OutProduct(torch.autograd.Function):
    """x -> x * tanh(x), with a backward that writes its product into a buffer, as TRL's loss does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.mul(grad, x.tanh() + x * (1 - x.tanh() ** 2), out=torch.empty_like(x))


class Failing(OutProduct):
    """Its backward does not work at all."""

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("a fault of the user's own")


class Large(OutProduct):
    """Memory is too little for its backward with a graph."""

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return OutProduct.backward(ctx, grad)


class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)
        self.function = function

    def forward(self, x):
        return self.last(self.function.apply(self.first(x)))


def function_job(function):
    model = WithFunction(function)
    return model, small_models.loss_of(model), (torch.randn(64, 32), torch.randint(0, 10, (64,)))


def test_a_backward_that_autograd_refuses_to_differentiate_is_measured_by_perturbation(caplog, monkeypatch):
    """Where it is not known what the function was given."""
    monkeypatch.setattr(parts, "noted", lambda nodes: [])
    model, loss_fn, batch = function_job(OutProduct)
    gact = gact_dist.attach(model, config=Config(policy="gact", bits=4, min_numel=0))
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        gact.calibrate(loss_fn, batch, samples=16)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("gact_dist")]
    assert len(lines) == 2
    assert all("out=... arguments don't support automatic differentiation" in line for line in lines)
    assert lines[0].endswith("measuring the parts of the model")  # the function is in none of them
    assert lines[1].endswith("measuring by perturbation")
    exact = flat(model, loss_fn(batch))
    assert len(gact.plan) == 2
    variance = 0.0
    for _ in range(16):
        with gact.step():
            loss = loss_fn(batch)
        variance += float((flat(model, loss) - exact).square().sum()) / 16
    # one draw of a squared difference with some tens of effective dimensions, against the mean of sixteen
    assert gact.adaptation.predicted_variance == pytest.approx(variance, rel=0.6)


def flat(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [(Failing, RuntimeError, "a fault of the user's own"), (Large, torch.OutOfMemoryError, "out of memory")],
)
def test_a_backward_that_fails_for_another_reason_is_not_taken_for_one_without_a_derivative(function, error, text):
    model, loss_fn, batch = function_job(function)
    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    with pytest.raises(error, match=text):
        measure(hooks, model, lambda: loss_fn(batch), seed=1)
    hooks.close()
