"""What CudaDevice does that needs no device to be seen."""

from __future__ import annotations

import torch

from gact_dist.offload.device import CudaDevice


def test_nothing_writes_to_memory_that_a_copy_is_to_fill():
    """torch.empty() fills it where deterministic algorithms are asked for, on a stream that the copy does not wait for:
    on a GPU payloads came back as NaN."""
    device = CudaDevice.__new__(CudaDevice)  # a real one has streams
    device.device = torch.device("cpu")
    torch.use_deterministic_algorithms(True)
    try:
        filled, found = torch.empty(1000), device.empty(1000, torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert filled.isnan().all()
    assert not found.isnan().all()
    assert (found.shape, found.dtype, found.device) == ((1000,), torch.float32, device.device)
    assert device.empty(0, torch.uint8).shape == (0,)
