"""The batch is held by the job's loop: it is neither stored again nor counted, and backward reads it as it is."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from small_models import mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config

ROWS, WIDTH = 64, 48
UNIFORM = Config(policy="uniform", bits=2, min_numel=16)
ADAPTIVE = Config(policy="gact", bits=4, min_numel=16, adapt_interval=2)


@dataclass
class Batch:
    x: Tensor
    target: Tensor


class Layers(nn.Module):
    """Takes its input as a tensor, by keyword, in a dict or in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x=None, batch=None) -> Tensor:
        if isinstance(batch, Batch):
            x = batch.x
        elif batch is not None:
            x = batch["x"]
        return self.last(F.gelu(self.first(x.flatten(1)))).square()


WAYS = {
    "tensor": lambda model, x: model(x),
    "keyword": lambda model, x: model(x=x),
    "dict": lambda model, x: model(batch={"x": x}),
    "dataclass": lambda model, x: model(batch=Batch(x, x)),
    "a view": lambda model, x: model(x.view(ROWS, 2, -1)),
    "examples": lambda model, x: model(x[: ROWS // 2]),
}
ANY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def job(seed: int = 0) -> tuple[Layers, Tensor]:
    torch.manual_seed(seed)
    return Layers(), torch.randn(ROWS, WIDTH)


def names(gact: gact_dist.Controller) -> list[str]:
    return [row.name for row in gact.report().rows]


@ANY_WAY
@pytest.mark.parametrize("follows", [True, False], ids=["follow", "step"])
@pytest.mark.parametrize("config", [UNIFORM, ADAPTIVE], ids=["uniform", "adaptive"])
def test_the_batch_has_no_row_and_no_bits(way, follows, config):
    model, x = job()
    gact = gact_dist.attach(model, config=config)
    if follows:
        gact.follow()
    for _ in range(4):
        if follows:
            way(model, x).mean().backward()
            continue
        with gact.step(lambda given: way(model, given).mean(), x):
            loss = way(model, x).mean()
        loss.backward()
        del loss
    assert not any("Input" in name for name in names(gact))
    assert {row.codec for row in gact.report().rows} <= {"quantised", "derived"}
    assert not any("Input" in name for name in gact.plan)
    rows = ROWS // 2 if way is WAYS["examples"] else ROWS
    assert gact.report().exact_bytes == 4 * rows * (2 * 32 + WIDTH)  # of two layers, and the output for its square


@pytest.mark.large
@pytest.mark.parametrize("follows", [True, False], ids=["follow", "step"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "one layer"])
def test_what_is_compiled_reads_the_batch_as_it_is(whole, follows):
    """Where the model itself is compiled its arguments are not known, but the batch that step() is given is."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(ROWS, WIDTH)
    (exact,) = torch.autograd.grad(model(x).square().mean(), model[0].weight)
    (model if whole else model[0]).compile(backend="aot_eager")
    gact = gact_dist.attach(model, config=ADAPTIVE)
    if follows:
        gact.follow()
    for _ in range(4):
        model.zero_grad()
        if follows:
            model(x).square().mean().backward()
            continue
        with gact.step(lambda given: model(given).square().mean(), x):
            loss = model(x).square().mean()
        loss.backward()
    is_stored = any(row.shape == tuple(x.shape) for row in gact.report().rows)
    assert is_stored == (whole and follows)
    assert (model[0].weight.grad - exact).norm() < 0.2 * exact.norm()


def test_backward_reads_the_batch_unrounded():
    model, x = nn.Linear(WIDTH, 8), torch.randn(ROWS, WIDTH)
    (exact,) = torch.autograd.grad(model(x).sum(), model.weight)
    gact_dist.attach(model, config=UNIFORM).follow()
    for _ in range(2):
        (found,) = torch.autograd.grad(model(x).sum(), model.weight)
        assert torch.equal(found, exact)


@pytest.mark.parametrize("config", [UNIFORM, ADAPTIVE], ids=["uniform", "adaptive"])
def test_targets_of_a_loss_are_part_of_the_batch_that_step_is_given(config):
    model, x = job()
    gact, batch = gact_dist.attach(model, config=config), Batch(x, torch.randn(ROWS, WIDTH))

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch.x), batch.target)

    for _ in range(4):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    # two layers, the output for its square, and what mse_loss keeps of the output
    assert gact.report().exact_bytes == 4 * ROWS * (2 * 32 + 2 * WIDTH)
    assert not any("Input" in name for name in [*names(gact), *gact.plan])


def test_an_adaptation_that_is_spread_over_steps_knows_its_copies():
    model, (x, target) = mlp()
    gact = gact_dist.attach(model, config=replace(ADAPTIVE, adapt_interval=20))

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[2])

    for seed in range(12):
        torch.manual_seed(seed)
        batch = torch.randn_like(x), target, torch.randn(len(target), 10)
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    assert gact.plan
    assert set(gact.plan) <= set(names(gact))


@pytest.mark.parametrize("config", [UNIFORM, ADAPTIVE], ids=["uniform", "adaptive"])
def test_an_argument_that_the_loop_does_not_hold_is_stored_from_the_next_step_on(config):
    model, x = job()
    gact = gact_dist.attach(model, config=config).follow()
    found = []
    for _ in range(8):
        model(x.clone()).square().mean().backward()
        found.append([row.codec for row in gact.report().rows if "Input" in row.name])
    assert found[0] == []
    assert found[-1] == ["quantised"]
    resumed = gact_dist.attach(job()[0], config=config).follow()
    resumed.load_state_dict(gact.state_dict())
    resumed._schedule.model(x.clone()).square().mean().backward()
    assert ["Input" in name for name in names(resumed)].count(True) == 1


def test_an_argument_that_is_used_twice_is_not_taken_for_one_that_nobody_holds():
    model, x = job()
    gact = gact_dist.attach(model, config=UNIFORM).follow()
    extra = nn.Linear(WIDTH, 32)
    for _ in range(4):
        (model(x) + extra(x).repeat(1, 2)[:, :WIDTH]).square().mean().backward()
    assert gact._schedule.hooks.given.not_held == set()


def test_a_change_of_the_batch_before_backward_is_an_error_as_without_hooks():
    model, x = job()
    gact_dist.attach(model, config=UNIFORM).follow()
    loss = model(x).square().mean()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_graph_holds_no_more_of_the_batch_than_the_loop():
    model, x = job()
    gact_dist.attach(model, config=UNIFORM).follow()
    loss = model(x).square().mean()
    gone = x.untyped_storage()
    before = torch._C._storage_Use_Count(gone._cdata)
    loss.backward()
    del loss
    gc.collect()
    assert torch._C._storage_Use_Count(gone._cdata) == before - 1  # one alias, in the graph


def test_an_input_that_requires_a_gradient_is_read_unrounded():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, ROWS // 2, WIDTH, requires_grad=True)
    exact = torch.autograd.grad(layer(x).sum(), [layer.weight, x])
    gact = gact_dist.attach(layer, config=UNIFORM)
    for _ in range(2):
        with gact.step():
            loss = layer(x).sum()
        found = torch.autograd.grad(loss, [layer.weight, x])
    assert all(map(torch.equal, found, exact))
    assert names(gact) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_holds_the_batch_counts_nothing(reentrant):
    model, x = job()
    x.requires_grad_(reentrant)
    gact = gact_dist.attach(model, config=UNIFORM)
    for _ in range(2):
        with gact.step(batch=x):
            loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
        loss.backward()
    assert [row.name for row in gact.report().rows if row.shape == tuple(x.shape) and "BlockInput" in row.name] == []


def test_a_norm_of_the_batch_is_made_from_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(ROWS, WIDTH)
    gact = gact_dist.attach(model, config=replace(ADAPTIVE, adapt_interval=100, calibration_samples=ROWS))

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def gradient() -> Tensor:
        with gact.step(batch=x):
            loss = loss_fn(x)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    exact = torch.cat([part.flatten() for part in torch.autograd.grad(loss_fn(x), list(model.parameters()))])
    with gact.step(loss_fn, x):
        loss_fn(x).backward()
    errors = [float((gradient() - exact).square().sum()) for _ in range(48)]
    assert [row.codec for row in gact.report().rows if "LayerNorm" in row.name] == ["derived"]
    # 48 draws of a squared norm with some tens of dimensions leave less than 0.1
    assert sum(errors) / len(errors) == pytest.approx(gact.adaptation.predicted_variance, rel=0.25)
