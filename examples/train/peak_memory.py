"""Peak memory of a process in each step: what PyTorch allocates on a GPU, the resident set on a CPU."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

MEASURED_STEPS = 6
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt(3)
_RETURN_ALL_BYTES = 256 * 1024
_KEEP_BYTES = 32 * 1024 * 1024  # glibc's own upper bound, which its dynamic threshold reaches in a training loop


class PeakMemory:
    """Peak memory of this process in each of the first steps, in bytes above what it used before them.

    On a CPU this is the high-water mark of the resident set, which a process can reset on Linux; elsewhere it is that
    of the process's lifetime. glibc keeps freed memory for later use, so that the resident set would hardly shrink when
    a run frees more. In the measured steps it returns freed memory to the system at once. That costs page faults, so
    only the first steps are measured. They include the first adaptation of an adaptive level, which may take six.
    """

    def __init__(
        self, device: torch.device, steps: int = MEASURED_STEPS, return_from_bytes: int = _RETURN_ALL_BYTES
    ) -> None:
        """steps: how many are measured; return_from_bytes: freed blocks of this size are returned to the system."""
        self.device, self._steps = device, steps
        self.steps_bytes: list[int] = []
        self.resettable = True
        """False if the process cannot reset its high-water mark; each peak is then that of the lifetime so far."""
        gc.collect()
        if not self._on_gpu:
            _set_allocator(return_from_bytes)
        self._reset()
        self._before_bytes = torch.cuda.memory_allocated(device) if self._on_gpu else _status_bytes("VmRSS")

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def end_step(self) -> None:
        """Record the peak since the last call. Only the first `steps` calls do this."""
        if len(self.steps_bytes) == self._steps:
            return
        peak_bytes = torch.cuda.max_memory_allocated(self.device) if self._on_gpu else _status_bytes("VmHWM")
        self.steps_bytes.append(peak_bytes - self._before_bytes)
        self._reset()
        if len(self.steps_bytes) == self._steps and not self._on_gpu:
            _set_allocator(_KEEP_BYTES)

    def _reset(self) -> None:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.resettable = False


def _set_allocator(threshold_bytes: int) -> None:
    """Make glibc return freed blocks above the threshold to the system. Does nothing with another C library."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * threshold_bytes)


def _status_bytes(key: str) -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    # macOS reports bytes, other systems kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
