"""Fused attention whose gradients can be differentiated, in blocks; used only while sensitivity is measured.

See [Note: differentiable replacements] in differentiable_norms.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from .._torch_internals import attention_kernel

_LEAST_BLOCK, _LARGEST_BLOCK = 2**18, 2**23  # scores in float32; the derivative holds six times as much
_CAUSAL_BLOCKS, _LEAST_ROWS = 8, 64  # of rows: those above a block's last row have no part in it


class ScaledDotProductAttention(Function):
    """Fused attention; backward as in FlashAttention (Dao et al., 2022, appendix B.4), from q, k, v and the output.

    query [B, H, T, E], key and value [B, Hk, S, E], with H a multiple of Hk; mask additive or None.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, gqa: bool,
        fits: bool = True,
    ) -> Tensor:  # fmt: skip
        """fits: whether backward computes the logsumexp anew, from the q and k that it is given."""
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        # if it fits, for its name alone; in memory as it is found, zeros would be taken for the noise of a dropout
        logsumexp = torch.full(q.shape[:-1], math.nan, dtype=torch.float32, device=q.device)
        for block in _blocks(q, k, causal) if not fits else ():
            scores = _scores(q[block.queries].float() * scale, k[block.keys], block.mask(mask, causal))
            logsumexp[block.queries] = scores.logsumexp(-1)
        ctx.save_for_backward(mask, k, q, v, logsumexp, out)  # in torch's own order: names count in it
        ctx.causal, ctx.scale, ctx.fits = causal, scale, fits
        ctx.set_materialize_grads(False)  # zeros would be work for nothing
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        if grads[0] is None:
            return (None,) * 8
        mask, k, q, v, logsumexp, out = ctx.saved_tensors
        form = None if ctx.fits else logsumexp, ctx.causal, ctx.scale
        tensors = [out, grads[0], q, k, v]
        if not ctx.needs_input_grad[3]:
            return *_AttentionGradient.apply(mask, *form, *tensors), None, None, None, None, None
        learned = mask[(None,) * (4 - mask.dim())]
        *found, dmask = _AttentionGradient.apply(None, *form, *tensors, learned)
        return *found, dmask.view(mask.shape), None, None, None, None


