"""A slice of a batch: the same examples in every tensor.

A TensorDict, or a tensorclass, holds tensors as a mapping does, and is sliced and mapped as a whole: each of its
tensors begins with the dimensions of its batch_size. It is recognised by that attribute, without an import.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def batch_size(batch: Any) -> int | None:
    """Leading dimension that all tensors of a batch share; None if there is no such dimension.

    batch: tensors in tuples, lists, mappings, dataclasses or TensorDicts. A graph, or anything else whose tensors
    disagree in their first dimension or are sparse, has no examples that could be sliced.
    """
    sizes = {tensor.shape[0] if _has_rows(tensor) else None for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def may_hold_adjacency(batch: Any) -> bool:
    """Whether the rows of a batch's tensors may not be examples: one of them is a square matrix with as many rows, as
    the dense adjacency of a graph is. Integers are taken for tokens."""
    size = batch_size(batch)
    return any(tensor.shape == (size, size) and not _is_integer(tensor) for tensor in tensors_of(batch))


def fixes_rows(model: nn.Module, batch: Any) -> bool:
    """Whether a model may run only on batches of this size: a buffer of it is a square matrix, dense or sparse, with
    as many rows, as the adjacency of a graph is."""
    size = batch_size(batch)
    return any(not is_lazy(buffer) and tuple(buffer.shape) == (size, size) for buffer in model.buffers())


def samples_of(batch: Any, start: int, stop: int) -> tuple[Any, float]:
    """(some of the batch's examples, the fraction that they are); the batch and 1.0 if they are all, or it cannot be
    sliced."""
    size = batch_size(batch)
    if size is None or (start == 0 and stop >= size):
        return batch, 1.0
    rows = slice(start, min(stop, size))
    return _mapped(batch, lambda part: part[rows], lambda part: part[rows]), (rows.stop - start) / size


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a structure, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping) or _is_tensordict(batch):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, (tuple, list)):
        return [tensor for value in batch for tensor in tensors_of(value)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [tensor for name in _fields(batch) for tensor in tensors_of(getattr(batch, name))]
    return []


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced by what the function makes of it, which has the same shape."""
    return _mapped(batch, function, lambda tensordict: tensordict.apply(function))


def _mapped(batch: Any, function: Callable[[Tensor], Tensor], of_tensordict: Callable[[Any], Any]) -> Any:
    """The same structure with every tensor and every TensorDict replaced."""
    if isinstance(batch, Tensor):
        return function(batch)
    if _is_tensordict(batch):
        return of_tensordict(batch)
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: _mapped(value, function, of_tensordict) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function, of_tensordict) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_mapped(value, function, of_tensordict) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {name: _mapped(getattr(batch, name), function, of_tensordict) for name in _fields(batch)}
        return dataclasses.replace(batch, **values)
    return batch


def _with_values(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same class, such as the BatchEncoding of tokenizers, with other values."""
    made_of: Any = type(mapping)
    if not isinstance(mapping, MutableMapping):
        return made_of(values)
    copied: Any = copy.copy(mapping)
    try:
        for key, value in values.items():
            copied[key] = value
    except TypeError:  # a dict that is frozen
        return made_of(values)
    return copied


def _is_tensordict(batch: Any) -> bool:
    size = getattr(batch, "batch_size", None)
    return isinstance(size, torch.Size) and len(size) > 0 and hasattr(batch, "apply")


def _has_rows(tensor: Tensor) -> bool:
    """Whether a tensor has a first dimension that can be sliced; that of a sparse matrix is mostly a graph's nodes."""
    return tensor.dim() > 0 and tensor.layout == torch.strided


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _fields(batch: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(batch)]
