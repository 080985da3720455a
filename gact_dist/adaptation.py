"""One adaptation: what every rank measured, reduced, becomes one plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import policies, sync
from .config import Config
from .policies import Costs
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


def plan_from(measured: Sequence[Sensitivity], fraction: float, config: Config, groups: Sequence[Any]) -> Adaptation:
    """Reduce the measurements of all ranks and allocate bits from the reduced numbers alone.

    fraction: of the batch that was measured. groups: to average over, one after the other. Collectives: those of
    sync.reduce_statistics in each.
    """
    costs, invalid = _reduced(measured, fraction, groups)
    if not costs.names:
        return Adaptation({}, {}, 0.0, 0.0, invalid)
    allocation = policies.allocate(config, costs)
    plan: dict[str, int | None] = {n: int(b) or None for n, b in zip(costs.names, allocation.bits, strict=True)}
    sensitivity = {name: float(curve[-1]) * 255.0**2 for name, curve in zip(costs.names, costs.variance, strict=True)}
    return Adaptation(plan, sensitivity, allocation.variance, allocation.average_bits, invalid)


def _reduced(measured: Sequence[Sensitivity], fraction: float, groups: Sequence[Any]) -> tuple[Costs, dict[str, int]]:
    """The mean over ranks, of the tensors that have one; and how many ranks were left out of it, by name.

    A mean loss over n of N samples has N/n times the variance of the whole batch, and n/N of its elements.
    """
    values = torch.zeros(len(measured), 10, dtype=torch.float64)
    for row, item in zip(values, measured, strict=True):
        row[0], row[1] = item.numel / fraction, item.itemsize_bits
        row[2:] = item.variance * fraction
    statistics = sync.reduce_over([item.name for item in measured], values, groups)
    valid = statistics.valid_ranks > 0
    names = tuple(name for name, usable in zip(statistics.names, valid.tolist(), strict=True) if usable)
    mean = statistics.mean[valid].numpy()
    return Costs(names, mean[:, 2:], mean[:, 0], mean[:, 1]), dict(statistics.invalid)
