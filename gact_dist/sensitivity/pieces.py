"""The exact gradient through a block, with only a piece of what the block saves there at a time.

[Note: pieces] A block that holds most of what a model saves, on a batch that has no parts, would take all of the memory
that compression is there to avoid. So it runs once for each of several pieces, last one first, and keeps only what the
nodes of this piece read. The backward of the piece gives the gradients at its border, with which the next one begins.
Nodes are told by the order in which they were made, the same in every run. This is checkpointing without boundaries
that anyone has to name; it costs another forward of the block for each piece beyond the first.

A backward of one piece must not go on into nodes before it, where what they read is not there. Autograd would go there
on its way from one edge of the border to another, so the gradients that leave the piece are taken from the nodes that
give them, and the first node behind the border ends the backward: nodes run in the reverse order of their making. Where
some have not run by then, as on devices with threads of their own, the block is taken as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, suppress
from math import ceil
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch_internals import gradient_at, number_of, saved_handles
from ..hooks import Noted, ReplayError, Stored, StoredAgain, firsts_of, stored_of
from .autograd_graph import added, leading_to
from .blocks import BlockForward, Visit
from .parts import Part
from .sections import LEAST_BYTES

_Place = tuple[int, int]
"""the number of a node in the order in which a block's nodes were made, and of one of its outputs"""

LARGEST = 0.25
"""of what a step saves: the share that one piece is to hold"""


def pieces_of_blocks(forward: BlockForward, fraction: float) -> dict[Visit, list[set[Any]]]:
    """What the pieces of each block read, by what stands for it; of the blocks that are too large to be there at once.

    fraction: of a step's examples that the forward sees. Ranks may come to different decisions: no block whose runs
    they share is divided.
    """
    if forward.runs_collectives:
        return {}
    sizes = {visit: sum(record.nbytes for record in visit.own) for visit in forward.visits}
    outside = sum(item.record.nbytes for item in forward.between if item.view is None)
    saved = (sum(sizes.values()) + outside) / fraction
    counts = {visit: ceil(size / (LARGEST * saved)) for visit, size in sizes.items() if size > LEAST_BYTES}
    pieces = {visit: _pieces_of(visit.outcomes, count) for visit, count in counts.items() if count > 1}
    return {visit: found for visit, found in pieces.items() if len(found) > 1}


def _pieces_of(outcomes: Sequence[Any], count: int) -> list[set[Any]]:
    """Shares of about equal size, in the order of saving. outcomes: of the run that was noted, see Visit."""
    firsts = firsts_of(outcomes)
    sizes = {first: first.nbytes if isinstance(first, Noted) else 0 for first in firsts}  # 0: in another's memory
    total, before = sum(sizes.values()), 0.0
    pieces: list[set[Any]] = [set() for _ in range(count)]
    for first in firsts:
        size = sizes.pop(first, 0)  # what is saved again holds nothing more
        pieces[min(count - 1, int((before + size / 2) * count / total))].add(first)
        before += size
    return [piece for piece in pieces if piece]


class _Kept:
    """Keeps what one piece reads, and nothing of the rest. What a Replay is given to keep tensors."""

    def __init__(self, keep: StoredAgain, piece: set[Any]) -> None:
        self._keep, self._piece = keep, piece
        self._firsts: WeakKeyDictionary[Stored, Any] = WeakKeyDictionary()

    def __call__(self, tensor: Tensor, first: Any, graph: Tensor) -> Any:
        if isinstance(first, Noted) and first not in self._piece:
            return first  # holds no memory, and raises an error if a backward reads it
        stored = self._keep(tensor, first, graph)
        self._firsts[stored] = first
        return stored

    def read_by(self, node: Any) -> Iterator[Any]:
        """What a node reads, by what stands for it."""
        for _, handle in saved_handles(node):
            found = stored_of(handle)
            if isinstance(found, Noted):
                yield found
            elif found in self._firsts:
                yield self._firsts[found]

    def has_all(self, node: Any) -> bool:
        """Whether all that a node reads is there."""
        return not any(isinstance(stored_of(handle), Noted) for _, handle in saved_handles(node))


