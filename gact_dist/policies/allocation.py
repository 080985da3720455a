"""From sensitivities, sizes and a budget to bits: a multiple-choice knapsack over the saved tensors.

Each tensor takes one of nine options (1 to 8 bits, or exact). GACT (Liu et al., ICML 2022, the adaptive algorithm)
and ActNN (Chen et al., ICML 2021, mixed precision) minimise the gradient's variance within an average of bits;
AC-GC (Evans and Aamodt, NeurIPS 2021) minimises bits within a variance. Both are one problem with cost and weight
exchanged, solved in knapsack.py.

Nothing here is random or depends on the machine's state: equal inputs give equal bits on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .knapsack import ROUNDING, Floats, Integers, Problem, minimise

EXACT = 0
WIDTHS = 8


@dataclass(frozen=True)
class Allocation:
    """Bits of L tensors and what they amount to.

    bits: int64 [L], 1..8, or 0 for exact. variance: predicted, sum of the chosen costs. average_bits: bits an element,
    metadata included, weighted by size. lower_bound: Lagrangian bound on what was minimised (variance for
    ``minimum_variance``, average bits for ``minimum_bits``): no allocation can go below it.
    """

    bits: Integers
    variance: float
    average_bits: float
    lower_bound: float


def minimum_variance(
    costs: ArrayLike,
    sizes: ArrayLike,
    *,
    average_bits: float,
    exact_bits: ArrayLike,
    metadata_bits: ArrayLike = 0.0,
) -> Allocation:
    """Minimise sum_l costs[l, b_l - 1] subject to sum_l (b_l + metadata_l) sizes_l <= average_bits sum_l sizes_l.

    costs: [L, 8], variance that tensor l adds to the gradient at 1..8 bits; any shape of curve, non-negative,
    +inf where a width must not be used. Exact adds 0 and takes exact_bits[l] bits an element, without metadata.
    sizes: [L] elements. exact_bits, metadata_bits: bits an element, a number or [L].
    Raises ValueError for malformed input, and when average_bits is below the smallest that can be reached.
    """
    table = _Table.build(costs, sizes, exact_bits, metadata_bits)
    smallest = table.average(table.smallest())
    if not average_bits * ROUNDING >= smallest:
        raise ValueError(
            f"average_bits is {average_bits}, but these {len(table.sizes)} tensors need at least {smallest:.6g} bits "
            "an element; raise average_bits, or allow the narrow widths whose cost is inf"
        )
    problem = Problem.build(table.costs, table.weights, average_bits * table.sizes.sum() * ROUNDING)
    choice, bound = minimise(problem)
    return table.allocation(choice, bound)


def minimum_variance_in_bytes(
    costs: ArrayLike, sizes: ArrayLike, retained_bytes: ArrayLike, *, budget_bytes: float
) -> Allocation:
    """Minimise sum_l costs[l, b_l - 1] subject to sum_l retained_bytes[l, b_l - 1] <= budget_bytes.

    costs, sizes: as for ``minimum_variance``. retained_bytes: [L, 9], what tensor l takes at 1..8 bits and exactly,
    metadata included; any numbers of at least 0. lower_bound is of the variance.
    Raises ValueError for malformed input, and when even the narrowest allowed widths take more than budget_bytes.
    """
    table = _Table.of_bytes(costs, sizes, retained_bytes)
    smallest = table.smallest() / 8.0
    if not budget_bytes * ROUNDING >= smallest:
        raise ValueError(
            f"budget_bytes is {budget_bytes:.0f}, but these {len(table.sizes)} tensors take at least {smallest:.0f} "
            "bytes; raise budget_bytes, or allow the narrow widths whose cost is inf"
        )
    choice, bound = minimise(Problem.build(table.costs, table.weights, budget_bytes * 8.0 * ROUNDING))
    return table.allocation(choice, bound)


def minimum_bits(
    costs: ArrayLike,
    sizes: ArrayLike,
    *,
    variance_budget: float,
    exact_bits: ArrayLike,
    metadata_bits: ArrayLike = 0.0,
) -> Allocation:
    """The dual (AC-GC, Evans and Aamodt, NeurIPS 2021): fewest bits with sum_l costs[l, b_l - 1] <= variance_budget.

    Arguments and errors as for ``minimum_variance``; every budget from 0 up can be met, if only by storing exactly.
    """
    if not variance_budget >= 0:
        raise ValueError(f"variance_budget is {variance_budget}; expected a number of at least 0")
    table = _Table.build(costs, sizes, exact_bits, metadata_bits)
    allowed = np.isfinite(table.costs)
    total_bits = np.where(allowed, table.weights, np.inf)
    problem = Problem.build(total_bits, np.where(allowed, table.costs, 0.0), variance_budget * ROUNDING)
    choice, bound = minimise(problem)
    return table.allocation(choice, table.average(bound))


@dataclass(frozen=True)
class _Table:
    """The nine options of each tensor, [L, 9]: 1..8 bits, then exact. weights are bits in total."""

    costs: Floats
    weights: Floats
    sizes: Floats

    @staticmethod
    def build(costs: ArrayLike, sizes: ArrayLike, exact_bits: ArrayLike, metadata_bits: ArrayLike) -> _Table:
        curve, elements = _curves(costs, sizes)
        exact = np.broadcast_to(np.asarray(exact_bits, dtype=np.float64), elements.shape)
        metadata = np.broadcast_to(np.asarray(metadata_bits, dtype=np.float64), elements.shape)
        _check_not_negative("metadata_bits", metadata)
        if not (np.all(np.isfinite(elements)) and np.all(np.isfinite(exact)) and np.all(np.isfinite(metadata))):
            raise ValueError("sizes, exact_bits and metadata_bits must be finite; only costs may hold inf")
        width_bits = np.arange(1, WIDTHS + 1) + metadata[:, None]
        weights = np.column_stack([width_bits, exact]) * elements[:, None]
        return _Table(np.column_stack([curve, np.zeros_like(elements)]), weights, elements)

    @staticmethod
    def of_bytes(costs: ArrayLike, sizes: ArrayLike, retained_bytes: ArrayLike) -> _Table:
        curve, elements = _curves(costs, sizes)
        weights = np.asarray(retained_bytes, dtype=np.float64) * 8.0
        if weights.shape != (len(elements), WIDTHS + 1):
            raise ValueError(f"retained_bytes has shape {weights.shape}; expected [{len(elements)}, {WIDTHS + 1}]")
        _check_not_negative("retained_bytes", weights)
        return _Table(np.column_stack([curve, np.zeros_like(elements)]), weights, elements)

    def smallest(self) -> float:
        """Bits in total of the narrowest widths that are allowed."""
        return float(np.where(np.isfinite(self.costs), self.weights, np.inf).min(axis=1).sum())

    def average(self, total_bits: float) -> float:
        total = float(self.sizes.sum())
        return float(total_bits) / total if total else 0.0

    def allocation(self, choice: Integers, bound: float) -> Allocation:
        rows = np.arange(len(choice))
        bits = np.where(choice == WIDTHS, EXACT, choice + 1)
        variance = float(self.costs[rows, choice].sum())
        return Allocation(bits, variance, self.average(self.weights[rows, choice].sum()), bound)


def _curves(costs: ArrayLike, sizes: ArrayLike) -> tuple[Floats, Floats]:
    curve = np.asarray(costs, dtype=np.float64)
    elements = np.asarray(sizes, dtype=np.float64)
    if elements.ndim != 1 or curve.shape != (len(elements), WIDTHS):
        raise ValueError(
            f"costs has shape {curve.shape} and sizes {elements.shape}; expected [L, {WIDTHS}] (one column a "
            "width of 1..8 bits) and [L]"
        )
    _check_not_negative("costs", curve)
    _check_not_negative("sizes", elements)
    return curve, elements


def _check_not_negative(name: str, values: Floats) -> None:
    if not np.all(values >= 0):
        raise ValueError(f"{name} holds {values[~(values >= 0)][0]}; expected numbers of at least 0")
