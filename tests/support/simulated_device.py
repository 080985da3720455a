"""A device with a deterministic clock behind gact_dist.offload's Device: copies take bytes / bandwidth on their stream.

CPU tensors stand for device memory. Computing happens at once, at the moment that the computing stream has reached;
run() moves that moment on. The bytes of a copy move when simulated time passes its end, and until then its target holds
rubbish, so a schedule that is wrong gives wrong numbers. What a real device would not forgive raises RaceError: memory
that is freed, read or written while a copy uses it, and copies that do not wait for the stream that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import gact_dist.controller
from gact_dist.config import Offload
from gact_dist.offload.device import Device
from gact_dist.offload.manager import HostOffload

RUBBISH = 0xA5


class RaceError(AssertionError):
    """The schedule under test would have gone wrong on a device."""


@dataclass(eq=False)
class Stream:
    name: str
    time_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Event:
    device: Simulated
    time_s: float

    def done(self) -> bool:
        return self.time_s <= self.device.host_s

    def seconds_since(self, earlier: Event) -> float:
        if not (self.done() and earlier.done()):
            raise RaceError("the time of an event was asked for before it had passed")
        return self.time_s - earlier.time_s


@dataclass(frozen=True, eq=False)
class Span:
    """Bytes of a storage, which it does not keep alive."""

    storage: StorageWeakRef
    first: int
    last: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        first = tensor.data_ptr()
        return cls(StorageWeakRef(tensor.untyped_storage()), first, first + tensor.nbytes)

    def overlaps(self, other: Span) -> bool:
        return self.first < other.last and other.first < self.last

    def bytes(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RaceError("memory was freed while a copy was in flight")
        offset = self.first - storage.data_ptr()
        return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (self.last - self.first,))


@dataclass(frozen=True, eq=False)
class Copy:
    stream: str
    target: Span
    source: Span
    start_s: float
    end_s: float

    @property
    def nbytes(self) -> int:
        return self.source.last - self.source.first


@dataclass(eq=False)
class Simulated(Device):
    """out_bytes_per_s, in_bytes_per_s: bandwidth. lead_s: how far the host runs ahead of the computing stream.
    compute_s: what the computing stream works before each pack and unpack. host_limit: pinned bytes that there are."""

    out_bytes_per_s: float = 1e9
    in_bytes_per_s: float = 1e9
    lead_s: float = 0.0
    compute_s: float = 0.0
    host_limit: int = 2**40
    host_bytes: int = 0
    peak_host_bytes: int = 0
    host_allocations: int = 0
    capturing: bool = False
    copies: list[Copy] = field(default_factory=list)

    device = torch.device("cpu")

    def __post_init__(self) -> None:
        self.current = self.compute = Stream("compute")
        self.out_stream, self.in_stream, self.pack_stream = Stream("out"), Stream("in"), Stream("pack")
        self._host_floor_s = 0.0
        self._pending: list[Copy] = []

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_capturing(self) -> bool:
        return self.capturing

    @property
    def host_s(self) -> float:
        """The moment up to which the host can see that the device is done."""
        return max(self._host_floor_s, self.compute.time_s - self.lead_s)

    def run(self, seconds: float) -> None:
        """Let the computing stream work."""
        self.current.time_s += seconds
        self._move(self.current)

    def current_stream(self) -> Stream:
        self.run(self.compute_s)
        return self.current

    def record(self, stream: Stream) -> Event:
        return Event(self, max(stream.time_s, self.host_s))

    def wait(self, stream: Stream, event: Event) -> None:
        stream.time_s = max(stream.time_s, event.time_s)
        self._move(stream)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(numel, dtype=dtype)
        memory.view(torch.uint8).fill_(RUBBISH)
        return memory

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        assert source.dim() == 1
        assert target.is_contiguous()
        assert source.is_contiguous()
        rate = self.out_bytes_per_s if stream is self.out_stream else self.in_bytes_per_s
        start = max(stream.time_s, self.host_s)
        if start < self.current.time_s:
            raise RaceError(f"a copy {stream.name} does not wait for the stream that computes")
        copy = Copy(stream.name, Span.of(target), Span.of(source), start, start + source.nbytes / rate)
        for other in self._pending:
            written = copy.target.overlaps(other.target) or copy.target.overlaps(other.source)
            if (written or copy.source.overlaps(other.target)) and start < other.end_s:
                raise RaceError(f"a copy {stream.name} uses memory of a copy {other.stream} that is in flight")
        copy.target.bytes().fill_(RUBBISH)
        stream.time_s = copy.end_s
        self._pending.append(copy)
        self.copies.append(copy)

    def hand_over(self, tensor: Tensor, owner: Stream, user: Stream) -> None:
        if any(copy.target.overlaps(Span.of(tensor)) and copy.end_s > user.time_s for copy in self._pending):
            raise RaceError("a tensor is used while it is still being copied")

    def allocate_host(self, nbytes: int) -> Tensor:
        if self.host_bytes + nbytes > self.host_limit:
            raise MemoryError(f"the simulated host has {self.host_limit - self.host_bytes} bytes left")
        self.host_bytes += nbytes
        self.host_allocations += 1
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
        return torch.full((nbytes,), RUBBISH, dtype=torch.uint8)

    def free_host(self, memory: Tensor) -> None:
        span = Span.of(memory)
        if any(span.overlaps(copy.target) or span.overlaps(copy.source) for copy in self._pending):
            raise RaceError("host memory was given back while a copy was in flight")
        self.host_bytes -= memory.nbytes

    def synchronize(self) -> None:
        last = max(stream.time_s for stream in (self.current, self.compute, self.out_stream, self.in_stream))
        self._host_floor_s = last
        self.current.time_s = self.compute.time_s = last
        self._move(self.compute)

    def _move(self, stream: Stream) -> None:
        """Move the bytes of all copies that are over at the moment that a computing stream has reached."""
        if stream in (self.out_stream, self.in_stream):
            return
        over = sorted((copy for copy in self._pending if copy.end_s <= stream.time_s), key=lambda copy: copy.end_s)
        for copy in over:
            copy.target.bytes().copy_(copy.source.bytes())
            self._pending.remove(copy)


def storage_on(device: Simulated, max_host_bytes: int = 2**40, **settings: int) -> HostOffload:
    """A storage on a simulated device."""
    return HostOffload(Offload(enabled=True, **{"min_bytes": 1, **settings}), device, max_host_bytes)


def simulate(monkeypatch, device: Simulated) -> None:
    """Let controllers that are made from now on offload to the host of a simulated device."""
    monkeypatch.setattr(gact_dist.steps.schedule, "open_offload", partial(_open_offload, device))


def _open_offload(device: Simulated, model: nn.Module, settings: Offload, world_size: int) -> HostOffload:
    return HostOffload(settings, device, settings.max_host_bytes or 2**40)
