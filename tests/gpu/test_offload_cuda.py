"""Offload on a CUDA device: the same bits as without, no leaks, no memory rounded up."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip(
        "offload copies between a CUDA device and its host, and torch finds no CUDA device", allow_module_level=True
    )

import small_models
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.config import Offload
from gact_dist.offload.device import CudaDevice
from gact_dist.offload.manager import HostOffload, Place

DEVICE = torch.device("cuda", 0)
MIB = 2**20
PAIRS = [("L3", "L2"), ("L4bit-swap", "L1"), ("swap", "exact")]


def storage(**settings) -> HostOffload:
    return HostOffload(Offload(enabled=True, **{"min_bytes": 1, **settings}), CudaDevice(DEVICE), 2**30)


def gpt(dropout: float = 0.1) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    model, batch = small_models.gpt(width=256, layers=4, batch=16, length=128, dropout=dropout)
    return model.cuda(), (batch[0].cuda(), batch[1].cuda())


def train(level: str, **offload) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See small_models.train."""
    model, batch = gpt()
    changes = {"offload": offload} if Config.from_level(level).offload.enabled else {}
    gact = gact_dist.attach(model, config=Config.from_level(level, adapt_interval=2, **changes))
    found = small_models.train(model, batch, gact, steps=5)
    assert (gact.report().host_bytes > 0) == bool(changes)
    return found


@pytest.mark.parametrize(("level", "without"), PAIRS)
@pytest.mark.parametrize("settings", [{"min_bytes": 1024}, {"min_bytes": 1024, "max_device_bytes": 1}])
def test_offload_changes_no_bit(level, without, settings, deterministic):
    expected, found = train(without), train(level, **settings)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.bool, torch.complex64])
@pytest.mark.parametrize("nbytes", [8, 4096, 33 * MIB + 8])
def test_payloads_come_back_bit_by_bit(dtype, nbytes):
    place = storage(max_device_bytes=1)
    sent = torch.randint(0, 2, (nbytes // dtype.itemsize,), device="cuda").to(dtype)
    expected = sent.clone()
    payload = place.place("t", nbytes)
    payload.send(sent)
    del sent
    torch.cuda.synchronize()
    other = place.place("other", 8)  # by then the device memory has been dropped
    assert payload.held.place is Place.HOST
    assert torch.equal(payload.fetch(), expected)
    del other


def test_device_memory_falls_by_what_leaves():
    # 16 tensors of 32 MiB: without offload all are kept, with it the bound of copies in flight (an eighth, and two) is
    def peak(level):
        model = nn.Sequential(*(nn.Sigmoid() for _ in range(16)))
        x = torch.randn(8 * MIB, device="cuda", requires_grad=True)
        config = Config.from_level(level, **({"offload": {"max_device_bytes": 1}} if level == "swap" else {}))
        gact = gact_dist.attach(model, config=config)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with gact.step():
                loss = model(x).sum()
            loss.backward()
            x.grad = None
        return torch.cuda.max_memory_allocated() - before

    exact, swapped = peak("exact"), peak("swap")
    assert exact >= 16 * 32 * MIB
    # two in flight, one in use and its clone, input and output of the operator, two gradients
    assert swapped <= 8 * 32 * MIB


def test_pinned_memory_is_pinned_and_not_rounded_to_a_power_of_two():
    device = CudaDevice(DEVICE)
    memory = device.allocate_host(33 * MIB)
    assert memory.nbytes == 33 * MIB
    assert memory.is_pinned()
    device.free_host(memory)
    assert not memory.is_pinned()


def test_a_failed_registration_is_a_memory_error_and_no_later_launch_is_blamed(monkeypatch):
    device = CudaDevice(DEVICE)
    cudart = torch.cuda.cudart()
    taken = device.allocate_host(MIB)

    class Again:
        """Registers memory that is registered already."""

        def cudaHostRegister(self, pointer, nbytes, flags):
            return cudart.cudaHostRegister(taken.data_ptr(), nbytes, flags)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Again)
        with pytest.raises(MemoryError, match="cudaHostRegister of 1048576 bytes failed"):
            device.allocate_host(MIB)
    assert torch.ones(10, device="cuda").sum().item() == 10
    device.free_host(taken)


def test_a_copy_is_over_while_the_computation_behind_it_still_runs():
    device = CudaDevice(DEVICE)
    place = HostOffload(Offload(enabled=True), device, 2**30)
    weight = torch.randn(8192, 8192, device="cuda")
    buffer = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    payload = place.place("t", MIB)
    payload.send(buffer)
    for _ in range(200):  # a second or more
        weight @ weight
    computed = device.record(device.current_stream())
    while not payload.held.block.written.done():
        pass
    assert not computed.done()


def test_graphs_that_are_dropped_leave_no_memory():
    model, batch = gpt()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config.from_level("L4bit-swap", offload={"min_bytes": 1024}))
    for number in range(6):
        with gact.step():
            loss = loss_fn(batch)
        if number % 2:
            loss.backward()
        model.zero_grad()
    del loss
    place = gact._schedule.hooks._job.offload
    place.statistics()
    assert (place.device_bytes, place.pool.used_bytes) == (0, 0)
    gact.detach()
    gc.collect()


def test_a_second_backward_and_another_stream():
    model, batch = gpt(dropout=0.0)
    gact = gact_dist.attach(model, config=Config.from_level("swap", offload={"min_bytes": 1024}))
    parameters = list(model.parameters())
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), gact.step():
            loss = small_models.loss_of(model)(batch)
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        torch.cuda.current_stream().wait_stream(side)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(first, second, strict=True))
