"""A slice of a batch: the first samples of every tensor in it."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def batch_size(batch: Any) -> int | None:
    """Leading dimension that all tensors of a batch share; None if there is no such dimension.

    batch: tensors in tuples, lists, mappings or dataclasses. A graph, or anything else whose tensors disagree in their
    first dimension, has no samples that could be sliced.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in _tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def first_samples(batch: Any, samples: int) -> tuple[Any, float]:
    """(the batch's first samples, fraction of the batch they are); the batch and 1.0 where it cannot be sliced."""
    size = batch_size(batch)
    if size is None or size <= samples:
        return batch, 1.0
    return _map(batch, lambda tensor: tensor[:samples]), samples / size


def _fields(batch: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(batch)]


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in _tensors(value)]
    if isinstance(batch, (tuple, list)):
        return [tensor for value in batch for tensor in _tensors(value)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [tensor for name in _fields(batch) for tensor in _tensors(getattr(batch, name))]
    return []


def _map(batch: Any, function: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        sliced = copy.copy(batch)  # keeps the class, such as the BatchEncoding of tokenizers
        for key, value in batch.items():
            sliced[key] = _map(value, function)  # type: ignore[index]
        return sliced
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{name: _map(getattr(batch, name), function) for name in _fields(batch)})
    return batch
