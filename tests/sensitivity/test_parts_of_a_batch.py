"""Examples are measured in parts of at most a quarter of the batch."""

from __future__ import annotations

import math

import pytest
import small_models
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter
from gact_dist.sensitivity import probe


def total_sensitivity(parts: int, monkeypatch: pytest.MonkeyPatch, seed: int) -> float:
    monkeypatch.setattr(probe, "_PARTS", parts)
    model, batch = small_models.gpt(batch=8)
    gact = gact_dist.attach(model, config=Config(min_numel=16, seed=seed, derive=False))
    gact.calibrate(small_models.loss_of(model), batch)
    return sum(gact.adaptation.sensitivity.values())


def test_parts_predict_what_the_whole_batch_does(monkeypatch):
    """Two examples have fewer tokens than a group of the codec, in which the whole batch is stored.

    Four directions leave some per cent on the sum, and so does the range of groups that is extrapolated.
    """
    whole, by_part = (
        sum(total_sensitivity(parts, monkeypatch, seed) for seed in range(3)) for parts in (1, probe._PARTS)
    )
    assert by_part != whole
    assert by_part == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(
    ("batch", "examples", "seen"),
    [
        (64, 8, [8]),
        (16, 8, [4, 4]),
        (8, 8, [2, 2, 2, 2]),
        (7, 8, [2, 2, 3]),
        (2, 8, [2]),
        (1, 8, [1]),
    ],
)
def test_no_part_is_more_than_a_quarter_of_the_batch_or_two_examples(batch, examples, seen):
    model, sizes = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)), []

    def loss_fn(inputs):
        sizes.append(len(inputs))
        return model(inputs).square().mean()

    gact = gact_dist.attach(model, config=Config(min_numel=16, derive=False))
    gact.calibrate(loss_fn, torch.randn(batch, 16), samples=examples)
    # then the gradient under the plan and the exact one; 16 rows of 16 could be an adjacency matrix
    compared = batch if batch == 16 else math.ceil(batch / min(4, max(1, batch // 2)))
    assert sizes == [*seen, compared, compared]


def test_a_model_that_needs_several_examples_gets_them(caplog):
    """BatchNorm1d refuses a batch of one in training, in a measurement too, where it is replaced.

    Two examples that nearly agree in a channel would be scaled up by 1 / sqrt(eps), and with them the rounding, which a
    warning tells: hence the large eps.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, eps=0.1), nn.ReLU(), nn.Linear(32, 5))
    gact = gact_dist.attach(model, config=Config(min_numel=16, derive=False))
    sizes = []

    def loss(inputs):
        outputs = model(inputs)
        sizes.append(len(inputs))
        return outputs.square().mean()

    gact.calibrate(loss, torch.randn(4, 16))
    assert min(sizes) == 2
    assert gact.plan
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Heads(nn.Module):
    """A product of heads, whose memory a matrix product copies unless the batch has one example."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(32, 8)

    def forward(self, x):
        q, k = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.first(x).chunk(2, -1))
        return self.last((q @ k.transpose(-2, -1) @ k).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("examples", [1, 2, 3, 4, 7])
def test_a_part_saves_under_the_names_of_the_step(examples):
    """They were others where a part was one example of several: what matrix products save kept the default width."""
    torch.manual_seed(0)
    model, batch = Heads(), torch.randn(examples, 16, 32)
    gact = gact_dist.attach(model, config=Config(min_numel=64))

    def loss_fn(x):
        return model(x).square().mean()

    gact.calibrate(loss_fn, batch)
    with gact.step():
        loss = loss_fn(batch)
    loss.backward()
    rounded = {row.name for row in gact.report().rows if row.codec == "quantised"}
    assert len(rounded) >= 4
    assert rounded <= set(gact.plan)


def sizes_of_an_adaptation(monkeypatch, model, loss_fn, batch, examples=4, min_numel=16):
    """Examples of the parts that were measured, where steps are long; and the controller. examples: in a batch."""
    monkeypatch.setattr(adapter, "_LEAST_BYTES", 1e-9)
    measured, measure = [], adapter.measure

    def counted(*args, fraction, **kwargs):
        measured.append(round(fraction * examples))
        return measure(*args, fraction=fraction, **kwargs)

    monkeypatch.setattr(adapter, "measure", counted)
    gact = gact_dist.attach(model, config=Config.from_level("L2", min_numel=min_numel))
    for _ in range(12):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    assert len(gact.history) == 1
    return measured, gact


@pytest.mark.parametrize(("examples", "parts"), [(2, [1, 1]), (3, [1, 1, 1]), (4, [1, 1, 1, 1]), (7, [1, 2, 2, 2])])
def test_where_steps_are_long_a_part_may_be_one_example(examples, parts, monkeypatch):
    """With two of two sequences, the step that adapted a language model was higher than the untouched job's."""
    model, batch = small_models.gpt(batch=examples)
    measured, gact = sizes_of_an_adaptation(monkeypatch, model, small_models.loss_of(model), batch, examples)
    assert measured == parts
    assert {row.name for row in gact.report().rows if row.codec == "quantised"} <= set(gact.plan)


def test_but_not_where_one_alone_is_saved_under_other_names(monkeypatch):
    torch.manual_seed(0)
    model, batch = Heads(), torch.randn(4, 16, 32)
    measured, gact = sizes_of_an_adaptation(monkeypatch, model, lambda x: model(x).square().mean(), batch, min_numel=64)
    assert measured == [2, 2]
    rounded = {row.name for row in gact.report().rows if row.codec == "quantised"}
    assert len(rounded) >= 4
    assert rounded <= set(gact.plan)


def test_nor_where_the_model_refuses_one(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, eps=0.1), nn.Tanh(), nn.Linear(32, 5))
    measured, _ = sizes_of_an_adaptation(monkeypatch, model, lambda x: model(x).square().mean(), torch.randn(4, 16))
    assert measured == [2, 2]


class Checkpointed(nn.Module):
    """What its checkpoints keep is exact in the forward that first meets them, and no name of it is known there."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def test_with_checkpoints_a_part_may_be_one_example(monkeypatch):
    torch.manual_seed(0)
    model = Checkpointed()
    measured, gact = sizes_of_an_adaptation(
        monkeypatch, model, lambda x: model(x).square().mean(), torch.randn(4, 8, 16)
    )
    assert measured == [1, 1, 1, 1]
    assert any("BlockInput" in name for name in gact.plan)
