"""Recipes of operators that save none of their operands: sums, products with numbers, cat, parts and copies."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from derived_jobs import TOKENS, WIDTH, Job, Lambda, check_made_again, distance
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.handles import Recipe, Stored
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure, sections


class Affine(nn.Module):
    """A norm of which weight and bias are applied by hand."""

    def __init__(self, *shape):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(*shape) + 0.5), nn.Parameter(torch.rand(*shape))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * x


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs)


def of_gelu(function):
    """A function of GELU's result, which nothing else saves, in front of another linear layer."""
    return lambda: Lambda(lambda x, layer: layer(function(F.gelu(x))), linear())


def rejoined(parts):
    return torch.cat([*reversed(parts)], -1)


# by operator: what stands between two linear layers, and how many tensors are derived
OPERATORS = {
    "sum": (lambda: Lambda(lambda x: x + F.gelu(x)), 1),
    "sum with alpha": (lambda: Lambda(lambda x: torch.add(F.gelu(x), x, alpha=-0.5)), 1),
    "difference": (lambda: Lambda(lambda x: torch.sub(x, F.gelu(x), alpha=2)), 1),
    "difference the other way": (lambda: Lambda(lambda x: torch.rsub(x, F.gelu(x), alpha=2)), 1),
    "negative": (lambda: Lambda(lambda x: -F.gelu(x)), 1),
    "sum in place": (lambda: Lambda(lambda x, layer: F.gelu(x).add_(layer(x).tanh()), linear()), 1),
    "sum of what is broadcast": (lambda: Lambda(lambda x: x[:1].tanh() + F.gelu(x)), 1),
    "scaled residual": (lambda: Lambda(lambda x, layer, scale: x + scale(layer(x)), linear(), Scale()), 1),
    "weight and bias by hand": (lambda: Affine(WIDTH), 2),
    "weight and bias of channels": (lambda: Lambda(lambda x, n: n(x.view(4, 4, 16, WIDTH)), Affine(4, 1, 1)), 2),
    "times a number": (lambda: Lambda(lambda x: 0.5 * F.gelu(x)), 1),
    "divided by a number": (lambda: Lambda(lambda x: x / 8 + F.gelu(x)), 1),
    "cat": (lambda: Lambda(lambda x, layer: layer(torch.cat([x, F.gelu(x)], -1)), linear(2 * WIDTH)), 1),
    "stack": (lambda: Lambda(lambda x, layer: layer(torch.stack([x, F.gelu(x)], -1)).squeeze(-1), linear(2, 1)), 1),
    "chunks": (of_gelu(lambda y: rejoined(y.chunk(2, -1))), 1),
    "unequal parts": (of_gelu(lambda y: rejoined(y.split([16, 32, 16], -1))), 1),
    "slices": (of_gelu(lambda y: rejoined([y[:, :-16], y[:, -16:]])), 1),
    "every second row": (of_gelu(lambda y: y[1::2].contiguous()), 1),
    "one of two": (of_gelu(lambda y: y.view(-1, 2, WIDTH)[:, -1].clone()), 1),
    "unbind": (of_gelu(lambda y: torch.stack(y.view(-1, 2, WIDTH).unbind(-2)[::-1], 1)), 1),
    "transpose": (of_gelu(lambda y: y.view(-1, 4, WIDTH).transpose(-1, -2).reshape(-1, WIDTH)), 1),
    "permute": (of_gelu(lambda y: y.view(4, -1, WIDTH).permute(1, 0, -1).contiguous()), 1),
    "residual of batch norm": (
        lambda: Lambda(lambda x, layer, norm: F.relu(x + norm(layer(x))), linear(), nn.BatchNorm1d(WIDTH)),
        1,
    ),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_made_of_operands_that_others_saved(operator):
    """From sources that are stored exactly it is what it was, up to a few roundings of float32."""
    make, count = OPERATORS[operator]
    check_made_again(Job(make()), count, 1e-4)


def test_a_cast_of_what_is_stored():
    """Under autocast GELU reads what a linear layer gave, and a second linear layer a copy in low precision."""
    job = Job(Lambda(lambda x, layer: layer(x.float().square().tanh()) + x, linear()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.gradient()
        job.gradient()
        assert [row.name.partition("@")[0] for row in job.rows("derived")] == ["1:Tanh", "1.parts.0:ToCopy"]
        exact = job.untouched()
        assert distance(job.gradient(row.name for row in job.rows("quantised")), exact) < 2**-7


def test_of_a_buffer_nothing_is_known():
    """It has no graph, so a sum does not show what it added."""
    buffer = torch.randn(TOKENS, WIDTH)
    job = Job(Lambda(lambda x: F.gelu(x) + buffer))
    job.gradient()
    job.gradient()
    assert not job.rows("derived")


def test_a_chain_of_sums_ends():
    """Or the work of a backward would be quadratic in the number of layers."""

    def chain(x, *layers):
        for layer in layers:
            x = x + layer(x).tanh()
        return x

    job = Job(Lambda(chain, *(linear() for _ in range(8))))
    job.gradient()
    job.gradient()
    assert len(job.rows("derived")) == 7  # of nine that are read
    with job.gact.step():
        loss = job.model(job.x).sum()
    recipes = [found for found in gc.get_objects() if type(found) is Recipe and found.expression is not None]
    sums = [recipe.work // recipe.shape.numel() for recipe in recipes]
    assert sorted(sums) == [3, 3, 5, 5, 7, 7, 9]  # each decodes one tensor more, and adds it
    loss.backward()


@pytest.mark.parametrize("modified", ["the sum", "an operand", "an operand, before"])
def test_what_is_modified_in_place(modified):
    """Backward raises as in the untouched job, and the value at the time of the sum counts."""
    model = nn.ModuleList([linear(), linear()])
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    x = torch.randn(TOKENS, WIDTH)
    for step in range(3):
        with gact.step():
            hidden = model[0](x)
            activated = F.gelu(hidden)
            if modified == "an operand, before" and step == 2:
                with torch.no_grad():
                    hidden.mul_(2)
            total = hidden + activated
            loss = model[1](total).sum()
        codecs = {row.name.partition("@")[0]: row.codec for row in gact.report().rows}
        if step < 2:
            loss.backward()
            continue
        assert codecs["1:Add"] == ("quantised" if modified == "an operand, before" else "derived")
        if modified != "an operand, before":
            with torch.no_grad():
                (total if modified == "the sum" else hidden).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_two_backwards_and_what_a_dropped_graph_holds(monkeypatch):
    handles = []
    kept = Stored.keep

    def noted(stored, payload, tensor, offload):
        kept(stored, payload, tensor, offload)
        handles.append(weakref.ref(stored))

    monkeypatch.setattr(Stored, "keep", noted)
    job = Job(Lambda(lambda x, layer: layer(torch.cat([x, x + 0.5 * F.gelu(x)], -1)), linear(2 * WIDTH)))
    job.gradient()
    with job.gact.step():
        loss = job.model(job.x).square().mean()
    first, second = (torch.autograd.grad(loss, job.model.parameters(), retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert any(isinstance(handle().payload, Recipe) for handle in handles if handle() is not None)
    del loss
    gc.collect()
    assert not any(handle() for handle in handles)


@pytest.mark.parametrize("operator", ["sum", "cat", "scaled residual", "residual of batch norm"])
def test_exactly_stored_jobs_stay_as_they_are(operator):
    job = Job(OPERATORS[operator][0]())
    job.gact.detach()
    job.gact = gact_dist.attach(job.model, config=Config(policy="exact", derive=True))
    for _ in range(2):
        assert all(map(torch.equal, job.gradient(), job.untouched()))
    assert not job.rows("derived")


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.c, self.kind = linear(), linear(), linear(2 * WIDTH), kind
        self.scale, self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        if self.kind.startswith("sum"):
            y = self.a(x)
            x = x + self.scale * self.b(x + 0.5 * F.gelu(y))
            return x + self.c(torch.cat([y, y], -1)) / 2
        if self.kind.startswith("cat"):
            y = F.gelu(self.a(x))
            return x + self.c(torch.cat([y, x], -1)) + self.b(y)
        y = F.relu(x + self.norm(self.a(x)))
        return y + self.b(y) + self.c(torch.cat([x, y], -1))


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last = linear(), linear()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


MADE = {"sum": 4, "cat": 4, "batch norm": 4}
"""by kind, in two blocks"""


@pytest.mark.parametrize("kind", ["sum", "sum in sections", "cat", "cat in sections", "batch norm"])
def test_the_sensitivity_of_an_operand_counts_what_is_made_of_it(kind, monkeypatch):
    """Each tensor alone at 4 bits, all else exact: the predicted variance is the measured one.

    Eight directions and eight draws: see the test of the same in test_derived.py.
    """
    if "in sections" in kind:
        monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    torch.manual_seed(0)
    model, x, y = Blocks(kind), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)

    def loss():
        return (model(x) - y).square().mean()

    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0)
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)):
            loss()
    found = measure(hooks, model, loss, seed=1, probes=8)
    made = hooks.state_dict()["derived"]["elements"]
    assert len(made) == MADE[kind.removesuffix(" in sections")]
    assert not {item.name for item in found} & set(made)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exact = torch.autograd.grad(loss(), parameters, allow_unused=True)
    plan = {**dict.fromkeys((item.name for item in found), None), **dict.fromkeys(made, 4)}
    for item in found:
        error = 0.0
        for draw in range(8):
            with hooks.rehearsal(Plan({**plan, item.name: 4}), draw=draw + 1):
                rounded = loss()
            gradient = torch.autograd.grad(rounded, parameters, allow_unused=True)
            pairs = [(a, b) for a, b in zip(gradient, exact, strict=True) if a is not None]
            error += sum(float((a - b).square().sum()) for a, b in pairs) / 8
        assert float(item.variance[3]) == pytest.approx(error, rel=0.2), item.name
