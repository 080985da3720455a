"""Policy acgc: the increase of the gradient's second moment stays tolerable, with fewer bytes than a uniform width."""

from __future__ import annotations

import copy
import logging
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest
import small_models
import torch
import torch.distributed as dist
from gradients import flat_gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from unseen import Unseen

import gact_dist
from examples.train.data import CACHE, read_digits
from gact_dist import Config
from gact_dist.adaptation import adapter
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.roles import OperatorObserver
from gact_dist.policies import acgc as acgc_policy
from gact_dist.sensitivity.second_moment import rounded_moments

ERRORS = (0.25, 0.05)
ERROR = 0.05
BATCH, STEPS = 32, 32


def acgc(error=ERROR, **changes):
    return Config.from_dict({"policy": "acgc", "error": error, "min_numel": 64, "adapt_interval": 10, **changes})


@cache
def digits():
    return read_digits(CACHE / "mnist_5k.csv.gz")


class Digits:
    """A network that learns handwritten digits, from batches of this rank's own."""

    def __init__(self, kind, rank=0, seed=0):
        images, self.labels = digits()
        self.images = nn.functional.adaptive_avg_pool2d(images, 8)
        self.order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(10 * seed + rank))
        self.model, _ = getattr(small_models, kind)(seed=seed)
        if kind == "mlp":
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), self.model)
        self.loss_fn = small_models.loss_of(self.model)

    def batch(self, number):
        rows = self.order[number * BATCH :][:BATCH]
        return self.images[rows], self.labels[rows]

    def train(self, config, follow=False, ddp=False):
        """(controller, variance that rounding added, squared exact gradients) of some steps of training, summed over
        those under a plan."""
        reference = copy.deepcopy(self.model)
        trained = DistributedDataParallel(self.model) if ddp else self.model
        gact = gact_dist.attach(trained, config=config)
        loss_fn = small_models.loss_of(trained)
        if follow:
            gact.follow()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        noise = square = 0.0
        for step in range(STEPS):
            batch = self.batch(step)
            reference.load_state_dict(self.model.state_dict())
            exact = flat_gradient(reference, small_models.loss_of(reference)(batch))
            if ddp:
                dist.all_reduce(exact)
                exact /= dist.get_world_size()
            optimizer.zero_grad()
            with nullcontext() if follow else gact.step(loss_fn, batch):
                loss = loss_fn(batch)
            loss.backward()
            if gact.plan:
                noise += float((small_models.gradient(self.model) - exact).square().sum())
                square += float(exact.square().sum())
            optimizer.step()
            schedule.step()
        return gact, noise, square

    def increase(self, config, state=None, batches=8, draws=2):
        """(mean squared distance of compressed from exact gradients, mean squared gradient, bytes) on fresh batches."""
        gact = gact_dist.attach(self.model, config=config)
        with gact.step():  # the first step only learns which tensors are what
            self.loss_fn(self.batch(0))
        if state is not None:
            gact.load_state_dict(state)
        noise = square = 0.0
        for number in range(STEPS, STEPS + batches):
            batch = self.batch(number)
            exact = flat_gradient(self.model, self.loss_fn(batch))
            square += float(exact.square().sum()) / batches
            for _ in range(draws):
                with gact.step():
                    loss = self.loss_fn(batch)
                noise += float((flat_gradient(self.model, loss) - exact).square().sum()) / (batches * draws)
        gact.detach()
        return noise, square, gact.report().retained_bytes

    def uniform_bytes(self, error):
        """What the narrowest uniform width keeps that is known to keep to an error."""
        for bits in range(1, 9):
            noise, square, retained_bytes = self.increase(Config(policy="uniform", bits=bits, min_numel=64))
            if noise <= KNOWN * error * square:
                return retained_bytes
        raise AssertionError("not even 8 bits keep to the error")


# Ten samples with the spread that is assumed of them, 0.5, give both means a standard error of 0.16 and the increase
# one of 0.22. A width is known to keep to the error if its increase has one to spare; a width that the samples put one
# too high is still known to at 1 / 1.22^2 of the error.
KNOWN = 1.0 / (1.0 + math.hypot(0.5, 0.5) / math.sqrt(10)) ** 2


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", ["cnn", "mlp"])
@pytest.mark.parametrize("error", ERRORS)
def test_the_error_is_kept_with_no_more_bytes_than_the_best_uniform_width(error, kind, follow, seed):
    job = Digits(kind, seed=seed)
    gact, noise, square = job.train(acgc(error), follow)
    gact.detach()
    assert noise <= error * square  # over the steps under the plans of three adaptations and more
    _, _, retained_bytes = job.increase(acgc(error), gact.state_dict(), batches=1, draws=1)
    assert retained_bytes <= job.uniform_bytes(error)


