"""Fused attention: what its backward reads fits the rounded queries, keys and values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_dist
from gact_dist import Config
from gact_dist.hooks import fused_attention
from gact_dist.hooks.readers import Readers

HEADS, LENGTH, WIDTH = 4, 32, 64
ATTENDED: list[Tensor] = []
"""the output of the last attention"""
FUSED = "ScaledDotProductFlashAttentionForCpuBackward0"


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    ATTENDED.clear()


class Attention(nn.Module):
    """[samples, length, width] -> the same. sharpness: of its scores."""

    def __init__(self, sharpness: float = 1.0, scale: float | None = None, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.sharpness, self.scale, self.options = sharpness, scale, options

    def forward(self, x: Tensor) -> Tensor:
        projections = self.query(x) * self.sharpness, self.key(x), self.value(x)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projections)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **self.options)
        ATTENDED[:] = [attended]
        return attended.transpose(1, 2).flatten(2)


class FewKeys(Attention):
    """Attends to the first two."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k[:, :, :2].contiguous(), v[:, :, :2])
        ATTENDED[:] = [attended]
        return attended.transpose(1, 2).flatten(2)


def batch(samples: int = 8) -> Tensor:
    return torch.randn(samples, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def stepped(model: nn.Module, config: Config, x: Tensor) -> Tensor:
    """The loss of a second step, for the first one learns which tensors are what."""
    gact = gact_dist.attach(model, config=config)
    for _ in range(2):
        with gact.step():
            loss = model(x).square().mean()
    gact.detach()
    return loss


def uniform(bits: int) -> Config:
    return Config(policy="uniform", bits=bits, min_numel=16)


MASK = torch.zeros(LENGTH, LENGTH).masked_fill(torch.rand(LENGTH, LENGTH) < 0.3, -math.inf).fill_diagonal_(0.0)
OPTIONS = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": MASK}, "scale": {"scale": 0.5}}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bits", [2, 8])
def test_the_kept_logsumexp_is_that_of_the_kept_queries_and_keys(name, bits):
    options = OPTIONS[name]
    model = Attention(**options)
    stepped(model, uniform(bits), batch())
    node = ATTENDED[0].grad_fn
    assert node.name() == FUSED
    scores = node._saved_query @ node._saved_key.transpose(-2, -1) * (model.scale or (WIDTH // HEADS) ** -0.5)
    if "attn_mask" in options:
        scores = scores + MASK
    if "is_causal" in options:
        scores = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -math.inf)
    torch.testing.assert_close(node._saved_logsumexp, torch.logsumexp(scores, -1))


@pytest.mark.parametrize("name", [*OPTIONS, "few keys"])
def test_what_is_exact_keeps_the_logsumexp_of_the_forward(name):
    """It has as many numbers as the mask, for 8 examples of 4 heads and 32 rows, or as 2 keys of 16 columns have."""
    model, exact = (FewKeys() if name == "few keys" else Attention(**OPTIONS[name]) for _ in range(2))
    stepped(model, Config(policy="exact"), batch())
    kept = ATTENDED[0].grad_fn._saved_logsumexp
    exact(batch())
    assert torch.equal(kept, ATTENDED[0].grad_fn._saved_logsumexp)


def error_of(bits: int, sharpness: float) -> float:
    """Of the gradient of queries and keys, squared, relative to its square."""
    model, x = Attention(sharpness), batch()
    parameters = [model.query.weight, model.key.weight]
    exact = torch.autograd.grad(model(x).square().mean(), parameters)
    total, draws = 0.0, 4
    for seed in range(draws):
        config = Config(policy="uniform", bits=bits, min_numel=16, seed=seed)
        found = torch.autograd.grad(stepped(model, config, x), parameters)
        total += sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) / draws
    return total / sum(float(part.square().sum()) for part in exact)


@pytest.mark.parametrize(("bits", "sharpness", "gain"), [(2, 8.0, 5.0), (4, 8.0, 1.2)])
def test_gradients_are_nearer_than_with_the_logsumexp_of_the_forward(bits, sharpness, gain, monkeypatch):
    fitted = error_of(bits, sharpness)
    monkeypatch.setattr(fused_attention, "_is_rounded", lambda _: False)
    assert error_of(bits, sharpness) > gain * fitted


def test_a_second_backward_and_grouped_queries_work():
    class Grouped(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            attended = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
            return attended.transpose(1, 2).flatten(2)

    model = Grouped()
    loss = stepped(model, uniform(3), batch())
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(part.isfinite().all()) for part in first)


# -- the output made again ---------------------------------------------------------------------------------------


class Projected(Attention):
    """With a projection that reads the output as well."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.first, self.dropout, self.last = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


class Grouped(Projected):
    """Half as many heads of keys and values, and dropout of the output."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        ATTENDED[:] = [attended]
        return self.last(self.dropout(attended.transpose(1, 2).flatten(2)))


