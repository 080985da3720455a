"""The saved tensors of a block that runs again, recognised by the order in which its first run saved them.

[Note: replay] A run of a block alone would name its saved tensors otherwise than the whole forward does (its input has
no producer there), and would take memory that another block has stored already for its own. So names, roles and aliases
are those of the forward, in which every block ran once to be noted; a second run with the same inputs, random numbers
and buffers saves the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import codec
from .._torch_internals import in_backward
from ..distributed import distributed_again, layout_of, own_part
from .handles import (
    Distributed,
    Kept,
    Noted,
    Recorded,
    Replaceable,
    ReplayError,
    Stored,
    View,
    base_of,
    count_reader,
    stored_of,
)
from .naming import edge_to, origin
from .repeated import Repeated, Repeats
from .saved_edges import note_saved

OF_MODEL = object()
"""among outcomes: what a block saves of the model itself; recipes are made with the small vectors among it"""


def firsts_of(outcomes: Iterable[Any]) -> list[Any]:
    """What a run has stored, in the order of saving; of views what they are views of."""
    return [stored_of(outcome) for outcome in outcomes if outcome is not None and outcome is not OF_MODEL]


def outcome_of(handle: Any) -> Any:
    """What a Replay has to know of a saved tensor that the first run made this handle of."""
    if not isinstance(handle, Kept):
        return handle
    return OF_MODEL if handle.of_model else None


@dataclass(eq=False)
class Replayed:
    """A tensor that a block saved again."""

    record: Recorded
    first: Any
    """what the forward made of it: its Noted, or the Noted or Replaceable of another block that holds this memory"""
    view: View | None
    """where it lies in that memory, None where it is the whole"""


def recorded(handle: Replaceable, tensor: Tensor, repeats: Repeats | None = None) -> Recorded:
    """What is recorded of a saved tensor. tensor: that has its graph. repeats: how that one repeats what is saved."""
    source = origin(tensor)
    whole: Tensor | None = None
    if not isinstance(handle.content, codec.Packed):
        whole = source.detach() if repeats is None else repeats.expanded(handle.tensor)
    return Recorded(handle.name, handle, whole, *edge_to(source), True)


def recorded_in(view: View, tensor: Tensor, whole: Tensor | None) -> tuple[Any, Replayed]:
    """(the handle, what is recorded) of a tensor of which the memory was stored by another. whole: as in Captured."""
    graph = tensor if whole is None else whole
    if not isinstance(view, Repeated):
        handle = Replaceable(tensor, view.base.name)
        return handle, Replayed(recorded(handle, graph), view.base, view)
    part = Replaceable(view.part(tensor), view.base.name)
    return view.over(part, tensor, view.offset), Replayed(recorded(part, graph, view.repeats), view.base, None)


def made_again(tensor: Tensor, first: Any, handle: Any) -> Replayed:
    """A result that a selective checkpoint keeps, in a block that has run again. first: what the forward made of it."""
    record = Recorded(getattr(first, "name", ""), handle, tensor.detach(), tensor.grad_fn, tensor.output_nr, True)
    return Replayed(record, first, None)


class Replay:
    """Keeps what one further run of a block saves, under the names of its first run."""

    def __init__(
        self, outcomes: Sequence[Any], own: set[Noted], keep: Callable[[Tensor, Any, Tensor], Replaceable | Stored]
    ) -> None:
        """outcomes: of the first run, from SavedTensorHooks.noting(): handles, OF_MODEL, or None for what is kept as it
        is. own: what the block itself stored in it.

        keep(tensor, first, graph): the handle that the graph is to hold; graph: the tensor, or the distributed one
        whose part on this rank it is. A tensor that is not stored but can be replaced is recorded as well.
        """
        self.found: list[Replayed] = []
        """what was recorded"""
        self._outcomes, self._own, self._keep = outcomes, own, keep
        self._handles: dict[Any, Replaceable | Stored] = {}
        self._next = 0

    def forget(self) -> None:
        """After the run: leave what was kept to the graph alone, which frees it as its backward goes on."""
        self.found.clear()
        self._handles.clear()

    def check_complete(self) -> None:
        """After the run: raise ReplayError if something was missing."""
        if self._next != len(self._outcomes):
            raise ReplayError(f"it saved {self._next} tensors for backward, {len(self._outcomes)} the first time")

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook of the run. Raises ReplayError where it differs from the first."""
        if in_backward():
            return Kept(tensor)
        if self._next == len(self._outcomes):
            raise ReplayError(f"it saved more than the {len(self._outcomes)} tensors for backward of the first time")
        outcome = self._outcomes[self._next]
        self._next += 1
        if outcome is None or outcome is OF_MODEL:
            return Kept(tensor, outcome is OF_MODEL, copies=outcome is OF_MODEL)
        handle = self._as_before(tensor, outcome)
        first = base_of(outcome)
        if not isinstance(outcome, Distributed) and not (isinstance(first, Noted) and first.is_one_bit):
            note_saved(tensor, handle)
        return handle

    def _as_before(self, tensor: Tensor, outcome: Any) -> Any:
        """The handle of a tensor of which this became in the first run."""
        if isinstance(outcome, Distributed):
            handle = self._again(own_part(tensor), outcome.local, tensor)
            return Distributed(handle, distributed_again(tensor), layout_of(tensor))
        return self._again(tensor, outcome)

    def _again(self, tensor: Tensor, outcome: Any, whole: Tensor | None = None) -> Any:
        """The handle of a tensor. whole: the distributed tensor whose local part it is."""
        if not isinstance(outcome, View):
            return self._take(tensor, outcome, None, whole)
        first = outcome.base
        if isinstance(outcome, Repeated):
            return outcome.over(self._part(outcome, tensor, first), tensor, outcome.offset)
        if first in self._handles:
            handle = self._handles[first]
            if isinstance(handle, Replaceable):  # a further input of the block may share the memory
                self._find(tensor if whole is None else whole, Replaceable(tensor), first, outcome)
            count_reader(handle)
            return View(handle, tensor, outcome.offset, outcome.toggled)
        if first not in self._own:
            return self._take(tensor, first, outcome, whole)
        if tensor.shape == first.shape:
            target = tensor
        elif tensor._base is not None:
            target = tensor._base
        else:
            raise ReplayError(f"{first.name!r} is no view, as it was the first time")
        return View(self._take(target, first, None, whole), tensor, outcome.offset, outcome.toggled)

    def _part(self, outcome: Repeated, tensor: Tensor, first: Any) -> Replaceable | Stored:
        """The handle of what a tensor repeats."""
        if first not in self._handles:
            return self._take(outcome.part(tensor), first, None, tensor, outcome.repeats)
        handle = self._handles[first]
        if isinstance(handle, Replaceable):
            self._find(tensor, handle, first, None, outcome.repeats)
        count_reader(handle)
        return handle

    def _take(
        self, tensor: Tensor, first: Any, view: View | None, whole: Tensor | None, repeats: Repeats | None = None
    ) -> Replaceable | Stored:
        if isinstance(first, Noted) and view is None and tensor.shape != first.shape:
            raise ReplayError(
                f"{first.name!r} has the shape {tuple(tensor.shape)}, the first time {tuple(first.shape)}"
            )
        handle = self._keep(tensor, first, tensor if whole is None or repeats is not None else whole)
        if view is None:
            self._handles[first] = handle
        if isinstance(handle, Replaceable):
            self._find(tensor if whole is None else whole, handle, first, view, repeats)
        return handle

    def _find(
        self, tensor: Tensor, handle: Replaceable, first: Any, view: View | None, repeats: Repeats | None = None
    ) -> None:
        """tensor, repeats: as for recorded()."""
        record = recorded(handle, tensor, repeats)
        if isinstance(first, Noted):
            record.name, record.is_one_bit = first.name, first.is_one_bit
        else:
            record.name = ""
        self.found.append(Replayed(record, first, view))
