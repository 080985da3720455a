"""One adaptation: what the ranks measured is reduced, and becomes one plan.

[Note: shares] Measured in one step, a batch of 8 examples makes that step 8 times as long as others. So where steps are
long, an adaptation takes several of them: in each a rank measures one part of that step's examples, in the last the new
plan is compared with the exact gradient, and only then is it used. A part that is more than half of the batch, as a
single example is, takes two steps ([Note: shares of a measurement] in sensitivity/halfway.py), and until the last a
copy of it is kept. In short steps, in which most of the time is that of the calls of operators, all examples are
measured at once, but after the first plan in three steps. Ranks take as many steps as the one with the most parts. What
was measured so far is in no state: a run whose state is asked for begins anew, as a resumed one does.

[Note: first step] Whether steps are long is known from the steps of the job. Before the first one a forward of part of
the examples shows it, and what need not be stored. If they are, the measurement begins in the second step. The first
runs under the default widths, and so it is these that are compared with the exact gradient in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .. import _fields, codec, distributed
from .._torch_internals import has_compiled_parts
from ..hooks import Footprint, SavedTensorHooks
from ..policies import WIDTHS, Bits, Costs, GradientError, Moments, Plan, StepBytes, Trial, one_width, with_bytes
from ..sensitivity import (
    Paused,
    ProbeBatch,
    ProbePart,
    Sensitivity,
    blocks_of,
    inputs_of,
    kept,
    measure,
    of_whole_batch,
    rounded_moments,
    untouched,
)
from .attempts import Attempt, Ending, attempt, on_any_sharing
from .verification import Verdict, Verifier

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Examples = TypeVar("_Examples")
# Random directions to average over, all ranks together: with a single one, a tensor's estimate has a relative standard
# deviation of 0.08 and more, and allocation favours tensors whose estimates are too low.
_PROBES = 4
# The time of a measurement on all of a step's batch, in plain steps: of its three visits to each block, and of every
# direction in the last of them. In a step of the job it is to take no more than the first.
_LONGEST, _VISITS, _DIRECTION = 5.0, 3.0, 2.0
# Size of the average saved tensor in a part of the batch that is worth a measurement of its own, and in a step that is
# long; with smaller ones most of the time is that of the calls of operators.
_LEAST_BYTES = 1 << 18
# Of the batch: a larger part takes several steps, so many where steps are long or short.
_LARGEST = 0.5
_SHARES, _SHARES_OF_SHORT = 2, 3
# Optimizer steps from one adaptation to the next that are enough to spread one over short steps.
_LEAST_INTERVAL = 10
# After this many forwards the hooks have learnt what there is to learn about views and block inputs.
_WEIGHINGS = 3
# Steps after which a job that gives none is told so: one interval, within these bounds.
_FEWEST_WITHOUT_LOSS, _STEPS_WITHOUT_LOSS = 5, 100
_HOW_TO_ADAPT = "give step(loss_fn, batch), call calibrate(), or use follow() in place of step()"
_LOOKING = "finding what a step keeps"
_OTHER = ""  # the row of bytes that belong to no compressible tensor
_FINER_INSIDE = 4
"""times more parts where what a checkpoint recomputes is measured as well: its own steps hold that of one block, and
little else"""
_DERIVED = " derived"  # the elements that a step makes from others
_DRAW_PASSES = 2
_OVERFLOW = 1e30  # what a variance that is not finite counts as: worse than any other, and its mean over ranks finite
_GRADIENT = "gradient"
_NO_PART = -1
_Parts = list[tuple[list[Sensitivity], float]]
"""what was measured of parts of a batch, each with the fraction of the batch that it is"""


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The outcome of one adaptation, the same on every rank."""

    plan: dict[str, Bits]
    """bits of every tensor that was measured; None: stored exactly; with policy actnn also the widths of equal shares
    of its examples"""
    sensitivity: dict[str, float]
    """c_l of each: the variance it adds to the gradient is about c_l / (2^bits - 1)^2 (GACT, section 4)"""
    predicted_variance: float
    """variance that the plan adds to the gradient of one rank, summed over all parameters"""
    average_bits: float
    """bits for an element under the plan, weighted by size; with a budget in bytes all that is kept of it is counted"""
    invalid: dict[str, int]
    """tensors whose measurement was NaN or inf, with the number of ranks that left it out"""
    gradient_error: GradientError | None = None
    """with policy acgc, the error bound and the measured error; None with other policies"""
    kept: bool = False
    """whether the current plan was kept, since a fresh one would have gained too little (Config.adapt_tolerance)"""
    default_bits: int | None = None
    """of tensors whose names are new"""
    stored_exactly: dict[str, str] = field(default_factory=dict)
    """tensors that this adaptation found must not be rounded, each with the reason"""
    refuted: bool = False
    """whether what it measured is worth little; see Verdict.refutes"""

    def to_dict(self, step: int) -> dict[str, Any]:
        """Plain values for a line of JSON."""
        tensors = {
            name: {"bits": list(bits) if isinstance(bits, tuple) else bits, "sensitivity": self.sensitivity.get(name)}
            for name, bits in self.plan.items()
        }
        return {
            "step": step,
            "kept": self.kept,
            "average_bits": self.average_bits,
            "predicted_variance": self.predicted_variance,
            "gradient_error": None if self.gradient_error is None else asdict(self.gradient_error),
            "stored_exactly": self.stored_exactly,
            "tensors": tensors,
        }


