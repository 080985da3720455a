"""Formats that a saved tensor could be stored in: the bits that each takes and the variance that its rounding adds.

A format is a function from a saved tensor to its `Options`, one for each of 1 to 8 bits. The variance is the expected
one of unbiased rounding, weighted with each element's sensitivity. Every format keeps the rule that scales and offsets
are rounded outward to what stores them before anything is rounded against them, and all that is stored is counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gact_dist import codec
from gact_dist.codec import ops
from gact_dist.codec.format import sections
from gact_dist.codec.reference import dither_allowed, floor_offset, to_groups
from gact_dist.policies.knapsack import ROUNDING, Problem, minimise

WIDTHS = range(1, 9)
EXACT_BITS = 32
WIDEST = 12
OFFSET_UNITS = 64  # of offsets in one byte, to a range
CHUNK_ELEMENTS = 1 << 18
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Saved:
    """A saved tensor and the mean square of each element's derivative of the gradient, in its own shape."""

    kind: str  # the operator that made it, and where that runs
    values: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Options:
    """Ways to store a tensor, float64 [n] each: bits an element with metadata, and the variance that they add."""

    bits: np.ndarray
    variance: np.ndarray


# -- types of the metadata ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """A type of scales, rounded up. Their flag takes the lowest bit of the mantissa, or a bit of its own."""

    bits: int  # with the flag
    mantissa_bits: int  # without it
    exponents: int = 254  # below that of the tensor's largest scale; smaller scales are rounded up to the last

    def cover(self, step: Tensor) -> Tensor:
        """The smallest scales at least ``step`` [G, 1]; 0 stays."""
        spacing = 1 << (23 - self.mantissa_bits)
        stored = ((step.view(torch.int32) + spacing - 1) & -spacing).view(torch.float32)
        least = torch.exp2(torch.log2(stored.max()).floor() - self.exponents)
        return torch.where(step > 0, torch.maximum(stored, least), 0.0)


@dataclass(frozen=True)
class Offset:
    """A type of offsets, rounded down: what is stored of ``low`` [G, 1], and steps that cover a range all the same.

    floor(low, step, levels) is at most ``low`` unless that is out of range; covering_step(low, spread, levels) is so
    large that floor() of it leaves no element beyond ``levels`` steps.
    """

    bits: int
    floor: Callable[[Tensor, Tensor, Tensor], Tensor]
    covering_step: Callable[[Tensor, Tensor, Tensor], Tensor]


