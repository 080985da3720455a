"""Plans are compared with the exact gradient: what cannot be rounded is found, stored exactly, and stays so."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Sequence

import pytest
import small_models
import torch
import torch.nn.functional as F
import unsafe_operators
from torch import Tensor, nn
from unsafe_operators import UNSAFE, stack

import gact_dist
from gact_dist import Config, Controller
from gact_dist.adaptation import verification
from gact_dist.adaptation.verification import _MOST_TRIES, Verifier, _search

LEVELS = ("L1.1", "L1", "L1.2", "L2", "L2.2")
# by operator, what its backward cannot bear to have rounded
CULPRITS = {
    "divides": {"layers.1:Mul@divides+2"},
    "takes log": {"layers.1:Mul@takes_log+2", "layers.1:Sigmoid@takes_log+1"},
    "compares": {"layers.1:Gelu@compares+1"},
}
# at 8 bits the logarithms add about the gradient's square, which is a warning at most
CASES = [case for case in itertools.product(CULPRITS, LEVELS) if case != ("takes log", "L1.1")]


def config(level: str, **changes: object) -> Config:
    return Config.from_level(level, **{"min_numel": 64, **changes})


def exactly_stored(gact: Controller) -> set[str]:
    return {name for name, bits in gact.plan.items() if bits is None}


class Job:
    """A model in training, beside its exact gradients."""

    def __init__(self, model: nn.Module, batch: object, loss_fn: Callable, settings: Config) -> None:
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        self.gact = gact_dist.attach(model, config=settings)
        self.optimizer = torch.optim.SGD(model.parameters(), 0.2)
        self.errors: list[float] = []
        """squared, of each step's gradient, relative to its square"""
        self.losses: list[float] = []

    def step(self, *given: object) -> None:
        exact = self._gradient(self.loss_fn(self.batch))
        with self.gact.step(*given):
            loss = self.loss_fn(self.batch)
        found = self._gradient(loss)
        self.losses.append(float(loss.detach()))
        self.errors.append(float((found - exact).square().sum() / exact.square().sum()))
        self.optimizer.step()

    def _gradient(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        return small_models.gradient(self.model)

    def train(self, steps: int) -> Job:
        for _ in range(steps):
            self.step(self.loss_fn, self.batch)
        return self


def unsafe(name: str | None, level: str, settings: dict | None = None, **options: object) -> Job:
    model, batch = stack(name, **options)
    return Job(model, batch, unsafe_operators.loss_of(model), config(level, **(settings or {})))


def worst(errors: Sequence[float]) -> float:
    """The largest, infinite if one is NaN."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def comparisons(monkeypatch) -> list[object]:
    """Receives the plan of each comparison."""
    found: list[object] = []

    def counted(hooks, model, forward, plan, **options):
        found.append(plan)
        return compared(hooks, model, forward, plan, **options)

    compared = verification.compared
    monkeypatch.setattr(verification, "compared", counted)
    return found


# -- what is found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), CASES)
def test_what_cannot_be_rounded_is_found_named_and_stored_exactly_and_the_job_trains(name, level, caplog, comparisons):
    job = unsafe(name, level).train(12)
    assert CULPRITS[name] <= exactly_stored(job.gact)
    assert len(exactly_stored(job.gact)) <= len(CULPRITS[name]) + 1
    # with the operator gone, 2 bits for all have 0.7 to 2.8
    assert worst(job.errors) < {"L1.1": 1e-3, "L1": 0.1, "L2": 0.1}.get(level, 4.0)
    assert job.losses[-1] < 0.5 * job.losses[0]
    (entry, *_) = job.gact.history
    assert entry["stored_exactly"].keys() >= CULPRITS[name]
    (warning,) = [text for text in warnings_of(caplog) if text.startswith("stored exactly from now on")]
    assert all(found in warning for found in CULPRITS[name])
    assert len(comparisons) <= 20


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_without_the_comparison_such_a_job_is_lost(level):
    """The operators are what they are for: noise_limit=0 switches the comparison off."""
    job = unsafe("divides", level, {"noise_limit": 0}).train(3)
    assert not worst(job.errors) < 100.0
    assert exactly_stored(job.gact) == set()


@pytest.mark.parametrize("level", ["L1.1", "L1", "L1.2", "L2", "L2.1", "L2.2", "actnn-L3"])
@pytest.mark.parametrize("name", ["gpt", "cnn", "mlp"])
def test_models_that_can_be_rounded_never_trip_the_comparison(name, level, caplog, comparisons):
    for seed in range(3):
        model, batch = getattr(small_models, name)(seed=seed)
        settings = config(level, watch_interval=2, adapt_interval=4, adapt_tolerance=0)
        job = Job(model, batch, small_models.loss_of(model), settings).train(6)
        assert not any(entry["stored_exactly"] for entry in job.gact.history)
        job.gact.detach()
    # steps 1, 2, 4 and 5 or 6 (a new plan after four); and no further one is tried
    assert len(comparisons) == 3 * 4
    assert warnings_of(caplog) == []


def test_the_same_formula_in_other_layers_is_found_with_it(comparisons):
    job = unsafe("divides", "L1", where=(0, 1, 2, 3), layers=4).train(2)
    assert exactly_stored(job.gact) == {f"layers.{number}:Mul@divides+2" for number in range(4)}
    assert len(comparisons) < 12


def test_what_was_found_stays_at_later_adaptations_and_in_the_state(comparisons):
    settings = {"adapt_interval": 2, "adapt_tolerance": 0, "watch_interval": 0}
    job = unsafe("compares", "L2", settings).train(2)
    searched, state = len(comparisons), job.gact.state_dict()
    job.train(4)
    assert CULPRITS["compares"] <= exactly_stored(job.gact)
    assert len(comparisons) - searched == 2  # the plans of two adaptations
    resumed = unsafe("compares", "L2", settings)
    resumed.gact.load_state_dict(state)
    del comparisons[:]
    resumed.train(4)
    assert CULPRITS["compares"] <= exactly_stored(resumed.gact)
    assert len(comparisons) == 2


def test_a_budget_in_bytes_holds_with_what_is_stored_exactly():
    model, batch = stack("divides")
    loss_fn = unsafe_operators.loss_of(model)
    job = Job(model, batch, loss_fn, Config(retained_bytes=80_000, min_numel=64)).train(1)
    job.gact.calibrate(loss_fn, batch)
    job.step()
    assert CULPRITS["divides"] <= exactly_stored(job.gact)
    assert job.gact.report().retained_bytes <= 80_000


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_follow_and_calibrate_compare_too(level):
    model, batch = stack("divides")
    loss_fn = unsafe_operators.loss_of(model)
    gact = gact_dist.attach(model, config=config(level)).follow()
    for _ in range(3):
        loss_fn(batch).backward()
    assert CULPRITS["divides"] <= exactly_stored(gact)
    gact.detach()
    gact = gact_dist.attach(model, config=config(level))
    gact.calibrate(loss_fn, batch)
    assert CULPRITS["divides"] <= exactly_stored(gact)


# -- what is not judged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_an_exact_gradient_that_is_not_finite_judges_nothing(level, comparisons, caplog):
    model, batch = stack("compares")
    scale = [math.inf]
    plain = unsafe_operators.loss_of(model)
    job = Job(model, batch, lambda given: plain(given) * scale[0], config(level))
    with job.gact.step(job.loss_fn, batch):
        job.loss_fn(batch)
    assert exactly_stored(job.gact) == set()
    assert len(comparisons) == 1
    assert not any("stored exactly" in text for text in warnings_of(caplog))
    scale[0] = 1.0
    if level == "L2":
        job.gact.calibrate(job.loss_fn, batch)
    with job.gact.step(job.loss_fn, batch):
        job.loss_fn(batch)
    assert CULPRITS["compares"] <= exactly_stored(job.gact)


class Unsteady(nn.Module):
    """Computes something else whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(32, 64), itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * (-100.0) ** next(self.runs)


def test_a_model_that_is_never_the_same_is_told_and_left_as_it_is(caplog):
    model = Unsteady()
    batch = (torch.randn(64, 32), torch.randint(0, 64, (64,)))
    job = Job(model, batch, unsafe_operators.loss_of(model), config("L1"))
    with job.gact.step(job.loss_fn, batch):
        job.loss_fn(batch)
    assert exactly_stored(job.gact) == set()
    assert [text for text in warnings_of(caplog) if "even with every tensor stored exactly" in text]


def test_a_model_that_is_never_the_same_and_has_nothing_to_round_is_told_too(caplog):
    model, x = Unsteady(), torch.randn(8, 32)
    job = Job(model, x, lambda batch: model(batch).square().mean(), config("L1", min_numel=4096))
    for _ in range(2):
        with job.gact.step(job.loss_fn, x):
            job.loss_fn(x)
    assert exactly_stored(job.gact) == set()
    assert [text for text in warnings_of(caplog) if "even with every tensor stored exactly" in text]


class NoSensitivity(torch.autograd.Function):
    """Passes its input on; the second derivative of the backward is NaN, the first is not."""

    @staticmethod
    def forward(ctx, x, like):
        ctx.save_for_backward(like)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (like,) = ctx.saved_tensors
        return grad * (1.0 + 0.0 * (like - like).sqrt()), None


def test_a_sensitivity_that_is_not_finite_means_exact(caplog):
    torch.manual_seed(0)
    model, batch = stack(None)
    model.layers[1].operator = lambda x: NoSensitivity.apply(x, 2.0 * x)
    job = Job(model, batch, unsafe_operators.loss_of(model), config("L2")).train(2)
    name = "layers.1:Mul@<lambda>+0"
    assert name in exactly_stored(job.gact)
    assert job.gact.history[0]["stored_exactly"][name] == "its sensitivity is not finite"
    assert any("until their sensitivity is finite" in text for text in warnings_of(caplog))
    assert worst(job.errors) < 0.1


class ZeroRow(nn.Module):
    """A row of zeros under layer norms of a tiny epsilon, as the class token of BEiT before its first step: to round it
    moves the gradient a million times as far as the gradient is long, and all other tensors with it."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, 1, 32))
        norms = (nn.LayerNorm(32, eps=1e-12) for _ in range(3))
        self.blocks = nn.ModuleList(
            nn.Sequential(norm, nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for norm in norms
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.row.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_what_was_measured_while_something_was_rounded_that_must_not_be_is_measured_again_soon():
    torch.manual_seed(0)
    model, x = ZeroRow(), torch.randn(8, 7, 32)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=16, adapt_interval=50))
    for _ in range(6):
        with gact.step(model, x):
            loss = model(x)
        loss.backward()
    first, second = gact.history
    assert first["stored_exactly"]
    assert second["stored_exactly"] == {}
    squared_gradient = gact._schedule.verifier.latest["squared_gradient"]
    assert second["predicted_variance"] < squared_gradient < first["predicted_variance"]
    gact.detach()


def test_noise_above_the_gradient_warns_once_with_the_numbers_and_stores_nothing_exactly(caplog):
    model, _ = stack(None)
    x, target = torch.randn(32, 32).repeat_interleave(2, 0), torch.randint(0, 10, (32,)).repeat_interleave(2)
    # Pairs of rows pull in opposite directions. Their gradient has a quarter of the square, and the noise of two
    # roundings; at 2 bits one has 0.4 of the square.
    weights = torch.tensor([1.0, -0.5]).repeat(32)

    def loss_fn(batch: Sequence[Tensor]) -> Tensor:
        rows, classes, given = batch
        return (F.cross_entropy(model(rows), classes, reduction="none") * given).mean()

    job = Job(model, (x, target, weights), loss_fn, config("L1.2", watch_interval=1)).train(4)
    told = [text for text in warnings_of(caplog) if "more noise to the gradient than there is gradient" in text]
    assert len(told) == len(warnings_of(caplog)) == 1
    assert re.search(r"squared error is [\d.e+-]+ and its square [\d.e+-]+; use more bits", told[0])
    assert exactly_stored(job.gact) == set()


# -- watching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["L1", "L2"])
@pytest.mark.parametrize("interval", [0, 3])
def test_what_becomes_unsafe_later_is_found_by_watching(level, interval, caplog):
    job = unsafe(None, level, {"watch_interval": interval}).train(3)
    assert exactly_stored(job.gact) == set()
    entries = len(job.gact.history)
    job.model.layers[1].operator = UNSAFE["divides"]
    job.train(4)
    if interval == 0:
        assert exactly_stored(job.gact) == set()
        assert len(job.gact.history) == entries
        return
    assert CULPRITS["divides"] <= exactly_stored(job.gact)
    entry = job.gact.history[-1]
    assert entry["step"] in (4, 7)
    assert entry["stored_exactly"].keys() >= CULPRITS["divides"]
    told = warnings_of(caplog)
    assert any("stored exactly from now on" in text for text in told)
    assert any("bits are chosen anew before their time" in text for text in told) == (level == "L2")
    json.dumps(job.gact.history)


def test_watching_compares_ever_more_rarely_up_to_its_interval_and_goes_on_so_after_a_resume(comparisons):
    steps = []
    job = unsafe(None, "L1", {"watch_interval": 4})
    for number in range(1, 15):
        if number == 7:
            state = job.gact.state_dict()
            job = unsafe(None, "L1", {"watch_interval": 4})
            job.gact.load_state_dict(state)
        before = len(comparisons)
        job.train(1)
        steps += [number] * (len(comparisons) - before)
    assert steps == [1, 2, 4, 8, 12]


class Saturating(nn.Module):
    """Its outputs come close to 0 and 1 as it trains; the loss is written with a backward that divides by them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.second(torch.tanh(self.first(x))))


