"""What of the benchmarks only a GPU can show: other ways to offload, counts of the allocator, limits on memory."""

from __future__ import annotations

import json
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("these parts of the benchmarks are for a CUDA device, and torch finds none", allow_module_level=True)
pytest.importorskip("transformers", reason="the benchmarks' models are those of transformers")


from benchmarks.step import bench_batch, bench_step
from benchmarks.step.bench_step import Machine, Training
from benchmarks.step.shapes import SMALL_SHAPES
from benchmarks.step.strategies import STRATEGIES, Run

CUDA = torch.device("cuda", 0)
MIB = 2**20


@pytest.mark.parametrize("name", ["save_on_cpu", "async offload", "swap"])
def test_offload_of_exact_tensors_gives_the_untouched_gradients(name):
    shape = SMALL_SHAPES["gpt-2048"]
    model, batch = shape.model(CUDA), shape.inputs(8, CUDA)
    run, untouched = Run(STRATEGIES[name], model), Run(STRATEGIES["untouched"], model)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(3):
                found, expected = (
                    torch.autograd.grad(r.forward(batch), list(model.parameters())) for r in (run, untouched)
                )
                # save_on_cpu gives tensors back without their strides: other kernels, which round otherwise
                same = torch.allclose if name == "save_on_cpu" else torch.equal
                assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_strategy_runs_and_memory_is_counted(tmp_path):
    path = tmp_path / "step.json"
    arguments = ["--small", "--part", "gpt-2048", "--batch", "64", "--rounds", "2", "--steps", "1", "--json", str(path)]
    assert bench_step.main(arguments) == 0
    part = json.loads(path.read_text())["parts"]["gpt-2048"]
    assert part["not_run"] == {}
    rows = part["rows"]
    assert set(rows) == set(STRATEGIES)
    held = {name: row["held_bytes"] for name, row in rows.items()}
    assert all(row["peak_bytes"] >= row["held_bytes"] > 0 for row in rows.values())
    # four bits of 32, and what stays exact next to the loss
    assert held["L1"] < held["untouched"] / 3
    assert held["L2.2"] < held["L2"] < held["exact"]
    assert held["checkpoint + L2"] < held["checkpoint"] < held["selective checkpoint"] < held["untouched"]
    assert rows["L1"]["floor_s"] > 0


def test_what_the_allocator_counts_is_what_was_kept():
    model = torch.nn.Sequential(*(torch.nn.Sigmoid() for _ in range(4))).cuda()
    batch = torch.randn(16, MIB, device=CUDA, requires_grad=True), torch.zeros(16, dtype=torch.long, device=CUDA)
    weight = torch.nn.Parameter(torch.zeros(1, device=CUDA))
    training = Training("untouched", model, torch.optim.SGD([weight], 0.1), batch)
    found = training.memory(Machine(CUDA))
    # four results and the log-softmax, of 64 MiB each; the gradient of the input remains
    assert 5 * 64 * MIB <= found["held_bytes"] <= 5 * 64 * MIB + MIB
    assert found["peak_bytes"] >= 6 * 64 * MIB


@pytest.mark.parametrize(("gib", "batch", "fits"), [(8, 2, True), (0.25, 4096, False)])
def test_a_probe_fits_or_runs_out_of_its_share(gib, batch, fits):
    command = [sys.executable, "-m", bench_batch.MODULE, "--small", "--part", "gpt-2048", "--strategies", "L1"]
    probe = bench_batch.run_probe([*command, "--gib", str(gib), "--probe", str(batch)], batch, 120)
    assert probe.fits is fits
    assert fits or "out of memory" in probe.reason
    assert not fits or 0 < probe.peak_bytes < gib * 2**30
