"""The inputs of checkpointed blocks: which saved tensors they are, and which of them may be rounded.

[Note: discrete blocks] A checkpointed block whose input comes back rounded recomputes from it. Where the block decides
on values (routing in a mixture of experts, boolean indexing), the recomputation could decide otherwise: other shapes,
which checkpoint reports as an error, or other experts, which nothing reports. So a block's inputs are kept exactly
until an observed forward has shown that it calls no such operator; see operators.py for which these are.
"""

import logging
from collections import defaultdict
from types import FrameType

from .checkpoint import running_checkpoints, saving_checkpoint
from .roles import Role

_log = logging.getLogger(__name__)


class BlockInputs:
    """What a step knows of the checkpoint() calls it has met, and the roles of their inputs by name."""

    def __init__(self, roles: dict[str, Role]) -> None:
        self._roles = roles
        self._names: dict[int, list[str]] = defaultdict(list)
        self._discrete: set[int] = set()
        self.call: FrameType | None = None
        """the checkpoint() call whose input is being saved, None while something else saves"""

    def reset(self) -> None:
        """Forget the calls of a step; roles stay."""
        self._names.clear()
        self._discrete.clear()
        self.call = None

    def look(self, frame: FrameType) -> None:
        """Set call. frame: of the caller of the pack hook."""
        self.call = saving_checkpoint(frame)

    def known_role(self, name: str) -> Role | None:
        """The role that an earlier observed forward found for the input that is being saved."""
        self._names[id(self.call)].append(name)
        return self._roles.get(name)

    def observed_role(self, name: str) -> Role:
        """The role as far as this forward, which is observed, has shown it: note_discrete may still change it."""
        known = self.known_role(name)
        if known is None:
            known = self._roles[name] = Role.STATISTIC if id(self.call) in self._discrete else Role.ACTIVATION
        return known

    def note_discrete(self) -> None:
        """The operator that is about to run decides on its operands: the blocks it is in need their inputs exactly."""
        for call in running_checkpoints():
            self._discrete.add(call)
            for name in self._names[call]:
                if self._roles.get(name) is not Role.STATISTIC:
                    _log.info("%s is kept exactly: its checkpointed block takes discrete decisions", name)
                    self._roles[name] = Role.STATISTIC
