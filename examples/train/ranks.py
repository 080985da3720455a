"""The ranks of a run: this process's rank and device, its process group, and the one collective that the runs need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import UsageError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all of the job. The defaults are those of a job of one process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read what torchrun puts into the environment; without it, one process."""
        names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
        return cls(**{name: int(os.environ[key]) for name, key in names.items() if key in os.environ})

    def device(self) -> torch.device:
        """The GPU of this rank, or the CPU if the machine has none. Raises `UsageError` for too few GPUs."""
        # The CUDA branches in this folder have never run on a GPU.
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"{self.local_rank + 1} or more ranks, but {torch.cuda.device_count()} GPUs on this machine: "
                "start one rank for each GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def group(self, device: torch.device) -> Iterator[None]:
        """A context with the default process group; without one for a single process.

        Delete models and optimizers before it ends: a reducer that outlives the threads of gloo aborts the process.
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
        """The model in DistributedDataParallel, or the model itself in a single process."""
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