class _AttentionGradient(Function):
    """The gradients of query, key, value and a learned mask; their derivative holds the scores of one block at a time.

    Autograd would keep about ten matrices of the size of the scores for it, in every layer at once. So the derivative
    is written out, see _block_derivative().
    """

    @staticmethod
    def forward(
        ctx: Any, mask: Tensor | None, logsumexp: Tensor | None, causal: bool, scale: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """logsumexp: None for that of query and key. tensors: output and its gradient, query, key, value, and a mask
        that is learned, in four dimensions."""
        ctx.save_for_backward(mask, logsumexp, *tensors)
        ctx.causal, ctx.scale = causal, scale
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors[2:]]
        for block in _blocks(tensors[2], tensors[3], causal):
            known = block.mask(mask, causal), None if logsumexp is None else logsumexp[block.queries]
            block.add(sums, _block_gradients(*known, scale, *block.of(tensors)), first=2)
        return tuple(total.to(tensor.dtype) for total, tensor in zip(sums, tensors[2:], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *weights: Tensor) -> tuple:
        mask, logsumexp, *tensors = ctx.saved_tensors
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        for block in _blocks(tensors[2], tensors[3], ctx.causal):
            known = block.mask(mask, ctx.causal), None if logsumexp is None else logsumexp[block.queries]
            parts = [[part.float() for part in found] for found in (block.of(tensors), block.of(weights, first=2))]
            block.add(sums, _block_derivative(*known, ctx.scale, *parts))
        return None, None, None, None, *(total.to(tensor.dtype) for total, tensor in zip(sums, tensors, strict=True))


@dataclass(frozen=True)
class _Block:
    """Query rows of some heads of some examples, with the keys of these heads that they may attend to."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]
    scores: tuple[int, int, int, int]
    """shape of all scores, [B, H, T, S]"""
    device: torch.device

    def of(self, tensors: Sequence[Tensor], first: int = 0) -> list[Tensor]:
        """The block's parts of output, its gradient, query, key, value and learned mask, from number `first` on."""
        return [tensor[where] for tensor, where in self._places(tensors, first)]

    def add(self, sums: Sequence[Tensor], parts: Sequence[Tensor], first: int = 0) -> None:
        """Add what was found for these parts."""
        for (total, where), part in zip(self._places(sums, first), parts, strict=True):
            total[where].add_(part)

    def _places(self, tensors: Sequence[Tensor], first: int) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Each tensor with the block's place in it: the whole of a dimension along which a mask broadcasts."""
        places = (self.queries, self.queries, self.queries, self.keys, self.keys, self.queries)
        for tensor, place in zip(tensors, places[first:], strict=False):
            sizes = zip(tensor.shape, place, strict=False)
            yield tensor, tuple(slice(None) if size == 1 else where for size, where in sizes)

    def mask(self, mask: Tensor | None, causal: bool) -> Tensor | None:
        """The block's part of the mask; the causal mask is made here, for the columns from the first row's on."""
        if not causal:
            return None if mask is None else mask.expand(self.scores)[self.queries]
        rows = range(self.scores[2])[self.queries[2]]
        shape = len(rows), max(0, self.keys[2].stop - rows.start)
        return torch.full(shape, -math.inf, device=self.device).triu_(1)


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[_Block]:
    """Blocks of some scores, about as many as q has elements: of whole examples, else of heads, else of rows."""
    (examples, heads, rows, _), key_heads, columns = q.shape, k.shape[1], k.shape[2]
    repeats = heads // key_heads
    scores = min(max(_LEAST_BLOCK, q.numel()), _LARGEST_BLOCK)
    at_once = max(1, scores // max(1, repeats * columns))  # rows of a key's head
    whole = max(1, rows if not causal else min(rows, max(_LEAST_ROWS, -(-rows // _CAUSAL_BLOCKS))))
    for example in _slices(examples, at_once // (key_heads * whole)):
        for head in _slices(key_heads, at_once // whole):
            theirs = slice(head.start * repeats, head.stop * repeats)
            for row in _slices(rows, min(at_once, whole)):
                keys = slice(0, min(columns, row.stop) if causal else columns)
                shape = (examples, heads, rows, columns)
                yield _Block((example, theirs, row), (example, head, keys), shape, q.device)


def _slices(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, min(total, start + size)) for start in range(0, total, size))


def _block_gradients(
    mask: Tensor | None, logsumexp: Tensor | None, scale: float, out: Tensor, grad: Tensor, q: Tensor, k: Tensor,
    v: Tensor, *learned: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the query and a learned mask, and what these queries add to those of the key and the value."""
    grad, repeats = grad.float(), q.shape[1] // k.shape[1]
    q = q.float() * scale  # in place of all scores
    probability = _probability(q, k, learned[0] if learned else mask, logsumexp)
    dv = _transposed_times(probability, grad)
    dscores = grad @ _repeat(v, repeats).transpose(-2, -1)
    dscores.sub_((grad * out.float()).sum(-1, keepdim=True)).mul_(probability)
    dmask = [dscores.sum_to_size(x.shape) for x in learned]
    dk = _transposed_times(dscores, q)
    return (dscores @ _repeat(k, repeats)).mul_(scale), _fold(dk, repeats), _fold(dv, repeats), *dmask


def _block_derivative(
    mask: Tensor | None, logsumexp: Tensor | None, scale: float, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients, at the tensors that _block_gradients() takes, of the sum of its results times weights.

    With P the probabilities, D the rows' sums of grad * out, and U, W, Z the weights of the gradients of query, key and
    value (and X that of a learned mask), that sum is that of P * ((grad v^T - D) * T + grad Z^T), where
    T = scale U k^T + scale q W^T + X. All in float32.
    """
    out, grad, q, k, v, *learned = inputs
    repeats = q.shape[1] // k.shape[1]
    k, v, of_k, of_v = (_repeat(x, repeats) for x in (k, v, *weights[1:3]))
    q, of_q = q * scale, weights[0] * scale
    probability = _probability(q, k, learned[0] if learned else mask, logsumexp)
    tilt = torch.cat([of_q, q], -1) @ torch.cat([k, of_k], -1).transpose(-2, -1)
    if learned:
        tilt += weights[3]
    to_grad = probability * tilt
    to_rows = to_grad.sum(-1, keepdim=True).neg_()
    dscores = (grad @ v.transpose(-2, -1)).sub_((grad * out).sum(-1, keepdim=True))
    to_scores = (grad @ of_v.transpose(-2, -1)).addcmul_(tilt, dscores).mul_(probability)
    del tilt
    dscores.mul_(probability)
    if logsumexp is None:  # else a constant
        to_scores.addcmul_(probability, to_scores.sum(-1, keepdim=True), value=-1.0)
    dgrad = (to_grad @ v).add_(probability @ of_v).addcmul_(to_rows, out)
    dv = _transposed_times(to_grad, grad)
    dq = (to_scores @ k).add_(dscores @ of_k).mul_(scale)
    dk = _transposed_times(to_scores, q).add_(_transposed_times(dscores, of_q))
    dmask = [to_scores.sum_to_size(x.shape) for x in learned]
    return to_rows * grad, dgrad, dq, _fold(dk, repeats), _fold(dv, repeats), *dmask


def _probability(q: Tensor, k: Tensor, mask: Tensor | None, logsumexp: Tensor | None) -> Tensor:
    """The softmax of the scores, as a fitted logsumexp has it, or with the one that was saved."""
    scores = _scores(q, k, mask)
    probability = torch.softmax(scores, -1) if logsumexp is None else (scores - logsumexp.unsqueeze(-1)).exp_()
    if mask is not None and mask.dim() == 4:  # as in torch, a row that may attend to nothing does not
        hidden = mask == -math.inf if mask.is_floating_point() else ~mask
        probability.masked_fill_(hidden.all(-1, keepdim=True), 0.0)
    return probability


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q: in float32, times the scale. mask: for the last columns, or for all if it has one."""
    scores = q @ _repeat(k, q.shape[1] // k.shape[1]).transpose(-2, -1)
    if mask is None:
        return scores
    masked = scores if mask.shape[-1] == 1 else scores[..., scores.shape[-1] - mask.shape[-1] :]
    if mask.dtype == torch.bool:
        masked.masked_fill_(~mask, -math.inf)
    else:
        masked += mask
    return scores


def _transposed_times(scores: Tensor, x: Tensor) -> Tensor:
    """The transposed scores times x, as the transpose of a product that takes the CPU 0.6 of the time."""
    return (x.transpose(-2, -1) @ scores).transpose(-2, -1)


def _repeat(x: Tensor, repeats: int) -> Tensor:
    return x.float().repeat_interleave(repeats, 1) if repeats > 1 else x.float()


def _fold(grad: Tensor, repeats: int) -> Tensor:
    return grad.unflatten(1, (-1, repeats)).sum(2) if repeats > 1 else grad


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, fits: bool = True,
) -> Tensor:  # fmt: skip
    """In place of scaled_dot_product_attention. fits: whether its logsumexp is fitted, see hooks/fused_attention.py."""
    query, key, value, attn_mask = (_as_autocast_has_it(x) for x in (query, key, value, attn_mask))
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    backend = attention_kernel(query, key, value, attn_mask, dropout_p, **options)
    if backend == SDPBackend.MATH.value or dropout_p > 0.0:
        # the math backend is differentiable twice; fused dropout cannot be replayed and is left to perturbation
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **options)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return ScaledDotProductAttention.apply(query, key, value, attn_mask, is_causal, factor, enable_gqa, fits)


def _as_autocast_has_it(tensor: Any) -> Any:
    """An argument in the type that autocast gives it inside the operator: the choice of the kernel depends on it, and
    it is what autograd saves."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor
