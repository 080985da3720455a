"""Comparisons with the exact gradient on two ranks: a fault on one counts on both, and both store the same exactly."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import wrapped
from messages import Messages
from ranks import count_collectives
from scarce_memory import Scarce
from unsafe_operators import divides, loss_of, stack

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import verification

CULPRIT = "layers.1:Mul@divides+2"
STEPS = 3


def trained(wrapper: str, level: str, steep_on: int | None, infinite_on: int | None, fitting: int | None, follow: bool):
    """(names stored exactly, history, losses, collectives of each step, warnings) of a rank of a job whose operator is
    steep, or whose loss is infinite, on one rank."""
    rank = dist.get_rank()
    model, (x, target) = stack(None, seed=0)
    steepness = 12.0 if steep_on in (rank, None) else 0.01
    model.layers[1].operator = partial(divides, steepness=steepness)
    torch.manual_seed(rank)
    batch = (torch.randn_like(x), target)
    model = wrapped.WRAPPERS[wrapper](model, model.layers)
    gact = gact_dist.attach(model, config=Config.from_level(level, min_numel=64))
    if fitting is not None and rank == 0:
        Scarce(model, gact, fitting)
    if follow:
        gact.follow()
    plain = loss_of(model)
    loss_fn = (lambda given: plain(given) * math.inf) if infinite_on == rank else plain
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, collectives = [], []
    with Messages() as heard:
        for _ in range(STEPS):
            with count_collectives() as count:
                if follow:
                    loss = plain(batch)
                else:
                    with gact.step(loss_fn, batch):
                        loss = plain(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            collectives.append(count.total)
    exact = sorted(name for name, bits in gact.plan.items() if bits is None)
    return exact, gact.history, losses, collectives, heard.texts


def found(first: tuple, second: tuple) -> bool:
    """Whether the operator's divisor was found by both ranks, with as many collectives and the same entries; the first
    says so."""
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[3] == second[3]
    told = [
        any("stored exactly from now on" in text and CULPRIT in text for text in rank[4]) for rank in (first, second)
    ]
    assert told == [CULPRIT in first[0], False]
    assert any(CULPRIT in entry["stored_exactly"] for entry in first[1]) == told[0]
    return told[0]


@pytest.mark.parametrize("level", ["L1", "L2"])
@pytest.mark.parametrize("wrapper", wrapped.WRAPPERS)
def test_a_fault_on_one_rank_is_stored_exactly_on_both(ranks, wrapper, level):
    both = ranks(trained, wrapper, level, 1, None, None, False)
    assert found(*both)
    assert all(math.isfinite(loss) for _, _, losses, *_ in both for loss in losses)


@pytest.mark.parametrize(("wrapper", "level"), [("DDP", "L1"), ("DDP", "L2"), ("FSDP1", "L2"), ("FSDP2", "L1")])
def test_under_follow_before_the_first_step(ranks, wrapper, level):
    both = ranks(trained, wrapper, level, 0, None, None, True)
    assert found(*both)
    assert both[0][1][0]["step"] == 1
    assert all(math.isfinite(loss) for _, _, losses, *_ in both for loss in losses)


def test_without_a_fault_on_any_rank_nothing_is_found(ranks):
    assert not found(*ranks(trained, "DDP", "L1", 2, None, None, False))


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_a_rank_whose_exact_gradient_is_not_finite_judges_nothing_and_the_other_judges_for_both(ranks, level):
    assert found(*ranks(trained, "DDP", level, 1, 0, None, False))
    assert not found(*ranks(trained, "DDP", level, 0, 0, None, False))


@pytest.mark.parametrize("fitting", [4, 0])
def test_a_rank_without_memory_makes_both_compare_fewer_examples_or_leaves_it_to_the_other(ranks, fitting):
    first, second = ranks(trained, "DDP", "L1", 1, None, fitting, False)
    assert found(first, second)
    assert any("out of memory while comparing" in text for text in first[4])
    assert not any("out of memory" in text for text in second[4])


def with_a_slow_clock(slow_on: int | None, level: str):
    """trained(), where an hour goes by at each look at the clock of one rank."""
    if slow_on == dist.get_rank():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "perf_counter", itertools.count(step=3600.0).__next__)
            return trained("DDP", level, 1, None, None, False)
    return trained("DDP", level, 1, None, None, False)


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_a_search_that_takes_too_long_on_one_rank_ends_on_both(ranks, level):
    late, usual = (ranks(with_a_slow_clock, slow_on, level) for slow_on in (0, None))
    assert found(*usual)
    assert late[0][:2] == late[1][:2]  # names and histories
    assert late[0][3] == late[1][3]  # collectives
    assert set(late[0][0]) > set(usual[0][0])
    assert any("the search has taken as long as it may" in text for text in late[0][4])
