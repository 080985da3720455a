"""PTX text to programs for machine.cpp, one for each kernel of a module.

A program is text: a few directives, then one line an instruction with its opcode, its guard ("-", "p4" or "!p4": the
number of a register) and its operands, each the number of a register, or minus one minus that of a constant. Memory
operands are two, a base and an offset; labels are constants, the numbers of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)([^{;]*)\{", re.DOTALL)
_VARIABLE = re.compile(r"\.(shared|local)\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.]*)\s*(.*)$", re.DOTALL)
_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_SPECIALS = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x", "%laneid")
_BARRIERS = ("bar.sync", "bar.warp.sync")


class PtxError(ValueError):
    """PTX that program.py does not know."""


@dataclass
class Program:
    """One kernel."""

    name: str
    instructions: list[str]
    """a line each, for machine.cpp"""
    directives: list[str]
    sources: list[str]
    """the PTX of each instruction"""

    @property
    def barriers(self) -> list[int]:
        """Numbers of the instructions at which threads of a warp or a block wait for one another."""
        return [number for number, line in enumerate(self.instructions) if line.split()[0] in _BARRIERS]

    def text(self, without: int | None = None) -> str:
        """For machine.cpp, optionally with one instruction that does nothing."""
        lines = list(self.instructions)
        if without is not None:
            lines[without] = "nop -"
        return "\n".join([*self.directives, *lines]) + "\n"


@dataclass
class _Kernel:
    """A kernel as it is translated."""

    name: str
    registers: dict[str, int] = field(default_factory=dict)
    declared: set[str] = field(default_factory=lambda: {"_", *_SPECIALS})
    constants: dict[int, int] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    """addresses in shared and in local memory"""
    sizes: dict[str, int] = field(default_factory=lambda: {"shared": 0, "local": 0})
    labels: dict[str, int] = field(default_factory=dict)
    lines: list[tuple[str, str, list[str | int], str]] = field(default_factory=list)
    """opcode, guard, operands (labels still by name), PTX"""

    def register(self, name: str) -> int:
        return self.registers.setdefault(name, len(self.registers))

    def constant(self, value: int) -> int:
        return -1 - self.constants.setdefault(value % 2**64, len(self.constants))

    def place(self, space: str, alignment: int, name: str, size: int) -> None:
        start = -(-self.sizes[space] // alignment) * alignment
        self.variables[name] = start
        self.sizes[space] = start + size


def programs_of(ptx: str) -> dict[str, Program]:
    """All kernels of a module, by name. Raises PtxError for what machine.cpp has no word for."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    found = {}
    for entry in _ENTRY.finditer(text):
        body = text[entry.end() : _closing(text, entry.end())]
        module_scope = text[: entry.start()].rpartition("\n}")[2]
        found[entry[1]] = _translated(entry[1], body, _VARIABLE.findall(module_scope))
    return found


