"""What compression adds to the gradient's second moment, measured; policy acgc bounds it (policies/acgc.py).

[Note: units] All numbers here are of the gradient g of one rank's batch, in the units of its loss: V^2 is the mean of
|g|^2 over the ranks, the variance is the sum over all parameters. With g of n examples, mean mu and variance s^2 / n,
rounding that adds r increases the second moment by r / (|mu|^2 + s^2 / n). A gradient averaged over A ranks and
micro-batches has r / A, as each is rounded by itself, and so an increase of r / (A |mu|^2 + s^2 / n), which is no
larger. What holds for a rank's batch therefore holds for what the optimizer gets, at any number of ranks and
micro-batches.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn

from .._torch_internals import has_compiled_parts, next_sequence_number
from ..hooks import Draw, Footprint, ReplayError, SavedTensorHooks
from ..policies import Moments, Plan
from .autograd_graph import BackwardError, MeasurementError, gradients_of_parameters, scalar
from .blocks import BlockForward, CutError
from .checkpoint import measurable
from .inner_backward import InnerBackwardError, run_alone_in_blocks
from .isolation import untouched
from .measuring_mode import MeasuringMode, NoMode
from .one_pass import BOUNDARY_BITS
from .partition import blocks_as_run, may_not_be_whole
from .rounded_walk import GradientMoments, RoundedForward, RoundedWalk

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def rounded_moments(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Any],
    plan: Plan | None = None,
    *,
    passes: int,
    draw: int,
) -> Moments:
    """Moments of the gradient of one rank's batch, rounded as in a step; the job is untouched.

    forward: runs the model and returns the scalar loss, or calls backward on it. plan: None for the current one.
    passes: at least two, each rounded with other random numbers and all else the same. draw: names the random numbers;
    passes of another draw are independent.
    With rounded gradients g_i of mean m, noise is sum |g_i - m|^2 / (passes - 1) and square |m|^2 - noise / passes.
    The model is measured block by block (see [Note: rounded walk] in rounded_walk.py), a model without blocks in
    forwards and backwards like a step's. Raises MeasurementError where that would take a whole model whose parameters
    are sharded.
    """
    plan = hooks.plan if plan is None else plan
    numbers = range(draw * passes, (draw + 1) * passes)

    def by_walk(cut: BlockForward) -> Moments:
        return RoundedWalk(cut, [Draw(hooks.encoder, plan, number, cut.firsts) for number in numbers]).moments()

    def of_whole() -> Moments:
        return _of_whole(hooks, model, forward, plan, numbers)

    return walked(hooks, model, forward, by_walk, of_whole, seed=draw)


def walked(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Any],
    by_walk: Callable[[BlockForward], _T],
    of_whole: Callable[[], _T],
    *,
    seed: int,
    fraction: float = 1.0,
    kind: type[BlockForward] = RoundedForward,
) -> _T:
    """What by_walk() makes of a forward that is cut at its blocks; of_whole() where none can be cut.

    fraction: of a step's examples that forward sees. kind: of the forward that is cut.
    Raises MeasurementError where it would take a whole model whose parameters are sharded, or no backward runs.
    """
    blocks, compiled = blocks_as_run(model, hooks.config.blocks, hooks.packs_in_graphs), has_compiled_parts(model)
    whole = not blocks or not may_not_be_whole(model)
    while blocks:
        mode = NoMode() if compiled else MeasuringMode(differentiable=False)
        cut = kind(hooks, model, blocks, mode, boundary_bits=BOUNDARY_BITS, seed=seed)
        try:
            with run_alone_in_blocks(cut, model, blocks, forward, fraction):
                return by_walk(cut)
        except (CutError, ReplayError, InnerBackwardError, BackwardError) as error:
            if not whole:
                raise MeasurementError(str(error)) from error
            _log.debug("%s: drawing gradients with what is around it", error)
            blocks = [block for block in blocks if isinstance(error, CutError) and not error.concerns(block)]
    return of_whole()


def note_blocks(hooks: SavedTensorHooks, model: nn.Module, forward: Callable[[], Any]) -> None:
    """Store from now on what lies in another block than all that it could be made of, as a measurement would find it.

    forward: as for rounded_moments(). Nothing is measured. Where no block can be cut nothing changes.
    Raises MeasurementError as walked() does.
    """
    walked(hooks, model, forward, lambda _: None, lambda: None, seed=0, kind=BlockForward)


def _of_whole(
    hooks: SavedTensorHooks, model: nn.Module, forward: Callable[[], Any], plan: Plan, numbers: Sequence[int]
) -> Moments:
    """Nothing is kept exactly, so a pass takes the memory of a step."""
    found = GradientMoments(Counter(), len(numbers))
    for number in numbers:
        gradient, _ = whole_gradient(hooks, model, forward, plan, number)
        for key, part in gradient.items():
            found.add(key, number, part)
    return found.moments()


def whole_gradient(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Any],
    plan: Plan,
    draw: int,
    fraction: float = 1.0,
) -> tuple[dict[int, Tensor], Footprint]:
    """The gradient of each parameter that the loss depends on, by its number, and what was kept for it.

    plan, draw, fraction: as for SavedTensorHooks.rehearsal().
    """
    # what is compiled is compiled anew under a mode, and has no closure that calls backward
    mode = None if has_compiled_parts(model) else MeasuringMode(differentiable=False)
    context: Any = mode or nullcontext()
    with untouched(model), measurable(context):
        began = next_sequence_number()
        with hooks.rehearsal(plan, draw, fraction) as footprint, context:
            result = forward()
        root = scalar(result if mode is None else mode.root_of(result))
        found = gradients_of_parameters(root, began)
        return {number: part for number, part in enumerate(found) if part is not None}, footprint
