"""Where payloads live between forward and backward: on the device, or in pinned host memory.

[Note: streams] place() queues a copy to the host behind what the current stream has computed; fetch() queues the copy
back and lets the current stream, not the host, wait for it. The next payloads in unpack order are asked for at the same
time. Device memory always belongs to the stream that computes: it is allocated there, and it is dropped only when an
event shows that its copy is over (polled), or after that stream was told to wait for it. So the allocator may hand it
on at once, which record_stream would put off until the host has seen the copy end: a host that runs far ahead of the
device would by then have allocated anew.

[Note: ownership] The graph owns a handle, the handle a Payload, and nothing else owns that. What it held is Held, which
copies in flight need as well. When a Payload is dropped, wherever that happens (a backward thread, the garbage
collector), its Held goes into a queue that the next call empties.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from ..config import Offload
from .device import CudaDevice, Device, Event
from .host_pool import HostBlock, HostPool, default_max_bytes
from .schedule import in_flight_bound
from .trace import Copy, Planner, Trace, stalls

_log = logging.getLogger(__name__)


class Place(Enum):
    """Where a payload is."""

    DEVICE = auto()  # it stays there, in the hands of whoever packed it
    LEAVING = auto()  # the copy to the host is queued, the device still has it
    HOST = auto()  # on the host alone
    RETURNING = auto()  # the copy back is queued or over, both have it
    GONE = auto()  # dropped while it was leaving: the device memory stays until that copy is over


@dataclass(slots=True, eq=False)
class Held:
    """The bytes of one saved tensor: where they are, and which host and device memory they hold."""

    name: str
    nbytes: int
    trace: Trace
    stream: Any
    """the one whose memory the buffer is"""
    block: HostBlock | None
    """its host memory; None if it stays on the device"""
    place: Place = Place.DEVICE
    dtype: torch.dtype = torch.uint8
    buffer: Tensor | None = None
    """on the device, while LEAVING, RETURNING or GONE"""
    back: Event | None = None
    """while RETURNING, the end of the copy that the buffer still needs"""


class Payload:
    """A saved tensor's share of a HostOffload. Dropping it frees what it holds."""

    __slots__ = ("_offload", "held")

    def __init__(self, held: Held, offload: "HostOffload") -> None:
        self.held, self._offload = held, offload

    @property
    def leaves(self) -> bool:
        """Whether it is to be sent to the host."""
        return self.held.block is not None

    def send(self, buffer: Tensor) -> None:
        """Send the payload to its block: [nbytes / itemsize], contiguous, not to be written to from now on.

        Raises ValueError for a payload that does not leave, or a buffer that is not as described.
        """
        self._offload.send(self.held, buffer)

    def fetch(self) -> Tensor | None:
        """What was sent, ready on the current stream and not to be written to; None if nothing was."""
        return self._offload.fetch(self.held)

    def __del__(self) -> None:
        self._offload.dropped.append(self.held)


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


