"""Loops beyond one forward and one backward, frozen layers and float16 scaling, in wrapped models on two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exact_codecs import store_exactly
from modes import local_part
from test_training_loops import Adapted
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import gact_dist
from gact_dist import Config

EXACT = Config(policy="exact")
ROUNDED = Config(bits=4, adapt_interval=2, adapt_tolerance=0, calibration_samples=8, min_numel=16)
# 48 samples of 32 numbers: no activation has the shape of a parameter
SAMPLES, WIDTH, CLASSES, STEPS = 48, 32, 10, 4


class Layer(nn.Sequential):
    """[samples, 32] -> [samples, 32], wrapped by itself."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(linear, nn.GELU(), nn.Dropout(0.1))


def network(linear: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(linear()), Layer(linear()), nn.Linear(WIDTH, CLASSES))


dense = partial(network, partial(nn.Linear, WIDTH, WIDTH))
low_rank = partial(network, partial(Adapted, WIDTH))


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: nn.Module) -> nn.Module:
    layers = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=layers)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for layer in list(model)[:2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def half(model: nn.Module) -> nn.Module:
    return fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))


def zero3(model: nn.Module) -> nn.Module:
    os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"] = "cpu", str(dist.get_rank())
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, 1e-2), config=settings)[0]


# -- loops: each trains a wrapped model -----------------------------------------------------------------------------


def batches() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randint(0, CLASSES, (SAMPLES,))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def plain(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        inputs, targets = batches()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_engine(engine: Any) -> None:
    for _ in range(STEPS):
        inputs, targets = batches()
        engine.backward(F.cross_entropy(engine(inputs), targets))
        engine.step()


def contrastive(model: nn.Module) -> None:
    """Two forwards before one backward (SimCLR)."""
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        x, _ = batches()
        first, second = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        F.cross_entropy(first @ second.T / 0.1, torch.arange(SAMPLES)).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(model: nn.Module) -> None:
    """Evaluation after each step."""
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        inputs, targets = batches()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        model.train()


def interrupted(model: nn.Module) -> None:
    """Before each step a forward that raises on all ranks, on its way into the model."""
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, WIDTH + 1))
        inputs, targets = batches()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: Any) -> None:
    """A loss scale that overflows at first, and two micro-batches a step, of which the last reduces gradients."""
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=100)
    for _ in range(2 * STEPS):
        for micro_batch in range(2):
            inputs, targets = batches()
            model.set_requires_gradient_sync(micro_batch == 1)
            scaler.scale(F.cross_entropy(model(inputs).float(), targets) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**20


# -- a job ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a job left on this rank."""

    weights: list[Tensor]
    random_state: Tensor
    plan: dict[str, Any] = field(default_factory=dict)
    codecs: set[str] = field(default_factory=set)
    compressed_parameters: list[str] = field(default_factory=list)


def train(build: Any, wrap: Any, loop: Any, config: Config | None, exactly: bool = False) -> Run:
    """exactly: tensors are kept as they are, whatever the plan says."""
    linear = F.linear
    model = build()
    whole = {tuple(parameter.shape) for parameter in model.parameters()}
    model = wrap(model)
    gact = gact_dist.attach(model, config=config).follow() if config is not None else None
    if gact is not None and exactly:
        store_exactly(gact)
    torch.manual_seed(7 + dist.get_rank())
    loop(model)
    weights = [getattr(p, "ds_tensor", local_part(p)).detach().clone() for p in model.parameters()]
    run = Run(weights, torch.get_rng_state())
    if gact is not None:
        rows = gact.report().rows
        shapes = whole | {shape[::-1] for shape in whole}
        run.plan, run.codecs = gact.plan, {row.codec for row in rows}
        run.compressed_parameters = [row.name for row in rows if row.codec != "exact" and row.shape in shapes]
        gact.detach()
    if loop is by_engine:
        model.destroy()
        F.linear = linear  # ZeRO-3 leaves its own
    return run


def same(first: Run, second: Run) -> bool:
    weights = zip(first.weights, second.weights, strict=True)
    return torch.equal(first.random_state, second.random_state) and all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize(
    ("build", "wrap", "loop"),
    [
        pytest.param(dense, ddp, contrastive, id="contrastive-DDP"),
        pytest.param(dense, fsdp2, contrastive, id="contrastive-FSDP2"),
        pytest.param(dense, ddp, evaluated, id="evaluated-DDP"),
        pytest.param(dense, fsdp2, evaluated, id="evaluated-FSDP2"),
        pytest.param(dense, ddp, interrupted, id="interrupted-DDP"),
        pytest.param(dense, fsdp2, interrupted, id="interrupted-FSDP2"),
        pytest.param(dense, half, scaled, id="float16-FSDP2"),
        pytest.param(low_rank, fsdp1, plain, id="low-rank-FSDP1"),
        pytest.param(low_rank, fsdp2, plain, id="low-rank-FSDP2"),
        pytest.param(low_rank, zero3, by_engine, id="low-rank-ZeRO-3"),
    ],
)
def test_a_loop_is_kept_bitwise_and_adapts(ranks, build, wrap, loop):
    untouched, exact, measured, rounded = (
        ranks(train, build, wrap, loop, *options) for options in ((None,), (EXACT,), (ROUNDED, True), (ROUNDED,))
    )
    for plain_run, kept, adapting, compressed in zip(untouched, exact, measured, rounded, strict=True):
        assert same(plain_run, kept)
        assert same(plain_run, adapting)
        assert adapting.plan
        assert compressed.plan
        assert "quantised" in compressed.codecs
        assert compressed.compressed_parameters == []
        assert not same(plain_run, compressed)
        assert all(bool(weight.isfinite().all()) for weight in compressed.weights)
