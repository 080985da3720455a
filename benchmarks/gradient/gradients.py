"""What rounding adds to a model's gradient, predicted and measured: shared by the benchmarks that ask about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gact_dist
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.per_example import ExampleGradients
from gact_dist.policies import Bits, Plan, policy_of
from gact_dist.policies.actnn import COLUMNS, ExampleCosts
from gact_dist.policies.base import Costs
from gact_dist.sensitivity.one_pass import Sensitivity, measure

PROBES = 1  # random directions for each batch
_NO_CHOICE = ("exact", "mask", "binary", "narrow", "derived")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variance that a configuration adds to the gradient, relative to the mean of its squared norm, and the bytes."""

    measured: float
    predicted: float
    """from the sensitivities of the same batches under the same plan"""
    average_bits: float
    """payload bits of an element, over the tensors whose width is chosen"""
    retained_bytes: int
    """of the batch that takes the most"""
    exact_bytes: int


class Point:
    """A model at one moment of its training, with batches to take gradients of; the caller's random numbers stay."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any], Tensor],
        batches: Sequence[Any],
        indices: Sequence[Tensor | None] = (),
    ) -> None:
        """loss_fn(batch): returns the scalar loss. batches: each is seen under dropout masks of its own, always the
        same ones, so that gradients of one batch differ by rounding alone. indices: numbers of their samples in the
        data set, for policy actnn."""
        self._model, self._loss_fn, self._batches = model, loss_fn, batches
        self._indices = indices or [None] * len(batches)
        with torch.random.fork_rng():
            self._exact = [gradient(model, self.loss(number)) for number in range(len(batches))]
        self.second_moment = sum(float(exact.square().sum()) for exact in self._exact) / len(batches)

    def noise(self, config: gact_dist.Config, *, draws: int, state: dict[str, str] | None = None) -> Noise:
        """What this configuration adds: the mean over the batches, and over some draws of the rounding of each.

        state: of a controller whose plan is to be used; without it policies that adapt do so here.
        """
        with torch.random.fork_rng():
            gact = self._attached(config, state)
            measured, reports = 0.0, []
            for number in range(len(self._batches)):
                measured += self._distance(gact, number, draws)
                reports.append(gact.report())
            report, plan = max(reports, key=lambda report: report.retained_bytes), gact.plan
            gact.detach()
            predicted = self._predicted(config, plan, sample_sizes(gact))
        return Noise(
            measured=measured / len(self._batches) / self.second_moment,
            predicted=predicted / self.second_moment,
            average_bits=average_bits(report, plan),
            retained_bytes=report.retained_bytes,
            exact_bytes=report.exact_bytes,
        )

    def errors(self, config: gact_dist.Config, *, draws: int) -> Iterator[Tensor]:
        """Rounded gradients of the first batch less the exact one, some draws of the rounding under one plan."""
        with torch.random.fork_rng():
            gact = self._attached(config, None)
            for _ in range(draws):
                yield self._error(gact, 0)
            gact.detach()

    def _attached(self, config: gact_dist.Config, state: dict[str, str] | None) -> gact_dist.Controller:
        """A controller with a plan. state: as for noise()."""
        gact = gact_dist.attach(self._model, config=config)
        if state is not None:
            gact.load_state_dict(state)
        elif policy_of(config).adapts:
            self._adapt(gact)
        with gact.step(batch=self._batches[0]):  # the first step only learns which tensors are what
            self.loss(0)
        return gact

    def _error(self, gact: gact_dist.Controller, number: int) -> Tensor:
        """A rounded gradient of one batch less the exact one."""
        with gact.step(batch=self._batches[number], sample_index=self._indices[number]):
            loss = self.loss(number)
        return gradient(self._model, loss) - self._exact[number]

    def _adapt(self, gact: gact_dist.Controller) -> None:
        """Twice, for the second adaptation measures where the first plan has led; between them draws of the gradient
        for an error bound, as a job takes them."""
        adapter, samples = gact._schedule.adapter, gact.config.calibration_samples
        gact.calibrate(self._fixed(0), self._batches[0], samples=samples)
        if adapter is not None and adapter.policy.follows_gradient:
            for number in range(len(self._batches)):
                adapter.draw(number, partial(self.loss, number))
        gact.calibrate(self._fixed(0), self._batches[0], samples=samples)

    def _distance(self, gact: gact_dist.Controller, number: int, draws: int) -> float:
        """Mean squared distance of rounded from exact gradients of one batch. Nothing is learnt of its samples."""
        total, known = 0.0, sample_sizes(gact)
        for _ in range(draws):
            total += float(self._error(gact, number).square().sum())
            sample_gradients(gact).sizes = None if known is None else known.clone()
        return total / draws

    def _predicted(self, config: gact_dist.Config, plan: dict[str, Bits], sizes: Tensor | None) -> float:
        hooks = SavedTensorHooks(self._model, config, 0)
        hooks.plan = Plan(plan, hooks.plan.default)
        hooks.encoder.examples.gradients.sizes = sizes
        if hooks.may_derive:  # a measurement has to know what
            with hooks.rehearsal():
                self.loss(0)
        total = 0.0
        for number, batch in enumerate(self._batches):
            hooks.encoder.examples.begin(self._indices[number], batch)
            found = measure(hooks, self._model, partial(self.loss, number), seed=number, probes=PROBES)
            total += variance_of(found, {item.name: hooks.plan.bits_of(item.name) for item in found})
        hooks.close()
        return total / len(self._batches)

    def loss(self, number: int) -> Tensor:
        """The loss of one of the batches, under its dropout masks."""
        return self._fixed(number)(self._batches[number])

    def _fixed(self, number: int) -> Callable[[Any], Tensor]:
        """The loss function under the dropout masks of one batch."""

        def loss_fn(batch: Any) -> Tensor:
            torch.manual_seed(number)
            return self._loss_fn(batch)

        return loss_fn


def sample_gradients(gact: gact_dist.Controller) -> ExampleGradients:
    """What a controller knows of the gradients of samples."""
    return gact._schedule.hooks.encoder.examples.gradients


def sample_sizes(gact: gact_dist.Controller) -> Tensor | None:
    """A copy of it."""
    sizes = sample_gradients(gact).sizes
    return None if sizes is None else sizes.clone()


def variance_of(found: Sequence[Sensitivity], plan: dict[str, Bits]) -> float:
    """What sensitivities predict of a plan; equal shares of a tensor's samples may have widths of their own in it."""
    zeros = np.zeros(len(found))
    variance = np.stack([item.variance.numpy() for item in found])
    samples = np.stack([np.zeros(COLUMNS) if item.examples is None else item.examples for item in found])
    split = ExampleCosts.build(
        Costs(tuple(item.name for item in found), variance, zeros, zeros, zeros, examples=samples)
    )
    widths = split.expanded(plan)
    rows = zip(split.costs.names, split.costs.variance, strict=True)
    return sum(float(curve[widths[name] - 1]) for name, curve in rows if widths[name] is not None)


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The gradient of all parameters that learn, as one vector."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def average_bits(report: gact_dist.MemoryReport, plan: dict[str, Bits]) -> float:
    """Payload bits of an element, over the tensors whose width a policy chooses; 32 where there is none."""
    chosen = [row for row in report.rows if row.bytes and (row.codec not in _NO_CHOICE or row.name in plan)]
    elements = sum(torch.Size(row.shape).numel() for row in chosen)
    return sum(torch.Size(row.shape).numel() * row.bits for row in chosen) / elements if elements else 32.0
