"""Does a long job with faults leak? Steps of small models, with adaptations, exceptions and dropped graphs.

    python -m benchmarks.reliability.endurance --steps 20000 --json benchmarks/results/reliability.json

Four jobs take turns, each with a model of its own: one attached for the whole run that trains in step(), one in
follow(), one in step() whose stored tensors are offloaded to the host of a simulated device, and one that is attached
and detached anew every 21 steps. All adapt at every fourth optimizer step. Of 21 steps of a job ten are plain ones; in
the others the forward, the loss or the backward raises, an adaptation's loss function raises, the forward is
interrupted or has no graph, or its graph is dropped without a backward, kept over several steps, run backward twice or
differentiated twice.

Every 21 steps of each job, after a garbage collection, the script counts what is alive: tensors and objects of
gact_dist's classes that Python knows, open file descriptors, threads, and the resident set. Host memory that is kept
for the next payloads is given back before: how many blocks of it there are depends on the times of copies. The median
of the last quarter must not exceed that of the second quarter: by nothing for what is counted, by 1 % for the resident
set. The first quarter is the time that caches take to fill, and the history of adaptations, which has the figures of
single tensors for the last hundred. If something grows, the classes that do are named.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import simulated_device
import small_models

import gact_dist
from benchmarks.reliability import results
from gact_dist import Config
from gact_dist.offload import HostOffload

SETTINGS = {"policy": "gact", "bits": 4, "min_numel": 16, "adapt_interval": 4, "adapt_tolerance": 0.0}
STEPS_BETWEEN_LINES = 1000
BOUNDS = {"resident_bytes": 1.01}
"""by which factor a median may grow; all others by none"""
KEPT_GRAPHS = 3


class Fault(Exception):
    """What a step of a job raises."""


class _RaisingInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise Fault("backward")


class Trap(nn.Module):
    """In the middle of a model: hands its input on, unless it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: type[BaseException] | str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == "backward":
            return _RaisingInBackward.apply(x)
        if isinstance(self.armed, type):
            raise self.armed
        return x


@dataclasses.dataclass
class Job:
    """A model that trains under gact_dist."""

    follows: bool = False
    reattached: bool = False
    device: simulated_device.Simulated | None = None

    def __post_init__(self) -> None:
        self.model, self.batch = small_models.gpt(batch=4, length=16, width=32, dropout=0.1)
        self.trap = Trap()
        self.model.blocks.insert(1, self.trap)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.plain_loss = small_models.loss_of(self.model)
        self.steps = 0
        self.adaptations = 0
        self.graphs: collections.deque[Tensor] = collections.deque(maxlen=KEPT_GRAPHS)
        self.raising: str | None = None
        self.offload: HostOffload | None = None
        self.gact = self.attach()

    def attach(self) -> gact_dist.Controller:
        """A new controller."""
        if self.device is None:
            gact = gact_dist.attach(self.model, config=Config(**SETTINGS))
            return gact.follow() if self.follows else gact

        def opened(*given: Any) -> HostOffload:
            self.offload = simulated_device._open_offload(self.device, *given)
            return self.offload

        with mock.patch("gact_dist.steps.schedule.open_offload", opened):
            offload = {"enabled": True, "min_bytes": 16, "max_device_bytes": 4096}
            return gact_dist.attach(self.model, config=Config(**SETTINGS, offload=offload))

    def loss(self, batch: Any) -> Tensor:
        """Of a batch. It is the loss function of adaptations as well."""
        found = self.plain_loss(batch)
        if self.raising == "loss":
            raise Fault("loss")
        return found

    def _forward(self, measured: bool = True) -> Tensor:
        step: AbstractContextManager[None] = nullcontext()
        if not self.follows:
            step = self.gact.step(self.loss, self.batch) if measured else self.gact.step()
        with step:
            return self.loss(self.batch)

    def trains(self) -> None:
        """A step as any other."""
        self.optimizer.zero_grad()
        self._forward().backward()
        self.optimizer.step()

    def raises_in_forward(self) -> None:
        self.trap.armed = Fault
        self._forward(measured=False)

    def raises_in_loss(self) -> None:
        """Where an adaptation is due, in the adaptation."""
        self.raising = "loss"
        self._forward()

    def raises_in_backward(self) -> None:
        self.trap.armed = "backward"
        self._forward(measured=False).backward()

    def is_interrupted(self) -> None:
        self.trap.armed = KeyboardInterrupt
        self._forward()

    def drops_its_graph(self) -> None:
        self._forward()

    def keeps_its_graph(self) -> None:
        self.graphs.append(self._forward())

    def runs_backward_twice(self) -> None:
        self.optimizer.zero_grad()
        loss = self._forward()
        loss.backward(retain_graph=True)
        loss.backward()
        self.optimizer.step()

    def differentiates_twice(self) -> None:
        """With a gradient's norm as the loss."""
        weight = self.model.head.weight
        (gradient,) = torch.autograd.grad(self._forward(), weight, create_graph=True)
        torch.autograd.grad(gradient.square().sum(), weight)

    def evaluates(self) -> None:
        with torch.no_grad():
            self._forward(measured=False)

    def gives_back(self) -> None:
        """Host memory that waits for the next payload of its size."""
        if self.offload is not None:
            self.offload.pool.trim()

    def step(self) -> str:
        """The next step; returns which kind it was."""
        kind = CYCLE[self.steps % len(CYCLE)]
        self.steps += 1
        with suppress(Fault, KeyboardInterrupt):
            kind(self)
        self.trap.armed = self.raising = None
        if self.device is not None:
            self.device.copies.clear()  # the record that a simulated device keeps for tests
        if self.reattached and self.steps % len(CYCLE) == 0:
            self.adaptations += _adaptations(self.gact)
            self.gact.detach()
            self.gact = self.attach()
        return kind.__name__


