"""What a step knows about the storages it has met, so that memory is stored once however often it is saved.

[Note: lazy bits] A conjugated or negated tensor may be a view that differs from its base in one bit alone: same memory,
same version, same strides. So these bits are part of what identifies a saved tensor, and a view of memory that was
stored under other bits is conjugated or negated again when it is restored.
"""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .. import codec
from .._short_ways import IS_BUILT, native_base
from .._torch_internals import innermost_hooks, reference_to_storage, storage_reference, storage_with_id
from .handles import Distributed, Kept, Replaceable, Stored, View, base_of, count_reader, lazy_bits
from .repeated import Repeated

# A small view of a quantised tensor is stored on its own: decoding the whole larger tensor for it would cost more.
_VIEW_FRACTION = 4
_FEW = 8  # parts of a storage that are compared one by one
_MOST_COMPARED = 32  # of the parts that overlap one another, as those of a sliding window do


_Part = tuple[int, int, int, int, torch.dtype, int, ref]
"""what is stored of a storage: (number, first element, last element, version, type, lazy bits, handle)"""


NOTHING: frozenset[Any] = frozenset()
_Record: Any = native_base("Record")
_is_grad_enabled = torch.is_grad_enabled


class StorageRecord(_Record):
    """What a step knows about one storage."""

    __slots__ = () if IS_BUILT else (
        "aliased", "bypassing", "cells", "first_partial", "partial_numel", "relu_versions", "seen_bytes", "stored",
        "weak",
    )  # fmt: skip
    cells: dict[tuple[int, torch.dtype, int, int], list[_Part]] | None

    def __init__(self, tensor: Tensor, storage: Any = None) -> None:
        """storage: that of the tensor, if it is at hand."""
        # no other storage can take its place
        self.weak = storage_reference(tensor) if storage is None else reference_to_storage(storage)
        self.stored: list[_Part] = []
        # where many parts are stored, they are found by where they lie: (version, type, level, cell) -> those of at
        # most 2**level elements that begin in a cell of this size
        self.cells = None
        self.relu_versions: frozenset[int] = NOTHING
        self.partial_numel = 0
        self.first_partial = ""
        self.seen_bytes = 0
        self.aliased = False
        self.bypassing: frozenset[tuple[int, int]] = NOTHING
        """(offset, span) of what checkpoints keep past all hooks"""


class StorageRecords:
    """The records of one step, by storage."""

    def __init__(self) -> None:
        self.by_key: dict[int, StorageRecord] = {}
        """the key of a storage is its storage_id()"""

    def of(self, tensor: Tensor) -> StorageRecord:
        """The record of a tensor's storage, a new one where the step meets it for the first time."""
        storage, key = storage_with_id(tensor)
        record = self.by_key.get(key)
        if record is None:
            record = self.by_key[key] = StorageRecord(tensor, storage)
        return record

    def restore(self, handle: Any) -> Tensor:
        """The tensor that a handle holds: the unpack hook.

        An inner backward saves again what it reads. In a step its storage is noted, so that the handle serves twice.
        """
        if _is_grad_enabled() and innermost_hooks() is not None:
            return self._restore_and_note(handle)
        return handle.unpack() if type(handle) is Stored else handle.restore()

    def _restore_and_note(self, handle: Any) -> Tensor:
        if isinstance(handle, Distributed):
            return handle.make(self._restore_and_note(handle.local))
        if isinstance(handle, Repeated):
            whole = handle.whole(self._restore_and_note(handle.base))
            note_stored(whole, self.of(whole), handle)
            return handle.seen_in(whole)
        if isinstance(handle, View):
            return handle.within(self._restore_and_note(handle.base))
        tensor = handle.restore_memory() if isinstance(handle, Stored) else handle.restore()
        if isinstance(handle, Kept):
            return tensor
        found, private = find_stored(tensor, self.of(tensor)), handle.restores_private
        if found is not None and found[0] is handle:
            return tensor
        # what is recorded is not encoded: ReLU's own result, and parts that lie between one another, share memory
        if not private and isinstance(handle, Replaceable) and (found is not None or has_gaps(tensor)):
            tensor, private = codec.unpack(codec.borrow(tensor)), True
        note_stored(tensor, self.of(tensor), handle, with_gaps=private)
        return tensor

    def clear(self) -> None:
        """At the end of a step."""
        self.by_key.clear()


def alias_of(tensor: Tensor, record: StorageRecord) -> View | None:
    """The handle of a tensor inside of memory that is stored already."""
    found = find_stored(tensor, record) if record.stored else None
    return None if found is None else alias_at(found, tensor)


