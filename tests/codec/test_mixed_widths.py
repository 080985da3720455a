"""Payloads with several widths: each unit as at its own width alone, on every instruction set, without waiting."""

import pytest
import torch
from codec_tensors import random_tensor, raw
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gact_dist import codec
from gact_dist.codec import format as payload_format
from gact_dist.codec import mixed_widths, ops, reference
from gact_dist.codec.mixed_widths import UnitWidths
from gact_dist.hooks.per_example import made_of_examples, ranked, squared_ranges

SEED = 2**40 + 7


def units_of(widths: list[int]) -> UnitWidths:
    return UnitWidths(torch.tensor(widths, dtype=torch.uint8), tuple(widths.count(bits) for bits in range(9)))


@pytest.mark.parametrize("isa", ops.available_isas())
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
@pytest.mark.parametrize("unit_numel", [30, 256, 700])
def test_the_payload_is_what_one_width_makes_of_its_units(isa: str, dtype: torch.dtype, unit_numel: int) -> None:
    widths = [2, 5, 2, 0, 8, 1, 5]
    x = random_tensor(unit_numel * len(widths), dtype)
    x.view(7, -1)[3] = 0.0
    before = ops.isa()
    ops.set_isa(isa)
    try:
        packed = codec.pack(x, units_of(widths), SEED, 128)
        decoded = codec.unpack(packed).view(7, -1)
    finally:
        ops.set_isa(before)
    start = 8
    assert packed.payload[:7].tolist() == widths
    for width in (1, 2, 5, 8):
        rows = [unit for unit, bits in enumerate(widths) if bits == width]
        flat = x.view(7, -1)[rows].view(-1)
        expected = reference.pack(flat, width, 128, SEED ^ width)
        assert torch.equal(packed.payload[start : start + len(expected)], expected)
        values = reference.unpack(expected, width, 128, len(flat), dtype, SEED ^ width)
        assert torch.equal(raw(decoded[rows].view(-1)), raw(values))
        start += (len(expected) + 3) // 4 * 4
    assert not decoded[3].any()
    assert packed.nbytes == start == mixed_widths.total_bytes(units_of(widths).counts, x.numel(), 128)
    assert packed.average_bits == sum(widths) / 7


