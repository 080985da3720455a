"""What a configuration asks of an adaptation: which estimator, which budget, for which unit. No collective, no state.

| policy | sensitivities | budget | unit |
|---|---|---|---|
| gact (Liu et al., ICML 2022, section 4) | Config.estimator | average bits, or bytes of a rank | tensor |
| actnn (Chen et al., ICML 2021, section 4) | Config.estimator | average bits | share of a tensor's samples |
| acgc (Evans and Aamodt, NeurIPS 2021) | Config.estimator | increase of the gradient's second moment | tensor |
| uniform | none | the same bits for every tensor | job |
| exact, off | none | none | job |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..config import Config
from .allocation import EXACT, WIDTHS, Allocation, minimum_bits, minimum_variance, minimum_variance_in_bytes

_UNKNOWN_BITS = 4  # until a step was weighed
_CAUTIOUS_BITS = 8  # where an error was promised and nothing was measured


class Budget(Enum):
    """What an adaptation has to keep to."""

    AVERAGE_BITS = "average bits"  # least variance within an average over all elements
    RETAINED_BYTES = "retained bytes"  # least variance within the bytes that a rank keeps for backward
    GRADIENT_ERROR = "gradient error"  # fewest bits within a variance of the gradient
    NONE = "none"  # nothing is adapted


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices that a configuration stands for."""

    budget: Budget
    unmeasured_bits: int | None
    """width of a compressible tensor that is in no plan yet; None: stored exactly"""
    estimator: str = "none"
    """of sensitivities"""

    @property
    def adapts(self) -> bool:
        """Whether sensitivity is measured, and bits follow from it."""
        return self.budget is not Budget.NONE


@dataclass(frozen=True, eq=False)
class Costs:
    """What the ranks measured together of L tensors, the same numbers on every rank.

    variance: float64 [L, 8], added to the gradient of one rank's batch at 1 to 8 bits. sizes: [L] elements in a step of
    one rank. exact_bits: [L] bits an element when stored exactly. metadata_bits: [L] scale and offset, for an element.
    retained_bytes: [L, 9] the most that any rank keeps of it at 1 to 8 bits and exactly, other_bytes of all that has
    no choice; only where the budget is in bytes. samples: [L, COLUMNS] of per_sample.statistics, zeros for a tensor
    that is not made of samples; only with policy actnn.
    """

    names: tuple[str, ...]
    variance: NDArray[np.float64]
    sizes: NDArray[np.float64]
    exact_bits: NDArray[np.float64]
    metadata_bits: NDArray[np.float64]
    retained_bytes: NDArray[np.float64] | None = None
    other_bytes: float = 0.0
    samples: NDArray[np.float64] | None = None

    def plan(self, allocation: Allocation) -> dict[str, int | None]:
        """{name: bits} of an allocation, None for exact."""
        return {name: int(bits) or None for name, bits in zip(self.names, allocation.bits, strict=True)}


@dataclass(frozen=True, eq=False)
class StepBytes:
    """The most bytes that any rank keeps in the step to come: of each tensor [9], at 1 to 8 bits and exactly."""

    tensors: dict[str, NDArray[np.float64]]
    other_bytes: float
    """masks, statistics and all else that has no choice"""

    def largest_uniform_bits(self, config: Config) -> int:
        """The most bits at which every tensor fits the budget in bytes, 1 where none does."""
        totals = self.other_bytes + sum(self.tensors.values(), np.zeros(WIDTHS + 1))[:WIDTHS]
        fitting = np.flatnonzero(totals <= (config.retained_bytes or 0))
        return int(fitting[-1]) + 1 if len(fitting) else 1


def policy_of(config: Config) -> Policy:
    """The choices behind a configuration."""
    if config.policy == "acgc":
        return Policy(Budget.GRADIENT_ERROR, _CAUTIOUS_BITS, config.estimator)
    if config.retained_bytes is not None:
        return Policy(Budget.RETAINED_BYTES, _UNKNOWN_BITS, config.estimator)
    bits = None if config.bits is None else int(config.bits)
    if config.policy in ("gact", "actnn"):
        return Policy(Budget.AVERAGE_BITS, bits, config.estimator)
    return Policy(Budget.NONE, bits)


def allocate(config: Config, costs: Costs, variance_budget: float | None = None) -> Allocation:
    """Bits for every tensor within the configuration's budget. Raises ValueError when that cannot be reached.

    variance_budget: what compression may add to the gradient of one rank's batch, where the budget is an error.
    """
    if variance_budget is not None:
        return minimum_bits(
            costs.variance,
            costs.sizes,
            variance_budget=variance_budget,
            exact_bits=costs.exact_bits,
            metadata_bits=costs.metadata_bits,
        )
    if config.retained_bytes is not None and costs.retained_bytes is not None:
        return _within_bytes(config.retained_bytes, costs, costs.retained_bytes)
    if config.bits is None:
        raise ValueError(f"policy is {config.policy!r}, expected one that allocates bits")
    return minimum_variance(costs.variance, costs.sizes, average_bits=config.bits, exact_bits=costs.exact_bits)


