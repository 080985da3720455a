"""What backward makes again of distributed tensors: the part of each rank from parts that it holds, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from modes import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import gact_dist
from gact_dist import Config
from gact_dist.distributed import Layout
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan

SAMPLES, LENGTH, WIDTH, HEADS = 4, 32, 64, 4


class MLP(nn.Module):
    """[samples, length, WIDTH] -> the same."""

    def __init__(self, kind: str = "gelu") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.kind = kind
        if kind == "gated":
            self.gate = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        if self.kind == "gated":
            return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return x + self.down(F.gelu(self.up(hidden)))


class Attention(nn.Module):
    def __init__(self, _: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(attended.flatten(2))


def plan_of(layout: str, kind: str) -> dict[str, Any]:
    """layout: of what is between modules, whole tensors, parts of sequences or the same as DTensors."""
    if kind == "attention":
        return {**dict.fromkeys("qkv", ColwiseParallel()), "out": RowwiseParallel()}
    local, part = layout == "sequences", Shard(1)
    up, plan = ColwiseParallel(), {"down": RowwiseParallel()}
    if layout != "tensors":
        up = ColwiseParallel(input_layouts=part, use_local_output=local)
        down = RowwiseParallel(output_layouts=part, use_local_output=local)
        plan = {"norm": SequenceParallel(use_local_output=local), "down": down}
    return {**plan, "up": up, **({"gate": up} if kind == "gated" else {})}


class Job:
    """Blocks between two linear layers that each rank holds whole."""

    def __init__(self, layout: str, kind: str, blocks: int = 2) -> None:
        torch.manual_seed(0)
        block = Attention if kind == "attention" else MLP
        self.model = nn.ModuleList([block(kind) for _ in range(blocks)])
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        x, y = torch.randn(SAMPLES, LENGTH, WIDTH), torch.randn(SAMPLES, LENGTH, WIDTH)
        self.mesh = mesh_of((1, 2), ("dp", "tp"))
        for part in self.model:
            parallelize_module(part, self.mesh["tp"], plan_of(layout, kind))
        if layout != "tensors":
            x, y = (whole.chunk(2, 1)[dist.get_rank()].contiguous() for whole in (x, y))
        self.layout, self.x, self.y = layout, x, y

    def loss(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x: Any
        x, y = (self.x, self.y) if batch is None else batch
        x = x.detach().requires_grad_()  # as after an embedding
        if self.layout == "DTensors":
            x = DTensor.from_local(x, self.mesh["tp"], [Shard(1)])
        for block in self.model:
            x = block(x)
        if self.layout == "DTensors":
            x = x.to_local()
        loss = (x - y).square().mean()
        return loss if self.layout == "tensors" else 0.5 * loss

    def gradients(self) -> list[Tensor]:
        """Whole ones, by the loss of the whole."""
        found = torch.autograd.grad(self.loss(), list(self.model.parameters()))
        return [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in found]

    def hooks(self, **config: Any) -> SavedTensorHooks:
        return SavedTensorHooks(self.model, Config(**{"policy": "uniform", "bits": 4, "derive": True, **config}), 0)


def derived_of(hooks: SavedTensorHooks) -> list[str]:
    return [name.rpartition(":")[2].partition("@")[0] for name in hooks.derived_names]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    error = sum(float((one - other).double().square().sum()) for one, other in pairs)
    return (error / sum(float(other.double().square().sum()) for _, other in pairs)) ** 0.5


LAYOUTS = ("tensors", "sequences", "DTensors")
CASES = [(layout, kind) for kind in ("gelu", "gated") for layout in LAYOUTS] + [("tensors", "attention")]
# A norm over sequences that are split is gathered before the next layer, which takes communication: only its own
# operands are there.
DERIVED = {
    ("tensors", "gelu"): ["_FromTorchTensor"] * 2,
    ("sequences", "gelu"): ["_FromTorchTensor"],
    ("DTensors", "gelu"): ["Gelu"],
    ("tensors", "gated"): ["Silu", "_FromTorchTensor", "_FromTorchTensor"],
    ("sequences", "gated"): ["Silu", "_FromTorchTensor"],
    ("DTensors", "gated"): ["Mul", "Silu"],
    ("tensors", "attention"): ["ScaledDotProductAttention"],
}


def made_again(layout: str, kind: str) -> tuple[list[str], float, float]:
    """What one block derives, and the distance of the gradient from the exact one: with sources that are stored
    exactly, and with 4 bits for all."""
    job = Job(layout, kind, blocks=1)
    hooks = job.hooks()
    exact, found = job.gradients(), []
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)) as footprint:
            job.gradients()
    stored = [name for name in footprint.tensors if name not in hooks.derived_names]
    names = dict.fromkeys(hooks.derived_names, 4)
    derived = derived_of(hooks)
    for bits in (None, 4):
        with hooks.rehearsal(Plan({**dict.fromkeys(stored, bits), **names}, 4)):
            found.append(distance(job.gradients(), exact))
    return derived, found[0], found[1]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_parts_are_made_from_parts(ranks, layout, kind):
    """From sources that are stored exactly they are what they were, up to a few roundings of float32."""
    for derived, exact, rounded in ranks(made_again, layout, kind):
        assert sorted(derived) == DERIVED[layout, kind]
        assert exact < 1e-5
        assert 1e-3 < rounded < 0.3


def exact_and_ratios(layout: str, kind: str) -> tuple[bool, float, float]:
    """(whether the exact policy gives the untouched gradients bit for bit, ratios of bytes: all stored, and not)."""
    job = Job(layout, kind)
    untouched, ratios = job.gradients(), []
    for config in (Config(policy="exact"), *(Config(policy="uniform", bits=4, derive=on) for on in (False, True))):
        gact = gact_dist.attach(job.model, config=config, process_group=job.mesh["dp"])
        for _ in range(2):
            with gact.step():
                loss = job.loss()
            loss.backward()
        if config.policy == "exact":
            with gact.step():
                same = all(map(torch.equal, job.gradients(), untouched))
        ratios.append(gact.report().ratio)
        gact.detach()
    return same, ratios[1], ratios[2]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exact_is_bitwise_and_deriving_keeps_fewer_bytes(ranks, layout, kind):
    for same, stored, derived in ranks(exact_and_ratios, layout, kind):
        assert same
        assert derived > 1.05 * stored


class Between(nn.Module):
    """Two layers, whose weights all ranks hold, with an operation on DTensors between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind
        if "vector" in kind:
            self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        if kind == "a factor of rows":
            self.rows = nn.Parameter(torch.rand(1, LENGTH, 1) + 0.5)
        if kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        mesh = h.device_mesh
        if self.kind == "norm of split rows":
            made = F.layer_norm(h.redistribute(mesh, [Shard(2)]), (WIDTH,))
        elif self.kind == "of what is pending":
            made = F.gelu(DTensor.from_local(h.to_local(), mesh, [Partial()]))
        elif self.kind == "two layouts":
            made = h.redistribute(mesh, [Shard(1)]) * (2 * h).redistribute(mesh, [Shard(2)])
        elif self.kind == "a whole factor":
            made = h.redistribute(mesh, [Shard(1)]) * (2 * h)
        elif self.kind == "a factor of rows":
            rows: Any = self.rows
            made = h.redistribute(mesh, [Shard(1)]) * rows.redistribute(mesh, [Shard(1)])
        elif self.kind == "a vector":
            made = h.redistribute(mesh, [Shard(1)]) * self.scale
        elif self.kind == "a vector along what is split":
            made = h.redistribute(mesh, [Shard(2)]) * self.scale
        elif self.kind == "norm":
            made = self.norm(h.redistribute(mesh, [Shard(1)]))
        return self.last(made).redistribute(mesh, [Replicate()]).to_local()


