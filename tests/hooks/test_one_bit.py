"""Operators that read one bit of each element that they saved: gradients are bitwise those of the untouched job."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gact_dist
from gact_dist import Config

OPERATORS = {
    "relu6": lambda h, _: F.relu6(6 * h),
    "relu6 in place": lambda h, _: F.relu6(6 * h, inplace=True),
    "ReLU6": lambda h, _: nn.ReLU6()(6 * h),
    "hardtanh": lambda h, _: F.hardtanh(h),
    "hardtanh in place": lambda h, _: F.hardtanh(h * 1, inplace=True),
    "hardtanh off zero": lambda h, _: F.hardtanh(h, 0.5, 1.5),
    "hardtanh below zero": lambda h, _: F.hardtanh(h, -1.5, -0.5),
    "hardtanh of narrow limits": lambda h, _: F.hardtanh(h, 0.1, 0.3),
    "hardtanh of changing limits": lambda h, step: F.hardtanh(h, -0.2 * step, 0.3 * step),
    "hardtanh of one limit": lambda h, _: F.hardtanh(h, -math.inf, 0.5),
    "hardsigmoid": lambda h, _: F.hardsigmoid(3 * h),
    "threshold": lambda h, _: F.threshold(h, 0.5, 20.0),
    "leaky_relu": lambda h, _: F.leaky_relu(h, 0.2),
    "leaky_relu in place": lambda h, _: F.leaky_relu(h * 1, 0.2, inplace=True),
}
EXACT = {
    "hardtanh of no limits": lambda h: F.hardtanh(h, -math.inf, math.inf),
    "hardtanh of equal limits": lambda h: F.hardtanh(h, 0.0, 0.0),
    "clamp": lambda h: h.clamp(-1, 1),
    "hardswish": lambda h: F.hardswish(3 * h),
}


def values(dtype):
    """Among them both limits of each operator above."""
    torch.manual_seed(0)
    edges = torch.tensor([-1.5, -1, -0.5, -0.3, -0.2, 0, 0.1, 0.3, 0.5, 1, 1.5, math.inf, -math.inf, math.nan])
    return torch.cat([edges, torch.randn(4096 - len(edges))]).to(dtype).view(64, 64).requires_grad_()


def attached(bits=4):
    return gact_dist.attach(nn.Identity(), config=Config(policy="uniform", bits=bits, min_numel=0))


def gradient(out, x):
    """With a weight for each element, so that none stands for another."""
    return torch.autograd.grad(out, x, torch.arange(1.0, out.numel() + 1).view_as(out).to(out.dtype))[0]


def same(a, b):
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_one_bit_is_stored_and_the_gradient_is_bitwise_that_of_the_untouched_job(name, dtype):
    x, gact = values(dtype), attached()
    for step in (1, 2, 3):
        exact = gradient(OPERATORS[name](x, step), x)
        with gact.step():
            out = OPERATORS[name](x, step)
        (row,) = [row for row in gact.report().rows if row.shape == x.shape]
        assert row.codec in ("mask", "binary")
        assert row.bytes <= 4096 / 8 + 8
        assert same(gradient(out, x), exact)
    gact.detach()


@pytest.mark.parametrize("name", EXACT)
def test_what_shows_no_limits_or_has_none_is_exact(name):
    x, gact = values(torch.float32), attached()
    exact = gradient(EXACT[name](x), x)
    for _ in range(2):
        with gact.step():
            out = EXACT[name](x)
        assert {row.codec for row in gact.report().rows} == {"exact"}
        assert same(gradient(out, x), exact)
    gact.detach()


@pytest.mark.parametrize(
    ("view", "stored"),
    [
        (lambda x: x[:, ::2], 2048),
        (lambda x: x.t(), 4096),
        (lambda x: x[:1].expand(64, 64), 64),
        (lambda x: x.unfold(1, 2, 1), 4096),
        (lambda x: x.view(-1).as_strided((1, 64), (1, 2)), 64),
        (lambda x: torch._neg_view(x), 4096),
    ],
    ids=["gaps", "permuted", "expanded", "overlapping", "one row with gaps", "negative"],
)
def test_strides_come_back_and_what_elements_share_is_stored_once(view, stored):
    x, gact = values(torch.float32), attached()
    exact = gradient(F.leaky_relu(view(x)), x)
    with gact.step():
        out = F.leaky_relu(view(x))
    (row,) = gact.report().rows
    assert row.codec == "mask"
    assert row.bytes <= stored / 8 + 8
    assert out.grad_fn._saved_self.stride() == view(x).stride()
    assert same(gradient(out, x), exact)
    gact.detach()


def test_other_readers_of_the_same_memory_keep_their_own():
    weight, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(64, 64)
    gact = attached(8)
    for _ in range(3):
        h = x @ weight
        (exact,) = torch.autograd.grad((h.sin() + F.hardtanh(h) + h.cos()).sum(), weight)
        with gact.step():
            h = x @ weight
            loss = (h.sin() + F.hardtanh(h) + h.cos()).sum()
        assert sorted(row.codec for row in gact.report().rows) == ["mask", "quantised", "quantised"]
        (found,) = torch.autograd.grad(loss, weight)
        assert (found - exact).norm() < 0.02 * exact.norm()
    gact.detach()


class Branching(nn.Module):
    """A line on which one of two operators saves what has one name."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.functions = nn.Linear(64, 64), (first, second)

    def forward(self, x, second):
        return self.functions[second](self.linear(x)).sum()


@pytest.mark.parametrize("one_bit", [F.leaky_relu, F.hardtanh], ids=lambda function: function.__name__)
def test_the_next_tensor_of_the_same_name_is_not_stored_in_one_bit(one_bit):
    """As dropout noise and a soft mask that takes its place: finding c38."""
    model, x = Branching(one_bit, torch.square), torch.randn(64, 64)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=8, min_numel=0))
    for second in (0, 0, 1, 1, 0):
        (exact,) = torch.autograd.grad(model(x, second), model.linear.bias)
        with gact.step():
            loss = model(x, second)
        (found,) = torch.autograd.grad(loss, model.linear.bias)
        assert (found - exact).norm() < 0.02 * exact.norm()
    gact.detach()