def test_samples_of_whole_rows_are_grouped_by_column_where_a_width_has_a_group_of_rows() -> None:
    widths = [4, 2, 4, 4, 0, 4, 2, 8]  # 64 rows each: four samples, two and one
    x = random_tensor(8 * 64 * 32, torch.float32).view(8, 64, 32) * torch.logspace(-3, 3, 32)
    x[4] = 0.0
    packed = codec.pack(x, units_of(widths), SEED, 128)
    assert packed.columns == 32
    start, decoded = 8, codec.unpack(packed)
    for width, columns in ((2, 32), (4, 32), (8, 1)):
        rows = [unit for unit, bits in enumerate(widths) if bits == width]
        expected = reference.pack(x[rows].view(-1), width, 128, SEED ^ width, columns)
        assert torch.equal(packed.payload[start : start + len(expected)], expected)
        values = reference.unpack(expected, width, 128, x[rows].numel(), x.dtype, SEED ^ width, columns)
        assert torch.equal(decoded[rows].view(-1), values)
        start += len(expected)
    assert packed.nbytes == start == mixed_widths.total_bytes(units_of(widths).counts, x.numel(), 128, 32)
    assert not decoded[4].any()
    assert mixed_widths.columns_within(x.numel(), 8, 128, 32) == 32
    assert mixed_widths.columns_within(x.numel(), x.numel() // 128, 128, 32) == 1  # units that are groups


@pytest.mark.parametrize("numel", [256, 1000])
def test_each_unit_errs_by_a_step_of_its_own_width_at_most(numel: int) -> None:
    widths = [1, 2, 3, 4, 5, 6, 7, 8, 4]
    x = random_tensor(9 * numel, torch.float32).view(9, numel)
    error = (codec.unpack(codec.pack(x, units_of(widths), SEED)) - x).abs().amax(1)
    spread = x.max() - x.min()
    steps = torch.tensor([float(spread) / (2**bits - 1) * 1.02 for bits in widths])
    assert (error <= steps).all()
    assert (error[:7].diff() < 0).all()


def test_rounding_is_unbiased_at_every_width() -> None:
    widths = [1, 2, 4, 8]
    x = random_tensor(4 * 512, torch.float32).view(4, 512)
    draws = 400
    mean = sum(codec.unpack(codec.pack(x, units_of(widths), seed)) for seed in range(draws)) / draws
    spread = x.view(4, 2, 256).amax(2) - x.view(4, 2, 256).amin(2)
    # a draw errs by a standard deviation of half a step at most; the mean of 512 such errors by 1 / sqrt(512 draws)
    for unit, bits in enumerate(widths):
        step = float(spread[unit].max()) / (2**bits - 1)
        assert abs(float((mean - x)[unit].mean())) < 4 * 0.5 * step / (512 * draws) ** 0.5
        assert float((mean - x)[unit].abs().max()) < 5.5 * 0.5 * step * 1.02 / draws**0.5


@pytest.mark.parametrize(
    "shaped",
    [
        lambda x: x.view(4, 6, 5, 8),
        lambda x: x.view(4, 6, 5, 8).to(memory_format=torch.channels_last),
        lambda x: x.view(4, 3, 10, 8)[:, :2].transpose(1, 2),
        lambda x: x.view(4, 240).double(),
        lambda x: torch.view_as_complex(x.view(4, 120, 2)),
        lambda x: x.view(4, 240).half(),
    ],
)
def test_shape_strides_and_dtype_come_back_in_private_memory(shaped) -> None:
    x = shaped(random_tensor(960, torch.float32))
    assert made_of_examples(x, 4)
    packed = codec.pack(x, units_of([8, 1, 8, 4]), SEED, 64)
    first, second = codec.unpack(packed), codec.unpack(packed)
    assert (first.shape, first.stride(), first.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    # the samples at 8 bits are those that were given 8 bits
    error = (first - x).abs().flatten(1).amax(1)
    assert error[[0, 2]].max() < 0.15 < error[[1, 3]].min()


@pytest.mark.parametrize(
    ("tensor", "samples", "expected"),
    [
        (torch.empty(6, 3, 4), 6, True),
        (torch.empty(24, 5), 6, True),  # [samples * length, channels]
        (torch.empty(1, 24, 5), 6, True),
        (torch.empty(24), 6, False),
        (torch.empty(24, 5, 2), 6, False),  # 24 may be a length
        (torch.empty(3, 6, 4).transpose(0, 1), 6, False),
        (torch.empty(1, 4).expand(6, 4), 6, False),
        (torch.empty(6, 4).expand(6, 6, 4), 6, False),
        (torch.empty(7, 3), 6, False),
        (torch.empty(6, 3), None, False),
        (torch.empty(1, 3), 1, False),
        (torch.empty(()), 6, False),
        (torch.empty(6, 0), 6, False),
    ],
)
def test_a_tensor_is_made_of_examples_where_its_memory_is(tensor: Tensor, samples: int | None, expected: bool) -> None:
    assert made_of_examples(tensor, samples) is expected


def test_the_largest_keys_get_the_widest() -> None:
    keys = torch.tensor([0.5, 3.0, 0.5, 2.0, 9.0])
    assert ranked(keys, (0, 1, 2, 1, 0, 0, 0, 0, 1)).widths.tolist() == [2, 3, 1, 2, 8]


def test_keys_are_squared_ranges_of_the_groups_of_a_unit() -> None:
    x = random_tensor(3 * 300, torch.bfloat16)
    groups = x.view(3, 300)[:, :256].reshape(3, 2, 128).float()
    expected = (groups.amax(2) - groups.amin(2)).square().sum(1)
    assert torch.equal(squared_ranges(x, 3, 128), expected)
    short = (x.view(9, 100).amax(1).float() - x.view(9, 100).amin(1).float()).square()
    assert torch.equal(squared_ranges(x, 9, 128), short)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would wait (a value read by the host, a size that depends on data) raises for a tensor without data."""
    monkeypatch.setattr(UnitWidths, "__post_init__", lambda _: None)  # it reads the widths, on a CPU only
    counts = (0, 3, 2, 0, 1, 0, 0, 0, 2)
    with FakeTensorMode():
        x = torch.empty(8, 40, 10)
        keys = squared_ranges(codec.stored_values(x), 8, 256)
        packed = codec.pack(x, ranked(keys, counts), SEED)
        assert codec.unpack(packed).shape == x.shape
    assert packed.nbytes == mixed_widths.total_bytes(counts, 3200, codec.DEFAULT_GROUP_SIZE)


def test_user_mistakes_say_what_was_got_and_expected() -> None:
    widths = torch.tensor([1, 2, 2], dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"counts are .* but of the widths 0 to 8 there are \(0, 1, 2, 0"):
        UnitWidths(widths, (0, 2, 1, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match=r"expected uint8 \[units\] and the number of units at 0 to 8 bits"):
        UnitWidths(widths, (0, 1, 1, 0, 0, 0, 0, 0, 0))
    units = UnitWidths(widths, (0, 1, 2, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="got 3 widths for 100 elements, expected parts of equal size"):
        codec.pack(torch.zeros(100), units)
    packed = codec.pack(torch.zeros(99), units)
    with pytest.raises(ValueError, match=r"expected \d+ bytes for"):
        mixed_widths.unpack(packed.payload[:-1], units.counts, 256, 99, torch.float32, 0)
