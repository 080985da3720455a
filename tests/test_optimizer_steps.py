"""The interval between adaptations counts optimizer steps where they can be seen, and forwards elsewhere."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import small_models
import torch
from torch import nn

import gact_dist
from gact_dist import Config

INTERVAL = 3
SETTINGS = Config(bits=4, adapt_interval=INTERVAL, adapt_tolerance=0, calibration_samples=4, min_numel=64)


class Job:
    """A model whose optimizer steps after some forwards, with a controller."""

    def __init__(
        self, way: str = "step", micro_batches: int = 1, optimizers: Callable[..., list] | None = None
    ) -> None:
        self.model, self.batch = small_models.mlp(width=16)
        self.loss_fn = small_models.loss_of(self.model)
        self.gact = gact_dist.attach(self.model, config=SETTINGS)
        self.follows, self.micro_batches, self.forwards = way == "follow", micro_batches, 0
        if self.follows:
            self.gact.follow()
        self.optimizers = [torch.optim.SGD(self.model.parameters(), 0.01)] if optimizers is None else optimizers(self)

    def forward(self) -> None:
        with nullcontext() if self.follows else self.gact.step(self.loss_fn, self.batch):
            loss = self.loss_fn(self.batch)
        loss.backward()
        self.forwards += 1

    def run(self, forwards: int) -> Job:
        for _ in range(forwards):
            self.forward()
            if self.forwards % self.micro_batches == 0:
                for optimizer in self.optimizers:
                    optimizer.step()
        return self

    @property
    def adapted(self) -> list[int]:
        """Before which forwards bits adapted; the first has number one."""
        return [adaptation["step"] for adaptation in self.gact.history]


# follow() measures with the gradient of the forward before
@pytest.mark.parametrize(
    ("way", "micro_batches", "expected"),
    [
        ("step", 1, [1, 4, 7, 10, 13, 16]), ("follow", 1, [2, 5, 8, 11, 14, 17]),
        ("step", 2, [1, 7, 13]), ("follow", 2, [2, 7, 13]),
    ],
)  # fmt: skip
def test_the_interval_is_in_optimizer_steps(way, micro_batches, expected):
    assert Job(way, micro_batches).run(18).adapted == expected


def test_until_an_optimizer_step_is_seen_forwards_count():
    # the second adaptation is due before the first optimizer step, which ends the fourth forward
    assert Job(micro_batches=4).run(32).adapted == [1, 4, 13, 25]


class Hidden:
    """An optimizer that is no torch.optim.Optimizer."""

    def step(self) -> None:
        pass


class Nested(torch.optim.Optimizer):
    """An optimizer that steps another one, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, 0.01)
        super().__init__(self.inner.param_groups, {})

    def step(self) -> None:
        self.inner.step()


def one_for_each_parameter(job: Job) -> list:
    return [torch.optim.SGD([parameter], 0.01) for parameter in job.model.parameters()]


@pytest.mark.parametrize("optimizers", [one_for_each_parameter, lambda job: [Nested(job.model.parameters())]])
def test_several_optimizers_take_one_step(optimizers):
    assert Job("step", 2, optimizers).run(24).adapted == [1, 7, 13, 19]


@pytest.mark.parametrize(
    "optimizers", [lambda job: [], lambda job: [Hidden()], lambda job: [torch.optim.SGD(nn.Linear(2, 2).parameters())]]
)
@pytest.mark.parametrize(("way", "first"), [("step", 1), ("follow", 2)])
def test_where_no_optimizer_of_the_model_is_seen_forwards_count(way, first, optimizers):
    assert Job(way, 2, optimizers).run(12).adapted == list(range(first, 13, INTERVAL))


@pytest.mark.parametrize("calibrated", [0, 1, 4], ids="calibrated after {} steps".format)
@pytest.mark.parametrize("before_the_optimizer", [False, True])
def test_with_one_forward_a_step_both_counts_are_the_same(calibrated, before_the_optimizer):
    found = []
    for optimizers in (None, lambda job: []):
        job = Job(optimizers=optimizers).run(calibrated)
        if before_the_optimizer:
            job.forward()
        job.gact.calibrate(job.loss_fn, job.batch, samples=4)
        if before_the_optimizer:
            for optimizer in job.optimizers:
                optimizer.step()
        found.append(job.run(8).adapted)
    assert found[0] == found[1]


@pytest.mark.parametrize("saved", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_resumed_job_adapts_when_the_other_one_does(saved, micro_batches):
    straight = Job(micro_batches=micro_batches).run(24)
    resumed = Job(micro_batches=micro_batches)
    resumed.gact.load_state_dict(Job(micro_batches=micro_batches).run(saved).gact.state_dict())
    resumed.forwards = saved
    assert resumed.run(24 - saved).adapted == straight.adapted


@pytest.mark.parametrize("saved", [1, 3, 4, 5])
def test_a_state_that_lacks_the_number_goes_on_as_it_was(saved):
    fields = json.loads(Job().run(saved).gact.state_dict()["gact_dist"])
    del fields["optimizer_steps"]
    resumed = Job()
    resumed.gact.load_state_dict({"gact_dist": json.dumps(fields)})
    assert resumed.run(12 - saved).adapted == Job().run(12).adapted


def test_a_model_that_was_dropped_is_freed_and_not_watched_any_more():
    job = Job().run(2)
    model = weakref.ref(job.model)
    del job
    gc.collect()
    assert model() is None
    Job().run(2)
