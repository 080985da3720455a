"""GELU and SiLU whose gradients are differentiated in place; used only while sensitivity is measured.

See [Note: differentiable replacements] in differentiable_norms.py. For their second derivatives torch composes ten
operators, and of SiLU's gradient it keeps six intermediate tensors. Here they are written out, and some elements at a
time are computed in memory that is used again: nothing of a tensor's size is made but the result.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._torch_internals import is_inside_transform

_AT_ONCE = 1 << 16  # elements, of which a few temporary copies fit a core's cache
Derivatives = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]
"""(the gradient's times the first derivative at x, in torch's own kernel; the second derivative at x, in real type)"""


class _Gradient(Function):
    """grad * f'(x), whose derivatives are written out."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, derivatives: Derivatives) -> Tensor:
        ctx.save_for_backward(grad, x)
        ctx.derivatives = derivatives
        ctx.set_materialize_grads(False)
        return derivatives[0](grad, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if weight is None:
            return None, None, None
        grad, x = ctx.saved_tensors
        first, second = ctx.derivatives
        to_grad = first(weight, x) if ctx.needs_input_grad[0] else None
        return to_grad, _times_second(second, x, weight, grad) if ctx.needs_input_grad[1] else None, None


def _times_second(second: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """f''(x) * weight * grad, of x's type and strides."""
    found = torch.empty_like(x)
    if not _is_dense(found) or any(tensor.stride() != found.stride() for tensor in (x, weight, grad)):
        return found.copy_(second(_real(x)).mul_(weight).mul_(grad))
    pieces = [_flat(tensor).split(_AT_ONCE) for tensor in (found, x, weight, grad)]
    for out, values, some_weight, some_grad in zip(*pieces, strict=True):
        out.copy_(second(_real(values)).mul_(some_weight).mul_(some_grad))
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a piece of memory, each once."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and span == tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _real(x: Tensor) -> Tensor:
    """In the type in which torch computes such functions."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _gelu_second(x: Tensor) -> Tensor:
    """(2 - x^2) * the normal density."""
    square = x * x
    density = (square * -0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    return square.neg_().add_(2.0).mul_(density)


_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gelu_tanh_second(x: Tensor) -> Tensor:
    """(1 - t^2) (u' + x u''/2 - x t u'^2), where t = tanh u and u = slope * (x + cubic x^3)."""
    square = x * x
    t = (square * _CUBIC).add_(1.0).mul_(x).mul_(_SLOPE).tanh_()
    du = (square * (3.0 * _CUBIC)).add_(1.0).mul_(_SLOPE)
    found = square.mul_(3.0 * _CUBIC * _SLOPE).add_(du)  # x u'' / 2 is 3 cubic slope x^2
    found.addcmul_(du.square_().mul_(x), t, value=-1.0)
    return found.mul_(t.square_().neg_().add_(1.0))


def _silu_second(x: Tensor) -> Tensor:
    """s (1 - s) (2 + x (1 - 2 s)), where s = sigmoid(x)."""
    s = x.sigmoid()
    found = (s * -2.0).add_(1.0).mul_(x).add_(2.0)
    return found.mul_(s.addcmul_(s, s.clone(), value=-1.0))


def _gelu_times_first(approximate: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


_GELU: dict[str, Derivatives] = {
    "none": (_gelu_times_first("none"), _gelu_second),
    "tanh": (_gelu_times_first("tanh"), _gelu_tanh_second),
}
_SILU: Derivatives = torch.ops.aten.silu_backward, _silu_second


class Gelu(Function):
    """The Gaussian error linear unit (Hendrycks and Gimpel, 2016), exact or approximated with tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.derivatives = _GELU[approximate]
        ctx.set_materialize_grads(False)  # zeros would be work for nothing
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return _gradient(ctx, grads[0], ctx.derivatives), None


class Silu(Function):
    """x * sigmoid(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return _gradient(ctx, grads[0], _SILU)


def _gradient(ctx: Any, grad: Tensor | None, derivatives: Derivatives) -> Tensor | None:
    if grad is None:
        return None
    (x,) = ctx.saved_tensors
    return _Gradient.apply(grad, x, derivatives)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    if not _is_plain(input):
        return F.gelu(input, approximate=approximate)
    return Gelu.apply(input, approximate)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    return F.silu(input, inplace) if inplace or not _is_plain(input) else Silu.apply(input)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and not is_inside_transform(x) and not x.is_sparse and not x.is_nested
