"""Where a process stands in the job: its rank, its device, and the few collectives the example runs need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launch.config import UsageError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all; torchrun sets the environment that `from_environment` reads, one process has none."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """The ranks torchrun announces, or one process."""
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
        return cls(**{name: int(os.environ[key]) for name, key in names.items() if key in os.environ})

    def device(self) -> torch.device:
        """The GPU of this rank, or the CPU where there is none. Raises `UsageError` when GPUs are too few."""
        # The CUDA branches of this folder are written for GPUs and were never run on one.
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"{self.local_rank + 1} or more ranks on this machine, but {torch.cuda.device_count()} GPUs: "
                "start one rank a GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def group(self, device: torch.device) -> Iterator[None]:
        """The default process group while the block runs; nothing for one process.

        Models and optimizers must be gone before the block ends: a reducer that outlives gloo's threads aborts.
        """
        if self.world_size == 1:
            yield
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model under DistributedDataParallel, or as it is in one process."""
        if self.world_size == 1:
            return model
        return DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values
