"""The CUDA kernels for groups of one column, run by the emulation: the bytes and bits of the reference.

Compiling the emulation takes longest, so a group size has not every element type: Half and Bfloat have one layout, and
a tile is the same for float at 256 and 512, but for the number of slices. Between them are all widths of tiles.
"""

import pytest
import torch
from codec_tensors import random_tensor, raw, special_tensors
from emulation import needs_compiler
from torch import Tensor

from gact_dist.codec import cuda, reference
from gact_dist.codec import format as payload_format

FORMS = [
    (torch.float32, 64),
    (torch.bfloat16, 128),
    (torch.float32, 128),
    (torch.float16, 256),
    (torch.float32, 512),
]
SEED = -7_123_456_789_012_345_678

pytestmark = [needs_compiler, pytest.mark.usefixtures("kernels")]


def assert_same(x: Tensor, bits: int, group_size: int, columns: int) -> None:
    """The bytes that are packed and nothing beside them, and from the reference's bytes the bits that are decoded."""
    expected = reference.pack(x, bits, group_size, SEED, columns)
    buffer = torch.full((expected.numel() + 64,), 0xA5, dtype=torch.uint8)
    cuda.pack_out(x, bits, group_size, SEED, buffer[: expected.numel()], columns)
    assert torch.equal(buffer[: expected.numel()], expected), (bits, x.numel() // columns, columns)
    assert bool((buffer[expected.numel() :] == 0xA5).all())
    out = torch.full((x.numel() + 64,), 7, dtype=x.dtype)
    cuda.unpack_out(expected, bits, group_size, x.numel(), x.dtype, SEED, out[: x.numel()], columns)
    wanted = reference.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED, columns)
    assert torch.equal(raw(out[: x.numel()]), raw(wanted)), (bits, x.numel() // columns, columns)
    assert bool((out[x.numel() :] == 7).all())


# Whole row blocks, rows beside them, and columns: less than a tile; odd multiples of 32 with one tile and several,
# whose rows begin anywhere in 256 elements; whole tiles. Some end in a set of elements that is short.
SHAPES = ((2, 0, 32), (1, 5, 96), (1, 0, 288), (1, 1, 416), (1, -3, 512))


@pytest.mark.parametrize(("dtype", "group_size"), FORMS)
@pytest.mark.parametrize("bits", range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1))
def test_columns_have_the_bits_of_the_reference(dtype: torch.dtype, group_size: int, bits: int) -> None:
    shapes = (SHAPES[bits % 5], SHAPES[(bits + 2) % 5])
    for blocks, more_rows, columns in shapes if group_size < 256 else shapes[:1]:
        assert_same(random_tensor((blocks * group_size + more_rows) * columns, dtype), bits, group_size, columns)


@pytest.mark.parametrize(("dtype", "group_size"), FORMS)
def test_columns_of_rare_values_have_the_bits_of_the_reference(dtype: torch.dtype, group_size: int) -> None:
    rows = group_size + 17
    repeats = rows * 32 // 2048 + 1
    stripes = [case.repeat(repeats)[: rows * 32].view(rows, 32) for case in special_tensors(dtype).values()]
    plain = random_tensor(rows * 32, dtype).view(rows, 32)
    plain[3, 5], plain[-1, 20] = torch.inf, torch.nan  # beside columns without
    x = torch.cat([*stripes, plain, plain.nan_to_num(0.0, 0.0)], 1)
    for bits in (1, 2, 8):
        assert_same(x.reshape(-1), bits, group_size, x.shape[1])


@pytest.mark.parametrize(("dtype", "group_size"), FORMS[:2])
def test_columns_are_read_from_and_written_to_any_element(dtype: torch.dtype, group_size: int) -> None:
    x = random_tensor(2 * group_size * 64 + 1, dtype)[1:]
    expected = reference.pack(x, 3, group_size, SEED, 64)
    assert torch.equal(cuda.pack(x, 3, group_size, SEED, 64), expected)
    out = torch.full((x.numel() + 2,), 7, dtype=dtype)
    cuda.unpack_out(expected, 3, group_size, x.numel(), dtype, SEED, out[1:-1], 64)
    assert torch.equal(raw(out[1:-1]), raw(reference.unpack(expected, 3, group_size, x.numel(), dtype, SEED, 64)))
    assert float(out[0]) == float(out[-1]) == 7


def test_rows_that_are_not_whole_are_refused() -> None:
    x = random_tensor(64 * 32, torch.float32)
    for columns in (31, 48, 96):
        with pytest.raises(ValueError, match=f"columns is {columns}, expected a multiple of 32"):
            cuda.pack(x, 4, 64, SEED, columns)


@pytest.mark.parametrize(("dtype", "group_size"), [(torch.bfloat16, 64), (torch.float32, 512)])
def test_the_rounding_variance_of_columns_is_that_of_the_reference(dtype: torch.dtype, group_size: int) -> None:
    for rows, columns in ((group_size, 32), (2 * group_size + 3, 96)):
        x = random_tensor(rows * columns, dtype)
        x.view(rows, columns)[:, 7] = 0  # plain rounding beside dithering
        x.view(rows, columns)[rows // 5 :, 8:20] = 0
        weight = torch.rand(x.numel(), generator=torch.Generator().manual_seed(2))
        # float32 sums of as many terms as a group has, none of them negative, each rounded twice.
        rtol = (group_size + 2) * 2.0**-24
        expected = reference.rounding_variance(x, weight, group_size, columns)
        torch.testing.assert_close(cuda.rounding_variance(x, weight, group_size, columns), expected, rtol=rtol, atol=0)
    x[5 * columns + 9] = torch.inf
    assert bool(torch.isinf(cuda.rounding_variance(x, weight, group_size, columns)).all())
    weight.view(rows, columns)[:group_size, 9] = 0
    assert bool(torch.isfinite(cuda.rounding_variance(x, weight, group_size, columns)).all())
