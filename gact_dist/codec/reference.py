"""Every operator of gact_dist in plain PyTorch, on any device: the definition of the stored bytes.

The native kernels in csrc/ must give the same bytes and the same decoded bits as this file. All arithmetic is IEEE
float32, one rounding for each operation; the one fused multiply-add is written as a product in float64, which is exact.
docs/codec.md describes the format in words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .format import (
    MAX_BITS,
    MIN_BITS,
    TILE_ROWS,
    Sections,
    check_binary_dtype,
    check_buffer,
    check_columns,
    check_contiguous,
    check_flat,
    check_format,
    check_mask_dtype,
    check_out,
    check_part,
    check_weight,
    fields_of,
    part_unit,
    sections,
    width_of,
    word_rows,
)
from .philox import random_bytes

# Elements processed at once: about 40 bytes of temporaries each, so under 64 MiB.
_CHUNK_ELEMENTS = 1 << 20
# Of stored scales, as int16: the sign, and a NaN with it.
_SPECIAL_FLAG = -0x8000
_DEAD_SCALE = -0x0040
# What a step is divided into before it is rounded to one.
_UNITS = 256
# The smallest scale: its parts and their reciprocals are normal numbers.
MIN_SCALE = 2.0**-111
# The distance between two stored scales as float32 bits: a bfloat16 without its lowest bit, which marks dithered groups
# (in special groups with 1 bit, those whose code 1 is +inf).
_SCALE_STEP = 0x20000
# The negative float16 closest to zero, as int16.
_HALF_BELOW_ZERO = -0x7FFF


# ---- scale and offset of groups as they are stored: the finest grid over a range


def _pattern_of(values: Tensor) -> Tensor:
    """The bits of float32 values as int32."""
    return values.view(torch.int32)


def floor_offset(low: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest offset at most ``low`` that can be stored: its 16 bits as int16 [G, 1] and its value as float32.

    A 16-bit type holds the smallest element itself. For float32 it is a float16 that counts in units of four steps: the
    product of its 11 significant bits and the 7 of a scale is exact, and it is at most 2^-10 of its size below ``low``.
    """
    if dtype != torch.float32:
        return low.to(dtype).view(torch.int16), low
    nearest = (low * _inverse(scale) * 2.0**-10).to(torch.float16).view(torch.int16)
    below = torch.where(nearest > 0, nearest - 1, torch.where(nearest == 0, _HALF_BELOW_ZERO, nearest + 1))
    stored = torch.where(offset_value(nearest, scale, dtype) > low, below.to(torch.int16), nearest)
    return stored, offset_value(stored, scale, dtype)


def _inverse(scale: Tensor) -> Tensor:
    """Units of 1/256 step to 1."""
    return torch.where(scale > 0, torch.full_like(scale, _UNITS) / scale, 0.0)


