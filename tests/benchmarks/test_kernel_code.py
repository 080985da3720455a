"""benchmarks/codec/kernel_code.py: how it counts, and that the kernels keep the numbers of docs/gpu.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.codec import kernel_code
from benchmarks.codec.kernel_code import Count, counts, functions_of, longest_path, table, weighted
from gact_dist.codec import nvrtc

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_code.json"

# Two ways to the end: the shorter one has a loop, which is left out; the other one has a call and a guarded exit.
LISTING = """
	.section	.text.pack,"ax",@progbits
.text.pack:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LOP3.LUT R1, R1, R2, RZ, 0xc0, !PT ;
        /*0030*/                   FADD R1, R1, R2 ;
        /*0040*/                   FADD R1, R1, R2 ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/               @P2 EXIT ;
        /*0090*/                   CALL.REL.NOINC `($slow) ;
        /*00a0*/                   IMAD.WIDE.U32 R2, R2, R3, RZ ;
        /*00b0*/                   EXIT ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2);
        /*00d0*/                   NOP;
	.section	.text.unpack,"ax",@progbits
.text.unpack:
        /*0000*/                   EXIT ;
"""


@pytest.fixture
def tools() -> None:
    """NVRTC and nvdisasm, which need no GPU. tools/requirements-test.txt has their wheels."""
    nvrtc.find_nvrtc()
    kernel_code.disassembler()


def test_the_longest_way_without_loops_is_counted() -> None:
    functions = functions_of(LISTING)
    assert {name: len(code) for name, code in functions.items()} == {"pack": 14, "unpack": 1}
    path = longest_path(functions["pack"])
    opcodes = ["S2R", "BRA", "BAR.SYNC.DEFER_BLOCKING", "EXIT", "CALL.REL.NOINC", "IMAD.WIDE.U32", "EXIT"]
    assert [instruction.opcode for instruction in path] == opcodes
    assert [instruction.is_half_rate for instruction in path] == [False] * 5 + [True, False]
    assert [weight for _, weight in weighted(path, 0.5)] == [1.0] * 3 + [0.5] * 4


def test_the_table_has_a_line_for_each_dtype_and_width() -> None:
    common = {"dtype": "float32", "architecture": 90, "half_rate": 8.0}
    rows = [
        Count(kernel="pack", layout="by column", bits=4, instructions=16.44, registers=96, spills=0, **common),
        Count(kernel="unpack", layout="by column", bits=4, instructions=10.0, registers=72, spills=2, **common),
    ]
    assert table(rows).splitlines()[2] == "| sm_90 | float32 | 4 | 16.4 (8.0), 96 | 10.0 (8.0), 72, 2 spills |  |  |"


@pytest.mark.whole
@pytest.mark.parametrize("layout", kernel_code.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_have_the_numbers_that_were_recorded(tools: None, dtype: torch.dtype, layout: str) -> None:
    """The default format. A change of a kernel that costs a hundredth more has to say so in the recorded file."""
    recorded = {
        (row["kernel"], row["layout"], row["dtype"]): Count(**row)
        for row in json.loads(RESULTS.read_text())["counts"]
        if row["architecture"] == 90 and row["bits"] == 4
    }
    for found in counts(dtype, 4, layout):
        known = recorded[found.kernel, found.layout, found.dtype]
        assert found.instructions <= 1.01 * known.instructions, (found, known)
        assert found.registers <= known.registers
        assert found.spills == known.spills == 0


def test_what_was_recorded_keeps_to_the_goals() -> None:
    """bfloat16 at 4 bits: 15 instructions an element to pack, 11 to unpack; and no kernel spills."""
    goals = {"pack": 15.0, "unpack": 11.0}
    rows = [Count(**row) for row in json.loads(RESULTS.read_text())["counts"]]
    assert {row.architecture for row in rows} == {80, 90, 100}
    assert sum(row.spills for row in rows) == 0
    default = [row for row in rows if row.dtype == "bfloat16" and row.bits == 4]
    assert len(default) == 12
    assert all(row.instructions <= goals[row.kernel] for row in default), default
