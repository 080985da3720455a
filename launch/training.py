"""The training loop of the example runs. Lines that a user adds for gact_dist: `attach` and `with gact.step(...)`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from launch.config import RunConfig
from launch.memory import PeakMemory
from launch.models import digest_of
from launch.ranks import Ranks
from launch.tasks import Batch, Task, batch_rows, build_task, select, test_batches


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run measured. Losses are means over the ranks, times and memory are those of rank 0."""

    losses: list[float]
    accuracy: float
    test_loss: float
    step_times_s: list[float]
    step_peaks_bytes: list[int]  # peaks of the first steps above what was held before them
    report: Any  # gact_dist.MemoryReport, or None when untouched
    plan: dict[str, Any]
    weights_sha256: str


def train(
    config: RunConfig, ranks: Ranks, device: torch.device, *, seed: int, settings: Any = None, title: str = ""
) -> Measured:
    """Train `config` on this rank; `settings` is a gact_dist.Config, or None to leave the job untouched."""
    torch.manual_seed(seed)
    task = build_task(config, device)
    model = ranks.wrap(task.model, device)
    # From here on every rank draws its own dropout masks, the same in every run with this seed.
    torch.manual_seed(seed * 10_007 + 1 + ranks.rank)
    gact = _attach(model, settings)
    optimizer, schedule = _optimizer(model, config)

    def loss_fn(batch: Batch) -> Tensor:
        return functional.cross_entropy(task.logits(model, batch), batch["labels"])

    memory = PeakMemory(device)
    losses, step_times_s = [], []
    model.train()
    for step in (bar := tqdm(range(config.steps), desc=title, disable=ranks.rank != 0, dynamic_ncols=True)):
        batch = _train_batch(task, config, ranks, seed, step)
        started = _now_s(device)
        with _step(gact, loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        step_times_s.append(_now_s(device) - started)
        memory.end_step()
        losses.append(loss.detach())
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    report = gact.report() if gact is not None else None
    plan = dict(gact.plan) if gact is not None else {}
    if gact is not None:
        gact.detach()
    accuracy, test_loss = evaluate(task, ranks)
    return Measured(
        losses=(ranks.total(torch.stack(losses)) / ranks.world_size).tolist(),
        accuracy=accuracy,
        test_loss=test_loss,
        step_times_s=step_times_s,
        step_peaks_bytes=memory.steps_bytes,
        report=report,
        plan=plan,
        weights_sha256=digest_of(task.model),
    )


def _attach(model: nn.Module, settings: Any) -> Any:
    """The handle of gact_dist, or None; an untouched run does not import the library."""
    if settings is None:
        return None
    import gact_dist

    return gact_dist.attach(model, config=settings)


def _step(gact: Any, loss_fn: Any, batch: Batch) -> AbstractContextManager[Any]:
    return nullcontext() if gact is None else gact.step(loss_fn, batch)


def _train_batch(task: Task, config: RunConfig, ranks: Ranks, seed: int, step: int) -> Batch:
    rows = batch_rows(
        step,
        examples=len(task.train["labels"]),
        batch_size=config.batch_size,
        seed=seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return select(task.train, rows)


def _optimizer(
    model: nn.Module, config: RunConfig
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer, and a learning rate that rises over the warm-up and then falls linearly to zero."""
    if config.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), config.learning_rate, momentum=0.9, weight_decay=config.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    warmup = max(1, round(config.steps * config.warmup_fraction))

    def factor(step: int) -> float:
        return min((step + 1) / warmup, (config.steps - step) / max(1, config.steps - warmup))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(task: Task, ranks: Ranks) -> tuple[float, float]:
    """Accuracy (0..1) and mean loss over all test examples, each rank working on its share."""
    task.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=task.test["labels"].device)
    for batch in test_batches(task.test, ranks.rank, ranks.world_size):
        logits = task.logits(task.model, batch)
        sums[0] += (logits.argmax(dim=1) == batch["labels"]).sum()
        sums[1] += functional.cross_entropy(logits, batch["labels"], reduction="sum")
        sums[2] += len(batch["labels"])
    correct, loss, count = ranks.total(sums).tolist()
    return correct / count, loss / count


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
