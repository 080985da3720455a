"""Where payloads live between forward and backward: on the device, or in pinned host memory.

[Note: streams] place() queues a copy to the host behind what the current stream has computed; fetch() queues the copy
back and lets the current stream, not the host, wait for it. The next payloads in unpack order are asked for at the same
time. Device memory always belongs to the stream that computes: it is allocated there, and it is dropped only when an
event shows that its copy is over (polled), or after that stream was told to wait for it. So the allocator may hand it
on at once, which record_stream would put off until the host has seen the copy end: a host that runs far ahead of the
device would by then have allocated anew.

[Note: ownership] The graph owns a handle, the handle a Payload, the Payload its host block. When a Payload is dropped,
wherever that happens (a backward thread, the garbage collector), it leaves word in a queue that the next call empties.
"""

import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor

from .config import Offload
from .devices import CudaDevice, Device, Event
from .host_memory import HostBlock, HostPool, default_max_bytes
from .offload_plan import in_flight_bound
from .offload_trace import Copy, Packed, Planner, Trace, stalls


class Place(Enum):
    """Where a payload is."""

    DEVICE = auto()  # it stays there, in the hands of whoever packed it
    LEAVING = auto()  # the copy to the host is queued, the device still has it
    HOST = auto()  # on the host alone
    RETURNING = auto()  # the copy back is queued or over, both have it


class Payload:
    """The bytes of one saved tensor, in the care of a Storage. Dropping it frees what it holds."""

    __slots__ = (
        "__weakref__", "back", "block", "buffer", "dtype", "name", "nbytes", "place", "storage", "stream", "trace",
    )  # fmt: skip

    def __init__(self, name: str, nbytes: int, block: HostBlock | None, stream: Any, storage: "Storage") -> None:
        self.name = name
        self.nbytes = nbytes
        self.dtype = torch.uint8
        self.place = Place.DEVICE
        self.storage, self.trace = storage, storage.trace
        self.block = block
        """in host memory; None if it stays on the device"""
        self.buffer: Tensor | None = None
        """on the device, while LEAVING or RETURNING"""
        self.stream = stream
        """the one whose memory the buffer is"""
        self.back: Event | None = None
        """end of the copy back, while RETURNING"""

    def send(self, buffer: Tensor) -> None:
        """Send the payload to its block: [nbytes / itemsize], contiguous, not to be written to from now on."""
        self.storage.send(self, buffer)

    def fetch(self) -> Tensor | None:
        """What was sent, ready on the current stream and not to be written to; None if nothing was."""
        return self.storage.fetch(self)

    def __del__(self) -> None:
        remains = self.name, self.nbytes, self.place, self.stream, self.buffer, self.block, self.back, self.trace
        self.storage.dropped.append(_Remains(*remains))


@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """What offload did in the last step whose backward is over; its times are the device's."""

    allocated_host_bytes: int = 0
    """pinned memory held now, idle blocks included"""
    sent_bytes: int = 0
    """payload bytes that went to the host"""
    peak_device_bytes: int = 0
    """most payload bytes on the device at one time, copies in flight included"""
    stalls: int = 0
    """times that the device had to wait for a copy"""
    stall_s: float = 0.0
    """seconds that it waited"""


@dataclass(frozen=True, slots=True)
class _Departure:
    """A payload on its way to the host; its device memory stays until `left`."""

    payload: ref
    buffer: Tensor
    stream: Any
    left: Event


@dataclass(frozen=True, slots=True)
class _Remains:
    """What a dropped payload held."""

    name: str
    nbytes: int
    place: Place
    stream: Any
    buffer: Tensor | None
    block: HostBlock | None
    back: Event | None
    trace: Trace


