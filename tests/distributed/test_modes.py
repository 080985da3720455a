"""The table of modes (modes.py), as many of its cells as every run has time for; --all runs the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from modes import CELLS, CHECKPOINTS, EXECUTIONS, FAILS, PRECISIONS, REFUSALS, REFUSED, ROWS, Cell, problems, run_cell

# The others execute in one of these ways. Each checkpoint and each precision occurs, and what is refused by each side.
COMPILED = [
    Cell("DDP", "none", "fp32", "compile"),
    Cell("DDP", "reentrant", "bf16", "compile"),
    Cell("FSDP1 use_orig_params", "none", "fp32", "compile"),  # its parameters are views
    Cell("FSDP1", "none", "fp32", "compile"),  # whose blocks run without the compiler, and derive
    Cell("FSDP2", "none", "bf16", "compile"),
    Cell("FSDP1 use_orig_params", "selective", "bf16", "compile"),
    Cell("ZeRO-3", "reentrant", "bf16", "compile"),
    Cell("TP", "non-reentrant", "bf16", "compile"),
    Cell("PP", "selective", "bf16", "compile"),
    Cell("DDP", "none", "fp32", "inlined"),
    Cell("ZeRO-2", "none", "bf16", "inlined"),
    Cell("PP", "non-reentrant", "fp32", "inlined"),
    *(Cell(row, "none", "fp32", "inlined") for row in ("FSDP1", "FSDP2", "ZeRO-3", "TP")),
]


def in_every_run(cell: Cell) -> bool:
    """Of the eager cells each row has one: checkpoints and precisions in turn."""
    row = list(ROWS).index(cell.row)
    here = CHECKPOINTS[row % 4], PRECISIONS[row // 4 % 2], "eager"
    return cell in COMPILED or (cell.checkpoint, cell.precision, cell.execution) == here


def parameters(refused: bool) -> list:
    """The cells of a test, with a mark on those for which a run must ask."""
    return [
        pytest.param(cell, id=str(cell), marks=() if in_every_run(cell) else pytest.mark.large)
        for cell in CELLS
        if (cell in REFUSALS) == refused
    ]


@pytest.mark.whole
@pytest.mark.parametrize("cell", parameters(refused=False))
def test_a_mode_keeps_the_job(ranks, cell):
    assert problems(cell, ranks(run_cell, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)) == []


@pytest.mark.whole
@pytest.mark.parametrize("cell", parameters(refused=True))
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
