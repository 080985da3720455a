"""Differentiable stand-ins for fused operators, used only while sensitivity is measured.

[Note: stand-ins] Sensitivity is the derivative of the gradient with respect to each *saved* tensor, taken as an
independent input of the backward pass. The second derivatives that torch has for fused normalisations treat the saved
mean and rstd as functions of the input (they over-estimate it by 1.2x to 1.4x), and fused attention has none. Each
stand-in runs the same forward kernel, saves the same tensors under the same names, and has a backward written in
differentiable operations on what was saved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from ..hooks import OperatorObserver

_BLOCK = 2**23  # scores, in float32 32 MiB; the derivative holds some ten times as much


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
    """Fused attention; backward as in FlashAttention (Dao et al., 2022, appendix B.4), from q, k, v and the output.

    query [B, H, T, E], key and value [B, Hk, S, E], with H a multiple of Hk; mask additive or None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, gqa: bool
    ) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        for block in _blocks(q, k):
            queries, keys = block.of([q, k], first=2)
            logsumexp[block.queries] = torch.logsumexp(_scores(queries, keys, block.mask(mask, causal), scale), -1)
        ctx.save_for_backward(mask, q, k, v, logsumexp, out)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        mask, q, k, v, _, out = ctx.saved_tensors
        tensors = [out, grads[0], q, k, v]
        if not ctx.needs_input_grad[3]:
            return *_AttentionGradient.apply(mask, ctx.causal, ctx.scale, *tensors), None, None, None, None
        learned = mask[(None,) * (4 - mask.dim())]
        *found, dmask = _AttentionGradient.apply(None, ctx.causal, ctx.scale, *tensors, learned)
        return *found, dmask.view(mask.shape), None, None, None


class _AttentionGradient(Function):
    """The gradients of query, key, value and a learned mask, whose derivative holds the scores of a block at a time.

    What autograd would keep for it are some ten matrices of the size of the scores, in every layer at once.
    """

    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, causal: bool, scale: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        """tensors: output and its gradient, query, key, value, and a mask that is learned, in four dimensions."""
        ctx.save_for_backward(mask, *tensors)
        ctx.causal, ctx.scale = causal, scale
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors[2:]]
        for block in _blocks(*tensors[2:4]):
            block.add(sums, _block_gradients(block.mask(mask, causal), scale, *block.of(tensors)), first=2)
        return tuple(total.to(tensor.dtype) for total, tensor in zip(sums, tensors[2:], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *weights: Tensor) -> tuple:
        mask, *tensors = ctx.saved_tensors
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        for block in _blocks(*tensors[2:4]):
            with torch.enable_grad():
                inputs = [part.detach().float().requires_grad_() for part in block.of(tensors)]
                gradients = _block_gradients(block.mask(mask, ctx.causal), ctx.scale, *inputs)
            parts = [part.float() for part in block.of(weights, first=2)]
            block.add(sums, torch.autograd.grad(gradients, inputs, parts))
        return None, None, None, *(total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True))


@dataclass(frozen=True)
class _Block:
    """Rows of some heads of some samples, with all keys of these heads."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice]
    scores: tuple[int, int, int, int]
    """shape of all scores, [B, H, T, S]"""
    device: torch.device

    def of(self, tensors: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """Parts of output, its gradient, query, key, value, learned mask, or of those from `first` on."""
        return [tensor[where] for tensor, where in self._places(tensors, first)]

    def add(self, sums: Sequence[Tensor], parts: Sequence[Tensor], first: int = 0) -> None:
        """Add what was found for these parts."""
        for (total, where), part in zip(self._places(sums, first), parts, strict=True):
            total[where] += part

    def _places(self, tensors: Sequence[Tensor], first: int) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Each with what the block has of it: all of a dimension that a mask has once for all."""
        places = (self.queries, self.queries, self.queries, self.keys, self.keys, self.queries)
        for tensor, place in zip(tensors, places[first:], strict=False):
            sizes = zip(tensor.shape, place, strict=False)
            yield tensor, tuple(slice(None) if size == 1 else where for size, where in sizes)

    def mask(self, mask: Tensor | None, causal: bool) -> Tensor | None:
        """Its part of the mask, which is made here if it is the causal one."""
        if causal:
            rows, columns = range(self.scores[2])[self.queries[2]], self.scores[3]
            return torch.ones(len(rows), columns, dtype=torch.bool, device=self.device).tril(rows.start)
        return None if mask is None else mask.expand(self.scores)[self.queries]


def _blocks(q: Tensor, k: Tensor) -> Iterator[_Block]:
    """Blocks of at most _BLOCK scores, or of one row: of whole samples, else of whole heads, else of rows."""
    (samples, heads, rows, _), key_heads, columns = q.shape, k.shape[1], k.shape[2]
    repeats = heads // key_heads
    at_once = max(1, _BLOCK // max(1, repeats * columns))  # rows of a key's head
    whole = max(1, rows)
    for sample in _slices(samples, at_once // (key_heads * whole)):
        for head in _slices(key_heads, at_once // whole):
            theirs = slice(head.start * repeats, head.stop * repeats)
            for row in _slices(rows, at_once):
                yield _Block((sample, theirs, row), (sample, head), (samples, heads, rows, columns), q.device)


def _slices(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, total, size))


def _block_gradients(
    mask: Tensor | None, scale: float, out: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor
) -> tuple[Tensor, ...]:
    """Of the query and a learned mask, and what these queries give the key and the value."""
    grad, repeats = grad.float(), q.shape[1] // k.shape[1]
    scores = _scores(q, k, learned[0] if learned else mask, scale)
    probability = torch.softmax(scores, -1)  # as a fitted logsumexp has it
    dv = probability.transpose(-2, -1) @ grad
    dprobability = grad @ _repeat(v, repeats).transpose(-2, -1)
    dscores = probability * (dprobability - (grad * out.float()).sum(-1, keepdim=True))
    dmask = [dscores.sum_to_size(x.shape) for x in learned]
    dscores = dscores * scale
    dk = dscores.transpose(-2, -1) @ q.float()
    return dscores @ _repeat(k, repeats), _fold(dk, repeats), _fold(dv, repeats), *dmask


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = q.float() @ _repeat(k, q.shape[1] // k.shape[1]).transpose(-2, -1) * scale
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _repeat(x: Tensor, repeats: int) -> Tensor:
    return x.float().repeat_interleave(repeats, 1) if repeats > 1 else x.float()


def _fold(grad: Tensor, repeats: int) -> Tensor:
    return grad.unflatten(1, (-1, repeats)).sum(2) if repeats > 1 else grad


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
