"""Layer, batch and group normalisation whose gradients can be differentiated; used only while sensitivity is measured.

[Note: differentiable replacements] Sensitivity is the derivative of the gradient with respect to each *saved* tensor,
taken as an independent input of the backward pass. The second derivatives that torch has for fused normalisations treat
the saved mean and rstd as functions of the input (they over-estimate it by 1.2x to 1.4x), and fused attention has none.
Each replacement runs the same forward kernel, saves the same tensors under the same names, and has a backward written
in differentiable operations on what was saved. Names of saved tensors in plans hold the names of these classes.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch_internals import verify_batch_size


class LayerNorm(Function):
    """Layer normalisation (Ba et al., 2016) over the last len(shape) dimensions."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int], eps: float
    ) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.dims = tuple(range(x.dim() - len(shape), x.dim()))
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)  # zeros would be work for nothing, and plain tensors for DTensors as well
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if grads[0] is None:
            return (None,) * 5
        x, weight, mean, rstd = ctx.saved_tensors
        return *_normalised_backward(grads[0], x, weight, mean, rstd, ctx.dims, ctx.dims, ctx.has_bias), None, None


class BatchNorm(Function):
    """Batch normalisation (Ioffe and Szegedy, 2015); x is [N, C, ...], statistics are per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
        running_mean, running_var, training, momentum, eps = rest
        out, mean, rstd = torch.native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
        if not training:
            mean, rstd = running_mean, torch.rsqrt(running_var + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.training, ctx.has_bias = training, bias is not None
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if grads[0] is None:
            return (None,) * 8
        x, weight, mean, rstd = ctx.saved_tensors
        channel = [1, -1] + [1] * (x.dim() - 2)
        dims = (0, *range(2, x.dim()))
        mean, rstd = mean.view(channel), rstd.view(channel)
        scale = None if weight is None else weight.view(channel)
        centred = dims if ctx.training else ()
        dx, dweight, dbias = _normalised_backward(grads[0], x, scale, mean, rstd, centred, (1,), ctx.has_bias)
        flat = [None if d is None else d.view(-1) for d in (dweight, dbias)]
        return dx, *flat, None, None, None, None, None


class GroupNorm(Function):
    """Group normalisation (Wu and He, 2018); x is [N, C, ...], statistics are [N, groups]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        batch, channels = x.shape[:2]
        out, mean, rstd = torch.native_group_norm(x, weight, bias, batch, channels, math.prod(x.shape[2:]), groups, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.has_bias = groups, bias is not None
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if grads[0] is None:
            return (None,) * 5
        x, weight, mean, rstd = ctx.saved_tensors
        grouped = (x.shape[0], ctx.groups, x.shape[1] // ctx.groups, -1)
        statistic = (x.shape[0], ctx.groups, 1, 1)
        scale = None if weight is None else weight.view(1, ctx.groups, -1, 1)
        dx, dweight, dbias = _normalised_backward(
            grads[0].reshape(grouped), x.reshape(grouped), scale, mean.view(statistic), rstd.view(statistic),
            (2, 3), (1, 2), ctx.has_bias,
        )  # fmt: skip
        flat = [None if d is None else d.reshape(-1) for d in (dweight, dbias)]
        return dx.reshape(x.shape), *flat, None, None


def _normalised_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centred: tuple[int, ...], kept: tuple[int, ...], has_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of y = (x - mean) * rstd * weight + bias, in which mean and rstd were computed over dims `centred`.

    The gradients of weight and bias keep the dims `kept`; all others are summed.
    """
    dtype = x.dtype
    grad, x = grad.to(rstd.dtype), x.to(rstd.dtype)
    normalised = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight
    summed = tuple(d for d in range(x.dim()) if d not in kept)
    dweight = None if weight is None else (grad * normalised).sum(summed).to(weight.dtype)
    dbias = grad.sum(summed) if has_bias else None
    if centred:
        scaled = scaled - scaled.mean(centred, True) - normalised * (scaled * normalised).mean(centred, True)
    return (scaled * rstd).to(dtype), dweight, dbias


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    return LayerNorm.apply(input, weight, bias, list(normalized_shape), eps)


def batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if training:
        verify_batch_size(input.shape)
    return BatchNorm.apply(input, weight, bias, running_mean, running_var, training, momentum, eps)


def group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    batch, channels, *positions = input.shape
    verify_batch_size([batch * channels // num_groups, num_groups, *positions])
    return GroupNorm.apply(input.contiguous(), weight, bias, num_groups, eps)