class Likelihood(torch.autograd.Function):
    """Binary cross-entropy, as torch has it: its backward divides by p (1 - p)."""

    @staticmethod
    def forward(ctx, likely, target):
        ctx.save_for_backward(likely, target)
        inside = likely.clamp(1e-12, 1 - 1e-7)
        return -(target * inside.log() + (1 - target) * (-inside).log1p()).sum()

    @staticmethod
    def backward(ctx, grad):
        likely, target = ctx.saved_tensors
        return grad * (likely - target) / (likely * (1 - likely)).clamp(min=1e-12), None


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_outputs_that_saturate_in_training_are_found_soon_after(level):
    """In the first step all of them are about a half, and nothing is wrong."""
    torch.manual_seed(0)
    model, x = Saturating(), torch.randn(64, 32)
    batch = (x, (x > 0.5).float())
    # What the last operator of a forward reads is exact if nothing comes after it to show that.
    job = Job(model, batch, lambda given: 1.0 * Likelihood.apply(model(given[0]), given[1]), config(level))
    job.optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    job.train(40)
    assert worst(job.errors[:16]) < 0.1
    (entry,) = [entry for entry in job.gact.history if entry["stored_exactly"]]
    assert entry["step"] == 32
    assert any(name.startswith(":Sigmoid") for name in exactly_stored(job.gact))
    assert worst(job.errors[:31]) > 1e6  # what it took until the next comparison
    assert worst(job.errors[31:]) < 0.5


