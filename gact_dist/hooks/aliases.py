"""What a step knows of the storages that it has met, so that memory is stored once however often it is saved."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .handles import View

# A small view of a quantised tensor is stored by itself: decoding all of the larger one for it would cost more.
_VIEW_FRACTION = 4


class Memory:
    """What a step knows of one storage."""

    __slots__ = (
        "aliased", "bypassing", "first_partial", "partial_numel", "relu_versions", "seen_bytes", "stored", "weak",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak = StorageWeakRef(storage)  # pins the address, not the memory: no other storage can take it
        self.stored: list[tuple[int, torch.dtype, int, int, ref]] = []
        self.relu_versions: set[int] = set()
        self.partial_numel = 0
        self.first_partial = ""
        self.seen_bytes = 0
        self.aliased = False
        self.bypassing: set[tuple[int, int]] = set()  # (offset, span) of what checkpoints keep past all hooks


def find(tensor: Tensor, memory: Memory) -> View | None:
    """A handle on memory that this step has stored already and that holds this tensor too."""
    version, start = tensor._version, int(tensor.storage_offset())
    stop = start + span(tensor)
    for known_version, dtype, first, last, weak in memory.stored:
        if known_version != version or dtype != tensor.dtype or start < first or stop > last:
            continue
        stored = weak()
        if stored is not None and tensor.numel() * _VIEW_FRACTION >= last - first:
            return View(stored, tensor, start - first)
    return None


def remember(tensor: Tensor, memory: Memory, stored: Any) -> None:
    length = span(tensor)
    if length <= tensor.numel():
        start = int(tensor.storage_offset())
        memory.stored.append((tensor._version, tensor.dtype, start, start + length, ref(stored)))


def span(tensor: Tensor) -> int:
    """Elements of storage between a tensor's first and last element, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_own_relu_save(tensor: Tensor, memory: Memory) -> bool:
    """Whether relu itself is saving its result, of which its backward needs only where it is positive.

    At that moment, and at no other, the node's own slot for it is still empty. Rounding would set small positive values
    to zero and so bias the gradient, which is why relu keeps a mask beside what the next operator stores.
    """
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ReluBackward0" or tensor._version in memory.relu_versions:
        return False
    return node._saved_result is None
