"""An adaptation where steps are long: a part of the examples in each step, the plan changed once at the end.

The first step sees that they are, the next ones measure, and in one more the new plan is compared: it is used from step
number FIRST on, counted from zero, and INTERVAL steps later the next adaptation begins.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import Job, Session, batch_of, differences, train
from exact_codecs import store_exactly
from small_models import gpt, loss_of

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter as adapter_module
from gact_dist.adaptation.verification import Verifier
from gact_dist.sensitivity import halfway, one_pass, walk
from gact_dist.sensitivity.halfway import ResumeError
from gact_dist.sensitivity.one_pass import PausedWalk

INTERVAL, PARTS = 7, 4
FIRST = 1 + PARTS
BEGIN = FIRST + INTERVAL
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
        self.parts, self.halves, self.comparisons, self.plans = [], [], [], []
        self.halves_in_all = 0
        measure, verify, resume = adapter_module.measure, Verifier.verify, PausedWalk.resume

        def counted(*args, **kwargs):
            if self.parts:
                self.parts[-1] += 1
            return measure(*args, **kwargs)

        def verified(verifier, *args, **kwargs):
            if self.comparisons:
                self.comparisons[-1] += 1
            return verify(verifier, *args, **kwargs)

        def resumed(*args, **kwargs):
            self.halves_in_all += 1
            if self.halves:
                self.halves[-1] += 1
            return resume(*args, **kwargs)

        monkeypatch.setattr(adapter_module, "measure", counted)
        monkeypatch.setattr(PausedWalk, "resume", resumed)
        monkeypatch.setattr(Verifier, "verify", verified)

    def step(self):
        self.parts.append(0)
        self.halves.append(0)
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
    job = Watched(monkeypatch, lr=0.1).steps(BEGIN + PARTS + 1)
    assert job.parts[BEGIN : BEGIN + PARTS + 1] == [1, 1, 1, 1, 0]
    assert job.comparisons[BEGIN : BEGIN + PARTS + 1] == [0, 0, 0, 0, 1]
    assert not any(job.halves)
    assert all(plan == job.plans[FIRST] for plan in job.plans[FIRST : BEGIN + PARTS])
    assert job.plans[BEGIN + PARTS] == job.gact.adaptation.plan
    assert [entry["step"] for entry in job.gact.history] == [1 + FIRST, 1 + BEGIN + PARTS]


def test_each_share_returns_what_the_allocator_kept_of_it(long_steps, monkeypatch):
    trimmed = []
    monkeypatch.setattr("gact_dist.steps.malloc.trim", lambda: trimmed.append(True))
    job = Watched(monkeypatch)
    seen = [len(trimmed)]
    for _ in range(1 + FIRST + 1):
        job.step()
        seen.append(len(trimmed))
    assert [later > earlier for earlier, later in pairwise(seen)] == [True] * (1 + FIRST) + [False]


def test_the_first_step_compares_the_default_widths_and_the_next_ones_measure(long_steps, monkeypatch):
    job = Watched(monkeypatch, lr=0.1).steps(1 + FIRST)
    assert job.parts == [0, 1, 1, 1, 1, 0]
    assert job.comparisons == [1, 0, 0, 0, 0, 1]
    assert job.plans[:FIRST] == [{}] * FIRST
    assert job.plans[FIRST] == job.gact.adaptation.plan


def test_what_the_default_widths_would_ruin_is_stored_exactly_from_the_first_step_on(long_steps, monkeypatch):
    job = Watched(monkeypatch)
    name = "blocks.0.up:Gelu"
    verify = Verifier.verify

    def faulty(verifier, batch, plan, step, **options):
        verdict = verify(verifier, batch, plan, step, **options)
        if step > 1:
            return verdict
        assert options["provisional"] is True
        assert options.keys() == {"provisional", "fits"}
        return verdict._replace(found=verifier._store_exactly([name], "a fault", True))

    monkeypatch.setattr(Verifier, "verify", faulty)
    job.steps(1 + FIRST)
    assert job.plans[:FIRST] == [{name: None}] * FIRST
    assert job.plans[FIRST][name] is None
    assert [entry["stored_exactly"] for entry in job.gact.history] == [{name: "a fault"}]


def test_a_measurement_that_is_made_again_does_not_wait_for_a_first_step_again(long_steps, monkeypatch):
    """As where a plan made sensitivities infinite."""
    job = Watched(monkeypatch)
    reduced, verify = adapter_module.Adapter._reduced, Verifier.verify
    faults, provisional = [{"blocks.0.up:Gelu": 1}], []

    def faulty(adapter, measured):
        costs, invalid, failed = reduced(adapter, measured)
        return costs, faults.pop() if faults else invalid, failed

    def found(verifier, batch, plan, step, **options):
        verdict = verify(verifier, batch, plan, step, **options)
        provisional.append(options.get("provisional", False))
        is_fault = options.keys() == {"fits"}  # after the measurement
        return verdict._replace(found={"blocks.0.up:Gelu": "a fault"}) if is_fault else verdict

    monkeypatch.setattr(adapter_module.Adapter, "_reduced", faulty)
    monkeypatch.setattr(Verifier, "verify", found)
    job.steps(2 + 2 * PARTS)
    assert provisional.count(True) == 1
    assert job.gact.adaptation.plan["blocks.0.up:Gelu"] is None


def test_a_budget_in_bytes_holds_before_the_first_plan(long_steps, monkeypatch):
    usual = Watched(monkeypatch, Config(bits=8, noise_limit=0)).steps(1)
    budget = usual.gact.report().retained_bytes // 2
    settings = {"adapt_interval": INTERVAL, "min_numel": 16}
    job = Watched(monkeypatch, Config(policy="gact", bits=None, retained_bytes=budget, **settings))
    for _ in range(1 + FIRST):
        job.step()
        assert job.gact.report().retained_bytes <= budget
    assert len(set(job.plans[0].values())) <= 1
    assert len(set(job.plans[FIRST].values())) > 1


@pytest.mark.parametrize(
    ("settings", "steps"),
    # shares of examples are seen in all of them at once, which takes two halves; an error bound is held by later steps
    [({"policy": "actnn"}, [0, 1, 0, 0]), ({"policy": "acgc", "error": 0.25}, [0, 1, 1, 1, 1, 0])],
    ids=["actnn", "acgc"],
)
def test_other_policies_wait_for_their_first_plan_as_well(settings, steps, long_steps, monkeypatch):
    config = Config(**settings, adapt_interval=INTERVAL, adapt_tolerance=0, min_numel=16)
    job = Watched(monkeypatch, config, lr=0.1).steps(len(steps))
    assert job.parts == steps
    assert sum(job.halves) == steps.count(0) - 2
    assert job.plans[:-1] == [{}] * (len(steps) - 1)
    assert len(job.plans[-1]) > 10


def test_small_jobs_adapt_in_one_step_where_adaptations_follow_soon(monkeypatch):
    job = Watched(monkeypatch).steps(1 + INTERVAL)
    assert job.parts[INTERVAL] == 1
    assert [entry["step"] for entry in job.gact.history] == [1, 1 + INTERVAL]


RARELY = Config.from_level("L2", adapt_interval=10, adapt_tolerance=0, calibration_samples=8, min_numel=16)


@pytest.mark.parametrize("batch", [8, 16])
def test_small_jobs_take_several_steps_after_their_first_plan(batch, monkeypatch):
    """All examples are measured at once, in three shares where they are more than half of the batch."""
    job = Watched(monkeypatch, RARELY, batch=batch, lr=0.1).steps(1 + 10 + 3)
    assert job.parts[0] == 4 // (batch // 8)
    assert job.comparisons[0] == 1
    shares = 3 if batch == 8 else 1
    assert job.parts[10:] == [1, 0, 0, 0]
    assert job.halves[10:] == [0, 1, 1, 0] if shares == 3 else [0, 0, 0, 0]
    assert job.comparisons[10:] == [0] * shares + [1] + [0] * (3 - shares)
    assert [entry["step"] for entry in job.gact.history] == [1, 1 + 10 + shares]
    assert len(job.gact.adaptation.sensitivity) > 10


def test_parts_of_several_steps_say_what_those_of_one_step_do(long_steps, monkeypatch):
    monkeypatch.setattr(adapter_module.Adapter, "_seed", lambda *_: 1)
    spread = Watched(monkeypatch).steps(BEGIN + PARTS + 1).gact
    at_once = Watched(monkeypatch).steps(BEGIN)
    at_once.gact._schedule.adapt(adapter_module.ProbeBatch(at_once.loss, at_once.batch, 8), adapter_module.Haste.FAULT)
    assert spread.adaptation.sensitivity == at_once.gact.adaptation.sensitivity


def test_calibrating_and_faults_do_not_wait(long_steps, monkeypatch):
    job = Watched(monkeypatch).steps(BEGIN + 1)
    job.parts.append(0)
    job.comparisons.append(0)
    job.gact.calibrate(job.loss, job.batch)
    assert job.parts[-1] == PARTS
    job.steps(2)
    assert job.parts[-2:] == [0, 0]  # what was under way is over


def test_a_state_is_that_of_a_run_that_begins_anew(long_steps, monkeypatch):
    config = Config.from_level("L2", adapt_interval=3, adapt_tolerance=0, calibration_samples=8, min_numel=16)
    straight = Watched(monkeypatch, config, lr=0.1).steps(FIRST + 3 + 1)
    resumed = Watched(monkeypatch, config, lr=0.1)
    resumed.model.load_state_dict(straight.model.state_dict())
    resumed.gact.load_state_dict(straight.gact.state_dict())
    straight.steps(8)
    resumed.steps(8)
    assert resumed.plans == straight.plans[-8:]
    assert resumed.gact.history == straight.gact.history
    assert [entry["step"] for entry in straight.gact.history] == [1 + FIRST, 1 + FIRST + 3 + 1 + PARTS]
    for name, value in straight.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_an_error_in_a_share_begins_the_adaptation_anew(long_steps, monkeypatch):
    job = Watched(monkeypatch).steps(BEGIN + 1)
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
    job = Watched(monkeypatch).steps(BEGIN)
    batch = [tensor.clone() for tensor in job.batch]
    alive = [weakref.ref(tensor) for tensor in batch]
    job.batch = tuple(batch)
    job.step()
    job.batch = None
    del batch
    gc.collect()
    assert job.parts[-1] == 1
    assert not any(reference() for reference in alive)


# -- a batch of one example ----------------------------------------------------------------------------------------


def single(monkeypatch, config=SPREAD, lr=0.0):
    return Watched(monkeypatch, config, batch=1, lr=lr)


def test_a_single_example_takes_two_steps_and_the_comparison_a_third(long_steps, monkeypatch):
    job = single(monkeypatch, lr=0.1).steps(4 + (INTERVAL - 1) + 3)
    assert job.parts == [0, 1, 0, 0, *[0] * (INTERVAL - 1), 1, 0, 0]
    assert job.halves == [0, 0, 1, 0, *[0] * (INTERVAL - 1), 0, 1, 0]
    assert job.comparisons[:4] == [1, 0, 0, 1]
    assert job.comparisons[-3:] == [0, 0, 1]
    assert [entry["step"] for entry in job.gact.history] == [4, 4 + INTERVAL + 2]


@pytest.mark.parametrize("follows", [False, True], ids=["step", "follow"])
def test_two_halves_say_what_one_step_does_though_the_loop_reuses_its_memory(follows, long_steps, monkeypatch):
    """Sums of float32 in another order; every other step has other examples in the same memory."""
    monkeypatch.setattr(adapter_module.Adapter, "_seed", lambda *_: 1)
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", None)
    job = single(monkeypatch)
    others = [torch.randint(0, 37, tensor.shape) for tensor in job.batch]
    own = [tensor.clone() for tensor in job.batch]
    batch = tuple(tensor.clone() for tensor in own)
    if follows:
        job.gact.follow()
    for step in range(4):
        for into, source in zip(batch, own if (step < 2 and not follows) or step == 0 else others, strict=True):
            into.copy_(source)
        with nullcontext() if follows else job.gact.step(job.loss, batch):
            loss = job.loss(batch)
        loss.backward()
        job.model.zero_grad()
    assert job.halves_in_all == 1
    at_once = single(monkeypatch)
    at_once.gact._schedule.adapt(adapter_module.ProbeBatch(at_once.loss, tuple(own), 8), adapter_module.Haste.FAULT)
    expected = at_once.gact.adaptation.sensitivity
    assert job.gact.adaptation.sensitivity == pytest.approx(expected, rel=1e-4)


def test_another_forward_in_the_second_step_is_measured_anew_at_once(long_steps, monkeypatch, caplog):
    job = single(monkeypatch).steps(2)
    job.batch = tuple(tensor[:, :20] for tensor in job.batch)
    loss, refuses = job.loss, [True]

    def refusing(batch):
        if refuses and refuses.pop():
            raise ValueError("one label for each token, please")
        return loss(batch)

    job.loss = refusing
    with caplog.at_level("DEBUG", logger="gact_dist"):
        job.steps(2)
    assert "the loss function refuses examples of an earlier step: one label" in caplog.text
    assert job.parts == [0, 1, 1, 0]
    assert job.comparisons == [1, 0, 0, 1]
    assert all(value > 0.0 for value in job.gact.adaptation.sensitivity.values())


@pytest.mark.parametrize("half", ["second", "resume"])
def test_too_little_memory_in_either_half_is_met_as_in_one_step(half, long_steps, monkeypatch, caplog):
    def scarce(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    job = single(monkeypatch).steps(1)
    monkeypatch.setattr(walk.Walk, half, scarce)
    job.step()
    if half == "resume":
        assert "out of memory" not in caplog.text
        job.step()
    monkeypatch.undo()
    assert "out of memory while measuring sensitivity on this rank" in caplog.text
    assert "sensitivity is measured by perturbation" in caplog.text
    assert job.gact._schedule._adapting._now.paused is None


def test_between_two_halves_a_copy_of_the_examples_is_held_and_dropped_with_the_state(long_steps, monkeypatch):
    job = single(monkeypatch).steps(1)
    batch = [tensor.clone() for tensor in job.batch]
    alive = [weakref.ref(tensor) for tensor in batch]
    job.batch = tuple(batch)
    job.step()
    batch = job.batch
    job.batch = None
    copies = job.gact._schedule._adapting._now.paused.examples
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, batch, strict=True))
    copies = [weakref.ref(copy) for copy in copies]
    del batch
    gc.collect()
    assert not any(reference() for reference in alive)
    job.gact.state_dict()
    assert not any(reference() for reference in copies)


def test_batches_that_cannot_be_kept_are_measured_in_one_step(long_steps, monkeypatch):
    job = single(monkeypatch)
    tokens, targets = job.batch
    job.loss = lambda _: torch.nn.functional.cross_entropy(job.model(tokens).flatten(0, -2), targets.flatten())
    job.batch = None
    job.steps(3)
    assert job.parts == [0, 1, 0]
    assert job.comparisons == [1, 0, 1]


# -- ranks ---------------------------------------------------------------------------------------------------------


def on_ranks(wrapper, examples, follows):
    """(by step whether a plan was new, the last plan) of a GPT; examples: of a batch of each rank."""
    with patch.object(adapter_module, "_LEAST_BYTES", 1e-9):
        return _on_ranks(wrapper, examples[dist.get_rank()], follows)


def _on_ranks(wrapper, examples, follows):
    session = Session(Job(kind="gpt", wrapper=wrapper), SPREAD)
    gact = session.gact.follow() if follows else session.gact
    adaptations = []
    for step in range(BEGIN + PARTS + 1):
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
@pytest.mark.parametrize(
    ("wrapper", "examples", "shares"),
    [("ddp", (1, 1), 2), ("ddp", (8, 1), PARTS), ("fsdp2", (1, 1), 2), ("fsdp2", (1, 8), 2)],
)
def test_ranks_take_two_steps_for_a_single_example(ranks, wrapper, examples, shares, follows):
    (first, plan), (second, other) = ranks(on_ranks, wrapper, examples, follows)
    assert first == second
    assert plan == other
    steps = [step for step, is_new in enumerate(first) if is_new]
    assert steps[:2] == [1 + shares, 1 + shares + INTERVAL + shares]


@pytest.mark.parametrize("follows", [False, True], ids=["step", "follow"])
@pytest.mark.parametrize(("wrapper", "examples"), [("ddp", (8, 8)), ("ddp", (8, 2)), ("fsdp2", (8, 8))])
def test_ranks_take_as_many_steps_as_the_one_with_the_most_parts(ranks, wrapper, examples, follows):
    (first, plan), (second, other) = ranks(on_ranks, wrapper, examples, follows)
    assert first == second
    assert plan == other
    assert [step for step, is_new in enumerate(first) if is_new] == [FIRST, BEGIN + PARTS]


def on_ranks_of_which_one_cannot_go_on(wrapper):
    """(by step whether a plan was new, the last plan) where rank 1 can never use the first half of a measurement."""
    error = ResumeError("other blocks")
    is_odd = dist.get_rank() == 1
    with patch.object(halfway.Halfway, "check", Mock(side_effect=error)) if is_odd else nullcontext():
        return on_ranks(wrapper, (1, 1), False)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_second_half_that_does_not_fit_on_one_rank_is_measured_anew_in_the_same_step(ranks, wrapper):
    (first, plan), (second, other) = ranks(on_ranks_of_which_one_cannot_go_on, wrapper)
    assert first == second
    assert plan == other
    assert next(step for step, is_new in enumerate(first) if is_new) == 3


def differences_from_untouched(wrapper):
    """(adaptations, what is not bitwise equal) of a job whose adaptations take several steps."""
    job = Job(kind="gpt", wrapper=wrapper, steps=BEGIN + PARTS + 2)
    with patch.object(adapter_module, "_LEAST_BYTES", 1e-9):
        spread = train(job, SPREAD, store_exactly)
    return sum(spread.adapted), differences(train(job, None), spread)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_with_exact_codecs_the_job_is_the_untouched_one_bit_for_bit(ranks, wrapper):
    for adaptations, found in ranks(differences_from_untouched, wrapper):
        assert adaptations == 2
        assert found == []
