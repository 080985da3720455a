"""Differentiable stand-ins for fused operators, used only while sensitivity is measured.

[Note: stand-ins] Sensitivity is the derivative of the gradient with respect to each *saved* tensor, taken as an
independent input of the backward pass. The second derivatives that torch has for fused normalisations treat the saved
mean and rstd as functions of the input (they over-estimate it by 1.2x to 1.4x), and fused attention has none. Each
stand-in runs the same forward kernel, saves the same tensors under the same names, and has a backward written in
differentiable operations on what was saved.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.attention import SDPBackend

from .operators import OperatorObserver


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
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
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
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
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
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
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


class ScaledDotProductAttention(Function):
    """Fused attention; backward as in FlashAttention (Dao et al., 2022, appendix B.4), from q, k, v, out, logsumexp.

    query [B, H, T, E], key and value [B, Hk, S, E], with H a multiple of Hk; mask additive or None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, gqa: bool
    ) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        logsumexp = torch.logsumexp(_scores(q, k, mask, causal, scale), -1)
        ctx.save_for_backward(mask, q, k, v, logsumexp, out)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        mask, q, k, v, _, out = ctx.saved_tensors
        grad, out = grads[0].float(), out.float()
        repeats = q.shape[1] // k.shape[1]
        probability = torch.softmax(_scores(q, k, mask, ctx.causal, ctx.scale), -1)  # as a fitted logsumexp has it
        dv = probability.transpose(-2, -1) @ grad
        dprobability = grad @ _repeat(v, repeats).transpose(-2, -1)
        dscores = probability * (dprobability - (grad * out).sum(-1, keepdim=True)) * ctx.scale
        dq = dscores @ _repeat(k, repeats)
        dk = dscores.transpose(-2, -1) @ q.float()
        return dq.to(q.dtype), _fold(dk, repeats).to(k.dtype), _fold(dv, repeats).to(v.dtype), None, None, None, None


def _repeat(x: Tensor, repeats: int) -> Tensor:
    return x.float().repeat_interleave(repeats, 1) if repeats > 1 else x.float()


def _fold(grad: Tensor, repeats: int) -> Tensor:
    return grad.unflatten(1, (-1, repeats)).sum(2) if repeats > 1 else grad


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ _repeat(k, q.shape[1] // k.shape[1]).transpose(-2, -1) * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    return LayerNorm.apply(input, weight, bias, list(normalized_shape), eps)


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return BatchNorm.apply(input, weight, bias, running_mean, running_var, training, momentum, eps)


def _group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return GroupNorm.apply(input.contiguous(), weight, bias, num_groups, eps)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    backend = torch._fused_sdp_choice(query, key, value, attn_mask, dropout_p, **options)
    if backend == SDPBackend.MATH.value or dropout_p > 0.0:
        # the math backend is differentiable twice; fused dropout cannot be replayed and is left to perturbation
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return ScaledDotProductAttention.apply(query, key, value, attn_mask, is_causal, factor, enable_gqa)


STAND_INS: dict[Callable, Callable] = {
    F.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.scaled_dot_product_attention: _attention,
}
"""Functions of torch.nn.functional that are replaced while sensitivity is measured."""


class StandInMode(OperatorObserver):
    """An observer that puts the stand-ins in place of fused operators, and keeps the root of a backward call instead
    of running it (so that a closure which ends in loss.backward() can be measured without touching any .grad)."""

    def __init__(self) -> None:
        super().__init__()
        self.root: Tensor | None = None

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if function is Tensor.backward:
            self.root = args[0]
            return None
        return STAND_INS.get(function, function)(*args, **kwargs)
