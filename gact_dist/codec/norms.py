"""Results of norms made again on a GPU in one pass over memory, where PyTorch's operators take five."""

from contextlib import suppress

import torch
from torch import Tensor

from .._torch_internals import dispatch_modes
from . import cuda
from .nvrtc import KernelsUnavailableError


def normalised(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, in_place: bool
) -> Tensor | None:
    """(x - mean) * rstd * weight + bias in float32, rounded to the type of x; None where there is no kernel for it.

    Args:
        x: rows, as many as rstd has elements, in any shape; float32, float16 or bfloat16.
        mean: of each row, float32; None for 0.
        rstd: of each row, float32.
        weight, bias: of each column, in the type of x; None for 1 and 0.
        in_place: whether the result may take the memory of x.
    """
    vectors = [vector for vector in (weight, bias) if vector is not None]
    if not x.is_cuda or dispatch_modes() or not cuda.can_normalise(x, mean, rstd, vectors):
        return None
    out = x if in_place else torch.empty_like(x)
    with suppress(KernelsUnavailableError):  # the operators of the codec warn
        cuda.normalise(x, mean, rstd, weight, bias, out)
        return out
    return None
