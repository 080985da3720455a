"""Policy gact: least variance of the gradient within a budget, by each tensor's sensitivity (Liu et al., ICML 2022).

The budget is an average of bits, or the bytes that a rank may keep for backward.

[Note: bits of what is derived] What is made again from a tensor (Config.derive) carries the rounding of that tensor, so
the error moves the gradient twice, and the two do not add up as independent ones do but to at most twice as much (by
the inequality of Cauchy and Schwarz). Half a bit more for the tensor makes up for that. For several that are made of
one, for widths that are whole numbers, and for what is not linear, a bit of each derived element goes to the tensors
that are stored: then a job has no more error than where it stores all of them at the same bits, and takes fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..config import Config
from .allocation import EXACT, WIDTHS, Allocation, minimum_variance, minimum_variance_in_bytes
from .base import Choice, Costs, Policy, StepBytes, Trial, evaluate
from .plan import Plan

_UNKNOWN_BITS = 4  # until the bytes of a step are known
_BITS_OF_DERIVED = 1.0  # an element that is made again leaves so many of its bits to those that are stored
_ROUNDING = 1.0 + 1e-12  # a plan that fits exactly is not refused for the rounding of a sum


class Gact(Policy):
    """Least variance within Config.bits on average."""

    adapts = True

    def choose(self, costs: Costs, current: Plan, trial: Trial) -> Choice:
        """See Policy.choose."""
        fresh = self.allocate(costs)
        settled = self.settled(costs, current, fresh)
        allocation = fresh if settled is None else settled
        return Choice(
            costs.bits(allocation),
            self._default(costs, allocation, current),
            allocation.variance,
            self._average_bits(costs, allocation),
            kept=settled is not None,
        )

    def allocate(self, costs: Costs) -> Allocation:
        """Bits for every tensor within the budget. Raises ValueError when that cannot be reached."""
        return minimum_variance(
            costs.variance, costs.sizes, average_bits=self._budget_bits(costs), exact_bits=costs.exact_bits
        )

    def settled(self, costs: Costs, current: Plan, fresh: Allocation) -> Allocation | None:
        """The current bits, if they keep to the budget and fresh ones gain no more than adapt_tolerance; or None."""
        kept, new = evaluate(costs, current.bits), evaluate(costs, costs.bits(fresh))
        if kept is None or new is None or not self._fits(costs, kept):
            return None
        return kept if kept.variance < new.variance * (1.0 + self.config.adapt_tolerance) else None

    def _fits(self, costs: Costs, allocation: Allocation) -> bool:
        return self._average_bits(costs, allocation) <= self._budget_bits(costs) * _ROUNDING

    def _budget_bits(self, costs: Costs) -> float:
        """Of a stored element, on average. See [Note: bits of what is derived]."""
        stored = costs.sizes.sum()
        return (self.config.bits or 0.0) + (_BITS_OF_DERIVED * costs.derived_size / stored if stored else 0.0)

    def _average_bits(self, costs: Costs, allocation: Allocation) -> float:
        """As the budget counts them: without scales and offsets."""
        payload = np.where(allocation.bits == EXACT, costs.exact_bits, allocation.bits)
        return float(np.average(payload, weights=costs.sizes))

    def _default(self, costs: Costs, allocation: Allocation, current: Plan) -> int | None:
        return current.default


def plan_of_equals(bits: float, sizes: Mapping[str, int], derived_size: int) -> Plan:
    """What policy gact chooses at so many bits where all elements that are stored move the gradient alike.

    sizes: elements of what is stored, by name. derived_size: elements of what is made of it.
    """
    numel = np.array([*sizes.values()], dtype=np.float64)
    costs = Costs(
        tuple(sizes),
        variance=np.outer(numel, 1.0 / (2.0 ** np.arange(1, WIDTHS + 1) - 1.0) ** 2),
        sizes=numel,
        exact_bits=np.full(len(numel), 32.0),
        metadata_bits=np.zeros(len(numel)),
        derived_size=derived_size,
    )
    return Plan(costs.bits(Gact(Config(bits=bits)).allocate(costs)), default=math.ceil(bits))


class GactInBytes(Gact):
    """Least variance within Config.retained_bytes, everything that a rank keeps counted."""

    needs_step_bytes = True

    @property
    def first_plan(self) -> Plan:
        """See Policy.first_plan."""
        return Plan(default=_UNKNOWN_BITS)

    def first_plan_in(self, step: StepBytes) -> Plan:
        """The largest uniform width that fits; everything exactly if that does."""
        if self.fits_exactly(step):
            return Plan(default=None)
        return Plan(default=step.largest_uniform_bits(self._budget_bytes))

    def fits_exactly(self, step: StepBytes) -> bool:
        """See Policy.fits_exactly."""
        return step.exact_bytes <= self._budget_bytes

    def allocate(self, costs: Costs) -> Allocation:
        """See Gact.allocate."""
        retained_bytes = _retained_bytes(costs)
        narrowest = np.where(np.isfinite(costs.variance), retained_bytes[:, :WIDTHS], np.inf).min(
            axis=1, initial=np.inf
        )
        smallest = costs.other_bytes + np.minimum(narrowest, retained_bytes[:, WIDTHS]).sum()
        if smallest > self._budget_bytes:
            raise ValueError(
                f"retained_bytes is {self._budget_bytes}, but a step keeps at least {math.ceil(smallest)} bytes on a "
                f"rank ({math.ceil(costs.other_bytes)} of them in masks, statistics and what else is stored exactly); "
                "give at least that, or a smaller batch"
            )
        return minimum_variance_in_bytes(
            costs.variance, costs.sizes, retained_bytes, budget_bytes=self._budget_bytes - costs.other_bytes
        )

    @property
    def _budget_bytes(self) -> int:
        return self.config.retained_bytes or 0

    def _fits(self, costs: Costs, allocation: Allocation) -> bool:
        total_bytes = costs.other_bytes + allocation.average_bits * costs.sizes.sum() / 8.0
        return bool(total_bytes <= self._budget_bytes * _ROUNDING)

    def _average_bits(self, costs: Costs, allocation: Allocation) -> float:
        """With scales and offsets, as the budget counts them."""
        return allocation.average_bits

    def _default(self, costs: Costs, allocation: Allocation, current: Plan) -> int:
        """Tensors with new names are stored at the average width."""
        widths = np.where(allocation.bits == EXACT, WIDTHS, allocation.bits)
        return math.floor(np.average(widths, weights=costs.sizes))


def with_bytes(costs: Costs, step: StepBytes) -> Costs:
    """The costs of the tensors of a step, with their bytes.

    A tensor whose bytes are known but whose variance was not measured gets the variance of average elements; one that
    was measured but whose bytes are not known (it was saved for the probe batch alone) gets bytes by its size.
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


def _retained_bytes(costs: Costs) -> NDArray[np.float64]:
    if costs.retained_bytes is None:
        raise ValueError("costs have no retained_bytes, expected what with_bytes() returns")
    return costs.retained_bytes
