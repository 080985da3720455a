"""Schedules of torch.distributed.pipelining, with one stage and with two on a rank, and beside data parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from exact_codecs import store_exactly
from modes import VOCABULARY, batch_of, loss_of, mesh_of
from ranks import count_collectives
from small_models import TinyGPT
from torch import Tensor, nn

import gact_dist
from gact_dist import Config

STEPS, MICROBATCHES = 4, 4
EXACT = Config(policy="exact")
ADAPTING = Config(bits=4, adapt_interval=1, adapt_tolerance=0, calibration_samples=2, min_numel=16, watch_interval=0)
# Of an adaptation under follow(): whether every replica has run a backward, whether any failed, names, statistics, the
# plan; of the comparison, whether any failed, what each saw, names, errors. It is due at the first forward of every
# optimizer step, and at every forward until an optimizer step was seen. The very first forward is compared as well.
# In the first step the second stage of 1F1B, which has its backward after each forward, adapts at three of four; the
# first stage has two forwards before one backward, and asks in vain.
COMPARISON = 4
ADAPTATION, QUESTION = 6 + COMPARISON, 1
COLLECTIVES_MORE = {
    0: [COMPARISON + 3 * QUESTION] + [ADAPTATION] * (STEPS - 1),
    1: [COMPARISON + 3 * ADAPTATION] + [ADAPTATION] * (STEPS - 1),
}


class Stage(TinyGPT):
    """One of several equal parts of a TinyGPT: the first embeds tokens, the last gives logits."""

    def __init__(self, number: int, stages: int, layers: int) -> None:
        super().__init__(VOCABULARY, width=32, layers=layers, dropout=0.1)
        each = layers // stages
        self.blocks = self.blocks[number * each : (number + 1) * each]
        if number:
            self.embedding = nn.Identity()
        if number < stages - 1:
            self.norm = self.head = nn.Identity()


@dataclass
class Run:
    """What a job left on this rank."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    adapted: list[bool] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    codecs: set[str] = field(default_factory=set)


def train(kind: str, each: int, replicas: int, config: Config | None, exactly: bool = False) -> Run:
    """A job with `each` stages on a rank; exactly: tensors are kept as they are, whatever the plan says."""
    mesh = mesh_of((replicas, 2), ("dp", "pp"))
    pipeline, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    stages, modules, controllers = 2 * each, [], []
    for number in range(pipeline, stages, 2):
        torch.manual_seed(0)
        module: nn.Module = Stage(number, stages, layers=stages)
        if replicas > 1:
            module = nn.parallel.DistributedDataParallel(module, process_group=mesh["dp"].get_group())
        modules.append(module)
        if config is not None:
            controllers.append(gact_dist.attach(module, config=config, process_group=mesh["dp"]).follow())
            if exactly:
                store_exactly(controllers[-1])
    group, cpu = mesh["pp"].get_group(), torch.device("cpu")
    parts = [
        pipelining.PipelineStage(module, number, stages, cpu, group=group)
        for module, number in zip(modules, range(pipeline, stages, 2), strict=True)
    ]
    schedule = getattr(pipelining, kind)(parts if each > 1 else parts[0], MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], 1e-2)
    torch.manual_seed(7 + dist.get_rank())
    run = Run()
    for step in range(STEPS):
        inputs, targets = batch_of(step, replica)
        before = [gact.adaptation for gact in controllers]
        losses: list[Tensor] = []
        with count_collectives() as count:
            schedule.step(*[inputs.contiguous()] if pipeline == 0 else [], target=targets, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
        run.losses += [loss.item() for loss in losses]
        run.collectives.append(count.total)
        run.adapted.append(any(g.adaptation is not b for g, b in zip(controllers, before, strict=True)))
    run.weights = [parameter.detach().clone() for module in modules for parameter in module.parameters()]
    run.weights.append(torch.get_rng_state())
    for gact in controllers:
        run.plans.append(gact.plan)
        run.codecs |= {row.codec for row in gact.report().rows}
        gact.detach()
    return run


def same(first: Run, second: Run) -> bool:
    weights = zip(first.weights, second.weights, strict=True)
    return first.losses == second.losses and all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("ScheduleGPipe", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
    ],
)
def test_a_schedule_keeps_the_job(ranks, kind, each):
    untouched, exact = ranks(train, kind, each, 1, None), ranks(train, kind, each, 1, EXACT)
    measured, rounded = ranks(train, kind, each, 1, ADAPTING, True), ranks(train, kind, each, 1, ADAPTING)
    for plain, kept, adapting, compressed in zip(untouched, exact, measured, rounded, strict=True):
        assert same(plain, kept)
        assert same(plain, adapting)
        assert any(adapting.adapted)
        # stages hold different tensors: alone in its data-parallel group, a rank adapts by itself
        assert kept.collectives == adapting.collectives == compressed.collectives == plain.collectives
        assert not same(plain, compressed)
        assert "quantised" in compressed.codecs
        assert len(compressed.plans) == each
        assert all(compressed.plans)


def test_stages_have_plans_of_their_own_which_their_replicas_share(ranks):
    kind = "Schedule1F1B"
    untouched, measured, rounded = (
        ranks(train, kind, 1, 2, *options, world_size=4) for options in ((None,), (ADAPTING, True), (ADAPTING,))
    )
    for rank, (plain, adapting) in enumerate(zip(untouched, measured, strict=True)):
        assert same(plain, adapting)
        assert all(adapting.adapted[1:])
        more = [after - before for before, after in zip(plain.collectives, adapting.collectives, strict=True)]
        assert more == COLLECTIVES_MORE[rank % 2]
    first, second, first_replica, second_replica = rounded
    assert first.plans == first_replica.plans
    assert second.plans == second_replica.plans
    assert first.plans[0].keys() != second.plans[0].keys()
    for stage, replica in ((first, first_replica), (second, second_replica)):
        assert all(torch.equal(a, b) for a, b in zip(stage.weights[:-1], replica.weights[:-1], strict=True))