class Haste(Enum):
    """Why bits adapt, and so how long the step may be in which they do."""

    NONE = "it is time"  # see [Note: shares]
    FAULT = "the plan in use is faulty"  # in one step, which is not to be longer than it must
    CALIBRATION = "calibrate()"  # at once, and as well as may be


class _PausedPart(NamedTuple):
    """A part of a batch whose measurement goes on in the next step."""

    measurement: Paused
    examples: Any
    """a copy of them; None where the whole batch of any step serves"""
    fraction: float
    """of the batch"""


@dataclass(eq=False)
class _Progress:
    """How far an adaptation is."""

    haste: Haste
    batch: ProbeBatch = field(init=False)
    """of the current step; there is none in between"""
    step: int = 0
    most_parts: float | None = None
    """how many parts of a batch are worth a measurement of their own; None where no step of this rank was seen"""
    is_spread: bool = False
    """whether steps are long, so that it takes several"""
    is_short: bool = False
    """whether it takes several although steps are short"""
    pauses: bool | None = None
    """whether each part takes several steps, as all ranks have agreed; None where that depends on its size"""
    paused: _PausedPart | None = None
    stored_exactly: dict[str, str] = field(default_factory=dict)
    """tensors that the default widths would ruin, each with the reason"""


class AdaptationInSteps:
    """An adaptation that is under way. See [Note: shares]."""

    def __init__(self, adapted: Callable[[_Progress], Generator[None, None, Adaptation]], haste: Haste) -> None:
        """adapted: runs it; it yields at the end of a step and returns the outcome."""
        self._now = _Progress(haste)
        self._run = adapted(self._now)

    def go_on(self, batch: ProbeBatch, step: int) -> Adaptation | None:
        """Its share in a step; the outcome, None before the last. A collective call.

        Raises on every rank what the loss function or the model raised on any, ValueError when the loss is no scalar
        with a graph or the budget cannot be reached. It is over then.
        """
        self._now.batch, self._now.step = batch, step
        try:
            next(self._run)
        except StopIteration as end:
            outcome: Adaptation = end.value
            return outcome
        finally:
            del self._now.batch  # which the job's own step does not need
        return None


class LearntByAdapting(NamedTuple):
    """What a state holds of an Adapter."""

    heaviest_bytes: int
    example_gradients: Any
    policy: Any


class _Columns(NamedTuple):
    """Where the numbers about a tensor stand in the row that ranks average.

    The variance comes last: a row whose last number is not finite is left out of the mean.
    """

    numel: int
    exact_bits: int
    examples: slice
    variance: slice
    width: int

    @staticmethod
    def with_examples(columns: int) -> _Columns:
        """columns: Policy.example_columns."""
        return _Columns(0, 1, slice(2, 2 + columns), slice(2 + columns, 2 + columns + WIDTHS), 2 + columns + WIDTHS)


