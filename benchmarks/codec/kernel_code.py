"""What the compiler makes of the CUDA kernels: instructions for an element, registers and spills, without a GPU.

    python -m benchmarks.codec.kernel_code
    python -m benchmarks.codec.kernel_code --architectures 80 90 100 --json benchmarks/results/kernel_code.json

NVRTC compiles, nvdisasm (the wheel nvidia-cuda-nvdisasm) lists the instructions. Whole tiles without rare values run
through code without loops, and all other code has loops. So the count is that of the longest path through the code that
is in no loop: what a thread executes at most for its 64 elements, as a warp issues an instruction once for all lanes.
pack has three barriers; what lies between the first two, and what follows the last, is done once for a group, by as
many threads as there are groups (64 of group_size), and counts accordingly.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from gact_dist.codec import DEFAULT_GROUP_SIZE, nvrtc
from gact_dist.codec.cuda import codec_kernel

THREAD_ELEMENTS = 64
LAYOUTS = {"by column": 32, "in memory order": 1}
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
# In .nv.info: entries with their length and a value of that many bytes; the number of registers.
_SIZED, _REGISTER_COUNT = 0x04, 0x2F
_TARGET = re.compile(r"`\((\.L_\w+)\)")
# Integer, logic, comparison and conversion instructions, which issue at half the rate of the others.
_HALF_RATE = re.compile(
    r"(LOP3|PRMT|ISETP|SEL|SHF|IADD3|VIADD|LEA|FMNMX3?|FSETP|FSEL|VIMNMX3?|V?HMNMX2?|VABSDIFF4|PLOP3|IABS|F2FP|SGXT|"
    r"BMSK|MOV|R2P|P2R|IMAD\.WIDE)(\.|$)"
)


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    opcode: str
    guarded: bool
    target: int | None
    """number of the instruction that a branch goes to"""

    @property
    def is_branch(self) -> bool:
        """Of all lanes; BRA.DIV is for warps that have parted."""
        return self.opcode.split(".")[0] == "BRA" and not self.opcode.startswith("BRA.DIV")

    @property
    def is_half_rate(self) -> bool:
        """Whether a scheduler issues it every second cycle only."""
        return _HALF_RATE.match(self.opcode) is not None


@dataclass(frozen=True, kw_only=True)
class Count:
    """Of one kernel; instructions are those for an element."""

    kernel: str
    layout: str
    dtype: str
    bits: int
    instructions: float
    half_rate: float
    """of the instructions, those that a scheduler issues every second cycle only"""
    registers: int
    """of a thread"""
    spills: int
    """instructions that store or load a thread's own memory, in the whole kernel"""
    architecture: int
    """compute capability x 10"""


@cache
def disassembler() -> Path:
    """nvdisasm. Raises FileNotFoundError where it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for wheels in spec.submodule_search_locations or () if spec else ():
        for found in Path(wheels).glob("*/bin/nvdisasm"):
            return found
    raise FileNotFoundError("nvdisasm is not installed; pip install nvidia-cuda-nvdisasm")


def listing(binary: bytes) -> str:
    """What nvdisasm prints of machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cubin")
        path.write_bytes(binary)
        return subprocess.run([disassembler(), "-c", path], capture_output=True, text=True, check=True).stdout


def functions_of(text: str) -> dict[str, list[Instruction]]:
    """The kernels of a listing, by name."""
    found = {}
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.MULTILINE)[1:]:
        found[section[: section.index(",")]] = _instructions_of(section)
    return found


