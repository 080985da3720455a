"""Sensitivities under tensor parallelism, measured in one pass, beside those of the model that is not split."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from messages import Messages
from modes import ROWS, Cell, adamw, batch_of, loss_of, mesh_of
from small_models import TinyGPT
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import gact_dist
from gact_dist import Config
from gact_dist.distributed import fingerprint, ranks_sharing, whole_value
from gact_dist.sensitivity import rounded_moments
from gact_dist.sensitivity.compiled_match import EagerTensors, Saved

SAMPLES, LENGTH = 8, 64  # on each of two ranks whole groups of tokens, so that they round as in the whole


def calibrated(
    model: nn.Module, loss: Any, batch: Any, group: Any = None, estimator: str = "one-pass"
) -> tuple[dict[str, float], list[str]]:
    """Sensitivities, and what was logged while they were measured; of tensors that are all stored: what is gathered
    in a parallel model cannot be derived."""
    config = Config(min_numel=16, estimator=estimator, derive=False)
    with Messages(logging.DEBUG) as messages:
        gact = gact_dist.attach(model, config=config, process_group=group)
        gact.calibrate(loss, batch, samples=SAMPLES)
        found = dict(gact._schedule.sensitivity)
        gact.detach()
    return found, messages.texts


def of_row(
    row: str | None, estimator: str = "one-pass", execution: str = "eager"
) -> tuple[dict[str, float], list[str]]:
    """Of the small GPT under the wrappers of a row of the table of modes, or of itself."""
    if row is None:
        torch.manual_seed(0)
        job, model, group, rank = None, TinyGPT(37), None, dist.get_rank()
    else:
        job = ROWS[row](Cell(row, "none", "fp32", execution), adamw)
        model, group, rank = job.model, job.process_group, job.data_rank()
    model.eval()  # no dropout: another forward draws other masks
    found = calibrated(model, lambda batch: loss_of(model(batch[0]), batch[1]), batch_of(0, rank), group, estimator)
    if job is not None:
        job.close()
    return found


def in_place(name: str) -> str:
    """A name without the operator, which is DTensor's where the model is split."""
    path, operator = name.split(":")
    return f"{path}@{operator.split('@')[1]}" if "@" in operator else path


def assert_alike(split: dict[str, float], whole: dict[str, float], rel: float) -> None:
    assert [in_place(name) for name in split] == [in_place(name) for name in whole]
    for (name, one), other in zip(split.items(), whole.values(), strict=True):
        assert one == pytest.approx(other, rel=rel), name


@pytest.mark.parametrize(("row", "world_size"), [("TP", 2), ("FSDP2 + TP", 4)])
def test_sensitivities_are_those_of_the_model_that_is_not_split(ranks, row, world_size):
    """All of them, of parts and of copies, from one pass."""
    data_parallel = world_size // 2
    whole, _ = ranks(of_row, None, world_size=data_parallel)[0]
    found = ranks(of_row, row, world_size=world_size)
    assert all(split == found[0][0] for split, _ in found)
    assert not any("perturbation" in text for _, texts in found for text in texts)
    assert_alike(found[0][0], whole, rel=0.02)


def test_perturbation_counts_a_split_model_as_a_whole(ranks):
    whole, _ = ranks(of_row, None, "perturbation", world_size=1)[0]
    for split, _ in ranks(of_row, "TP", "perturbation"):
        assert_alike(split, whole, rel=0.15)  # parts are rounded otherwise than the whole


def where_one_rank_finds_more() -> dict[str, float]:
    """Of compiled blocks, where one of the ranks that split them takes one tensor more for measured elsewhere."""
    partners = EagerTensors.partners

    def more(self: EagerTensors, saved: Sequence[Saved]) -> dict[str, str]:
        found = partners(self, saved)
        if dist.get_rank() % 2:
            name = next(item.name for item in saved if item.compressible and item.name not in found)
            found[name] = name
        return found

    with patch.object(EagerTensors, "partners", more):
        return of_row("FSDP2 + TP", execution="compile")[0]


@pytest.mark.large
def test_ranks_that_split_compiled_blocks_run_them_as_often(ranks):
    """Each run waits for the other ranks."""
    first, *others = ranks(where_one_rank_finds_more, world_size=4, timeout_s=120)
    assert all(found == first for found in others)
    assert len(first) == 22
    assert all(value > 0.0 for value in first.values())


class MLP(nn.Module):
    """[samples, length, 64] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Half(torch.autograd.Function):
    """Half of a tensor; its backward has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


class OpaqueMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Half.apply(nn.functional.gelu(self.up(self.norm(x)))))


