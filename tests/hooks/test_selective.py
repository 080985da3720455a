"""What a selective checkpoint keeps: stored like a block's inputs, measured, and made again where it has to be."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from messages import Messages
from small_models import TinyGPT, loss_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gact_dist
from gact_dist import Config
from gact_dist.hooks.handles import Stored
from gact_dist.hooks.selective import Adding, Results, Taking

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
LINEAR = torch.ops.aten.addmm.default
UNIFORM = Config(policy="uniform", bits=4, min_numel=16)
DRAWS = 24
OPTIONS: dict[str, Any] = {"use_reentrant": False}


def every_second_product(**options: Any) -> Any:
    """As torchtitan has it: the policy counts what it has seen, anew in each call."""
    met: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == LINEAR:
            met[context.is_recompute] += 1
            if met[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in (LINEAR, ATTENTION) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy, **options)


def wide_products(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The same ones in TinyGPT, by the shapes of their weights."""
    wide = operator == LINEAR and args[2].shape[1] > 64
    return CheckpointPolicy.MUST_SAVE if wide or operator == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def everything(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


CONTEXTS: dict[str, Callable[[], Any] | None] = {
    "products": partial(create_selective_checkpoint_contexts, [LINEAR]),
    "attention": partial(create_selective_checkpoint_contexts, [ATTENTION]),
    "every second product": every_second_product,
    "everything": partial(create_selective_checkpoint_contexts, everything),
}
ANY_CONTEXT = pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)


class Around(TinyGPT):
    """TinyGPT whose forward checkpoints its blocks."""

    def __init__(self, contexts: Callable[[], Any] | None, **options: Any) -> None:
        super().__init__(**options)
        self.options = {} if contexts is None else {"context_fn": contexts}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return self.head(self.norm(x))


def within(contexts: Callable[[], Any], **options: Any) -> TinyGPT:
    """The same with the checkpoints inside of the blocks, as wrappers have them."""
    model = TinyGPT(**options)
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, context_fn=contexts)
    model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    return model


class Job:
    """A model, its batch, and the gradient of a step."""

    def __init__(self, make: Callable[[], nn.Module], config: Config | None = None) -> None:
        torch.manual_seed(0)
        self.model = make()
        tokens = torch.randint(0, 37, (8, 33))
        self.batch = tokens[:, :-1], tokens[:, 1:]
        self.loss_fn = loss_of(self.model)
        self.gact = gact_dist.attach(self.model, config=config) if config else None

    def gradient(self) -> Tensor:
        """With the same random numbers each time, but for those of the rounding."""
        torch.manual_seed(1)
        self.model.zero_grad()
        with self.step():
            loss = self.loss_fn(self.batch)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.gact is None:
            yield
            return
        with self.gact.step(batch=self.batch):
            yield

    def calibrate(self) -> Job:
        torch.manual_seed(1)
        self.gact.calibrate(self.loss_fn, self.batch, samples=8)
        return self


def kept(job: Job) -> dict[str, tuple[str, int]]:
    """codec and bytes of what the checkpoints keep of operators, by name."""
    return {row.name: (row.codec, row.bytes) for row in job.gact.report().rows if "aten." in row.name}


@pytest.mark.parametrize("make", [Around, within])
@ANY_CONTEXT
def test_at_level_exact_it_is_left_as_it_is(make, contexts):
    exact = Job(partial(make, contexts), Config.from_level("exact"))
    assert torch.equal(exact.gradient(), Job(partial(make, contexts)).gradient())
    assert {codec for codec, _ in kept(exact).values()} == {"exact"}


@pytest.mark.parametrize("make", [Around, within])
def test_products_are_stored_in_few_bits_and_attention_is_made_again(make):
    job = Job(partial(make, every_second_product), UNIFORM)
    for _ in range(2):
        job.gradient()
    found = kept(job)
    assert Counter(codec for codec, _ in found.values()) == {
        "quantised": 4,
        "derived": 4,
    }  # two blocks of four products
    assert all(("addmm" in name) == (codec == "quantised") for name, (codec, _) in found.items())
    assert all(bool(nbytes) == (codec == "quantised") for codec, nbytes in found.values())
    exact = Job(partial(make, every_second_product), Config.from_level("exact"))
    exact.gradient()
    assert job.gact.report().exact_bytes == exact.gact.report().exact_bytes


