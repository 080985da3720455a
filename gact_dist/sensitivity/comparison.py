"""The gradient under a plan beside the exact one, on some of a rank's examples; the job is untouched.

[Note: comparison] A plan rests on what sensitivities predict, and they do not hold where a backward divides by what it
reads, takes its logarithm or compares it. So the gradient is computed both ways before a plan is used. The model is
visited block by block ([Note: rounded walk] in rounded_walk.py): one pass stores nothing rounded, the other as a step
would, and of each parameter's gradients only two numbers are kept. The inputs of the blocks are kept exactly here: with
rounded ones the gradient that is taken for the exact one could itself be wrong.

On a part of the examples that is a fraction f of the batch this takes about 2.3 f plain steps: a forward, and once more
a forward and a backward of each block for either pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..hooks import Draw, SavedTensorHooks
from ..policies import Plan
from .blocks import BlockForward
from .pieces import pieces_of_blocks
from .rounded_walk import GradientComparison, RoundedForward, RoundedWalk
from .second_moment import walked, whole_gradient


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gradient g of some examples, and the same gradient r under a plan."""

    error: float
    """|r - g|^2, not finite if r is not"""
    square: float
    """|g|^2, not finite if g is not"""
    rounded: tuple[str, ...]
    """names of the tensors that the plan rounds or samples"""
    derived: tuple[str, ...]
    """names of those that are made of rounded ones"""

    @property
    def exact_is_finite(self) -> bool:
        """Whether g is finite, so that r can be judged by it."""
        return math.isfinite(self.square)


def compared(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Any],
    plan: Plan,
    *,
    draw: int,
    fraction: float = 1.0,
) -> Comparison:
    """The gradient under a plan beside the exact one. See [Note: comparison].

    forward: runs the model and returns the scalar loss, or calls backward on it. draw: names the random numbers of the
    rounding. fraction: of a step's examples that forward sees.
    Raises as rounded_moments() does.
    """

    def by_walk(cut: BlockForward) -> Comparison:
        # no more than names: the graph alone is to hold what was saved
        changed = [record.name for record in cut.firsts.values() if record.compressible or hooks.samples(record)]
        names = _rounded_by(plan, changed)
        derived = _rounded_by(plan, [record.name for record in cut.firsts.values() if record.derived])
        encoder = hooks.encoder.of_part(fraction)
        exact, rounded = (Draw(encoder, stored_by, draw, cut.firsts) for stored_by in (Plan(), plan))
        pieces = pieces_of_blocks(cut, fraction)
        return Comparison(*RoundedWalk(cut, [exact, rounded]).comparison(pieces), names, derived)

    def of_whole() -> Comparison:
        found = GradientComparison(Counter(), 2)
        names: dict[str, Any] = {}
        for number, stored_by in enumerate((Plan(), plan)):
            gradient, footprint = whole_gradient(hooks, model, forward, stored_by, draw, fraction)
            names |= footprint.tensors | dict.fromkeys(footprint.sampled)
            while gradient:
                key, part = gradient.popitem()
                found.add(key, number, part)
        return Comparison(*found.result(), _rounded_by(plan, names), _rounded_by(plan, hooks.derived_names))

    return walked(hooks, model, forward, by_walk, of_whole, seed=draw, fraction=fraction, kind=_ExactBoundaries)


def _rounded_by(plan: Plan, names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if plan.bits_of(name) is not None))


class _ExactBoundaries(RoundedForward):
    def boundary(self, tensor: Tensor) -> Any:
        """See BlockForward.boundary."""
        return _Copy(tensor)


class _Copy:
    """A tensor at the border of a block, which what follows may modify in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().clone()

    def value(self) -> Tensor:
        """The tensor as it was."""
        return self._tensor
