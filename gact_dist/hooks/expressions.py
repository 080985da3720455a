"""Functions of what handles restore: what a recipe makes a tensor with. See [Note: derived] in derived.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import codec
from .._torch_internals import node_in_backward
from .aliases import span
from .handles import Recipe, Replaceable, Stored, View, base_of
from .hidden_scores import Shown
from .streamed import Decoded, Made, Order, Pieces, Whole, order_of, small_pieces


class Local(NamedTuple):
    """How to make a piece of a result from the same pieces of the first operands. See [Note: streamed]."""

    function: Callable[..., Tensor]
    """function(order, first, last, *pieces, *values of the other operands), where elements lie in that order; else as
    in Made"""
    operands: int = 1
    """how many"""
    unit: int = 1
    shape: Sequence[int] | None = None
    """of the only tensors that may lie in another order than a contiguous one; None where all may"""

    def piece(self, order: Order, others: Sequence[Any], first: int, last: int, *pieces: Tensor) -> Tensor:
        """others: the other operands."""
        return self.function(order, first, last, *pieces, *[other.restore() for other in others])


AS_IT_IS = Local(lambda _order, _first, _last, piece: piece)


class Form(NamedTuple):
    """All of an expression but what it is a function of."""

    function: Any
    in_place: Callable[..., Tensor] | None
    """the same function in the memory of the first operand"""
    is_private: bool | None
    """whether the value is in new memory or in another tensor's; None where it is in that of the first operand"""
    local: Local | None
    written: int
    """elements that it writes itself"""
    nbytes: int
    gelu: str | None
    """what GELU's `approximate` is, if it is one"""


_Like = TypeVar("_Like", bound="Expression")


class Expression:
    """A function of what handles restore.

    [Note: work] What is derived costs time in place of memory. Its work is the number of elements that are written: by
    each of its operators and, of what is stored, by decoding it, each time that an operator reads it. What is made of
    other derived tensors has their work as well, as each reader makes all of it again. So a chain of sums ends, each of
    which takes another stored tensor. But a result that several operators of a recipe read is made once: a rotary
    embedding multiplies the same queries with the cosine and, their halves exchanged, with the sine. Views are for
    nothing, and casts, as the type of what is wanted is known.
    """

    __slots__ = ("_left", "_value", "form", "operands", "uses")
    counts_operands = True
    """as its work"""

    def __init__(
        self,
        function: Any,
        *operands: Any,
        in_place: Callable[..., Tensor] | None = None,
        is_private: bool | None = True,
        local: Local | None = None,
        gelu: str | None = None,
    ) -> None:
        """in_place, is_private, local, gelu: see Form."""
        nbytes = 0
        for operand in operands:
            if isinstance(operand, (Expression, Copy, Shown, Number)):
                nbytes += operand.nbytes
        self.form = Form(function, in_place, is_private, local, 0, nbytes, gelu)
        self.operands = operands
        self.uses = 1
        """operators of the recipe that read it"""
        self._value: Tensor | None = None  # for the readers that are left
        self._left = 0

    def writes(self, numel: int) -> None:
        """So many elements, itself."""
        self.form = self.form._replace(written=numel)

    def of(self: _Like, operands: tuple[Any, ...]) -> _Like:
        """The same function of others that are like its own."""
        made = type(self).__new__(type(self))
        made.form, made.operands, made.uses = self.form, operands, self.uses
        made._value, made._left = None, 0
        return made

    @property
    def nbytes(self) -> int:
        """Of what it keeps itself."""
        return self.form.nbytes

    @property
    def work(self) -> int:
        """Elements that are written to make it. See [Note: work]."""
        work, seen, pending = 0, set(), [self]
        while pending:
            expression = pending.pop()
            if id(expression) in seen:
                continue
            seen.add(id(expression))
            work += expression.form.written
            for operand in expression.operands if expression.counts_operands else ():
                if isinstance(operand, Expression):
                    pending.append(operand)
                else:
                    work += _work_of_stored(base_of(operand))
        return work

    @property
    def is_private(self) -> bool:
        """Whether nothing else reads the memory of its value."""
        if self.uses > 1:
            return False
        is_private = self.form.is_private
        return _is_private(self.operands[0]) if is_private is None else is_private

    def pieces(self, order: Order) -> Pieces | None:
        """See Stored.pieces()."""
        local = self.form.local
        if local is None or (order and local.shape is not None and order[0] != tuple(local.shape)):
            return None
        operands = []
        for operand in self.operands[: local.operands]:
            known = isinstance(operand, (Expression, Stored))
            found = operand.pieces(order) if known else _pieces_of_view(operand, order)
            if found is None:
                return None
            operands.append(found)
        if self.form.gelu is not None and isinstance(operands[0], Decoded) and operands[0].apply(self.form.gelu):
            return operands[0]
        return Made(partial(local.piece, order, self.operands[local.operands :]), operands, local.unit)

    def restore(self) -> Tensor:
        """Its value, which stays until the last operator of the recipe has it."""
        if self.uses == 1:
            return self.make()
        value = self.make() if self._value is None else self._value
        self._left = (self._left or self.uses) - 1
        self._value = value if self._left else None
        return value

    def make(self) -> Tensor:
        """Its value anew."""
        first, *others = self.operands
        if self.form.gelu is not None and isinstance(first, Stored):
            made = first.gelu(self.form.gelu)
            if made is not None:
                return made
        function, in_place = self.form.function, self.form.in_place
        owns = in_place is not None and _is_private(first)
        value = first.restore()
        if owns and span(value) == value.numel():  # no element repeats another
            function = in_place
        return function(value, *[operand.restore() for operand in others])


