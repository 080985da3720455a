"""The CUDA kernels from source to function: compilers take them, what was compiled is kept, modules are loaded once."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from emulation import ROOT

from gact_dist.codec import cuda, nvrtc

CSRC = ROOT / "csrc"

# Each architecture with another element type: all modules for all of them take minutes. docs/gpu.md has more.
MODULES = [
    (80, "memory_order.cu", ("GACT_ELEMENT=float", "GACT_GROUP=512")),
    (90, "memory_order.cu", ("GACT_ELEMENT=Bfloat", "GACT_GROUP=256")),
    (100, "memory_order.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=64")),
    (80, "columns.cu", ("GACT_ELEMENT=float", "GACT_GROUP=256")),
    (90, "columns.cu", ("GACT_ELEMENT=Bfloat", "GACT_GROUP=128")),
    (100, "columns.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=64")),
    (80, "variance.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=256")),
    (90, "masks.cu", ()),
]

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def compile_with_nvcc(source: Path, architecture: int, definitions: tuple[str, ...], folder: Path) -> None:
    """To machine code: it is ptxas that reads the instructions in csrc/cuda/warp.h."""
    flags = [*nvrtc.OPTIONS, "-Werror", "all-warnings", "-cubin", f"-arch=sm_{architecture}", "-I", CSRC]
    flags += [f"-D{definition}" for definition in definitions]
    subprocess.run(["nvcc", *flags, "-o", folder / "out.cubin", source], check=True)


@needs_nvcc
@pytest.mark.parametrize(("architecture", "file", "definitions"), [MODULES[0], MODULES[4], *MODULES[6:]])
def test_nvcc_compiles_the_narrowest_and_the_widest(
    architecture: int, file: str, definitions: tuple[str, ...], tmp_path: Path
) -> None:
    """Of the kernels that there are for each number of bits those for 1 and 8: each takes half a second."""
    source = (CSRC / "cuda" / file).read_text()
    (tmp_path / file).write_text(re.sub(r"^GACT_(CODEC|COLUMN)_KERNELS\([2-7]\)$", "", source, flags=re.MULTILINE))
    compile_with_nvcc(tmp_path / file, architecture, definitions, tmp_path)


@needs_nvcc
@pytest.mark.large
@pytest.mark.parametrize(("architecture", "file", "definitions"), MODULES)
def test_nvcc_compiles_the_kernels(architecture: int, file: str, definitions: tuple[str, ...], tmp_path: Path) -> None:
    compile_with_nvcc(CSRC / "cuda" / file, architecture, definitions, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "file", "definitions"),
    [MODULES[0], *(pytest.param(*module, marks=pytest.mark.large) for module in MODULES[1:])],
)
def test_nvrtc_compiles_the_kernels(
    architecture: int, file: str, definitions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through the function that compiles on a GPU machine; NVRTC needs no GPU."""
    compiler = pytest.importorskip("cupy", reason="CuPy, which calls NVRTC, is not installed").cuda.nvrtc
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binary = nvrtc.compile_kernels(compiler, file, definitions, f"sm_{architecture}")
    assert binary[:4] == b"\x7fELF"


