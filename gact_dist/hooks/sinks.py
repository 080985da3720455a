"""What becomes of a captured tensor: it is stored, as in a step of the job, or recorded, to be measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import codec
from ..offload import HostOffload
from ..policies import Plan
from .accounting import Account
from .aliases import StorageRecord
from .derived import Derived, InGraph, in_graph
from .encoder import Encoder, Packs, RoundingKeys
from .fused_attention import LogsumexpFit
from .handles import Content, Noted, Recipe, Recorded, Replaceable, Stored, View
from .log_softmax import LogSoftmaxes
from .naming import RECOMPUTED, origin
from .one_bit import Limits, Read
from .recipes_again import RecipeAgain, recipe_again
from .repeated import Repeated, Repeats, repeats_of
from .replay import Replayed, recorded, recorded_in
from .roles import Role
from .saved_edges import Reads
from .saved_later import SavedLater, Unsaved
from .way import Way


class Captured(NamedTuple):
    """A tensor that autograd saves, neither a parameter nor an alias of one that is stored already."""

    tensor: Tensor
    name: str
    role: Role | None
    """None where the sink did not ask for it"""
    record: StorageRecord
    whole: Tensor | None = None
    """that has the graph: the distributed tensor whose local part it is, or the one that repeats it"""
    read: Read | None = None
    """what is read of it, if that is less than all"""
    repeats: Repeats | None = None
    """how the whole repeats it"""
    recipe: Recipe | None = None
    """what gives it back exactly"""
    reads: Reads | None = None
    """notes what is read of the graph to find a recipe"""

    @property
    def graph(self) -> Tensor:
        """The tensor that shows what computed its elements: a slice of what repeats it has none of that."""
        return self.tensor if self.whole is None or self.repeats is not None else self.whole

    @property
    def limits(self) -> Limits | None:
        """On whose sides its elements are to stay where it is rounded."""
        return self.read if isinstance(self.read, Limits) else None

    @property
    def repeated(self) -> Tensor | None:
        """What repeats it."""
        return None if self.repeats is None else self.whole


class Again(NamedTuple):
    """What becomes of a tensor that is saved in the same way step after step, whatever else is saved, if it is in as
    many bytes of memory."""

    name: str
    packer: Packs | RecipeAgain | None
    """how it is packed, or its recipe is made; None for an alias of it"""
    row: tuple[Any, ...]
    """of the report"""
    storage_bytes: int
    way: Way | None = None
    """in the graph, to an operator because of which it is not derived; None where it would not be in any case"""
    after_alias: bool | None = None
    """of an alias, whether the memory is kept as it is already; None where nothing else of it may be saved before"""
    name_hash: int | None = None
    """of what is rounded: RoundingKeys.hash_of() its name; None for what takes no seed"""


class Sink(ABC):
    """Takes what the hooks capture."""

    records: bool = False
    """whether roles are looked at when the forward is over"""

    @abstractmethod
    def wants_role(self, tensor: Tensor) -> bool:
        """Whether the role of a tensor matters for what becomes of it."""

    def without_repeats(self, captured: Captured) -> Captured:
        """What the sink is to take of a tensor: where it may be rounded, the part that it repeats, if it does.

        See [Note: repeated] in repeated.py. The graph is then to hold a Repeated over the handle.
        """
        tensor, role = captured.tensor, captured.role
        if (role is not Role.ACTIVATION and role is not Role.UNREAD) or captured.read is not None:
            return captured
        whole = origin(tensor)
        repeats = repeats_of(whole)
        if repeats is None or tensor.numel() != whole.numel() or tensor.storage_offset() != whole.storage_offset():
            return captured
        part = repeats.part_of(whole)
        if not self.wants_role(part):
            return captured
        return captured._replace(tensor=part, whole=whole, repeats=repeats)

    @abstractmethod
    def take(self, captured: Captured) -> Stored | Replaceable | Noted:
        """The handle that the graph is to hold."""

    @abstractmethod
    def take_in_graph(self, captured: Captured) -> codec.Packed:
        """The same for a tensor that a compiled graph packs itself: the graph holds buffers, not a handle."""

    @abstractmethod
    def note_bypassing(self, captured: Captured) -> None:
        """A tensor is kept for backward where no hook sees it."""

    @abstractmethod
    def note_made_again(self, captured: Captured) -> None:
        """A tensor that the untouched job keeps where no hook sees it is made again instead."""

    @abstractmethod
    def note_kept(self, tensor: Tensor, name: str, record_of: Callable[[Tensor], StorageRecord]) -> None:
        """A tensor of a kind that no codec knows is kept as it is. record_of: gives the record of a storage."""

    def alias(self, tensor: Tensor, view: View, whole: Tensor | None = None) -> Any:
        """The handle that the graph is to hold of a tensor whose memory another handle holds already.

        whole: see Captured.
        """
        return view

    def alias_input(self, tensor: Tensor, view: View) -> Any:
        """The same of an input of a checkpointed block."""
        return view

    @abstractmethod
    def hold(self, captured: Captured) -> Stored | Replaceable | Noted:
        """The handle that the graph is to hold of a tensor that is encoded when encode_held() is called."""

    @abstractmethod
    def encode_held(self, handle: Any, captured: Captured) -> None:
        """Its role is known now."""

    @abstractmethod
    def keep_exactly(self, view: View, captured: Captured) -> None:
        """What was rounded turns out to be needed exactly. captured: the tensor that the view stands for."""

    @abstractmethod
    def after(self, node: Any) -> None:
        """A node has saved something. node: None for an operator without one."""

    @abstractmethod
    def forget_step(self) -> None:
        """At the end of a step."""


class Store(Sink):
    """Stores tensors by a plan. A rehearsal is a Store with a plan and an account of its own, and without offload."""

    def __init__(
        self,
        encoder: Encoder,
        plan: Plan,
        account: Account,
        offload: HostOffload | None = None,
        derived: Derived | None = None,
    ) -> None:
        """derived: learns what is made again."""
        self.plan, self.account, self.offload = plan, account, offload
        self._derived = Derived() if derived is None else derived
        self._encoder = encoder
        self._logsumexp = LogsumexpFit()
        self._reserved: dict[Stored, int] = {}
        self._later = SavedLater()
        self._tried: set[str] = set()  # names of what has waited for a source once
        self._come_later: set[str] = set()  # and of such sources

    def wants_role(self, tensor: Tensor) -> bool:
        """See Sink.wants_role."""
        return self._encoder.rounds(tensor)

    def take(self, captured: Captured) -> Stored:
        """See Sink.take."""
        tensor, name, record, recipe = captured.tensor, captured.name, captured.record, captured.recipe
        self._later.count()
        found = self._recipe_of(captured) if recipe is None else recipe
        if isinstance(found, Unsaved) and found.is_expected:
            stored = self._held(captured)
            self._later.add(stored, found, partial(self._settle_later, stored, captured))
            return stored
        payload = found if isinstance(found, Recipe) else self._packed(captured)
        stored = Stored(name, tensor, payload, self.offload)
        self._logsumexp.add(stored, payload)
        on_host = 0 if stored.offloaded is None else stored.host_bytes
        self.account.add(tensor, name, record, payload, on_host, repeated=captured.repeated)
        if isinstance(found, Unsaved):
            self.try_later(stored, tensor, captured.graph, found)
        return stored

    def again(self, captured: Captured, stored: Stored, was_aliased: bool | None) -> Again | None:
        """How take() has just stored a tensor, if that is what it does with one like it in any case.

        was_aliased: whether its memory was kept as it is before; None if nothing else of it was saved.
        """
        name, tensor, row = captured.name, captured.tensor, self.account.latest
        storage_bytes = tensor.untyped_storage().nbytes()
        if self.offload is not None or row is None or name in self._come_later or self._later.has(stored):
            return None
        if isinstance(stored.payload, Recipe):
            if captured.reads is None or captured.whole is not None:
                return None
            recipe = recipe_again(tensor, stored.payload, captured.reads)
            return None if recipe is None else Again(name, recipe, row, storage_bytes)
        if isinstance(stored.payload, Tensor):
            is_alias = self._encoder.keeps_alias(tensor, name, captured.role, self.plan)
            return Again(name, None, row, storage_bytes, None, was_aliased) if is_alias else None
        rounded, way = captured.role is Role.ACTIVATION, None
        if rounded and tensor.grad_fn is None:
            return None
        if rounded and self._encoder.may_derive and not self._derived.stores(name):
            way = self._derived.way_without_recipe(name)
            if way is None:
                return None
        packer = self._encoder.packer_of(tensor, name, captured.role, self.plan)
        if packer is None:
            return None
        return Again(name, packer, row, storage_bytes, way, name_hash=self.keys.hash_of(name) if rounded else None)

    def payload_again(self, tensor: Tensor, packer: codec.Packer, name: str) -> codec.Packed:
        """What take() keeps of a tensor that is rounded like that of an earlier step."""
        return packer.pack(tensor, self.keys.seed(name))

    @property
    def keys(self) -> RoundingKeys:
        """Of this step's rounding."""
        return self._encoder.keys

    @property
    def recent(self) -> Any:
        """What was stored last, with the payloads, for the attention that reads it."""
        return self._logsumexp.latest

    def _recipe_of(self, captured: Captured, stored: Stored | None = None) -> Recipe | Unsaved | None:
        """How to make a tensor again that would be rounded. stored: what is kept of it so far."""
        tensor, name, role, _, _, read, *_, reads = captured
        encoder, rounded = self._encoder, role is Role.ACTIVATION and read is None
        if not (encoder.may_derive and rounded and encoder.derives(tensor, name, self.plan)):
            return None
        graph = in_graph(captured.graph, stored)
        if RECOMPUTED in name:
            return self._derived.recipe_again(name, tensor, graph)
        return self._derived.recipe(name, tensor, encoder.fraction, graph, name in self.plan.bits, reads)

    def _packed(self, captured: Captured) -> Tensor | codec.Packed:
        """What to keep of a tensor that has no recipe."""
        return self._encoder.encode(captured.tensor, captured.name, captured.role, self.plan, captured.read)

    def try_later(self, stored: Stored, tensor: Tensor, graph: Tensor, unsaved: Unsaved) -> None:
        """Whether a tensor that is stored has a recipe once more is saved. See [Note: saved later]. graph: as for
        in_graph()."""
        if stored.name not in self._tried:
            self._tried.add(stored.name)
            learn = partial(self._learn_later, stored.name, _like(tensor), in_graph(graph, stored))
            self._later.add(stored, unsaved, learn)

    def _learn_later(self, name: str, like: Tensor, graph: InGraph, is_over: bool) -> Unsaved | None:
        if is_over:
            return None
        if RECOMPUTED in name:
            return self._derived.note_again(name, like, graph, anew=True)
        found = self._derived.recipe(name, like, self._encoder.fraction, graph, name in self.plan.bits)
        return found if isinstance(found, Unsaved) else None

    def _settle_later(self, stored: Stored, captured: Captured, is_over: bool) -> Unsaved | None:
        found = None if is_over else self._recipe_of(captured._replace(reads=None), stored)
        if isinstance(found, Unsaved):
            return found
        if found is None:
            self._derived.forget(captured.name)
        else:
            self._come_later.update(found.sources)
        self._keep_held(stored, captured, found)
        return None

    def take_in_graph(self, captured: Captured) -> codec.Packed:
        """See Sink.take_in_graph."""
        tensor, name, role, record, *_ = captured
        payload = self._encoder.encode(tensor, name, role, self.plan)
        packed = payload if isinstance(payload, codec.Packed) else codec.pack(tensor, bits=None)
        self.account.add(tensor, name, record, packed)
        return packed

    def note_bypassing(self, captured: Captured) -> None:
        """See Sink.note_bypassing."""
        self.account.add(captured.tensor, captured.name, captured.record, captured.tensor)

    def note_made_again(self, captured: Captured) -> None:
        """See Sink.note_made_again."""
        self.account.add_made_again(captured.tensor, captured.name, captured.record)

    def note_kept(self, tensor: Tensor, name: str, record_of: Callable[[Tensor], StorageRecord]) -> None:
        """See Sink.note_kept."""
        self.account.add_kept(tensor, name, record_of)

    def hold(self, captured: Captured) -> Stored:
        """See Sink.hold."""
        self._later.count()
        return self._held(captured)

    def _held(self, captured: Captured) -> Stored:
        stored = Stored(captured.name, captured.tensor, captured.tensor.detach())
        self._reserved[stored] = self.account.reserve(captured.tensor, captured.name)
        return stored

    def encode_held(self, handle: Stored, captured: Captured) -> None:
        """See Sink.encode_held. A tensor that has been modified meanwhile stays as it is: backward will raise."""
        found = None
        if not handle.is_modified:
            with torch.no_grad():
                found = self._recipe_of(captured, handle)
        self._keep_held(handle, captured, found if isinstance(found, Recipe) else None)
        if isinstance(found, Unsaved):
            self.try_later(handle, captured.tensor, captured.graph, found)

    def _keep_held(self, handle: Stored, captured: Captured, recipe: Recipe | None) -> None:
        tensor, name, _, record, *_ = captured
        payload: Content = tensor
        if not handle.is_modified:
            with torch.no_grad():
                payload = self._packed(captured) if recipe is None else recipe
            handle.keep(payload, tensor, self.offload)
        self._logsumexp.add(handle, payload)
        reserved = self._reserved.pop(handle)
        self.account.add(tensor, name, record, payload, handle.host_bytes, reserved, captured.repeated)

    def keep_exactly(self, view: View, captured: Captured) -> None:
        """See Sink.keep_exactly. A tensor that has been modified meanwhile stays as it is: backward will raise."""
        handle, tensor = view.base, captured.tensor
        if not isinstance(handle, Stored):
            return
        self._later.end(handle)
        if isinstance(handle.payload, Tensor):
            return
        if handle.is_exact or handle.is_modified:
            return
        rounded = handle.payload
        whole = view.behind(tensor, rounded.shape, rounded.strides)
        handle.keep(codec.exact(whole), whole, self.offload)
        is_part = captured.repeats is not None or isinstance(view, Repeated)
        self.account.replace(handle.name, whole, None if is_part else captured.record, rounded)

    def after(self, node: Any) -> None:
        """See Sink.after."""
        self.look_back()
        made = None if node is None else self._logsumexp.after(node)
        if made is not None and isinstance(made.payload, Recipe):
            self.account.derive(made.name, made.payload.sources)

    def forget_step(self) -> None:
        """See Sink.forget_step."""
        self._later.end()
        self._logsumexp.forget()
        self._reserved.clear()

    def look_back(self) -> None:
        """After something is saved: it may be what an earlier tensor is made of. See [Note: saved later]."""
        self._later.look()


