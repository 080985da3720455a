"""What a job can do about the memory of its activations: what bench_step.py and bench_batch.py compare."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gact_dist
from benchmarks.step.async_offload import AsyncOffload
from benchmarks.step.shapes import loss_of
from gact_dist import LEVELS, Config
from gact_dist.config import Offload

# what a selective checkpoint keeps: results of what takes the time
_KEPT_OPERATORS = (
    "mm", "addmm", "convolution", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One of them."""

    level: str = ""
    """of gact_dist; empty without it"""
    checkpoint: str = ""
    """full or selective, around every block; empty without"""
    offload: str = ""
    """save_on_cpu or async: offload by others than gact_dist"""
    max_device_bytes: int = 0
    """bytes that the level's offload may leave on the device; 0: all that backward would have to wait for"""
    layout: str = "columns"
    """of the level's groups"""
    pack_stream: bool = False
    """whether the level packs on a stream of its own"""

    @property
    def config(self) -> Config:
        """Settings of gact_dist. Raises ValueError for a strategy without it."""
        changes: dict[str, Any] = {"layout": self.layout, "pack_stream": self.pack_stream}
        if self.max_device_bytes:
            changes["offload"] = {"max_device_bytes": self.max_device_bytes}
        return Config.from_level(self.level, **changes)

    @property
    def needs_cuda(self) -> bool:
        """Whether it copies between a CUDA device and its host, or needs a stream."""
        return bool(self.offload) or self.pack_stream or (bool(self.level) and self.config.offload.enabled)


_ALL_LEAVE = 1
"""the least max_device_bytes that is a limit: no payload fits into it"""

STRATEGIES: dict[str, Strategy] = {
    "untouched": Strategy(),
    "L1": Strategy(level="L1"),
    "L1, memory order": Strategy(level="L1", layout="memory"),
    "L1, pack stream": Strategy(level="L1", pack_stream=True),
    "L1, memory, pack stream": Strategy(level="L1", layout="memory", pack_stream=True),
    "L2": Strategy(level="L2"),
    "L2.2": Strategy(level="L2.2"),
    "exact": Strategy(level="exact"),
    "L3": Strategy(level="L3"),
    "L3, all leave": Strategy(level="L3", max_device_bytes=_ALL_LEAVE),
    "L4bit-swap": Strategy(level="L4bit-swap"),
    "swap": Strategy(level="swap"),
    "checkpoint": Strategy(checkpoint="full"),
    "selective checkpoint": Strategy(checkpoint="selective"),
    "checkpoint + L2": Strategy(checkpoint="full", level="L2"),
    "checkpoint + L3": Strategy(checkpoint="full", level="L3"),
    "checkpoint + L3, all leave": Strategy(checkpoint="full", level="L3", max_device_bytes=_ALL_LEAVE),
    "save_on_cpu": Strategy(offload="save_on_cpu"),
    "async offload": Strategy(offload="async"),
}


def without_level(name: str) -> str:
    """The name of the strategy that leaves gact_dist out and keeps the rest."""
    rest = replace(STRATEGIES[name], level="", max_device_bytes=0, layout="columns", pack_stream=False)
    return next(other for other, strategy in STRATEGIES.items() if strategy == rest)


def without_offload(name: str) -> str:
    """The name of the strategy that keeps on the device what this one's level sends to the host."""
    strategy = STRATEGIES[name]
    if not strategy.level or not strategy.config.offload.enabled:
        return name
    wanted = replace(strategy.config, offload=Offload())
    level = next(level for level in LEVELS if Config.from_level(level) == wanted)
    resident = replace(strategy, level=level, max_device_bytes=0)
    return next(other for other, found in STRATEGIES.items() if found == resident)


class Checkpointed(nn.Module):
    """A block under torch's checkpoint, without reentrance."""

    def __init__(self, block: nn.Module, context_fn: Callable[[], Any] | None) -> None:
        super().__init__()
        self.block = block
        self._options = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        return checkpoint(self.block, *args, use_reentrant=False, **self._options, **kwargs)


def checkpoint_blocks(model: Any, kind: str) -> None:
    """Put every block of a model of shapes.py under a checkpoint, full or selective."""
    context_fn = None
    if kind == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT_OPERATORS if hasattr(torch.ops.aten, name)]
        context_fn = partial(create_selective_checkpoint_contexts, kept)
    for container in model.block_containers():
        for number, block in enumerate(container):
            container[number] = Checkpointed(block, context_fn)


def replica(model: nn.Module) -> nn.Module:
    """Modules of their own around the same parameters and buffers, so that strategies take no memory of weights."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


class Run:
    """A strategy at work on a replica of a model; strategies of one model can take turns."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self.model = replica(model)
        self._contexts: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.gact: gact_dist.Controller | None = None
        if strategy.checkpoint:
            checkpoint_blocks(self.model, strategy.checkpoint)
        if strategy.level:
            self.gact = gact_dist.attach(self.model, config=strategy.config)
            self._contexts = self.gact.step
        elif strategy.offload == "save_on_cpu":
            self._contexts = partial(save_on_cpu, pin_memory=True)
        elif strategy.offload == "async":
            self._contexts = AsyncOffload(model.parameters()).hooks

    def adapt(self, batch: tuple[Tensor, Tensor], samples: int) -> None:
        """Let levels that adapt do so once, on the first samples of this batch; no step does."""
        if self.gact is not None:
            self.gact.calibrate(self._loss, batch, samples=samples)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a step, whose backward may follow."""
        with self._contexts():
            return self._loss(batch)

    def close(self) -> None:
        """Take gact_dist off the replica; its memory on the host goes back."""
        if self.gact is not None:
            self.gact.detach()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.model, batch)
