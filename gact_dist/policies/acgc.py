"""Policy acgc: the fewest bits whose increase of the gradient's second moment is tolerated (AC-GC).

AC-GC (Evans and Aamodt, NeurIPS 2021; equation 16 of its supplement): if the compressed gradient is unbiased and its
variance is at most e^2 V^2, where V^2 = E|g|^2 is the second moment of the stochastic gradient g, then the second
moment of the compressed gradient is at most (1 + e^2) V^2, and SGD's bound on the loss grows by no more than that.

Sensitivities rank the plans. What a plan adds is measured on the whole batch of an adaptation before the plan is used,
because sensitivities predict too little where a backward responds to rounding more than linearly. Between adaptations,
draws of the gradient check the error bound; a draw that finds it exceeded causes an adaptation.

[Note: what must hold] The bound is on means: over the steps under one plan, the mean variance that rounding adds must
not exceed e^2 times the mean squared gradient V^2. Both are estimated from draws, a hundred steps apart with the
default interval, as means of the last ten, following AC-GC's authors. Three things can make such means wrong. Squared
gradients fall while a model trains, and with them what rounding adds: each draw is divided by the squared gradients
around it, or the oldest would decide, and draws that lie significantly above the later ones are dropped. The increase
itself rises meanwhile: later draws count for more. And few draws are uncertain: bits are chosen so that the bound holds
with one standard error to spare. A new plan adds so many times the variance of the one before as it does on the batch
that both are measured on, and the draws are taken to have had that plan: what is divided is always of the same steps.

[Note: room to grow] If the gradient shrinks while bits stay the same, the increase grows under a plan. The next plan
leaves room for the growth under the last ones: the increase over a plan's steps, divided by the increase that was
measured when the plan was made.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from .. import _fields
from ..config import Config
from ..distributed import say, say_once
from .allocation import WIDTHS, Allocation, minimum_bits
from .base import Choice, Costs, GradientError, Policy, Trial, evaluate
from .plan import Plan

_log = logging.getLogger(__name__)
_CAUTIOUS_BITS = 8  # with an error bound, and nothing measured yet
DRAWS = 10
_MOST_GROWTH = 4.0  # for which room is left: a bit of every tensor
_SURER = 0.45  # of the standard error that a plan was made with: one draw's falls to it with the third to fifth


class Acgc(Policy):
    """The fewest bits within Config.error, and what is known about the gradient."""

    adapts = True
    follows_gradient = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.error_bounded = config.compressor == "error-bounded"
        self._tolerated = config.error or 0.0
        self._draws = GradientDraws()
        self._bounded = False  # whether the current plan was measured to keep to the bound
        self._standard_error = 0.0
        self._planned = 0.0  # the increase that was measured when the current plan was made
        self._growth = 1.0  # see [Note: room to grow]
        self._drawn_at = 0

    @property
    def first_plan(self) -> Plan:
        """See Policy.first_plan."""
        return Plan(default=_CAUTIOUS_BITS)

    @property
    def due(self) -> bool:
        """Whether the draws since the plan was made call for another: they exceed the error bound, or there are so
        many more of them that fewer bits may do."""
        exceeded = self._draws.increase > self._tolerated
        return self._bounded and (exceeded or self._draws.standard_error <= _SURER * self._standard_error)

    def choose(self, costs: Costs, current: Plan, trial: Trial) -> Choice | None:
        """The fewest bits whose measured error is within the bound; None if nothing can be measured."""
        self._drawn_at, self._bounded = trial.step, False
        draws = self._draws
        before, unit = trial.measure(None)
        square = before.square
        if before.noise >= square:  # more noise than gradient
            square = trial.measure(dict.fromkeys(costs.names, WIDTHS))[0].square
        draws.add(square, before.noise, relative=trial.relative)
        second_moment = draws.second_moment
        if math.isnan(before.noise):
            return None
        if not second_moment > 0.0:
            say_once(_log, "the gradient is zero or was not finite on any rank: the plan stays as it is")
            return None
        measured_before = draws.increase
        self._warn_of(measured_before, current)
        self._learn_growth(measured_before)
        # the increase that a variance stands for which is measured on this batch
        known = before.noise > 0.0 and math.isfinite(measured_before)
        scale = measured_before / before.noise if known else 1.0 / second_moment
        self._standard_error = draws.standard_error
        limit = self._tolerated / (1.0 + self._standard_error) / self._growth / scale

        def noise_of(plan: Allocation) -> float:
            measured = trial.measure(costs.bits(plan))[0].noise
            return math.inf if math.isnan(measured) else measured

        found = fewest_bits(costs, limit, noise_of, start=limit * unit)
        kept = self._settled(costs, current, found) if before.noise <= limit else None
        allocation = found.allocation if kept is None else kept
        draws.renew((found.noise if kept is None else before.noise) * scale)
        predicted = allocation.variance / unit * scale
        error = GradientError(self._tolerated, predicted, draws.increase, measured_before, unit * second_moment)
        self._bounded, self._planned = error.holds, error.measured
        self._tell(error, allocation)
        return Choice(
            costs.bits(allocation),
            current.default,
            allocation.variance,
            allocation.average_bits,
            error,
            kept is not None,
        )

    def drawing_due(self, step: int) -> bool:
        """Whether this step should draw its gradient: ten times per interval, more often in the first steps."""
        return step - self._drawn_at >= max(1, min(self.config.adapt_interval // DRAWS, self._drawn_at))

    def add_draw(self, trial: Trial) -> None:
        """See Policy.add_draw."""
        self._drawn_at = trial.step
        moments, _ = trial.measure(None)
        self._draws.add(moments.square, moments.noise, relative=trial.relative)
        _log.info(
            "step %d: compression has increased the gradient's second moment by %.3g on average since the plan was "
            "made (error=%g is tolerated)",
            trial.step,
            self._draws.increase,
            self._tolerated,
        )

    def state_dict(self) -> dict[str, Any]:
        """The draws, and what they need to go on."""
        return {
            "samples": self._draws.state_dict(),
            "sampled_at": self._drawn_at,
            "promised": self._bounded,
            "standard_error": self._standard_error,
            "planned": self._planned,
            "growth": self._growth,
        }

    def parse_state(self, state: Any) -> Acgc | None:
        """See Policy.parse_state; None where the state is another policy's."""
        if state is None:
            return None
        parsed, fields = Acgc(self.config), _fields.mapping(_fields.anything)("error_budget", state)
        parsed._draws = GradientDraws.from_state(_fields.read(fields, "samples", _fields.anything, {}))
        parsed._drawn_at = _fields.read(fields, "sampled_at", _fields.integer(0), 0)
        parsed._bounded = _fields.read(fields, "promised", _fields.flag, False)
        parsed._standard_error = _fields.read(fields, "standard_error", _fields.number(0.0), 0.0)
        parsed._planned = _fields.read(fields, "planned", _fields.number(), 0.0)
        parsed._growth = _fields.read(fields, "growth", _fields.number(1.0), 1.0)
        return parsed

    def load_state(self, parsed: Acgc | None) -> None:
        """See Policy.load_state."""
        if parsed is not None:
            vars(self).update(vars(parsed))

    def _learn_growth(self, increase: float) -> None:
        """increase: the mean under the current plan; it counts as much as all earlier plans together."""
        if self._planned > 0.0 and increase > 0.0:
            seen = min(increase / self._planned, _MOST_GROWTH)
            self._growth = max(1.0, math.sqrt(self._growth * seen))

    def _settled(self, costs: Costs, current: Plan, found: Found) -> Allocation | None:
        """The current bits, if fresh ones would gain too little and are not a uniform width that takes less."""
        kept = settled(self.config.adapt_tolerance, costs, current, found.allocation)
        if kept is None or (found.uniform and kept.average_bits > found.allocation.average_bits):
            return None
        return kept

    def _warn_of(self, measured: float, current: Plan) -> None:
        if current.bits and not measured <= self._tolerated:
            say(
                _log,
                "compression increased the gradient's second moment by %.3g (error=%g was tolerated); bits are raised",
                measured,
                self._tolerated,
            )

    def _tell(self, error: GradientError, allocation: Allocation) -> None:
        say(_log, "increase of the gradient's second moment: %s", error, level=logging.INFO)
        if not error.holds:
            say(
                _log,
                "compression increases the gradient's second moment by %.3g on the batch of this adaptation, but only "
                "error=%g is tolerated: %.3g bits on average do not reach it",
                error.measured,
                self._tolerated,
                allocation.average_bits,
            )