class LopsidedMLP(MLP):
    """Nothing depends on the second half of what is between its layers, which a rank of its own holds."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        columns = torch.arange(hidden.shape[-1]) + hidden.shape[-1] * dist.get_rank() * (hidden.shape[-1] < 256)
        return x + self.down((columns < 128) * hidden * hidden)


def plan_of(kind: str) -> dict[str, Any]:
    part = Shard(1)
    if kind == "tensors":
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    local = kind == "sequences"
    return {
        "norm": SequenceParallel(use_local_output=local),
        "up": ColwiseParallel(input_layouts=part, use_local_output=local),
        "down": RowwiseParallel(output_layouts=part, use_local_output=local),
    }


def of_stack(kind: str | None, block: type[MLP] = MLP, blocks: int = 2) -> tuple[dict[str, float], list[str]]:
    """Of blocks after another linear layer, whose outputs cross their borders whole, as parts or as DTensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(blocks))) if blocks > 1 else block()
    x, group = torch.randn(SAMPLES, LENGTH, 64), None
    if kind is not None:
        mesh = mesh_of((1, 2), ("dp", "tp"))
        group = mesh["dp"]
        for module in model if blocks > 1 else [model]:
            parallelize_module(module, mesh["tp"], plan_of(kind))
        if kind != "tensors":
            x = x.chunk(2, 1)[dist.get_rank()].contiguous()
        if kind == "DTensors":
            x = DTensor.from_local(x, mesh["tp"], [Shard(1)])

    def loss(x: Tensor) -> Tensor:
        mean = model(x).square().mean()
        if kind == "DTensors":
            return mean.full_tensor()
        return 0.5 * mean if kind == "sequences" else mean  # the sum over ranks is the loss of the whole

    return calibrated(model, loss, x, group)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("kind", ["tensors", "sequences", "DTensors"])
def test_what_crosses_blocks_may_be_whole_or_a_part_or_a_dtensor(ranks, kind, blocks):
    whole, _ = ranks(of_stack, None, MLP, blocks, world_size=1)[0]
    found = ranks(of_stack, kind, MLP, blocks)
    assert not any("perturbation" in text for _, texts in found for text in texts)
    for split, _ in found:
        # the model's input has no graph and is perturbed
        assert_alike(dict(list(split.items())[1:]), dict(list(whole.items())[1:]), rel=0.05)


@pytest.mark.parametrize("kind", ["tensors", "sequences", "DTensors"])
def test_all_ranks_perturb_what_cannot_be_differentiated(ranks, kind):
    whole, _ = ranks(of_stack, None, OpaqueMLP, world_size=1)[0]
    found = ranks(of_stack, kind, OpaqueMLP)
    assert found[0][0] == found[1][0]
    assert all(any("its block saves is measured by perturbation" in text for text in texts) for _, texts in found)
    # one perturbation of the small numbers of a norm has a large error
    split, whole = ({n: value for n, value in of.items() if "norm" not in n} for of in (found[0][0], whole))
    assert_alike(split, whole, rel=0.15)


def test_ranks_go_on_together_where_only_one_holds_what_matters(ranks):
    """A tensor whose products are all zero is perturbed, which takes collectives: by all ranks or by none."""
    whole, _ = ranks(of_stack, None, LopsidedMLP, world_size=1)[0]
    found = ranks(of_stack, "tensors", LopsidedMLP)
    assert found[0][0] == found[1][0]
    split = {in_place(name): value for name, value in found[0][0].items()}
    for name, value in whole.items():
        if in_place(name) in split and "norm" not in name:
            assert split[in_place(name)] == pytest.approx(value, rel=0.05), name


def moments_of(kind: str | None) -> tuple[float, float]:
    """Variance and square of the gradient of two blocks, measured as policy acgc does."""
    torch.manual_seed(0)
    model, group = nn.Sequential(MLP(), MLP()), None
    if kind is not None:
        mesh = mesh_of((1, 2), ("dp", "tp"))
        group = mesh["dp"]
        for module in model:
            parallelize_module(module, mesh["tp"], plan_of(kind))
    x = torch.randn(SAMPLES, LENGTH, 64)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=3, min_numel=16), process_group=group)
    moments = rounded_moments(gact._schedule.hooks, model, lambda: model(x).square().mean(), passes=8, draw=0)
    gact.detach()
    return moments.noise, moments.square


def test_the_moments_of_a_split_model_are_those_of_the_whole(ranks):
    noise, square = ranks(moments_of, None, world_size=1)[0]
    found = ranks(moments_of, "tensors")
    assert found[0] == found[1]
    assert found[0] == (pytest.approx(noise, rel=0.15), pytest.approx(square, rel=0.01))


def shared() -> tuple[dict[str, int], float, float]:
    mesh = mesh_of((1, 2), ("dp", "tp"))["tp"]
    same = torch.randn(100)
    own = torch.randn(100, generator=torch.Generator().manual_seed(dist.get_rank()))
    noisy = same * (1 + 1e-6 * own)
    prints = {name: fingerprint(x) for name, x in {"same": same, "own": own, "noisy": noisy}.items()}
    part = DTensor.from_local(torch.full((2,), 1.0 + dist.get_rank()), mesh, [Shard(0)])
    copy = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    return ranks_sharing(prints, [mesh.get_group()]), whole_value(part.sum()), whole_value(copy.sum())


def test_copies_are_told_from_parts_by_their_values(ranks):
    for parts, of_parts, of_copies in ranks(shared):
        assert parts == {"same": 1, "own": 2, "noisy": 1}
        assert (of_parts, of_copies) == (6.0, 2.0)
