"""benchmarks/codec/kernel_cost.py: what is counted really packs and unpacks, shown by its PTX on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.codec.kernel_cost import IN_USE, Cost, compiled, table
from tools.ptx.machine import Loaded
from tools.ptx.program import programs_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_cost.json"
ROWS, COLUMNS, SEED = 256, 128, 7


def kernels(file: str, dtype: torch.dtype, bits: int, group_size: int, layout: str, *others: str) -> dict[str, Loaded]:
    """Those that the machine can run: it has no atomic operations."""
    ptx = compiled(file, dtype, bits, group_size, layout, *others, target="compute_90")
    programs = programs_of(ptx.decode())
    return {name: Loaded(program) for name, program in programs.items() if name != "find_top"}


def values(dtype: torch.dtype) -> Tensor:
    """Columns of different ranges, less far from zero than they are wide."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(ROWS + 1, COLUMNS, generator=generator)
    return ((normal[1:] + normal[0]) * torch.logspace(-1, 1, COLUMNS)).to(dtype)


def groups_of(x: Tensor, size: int, layout: str) -> Tensor:
    """[G, size]"""
    flat = x.float()
    return flat.reshape(-1, size) if layout != "by column" else flat.view(-1, size, COLUMNS).mT.reshape(-1, size)


def check_rounding(x: Tensor, decoded: Tensor, size: int, layout: str, levels: Tensor, wider: float) -> None:
    """Errors in steps of exact ranges: at most `wider` of them, without bias, with the variance of rounding."""
    exact, found = groups_of(x, size, layout), groups_of(decoded, size, layout)
    step = (exact.amax(1, True) - exact.amin(1, True)) / levels
    errors = (found - exact) / step
    assert float(errors.abs().max()) < wider
    # a standard deviation of a step at most, over so many elements; four of them
    assert abs(float(errors.mean())) < 4 / x.numel() ** 0.5
    assert 1 / 12 < float(errors.square().mean()) < wider**2 / 6


@pytest.mark.parametrize("layout", ["by column", "in memory order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_byte_each_rounds_without_bias(dtype: torch.dtype, layout: str) -> None:
    of = kernels("one_byte.cu", dtype, 4, 64, layout, "GACT_SHUFFLES")
    x = values(dtype)
    decoded, groups, blocks = torch.empty_like(x), x.numel() // 64, x.numel() // 8192
    starts = x.numel() // 2, x.numel() // 2 + groups, x.numel() // 2 + 2 * groups
    buffer = torch.zeros(starts[2] + blocks, dtype=torch.uint8)
    shape = (ROWS, COLUMNS) if layout == "by column" else (x.numel(), 1)
    into = x.data_ptr(), *shape, shape[1], SEED, buffer.data_ptr()
    assert of["pack_by_block"].run(blocks, 128, (*into, *starts)) == (0, "")
    back = buffer.data_ptr(), *shape, SEED, decoded.data_ptr(), *starts
    assert of["unpack_by_block"].run(blocks, 128, back) == (0, "")
    # a mantissa of three bits is up to an eighth too large, an offset of a 64th of the range up to 1/60; bfloat16 is
    # rounded by 2^-8 of a value, which is at most two ranges of 15 steps
    check_rounding(x, decoded, 64, layout, torch.tensor(15.0), 1.125 * 1.02 + 2**-8 * 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_width_for_each_group_rounds_without_bias(dtype: torch.dtype) -> None:
    of = kernels("width_by_group.cu", dtype, 4, 128, "by column", "GACT_WIDTHS=3,4,5")
    x = values(dtype)
    decoded, groups, blocks = torch.empty_like(x), x.numel() // 128, x.numel() // 8192
    widths = (torch.arange(groups) % 3 + 3).to(torch.uint8)
    words = widths.int() * 4
    starts = (words.cumsum(0) - words).to(torch.int32)
    scale_start = 4 * int(words.sum())
    buffer = torch.zeros(scale_start + 4 * groups, dtype=torch.uint8)
    sections = scale_start, scale_start + 2 * groups, widths.data_ptr(), starts.data_ptr()
    into = x.data_ptr(), ROWS, COLUMNS, COLUMNS, SEED, buffer.data_ptr(), *sections
    assert of["pack_widths"].run(blocks, 128, into) == (0, "")
    back = buffer.data_ptr(), ROWS, COLUMNS, SEED, decoded.data_ptr(), *sections
    assert of["unpack_widths"].run(blocks, 128, back) == (0, "")
    levels = 2.0 ** widths.float().unsqueeze(1) - 1
    check_rounding(x, decoded, 128, "by column", levels, 1.02 + 2**-8 * 62)
    ranges = torch.zeros(groups)
    assert of["find_ranges"].run(blocks, 128, (x.data_ptr(), ROWS, COLUMNS, COLUMNS, ranges.data_ptr())) == (0, "")
    exact = groups_of(x, 128, "by column")
    assert torch.equal(ranges, (exact.amax(1) - exact.amin(1)))


def test_the_table_is_relative_to_the_format_in_use() -> None:
    same: dict[str, Any] = {"action": "pack", "layout": "by column", "dtype": "float32", "bits": 4, "spills": 0}
    rows = [
        Cost(format=IN_USE, instructions=15.0, registers=80, bytes=4.5, bound={"H100": 2.0, "H200": 1.0}, **same),
        Cost(format="another", instructions=18.0, registers=90, bytes=9, bound={"H100": 3.0, "H200": 1.25}, **same),
    ]
    assert table(rows).splitlines()[3] == "| another | pack | 18.0 | 90 | 9.00 | 1.50 | 1.25 |"


def test_what_was_recorded_has_every_format() -> None:
    rows = [Cost(**row) for row in json.loads(RESULTS.read_text())["costs"]]
    default = [row for row in rows if (row.dtype, row.bits, row.layout) == ("bfloat16", 4, "by column")]
    assert len({(row.format, row.action) for row in default}) == len(default) == 13
