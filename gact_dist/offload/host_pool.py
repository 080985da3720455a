"""Pinned host memory for offload: a bounded pool of blocks, and how much the host can spare."""

import logging
import os
from bisect import bisect_left, insort_left
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from .device import Device, Event

_log = logging.getLogger(__name__)
_PAGE_BYTES = 4096
_SLACK = 8  # a block serves a request that leaves at most an eighth of it unused
_IDLE_STEPS = 16  # a block that this many steps in a row have not used is freed
# Names under which launchers say how many processes they started on this host: torchrun, DeepSpeed, Open MPI, Slurm.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


class HostBlock:
    """Pinned memory of one payload, and the last copies queued on it."""

    __slots__ = ("idle_steps", "memory", "nbytes", "read", "written")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.nbytes = memory.numel()
        self.written: Event | None = None
        self.read: Event | None = None
        self.idle_steps = 0

    @property
    def at_rest(self) -> bool:
        """Whether no copy to or from it is in flight."""
        return all(event is None or event.done() for event in (self.written, self.read))


class HostPool:
    """Blocks of pinned memory in whole pages, reused by size, never more than max_bytes in total.

    A block is free for reuse as soon as its payload is dropped, even with copies in flight: the next user queues its
    copies behind `read` and `written`. Only a block at rest can be given back to the host.
    """

    def __init__(self, device: Device, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.allocated_bytes = 0
        self.used_bytes = 0
        self._device = device
        self._blocks: set[HostBlock] = set()
        self._free: list[HostBlock] = []  # the smallest first
        self._warned = False

    def take(self, nbytes: int) -> HostBlock | None:
        """A block of at least nbytes; None, with one warning, if the bound or the host allows no more."""
        block = self._best_fit(nbytes) or self._allocate(-(-nbytes // _PAGE_BYTES) * _PAGE_BYTES)
        if block is not None:
            block.idle_steps = 0
            self.used_bytes += block.nbytes
        return block

    def put_back(self, block: HostBlock) -> None:
        """Take back a block that no payload uses anymore; copies may still be in flight."""
        self.used_bytes -= block.nbytes
        insort_left(self._free, block, key=_size)  # of equal sizes the last used comes first; the others stay idle

    def end_step(self) -> None:
        """Count a step; blocks that no step has used for a while are freed."""
        for block in self._free:
            block.idle_steps += 1
        self.trim(_IDLE_STEPS)

    def trim(self, idle_steps: int = 0, until: int = 0) -> None:
        """Give free blocks back to the host, the largest first, until at most `until` bytes are allocated.

        idle_steps: only blocks that at least this many steps have not used. Blocks with copies in flight stay.
        """
        for block in reversed(self._free.copy()):
            if self.allocated_bytes <= until:
                break
            if block.idle_steps >= idle_steps and block.at_rest:
                self._free.remove(block)
                self._blocks.remove(block)
                self.allocated_bytes -= block.nbytes
                self._device.free_host(block.memory)

    def close(self) -> None:
        """Give all blocks back to the host, those in use as well; no copy may be in flight."""
        self._free.clear()
        while self._blocks:
            block = self._blocks.pop()
            self.allocated_bytes -= block.nbytes
            self._device.free_host(block.memory)

    def _best_fit(self, nbytes: int) -> HostBlock | None:
        at = bisect_left(self._free, nbytes, key=_size)
        if at == len(self._free) or self._free[at].nbytes > nbytes + nbytes // _SLACK + _PAGE_BYTES:
            return None
        return self._free.pop(at)

    def _allocate(self, nbytes: int) -> HostBlock | None:
        if nbytes > self.max_bytes - self.allocated_bytes:
            self.trim(until=self.max_bytes - nbytes)
        if nbytes > self.max_bytes - self.allocated_bytes:
            self._warn(nbytes, "max_host_bytes is reached")
            return None
        try:
            memory = self._device.allocate_host(nbytes)
        except MemoryError as error:
            self.max_bytes = self.allocated_bytes  # asking again would cost milliseconds each time
            self._warn(nbytes, str(error))
            return None
        self.allocated_bytes += nbytes
        block = HostBlock(memory)
        self._blocks.add(block)
        return block

    def _warn(self, nbytes: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "no pinned host memory for a tensor of %d bytes, %d bytes being allocated and %d in use (%s): what "
                "does not fit stays on the device",
                *(nbytes, self.allocated_bytes, self.used_bytes, why),
            )


def _size(block: HostBlock) -> int:
    return block.nbytes


def default_max_bytes(world_size: int) -> int:
    """Half of what the host has free now, shared by the ranks on it."""
    return _available_bytes() // 2 // ranks_on_host(os.environ, world_size)


def ranks_on_host(environment: Mapping[str, str], world_size: int) -> int:
    """Processes of the job on this host, as its launcher says; world_size if it does not say."""
    for name in _LOCAL_RANKS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 0:
            return int(count)
    return world_size


def _available_bytes(root: Path = Path("/")) -> int:
    """Bytes that the host can still give: of the machine, and of the control group that a container is in."""
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]
    groups = root / "sys/fs/cgroup"
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        allowed, used = _read(groups / limit).strip(), _read(groups / usage).strip()
        if allowed.isdecimal() and used.isdecimal():
            found.append(max(0, int(allowed) - int(used)))
    return min(found)


def _read(path: Path) -> str:
    """Text of a file that not every system has; empty if it is missing."""
    try:
        return path.read_text()
    except OSError:
        return ""