def test_without_a_loss_function_nothing_is_compared(comparisons):
    job = unsafe(None, "L1")
    for _ in range(3):
        job.step()
    assert comparisons == []


@pytest.mark.parametrize("level", ["L1.1", "L1"])
def test_a_comparison_leaves_no_trace_in_the_job(level):
    """Steps with a comparison and without are bitwise the same, once the roles of all tensors are known."""
    ends = []
    for interval in (0, 1):
        model, batch = small_models.gpt(dropout=0.1)
        job = Job(model, batch, small_models.loss_of(model), config(level, watch_interval=interval)).train(4)
        ends.append(copy.deepcopy(model.state_dict()))
        job.gact.detach()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


# -- the limit --------------------------------------------------------------------------------------------------


def test_an_error_far_above_its_prediction_is_a_fault_and_the_setting_says_how_far(monkeypatch):
    """A prediction that is a thousand times too small, of a gradient whose noise is not negligible."""
    choose = gact_dist.policies.gact.Gact.choose

    def too_small(self, costs, current, trial):
        choice = choose(self, costs, current, trial)
        return dataclasses.replace(choice, variance=choice.variance / 1000.0)

    monkeypatch.setattr(gact_dist.policies.gact.Gact, "choose", too_small)
    found = {}
    for limit in (100.0, 3000.0):
        job = unsafe(None, "L2.2", {"noise_limit": limit}).train(1)
        found[limit] = exactly_stored(job.gact)
    assert found[100.0]
    assert not found[3000.0]


