"""Checkpoints under wrappers on two ranks, beyond the table of modes: FSDP1's own wrapper, a mixture of experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from modes import ROWS, Cell, adamw, batch_of
from small_models import Block, Mixture
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config

EXACT, ROUNDED = Config(policy="exact"), Config(policy="uniform", bits=4, min_numel=16)
ANY_MODE = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def wrapped(row: str, config: Config | None, reentrant: bool) -> tuple[dict[str, Tensor], list[str]]:
    """FSDP1 around blocks in FSDP's checkpoint wrapper: weights after three steps, names of rounded block inputs."""
    job = ROWS[row](Cell(row, "none", "fp32", "eager"), adamw)
    mode = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=mode)
    apply_activation_checkpointing(job.model, wrapper, lambda module: isinstance(module, Block))
    gact = None if config is None else job.attach(config)
    torch.manual_seed(7 + dist.get_rank())
    for step in range(3):
        job.forward_backward(*batch_of(step, dist.get_rank()))
        job.update()
    rows = () if gact is None else gact.report().rows
    names = [row.name.split("@")[0] for row in rows if "BlockInput@" in row.name and row.codec == "quantised"]
    if gact is not None:
        gact.detach()
    weights = job.weights()
    job.close()
    return weights, names


@pytest.mark.parametrize("row", ["FSDP1", "FSDP1 use_orig_params"])
@ANY_MODE
def test_the_checkpoint_wrapper_inside_fsdp1(ranks, row, reentrant):
    untouched, exact, rounded = (ranks(wrapped, row, config, reentrant) for config in (None, EXACT, ROUNDED))
    for (before, _), (after, _), (changed, inputs) in zip(untouched, exact, rounded, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not all(torch.equal(before[name], changed[name]) for name in before)
        assert inputs == ["blocks.0:BlockInput", "blocks.1:BlockInput"]


def routed(reentrant: bool) -> tuple[list[str], dict[str, int | None]]:
    """Codecs of block inputs after four steps of a mixture whose experts are seen by every rank's own tokens."""
    model = DistributedDataParallel(Mixture(reentrant))
    gact = gact_dist.attach(model, config=Config(bits=2, min_numel=16, adapt_interval=1)).follow()
    torch.manual_seed(7 + dist.get_rank())
    for _ in range(4):
        model(torch.randn(256, 64)).square().mean().backward()  # raises where recomputation routes otherwise
    gact.detach()
    return [row.codec for row in gact.report().rows if "BlockInput@" in row.name], gact.plan


@ANY_MODE
def test_inputs_of_a_routing_block_stay_exact_on_every_rank(ranks, reentrant):
    (first, plan), (second, same_plan) = ranks(routed, reentrant)
    assert first == second == ["exact", "quantised"]
    assert plan == same_plan
    assert any(bits is not None for bits in plan.values())
