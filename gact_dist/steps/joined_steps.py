"""The steps of a model within DDP's join(), of which ranks may have different numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from .. import distributed
from .optimizer_steps import OptimizerSteps

_log = logging.getLogger(__name__)


class _Steps(Protocol):
    """What is counted of them; a Schedule."""

    model: nn.Module
    step: int
    optimizer_steps: OptimizerSteps | None

    @property
    def groups(self) -> Sequence[Any]: ...


class JoinedSteps:
    """Keeps ranks at the same numbers, and knows when one of them may be gone. See [Note: join] in ddp.py.

    Until the first rank has no batches left all of them take the same steps. When none has any, all go on from the
    numbers of the rank that has taken most. An exception that ends the context takes each of them back to the last
    number that all have seen: that of the last adaptation in it, or of its beginning.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps
        self._gone = False
        self._mark: tuple[int, int | None] = (0, None)
        self._joins = distributed.Joins(steps.model, self)

    @property
    def uneven(self) -> bool:
        """Whether a rank may be gone now, which would not come to any collective of ours."""
        return self._gone and self._joins.inside

    def missed(self, doing: str) -> None:
        """A rank did not come to a meeting, as it has no batches left."""
        self._gone = True
        _log.info("%s waits for the end of DDP's join(), in which a rank has no batches left", doing)

    def mark(self) -> None:
        """All ranks are at this step."""
        self._mark = self._steps.step, self._begun

    def close(self) -> None:
        """Notice nothing from now on."""
        self._joins.close()

    @property
    def _begun(self) -> int | None:
        return None if self._steps.optimizer_steps is None else self._steps.optimizer_steps.state

    def join_begins(self) -> None:
        """See JoinListener."""
        self._gone = not distributed.can_meet(self._steps.groups)
        self.mark()

    def rank_leaves(self) -> None:
        """See JoinListener."""
        if not self._gone:
            distributed.leave(self._steps.groups)
        self._gone = True

    def join_ends(self) -> None:
        """See JoinListener. Collectives: two all_reduces of 8 bytes in each group."""
        step, begun = self._steps.step, self._begun
        most = [-distributed.least_of_ranks(-number, self._steps.groups) for number in (step, begun or 0)]
        self._go_on_from(int(most[0]), int(most[1]) or None)

    def join_breaks(self) -> None:
        """See JoinListener."""
        self._go_on_from(*self._mark)

    def _go_on_from(self, step: int, begun: int | None) -> None:
        self._gone = False
        self._steps.step = step
        if self._steps.optimizer_steps is not None and begun is not None:
            self._steps.optimizer_steps.load(begun, begun)