FAULTS: tuple[Callable[[Job], None], ...] = (
    Job.raises_in_forward, Job.raises_in_loss, Job.raises_in_backward, Job.is_interrupted, Job.drops_its_graph,
    Job.keeps_its_graph, Job.runs_backward_twice, Job.differentiates_twice, Job.evaluates, Job.raises_in_loss,
    Job.raises_in_backward,
)  # fmt: skip
CYCLE = [kind for fault in FAULTS for kind in (fault, Job.trains)][:-1]


def _adaptations(gact: gact_dist.Controller) -> int:
    return sum("event" not in entry for entry in gact.history)


@dataclasses.dataclass(frozen=True)
class Alive:
    """What a process holds."""

    tensors: int
    objects: int
    """of gact_dist's classes"""
    descriptors: int
    threads: int
    resident_bytes: int
    classes: collections.Counter[str] = dataclasses.field(repr=False)
    """the objects, by their class"""

    @classmethod
    def now(cls) -> Alive:
        """After a garbage collection."""
        gc.collect()
        tensors, classes = 0, collections.Counter[str]()
        for item in gc.get_objects():
            kind = type(item)
            tensors += Tensor in kind.__mro__
            if str(kind.__module__).startswith("gact_dist"):
                classes[f"{kind.__module__}.{kind.__qualname__}"] += 1
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
        return cls(tensors, classes.total(), descriptors, threads, resident, classes)


COUNTED = [field.name for field in dataclasses.fields(Alive) if field.name != "classes"]


class Run:
    """Steps of all jobs in turn, and what was counted meanwhile."""

    def __init__(self) -> None:
        device = simulated_device.Simulated(compute_s=1e-3)
        self.jobs = Job(), Job(follows=True), Job(device=device), Job(reattached=True)
        self.alive: list[Alive] = []
        self.kinds: collections.Counter[str] = collections.Counter()

    def steps(self, count: int) -> None:
        """Run a number of steps."""
        for _ in range(count):
            self.kinds[self.jobs[self.kinds.total() % len(self.jobs)].step()] += 1
            if self.kinds.total() % (len(self.jobs) * len(CYCLE)) == 0:
                for job in self.jobs:
                    job.gives_back()
                self.alive.append(Alive.now())

    @property
    def adaptations(self) -> int:
        return sum(job.adaptations + _adaptations(job.gact) for job in self.jobs)

    def medians(self) -> dict[str, tuple[float, float]]:
        """Of each thing counted: the median of the second quarter and that of the last one."""
        return {name: self._medians(operator.attrgetter(name)) for name in COUNTED}

    def _medians(self, counted: Callable[[Alive], int]) -> tuple[float, float]:
        quarter = len(self.alive) // 4
        parts = self.alive[quarter : 2 * quarter], self.alive[3 * quarter :]
        early, late = (statistics.median(map(counted, part)) for part in parts)
        return early, late

    def classes_that_grew(self) -> dict[str, tuple[float, float]]:
        """Medians of the classes of which more is alive in the last quarter."""
        names = sorted(set().union(*(alive.classes for alive in self.alive)))
        found = {name: self._medians(lambda alive, name=name: alive.classes[name]) for name in names}
        return {name: medians for name, medians in found.items() if medians[1] > medians[0]}

    def leaks(self) -> list[str]:
        """What has grown beyond its bound."""
        return [name for name, (early, late) in self.medians().items() if late > early * BOUNDS.get(name, 1.0)]


def _figures(run: Run, seconds: float) -> dict[str, Any]:
    return {
        "steps": run.kinds.total(),
        "seconds": round(seconds),
        "adaptations": run.adaptations,
        "steps_of_each_kind": dict(sorted(run.kinds.items())),
        "median_of_the_second_and_the_last_quarter": run.medians(),
        "bounds": {name: BOUNDS.get(name, 1.0) for name in COUNTED},
        "leaks": run.leaks(),
        "classes_that_grew": run.classes_that_grew(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--json", type=Path, help="file of results, in which the entry 'endurance' is replaced")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run, start = Run(), time.perf_counter()
    for done in range(0, arguments.steps, STEPS_BETWEEN_LINES):
        run.steps(min(STEPS_BETWEEN_LINES, arguments.steps - done))
        print(f"{run.kinds.total()} steps, {run.adaptations} adaptations, {run.alive[-1]}", flush=True)
    figures = _figures(run, time.perf_counter() - start)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        results.write(arguments.json, "endurance", figures)
    sys.exit(bool(run.leaks()))


if __name__ == "__main__":
    main()
