"""Masks of transformers where tensors have no values.

transformers looks whether a batch has padding or packed sequences, and makes no mask if not. Of fake tensors it cannot
know, and makes one: as large as the square of the sequence, for every example. A profile is of full batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from .._patches import replaced

_MASKS = "transformers.masking_utils"
_ASKS_FOR_PADDING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_FINDS_PACKED = "find_packed_sequence_indices"


@contextmanager
def full_batches() -> Iterator[None]:
    """Within the context transformers, if the job has imported it, takes every batch for one without padding."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as stack:
        for name in _ASKS_FOR_PADDING:
            asks = getattr(masks, name, None)
            if asks is not None:
                stack.enter_context(replaced(masks, name, partial(_without_padding, asks)))
        if hasattr(masks, _FINDS_PACKED):
            stack.enter_context(replaced(masks, _FINDS_PACKED, lambda *_, **__: None))
        yield


def _without_padding(asks: Any, *args: Any, **kwargs: Any) -> Any:
    if "padding_mask" in kwargs:
        return asks(*args, **{**kwargs, "padding_mask": None})
    return asks(None, *args[1:], **kwargs)
