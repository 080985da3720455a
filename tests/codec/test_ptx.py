"""The PTX that NVRTC emits for the CUDA kernels, run on the CPU: the reference's bytes, no races, no idle barrier.

`python -m tools.ptx.check_kernels` does the same for every group size and removes every barrier.
"""

import json
from pathlib import Path

import pytest
import torch

from gact_dist.codec import cuda
from gact_dist.codec import format as payload_format
from gact_dist.codec.driver import Kernel
from tools.ptx.cases import (
    SEED,
    Format,
    differences,
    formats,
    mask_differences,
    norm_differences,
    sampled_differences,
    variance_differences,
)
from tools.ptx.check_kernels import Mutations, Report, check_barriers, keep, run
from tools.ptx.machine import Loaded, Machine, MachineError
from tools.ptx.program import Program, PtxError, programs_of

GROUP_SIZE = payload_format.DEFAULT_GROUP_SIZE


@pytest.mark.whole
@pytest.mark.parametrize("of", formats((GROUP_SIZE,), tuple(range(1, 9))), ids=str)
def test_kernels_give_the_bits_of_the_reference(machine: Machine, of: Format) -> None:
    assert list(differences(of)) == []
    assert machine.findings.launches.total() > 0


@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_masks_are_the_bits_of_the_reference(machine: Machine, dtype: torch.dtype) -> None:
    assert list(mask_differences(dtype)) == []


@pytest.mark.whole
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_the_rounding_variance_is_that_of_the_reference(machine: Machine, dtype: torch.dtype) -> None:
    assert list(variance_differences(dtype, GROUP_SIZE)) == []


@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_norms_are_made_again_in_float32_and_rounded_once(machine: Machine, dtype: torch.dtype) -> None:
    assert list(norm_differences(dtype)) == []


@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_sampling_gives_the_bits_of_the_cpu(machine: Machine, dtype: torch.dtype) -> None:
    assert list(sampled_differences(dtype)) == []


@pytest.mark.whole
@pytest.mark.parametrize("layout", ["by column", "in memory order"])
def test_every_barrier_is_needed_and_missed(machine: Machine, layout: str) -> None:
    of = Format(torch.bfloat16, 4, GROUP_SIZE, layout)
    mutations = Mutations()
    assert run(machine, lambda: differences(of)) == []
    check_barriers(machine, lambda: differences(of), mutations)
    assert mutations.barriers == mutations.by_race == 3
    assert mutations.missed == []


