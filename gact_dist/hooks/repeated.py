"""Saved tensors that repeat a part of themselves: the part is stored.

[Note: repeated] With grouped queries a model that does not leave it to attention repeats each head of its keys and
values for several heads of its queries: transformers' repeat_kv, repeat_interleave, or expand and reshape. What
attention saves then holds every number as often as it was repeated. The graph shows it: the tensor is a copy, perhaps
in another shape, of what was expanded. One slice of it is stored, where the whole would be rounded, and repeated again
when it is read. All copies have one rounding error then, so its effect is the square of the sum over the copies, which
is what a measurement adds up: to it the saved tensor is an expanded one.

The first dimension is left alone: examples are measured a few at a time, and one example is no repetition.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_internals import PLAIN, behind_reshapes, shape_of_output
from .handles import Noted, Replaceable, Stored, View, lazy_bits


class Repeats(NamedTuple):
    """How a contiguous tensor repeats what was expanded."""

    kept: tuple[int, ...]
    """the shape before it was expanded, 1 where it repeats"""
    size: tuple[int, ...]
    """the shape that it was expanded to, which may not be the tensor's"""

    def part_of(self, tensor: Tensor) -> Tensor:
        """A copy of what the tensor repeats, without the dimensions of size 1 along which it does."""
        part = tensor.detach().view(self.size)[tuple(map(slice, self.kept))]
        shape = [kept for kept, size in zip(self.kept, self.size, strict=True) if kept == size]
        return part.view(shape).clone(memory_format=torch.contiguous_format)

    def expanded(self, part: Tensor) -> Tensor:
        """A view of a part in which it repeats itself without taking memory."""
        return part.reshape(self.kept).expand(self.size)


class Repeated(View):
    """A tensor, or a view of one, of which a part is stored. offset: in the tensor that repeats the part."""

    __slots__ = ("repeats",)

    def __init__(self, base: Stored | Replaceable | Noted, tensor: Tensor, repeats: Repeats, offset: int = 0) -> None:
        super().__init__(base, tensor, offset)
        self.repeats = repeats

    def part(self, tensor: Tensor) -> Tensor:
        """A copy of the part, from the tensor that the handle stands for."""
        size = self.repeats.size
        return self.repeats.part_of(
            tensor.detach().as_strided((prod(size),), (1,), int(tensor.storage_offset()) - self.offset)
        )

    def behind(self, tensor: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
        """See View.behind: the part, which the tensor does not share its memory with."""
        return self.part(tensor)

    def within(self, base: Tensor) -> Tensor:
        """See View.within."""
        return self.seen_in(self.whole(base))

    def seen_in(self, whole: Tensor) -> Tensor:
        """The part of what whole() gave that is this tensor."""
        return super().within(whole)

    def whole(self, base: Tensor) -> Tensor:
        """What repeats a restored part."""
        return self.repeats.expanded(base).contiguous()

    def over(self, base: Any, tensor: Tensor, offset: int) -> Repeated:
        """The handle of a tensor that lies there in what repeats a part. base: the part's handle."""
        return Repeated(base, tensor, self.repeats, offset)


def repeats_of(tensor: Tensor) -> Repeats | None:
    """How a tensor that was computed repeats itself; None if it does not, or only along its first dimension."""
    node = None if tensor._version else behind_reshapes(tensor.grad_fn)
    if node is None or node.name() != "CloneBackward0":  # as of most
        return None
    if type(tensor) not in PLAIN or not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    below: Any = node.next_functions[0][0]
    if below is None or below.name() != "ExpandBackward0" or not tensor.is_contiguous() or lazy_bits(tensor):
        return None
    kept, size = tuple(below._saved_self_sym_sizes), tuple(shape_of_output(node, 0))
    is_repeated = len(kept) == len(size) and kept[0] == size[0] and kept != size
    return Repeats(kept, size) if is_repeated and prod(size) == tensor.numel() else None
