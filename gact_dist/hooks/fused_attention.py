"""Fused attention: its output and logsumexp fit the queries, keys and values that are kept.

[Note: fitted logsumexp] The backward of fused attention recomputes its probabilities, exp(q k^T - logsumexp), from what
the forward saved (Dao et al., 2022, appendix B.4). With rounded q and k beside the exact logsumexp they no longer sum
to one: the gradient's error grows exponentially with that of a score, and at 2 and 3 bits a single row now and then
makes a gradient a hundred times too large, which an optimizer with moments remembers for long. So the logsumexp that is
kept is that of the rounded q and k, at the cost of one more forward of the operator. This leaves a small GPT 0.6 of the
variance at 4 bits, and a twentieth to an eightieth at 2 bits. At 8 bits it leaves 0.6 of what q and k themselves add.

[Note: attention again] Where the output is derived ([Note: derived] in derived.py) that run moves to the backward, and
gives the output as well: what attends is the rounded q, k and v, so all that the backward reads belongs to one forward.
The rows of the scores' gradient then sum to zero, as they do not even beside the true output. The first reader, mostly
the projection after the attention, makes both; they are freed when the attention's own backward has read them.

Neither is done inside what torch.compile has compiled, on queries and keys that are DTensors (on their local parts it
is), and by a torch whose graph does not show what it saved; nothing is fitted where q or k was kept long before, for
another operator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .. import codec
from .._torch_internals import node_in_backward, saved_of
from .handles import Recipe, Replaceable, Stored, View, base_of, count_reader, decoded, restored_together

_aten = torch.ops.aten
_Operands = tuple[Tensor, Tensor, Tensor]
_Results = tuple[Tensor, Tensor]
"""output and logsumexp"""
_OPERANDS = 6  # at most, that an operator saves before its output


@dataclass(frozen=True)
class _Operator:
    """A fused operator: the names of what it saves besides query, key and value, and its forward without dropout."""

    logsumexp: str
    mask: str
    run: Callable[..., _Results]


def _for_cpu(qkv: _Operands, mask: Tensor | None, causal: bool, scale: float | None) -> _Results:
    return _aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, causal, attn_mask=mask, scale=scale)[:2]


def _flash(qkv: _Operands, _: Tensor | None, causal: bool, scale: float | None) -> _Results:
    return _aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, False, scale=scale)[:2]


def _efficient(qkv: _Operands, bias: Tensor | None, causal: bool, scale: float | None) -> _Results:
    return _aten._scaled_dot_product_efficient_attention(*qkv, bias, True, 0.0, causal, scale=scale)[:2]


def _cudnn(qkv: _Operands, bias: Tensor | None, causal: bool, scale: float | None) -> _Results:
    return _aten._scaled_dot_product_cudnn_attention(*qkv, bias, True, 0.0, causal, False, scale=scale)[:2]


OPERATORS = {
    "ScaledDotProductFlashAttentionForCpuBackward0": _Operator("logsumexp", "attn_mask", _for_cpu),
    "ScaledDotProductFlashAttentionBackward0": _Operator("logsumexp", "", _flash),
    "ScaledDotProductEfficientAttentionBackward0": _Operator("log_sumexp", "attn_bias", _efficient),
    "ScaledDotProductCudnnAttentionBackward0": _Operator("logsumexp", "attn_bias", _cudnn),
}


class AttentionAgain:
    """One fused attention once more, on what is kept of its operands, when its backward needs it."""

    __slots__ = ("_left", "_made", "_run", "handles")

    def __init__(self, node: Any, handles: list[Any]) -> None:
        """handles: of what the node saved, by which its queries, keys and values are kept."""
        self.handles = handles
        for handle in handles[:3]:
            count_reader(base_of(handle))
        self._run = partial(OPERATORS[node.name()].run, causal=node._saved_is_causal, scale=node._saved_scale)
        self._made: _Results | None = None
        self._left = [True, True]

    def is_of(self, node: Any) -> bool:
        """Whether it has the operands of a node, and so its results."""
        return all(map(is_, self.handles, _handles_of(node)))

    def output(self) -> Tensor:
        """As the rounded operands give it."""
        return self._result(0)

    def logsumexp(self) -> Tensor:
        """Of the rounded queries and keys."""
        return self._result(1)

    def _result(self, number: int) -> Tensor:
        """Both results are kept until the backward of the attention itself has asked for both."""
        made = self._made
        if made is None:
            *qkv, mask = self.handles
            bias = None if mask is None else mask.restore()
            made = self._made = self._run(restored_together(qkv), bias)
        reader = node_in_backward()
        if reader is not None and reader.name() in OPERATORS and self.is_of(reader):
            self._left[number] = False
            if not any(self._left):
                self._made, self._left = None, [True, True]
        return made[number]


class AttentionResult:
    """In a recipe: the output or the logsumexp of fused attention that runs again."""

    __slots__ = ("again", "restore")
    nbytes = 0
    keeps_what_it_made = True

    def __init__(self, again: AttentionAgain, restore: Callable[[], Tensor]) -> None:
        self.again, self.restore = again, restore

    @property
    def operands(self) -> list[Any]:
        """The handles of query, key, value and mask."""
        return self.again.handles


def output_again(node: Any) -> AttentionResult | None:
    """What makes the output of fused attention from queries, keys and values; None where it has to be stored."""
    handles = _handles_of(node)
    for operand in handles[:3]:
        if not isinstance(base_of(operand), (Stored, Replaceable)):
            return None
    if node._saved_dropout_p > 0.0:
        return None
    again = AttentionAgain(node, handles)
    return AttentionResult(again, again.output)


class LogsumexpFit:
    """Fits what a step keeps. See [Note: fitted logsumexp]."""

    def __init__(self) -> None:
        self.latest: deque[tuple[Stored | Replaceable, Any]] = deque(maxlen=_OPERANDS)
        """(handle, payload) of what was kept last"""

    def add(self, handle: Stored | Replaceable, payload: Any) -> None:
        """payload: of a tensor that is kept; still on the device, which it may be about to leave."""
        self.latest.append((handle, payload))

    def forget(self) -> None:
        """At the end of a step."""
        self.latest.clear()

    def after(self, node: Any) -> Stored | None:
        """After a tensor is kept: if it is the output of fused attention, all else that the operator saved is kept.

        node: that computed the tensor, None without a graph. Returns the handle of a logsumexp that is no longer kept,
        but made with the output.
        """
        operator = None if node is None else OPERATORS.get(node.name())
        if operator is None:
            return None
        query, key, kept = saved_of(node, ("query", "key", operator.logsumexp))
        payloads = dict(self.latest)
        again = next((again for again in map(_again_of, payloads.values()) if again and again.is_of(node)), None)
        if again is not None and isinstance(kept, Stored) and kept.is_exact:
            kept.make_again(AttentionResult(again, again.logsumexp))
            return kept
        operands = payloads.get(base_of(query)), payloads.get(base_of(key))
        if any(payload is None for payload in operands) or not any(map(_is_rounded, operands)):
            return None
        if not isinstance(kept, (Stored, Replaceable)):
            return None
        with torch.no_grad():
            q, k = (_decoded(handle, payloads) for handle in (query, key))
            bias = getattr(node, f"_saved_{operator.mask}", None)
            kept.replace(operator.run((q, k, k), bias, node._saved_is_causal, node._saved_scale)[1])
        return None


def _handles_of(node: Any) -> list[Any]:
    """Of query, key, value and mask."""
    return saved_of(node, ("query", "key", "value", OPERATORS[node.name()].mask))


def _again_of(payload: Any) -> AttentionAgain | None:
    return getattr(payload.expression, "again", None) if isinstance(payload, Recipe) else None


def _is_rounded(payload: Any) -> bool:
    if isinstance(payload, Recipe):
        return True
    return isinstance(payload, codec.Packed) and payload.is_rounded


def _decoded(handle: Any, payloads: dict[Stored | Replaceable, Any]) -> Tensor:
    is_view = isinstance(handle, View)
    tensor = decoded(payloads[base_of(handle)], gaps=is_view)
    return handle.within(tensor) if is_view else tensor
