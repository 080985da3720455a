"""What the kernels are run on: tensors whose payload and decoded values must be those of the reference, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_dist.codec import cuda, ops, reference
from tests.support.codec_tensors import random_tensor, raw, special_tensors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("by column", "in memory order")
SEED = -7_123_456_789_012_345_678
_GUARD = 64  # elements beside a result that must stay as they are


@dataclass(frozen=True)
class Format:
    """One pair of kernels."""

    dtype: torch.dtype
    bits: int
    group_size: int
    layout: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, {self.bits} bits, groups of {self.group_size} {self.layout}"


def formats(group_sizes: tuple[int, ...], bits: tuple[int, ...]) -> list[Format]:
    """All formats of these group sizes and widths."""
    return [
        Format(dtype, width, size, layout)
        for dtype in DTYPES
        for size in group_sizes
        for layout in LAYOUTS
        for width in bits
    ]


def cases(of: Format) -> Iterator[tuple[str, Tensor, int]]:
    """(what it is, tensor, columns) for one format: whole tiles and ragged ones, rare values, unaligned memory.

    The tensors are flat, but for rows that lie apart from one another in memory.
    """
    if of.layout == "by column":
        yield from _cases_by_column(of)
    else:
        yield from _cases_in_memory_order(of)


def _cases_by_column(of: Format) -> Iterator[tuple[str, Tensor, int]]:
    # Rows: whole groups; some beside them, the last of which end within a word and beyond one; less than a group.
    # Columns: less than a block has, several blocks, the last of which is short.
    for rows, columns in ((of.group_size, 128), (of.group_size + 37, 96), (2 * of.group_size - 1, 32), (19, 288)):
        yield f"{rows} rows of {columns}", random_tensor(rows * columns, of.dtype), columns
    yield "rare values", *_rare_columns(of)
    yield "unaligned", random_tensor(of.group_size * 64 + 1, of.dtype)[1:], 64
    for rows, width in ((of.group_size + 37, 3 * 96), (of.group_size, 129)):
        apart = random_tensor(rows * width, of.dtype).view(rows, width)[:, 32:128]
        apart[3, 5] = torch.inf
        yield f"{rows} rows of 96, {width} apart", apart, 96


def _rare_columns(of: Format) -> tuple[Tensor, int]:
    """Every special tensor in columns of its own, beside columns of which one has a single rare value."""
    rows = of.group_size + 17
    repeats = rows * 2 // 2048 + 1
    stripes = [case.repeat(repeats)[: rows * 2].view(rows, 2) for case in special_tensors(of.dtype).values()]
    plain = random_tensor(rows * 64, of.dtype).view(rows, 64)
    plain[3, 5], plain[-1, 20] = torch.inf, torch.nan
    x = torch.cat([*stripes, plain], 1)
    columns = x.shape[1] // 32 * 32
    return x[:, :columns].reshape(-1), columns


def _cases_in_memory_order(of: Format) -> Iterator[tuple[str, Tensor, int]]:
    # Less than a row, a group, a tile; whole tiles and blocks, and one element, a row and some more.
    for numel in (1, 17, 511, 512, 16384, 5001, 16384 + 512 + 33):
        yield f"{numel} elements", random_tensor(numel, of.dtype), 1
    specials = list(special_tensors(of.dtype).values())
    yield "rare values", torch.cat([*specials, random_tensor(700, of.dtype)]), 1
    yield "unaligned", random_tensor(1500, of.dtype)[1:], 1


def differences(of: Format) -> Iterator[str]:
    """Runs all cases of a format through cuda.py; what is not as the reference has it."""
    for what, x, columns in cases(of):
        for problem in (pack_difference(of, x, columns), unpack_difference(of, x, columns)):
            if problem:
                yield f"{of}: {what}: {problem}"


def pack_difference(of: Format, x: Tensor, columns: int) -> str:
    """Empty if the packed bytes are the reference's and nothing beside them was written."""
    expected = reference.pack(x.reshape(-1), of.bits, of.group_size, SEED, columns)
    # From 4 bytes on, where a payload may begin in a larger buffer, and from its beginning.
    for first in (4, 0):
        buffer = torch.full((expected.numel() + _GUARD,), 0xA5, dtype=torch.uint8)
        cuda.pack_out(x, of.bits, of.group_size, SEED, buffer[first : first + expected.numel()], columns)
        if not torch.equal(buffer[first : first + expected.numel()], expected):
            wrong = (buffer[first : first + expected.numel()] != expected).nonzero().view(-1)
            return f"{wrong.numel()} of {expected.numel()} packed bytes differ, the first is {int(wrong[0])}"
        if not bool((buffer[:first] == 0xA5).all() and (buffer[first + expected.numel() :] == 0xA5).all()):
            return "something beside the packed bytes was written"
    return ""


def unpack_difference(of: Format, x: Tensor, columns: int) -> str:
    """Empty if the reference's bytes are decoded to its bits and nothing beside them was written."""
    packed = reference.pack(x.reshape(-1), of.bits, of.group_size, SEED, columns)
    wanted = reference.unpack(packed, of.bits, of.group_size, x.numel(), of.dtype, SEED, columns)
    for first in (0, 1):
        out = torch.full((x.numel() + _GUARD,), 7, dtype=of.dtype)
        target = out[first : first + x.numel()]
        cuda.unpack_out(packed, of.bits, of.group_size, x.numel(), of.dtype, SEED, target, columns)
        if not torch.equal(raw(target), raw(wanted)):
            wrong = (raw(target) != raw(wanted)).nonzero().view(-1) // of.dtype.itemsize
            return f"{wrong.unique().numel()} of {x.numel()} decoded elements differ, the first is {int(wrong[0])}"
        if not bool((out[:first] == 7).all() and (out[first + x.numel() :] == 7).all()):
            return "something beside the decoded elements was written"
    return ""


