"""Operators that are replaced while a forward is measured."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..hooks import BACKWARDS, OperatorObserver
from .differentiable_activations import gelu, silu
from .differentiable_attention import attention
from .differentiable_norms import batch_norm, group_norm, layer_norm

REPLACEMENTS: dict[Callable, Callable] = {
    F.layer_norm: layer_norm,
    F.batch_norm: batch_norm,
    F.group_norm: group_norm,
    F.scaled_dot_product_attention: attention,
    F.gelu: gelu,
    F.silu: silu,
}
"""Fused functions of torch.nn.functional, and what replaces them where the gradient is differentiated."""


def _chunked_loss(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """linear_cross_entropy whose backward can run again: by default it overwrites the gradients that it hands out."""
    again = None if options is None else replace(options, allow_retain_graph=True)
    return F.linear_cross_entropy(*args, options=again, **kwargs)


_REPEATABLE: dict[Callable, Callable] = {}
"""Functions whose backward runs only once, and what replaces them where it runs several times."""
if hasattr(F, "linear_cross_entropy"):  # since torch 2.13
    _REPEATABLE[F.linear_cross_entropy] = _chunked_loss


class MeasuringMode(OperatorObserver):
    """An observer that keeps the root of a backward call instead of running it, so that a closure which ends in
    loss.backward() can be measured without touching any .grad; and that replaces fused operators."""

    def __init__(self, differentiable: bool = True, fits: bool = True) -> None:
        """differentiable: whether fused operators are replaced by differentiable ones. fits: whether the logsumexp of
        attention is fitted, as it is outside of compiled regions."""
        super().__init__()
        self.root: Tensor | None = None
        """what backward() was called on"""
        self._inner_root: Tensor | None = None
        self.inner_backward = False
        """whether the forward ran a backward with create_graph=True; see [Note: inner backward] in inner_backward.py"""
        self._replacements = {**_REPEATABLE, **REPLACEMENTS} if differentiable else _REPEATABLE
        if differentiable and not fits:
            unfitted = partial(attention, fits=False)
            self._replacements = {**self._replacements, F.scaled_dot_product_attention: unfitted}

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        if function in BACKWARDS and kwargs.get("create_graph"):
            self.inner_backward = True
            if function is Tensor.backward:
                self._inner_root = args[0]
        elif function is Tensor.backward:
            self.root = args[0]
            return None
        return self._replacements.get(function, function)(*args, **kwargs)

    def root_of(self, result: Any) -> Any:
        """The root of a closure's backward call, or else what the closure returned.

        The mode lets go of it: a checkpoint in its graph holds the mode that it recomputes under.
        """
        (root, inner), self.root, self._inner_root = (self.root, self._inner_root), None, None
        if root is not None:
            return root
        # a closure may end in backward(create_graph=True), as for AdaHessian
        return result if isinstance(result, Tensor) or inner is None else inner


class NoMode(MeasuringMode):
    """For a model with compiled regions, which would be compiled anew under a mode: entered, it sees nothing."""

    def __enter__(self) -> "NoMode":
        return self

    def __exit__(self, *_: object) -> None:
        return None
