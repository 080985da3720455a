"""What backward can make again from other saved tensors is not stored.

[Note: derived] A linear saves the output of a norm, and the norm its own input; another saves the output of GELU, and
GELU its input. To store both is to pay twice for one piece of information. So a tensor that a cheap operator made from
what that operator saved has a recipe in place of a payload: how to make it, and the handles of what it is made of. The
graph shows these: a node holds, in each saved attribute, what our hook returned. Nothing is derived unless it would be
rounded, so a job whose tensors are all stored exactly is bitwise the untouched one.

Sums, cat, views and casts save none of their operands, and a product with a number saves the number: what is saved of
those is found by the edge that gives it ([Note: edges] in saved_edges.py). What takes too much work to be made again is
stored: [Note: work] in expressions.py. Of an activation that is written in operators the result of a long chain is kept
for its other readers: [Note: shared], there as well. What is saved only after what is made of it counts, too:
[Note: saved later] in saved_later.py.

Statistics (mean, reciprocal standard deviation) and relu's mask are those of the forward: what is made is then linear
in the rounded input, and as unbiased. Of GELU, SiLU and their kin it has a bias of second order.

A recipe holds handles, never nodes or tensors with a graph: a handle that held its own node would never be freed. Small
vectors of parameters are copied, as sharding may have taken them away when the recipe is used.

[Note: derived parts] Of a distributed tensor the part of this rank is made from such parts, never by communication:
what is pointwise, and a norm over dimensions that are not split, is the same on parts. That DTensor has not moved
elements meanwhile follows from what it saved: operands that lie as the result does, none of them pending a reduction.
from_local() and to_local() leave elements where they are, as do the nodes by which wrappers pass tensors on.

The sensitivity of what a tensor is derived from has both paths: a measurement does not cut the graph at a tensor that
an earlier forward has derived (KnownRoles.derived). Where there is no graph, as for an input of the model, there is no
second path to follow: from what is rounded there nothing is derived. The batch is not rounded.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _fields, codec
from .._torch_internals import PLAIN, RESHAPES, saved_handle
from ..distributed import CONVERSIONS, Layout, own_part
from .aliases import span
from .attention_scores import SOFTMAXES, Probabilities, added_to, has_added
from .expressions import AS_IT_IS, Copy, Expression, Joined, Local, Number, Shared, is_rounded, numel_of
from .fused_attention import OPERATORS, AttentionResult, output_again
from .handles import Distributed, Kept, Recipe, Recorded, Replaceable, Stored, base_of, is_made_from
from .hidden_scores import (
    FILLS,
    NO_MASKS,
    Masks,
    Shown,
    adds_number,
    before,
    is_masked_product,
    is_observed,
    masks_of,
    may_hide,
)
from .naming import FORWARDING
from .saved_edges import (
    VARIABLE,
    Reads,
    is_saved_elsewhere,
    mark_at,
    note_saved_elsewhere,
    saved_at,
    vector_of_parameter,
)
from .saved_later import Unsaved
from .streamed import Order
from .way import Way, find_way

_VECTOR_FRACTION = 16
"""a parameter is copied for a recipe if it has at most this part of the elements that are made"""
_WHOLE_FRACTION = 4
"""what is a part is made from a whole of at most this many times its elements"""
_MOST_WORK = 9
"""elements that are written to make one again; to pack one and to decode it takes as long as to write three of them"""
_LONGEST = 16
"""operators in a row that are looked at"""
_IN_THE_SAME_MEMORY = frozenset((
    *RESHAPES, *CONVERSIONS, "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
    "AliasBackward0",
))  # fmt: skip
_BETWEEN_SCORES = _IN_THE_SAME_MEMORY | {"ToCopyBackward0"}
"""what may lie between scores, their mask and their softmax"""
_NOT_AS_SAVED = frozenset(("LogSoftmaxBackward0",))
"""what is saved of their results may be a sample"""
STARTS = "starts_a_graph"
"""attribute of nodes that stand for what lies elsewhere"""


_Edge = tuple[Any, int]
"""(node, number of its output); None for one without a graph"""


def _passed_through(edge: _Edge) -> Iterator[_Edge]:
    """An edge, and those behind it that give the same elements, perhaps in another shape; the last is of the node that
    computed them, or of none where there is no graph."""
    node, number = edge
    while node is not None:
        yield node, number
        name, below = node.name(), node.next_functions
        if name in _IN_THE_SAME_MEMORY or (name == "ExpandBackward0" and _repeats_nothing(node)):
            passed = 0
        elif name in FORWARDING and number < len(below):
            passed = number
        else:
            return
        if hasattr(node, STARTS):
            return
        node, number = below[passed]
    yield None, 0


def _repeats_nothing(node: Any) -> bool:
    """Of an expansion to the shape that its operand has."""
    return tuple(node._saved_self_sym_sizes) == tuple(node._input_metadata[0].shape)


class InGraph(NamedTuple):
    """What a recipe is looked for by: how the graph gives the tensor."""

    edge: _Edge
    is_part: bool
    """whether the edge gives a distributed tensor, whose part on this rank it is"""
    stored: Stored | None = None
    """what is kept of it so far: others may be made from it, and it is not to be made from those"""


def in_graph(graph: Tensor, stored: Stored | None = None) -> InGraph:
    """graph: the tensor, or the distributed one whose part on this rank it is. stored: see InGraph."""
    return InGraph(_edge_of(graph), type(graph) not in PLAIN, stored)


class Origins(NamedTuple):
    """What a tensor is derived from, in a graph that is measured."""

    makers: set[Any]
    """nodes that saved it"""
    edges: set[_Edge]
    """that it was saved at"""


def origins_of(
    edge: _Edge, is_saved: Callable[[_Edge], bool], in_part: Callable[[_Edge], bool] | None = None
) -> Origins | None:
    """What the tensor at an edge is derived from; None if the graph starts in between, or a block has saved it.

    Of a derived tensor, in a graph that is measured, whose operators may be replaced by others. is_saved: whether what
    an edge gives was saved. in_part: whether no more than parts of it were: then it may be made of these, or of what
    the rest is derived from.
    """
    found = Origins(set(), set())
    return found if _find_origins(edge, is_saved, in_part, found, 0) else None


def _find_origins(
    edge: _Edge,
    is_saved: Callable[[_Edge], bool],
    in_part: Callable[[_Edge], bool] | None,
    found: Origins,
    depth: int,
) -> bool:
    """Whether all are there, as far as one edge shows."""
    node: Any = None
    for passed in _passed_through(edge):
        if depth and is_saved_elsewhere(passed):
            return False
        if depth and passed[0] is not None and is_saved(passed):
            found.edges.add(passed)
            if in_part is None or not in_part(passed):
                return True
        node = passed[0]
    if node is None or hasattr(node, STARTS) or depth > _LONGEST:
        return False
    if hasattr(node, "variable"):
        return bool(depth) and isinstance(node.variable, nn.Parameter)
    operands = _unsaved_operands(node)
    if len(operands) < len(node.next_functions) or not operands:
        found.makers.add(node)
    return all(_find_origins(below, is_saved, in_part, found, depth + 1) for below in operands if below[0] is not None)


def note_saved_in_block(start: Tensor, tensor: Tensor) -> None:
    """A block has run whose graph starts at one tensor in place of another. Where it has saved the first, what is made
    of the second outside of it is made of that."""
    if saved_at(_edge_of(start)) is not None:
        for edge in _passed_through(_edge_of(tensor)):
            note_saved_elsewhere(edge)


def _unsaved_operands(node: Any) -> Sequence[_Edge]:
    """The operands of a node that it has not saved, as far as it is known to save none or to be a product."""
    name, below = node.name(), node.next_functions
    if name in _WITHOUT_OPERANDS or name == FILLS:
        return below
    if name in _PRODUCTS:
        return [edge for edge, slot in zip(below, _FACTORS, strict=True) if saved_handle(node, slot) is None]
    return ()


class _Making(NamedTuple):
    """What is wanted."""

    numel: int
    fraction: float
    """of the elements in a step"""
    reads: Reads
    """notes what is read of the graph"""
    made: dict[Any, Expression | AttentionResult]
    """what the recipe has for what edges give, by edge, is_part and is_of_scores"""
    is_part: bool = False
    """whether it may be a part of a distributed tensor"""
    number: int = 0
    """of the node's output"""
    tensor: Tensor | None = None
    """itself, where it is not an operand"""
    is_of_scores: bool = False
    """whether it is what attention takes the softmax of: made of a product of matrices, and never of what is stored of
    the scores, whose rounding an exponential would multiply"""
    masks: Masks = NO_MASKS
    """that earlier steps have found; see [Note: hidden scores] in hidden_scores.py"""

    def of_shape(self, shape: Sequence[int]) -> _Making:
        """The same of another tensor."""
        return self._replace(numel=prod(shape), number=0, tensor=None)