def _widened(size: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The covering step of offsets that are at most ``size`` times themselves too low."""
    return lambda low, spread, levels: (spread + size * low.abs()) * (1 + 2.0**-16) / levels


def _floor_bfloat16(low: Tensor, step: Tensor, levels: Tensor) -> Tensor:
    stored = low.view(torch.int32)
    return torch.where(low < 0, stored + 0xFFFF, stored).bitwise_and(-0x10000).view(torch.float32)


def _floor_byte(low: Tensor, step: Tensor, levels: Tensor) -> Tensor:
    unit = step * (levels + 1) / OFFSET_UNITS
    return torch.where(unit > 0, (low / unit).floor().clamp(-128, 127) * unit, 0.0)


def _covering_byte(low: Tensor, spread: Tensor, levels: Tensor) -> Tensor:
    by_range = spread / (levels - (levels + 1) / OFFSET_UNITS)
    return torch.maximum(by_range, low.abs() * OFFSET_UNITS / 127 / (levels + 1)) * (1 + 2.0**-16)


SCALE_IN_USE = Scale(16, 6)
SCALE_FLOAT16, SCALE_FLOAT32 = Scale(16, 9, exponents=29), Scale(32, 22)
SCALE_E4M3_ANY = Scale(8, 3)  # of any exponent: what one that counts from a block's largest scale can reach at best
SCALE_E5M3, SCALE_E4M3, SCALE_E8M0 = Scale(9, 3, exponents=31), Scale(8, 3, exponents=15), Scale(9, 0)

OFFSET_IN_USE = Offset(16, lambda low, step, levels: floor_offset(low, step, torch.float32)[1], _widened(2.0**-10))
OFFSET_FLOAT32 = Offset(32, lambda low, step, levels: low, _widened(0.0))
OFFSET_BFLOAT16 = Offset(16, _floor_bfloat16, _widened(2.0**-7))
OFFSET_BYTE = Offset(8, _floor_byte, _covering_byte)


def grid(low: Tensor, high: Tensor, levels: Tensor, scale: Scale, offset: Offset) -> tuple[Tensor, Tensor]:
    """(offset, step) [G, 1] of grids of ``levels`` steps that cover the ranges."""
    step = scale.cover((high - low) / levels)
    start = offset.floor(low, step, levels)
    fits = (start <= low) & (high - start <= step * levels)
    step = torch.where(fits, step, scale.cover(offset.covering_step(low, high - low, levels)))
    return offset.floor(low, step, levels), step


# -- groups and their rounding ------------------------------------------------------------------------------------


def groups_of(saved: Saved, size: int, order: str) -> tuple[Tensor, Tensor]:
    """Values and weights [G, size]: "memory", "column" as the codec groups, "channel" of images in NCHW as well."""
    values, weights, columns = saved.values, saved.weights, 1
    if order == "channel" and values.dim() > 1:
        channel = 1 if values.dim() == 4 else values.dim() - 1
        values, weights = values.movedim(channel, 0), weights.movedim(channel, 0)
        values, weights = values.reshape(-1), weights.reshape(-1)
    else:
        columns = codec.columns_of(values, size) if order == "column" else 1
        values, weights = codec.stored_values(values), codec.stored_values(weights)
    missing = -len(values) % (size * columns)
    values = torch.cat([values, values[-columns:].repeat(missing // columns)])  # no group gets a wider range
    return to_groups(values, size, columns, 0.0), to_groups(weights, size, columns, 0.0)


def rounding_variance(values: Tensor, weights: Tensor, start: Tensor, step: Tensor, dithered: Tensor) -> float:
    """Of groups [G, n] with offsets ``start`` and steps [G, 1]; which of them may be ``dithered``, bool [G, 1]."""
    total = 0.0
    inverse = torch.where(step > 0, 1 / step, 0.0)
    rows = max(CHUNK_ELEMENTS // values.shape[1], 1)
    parts = (tensor.split(rows) for tensor in (values, weights, start, inverse, step, dithered))
    for value, weight, offset, per_step, one_step, may_dither in zip(*parts, strict=True):
        # fractions in units of 1/256 of the exact product, as the codec rounds them
        units = ((value - offset).double() * per_step.double()).mul_(256).round_()
        edge = units.div_(256).frac_().sub_(0.5).abs_().float()
        dither = may_dither & (edge.mean(1, True) < 3 / 8)
        whole = weight.sum(1, True)
        plain = whole / 4 - (edge.square_() * weight).sum(1, True)
        total += float((torch.where(dither, whole / 12, plain) * one_step.square()).sum(dtype=torch.float64))
    return total


def grid_variance(
    values: Tensor, weights: Tensor, levels: Tensor, scale: Scale, offset: Offset, dither: bool = True
) -> float:
    """Of groups [G, n] whose grids have ``levels`` [G, 1] steps."""
    low, high = values.amin(1, True), values.amax(1, True)
    start, step = grid(low, high, levels, scale, offset)
    allowed = dither_allowed(low, high, step, start, levels, LARGEST) & dither
    return rounding_variance(values, weights, start, step, allowed)


def options(
    saved: Saved, payload_bits: Sequence[float], variance: list[float], groups: int, metadata_bits: float
) -> Options:
    """The options of a tensor whose groups take so many bits of metadata each."""
    metadata = groups * metadata_bits / saved.values.numel()
    return Options(np.array(payload_bits, dtype=float) + metadata, np.array(variance))


def same_levels(groups: Tensor, bits: int) -> Tensor:
    return torch.full_like(groups[:, :1], 2**bits - 1)


# -- formats ------------------------------------------------------------------------------------------------------


def codec_format(saved: Saved, size: int = 128, by_column: bool = True) -> Options:
    """The codec itself, float32, measured with its own operator."""
    values, weights = codec.stored_values(saved.values), codec.stored_values(saved.weights)
    columns = codec.columns_of(saved.values, size) if by_column else 1
    groups = sections(values.numel(), 1, size, columns).groups
    variance = ops.rounding_variance(values, weights, size, columns).tolist()
    return options(saved, WIDTHS, variance, groups, 32)


def group_format(
    saved: Saved,
    size: int = 128,
    order: str = "column",
    scale: Scale = SCALE_IN_USE,
    offset: Offset = OFFSET_IN_USE,
    dither: bool = True,
) -> Options:
    """A scale and an offset for each group."""
    values, weights = groups_of(saved, size, order)
    found = [grid_variance(values, weights, same_levels(values, b), scale, offset, dither) for b in WIDTHS]
    return options(saved, WIDTHS, found, len(values), scale.bits + offset.bits)


def outlier_format(saved: Saved, size: int = 128, order: str = "column", outliers: int = 2) -> Options:
    """The elements farthest from their group's median in bfloat16 with their place; the others have the range."""
    values, weights = groups_of(saved, size, order)
    middle = values.median(1, True).values
    far = (values - middle).abs().topk(outliers, 1).indices
    apart, apart_weights = values.gather(1, far), weights.gather(1, far)
    spacing = torch.exp2(torch.log2(apart.abs()).floor() - 7).view(-1, 1)
    never = torch.zeros_like(spacing, dtype=torch.bool)
    of_apart = rounding_variance(apart.view(-1, 1), apart_weights.view(-1, 1), 0 * spacing, spacing, never)
    values = values.scatter(1, far, middle.expand(-1, outliers))
    weights = weights.scatter(1, far, 0.0)
    found = [
        of_apart + grid_variance(values, weights, same_levels(values, b), SCALE_IN_USE, OFFSET_IN_USE) for b in WIDTHS
    ]
    return options(saved, WIDTHS, found, len(values), 32 + outliers * (16 + 8))


def squared_format(saved: Saved, size: int = 128, order: str = "column") -> Options:
    """Levels at squares of evenly spaced numbers from the end of the group that is nearer to zero, without dither."""
    values, weights = groups_of(saved, size, order)
    low, high = values.amin(1, True), values.amax(1, True)
    from_low = low.abs() <= high.abs()
    found = []
    for bits in WIDTHS:
        levels = 2**bits - 1
        start, step = grid(low, high, same_levels(values, bits), SCALE_IN_USE, OFFSET_IN_USE)
        spread = step * levels
        distance = torch.where(spread > 0, (values - start) / spread, 0.0)
        distance = torch.where(from_low, distance, 1 - distance).clamp(0, 1)
        below = (distance.sqrt() * levels).floor().clamp(max=levels - 1)
        lower, upper = (below / levels).square(), ((below + 1) / levels).square()
        variance = (distance - lower).clamp(min=0) * (upper - distance).clamp(min=0)
        found.append(float((weights * variance * spread.square()).sum(dtype=torch.float64)))
    return options(saved, WIDTHS, found, len(values), 32)


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix [size, size], for powers of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    return matrix


def rotated_format(saved: Saved, size: int, order: str) -> Options:
    """Groups times an orthonormal Hadamard matrix before rounding."""
    values, weights = groups_of(saved, size, order)
    turned = values @ hadamard(size)
    # every entry of the matrix has the same square, so that each element gets the mean variance of its group
    shared = weights.mean(1, True).expand_as(turned)
    found = [grid_variance(turned, shared, same_levels(turned, b), SCALE_IN_USE, OFFSET_IN_USE) for b in WIDTHS]
    return options(saved, WIDTHS, found, len(values), 32)


def one_step_format(
    saved: Saved, size: int, order: str = "column", counted: str = "bits", dither: bool = True
) -> Options:
    """One step for the tensor, and for each group the width that its range needs: an offset and 4 bits of width.

    counted: as a group's width, "bits" that can hold its levels; "levels": the logarithm of their number, less than
    which no code of one length can take; "steps": the logarithm of its range in steps, which is too little.
    """
    values, weights = groups_of(saved, size, order)
    low, high = values.amin(1, True), values.amax(1, True)

    def start_and_levels(step: Tensor) -> tuple[Tensor, Tensor]:
        start = OFFSET_IN_USE.floor(low, step.expand_as(low), low)
        return start, ((high - start) / step).ceil()

    def widths_of(step: Tensor) -> Tensor:
        if counted == "steps":
            return torch.log2((high - low) / step).clamp(min=0)
        widths = torch.log2(start_and_levels(step)[1] + 1)
        return widths.ceil() if counted == "bits" else widths

    payload, found = [], []
    for bits in WIDTHS:
        step = smallest_within(bits, (high - low).max(), widths_of)
        start, levels = start_and_levels(step)
        steps = step.expand_as(low).contiguous()
        allowed = dither_allowed(low, high, steps, start, levels, LARGEST) & dither
        payload.append(float(widths_of(step).mean()))
        found.append(rounding_variance(values, weights, start, steps, allowed))
    return options(saved, payload, found, len(values), 16 + 4)


def smallest_within(bits: int, largest: Tensor, widths: Callable[[Tensor], Tensor]) -> Tensor:
    """The smallest number, up to twice the largest range, for which the mean of ``widths`` is at most ``bits``."""
    least, most = largest * 2.0**-20, largest * 2
    for _ in range(30):
        middle = (least * most).sqrt()
        least, most = (middle, most) if float(widths(middle).mean()) > bits else (least, middle)
    return most


def widths_by_range(spread: Tensor, bits: int) -> Tensor:
    """Whole widths like ``spread`` with a mean of at most ``bits`` and the least sum of squared steps; none for 0."""
    steps = 1 / (2.0 ** torch.arange(1, WIDEST + 1) - 1)
    gains = (steps[:-1].square() - steps[1:].square()).sqrt()

    def widths_of(threshold: Tensor) -> Tensor:
        return torch.where(spread > 0, 1.0 + (spread * gains > threshold).sum(1, True), 0.0)

    return widths_of(smallest_within(bits, spread.max(), widths_of))


def own_width_format(
    saved: Saved,
    size: int = 128,
    scale: Scale = SCALE_IN_USE,
    offset: Offset = OFFSET_IN_USE,
    whole_columns: bool = False,
) -> Options:
    """A width for each group, or for whole columns, beside its scale and offset; equal elements other than 0 take 1."""
    values, weights = groups_of(saved, size, "column")
    low, high = values.amin(1, True), values.amax(1, True)
    least = torch.finfo(torch.float32).tiny ** 0.5  # its square is above 0
    needs = torch.where((low != 0) | (high != 0), (high - low).clamp(min=least), 0.0)
    columns = codec.columns_of(saved.values, size) if whole_columns else 1
    blocks = len(needs) // columns if columns > 1 else 1
    needs = needs.view(blocks, -1).square().mean(0).sqrt().unsqueeze(1) if blocks > 1 else needs
    payload, found = [], []
    for bits in WIDTHS:
        widths = widths_by_range(needs, bits)
        payload.append(float(widths.mean()))
        levels = (2 ** widths.repeat(blocks, 1) - 1).clamp(min=1)
        found.append(grid_variance(values, weights, levels, scale, offset))
    return options(saved, payload, found, len(values), scale.bits + offset.bits + 4 / blocks)


# -- allocation ---------------------------------------------------------------------------------------------------


def either(found: Sequence[Options]) -> Options:
    """A tensor may take any of these."""
    return Options(np.concatenate([each.bits for each in found]), np.concatenate([each.variance for each in found]))


@dataclass(frozen=True)
class Allocation:
    """The option of each tensor, the one after its last being exact; and the total variance, nan if nothing fits.

    interpolated: what it would be if a tensor could take two options in parts, for few tensors with whole widths jump.
    """

    choice: np.ndarray
    variance: float
    interpolated: float


def allocated(tensors: Sequence[Options], sizes: np.ndarray, budget: float) -> Allocation:
    """The least total variance within ``budget`` bits an element."""
    bits = np.array([[*found.bits, EXACT_BITS] for found in tensors])
    cost = np.array([[*found.variance, 0.0] for found in tensors])
    weight, capacity = bits * sizes[:, None], budget * sizes.sum() * ROUNDING
    if weight.min(1).sum() > capacity:
        return Allocation(np.full(len(tensors), -1), float("nan"), float("nan"))
    choice, bound = minimise(Problem.build(cost, weight, capacity))
    return Allocation(choice, float(cost[np.arange(len(choice)), choice].sum()), bound)
