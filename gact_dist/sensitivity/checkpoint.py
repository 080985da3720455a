"""Gradient checkpointing while sensitivity is measured.

[Note: measuring checkpoints] A double backward recomputes several times and through torch.autograd.grad. While
sensitivity is measured, reentrant checkpoints therefore run as non-reentrant ones, a selective checkpoint may hand out
what it cached more than once, and what is recomputed uses the same replacements of operators as the forward.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from .._patches import replaced
from .._torch_internals import (
    RUNS_COUNT_CALLS,
    CheckpointFrame,
    KeptMode,
    dispatch_again,
    enter_with_all,
    is_ignored_by_selective,
    untraced,
)
from ..distributed import checkpoints_as


@contextmanager
def measurable(mode: Any) -> Iterator[None]:
    """Within the context checkpoints can be differentiated twice, and recompute under `mode`.

    See [Note: measuring checkpoints].
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(torch_checkpoint.CheckpointFunction, "apply", staticmethod(_reentrant_apply)))
        stack.enter_context(checkpoints_as(_as_non_reentrant))
        original_init = CheckpointFrame.__init__

        def under_mode(self: Any, recompute_fn: Callable[..., None], *rest: Any) -> None:
            def recompute(*args: Any) -> None:
                with mode:
                    recompute_fn(*args)

            original_init(self, recompute, *rest)

        stack.enter_context(replaced(CheckpointFrame, "__init__", under_mode))
        if not RUNS_COUNT_CALLS:
            stack.enter_context(replaced(KeptMode, "__enter__", enter_with_all))
        stack.enter_context(replaced(KeptMode, "__torch_dispatch__", _dispatch_again))
        yield


class CheckpointFunction(Function):
    """Identity under the name that a reentrant checkpoint gives its outputs, so that saved tensors keep their names."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _reentrant_apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return _as_non_reentrant(function, *args, preserve_rng_state=preserve_rng_state)


def _as_non_reentrant(function: Callable[..., Any], *args: Any, preserve_rng_state: bool = True) -> Any:
    outputs = torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    return tree_map_only(Tensor, CheckpointFunction.apply, outputs)


_dispatch_once = KeptMode.__torch_dispatch__


@untraced
def _dispatch_again(self: Any, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    """As a selective checkpoint does, except that what was cached stays in the cache."""
    if is_ignored_by_selective(func):
        return func(*args, **(kwargs or {}))
    result, was_cached = dispatch_again(_dispatch_once, self, func, types, args, kwargs)
    # an operation in place must not reach the cache
    return tree_map_only(Tensor, Tensor.clone, result) if was_cached else result
