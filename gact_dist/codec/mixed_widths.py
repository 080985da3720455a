"""One payload with several widths: equal parts of a tensor, called units (examples or groups), each with its own width.

[Note: mixed payload] The buffer holds the width of each unit (uint8 [units]), followed, for each width that occurs, by
the output of ``ops.pack`` for its units, joined in order; units of width 0 are all zero and take no more space. The
host knows how many units have each width, and so the size of the buffer: nothing waits for the device. Only the device
knows which units these are; a stable sort of the widths finds them again. Units of whole rows of channels are grouped
by column where a width has enough rows for a group. The kernels are those of one width, on every device, and units that
are not a multiple of a group waste nothing. The price is one more copy of the tensor in pack and one in unpack, a width
at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .format import MAX_BITS, sections

COUNTS = MAX_BITS + 1
_ALIGNMENT = 4


@dataclass(frozen=True, eq=False)
class UnitWidths:
    """A width for each unit of a tensor.

    widths: uint8 [units] on the tensor's device, 0 to 8; a unit of width 0 must be all zero. Unit u is the elements
    u N / units .. (u + 1) N / units - 1 of N. counts: how many units have width 0, 1 .. 8.
    Raises ValueError if the two disagree, which is only checked on a CPU: elsewhere it would wait for the device.
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


def columns_within(numel: int, units: int, group_size: int, columns: int) -> int:
    """``columns`` of the whole tensor if its parts are larger than a group and consist of whole rows; otherwise 1."""
    unit_numel = numel // units if units else 0
    return columns if unit_numel > group_size and unit_numel % columns == 0 else 1


def total_bytes(counts: Sequence[int], numel: int, group_size: int, columns: int = 1) -> int:
    """Bytes of the buffer that holds ``numel`` elements of which ``counts[b]`` equal parts have ``b`` bits."""
    units = sum(counts)
    segments = _segments(counts, numel // units, group_size, columns) if units else ()
    return widths_bytes(units) + sum(_aligned(segment.size_bytes) for segment in segments)


def _aligned(size_bytes: int) -> int:
    return (size_bytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@dataclass(frozen=True)
class _Segment:
    """The units of one width: their positions when sorted by width, and their bytes in the buffer."""

    width: int
    units: slice
    numel: int
    columns: int
    start_bytes: int
    size_bytes: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start_bytes : self.start_bytes + self.size_bytes]


def _segments(counts: Sequence[int], unit_numel: int, group_size: int, columns: int) -> Iterator[_Segment]:
    """In order of width, without widths that no unit has."""
    last, start_bytes = 0, widths_bytes(sum(counts))
    for width, count in enumerate(counts):
        first, last, numel = last, last + count, count * unit_numel
        own_columns = columns if numel >= group_size * columns else 1
        size_bytes = sections(numel, width, group_size, own_columns).total_bytes if width else 0
        if count:
            yield _Segment(width, slice(first, last), numel, own_columns, start_bytes, size_bytes)
        start_bytes += _aligned(size_bytes)


def pack(values: Tensor, units: UnitWidths, group_size: int, seed: int, columns: int = 1) -> Tensor:
    """Quantise the units of a flat tensor (float32, float16 or bfloat16, [N]) into one uint8 buffer.

    seed: of the rounding; each width has its own noise. columns: as from columns_within.
    Raises ValueError or TypeError for units that do not divide the tensor, and for a format that does not exist.
    """
    widths, counts = units.widths, units.counts
    if not len(widths) or values.numel() % len(widths):
        raise ValueError(f"got {len(widths)} widths for {values.numel()} elements, expected parts of equal size")
    rows = values.view(len(widths), -1)
    total = total_bytes(counts, values.numel(), group_size, columns)
    buffer = torch.empty(total, dtype=torch.uint8, device=values.device)
    buffer[: len(widths)] = widths
    buffer[len(widths) : widths_bytes(len(widths))] = 0
    order = torch.argsort(widths, stable=True)
    for segment in _segments(counts, rows.shape[1], group_size, columns):
        width = segment.width
        if width == 0:
            continue
        chosen = rows if segment.numel == values.numel() else rows.index_select(0, order[segment.units])
        ops.pack_out(chosen.view(-1), width, group_size, seed ^ width, segment.of(buffer), segment.columns)
        end_bytes = segment.start_bytes + segment.size_bytes
        buffer[end_bytes : _aligned(end_bytes)] = 0
    return buffer


def unpack(
    buffer: Tensor,
    counts: Sequence[int],
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    columns: int = 1,
) -> Tensor:
    """Decode what ``pack`` made with these counts and this seed: flat tensor [numel] of ``dtype``."""
    units = sum(counts)
    expected = total_bytes(counts, numel, group_size, columns)
    if buffer.dtype != torch.uint8 or buffer.shape != (expected,):
        raise ValueError(f"buffer is {buffer.dtype} {list(buffer.shape)}, expected {expected} bytes for {list(counts)}")
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    rows = out.view(units, -1)
    order = torch.argsort(buffer[:units], stable=True)
    for segment in _segments(counts, rows.shape[1], group_size, columns):
        width = segment.width
        if width == 0:
            rows.index_fill_(0, order[segment.units], 0.0)
            continue
        form = width, group_size, segment.numel, dtype, seed ^ width
        if segment.numel == numel:
            ops.unpack_out(segment.of(buffer), *form, out, segment.columns)
        else:
            decoded = ops.unpack(segment.of(buffer), *form, segment.columns)
            rows.index_copy_(0, order[segment.units], decoded.view(-1, rows.shape[1]))
    return out
