"""An adaptation that runs out of memory takes fewer samples at once, then no second derivatives. The job goes on."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import small_models
import torch
from scarce_memory import Scarce

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import one_pass, walk

BATCH = 16


def trained(most_samples: int, follow: bool, steps: int = 7) -> tuple[gact_dist.Controller, Scarce, list[float]]:
    """A job that adapts every second step, on 8 samples if they fit."""
    model, batch = small_models.gpt(batch=BATCH, layers=1)
    settings = Config(policy="gact", adapt_interval=2, adapt_tolerance=0, min_numel=16, noise_limit=0, derive=False)
    gact = gact_dist.attach(model, config=settings)
    scarce = Scarce(model, gact, most_samples)
    return gact, scarce, small_models.losses_under(gact, model, batch, steps, follow=follow)


@pytest.mark.parametrize("follow", [False, True])
def test_an_adaptation_takes_as_many_samples_at_once_as_fit(follow, caplog):
    with caplog.at_level(logging.WARNING, logger="gact_dist"):
        gact, scarce, losses = trained(2, follow)
    # a quarter of the batch, at first to see what a step keeps, but all at once of a job seen to be small; then
    # half of a quarter
    tried = [8] if follow else [4, 4]
    assert scarce.seen[: len(tried)] == tried
    assert len(scarce.seen) > 5
    assert set(scarce.seen[len(tried) :]) == {2}  # what did not fit is not tried again
    assert "from now on sensitivity is measured on half as many examples at once" in caplog.text
    assert 4 * len(gact.history) == len(scarce.seen) - len(tried)
    assert len(set(gact.plan.values())) > 1
    assert losses[-1] < losses[0]


def test_the_plan_is_that_of_all_samples_in_parts_that_fit():
    plans, variances = [], []
    for batch_size, most_samples in ((BATCH, 2), (BATCH // 2, 8)):  # of 8 a quarter is 2
        model, batch = small_models.gpt(batch=BATCH, layers=1)
        gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=16, derive=False))
        Scarce(model, gact, most_samples)
        gact.calibrate(small_models.loss_of(model), tuple(part[:batch_size] for part in batch), samples=8)
        plans.append(gact.plan)
        variances.append(gact.adaptation.predicted_variance)
    assert plans[0] == plans[1]
    assert variances[0] == pytest.approx(variances[1] * 8 / BATCH, rel=1e-12)


def test_one_sample_is_measured_without_second_derivatives_before_it_is_given_up(monkeypatch, caplog):
    def products(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(walk.Walk, "_products", products)
    with caplog.at_level(logging.WARNING, logger="gact_dist"):
        gact, scarce, _ = trained(BATCH, follow=False, steps=1)
    assert scarce.seen == [4, 4, 2, 1, *8 * [1]]
    assert "sensitivity is measured by perturbation" in caplog.text
    assert len(set(gact.plan.values())) > 1


@pytest.mark.parametrize(("compiled", "estimators"), [(False, ["one-pass", "perturbation"]), (True, ["one-pass"])])
def test_a_compiled_model_which_is_perturbed_anyway_is_not_tried_again(compiled, estimators, monkeypatch, caplog):
    tried = []

    def measure(*_: Any, estimator: str, **__: Any) -> Any:
        tried.append(estimator)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(adapter, "measure", measure)
    model, batch = small_models.mlp()
    if compiled:
        model.compile(backend="eager")
    gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=16, derive=False))
    with caplog.at_level(logging.WARNING, logger="gact_dist"):
        gact.calibrate(small_models.loss_of(model), batch, samples=1)
    assert tried == estimators
    assert ("sensitivity is measured by perturbation" in caplog.text) is not compiled


@pytest.mark.parametrize("follow", [False, True])
def test_where_nothing_fits_the_job_goes_on_with_its_uniform_bits(follow):
    gact, scarce, losses = trained(0, follow, steps=4)
    assert scarce.seen[:4] == ([8, 2, 1, 1] if follow else [4, 4, 2, 1])
    assert gact.plan == {}
    assert gact.report().ratio > 3
    assert losses[-1] < losses[0]


def attempts(monkeypatch, failing: int, steps: int, follow: bool, **settings: Any) -> list[int]:
    """The steps at which bits adapted, if nothing can be measured in the first so many adaptations."""
    model, batch = small_models.mlp()
    loss_of = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=0, noise_limit=0, derive=False, **settings))
    measure = gact._schedule.adapter._measure

    def scarce(*arguments: Any) -> Any:
        return [] if len(gact.history) < failing else measure(*arguments)  # as where the model or the memory failed

    monkeypatch.setattr(gact._schedule.adapter, "_measure", scarce)
    if follow:
        gact.follow()
    for _ in range(steps):
        with nullcontext() if follow else gact.step(loss_of, batch):
            loss = loss_of(batch)
        loss.backward()
    assert [bool(entry["tensors"]) for entry in gact.history] == [n >= failing for n in range(len(gact.history))]
    return [entry["step"] for entry in gact.history]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("failing", "interval", "later"),
    [
        (0, 1000, []),
        (1, 1000, [1]),
        (2, 1000, [1, 9]),
        (9, 1000, [1, 9, 73]),
        (9, 30, [1, 9, 39, 69, 99]),
        (1, 30, [1, 31, 61, 91]),
    ],
)
def test_where_nothing_could_be_measured_it_is_tried_again_soon_and_then_more_rarely(
    monkeypatch, follow, failing, interval, later
):
    first = 2 if follow else 1
    found = attempts(monkeypatch, failing, 110, follow, adapt_interval=interval, adapt_tolerance=0)
    assert found == [first, *(first + steps for steps in later)]


def test_a_resumed_run_tries_again_when_the_one_that_was_stopped_would_have():
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=0, derive=False))
    gact._schedule.adapter._measure = lambda *_: []
    loss_of, found = small_models.loss_of(model), []
    for step in range(1, 12):
        with gact.step(loss_of, batch):
            loss_of(batch)
        found.append(len(gact.history))
        if step == 5:
            state = gact.state_dict()
            gact.detach()
            gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=0, derive=False))
            gact.load_state_dict(state)
            gact._schedule.adapter._measure = lambda *_: []
    assert found == [1] + 8 * [2] + 2 * [3]
    assert gact._schedule.state().failed == 3


def test_too_little_memory_is_not_taken_for_a_missing_derivative(monkeypatch):
    def products(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model, batch = small_models.mlp()
    loss_of = small_models.loss_of(model)
    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    monkeypatch.setattr(walk.Walk, "_products", products)
    with pytest.raises(torch.OutOfMemoryError):
        one_pass.measure(hooks, model, lambda: loss_of(batch), seed=1)
    hooks.close()
