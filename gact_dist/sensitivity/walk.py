"""The products of random directions with the Jacobians of a model's backward, one block at a time.

[Note: block by block] Let the forward be blocks and what lies between them. Each block runs alone three times, keeping
only its inputs x (and later d, the gradient at its outputs) in between:

    forward           y = f(x)                          noted: the names of what it saves
    first walk        last block first: f again, and its backward at d gives e, the gradient at x
    second walk       first block first: f again, its backward again with create_graph, (e, g) = b(d, h)
                      with the saved tensors h; and for each direction v
                      J^T v = d(<u, e> + <v, g>) / dh       the products of this block's saved tensors
                      w     = d(<u, e> + <v, g>) / dd       for the blocks after it

u is the tangent of x when all parameters move along v. What lies between blocks is a part of the graph with heads,
where gradients enter, and tails, where they leave. It is differentiated in the same way, and turns the w of the blocks
before it into the u of the block after it. These are the numbers of one double backward of the whole, bit for bit, but
only one block's graph and one block's parameters are there at a time, and the gradient never exists as a whole. No
operator needs a forward derivative.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import codec
from .._torch_internals import once
from ..distributed import (
    any_rank,
    differentiable_twice,
    distributed_as,
    gathered,
    least_of_ranks,
    sum_over_parts,
    whole_value,
)
from ..hooks import (
    RECOMPUTED,
    Noted,
    Recorded,
    Replaceable,
    Replay,
    Replayed,
    SavedTensorHooks,
    View,
    jumps,
    tensors_of,
)
from .autograd_graph import float32_parts, leading_to
from .blocks import Between, BlockForward, Visit, cut, substituted, value_of
from .by_differences import step_along
from .halfway import Halfway, OpenTally, WalkedVisit, form_of, saved_between
from .parts import Gradient, OpaqueError, Part, closed_to, cut_off, edge_of, present, refused, repeated_as, seen_through
from .perturbation import Shown, own_bits, rounding_of, square_distance, widest_inexact
from .sections import Section, divided, divided_open, is_out_of_reach, note_gradients, operands_of, passed_on
from .surroundings import copied

_log = logging.getLogger(__name__)


Distance = Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], float]
"""of two gradients at a block's inputs and of its parameters: what squared difference of those of all parameters they
make"""
Beside = Callable[[Visit, Sequence[Tensor | None], Distance], None]
"""is given a visit of a block, the gradients at its exits, and a Distance"""


class Measured(NamedTuple):
    """What the second walk found of one compressible tensor."""

    first: Any
    """as in Walk.found"""
    tensor: Tensor | None
    """as it is; None if the loss does not depend on it"""
    weight: Tensor | None
    """mean square of its products with the directions; None where none reaches it"""
    shown: Shown | None
    """what another rounding of it did, where these products are not all; see [Note: jumps] in perturbation.py"""


class _Later(NamedTuple):
    """A tensor that is to be rounded anew."""

    first: Any
    """as in Walk.found"""
    records: list[Recorded]
    """of it, or of what lies in its memory"""
    tally: Tally
    measured: Measured | None
    """all else that is known of it; None if other parts of the model will add to it"""
    draws: int


class Tally:
    """What is known of one saved tensor: the products of all that reads it."""

    def __init__(self) -> None:
        self.uses = 0
        """parts of the walk that have yet to add to it"""
        self.tensor: Tensor | None = None
        self.squares: Tensor | None = None
        self.sums: list[Tensor] = []
        """products that are not complete yet, one for each direction, laid out as the tensor"""
        self.shown: Shown | None = None
        """what another rounding of it did in parts that have been visited"""

    def add(self, products: Iterable[Sequence[tuple[View | None, Tensor]]], direction: int, directions: int) -> None:
        """The products of one part.

        products: of each edge that leads to the tensor, one for each view in which it was saved, in the view's shape.
        """
        by_edge = list(products)
        if not by_edge:
            return
        if self.uses == 1 and not self.sums and len(by_edge) == len(by_edge[0]) == 1:
            product = by_edge[0][0][1]
            if self.tensor is None or product.shape == self.tensor.shape:  # a block may see it in another shape
                self._add_square(product, directions)
                return
        while len(self.sums) < directions:
            self.sums.append(self._zeros(by_edge[0][0][1]))
        for seen in by_edge:
            self._add_one(seen, self.sums[direction])

    def _add_square(self, product: Tensor, directions: int) -> None:
        square = product.square()
        if directions > 1:
            square.div_(directions)
        self.squares = square if self.squares is None else self.squares.add_(square)

    def _add_one(self, seen: Sequence[tuple[View | None, Tensor]], total: Tensor) -> None:
        """The product of one edge: what is seen through several views is there once."""
        if len(seen) == 1:
            view, product = seen[0]
            place = once(_within(total, view))
            place.add_(product[tuple(map(slice, place.shape))])
            return
        joined = self._zeros(total)
        for view, product in seen:
            place = once(_within(joined, view))
            place.copy_(product[tuple(map(slice, place.shape))])
        once(total).add_(once(joined))

    def _zeros(self, product: Tensor) -> Tensor:
        like = product if self.tensor is None else self.tensor
        return torch.zeros_like(once(like), dtype=product.dtype).expand(like.shape)

    def weight(self) -> Tensor | None:
        """Mean square of the complete products over the directions; None if all of them are zero."""
        count = len(self.sums)
        while self.sums:  # laid out as the tensor, which stacked ones would not be
            self._add_square(self.sums.pop(), count)
        if self.squares is None or not bool(self.squares.sum()):  # as any() has it, but vectorised
            return None
        return self.squares if self.tensor is None else repeated_as(self.squares, self.tensor)


def _within(base: Tensor, view: View | None) -> Tensor:
    return base if view is None else base.as_strided(view.size, view.stride, view.offset)


class Walk:
    """The two walks over the blocks of one forward. See [Note: block by block]."""

    def __init__(
        self,
        hooks: SavedTensorHooks,
        forward: BlockForward,
        *,
        seed: int,
        directions: int,
        perturbs: bool = False,
        beside: Beside | None = None,
    ) -> None:
        """forward: that has run and has its graph. directions: random ones, to average over.

        perturbs: directions serve the tangents alone, and every saved tensor is rounded anew in its own block. beside:
        is called in the second walk, in each block that a gradient reaches.
        """
        self._beside = beside
        self._hooks, self._forward = hooks, forward
        self._seed, self._directions, self._perturbs = seed, directions, perturbs
        self._tallies: dict[Any, Tally] = {}
        self._later: list[_Later] = []
        """what has to wait until the current block runs with checkpoints that run anew"""
        self._inputs: set[Any] = set()
        """of the current block, those that a checkpoint keeps, by what stands for them"""

    # -- the first walk -----------------------------------------------------------------------------------------------

    def first(self) -> None:
        """From the last block to the first: the gradient at each block's outputs."""
        self._round_between()
        self._flow(self._forward.last, None)
        for visit in reversed(self._forward.visits):
            gradients = [end.gradient for _, end in visit.exits]
            for _, end in visit.exits:
                end.gradient = None
            if visit.before is None or not any(gradient is not None for gradient in gradients):
                continue
            visit.gradients = [None if gradient is None else self._forward.boundary(gradient) for gradient in gradients]
            if visit.before.tails or visit.before.leaves or visit.before.nodes:
                self._first_of(visit, visit.before, gradients)

    def _round_between(self) -> None:
        """What was saved between blocks, as the current plan has it."""
        for item in self._forward.between:
            number = self._forward.numbers.get(item.first)
            if number is not None:
                item.record.replacement = self._rounded(item.record.tensor, item.first, number)

    def _first_of(self, visit: Visit, before: Between, gradients: list[Tensor | None]) -> None:
        with self._forward.again(visit, partial(self._keep, False)) as (part, _, _):
            heads, entering = present(part.heads, gradients)
            found = Part(heads, part.tails, (), ()).gradients(entering)
        visit.made = []
        before.entering = [None if gradient is None else self._forward.boundary(gradient) for gradient in found]
        self._flow(before, found)

    def _flow(self, between: Between, entering: list[Tensor | None] | None) -> None:
        """The gradients at the exits above a part of the forward's graph, and which records it reads."""
        heads, given = (between.heads, None) if entering is None else present(between.heads, entering)
        if not heads:
            return
        for item in self._forward.between:
            item.record.handle.on_restore = partial(between.used.add, item)
        try:
            found = Part(heads, [end.edge for end in between.tails], between.leaves, ()).gradients(given)
        finally:
            for item in self._forward.between:
                item.record.handle.on_restore = None
        derived = [item for item in between.used if item.first in self._forward.derived]
        if derived:
            between.used.update(operands_of(derived, self._forward.between))
        for end, gradient in zip(between.tails, found, strict=False):
            end.add(gradient)

    def _keep(self, exact: bool, tensor: Tensor, first: Any, _: Tensor) -> Replaceable:
        number = self._forward.numbers.get(first)
        if number is None:
            return Replaceable(tensor)
        rounded = self._rounded(tensor, first, number)
        if not exact:
            return Replaceable(tensor if rounded is None else codec.unpack(rounded))
        handle = Replaceable(tensor)
        handle.replacement, handle.leaves_gaps = rounded, isinstance(first, Noted) and first.keeps_gaps
        return handle

    def _name_of(self, key: Any) -> str:
        return self._forward.firsts[key].name

    def _rounded(self, tensor: Tensor, first: Any, number: int) -> codec.Packed | None:
        """A tensor as the current plan has it; see [Note: operating point] in one_pass.py. first: as in Measured."""
        bits = self._hooks.plan.bits_of(self._name_of(first))
        return None if bits is None else self._round(tensor, first, bits, number)

    def _round(self, tensor: Tensor, first: Any, bits: Any, number: int) -> codec.Packed:
        """A tensor rounded to some bits; a different number gives a different rounding. first: as in Measured."""
        limits = self._forward.firsts[first].limits
        with torch.no_grad():
            return self._hooks.encoder.pack(tensor.detach(), bits, self._seed + number, limits)

    # -- the second walk ----------------------------------------------------------------------------------------------

    def second(self, stop: int | None = None) -> Iterator[Measured]:
        """From the first block to the last: what was measured of each compressible tensor, as it is complete.

        stop: the number of blocks to visit; by default all of them, and what follows the last.
        """
        self._tallies = {key: Tally() for key in self._forward.numbers}
        self._count_uses(0)
        yield from self._second_from(0, stop)

    def _second_from(self, start: int, stop: int | None) -> Iterator[Measured]:
        for visit in self._forward.visits[start:stop]:
            if visit.before is not None and visit.gradients:
                yield from self._second_of(visit, visit.before)
        if stop is not None:
            return
        yield from self._second_between(self._forward.last)
        for key in list(self._tallies):  # the loss does not depend on these
            yield Measured(self._forward.firsts[key], None, None, None)

    def halfway(self, stop: int) -> Halfway:
        """After second(stop), or resume() with it: what resume() needs to go on in another forward of the examples."""
        return Halfway(
            stop,
            form_of(self._forward),
            [self._walked(visit) for visit in self._forward.visits],
            self._numbers_of(self._forward.last),
            {
                (number, place): [self._forward.boundary(tangent) for tangent in end.tangents]
                for number, visit in enumerate(self._forward.visits[:stop])
                for place, (_, end) in enumerate(visit.exits)
                if end.tangents is not None and end.readers
            },
            {self._name_of(key): self._open(key, tally) for key, tally in self._tallies.items()},
        )

    def _walked(self, visit: Visit) -> WalkedVisit | None:
        if visit.before is None or not visit.gradients:
            return None
        return WalkedVisit(visit.gradients, visit.before.entering, self._numbers_of(visit.before))

    def _numbers_of(self, between: Between) -> list[int]:
        """Of what it reads, in saved_between()."""
        return [number for number, item in enumerate(saved_between(self._forward)) if item in between.used]

    def _open(self, key: Any, tally: Tally) -> OpenTally:
        """A tally to which others will add. The next forward has what was saved between blocks itself."""
        own = None if key in self._between_blocks() else tally.tensor
        sums = [self._forward.boundary(total) for total in tally.sums]
        return OpenTally(None if own is None else self._forward.boundary(own), sums, tally.shown)

    def resume(self, halfway: Halfway, stop: int | None = None) -> Iterator[Measured]:
        """In place of both walks, in another forward of the same examples: the rest of the second walk.

        stop: as for second(); halfway() may follow.
        """
        halfway.check(self._forward)
        self._round_between()
        visits, between = self._forward.visits, saved_between(self._forward)
        for visit, walked in zip(visits[halfway.stop :], halfway.visits[halfway.stop :], strict=True):
            if visit.before is not None and walked is not None:
                visit.gradients, visit.before.entering = walked.gradients, walked.entering
                visit.before.used = {between[number] for number in walked.used}
        self._forward.last.used = {between[number] for number in halfway.used_last}
        for (number, place), tangents in halfway.tangents.items():
            visits[number].exits[place][1].tangents = [value_of(tangent) for tangent in tangents]
        self._tallies = {key: Tally() for key in self._forward.numbers if self._name_of(key) in halfway.tallies}
        self._count_uses(halfway.stop)
        for key, tally in self._tallies.items():
            found = halfway.tallies[self._name_of(key)]
            tally.sums, tally.shown = [value_of(total) for total in found.sums], found.shown
            tally.tensor = value_of(found.tensor) if tally.tensor is None else tally.tensor
        yield from self._second_from(halfway.stop, stop)

    def _between_blocks(self) -> dict[Any, Tensor]:
        """What was saved whole between blocks and may be rounded, by what stands for it."""
        whole = [item for item in self._forward.between if item.view is None and item.first in self._forward.numbers]
        return {item.first: item.record.tensor for item in whole}

    def _count_uses(self, start: int) -> None:
        """start: the first block that is still to be visited."""
        for key, tensor in self._between_blocks().items():
            if key in self._tallies:
                self._tallies[key].tensor = tensor
        visits = [visit for visit in self._forward.visits[start:] if visit.before is not None and visit.gradients]
        between = [self._forward.last, *(visit.before for visit in visits if visit.before is not None)]
        for end in (end for part in between for end in part.tails):
            end.readers += 1
        parts: list[set[Any]] = [{item.first for item in part.used} for part in between]
        parts += [visit.recorded() for visit in visits]
        for key in (key for part in parts for key in part if key in self._tallies):
            self._tallies[key].uses += 1

    def _second_between(self, between: Between) -> Generator[Measured, None, list[Any]]:
        """What is complete with it; returns the tangents at its heads, None where there is none."""
        given = [value_of(kept) for kept in between.entering]
        heads, entering = present(between.heads, given)
        part = Part(heads, [end.edge for end in between.tails], between.leaves, between.nodes)
        tangents = [end.tangents for end in between.tails]
        for end in between.tails:
            end.readers -= 1
            if end.readers == 0:
                end.tangents = None
        used = [item for item in self._forward.between if item in between.used]

        def fallback(reason: str) -> list[Any]:
            if between is not self._forward.last or not self._forward.visits:
                raise OpaqueError(reason)  # the blocks after it need its tangents; or the whole model is one part
            _log.debug("%s: what the loss saves is measured by perturbation", reason)
            return []

        entered = iter((yield from self._differentiated(part, entering, tangents, used, fallback)))
        return [None if gradient is None else next(entered) for gradient in given]

    def _second_of(self, visit: Visit, before: Between) -> Iterator[Measured]:
        tangents = yield from self._second_between(before)
        gradients = [value_of(kept) for kept in visit.gradients]
        visit.gradients = []
        with self._forward.again(visit, partial(self._keep, True)) as (part, replay, inputs):
            part.heads, entering = present(part.heads, gradients)
            self._inputs = {kept.first for _, kept, _ in visit.inputs if isinstance(kept, Replayed)}
            self._inputs |= {item.first for item in visit.made}
            visit.held = {item.first: item.record.handle for item in visit.made}
            through = [
                Replayed(_input_record(kept.record, cut), kept.first, kept.view)
                for (_, kept, _), cut in zip(visit.inputs, inputs, strict=True)
                if isinstance(kept, Replayed)
            ]
            found = [] if replay is None else replay.found
            through += [item for item in found if isinstance(item.first, Noted) and item.first.recomputes]
            found = [item for item in found if item not in through]
            if visit.opaque:
                through += visit.made
            else:
                found += visit.made

            def fallback(reason: str) -> list[Any]:
                _log.debug("%s: what its block saves is measured by perturbation", reason)
                return self._by_difference(visit, gradients, tangents)

            entered = yield from self._differentiated(part, entering, tangents, found, fallback, through)
            reached = [end for (_, end), gradient in zip(visit.exits, gradients, strict=True) if gradient is not None]
            for end, tangent in zip(reached, entered, strict=True):
                end.tangents = tangent
            del part, replay, found, through, inputs
            visit.made = []
            yield from self._rounded_in_block_again(visit, gradients, tangents)
            if self._beside is not None:
                self._beside(visit, gradients, partial(self._distance, tangents=tangents))
        visit.inputs, visit.made, visit.held, self._inputs = [], [], {}, set()

    def _rounded_in_block_again(
        self, visit: Visit, gradients: Sequence[Tensor | None], tangents: Sequence[list[Tensor] | None]
    ) -> Iterator[Measured]:
        """What a checkpoint keeps, from which it makes all else again. See [Note: open blocks] in blocks.py."""
        later, self._later = self._later, []

        def again() -> tuple[Callable[[], list[Tensor | None]], Replay | None]:
            part, replay, _ = self._forward.part_of(visit, partial(self._keep, True), opens=False)
            part.heads, entering = present(part.heads, gradients)
            return partial(part.gradients, entering), replay

        for one in later:
            if one.first in self._inputs:  # the block's graph is made from it
                yield from self._finished(one, lambda: again()[0](), tangents)
        later = [one for one in later if one.first not in self._inputs]
        if later:
            run, replay = again()
            inside = _by_first([] if replay is None else replay.found)
            for one in later:
                records = [item.record for item in inside[one.first]]
                yield from self._finished(one._replace(records=records), run, tangents)

    def _differentiated(
        self,
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        fallback: Callable[[str], list[Any]],
        through: Sequence[Replayed] = (),
    ) -> Generator[Measured, None, list[Any]]:
        """What is complete with a part, in sections where it is large; returns the tangents at its heads.

        fallback: gives these tangents where the part's backward cannot be differentiated, for a reason. through: as for
        _transposed().
        """
        derived = [item for item in found if item.first in self._forward.derived]
        found = [item for item in found if item.first not in self._forward.derived]
        self._meet([*found, *through])
        left = [*found, *through]
        sections: list[Section] = []
        if not self._forward.groups and not self._perturbs:
            if part.is_open:
                sections = [] if derived else divided_open(part)
            elif not through:
                sections = divided(part, found, derived)
        refusal: str | None = None
        entered: list[Any] = []
        try:
            if part.is_open and len(sections) > 1:
                entered = self._in_open_sections(sections, part, entering, tangents, found, through)
            elif len(sections) < 2:
                entered = self._transposed(part, entering, tangents, found, through)
            else:
                entered = yield from self._in_sections(sections, part, entering, tangents, left)
        except OpaqueError as error:
            refusal = str(error)  # and no more of it, which holds what has been differentiated so far
        if refusal is not None:
            self._hooks.store(item.first.name for item in derived)
            entered = fallback(refusal)
        yield from self._completed(part, entering, tangents, left, refusal is not None)
        return entered

    def _in_sections(
        self,
        sections: Sequence[Section],
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        left: list[Replayed],
    ) -> Generator[Measured, None, list[Any]]:
        """As _differentiated(). left: what the part saved; at the end, and at an error, what is not complete of it."""
        note_gradients(sections, [self._forward.one] if entering is None else entering, self._forward.boundary)
        entered = passed_on(part, tangents)
        last = {item.first: number for number, section in enumerate(sections) for item in section.found}
        readers = Counter(first for section in sections for first in {item.first for item in section.found})
        waiting = {first for first, count in readers.items() if count > 1 and first in self._tallies}
        for first in waiting:
            self._tallies[first].uses += 1  # its products are not complete before the last of these sections
        try:
            for number, section in enumerate(sections):
                for first in [first for first in waiting if last[first] == number]:
                    self._tallies[first].uses -= 1
                    waiting.remove(first)
                self._differentiate(section, tangents, entered, partial(self._transposed, found=section.found))
                complete = [item for item in section.found if last[item.first] == number]
                left[:] = [item for item in left if last[item.first] > number]
                yield from self._completed(part, entering, tangents, complete, False)
        finally:
            for first in waiting:
                self._tallies[first].uses -= 1
        return entered

    def _differentiate(
        self,
        section: Section,
        tangents: Sequence[list[Tensor] | None],
        entered: list[list[Tensor] | None],
        differentiate: Callable[..., list[list[Tensor] | None]],
    ) -> None:
        """One section of a part. tangents, entered: at the tails and at the heads of the part.

        differentiate(part, gradients at its heads, tangents at its tails, closed=edges): as _transposed().
        """
        gradients, section.noted = [value_of(kept) for kept in section.noted], []
        part = section.part()
        part.heads, entering = present(part.heads, gradients)
        borders = section.borders_below()
        ways = [tangents[place] if isinstance(place, int) else place.tangents for _, place in section.tails]
        closed = [border.edge for border in borders]
        found = differentiate(part, entering, ways, closed=closed) if part.heads else []
        for border in borders:
            border.readers -= 1
            if border.readers == 0:
                border.tangents = None
        reached = [place for (_, place), gradient in zip(section.heads, gradients, strict=True) if gradient is not None]
        for place, tangent in zip(reached, found, strict=True):
            if isinstance(place, int):
                entered[place] = tangent
            else:
                place.tangents = tangent

    def _in_open_sections(
        self,
        sections: Sequence[Section],
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        through: Sequence[Replayed],
    ) -> list[Any]:
        """As _transposed(), of an open part in sections. See [Note: sections]."""
        note_gradients(sections, [self._forward.one] if entering is None else entering, self._forward.boundary)
        entered = passed_on(part, tangents)
        cut_at = found or through
        items = [item for item in cut_at if item.first in self._tallies and item.record.node is not None]
        wanted = list(dict.fromkeys(map(edge_of, items)))
        products: list[dict[tuple[Any, int], Any]] = [{} for _ in range(self._directions)]
        borders: dict[tuple[Any, int], None] = {}
        for section in sections:
            below = [border.edge[:2] for border in section.borders_below()]
            borders.update(dict.fromkeys(below))
            edges = list(dict.fromkeys([*below, *section.edges(wanted)]))
            self._differentiate(section, tangents, entered, partial(self._products_at, edges, products, cut_at))
            for known in products:  # those at borders have to wait for all sections
                # one that an earlier section has given, and this one added nothing to, is a boundary already
                new = [edge for edge in below if isinstance(known.get(edge), Tensor)]
                known.update((edge, self._forward.boundary(known[edge])) for edge in new)
        for direction, known in enumerate(products):
            heads = [edge for edge in borders if edge in known]
            if heads:
                above = Part([GradientEdge(*edge) for edge in heads], [GradientEdge(*edge) for edge in wanted], (), ())
                with cut_off(cut_at):
                    further = above.gradients([value_of(known.pop(edge)) for edge in heads])
                for edge, product in zip(wanted, further, strict=True):
                    _add_to(known, edge, product)
            for first, same in _by_first(items).items():
                moving = [item for item in same if edge_of(item) in known]
                self._tallies[first].add(_seen_by_edge(moving, known), direction, self._directions)
            known.clear()
        return entered

    def _products_at(
        self,
        edges: Sequence[tuple[Any, int]],
        products: Sequence[dict[tuple[Any, int], Any]],
        cut_at: Sequence[Replayed],
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        closed: Sequence[GradientEdge],
    ) -> list[list[Tensor] | None]:
        """Add to the products of each direction those of a section at some edges; returns what _transposed() does.

        cut_at: saved tensors through which nothing flows back.
        """
        sources = [] if entering is None else [cut(gradient) for gradient in entering]
        entered: list[list[Tensor]] = [[] for _ in sources]
        with closed_to(closed):
            leaving, held = part.differentiable_gradients(
                sources if entering is not None else None, self._forward.groups
            )
        inputs = [*map(get_gradient_edge, sources), *(GradientEdge(*edge) for edge in edges)]
        for direction, known in enumerate(products):
            held.is_last = direction + 1 == self._directions
            with closed_to(closed), cut_off(cut_at):
                found = self._products(part, leaving, tangents, inputs, direction)
            for place, tangent in zip(entered, found, strict=False):
                place.append(torch.zeros((), device="cpu") if tangent is None else tangent.detach())
            for edge, product in zip(edges, found[len(sources) :], strict=True):
                _add_to(known, edge, product)
        return [place if any(tangent.dim() for tangent in place) else None for place in entered]

    def _meet(self, found: Sequence[Replayed]) -> None:
        """The tally of a tensor that nothing has added to yet is laid out as the tensor is here."""
        for item in found:
            tally = self._tallies.get(item.first)
            if tally is not None and tally.tensor is None:
                tally.tensor, item.view = item.record.tensor, None

    def _transposed(
        self,
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        through: Sequence[Replayed] = (),
        closed: Sequence[GradientEdge] = (),
    ) -> list[list[Tensor] | None]:
        """Add the products of what a part saved; returns the tangents at its heads, for each direction, None where the
        gradient does not depend on what enters there.

        through: what the others are computed from once more in the backward, so that their products are part of its
        own; those of the others are not part of one another's. closed: edges at which the part ends although the graph
        goes on.
        Raises OpaqueError if its backward cannot be differentiated.
        """
        alone = not found
        if alone:  # one pass serves both
            found, through = through, ()
        sources = [] if entering is None else [cut(gradient) for gradient in entering]
        with closed_to(closed):
            leaving, held = part.differentiable_gradients(
                sources if entering is not None else None, self._forward.groups
            )
        wanted: dict[Any, list[Replayed]] = {}
        for item in found:
            if item.first in self._tallies and item.record.node is not None:
                wanted.setdefault(item.first, []).append(item)
        passing = self._passing(part, wanted)
        last = {edge_of(item): first for first, items in wanted.items() if first not in passing for item in items}
        edges = list(last)
        inputs = [*map(get_gradient_edge, sources), *(GradientEdge(*edge) for edge in edges)]
        entered: list[list[Tensor]] = [[] for _ in sources]
        for direction in range(self._directions):
            taken, is_last = self._taking(passing, direction), direction + 1 == self._directions
            held.is_last = is_last and not through
            with taken, cut_off(found):
                products = self._products(
                    part, leaving, tangents, [*inputs, *part.tails] if passing else inputs, direction
                )
            held.is_last = is_last
            self._add_through(through, [] if alone else found, part, leaving, tangents, direction)
            if is_last:
                leaving = []  # with the graph of the backward
            for place, tangent in zip(entered, products, strict=False):
                place.append(torch.zeros((), device="cpu") if tangent is None else tangent.detach())
            by_edge = dict(zip(edges, products[len(sources) :], strict=False))
            del products
            for first, items in wanted.items():
                if first in passing:
                    continue
                self._tallies[first].add(_seen_by_edge(items, by_edge), direction, self._directions)
                for item in items:
                    if last[edge_of(item)] is first:  # products are as large as all that was saved
                        by_edge.pop(edge_of(item), None)
        return [place if any(tangent.dim() for tangent in place) else None for place in entered]

    def _add_through(
        self,
        through: Sequence[Replayed],
        found: Sequence[Replayed],
        part: Part,
        leaving: Sequence[Gradient | None],
        tangents: Sequence[list[Tensor] | None],
        direction: int,
    ) -> None:
        """Add the products of what others of a part are computed from once more. See _transposed().

        found: all else that the part saved; what lies outside of checkpoints is not computed once more.
        """
        measured = [item for item in through if item.first in self._tallies and item.record.node is not None]
        edges = list(dict.fromkeys(map(edge_of, measured)))
        if not edges:
            return
        outside = [item for item in found if RECOMPUTED not in item.first.name]
        with cut_off([*outside, *through]):
            products = self._products(part, leaving, tangents, [GradientEdge(*edge) for edge in edges], direction)
        by_edge = dict(zip(edges, products, strict=True))
        for item in measured:
            self._tallies[item.first].add(_seen_by_edge([item], by_edge), direction, self._directions)

    def _passing(self, part: Part, wanted: Mapping[Any, Sequence[Replayed]]) -> dict[Any, Replayed]:
        """The tensors whose products can be counted as they pass, so that they are never there all at once: those that
        were saved once, by an edge of their own, and were computed from the part's inputs."""
        if self._forward.groups:
            return {}
        readers = Counter(edge_of(item) for items in wanted.values() for item in items)
        computed = leading_to([tail.node for tail in part.tails], part.nodes)
        return {
            first: items[0]
            for first, items in wanted.items()
            if len(items) == 1 and readers[edge_of(items[0])] == 1 and items[0].record.node in computed
        }

    @contextmanager
    def _taking(self, passing: Mapping[Any, Replayed], direction: int) -> Iterator[None]:
        """Within the context the products of these tensors are counted as a backward comes to where they were made."""

        def take(inputs: Sequence[Tensor | None], items: Sequence[tuple[Any, Replayed]]) -> None:
            for first, item in items:
                seen = _seen_by_edge([item], {edge_of(item): inputs[item.record.output_number]})
                self._tallies[first].add(seen, direction, self._directions)

        at: dict[Any, list[tuple[Any, Replayed]]] = defaultdict(list)
        for first, item in passing.items():
            at[item.record.node].append((first, item))
        handles = [node.register_prehook(partial(take, items=items)) for node, items in at.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _products(
        self,
        part: Part,
        leaving: Sequence[Gradient | None],
        tangents: Sequence[list[Tensor] | None],
        inputs: Sequence[GradientEdge],
        direction: int,
    ) -> Sequence[Tensor | None]:
        outputs, weights = [], []
        for number, gradient in enumerate(leaving):
            if gradient is None:
                continue
            if number < len(part.tails):
                tangent = tangents[number]
                weight = None if tangent is None or not tangent[direction].dim() else tangent[direction]
            else:
                weight = self._direction(*part.leaves[number - len(part.tails)], gradient.like, direction)
            if weight is not None:
                outputs.append(gradient.edge)
                weights.append(weight.to(gradient.like.dtype).reshape(gradient.like.shape))
        if not outputs or not inputs:
            return [None] * len(inputs)
        with refused(), differentiable_twice(part.nodes):
            return torch.autograd.grad(outputs, inputs, weights, retain_graph=True, allow_unused=True)

    def _direction(self, name: str, edge: GradientEdge, gradient: Tensor, number: int) -> Tensor:
        """The part of a random direction that belongs to one parameter: made when it is needed, kept nowhere.

        Random numbers of variance one, for real and imaginary parts alike.
        """
        text = f"{self._seed} {number} {name}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        generator = torch.Generator(device=gradient.device).manual_seed(seed)
        shape = (*gradient.shape, 2) if gradient.is_complex() else gradient.shape
        direction = torch.randn(shape, generator=generator, device=gradient.device)
        return distributed_as(torch.view_as_complex(direction) if gradient.is_complex() else direction, gradient)

    def _completed(
        self,
        part: Part,
        entering: Sequence[Tensor] | None,
        tangents: Sequence[list[Tensor] | None],
        found: Sequence[Replayed],
        opaque: bool,
    ) -> Iterator[Measured]:
        """Of the tensors that a part saved, those that no other part adds to."""
        complete, later, draws = [], [], 1 if opaque else self._directions
        saved = _by_first(found)
        for first, items in saved.items():
            tally = self._tallies.get(first)
            if tally is None:
                continue
            one = _Later(first, [item.record for item in items], tally, None, draws)
            tally.uses -= 1
            if tally.uses == 0:
                complete.append((one, tally.weight()))
                del self._tallies[first]
            elif one.records[0].node is None or self._perturbs or _may_jump(part, first):
                later.append(one)
        reached = any_rank([weight is not None for _, weight in complete], self._forward.groups)
        for (one, weight), on_any in zip(complete, reached, strict=True):
            first, tensor = self._forward.firsts[one.first], one.tally.tensor
            if not on_any and is_out_of_reach(part, saved[one.first]):
                yield Measured(first, None, None, None)
                continue
            if not on_any or opaque or self._perturbs:
                later.append(one._replace(measured=Measured(first, one.records[0].tensor, None, None)))
                continue
            if weight is None and tensor is not None:  # only another rank's part matters
                weight = torch.zeros_like(tensor, dtype=torch.float32)
            measured = Measured(first, tensor, weight, None)
            if _may_jump(part, one.first):
                later.append(one._replace(measured=measured))
            else:
                yield measured
        for one in later:
            if part.is_open or one.first in self._inputs:
                self._later.append(one)
            else:
                yield from self._finished(one, partial(part.gradients, entering), tangents)

    def _finished(
        self,
        one: _Later,
        gradients: Callable[[], list[Tensor | None]],
        tangents: Sequence[list[Tensor] | None],
    ) -> Iterator[Measured]:
        """Round a tensor anew; what is then known of it, if that is all.

        gradients: runs the part's backward with what the records hold.
        """
        shown = self._shown(one, gradients, tangents).plus(one.tally.shown)
        if one.measured is None:
            one.tally.shown = shown
        else:
            yield one.measured._replace(shown=shown)

    def _shown(
        self,
        one: _Later,
        gradients: Callable[[], list[Tensor | None]],
        tangents: Sequence[list[Tensor] | None],
    ) -> Shown:
        """The effect of another rounding of one saved tensor; see [Note: perturbation] in perturbation.py.

        On the gradients of the part's parameters it is seen as it is; on those of all parameters before it, through its
        products with their tangents.
        """
        rounding = rounding_of(one.records[0].tensor, None, self._hooks.encoder)
        bits = widest_inexact(own_bits(self._hooks.plan, self._name_of(one.first)), rounding)
        number, all_of_them = self._forward.numbers[one.first], len(self._forward.numbers)
        usual = [record.replacement for record in one.records]
        before: Sequence[Tensor | None] = ()
        change = 0.0
        try:
            for draw in range(one.draws + 1):
                for record in one.records:
                    record.replacement = self._round(record.tensor, one.first, bits, number + draw * all_of_them)
                moved = gradients()
                if draw > 0:
                    change += self._distance(moved, before, tangents) / one.draws
                before = moved
        finally:
            for record, replacement in zip(one.records, usual, strict=True):
                record.replacement = replacement
        return Shown(change, rounding, bits)

    def _distance(
        self,
        moved: Sequence[Tensor | None],
        before: Sequence[Tensor | None],
        tangents: Sequence[list[Tensor] | None],
    ) -> float:
        """The squared difference of two gradients of a part. tangents: at its tails."""
        count = len(tangents)
        total = square_distance(moved[count:], before[count:])
        for direction in range(self._directions):
            along = 0.0
            for new, old, tangent in zip(moved[:count], before[:count], tangents, strict=True):
                if new is not None and old is not None and tangent is not None and tangent[direction].dim():
                    product = (float32_parts(new - old) * float32_parts(tangent[direction])).sum()
                    along += sum_over_parts(whole_value(product), tangent[direction], self._forward.groups)
            total += along**2 / self._directions
        return total

    def _by_difference(
        self, visit: Visit, gradients: Sequence[Tensor | None], tangents: Sequence[list[Tensor] | None]
    ) -> list[list[Tensor] | None]:
        """The tangents at the outputs of a block whose backward cannot be differentiated, by central differences."""
        if len(visit.modules) != 1:
            raise OpaqueError("a checkpointed function has a backward that cannot be differentiated")
        module, found = visit.modules[0], []
        with gathered(module), torch.no_grad():
            self._forward.learn_names(visit.modules)
            values = [value_of(kept) for _, kept, _ in visit.inputs]
            parameters = dict(module.named_parameters())
            for direction in range(self._directions):
                along = {
                    name: self._direction(self._forward.names[id(p)], _NO_EDGE, p, direction)
                    for name, p in parameters.items()
                    if p.requires_grad
                }
                ways = [None if tangent is None else tangent[direction] for tangent in tangents]
                moved = [(parameters[name], way) for name, way in along.items()]
                moved += [
                    (value, way) for value, way in zip(values, ways, strict=True) if way is not None and way.dim()
                ]
                own = step_along(moved, in_low_precision=0.1) or 0.01  # where nothing is moved
                step = least_of_ranks(own, self._forward.groups)
                ahead, behind = (self._shifted(visit, along, values, ways, sign * step) for sign in (1.0, -1.0))
                found.append([(a.float() - b.float()) / (2 * step) for a, b in zip(ahead, behind, strict=True)])
        reached = [n for n, gradient in enumerate(gradients) if gradient is not None]
        return [[outputs[n] for outputs in found] for n in reached]

    def _shifted(
        self,
        visit: Visit,
        along: dict[str, Tensor],
        values: Sequence[Tensor],
        ways: Sequence[Tensor | None],
        step: float,
    ) -> list[Tensor]:
        """The block's outputs with its parameters and inputs moved along some directions."""
        module = visit.modules[0]
        parameters = dict(module.named_parameters())
        moved = {name: parameters[name] + (step * way).to(parameters[name].dtype) for name, way in along.items()}
        inputs = {
            number: value if way is None or not way.dim() else value + (step * way).to(value.dtype)
            for (number, _, _), value, way in zip(visit.inputs, values, ways, strict=True)
        }
        args, kwargs = substituted(copied(visit.arguments), inputs)
        with visit.surroundings.again(), self._forward.mode:
            outputs = tensors_of(torch.func.functional_call(module, moved, args, kwargs))
        return [outputs[number] for number, _ in visit.exits]


def _add_to(known: dict[tuple[Any, int], Any], edge: tuple[Any, int], product: Tensor | None) -> None:
    """known: tensors, or what stands for them until value_of() gives them back."""
    if product is None:
        return
    before = known.get(edge)
    before = before if isinstance(before, Tensor) else value_of(before)
    known[edge] = product.detach() if before is None else before + product.detach()


def _by_first(items: Iterable[Replayed]) -> dict[Any, list[Replayed]]:
    found: dict[Any, list[Replayed]] = {}
    for item in items:
        found.setdefault(item.first, []).append(item)
    return found


def _seen_by_edge(
    items: Sequence[Replayed], products: Mapping[tuple[Any, int], Tensor | None]
) -> list[list[tuple[View | None, Tensor]]]:
    """What Tally.add() takes, of one tensor. Complex products are left out: such tensors are perturbed."""
    seen: dict[tuple[Any, int], dict[Any, tuple[View | None, Tensor]]] = {}
    for item in items:
        product, view = products[edge_of(item)], item.view
        if product is not None and not product.is_complex():
            place = None if view is None else (view.size, view.stride, view.offset)
            through = seen_through(item.record, product.detach().float())
            seen.setdefault(edge_of(item), {}).setdefault(place, (view, through))
    return [list(views.values()) for views in seen.values()]


def _may_jump(part: Part, first: Any) -> bool:
    """See [Note: jumps] in perturbation.py."""
    return first.is_block_input and any(map(jumps, part.nodes))


_NO_EDGE: Any = None


def _input_record(kept: Recorded, cut: Tensor) -> Recorded:
    return Recorded(kept.name, kept.handle, cut.detach(), cut.grad_fn, 0, kept.compressible)
