"""About what the better candidates among the formats would take: the codec's operators, and the rest in plain torch.

Called by bench_formats.py. Each candidate packs and unpacks one tensor at 4 bits. What it needs beside the codec
(ranges, widths, a product, square roots) is written in torch operators; a kernel of its own would do better.
"""

import statistics
import time
from unittest import mock

import torch
from torch import Tensor

from benchmarks.codec import formats
from gact_dist.codec import mixed_widths, ops
from gact_dist.codec import reference as ops_reference
from gact_dist.codec.reference import from_groups, to_groups
from gact_dist.hooks.per_example import ranked

BITS = 4
SHAPE = (2048, 1536)  # what a GELU of the text model saves
REPEATS = 7


def in_use(kernels, x: Tensor, size: int = 128, by_column: bool = True) -> Tensor:
    """[rows, columns] packed and unpacked by ``kernels``, a module with the codec's operators."""
    columns = x.shape[1] if by_column else 1
    buffer = kernels.pack(x.view(-1), BITS, size, 0, columns)
    return kernels.unpack(buffer, BITS, size, x.numel(), x.dtype, 0, columns).view(x.shape)


def one_byte_each(kernels, x: Tensor) -> Tensor:
    """The tensor's largest scale has to be known first: the ranges once more, and the rounding of the metadata."""
    blocks = x.view(-1, 64, x.shape[1])
    low, high = blocks.amin(1).view(-1, 1), blocks.amax(1).view(-1, 1)
    formats.grid(low, high, torch.full_like(low, 2**BITS - 1), formats.SCALE_E4M3, formats.OFFSET_BYTE)
    return in_use(kernels, x, size=64)


def rotated_by_64(kernels, x: Tensor) -> Tensor:
    """A product with a Hadamard matrix before and after."""
    matrix = formats.hadamard(64)
    turned = in_use(kernels, x.view(-1, 64) @ matrix, size=64, by_column=False)
    return (turned @ matrix.T).view(x.shape)


def squared_levels(kernels, x: Tensor) -> Tensor:
    """The work alone, for the codec beneath spaces its levels evenly: a root, a probability, and a square to decode."""
    position = x.abs().sqrt()
    below = position.floor()
    return in_use(kernels, below + (x.abs() - below.square()) / (2 * below + 1)).square_()


def width_by_group(kernels, x: Tensor) -> Tensor:
    """The groups side by side, ranked by their ranges, as many at each width as a plan would say."""
    groups = to_groups(x.view(-1), 128, x.shape[1], 0.0)
    decoded = _at_three_widths(kernels, groups, groups.amax(1) - groups.amin(1))
    return from_groups(decoded, x.shape[1]).view(x.shape)


def width_by_column(kernels, x: Tensor) -> Tensor:
    """The columns side by side, ranked by the mean square of their groups' ranges."""
    blocks = x.view(-1, 128, x.shape[1])
    ranges = (blocks.amax(1) - blocks.amin(1)).square().mean(0)
    return _at_three_widths(kernels, x.T.contiguous(), ranges).T.contiguous()


def _at_three_widths(kernels, units: Tensor, keys: Tensor) -> Tensor:
    share = len(units) // 4
    counts = (0, 0, 0, share, len(units) - 2 * share, share, 0, 0, 0)  # 3, 4 and 5 bits
    with mock.patch.object(mixed_widths, "ops", kernels):
        buffer = mixed_widths.pack(units.view(-1), ranked(keys, counts), 128, 0)
        return mixed_widths.unpack(buffer, counts, 128, units.numel(), units.dtype, 0).view(units.shape)


CANDIDATES = (in_use, one_byte_each, width_by_group, width_by_column, squared_levels, rotated_by_64)


def measured() -> list[dict]:
    """Median milliseconds of each candidate on one thread, with the reference and with native kernels, in turns."""
    torch.set_num_threads(1)
    x = torch.randn(SHAPE)
    rows = []
    for label, kernels in (("reference", ops_reference), ("native", ops)):
        taken_ms: dict[str, list[float]] = {candidate.__name__: [] for candidate in CANDIDATES}
        for _ in range(REPEATS + 1):
            for candidate in CANDIDATES:
                start_s = time.perf_counter()
                candidate(kernels, x)
                taken_ms[candidate.__name__].append(1e3 * (time.perf_counter() - start_s))
        median_ms = {name: statistics.median(values[1:]) for name, values in taken_ms.items()}  # the first warms up
        rows += [
            {"kernels": label, "candidate": name, "ms": ms, "to_in_use": ms / median_ms["in_use"]}
            for name, ms in median_ms.items()
        ]
    return rows
