"""What one share of a measurement leaves to the next, which is made in a later step of the job.

[Note: shares of a measurement] On a batch of one example a measurement takes longer than a step may. So it stops in the
second walk (see [Note: block by block] in walk.py), where a part of the blocks has been visited, and goes on in the
next step. The optimizer changes the parameters in between, and so the graph of the forward is of no use any more: it is
dropped, and in each share the forward runs anew on the same examples, with the same random numbers. What was found out
at the borders of blocks is kept as all tensors there are, in 8 bits: the gradients that the first walk brought, the
tangents that later blocks will read, and the products of tensors that some of their readers have yet to add to. Later
shares take the first walk's gradients as they are, those of parameters some steps older.

A forward that takes another branch in a later share, or in which such tensors have other shapes, cannot use any of
this. The tensors that a block saves may differ, as those of routed tokens do: they are told apart by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..hooks import Replayed
from .autograd_graph import ExamplesRefusedError
from .blocks import BlockForward
from .perturbation import Shown

_FIRST_WALK = 0.3
"""of the time of the second walk: in plain steps it takes 1.3, the second 4.4, and a forward 0.5"""


class ResumeError(ExamplesRefusedError):
    """A share of a measurement cannot follow on the one before: it has to begin anew, on examples of a later step."""


@dataclass(frozen=True)
class WalkedVisit:
    """What the first walk found of one block."""

    gradients: list[Any]
    """boundaries: at its exits"""
    entering: list[Any]
    """boundaries: at its inputs"""
    used: list[int]
    """the numbers of the tensors of saved_between() that lead to its inputs"""


@dataclass(frozen=True)
class OpenTally:
    """What is known of a saved tensor whose products are not complete."""

    tensor: Any
    """its boundary; None if it is not known yet, or saved between blocks"""
    sums: list[Any]
    """boundaries of its products so far, one for each direction"""
    shown: Shown | None
    """as in Tally"""


@dataclass(frozen=True)
class Halfway:
    """Where a walk has stopped. See [Note: shares of a measurement]."""

    stop: int
    """the number of blocks that were visited twice"""
    form: tuple[Any, ...]
    """see form_of()"""
    visits: list[WalkedVisit | None]
    """None for a block that no gradient reaches"""
    used_last: list[int]
    """the numbers of the tensors of saved_between() that lead to the loss"""
    tangents: dict[tuple[int, int], list[Any]]
    """by the number of a block and of its exit, boundaries: one for each direction"""
    tallies: dict[str, OpenTally]
    """by the name of the saved tensor"""

    def check(self, forward: BlockForward) -> None:
        """Raise ResumeError if the walk cannot go on in another forward."""
        if form_of(forward) != self.form:
            raise ResumeError("the model ran other blocks, or tensors of other shapes, than the first time")


def form_of(forward: BlockForward) -> tuple[Any, ...]:
    """What two forwards must have in common, so that what is known at the borders of blocks holds for both."""
    blocks = tuple((tuple(map(id, visit.modules)), tuple(visit.shapes)) for visit in forward.visits)
    return blocks, tuple((item.record.name, item.record.shape) for item in saved_between(forward))


def saved_between(forward: BlockForward) -> list[Replayed]:
    """What was saved between blocks and is of any use: neither indices nor constants."""
    return [item for item in forward.between if item.record.node is not None or item.first in forward.numbers]


def stop_of(forward: BlockForward, alike: bool, done: float, start: int = 0) -> int | None:
    """The number of blocks that the second walk has visited when a share ends; None if there are fewer than two, or
    none is left.

    done: the part of the measurement that is done then; the first walk belongs to the first share. start: the number of
    blocks that the shares before have visited. alike: blocks count as equal, as they must where several ranks stop at
    the same one. Otherwise they count as much as they save, unless it is not known of one: what a checkpoint recomputes
    is not.
    """
    weights = [sum(record.nbytes for record in visit.own) for visit in forward.visits]
    last = sum(item.record.nbytes for item in forward.between)
    if len(weights) < 2 or start >= len(weights):
        return None
    if alike or 0 in weights:
        weights, last = [1] * len(weights), 1
    wanted = ((1.0 + _FIRST_WALK) * done - _FIRST_WALK) * (sum(weights) + last)
    return min(range(start + 1, len(weights) + 1), key=lambda stop: abs(sum(weights[:stop]) - wanted))
