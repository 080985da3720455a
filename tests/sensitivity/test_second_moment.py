"""The moments of a rounded gradient, block by block, against gradients of whole forwards."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import block_models
import pytest
import small_models
import torch
import torch.nn.functional as F
from small_models import Block, Mixture, TinyGPT
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gact_dist
from examples.train.models import ResNet
from gact_dist import Config
from gact_dist.hooks import Draw, SavedTensorHooks
from gact_dist.hooks.handles import Recipe
from gact_dist.hooks.roles import OperatorObserver
from gact_dist.policies import Moments
from gact_dist.sensitivity import rounded_moments, second_moment
from gact_dist.sensitivity.parts import Part
from gact_dist.sensitivity.rounded_walk import GradientMoments

PASSES, DRAW = 3, 5


class Checkpointed(TinyGPT):
    """Each block under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(dropout=0.1)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Selective(TinyGPT):
    """Each block under a checkpoint that keeps the results of matrix products."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block_models.selective(block, x)
        return self.head(self.norm(x))


class SelectiveInside(nn.Module):
    """The same around a part of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return block_models.selective(self.block, torch.tanh(x)) + x


def selective_inside() -> tuple[nn.Module, Any]:
    model, batch = small_models.gpt(dropout=0.1)
    model.blocks = nn.ModuleList(map(SelectiveInside, model.blocks))
    return model, batch


