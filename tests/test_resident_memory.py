"""What stays resident on a CPU when an adaptation has ended."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

import pytest
import small_models
import torch

import gact_dist
from gact_dist import Config

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc"
)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_at_adaptations() -> None:
    """Print by which factor the resident set has grown when each of two adaptations has ended."""
    model, batch = small_models.gpt(batch=8, length=64, width=128, layers=3)
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=64))
    gact.calibrate(loss_fn, tuple(part[:1] for part in batch))  # code that is loaded at first use stays
    for _ in range(2):
        with gact.step():
            loss = loss_fn(batch)
        loss.backward()
        del loss
        ctypes.CDLL(None).malloc_trim(0)  # what is resident before is in use
        before = resident_bytes()
        gact.calibrate(loss_fn, batch, samples=8)
        print(resident_bytes() / before)


@glibc
def test_the_resident_set_after_an_adaptation_is_within_two_percent_of_before():
    # in a process of its own: other tests leave memory that an adaptation would use again, or return
    folders = os.pathsep.join(sys.path)
    program = f"import sys; sys.path[:0] = {folders!r}.split({os.pathsep!r}); import {__name__} as tests"
    result = subprocess.run(
        [sys.executable, "-c", f"{program}; tests.growth_at_adaptations()"], capture_output=True, text=True, check=True
    )
    growth = [float(line) for line in result.stdout.split()]
    assert len(growth) == 2
    assert max(growth) < 1.02


def live_bytes() -> int:
    """Of the storages of all tensors that Python knows."""
    storages = {}
    for candidate in gc.get_objects():
        # other layouts, as sparse tensors left by other tests have them, hold theirs in strided tensors of their own
        if type(candidate) is torch.Tensor and candidate.device.type == "cpu" and candidate.layout is torch.strided:
            storages[candidate.untyped_storage().data_ptr()] = candidate.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("estimator", ["one-pass", "perturbation"])
def test_an_adaptation_leaves_no_tensor_alive(estimator):
    model, batch = small_models.gpt()
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=64, estimator=estimator))
    gc.collect()
    before = live_bytes()
    gact.calibrate(small_models.loss_of(model), batch)
    gc.collect()
    # a block's smallest activation is far larger; masks and single numbers may be cached
    assert live_bytes() - before < 1024


def test_a_model_on_an_accelerator_leaves_the_allocator_alone(monkeypatch):
    trimmed = []
    monkeypatch.setattr("gact_dist.steps.malloc.trim", lambda: trimmed.append(True))
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=64))
    gact.calibrate(small_models.loss_of(model), batch)
    assert trimmed
    trimmed.clear()
    parameters = [*model.parameters(), torch.empty(1, device="meta")]
    monkeypatch.setattr(model, "parameters", lambda: iter(parameters))
    gact.calibrate(small_models.loss_of(model), batch)
    assert not trimmed
