"""AC-GC's second compressor (Evans and Aamodt, NeurIPS 2021): each group is as wide as an error bound requires.

[Note: bound] A plan allows a tensor the rounding variance of one width. Of a ladder of bounds on the error of an
element, the largest is taken whose variance, summed over the tensor, is no more than that. Groups of small range then
take fewer bits, groups of large range more, and groups of zeros none. Rounding is unbiased here too; an element is off
by less than a step, and the step of a group is at most the bound.

[Note: sizes that depend on data] How many groups need a width, and so the size of the payload, depends on the values.
On a CPU the host reads them. On an accelerator it would have to wait for the device at every tensor, so tensors there
keep the one width that allows the same variance. Ranking groups into shares fixed in advance, as policy actnn does with
examples, would not wait either, but would keep to no bound.
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from .format import DEFAULT_GROUP_SIZE, GROUP_SIZES, MAX_BITS, MIN_BITS, sections
from .mixed_widths import COUNTS, UnitWidths
from .packed import Packed, columns_of, in_parts, pack, stored_values
from .reference import to_groups

_log = logging.getLogger(__name__)
_warned: set[str] = set()
# Steps to try, as multiples of the root mean square of the steps at one width, largest first.
_LADDER = tuple(2.0 ** (-rung / 4) for rung in range(-8, 9))


def pack_error_bounded(
    tensor: Tensor, bits: int, seed: int = 0, group_size: int = DEFAULT_GROUP_SIZE, by_column: bool = True
) -> Packed:
    """Store each group of ``tensor`` at the width that one error bound needs; at most the variance of ``bits`` bits.

    Takes the arguments of ``pack`` and raises its errors. Does what ``pack`` does if one width takes no more bytes, if
    the tensor's memory is not whole groups, and on an accelerator, where it warns once.
    """
    if tensor.device.type != "cpu":
        _warn_of_one_width(tensor.device)
        return pack(tensor, bits, seed, group_size, by_column)
    form = tensor, bits, seed, group_size, by_column
    return _in_groups(*form) or pack(*form)


def _in_groups(tensor: Tensor, bits: int, seed: int, group_size: int, by_column: bool) -> Packed | None:
    """With widths for its groups; None where one width takes no more bytes."""
    if not in_parts(tensor):
        return None
    values = stored_values(tensor)
    size = unit_size(values.numel(), group_size)
    found = None if size is None else group_widths(values, bits, size, columns_of(tensor, size, by_column=by_column))
    if size is None or found is None:
        return None
    packed = pack(tensor, found[0], seed, size, by_column)
    columns = columns_of(tensor, group_size, by_column=by_column)
    one_width_bytes = sections(values.numel(), bits, group_size, columns).total_bytes
    return replace(packed, one_width_bytes=one_width_bytes) if packed.nbytes < one_width_bytes else None


def _warn_of_one_width(device: torch.device) -> None:
    if device.type not in _warned:
        _warned.add(device.type)
        _log.warning(
            "compressor is 'error-bounded' and tensors are on %s: there each keeps one width for all its groups, as "
            "with 'fixed-point', because the host would have to wait for the device to know the size of a payload",
            device,
        )


def group_widths(values: Tensor, bits: int, group_size: int, columns: int = 1) -> tuple[UnitWidths, float] | None:
    """(a width for each group, the bound on every element's error) with at most the variance of ``bits`` bits.

    values: flat tensor [N] on the CPU, whose groups are ``group_size`` elements in memory order. columns: of the rows
    by whose columns one width would group them. None if no bound takes fewer bits than that one width.
    """
    if values.numel() == 0 or values.numel() % group_size:
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
            return None  # smaller bounds need even more
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
    """The largest size of groups, at most ``group_size``, that divides ``numel`` elements; None where none does."""
    fitting = [size for size in GROUP_SIZES if size <= group_size and numel % size == 0]
    return max(fitting, default=None)
