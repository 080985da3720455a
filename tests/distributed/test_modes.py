"""The table of modes (modes.py), as many of its cells as CI has time for; the rest run from the same file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from modes import CELLS, CHECKPOINTS, EXECUTIONS, FAILS, PRECISIONS, REFUSALS, REFUSED, ROWS, Cell, problems, run_cell


def in_ci(cell: Cell) -> bool:
    """A slice in which every row, every checkpoint and every precision occurs, and every pair of the first two."""
    if cell.execution == "compile":
        chosen = cell.row in ("DDP", "FSDP2", "ZeRO-3", "TP", "PP")
        views_for_parameters = cell.row == "FSDP1 use_orig_params" and cell.checkpoint == "none"
        return cell.precision == "fp32" and (chosen or views_for_parameters)
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


def test_the_page_has_every_cell_and_none_that_fails():
    page = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    names = ["execution", *(f"{c}, {p}" for c in CHECKPOINTS for p in PRECISIONS)]
    assert [row[0] for row in rows if row[1:] == names[1:]] == list(EXECUTIONS)
    cells = {}
    for execution in EXECUTIONS:
        start = next(number for number, row in enumerate(rows) if row[0] == execution) + 2
        for row in rows[start : start + len(ROWS)]:
            for column, text in zip(names[1:], row[1:], strict=True):
                cells[Cell(row[0], *column.split(", "), execution)] = text
    assert set(cells) == set(CELLS)
    assert {cell for cell, text in cells.items() if text == REFUSED} == set(REFUSALS)
    assert not [cell for cell, text in cells.items() if text.startswith(FAILS) or not text]
