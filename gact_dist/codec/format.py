"""The sections of a packed buffer, and what an operator refuses. docs/codec.md describes the format in words."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_BITS = 1
MAX_BITS = 8
GROUP_SIZES = (64, 128, 256, 512)
DEFAULT_GROUP_SIZE = 128
PACK_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows whose columns are grouped have a multiple of so many elements: the columns that a vector of 16 Philox counters,
# each for two columns, or half a warp of a GPU works on.
COLUMN_MULTIPLE = 32
# Elements of a row in memory order, where a tensor's own rows do not matter.
ROW_ELEMENTS = 16
# Rows of a tile, the least that is whole 32-bit words of codes at every width.
TILE_ROWS = 32
# In memory order a part that is decoded on its own begins at a multiple of so many: those of a block on a GPU, too.
PART_ELEMENTS = 8192
FUNCTIONS = ("none", "tanh")
"""of which kernels give what is decoded, or its gradient: GELU, by what torch's takes for `approximate`"""
FUNCTION_DTYPES = (torch.float32, torch.bfloat16)
BINARY_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MASK_DTYPES = (torch.bool, torch.uint8, *BINARY_DTYPES)


def fields_of(bits: int) -> list[tuple[int, int]]:
    """The parts in which a code is stored: (its lowest bit, how many bits), the widest first, powers of two."""
    fields, start = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            fields.append((start, width))
            start += width
    return fields


def width_of(columns: int) -> int:
    """Elements of a row: the columns, or 16 in memory order."""
    return columns if columns > 1 else ROW_ELEMENTS


def part_unit(group_size: int, columns: int) -> int:
    """Elements at whose multiples parts begin that are decoded on their own."""
    return group_size * columns if columns > 1 else PART_ELEMENTS


def word_rows(rows: int, field_bits: int) -> int:
    """Rows of words that hold a field of ``rows`` rows of codes."""
    return -(-rows * field_bits // 32)


@dataclass(frozen=True)
class Sections:
    """Where the three sections of a packed buffer begin and how long it is, in bytes."""

    groups: int  # each with a scale and an offset
    rows: int  # of codes; the last one may be short in memory order
    scale_start_bytes: int
    offset_start_bytes: int
    total_bytes: int


def sections(numel: int, bits: int, group_size: int, columns: int = 1) -> Sections:
    """Section starts of the buffer that holds ``numel`` elements, in rows of ``columns``, at ``bits`` bits."""
    width = width_of(columns)
    rows = -(-numel // width)
    tiles, rest = rows // TILE_ROWS, rows % TILE_ROWS  # divmod takes no symbolic integers
    words = (tiles * bits + sum(word_rows(rest, field_bits) for _, field_bits in fields_of(bits))) * width
    groups = (numel // columns + group_size - 1) // group_size * columns
    offset_start_bytes = 4 * words + 2 * groups
    return Sections(groups, rows, 4 * words, offset_start_bytes, offset_start_bytes + 2 * groups)


def check_format(bits: int, group_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError unless the format can be packed."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}, expected {MIN_BITS} to {MAX_BITS}; use bits=None in codec.pack for exact")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}, expected one of {GROUP_SIZES}")
    if dtype not in PACK_DTYPES:
        raise TypeError(f"dtype is {dtype}, expected one of {PACK_DTYPES}; codec.pack handles the others")


def check_columns(numel: int, columns: int) -> None:
    """Raise ValueError unless ``numel`` elements are whole rows of ``columns``, a multiple of 32 or 1."""
    if columns < 1 or numel % columns != 0 or (columns > 1 and columns % COLUMN_MULTIPLE != 0):
        raise ValueError(
            f"columns is {columns}, expected a multiple of {COLUMN_MULTIPLE} that divides the {numel} elements, or 1 "
            "for groups in memory order"
        )


def check_flat(x: Tensor, name: str) -> None:
    """Raise ValueError unless ``x`` is one-dimensional and contiguous."""
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, expected a contiguous 1-D tensor; "
            "codec.pack takes any shape and strides"
        )


def check_contiguous(x: Tensor, name: str) -> None:
    """Raise ValueError unless the elements of ``x`` follow each other in memory in its own order."""
    if not x.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, expected a contiguous tensor; "
            "codec.pack takes any strides"
        )


def check_buffer(buffer: Tensor, expected_bytes: int) -> None:
    """Raise ValueError unless ``buffer`` is a flat uint8 tensor of exactly ``expected_bytes``."""
    check_flat(buffer, "buffer")
    if buffer.dtype != torch.uint8 or buffer.numel() != expected_bytes:
        raise ValueError(
            f"buffer has {buffer.numel()} elements of {buffer.dtype}, expected {expected_bytes} of torch.uint8; "
            "give bits, group_size, numel and dtype of the tensor that was packed"
        )


def check_out(out: Tensor, numel: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``out`` can take ``numel`` elements of ``dtype``."""
    check_flat(out, "out")
    if out.numel() != numel or out.dtype != dtype:
        raise ValueError(f"out has {out.numel()} elements of {out.dtype}, expected {numel} of {dtype}")


def check_part(out: Tensor, numel: int, dtype: torch.dtype, first: int, unit: int) -> None:
    """Raise ValueError unless ``out`` can take elements of ``dtype`` from number ``first`` of ``numel`` on."""
    last = first + out.numel()
    if first < 0 or first % unit != 0 or last > numel or (last % unit != 0 and last != numel):
        raise ValueError(f"the part is elements {first} to {last} of {numel}, expected multiples of {unit} or the end")
    check_out(out, last - first, dtype)


def check_function(dtype: torch.dtype, function: int) -> None:
    """Raise TypeError or ValueError unless tensors of ``dtype`` have a kernel that applies a function."""
    if dtype not in FUNCTION_DTYPES:
        raise TypeError(f"got {dtype}, expected float32 or bfloat16; unpack the tensor and apply torch's function")
    if not 0 <= function < len(FUNCTIONS):
        raise ValueError(f"function is {function}, expected the number of one of {FUNCTIONS}")


def check_binary_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless tensors of ``dtype`` can be stored as zeros and one other value."""
    if dtype not in BINARY_DTYPES:
        raise TypeError(f"got {dtype}, expected float32, float16, bfloat16 or float64; use pack_mask for bool")


def check_mask_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless masks of ``dtype`` can be packed."""
    if dtype not in MASK_DTYPES:
        raise TypeError(f"a mask cannot have dtype {dtype}, expected one of {MASK_DTYPES}; convert it with .to(bool)")


def check_weight(weight: Tensor, x: Tensor) -> None:
    """Raise ValueError unless ``weight`` is float32 and as long as ``x``."""
    check_flat(weight, "weight")
    if weight.dtype != torch.float32 or weight.numel() != x.numel():
        raise ValueError(
            f"weight has {weight.numel()} elements of {weight.dtype}, expected {x.numel()} of torch.float32"
        )


def are_of_rows(x: Tensor, mean: Tensor | None, rstd: Tensor, vectors: Sequence[Tensor]) -> bool:
    """Whether statistics are float32 of each row of x, and vectors of each column in its type; all without gaps, and on
    one device."""
    rows = rstd.numel()
    if not x.is_contiguous() or x.numel() == 0 or x.numel() % rows != 0:
        return False
    of_each = [(each, rows, torch.float32) for each in (mean, rstd) if each is not None]
    of_each += [(each, x.numel() // rows, x.dtype) for each in vectors]
    return all(
        each.device == x.device and each.numel() == numel and each.dtype == dtype and each.is_contiguous()
        for each, numel, dtype in of_each
    )
