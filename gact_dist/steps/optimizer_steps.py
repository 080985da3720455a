"""How often the optimizer of a model has stepped, seen from outside the training loop.

[Note: optimizer steps] The interval between adaptations is meant in optimizer steps, and with gradient accumulation a
step has several forwards. torch calls a global hook after every step of every optimizer. Those that hold a parameter of
the model count, once between two forwards: a step may take several optimizers, one inside another, or one for each
parameter. Ranks that share a plan step their optimizers together, so all of them count the same. An optimizer that is
no torch.optim.Optimizer is not seen; a framework that steps it by a rule of its own says so.
"""

from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..distributed import steps_optimizer


class OptimizerSteps:
    """Counts the optimizer steps of one model that were begun since the last adaptation."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = False
        """whether the model's optimizer is one that can be seen"""
        self._model, self._count = model, 0
        self._stepped = True  # since the last forward; the first forward begins a step
        self._forward = 0
        self.watch()

    def watch(self) -> None:
        """Count, from now on or again."""
        if not steps_optimizer(self._model):
            _watch(self)

    def begun(self, forward: int) -> int:
        """Those begun until a forward, which is named by its number; the same for every call with that number."""
        if forward != self._forward:
            self._forward = forward
            self._count += self._stepped
            self._stepped = False
        return self._count

    def restart(self, forward: int) -> None:
        """Count from this forward on, before which bits adapted."""
        self.begun(forward)
        self._count = 0

    def after(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if not self._stepped and self._holds_a_parameter(optimizer):
            self._stepped = self.seen = True

    @property
    def state(self) -> int | None:
        """Those begun until the next forward; None if none was seen."""
        return self._count + self._stepped if self.seen else None

    def load(self, begun: int | None, forwards: int) -> None:
        """Go on from a state. forwards: since the adaptation; for a state that has seen no step."""
        self.seen, self._count, self._stepped = begun is not None, forwards if begun is None else begun, False

    def close(self) -> None:
        """Count no more."""
        _watched.discard(self)

    def _holds_a_parameter(self, optimizer: Optimizer) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in held for parameter in self._model.parameters())


# One hook serves all models, and stays: torch iterates over its hooks, from which none may vanish meanwhile.
_watched: WeakSet[OptimizerSteps] = WeakSet()
_handles: list[Any] = []


def _watch(steps: OptimizerSteps) -> None:
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_after_step))
    _watched.add(steps)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for steps in list(_watched):
        steps.after(optimizer)