def alias_at(found: tuple[Any, int, int], tensor: Tensor) -> View:
    """The handle of a tensor inside of memory that find_stored() has found."""
    handle, offset, toggled = found
    count_reader(base_of(handle))
    if isinstance(handle, Repeated):
        return handle.over(handle.base, tensor, offset)
    return View(handle, tensor, offset, toggled)


def find_stored(tensor: Tensor, record: StorageRecord) -> tuple[Any, int, int] | None:
    """(handle, the tensor's offset in its elements, the lazy bits in which they differ) of memory that is stored
    already and holds this tensor too. See [Note: lazy bits]."""
    if not record.stored:
        return None
    version, dtype, start = tensor._version, tensor.dtype, int(tensor.storage_offset())
    stop, most = start + span(tensor), tensor.numel() * _VIEW_FRACTION
    parts = record.stored
    if record.cells is not None:
        parts = sorted(_near(record.cells, (version, dtype), start, stop - start, most), key=itemgetter(0))
    for _, first, last, known_version, known_dtype, bits, weak in parts:
        if known_version != version or dtype != known_dtype or start < first or stop > last:
            continue
        stored = weak()
        if stored is not None and most >= last - first:
            return stored, start - first, lazy_bits(tensor) ^ bits
    return None


def _near(
    cells: Mapping[tuple[int, torch.dtype, int, int], list[_Part]],
    kind: tuple[int, torch.dtype],
    start: int,
    length: int,
    most: int,
) -> Iterator[_Part]:
    """The parts of some size between length and most that may hold the elements from start on."""
    for level in range(length.bit_length(), most.bit_length() + 1):
        cell = start >> level
        for place in (cell - 1, cell):
            yield from cells.get((*kind, level, place), ())[-_MOST_COMPARED:]


def note_stored(tensor: Tensor, record: StorageRecord, handle: Any, with_gaps: bool = False) -> None:
    """A tensor's memory is stored now. The handle is held weakly.

    with_gaps: no other tensor lies between the elements of this one.
    """
    length = span(tensor) if with_gaps else span_of_all(tensor)
    if length is not None:
        note_part(tensor, record, handle, length, lazy_bits(tensor))


def note_part(tensor: Tensor, record: StorageRecord, handle: Any, length: int, bits: int = 0) -> None:
    """The same of a part of which more is known. length: its span(). bits: its lazy bits."""
    stored = record.stored
    first = int(tensor.storage_offset())
    stored.append((len(stored), first, first + length, tensor._version, tensor.dtype, bits, ref(handle)))
    if record.cells is not None:
        _place(stored[-1], record.cells)
    elif len(stored) > _FEW:
        record.cells = {}
        for known in stored:
            _place(known, record.cells)


def span_of_all(tensor: Tensor) -> int | None:
    """span() of a tensor if no other lies between its elements, else None."""
    if tensor.is_contiguous():
        return tensor.numel()
    return None if has_gaps(tensor) else span(tensor)


def _place(part: _Part, cells: dict[tuple[int, torch.dtype, int, int], list[_Part]]) -> None:
    _, first, last, version, dtype, *_ = part
    level = (last - first).bit_length()
    cells.setdefault((version, dtype, level, first >> level), []).append(part)


def span(tensor: Tensor) -> int:
    """Elements of storage between a tensor's first and last element, both included."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_gaps(tensor: Tensor) -> bool:
    """Whether there are elements of storage between a tensor's first and last that are none of its own.

    One that is expanded may have more elements than its span, and gaps all the same.
    """
    if tensor.is_contiguous():
        return False
    reached = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride > reached:
                return True
            reached += (size - 1) * stride
    return False


class SharedBases:
    """Which views are stored as their base, because the saved views of the base would take more than the base."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """of the first view of each such base, learnt in an earlier step"""
        self.grew = False
        """whether a name was learnt that was not known before: other tensors will be aliases from now on"""

    def what_to_store(self, tensor: Tensor, name: str, record: StorageRecord) -> Tensor:
        """The tensor itself, or its base."""
        base = tensor._base if tensor._is_view() else None
        if base is None or base.dtype != tensor.dtype or span(base) != base.numel() or has_gaps(base):
            return tensor
        if tensor.numel() >= base.numel():
            return tensor
        record.partial_numel += tensor.numel()
        record.first_partial = record.first_partial or name
        if record.partial_numel > base.numel() and record.first_partial not in self.names:
            self.grew = True
            self.names.add(record.first_partial)  # from the next step on, it stores the base at once
        return base if name in self.names else tensor
