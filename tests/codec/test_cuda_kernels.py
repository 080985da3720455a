"""The CUDA kernels without a GPU: their source run on the CPU by an emulated block of threads.

The emulation (emulation.py) is called through the same functions of cuda.py that launch on a GPU. What it cannot show:
the instructions in csrc/cuda/warp.h and the order of memory accesses. test_ptx.py shows these.
"""

from pathlib import Path

import pytest
import torch
from codec_tensors import random_tensor
from emulation import needs_compiler, run_source
from torch import Tensor

from gact_dist.codec import cuda, nvrtc, ops, reference
from gact_dist.codec import format as payload_format
from tools.ptx.cases import (
    Format,
    differences,
    formats,
    mask_differences,
    norm_differences,
    sampled_differences,
    variance_differences,
)

SEED = -7_123_456_789_012_345_678


def forms() -> list[object]:
    """Formats of all group sizes, of which the default run has a part with every dtype, width, size and layout."""
    return [
        pytest.param(of, id=str(of), marks=() if number % 7 == 0 else pytest.mark.large)
        for number, of in enumerate(formats(payload_format.GROUP_SIZES, tuple(range(1, 9))))
    ]


@needs_compiler
@pytest.mark.parametrize("of", forms())
def test_emulated_kernels_give_the_bits_of_the_reference(kernels: None, of: Format) -> None:
    assert list(differences(of)) == []


