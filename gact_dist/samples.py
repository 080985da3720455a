"""The part of a batch that an adaptation measures on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
