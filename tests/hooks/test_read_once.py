"""What the graph of a gradient holds is let go as its last backward reads it."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from gact_dist.hooks import ReadOnce, ReplayError, read_once

SIZE = 64


class Noted(Function):
    """x ** 2, which asks for what it has saved twice and notes how many others of a list are alive by then."""

    alive: ClassVar[list[weakref.ref]] = []
    counts: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.detach().clone()
        Noted.alive.append(weakref.ref(kept.untyped_storage()))
        ctx.save_for_backward(kept)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Noted.counts.append(sum(storage() is not None for storage in Noted.alive))
        return grads[0] * (ctx.saved_tensors[0] + ctx.saved_tensors[0])


def chain(count: int = 4) -> tuple[Tensor, Tensor, ReadOnce]:
    x = torch.full((SIZE,), 1.01, requires_grad=True)
    Noted.alive.clear()
    Noted.counts.clear()
    y = x
    with read_once() as held:
        for _ in range(count):
            y = Noted.apply(y)
    return x, y.sum(), held


def gradient(x: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def test_the_last_backward_frees_what_it_has_read_and_gives_the_same():
    x, loss, held = chain()
    first = gradient(x, loss)
    assert sum(storage() is not None for storage in Noted.alive) == 4  # it was not the last
    held.is_last = True
    Noted.counts.clear()
    assert torch.equal(gradient(x, loss), first)
    # what a node has read is there until another reads
    assert Noted.counts == [4, 4, 3, 2]


def test_what_was_read_last_is_not_read_again():
    x, loss, held = chain()
    held.is_last = True
    gradient(x, loss)
    with pytest.raises(ReplayError, match="the last to read"):
        gradient(x, loss)


def test_nothing_is_left_of_a_graph_that_is_dropped():
    """The hooks are held by the nodes of the graph: what they knew of one would be a cycle that nobody sees."""
    x, loss, held = chain()
    held.is_last = True
    gradient(x, loss)
    del loss, held
    assert not any(storage() is not None for storage in Noted.alive)
