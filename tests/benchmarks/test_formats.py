"""benchmarks/codec/formats.py: formats beside the codec keep rule 2, and their variances are those of real rounding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.codec import formats
from benchmarks.codec.formats import Offset, Saved, Scale

SCALES = [
    formats.SCALE_IN_USE, formats.SCALE_FLOAT16, formats.SCALE_FLOAT32,
    formats.SCALE_E5M3, formats.SCALE_E4M3, formats.SCALE_E8M0,
]  # fmt: skip
OFFSETS = [formats.OFFSET_IN_USE, formats.OFFSET_FLOAT32, formats.OFFSET_BFLOAT16, formats.OFFSET_BYTE]


def uneven(rows: int, columns: int) -> Tensor:
    """Columns of very different ranges and means, some with zeros."""
    torch.manual_seed(3)
    spread = torch.exp2(torch.linspace(-6, 6, columns))
    values = torch.randn(rows, columns) * spread + torch.randn(columns) * 8 * spread.flip(0)
    values[:, ::5] *= torch.rand(rows, (columns + 4) // 5) < 0.3
    return values


def saved(values: Tensor) -> Saved:
    return Saved("test", values, torch.rand(values.shape))


@pytest.mark.parametrize("shape", [(256, 64), (4, 96, 32), (5120,)])
def test_the_format_in_use_is_the_codec(shape):
    tensor = saved(uneven(int(np.prod(shape[:-1])), shape[-1]).reshape(shape))
    here, codec = formats.group_format(tensor), formats.codec_format(tensor)
    np.testing.assert_allclose(here.bits, codec.bits)
    # both count fractions of a step in units of 2^-8
    np.testing.assert_allclose(here.variance, codec.variance, rtol=1e-3)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("levels", [1, 3, 15, 255])
def test_grids_cover_their_groups_in_every_type_of_metadata(scale: Scale, offset: Offset, levels: int):
    values = torch.cat([uneven(64, 96).T.contiguous(), torch.zeros(1, 64), torch.full((1, 64), 0.3)])
    low, high = values.amin(1, True), values.amax(1, True)
    start, step = formats.grid(low, high, torch.full_like(low, levels), scale, offset)
    assert torch.all(start <= low)
    rounding = 2.0**-22 * torch.maximum(low.abs(), high.abs())  # of the last float32 operations
    assert torch.all(start.double() + levels * step.double() >= high - rounding)
    spacing = 1 << (23 - scale.mantissa_bits)
    assert torch.all(step.view(torch.int32) % spacing == 0)


@pytest.mark.parametrize("form", [formats.one_step_format, formats.own_width_format])
def test_widths_by_group_keep_to_their_average(form):
    found = form(saved(uneven(512, 64)), size=64)
    assert np.all(np.diff(found.bits) > 0)
    assert np.all(found.bits - np.arange(1, 9) <= 36 / 64 + 1e-6)
    assert np.all(np.diff(found.variance) < 0)


def test_fractional_widths_are_a_bound():
    tensor = saved(uneven(512, 64))
    whole, fractional = (formats.one_step_format(tensor, size=64, counted=c) for c in ("bits", "levels"))
    assert np.all(fractional.bits <= whole.bits + 0.02)
    assert np.all(fractional.variance[1:] < whole.variance[1:])  # at 1 bit every group has one level


def test_rotation_has_the_variance_of_rounding_rotated_values():
    values = torch.randn(64, 64).exp()
    tensor = Saved("test", values, torch.ones_like(values))
    predicted = formats.rotated_format(tensor, size=64, order="memory").variance[3]
    matrix = formats.hadamard(64)
    turned = values @ matrix
    low, high = turned.amin(1, True), turned.amax(1, True)
    start, step = formats.grid(low, high, torch.full_like(low, 15), formats.SCALE_IN_USE, formats.OFFSET_IN_USE)
    measured = 0.0
    for _ in range(50):
        noise = torch.rand_like(turned) - 0.5
        decoded = (torch.round((turned - start) / step + noise) - noise) * step + start
        measured += float((decoded @ matrix.T - values).square().sum()) / 50
    # subtractive dither: 4096 uniform errors, 50 times; the standard deviation of the mean is 0.2 %
    assert measured == pytest.approx(predicted, rel=0.02)


def test_a_choice_of_formats_is_never_worse_than_one():
    tensors = [saved(uneven(256, 64)), saved(torch.randn(256, 64).abs())]
    sizes = np.array([16384.0, 16384.0])
    plain = [formats.group_format(tensor) for tensor in tensors]
    both = [formats.either([p, formats.squared_format(t)]) for p, t in zip(plain, tensors, strict=True)]
    for budget in (1.5, 3.0, 4.2):
        # the allocation is within 0.1 % of the best
        chosen, one = (formats.allocated(options, sizes, budget) for options in (both, plain))
        assert chosen.variance <= one.variance * 1.001
        assert chosen.interpolated <= chosen.variance


def test_nothing_fits_below_the_metadata():
    tensor = saved(uneven(256, 64))
    found = formats.allocated([formats.codec_format(tensor, size=64)], np.array([16384.0]), 1.2)
    assert np.isnan(found.variance)