@pytest.mark.parametrize("make", [Around, within])
def test_where_attention_alone_is_kept_the_step_is_that_of_a_plain_checkpoint(make):
    """The output and the logsumexp of attention would not fit to queries and keys that are made from rounded inputs."""
    plain, selective = (Job(partial(make, contexts), UNIFORM) for contexts in (_plain, CONTEXTS["attention"]))
    for _ in range(3):
        first, second = plain.gradient(), selective.gradient()
    assert torch.equal(first, second)
    assert not torch.equal(first, Job(partial(make, _plain)).gradient())


def _plain() -> Any:
    return create_selective_checkpoint_contexts([])


@pytest.mark.parametrize("make", [Around, within])
@ANY_CONTEXT
def test_the_measured_error_is_the_predicted_one(make, contexts):
    """Its mean over 24 draws, with what so many of them leave open; at 6 bits curvature is small."""
    exact = Job(partial(make, contexts)).gradient()
    job = Job(partial(make, contexts), Config(bits=6, min_numel=16, noise_limit=0))
    job.gradient()
    job.calibrate()
    job.gradient()
    assert {codec for name, (codec, _) in kept(job).items() if "addmm" in name} <= {"quantised", "derived"}
    errors = torch.stack([(job.gradient() - exact).square().sum() for _ in range(DRAWS)])
    spread = 3 * float(errors.std()) / DRAWS**0.5
    assert float(errors.mean()) == pytest.approx(job.gact.adaptation.predicted_variance, rel=0.15, abs=spread)


@pytest.mark.parametrize("contexts", [CONTEXTS["products"], CONTEXTS["everything"]])
def test_elements_that_change_sides_in_the_block_that_runs_again_are_counted(contexts):
    """Those of relu, where its operand is made again from what is rounded: most of the error."""
    torch.manual_seed(0)
    model = Layers(contexts, Rectified(), Rectified())
    x, weight = torch.randn(2, 256, 32)

    def gradient(gact: Any = None) -> Tensor:
        model.zero_grad()
        with nullcontext() if gact is None else gact.step(batch=x):
            loss = (model(x) * weight).sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient()
    gact = gact_dist.attach(model, config=Config(bits=6, min_numel=16, noise_limit=0))
    gradient(gact)
    gact.calibrate(lambda x: (model(x) * weight).sum(), x, samples=256)
    errors = torch.stack([(gradient(gact) - exact).square().sum() for _ in range(DRAWS)])
    assert float(errors.mean()) == pytest.approx(gact.adaptation.predicted_variance, rel=0.3)


@pytest.mark.parametrize("make", [Around, within])
def test_the_block_that_runs_again_is_exact_where_others_are_rounded_as_well(make):
    """Config.recomputed is for what plain checkpoints recompute."""
    settings = Config(bits=4, min_numel=16, noise_limit=0)
    one, other = (
        Job(partial(make, CONTEXTS["products"]), replace(settings, recomputed=setting)).calibrate()
        for setting in (False, True)
    )
    assert one.gact.plan == other.gact.plan
    assert torch.equal(one.gradient(), other.gradient())


@pytest.mark.parametrize("make", [Around, within])
def test_a_plan_that_stores_everything_exactly_is_bitwise_the_untouched_job(make, monkeypatch):
    job = Job(partial(make, every_second_product), Config(bits=4, min_numel=16, noise_limit=0)).calibrate()
    assert any("aten.addmm" in name for name in job.gact.plan)
    monkeypatch.setattr("gact_dist.policies.Plan.bits_of", lambda *_: None)
    assert torch.equal(job.gradient(), Job(partial(make, every_second_product)).gradient())


