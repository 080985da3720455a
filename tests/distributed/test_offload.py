"""Offload under the wrappers of a distributed job: bitwise the job without it, whatever each rank's link is like."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from modes import ADAPTIVE, Cell, differences, train
from simulated_device import Simulated, simulate
from test_deepspeed import Checkpointed, ds_config, run, same, start, weights

from gact_dist.config import Config, Offload

UNIFORM = Config.from_level("L1", min_numel=16)
OFFLOAD = Offload(enabled=True, min_bytes=128)


def offloaded_and_not(cell: Cell) -> tuple[list[str], bool, list[set[str]]]:
    """Differences between the jobs, whether they had the same collectives, and the directions copied in."""
    streams = []
    found, same_collectives = [], True
    # a pipeline runs its stage on uninitialised memory first, and what is measured of that is another plan each time
    rounded = UNIFORM if cell.row == "PP" else ADAPTIVE
    for config in (rounded, Config.from_level("exact", min_numel=16)):
        bandwidth = (1e6, 1e9)[dist.get_rank()]  # so that the ranks send different tensors
        device = Simulated(bandwidth, bandwidth, compute_s=1e-3)
        without = train(cell, config)
        with pytest.MonkeyPatch.context() as patch:
            simulate(patch, device)
            offloaded = train(cell, Config(**{**config.to_dict(), "offload": OFFLOAD}))
        found += differences(without, offloaded)
        same_collectives &= without.collectives == offloaded.collectives
        streams.append({copy.stream for copy in device.copies})
    return found, same_collectives, streams


CELLS = [
    ("DDP", "none", "fp32", "eager"),
    ("FSDP1", "none", "fp32", "eager"),
    ("FSDP2", "non-reentrant", "fp32", "eager"),
    ("FSDP2", "selective", "fp32", "compile"),
    ("ZeRO-0", "none", "fp32", "eager"),
    ("ZeRO-1", "none", "bf16", "eager"),
    ("ZeRO-2", "reentrant", "fp32", "eager"),
    ("ZeRO-3", "non-reentrant", "fp32", "eager"),
    ("TP", "none", "fp32", "eager"),
    ("PP", "none", "fp32", "eager"),
    ("PP", "non-reentrant", "bf16", "eager"),
]


@pytest.mark.parametrize("cell", [Cell(*cell) for cell in CELLS], ids=str)
def test_offload_changes_no_bit(ranks, cell):
    for found, same_collectives, streams in ranks(offloaded_and_not, cell, timeout_s=300):
        assert found == []
        assert same_collectives
        # a slow link may have so little to carry that backward finds all of it on the device still
        assert all("out" in directions for directions in streams)
        # of a checkpointed stage there is little else: its input is the schedule's
        assert {"out", "in"} in streams or str(cell).startswith("PP-non-reentrant")


def by_the_block(level: str) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, weights and bytes on the host of a ZeRO-3 job that has gact_dist from its "gact" block."""
    from gact_dist import deepspeed

    linear = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch, Simulated(compute_s=1e-3))
        patch.setattr(deepspeed, "require_cuda", lambda: None)
        engine = start(ds_config(3, {"level": level, "min_numel": 16, **BLOCKS[level]}), Checkpointed)
        losses, _ = run(engine, 0, 3)
        found = losses, weights(engine), engine.gact.report().host_bytes
    engine.gact.detach()
    engine.destroy()
    torch.nn.functional.linear = linear
    return found


BLOCKS = {"L1": {}, "L4bit-swap": {"offload": {"min_bytes": 128}}}


def both_blocks() -> list[tuple]:
    return [by_the_block(level) for level in BLOCKS]


def test_inputs_of_deepspeeds_checkpoints_leave_as_well(ranks):
    for without, offloaded in ranks(both_blocks, timeout_s=300):
        assert offloaded[0] == without[0]
        assert same(offloaded[1], without[1])
        assert (without[2], offloaded[2] > 0) == (0, True)
