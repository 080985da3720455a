"""A part of the graph that is differentiated twice in several sections, for less of its double backward at a time.

[Note: sections] The second derivative of a part holds about three times what the part saved. A large part is therefore
divided where its nodes, in the order of the forward, have saved equal shares. The gradient at an edge between two
sections is found by one more backward of the part, last section first, and noted as that between blocks is; then each
section is differentiated as a block is, first one first. The numbers are those of the part as a whole.

Of an open part ([Note: open blocks] in blocks.py) what moves the saved tensors of a section may have been made in an
earlier one. There the products at the edges between sections are added up as well, and one more backward of the part
takes them to the tensors that are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch_internals import saved_handles, storage_id
from ..hooks import Replaceable, Replayed, origins_of, stored_of
from .blocks import Exit
from .parts import Part, closed_to, edge_of, parts_saved, saved_by_edge

LEAST_BYTES = 2 << 20
"""saved by a section"""
MOST = 8


@dataclass(eq=False)
class Section:
    """Some nodes of a part that follow one another, with the edges through which gradients enter and leave them."""

    nodes: list[Any] = field(default_factory=list)
    heads: list[tuple[GradientEdge, int | Exit]] = field(default_factory=list)
    """where gradients enter: with the number of a head of the part, or with the border"""
    tails: list[tuple[GradientEdge, int | Exit]] = field(default_factory=list)
    """where gradients leave: with the number of a tail of the part, or with the border"""
    leaves: list[tuple[str, GradientEdge]] = field(default_factory=list)
    found: list[Replayed] = field(default_factory=list)
    """what its nodes saved"""
    noted: list[Any] = field(default_factory=list)
    """boundaries of the gradients at its heads, None where there is none"""

    def borders_below(self) -> list[Exit]:
        """To earlier sections."""
        return [border for _, border in self.tails if isinstance(border, Exit)]

    def edges(self, wanted: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Those of some edges that start in it, or enter the part through it."""
        ends = {edge[:2] for edge, place in self.tails if not isinstance(place, Exit)}
        own = set(self.nodes)
        return [edge for edge in wanted if edge[0] in own or edge in ends]

    def part(self) -> Part:
        return Part([edge for edge, _ in self.heads], [edge for edge, _ in self.tails], self.leaves, self.nodes)


