"""Every CUDA kernel from its PTX on a CPU: bytes, races, and whether removed barriers are noticed.

    python -m tools.ptx.check_kernels --architectures 80 90 100 --json benchmarks/results/ptx.json
    python -m tools.ptx.check_kernels --group-sizes 128 --bits 4

NVRTC (the wheel nvidia-cuda-nvrtc) compiles each kernel to PTX, machine.cpp runs it on the cases of cases.py, and what
it writes is held to the reference's bytes. Only bar.sync and bar.warp.sync order accesses to memory, anything else that
two threads do to one byte is a race. Then each barrier is removed in turn: the run must report a race. All of it takes
some minutes of one core for an architecture. The file has a report for each; those of architectures that did not run
stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

from gact_dist.codec import cuda, nvrtc
from gact_dist.codec import format as payload_format

from .cases import (
    DTYPES,
    differences,
    formats,
    mask_differences,
    norm_differences,
    sampled_differences,
    variance_differences,
)
from .machine import Machine, MachineError


@dataclass
class Mutations:
    """Kernels without one of their barriers."""

    barriers: int = 0
    by_race: int = 0
    """in which a race was found"""
    by_bytes: int = 0
    """whose bytes differed, or that did not end"""
    missed: list[str] = field(default_factory=list)
    """in which no race was found"""


@dataclass
class Report:
    """What all runs have shown."""

    nvrtc: str
    architecture: int
    kernels: int = 0
    launches: int = 0
    instructions: int = 0
    executed: int = 0
    """of the instructions, at least once"""
    differences: list[str] = field(default_factory=list)
    races: int = 0
    race_reports: list[str] = field(default_factory=list)
    mutations: Mutations = field(default_factory=Mutations)
    seconds: float = 0.0


def run(machine: Machine, check: Callable[[], Iterator[str]]) -> list[str]:
    """What ``check`` finds when cuda.py launches on ``machine``."""
    with mock.patch.object(cuda, "launch", machine.launch):
        try:
            return list(check())
        except MachineError as error:
            return [str(error)]


def check_barriers(machine: Machine, check: Callable[[], Iterator[str]], mutations: Mutations) -> None:
    """Run ``check`` without each barrier of the kernels that ``machine`` has, which have passed it with all of them."""
    for kernel, loaded in list(machine.loaded.items()):
        for barrier in loaded.program.barriers if any(loaded.executed()) else ():
            machine.mutate(kernel, barrier)
            found = run(machine, check)
            mutations.barriers += 1
            mutations.by_race += machine.findings.races > 0
            mutations.by_bytes += bool(found)
            if machine.findings.races == 0:
                mutations.missed.append(f"{kernel.name} {kernel.definitions}: {loaded.program.sources[barrier]}")
            machine.findings.races = 0
            machine.findings.reports.clear()
        machine.loaded[kernel] = loaded


def add(report: Report, architecture: int, check: Callable[[], Iterator[str]], mutate: bool) -> None:
    """One check, on a machine of its own."""
    machine = Machine(architecture)
    report.differences += run(machine, check)
    report.races += machine.findings.races
    report.race_reports += machine.findings.reports[:3]
    report.launches += machine.findings.launches.total()
    for loaded in machine.loaded.values():
        counts = loaded.executed()
        if any(counts):
            report.kernels += 1
            report.instructions += len(counts)
            report.executed += sum(count > 0 for count in counts)
    machine.findings.races = 0
    machine.findings.reports.clear()
    if mutate:
        check_barriers(machine, check, report.mutations)


def checks(group_sizes: tuple[int, ...], bits: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """(name, check) for every module."""
    for of in formats(group_sizes, bits):
        yield str(of), partial(differences, of)
    for dtype in payload_format.MASK_DTYPES:
        yield f"masks of {dtype}", partial(mask_differences, dtype)
    for dtype in DTYPES:
        yield f"norms of {dtype}", partial(norm_differences, dtype)
        yield f"log-probabilities of {dtype}", partial(sampled_differences, dtype)
        for size in group_sizes:
            yield f"variance of {dtype}, groups of {size}", partial(variance_differences, dtype, size)


def checked(architecture: int, group_sizes: tuple[int, ...], bits: tuple[int, ...], mutate: bool) -> Report:
    """All checks of the PTX for one architecture."""
    report = Report(nvrtc=".".join(map(str, nvrtc.find_nvrtc().version())), architecture=architecture)
    start = time.monotonic()
    for name, check in checks(group_sizes, bits):
        add(report, architecture, check, mutate)
        found = f"{len(report.differences)} differences, {report.races} races in all"
        print(f"sm_{architecture}, {name}: {found}", flush=True)
    report.seconds = round(time.monotonic() - start, 1)
    return report


def keep(report: Report, path: Path) -> None:
    """Write a report to the file, in place of the one that it has of this architecture."""
    held = json.loads(path.read_text()) if path.exists() else []
    others = [row for row in held if row["architecture"] != report.architecture]
    rows = sorted([*others, asdict(report)], key=lambda row: row["architecture"])
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if anything differs, races, or goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--architectures", type=int, nargs="+", default=[90], help="compute capability x 10, of the PTX"
    )
    parser.add_argument("--group-sizes", type=int, nargs="+", default=list(payload_format.GROUP_SIZES))
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--no-mutations", action="store_true", help="run the kernels as they are only")
    parser.add_argument("--json", type=Path, help="write the reports there")
    options = parser.parse_args(arguments)
    failed = False
    for architecture in options.architectures:
        report = checked(architecture, tuple(options.group_sizes), tuple(options.bits), not options.no_mutations)
        print(json.dumps(asdict(report), indent=1), flush=True)
        if options.json:
            keep(report, options.json)
        failed |= bool(report.differences or report.races or report.mutations.missed)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
