"""A job that is built among fake tensors, and decides on values while it is.

[Note: values while a model is built] A constructor may compute a number with tensors and ask for it, as
`torch.linspace(0, rate, layers)[i].item()` of a rate for each layer. Fake tensors have no values. Such a job is built
once more, with small tensors that are real and large ones that are fake; the engine makes all of them fake after that.
torch's trunc_normal_() asks as well, whether all its values are within the bounds. A fake tensor needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .._patches import replaced
from .._torch_internals import (
    NEEDS_VALUES,
    TRUNC_NORMAL,
    DispatchMode,
    current_fake_mode,
    is_fake,
    without_fake_tensors,
)

Made = TypeVar("Made")
_SMALL = 4096
"""elements: of the largest real tensor"""


def with_small_values(build: Callable[[], Made]) -> Made:
    """What build() returns; within fake tensors with small ones that are real, where it asks for a value."""
    if current_fake_mode() is None:
        return build()
    with replaced(nn.init, TRUNC_NORMAL, partial(_unless_fake, getattr(nn.init, TRUNC_NORMAL))):
        try:
            return build()
        except NEEDS_VALUES:
            with _SmallAreReal():
                return build()


def _unless_fake(fill: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor if is_fake(tensor) else fill(tensor, *args, **kwargs)


class _SmallAreReal(DispatchMode):
    """A mode above that of fake tensors: an operator of real tensors, or of none, makes real ones if they are small."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_fake, _tensors((args, kwargs)))):
            return func(*args, **kwargs)
        try:
            shaped = func(*args, **kwargs)
        except NEEDS_VALUES:
            shaped = None
        if any(tensor.numel() > _SMALL for tensor in _tensors(shaped)):
            return shaped
        with without_fake_tensors():
            return func(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