class HostOffload:
    """Decides where the payloads of one rank live, and queues their copies to the host and back."""

    def __init__(self, settings: Offload, device: Device, max_host_bytes: int) -> None:
        self.pool = HostPool(device, max_host_bytes)
        self.dropped: deque[Held] = deque()
        self.device_bytes = 0
        """payload bytes on the device now, copies in flight included"""
        self._settings = settings
        self._device = device
        self._lock = threading.RLock()  # a backward runs in threads of its own
        self._departures: deque[tuple[Held, Event]] = deque()
        """what is on its way to the host, each with the end of its copy"""
        self._in_flight_bytes = 0
        self._warned = False
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
        """Whether a payload is on this offload's device and large enough; one on another device is warned of, once."""
        if nbytes < self._settings.min_bytes:
            return False
        elsewhere = device != self._device.device
        if elsewhere and not self._warned:
            self._warned = True
            _log.warning(
                "a payload of %d bytes is on %s and offload takes from %s: what is elsewhere stays where it is; attach "
                "when the model is on its device, or after torch.cuda.set_device()",
                nbytes,
                device,
                self._device.device,
            )
        return not elsewhere

    # -- pack ---------------------------------------------------------------------------------------------------

    def place(self, name: str, nbytes: int) -> Payload:
        """Decide where the payload that the current stream has computed is to live: send() it if it leaves."""
        with self._lock:
            self._collect()
            stream = self._device.current_stream()
            reached = self._device.record(stream)
            block = self.pool.take(nbytes) if self._planner.leaves(name) else None
            held = Held(name, nbytes, self.trace, stream, block)
            self.trace.note_packed(name, nbytes, held, reached)
            self._hold(held)
            return Payload(held, self)

    def send(self, held: Held, buffer: Tensor) -> None:
        """See Payload.send."""
        block, device, trace = held.block, self._device, held.trace
        if block is None or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.nbytes != held.nbytes:
            raise ValueError(
                f"{held.name!r} is {tuple(buffer.shape)} with strides {buffer.stride()}, {buffer.nbytes} bytes; "
                f"expected a payload with a block, 1-D and contiguous, of {held.nbytes} bytes"
            )
        with self._lock:
            reached = device.record(held.stream)
            device.wait(device.out_stream, reached)
            if block.read is not None:  # by the payload that had the block before
                device.wait(device.out_stream, block.read)
            held.dtype = buffer.dtype
            device.copy(_view(block, held), buffer, device.out_stream)
            left = block.written = device.record(device.out_stream)
            held.place, held.buffer = Place.LEAVING, buffer
            trace.note_sent(held.name, Copy(held.nbytes, (reached,), left))
            self._departures.append((held, left))
            self._in_flight_bytes += held.nbytes
            self._bound_departures(trace, held.nbytes)

    def _bound_departures(self, trace: Trace, nbytes: int) -> None:
        """Make the computing stream wait for copies if too many are in flight; then their memory can be dropped."""
        while self._departures and self._in_flight_bytes > in_flight_bound(trace.sent_bytes, nbytes):
            held, left = self._departures.popleft()
            self._wait_for(left, held.stream, trace)
            self._forget(held, left)

    def _forget(self, held: Held, left: Event) -> None:
        """Drop the device memory of a payload that has left, unless backward is about to ask for it."""
        if held.place is Place.LEAVING and held.name in held.trace.window:
            held.place, held.back = Place.RETURNING, left
            held.trace.note_kept(held.name)
            return
        self._release(held)

    # -- unpack -------------------------------------------------------------------------------------------------

    def fetch(self, held: Held) -> Tensor | None:
        """See Payload.fetch."""
        with self._lock:
            self._collect()
            stream, trace = self._device.current_stream(), held.trace
            reached = self._device.record(stream)
            trace.note_used(held.name, reached, self._planner.order)
            if held.block is not None:
                trace.advance(held.name)
            window = trace.look_ahead(self._settings.prefetch)
            found = self._on_device(held, stream, reached)
            if held.place is Place.RETURNING and held.name not in window:
                self._let_go(held)
            self._look_ahead(trace, stream, reached)
            return found

    def _on_device(self, held: Held, stream: Any, reached: Event) -> Tensor | None:
        if held.place is Place.HOST:
            self._ask_for(held, stream, reached)
        if held.back is not None:
            self._wait_for(held.back, stream, held.trace)
        if held.buffer is not None:
            self._device.hand_over(held.buffer, held.stream, stream)
        return held.buffer

    def _ask_for(self, held: Held, stream: Any, reached: Event) -> None:
        """Queue the copy back, to memory of a stream that has reached `reached`. Raises torch.OutOfMemoryError."""
        device, block, trace = self._device, held.block, held.trace
        if block is None or block.written is None:
            raise RuntimeError(f"payload {held.name!r} was never sent to the host and cannot be asked for")
        buffer = device.empty(held.nbytes // held.dtype.itemsize, held.dtype)
        # What the memory held before may be in use until there; what was dropped since then, only by this in_stream.
        device.wait(device.in_stream, reached)
        device.wait(device.in_stream, block.written)
        device.copy(buffer, _view(block, held), device.in_stream)
        held.back = block.read = device.record(device.in_stream)
        held.place, held.buffer, held.stream = Place.RETURNING, buffer, stream
        trace.note_returned(held.name, Copy(held.nbytes, (reached, block.written), block.read))
        self._in_flight_bytes += held.nbytes
        self._hold(held)

    def _let_go(self, held: Held) -> None:
        """Drop the device memory of a payload that is back, or that its stream has been told to wait for."""
        held.trace.note_released(held.name)
        self._release(held)

    def _look_ahead(self, trace: Trace, stream: Any, reached: Event) -> None:
        """Ask for the payloads that come next, within the bounds on their number and bytes."""
        for name in trace.window:
            held = trace.alive.get(name)
            if held is None or held.place is not Place.HOST:
                continue
            if len(trace.resident) >= self._settings.prefetch:
                self._evict(trace)
            bound = in_flight_bound(trace.sent_bytes, held.nbytes)
            if self._in_flight_bytes and self._in_flight_bytes + held.nbytes > bound:
                break
            try:
                self._ask_for(held, stream, reached)
            except torch.OutOfMemoryError:
                break  # there may be room by the time it is needed

    def _evict(self, trace: Trace) -> None:
        """Drop the oldest payload that was brought back and is not needed next: backward took another path."""
        for name in trace.resident:
            held = trace.alive.get(name)
            if name not in trace.window and held is not None and held.back is not None:
                self._wait_for(held.back, held.stream, trace)
                self._let_go(held)
                return

    # -- both ---------------------------------------------------------------------------------------------------

    def _wait_for(self, copied: Event, stream: Any, trace: Trace) -> None:
        """Let a stream, not the host, wait for a copy."""
        if copied.done():
            return
        trace.note_wait(self._device.record(stream), copied)
        self._device.wait(stream, copied)

    def _collect(self) -> None:
        """Release the device memory of copies that are over, and all that dropped payloads held."""
        while self._departures and self._departures[0][1].done():
            self._forget(*self._departures.popleft())
        while self.dropped:
            self._clean_up(self.dropped.popleft())

    def _clean_up(self, held: Held) -> None:
        """Release what a dropped payload held."""
        held.trace.note_dropped(held.name, held)
        if held.block is not None:
            self.pool.put_back(held.block)
        if held.place is Place.LEAVING:
            held.place = Place.GONE
        elif held.place is Place.RETURNING and held.back is not None:
            self._device.wait(held.stream, held.back)
            self._let_go(held)
        elif held.place is Place.DEVICE:
            self.device_bytes -= held.nbytes

    def _end_trace(self) -> None:
        if self.trace.packed:
            self._planner.add(self.trace)
            self.trace = Trace()
            self.pool.end_step()

    def _hold(self, held: Held) -> None:
        self.device_bytes += held.nbytes
        held.trace.note_device_bytes(self.device_bytes)

    def _release(self, held: Held) -> None:
        """Drop the device memory of a payload that a copy has taken part in."""
        held.place, held.buffer, held.back = Place.HOST, None, None
        self._in_flight_bytes -= held.nbytes
        self.device_bytes -= held.nbytes


def _end(device: Device, pool: HostPool, departures: deque[tuple[Held, Event]], dropped: deque[Held]) -> None:
    """Let the last copies finish before the memory that they use is freed."""
    device.synchronize()
    for held in (*dropped, *(held for held, _ in departures)):
        held.buffer = None
        held.trace.alive.clear()  # a cycle, which would keep the memory until the next garbage collection
    pool.close()


def _view(block: HostBlock, held: Held) -> Tensor:
    """The part of a block that holds a payload, as its elements."""
    return block.memory[: held.nbytes].view(held.dtype)


def open_offload(model: nn.Module, settings: Offload, world_size: int) -> HostOffload:
    """This rank's offload, from the model's CUDA device or else the current one. Raises ValueError without one."""
    require_cuda()
    device = CudaDevice(device_of(model) or torch.device("cuda", torch.cuda.current_device()))
    return HostOffload(settings, device, settings.max_host_bytes or default_max_bytes(world_size))


def device_of(model: nn.Module) -> torch.device | None:
    """The first CUDA device that the model has a parameter or buffer on; None without one."""
    held = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    return next((device for device in held if device.type == "cuda" and device.index is not None), None)


def require_cuda() -> None:
    """Raise ValueError where torch finds no device to offload from."""
    if not torch.cuda.is_available():
        raise ValueError(
            "offload is enabled and torch finds no CUDA device, expected one to copy from: use the level without "
            'offload ("L2" for "L3", "L1" for "L4bit-swap", "exact" for "swap", "actnn-L3" for "actnn-L4"), or '
            "offload.enabled false"
        )
