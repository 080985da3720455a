"""Whole training steps in which the host never waits for the device, by torch's own check and by a profiler's trace."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("what waits for a CUDA device needs one, and torch finds none", allow_module_level=True)

import small_models
from host_waits import host_waits
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config

JOBS = [
    (None, False), ("L1", False), ("L2", False), ("L2.2", False), ("exact", False), ("L1", True), ("L2", True),
    ("L3", False), ("L4bit-swap", False), ("swap", False), ("L3", True),
]  # fmt: skip


class CheckpointedGPT(small_models.TinyGPT):
    """TinyGPT whose blocks run under torch's checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def job(level: str | None, checkpointed: bool) -> tuple[Callable[[], None], gact_dist.Controller | None]:
    """A step of a job that has adapted and in which all memory is there; and its controller."""
    torch.manual_seed(0)
    model = (CheckpointedGPT if checkpointed else small_models.TinyGPT)(width=256, layers=4, dropout=0.1).cuda()
    tokens = torch.randint(0, 37, (16, 129), device="cuda")
    batch, loss_fn = (tokens[:, :-1], tokens[:, 1:]), small_models.loss_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    gact = None
    if level is not None:
        offload = {"offload": {"min_bytes": 1024}} if Config.from_level(level).offload.enabled else {}
        gact = gact_dist.attach(model, config=Config.from_level(level, **offload))
        gact.calibrate(loss_fn, batch)

    def step() -> None:
        if gact is None:
            loss = loss_fn(batch)
        else:
            with gact.step():
                loss = loss_fn(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(40):  # kernels are compiled, roles found, and what the first plans of offload took is given back
        step()
    return step, gact


def assert_at_work(gact: gact_dist.Controller | None) -> None:
    if gact is not None:
        report = gact.report()
        assert report.exact_bytes > report.retained_bytes or gact.config.policy == "exact"
        assert (report.host_bytes > 0) == gact.config.offload.enabled


@pytest.mark.parametrize(("level", "checkpointed"), JOBS)
def test_torch_finds_no_wait_in_whole_steps(level, checkpointed):
    step, gact = job(level, checkpointed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_at_work(gact)


@pytest.mark.parametrize(("level", "checkpointed"), JOBS)
def test_a_trace_shows_no_wait_in_whole_steps(level, checkpointed):
    """torch's own check knows torch's calls; this one sees the driver's and those of the pool as well."""
    step, gact = job(level, checkpointed)
    gc.collect()  # pinned memory of an earlier test is given back now, and not while this one is watched
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("steps"):
            for _ in range(5):
                step()
        with record_function("after"):
            torch.cuda.synchronize()
    assert host_waits(trace.events(), "steps") == []
    assert "cudaDeviceSynchronize" in host_waits(trace.events(), "after")  # so that the trace would have shown one
    assert_at_work(gact)