def test_a_payload_that_differs_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = machine.launch

    def launch(device: torch.device, kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
        *others, seed, target, scale_start, offset_start = arguments
        original(device, kernel, blocks, threads, *others, seed + (seed == SEED), target, scale_start, offset_start)

    monkeypatch.setattr(cuda, "launch", launch)
    found = list(differences(Format(torch.float32, 4, GROUP_SIZE, "by column")))
    assert len(found) > 10
    assert all("differ" in line for line in found)


# ---- the machine


def kernel_of(body: str, registers: str = "") -> Program:
    """A kernel with one parameter, the address of the result in %rd1, and its thread in %r1."""
    return programs_of(f"""
        .version 9.0
        .target sm_90
        .visible .entry test(.param .u64 test_param_0)
        {{
          .reg .pred %p<9>;
          .reg .b16 %rs<9>;
          .reg .b32 %r<20>;
          .reg .f32 %f<9>;
          .reg .b64 %rd<9>;
          .shared .align 4 .b8 memory[256];
          {registers}
          ld.param.u64 %rd1, [test_param_0];
          mov.u32 %r1, %tid.x;
          {body}
          ret;
        }}""")["test"]


def result_of(body: str, threads: int = 32, blocks: int = 1) -> tuple[list[int], int, str]:
    """What each thread leaves in %r9, the races and the report."""
    store = "mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.u32 [%rd3], %r9;"
    out = torch.zeros(threads, dtype=torch.int32)
    races, report = Loaded(kernel_of(body + store)).run(blocks, threads, (out.data_ptr(),))
    return [number & 0xFFFFFFFF for number in out.tolist()], races, report


# From the examples and tables of the PTX ISA manual, and what IEEE arithmetic has for them.
OPERATIONS = {
    "prmt.b32 %r9, 0x33221100, 0x77665544, 0x7531;": 0x77553311,
    "prmt.b32 %r9, 0x00000080, 0, 0xB8A8;": 0x00FF00FF,  # bit 3 of a selector replicates the sign
    "shf.l.wrap.b32 %r9, 0x80000000, 0x1, 33;": 0x3,
    "shf.r.clamp.b32 %r9, 0x80000000, 0x1, 33;": 0x1,
    "shl.b32 %r9, 1, 32;": 0,
    "shr.s32 %r9, -8, 40;": 0xFFFFFFFF,
    "bfi.b32 %r9, 0xF, 0, 4, 8;": 0xF0,
    "bfe.s32 %r9, 0x80, 4, 4;": 0xFFFFFFF8,
    "bfe.u32 %r9, 0x80, 4, 4;": 0x8,
    "lop3.b32 %r9, 0xF0, 0xCC, 0xAA, 0x80;": 0x80,  # 0x80 is a & b & c
    "mul.hi.s32 %r9, -1, 1;": 0xFFFFFFFF,
    "vabsdiff4.u32.u32.u32.add %r9, 0x00FF0180, 0x01000080, 5;": 5 + 1 + 255 + 1 + 0,
    "cvt.rni.s32.f32 %r9, 0f40200000;": 2,  # 2.5 to even
    "cvt.rzi.s32.f32 %r9, 0fC0200000;": 0xFFFFFFFE,  # -2.5
    "cvt.rni.s32.f32 %r9, 0f7FC00000;": 0,  # NaN
    "cvt.rni.s32.f32 %r9, 0f7F800000;": 0x7FFFFFFF,  # infinity, clamped
    "add.rn.f32 %f1, 0f7F800000, 0fFF800000; mov.b32 %r9, %f1;": 0x7FFFFFFF,  # the canonical NaN
    "fma.rn.f32 %f1, 0f3F800001, 0f3F800001, 0fBF800002; mov.b32 %r9, %f1;": 0x28800000,  # 2^-46, lost by two roundings
    "add.rn.f32 %f1, 0f00000001, 0f00000001; mov.b32 %r9, %f1;": 2,  # subnormal numbers stay
    "min.NaN.f32 %f1, 0f3F800000, 0f7FC00001; mov.b32 %r9, %f1;": 0x7FFFFFFF,
    "min.f32 %f1, 0f3F800000, 0f7FC00001; mov.b32 %r9, %f1;": 0x3F800000,
    "min.f32 %f1, 0f00000000, 0f80000000; mov.b32 %r9, %f1;": 0x80000000,  # -0 is below 0
    "max.NaN.bf16x2 %r9, 0x3F80BF80, 0x40007FC1;": 0x40007FFF,
    "min.NaN.f16x2 %r9, 0x3C000001, 0x38008000;": 0x38008000,
    "cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000;": 0x3F803F82,  # ties to even; the first is the upper half
    "cvt.rn.f16x2.f32 %r9, 0f477FF000, 0f33000000;": 0x7C000000,  # 65520 is infinity, 2^-25 ties to zero
    "cvt.rn.f16.f32 %rs1, 0f33000001; cvt.u32.u16 %r9, %rs1;": 1,
    "cvt.f32.f16 %f1, 0x0001; mov.b32 %r9, %f1;": 0x33800000,
    "setp.ltu.f32 %p1, 0f7FC00000, 0f00000000; selp.u32 %r9, 1, 0, %p1;": 1,  # unordered
    "setp.lt.f32 %p1, 0f7FC00000, 0f00000000; selp.u32 %r9, 1, 0, %p1;": 0,
    "setp.ne.f32 %p1, 0f7FC00000, 0f00000000; selp.u32 %r9, 1, 0, %p1;": 0,
    "mov.b64 {%r2, %r9}, 0x123456789;": 1,
    "mov.b32 {%rs1, %rs2}, 0x00050003; mov.b32 %r9, {%rs2, %rs1};": 0x00030005,
    "cvt.s32.s8 %r9, 0x80;": 0xFFFFFF80,
    "sub.s16 %rs1, 1, 3; cvt.s32.s16 %r9, %rs1;": 0xFFFFFFFE,
    "mad.wide.u32 %rd4, 0xFFFFFFFF, 2, 3; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r9, %rd4;": 2,
    "{.reg .f16 a; cvt.rn.f16.f32 a, 0f3F800000; cvt.f32.f16 %f1, a;} mov.b32 %r9, %f1;": 0x3F800000,
}


@pytest.mark.parametrize(("instructions", "expected"), OPERATIONS.items(), ids=[text.split()[0] for text in OPERATIONS])
def test_instructions_do_what_the_manual_says(compiler: object, instructions: str, expected: int) -> None:
    found, races, _ = result_of(instructions)
    assert [hex(number) for number in found] == [hex(expected)] * 32
    assert races == 0


def test_lanes_exchange_as_the_manual_says() -> None:
    assert result_of("shfl.sync.bfly.b32 %r9|%p1, %r1, 5, 31, -1;")[0] == [lane ^ 5 for lane in range(32)]
    assert result_of("shfl.sync.idx.b32 %r9|%p1, %r1, 7, 31, -1;")[0] == [7] * 32
    segments = "shfl.sync.idx.b32 %r9|%p1, %r1, 3, 0x181F, -1;"  # of eight lanes
    assert result_of(segments)[0] == [lane // 8 * 8 + 3 for lane in range(32)]
    assert result_of("shfl.sync.up.b32 %r9, %r1, 2, 0, -1;")[0] == [0, 1, *range(30)]
    odd = "and.b32 %r2, %r1, 1; setp.eq.s32 %p1, %r2, 1;"
    assert result_of(f"{odd} vote.sync.ballot.b32 %r9, %p1, -1;")[0] == [0xAAAAAAAA] * 32
    assert result_of(f"{odd} vote.sync.any.pred %p2, %p1, -1; selp.u32 %r9, 1, 0, %p2;")[0] == [1] * 32
    assert result_of(f"{odd} vote.sync.all.pred %p2, %p1, -1; selp.u32 %r9, 1, 0, %p2;")[0] == [0] * 32


# Each thread writes a word, and after something in between reads one at some distance.
SWAP = """
    shl.b32 %r2, %r1, 2;  mov.u32 %r3, memory;  add.s32 %r3, %r3, %r2;  st.shared.u32 [%r3], %r1;
    {}
    xor.b32 %r4, %r2, {};  mov.u32 %r5, memory;  add.s32 %r5, %r5, %r4;  ld.shared.u32 %r9, [%r5];
"""


@pytest.mark.parametrize(
    ("between", "distance", "races"),
    [
        ("bar.sync 0;", 128, 0),
        ("bar.warp.sync -1;", 4, 0),
        ("bar.warp.sync -1;", 128, 256),  # does not order what other warps do: four bytes of 64 threads
        ("shfl.sync.bfly.b32 %r6|%p1, %r1, 1, 31, -1;", 4, 256),  # orders nothing
        ("", 4, 256),
        ("", 0, 0),  # its own
    ],
)
def test_only_barriers_order_accesses(between: str, distance: int, races: int) -> None:
    _, found, report = result_of(SWAP.format(between, distance), threads=64)
    assert found == races
    assert ("shared memory" in report) == (races > 0)


def test_blocks_that_touch_the_same_memory_race() -> None:
    assert result_of("mov.u32 %r9, 1;", blocks=1)[1] == 0
    races, report = result_of("mov.u32 %r9, 1;", blocks=2)[1:]
    assert races == 4 * 32
    assert "write, write in global memory" in report
    assert "of block 1" in report


FEW = "setp.lt.u32 %p1, %r1, 9;"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"{FEW} @%p1 bra L; bar.warp.sync -1; L: shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;", "lanes wait for others"),
        (f"{FEW} @%p1 ret; bar.sync 0;", "has ended and others wait at bar.sync"),
        (f"{FEW} @%p1 ret; shfl.sync.idx.b32 %r9, %r1, 3, 31, -1;", "a lane that takes no part"),
        ("add.s64 %rd1, %rd1, 2; ld.global.u32 %r9, [%rd1];", "not aligned"),
        ("ld.shared.u32 %r9, [memory+256];", "beyond shared memory"),
        ("add.ftz.f32 %f1, 0f00000000, 0f00000000;", "unknown instruction add.ftz.f32"),
        ("mov.u32 %r9, %clock;", "register %clock is not declared"),
    ],
)
def test_what_a_gpu_would_not_do_is_an_error(body: str, message: str) -> None:
    with pytest.raises((MachineError, PtxError), match=message):
        result_of(body)


def test_registers_and_memory_hold_garbage_until_they_are_written() -> None:
    assert result_of("mov.u32 %r9, %r7;")[0] == [0xA5A5A5A5] * 32
    assert result_of("ld.shared.u32 %r9, [memory+8];")[0] == [0xA5A5A5A5] * 32


def test_a_report_takes_the_place_of_that_of_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "ptx.json"
    for architecture, kernels in ((100, 1), (80, 2), (100, 3)):
        keep(Report(nvrtc="13.0", architecture=architecture, kernels=kernels), path)
    assert [(row["architecture"], row["kernels"]) for row in json.loads(path.read_text())] == [(80, 2), (100, 3)]
