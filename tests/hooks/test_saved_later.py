"""Tensors that are made from one that is saved after them: derived from the second forward on, and packed as ever where
the source does not come."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from derived_jobs import TOKENS, WIDTH, Job, Lambda, check_made_again, distance
from emulation import needs_compiler
from torch import nn
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config
from gact_dist.hooks import engine
from gact_dist.hooks.handles import Recipe, Stored


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def swish(x):
    return torch.sigmoid(x) * x


def by_tanh(x):
    return torch.tanh(0.5 * x) * x


# by operator: what stands between two linear layers, and how many tensors are derived
OPERATORS = {
    "quick gelu": (lambda: Lambda(quick_gelu), 2),
    "swish": (lambda: Lambda(swish), 2),
    "by tanh": (lambda: Lambda(by_tanh), 2),
    "in another shape": (lambda: Lambda(lambda x: swish(x.view(4, -1, WIDTH)).view(-1, WIDTH)), 2),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_is_made_of_what_is_saved_later(operator):
    make, count = OPERATORS[operator]
    check_made_again(Job(make()), count, 1e-3)


def test_the_report_says_what_it_is_made_from():
    job = Job(Lambda(quick_gelu))
    job.gradient()
    job.gradient()
    sources = {row.name.partition("@")[0]: row.made_from for row in job.rows("derived")}
    (source,) = sources["1:Sigmoid"]
    assert source in {row.name for row in job.rows("quantised")}
    assert [row.bytes for row in job.rows("derived")] == [8, 0]  # a number


def test_low_precision():
    job = Job(Lambda(quick_gelu))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.gradient()
        job.gradient()
        assert len(job.rows("derived")) == 2
        assert distance(job.gradient([row.name for row in job.rows("quantised")]), job.untouched()) < 2**-7


class OfItself(nn.Module):
    """A view of the keys is saved first, in a product with the queries, then the keys themselves."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        keys = self.b(x.sin())
        return self.last(torch.softmax(self.a(x.cos()) @ keys.t(), -1) @ keys)


def test_nothing_is_made_of_itself():
    job = Job(OfItself())
    for _ in range(3):
        job.gradient()
    assert distance(job.gradient([row.name for row in job.rows("quantised")]), job.untouched()) < 1e-3


class Branch(nn.Module):
    """Of which one way saves what the sigmoid read, `between` layers later, and the other does not."""

    def __init__(self, between=0):
        super().__init__()
        self.a, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(between))
        self.last, self.saves = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x):
        h = self.a(x)
        weight = torch.sigmoid(h)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(h * weight if self.saves else weight + x)


def codec_of_sigmoid(gact):
    (codec,) = (row.codec for row in gact.report().rows if ":Sigmoid" in row.name)
    return codec


def uniform_steps(model, count, before=None):
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    x, found = torch.randn(TOKENS, WIDTH), []
    for number in range(count):
        if before is not None:
            before(number)
        with gact.step():
            loss = model(x).square().mean()
        found.append(codec_of_sigmoid(gact))
        loss.backward()
    gact.detach()
    return found


def test_a_source_that_does_not_come_leaves_what_waits_for_it_packed():
    model = Branch()
    torch.manual_seed(0)

    def vary(number):
        model.saves = number != 3

    assert uniform_steps(model, 5, vary) == ["derived", "derived", "derived", "quantised", "quantised"]


@pytest.mark.parametrize(("between", "codec"), [(2, "derived"), (6, "quantised")])
def test_it_waits_for_few_saves(between, codec):
    torch.manual_seed(0)
    assert uniform_steps(Branch(between), 3)[1:] == [codec, codec]


def test_what_waits_is_held_exactly_for_no_longer(monkeypatch):
    """The forward has gone another way: what is held is packed some saves later, not when the forward is over."""
    model, sizes = Branch(6), []
    torch.manual_seed(0)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    job = gact._schedule.hooks._job
    x = torch.randn(TOKENS, WIDTH)
    with gact.step():
        model(x)
    (name,) = (row.name for row in gact.report().rows if ":Sigmoid" in row.name)
    job._derived.names.made[name] = TOKENS * WIDTH  # as if it had been made before
    keep = Stored.keep

    def noted(stored, payload, *others):
        keep(stored, payload, *others)
        if stored.name == name:
            sizes.append((type(payload).__name__, len(job.account.rows)))

    monkeypatch.setattr(Stored, "keep", noted)
    with gact.step():
        model(x)
    rows = [row.name for row in gact.report().rows]
    assert [kind for kind, _ in sizes] == ["Tensor", "Packed"]
    assert sizes[1][1] - rows.index(name) - 1 <= 4 < len(rows) - rows.index(name)


@pytest.mark.parametrize("reads_sign", [False, True])
def test_one_that_must_be_exact_for_another_reader_is(reads_sign):
    """The backward of abs reads the sign of what waits."""
    torch.manual_seed(0)
    a, last, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(TOKENS, WIDTH)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.last = a, last

        def forward(self, x):
            h = self.a(x)
            weight = torch.sigmoid(h)
            beside = weight.abs().mean() if reads_sign else 0.0
            return self.last(h * weight).square().mean() + beside

    model = Net()
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    for _ in range(3):
        with gact.step():
            loss = model(x)
        loss.backward()
    assert codec_of_sigmoid(gact) == ("exact" if reads_sign else "derived")