class FakeNvrtc:
    """In place of cupy.cuda.nvrtc: it counts, and refuses sources with the given option."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self, refused_option: str = "") -> None:
        self.refused_option = refused_option
        self.compilations = 0

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 80, 90, 100

    def getVersion(self) -> tuple[int, int]:
        return 13, 0

    def createProgram(self, source: str, name: str, headers: tuple, names: tuple) -> int:
        assert "GACT_KERNEL" in source
        assert dict(zip(names, headers, strict=True)) == {
            path.relative_to(CSRC).as_posix().encode(): path.read_bytes() for path in CSRC.glob("c[ou]*/*.h")
        }
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compilations += 1
        if self.refused_option in options:
            raise self.NVRTCError("status 6")

    def getCUBIN(self, program: int) -> bytes:
        return b"machine code"

    def getProgramLog(self, program: int) -> str:
        return "memory_order.cu(7): error: no such thing"

    def destroyProgram(self, program: int) -> None:
        pass


def test_what_was_compiled_is_kept_on_disk_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = FakeNvrtc()
    for _ in range(2):
        assert nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_90") == b"machine code"
    assert compiler.compilations == 1
    nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_80")
    nvrtc.compile_kernels(compiler, "memory_order.cu", (), "sm_80")
    assert compiler.compilations == 3
    for path in (tmp_path / "gact_dist").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_90") == b"machine code"
    assert compiler.compilations == 4


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.compile_kernels(FakeNvrtc(), "masks.cu", (), "sm_90") == b"machine code"


def test_a_refused_source_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(nvrtc.KernelsUnavailableError, match=r"masks\.cu for sm_90.*no such thing"):
        nvrtc.compile_kernels(FakeNvrtc("-ftz=false"), "masks.cu", (), "sm_90")
    assert list(tmp_path.iterdir()) == []


def test_the_target_is_the_device_or_ptx_for_a_newer_one() -> None:
    assert nvrtc.target_of((9, 0), (75, 80, 90, 100)) == "sm_90"
    assert nvrtc.target_of((12, 1), (75, 80, 90, 100, 120)) == "compute_120"
    with pytest.raises(nvrtc.KernelsUnavailableError, match=r"8\.0 or higher, this GPU has 7\.5"):
        nvrtc.target_of((7, 5), (75, 80, 90))


class FakeModule:
    """In place of cupy.cuda.Module: it and its functions write down how and under which device they are called."""

    loads: ClassVar[list[int]] = []
    calls: ClassVar[list[tuple]] = []

    def load(self, binary: bytes) -> None:
        self.loads.append(torch.cuda.current_device())

    def get_function(self, name: str) -> Callable[..., None]:
        def function(grid: tuple, block: tuple, arguments: tuple, stream: Any) -> None:
            self.calls.append((torch.cuda.current_device(), name, grid, block, arguments, stream.ptr))

        return function


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeNvrtc]:
    """A machine with GPUs, as far as cuda.py can see; number 0 is the current one, and their streams are 70, 71, ..."""
    compiler, current = FakeNvrtc(), [0]

    @contextmanager
    def device(entered: torch.device) -> Iterator[None]:
        current.append(entered.index)
        yield
        current.pop()

    fake = SimpleNamespace(cuda=SimpleNamespace(nvrtc=compiler, Module=FakeModule))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_cupy", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=70 + current[-1]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    FakeModule.loads.clear()
    FakeModule.calls.clear()
    yield compiler
    nvrtc.function_of.cache_clear()
    nvrtc._loaded.cache_clear()


def test_a_launch_is_on_the_current_stream_of_its_device_where_a_module_is_loaded_once(compiler: FakeNvrtc) -> None:
    kernel = ("masks.cu", (), "pack_mask_1")
    for index in (0, 1, 1, 2, 0):
        cuda._launch(torch.device("cuda", index), kernel, 5, 96, 11, 12)
    called = ("pack_mask_1", (5,), (96,), (11, 12))
    assert FakeModule.calls == [(index, *called, 70 + index) for index in (0, 1, 1, 2, 0)]
    assert FakeModule.loads == [0, 1, 2]
    assert compiler.compilations == 1


def test_a_failure_is_remembered(compiler: FakeNvrtc) -> None:
    compiler.refused_option = "-ftz=false"
    for _ in range(3):
        with pytest.raises(nvrtc.KernelsUnavailableError, match="no such thing"):
            cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    assert compiler.compilations == 1


def test_nothing_is_loaded_during_a_capture(compiler: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run one step with the same dtypes before the capture"):
        cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    assert FakeModule.loads == [0]


def test_the_source_is_part_of_an_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    installed = tmp_path / "gact_dist" / "csrc"
    found = {path.relative_to(installed) for path in installed.rglob("*.*")}
    assert found == {path.relative_to(CSRC) for folder in ("common", "cuda") for path in (CSRC / folder).iterdir()}
    assert {path.suffix for path in found} == {".h", ".cu"}
