"""One payload with several widths: equal parts of a tensor, called units (its samples, or its groups), each at its own.

[Note: mixed payload] The buffer holds the width of each unit (uint8 [units]), and then for each width that occurs what
``ops.pack`` makes of its units, joined in their order; units of width 0 are all zero and take nothing more. How many
units have each width is known on the host, so the size of the buffer is, and nothing waits for the device; which units
have it is known on the device alone, where a stable sort of the widths finds them again. The kernels are those of one
width, on every device, and units that are no multiple of a group waste nothing. The price is one more copy of the
tensor in pack and one in unpack, a width at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .ops_reference import MAX_BITS, sections

COUNTS = MAX_BITS + 1
_ALIGNMENT = 4


@dataclass(frozen=True, eq=False)
class UnitWidths:
    """A width for each unit of a tensor.

    widths: uint8 [units] on the tensor's device, 0 to 8; a unit of width 0 must be all zero. Unit u is the elements
    u N / units .. (u + 1) N / units - 1 of N. counts: how many units have width 0, 1 .. 8; that they fit is checked
    where it takes no wait for a device.
    Raises ValueError where the two do not fit together.
    """

    widths: Tensor
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        units = sum(self.counts)
        if len(self.counts) != COUNTS or self.widths.shape != (units,) or self.widths.dtype != torch.uint8:
            raise ValueError(
                f"widths are {self.widths.dtype} {list(self.widths.shape)} and counts {self.counts}, expected uint8 "
                f"[units] and the number of units at 0 to {MAX_BITS} bits"
            )
        if self.widths.device.type == "cpu":
            found = tuple(torch.bincount(self.widths, minlength=COUNTS).tolist())
            if found != self.counts:
                raise ValueError(f"counts are {self.counts}, but of the widths 0 to {MAX_BITS} there are {found}")


def widths_bytes(units: int) -> int:
    """Bytes of the section of widths."""
    return (units + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def total_bytes(counts: Sequence[int], numel: int, group_size: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer that holds ``numel`` elements of which ``counts[b]`` equal parts have ``b`` bits."""
    units = sum(counts)
    segments = _segments(counts, numel // units, group_size, dtype) if units else ()
    return widths_bytes(units) + sum(stop - start for _, _, _, start, stop in segments)


def _segments(
    counts: Sequence[int], unit_numel: int, group_size: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, int, int, int]]:
    """(width, first unit, unit after the last, first byte, byte after the last) in order of width."""
    last, stop = 0, widths_bytes(sum(counts))
    for width, count in enumerate(counts):
        first, last, start = last, last + count, stop
        if count and width:
            size = sections(count * unit_numel, width, group_size, dtype).total_bytes
            stop = start + (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        if count:
            yield width, first, last, start, stop


def pack(values: Tensor, units: UnitWidths, group_size: int, seed: int) -> Tensor:
    """Quantise the units of a flat tensor (float32, float16 or bfloat16, [N]) into one uint8 buffer.

    seed: of the rounding; each width has noise of its own.
    Raises ValueError or TypeError for units that do not divide the tensor, and for a format that does not exist.
    """
    widths, counts = units.widths, units.counts
    if not len(widths) or values.numel() % len(widths):
        raise ValueError(f"got {len(widths)} widths for {values.numel()} elements, expected parts of equal size")
    rows = values.view(len(widths), -1)
    total = total_bytes(counts, values.numel(), group_size, values.dtype)
    buffer = torch.empty(total, dtype=torch.uint8, device=values.device)
    buffer[: len(widths)] = widths
    buffer[len(widths) : widths_bytes(len(widths))] = 0
    order = torch.argsort(widths, stable=True)
    for width, first, last, start, stop in _segments(counts, rows.shape[1], group_size, values.dtype):
        if width == 0:
            continue
        chosen = rows if last - first == len(rows) else rows.index_select(0, order[first:last])
        size = sections(chosen.numel(), width, group_size, values.dtype).total_bytes
        ops.pack_out(chosen.view(-1), width, group_size, seed ^ width, buffer[start : start + size])
        buffer[start + size : stop] = 0
    return buffer


def unpack(buffer: Tensor, counts: Sequence[int], group_size: int, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Decode what ``pack`` made with these counts and this seed: flat tensor [numel] of ``dtype``."""
    units = sum(counts)
    expected = total_bytes(counts, numel, group_size, dtype)
    if buffer.dtype != torch.uint8 or buffer.shape != (expected,):
        raise ValueError(f"buffer is {buffer.dtype} {list(buffer.shape)}, expected {expected} bytes for {list(counts)}")
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    rows = out.view(units, -1)
    order = torch.argsort(buffer[:units], stable=True)
    for width, first, last, start, _ in _segments(counts, rows.shape[1], group_size, dtype):
        if width == 0:
            rows.index_fill_(0, order[first:last], 0.0)
            continue
        size = sections((last - first) * rows.shape[1], width, group_size, dtype).total_bytes
        part = buffer[start : start + size]
        if last - first == units:
            ops.unpack_out(part, width, group_size, numel, dtype, seed ^ width, out)
        else:
            decoded = ops.unpack(part, width, group_size, (last - first) * rows.shape[1], dtype, seed ^ width)
            rows.index_copy_(0, order[first:last], decoded.view(last - first, -1))
    return out


def ranked(keys: Tensor, counts: tuple[int, ...]) -> UnitWidths:
    """Widths of which ``counts`` says how many there are, the widest for the units with the largest keys.

    keys: float [units] on any device; nothing waits for it. Of equal keys the first unit comes first.
    """
    by_rank = torch.empty(len(keys), dtype=torch.uint8, device=keys.device)
    last = len(keys)
    for width, count in enumerate(counts):
        by_rank[last - count : last] = width
        last -= count
    order = torch.argsort(keys, descending=True, stable=True)
    return UnitWidths(torch.empty_like(by_rank).index_copy_(0, order, by_rank), counts)


def squared_ranges(values: Tensor, units: int, group_size: int) -> Tensor:
    """float32 [units]: the sum over the groups of a unit of (max - min)^2, to which its rounding variance is about
    proportional at any width (ActNN, Chen et al., ICML 2021, section 4.1).

    values: flat [N]. Elements beyond the last full group of a unit are left out.
    """
    rows = values.view(units, -1)
    size = min(group_size, rows.shape[1])
    groups = rows.shape[1] // size
    grouped = rows[:, : groups * size].unflatten(1, (groups, size))
    # two reductions: together (aminmax) they take twenty times as long on a CPU
    return (grouped.amax(2).float() - grouped.amin(2).float()).square().sum(1)
