"""What the callbacks of all frameworks do when training begins."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel

from ..config import Config
from ..controller import Controller
from ..steps import is_attached


def check(model: nn.Module) -> None:
    """Raise ValueError for a model that is attached already, and for one in DataParallel."""
    if is_attached(model):
        raise ValueError(
            "gact_dist is attached to this model already, and a callback was given as well; expected one of them: "
            "leave out the callback or the call of attach()"
        )
    if any(isinstance(module, DataParallel) for module in model.modules()):
        raise ValueError(
            "the trainer has put the model into DataParallel, which runs copies of it in threads; expected one process "
            "for each GPU: start the script with torchrun, or make a single GPU visible"
        )


def following(controller: Controller) -> Controller:
    """The controller, which follows its model from now on, or is detached if it cannot."""
    try:
        return controller.follow()
    except (TypeError, ValueError):
        controller.detach()
        raise


def in_forwards(config: Config, forwards: int) -> Config:
    """Settings for a job whose optimizer steps are not seen, so that forwards are counted in their place.

    forwards: for each optimizer step.
    """
    return replace(config, adapt_interval=config.adapt_interval * forwards)


def steps_are_seen(model: nn.Module, optimizers: Iterable[Any]) -> bool:
    """Whether an optimizer holds parameters of the model itself, and not copies or parts of them as DeepSpeed's do."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(id(parameter) in own for group in groups for parameter in group["params"])
