"""The CUDA kernels from source to function: found in csrc/, compiled by NVRTC, kept on disk, loaded through CuPy.

What was compiled is kept in ``~/.cache/gact_dist``. Not CuPy's RawModule: it adds -ftz=true to all options, and then
subnormal numbers would be stored as zeros. ROCm is not supported: the kernels hold PTX instructions and assume warps of
32 lanes.
"""

import functools
import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._paths import PACKAGE_ROOT

# IEEE arithmetic, one rounding an operation: the bits of the CPU.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
LEAST_CAPABILITY = (8, 0)

_logger = logging.getLogger(__name__)


class KernelsUnavailableError(RuntimeError):
    """The kernels cannot be used on this machine; the message says why and what to do."""


def source_folder() -> Path:
    """The folder of common/ and cuda/, which the sources include from: in an installed package, or in the checkout."""
    installed = Path(PACKAGE_ROOT, "csrc")
    return installed if installed.is_dir() else Path(PACKAGE_ROOT).parent / "csrc"


def _headers(folder: Path) -> dict[str, bytes]:
    """All headers that a kernel may include, by the name it includes them under."""
    found = sorted([*folder.glob("common/*.h"), *folder.glob("cuda/*.h")])
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@functools.cache
def _cupy() -> Any:
    """The module cupy; importing it waits for the first tensor on a GPU."""
    if torch.version.hip is not None:
        raise KernelsUnavailableError("its kernels are for NVIDIA GPUs, this torch is built for ROCm")
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        wheel = f"cupy-cuda{(torch.version.cuda or '13').split('.')[0]}x"
        raise KernelsUnavailableError(f"CuPy is needed for its kernels ({error}); pip install {wheel}") from error


def target_of(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """The NVRTC architecture for a device: its own, or the newest that NVRTC knows, as PTX, for a newer device.
            size of each example's gradient is then remembered and says, when the example comes again, how many bits it
            gets; other policies have no use for it.
    ==
            size of each example's gradient is then remembered, and determines how many bits the example gets when it is
            seen again; other policies ignore it.

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
    """Machine code (target "sm_90") or PTX ("compute_90") of one file in csrc/cuda/.

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
        source = (folder / "cuda" / file).read_text()
        headers = _headers(folder)
    except OSError as error:
        raise KernelsUnavailableError(f"the source of its kernels is missing ({error}); install it again") from error
    options = (*OPTIONS, f"-arch={target}", *(f"-D{definition}" for definition in definitions))
    key = hashlib.sha256(repr((nvrtc.getVersion(), options, source, headers)).encode()).hexdigest()
    cached = _read_cache(key)
    if cached is not None:
        return cached
    names = tuple(name.encode() for name in headers)
    program = nvrtc.createProgram(source, file, tuple(headers.values()), names)
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
    """Keep ``binary``; several ranks may do so at once. If the folder cannot be written, that only costs time."""
    path = _cache_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        os.replace(file.name, path)
    except OSError as error:
        _logger.info("compiled kernels cannot be kept (%s); every process compiles them again", error)


def _load(device_index: int, file: str, definitions: tuple[str, ...]) -> Any:
    """The module on a device, which has to be the current one."""
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
    except RuntimeError as error:  # no NVRTC library, or a driver that refuses the binary
        raise KernelsUnavailableError(f"CuPy cannot load its kernels: {error}") from error
    return module


@functools.cache
def _loaded(device_index: int, file: str, definitions: tuple[str, ...]) -> Any:
    """The module, or the error, which is remembered: a second try would cost seconds and fail again."""
    try:
        return _load(device_index, file, definitions)
    except KernelsUnavailableError as error:
        return error


@functools.cache
def function_of(device_index: int, file: str, definitions: tuple[str, ...], name: str) -> Callable[..., None]:
    """A kernel, compiled and loaded at first use. Raises KernelsUnavailableError where that cannot be done."""
    module = _loaded(device_index, file, definitions)
    if isinstance(module, KernelsUnavailableError):
        raise module
    return module.get_function(name)