def settled(tolerance: float, costs: Costs, current: Plan, fresh: Allocation) -> Allocation | None:
    """The current bits, if fresh ones take fewer by no more than a tolerated fraction; or None.

    The caller has to know, from what was measured, that they keep to the error bound.
    """
    kept, new = evaluate(costs, current.in_one_width().bits), evaluate(costs, costs.bits(fresh))
    if kept is None or new is None:
        return None
    return kept if kept.average_bits < new.average_bits * (1.0 + tolerance) else None


# -- draws of the gradient --------------------------------------------------------------------------------------

# Earlier draws are dropped if later ones lie below them by more than this many standard errors.
_SIGNIFICANT = 3.0
# Prior for the relative standard deviation of either number of a draw, with the weight of one draw.
_ASSUMED_SPREAD = 0.5
# How much less a draw counts than the one after it: half as much as the third after it.
_FADING = 0.5 ** (1 / 3)


class GradientDraws:
    """The last draws of the gradient, and the variance that rounding adds to each under the current plan.

    See [Note: what must hold].
    """

    def __init__(self) -> None:
        self._squares: list[float] = []
        self._noise: list[float] = []
        self._relative = False

    def add(self, square: float, noise: float, *, relative: bool) -> None:
        """Add a draw; one that is not finite (an overflow), or of a gradient of zero, is left out.

        square: estimate of the squared norm of the exact gradient; may be negative where noise is large. noise:
        variance that rounding added to it. relative: to the squared gradient at the model's outputs, so that neither
        kind is averaged with the other.
        """
        if not (math.isfinite(square) and math.isfinite(noise)) or square == noise == 0.0:
            return
        if relative != self._relative:
            self._squares, self._noise, self._relative = [], [], relative
        self._squares = [*self._squares, square][-DRAWS:]
        self._noise = [*self._noise, noise][-DRAWS:]
        self._drop_stale()

    def renew(self, increase: float) -> None:
        """There is another plan. increase: that is expected under it."""
        before = self.increase
        if before > 0.0 and math.isfinite(before):
            self._noise = [noise * increase / before for noise in self._noise]
        else:
            self._noise = [abs(square) * increase for square in self._squares]

    @property
    def second_moment(self) -> float:
        """V^2; zero without a draw."""
        return fmean(self._squares) if self._squares else 0.0

    @property
    def increase(self) -> float:
        """The relative increase of the second moment; zero without a draw, infinite if noise hides the gradient."""
        if not self._squares:
            return 0.0
        weights = self._recent() / self._scales()
        square = float(weights @ self._squares)
        return float(weights @ self._noise) / square if square > 0.0 else math.inf

    @property
    def standard_error(self) -> float:
        """Standard error of the increase, as a fraction of it: from how far the draws lie from it."""
        increase, count = self.increase, len(self._squares)
        if not count:
            return 2**0.5 * _ASSUMED_SPREAD
        apart = np.zeros(count)
        if 0.0 < increase < math.inf:
            apart = (np.array(self._noise) / increase - self._squares) / self._scales()
        variance = (2 * _ASSUMED_SPREAD**2 + float(apart @ apart)) / count
        recent = self._recent()
        return math.sqrt(variance * float(recent @ recent)) / float(recent.sum())

    def state_dict(self) -> dict[str, Any]:
        """The draws."""
        return {"squares": self._squares, "noise": self._noise, "relative": self._relative}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> GradientDraws:
        """The draws that state_dict() was called on. Raises StateError."""
        draws, fields = GradientDraws(), _fields.mapping(_fields.anything)("samples", state)
        numbers = _fields.sequence(_fields.number())
        squares, noise = (_fields.read(fields, name, numbers, []) for name in ("squares", "noise"))
        count = min(len(squares), len(noise))
        draws._squares, draws._noise = squares[len(squares) - count :], noise[len(noise) - count :]
        draws._relative = _fields.read(fields, "relative", _fields.flag, False)
        return draws

    def _recent(self) -> np.ndarray:
        """How much each draw counts by its age."""
        return _FADING ** np.arange(len(self._squares) - 1, -1, -1)

    def _scales(self) -> np.ndarray:
        """The size of the squared gradients around each draw."""
        squares = np.abs(self._squares)
        around = [squares[max(0, number - 1) : number + 2].mean() for number in range(len(squares))]
        return np.maximum(around, np.finfo(float).tiny)

    def _drop_stale(self) -> None:
        """Drop earlier draws as long as later ones lie significantly below them."""
        kept = self._fresh()
        while kept < len(self._squares):
            self._squares, self._noise = self._squares[-kept:], self._noise[-kept:]
            kept = self._fresh()

    def _fresh(self) -> int:
        """How many of the last draws do not lie significantly above those after them."""
        spread, count = _spread(self._squares) * abs(self.second_moment), len(self._squares)
        best, kept = _SIGNIFICANT, count
        for later in range(1, count):
            fall = fmean(self._squares[:-later]) - fmean(self._squares[-later:])
            significance = fall / (spread * math.sqrt(1.0 / later + 1.0 / (count - later)))
            if significance > best:
                best, kept = significance, later
        return kept


