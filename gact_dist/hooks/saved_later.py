"""Tensors that can be made from one that is saved after them.

[Note: saved later] In x * sigmoid(x) the sigmoid saves its result when it runs, and the product saves x after that. So
a tensor without a recipe is remembered for a few saves: if what it needs is saved meanwhile, it has a recipe from the
next forward on. There it is held exactly until that save, as a tensor is of which the reader is about to show, and
packed as ever if it does not come. In the backward its recipe is like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .handles import Stored
from .saved_edges import saved_at

_FEW = 4
"""saves within which a source may come"""


class Unsaved(NamedTuple):
    """In place of a recipe: what it needs is not saved yet."""

    edges: tuple[tuple[Any, int], ...]
    """that were found not to be saved, of which one may come"""
    is_expected: bool
    """whether the forward before has made the tensor"""

    @property
    def is_there(self) -> bool:
        """Whether one of them is saved by now."""
        return any(saved_at(edge) is not None for edge in self.edges)


@dataclass(eq=False)
class _Waiting:
    stored: Stored
    unsaved: Unsaved
    settle: Callable[[bool], Unsaved | None]
    left: int = _FEW


class SavedLater:
    """The tensors of a forward that wait for their sources. See [Note: saved later]."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def add(self, stored: Stored, unsaved: Unsaved, settle: Callable[[bool], Unsaved | None]) -> None:
        """Wait for the source of a tensor. settle(is_over): decides about it when something is saved that it needs, or
        when nothing more is waited for; returns what else it has to wait for."""
        self._waiting.append(_Waiting(stored, unsaved, settle))

    def has(self, stored: Stored) -> bool:
        """Whether a tensor waits."""
        return any(each.stored is stored for each in self._waiting)

    def count(self) -> None:
        """Something is about to be saved."""
        for each in self._waiting:
            each.left -= 1
        self._end([each for each in self._waiting if each.left < 0])

    def look(self) -> None:
        """Something has been saved."""
        for each in [each for each in self._waiting if each.unsaved.is_there]:
            left = each.settle(False)
            if left is None:
                self._waiting.remove(each)
            else:
                each.unsaved = left

    def end(self, stored: Stored | None = None) -> None:
        """A tensor, or all of them, are not to wait any longer."""
        self._end([each for each in self._waiting if stored is None or each.stored is stored])

    def _end(self, ended: list[_Waiting]) -> None:
        for each in ended:
            self._waiting.remove(each)
            each.settle(True)
