"""The part of a batch that an adaptation measures on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..hooks import first_samples
from .observation import Observation


@dataclass(frozen=True)
class Sample:
    """The part of a batch to measure on."""

    loss: Callable[[], Tensor | None]
    """runs the model on it and returns the scalar loss, or calls backward on it"""
    fraction: float
    """of the batch's samples that it has"""
    whole: Callable[[], Any]
    """runs the model on the whole batch, as the step to come will"""
    loss_of_whole: Callable[[], Tensor | None]
    """runs the model on a whole batch and returns its loss, or calls backward on it"""
    unit: float | None = None
    """where the job may have scaled that loss: its squared gradient at the model's outputs, which has the same scale"""
    count: int = sys.maxsize
    """samples that were asked for, the same on all ranks; a batch may have fewer"""
    first: "Callable[[int], Sample] | None" = None
    """the same of another number of samples"""

    def half(self) -> "Sample | None":
        """Half as many samples, for where memory is too little; None where all of the batch is needed, or one is left.

        So all ranks part with theirs at the same time, whatever the sizes of their batches.
        """
        if self.first is None or self.count == sys.maxsize or self.count == 1:
            return None
        return self.first(self.count // 2)


def of_batch(loss_fn: Callable[[Any], Tensor], batch: Any, samples: int) -> Sample:
    """The first samples of a batch."""
    part, fraction = first_samples(batch, samples)
    loss = partial(loss_fn, batch)
    again = partial(of_batch, loss_fn, batch)
    return Sample(partial(loss_fn, part), fraction, loss, loss, count=samples, first=again)


def of_observation(
    observation: Observation, model: nn.Module, whole: Callable[[], Any], samples: int, unit: float | None
) -> Sample:
    """The first samples of a forward that was observed. whole: runs the forward to come."""
    part = observation.first(samples)
    return Sample(
        loss=partial(part.loss, model),
        fraction=part.fraction,
        whole=whole,
        loss_of_whole=partial(observation.loss, model),
        unit=unit,
        count=samples,
        first=lambda fewer: of_observation(observation, model, whole, fewer, unit),
    )
