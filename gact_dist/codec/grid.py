"""Scale and offset of groups as they are stored: the finest grid over a range. csrc/codec.h has the same."""

import torch
from torch import Tensor

# 65536 / scale has to stay finite in float32, which holds down to this scale.
MIN_SCALE = 2.0**-111
# The distance of two stored scales as float32 bits: bfloat16 without its lowest bit, which marks dithered groups, or of
# special groups with one bit those whose code 1 is +inf.
_SCALE_STEP = 0x20000
# The float16 next to zero on the negative side, as int16.
_HALF_BELOW_ZERO = -0x7FFF


def _bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def floor_offset(low: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest offset at most ``low`` that can be stored: its 16 bits as int16 [G, 1] and its value as float32.

    A 16-bit type holds the smallest element itself. For float32 it is a float16 that counts in units of four steps: the
    product of its 11 significant bits and the 7 of a scale is exact, and it is at most 2^-10 of its size below ``low``.
    """
    if dtype != torch.float32:
        return low.to(dtype).view(torch.int16), low
    inverse = torch.where(scale > 0, torch.full_like(scale, 65536.0) / scale, 0.0)
    nearest = (low * inverse * 2.0**-18).to(torch.float16).view(torch.int16)
    below = torch.where(nearest > 0, nearest - 1, torch.where(nearest == 0, _HALF_BELOW_ZERO, nearest + 1))
    stored = torch.where(offset_value(nearest, scale, dtype) > low, below.to(torch.int16), nearest)
    return stored, offset_value(stored, scale, dtype)


def offset_value(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 value of stored offsets (int16) of groups with this ``scale``."""
    if dtype != torch.float32:
        return stored.view(dtype).float()
    return stored.view(torch.float16).float() * 4.0 * scale


def covering_scale(spread: Tensor, levels: Tensor) -> Tensor:
    """spread / levels rounded up to a bfloat16 whose lowest bit is zero, so that levels * scale covers the spread."""
    step = spread / levels
    scale = ((_bits_of(step) + _SCALE_STEP - 1) & -_SCALE_STEP).view(torch.float32)
    scale = torch.where(scale * levels < spread, _next_scale(scale, 1), scale)
    return torch.where(scale < MIN_SCALE, torch.full_like(scale, MIN_SCALE), scale)


def _next_scale(scale: Tensor, steps: int) -> Tensor:
    return (_bits_of(scale) + steps * _SCALE_STEP).view(torch.float32)


def constant_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of groups of equal elements: none, but for float32 a power of two at about 2^-10 of the value.

    Values of 11 significant bits are offsets in it; what is left of others is less than one step.
    """
    if dtype != torch.float32:
        return torch.zeros_like(value)
    least = torch.full_like(value, MIN_SCALE)
    power = torch.maximum((_bits_of(value) & 0x7F800000) - (10 << 23), _bits_of(least)).view(torch.float32)
    return torch.where(value == 0, 0.0, power)


def grid_of(low: Tensor, high: Tensor, levels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scale, stored offset, offset, levels), each [G, 1], for groups that reach from ``low`` to ``high``.

    The grid covers the range, but nothing on it exceeds the largest finite value of ``dtype``: near that the scale
    steps down and the offset up again, or nothing but the offset is left.
    """
    spread = high - low
    scale = covering_scale(spread, levels)
    if dtype == torch.float32:  # widened by the rounding of the offset where that of the scale has no room for it
        tight = high - floor_offset(low, scale, dtype)[1] <= scale * levels
        wider = (spread + low.abs() * 2.0**-10) * (1 + 2.0**-16)
        scale = torch.where(tight, scale, covering_scale(wider, levels))
    scale = torch.where(spread > 0, scale, constant_scale(low, dtype))
    stored, offset = floor_offset(low, scale, dtype)

    largest = torch.finfo(dtype).max
    for _ in range(3):
        fits = (offset + scale * levels <= largest) | (scale == 0)
        scale = torch.where(fits, scale, _next_scale(scale, -1))
        stored, offset = floor_offset(low, scale, dtype)
    stored = torch.where(offset >= -largest, stored, stored - 1)  # towards zero
    offset = offset_value(stored, scale, dtype)
    storable = (offset + scale * levels <= largest) & (offset >= -largest)
    return scale, stored, offset, torch.where(storable, levels, 0.0)


def dither_allowed(low: Tensor, high: Tensor, scale: Tensor, offset: Tensor, levels: Tensor, largest: float) -> Tensor:
    """bool [G, 1]: groups where half a step more on either side changes no sign and overflows nothing."""
    half = scale * 0.5
    keeps_sign = ((low < 0) & (high > 0)) | (low > half) | (high < -half)
    return (high > low) & keeps_sign & (offset + scale * levels + scale <= largest) & (offset - scale >= -largest)
