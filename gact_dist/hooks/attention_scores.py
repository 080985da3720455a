"""The probabilities of attention that is not fused: made again from queries and keys.

[Note: scores again] Attention in separate operators saves its probabilities, a number for each pair of tokens, which in
long sequences is more than all else that a block saves; with dropout it saves the ones that are left as well. They are
the softmax of q k^T, and both operands are saved by that product. So the product and the softmax run again in the
backward, as they do inside of fused attention, and the rows of what is made sum to one as those of the forward do.

The graph shows all of this but for the mask: a sum saves none of its operands. Within scaled_dot_product_attention the
call is known (attention_calls.py), and so the node of the softmax notes what is added to its scores.

Elsewhere see hidden_scores.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .attention_calls import AttentionCall, running_call
from .boolean_masks import as_added
from .handles import Kept

_aten = torch.ops.aten
_ADDED = "gact_dist: added to the scores"
SOFTMAXES: dict[str, Callable[..., Tensor]] = {
    "SoftmaxBackward0": torch.softmax,
    "SafeSoftmaxBackward0": _aten._safe_softmax,
}
"""by the nodes that they make"""


class AddedMask:
    """In a recipe: what is added to scores, for a mask or because attention is causal."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        """handle: of the mask, None for causal attention."""
        self._handle = handle

    def restore(self) -> Callable[[Tensor], Tensor]:
        """A function of the scores, which it writes over."""
        return partial(_masked, None if self._handle is None else self._handle.restore())


def _masked(mask: Tensor | None, scores: Tensor) -> Tensor:
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.add_(as_added(mask, scores.dtype) if mask.dtype is torch.bool else mask)


def call_with_mask(tensor: Tensor) -> AttentionCall | None:
    """The call of attention that is saving its probabilities, if it adds a mask to its scores that has no graph."""
    call, node = running_call(), tensor.grad_fn
    if call is None or node is None or node.name() not in SOFTMAXES:
        return None
    mask = call.mask
    has_one = call.is_causal if mask is None else not mask.requires_grad
    return call if has_one else None


def note_added(tensor: Tensor, call: AttentionCall, keep: Callable[[Tensor], Any] = Kept) -> None:
    """Note what was added to the scores of probabilities: what call_with_mask() gives.

    keep: gives a handle of a mask that something is to be made with; that of its call, for a graph that is soon gone.
    """
    node: Any = tensor.grad_fn
    node.metadata[_ADDED] = None if call.mask is None else partial(keep, call.mask)


def has_added(node: Any) -> bool:
    """Whether note_added() was called for the results of a softmax."""
    return _ADDED in node.metadata


def added_to(node: Any) -> AddedMask:
    """What was, by now with a handle."""
    keep = node.metadata[_ADDED]
    return AddedMask(None if keep is None else keep())


def probabilities(node: Any, dim: int) -> Callable[..., Tensor]:
    """The function of a softmax node, along dim: of whether it may write over scores, of these, and of what AddedMask
    or Shown restores."""
    softmax, dtype = SOFTMAXES[node.name()], node._input_metadata[0].dtype

    def made(owns: bool, scores: Tensor, mask: Any = None) -> Tensor:
        if scores.dtype != dtype or (mask is not None and not owns):
            scores = scores.to(dtype, copy=True)
        if not isinstance(mask, Tensor):
            return softmax(scores if mask is None else mask(scores), dim)
        made = softmax(scores.masked_fill_(~mask, -math.inf), dim)
        return made.masked_fill_(~mask.any(dim, keepdim=True), 1.0 / made.shape[dim])

    return made