class Pieces:
    """The gradient through one block. See [Note: pieces]."""

    def __init__(
        self,
        again: Callable[[Any], AbstractContextManager[tuple[Part, Any, Any]]],
        pieces: Sequence[set[Any]],
        keep: StoredAgain,
        retain_graph: bool,
    ) -> None:
        """again: runs the block, as BlockForward.again() does. keep: stores exactly."""
        self._again, self._pieces, self._keep, self._retain_graph = again, pieces, keep, retain_graph
        self._names: list[str] = []
        """of the block's nodes"""
        self._given: dict[_Place, Tensor] = {}
        """gradients with which the next piece begins"""
        self._at_leaves: list[Tensor | None] = []
        self.leaves: Sequence[tuple[str, GradientEdge]] = ()
        """of the last run"""

    def gradients(self, entering: Sequence[Tensor | None]) -> list[Tensor | None]:
        """At the block's inputs, then at its leaves, as Part.gradients() has them. entering: at its heads.

        Raises ReplayError where the block has to be taken as a whole.
        """
        number, bound, also = len(self._pieces), 0, set[Any]()
        while True:
            number -= 1
            kept = _Kept(self._keep, self._pieces[number] | also)
            with self._again(kept) as (part, replay, _):
                replay.forget()
                self._keep.forget()
                order = self._in_order(part)
                bound = bound or self._begin(part, order, entering)
                part.heads.clear()
                start = _start(order[:bound], kept) if number else 0
                if start == 0:
                    self.leaves = part.leaves
                    return self._to_the_end(part, order)
                also = {first for node in order[:start] for first in kept.read_by(node)}.difference(
                    *self._pieces[:number]
                )
                self._down_to(start, part, order, bound)
                bound = start

    def _in_order(self, part: Part) -> list[Any]:
        order = sorted((node for node in part.nodes if not hasattr(node, "variable")), key=number_of)
        names = [node.name() for node in order]
        if self._names and names != self._names:
            raise ReplayError("it made another graph when it ran again")
        self._names = names
        return order

    def _begin(self, part: Part, order: Sequence[Any], entering: Sequence[Tensor | None]) -> int:
        numbers = {node: number for number, node in enumerate(order)}
        for head, gradient in zip(part.heads, entering, strict=True):
            if gradient is not None:
                edge = get_gradient_edge(head)
                self._add((numbers[edge.node], edge.output_nr), gradient)
        self._at_leaves = [None] * len(part.leaves)
        return len(order)

    def _add(self, place: _Place, gradient: Tensor) -> None:
        before = self._given.get(place)
        self._given[place] = gradient if before is None else before + gradient

    def _add_at_leaf(self, number: int, gradient: Tensor) -> None:
        before = self._at_leaves[number]
        self._at_leaves[number] = gradient if before is None else added(before, gradient)

    def _down_to(self, start: int, part: Part, order: Sequence[Any], bound: int) -> None:
        """The backward of a piece: the nodes from one number to another."""
        places = [place for place in self._given if place[0] >= start]
        entering = [self._given.pop(place) for place in places]
        if not places:
            return
        numbers = {node: number for number, node in enumerate(order[:start])}
        leaves = {edge.node: number for number, (_, edge) in enumerate(part.leaves)}
        piece = order[start:bound]
        ends = {edge for node in piece for edge in node.next_functions if edge[0] in numbers or edge[0] in leaves}
        left = _below([order[number] for number, _ in places], leading_to((node for node, _ in ends), piece))

        def take(node: Any) -> Callable[[Sequence[Tensor | None], Any], None]:
            def hook(found: Sequence[Tensor | None], _: Any) -> None:
                left.discard(node)
                for edge, gradient in zip(node.next_functions, found, strict=True):
                    if gradient is None or edge not in ends:
                        continue
                    gradient = gradient_at(edge[0], edge[1], gradient)
                    if edge[0] in leaves:
                        self._add_at_leaf(leaves[edge[0]], gradient)
                    else:
                        self._add((numbers[edge[0]], edge[1]), gradient)

            return hook

        handles = [node.register_hook(take(node)) for node in left]
        handles += [node.register_prehook(_stop) for node in {node for node, _ in ends if node in numbers}]
        edges = [GradientEdge(order[number], output) for number, output in places]
        below = Part(edges, [GradientEdge(*edge) for edge in ends], (), ())
        try:
            with suppress(_BorderReached):
                below.gradients(entering, retain_graph=self._retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        if left:
            raise ReplayError("its backward does not run in one order")

    def _to_the_end(self, part: Part, order: Sequence[Any]) -> list[Tensor | None]:
        """The backward of the first piece."""
        edges = [GradientEdge(order[number], output) for number, output in self._given]
        entering, self._given = list(self._given.values()), {}
        found: list[Tensor | None] = [None] * (len(part.tails) + len(part.leaves))
        if edges:
            found = Part(edges, part.tails, part.leaves, ()).gradients(entering, retain_graph=self._retain_graph)
        for number, gradient in enumerate(found[len(part.tails) :]):
            if gradient is not None:
                self._add_at_leaf(number, gradient)
        return [*found[: len(part.tails)], *self._at_leaves]


class _BorderReached(Exception):
    """Ends a backward."""


def _stop(_: Any) -> None:
    raise _BorderReached


def _below(heads: Sequence[Any], nodes: Set[Any]) -> set[Any]:
    """Those of some nodes that a backward from heads comes to."""
    found: set[Any] = set()
    pending = list(heads)
    while pending:
        node = pending.pop()
        if node in nodes and node not in found:
            found.add(node)
            pending += [below for below, _ in node.next_functions]
    return found


def _start(order: Sequence[Any], kept: _Kept) -> int:
    """The number of the first node from which on all is there that nodes read."""
    return next((number + 1 for number in reversed(range(len(order))) if not kept.has_all(order[number])), 0)
