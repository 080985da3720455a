"""When an adaptation changes nothing that matters, and what is kept of every adaptation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import small_models
import torch
import torch.distributed as dist

import gact_dist
from gact_dist import Config
from gact_dist.policies import Costs, Plan, policy_of
from gact_dist.policies.acgc import settled
from gact_dist.policies.allocation import minimum_bits

VARIANCE = (2.0 ** np.arange(1, 9) - 1) ** -2


def costs_of(sensitivities, sizes, retained_bytes=None):
    count = len(sizes)
    curves = np.array(sensitivities, dtype=np.float64)[:, None] * VARIANCE
    full = np.full(count, 32.0)
    names = tuple("abcdefgh"[:count])
    return Costs(names, curves, np.array(sizes, dtype=np.float64), full, np.zeros(count), retained_bytes)


def kept(config, costs, bits):
    """The current bits where a policy keeps them, None where it does not; and the fresh ones."""
    policy = policy_of(config)
    fresh = policy.allocate(costs)
    return policy.settled(costs, Plan(bits), fresh), fresh


def test_a_plan_is_kept_that_fits_and_that_a_fresh_one_hardly_betters():
    config = Config(bits=3, adapt_tolerance=0.2)
    costs = costs_of([1.0, 1.3], [100, 100])
    found, fresh = kept(config, costs, {"a": 3, "b": 3})
    assert fresh.bits.tolist() == found.bits.tolist() == [3, 3]
    # 2 and 4 bits for 3 and 3: 1/9 + 1.3/225 over 2.3/49 is 2.5 times the variance
    assert kept(config, costs, {"a": 2, "b": 4})[0] is None
    assert kept(Config(bits=3, adapt_tolerance=2.0), costs, {"a": 2, "b": 4})[0] is not None
    assert kept(config, costs, {"a": 4, "b": 4})[0] is None  # over the budget
    assert kept(config, costs, {"a": 3})[0] is None  # a tensor is new
    assert kept(Config(bits=3, adapt_tolerance=0), costs, {"a": 3, "b": 3})[0] is None


@pytest.mark.parametrize("tolerance", [0.0, 10.0])
def test_average_bits_are_those_of_the_budget_whether_a_plan_is_new_or_kept(tolerance):
    policy = policy_of(Config(bits=3, adapt_tolerance=tolerance))
    costs = replace(costs_of([1.0, 1.0], [100, 100]), metadata_bits=np.full(2, 0.25))
    choice = policy.choose(costs, Plan({"a": 2, "b": 4}), None)
    assert choice.kept == (tolerance > 0)
    assert choice.average_bits == 3.0  # without scales and offsets


@pytest.mark.parametrize("policy", ["gact", "actnn"])
def test_elements_that_are_derived_leave_one_bit_each_to_what_is_stored(policy):
    costs = replace(costs_of([1.0, 1.0], [100, 100]), derived_size=200.0)
    policy = policy_of(Config(policy=policy, bits=3, adapt_tolerance=10.0))
    if policy.example_columns:
        costs = replace(costs, examples=np.zeros((2, policy.example_columns)))
    choice = policy.choose(costs, Plan({"a": 3, "b": 5}), None)
    assert (choice.kept, choice.average_bits) == (True, 4.0)
    assert not policy.choose(costs, Plan({"a": 4, "b": 5}), None).kept  # over the budget
    assert policy.choose(costs, Plan(), None).bits == {"a": 4, "b": 4}


def test_a_plan_that_no_longer_fits_its_bytes_is_not_kept():
    table = np.array([[13.0 * bits for bits in range(1, 9)] + [400.0]] * 2)
    costs = costs_of([1.0, 1.0], [100, 100], table)
    for budget, expected in ((78, True), (77, False)):
        config = Config(retained_bytes=budget, adapt_tolerance=100.0)
        assert (kept(config, costs, {"a": 3, "b": 3})[0] is not None) == expected


def test_with_an_error_the_fewer_bits_count():
    costs = costs_of([1.0, 1.0], [100, 100])
    exact, metadata = costs.exact_bits, costs.metadata_bits
    fresh = minimum_bits(costs.variance, costs.sizes, variance_budget=2 / 49, exact_bits=exact, metadata_bits=metadata)
    assert fresh.bits.tolist() == [3, 3]
    assert settled(0.2, costs, Plan({"a": 4, "b": 3}), fresh) is not None  # 3.5 bits
    assert settled(0.2, costs, Plan({"a": 4, "b": 4}), fresh) is None


def adapted_at(kind, steps, change_at=None, **settings):
    """(steps at which a model that stands still adapts, controller); its weights are drawn anew at change_at."""
    model, batch = getattr(small_models, kind)()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(adapt_interval=2, min_numel=64, bits=3, **settings))
    found = []
    for step in range(1, steps + 1):
        before = gact.adaptation
        if step == change_at:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
        with gact.step(loss_fn, batch):
            loss_fn(batch)
        if gact.adaptation is not before:
            found.append(step)
    return found, gact


def test_the_interval_doubles_up_to_eight_times_while_nothing_moves():
    found, gact = adapted_at("mlp", 50)
    assert found == [1, 3, 7, 15, 31, 47]
    assert [entry["kept"] for entry in gact.history] == [False, True, True, True, True, True]
    assert adapted_at("mlp", 9, adapt_tolerance=0.0)[0] == [1, 3, 5, 7, 9]


def test_a_change_that_matters_brings_a_new_plan_and_the_first_interval_back():
    found, gact = adapted_at("mlp", 11, change_at=5)
    assert found[:4] == [1, 3, 7, 9]
    assert [entry["kept"] for entry in gact.history][:3] == [False, True, False]


def test_the_interval_survives_a_resume():
    found, gact = adapted_at("mlp", 7)
    assert found == [1, 3, 7]
    model, batch = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    resumed = gact_dist.attach(model, config=gact.config)
    resumed.load_state_dict(gact.state_dict())
    for _ in range(8, 15):
        with resumed.step(loss_fn, batch):
            loss_fn(batch)
    assert resumed.adaptation is None
    with resumed.step(loss_fn, batch):
        loss_fn(batch)
    assert resumed.adaptation is not None


def adapted_on_a_rank():
    torch.manual_seed(dist.get_rank())
    found, gact = adapted_at("gpt", 16, adapt_tolerance=0.5)
    return found, gact.plan, gact.history


def test_ranks_agree_on_when_to_adapt(ranks):
    (found, plan, history), (other_found, other_plan, other_history) = ranks(adapted_on_a_rank)
    assert found == other_found == [1, 3, 7, 15]
    assert plan == other_plan
    assert history == other_history


@pytest.mark.parametrize("settings", [{}, {"policy": "acgc", "error": 0.25}])
def test_the_history_is_lines_of_json_with_bits_and_sensitivities(settings):
    model, batch = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config.from_dict({"min_numel": 64, "adapt_tolerance": 0.0, **settings}))
    for _ in range(2):
        gact.calibrate(loss_fn, batch)
    first, second = (json.loads(json.dumps(entry)) for entry in gact.history)
    assert first["step"] == second["step"] == 0
    assert {name: entry["bits"] for name, entry in second["tensors"].items()} == gact.plan
    assert all(entry["sensitivity"] >= 0 for entry in first["tensors"].values())
    assert second["predicted_variance"] == gact.adaptation.predicted_variance
    assert (first["gradient_error"] is None) == (not settings)


@pytest.mark.parametrize("settings", [{}, {"estimator": "perturbation"}, {"policy": "acgc", "error": 0.25}])
@pytest.mark.parametrize("seed", [-(2**63), -(2**62) - 1, 150_000_000, 2**32 - 1, 2**62, 2**63 - 1])
def test_every_seed_adapts(seed, settings):
    layers = torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)
    model, x = torch.nn.Sequential(*layers), torch.randn(32, 64)
    gact = gact_dist.attach(model, config=Config(**{"policy": "gact", "seed": seed, **settings}))
    for _ in range(3):
        with gact.step(lambda batch: model(batch).square().mean(), x):
            loss = model(x).square().mean()
        loss.backward()
    assert len(gact.plan) == 2
