"""What a checkpointed block saves while it runs again, in a few bits.

[Note: recomputed] A checkpoint keeps a block's inputs, and when the backward first asks for a tensor of the block it
runs the block again and keeps all that this saves, until the backward has used it. With many blocks whose inputs are
compressed that one block is the peak of the step. So within it our hooks are the innermost: each tensor becomes a
handle, as in a step without checkpoints, and the checkpoint is given the handle to keep in the tensor's place. It keeps
the tensors in a dictionary; ours restores a handle when the tensor is asked for.

Only what a measurement has seen of a block is rounded, by its name, which has a "~" because the same module may be
called outside of checkpoints as well. All else stays as it is. A measurement runs a checkpointed block as it runs
others, so that these tensors have a sensitivity, a place in the plan, and a part in the comparison with the exact
gradient. What the block makes from others that it saves shows when it runs again in a backward of the job, and is
derived from the next measurement on, which follows both paths. The first step compares the default widths; from then
on, until there is a plan, a block that runs again has them. The plan and the random numbers are those of the block's
forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .._torch_internals import CheckpointFrame, innermost_hooks
from ..policies import Bits, Plan
from .accounting import Account
from .aliases import StorageRecord, StorageRecords, alias_of, note_stored
from .call_stack import CallSite, site_in_checkpoint
from .custom_functions import CustomFunctions
from .derived import in_graph
from .encoder import Encoder
from .handles import Stored, View
from .known_roles import KnownRoles
from .naming import ModuleScope, Namer
from .one_bit import Limits, read_by, role_of_read
from .repeated import Repeated
from .roles import Role, is_own_relu_save
from .saved_edges import note_saved
from .sinks import Captured, Store

HandOver = Callable[[Tensor, Any], None]
Packing = Callable[[HandOver], AbstractContextManager[None]]


class _Exchange:
    """Between the hook of a block that runs again and what its checkpoint keeps."""

    __slots__ = ("handle", "only_shapes")

    def __init__(self) -> None:
        self.handle: Any = None
        """to keep in place of the tensor that is being saved; None for that itself"""
        self.only_shapes = False
        """whether only shape, type and device of what is kept are looked at"""


class _Kept(WeakKeyDictionary):
    """What a checkpoint keeps of one backward, with handles in place of some of the tensors."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def __setitem__(self, key: Any, tensor: Tensor) -> None:
        handle = self._exchange.handle
        super().__setitem__(key, tensor if handle is None else (handle, tensor.shape, tensor.dtype, tensor.device))

    def __getitem__(self, key: Any) -> Tensor:
        found = super().__getitem__(key)
        if isinstance(found, Tensor):
            return found
        handle, shape, dtype, device = found
        if self._exchange.only_shapes:
            return torch.empty((), dtype=dtype, device=device).expand(shape)
        if isinstance(handle, Stored) and isinstance(handle.payload, Tensor):
            return handle.payload  # modified meanwhile or not, as from a checkpoint without hooks
        tensor: Tensor = handle.restore()
        return tensor


class _Frame(CheckpointFrame):
    """One call of a checkpoint that keeps handles."""

    def check_recomputed_tensors_match(self, gid: Any) -> None:
        """As it is, without restoring every tensor for its shape."""
        self.exchange.only_shapes = True
        try:
            super().check_recomputed_tensors_match(gid)
        finally:
            self.exchange.only_shapes = False


class _Recompute:
    """Runs a checkpointed block again with our hooks inside of the checkpoint's."""

    def __init__(self, run: Callable[..., None], exchange: _Exchange, packing: Packing) -> None:
        self._run, self._exchange, self._packing = run, exchange, packing

    def __call__(self, *args: Any) -> None:
        top = innermost_hooks()
        with self._packing(partial(self._hand_over, top[0])):
            self._run(*args)

    def _hand_over(self, keep: Callable[[Tensor], Any], tensor: Tensor, handle: Any) -> None:
        """Have the checkpoint keep a handle in place of a tensor. Raises what ends the run where it was the last."""
        self._exchange.handle = handle
        try:
            keep(tensor)
        finally:
            self._exchange.handle = None


def keep_handles(frame: Any, packing: Packing) -> None:
    """Have one call of a non-reentrant checkpoint keep handles. frame: its state, before its block has run.

    packing(hand_over): a context in which what is saved becomes a handle; its hook calls hand_over(tensor, handle).
    Does nothing where torch's checkpoints keep tensors in another way.
    """
    if getattr(frame.recomputed, "default_factory", None) is not WeakKeyDictionary:
        return
    exchange = frame.exchange = _Exchange()
    frame.recompute_fn = _Recompute(frame.recompute_fn, exchange, packing)
    frame.recomputed = defaultdict(partial(_Kept, exchange))
    frame.__class__ = _Frame


