"""The pack and unpack hooks: they capture what autograd saves and pass it to a sink.

Nothing else in the package uses saved_tensors_hooks. For the lifetime of what pack returns see handles.py.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import _fields, codec
from .._patches import replaced
from .._short_ways import IS_BUILT
from .._torch_internals import (
    PLAIN,
    PLAIN_OR_PARAMETER,
    counting_versions,
    has_compiled_parts,
    in_backward,
    is_compiled,
    is_inside_transform,
    is_no_input,
    load_compiler,
    once,
    storage_id,
    without_innermost_hooks,
    without_modes,
    without_subclass,
)
from ..config import Config
from ..distributed import checkpoints_offering_inputs, distributed_again, layout_of, local_part, own_part, unwrap
from ..offload import HostOffload, OffloadStatistics, open_pack_stream
from ..policies import Plan, Policy, policy_of
from . import inlined
from .accounting import Account, Footprint
from .aliases import SharedBases, StorageRecord, StorageRecords, alias_of, note_part, note_stored
from .attention_calls import attention_calls
from .attention_scores import call_with_mask, note_added
from .boolean_masks import BooleanMasks, MaskAgain
from .call_stack import (
    CallSite,
    call_site,
    caller,
    current_line,
    is_workspace,
    site_in_backward,
    site_in_checkpoint,
)
from .checkpoint import refuse_inside_checkpoint, running_checkpoints
from .checkpoint_report import Bypassing, told_of_checkpoints
from .clock import Clock
from .collector import at_rest as collector_at_rest
from .compiled import RegionParameters, behind_compiler, running_region
from .custom_functions import CustomFunctions
from .encoder import Encoder
from .function_calls import FunctionCall, call_without_frame, calls_remembered, remembered_calls
from .functions_again import FunctionsAgain, LearntFunctions
from .given import Given
from .handles import (
    Distributed,
    Kept,
    Noted,
    Recipe,
    Recorded,
    Replaceable,
    ReplayError,
    Stored,
    Unpacking,
    View,
    base_of,
    lazy_bits,
)
from .known_roles import KnownRoles, LearntRoles, Place
from .naming import RECOMPUTED, Entry, ModuleScope, Namer
from .one_bit import Below, Read, read_by, role_of_read
from .own_hooks import Registration
from .parameters import ParameterRecognition, is_parameter_or_view
from .read_once import ReadOnce
from .readers import Readers, Saved
from .recomputed import BlockAgain, HandOver, keep_handles
from .repeated import Repeated
from .replay import Replay, Replayed, outcome_of
from .roles import Instruction, OperatorObserver, Role, instruction, is_own_relu_save
from .saved_edges import Reads, mark_of, note_saved
from .selective import Way, keep_results, may_not_have_arrived
from .settled import Settled, SettledSaves, may_settle, settled
from .sinks import Captured, Record, Rehearsal, Sink, Store


class LearntNames(NamedTuple):
    """What was learnt about saved tensors in earlier steps, by name."""

    roles: LearntRoles
    stored_as_base: set[str]
    not_held: set[int]
    functions_again: LearntFunctions


class SavedTensorHooks:
    """Packs and unpacks the saved tensors of one model, by the plan it is given."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        rank: int,
        offload: HostOffload | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._model, self.config = model, config
        self.policy = policy_of(config) if policy is None else policy
        stream = open_pack_stream(model) if config.pack_stream else None
        self._roles = KnownRoles(config)
        self._log_softmaxes = self._roles.log_softmaxes
        self.encoder = Encoder(model, config, self.policy, rank, self._log_softmaxes, stream)
        self._job = Store(self.encoder, self.policy.first_plan, Account(), offload, self._roles.derived)
        self._sink: Sink = self._job
        self._offloaded: OffloadStatistics | None = None
        self.given = Given()
        self._arguments: Registration | None = None
        self._namer = Namer(self._watched())
        self._parameters = ParameterRecognition(unwrap(model))
        self._region_parameters = RegionParameters()
        self._storages = StorageRecords()
        self._thread = threading.get_ident()  # that runs the step
        self._bases = SharedBases()
        self._vectors: list[Kept] = []  # copies of small parameters that this forward has made for recipes
        self.functions_again = FunctionsAgain(self._namer, self.encoder.may_derive and config.checkpoint_inputs)
        self._functions = CustomFunctions(self._roles.by_name, self.functions_again)
        self._masks = BooleanMasks()
        self._readers: Readers | None = None  # in a forward that shows them
        self._is_first = True  # the job's own step that comes next, and its roles are those of measurements
        self._instruction: Instruction | None = None  # that is saving, in a step of the job
        self._bypassing = Bypassing(self._parameters, self._note_bypassing)
        self._settled = SettledSaves()
        self._again: list[int] = []  # Record.recomputed of the latest that has some
        self.clock: Clock | None = None
        """of the hooks' seconds, if anyone wants to know them"""

    @property
    def plan(self) -> Plan:
        """What the steps of the job store tensors at."""
        return self._job.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._job.plan = plan
        self._roles.derived.adopt()
        self._settled.forget()

    @property
    def account(self) -> Account:
        """Of the last step of the job."""
        return self._job.account

    @property
    def compresses_recomputed(self) -> bool:
        """Whether what a checkpointed block saves while it runs again is to be compressed as well."""
        return self.config.recomputed and self.policy.adapts and not self.policy.needs_step_bytes

    @property
    def compresses_results(self) -> bool:
        """Whether what selective checkpoints keep is compressed. See [Note: selective checkpoints] in selective.py."""
        return self.policy.rounds and self.config.checkpoint_inputs

    @property
    def keeps_results_exactly(self) -> bool:
        """Whether they are left as they are after all: in a model with compiled parts there is no way to reach them."""
        return self._namer.scope.compiled

    def elements_at_once(self, name: str, numel: int) -> float:
        """Of the elements of a tensor, those that count where the memory of a step is shared out.

        Of what checkpointed blocks save when they run again, no more is there than of the largest of them.
        """
        return numel * max(self._again) / sum(self._again) if self._again and RECOMPUTED in name else float(numel)

    @property
    def reasons(self) -> dict[str, str]:
        """Why tensors are exact that a rule keeps exact, by name."""
        return self._roles.reasons

    @property
    def may_derive(self) -> bool:
        """Whether steps derive tensors, and no forward has shown which."""
        return self._is_first and self.encoder.may_derive and not self._roles.derived.names.made

    @property
    def derived_elements(self) -> int:
        """That a step of this rank makes from others, as far as forwards have shown."""
        return round(sum(self.elements_at_once(name, n) for name, n in self._roles.derived.elements.items()))

    @property
    def derived_names(self) -> list[str]:
        """Of what a step of this rank makes from others, as far as forwards have shown."""
        return [*self._roles.derived.names.made]

    def samples(self, record: Recorded | Noted) -> bool:
        """Whether steps sample a log-softmax. See log_softmax.py."""
        return record.is_log_softmax and self._log_softmaxes.may_sample

    def derive(self) -> None:
        """Before a measurement for a new plan: it derives what steps may derive from then on."""
        self._roles.derived.begin()

    def store(self, names: Iterable[str]) -> None:
        """From now on store tensors that were derived."""
        self._settled.forget()
        for name in names:
            self._roles.derived.store(name)

    def keep_exactly(self, name: str) -> None:
        """From now on a tensor is not rounded."""
        self._settled.forget()
        self._roles.keep_exactly(name)

    def close(self) -> None:
        """Remove the hooks from the model's modules; host memory goes back with the last graph that uses it."""
        self.suspend()
        self._offloaded, self._job.offload = self.offloaded(), None

    def suspend(self) -> None:
        """Take the hooks off the model's modules until resume()."""
        self._unwatch()
        self.encoder.examples.remove()

    def resume(self) -> None:
        """Undo suspend()."""
        self._namer.scope = self._watched()
        self.functions_again.resume()
        self.encoder.examples.watch()

    def _watched(self) -> ModuleScope:
        """Put the hooks on the model's modules."""
        compiled = has_compiled_parts(self._model)
        # a hook on what is compiled itself would be in its graph; one on a model of compiled blocks is not
        if not is_compiled(self._model) and not isinstance(self._model, torch.jit.RecursiveScriptModule):
            self._arguments = self.given.watch(self._model)
        return ModuleScope(self._model, compiled)

    def _unwatch(self) -> None:
        self.functions_again.remove()
        if self._arguments is not None:
            self._arguments.remove()
        self._namer.scope.remove()

    def offloaded(self) -> OffloadStatistics | None:
        """What offload did in the last step whose backward is over; None without offload. Waits for the device."""
        return self._offloaded if self._job.offload is None else self._job.offload.statistics()

    # -- contexts -----------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Start a step: names count from zero, the rounding gets the step's own key, the report starts empty."""
        self.try_functions()
        self._begin_forward(step)
        if self._job.offload is not None:
            self._job.offload.begin()
        self._job.account.begin()

    def try_functions(self) -> bool:
        """Whether custom functions are called in another way from now on. See [Note: functions again]."""
        if not self.functions_again.begin():
            return False
        self._roles.observe_next = True
        self._functions.forget_inputs()
        self._roles.derived.names.made.clear()  # some of it was made from what such a function saved
        self._settled.forget()
        return True

    def _begin_forward(self, step: int) -> None:
        if not self._namer.scope.compiled and has_compiled_parts(self._model):  # compiled since it was attached to
            self._unwatch()
            self._namer.scope = self._watched()
        self._namer.reset()
        self._settled.begin()
        self.given.begin_forward()
        self._forget_step()
        self.encoder.keys.begin(step)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Compress what autograd saves in the context. Raises RuntimeError in a checkpointed function and a capture."""
        refuse_inside_checkpoint()
        refuse_inside_capture()
        observer = readers = None
        if self._roles.observe_next and self.policy.rounds:
            readers = Readers(self._roles, self._sink, trusts_known=self._is_first)
            self._roles.observe_next = self._sink is not self._job  # the job's own first step is observed in any case
            # a compiled region is compiled anew under a function mode, and shows it no operator
            observer = None if self._namer.scope.compiled else OperatorObserver()
        if readers is not None:
            self._settled.forget()
        plain = readers is None and self._sink is self._job
        if IS_BUILT and plain and not self._namer.scope.compiled:
            self._open_settled()
        told = told_of_checkpoints(self._at_checkpoint)
        offered = checkpoints_offering_inputs(self._pack_hook) if self.config.checkpoint_inputs else nullcontext()
        collector = collector_at_rest() if self._sink is self._job else nullcontext()
        try:
            with (
                self._observed(observer, readers, True),
                told,
                offered,
                self._attention_calls(),
                self._saved_tensors_hooks(),
                collector,
            ):
                yield
        finally:
            if readers is not None and not readers.is_done:
                self._roles.observe_next = True
            elif self._sink is self._job:
                self._is_first = False
            self._settled.close()
            self._forget_step()

    @property
    def _pack_hook(self) -> Callable[[Tensor], Any]:
        return self._settled.pack if self._settled.settles and self.clock is None else self._pack

    def _open_settled(self) -> None:
        """In this forward, which learns nothing, what is saved settles and what has settled goes the short way."""
        scope, job = self._namer.scope, self._job
        self._settled.parametrized, self._settled.copies_vectors = scope.parametrized, self.encoder.may_derive
        self._settled.open(
            stack=scope.stack,
            records=self._storages.by_key,
            owned=self._parameters.owned,
            buffers=self._parameters.of_buffers,
            vectors=self._vectors,
            given=self.given.memories,
            account=job.account,
            recent=job.recent,
            keys=job.keys,
            remembered=remembered_calls(),
            bases=self._bases,
            functions=self._functions,
            roles=self._roles,
            keep_parameter=self._kept_of_model,
            is_parameter=self._parameters.is_parameter,
            is_part_of_a_weight=self._is_part_of_a_weight,
            note_part_of_base=self._what_to_store,
            payload=job.payload_again,
            store=self._store_settled,
            after=job.after,
            leave=self._functions.leave,
            in_modes=self._pack,
            long_way=self._pack_long_way,
        )

    def _attention_calls(self) -> AbstractContextManager[None]:
        """What is compiled would be so anew for another function in the place of attention."""
        return attention_calls() if self.policy.rounds and not self._namer.scope.compiled else nullcontext()

    @contextmanager
    def _observed(
        self, observer: OperatorObserver | None, readers: Readers | None, learns: bool = False
    ) -> Iterator[None]:
        """Within the context the operators that run, and those that read what is saved, are seen.

        learns: that nobody reads a tensor.
        """
        self._readers = self._namer.scope.readers = readers
        if observer is not None:
            observer.readers, observer.owned = readers, self._parameters.owns
        try:
            with self._roles.observed(observer, readers is not None):
                yield
            if readers is not None:
                readers.finish(learns, complete=observer is not None)
        finally:
            self._readers = self._namer.scope.readers = None
            if observer is not None:
                observer.readers = None

    @property
    def packs_in_graphs(self) -> bool:
        """Whether the graphs of compiled regions pack what they save themselves."""
        return self.config.compile_hooks == "inlined"

    @contextmanager
    def _saved_tensors_hooks(self) -> Iterator[None]:
        served: AbstractContextManager[None] = nullcontext()
        restore = self._storages.restore
        hooks: tuple[Any, Any] = self._pack_hook, Unpacking(restore).unpack if IS_BUILT else restore
        if self._namer.scope.compiled and self.packs_in_graphs:
            served, hooks = inlined.serving(self._pack, self._pack_in_graph), inlined.hooks()
        elif self._namer.scope.compiled:
            hooks = _uncompiled(self._pack), _uncompiled(self._storages.restore)
        self._thread = threading.get_ident()
        if self.clock is not None and not self._namer.scope.compiled:  # a graph holds those hooks as they are
            hooks = hooks[0], self.clock.timed(hooks[1])
        with served, calls_remembered(), _hooked(*hooks):
            yield

    def _at_checkpoint(self, frame: FrameType, call: Any) -> None:
        """A checkpoint is about to run its block. call: its state."""
        self._bypassing.note(frame)
        rounds = self.compresses_results and not self.keeps_results_exactly
        if rounds and keep_results(frame, self.keep_result, self._roles.note_discrete):
            return  # what its block saves when it runs again is exact
        self._bypassing.watch(frame)
        if self.compresses_recomputed and not self._namer.scope.compiled:
            encoder, plan = self.encoder.of_this_step(), self._job.plan
            keep_handles(call, partial(self._recomputed, encoder, plan, [*self._namer.scope.stack]))

    @contextmanager
    def _recomputed(
        self, encoder: Encoder, plan: Plan, caller_stack: list[Entry], hand_over: HandOver
    ) -> Iterator[None]:
        """Within the context a checkpointed block runs again. See [Note: recomputed].

        caller_stack: the modules whose forwards were running when the checkpoint was called.
        """
        block = BlockAgain(self._namer.scope, self._roles, encoder, plan)

        def pack(tensor: Tensor) -> Any:
            frame = caller()
            with without_modes():
                exact = frame is None or _without_codec(tensor) or type(tensor) not in PLAIN
                of_model = is_parameter_or_view(tensor) or (not exact and self._is_of_model(tensor))
                if of_model or exact or self.given.holds(tensor):
                    handle: Any = Kept(tensor, of_model, encoder.may_derive and of_model)
                else:
                    handle = self._namer.scope.within(frame, block.pack, tensor)
            hand_over(tensor, None if isinstance(handle, Kept) else handle)
            return handle

        stack = self._namer.scope.stack
        before, stack[:] = [*stack], caller_stack
        try:
            with calls_remembered(recomputed=True), _hooked(pack, _unpack):
                yield
        finally:
            stack[:] = before
            block.finish()

    def keep_result(self, tensor: Tensor, operator: Any, way: Way) -> Any:
        """What is kept of a result that a selective checkpoint keeps, in a forward of the job or a recorded one."""
        with without_modes(), counting_versions():
            if type(tensor) not in PLAIN or _without_codec(tensor) or may_not_have_arrived(operator):
                if way is not Way.AGAIN:
                    self._bypassing.add(tensor, str(operator))
                return Kept(tensor)
            record, name, sink = self._storages.of(tensor), self._namer.bypassing(str(operator)), self._sink
            if way is Way.AGAIN:
                return sink.note_made_again(Captured(tensor, name, None, record))
            role = None
            if way is Way.CONSTANT and not sink.records:
                self._roles.keep_exactly(name)
            if way in (Way.ROUNDED, Way.CONSTANT) and sink.wants_role(tensor):
                role = self._roles.role_in_checkpoint(tensor, name, running_checkpoints()[0], sink.records)
            if not isinstance(sink, Record):
                return sink.take(Captured(tensor, name, role, record))
            with replaced(sink, "notes", True):
                noted = sink.take(Captured(tensor, name, role, record))
            noted.is_block_input = True  # what follows is made again from it
            return noted

    def note_discrete(self) -> None:
        """See KnownRoles."""
        self._roles.note_discrete()

    def _forget_step(self) -> None:
        if not self._sink.records:  # a rounded walk makes recipes when the forward is over
            for kept in self._vectors:
                kept.vector = None  # recipes have what they need
        self._vectors.clear()
        self._storages.clear()
        self._roles.forget_step()
        self._functions.forget_step()
        self._region_parameters.forget()
        self._sink.forget_step()

    @contextmanager
    def _instead_of_a_step(self, sink: Sink, step: int) -> Iterator[None]:
        """A forward that is no step of the job goes to a sink of its own, and leaves no trace."""
        self._sink = sink
        self._settled.forget()
        self._begin_forward(step)
        try:
            with self._parameters.with_buffers(self._model):
                yield
        finally:
            self._begin_forward(0)
            self._sink = self._job

    @contextmanager
    def recording(
        self,
        observer: OperatorObserver | None,
        fraction: float = 1.0,
        rounded: Mapping[str, tuple[int, int]] | None = None,
        again: list[Replayed] | None = None,
        packs_bits: bool = False,
    ) -> Iterator[list[Recorded | Noted]]:
        """Keep what autograd saves exactly, and record it under the names that a step would use.

        fraction: of a step's examples that the recorded forward sees; min_numel refers to all of them.
        rounded: name -> (bits, seed) of tensors that backward sees rounded.
        again: given where a graph is differentiated part by part; receives what is saved a second time outside of the
        block that was noted to save it; see noting(). packs_bits: whether what is kept in one bit of each element is
        held so; what the tensor was is lost then.
        """
        least = self.config.min_numel * fraction
        record = Record(self.encoder, least, rounded or {}, self._roles.derived, self._log_softmaxes)
        record.packs_bits = packs_bits
        if again is not None:
            record.again, record.by_parts = again, True
        with self._instead_of_a_step(record, 0):
            readers = None if observer is None else Readers(self._roles, record)
            with self._observed(observer, readers), self._attention_calls(), self._saved_tensors_hooks():
                yield record.found
            record.settle(self._roles.by_name)
        self._again = record.recomputed or self._again

    @contextmanager
    def noting(
        self,
        outcomes: list[Any],
        recomputed: bool = False,
        on_noted: Callable[[Noted, Tensor], None] | None = None,
    ) -> Iterator[None]:
        """Within the context, which is inside recording(), what autograd saves is named and classified but not kept.

        outcomes: receives for each saved tensor, in order, what replay.Replay needs to recognise it again. recomputed:
        whether a checkpoint recomputes it. on_noted: told of what is noted and, while it is there, of the tensor.
        """

        def pack(tensor: Tensor) -> Any:
            frame = caller()
            with without_modes():
                handle = self._namer.scope.within(frame, self._pack_from, tensor)
                if on_noted is not None and isinstance(handle, Noted):
                    on_noted(handle, tensor)
            outcomes.append(outcome_of(handle))
            return handle

        record = self._sink
        if not isinstance(record, Record):
            raise ReplayError("tensors can be noted only while a forward is recorded")
        before, known = (record.notes, record.block, self._namer.recomputed), len(record.found)
        record.notes, record.block, self._namer.recomputed = True, outcomes, recomputed
        storages = self._storages
        if recomputed:  # it will be stored in other memory than that of the forward, where others save its results
            self._storages = StorageRecords()
        try:
            with _hooked(_uncompiled(pack) if self._namer.scope.compiled else pack, _unpack):
                yield
        finally:
            record.notes, record.block, self._namer.recomputed = before
            self._storages = storages
            on_noted = None  # a graph holds the hook, and may itself be held by what on_noted() is a method of
        if recomputed:
            record.recomputed.append(sum(noted.numel for noted in record.found[known:]))

    @contextmanager
    def rehearsal(
        self,
        plan: Plan | None = None,
        draw: int = 0,
        fraction: float = 1.0,
        on_kept: Callable[[Stored, Tensor], None] | None = None,
        derives: bool = True,
    ) -> Iterator[Footprint]:
        """Compress as a step would, note what that keeps, and leave no trace of it.

        plan: used in place of the current one. draw: a different number gives different rounding. fraction: of a step's
        examples that the forward sees. on_kept: told of what is kept of a tensor and, while it is there, of the tensor.
        derives: whether what can be made again is not stored, where the configuration says so.
        """
        footprint = Footprint()
        account = Account(footprint)
        encoder, plan = self.encoder.of_part(fraction), self.plan if plan is None else plan
        encoder.may_derive = encoder.may_derive and derives
        what = encoder, plan, account, None, self._roles.derived  # it need not leave the device
        sink = Store(*what) if on_kept is None else Rehearsal(*what, on_kept=on_kept)
        no_step = self._instead_of_a_step(sink, -draw)  # none of the job has these keys
        with no_step, self.hooks():
            yield footprint
        self.try_functions()
        footprint.exact_bytes, footprint.count, footprint.fraction = account.exact_bytes, account.count, fraction

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learnt of saved tensors in earlier steps, by name."""
        self.try_functions()  # with a call of a forward that has been, which no state holds
        learnt = {
            "store_base": sorted(self._bases.names),
            "arguments_not_held": sorted(self.given.not_held),
            "functions_again": self.functions_again.state_dict(),
        }
        return {**self._roles.state_dict(), **learnt}

    def parse_state(self, state: Mapping[str, Any]) -> LearntNames:
        """What load_state() takes, from what state_dict() gave. Raises StateError and changes nothing."""
        bases = _fields.read(state, "store_base", _fields.sequence(_fields.text), [])
        not_held = _fields.read(state, "arguments_not_held", _fields.sequence(_fields.integer(0)), [])
        again = _fields.read(state, "functions_again", FunctionsAgain.parse_state, LearntFunctions([], {}))
        return LearntNames(KnownRoles.parse_state(state), set(bases), set(not_held), again)

    def load_state(self, learnt: LearntNames) -> None:
        """Go on with what parse_state() returned."""
        self._is_first = False
        self._settled.forget()
        self._roles.load_state(learnt.roles)
        self._bases.names = learnt.stored_as_base
        self.given.not_held.clear()
        self.given.not_held.update(learnt.not_held)
        self.functions_again.load_state(learnt.functions_again)

    # -- pack ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        frame = sys._getframe().f_back  # as caller(), without the call
        if self.clock is None:
            with without_modes():
                return self._pack_at(tensor, frame)
        with self.clock, without_modes():
            return self._pack_at(tensor, frame)

    def _pack_at(self, tensor: Tensor, frame: FrameType | None) -> Any:
        """frame: of the caller of the pack hook."""
        if self._settled.settles:
            handle = self._settled.pack_at(tensor, frame)
            if handle is not None:
                return handle
        return self._pack_within(tensor, frame)

    def _pack_long_way(self, tensor: Tensor) -> Any:
        frame = sys._getframe().f_back
        with without_modes():
            return self._pack_within(tensor, frame)

    def _pack_within(self, tensor: Tensor, frame: FrameType | None) -> Any:
        scope = self._namer.scope
        return scope.within(frame, self._pack_from, tensor) if scope.unhooked else self._pack_from(tensor, frame)

    def _store_settled(self, tensor: Tensor, expected: Settled, record: StorageRecord | None) -> Stored:
        """Of memory that nothing has stored, where that takes more than to do the same again.

        record: of its memory, if there is one.
        """
        was_aliased = None if record is None else record.aliased
        record = self._storages.of(tensor)
        if expected.is_part:
            self._what_to_store(tensor, expected.name, record)
        self._note_mask(tensor, expected.name)
        reads = Reads(partial(self._note_mask, name=expected.name))
        captured = Captured(tensor, expected.name, expected.role, record, reads=reads)
        handle = self._job.take(captured)
        if expected.mark is not None and tensor.grad_fn is not None:
            note_saved(tensor, handle)
            self._job.look_back()
        if expected.is_sign:
            record.relu_versions |= {tensor._version}
        elif expected.span is not None:
            note_part(tensor, record, handle, expected.span)
        expected.again = self._job.again(captured, handle, was_aliased)
        if expected.role is Role.BINARY and handle.is_exact:  # other values than those of a dropout
            self._roles.observe_next = True
        return handle

    def _settle(self, tensor: Tensor, frame: FrameType, site: CallSite, handle: Any, role: Role | None) -> None:
        """What has gone the long way may be as plain in the next step. role: of what is not an alias."""
        base = base_of(handle)
        is_alias = handle is not base
        is_plain = site.region is site.checkpoint is site.function is None and not site.workspace
        if not is_plain or type(base) is not Stored or self._masks.is_running or not may_settle(role):
            return
        if self._log_softmaxes.is_one(base.name):
            return
        scope = self._namer.scope
        entry = scope.unhooked_at(frame) if scope.unhooked else None
        met = settled(tensor, frame, entry, scope.stack, is_alias)
        if met is None:
            return
        met.name, met.role, met.is_sign, met.series = base.name, role, role is Role.SIGN, self._namer.latest
        met.occurrence = met.series.count - 1
        if not self.policy.rounds:
            met.is_part = met.is_attention = False
        if self.encoder.may_derive and tensor.is_floating_point() and not met.is_sign:
            met.mark = mark_of(tensor)
        self._settled.settle((base.name, is_alias and (id(frame.f_code), frame.f_lasti)), met)

    def _pack_from(self, tensor: Tensor, frame: FrameType | None) -> Any:
        """frame: of the caller of the pack hook; None in a thread without Python frames."""
        if in_backward():
            return self._pack_in_backward(tensor, frame)
        if self._readers is not None:
            self._readers.examine_below(tensor)
        if type(tensor) is nn.Parameter and frame is not None:
            call_without_frame(frame, tensor)  # has saved it
            return self._kept_of_model(tensor)
        if _without_codec(tensor):
            return self._keep(tensor, frame)
        if frame is None:  # a branch of torch.jit.fork: no line to name it by, and the step goes on beside it
            return Kept(tensor)
        if self._is_of_model(tensor):
            call_without_frame(frame, tensor)
            return self._kept_of_model(tensor)
        sink, rounds = self._sink, self.policy.rounds
        self._instruction = instruction(frame, self._readers is not None) if sink is self._job else None
        if type(tensor) not in PLAIN_OR_PARAMETER:
            return self._pack_distributed(tensor, CallSite(current_line()), frame)
        site = (site_in_checkpoint if self._namer.recomputed else call_site)(frame, tensor)
        if site.region is not None:
            self._instruction = None  # the compiler's, which it may write anew
        if site.region is not None and tensor.grad_fn is None and self._region_parameters.share(tensor, site.region):
            return Kept(tensor, of_model=True)
        if site.checkpoint is not None and is_no_input(tensor, behind_compiler(frame)):
            return Kept(tensor)
        if self.given.holds(tensor):
            if site.checkpoint is not None:
                self._bypassing.add_held(site.checkpoint)
            return self.given.keep(tensor)
        if is_workspace(frame, tensor):
            site = site._replace(workspace=True)
        record = self._storages.of(tensor)
        if site.checkpoint is not None:
            self._bypassing.add_held(site.checkpoint)
            if tensor.is_floating_point() and rounds:
                return self._pack_block_input(tensor, record, site, site.checkpoint)
        else:
            self._roles.latest_call = None
        read = read_by(frame, tensor, sink.wants_role(tensor))
        sign_only = rounds and tensor._version not in record.relu_versions and is_own_relu_save(tensor)
        if sign_only:
            record.relu_versions |= {tensor._version}
        elif read is None:
            alias = alias_of(tensor, record)
            if alias is not None:
                if self._may_share(tensor, alias, site):
                    handle = self._pack_alias(tensor, record, site, alias)
                    if self._settled.settles:
                        self._settle(tensor, frame, site, handle, None)
                    return handle
                if site.function is not None:
                    return self._pack_operand(tensor, record, site, site.function, alias.base.name)
        return self._pack_new(tensor, record, site, Role.SIGN if sign_only else None, read, frame)

    def _may_share(self, tensor: Tensor, alias: View, site: CallSite) -> bool:
        """Whether what is stored may serve a tensor as well: an input of a custom function may have to be exact."""
        if site.function is None or not self.policy.rounds or not self._sink.wants_role(tensor):
            return True
        held = self._readers is not None and self._readers.holds(alias.base)
        if isinstance(alias.base, Stored) and alias.base.is_exact and not held:
            return True
        place = self._namer.place(site, site.function.name)
        return not self._functions.needs_exact(tensor, site.function, place)

    def _pack_operand(
        self, tensor: Tensor, record: StorageRecord, site: CallSite, call: FunctionCall, stored_as: str
    ) -> Any:
        """An input of a custom function that must be exact, of memory that is stored rounded under another name."""
        self._roles.learn_alias(stored_as, self._place(site), Role.ACTIVATION)  # should the function turn out not to
        function = call.name
        name = self._namer.name_of_operand(site, function)
        role = self._functions.role(
            tensor, name, Role.ACTIVATION, call, self._namer.place(site, function), self._sink.records
        )
        stored = self._sink.take(Captured(tensor, name, role, record))
        if isinstance(stored, (Stored, Noted)):
            stored.keeps_gaps = True  # as in _pack_new()
        note_stored(tensor, record, stored)
        return stored

    def _pack_in_backward(self, tensor: Tensor, frame: FrameType | None) -> Any:
        """What a backward with create_graph=True saves. Much of it is what it reads, which is stored already."""
        self._instruction = None
        site = site_in_backward(frame, self._thread)
        if site is not None and self._readers is not None:  # which would hold the graph of what is recomputed
            self._readers.examine_below(tensor)
        if _without_codec(tensor):
            return self._keep(tensor, frame)
        if self._is_of_model(tensor):
            return Kept(tensor, of_model=True)
        if site is None:
            return Kept(tensor)  # what is recomputed is freed at once
        if type(tensor) not in PLAIN_OR_PARAMETER:
            return self._pack_distributed(tensor, site)
        if self.given.holds(tensor):
            return self.given.keep(tensor)
        record = self._storages.of(tensor)
        alias = alias_of(tensor, record)
        if alias is not None:
            return self._pack_alias(tensor, record, site, alias)
        return self._pack_new(tensor, record, site)

    def _pack_alias(self, tensor: Tensor, record: StorageRecord, site: CallSite, view: View, whole: Any = None) -> Any:
        """A tensor inside of memory that is stored already, for another reader. See [Note: readers].

        whole: the distributed tensor whose local part it is.
        """
        name, readers = view.base.name, self._readers
        captured = Captured(tensor, name, Role.ACTIVATION, record, whole)
        rounded = self._roles.by_name.get(name) in (Role.ACTIVATION, Role.LOG_SOFTMAX)
        if readers is not None:
            handle = self._sink.alias(tensor, view, whole)
            self._note(tensor, handle, whole)
            if rounded or readers.holds(view.base):
                readers.wait(Saved(handle, view.base, captured, self._place(site), view))
            return handle
        if rounded and not self._sink.records and self._roles.alias_role(name, self._place(site)) is None:
            self._roles.observe_next = True
            self._sink.keep_exactly(view, captured)
        handle = self._sink.alias(tensor, view, whole)
        self._note(tensor, handle, whole)
        return handle

    def _note(self, tensor: Tensor, handle: Any, whole: Any = None) -> None:
        """For recipes; see [Note: edges] in saved_edges.py. whole: as for _pack_alias()."""
        if self.encoder.may_derive and whole is None and tensor.is_floating_point():
            note_saved(tensor, handle)

    def _place(self, site: CallSite) -> Place:
        stack = self._namer.scope.stack
        return site.line, stack[-1][0] if stack else None, self._instruction

    def _is_of_model(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or made from parameters alone."""
        scope = self._namer.scope
        if self._parameters.is_parameter(tensor, scope.innermost):
            return True
        return scope.parametrized and self._is_part_of_a_weight(tensor)

    def _is_part_of_a_weight(self, tensor: Tensor) -> bool:
        """Whether a parametrization has made it, or is saving it."""
        scope = self._namer.scope
        if scope.makes_a_weight:
            return True
        return bool(scope.made) and tensor.layout == torch.strided and storage_id(own_part(tensor)) in scope.made

    def _keep(self, tensor: Tensor, frame: FrameType | None) -> Kept:
        """A tensor of a kind that no codec knows. A sparse or a quantised one has a row, but for the model's own."""
        if frame is None or tensor.is_nested or is_inside_transform(tensor) or self.given.holds_parts_of(tensor):
            return Kept(tensor)
        site = site_in_backward(frame, self._thread) if in_backward() else CallSite(current_line())
        kind = "Quantised" if tensor.is_quantized else "Sparse"
        return Kept(tensor) if site is None else self._kept(tensor, kind, site)

    def _kept_of_model(self, tensor: Tensor) -> Kept:
        derives = self.encoder.may_derive
        kept = Kept(tensor, True, derives, derives and self._parameters.is_buffer(tensor))
        if kept.vector is not None:
            self._vectors.append(kept)
        return kept

    def _pack_subclass(self, tensor: Tensor, site: CallSite) -> Any:
        """A subclass is kept as it is, unless another tensor in its memory is stored already."""
        plain = without_subclass(tensor)
        if plain is not None and self.given.holds(plain):
            return Kept(tensor)
        alias = None if plain is None else alias_of(plain, self._storages.of(plain))
        if alias is None or plain is None:
            return self._kept(tensor, type(tensor).__name__, site)
        stored = self._pack_alias(plain, self._storages.of(plain), site, alias)
        return Distributed(stored, partial(Tensor.as_subclass, cls=type(tensor)))

    def _kept(self, tensor: Tensor, kind: str, site: CallSite) -> Kept:
        of_model = self._parameters.owns(tensor)
        if not of_model and not tensor.is_meta:
            self._sink.note_kept(tensor, self._namer.kept(kind, site), self._storages.of)
        return Kept(tensor, of_model)

    def _pack_new(
        self,
        tensor: Tensor,
        record: StorageRecord,
        site: CallSite,
        role: Role | None = None,
        read: Read | None = None,
        frame: FrameType | None = None,
    ) -> Any:
        """A tensor whose memory is not stored yet, or of which less than all is read: that is stored beside what others
        read.

        role: Role.SIGN, or else as it is found. read: what is read of it if that is less than all. frame: of the caller
        of the pack hook, in a forward.
        """
        name = self._namer.name(tensor, site)
        rounds, target = self.policy.rounds, tensor
        self._note_mask(tensor, name)
        if rounds and read is None and tensor._is_view():
            target = self._what_to_store(tensor, name, record)
        sink = self._sink
        own = role or (self._role(target, name, site) if read is None else role_of_read(target, read))
        role = self._role_in_function(target, name, own, site) if rounds else own
        captured = sink.without_repeats(Captured(target, name, role, record, None, read))
        if role is Role.STATISTIC and self._masks.is_running and not sink.records:
            captured = captured._replace(recipe=self._mask_again(target, name))
        stored: Any = sink.hold(captured) if captured.role is Role.UNREAD else sink.take(captured)
        handle = stored
        if isinstance(stored, (Stored, Noted)) and not (site.region is site.function is None):
            stored.keeps_gaps = True  # code that was made for these strides, or that may be
        if captured.repeats is not None:
            handle = Repeated(stored, tensor, captured.repeats)
            note_stored(tensor, record, handle)
        else:
            if role is not Role.SIGN and (read is None or isinstance(read, Below)):
                note_stored(target, record, stored)
            if target is not tensor:
                offset = int(tensor.storage_offset() - target.storage_offset())
                handle = View(stored, tensor, offset, lazy_bits(tensor) ^ lazy_bits(target))
                self._note(target, stored)
        if role is None or not role.is_one_bit:
            self._note(tensor, handle)
        if self._readers is not None and read is None:
            self._await_reader(self._readers, handle, stored, captured, site, own)
        sink.after(tensor.grad_fn)
        if self._settled.settles and frame is not None and handle is stored and read is captured.recipe is None:
            self._settle(tensor, frame, site, handle, role)
        return handle

    def _what_to_store(self, tensor: Tensor, name: str, record: StorageRecord) -> Tensor:
        """A view or its base; see SharedBases."""
        target = self._bases.what_to_store(tensor, name, record)
        if self._bases.grew:
            self._bases.grew, self._roles.observe_next = False, True
        return target

    def _mask_again(self, tensor: Tensor, name: str) -> Recipe | None:
        """How to make what attention keeps of a boolean mask. See [Note: boolean masks] in boolean_masks.py."""
        mask = self._masks.behind(tensor, name, self._readers is not None) if self.encoder.is_large(tensor) else None
        if mask is None:
            return None
        return Recipe(MaskAgain(self._handle_of_mask(mask, f"{name} of booleans"), tensor), tensor)

    def _note_mask(self, tensor: Tensor, name: str) -> None:
        """What attention has added to the scores of its probabilities. See [Note: scores again]."""
        call = call_with_mask(tensor) if self.encoder.may_derive and self.policy.rounds else None
        if call is not None and self._sink.records:
            note_added(tensor, call)
        elif call is not None:  # a copy, for no operator saves it, and it may be written over
            keep = partial(self._handle_of_mask, name=f"{name} mask", copies=True)
            note_added(tensor, call, lambda mask: keep(once(mask)))

    def _handle_of_mask(self, mask: Tensor, name: str, copies: bool = False) -> Any:
        """Of one that no operator saves. It serves all layers that have the same."""
        record = self._storages.of(mask)
        handle: Any = self.given.keep(mask) if self.given.holds(mask) else alias_of(mask, record)
        if handle is None:
            record.seen_bytes = max(record.seen_bytes, mask.untyped_storage().nbytes())
            own = mask.clone() if copies else mask
            role = None if mask.dtype is torch.bool else Role.STATISTIC
            handle = self._sink.take(Captured(own, name, role, record))
            if own.stride() == mask.stride():
                note_stored(mask, record, handle)
        return handle

    def _role_in_function(self, tensor: Tensor, name: str, role: Role | None, site: CallSite) -> Role | None:
        """What a custom function that is saving makes of a tensor's role."""
        if site.function is None:
            self._functions.leave()
            return role
        place = self._namer.place(site, site.function.name)
        known = Role.ACTIVATION if role is Role.UNREAD else role
        found = self._functions.role(tensor, name, known, site.function, place, self._sink.records)
        return role if found is known else found

    def _take(self, captured: Captured) -> Any:
        return self._sink.hold(captured) if captured.role is Role.UNREAD else self._sink.take(captured)

    def _await_reader(
        self, readers: Readers, handle: Any, stored: Any, captured: Captured, site: CallSite, role: Role | None
    ) -> None:
        """In a step that shows it. handle: what the graph holds of what is stored.

        role: that the tensor has outside of a custom function, which may keep it exactly until it is judged.
        """
        if role in (Role.UNREAD, Role.ACTIVATION, Role.LOG_SOFTMAX):
            waiting = Saved(handle, stored, captured._replace(role=Role.ACTIVATION), self._place(site))
            readers.wait(waiting, held=captured.role is Role.UNREAD)

    def _pack_block_input(self, tensor: Tensor, record: StorageRecord, site: CallSite, call: FrameType) -> Any:
        """An input of a checkpointed block: an alias that is stored already may be rounded only where it may be."""
        name = self._namer.block_input(site)
        known = name in self._roles.by_name or not self._sink.records
        role = self._roles.role_of_block_input(tensor, name, call, self._sink.records)
        alias = alias_of(tensor, record) if known and role is Role.ACTIVATION else None
        if alias is not None:
            return self._sink.alias_input(tensor, alias)
        stored = self._sink.take(Captured(tensor, name, role, record))
        if isinstance(stored, (Noted, Replaceable)):
            stored.is_block_input = True
        if isinstance(stored, Noted):
            stored.recomputes = self.compresses_recomputed
        if not (self._sink.records and self.compresses_recomputed):  # there a block runs on its input's own memory
            note_stored(tensor, record, stored)
        return stored

    def _pack_distributed(self, tensor: Tensor, site: CallSite, frame: FrameType | None = None) -> Any:
        """The local part of a DTensor, under the name and role that the whole has; other subclasses are kept.

        frame: of the caller of the pack hook, None in a backward.
        """
        local = local_part(tensor)
        if local is None or type(local) not in PLAIN:
            return self._pack_subclass(tensor, site)
        if tensor.grad_fn is None and self.given.holds(local):
            return Kept(tensor)
        record = self._storages.of(local)
        read = None if frame is None else read_by(frame, local, self._sink.wants_role(local))
        alias, again = None if read is not None else alias_of(local, record), distributed_again(tensor)
        if alias is not None:
            return Distributed(self._pack_alias(local, record, site, alias, tensor), again, layout_of(tensor))
        name = self._namer.name(tensor, site)
        if read is not None:
            role = role_of_read(local, read)
        else:
            role = self._roles.role(
                tensor, name, site, self._namer.scope.innermost, self._sink.records, self._instruction
            )
        captured = Captured(local, name, role, record, tensor, read)
        stored = self._take(captured)
        if read is None:
            note_stored(local, record, stored)
        handle = Distributed(stored, again, layout_of(tensor))
        if self._readers is not None and read is None:
            self._await_reader(self._readers, handle, stored, captured, site, role)
        return handle

    def _pack_in_graph(self, tensor: Tensor, label: str, alias: bool) -> codec.Packed:
        """What is kept of a tensor that a region's graph packs itself. See [Note: inlined hooks] in inlined.py."""
        if in_backward():
            return codec.pack(tensor, bits=None)
        self._instruction = None
        site = CallSite(None, running_region(sys._getframe(1)))
        name = self._namer.name_in_graph(site.region, label)
        # each with a record of its own: a graph reuses its buffers, so one storage holds many tensors
        record = StorageRecord(tensor)
        record.seen_bytes = tensor.untyped_storage().nbytes() if alias else 0
        return self._sink.take_in_graph(Captured(tensor, name, self._role(tensor, name, site), record))

    def _role(self, tensor: Tensor, name: str, site: CallSite) -> Role | None:
        sink, stack = self._sink, self._namer.scope.stack
        if not sink.wants_role(tensor):
            return None
        module = stack[-1][1] if stack else None
        return self._roles.role(tensor, name, site, module, sink.records, self._instruction)

    def _note_bypassing(self, tensor: Tensor, operator: str, part: tuple[int, int]) -> None:
        """A checkpoint keeps a tensor past all hooks. part: of its storage, (offset, span)."""
        if self.given.holds(tensor):
            return
        record = self._storages.of(tensor)
        if part not in record.bypassing:
            record.bypassing |= {part}
            self._sink.note_bypassing(Captured(tensor, self._namer.bypassing(operator), None, record))


def _without_codec(tensor: Tensor) -> bool:
    """Whether a tensor is of a kind that no codec knows."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return True
    return tensor.is_nested or is_inside_transform(tensor)


def _unpack(handle: Any) -> Tensor:
    with without_modes():
        return handle.restore()


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook around compiled regions: where a graph breaks the compiler would compile it as well."""
    return torch.compiler.disable(hook)


@contextmanager
def replaying(replay: Replay, whole: bool = True, compiled: bool = False) -> Iterator[None]:
    """Within the context a block runs again. Raises ReplayError if it does not save what it did at first.

    whole: false for a checkpoint in a block that runs again. compiled: whether it runs compiled regions.
    """
    # the graph holds its pack hook, and a replay holds nodes of the graph: a cycle that the collector does not see
    running: Any = WeakMethod(replay.pack)

    def pack(tensor: Tensor) -> Any:
        with without_modes():
            return running()(tensor)

    # what is compiled would be so anew for another function in the place of attention
    calls = nullcontext() if compiled else attention_calls()
    with calls, _hooked(_uncompiled(pack) if compiled else pack, _unpack):
        yield
    if whole:
        replay.check_complete()


def nothing_kept() -> AbstractContextManager[None]:
    """A context in which graphs keep nothing, for a function whose backward will not run.

    They do show which of what they would keep are parameters. See [Note: operands without a graph] in parameters.py.
    """
    return _hooked(_only_shown, _unpack)


def _only_shown(tensor: Tensor) -> Kept | Noted:
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return Kept(tensor, of_model=True)
    return Noted("", tensor.shape, 8 * tensor.element_size(), None)


def kept_exactly() -> AbstractContextManager[None]:
    """A context in which graphs keep all that is saved as it is, and nobody looks at it."""
    return _hooked(Replaceable, _unpack)


@contextmanager
def read_once() -> Iterator[ReadOnce]:
    """Within the context graphs keep what is saved as it is, until the last backward has read it."""
    held = ReadOnce()

    def pack(tensor: Tensor) -> Any:
        with without_modes():
            return held.keep(tensor)

    with _hooked(pack, held.restore):
        yield held


@contextmanager
def _hooked(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """Within the context these are the innermost hooks, except inside of torch.func transforms.

    grad() and its kin refuse to run under any hooks. With these they run without: what they save is kept exactly.
    """
    load_compiler()  # which keeps what it finds in this place when it is imported
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disable_others(message: str) -> Iterator[None]:
        with without_innermost_hooks(pack), disable(message):
            yield

    refusal = replaced(torch.autograd.graph, "disable_saved_tensors_hooks", disable_others)
    with refusal, saved_tensors_hooks(pack, unpack):
        yield


def refuse_inside_capture() -> None:
    """Raise RuntimeError while a CUDA graph is captured: it would keep the seeds, and so the noise, of one step."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a step of gact_dist began while a CUDA graph is captured: each replay would round with the random numbers "
            "of this step and under its plan. Capture without gact_dist (policy 'off', or no attach), or leave the "
            "model's forward out of the capture"
        )