class _NotDerivable(Exception):
    """Something that an operator needs is not there."""


class _NoRecipe(_NotDerivable):
    """An operator, or a tensor without one, that no recipe is known for; or one that makes what none is for."""

    def __init__(self, node: Any) -> None:
        super().__init__()
        self.node = node


@dataclass
class DerivedNames:
    """Of saved tensors."""

    made: dict[str, int] = field(default_factory=dict)
    """that the latest forward made from others, and their elements in a step"""
    again: dict[str, int] = field(default_factory=dict)
    """the same of what is derived from the next measurement on: what blocks save that run again in a backward, which no
    forward of a step shows, and what can be made since others are stored; 0 for what cannot be"""
    stored_anyway: set[str] = field(default_factory=set)
    """that could be, but whose effect through what they are made of is not measured: that lies in another block, or
    the block is perturbed"""


class Derived:
    """Which saved tensors of a model are made again from others."""

    def __init__(self, made: dict[str, int] | None = None) -> None:
        """made: as in DerivedNames."""
        self.names = DerivedNames(made or {})
        self._without_recipe: dict[str, Way | None] = {}  # the way to an operator that no recipe is known for
        self._beginning: dict[str, int] = {}  # of DerivedNames.again, what the measurement that runs derives
        self._met: set[str] = set()  # of these, what it has met
        self.masks: dict[str, Masks] = {}
        """of probabilities, as an observed step has found them"""

    def recipe(
        self,
        name: str,
        tensor: Tensor,
        fraction: float,
        graph: InGraph,
        has_bits: bool = False,
        reads: Reads | None = None,
    ) -> Recipe | Unsaved | None:
        """How to make a tensor that is saved in a step, None if it is stored. fraction, reads: as for _recipe_of().
        has_bits: whether a measurement of it, as stored, has chosen some: then it is stored until the next. tensor: may
        be a meta tensor that is like it, which only learns whether there is a recipe."""
        names = self.names
        self._without_recipe.pop(name, None)
        waits = has_bits and name not in names.made
        found = None
        if not (self.stores(name) if waits else name in names.stored_anyway):
            found = self._search(name, tensor, fraction, graph, reads)
            if isinstance(found, Unsaved) and found.is_expected:
                return found
            if not isinstance(found, Recipe):
                names.again.pop(name, None)
        if not isinstance(found, Recipe):
            names.made.pop(name, None)
            return found
        (names.again if waits else names.made)[name] = round(tensor.numel() / fraction)
        return None if waits else found

    def _search(
        self, name: str, tensor: Tensor, fraction: float, graph: InGraph, reads: Reads | None
    ) -> Recipe | Unsaved | None:
        """A recipe; where an operator has none, the way to it is remembered."""
        reads = Reads() if reads is None else reads
        try:
            return _recipe_in(graph, tensor, fraction, reads, self.masks.get(name, NO_MASKS))
        except _NotDerivable as refused:
            if isinstance(refused, _NoRecipe):
                self._without_recipe[name] = _way_to(refused.node, graph.edge[0], reads)
            return self._unsaved(name, reads)
        finally:
            if reads.masks is not None:
                self.masks[name] = reads.masks

    def _unsaved(self, name: str, reads: Reads) -> Unsaved | None:
        edges = [(node, output) for node, output, handle in reads.handles if handle is None and type(output) is int]
        return Unsaved(tuple(edges), name in self.names.made) if edges else None

    def forget(self, name: str) -> None:
        """A forward has not made a tensor that others had made."""
        self.names.made.pop(name, None)

    def stores(self, name: str) -> bool:
        """Whether a tensor is stored, for good or until the next measurement, though it could be made."""
        return name in self.names.stored_anyway or (name in self.names.again and name not in self.names.made)

    def way_without_recipe(self, name: str) -> Way | None:
        """Where a tensor is stored, whatever else is, that recipe() has met: its way to an operator without recipe."""
        return self._without_recipe.get(name)

    def recipe_again(self, name: str, tensor: Tensor, graph: InGraph) -> Recipe | Unsaved | None:
        """The same in a block that runs again in a backward, for what a measurement of that block derived."""
        reads = Reads()
        if name not in self.names.made:
            return None
        try:
            return _recipe_in(graph, tensor, 1.0, reads)
        except _NotDerivable:
            return self._unsaved(name, reads)

    def note_again(self, name: str, tensor: Tensor, graph: InGraph, anew: bool = False) -> Unsaved | None:
        """A block saves a tensor while it runs again in a backward of the job. tensor: as for recipe(). anew: whether
        more is saved than when it was noted before."""
        reads = Reads()
        if name in self.names.again and not anew:
            return None
        try:
            found = _recipe_in(graph, tensor, 1.0, reads)
            self.names.again[name] = 0 if found is None else tensor.numel()
        except _NotDerivable:
            self.names.again[name] = 0
            return self._unsaved(name, reads)
        return None

    def begin(self) -> None:
        """A measurement begins whose bits are those of a new plan: it derives what may be derived from then on."""
        names = self.names
        new = names.again.keys() - names.made.keys() - names.stored_anyway
        self._beginning = {name: names.again[name] for name in new if names.again[name]}
        self._met.clear()

    def adopt(self) -> None:
        """There is a new plan: steps derive what its measurement has."""
        self.names.made.update((name, n) for name, n in self._beginning.items() if name in self._met)
        self._beginning.clear()

    def is_measured(self, name: str, graph: Tensor) -> bool:
        """Whether a tensor that is saved in a measurement is one that steps derive, from others of the same part.

        graph: as for recipe().
        """
        if name in self.elements and origins_of(_edge_of(graph), _is_saved) is None:
            self.store(name)
        self._met.add(name)
        return name in self.elements

    def store(self, name: str) -> None:
        """From now on store a tensor that was derived, or was to be."""
        if name not in self.elements:
            return
        self.names.stored_anyway.add(name)
        self.names.made.pop(name, None)
        self._beginning.pop(name, None)

    @property
    def elements(self) -> Mapping[str, int]:
        """Of tensors that a step of this rank makes from others, or is to make under the plan that is measured for."""
        return ChainMap(self.names.made, self._beginning)

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain values."""
        names = self.names
        learnt = {"elements": names.made, "again": names.again}
        plain = {key: dict(sorted(elements.items())) for key, elements in learnt.items()}
        return {**plain, "stored_anyway": sorted(names.stored_anyway)}

    @staticmethod
    def parse_state(name: str, value: Any) -> DerivedNames:
        """What state_dict() gave. Raises StateError."""
        learnt = _fields.mapping(_fields.anything)(name, value)
        return DerivedNames(
            _fields.read(learnt, "elements", _fields.mapping(_fields.integer(0)), {}),
            _fields.read(learnt, "again", _fields.mapping(_fields.integer(0)), {}),
            set(_fields.read(learnt, "stored_anyway", _fields.sequence(_fields.text), [])),
        )


def recipe_of(
    tensor: Tensor, edge: _Edge, fraction: float = 1.0, is_part: bool = False, masks: Masks = NO_MASKS
) -> Recipe | None:
    """How to make a tensor from what the graph holds of others; None where it has to be stored.

    edge: that gives it, or the distributed tensor whose part it is. fraction: of the tensor's elements in a step, which
    are there. is_part: whether it is a part of a distributed one. masks: see _Making.
    """
    try:
        return _recipe_of(tensor, edge, fraction, is_part, masks=masks)
    except _NotDerivable:
        return None


def _recipe_of(
    tensor: Tensor, edge: _Edge, fraction: float, is_part: bool, reads: Reads | None = None, masks: Masks = NO_MASKS
) -> Recipe | None:
    """As recipe_of(). reads: notes what is read of the graph. Raises _NotDerivable."""
    if type(tensor) not in PLAIN or not tensor.is_floating_point() or span(tensor) != tensor.numel():
        raise _NoRecipe(edge[0])
    itself = None if tensor.is_meta else tensor
    wanted = _Making(tensor.numel(), fraction, reads or Reads(), {}, is_part, tensor=itself, masks=masks)
    recipe = Recipe(_made_by(edge, wanted, 0), tensor)
    return recipe if recipe.work <= _MOST_WORK * tensor.numel() else None


def _recipe_in(graph: InGraph, tensor: Tensor, fraction: float, reads: Reads, masks: Masks = NO_MASKS) -> Recipe | None:
    """As _recipe_of()."""
    found = _recipe_of(tensor, graph.edge, fraction, graph.is_part, reads, masks)
    is_circular = found is not None and graph.stored is not None and is_made_from(found, graph.stored)
    return None if is_circular else found


def _way_to(end: Any, node: Any, reads: Reads) -> Way | None:
    """From a node to one that no recipe is known for, past others whose results are not saved."""
    way = find_way(node, partial(is_, end))
    if way is None:
        return None
    not_saved = [(found, output) for found, output, handle in reads.handles if handle is None and type(output) is int]
    blanks = [
        (number, mark_at(output))
        for number, found in enumerate(way.follow(node) or ())
        for output in dict.fromkeys(output for other, output in not_saved if other is found is not None)
    ]
    return way._replace(blanks=tuple(blanks))


def _is_saved(edge: _Edge) -> bool:
    return saved_at(edge) is not None


def _edge_of(tensor: Tensor) -> _Edge:
    return tensor.grad_fn, tensor.output_nr


def made_by(record: Recorded) -> _Edge:
    """What computed a recorded tensor, in another shape perhaps; no graph for other views."""
    tensor, whole = record.tensor, own_part(record.origin)
    same = tensor.shape == whole.shape and tensor.stride() == whole.stride()
    reshaped = tensor.numel() == whole.numel() and tensor.is_contiguous() and whole.is_contiguous()
    return (record.node, record.output_number) if same or reshaped else (None, 0)


def _made_by(edge: _Edge, wanted: _Making, depth: int) -> Expression | AttentionResult:
    """What an edge gives: what is saved of it, but for the tensor that is wanted itself, or else as it was made."""
    node, number, name, is_part = None, 0, "", wanted.is_part
    for node, number in _passed_through(edge):
        if node is None:
            raise _NoRecipe(None)
        name = node.name()
        is_part = is_part or name in CONVERSIONS
        if depth and not (is_part or name in _NOT_AS_SAVED or wanted.is_of_scores):
            handle = wanted.reads.at((node, number))
            if handle is not None and _is_stored(handle) and numel_of(handle) == wanted.numel:
                return Expression(Tensor.detach, handle, is_private=None, local=AS_IT_IS)
    make = _OPERATORS.get(name)
    if make is None or (wanted.is_of_scores and name not in _OF_SCORES):
        raise _NoRecipe(node)
    place = node, number, is_part, wanted.is_of_scores
    known = wanted.made.get(place)
    if known is not None:
        if isinstance(known, Expression):
            known.uses += 1
        return known
    if depth >= _LONGEST or hasattr(node, STARTS) or (number and name not in _OF_SEVERAL_RESULTS):
        raise _NotDerivable
    made = make(node, wanted._replace(is_part=is_part, number=number), depth)
    if isinstance(made, Expression) and name not in _WRITE_NOTHING:
        made.writes(wanted.numel)
    wanted.made[place] = made
    return made


def _operand(node: Any, slot: str, edge: int, wanted: _Making, depth: int) -> Any:
    """An operand with as many elements as the result: what the node saved, or what made it."""
    saved, below = wanted.reads.saved(node, slot), node.next_functions[edge]
    handle = _here(saved)
    if handle is None:
        return _made_by(below, wanted, depth + 1)
    if handle is saved and _is_clone(handle, below, wanted):
        raise _NotDerivable
    if _is_given(handle) and handle.tensor.numel() == wanted.numel:
        return handle
    if not _is_stored(handle) or numel_of(handle) != wanted.numel or below[0] is None:
        raise _NotDerivable
    return handle


def _is_clone(handle: Any, below: _Edge, wanted: _Making) -> bool:
    """Whether an operator writes over its operand and so has saved a clone, with an edge of its own.

    What is stored of it would not be reached by way of the result, as the sensitivity is; what is derived itself has
    the source that the result has.
    """
    base = base_of(handle)
    if not _is_stored(handle) or hasattr(below[0], "variable"):  # a leaf, which nothing may write over
        return False
    is_derived = isinstance(base, Stored) and isinstance(base.payload, Recipe)
    return not is_derived and base_of(wanted.reads.at(below)) is not base


def _here(handle: Any) -> Any:
    """The handle of this rank's part of a distributed tensor; any other handle as it is."""
    if not isinstance(handle, Distributed) or handle.layout is None:
        return handle
    if handle.layout.is_pending:
        raise _NotDerivable
    return handle.local


