"""Sensitivity block by block: the numbers are those of the whole model as one part, however its blocks are wired."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from block_models import (
    CASES,
    Case,
    leaf_into_checkpoints,
    leaf_into_inner_checkpoints,
    made,
    opaque_in_inner_checkpoints,
)
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.naming import RECOMPUTED
from gact_dist.sensitivity import blocks, one_pass
from gact_dist.sensitivity.blocks import BlockForward
from gact_dist.sensitivity.one_pass import Sensitivity, measure

# How many blocks run: those of the model, as often as they run. Of the block that changes its input, what calls it has
# to run it.
VISITS = {
    "checkpoints from the batch on": 4,
    "unet": 6,
    "encoder and decoder": 9,
    "called several times": 7,
    "a state that nothing reads": 5,
    "stages": 8,
    "skipped by a branch": 4,
    "structures": 6,
    "random numbers of Python and NumPy": 6,
    "changes its input": 4,
    "gpt2 with labels": 7,
    "GAT": 3,
    "GCN": 3,
    **dict.fromkeys(
        (
            "powers",
            "tables and masks",
            "model outputs",
            "expanded",
            "buffers",
            "spectral and batch norm",
            "changed after a block",
        ),
        5,
    ),
}
# Both ways compute each product by the same operators on the same values. Where several blocks read a tensor, its
# products and gradients are added in another order: a few float32 roundings of 6e-8, squared, and up to a hundred in a
# sum that cancels.
RELATIVE = 1e-5
# Kinds in which an input without a gradient is read inside a block, whose effect on the parameters before it is seen
# along random directions only: sampled, not computed.
SAMPLED = ("tables and masks", "structures", "GAT", "llama", "llama with eager attention", "llama with labels")


def started(case: Case, config: Config) -> SavedTensorHooks:
    """Hooks that have learnt in a first step which tensors are what."""
    hooks = SavedTensorHooks(case.model, config, 0)
    seed()
    with hooks.hooks():
        case.loss_fn(case.batch)
    return hooks


def _with_seed(kind: type[BlockForward], more: int, *args: Any, seed: int, **options: Any) -> BlockForward:
    """A forward whose boundaries are rounded with other random numbers."""
    return kind(*args, seed=seed + more, **options)


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def measured(
    case: Case, probes: int = 2, bits: int = 8, estimator: str = "one-pass", recomputed: bool = False
) -> list[Sensitivity]:
    hooks = started(case, Config(min_numel=0, bits=bits, recomputed=recomputed, derive=False))
    seed()
    found = measure(hooks, case.model, lambda: case.loss_fn(case.batch), seed=3, probes=probes, estimator=estimator)
    hooks.close()
    return found


@pytest.fixture
def forwards(monkeypatch) -> list[BlockForward]:
    """Every forward with blocks that a measurement has run; boundaries are exact."""
    made: list[BlockForward] = []

    class Noted(BlockForward):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(one_pass, "BlockForward", Noted)
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", None)
    return made


def as_one_part(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Sensitivity]:
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, "blocks_of", lambda *_: [])
        return measured(make(), **options)


def distance(one: Sensitivity, other: Sensitivity) -> float:
    """Relative to the second."""
    size = float(other.variance.norm())
    return float((one.variance - other.variance).norm()) / size if size else float(one.variance.norm())


@pytest.mark.parametrize("name", CASES)
def test_blocks_give_the_numbers_of_the_whole(name, forwards, monkeypatch):
    whole = as_one_part(lambda: made(name), monkeypatch)
    forwards.clear()
    by_block = measured(made(name))
    assert len(forwards) == (2 if name == "changes its input" else 1)
    assert len(forwards[-1].visits) == VISITS.get(name, 6)
    assert [item.name for item in by_block] == [item.name for item in whole]
    assert [item.by_perturbation for item in by_block] == [item.by_perturbation for item in whole]
    assert any(not item.by_perturbation for item in whole)
    for one, other in zip(by_block, whole, strict=True):
        if name not in SAMPLED or not other.by_perturbation:
            assert distance(one, other) <= RELATIVE, one.name


def test_buffers_and_random_numbers_of_the_cases_matter():
    """Without them as they were, a block computes something else: the cases above would not be right by chance."""
    for name in ("buffers", "random numbers of Python and NumPy", "gpt with dropout"):
        _, loss_fn, batch = made(name)
        seed()
        first = loss_fn(batch).item()
        assert loss_fn(batch).item() != first, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["dense", "transposed", "with gaps", "expanded"])
def test_what_a_boundary_gives_back(dtype, layout):
    """Strides, signs, zeros and infinities as they were, the largest number finite, all else as near as 8 bits have it.

    A root is at most 1.02 steps of 1 / 255 of the roots' range away, which is 2 sqrt(largest), and twice the root times
    that is the distance of its square; the bound leaves room for the rounding to low precision.
    """
    tensor = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[4:].relu_()
    tensor = {
        "dense": tensor,
        "transposed": tensor.t(),
        "with gaps": tensor[:, ::2],
        "expanded": tensor[:1].expand(16, 256),
    }[layout]
    kept = blocks._Boundary(tensor, 8, 3).value()
    assert kept.dtype == dtype
    assert kept.stride() == tensor.stride()
    assert not kept[tensor == 0].any()
    assert kept.data_ptr() != tensor.data_ptr()
    largest = float(tensor.abs().max())
    assert float((kept - tensor).abs().max()) <= 2 * 1.02 * 2 * largest / 255 + 4 * torch.finfo(dtype).eps * largest
    end = torch.finfo(dtype if dtype != torch.float64 else torch.float32).max  # packed as float32
    ends = torch.tensor([torch.inf, -torch.inf, end, -end] * 64, dtype=dtype)
    kept = blocks._Boundary(ends, 8, 3).value()
    assert torch.equal(kept.isinf(), ends.isinf())
    assert torch.equal(kept.sign(), ends.sign())
    assert not kept.isnan().any()


@pytest.mark.parametrize("name", ["gpt with dropout", "unet", "encoder and decoder", "called several times", "stages"])
def test_boundaries_of_8_bits_add_little(name, forwards, monkeypatch):
    """Rounding at 8 bits moves an element by at most 1/255 of its group's range, a relative error of the tensor of
    1/255 / sqrt(6) * range / rms: with a range of 6 rms, 1%. It reaches a product through its block's input, the
    gradient at its output, and the same of the blocks on the way: of the square, twice that and some. 10% leaves room
    for three blocks. The few elements that small tensors have make single roundings differ more: a mean of eight.
    The total is held at 7 and 8 bits as well: a block's own input must not lie where these widths store it for free."""
    exact = measured(made(name))
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", 8)
    rounded = []
    for draw in range(8):
        monkeypatch.setattr(one_pass, "BlockForward", partial(_with_seed, BlockForward, 1000 * draw))
        rounded.append(measured(made(name)))
        assert [item.name for item in rounded[-1]] == [item.name for item in exact]
    means = [
        replace(items[0], variance=sum(item.variance for item in items) / 8) for items in zip(*rounded, strict=True)
    ]
    for one, other in zip(means, exact, strict=True):
        if not other.by_perturbation:
            assert distance(one, other) <= 0.1, one.name
    for width in (4, 7, 8):
        total = sum(float(item.variance[width - 1]) for item in exact)
        assert sum(float(item.variance[width - 1]) for item in means) == pytest.approx(total, rel=0.03), width
    assert any(distance(one, other) > 0 for one, other in zip(rounded[0], exact, strict=True))


