"""Policy acgc: the fewest bits whose increase of the gradient's second moment is tolerated. See gradient_error.py.

Where a backward answers to rounding more than linearly the sensitivities predict too little. So an allocation is
measured before it is put in force, and as long as it does too much it is allocated a smaller variance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import policies, sync
from .allocation import Allocation
from .engine import Engine
from .gradient_error import GradientError, GradientProbe, SecondMoment, SquaredGradient, second_moment_of_batch
from .per_sample import one_width
from .policies import Costs
from .samples import Sample

_log = logging.getLogger(__name__)
# Parts of a tolerated error that are planned for, and accepted when they are measured on the samples of an adaptation:
# under one plan the increase differs by tens of percent over batches.
_PLANNED, _ACCEPTED = 0.7, 0.85
_TRIES = 8
# A quarter of the variance is one bit more: where a backward overflows at some width, the next one may well do.
_LARGEST_CUT = 0.25
_OVERFLOW = 1e30  # what a variance that is not finite counts as: worse than any other, and its mean over ranks finite
_GRADIENT = "gradient"


class ErrorBudget:
    """What is known of one model's gradient, and the promise about it."""

    def __init__(self, model: nn.Module, engine: Engine, groups: Sequence[Any], draws: int) -> None:
        """groups: to reduce over, one after the other. draws: of rounding, in one measurement on this rank."""
        self._model, self._engine, self._groups, self._draws = model, engine, groups, draws
        self._config = engine.config
        self._tolerated = engine.config.error or 0.0
        self._second_moment = SecondMoment()
        self._sampled_at = 0
        self._increase = 0.0
        self._gradient: SquaredGradient | None = None

    def allocate(self, costs: Costs, sample: Sample, step: int, seed: int) -> tuple[Allocation, GradientError] | None:
        """The fewest bits whose measured error is tolerated; None if nothing can be measured. A collective call.

        seed: of the rounding, another on every rank.
        """
        tolerated, fraction = self._tolerated, sample.fraction
        self._sampled_at = step
        probe = GradientProbe(self._engine, self._model, sample.loss, seed=seed, fraction=fraction)
        in_force = {name: one_width(self._engine.bits_of(name)) for name in costs.names}
        before, second_moment = self._agreed(lambda: self._error_of(in_force, probe, sample), 2)
        if not second_moment > 0.0:
            _log.warning("the gradient is zero or was not finite on any rank: the plan stays as it is")
            return None
        before /= second_moment
        if self._engine.plan and not before <= tolerated:
            _log.warning(
                "compression increased the gradient's second moment by %.3g (error=%g was promised); bits are raised",
                before,
                tolerated,
            )
        share = _PLANNED
        for _ in range(_TRIES):
            allocation = policies.allocate(self._config, costs, tolerated * second_moment * share)
            plan = costs.plan(allocation)
            (measured,) = self._agreed(partial(self._variance_of, plan, probe, fraction), 1)
            if math.isnan(measured):
                return None
            found = GradientError(
                tolerated, allocation.variance / second_moment, measured / second_moment, before, second_moment
            )
            _log.info("increase of the gradient's second moment: %s", found)
            self._increase = found.measured
            if not found.measured > _ACCEPTED * tolerated:
                return allocation, found
            share *= max(_PLANNED * tolerated / found.measured, _LARGEST_CUT)
        if not found.holds:
            _log.warning(
                "compression increases the gradient's second moment by %.3g on the samples of this adaptation, and "
                "error=%g was promised: %.3g bits on average do not reach it",
                found.measured,
                tolerated,
                allocation.average_bits,
            )
        return allocation, found

    def kept(self, settled: Allocation, error: GradientError) -> tuple[Allocation | None, GradientError]:
        """A plan in force and its error, if that is tolerated; else None and the error of the one that replaces it."""
        predicted = settled.variance / error.second_moment
        if not max(error.measured_before, predicted) <= _ACCEPTED * error.tolerated:
            return None, error
        self._increase = error.measured_before
        return settled, replace(error, predicted=predicted, measured=error.measured_before)

    def sampling_due(self, step: int) -> bool:
        """Whether this step's gradient should be a sample of V^2: ten times an interval."""
        return step - self._sampled_at >= max(1, self._config.adapt_interval // SecondMoment.SAMPLES)

    def sample(self, step: int, forward: Callable[[], Tensor]) -> None:
        """Take a sample of V^2 from the batch of a step. forward: returns its loss. All ranks must call it, or none:
        parameters that are sharded are gathered."""
        self._sampled_at = step
        try:
            self._sample_batch(forward)
        except RuntimeError as error:
            _log.warning("the gradient's second moment could not be measured here: %s", str(error).split("\n", 1)[0])

    def watch_gradient(self, step: int, outputs: Sequence[Tensor], observed: bool) -> None:
        """Make the job's next backward through these outputs a sample of V^2, if one is due or it is observed."""
        if observed or self.sampling_due(step):
            self._sampled_at, self._gradient = step, SquaredGradient(outputs)

    def before_forward(self) -> None:
        """Take what watch_gradient saw."""
        if self._gradient is not None:
            self._add_rounded(*self._gradient.moments())
            self._gradient = None

    def state_dict(self) -> dict[str, Any]:
        """The samples of V^2, and what they need to go on."""
        samples = self._second_moment.state_dict()
        return {"second_moment": samples, "sampled_at": self._sampled_at, "increase": self._increase}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave."""
        self._second_moment.load_state_dict(state["second_moment"])
        self._sampled_at, self._increase = state["sampled_at"], state["increase"]

    def _variance_of(self, bits: Mapping[str, int | None], probe: GradientProbe, fraction: float) -> list[float]:
        variance = probe.variance(bits, self._draws) * fraction
        return [variance if math.isfinite(variance) else _OVERFLOW]

    def _error_of(self, bits: Mapping[str, int | None], probe: GradientProbe, sample: Sample) -> list[float]:
        """[variance that rounding adds, V^2] of this rank's batch. See [Note: units] in gradient_error.py."""
        (variance,) = self._variance_of(bits, probe, sample.fraction)
        if sample.whole_is_loss and sample.fraction < 1.0:
            self._sample_batch(sample.whole)
        elif sample.whole_is_loss or self._second_moment.value is None:
            # of a slice of independent samples this is at most V^2
            self._second_moment.add(probe.second_moment() * sample.fraction)
        return [variance, self._second_moment.value or math.nan]

    def _sample_batch(self, forward: Callable[[], Any]) -> None:
        self._add_rounded(second_moment_of_batch(self._engine, self._model, forward))

    def _add_rounded(self, at_parameters: float, at_outputs: float = 1.0) -> None:
        """A sample of the rounded gradient, whose second moment is V^2 and what rounding adds."""
        self._second_moment.add(at_parameters / (1.0 + self._increase), at_outputs)

    def _agreed(self, values: Callable[[], list[float]], count: int) -> list[float]:
        """The mean over the ranks that can tell; NaN where none can."""
        try:
            mine = values()
        except RuntimeError as error:
            _log.warning("the gradient's error could not be measured on this rank: %s", str(error).split("\n", 1)[0])
            mine = [math.nan] * count
        return sync.reduce_over([_GRADIENT], torch.tensor([mine], dtype=torch.float64), self._groups).mean[0].tolist()
