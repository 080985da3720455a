"""Switched off on real ranks, the job is the untouched one bit for bit and waits for nobody; switched on, it adapts."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from modes import ADAPTIVE, CHECKPOINTS, REFUSALS, ROWS, Cell, Job, Trace, adamw, batch_of, differences
from ranks import count_collectives

from gact_dist.config import DISABLE

STEPS_OFF, STEPS_ON = 2, 4


class Found(NamedTuple):
    """What one rank saw."""

    different: list[str]
    """where the job that was switched off from its first step on differs from the untouched one"""
    collectives: tuple[list[int], list[int]]
    """of the untouched job's steps, and of those before it was switched on and after it was off again"""
    rows: int
    """in the report of the last step that was on"""
    plan: dict[str, int | None]
    rows_while_off: int


def steps(job: Job, first: int, number: int) -> Trace:
    trace = Trace()
    for step in range(first, first + number):
        with count_collectives() as count:
            loss = job.forward_backward(*batch_of(step, job.data_rank()))
            job.update()
        trace.losses.append(loss.detach().clone())
        trace.collectives.append(count.total)
    trace.weights, trace.random_state = job.weights(), torch.get_rng_state()
    return trace


def switch_off(gact, by: str) -> None:
    if by == "disable()":
        gact.disable()
    else:
        os.environ[DISABLE] = "1"


def switch_on(gact) -> None:
    os.environ.pop(DISABLE, None)
    gact.enable()


def started(cell: Cell) -> Job:
    return ROWS[cell.row](cell, adamw)


def untouched(cell: Cell) -> tuple[Trace, list[int]]:
    """The first steps without gact_dist, and the collectives of the last."""
    job = started(cell)
    try:
        torch.manual_seed(7 + job.data_rank())
        return steps(job, 0, STEPS_OFF), steps(job, STEPS_OFF, STEPS_ON + 1).collectives[-1:]
    finally:
        job.close()


def off_on_off(cell: Cell, by: str) -> Found:
    """On this rank."""
    expected, last = untouched(cell)
    job = started(cell)
    try:
        gact = job.attach(ADAPTIVE)
        torch.manual_seed(7 + job.data_rank())
        switch_off(gact, by)
        off = steps(job, 0, STEPS_OFF)
        switch_on(gact)
        steps(job, STEPS_OFF, STEPS_ON)
        rows, plan = len(gact.report().rows), gact.plan
        switch_off(gact, by)
        again = steps(job, STEPS_OFF + STEPS_ON, 1)
        rows_while_off = len(gact.report().rows)
        gact.detach()
    finally:
        os.environ.pop(DISABLE, None)
        job.close()
    collectives = [*expected.collectives, *last], [*off.collectives, *again.collectives]
    return Found(differences(expected, off), collectives, rows, plan, rows_while_off)


def cell_of(row: str) -> Cell:
    """Each checkpoint with some rows."""
    cell = Cell(row, CHECKPOINTS[list(ROWS).index(row) % len(CHECKPOINTS)], "fp32", "eager")
    return Cell(row, "none", "fp32", "eager") if cell in REFUSALS else cell


@pytest.mark.parametrize(
    ("row", "by"), [(row, ("disable()", "environment")[number % 2]) for number, row in enumerate(ROWS)]
)
def test_a_job_of_ranks_that_is_switched_off_is_the_untouched_one(ranks, row, by):
    found = ranks(off_on_off, cell_of(row), by, world_size=ROWS[row].world_size)
    for rank in found:
        expected, while_off = rank.collectives
        assert rank.different == []
        assert while_off == expected
        assert rank.rows > 0 == rank.rows_while_off
        assert rank.plan
    if ROWS[row] is not ROWS["PP"]:  # each stage has a plan of its own
        assert all(rank.plan == found[0].plan for rank in found)
