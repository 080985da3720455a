"""What a profile found, in plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "batch",
    "activations",
    "compressed activations",
    "recomputed activations",
    "sharding",
    "other",
    "temporaries",
)
"""What memory is for. Activations are alive when the forward is over; compressed: what gact_dist made in their place;
recomputed: by a checkpoint, in the backward; sharding: gathered parameters and the buffers of collectives; other: alive
before the step, and none of the job's; temporaries: all else."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a module, an operator or a line has of the memory."""

    name: str
    peak: dict[str, int]
    """bytes at the peak of the step by kind"""
    kept: dict[str, int]
    """bytes by kind when the forward is over, of what the forward made"""

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.values())


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory after some operators of a step."""

    operators: int
    """run since the step began"""
    phase: str
    nbytes: dict[str, int]
    """by kind"""

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that autograd saves, under one level."""

    name: str
    """module path : operator @ line"""
    shape: tuple[int, ...]
    dtype: str
    codec: str
    """quantised, mask, ..., derived, or exact"""
    bits: float
    nbytes: int
    """0 where another tensor's memory holds it"""
    why_exact: str = ""


@dataclass(frozen=True, slots=True)
class LevelProfile:
    """One step under one level."""

    level: str
    """a name in gact_dist.LEVELS, "+derive" behind it with Config.derive; "exact" for the untouched job"""
    peak_bytes: int
    """of live storages in a step after the first"""
    peak_phase: str
    peak_site: str
    """what was running then"""
    first_step_peak_bytes: int
    """of the first step under this level: compression sees every operator for the first time in it, and the job's own
    first step makes the optimizer's state"""
    phase_peaks: dict[str, int]
    """the peak of each phase"""
    peak: dict[str, int]
    """bytes at the peak by kind"""
    without_optimizer_bytes: int
    """the peak of forward and backward, optimizer state not counted: if it were on the host"""
    exact_bytes: int
    """of activations that the untouched job keeps; a level that compresses counts what is saved of the batch as well"""
    retained_bytes: int
    """what this level keeps in their place; the untouched job keeps what it has"""
    modules: tuple[Share, ...]
    operators: tuple[Share, ...]
    lines: tuple[Share, ...]
    timeline: tuple[Moment, ...]
    tensors: tuple[KeptTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of one job."""

    world_size: int
    layout: str | None
    fake: bool
    parameters: int
    """of the whole model"""
    levels: tuple[LevelProfile, ...]
    notes: tuple[str, ...] = field(default=())
    """what the figures leave out"""

    def level(self, name: str) -> LevelProfile:
        """One of the levels. Raises KeyError."""
        for found in self.levels:
            if found.level == name:
                return found
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)