def derived(bits: int) -> Config:
    return Config(policy="uniform", bits=bits, min_numel=16, derive=True)


@pytest.fixture
def runs(monkeypatch) -> list[tuple[Tensor, ...]]:
    """What fused attention was run again with: query, key and value, and its results."""
    found: list[tuple[Tensor, ...]] = []
    operator = fused_attention.OPERATORS[FUSED]

    def run(qkv, *arguments, **options):
        results = operator.run(qkv, *arguments, **options)
        found.append((*qkv, *results))
        return results

    monkeypatch.setitem(fused_attention.OPERATORS, FUSED, replace(operator, run=run))
    return found


@pytest.mark.parametrize("name", [*OPTIONS, "grouped"])
@pytest.mark.parametrize("bits", [3, 8])
def test_the_output_is_that_of_the_rounded_operands_and_made_once(name, bits, runs):
    model, x = Grouped() if name == "grouped" else Projected(**OPTIONS[name]), batch()
    gact = gact_dist.attach(model, config=derived(bits))
    for _ in range(2):
        with gact.step():
            loss = model(x).square().mean()
    node = ATTENDED[0].grad_fn
    assert not runs
    codecs = [row.codec for row in gact.report().rows]
    assert codecs.count("derived") == 2 + (name == "grouped")  # the logsumexp as well, and the dropout of the output
    assert codecs.count("exact") == ("mask" in name)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert len(runs) == 1
    *operands, output, logsumexp = runs[0]
    for kept, seen in zip((node._saved_query, node._saved_key, node._saved_value), operands, strict=True):
        assert torch.equal(kept, seen)
    assert torch.equal(node._saved_output, output)
    assert torch.equal(node._saved_logsumexp, logsumexp)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(part.isfinite().all()) for part in first)


def test_what_is_made_again_is_freed_in_the_backward(runs):
    model = Projected()
    gact = gact_dist.attach(model, config=derived(4))
    for _ in range(2):
        with gact.step():
            loss = model(batch()).square().mean()
    storages: list[tuple[int, int]] = []

    def freed(_: Tensor) -> None:
        storages[:] = [torch.UntypedStorage._expired(made) for made in weak]

    weak: list[int] = []
    model.first.weight.register_hook(freed)  # after the attention's own backward
    model.last.weight.register_hook(lambda _: weak.extend(part.untyped_storage()._weak_ref() for part in runs.pop()))
    loss.backward(retain_graph=True)
    assert storages == [True] * 5
    for made in weak:
        torch.UntypedStorage._free_weak_ref(made)


def test_exact_operands_store_the_output():
    model = Projected()
    for config, expected in ((Config(policy="exact", derive=True), "exact"), (derived(4), "derived")):
        gact = gact_dist.attach(model, config=config)
        for _ in range(2):
            with gact.step():
                loss = model(batch()).square().mean()
        found = [row.codec for row in gact.report().rows if "ScaledDotProductAttention" in row.name]
        assert found == [expected]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        gact.detach()
        if expected == "exact":
            untouched = torch.autograd.grad(model(batch()).square().mean(), list(model.parameters()))
            assert all(torch.equal(a, b) for a, b in zip(gradients, untouched, strict=True))


@pytest.mark.parametrize("reads", ["the output", "the same operands"])
def test_two_attentions_are_made_again_one_by_one(reads, runs):
    """The output is the query of the next attention, without a projection: that is not its own backward."""

    class Twice(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(self.first(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            once = F.scaled_dot_product_attention(q, k, v)
            again = F.scaled_dot_product_attention(once if reads == "the output" else q, k, v)
            return self.last((once * again).transpose(1, 2).flatten(2))

    model = Twice()
    gact = gact_dist.attach(model, config=derived(4))
    for _ in range(2):
        with gact.step():
            loss = model(batch()).square().mean()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert len(runs) == 2
    made = [row for row in gact.report().rows if row.codec == "derived"]
    assert len(made) >= 4  # two outputs, two logsumexps
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert len(runs) == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_adaptation_does_not_take_the_logsumexp_for_the_noise_of_a_dropout(monkeypatch):
    """Then a step after it would be observed once more, and hold the tensors whose readers it waits for."""
    monkeypatch.setattr(torch, "empty", torch.zeros)  # as fresh memory often is
    model, wait, observed = Attention(), Readers.wait, []

    def noted(readers: Readers, *args, **options) -> None:
        observed.append(readers)
        wait(readers, *args, **options)

    monkeypatch.setattr(Readers, "wait", noted)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=16))
    in_step, x = [], batch()
    for given in ((), (lambda x: model(x).square().mean(), batch()), (), ()):
        with gact.step(*given):
            observed.clear()
            model(x).square().mean().backward()
        in_step.append(bool(observed))
    gact.detach()
    assert in_step[0]
    assert not any(in_step[1:])
