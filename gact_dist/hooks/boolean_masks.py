"""The masks of fused attention that were boolean: made again from those.

[Note: boolean masks] A fused attention that is given a boolean mask makes one of zeros and -inf from it, in every
layer, and keeps that for its backward: 2 or 4 bytes for each pair of tokens, which in long sequences is more than all
else that a compressed block keeps. The boolean mask is one for all layers, as a rule, and takes one bit for each pair.
So the other is made again from it; nothing is rounded.

A pack hook is not told which operator saves. So while a step has its hooks, scaled_dot_product_attention has a wrapper,
which knows what it was given. What is saved within the call, without a graph, in a shape that the mask fills, and is
none of the operands, is such a mask. On a CPU it is compared with the boolean one; elsewhere that would wait for the
device, so an observed step compares, and a later one trusts what has the same name.

Without it: what torch.compile has compiled, for it would see another function; dropout within attention, whose noise
would look alike; and heads as wide as the sequence is long.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._patches import SharedPatch
from .._torch_internals import PLAIN, is_fake, once, storage_id


class _Call(NamedTuple):
    """One running call of attention."""

    thread: int
    mask: Tensor
    operands: tuple[Any, ...]


class BooleanMasks:
    """Knows the boolean mask of the attention that is running."""

    def __init__(self) -> None:
        self._call: _Call | None = None
        self._known: set[str] = set()  # of what an observed step has compared

    def watched(self) -> AbstractContextManager[None]:
        """Within the context calls of attention are seen."""
        return _ATTENTION.listening(F, self)

    @property
    def is_running(self) -> bool:
        """Whether an attention is, and was given one."""
        return self._call is not None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of attention begins; what is wrong with it is left to that."""
        mask = mask_given(args, kwargs)
        if type(mask) not in PLAIN or mask.dtype is not torch.bool or mask.dim() < 2:
            return
        if not (kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)):
            named = (kwargs.get(name) for name in ("query", "key", "value"))
            self._call = _Call(threading.get_ident(), mask, (*args[:3], *named))

    def leave(self) -> None:
        """It ends."""
        self._call = None

    def behind(self, tensor: Tensor, name: str, observed: bool) -> Tensor | None:
        """The boolean mask that a saved tensor was made of, None if it was not. name: of the tensor."""
        call = self._call
        if call is None or call.thread != threading.get_ident() or type(tensor) not in PLAIN:
            return None
        mask, operands = call.mask, [x for x in call.operands if type(x) in PLAIN]
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


def mask_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The mask of a call of scaled_dot_product_attention."""
    return kwargs.get("attn_mask", args[3] if len(args) > 3 else None)


def _is_made_of(mask: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor is zero where the mask is true, and -inf elsewhere. Waits for the device."""
    own = once(tensor)
    allowed = mask.expand(tensor.shape)[tuple(map(slice, own.shape))]
    return torch.equal(own == 0, allowed) and torch.equal(own == -math.inf, ~allowed)


class MaskAgain:
    """In a recipe: what attention made of a boolean mask."""

    __slots__ = ("_handle", "_shape")
    nbytes = 0

    def __init__(self, handle: Any, tensor: Tensor) -> None:
        """handle: of the boolean mask. tensor: what was made."""
        self._handle, self._shape = handle, tensor.shape

    def restore(self) -> Tensor:
        """Of the type that zeros have by default: a recipe converts it, without a loss."""
        mask: Tensor = self._handle.restore()
        return as_added(mask, torch.get_default_dtype()).expand(self._shape)


def as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores for a boolean mask: zeros, and -inf where it is false."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def _fills(mask: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a mask has the last dimension of a shape and can be expanded to all of it."""
    sizes = (*(1 for _ in range(len(shape) - len(mask))), *mask)
    fits = len(sizes) == len(shape) and sizes[-1] == shape[-1]
    return fits and all(size in (1, whole) for size, whole in zip(sizes, shape, strict=True))


def _noting(attention: Callable[..., Any], listeners: list[Any]) -> Callable[..., Any]:
    @wraps(attention)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        current = list(listeners)
        for masks in current:
            masks.enter(args, kwargs)
        try:
            return attention(*args, **kwargs)
        finally:
            for masks in current:
                masks.leave()

    return scaled_dot_product_attention


_ATTENTION = SharedPatch("scaled_dot_product_attention", _noting)
WRAPPER = _noting(F.scaled_dot_product_attention, []).__code__
"""stands between a caller of attention and the operator"""
