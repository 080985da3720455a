"""Blocks whose backward cannot be differentiated, beside blocks whose backward can."""

import logging

import block_models
import pytest
import torch
from gradients import variance_of_gradient

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import sections
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
