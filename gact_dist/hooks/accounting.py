"""What a step keeps of each saved tensor, and what the untouched job would keep.

[Note: weighing] How much a step keeps follows from its shapes, from views that share memory, and from what is a mask, a
statistic or noise; no formula over the tensors of a part of the batch gives it. So the whole batch's forward is run
once with every compressible tensor at one bit, through the same hooks as a step, and what they keep is noted. That
takes no more memory than the narrowest plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .._torch_internals import node_of
from ..codec import MAX_BITS, Packed, Scheme
from .aliases import StorageRecord
from .handles import Content, Recipe

_SPARSE_PARTS: dict[torch.layout, tuple[str, str, str] | tuple[str, str]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with a storage that a tensor consists of: those of a sparse one, or of a subclass that wraps others;
    none for a layout that torch does not give access to."""
    names = _SPARSE_PARTS.get(tensor.layout)
    if names is not None:
        plain: Any = tensor.detach()
        return [getattr(plain, name)() for name in names]
    if tensor.layout != torch.strided:
        return []
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    inner = (getattr(tensor, name) for name in flatten()[0])
    return [part for held in inner if isinstance(held, Tensor) for part in parts_of(held)]


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One saved tensor of the last step."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: str
    """quantised, mixed, mask, binary, narrow, sampled, exact, or derived: made again from others"""
    bits: float
    """payload bits for an element"""
    bytes: int
    """bytes retained, metadata included; 0 for an alias of memory counted in another row"""
    sensitivity: float | None = None
    """c_l: variance it adds to the gradient is about c_l / (2^bits - 1)^2 (GACT, section 4); None if not measured"""
    host_bytes: int = 0
    """of the bytes, those in pinned host memory"""
    one_width_bytes: int = 0
    """with compressor error-bounded, what the tensor would take at one width with the same error; else 0"""
    made_from: tuple[str, ...] = ()
    """of one that is derived, the names of what it is made from, as far as that is stored under a name"""


LOG_SOFTMAX = ":LogSoftmax"
"""in the names of what a cross entropy saves"""
_CODEC, _BYTES = map([field.name for field in fields(ReportRow)].index, ("codec", "bytes"))
_SAMPLED = Scheme.SAMPLED.name.lower()


class Footprint:
    """Bytes that one step of this rank keeps, for every width of every tensor. See [Note: weighing]."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """float64 [9] for each compressible tensor: bytes at 1 to 8 bits, and at most this many when stored exactly"""
        self.other_bytes = 0
        """masks, statistics, small tensors and all else whose size no plan changes"""
        self.exact_bytes = 0
        """what the untouched job would keep"""
        self.count = 0
        """of all that is kept"""
        self.fraction = 1.0
        """of a step's examples that were seen"""
        self.sampled: list[str] = []
        """names of the log-softmaxes that were sampled"""

    def add(self, name: str, tensor: Tensor, payload: Content, retained_bytes: int) -> None:
        """Note what was kept of one saved tensor."""
        if not isinstance(payload, Packed) or payload.scheme is not Scheme.QUANTISED:
            self.other_bytes += retained_bytes
            if isinstance(payload, Packed) and payload.scheme is Scheme.SAMPLED:
                self.sampled.append(name)
            return
        widths = [payload.nbytes_at(bits) for bits in range(1, MAX_BITS + 1)]
        # stored exactly it may keep all of its storage alive
        exact = tensor.untyped_storage().nbytes() if node_of(tensor) is not None else tensor.nbytes
        row = torch.tensor([*widths, exact], dtype=torch.float64, device="cpu")
        self.tensors[name] = self.tensors[name] + row if name in self.tensors else row

    def replace(self, name: str, packed: Packed | Recipe, retained_bytes: int) -> None:
        """What was kept at some width, or derived, is kept exactly instead."""
        if isinstance(packed, Recipe) or packed.scheme is not Scheme.QUANTISED:
            self.other_bytes -= packed.nbytes
        elif name in self.tensors:
            widths = [packed.nbytes_at(bits) for bits in range(1, MAX_BITS + 1)]
            left = self.tensors[name] - torch.tensor([*widths, retained_bytes], dtype=torch.float64, device="cpu")
            self.tensors[name] = left.clamp(min=0)
            if not left[:MAX_BITS].any():
                del self.tensors[name]
        self.other_bytes += retained_bytes


