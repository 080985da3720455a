"""Saved tensors by layer: how people look at a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Layer:
    """What a step keeps of the saved tensors of one layer."""

    name: str
    exact_bytes: float = 0.0
    """what the untouched job would keep, memory that tensors share counted once"""
    retained_bytes: float = 0.0
    elements: float = 0.0
    """of tensors that are rounded"""
    bits: float = 0.0
    """of these elements, all together"""

    @property
    def average_bits(self) -> float:
        """Bits an element of the tensors that are rounded; NaN without any."""
        return self.bits / self.elements if self.elements else math.nan


def layer_of(name: str) -> str:
    """The layer of a saved tensor named module.path:operator@line: its path up to a number, or the first two parts."""
    path = name.partition(":")[0]
    parts = path.split(".") if path else ["(top level)"]
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:2])


def layers_of(rows: Iterable[Mapping[str, Any]]) -> list[Layer]:
    """Layers in the order of the forward. rows: as with_exact_bytes() gives them."""
    layers: dict[str, Layer] = {}
    for row in rows:
        layer = layers.setdefault(layer_of(row["name"]), Layer(layer_of(row["name"])))
        layer.retained_bytes += row["bytes"]
        layer.exact_bytes += row["exact_bytes"]
        if row["codec"] in ("quantised", "mixed"):
            elements = math.prod(row["shape"])
            layer.elements += elements
            layer.bits += elements * row["bits"]
    return list(layers.values())


def with_exact_bytes(rows: Sequence[Mapping[str, Any]], exact_bytes: float) -> list[dict[str, Any]]:
    """The rows with "exact_bytes", what the untouched job would keep of each.

    rows: the fields of hooks.ReportRow. exact_bytes: of all. What tensors share of it is not known, and so is spread.
    """
    own = [_own_bytes(row) for row in rows]
    scale = exact_bytes / sum(own) if sum(own) else 0.0
    return [{**row, "exact_bytes": scale * size} for row, size in zip(rows, own, strict=True)]


def _own_bytes(row: Mapping[str, Any]) -> float:
    """What a tensor takes exactly; 0 for one that shares the memory of another, which is counted there."""
    return math.prod(row["shape"]) * _bytes_of_type(row["dtype"]) if row["bytes"] or row["codec"] == "derived" else 0.0


def _bytes_of_type(dtype: str) -> float:
    name = dtype.removeprefix("torch.")
    digits = "".join(character for character in name if character.isdigit())
    return {"bool": 1, "bfloat16": 2}.get(name, int(digits[:3] or 8) / 8 if not name.startswith("float8") else 1)