def on_some_mostly(model: nn.Module, learnt: float) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    """A loss to which the first examples of a batch, which are measured, add next to nothing, as if learnt already."""

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        weights = torch.where(torch.arange(len(losses)) < Config().calibration_samples, learnt, 1.0)
        return (weights * losses).mean()

    return loss_fn


@pytest.mark.parametrize("level", ["L2", "L2.1", "L2.2"])
def test_examples_that_move_the_gradient_more_than_those_that_were_measured_are_no_fault(level, caplog):
    model, batch = stack(None)
    job = Job(model, batch, on_some_mostly(model, 1e-3), config(level)).train(10)
    assert exactly_stored(job.gact) == set()
    assert not any("stored exactly" in text or "chosen anew" in text for text in warnings_of(caplog))


def test_what_cannot_be_rounded_is_found_although_the_measured_examples_add_next_to_nothing():
    model, batch = stack("divides")
    job = Job(model, batch, on_some_mostly(model, 1e-3), config("L2")).train(10)
    assert CULPRITS["divides"] <= exactly_stored(job.gact)
    assert worst(job.errors) < 0.1


# -- the search -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 100])
@pytest.mark.parametrize("culprits", [1, 2, 4])
def test_the_search_finds_all_culprits_and_no_other_within_its_tries(count, culprits):
    for seed in range(5):
        names = [[f"{number} a", f"{number} b"] for number in range(count)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        wrong = {name for number in order[:culprits] for name in names[number]}
        tries = []

        def vanishes(tried, wrong=wrong, tries=tries):
            tries.append(tried)
            return wrong <= set(tried)

        found, complete = _search(names, vanishes, lambda: True)
        assert len(tries) <= _MOST_TRIES
        assert wrong <= set(found)
        if complete:
            assert wrong == set(found)
        assert complete or culprits > 3


def test_a_search_that_has_run_out_of_tries_stores_exactly_all_that_may_be_to_blame():
    names = [[str(number)] for number in range(300)]
    wrong = {str(number) for number in range(0, 200, 9)}
    found, complete = _search(names, lambda tried: wrong <= set(tried), lambda: True)
    assert not complete
    assert wrong <= set(found)
    assert len(found) < 300


@pytest.mark.parametrize("tries", [0, 1, 4])
def test_a_search_that_has_run_out_of_time_stores_exactly_all_that_may_be_to_blame(tries):
    names, wrong = [[str(number)] for number in range(100)], {"30", "60"}
    left = iter([True] * tries)
    tried: list[Sequence[str]] = []

    def vanishes(names):
        tried.append(names)
        return wrong <= set(names)

    found, complete = _search(names, vanishes, lambda: next(left, False))
    assert len(tried) == tries
    assert not complete
    assert wrong <= set(found)


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_a_job_whose_search_takes_too_long_trains_with_more_stored_exactly(level, monkeypatch, caplog, comparisons):
    """An hour goes by at each look at the clock."""
    monkeypatch.setattr(verification, "perf_counter", itertools.count(step=3600.0).__next__)
    job = unsafe("divides", level).train(4)
    assert CULPRITS["divides"] <= exactly_stored(job.gact)
    assert worst(job.errors) < 0.1
    assert any("the search has taken as long as it may" in text for text in warnings_of(caplog))
    assert len(comparisons) <= 8


# -- states and settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [{"exact": 3}, {"exact": {"a": 1}}, {"at": -1}, {"predicted": "a"}, {"square": None}, {"predicted_at_8_bits": -1}],
)
def test_a_state_that_cannot_be_used_is_refused(state):
    with pytest.raises(ValueError, match=next(iter(state))):
        Verifier.parse_state(state)


