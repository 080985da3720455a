"""A job of many ranks in one process: its collectives return at once, and move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._patches import replaced
from .._torch_internals import without_fake_tensors


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Within the context this process is rank 0 of so many. Raises RuntimeError where it is a rank of a job already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise RuntimeError(
            "this process is in a process group already, expected one without: a layout of ranks is profiled by one "
            "process, not under torchrun"
        )
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def real_meshes() -> Iterator[None]:
    """Within the context FSDP2 makes a mesh of the ranks that it reshards to, which holds numbers, even if tensors are
    fake."""
    from torch.distributed.fsdp._fully_shard import _fully_shard

    framework: Any = _fully_shard
    find = framework._get_post_forward_mesh_info

    def finding(*args: Any) -> Any:
        with without_fake_tensors():
            return find(*args)

    with replaced(framework, "_get_post_forward_mesh_info", finding):
        yield
