"""Operators that are replaced while a forward is measured."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..hooks import OperatorObserver
from .differentiable_attention import attention
from .differentiable_norms import batch_norm, group_norm, layer_norm

REPLACEMENTS: dict[Callable, Callable] = {
    F.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: attention,
}
"""Fused functions of torch.nn.functional, and what replaces them where the gradient is differentiated."""


class MeasuringMode(OperatorObserver):
    """An observer that keeps the root of a backward call instead of running it, so that a closure which ends in
    loss.backward() can be measured without touching any .grad; and that replaces fused operators."""

    def __init__(self, differentiable: bool = True) -> None:
        """differentiable: whether fused operators are replaced by differentiable ones."""
        super().__init__()
        self.root: Tensor | None = None
        """what backward() was called on"""
        self._replacements = REPLACEMENTS if differentiable else {}

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if function is Tensor.backward:
            self.root = args[0]
            return None
        return self._replacements.get(function, function)(*args, **kwargs)

    def root_of(self, result: Any) -> Any:
        """The root of a closure's backward call, or else what the closure returned."""
        return result if self.root is None else self.root
