"""The interface of GACT's own controller: hooks that stay on, and a call that ends each iteration."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..config import Config
from ..distributed import unwrap
from ..hooks import Calling, before_forward
from ..sensitivity import ProbeBatch
from .schedule import Schedule

_default_level: str | None = None


def set_optimization_level(level: str) -> None:
    """Set the level for controllers that are created without a level or a config from now on ("L2" at first).

    Args:
        level: a name in gact_dist.LEVELS.

    Raises:
        ValueError: there is no such level.
    """
    global _default_level
    Config.from_level(level)
    _default_level = level


def default_level() -> str | None:
    """The level of set_optimization_level(), if it was called."""
    return _default_level


_installed: set["Iterations"] = set()
"""Those whose hooks are on: one whose controller was dropped must not remove another's hooks when it is collected."""


class Iterations:
    """Hooks that stay on in this thread, from construction to close(); iterate() ends an iteration."""

    def __init__(self, schedule: Schedule, before_step: Callable[[], None]) -> None:
        """before_step: called before each forward of the job; it may disable the schedule."""
        self._schedule, self._before_step = schedule, before_step
        self._open = ExitStack()
        self._forward_ran = False
        self._begin()  # raises where hooks must not be opened, and then nothing is installed
        self._handle = before_forward(unwrap(schedule.model), Calling(self._note_forward))
        _installed.add(self)

    def iterate(self, fwdbwdprop: Callable[[], Any]) -> None:
        """See Controller.iterate."""
        schedule = self._schedule
        self._before_step()
        closure_is_the_iteration = not self._forward_ran
        self._open.close()
        if schedule.enabled:
            schedule.watch()
            schedule.next_step()
            schedule.draw(fwdbwdprop)
            if schedule.due():
                schedule.measure(ProbeBatch(lambda _: fwdbwdprop(), None))
        self._begin()
        if closure_is_the_iteration:
            fwdbwdprop()
            self._forward_ran = False

    def switch(self) -> None:
        """The schedule was enabled or disabled. What notes that a forward ran stays: iterate() depends on it."""
        ran = self._forward_ran
        self._open.close()
        self._begin()
        self._forward_ran = ran

    def close(self) -> None:
        """Take the hooks off."""
        self._open.close()
        self._handle.remove()
        _installed.discard(self)

    def _note_forward(self, *_: Any) -> None:
        if not self._schedule.measuring:
            self._before_step()
        if torch.is_grad_enabled():  # an evaluation between two iterations is not an iteration
            self._forward_ran = True

    def _begin(self) -> None:
        self._forward_ran = False
        self._open = ExitStack()
        self._open.enter_context(self._schedule.forward())
