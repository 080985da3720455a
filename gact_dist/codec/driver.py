"""The CUDA kernels from machine code to launches: modules and functions of the driver library, through ctypes.

A module holds the kernels of one file for one set of definitions, and each device of a process has its own.
"""

import ctypes
import functools
import threading
import time
from typing import NamedTuple, NoReturn

import torch

from .._torch_internals import current_raw_stream
from .nvrtc import KernelsUnavailableError, KernelsUnavailableNowError, compile_kernels, find_nvrtc, target_of

# The kernels of each file. All are resolved when a module is loaded: under lazy loading, looking one up loads code,
# which a capture does not allow.
KERNELS = {
    "codec.cu": ("pack", "unpack"),
    "norms.cu": ("normalise",),
    "sampled.cu": ("sample", "sampled_words"),
    "variance.cu": ("variance", "variance_columns"),
    "masks.cu": tuple(f"{action}_mask_{itemsize}" for itemsize in (1, 2, 4, 8) for action in ("pack", "unpack")),
}

# Values of CUresult, see cuda.h.
_OUT_OF_MEMORY = 2
# Images and PTX that the driver cannot use; trying again would not help.
_UNUSABLE_IMAGES = {
    200: "CUDA_ERROR_INVALID_IMAGE",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    218: "CUDA_ERROR_INVALID_PTX",
    221: "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
}


class Kernel(NamedTuple):
    """One kernel of a file in csrc/cuda/."""

    file: str
    name: str
    definitions: tuple[str, ...] = ()
    """macros as "NAME=value", which are those of its module"""


MOST_PARAMETERS = 8
"""of a kernel"""


class _Parameters(threading.local):
    """Room for those of a launch, which the driver has read when the call returns; and what a thread need not ask."""

    def __init__(self) -> None:
        self.values = (ctypes.c_int64 * MOST_PARAMETERS)()
        first, size = ctypes.addressof(self.values), ctypes.sizeof(ctypes.c_int64)
        self.pointers = (ctypes.c_void_p * MOST_PARAMETERS)(*range(first, first + size * MOST_PARAMETERS, size))
        self.has_context = False


class DriverError(RuntimeError):
    """The driver refused a call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Driver:
    """The functions of the driver that load modules and start kernels.

    Args:
        library: libcuda as loaded by ctypes; cuda.h declares its functions.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._parameters = library, _Parameters()
        self._launch = library.cuLaunchKernel
        numbers = [ctypes.c_uint] * 7
        self._launch.argtypes = [ctypes.c_void_p, *numbers, *[ctypes.c_void_p] * 3]
        self.launch_address: int = ctypes.cast(self._launch, ctypes.c_void_p).value or 0
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            self.refuse(name, status)

    def refuse(self, name: str, status: int) -> NoReturn:
        """Raise what a CUresult other than 0 says of a function of the driver."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(status, f"the driver refused {name}: {(text.value or b'unknown error').decode()} ({status})")

    def enter_context(self, device_index: int) -> None:
        """Make the context that torch uses on a device current, in a thread that has none yet.

        torch does not call the driver where its current device is the one asked for, as in every new thread.
        """
        if self._parameters.has_context:
            return
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            self._call("cuDeviceGet", ctypes.byref(device), device_index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
        self._parameters.has_context = True

    def load(self, image: bytes, names: tuple[str, ...]) -> dict[str, ctypes.c_void_p]:
        """The functions of these names of machine code or PTX, in the current context."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.create_string_buffer(image))  # adds a zero to PTX
        functions = {name: ctypes.c_void_p() for name in names}
        for name, function in functions.items():
            self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return functions

    def launch(
        self, function: ctypes.c_void_p, blocks: int, threads: int, stream: int, arguments: tuple[int, ...]
    ) -> None:
        """Start a kernel, all of whose parameters have 64 bits, without waiting for it.

        threads: in a block. stream: as a number, as torch has it.
        """
        room = self._parameters
        room.values[: len(arguments)] = [*arguments]
        status = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, room.pointers, None)
        if status != 0:
            self.refuse("cuLaunchKernel", status)


