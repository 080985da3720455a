"""One try of max-batch: a few training steps of one size under a limit of memory, in this process, which may die of it.

python -m gact_dist.cli.trial TRIAL_AS_JSON RESULT_FILE
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .._errors import says_out_of_memory
from ..controller import attach
from ..policies import policy_of
from ..run_log import peak_resident_bytes
from .batch_search import Probe
from .loading import Job, UserCode, load_function, load_job
from .output import CommandError

OFF = "L0"
_ADAPTING_STEPS, _TIMED_STEPS = 8, 3
_LONG_ENOUGH_S = 5.0
"""of timed steps: longer ones differ little from one to the next"""
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one process tries."""

    job: str
    batch: int
    sequence: int | None
    level: str
    checkpoints: bool
    memory_bytes: int
    device: str
    """cpu or cuda"""
    optimizer: str
    """adamw, sgd or none"""
    measures: bool = True
    """whether bits adapt and the gradient is compared, as in a job; else each tensor keeps the bits it begins with"""


def try_here(trial: Trial) -> Probe:
    """Train a few steps in this process. Raises CommandError."""
    sizes = (trial.batch,) if trial.sequence is None else (trial.batch, trial.sequence)
    load_function(trial.job, *sizes)  # what it imports is not counted
    _warm_up(trial)
    before_bytes = _limit_memory(trial)
    job = load_job(trial.job, *sizes)
    _check_device(job, trial)
    job.model.train()
    if trial.checkpoints and not checkpoint_blocks(job.model):
        raise CommandError(
            f"{type(job.model).__name__} has no blocks to checkpoint, expected gradient_checkpointing_enable() or a "
            "ModuleList of blocks: use --no-checkpoint, or checkpoint in the function"
        )
    step_s = _train(job, trial)
    return Probe(batch=trial.batch, fits=True, peak_bytes=_peak_bytes(trial) - before_bytes, step_s=step_s)


def _warm_up(trial: Trial) -> None:
    """Train a tiny model: what libraries load and allocate in a first step is theirs, and not the job's."""
    width = 64
    layers = (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width))
    model = nn.Sequential(*layers).to(trial.device)
    batch = torch.zeros(width, width, device=trial.device)
    with torch.random.fork_rng():
        _train(Job(model, batch, lambda inputs: model(inputs).square().mean()), trial)


def checkpoint_blocks(model: nn.Module) -> bool:
    """Checkpoint each block of a model, by its own method or each child of a ModuleList; False if there is none."""
    enable: Callable[..., Any] | None = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    inner = {id(inside) for block in blocks for inside in block.modules() if inside is not block}
    outermost = [block for block in blocks if id(block) not in inner]
    for block in outermost:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return bool(outermost)


def _train(job: Job, trial: Trial) -> float:
    """The median seconds of a step, after those in which bits adapt."""
    controller = attach(job.model, trial.level)
    kind = _OPTIMIZERS.get(trial.optimizer)
    optimizer = None if kind is None else kind(job.model.parameters(), lr=1e-5)
    policy = policy_of(controller.config)
    enough = _TIMED_STEPS if trial.measures or not policy.rounds else 1
    times_s: list[float] = []
    with UserCode(f"a step of {trial.batch}"):
        for number in range(_ADAPTING_STEPS + _TIMED_STEPS):
            is_first = number == 0  # in which the optimizer makes its state
            adapting = policy.adapts and not controller.plan and number < _ADAPTING_STEPS
            measuring = trial.measures and (is_first or adapting)
            started_s = time.perf_counter()
            with controller.step(job.loss_fn, job.batch) if measuring else controller.step():
                loss = job.loss_fn(job.batch)
            loss.backward()
            del loss
            for parameter in job.model.parameters() if optimizer is None else ():
                parameter.grad = None
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if trial.device == "cuda":
                torch.cuda.synchronize()
            if not measuring and not is_first:
                times_s.append(time.perf_counter() - started_s)
            if len(times_s) == enough or sum(times_s) > _LONG_ENOUGH_S:
                break
    return statistics.median(times_s)


def _limit_memory(trial: Trial) -> int:
    """Let this process have no more than that beside what it has. Returns its peak until now, in bytes."""
    if trial.device == "cuda":
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, trial.memory_bytes / total_bytes))
        return 0
    status = Path("/proc/self/status").read_text().splitlines()
    now_bytes = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + trial.memory_bytes, resource.RLIM_INFINITY))
    return _peak_bytes(trial)


def _peak_bytes(trial: Trial) -> int:
    if trial.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_bytes()


def _check_device(job: Job, trial: Trial) -> None:
    kind = next((parameter.device.type for parameter in job.model.parameters()), trial.device)
    if kind != trial.device:
        raise CommandError(
            f"the model is on {kind}, expected {trial.device}: move model and batch there in the function, or give "
            f"--device {kind}"
        )


def main(text: str, result: str) -> None:
    """Try, and write what became of it to a file: a Probe, or an error."""
    trial = Trial(**json.loads(text))
    try:
        found = asdict(try_here(trial))
    except CommandError as error:
        lack = says_out_of_memory(str(error))
        found = asdict(Probe(batch=trial.batch, fits=False, reason=lack)) if lack else {"error": str(error)}
    except (RuntimeError, MemoryError) as error:
        lack = says_out_of_memory(f"{type(error).__name__}: {error}")
        if not lack:
            raise
        found = asdict(Probe(batch=trial.batch, fits=False, reason=lack))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
