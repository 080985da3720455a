"""Gradients of a whole model, and what compression adds to their variance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gact_dist


def flat_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Gradients of all parameters in one tensor, real and imaginary parts of complex ones; the graph is kept."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in gradients])


def variance_of_gradient(
    model: nn.Module, loss_fn: Callable[[Any], Tensor], batch: Any, gact: gact_dist.Controller, draws: int
) -> float:
    """Mean over draws of the squared distance between the compressed and the exact gradient, without adaptation."""
    exact = flat_gradient(model, loss_fn(batch))
    total = 0.0
    with gact.step():  # the first step only learns which tensors are what
        loss_fn(batch)
    for _ in range(draws):
        with gact.step():
            loss = loss_fn(batch)
        total += float((flat_gradient(model, loss) - exact).square().sum()) / draws
    return total
