"""Operators that read one bit of each element that they saved: gradients are bitwise those of the untouched job.

And hardswish, which reads a number between two limits and one bit for each of these.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure

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
    "Hardshrink": lambda h, _: nn.Hardshrink()(h),
    "Hardshrink of changing limits": lambda h, step: nn.Hardshrink(0.3 * step)(h),
    "Hardshrink of limit zero": lambda h, _: nn.Hardshrink(0.0)(h),
    "Softshrink": lambda h, _: nn.Softshrink(0.3)(h),
    "leaky_relu": lambda h, _: F.leaky_relu(h, 0.2),
    "leaky_relu in place": lambda h, _: F.leaky_relu(h * 1, 0.2, inplace=True),
}
EXACT = {
    "hardtanh of no limits": lambda h: F.hardtanh(h, -math.inf, math.inf),
    "hardtanh of equal limits": lambda h: F.hardtanh(h, 0.0, 0.0),
    "clamp": lambda h: h.clamp(-1, 1),
    "hardshrink": lambda h: F.hardshrink(h, 0.3),
    "softshrink": lambda h: F.softshrink(h, 0.3),
    "hardswish": lambda h: torch._C._nn.hardswish(3 * h),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("function", [F.hardswish, nn.Hardswish(), lambda h: F.hardswish(h * 1, inplace=True)])
def test_hardswish_is_rounded_and_each_element_stays_on_its_side_of_the_limits(function, bits, dtype):
    """Its slope is 0 and 1 beyond them, exactly; between them it is x / 3 + 1 / 2, with the error of x."""
    torch.manual_seed(0)
    x = (3 * torch.randn(64, 64)).to(dtype)
    x[0, :6] = torch.tensor([-3, 3, -3.02, 3.02, -2.98, 2.98])
    x.requires_grad_()
    gact = attached(bits)
    exact = torch.autograd.grad(function(x).sum(), x)[0].double()
    for _ in range(2):
        with gact.step():
            out = function(x)
        (row,) = gact.report().rows
        assert (row.codec, row.bits) == ("quantised", bits + 2)
        assert row.bytes <= 4096 * (bits + 2 + 0.25) / 8
        slope = torch.autograd.grad(out.sum(), x)[0].double()
        flat = x.abs() >= 3
        assert torch.equal(slope[flat], exact[flat])
        step = float((x.max() - x.min()).detach()) / (2**bits - 1) * 1.05  # the scale is rounded up
        assert float((slope - exact).abs().max()) <= step / 3 + 2 * torch.finfo(dtype).eps
        assert float(slope[~flat].min()) >= -0.5
        assert float(slope[~flat].max()) <= 1.5
    gact.detach()


@pytest.mark.parametrize("derives", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_variance_of_a_rounded_hardswish_is_at_most_what_is_predicted(bits, derives):
    """What it saved alone is rounded. derives: its result is made again from that.

    Eight directions and sixteen draws have a relative standard deviation of some 0.04; and what is moved back to a
    limit has less than half of the error at 2 bits.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Hardswish(), nn.Linear(64, 64))
    nn.init.uniform_(model[1].weight, 2, 6)
    x, y = torch.randn(512, 64), torch.randn(512, 64)
    parameters = list(model.parameters())
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=bits, derive=derives), 0)
    for _ in range(2):
        with hooks.rehearsal(Plan(default=bits)):
            model(x)
    found = measure(hooks, model, lambda: (model(x) - y).square().mean(), seed=1, probes=8)
    (item,) = [item for item in found if ":BatchNorm" in item.name or item.name.startswith("2:")]
    assert not item.by_perturbation
    made = hooks.state_dict()["derived"]["elements"]
    assert len(made) == derives
    exact = torch.autograd.grad((model(x) - y).square().mean(), parameters)
    plan = {**dict.fromkeys(other.name for other in found), **dict.fromkeys(made, bits), item.name: bits}
    error = 0.0
    for draw in range(16):
        with hooks.rehearsal(Plan(plan), draw=draw + 1):
            loss = (model(x) - y).square().mean()
        gradient = torch.autograd.grad(loss, parameters)
        error += sum(float((a - b).square().sum()) for a, b in zip(gradient, exact, strict=True)) / 16
    predicted = float(item.variance[bits - 1])
    assert error < 1.1 * predicted
    assert error > {2: 0.3, 4: 0.8, 8: 0.85}[bits] * predicted
    hooks.close()


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


