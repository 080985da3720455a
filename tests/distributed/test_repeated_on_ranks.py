"""Keys and values that are repeated for groups of heads, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import wrapped
from small_models import GroupedBlock, GroupedQueries

import gact_dist
from gact_dist import Config

STEPS = 4
SLICE = 8, GroupedBlock.GROUPS, 24, GroupedBlock.HEAD_WIDTH


def trained(wrapper: str, config: Config) -> tuple[dict, list[str], list[float]]:
    """(plan, codecs of slices of keys and values, losses) of a rank."""
    torch.manual_seed(0)
    model = GroupedQueries()
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(8, 24, GroupedBlock.WIDTH)
    model = wrapped.WRAPPERS[wrapper](model, model.blocks)
    gact = gact_dist.attach(model, config=config)
    losses = wrapped.losses_of(gact, model, lambda batch: model(batch).square().mean(), x, STEPS)
    rows = [] if config.policy == "off" else gact.report().rows
    return gact.plan, [row.codec for row in rows if row.shape == SLICE], losses


@pytest.mark.parametrize("wrapper", wrapped.WRAPPERS)
def test_one_slice_is_stored_on_every_rank(ranks, wrapper):
    untouched = ranks(trained, wrapper, Config(policy="off"))
    exact = ranks(trained, wrapper, Config(policy="exact"))
    adapted = ranks(trained, wrapper, Config(bits=4, min_numel=16))
    assert adapted[0][0] == adapted[1][0]
    for rank in range(2):
        assert exact[rank][1:] == ([], untouched[rank][2])
        _, codecs, losses = adapted[rank]
        assert codecs == 4 * ["quantised"]
        first, last = untouched[rank][2][0], untouched[rank][2][-1]
        assert losses == pytest.approx(untouched[rank][2], abs=0.05 * abs(first - last))
