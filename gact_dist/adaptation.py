"""One adaptation: what every rank measured, reduced, becomes one plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import sync
from .allocation import minimum_variance
from .sensitivity import Sensitivity


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The outcome of one adaptation, the same on every rank."""

    plan: dict[str, int | None]
    """bits of every tensor that was measured; None: stored exactly"""
    sensitivity: dict[str, float]
    """c_l of each: the variance it adds to the gradient is about c_l / (2^bits - 1)^2 (GACT, section 4)"""
    predicted_variance: float
    """variance that the plan adds to the gradient of one rank, summed over all parameters"""
    average_bits: float
    """bits for an element under the plan, weighted by size"""
    invalid: dict[str, int]
    """tensors whose measurement was NaN or inf, with the number of ranks that left it out"""


def plan_from(
    measured: Sequence[Sensitivity], fraction: float, average_bits: float, groups: Sequence[Any]
) -> Adaptation:
    """Reduce the measurements of all ranks and allocate bits from the reduced numbers alone.

    fraction: of the batch that was measured; a mean loss over n of N samples has N/n times the variance of the whole
    batch, and n/N of its elements. groups: to average over, one after the other. Collectives: those of
    sync.reduce_statistics in each.
    """
    values = torch.zeros(len(measured), 10, dtype=torch.float64)
    for row, item in zip(values, measured, strict=True):
        row[0], row[1] = item.numel / fraction, item.itemsize_bits
        row[2:] = item.variance * fraction
    statistics = sync.reduce_over([item.name for item in measured], values, groups)
    valid = statistics.valid_ranks > 0
    names = [name for name, usable in zip(statistics.names, valid.tolist(), strict=True) if usable]
    mean = statistics.mean[valid].numpy()
    sizes, exact_bits, costs = mean[:, 0], mean[:, 1], mean[:, 2:]
    if not names:
        return Adaptation({}, {}, 0.0, average_bits, dict(statistics.invalid))
    allocation = minimum_variance(costs, sizes, average_bits=average_bits, exact_bits=exact_bits)
    plan: dict[str, int | None] = {n: int(b) or None for n, b in zip(names, allocation.bits, strict=True)}
    sensitivity = {name: float(curve[-1]) * 255.0**2 for name, curve in zip(names, costs, strict=True)}
    return Adaptation(plan, sensitivity, allocation.variance, allocation.average_bits, dict(statistics.invalid))
