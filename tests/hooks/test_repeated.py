"""Keys and values that are repeated for the heads of grouped queries: one slice is stored, the rest is as before."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from small_models import GroupedBlock, GroupedQueries, attended, repeated_heads
from torch import Tensor

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.handles import Stored
from gact_dist.hooks.repeated import Repeated, repeats_of
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure

SAMPLES, TOKENS = 8, 24
SLICE = SAMPLES, GroupedBlock.GROUPS, TOKENS, GroupedBlock.HEAD_WIDTH
SETTINGS = Config(bits=4, min_numel=16, noise_limit=0)


def by_interleaving(x: Tensor) -> Tensor:
    return x.repeat_interleave(GroupedBlock.COPIES, 1)


def by_contiguous(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, GroupedBlock.COPIES, -1, -1).contiguous().flatten(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers' eager attention."""
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(GroupedBlock.HEAD_WIDTH), -1) @ v


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two operators save the same keys and values."""
    return by_products(q, k, v) + by_products(q.flip(1), k, v)


KINDS = {
    "by reshape": (repeated_heads,),
    "by interleaving": (by_interleaving,),
    "by contiguous": (by_contiguous,),
    "products": (repeated_heads, by_products),
    "products, interleaved": (by_interleaving, by_products),
    "two readers": (by_interleaving, twice),
    "two readers, by reshape": (repeated_heads, twice),
}
ANY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Job:
    def __init__(self, config: Config, *kind, **options):
        torch.manual_seed(0)
        self.model, self.x = GroupedQueries(*kind, **options), torch.randn(SAMPLES, TOKENS, GroupedBlock.WIDTH)
        self.exact = self.gradient()
        self.gact = gact_dist.attach(self.model, config=config)

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def gradient(self) -> Tensor:
        self.model.zero_grad()
        if not hasattr(self, "gact"):
            self.loss(self.x).backward()
        else:
            with self.gact.step():
                loss = self.loss(self.x)
            loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])

    def slices(self):
        """The rows of the report that are of one slice of keys or values."""
        return [row for row in self.gact.report().rows if row.shape == SLICE]


@ANY_KIND
def test_one_slice_is_stored_where_it_is_rounded(kind):
    job = Job(replace(SETTINGS, policy="uniform"), *kind)
    untouched = Job(replace(SETTINGS, policy="exact", bits=None), *kind)
    for _ in range(2):
        job.gradient()
        assert torch.equal(untouched.gradient(), untouched.exact)
    # transformers' eager attention saves the keys as a view of what it expands: of one slice all the same
    assert [row.codec for row in job.slices()] == 4 * ["quantised"]
    assert untouched.slices() == []
    assert job.gact.report().exact_bytes == untouched.gact.report().exact_bytes


def test_what_is_read_repeats_what_was_stored():
    job = Job(replace(SETTINGS, policy="uniform"))
    job.gradient()
    kept = []
    job.model.blocks[0].attend = lambda q, k, v: kept.append((attended(q, k, v), k)) or kept[-1][0]
    with job.gact.step():
        job.loss(job.x)
    output, k = kept.pop()  # a model that holds its own graph, which holds our hooks and so the model, is never freed
    handle = output.grad_fn._raw_saved_key.data
    assert isinstance(handle, Repeated)
    read, part = output.grad_fn._saved_key, codec.unpack(handle.base.payload)
    assert read.shape == k.shape
    assert read.stride() == k.stride()
    for copy in range(GroupedBlock.COPIES):
        assert torch.equal(read[:, copy :: GroupedBlock.COPIES], part)
    width = (part.amax() - part.amin()) / 15
    assert (read - k).abs().max() <= width


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize(("bits", "tolerance"), [(4, 0.25), (8, 0.1)])  # as in tests/sensitivity/test_sensitivity.py
@ANY_KIND
def test_the_measured_error_is_the_predicted_one(kind, bits, tolerance, derive):
    """Its mean over the draws, with what so many of them leave open."""
    job, draws = Job(replace(SETTINGS, bits=bits, derive=derive), *kind), 32
    job.gact.calibrate(job.loss, job.x, samples=SAMPLES)
    errors = torch.stack([(job.gradient() - job.exact).square().sum() for _ in range(draws)])
    assert all(row.sensitivity for row in job.slices())
    assert float(errors.mean()) == pytest.approx(
        job.gact.adaptation.predicted_variance, rel=tolerance, abs=3 * float(errors.std()) / draws**0.5
    )


@pytest.mark.parametrize("name", ["by reshape", "products, interleaved", "two readers"])
def test_the_sensitivity_of_a_slice_is_what_rounding_it_adds(name):
    job, draws = Job(replace(SETTINGS, policy="uniform", derive=False), *KINDS[name]), 64
    for _ in range(2):
        job.gradient()
    names, rows = {row.name for row in job.gact.report().rows}, {row.name for row in job.slices()}
    hooks = SavedTensorHooks(job.model, replace(SETTINGS, derive=False), 0)
    found = {
        item.name: float(item.variance[3])
        for item in measure(hooks, job.model, lambda: job.loss(job.x), seed=1, probes=64)
    }
    hooks.close()
    for row in rows:
        job.gact._schedule.hooks.plan = Plan(dict.fromkeys(names - {row}), 4)
        errors = torch.stack([(job.gradient() - job.exact).square().sum() for _ in range(draws)])
        assert found[row] == pytest.approx(float(errors.mean()), rel=0.1, abs=3 * float(errors.std()) / draws**0.5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_checkpointed_block_that_repeats(recomputed):
    """The tolerance is that of test_recomputed.py."""
    job, draws = Job(replace(SETTINGS, recomputed=recomputed), checkpoints=True), 32
    job.gact.calibrate(job.loss, job.x, samples=SAMPLES)
    errors = torch.stack([(job.gradient() - job.exact).square().sum() for _ in range(draws)])
    assert float(errors.mean()) == pytest.approx(
        job.gact.adaptation.predicted_variance, rel=0.25, abs=3 * float(errors.std()) / draws**0.5
    )


def test_a_reader_that_no_step_has_shown_gets_the_slice_exactly():
    job = Job(replace(SETTINGS, policy="uniform"))
    for _ in range(2):
        job.gradient()
    for block in job.model.blocks:
        block.attend = lambda q, k, v: attended(q, k, v) + 1e-3 * q / v
    exact = torch.cat([part.flatten() for part in torch.autograd.grad(job.loss(job.x), list(job.model.parameters()))])
    gradient = job.gradient()
    assert [(row.codec, row.bytes) for row in job.slices()] == 2 * [("quantised", 1632), ("exact", 12288)]
    assert float((gradient - exact).square().sum()) < 0.05 * float(exact.square().sum())
    for _ in range(2):  # one that is observed; then it is known, and the memory of the whole serves as it is
        gradient = job.gradient()
    assert [row.codec for row in job.slices()] == 2 * ["quantised"]
    assert float((gradient - exact).square().sum()) < 0.05 * float(exact.square().sum())


def saved(function) -> Tensor:
    """What function() makes of [4, 1, 6, 8] with a graph."""
    return function(torch.randn(4, 1, 6, 8, requires_grad=True) * 2.0)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x.expand(4, 3, 6, 8).clone(), (4, 1, 6, 8)),
        (lambda x: x.expand(4, 3, 6, 8).reshape(12, 6, 8), (4, 1, 6, 8)),
        (lambda x: x.unsqueeze(3).expand(4, 5, 6, 7, 8).reshape(4, 5, 42, 8), (4, 1, 6, 1, 8)),
        (lambda x: x[:1].expand(4, 1, 6, 8).clone(), None),  # along the first dimension
        (lambda x: x[:1].expand(4, 3, 6, 8).clone(), None),
        (lambda x: x.unsqueeze(0).expand(3, 4, 1, 6, 8).reshape(12, 1, 6, 8), None),
        (lambda x: x.expand(4, 1, 6, 8).clone(), None),  # once
        (lambda x: x.expand(4, 3, 6, 8), None),  # takes no memory
        (lambda x: x.expand(4, 3, 6, 8).clone().mul_(2.0), None),  # something else since
        (lambda x: x.expand(4, 3, 6, 8) * 2.0, None),
        (lambda x: x.repeat(1, 3, 1, 1), None),
        (lambda x: x.clone(), None),
    ],
)
def test_what_repeats_itself(function, kept):
    tensor = saved(function)
    repeats = repeats_of(tensor)
    assert (None if repeats is None else repeats.kept) == kept
    if repeats is not None:
        part = repeats.part_of(tensor)
        assert part.is_contiguous()
        assert part.numel() == math.prod(kept)
        assert torch.equal(repeats.expanded(part).reshape(tensor.shape), tensor)


def test_what_is_changed_without_a_graph_after_it_was_repeated_is_stored_whole():
    tensor = saved(lambda x: x.expand(4, 3, 6, 8).clone())
    with torch.no_grad():
        tensor[:, 1] = 0.0
    assert repeats_of(tensor) is None


@pytest.mark.parametrize("number", [0, 1])
def test_a_view_of_what_repeats_that_is_expanded_itself_is_what_it_was(number):
    """It has as many elements as the whole, and in the second case lies elsewhere in it."""
    x = torch.randn(1, 1, 2, 64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        whole = (x * 2.0).expand(1, 4, 2, 64).clone()
        return whole[:, :, number : number + 1].expand(1, 4, 2, 64).square().sum()

    (exact,) = torch.autograd.grad(forward(x), x)
    gact = gact_dist.attach(torch.nn.Identity(), config=Config(policy="uniform", bits=8, min_numel=16))
    for _ in range(2):
        with gact.step():
            loss = forward(x)
        (found,) = torch.autograd.grad(loss, x)
    gact.detach()
    assert (found - exact).abs().max() <= 2 * 2 * 8 * float(2 * (x.amax() - x.amin())) / 255


def test_a_gradient_penalty_through_repeated_keys_has_the_predicted_error():
    job, draws = Job(SETTINGS, by_interleaving, by_products), 32

    def loss(x: Tensor) -> Tensor:
        """A mean over examples, as parts of a batch are measured."""
        x = x.detach().requires_grad_()
        out = job.model(x).square().flatten(1).mean(1)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + gradient.square().flatten(1).sum(1).mean() * 12.5

    def gradient() -> Tensor:
        parts = torch.autograd.grad(loss(job.x), list(job.model.parameters()), allow_unused=True)
        return torch.cat([part.flatten() for part in parts if part is not None])

    job.gact.detach()
    exact, gact = gradient(), gact_dist.attach(job.model, config=replace(SETTINGS, bits=8))
    gact.calibrate(loss, job.x, samples=SAMPLES)
    errors = []
    for _ in range(draws):
        with gact.step():
            errors.append((gradient() - exact).square().sum())
    found = torch.stack(errors)
    assert float(found.mean()) == pytest.approx(
        gact.adaptation.predicted_variance, rel=0.25, abs=3 * float(found.std()) / draws**0.5
    )


def test_a_dropped_graph_frees_the_slice(monkeypatch):
    handles, kept = [], Stored.keep

    def noted(stored, *arguments):
        kept(stored, *arguments)
        handles.append(weakref.ref(stored))

    job = Job(replace(SETTINGS, policy="uniform"))
    job.gradient()
    monkeypatch.setattr(Stored, "keep", noted)
    gc.disable()
    try:
        with job.gact.step():
            loss = job.loss(job.x)
        assert any(handle() for handle in handles)
        del loss
        assert not any(handle() for handle in handles)
    finally:
        gc.enable()