def _instructions_of(section: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    matches: list[re.Match[str]] = []
    for line in section.splitlines():
        label = re.match(r"^([.$]\w+):", line)
        if label:
            labels[label[1]] = len(matches)
        match = _INSTRUCTION.match(line)
        if match:
            matches.append(match)
    found = []
    for match in matches:
        target = _TARGET.search(match[5]) if match[4].startswith("BRA") else None
        guarded = match[3] is not None or re.match(r"!?U?P\d", match[5]) is not None
        found.append(Instruction(match[4], guarded, labels[target[1]] if target else None))
    return found


def _successors(code: Sequence[Instruction], number: int) -> list[int]:
    instruction = code[number]
    ends = instruction.opcode in ("EXIT", "RET") or instruction.opcode.startswith("RET.")
    following = [number + 1] if number + 1 < len(code) else []
    if instruction.is_branch and instruction.target is not None:
        return [instruction.target, *following] if instruction.guarded else [instruction.target]
    return following if instruction.guarded or not ends else []


def _in_loops(code: Sequence[Instruction]) -> set[int]:
    """Instructions from which a path leads back to themselves (Tarjan's algorithm, without recursion)."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: set[int] = set()
    work = [(0, iter(_successors(code, 0)))]
    order[0] = lowest[0] = 0
    stack.append(0)
    on_stack.add(0)
    while work:
        number, following = work[-1]
        for successor in following:
            if successor not in order:
                order[successor] = lowest[successor] = len(order)
                stack.append(successor)
                on_stack.add(successor)
                work.append((successor, iter(_successors(code, successor))))
                break
            if successor in on_stack:
                lowest[number] = min(lowest[number], order[successor])
        else:
            work.pop()
            if work:
                lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[number])
            if lowest[number] == order[number]:
                component = stack[stack.index(number) :]
                del stack[-len(component) :]
                on_stack.difference_update(component)
                if len(component) > 1:
                    found.update(component)
    return found


def registers_of(binary: bytes) -> dict[str, int]:
    """Registers of a thread, by kernel: attribute EIATTR_REGCOUNT in section .nv.info of the ELF file."""
    start, *_ = struct.unpack_from("<Q", binary, 40)
    size, count, names = struct.unpack_from("<HHH", binary, 58)
    sections = [struct.unpack_from("<IIQQQQII", binary, start + number * size) for number in range(count)]

    def text(table: int, offset: int) -> str:
        first = sections[table][4] + offset
        return binary[first : binary.index(b"\0", first)].decode()

    named = {text(names, section[0]): section for section in sections}
    symbols = named[".symtab"]
    at, end = named[".nv.info"][4], sum(named[".nv.info"][4:6])
    found = {}
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", binary, at)
        at += 4
        if form != _SIZED:
            continue
        if attribute == _REGISTER_COUNT:
            symbol, registers = struct.unpack_from("<II", binary, at)
            name, *_ = struct.unpack_from("<I", binary, symbols[4] + 24 * symbol)
            found[text(symbols[6], name)] = registers
        at += length
    return found


def longest_path(code: Sequence[Instruction]) -> list[Instruction]:
    """The longest way through ``code`` from its beginning to an end that enters no loop."""
    loops = _in_loops(code)
    length: dict[int, int] = {}
    following: dict[int, int | None] = {}
    work = [0]
    while work:
        number = work[-1]
        ahead = [s for s in _successors(code, number) if s not in loops]
        missing = [s for s in ahead if s not in length]
        if missing:
            work += missing
            continue
        work.pop()
        best = max(ahead, key=lambda s: length[s], default=None)
        # What only leads into loops is no way to an end.
        reachable = best is not None or code[number].opcode == "EXIT"
        length[number] = (1 if reachable else -(10**6)) + (length[best] if best is not None else 0)
        following[number] = best
    path, at = [], 0
    while True:
        path.append(code[at])
        ahead_of_it = following[at]
        if ahead_of_it is None:
            return [instruction for instruction in path if instruction.opcode != "NOP"]
        at = ahead_of_it


def weighted(path: Sequence[Instruction], share: float) -> list[tuple[Instruction, float]]:
    """Instructions with the share of the threads that execute them, which is ``share`` where threads have groups."""
    found, barriers = [], 0
    for instruction in path:
        found.append((instruction, share if barriers in (1, 3) else 1.0))
        barriers += instruction.opcode.startswith("BAR.SYNC")
    return found


def counts(
    dtype: torch.dtype, bits: int, layout: str, architecture: int = 90, group_size: int = DEFAULT_GROUP_SIZE
) -> list[Count]:
    """Of pack and of unpack."""
    definitions = codec_kernel("pack", dtype, bits, group_size, LAYOUTS[layout]).definitions
    binary = nvrtc.compile_kernels(nvrtc.find_nvrtc(), "codec.cu", definitions, f"sm_{architecture}")
    return counts_of(binary, dtype, bits, layout, architecture, group_size)


def counts_of(
    binary: bytes, dtype: torch.dtype, bits: int, layout: str, architecture: int, group_size: int
) -> list[Count]:
    """Of each kernel in machine code."""
    registers = registers_of(binary)
    found = []
    for name, code in sorted(functions_of(listing(binary)).items()):
        path = weighted(longest_path(code), THREAD_ELEMENTS / group_size)
        found.append(
            Count(
                kernel=name,
                layout=layout,
                dtype=str(dtype).removeprefix("torch."),
                bits=bits,
                instructions=round(sum(weight for _, weight in path) / THREAD_ELEMENTS, 2),
                half_rate=round(sum(weight for step, weight in path if step.is_half_rate) / THREAD_ELEMENTS, 2),
                registers=registers[name],
                spills=sum(instruction.opcode.startswith(("STL", "LDL")) for instruction in code),
                architecture=architecture,
            )
        )
    return found


def table(rows: Iterable[Count]) -> str:
    """Markdown: a line for each architecture, dtype and width, pack and unpack of both layouts.

    A cell has instructions, of these at half rate in brackets, registers, and spills where there are any.
    """
    cells: dict[tuple[int, str, int], dict[tuple[str, str], str]] = {}
    for row in rows:
        text = f"{row.instructions:.1f} ({row.half_rate:.1f}), {row.registers}"
        text += f", {row.spills} spills" if row.spills else ""
        cells.setdefault((row.architecture, row.dtype, row.bits), {})[row.kernel, row.layout] = text
    columns = [(kernel, layout) for layout in LAYOUTS for kernel in ("pack", "unpack")]
    lines = ["| | | bits | " + " | ".join(f"{kernel} {layout}" for kernel, layout in columns) + " |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for (architecture, dtype, bits), found in cells.items():
        row_cells = " | ".join(found.get(column, "") for column in columns)
        lines.append(f"| sm_{architecture} | {dtype} | {bits} | {row_cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=int, nargs="+", default=[90], help="compute capability x 10")
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args(arguments)
    rows = [
        count
        for architecture in options.architectures
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for bits in options.bits
        for layout in LAYOUTS
        for count in counts(dtype, bits, layout, architecture)
    ]
    print(table(rows))
    if options.json:
        version = ".".join(map(str, nvrtc.find_nvrtc().version()))
        report = {"nvrtc": version, "counts": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
