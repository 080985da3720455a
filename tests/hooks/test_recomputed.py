"""What a checkpointed block saves while it runs again: compressed, measured and compared like all else."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import TinyGPT, loss_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from unusual_jobs import WIDTH, OwnAttention

import gact_dist
from gact_dist import Config, codec
from gact_dist.adaptation import adapter
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.handles import Stored
from gact_dist.hooks.roles import Role
from gact_dist.hooks.sinks import Captured, Store
from gact_dist.policies.allocation import Allocation
from gact_dist.policies.base import Costs
from gact_dist.policies.gact import Gact

SETTINGS = Config(bits=4, min_numel=16, recomputed=True, noise_limit=0)
DRAWS = 24


class Around(TinyGPT):
    """TinyGPT whose forward checkpoints its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Within(nn.Module):
    """A block that checkpoints what it wraps, as FSDP units do whose checkpoint is inside."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Masked(nn.Module):
    """[batch, width] -> [batch, width]: a relu and a dropout, of which one bit is enough, between two layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 64), nn.Linear(64, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def around() -> tuple[nn.Module, Tensor]:
    return Around(), torch.randint(0, 37, (8, 33))


def within() -> tuple[nn.Module, Tensor]:
    model = TinyGPT()
    model.blocks = nn.ModuleList(Within(block) for block in model.blocks)
    return model, torch.randint(0, 37, (8, 33))


def masked() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 32), Within(Masked()), Within(Masked())), torch.randn(64, 32)


class AttentionAlone(nn.Module):
    """[batch, time, width] -> the same: attention under a checkpoint of its own, whose result a layer outside saves."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = checkpoint(functional.scaled_dot_product_attention, 4 * q, 4 * k, v, use_reentrant=False)
        return x + self.out(attended.transpose(1, 2).flatten(-2))


def attention_alone() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(32, 32), AttentionAlone(), AttentionAlone()), torch.randn(4, 24, 32)


def functions() -> tuple[nn.Module, Tensor]:
    """A custom attention, which keeps what it computes exactly, and its inputs."""
    blocks = (Within(nn.Sequential(nn.LayerNorm(WIDTH), OwnAttention(3.0))) for _ in range(2))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks), torch.randn(4, 24, WIDTH)


MODELS = {
    "around": around,
    "within": within,
    "masks": masked,
    "attention alone": attention_alone,
    "functions": functions,
}
ANY_MODEL = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


class Job:
    """A model, its batch and its gradient."""

    def __init__(self, make, config=SETTINGS):
        torch.manual_seed(0)
        self.model, data = make()
        language = data.dtype == torch.long
        self.batch = (data[:, :-1], data[:, 1:]) if language else (data, None)
        self.loss_fn = loss_of(self.model) if language else lambda batch: self.model(batch[0]).square().mean()
        self.exact = self.gradient()
        self.gact = gact_dist.attach(self.model, config=config)

    def gradient(self) -> Tensor:
        """Of one step with the same random numbers each time."""
        gact = getattr(self, "gact", None)
        torch.manual_seed(1)
        self.model.zero_grad()
        if gact is None:
            loss = self.loss_fn(self.batch)
        else:
            with gact.step():
                loss = self.loss_fn(self.batch)
        loss.backward()
        parameters = self.model.parameters()
        return torch.cat([p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in parameters])

    def calibrate(self):
        torch.manual_seed(1)
        self.gact.calibrate(self.loss_fn, self.batch, samples=len(self.batch[0]))
        return self


def recomputed(plan) -> set[str]:
    return {name for name in plan if "~" in name}


@pytest.mark.parametrize("derive", [False, True])
@ANY_MODEL
def test_the_measured_error_is_the_predicted_one(make, derive):
    """Its mean over the draws, with what so many of them leave open and the curvature at 4 bits. No prediction sees
    that relu's mask changes where a block is recomputed from a rounded input."""
    job = Job(make, replace(SETTINGS, checkpoint_inputs=make is not masked, derive=derive))
    job.gradient()  # which shows what a block makes from others when it runs again
    job.calibrate()
    assert len(recomputed(job.gact.plan)) >= 4
    assert bool(recomputed(job.gact._schedule.hooks.derived_names)) == (derive and make is not masked)
    errors = torch.stack([(job.gradient() - job.exact).square().sum() for _ in range(DRAWS)])
    spread = 3 * float(errors.std()) / DRAWS**0.5
    predicted = job.gact.adaptation.predicted_variance
    assert float(errors.mean()) == pytest.approx(predicted, rel=0.25, abs=spread)


