"""What a step kept for backward: the memory report."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .hooks import LOG_SOFTMAX, WORKSPACE, ReportRow
from .offload import OffloadStatistics
from .policies import GradientError

_SMALL = 10
"""workspaces and log-softmaxes are named where they are more than one part in so many of what is kept"""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Activation bytes of one step on this rank; parameters, gradients and optimizer state are not part of it."""

    exact_bytes: int
    """what the untouched job would keep from forward to backward"""
    retained_bytes: int
    """what was kept instead: payloads, metadata, masks, statistics and all that is stored exactly"""
    rows: tuple[ReportRow, ...]
    gradient_error: GradientError | None = None
    """policy acgc: the error bound, and what the last adaptation measured of the gradient"""
    offload: OffloadStatistics | None = None
    """copies and stalls of the last step whose backward is over; None without offload"""

    @property
    def host_bytes(self) -> int:
        """of retained_bytes, what went to pinned host memory"""
        return sum(row.host_bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """of retained_bytes, what stayed on the device"""
        return self.retained_bytes - self.host_bytes

    @property
    def opaque_bytes(self) -> int:
        """of retained_bytes, workspaces of operators: bytes of a meaning that only their backward knows"""
        return sum(row.bytes for row in self.rows if f":{WORKSPACE}" in row.name)

    @property
    def log_softmax_bytes(self) -> int:
        """of exact_bytes, the largest log-softmax of a cross entropy: the logits take as much while its forward runs,
        their gradient while its backward runs, whatever is kept of it"""
        sizes = (math.prod(row.shape) * row.dtype.itemsize for row in self.rows if LOG_SOFTMAX in row.name)
        return max(sizes, default=0)

    @property
    def fixed_point_bytes(self) -> int:
        """what retained_bytes would be with AC-GC's other compressor; the same if no tensor is error-bounded"""
        return sum(row.one_width_bytes or row.bytes for row in self.rows)

    @property
    def ratio(self) -> float:
        """exact_bytes / retained_bytes; 1.0 when nothing was kept."""
        return self.exact_bytes / self.retained_bytes if self.retained_bytes else 1.0

    def __str__(self) -> str:
        columns = f"{'type':>9s} {'codec':>9s} {'bits':>5s} {'KiB':>9s} {'host KiB':>9s} {'sensitivity':>11s}"
        head = f"{'saved tensor':58s} {'shape':>22s} {columns}"
        lines = [head, *(_line(row) for row in self.rows)]
        lines.append(
            f"activations: {self.exact_bytes / 2**20:.2f} MiB exact, {self.retained_bytes / 2**20:.2f} MiB retained, "
            f"ratio {self.ratio:.2f}"
        )
        if self.opaque_bytes * _SMALL > self.retained_bytes:
            lines.append(
                f"of these {self.opaque_bytes / 2**20:.2f} MiB are workspaces that operators keep for their backward, "
                "of which no codec knows what they hold"
            )
        if self.log_softmax_bytes * _SMALL > self.retained_bytes:
            lines.append(
                "the cross entropy works with two tensors of "
                f"{self.log_softmax_bytes / 2**20:.2f} MiB at a time: logits and log-softmax, then the gradient of the "
                "logits; a chunked loss needs none of them (docs/memory.md, A large vocabulary)"
            )
        if self.gradient_error is not None:
            lines.append(
                f"gradient's second moment: +{self.gradient_error.measured:.3g} measured, "
                f"+{self.gradient_error.predicted:.3g} predicted, +{self.gradient_error.tolerated:g} tolerated"
            )
        if self.fixed_point_bytes != self.retained_bytes:
            lines.append(f"with compressor fixed-point: {self.fixed_point_bytes / 2**20:.2f} MiB retained")
        if self.offload is not None:
            lines.append(
                f"of these {self.device_bytes / 2**20:.2f} MiB on the device, {self.host_bytes / 2**20:.2f} MiB in "
                f"host memory; in the last full step the device held {self.offload.peak_device_bytes / 2**20:.2f} MiB "
                f"at most and stalled {self.offload.stalls} times, {self.offload.stall_s * 1e3:.2f} ms in all"
            )
        return "\n".join(lines)


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that this process has had so far: allocated on its GPU, resident on a CPU; None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource  # which Windows lacks

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def build_report(
    rows: Sequence[ReportRow],
    exact_bytes: int,
    sensitivity: Mapping[str, float],
    gradient_error: GradientError | None = None,
    offload: OffloadStatistics | None = None,
) -> MemoryReport:
    """The report on a step from what its hooks noted, what was measured last and the copies of offload."""
    full = tuple(replace(row, sensitivity=sensitivity.get(row.name)) for row in rows)
    return MemoryReport(exact_bytes, sum(row.bytes for row in rows), full, gradient_error, offload)


def _line(row: ReportRow) -> str:
    name = row.name if len(row.name) <= 58 else "..." + row.name[-55:]
    shape = "x".join(map(str, row.shape)) or "scalar"
    sensitivity = "" if row.sensitivity is None else f"{row.sensitivity:.3e}"
    dtype = str(row.dtype).removeprefix("torch.")
    sizes = f"{row.bytes / 1024:9.1f} {row.host_bytes / 1024:9.1f}"
    source = f"  from {', '.join(row.made_from)}" if row.made_from else ""
    return f"{name:58s} {shape:>22s} {dtype:>9s} {row.codec:>9s} {row.bits:5.3g} {sizes} {sensitivity:>11s}{source}"
