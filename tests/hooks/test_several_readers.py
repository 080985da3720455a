"""What several operators saved is decoded or made once for those whose backwards follow one another."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import handles


class Heads(nn.Module):
    """[batch, 64] -> [batch, 64]: several linear layers that read the output of a norm."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return torch.stack([head(x) for head in self.heads]).sum(0)


class Apart(nn.Module):
    """[batch, 64] -> [batch, 64]: what two layers read, with another operator between them in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.b(x.sin()) + self.a(x)


class Shared(nn.Module):
    """[batch, 64] -> [batch, 64]: GELU's output is made from a tensor that GELU and another operator have saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.nn.functional.gelu(x)) * x.sin()


@pytest.fixture
def made(monkeypatch):
    """(name, reference) of what was decoded or made, in this order."""
    found: list[tuple[str, weakref.ref[Tensor]]] = []
    decode = handles.Stored._decoded

    def noted(self: handles.Stored, gaps: bool) -> Tensor:
        tensor = decode(self, gaps)
        if not self.is_exact:
            found.append((self.name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(handles.Stored, "_decoded", noted)
    return found


class Job:
    """A model whose roles are known, at 4 bits."""

    def __init__(self, model: type[nn.Module], derive: bool = False, shape: tuple[int, ...] = (32, 64)) -> None:
        torch.manual_seed(0)
        self.model, self.x = model(), torch.randn(shape)
        config = Config(policy="uniform", bits=4, min_numel=16, derive=derive, noise_limit=0)
        self.gact = gact_dist.attach(self.model, config=config)
        for _ in range(4):
            self.loss().backward()

    def loss(self) -> Tensor:
        self.model.zero_grad()
        with self.gact.step():
            return self.model(self.x).square().mean()

    def gradient(self) -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


@pytest.mark.parametrize("derive", [False, True])
def test_readers_in_a_row_share_what_is_made(derive, made):
    job = Job(Heads, derive)
    made.clear()
    job.loss().backward()
    names = [name for name, _ in made]
    assert names.count("heads.0:LayerNorm@4") == 1  # for three of them
    assert names.count(":Tanh@1") == 1 + derive  # for the norm and for tanh itself, and once for what is derived
    assert len(names) == 3 + derive


def test_it_is_gone_when_the_last_of_them_has_run(made):
    job = Job(Heads)
    made.clear()
    alive = []
    loss = job.loss()
    job.model.norm.weight.register_post_accumulate_grad_hook(
        lambda _: alive.extend(ref() is not None for name, ref in made if name.startswith("heads"))
    )
    loss.backward()
    assert alive == [False]
    assert not any(ref() is not None for _, ref in made)


def test_it_is_gone_when_another_is_decoded(made):
    job = Job(Apart)
    made.clear()
    job.loss().backward()
    names = [name for name, _ in made]
    assert names.count(":Tanh@1") == 2  # for a layer, and after another was read for the sine and tanh itself
    assert not any(ref() is not None for _, ref in made)


def test_a_graph_that_is_dropped_in_between_frees_it(made):
    job = Job(Heads)
    made.clear()
    loss = job.loss()
    torch.autograd.grad(loss, job.model.heads[2].weight, retain_graph=True)  # one of three
    assert any(ref() is not None for _, ref in made)
    del loss
    gc.collect()
    assert not any(ref() is not None for _, ref in made)


@pytest.mark.parametrize("kind", [Heads, Apart, Shared])
def test_a_second_backward_gives_the_same(kind):
    """What is made in the memory of something else must not be in that of what several operators read."""
    job = Job(kind, derive=True)
    loss = job.loss()
    loss.backward(retain_graph=True)
    first = job.gradient()
    job.model.zero_grad()
    loss.backward()
    assert torch.equal(job.gradient(), first)


class Attention(nn.Module):
    """[batch, 16, 64] -> [batch, 16, 64]: attention that runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        heads = (layer(x).view(*x.shape[:2], 2, 32).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(2))


def test_attention_and_its_own_backward_decode_its_operands_once(made):
    job = Job(Attention, derive=True, shape=(4, 16, 64))
    made.clear()
    job.loss().backward()
    counts = Counter(name for name, _ in made)
    operands = [count for name, count in counts.items() if ":Addmm@" in name or "Linear" in name]
    assert operands == [1, 1, 1], counts
    assert counts["query:LayerNorm@4"] == 1  # for three projections
    assert not any(ref() is not None for _, ref in made)


@pytest.fixture
def stored():
    """A tensor of two readers, at 4 bits."""
    x = torch.randn(32, 64)
    handle = handles.Stored("x", x, gact_dist.codec.pack(x, 4, 1))
    handles.count_reader(handle)
    return handle


def test_what_one_reader_writes_to_no_other_gets(stored, made):
    expected = stored.restore()
    assert torch.equal(stored.restore(), expected)
    assert len(made) == 1
    stored.restore().zero_()
    assert expected.any()
    assert torch.equal(stored.restore(), expected)
    assert len(made) == 3


def test_another_payload_takes_the_place_of_what_was_made(stored):
    four_bits = stored.restore()
    eight_bits = gact_dist.codec.pack(torch.randn(32, 64), 8, 1)
    before = stored.exchange(eight_bits)
    assert torch.equal(stored.restore(), gact_dist.codec.unpack(eight_bits))
    stored.exchange(before)
    assert torch.equal(stored.restore(), four_bits)


@pytest.mark.parametrize("derive", [False, True])
def test_a_backward_may_run_under_inference_mode(derive):
    """Where tensors have no versions."""
    job = Job(Heads, derive)
    loss = job.loss()
    loss.backward(retain_graph=True)
    expected = job.gradient()
    job.model.zero_grad()
    with torch.inference_mode():
        loss.backward()
    assert torch.equal(job.gradient(), expected)
