"""The operators on NVIDIA GPUs: launches of the kernels of csrc/cuda/, which are compiled at first use.

The results are the bits of reference.py. Kernels run on torch's current stream of the tensor's device, results come
from torch's allocator, and nothing waits for the device.
"""

import torch
from torch import Tensor

from . import format as payload_format
from .driver import Kernel, launch
from .format import TILE_ROWS

ELEMENTS = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "Bfloat"}

# As in csrc/cuda/blocks.h.
BLOCK_WARPS = 4
BLOCK_THREADS = 32 * BLOCK_WARPS
_VECTOR_BYTES = 16
# As in csrc/cuda/tile.h: the elements of a thread, the threads of a block in memory order, and by column the pairs of
# columns that a block has for each group size.
_TILE_ELEMENTS = 64
_MEMORY_ORDER_THREADS = 128
_COLUMN_PAIRS = {64: 64, 128: 32, 256: 32, 512: 16}
# Blocks of the variance kernel: enough to fill any GPU, few enough that adding up their sums takes no time.
_VARIANCE_BLOCKS = 1024

# For each dtype of a mask the bits that make an element non-zero, and the bits of the element 1.
_MASK_PATTERNS = {
    torch.bool: (0xFF, 1),
    torch.uint8: (0xFF, 1),
    torch.float16: (0x7FFF, 0x3C00),
    torch.bfloat16: (0x7FFF, 0x3F80),
    torch.float32: (0x7FFFFFFF, 0x3F800000),
    torch.float64: (0x7FFFFFFFFFFFFFFF, 0x3FF0000000000000),
}


def _blocks(warps: int) -> int:
    return (warps + BLOCK_WARPS - 1) // BLOCK_WARPS


# ---- the operators


def _check_device(tensor: Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is on ``device``: a kernel gets its address only."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}, where the other tensor is")


def _definitions(dtype: torch.dtype, group_size: int, *others: str) -> tuple[str, ...]:
    return (f"GACT_ELEMENT={ELEMENTS[dtype]}", f"GACT_GROUP={group_size}", *others)


def codec_kernel(action: str, dtype: torch.dtype, bits: int, group_size: int, columns: int) -> Kernel:
    """The kernel "pack" or "unpack" of one format."""
    layout = "InMemoryOrder" if columns == 1 else "ByColumn"
    others = f"GACT_BITS={bits}", f"GACT_LAYOUT={layout}"
    return Kernel("codec.cu", action, _definitions(dtype, group_size, *others))


