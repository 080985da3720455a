"""A slice of a batch: the first examples in every tensor."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def batch_size(batch: Any) -> int | None:
    """Leading dimension that all tensors of a batch share; None if there is no such dimension.

    batch: tensors in tuples, lists, mappings or dataclasses. A graph, or anything else whose tensors disagree in their
    first dimension, has no examples that could be sliced.
    """
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def first_samples(batch: Any, samples: int) -> tuple[Any, float]:
    """(the batch's first examples, the fraction that they are); the batch and 1.0 if it cannot be sliced."""
    size = batch_size(batch)
    if size is None or size <= samples:
        return batch, 1.0
    return map_tensors(batch, lambda tensor: tensor[:samples]), samples / size


def _fields(batch: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(batch)]


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a structure, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, (tuple, list)):
        return [tensor for value in batch for tensor in tensors_of(value)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [tensor for name in _fields(batch) for tensor in tensors_of(getattr(batch, name))]
    return []


def map_tensors(batch: Any, function: Any) -> Any:
    """The same structure with every tensor replaced by what the function makes of it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        sliced: Any = copy.copy(batch)  # keeps the class, such as the BatchEncoding of tokenizers
        for key, value in batch.items():
            sliced[key] = map_tensors(value, function)
        return sliced
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{name: map_tensors(getattr(batch, name), function) for name in _fields(batch)}
        )
    return batch
