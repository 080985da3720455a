"""Loops that are more than one forward and one backward, each with and without gact_dist."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import SmallCNN, TinyGPT
from torch import Tensor, nn
from torch.autograd import Function

import gact_dist
from gact_dist import Config

EXACT = Config(policy="exact")
ROUNDED = Config(bits=4, adapt_interval=2, calibration_samples=4, min_numel=16)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def contrastive(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """Two forwards of one model before one backward (SimCLR)."""
    model = mlp(32, 16)
    follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        x = torch.randn(64, 32)
        first = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        second = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        F.cross_entropy(first @ second.T / 0.1, torch.arange(64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def adversarial(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """A generator and a discriminator that take turns (GAN); the generator's graph runs through both."""
    generator, discriminator = mlp(8, 32), mlp(32, 1)
    follow(generator)
    follow(discriminator)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (generator, discriminator)]
    for _ in range(4):
        real, fake = torch.randn(64, 32), generator(torch.randn(64, 8))
        loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        discriminator.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        optimizers[0].step()
        generator.zero_grad()
        discriminator.zero_grad()
    return [generator, discriminator]


def actor_critic(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """A rollout of forwards, then one backward through all of them."""
    model = mlp(16, 5)
    follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        losses = []
        for _ in range(3):
            out = model(torch.randn(32, 16))
            chosen = torch.distributions.Categorical(logits=out[:, :4])
            action = chosen.sample()
            advantage = torch.randn(32) - out[:, 4]
            losses.append((advantage.square() - chosen.log_prob(action) * advantage.detach()).mean())
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank path beside it (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def low_rank(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """Frozen layers with adapters, under autocast."""
    model = nn.Sequential(Adapted(64), nn.GELU(), Adapted(64), nn.LayerNorm(64), nn.Linear(64, 10))
    follow(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(64, 64)).float(), torch.randint(0, 10, (64,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def evaluated(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """Evaluation between the steps and between forward and backward, and a forward that raises."""
    model = SmallCNN()
    follow(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        loss = F.cross_entropy(model(torch.randn(16, 1, 16, 16)), torch.randint(0, 10, (16,)))
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 1, 16, 16))
        model.train()
        with pytest.raises(RuntimeError, match="size"):
            model(torch.randn(4, 3, 16, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def scaled(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """float16 autocast with a GradScaler whose scale overflows at first, and two micro-batches a step."""
    model = TinyGPT(dropout=0.1)
    follow(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**27, growth_interval=100)
    for _ in range(8):
        for _ in range(2):
            tokens = torch.randint(0, 37, (8, 33))
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [model]


def transformed(follow: Callable[[nn.Module], Any]) -> list[nn.Module]:
    """torch.func beside the training loop."""
    model = mlp(32, 4)
    follow(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        x = torch.randn(64, 32)
        model(x).square().mean().backward()
        stateless = mlp(32, 4)
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights: dict[str, Tensor], row: Tensor, stateless: nn.Module = stateless) -> Tensor:
            return torch.func.functional_call(stateless, weights, (row,)).square().mean()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
        assert all(bool(g.isfinite().all()) for g in per_sample.values())
        optimizer.step()
        optimizer.zero_grad()
    return [model]


LOOPS = [contrastive, adversarial, actor_critic, low_rank, evaluated, scaled, transformed]


def run(loop: Callable[..., list[nn.Module]], config: Config | None) -> tuple[list[Tensor], Tensor, list[Any]]:
    """Final weights and buffers, the random state, and the controllers."""
    torch.manual_seed(0)
    controllers: list[Any] = []

    def follow(model: nn.Module) -> None:
        if config is not None:
            controllers.append(gact_dist.attach(model, config=config))
            controllers[-1].follow()

    models = loop(follow)
    state = [tensor for model in models for tensor in model.state_dict().values()]
    return state, torch.get_rng_state(), controllers


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_exact_codecs_leave_the_loop_bitwise_as_it_is(loop):
    plain, random_state, _ = run(loop, None)
    exact, random_state_after, _ = run(loop, EXACT)
    assert all(torch.equal(a, b) for a, b in zip(plain, exact, strict=True))
    assert torch.equal(random_state, random_state_after)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_real_bits_train_and_adapt(loop):
    plain, random_state, _ = run(loop, None)
    rounded, random_state_after, controllers = run(loop, ROUNDED)
    assert all(bool(tensor.isfinite().all()) for tensor in rounded)
    assert not all(torch.equal(a, b) for a, b in zip(plain, rounded, strict=True))
    assert torch.equal(random_state, random_state_after)
    for controller in controllers:
        assert controller.plan
        assert any(row.codec == "quantised" for row in controller.report().rows)


class Affine(Function):
    """A linear layer as ZeRO-3 has it: the gradient of its bias depends on no saved tensor."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0)


def test_a_followed_model_that_ends_in_a_custom_function_is_measured_by_one_pass():
    class Ending(nn.Linear):
        def forward(self, x):
            return Affine.apply(x, self.weight, self.bias)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), Ending(64, 10))
    gact = gact_dist.attach(model, config=ROUNDED).follow()
    found, reduced = [], gact._schedule.adapter._reduced
    gact._schedule.adapter._reduced = lambda measured: found.extend(measured) or reduced(measured)
    for _ in range(2):
        F.cross_entropy(model(torch.randn(64, 32)), torch.randint(0, 10, (64,))).backward()
    assert [item.by_perturbation for item in found] == [True, False]  # the batch itself has no graph


def test_a_followed_model_is_itself_again_after_detach():
    model = mlp(32, 4)
    gact = gact_dist.attach(model, config=ROUNDED)
    gact.follow()
    model(torch.randn(64, 32)).mean().backward()
    gact.detach()
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    assert hooks == []
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t), nullcontext():
        model(torch.randn(64, 32))
    assert packed  # nobody else's hooks were on


def test_follow_twice_is_refused():
    gact = gact_dist.attach(mlp(32, 4), config=ROUNDED)
    gact.follow()
    with pytest.raises(RuntimeError, match="this one is following"):
        gact.follow()
    with (
        pytest.raises(RuntimeError, match=r"following: under follow\(\) every forward is a step"),
        gact.step(),
    ):
        pass


def test_a_loss_in_place_of_a_loss_function_is_refused():
    model = mlp(32, 4)
    gact = gact_dist.attach(model, config=ROUNDED)
    x = torch.randn(64, 32)
    loss = model(x).square().mean()
    with pytest.raises(TypeError, match="loss_fn is a Tensor, expected a function"), gact.step(loss, x):
        pass
    with pytest.raises(TypeError, match="loss_fn is a Tensor, expected a function"):
        gact.calibrate(loss, x)


def test_a_loop_that_gives_no_loss_function_is_told_once_that_nothing_adapts(caplog):
    model = nn.Linear(64, 64)
    x = torch.randn(32, 64)

    def warnings_of(steps: int, config: Config, calibrated: bool = False) -> list[str]:
        caplog.clear()
        gact = gact_dist.attach(model, config=config)
        if calibrated:
            gact.calibrate(lambda x: model(x).square().sum(), x)
        for _ in range(steps):
            with gact.step():
                model(x)
        gact.detach()
        return [record.getMessage() for record in caplog.records]

    assert warnings_of(120, Config(policy="gact", bits=3)) == [
        "policy gact has chosen no bits in 100 steps because step() was given no loss function: every tensor has 3 "
        "bits; give step(loss_fn, batch), call calibrate(), or use follow() in place of step()"
    ]
    assert "has chosen no bits in 7 steps" in warnings_of(10, Config(policy="acgc", error=0.25, adapt_interval=7))[0]
    assert warnings_of(120, Config(policy="gact"), calibrated=True) == []
    assert warnings_of(120, Config(policy="uniform", bits=4)) == []


class Results:
    """No sequence, mapping or dataclass."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class WithResults(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return Results(super().forward(x))


@pytest.mark.parametrize("overflows", [False, True])
def test_follow_says_once_that_it_never_sees_a_gradient(overflows, caplog):
    model = nn.Linear(16, 16) if overflows else WithResults(16, 16)
    gact = gact_dist.attach(model, config=Config(policy="gact", bits=4, adapt_interval=5)).follow()
    for _ in range(12):
        outputs = model(torch.randn(64, 16))
        loss = outputs.sum() * float("inf") if overflows else outputs.values.square().sum()
        loss.backward()
    gact.detach()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([warning for warning in warnings if "has chosen no bits in 5 steps because follow()" in warning]) == 1


def test_follow_does_not_complain_of_what_it_has_seen(caplog):
    model = nn.Linear(16, 16)
    gact = gact_dist.attach(model, config=Config(policy="gact", bits=4, adapt_interval=5)).follow()
    for _ in range(12):
        model(torch.randn(64, 16)).square().sum().backward()
    gact.detach()
    assert "has chosen no bits" not in caplog.text


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("level", ["L1", "L2"])
def test_a_step_in_inference_mode_measures_nothing_and_the_next_one_does(level, follow):
    model, x = mlp(32, 5), torch.randn(64, 32)
    gact = gact_dist.attach(model, level=level)
    if follow:
        gact.follow()

    def step() -> Tensor:
        with nullcontext() if follow else gact.step(lambda batch: model(batch).square().mean(), x):
            return model(x).square().mean()

    with torch.inference_mode():
        step()
    assert gact.history == []
    for _ in range(3):
        step().backward()
    assert bool(gact.plan) == (level == "L2")
    gact.detach()


@pytest.mark.parametrize("follow", [False, True])
def test_a_step_inside_the_capture_of_a_cuda_graph_is_refused(follow, monkeypatch):
    model = nn.Linear(64, 64)
    gact = gact_dist.attach(model, "L1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if follow:
        gact.follow()
    begin = partial(model, torch.randn(32, 64)) if follow else gact.step().__enter__
    with pytest.raises(RuntimeError, match=r"each replay would round .* Capture without gact_dist"):
        begin()


class Meeting(nn.Module):
    """A layer whose forward, in the thread that comes first, waits until the other has run its own whole step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.reached, self.over = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if not self.reached.is_set():
            self.reached.set()
            assert self.over.wait(60)
        return self.layer(x).tanh()


@pytest.mark.parametrize("follows", [False, True])
def test_a_step_beside_that_of_another_thread_is_exact_and_told(follows, caplog):
    model = nn.Sequential(Meeting(), nn.Linear(32, 8))
    batches = torch.randn(2, 16, 32)
    meeting = model[0]
    meeting.reached.set()
    plain = torch.autograd.grad(model(batches[1]).square().sum(), list(model.parameters()))
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=16, noise_limit=0.0))
    gact = gact.follow() if follows else gact
    meeting.reached.clear()
    found: dict[str, Any] = {}

    def gradient(batch: Tensor) -> tuple[Tensor, ...]:
        with nullcontext() if follows else gact.step():
            loss = model(batch).square().sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    first = threading.Thread(target=lambda: found.update(first=gradient(batches[0])))
    first.start()
    assert meeting.reached.wait(60)
    second = gradient(batches[1])
    meeting.over.set()
    first.join()
    assert all(torch.equal(a, b) for a, b in zip(second, plain, strict=True))
    assert caplog.text.count("a step began in one thread while another thread was in one") == 1
    rows = gact.report().rows
    assert [row.codec for row in rows] == ["quantised"] * (1 if follows else 2)  # the model's, and the loss's
    assert not all(torch.equal(a, b) for a, b in zip(gradient(batches[1]), plain, strict=True))  # compressed again
