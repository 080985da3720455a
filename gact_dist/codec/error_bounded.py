"""AC-GC's second compressor (Evans and Aamodt, NeurIPS 2021): each group as wide as a bound of its error asks for.

[Note: bound] A plan allows a tensor the rounding variance of a width. The bound of its elements' errors is the largest
of a ladder with no more variance than that, summed over the tensor: groups of small range then take fewer bits, groups
of large range more, and those that are zero none. Rounding is unbiased here too; an element errs by less than a step,
and the step of a group is at most the bound.

[Note: sizes that depend on data] How many groups need a width, and so the size of the payload, is known only when the
tensor is there. On a CPU the host reads it. On an accelerator it would have to wait for the device at every tensor, so
tensors there keep the one width that allows the same variance; to rank groups into shares that are fixed beforehand, as
samples are, would not wait either, but would keep to no bound.
"""

import torch
from torch import Tensor

from .format import GROUP_SIZES, MAX_BITS, MIN_BITS
from .mixed_widths import COUNTS, UnitWidths
from .reference import to_groups

# Steps to try, as multiples of the root mean square of the steps at one width, largest first.
_LADDER = tuple(2.0 ** (-rung / 4) for rung in range(-8, 9))


def group_widths(values: Tensor, bits: int, group_size: int, columns: int = 1) -> tuple[UnitWidths, float] | None:
    """(a width for each group, the bound that every element's error keeps to) with at most the variance of `bits` bits.

    values: flat tensor [N] on the CPU, of which every unit is a group in memory order. columns: by which one width
    would group them. None where no bound takes fewer bits than that one width, and on an accelerator.
    """
    if values.device.type != "cpu" or values.numel() == 0 or values.numel() % group_size:
        return None
    groups = values.view(-1, group_size)
    high, low = groups.amax(1).double(), groups.amin(1).double()
    spread = high - low
    finite = spread.isfinite()
    ranges = spread.where(finite, 0.0)
    zero = (high == 0) & (low == 0)
    allowed = _squared_ranges(values, group_size, columns) / (2**bits - 1) ** 2
    root_mean_square = (allowed / len(ranges)) ** 0.5
    for factor in _LADDER:
        bound = factor * root_mean_square
        wanted = torch.log2(ranges / bound + 1.0).nan_to_num(0.0).sub(1e-9).ceil()
        widths = wanted.clamp(MIN_BITS).where(finite, MAX_BITS).masked_fill(zero, 0)
        if int(widths.max()) > MAX_BITS:
            return None  # and smaller bounds need more
        steps = ranges / (2.0**widths - 1.0).clamp(min=1.0)
        if float(steps.square().sum()) > allowed:
            continue
        if float(widths.sum()) >= bits * len(ranges):
            return None
        counts = torch.bincount(widths.to(torch.uint8), minlength=COUNTS).tolist()
        # a group's step is rounded up to 7 significant bits when it is stored
        return UnitWidths(widths.to(torch.uint8), tuple(counts)), bound * (1 + 2.0**-6)
    return None


def _squared_ranges(values: Tensor, group_size: int, columns: int) -> float:
    """Sum over the groups of one width; a last block of columns that is short is left out."""
    block = group_size * columns
    groups = to_groups(values[: len(values) // block * block], group_size, columns, 0.0)
    spread = groups.amax(1).double() - groups.amin(1).double()
    return float(spread.where(spread.isfinite(), 0.0).square().sum())


def unit_size(numel: int, group_size: int) -> int | None:
    """The largest size of groups, at most `group_size`, that divides a tensor of `numel` elements; None without one."""
    fitting = [size for size in GROUP_SIZES if size <= group_size and numel % size == 0]
    return max(fitting, default=None)
