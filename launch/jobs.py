"""How a run trains: its model on all ranks, its optimizer, and gact_dist in it; plainly or through DeepSpeed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launch.config import RunConfig, UsageError
from launch.ranks import Ranks

_FLOATING_INPUTS = ("image", "graph")  # the other tasks' are numbers of tokens


class PlainJob:
    """DistributedDataParallel and a loop of one's own. Lines for gact_dist: `attach` and `with gact.step(...)`."""

    def __init__(self, model: nn.Module, config: RunConfig, ranks: Ranks, device: torch.device, settings: Any) -> None:
        self.model = ranks.wrap(model, device)
        self.gact = None
        if settings is not None:  # an untouched run does not import the library
            import gact_dist

            self.gact = gact_dist.attach(self.model, config=settings)
        self.optimizer, self.schedule = make_optimizer(self.model, config)

    def step(self, loss_fn: Any, batch: Any, rows: Tensor) -> AbstractContextManager[Any]:
        """Around the forward of one step. rows: numbers of the batch's examples, for per-sample bits."""
        return nullcontext() if self.gact is None else self.gact.step(loss_fn, batch, sample_index=rows)

    def backward(self, loss: Tensor) -> None:
        """Gradients of all ranks' mean loss."""
        loss.backward()

    def update(self) -> None:
        """One optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()

    def whole(self) -> AbstractContextManager[Any]:
        """Inside it the model's parameters are whole on every rank."""
        return nullcontext()


class DeepSpeedJob:
    """A DeepSpeed engine from a JSON config; its "gact" block, with the run's level, is all that gact_dist needs."""

    def __init__(
        self, model: nn.Module, config: RunConfig, ranks: Ranks, device: torch.device, settings: Any, file: Path
    ) -> None:
        import gact_dist

        optimizer, schedule = make_optimizer(model, config)
        ds_config = _ds_config(file, config, ranks, settings)
        self.model, *_ = gact_dist.deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=ds_config
        )
        self.gact = getattr(self.model, "gact", None)

    def step(self, loss_fn: Any, batch: Any, rows: Tensor) -> AbstractContextManager[Any]:
        """The engine's own forward is the step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Gradients of all ranks' mean loss, scaled where the engine scales."""
        self.model.backward(loss)

    def update(self) -> None:
        """One optimizer step."""
        self.model.step()

    def whole(self) -> AbstractContextManager[Any]:
        """Inside it the model's parameters are whole on every rank."""
        import deepspeed

        partitioned = [p for p in self.model.module.parameters() if hasattr(p, "ds_id")]
        return deepspeed.zero.GatheredParameters(partitioned)


def read_ds_config(file: Path) -> dict[str, Any]:
    """A DeepSpeed config, or `UsageError` where it cannot be used here."""
    if find_spec("deepspeed") is None:
        raise UsageError("--deepspeed needs DeepSpeed, which is not installed: DS_BUILD_OPS=0 pip install deepspeed")
    if not file.is_file():
        raise UsageError(
            f"--deepspeed {file} does not exist, expected a JSON file such as configs/deepspeed/zero2.json"
        )
    import hjson  # what DeepSpeed reads it with

    try:
        return hjson.loads(file.read_text())
    except hjson.HjsonDecodeError as error:
        raise UsageError(f"--deepspeed {file} is not JSON ({error}): mend the file") from error


def check_dtype(ds_config: dict[str, Any], file: Path, task: str) -> None:
    """Raises `UsageError` where DeepSpeed would give a task's floating-point inputs to weights of another type."""
    low = [key for key in ("bf16", "fp16") if ds_config.get(key, {}).get("enabled")]
    if low and task in _FLOATING_INPUTS:
        raise UsageError(
            f"--deepspeed {file} enables {low[0]}, which DeepSpeed applies to the weights and not to inputs: expected "
            f"a file without it for task {task}, whose inputs are float32"
        )


def _ds_config(file: Path, config: RunConfig, ranks: Ranks, settings: Any) -> dict[str, Any]:
    """The file's settings, with the sizes, the optimizer and the level that the run has."""
    ds_config = read_ds_config(file)
    for replaced in ("optimizer", "scheduler", "train_batch_size"):
        ds_config.pop(replaced, None)
    ds_config |= {
        "train_micro_batch_size_per_gpu": config.batch_size // ranks.world_size,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    block = {"enabled": False} if settings is None else asdict(settings)
    return ds_config | {"gact": block}


def make_optimizer(
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
