"""The roles of saved tensors as earlier steps found them, by name.

[Note: discrete blocks] A checkpointed block whose input comes back rounded recomputes from it. Where the block decides
on values (routing in a mixture of experts, boolean indexing), the recomputation could decide otherwise: other shapes,
which checkpoint reports as an error, or other experts, which nothing reports. So a block's inputs are kept exactly
until an observed forward has shown that it calls no such operator; see roles.py for which these are.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .. import _fields
from .._torch_internals import BatchNorm
from ..config import Config
from .call_stack import CallSite
from .checkpoint import running_checkpoints
from .compiled import RegionRoles
from .roles import OperatorObserver, Role, is_binary, role_of_itself

_log = logging.getLogger(__name__)


class KnownRoles:
    """Finds the role of each saved tensor, and remembers the roles that only an observed step can show."""

    def __init__(self, config: Config) -> None:
        self.by_name: dict[str, Role] = {}
        self._kinds: dict[str, tuple[torch.dtype, int]] = {}  # what had the role
        self.observe_next = True
        """whether the next step should be observed: a tensor without a known role was met"""
        self._compresses_block_inputs = config.checkpoint_inputs
        self._keeps_batch_norm_inputs = not config.batch_norm_inputs
        self._observer: OperatorObserver | None = None
        self._regions = RegionRoles(self.by_name)
        self._block_inputs: dict[int, list[str]] = defaultdict(list)  # names, by the frame of their checkpoint() call
        # calls of checkpoint() by their ids, which no other frame has while these are held
        self._discrete: dict[int, FrameType] = {}
        self.latest_call: FrameType | None = None
        """of checkpoint(); None once something else than its inputs is saved, so that its frame may go"""

    @contextmanager
    def observed(self, observer: OperatorObserver | None) -> Iterator[None]:
        """Within the context the observer sees every operator; None observes nothing."""
        if observer is None:
            yield
            return
        self.observe_next, self._observer = False, observer
        observer.on_discrete = self._note_discrete
        try:
            with observer:
                yield
        finally:
            self._observer = None

    def forget_step(self) -> None:
        """At the end of a step: what was met in it is classified, roles stay."""
        self._block_inputs.clear()
        self._discrete.clear()
        self.latest_call = None
        self._regions.classify()

    def role(self, tensor: Tensor, name: str, site: CallSite, module: nn.Module | None, recording: bool) -> Role:
        """What a floating tensor is to the operator that saves it now.

        module: the one whose forward is running. recording: roles are looked at when the forward is over.
        """
        if site.checkpoint is not None:
            return self.role_of_block_input(name, site.checkpoint, recording)
        if site.in_backward:  # its operators are observed by no mode: a tensor without a graph may be anything
            return role_of_itself(tensor) or Role.STATISTIC
        if self._keeps_batch_norm_inputs and isinstance(module, BatchNorm):
            return Role.STATISTIC
        if site.region is not None and tensor.grad_fn is None:
            return self._regions.role(site.region, name, tensor)
        known = role_of_itself(tensor)
        if known is not None:
            return known
        if self._observer is None:
            return self._remembered(tensor, name)
        self._kinds[name] = tensor.dtype, tensor.dim()
        found = self.by_name[name] = self._observer.role(tensor)
        return found

    def _remembered(self, tensor: Tensor, name: str) -> Role:
        """The role that an earlier step found under a name, for a tensor that is of the same kind. See [Note: names].

        A branch that is not taken, such as a dropout that is off, leaves its name to the next tensor on the line.
        """
        role, kind = self.by_name.get(name), (tensor.dtype, tensor.dim())
        if role is None or self._kinds.setdefault(name, kind) != kind:
            self.observe_next = True
            return Role.STATISTIC
        if role is Role.BINARY and not (tensor.device.type == "cpu" and is_binary(tensor)):
            # an accelerator would have to be waited for; torch saves its dropout's noise as booleans there
            self.observe_next |= tensor.device.type == "cpu"
            return Role.STATISTIC
        return role

    def role_of_block_input(self, name: str, call: FrameType, recording: bool) -> Role:
        """Whether an input of a checkpointed block may be rounded. See [Note: discrete blocks].

        call: of checkpoint(). recording: as for role().
        """
        if not self._compresses_block_inputs:
            return Role.STATISTIC
        if call is not self.latest_call:
            self.latest_call = call
            if id(call) not in self._discrete:  # names of an earlier frame at the same place
                self._block_inputs[id(call)].clear()
        self._block_inputs[id(call)].append(name)
        known = self.by_name.get(name)
        if self._observer is None:
            self.observe_next |= known is None
            return known or Role.STATISTIC
        if known is not None:
            return known
        found = self.by_name[name] = Role.STATISTIC if id(call) in self._discrete else Role.ACTIVATION
        return found if recording else Role.STATISTIC  # in a step the block has yet to run

    def _note_discrete(self) -> None:
        """The operator about to run decides on its operands: the blocks around it need their inputs exactly."""
        for call in running_checkpoints():
            self._discrete[id(call)] = call
            for name in self._block_inputs[id(call)]:
                if self.by_name.get(name) is not Role.STATISTIC:
                    _log.info("%s is kept exactly: its checkpointed block takes discrete decisions", name)
                    self.by_name[name] = Role.STATISTIC

    def state_dict(self) -> dict[str, str]:
        """{name: role}."""
        return {name: role.value for name, role in self.by_name.items()}

    @staticmethod
    def parse_state(name: str, state: Any) -> dict[str, Role]:
        """What load_state() takes, from what state_dict() gave. Raises StateError."""
        return _fields.mapping(_role)(name, state)

    def load_state(self, roles: Mapping[str, Role]) -> None:
        """Go on with these roles."""
        self.by_name.clear()
        self.by_name.update(roles)
        self._kinds.clear()


def _role(name: str, value: Any) -> Role:
    known = [role.value for role in Role]
    if value not in known:
        raise _fields.StateError(f"{name!r} is {value!r}, expected one of {', '.join(known)}")
    return Role(value)
