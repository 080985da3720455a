"""Policy acgc: the increase of the gradient's second moment stays tolerable, with fewer bytes than a uniform width."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import small_models
import torch
import torch.distributed as dist
from test_sensitivity import flat_gradient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config
from gact_dist.gradient_error import GradientProbe, SecondMoment, SquaredGradient
from launch.data import CACHE, read_digits

# Small enough that widths matter. At 0.25 these two models want about one bit for all: there the CNN had 0.250 and
# 0.262 on fresh batches, over the promise, and the MLP kept more bytes than one bit for all.
ERROR = 0.05
BATCH, STEPS = 32, 24


def acgc(**changes):
    return Config.from_dict({"policy": "acgc", "error": ERROR, "min_numel": 64, "adapt_interval": 10, **changes})


@cache
def digits():
    return read_digits(CACHE / "mnist_5k.csv.gz")


class Digits:
    """A network that learns handwritten digits, from batches of this rank's own."""

    def __init__(self, kind, rank=0):
        images, self.labels = digits()
        self.images = nn.functional.adaptive_avg_pool2d(images, 8)
        self.order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(rank))
        self.model, _ = getattr(small_models, kind)()
        if kind == "mlp":
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), self.model)
        self.loss_fn = small_models.loss_of(self.model)

    def batch(self, number):
        rows = self.order[number * BATCH :][:BATCH]
        return self.images[rows], self.labels[rows]

    def train(self, config, follow=False, ddp=False):
        """The controller after some steps of training."""
        trained = DistributedDataParallel(self.model) if ddp else self.model
        gact = gact_dist.attach(trained, config=config)
        loss_fn = small_models.loss_of(trained)
        if follow:
            gact.follow()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            if follow:
                loss = loss_fn(self.batch(step))
            else:
                with gact.step(loss_fn, self.batch(step)):
                    loss = loss_fn(self.batch(step))
            loss.backward()
            optimizer.step()
            schedule.step()
        return gact

    def increase(self, config, state=None, batches=4, draws=4):
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

    def least_uniform_bytes(self):
        """What the narrowest uniform width keeps that keeps to the error."""
        for bits in range(1, 9):
            noise, square, retained_bytes = self.increase(Config(policy="uniform", bits=bits, min_numel=64))
            if noise <= ERROR * square:
                return retained_bytes
        raise AssertionError("not even 8 bits keep to the error")


# Three tenths of the error are left as a margin for what differs between batches; 16 draws of a squared norm with a
# hundred and more effective dimensions have a relative standard deviation of 0.04 at most.
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_the_error_is_kept_with_fewer_bytes_than_the_best_uniform_width(kind, follow):
    job = Digits(kind)
    gact = job.train(acgc(), follow)
    gact.detach()
    noise, square, retained_bytes = job.increase(acgc(), gact.state_dict())
    assert noise <= ERROR * square
    assert retained_bytes < job.least_uniform_bytes()


def trained_on_a_rank(follow):
    job = Digits("cnn", rank=dist.get_rank())
    gact = job.train(acgc(), follow, ddp=True)
    gact.detach()
    found = job.increase(acgc(), gact.state_dict())
    return gact.plan, gact.report().gradient_error, found, job.least_uniform_bytes()


@pytest.mark.parametrize("follow", [False, True])
def test_two_ranks_keep_the_error_under_one_plan(ranks, follow):
    (plan, error, found, uniform_bytes), (other_plan, other_error, other_found, _) = ranks(trained_on_a_rank, follow)
    assert plan == other_plan
    assert error == other_error
    assert error.holds
    assert found[0] + other_found[0] <= ERROR * (found[1] + other_found[1])
    assert found[2] < uniform_bytes


def test_the_report_shows_what_was_promised_and_what_was_measured():
    job = Digits("mlp")
    gact = job.train(acgc())
    error = gact.report().gradient_error
    assert error is gact.adaptation.gradient_error
    assert error.tolerated == ERROR
    assert 0 < error.predicted <= 0.85 * ERROR  # what is accepted of a plan that is kept; a new one has 0.7 at most
    assert 0 < error.measured <= ERROR
    # one plan on the samples of one adaptation: the linear prediction and the measurement agree within a third here
    assert error.measured == pytest.approx(error.predicted, rel=0.33)
    assert f"+{error.measured:.3g} measured" in str(gact.report())
    noise, square, _ = job.increase(acgc(), gact.state_dict())
    # another batch than the adaptation's, some steps later
    assert error.second_moment == pytest.approx(square, rel=0.8)
    assert error.measured == pytest.approx(noise / square, rel=0.5)


