"""The operators on NVIDIA GPUs: launches of the kernels of csrc/cuda/, which are compiled at first use.

The results are the bits of reference.py. Kernels run on torch's current stream of the tensor's device, results come
from torch's allocator, and nothing waits for the device.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from . import format as payload_format
from . import sampling
from .driver import Kernel, find_driver, functions_of, launch
from .format import TILE_ROWS
from .plain_calls import PlainCalls

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
# As in csrc/cuda/sampled.cu: groups of log-probabilities that a warp has.
_WARP_GROUPS = 4
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


@functools.cache
def codec_kernel(action: str, dtype: torch.dtype, bits: int, group_size: int, columns: int) -> Kernel:
    """The kernel "pack" or "unpack" of one format."""
    layout = "InMemoryOrder" if columns == 1 else "ByColumn"
    others = f"GACT_BITS={bits}", f"GACT_LAYOUT={layout}"
    return Kernel("codec.cu", action, _definitions(dtype, group_size, *others))


_MOST_LAUNCHES = 4096  # a job's batches may have many sizes


@functools.lru_cache(_MOST_LAUNCHES)
def _grid(numel: int, group_size: int, columns: int) -> tuple[int, int]:
    """(blocks, threads in a block) of pack and unpack, see csrc/cuda/tile.h."""
    if columns == 1:
        threads = _MEMORY_ORDER_THREADS
        return -(-numel // (_TILE_ELEMENTS * threads)), threads
    pairs, rows = _COLUMN_PAIRS[group_size], numel // columns
    return -(-rows // group_size) * -(-columns // (2 * pairs)), pairs * group_size // TILE_ROWS


_sections = functools.lru_cache(_MOST_LAUNCHES)(payload_format.sections)


def _launch_codec(
    action: str, elements: Tensor, buffer: Tensor, bits: int, group_size: int, seed: int, columns: int
) -> None:
    """Start "pack" from ``elements`` to ``buffer``, or "unpack" in reverse; the caller has checked both.

    elements: flat; for pack also [rows, columns] with gaps between the rows.
    """
    numel, dtype = elements.numel(), elements.dtype
    if numel == 0:
        return
    place, bytes_at = elements.data_ptr(), buffer.data_ptr()
    pitch = columns if elements.dim() == 1 else elements.stride(0)
    if place % (2 * dtype.itemsize) != 0 or (pitch % 2 != 0 and columns > 1):  # pairs of elements are read and written
        aligned = elements.clone(memory_format=torch.contiguous_format).view(-1)
        _launch_codec(action, aligned, buffer, bits, group_size, seed, columns)
        if action == "unpack":
            elements.copy_(aligned)
        return
    if bytes_at % 4 != 0:
        raise ValueError("the packed buffer does not begin at a multiple of 4 bytes; use a tensor of its own for it")
    kernel, grid = codec_kernel(action, dtype, bits, group_size, columns), _grid(numel, group_size, columns)
    where, rows = _sections(numel, bits, group_size, columns), numel // columns
    starts = where.scale_start_bytes, where.offset_start_bytes
    if action == "pack":
        launch(buffer.device, kernel, *grid, place, rows, columns, pitch, seed, bytes_at, *starts)
    else:
        launch(buffer.device, kernel, *grid, bytes_at, rows, columns, seed, place, *starts)


def plain_calls(
    device: torch.device, dtype: torch.dtype, bits: int, group_size: int, numel: int, columns: int
) -> PlainCalls | None:
    """What _launch_codec() launches, for a caller who does the rest; None where it cannot be loaded here and now."""
    functions = functions_of(device, codec_kernel("pack", dtype, bits, group_size, columns))
    if functions is None:
        return None
    driver, (blocks, threads) = find_driver(), _grid(numel, group_size, columns)
    return PlainCalls(
        functions["pack"].value or 0,
        functions["unpack"].value or 0,
        driver.launch_address,
        driver,
        blocks,
        threads,
        alignment=2 * dtype.itemsize,
    )


def pack(x: Tensor, bits: int, group_size: int, seed: int, columns: int = 1) -> Tensor:
    """``reference.pack`` for a CUDA tensor."""
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_contiguous(x, "x")
    payload_format.check_columns(x.numel(), columns)
    return pack_checked(x.view(-1), bits, group_size, seed, columns)


def pack_checked(x: Tensor, bits: int, group_size: int, seed: int, columns: int) -> Tensor:
    """The same for arguments that are known to be right. x: also [rows, columns] with gaps between the rows."""
    total_bytes = _sections(x.numel(), bits, group_size, columns).total_bytes
    buffer = torch.empty(total_bytes, dtype=torch.uint8, device=x.device)
    _launch_codec("pack", x, buffer, bits, group_size, seed, columns)
    return buffer


def pack_out(x: Tensor, bits: int, group_size: int, seed: int, out: Tensor, columns: int = 1) -> None:
    """``reference.pack_out`` for CUDA tensors. x: also [rows, columns] with gaps between the rows."""
    payload_format.check_format(bits, group_size, x.dtype)
    if columns == 1 or x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1 or x.stride(0) < columns:
        payload_format.check_contiguous(x, "x")
        x = x.view(-1)
    payload_format.check_columns(x.numel(), columns)
    payload_format.check_buffer(out, _sections(x.numel(), bits, group_size, columns).total_bytes)
    _check_device(out, "out", x.device)
    _launch_codec("pack", x, out, bits, group_size, seed, columns)


def unpack(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int = 1
) -> Tensor:
    """``reference.unpack`` for a CUDA tensor."""
    payload_format.check_format(bits, group_size, dtype)
    payload_format.check_columns(numel, columns)
    payload_format.check_buffer(buffer, _sections(numel, bits, group_size, columns).total_bytes)
    return unpack_checked(buffer, bits, group_size, numel, dtype, seed, columns)


def unpack_checked(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int
) -> Tensor:
    """The same for arguments that are known to be right."""
    out = torch.empty(numel, dtype=dtype, device=buffer.device)
    _launch_codec("unpack", out, buffer, bits, group_size, seed, columns)
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
    payload_format.check_buffer(buffer, _sections(numel, bits, group_size, columns).total_bytes)
    payload_format.check_out(out, numel, dtype)
    _check_device(out, "out", buffer.device)
    _launch_codec("unpack", out, buffer, bits, group_size, seed, columns)


def can_normalise(x: Tensor, mean: Tensor | None, rstd: Tensor, vectors: Sequence[Tensor]) -> bool:
    """Whether normalise() serves these tensors. vectors: weight and bias, as far as there are any."""
    if x.dtype not in ELEMENTS or not payload_format.are_of_rows(x, mean, rstd, vectors):
        return False
    if x.nbytes // rstd.numel() % _VECTOR_BYTES != 0 or x.nbytes >= 2**32 * _VECTOR_BYTES:
        return False
    return all(each.data_ptr() % _VECTOR_BYTES == 0 for each in (x, *vectors))


def normalise(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """See norms.normalised(), for tensors that can_normalise() has seen. out: like x, and maybe x itself."""
    vectors = x.nbytes // _VECTOR_BYTES
    places = (0 if each is None else each.data_ptr() for each in (mean, rstd, weight, bias, out))
    kernel = Kernel("norms.cu", "normalise", (f"GACT_ELEMENT={ELEMENTS[x.dtype]}",))
    blocks = -(-vectors // BLOCK_THREADS)
    launch(x.device, kernel, blocks, BLOCK_THREADS, x.data_ptr(), vectors, vectors // rstd.numel(), *places)


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


def _sampled_kernel(name: str, words: Tensor, bits: Tensor, logarithms: Tensor, argument: str) -> Kernel:
    """For words [rows, words]. Raises ValueError where it cannot have them."""
    sampling.check_groups(words, bits, logarithms, argument)
    _check_device(bits, "bits", words.device)
    _check_device(logarithms, "logarithms", words.device)
    if words.dtype not in ELEMENTS:
        raise ValueError(f"{argument} is of {words.dtype}, expected one of {', '.join(map(str, ELEMENTS))}")
    if bits.numel() >= 2**31:
        raise ValueError(
            f"{argument} has {bits.numel()} groups, expected fewer than 2^31; give some of the rows at a time"
        )
    return Kernel("sampled.cu", name, (f"GACT_ELEMENT={ELEMENTS[words.dtype]}",))


def sample(x: Tensor, seed: int, first: int, bits: Tensor, logarithms: Tensor) -> Tensor:
    """``sampling.sample`` for CUDA tensors, as csrc/cpu/sampled.h has it bit for bit."""
    kernel, groups = _sampled_kernel("sample", x, bits, logarithms, "x"), bits.numel()
    variance = torch.empty(groups, dtype=torch.float32, device=x.device)
    places = bits.data_ptr(), logarithms.data_ptr(), variance.data_ptr()
    warps = -(-(first + groups) // _WARP_GROUPS) - first // _WARP_GROUPS
    launch(x.device, kernel, _blocks(warps), BLOCK_THREADS, x.data_ptr(), groups, x.shape[1], seed, first, *places)
    return variance


def sampled_words(bits: Tensor, logarithms: Tensor, out: Tensor) -> None:
    """``sampling.sampled_words`` for CUDA tensors."""
    kernel, groups = _sampled_kernel("sampled_words", out, bits, logarithms, "out"), bits.numel()
    sizes = groups, out.shape[1]
    places = bits.data_ptr(), logarithms.data_ptr()
    warps = -(-groups // _WARP_GROUPS)
    launch(out.device, kernel, _blocks(warps), BLOCK_THREADS, *places, *sizes, out.data_ptr())


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