NEEDS_COMMUNICATION = {
    "norm of split rows": True,
    "of what is pending": True,
    "two layouts": True,
    "a whole factor": True,
    "a vector along what is split": True,
    "a factor of rows": False,
    "a vector": False,
    "norm": False,
}


def between(kind: str) -> tuple[list[str], float]:
    """(what is derived, distance of the gradient from the exact one where all else is stored exactly)."""
    torch.manual_seed(0)
    mesh = mesh_of((1, 2), ("dp", "tp"))["tp"]
    model, x = distribute_module(Between(kind), mesh), torch.randn(SAMPLES, LENGTH, WIDTH)
    x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()

    def gradients() -> list[Tensor]:
        found: list[Any] = list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))
        return [gradient.full_tensor() for gradient in found]

    hooks, exact = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0), gradients()
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)) as footprint:
            gradients()
    stored = dict.fromkeys(name for name in footprint.tensors if name not in hooks.derived_names)
    with hooks.rehearsal(Plan(stored, 4)):
        found = gradients()
    return derived_of(hooks), distance(found, exact)


@pytest.mark.parametrize("kind", NEEDS_COMMUNICATION)
def test_what_needs_communication_is_stored(ranks, kind):
    for derived, error in ranks(between, kind):
        assert bool(derived) is not NEEDS_COMMUNICATION[kind]
        assert error < 1e-5


