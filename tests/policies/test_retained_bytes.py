"""A budget in bytes: never exceeded, used well, and an error that names the smallest where it cannot be had."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import small_models
import torch
import torch.distributed as dist
from gradients import variance_of_gradient

import gact_dist
from gact_dist import Config, codec
from gact_dist.adaptation.adapter import Adapter
from gact_dist.distributed import collectives as sync
from gact_dist.policies.allocation import minimum_variance_in_bytes

KINDS = ["gpt", "cnn", "mlp"]


def retained_after_a_step(kind, config, follow=False, steps=2):
    """Bytes that the report shows for some steps of a model."""
    model, batch = getattr(small_models, kind)()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=config)
    retained = []
    if follow:
        gact.follow()
    for _ in range(steps):
        if follow:
            loss_fn(batch).backward()
        else:
            with gact.step(loss_fn, batch):
                loss = loss_fn(batch)
            loss.backward()
        retained.append(gact.report().retained_bytes)
    gact.detach()
    return retained


def uniform_bytes(kind, bits, derive=False):
    return retained_after_a_step(kind, Config(policy="uniform", bits=bits, min_numel=64, derive=derive))[1]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "gpt, derived"])
def test_a_step_keeps_no_more_than_its_budget_and_uses_most_of_it(kind, follow):
    kind, _, derived = kind.partition(", ")
    for bits in (1, 2, 3, 5, 7):
        budget = uniform_bytes(kind, bits, bool(derived)) + 17
        config = Config(retained_bytes=budget, min_numel=64, calibration_samples=4, derive=bool(derived))
        first, second = retained_after_a_step(kind, config, follow)
        assert first <= budget
        assert second <= budget
        # The step between widths of the smallest tensors that can be moved is far below a tenth of all bytes.
        assert second >= 0.9 * budget


@pytest.mark.parametrize(("derive", "expected"), [(False, 1), (True, 2)])
def test_a_first_adaptation_weighs_a_step_again_only_where_a_measurement_may_show_more(derive, expected, monkeypatch):
    weighed, weigh = [], Adapter._weigh
    monkeypatch.setattr(Adapter, "_weigh", lambda *args, **options: weighed.append(options) or weigh(*args, **options))
    retained_after_a_step("gpt", Config(retained_bytes=200_000, min_numel=64, derive=derive))
    assert len(weighed) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_generous_budget_stores_exactly(kind):
    model, batch = getattr(small_models, kind)()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(retained_bytes=2**30, min_numel=64))
    gact.calibrate(loss_fn, batch)
    assert None in gact.plan.values()
    assert gact.adaptation.predicted_variance == 0.0  # what is not exact has no effect on the gradient


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_fits_exactly_is_bitwise_the_untouched_one(kind, follow):
    """Nothing is derived then either, which would be right only up to roundings of float32."""

    def gradients(config):
        model, batch = getattr(small_models, kind)()
        loss_fn = small_models.loss_of(model)
        gact = gact_dist.attach(model, config=config)
        if follow:
            gact.follow()
        found = []
        for _ in range(3):
            if follow:
                loss = loss_fn(batch)
            else:
                with gact.step(loss_fn, batch):
                    loss = loss_fn(batch)
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        rows = [] if config.policy == "off" else gact.report().rows
        return found, {row.codec for row in rows}

    untouched, _ = gradients(Config(policy="off"))
    fitting, codecs = gradients(Config(retained_bytes=2**30, min_numel=64))
    assert all(map(torch.equal, untouched, fitting))
    assert "derived" not in codecs


@pytest.mark.parametrize("kind", [*KINDS, "gpt, derived"])
def test_an_unreachable_budget_names_the_smallest_which_then_can_be_had(kind):
    kind, _, derived = kind.partition(", ")
    settings = {"min_numel": 64, "derive": bool(derived)}
    with pytest.raises(ValueError, match=r"retained_bytes is 10, but a step keeps at least (\d+) bytes") as refused:
        retained_after_a_step(kind, Config(retained_bytes=10, **settings))
    smallest = int(re.search(r"at least (\d+) bytes", str(refused.value)).group(1))
    assert smallest == uniform_bytes(kind, 1, bool(derived))
    assert retained_after_a_step(kind, Config(retained_bytes=smallest, **settings)) == [smallest, smallest]


def test_for_the_bytes_of_a_uniform_plan_the_adaptive_one_has_less_variance():
    for kind in KINDS:
        model, batch = getattr(small_models, kind)()
        loss_fn = small_models.loss_of(model)
        found = {}
        for name, config in (
            ("uniform", Config(policy="uniform", bits=4, min_numel=64)),
            ("adaptive", Config(retained_bytes=uniform_bytes(kind, 4), min_numel=64)),
        ):
            gact = gact_dist.attach(model, config=config)
            gact.calibrate(loss_fn, batch, samples=64)
            found[name] = variance_of_gradient(model, loss_fn, batch, gact, draws=8)
            gact.detach()
        assert found["adaptive"] < found["uniform"], kind


def test_a_larger_batch_is_warned_of_and_fits_after_the_next_adaptation(caplog):
    model, _ = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    small, large = (small_models.mlp(batch=size)[1] for size in (32, 64))
    gact = gact_dist.attach(model, config=Config(retained_bytes=8000, min_numel=64, adapt_interval=3))
    retained = []
    for batch in (small, large, small, small, large):
        with gact.step(loss_fn, batch), caplog.at_level(logging.WARNING, "gact_dist"):
            loss_fn(batch)
        retained.append(gact.report().retained_bytes)
    assert retained[0] <= 8000 < retained[1]
    assert [record.getMessage() for record in caplog.records] == [
        f"this step keeps {retained[1]} bytes on rank 0, more than retained_bytes=8000: its batch is larger than the "
        "one that the bits were chosen with, or saves new tensors; the next adaptation makes room, calibrate() does so "
        "at once"
    ]
    assert max(retained[3:]) <= 8000


def test_a_step_that_gives_no_loss_function_is_told_that_no_bits_were_chosen(caplog):
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(retained_bytes=1000, min_numel=64))
    with gact.step(), caplog.at_level(logging.WARNING, "gact_dist"):
        small_models.loss_of(model)(batch)
    assert [record.getMessage() for record in caplog.records] == [
        f"this step keeps {gact.report().retained_bytes} bytes on rank 0, more than retained_bytes=1000: no bits have "
        "been chosen for it yet; give step(loss_fn, batch), call calibrate(), or use follow() in place of step()"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_bytes_at_another_width_are_those_of_packing_with_it(dtype):
    for tensor in (torch.randn(300, 7).to(dtype), torch.randn(64, 64).to(dtype)[::2], torch.randn(5, 1).to(dtype)):
        packed = codec.pack(tensor, bits=1)
        assert [packed.nbytes_at(b) for b in range(1, 9)] == [codec.pack(tensor, bits=b).nbytes for b in range(1, 9)]


@pytest.mark.parametrize("seed", range(5))
def test_allocation_in_bytes_is_within_one_percent_of_brute_force(seed):
    generator = np.random.default_rng(seed)
    costs = np.exp(generator.normal(0, 3, (4, 1))) * (2.0 ** np.arange(1, 9) - 1) ** -2
    sizes = generator.integers(100, 5000, 4)
    table = np.column_stack([np.ceil(np.outer(sizes, np.arange(1, 9)) / 8) + 40, 4 * sizes])
    exhaustive = np.column_stack([costs, np.zeros(4)])
    variances, totals = np.zeros(1), np.zeros(1)
    for cost, row in zip(exhaustive, table, strict=True):
        variances, totals = np.add.outer(variances, cost).ravel(), np.add.outer(totals, row).ravel()
    for share in (0.0, 0.1, 0.4, 0.8):
        budget = table[:, 0].sum() + share * (table[:, 7].sum() - table[:, 0].sum())
        result = minimum_variance_in_bytes(costs, sizes, table, budget_bytes=budget)
        chosen = np.where(result.bits == 0, 8, result.bits - 1)
        assert table[np.arange(4), chosen].sum() <= budget
        assert result.variance <= 1.01 * variances[totals <= budget].min()


def train_with_unequal_batches(budget):
    """(bytes of each step, plan, collectives' maximum of two names) on a rank whose batch depends on its number."""
    model, _ = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    batch = small_models.mlp(seed=dist.get_rank(), batch=32 * (1 + dist.get_rank()))[1]
    gact = gact_dist.attach(model, config=Config(retained_bytes=budget, min_numel=64, calibration_samples=8))
    retained = []
    for _ in range(2):
        with gact.step(loss_fn, batch):
            loss_fn(batch)
        retained.append(gact.report().retained_bytes)
    return retained, gact.plan


def refusal_with_unequal_batches():
    try:
        train_with_unequal_batches(1000)
    except ValueError as error:
        return str(error)
    return ""


def largest_of_ranks():
    rank = dist.get_rank()
    names, values = sync.max_over_groups(["a", f"only {rank}"], torch.tensor([[1.0, -rank + 5.0], [7.0, 8.0]]), [None])
    return names, values.tolist()


def test_every_rank_keeps_to_the_budget_under_one_plan(ranks):
    (small, plan), (large, other_plan) = ranks(train_with_unequal_batches, 10_000)
    assert plan == other_plan
    assert max(small + large) <= 10_000
    assert large[1] >= 9_000
    first, second = ranks(refusal_with_unequal_batches)
    assert first == second
    smallest = uniform_bytes("mlp", 1, derive=True)  # rank 1 has that batch
    assert int(re.search(r"at least (\d+)", first).group(1)) == smallest


def test_the_largest_value_over_ranks_counts_what_a_rank_lacks_as_nothing(ranks):
    for names, values in ranks(largest_of_ranks):
        assert names == ("a", "only 0", "only 1")
        assert values == [[1.0, 5.0], [7.0, 8.0], [7.0, 8.0]]


@pytest.mark.parametrize("spread", [False, True])
def test_a_plan_that_seems_faulty_keeps_to_the_budget_all_the_same(spread, monkeypatch, caplog):
    """Every plan is one here, and the search for what to store exactly finds six times the budget."""
    if spread:
        monkeypatch.setattr("gact_dist.adaptation.adapter._most_parts", lambda *_: 1.0)
    monkeypatch.setattr("gact_dist.adaptation.verification._NEGLIGIBLE", 0.0)
    budget = uniform_bytes("gpt", 2) + 17
    config = Config(retained_bytes=budget, min_numel=64, calibration_samples=4, noise_limit=1e-6)
    assert max(retained_after_a_step("gpt", config, steps=6)) <= budget
    assert "take more than retained_bytes: it stays rounded" in caplog.text


def test_where_the_first_widths_are_too_few_the_plan_is_there_before_the_first_step(monkeypatch):
    """The adaptation would be spread over steps, under one bit for everything."""
    monkeypatch.setattr("gact_dist.adaptation.adapter._most_parts", lambda *_: 1.0)
    budget = uniform_bytes("gpt", 2) - 17
    for hopeless, chosen in ((1000.0, False), (1e-9, True)):  # times the squared gradient
        monkeypatch.setattr("gact_dist.adaptation.verification._HOPELESS", hopeless)
        model, batch = small_models.gpt()
        loss_fn = small_models.loss_of(model)
        gact = gact_dist.attach(model, config=Config(retained_bytes=budget, min_numel=64, calibration_samples=4))
        with gact.step(loss_fn, batch):
            loss_fn(batch)
        assert bool(gact.plan) is chosen
        gact.detach()
