"""The CUDA kernels without a GPU: run on the CPU by an emulated warp, and compiled for the GPUs they are meant for.

The emulation (emulation.py) is called through the same functions of cuda.py that launch on a GPU. What it cannot show:
the instructions in csrc/warp.h and the order of memory accesses.
"""

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
from codec_tensors import random_tensor, raw, special_tensors
from emulation import ROOT, emulated_launch, needs_compiler, run_source
from torch import Tensor

from gact_dist.codec import cuda, ops, reference
from gact_dist.codec import format as payload_format

DTYPES = payload_format.PACK_DTYPES
ALL_BITS = range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1)
SEED = -7_123_456_789_012_345_678


# ---- emulation


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return emulated_launch(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def kernels(emulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_launch", emulated)


# Tiles have 1024 elements (float) or 2048; the last one is short, or there is none.
SIZES = (1, 15, 77, 1024, 2048 + 513, 3 * 2048 + 1)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_emulated_kernels_give_the_bits_of_the_reference(kernels: None, dtype: torch.dtype, group_size: int) -> None:
    for bits in ALL_BITS:
        for numel in SIZES:
            assert_same(random_tensor(numel, dtype), bits, group_size, numel)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_emulated_kernels_agree_on_rare_values(kernels: None, dtype: torch.dtype, group_size: int) -> None:
    for name, x in special_tensors(dtype).items():
        for bits in (1, 2, 5, 7, 8):
            assert_same(x, bits, group_size, name)


def assert_same(x: Tensor, bits: int, group_size: int, what: object) -> None:
    """The bytes that are packed, and from the reference's bytes the bits that are decoded."""
    expected = reference.pack(x, bits, group_size, SEED)
    assert torch.equal(cuda.pack(x, bits, group_size, SEED), expected), (what, bits)
    decoded = cuda.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED)
    wanted = reference.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED)
    assert torch.equal(raw(decoded), raw(wanted)), (what, bits)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulated_kernels_read_and_write_unaligned_memory(kernels: None, dtype: torch.dtype) -> None:
    x = random_tensor(5001, dtype)[1:]
    expected = reference.pack(x, 3, 128, SEED)
    assert torch.equal(cuda.pack(x, 3, 128, SEED), expected)
    out = torch.full((5002,), 7, dtype=dtype)
    cuda.unpack_out(expected, 3, 128, 5000, dtype, SEED, out[1:5001])
    assert torch.equal(raw(out[1:5001]), raw(reference.unpack(expected, 3, 128, 5000, dtype, SEED)))
    assert float(out[0]) == float(out[-1]) == 7  # nothing beside it was written