def _layouts(wanted: _Making, node: Any, *slots: str) -> list[Layout]:
    """Of what a node saved of distributed tensors."""
    handles = (wanted.reads.saved(node, slot) for slot in slots)
    return [handle.layout for handle in handles if isinstance(handle, Distributed) and handle.layout is not None]


def _is_stored(handle: Any) -> bool:
    return isinstance(base_of(handle), (Stored, Replaceable))


def _is_given(handle: Any) -> bool:
    """Whether it is of the batch or of a buffer, which are there unrounded."""
    return isinstance(handle, Kept) and (handle.is_buffer or not handle.of_model) and type(handle.tensor) in PLAIN


def _statistic(node: Any, slot: str, wanted: _Making) -> Any:
    handle = _here(wanted.reads.saved(node, slot))
    if handle is None or not _is_stored(handle):
        raise _NotDerivable
    return handle


def _statistics(node: Any, wanted: _Making) -> tuple[Any, Any]:
    return _statistic(node, "result1", wanted), _statistic(node, "result2", wanted)


def _vector(node: Any, slot: str, wanted: _Making) -> Any:
    """A norm's weight or bias as it was saved; None stands for none."""
    handle = wanted.reads.saved(node, slot)
    if handle is None or not isinstance(handle, Kept):
        return Copy(None) if handle is None else _statistic(node, slot, wanted)
    return wanted.reads.copied(_small(handle.vector, wanted), node, slot)


