"""The CUDA kernels without a GPU: run on the CPU by an emulated warp, and compiled for the GPUs they are meant for.

The emulation (emulation.py) is called through the same functions of cuda.py that launch on a GPU. What it cannot show:
the instructions in csrc/cuda/warp.h and the order of memory accesses.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from codec_tensors import random_tensor, raw, special_tensors
from emulation import needs_compiler, run_source
from torch import Tensor

from gact_dist.codec import cuda, nvrtc, ops, reference
from gact_dist.codec import format as payload_format

DTYPES = payload_format.PACK_DTYPES
ALL_BITS = range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1)
SEED = -7_123_456_789_012_345_678


# ---- emulation


def forms() -> Iterator[object]:
    """Element types and group sizes. Compiling takes longest, and Half and Bfloat have one layout: each has half of the
    group sizes, the others with --all."""
    for dtype in DTYPES:
        for group_size in payload_format.GROUP_SIZES:
            large = (dtype == torch.float16) == (group_size in (128, 256)) and dtype != torch.float32
            yield pytest.param(dtype, group_size, marks=pytest.mark.large if large else ())


FORMS = [*forms()]

# Tiles have 1024 elements (float) or 2048; the last one is short, or there is none.
SIZES = (1, 15, 77, 1024, 2048 + 513, 3 * 2048 + 1)


@needs_compiler
@pytest.mark.parametrize(("dtype", "group_size"), FORMS)
def test_emulated_kernels_give_the_bits_of_the_reference(kernels: None, dtype: torch.dtype, group_size: int) -> None:
    for bits in ALL_BITS:
        for numel in SIZES:
            assert_same(random_tensor(numel, dtype), bits, group_size, numel)


@needs_compiler
@pytest.mark.parametrize(("dtype", "group_size"), FORMS)
def test_emulated_kernels_agree_on_rare_values(kernels: None, dtype: torch.dtype, group_size: int) -> None:
    x = torch.cat([*special_tensors(dtype).values()])  # each fills whole tiles
    for bits in (1, 2, 5, 7, 8):
        assert_same(x, bits, group_size, "rare values")


def assert_same(x: Tensor, bits: int, group_size: int, what: object) -> None:
    """The bytes that are packed, and from the reference's bytes the bits that are decoded."""
    expected = reference.pack(x, bits, group_size, SEED)
    assert torch.equal(cuda.pack(x, bits, group_size, SEED), expected), (what, bits)
    decoded = cuda.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED)
    wanted = reference.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED)
    assert torch.equal(raw(decoded), raw(wanted)), (what, bits)


@needs_compiler
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 128), (torch.float16, 64), (torch.bfloat16, 128)])
def test_emulated_kernels_read_and_write_unaligned_memory(kernels: None, dtype: torch.dtype, size: int) -> None:
    x = random_tensor(5001, dtype)[1:]
    expected = reference.pack(x, 3, size, SEED)
    assert torch.equal(cuda.pack(x, 3, size, SEED), expected)
    out = torch.full((5002,), 7, dtype=dtype)
    cuda.unpack_out(expected, 3, size, 5000, dtype, SEED, out[1:5001])
    assert torch.equal(raw(out[1:5001]), raw(reference.unpack(expected, 3, size, 5000, dtype, SEED)))
    assert float(out[0]) == float(out[-1]) == 7  # nothing beside it was written


def test_a_packed_buffer_that_is_not_aligned_is_refused() -> None:
    x = random_tensor(256, torch.float32)
    total_bytes = payload_format.sections(256, 4, 256).total_bytes
    buffer = torch.zeros(total_bytes + 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        cuda.pack_out(x, 4, 256, 0, buffer[1 : 1 + total_bytes])


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_emulated_masks_are_the_bits_of_the_reference(kernels: None, dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 8, 9, 63, 2048, 2049 * 4 + 3):
        x = torch.empty(numel + 1, dtype=dtype)[1:]  # where unaligned, by single elements
        x.copy_(random_tensor(numel, torch.float32) > 0)
        if dtype.is_floating_point and numel > 20:
            x[3], x[4], x[5] = -0.0, torch.nan, torch.finfo(dtype).smallest_normal
        for tensor in (x, x.clone()):
            packed = cuda.pack_mask(tensor)
            assert torch.equal(packed, reference.pack_mask(x))
            assert torch.equal(cuda.unpack_mask(packed, numel, dtype), (x != 0).to(dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [64, 512])
def test_emulated_rounding_variance_is_that_of_the_reference(
    kernels: None, dtype: torch.dtype, group_size: int
) -> None:
    for numel in (0, 1, 100, 4099):
        x = random_tensor(numel, dtype)
        x[numel // 2 : numel // 2 + 300] = 0  # plain rounding beside dithering
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        # float32 partial sums of at most 21 additions each: relative error below 21 * 2^-24 = 1.3e-6.
        expected = reference.rounding_variance(x, weight, group_size)
        torch.testing.assert_close(cuda.rounding_variance(x, weight, group_size), expected, rtol=1e-5, atol=0)
    x[-1] = torch.inf
    assert bool(torch.isinf(cuda.rounding_variance(x, weight, group_size)).all())
    weight[-(4099 % group_size or group_size) :] = 0
    assert bool(torch.isfinite(cuda.rounding_variance(x, weight, group_size)).all())


@needs_compiler
@pytest.mark.parametrize(
    ("threads", "body", "message"),
    [
        (
            32,
            "if (gact::thread_of_block() < 9) gact::sync_warp();",
            "lane 9 is at the end while lane 0 is at sync_warp",
        ),
        (
            96,
            "if (gact::warp_of_block() < 2) gact::sync_block();",
            "warp 2 is at the end while warp 0 is at sync_block",
        ),
    ],
)
def test_the_emulation_notices_threads_that_part(tmp_path: Path, threads: int, body: str, message: str) -> None:
    result = run_source(
        f'#include "cuda/warp.h"\nGACT_KERNEL({threads}) part() {{ {body} }}\n'
        f"int main() {{ gact::i64 none[7] = {{}}; launch(reinterpret_cast<void*>(part), 1, {threads}, none); }}\n",
        tmp_path,
    )
    assert result.returncode != 0
    assert message in result.stderr


def test_where_kernels_are_unavailable_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise nvrtc.KernelsUnavailableError("CuPy is needed")

    monkeypatch.setattr(ops, "_warned", set())
    serve = ops._serve_cuda(refuse, reference.pack)
    x = random_tensor(300, torch.float32)
    with pytest.warns(RuntimeWarning, match="compresses cuda tensors with its slow PyTorch reference: CuPy") as seen:
        packed = [serve(x, 4, 64, SEED) for _ in range(3)]
    assert len(seen) == 1
    assert all(torch.equal(buffer, reference.pack(x, 4, 64, SEED)) for buffer in packed)


def test_every_operator_has_a_kernel_for_cuda_tensors() -> None:
    for name in ("pack", "pack_out", "unpack", "unpack_out", "pack_mask", "unpack_mask", "rounding_variance"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gact_dist::{name}", "CUDA")
