"""The table of modes (modes.py), as many of its cells as CI has time for; the rest run from the same file."""

from __future__ import annotations

import os

import pytest
from modes import CELLS, REFUSALS, ROWS, Cell, problems, run_cell


def in_ci(cell: Cell) -> bool:
    """A slice in which every row, every checkpoint and every precision occurs, and every pair of the first two."""
    if cell.execution == "compile":
        return cell.precision == "fp32" and cell.row in ("DDP", "FSDP2", "ZeRO-3", "TP", "PP")
    if cell.execution == "inlined":
        return cell.precision == "fp32" and cell.checkpoint == "none"
    return cell.precision == "fp32" or cell.checkpoint in ("none", "non-reentrant")


CHOSEN = [cell for cell in CELLS if os.environ.get("GACT_DIST_ALL_MODES") or in_ci(cell)]


@pytest.mark.parametrize("cell", [cell for cell in CHOSEN if cell not in REFUSALS], ids=str)
def test_a_mode_keeps_the_job(ranks, cell):
    assert problems(cell, ranks(run_cell, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)) == []


@pytest.mark.parametrize("cell", [cell for cell in CHOSEN if cell in REFUSALS], ids=str)
def test_a_mode_that_cannot_be_is_refused_with_its_reason(ranks, cell):
    reason = REFUSALS[cell]
    with pytest.raises(reason.error, match=reason.text):
        ranks(reason.job, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
