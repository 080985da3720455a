"""An adaptation where steps are long: a part of the examples in each step, the plan changed once at the end."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import Job, Session, batch_of, differences, store_exactly, train
from small_models import gpt, loss_of

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter as adapter_module
from gact_dist.adaptation.verification import Verifier

INTERVAL, PARTS = 7, 4
SPREAD = Config.from_level("L2", adapt_interval=INTERVAL, adapt_tolerance=0, calibration_samples=8, min_numel=16)


@pytest.fixture
def long_steps(monkeypatch):
    """Steps are so long that each part is worth a measurement of its own."""
    monkeypatch.setattr(adapter_module, "_LEAST_BYTES", 1e-9)


class Watched:
    """A GPT whose steps are counted: parts measured, plans compared, and the plan in use, for each step."""

    def __init__(self, monkeypatch, config=SPREAD, batch=8, lr=0.0):
        self.model, self.batch = gpt(batch=batch)
        self.loss = loss_of(self.model)
        self.gact = gact_dist.attach(self.model, config=config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.parts, self.comparisons, self.plans = [], [], []
        measure, verify = adapter_module.measure, Verifier.verify

        def counted(*args, **kwargs):
            if self.parts:
                self.parts[-1] += 1
            return measure(*args, **kwargs)

        def verified(verifier, *args, **kwargs):
            if self.comparisons:
                self.comparisons[-1] += 1
            return verify(verifier, *args, **kwargs)

        monkeypatch.setattr(adapter_module, "measure", counted)
        monkeypatch.setattr(Verifier, "verify", verified)

    def step(self):
        self.parts.append(0)
        self.comparisons.append(0)
        with self.gact.step(self.loss, self.batch):
            loss = self.loss(self.batch)
        self.plans.append(self.gact.plan)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self


def test_each_step_measures_one_part_and_the_plan_changes_once_at_the_end(long_steps, monkeypatch):
    job = Watched(monkeypatch, lr=0.1).steps(1 + INTERVAL + PARTS + 1)
    begin = INTERVAL
    assert job.parts[0] == PARTS  # at first nothing is known of the job's steps
    assert job.parts[begin : begin + PARTS + 1] == [1, 1, 1, 1, 0]
    assert job.comparisons[begin : begin + PARTS + 1] == [0, 0, 0, 0, 1]
    assert all(plan == job.plans[0] for plan in job.plans[: begin + PARTS])
    assert job.plans[begin + PARTS] == job.gact.adaptation.plan
    assert [entry["step"] for entry in job.gact.history] == [1, 1 + begin + PARTS]


def test_small_jobs_adapt_in_one_step(monkeypatch):
    job = Watched(monkeypatch).steps(1 + INTERVAL)
    assert job.parts[INTERVAL] == 1
    assert [entry["step"] for entry in job.gact.history] == [1, 1 + INTERVAL]


def test_parts_of_several_steps_say_what_those_of_one_step_do(long_steps, monkeypatch):
    monkeypatch.setattr(adapter_module.Adapter, "_seed", lambda *_: 1)
    spread = Watched(monkeypatch).steps(1 + INTERVAL + PARTS).gact
    at_once = Watched(monkeypatch).steps(1 + INTERVAL)
    at_once.gact._schedule.adapt(adapter_module.ProbeBatch(at_once.loss, at_once.batch, 8), adapter_module.Haste.FAULT)
    assert spread.adaptation.sensitivity == at_once.gact.adaptation.sensitivity


def test_calibrating_and_faults_do_not_wait(long_steps, monkeypatch):
    job = Watched(monkeypatch).steps(1 + INTERVAL + 1)
    job.parts.append(0)
    job.comparisons.append(0)
    job.gact.calibrate(job.loss, job.batch)
    assert job.parts[-1] == PARTS
    job.steps(2)
    assert job.parts[-2:] == [0, 0]  # what was under way is over


def test_a_state_is_that_of_a_run_that_begins_anew(long_steps, monkeypatch):
    config = Config.from_level("L2", adapt_interval=3, adapt_tolerance=0, calibration_samples=8, min_numel=16)
    straight = Watched(monkeypatch, config, lr=0.1).steps(1 + 3 + 1)
    resumed = Watched(monkeypatch, config, lr=0.1)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.gact.load_state_dict(straight.gact.state_dict())
    straight.steps(8)
    resumed.steps(8)
    assert resumed.plans == straight.plans[-8:]
    assert resumed.gact.history == straight.gact.history
    assert [entry["step"] for entry in straight.gact.history] == [1, 1 + 3 + 1 + 1 + PARTS]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_an_error_in_a_share_begins_the_adaptation_anew(long_steps, monkeypatch):
    job = Watched(monkeypatch).steps(1 + INTERVAL + 1)
    loss, raises = job.loss, True

    def failing(batch):
        if raises:
            raise ArithmeticError("no")
        return loss(batch)

    job.loss = failing
    with pytest.raises(ArithmeticError):
        job.step()
    raises = False
    job.steps(PARTS + 1)
    assert job.parts[-PARTS - 1 :] == [1, 1, 1, 1, 0]


def test_between_two_shares_nothing_of_a_batch_is_held(long_steps, monkeypatch):
    job = Watched(monkeypatch).steps(1 + INTERVAL)
    batch = [tensor.clone() for tensor in job.batch]
    alive = [weakref.ref(tensor) for tensor in batch]
    job.batch = tuple(batch)
    job.step()
    job.batch = None
    del batch
    gc.collect()
    assert job.parts[-1] == 1
    assert not any(reference() for reference in alive)


def on_ranks(wrapper, examples, follows):
    """(by step whether a plan was new, the last plan) of a GPT; examples: of a batch of each rank."""
    with patch.object(adapter_module, "_LEAST_BYTES", 1e-9):
        return _on_ranks(wrapper, examples[dist.get_rank()], follows)


def _on_ranks(wrapper, examples, follows):
    session = Session(Job(kind="gpt", wrapper=wrapper), SPREAD)
    gact = session.gact.follow() if follows else session.gact
    adaptations = []
    for step in range(2 + INTERVAL + 2 * PARTS):
        batch = tuple(tensor[:examples] for tensor in batch_of("gpt", step, dist.get_rank()))
        if follows:
            loss = session.loss_fn(batch)
        else:
            with gact.step(session.loss_fn, batch):
                loss = session.loss_fn(batch)
        loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad()
        adaptations.append(gact.adaptation)
    plan = gact.plan
    gact.detach()
    return [new is not old for old, new in zip([None, *adaptations], adaptations, strict=False)], plan


@pytest.mark.parametrize("follows", [False, True], ids=["step", "follow"])
@pytest.mark.parametrize(("wrapper", "examples"), [("ddp", (8, 8)), ("ddp", (8, 2)), ("fsdp2", (8, 8))])
def test_ranks_take_as_many_steps_as_the_one_with_the_most_parts(ranks, wrapper, examples, follows):
    (first, plan), (second, other) = ranks(on_ranks, wrapper, examples, follows)
    assert first == second
    assert plan == other
    # before the first adaptation follow() has seen a step, so that this one takes several as well
    expected = [1 + PARTS, 1 + 2 * PARTS + INTERVAL] if follows else [0, INTERVAL + PARTS]
    assert [step for step, is_new in enumerate(first) if is_new] == expected


def differences_from_untouched(wrapper):
    """(adaptations, what is not bitwise equal) of a job whose adaptations take several steps."""
    job = Job(kind="gpt", wrapper=wrapper, steps=1 + INTERVAL + PARTS + 2)
    with patch.object(adapter_module, "_LEAST_BYTES", 1e-9):
        spread = train(job, SPREAD, store_exactly)
    return sum(spread.adapted), differences(train(job, None), spread)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_with_exact_codecs_the_job_is_the_untouched_one_bit_for_bit(ranks, wrapper):
    for adaptations, found in ranks(differences_from_untouched, wrapper):
        assert adaptations == 2
        assert found == []
