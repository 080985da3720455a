"""The logsumexp of fused attention, fitted to the queries and keys that are kept.

[Note: fitted logsumexp] The backward of fused attention recomputes its probabilities, exp(q k^T - logsumexp), from what
the forward saved (Dao et al., 2022, appendix B.4). With rounded q and k beside the exact logsumexp they no longer sum
to one: the gradient's error grows exponentially with that of a score, and at 2 and 3 bits a single row now and then
makes a gradient a hundred times too large, which an optimizer with moments remembers for long. So the logsumexp that is
kept is that of the rounded q and k, at the cost of one more forward of the operator. This leaves a small GPT 0.6 of the
variance at 4 bits, and a twentieth to an eightieth at 2 bits. From 7 bits on rounding adds little: nothing is fitted.

Not fitted: inside what torch.compile has compiled, under tensor parallelism, where q or k was kept long before (for
another operator), and by a torch whose graph does not show what it saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import codec
from .._torch_internals import saved_handle
from .handles import Recipe, Replaceable, Stored, View, decoded

_aten = torch.ops.aten
_MOST_BITS = 6
_OPERANDS = 6  # at most, that an operator saves before its output


@dataclass(frozen=True)
class _Operator:
    """A fused operator: the name of what it saves, and its own forward for that alone."""

    logsumexp: str
    run: Callable[..., Tensor]


def _for_cpu(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, causal, attn_mask=mask, scale=scale)[1]


def _flash(q: Tensor, k: Tensor, _: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    return _aten._scaled_dot_product_flash_attention(q, k, k, 0.0, causal, False, scale=scale)[1]


def _efficient(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    return _aten._scaled_dot_product_efficient_attention(q, k, k, bias, True, 0.0, causal, scale=scale)[1]


def _cudnn(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    return _aten._scaled_dot_product_cudnn_attention(q, k, k, bias, True, 0.0, causal, False, scale=scale)[1]


_OPERATORS = {
    "ScaledDotProductFlashAttentionForCpuBackward0": _Operator("logsumexp", _for_cpu),
    "ScaledDotProductFlashAttentionBackward0": _Operator("logsumexp", _flash),
    "ScaledDotProductEfficientAttentionBackward0": _Operator("log_sumexp", _efficient),
    "ScaledDotProductCudnnAttentionBackward0": _Operator("logsumexp", _cudnn),
}


class LogsumexpFit:
    """Fits what a step keeps. See [Note: fitted logsumexp]."""

    def __init__(self) -> None:
        self._latest: deque[tuple[Stored | Replaceable, Any]] = deque(maxlen=_OPERANDS)

    def add(self, handle: Stored | Replaceable, payload: Any) -> None:
        """payload: of a tensor that is kept; still on the device, which it may be about to leave."""
        self._latest.append((handle, payload))

    def forget(self) -> None:
        """At the end of a step."""
        self._latest.clear()

    def after(self, node: Any) -> None:
        """After a tensor is kept: if it is the output of fused attention, all else that the operator saved is kept.

        node: that computed the tensor, None without a graph.
        """
        operator = None if node is None else _OPERATORS.get(node.name())
        if operator is None:
            return
        query, key, kept = (saved_handle(node, name) for name in ("query", "key", operator.logsumexp))
        payloads = dict(self._latest)
        operands = payloads.get(_whole(query)), payloads.get(_whole(key))
        if None in operands or not any(map(_is_coarse, operands)) or not isinstance(kept, (Stored, Replaceable)):
            return
        with torch.no_grad():
            q, k = (_decoded(handle, payloads) for handle in (query, key))
            bias = getattr(node, "_saved_attn_mask", getattr(node, "_saved_attn_bias", None))
            kept.replace(operator.run(q, k, bias, node._saved_is_causal, node._saved_scale))


def _whole(handle: Any) -> Any:
    return handle.base if isinstance(handle, View) else handle


def _is_coarse(payload: Any) -> bool:
    if isinstance(payload, Recipe):  # of what may have any width
        return True
    return isinstance(payload, codec.Packed) and payload.average_bits <= _MOST_BITS


def _decoded(handle: Any, payloads: dict[Stored | Replaceable, Any]) -> Tensor:
    tensor = decoded(payloads[_whole(handle)])
    return handle.within(tensor) if isinstance(handle, View) else tensor
