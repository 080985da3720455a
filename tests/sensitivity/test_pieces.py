"""The exact gradient through a large block in pieces: that of the whole, with less of what is saved at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_storages import allocated_peaks
from test_comparison import comparison, of_whole_gradients
from test_second_moment import JOBS, Measured
from torch import Tensor, nn

from gact_dist import Config
from gact_dist.hooks import Noted, SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import Comparison, compared, pieces

UNDIVIDED = {"mlp", "mixture", "mixture reentrantly"}
"""jobs without a block that saves several tensors itself"""

AT_ONCE = {"selective checkpoints in blocks"}
"""jobs with a block of which all that its nodes hold is in one checkpoint, which is open as a whole"""


@pytest.fixture
def runs(monkeypatch):
    """Of each block that is taken in pieces: the numbers of the nodes at which its backwards ended, the last at 0."""
    found: list[list[int]] = []
    monkeypatch.setattr(pieces, "LEAST_BYTES", 0)
    monkeypatch.setattr(pieces, "LARGEST", 0.02)
    down_to, to_the_end = pieces.Pieces._down_to, pieces.Pieces._to_the_end
    gradients = pieces.Pieces.gradients

    def one_more(self: Any, entering: Any) -> Any:
        found.append([])
        return gradients(self, entering)

    def noted(self: Any, start: int, *rest: Any) -> None:
        found[-1].append(start)
        down_to(self, start, *rest)

    def ended(self: Any, *arguments: Any) -> Any:
        found[-1].append(0)
        return to_the_end(self, *arguments)

    monkeypatch.setattr(pieces.Pieces, "gradients", one_more)
    monkeypatch.setattr(pieces.Pieces, "_down_to", noted)
    monkeypatch.setattr(pieces.Pieces, "_to_the_end", ended)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_the_gradient_in_pieces_is_that_of_the_whole(name, runs, caplog):
    job = Measured(JOBS[name], 4)
    with caplog.at_level(logging.DEBUG, "gact_dist"):
        found = comparison(job)
    error, square = of_whole_gradients(job, job.hooks.plan)
    assert found.error == pytest.approx(error, rel=1e-3)
    assert found.square == pytest.approx(square, rel=1e-5)
    assert not caplog.records
    assert bool(runs) == (name not in UNDIVIDED)
    assert all(len(run) > 1 for run in runs) or name in AT_ONCE
    assert all(run[-1] == 0 and sorted(run, reverse=True) == run for run in runs)


@pytest.mark.parametrize("name", ["gpt", "cnn", "frame"])
def test_with_nothing_rounded_pieces_change_the_order_of_sums_alone(name, runs):
    found = comparison(Measured(JOBS[name], 4), Plan())
    assert runs
    assert found.error <= 1e-12 * found.square  # float32: 6e-8 of a gradient, squared, with room for what adds up


class Products(nn.Module):
    """A block of which each operator saves something of its own; beside it the model saves next to nothing."""

    def __init__(self, inside: Callable[[Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(256, 256), nn.Linear(256, 1)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.linear(x)
        for number in range(16):
            x = torch.sin(x) + 0.1 * first
            if self.inside is not None:
                x = self.inside(x, number)
        return self.last(x)


def of_one_block(inside: Callable[[Tensor, int], Tensor] | None = None, fraction: float = 1.0) -> Comparison:
    torch.manual_seed(0)
    model = nn.Sequential(Products(inside), nn.Sequential(nn.Linear(1, 1)))
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16, blocks=("0",)), 0)
    x = torch.randn(2048, 256)
    return compared(hooks, model, lambda: model(x).square().mean(), Plan(default=4), draw=1, fraction=fraction)


def test_less_of_what_a_block_saves_is_there_at_a_time(monkeypatch):
    in_pieces = allocated_peaks(of_one_block, 1)[0]
    monkeypatch.setattr(pieces, "LARGEST", 1.0)
    whole = allocated_peaks(of_one_block, 1)[0]
    # of seventeen tensors a quarter is there, beside those that the forward works with once a piece is kept
    one = 2048 * 256 * 4
    assert in_pieces <= whole - (0.75 * 17 - 5) * one


def test_a_block_that_saves_something_else_when_it_runs_again_is_compared_as_a_whole(caplog):
    runs = []

    def inside(x: Tensor, number: int) -> Tensor:
        if number == 0:
            runs.append(None)
        return x * 1.0 if len(runs) == 3 and number == 8 else x  # in the second of its runs in pieces: one more node

    with caplog.at_level(logging.DEBUG, "gact_dist"):
        found = of_one_block(inside)
    assert [record.getMessage() for record in caplog.records] == [
        "it made another graph when it ran again: comparing a block as a whole"
    ]
    assert len(runs) == 5
    whole = of_one_block(lambda x, _: x)
    assert (found.error, found.square) == (pytest.approx(whole.error, rel=1e-3), pytest.approx(whole.square, rel=1e-5))


class Passing(nn.Module):
    """A block whose backward would go through its first nodes, on the way from one edge to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.seen = nn.Linear(64, 64), nn.Linear(64, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.tanh(self.linear(x))
        for _ in range(8):
            x = x + torch.sin(x) * first
        return self.last(x)


def test_a_backward_ends_where_a_piece_does(runs, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(Passing(), nn.Sequential(nn.Linear(1, 1))), torch.randn(32, 64)
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16, blocks=("0",)), 0)
    reads = []
    restore = Noted.restore
    monkeypatch.setattr(Noted, "restore", lambda self: reads.append(self.name) or restore(self))
    found = compared(hooks, model, lambda: model(x).square().mean(), Plan(), draw=1)
    assert max(map(len, runs)) > 8
    assert not reads
    assert found.error <= 1e-12 * found.square


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_no_block_is_divided_whose_runs_other_ranks_share(norm, runs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), norm(8), nn.Tanh()), nn.Sequential(nn.Linear(8, 1)))
    x = torch.randn(16, 8)
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16, blocks=("0",)), 0)
    model[0][1].eval()  # on a CPU torch has no other
    compared(hooks, model, lambda: model(x).square().mean(), Plan(default=4), draw=1)
    assert bool(runs) == (norm is nn.BatchNorm1d)


def test_a_part_of_the_batch_that_is_small_enough_is_taken_as_a_whole(monkeypatch):
    monkeypatch.setattr("gact_dist.sensitivity.rounded_walk.Pieces", None)
    assert of_one_block(fraction=0.25).error > 0.0
    with pytest.raises(TypeError):
        of_one_block()
