"""The pool of pinned memory: sizes as they are, reuse, bounds, and giving back."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from simulated_device import Simulated

from gact_dist.offload.device import CudaDevice
from gact_dist.offload.host_pool import HostPool, _available_bytes, ranks_on_host

PAGE = 4096


def pool(max_bytes: int = 2**30, **options: int) -> tuple[HostPool, Simulated]:
    device = Simulated(**options)
    return HostPool(device, max_bytes), device


def test_sizes_are_rounded_to_pages_and_not_to_powers_of_two():
    blocks, device = pool()
    blocks.take(33 * 2**20 + 1)
    assert blocks.allocated_bytes == device.host_bytes == 33 * 2**20 + PAGE


def test_a_block_is_used_again_for_what_nearly_fills_it_only():
    blocks, device = pool()
    small, large = blocks.take(100 * PAGE), blocks.take(200 * PAGE)
    blocks.put_back(large)
    blocks.put_back(small)
    assert blocks.take(95 * PAGE) is small  # the best fit
    assert blocks.take(50 * PAGE) not in (small, large)  # three quarters of the other would be wasted
    assert blocks.take(200 * PAGE) is large
    assert device.host_allocations == 3


def test_the_bound_holds_and_free_blocks_make_room_for_other_sizes(caplog):
    blocks, device = pool(max_bytes=100 * PAGE)
    first = blocks.take(60 * PAGE)
    with caplog.at_level(logging.WARNING):
        assert blocks.take(60 * PAGE) is None
        assert blocks.take(60 * PAGE) is None
    assert [record.message for record in caplog.records] == [
        f"no pinned host memory for a tensor of {60 * PAGE} bytes, {60 * PAGE} bytes being allocated and {60 * PAGE} "
        "in use (max_host_bytes is reached): what does not fit stays on the device"
    ]
    blocks.put_back(first)
    assert blocks.take(90 * PAGE) is not None  # the free block of 60 pages went back to the host
    assert device.peak_host_bytes == 90 * PAGE


def test_a_failing_allocation_warns_once_and_is_not_tried_again(caplog):
    blocks, _ = pool(host_limit=50 * PAGE)
    assert blocks.take(40 * PAGE) is not None
    with caplog.at_level(logging.WARNING):
        assert [blocks.take(40 * PAGE) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert f"the simulated host has {10 * PAGE} bytes left" in caplog.text
    assert blocks.max_bytes == 40 * PAGE


def test_blocks_that_no_step_uses_go_back_to_the_host():
    blocks, device = pool()
    kept, dropped = blocks.take(10 * PAGE), blocks.take(30 * PAGE)
    blocks.put_back(dropped)
    for _ in range(16):
        blocks.put_back(kept)
        blocks.end_step()
        kept = blocks.take(10 * PAGE)
    assert device.host_bytes == blocks.allocated_bytes == 10 * PAGE


def test_of_equal_blocks_the_last_used_is_taken_so_that_the_others_grow_idle():
    blocks, device = pool()
    taken = [blocks.take(10 * PAGE) for _ in range(4)]
    for block in taken:
        blocks.put_back(block)
    for _ in range(16):
        blocks.end_step()
        blocks.put_back(blocks.take(10 * PAGE))
    assert device.host_bytes == 10 * PAGE


def test_a_pool_that_is_closed_gives_everything_back():
    blocks, device = pool()
    blocks.take(10 * PAGE)
    blocks.put_back(blocks.take(20 * PAGE))
    blocks.close()
    assert device.host_bytes == blocks.allocated_bytes == 0


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),  # torchrun
        ({"LOCAL_SIZE": "4"}, 4),  # DeepSpeed
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "many"}, 16),
        ({}, 16),  # nobody says: all of them may be here
    ],
)
def test_ranks_on_a_host_are_those_that_the_launcher_started(environment, ranks):
    assert ranks_on_host(environment, 16) == ranks


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_of_the_host_is_what_the_machine_and_the_container_allow(tmp_path):
    write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert _available_bytes(tmp_path) == 500 * 1024
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "1000\n")
    assert _available_bytes(tmp_path) == 500 * 1024
    write(tmp_path / "sys/fs/cgroup/memory.max", "301000\n")
    assert _available_bytes(tmp_path) == 300_000


def test_a_forked_process_does_not_inherit_pinned_memory(monkeypatch):
    """Its workers' writes could otherwise move pages that the device is writing to."""
    registered = []

    class Cudart:
        def cudaHostRegister(self, pointer, nbytes, flags):
            registered.append((pointer, nbytes))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    within = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(within.append(device)))
    device = CudaDevice.__new__(CudaDevice)  # a real one has streams
    device.device = torch.device("cuda", 1)
    memory = device.allocate_host(33 * PAGE)
    assert within == [device.device]
    assert registered == [(memory.data_ptr(), 33 * PAGE)]
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    before, flags = next(
        (before, after.splitlines()[0]) for before, after in pairwise(mappings) if f"{memory.data_ptr():x}-" in before
    )
    assert f"-{memory.data_ptr() + 33 * PAGE:x} " in before  # a mapping of its own
    assert "dc" in flags.split()  # do not copy on fork
