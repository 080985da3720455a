"""The two ways a run trains, with a plain loop or with DeepSpeed: model, optimizer, and the lines of gact_dist."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config import RunConfig, UsageError
from .ranks import Ranks

_FLOATING_INPUTS = ("image", "graph")  # the other tasks have token numbers


class PlainJob:
    """DistributedDataParallel and a plain loop. gact_dist adds two lines: `attach` and `with gact.step(...)`."""

    def __init__(self, model: nn.Module, config: RunConfig, ranks: Ranks, device: torch.device, settings: Any) -> None:
        self.model = ranks.wrap(model, device)
        self.gact = None
        if settings is not None:  # an untouched run must not import the library
            import gact_dist

            self.gact = gact_dist.attach(self.model, config=settings)
        self.optimizer, self.schedule = make_optimizer(self.model, config)

    def step(self, loss_fn: Any, batch: Any, rows: Tensor) -> AbstractContextManager[Any]:
        """The context of one forward. rows: the indices of its examples in the data set, for per-sample bits."""
        return nullcontext() if self.gact is None else self.gact.step(loss_fn, batch, sample_index=rows)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, averaged over all ranks."""
        loss.backward()

    def update(self) -> None:
        """One optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()

    def gathered(self) -> AbstractContextManager[Any]:
        """A context in which every rank has all parameters in full."""
        return nullcontext()


class DeepSpeedJob:
    """A DeepSpeed engine and its JSON config. All that gact_dist adds to it is the "gact" block."""

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
        """Nothing to do: each forward of the engine is a step."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, averaged over all ranks and scaled as the engine scales them."""
        self.model.backward(loss)

    def update(self) -> None:
        """One optimizer step."""
        self.model.step()

    def gathered(self) -> AbstractContextManager[Any]:
        """A context in which every rank has all parameters in full."""
        import deepspeed

        partitioned = [p for p in self.model.module.parameters() if hasattr(p, "ds_id")]
        return deepspeed.zero.GatheredParameters(partitioned)


def read_ds_config(file: Path) -> dict[str, Any]:
    """Read a DeepSpeed config. Raises `UsageError` if it cannot be used here."""
    if find_spec("deepspeed") is None:
        raise UsageError("--deepspeed needs DeepSpeed, which is not installed: DS_BUILD_OPS=0 pip install deepspeed")
    if not file.is_file():
        raise UsageError(
            f"--deepspeed {file} does not exist, expected a JSON file such as configs/deepspeed/zero2.json"
        )
    import hjson  # the parser that DeepSpeed uses

    try:
        return hjson.loads(file.read_text())
    except hjson.HjsonDecodeError as error:
        raise UsageError(f"--deepspeed {file} is not JSON ({error}): correct the file") from error


def check_dtype(ds_config: dict[str, Any], file: Path, task: str) -> None:
    """Raise `UsageError` if the weights would have another data type than the task's floating-point inputs."""
    low = [key for key in ("bf16", "fp16") if ds_config.get(key, {}).get("enabled")]
    if low and task in _FLOATING_INPUTS:
        raise UsageError(
            f"--deepspeed {file} enables {low[0]}, which DeepSpeed applies to the weights and not to inputs: give "
            f"a file without it, since task {task} has float32 inputs"
        )


def _ds_config(file: Path, config: RunConfig, ranks: Ranks, settings: Any) -> dict[str, Any]:
    """The settings of the file, with the batch size, the optimizer and the level of the run."""
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
    """The optimizer, and a learning rate that rises linearly in the warm-up and then falls linearly to zero."""
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
