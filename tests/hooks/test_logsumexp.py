"""Fused attention: the logsumexp that is kept is that of the rounded queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_dist
from gact_dist import Config
from gact_dist.hooks import logsumexp

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
@pytest.mark.parametrize("bits", [2, 6])
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


@pytest.mark.parametrize("config", [uniform(7), Config(policy="exact")])
def test_what_has_many_bits_keeps_the_logsumexp_of_the_forward(config):
    model, exact = Attention(), Attention()
    stepped(model, config, batch())
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
    monkeypatch.setattr(logsumexp, "_MOST_BITS", 0)
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
