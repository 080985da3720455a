"""What a policy is: the estimator, the budget and the unit of widths that a configuration selects.

| policy | file | sensitivities | budget | unit |
|---|---|---|---|---|
| gact (Liu et al., ICML 2022) | gact.py | Config.estimator | average bits, or bytes of a rank | tensor |
| actnn (Chen et al., ICML 2021) | actnn.py | Config.estimator | average bits | share of a tensor's examples |
| acgc (Evans and Aamodt, NeurIPS 2021) | acgc.py | Config.estimator | the gradient's second moment | tensor |
| uniform, exact, off | fixed.py | none | none | job |

A policy decides from numbers that all ranks share, so that it decides the same on every rank; it calls no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..config import Config
from .allocation import EXACT, WIDTHS, Allocation
from .plan import Bits, Plan


@dataclass(frozen=True, eq=False)
class Costs:
    """What the ranks together measured about L tensors, the same numbers on every rank.

    variance: float64 [L, 8], added to the gradient of one rank's batch at 1 to 8 bits. sizes: [L] elements in a step of
    one rank. exact_bits: [L] bits an element when stored exactly. metadata_bits: [L] scale and offset, for an element.
    retained_bytes: [L, 9] the most that any rank keeps of it at 1 to 8 bits and exactly, other_bytes of all that has
    no choice; only where the budget is in bytes. examples: [L, Policy.example_columns] of actnn.statistics, zeros for a
    tensor that is not made of examples; only with policy actnn. derived_size: elements that a step of one rank does not
    store, because it makes them again from these tensors.
    """

    names: tuple[str, ...]
    variance: NDArray[np.float64]
    sizes: NDArray[np.float64]
    exact_bits: NDArray[np.float64]
    metadata_bits: NDArray[np.float64]
    retained_bytes: NDArray[np.float64] | None = None
    other_bytes: float = 0.0
    examples: NDArray[np.float64] | None = None
    derived_size: float = 0.0

    def bits(self, allocation: Allocation) -> dict[str, int | None]:
        """{name: bits} of an allocation, None for exact."""
        return {name: int(bits) or None for name, bits in zip(self.names, allocation.bits, strict=True)}


@dataclass(frozen=True, eq=False)
class StepBytes:
    """The most bytes that any rank will keep in the next step: of each tensor [9], at 1 to 8 bits and exactly."""

    tensors: dict[str, NDArray[np.float64]]
    other_bytes: float
    """masks, statistics and all else that has no choice"""

    @property
    def exact_bytes(self) -> float:
        """Of a step that stores everything exactly."""
        return self.other_bytes + sum(float(row[-1]) for row in self.tensors.values())

    def largest_uniform_bits(self, budget_bytes: int) -> int:
        """The most bits at which every tensor fits the budget, 1 where none does."""
        totals = self.other_bytes + sum(self.tensors.values(), np.zeros(WIDTHS + 1))[:WIDTHS]
        fitting = np.flatnonzero(totals <= budget_bytes)
        return int(fitting[-1]) + 1 if len(fitting) else 1


@dataclass(frozen=True, slots=True)
class Moments:
    """Unbiased estimates from several roundings of one gradient."""

    noise: float
    """variance that rounding adds, summed over all parameters"""
    square: float
    """squared norm of the exact gradient; can be negative where noise is larger"""


@dataclass(frozen=True, slots=True)
class GradientError:
    """Increase of the gradient's second moment through compression, relative to V^2; the same on every rank."""

    tolerated: float
    """e^2, the configuration's error"""
    predicted: float
    """under the plan, from the sensitivities"""
    measured: float
    """under the plan: the variance of differently rounded gradients of the adaptation's batch, over V^2; scaled by what
    rounding added to the draws before, relative to this batch"""
    measured_before: float
    """under the plan before the adaptation: the mean of the draws since it was made"""
    second_moment: float
    """V^2 of one rank's batch, in the square of the loss's units"""

    @property
    def holds(self) -> bool:
        """Whether the measured increase is within the tolerated one."""
        return self.measured <= self.tolerated