def test_a_packed_buffer_that_is_not_aligned_is_refused() -> None:
    x = random_tensor(256, torch.float32)
    total_bytes = payload_format.sections(256, 4, 256).total_bytes
    buffer = torch.zeros(total_bytes + 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        cuda.pack_out(x, 4, 256, 0, buffer[1 : 1 + total_bytes])


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_emulated_masks_are_the_bits_of_the_reference(kernels: None, dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 8, 9, 63, 2048, 2049 * 4 + 3):
        x = torch.empty(numel + 1, dtype=dtype)[1:]  # where unaligned, by single elements
        x.copy_(random_tensor(numel, torch.float32) > 0)
        if dtype.is_floating_point and numel > 20:
            x[3], x[4], x[5] = -0.0, torch.nan, torch.finfo(dtype).smallest_normal
        for tensor in (x, x.clone()):
            packed = cuda.pack_mask(tensor)
            assert torch.equal(packed, reference.pack_mask(x))
            assert torch.equal(cuda.unpack_mask(packed, numel, dtype), (x != 0).to(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [64, 512])
def test_emulated_rounding_variance_is_that_of_the_reference(
    kernels: None, dtype: torch.dtype, group_size: int
) -> None:
    for numel in (0, 1, 100, 4099):
        x = random_tensor(numel, dtype)
        x[numel // 2 : numel // 2 + 300] = 0  # plain rounding beside dithering
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        # float32 partial sums of at most 21 additions each: relative error below 21 * 2^-24 = 1.3e-6.
        expected = reference.rounding_variance(x, weight, group_size)
        torch.testing.assert_close(cuda.rounding_variance(x, weight, group_size), expected, rtol=1e-5, atol=0)
    x[-1] = torch.inf
    assert bool(torch.isinf(cuda.rounding_variance(x, weight, group_size)).all())
    weight[-(4099 % group_size or group_size) :] = 0
    assert bool(torch.isfinite(cuda.rounding_variance(x, weight, group_size)).all())


@needs_compiler
@pytest.mark.parametrize(
    ("threads", "body", "message"),
    [
        (
            32,
            "if (gact::thread_of_block() < 9) gact::sync_warp();",
            "lane 9 is at the end while lane 0 is at sync_warp",
        ),
        (
            96,
            "if (gact::warp_of_block() < 2) gact::sync_block();",
            "warp 2 is at the end while warp 0 is at sync_block",
        ),
    ],
)
def test_the_emulation_notices_threads_that_part(tmp_path: Path, threads: int, body: str, message: str) -> None:
    result = run_source(
        f'#include "warp.h"\nGACT_KERNEL({threads}) part() {{ {body} }}\n'
        f"int main() {{ gact::i64 none[7] = {{}}; launch(reinterpret_cast<void*>(part), 1, {threads}, none); }}\n",
        tmp_path,
    )
    assert result.returncode != 0
    assert message in result.stderr


# ---- compilers


# Each architecture with another element type: all modules for all of them take minutes. docs/gpu.md has more.
MODULES = [
    (80, "codec.cu", ("GACT_ELEMENT=float", "GACT_GROUP=512")),
    (90, "codec.cu", ("GACT_ELEMENT=Bfloat", "GACT_GROUP=256")),
    (100, "codec.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=64")),
    (80, "codec_columns.cu", ("GACT_ELEMENT=float", "GACT_GROUP=256")),
    (90, "codec_columns.cu", ("GACT_ELEMENT=Bfloat", "GACT_GROUP=128")),
    (100, "codec_columns.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=64")),
    (80, "variance.cu", ("GACT_ELEMENT=Half", "GACT_GROUP=256")),
    (90, "masks.cu", ()),
]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("architecture", "file", "definitions"), MODULES)
def test_nvcc_compiles_the_kernels(architecture: int, file: str, definitions: tuple[str, ...], tmp_path: Path) -> None:
    """To machine code: it is ptxas that reads the instructions in csrc/warp.h."""
    flags = [*cuda.OPTIONS, "-Werror", "all-warnings", "-cubin", f"-arch=sm_{architecture}"]
    flags += [f"-D{definition}" for definition in definitions]
    subprocess.run(["nvcc", *flags, "-o", tmp_path / "out.cubin", ROOT / "csrc" / file], check=True)


