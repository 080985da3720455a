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
    whole_is_loss: bool
    """whether that returns the loss; else second moments come from the job's own backward"""