def test_the_report_shows_the_error_bound_and_what_was_measured():
    job = Digits("mlp")
    gact, _, _ = job.train(acgc())
    error = gact.report().gradient_error
    assert error is gact.adaptation.gradient_error
    assert error.tolerated == ERROR
    assert 0 < error.measured < ERROR
    # the linear prediction on a slice and the measurement on the batch
    assert error.measured == pytest.approx(error.predicted, rel=0.5)
    assert f"+{error.measured:.3g} measured" in str(gact.report())
    noise, square, _ = job.increase(acgc(), gact.state_dict())
    # other batches than the adaptation's, some steps later
    assert error.second_moment == pytest.approx(square, rel=0.8)
    assert error.measured == pytest.approx(noise / square, rel=0.5)


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_a_plan_leaves_room_for_the_standard_error_of_what_it_was_measured_by(kind):
    """The first is made from one sample, of which a relative deviation of half is assumed in both of its numbers."""
    model, batch = getattr(small_models, kind)()
    gact = gact_dist.attach(model, config=acgc())
    gact.calibrate(small_models.loss_of(model), batch)
    measured = gact.adaptation.gradient_error.measured
    assert 0.5 * ERROR < measured * (1.0 + math.sqrt(0.5)) <= ERROR


@pytest.mark.parametrize("follow", [False, True])
def test_the_increase_is_logged_at_every_draw(follow, caplog):
    with caplog.at_level(logging.INFO, "gact_dist"):
        gact, _, _ = Digits("mlp").train(acgc(adapt_interval=40), follow)
    draws = [record.getMessage() for record in caplog.records if "compression has increased" in record.getMessage()]
    adaptations = [record for record in caplog.records if record.getMessage().startswith("increase of the gradient's")]
    assert len(adaptations) == len(gact.history)
    assert len(draws) >= 5
    text = r"step (\d+): compression has increased .* by (\S+) on average .* \(error=0.05 is tolerated\)"
    numbers = [re.fullmatch(text, line).groups() for line in draws]
    assert all(0.0 < float(increase) < 1.0 for _, increase in numbers)
    assert len({step for step, _ in numbers}) == len(numbers)


def test_noise_and_second_moment_are_those_of_many_draws_and_of_the_exact_gradient():
    job = Digits("cnn")
    noise, square, _ = job.increase(Config(policy="uniform", bits=2, min_numel=64), batches=1, draws=32)
    hooks = SavedTensorHooks(job.model, Config(policy="uniform", bits=2, min_numel=64), 0)
    with hooks.recording(OperatorObserver()):  # the first forward learns which tensors are what
        job.loss_fn(job.batch(STEPS))
    before = copy.deepcopy(job.model.state_dict())
    found = rounded_moments(hooks, job.model, lambda: job.loss_fn(job.batch(STEPS)), passes=32, draw=1)
    hooks.close()
    # 32 draws of a squared norm with tens of effective dimensions: a standard deviation of 0.06 each at most
    assert found.noise == pytest.approx(noise, rel=0.25)
    assert found.square == pytest.approx(square, rel=0.1)  # g . noise / 32 has a standard deviation below that of noise
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())


def test_a_plan_that_exceeds_the_error_bound_causes_a_warning_and_more_bits(caplog):
    job = Digits("cnn")
    gact = gact_dist.attach(job.model, config=acgc())
    gact.calibrate(job.loss_fn, job.batch(0))
    honest = dict(gact.plan)
    state = gact.state_dict()
    for name, bits in honest.items():
        state["gact_dist"] = state["gact_dist"].replace(f'"{name}": {bits}', f'"{name}": 1')
    gact.load_state_dict(state)
    assert set(gact.plan.values()) == {1}
    with caplog.at_level(logging.WARNING, "gact_dist"):
        gact.calibrate(job.loss_fn, job.batch(0))
    before = gact.adaptation.gradient_error.measured_before
    assert before > ERROR
    assert [record.getMessage() for record in caplog.records] == [
        f"compression increased the gradient's second moment by {before:.3g} (error={ERROR} was tolerated); "
        "bits are raised"
    ]
    assert gact.adaptation.gradient_error.holds