def test_nvrtc_compiles_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through the function that compiles on a GPU machine; NVRTC needs no GPU."""
    nvrtc = pytest.importorskip("cupy", reason="CuPy, which calls NVRTC, is not installed").cuda.nvrtc
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for architecture, file, definitions in MODULES:
        binary = cuda.compile_kernels(nvrtc, file, definitions, f"sm_{architecture}")
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
        assert len(headers) == len(names) == len(cuda.HEADERS)
        return 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        self.compilations += 1
        if self.refused_option in options:
            raise self.NVRTCError("status 6")

    def getCUBIN(self, program: int) -> bytes:
        return b"machine code"

    def getProgramLog(self, program: int) -> str:
        return "codec.cu(7): error: no such thing"

    def destroyProgram(self, program: int) -> None:
        pass


def test_what_was_compiled_is_kept_on_disk_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nvrtc = FakeNvrtc()
    for _ in range(2):
        assert cuda.compile_kernels(nvrtc, "masks.cu", (), "sm_90") == b"machine code"
    assert nvrtc.compilations == 1
    cuda.compile_kernels(nvrtc, "masks.cu", (), "sm_80")
    cuda.compile_kernels(nvrtc, "codec.cu", (), "sm_80")
    assert nvrtc.compilations == 3
    for path in (tmp_path / "gact_dist").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert cuda.compile_kernels(nvrtc, "masks.cu", (), "sm_90") == b"machine code"
    assert nvrtc.compilations == 4


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cuda.compile_kernels(FakeNvrtc(), "masks.cu", (), "sm_90") == b"machine code"


def test_a_refused_source_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(cuda.KernelsUnavailableError, match=r"masks\.cu for sm_90.*no such thing"):
        cuda.compile_kernels(FakeNvrtc("-ftz=false"), "masks.cu", (), "sm_90")
    assert list(tmp_path.iterdir()) == []


def test_the_target_is_the_device_or_ptx_for_a_newer_one() -> None:
    assert cuda.target_of((9, 0), (75, 80, 90, 100)) == "sm_90"
    assert cuda.target_of((12, 1), (75, 80, 90, 100, 120)) == "compute_120"
    with pytest.raises(cuda.KernelsUnavailableError, match=r"8\.0 or higher, this GPU has 7\.5"):
        cuda.target_of((7, 5), (75, 80, 90))


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
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeNvrtc]:
    """A machine with GPUs, as far as cuda.py can see; number 0 is the current one, and their streams are 70, 71, ..."""
    nvrtc, current = FakeNvrtc(), [0]

    @contextmanager
    def device(entered: torch.device) -> Iterator[None]:
        current.append(entered.index)
        yield
        current.pop()

    fake = SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc, Module=FakeModule))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda, "_cupy", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=70 + current[-1]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    FakeModule.loads.clear()
    FakeModule.calls.clear()
    yield nvrtc
    cuda._function.cache_clear()
    cuda._loaded.cache_clear()


def test_a_launch_is_on_the_current_stream_of_its_device_where_a_module_is_loaded_once(nvrtc: FakeNvrtc) -> None:
    kernel = ("masks.cu", (), "pack_mask_1")
    for index in (0, 1, 1, 2, 0):
        cuda._launch(torch.device("cuda", index), kernel, 5, 96, 11, 12)
    called = ("pack_mask_1", (5,), (96,), (11, 12))
    assert FakeModule.calls == [(index, *called, 70 + index) for index in (0, 1, 1, 2, 0)]
    assert FakeModule.loads == [0, 1, 2]
    assert nvrtc.compilations == 1


def test_a_failure_is_remembered(nvrtc: FakeNvrtc) -> None:
    nvrtc.refused_option = "-ftz=false"
    for _ in range(3):
        with pytest.raises(cuda.KernelsUnavailableError, match="no such thing"):
            cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    assert nvrtc.compilations == 1


def test_nothing_is_loaded_during_a_capture(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run one step with the same dtypes before the capture"):
        cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda._launch(torch.device("cuda", 0), ("masks.cu", (), "pack_mask_1"), 5, 96, 11, 12)
    assert FakeModule.loads == [0]


def test_where_kernels_are_unavailable_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise cuda.KernelsUnavailableError("CuPy is needed")

    monkeypatch.setattr(ops, "_warned", set())
    serve = ops._serve_cuda(refuse, reference.pack)
    x = random_tensor(300, torch.float32)
    with pytest.warns(RuntimeWarning, match="compresses cuda tensors with its slow PyTorch reference: CuPy") as seen:
        packed = [serve(x, 4, 64, SEED) for _ in range(3)]
    assert len(seen) == 1
    assert all(torch.equal(buffer, reference.pack(x, 4, 64, SEED)) for buffer in packed)


def test_every_operator_has_a_kernel_for_cuda_tensors() -> None:
    for name in ("pack", "pack_out", "unpack", "unpack_out", "pack_mask", "unpack_mask", "rounding_variance"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gact_dist::{name}", "CUDA")


def test_the_source_is_part_of_an_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packed = {path.name for path in (tmp_path / "gact_dist" / "csrc").iterdir()}
    assert packed == {"codec.cu", "codec_columns.cu", "masks.cu", "variance.cu", *cuda.HEADERS}
