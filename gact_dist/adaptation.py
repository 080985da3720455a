"""One adaptation: what every rank measured, reduced, becomes one plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import codec, policies, sync
from .allocation import EXACT, WIDTHS, Allocation
from .config import Config
from .engine import Engine
from .footprint import Footprint
from .gradient_error import GradientError, GradientProbe, SecondMoment, SquaredGradient, second_moment_of_batch
from .isolation import untouched
from .policies import Budget, Costs, StepBytes, policy_of
from .sensitivity import Sensitivity, measure

_log = logging.getLogger(__name__)
# Random directions to average over, on all ranks together: from one, a tensor's estimate has a relative standard
# deviation of 0.08 and more, and allocation favours those that came out too low.
_PROBES = 4
# Forwards after which what the engine learns of views and block inputs has settled.
_WEIGHINGS = 3
# Parts of a tolerated error that are planned for, and accepted when they are measured on the samples of an adaptation:
# under one plan the increase differs by tens of percent over batches.
_PLANNED, _ACCEPTED = 0.7, 0.85
_TRIES = 8
# A quarter of the variance is one bit more: where a backward overflows at some width, the next one may well do.
_LARGEST_CUT = 0.25
_OVERFLOW = 1e30  # what a variance that is not finite counts as: worse than any other, and its mean over ranks finite
_GRADIENT = "gradient"
_OTHER = ""  # the row of bytes that belong to no compressible tensor


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
    """bits for an element under the plan, weighted by size; with a budget in bytes all that is kept of it is counted"""
    invalid: dict[str, int]
    """tensors whose measurement was NaN or inf, with the number of ranks that left it out"""
    gradient_error: GradientError | None = None
    """what policy acgc promises and what came of it; None with other policies"""
    kept: bool = False
    """whether the plan in force was kept, since a fresh one would have gained too little (Config.adapt_tolerance)"""

    def to_dict(self, step: int) -> dict[str, Any]:
        """Plain values for a line of JSON."""
        tensors = {name: {"bits": bits, "sensitivity": self.sensitivity[name]} for name, bits in self.plan.items()}
        return {
            "step": step,
            "kept": self.kept,
            "average_bits": self.average_bits,
            "predicted_variance": self.predicted_variance,
            "gradient_error": None if self.gradient_error is None else asdict(self.gradient_error),
            "tensors": tensors,
        }


@dataclass(frozen=True)
class Sample:
    """The part of a batch to measure on."""

    loss: Callable[[], Tensor | None]
    """runs the model on it and returns the scalar loss, or calls backward on it"""
    fraction: float
    """of the batch's samples that it has"""
    whole: Callable[[], Any]
    """runs the model on the whole batch, as the step to come will"""
    whole_is_loss: bool
    """whether that returns the loss; else second moments come from the job's own backward"""