class BlockAgain:
    """What a checkpointed block saves in one further run."""

    def __init__(self, scope: ModuleScope, roles: KnownRoles, encoder: Encoder, plan: Plan) -> None:
        """encoder, plan: of the block's forward."""
        self._namer, self._roles, self._encoder, self._plan = Namer(scope, recomputed=True), roles, encoder, plan
        self._sink = Store(encoder, plan, Account(), derived=roles.derived)
        self._storages = StorageRecords()
        self._functions = CustomFunctions(roles.by_name)

    def pack(self, tensor: Tensor, frame: FrameType) -> Stored | View:
        """The handle of a plain tensor that is not the model's. frame: of the caller of the pack hook."""
        site, record = site_in_checkpoint(frame, tensor), self._storages.of(tensor)
        floating = self._encoder.rounds(tensor)
        sign = floating and is_own_relu_save(tensor)
        read = None if sign else read_by(frame, tensor, floating)
        alias, unsaved = None if sign or read is not None else alias_of(tensor, record), None
        derives = floating and self._encoder.may_derive
        if alias is not None and not self._may_have(alias.base, tensor, site):
            return _as_it_is(alias.base.name, tensor)
        if alias is not None:
            if derives:
                note_saved(tensor, alias)
            return alias
        name = self._namer.name(tensor, site)
        if self._of_function(tensor, name, site) is not Role.ACTIVATION:
            return _as_it_is(name, tensor)
        if sign:
            return self._sink.take(Captured(tensor, name, Role.SIGN, record))
        if read is not None:
            role = role_of_read(tensor, read)
            if isinstance(read, Limits) and self._bits(tensor, name) is None:
                return _as_it_is(name, tensor)
            return self._sink.take(Captured(tensor, name, role, record, None, read))
        if derives:
            unsaved = self._roles.derived.note_again(name, tensor, in_graph(tensor))
        handle = self._handle(tensor, record, name)
        if unsaved is not None and isinstance(handle, Stored):
            self._sink.try_later(handle, tensor, tensor, unsaved)
        note_stored(tensor, record, handle)
        if derives:
            note_saved(tensor, handle)
        self._sink.after(tensor.grad_fn)
        return handle

    def finish(self) -> None:
        """The block has run."""
        self._sink.forget_step()

    def _of_function(self, tensor: Tensor, name: str, site: CallSite) -> Role | None:
        """The role that a custom function which is saving leaves to an activation. See [Note: custom functions]."""
        if site.function is None:
            self._functions.leave()
            return Role.ACTIVATION
        place = self._namer.place(site, site.function.name)
        return self._functions.role(tensor, name, Role.ACTIVATION, site.function, place, False)

    def _may_have(self, stored: Any, tensor: Tensor, site: CallSite) -> bool:
        """Whether another reader may have what is stored already."""
        if stored.is_exact:
            return True
        call = site.function
        if call is not None and self._functions.needs_exact(tensor, call, self._namer.place(site, call.name)):
            return False
        stack = self._namer.scope.stack
        place = site.line, stack[-1][0] if stack else None, None
        return self._roles.alias_role(stored.name, place) is Role.ACTIVATION

    def _bits(self, tensor: Tensor, name: str) -> Bits:
        """None where no measurement has seen the tensor, nor a comparison with the exact gradient."""
        is_known = name in self._plan.bits or self._roles.remembered(tensor, name) is Role.ACTIVATION
        return self._plan.bits_of(name) if is_known else None

    def _handle(self, tensor: Tensor, record: StorageRecord, name: str) -> Stored | Repeated:
        role = None
        if not self._encoder.rounds(tensor):
            if tensor.dtype != torch.bool or not self._encoder.is_large(tensor):
                return _as_it_is(name, tensor)
        elif self._bits(tensor, name) is not None:
            role = Role.ACTIVATION
        elif self._roles.remembered(tensor, name) is Role.BINARY:
            role = Role.BINARY
        else:
            return _as_it_is(name, tensor)
        captured = self._sink.without_repeats(Captured(tensor, name, role, record))
        stored = self._sink.take(captured)
        return stored if captured.repeats is None else Repeated(stored, tensor, captured.repeats)


def _as_it_is(name: str, tensor: Tensor) -> Stored:
    return Stored(name, tensor, tensor.detach())
