"""The stored format: the reference against its written definition, and what a user relies on."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from codec_tensors import random_tensor, special_tensors
from torch import Tensor

from gact_dist.codec import format as payload_format
from gact_dist.codec import ops, philox, reference

DTYPES = payload_format.PACK_DTYPES
ALL_BITS = range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1)
SEED = -7_123_456_789_012_345_678


# ---- the definition


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    words = [torch.tensor([word], dtype=torch.int64) for word in counter]
    return [int(word) for word in philox.philox(words, key[0] | key[1] << 32)]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Known answers of Random123 (kat_vectors, philox4x32-10)."""
    assert philox_by_hand(counter, key) == list(expected)


def noise_by_hand(row: int, column: int, seed: int) -> int:
    block = row // 8
    counter = (column // 2, block % 2**32, 0, block // 2**32)
    words = philox_by_hand(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return words[row % 8 // 4 * 2 + column % 2].to_bytes(4, "little")[row % 4]


@pytest.mark.parametrize("width", [16, 96])
@pytest.mark.parametrize("first_row", [0, 8, 2**31, 2**35 - 8, 2**36 + 64])
def test_noise_is_numbered_by_row_and_column_beyond_32_bits(first_row: int, width: int) -> None:
    noise = philox.random_bytes(first_row, 21, width, SEED, torch.device("cpu"))
    assert noise.shape == (21, width)
    for row in (0, 1, 3, 4, 6, 7, 8, 13, 20):
        for column in (0, 1, 2, 7, width - 2, width - 1):
            assert int(noise[row, column]) == noise_by_hand(first_row + row, column, SEED)


def test_noise_is_uniform_and_that_of_neighbours_uncorrelated() -> None:
    noise = philox.random_bytes(0, 1 << 14, 64, SEED, torch.device("cpu"))
    expected = noise.numel() / 256
    # chi squared of 255 degrees of freedom: its mean and six standard deviations
    chi_squared = float(((torch.bincount(noise.view(-1), minlength=256) - expected) ** 2 / expected).sum())
    assert chi_squared <= 255 + 6 * (2 * 255) ** 0.5
    centred = (noise.double() - 127.5) / 73.9  # a variance of 1
    for rows, columns in ((1, 0), (2, 0), (4, 0), (8, 0), (0, 1), (0, 2), (1, 1), (4, 1)):
        both = centred[rows:, columns:] * centred[: len(noise) - rows, : 64 - columns]
        assert abs(float(both.mean())) <= 6 / both.numel() ** 0.5


FIELDS = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}


def codes_by_hand(words: Tensor, bits: int, rows: int, width: int) -> list[list[int]]:
    """Codes [rows][width] from the words of a buffer."""
    stored = words.numpy().view(np.uint32).tolist()
    codes = [[0] * width for _ in range(rows)]
    first_word = 0
    for tile in range(0, rows, 32):
        in_tile, start = min(32, rows - tile), 0
        for field in FIELDS[bits]:
            for row in range(in_tile):
                word_row, in_word = row * field // 32, row % (32 // field)
                shift = 8 * (in_word % 4) + field * (in_word // 4)
                for column in range(width):
                    word = stored[first_word + word_row * width + column]
                    codes[tile + row][column] |= ((word >> shift) & (2**field - 1)) << start
            first_word += math.ceil(in_tile * field / 32) * width
            start += field
    assert first_word == len(stored)
    return codes


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (32, 16), (77, 16), (64, 32), (105, 96)])
def test_words_hold_the_fields_of_the_codes_of_a_column(bits: int, rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (rows, width), generator=generator, dtype=torch.int32)
    words = reference.words_of(codes.view(-1), bits, width)
    assert codes_by_hand(words, bits, rows, width) == codes.tolist()
    assert torch.equal(reference.codes_of(words, bits, codes.numel(), width), codes.view(-1))


def scale_by_hand(spread: np.float32, levels: np.float32) -> np.float32:
    """The smallest bfloat16 with an even mantissa of which ``levels`` cover ``spread``."""
    pattern = int((spread / levels).view(np.uint32))
    pattern = -(-pattern // 131072) * 131072
    if np.uint32(pattern).view(np.float32) * levels < spread:
        pattern += 131072
    return np.uint32(pattern).view(np.float32)


def offset_by_hand(low: np.float32, scale: np.float32) -> np.float32:
    """The largest float16 multiple of four steps that is not above ``low``."""
    half = np.float16(np.float64(low) / (4 * np.float64(scale)))
    if np.float64(half) * 4 * np.float64(scale) > np.float64(low):
        half = np.nextafter(half, np.float16(-np.inf))
    return np.float32(half) * np.float32(4) * scale


def pack_by_hand(x: np.ndarray, bits: int, first_row: int, seed: int) -> tuple[list[int], np.float32, np.float32, bool]:
    """Codes, scale, offset and dithering of one finite group, written a second time in float32 and exact fractions."""
    one = np.float32
    low, levels = one(x.min()) + one(0), one(2**bits - 1)
    spread = one(x.max()) - low
    scale = scale_by_hand(spread, levels)
    offset = offset_by_hand(low, scale)
    if x.max() - offset > scale * levels:
        scale = scale_by_hand((spread + abs(low) * one(2**-10)) * one(1 + 2**-16), levels)
        offset = offset_by_hand(low, scale)
    codes, edges = [], 0
    for i, value in enumerate(x):
        # round() of a fraction is to even, and the only rounding of the product
        units = round(Fraction(float(value - offset)) * Fraction(float(one(256) / scale)))
        assert 0 <= units <= 256 * int(levels)
        codes.append((units + noise_by_hand(first_row + i // 16, i % 16, seed)) // 256)
        edges += abs(units % 256 - 128)
    keeps_sign = bool(low < 0 < x.max()) or low > scale / 2
    return codes, scale, offset, keeps_sign and edges < 96 * len(x)


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
@pytest.mark.parametrize("first_row", [0, 96, 2**36 + 32])
@pytest.mark.parametrize("kind", ["spread", "far from zero", "mostly the minimum"])
def test_reference_follows_the_written_definition(bits: int, first_row: int, kind: str) -> None:
    x = random_tensor(64, torch.float32, seed=bits)
    if kind == "far from zero":
        x += 1000
    elif kind == "mostly the minimum":  # fractions of nearly zero, at 8 bits of up to 1/8: plain rounding is better
        x[:40] = x.min()
    words, scale, offset = reference.pack_groups(x, bits, 64, SEED, first_row * 16)
    codes, wanted_scale, wanted_offset, dithered = pack_by_hand(x.numpy(), bits, first_row, SEED)
    assert dithered == (kind != "mostly the minimum") or bits == 8
    assert [code for row in codes_by_hand(words, bits, 4, 16) for code in row] == codes
    assert int(scale) == int(wanted_scale.view(np.uint32) >> 16) + dithered
    assert offset.numpy().view(np.float16) == wanted_offset / (4 * wanted_scale)

    form = bits, 64, SEED, first_row * 16, 64, torch.float32
    decoded = reference.unpack_groups(words, scale, offset, *form).numpy()
    for i, code in enumerate(codes):
        value = wanted_offset + np.float32(code) * wanted_scale
        if dithered:
            unit = wanted_scale * np.float32(2**-8)
            units = code * 256 + 255 - noise_by_hand(first_row + i // 16, i % 16, SEED)
            value = (wanted_offset - unit * np.float32(127.5)) + np.float32(units) * unit
        assert decoded[i] == value


@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_columns_are_quantised_with_the_noise_of_their_rows(bits: int) -> None:
    rows, columns = 200, 32
    x = random_tensor(rows * columns, torch.float32).view(rows, columns) * torch.logspace(-2, 2, columns)
    where = payload_format.sections(x.numel(), bits, 128, columns)
    words, scale, offset = reference._split(reference.pack(x.view(-1), bits, 128, SEED, columns), where)
    codes = codes_by_hand(words, bits, rows, columns)
    for column in (0, 1, 31):
        for block, first in enumerate((0, 128)):
            count = min(128, rows - first)
            step = np.float32(step_of(scale[block * columns + column]).item())
            low = np.float32(offset[block * columns + column].view(torch.float16).item()) * np.float32(4) * step
            for row in range(first, first + count, 7):
                distance = x[row, column].numpy() - low
                units = round(Fraction(float(distance)) * Fraction(float(np.float32(256) / step)))
                assert codes[row][column] == (units + noise_by_hand(row, column, SEED)) // 256


def test_the_buffer_is_codes_then_scales_then_offsets() -> None:
    where = payload_format.sections(1000, 3, 64)
    assert where.rows == 63  # a tile, and 31 rows whose fields of 2 and 1 bits take 2 and 1 rows of words
    assert where.groups == 16
    assert where.scale_start_bytes == (3 + 2 + 1) * 16 * 4
    assert where.offset_start_bytes == where.scale_start_bytes + 16 * 2
    assert where.total_bytes == where.offset_start_bytes + 16 * 2
    assert payload_format.sections(2**20, 4, 128).total_bytes == 2**20 * 4.25 / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_columns_have_the_scales_and_offsets_of_the_transposed_tensor(dtype: torch.dtype, bits: int) -> None:
    rows = random_tensor(192 * 32, dtype).view(192, 32) * torch.logspace(-3, 3, 32).to(dtype)
    where = payload_format.sections(192 * 32, bits, 64, 32)
    assert where.total_bytes == payload_format.sections(192 * 32, bits, 64).total_bytes
    _, scale, offset = reference._split(reference.pack(rows.view(-1), bits, 64, SEED, 32), where)
    turned = reference.pack(rows.t().contiguous().view(-1), bits, 64, SEED)
    _, wanted_scale, wanted_offset = reference._split(turned, where)
    # group block * 32 + column of the one is group column * 3 + block of the other; the noise decides about no flag
    assert torch.equal(scale.view(3, 32).t(), wanted_scale.view(32, 3))
    assert torch.equal(offset.view(3, 32).t(), wanted_offset.view(32, 3))


def test_a_short_block_of_columns_takes_no_room_for_missing_rows() -> None:
    where = payload_format.sections(130 * 96, 4, 128, 96)
    assert where.groups == 2 * 96
    assert where.scale_start_bytes == (4 * 4 + 1) * 96 * 4  # four tiles, and one row of words for two rows
    assert where.total_bytes == where.scale_start_bytes + 2 * 96 * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_an_element_of_a_column_is_no_further_away_than_a_step_of_its_column(dtype: torch.dtype, bits: int) -> None:
    x = random_tensor(200 * 64, dtype).view(200, 64) * torch.logspace(-2, 2, 64).to(dtype)
    decoded = ops.unpack(ops.pack(x.view(-1), bits, 128, SEED, 64), bits, 128, x.numel(), dtype, SEED, 64).view(200, 64)
    for block in (slice(0, 128), slice(128, 200)):
        values = x[block].double()
        spread, size = values.amax(0) - values.amin(0), values.abs().amax(0)
        # The scale is rounded up by at most 2^-6, a float32 offset lies 2^-10 of its size lower; half an ulp of dtype.
        step = (spread + size * 2**-10) / (2**bits - 1) * (1 + 2**-6) + size * torch.finfo(dtype).eps
        assert bool(((decoded[block].double() - values).abs() <= step).all())


def test_codes_beyond_the_end_are_zero() -> None:
    for bits in ALL_BITS:
        words, _, _ = reference.pack_groups(random_tensor(70, torch.float32), bits, 64, SEED, 0)
        codes = [code for row in codes_by_hand(words, bits, 5, 16) for code in row]
        assert sum(codes[70:]) == 0 < sum(codes[:70])
        assert len(words) == sum(math.ceil(5 * field / 32) for field in FIELDS[bits]) * 16


# ---- what a user relies on


def test_same_seed_same_bytes_other_seed_other_bytes() -> None:
    x = random_tensor(4096, torch.float32)
    assert torch.equal(ops.pack(x, 2, 256, 5), ops.pack(x, 2, 256, 5))
    for other in (6, 5 + 2**32, -5):
        assert not torch.equal(ops.pack(x, 2, 256, 5), ops.pack(x, 2, 256, other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_no_element_is_further_away_than_one_step(dtype: torch.dtype, bits: int) -> None:
    for scale in (1e-3, 1.0, 1e4):
        x = random_tensor(4099, dtype, scale=scale)
        decoded = ops.unpack(ops.pack(x, bits, 256, SEED), bits, 256, 4099, dtype, SEED).double()
        _, scales, _ = reference._split(ops.pack(x, bits, 256, SEED), payload_format.sections(4099, bits, 256))
        step = step_of(scales).double().repeat_interleave(256)[:4099]
        # Rounding of the decoded value to dtype: half an ulp, that is eps / 2 of its magnitude or of a subnormal.
        half_ulp = decoded.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        # The three float32 roundings before the codes are made move a value by 3 * 2^-24 of the range.
        arithmetic = step * 2**bits * 3 * 2.0**-24
        assert bool(((decoded - x.double()).abs() <= step + half_ulp + arithmetic).all())


def step_of(scales: Tensor) -> Tensor:
    """Stored scales without the bit that marks dithered groups."""
    return (scales & ~1).view(torch.bfloat16)


def samples(x: Tensor, bits: int, seeds: range, copies: int) -> Tensor:
    """Decoded values of ``x`` [256] for every seed and copy: float64 [len(seeds) * copies, 256]."""
    many = x.repeat(copies)
    decoded = [ops.unpack(ops.pack(many, bits, 256, seed), bits, 256, many.numel(), x.dtype, seed) for seed in seeds]
    return torch.cat(decoded).double().view(-1, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("kind", ["dithered", "plain", "one sign"])
def test_rounding_is_unbiased(dtype: torch.dtype, bits: int, kind: str) -> None:
    x = random_tensor(256, dtype, seed=bits)
    if kind == "plain":
        x[:200] = x.amin()
    elif kind == "one sign":
        x += 100
    decoded = samples(x, bits, range(32), copies=128)
    scale = reference.pack_groups(x, bits, 256, 0, 0)[1]
    step = float(step_of(scale))
    if kind != "one sign":
        assert (int(scale) & 1 == 0) == (kind == "plain")
    # One decoded value has a standard deviation of at most step / 2; six of the mean's are exceeded once in 5e8.
    noise = 6 * step / 2 / decoded.shape[0] ** 0.5
    # Steps are counted in 2^-8 and three float32 roundings come before; the base of a dithered group is a fourth.
    arithmetic = step / 2**9 + 3 * 2.0**-24 * step * 2**bits + 2.0**-24 * float(x.abs().amax() + step)
    half_ulp = decoded.abs().amax(0) * torch.finfo(dtype).eps / 2
    assert bool(((decoded.mean(0) - x.double()).abs() <= noise + arithmetic + half_ulp).all())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_by_column_is_unbiased_and_has_the_predicted_variance(bits: int) -> None:
    x = random_tensor(64 * 32, torch.float32).view(64, 32)
    x[:, 1], x[:50, 2], x[:, 3] = x[:, 1] + 100, 0.0, 0.375
    flat, weight = x.view(-1), torch.ones(64 * 32)
    decoded = [ops.unpack(ops.pack(flat, bits, 64, s, 32), bits, 64, 2048, x.dtype, s, 32) for s in range(1024)]
    errors = (torch.stack(decoded) - flat).double()
    step = float(reference.pack_groups(flat, bits, 64, 0, 0, 32)[1].view(torch.bfloat16).float().max())
    # Six standard errors of a mean over 1024 draws with a standard deviation of at most half a step.
    assert float(errors.mean(0).abs().max()) <= 6 * step / 2 / 1024**0.5
    squares = errors.square().sum(1)
    predicted = float(ops.rounding_variance(flat, weight, 64, 32)[bits - 1])
    assert abs(float(squares.mean()) - predicted) <= 6 * float(squares.std()) / 1024**0.5
    assert bool((errors.view(-1, 64, 32)[:, :, 3] == 0).all())


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("zeros", [0, 150, 240])
def test_rounding_variance_is_the_measured_variance(bits: int, zeros: int) -> None:
    x = random_tensor(256, torch.float32, seed=100 + bits)
    x[:zeros] = x.amin()
    weight = torch.rand(256, generator=torch.Generator().manual_seed(3))
    decoded = samples(x, bits, range(32), copies=128)
    squares = (((decoded - x.double()) ** 2) * weight.double()).sum(1)
    predicted = float(ops.rounding_variance(x, weight, 256)[bits - 1])
    # Six standard errors of the measured mean; its own spread is taken from the 4096 samples.
    tolerance = 6 * float(squares.std()) / decoded.shape[0] ** 0.5
    assert abs(float(squares.mean()) - predicted) <= tolerance
    assert tolerance < 0.05 * predicted


@pytest.mark.parametrize("bits", ALL_BITS)
def test_dithering_halves_the_variance_of_spread_fractions(bits: int) -> None:
    x = random_tensor(256, torch.float32, seed=bits)
    step = float(step_of(reference.pack_groups(x, bits, 256, 0, 0)[1]))
    errors = samples(x, bits, range(32), copies=128) - x.double()
    # Uniform over one step: a variance of 1/12 and a fourth moment of 1/80, so that of 2^20 squares the mean has a
    # relative standard error of sqrt(12^2 / 80 - 1) / 2^10.
    assert abs(float(errors.square().mean()) / (step**2 / 12) - 1) <= 6 * 0.9**0.5 / 2**10
    assert float(errors.abs().max()) <= step / 2 + 2.0**-20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_no_decoded_value_has_another_sign_than_its_whole_group(dtype: torch.dtype, bits: int) -> None:
    """The root of a saved probability, or a quotient by it, must not meet a negative number."""
    for lowest in (0.0, 1e-6, 1e-3, 0.3, 2.0):
        x = random_tensor(4096, dtype).abs() + lowest
        decoded = ops.unpack(ops.pack(x, bits, 64, SEED), bits, 64, 4096, dtype, SEED)
        assert bool((decoded >= 0).all())
        assert bool((decoded > 0).all()) or lowest < 1e-3
        # The top code lies beyond the range by as much as its scale was rounded up: at most 2^-6 of it.
        decoded = ops.unpack(ops.pack(-x, bits, 64, SEED), bits, 64, 4096, dtype, SEED)
        assert float(decoded.max()) <= float(x.max()) / 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("kind", ["spread", "one sign", "zeros", "far", "further", "tails"])
def test_decoded_values_leave_the_range_of_their_group_by_no_more_than_stated(
    dtype: torch.dtype, bits: int, kind: str
) -> None:
    """docs/codec.md, The range of a group."""
    plain = random_tensor(256 * 64, torch.float32, scale=1.0)
    values = {"spread": plain, "one sign": plain.abs() + 1e-3, "zeros": plain.relu(), "far": plain + 100.0}
    x = {**values, "further": plain - 3000.0, "tails": (2 * plain).exp()}[kind]
    for group in (x.to(dtype), -x.to(dtype)):
        payload, levels = ops.pack(group, bits, 256, SEED), 2**bits - 1
        decoded = ops.unpack(payload, bits, 256, group.numel(), dtype, SEED).double().view(-1, 256)
        scales = reference._split(payload, payload_format.sections(group.numel(), bits, 256))[1]
        low, high = (bound[:, None] for bound in group.double().view(-1, 256).aminmax(dim=1))
        below = low.abs() * 2**-10 if dtype == torch.float32 else torch.zeros_like(low)
        # Its scale is rounded up by at most one in 64, and by one in 2^15 for the arithmetic.
        step = (high - low + below) / levels * (1 + 2**-6) * (1 + 2**-15)
        dither = step / 2 * (scales & 1).view(-1, 1)
        half_ulp = decoded.abs() * torch.finfo(dtype).eps / 2 + step * 2**bits * 3 * 2.0**-24
        assert bool((decoded >= low - below - dither - half_ulp).all())
        assert bool((decoded <= low + levels * step + dither + half_ulp).all())
        zeros = (group.view(-1, 256) == 0) & (low == 0)
        assert bool((decoded[zeros] == 0).all())
        assert bool(((decoded >= 0) | (low < 0)).all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_multiples_of_the_step_are_exact(bits: int) -> None:
    codes = torch.arange(256) % 2**bits
    codes[:2] = torch.tensor([0, 2**bits - 1])
    x = codes * 0.375 - 6.0  # 0.375 is a bfloat16, so it is the scale
    assert torch.equal(ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 256, torch.float32, 1), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_constant_groups_of_sixteen_bits_are_exact(dtype: torch.dtype, scale: float) -> None:
    values = random_tensor(8, torch.float32).to(torch.float16).to(dtype)  # 11 significant bits, or 8
    x = values.repeat_interleave(256) * (1.0 if dtype == torch.float16 else 2.0 ** round(math.log2(scale)))
    for bits in ALL_BITS:
        assert torch.equal(ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 2048, dtype, 1), x)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_constant_groups_of_float32_come_back_within_a_thousandth_and_unbiased(bits: int) -> None:
    x = random_tensor(64, torch.float32).repeat_interleave(512)
    decoded = ops.unpack(ops.pack(x, bits, 512, 1), bits, 512, x.numel(), torch.float32, 1)
    step = 2.0 ** x.abs().log2().floor() * 2**-10
    # Three float32 roundings of values that are up to 2^11 steps.
    assert bool(((decoded - x).abs() <= step * (1 + 2**-11)).all())
    # An error has a standard deviation of at most half a step: six of the mean's of 512.
    assert bool(((decoded - x) / step).view(64, 512).mean(1).abs().max() <= 6 * 0.5 / 512**0.5)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("mean", [0.0, 3.0, -3.0, 100.0, -100.0, 1e-3, 3000.0])
def test_a_stored_offset_widens_no_range_by_more_than_a_thousandth_of_its_size(bits: int, mean: float) -> None:
    x = random_tensor(256 * 64, torch.float32, scale=1.0) + mean
    levels = torch.full((64, 1), 2.0**bits - 1)
    groups = x.view(64, 256)
    low, high = groups.amin(1, True), groups.amax(1, True)
    scale, stored, offset, _ = reference.grid_of(low, high, levels, torch.float32)
    assert torch.equal(reference.offset_value(stored, scale, torch.float32), offset)
    assert bool((offset <= low).all())
    assert bool((high - offset <= scale * levels).all())
    # The scale is rounded up by at most one in 64, and by one in 2^16 for the arithmetic.
    widest = (high - low + low.abs() * 2**-10) / levels * (1 + 2**-6) * (1 + 2**-15)
    assert bool((scale <= widest).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_decode_to_finite_values(dtype: torch.dtype) -> None:
    for name, x in special_tensors(dtype).items():
        if name == "whole range" and dtype != torch.float16:
            continue  # the range itself overflows float32: see the test below
        for bits in ALL_BITS:
            decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, x.numel(), dtype, 1)
            if "nan" not in name and (bits > 1 or bool(torch.isfinite(x).all())):
                assert bool(torch.isfinite(decoded[torch.isfinite(x)]).all()), (name, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_infinities_are_kept_beside_finite_values(dtype: torch.dtype, bits: int) -> None:
    x = random_tensor(512, dtype)
    x[3::7], x[5::11] = torch.inf, -torch.inf
    decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 512, dtype, 1)
    infinite = torch.isinf(x)
    assert torch.equal(decoded[infinite], x[infinite])
    spread = x[~infinite].amax() - x[~infinite].amin()
    # One step of the 2^bits - 3 that are left, its rounding up to bfloat16 (2^-7), and half an ulp of dtype.
    step = spread.double() / (2**bits - 3) * (1 + 2**-7) + 16 * torch.finfo(dtype).eps
    assert float((decoded[~infinite].double() - x[~infinite].double()).abs().max()) <= float(step)


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_one_bit_keeps_a_mask_of_one_value_and_one_infinity(infinity: float) -> None:
    x = torch.where(random_tensor(512, torch.float32) > 0, 1.5, infinity)
    assert torch.equal(ops.unpack(ops.pack(x, 1, 256, 1), 1, 256, 512, torch.float32, 1), x)
    x[:256] = infinity
    assert torch.equal(ops.unpack(ops.pack(x, 1, 256, 1), 1, 256, 512, torch.float32, 1), x)


def test_one_bit_with_an_infinity_and_two_values_is_nan_not_wrong() -> None:
    x = torch.tensor([0.0, 1.0, torch.inf, 2.0])
    assert bool(ops.unpack(ops.pack(x, 1, 64, 1), 1, 64, 4, torch.float32, 1).isnan().all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nan_and_overflowing_ranges_decode_to_nan_in_their_group_only(bits: int) -> None:
    x = random_tensor(1024, torch.float32)
    x[300] = torch.nan
    x[600], x[700] = -3e38, 3e38
    decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 1024, torch.float32, 1).view(4, 256)
    assert bool(decoded[1:3].isnan().all())
    assert not bool(decoded[[0, 3]].isnan().any())


def test_rounding_variance_counts_special_groups_as_infinite_where_weighted() -> None:
    x = random_tensor(512, torch.float32)
    x[300] = -torch.inf
    weight = torch.ones(512)
    for function in (ops.rounding_variance, reference.rounding_variance):
        assert bool(torch.isinf(function(x, weight, 256)).all())
        weight[256:] = 0
        assert bool(torch.isfinite(function(x, weight, 256)).all())
        weight[256:] = 1


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 32])
def test_what_is_finite_decodes_finite_up_to_the_largest_number(dtype: torch.dtype, columns: int, bits: int) -> None:
    """As long as the range of a group is finite: the native library and the reference, with dither and without."""
    torch.manual_seed(bits)
    ends = [(-part, part) for part in (0.05, 0.2, 0.3, 0.4375, 0.49)]
    for low, high in (*ends, (0.5, 1.0), (-1.0, -0.5), (-0.9, 0.05), (0.0, 1.0), (-1.0, 0.0)):
        x = (torch.rand(1 << 13, dtype=torch.float64) * (high - low) + low).mul(torch.finfo(dtype).max).to(dtype)
        x[0] = x[1] = x.max()
        packed = ops.pack(x, bits, 128, SEED, columns)
        assert torch.equal(packed, reference.pack(x, bits, 128, SEED, columns))
        decoded = ops.unpack(packed, bits, 128, x.numel(), dtype, SEED, columns)
        assert decoded.isfinite().all()
        assert torch.equal(decoded, reference.unpack(packed, bits, 128, x.numel(), dtype, SEED, columns))
