"""Custom functions that save views of their inputs, made inside of their forward, as wrappers of kernels do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from messages import Messages
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unusual_jobs import Gate, Kernel, Overwriting

import gact_dist
from gact_dist import Config

WIDTH, STEPS = 32, 16
CONFIG = Config(bits=4, min_numel=16)


class CrossEntropy(torch.autograd.Function):
    """Its forward writes the gradient over the logits, as kernels do that spare memory, and torch does not see it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        rows = logits.view(-1, logits.shape[-1])
        loss = F.cross_entropy(rows, target)
        rows.numpy()[...] = (rows.softmax(-1) - F.one_hot(target, rows.shape[-1])) / len(rows)
        ctx.save_for_backward(rows)
        ctx.shape = logits.shape
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return (gradient * rows).view(ctx.shape), None


class Block(nn.Module):
    """Nothing lies between its input and the function, and the two activations are on one line."""

    def __init__(self, gate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate = gate
        self.up, self.side, self.middle, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.down(F.gelu(self.middle(self.gate(x, y))))


class Model(nn.Module):
    def __init__(self, gate: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(gate) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(block.up(x), block.side(x))
        return x


def job(gate: Callable[..., Tensor]) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    torch.manual_seed(0)
    model = Model(gate)
    return model, lambda batch: (model(batch) - 1).square().mean(), torch.randn(8, 16, WIDTH)


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([found.flatten() for found in torch.autograd.grad(loss, [*model.parameters()])])


def trained(gate: Callable[..., Tensor], config: Config) -> tuple[list[Tensor], gact_dist.Controller]:
    """The gradients of some steps."""
    model, loss_fn, batch = job(gate)
    gact, found = gact_dist.attach(model, config=config), []
    for _ in range(STEPS):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        found.append(gradients(model, loss))
    gact.detach()
    return found, gact


def by_hand(a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda *given: F.silu(given[0]) * given[1], a, b, use_reentrant=False)


@pytest.mark.usefixtures("met")
@pytest.mark.parametrize("function", [Gate, Overwriting, Kernel])
def test_it_runs_again_on_its_inputs_in_few_bits_as_operators_do_under_a_checkpoint(function):
    """Measured by differences of the function, which are not exact derivatives."""
    (_, gact), (_, expected) = trained(lambda *given: function.apply(*given), CONFIG), trained(by_hand, CONFIG)
    report = gact.report()
    assert report.ratio == pytest.approx(expected.report().ratio, rel=0.02)
    assert [row.codec for row in report.rows if "BlockInput" in row.name] == ["quantised"] * 6
    found, theirs = (
        [entry["sensitivity"] for name, entry in each.history[0]["tensors"].items() if "BlockInput" in name]
        for each in (gact, expected)
    )
    assert len(found) == 6
    assert found == pytest.approx(theirs, rel=0.01)
    assert len(gact.history) == len(expected.history)  # a comparison that was off would have adapted again


@pytest.mark.parametrize("function", [Gate, Overwriting, Kernel])
def test_the_gradients_error_is_the_predicted_one(function):
    model, loss_fn, batch = job(lambda *given: function.apply(*given))
    exact = gradients(model, loss_fn(batch))
    found, gact = trained(lambda *given: function.apply(*given), CONFIG)
    error = torch.stack([(gradient - exact).square().sum() for gradient in found[3:]]).mean()
    assert 0.7 < float(error) / gact.adaptation.predicted_variance < 1.4


def test_where_all_is_kept_as_it_is_it_is_bitwise_the_untouched_job():
    model, loss_fn, batch = job(lambda *given: Kernel.apply(*given))
    exact = gradients(model, loss_fn(batch))
    found, _ = trained(lambda *given: Kernel.apply(*given), Config(policy="exact"))
    assert all(torch.equal(gradient, exact) for gradient in found)


def test_what_a_forward_has_written_over_an_input_is_never_rounded():
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 64)), torch.randint(64, (256,))
    batch = torch.randn(16, 16, WIDTH)

    def loss_fn(batch: Tensor) -> Tensor:
        return CrossEntropy.apply(model(batch), target)

    exact = gradients(model, loss_fn(batch))
    with Messages(logging.INFO) as messages:
        gact = gact_dist.attach(model, config=CONFIG)
        for _ in range(STEPS):
            with gact.step(loss_fn, batch):
                loss = loss_fn(batch)
            found = gradients(model, loss)
            assert (found - exact).norm() < 0.1 * exact.norm()
            # what reaches the last layer's bias is the saved gradient, and nothing else
            assert torch.equal(found[-64:], exact[-64:])
    (line,) = [text for text in messages.texts if "kept exactly" in text]
    assert "it saves views of its inputs" in line
    assert "CrossEntropy()" in line
    gact.detach()
