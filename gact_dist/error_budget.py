"""Policy acgc: the fewest bits whose increase of the gradient's second moment is tolerated. See gradient_error.py.

Sensitivities rank the plans; what a plan adds is measured, on the whole batch of an adaptation, before it is put in
force, for where a backward answers to rounding more than linearly they predict too little. Between adaptations samples
follow the promise ([Note: what must hold] in gradient_samples.py), and one that finds it broken brings an adaptation.

[Note: room to grow] A gradient that shrinks while bits stand still lets the increase grow under a plan. By how much it
did under the last plans, the mean over a plan's steps over what was measured when it was made, is room that the next
plan leaves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import distributed, policies
from .hooks import Engine
from .policies import SAMPLES, WIDTHS, Allocation, Bits, Costs, Found, GradientSamples, fewest_bits, one_width
from .sensitivity import GradientError, Moments, ProbeBatch, rounded_moments

_log = logging.getLogger(__name__)
_OVERFLOW = 1e30  # what a variance that is not finite counts as: worse than any other, and its mean over ranks finite
_SAMPLE_PASSES = 2
_MOST_GROWTH = 4.0  # for which room is left: a bit of every tensor
_SURER = 0.45  # of the standard error that a plan was made with: one sample's falls to it with the third to fifth
_GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an adaptation under a tolerated error comes to; the same on every rank."""

    allocation: Allocation
    error: GradientError
    kept: bool
    """whether it is the plan in force, since another would have gained too little"""


