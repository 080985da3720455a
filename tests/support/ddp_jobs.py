"""Small training jobs under DistributedDataParallel, run on each rank of the pool, and the trace they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ranks import count_collectives
from small_models import SmallCNN, TinyGPT, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gact_dist

VOCABULARY, SAMPLES = 37, 8


class Branching(nn.Module):
    """[batch, 32] -> [batch, 10]; a batch whose first element is positive takes one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        branch = bool(x[0, 0] > 0)
        x = torch.tanh(self.first(x))
        if branch:
            x = torch.sigmoid(self.extra(x))
        return self.last(x)


def build(kind: str) -> nn.Module:
    """The model of a kind, with the same weights on every rank."""
    torch.manual_seed(0)
    return {"gpt": lambda: TinyGPT(dropout=0.1), "cnn": SmallCNN, "branching": Branching}[kind]()


def sharded(model: nn.Module) -> nn.Module:
    """The model itself, with its parameters split over all ranks by FSDP2."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def batch_of(kind: str, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's own samples of a step. The branch of "branching" alternates, in opposite phase on odd ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    if kind == "gpt":
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, 33), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (SAMPLES, 1, 16, 16) if kind == "cnn" else (SAMPLES, 32)
    inputs = torch.randn(shape, generator=generator)
    if kind == "branching":
        inputs[:, 0] = 1.0 if (step + rank) % 2 else -1.0  # in every part of the batch
    return inputs, torch.randint(0, 10, (SAMPLES,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained and how; the same on every rank."""

    kind: str
    steps: int = 5
    micro_batches: int = 1
    """forward and backward passes for each optimizer step, all but the last under no_sync"""
    ddp: dict[str, Any] = field(default_factory=dict)
    attach_to: str = "ddp"
    """ddp, or plain: attached before the model is wrapped"""
    wrapper: str = "ddp"
    """ddp, or fsdp2: the blocks and the model itself are sharded"""


@dataclass
class Trace:
    """All that a job could have changed, step by step and at its end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    final_state: dict[str, Tensor] = field(default_factory=dict)
    random_state: Tensor = field(default_factory=lambda: torch.empty(0))
    plans: list[dict[str, int | None]] = field(default_factory=list)
    adapted: list[bool] = field(default_factory=list)
    """for each forward, whether an adaptation came before it"""


def differences(first: Trace, second: Trace) -> list[str]:
    """Where two traces are not bitwise equal, collectives left out."""
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)) if not _same(a, b)]
    for step, (a, b) in enumerate(zip(first.gradients, second.gradients, strict=True)):
        found += [f"gradient of {name} at step {step}" for name in a if not _same(a[name], b[name])]
    names = first.final_state.keys() | second.final_state.keys()
    found += [f"final {n}" for n in sorted(names) if not _same(first.final_state.get(n), second.final_state.get(n))]
    if not _same(first.random_state, second.random_state):
        found.append("random number generator")
    return found


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)


class Session:
    """A job in progress on this rank."""

    def __init__(self, job: Job, config: gact_dist.Config | None, prepare: Callable[[Any], None] | None = None) -> None:
        self.job, self.gact, self.trace, self.forwards = job, None, Trace(), 0
        self.model = build(job.kind)
        if config is not None and job.attach_to == "plain":
            self.gact = gact_dist.attach(self.model, config=config)
        self.ddp = sharded(self.model) if job.wrapper == "fsdp2" else DistributedDataParallel(self.model, **job.ddp)
        if config is not None and job.attach_to == "ddp":
            self.gact = gact_dist.attach(self.ddp, config=config)
        if self.gact is not None and prepare is not None:
            prepare(self.gact)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loss_fn = loss_of(self.ddp)
        torch.manual_seed(7 + dist.get_rank())  # dropout differs between ranks, as it does in real jobs

    def run(self, first_step: int, steps: int) -> Session:
        """Optimizer steps first_step .. first_step + steps - 1."""
        for step in range(first_step, first_step + steps):
            with count_collectives() as count:
                self._optimizer_step(step)
            self.trace.collectives.append(count.total)
        return self

    def _optimizer_step(self, step: int) -> None:
        self.optimizer.zero_grad()
        micro_batches = self.job.micro_batches
        for micro in range(micro_batches):
            batch = batch_of(self.job.kind, step * micro_batches + micro, dist.get_rank())
            with nullcontext() if micro == micro_batches - 1 else self.ddp.no_sync():
                (self._forward(batch) / micro_batches).backward()
        named = self.model.named_parameters()
        self.trace.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in named})
        self.optimizer.step()

    def _forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.gact is None:
            loss = self.loss_fn(batch)
        else:
            before = self.gact.adaptation
            with self.gact.step(self.loss_fn, batch):
                loss = self.loss_fn(batch)
            self.trace.adapted.append(self.gact.adaptation is not before)
            self.trace.plans.append(self.gact.plan)
        self.trace.losses.append(loss.detach().clone())
        return loss

    def finish(self) -> Trace:
        """The trace, with the state at the end."""
        self.trace.final_state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.trace.random_state = torch.get_rng_state()
        if self.gact is not None:
            self.gact.detach()
        return self.trace


def train(job: Job, config: gact_dist.Config | None, prepare: Callable[[Any], None] | None = None) -> Trace:
    """Run a job on this rank; prepare: called with the controller before the first step."""
    return Session(job, config, prepare).run(0, job.steps).finish()
