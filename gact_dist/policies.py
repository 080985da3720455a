"""What a configuration asks of an adaptation: which estimator, which budget, for which unit. No collective, no state.

| policy | estimator | budget | unit |
|---|---|---|---|
| gact | measured sensitivities (GACT, Liu et al., ICML 2022, section 4) | average bits | tensor |
| uniform | none | the same bits for every tensor | job |
| exact, off | none | none | job |
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .allocation import Allocation, minimum_variance
from .config import Config


class Budget(Enum):
    """What an adaptation has to keep to."""

    AVERAGE_BITS = "average bits"  # least variance within an average over all elements
    NONE = "none"  # nothing is adapted


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices that a configuration stands for."""

    budget: Budget
    unmeasured_bits: int | None
    """width of a compressible tensor that is in no plan yet; None: stored exactly"""

    @property
    def adapts(self) -> bool:
        """Whether sensitivity is measured, and bits follow from it."""
        return self.budget is not Budget.NONE


@dataclass(frozen=True, eq=False)
class Costs:
    """What the ranks measured together of L tensors, the same numbers on every rank.

    variance: float64 [L, 8], added to the gradient of one rank's batch at 1 to 8 bits. sizes: [L] elements in a step of
    one rank. exact_bits: [L] bits an element when stored exactly.
    """

    names: tuple[str, ...]
    variance: NDArray[np.float64]
    sizes: NDArray[np.float64]
    exact_bits: NDArray[np.float64]


def policy_of(config: Config) -> Policy:
    """The choices behind a configuration."""
    bits = None if config.bits is None else int(config.bits)
    return Policy(Budget.AVERAGE_BITS if config.policy == "gact" else Budget.NONE, bits)


def allocate(config: Config, costs: Costs) -> Allocation:
    """Bits for every tensor within the configuration's budget. Raises ValueError when that cannot be reached."""
    if config.bits is None:
        raise ValueError(f"policy is {config.policy!r}, expected one that allocates bits")
    return minimum_variance(costs.variance, costs.sizes, average_bits=config.bits, exact_bits=costs.exact_bits)