class Account:
    """The account of one step of one rank. footprint: also notes all that is kept."""

    def __init__(self, footprint: Footprint | None = None) -> None:
        self._rows: list[tuple[Any, ...]] = []  # the fields of each row: few steps are asked for their rows
        self.exact_bytes = 0
        """what the untouched job would keep"""
        self._footprint = footprint

    @property
    def rows(self) -> list[ReportRow]:
        """One for each saved tensor, in the order of saving."""
        return [ReportRow(*row) for row in self._rows]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    @property
    def retained_bytes(self) -> int:
        """The bytes of all rows."""
        return sum(row[_BYTES] for row in self._rows)

    @property
    def log_softmax_bytes(self) -> int:
        """Of these, what a cross entropy keeps exactly, which grows with the number of classes."""
        return sum(row[_BYTES] for row in self._rows if LOG_SOFTMAX in row[0] and row[_CODEC] != _SAMPLED)

    def begin(self) -> None:
        """Start empty."""
        self._rows = []
        self.exact_bytes = 0

    def reserve(self, tensor: Tensor, name: str) -> int:
        """A row for a saved tensor, in the order of saving, until it is known what is kept of it; its number."""
        self._rows.append((name, tuple(tensor.shape), tensor.dtype, "exact", 8.0 * tensor.element_size(), 0))
        return len(self._rows) - 1

    def add(
        self,
        tensor: Tensor,
        name: str,
        record: StorageRecord,
        payload: Content,
        host_bytes: int = 0,
        reserved: int | None = None,
        repeated: Tensor | None = None,
    ) -> None:
        """Note what is kept of a saved tensor: an alias, or a codec's payload.

        host_bytes: how much of it is on the host. reserved: the number of the row that it has already. repeated: what
        the untouched job would keep, where the tensor is a copy of a part of it. See [Note: repeated] in repeated.py.
        """
        untouched = tensor if repeated is None else repeated
        # The untouched job keeps the whole storage of a view alive; but the memory behind a view that has no graph is
        # the user's own (a slice of a data set), and only the view is counted.
        whole, own, has_node = untouched.untyped_storage().nbytes(), untouched.nbytes, node_of(untouched) is not None
        new_bytes = (whole if has_node else min(whole, record.seen_bytes + own)) - record.seen_bytes
        if new_bytes > 0:
            record.seen_bytes += new_bytes
            self.exact_bytes += new_bytes
        else:
            new_bytes = 0
        kind, one_width = "exact", 0
        sources: tuple[str, ...] = ()
        if isinstance(payload, Packed):
            kind, bits, retained, one_width = payload.described()
        elif isinstance(payload, Recipe):
            kind, retained, bits, sources = "derived", payload.nbytes, 0.0, payload.sources
        elif host_bytes:
            retained, bits = host_bytes, 8.0 * tensor.element_size()
        else:
            bits = 8.0 * tensor.element_size()
            if repeated is not None:
                retained = tensor.nbytes
            elif has_node:
                retained = 0 if record.aliased else record.seen_bytes
            else:  # what was seen before may have been encoded
                retained = new_bytes if record.aliased else min(whole, own)
            record.aliased |= repeated is None
        row = name, tuple(tensor.shape), tensor.dtype, kind, bits, retained, None, host_bytes, one_width, sources
        if reserved is None:
            self._rows.append(row)
        else:
            self._rows[reserved] = row
        if self._footprint is not None:
            self._footprint.add(name, tensor, payload, retained)

    @property
    def latest(self) -> tuple[Any, ...] | None:
        """What was noted last, for the same tensor of later steps; None where more than a row is kept of it."""
        return self._rows[-1] if self._rows and self._footprint is None else None

    def add_kept(self, tensor: Tensor, name: str, record_of: Callable[[Tensor], StorageRecord]) -> None:
        """Note a tensor that is kept as it is because no codec knows its kind. record_of: gives a storage's record."""
        retained = 0
        for part in parts_of(tensor):
            record, whole = record_of(part), part.untyped_storage().nbytes()
            retained += 0 if record.aliased else whole  # what was seen before may have been encoded
            self.exact_bytes += max(0, whole - record.seen_bytes)
            record.seen_bytes, record.aliased = max(whole, record.seen_bytes), True
        bits = 8.0 * tensor.element_size()
        self._rows.append((name, tuple(tensor.shape), tensor.dtype, "exact", bits, retained))
        if self._footprint is not None:
            self._footprint.other_bytes += retained

    def add_made_again(self, tensor: Tensor, name: str, record: StorageRecord) -> None:
        """Note a tensor that the untouched job would keep, of which nothing is kept."""
        new_bytes = max(0, tensor.untyped_storage().nbytes() - record.seen_bytes)
        record.seen_bytes += new_bytes
        self.exact_bytes += new_bytes
        self._rows.append((name, tuple(tensor.shape), tensor.dtype, "derived", 0.0, 0))

    def derive(self, name: str, sources: tuple[str, ...]) -> None:
        """A tensor is made from others, with these names, instead of being kept exactly, as it was noted if it was."""
        number = next((i for i in reversed(range(len(self._rows))) if self._rows[i][0] == name), None)
        if number is None:
            return
        about, retained = self._rows[number][:3], self._rows[number][_BYTES]
        self._rows[number] = *about, "derived", 0.0, 0, None, 0, 0, sources
        if self._footprint is not None:
            self._footprint.other_bytes -= retained

    def replace(self, name: str, tensor: Tensor, record: StorageRecord | None, packed: Packed | Recipe) -> None:
        """A tensor that was noted as packed or derived is kept exactly instead. record: None for one of which the
        forward holds nothing, a copy of a part of another."""
        numbers = [i for i, row in enumerate(self._rows) if row[:2] == (name, tuple(packed.shape))]
        retained = min(tensor.untyped_storage().nbytes(), tensor.nbytes)
        if record is not None:
            retained, record.aliased = 0 if record.aliased else retained, True
        if numbers:
            known = self._rows[numbers[-1]][:3]
            self._rows[numbers[-1]] = *known, "exact", 8.0 * tensor.element_size(), retained
        if self._footprint is not None:
            self._footprint.replace(name, packed, retained)