def test_a_plan_that_breaks_the_promise_is_warned_of_and_raised(caplog):
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
        f"compression increased the gradient's second moment by {before:.3g} (error={ERROR} was promised); "
        "bits are raised"
    ]
    assert gact.adaptation.gradient_error.holds


def test_variance_that_the_sensitivities_do_not_see_raises_bits(monkeypatch):
    """Predictions a tenth of the truth, as where a backward answers more than linearly: measured, then mended."""
    job = Digits("cnn")
    gact = gact_dist.attach(job.model, config=acgc())
    reduced = gact._adapter._reduced

    def too_low(*arguments):
        costs, invalid = reduced(*arguments)
        costs.variance[:] /= 10
        return costs, invalid

    monkeypatch.setattr(gact._adapter, "_reduced", too_low)
    gact.calibrate(job.loss_fn, job.batch(0))
    error = gact.adaptation.gradient_error
    assert error.holds
    assert error.measured > 4 * error.predicted


def test_a_width_at_which_the_backward_overflows_is_not_taken(monkeypatch):
    """As with fused attention, which answers to the rounding of q and k exponentially; here below 3 bits."""
    job = Digits("mlp")
    measure, narrowest = GradientProbe.variance, []

    def variance(probe, bits, draws):
        narrowest.append(min(width or 9 for width in bits.values()))
        return measure(probe, bits, draws) if narrowest[-1] >= 3 else float("inf")

    monkeypatch.setattr(GradientProbe, "variance", variance)
    gact = gact_dist.attach(job.model, config=acgc())
    gact.calibrate(job.loss_fn, job.batch(0))
    assert min(narrowest) < 3  # was tried
    assert narrowest[-1] >= 3
    assert gact.adaptation.gradient_error.holds


def test_samples_under_another_loss_scale_count_as_much_as_the_last_ones():
    moment = SecondMoment()
    assert moment.value is None
    for scale in (1.0, 4.0):
        for square in (2.0, 4.0):
            moment.add(square * scale**2, 3.0 * scale**2)
    assert moment.value == pytest.approx(3.0 * 16)
    moment.add(float("inf"), 3.0)
    moment.add(0.0, 3.0)
    assert moment.value == pytest.approx(3.0 * 16)
    moment.add(5.0)  # of a loss of ours: its scale is another
    assert moment.value == 5.0
    for square in range(20):
        moment.add(float(square + 1))
    assert moment.value == pytest.approx(15.5)  # of 11 to 20
    resumed = SecondMoment()
    resumed.load_state_dict(moment.state_dict())
    assert resumed.value == moment.value


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


def test_the_gradient_of_the_job_itself_is_watched_before_it_accumulates():
    job = Digits("cnn")
    loss = job.loss_fn(job.batch(0))
    expected = float(flat_gradient(job.model, loss).square().sum())
    loss.backward()
    logits = job.model(job.batch(0)[0])
    watched = SquaredGradient([logits])
    nn.functional.cross_entropy(logits, job.batch(0)[1]).backward()
    at_parameters, at_outputs = watched.moments()
    assert at_parameters == pytest.approx(expected, rel=1e-5)  # float32 sums in another order
    probabilities = logits.detach().softmax(1) - nn.functional.one_hot(job.batch(0)[1], 10)
    assert at_outputs == pytest.approx(float(probabilities.square().sum()) / BATCH**2, rel=1e-5)
    assert all(parameter.grad is not None for parameter in job.model.parameters())


def test_a_gradient_of_zero_leaves_the_plan_alone(caplog):
    job = Digits("mlp")
    gact = gact_dist.attach(job.model, config=acgc())
    gact.calibrate(lambda batch: job.loss_fn(batch) * 0.0, job.batch(0))
    assert gact.plan == {}
    assert "the gradient is zero" in caplog.text