def _spread(values: Sequence[float]) -> float:
    """Relative standard deviation, from the differences of successive values, which a drift hardly changes."""
    steps = [(later - earlier) ** 2 / 2.0 for earlier, later in itertools.pairwise(values)]
    mean = fmean(values)
    return math.sqrt(fmean([_ASSUMED_SPREAD**2, *(step / mean**2 for step in steps)])) if mean else _ASSUMED_SPREAD


# -- the plan of the fewest bits, by measuring a few of them ----------------------------------------------------

_TRIES = 8
_CLOSE = 0.9  # a plan that adds so much of what it may is not searched on for fewer bits
# A quarter of the variance is one bit more: where a backward overflows at some width, the next one may well do.
_LARGEST_CHANGE = 4.0


@dataclass(frozen=True, slots=True)
class Found:
    """A plan and what was measured of it."""

    allocation: Allocation
    noise: float
    """variance that it adds"""
    uniform: bool = False
    """whether it is one width for all tensors"""


def fewest_bits(costs: Costs, limit: float, noise_of: Callable[[Allocation], float], *, start: float) -> Found:
    """Of the plans tried, the one with the fewest bits that adds at most `limit`; if none does, the least noisy one.

    noise_of: measures the variance that a plan adds, in the units of limit. start: the variance to allocate first, in
    the units of costs, which predict variances up to a factor that depends on the width. Plans are allocated to a
    variance, which is raised or cut until the measured one is close to the limit; then the uniform widths that take
    fewer bits are tried.
    """
    tried = _allocated(costs, limit, noise_of, start)
    best = _best(tried, limit)
    for bits in range(WIDTHS, 0, -1):
        uniform = evaluate(costs, dict.fromkeys(costs.names, bits))
        if uniform is None or not uniform.average_bits < best.allocation.average_bits or best.noise > limit:
            continue
        found = Found(uniform, noise_of(uniform), uniform=True)
        if not found.noise <= limit:
            break
        best = found
    return best


