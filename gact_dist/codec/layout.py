"""The memory of a strided tensor: which elements are stored, in which order, and how long a row of channels is."""

from dataclasses import dataclass
from enum import Enum, auto
from math import prod

import torch
from torch import Tensor

from .format import COLUMN_MULTIPLE


class Fill(Enum):
    """How a strided tensor fills the memory between its first and its last element."""

    SPAN = auto()  # no gaps; several elements may share a place
    SCATTERED = auto()  # gaps, and no two elements share a place
    TANGLED = auto()  # gaps, and elements that share a place


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory of a strided tensor without its stride-0 and size-1 dimensions, widest stride first.

    Attributes:
        fill: whether there are gaps.
        sizes, strides: of the dimensions.
        span: elements between the first and the last, both counted.
        row_numel: elements of a row of channels, 1 where the shape shows none: see ``row_of_channels``.
    """

    fill: Fill
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    span: int
    row_numel: int = 1

    @property
    def stored_numel(self) -> int:
        """Elements that are stored."""
        return prod(self.sizes) if self.fill is Fill.SCATTERED else self.span

    def columns(self, group_size: int, is_complex: bool, fraction: float = 1.0) -> int:
        """Columns of a row for groups by column, or 1 for groups in memory order.

        By column if a row is a multiple of COLUMN_MULTIPLE numbers and there are rows for a whole group, in the tensor
        of which this one is a fraction. A complex element is two numbers.
        """
        columns = self.row_numel * (2 if is_complex else 1)
        if columns % COLUMN_MULTIPLE != 0 or self.stored_numel < fraction * group_size * self.row_numel:
            return 1
        return columns


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a strided tensor."""
    numel = tensor.numel()
    if numel == 0:
        return Layout(Fill.SPAN, (0,), (1,), 0)
    if tensor.is_contiguous() and tensor.dim() < 4:
        return Layout(Fill.SPAN, (numel,), (1,), numel, tensor.shape[-1] if tensor.dim() > 1 else 1)
    strides = tensor.stride()
    kept = [dim for dim, size in enumerate(tensor.shape) if size > 1 and strides[dim] != 0]
    kept.sort(key=lambda dim: (strides[dim], tensor.shape[dim]), reverse=True)
    span, gaps, shared = 1, False, False
    for dim in reversed(kept):
        gaps |= strides[dim] > span
        shared |= strides[dim] < span
        span += strides[dim] * (tensor.shape[dim] - 1)
    fill = Fill.SPAN
    if gaps:
        fill = Fill.TANGLED if shared else Fill.SCATTERED
    sizes = tuple(tensor.shape[dim] for dim in kept)
    row_numel = 1 if shared else row_of_channels(tensor.dim(), kept[::-1], sizes[::-1])
    return Layout(fill, sizes, tuple(strides[dim] for dim in kept), span, row_numel)


def row_of_channels(ndim: int, dims: list[int], sizes: tuple[int, ...]) -> int:
    """Elements of a row if the innermost dimension in memory is assumed to be channels; otherwise 1.

    It is assumed to be so in tensors of two and three dimensions (tokens or nodes by features) and in permuted ones:
    the channels of a channels_last image, or the adjacent heads of a tensor [batch, heads, tokens, channels] that is a
    view of [batch, tokens, heads * channels]. Contiguous tensors of four dimensions and more are assumed to be images
    or attention scores, whose last dimension is a position.

    Args:
        ndim: dimensions of the tensor.
        dims, sizes: its dimensions of more than one element, innermost in memory first.
    """
    if len(dims) < 2 or (ndim >= 4 and dims[:2] == [ndim - 1, ndim - 2]):
        return 1
    heads_beside = ndim == 4 and len(dims) > 2 and dims[1] == 1 and dims[2] > 1
    return sizes[0] * sizes[1] if heads_beside else sizes[0]


def pitch_of(layout: Layout, columns: int) -> int:
    """Elements from one row of `columns` to the next, gaps included; 0 where rows have gaps or are not equally far
    apart."""
    pitch, numel = 0, 1
    for size, stride in zip(reversed(layout.sizes), reversed(layout.strides), strict=True):  # from the narrowest stride
        if numel < columns:
            if stride != numel:
                return 0
        elif numel == columns:
            pitch = stride
        elif stride != pitch * (numel // columns):
            return 0
        numel *= size
    return pitch if columns > 1 else 0


def flatten(tensor: Tensor, layout: Layout) -> Tensor:
    """The stored elements in memory order, 1-D contiguous: a view where there are no gaps."""
    if layout.fill is Fill.SCATTERED:
        return tensor.as_strided(layout.sizes, layout.strides).contiguous().view(-1)
    return tensor.as_strided((layout.span,), (1,))


def restore(flat: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], layout: Layout) -> Tensor:
    """Inverse of ``flatten``: a tensor with this shape and these strides."""
    if layout.fill is not Fill.SCATTERED:
        return flat.as_strided(shape, strides)
    out = torch.empty_strided(shape, strides, dtype=flat.dtype, device=flat.device)
    out.as_strided(layout.sizes, layout.strides).copy_(flat.view(layout.sizes))
    return out
