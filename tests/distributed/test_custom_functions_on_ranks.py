"""A custom attention whose backward has no derivative, under a checkpoint of its own, on two ranks."""

from __future__ import annotations

import logging
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
from unusual_jobs import FlashAttention

import gact_dist
from gact_dist import Config

STEPS, WIDTH, WORDS = 4, 32, 37


class Opaque(FlashAttention):
    """Its backward is out of autograd's sight, as that of a kernel is."""

    backward: Any = staticmethod(once_differentiable(FlashAttention.backward))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = checkpoint(Opaque.apply, q, k, v, use_reentrant=False)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(wrapper: str, config: Config) -> tuple[dict, list[float], list[str]]:
    """(plan, losses, what was logged) of a rank."""
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, WORDS, (8, 25))
    model = wrapped.WRAPPERS[wrapper](model, model.blocks)
    with Messages(logging.DEBUG) as messages:
        gact = gact_dist.attach(model, config=config)
        losses = wrapped.losses_of(gact, model, loss_of(model), (tokens[:, :-1], tokens[:, 1:]), STEPS)
    return gact.plan, losses, messages.texts


@pytest.mark.parametrize("wrapper", wrapped.WRAPPERS)
def test_inputs_of_a_custom_attention_are_compressed_on_all_ranks_alike(ranks, wrapper):
    untouched = ranks(trained, wrapper, Config(policy="off"))
    exact = ranks(trained, wrapper, Config(policy="exact"))
    compressed = ranks(trained, wrapper, Config(bits=6, min_numel=16))
    assert compressed[0][0] == compressed[1][0]
    assert sum("BlockInput" in name for name in compressed[0][0]) == 9
    for rank in range(2):
        assert not any("by perturbation" in text for text in compressed[rank][2])
        first, last = untouched[rank][1][0], untouched[rank][1][-1]
        assert exact[rank][1] == untouched[rank][1]
        assert compressed[rank][1] == pytest.approx(untouched[rank][1], abs=0.05 * abs(first - last))
