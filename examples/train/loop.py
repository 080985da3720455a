"""The training loop of the example runs and its measurements. The lines that gact_dist adds are in jobs.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from .config import RunConfig
from .jobs import DeepSpeedJob, PlainJob
from .models import digest_of
from .peak_memory import PeakMemory
from .ranks import Ranks
from .tasks import Batch, Task, batch_rows, build_task, select, test_batches


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a run. Losses are means over all ranks; times and memory are those of this rank."""

    losses: list[float]
    accuracy: float
    test_loss: float
    step_times_s: list[float]
    step_peaks_bytes: list[int]  # peak memory of each of the first steps, above what was allocated before them
    report: Any  # gact_dist.MemoryReport; None without gact_dist
    plan: dict[str, Any]
    history: list[dict[str, Any]]  # one entry for each adaptation: bits and sensitivities
    weights_sha256: str


def train(
    config: RunConfig,
    ranks: Ranks,
    device: torch.device,
    *,
    seed: int,
    settings: Any = None,
    title: str = "",
    deepspeed: Path | None = None,
    after_step: Callable[[int, Task, Any], None] | None = None,
) -> Measured:
    """Train `config` on this rank. settings: a gact_dist.Config, or None to train without gact_dist.

    title: the label of the progress bar; an empty one shows no bar. deepspeed: a DeepSpeed config, to train with its
    engine instead of DistributedDataParallel. after_step: called with the number of completed steps, the task and the
    controller (None without gact_dist).
    """
    torch.manual_seed(seed)
    task = build_task(config, device)
    parts = (task.model, config, ranks, device, settings)
    job = PlainJob(*parts) if deepspeed is None else DeepSpeedJob(*parts, deepspeed)
    # From here on each rank draws its own dropout masks, the same ones in every run with this seed.
    torch.manual_seed(seed * 10_007 + 1 + ranks.rank)

    def loss_fn(batch: Batch) -> Tensor:
        return functional.cross_entropy(task.logits(job.model, batch), batch["labels"])

    memory = PeakMemory(device)
    losses, step_times_s = [], []
    job.model.train()
    bar = tqdm(range(config.steps), desc=title, disable=ranks.rank != 0 or not title, dynamic_ncols=True)
    for step in bar:
        rows = _train_rows(task, config, ranks, seed, step)
        batch = select(task.train, rows)
        started = _now_s(device)
        with job.step(loss_fn, batch, rows):
            loss = loss_fn(batch)
        if job.gact is not None:
            job.gact.log(loss=loss)
        job.backward(loss)
        job.update()
        step_times_s.append(_now_s(device) - started)
        memory.end_step()
        losses.append(loss.detach())
        if after_step is not None:
            after_step(step + 1, task, job.gact)
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    compression = _detached(job.gact)
    accuracy, test_loss = evaluate(task, ranks)
    with job.gathered():
        weights_sha256 = digest_of(task.model)
    return Measured(
        losses=(ranks.total(torch.stack(losses)) / ranks.world_size).tolist(),
        accuracy=accuracy,
        test_loss=test_loss,
        step_times_s=step_times_s,
        step_peaks_bytes=memory.steps_bytes,
        weights_sha256=weights_sha256,
        **compression,
    )


def _detached(gact: Any) -> dict[str, Any]:
    """Detach the controller. Returns its last report, its plan and its history for `Measured`."""
    if gact is None:
        return {"report": None, "plan": {}, "history": []}
    found = {"report": gact.report(), "plan": dict(gact.plan), "history": list(gact.history)}
    gact.detach()
    return found


def _train_rows(task: Task, config: RunConfig, ranks: Ranks, seed: int, step: int) -> Tensor:
    return batch_rows(
        step,
        examples=len(task.train["labels"]),
        batch_size=config.batch_size,
        seed=seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


@torch.no_grad()
def evaluate(task: Task, ranks: Ranks) -> tuple[float, float]:
    """Accuracy (0..1) and mean loss over all test examples. Each rank evaluates its share of them."""
    task.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=task.test["labels"].device)
    for batch in test_batches(task.test, ranks.rank, ranks.world_size):
        logits = task.logits(task.model, batch)
        sums[0] += (logits.argmax(dim=1) == batch["labels"]).sum()
        sums[1] += functional.cross_entropy(logits, batch["labels"], reduction="sum")
        sums[2] += batch["labels"].numel()
    correct, loss, count = ranks.total(sums).tolist()
    return correct / count, loss / count


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
