"""The CUDA kernels from source to machine code: found in csrc/, compiled by NVRTC, kept on disk.

NVRTC is called through ctypes: CUDA builds of torch bring the library, and nothing else is needed. What was compiled is
kept in ``~/.cache/gact_dist``.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from .._paths import PACKAGE_ROOT

# IEEE arithmetic, one rounding an operation: the bits of the CPU.
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
LEAST_CAPABILITY = (8, 0)

_logger = logging.getLogger(__name__)
_OUT_OF_MEMORY = 1  # NVRTC_ERROR_OUT_OF_MEMORY


class KernelsUnavailableError(RuntimeError):
    """The kernels cannot be used on this machine; the message says why and what to do."""


class KernelsUnavailableNowError(KernelsUnavailableError):
    """They cannot be used now, and perhaps later: the machine was short of memory or of open files."""


# ---- the library


class NvrtcError(RuntimeError):
    """NVRTC refused; the message has its reason and, for a source, its log."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Nvrtc:
    """The functions of NVRTC that compile one source.

    Args:
        library: as loaded by ctypes; nvrtc.h declares its functions.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise NvrtcError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}", status)

    def version(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def supported_architectures(self) -> tuple[int, ...]:
        """Compute capabilities times ten, in rising order."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def compile(
        self, source: str, file: str, headers: Mapping[str, bytes], options: Sequence[str], output: str
    ) -> bytes:
        """Machine code (``output`` "CUBIN") or "PTX" of ``source``, which messages call ``file``.

        Raises NvrtcError with the log where NVRTC refuses the source.
        """
        program = ctypes.c_void_p()
        contents, names = _strings(headers.values()), _strings(name.encode() for name in headers)
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program), source.encode(), file.encode(), len(headers), contents, names,
        )  # fmt: skip
        try:
            flags = _strings(option.encode() for option in options)
            try:
                self._call("nvrtcCompileProgram", program, len(options), flags)
            except NvrtcError as error:
                raise NvrtcError(f"{error}\n{self._result('ProgramLog', program).decode()}", error.status) from error
            return self._result(output, program)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _result(self, kind: str, program: ctypes.c_void_p) -> bytes:
        """What nvrtcGet<kind> writes, all of it: machine code may end in any byte, texts end in a zero."""
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw if kind == "CUBIN" else buffer.value


def _strings(values: Iterable[bytes]) -> ctypes.Array:
    found = list(values)
    return (ctypes.c_char_p * len(found))(*found)


def _library_candidates(major: str) -> Iterator[str]:
    """File names of NVRTC: NVIDIA's wheels, what is loaded already or the linker finds, the CUDA toolkit.

    The wheels come first: their folder has the library of built-in functions, which nothing else may have loaded.
    """
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    for wheels in spec.submodule_search_locations or () if spec else ():
        for folder in (f"cu{major}", "cuda_nvrtc"):
            yield str(Path(wheels, folder, "lib", name))
    yield name
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            yield str(Path(toolkit, "lib64", name))


def _open(path: str) -> ctypes.CDLL:
    """NVRTC, after the library of its built-in functions, which it opens by name alone."""
    if os.sep in path:
        for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)


def _found_by_pathfinder() -> str:
    """NVRTC as cuda.pathfinder finds it, in conda environments too; CuPy 14 and CUDA builds of torch bring that."""
    return importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path


@functools.cache
def find_nvrtc() -> Nvrtc:
    """NVRTC of the CUDA version that torch was built for. Raises KernelsUnavailableError where there is none."""
    if torch.version.hip is not None:
        raise KernelsUnavailableError("its kernels are for NVIDIA GPUs, this torch is built for ROCm")
    major = (torch.version.cuda or "13").split(".")[0]
    for candidate in _library_candidates(major):
        try:
            return Nvrtc(_open(candidate))
        except OSError:
            continue
    try:
        return Nvrtc(_open(_found_by_pathfinder()))
    except (ImportError, RuntimeError, OSError) as error:
        wheel = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
        raise KernelsUnavailableError(
            f"NVRTC, which compiles its kernels, is not found (libnvrtc.so.{major}); pip install {wheel}"
        ) from error


# ---- the kernels


def source_folder() -> Path:
    """The folder of common/ and cuda/, which the sources include from: in an installed package, or in the checkout."""
    installed = Path(PACKAGE_ROOT, "csrc")
    return installed if installed.is_dir() else Path(PACKAGE_ROOT).parent / "csrc"


def _headers(folder: Path) -> dict[str, bytes]:
    """All headers that a kernel may include, by the name it includes them under."""
    found = sorted([*folder.glob("common/*.h"), *folder.glob("cuda/*.h")])
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def target_of(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """The NVRTC architecture for a device: its own, or the newest that NVRTC knows, as PTX, for a newer device.

    Raises KernelsUnavailableError for a device that is too old.
    """
    if capability < LEAST_CAPABILITY:
        raise KernelsUnavailableError(
            f"its kernels need compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or higher, this GPU has "
            f"{capability[0]}.{capability[1]}"
        )
    number = 10 * capability[0] + capability[1]
    return f"sm_{number}" if number in supported else f"compute_{max(n for n in supported if n <= number)}"


def compile_kernels(nvrtc: Nvrtc, file: str, definitions: tuple[str, ...], target: str) -> bytes:
    """Machine code (target "sm_90") or PTX ("compute_90") of one file in csrc/cuda/.

    Args:
        nvrtc: as from find_nvrtc.
        file: name of a .cu file.
        definitions: macros as "NAME=value".
        target: as from target_of.

    Raises:
        KernelsUnavailableError: with NVRTC's log, when it refuses the source.
        KernelsUnavailableNowError: where it is out of memory, or the source is there and cannot be read.
    """
    folder = source_folder()
    try:
        source = (folder / "cuda" / file).read_text()
        headers = _headers(folder)
    except FileNotFoundError as error:
        raise KernelsUnavailableError(f"the source of its kernels is missing ({error}); install it again") from error
    except OSError as error:
        raise KernelsUnavailableNowError(f"the source of its kernels cannot be read ({error})") from error
    options = (*OPTIONS, f"-arch={target}", *(f"-D{definition}" for definition in definitions))
    key = hashlib.sha256(repr((nvrtc.version(), options, source, headers)).encode()).hexdigest()
    cached = _read_cache(key)
    if cached is not None:
        return cached
    try:
        binary = nvrtc.compile(source, file, headers, options, "CUBIN" if target.startswith("sm_") else "PTX")
    except NvrtcError as error:
        kind = KernelsUnavailableNowError if error.status == _OUT_OF_MEMORY else KernelsUnavailableError
        raise kind(f"NVRTC does not compile {file} for {target}: {error}") from error
    _write_cache(key, binary)
    return binary


# ---- what was compiled, on disk


def _cache_file(key: str) -> Path:
    """Raises OSError for a user without a home, as containers have."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error
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
    try:
        path = _cache_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, hashlib.sha256(binary).digest() + binary)
    except OSError as error:
        _logger.info("compiled kernels cannot be kept (%s); every process compiles them again", error)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that others see whole or not at all; a full disk leaves nothing behind."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
