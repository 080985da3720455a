"""The operators on NVIDIA GPUs: the kernels of csrc/*.cu, compiled by NVRTC at first use and launched through CuPy.

The results are the bits of ops_reference.py. Kernels run on torch's current stream of the tensor's device, results come
from torch's allocator, and nothing waits for the device. What was compiled is kept in ``~/.cache/gact_dist``.

Not CuPy's RawModule: it adds -ftz=true to all options, and then subnormal numbers would be stored as zeros. ROCm is not
served: the kernels hold PTX instructions and take a warp to have 32 lanes.
"""

import functools
import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._paths import PACKAGE_ROOT
from . import format as payload_format

ELEMENTS = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "Bfloat"}
# IEEE arithmetic, one rounding an operation: the bits of the CPU.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
HEADERS = ("numbers.h", "codec.h", "warp.h", "tile.h", "group.h", "plain.h", "column_tile.h")
LEAST_CAPABILITY = (8, 0)

# As in csrc/tile.h.
BLOCK_WARPS = 4
BLOCK_THREADS = 32 * BLOCK_WARPS
_TILE_BYTES = 4096
_VECTOR_BYTES = 16
# As in csrc/column_tile.h.
_SLICE_ROWS = 64
# Blocks of the variance kernel: enough to fill any GPU, few enough that their sums are quickly added.
_VARIANCE_BLOCKS = 1024

# Bits that make an element of a mask non-zero, and the element 1, by the bytes of its dtype.
_MASK_PATTERNS = {
    torch.bool: (0xFF, 1),
    torch.uint8: (0xFF, 1),
    torch.float16: (0x7FFF, 0x3C00),
    torch.bfloat16: (0x7FFF, 0x3F80),
    torch.float32: (0x7FFFFFFF, 0x3F800000),
    torch.float64: (0x7FFFFFFFFFFFFFFF, 0x3FF0000000000000),
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stream:
    """A stream of torch for CuPy, which reads this attribute; its own classes for that differ between versions."""

    ptr: int


class KernelsUnavailableError(RuntimeError):
    """The kernels cannot be used on this machine; the text says why and what to do."""


# ---- from source to function


def source_folder() -> Path:
    """Where the .cu files lie: beside this file when installed, in the checkout otherwise."""
    installed = Path(PACKAGE_ROOT, "csrc")
    return installed if installed.is_dir() else Path(PACKAGE_ROOT).parent / "csrc"


@functools.cache
def _cupy() -> Any:
    """The module cupy, which is imported at the first tensor on a GPU only."""
    if torch.version.hip is not None:
        raise KernelsUnavailableError("its kernels are for NVIDIA GPUs, this torch is built for ROCm")
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        wheel = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}x"
        raise KernelsUnavailableError(f"CuPy is needed for its kernels ({error}); pip install {wheel}") from error