def _like(tensor: Tensor) -> Tensor:
    """A meta tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Rehearsal(Store):
    """Stores tensors as a step would, and tells of each."""

    def __init__(self, *arguments: Any, on_kept: Callable[[Stored, Tensor], None]) -> None:
        """on_kept: told of what is kept of a tensor and, while it is there, of the tensor."""
        super().__init__(*arguments)
        self._on_kept = on_kept

    def take(self, captured: Captured) -> Stored:
        """See Sink.take."""
        stored = super().take(captured)
        if stored not in self._reserved:
            self._on_kept(stored, captured.tensor)
        return stored

    def _keep_held(self, handle: Stored, captured: Captured, recipe: Recipe | None) -> None:
        super()._keep_held(handle, captured, recipe)
        self._on_kept(handle, captured.tensor)


class Record(Sink):
    """Keeps tensors exactly, and records them with the graph edges that produced them."""

    records = True

    def __init__(
        self,
        encoder: Encoder,
        min_numel: float,
        rounded: Mapping[str, tuple[int, int]],
        derived: Derived,
        log_softmaxes: LogSoftmaxes,
    ) -> None:
        """rounded: name -> (bits, seed) of tensors that backward sees rounded. derived: what steps make from others."""
        self._derived, self._log_softmaxes = derived, log_softmaxes
        self.found: list[Recorded | Noted] = []
        self.notes = False
        """whether tensors are only noted: the block that saves them will run again"""
        self.block: Any = None
        """what stands for that block, None outside of all"""
        self._made: dict[Replaceable | Noted, tuple[Any, Recorded | Noted]] = {}
        """what is derived, by what the graph holds of it: the block that saved it first, and its record"""
        self.again: list[Replayed] = []
        """of what was only noted, what something else saves as well"""
        self.recomputed: list[int] = []
        """elements that each checkpointed block saves when it runs again"""
        self._encoder, self._min_numel, self._rounded = encoder, min_numel, rounded
        self.by_parts = False
        """whether the graph is differentiated twice, part by part: then what is derived moves what it is made of"""
        self.packs_bits = False
        """whether what a step keeps in one bit of each element is held so"""

    def wants_role(self, tensor: Tensor) -> bool:
        """See Sink.wants_role."""
        return tensor.numel() >= self._min_numel and (tensor.is_floating_point() or tensor.is_complex())

    def take(self, captured: Captured) -> Replaceable | Noted:
        """See Sink.take."""
        tensor, name = captured.tensor, captured.name
        if self.notes:
            derived = self._is_derived(name, captured.graph)
            noted = Noted(name, tensor.shape, 8 * tensor.element_size(), captured.role, derived, captured.limits)
            noted.has_graph = captured.graph.requires_grad
            self.found.append(noted)
            if derived:
                self._made[noted] = self.block, noted
            return noted
        handle = Replaceable(self._content_of(captured), name, captured.limits)
        if name in self._rounded:
            handle.replacement = codec.unpack(self._encoder.pack(tensor, *self._rounded[name], captured.limits))
        rounded, derived = captured.role is Role.ACTIVATION, self._is_derived(name, captured.graph)
        record = recorded(handle, tensor if captured.whole is None else captured.whole, captured.repeats)
        record.compressible, record.derived = rounded and not derived, rounded and derived
        record.is_log_softmax = captured.role is Role.LOG_SOFTMAX
        record.is_one_bit = captured.role is not None and captured.role.is_one_bit
        self.found.append(record)
        if record.derived:
            self._made[handle] = self.block, record
        return handle

    def _content_of(self, captured: Captured) -> Tensor | codec.Packed:
        """What is held of a tensor: one bit of each element where a step keeps no more, and that is exact."""
        tensor, role = captured.tensor, captured.role
        is_alone = captured.whole is None and (captured.read is not None or not tensor._is_view())
        has_bits = tensor.dtype is torch.bool or role is Role.BINARY or (role is not None and role.is_one_bit)
        if self.packs_bits and is_alone and has_bits:
            with torch.no_grad():
                packed = self._encoder.encode(tensor, captured.name, role, Plan(), captured.read)
            if isinstance(packed, codec.Packed) and packed.bits == 1:
                return packed
        return tensor

    def _store_if_read_elsewhere(self, view: View) -> None:
        """What another block reads as well moves what it is made of through that block, too, which is not measured: it
        is stored."""
        block, record = self._made.get(view.base, (self.block, None))
        if record is not None and block is not self.block:
            self._derived.store(record.name)
            record.store()

    def _is_derived(self, name: str, graph: Tensor) -> bool:
        if not self.by_parts:
            self._derived.store(name)
            return False
        return self._derived.is_measured(name, graph)

    def hold(self, captured: Captured) -> Replaceable | Noted:
        """See Sink.hold. Nothing is encoded; settle() asks for the roles."""
        is_log_softmax = self._log_softmaxes.is_one(captured.name)
        return self.take(captured._replace(role=Role.LOG_SOFTMAX if is_log_softmax else Role.ACTIVATION))

    def encode_held(self, handle: Any, captured: Captured) -> None:
        """Left to settle()."""

    def keep_exactly(self, view: View, captured: Captured) -> None:
        """Left to settle()."""

    def note_bypassing(self, captured: Captured) -> None:
        """What no hook sees cannot be rounded."""

    def note_made_again(self, captured: Captured) -> None:
        """Nothing is kept of it."""

    def note_kept(self, tensor: Tensor, name: str, record_of: Callable[[Tensor], StorageRecord]) -> None:
        """What no codec knows cannot be rounded."""

    def after(self, node: Any) -> None:
        """No logsumexp is fitted to what is recorded."""

    def forget_step(self) -> None:
        """What is recorded serves beyond the forward."""

    def alias(self, tensor: Tensor, view: View, whole: Tensor | None = None) -> Any:
        """See Sink.alias."""
        self._store_if_read_elsewhere(view)
        if self.notes or not isinstance(view.base, Noted):
            return view
        return self._apart(tensor, view, whole)

    def alias_input(self, tensor: Tensor, view: View) -> Any:
        """See Sink.alias_input. A checkpoint that is cut off is to hold a tensor of its own."""
        self._store_if_read_elsewhere(view)
        if isinstance(view.base, (Noted, Replaceable)):
            view.base.is_block_input = True
        return view if self.notes or not self.by_parts else self._apart(tensor, view, None)

    def _apart(self, tensor: Tensor, view: View, whole: Tensor | None) -> Any:
        handle, replayed = recorded_in(view, tensor, whole)
        self.again.append(replayed)
        return handle

    def take_in_graph(self, captured: Captured) -> codec.Packed:
        """See Sink.take_in_graph."""
        own = captured._replace(tensor=captured.tensor.clone())  # the graph may write over its own
        return codec.pack(self.take(own).restore(), bits=None)

    def settle(self, roles: Mapping[str, Role]) -> None:
        """When the forward is over, some tensors turn out not to be rounded."""
        for record in self.found:
            if record.is_log_softmax and roles.get(record.name) is not Role.LOG_SOFTMAX:
                record.keep_exactly()
            unsettled = record.compressible or record.derived
            if unsettled and roles.get(record.name, Role.ACTIVATION) is not Role.ACTIVATION:
                record.keep_exactly()
