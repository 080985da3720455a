"""The PyTorch reference on a CUDA device, as where NVRTC is absent: the bytes of the CPU, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from codec_tensors import random_tensor, raw, special_tensors
from torch import Tensor

from gact_dist.codec import driver, nvrtc, ops
from gact_dist.codec import format as payload_format

DEVICE = "cuda"

if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

SEED = -7_123_456_789_012_345_678


def forget_kernels() -> None:
    driver._loaded.cache_clear()
    ops._warned.discard("cuda")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVRTC cannot be found; what is remembered of that is gone before and after."""

    def refuse() -> None:
        raise nvrtc.KernelsUnavailableError("NVRTC is needed")

    monkeypatch.setattr(driver, "find_nvrtc", refuse)
    forget_kernels()
    yield
    assert "cuda" in ops._warned  # so the reference was at work
    forget_kernels()


def without_waiting(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """What a function returns; whatever makes torch wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:gact_dist compresses cuda tensors with its slow PyTorch reference")
@pytest.mark.parametrize("columns", [1, 96])
@pytest.mark.parametrize("dtype", payload_format.PACK_DTYPES)
def test_the_bytes_are_those_of_the_cpu(dtype, columns):
    x = torch.cat([random_tensor(96 * 300, dtype), *special_tensors(dtype).values()])
    x = x[: x.numel() // columns * columns]
    on_device = x.to(DEVICE)
    for bits in (1, 3, 8):
        expected = ops.pack(x, bits, 256, SEED, columns)
        packed = without_waiting(ops.pack, on_device, bits, 256, SEED, columns)
        assert torch.equal(packed.cpu(), expected), bits
        decoded = without_waiting(ops.unpack, packed, bits, 256, x.numel(), dtype, SEED, columns)
        assert torch.equal(raw(decoded.cpu()), raw(ops.unpack(expected, bits, 256, x.numel(), dtype, SEED, columns)))


@pytest.mark.filterwarnings("ignore:gact_dist compresses cuda tensors with its slow PyTorch reference")
@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_masks_are_those_of_the_cpu(dtype):
    x = (random_tensor(5003, torch.float32) > 0).to(dtype)
    packed = without_waiting(ops.pack_mask, x.to(DEVICE))
    assert torch.equal(packed.cpu(), ops.pack_mask(x))
    assert torch.equal(without_waiting(ops.unpack_mask, packed, x.numel(), dtype).cpu(), x)


def test_it_says_so_once():
    x = random_tensor(1000, torch.float32).to(DEVICE)
    with pytest.warns(RuntimeWarning, match="compresses cuda tensors with its slow PyTorch reference: NVRTC") as seen:
        assert torch.equal(*(ops.pack(x, 4, 256, SEED) for _ in range(2)))
    assert len(seen) == 1