class Storage:
    """Places the payloads of one rank and keeps its copies: streams, host memory, order of return."""

    def __init__(self, settings: Offload, device: Device, max_host_bytes: int) -> None:
        self.pool = HostPool(device, max_host_bytes)
        self.dropped: deque[_Remains] = deque()
        self.device_bytes = 0
        """payload bytes on the device now, copies in flight included"""
        self._settings = settings
        self._device = device
        self._lock = threading.RLock()  # a backward runs in threads of its own
        self._departures: deque[_Departure] = deque()
        self._in_flight_bytes = 0
        self._planner = Planner(settings, max_host_bytes)
        self.trace = Trace()
        """of the step that is being packed"""
        # when the last payload is gone; not when the interpreter ends, for then the driver cleans up
        finalize(self, _end, device, self.pool, self._departures, self.dropped).atexit = False

    def begin(self) -> None:
        """Start a step: what is placed from now on is of a new forward, by a plan from those that are over."""
        with self._lock:
            self._collect()
            self._end_trace()
            self._planner.learn()

    def statistics(self) -> OffloadStatistics:
        """What offload did in the last step whose backward is over. Waits for copies in flight."""
        with self._lock:
            self._device.synchronize()
            self._collect()
            if self.trace.uses and self.trace.is_over:
                self._end_trace()
            self._planner.learn()
            last, allocated = self._planner.last, self.pool.allocated_bytes
            if last is None:
                return OffloadStatistics(allocated)
            return OffloadStatistics(allocated, last.sent_bytes, last.peak_device_bytes, *stalls(last))

    def takes(self, device: torch.device, nbytes: int) -> bool:
        """Whether a payload on that device lies on this storage's, and is worth a copy."""
        return device == self._device.device and nbytes >= self._settings.min_bytes

    # -- pack ---------------------------------------------------------------------------------------------------

    def place(self, name: str, nbytes: int) -> Payload:
        """Decide where the payload that the current stream has computed is to live: send() it if it has a block."""
        with self._lock:
            self._collect()
            stream = self._device.current_stream()
            block = self.pool.take(nbytes) if self._planner.leaves(name) else None
            payload = Payload(name, nbytes, block, stream, self)
            self.trace.packed.append(Packed(name, nbytes, self._device.record(stream)))
            self.trace.alive[name] = payload
            self._hold(payload)
            return payload

    def send(self, payload: Payload, buffer: Tensor) -> None:
        """See Payload.send. Raises ValueError for a payload without a block, or a buffer that is not as promised."""
        block, device, trace = payload.block, self._device, payload.trace
        if block is None or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.nbytes != payload.nbytes:
            raise ValueError(
                f"{payload.name!r} is {tuple(buffer.shape)} with strides {buffer.stride()}, {buffer.nbytes} bytes; "
                f"expected a payload with a block, 1-D and contiguous, of {payload.nbytes} bytes"
            )
        with self._lock:
            reached = device.record(payload.stream)
            device.wait(device.out_stream, reached)
            if block.read is not None:  # by the payload that had the block before
                device.wait(device.out_stream, block.read)
            payload.dtype = buffer.dtype
            device.copy(_view(block, payload), buffer, device.out_stream)
            left = block.written = device.record(device.out_stream)
            payload.place, payload.buffer = Place.LEAVING, buffer
            trace.sent.append(Copy(payload.nbytes, (reached,), left))
            trace.away.append(payload.name)
            trace.sent_bytes += payload.nbytes
            self._departures.append(_Departure(ref(payload), buffer, payload.stream, left))
            self._in_flight_bytes += payload.nbytes
            self._bound_departures(trace, payload.nbytes)

    def _bound_departures(self, trace: Trace, nbytes: int) -> None:
        """Let the computing stream wait where more has left than is on the host; only then it may have the memory."""
        while self._departures and self._in_flight_bytes > in_flight_bound(trace.sent_bytes, nbytes):
            departure = self._departures.popleft()
            self._wait_for(departure.left, departure.stream, trace)
            self._forget(departure)

    def _forget(self, departure: _Departure) -> None:
        """Drop the device memory of a payload that has left, unless backward is about to ask for it."""
        payload = departure.payload()
        if payload is not None and payload.name in payload.trace.window:
            payload.place, payload.back = Place.RETURNING, departure.left
            payload.trace.resident.append(payload.name)
            return
        if payload is not None:
            payload.place, payload.buffer = Place.HOST, None
        self._release(departure.buffer.nbytes)

    # -- unpack -------------------------------------------------------------------------------------------------

    def fetch(self, payload: Payload) -> Tensor | None:
        """See Payload.fetch."""
        with self._lock:
            self._collect()
            stream, trace = self._device.current_stream(), payload.trace
            reached = self._device.record(stream)
            trace.uses.append((payload.name, reached))
            route = trace.start_backward(self._planner.order) if trace.route is None else trace.route
            if payload.block is not None:
                trace.advance(payload.name)
            window = trace.window = route[trace.position : trace.position + self._settings.prefetch]
            found = self._on_device(payload, stream, reached)
            if payload.place is Place.RETURNING and payload.name not in window:
                self._let_go(payload)
            self._look_ahead(trace, stream, reached)
            return found

    def _on_device(self, payload: Payload, stream: Any, reached: Event) -> Tensor | None:
        if payload.place is Place.HOST:
            self._ask_for(payload, stream, reached)
        if payload.back is not None:
            self._wait_for(payload.back, stream, payload.trace)
        if payload.buffer is not None:
            self._device.hand_over(payload.buffer, payload.stream, stream)
        return payload.buffer

    def _ask_for(self, payload: Payload, stream: Any, reached: Event) -> None:
        """Queue the copy back, to memory of a stream that has come to `reached`. Raises torch.OutOfMemoryError."""
        device, block, trace = self._device, payload.block, payload.trace
        if block is None or block.written is None:
            raise RuntimeError(f"payload {payload.name!r} was never sent to the host and cannot be asked for")
        buffer = device.empty(payload.nbytes // payload.dtype.itemsize, payload.dtype)
        # What the memory held before may be in use until there; what was dropped since then, only by this in_stream.
        device.wait(device.in_stream, reached)
        device.wait(device.in_stream, block.written)
        device.copy(buffer, _view(block, payload), device.in_stream)
        payload.back = block.read = device.record(device.in_stream)
        payload.place, payload.buffer, payload.stream = Place.RETURNING, buffer, stream
        trace.returned.append(Copy(payload.nbytes, (reached, block.written), block.read))
        trace.resident.append(payload.name)
        self._in_flight_bytes += payload.nbytes
        self._hold(payload)

    def _let_go(self, payload: Payload) -> None:
        """Drop the device memory of a payload that is back, or that its stream has been told to wait for."""
        payload.trace.resident.remove(payload.name)
        payload.place, payload.buffer, payload.back = Place.HOST, None, None
        self._release(payload.nbytes)

    def _look_ahead(self, trace: Trace, stream: Any, reached: Event) -> None:
        """Ask for the payloads that come next, within the bounds on their number and bytes."""
        for name in trace.window:
            payload = trace.alive.get(name)
            if payload is None or payload.place is not Place.HOST:
                continue
            if len(trace.resident) >= self._settings.prefetch:
                self._evict(trace)
            bound = in_flight_bound(trace.sent_bytes, payload.nbytes)
            if self._in_flight_bytes and self._in_flight_bytes + payload.nbytes > bound:
                break
            try:
                self._ask_for(payload, stream, reached)
            except torch.OutOfMemoryError:
                break  # there may be room by the time it is needed

    def _evict(self, trace: Trace) -> None:
        """Drop what was asked for first of all that does not come next: backward took another way."""
        for name in trace.resident:
            payload = trace.alive.get(name)
            if name not in trace.window and payload is not None and payload.back is not None:
                self._wait_for(payload.back, payload.stream, trace)
                self._let_go(payload)
                return

    # -- both ---------------------------------------------------------------------------------------------------

    def _wait_for(self, copied: Event, stream: Any, trace: Trace) -> None:
        """Let a stream, not the host, wait for a copy."""
        if copied.done():
            return
        trace.waits.append((self._device.record(stream), copied))
        self._device.wait(stream, copied)

    def _collect(self) -> None:
        """Release the device memory of copies that are over, and all that dropped payloads held."""
        while self._departures and self._departures[0].left.done():
            self._forget(self._departures.popleft())
        while self.dropped:
            remains = self.dropped.popleft()
            if remains.place is Place.DEVICE:
                self.device_bytes -= remains.nbytes
            elif remains.place is Place.RETURNING and remains.back is not None:
                self._device.wait(remains.stream, remains.back)
                remains.trace.resident.remove(remains.name)
                self._release(remains.nbytes)
            if remains.block is not None:
                self.pool.put_back(remains.block)

    def _end_trace(self) -> None:
        if self.trace.packed:
            self._planner.add(self.trace)
            self.trace = Trace()
            self.pool.end_step()

    def _hold(self, payload: Payload) -> None:
        self.device_bytes += payload.nbytes
        payload.trace.peak_device_bytes = max(payload.trace.peak_device_bytes, self.device_bytes)

    def _release(self, nbytes: int) -> None:
        self._in_flight_bytes -= nbytes
        self.device_bytes -= nbytes


def _end(device: Device, pool: HostPool, departures: deque[_Departure], dropped: deque[_Remains]) -> None:
    """Let the last copies finish before the memory that they use is freed."""
    device.synchronize()
    departures.clear()
    dropped.clear()
    pool.close()


def _view(block: HostBlock, payload: Payload) -> Tensor:
    """The part of a block that holds a payload, as its elements."""
    return block.memory[: payload.nbytes].view(payload.dtype)


def open_storage(settings: Offload, world_size: int) -> Storage:
    """The storage of this rank on its current CUDA device. Raises ValueError where there is none."""
    require_cuda()
    return Storage(settings, CudaDevice(), settings.max_host_bytes or default_max_bytes(world_size))


def require_cuda() -> None:
    """Raise ValueError where torch finds no device to offload from."""
    if not torch.cuda.is_available():
        raise ValueError(
            "offload is enabled and torch finds no CUDA device, expected one to copy from: use the level without "
            'offload ("L2" for "L3", "L1" for "L4bit-swap", "exact" for "swap", "actnn-L3" for "actnn-L4"), or '
            "offload.enabled false"
        )
