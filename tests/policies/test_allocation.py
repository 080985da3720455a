"""Allocation against brute force on small cases and against the Lagrangian bound on large ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gact_dist.policies.allocation import EXACT, minimum_bits, minimum_variance

ROUNDING_VARIANCE = (2.0 ** np.arange(1, 9) - 1) ** -2
AVERAGES = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.3, 6.0, 7.0, 8.0, 12.0]

# Allocations are within 1% of the optimum; float sums in another order differ by 1e-15 relative, far inside it.
WITHIN = 1.01


def convex(generator, count):
    """Curves c (2^b - 1)^-2 whose c spans some five decades, and sizes of three."""
    scale = np.exp(generator.normal(0, 3, count))
    return scale[:, None] * ROUNDING_VARIANCE, generator.integers(1, 1000, count)


def skewed_sizes(generator, count):
    costs, _ = convex(generator, count)
    return costs, (10 ** generator.uniform(0, 6, count)).astype(np.int64)


def one_giant(generator, count):
    costs, sizes = convex(generator, count)
    sizes[0] = 20 * sizes.sum()
    return costs, sizes


def equal_tensors(generator, count):
    return np.tile(ROUNDING_VARIANCE, (count, 1)), np.full(count, 4096)


def zero_curves(generator, count):
    costs, sizes = convex(generator, count)
    costs[::2] = 0.0
    return costs, sizes


def not_monotone(generator, count):
    return generator.exponential(1.0, (count, 8)), generator.integers(1, 1000, count)


def measured(generator, count):
    """Convex curves under 50% measurement noise."""
    costs, sizes = convex(generator, count)
    return costs * np.exp(generator.normal(0, 0.5, costs.shape)), sizes


KINDS = [convex, skewed_sizes, one_giant, equal_tensors, zero_curves, not_monotone, measured]


def options(costs, sizes, exact_bits):
    """Costs and bits in total of the nine options, [L, 9]."""
    widths = np.broadcast_to(np.arange(1.0, 9.0), costs.shape)
    bits = np.column_stack([widths, np.broadcast_to(exact_bits, len(sizes))]) * sizes[:, None]
    return np.column_stack([costs, np.zeros(len(sizes))]), bits


def every_combination(costs, sizes, exact_bits):
    """Total cost and total bits of all 9^L allocations."""
    cost_table, bits_table = options(costs, sizes, exact_bits)
    total_cost, total_bits = np.zeros(1), np.zeros(1)
    for cost, bits in zip(cost_table, bits_table, strict=True):
        total_cost = np.add.outer(total_cost, cost).ravel()
        total_bits = np.add.outer(total_bits, bits).ravel()
    return total_cost, total_bits


@pytest.mark.parametrize("average_bits", AVERAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_small_cases_are_within_one_percent_of_brute_force(kind, average_bits):
    generator = np.random.default_rng(AVERAGES.index(average_bits))
    for count in (1, 2, 3, 4, 5):
        costs, sizes = kind(generator, count)
        exact_bits = generator.choice([16, 32], count)
        result = minimum_variance(costs, sizes, average_bits=average_bits, exact_bits=exact_bits)
        total_cost, total_bits = every_combination(costs, sizes, exact_bits)
        # 1e-12 as in the package: an average such as 5.3 times a size is itself rounded
        best = total_cost[total_bits <= average_bits * sizes.sum() * (1 + 1e-12)].min()
        assert result.variance <= WITHIN * best
        assert result.lower_bound <= best * (1 + 1e-12)
        assert result.average_bits <= average_bits * (1 + 1e-12)


@pytest.mark.parametrize("average_bits", [1.5, 2.5, 4.0, 6.0])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not one_giant])
def test_large_cases_are_within_one_percent_of_the_lagrangian_bound(kind, average_bits):
    costs, sizes = kind(np.random.default_rng(0), 2000)
    result = minimum_variance(costs, sizes, average_bits=average_bits, exact_bits=32)
    assert result.variance <= WITHIN * result.lower_bound
    assert result.average_bits <= average_bits * (1 + 1e-12)


@pytest.mark.parametrize("average_bits", [1.5, 2.5, 4.0, 6.0])
def test_a_giant_among_many_is_within_one_percent_of_the_bound_over_its_own_widths(average_bits):
    """The plain bound splits the giant between two widths, which no allocation can; fixing its width removes that."""
    costs, sizes = one_giant(np.random.default_rng(1), 1000)
    result = minimum_variance(costs, sizes, average_bits=average_bits, exact_bits=32)
    bounds = []
    for bits in range(1, int(average_bits) + 2):
        left = (average_bits * sizes.sum() - bits * sizes[0]) / sizes[1:].sum()
        if left >= 1:
            others = minimum_variance(costs[1:], sizes[1:], average_bits=left, exact_bits=32)
            bounds.append(costs[0, bits - 1] + others.lower_bound)
    assert result.variance <= WITHIN * min(bounds)


@pytest.mark.parametrize("kind", KINDS)
def test_reported_totals_are_those_of_the_bits(kind):
    costs, sizes = kind(np.random.default_rng(2), 50)
    exact_bits = np.where(np.arange(50) % 2, 16, 32)
    metadata_bits = np.where(np.arange(50) % 3, 0.125, 0.1875)
    result = minimum_variance(costs, sizes, average_bits=4.5, exact_bits=exact_bits, metadata_bits=metadata_bits)
    cost = np.where(result.bits == EXACT, 0.0, costs[np.arange(50), result.bits - 1])
    bits = np.where(result.bits == EXACT, exact_bits, result.bits + metadata_bits)
    assert set(result.bits.tolist()) <= set(range(9))
    # 50 additions and products: 100 half ulps relative at most
    assert result.variance == pytest.approx(cost.sum(), rel=1e-14)
    assert result.average_bits == pytest.approx((bits * sizes).sum() / sizes.sum(), rel=1e-14)
    assert result.average_bits <= 4.5 * (1 + 1e-12)


def test_equal_inputs_give_equal_bits_whatever_their_memory_layout():
    costs, sizes = measured(np.random.default_rng(3), 300)
    first = minimum_variance(costs, sizes, average_bits=2.5, exact_bits=32).bits
    assert first.dtype == np.int64
    for other in (costs.copy(), np.asfortranarray(costs), costs[::-1][::-1]):
        again = minimum_variance(other, sizes.astype(float), average_bits=2.5, exact_bits=32)
        assert np.array_equal(first, again.bits)


def test_the_sensitive_tensor_gets_more_bits_and_a_full_budget_stores_exactly():
    costs = np.array([[1.0], [1000.0]]) * ROUNDING_VARIANCE
    low, high = minimum_variance(costs, [10, 10], average_bits=4, exact_bits=32).bits
    assert low < high
    assert low + high == 8
    assert minimum_variance(costs, [10, 10], average_bits=32, exact_bits=32).bits.tolist() == [EXACT, EXACT]
    assert minimum_variance(costs, [10, 10], average_bits=12, exact_bits=[16, 32]).bits.tolist() == [EXACT, 8]


def test_forbidden_widths_are_never_used():
    costs, sizes = measured(np.random.default_rng(4), 200)
    forbidden = np.random.default_rng(5).random((200, 8)) < 0.3
    costs[forbidden] = math.inf
    costs[0] = math.inf
    result = minimum_variance(costs, sizes, average_bits=4.5, exact_bits=32)
    assert result.bits[0] == EXACT
    assert math.isfinite(result.variance)


def test_too_small_a_budget_names_the_smallest_that_can_be_reached():
    costs = np.tile(ROUNDING_VARIANCE, (2, 1))
    with pytest.raises(ValueError, match=r"average_bits is 0.5, .* need at least 1 bits"):
        minimum_variance(costs, [30, 10], average_bits=0.5, exact_bits=32)
    costs[1, :2] = math.inf
    with pytest.raises(ValueError, match=r"at least 1.5 bits"):
        minimum_variance(costs, [30, 10], average_bits=1.49, exact_bits=32)
    assert minimum_variance(costs, [30, 10], average_bits=1.5, exact_bits=32).bits.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"at least 1.25 bits"):
        minimum_variance(costs[:1], [30], average_bits=1.0, exact_bits=32, metadata_bits=0.25)
    with pytest.raises(ValueError, match="average_bits is nan"):
        minimum_variance(costs, [30, 10], average_bits=math.nan, exact_bits=32)


@pytest.mark.parametrize(
    ("costs", "sizes", "message"),
    [
        (np.ones((2, 7)), [1, 1], r"costs has shape \(2, 7\)"),
        (np.ones((2, 8)), [1, 1, 1], r"sizes \(3,\)"),
        (np.full((1, 8), math.nan), [1], "costs holds nan"),
        (np.full((1, 8), -1.0), [1], "costs holds -1.0"),
        (np.ones((1, 8)), [-5], "sizes holds -5.0"),
        (np.ones((1, 8)), [math.inf], "only costs may hold inf"),
    ],
)
def test_malformed_input_is_refused(costs, sizes, message):
    with pytest.raises(ValueError, match=message):
        minimum_variance(costs, sizes, average_bits=4, exact_bits=32)


def test_no_tensors_and_empty_tensors_are_fine():
    empty = minimum_variance(np.empty((0, 8)), [], average_bits=4, exact_bits=32)
    assert (len(empty.bits), empty.variance, empty.average_bits) == (0, 0.0, 0.0)
    costs = np.tile(ROUNDING_VARIANCE, (2, 1))
    assert minimum_variance(costs, [0, 100], average_bits=4, exact_bits=32).bits.tolist() == [EXACT, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_fewest_bits_within_a_variance_are_within_one_percent_of_brute_force(kind):
    generator = np.random.default_rng(6)
    for count in (1, 2, 3, 4, 5):
        costs, sizes = kind(generator, count)
        total_cost, total_bits = every_combination(costs, sizes, 32)
        for bits in (0, 1, 2, 4, 6):
            budget = costs[:, bits - 1].sum() if bits else 0.0
            result = minimum_bits(costs, sizes, variance_budget=budget, exact_bits=32)
            best = total_bits[total_cost <= budget * (1 + 1e-12)].min() / sizes.sum()
            assert result.variance <= budget * (1 + 1e-12)
            assert result.average_bits <= WITHIN * best
            assert result.lower_bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_fewest_bits_are_within_one_percent_of_a_known_solution(kind):
    """The allocation that minimum_variance found meets its own variance, so minimum_bits may not need more."""
    for seed in range(10):
        costs, sizes = kind(np.random.default_rng(seed), 30)
        known = minimum_variance(costs, sizes, average_bits=1.7, exact_bits=32)
        result = minimum_bits(costs, sizes, variance_budget=known.variance, exact_bits=32)
        assert result.variance <= known.variance * (1 + 1e-12)
        assert result.average_bits <= WITHIN * known.average_bits


def test_variance_budget_must_be_a_number_from_zero_up():
    with pytest.raises(ValueError, match="variance_budget is -1"):
        minimum_bits(np.ones((1, 8)), [1], variance_budget=-1, exact_bits=32)