@pytest.mark.parametrize("when", ["while it waits", "afterwards"])
def test_one_that_is_modified_is_refused(when):
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    x = torch.randn(TOKENS, WIDTH)
    for modified in (False, False, True):
        with gact.step():
            hidden = model[0](x)
            weight = torch.sigmoid(hidden)
            if modified and when == "while it waits":
                with torch.no_grad():
                    weight.mul_(2)
            loss = model[1](weight * hidden).sum()
        if modified and when == "afterwards":
            with torch.no_grad():
                weight.mul_(2)
        if modified:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


def test_two_backwards_and_what_a_dropped_graph_holds(monkeypatch):
    handles = []
    keep = Stored.keep

    def noted(stored, *others):
        keep(stored, *others)
        handles.append(weakref.ref(stored))

    monkeypatch.setattr(Stored, "keep", noted)
    job = Job(Lambda(quick_gelu))
    for _ in range(2):
        handles.clear()
        with job.gact.step():
            loss = job.model(job.x).square().mean()
        first = torch.autograd.grad(loss, job.model.parameters(), retain_graph=True)
        second = torch.autograd.grad(loss, job.model.parameters(), retain_graph=True)
        assert all(map(torch.equal, first, second))
        count = sum(isinstance(getattr(ref(), "payload", None), Recipe) for ref in handles)
        del loss
        gc.collect()
        assert not any(ref() for ref in handles)
    assert count >= 2


def adapted_gradients(steps):
    """Of a job at level L2, with what is derived in the last step."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Lambda(quick_gelu)) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH)
    gact = gact_dist.attach(model, config=Config.from_level("L2", adapt_interval=1000, min_numel=256))
    found = []

    def loss_fn(x):
        return model(x).square().mean()

    for _ in range(steps):
        model.zero_grad()
        with gact.step(loss_fn, x):
            loss = loss_fn(x)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    derived = [row.name.partition("@")[0] for row in gact.report().rows if row.codec == "derived"]
    gact.detach()
    return found, derived


@needs_compiler
def test_settled_steps_are_as_those_that_are_not(monkeypatch):
    """A plan is measured in the first step, in which it is derived already."""
    ours, derived = adapted_gradients(14)
    assert {"0.1:Sigmoid", "1.1:Sigmoid"} == {*derived}
    monkeypatch.setattr(engine, "IS_BUILT", False)
    others, same = adapted_gradients(14)
    assert same == derived
    for one, other in zip(ours, others, strict=True):
        assert all(map(torch.equal, one, other))


@needs_compiler
def test_in_settled_steps_it_is_neither_packed_nor_held_for_long(monkeypatch):
    """What it is made of is the next that is saved, and from then on it is a recipe."""
    kept = []
    keep = Stored.keep

    def noted(stored, payload, *others):
        keep(stored, payload, *others)
        kept.append((stored.name.partition("@")[0], type(payload).__name__))

    monkeypatch.setattr(Stored, "keep", noted)
    adapted_gradients(13)
    kept.clear()
    adapted_gradients(14)
    of_last = kept[-[*reversed(kept)].index(("0.1:Sigmoid", "Tensor")) - 1 :]
    assert of_last[:3] == [("0.1:Sigmoid", "Tensor"), ("0.1:Addmm", "Packed"), ("0.1:Sigmoid", "Recipe")]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Lambda(quick_gelu), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def test_in_checkpoints_whose_blocks_are_compressed():
    """What a block makes when it runs again is derived from the next measurement on; the error is the predicted one."""
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(TOKENS, WIDTH)
    gact = gact_dist.attach(model, config=Config(bits=4, recomputed=True, adapt_interval=1000, min_numel=256))

    def loss_fn(x):
        return model(x).square().mean()

    def gradient():
        model.zero_grad()
        with gact.step():
            loss = loss_fn(x)
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    exact = torch.autograd.grad(loss_fn(x), model.parameters())
    exact = torch.cat([gradient.flatten() for gradient in exact])
    gradient()
    gact.calibrate(loss_fn, x, samples=TOKENS)
    assert len([name for name in gact._schedule.hooks.derived_names if ":Sigmoid" in name and "~" in name]) == 2
    assert not [name for name in gact.plan if ":Sigmoid" in name]
    draws = 24
    errors = torch.stack([(gradient() - exact).square().sum() for _ in range(draws)])
    spread = 3 * float(errors.std()) / draws**0.5
    assert float(errors.mean()) == pytest.approx(gact.adaptation.predicted_variance, rel=0.1, abs=spread)


def test_exactly_stored_jobs_stay_as_they_are():
    job = Job(Lambda(quick_gelu))
    job.gact.detach()
    job.gact = gact_dist.attach(job.model, config=Config(policy="exact"))
    for _ in range(3):
        torch.manual_seed(1)
        job.model.zero_grad()
        with job.gact.step():
            loss = job.model(job.x).square().mean()
        loss.backward()
        pairs = zip((parameter.grad for parameter in job.model.parameters()), job.untouched(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