def test_a_tensor_without_a_graph_that_several_blocks_read(forwards, monkeypatch):
    """As in GraphSAGE: each block's own weights are moved by the same rounding, and the effects add up."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 8)])
            self.others = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 8, bias=False)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()  # the batch itself is not stored
            for own, others in zip(self.own, self.others, strict=True):
                x = torch.tanh(own(x) + 3 * others(x))
            return x

    def case() -> Case:
        torch.manual_seed(0)
        model = Net()
        return Case(model, lambda x: model(x).square().mean(), torch.randn(64, 32))

    whole = as_one_part(case, monkeypatch)
    by_block = measured(case())
    assert len(forwards[-1].visits) == 4
    assert [item.name for item in by_block] == [item.name for item in whole]
    assert [item.by_perturbation for item in by_block] == [True, False, False]
    for one, other in zip(by_block, whole, strict=True):
        assert distance(one, other) <= RELATIVE, one.name


def test_what_no_direction_reaches_is_perturbed_where_a_checkpoint_runs_anew(monkeypatch):
    """An input of a checkpoint inside of a block, which here runs once for all derivatives. Both ways sample."""

    def fresh() -> Case:
        torch.manual_seed(0)
        return opaque_in_inner_checkpoints()

    whole = {item.name: item for item in as_one_part(fresh, monkeypatch, probes=8)}
    by_block = {item.name: item for item in measured(fresh(), probes=8)}
    perturbed = [name for name, item in by_block.items() if item.by_perturbation]
    assert any("BlockInput" in name for name in perturbed)
    assert by_block.keys() == whole.keys()
    for name in perturbed:
        ratio = by_block[name].variance[3] / whole[name].variance[3]
        assert 0.1 < ratio < 10.0, name


@pytest.mark.parametrize(
    ("make", "recomputed"),
    [
        (leaf_into_checkpoints, False),
        (leaf_into_checkpoints, True),
        (partial(leaf_into_checkpoints, reentrant=True), False),
        (leaf_into_inner_checkpoints, False),
    ],
)
def test_a_leaf_that_a_checkpoint_is_given_has_products(make, recomputed, forwards, monkeypatch):
    """The output of a frozen embedding that was made to require a gradient, as PEFT does.

    As one part what is recomputed is not rounded: at 8 bits that moves the gradient, and so the products, by less than
    a hundredth.
    """

    def fresh() -> Case:
        torch.manual_seed(0)
        return make()

    whole = {item.name: item for item in as_one_part(fresh, monkeypatch, recomputed=recomputed)}
    by_block = {item.name: item for item in measured(fresh(), recomputed=recomputed) if RECOMPUTED not in item.name}
    assert by_block.keys() == whole.keys()
    for name, item in by_block.items():
        assert not item.by_perturbation
        assert distance(item, whole[name]) <= (0.01 if recomputed else RELATIVE), name


class Cache:
    """What a block may write to."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None


class Remembering(nn.Module):
    """Blocks that leave a tensor of their graph in what they are given, as those of transformers do in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembers() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.keys = torch.tanh(self.linear(x))
        return x + torch.sin(cache.keys)


@pytest.mark.parametrize("policy", ["gact", "acgc"])
def test_a_graph_that_a_block_leaves_in_an_argument_holds_no_measurement(policy):
    """The graph has our hooks, and the argument is held for another run of the block: Python's collector, which does
    not see what a graph holds, would never free them."""
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(8, 32)
    settings = {"error": 0.25} if policy == "acgc" else {}
    gact = gact_dist.attach(model, config=Config(policy=policy, min_numel=16, adapt_interval=1, **settings))
    for _ in range(3):
        with gact.step(lambda x: model(x).square().mean(), x):
            loss = model(x).square().mean()
        loss.backward()
    assert gact.history
    del loss
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, (BlockForward, Cache))]