def target_of(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """The NVRTC architecture for a device: its own, or PTX of the newest that NVRTC knows for a device that is newer.

    Raises KernelsUnavailableError for a device that is too old.
    """
    if capability < LEAST_CAPABILITY:
        raise KernelsUnavailableError(
            f"its kernels need compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or higher, this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    number = 10 * capability[0] + capability[1]
    return f"sm_{number}" if number in supported else f"compute_{max(n for n in supported if n <= number)}"


def compile_kernels(nvrtc: Any, file: str, definitions: tuple[str, ...], target: str) -> bytes:
    """Machine code (target "sm_90") or PTX ("compute_90") of one file in csrc/.

    Args:
        nvrtc: the module cupy.cuda.nvrtc.
        file: name of a .cu file.
        definitions: macros as "NAME=value".
        target: as from target_of.

    Raises:
        KernelsUnavailableError: with NVRTC's log, when it refuses the source.
    """
    folder = source_folder()
    try:
        source = (folder / file).read_text()
        headers = tuple((folder / name).read_bytes() for name in HEADERS)
    except OSError as error:
        raise KernelsUnavailableError(f"the source of its kernels is missing ({error}); install it again") from error
    options = (*OPTIONS, f"-arch={target}", *(f"-D{definition}" for definition in definitions))
    key = hashlib.sha256(repr((nvrtc.getVersion(), options, source, headers)).encode()).hexdigest()
    cached = _read_cache(key)
    if cached is not None:
        return cached
    program = nvrtc.createProgram(source, file, headers, tuple(name.encode() for name in HEADERS))
    try:
        nvrtc.compileProgram(program, options)
        binary = nvrtc.getCUBIN(program) if target.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise KernelsUnavailableError(f"NVRTC does not compile {file} for {target} ({error}): {log}") from error
    finally:
        nvrtc.destroyProgram(program)
    _write_cache(key, binary)
    return binary


def _cache_file(key: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "gact_dist" / f"{key}.bin"


def _read_cache(key: str) -> bytes | None:
    try:
        stored = _cache_file(key).read_bytes()
    except OSError:
        return None
    digest, binary = stored[:32], stored[32:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def _write_cache(key: str, binary: bytes) -> None:
    """Keep ``binary``; several ranks may do so at once. A folder that cannot be written costs time only."""
    path = _cache_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        os.replace(file.name, path)
    except OSError as error:
        _logger.info("compiled kernels cannot be kept (%s); every process compiles them again", error)


def _load(device_index: int, file: str, definitions: tuple[str, ...]) -> Any:
    """The module of one device, which has to be the current one."""
    cupy = _cupy()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernels of {file} {definitions} are not loaded yet and cannot be while a CUDA graph is captured; run "
            "one step with the same dtypes before the capture"
        )
    nvrtc = cupy.cuda.nvrtc
    capability = torch.cuda.get_device_capability(device_index)
    try:
        module = cupy.cuda.Module()
        module.load(compile_kernels(nvrtc, file, definitions, target_of(capability, nvrtc.getSupportedArchs())))
    except KernelsUnavailableError:
        raise
    except RuntimeError as error:  # no NVRTC library, or a driver that does not take what it made
        raise KernelsUnavailableError(f"CuPy cannot load its kernels: {error}") from error
    return module


@functools.cache
def _loaded(device_index: int, file: str, definitions: tuple[str, ...]) -> Any:
    """The module, or the error for good: a second try would cost seconds and fail again."""
    try:
        return _load(device_index, file, definitions)
    except KernelsUnavailableError as error:
        return error


@functools.cache
def _function(device_index: int, file: str, definitions: tuple[str, ...], name: str) -> Callable[..., None]:
    module = _loaded(device_index, file, definitions)
    if isinstance(module, KernelsUnavailableError):
        raise module
    return module.get_function(name)


def _launch(
    device: torch.device, kernel: tuple[str, tuple[str, ...], str], blocks: int, threads: int, *arguments: int
) -> None:
    """Start a kernel (file, definitions, name) on torch's current stream of ``device``; it does not wait for it.

    threads: of a block.

    The driver's refusal of a launch is raised as cupy's CUDADriverError.
    """
    with torch.cuda.device(device):
        function = _function(device.index, *kernel)
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        function((blocks,), (threads,), arguments, stream=stream)


def _blocks(warps: int) -> int:
    return (warps + BLOCK_WARPS - 1) // BLOCK_WARPS


# ---- the operators


def _kernel(file: str, name: str, dtype: torch.dtype, group_size: int) -> tuple[str, tuple[str, ...], str]:
    return file, (f"GACT_ELEMENT={ELEMENTS[dtype]}", f"GACT_GROUP={group_size}"), name


def _codec_blocks(numel: int, dtype: torch.dtype, group_size: int) -> int:
    """A warp for every whole tile, and one for every group that is left."""
    tile = _TILE_BYTES // dtype.itemsize
    groups_left = (numel % tile + group_size - 1) // group_size
    return _blocks(numel // tile + groups_left)


def _column_grid(rows: int, columns: int, dtype: torch.dtype, group_size: int) -> tuple[int, int]:
    """A block of threads for every tile of every ``group_size`` rows; blocks, and threads of a block."""
    slices = group_size // _SLICE_ROWS
    width = min(max(1024 // dtype.itemsize // slices, 64), 256)
    return -(-rows // group_size) * -(-columns // width), width * slices


def _launch_codec(
    action: str, elements: Tensor, buffer: Tensor, bits: int, group_size: int, seed: int, columns: int
) -> None:
    """Start "pack" of flat ``elements`` to ``buffer``, or "unpack" the other way round; both have been checked."""
    numel, dtype = elements.numel(), elements.dtype
    if numel == 0:
        return
    if columns > 1 and elements.data_ptr() % 4 != 0:  # words of two 16-bit elements are read and written
        aligned = elements.clone()
        _launch_codec(action, aligned, buffer, bits, group_size, seed, columns)
        if action == "unpack":
            elements.copy_(aligned)
        return
    if buffer.data_ptr() % 4 != 0:
        raise ValueError("the packed buffer does not begin at a multiple of 4 bytes; use a tensor of its own for it")
    ends = elements.data_ptr(), buffer.data_ptr()
    source, target = ends if action == "pack" else ends[::-1]
    where = payload_format.sections(numel, bits, group_size, columns)
    starts = where.scale_start_bytes, where.offset_start_bytes
    if columns == 1:
        kernel = _kernel("codec.cu", f"{action}_{bits}", dtype, group_size)
        grid = _codec_blocks(numel, dtype, group_size), BLOCK_THREADS
        _launch(buffer.device, kernel, *grid, source, numel, seed, target, *starts)
        return
    rows = numel // columns
    kernel = _kernel("codec_columns.cu", f"{action}_columns_{bits}", dtype, group_size)
    grid = _column_grid(rows, columns, dtype, group_size)
    _launch(buffer.device, kernel, *grid, source, rows, columns, seed, target, *starts)


def pack(x: Tensor, bits: int, group_size: int, seed: int, columns: int = 1) -> Tensor:
    """``ops_reference.pack`` for a CUDA tensor."""
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_columns(x.numel(), columns)
    total_bytes = payload_format.sections(x.numel(), bits, group_size, columns).total_bytes
    buffer = x.new_empty(total_bytes, dtype=torch.uint8)
    pack_out(x, bits, group_size, seed, buffer, columns)
    return buffer


def pack_out(x: Tensor, bits: int, group_size: int, seed: int, out: Tensor, columns: int = 1) -> None:
    """``ops_reference.pack_out`` for CUDA tensors."""
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_flat(x, "x")
    payload_format.check_columns(x.numel(), columns)
    payload_format.check_buffer(out, payload_format.sections(x.numel(), bits, group_size, columns).total_bytes)
    _launch_codec("pack", x, out, bits, group_size, seed, columns)


def unpack(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int = 1
) -> Tensor:
    """``ops_reference.unpack`` for a CUDA tensor."""
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    unpack_out(buffer, bits, group_size, numel, dtype, seed, out, columns)
    return out


def unpack_out(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int = 1,
) -> None:
    """``ops_reference.unpack_out`` for CUDA tensors."""
    payload_format.check_format(bits, group_size, dtype)
    payload_format.check_columns(numel, columns)
    payload_format.check_buffer(buffer, payload_format.sections(numel, bits, group_size, columns).total_bytes)
    payload_format.check_out(out, numel, dtype)
    _launch_codec("unpack", out, buffer, bits, group_size, seed, columns)


def _mask_blocks(numel: int, itemsize: int) -> int:
    return (numel * itemsize + _VECTOR_BYTES * BLOCK_THREADS - 1) // (_VECTOR_BYTES * BLOCK_THREADS)


def pack_mask(x: Tensor) -> Tensor:
    """``ops_reference.pack_mask`` for a CUDA tensor."""
    payload_format.check_mask_dtype(x.dtype)
    payload_format.check_flat(x, "x")
    packed = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    if x.numel() > 0:
        kernel = ("masks.cu", (), f"pack_mask_{x.dtype.itemsize}")
        blocks = _mask_blocks(x.numel(), x.dtype.itemsize)
        pattern = _MASK_PATTERNS[x.dtype][0]
        _launch(x.device, kernel, blocks, BLOCK_THREADS, x.data_ptr(), x.numel(), pattern, packed.data_ptr())
    return packed


def unpack_mask(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """``ops_reference.unpack_mask`` for a CUDA tensor."""
    payload_format.check_mask_dtype(dtype)
    payload_format.check_buffer(buffer, (numel + 7) // 8)
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    if numel > 0:
        kernel = ("masks.cu", (), f"unpack_mask_{dtype.itemsize}")
        blocks = _mask_blocks(numel, dtype.itemsize)
        one = _MASK_PATTERNS[dtype][1]
        _launch(out.device, kernel, blocks, BLOCK_THREADS, buffer.data_ptr(), numel, one, out.data_ptr())
    return out


def rounding_variance(x: Tensor, weight: Tensor, group_size: int, columns: int = 1) -> Tensor:
    """``ops_reference.rounding_variance`` for CUDA tensors; the sums are added in an order of their own."""
    payload_format.check_format(payload_format.MIN_BITS, group_size, x.dtype)
    payload_format.check_flat(x, "x")
    payload_format.check_weight(weight, x)
    payload_format.check_columns(x.numel(), columns)
    if x.numel() == 0:
        return x.new_zeros(payload_format.MAX_BITS, dtype=torch.float64)
    groups = payload_format.sections(x.numel(), payload_format.MIN_BITS, group_size, columns).groups
    blocks = min(_VARIANCE_BLOCKS, _blocks(groups) if columns == 1 else -(-groups // BLOCK_THREADS))
    partial = x.new_empty((blocks * BLOCK_WARPS, payload_format.MAX_BITS), dtype=torch.float64)
    name, size = ("variance", (x.numel(),)) if columns == 1 else ("variance_columns", (x.numel() // columns, columns))
    kernel = _kernel("variance.cu", name, x.dtype, group_size)
    _launch(x.device, kernel, blocks, BLOCK_THREADS, x.data_ptr(), weight.data_ptr(), *size, partial.data_ptr())
    return partial.sum(0)
