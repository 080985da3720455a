"""Custom functions that run again in a backward, without a checkpoint of the user's."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import Messages
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from unusual_jobs import FlashAttention, TwoPartAttention

import gact_dist
from gact_dist import Config

WIDTH, STEPS = 32, 4


class Opaque(FlashAttention):
    """Its backward is out of autograd's sight, as that of a kernel is."""

    backward: Any = staticmethod(once_differentiable(FlashAttention.backward))


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = self.attend(q, k, v)
        attended = attended if isinstance(attended, Tensor) else attended[0]
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Job:
    """A small transformer with an attention, and its batch."""

    def __init__(self, attend: Callable[..., Any], around: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        torch.manual_seed(0)
        blocks = [Block(attend) for _ in range(3)]

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 8)

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = block(x) if around is None else around(block, x)
                return self.head(x)

        self.model, self.batch = Model(), torch.randn(8, 48, WIDTH)

    def loss_of(self, batch: Tensor) -> Tensor:
        return (self.model(batch) - 1).square().mean()

    def gradients(self, context: AbstractContextManager[Any] | None = None) -> Tensor:
        self.model.zero_grad()
        with context or nullcontext():
            loss = self.loss_of(self.batch)
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    def compressed(self, config: Config | str, steps: int = STEPS) -> tuple[list[Tensor], gact_dist.Controller]:
        """The gradients of some steps."""
        if isinstance(config, str):
            gact = gact_dist.attach(self.model, config)
        else:
            gact = gact_dist.attach(self.model, config=config)
        return [self.gradients(gact.step(self.loss_of, self.batch)) for _ in range(steps)], gact


def call(function: Any) -> Callable[..., Any]:
    """What calls a function by its class, in whatever way that has been replaced."""
    return lambda *given: function.apply(*given)


def codecs(gact: gact_dist.Controller, part: str) -> list[str]:
    return [row.codec for row in gact.report().rows if part in row.name]


def is_left(function: type) -> bool:
    return "apply" not in vars(function)


CONFIG = Config(min_numel=16)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("function", [FlashAttention, Opaque, TwoPartAttention])
def test_a_custom_attention_runs_again_as_under_a_checkpoint_of_its_own(function, bits):
    """Bit for bit from the first step on. Names, which the noise follows from, are those of lines of a function."""
    by_hand = Job(lambda *given: checkpoint(function.apply, *given, use_reentrant=False))
    by_itself = Job(lambda *given: function.apply(*given))
    found = []
    for job in (by_hand, by_itself):
        gradients, gact = job.compressed(Config(bits=bits, min_numel=16))
        found.append((gact.plan, codecs(gact, "BlockInput"), gact.report().ratio, gradients))
        gact.detach()
    assert found[0][:3] == found[1][:3]
    assert found[0][1] == ["quantised"] * 9
    assert all(map(torch.equal, found[0][3], found[1][3]))
    assert is_left(function)


def test_the_gradients_error_is_the_predicted_one():
    job = Job(call(Opaque))
    exact = job.gradients()
    gradients, gact = job.compressed(CONFIG, 24)
    measured = torch.stack([(gradient - exact).square().sum() for gradient in gradients]).mean()
    # the mean of 24 sums of many tensors' errors
    assert 0.85 < float(measured) / gact.adaptation.predicted_variance < 1.15
    assert gact.report().ratio > 8
    gact.detach()


@pytest.mark.parametrize("way", ["step", "follow"])
def test_whatever_a_loop_tells_its_functions_run_again(way):
    """Judged in the first step, watched in the second, tried before the third; a measurement has forwards as well."""
    job = Job(call(Opaque))
    exact = job.gradients()
    gact = gact_dist.attach(job.model, config=CONFIG)
    if way == "follow":
        gact.follow()
    for step in range(STEPS):
        found = job.gradients(None if way == "follow" else gact.step())
        assert (found - exact).norm() < 0.1 * exact.norm()
        if step == 0 or step >= 2:
            assert len(codecs(gact, "BlockInput")) == (9 if step else 0)
    gact.detach()
    assert is_left(Opaque)