@pytest.mark.parametrize("changes", [{"noise_limit": -1}, {"noise_limit": math.inf}, {"watch_interval": -1}])
def test_settings_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Config(**changes)


class _HalfUsable(nn.Module):
    """Of its two results the job uses one; the other cannot be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x).sigmoid()
        beside = hidden.exp()
        kept = beside.exp()
        beside.add_(1.0)  # exp() has saved it
        return hidden, kept


def test_a_result_that_the_job_does_not_use_may_have_no_backward_under_follow():
    torch.manual_seed(0)
    model, x = _HalfUsable(), torch.randn(32, 64)
    gact = gact_dist.attach(model, config=Config(min_numel=16))
    gact.follow()
    for _ in range(3):
        hidden, _ = model(x)
        hidden.square().mean().backward()
    assert gact.plan


class Opaque:
    """A batch that nothing can take examples of."""

    def __init__(self) -> None:
        self.inputs = torch.randn(64, 32)


def test_a_batch_that_cannot_be_divided_is_not_tried_again_where_memory_is_too_little(monkeypatch, caplog):
    tries: list[float] = []

    def scarce(*_: object, fraction: float, **options: object) -> None:
        tries.append(fraction)
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(verification, "compared", scarce)
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), Opaque()
    gact = gact_dist.attach(model, config=config("L1"))
    for _ in range(2):  # of which each verifies, as nothing could be compared before
        with gact.step(lambda given: model(given.inputs).square().mean(), batch):
            loss = model(batch.inputs).square().mean()
        loss.backward()
    assert tries == [1.0, 1.0]
    assert exactly_stored(gact) == set()
    assert len([message for message in warnings_of(caplog) if "out of memory" in message]) == 2