@ANY_MODEL
def test_a_plan_that_stores_everything_exactly_is_bitwise_the_untouched_job(make, monkeypatch):
    job = Job(make).calibrate()
    monkeypatch.setattr("gact_dist.policies.Plan.bits_of", lambda *_: None)
    monkeypatch.setattr("gact_dist.hooks.recomputed.BlockAgain._bits", lambda *_: None)
    assert torch.equal(job.gradient(), job.exact)


@ANY_MODEL
def test_before_a_measurement_what_is_recomputed_is_exact(make):
    usual = Job(make, Config(bits=4, min_numel=16, noise_limit=0))
    assert torch.equal(Job(make).gradient(), usual.gradient())


class Watcher(nn.Module):
    """[batch, 64] -> [batch, 64]: ten layers; knows which of its activations are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        self.alive: list[weakref.ref] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.clear()
        for layer in self.layers:
            x = functional.gelu(layer(x))
            self.alive.append(weakref.ref(x.untyped_storage()))
        return x


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("setting", [False, True])
def test_activations_of_a_block_that_ran_again_are_not_kept(setting, derive):
    torch.manual_seed(0)
    watcher, first = Watcher(), nn.Linear(64, 64)
    model = nn.Sequential(first, Within(Masked(64)), Within(watcher))
    seen = []

    def look(_: Tensor) -> None:
        gc.collect()
        seen.append(sum(reference() is not None for reference in watcher.alive))

    batch = torch.randn(128, 64)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=16, recomputed=setting, derive=derive))
    gact.calibrate(lambda x: model(x).square().mean(), batch)
    with gact.step():
        loss = model(batch).square().mean()
    watcher.layers[-1].weight.register_hook(look)  # the block has run again, and its backward is about to go through it
    loss.backward()
    assert seen[-1] <= 1 if setting else seen[-1] >= 8


def test_the_same_backward_twice_gives_the_same_gradient():
    job = Job(within).calibrate()
    with job.gact.step():
        loss = job.loss_fn(job.batch)
    parameters = list(job.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(map(torch.equal, first, second))


def test_without_early_stop_all_is_the_same():
    job = Job(within).calibrate()
    gradient = job.gradient()
    again = Job(within).calibrate()
    with set_checkpoint_early_stop(False):
        assert torch.equal(again.gradient(), gradient)


class Selective(TinyGPT):
    """TinyGPT whose checkpoints keep the products of matrices."""

    def forward(self, tokens: Tensor) -> Tensor:
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=context)
        return self.head(self.norm(x))


class Reentrant(TinyGPT):
    """TinyGPT with reentrant checkpoints, which recompute without hooks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [Selective, Reentrant])
def test_what_is_recomputed_otherwise_is_neither_measured_nor_rounded(kind):
    def make():
        return kind(), torch.randint(0, 37, (8, 33))

    job, without = Job(make).calibrate(), Job(make, Config(bits=4, min_numel=16, noise_limit=0)).calibrate()
    assert not recomputed(job.gact.plan)
    assert job.gact.plan == without.gact.plan
    assert torch.equal(job.gradient(), without.gradient())


