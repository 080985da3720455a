"""The operators: native kernels against the PyTorch reference, and the reference against its definition."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_dist import ops
from gact_dist import ops_reference as reference

DTYPES = reference.PACK_DTYPES
ALL_BITS = range(reference.MIN_BITS, reference.MAX_BITS + 1)
SIZES = (0, 1, 15, 16, 17, 63, 64, 255, 256, 257, 512, 513, 1024, 4099, 9000)
SEED = -7_123_456_789_012_345_678


@pytest.fixture(params=ops.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test once with each native implementation that this machine has."""
    before = ops.isa()
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa(before)


@cache
def packed_by_reference(dtype: torch.dtype, bits: int, group_size: int, numel: int) -> Tensor:
    return reference.pack(random_tensor(numel, dtype), bits, group_size, SEED)


@cache
def unpacked_by_reference(dtype: torch.dtype, bits: int, group_size: int, numel: int) -> Tensor:
    return reference.unpack(packed_by_reference(dtype, bits, group_size, numel), bits, group_size, numel, dtype)


def random_tensor(numel: int, dtype: torch.dtype, scale: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def raw(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def special_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Flat tensors of some thousand elements with what is rare: infinities, NaN, constants, extreme ranges."""
    info = torch.finfo(dtype)
    smallest = torch.tensor(1, dtype=torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype).item()
    base = random_tensor(2048, dtype)
    cases = {"constant": torch.full_like(base, -1.7), "zeros": torch.zeros_like(base)}
    cases["signed zeros"] = torch.where(base > 0, 0.0, -0.0).to(dtype)
    cases["subnormal"] = (torch.arange(2048) % 7).to(dtype) * smallest
    cases["largest"] = base.clone().fill_(info.max)
    cases["whole range"] = torch.where(base > 0, info.max, info.min).to(dtype)
    cases["mask"] = torch.where(base > 0, 0.0, info.min).to(dtype)
    cases["near the top"] = (info.max * (1 - base.float().abs() / 100)).to(dtype)
    cases["tiny"] = (base.float() * 1e-36).to(dtype)
    cases["wide"] = (base.float() * torch.logspace(-30, 30, 2048)).clamp(info.min, info.max).to(dtype)
    for name, values in (("minus", [-torch.inf]), ("plus", [torch.inf]), ("both", [-torch.inf, torch.inf])):
        for every in (1, 3, 200):
            case = base.clone()
            case[::every] = torch.tensor(values).repeat(2048)[: case[::every].numel()].to(dtype)
            cases[f"{name} infinity, every {every}"] = case
    cases["attention mask"] = torch.where(base > 0, 0.0, -torch.inf).to(dtype)
    cases["nan"] = base.clone()
    cases["nan"][700] = torch.nan
    cases["negative nan"] = base.clone()
    raw(cases["negative nan"])[-1] = 0xFF
    raw(cases["negative nan"])[-2] = 0xFF
    return cases


# ---- native against reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_native_pack_and_unpack_give_the_bits_of_the_reference(isa: str, dtype: torch.dtype, bits: int) -> None:
    for group_size in reference.GROUP_SIZES:
        for numel in SIZES:
            x = random_tensor(numel, dtype)
            expected = packed_by_reference(dtype, bits, group_size, numel)
            assert torch.equal(ops.pack(x, bits, group_size, SEED), expected), (group_size, numel)
            decoded = ops.unpack(expected, bits, group_size, numel, dtype)
            assert torch.equal(raw(decoded), raw(unpacked_by_reference(dtype, bits, group_size, numel)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", reference.GROUP_SIZES)
def test_native_agrees_on_rare_values(isa: str, dtype: torch.dtype, group_size: int) -> None:
    for name, x in special_tensors(dtype).items():
        for bits in ALL_BITS:
            expected = reference.pack(x, bits, group_size, SEED)
            assert torch.equal(ops.pack(x, bits, group_size, SEED), expected), (name, bits)
            decoded = ops.unpack(expected, bits, group_size, x.numel(), dtype)
            wanted = reference.unpack(expected, bits, group_size, x.numel(), dtype)
            assert torch.equal(raw(decoded), raw(wanted)), (name, bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_reads_and_writes_unaligned_memory(isa: str, dtype: torch.dtype) -> None:
    x = random_tensor(5001, dtype)[1:]
    expected = reference.pack(x, 3, 128, SEED)
    out = torch.empty(5001, dtype=dtype)[1:]
    ops.unpack_out(ops.pack(x, 3, 128, SEED), 3, 128, 5000, dtype, out)
    assert torch.equal(raw(out), raw(reference.unpack(expected, 3, 128, 5000, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 4, 6, 8])
def test_large_outputs_are_decoded_around_the_cache_to_the_same_bits(isa: str, dtype: torch.dtype, bits: int) -> None:
    numel = (20 << 20) // dtype.itemsize + 77  # above the 16 MiB from which unpack_out streams
    x = random_tensor(numel, dtype)
    buffer = ops.pack(x, bits, 256, SEED)
    out = torch.empty_like(x)
    ops.unpack_out(buffer, bits, 256, numel, dtype, out)
    assert torch.equal(out, ops.unpack(buffer, bits, 256, numel, dtype))


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
            results.append((ops.pack(x, 3, 64, SEED), ops.rounding_variance(x, weight, 64), ops.pack_mask(x > 0)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", reference.MASK_DTYPES)
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
@pytest.mark.parametrize("group_size", reference.GROUP_SIZES)
def test_native_rounding_variance_is_that_of_the_reference(isa: str, dtype: torch.dtype, group_size: int) -> None:
    for numel in (0, 1, 100, 4099):
        x = random_tensor(numel, dtype)
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        # float32 partial sums of at most 32 terms each: relative error below 32 * 2^-24 = 2e-6.
        expected = reference.rounding_variance(x, weight, group_size)
        torch.testing.assert_close(ops.rounding_variance(x, weight, group_size), expected, rtol=1e-5, atol=0)


# ---- the definition


def philox_by_hand(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    words = [torch.tensor([word], dtype=torch.int64) for word in counter]
    return [int(word) for word in reference.philox_words(words, key)]


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


def noise_by_hand(element: int, seed: int) -> int:
    block, vector, lane = element >> 7, (element >> 4) & 7, element & 15
    counter = block * 16 + lane
    words = philox_by_hand((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return words[vector >> 1] >> 16 if vector & 1 else words[vector >> 1] & 0xFFFF


@pytest.mark.parametrize("first_element", [0, 64, 192, 2**31, 2**36 + 64, 2**40 + 128])
def test_noise_is_numbered_by_element_beyond_32_bits(first_element: int) -> None:
    noise = reference.random16(first_element, 300, SEED, torch.device("cpu"))
    for i in (0, 1, 15, 16, 63, 64, 127, 128, 299):
        assert int(noise[i]) == noise_by_hand(first_element + i, SEED)


def pack_by_hand(x: np.ndarray, bits: int, first_element: int, seed: int) -> tuple[list[int], np.float32, np.float32]:
    """Codes, scale and offset of one finite group, float32 operation by operation, written a second time."""
    one = np.float32
    low, levels = one(x.min()) + one(0), one(2**bits - 1)
    spread = one(x.max()) - low
    pattern = int((spread / levels).view(np.uint32))
    pattern = -(-pattern // 65536) * 65536
    if np.uint32(pattern).view(np.float32) * levels < spread:
        pattern += 65536
    scale = np.uint32(pattern).view(np.float32)
    codes = []
    for i, value in enumerate(x):
        steps = min(int(np.rint((value - low) * (one(65536) / scale))), int(levels) * 65536)
        codes.append((steps + noise_by_hand(first_element + i, seed)) >> 16)
    return codes, scale, low


@pytest.mark.parametrize("bits", [1, 2, 5, 8])
@pytest.mark.parametrize("first_group", [0, 3, 2**33 + 1])
def test_reference_follows_the_written_definition(bits: int, first_group: int) -> None:
    x = random_tensor(64, torch.float32, seed=bits)
    planes, scale, offset = reference.pack_groups(x, bits, 64, SEED, first_group)
    codes, wanted_scale, wanted_offset = pack_by_hand(x.numpy(), bits, first_group * 64, SEED)
    for i, code in enumerate(codes):
        stored = sum(((int(planes[0, plane, i // 8]) >> (i % 8)) & 1) << plane for plane in range(bits))
        assert stored == code
    assert scale.item() == wanted_scale
    assert offset.item() == wanted_offset


def test_the_buffer_is_planes_then_scales_then_aligned_offsets() -> None:
    where = reference.sections(1000, 3, 64, torch.float32)
    assert where.groups == 16
    assert where.scale_start_bytes == 16 * 3 * 8
    assert where.offset_start_bytes == where.scale_start_bytes + 32
    assert where.total_bytes == where.offset_start_bytes + 16 * 4
    odd = reference.sections(64 * 3, 1, 64, torch.float32)
    assert odd.offset_start_bytes % 4 == 0
    assert odd.offset_start_bytes == odd.scale_start_bytes + 6 + 2


def test_codes_beyond_the_end_are_zero() -> None:
    planes, _, _ = reference.pack_groups(random_tensor(70, torch.float32), 8, 64, SEED, 0)
    codes = planes[1].view(8, 8).numpy()
    assert np.unpackbits(codes, axis=1, bitorder="little")[:, 6:].sum() == 0
    assert np.unpackbits(codes, axis=1, bitorder="little")[:, :6].sum() > 0


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
        decoded = ops.unpack(ops.pack(x, bits, 256, SEED), bits, 256, 4099, dtype).double()
        _, scales, _ = reference._split(
            ops.pack(x, bits, 256, SEED), reference.sections(4099, bits, 256, dtype), bits, 256, dtype
        )
        step = scales.double().repeat_interleave(256)[:4099]
        # Rounding of the decoded value to dtype: half an ulp, that is eps / 2 of its magnitude or of a subnormal.
        half_ulp = decoded.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        # The three float32 roundings before the codes are made move a value by 3 * 2^-24 of the range.
        arithmetic = step * 2**bits * 3 * 2.0**-24
        assert bool(((decoded - x.double()).abs() <= step + half_ulp + arithmetic).all())


def samples(x: Tensor, bits: int, seeds: range, copies: int) -> Tensor:
    """Decoded values of ``x`` [256] for every seed and copy: float64 [len(seeds) * copies, 256]."""
    many = x.repeat(copies)
    decoded = [ops.unpack(ops.pack(many, bits, 256, seed), bits, 256, many.numel(), x.dtype) for seed in seeds]
    return torch.cat(decoded).double().view(-1, 256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_rounding_is_unbiased(dtype: torch.dtype, bits: int) -> None:
    x = random_tensor(256, dtype, seed=bits)
    decoded = samples(x, bits, range(32), copies=128)
    step = float(reference.pack_groups(x, bits, 256, 0, 0)[1])
    # One decoded value has a standard deviation of at most step / 2; six of the mean's are exceeded once in 5e8.
    noise = 6 * step / 2 / decoded.shape[0] ** 0.5
    # Steps are counted in 2^-16 and three float32 roundings come before.
    arithmetic = step / 2**17 + 3 * 2.0**-24 * step * 2**bits
    half_ulp = decoded.abs().amax(0) * torch.finfo(dtype).eps / 2
    assert bool(((decoded.mean(0) - x.double()).abs() <= noise + arithmetic + half_ulp).all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_rounding_variance_is_the_measured_variance(bits: int) -> None:
    x = random_tensor(256, torch.float32, seed=100 + bits)
    weight = torch.rand(256, generator=torch.Generator().manual_seed(3))
    decoded = samples(x, bits, range(32), copies=128)
    squares = (((decoded - x.double()) ** 2) * weight.double()).sum(1)
    predicted = float(ops.rounding_variance(x, weight, 256)[bits - 1])
    # Six standard errors of the measured mean; its own spread is taken from the 4096 samples.
    tolerance = 6 * float(squares.std()) / decoded.shape[0] ** 0.5
    assert abs(float(squares.mean()) - predicted) <= tolerance
    assert tolerance < 0.05 * predicted


@pytest.mark.parametrize("bits", ALL_BITS)
def test_multiples_of_the_step_are_exact(bits: int) -> None:
    codes = torch.arange(256) % 2**bits
    codes[:2] = torch.tensor([0, 2**bits - 1])
    x = codes * 0.375 - 6.0  # 0.375 is a bfloat16, so it is the scale
    assert torch.equal(ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 256, torch.float32), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_are_exact(dtype: torch.dtype) -> None:
    x = random_tensor(8, dtype).repeat_interleave(256)
    for bits in ALL_BITS:
        assert torch.equal(ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 2048, dtype), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_decode_to_finite_values(dtype: torch.dtype) -> None:
    for name, x in special_tensors(dtype).items():
        if name == "whole range" and dtype != torch.float16:
            continue  # the range itself overflows float32: see the test below
        for bits in ALL_BITS:
            decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, x.numel(), dtype)
            if "nan" not in name and (bits > 1 or bool(torch.isfinite(x).all())):
                assert bool(torch.isfinite(decoded[torch.isfinite(x)]).all()), (name, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_infinities_are_kept_beside_finite_values(dtype: torch.dtype, bits: int) -> None:
    x = random_tensor(512, dtype)
    x[3::7], x[5::11] = torch.inf, -torch.inf
    decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 512, dtype)
    infinite = torch.isinf(x)
    assert torch.equal(decoded[infinite], x[infinite])
    spread = x[~infinite].amax() - x[~infinite].amin()
    # One step of the 2^bits - 3 that are left, its rounding up to bfloat16 (2^-7), and half an ulp of dtype.
    step = spread.double() / (2**bits - 3) * (1 + 2**-7) + 16 * torch.finfo(dtype).eps
    assert float((decoded[~infinite].double() - x[~infinite].double()).abs().max()) <= float(step)


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_one_bit_keeps_a_mask_of_one_value_and_one_infinity(infinity: float) -> None:
    x = torch.where(random_tensor(512, torch.float32) > 0, 1.5, infinity)
    assert torch.equal(ops.unpack(ops.pack(x, 1, 256, 1), 1, 256, 512, torch.float32), x)
    x[:256] = infinity
    assert torch.equal(ops.unpack(ops.pack(x, 1, 256, 1), 1, 256, 512, torch.float32), x)


def test_one_bit_with_an_infinity_and_two_values_is_nan_not_wrong() -> None:
    x = torch.tensor([0.0, 1.0, torch.inf, 2.0])
    assert bool(ops.unpack(ops.pack(x, 1, 64, 1), 1, 64, 4, torch.float32).isnan().all())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nan_and_overflowing_ranges_decode_to_nan_in_their_group_only(bits: int) -> None:
    x = random_tensor(1024, torch.float32)
    x[300] = torch.nan
    x[600], x[700] = -3e38, 3e38
    decoded = ops.unpack(ops.pack(x, bits, 256, 1), bits, 256, 1024, torch.float32).view(4, 256)
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


# ---- the operators as torch sees them


def operator_calls() -> dict[str, tuple]:
    x = random_tensor(700, torch.float32)
    buffer = reference.pack(x, 3, 64, 1)
    mask = reference.pack_mask(x)
    return {
        "pack": (x, 3, 64, 1),
        "pack_out": (x, 3, 64, 1, torch.empty_like(buffer)),
        "unpack": (buffer, 3, 64, 700, torch.float32),
        "unpack_out": (buffer, 3, 64, 700, torch.float32, torch.empty(700)),
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
        assert buffer.numel() == reference.sections(numel, 4, 256, torch.bfloat16).total_bytes
        assert ops.unpack(buffer, 4, 256, numel, torch.bfloat16).shape == (numel,)
        assert ops.pack_mask(x).numel() == (numel + 7) // 8


@pytest.mark.parametrize("native", [True, False])
def test_wrong_arguments_raise(native: bool) -> None:
    module = ops if native else reference
    x = torch.zeros(256)
    buffer = reference.pack(x, 4, 256, 0)
    wrong = [
        lambda: module.pack(x, 0, 256, 0),
        lambda: module.pack(x, 9, 256, 0),
        lambda: module.pack(x, 4, 100, 0),
        lambda: module.pack(x.int(), 4, 256, 0),
        lambda: module.pack(x.view(16, 16), 4, 256, 0),
        lambda: module.pack(x[::2], 4, 256, 0),
        lambda: module.pack_out(x, 4, 256, 0, buffer[1:]),
        lambda: module.unpack(buffer, 3, 256, 256, torch.float32),
        lambda: module.unpack(buffer, 4, 256, 256, torch.int32),
        lambda: module.unpack_out(buffer, 4, 256, 256, torch.float32, torch.empty(255)),
        lambda: module.unpack_mask(buffer, 7, torch.bool),
        lambda: module.pack_mask(x.long()),
        lambda: module.rounding_variance(x, torch.ones(255), 256),
    ]
    for call in wrong:
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            call()


def test_without_the_native_library_the_reference_serves_with_one_warning() -> None:
    script = """
import warnings, torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from gact_dist import codec, ops
    at_import = len(seen)
    x = torch.arange(1000, dtype=torch.float32)
    packed = codec.pack(x, 3, seed=9)
    codec.unpack(packed), codec.pack(x, 3, seed=9)
ours = [str(w.message) for w in seen if "slow PyTorch reference" in str(w.message)]
print(ops.isa(), at_import, len(ours), packed.payload.numpy().tobytes().hex())
"""
    environment = os.environ | {"GACT_DIST_ISA": "reference"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    expected = ops.pack(torch.arange(1000, dtype=torch.float32), 3, 256, 9)
    assert result.stdout.split() == ["reference", "0", "1", expected.numpy().tobytes().hex()]


def test_an_unknown_implementation_is_an_error() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        ops.set_isa("avx1024")
