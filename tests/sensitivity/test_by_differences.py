"""Custom autograd functions in what is differentiated twice; [Note: by differences]."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients import variance_of_gradient
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from unusual_jobs import DecoratedAttention, FlashAttention, Gated, RebindingAttention, RmsNorm, TwoPartAttention

import gact_dist
from gact_dist import Config
from gact_dist._torch_internals import APPLY_HAS_FRAME
from gact_dist.hooks import SavedTensorHooks, function_calls
from gact_dist.sensitivity import by_differences
from gact_dist.sensitivity.one_pass import Sensitivity, measure

WIDTH, HEADS, CLASSES, BITS, DIRECTIONS, DRAWS = 32, 4, 5, 8, 16, 24
SCALE = 4.0
"""of queries and keys: with scores so large what is saved beside them moves the gradient as much as they do"""


def opaque(function: Any) -> Any:
    """The same function with its backward out of autograd's sight, as that of a kernel is."""
    name = f"Opaque{function.__name__}"
    return type(name, (function,), {"backward": staticmethod(once_differentiable(function.backward))})


class InHalf(torch.autograd.Function):
    """Attention in bfloat16, as a kernel that autocast casts for."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        ctx.save_for_backward(*qkv)
        return F.scaled_dot_product_attention(*qkv)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            qkv = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return torch.autograd.grad(F.scaled_dot_product_attention(*qkv), qkv, grads[0])


class Projected(torch.autograd.Function):
    """gelu(x weight^T) * factor, and the sum of what gelu was given, which the loss may leave out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float, unused: None) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        hidden = x @ weight.T
        return F.gelu(hidden) * factor, hidden.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            hidden = (x @ weight.T).requires_grad_()
            entered = [(F.gelu(hidden) * ctx.factor, grads[0]), (hidden.sum(-1), grads[1])]
            outputs, given = zip(*(pair for pair in entered if pair[1] is not None), strict=True)
            (inner,) = torch.autograd.grad(outputs, hidden, given)
        return inner @ weight, inner.flatten(0, -2).T @ x.flatten(0, -2), None, None


class Picked(torch.autograd.Function):
    """x * mask in the order of some indices, both of which it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(x, order, mask)
        return torch.tanh(x * mask)[..., order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, order, mask = ctx.saved_tensors
        gradient = torch.zeros_like(x).index_copy_(-1, order, grads[0])
        return gradient * mask * (1 - torch.tanh(x * mask) ** 2), None, None


class Refusing(Gated):
    """Its backward raises where autograd records it."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gate = torch.sigmoid(a, out=torch.empty_like(a))
        return grads[0] * b * gate * (1 + a * (1 - gate)), grads[0] * a * gate


class Attention(nn.Module):
    """attend(q, k, v): its result, or a tuple that begins with it."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        found = self.attend(q * SCALE, k * SCALE, v)
        found = found if isinstance(found, Tensor) else found[0]
        return self.out(found.to(x.dtype).transpose(1, 2).flatten(-2))


class GatedMlp(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(*self.up(x).chunk(2, -1)))


class ProjectedMlp(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.weight, self.down, self.both = (
            nn.Parameter(0.2 * torch.randn(2 * WIDTH, WIDTH)),
            nn.Linear(2 * WIDTH, WIDTH),
            both,
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = Projected.apply(x, self.weight, 0.7, None)
        return self.down(hidden) + (0.1 * total.sin()[..., None] if self.both else 0.0)


class PickedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("order", torch.randperm(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.linspace(0.5, 1.5, 2 * WIDTH)
        return self.down(Picked.apply(self.up(x), self.order, mask))


class Normed(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


class Job:
    """Three blocks with a mean over positions. under: calls a block."""

    def __init__(self, inner: Any, under: Any = None, autocast: bool = False) -> None:
        torch.manual_seed(0)
        under = under or nn.Module.__call__

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
                self.blocks = nn.ModuleList(Block(inner()) for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    x = self.enter(x)
                    for block in self.blocks:
                        x = under(block, x)
                    return self.leave(x.mean(1)).float()

        self.model = Net()
        self.batch = torch.randn(6, 24, WIDTH), torch.randint(0, CLASSES, (6,))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def measured(self, probes: int = DIRECTIONS, bits: int = BITS) -> list[Sensitivity]:
        hooks = SavedTensorHooks(self.model, Config(min_numel=64, bits=bits, derive=False), 0)
        try:
            return measure(hooks, self.model, lambda: self.loss(self.batch), seed=1, probes=probes)
        finally:
            hooks.close()

    def variance(self, bits: int = BITS) -> float:
        """That all saved tensors add to the gradient."""
        config = Config(policy="uniform", bits=bits, min_numel=64, derive=False)
        gact = gact_dist.attach(self.model, config=config)
        return variance_of_gradient(self.model, self.loss, self.batch, gact, DRAWS)


def predicted(found: list[Sensitivity], bits: int = BITS) -> float:
    return sum(float(item.variance[bits - 1]) for item in found)


def again(function: Any) -> Any:
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


@pytest.fixture(autouse=True)
def nothing_known():
    """Functions are found to have no derivative in each test."""
    by_differences._without_derivative.clear()


attention = partial(partial, Attention)
JOBS = {
    "attention": attention(opaque(FlashAttention).apply),
    "decorated attention": attention(opaque(DecoratedAttention).apply),
    "attention in two parts": attention(opaque(TwoPartAttention).apply),
    "gate": partial(GatedMlp, opaque(Gated).apply),
    "gate whose backward refuses": partial(GatedMlp, Refusing.apply),
    "indices and a mask": PickedMlp,
    "norm": partial(Normed, opaque(RmsNorm).apply),
    "a parameter, one of two results": partial(ProjectedMlp, False),
    "a parameter, both results": partial(ProjectedMlp, True),
}


@pytest.mark.parametrize("under", [None, checkpointed], ids=["blocks", "checkpointed blocks"])
@pytest.mark.parametrize("name", JOBS)
def test_what_lies_around_an_opaque_function_has_products(name, under):
    """16 directions leave some 3% on the sum over tensors, 24 draws as much on the measured variance."""
    job = Job(JOBS[name], under)
    found = job.measured()
    assert found
    assert not [item.name for item in found if item.by_perturbation]
    assert predicted(found) == pytest.approx(job.variance(), rel=0.12)


@pytest.mark.parametrize(
    "attend",
    [F.scaled_dot_product_attention, FlashAttention.apply, opaque(FlashAttention).apply],
    ids=["torch", "function", "opaque function"],
)
def test_a_checkpoint_around_attention_alone(attend):
    """It runs again on rounded queries, keys and values, and all that its backward reads belongs to them."""
    job = Job(attention(again(attend)))
    found = job.measured()
    assert not [item.name for item in found if item.by_perturbation]
    assert sum("BlockInput" in item.name for item in found) == 9
    assert predicted(found) == pytest.approx(job.variance(), rel=0.12)


def test_a_function_in_a_checkpoint_has_the_products_of_the_operators_it_is_made_of():
    """Tensor by tensor: differences of the function are what autograd finds in torch's own attention."""
    torchs, others = (
        {item.name: item.variance[BITS - 1] for item in Job(attention(again(attend))).measured(4)}
        for attend in (F.scaled_dot_product_attention, opaque(FlashAttention).apply)
    )
    common = torchs.keys() & others.keys()
    assert sum("BlockInput" in name for name in common) == 9
    for name in common:
        assert float(others[name]) == pytest.approx(float(torchs[name]), rel=0.02), name