class Adapter:
    """Adapts the bits of one model. Everything that it decides follows from numbers reduced over the ranks."""

    def __init__(
        self, model: nn.Module, engine: Engine, config: Config, data_parallel: Sequence[Any], groups: Sequence[Any]
    ) -> None:
        """groups: data_parallel and those of tensor parallelism, to reduce over one after the other."""
        self._model, self.engine, self._config = model, engine, config
        self._policy = policy_of(config)
        self._rank = sync.rank(*data_parallel) if data_parallel else 0
        self._ranks = math.prod(sync.world_size(group) for group in data_parallel)
        self._groups = groups
        self._draws = max(1, _PROBES // self._ranks)
        self._heaviest_bytes = 0
        self._warned = False
        self._second_moment = SecondMoment()
        self._sampled_at = 0
        self._increase = 0.0
        self._gradient: SquaredGradient | None = None

    def adapt(self, sample: Sample, step: int) -> Adaptation:
        """Measure, reduce and allocate. A collective call.

        Raises ValueError when the loss is no scalar with a graph, and on every rank when the budget cannot be reached.
        """
        weighed = self._weigh(sample.whole) if self._policy.budget is Budget.RETAINED_BYTES else None
        if weighed is not None and not self.engine.plan:
            self.engine.unmeasured_bits = weighed.largest_uniform_bits(self._config)
        costs, invalid = self._reduced(self._measure(sample, step), sample.fraction)
        for name, ranks in invalid.items():
            _log.warning("sensitivity of %s was not finite on %d rank(s), which were left out", name, ranks)
        self._warned = False
        if not costs.names:
            return Adaptation({}, {}, 0.0, 0.0, invalid)
        error: GradientError | None = None
        if self._policy.budget is Budget.GRADIENT_ERROR:
            within = self._within_error(costs, sample, step)
            if within is None:
                return Adaptation({}, {}, 0.0, 0.0, invalid)
            allocation, error = within
        else:
            costs = costs if weighed is None else policies.with_bytes(costs, weighed)
            allocation = policies.allocate(self._config, costs)
        settled = policies.settled(self._config, costs, self.engine.plan, allocation)
        if settled is not None and error is not None:
            settled, error = self._settled_within(settled, error)
        if settled is not None:
            allocation = settled
        if weighed is not None:
            # a tensor that is new after this is stored like the average one
            widths = np.where(allocation.bits == EXACT, WIDTHS, allocation.bits)
            self.engine.unmeasured_bits = math.floor(np.average(widths, weights=costs.sizes))
        curves = zip(costs.names, costs.variance, strict=True)
        sensitivity = {name: float(curve[-1]) * 255.0**2 for name, curve in curves}
        plan = _plan(costs, allocation)
        return Adaptation(
            plan, sensitivity, allocation.variance, allocation.average_bits, invalid, error, kept=settled is not None
        )

    def start(self, forward: Callable[[], Any]) -> None:
        """Before the first step where nothing can be measured yet. A collective call with a budget in bytes.

        forward: runs the model as that step will; the largest uniform width at which it fits is used.
        """
        if self._policy.budget is Budget.RETAINED_BYTES:
            self.engine.unmeasured_bits = self._weigh(forward).largest_uniform_bits(self._config)

    def watch(self) -> None:
        """After a forward: remember the heaviest, and warn once an interval of one that exceeds a budget in bytes."""
        budget = self._config.retained_bytes
        if budget is None:
            return
        self._heaviest_bytes = max(self._heaviest_bytes, self.engine.exact_bytes)
        retained = sum(row.bytes for row in self.engine.rows)
        if retained > budget and not self._warned:
            self._warned = True
            _log.warning(
                "this step keeps %d bytes, more than retained_bytes=%d: its batch is larger than the one that the bits "
                "were chosen with, or saves new tensors; the next adaptation makes room, calibrate() does so at once",
                retained,
                budget,
            )

    def sampling_due(self, step: int) -> bool:
        """Whether this step's gradient should be a sample of V^2: ten times an interval, with policy acgc."""
        wanted = self._policy.budget is Budget.GRADIENT_ERROR
        return wanted and step - self._sampled_at >= max(1, self._config.adapt_interval // SecondMoment.SAMPLES)

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
        if self.sampling_due(step) or (observed and self._policy.budget is Budget.GRADIENT_ERROR):
            self._sampled_at, self._gradient = step, SquaredGradient(outputs)

    def before_forward(self) -> None:
        """Take what watch_gradient saw."""
        if self._gradient is not None:
            self._add_rounded(*self._gradient.moments())
            self._gradient = None

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt besides the plan."""
        return {
            "heaviest_bytes": self._heaviest_bytes,
            "second_moment": self._second_moment.state_dict(),
            "sampled_at": self._sampled_at,
            "increase": self._increase,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave."""
        self._heaviest_bytes = state.get("heaviest_bytes", 0)
        self._second_moment.load_state_dict(state.get("second_moment", []))
        self._sampled_at, self._increase = state.get("sampled_at", 0), state.get("increase", 0.0)

    # -- what this rank sees --------------------------------------------------------------------------------------

    def _measure(self, sample: Sample, step: int) -> list[Sensitivity]:
        options: dict[str, Any] = {"probes": self._draws, "estimator": self._policy.estimator}
        try:
            return measure(
                self.engine, self._model, sample.loss, seed=self._seed(step), fraction=sample.fraction, **options
            )
        except RuntimeError as error:
            # Out of memory, say: the job itself may well go on, with the plan it has. The rank still takes part in the
            # collectives that follow, with nothing to add, so that the others do not wait for it.
            # Its text alone: a handler that keeps its records would keep the failed forward's frames, and so its graph.
            _log.warning(
                "sensitivity could not be measured on this rank, its plan comes from the other ranks: %s",
                str(error).split("\n", 1)[0],
            )
            return []

    def _seed(self, step: int) -> int:
        return (self._config.seed * 1_000_003 + step) * 65_537 + self._rank

    def _footprint(self, forward: Callable[[], Any]) -> Footprint:
        """What a step of this rank keeps. See [Note: weighing] in footprint.py."""
        footprint = Footprint()
        try:
            for _ in range(_WEIGHINGS):
                known = self.engine.state_dict()
                with untouched(self._model), self.engine.rehearsal(all_bits=1) as footprint:
                    forward()
                if self.engine.state_dict() == known:
                    break
        except RuntimeError as error:
            _log.warning(
                "the bytes of a step could not be found on this rank, its plan comes from the other ranks: %s",
                str(error).split("\n", 1)[0],
            )
        return footprint

    # -- a tolerated error (AC-GC) ----------------------------------------------------------------------------------

    def _within_error(self, costs: Costs, sample: Sample, step: int) -> tuple[Allocation, GradientError] | None:
        """The fewest bits whose measured error is tolerated; None if nothing can be measured. See gradient_error.py.

        Where rounding does more than the sensitivities say, they are allocated a smaller variance until it is.
        """
        tolerated = self._config.error or 0.0
        seed, fraction = self._seed(step), sample.fraction
        self._sampled_at = step
        probe = GradientProbe(self.engine, self._model, sample.loss, seed=seed, fraction=fraction)
        in_force = {name: self.engine.bits_of(name) for name in costs.names}
        before, second_moment = self._agreed(lambda: self._error_of(in_force, probe, sample), 2)
        if not second_moment > 0.0:
            _log.warning("the gradient is zero or was not finite on any rank: the plan stays as it is")
            return None
        before /= second_moment
        if self.engine.plan and not before <= tolerated:
            _log.warning(
                "compression increased the gradient's second moment by %.3g (error=%g was promised); bits are raised",
                before,
                tolerated,
            )
        share = _PLANNED
        for _ in range(_TRIES):
            allocation = policies.allocate(self._config, costs, tolerated * second_moment * share)
            plan = _plan(costs, allocation)
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

    def _settled_within(self, settled: Allocation, error: GradientError) -> tuple[Allocation | None, GradientError]:
        """The plan in force and its error, if that is tolerated."""
        predicted = settled.variance / error.second_moment
        if not max(error.measured_before, predicted) <= _ACCEPTED * error.tolerated:
            return None, error
        self._increase = error.measured_before
        return settled, replace(error, predicted=predicted, measured=error.measured_before)

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
        self._add_rounded(second_moment_of_batch(self.engine, self._model, forward))

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

    # -- what all ranks know ----------------------------------------------------------------------------------------

    def _reduced(self, measured: Sequence[Sensitivity], fraction: float) -> tuple[Costs, dict[str, int]]:
        """The mean over ranks, of the tensors that have one; and how many ranks were left out of it, by name.

        A mean loss over n of N samples has N/n times the variance of the whole batch, and n/N of its elements.
        """
        values = torch.zeros(len(measured), 10, dtype=torch.float64)
        for row, item in zip(values, measured, strict=True):
            row[0], row[1] = item.numel / fraction, item.itemsize_bits
            row[2:] = item.variance * fraction
        statistics = sync.reduce_over([item.name for item in measured], values, self._groups)
        valid = statistics.valid_ranks > 0
        names = tuple(name for name, usable in zip(statistics.names, valid.tolist(), strict=True) if usable)
        mean = statistics.mean[valid].numpy()
        sizes, exact_bits, variance = mean[:, 0], mean[:, 1], mean[:, 2:]
        dtypes = [torch.bfloat16 if bits <= 16 else torch.float32 for bits in exact_bits]
        metadata_bits = np.array([codec.metadata_bits(self._config.group_size, dtype) for dtype in dtypes])
        return Costs(names, variance, sizes, exact_bits, metadata_bits), dict(statistics.invalid)

    def _weigh(self, forward: Callable[[], Any]) -> StepBytes:
        """The most bytes of each tensor on any rank, for the step to come."""
        footprint = self._footprint(forward)
        # a batch as heavy as the heaviest so far may come again
        growth = max(1.0, self._heaviest_bytes / footprint.exact_bytes) if footprint.exact_bytes else 1.0
        rows = [*footprint.tensors.values(), torch.full((9,), float(footprint.other_bytes), dtype=torch.float64)]
        names, table = sync.maximum_over([*footprint.tensors, _OTHER], torch.stack(rows) * growth, self._groups)
        tensors = dict(zip(names, table.numpy(), strict=True))
        other_bytes = float(tensors.pop(_OTHER)[0])
        return StepBytes(tensors, other_bytes)


def _plan(costs: Costs, allocation: Allocation) -> dict[str, int | None]:
    return {name: int(bits) or None for name, bits in zip(costs.names, allocation.bits, strict=True)}
