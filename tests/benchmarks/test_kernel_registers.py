"""benchmarks/codec/kernel_registers.py: what it reads in ptxas' log, and that its tables have every kernel."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.codec import kernel_registers
from benchmarks.codec.kernel_registers import MASKS, TABLES, Usage, compiled, main, parse, registers, spills

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'pack_columns_8' for 'sm_80'
ptxas info    : Function properties for pack_columns_8
    64 bytes stack frame, 36 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 64 bytes cumulative stack size, 23552 bytes smem, 408 bytes cmem[0]
ptxas info    : Compile time = 144.059 ms
ptxas info    : Compiling entry function 'variance' for 'sm_80'
ptxas info    : Function properties for variance
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 61 registers, used 0 barriers
"""
PACK = Usage(name="pack_columns_8", registers=64, stack_bytes=64, store_bytes=36, load_bytes=32)
VARIANCE = Usage(name="variance", registers=61, stack_bytes=0, store_bytes=0, load_bytes=0)


def test_a_log_is_read():
    assert parse(LOG) == [PACK, VARIANCE]
    with pytest.raises(ValueError, match="there is no kernel in the log"):
        parse("ptxas info    : 0 bytes gmem")


def test_cells_have_the_lowest_and_the_highest():
    other = Usage(name="pack_columns_1", registers=70, stack_bytes=8, store_bytes=36, load_bytes=0)
    assert registers([PACK, VARIANCE, other]) == "61 to 70"
    assert spills([PACK, VARIANCE, other]) == "8 to 64 / 36 / 0 to 32 in 2 of 3"
    assert (registers([VARIANCE]), spills([VARIANCE])) == ("61", "none")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_says_it_of_the_masks():
    usages = compiled(MASKS.file, MASKS.definitions, 90)
    assert {usage.name for usage in usages} == {f"{way}pack_mask_{size}" for way in ("", "un") for size in (1, 2, 4, 8)}
    assert all(0 < usage.registers < 256 for usage in usages)


def test_the_tables_have_every_kernel_once(monkeypatch, capsys):
    names = {
        "memory_order.cu": [f"{way}pack_{bits}" for way in ("", "un") for bits in range(1, 9)],
        "columns.cu": [f"{way}pack_columns_{bits}" for way in ("", "un") for bits in range(1, 9)],
        "variance.cu": ["variance", "variance_columns"],
        "masks.cu": [f"{way}pack_mask_{size}" for way in ("", "un") for size in (1, 2, 4, 8)],
    }

    def made_up(file, definitions, architecture):
        return [
            Usage(name=name, registers=number, stack_bytes=0, store_bytes=0, load_bytes=0)
            for number, name in enumerate(names[file], architecture)
        ]

    monkeypatch.setattr(kernel_registers, "compiled", made_up)
    monkeypatch.setattr(shutil, "which", lambda _: "nvcc")
    monkeypatch.setattr(kernel_registers, "version", lambda: "release 13.0")
    assert main(["--architectures", "80", "90"]) == 0
    printed = capsys.readouterr().out
    for action, cells in (("pack", "80 to 87 | 90 to 97"), ("unpack", "88 to 95 | 98 to 105")):
        for dtype in ("float32", "float16", "bfloat16"):
            assert printed.count(f"| {action} {dtype} | {cells} |") == 2  # in memory order, by column
    assert "| masks | 80 to 87 | 90 to 97 |" in printed
    assert printed.count("| variance float16 | 80 | 90 |") == 1  # in memory order
    assert printed.count("| variance float16 | 81 | 91 |") == 1  # by column
    assert printed.count("none | none |") == sum(map(len, TABLES.values()))
