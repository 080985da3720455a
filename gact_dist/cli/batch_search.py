"""The largest batch that fits: which batch to try next, given what became of those tried so far. Pure.

Memory grows nearly in proportion to the batch, so two batches that fit predict the largest; the search then closes in
on the border from both sides, because what an allocator cannot use (fragments) is in no prediction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RESOLUTION = 1 / 32
"""the largest batch that fits and the smallest that does not may differ by this part of the former"""
_LARGEST_STEP = (8, 64)  # times the largest batch that is known to fit; where two are known and predict
_LOST = 1 / 8  # allocators seldom lose more than this part of the memory to fragments
_COARSE = 1 / 16  # at such a resolution, one that fits just below the border ends the search


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What became of a batch in a process of its own."""

    batch: int
    """samples"""
    fits: bool
    peak_bytes: int | None = None
    """most memory that it held at one time; None where nothing counts it"""
    step_s: float | None = None
    """seconds of a training step"""
    reason: str = ""
    """why it does not fit"""
    is_late: bool = False
    """whether that is because it was not over in time"""


def largest(probes: Iterable[Probe]) -> Probe | None:
    """The largest probe that fits."""
    return max((probe for probe in probes if probe.fits), key=lambda probe: probe.batch, default=None)


def next_batch(probes: Sequence[Probe], limit_bytes: int, first: int, resolution: float = RESOLUTION) -> int | None:
    """The batch to try next; None when the largest that fits is known, or a single sample does not fit.

    limit_bytes: memory that there is. first: the batch to begin with. resolution: see RESOLUTION.
    """
    fitting = sorted((probe for probe in probes if probe.fits), key=lambda probe: probe.batch)
    too_large = min((probe.batch for probe in probes if not probe.fits), default=None)
    if not fitting:
        return first if too_large is None else (too_large // 2 or None)
    best = fitting[-1].batch
    least_step = max(1, int(best * resolution))
    if too_large is not None and too_large - best <= least_step:
        return None
    predicted = _predicted(fitting, limit_bytes)
    if too_large is None:
        wanted = 2 * best if predicted is None else max(predicted, best + least_step)
        return min(wanted, _LARGEST_STEP[predicted is not None and len(fitting) > 1] * best)
    if predicted is None or predicted >= too_large:
        first_to_fail = sum(not probe.fits for probe in probes) == 1
        below = _LOST if resolution < _COARSE else resolution / (1 + resolution)
        near = too_large - int(too_large * below) if predicted and first_to_fail else 0
        return max(near, (best + too_large) // 2)
    # a prediction below the border is tried once; after that the border itself is looked for, just above
    return min(max(predicted, best + least_step), too_large - 1)


def _predicted(fitting: list[Probe], limit_bytes: int) -> int | None:
    """The largest batch by the line through the two largest that fit, or through one and the origin."""
    known = [(probe.batch, probe.peak_bytes) for probe in fitting if probe.peak_bytes]
    if not known:
        return None
    batch, peak_bytes = known[-1]
    slope = peak_bytes / batch
    if len(known) > 1:
        slope = (peak_bytes - known[-2][1]) / (batch - known[-2][0])
    if slope <= 0:
        return None
    return int(batch + max(0, limit_bytes - peak_bytes) / slope)
