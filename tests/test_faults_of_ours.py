"""An error of ours in a measurement costs the job nothing but the measurement. What the job raises is raised."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import small_models
import torch

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter, attempts, verification
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import isolation, measuring_mode, walk

STEPS = 4
WARNING = "with an error of gact_dist on this rank (AttributeError at "


def broken(*_: Any, **__: Any) -> Any:
    raise AttributeError("'Tensor' has no attribute 'colour'")


def losses_of(steps: int, follow: bool = False, loss_fn: Any = None, **settings: Any) -> tuple[Any, list[float]]:
    """(controller, losses) of a small GPT."""
    model, batch = small_models.gpt(batch=8, layers=1)
    gact = gact_dist.attach(model, config=Config(min_numel=16, adapt_interval=2, **settings))
    return gact, small_models.losses_under(gact, model, batch, steps, follow=follow, loss_fn=loss_fn)


@pytest.mark.parametrize("follow", [False, True])
def test_an_error_of_ours_in_a_second_derivative_leaves_it_out(follow, monkeypatch, caplog):
    monkeypatch.setattr(walk.Walk, "_products", broken)
    gact, losses = losses_of(STEPS, follow, policy="gact")
    assert losses[-1] < losses[0]
    assert len(set(gact.plan.values())) > 1  # by perturbation
    said = [record for record in caplog.records if WARNING in record.message]
    assert len(said) == 1
    assert "colour" in said[0].message
    assert "measuring sensitivity ended with" in said[0].message


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("place", "name", "doing", "settings"),
    [
        (adapter, "measure", "measuring sensitivity", {"policy": "gact"}),
        (verification, "compared", "comparing the gradient with the exact one", {"policy": "gact"}),
        (adapter, "rounded_moments", "measuring the gradient's error", {"policy": "acgc", "error": 0.1}),
        (
            SavedTensorHooks,
            "rehearsal",
            "counting the bytes of a step",
            {"policy": "gact", "retained_bytes": 400_000, "derive": False},
        ),
    ],
)
def test_wherever_an_error_of_ours_is_met_the_job_goes_on(place, name, doing, settings, follow, monkeypatch, caplog):
    monkeypatch.setattr(place, name, broken)
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        gact, losses = losses_of(STEPS, follow, **settings)
    assert losses[-1] < losses[0]
    assert gact.report().ratio > 2
    said = [record for record in caplog.records if WARNING in record.message and record.levelno == logging.WARNING]
    of_this = [record for record in said if record.message.startswith(f"{doing} ended with")]
    assert len(of_this) == 1
    # a comparison rehearses a step as well, and so does a look at what the first step keeps
    assert len(said) <= (3 if name == "rehearsal" and not follow else 2)
    assert "Traceback (most recent call last)" in caplog.text


@pytest.mark.parametrize("follow", [False, True])
def test_an_error_of_ours_in_what_isolates_the_job_is_none_of_the_jobs(follow, monkeypatch, caplog):
    """Nor can the loss function then be run alone, to see whose error it is."""
    monkeypatch.setattr(isolation, "Attributes", broken)
    gact, losses = losses_of(STEPS, follow, policy="gact")
    assert losses[-1] < losses[0]
    assert gact.report().ratio > 2
    assert WARNING in caplog.text


def test_an_error_at_the_border_of_a_block_is_ours_although_the_models_forward_raises_it(monkeypatch, caplog):
    real = measuring_mode.MeasuringMode.call

    def failing(self, function, args, kwargs):
        if self._replacements is not measuring_mode._REPEATABLE:  # where it measures, not where the model runs alone
            broken()
        return real(self, function, args, kwargs)

    monkeypatch.setattr(measuring_mode.MeasuringMode, "call", failing)
    gact, losses = losses_of(STEPS, policy="gact")
    assert losses[-1] < losses[0]
    assert gact.plan == {}  # perturbation runs under the mode as well
    assert WARNING in caplog.text


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, ZeroDivisionError])
def test_an_error_of_the_loss_function_is_raised_as_it_is(error, caplog):
    def loss_fn(_: Any) -> Any:
        raise error("mine")

    with pytest.raises(error, match="mine"):
        losses_of(1, loss_fn=loss_fn, policy="gact")
    assert WARNING not in caplog.text


def test_an_error_that_only_a_measurement_meets_is_none_of_the_jobs(caplog):
    """A loss function that cannot bear what a measurement does costs the measurement alone."""
    calls = []

    def loss_fn(batch: Any) -> Any:
        calls.append(len(batch[0]))
        if len(calls) == 1:
            raise AttributeError("once")
        return torch.zeros((), requires_grad=True).sum()

    _, losses = losses_of(1, loss_fn=loss_fn, policy="gact")
    assert len(losses) == 1
    assert calls[:2] == [2, 8]  # a part, then all of the batch without anything of ours
    assert WARNING in caplog.text


def test_a_job_that_fits_only_compressed_is_not_ended_by_running_it_alone(monkeypatch, caplog):
    model, batch = small_models.gpt(batch=8, layers=1)
    loss_of = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(min_numel=16, policy="gact"))
    alone = []

    def loss_fn(part: Any) -> Any:
        if len(part[0]) == 8:
            alone.append(part)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_of(part)

    monkeypatch.setattr(adapter, "measure", broken)
    assert small_models.losses_under(gact, model, batch, 1, follow=False, loss_fn=loss_fn)
    assert alone
    assert WARNING in caplog.text


def test_too_little_memory_of_a_cpu_is_met_as_that_of_a_gpu(monkeypatch, caplog):
    def scarce(*_: Any, **__: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(walk.Walk, "_products", scarce)
    gact, losses = losses_of(1, policy="gact", noise_limit=0)
    assert "out of memory while measuring sensitivity on this rank: [enforce fail" in caplog.text
    assert "measured on half as many examples at once" in caplog.text
    assert "out of memory for second derivatives" in caplog.text
    assert len(set(gact.plan.values())) > 1
    assert len(losses) == 1


def test_the_place_of_an_error_is_the_innermost_of_ours():
    with pytest.raises(TypeError, match="got str, expected a torch") as raised:
        gact_dist.codec.pack("no tensor", bits=4, seed=0)
    assert attempts._place_of(raised.value).startswith(" at codec/")
    assert attempts._place_of(ValueError()) == ""
