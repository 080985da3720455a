"""What compression adds to the gradient's second moment, measured: the promise of AC-GC.

AC-GC (Evans and Aamodt, NeurIPS 2021; equation 16 of its supplement): if the compressed gradient is unbiased and its
variance is at most e^2 V^2, where V^2 = E|g|^2 is the second moment of the stochastic gradient g, then the second
moment of the compressed gradient is at most (1 + e^2) V^2, and SGD's bound on the loss grows by no more than that.

[Note: units] All numbers here are of the gradient g of one rank's batch, in the units of its loss: V^2 is the mean of
|g|^2 over the ranks, the variance is the sum over all parameters. With g of n samples, mean mu and variance s^2 / n,
rounding that adds r increases the second moment by r / (|mu|^2 + s^2 / n). A gradient averaged over A ranks and
micro-batches has r / A, for each is rounded by itself, and so an increase of r / (A |mu|^2 + s^2 / n), which is no
larger. What is promised of a rank's batch therefore holds for what the optimizer gets, at any number of ranks and
micro-batches. On a slice of n out of N samples rounding adds N / n times what it adds to the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .compiled import has_compiled_parts
from .engine import Engine
from .graphs import nodes_below, parameters_among
from .isolation import generators_restored, untouched
from .recomputation import measurable
from .sensitivity import scalar, square_distance
from .standins import StandInMode


@dataclass(frozen=True, slots=True)
class GradientError:
    """Increase of the gradient's second moment through compression, relative to V^2; the same on every rank."""

    tolerated: float
    """e^2, the configuration's error"""
    predicted: float
    """under the plan, from the sensitivities"""
    measured: float
    """under the plan, from gradients of the same samples with and without rounding"""
    measured_before: float
    """under the plan that was in force until the adaptation, on the samples of the adaptation"""
    second_moment: float
    """V^2 of one rank's batch, in the square of the loss's units"""

    @property
    def holds(self) -> bool:
        """Whether the measured increase is within the tolerated one."""
        return self.measured <= self.tolerated


class GradientProbe:
    """Gradients of one sample with and without rounding. The job is left untouched."""

    def __init__(
        self, engine: Engine, model: nn.Module, forward: Callable[[], Tensor | None], *, seed: int, fraction: float
    ) -> None:
        """forward: runs the model and returns the scalar loss, or calls backward on it. fraction: see Sample."""
        self._engine, self._model, self._forward = engine, model, forward
        self._seed, self._fraction = seed, fraction

    @cached_property
    def _exact(self) -> list[Tensor | None]:
        return self._gradient({})

    def second_moment(self) -> float:
        """|g|^2 on the sample, without rounding."""
        return _square(self._exact)

    def variance(self, bits: Mapping[str, int | None], draws: int) -> float:
        """Squared distance of the gradient rounded by a plan from the exact one: the mean of some draws, on the sample.

        bits: of every tensor that is rounded, by name; None and names that are missing are exact.
        """
        total = 0.0
        for draw in range(draws):
            seeds = enumerate(bits.items(), start=self._seed + draw * 1_000_003)
            rounded = {name: (width, seed) for seed, (name, width) in seeds if width is not None}
            total += square_distance(self._gradient(rounded), self._exact)
        return total / draws

    def _gradient(self, rounded: Mapping[str, tuple[int, int]]) -> list[Tensor | None]:
        # what is compiled can show its operators to no mode, and has no closure that calls backward
        mode = None if has_compiled_parts(self._model) else StandInMode()
        with untouched(self._model), generators_restored(), measurable(mode or nullcontext()):
            with self._engine.recording(mode, self._fraction, rounded):
                result = self._forward()
            return _gradient(mode.root if mode is not None and mode.root is not None else result)


def second_moment_of_batch(engine: Engine, model: nn.Module, forward: Callable[[], Any]) -> float:
    """|g|^2 of the loss that forward returns, on this rank, rounded as the plan in force says."""
    with untouched(model):
        with engine.rehearsal():
            loss = forward()
        return _square(_gradient(loss))


class SquaredGradient:
    """The squared norm of the gradient that one backward of the job itself brings to the parameters of this rank.

    It is taken before the gradient is accumulated, reduced over ranks or sharded: of this backward, and of this rank.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        """outputs: of the model, before the backward. Those without a graph are passed over."""
        self._at_parameters: list[Tensor] = []
        self._at_outputs: list[Tensor] = []
        with_graph = [output for output in outputs if output.grad_fn is not None]
        for output in with_graph:
            output.register_hook(lambda gradient: self._at_outputs.append(_squares(gradient)))
        for node in nodes_below(with_graph):
            if isinstance(getattr(node, "variable", None), nn.Parameter):
                node.register_prehook(lambda gradients: self._at_parameters.extend(map(_squares, gradients)))

    def moments(self) -> tuple[float, float]:
        """(at the parameters, at the outputs); zeros before the backward."""
        return sum(map(float, self._at_parameters)), sum(map(float, self._at_outputs))


class SecondMoment:
    """V^2 of this rank: the mean of its last ten samples, as AC-GC's authors have it.

    A sample of the job's own backward may have been under another loss scale than the last one had. The gradient at the
    model's outputs has the same scale, so it is the ratio of the two that is averaged.
    """

    SAMPLES = 10

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def add(self, at_parameters: float, at_outputs: float = 1.0) -> None:
        """Add a sample, squared norms both; one that is zero or not finite (an overflow) is left out.

        at_outputs: 1.0 for a loss that we differentiated ourselves; the job's own may be scaled, so neither kind is
        averaged with the other.
        """
        if self._samples and (self._samples[-1][1] == 1.0) != (at_outputs == 1.0):
            self._samples = []
        if all(math.isfinite(value) and value > 0.0 for value in (at_parameters, at_outputs)):
            self._samples = [*self._samples, (at_parameters, at_outputs)][-self.SAMPLES :]

    @property
    def value(self) -> float | None:
        """V^2 under the loss scale of the last sample; None without one."""
        if not self._samples:
            return None
        return self._samples[-1][1] * sum(square / scale for square, scale in self._samples) / len(self._samples)

    def state_dict(self) -> list[tuple[float, float]]:
        """The samples."""
        return self._samples

    def load_state_dict(self, samples: Sequence[tuple[float, float]]) -> None:
        """Go on with what state_dict() gave."""
        self._samples = [(square, scale) for square, scale in samples]


def _squares(gradient: Tensor | None) -> Tensor:
    return torch.zeros(()) if gradient is None else gradient.detach().float().square().sum()


def _gradient(loss: Any) -> list[Tensor | None]:
    root = scalar(loss)
    return list(torch.autograd.grad(root, parameters_among(nodes_below([root])), allow_unused=True))


def _square(gradient: Sequence[Tensor | None]) -> float:
    return sum(float(_squares(part)) for part in gradient)