def _pieces_of_view(operand: Any, order: Order) -> Pieces | None:
    """See Stored.pieces(); of a view in another shape."""
    base = base_of(operand)
    if order or not isinstance(operand, View) or not isinstance(base, Stored) or operand.toggled:
        return None
    is_reshaped = base.numel == numel_of(operand) and not order_of(operand.size, operand.stride)
    return base.pieces(order) if is_reshaped else None


class _Join(NamedTuple):
    dimension: int
    dtype: torch.dtype
    shapes: Sequence[Sequence[int]]


class Joined(Expression):
    """Expressions side by side, of which one at a time is there beside the result."""

    __slots__ = ()

    def __init__(
        self, parts: Sequence[Any], shapes: Sequence[Sequence[int]], dimension: int, dtype: torch.dtype
    ) -> None:
        """shapes: of the parts, which may give their elements in other shapes."""
        super().__init__(_Join(dimension, dtype, shapes), *parts)

    def make(self) -> Tensor:
        """See Expression."""
        dimension, dtype, shapes = self.form.function
        shape = [*shapes[0]]
        shape[dimension] = sum(each[dimension] for each in shapes)
        value = self.operands[0].restore()
        joined = torch.empty(shape, dtype=dtype, device=value.device)
        places = joined.split([each[dimension] for each in shapes], dimension)
        places[0].copy_(value.reshape(shapes[0]))
        del value
        for part, of_part, place in zip(self.operands[1:], shapes[1:], places[1:], strict=True):
            place.copy_(part.restore().reshape(of_part))
        return joined