def offset_value(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 value of stored offsets (int16) of groups with this ``scale``."""
    if dtype != torch.float32:
        return stored.view(dtype).float()
    return stored.view(torch.float16).float() * 4.0 * scale


def covering_scale(spread: Tensor, levels: Tensor) -> Tensor:
    """spread / levels rounded up to a bfloat16 whose lowest bit is zero, so that levels * scale covers the spread."""
    step = spread / levels
    scale = ((_pattern_of(step) + _SCALE_STEP - 1) & -_SCALE_STEP).view(torch.float32)
    scale = torch.where(scale * levels < spread, _next_scale(scale, 1), scale)
    return torch.where(scale < MIN_SCALE, torch.full_like(scale, MIN_SCALE), scale)


def _next_scale(scale: Tensor, steps: int) -> Tensor:
    return (_pattern_of(scale) + steps * _SCALE_STEP).view(torch.float32)


def constant_scale(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of groups of equal elements: 0, or for float32 a power of two of about 2^-10 of the value.

    Values of 11 significant bits are multiples of it; the remainder of others is less than one step.
    """
    if dtype != torch.float32:
        return torch.zeros_like(value)
    least = torch.full_like(value, MIN_SCALE)
    power = torch.maximum((_pattern_of(value) & 0x7F800000) - (10 << 23), _pattern_of(least)).view(torch.float32)
    return torch.where(value == 0, 0.0, power)


def grid_of(low: Tensor, high: Tensor, levels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scale, stored offset, offset, levels), each [G, 1], for groups that reach from ``low`` to ``high``.

    The grid covers the range, but no point of it exceeds the largest finite value of ``dtype``: near that the scale
    steps down and the offset up, until only the offset may be left.
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
    """bool [G, 1]: groups where half a step more on either side neither changes a sign nor overflows."""
    half = scale * 0.5
    keeps_sign = ((low < 0) & (high > 0)) | (low > half) | (high < -half)
    # the decoder adds up to levels + 1 steps to an offset below zero: their product must be finite by itself
    finite = scale * levels + scale <= torch.finfo(torch.float32).max
    within = (offset + scale * levels + scale <= largest) & (offset - scale >= -largest)
    return (high > low) & keeps_sign & finite & within


# ---- groups


@dataclass(frozen=True)
class Groups:
    """The groups before rounding: values [G, group_size] and parameters [G, 1]."""

    values: Tensor  # inputs in float32; the smallest one replaces those that are not finite or beyond the end
    infinite: Tensor  # -1, 0 or +1 in int8 for -inf, finite, +inf
    special: Tensor  # bool [G, 1]: a NaN, an infinity or a range that overflows
    dead: Tensor  # bool [G, 1]: decodes to NaN
    levels: Tensor  # steps between the finite codes
    scale: Tensor
    offset: Tensor  # at most the smallest value
    stored_offset: Tensor  # int16 [G, 1]: see floor_offset
    may_dither: Tensor  # bool [G, 1]: see dither_allowed
    valid: Tensor  # bool [G, group_size]: not beyond the end


def to_groups(flat: Tensor, group_size: int, columns: int, fill: float) -> Tensor:
    """[G, group_size] from elements in memory order; the last groups are padded with ``fill``.

    Group ``block * columns + column`` has that column of ``group_size`` rows of ``columns`` elements; with one column
    it has ``group_size`` elements in a row.
    """
    missing = -flat.numel() % (group_size * columns)
    padded = torch.cat([flat, flat.new_full((missing,), fill)])
    return padded.view(-1, group_size, columns).transpose(1, 2).reshape(-1, group_size)


def from_groups(grouped: Tensor, columns: int) -> Tensor:
    """The inverse of ``to_groups``: flat, with the padding at the end."""
    return grouped.view(-1, columns, grouped.shape[1]).transpose(1, 2).reshape(-1)


def describe_groups(x: Tensor, bits: int, group_size: int, columns: int) -> Groups:
    """Range, level count, scale and offset of each group of the flat tensor ``x``."""
    padded = to_groups(x.float(), group_size, columns, torch.nan)
    valid = to_groups(torch.ones_like(x, dtype=torch.bool), group_size, columns, False)

    finite = torch.isfinite(padded)
    minus, plus = padded == -torch.inf, padded == torch.inf
    has_minus, has_plus = minus.any(1, True), plus.any(1, True)
    has_nan = (padded.isnan() & valid).any(1, True)
    low = padded.where(finite, torch.inf).amin(1, True)
    high = padded.where(finite, -torch.inf).amax(1, True)
    empty = ~finite.any(1, True)
    low, high = low.masked_fill(empty, 0.0) + 0.0, high.masked_fill(empty, 0.0)  # + 0.0 turns -0.0 into 0.0
    spread = high - low

    infinite = has_minus | has_plus
    dead = has_nan | ~torch.isfinite(spread)
    if bits == 1:
        dead = dead | (infinite & ((spread != 0) | (has_minus & has_plus)))
    top = 2**bits - 1
    levels = torch.full_like(spread, top).where(~infinite, max(top - 2, 0))
    scale, stored, offset, levels = grid_of(low, high, levels, x.dtype)
    allowed = dither_allowed(low, high, scale, offset, levels, torch.finfo(x.dtype).max)
    return Groups(
        values=torch.where(finite, padded, low),
        infinite=plus.to(torch.int8) - minus.to(torch.int8),
        special=infinite | dead,
        dead=dead,
        levels=levels,
        scale=scale,
        offset=offset,
        stored_offset=stored,
        may_dither=~(infinite | dead) & allowed,
        valid=valid,
    )


def scaled_values(groups: Groups) -> Tensor:
    """(value - offset) / scale in units of 1/256, rounded to even and clamped: int32 [G, group_size]."""
    distance = (groups.values - groups.offset).double()
    units = torch.round(distance * _inverse(groups.scale).double()).clamp(min=0.0)
    return torch.minimum(units, groups.levels.double() * _UNITS).nan_to_num(0.0).to(torch.int32)


def dithered(groups: Groups, scaled: Tensor) -> Tensor:
    """bool [G, 1]: groups whose noise is subtracted again in decoding.

    Plain stochastic rounding has a variance of f (1 - f) steps^2 at a fraction f, subtractive dither of 1/12 whatever
    the fraction (Schuchman 1964). The mean of |f - 1/2| tells which is better. It is 1/4 where fractions are spread
    evenly and 1/2 where they are zero; at 3/8, with half of each, both have the same variance.
    """
    edges = ((scaled & 0xFF) - 128).abs().where(groups.valid, 0)
    return groups.may_dither & (edges.sum(1, True) < 96 * groups.valid.sum(1, True))


def pack_groups(
    x: Tensor, bits: int, group_size: int, seed: int, first_element: int, columns: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack whole groups in whole tiles, the elements of a tensor from number ``first_element`` on.

    Returns:
        words int32 [n] of codes, scale int16 [G] (a bfloat16 and its flags), offset int16 [G].
    """
    groups = describe_groups(x, bits, group_size, columns)
    noise = _noise_of_groups(first_element, x.numel(), group_size, seed, columns, x.device)
    scaled = scaled_values(groups)
    codes = (scaled + noise) >> 8
    # The two highest codes of a group with infinities mean -inf and +inf; with one bit, code 1 is the only one left.
    plus_code = 2**bits - 1
    minus_code = max(plus_code - 1, 1)
    codes = codes.masked_fill(groups.infinite > 0, plus_code).masked_fill(groups.infinite < 0, minus_code)
    codes = codes.masked_fill(groups.dead | ~groups.valid, 0)

    scale = (groups.scale.view(torch.int32) >> 16).to(torch.int16)
    scale = scale.where(~groups.special, scale | _SPECIAL_FLAG)
    lowest = dithered(groups, scaled)
    if bits == 1:
        lowest = lowest | (groups.infinite > 0).any(1, True)
    scale = scale.where(~lowest, scale | 1).masked_fill(groups.dead, _DEAD_SCALE)
    words = words_of(from_groups(codes, columns)[: x.numel()], bits, width_of(columns))
    return words, scale.view(-1), groups.stored_offset.masked_fill(groups.dead, 0).view(-1)


def _noise_of_groups(
    first_element: int, numel: int, group_size: int, seed: int, columns: int, device: torch.device
) -> Tensor:
    """The random numbers 0..255 of elements, int32 [G, group_size]."""
    width = width_of(columns)
    noise = random_bytes(first_element // width, -(-numel // width), width, seed, device)
    return to_groups(noise.view(-1)[:numel], group_size, columns, 0)


def _round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    # torch's vectorised casts give NaNs with different bits; the format has one NaN for each dtype.
    return values.to(dtype).masked_fill(values.isnan(), torch.nan)


# ---- codes as words


def _shifts(field_bits: int, device: torch.device) -> Tensor:
    """Where the rows of a word have their field of p bits: row r at 8 * (r % 4) + p * (r / 4), int32 [32 / p, 1]."""
    row = torch.arange(32 // field_bits, device=device, dtype=torch.int32).unsqueeze(1)
    return (row % 4) * 8 + (row // 4) * field_bits


def words_of(codes: Tensor, bits: int, width: int) -> Tensor:
    """int32 codes [N] in rows of ``width`` to int32 words [n]: tile after tile, in each its fields."""
    rows = -(-codes.numel() // width)
    missing = -(-rows // TILE_ROWS) * TILE_ROWS * width - codes.numel()
    tiles = torch.cat([codes, codes.new_zeros(missing)]).view(-1, TILE_ROWS, width)
    fields = []
    for start, field_bits in fields_of(bits):
        parts = ((tiles >> start) & (2**field_bits - 1)).view(len(tiles), field_bits, -1, width)
        fields.append((parts << _shifts(field_bits, codes.device)).sum(2).to(torch.int32))
    full = rows // TILE_ROWS
    rest = [field[full:, : word_rows(rows % TILE_ROWS, field.shape[1])].reshape(-1) for field in fields]
    return torch.cat([torch.cat([field[:full] for field in fields], 1).view(-1), *rest])


def codes_of(words: Tensor, bits: int, numel: int, width: int) -> Tensor:
    """The inverse of ``words_of``: int32 codes [numel]."""
    full, rest = divmod(-(-numel // width), TILE_ROWS)
    whole = words[: full * bits * width].view(full, bits, width)
    last = words[full * bits * width :].view(-1, width)
    codes = words.new_zeros(-(-(full * TILE_ROWS + rest) // TILE_ROWS), TILE_ROWS, width)
    first_row = 0
    for start, field_bits in fields_of(bits):
        rows_of_last = word_rows(rest, field_bits)
        field = torch.cat([whole[:, start : start + field_bits].reshape(-1, width), last[first_row:][:rows_of_last]])
        parts = (field.unsqueeze(1) >> _shifts(field_bits, words.device)) & (2**field_bits - 1)
        in_rows = parts.view(-1, width)[: codes.shape[0] * TILE_ROWS]
        codes.view(-1, width)[: len(in_rows)] |= in_rows << start
        first_row += rows_of_last
    return codes.view(-1)[:numel]


def _bytes_of(ones: Tensor) -> Tensor:
    """0/1 int32 [G, n] to little-endian bytes uint8 [G, n / 8]."""
    weights = 1 << torch.arange(8, device=ones.device, dtype=torch.int32)  # created on the device: a copy would wait
    return (ones.view(ones.shape[0], -1, 8) * weights).sum(-1).to(torch.uint8)


def _bits_of_bytes(packed: Tensor) -> Tensor:
    """uint8 [G, n] to 0/1 int32 [G, n * 8]."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.int32)
    return ((packed.to(torch.int32).unsqueeze(-1) >> shifts) & 1).view(packed.shape[0], -1)


# ---- the operators


@dataclass(frozen=True)
class _Chunk:
    """Whole groups in whole tiles that are processed at once: slices of the elements, the words and the groups."""

    elements: slice
    words: slice
    groups: slice


def _chunks(first: int, last: int, bits: int, group_size: int, columns: int) -> list[_Chunk]:
    """Of elements first .. last - 1, of which the last may be in the middle of a tile where the tensor ends."""
    width, block = width_of(columns), group_size * columns
    tile = TILE_ROWS * width
    whole = max(block, tile)
    step = max(_CHUNK_ELEMENTS // whole, 1) * whole
    chunks = []
    for start in range(first, last, step):
        stop = min(start + step, last)
        words = slice(start // tile * bits * width, -(-stop // tile) * bits * width)
        chunks.append(_Chunk(slice(start, stop), words, slice(start // group_size, -(-stop // block) * columns)))
    return chunks


def pack(x: Tensor, bits: int, group_size: int, seed: int, columns: int = 1) -> Tensor:
    """Quantise a flat tensor (float32, float16 or bfloat16, [N]) with stochastic rounding into one uint8 buffer.

    Groups are ``group_size`` elements in a row, or with ``columns`` > 1 of one column of ``group_size`` rows of so many
    elements. See docs/codec.md for the format. Raises ValueError or TypeError for a format that does not exist.
    """
    check_format(bits, group_size, x.dtype)
    check_columns(x.numel(), columns)
    buffer = x.new_empty(sections(x.numel(), bits, group_size, columns).total_bytes, dtype=torch.uint8)
    pack_out(x, bits, group_size, seed, buffer, columns)
    return buffer


def pack_out(x: Tensor, bits: int, group_size: int, seed: int, out: Tensor, columns: int = 1) -> None:
    """``pack`` into ``out``, a flat uint8 tensor of ``sections(...).total_bytes`` elements, aligned to 4 bytes."""
    check_format(bits, group_size, x.dtype)
    check_contiguous(x, "x")
    x = x.view(-1)
    check_columns(x.numel(), columns)
    where = sections(x.numel(), bits, group_size, columns)
    check_buffer(out, where.total_bytes)
    words, scale, offset = _split(out, where)
    for chunk in _chunks(0, x.numel(), bits, group_size, columns):
        parts = pack_groups(x[chunk.elements], bits, group_size, seed, chunk.elements.start, columns)
        words[chunk.words], scale[chunk.groups], offset[chunk.groups] = parts


def _split(buffer: Tensor, where: Sections) -> tuple[Tensor, Tensor, Tensor]:
    """(words int32, scale int16 [G], offset int16 [G]) of a buffer."""
    words = buffer[: where.scale_start_bytes].view(torch.int32)
    scale = buffer[where.scale_start_bytes : where.offset_start_bytes].view(torch.int16)
    offset = buffer[where.offset_start_bytes :].view(torch.int16)
    return words, scale, offset


def unpack(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int = 1
) -> Tensor:
    """Decode what ``pack`` made with this seed: flat tensor [numel] of ``dtype``."""
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    unpack_out(buffer, bits, group_size, numel, dtype, seed, out, columns)
    return out


def unpack_out(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int = 1,
) -> None:
    """Decode what ``pack`` made into ``out``, a contiguous tensor [numel] of ``dtype``."""
    check_format(bits, group_size, dtype)
    check_out(out, numel, dtype)
    unpack_part(buffer, bits, group_size, numel, dtype, seed, out, columns, 0)


def unpack_part(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int,
    first: int,
) -> None:
    """The same for elements first .. first + out.numel() - 1, which begin and end at multiples of part_unit()."""
    check_format(bits, group_size, dtype)
    check_columns(numel, columns)
    where = sections(numel, bits, group_size, columns)
    check_buffer(buffer, where.total_bytes)
    check_part(out, numel, dtype, first, part_unit(group_size, columns))
    words, scale, offset = _split(buffer, where)
    for chunk in _chunks(first, first + out.numel(), bits, group_size, columns):
        parts = (words[chunk.words], scale[chunk.groups], offset[chunk.groups])
        start = chunk.elements.start
        piece = out[start - first : chunk.elements.stop - first]
        piece.copy_(unpack_groups(*parts, bits, group_size, seed, start, piece.numel(), out.dtype, columns))


def unpack_groups(
    words: Tensor,
    scale: Tensor,
    offset: Tensor,
    bits: int,
    group_size: int,
    seed: int,
    first_element: int,
    numel: int,
    dtype: torch.dtype,
    columns: int = 1,
) -> Tensor:
    """Inverse of ``pack_groups``: flat values [numel] of ``dtype``."""
    codes = to_groups(codes_of(words, bits, numel, width_of(columns)), group_size, columns, 0)
    stored = scale.unsqueeze(1)
    special, lowest = stored < 0, (stored & 1) != 0
    step = (stored & 0x7FFE).view(torch.bfloat16).float()
    low = offset_value(offset.unsqueeze(1), step, dtype)
    # Dithered: code + 1/2 - noise steps, counted in units of 1/256 from half a step below the offset. The products are
    # exact in float32, of 16 bits and 7, so a fused multiply-add gives the same bits.
    noise = _noise_of_groups(first_element, numel, group_size, seed, columns, codes.device)
    unit = step / _UNITS
    subtracted = lowest & ~special
    base = low.where(~subtracted, low - unit * 127.5)
    units = (codes * _UNITS + (255 - noise).where(subtracted, 0)).to(torch.float32)
    values = base + units * unit
    top = 2**bits - 1
    if bits == 1:
        infinity = torch.where(lowest, torch.inf, -torch.inf)
        values = torch.where(special & (codes == 1), infinity, values)
    else:
        values = torch.where(special & (codes == top - 1), -torch.inf, values)
        values = torch.where(special & (codes == top), torch.inf, values)
    return _round_to(from_groups(values, columns)[:numel], dtype)


def pack_mask(x: Tensor) -> Tensor:
    """One bit for each element of a flat tensor, set where it is not zero: uint8 [ceil(N / 8)], little endian."""
    check_mask_dtype(x.dtype)
    check_flat(x, "x")
    packed = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    for start in range(0, x.numel(), _CHUNK_ELEMENTS):
        piece = x[start : start + _CHUNK_ELEMENTS]
        ones = torch.zeros((piece.numel() + 7) // 8 * 8, dtype=torch.int32, device=x.device)
        ones[: piece.numel()] = piece != 0
        packed[start // 8 : start // 8 + ones.numel() // 8] = _bytes_of(ones.view(1, -1))[0]
    return packed


def unpack_mask(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Decode what ``pack_mask`` made: 0 or 1 in ``dtype``, flat [numel]."""
    check_mask_dtype(dtype)
    check_buffer(buffer, (numel + 7) // 8)
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    for start in range(0, numel, _CHUNK_ELEMENTS):
        piece = out[start : start + _CHUNK_ELEMENTS]
        packed = buffer[start // 8 : (start + piece.numel() + 7) // 8]
        piece.copy_(_bits_of_bytes(packed.view(1, -1))[0, : piece.numel()])
    return out


def binary_value(x: Tensor) -> Tensor:
    """The one value of a flat float tensor other than zero, 0-d; zero if there is none, NaN if there are several.

    They are compared by their bits. NaN also where the value is -0.0, whose bit pack_mask does not set, or not finite.
    """
    check_binary_dtype(x.dtype)
    check_flat(x, "x")
    words = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
    used = words != 0
    value = x[used.to(torch.uint8).argmax()] if x.numel() else x.new_zeros(())
    other = (used & (words != value.view(words.dtype))).any() | (used.any() & (value == 0)) | ~value.isfinite()
    return value.masked_fill(other, torch.nan)


def rounding_variance(x: Tensor, weight: Tensor, group_size: int, columns: int = 1) -> Tensor:
    """Weighted variance that rounding adds at 1..8 bits: float64 [8].

    Entry b - 1 is sum_i weight_i * scale(b)^2 * f_i * (1 - f_i) with f_i the fraction that ``pack`` would round at b
    bits, or with 1/12 in place of f_i * (1 - f_i) in the groups that it would dither. Groups with NaN, infinities or
    an overflowing range count as +inf where a weight is not zero.

    Args:
        x: flat tensor [N], float32, float16 or bfloat16.
        weight: float32 [N].
        group_size, columns: as in ``pack``.
    """
    check_format(MIN_BITS, group_size, x.dtype)
    check_flat(x, "x")
    check_weight(weight, x)
    check_columns(x.numel(), columns)
    totals = torch.zeros(MAX_BITS, dtype=torch.float64, device=x.device)
    for chunk in _chunks(0, x.numel(), MIN_BITS, group_size, columns):
        totals += _variance_of_groups(x[chunk.elements], weight[chunk.elements], group_size, columns)
    return totals


def _variance_of_groups(x: Tensor, weight: Tensor, group_size: int, columns: int) -> Tensor:
    totals = []
    weights = to_groups(weight, group_size, columns, 0.0)
    for bits in range(MIN_BITS, MAX_BITS + 1):
        groups = describe_groups(x, bits, group_size, columns)
        scaled = scaled_values(groups)
        fraction = (scaled & 0xFF).double() / _UNITS
        variance = torch.where(dithered(groups, scaled), 1 / 12, fraction * (1 - fraction))
        per_group = (weights * variance).sum(1, True) * groups.scale.double() ** 2
        worst = torch.where((weights != 0).any(1, True), torch.inf, 0.0).double()
        totals.append(torch.where(groups.special, worst, per_group).sum())
    return torch.stack(totals)
