"""Rotary embeddings of what a norm gave: queries and keys are made again of the norm's input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from derived_jobs import TOKENS, WIDTH, Job, check_made_again, distance
from emulation import needs_compiler
from live_storages import derived_peak
from torch import Tensor, nn

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks, derived
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure, sections

LENGTH, HEADS = 16, 4
HEAD = WIDTH // HEADS
SETTLED = 14
"""steps after which all that settles has settled"""
PROBES, DRAWS = 32, 32


def in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' Llama and Qwen3."""
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * cos + torch.cat((-second, first), -1) * sin


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' GPT-J."""
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def in_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As llama2.c: real and imaginary parts, each in operators of its own."""
    real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[..., ::2], sin[..., ::2]
    rotated = real * cos - imaginary * sin, real * sin + imaginary * cos
    return torch.stack(rotated, -1).flatten(-2).type_as(x)


def of_a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' StableLM: the rest of each head stays."""
    part, rest = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    cos, sin = cos[..., : HEAD // 2], sin[..., : HEAD // 2]
    first, second = part.chunk(2, -1)
    return torch.cat((part * cos + torch.cat((-second, first), -1) * sin, rest), -1)


# by name: the rotation, and whether its result has the layout that its operand has: attention's has it, too, and what
# the layer behind saves is then a view of that, not a copy, which is derived as well
ROTATIONS = {
    "in halves": (in_halves, True),
    "interleaved": (interleaved, True),
    "in parts": (in_parts, False),
    "of a part": (of_a_part, False),
}


class RMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HEAD) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def layer_norm() -> nn.Module:
    return nn.LayerNorm(HEAD)


class Attention(nn.Module):
    """[tokens, WIDTH] -> the same, with a norm of each head's queries and keys."""

    def __init__(self, rotate=in_halves, norm=RMSNorm, keeps_tables: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm, self.rotate, self.keeps_tables = norm(), norm(), rotate, keeps_tables
        angles = torch.outer(torch.arange(LENGTH), 0.5 ** torch.arange(HEAD // 2)).repeat_interleave(2, -1)
        self.register_buffer("angles", angles)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def heads(self, x: Tensor) -> Tensor:
        return x.view(-1, LENGTH, HEADS, HEAD)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (self.cos, self.sin) if self.keeps_tables else (self.angles.cos(), self.angles.sin())
        q, k = self.q_norm(self.heads(self.q(x))), self.k_norm(self.heads(self.k(x)))
        q, k = (self.rotate(each.transpose(1, 2), cos, sin) for each in (q, k))
        attended = F.scaled_dot_product_attention(q, k, self.heads(self.v(x)).transpose(1, 2))
        return self.out(attended.transpose(1, 2).reshape(x.shape))


def check_rotary(rotation: str, norm=RMSNorm, **options: bool) -> None:
    """Queries, keys, and the results of attention are derived, and of RMS norms the products that these save."""
    rotate, keeps_layout = ROTATIONS[rotation]
    count = 4 + 2 * (norm is RMSNorm) + (not keeps_layout)
    check_made_again(Job(Attention(rotate, norm, **options)), count, 1e-3)


@pytest.mark.parametrize("norm", [RMSNorm, layer_norm])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_queries_and_keys_are_made_again(rotation: str, norm) -> None:
    check_rotary(rotation, norm)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_tables_may_be_buffers(rotation: str) -> None:
    check_rotary(rotation, keeps_tables=True)


def test_low_precision() -> None:
    job = Job(Attention())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.gradient()
        job.gradient()
        assert len([row for row in job.rows("derived") if row.name.startswith("1:ToCopy")]) == 2
        assert distance(job.gradient([row.name for row in job.rows("quantised")]), job.untouched()) < 2**-6


def test_without_a_norm_they_are_stored() -> None:
    """Where nothing is stored before the rotation there is nothing to make them of."""
    job = Job(Attention(norm=nn.Identity))
    job.gradient()
    job.gradient()
    assert len([row for row in job.rows("quantised") if ":Add@" in row.name]) == 2


@needs_compiler
def test_what_is_rotated_twice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recipe that was searched for, and in those of later steps, for which none is."""
    calls: list[int] = []
    searches: list[str] = []
    normalised, search = derived._normalised, derived.Derived._search

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return normalised(*args)

    def noted(self: derived.Derived, name: str, *args: object) -> object:
        searches.append(name)
        return search(self, name, *args)

    monkeypatch.setattr(derived, "_normalised", counted)
    monkeypatch.setattr(derived.Derived, "_search", noted)
    job = Job(Attention(norm=layer_norm))
    exact = job.untouched()
    for _ in range(SETTLED):
        calls.clear()
        searches.clear()
        with job.gact.step():
            loss = job.model(job.x).square().mean()
        assert distance(torch.autograd.grad(loss, job.model.parameters()), exact) < 0.3
        assert len(calls) == 2  # queries and keys
    assert not {row.name for row in job.rows("derived")} & {*searches}


def test_the_peak_of_a_step_is_no_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than where queries and keys are stored, at the same bits."""

    def peak() -> int:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(4096, WIDTH)
        return derived_peak(model, x)

    ours = peak()
    monkeypatch.setattr(derived, "_MOST_WORK", 4)
    stored = 4 * 2 * 4096 * WIDTH // 2  # queries and keys at 4 bits
    assert ours < peak() - 3 / 4 * stored


class Blocks(nn.Module):
    def __init__(self, rotation: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Attention(ROTATIONS[rotation][0]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.parametrize("rotation", ["in halves", "in halves, in sections", "in parts"])
def test_the_sensitivity_of_what_is_rotated_counts_both_paths(rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor alone at 4 bits, all else exact: the predicted variance is the measured one.

    With what the directions and the draws leave open: see the test of the same in test_derived.py.
    """
    if "in sections" in rotation:
        monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    torch.manual_seed(0)
    model, x = Blocks(rotation.partition(",")[0]), torch.randn(TOKENS, WIDTH)
    y, parameters = torch.randn(TOKENS, WIDTH), [*model.parameters()]

    def loss() -> Tensor:
        return (model(x) - y).square().mean()

    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0)
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)):
            loss()
    found = measure(hooks, model, loss, seed=1, probes=PROBES)
    made = hooks.state_dict()["derived"]["elements"]
    assert len([name for name in made if ":Add@" in name or ":Stack@" in name]) == 4
    assert not {item.name for item in found} & set(made)
    exact = torch.autograd.grad(loss(), parameters)
    plan = {**dict.fromkeys((item.name for item in found), None), **dict.fromkeys(made, 4)}
    sources = [item for item in found if "_norm:" in item.name]
    assert len(sources) == 4
    for item in sources:
        error = 0.0
        for draw in range(DRAWS):
            with hooks.rehearsal(Plan({**plan, item.name: 4}), draw=draw + 1):
                rounded = loss()
            gradient = torch.autograd.grad(rounded, parameters)
            error += sum(float((a - b).square().sum()) for a, b in zip(gradient, exact, strict=True)) / DRAWS
        assert float(item.variance[3]) == pytest.approx(error, rel=0.1), item.name
