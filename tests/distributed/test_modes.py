"""The table of modes (modes.py), as many of its cells as CI has time for; the rest run from the same file."""

from __future__ import annotations

import os

import pytest
from modes import CELLS, REFUSALS, ROWS, VARIANCE_RATIO, Cell, disagreements, run_cell, variance_ratio


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
    found = ranks(run_cell, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
    for on_rank in found:
        untouched, exact, adaptive = on_rank.collectives
        assert on_rank.exact == []
        assert exact == untouched
        assert on_rank.adaptive == []
        assert any(on_rank.adapted)
        assert on_rank.compressed_parameters == []
        assert [a for a, adapted in zip(adaptive, on_rank.adapted, strict=True) if not adapted] == [
            u for u, adapted in zip(untouched, on_rank.adapted, strict=True) if not adapted
        ]
        # bf16 at 4 bits, with statistics and small tensors kept exactly; a compiled region under autocast also keeps
        # the bf16 copies of its weights, which weigh more than two samples of a microbatch
        assert on_rank.ratio > (2 if cell.precision == "bf16" and cell.execution != "eager" else 3)
    assert disagreements(cell, found) == []
    assert VARIANCE_RATIO[0] < variance_ratio(cell, found) < VARIANCE_RATIO[1]


@pytest.mark.parametrize("cell", [cell for cell in CHOSEN if cell in REFUSALS], ids=str)
def test_a_mode_that_cannot_be_is_refused_with_its_reason(ranks, cell):
    reason = REFUSALS[cell]
    with pytest.raises(reason.error, match=reason.text):
        ranks(run_cell, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
