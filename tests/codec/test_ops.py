"""The operators: native kernels against the PyTorch reference, and the operators as torch sees them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from codec_tensors import random_tensor, raw, special_tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_dist import codec
from gact_dist.codec import format as payload_format
from gact_dist.codec import ops, reference
from gact_dist.codec.format import PART_ELEMENTS, part_unit

DTYPES = payload_format.PACK_DTYPES
ALL_BITS = range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1)
SIZES = (0, 1, 15, 16, 17, 63, 64, 255, 256, 257, 512, 513, 1024, 4099, 9000)
SEED = -7_123_456_789_012_345_678


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each native implementation that this machine has."""
    before = ops.isa()
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


def repeated(numel: int, dtype: torch.dtype) -> Tensor:
    """As random_tensor for millions of elements, which take their time to be drawn."""
    return random_tensor(1 << 16, dtype).repeat(numel // (1 << 16) + 1)[:numel]


@cache
def packed_by_reference(dtype: torch.dtype, bits: int, group_size: int, numel: int) -> Tensor:
    return reference.pack(random_tensor(numel, dtype), bits, group_size, SEED)


@cache
def unpacked_by_reference(dtype: torch.dtype, bits: int, group_size: int, numel: int) -> Tensor:
    return reference.unpack(packed_by_reference(dtype, bits, group_size, numel), bits, group_size, numel, dtype, SEED)


@cache
def rare_by_reference(dtype: torch.dtype, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rare values, packed, and decoded again."""
    x = torch.cat([*special_tensors(dtype).values()])
    packed = reference.pack(x, bits, group_size, SEED)
    return x, packed, reference.unpack(packed, bits, group_size, x.numel(), dtype, SEED)


# ---- native against reference


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_native_pack_and_unpack_give_the_bits_of_the_reference(isa: str, dtype: torch.dtype, bits: int) -> None:
    for group_size in payload_format.GROUP_SIZES:
        for numel in SIZES:
            x = random_tensor(numel, dtype)
            expected = packed_by_reference(dtype, bits, group_size, numel)
            assert torch.equal(ops.pack(x, bits, group_size, SEED), expected), (group_size, numel)
            decoded = ops.unpack(expected, bits, group_size, numel, dtype, SEED)
            assert torch.equal(raw(decoded), raw(unpacked_by_reference(dtype, bits, group_size, numel)))


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_native_agrees_on_rare_values(isa: str, dtype: torch.dtype, group_size: int) -> None:
    for bits in ALL_BITS:
        x, expected, wanted = rare_by_reference(dtype, bits, group_size)
        assert torch.equal(ops.pack(x, bits, group_size, SEED), expected), bits
        decoded = ops.unpack(expected, bits, group_size, x.numel(), dtype, SEED)
        assert torch.equal(raw(decoded), raw(wanted)), bits


@cache
def one_apart_by_reference(dtype: torch.dtype, group_size: int) -> tuple[Tensor, Tensor]:
    """Groups of either sign in which one element, each in turn, is the lowest, the highest or NaN; packed."""
    values = torch.rand(group_size, group_size, generator=torch.Generator().manual_seed(1)) + 1
    apart = torch.stack([values + torch.diag(torch.full((group_size,), by)) for by in (-7.0, 7.0, torch.nan)])
    x = torch.cat([apart, -apart]).reshape(-1).to(dtype)
    return x, reference.pack(x, 4, group_size, SEED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [64, 128])
def test_the_range_of_a_group_has_every_element(isa: str, dtype: torch.dtype, group_size: int) -> None:
    x, expected = one_apart_by_reference(dtype, group_size)
    assert torch.equal(ops.pack(x, 4, group_size, SEED), expected)


# Rows and columns: short last blocks and tiles, a single row, none, and rows of two panels.
ROWS_AND_COLUMNS = ((131, 32), (70, 96), (129, 384), (1, 64), (64, 160), (0, 32), (66, 1056))


@cache
def column_tensors(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    plain = random_tensor(rows * columns, dtype) * torch.logspace(-2, 2, columns).to(dtype).repeat(rows)
    cases = {"plain": plain}
    if rows > 64:
        rare = plain.clone().view(rows, columns)
        rare[:, 1], rare[40, 2], rare[:, 3] = 1.5, torch.nan, rare[:, 3].abs() + 1
        rare[3::5, 4], rare[4::5, 4], rare[7::9, 5], rare[::2, 6] = torch.inf, -torch.inf, torch.inf, 0.0
        rare[:, 7] = torch.where(rare[:, 7] > 0, 0.5, -torch.inf)
        rare[:, 8], rare[:, 9] = torch.finfo(dtype).max, torch.finfo(dtype).min
        rare[:, 10] = torch.where(rare[:, 10] > 0, torch.finfo(dtype).max, torch.finfo(dtype).min)
        rare[-1, -1] = torch.inf
        cases["rare values"] = rare.view(-1)
    return cases


@cache
def columns_by_reference(
    name: str, rows: int, columns: int, dtype: torch.dtype, bits: int, group_size: int
) -> tuple[Tensor, Tensor]:
    """What column_tensors() has, packed, and decoded again."""
    x = column_tensors(rows, columns, dtype)[name]
    packed = reference.pack(x, bits, group_size, SEED, columns)
    return packed, reference.unpack(packed, bits, group_size, x.numel(), dtype, SEED, columns)


@cache
def column_variance_by_reference(name: str, rows: int, columns: int, dtype: torch.dtype, group_size: int) -> Tensor:
    x = column_tensors(rows, columns, dtype)[name]
    return reference.rounding_variance(x, column_weight(rows, columns), group_size, columns)


def column_weight(rows: int, columns: int) -> Tensor:
    return torch.rand(rows * columns, generator=torch.Generator().manual_seed(2))


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
@pytest.mark.parametrize(("rows", "columns"), ROWS_AND_COLUMNS)
def test_native_columns_are_those_of_the_reference(
    isa: str, dtype: torch.dtype, group_size: int, rows: int, columns: int
) -> None:
    for name, x in column_tensors(rows, columns, dtype).items():
        for bits in (1, 2, 3, 5, 8):
            expected, wanted = columns_by_reference(name, rows, columns, dtype, bits, group_size)
            assert torch.equal(ops.pack(x, bits, group_size, SEED, columns), expected), (name, bits)
            decoded = ops.unpack(expected, bits, group_size, x.numel(), dtype, SEED, columns)
            assert torch.equal(raw(decoded), raw(wanted)), (name, bits)
        variance = ops.rounding_variance(x, column_weight(rows, columns), group_size, columns)
        expected = column_variance_by_reference(name, rows, columns, dtype, group_size)
        torch.testing.assert_close(variance, expected, rtol=1e-5, atol=0)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_columns_read_and_write_unaligned_memory_and_stream_large_outputs(isa: str, dtype: torch.dtype) -> None:
    rows = (20 << 20) // dtype.itemsize // 96
    x = repeated(rows * 96 + 1, dtype)[1:]
    packed = ops.pack(x.clone(), 3, 128, SEED, 96)
    assert torch.equal(ops.pack(x, 3, 128, SEED, 96), packed)
    wanted = ops.unpack(packed, 3, 128, x.numel(), dtype, SEED, 96)
    for out in (torch.empty(x.numel() + 1, dtype=dtype)[1:], torch.empty(x.numel(), dtype=dtype)):
        ops.unpack_out(packed, 3, 128, x.numel(), dtype, SEED, out, 96)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_reads_and_writes_unaligned_memory(isa: str, dtype: torch.dtype) -> None:
    x = random_tensor(5001, dtype)[1:]
    expected = reference.pack(x, 3, 128, SEED)
    out = torch.empty(5001, dtype=dtype)[1:]
    ops.unpack_out(ops.pack(x, 3, 128, SEED), 3, 128, 5000, dtype, SEED, out)
    assert torch.equal(raw(out), raw(reference.unpack(expected, 3, 128, 5000, dtype, SEED)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 4, 6, 8])
def test_large_outputs_are_decoded_around_the_cache_to_the_same_bits(isa: str, dtype: torch.dtype, bits: int) -> None:
    numel = (20 << 20) // dtype.itemsize + 77  # above the 16 MiB from which unpack_out streams
    x = repeated(numel, dtype)
    buffer = ops.pack(x, bits, 256, SEED)
    out = torch.empty_like(x)
    ops.unpack_out(buffer, bits, 256, numel, dtype, SEED, out)
    assert torch.equal(out, ops.unpack(buffer, bits, 256, numel, dtype, SEED))


def parts_of(numel: int, unit: int) -> list[tuple[int, int]]:
    """(first element, last) of parts that lie at multiples of a unit, or end where the elements end."""
    whole = numel // unit * unit
    return [(0, unit), (unit, 2 * unit), (2 * unit, whole), (whole, numel), (unit, numel), (unit, unit), (0, numel)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "numel"), [(1, 5 * PART_ELEMENTS + 77), (96, 96 * 700), (2048, 2048 * 500)])
def test_a_part_is_decoded_to_the_bits_that_it_has_in_the_whole(
    isa: str, dtype: torch.dtype, columns: int, numel: int
) -> None:
    x = repeated(numel, dtype)
    x[:: numel // 5] = torch.inf  # rare values, in some of the parts
    for bits, group_size in ((1, 64), (3, 64), (4, 128), (7, 128)):
        buffer = ops.pack(x, bits, group_size, SEED, columns)
        whole = ops.unpack(buffer, bits, group_size, numel, dtype, SEED, columns)
        for first, last in parts_of(numel, part_unit(group_size, columns)):
            for unpack_part in (ops.unpack_part, reference.unpack_part):
                out = torch.full((last - first + 2,), 7, dtype=dtype)
                form = bits, group_size, numel, dtype, SEED
                unpack_part(buffer, *form, out[1:-1], columns, first)
                assert torch.equal(raw(out[1:-1]), raw(whole[first:last])), (bits, first, last)
                assert float(out[0]) == float(out[-1]) == 7


@pytest.mark.parametrize("module", [ops, reference])
@pytest.mark.parametrize(("first", "last"), [(64, 8192), (-8192, 0), (8192, 16000), (16384, 20001), (24576, 24576)])
def test_a_part_that_does_not_begin_and_end_at_its_unit_is_refused(module: Any, first: int, last: int) -> None:
    buffer, out = ops.pack(torch.zeros(20000), 4, 128, SEED), torch.empty(last - first)
    with pytest.raises((ValueError, RuntimeError), match=f"the part is elements {first} to {last} of 20000"):
        module.unpack_part(buffer, 4, 128, 20000, torch.float32, SEED, out, 1, first)


@pytest.mark.parametrize("columns", [1, 32])
@pytest.mark.parametrize("bits", ALL_BITS)
def test_subnormal_bfloat16_are_decoded_beside_larger_numbers(isa: str, columns: int, bits: int) -> None:
    """The processor's own conversion to bfloat16 would make them zero."""
    x = random_tensor(4096, torch.bfloat16).abs() + 1
    lowest = torch.arange(1, 129, dtype=torch.int16).view(torch.bfloat16)  # up to the smallest normal number
    x[: 32 * 128 : 32], x[5::64] = lowest, 0.0
    x[5::64] += lowest[:64]
    expected = reference.pack(x, bits, 64, SEED, columns)
    assert torch.equal(ops.pack(x, bits, 64, SEED, columns), expected)
    decoded = ops.unpack(expected, bits, 64, x.numel(), x.dtype, SEED, columns)
    assert torch.equal(raw(decoded), raw(reference.unpack(expected, bits, 64, x.numel(), x.dtype, SEED, columns)))
    assert bool(((decoded != 0) & (decoded.abs() < torch.finfo(x.dtype).smallest_normal)).any())


def test_flushing_subnormals_does_not_change_the_stored_bytes(isa: str) -> None:
    x = torch.arange(1, 1025, dtype=torch.int32).view(torch.float32)
    expected = ops.pack(x, 4, 256, SEED)
    torch.set_flush_denormal(True)
    try:
        assert torch.equal(ops.pack(x, 4, 256, SEED), expected)
    finally:
        torch.set_flush_denormal(False)


def test_pack_does_not_depend_on_the_number_of_threads(isa: str) -> None:
    x = random_tensor(300_001, torch.bfloat16)
    weight = torch.rand(x.numel(), generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows = ops.pack(x[:299_904], 3, 64, SEED, 96)  # 3124 rows
            variance = ops.rounding_variance(x[:299_904], weight[:299_904], 64, 96)
            results.append((ops.pack(x, 3, 64, SEED), ops.rounding_variance(x, weight, 64), rows, variance))
            results[-1] += (ops.unpack(rows, 3, 64, 299_904, x.dtype, SEED, 96), ops.pack_mask(x > 0))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_native_masks_are_the_bits_of_the_reference(isa: str, dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = (random_tensor(numel, torch.float32) > 0).to(dtype)
        if dtype != torch.bool:
            x *= 3
        if dtype.is_floating_point and numel > 20:
            x[3], x[4], x[5] = -0.0, torch.nan, torch.finfo(dtype).smallest_normal
        expected = reference.pack_mask(x)
        assert torch.equal(ops.pack_mask(x), expected)
        decoded = ops.unpack_mask(expected, numel, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, (x != 0).to(dtype))
        assert torch.equal(decoded, reference.unpack_mask(expected, numel, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_native_rounding_variance_is_that_of_the_reference(isa: str, dtype: torch.dtype, group_size: int) -> None:
    for numel in (0, 1, 100, 4099):
        x = random_tensor(numel, dtype)
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        # float32 partial sums of at most 32 terms each: relative error below 32 * 2^-24 = 2e-6.
        expected = reference.rounding_variance(x, weight, group_size)
        torch.testing.assert_close(ops.rounding_variance(x, weight, group_size), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("rows", [3, 300, 3000])
def test_one_element_of_another_value_is_found_wherever_it_is(
    isa: str, dtype: torch.dtype, where: str, rows: int
) -> None:
    noise = (random_tensor(rows * 50, torch.float32).view(rows, 50) > 0).to(dtype) * (1 / 0.9)
    noise[1, 0], noise[-2, -1] = 1 / 0.9, 1 / 0.9
    assert codec.is_binary(noise)
    assert codec.is_binary(noise.t()[::2])
    for other in (-0.0, 1.0, -1 / 0.9, torch.inf, torch.nan, torch.finfo(dtype).smallest_normal):
        changed = noise.clone()
        changed[(0, 0) if where == "first" else (-1, -1)] = other
        assert not codec.is_binary(changed), other
        value = ops.binary_value(changed.view(-1))
        assert (value.dtype, value.dim()) == (dtype, 0)
        assert value.isnan()
        assert reference.binary_value(changed.view(-1)).isnan()


def test_what_is_one_value_is_binary_if_it_is_finite(isa: str) -> None:
    for value in (0.0, 2.0, -2.0, 1e-40):
        x = torch.full((1500,), value)
        assert codec.is_binary(x)
        assert torch.equal(codec.unpack(codec.pack_binary(x)).view(torch.int32), x.view(torch.int32))
        assert torch.equal(reference.binary_value(x).view(torch.int32), x[0].view(torch.int32))
    for other in (torch.inf, torch.nan, -0.0):
        assert not codec.is_binary(torch.full((1500,), other))
        assert reference.binary_value(torch.full((1500,), other)).isnan()
    assert not codec.is_binary(torch.zeros(0))
    assert not codec.is_binary(torch.zeros(9, dtype=torch.bool))
    assert not codec.is_binary(torch.zeros(9, dtype=torch.complex64))


def test_what_is_not_binary_is_stored_as_it_is(isa: str) -> None:
    for x in (torch.tensor([-0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, torch.inf])):
        packed = codec.pack_binary(x)
        assert packed.scheme is codec.Scheme.EXACT
        assert torch.equal(codec.unpack(packed).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("constant", [1 / 0.9, -2.5])
def test_zeros_beside_another_value_come_back_bit_for_bit(isa: str, constant: float) -> None:
    x = torch.where(random_tensor(2000, torch.float32).view(40, 50) > 0, constant, 0.0)
    packed = codec.pack_binary(x)
    for decoded in (codec.unpack(packed), ops._unpack_binary(packed.payload, x.numel(), packed.constant).view(40, 50)):
        assert torch.equal(decoded.view(torch.int32), x.view(torch.int32))


# ---- the operators as torch sees them


def operator_calls() -> dict[str, tuple]:
    x = random_tensor(700, torch.float32)
    buffer = reference.pack(x, 3, 64, 1)
    mask = reference.pack_mask(x)
    return {
        "pack": (x, 3, 64, 1),
        "pack_out": (x, 3, 64, 1, torch.empty_like(buffer)),
        "unpack": (buffer, 3, 64, 700, torch.float32, SEED),
        "unpack_out": (buffer, 3, 64, 700, torch.float32, SEED, torch.empty(700)),
        "unpack_part": (buffer, 3, 64, 700, torch.float32, SEED, torch.empty(700), 1, 0),
        "unpack_through": (buffer, 3, 64, 700, torch.float32, SEED, torch.empty(700), 1, 0, 0),
        "unpack_gradient": (buffer, 3, 64, 700, torch.float32, SEED, x, 1, 1),
        "mask_product": (mask, x, torch.tensor(2.0), False),
        "pack_mask": (x,),
        "unpack_mask": (mask, 700, torch.bool),
        "rounding_variance": (x, torch.ones(700), 64),
    }


@pytest.mark.parametrize("name", sorted(operator_calls()))
def test_opcheck_accepts_the_operator(name: str) -> None:
    torch.library.opcheck(getattr(ops, name), operator_calls()[name])


def test_fake_tensors_have_the_size_of_huge_results() -> None:
    numel = 2**33 + 5
    with FakeTensorMode():
        x = torch.empty(numel, dtype=torch.bfloat16)
        buffer = ops.pack(x, 4, 256, 1)
        assert buffer.numel() == payload_format.sections(numel, 4, 256).total_bytes
        assert ops.unpack(buffer, 4, 256, numel, torch.bfloat16, SEED).shape == (numel,)
        assert ops.pack_mask(x).numel() == (numel + 7) // 8


@pytest.mark.parametrize("columns", [1, 32])
@pytest.mark.parametrize("module", [ops, reference])
def test_what_is_contiguous_is_packed_in_the_order_of_its_memory(module, columns: int) -> None:
    x = random_tensor(1024, torch.bfloat16)
    flat = module.pack(x, 4, 64, SEED, columns)
    assert torch.equal(module.pack(x.view(4, 8, 32), 4, 64, SEED, columns), flat)


@pytest.mark.parametrize("native", [True, False])
def test_wrong_arguments_raise(native: bool) -> None:
    module = ops if native else reference
    x = torch.zeros(512)
    buffer = reference.pack(x, 4, 256, 0)
    wrong = [
        lambda: module.pack(x, 0, 256, 0),
        lambda: module.pack(x, 9, 256, 0),
        lambda: module.pack(x, 4, 100, 0),
        lambda: module.pack(x.int(), 4, 256, 0),
        lambda: module.pack(x.view(16, 32).t(), 4, 256, 0),
        lambda: module.pack(x[::2], 4, 256, 0),
        lambda: module.pack_out(x, 4, 256, 0, buffer[1:]),
        lambda: module.pack(x, 4, 256, 0, 0),
        lambda: module.pack(x, 4, 256, 0, 16),
        lambda: module.pack(x, 4, 256, 0, 96),
        lambda: module.unpack(buffer, 4, 256, 512, torch.float32, SEED, 64),
        lambda: module.rounding_variance(x, x, 256, 48),
        lambda: module.unpack(buffer, 3, 256, 512, torch.float32, SEED),
        lambda: module.unpack(buffer, 4, 256, 512, torch.int32, SEED),
        lambda: module.unpack_out(buffer, 4, 256, 512, torch.float32, SEED, torch.empty(511)),
        lambda: module.unpack_mask(buffer, 7, torch.bool),
        lambda: module.pack_mask(x.long()),
        lambda: module.rounding_variance(x, torch.ones(511), 256),
    ]
    for call in wrong:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            call()


def test_without_the_native_library_the_reference_serves_with_one_warning() -> None:
    script = """
import warnings, torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from gact_dist import codec
    from gact_dist.codec import ops
    at_import = len(seen)
    x = torch.arange(1000, dtype=torch.float32)
    packed = codec.pack(x, 3, seed=9)
    codec.unpack(packed), codec.pack(x, 3, seed=9)
ours = [str(w.message) for w in seen if "slow PyTorch reference" in str(w.message)]
print(ops.isa(), at_import, len(ours), packed.payload.numpy().tobytes().hex())
"""
    environment = os.environ | {"GACT_DIST_ISA": "reference"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    expected = ops.pack(torch.arange(1000, dtype=torch.float32), 3, codec.DEFAULT_GROUP_SIZE, 9)
    assert result.stdout.split() == ["reference", "0", "1", expected.numpy().tobytes().hex()]


def test_an_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        ops.set_isa("avx1024")
