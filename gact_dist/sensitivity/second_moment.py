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
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import TENSOR_PARALLELISM, sharding, whole_value
from ..hooks import ReplayError, SavedTensorHooks, has_compiled_parts
from ..policies import Moments, Plan
from .autograd_graph import float32_parts, nodes_below, parameters_among, scalar
from .blocks import BlockForward, CutError
from .checkpoint import measurable
from .isolation import untouched
from .measuring_mode import MeasuringMode
from .one_pass import BOUNDARY_BITS, InnerBackwardError, MeasurementError
from .partition import blocks_of
from .rounded_walk import RoundedWalk

_log = logging.getLogger(__name__)


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
    blocks = [] if has_compiled_parts(model) else blocks_of(model, hooks.config.blocks)
    whole = not blocks or sharding(model) in (None, TENSOR_PARALLELISM)  # whether all parameters may be there at once
    while blocks:
        try:
            return _by_walk(hooks, model, blocks, forward, plan, passes, draw)
        except (CutError, ReplayError, InnerBackwardError) as error:
            if not whole:
                raise MeasurementError(str(error)) from error
            _log.info("%s: drawing gradients with what is around it", error)
            blocks = [block for block in blocks if isinstance(error, CutError) and not error.concerns(block)]
    return _of_whole(hooks, model, forward, plan, passes, draw)


def _by_walk(
    hooks: SavedTensorHooks,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    forward: Callable[[], Any],
    plan: Plan | None,
    passes: int,
    draw: int,
) -> Moments:
    mode = MeasuringMode(differentiable=False)
    cut = BlockForward(hooks, model, blocks, mode, boundary_bits=BOUNDARY_BITS, seed=draw)
    try:
        with untouched(model, blocks), measurable(mode), cut.run(forward, 1.0):
            if mode.inner_backward:
                raise InnerBackwardError
            walk = RoundedWalk(
                hooks, cut, hooks.plan if plan is None else plan, passes=passes, first_draw=draw * passes
            )
            return walk.moments()
    except RuntimeError as error:  # the inner backward may have met the border of a block
        if mode.inner_backward and not isinstance(error, torch.OutOfMemoryError):
            raise InnerBackwardError from error
        raise


def _of_whole(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Any],
    plan: Plan | None,
    passes: int,
    draw: int,
) -> Moments:
    """Nothing is kept exactly, so a pass takes the memory of a step."""
    mean = _rounded_gradient(hooks, model, forward, plan, draw * passes)
    scatter = 0.0
    for number in range(2, passes + 1):
        gradient = _rounded_gradient(hooks, model, forward, plan, draw * passes + number - 1)
        apart = [rounded - part for rounded, part in zip(gradient, mean, strict=True)]
        scatter += _square(apart) * (number - 1) / number
        mean = [part + distance / number for part, distance in zip(mean, apart, strict=True)]
    noise = scatter / (passes - 1)
    return Moments(noise, _square(mean) - noise / passes)


def _rounded_gradient(
    hooks: SavedTensorHooks, model: nn.Module, forward: Callable[[], Any], plan: Plan | None, draw: int
) -> list[Tensor]:
    # what is compiled is compiled anew under a mode, and has no closure that calls backward
    mode = None if has_compiled_parts(model) else MeasuringMode(differentiable=False)
    context: Any = mode or nullcontext()
    with untouched(model), measurable(context):
        with hooks.rehearsal(plan, draw=draw), context:
            result = forward()
        return _gradient(result if mode is None else mode.root_of(result))


def _gradient(loss: Any) -> list[Tensor]:
    """The gradient of the parameters that the loss depends on, in float32."""
    root = scalar(loss)
    found = torch.autograd.grad(root, parameters_among(nodes_below([root])), allow_unused=True)
    return [float32_parts(part) for part in found if part is not None]


def _square(gradient: Sequence[Tensor]) -> float:
    return sum(whole_value(part.square().sum()) for part in gradient)