@pytest.mark.parametrize("follow", [False, True])
def test_a_gradient_that_falls_while_bits_stand_still_is_warned_of_and_brings_an_adaptation_at_once(follow, caplog):
    """First all samples pull one way, then each its own: the sum falls further than they do, and than the noise."""
    job = Digits("mlp")
    gact = gact_dist.attach(job.model, config=acgc(adapt_interval=40))
    if follow:
        gact.follow()

    def loss_fn(batch):
        return (job.model(batch[0]) * batch[1]).mean()

    found = []
    for step in range(1, 31):
        pull = torch.randn(BATCH, 10, generator=torch.Generator().manual_seed(step))
        batch = (job.batch(0)[0], pull + 10.0 if step <= 12 else pull)
        before = gact.adaptation
        with nullcontext() if follow else gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        if gact.adaptation is not before:
            found.append(step)
    gact.detach()
    assert found[0] == (2 if follow else 1)
    increases = [entry["gradient_error"]["measured_before"] for entry in gact.history]
    broken = [step for step, increase in zip(found, increases, strict=True) if increase > ERROR]
    # samples are 4 steps apart, and the first or second of them that is small shows that the gradient has fallen
    assert 12 < broken[0] <= 12 + 2 * 4 + 1
    assert gact.adaptation.gradient_error.holds
    assert [record.getMessage() for record in caplog.records] == [
        f"compression increased the gradient's second moment by {increase:.3g} (error={ERROR} was tolerated); bits are "
        "raised"
        for increase in increases
        if increase > ERROR
    ]
    number = found.index(broken[0])
    assert gact.history[number]["average_bits"] > gact.history[number - 1]["average_bits"]


def test_a_plan_of_one_sample_is_replaced_once_there_are_more():
    job = Digits("mlp")
    gact = gact_dist.attach(job.model, config=acgc(0.25, adapt_interval=1000, adapt_tolerance=0))
    for step in range(20):  # without an optimizer: only what is known of the gradient changes
        with gact.step(job.loss_fn, job.batch(step)):
            job.loss_fn(job.batch(step))
    first, second = gact.history[:2]
    assert second["step"] in (4, 8, 16)  # samples are taken at the powers of two
    assert second["gradient_error"]["measured_before"] <= 0.25
    assert second["average_bits"] <= first["average_bits"]


@pytest.mark.parametrize("follow", [False, True])
def test_in_the_long_run_a_sample_is_two_passes_ten_times_an_interval(follow):
    job = Digits("mlp")
    gact = gact_dist.attach(job.model, config=acgc(0.25, adapt_interval=40))
    if follow:
        gact.follow()
    passes, forwards = [], Unseen([])
    job.model.register_forward_hook(lambda *_: forwards.value.append(1))
    for step in range(100):
        forwards.value.clear()
        with nullcontext() if follow else gact.step(job.loss_fn, job.batch(step)):
            loss = job.loss_fn(job.batch(step))
        loss.backward()
        passes.append(len(forwards.value))
    adapted = [entry["step"] for entry in gact.history]
    settled = adapted[1]  # the plan that is made once there are some samples
    assert adapted[1:] == list(range(settled, 101, 40))
    beyond_the_job = {step: count - 1 for step, count in enumerate(passes, 1) if step >= settled and count > 1}
    assert list(beyond_the_job) == list(range(settled, 101, 4))
    assert {count for step, count in beyond_the_job.items() if step not in adapted} == {2}


def test_a_closure_that_is_iterated_is_sampled_and_left_alone():
    job = Digits("cnn")
    gact = gact_dist.attach(job.model, config=acgc(adapt_interval=40))
    gact.install_hook()

    def closure():
        loss = job.loss_fn(job.batch(0))
        job.model.zero_grad()
        loss.backward()

    for step in range(1, 10):
        closure()
        before = small_models.gradient(job.model).clone()
        gact.iterate(closure)
        assert torch.equal(small_models.gradient(job.model), before), step
    gact.detach()
    # one in steps 1, 2, 4 and 8, and one of the adaptation that those before step 4 bring
    assert [entry["step"] for entry in gact.history] == [1, 4]
    assert len(gact._schedule.policy.state_dict()["samples"]["squares"]) == 5


def test_variance_that_the_sensitivities_do_not_see_raises_bits(monkeypatch):
    """Predictions a tenth of the truth, as where a backward answers more than linearly: measured, then mended."""
    job = Digits("cnn")
    gact = gact_dist.attach(job.model, config=acgc())
    reduced = gact._schedule.adapter._reduced

    def too_low(*arguments):
        costs, *rest = reduced(*arguments)
        costs.variance[:] /= 10
        return costs, *rest

    monkeypatch.setattr(gact._schedule.adapter, "_reduced", too_low)
    gact.calibrate(job.loss_fn, job.batch(0))
    error = gact.adaptation.gradient_error
    assert error.holds
    assert error.measured > 4 * error.predicted