@dataclass(frozen=True)
class Trial:
    """Measures what a plan really adds to the gradient, before it is used."""

    measure: Callable[[Mapping[str, Bits] | None], tuple[Moments, float]]
    """(moments relative to a unit, the unit), means over the ranks, with these bits for some tensors and the current
    plan for the others; None: the current plan for all. NaN where no rank can tell. A collective call."""
    step: int
    relative: bool
    """whether the unit is the squared gradient at the model's outputs, and not 1"""


@dataclass(frozen=True, slots=True)
class Choice:
    """What an adaptation decides; the same on every rank."""

    bits: Mapping[str, Bits]
    """of every tensor that was measured"""
    default: int | None
    """of tensors whose names are new"""
    variance: float
    """that the plan adds to the gradient of one rank, as predicted"""
    average_bits: float
    error: GradientError | None = None
    """with policy acgc"""
    kept: bool = False
    """whether these are the current bits, since others would have gained too little"""


class Policy:
    """One published policy. A subclass overrides what is different about it."""

    compresses: ClassVar[bool] = True
    """false: the job is left alone"""
    rounds: ClassVar[bool] = True
    """false: every tensor is stored exactly"""
    adapts: ClassVar[bool] = False
    """whether sensitivity is measured, and bits follow from it"""
    example_columns: ClassVar[int] = 0
    """numbers about a tensor's examples that ranks average; 0 where all examples of a tensor have the same bits"""
    needs_step_bytes: ClassVar[bool] = False
    """whether an adaptation has to know the bytes of a step"""
    follows_gradient: ClassVar[bool] = False
    """whether the gradient is looked at between adaptations"""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.error_bounded = False
        """whether each group of a tensor is as wide as an error bound requires, on a CPU"""

    @property
    def first_plan(self) -> Plan:
        """Before anything was measured: the default alone."""
        return Plan(default=None if self.config.bits is None else int(self.config.bits))

    def first_plan_in(self, step: StepBytes) -> Plan:
        """The same where the bytes of a step are known."""
        return self.first_plan

    def fits_exactly(self, step: StepBytes) -> bool:
        """Whether a step that stores everything exactly keeps to the budget."""
        return False

    def choose(self, costs: Costs, current: Plan, trial: Trial) -> Choice | None:
        """Bits for every tensor within the budget; None where nothing can be said.

        Raises ValueError when the budget cannot be reached.
        """
        raise ValueError(f"policy is {self.config.policy!r}, expected one that allocates bits")

    def restored_plan(self, plan: Plan) -> Plan:
        """A plan from a state, in a form that this policy can go on with."""
        return plan.in_one_width()

    # -- of policies that follow the gradient -------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether what was seen of the gradient calls for an adaptation; the same on all ranks."""
        return False

    def drawing_due(self, step: int) -> bool:
        """Whether this step's gradient should be looked at."""
        return False

    def add_draw(self, trial: Trial) -> None:
        """Look at the gradient of a step. A collective call."""

    def state_dict(self) -> dict[str, Any] | None:
        """What it has learnt of the gradient, in plain values."""
        return None

    def parse_state(self, state: Any) -> Any:
        """What load_state() takes, from what state_dict() gave. Raises StateError and changes nothing."""
        return None

    def load_state(self, parsed: Any) -> None:
        """Go on with what parse_state() returned."""


def evaluate(costs: Costs, bits: Mapping[str, Bits]) -> Allocation | None:
    """What some bits amount to under these costs, without a lower bound; None if a tensor of the costs has no bits."""
    if any(name not in bits for name in costs.names):
        return None
    chosen = np.array([bits[name] or EXACT for name in costs.names], dtype=np.int64)
    rows, exact = np.arange(len(chosen)), chosen == EXACT
    variance = np.where(exact, 0.0, costs.variance[rows, chosen - 1]).sum()
    widths = np.where(exact, costs.exact_bits, chosen + costs.metadata_bits)
    if costs.retained_bytes is not None:
        widths = 8.0 * costs.retained_bytes[rows, np.where(exact, WIDTHS, chosen - 1)] / np.maximum(costs.sizes, 1.0)
    return Allocation(chosen, float(variance), float(np.average(widths, weights=costs.sizes)), 0.0)
