"""Operators whose frame shows what is read of what they saved: one bit of each element, or on which side of two limits
it lies; and of indices below which number they are.

[Note: one bit] The gradient of hardtanh passes between its limits and nowhere else; that of leaky_relu has one of two
slopes. One bit says which. It is stored with two values in the tensor's own type, one for each case, and the backward
finds the same case in them: the gradient is bitwise the untouched one. Limits may change from one step to the next, and
another tensor may be saved under the same name. So nothing is remembered: these are Python functions of
torch.nn.functional, and while one of them saves, its own frame is the innermost. That frame shows the operator and its
limits in every step, for one dictionary lookup per saved tensor. F.hardshrink and F.softshrink are none, but the
forwards of their modules are. Where an operator is called in another way (clamp, a method, TorchScript), nothing shows
the limits before it has run: what it saves is exact.

[Note: hardswish] The slope of hardswish is linear between -3 and 3, and jumps there: from 0 to -1/2, and from 3/2 to 1.
So what it saves is rounded to as many bits as any activation, and two more bits have each element decoded on the side
of both limits on which it was. The error has the variance that is predicted for a smooth function, or less where
elements are moved back to a limit. What is decoded serves to make the operator's result again, too.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import codec
from .._torch_internals import POOLING
from .roles import OWN, Role, role_of_itself

_aten = torch.ops.aten


class Limits(NamedTuple):
    """Of an operator that reads of each element a number, which may be rounded, and on which side of these it lies."""

    low: float
    high: float


class OneBit(NamedTuple):
    """What one call of an operator reads of what it saves."""

    slope: Callable[..., Tensor]
    """slope(tensor, *limits) is zero where the bit is"""
    limits: tuple[float, ...] = ()

    def pack(self, tensor: Tensor) -> codec.Packed | None:
        """What to keep of a tensor; None where its type has no value for one of the two cases."""
        values = _values(self, tensor.dtype)
        if values is None:
            return None
        one, of_zero = values

        def is_set(elements: Tensor) -> Tensor:
            slope = self.slope(elements, *self.limits)
            return slope == 0 if of_zero else slope

        return codec.pack_flags(tensor, is_set, one)


class Below(NamedTuple):
    """Of indices: from zero up to, and without, a number that shapes tell. All of them is read."""

    bound: int


Read = OneBit | Limits | Below


def read_by(frame: FrameType, tensor: Tensor, rounds: bool) -> Read | None:
    """What is known of a tensor that is being saved from what reads it; None if nothing makes a difference.

    frame: of the pack hook's caller. rounds: whether the tensor may be rounded.
    """
    found = _READS.get(id(frame.f_code))
    if found is None:
        return None
    read = found[1](frame)
    is_index = tensor.dtype == torch.int64
    return read if (is_index if isinstance(read, Below) else rounds) else None


def shows_reads(frame: FrameType) -> bool:
    """Whether read_by() looks into a frame."""
    return id(frame.f_code) in _READS


def role_of_read(tensor: Tensor, read: Read) -> Role:
    """The role of a tensor of which less than all is read."""
    if isinstance(read, OneBit):
        return Role.ONE_BIT
    if isinstance(read, Below):
        return Role.STATISTIC
    return Role.STATISTIC if role_of_itself(tensor) is Role.STATISTIC else Role.ACTIVATION


def _with_limits(slope: Callable[..., Tensor], limits: list[Any]) -> OneBit | None:
    """None where a limit is a tensor: to look at it might wait for the device."""
    return OneBit(slope, tuple(limits)) if all(isinstance(limit, (int, float)) for limit in limits) else None


def _is_positive(tensor: Tensor, *_: float) -> Tensor:
    return tensor > 0


def _from_backward(backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The slope of an operator, from its own backward of ones: NaN, the limits and their type are treated alike."""

    def slope(tensor: Tensor, *limits: float) -> Tensor:
        return backward(tensor.new_ones(()).expand_as(tensor), tensor, *limits)

    return slope


_hardtanh = _from_backward(_aten.hardtanh_backward)
_hardsigmoid = _from_backward(_aten.hardsigmoid_backward)
_threshold = _from_backward(_aten.threshold_backward)

_hardshrink = _from_backward(_aten.hardshrink_backward)
_softshrink = _from_backward(_aten.softshrink_backward)


def _one_bit(slope: Callable[..., Tensor], *limits: float | str) -> Callable[[FrameType], OneBit | None]:
    """limits: or the arguments that hold them."""

    def read(frame: FrameType) -> OneBit | None:
        given = frame.f_locals
        return _with_limits(slope, [given[limit] if isinstance(limit, str) else limit for limit in limits])

    return read


def _of_shrinking(slope: Callable[..., Tensor]) -> Callable[[FrameType], OneBit | None]:
    return lambda frame: _with_limits(slope, [frame.f_locals["self"].lambd])


def _of_caller(frame: FrameType) -> Read | None:
    caller = frame.f_back
    found = None if caller is None else _READS.get(id(caller.f_code))
    return None if caller is None or found is None else found[1](caller)


def _of_pooling(dimensions: int) -> Callable[[FrameType], Below]:
    """A max pooling saves for each result where in its input's plane, line or space it was."""
    return lambda frame: Below(math.prod(frame.f_locals["input"].shape[-dimensions:]))


def _by_code(reads: Iterable[tuple[CodeType, Callable[[FrameType], Read | None]]]) -> dict[int, tuple[CodeType, Any]]:
    return {id(code): (code, read) for code, read in reads}


_READS: dict[int, tuple[CodeType, Callable[[FrameType], Read | None]]] = _by_code(
    (
        (F.leaky_relu.__code__, _one_bit(_is_positive)),
        (F.relu6.__code__, _one_bit(_hardtanh, 0.0, 6.0)),
        (F.hardtanh.__code__, _one_bit(_hardtanh, "min_val", "max_val")),
        (F.hardsigmoid.__code__, _one_bit(_hardsigmoid)),
        (F.threshold.__code__, _one_bit(_threshold, "threshold")),
        (nn.Hardshrink.forward.__code__, _of_shrinking(_hardshrink)),
        (nn.Softshrink.forward.__code__, _of_shrinking(_softshrink)),
        (F.hardswish.__code__, lambda _: Limits(-3.0, 3.0)),
        *((code, _of_pooling(dimensions)) for code, dimensions in POOLING),
        *((code, _of_caller) for code in OWN),
    )
)
"""{id of a frame's code: (the code, what it shows)}; code objects hash slowly."""


@lru_cache(maxsize=256)
def _values(read: OneBit, dtype: torch.dtype) -> tuple[float, bool] | None:
    """(c, whether zero has a slope): of the two stored values one is zero, and c is in the other case.

    None where there is no such c among the values that are likely.
    """
    limits = read.limits or (-3.0, 3.0)  # of hardsigmoid; leaky_relu has them at zero
    low, high = limits[0], limits[-1]
    likely = (0.0, 1.0, low / 2 + high / 2, 2 * low, 2 * high, low - 1, high + 1)
    candidates = torch.tensor(
        [value for value in likely if abs(value) <= torch.finfo(dtype).max], dtype=dtype, device="cpu"
    )
    has_slope = read.slope(candidates, *read.limits) != 0
    others = candidates[has_slope != has_slope[0]]
    return (float(others[0]), bool(has_slope[0])) if len(others) else None
