"""A plan: the bits of each saved tensor by name, and of tensors whose names are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _fields

Bits = int | tuple[int, ...] | None
"""of one tensor in a plan: its width, the widths of equal shares of its examples, or None for exact"""


@dataclass(frozen=True)
class Plan:
    """The bits at which every rank of a data-parallel group stores its tensors. Never changed, only replaced."""

    bits: Mapping[str, Bits] = field(default_factory=dict)
    """bits of the tensors that were measured, by name"""
    default: int | None = None
    """width of a compressible tensor that has no entry; None: stored exactly"""

    def bits_of(self, name: str) -> Bits:
        """The bits of a compressible tensor."""
        return self.bits.get(name, self.default)

    def updated(self, bits: Mapping[str, Bits]) -> Plan:
        """This plan with the entries of some tensors replaced or added."""
        return Plan({**self.bits, **bits}, self.default)

    def in_one_width(self) -> Plan:
        """This plan for a policy that gives each tensor one width."""
        return Plan({name: one_width(bits) for name, bits in self.bits.items()}, self.default)


def one_width(bits: Bits | Sequence[int]) -> int | None:
    """A tensor's bits where its examples cannot have widths of their own: the average, rounded down."""
    return sum(bits) // len(bits) if isinstance(bits, Sequence) else bits


def bits_from_state(name: str, value: Any) -> Bits:
    """One entry of a plan, read from JSON. Raises StateError for anything that a plan cannot hold."""
    if isinstance(value, (list, tuple)) and value:
        return tuple(_fields.sequence(_width)(name, value))
    return None if value is None else _width(name, value)


def _width(name: str, value: Any) -> int:
    width = _fields.integer(1)(name, value)
    if width > 8:
        raise _fields.StateError(f"{name!r} is {width}, expected 1 to 8 bits")
    return width