def test_bfloat16_under_autocast():
    """Where arguments and results have eight bits themselves; at 8 bits these are half of the error."""
    job = Job(attention(InHalf.apply), autocast=True)
    found = job.measured(bits=6)
    assert [item.name for item in found if item.by_perturbation] == ["enter:Input@4"]  # the batch, cast
    assert predicted(found, 6) == pytest.approx(job.variance(6), rel=0.2)


def test_what_a_function_assigns_anew_is_not_taken_for_what_it_was_given(monkeypatch, caplog):
    """Where no frame shows what apply was given (torch 2.14): its block is perturbed as before."""
    monkeypatch.setattr(function_calls, "_APPLY_CODE", None)
    function = opaque(RebindingAttention)
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        found = Job(attention(function.apply)).measured()
    assert "its block saves is measured by perturbation" in caplog.text
    assert any(item.by_perturbation for item in found)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="gact_dist"):
        found = Job(attention(opaque(FlashAttention).apply)).measured()
    assert "by perturbation" not in caplog.text
    assert not any(item.by_perturbation for item in found)


def test_a_measurement_leaves_generators_and_gradients_alone():
    """Of a function with random numbers of its own; the same gradient as without the measurement. It gives another
    tensor the name of an argument, so where no frame shows what it was given (torch 2.14) its block is perturbed."""

    class Dropping(Gated):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            b = b * torch.bernoulli(torch.full_like(b, 0.9))
            ctx.save_for_backward(a, b)
            return F.silu(a) * b

    job = Job(partial(GatedMlp, opaque(Dropping).apply))
    state = torch.get_rng_state()
    expected = torch.autograd.grad(job.loss(job.batch), list(job.model.parameters()))
    torch.set_rng_state(state)
    found = job.measured()
    assert torch.equal(torch.get_rng_state(), state)
    assert any(item.by_perturbation for item in found) is not APPLY_HAS_FRAME
    for got, wanted in zip(
        torch.autograd.grad(job.loss(job.batch), list(job.model.parameters())), expected, strict=True
    ):
        assert torch.equal(got, wanted)


def test_a_job_adapts_with_an_opaque_attention_in_checkpoints():
    """What its blocks derive is still derived: its recipes were given up where a block had to be perturbed."""
    ratios = {}
    for name, attend in (("torch", F.scaled_dot_product_attention), ("opaque", opaque(FlashAttention).apply)):
        job = Job(attention(again(attend)))
        gact = gact_dist.attach(job.model, config=Config.from_level("L2", min_numel=64))
        for _ in range(6):
            job.model.zero_grad()
            with gact.step(job.loss, job.batch):
                loss = job.loss(job.batch)
            loss.backward()
        ratios[name] = gact.report().ratio
        assert any(row.codec == "derived" for row in gact.report().rows)
        gact.detach()
    assert ratios["opaque"] == pytest.approx(ratios["torch"], rel=0.02)
