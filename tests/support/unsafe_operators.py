"""Operators that no table knows, whose backward cannot bear that what it reads is rounded, and models with them.

The exact gradient of each is harmless: the incoming one, or a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class Divides(Function):
    """Passes x on; the backward divides small positive numbers, which it keeps by itself, by a saved copy of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, small: Tensor, copy: Tensor) -> Tensor:
        ctx.kept = small.detach()
        ctx.save_for_backward(copy)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.kept / ctx.saved_tensors[0], None, None


class TakesLog(Function):
    """Passes x on; the backward takes the logarithm of two copies of probabilities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, likely: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(likely, copy)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        likely, copy = ctx.saved_tensors
        return grads[0] * (1.0 + torch.log(likely) - torch.log(copy)), None, None


class Compares(Function):
    """The largest of each row; the backward looks for it by comparing, and divides by how many there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest = x.amax(-1, keepdim=True).expand_as(x).contiguous()
        ctx.save_for_backward(x, largest)
        return largest[:, :1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, largest = ctx.saved_tensors
        found = (x == largest).to(x.dtype)
        return grads[0] * found / found.sum(-1, keepdim=True)


def divides(x: Tensor, steepness: float = 12.0) -> Tensor:
    small = torch.exp(steepness * (x - 1.0))
    return Divides.apply(x, small, 1.0 * small)


def takes_log(x: Tensor) -> Tensor:
    likely = torch.sigmoid(16.0 * x - 16.0)
    return TakesLog.apply(x, likely, 1.0 * likely)


def compares(x: Tensor) -> Tensor:
    return x + Compares.apply(x)


UNSAFE: dict[str, Callable[[Tensor], Tensor]] = {"divides": divides, "takes log": takes_log, "compares": compares}


class Layer(nn.Module):
    def __init__(self, width: int, operator: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.norm, self.linear, self.operator = nn.LayerNorm(width), nn.Linear(width, width), operator

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.linear(self.norm(x)))
        if self.operator is not None:
            inner = self.operator(inner)
        return x + inner


class Stack(nn.Module):
    """[rows, 32] -> [rows, 10], with an operator in some of its layers."""

    def __init__(self, operator: Callable[[Tensor], Tensor] | None, where: tuple[int, ...] = (1,), layers: int = 3):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.layers = nn.ModuleList(Layer(64, operator if number in where else None) for number in range(layers))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Batch = tuple[Tensor, Tensor]


def stack(name: str | None, rows: int = 64, seed: int = 0, **options: Any) -> tuple[Stack, Batch]:
    """A stack with the named operator, and a batch that it can learn."""
    torch.manual_seed(seed)
    model = Stack(None if name is None else UNSAFE[name], **options)
    x = torch.randn(rows, 32)
    return model, (x, x[:, :10].argmax(-1))


def loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    """loss_fn(batch) of a model with rows and classes."""
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])
