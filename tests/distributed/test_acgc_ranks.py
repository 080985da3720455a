"""Policy acgc on two ranks: the error is kept under one plan, in sharded models, and by accumulated gradients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import small_models
import torch
import torch.distributed as dist
from gradients import flat_gradient
from modes import batch_of
from test_acgc import ERROR, Digits, acgc
from test_units import LAYERS, started, stripped, whole
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Moments as Drawn
from gact_dist.sensitivity import rounded_moments
from gact_dist.sensitivity.parts import Part

SMALLER, MICRO_BATCHES = 0.01, 4  # an error at which not every width of the mlp is the narrowest


def trained_on_a_rank(follow: bool) -> tuple:
    job = Digits("cnn", rank=dist.get_rank())
    gact, noise, square = job.train(acgc(), follow, ddp=True)
    gact.detach()
    _, _, retained_bytes = job.increase(acgc(), gact.state_dict(), batches=1, draws=1)
    samples = gact._schedule.policy.state_dict()
    return (gact.plan, gact.report().gradient_error, samples), noise, square, retained_bytes, job.uniform_bytes(ERROR)


@pytest.mark.parametrize("follow", [False, True])
def test_two_ranks_keep_the_error_under_one_plan(ranks, follow):
    (known, noise, square, retained_bytes, uniform_bytes), (other, *_) = ranks(trained_on_a_rank, follow)
    assert known == other
    assert known[1].holds
    assert noise <= ERROR * square  # of the gradient averaged over the ranks
    assert retained_bytes <= uniform_bytes


def fsdp1(model: nn.Module) -> nn.Module:
    linears, cpu = ModuleWrapPolicy({nn.Linear}), torch.device("cpu")
    return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True, auto_wrap_policy=linears)


def fsdp2(model: nn.Module) -> nn.Module:
    for linear in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        fully_shard(linear)
    return fully_shard(model)


def gathered(model: nn.Module) -> Tensor:
    """All parameter gradients in one flat tensor, whoever has which part."""
    sharded = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if sharded else nullcontext():
        parts = [parameter.grad for parameter in model.parameters()]
        return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in parts])


def mean_over_ranks(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


@dataclass
class Moments:
    """Squared errors of gradients, and the squares of the exact ones, summed over some steps."""

    noise: float = 0.0
    square: float = 0.0
    count: int = 0

    def add(self, found: Tensor, exact: Tensor) -> None:
        self.noise += float((found - exact).square().sum())
        self.square += float(exact.square().sum())
        self.count += 1


@dataclass
class Trained:
    """What a job knows on this rank, and its gradients under a plan."""

    reduced: Moments = field(default_factory=Moments)
    """as the optimizer gets them"""
    own: Moments = field(default_factory=Moments)
    """of this rank's micro-batches but the last of a step, which is not seen by itself"""
    known: Any = None
    """plan, history and samples"""


def trained(wrap: Callable[[nn.Module], nn.Module], follow: bool, steps: int = 16, micro_batches: int = 1) -> Trained:
    """A wrapped model, trained beside an uncompressed copy that takes the same steps and has the exact gradients."""
    job, result = Digits("mlp", rank=dist.get_rank()), Trained()
    reference = copy.deepcopy(job.model)
    # the units of those that are sharded: numbers depend on where blocks meet, as that is rounded to 8 bits
    blocks = [path for path, module in job.model.named_modules() if isinstance(module, nn.Linear)]
    model = wrap(job.model)
    # and what enters a unit of FSDP2 is not derived, in any step
    gact = gact_dist.attach(model, config=acgc(SMALLER, blocks=blocks, derive=False))
    if follow:
        gact.follow()
    loss_fn, exact_loss_fn = small_models.loss_of(model), small_models.loss_of(reference)
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in (model, reference)]
    for step in range(steps):
        exact = so_far = torch.zeros(())
        under_a_plan = bool(gact.plan)
        optimizers[0].zero_grad()
        for micro_batch in range(micro_batches):
            batch, last = job.batch(step * micro_batches + micro_batch), micro_batch == micro_batches - 1
            alone = flat_gradient(reference, exact_loss_fn(batch))
            exact = exact + alone / micro_batches
            with nullcontext() if last else model.no_sync():
                with nullcontext() if follow else gact.step(loss_fn, batch):
                    loss = loss_fn(batch)
                (loss / micro_batches).backward()
            if under_a_plan and not last:
                before, so_far = so_far, small_models.gradient(model).clone()
                result.own.add((so_far - before) * micro_batches, alone)
        gradient = gathered(model)
        if under_a_plan:
            result.reduced.add(gradient, mean_over_ranks(exact))
        parameters = list(reference.parameters())
        for parameter, part in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)
        for optimizer in optimizers:
            optimizer.step()
    gact.detach()
    result.known = gact.plan, gact.history, gact._schedule.policy.state_dict()
    return result


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP1": fsdp1, "FSDP2": fsdp2}


def trained_in_each(follow: bool) -> dict[str, Trained]:
    return {name: trained(wrap, follow) for name, wrap in WRAPPERS.items()}