class ErrorBudget:
    """What is known of one model's gradient, and the promise about it."""

    def __init__(self, model: nn.Module, engine: Engine, groups: Sequence[Any], draws: int) -> None:
        """groups: to reduce over, one after the other. draws: of rounding, in one measurement on this rank."""
        self._model, self._engine, self._groups = model, engine, groups
        self._passes = draws + 1
        self._config = engine.config
        self._tolerated = engine.config.error or 0.0
        self._samples = GradientSamples()
        self._promised = False
        self._standard_error = 0.0
        self._planned = 0.0  # the increase that was measured when the plan in force was made
        self._growth = 1.0  # see [Note: room to grow]
        self._sampled_at = 0

    @property
    def due(self) -> bool:
        """Whether the samples since the plan was made ask for another, the same on all ranks: they say that it does not
        keep to the error, or they are so many more that it may take fewer bits."""
        broken = self._samples.increase > self._tolerated
        return self._promised and (broken or self._samples.standard_error <= _SURER * self._standard_error)

    def allocate(self, costs: Costs, sample: ProbeBatch, step: int) -> Outcome | None:
        """The fewest bits whose measured error is tolerated; None if nothing can be measured. A collective call."""
        self._sampled_at, self._promised = step, False
        samples = self._samples
        before, unit = self._measured(sample, None, step)
        square = before.square
        if before.noise >= square:  # too loud for the gradient itself to be seen
            square = self._measured(sample, dict.fromkeys(costs.names, WIDTHS), step)[0].square
        samples.add(square, before.noise, relative=sample.unit is not None)
        second_moment = samples.second_moment
        if math.isnan(before.noise):
            return None
        if not second_moment > 0.0:
            _log.warning("the gradient is zero or was not finite on any rank: the plan stays as it is")
            return None
        measured_before = samples.increase
        self._warn_of(measured_before)
        self._learn_growth(measured_before)
        # of the batches since the plan in force was made, compared with this one
        usual = samples.noise / before.noise if before.noise > 0.0 else 1.0
        self._standard_error = samples.standard_error
        limit = self._tolerated * second_moment / (1.0 + self._standard_error) / self._growth / usual

        def noise_of(plan: Allocation) -> float:
            measured = self._measured(sample, costs.plan(plan), step)[0].noise
            return math.inf if math.isnan(measured) else measured

        found = fewest_bits(self._config, costs, limit, noise_of, start=limit * unit)
        kept = self._settled(costs, found) if before.noise <= limit else None
        allocation = found.allocation if kept is None else kept
        samples.renew((found.noise if kept is None else before.noise) * usual)
        scale = usual / (unit * second_moment)
        error = GradientError(
            self._tolerated, allocation.variance * scale, samples.increase, measured_before, unit * second_moment
        )
        self._promised, self._planned = error.holds, error.measured
        _log.info("increase of the gradient's second moment: %s", error)
        if not error.holds:
            _log.warning(
                "compression increases the gradient's second moment by %.3g on the batch of this adaptation, and "
                "error=%g was promised: %.3g bits on average do not reach it",
                error.measured,
                self._tolerated,
                allocation.average_bits,
            )
        return Outcome(allocation, error, kept is not None)

    def sampling_due(self, step: int) -> bool:
        """Whether this step's gradient should be a sample: ten times an interval, more often in the first steps."""
        return step - self._sampled_at >= max(1, min(self._config.adapt_interval // SAMPLES, self._sampled_at))

    def sample(self, step: int, loss: Callable[[], Any], unit: float | None = None) -> None:
        """Take a sample from the batch of a step. loss, unit: as loss_of_whole in ProbeBatch. A collective call."""
        self._sampled_at = step
        moments, _ = self._agreed(lambda: self._moments(loss, None, step, _SAMPLE_PASSES), unit)
        self._samples.add(moments.square, moments.noise, relative=unit is not None)
        _log.info(
            "step %d: the gradient's second moment is increased by %.3g of error=%g, the mean since the plan was made",
            step,
            self._samples.increase,
            self._tolerated,
        )

    def state_dict(self) -> dict[str, Any]:
        """The samples, and what they need to go on."""
        return {
            "samples": self._samples.state_dict(),
            "sampled_at": self._sampled_at,
            "promised": self._promised,
            "standard_error": self._standard_error,
            "planned": self._planned,
            "growth": self._growth,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave."""
        self._samples.load_state_dict(state["samples"])
        self._sampled_at, self._promised = state["sampled_at"], state["promised"]
        self._standard_error = state["standard_error"]
        self._planned, self._growth = state["planned"], state["growth"]

    def _learn_growth(self, increase: float) -> None:
        """increase: the mean under the plan in force; it counts as much as all plans before."""
        if self._planned > 0.0 and increase > 0.0:
            seen = min(increase / self._planned, _MOST_GROWTH)
            self._growth = max(1.0, math.sqrt(self._growth * seen))

    def _settled(self, costs: Costs, found: Found) -> Allocation | None:
        """The plan in force where another would gain too little; never against a uniform width that takes less."""
        in_force = {name: one_width(bits) for name, bits in self._engine.plan.items()}
        settled = policies.settled(self._config, costs, in_force, found.allocation)
        if settled is None or (found.uniform and settled.average_bits > found.allocation.average_bits):
            return None
        return settled

    def _warn_of(self, measured: float) -> None:
        if self._engine.plan and not measured <= self._tolerated:
            _log.warning(
                "compression increased the gradient's second moment by %.3g (error=%g was promised); bits are raised",
                measured,
                self._tolerated,
            )

    def _measured(self, sample: ProbeBatch, plan: Mapping[str, int | None] | None, step: int) -> tuple[Moments, float]:
        """(moments relative to the sample's unit, the unit) under a plan for the measured tensors, None: in force."""
        whole = None if plan is None else {**self._engine.plan, **plan}
        return self._agreed(lambda: self._moments(sample.loss_of_whole, whole, step, self._passes), sample.unit)

    def _moments(self, forward: Callable[[], Any], plan: Mapping[str, Bits] | None, step: int, passes: int) -> Moments:
        return rounded_moments(self._engine, self._model, forward, plan, passes=passes, draw=step)

    def _agreed(self, measure: Callable[[], Moments], unit: float | None) -> tuple[Moments, float]:
        """(moments divided by the unit, the unit): means over the ranks that can tell; NaN where none can."""
        unit = 1.0 if unit is None else unit
        try:
            moments = measure()
            noise = moments.noise / unit if math.isfinite(moments.noise) else _OVERFLOW
            row = [noise, moments.square / unit, unit]
        except RuntimeError as error:
            _log.warning("the gradient's error could not be measured on this rank: %s", str(error).split("\n", 1)[0])
            row = [math.nan] * 3
        values = torch.tensor([row], dtype=torch.float64)
        noise, square, unit = distributed.reduce_over([_GRADIENT], values, self._groups).mean[0].tolist()
        return Moments(noise, square), unit
