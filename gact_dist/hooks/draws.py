"""What a forward saved, stored once more as a step would store it, with other random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from .._torch_internals import PLAIN
from ..policies import Plan
from .accounting import Account
from .aliases import StorageRecord
from .attention_scores import call_with_mask, note_added
from .derived import Derived, made_by, recipe_of
from .encoder import Encoder
from .fused_attention import LogsumexpFit
from .handles import Content, Noted, Recorded, Replaceable, Stored
from .hidden_scores import ANY_MASKS
from .replay import Replayed
from .roles import Role
from .sinks import Captured, Store


class Draw:
    """One rounding, under a plan, of all that a recorded forward saved."""

    def __init__(
        self, encoder: Encoder, plan: Plan, number: int, firsts: Mapping[Replaceable | Noted, Recorded | Noted]
    ) -> None:
        """number: names the random numbers, as for SavedTensorHooks.rehearsal(). firsts: the tensors that a step
        rounds, derives or samples, by what the graph holds of each; they are not kept alive."""
        self.plan = plan
        self.encoder, self._number = encoder, number
        self._names = WeakKeyDictionary({handle: (record.name, record.role) for handle, record in firsts.items()})
        self._derived = Derived({record.name: record.numel for record in firsts.values() if record.derived})
        self._derived.masks.update(dict.fromkeys(self._derived.names.made, ANY_MASKS))
        self._derived.names.stored_anyway |= {record.name for record in firsts.values() if record.compressible}

    @contextmanager
    def _keys(self) -> Iterator[None]:
        self.encoder.keys.begin(-self._number)  # no step of the job has these
        try:
            yield
        finally:
            self.encoder.keys.begin(0)

    def store(self) -> Store:
        """What stores tensors by the plan."""
        return Store(self.encoder, self.plan, Account(), derived=self._derived)

    def stored(self, sink: Store, tensor: Tensor, first: Replaceable | Noted, graph: Tensor) -> Stored:
        """What a sink keeps of a tensor. first: what the forward made of it, under whose name it is rounded. graph: as
        for Replay."""
        if isinstance(first, Noted):
            name, role = first.name, first.role
        else:
            name, role = self._names.get(first, ("", Role.STATISTIC))
        call = call_with_mask(tensor)
        if call is not None:
            note_added(tensor, call)
        with self._keys():
            whole = None if graph is tensor else graph
            stored = sink.take(Captured(tensor, name, role, StorageRecord(tensor), whole, first.limits))
        stored.keeps_gaps = isinstance(first, Noted) and first.keeps_gaps
        sink.after(tensor.grad_fn)
        return stored

    def payloads(self, between: Sequence[Replayed]) -> MutableMapping[Replaceable, Content]:
        """What a step would keep of tensors that the graph holds as they are, as long as it does and where that makes
        a difference."""
        found: WeakKeyDictionary[Replaceable, Content] = WeakKeyDictionary()
        fit = LogsumexpFit()
        for item in between:
            handle, (name, role) = item.record.handle, self._names.get(item.first, (None, None))
            payload: Content = handle.content
            if name is not None and self.plan.bits_of(name) is not None:
                derives = (
                    role is Role.ACTIVATION
                    and handle.limits is None
                    and self.encoder.derives(handle.tensor, name, self.plan)
                    and name not in self._derived.names.stored_anyway
                )
                edge, is_part = made_by(item.record), type(item.record.origin) not in PLAIN
                recipe = recipe_of(handle.tensor, edge, self.encoder.fraction, is_part, ANY_MASKS) if derives else None
                with self._keys(), torch.no_grad():
                    payload = recipe or self.encoder.encode(handle.tensor, name, role, self.plan, handle.limits)
                found[handle] = payload
            fit.add(handle, payload)
            fit.after(item.record.node)
        for item in between:
            fitted, item.record.replacement = item.record.replacement, None
            if fitted is not None:
                found[item.record.handle] = fitted
        return found


class StoredAgain:
    """Stores what one further run of a block saves as a step would: what a Replay is given to keep tensors."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._sink = draw.store()
        self._known: WeakValueDictionary[tuple, Stored] = WeakValueDictionary()

    def __call__(self, tensor: Tensor, first: Replaceable | Noted, graph: Tensor) -> Stored:
        key = first, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride()
        stored = self._known.get(key)
        if stored is None:  # memory of another block may be saved several times
            stored = self._known[key] = self._draw.stored(self._sink, tensor, first, graph)
        return stored

    def forget(self) -> None:
        """After the run: leave what was stored to the graph alone."""
        self._sink.forget_step()
