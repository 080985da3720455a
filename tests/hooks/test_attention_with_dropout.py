"""Fused attention with dropout, which torch has on GPUs alone: an emulated kernel under torch's own autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks.fused_attention import LogsumexpFit

WIDTH, HEADS, LENGTH, BATCH, DROPOUT = 32, 4, 24, 4, 0.25
attention = torch.ops.aten._scaled_dot_product_efficient_attention


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf")) if causal else scores


def kept_by_dropout(shape: torch.Size, seed: Tensor, probability: float) -> Tensor:
    """What a kernel draws again in its backward, of the same seed."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(int(seed)))
    return (drawn >= probability) / (1 - probability)


class Kernel:
    """Forward and backward of the operator on a CPU; the backward checks what it is given."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        """of the rows of the probabilities that each backward has found"""
        self.runs: list[float] = []
        """the dropout of each forward"""

    def forward(self, q: Any, k: Any, v: Any, bias: Any, *options: Any, scale: float | None = None) -> Any:
        _, dropout, causal = (*options, False)[:3]
        self.runs.append(dropout)
        scores, seed = scores_of(q, k, causal, scale), torch.randint(1 << 30, ())
        out = (scores.softmax(-1) * kept_by_dropout(scores.shape, seed, dropout)) @ v
        return out, scores.logsumexp(-1), seed, torch.zeros((), dtype=torch.int64)

    def backward(self, g: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any, _: Any, *options: Any,
                 scale: float | None = None) -> Any:  # fmt: skip
        dropout, _, causal = (*options, False)[:3]
        p = (scores_of(q, k, causal, scale) - lse[..., None]).exp()
        self.sums.append(p.sum(-1))
        kept = kept_by_dropout(p.shape, seed, dropout)
        of_p = g @ v.transpose(-1, -2) * kept
        of_scores = p * (of_p - (g * out).sum(-1, keepdim=True)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, (p * kept).transpose(-1, -2) @ g, None


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    emulated, library = Kernel(), torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", emulated.forward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", emulated.backward, "CPU")
    yield emulated
    library._destroy()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        made = attention(4 * q, 4 * k, v, None, True, DROPOUT, True)[0]
        return self.out(made.transpose(1, 2).flatten(2))


def gradients(model: nn.Module, gact: gact_dist.Controller | None = None) -> Tensor:
    torch.manual_seed(1)  # the same dropout
    x = torch.randn(BATCH, LENGTH, WIDTH)
    if gact is None:
        loss = (model(x) - 1).square().mean()
    else:
        with gact.step():
            loss = (model(x) - 1).square().mean()
    return torch.cat([found.flatten() for found in torch.autograd.grad(loss, [*model.parameters()])])


def test_the_emulated_kernel_is_the_derivative_of_itself(kernel):
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(*qkv: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attention(*qkv, None, True, DROPOUT, True)[0]

    assert torch.autograd.gradcheck(run, (q, k, v), check_undefined_grad=False)


@pytest.mark.parametrize("policy", ["exact", "uniform"])
def test_where_all_is_kept_as_it_is_it_is_bitwise_the_untouched_job(kernel, policy):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    exact = gradients(model)
    options = {} if policy == "exact" else {"bits": 4, "min_numel": 1 << 30}
    gact = gact_dist.attach(model, config=Config(policy=policy, **options))
    assert all(torch.equal(gradients(model, gact), exact) for _ in range(3))
    gact.detach()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("derives", [False, True])
def test_the_output_is_kept_and_the_logsumexp_fits_what_is_kept_of_queries_and_keys(kernel, bits, derives):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    gact = gact_dist.attach(model, config=Config(bits=bits, min_numel=16, derive=derives))
    for _ in range(2):  # who reads what is known after the first
        kernel.sums.clear()
        kernel.runs.clear()
        gradients(model, gact)
    assert kernel.runs == [DROPOUT, 0.0] * 2  # the job's own, and what fits the logsumexp
    assert len(kernel.sums) == 2
    for sums in kernel.sums:
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-4, atol=0)
    rows = [row.codec for row in gact.report().rows if "ScaledDotProductAttention" in row.name]
    assert rows == ["quantised"] * 2
    gact.detach()


def error(model: nn.Module, exact: Tensor) -> float:
    """Mean of the squared distance from the exact gradient, at 2 bits."""
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=2, min_numel=16))
    found = [float((gradients(model, gact) - exact).square().sum()) for _ in range(12)]
    gact.detach()
    return sum(found[2:]) / 10


def test_without_the_fit_the_gradient_would_be_off_by_far_more(kernel, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    exact = gradients(model)
    fitted = error(model, exact)
    monkeypatch.setattr(LogsumexpFit, "after", lambda *_: None)
    assert fitted < error(model, exact) / 4
