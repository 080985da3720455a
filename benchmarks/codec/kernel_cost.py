"""What the formats with less variance would cost on a GPU: instructions and bytes for an element, without a GPU.

    python -m benchmarks.codec.kernel_cost --json benchmarks/results/kernel_cost.json

bench_formats.py finds two formats with less variance at equal bytes: one byte for scale and offset each in groups of
64, and a width for each group. alternatives/ has prototypes of their kernels, which nothing launches. They are compiled
and counted like the codec's own (kernel_code.py), and set against the bytes that they read and write.

* one byte each, by tensor: a scale counts from the tensor's largest, so that pack reads the tensor twice.
* one byte each, by block: from the largest of 8,192 elements, the block of threads that packs them.
* width by group: ranges are found by one kernel, the groups are ranked (not counted: 1/128 of the elements), and a
  second one reads the tensor again. A warp goes through the code of a width once for each that its lanes have: "one
  width" and "three widths" are the best and a usual case. By column only.
* width by group, in parts: several widths in one payload as the codec has it (mixed_widths.py): ranges, a gathered
  copy, a pack in memory order, and the same back. Its copies are torch's, of which only the bytes are counted.

The bound is the larger of what the bytes take at the speed of a copy and what the instructions take at one a cycle of
each scheduler, as in docs/gpu.md; relative to the format in use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.codec.kernel_code import LAYOUTS, Count, counts, counts_of
from gact_dist.codec import nvrtc
from gact_dist.codec.cuda import codec_kernel

ALTERNATIVES = Path(__file__).with_name("alternatives")
IN_USE = "in use"
DTYPES = (torch.float32, torch.bfloat16)
BITS = (2, 3, 4, 8)
ISSUED_PER_S = 33.5e12  # lane instructions of an H200 or H100 at 1.98 GHz
COPIED_PER_S = {"H100": 3.0e12, "H200": 4.3e12}  # bytes, read and written
_RANGE_BYTES, _START_BYTES = 4, 4  # of a group, beside the payload
_BLOCK_ELEMENTS = 8192


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of packing or unpacking in one format; numbers are those for an element."""

    format: str
    action: str
    layout: str
    dtype: str
    bits: int
    instructions: float
    """of all kernels; without torch's copies"""
    registers: int
    """of a thread of the kernel that has most"""
    spills: int
    bytes: float
    """read and written"""
    bound: dict[str, float]
    """least picoseconds by device"""


def compiled(
    file: str, dtype: torch.dtype, bits: int, group_size: int, layout: str, *others: str, target: str = "sm_90"
) -> bytes:
    """Machine code of a prototype and of codec.cu, which it includes; PTX where the target is "compute_90"."""
    folder = nvrtc.source_folder()
    names = [*folder.glob("common/*.h"), *folder.glob("cuda/*.h"), folder / "cuda" / "codec.cu"]
    headers = {path.relative_to(folder).as_posix(): path.read_bytes() for path in names}
    definitions = (*codec_kernel("pack", dtype, bits, group_size, LAYOUTS[layout]).definitions, *others)
    options = (*nvrtc.OPTIONS, f"-arch={target}", *(f"-D{definition}" for definition in definitions))
    source, output = (ALTERNATIVES / file).read_text(), "CUBIN" if target.startswith("sm_") else "PTX"
    return nvrtc.find_nvrtc().compile(source, file, headers, options, output)


def kernels_of(
    file: str, dtype: torch.dtype, bits: int, group_size: int, layout: str, *others: str
) -> dict[str, Count]:
    """The counts of a prototype's kernels, by name."""
    binary = compiled(file, dtype, bits, group_size, layout, *others)
    return {found.kernel: found for found in counts_of(binary, dtype, bits, layout, 90, group_size)}


def cost(name: str, action: str, kernels: Sequence[Count], moved_bytes: float) -> Cost:
    """Of all kernels that an action runs."""
    first, instructions = kernels[0], sum(kernel.instructions for kernel in kernels)
    issue_s = instructions / ISSUED_PER_S
    return Cost(
        format=name,
        action=action,
        layout=first.layout,
        dtype=first.dtype,
        bits=first.bits,
        instructions=round(instructions, 2),
        registers=max(kernel.registers for kernel in kernels),
        spills=sum(kernel.spills for kernel in kernels),
        bytes=round(moved_bytes, 4),
        bound={on: round(1e12 * max(issue_s, moved_bytes / speed), 4) for on, speed in COPIED_PER_S.items()},
    )


