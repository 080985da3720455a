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

from .._torch_internals import graph_task_id, is_fake, node_in_backward
from .attention_calls import AttentionCall, running_call
from .boolean_masks import as_added
from .expressions import Expression
from .handles import Kept
from .saved_edges import ADDED

_aten = torch.ops.aten
_SAFE = "SafeSoftmaxBackward0"
"""of rows that are hidden as a whole, which come out as zeros"""
SOFTMAXES = frozenset(("SoftmaxBackward0", _SAFE))
"""nodes"""


class AddedMask:
    """In a recipe: what is added to scores, for a mask or because attention is causal."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        """handle: of the mask, None for causal attention."""
        self._handle = handle

    def restore(self) -> Callable[[Tensor], Tensor | None]:
        """A function that writes over scores, and tells which rows are hidden as a whole, None for none."""
        return partial(_mask, None if self._handle is None else self._handle.restore())


def _mask(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    added = as_added(mask, scores.dtype) if mask.dtype is torch.bool else mask
    scores.add_(added)
    hidden = (added == -math.inf).all(-1, keepdim=True)
    is_known = hidden.is_cpu and not is_fake(hidden)  # without waiting for the device
    return None if is_known and not hidden.any() else hidden


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
    node.metadata[ADDED] = None if call.mask is None else partial(keep, call.mask)


def has_added(node: Any) -> bool:
    """Whether note_added() was called for the results of a softmax."""
    return ADDED in node.metadata


def added_to(node: Any) -> AddedMask | None:
    """What was, by now with a handle; None if nothing was."""
    if not has_added(node):
        return None
    keep = node.metadata[ADDED]
    return AddedMask(None if keep is None else keep())


def probabilities(node: Any, dim: int) -> Callable[..., Tensor]:
    """The function of a softmax node, along dim: of whether it may write over scores, of these, and of what AddedMask
    or Shown restores."""
    is_safe, dtype = node.name() == _SAFE, node._input_metadata[0].dtype
    overflows = dtype is torch.float16  # a row may be hidden without a mask

    def made(owns: bool, scores: Tensor, mask: Any = None) -> Tensor:
        if scores.dtype != dtype or (mask is not None and not owns):
            scores = scores.to(dtype, copy=True)
        if isinstance(mask, Tensor):
            made = torch.softmax(scores.masked_fill_(~mask, -math.inf), dim)
            return made.masked_fill_(~mask.any(dim, keepdim=True), 1.0 / made.shape[dim])
        hidden = None if mask is None else mask(scores)
        if is_safe and overflows:
            return _aten._safe_softmax(scores, dim)
        made = torch.softmax(scores, dim)
        return made.masked_fill_(hidden, 0.0) if is_safe and hidden is not None else made

    return made


class Probabilities(Expression):
    """Which are kept until their softmax has them, in the same backward: with dropout the product with the values reads
    what is left of them first, and queries and keys are to be multiplied once."""

    __slots__ = ("_made",)
    keeps_what_it_made = True
    counts_operands = False  # what scores are made of is read next, by their own backward

    def __init__(self, node: Any, dim: int, *operands: Any) -> None:
        """node: of the softmax along dim. operands: the scores, and AddedMask or Shown."""
        function = probabilities(node, dim)
        super().__init__(partial(function, False), *operands, in_place=partial(function, True))
        self._made: tuple[int, Tensor] | None = None  # for which backward

    def of(self, operands: tuple[Any, ...]) -> Probabilities:
        """See Expression.of()."""
        made = super().of(operands)
        made._made = None
        return made

    def make(self) -> Tensor:
        """See Expression."""
        backward, reader = graph_task_id(), node_in_backward()
        kept, self._made = self._made, None
        made = super().make() if kept is None or kept[0] != backward else kept[1]
        if reader is not None and reader.name() not in SOFTMAXES:
            self._made = backward, made
        return made
