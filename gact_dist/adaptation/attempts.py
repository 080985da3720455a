"""What ends a piece of a measurement on this rank, and with it the job only where the job has an error of its own.

[Note: faults of ours] A measurement runs the model in ways in which the job does not: block by block, sliced, twice
differentiated. Whatever goes wrong in that, a job whose tensors are stored under the plan that it has, or exactly, can
go on. But an error of the loss function or of the model is the user's to see, at once and as it was raised. Where in
the code an error was raised does not tell which it is: a wrong shape shows in an operator of torch, called by a mode of
ours, called by the model. So where a piece of a measurement ends with an error that is not expected, the loss function
runs once more, on all of the batch and with nothing of ours in it but what holds back a closure's own backward. What
that raises is the job's error, unless it has not come to the loss function.

[Note: other examples] A loss function may refuse a part of a batch, which is nobody's error: it is measured on more of
it. Where parameters are sharded no rank can do so alone, since every rank takes part in every forward: then all do.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from .. import distributed
from .._errors import first_line, is_out_of_memory
from .._paths import PACKAGE_ROOT
from ..sensitivity import REFUSALS, ExamplesRefusedError, MeasurementError, blocks_of, run_alone

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Examples = TypeVar("_Examples")
_FAULT = (
    "%s ended with an error of gact_dist on this rank (%s). The model runs without it, and the job goes on with the "
    "bits that another way of measuring gives, or with those that it has; please report it, with the traceback that is "
    "logged at level DEBUG"
)


class Ending(Enum):
    """How a piece of a measurement ended on this rank."""

    DONE = "done"
    LACKS_MEMORY = "there was too little memory"
    NOT_HERE = "the model cannot be measured in this way"
    REFUSED = "the model cannot be measured on these examples"
    PEER_FAILED = "another rank has failed, and says why; if it can go on, so will this one"
    FAULT = "an error of ours"  # see [Note: faults of ours]


@dataclass(frozen=True)  # a NamedTuple cannot be generic in Python 3.10
class Attempt(Generic[_T]):
    """The outcome of a piece of a measurement."""

    ending: Ending
    result: _T | None = None
    """None unless it is done"""
    reason: str = ""
    """why it is not"""


def attempt(
    doing: str,
    work: Callable[[_Examples], _T],
    choices: Iterable[_Examples],
    forward: Callable[[], Any] | None,
    *,
    model: nn.Module,
    blocks: Sequence[str],
    groups: Sequence[Any],
    gives_loss: bool = True,
) -> Attempt[_T]:
    """Run a piece of a measurement: work(examples). Collectives at its end: those of distributed.raises_on_all().

    doing: names the piece in messages. choices: at least one; where the model refuses one, the next takes its place, on
    all ranks that gather parameters for one another if it does on any. forward, gives_loss: as for run_alone(), on all
    of a batch; without a forward the loss is a guess, and what it raises no error of the job. blocks: Config.blocks.
    groups: of ranks that raise together.
    Raises on every rank what forward raises alone on any. All else is in the outcome, and logged if it is no
    MeasurementError.
    """
    with distributed.raises_on_all(groups, doing):
        for examples in _repeating_the_last(choices):
            found = _tried(doing, partial(work, examples), is_guess=forward is None)
            conditions = [found.ending is Ending.FAULT, found.ending is Ending.REFUSED]
            is_faulty, is_refused = on_any_sharing(model, conditions, groups)
            if is_faulty or not is_refused:
                break
        if is_faulty and forward is not None:
            own = _Called(forward)
            run = partial(run_alone, model, own, blocks_of(model, blocks), gives_loss=gives_loss)
            alone = _tried(doing, run, is_guess=False, is_of_job=own.is_cause_of)
            if alone.ending is Ending.NOT_HERE:
                found = Attempt(Ending.NOT_HERE, reason=alone.reason)
    if found.ending is Ending.FAULT:
        distributed.say_once(_log, _FAULT, doing, found.reason, on_its_rank=True)
    return found


class _Called:
    """A forward that knows whether it was called."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self._forward, self._was_called = forward, False

    def __call__(self) -> Any:
        self._was_called = True
        return self._forward()

    def is_cause_of(self, error: Exception) -> bool:
        """Whether an error is its own; of memory it may have too little only because nothing is compressed."""
        return self._was_called and not is_out_of_memory(error)


def _repeating_the_last(choices: Iterable[_Examples]) -> Iterator[_Examples]:
    """A rank for which there is no other choice takes part in those of the others."""
    for examples in choices:
        yield examples
    while True:
        yield examples


def _tried(
    doing: str, work: Callable[[], _T], *, is_guess: bool, is_of_job: Callable[[Exception], bool] | None = None
) -> Attempt[_T]:
    """is_of_job: tells errors that are raised as they are."""
    try:
        return Attempt(Ending.DONE, work())
    except distributed.PeerFailedError:
        return Attempt(Ending.PEER_FAILED)
    except (ExamplesRefusedError, MeasurementError) as error:
        _log.debug("%s: %s", doing, error)
        ending = Ending.NOT_HERE if isinstance(error, MeasurementError) else Ending.REFUSED
        return Attempt(ending, reason=first_line(error))
    except Exception as error:
        if is_of_job is not None and is_of_job(error):
            raise
        # Only texts outlast this: the error would keep the failed forward's frames alive, and with them its graph.
        return _failed(error, doing, is_guess=is_guess)


def _failed(error: Exception, doing: str, *, is_guess: bool) -> Attempt[Any]:
    """The outcome of a piece that raised an error that is none of ours on purpose."""
    if is_out_of_memory(error):
        _log.warning("out of memory while %s on this rank: %s", doing, first_line(error))
        return Attempt(Ending.LACKS_MEMORY, reason=first_line(error))
    if is_guess and isinstance(error, REFUSALS):
        return Attempt(Ending.NOT_HERE, reason=first_line(error))
    _log.debug("%s:\n%s", doing, traceback.format_exc())
    return Attempt(Ending.FAULT, reason=f"{type(error).__name__}{_place_of(error)}: {first_line(error)}")


def on_any_sharing(model: nn.Module, conditions: list[bool], groups: Sequence[Any]) -> list[bool]:
    """Which conditions hold on any rank that takes part in this one's forwards, as it gathers parameters."""
    return conditions if distributed.sharding(model) is None else distributed.any_rank(conditions, groups)


def _place_of(error: BaseException) -> str:
    """Where in this package an error was raised, or what raised it was called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(PACKAGE_ROOT)]
    if not ours:
        return ""
    return f" at {Path(ours[-1].filename).relative_to(PACKAGE_ROOT).as_posix()}:{ours[-1].lineno}"