class Noisy(torch.autograd.Function):
    """A dropout of what two inputs have in common: it keeps its noise, and a product of the two."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        noise = 2 * torch.rand_like(q).round()
        product = (q * k).tanh()
        ctx.save_for_backward(q, k, product, noise)
        return noise * product + v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, product, noise = ctx.saved_tensors
        inner = grads[0] * noise * (1 - product.square())
        return inner * k, inner * q, grads[0]


@pytest.mark.parametrize("function", [FlashAttention, Noisy])
def test_where_all_is_kept_as_it_is_it_is_bitwise_the_untouched_job(function):
    """Random numbers included: it draws what it has drawn, and what comes after finds the generator as it was."""
    job = Job(call(function))
    torch.manual_seed(7)
    untouched = [job.gradients() for _ in range(STEPS)]
    state = torch.get_rng_state()
    torch.manual_seed(7)
    gradients, gact = job.compressed(Config(bits=None, retained_bytes=10**9, min_numel=16))
    assert all(map(torch.equal, gradients, untouched))
    assert torch.equal(torch.get_rng_state(), state)
    assert codecs(gact, "BlockInput")
    gact.detach()


class Counting(FlashAttention):
    """Its result depends on how often it was called."""

    calls = count(1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FlashAttention.forward(ctx, q, k, v) * (1 + next(Counting.calls) / 1000)


class Writing(FlashAttention):
    """It writes to an argument that needs no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Tensor) -> Tensor:
        calls += 1
        return FlashAttention.forward(ctx, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *FlashAttention.backward(ctx, *grads), None


class Twice(FlashAttention):
    """Its backward asks twice for what was saved, which a checkpoint refuses."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 5
        return FlashAttention.backward(ctx, *grads)


class InContainer(FlashAttention):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: list[Tensor]) -> Tensor:
        return FlashAttention.forward(ctx, q, k, v) + bias[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *FlashAttention.backward(ctx, *grads), None


class OwnApply(FlashAttention):
    @classmethod
    def apply(cls, *given: Any) -> Any:
        return super().apply(*given)


CALLS = torch.zeros(())
LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "its result changes": call(Counting),
    "it writes to an argument": lambda *given: Writing.apply(*given, CALLS),
    "its backward reads twice": call(Twice),
    "a tensor in a list": lambda q, k, v: InContainer.apply(q, k, v, [q.new_ones(q.shape[-2:])]),
    "an apply of its own": call(OwnApply),
    "its apply was looked up before": FlashAttention.apply,
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_a_function_that_cannot_run_again_keeps_all_that_it_saves_exactly(kind):
    job = Job(LEFT_ALONE[kind])
    exact = job.gradients()
    CALLS.zero_()
    with Messages(logging.INFO) as messages:
        gradients, gact = job.compressed(CONFIG)
    for found in gradients:
        assert (found - exact).norm() < 0.1 * exact.norm()
    assert not codecs(gact, "BlockInput")
    (line,) = [text for text in messages.texts if "again in backward" in text or "kept exactly" in text]
    assert "it combines its inputs with what it computed from them" in line
    gact.detach()


def test_what_a_function_writes_to_is_left_alone_where_it_is_tried():
    job, found = Job(lambda *given: Writing.apply(*given, CALLS)), []
    for config in (CONFIG, Config(min_numel=16, derive=False)):
        CALLS.zero_()
        gact = gact_dist.attach(job.model, config=config)
        for _ in range(STEPS):
            job.gradients(gact.step())
        found.append(float(CALLS))
        gact.detach()
    assert found == [3 * STEPS, 3 * STEPS]  # three layers


def test_one_line_says_that_a_function_runs_again_and_how_it_does_not():
    with Messages(logging.INFO) as messages:
        _, gact = Job(call(Opaque)).compressed(CONFIG)
    (line,) = [text for text in messages.texts if "again in backward" in text or "kept exactly" in text]
    assert "Opaque()" in line
    assert "derive=False" in line
    gact.detach()


@pytest.mark.parametrize(
    "config",
    [
        Config(min_numel=16, derive=False),
        Config(min_numel=16, checkpoint_inputs=False),
        Config(policy="uniform", bits=4, min_numel=16),
        Config(min_numel=16, estimator="perturbation"),
        Config(policy="exact"),
    ],
)
def test_it_can_be_switched_off(config):
    _, gact = Job(call(Opaque)).compressed(config, 3)
    assert is_left(Opaque)
    assert not codecs(gact, "BlockInput")
    gact.detach()


@pytest.mark.parametrize("recomputed", [False, True])
def test_inside_of_a_users_checkpoint_nothing_runs_more_often(recomputed):
    """Neither in the job nor where it is measured."""

    def around(block, x):
        return checkpoint(block, x, use_reentrant=False)

    found = []
    for attend in (call(Opaque), Opaque.apply):
        _, gact = Job(attend, around).compressed(Config(bits=4, min_numel=16, recomputed=recomputed))
        found.append((gact.adaptation.predicted_variance, len(gact.plan)))
        gact.detach()
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_job_goes_on_after_a_resume_as_it_would_have():
    """From each step on: where a function is proposed, watched, and runs again."""
    for stop in range(1, STEPS):
        job = Job(call(Opaque))
        straight = gact_dist.attach(job.model, config=CONFIG)
        for _ in range(stop):
            job.gradients(straight.step())
        state = straight.state_dict()
        expected = [job.gradients(straight.step()) for _ in range(STEPS)]
        straight.detach()
        resumed = gact_dist.attach(job.model, config=CONFIG)
        resumed.load_state_dict(state)
        assert all(map(torch.equal, [job.gradients(resumed.step()) for _ in range(STEPS)], expected))
        resumed.detach()


def test_of_two_models_each_decides_for_itself():
    first, second = Job(call(Opaque)), Job(call(Opaque))
    _, one = first.compressed(CONFIG)
    _, other = second.compressed(Config(min_numel=16, derive=False))
    assert len(codecs(one, "BlockInput")) == 9
    assert not codecs(other, "BlockInput")
    one.detach()
    assert is_left(Opaque)
    other.detach()


def test_a_controller_that_is_dropped_leaves_the_function_as_it_was():
    job = Job(call(Opaque))
    _, gact = job.compressed(CONFIG, 3)
    assert not is_left(Opaque)
    del gact, job
    gc.collect()
    assert is_left(Opaque)


def test_outside_of_steps_and_without_gradients_it_is_called_as_ever():
    job = Job(call(Opaque))
    exact = job.gradients()
    _, gact = job.compressed(CONFIG)
    assert torch.equal(job.gradients(), exact)
    with gact.step(), torch.no_grad():
        job.model(job.batch)
    gact.detach()
