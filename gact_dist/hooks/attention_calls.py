"""The call of scaled_dot_product_attention that is running, which no pack hook is told of.

While hooks are open the function has a wrapper, which knows what it was given. Not where torch.compile compiles: that
would see another function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .._patches import SharedPatch
from .._torch_internals import PLAIN


class AttentionCall:
    """What a call was given; what is wrong with it is left to that."""

    __slots__ = ("_named", "_positional")

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._positional, self._named = args, kwargs

    def _argument(self, position: int, name: str, default: Any = None) -> Any:
        return self._positional[position] if len(self._positional) > position else self._named.get(name, default)

    @property
    def mask(self) -> Tensor | None:
        """A plain tensor."""
        mask = mask_given(self._positional, self._named)
        return mask if type(mask) in PLAIN else None

    @property
    def has_dropout(self) -> bool:
        return bool(self._argument(4, "dropout_p", 0.0))

    @property
    def is_causal(self) -> bool:
        return bool(self._argument(5, "is_causal", False))

    @property
    def operands(self) -> list[Tensor]:
        """Plain ones of query, key and value."""
        found = [self._argument(position, name) for position, name in enumerate(("query", "key", "value"))]
        return [operand for operand in found if type(operand) in PLAIN]


def mask_given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The mask of a call of scaled_dot_product_attention."""
    return kwargs.get("attn_mask", args[3] if len(args) > 3 else None)


class _Running(threading.local):
    call: AttentionCall | None = None


_running = _Running()


def running_call() -> AttentionCall | None:
    """The innermost one of this thread."""
    return _running.call


@contextmanager
def running(call: AttentionCall) -> Iterator[None]:
    """Within the context this call runs in this thread."""
    outer, _running.call = _running.call, call
    try:
        yield
    finally:
        _running.call = outer


def attention_calls() -> AbstractContextManager[None]:
    """Within the context calls of attention are known while they run."""
    return _ATTENTION.listening(F, _running)


def _noting(attention: Callable[..., Any], _: list[Any]) -> Callable[..., Any]:
    @wraps(attention)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        with running(AttentionCall(args, kwargs)):
            return attention(*args, **kwargs)

    return scaled_dot_product_attention


_ATTENTION = SharedPatch("scaled_dot_product_attention", _noting)
WRAPPER = _noting(F.scaled_dot_product_attention, []).__code__
"""stands between a caller of attention and the operator"""