def _allocated(costs: Costs, limit: float, noise_of: Callable[[Allocation], float], start: float) -> list[Found]:
    tried: list[Found] = []
    budget, kept, broke = start, 0.0, math.inf
    while len(tried) < _TRIES:
        allocation = minimum_bits(
            costs.variance,
            costs.sizes,
            variance_budget=budget,
            exact_bits=costs.exact_bits,
            metadata_bits=costs.metadata_bits,
        )
        if any(np.array_equal(allocation.bits, other.allocation.bits) for other in tried):
            break
        found = Found(allocation, noise_of(allocation))
        tried.append(found)
        if found.noise <= limit:
            kept = budget
            if found.noise > _CLOSE * limit:
                break
        else:
            broke = budget = min(budget, allocation.variance)  # what is allocated may stay far below
        change = limit / found.noise if found.noise > 0.0 else _LARGEST_CHANGE
        budget *= min(_LARGEST_CHANGE, max(1.0 / _LARGEST_CHANGE, change))
        if not kept < budget < broke:
            budget = math.sqrt(kept * broke)
    return tried


def _best(tried: list[Found], limit: float) -> Found:
    keeping = [found for found in tried if found.noise <= limit]
    if keeping:
        return min(keeping, key=lambda found: found.allocation.average_bits)
    return min(tried, key=lambda found: found.noise)
