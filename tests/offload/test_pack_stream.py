"""Rounding on a stream of its own, on the simulated device: who waits for whom, and what may be freed when."""

from __future__ import annotations

import pytest
import torch
from simulated_device import Simulated, Stream
from torch import Tensor, nn

import gact_dist
import gact_dist.hooks.engine
from gact_dist import Config, codec
from gact_dist.offload import PackStream

PACK_S = 3.0


class Watched(Simulated):
    """Notes what is handed from one stream to another."""

    def hand_over(self, tensor: Tensor, owner: Stream, user: Stream) -> None:
        self.__dict__.setdefault("handed", []).append((tensor.data_ptr(), owner.name, user.name))
        super().hand_over(tensor, owner, user)


def packed_beside(device: Simulated, x: Tensor):
    def pack():
        device.run(PACK_S)
        return codec.pack(x, 4, 1)

    return PackStream(device).run(x, pack, lambda packed: packed.payload)


def test_packing_waits_for_what_makes_the_tensor_and_only_a_reader_waits_for_packing():
    device = Simulated()
    device.run(1.0)
    _, ready = packed_beside(device, torch.randn(64, 64))
    assert device.pack_stream.time_s == 1.0 + PACK_S
    assert device.compute.time_s == 1.0
    device.run(1.0)
    assert device.compute.time_s == 2.0
    ready()
    assert device.compute.time_s == 1.0 + PACK_S


def test_a_reader_that_comes_late_does_not_wait():
    device = Simulated()
    _, ready = packed_beside(device, torch.randn(64, 64))
    device.run(2 * PACK_S)
    ready()
    assert device.compute.time_s == 2 * PACK_S


def test_no_stream_loses_memory_that_the_other_one_uses():
    device, x = Watched(), torch.randn(64, 64)
    packed, _ = packed_beside(device, x)
    assert device.handed == [(x.data_ptr(), "compute", "pack"), (packed.payload.data_ptr(), "pack", "compute")]


def test_capturing_is_refused():
    device = Simulated(capturing=True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        packed_beside(device, torch.randn(64, 64))


def model_and_input() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
    return nn.Sequential(*layers), torch.randn(64, 32)


def gradients(config: Config) -> list[Tensor]:
    model, x = model_and_input()
    gact = gact_dist.attach(model, config=config)
    for _ in range(3):
        model.zero_grad()
        with gact.step():
            loss = model(x).square().sum()
        loss.backward()
    assert any(row.codec == "quantised" for row in gact.report().rows)
    gact.detach()
    return [parameter.grad for parameter in model.parameters()]


def test_gradients_are_those_of_packing_on_the_computing_stream(monkeypatch):
    device = Simulated()
    monkeypatch.setattr(gact_dist.hooks.engine, "open_pack_stream", lambda model: PackStream(device))
    waits: list[str] = []
    wait = device.wait
    monkeypatch.setattr(device, "wait", lambda stream, event: (waits.append(stream.name), wait(stream, event)))
    beside = gradients(Config(policy="uniform", pack_stream=True))
    alone = gradients(Config(policy="uniform"))
    assert all(torch.equal(a, b) for a, b in zip(beside, alone, strict=True))
    assert waits.count("pack") > 0
    assert waits.count("compute") >= waits.count("pack")  # each payload is unpacked once at least


def test_what_is_not_on_the_device_is_packed_as_without_it(monkeypatch):
    device = Simulated()
    device.device = torch.device("meta")
    monkeypatch.setattr(gact_dist.hooks.engine, "open_pack_stream", lambda model: PackStream(device))
    gact = gact_dist.attach(nn.Linear(2, 2), config=Config(policy="uniform", pack_stream=True))
    assert gact._schedule.hooks.encoder.pack(torch.randn(64, 64), 4, 1).ready is None


def test_a_payload_in_a_graph_of_tensors_is_waited_for():
    device, x = Simulated(), torch.randn(64, 64)
    packed, ready = packed_beside(device, x)
    packed.ready = ready
    codec.to_tensors(packed)
    assert device.compute.time_s == PACK_S


def test_it_needs_a_cuda_device_and_no_offload():
    with pytest.raises(ValueError, match="expected one of them"):
        Config.from_level("L3", pack_stream=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no CUDA device"):
            gact_dist.attach(nn.Linear(2, 2), config=Config(policy="uniform", pack_stream=True))
