"""One adaptation: what every rank measured, reduced, becomes one plan."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from . import codec, distributed, policies
from .error_budget import ErrorBudget
from .hooks import Engine, Footprint, has_compiled_parts
from .policies import EXACT, WIDTHS, Bits, Budget, Costs, SampleCosts, StepBytes, policy_of
from .sensitivity import GradientError, ProbeBatch, Sensitivity, measure, untouched

_log = logging.getLogger(__name__)
# Random directions to average over, on all ranks together: from one, a tensor's estimate has a relative standard
# deviation of 0.08 and more, and allocation favours those that came out too low.
_PROBES = 4
# Forwards after which what the engine learns of views and block inputs has settled.
_WEIGHINGS = 3
# After which a job that gives none is told so.
_STEPS_WITHOUT_LOSS = 100
_HOW_TO_ADAPT = "give step(loss_fn, batch), call calibrate(), or use follow() in place of step()"
_OTHER = ""  # the row of bytes that belong to no compressible tensor
_OUT_OF_MEMORY = ""  # the row of a rank whose memory was too little to measure


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The outcome of one adaptation, the same on every rank."""

    plan: dict[str, Bits]
    """bits of every tensor that was measured; None: stored exactly; with policy actnn also the widths of equal shares
    of its samples"""
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
        tensors = {
            name: {"bits": list(bits) if isinstance(bits, tuple) else bits, "sensitivity": self.sensitivity[name]}
            for name, bits in self.plan.items()
        }
        return {
            "step": step,
            "kept": self.kept,
            "average_bits": self.average_bits,
            "predicted_variance": self.predicted_variance,
            "gradient_error": None if self.gradient_error is None else asdict(self.gradient_error),
            "tensors": tensors,
        }


