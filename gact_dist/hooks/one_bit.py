"""Operators whose backward reads no more than one bit of each element that they saved.

[Note: one bit] The gradient of hardtanh passes between its limits and nowhere else; that of leaky_relu has one of two
slopes. One bit says which. It is stored with two values in the tensor's own type, one for each case, and the backward
finds the same case in them: the gradient is bitwise the untouched one. Limits may change from one step to the next, and
another tensor may be saved under the same name. So nothing is remembered: these are Python functions of
torch.nn.functional, and while one of them saves, its own frame is the innermost. That frame shows the operator and its
limits in every step, for one dictionary lookup per saved tensor. Where an operator is called in another way (clamp, a
method, TorchScript), nothing shows the limits before it has run: what it saves is exact.
"""

from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import codec

_aten = torch.ops.aten


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


def read_by(frame: FrameType) -> OneBit | None:
    """What is read of a tensor that is being saved; None if it may be all of it. frame: of the pack hook's caller."""
    found = _OPERATORS.get(id(frame.f_code))
    if found is None:
        return None
    _, slope, limits = found
    return _with_limits(slope, [frame.f_locals[limit] if isinstance(limit, str) else limit for limit in limits])


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

_OPERATORS: dict[int, tuple[Any, Callable[..., Tensor], tuple[float | str, ...]]] = {
    id(function.__code__): (function.__code__, slope, limits)
    for function, slope, limits in (
        (F.leaky_relu, _is_positive, ()),
        (F.relu6, _hardtanh, (0.0, 6.0)),
        (F.hardtanh, _hardtanh, ("min_val", "max_val")),
        (F.hardsigmoid, _hardsigmoid, ()),
        (F.threshold, _threshold, ("threshold",)),
    )
}
"""{id of a function's code: (the code, slope, limits or the arguments that hold them)}; code objects hash slowly."""


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
