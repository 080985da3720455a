"""The peak of a sharded job's steps on each rank, by torch's allocator: [Note: bound] in test_peak_of_adaptation.py
holds there too, with all that is gathered counted in."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from live_storages import allocated_peaks, saved_bytes
from modes import ROWS, Cell, adamw, loss_of
from small_models import TinyGPT
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter
from gact_dist.sensitivity import one_pass, sections

WIDTH, LAYERS, EXAMPLES, LENGTH, MOST_STEPS, LATER = 64, 5, 8, 128, 12, 2


def model() -> nn.Module:
    return TinyGPT(37, width=WIDTH, layers=LAYERS)


def exact_bytes_of_a_block(examples: int) -> int:
    """What one of the blocks saves of so many, each storage once."""
    block = model().blocks[0]
    return saved_bytes(block, lambda: block(torch.randn(examples, LENGTH, WIDTH, requires_grad=True)))


def peaks(row: str, follows: bool) -> tuple[int, int, int, int]:
    """(of untouched steps, of the compressed ones that adapt or compare, of those after them, exact bytes of a block of
    the examples that are measured at once)"""
    fractions = []

    def measured(*args: Any, fraction: float, **options: Any) -> Any:
        fractions.append(fraction)
        return one_pass.measure(*args, fraction=fraction, **options)

    job = type("Deep", (ROWS[row],), {"build": lambda _: model()})(Cell(row, "none", "fp32", "eager"), adamw)
    tokens = torch.randint(0, 37, (EXAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(job.data_rank()))
    batch = tokens[:, :-1], tokens[:, 1:]

    def loss_fn(batch: Any) -> torch.Tensor:
        return loss_of(job.model(batch[0]), batch[1])

    def untouched() -> None:
        job.backward(loss_fn(batch))
        job.update()

    untouched()  # the optimizer has its state from here on
    owners = job.model, job.optimizer
    before = max(allocated_peaks(untouched, 2, *owners))
    gact = gact_dist.attach(job.model, config=Config(bits=4, min_numel=0), process_group=job.process_group)
    if follows:
        gact.follow()
    later: list[bool] = []

    def compressed() -> None:
        if sum(later) == LATER:
            return
        adapted = len(gact.history) > 0
        if follows:
            loss = loss_fn(batch)
        else:
            with gact.step(loss_fn, batch):
                loss = loss_fn(batch)
        job.backward(loss)
        del loss
        job.update()
        later.append(adapted)

    with (
        patch.object(sections, "LEAST_BYTES", 1 << 16),  # for blocks as small as these
        patch.object(adapter, "measure", measured),
    ):
        found = allocated_peaks(compressed, MOST_STEPS, *owners)[: len(later)]
    assert sum(later) == LATER
    assert max(fractions) <= 0.5
    largest = exact_bytes_of_a_block(int(EXAMPLES * max(fractions)))
    gact.detach()
    job.close()
    return before, max(found[:-LATER]), max(found[-LATER:]), largest


@pytest.mark.parametrize(
    ("row", "follows"),
    [
        ("FSDP2", True),
        pytest.param("FSDP2", False, marks=pytest.mark.large),
        ("ZeRO-3", True),
        pytest.param("FSDP1", True, marks=pytest.mark.large),
    ],
)
def test_a_step_that_adapts_holds_five_times_a_block_more(ranks, row, follows):
    for untouched, adapting, later, largest in ranks(peaks, row, follows):
        assert later < untouched
        assert adapting <= later + 5 * largest
        assert adapting < untouched