class Moody(nn.Module):
    """[batch, 32] -> [batch, 32]: takes another branch when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.Linear(32, 32), nn.Linear(32, 32), False

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.b(x)) * x if self.other else torch.tanh(self.a(x)) * x


def test_a_branch_that_no_measurement_has_seen_is_exact():
    def make():
        return nn.Sequential(nn.Linear(32, 32), Within(Masked()), Within(Moody())), torch.randn(64, 32)

    job = Job(make, Config(bits=4, min_numel=16, recomputed=True, checkpoint_inputs=False, noise_limit=0)).calibrate()
    assert recomputed(job.gact.plan)
    moody = job.model[2].block
    moody.other = True
    gact, job.gact = job.gact, None
    exact = job.gradient()
    job.gact = gact
    job.gact._schedule.hooks.plan = gact_dist.policies.Plan(
        {name: bits if name.startswith("2.block") else None for name, bits in job.gact.plan.items()}
    )
    assert torch.equal(job.gradient(), exact)


@pytest.mark.parametrize("inside", [False, True])
def test_it_is_measured_on_a_sixteenth_of_the_batch_at_a_time(inside):
    """A job with checkpoints holds little in other steps: a block on a quarter of the batch would be above it."""

    def make():
        return Around(), torch.randint(0, 37, (32, 33))

    job = Job(make, replace(SETTINGS, recomputed=inside, calibration_samples=32))
    examples: list[int] = []

    def loss_fn(batch):
        examples.append(len(batch[0]))
        return job.loss_fn(batch)

    with job.gact.step(loss_fn, job.batch):
        job.loss_fn(job.batch)
    assert job.gact.adaptation is not None
    assert (examples.count(2), min(examples)) == ((16, 2) if inside else (0, 8))


def test_once_the_default_widths_were_compared_a_block_that_runs_again_has_them(monkeypatch):
    """Where an adaptation is spread over steps the first of them have no plan, and would be the highest."""
    monkeypatch.setattr(adapter, "_LEAST_BYTES", 1e-9)
    widths: list[int] = []
    take = Store.take

    def noted(store: Store, captured: Captured) -> Stored:
        stored = take(store, captured)
        if "~" in captured.name and captured.role is Role.ACTIVATION and isinstance(stored.payload, codec.Packed):
            widths.append(stored.payload.bits)
        return stored

    job = Job(around, replace(SETTINGS, noise_limit=100.0, calibration_samples=8))
    with job.gact.step(job.loss_fn, job.batch):
        loss = job.loss_fn(job.batch)
    assert not job.gact.plan
    monkeypatch.setattr(Store, "take", noted)
    job.model.zero_grad()
    loss.backward()
    assert len(widths) >= 4
    assert set(widths) == {SETTINGS.bits}
    gradient = torch.cat([parameter.grad.flatten() for parameter in job.model.parameters()])
    assert 0.0 < float((gradient - job.exact).square().sum()) < 0.1 * float(job.exact.square().sum())


def test_bits_are_shared_out_by_what_is_there_at_the_same_time(monkeypatch):
    """Of four blocks that run again, alike, one is there with all that they keep."""
    sizes: list[dict[str, float]] = []
    allocate = Gact.allocate

    def noted(policy: Gact, costs: Costs) -> Allocation:
        sizes.append(dict(zip(costs.names, costs.sizes, strict=True)))
        return allocate(policy, costs)

    monkeypatch.setattr(Gact, "allocate", noted)
    for at_once in (SavedTensorHooks.elements_at_once, lambda _, name, numel: float(numel)):
        monkeypatch.setattr(SavedTensorHooks, "elements_at_once", at_once)
        Job(lambda: (Around(layers=4), torch.randint(0, 37, (8, 33)))).calibrate()
    found, whole = sizes[0], sizes[-1]
    assert found.keys() == whole.keys()
    assert len(recomputed(found)) >= 16
    for name, size in found.items():
        assert size == whole[name] / (4 if "~" in name else 1)


def test_the_setting_is_checked():
    with pytest.raises(TypeError, match=r"recomputed is 'yes' .*expected true or false"):
        Config(recomputed="yes")
