"""machine.cpp from Python: compiled once, and launches of the kernels of csrc/cuda/ in place of the driver's."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from gact_dist.codec import nvrtc
from gact_dist.codec.driver import Kernel

from .program import Program, programs_of

_SOURCE = Path(__file__).with_name("machine.cpp")
CACHE = Path(__file__).parents[2] / ".cache"
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared")


class MachineError(RuntimeError):
    """A program that a GPU would not run either: an access that is not aligned, lanes that never meet, ..."""


@dataclass
class Findings:
    """What launches have shown."""

    races: int = 0
    reports: list[str] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    """by kernel and definitions"""


def _library_path() -> Path:
    """Where the library is kept: it takes seven seconds to compile and changes with its source only."""
    key = hashlib.sha256(_SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:16]
    return CACHE / f"ptx-machine-{key}.so"


@cache
def _library() -> ctypes.CDLL:
    path = _library_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder, "machine.so")
            subprocess.run(["g++", *_FLAGS, "-o", built, _SOURCE], check=True)
            built.replace(path)
    library = ctypes.CDLL(str(path))
    library.ptx_load.restype = library.ptx_executed.restype = ctypes.c_void_p
    library.ptx_error.restype = ctypes.c_char_p
    library.ptx_races.restype = library.ptx_accesses.restype = ctypes.c_int64
    return library


class Loaded:
    """A program in the machine."""

    def __init__(self, program: Program, without: int | None = None) -> None:
        self.program = program
        self.handle = _library().ptx_load(program.text(without).encode())
        if self.handle is None:
            raise MachineError(f"{program.name}: {_library().ptx_error().decode()}")

    def run(self, blocks: int, threads: int, arguments: tuple[int, ...]) -> tuple[int, str]:
        """Returns the number of races and a report of the first ones."""
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        library = _library()
        handle = ctypes.c_void_p(self.handle)
        if library.ptx_launch(handle, ctypes.c_int64(blocks), ctypes.c_int64(threads), values) != 0:
            raise MachineError(f"{self.program.name}: {library.ptx_error().decode()}")
        report = ctypes.c_char_p()
        races = library.ptx_races(ctypes.byref(report))
        return races, (report.value or b"").decode()

    def executed(self) -> list[int]:
        """How often each instruction was executed, of all threads and launches."""
        counts = ctypes.cast(_library().ptx_executed(ctypes.c_void_p(self.handle)), ctypes.POINTER(ctypes.c_uint64))
        return counts[: len(self.program.instructions)]

    def __del__(self) -> None:
        if self.handle is not None:
            _library().ptx_free(ctypes.c_void_p(self.handle))


class Machine:
    """Stands in for a GPU: ``launch`` takes the place of gact_dist.codec.cuda.launch.

    Args:
        architecture: compute capability times ten, of the PTX.
    """

    def __init__(self, architecture: int = 90) -> None:
        self.architecture = architecture
        self.findings = Findings()
        self.loaded: dict[Kernel, Loaded] = {}

    def load(self, kernel: Kernel) -> Loaded:
        """Compiled by NVRTC and translated at first use."""
        if kernel not in self.loaded:
            target = f"compute_{self.architecture}"
            ptx = nvrtc.compile_kernels(nvrtc.find_nvrtc(), kernel.file, kernel.definitions, target).decode()
            for name, program in programs_of(ptx).items():
                self.loaded[Kernel(kernel.file, name, kernel.definitions)] = Loaded(program)
        return self.loaded[kernel]

    def mutate(self, kernel: Kernel, without: int) -> None:
        """Launch ``kernel`` without one of its instructions from now on."""
        self.loaded[kernel] = Loaded(self.load(kernel).program, without)

    def launch(self, _: torch.device, kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
        """As gact_dist.codec.driver.launch, with tensors in this machine's memory."""
        races, report = self.load(kernel).run(blocks, threads, arguments)
        self.findings.launches[f"{kernel.name} {' '.join(kernel.definitions)}"] += 1
        self.findings.races += races
        if races:
            self.findings.reports.append(f"{kernel.name} {kernel.definitions}: {report}")