POOLINGS = {
    "max_pool1d": ((4, 3, 600), lambda h: F.max_pool1d(h, 2)),
    "max_pool2d": ((4, 3, 30, 20), lambda h: F.max_pool2d(h, 2)),
    "max_pool2d, padded": ((3, 30, 20), lambda h: F.max_pool2d(h, 3, stride=2, padding=1, dilation=2, ceil_mode=True)),
    "max_pool3d": ((4, 3, 10, 10, 6), lambda h: F.max_pool3d(h, 2)),
    "MaxPool2d with indices": ((4, 3, 30, 20), lambda h: nn.MaxPool2d(2, return_indices=True)(h)[0]),
    "adaptive_max_pool1d": ((4, 3, 600), lambda h: F.adaptive_max_pool1d(h, 7)),
    "adaptive_max_pool2d": ((4, 3, 30, 20), lambda h: F.adaptive_max_pool2d(h, (7, 5))),
    "AdaptiveMaxPool3d": ((4, 3, 10, 10, 6), lambda h: nn.AdaptiveMaxPool3d(3)(h)),
    "fractional_max_pool2d": ((4, 3, 30, 20), lambda h: F.fractional_max_pool2d(h, 3, output_size=(9, 8))),
    "FractionalMaxPool3d": ((4, 3, 10, 10, 6), lambda h: nn.FractionalMaxPool3d(2, output_size=3)(h)),
}


@pytest.fixture
def no_values(monkeypatch):
    """Nobody may look at the values of integers, as on an accelerator, where that would wait."""

    def refuse(*_):
        raise AssertionError("the range of integers was looked for")

    monkeypatch.setattr(torch.Tensor, "aminmax", refuse)


def pooled(name, gact=None):
    """(The gradient, what was kept of indices by name: bits) of three steps."""
    shape, operator = POOLINGS[name]
    found = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(shape, requires_grad=True)
        with nullcontext() if gact is None else gact.step():
            y = operator(x)
        (y * y).sum().backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize("name", POOLINGS)
def test_indices_of_a_pooling_are_as_narrow_as_its_input_allows(name, no_values):
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="uniform", bits=8, min_numel=0))
    found = pooled(name, gact)
    rows = [row for row in gact.report().rows if row.dtype == torch.int64]
    assert {(row.codec, row.bits) for row in rows} == {("narrow", 16)}  # 600 places
    gact.detach()
    assert all(torch.equal(a != 0, b != 0) for a, b in zip(found, pooled(name), strict=True))


def test_indices_that_are_read_again_are_kept_once():
    gact = attached()
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    with gact.step():
        y, places = F.max_pool2d(x, 2, return_indices=True)
        back = F.max_unpool2d(y.exp(), places, 2)
    assert [row.codec for row in gact.report().rows if row.dtype == torch.int64] == ["narrow"]
    back.sum().backward()
    assert torch.equal(x.grad != 0, back != 0)


def test_more_places_than_a_type_holds():
    for count, bits in ((256, 8), (257, 16), (2**15, 16), (2**15 + 1, 32), (2**31, 32)):
        packed = codec.pack_narrow(torch.tensor([0, count - 1, 3]), count)
        assert packed.bits == bits
        assert codec.unpack(packed).tolist() == [0, count - 1, 3]
    assert codec.pack_narrow(torch.tensor([0, 3]), 2**31 + 1) is None
