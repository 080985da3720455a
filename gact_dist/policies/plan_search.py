"""The plan of the fewest bits that adds no more than so much variance to the gradient, by measuring a few of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..config import Config
from . import base as policies
from .allocation import WIDTHS, Allocation
from .base import Costs

_TRIES = 8
_CLOSE = 0.9  # a plan that adds so much of what it may is not searched on for fewer bits
# A quarter of the variance is one bit more: where a backward overflows at some width, the next one may well do.
_LARGEST_CHANGE = 4.0


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and what was measured of it."""

    allocation: Allocation
    noise: float
    """variance that it adds"""
    uniform: bool = False
    """whether it is one width for all tensors"""


def fewest_bits(
    config: Config, costs: Costs, limit: float, noise_of: Callable[[Allocation], float], *, start: float
) -> Found:
    """The plan with the fewest bits of those tried that add at most `limit`; else the one that adds least.

    noise_of: measures the variance that a plan adds, in the units of limit. start: what is allocated first, in those of
    costs, which predict variances up to a factor that depends on the width. Tried are plans allocated to a variance,
    raised or cut until the measured one is close to the limit, and then the uniform widths that take fewer bits.
    """
    tried = _allocated(config, costs, limit, noise_of, start)
    best = _best(tried, limit)
    for bits in range(WIDTHS, 0, -1):
        uniform = policies.evaluate(costs, dict.fromkeys(costs.names, bits))
        if uniform is None or not uniform.average_bits < best.allocation.average_bits or best.noise > limit:
            continue
        found = Found(uniform, noise_of(uniform), uniform=True)
        if not found.noise <= limit:
            break
        best = found
    return best


def _allocated(
    config: Config, costs: Costs, limit: float, noise_of: Callable[[Allocation], float], start: float
) -> list[Found]:
    tried: list[Found] = []
    budget, kept, broke = start, 0.0, math.inf
    while len(tried) < _TRIES:
        allocation = policies.allocate(config, costs, budget)
        if any(np.array_equal(allocation.bits, other.allocation.bits) for other in tried):
            break
        found = Found(allocation, noise_of(allocation))
        tried.append(found)
        if found.noise <= limit:
            kept = budget
            if found.noise > _CLOSE * limit:
                break
        else:
            broke = budget = min(budget, allocation.variance)  # what is allocated may stay far below
        change = limit / found.noise if found.noise > 0.0 else _LARGEST_CHANGE
        budget *= min(_LARGEST_CHANGE, max(1.0 / _LARGEST_CHANGE, change))
        if not kept < budget < broke:
            budget = math.sqrt(kept * broke)
    return tried


def _best(tried: list[Found], limit: float) -> Found:
    keeping = [found for found in tried if found.noise <= limit]
    if keeping:
        return min(keeping, key=lambda found: found.allocation.average_bits)
    return min(tried, key=lambda found: found.noise)