@pytest.mark.parametrize(
    ("own", "other", "fits"),
    [
        (Layout("mesh", (Shard(1),), (4, 8, 16)), Layout("mesh", (Shard(1),), (4, 8, 16)), True),
        (Layout("mesh", (Shard(1),), (4, 8, 1)), Layout("mesh", (Shard(1),), (4, 8, 16)), True),
        (Layout("mesh", (Shard(0),), (8, 1)), Layout("mesh", (Shard(1),), (4, 8, 16)), True),
        (Layout("mesh", (Replicate(),), (4, 1, 16)), Layout("mesh", (Shard(1),), (4, 8, 16)), True),
        (Layout("mesh", (Replicate(),), (16,)), Layout("mesh", (Shard(1),), (4, 8, 16)), True),
        (Layout("mesh", (Replicate(),), (16,)), Layout("mesh", (Shard(2),), (4, 8, 16)), False),
        (Layout("mesh", (Replicate(),), (4, 8, 16)), Layout("mesh", (Shard(1),), (4, 8, 16)), False),
        (Layout("mesh", (Shard(2),), (4, 8, 16)), Layout("mesh", (Shard(1),), (4, 8, 16)), False),
        (Layout("mesh", (Shard(0),), (8, 16)), Layout("mesh", (Shard(0),), (4, 8, 16)), False),
        (Layout("mesh", (Shard(0),), (4, 8, 16)), Layout("mesh", (Replicate(),), (4, 8, 16)), False),
        (Layout("mesh", (Partial(),), (4, 8, 16)), Layout("mesh", (Partial(),), (4, 8, 16)), False),
        (Layout("other", (Shard(1),), (4, 8, 16)), Layout("mesh", (Shard(1),), (4, 8, 16)), False),
        (Layout("mesh", (Replicate(), Shard(1)), (4, 8)), Layout("mesh", (Replicate(), Shard(1)), (4, 8)), True),
        (Layout("mesh", (Shard(1), Replicate()), (4, 8)), Layout("mesh", (Replicate(), Shard(1)), (4, 8)), False),
    ],
)
def test_what_fits_is_multiplied_where_it_lies(own, other, fits):
    assert own.fits(other) is fits


def variance_of(layout: str, kind: str) -> tuple[list[str], list[str], float, float]:
    """(what is derived, what was measured, variance that the plan is predicted to add, that it adds)."""
    job = Job(layout, kind)
    gact = gact_dist.attach(job.model, config=Config(bits=5, derive=True, min_numel=16), process_group=job.mesh["dp"])
    gact.calibrate(job.loss, (job.x, job.y), samples=SAMPLES)
    hooks, exact, error = gact._schedule.hooks, job.gradients(), 0.0
    for draw in range(DRAWS):
        with hooks.rehearsal(draw=draw + 1):
            found = job.gradients()
        error += sum(float((a - b).double().square().sum()) for a, b in zip(found, exact, strict=True)) / DRAWS
    return derived_of(hooks), sorted(gact._schedule.sensitivity), gact.adaptation.predicted_variance, error


DRAWS = 16


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_the_predicted_variance_is_the_measured_one(ranks, layout, kind):
    """Four directions and 16 draws, each of thousands of dimensions: about 0.08 / sqrt(4), and a few percent."""
    found = ranks(variance_of, layout, kind)
    assert found[0][:2] == found[1][:2]
    for derived, measured, predicted, error in found:
        assert sorted(derived) == sorted(2 * DERIVED[layout, kind])
        assert not any(":Silu" in name or ":Mul" in name for name in measured)
        assert error == pytest.approx(predicted, rel=0.2)
