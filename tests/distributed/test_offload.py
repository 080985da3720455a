"""Offload under the wrappers of a distributed job: bitwise the job without it, whatever each rank's link is like."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from modes import ADAPTIVE, Cell, differences, train
from simulated_device import Simulated, simulate

from gact_dist.config import Config, Offload

OFFLOAD = Offload(enabled=True, min_bytes=128)


def offloaded_and_not(cell: Cell) -> tuple[list[str], bool, list[set[str]]]:
    """Differences between the jobs, whether they had the same collectives, and the directions copied in."""
    streams = []
    found, same_collectives = [], True
    for config in (ADAPTIVE, Config.from_level("exact", min_numel=16)):
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


@pytest.mark.parametrize(("row", "checkpoint"), [("DDP", "none"), ("FSDP1", "none"), ("FSDP2", "non-reentrant")])
def test_offload_changes_no_bit(ranks, row, checkpoint):
    cell = Cell(row, checkpoint, "fp32", "eager")
    for found, same_collectives, streams in ranks(offloaded_and_not, cell):
        assert found == []
        assert same_collectives
        assert streams == [{"out", "in"}] * 2