def _bias(node: Any, wanted: _Making) -> Copy:
    """The bias of a norm that saved its weight alone; where sharding has taken it away, that cannot be derived."""
    weight = wanted.reads.saved(node, "weight")
    if weight is None:
        return Copy(None)
    source = node.next_functions[2][0]
    bias: Any = getattr(source, "variable", None)  # None if frozen, or made from other parameters
    if not isinstance(weight, Kept):
        raise _NotDerivable
    return _parameter(source, bias, weight.tensor.shape, wanted)


def _small(vector: Tensor | None, wanted: _Making) -> Copy:
    if vector is None or vector.numel() * _VECTOR_FRACTION * wanted.fraction > wanted.numel:
        raise _NotDerivable
    return Copy(vector)


_Operator = Callable[[Any, _Making, int], Expression | AttentionResult]

# -- operators ----------------------------------------------------------------------------------------------------


def _wide(tensor: Tensor) -> Tensor:
    """In the precision in which norms are computed."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _standardised(x: Tensor, mean: Tensor, rstd: Tensor, out: Tensor | None) -> Tensor:
    """x: [rows, columns]; mean, rstd: of each row. out: x, if its memory may be used."""
    centred = torch.sub(x, mean.to(x.dtype).reshape(-1, 1), out=out)  # both in vectors, which addcmul is not here
    return centred.mul_(rstd.to(x.dtype).reshape(-1, 1))


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In place."""
    if weight is not None and bias is not None and weight.dim() == 1:
        return torch.addcmul(bias.to(y.dtype), y, weight.to(y.dtype), out=y)
    if weight is not None:
        y.mul_(weight)
    return y if bias is None else y.add_(bias)


def _check_rows(wanted: _Making, node: Any, *slots: str) -> None:
    """What a norm over the last dimensions saved lies on the ranks alike."""
    layouts = _layouts(wanted, node, *slots)
    if any(layout.mesh != layouts[0].mesh or layout.placements != layouts[0].placements for layout in layouts):
        raise _NotDerivable


