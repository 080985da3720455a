"""The pack and unpack hooks: from a tensor that autograd saves to what is kept of it, and back.

Nothing else in the package touches saved_tensors_hooks. For the lifetime of what pack returns see handles.py.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from .. import codec
from ..config import Config
from ..distributed import checkpoints_offering_inputs, distributed_again, local_part, unwrap
from ..offload import HostOffload, OffloadStatistics
from ..policies import Bits, policy_of
from . import inlined
from .accounting import Ledger
from .aliases import Memory, find, is_own_relu_save, remember, span
from .block_inputs import BlockInputs
from .checkpoint import in_backward, refuse_inside_checkpoint
from .checkpoint_report import Bypassing, told_of_checkpoints
from .compiled import (
    RegionParameters,
    RegionRoles,
    behind_compiler,
    compiled_region,
    has_compiled_parts,
    running_region,
)
from .encoder import Packer
from .footprint import Footprint
from .handles import Distributed, Kept, Recorded, Replaceable, Stored, View
from .logsumexp import LogsumexpFit
from .naming import ModuleScope, Namer, origin
from .parameters import ParameterIdentity
from .roles import OperatorObserver, Role, role_of_itself
from .rounding_keys import RoundingKeys, refuse_inside_capture


class Engine:
    """Packs and unpacks the saved tensors of one model, by the plan it is given."""

    def __init__(self, model: nn.Module, config: Config, rank: int, storage: HostOffload | None = None) -> None:
        self.config = config
        self._storage = storage
        self._offloaded: OffloadStatistics | None = None
        self._model = model
        self.plan: Mapping[str, Bits] = {}
        self.unmeasured_bits = policy_of(config).unmeasured_bits
        self.ledger = Ledger()
        self._namer = Namer(ModuleScope(model, has_compiled_parts(model)))
        self._parameters = ParameterIdentity(unwrap(model))
        self._memory: dict[int, Memory] = {}
        self._roles: dict[str, Role] = {}
        self._store_base: set[str] = set()
        self._observer: OperatorObserver | None = None
        self._observe_next = True
        self._records: list[Recorded] | None = None
        self._recorded_fraction = 1.0
        self._rounded: Mapping[str, tuple[int, int]] = {}
        self._blocks = BlockInputs(self._roles)
        self._region: nn.Module | None = None
        self._regions = RegionRoles(self._roles)
        self._region_parameters = RegionParameters()
        self._logsumexp = LogsumexpFit()
        self._bypassing = Bypassing(self._parameters, self._namer, self.ledger, self._memory_of)
        self._keys = RoundingKeys(config.seed, rank)
        self.packer = Packer(model, config)

    def bits_of(self, name: str) -> Bits:
        """The width of a compressible tensor: the plan's, or the policy's own until it is in a plan; None is exact."""
        return self.plan.get(name, self.unmeasured_bits)

    def close(self) -> None:
        """Remove the hooks from the model's modules; host memory goes back with the last graph that uses it."""
        self._namer.scope.remove()
        self.packer.remove()
        self._offloaded, self._storage = self.offloaded(), None

    def offloaded(self) -> OffloadStatistics | None:
        """What offload did in the last step whose backward is over; None without offload. Waits for the device."""
        return self._offloaded if self._storage is None else self._storage.statistics()

    def begin(self, step: int) -> None:
        """Start a step: names count from zero, the rounding gets the step's own key, the report starts empty."""
        if not self._namer.scope.compiled and has_compiled_parts(self._model):  # compiled since it was attached to
            self._namer.scope.remove()
            self._namer.scope = ModuleScope(self._model, True)
        self._namer.reset()
        self._forget_step()
        if self._storage is not None:
            self._storage.begin()
        self.ledger.begin()
        self._keys.begin(step)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Compress what autograd saves in the context. Raises RuntimeError in a checkpointed function and a capture."""
        refuse_inside_checkpoint()
        refuse_inside_capture()
        observer = None
        # a compiled region is compiled anew under a function mode, and shows it no operator
        if self._observe_next and self.config.policy != "exact" and not self._namer.scope.compiled:
            observer = OperatorObserver(self._blocks.note_discrete)
        told = told_of_checkpoints(self._bypassing.note)
        offered = checkpoints_offering_inputs(self._pack) if self.config.checkpoint_inputs else nullcontext()
        with self._observed(observer), told, offered, self._saved_tensors_hooks():
            try:
                yield
            finally:
                self._forget_step()

    @contextmanager
    def _saved_tensors_hooks(self) -> Iterator[None]:
        served: AbstractContextManager[None] = nullcontext()
        hooks: tuple[Any, Any] = self._pack, _unpack
        if self._namer.scope.compiled and self.config.compile_hooks == "inlined":
            served, hooks = inlined.serving(self._pack, self._pack_in_graph), inlined.hooks()
        elif self._namer.scope.compiled:  # where a graph breaks the compiler would compile the hooks as well
            hooks = torch.compiler.disable(self._pack), torch.compiler.disable(_unpack)
        with served, saved_tensors_hooks(*hooks):
            yield

    def _forget_step(self) -> None:
        self._memory.clear()
        self._blocks.reset()
        self._regions.classify()
        self._region_parameters.forget()
        self._logsumexp.forget()
        self._region = None

    @contextmanager
    def recording(
        self,
        observer: OperatorObserver | None,
        fraction: float = 1.0,
        rounded: Mapping[str, tuple[int, int]] | None = None,
    ) -> Iterator[list[Recorded]]:
        """Keep what autograd saves exactly, and record it under the names that a step would use.

        fraction: of a step's samples that the recorded forward sees; min_numel is meant for all of them.
        rounded: name -> (bits, seed) of tensors that backward gets rounded.
        """
        with self.ledger.set_aside():
            self._recorded_fraction = fraction
            self.begin(0)
            records = self._records = []
            self._rounded = rounded or {}
            if observer is not None:
                observer.on_discrete = self._blocks.note_discrete
            try:
                with self._parameters.with_buffers(self._model), self._observed(observer), self._saved_tensors_hooks():
                    yield records
                for record in records:
                    record.compressible &= self._roles.get(record.name) is not Role.STATISTIC
            finally:
                self._records = None
                self.begin(0)

    @contextmanager
    def rehearsal(
        self, plan: Mapping[str, Bits] | None = None, all_bits: int | None = None, draw: int = 0
    ) -> Iterator[Footprint]:
        """Compress as a step would, note what that keeps, and leave no trace of it.

        plan: in place of the one in force. all_bits: one width for all. draw: another number rounds differently.
        """
        in_force = self.plan, self.unmeasured_bits
        storage, self._storage = self._storage, None  # what is rehearsed need not leave the device
        footprint = Footprint()
        with self.ledger.set_aside(footprint):
            self.begin(-draw)  # no step of the job has its keys
            self.plan = self.plan if plan is None else plan
            if all_bits is not None:
                self.plan, self.unmeasured_bits = {}, all_bits
            try:
                with self._parameters.with_buffers(self._model), self.hooks():
                    yield footprint
                footprint.exact_bytes = self.ledger.exact_bytes
            finally:
                self.begin(0)
                self._storage = storage
                self.plan, self.unmeasured_bits = in_force

    @contextmanager
    def _observed(self, observer: OperatorObserver | None) -> Iterator[None]:
        if observer is None:
            yield
            return
        self._observe_next, self._observer = False, observer
        try:
            with observer:
                yield
        finally:
            self._observer = None

    def state_dict(self) -> dict[str, Any]:
        """What was learnt of saved tensors in earlier steps, by name."""
        return {
            "roles": {name: role.value for name, role in self._roles.items()},
            "store_base": sorted(self._store_base),
            "unmeasured_bits": self.unmeasured_bits,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what state_dict() gave."""
        self._roles.clear()
        self._roles.update({name: Role(value) for name, value in state.get("roles", {}).items()})
        self._store_base = set(state.get("store_base", ()))
        self.unmeasured_bits = state.get("unmeasured_bits", self.unmeasured_bits)

    # -- pack ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.is_meta or in_backward():
            return Kept(tensor)  # in a backward: what is recomputed there is freed at once
        if self._parameters.is_parameter(tensor, self._namer.scope.innermost):
            return Kept(tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            return self._pack_distributed(tensor)
        frame = behind_compiler(sys._getframe(1))
        self._region = compiled_region(frame)
        if self._region is not None and tensor.grad_fn is None and self._region_parameters.share(tensor, self._region):
            return Kept(tensor)
        memory = self._memory_of(tensor)
        self._blocks.look(frame)
        if self._blocks.call is not None:
            self._bypassing.add_held(self._blocks.call)
            if tensor.is_floating_point() and self.config.policy != "exact":
                return self._pack_block_input(tensor, memory)
        own_relu_save = self.config.policy != "exact" and is_own_relu_save(tensor, memory)
        if own_relu_save:
            memory.relu_versions.add(tensor._version)
        else:
            handle = find(tensor, memory)
            if handle is not None:
                return handle
        name = self._namer.name(tensor, self._region)
        target = self._what_to_store(tensor, name, memory)
        stored: Any
        if self._records is not None:
            stored = self._record(target, name, own_relu_save, self._records)
        else:
            stored = self._store(target, name, memory, own_relu_save)
        if not own_relu_save:
            remember(target, memory, stored)
        self._logsumexp.after(tensor)
        if target is tensor:
            return stored
        return View(stored, tensor, int(tensor.storage_offset() - target.storage_offset()))

    def _pack_in_graph(self, tensor: Tensor, label: str, alias: bool) -> codec.Packed:
        """What is kept of a tensor that a region's graph packs itself. See [Note: inlined hooks] in inlined.py."""
        if in_backward():
            return codec.pack(tensor, bits=None)
        self._region = running_region(sys._getframe(1))
        self._blocks.call = None
        name = self._namer.name_in_graph(self._region, label)
        if self._records is not None:
            handle = self._record(tensor.clone(), name, False, self._records)  # the graph may write over its own
            return codec.pack(handle.restore(), bits=None)
        payload = self._encode(tensor, name, False)
        packed = payload if isinstance(payload, codec.Packed) else codec.pack(tensor, bits=None)
        # each by itself: buffers of a graph are used again, so that one storage holds many tensors
        memory = Memory(tensor.untyped_storage())
        memory.seen_bytes = tensor.untyped_storage().nbytes() if alias else 0
        self.ledger.add(tensor, name, memory, packed)
        return packed

    def _pack_block_input(self, tensor: Tensor, memory: Memory) -> Any:
        """An input of a checkpointed block: a twin that is stored already may be rounded only where it may be."""
        name = self._namer.block_input()
        known = name in self._roles or self._records is None
        role = self._role(tensor, name)
        twin = find(tensor, memory) if known and role is Role.ACTIVATION else None
        if twin is not None:
            return twin
        if self._records is not None:
            return self._record(tensor, name, False, self._records, role)
        stored = self._store(tensor, name, memory, False, role)
        remember(tensor, memory, stored)
        return stored

    def _pack_distributed(self, tensor: Tensor) -> Any:
        """The local part of a DTensor, under the name and role that the whole has; other subclasses are kept."""
        local = local_part(tensor)
        if local is None or type(local) is not Tensor:
            return Kept(tensor)
        memory = self._memory_of(local)
        stored: Any = find(local, memory)
        if stored is None:
            name = self._namer.name(tensor)
            role = self._role(tensor, name)
            if self._records is not None:
                stored = self._record(local, name, False, self._records, role)
            else:
                stored = self._store(local, name, memory, False, role)
            remember(local, memory, stored)
        return Distributed(stored, distributed_again(tensor))

    def _memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = Memory(storage)
        return memory

    def _what_to_store(self, tensor: Tensor, name: str, memory: Memory) -> Tensor:
        """The tensor itself, or its base where views that overlap would take more than the base does."""
        base = tensor._base if tensor._is_view() else None
        if base is None or base.dtype != tensor.dtype or span(base) != base.numel() or self.config.policy == "exact":
            return tensor
        if tensor.numel() >= base.numel():
            return tensor
        memory.partial_numel += tensor.numel()
        memory.first_partial = memory.first_partial or name
        if memory.partial_numel > base.numel():
            self._store_base.add(memory.first_partial)  # from the next step on, it stores the base at once
        return base if name in self._store_base else tensor

    def _store(
        self, tensor: Tensor, name: str, memory: Memory, own_relu_save: bool, role: Role | None = None
    ) -> Stored:
        payload = self._encode(tensor, name, own_relu_save, role)
        stored = Stored(name, tensor, payload, self._storage)
        self._logsumexp.add(stored, payload)
        self.ledger.add(tensor, name, memory, payload, stored.host_bytes)
        return stored

    def _encode(
        self, tensor: Tensor, name: str, own_relu_save: bool, role: Role | None = None
    ) -> Tensor | codec.Packed:
        """What is kept of a tensor that is neither a parameter nor a twin. role: None to find it."""
        config = self.config
        if config.policy == "exact":
            return tensor.detach()
        if tensor.numel() < max(config.min_numel, 1):
            return codec.exact(tensor)
        if tensor.dtype == torch.bool or own_relu_save:
            return codec.pack_mask(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return codec.pack_narrow(tensor) or codec.exact(tensor)
        role = role or self._role(tensor, name)
        if role is Role.BINARY:
            return codec.pack_binary(tensor)
        bits = self.bits_of(name) if role is Role.ACTIVATION else None
        if bits is None:
            return codec.exact(tensor)
        return self.packer.pack(tensor, bits, self._keys.seed(name))

    def _role(self, tensor: Tensor, name: str) -> Role:
        """What a floating tensor is to its operator; see operators.py for those without a graph."""
        if self._blocks.call is not None:
            return self._block_input_role(name)
        if not self.config.batch_norm_inputs and isinstance(self._namer.scope.innermost, _BatchNorm):
            return Role.STATISTIC
        if self._region is not None and tensor.grad_fn is None:
            return self._regions.role(self._region, name, tensor)
        known = role_of_itself(tensor)
        if known is not None:
            return known
        if self._observer is not None:
            self._roles[name] = self._observer.role(tensor)
        elif name not in self._roles:
            self._observe_next = True
            return Role.STATISTIC
        return self._roles[name]

    def _block_input_role(self, name: str) -> Role:
        """Whether an input of a checkpointed block may be rounded. See [Note: discrete blocks] in block_inputs.py."""
        if not self.config.checkpoint_inputs:
            return Role.STATISTIC
        if self._observer is None:
            known = self._blocks.known_role(name)
            self._observe_next |= known is None
            return known or Role.STATISTIC
        before = self._roles.get(name)
        now = self._blocks.observed_role(name)
        # in a step the block has yet to run; a recording is looked at when it is over
        return now if before is not None or self._records is not None else Role.STATISTIC

    def _record(
        self, tensor: Tensor, name: str, own_relu_save: bool, records: list[Recorded], role: Role | None = None
    ) -> Replaceable:
        big = tensor.numel() >= self.config.min_numel * self._recorded_fraction
        floating = tensor.is_floating_point() or tensor.is_complex()
        compressible = big and floating and not own_relu_save and (role or self._role(tensor, name)) is Role.ACTIVATION
        source, handle = origin(tensor), Replaceable(tensor)
        if name in self._rounded:
            handle.replacement = codec.unpack(self.packer.pack(tensor, *self._rounded[name]))
        records.append(Recorded(name, handle, source.detach(), source.grad_fn, source.output_nr, compressible))
        return handle


def _unpack(handle: Any) -> Tensor:
    return handle.restore()