def evaluate(costs: Costs, plan: Mapping[str, int | None]) -> Allocation | None:
    """What a plan amounts to under these costs, without a bound; None where it lacks a tensor of theirs."""
    if any(name not in plan for name in costs.names):
        return None
    bits = np.array([plan[name] or EXACT for name in costs.names], dtype=np.int64)
    rows, exact = np.arange(len(bits)), bits == EXACT
    variance = np.where(exact, 0.0, costs.variance[rows, bits - 1]).sum()
    widths = np.where(exact, costs.exact_bits, bits + costs.metadata_bits)
    if costs.retained_bytes is not None:
        widths = 8.0 * costs.retained_bytes[rows, np.where(exact, WIDTHS, bits - 1)] / np.maximum(costs.sizes, 1.0)
    return Allocation(bits, float(variance), float(np.average(widths, weights=costs.sizes)), 0.0)


def settled(config: Config, costs: Costs, plan: Mapping[str, int | None], fresh: Allocation) -> Allocation | None:
    """The plan in force, if it keeps to the budget and a fresh allocation gains no more than adapt_tolerance; or None.

    With policy acgc that it keeps to the budget is for the caller to know, from what was measured.
    """
    in_force = evaluate(costs, plan)
    new = evaluate(costs, costs.plan(fresh))
    if in_force is None or new is None:
        return None
    slack = 1.0 + config.adapt_tolerance
    if config.policy == "acgc":
        return in_force if in_force.average_bits < new.average_bits * slack else None
    if config.retained_bytes is not None:
        total_bytes = costs.other_bytes + in_force.average_bits * costs.sizes.sum() / 8.0
        fits = total_bytes <= config.retained_bytes * (1.0 + 1e-12)
    else:
        payload = np.where(in_force.bits == EXACT, costs.exact_bits, in_force.bits)
        fits = np.average(payload, weights=costs.sizes) <= (config.bits or 0.0) * (1.0 + 1e-12)
    return in_force if fits and in_force.variance < new.variance * slack else None


def with_bytes(costs: Costs, step: StepBytes) -> Costs:
    """The costs of the tensors of a step, with their bytes.

    Of a tensor that was weighed and not measured the variance is taken for that of the average element; of one that was
    measured and not weighed (it was on the slice alone) the bytes are its elements'.
    """
    unmeasured = [name for name in step.tensors if name not in set(costs.names)]
    # a further bit takes an eighth of a byte for each element
    elements = np.array([8.0 * (step.tensors[name][1] - step.tensors[name][0]) for name in unmeasured])
    average = np.where(np.isfinite(costs.variance), costs.variance, 0.0).sum(axis=0) / costs.sizes.sum()
    widths = np.arange(1.0, WIDTHS + 1) + costs.metadata_bits[:, None]
    by_size = np.column_stack([widths, costs.exact_bits]) * costs.sizes[:, None] / 8.0
    measured = [step.tensors.get(name, row) for name, row in zip(costs.names, by_size, strict=True)]
    return Costs(
        (*costs.names, *unmeasured),
        np.concatenate([costs.variance, np.outer(elements, average)]),
        np.concatenate([costs.sizes, elements]),
        np.concatenate([costs.exact_bits, np.full(len(unmeasured), 32.0)]),
        np.concatenate([costs.metadata_bits, np.zeros(len(unmeasured))]),
        np.stack([*measured, *(step.tensors[name] for name in unmeasured)]),
        step.other_bytes,
    )


def _within_bytes(budget_bytes: int, costs: Costs, retained_bytes: NDArray[np.float64]) -> Allocation:
    narrowest = np.where(np.isfinite(costs.variance), retained_bytes[:, :WIDTHS], np.inf).min(axis=1, initial=np.inf)
    smallest = costs.other_bytes + np.minimum(narrowest, retained_bytes[:, WIDTHS]).sum()
    if smallest > budget_bytes:
        raise ValueError(
            f"retained_bytes is {budget_bytes}, but a step keeps at least {math.ceil(smallest)} bytes on a rank "
            f"({math.ceil(costs.other_bytes)} of them in masks, statistics and what else is stored exactly); give at "
            "least that, or a smaller batch"
        )
    return minimum_variance_in_bytes(
        costs.variance, costs.sizes, retained_bytes, budget_bytes=budget_bytes - costs.other_bytes
    )