class Shared(Expression):
    """The result of a long chain of operators, made once for all that read it in a backward.

    [Note: shared] Of GELU by tanh, written in operators, what tanh saves is read by its own backward and by what is
    made of it: one more than that, and the product that a linear layer has saved. Each would make the chain again. So
    the first keeps it until tanh's own backward has read it, which is the last, or until the graph is gone. All
    operators of the chain work on a piece before the next piece, where that can be, and need no tensor in between.
    """

    __slots__ = ("_made", "_reader")
    keeps_what_it_made = True

    def __init__(self, *arguments: Any, reader: str, **options: Any) -> None:
        """reader: the name of the node that reads it last."""
        super().__init__(*arguments, **options)
        self._reader = reader
        self._made: Tensor | None = None

    def of(self, operands: tuple[Any, ...]) -> Shared:
        """See Expression."""
        made = super().of(operands)
        made._reader, made._made = self._reader, None
        return made

    @property
    def is_private(self) -> bool:
        """See Expression."""
        return False

    def pieces(self, order: Order) -> Pieces | None:
        """See Stored.pieces(); of what is kept."""
        return None if order or super().pieces(()) is None else Whole(self.restore())

    def make(self) -> Tensor:
        """See Expression."""
        made, self._made = self._made, None
        if made is None:
            made = self._in_pieces()
        reader = node_in_backward()
        if reader is not None and reader.name() != self._reader:
            self._made = made
        return made.detach()

    def _in_pieces(self) -> Tensor:
        pieces = super().pieces(())
        if pieces is None:
            return super().make()
        made: Tensor | None = None
        for first, last, piece in small_pieces(pieces):
            if made is None:
                made = piece.new_empty(pieces.numel)
            made[first:last] = piece
        return super().make() if made is None else made


class Copy:
    """A small vector that a recipe keeps itself, or None."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    def restore(self) -> Tensor | None:
        return self.tensor


class Number:
    """What was added to all elements of a tensor, as the difference of two means: nothing else shows it later.

    [Note: numbers] A sum saves neither its operands nor a number that it adds. The mean of its result is kept, and that
    of what the number was added to is taken when it is decoded. So the number may be another one in each step, and the
    mean of what is made is that of the forward, whatever rounding did to the mean of the operand. One element that is
    not finite makes all so, as it does the gradient of each weight that it reaches.
    """

    __slots__ = ("_added", "_mean", "_operand", "_times", "nbytes")

    def __init__(self, tensor: Tensor, operand: Any, times: float) -> None:
        """tensor: times * operand + the number."""
        self._mean, self._operand, self._times = _mean(tensor.detach()), operand, times
        self._added: Tensor | None = None
        self.nbytes = self._mean.nbytes

    def restore(self) -> Tensor:
        """Of no dimension, in float32 or float64."""
        if self._added is None:
            self._added, self._operand = self._mean - self._times * _mean_of(self._operand), None
        return self._added


def _mean_of(operand: Any) -> Tensor:
    """Of what a handle or an expression gives, piece by piece where that can be."""
    pieces = operand.pieces(()) if isinstance(operand, (Expression, Stored)) else None
    if pieces is None:  # made anew, as this is no reader that its uses count
        return _mean(operand.make() if isinstance(operand, Expression) else operand.restore())
    total = torch.zeros((), device=pieces.device)
    for _, _, piece in small_pieces(pieces):
        total = total + _mean(piece) * (piece.numel() / pieces.numel)
    return total


def _mean(tensor: Tensor) -> Tensor:
    return tensor.mean(dtype=torch.promote_types(tensor.dtype, torch.float32))


def is_rounded(handle: Any) -> bool:
    """Whether what is stored of it was."""
    base = base_of(handle)
    payload = base.payload if isinstance(base, Stored) else None
    return isinstance(payload, codec.Packed) and payload.scheme is codec.Scheme.QUANTISED


def _is_private(operand: Any) -> bool:
    """Whether an operand's value may be written to."""
    if isinstance(operand, Expression):
        return operand.is_private
    return is_rounded(operand) and base_of(operand).readers < 2


def _work_of_stored(base: Any) -> int:
    """See [Note: work]. base: of an operand's handle."""
    payload = base.payload if isinstance(base, Stored) else None
    if isinstance(payload, Recipe) and not payload.keeps_what_it_made:
        return payload.work
    return base.numel if isinstance(base, (Stored, Replaceable)) else 0


def numel_of(handle: Any) -> int:
    """Elements of what it stands for."""
    return handle.size.numel() if isinstance(handle, View) else handle.numel
