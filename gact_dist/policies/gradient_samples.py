"""The second moment of the gradient and what rounding adds to it, from samples of a few steps. Imports nothing of ours.

[Note: what must hold] The promise is about means: over the steps under one plan, the mean variance that rounding adds
must not exceed e^2 times the mean squared gradient V^2. Both are estimated from samples, a hundred steps apart where
the interval is the usual one, the mean of the last ten, as AC-GC's authors have it. Two things break a mean of ten. The
gradient may have fallen since the oldest of them: samples that the later ones lie significantly below are dropped, and
what rounding added in their steps with them, for both fall together. And a mean of few samples is uncertain: its
standard error follows from their own spread, and bits are chosen so that the promise holds with one standard error to
spare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

SAMPLES = 10
# Standard errors by which later samples must lie below earlier ones for these to be dropped.
_SIGNIFICANT = 3.0
# Relative standard deviation of a squared gradient over batches that is assumed with the weight of one sample.
_ASSUMED_SPREAD = 0.5


class GradientSamples:
    """Squared gradients of the last samples, and the variance that rounding added under the plan in force."""

    def __init__(self) -> None:
        self._squares: list[float] = []
        self._noise: list[float] = []
        self._relative = False

    def add(self, square: float, noise: float, *, relative: bool) -> None:
        """Add a sample; one that is not finite (an overflow), or of a gradient of zero, is left out.

        square: estimate of the squared norm of the exact gradient; may be negative where noise is large. noise:
        variance that rounding added to it. relative: to the squared gradient at the model's outputs, so that neither
        kind is averaged with the other.
        """
        if not (math.isfinite(square) and math.isfinite(noise)) or square == noise == 0.0:
            return
        if relative != self._relative:
            self._squares, self._noise, self._relative = [], [], relative
        self._squares = [*self._squares, square][-SAMPLES:]
        self._noise = [*self._noise, noise][-SAMPLES:]
        self._drop_stale()

    def renew(self, noise: float) -> None:
        """Another plan is in force. noise: the variance that is expected under it."""
        self._noise = [noise]

    @property
    def second_moment(self) -> float:
        """V^2; zero without a sample."""
        return fmean(self._squares) if self._squares else 0.0

    @property
    def noise(self) -> float:
        """Mean variance that rounding added under the plan in force; zero without a sample."""
        return fmean(self._noise) if self._noise else 0.0

    @property
    def increase(self) -> float:
        """Of the second moment, relative to it; infinite where rounding leaves nothing of the gradient to be seen."""
        return self.noise / self.second_moment if self.second_moment > 0.0 else math.inf

    @property
    def standard_error(self) -> float:
        """Of the increase, as a fraction of it: of both means, as if they varied independently."""
        known = [values for values in (self._squares, self._noise) if values]
        return math.hypot(*(_spread(values) / math.sqrt(len(values)) for values in known))

    def state_dict(self) -> dict[str, Any]:
        """The samples."""
        return {"squares": self._squares, "noise": self._noise, "relative": self._relative}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave."""
        self._squares, self._noise = list(state["squares"]), list(state["noise"])
        self._relative = state["relative"]

    def _drop_stale(self) -> None:
        """Drop the earlier samples where the later ones lie significantly below them, as long as there are such."""
        kept = self._fresh()
        while kept < len(self._squares):
            self._squares, self._noise = self._squares[-kept:], self._noise[-kept:]
            kept = self._fresh()

    def _fresh(self) -> int:
        """How many of the last samples do not lie significantly above those after them."""
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