def test_the_same_backward_twice_gives_the_same_gradient():
    """torch's own selective checkpoint refuses the second."""
    job = Job(partial(Around, CONTEXTS["products"]), UNIFORM)
    for _ in range(2):
        job.gradient()
    with job.step():
        loss = job.loss_fn(job.batch)
    parameters = list(job.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(map(torch.equal, first, second))


class InPlace(nn.Module):
    """[batch, 32] -> [batch, 32]: writes to what the checkpoint has kept, as `x += bias` does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden += 1.0
        return x + self.down(functional.gelu(hidden))


class Layers(nn.Module):
    """Blocks on [batch, 32], each under a selective checkpoint."""

    def __init__(self, contexts: Callable[[], Any], *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.contexts = nn.Linear(32, 32), nn.ModuleList(blocks), contexts

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, context_fn=self.contexts, **OPTIONS)
        return x


def trained(model: nn.Module, config: Config | None, steps: int = 3) -> tuple[Tensor, list[Any]]:
    """The gradient of the last of some steps, and its rows."""
    x, weight = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(3))
    gact = gact_dist.attach(model, config=config) if config else None
    for _ in range(steps):
        torch.manual_seed(1)
        model.zero_grad()
        if gact is None:
            loss = (model(x) * weight).sum()
        else:
            with gact.step():
                loss = (model(x) * weight).sum()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), gact.report().rows if gact else []


def test_what_is_written_over_after_it_was_kept_raises_as_without_us():
    torch.manual_seed(0)
    model = Layers(CONTEXTS["products"], InPlace())
    with pytest.raises(RuntimeError, match="has been mutated"):
        trained(model, None)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: saved tensor .*addmm"):
        trained(model, UNIFORM)


def test_a_checkpoint_that_allows_that_is_left_as_it_is():
    torch.manual_seed(0)
    allowing = partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default], True)
    model = Layers(allowing, InPlace())
    _, rows = trained(model, UNIFORM)
    assert [row.codec for row in rows if "aten.gelu" in row.name] == ["exact"]


def test_where_torch_keeps_results_each_run_of_a_measurement_finds_them():
    """A measurement runs a block again several times, and torch 2.11 then asks a policy, which may count, anew."""
    with Messages(logging.DEBUG) as messages:
        counted, by_shape = (
            Job(partial(Around, partial(contexts, allow_cache_entry_mutation=True)), Config(min_numel=16)).calibrate()
            for contexts in (every_second_product, partial(create_selective_checkpoint_contexts, wide_products))
        )
    assert not any("one-pass" in text or "perturbation" in text for text in messages.texts)
    assert len([name for name in counted.gact._schedule.sensitivity if "BlockInput" in name]) == 2
    assert counted.gact._schedule.sensitivity == by_shape.gact._schedule.sensitivity


@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_a_job_can_ask_for_exact_ones(by_checkpoint, monkeypatch):
    """By the setting for block inputs, or, from torch 2.14 on, by the checkpoint's own argument."""
    torch.manual_seed(0)

    def contexts() -> Any:
        modes = CONTEXTS["products"]()
        modes[0].respect_saved_tensors_hooks = not by_checkpoint  # as checkpoint() of torch 2.14 does
        return modes

    if hasattr(CONTEXTS["products"]()[0], "respect_saved_tensors_hooks"):
        options = {"use_reentrant": False, "respect_saved_tensors_hooks": not by_checkpoint}
        monkeypatch.setitem(globals(), "OPTIONS", options)
    model = Layers(contexts, InPlaceless())
    _, rows = trained(model, UNIFORM if by_checkpoint else replace(UNIFORM, checkpoint_inputs=False))
    assert [row.codec for row in rows if "aten.addmm" in row.name] == ["exact", "exact"]


class InPlaceless(InPlace):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Rectified(InPlace):
    """Has a relu, whose backward reads where its result is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Routes(InPlace):
    """Sends rows by the sign of what is kept: boolean indexing."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        chosen = hidden[:, 0] > 0
        return x + self.down(hidden).index_put((chosen.nonzero()[:, 0],), self.down(hidden[chosen]))


def test_a_block_that_decides_on_values_is_exact():
    torch.manual_seed(0)
    model = Layers(CONTEXTS["products"], Routes())
    exact, _ = trained(model, None)
    found, rows = trained(model, UNIFORM)
    assert {row.codec for row in rows if "addmm" in row.name or "BlockInput" in row.name} == {"exact"}
    assert float((found - exact).norm()) < 0.1 * float(exact.norm())


@torch.library.custom_op("gact_dist_test::attention", mutates_args=())
def _drop_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """[..., rows, width] three times -> (result, mask): attention that draws what it drops."""
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    mask = torch.rand_like(weights) >= dropout_p
    return (weights * mask / (1 - dropout_p)) @ v, mask


@_drop_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(*q.shape[:-1], k.shape[-2], dtype=torch.bool, device=q.device)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.kept = 1 - inputs[3]


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    q, k, v, mask = ctx.saved_tensors
    with torch.enable_grad():
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        out = (torch.softmax(q @ k.transpose(-1, -2), -1) * mask / ctx.kept) @ v
        return (*torch.autograd.grad(out, (q, k, v), grad), None)


_drop_attention.register_autograd(_backward, setup_context=_save)


class Drops(nn.Module):
    """[batch, 32] -> the same: attention between the rows, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(32, 96), 0.25

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + torch.ops.gact_dist_test.attention(q, k, v, self.dropout)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_with_dropout_is_kept_and_its_block_exact(dropout):
    torch.manual_seed(0)
    kinds = [LINEAR, torch.ops.gact_dist_test.attention.default]
    model = Layers(partial(create_selective_checkpoint_contexts, kinds), Drops())
    model.blocks[0].dropout = dropout
    exact, _ = trained(model, None)
    found, rows = trained(model, replace(UNIFORM, min_numel=1))
    codecs = {row.codec for row in rows if "addmm" in row.name or "BlockInput" in row.name}
    assert codecs == ({"exact"} if dropout else {"quantised"})
    assert {row.codec for row in rows if "attention" in row.name} == ({"exact", "mask"} if dropout else {"derived"})
    gradients = [part[-len(model.blocks[0].qkv.weight.flatten()) :] for part in (found, exact)]
    assert torch.equal(*gradients) is bool(dropout)


class Fickle(InPlace):
    """Does more in every further run."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for _ in range(self.runs):
            x = self.down(functional.gelu(self.up(x)))
        return x


def test_a_block_that_does_otherwise_is_an_error_that_says_so():
    torch.manual_seed(0)
    block = Fickle()
    results = Results(lambda context, operator, *_, **__: operator == LINEAR, lambda *_: None, lambda: None)
    x = torch.randn(64, 32)
    with Adding(results):
        block(x)
    expected = r"got 3 calls of aten\.addmm\.default .* expected 2, as in its forward"
    with pytest.raises(RuntimeError, match=expected), Taking(results, lambda *_: None):
        block(x)


def test_modes_of_the_users_own_are_left_alone():
    torch.manual_seed(0)

    def contexts() -> Any:
        keeping, again = CONTEXTS["products"]()
        kind = type(keeping)
        keeping.__class__ = type("Own", (kind,), {})
        return keeping, again

    _, rows = trained(Layers(contexts, InPlaceless()), UNIFORM)
    assert [row.codec for row in rows if "aten.addmm" in row.name] == ["exact", "exact"]


def test_nothing_of_a_step_stays_when_its_graph_is_gone():
    job = Job(partial(Around, CONTEXTS["products"]), UNIFORM)
    for _ in range(2):
        job.gradient()
    alive: list[Any] = []
    usual = Stored.__init__

    def noting(self: Any, *args: Any) -> None:
        usual(self, *args)
        alive.append(weakref.ref(self))

    Stored.__init__ = noting
    try:
        job.gradient()
    finally:
        Stored.__init__ = usual
    assert alive
    assert not [reference for reference in alive if reference() is not None]


def test_under_autocast_casts_that_a_forward_has_cached_do_not_count(caplog):
    """A block that is measured runs without that cache."""
    job = Job(partial(Around, CONTEXTS["products"]), Config(bits=6, min_numel=16, noise_limit=0))
    shared = nn.Linear(64, 64)
    for block in job.model.blocks:
        block.up = nn.Sequential(shared, block.up)
    loss_fn = job.loss_fn

    def under_autocast(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(batch)

    job.loss_fn = under_autocast
    job.gradient()
    job.calibrate()
    assert any("aten.addmm" in name for name in job.gact.plan)
    assert "measuring" not in caplog.text