def divided(part: Part, found: Sequence[Replayed], derived: Sequence[Replayed] = ()) -> list[Section]:
    """The sections of a part, in the order of the forward; none if it is not to be divided.

    found: what its nodes saved; if it is not known of one of these which nodes these are, there is one section.
    derived: what they saved that steps make from others, with which it shares a section.
    """
    count = min(MOST, sum(item.record.nbytes for item in found) // max(1, LEAST_BYTES))
    if count < 2:
        return []
    readers = _readers(part.nodes, found)
    together = _with_origins(part, found, derived, readers)
    if not all(readers.values()):
        return []
    order = _in_forward_order(part)
    reached = set(order)
    readers = {first: [node for node in nodes if node in reached] for first, nodes in readers.items()}
    if not any(readers.values()):
        return []
    sizes = {item.first: item.record.nbytes for item in found}
    place = _places(order, {first: (sizes[first], nodes) for first, nodes in readers.items()}, count, together)
    sections = _connected(part, order, place, count)
    for item in found:
        for number in sorted({place[node] for node in readers[item.first]}) or [place[order[-1]]]:
            sections[number].found.append(item)
    return [section for section in sections if section.nodes]


def is_out_of_reach(part: Part, items: Sequence[Replayed]) -> bool:
    """Whether all that reads a saved tensor leads to outputs of the part that the loss does not depend on."""
    readers = {} if part.is_open else _readers(part.nodes, items)
    return any(readers.values()) and set(_in_forward_order(part)).isdisjoint(*readers.values())


def operands_of(derived: Iterable[Replayed], found: Sequence[Replayed]) -> Iterator[Replayed]:
    """What was saved that some tensors are derived from, whether a backward reads it or not.

    found: all that was saved in their part of the graph.
    """
    for _, _, operands in _origins(derived, found):
        yield from operands


def _origins(
    derived: Iterable[Replayed], found: Sequence[Replayed]
) -> Iterator[tuple[Replayed, set[Any], list[Replayed]]]:
    """What is derived, the nodes that saved its operands, and those of its operands that others saved."""
    saved = saved_by_edge(found)
    in_part = {edge for edge, items in saved.items() if parts_saved([item.record for item in items])}
    for item in derived:
        origins = origins_of(edge_of(item), saved.__contains__, in_part.__contains__)
        if origins is not None:
            yield item, origins.makers, [operand for edge in origins.edges for operand in saved[edge]]


def _with_origins(
    part: Part, found: Sequence[Replayed], derived: Sequence[Replayed], readers: dict[Any, list[Any]]
) -> list[set[Any]]:
    """The nodes that are to share a section: those that read what is derived, and those that saved its operands. What
    moves it and was saved by others is counted as read where it is read."""
    together = []
    for item, makers, operands in _origins(derived, found):
        nodes = _readers(part.nodes, [item])[item.first]
        together.append({*makers, *nodes})
        for first in (operand.first for operand in operands):
            readers[first] += [node for node in nodes if node not in readers[first]]
    return together


def divided_open(part: Part) -> list[Section]:
    """The sections of an open part, by all that its nodes saved. They know nothing of what is measured."""
    leaves: list[Any] = [edge.node for _, edge in part.leaves]
    own = {storage_id(leaf.variable) for leaf in leaves}
    read: dict[int, tuple[int, list[Any]]] = {}
    for node in part.nodes:
        for _, handle in saved_handles(node):
            if isinstance(handle, Replaceable) and isinstance(handle.content, Tensor):
                held = storage_id(handle.content)
                if held not in own:
                    nbytes = handle.content.untyped_storage().nbytes()
                    read.setdefault(held, (nbytes, []))[1].append(node)
    count = min(MOST, sum(nbytes for nbytes, _ in read.values()) // max(1, LEAST_BYTES))
    if count < 2:
        return []
    order = _in_forward_order(part)
    place = _places(order, read, count)
    return [section for section in _connected(part, order, place, count) if section.nodes]


def _readers(nodes: Sequence[Any], found: Sequence[Replayed]) -> dict[Any, list[Any]]:
    """By the memory that holds it, the nodes that saved each tensor; none where that is not known."""
    memory = {item.record.handle: item.first for item in found}
    readers: dict[Any, list[Any]] = {item.first: [] for item in found}
    for node in nodes:
        for _, value in saved_handles(node):
            handle = stored_of(value)
            if handle in memory:
                readers[memory[handle]].append(node)
    return readers


def _in_forward_order(part: Part) -> list[Any]:
    """The nodes of a part but for its tails and leaves, each after those that made its inputs."""
    own = {node for node in part.nodes if not hasattr(node, "variable")} - {edge.node for edge in part.tails}
    seen, order = set(), []
    pending = [(edge.node, False) for edge in map(_as_edge, reversed(part.heads))]
    while pending:
        node, left = pending.pop()
        if left:
            order.append(node)
        elif node in own and node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending += [(below, False) for below, _ in node.next_functions if below is not None]
    return order


def _places(
    order: Sequence[Any],
    read: Mapping[Any, tuple[int, Sequence[Any]]],
    count: int,
    together: Sequence[Set[Any]] = (),
) -> dict[Any, int]:
    """The number of the section of each node: sections have saved about equal shares of all that is read.

    read: of each saved tensor its bytes and the nodes that read it. together: nodes that share a section, with what is
    between them.
    """
    weights: dict[Any, float] = {}
    for nbytes, nodes in read.values():
        for node in nodes:
            weights[node] = weights.get(node, 0.0) + nbytes / len(nodes)
    total, before, place = sum(weights.values()), 0.0, {}
    for node in order:
        weight = weights.get(node, 0.0)
        place[node] = min(count - 1, int((before + weight / 2) * count / total))
        before += weight
    _join(order, place, together)
    _with_their_readers(order, weights, place)
    return place


def _join(order: Sequence[Any], place: dict[Any, int], together: Sequence[Set[Any]]) -> None:
    index = {node: number for number, node in enumerate(order)}
    spans = [[index[node] for node in nodes if node in index] for nodes in together]
    for first, last in sorted((min(span), max(span)) for span in spans if span):
        for node in order[first + 1 : last + 1]:
            place[node] = min(place[node], place[order[first]])


def _with_their_readers(order: Sequence[Any], weights: Mapping[Any, float], place: dict[Any, int]) -> None:
    """Move what is made of parameters alone, such as a transposed weight, to the first section that uses it."""
    of_parameters: set[Any] = set()
    for node in order:
        below = [made for made, _ in node.next_functions if made is not None]
        if node not in weights and below and all(made in of_parameters or hasattr(made, "variable") for made in below):
            of_parameters.add(node)
    users: dict[Any, list[int]] = {}
    for node in reversed(order):
        if node in of_parameters:
            place[node] = min(users.get(node, [place[node]]))
        for made, _ in node.next_functions:
            users.setdefault(made, []).append(place[node])


def _connected(part: Part, order: Sequence[Any], place: Mapping[Any, int], count: int) -> list[Section]:
    """That many sections with the nodes that have a place in them, some perhaps without any."""
    sections = [Section() for _ in range(count)]
    for node in order:
        sections[place[node]].nodes.append(node)
    leaves = {edge.node: (name, edge) for name, edge in part.leaves}
    ends = {edge[:2]: number for number, edge in enumerate(part.tails)}
    borders: dict[tuple[Any, int], Exit] = {}
    for number, head in enumerate(part.heads):
        edge = _as_edge(head)
        if edge.node in place:
            sections[place[edge.node]].heads.append((edge, number))
    for number, section in enumerate(sections):
        known: set[tuple[Any, int]] = set()
        for below in (below for node in section.nodes for below in node.next_functions):
            if below[0] is None or below in known:
                continue
            known.add(below)
            if below in ends:
                section.tails.append((GradientEdge(*below), ends[below]))
            elif place.get(below[0], number) < number:
                border = borders.get(below)
                if border is None:
                    border = borders[below] = Exit(GradientEdge(*below))
                    sections[place[below[0]]].heads.append((border.edge, border))
                border.readers += 1
                section.tails.append((border.edge, border))
            elif below[0] in leaves:
                section.leaves.append(leaves[below[0]])
    return sections


def passed_on(part: Part, tangents: Sequence[Any]) -> list[Any]:
    """The tangents at the heads of a part that are tails as well; None for all others. tangents: at its tails."""
    ends = {edge[:2]: number for number, edge in enumerate(part.tails)}
    numbers = [ends.get(_as_edge(head)[:2]) for head in part.heads]
    return [None if number is None else tangents[number] for number in numbers]


def _as_edge(head: Any) -> GradientEdge:
    return get_gradient_edge(head) if isinstance(head, Tensor) else head


def note_gradients(sections: Sequence[Section], entering: Sequence[Tensor], boundary: Callable[[Tensor], Any]) -> None:
    """Note the gradient at the heads of each section. entering: at the heads of the part."""
    for section in reversed(sections):
        values = [entering[place] if isinstance(place, int) else place.gradient for _, place in section.heads]
        section.noted = [None if value is None else boundary(value) for value in values]
        present = [(edge, value) for (edge, _), value in zip(section.heads, values, strict=True) if value is not None]
        for _, place in section.heads:
            if isinstance(place, Exit):
                place.gradient = None
        borders = section.borders_below()
        if not present or not borders:
            continue
        edges = [border.edge for border in borders]
        with closed_to(edges):
            below = Part([edge for edge, _ in present], edges, (), ()).gradients([value for _, value in present])
        for border, gradient in zip(borders, below, strict=True):
            border.add(gradient)
