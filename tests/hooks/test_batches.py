"""The first examples of a batch: of every container that is known, and of none whose rows are no examples."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from gact_dist.hooks import batch_size, map_tensors, may_hold_adjacency, samples_of, tensors_of

X, Y = torch.randn(6, 3), torch.arange(6)


class TensorDict(MutableMapping):
    """What tensordict.TensorDict does that matters here: its tensors begin with batch_size, or are refused."""

    def __init__(self, source: Mapping[str, Any], batch_size: int) -> None:
        self.batch_size, self._source = torch.Size([batch_size]), {}
        for key, value in source.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if value.shape[:1] != self.batch_size:
            raise RuntimeError(f"batch dimension mismatch, got {self.batch_size} and {value.shape}")
        self._source[key] = value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._source[key]
        return TensorDict({name: value[key] for name, value in self.items()}, len(range(self.batch_size[0])[key]))

    def __delitem__(self, key: str) -> None:
        del self._source[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return self.batch_size[0]

    @property
    def shape(self) -> torch.Size:
        return self.batch_size

    def apply(self, function: Callable[[Tensor], Tensor]) -> TensorDict:
        changed = {
            name: value.apply(function) if isinstance(value, TensorDict) else function(value)
            for name, value in self.items()
        }
        return TensorDict(changed, self.batch_size[0])


class TensorClass:
    """The same as attributes, as of a tensorclass, which is no mapping."""

    def __init__(self, tensors: TensorDict) -> None:
        self._tensors, self.batch_size = tensors, tensors.batch_size

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_tensors"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, rows: Any) -> TensorClass:
        return TensorClass(self._tensors[rows])

    def values(self) -> Any:
        return self._tensors.values()

    def apply(self, function: Callable[[Tensor], Tensor]) -> TensorClass:
        return TensorClass(self._tensors.apply(function))


class FrozenDict(dict):
    """As frozendict: a dict that cannot be changed, and is its own copy."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(f"{type(self).__name__!r} object doesn't support item assignment")

    def __copy__(self) -> FrozenDict:
        return self


@dataclass(frozen=True)
class Example:
    x: Tensor
    y: Tensor


Pair = namedtuple("Pair", "x y")
CONTAINERS = {
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Pair(X, Y),
    "dict": {"x": X, "y": Y},
    "user dict": UserDict(x=X, y=Y),
    "mapping proxy": MappingProxyType({"x": X, "y": Y}),
    "frozen dict": FrozenDict(x=X, y=Y),
    "data class": Example(X, Y),
    "tensordict": TensorDict({"x": X, "y": Y}, 6),
    "nested tensordict": TensorDict({"x": X, "inner": TensorDict({"y": Y}, 6)}, 6),
    "tensorclass": TensorClass(TensorDict({"x": X, "y": Y}, 6)),
    "nested": MappingProxyType({"x": [X], "others": (TensorDict({"y": Y}, 6), "text")}),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_is_sliced_and_mapped_to_one_of_its_class(kind):
    batch = CONTAINERS[kind]
    assert batch_size(batch) == 6
    part, fraction = samples_of(batch, 1, 3)
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(part) is type(doubled) is type(batch)
    assert fraction == 2 / 6
    for found, expected in ((part, (X[1:3], Y[1:3])), (doubled, (2 * X, 2 * Y)), (batch, (X, Y))):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(found), expected, strict=True))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_batch_with_a_sparse_matrix_is_not_sliced(layout):
    batch = {"x": X, "adjacency": torch.eye(6).to_sparse(layout=layout)}
    part, fraction = samples_of(batch, 0, 2)
    assert part is batch
    assert fraction == 1.0
    assert not may_hold_adjacency(batch)  # nothing is in doubt


def test_a_square_matrix_of_anything_but_integers_may_be_an_adjacency():
    features, tokens = torch.randn(6, 3), torch.zeros(6, 6, dtype=torch.long)
    assert may_hold_adjacency((features, torch.eye(6)))
    assert may_hold_adjacency({"x": features, "mask": torch.eye(6).bool()})
    assert not may_hold_adjacency((tokens, tokens[:, 0]))
    assert not may_hold_adjacency((torch.randn(6, 3, 3), torch.zeros(6)))
    assert not may_hold_adjacency((features, torch.eye(3)))
    assert not may_hold_adjacency(torch.randn(()))