def costs(dtype: torch.dtype, bits: int, layout: str) -> Iterator[Cost]:
    """Of all formats that there are for a layout."""
    whole, codes = float(dtype.itemsize), bits / 8
    for name, size in ((IN_USE, 128), ("groups of 64", 64)):
        moved = whole + codes + 4 / size
        for kernel in counts(dtype, bits, layout, group_size=size):
            yield cost(name, kernel.kernel, [kernel], moved)
    yield from _costs_of_one_byte(dtype, bits, layout, whole, codes)
    yield from _costs_in_parts(dtype, bits, layout, whole, codes)
    if layout == "by column":
        for name, widths in (("one width", (bits,)), ("three widths", (bits - 1, bits, bits + 1))):
            if bits < 8 or len(widths) == 1:
                yield from _costs_of_widths(f"width by group, {name} a warp", dtype, bits, widths, whole, codes)


def _costs_of_one_byte(dtype: torch.dtype, bits: int, layout: str, whole: float, codes: float) -> Iterator[Cost]:
    kernels = kernels_of("one_byte.cu", dtype, bits, 64, layout)
    moved = whole + codes + 2 / 64
    by_block, by_tensor = "one byte each, by block", "one byte each, by tensor"
    yield cost(by_block, "pack", [kernels["pack_by_block"]], moved + 1 / _BLOCK_ELEMENTS)
    yield cost(by_block, "unpack", [kernels["unpack_by_block"]], moved + 1 / _BLOCK_ELEMENTS)
    yield cost(by_tensor, "pack", [kernels["find_top"], kernels["pack_by_tensor"]], whole + moved)


def _costs_of_widths(
    name: str, dtype: torch.dtype, bits: int, widths: Sequence[int], whole: float, codes: float
) -> Iterator[Cost]:
    choice = f"GACT_WIDTHS={','.join(map(str, widths))}"
    kernels = kernels_of("width_by_group.cu", dtype, bits, 128, "by column", choice)
    described = (4 + 1 + _START_BYTES) / 128  # of a group: scale, offset, width, where its words begin
    once = whole + codes + described
    yield cost(name, "pack", [kernels["find_ranges"], kernels["pack_widths"]], once + whole + _RANGE_BYTES / 128)
    yield cost(name, "unpack", [kernels["unpack_widths"]], once)


def _costs_in_parts(dtype: torch.dtype, bits: int, layout: str, whole: float, codes: float) -> Iterator[Cost]:
    name, once, copied = "width by group, in parts", whole + codes + (4 + 1) / 128, 2 * whole
    ranges = kernels_of("width_by_group.cu", dtype, bits, 128, layout, f"GACT_WIDTHS={bits}")
    # its units are gathered into memory order, whatever the layout
    pack, unpack = (replace(found, layout=layout) for found in counts(dtype, bits, "in memory order"))
    yield cost(name, "pack", [ranges["find_ranges"], pack], whole + _RANGE_BYTES / 128 + copied + once)
    yield cost(name, "unpack", [unpack], once + copied)


def table(rows: Sequence[Cost]) -> str:
    """Markdown: a line for each format, pack and unpack of one dtype, width and layout."""
    lines = ["| | | instructions | registers | bytes | bound on an H100 | on an H200 |", "|---" * 7 + "|"]
    first = {row.action: row for row in rows if row.format == IN_USE}
    for row in rows:
        ratios = " | ".join(f"{row.bound[on] / first[row.action].bound[on]:.2f}" for on in COPIED_PER_S)
        registers = f"{row.registers}, {row.spills} spills" if row.spills else f"{row.registers}"
        cells = f"{row.instructions:.1f} | {registers} | {row.bytes:.2f} | {ratios}"
        lines.append(f"| {row.format} | {row.action} | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=list(BITS))
    parser.add_argument("--json", type=Path, help="write the costs there")
    options = parser.parse_args(arguments)
    rows: list[Cost] = []
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for bits in options.bits:
                found = list(costs(dtype, bits, layout))
                print(f"\n{dtype}, {bits} bits, {layout}\n\n{table(found)}", flush=True)
                rows += found
    if options.json:
        version = ".".join(map(str, nvrtc.find_nvrtc().version()))
        report = {"nvrtc": version, "architecture": 90, "costs": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
