"""What a step kept for backward: the memory report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .gradient_error import GradientError
from .handles import SavedTensorRow


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One saved tensor of the last step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: str
    """quantised, mask, binary, narrow or exact"""
    bits: float
    """payload bits for an element"""
    bytes: int
    """bytes retained, metadata included; 0 for an alias of memory that another row counts"""
    sensitivity: float | None
    """c_l: variance it adds to the gradient is about c_l / (2^bits - 1)^2 (GACT, section 4); None if not measured"""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Activation bytes of one step on this rank; parameters, gradients and optimizer state are not part of it."""

    exact_bytes: int
    """what the untouched job would keep from forward to backward"""
    retained_bytes: int
    """what was kept instead: payloads, metadata, masks, statistics and all that is stored exactly"""
    rows: tuple[ReportRow, ...]
    gradient_error: GradientError | None = None
    """policy acgc: what was promised of the gradient and what the last adaptation measured"""

    @property
    def ratio(self) -> float:
        """exact_bytes / retained_bytes; 1.0 when nothing was kept."""
        return self.exact_bytes / self.retained_bytes if self.retained_bytes else 1.0

    def __str__(self) -> str:
        columns = f"{'type':>9s} {'codec':>9s} {'bits':>5s} {'KiB':>9s} {'sensitivity':>11s}"
        head = f"{'saved tensor':58s} {'shape':>22s} {columns}"
        lines = [head, *(_line(row) for row in self.rows)]
        lines.append(
            f"activations: {self.exact_bytes / 2**20:.2f} MiB exact, {self.retained_bytes / 2**20:.2f} MiB retained, "
            f"ratio {self.ratio:.2f}"
        )
        if self.gradient_error is not None:
            lines.append(
                f"gradient's second moment: +{self.gradient_error.measured:.3g} measured, "
                f"+{self.gradient_error.predicted:.3g} predicted, +{self.gradient_error.tolerated:g} tolerated"
            )
        return "\n".join(lines)


def build_report(
    rows: Sequence[SavedTensorRow],
    exact_bytes: int,
    sensitivity: Mapping[str, float],
    gradient_error: GradientError | None,
) -> MemoryReport:
    """The report on a step from what its engine noted and what was measured last."""
    full = tuple(
        ReportRow(row.name, row.shape, row.dtype, row.codec, row.bits, row.bytes, sensitivity.get(row.name))
        for row in rows
    )
    return MemoryReport(exact_bytes, sum(row.bytes for row in rows), full, gradient_error)


def _line(row: ReportRow) -> str:
    name = row.name if len(row.name) <= 58 else "..." + row.name[-55:]
    shape = "x".join(map(str, row.shape)) or "scalar"
    sensitivity = "" if row.sensitivity is None else f"{row.sensitivity:.3e}"
    dtype = str(row.dtype).removeprefix("torch.")
    kib = row.bytes / 1024
    return f"{name:58s} {shape:>22s} {dtype:>9s} {row.codec:>9s} {row.bits:5.3g} {kib:9.1f} {sensitivity:>11s}"
