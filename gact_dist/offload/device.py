"""What offload asks of a device: streams, events, asynchronous copies and pinned host memory.

The interface is small so that tests can put a simulated device behind it (tests/support/simulated_device.py);
tests/gpu/test_offload_cuda.py runs CudaDevice.
"""

import mmap
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's queue, with the time at which the stream passed it."""

    def done(self) -> bool:
        """Whether the stream has passed it, as far as the host can see without waiting."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds that the device took from an earlier event of the same class to this one; both must be done."""


class Device(ABC):
    """One accelerator with a stream for copies to the host, one for copies back and one to pack on.

    No method but free_host and synchronize waits for the device. What a stream is depends on the implementation;
    streams and events of one device are never passed to another.
    """

    device: torch.device
    """of the tensors that it works on"""
    out_stream: Any
    """copies to the host, in the order in which they are queued"""
    in_stream: Any
    """copies to the device, in the order in which they are queued"""
    pack_stream: Any
    """kernels that pack, beside the stream that computes; see pack_stream.py"""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which the stream is the current one."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether what is queued on the current stream goes into a graph that is replayed."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream that computes where this is called. Ask each time: the caller may change it."""

    @abstractmethod
    def record(self, stream: Any) -> Event:
        """An event after all that is queued on the stream now."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from now on starts after the event; the host goes on at once."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Device memory, 1-D, that the current stream may use at once. Raises torch.OutOfMemoryError.

        Nothing is queued that writes to it: a copy on another stream would not wait for that.
        """

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Queue target[:] = source, 1-D, contiguous, of one dtype and size; both must live until it is done."""

    @abstractmethod
    def hand_over(self, tensor: Tensor, owner: Any, user: Any) -> None:
        """A tensor that was allocated on the stream `owner` is from now on used, and freed, on the stream `user`."""

    @abstractmethod
    def allocate_host(self, nbytes: int) -> Tensor:
        """Pinned host memory, uint8 [nbytes]. Raises MemoryError that says why there is none."""

    @abstractmethod
    def free_host(self, memory: Tensor) -> None:
        """Free what allocate_host returned; no copy that uses it may be in flight."""

    @abstractmethod
    def synchronize(self) -> None:
        """Let the host wait until all streams are empty."""


class CudaEvent:
    """torch.cuda.Event with timing, in seconds."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def done(self) -> bool:
        return self._event.query()

    def seconds_since(self, earlier: "CudaEvent") -> float:
        return earlier._event.elapsed_time(self._event) / 1e3

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class CudaDevice(Device):
    """A CUDA device.

    [Note: pinned memory] Host memory is an anonymous mapping that cudaHostRegister page-locks. torch's own pinned
    memory comes in powers of two (a payload of 33 MiB takes 64), and its pool never frees any; CuPy's would be one
    more dependency. A mapping starts on a page of its own, so that no page is registered twice. Registering takes
    milliseconds and may stall the device, which is why there is a pool. A forked process (a data loader's worker) does
    not inherit the mapping: copy-on-write could separate the pages that the device writes from those read here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out_stream = torch.cuda.Stream(self.device)
        self.in_stream = torch.cuda.Stream(self.device)
        self.pack_stream = torch.cuda.Stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: torch.cuda.Stream) -> CudaEvent:
        return CudaEvent(stream)

    def wait(self, stream: torch.cuda.Stream, event: CudaEvent) -> None:
        event.hold_back(stream)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        # torch.empty() would fill it, by a kernel on the current stream, where deterministic algorithms are asked for.
        storage = torch.UntypedStorage(numel * dtype.itemsize, device=self.device)
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def hand_over(self, tensor: Tensor, owner: torch.cuda.Stream, user: torch.cuda.Stream) -> None:
        if owner != user:
            tensor.record_stream(user)

    def allocate_host(self, nbytes: int) -> Tensor:
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"the host has no {nbytes} bytes: {error}") from error
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.cuda.device(self.device):
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if status != 0:
            # the runtime still holds the error, and the next launch would be blamed for it
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
            raise MemoryError(f"cudaHostRegister of {nbytes} bytes failed with CUDA error {status}")
        return memory

    def free_host(self, memory: Tensor) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
