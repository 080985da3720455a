"""Blocks whose backward cannot be differentiated, beside blocks whose backward can."""

import gc
import logging
from typing import Any

import block_models
import pytest
import torch
from gradients import variance_of_gradient
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import parts, sections
from gact_dist.sensitivity.one_pass import measure

BITS, DIRECTIONS, DRAWS = 6, 16, 16


@pytest.mark.parametrize("in_sections", [False, True])
@pytest.mark.parametrize("name", block_models.OPAQUE)
def test_the_variance_of_the_gradient_is_predicted(name, in_sections, caplog, monkeypatch):
    """What hangs on the opaque block alone is perturbed, and the others see through it by differences of its forward.

    A custom function is differentiated itself, by differences of its own.

    16 directions leave 2% on the sum over tensors, draws of the measured squared norm less than 3%; one rounding of
    each tensor of the opaque block leaves up to 30% on that tensor, of which there are few.
    """
    if in_sections:  # of which earlier ones may be complete when one turns out to have no derivative
        monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    case = block_models.made_opaque(name)
    hooks = SavedTensorHooks(case.model, Config(min_numel=0, bits=BITS), 0)
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        found = measure(hooks, case.model, lambda: case.loss_fn(case.batch), seed=1, probes=DIRECTIONS)
    hooks.close()
    perturbed = [item.name for item in found if item.by_perturbation]
    # torch's own LSTM runs as differentiable operators on a CPU
    assert ("its block saves is measured by perturbation" in caplog.text) is (name == "EmbeddingBag")
    assert bool(perturbed) is (name != "Function")
    assert len(perturbed) < len(found)
    predicted = sum(float(item.variance[BITS - 1]) for item in found)
    gact = gact_dist.attach(case.model, config=Config(policy="uniform", bits=BITS, min_numel=0))
    measured = variance_of_gradient(case.model, case.loss_fn, case.batch, gact, draws=DRAWS)
    assert predicted == pytest.approx(measured, rel=0.25)


def test_of_a_model_without_blocks_the_other_modules_have_products():
    """As above; what they save is not perturbed."""
    torch.manual_seed(0)
    case = block_models.on_rows(block_models.BesideBags())
    hooks = SavedTensorHooks(case.model, Config(min_numel=0, bits=BITS, derive=False), 0)
    found = measure(hooks, case.model, lambda: case.loss_fn(case.batch), seed=1, probes=DIRECTIONS)
    hooks.close()
    perturbed = {item.name for item in found if item.by_perturbation}
    assert perturbed == {":Tanh@1", "bags:Sigmoid@2"}  # what the bags read, their own
    assert len(found) == 5
    predicted = sum(float(item.variance[BITS - 1]) for item in found)
    gact = gact_dist.attach(case.model, config=Config(policy="uniform", bits=BITS, min_numel=0))
    measured = variance_of_gradient(case.model, case.loss_fn, case.batch, gact, draws=DRAWS)
    assert predicted == pytest.approx(measured, rel=0.25)


class Words(nn.Module):
    """sparse: whether the gradient of its table is of rows alone."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, block_models.WIDTH, sparse=sparse)
        self.layers, self.head = nn.ModuleList(block_models.layers(2)), nn.Linear(block_models.WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(words))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def measured_of(model: Words) -> dict[str, tuple[bool, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(50, (8, 6))
    hooks = SavedTensorHooks(model, Config(min_numel=0, bits=BITS), 0)
    found = measure(hooks, model, lambda: model(words).square().mean(), seed=1)
    hooks.close()
    return {item.name: (item.by_perturbation, item.variance) for item in found}


def test_a_sparse_gradient_is_differentiated_as_a_dense_one(caplog):
    torch.manual_seed(0)
    models = Words(sparse=False), Words(sparse=True)
    models[1].load_state_dict(models[0].state_dict())
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        dense, sparse = map(measured_of, models)
    assert "no one-pass" not in caplog.text
    assert dense.keys() == sparse.keys()
    for name, (by_perturbation, variance) in dense.items():
        assert not by_perturbation
        assert not sparse[name][0]
        torch.testing.assert_close(sparse[name][1], variance, rtol=1e-5, atol=0.0)


def test_nothing_of_a_refused_derivative_waits_for_the_collector(monkeypatch, caplog):
    """Its traceback leads to all that has been differentiated until then, which a step would hold beside its own."""
    without_values = parts._without_values

    def refuse(gradient: Tensor | None) -> Any:
        if gradient is not None and gradient.shape == (50, block_models.WIDTH):
            raise RuntimeError("this operator has no second derivative")
        return without_values(gradient)

    monkeypatch.setattr(parts, "_without_values", refuse)
    model = Words(sparse=False)
    measured_of(model)  # what is made once is made now
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with caplog.at_level(logging.DEBUG, logger="gact_dist"):
            measured_of(model)
        gc.collect()
        assert "this operator has no second derivative" in caplog.text
        assert not [left for left in gc.garbage if isinstance(left, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