def test_a_packed_buffer_that_is_not_aligned_is_refused() -> None:
    x = random_tensor(256, torch.float32)
    total_bytes = payload_format.sections(256, 4, 256).total_bytes
    buffer = torch.zeros(total_bytes + 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        cuda.pack_out(x, 4, 256, 0, buffer[1 : 1 + total_bytes])


def test_rows_that_are_not_whole_are_refused() -> None:
    x = random_tensor(64 * 32, torch.float32)
    for columns in (31, 48, 96):
        with pytest.raises(ValueError, match=f"columns is {columns}, expected a multiple of 32"):
            cuda.pack(x, 4, 64, SEED, columns)


def test_a_single_column_with_gaps_is_refused() -> None:
    """In memory order a kernel knows of no gaps between rows."""
    x = random_tensor(1024 * 5, torch.float32).view(1024, 5)[:, :1]
    buffer = torch.zeros(payload_format.sections(1024, 4, 128).total_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="contiguous"):
        cuda.pack_out(x, 4, 128, SEED, buffer)


def test_tensors_of_two_devices_are_refused() -> None:
    """A kernel would get the address of memory that its device does not have."""
    x, elsewhere = random_tensor(256, torch.float32), torch.device("meta")
    total_bytes = payload_format.sections(256, 4, 64).total_bytes
    packed = torch.empty(total_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out is on meta, expected cpu"):
        cuda.pack_out(x, 4, 64, SEED, packed.to(elsewhere))
    with pytest.raises(ValueError, match="out is on meta, expected cpu"):
        cuda.unpack_out(packed, 4, 64, 256, torch.float32, SEED, x.to(elsewhere))
    with pytest.raises(ValueError, match="weight is on meta, expected cpu"):
        cuda.rounding_variance(x, x.to(elsewhere), 64)


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_emulated_masks_are_the_bits_of_the_reference(kernels: None, dtype: torch.dtype) -> None:
    assert list(mask_differences(dtype)) == []


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
@pytest.mark.parametrize("group_size", [64, 512])
def test_emulated_rounding_variance_is_that_of_the_reference(
    kernels: None, dtype: torch.dtype, group_size: int
) -> None:
    assert list(variance_differences(dtype, group_size)) == []


@needs_compiler
@pytest.mark.parametrize(
    ("threads", "body", "message"),
    [
        (
            32,
            "if (gact::thread_of_block() < 9) gact::any_lane(true);",
            "lane 9 is at the end while lane 0 is at any_lane",
        ),
        (
            96,
            "if (gact::thread_of_block() < 64) gact::sync_block();",
            "warp 2 is at the end while warp 0 is at sync_block",
        ),
    ],
)
def test_the_emulation_notices_threads_that_part(tmp_path: Path, threads: int, body: str, message: str) -> None:
    result = run_source(
        f'#include "cuda/warp.h"\nGACT_KERNEL({threads}) part() {{ {body} }}\n'
        f"int main() {{ gact::i64 none[8] = {{}}; launch(reinterpret_cast<void*>(part), 1, {threads}, none); }}\n",
        tmp_path,
    )
    assert result.returncode != 0
    assert message in result.stderr


def test_where_kernels_are_unavailable_the_reference_serves_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise nvrtc.KernelsUnavailableError("NVRTC is needed")

    monkeypatch.setattr(ops, "_warned", set())
    serve = ops._serve_cuda(refuse, reference.pack)
    x = random_tensor(300, torch.float32)
    with pytest.warns(RuntimeWarning, match="compresses cuda tensors with its slow PyTorch reference: NVRTC") as seen:
        packed = [serve(x, 4, 64, SEED) for _ in range(3)]
    assert len(seen) == 1
    assert all(torch.equal(buffer, reference.pack(x, 4, 64, SEED)) for buffer in packed)


def test_every_operator_has_a_kernel_for_cuda_tensors() -> None:
    for name in ("pack", "pack_out", "unpack", "unpack_out", "pack_mask", "unpack_mask", "rounding_variance", "sample"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gact_dist::{name}", "CUDA")


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_emulated_norms_are_made_again_in_float32_and_rounded_once(kernels: None, dtype: torch.dtype) -> None:
    assert list(norm_differences(dtype)) == []


def test_what_the_kernel_of_norms_does_not_serve_is_told() -> None:
    x, rstd, weight = torch.ones(4, 64), torch.ones(4), torch.ones(64)
    assert cuda.can_normalise(x, rstd, rstd, [weight])
    assert not cuda.can_normalise(x.double(), rstd, rstd, [])
    assert not cuda.can_normalise(x.t(), rstd, rstd, [])
    assert not cuda.can_normalise(x[:, :63].contiguous(), rstd, rstd, [])
    assert not cuda.can_normalise(x[:0], rstd, rstd, [])
    assert not cuda.can_normalise(x, rstd[:3], rstd, [])
    assert not cuda.can_normalise(x, rstd, rstd.half(), [])
    assert not cuda.can_normalise(x, rstd, rstd, [weight.half()])
    assert not cuda.can_normalise(x, rstd, rstd, [weight[:32]])
    assert not cuda.can_normalise(torch.ones(257)[1:].view(4, 64), rstd, rstd, [])
    for elsewhere in ([rstd.to("meta"), rstd, []], [rstd, rstd.to("meta"), []], [rstd, rstd, [weight.to("meta")]]):
        assert not cuda.can_normalise(x, *elsewhere)


@needs_compiler
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_emulated_sampling_gives_the_bits_of_the_cpu(kernels: None, dtype: torch.dtype) -> None:
    assert list(sampled_differences(dtype)) == []


def test_what_the_sampling_kernels_cannot_have_is_refused() -> None:
    x, bits, logarithms = torch.zeros(2, 64), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float16)
    with pytest.raises(ValueError, match="expected rows of words without gaps"):
        cuda.sample(x.t(), 0, 0, bits, logarithms)
    with pytest.raises(ValueError, match=r"got 3 elements of torch\.int32, expected 4 of torch\.int32"):
        cuda.sample(x, 0, 0, bits[:3], logarithms)
    with pytest.raises(ValueError, match=r"x is of torch\.float64, expected one of torch\.float32"):
        cuda.sample(x.double(), 0, 0, bits, logarithms)
    with pytest.raises(ValueError, match="logarithms is on meta, expected cpu"):
        cuda.sampled_words(bits, logarithms.to("meta"), x)
