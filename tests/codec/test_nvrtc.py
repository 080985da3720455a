"""The CUDA kernels from source to machine code: compilers take them, and what was compiled is kept."""

import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulation import ROOT

from gact_dist.codec import nvrtc
from gact_dist.codec.driver import KERNELS

CSRC = ROOT / "csrc"


def codec(element: str, group_size: int, bits: int, layout: str) -> tuple[str, tuple[str, ...]]:
    return "codec.cu", (
        f"GACT_ELEMENT={element}", f"GACT_GROUP={group_size}", f"GACT_BITS={bits}", f"GACT_LAYOUT={layout}",
    )  # fmt: skip


# Each architecture with another element type: all modules for all of them take minutes. docs/gpu.md has more.
MODULES = [
    (80, *codec("float", 512, 8, "InMemoryOrder")),
    (90, *codec("Bfloat", 256, 4, "InMemoryOrder")),
    (100, *codec("Half", 64, 7, "InMemoryOrder")),
    (80, *codec("float", 256, 1, "ByColumn")),
    (90, *codec("Bfloat", 128, 4, "ByColumn")),
    (100, *codec("Half", 64, 3, "ByColumn")),
    (80, "variance.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=256")),
    (90, "masks.cu", ()),
    (90, "norms.cu", ("GACT_ELEMENT=Bfloat",)),
    (80, "sampled.cu", ("GACT_ELEMENT=float",)),
]

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def compile_with_nvcc(source: Path, architecture: int, definitions: tuple[str, ...], folder: Path) -> None:
    """To machine code: it is ptxas that reads the instructions in csrc/cuda/warp.h."""
    flags = [*nvrtc.OPTIONS, "-Werror", "all-warnings", "-cubin", f"-arch=sm_{architecture}", "-I", CSRC]
    flags += [f"-D{definition}" for definition in definitions]
    subprocess.run(["nvcc", *flags, "-o", folder / "out.cubin", source], check=True)