def _grid(numel: int, group_size: int, columns: int) -> tuple[int, int]:
    """(blocks, threads in a block) of pack and unpack, see csrc/cuda/tile.h."""
    if columns == 1:
        threads = _MEMORY_ORDER_THREADS
        return -(-numel // (_TILE_ELEMENTS * threads)), threads
    pairs, rows = _COLUMN_PAIRS[group_size], numel // columns
    return -(-rows // group_size) * -(-columns // (2 * pairs)), pairs * group_size // TILE_ROWS


def _launch_codec(
    action: str, elements: Tensor, buffer: Tensor, bits: int, group_size: int, seed: int, columns: int
) -> None:
    """Start "pack" from flat ``elements`` to ``buffer``, or "unpack" in reverse; the caller has checked both."""
    numel, dtype = elements.numel(), elements.dtype
    if numel == 0:
        return
    if elements.data_ptr() % (2 * dtype.itemsize) != 0:  # pairs of elements are read and written
        aligned = elements.clone()
        _launch_codec(action, aligned, buffer, bits, group_size, seed, columns)
        if action == "unpack":
            elements.copy_(aligned)
        return
    if buffer.data_ptr() % 4 != 0:
        raise ValueError("the packed buffer does not begin at a multiple of 4 bytes; use a tensor of its own for it")
    ends = elements.data_ptr(), buffer.data_ptr()
    source, target = ends if action == "pack" else ends[::-1]
    where = payload_format.sections(numel, bits, group_size, columns)
    kernel = codec_kernel(action, dtype, bits, group_size, columns)
    starts = where.scale_start_bytes, where.offset_start_bytes
    size = numel // columns, columns
    launch(buffer.device, kernel, *_grid(numel, group_size, columns), source, *size, seed, target, *starts)


def pack(x: Tensor, bits: int, group_size: int, seed: int, columns: int = 1) -> Tensor:
    """``reference.pack`` for a CUDA tensor."""
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_columns(x.numel(), columns)
    total_bytes = payload_format.sections(x.numel(), bits, group_size, columns).total_bytes
    buffer = x.new_empty(total_bytes, dtype=torch.uint8)
    pack_out(x, bits, group_size, seed, buffer, columns)
    return buffer


def pack_out(x: Tensor, bits: int, group_size: int, seed: int, out: Tensor, columns: int = 1) -> None:
    """``reference.pack_out`` for CUDA tensors."""
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_flat(x, "x")
    payload_format.check_columns(x.numel(), columns)
    payload_format.check_buffer(out, payload_format.sections(x.numel(), bits, group_size, columns).total_bytes)
    _check_device(out, "out", x.device)
    _launch_codec("pack", x, out, bits, group_size, seed, columns)


def unpack(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int = 1
) -> Tensor:
    """``reference.unpack`` for a CUDA tensor."""
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    unpack_out(buffer, bits, group_size, numel, dtype, seed, out, columns)
    return out


def unpack_out(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int = 1,
) -> None:
    """``reference.unpack_out`` for CUDA tensors."""
    payload_format.check_format(bits, group_size, dtype)
    payload_format.check_columns(numel, columns)
    payload_format.check_buffer(buffer, payload_format.sections(numel, bits, group_size, columns).total_bytes)
    payload_format.check_out(out, numel, dtype)
    _check_device(out, "out", buffer.device)
    _launch_codec("unpack", out, buffer, bits, group_size, seed, columns)


def _mask_blocks(numel: int, itemsize: int) -> int:
    return (numel * itemsize + _VECTOR_BYTES * BLOCK_THREADS - 1) // (_VECTOR_BYTES * BLOCK_THREADS)


def pack_mask(x: Tensor) -> Tensor:
    """``reference.pack_mask`` for a CUDA tensor."""
    payload_format.check_mask_dtype(x.dtype)
    payload_format.check_flat(x, "x")
    packed = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    if x.numel() > 0:
        kernel = Kernel("masks.cu", f"pack_mask_{x.dtype.itemsize}")
        blocks = _mask_blocks(x.numel(), x.dtype.itemsize)
        pattern = _MASK_PATTERNS[x.dtype][0]
        launch(x.device, kernel, blocks, BLOCK_THREADS, x.data_ptr(), x.numel(), pattern, packed.data_ptr())
    return packed


def unpack_mask(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """``reference.unpack_mask`` for a CUDA tensor."""
    payload_format.check_mask_dtype(dtype)
    payload_format.check_buffer(buffer, (numel + 7) // 8)
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    if numel > 0:
        kernel = Kernel("masks.cu", f"unpack_mask_{dtype.itemsize}")
        blocks = _mask_blocks(numel, dtype.itemsize)
        one = _MASK_PATTERNS[dtype][1]
        launch(out.device, kernel, blocks, BLOCK_THREADS, buffer.data_ptr(), numel, one, out.data_ptr())
    return out


def rounding_variance(x: Tensor, weight: Tensor, group_size: int, columns: int = 1) -> Tensor:
    """``reference.rounding_variance`` for CUDA tensors; the order of additions is different, but fixed."""
    payload_format.check_format(payload_format.MIN_BITS, group_size, x.dtype)
    payload_format.check_flat(x, "x")
    payload_format.check_weight(weight, x)
    _check_device(weight, "weight", x.device)
    payload_format.check_columns(x.numel(), columns)
    if x.numel() == 0:
        return x.new_zeros(payload_format.MAX_BITS, dtype=torch.float64)
    groups = payload_format.sections(x.numel(), payload_format.MIN_BITS, group_size, columns).groups
    blocks = min(_VARIANCE_BLOCKS, _blocks(groups) if columns == 1 else -(-groups // BLOCK_THREADS))
    partial = x.new_empty((blocks * BLOCK_WARPS, payload_format.MAX_BITS), dtype=torch.float64)
    name, size = ("variance", (x.numel(),)) if columns == 1 else ("variance_columns", (x.numel() // columns, columns))
    kernel = Kernel("variance.cu", name, _definitions(x.dtype, group_size))
    launch(x.device, kernel, blocks, BLOCK_THREADS, x.data_ptr(), weight.data_ptr(), *size, partial.data_ptr())
    return partial.sum(0)
