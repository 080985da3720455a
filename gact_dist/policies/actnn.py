"""Policy actnn: bits for each example of each tensor (Chen et al., ICML 2021, section 4), as a plan for all
ranks.

[Note: widths by rank] A plan is made before it is known which examples it will be used for. So it says what share of a
tensor's examples gets each width: a tuple with the widths of QUANTILES equal parts of them, in falling order. Which
examples get which width is decided when the tensor is packed, on the device: they are ranked by a key, ActNN's estimate
of the effect of rounding them (squared ranges of their groups times the size of their gradient). The size of the
payload follows from the plan, and nothing waits; ActNN solves for the widths at this point, on the host.

[Note: shares] The variance that a tensor's examples add to the gradient is split between the quantiles by the keys of
the examples in the probe batch. Keys are estimates (of the gradient they know only what the last visit showed, or
nothing), and bits that are chosen from noise are wasted. So several splits, by powers of the keys and mixed with equal
shares, are compared with the measured variance of each example. The split whose widths would have cost least, over all
tensors and ranks, is used. On the image model, with gradient sizes from an epoch ago, the keys alone would have cost up
to twice as much as equal widths, and the best split 0.08 to 0.9 times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .allocation import WIDTHS
from .base import Choice, Costs, Trial
from .gact import Gact
from .plan import Bits, Plan, one_width

QUANTILES = 8
_EXPONENTS = (1.0, 0.75, 0.5, 0.25)
# (number of the exponent, part that is not shared equally); without a measurement the second, ActNN's own, is used
_SPLITS = ((0, 0.0), *((number, part) for number in range(len(_EXPONENTS)) for part in (1.0, 0.9, 0.75)))
_ACTNN = 1
COLUMNS = len(_EXPONENTS) * QUANTILES + len(_SPLITS)


class Actnn(Gact):
    """Least variance within Config.bits on average, over shares of the examples of each tensor."""

    example_columns = COLUMNS

    def choose(self, costs: Costs, current: Plan, trial: Trial) -> Choice:
        """See Policy.choose."""
        split = ExampleCosts.build(costs)
        rows = Plan(split.expanded(current.bits), current.default)
        choice = super().choose(split.costs, rows, trial)
        return replace(choice, bits=split.folded(choice.bits))

    def restored_plan(self, plan: Plan) -> Plan:
        """See Policy.restored_plan."""
        return plan


@cache
def counts_of(widths: tuple[int, ...], units: int) -> tuple[int, ...]:
    """How many of `units` have each width 0 .. 8 where equal shares of them have `widths`; never more bits than these.

    Where a share is not a whole number of units, the units between two shares get widths between theirs.
    """
    counts, stored = [0] * (WIDTHS + 1), 0
    for rank in range(1, units + 1):
        whole, part = divmod(rank * len(widths), units)
        allowed = sum(widths[:whole]) * units + (widths[whole] * part if part else 0)  # in parts of 1 / len(widths)
        width = min(allowed // len(widths) - stored, WIDTHS)
        counts[width] += 1
        stored += width
    return tuple(counts)


def statistics(keys: ArrayLike, variance: ArrayLike | None, average_bits: float) -> NDArray[np.float64]:
    """What the ranks average about one tensor's examples: float64 [COLUMNS].

    keys: [S] by which the examples are ranked. variance: [S] that rounding each adds to the gradient, None where it is
    not known. The result is the shares that equal parts of the examples have, largest first, of the sums of several
    powers of the keys; then what the variance becomes with the widths of each split, relative to equal widths (0 where
    it is not known).
    """
    powers = np.stack([_shares_of(_shares_of(keys) ** exponent) for exponent in _EXPONENTS])
    examples = powers.shape[1]
    cumulative = np.cumsum(np.sort(powers, axis=1)[:, ::-1], axis=1)
    places = np.linspace(0.0, examples, QUANTILES + 1)
    quantiles = [np.diff(np.interp(places, np.arange(examples + 1.0), [0.0, *row])) for row in cumulative]
    costs = np.zeros(len(_SPLITS))
    if variance is not None:
        splits = np.stack([part * powers[number] + (1.0 - part) / examples for number, part in _SPLITS])
        widths = _fractional_widths(splits, average_bits)
        costs = (2.0**widths - 1.0) ** -2 @ _shares_of(variance) * (2.0**average_bits - 1.0) ** 2
    return np.concatenate([*quantiles, costs])


def _fractional_widths(shares: NDArray[np.float64], average_bits: float) -> NDArray[np.float64]:
    """[K, S]: widths from 1 to 8 with the least variance where the examples have these shares of it, K times."""
    wanted = 0.5 * np.log2(np.maximum(shares, 1e-12))  # one bit more for four times the variance
    low, high = np.full((len(shares), 1), -8.0), np.full((len(shares), 1), 40.0)
    for _ in range(24):
        middle = 0.5 * (low + high)
        above = np.clip(wanted + middle, 1.0, WIDTHS).mean(axis=1, keepdims=True) > average_bits
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.clip(wanted + low, 1.0, WIDTHS)


def _shares_of(values: ArrayLike) -> NDArray[np.float64]:
    """[S] that sum to one; equal ones where the values have no finite sum."""
    array = np.asarray(values, dtype=np.float64)
    total = array.sum()
    return array / total if np.isfinite(total) and total > 0.0 else np.full(len(array), 1.0 / len(array))


@dataclass(frozen=True, eq=False)
class ExampleCosts:
    """Costs with a row for each quantile of the examples of a tensor, for those that are made of examples."""

    costs: Costs
    rows: dict[str, tuple[str, ...]]
    """{name of a tensor: names of its rows}"""
    split: tuple[float, float]
    """exponent of the keys and the part of the variance that follows it; see [Note: shares]"""

    @staticmethod
    def build(costs: Costs) -> ExampleCosts:
        """Split what was measured of whole tensors by costs.examples."""
        table = np.zeros((len(costs.names), COLUMNS)) if costs.examples is None else costs.examples
        costs_of_splits = table[:, -len(_SPLITS) :].sum(axis=0)
        number, part = _SPLITS[int(np.argmin(costs_of_splits)) if costs_of_splits.any() else _ACTNN]
        quantiles = table[:, number * QUANTILES : (number + 1) * QUANTILES]
        shares = part * quantiles + (1.0 - part) / QUANTILES
        # a tensor that is made of examples on some ranks only has one width
        many_rows = quantiles.sum(axis=1) > 1.0 - 1e-6
        repeats = np.where(many_rows, QUANTILES, 1)
        weights = np.concatenate([row if many else [1.0] for row, many in zip(shares, many_rows, strict=True)])
        rows = {
            name: tuple(f"{name} [{part}]" for part in range(QUANTILES)) if many else (name,)
            for name, many in zip(costs.names, many_rows, strict=True)
        }
        expanded = Costs(
            tuple(name for names in rows.values() for name in names),
            np.repeat(costs.variance, repeats, axis=0) * weights[:, None],
            np.repeat(costs.sizes / repeats, repeats),
            np.repeat(costs.exact_bits, repeats),
            np.repeat(costs.metadata_bits, repeats),
            derived_size=costs.derived_size,
        )
        return ExampleCosts(expanded, rows, (_EXPONENTS[number], part))

    def expanded(self, known: Mapping[str, Bits]) -> dict[str, int | None]:
        """Known bits for the rows; tensors that they lack, or has other shares for, are left out."""
        found: dict[str, int | None] = {}
        for name, rows in self.rows.items():
            bits = known.get(name)
            if name in known and not isinstance(bits, tuple):
                found.update(dict.fromkeys(rows, bits))
            elif isinstance(bits, tuple) and len(bits) == len(rows):
                found.update(zip(rows, bits, strict=True))
        return found

    def folded(self, of_rows: Mapping[str, Bits]) -> dict[str, Bits]:
        """The inverse: bits of tensors. A quantile that would be stored exactly among others is stored in 8 bits."""
        found: dict[str, Bits] = {}
        for name, rows in self.rows.items():
            bits = {of_rows[row] for row in rows}
            several = tuple(sorted((one_width(of_rows[row]) or WIDTHS for row in rows), reverse=True))
            found[name] = several if len(bits) > 1 else of_rows[rows[0]]
        return found