class SavedOutside(TinyGPT):
    """Each block under a checkpoint that is given what an operator outside of it has saved as well, and what another
    checkpoint has kept."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(
                lambda x, y, block=block: block(x) * torch.sigmoid(y), torch.tanh(x), first, use_reentrant=False
            )
        return self.head(self.norm(x))


class Tied(TinyGPT):
    """The embedding and the head, a block each, share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Repeated(TinyGPT):
    """Each block runs twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Frame(nn.Module):
    """Attention between blocks, an input that several blocks save, and a parameter that several parts use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(37, 64), nn.Parameter(torch.randn(32, 64))
        self.query, self.key, self.value = (nn.Sequential(nn.Linear(64, 64)) for _ in range(3))
        self.blocks, self.head = nn.ModuleList(Block(64, 4, 0.1) for _ in range(2)), nn.Linear(64, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        q, k, v = (part(x).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        for block in self.blocks:
            x = block(torch.tanh(x) + self.position)
        return self.head(x)


class InPlace(TinyGPT):
    """A block that cannot be run alone, as it modifies its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)))


def tokens() -> tuple[Tensor, Tensor]:
    batch = torch.randint(0, 37, (8, 33))
    return batch[:, :-1], batch[:, 1:]


def seeded(build: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return build(), tokens()


def mixture(reentrant: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Mixture(reentrant), (torch.randn(64, 64), torch.randint(0, 64, (64,)))


def clipped() -> tuple[nn.Module, Any]:
    """A multilayer perceptron whose activation functions read one bit of what they save."""
    model, batch = small_models.mlp()
    model[1], model[3], model[5] = nn.Hardtanh(0.2, 0.8), nn.LeakyReLU(0.2), nn.ReLU6()
    return nn.Sequential(model[0], model[1:4], model[4:6], model[6]), batch


Job = tuple[Callable[[], Any], tuple[str, ...]]
"""(makes the model and a batch, names of modules that are blocks besides)"""
JOBS: dict[str, Job] = {
    "gpt": (lambda: small_models.gpt(dropout=0.1), ()),
    "cnn": (small_models.cnn, ("conv1", "norm1", "conv2", "norm2", "conv3")),
    "mlp": (small_models.mlp, ("2", "4", "6")),
    "clipped": (clipped, ("1", "2")),
    "checkpointed": (lambda: seeded(lambda: Checkpointed(False)), ()),
    "checkpointed reentrantly": (lambda: seeded(lambda: Checkpointed(True)), ()),
    "selective checkpoints": (lambda: seeded(lambda: Selective(dropout=0.1)), ()),
    "selective checkpoints in blocks": (selective_inside, ()),
    "checkpointed and saved outside": (lambda: seeded(SavedOutside), ()),
    "mixture": (lambda: mixture(False), ("first", "routed", "plain")),
    "mixture reentrantly": (lambda: mixture(True), ("first", "routed", "plain")),
    "tied": (lambda: seeded(Tied), ()),
    "repeated": (lambda: seeded(Repeated), ()),
    "frame": (lambda: seeded(Frame), ()),
}


class Measured:
    """A job whose hooks have learnt what there is to learn, in two forwards."""

    def __init__(self, job: Job, bits: int, compiled: bool = False) -> None:
        """compiled: whether it has regions, which would be compiled anew for an observer."""
        build, blocks = job
        self.model, self.batch = build()
        self.hooks = SavedTensorHooks(self.model, Config(policy="uniform", bits=bits, min_numel=64, blocks=blocks), 0)
        self.loss_fn = small_models.loss_of(self.model)
        for _ in range(2):
            with self.hooks.recording(None if compiled else OperatorObserver()):
                self.loss()

    def loss(self) -> Tensor:
        return self.loss_fn(self.batch)

    def moments(self, passes: int = PASSES) -> Moments:
        return rounded_moments(self.hooks, self.model, self.loss, passes=passes, draw=DRAW)

    def moments_of_whole_gradients(self, passes: int = PASSES) -> Moments:
        """Of gradients as a step has them, each from a forward and backward of its own."""
        gradients = []
        for number in range(passes):
            torch.manual_seed(1)
            self.model.zero_grad()
            with self.hooks.rehearsal(draw=DRAW * passes + number):
                loss = self.loss()
            loss.backward()
            gradients.append(small_models.gradient(self.model).double())
        mean = torch.stack(gradients).mean(0)
        noise = sum(float((gradient - mean).square().sum()) for gradient in gradients) / (passes - 1)
        return Moments(noise, float(mean.square().sum()) - noise / passes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", JOBS)
def test_both_moments_are_those_of_whole_gradients_with_the_same_random_numbers(name, bits, exact_boundaries, visited):
    job = Measured(JOBS[name], bits)
    torch.manual_seed(1)
    found = job.moments()
    assert len(visited) >= 2 * PASSES
    expected = job.moments_of_whole_gradients()
    # Sums of float32 in another order are off by 1e-7 of a gradient, and its distance from the mean, which at 8 bits is
    # a hundredth of it, by 1e-5. A value that this moves across a threshold of the rounding counts as much.
    assert found.noise == pytest.approx(expected.noise, rel=1e-4)
    assert found.square == pytest.approx(expected.square, rel=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gpt", "checkpointed", "frame"])
def test_boundaries_of_eight_bits_leave_both_moments_what_they_are(name, bits, monkeypatch):
    passes, job = 16, Measured(JOBS[name], bits)
    torch.manual_seed(1)
    found = job.moments(passes)
    monkeypatch.setattr(second_moment, "BOUNDARY_BITS", None)
    torch.manual_seed(1)
    expected = job.moments(passes)
    assert found.noise != expected.noise
    # 8 bits move an input by less than 1/255 of its group's range, about 0.4% of that of its norm: another sample of
    # the noise, 16 draws of a squared norm with hundreds of effective dimensions, and not a larger one
    assert found.noise == pytest.approx(expected.noise, rel=0.05)
    assert found.square == pytest.approx(expected.square, rel=0.005)


def test_the_job_is_left_as_it_was(visited):
    job = Measured(JOBS["cnn"], 4)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    torch.manual_seed(1)
    state, names = torch.get_rng_state(), [job.hooks.encoder.keys.seed(name) for name in ("a", "b")]
    job.moments()
    assert visited
    assert torch.equal(torch.get_rng_state(), state)
    assert [job.hooks.encoder.keys.seed(name) for name in ("a", "b")] == names
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert all(parameter.grad is None for parameter in job.model.parameters())


def test_gradients_are_there_for_one_block_and_one_pass_at_a_time(monkeypatch):
    job = Measured(JOBS["gpt"], 4)
    alive: list[weakref.ref[Tensor]] = []
    most, gradients = 0, Part.gradients

    def watched(self: Part, *arguments: Any, **options: Any) -> list[Tensor | None]:
        nonlocal most
        found = gradients(self, *arguments, **options)
        alive.extend(weakref.ref(gradient) for gradient in found[len(self.tails) :] if gradient is not None)
        most = max(most, sum(gradient.numel() for reference in alive if (gradient := reference()) is not None))
        return found

    monkeypatch.setattr(Part, "gradients", watched)
    job.moments()
    block = sum(parameter.numel() for parameter in job.model.blocks[0].parameters())
    whole = sum(parameter.numel() for parameter in job.model.parameters())
    assert len(alive) == PASSES * len(list(job.model.parameters()))
    assert block <= most <= 2 * block < whole  # those of a pass, and the mean of those before it


def test_a_block_that_cannot_run_alone_is_measured_with_what_is_around_it(exact_boundaries, visited, caplog):
    job = Measured((lambda: seeded(InPlace), ()), 4)
    with caplog.at_level(logging.DEBUG, "gact_dist"):
        found = job.moments()
    assert [record.getMessage() for record in caplog.records] == [
        "it modifies an input in place: drawing gradients with what is around it"
    ]
    assert visited
    expected = job.moments_of_whole_gradients()
    assert found.noise == pytest.approx(expected.noise, rel=1e-4)
    assert found.square == pytest.approx(expected.square, rel=1e-5)


def test_a_forward_that_runs_a_backward_is_measured_as_a_whole(visited):
    job = Measured(JOBS["gpt"], 8)
    plain = job.loss_fn

    def penalised(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = plain(batch)
            gradient = torch.autograd.grad(loss, job.model.head.weight, create_graph=True)[0]
        return loss + gradient.square().sum()

    job.loss_fn = penalised
    with job.hooks.recording(OperatorObserver()):
        job.loss()
    torch.manual_seed(1)
    found = job.moments()
    assert not visited
    expected = job.moments_of_whole_gradients()
    assert found.noise == pytest.approx(expected.noise, rel=1e-4)
    assert found.square == pytest.approx(expected.square, rel=1e-5)


def test_parts_of_one_gradient_are_summed_before_they_are_squared():
    gradients = [torch.randn(7) for _ in range(4)]
    found = GradientMoments(Counter({"a": 2, "b": 1}), len(gradients))
    for number, gradient in enumerate(gradients):
        found.add("a", number, gradient / 4)
        found.add("b", number, 2 * gradient)
    found.leave(["a", "b"])
    for number, gradient in enumerate(gradients):
        found.add("a", number, gradient * 3 / 4)
    found.leave(["a"])
    mean = torch.stack(gradients).mean(0)
    noise = 5 * sum(float((gradient - mean).square().sum()) for gradient in gradients) / 3
    assert found.moments().noise == pytest.approx(noise, rel=1e-5)
    assert found.moments().square == pytest.approx(5 * float(mean.square().sum()) - noise / 4, rel=1e-5)


def residual_network() -> block_models.Case:
    """What its blocks save of each other's results is derived, or is not, as others of these are stored."""
    model, images = ResNet(1, 8, 2, 10, 0.0), (torch.randn(16, 1, 8, 8), torch.randint(10, (16,)))
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), images


ADAPTING = {**block_models.CASES, "residual network": residual_network}
del ADAPTING["random numbers of Python and NumPy"]  # each step skips others of its layers


@pytest.mark.parametrize("name", ADAPTING)
def test_what_a_step_derives_has_no_bits(name):
    """They were chosen for what is stored: what else becomes derivable meanwhile waits for the next measurement."""
    torch.manual_seed(0)
    model, loss_fn, batch = ADAPTING[name]()[:3]
    gact = gact_dist.attach(model, config=Config.from_level("L2", min_numel=16))
    for _ in range(3):
        gact.calibrate(loss_fn, batch)
        rounded_moments(gact._schedule.hooks, model, lambda: loss_fn(batch), passes=2, draw=1)  # chooses nothing
        for _ in range(2):
            with gact.step():
                loss_fn(batch)
        derived = {row.name for row in gact.report().rows if row.codec == "derived"}
        assert derived.isdisjoint(gact.adaptation.sensitivity)


@pytest.mark.parametrize("name", ADAPTING)
def test_what_a_step_derives_is_derived_where_its_gradient_is_drawn(name, monkeypatch):
    """It was stored at the width of new names instead wherever a recipe needs a norm's weight: in a block that runs
    again nothing had copied it, and policy acgc took what plans add for two thirds of what they do."""
    torch.manual_seed(0)
    model, loss_fn, batch = ADAPTING[name]()[:3]
    gact = gact_dist.attach(model, config=Config.from_level("L2", min_numel=16))
    for _ in range(3):
        gact.calibrate(loss_fn, batch)
    with gact.step():
        loss_fn(batch)
    rows = gact.report().rows
    masks = {row.shape for row in rows if row.name.endswith(" of booleans")}  # what attention reads is made of them
    stepped = {row.name: row.codec for row in rows if row.shape not in masks}
    drawn: dict[str, Any] = {}
    stored = Draw.stored

    def noted(self, *arguments):
        handle = stored(self, *arguments)
        drawn[handle.name] = handle
        return handle

    monkeypatch.setattr(Draw, "stored", noted)
    rounded_moments(gact._schedule.hooks, model, lambda: loss_fn(batch), passes=2, draw=1)
    both = stepped.keys() & drawn.keys()
    assert both
    derived = {name for name in both if isinstance(drawn[name].payload, Recipe)}
    assert derived == {name for name in both if stepped[name] == "derived"}