def _closing(text: str, start: int) -> int:
    """Where the brace is closed that was opened before ``start``."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise PtxError("a brace is not closed")


def _translated(name: str, body: str, outer_variables: list[tuple[str, str, str, str]]) -> Program:
    kernel = _Kernel(name)
    for space, alignment, variable, size in outer_variables:
        kernel.place(space, int(alignment), variable, int(size))
    for special in _SPECIALS:
        kernel.register(special)
    for scope, statement in _statements(body, kernel):
        _translate(kernel, scope, statement)
    instructions = [_line(kernel, opcode, guard, operands) for opcode, guard, operands, _ in kernel.lines]
    directives = [
        f".registers {len(kernel.registers)}",
        f".shared {kernel.sizes['shared']}",
        f".local {-(-kernel.sizes['local'] // 16) * 16}",
        ".specials " + " ".join(str(kernel.registers[special]) for special in _SPECIALS),
        ".constants " + " ".join(map(str, kernel.constants)),
    ]
    return Program(name, instructions, directives, [source for *_, source in kernel.lines])


def _line(kernel: _Kernel, opcode: str, guard: str, operands: list[str | int]) -> str:
    numbers = [kernel.constant(kernel.labels[o]) if isinstance(o, str) else o for o in operands]
    return " ".join([opcode, guard, *map(str, numbers)])


def _statements(body: str, kernel: _Kernel) -> Iterator[tuple[str, str]]:
    """Statements with the scope that their own registers belong to; labels and variables go into ``kernel``."""
    position, scopes, opened = 0, [""], 0
    while position < len(body):
        label = _LABEL.match(body, position)
        if body[position].isspace():
            position += 1
        elif body[position] == "{":
            opened += 1
            scopes.append(f"{opened}:")
            position += 1
        elif body[position] == "}":
            scopes.pop()
            position += 1
        elif label:
            kernel.labels[label[1]] = len(kernel.lines)
            position = label.end()
        else:
            end = body.index(";", position)
            yield scopes[-1], " ".join(body[position:end].split())
            position = end + 1


def _translate(kernel: _Kernel, scope: str, statement: str) -> None:
    variable = _VARIABLE.match(statement)
    if variable:
        kernel.place(variable[1], int(variable[2]), variable[3], int(variable[4]))
    elif statement.startswith(".reg"):
        for name in re.sub(r"^\.reg\s+\.\w+", "", statement).split(","):
            prefix, _, count = name.strip().partition("<")
            numbers = range(int(count.rstrip(">"))) if count else [""]
            kernel.declared.update(f"{scope}{prefix}{number}" for number in numbers)
    elif not statement.startswith(".pragma"):
        _translate_instruction(kernel, scope, statement)


def _translate_instruction(kernel: _Kernel, scope: str, statement: str) -> None:
    match = _INSTRUCTION.match(statement)
    if match is None:
        raise PtxError(f"{kernel.name}: {statement}")
    negated, predicate, opcode, text = match.groups()
    guard = "-" if predicate is None else f"{negated}p{_register(kernel, scope, predicate)}"
    operands = _split(text)
    opcode, operands = _normalised(opcode, operands)
    numbers = [number for operand in operands for number in _numbers(kernel, scope, opcode, operand)]
    if opcode in ("bra", "bra.uni"):
        numbers = [operands[0]]
    kernel.lines.append((opcode, guard, numbers, statement))


def _normalised(opcode: str, operands: list[str]) -> tuple[str, list[str]]:
    """Moves of vectors get the number of parts in their opcode, a shuffle without a predicate gets one."""
    if opcode.startswith("mov") and operands[0].startswith("{"):
        return f"{opcode}.split{len(operands[0].split(','))}", operands
    if opcode.startswith("mov") and operands[1].startswith("{"):
        return f"{opcode}.join{len(operands[1].split(','))}", operands
    if opcode.startswith("shfl") and "|" not in operands[0]:
        return opcode, [f"{operands[0]}|_", *operands[1:]]
    return opcode, operands


def _split(text: str) -> list[str]:
    """Operands, which commas separate outside of braces and brackets."""
    return [operand.strip() for operand in re.split(r",(?![^{\[]*[}\]])", text) if operand.strip()]


def _numbers(kernel: _Kernel, scope: str, opcode: str, operand: str) -> list[str | int]:
    """One operand of a statement: several for vectors, memory, and a result beside a predicate."""
    if operand.startswith("{"):
        return [_value(kernel, scope, part.strip()) for part in operand[1:-1].split(",")]
    if "|" in operand:
        return [_value(kernel, scope, part.strip()) for part in operand.split("|")]
    if not operand.startswith("["):
        return [_value(kernel, scope, operand)]
    base, _, offset = operand[1:-1].partition("+")
    parameter = re.fullmatch(rf"{kernel.name}_param_(\d+)", base.strip())
    first = kernel.constant(int(parameter[1])) if parameter else _value(kernel, scope, base.strip())
    return [first, kernel.constant(int(offset.strip() or "0", 0))]


def _value(kernel: _Kernel, scope: str, text: str) -> int:
    if text.startswith(("0f", "0F", "0d", "0D")):
        return kernel.constant(int(text[2:], 16))
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return kernel.constant(int(text.rstrip("U"), 0))
    if text in kernel.variables:
        return kernel.constant(kernel.variables[text])
    if text == "_" or text.startswith("%") or scope + text in kernel.declared:
        return _register(kernel, scope, text)
    return 0  # a label, which the caller keeps by name


def _register(kernel: _Kernel, scope: str, name: str) -> int:
    """One that the innermost scope declares, or the kernel."""
    for declared in (scope + name, name):
        if declared in kernel.declared:
            return kernel.register(declared)
    raise PtxError(f"{kernel.name}: register {name} is not declared, or a special one that program.py does not know")