@functools.cache
def find_driver() -> Driver:
    """The driver, which torch has loaded. Raises KernelsUnavailableError where there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise KernelsUnavailableError(f"the driver's library is not found ({error})") from error


def _load(device_index: int, file: str, definitions: tuple[str, ...]) -> dict[str, ctypes.c_void_p]:
    """The functions of a module on a device, which has to be the current one."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernels of {file} {definitions} are not loaded yet and cannot be while a CUDA graph is captured; run "
            "one step with the same dtypes and bits before the capture"
        )
    nvrtc, driver = find_nvrtc(), find_driver()
    capability = torch.cuda.get_device_capability(device_index)
    image = compile_kernels(nvrtc, file, definitions, target_of(capability, nvrtc.supported_architectures()))
    driver.enter_context(device_index)
    try:
        return driver.load(image, KERNELS[file])
    except DriverError as error:
        if error.status in _UNUSABLE_IMAGES:
            raise KernelsUnavailableError(
                f"the driver cannot use what NVRTC {'.'.join(map(str, nvrtc.version()))} compiled: {error}; update the "
                "driver, or install the NVRTC of its CUDA version"
            ) from error
        if error.status != _OUT_OF_MEMORY:
            raise
    torch.cuda.empty_cache()
    try:
        return driver.load(image, KERNELS[file])
    except DriverError as error:
        raise torch.OutOfMemoryError(f"loading the kernels of {file} on GPU {device_index}: {error}") from error


_WAITS = 20
"""times as long as what failed took, until it is tried again: a compilation that runs out of memory takes seconds"""
_waiting: dict[tuple[int, str, tuple[str, ...]], tuple[float, str]] = {}
"""by module: (when it may be tried again, in seconds of time.monotonic(); why it failed)"""


@functools.cache
def _loaded(
    device_index: int, file: str, definitions: tuple[str, ...]
) -> dict[str, ctypes.c_void_p] | KernelsUnavailableError:
    """The functions; or the error where a second try would cost seconds and fail again. Others are not remembered."""
    which = device_index, file, definitions
    until_s, why = _waiting.get(which, (0.0, ""))
    began_s = time.monotonic()
    if began_s < until_s:
        raise KernelsUnavailableNowError(why)
    try:
        return _load(device_index, file, definitions)
    except KernelsUnavailableNowError as error:
        now_s = time.monotonic()
        _waiting[which] = now_s + _WAITS * (now_s - began_s), str(error)
        raise
    except KernelsUnavailableError as error:
        return error


def functions_of(device: torch.device, kernel: Kernel) -> dict[str, ctypes.c_void_p] | None:
    """Those of a kernel's module by name; None where it cannot be loaded here and now, or this machine has no use of
    it."""
    if torch.cuda.current_device() != device.index or torch.cuda.is_current_stream_capturing():
        return None
    try:
        functions = _loaded(device.index, kernel.file, kernel.definitions)
    except KernelsUnavailableNowError:
        return None
    return None if isinstance(functions, KernelsUnavailableError) else functions


def launch(device: torch.device, kernel: Kernel, blocks: int, threads: int, *arguments: int) -> None:
    """Start a kernel on torch's current stream of ``device``, compiled and loaded at first use; does not wait for it.

    threads: in a block.

    Raises:
        KernelsUnavailableError: where this machine cannot run the kernels.
        DriverError: where the driver refuses the launch.
    """
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            _launch_here(device.index, kernel, blocks, threads, arguments)
    else:
        _launch_here(device.index, kernel, blocks, threads, arguments)


def _launch_here(index: int, kernel: Kernel, blocks: int, threads: int, arguments: tuple[int, ...]) -> None:
    functions = _loaded(index, kernel.file, kernel.definitions)
    if isinstance(functions, KernelsUnavailableError):
        raise functions
    driver = find_driver()
    driver.enter_context(index)
    driver.launch(functions[kernel.name], blocks, threads, current_raw_stream(index), arguments)
