"""What is measured of one saved tensor, and how it follows from what was seen of the gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import codec
from ..hooks import Packer, Recorded


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The measured effect of one saved tensor on the gradient."""

    name: str
    numel: int
    itemsize_bits: int
    variance: Tensor
    """float64 [8]: variance added to the gradient, summed over all parameters, if stored in 1, 2 .. 8 bits"""
    by_perturbation: bool
    samples: NDArray[np.float64] | None = None
    """per_sample.statistics; None for a tensor that is not made of samples, or whose samples have no widths"""


def square_distance(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Squared norm of the difference of two gradients of the same parameters, in the same order."""
    pairs = zip(first, second, strict=True)
    return sum(float((a - b).float().square().sum()) for a, b in pairs if a is not None and b is not None)


def from_change(
    record: Recorded, change: float, rounding: Tensor, bits: int, samples: NDArray[np.float64] | None = None
) -> Sensitivity:
    """From what another seed for one tensor's rounding to some bits did to the gradient; see [Note: perturbation].

    To other widths it is carried by their rounding.
    """
    at_probe = float(rounding[bits - 1])
    variance = rounding * (0.5 * change / at_probe) if at_probe > 0 else torch.zeros(8, dtype=torch.float64)
    return sensitivity_of(record, variance, by_perturbation=True, samples=samples)


def rounding_of(tensor: Tensor, weight: Tensor | None, packer: Packer) -> Tensor:
    """float64 [8]: the rounding variance at 1 to 8 bits, weighted and summed over the tensor."""
    values = codec.stored_values(tensor)
    weights = torch.ones_like(values, dtype=torch.float32) if weight is None else codec.stored_values(weight)
    return codec.rounding_variance(values, weights, packer.group_size, packer.columns_of(tensor)).cpu()


def sensitivity_of(
    record: Recorded, variance: Tensor, by_perturbation: bool, samples: NDArray[np.float64] | None = None
) -> Sensitivity:
    tensor = record.tensor
    return Sensitivity(record.name, tensor.numel(), 8 * tensor.element_size(), variance, by_perturbation, samples)