def test_a_width_at_which_the_backward_overflows_is_not_taken(monkeypatch):
    """As with fused attention, which answers to the rounding of q and k exponentially; here below 3 bits."""
    job = Digits("mlp")
    narrowest = []

    def moments(hooks, model, forward, plan, **options):
        narrowest.append(min(width or 9 for width in ({"": 8} if plan is None else plan.bits).values()))
        found = rounded_moments(hooks, model, forward, plan, **options)
        return found if narrowest[-1] >= 3 else replace(found, noise=float("inf"))

    monkeypatch.setattr(adapter, "rounded_moments", moments)
    gact = gact_dist.attach(job.model, config=acgc())
    gact.calibrate(job.loss_fn, job.batch(0))
    assert min(narrowest) < 3  # was tried
    assert min(width or 9 for width in gact.plan.values()) >= 3
    assert gact.adaptation.gradient_error.holds


def test_an_error_that_no_width_keeps_to_is_warned_of_and_does_not_adapt_at_every_step(monkeypatch, caplog):
    job = Digits("mlp")

    def moments(*arguments, **options):
        found = rounded_moments(*arguments, **options)
        return replace(found, noise=found.square)

    monkeypatch.setattr(adapter, "rounded_moments", moments)
    gact = gact_dist.attach(job.model, config=acgc())
    for step in range(5):
        with gact.step(job.loss_fn, job.batch(step)):
            job.loss_fn(job.batch(step))
    assert len(gact.history) == 1
    assert "do not reach it" in caplog.text


def test_a_plan_leaves_room_for_the_growth_that_was_seen_under_earlier_plans(monkeypatch):
    """A gradient that shrinks by a tenth each step: without room every plan is broken before its interval is over."""

    def moments(*arguments, draw, **options):
        found = rounded_moments(*arguments, draw=draw, **options)
        return replace(found, square=0.9**draw, noise=found.noise / (found.noise + found.square))

    monkeypatch.setattr(adapter, "rounded_moments", moments)
    histories = []
    for most in (acgc_policy._MOST_GROWTH, 1.0):
        monkeypatch.setattr(acgc_policy, "_MOST_GROWTH", most)
        job = Digits("mlp")
        gact = gact_dist.attach(job.model, config=acgc())
        for step in range(STEPS):
            with gact.step(job.loss_fn, job.batch(step)):
                job.loss_fn(job.batch(step))
        histories.append([entry["gradient_error"] for entry in gact.history])
    with_room, without = ([entry["measured_before"] for entry in found[2:]] for found in histories)
    assert fmean(with_room) < fmean(without)
    assert 2 * sum(increase > ERROR for increase in with_room) <= sum(increase > ERROR for increase in without) > 2


def test_a_loss_scale_changes_neither_bits_nor_increase():
    found = []
    for scale in (1.0, 1024.0):
        job = Digits("mlp")
        gact = gact_dist.attach(job.model, config=acgc())
        gact.calibrate(lambda batch, job=job, scale=scale: job.loss_fn(batch) * scale, job.batch(0))
        error = gact.adaptation.gradient_error
        found.append((gact.plan, error.measured, error.second_moment / scale**2))
    assert found[0][0] == found[1][0]
    assert found[0][1:] == pytest.approx(found[1][1:], rel=1e-5)  # float32, scaled by a power of two


def test_a_loss_scale_that_changes_under_follow_is_no_change_of_the_gradient():
    found = []
    for scales in ([1.0], [1024.0, 1.0, 64.0]):
        job = Digits("mlp")
        gact = gact_dist.attach(job.model, config=acgc(adapt_interval=20)).follow()
        for step in range(12):
            (job.loss_fn(job.batch(step)) * scales[step % len(scales)]).backward()
        gact.detach()
        samples = gact._schedule.policy.state_dict()["samples"]
        found.append((gact.plan, samples["squares"], samples["noise"]))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) > 3
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)  # float32, scaled by powers of two
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-4)


def test_a_gradient_of_zero_leaves_the_plan_alone(caplog):
    job = Digits("mlp")
    gact = gact_dist.attach(job.model, config=acgc())
    gact.calibrate(lambda batch: job.loss_fn(batch) * 0.0, job.batch(0))
    assert gact.plan == {}
    assert "the gradient is zero" in caplog.text