def mask_differences(dtype: torch.dtype) -> Iterator[str]:
    """Of masks of one dtype."""
    for numel in (0, 1, 7, 8, 9, 63, 2048, 2049 * 4 + 3):
        x = torch.empty(numel + 1, dtype=dtype)[1:]  # where unaligned, by single elements
        x.copy_(random_tensor(numel, torch.float32) > 0)
        if dtype.is_floating_point and numel > 20:
            x[3], x[4], x[5] = -0.0, torch.nan, torch.finfo(dtype).smallest_normal
        for tensor in (x, x.clone()):
            packed = cuda.pack_mask(tensor)
            if not torch.equal(packed, reference.pack_mask(x)):
                yield f"mask of {numel} elements of {dtype}: packed bytes differ"
            if not torch.equal(cuda.unpack_mask(packed, numel, dtype), (x != 0).to(dtype)):
                yield f"mask of {numel} elements of {dtype}: decoded elements differ"


def norm_differences(dtype: torch.dtype) -> Iterator[str]:
    """Of norms that are made again, with and without mean, weight and bias, in memory of their own and in place."""
    rows, columns = 37, 8 * 41
    x = random_tensor(rows * columns, dtype).view(rows, columns)
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    mean, rstd = random_tensor(rows, torch.float32), random_tensor(rows, torch.float32).abs()
    weight, bias = random_tensor(2 * columns, dtype).view(2, columns)
    for centre, factor, term in itertools.product((mean, None), (weight, None), (bias, None)):
        expected = x.float() if centre is None else x.float() - centre[:, None]
        expected = expected * rstd[:, None]
        expected = expected if factor is None else expected * factor.float()
        expected = expected if term is None else expected + term.float()
        copy = x.clone()
        for source, out in ((x, torch.full_like(x, 7)), (copy, copy)):
            cuda.normalise(source, centre, rstd, factor, term, out)
            if not torch.allclose(out, expected.to(dtype), rtol=0, atol=0, equal_nan=True):
                given = [each is not None for each in (centre, factor, term)]
                yield f"norm of {dtype}, mean, weight and bias given: {given}: elements differ"


def sampled_differences(dtype: torch.dtype) -> Iterator[str]:
    """Of log-probabilities that are sampled, from what the library for CPUs makes of them."""
    for rows, words, first in ((3, 1024, 0), (2, 1056, 5), (5, 1029, 2**34 + 3)):
        x = (3 * random_tensor(rows * words, torch.float32).nan_to_num(0.0)).view(rows, words).log_softmax(-1).to(dtype)
        x[0, 40:64], x[1, 3], x[1, 100] = -torch.inf, torch.nan, torch.finfo(dtype).min
        found = _sampled(cuda.sample, cuda.sampled_words, x, first)
        expected = _sampled(ops.sample, ops.sampled_words, x, first)
        for what, one, other in zip(("bits", "logarithms", "variance", "words"), found, expected, strict=True):
            if not torch.equal(raw(one), raw(other)):
                yield f"sampled, {rows} rows of {words} words of {dtype}: {what} differ"


def _sampled(sample: Any, restore: Any, x: Tensor, first: int) -> tuple[Tensor, ...]:
    """Bits, logarithms, variance, and the words that come back with what lies beside them."""
    groups = x.shape[0] * -(-x.shape[1] // 32)
    bits, logarithms = torch.zeros(groups, dtype=torch.int32), torch.zeros(groups, dtype=torch.float16)
    variance = sample(x, SEED, first, bits, logarithms)
    memory = torch.full((x.numel() + 2 * _GUARD,), 7, dtype=x.dtype)
    restore(bits, logarithms, memory[_GUARD:-_GUARD].view(x.shape))
    return bits, logarithms, variance, memory


def variance_differences(dtype: torch.dtype, group_size: int) -> Iterator[str]:
    """Of rounding_variance in both layouts, beyond what another order of additions explains."""
    shapes = [(numel, 1) for numel in (0, 1, 100, 4099)]
    shapes += [(rows * columns, columns) for rows, columns in ((group_size, 32), (2 * group_size + 3, 96))]
    # Sums in float32 of as many terms as a group has, none of them negative, each rounded twice.
    rtol = (group_size + 2) * 2.0**-24
    for numel, columns in shapes:
        x = random_tensor(numel, dtype)
        x[numel // 2 : numel // 2 + 300] = 0  # plain rounding beside dithering
        if columns > 1:
            x.view(-1, columns)[:, 7] = 0
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        expected = reference.rounding_variance(x, weight, group_size, columns)
        found = cuda.rounding_variance(x, weight, group_size, columns)
        if not torch.allclose(found, expected, rtol=rtol, atol=0):
            yield f"variance of {numel} elements of {dtype}, {columns} columns: {found} in place of {expected}"
    yield from _rare_variance_differences(dtype, group_size)


def _rare_variance_differences(dtype: torch.dtype, group_size: int) -> Iterator[str]:
    """Groups with rare values count as infinite where they have a weight."""
    for columns in (1, 96):
        x = random_tensor(2 * group_size * 96, dtype)
        weight = torch.ones(x.numel())
        x[9] = torch.inf
        if not bool(torch.isinf(cuda.rounding_variance(x, weight, group_size, columns)).all()):
            yield f"variance of {dtype}, {columns} columns: an infinity is missed"
        weight[:group_size] = 0
        weight.view(-1, 96)[:group_size, 9] = 0
        if not bool(torch.isfinite(cuda.rounding_variance(x, weight, group_size, columns)).all()):
            yield f"variance of {dtype}, {columns} columns: an infinity without weight counts"
