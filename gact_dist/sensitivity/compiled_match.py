"""Which saved tensors of compiled regions are those that the same model saves where nothing is compiled.

[Note: matching] A compiled backward cannot be differentiated, but the model's own can. Where a region saves the values
that the model saves without the compiler, each tensor is read by the same derivatives, so its effect on the gradient is
the same. Values are compared on a sample of their elements in memory order, in which a tensor and its views agree.
Everything else is perturbed. These are the tensors that have no partner, or that have several: a tensor that is saved
twice has only a part of its effect in each place. The partitioner may also recompute what the model would have saved.
What it recomputes from is then read for more than the model's own derivatives, and is perturbed too: the nearest
matched tensors from which the missing one was computed, or all of a region where that is unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import codec
from ..hooks import Encoder, Noted, Recorded

_SAMPLED = 2048
_LARGEST_ERROR = 0.02
"""relative, of values in low precision that were computed in another order; others agree to a thousand roundings"""


class _Sample(NamedTuple):
    """Some elements of a tensor, at places that depend on its size alone."""

    form: tuple[int, torch.dtype]
    values: Tensor

    @property
    def is_noise(self) -> bool:
        """Whether it is a dropout's, which depends on nothing and of which a region keeps only where it is zero."""
        return bool(((self.values == 0) | (self.values == self.values.amax())).all())


def _sample(tensor: Tensor) -> _Sample | None:
    """None for masks and indices, which are stored exactly wherever they are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return None
    values = codec.stored_values(tensor)
    form = values.numel(), tensor.dtype
    if values.numel() > _SAMPLED:
        places = torch.randint(values.numel(), (_SAMPLED,), generator=torch.Generator().manual_seed(0), device="cpu")
        values = values[places.to(values.device)]
    return _Sample(form, values.cpu().double())


class Saved(NamedTuple):
    """A tensor that a model with compiled regions saves, without its memory."""

    name: str
    numel: int
    itemsize_bits: int
    compressible: bool
    columns: int
    """by which it is grouped"""
    sample: _Sample | None

    @property
    def region(self) -> str | None:
        """The path of the compiled module that saves it; None outside of regions."""
        path, _, label = self.name.partition(":")
        return path if re.match(r"Compiled\d+D", label) else None


def seen(record: Recorded | Noted, tensor: Tensor, encoder: Encoder) -> Saved:
    """What is kept of a tensor that a model with compiled regions saves."""
    columns = encoder.examples.columns_of(tensor) if record.compressible else 1
    form = record.numel, record.itemsize_bits, record.compressible
    return Saved(record.name, *form, columns, _sample(tensor))


class EagerTensor(NamedTuple):
    """A tensor that a model saves where nothing is compiled, without its memory."""

    name: str
    numel: int
    compressible: bool
    sample: _Sample | None
    node: Any
    """that made it; None without a graph"""

    @classmethod
    def of(cls, record: Recorded | Noted, tensor: Tensor, node: Any) -> EagerTensor:
        """What is kept of a tensor."""
        return cls(record.name, record.numel, record.compressible, _sample(tensor), node)


class EagerTensors:
    """What a model saves where nothing is compiled, without its memory. Tensors are known by their numbers."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numels: list[int] = []
        self._compressible: list[bool] = []
        self._samples: list[_Sample | None] = []
        self._sources: list[list[int] | None] = []

    def add(self, found: Sequence[EagerTensor]) -> None:
        """What a part of the model saves, whose graph is still there."""
        self._sources += _sources(found, len(self._names))
        self._names += [item.name for item in found]
        self._numels += [item.numel for item in found]
        self._compressible += [item.compressible for item in found]
        self._samples += [item.sample for item in found]

    def partners(self, saved: Sequence[Saved]) -> dict[str, str]:
        """{name: name without the compiler} of the compressible tensors whose effect is the same in both."""
        theirs, ours = defaultdict(list), defaultdict(list)
        for place, number in _close([item.sample for item in saved], self._samples):
            theirs[number].append(saved[place])
            ours[place].append(number)
        doubtful, regions = self._recomputed_from(theirs), self._unexplained(saved, ours, theirs)
        found = {}
        for place, numbers in ours.items():
            item, number = saved[place], numbers[0]
            single = len(numbers) == 1 and len(theirs[number]) == 1 and number not in doubtful
            single = single and item.numel == self._numels[number]
            if single and item.compressible and self._compressible[number] and item.region not in regions:
                found[item.name] = self._names[number]
        return found

    def _missing(self, theirs: dict[int, list[Saved]]) -> list[int]:
        """What the regions do not save."""
        samples = enumerate(self._samples)
        return [n for n, sample in samples if sample is not None and n not in theirs and not sample.is_noise]

    def _recomputed_from(self, theirs: dict[int, list[Saved]]) -> set[int]:
        """The nearest tensors from which the missing ones can be computed."""
        pending, met = self._missing(theirs), set()
        # no graph shows what is computed from a tensor that has none itself
        found = {number for number in theirs if pending and self._sources[number] is None}
        while pending:
            for source in self._sources[pending.pop()] or ():
                if source in theirs:
                    found.add(source)
                elif source not in met:
                    met.add(source)
                    pending.append(source)
        return found

    def _unexplained(
        self, saved: Sequence[Saved], ours: dict[int, list[int]], theirs: dict[int, list[Saved]]
    ) -> set[str]:
        """The regions in which something is saved, or recomputed, of which it is not known what it stands for."""
        regions = {item.region for item in saved if item.region is not None}
        missing = self._missing(theirs)
        unknown = {number for number in missing if self._sources[number] is None}
        strange = {item.region for place, item in enumerate(saved) if item.compressible and place not in ours}
        return {
            region
            for region in regions
            if any(self._within(number, region) for number in unknown)
            or (region in strange and not any(self._within(number, region) for number in missing))
        }

    def _within(self, number: int, region: str) -> bool:
        path = self._names[number].partition(":")[0]
        return not region or path == region or path.startswith(region + ".")


def _sources(found: Sequence[EagerTensor], start: int) -> list[list[int] | None]:
    """For each tensor the nearest ones in the graph from which it was computed; None for one without a graph.

    start: the number of the first.
    """
    owners = defaultdict(list)
    for number, item in enumerate(found, start):
        if item.node is not None:
            owners[item.node].append(number)
    return [None if item.node is None else _owned_above(item.node, owners) for item in found]


def _owned_above(node: Any, owners: dict[Any, list[int]]) -> list[int]:
    found: list[int] = []
    pending, met = [below for below, _ in node.next_functions], {node}
    while pending:
        node = pending.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if node in owners:
            found += owners[node]
        else:
            pending += [below for below, _ in node.next_functions]
    return found


def _close(first: Sequence[_Sample | None], second: Sequence[_Sample | None]) -> list[tuple[int, int]]:
    """The pairs of tensors of the same size and type that have the same values."""
    forms: dict[tuple[int, torch.dtype], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, samples in enumerate((first, second)):
        for number, sample in enumerate(samples):
            if sample is not None:
                forms[sample.form][side].append(number)
    pairs = []
    for (_, dtype), (left, right) in forms.items():
        if not left or not right:
            continue
        ours = torch.stack([sample.values for n in left if (sample := first[n]) is not None])
        theirs = torch.stack([sample.values for n in right if (sample := second[n]) is not None])
        distance = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist")
        same = distance <= min(1000 * torch.finfo(dtype).eps, _LARGEST_ERROR) * theirs.norm(dim=1)
        pairs += [(left[i], right[j]) for i, j in same.nonzero().tolist()]
    return pairs
