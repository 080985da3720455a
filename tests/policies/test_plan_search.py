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
    assert 0.1 / 1.19 < samples.increase < 0.1 / 1.145  # later ones count for more
    resumed = GradientDraws.from_state(samples.state_dict())
    assert resumed.increase == samples.increase
    assert resumed.standard_error == samples.standard_error


def test_the_standard_error_follows_the_spread_of_the_samples():
    assert samples_of([1.0]).standard_error == pytest.approx(math.hypot(0.5, 0.5))  # assumed of one sample
    fading = 0.5 ** (np.arange(10) / 3)
    effective = fading.sum() ** 2 / (fading @ fading)
    alike = samples_of([1.0] * 10)
    assert alike.standard_error == pytest.approx(math.sqrt(0.5 / 10 / effective))
    apart = samples_of([0.8, 1.25] * 5)
    # of increases 0.125 and 0.08 about their mean: a quarter of it apart on either side
    assert apart.standard_error == pytest.approx(math.sqrt((0.5 + 10 * 0.22**2) / 10 / effective), rel=0.05)


def test_samples_from_before_the_gradient_fell_are_dropped():
    samples = samples_of([1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 0.1, 0.12, 0.09])
    assert samples.second_moment == pytest.approx(0.31 / 3)
    assert samples.increase == pytest.approx(0.1 / (0.31 / 3), rel=0.05)
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
    samples.renew(0.07)
    assert samples.increase == pytest.approx(0.07)
    samples.add(5.0, 1.0, relative=True)
    assert (samples.second_moment, samples.increase) == (5.0, 0.2)


def test_another_plan_changes_what_rounding_adds_to_the_draws_so_far():
    samples = samples_of([1.0, 2.0, 1.5], noise=0.3)
    before = samples.increase
    samples.renew(before / 4)
    assert samples.increase == pytest.approx(before / 4)
    untouched = samples_of([1.0, 2.0], noise=0.0)  # all was exact
    untouched.renew(0.1)
    assert untouched.increase == pytest.approx(0.1)


def test_the_increase_is_that_of_the_latest_draws_though_squares_were_larger_before():
    """Over ten draws the gradient falls to a tenth and the increase doubles: a mean of squares would say 0.13."""
    samples = GradientDraws()
    for number, increase in enumerate(np.geomspace(0.1, 0.2, 10)):
        size = 0.1 ** (number / 9) * (1.8 if number % 2 else 1.0)
        samples.add(size, size * increase, relative=False)
    assert 0.15 < samples.increase < 0.2


def test_noise_that_falls_with_the_gradient_stays_within_the_error_bound():
    """Both to a hundredth, between the fourth and the fifth sample: the increase is a tenth before and after."""
    samples = GradientDraws()
    for size in (100.0, 110.0, 90.0, 100.0, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9):
        samples.add(size, size / 10, relative=False)
    assert samples.increase == pytest.approx(0.1)
