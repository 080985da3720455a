"""The probabilities of attention that is not fused are made again from queries and keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from derived_jobs import distance
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import gact_dist
from gact_dist import Config
from gact_dist.hooks.boolean_masks import as_added
from gact_dist.policies import Plan

SAMPLES, HEADS, TOKENS, HEAD_WIDTH = 2, 4, 32, 8
WIDTH = HEADS * HEAD_WIDTH
PADDED = (torch.arange(TOKENS) < torch.tensor([[32], [20]]))[:, None, None]
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
BIAS = torch.linspace(-2.0, 2.0, TOKENS * TOKENS).view(TOKENS, TOKENS)
MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": PADDED},
    "of each pair": {"attn_mask": PADDED & CAUSAL},
    "expanded": {"attn_mask": PADDED.expand(-1, HEADS, TOKENS, -1)},
    "a row without any": {"attn_mask": CAUSAL & (torch.arange(TOKENS) > 3)[:, None]},
    "of numbers": {"attn_mask": as_added(PADDED & CAUSAL, torch.float32)},
    "a bias": {"attn_mask": BIAS},
    "a part of a bias": {"attn_mask": torch.cat([BIAS, BIAS], 1)[:, 8 : TOKENS + 8]},
}


NUMBERS = as_added(PADDED & CAUSAL, torch.float32).clamp_min(torch.finfo(torch.float32).min)
HIDING = {
    "none": lambda scores: scores,
    "a mask of numbers": lambda scores: scores + NUMBERS,
    "of each head": lambda scores: scores + NUMBERS.repeat(1, HEADS, 1, 1),
    "the mask first": lambda scores: NUMBERS + scores,
    "two masks": lambda scores: scores + NUMBERS + as_added(CAUSAL, torch.float32),
    "filled": lambda scores: scores.masked_fill(~(PADDED & CAUSAL), -math.inf),
    "rows without any": lambda scores: scores.masked_fill(~(CAUSAL & (torch.arange(TOKENS) > 3)[:, None]), -1e9),
    "in place": lambda scores: scores.mul_(1.0).add_(NUMBERS),
    "another shape": lambda scores: (scores + NUMBERS).flatten(0, 1),
}


def in_operators(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, mask: str = "none", added=None) -> Tensor:
    scores = HIDING[mask](q @ k.transpose(-2, -1) * HEAD_WIDTH**-0.5)
    scores = scores if added is None else scores + added
    probabilities = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype).view(*q.shape[:-1], -1)
    return F.dropout(probabilities, dropout_p) @ v


class Layer(nn.Module):
    """Attention between projections. attention: torch's own by default, which is looked up. options: of it."""

    def __init__(self, attention, options):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention, self.options = attention, options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attention = self.attention or F.scaled_dot_product_attention
        return x + self.out(attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


class Counted(TorchDispatchMode):
    """Products of matrices in batches."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


class Job:
    """Two layers with the same options, in steps with the same random numbers."""

    def __init__(self, attention=None, config=None, dtype=torch.float32, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(attention, options) for _ in range(2))).to(dtype)
        self.x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype)
        self.gact = gact_dist.attach(
            self.model, config=config or Config(policy="uniform", bits=4, derive=True, min_numel=16)
        )

    def loss(self) -> Tensor:
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):
            return self.model(self.x).square().mean()

    def untouched(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(), self.model.parameters()))

    def step(self) -> Tensor:
        with self.gact.step():
            return self.loss()

    def gradient(self, stored_exactly=()) -> list[Tensor]:
        hooks = self.gact._schedule.hooks
        hooks.plan = Plan(dict.fromkeys(stored_exactly), hooks.plan.default)
        return list(torch.autograd.grad(self.step(), self.model.parameters()))

    def names(self, codec: str, operator: str = "") -> list[str]:
        return [row.name for row in self.gact.report().rows if row.codec == codec and operator in row.name]


def nodes(root, name: str) -> list:
    """The nearest ones first."""
    found, pending = {}, [root]
    while pending:
        node = pending.pop(0)
        if node is not None and node not in found:
            found[node] = None
            pending += [below for below, _ in node.next_functions]
    return [node for node in found if node.name() == name]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("mask", MASKS)
def test_from_exact_queries_and_keys_they_are_what_they_were(mask, dropout):
    job = Job(**MASKS[mask], dropout_p=dropout)
    exact = job.untouched()
    for _ in range(3):
        job.gradient()
    assert len(job.names("derived", "Softmax")) == 2
    assert not [name for name in job.names("quantised") if "Softmax" in name]
    assert distance(job.gradient(job.names("quantised")), exact) < 1e-5
    assert 1e-3 < distance(job.gradient(), exact) < 0.5


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("mask", HIDING)
def test_attention_in_operators(mask, dropout):
    """What the mask hides is seen in the probabilities."""
    job = Job(in_operators, dropout_p=dropout, mask=mask)
    exact = job.untouched()
    for _ in range(3):
        job.gradient()
    assert len(job.names("derived", "Softmax")) == 2
    assert distance(job.gradient(job.names("quantised")), exact) < 1e-5


@pytest.mark.parametrize(("mask", "heads"), [("a mask of numbers", 1), ("of each head", HEADS)])
def test_one_bit_for_each_pair_of_tokens_is_kept_of_a_mask(mask, heads):
    """Of all heads, where they have the same; beside the number that scores are divided by."""
    job = Job(in_operators, mask=mask)
    for _ in range(2):
        job.gradient()
    rows = [row for row in job.gact.report().rows if row.codec == "derived" and "Softmax" in row.name]
    assert [row.bytes for row in rows] == 2 * [SAMPLES * heads * TOKENS * TOKENS // 8 + 8]


@pytest.mark.parametrize("mask", ["of each pair", "a bias"])
def test_they_are_the_softmax_of_what_the_backward_reads(mask):
    """So their rows sum to one, whatever queries and keys were rounded to."""
    job = Job(**MASKS[mask])
    for _ in range(2):
        job.gradient()
    root = job.step().grad_fn
    found = nodes(root, "SafeSoftmaxBackward0")
    assert len(found) == 2
    for node in found:
        product = nodes(node, "BmmBackward0")[0]
        scores = (product._saved_self @ product._saved_mat2).view(SAMPLES, HEADS, TOKENS, TOKENS)
        added = MASKS[mask]["attn_mask"]
        scores = scores + (as_added(added, torch.float32) if added.dtype is torch.bool else added)
        torch.testing.assert_close(node._saved_result, torch.softmax(scores, -1))


def test_a_mask_is_stored_once_and_may_be_another_in_every_step():
    masks = [MASKS["of each pair"], MASKS["a bias"], {"is_causal": True}, {}, MASKS["of numbers"]]
    job = Job(**masks[0])
    for _ in range(2):
        job.gradient()
    sources = job.names("quantised")
    for options in masks:
        for layer in job.model:
            layer.options = options
        exact = job.untouched()
        assert distance(job.gradient(sources), exact) < 1e-5
        kept = [row for row in job.gact.report().rows if row.name.endswith(" mask")]
        assert len(kept) == ("attn_mask" in options)


def test_no_mask_is_kept_for_probabilities_that_are_stored():
    job = Job(**MASKS["a bias"])
    for _ in range(2):
        job.gradient()
    assert [row.name for row in job.gact.report().rows if row.name.endswith(" mask")]
    job.gradient(job.names("derived", "Softmax"))
    assert not job.names("derived", "Softmax")
    assert not [row.name for row in job.gact.report().rows if row.name.endswith(" mask")]


def test_a_mask_may_be_written_over_after_the_forward():
    bias = BIAS.clone()
    job = Job(attn_mask=bias)
    exact = job.untouched()
    for _ in range(2):
        job.gradient()
    names = job.names("quantised")
    job.gact._schedule.hooks.plan = Plan(dict.fromkeys(names), 4)
    loss = job.step()
    bias.zero_()
    assert distance(torch.autograd.grad(loss, job.model.parameters()), exact) < 1e-5


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (in_operators, {"added": BIAS}),
        (in_operators, {"added": NUMBERS, "mask": "a mask of numbers"}),
        (in_operators, {"added": 1.0}),
        (in_operators, {"added": nn.Parameter(BIAS.clone()) * 2.0}),
        (None, {"attn_mask": nn.Parameter(BIAS.clone()) * 2.0}),
        (None, {"attn_mask": BIAS, "config": Config(policy="exact")}),
    ],
    ids=["a bias", "two masks", "a number", "a bias that learns", "the same, in the call", "exact"],
)
def test_where_they_are_stored(attention, options):
    """Of a bias that hides nothing alone. Two masks that do are none of these."""
    job = Job(attention, **options)
    exact = torch.autograd.grad(job.loss(), job.model.parameters(), retain_graph=True)
    for _ in range(3):
        found = torch.autograd.grad(job.step(), job.model.parameters(), retain_graph=True)
    assert bool(job.names("derived", "Softmax")) == ("mask" in options)
    if "config" in options:
        assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
    else:
        assert distance(found, exact) < 0.5


@pytest.mark.parametrize("kind", ["a function of them", "another factor", "a layer's", "a norm's"])
def test_of_scores_that_are_stored_themselves_no_probabilities_are_made(kind):
    factor = nn.Parameter(torch.ones(TOKENS, TOKENS))

    def attention(q, k, v):
        scores = q @ k.transpose(-2, -1)
        if kind == "a function of them":
            scores = scores + 0.1 * scores.tanh()
        elif kind == "another factor":
            scores = scores * factor
        elif kind == "a norm's":
            scores = F.layer_norm(scores, scores.shape[-1:])
        else:
            scores = F.linear(scores, factor).exp().log()
        return F.softmax(scores, -1) @ v

    job = Job(attention)
    job.loss = lambda: job.model(job.x).square().mean()
    for _ in range(3):
        job.gradient()
    assert not job.names("derived", "Softmax")
    assert len([row for row in job.gact.report().rows if "Softmax" in row.name]) == 2


def test_a_mask_that_does_more_from_some_step_on_is_seen_where_a_step_is_observed():
    job = Job(in_operators, added=NUMBERS)
    for _ in range(2):
        job.gradient()
    assert len(job.names("derived", "Softmax")) == 2
    for layer in job.model:
        layer.options = {"added": BIAS}
    job.gact._schedule.hooks._roles.observe_next = True
    for _ in range(2):
        job.gradient()
        assert not job.names("derived", "Softmax")


@pytest.mark.parametrize("value", [0.0, -100.0, True, np.float64(0.5)])
def test_what_is_filled_in_and_does_not_hide_is_seen(value):
    job = Job(lambda q, k, v: (q @ k.transpose(-2, -1)).masked_fill(~CAUSAL, value).softmax(-1) @ v)
    exact = job.untouched()
    for _ in range(2):
        job.gradient()
    assert not job.names("derived", "Softmax")
    assert distance(job.gradient(job.names("quantised")), exact) < 1e-5


def test_where_the_masks_are_more_than_an_observed_step_has_seen_they_are_stored():
    job = Job(in_operators)
    for _ in range(2):
        job.gradient()
    assert len(job.names("derived", "Softmax")) == 2
    for layer in job.model:
        layer.options = {"added": BIAS}
    exact = job.untouched()
    assert distance(job.gradient(), exact) < 0.5
    assert not job.names("derived", "Softmax")


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("options", [{}, MASKS["padding"]])
def test_queries_and_keys_are_multiplied_once_in_a_backward(options, dropout):
    job = Job(dropout_p=dropout, **options)
    for _ in range(2):
        job.gradient()
    assert job.names("derived", "Softmax")
    loss, untouched, counts = job.step(), job.loss(), []
    for each in (loss, untouched):
        with Counted() as counted:
            each.backward()
        counts.append(counted.products)
    assert counts[0] - counts[1] == len(job.model)


@pytest.mark.parametrize("mask", ["of each pair", "causal"])
def test_low_precision(mask):
    """What one step of bfloat16 changes in scores of some size."""
    job = Job(dtype=torch.bfloat16, **MASKS[mask])
    exact = job.untouched()
    for _ in range(2):
        job.gradient()
    assert len(job.names("derived", "Softmax")) == 2
    assert distance(job.gradient(job.names("quantised")), exact) < 0.03


def test_a_plan_with_them_is_compared_with_the_exact_gradient():
    """Bits adapt, block by block; what is predicted is what is measured beside the exact gradient."""
    job = Job(config=Config(bits=4, min_numel=16, adapt_interval=2), **MASKS["of each pair"], dropout_p=0.1)
    for _ in range(6):
        job.model.zero_grad()
        with job.gact.step(lambda _: job.loss(), job.x):
            loss = job.loss()
        loss.backward()
    assert len(job.names("derived", "Softmax")) == 2
    adaptation = job.gact.adaptation
    assert adaptation.kept
    assert math.isfinite(adaptation.predicted_variance)
