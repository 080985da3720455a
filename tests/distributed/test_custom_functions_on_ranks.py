"""A custom attention whose backward has no derivative, which runs again on its rounded inputs, on two ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wrapped
from messages import Messages
from small_models import loss_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from unusual_jobs import FlashAttention, Kernel

import gact_dist
from gact_dist import Config
from gact_dist._patches import replaced
from gact_dist.hooks import functions_again

STEPS, WIDTH, WORDS = 4, 32, 37


class Opaque(FlashAttention):
    """Its backward is out of autograd's sight, as that of a kernel is."""

    backward: Any = staticmethod(once_differentiable(FlashAttention.backward))


class Shared(Opaque):
    """Its forward reaches the other ranks, so a backward must not run it again where nobody has asked for it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nothing = torch.zeros(())
        dist.all_reduce(nothing)
        return FlashAttention.forward(ctx, q, k, v) + nothing


class Weighted(FlashAttention):
    """It is given a parameter as well, which sharding frees between forwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        saving = SimpleNamespace(save_for_backward=lambda *saved: ctx.save_for_backward(*saved, weight))
        return FlashAttention.forward(saving, q, k, v) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        *saved, weight = ctx.saved_tensors
        through = FlashAttention.backward(SimpleNamespace(saved_tensors=saved), grads[0] * weight)
        return *through, (grads[0] * saved[3]).sum((0, 1, 2))


def by_hand(*given: Tensor) -> Tensor:
    return checkpoint(Opaque.apply, *given[:3], use_reentrant=False)


def by_itself(*given: Tensor) -> Tensor:
    return Opaque.apply(*given[:3])


def shared(*given: Tensor) -> Tensor:
    return Shared.apply(*given[:3])


def weighted(*given: Tensor) -> Tensor:
    return Weighted.apply(*given)


def viewed(*given: Tensor) -> Tensor:
    """It saves views of its inputs, over which its backward writes."""
    return Kernel.apply(given[0].contiguous(), given[1].contiguous()) + given[2]


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.weight = nn.Parameter(torch.ones(WIDTH // 4)) if attend is weighted else None
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v, self.weight).transpose(1, 2).flatten(-2))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(
    wrapper: str, attend: Callable[..., Tensor], config: Config
) -> tuple[dict, list[float], list[str], list[str]]:
    """(plan, losses, what was logged, codecs of block inputs) of a rank."""
    torch.manual_seed(0)
    model = Model(attend)
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, WORDS, (8, 25))
    model = wrapped.WRAPPERS[wrapper](model, model.blocks)
    with Messages(logging.DEBUG) as messages:
        gact = gact_dist.attach(model, config=config)
        losses = wrapped.losses_of(gact, model, loss_of(model), (tokens[:, :-1], tokens[:, 1:]), STEPS)
    inputs = [row.codec for row in gact.report().rows if "BlockInput" in row.name]
    gact.detach()
    return gact.plan, losses, messages.texts, inputs


@pytest.mark.parametrize("attend", [by_hand, by_itself, shared, weighted, viewed])
@pytest.mark.parametrize("wrapper", wrapped.WRAPPERS)
def test_inputs_of_a_custom_attention_are_compressed_on_all_ranks_alike(ranks, wrapper, attend):
    untouched = ranks(trained, wrapper, attend, Config(policy="off"))
    as_it_is = [Config(policy="exact"), Config(bits=None, retained_bytes=10**9, min_numel=16)]
    exact = [ranks(trained, wrapper, attend, config) for config in as_it_is]
    compressed = ranks(trained, wrapper, attend, Config(bits=6, min_numel=16))
    assert compressed[0][0] == compressed[1][0]
    expected = {shared: 0, viewed: 6}.get(attend, 9)
    for rank in range(2):
        assert not any("by perturbation" in text for text in compressed[rank][2])
        assert sum("BlockInput" in name for name in compressed[rank][0]) == expected
        assert compressed[rank][3].count("quantised") == expected
        first, last = untouched[rank][1][0], untouched[rank][1][-1]
        assert all(found[rank][1] == untouched[rank][1] for found in exact)
        assert compressed[rank][1] == pytest.approx(untouched[rank][1], abs=0.05 * abs(first - last))


def trained_where_one_rank_refuses(config: Config) -> tuple[dict, list[float], list[str], list[str]]:
    """As if one rank had too little memory to try a function."""
    if dist.get_rank() == 0:
        return trained("FSDP2", by_itself, config)
    with replaced(functions_again, "_gives_the_same", lambda *_: False):
        return trained("FSDP2", by_itself, config)


def test_a_rank_on_which_a_function_cannot_run_again_keeps_it_exactly(ranks):
    untouched = ranks(trained, "FSDP2", by_itself, Config(policy="off"))
    found = ranks(trained_where_one_rank_refuses, Config(bits=6, min_numel=16))
    assert found[0][0] == found[1][0]
    assert [rank[3] for rank in found] == [["quantised"] * 9, []]
    assert any("kept exactly" in text for text in found[1][2])
    for rank in range(2):
        assert found[rank][1] == pytest.approx(untouched[rank][1], rel=1e-3)
