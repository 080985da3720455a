"""The CUDA kernels on a CPU: csrc/cuda/*.cu compiled as C++ with emulated_warp.h in place of csrc/cuda/warp.h."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from gact_dist.codec.driver import Kernel

ROOT = Path(__file__).parents[2]
HEADER = Path(__file__).with_name("emulated_warp.h")
ARGUMENTS = 8  # of a kernel at most, as in emulated_warp.h

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")


def emulated_launch(folder: Path) -> Callable[..., None]:
    """What takes the place of cuda.launch; libraries go to ``folder``."""

    @cache
    def library(file: str, definitions: tuple[str, ...]) -> ctypes.CDLL:
        # Compiling takes longer than running: -Og takes a third of -O1 for it.
        path = folder / f"{'-'.join((file, *definitions))}.so"
        flags = ["-std=c++17", "-Og", "-ffp-contract=off", "-fPIC", "-shared", "-I", str(ROOT / "csrc")]
        flags += ["-include", str(HEADER), *(f"-D{name}" for name in definitions)]
        subprocess.run(["g++", *flags, "-o", path, "-x", "c++", ROOT / "csrc/cuda" / file], check=True)
        return ctypes.CDLL(str(path))

    def launch(_: torch.device, kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
        loaded = library(kernel.file, kernel.definitions)
        address = ctypes.cast(getattr(loaded, kernel.name), ctypes.c_void_p)
        padded = (ctypes.c_int64 * ARGUMENTS)(*arguments)
        loaded.launch(address, ctypes.c_int64(blocks), ctypes.c_int64(threads), padded)

    return launch


def run_source(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile a program for the emulation and run it."""
    path = folder / "program.cu"
    path.write_text(source)
    flags = ["-std=c++17", "-I", ROOT / "csrc", "-include", HEADER]
    subprocess.run(["g++", *flags, "-o", folder / "program", "-x", "c++", path], check=True)
    return subprocess.run([folder / "program"], capture_output=True, text=True)