@needs_nvcc
@pytest.mark.parametrize(("architecture", "file", "definitions"), MODULES)
def test_nvcc_compiles_the_kernels(architecture: int, file: str, definitions: tuple[str, ...], tmp_path: Path) -> None:
    compile_with_nvcc(CSRC / "cuda" / file, architecture, definitions, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize(("architecture", "file", "definitions"), MODULES)
def test_nvrtc_compiles_the_kernels(
    compiler: nvrtc.Nvrtc,
    architecture: int,
    file: str,
    definitions: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Through the function that compiles on a GPU machine; NVRTC needs no GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binary = nvrtc.compile_kernels(compiler, file, definitions, f"sm_{architecture}")
    assert binary[:4] == b"\x7fELF"
    assert len(binary) >= end_of_tables(binary)
    ptx = nvrtc.compile_kernels(compiler, file, definitions, f"compute_{architecture}")
    assert set(re.findall(rb"\.entry (\w+)", ptx)) == {name.encode() for name in KERNELS[file]}
    assert set(re.findall(rb"\.param (\.\w+)", ptx)) == {b".u64"}  # what Driver.launch passes


def end_of_tables(elf: bytes) -> int:
    """Where the tables of segments and sections of a 64-bit ELF file end, which are last in what NVRTC emits."""
    segments_at, sections_at = struct.unpack_from("<QQ", elf, 32)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", elf, 54)
    return max(segments_at + segment_size * segments, sections_at + section_size * sections)


def test_nvrtc_says_what_it_refuses(compiler: nvrtc.Nvrtc) -> None:
    assert compiler.version() >= (12, 0)
    assert {80, 90, 100} <= set(compiler.supported_architectures())
    with pytest.raises(nvrtc.NvrtcError, match=r"NVRTC_ERROR_COMPILATION\n(.|\n)*name\.cu\(1\): error"):
        compiler.compile("int f( { }", "name.cu", {}, ["-arch=sm_90"], "CUBIN")
    with pytest.raises(nvrtc.NvrtcError, match="NVRTC_ERROR_INVALID_OPTION"):
        compiler.compile("", "name.cu", {}, ["-what"], "PTX")


@pytest.mark.parametrize("version", ["12.8", "13.0"])
def test_without_nvrtc_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(nvrtc, "_library_candidates", lambda major: iter([f"/nowhere/libnvrtc.so.{major}"]))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    wheel = {"12.8": "nvidia-cuda-nvrtc-cu12", "13.0": "nvidia-cuda-nvrtc$"}[version]
    with pytest.raises(nvrtc.KernelsUnavailableError, match=f"not found .*; pip install {wheel}"):
        nvrtc.find_nvrtc.__wrapped__()


def test_nvrtc_is_found_where_pathfinder_finds_it(compiler: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy 14 and CUDA builds of torch bring cuda.pathfinder, which knows conda environments too."""
    path = next(path for path in nvrtc._library_candidates("13") if Path(path).is_file())
    pathfinder = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: SimpleNamespace(abs_path={"nvrtc": path}[name]))
    monkeypatch.setattr(nvrtc, "_library_candidates", lambda major: iter([]))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert nvrtc.find_nvrtc.__wrapped__().version() == compiler.version()


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(nvrtc.KernelsUnavailableError, match="this torch is built for ROCm"):
        nvrtc.find_nvrtc.__wrapped__()


class FakeNvrtc:
    """In place of Nvrtc: it counts, and refuses sources with the given option."""

    def __init__(self, refused_option: str = "") -> None:
        self.refused_option = refused_option
        self.compilations = 0

    def version(self) -> tuple[int, int]:
        return 13, 0

    def supported_architectures(self) -> tuple[int, ...]:
        return 80, 90, 100

    def compile(
        self, source: str, file: str, headers: Mapping[str, bytes], options: Sequence[str], output: str
    ) -> bytes:
        assert "GACT_KERNEL" in source
        assert headers == {path.relative_to(CSRC).as_posix(): path.read_bytes() for path in CSRC.glob("c[ou]*/*.h")}
        self.compilations += 1
        if self.refused_option in options:
            raise nvrtc.NvrtcError(f"nvrtcCompileProgram: NVRTC_ERROR_COMPILATION\n{file}(7): error: no such thing", 6)
        return b"machine code"


def test_what_was_compiled_is_kept_on_disk_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = FakeNvrtc()
    for _ in range(2):
        assert nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_90") == b"machine code"
    assert compiler.compilations == 1
    nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_80")
    nvrtc.compile_kernels(compiler, "codec.cu", (), "sm_80")
    assert compiler.compilations == 3
    for path in (tmp_path / "gact_dist").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_90") == b"machine code"
    assert compiler.compilations == 4


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.compile_kernels(FakeNvrtc(), "masks.cu", (), "sm_90") == b"machine code"


def test_a_user_without_a_home_does_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users that no list has."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    compiler = FakeNvrtc()
    for _ in range(2):
        assert nvrtc.compile_kernels(compiler, "masks.cu", (), "sm_90") == b"machine code"
    assert compiler.compilations == 2


def test_a_full_disk_leaves_no_file_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc.os, "replace", full)
    assert nvrtc.compile_kernels(FakeNvrtc(), "masks.cu", (), "sm_90") == b"machine code"
    assert list((tmp_path / "gact_dist").iterdir()) == []


def test_a_refused_source_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(nvrtc.KernelsUnavailableError, match=r"(?s)masks\.cu for sm_90.*no such thing"):
        nvrtc.compile_kernels(FakeNvrtc("-ftz=false"), "masks.cu", (), "sm_90")
    assert list(tmp_path.iterdir()) == []


def test_what_passes_is_told_from_what_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    short = FakeNvrtc()

    def out_of_memory(*_: object) -> bytes:
        raise nvrtc.NvrtcError("nvrtcCompileProgram: NVRTC_ERROR_OUT_OF_MEMORY", 1)

    monkeypatch.setattr(short, "compile", out_of_memory)
    with pytest.raises(nvrtc.KernelsUnavailableNowError, match="OUT_OF_MEMORY"):
        nvrtc.compile_kernels(short, "masks.cu", (), "sm_90")
    for error, kind in ((OSError(24, "Too many open files"), True), (FileNotFoundError("masks.cu"), False)):
        monkeypatch.setattr(nvrtc, "_headers", lambda _, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(nvrtc.KernelsUnavailableError) as raised:
            nvrtc.compile_kernels(FakeNvrtc(), "masks.cu", (), "sm_90")
        assert isinstance(raised.value, nvrtc.KernelsUnavailableNowError) == kind


def test_the_target_is_the_device_or_ptx_for_a_newer_one() -> None:
    assert nvrtc.target_of((9, 0), (75, 80, 90, 100)) == "sm_90"
    assert nvrtc.target_of((12, 1), (75, 80, 90, 100, 120)) == "compute_120"
    with pytest.raises(nvrtc.KernelsUnavailableError, match=r"8\.0 or higher, this GPU has 7\.5"):
        nvrtc.target_of((7, 5), (75, 80, 90))


def test_the_source_is_part_of_an_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    installed = tmp_path / "gact_dist" / "csrc"
    found = {path.relative_to(installed) for path in installed.rglob("*.*")}
    assert found == {path.relative_to(CSRC) for folder in ("common", "cuda") for path in (CSRC / folder).iterdir()}
    assert {path.suffix for path in found} == {".h", ".cu"}
