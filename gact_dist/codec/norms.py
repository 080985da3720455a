"""Results of norms made again in one pass over memory, where PyTorch's operators take two to five."""

from contextlib import suppress

import torch
from torch import Tensor

from .._torch_internals import dispatch_modes, innermost_transform
from . import cuda, ops
from .nvrtc import KernelsUnavailableError


def normalised(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, in_place: bool
) -> Tensor | None:
    """(x - mean) * rstd * weight + bias in float32, rounded to the type of x; None where there is no kernel for it.

    Args:
        x: rows, as many as rstd has elements, in any shape; float32 or bfloat16, on a GPU float16 as well.
        mean: of each row, float32; None for 0.
        rstd: of each row, float32.
        weight, bias: of each column, in the type of x; None for 1 and 0.
        in_place: whether the result may take the memory of x.
    """
    if type(x) is not Tensor or dispatch_modes() or innermost_transform() is not None:
        return None
    vectors = [vector for vector in (weight, bias) if vector is not None]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, rstd, *vectors)):
        return None
    kernels = ops if x.is_cpu else cuda
    if not (x.is_cpu or x.is_cuda) or not kernels.can_normalise(x, mean, rstd, vectors):
        return None
    out = x if in_place else torch.empty_like(x)
    with suppress(KernelsUnavailableError):  # the operators of the codec warn
        kernels.normalise(x, mean, rstd, weight, bias, out)
        return out
    return None