def _normalised(
    owns: bool, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    made = codec.normalised(x, mean, rstd, weight, bias, in_place=owns)
    if made is not None:
        return made
    rows = _wide(x).reshape(mean.numel(), -1)
    y = _standardised(rows, mean, rstd, rows if owns else None)
    return _scaled(y, *(None if vector is None else vector.reshape(-1) for vector in (weight, bias)))


def _layer_norm(node: Any, wanted: _Making, depth: int) -> Expression:
    _check_rows(wanted, node, "input", "result1", "result2")
    operands = _operand(node, "input", 0, wanted, depth), *_statistics(node, wanted)
    vectors = [_vector(node, slot, wanted) for slot in ("weight", "bias")]
    return _either(_normalised, *operands, *vectors, local=_of_rows(_normalised, operands, wanted))


def _of_rows(function: Callable[..., Tensor], operands: Sequence[Any], wanted: _Making) -> Local:
    """Of a norm that has statistics of each row. operands: what is normalised, and these."""
    _, *statistics = operands
    row, count = wanted.numel // numel_of(statistics[0]), len(statistics)

    def of_piece(_: Order, first: int, last: int, x: Tensor, *others: Tensor) -> Tensor:
        rows = slice(first // row, last // row)
        of_these = (each.reshape(-1)[rows] for each in others[:count])
        return function(True, x, *of_these, *others[count:]).view(-1)

    return Local(of_piece, unit=row, shape=())


def over_root_mean_square(owns: bool, x: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """What torch's own RMS norm computes, in rows. owns: whether it may write to x. rstd: of each row."""
    made = codec.normalised(x, None, rstd, weight, None, in_place=owns)
    if made is not None:
        return made
    rows = _wide(x).reshape(rstd.numel(), -1)
    y = torch.mul(rows, rstd.to(rows.dtype).reshape(-1, 1), out=rows if owns else None)
    return _scaled(y, None if weight is None else weight.reshape(-1), None)


def _rms_norm(node: Any, wanted: _Making, depth: int) -> Expression:
    """Of the fused operator of GPUs; on a CPU it is products."""
    _check_rows(wanted, node, "input", "result1")
    operands = _operand(node, "input", 0, wanted, depth), _statistic(node, "result1", wanted)
    weight = _vector(node, "weight", wanted)
    local = _of_rows(over_root_mean_square, operands, wanted)
    return _either(over_root_mean_square, *operands, weight, local=local)


def _group_norm(node: Any, wanted: _Making, depth: int) -> Expression:
    if _layouts(wanted, node, "input"):
        raise _NotDerivable
    batch, channels = node._saved_N, node._saved_C

    def normalised(owns: bool, x: Tensor, mean: Tensor, rstd: Tensor, *vectors: Tensor | None) -> Tensor:
        rows = _wide(x).reshape(mean.numel(), -1)
        y = _standardised(rows, mean, rstd, rows if owns else None).view(batch, channels, -1)
        return _scaled(y, *(None if vector is None else vector.view(-1, 1) for vector in vectors)).view(x.shape)

    operands = _operand(node, "input", 0, wanted, depth), *_statistics(node, wanted)
    return _either(normalised, *operands, _vector(node, "weight", wanted), _bias(node, wanted))


def _batch_norm(node: Any, wanted: _Making, depth: int) -> Expression:
    if not node._saved_training or _layouts(wanted, node, "input"):
        raise _NotDerivable

    def normalised(
        owns: bool, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        x = _wide(x)
        scale = rstd.to(x.dtype) if weight is None else rstd.to(x.dtype) * weight
        shift = mean.to(x.dtype).mul(scale).neg_()
        shift = shift if bias is None else shift.add_(bias)
        form = (-1, *(1,) * (x.dim() - 2))
        return torch.addcmul(shift.view(form), x, scale.view(form), out=x if owns else None)

    shape = torch.Size(node._input_metadata[0].shape)
    operands = _operand(node, "input", 0, wanted, depth), *_statistics(node, wanted)
    others = *operands[1:], _vector(node, "weight", wanted), _bias(node, wanted)

    def of_piece(order: Order, first: int, last: int, x: Tensor, *others: Tensor) -> Tensor:
        examples = (last - first) // shape[1:].numel(), *shape[1:]
        laid_out = x.as_strided(examples, order[1]) if order else x.view(examples)
        made = normalised(True, laid_out, *others)
        return made.as_strided((x.numel(),), (1,))

    return _either(normalised, operands[0], *others, local=Local(of_piece, unit=shape[1:].numel(), shape=shape))


def _either(function: Callable[..., Tensor], *operands: Any, local: Local | None = None) -> Expression:
    """function(owns, *operands). owns: whether it may write to the first of them."""
    return Expression(partial(function, False), *operands, in_place=partial(function, True), local=local)


def _pointwise(
    function: Callable[..., Tensor], in_place: Callable[..., Tensor] | None = None, **constants: str
) -> _Operator:
    """An operator that saves its input. constants: its other arguments, by the node's names for them."""

    def made(node: Any, wanted: _Making, depth: int) -> Expression:
        values = {name: getattr(node, f"_saved_{slot}") for name, slot in constants.items()}
        new = partial(function, **values)
        over = None if in_place is None else partial(in_place, **values)
        local = Local(lambda _order, _first, _last, x: (over or new)(x))
        gelu = values.get("approximate")
        return Expression(new, _operand(node, "self", 0, wanted, depth), in_place=over, local=local, gelu=gelu)

    return made


def _product(node: Any, wanted: _Making, depth: int) -> Expression:
    """One of two factors has all elements, and the other may be broadcast; a saved factor may be a parameter."""
    factors = [_factor(node, slot, edge, wanted, depth) for edge, slot in enumerate(("self", "other"))]
    shape = node._input_metadata[0].shape
    if wanted.is_of_scores and any(_is_stored(each) and numel_of(each) == wanted.numel for each in factors):
        raise _NoRecipe(node)
    layouts = _layouts(wanted, node, "self", "other")
    if layouts:
        result = next((layout for layout in layouts if layout.shape == tuple(shape)), None)
        if result is None or not all(layout.fits(result) for layout in layouts):
            raise _NotDerivable
        splits_last = any(placement.is_shard(len(shape) - 1) for placement in result.placements)
        if splits_last and any(isinstance(factor, Copy) for factor in factors):
            raise _NotDerivable
    if prod(shape) != wanted.numel and any(isinstance(factor, Expression) for factor in factors):
        raise _NotDerivable  # a part, of a shape that is not known
    are_whole = prod(shape) == wanted.numel and all(
        isinstance(factor, Expression) or (_is_stored(factor) and numel_of(factor) == wanted.numel)
        for factor in factors
    )
    numbers = [isinstance(factor, Copy) and factor.tensor is not None and not factor.tensor.dim() for factor in factors]
    factors = [_in_shape(shape, factor) for factor in factors]
    if numbers == [False, True] and not wanted.is_part:
        return Expression(torch.mul, *factors, in_place=_multiplied, local=_BY_NUMBER)
    return Expression(torch.mul, *factors, in_place=_multiplied, local=_OF_PRODUCT if are_whole else None)


def _quotient(node: Any, wanted: _Making, depth: int) -> Expression:
    """By a number, as x / 8: what a backward divides by is exact in any case, and so is a quotient's other operand."""
    divisor = wanted.reads.saved(node, "other")
    if wanted.is_part or not isinstance(divisor, Tensor) or divisor.dim():
        raise _NotDerivable
    number = wanted.reads.copied(Copy(divisor), node, "other")
    return Expression(torch.div, _term(node.next_functions[0], wanted, depth), number)


def _power(node: Any, wanted: _Making, depth: int) -> Expression | AttentionResult:
    """By a whole number: others have poles, or are not there of what rounding has made negative."""
    exponent = node._saved_exponent
    if not isinstance(exponent, (int, float)) or exponent != int(exponent) or exponent < 1:
        raise _NotDerivable
    return _whole_power(node, wanted, depth)


def _multiplied(x: Tensor, y: Tensor) -> Tensor:
    """In the memory of x where the product has its shape and type."""
    return x.mul_(y) if _takes(x, y) else torch.mul(x, y)


def _takes(x: Tensor, y: Tensor) -> bool:
    """Whether x has the shape and the type of what both give."""
    if x.dtype != torch.result_type(x, y):
        return False
    sizes = y.shape
    return not sizes or sizes == x.shape or x.shape == torch.broadcast_shapes(x.shape, sizes)


_BY_NUMBER = Local(lambda _order, _first, _last, x, number: _multiplied(x, number))
_OF_PRODUCT = Local(lambda _order, _first, _last, x, y: _multiplied(x, y), operands=2)


def _in_shape(shape: Sequence[int], factor: Any) -> Any:
    """What was made has the elements of an operand in its order, and perhaps another shape: that from before a view, or
    the rows of a norm."""
    if not isinstance(factor, Expression):
        return factor
    local = AS_IT_IS._replace(shape=shape)
    return Expression(lambda made: made.reshape(shape), factor, is_private=None, local=local)


def _factor(node: Any, slot: str, edge: int, wanted: _Making, depth: int) -> Any:
    handle = _here(wanted.reads.saved(node, slot))
    if isinstance(handle, Tensor) and not handle.dim():  # a number, which torch shows to no hook
        return wanted.reads.copied(Copy(handle), node, slot)
    if _is_given(handle):
        return handle
    if isinstance(handle, Kept):
        return wanted.reads.copied(_small(handle.vector, wanted), node, slot)
    if handle is not None and _is_stored(handle):
        if node.next_functions[edge][0] is None and is_rounded(handle):
            raise _NotDerivable
        return handle
    return _operand(node, slot, edge, wanted, depth)


def _cast(node: Any, wanted: _Making, depth: int) -> Expression | AttentionResult:
    """The recipe knows the type that is asked for in the end, and intermediate ones make little difference."""
    return _made_by(node.next_functions[0], wanted, depth + 1)


def _shape_of(edge: _Edge) -> tuple[int, ...]:
    """Of what an edge gives."""
    node, number = edge
    if node is None or number >= len(node._input_metadata):
        raise _NotDerivable
    return tuple(node._input_metadata[number].shape)


def _term(edge: _Edge, wanted: _Making, depth: int) -> Any:
    """An operand that its operator has not saved, in its own shape."""
    node, _ = edge
    if node is None:
        raise _NotDerivable
    if hasattr(node, "variable"):
        return _parameter(node, node.variable, node.variable.shape, wanted)
    shape = _shape_of(edge)
    *_, (source, _) = _passed_through(edge)
    if hasattr(source, "variable"):
        return _parameter(source, source.variable, shape, wanted)
    return _in_shape(shape, _made_by(edge, wanted.of_shape(shape), depth + 1))


def _parameter(node: Any, parameter: Any, shape: Sequence[int], wanted: _Making) -> Copy:
    """A small one, in a shape. node: that accumulates its gradient."""
    vector = vector_of_parameter(parameter, shape)
    return wanted.reads.copied(_small(vector, wanted), node, VARIABLE)


def _check_whole(node: Any, wanted: _Making) -> tuple[int, ...]:
    """The shape of what a node gives; no part of a distributed tensor, whose shape on this rank is not known."""
    shape = _shape_of((node, wanted.number))
    if wanted.is_part or prod(shape) != wanted.numel:
        raise _NotDerivable
    return shape


def _sum(factors: Callable[[float], tuple[float, float]]) -> _Operator:
    """factors(alpha): what the two operands are multiplied with."""

    def made(node: Any, wanted: _Making, depth: int) -> Expression:
        shape, edges, by = _check_whole(node, wanted), node.next_functions, factors(node._saved_alpha)
        if any(below is None for below, _ in edges):
            return _plus_number(node, wanted, depth, by)
        if _shape_of_term(edges[0]) != shape:  # what is written to has all elements
            edges, by = edges[::-1], by[::-1]
        first, second = (_term(edge, wanted, depth) for edge in edges)
        is_local = not wanted.is_part and all(_shape_of_term(edge) == shape for edge in edges)
        local = Local(lambda _order, _first, _last, x, y: _added(by, True, x, y), operands=2) if is_local else None
        return _either(partial(_added, by), first, second, local=local)

    return made


def _plus_number(node: Any, wanted: _Making, depth: int, by: tuple[float, float]) -> Expression:
    """Of one operand with a graph; see [Note: numbers] in expressions.py."""
    if depth or wanted.tensor is None:
        raise _NotDerivable
    seen = adds_number(node)
    if seen is not None:
        wanted.reads.masks = NO_MASKS._replace(is_number=seen)
    is_number = wanted.masks.is_number if seen is None else seen
    found = [(edge, factor) for edge, factor in zip(node.next_functions, by, strict=True) if edge[0] is not None]
    if not is_number or len(found) != 1:
        raise _NotDerivable
    ((edge, times),) = found
    operand = _term(edge, wanted, depth)
    local = Local(lambda _order, _first, _last, x, number: _with_number(times, True, x, number))
    return _either(partial(_with_number, times), operand, Number(wanted.tensor, operand, times), local=local)


def _with_number(times: float, owns: bool, x: Tensor, number: Tensor) -> Tensor:
    if times != 1:
        x, owns = x.mul_(times) if owns else x.mul(times), True
    return x.add_(number) if owns else x.add(number)


def _added(by: tuple[float, float], owns: bool, x: Tensor, y: Tensor) -> Tensor:
    """by[0] * x + by[1] * y, in the memory of x where that may be and can be."""
    fits = owns and _takes(x, y)
    if by[0] != 1:
        x = x.mul_(by[0]) if fits else x.mul(by[0])
    return x.add_(y, alpha=by[1]) if fits else torch.add(x, y, alpha=by[1])


def _shape_of_term(edge: _Edge) -> tuple[int, ...]:
    node, _ = edge
    return tuple(node.variable.shape) if hasattr(node, "variable") else _shape_of(edge)


def _joined(node: Any, wanted: _Making, depth: int) -> Expression:
    """cat and stack."""
    shape, edges = _check_whole(node, wanted), node.next_functions
    dimension = _signed(node._saved_dim)
    dimension += len(shape) if dimension < 0 else 0
    shapes = [list(_shape_of_term(edge)) for edge in edges if edge[0] is not None]
    if node.name() == "StackBackward0":
        shapes = [[*each[:dimension], 1, *each[dimension:]] for each in shapes]
    if len(shapes) != len(edges) or any(len(each) != len(shape) for each in shapes):
        raise _NotDerivable  # what has no graph is not known
    parts = [_term(edge, wanted, depth) for edge in edges]
    return Joined(parts, shapes, dimension, node._input_metadata[0].dtype)


def _moved(node: Any, wanted: _Making, depth: int) -> Expression:
    """A view or a copy of an operand, or a part of it that is not much smaller."""
    _check_whole(node, wanted)
    edge = node.next_functions[0]
    if prod(_shape_of_term(edge)) > wanted.numel * _WHOLE_FRACTION:
        raise _NotDerivable
    move = _MOVES[node.name()](node, wanted.number)
    return Expression(move, _term(edge, wanted, depth), is_private=None)


def _split(sizes: Callable[[Any], Sequence[int]]) -> Callable[[Any, int], Callable[[Tensor], Tensor]]:
    """One of the parts of a tensor. sizes: gives those of the parts, as a node has them."""

    def move(node: Any, number: int) -> Callable[[Tensor], Tensor]:
        parts = sizes(node)
        return partial(torch.narrow, dim=_signed(node._saved_dim), start=sum(parts[:number]), length=parts[number])

    return move


def _equal_parts(node: Any) -> list[int]:
    size, length = node._saved_split_size, node._saved_self_sym_sizes[_signed(node._saved_dim)]
    return [min(size, length - start) for start in range(0, length, size)]


def _slice(node: Any, _: int) -> Callable[[Tensor], Tensor]:
    where = {"dim": _signed(node._saved_dim), "start": _signed(node._saved_start), "end": _signed(node._saved_end)}
    return partial(torch.ops.aten.slice, **where, step=node._saved_step)


def _expand(node: Any, _: int) -> Callable[[Tensor], Tensor]:
    return partial(torch.broadcast_to, size=_shape_of((node, 0)))


def _signed(number: int) -> int:
    """An argument as it was given: nodes show negative ones as unsigned."""
    return number - 2**64 if number >= 2**63 else number


def _relu(node: Any, wanted: _Making, depth: int) -> Expression:
    mask = _here(wanted.reads.saved(node, "result"))
    payload = mask.payload if isinstance(mask, Stored) else None
    if not isinstance(payload, codec.Packed) or payload.scheme is not codec.Scheme.MASK:
        raise _NotDerivable
    made = _made_by(node.next_functions[0], wanted, depth + 1)
    return Expression(torch.mul, _in_shape(payload.shape, made), mask, in_place=_multiplied, local=_OF_PRODUCT)


def _by_one_bit(slot: str, in_place: Callable[..., Tensor], *limits: str | float) -> _Operator:
    """in_place(x, bits, *limits), in which each element of x stays in the piece that the one bit of it tells.

    slot: of what is stored in one bit, see one_bit.py. limits: or a node's names for them.
    """

    def made(node: Any, wanted: _Making, depth: int) -> Expression:
        bits = _here(wanted.reads.saved(node, slot))
        payload = bits.payload if isinstance(bits, Stored) else None
        if not isinstance(payload, codec.Packed) or payload.scheme not in _ONE_BIT:
            raise _NotDerivable
        given = [getattr(node, f"_saved_{limit}") if isinstance(limit, str) else limit for limit in limits]

        def over(x: Tensor, bits: Tensor) -> Tensor:
            return in_place(x, bits.to(x.dtype), *given)

        x = _in_shape(payload.shape, _made_by(node.next_functions[0], wanted, depth + 1))
        local = Local(lambda _order, _first, _last, x, bits: over(x, bits), operands=2)
        return Expression(lambda x, bits: over(x.clone(), bits), x, bits, in_place=over, local=local)

    return made


def _between(x: Tensor, bits: Tensor, low: float, high: float) -> Tensor:
    """hardtanh"""
    beyond = bits.ge(high).logical_or_(bits.le(low))
    is_low = beyond.logical_and(x.le(low / 2 + high / 2))
    return x.masked_fill_(beyond.logical_xor_(is_low), high).masked_fill_(is_low, low)


def _hardsigmoid(x: Tensor, bits: Tensor) -> Tensor:
    return _between(x, bits, -3.0, 3.0).div_(6.0).add_(0.5)


def _leaky_relu(x: Tensor, bits: Tensor, slope: float) -> Tensor:
    made: Tensor = torch.ops.aten.leaky_relu_backward.grad_input(x, bits, slope, False, grad_input=x)
    return made


def _of_operand(function: Callable[[Tensor], Tensor], in_place: Callable[[Tensor], Tensor]) -> _Operator:
    """A function that saves its result alone."""

    def made(node: Any, wanted: _Making, depth: int) -> Expression:
        x = _made_by(node.next_functions[0], wanted, depth + 1)
        local = Local(lambda _order, _first, _last, x: in_place(x))
        if not depth and isinstance(x, Expression) and 2 * x.work >= _MOST_WORK * wanted.numel:
            return Shared(function, x, in_place=in_place, local=local, reader=node.name())
        return Expression(function, x, in_place=in_place, local=local)

    return made


def _dropout(node: Any, wanted: _Making, depth: int) -> Expression:
    """Of the fused operator of GPUs; on a CPU it is a product."""
    if wanted.is_part:
        raise _NotDerivable
    mask, edge = _statistic(node, "result1", wanted), node.next_functions[0]
    scale = 1.0 / (1.0 - node._saved_p) if node._saved_p < 1 else 0.0

    def dropped(x: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, mask, out=out).mul_(scale)

    made = _in_shape(_shape_of((node, 0)), _made_by(edge, wanted, depth + 1))
    local = Local(lambda _order, _first, _last, x, mask: dropped(x, mask, x), operands=2)
    return Expression(dropped, made, mask, in_place=lambda x, mask: dropped(x, mask, x), local=local)


def _attention(node: Any, wanted: _Making, depth: int) -> Expression | AttentionResult:
    """See [Note: attention again] in fused_attention.py."""
    if depth:  # something is made from its output, which it has saved
        return Expression(Tensor.detach, _statistic(node, "output", wanted), is_private=False)
    edges = zip(("query", "key", "value"), node.next_functions, strict=False)
    if any(below is None and is_rounded(wanted.reads.saved(node, slot)) for slot, (below, _) in edges):
        raise _NotDerivable
    again = output_again(node)
    if again is None:
        raise _NotDerivable
    return wanted.reads.attention(again, node)


def _softmax(node: Any, wanted: _Making, depth: int) -> Expression:
    """See [Note: scores again] in attention_scores.py."""
    shape, dim, is_known = _check_whole(node, wanted), _signed(node._saved_dim), has_added(node)
    edge, masking = _before_masks(node.next_functions[0])
    masks = None
    if masking and not is_known:
        masks = masks_of(masking, wanted.masks)
        if is_observed(masking):
            wanted.reads.masks = masks or NO_MASKS
        if masks is None:
            raise _NoRecipe(masking[0])
        if depth or wanted.tensor is None:
            raise _NotDerivable
    elif len(masking) != is_known:
        raise _NotDerivable
    scores = (
        _masked_product(edge[0], wanted)
        if is_masked_product(edge[0])
        else _term(edge, wanted._replace(is_of_scores=True), depth)
    )
    operands: list[Any] = [wanted.reads.added(added_to(node), node)] if is_known else []
    if masks is not None and wanted.tensor is not None:
        operands = [Shown(wanted.tensor, dim, masks)]
    return Probabilities(node, dim, _in_shape(shape, scores), *operands)


def _before_masks(edge: _Edge) -> tuple[_Edge, list[Any]]:
    """What gives scores before they are masked, and the nodes that may mask them."""
    masking = []
    while edge[0] is not None and not hasattr(edge[0], STARTS):
        node, _ = edge
        if may_hide(node):
            masking.append(node)
        elif node.name() not in _BETWEEN_SCORES:
            break
        if is_masked_product(node):
            break
        edge = before(node)
    return edge, masking


def _matrix_product(node: Any, wanted: _Making, _: int) -> Expression:
    _check_whole(node, wanted)
    if not wanted.is_of_scores:
        raise _NoRecipe(node)
    return _product_of(node, wanted, 0, "self", "mat2")


def _masked_product(node: Any, wanted: _Making) -> Expression:
    """Without what is added to it."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise _NotDerivable
    return _product_of(node, wanted, 1, "batch1", "batch2")


def _product_of(node: Any, wanted: _Making, first: int, *slots: str) -> Expression:
    """first: the number of the first factor's edge."""
    operands, edges = [_statistic(node, slot, wanted) for slot in slots], node.next_functions[first:]
    if any(below is None and is_rounded(each) for (below, _), each in zip(edges, operands, strict=True)):
        raise _NotDerivable
    return Expression(torch.bmm, *operands)


_whole_power = _pointwise(torch.pow, torch.ops.aten.pow_, exponent="exponent")
_ONE_BIT = (codec.Scheme.MASK, codec.Scheme.BINARY)
_ELU = {name: name for name in ("alpha", "scale", "input_scale")}
_MOVES: dict[str, Callable[[Any, int], Callable[[Tensor], Tensor]]] = {
    "CloneBackward0": lambda *_: Tensor.detach,
    "TransposeBackward0": lambda node, _: partial(
        torch.transpose, dim0=_signed(node._saved_dim0), dim1=_signed(node._saved_dim1)
    ),
    "PermuteBackward0": lambda node, _: partial(torch.permute, dims=[*map(_signed, node._saved_dims)]),
    "TBackward0": lambda *_: torch.t,
    "ExpandBackward0": _expand,
    "SliceBackward0": _slice,
    "SelectBackward0": lambda node, _: partial(
        torch.select, dim=_signed(node._saved_dim), index=_signed(node._saved_index)
    ),
    "SplitBackward0": _split(_equal_parts),
    "SplitWithSizesBackward0": _split(lambda node: node._saved_split_sizes),
    "UnbindBackward0": lambda node, number: partial(torch.select, dim=_signed(node._saved_dim), index=number),
    "NegBackward0": lambda *_: torch.neg,
}
_OF_SEVERAL_RESULTS = frozenset(("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"))
_PRODUCTS = ("MulBackward0", "DivBackward0")
_FACTORS = ("self", "other")
_OPERATORS: dict[str, _Operator] = {
    "NativeLayerNormBackward0": _layer_norm,
    "FusedRmsNormBackward0": _rms_norm,
    "NativeGroupNormBackward0": _group_norm,
    "NativeBatchNormBackward0": _batch_norm,
    "GeluBackward0": _pointwise(F.gelu, torch.ops.aten.gelu_, approximate="approximate"),
    "SiluBackward0": _pointwise(F.silu, torch.ops.aten.silu_),
    "MishBackward0": _pointwise(F.mish, torch.ops.aten.mish_),
    "SoftplusBackward0": _pointwise(F.softplus, beta="beta", threshold="threshold"),
    "HardswishBackward0": _pointwise(F.hardswish, torch.ops.aten.hardswish_),
    "EluBackward0": _pointwise(torch.ops.aten.elu, torch.ops.aten.elu_, **_ELU),
    "CeluBackward0": _pointwise(torch.celu, torch.celu_, alpha="alpha"),
    "PowBackward0": _power,
    "MulBackward0": _product,
    "DivBackward0": _quotient,
    "BmmBackward0": _matrix_product,
    **dict.fromkeys(OPERATORS, _attention),
}
_WITHOUT_OPERANDS: dict[str, _Operator] = {
    "AddBackward0": _sum(lambda alpha: (1, alpha)),
    "SubBackward0": _sum(lambda alpha: (1, -alpha)),
    "RsubBackward0": _sum(lambda alpha: (-alpha, 1)),
    "CatBackward0": _joined,
    "StackBackward0": _joined,
    "ToCopyBackward0": _cast,
    "ReluBackward0": _relu,
    "HardtanhBackward0": _by_one_bit("self", _between, "min_val", "max_val"),
    "HardsigmoidBackward0": _by_one_bit("self", _hardsigmoid),
    "LeakyReluBackward0": _by_one_bit("self", _leaky_relu, "negative_slope"),
    "LeakyReluBackward1": _by_one_bit("result", _leaky_relu, "negative_slope"),
    "TanhBackward0": _of_operand(torch.tanh, torch.tanh_),
    "SigmoidBackward0": _of_operand(torch.sigmoid, torch.sigmoid_),
    "NativeDropoutBackward0": _dropout,
    **dict.fromkeys(SOFTMAXES, _softmax),
    **dict.fromkeys(_MOVES, _moved),
}
"""that save none of their operands"""
_WRITE_NOTHING = frozenset((*_MOVES, "ToCopyBackward0", *OPERATORS)) - {"NegBackward0"}
"""in a recipe: views, and what is stored"""
_OPERATORS |= _WITHOUT_OPERANDS
_OF_SCORES = frozenset(("MulBackward0", "DivBackward0", "BmmBackward0", "AddBackward0", "ToCopyBackward0", *_MOVES))
"""through which scores are made of a product of matrices"""