@pytest.mark.large
@pytest.mark.parametrize("follow", [False, True])
def test_sharded_models_keep_the_error_and_measure_what_others_do(ranks, follow):
    first, second = ranks(trained_in_each, follow)
    for name, job in first.items():
        assert job.known == second[name].known == first["DDP"].known
        assert 0 < job.reduced.noise <= SMALLER * job.reduced.square
        assert job.reduced.square == pytest.approx(first["DDP"].reduced.square, rel=1e-5)  # sums of float32


def accumulated(follow: bool) -> Trained:
    return trained(DistributedDataParallel, follow, 8, MICRO_BATCHES)


@pytest.mark.parametrize("follow", [False, True])
def test_accumulated_gradients_keep_the_error_with_as_much_to_spare_as_they_have_parts(ranks, follow):
    """[Note: units] in gradient_error.py: each part is rounded by itself, so that their mean has r / A."""
    first, second = ranks(accumulated, follow)
    assert first.known == second.known
    noise, square = (first.own.noise + second.own.noise) / 2, (first.own.square + second.own.square) / 2
    assert 0 < noise <= SMALLER * square
    assert 0 < first.reduced.noise <= SMALLER * first.reduced.square
    parts = 2 * MICRO_BATCHES
    # seven steps and more of squared norms with tens of effective dimensions: a standard deviation below 0.1
    assert first.reduced.noise / first.reduced.count == pytest.approx(noise / first.own.count / parts, rel=0.3)


# -- what is unsharded while a gradient is drawn ------------------------------------------------------------------


def drawn(row: str) -> tuple[Drawn, list[set[str]]]:
    """(the moments of a gradient, which parameters of blocks are whole in each of their backwards)."""
    job, rank = started(row, "fp32"), dist.get_rank()
    hooks = SavedTensorHooks(job.model, Config(policy="uniform", bits=4, min_numel=64), rank)
    inputs, targets = batch_of(0, rank)
    seen: list[set[str]] = []
    gradients = Part.gradients

    def watched(self: Part, *arguments: Any, **options: Any) -> list[Tensor | None]:
        seen.append({name for name in stripped(whole(job.model)) if name.startswith("blocks.")})
        return gradients(self, *arguments, **options)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(job.model(inputs).flatten(0, -2), targets.flatten())

    Part.gradients = watched
    try:
        torch.manual_seed(rank)
        found = rounded_moments(hooks, job.model, loss, passes=2, draw=1)
    finally:
        Part.gradients = gradients
    assert row == "DDP" or not whole(job.model)
    hooks.close()
    job.close()
    return found, seen


def drawn_in_each(rows: Sequence[str]) -> dict[str, tuple[Drawn, list[set[str]]]]:
    return {row: drawn(row) for row in rows}


SHARDED = {2: ["FSDP1", "FSDP1 use_orig_params", "FSDP2", "FSDP2 CPU offload", "ZeRO-3"], 4: ["HSDP"]}


@pytest.mark.parametrize("size", SHARDED)
def test_one_block_at_a_time_is_unsharded_while_a_gradient_is_drawn(ranks, size):
    for found in ranks(drawn_in_each, ["DDP", *SHARDED[size]], world_size=size):
        unsharded, _ = found.pop("DDP")
        for moments, seen in found.values():
            blocks = [{name.split(".")[1] for name in names} for names in seen]
            assert max(map(len, blocks)) == 1
            assert len(set().union(*blocks)) == LAYERS
            # sums of float32 in another order; a value that this moves across a threshold of the rounding weighs more
            assert moments.noise == pytest.approx(unsharded.noise, rel=1e-3)
            assert moments.square == pytest.approx(unsharded.square, rel=1e-4)


class Alternating(nn.Module):
    """A block that does something else every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(64, 64), count()  # a count of the block's own would be set back

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if next(self.calls) % 2 else torch.tanh(x))


def draws_that_fail(way: str) -> list[str]:
    """The warnings of a job that draws gradients, where that fails on all ranks or on one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Alternating(), nn.Linear(64, 8))
    plain = way == "memory"
    if plain:
        model[1] = nn.Linear(64, 64)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    gact = gact_dist.attach(model, config=acgc(min_numel=64))
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gact_dist").addHandler(handler)
    gradients, rank = Part.gradients, dist.get_rank()

    def scarce(self: Part, *arguments: Any, **options: Any) -> list[Tensor | None]:
        if rank == 1:
            raise torch.OutOfMemoryError("too little")
        return gradients(self, *arguments, **options)

    Part.gradients = scarce if plain else gradients
    try:
        adapter, batch = gact._schedule.adapter, torch.randn(16, 64)
        adapter.draw(1, lambda: model(batch).square().mean())
    finally:
        Part.gradients = gradients
        logging.getLogger("gact_dist").removeHandler(handler)
    model(batch).square().mean().backward()  # the job goes on
    return texts


def test_a_draw_that_fails_leaves_the_plan_and_the_job_alone(ranks):
    for found in ranks(draws_that_fail, "alternating"):
        assert found == [
            "the gradient's error could not be measured on this rank (it saved 2 tensors for "
            "backward, 3 the first time): it follows from the other ranks, or the plan stays as it is"
        ]
    assert ranks(draws_that_fail, "memory") == [
        [],
        ["out of memory while measuring the gradient's error on this rank: too little"],
    ]