class Adapter:
    """Adapts the bits of one model. All its decisions follow from numbers reduced over the ranks."""

    def __init__(
        self,
        model: nn.Module,
        hooks: SavedTensorHooks,
        data_parallel: Sequence[Any],
        groups: Sequence[Any],
        verifier: Verifier | None,
    ) -> None:
        """groups: data_parallel and those of tensor parallelism, to reduce over one after the other. verifier: of its
        plans, None where they are used as they are."""
        self._model, self._hooks, self._config = model, hooks, hooks.config
        self._verifier = verifier
        self.policy = hooks.policy
        self._columns = _Columns.with_examples(self.policy.example_columns)
        self._rank = distributed.rank(*data_parallel) if data_parallel else 0
        ranks = math.prod(distributed.world_size(group) for group in data_parallel)
        self._groups = groups
        self._is_first = distributed.is_first(groups)  # and so says what all have agreed on
        self._draws = max(1, _PROBES // ranks)
        self._heaviest_bytes = 0
        self._warned = False
        self._finer = 1  # times more parts than usual, in which memory may be enough to measure
        self._saves_alike: bool | None = None
        """whether one example alone is saved under the names of several; None until that is looked at"""

    def adapt(self, haste: Haste) -> AdaptationInSteps:
        """Begin an adaptation."""
        return AdaptationInSteps(self._adapted, haste)

    def prepare(self, batch: ProbeBatch) -> None:
        """Tell a batch what is known of its parts; see [Note: parts] in probe.py."""
        batch.fewest = 1 if self._saves_alike else 2

    def _adapted(self, now: _Progress) -> Generator[None, None, Adaptation]:
        """Measure, reduce and allocate. Where it yields it goes on in another step."""
        if self._heaviest_bytes:
            now.most_parts = _most_parts(self._heaviest_bytes, self._hooks.account.count)
        was_seen, has_changed, divides = True, False, False
        if now.haste is Haste.NONE:
            has_changed, divides = self._hooks.try_functions(), self._saves_alike is None and now.batch.divides_further
            conditions = [(now.most_parts or 0.0) >= 1.0, now.most_parts is not None, has_changed, divides]
            now.is_spread, was_seen, has_changed, divides = distributed.any_rank(conditions, self._groups)
            if was_seen and not (now.is_spread or self.policy.follows_gradient) and self._hooks.plan.bits:
                now.is_spread = now.is_short = self._config.adapt_interval >= _LEAST_INTERVAL
        self._share_example_gradients()
        divides = divides and not now.is_short
        looks = not was_seen or has_changed or self._hooks.may_derive or (divides and now.is_spread)
        if looks and not has_compiled_parts(self._model):
            is_long, names = self._look(now.batch)
            if not was_seen:
                (now.is_spread,) = distributed.any_rank([is_long], self._groups)
            if divides and now.is_spread:
                self._look_at_one(now.batch, names)
        step_bytes = None if self._hooks.plan.bits else self.start(now.batch.whole)
        if not was_seen and now.is_spread:
            now.is_spread = self._bears_first_step(now, step_bytes)
            if now.is_spread:
                yield
        self._hooks.derive()
        costs, invalid, exact = yield from self._measured_without_faults(now)
        exact = {**now.stored_exactly, **exact}
        plan: dict[str, Bits] = dict.fromkeys({} if self._verifier is None else self._verifier.exact)
        plan.update(dict.fromkeys(exact))
        self._hooks.store(plan)
        if self.policy.needs_step_bytes and (step_bytes is None or self._hooks.encoder.may_derive):
            # only now is it known what is stored because it lies in another block than what it could be made of
            step_bytes = self._weigh(now.batch.whole)
        for name, ranks in invalid.items() if self._is_first else ():
            _log.warning("sensitivity of %s was not finite on %d rank(s), which were left out", name, ranks)
        self._warned = False
        current = self._hooks.plan
        nothing = Adaptation(plan, {}, 0.0, 0.0, invalid, default_bits=current.default, stored_exactly=exact)
        costs = _without(costs, plan)
        if not costs.names:
            return nothing
        if step_bytes is not None:
            costs = with_bytes(costs, _with_exact(step_bytes, plan))
        choice = self.policy.choose(costs, current, self._trial_of(now))
        if choice is None:
            return nothing
        plan.update(choice.bits)
        if step_bytes is not None and self._hooks.encoder.may_derive and choice.variance == 0.0:
            whole = self._weigh(now.batch.whole, derives=False)  # what is derived has no place in the costs
            if self.policy.fits_exactly(whole):
                plan |= dict.fromkeys(whole.tensors)
        if self._verifier is not None and now.is_spread:
            yield
        fits = partial(self._fits, step_bytes, now)
        verdict = self._verdict_on(Plan({**current.bits, **plan}, choice.default), now, choice.variance, costs, fits)
        found = verdict.found
        plan.update(dict.fromkeys(found))
        curves = zip(costs.names, costs.variance, strict=True)
        sensitivity = {name: float(curve[-1]) * 255.0**2 for name, curve in curves}
        return Adaptation(
            plan, sensitivity, choice.variance, choice.average_bits, invalid,
            choice.error, choice.kept and not found, choice.default, {**exact, **found}, verdict.refutes,
        )  # fmt: skip

    def start(self, forward: Callable[[], Any]) -> StepBytes | None:
        """Before the first step where nothing can be measured yet. A collective call with a budget in bytes.

        forward: runs the model as that step will; the largest uniform width at which it fits is used, if nothing is
        derived: a measurement may show that it has to be stored. Returns the bytes that this follows from.
        """
        if not self.policy.needs_step_bytes:
            return None
        step_bytes = self._weigh(forward, derives=False)
        self._hooks.plan = self.policy.first_plan_in(step_bytes)
        return step_bytes

    def draw(self, step: int, loss: Callable[[], Any], unit: float | None = None) -> None:
        """Look at the gradient of a step's batch. loss, unit: as loss_of_whole, unit of ProbeBatch. Collective."""
        self.policy.add_draw(self._trial(loss, step, _DRAW_PASSES, unit))

    def idle(self, step: int, why: str = "step() was given no loss function", remedy: str = _HOW_TO_ADAPT) -> None:
        """There was nothing to measure with in a step: warn once if there never is."""
        is_time = step == min(_STEPS_WITHOUT_LOSS, max(_FEWEST_WITHOUT_LOSS, self._config.adapt_interval))
        if is_time and not self._hooks.plan.bits and self._is_first:
            _log.warning(
                "policy %s has chosen no bits in %d steps because %s: every tensor has %s bits; %s",
                self._config.policy,
                step,
                why,
                self._hooks.plan.default,
                remedy,
            )

    def watch(self) -> None:
        """After a forward: remember the heaviest, and warn once an interval of one that exceeds a budget in bytes."""
        account, budget = self._hooks.account, self._config.retained_bytes
        self._heaviest_bytes = max(self._heaviest_bytes, account.exact_bytes)
        if budget is None:
            return
        retained = account.retained_bytes
        if retained > budget and not self._warned:
            self._warned = True
            why = (
                "its batch is larger than the one that the bits were chosen with, or saves new tensors; the next "
                "adaptation makes room, calibrate() does so at once"
            )
            if not self._hooks.plan.bits:
                why = f"no bits have been chosen for it yet; {_HOW_TO_ADAPT}"
            _log.warning(
                "this step keeps %d bytes on rank %d, more than retained_bytes=%d: %s",
                retained,
                distributed.rank(),
                budget,
                why,
            )

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt besides the plan."""
        return {
            "heaviest_bytes": self._heaviest_bytes,
            "error_budget": self.policy.state_dict(),
            "sample_gradients": self._hooks.encoder.examples.gradients.state_dict(),
        }

    def parse_state(self, state: Mapping[str, Any]) -> LearntByAdapting:
        """What load_state() takes, from what state_dict() gave, under another policy as well. Raises StateError."""
        gradients = self._hooks.encoder.examples.gradients
        return LearntByAdapting(
            _fields.read(state, "heaviest_bytes", _fields.integer(0), 0),
            _fields.read(state, "sample_gradients", gradients.parse_state, None),
            self.policy.parse_state(state.get("error_budget")),
        )

    def load_state(self, learnt: LearntByAdapting) -> None:
        """Go on with what parse_state() returned."""
        self._heaviest_bytes = learnt.heaviest_bytes
        self._hooks.encoder.examples.gradients.load_state(learnt.example_gradients)
        self.policy.load_state(learnt.policy)

    # -- what must not be rounded -----------------------------------------------------------------------------------

    def _measured_without_faults(
        self, now: _Progress
    ) -> Generator[None, None, tuple[Costs, dict[str, int], dict[str, str]]]:
        """As _measured(), and the tensors that have to be stored exactly, each with the reason.

        Sensitivities are measured under the current plan. If it makes the gradient infinite or NaN, so are the
        sensitivities of many tensors: they are measured anew without the ones that are to blame.
        """
        costs, invalid = yield from self._measured(now)
        if self._verifier is None:
            return costs, invalid, {}
        exact = self._verifier.exact
        if not invalid.keys() - exact:
            return costs, {}, {}
        fits = partial(self._fits, self._weigh(now.batch.whole) if self.policy.needs_step_bytes else None, now)
        verdict = self._verifier.verify(now.batch, self._hooks.plan, now.step, fits=fits)
        found = verdict.found
        if found:
            self._hooks.plan = self._hooks.plan.updated(dict.fromkeys(found))
            costs, invalid = yield from self._measured(now)
        invalid = {name: ranks for name, ranks in invalid.items() if name not in exact}
        lost = [name for name in invalid if name not in costs.names]
        if not verdict.judged or not lost:
            return costs, invalid, found
        if self._is_first:
            _log.warning("stored exactly until their sensitivity is finite on some rank: %s", ", ".join(lost))
        return costs, invalid, {**found, **dict.fromkeys(lost, "its sensitivity is not finite")}

    def _verdict_on(
        self, plan: Plan, now: _Progress, predicted: float, costs: Costs, fits: Callable[[Iterable[str]], bool]
    ) -> Verdict:
        """Which tensors a plan must not round. fits: as for Verifier.verify()."""
        if self._verifier is None:
            return Verdict(False, {})
        variances = {
            name: float(curve[width - 1])
            for name, curve in zip(costs.names, costs.variance, strict=True)
            if (width := one_width(plan.bits_of(name))) is not None
        }
        at_8_bits = sum(
            float(curve[WIDTHS - 1])
            for name, curve in zip(costs.names, costs.variance, strict=True)
            if plan.bits_of(name) is not None
        )
        return self._verifier.verify(
            now.batch,
            plan,
            now.step,
            predicted=predicted,
            predicted_at_8_bits=at_8_bits,
            variances=variances,
            fits=fits,
        )

    def _fits(self, step_bytes: StepBytes | None, now: _Progress, found: Iterable[str]) -> bool:
        """Whether a budget of bytes has room for some more tensors that are stored exactly. A collective call.

        step_bytes: of a step; None without a budget.
        """
        if step_bytes is None or self._verifier is None:
            return True
        exact, stored = {*self._verifier.exact, *found}, step_bytes
        if not exact <= step_bytes.tensors.keys():  # what is derived has no bytes
            stored = self._weigh(now.batch.whole, derives=False)
        rows = {name: row for name, row in stored.tensors.items() if name in exact or name in step_bytes.tensors}
        fewest = sum(float(row[-1] if name in exact else row.min()) for name, row in rows.items())
        return stored.other_bytes + fewest <= (self._config.retained_bytes or math.inf)

    # -- what this rank sees --------------------------------------------------------------------------------------

    def _measured(self, now: _Progress) -> Generator[None, None, tuple[Costs, dict[str, int]]]:
        """What all ranks measured, and by name how many ranks were left out. If a rank runs out of memory, all measure
        on fewer examples at once, then without a second derivative; without it at once, if one meets a fault of ours.
        """
        estimator = self._config.estimator
        while True:
            parts = self._parts(now, self._finer)
            measured = yield from self._in_shares(now, estimator, parts)
            own = measured if isinstance(measured, Ending) else of_whole_batch(measured)
            costs, invalid, failed = self._reduced(own)
            if not failed:
                return costs, invalid
            is_faulty = Ending.FAULT in failed
            finer = not is_faulty and self._parts(now, 2 * self._finer) > parts
            if distributed.any_rank([finer], self._groups)[0]:
                self._finer *= 2
                if self._is_first:
                    _log.warning("out of memory: from now on sensitivity is measured on half as many examples at once")
            elif estimator == "one-pass" and not has_compiled_parts(self._model):
                estimator = "perturbation"
                if self._is_first and not is_faulty:
                    _log.warning("out of memory for second derivatives: sensitivity is measured by perturbation")
            else:
                return costs, invalid

    def _parts(self, now: _Progress, finer: int) -> int:
        """In how many parts this rank measures its examples; shares of the examples are seen in all of them at once.

        finer: how many times more than usual. Ranks that gather parameters for one another have as many of them.
        """
        parts = now.batch.parts(finer * (_FINER_INSIDE if self._hooks.compresses_recomputed else 1))
        if self.policy.example_columns:
            parts = min(parts, finer)
        if now.most_parts is not None and finer == 1:
            parts = min(parts, math.ceil(now.most_parts * now.batch.fraction))
        if distributed.sharding(self._model) is None:
            return parts
        return int(distributed.least_of_ranks(parts, self._groups))

    def _look(self, batch: ProbeBatch) -> tuple[bool, set[str]]:
        """At what a step keeps, before there was one, for the hooks to learn what need not be stored. Whether steps are
        long; see [Note: first step]; and the names of what is rounded."""
        seen = self._look_at(batch, self._first_parts(batch))
        return _most_parts(seen.exact_bytes / seen.fraction, seen.count) >= 1.0, {*seen.tensors}

    def _look_at_one(self, batch: ProbeBatch, names: set[str]) -> None:
        """At what one example alone is saved as, where smaller parts would take less memory. names: of what several
        save. A collective call."""
        one = batch.first()
        seen = self._look_at(batch, chain([one], self._first_parts(batch)))  # which it is if a model refuses one

        def differs() -> bool:
            own = seen.fraction != one.fraction or {*seen.tensors} != names
            return distributed.any_rank([own], self._groups)[0]

        if differs():
            names = {*self._look_at(batch, self._first_parts(batch)).tensors}  # with what the looks before have learnt
        self._saves_alike = not differs()
        self.prepare(batch)

    @staticmethod
    def _first_parts(batch: ProbeBatch) -> Iterator[ProbePart]:
        """The first part of a batch, and larger ones if a model refuses it."""
        return chain.from_iterable(batch.divisions(batch.parts(), only=0))

    def _look_at(self, batch: ProbeBatch, parts: Iterable[ProbePart]) -> Footprint:
        seen_by = ((part.forward, part.fraction) for part in parts)
        # other forwards would learn more of single tensors, but derive the same
        return self._footprint(batch.whole, seen_by, _LOOKING, to_settle=("store_base", "functions_again"))

    def _bears_first_step(self, now: _Progress, step_bytes: StepBytes | None) -> bool:
        """Whether it can run under the default widths. See [Note: first step]. Where a budget has no room for what they
        are too few for, the plan has to be there before it."""
        if self._verifier is None:
            return True
        plan, fits = self._hooks.plan, partial(self._fits, step_bytes, now)
        verdict = self._verifier.verify(now.batch, plan, now.step, provisional=True, fits=fits)
        now.stored_exactly = verdict.found
        self._hooks.plan = plan.updated(dict.fromkeys(now.stored_exactly))
        return verdict.fault is None

    def _in_shares(self, now: _Progress, estimator: str, parts: int) -> Generator[None, None, _Parts | Ending]:
        """What this rank measures of its parts, one of them a step where steps are long, or why it cannot.

        See [Note: shares].
        """
        if not now.is_spread:
            return self._measure(now, estimator, parts)
        now.pauses = self._all_pause(now.batch, parts)
        found: list[_Parts] = []
        failed: Ending | None = None
        share = 0
        while True:
            seen = self._measure(now, estimator, parts, share)
            if isinstance(seen, Ending):
                failed, seen = seen, []
            found.append(seen)
            if now.paused is None:
                # a rank that is done, or failed, still has its place in the collectives
                done = not seen or share + 1 >= parts or sum(part[1] for part in seen) >= now.batch.fraction
                share = _NO_PART if done else share + 1
            if not distributed.any_rank([share != _NO_PART], self._groups)[0]:
                return failed or [part for seen in found for part in seen]
            yield

    def _all_pause(self, batch: ProbeBatch, parts: int) -> bool | None:
        """See _Progress.pauses. Ranks that gather parameters for one another pause together."""
        if distributed.sharding(self._model) is None:
            return None
        conditions = [batch.fraction / parts > _LARGEST, not batch.can_be_kept]
        is_large, cannot = distributed.any_rank(conditions, self._groups)
        return is_large and not cannot

    def _measure(self, now: _Progress, estimator: str, parts: int, only: int | None = None) -> _Parts | Ending:
        """What this rank measures, or why it cannot, for want of memory as a rule. only: one of the parts."""

        def work(examples: _PausedPart | Iterable[ProbePart]) -> _Parts:
            now.paused = None
            if isinstance(examples, _PausedPart):
                return self._resumed(now, examples)
            measured = [(self._measure_part(now, estimator, part), part.fraction) for part in examples]
            return [(part, fraction) for part, fraction in measured if part is not None]

        choices = self._paused_or_anew(now, now.batch.divisions(parts, only))
        done = self._attempt("measuring sensitivity", work, choices, now.batch.loss_of_whole)
        if done.ending is Ending.NOT_HERE:
            _log.warning(
                "sensitivity could not be measured on this rank (%s): bits follow from the other ranks, or stay as "
                'they are; policy "uniform" needs no measurement',
                done.reason,
            )
            return []
        return done.ending if done.result is None else done.result

    def _measure_part(self, now: _Progress, estimator: str, part: ProbePart) -> list[Sensitivity] | None:
        """What is measured of one part; None if that goes on in the next step."""
        pauses = now.is_spread and (part.fraction > _LARGEST if now.pauses is None else now.pauses)
        shares = (_SHARES_OF_SHORT if now.is_short else _SHARES) if pauses and now.batch.can_be_kept else 1
        in_steps = pauses and part.fraction == 1.0  # the whole of another step's batch serves as well
        found = measure(
            self._hooks, self._model, part.forward, seed=self._seed(now.step) + part.number,
            fraction=part.fraction, probes=self._directions(now.haste, part), estimator=estimator, shares=shares,
            in_steps=in_steps,
        )  # fmt: skip
        if isinstance(found, Paused):
            examples = None if part.fraction == 1.0 and not found.needs_examples else kept(part.examples)
            now.paused = _PausedPart(found, examples, part.fraction)
            return None
        return found

    @staticmethod
    def _paused_or_anew(
        now: _Progress, divisions: Iterator[Iterable[ProbePart]]
    ) -> Iterator[_PausedPart | Iterable[ProbePart]]:
        """What is paused, if anything is; the examples of this step, all at once, take its place if it cannot go on."""
        if now.paused is not None:
            yield now.paused
            now.pauses = False
        yield from divisions

    def _resumed(self, now: _Progress, paused: _PausedPart) -> _Parts:
        """What is complete of a part that was paused."""
        self._hooks.given.add(inputs_of(paused.examples))
        on_earlier = partial(now.batch.on_earlier, paused.examples)
        found = paused.measurement.resume(now.batch.loss_of_whole if paused.examples is None else on_earlier)
        if isinstance(found, Paused):
            now.paused = paused._replace(measurement=found)
            return []
        return [(found, paused.fraction)]

    def _directions(self, haste: Haste, part: ProbePart) -> int:
        """How many directions there is time for in a part of the examples.

        An error bound gets all of them: with one, a plan of 1.2 bits had twice the variance that it was chosen for.
        """
        wanted = -(-self._draws // part.parts)
        if self.policy.follows_gradient or haste is Haste.CALIBRATION:
            return wanted
        return min(wanted, max(1, int((_LONGEST / (part.parts * part.fraction) - _VISITS) / _DIRECTION)))

    def _seed(self, step: int) -> int:
        seed = (self._config.seed * 1_000_003 + step) * 65_537 + self._rank
        return (seed + 2**62) % 2**63 - 2**62  # numbers of tensors are added to it, below 2**63

    def _footprint(
        self,
        forward: Callable[[], Any],
        parts: Iterable[tuple[Callable[[], Any], float]] | None = None,
        doing: str = "counting the bytes of a step",
        *,
        derives: bool = True,
        to_settle: Sequence[str] = (),
    ) -> Footprint:
        """What a step of this rank keeps. See [Note: weighing] in hooks/accounting.py.

        forward: runs the model on a step's examples. parts: to see fewer of them, forwards and the fractions that they
        see, as attempt() chooses from them. doing: what this is for, in messages. derives: whether it derives what it
        can. to_settle: entries of SavedTensorHooks.state_dict() that a last forward is not to change; none for all.
        """
        footprint = Footprint()
        narrowest = Plan(default=1)
        blocks = blocks_of(self._model, self._config.blocks)

        def learnt() -> Any:
            state = self._hooks.state_dict()
            return [state[entry] for entry in to_settle] or state

        def work(part: tuple[Callable[[], Any], float]) -> None:
            nonlocal footprint
            run, fraction = part
            for _ in range(_WEIGHINGS):
                known = learnt()
                alone = untouched(self._model, blocks, forward_only=True)
                with alone, self._hooks.rehearsal(narrowest, fraction=fraction, derives=derives) as footprint:
                    run()
                (changed,) = on_any_sharing(self._model, [learnt() != known], self._groups)
                if not changed:
                    break

        choices = [(forward, 1.0)] if parts is None else parts
        self._attempt(doing, work, choices, forward, gives_loss=False)
        return footprint

    def _attempt(
        self,
        doing: str,
        work: Callable[[_Examples], _T],
        choices: Iterable[_Examples],
        forward: Callable[[], Any],
        *,
        gives_loss: bool = True,
    ) -> Attempt[_T]:
        """See attempt()."""
        model, blocks, groups = self._model, self._config.blocks, self._groups
        return attempt(doing, work, choices, forward, model=model, blocks=blocks, groups=groups, gives_loss=gives_loss)

    # -- what all ranks know ----------------------------------------------------------------------------------------

    def _share_example_gradients(self) -> None:
        if self.policy.example_columns:
            gradients = self._hooks.encoder.examples.gradients
            sizes = distributed.mean_of_positive(gradients.sizes, self._groups)
            gradients.sizes = None if sizes is None else sizes.to(gradients.device)

    def _reduced(self, measured: Sequence[Sensitivity] | Ending) -> tuple[Costs, dict[str, int], set[Ending]]:
        """The mean over ranks of each tensor that has one; by name, how many ranks were left out of it; and why any
        rank could not measure. measured: why this rank could not, or what it found."""
        columns = self._columns
        found = [] if isinstance(measured, Ending) else measured
        labels = [_row_of(measured)] if isinstance(measured, Ending) else [item.name for item in measured]
        if found:
            labels.append(_DERIVED)
        values = torch.zeros(len(labels), columns.width, dtype=torch.float64, device="cpu")
        for row, item in zip(values, found, strict=False):
            row[columns.numel] = self._hooks.elements_at_once(item.name, item.numel)
            row[columns.exact_bits] = item.itemsize_bits
            row[columns.variance] = item.variance
            if item.examples is not None:
                row[columns.examples] = torch.from_numpy(item.examples)
        if found:
            values[-1, columns.numel] = self._hooks.derived_elements
        statistics = distributed.reduce_over(labels, values, self._groups)
        failures = {_row_of(ending): ending for ending in Ending}
        failed = {failures[name] for name in statistics.names if name in failures}
        valid = (statistics.valid_ranks > 0) & torch.tensor(
            [name != _DERIVED and name not in failures for name in statistics.names], dtype=torch.bool, device="cpu"
        )
        names = tuple(name for name, usable in zip(statistics.names, valid.tolist(), strict=True) if usable)
        mean = statistics.mean[valid].numpy()
        derived = [row for name, row in zip(statistics.names, statistics.mean, strict=True) if name == _DERIVED]
        metadata_bits = np.full(len(names), codec.metadata_bits(self._config.group_size))
        costs = Costs(
            names,
            variance=mean[:, columns.variance],
            sizes=mean[:, columns.numel],
            exact_bits=mean[:, columns.exact_bits],
            metadata_bits=metadata_bits,
            examples=mean[:, columns.examples] if self.policy.example_columns else None,
            derived_size=float(derived[0][columns.numel]) if derived else 0.0,
        )
        return costs, dict(statistics.invalid), failed

    def _weigh(self, forward: Callable[[], Any], *, derives: bool = True) -> StepBytes:
        """The most bytes of each tensor on any rank, for the step to come. derives: as for _footprint()."""
        footprint = self._footprint(forward, derives=derives)
        # a batch as heavy as the heaviest so far may come again
        growth = max(1.0, self._heaviest_bytes / footprint.exact_bytes) if footprint.exact_bytes else 1.0
        rows = [
            *footprint.tensors.values(),
            torch.full((9,), float(footprint.other_bytes), dtype=torch.float64, device="cpu"),
        ]
        names, table = distributed.max_over_groups(
            [*footprint.tensors, _OTHER], torch.stack(rows) * growth, self._groups
        )
        tensors = dict(zip(names, table.numpy(), strict=True))
        other_bytes = float(tensors.pop(_OTHER)[0])
        return StepBytes(tensors, other_bytes)

    def _trial_of(self, now: _Progress) -> Trial:
        return self._trial(now.batch.loss_of_whole, now.step, self._draws + 1, now.batch.unit)

    def _trial(self, forward: Callable[[], Any], step: int, passes: int, unit: float | None) -> Trial:
        """Measures plans on a batch. forward, unit: as loss_of_whole, unit of ProbeBatch."""
        return Trial(partial(self._moments, forward, step, passes, unit), step, relative=unit is not None)

    def _moments(
        self,
        forward: Callable[[], Any],
        step: int,
        passes: int,
        unit: float | None,
        bits: Mapping[str, Bits] | None,
    ) -> tuple[Moments, float]:
        """See Trial.measure."""
        plan = None if bits is None else self._hooks.plan.updated(bits)
        unit = 1.0 if unit is None else unit
        row = [math.nan] * 3

        def work(run: Callable[[], Any]) -> Moments:
            return rounded_moments(self._hooks, self._model, run, plan, passes=passes, draw=step)

        done = self._attempt("measuring the gradient's error", work, [forward], forward)
        if done.result is not None:
            noise = done.result.noise / unit if math.isfinite(done.result.noise) else _OVERFLOW
            row = [noise, done.result.square / unit, unit]
        elif done.ending is Ending.NOT_HERE:
            _log.warning(
                "the gradient's error could not be measured on this rank (%s): it follows from the other ranks, or "
                "the plan stays as it is",
                done.reason,
            )
        values: Tensor = torch.tensor([row], dtype=torch.float64, device="cpu")
        noise, square, unit = distributed.reduce_over([_GRADIENT], values, self._groups).mean[0].tolist()
        return Moments(noise, square), unit


def _row_of(ending: Ending) -> str:
    """The name, which no tensor has, of the row of a rank that could not measure."""
    return f" {ending.name}"


def _most_parts(saved_bytes: float, tensors: int) -> float:
    """How many parts of a batch are worth a measurement of their own, which saves so much in so many tensors."""
    return saved_bytes / (_LEAST_BYTES * max(1, tensors))


def _without(costs: Costs, names: Container[str]) -> Costs:
    """The costs of the other tensors."""
    kept = np.array([name not in names for name in costs.names], dtype=bool)
    return replace(
        costs,
        names=tuple(name for name in costs.names if name not in names),
        variance=costs.variance[kept],
        sizes=costs.sizes[kept],
        exact_bits=costs.exact_bits[kept],
        metadata_bits=costs.metadata_bits[kept],
        examples=None if costs.examples is None else costs.examples[kept],
    )


def _with_exact(step: StepBytes, names: Container[str]) -> StepBytes:
    """The bytes of a step that has no choice about some tensors: they are stored exactly."""
    exact = sum(float(row[-1]) for name, row in step.tensors.items() if name in names)
    return StepBytes({name: row for name, row in step.tensors.items() if name not in names}, step.other_bytes + exact)
