"""What an error allows: the samples that tell it, and the search for the plan of the fewest bits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gact_dist import Config
from gact_dist.policies.acgc import GradientDraws, fewest_bits
from gact_dist.policies.base import Costs

CONFIG = Config(policy="acgc", error=0.1)
WIDTHS = np.arange(1, 9)
CURVE = (2.0**WIDTHS - 1) ** -2


def costs_of(*sensitivities, size=100.0):
    count = len(sensitivities)
    curves = np.array(sensitivities)[:, None] * CURVE
    names = tuple("abcdefgh"[:count])
    return Costs(names, curves, np.full(count, size), np.full(count, 32.0), np.zeros(count))


def noise_like(costs, factor, measured):
    """Measures `factor` times what costs predict, and notes what it was asked for."""

    def noise_of(allocation):
        bits = allocation.bits
        measured.append(bits.tolist())
        return factor * float(np.where(bits == 0, 0.0, costs.variance[np.arange(len(bits)), bits - 1]).sum())

    return noise_of


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_the_search_ends_close_to_the_limit_wherever_it_starts(factor):
    costs = costs_of(1.0, 3.0, 10.0, 30.0, 0.1, 0.3, 2.0, 5.0)
    limit, measured = 0.5, []
    found = fewest_bits(costs, limit, noise_like(costs, factor, measured), start=limit)
    assert found.noise <= limit
    # one bit less for the tensor that loses least by it would be over the limit, or the search stopped within a tenth
    bits = found.allocation.bits
    rows = np.arange(len(bits))
    fewer = costs.variance[rows, np.maximum(bits - 2, 0)] - costs.variance[rows, bits - 1]
    assert found.noise > 0.9 * limit or found.noise + factor * fewer[bits > 1].min() > 0.9 * limit
    assert len(measured) <= 8 + 8


def test_a_uniform_width_that_keeps_to_the_limit_is_taken_where_it_takes_fewer_bits():
    costs = costs_of(1.0, 1.0, 1.0, 1.0)
    costs.variance[0] *= 1e6  # an estimate that is far off, which only measuring shows

    def noise_of(allocation):
        return float(CURVE[np.where(allocation.bits == 0, 8, allocation.bits) - 1].sum())

    found = fewest_bits(costs, 4 * CURVE[1], noise_of, start=4 * CURVE[1])
    assert found.uniform
    assert found.allocation.bits.tolist() == [2, 2, 2, 2]


def test_what_no_width_reaches_ends_with_the_least_that_was_found():
    costs = costs_of(1.0, 2.0)
    measured = []

    def noise_of(allocation):
        measured.append(allocation)
        return 1.0 + 1.0 / len(measured)

    assert fewest_bits(costs, 0.1, noise_of, start=0.1).noise == 1.0 + 1.0 / len(measured)


def samples_of(squares, noise=0.1):
    samples = GradientDraws()
    for square in squares:
        samples.add(square, noise, relative=False)
    return samples


def test_the_second_moment_is_the_mean_of_the_last_ten():
    samples = samples_of(1.0 + 0.01 * np.arange(20))
    assert samples.second_moment == pytest.approx(1.145)
    assert samples.increase == pytest.approx(0.1 / 1.145)
    resumed = GradientDraws.from_state(samples.state_dict())
    assert resumed.increase == samples.increase
    assert resumed.standard_error == samples.standard_error


def test_the_standard_error_follows_the_spread_of_the_samples():
    assert samples_of([1.0]).standard_error == pytest.approx(math.hypot(0.5, 0.5))  # assumed of one sample
    alike = samples_of([1.0] * 10)
    assert alike.standard_error == pytest.approx(math.hypot(0.5, 0.5) / 10)
    # successive differences of 1 have half a variance of 1 each; about a mean of 1 with the assumed 0.25 among ten
    apart = samples_of([0.5, 1.5] * 5)
    squares = (0.25 + 9 * 0.5) / 10
    assert apart.standard_error == pytest.approx(math.hypot(math.sqrt(squares / 10), 0.05))


def test_samples_from_before_the_gradient_fell_are_dropped():
    samples = samples_of([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 0.1, 0.12, 0.09])
    assert samples.second_moment == pytest.approx(0.31 / 3)
    assert samples_of([0.1] * 5 + [1.0] * 5).second_moment == pytest.approx(0.55)  # one that rose is no danger


def test_stationary_samples_are_seldom_dropped():
    generator = np.random.default_rng(0)
    # squared norms with four effective dimensions: a relative standard deviation of 0.7
    kept = [len(samples_of(generator.chisquare(4, 10)).state_dict()["squares"]) for _ in range(400)]
    assert np.mean(np.array(kept) == 10) > 0.9


def test_what_is_not_finite_or_zero_is_left_out_and_kinds_are_not_mixed():
    samples = samples_of([2.0, float("inf"), float("nan")])
    samples.add(0.0, 0.0, relative=False)
    assert samples.second_moment == 2.0
    samples.add(-1.0, 3.0, relative=False)  # noise larger than the gradient: an estimate all the same
    assert samples.second_moment == 0.5
    samples.renew(7.0)
    assert samples.noise == 7.0
    samples.add(5.0, 1.0, relative=True)
    assert (samples.second_moment, samples.noise) == (5.0, 1.0)


def test_noise_that_falls_with_the_gradient_stays_within_the_error_bound():
    """Both to a hundredth, between the fourth and the fifth sample: the increase is a tenth before and after."""
    samples = GradientDraws()
    samples.renew(10.0)
    for size in (100.0, 110.0, 90.0, 100.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9):
        samples.add(size, size / 10, relative=False)
    assert samples.second_moment == pytest.approx(1.0)
    assert samples.increase == pytest.approx(0.1)