class Adapter:
    """Adapts the bits of one model. Everything that it decides follows from numbers reduced over the ranks."""

    def __init__(self, model: nn.Module, engine: Engine, data_parallel: Sequence[Any], groups: Sequence[Any]) -> None:
        """groups: data_parallel and those of tensor parallelism, to reduce over one after the other."""
        self._model, self.engine, self._config = model, engine, engine.config
        self._policy = policy_of(engine.config)
        self._rank = distributed.rank(*data_parallel) if data_parallel else 0
        self._ranks = math.prod(distributed.world_size(group) for group in data_parallel)
        self._groups = groups
        self._draws = max(1, _PROBES // self._ranks)
        self._heaviest_bytes = 0
        self._warned = False
        self.most_samples = sys.maxsize
        """for which memory may be enough to measure"""
        self.error_budget: ErrorBudget | None = None
        """with policy acgc"""
        if self._policy.budget is Budget.GRADIENT_ERROR:
            self.error_budget = ErrorBudget(model, engine, groups, self._draws)

    def adapt(self, sample: ProbeBatch, step: int) -> Adaptation:
        """Measure, reduce and allocate. A collective call.

        Raises ValueError when the loss is no scalar with a graph, and on every rank when the budget cannot be reached.
        """
        if self._config.policy == "actnn":
            gradients = self.engine.packer.gradients
            sizes = distributed.mean_of_positive(gradients.sizes, self._groups)
            gradients.sizes = None if sizes is None else sizes.to(gradients.device)
        weighed = self._weigh(sample.whole) if self._policy.budget is Budget.RETAINED_BYTES else None
        if weighed is not None and not self.engine.plan:
            self.engine.unmeasured_bits = weighed.largest_uniform_bits(self._config)
        costs, invalid = self._measured(sample, step)
        for name, ranks in invalid.items():
            _log.warning("sensitivity of %s was not finite on %d rank(s), which were left out", name, ranks)
        self._warned = False
        if not costs.names:
            return Adaptation({}, {}, 0.0, 0.0, invalid)
        curves = zip(costs.names, costs.variance, strict=True)
        sensitivity = {name: float(curve[-1]) * 255.0**2 for name, curve in curves}
        in_force: Mapping[str, Any] = self.engine.plan
        split = SampleCosts.build(costs) if self._config.policy == "actnn" else None
        if split is not None:
            costs, in_force = split.costs, split.expanded(in_force)
        error: GradientError | None = None
        if self.error_budget is not None:
            within = self.error_budget.allocate(costs, sample, step)
            if within is None:
                return Adaptation({}, {}, 0.0, 0.0, invalid)
            allocation, error, kept = within.allocation, within.error, within.kept
        else:
            costs = costs if weighed is None else policies.with_bytes(costs, weighed)
            allocation = policies.allocate(self._config, costs)
            settled = policies.settled(self._config, costs, in_force, allocation)
            kept, allocation = settled is not None, settled or allocation
        if weighed is not None:
            # a tensor that is new after this is stored like the average one
            widths = np.where(allocation.bits == EXACT, WIDTHS, allocation.bits)
            self.engine.unmeasured_bits = math.floor(np.average(widths, weights=costs.sizes))
        plan: dict[str, Bits] = {**costs.plan(allocation)}
        if split is not None:
            plan = split.folded(costs.plan(allocation))
        return Adaptation(plan, sensitivity, allocation.variance, allocation.average_bits, invalid, error, kept)

    def start(self, forward: Callable[[], Any]) -> None:
        """Before the first step where nothing can be measured yet. A collective call with a budget in bytes.

        forward: runs the model as that step will; the largest uniform width at which it fits is used.
        """
        if self._policy.budget is Budget.RETAINED_BYTES:
            self.engine.unmeasured_bits = self._weigh(forward).largest_uniform_bits(self._config)

    def idle(self, step: int) -> None:
        """A step without a loss function to measure with: warn once of a job that never gives one."""
        if step == min(_STEPS_WITHOUT_LOSS, self._config.adapt_interval) and not self.engine.plan:
            _log.warning(
                "policy %s has chosen no bits in %d steps, for step() was given no loss function: every tensor has %s "
                "bits; %s",
                self._config.policy,
                step,
                self.engine.unmeasured_bits,
                _HOW_TO_ADAPT,
            )

    def watch(self) -> None:
        """After a forward: remember the heaviest, and warn once an interval of one that exceeds a budget in bytes."""
        budget = self._config.retained_bytes
        if budget is None:
            return
        self._heaviest_bytes = max(self._heaviest_bytes, self.engine.ledger.exact_bytes)
        retained = sum(row.bytes for row in self.engine.ledger.rows)
        if retained > budget and not self._warned:
            self._warned = True
            why = (
                "its batch is larger than the one that the bits were chosen with, or saves new tensors; the next "
                "adaptation makes room, calibrate() does so at once"
            )
            if not self.engine.plan:
                why = f"no bits have been chosen for it yet; {_HOW_TO_ADAPT}"
            _log.warning("this step keeps %d bytes, more than retained_bytes=%d: %s", retained, budget, why)

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt besides the plan."""
        promised = self.error_budget.state_dict() if self.error_budget is not None else None
        gradients = self.engine.packer.gradients.state_dict()
        return {"heaviest_bytes": self._heaviest_bytes, "error_budget": promised, "sample_gradients": gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave, under another policy as well."""
        self._heaviest_bytes = state.get("heaviest_bytes", 0)
        self.engine.packer.gradients.load_state_dict(state.get("sample_gradients"))
        promised = state.get("error_budget")
        if self.error_budget is not None and promised is not None:
            self.error_budget.load_state_dict(promised)

    # -- what this rank sees --------------------------------------------------------------------------------------

    def _measured(self, sample: ProbeBatch, step: int) -> tuple[Costs, dict[str, int]]:
        """What all ranks measured, on fewer samples where the memory of one was too little, or without a second
        derivative; and how many ranks were left out of it, by name."""
        estimator = self._policy.estimator
        while True:
            measured = self._measure(sample, step, estimator)
            costs, invalid, fits = self._reduced(measured, sample.fraction)
            half = None if fits else sample.half()
            if half is not None:
                sample, self.most_samples = half, half.count
                _log.warning("memory is too little: from now on sensitivity is measured on %d samples", half.count)
            elif not fits and estimator == "one-pass" and not has_compiled_parts(self._model):
                estimator = "perturbation"
                _log.warning("memory is too little for second derivatives: sensitivity is measured by perturbation")
            else:
                return costs, invalid

    def _measure(self, sample: ProbeBatch, step: int, estimator: str) -> list[Sensitivity] | None:
        """What this rank sees; None where memory is too little."""
        try:
            return measure(
                self.engine, self._model, sample.loss, seed=self._seed(step), fraction=sample.fraction,
                probes=self._draws, estimator=estimator,
            )  # fmt: skip
        except RuntimeError as error:
            # The job itself may well go on, with the plan it has. The rank still takes part in the collectives that
            # follow, with nothing to add, so that the others do not wait for it.
            # Its text alone: a handler that keeps its records would keep the failed forward's frames, and so its graph.
            _log.warning(
                "sensitivity could not be measured on this rank, its plan comes from the other ranks: %s",
                str(error).split("\n", 1)[0],
            )
            return None if isinstance(error, torch.OutOfMemoryError) else []

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

    # -- what all ranks know ----------------------------------------------------------------------------------------

    def _reduced(self, measured: Sequence[Sensitivity] | None, fraction: float) -> tuple[Costs, dict[str, int], bool]:
        """The mean over ranks, of the tensors that have one; how many ranks were left out of it, by name; and whether
        the memory of all ranks was enough. measured: None if that of this one was not.

        A mean loss over n of N samples has N/n times the variance of the whole batch, and n/N of its elements.
        """
        columns = policies.COLUMNS if self._config.policy == "actnn" else 0
        found = measured or []
        labels = [item.name for item in found] if measured is not None else [_OUT_OF_MEMORY]
        values = torch.zeros(len(labels), 10 + columns, dtype=torch.float64)
        for row, item in zip(values, found, strict=False):
            row[0], row[1] = item.numel / fraction, item.itemsize_bits
            row[-WIDTHS:] = item.variance * fraction
            if columns and item.examples is not None:
                row[2:-WIDTHS] = torch.from_numpy(item.examples)
        statistics = distributed.reduce_over(labels, values, self._groups)
        fits = _OUT_OF_MEMORY not in statistics.names
        valid = (statistics.valid_ranks > 0) & torch.tensor(
            [name != _OUT_OF_MEMORY for name in statistics.names], dtype=torch.bool
        )
        names = tuple(name for name, usable in zip(statistics.names, valid.tolist(), strict=True) if usable)
        mean = statistics.mean[valid].numpy()
        sizes, exact_bits, variance = mean[:, 0], mean[:, 1], mean[:, -WIDTHS:]
        metadata_bits = np.full(len(names), codec.metadata_bits(self._config.group_size))
        samples = mean[:, 2:-WIDTHS] if columns else None
        costs = Costs(names, variance, sizes, exact_bits, metadata_bits, samples=samples)
        return costs, dict(statistics.invalid), fits

    def _weigh(self, forward: Callable[[], Any]) -> StepBytes:
        """The most bytes of each tensor on any rank, for the step to come."""
        footprint = self._footprint(forward)
        # a batch as heavy as the heaviest so far may come again
        growth = max(1.0, self._heaviest_bytes / footprint.exact_bytes) if footprint.exact_bytes else 1.0
        rows = [*footprint.tensors.values(), torch.full((9,), float(footprint.other_bytes), dtype=torch.float64)]
        names, table = distributed.max_over_groups(
            [*footprint.tensors, _OTHER], torch.stack(rows) * growth, self._groups
        )
        tensors = dict(zip(names, table.numpy(), strict=True))
        other_bytes = float(tensors.pop(_OTHER)[0])
        return StepBytes(tensors, other_bytes)
