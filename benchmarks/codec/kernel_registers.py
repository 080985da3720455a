"""How many registers do the CUDA kernels take, and what do they spill? nvcc and ptxas say so without a GPU.

    python -m benchmarks.codec.kernel_registers
    python -m benchmarks.codec.kernel_registers --architectures 90

Prints the tables of docs/gpu.md: groups of 256 in memory order, masks, groups of 128 by column; lowest and highest over
the kernels of a row, which for pack and unpack are those of 1 to 8 bits. It takes about 100 seconds of one core.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gact_dist.codec.cuda import ELEMENTS
from gact_dist.codec.nvrtc import OPTIONS, source_folder

_DTYPES = {element: str(dtype).removeprefix("torch.") for dtype, element in ELEMENTS.items()}
_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What ptxas says of one kernel."""

    name: str
    registers: int
    """of a thread"""
    stack_bytes: int
    store_bytes: int
    """spilled, of a thread"""
    load_bytes: int
    """of what was spilled, of a thread"""

    @property
    def is_in_memory(self) -> bool:
        """Whether a part of a thread's variables is not in registers."""
        return max(self.stack_bytes, self.store_bytes, self.load_bytes) > 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Kernels of one file that share a row of a table."""

    title: str
    file: str
    definitions: tuple[str, ...]
    names: str
    """regular expression for all of a name"""


def rows_of(group_size: int, by_column: bool) -> list[Row]:
    """All kernels with groups of one layout, by action and element type."""
    suffix, codec = ("_columns", "columns.cu") if by_column else ("", "memory_order.cu")
    actions = [(f"pack{suffix}_[1-8]", codec), (f"unpack{suffix}_[1-8]", codec), (f"variance{suffix}", "variance.cu")]
    return [
        Row(
            title=f"{re.split('_', names)[0]} {dtype}",
            file=file,
            definitions=(f"GACT_ELEMENT={element}", f"GACT_GROUP={group_size}"),
            names=names,
        )
        for names, file in actions
        for element, dtype in _DTYPES.items()
    ]


MASKS = Row(title="masks", file="masks.cu", definitions=(), names=r"(un)?pack_mask_\d")
TABLES: dict[str, list[Row]] = {
    "In memory order, group size 256": [*rows_of(256, by_column=False), MASKS],
    "By column, group size 128": rows_of(128, by_column=True),
}


def parse(log: str) -> list[Usage]:
    """The kernels in the log of ptxas -v. Raises ValueError for a log without one."""
    found = [
        Usage(
            name=match["name"],
            registers=int(match["registers"]),
            stack_bytes=int(match["stack"]),
            store_bytes=int(match["stores"]),
            load_bytes=int(match["loads"]),
        )
        for match in _KERNEL.finditer(log)
    ]
    if not found:
        raise ValueError(f"there is no kernel in the log, expected what nvcc -Xptxas -v prints: {log[-500:]!r}")
    return found


def compiled(file: str, definitions: Iterable[str], architecture: int) -> list[Usage]:
    """All kernels of a file in csrc/cuda/, compiled by nvcc with the options that NVRTC has."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", *OPTIONS, "-cubin", "-Xptxas", "-v", f"-arch=sm_{architecture}", "-o", f"{folder}/out.cubin"]
        command += [*(f"-D{definition}" for definition in definitions), "-I", str(source_folder())]
        command.append(str(source_folder() / "cuda" / file))
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc ended with status {done.returncode} at {file} for sm_{architecture}: {done.stderr}")
    return parse(done.stderr)


def registers(usages: Sequence[Usage]) -> str:
    """Cell of the first table."""
    return _range([usage.registers for usage in usages])


def spills(usages: Sequence[Usage]) -> str:
    """Cell of the second table."""
    spilling = [usage for usage in usages if usage.is_in_memory]
    if not spilling:
        return "none"
    fields = ("stack_bytes", "store_bytes", "load_bytes")
    cell = " / ".join(_range([getattr(usage, field) for usage in spilling]) for field in fields)
    return f"{cell} in {len(spilling)} of {len(usages)}"


def _range(numbers: Sequence[int]) -> str:
    lowest, highest = min(numbers), max(numbers)
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


def table(
    rows: Mapping[str, Mapping[int, Sequence[Usage]]], architectures: Sequence[int], cell: Callable[..., str]
) -> str:
    """Markdown: a line for each title of ``rows``, whose kernels are given by architecture."""
    lines = [f"| | {' | '.join(f'sm_{architecture}' for architecture in architectures)} |"]
    lines.append("|---" * (len(architectures) + 1) + "|")
    for title, by_architecture in rows.items():
        lines.append(f"| {title} | {' | '.join(cell(by_architecture[number]) for number in architectures)} |")
    return "\n".join(lines)


def measured(rows: Sequence[Row], architectures: Sequence[int]) -> dict[str, dict[int, list[Usage]]]:
    """The kernels of each row, by its title and by architecture; each file is compiled once for each."""
    found: dict[str, dict[int, list[Usage]]] = {row.title: {} for row in rows}
    for file, definitions in dict.fromkeys((row.file, row.definitions) for row in rows):
        for architecture in architectures:
            usages = compiled(file, definitions, architecture)
            for row in rows:
                if (row.file, row.definitions) == (file, definitions):
                    matching = [usage for usage in usages if re.fullmatch(row.names, usage.name)]
                    found[row.title][architecture] = matching
    return found


def version() -> str:
    """Of nvcc."""
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[-2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[80, 90, 100], help="compute capability x 10")
    options = parser.parse_args(arguments)
    if shutil.which("nvcc") is None:
        parser.error("nvcc is not on PATH: install the CUDA toolkit")
    print(version())
    for title, rows in TABLES.items():
        found = measured(rows, options.architectures)
        print(f"\n{title}. Registers of a thread:\n\n{table(found, options.architectures, registers)}")
        print("\nStack frame / spill stores / spill loads, bytes of a thread, in the kernels that have any:\n")
        print(table(found, options.architectures, spills), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
