"""Recipes that come out as in the step before, found by a few looks.

[Note: recipes again] To find a recipe takes some eighty functions, each of which reads a bit of the graph. What they
find follows from what they read, and from what is known of a save that has settled. So where a save is settled, what
was read is noted: which nodes, which of their constants, and what the graph held in place of what they saved. Where
another step's graph has the same, its recipe is the same function of other handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import codec
from .._torch_internals import RESHAPES, constants_of, raw_slot, saved_handle
from .expressions import Copy, Expression
from .fused_attention import output_again
from .handles import Kept, Recipe, Stored, View, base_of
from .saved_edges import VARIABLE, Reads, saved_at, vector_of_parameter

_MOST_NODES = 64


class _Node(NamedTuple):
    """A node of the graph, but for the one that made the tensor."""

    parent: int
    """number of the node that has it for an operand"""
    edge: int
    kind: Any


class _Read(NamedTuple):
    """What the graph holds of one tensor."""

    node: int
    place: Any
    """raw_slot() of the name of a saved tensor, or the number of an output"""
    looks: tuple[Any, ...]
    first: int
    """number of the first with the same base"""


class _Operand(NamedTuple):
    """What a recipe is made of: an expression with its own operands, a handle, or what a node has."""

    like: Any = None
    """the expression without its operands, or what is the same in each step"""
    parts: tuple[_Operand, ...] = ()
    read: int = -1
    """number of the handle"""
    node: int = -1
    slot: str | None = None
    """what of the node is copied; None where its attention runs again"""
    shape: tuple[int, ...] | None = None
    """of the copy"""

    def made(self, nodes: Sequence[Any], handles: Sequence[Any]) -> Any:
        """Of the nodes and handles of another graph."""
        like, parts, read, number, slot, shape = self
        if read >= 0:
            return handles[read]
        if number < 0:
            return like.of(tuple([part.made(nodes, handles) for part in parts])) if parts else like
        node = nodes[number]
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


class RecipeAgain:
    """Makes the recipe of a tensor of an earlier step anew."""

    def __init__(self, tensor: Tensor, recipe: Recipe, reads: Reads) -> None:
        """See recipe_again()."""
        self._kind = type(tensor.grad_fn)
        self._nodes: list[_Node] = []
        self._constants: list[tuple[int, str, Any]] = []
        self._reads: list[_Read] = []
        numbers = self._number_nodes(tensor.grad_fn, reads)
        handles: list[Any] = []
        bases: list[Any] = []
        once = {(id(node), slot): (node, slot, handle) for node, slot, handle in reads.handles}
        for node, slot, handle in once.values():
            handles.append(handle)
            bases.append(base_of(handle))
            first = next(i for i, known in enumerate(bases) if known is bases[-1])
            place = raw_slot(slot) if isinstance(slot, str) else slot
            self._reads.append(_Read(numbers[id(node)], place, _looks_of(handle), first))
        self._like = recipe.of(None)
        self._operand = _operand_of(recipe.expression, handles, reads, numbers)

    def _number_nodes(self, root: Any, reads: Reads) -> dict[int, int]:
        """The numbers of the nodes that were read, and of those on the way there, by their identities."""
        ways: dict[int, tuple[Any, int, int]] = {}  # node, identity of its parent, edge
        pending = [root]
        for node in pending:
            if len(pending) > _MOST_NODES:
                break
            for edge, (below, _) in enumerate(node.next_functions):
                if below is not None and below is not root and id(below) not in ways:
                    ways[id(below)] = below, id(node), edge
                    pending.append(below)
        numbers: dict[int, int] = {}

        def number(identity: int) -> int:
            if identity in numbers:
                return numbers[identity]
            node = root
            if identity != id(root):
                if identity not in ways:
                    raise _Unlike
                node, parent, edge = ways[identity]
                self._nodes.append(_Node(number(parent), edge, type(node)))
            numbers[identity] = len(numbers)
            self._note_constants(node, numbers[identity])
            return numbers[identity]

        for identity in (id(root), *(id(node) for node, *_ in reads.handles), *(id(node) for _, node, _ in reads.made)):
            number(identity)
        return numbers

    def _note_constants(self, node: Any, number: int) -> None:
        name = node.name()
        if type(node).__name__ != name.rpartition("::")[2]:
            raise _Unlike  # a class of many operators
        if name not in RESHAPES:
            self._constants += [(number, constant, getattr(node, constant)) for constant in constants_of(node)]

    def __call__(self, tensor: Tensor) -> Recipe | None:
        """The recipe of a tensor that is like the earlier one; None where the graph is not as it was."""
        nodes: list[Any] = [tensor.grad_fn]
        if type(nodes[0]) is not self._kind:
            return None
        for parent, edge, kind in self._nodes:
            node = nodes[parent].next_functions[edge][0]
            if type(node) is not kind:
                return None
            nodes.append(node)
        for number, name, value in self._constants:
            if getattr(nodes[number], name) != value:
                return None
        handles: list[Any] = []
        bases: list[Any] = []
        try:
            for number, place, looks, first in self._reads:
                node, is_edge = nodes[number], type(place) is int
                handle = saved_at((node, place)) if is_edge else getattr(getattr(node, place, None), "data", None)
                handles.append(handle)
                bases.append(handle.base if type(handle) is View else handle)
                if bases[first] is not bases[-1] or _looks_of(handle) != looks:
                    return None
            return self._like.of(self._operand.made(nodes, handles))
        except _Unlike:
            return None


def _looks_of(handle: Any) -> tuple[Any, ...]:
    """All of a handle that a recipe may depend on, but for its elements."""
    kind = type(handle)
    if kind is Stored:
        payload = handle.payload
        how = type(payload)
        if how is codec.Packed:
            return handle.name, payload.shape, payload.scheme
        return handle.name, payload.shape, how, payload.depth if how is Recipe else 0
    if handle is None:
        return ()
    if kind is View:
        return handle.size, handle.stride, handle.offset, handle.toggled, _looks_of(handle.base)
    if kind is Kept:
        tensor = handle.tensor
        return type(tensor), tensor.shape, tensor.dtype, handle.of_model, handle.vector is None
    if isinstance(handle, Tensor):
        return kind, handle.shape, handle.dtype
    raise _Unlike


def _operand_of(operand: Any, handles: Sequence[Any], reads: Reads, numbers: dict[int, int]) -> _Operand:
    """handles: that were read, each once. numbers: of nodes, by their identities."""
    for made, node, slot in reads.made:
        if made is operand:
            shape = None if slot is None else tuple(made.tensor.shape)
            return _Operand(node=numbers[id(node)], slot=slot, shape=shape)
    if isinstance(operand, Expression):
        return _Operand(
            operand.of(()), tuple([_operand_of(part, handles, reads, numbers) for part in operand.operands])
        )
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
