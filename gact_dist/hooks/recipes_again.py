"""Recipes that come out as in the step before, found by a few looks.

[Note: recipes again] To find a recipe takes some eighty functions, each of which reads a bit of the graph. What they
find follows from what they read, and from what is known of a save that has settled. So where a save is settled, what
was read is noted: which nodes, the edges between them, their constants, and what the graph held in place of what they
saved. Where another step's graph has the same, its recipe is the same function of other handles. The comparison is in
csrc/hooks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from .. import codec
from .._short_ways import native_base
from .._torch_internals import RESHAPES, constants_of, raw_slot, saved_handle
from .attention_scores import added_to
from .expressions import Copy, Expression
from .fused_attention import output_again
from .handles import Kept, Recipe, Stored, View, base_of
from .saved_edges import ADDED, VARIABLE, Reads, mark_at, vector_of_parameter

_MOST_NODES = 64
_OTHER, _NONE = -1, -2  # behind an edge: a node that was not looked at; no graph


class _Operand(NamedTuple):
    """What a recipe is made of: an expression with its own operands, a handle, or what a node has."""

    like: Any = None
    """the expression without its operands, or what is the same in each step"""
    parts: tuple[_Operand, ...] = ()
    read: int = -1
    """number of the handle"""
    node: int = -1
    slot: str | None = None
    """what of the node is copied, or ADDED; None where its attention runs again"""
    shape: tuple[int, ...] | None = None
    """of the copy"""

    def made(self, nodes: Sequence[Any], handles: Sequence[Any], known: dict[int, Any]) -> Any:
        """Of the nodes and handles of another graph. known: what several operators read."""
        like, parts, read, number, slot, shape = self
        if read >= 0:
            return handles[read]
        if number < 0:
            if not parts:
                return like
            found = known.get(id(self)) if like.uses > 1 else None
            if found is None:
                found = like.of(tuple([part.made(nodes, handles, known) for part in parts]))
                if like.uses > 1:
                    known[id(self)] = found
            return found
        node = nodes[number]
        if slot == ADDED:
            return _checked(added_to(node))
        if slot is None or shape is None:
            return _checked(output_again(node))
        if slot == VARIABLE:
            return Copy(_checked(vector_of_parameter(node.variable, shape)))
        handle = saved_handle(node, slot)
        return Copy(_checked(handle.vector if type(handle) is Kept else handle))


class _Unlike(Exception):
    """The graph is not as it was, or another could have the same and another recipe."""


def recipe_again(tensor: Tensor, recipe: Recipe, reads: Reads) -> RecipeAgain | None:
    """How to make the recipe of a tensor anew in later steps; None where that has to be found out.

    reads: what was read to find it.
    """
    try:
        return RecipeAgain(tensor, recipe, reads)
    except _Unlike:
        return None


_GraphPattern: Any = native_base("GraphPattern")


class RecipeAgain(_GraphPattern):
    """Makes the recipe of a tensor of an earlier step anew.

    What a graph must have for it, as GraphPattern.match() in csrc/hooks compares it: kinds, the types of its nodes;
    edges, int32s of _edges_of(), node by node; constants, (number of a node, attribute, value); reads, of each handle
    (number of its node, attribute or mark under which the node has it, its _looks_of(), number of the first handle with
    the same base).
    """

    def __init__(self, tensor: Tensor, recipe: Recipe, reads: Reads) -> None:
        """See recipe_again()."""
        read = [node for node, _, _ in reads.handles] + [node for _, node, _ in reads.made]
        nodes = _nodes_between(tensor.grad_fn, read)
        numbers = {id(node): number for number, node in enumerate(nodes)}
        self.kinds = tuple(map(_kind_of, nodes))
        self.edges = array("i", chain.from_iterable(_edges_of(node, numbers) for node in nodes)).tobytes()
        self.constants = tuple(
            [
                (number, name, getattr(node, name))
                for number, node in enumerate(nodes)
                if node.name() not in RESHAPES
                for name in constants_of(node)
            ]
        )
        once = {(id(node), slot): (node, slot, handle) for node, slot, handle in reads.handles}
        handles = [handle for _, _, handle in once.values()]
        bases = [base_of(handle) for handle in handles]
        self.reads = tuple(
            [
                (
                    numbers[id(node)],
                    mark_at(slot) if isinstance(slot, int) else raw_slot(slot),
                    _looks_of(handle),
                    next(first for first, known in enumerate(bases) if known is base),
                )
                for (node, slot, handle), base in zip(once.values(), bases, strict=True)
            ]
        )
        self.handle_type, self.view_type, self.kept_type = Stored, View, Kept
        self.packed_type, self.recipe_type, self.looks_of = codec.Packed, Recipe, _looks_of
        self._like = recipe.of(None)
        self._operand = _operand_of(recipe.expression, handles, reads, numbers, {})
        self._note_mask = reads.note_mask if any(slot == ADDED for _, _, slot in reads.made) else None

    def __call__(self, tensor: Tensor) -> Recipe | None:
        """The recipe of a tensor that is like the earlier one; None where the graph is not as it was."""
        try:
            found = self.match(tensor.grad_fn)
            if found is None:
                return None
            nodes, handles = found
            if self._note_mask is not None:
                self._note_mask(tensor)
            return self._like.of(self._operand.made(nodes, handles, {}))
        except _Unlike:
            return None


def _nodes_between(root: Any, ends: Sequence[Any]) -> list[Any]:
    """A node, these behind it, and those on a way to them, each behind one before it."""
    above: dict[int, Any] = {id(root): None}
    found = [root]
    for node in found:
        for below, _ in node.next_functions if len(found) <= _MOST_NODES else ():
            if below is not None and id(below) not in above:
                above[id(below)] = node
                found.append(below)
    needed: set[int] = set()
    for end in ends:
        if id(end) not in above:
            raise _Unlike
        while end is not None and id(end) not in needed:
            needed.add(id(end))
            end = above[id(end)]
    return [node for node in found if node is root or id(node) in needed]


def _kind_of(node: Any) -> Any:
    if type(node).__name__ != node.name().rpartition("::")[2]:
        raise _Unlike  # a class of many operators
    return type(node)


def _edges_of(node: Any, numbers: dict[int, int]) -> Iterator[int]:
    """How many edges a node has, and of each the number of the node behind it, and of that one's output.

    numbers: of the nodes that are looked at, by their identities.
    """
    yield len(node.next_functions)
    for below, output in node.next_functions:
        yield _NONE if below is None else numbers.get(id(below), _OTHER)
        yield output


def _looks_of(handle: Any) -> tuple[Any, ...]:
    """All of a handle that a recipe may depend on, but for its elements."""
    kind = type(handle)
    if kind is Stored:
        payload = handle.payload
        how = type(payload)
        if how is codec.Packed:
            return handle.name, payload.shape, payload.scheme
        return handle.name, payload.shape, how, payload.work if how is Recipe else 0
    if handle is None:
        return ()
    if kind is View:
        return handle.size, handle.stride, handle.offset, handle.toggled, _looks_of(handle.base)
    if kind is Kept:
        tensor = handle.tensor
        return type(tensor), tensor.shape, tensor.dtype, handle.of_model, handle.is_buffer, handle.vector is None
    if isinstance(handle, Tensor):
        return kind, handle.shape, handle.dtype
    raise _Unlike


def _operand_of(
    operand: Any, handles: Sequence[Any], reads: Reads, numbers: dict[int, int], known: dict[int, _Operand]
) -> _Operand:
    """handles: that were read, each once. numbers: of nodes, by their identities. known: expressions, the same."""
    for made, node, slot in reads.made:
        if made is operand:
            shape = None if slot in (None, ADDED) else tuple(made.tensor.shape)
            return _Operand(node=numbers[id(node)], slot=slot, shape=shape)
    if isinstance(operand, Expression):
        if id(operand) not in known:
            parts = [_operand_of(part, handles, reads, numbers, known) for part in operand.operands]
            known[id(operand)] = _Operand(operand.of(()), tuple(parts))
        return known[id(operand)]
    if isinstance(operand, Copy) and operand.tensor is None:
        return _Operand(operand)
    for number, handle in enumerate(handles):
        if handle is operand:
            return _Operand(read=number)
    raise _Unlike


def _checked(found: Any) -> Any:
    if found is None:
        raise _Unlike
    return found
