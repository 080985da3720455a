"""The masks of fused attention that were boolean: made again from those.

[Note: boolean masks] A fused attention that is given a boolean mask makes one of zeros and -inf from it, in every
layer, and keeps that for its backward: 2 or 4 bytes for each pair of tokens, which in long sequences is more than all
else that a compressed block keeps. The boolean mask is one for all layers, as a rule, and takes one bit for each pair.
So the other is made again from it; nothing is rounded.

What is saved within a call of attention (attention_calls.py), without a graph, in a shape that the mask fills, and is
none of the operands, is such a mask. On a CPU it is compared with the boolean one; elsewhere that would wait for the
device, so an observed step compares, and a later one trusts what has the same name.

Without it: what torch.compile has compiled, for it would see another function; dropout within attention, whose noise
would look alike; and heads as wide as the sequence is long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_internals import PLAIN, is_fake, once, storage_id
from .attention_calls import running_call


class BooleanMasks:
    """Knows which saved tensors attention has made of boolean masks."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # of what an observed step has compared

    @property
    def is_running(self) -> bool:
        """Whether an attention is, and was given one."""
        return self._mask() is not None

    @staticmethod
    def _mask() -> Tensor | None:
        call = running_call()
        mask = None if call is None or call.has_dropout else call.mask
        return None if mask is None or mask.dtype is not torch.bool or mask.dim() < 2 else mask

    def behind(self, tensor: Tensor, name: str, observed: bool) -> Tensor | None:
        """The boolean mask that a saved tensor was made of, None if it was not. name: of the tensor."""
        call, mask = running_call(), self._mask()
        if call is None or mask is None or type(tensor) not in PLAIN:
            return None
        operands = call.operands
        if tensor.grad_fn is not None or not tensor.is_floating_point():
            return None
        if tensor.shape != mask.shape and (tensor.dim() != 4 or not _fills(mask.shape, tensor.shape)):
            return None
        if any(x.shape[-1] == mask.shape[-1] or storage_id(x) == storage_id(tensor) for x in operands):
            return None
        if observed or tensor.device.type == "cpu":
            self._known.discard(name)
            if is_fake(tensor) or _is_made_of(mask, tensor):
                self._known.add(name)
        return mask if name in self._known else None


def _is_made_of(mask: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is zero where the mask is true, and -inf elsewhere. Waits for the device."""
    own = once(tensor)
    allowed = mask.expand(tensor.shape)[tuple(map(slice, own.shape))]
    return torch.equal(own == 0, allowed) and torch.equal(own == -math.inf, ~allowed)


class MaskAgain:
    """In a recipe: what attention made of a boolean mask."""

    __slots__ = ("_shape", "operands")
    nbytes = 0

    def __init__(self, handle: Any, tensor: Tensor) -> None:
        """handle: of the boolean mask. tensor: what was made."""
        self.operands, self._shape = (handle,), tensor.shape

    def restore(self) -> Tensor:
        """Of the type that zeros have by default: a recipe converts it, without a loss."""
        mask: Tensor = self.operands[0].restore()
        return as_added(mask, torch.get_default_dtype()).expand(self._shape)


def as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for a boolean mask: zeros, and -inf where it is false."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _fills(mask: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a mask has the last dimension of a shape and can be expanded to all of it."""
    sizes = (*(1 for _ in range(len(shape) - len(mask))), *mask)
    fits = len(sizes) == len(shape) and sizes[-1] == shape[-1]
    return fits and all(size in (1, whole) for size, whole in zip(sizes, shape, strict=True))
