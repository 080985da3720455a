"""follow() on a model whose forward the loop never calls says so, once."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from small_models import mlp
from torch import Tensor, nn

import gact_dist
from gact_dist import Config

ROUNDED = Config(bits=4, min_numel=16)
TEXT = (
    "parameters of the Lightning got gradients, but its forward was never called: follow() compresses nothing; "
    "attach to the module whose forward the loop calls, or use step() around the forward"
)


class Lightning(nn.Module):
    """As a LightningModule, which a trainer on one device calls by training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)  # its parameters get no gradients
        self.network = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.network(x).square().mean()


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def hooks_of(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def test_backwards_without_a_forward_cause_one_warning(caplog):
    model = Lightning()
    gact = gact_dist.attach(model, config=ROUNDED).follow()
    with torch.no_grad():
        model(torch.randn(8, 32))  # a validation is no step
    for _ in range(3):
        model.training_step(torch.randn(8, 32)).backward()
    assert warnings_of(caplog) == [TEXT]
    assert hooks_of(model) == 0
    gact.detach()


def test_the_module_whose_forward_is_called_is_followed_without_a_warning(caplog):
    model = Lightning()
    gact = gact_dist.attach(model.network, config=ROUNDED).follow()
    for _ in range(3):
        model.training_step(torch.randn(8, 32)).backward()
        assert hooks_of(model) == 0
    assert gact.plan
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("config", [ROUNDED, Config(policy="off")])
def test_nothing_is_left_on_the_parameters(config, caplog):
    model = Lightning()
    gact = gact_dist.attach(model, config=config).follow()
    assert hooks_of(model) == (4 if config is ROUNDED else 0)
    gact.detach()
    assert hooks_of(model) == 0
    model.training_step(torch.randn(8, 32)).backward()
    assert warnings_of(caplog) == []


def test_frozen_parameters_are_passed_over():
    model = Lightning().requires_grad_(False)
    model.network.bias.requires_grad_()
    gact_dist.attach(model, config=ROUNDED).follow()
    assert hooks_of(model) == 1


def test_a_followed_model_that_never_ran_can_be_copied_and_is_freed():
    model, _ = mlp()
    gact = gact_dist.attach(model, config=ROUNDED).follow()
    other = copy.deepcopy(list(model.parameters()))
    assert all(not parameter._post_accumulate_grad_hooks for parameter in other)
    dropped = weakref.ref(model)
    del model, gact, other
    gc.collect()
    assert dropped() is None


def doubled(model, x):
    return model.double(), x.double()


def with_more_classes(model, x):
    model[2] = nn.Linear(64, model[2].out_features + 8)
    return model, x


def with_more_inputs(model, x):
    model[0] = nn.Linear(model[0].in_features + 3, 64)
    return model, torch.randn(len(x), model[0].in_features)


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("change", [doubled, with_more_classes, with_more_inputs])
@pytest.mark.parametrize(
    "settings", [{}, {"policy": "uniform"}, {"policy": "acgc", "error": 0.25}, {"estimator": "perturbation"}], ids=str
)
def test_a_model_that_changes_after_it_was_observed_trains_on_and_adapts_later(settings, change, rows):
    """As one that grows, or goes to another type or device: what was observed of it before is of no use."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(rows, 64)
    gact = gact_dist.attach(
        model, config=Config(**{"min_numel": 0, "adapt_interval": 2, "adapt_tolerance": 0} | settings)
    )
    gact.follow()
    for step in range(8):
        if step in (1, 3):
            _, x = change(model, x)
        model(x).square().mean().backward()
    assert bool(gact.plan) == (settings.get("policy") != "uniform")
    gact.detach()
