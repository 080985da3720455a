"""The roles of saved tensors as earlier steps found them, by name.

[Note: discrete blocks] A checkpointed block whose input comes back rounded recomputes from it. Where the block decides
on values (routing in a mixture of experts, boolean indexing), the recomputation could decide otherwise: other shapes,
which checkpoint reports as an error, or other experts, which nothing reports. So a block's inputs are kept exactly
until an observed forward has shown that it calls no such operator; see roles.py for which these are.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _fields, codec
from .._torch_internals import BatchNorm, is_fake
from ..config import Config
from ..distributed import say
from .backward_rules import Rule
from .call_stack import CallSite
from .checkpoint import running_checkpoints
from .compiled import RegionRoles
from .derived import Derived, DerivedNames
from .log_softmax import LogSoftmaxes
from .roles import Instruction, OperatorObserver, Role, role_of_itself

_log = logging.getLogger(__name__)

Place = tuple[str | None, str | None, Instruction | None]
"""where a tensor is saved: (line, path of the module), see naming.py, and by which instruction in a step of the job"""


_Spot = tuple[str, str | None, str | None, int | None]
"""(name, line, path, where in the code), which are the same in another process"""


class LearntRoles(NamedTuple):
    """What a state holds of KnownRoles."""

    by_name: dict[str, Role]
    derived: DerivedNames
    aliases: dict[_Spot, Role]
    top_level: set[tuple[str, str | None]]


class KnownRoles:
    """Finds the role of each saved tensor, and remembers the roles that only an observed step can show."""

    def __init__(self, config: Config) -> None:
        self.by_name: dict[str, Role] = {}
        self.reasons: dict[str, str] = {}
        """why a backward must not read a tensor rounded, as far as a rule says so"""
        self.derived = Derived()
        self.log_softmaxes = LogSoftmaxes(config)
        self._kinds: dict[str, tuple[torch.dtype, int]] = {}  # what had the role
        self._instructions: dict[str, Instruction] = {}  # that saved it in a step of the job
        self._settled: dict[str, tuple[Any, ...]] = {}  # all that role() looked at when it found an activation
        self.observe_next = True
        """whether the next step should be observed: a tensor without a known role was met"""
        self._compresses_block_inputs = config.checkpoint_inputs
        self._keeps_batch_norm_inputs = not config.batch_norm_inputs
        self._observer: OperatorObserver | None = None
        self._shows_readers = False
        self._alias_roles: dict[tuple[str, Place], Role] = {}
        self._restored_aliases: dict[_Spot, Role] = {}  # of a state, as far as no step has met them
        self._top_level: set[tuple[str, str | None]] = set()  # names there have no line: it is kept beside them
        self._regions = RegionRoles(self.by_name)
        self._block_inputs: dict[int, list[str]] = defaultdict(list)  # names, by the frame of their checkpoint() call
        # calls of checkpoint() by their ids, which no other frame has while these are held
        self._discrete: dict[int, FrameType] = {}
        self.latest_call: FrameType | None = None
        """of checkpoint(); None once something else than its inputs is saved, so that its frame may go"""

    @contextmanager
    def observed(self, observer: OperatorObserver | None, shows_readers: bool = False) -> Iterator[None]:
        """Within the context the observer sees every operator; None sees none.

        shows_readers: learn() is called for each tensor of unknown role that is saved in it.
        """
        self._observer, self._shows_readers = observer, shows_readers
        if observer is not None:
            observer.on_discrete = self.note_discrete
        try:
            with nullcontext() if observer is None else observer:
                yield
        finally:
            self._observer, self._shows_readers = None, False

    def forget_step(self) -> None:
        """At the end of a step: what was met in it is classified, roles stay."""
        self._block_inputs.clear()
        self._discrete.clear()
        self.latest_call = None
        self._regions.classify()

    def role(
        self,
        tensor: Tensor,
        name: str,
        site: CallSite,
        module: nn.Module | None,
        recording: bool,
        instruction: Instruction | None = None,
    ) -> Role:
        """What a floating tensor is to the operator that saves it now.

        module: the one whose forward is running. recording: roles are looked at when the forward is over. instruction:
        that saves it, in a step of the job; a measurement replaces operators.
        """
        observer = self._observer
        if site.checkpoint is not None:
            return self.role_of_block_input(tensor, name, site.checkpoint, recording)
        if site.in_backward and role_of_itself(tensor) is None:  # its operators are observed by no mode
            return Role.STATISTIC
        if self._keeps_batch_norm_inputs and isinstance(module, BatchNorm):
            return Role.STATISTIC
        node = tensor.grad_fn
        about = None
        if observer is None and node is not None and site.region is None:
            about = (node.name(), tensor.output_nr, tensor.dtype, tensor.shape, site.line, module is None, instruction)
            if self._settled.get(name) == about and self.by_name.get(name) is Role.ACTIVATION:
                return Role.ACTIVATION
        if site.region is not None and node is None:
            return self._regions.role(site.region, name, tensor)
        if observer is not None and observer.holds_mask(tensor):
            return self._found(tensor, name, Role.STATISTIC)
        found = role_of_itself(tensor)
        if found is Role.STATISTIC and site.region is None and self.log_softmaxes.meets(tensor, name):
            is_new = module is None and (name, site.line) not in self._top_level
            return self._role_of_log_softmax(tensor, name, recording, instruction, is_new)
        if found is Role.STATISTIC or (found is not None and site.region is not None):
            return found
        if found is None and observer is not None:
            found = observer.role(tensor)
            if found is not Role.ACTIVATION:
                return self._found(tensor, name, found)
        known = self.remembered(tensor, name, instruction)
        if known is Role.ACTIVATION and module is None and (name, site.line) not in self._top_level:
            known = None
        if observer is not None and known is not Role.STATISTIC and known is not Role.ACTIVATION:
            known = None  # of another tensor: the observer would have found the role again
        if known is not None:
            if known is Role.ACTIVATION and about is not None:
                self._settled[name] = about
            return known
        self._settled.pop(name, None)
        self._kinds[name] = tensor.dtype, tensor.dim()
        if instruction is not None:
            self._instructions[name] = instruction
        if found is not None and (self._shows_readers or recording):
            return Role.UNREAD
        self.observe_next = True
        return Role.STATISTIC

    def _role_of_log_softmax(
        self, tensor: Tensor, name: str, recording: bool, instruction: Instruction | None, is_new: bool
    ) -> Role:
        """is_new: no forward has shown who reads it."""
        known = None if is_new else self.remembered(tensor, name, instruction)
        if known is not None:
            return known if known is Role.LOG_SOFTMAX else Role.STATISTIC
        self._kinds[name] = tensor.dtype, tensor.dim()
        if instruction is not None:
            self._instructions[name] = instruction
        if self._shows_readers or recording:
            return Role.UNREAD
        self.observe_next = True
        return Role.STATISTIC

    def _found(self, tensor: Tensor, name: str, role: Role) -> Role:
        self._settled.pop(name, None)
        self._kinds[name] = tensor.dtype, tensor.dim()
        self.by_name[name] = role
        return role

    def remembered(self, tensor: Tensor, name: str, instruction: Instruction | None = None) -> Role | None:
        """The role that an earlier step found under a name, for a tensor that is of the same kind. See [Note: names].

        A branch that is not taken, such as a dropout that is off, leaves its name to the next tensor on the line.
        """
        if instruction is not None and self._instructions.setdefault(name, instruction) != instruction:
            return None
        role = self.by_name.get(name)
        if role is None:
            return None
        kind = tensor.dtype, tensor.dim()
        if self._kinds.setdefault(name, kind) != kind:
            return None
        if role is Role.BINARY and not (is_fake(tensor) or (tensor.device.type == "cpu" and codec.is_binary(tensor))):
            # an accelerator would have to be waited for; torch saves its dropout's noise as booleans there
            self.observe_next |= tensor.device.type == "cpu"
            return Role.STATISTIC
        return role

    def learn(self, name: str, place: Place, role: Role) -> None:
        """What the readers of a tensor make of it. place: where it is saved."""
        self.by_name[name] = role
        if place[1] is None:
            self._top_level.add((name, place[0]))

    def role_for(self, node: Any, name: str, rule: Rule | None) -> Role:
        """What a node may make of a tensor that it has saved. rule: for what it saved there."""
        if self.log_softmaxes.is_one(name):
            return Role.LOG_SOFTMAX if self.log_softmaxes.allows(node) else Role.STATISTIC
        return Role.ACTIVATION if rule is None else Role.STATISTIC

    def alias_role(self, name: str, place: Place) -> Role | None:
        """What an operator that saves memory which is stored already, as a tensor of this name, reads of it."""
        found = self._alias_roles.get((name, place))
        if found is None and self._restored_aliases:
            found = self._restored_aliases.pop(_spot(name, place), None)
            if found is not None:
                self.learn_alias(name, place, found)
        return found

    def learn_alias(self, name: str, place: Place, role: Role) -> None:
        """See alias_role()."""
        line, path, _ = place
        self._alias_roles[name, place] = self._alias_roles[name, (line, path, None)] = role

    def role_of_block_input(self, tensor: Tensor, name: str, call: FrameType, recording: bool) -> Role:
        """Whether an input of a checkpointed block may be rounded. See [Note: discrete blocks] and [Note: masks].

        call: of checkpoint(). recording: as for role().
        """
        if not self._compresses_block_inputs or not tensor.requires_grad:
            return Role.STATISTIC
        return self.role_in_checkpoint(tensor, name, call, recording)

    def role_in_checkpoint(self, tensor: Tensor, name: str, call: FrameType, recording: bool) -> Role:
        """Whether what a checkpointed block is made again from may be rounded. Arguments: as above."""
        if self._observer is not None and self._observer.holds_mask(tensor):
            self.by_name[name] = Role.STATISTIC
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

    def keep_exactly(self, name: str) -> None:
        """A tensor of this name must not be rounded."""
        self.by_name[name] = Role.STATISTIC

    def note_discrete(self) -> None:
        """The operator about to run decides on its operands: the blocks around it need their inputs exactly."""
        for call in running_checkpoints():
            self._discrete[id(call)] = call
            for name in self._block_inputs[id(call)]:
                if self.by_name.get(name) is not Role.STATISTIC:
                    say(
                        _log,
                        "%s is kept exactly: its checkpointed block takes discrete decisions",
                        name,
                        level=logging.INFO,
                    )
                    self.by_name[name] = Role.STATISTIC

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain values."""
        learnt = {_spot(name, place): role for (name, place), role in self._alias_roles.items()}
        aliases = self._restored_aliases | learnt
        return {
            "roles": {name: role.value for name, role in self.by_name.items()},
            "derived": self.derived.state_dict(),
            "aliases": [dict(zip(_SPOT, (*spot, role.value), strict=True)) for spot, role in aliases.items()],
            "top_level": [{"name": name, "line": line} for name, line in sorted(self._top_level, key=str)],
        }

    @staticmethod
    def parse_state(state: Mapping[str, Any]) -> LearntRoles:
        """What load_state() takes, from what state_dict() gave. Raises StateError."""
        return LearntRoles(
            _fields.read(state, "roles", _fields.mapping(_role), {}),
            _fields.read(state, "derived", Derived.parse_state, DerivedNames()),
            dict(_fields.read(state, "aliases", _fields.sequence(_alias), [])),
            set(_fields.read(state, "top_level", _fields.sequence(_at_top_level), [])),
        )

    def load_state(self, learnt: LearntRoles) -> None:
        """Go on with what parse_state() returned."""
        self.by_name.clear()
        self.by_name.update(learnt.by_name)
        self.derived.names = learnt.derived
        self._kinds.clear()
        self._instructions.clear()
        self._settled.clear()
        self._alias_roles.clear()
        self._restored_aliases, self._top_level = dict(learnt.aliases), set(learnt.top_level)
        self.observe_next = True


_SPOT = ("name", "line", "path", "offset", "role")


def _spot(name: str, place: Place) -> _Spot:
    line, path, instruction = place
    return name, line, path, None if instruction is None else instruction[1]


def _alias(name: str, state: Any) -> tuple[_Spot, Role]:
    fields = _fields.mapping(_fields.anything)(name, state)
    line, path = (_fields.read(fields, key, _fields.optional(_fields.text)) for key in ("line", "path"))
    offset = _fields.read(fields, "offset", _fields.optional(_fields.integer(0)))
    return (_fields.read(fields, "name", _fields.text), line, path, offset), _fields.read(fields, "role", _role)


def _at_top_level(name: str, state: Any) -> tuple[str, str | None]:
    fields = _fields.mapping(_fields.anything)(name, state)
    line = _fields.read(fields, "line", _fields.optional(_fields.text))
    return _fields.read(fields, "name", _fields.text), line


def _role(name: str, value: Any) -> Role:
    known = [role.value for role in Role]
    if value not in known:
        raise _fields.StateError(f"{name!r} is {value!r}, expected one of {', '.join(known)}")
    return Role(value)
