"""LightningModules, whose step is training_step and not forward.

[Note: training_step] Lightning's trainer calls training_step, which computes the loss: itself on one device, and within
DDP in place of the forward of the module. It may call forward, or parts of the module, once or several times, or never.
So under follow() a step of a LightningModule is one call of training_step. torch has hooks for forwards only, and that
is why the call takes the way through the forward of a module of our own, which the model does not know of. A module
that no trainer drives, in a loop of the user's own, is followed as any other.

To measure, training_step is called again, on some examples. What it logs meanwhile goes nowhere: it would enter the
averages of the epoch. One that runs backward and the optimizer itself, or that takes its batches from an iterator,
cannot be called again.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from types import MethodType
from typing import Any

from torch import nn

from .._patches import replaced

_NAME = "training_step"
_CLASSES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


class TrainingStep(nn.Module):
    """While it is open, a LightningModule's training_step is the forward of this module. See [Note: training_step]."""

    def __init__(self, owner: nn.Module, is_measuring: Callable[[], bool]) -> None:
        """is_measuring: whether a call that runs now is the package's own."""
        super().__init__()
        self._owner = (owner,)  # a tuple, so that it is no child of this module
        self._is_measuring = is_measuring
        self._own: Any = vars(owner).get(_NAME)  # of this instance; what its class has is found otherwise
        self._method: Callable[..., Any] = getattr(owner, _NAME)
        self._detour = _Detour(owner, self)

    def open(self) -> None:
        """From now on calls of the model's training_step are calls of this module.

        Raises ValueError for one that cannot be called again.
        """
        _check(self._owner[0], self._method)
        vars(self._owner[0])[_NAME] = self._detour

    def close(self) -> None:
        """Undo open()."""
        attributes = vars(self._owner[0])
        if attributes.get(_NAME) is self._detour:
            del attributes[_NAME]
            attributes.update({} if self._own is None else {_NAME: self._own})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logs: AbstractContextManager[None] = nullcontext()
        if self._is_measuring():
            logs = replaced(self._owner[0], "log", _log_nothing)  # log_dict() calls it as well
        with logs:
            return self._method(*args, **kwargs)


class _Detour:
    """In place of the training_step of a LightningModule. A copy of the module has its class's own again."""

    def __init__(self, owner: nn.Module, step: TrainingStep) -> None:
        self._owner, self._step = owner, step
        update_wrapper(self, step._method)  # Lightning looks at the parameters of what it calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(getattr(type(self._owner), _NAME), memo[id(self._owner)])

    def __reduce__(self) -> Any:
        return getattr, (self._owner, _NAME)


def has_training_step(model: nn.Module) -> bool:
    """Whether a model is a LightningModule that can be trained."""
    bases = [cls for cls in type(model).__mro__ if cls.__name__ == "LightningModule" and cls.__module__ in _CLASSES]
    return bool(bases) and getattr(type(model), _NAME) is not getattr(bases[0], _NAME)


def driven_by_a_trainer(model: nn.Module) -> bool:
    """Whether Lightning's trainer is training a LightningModule now."""
    return bool(getattr(getattr(model, "_trainer", None), "training", False))


def _check(owner: Any, method: Callable[..., Any]) -> None:
    """Raise ValueError for a training_step that cannot be called again."""
    kind, why = type(owner).__name__, None
    if not owner.automatic_optimization:
        why = "automatic_optimization is False, and its training_step runs backward and the optimizer itself"
    elif "dataloader_iter" in inspect.signature(method).parameters:
        why = "its training_step takes the batches from dataloader_iter"
    if why is not None:
        raise ValueError(
            f"follow() cannot run the training_step of {kind} again to measure sensitivity: {why}; attach to the "
            "modules whose forward it calls, such as attach(module.network).follow()"
        )


def _log_nothing(*_: Any, **__: Any) -> None:
    return None
