"""torch.compile: regions stay whole, their tensors keep their names, statistics and parameters stay exact."""

from __future__ import annotations

import pytest
import torch
from small_models import TinyGPT, loss_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config
from gact_dist.hooks import compiled

ROUNDED = Config(policy="uniform", bits=4, min_numel=16)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 37, (8, 41), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def model_of(what: str) -> torch.nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = TinyGPT(37, dropout=0.1)
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    elif what == "whole":
        model.compile(backend="aot_eager")
    return model


def steps(gact, loss_fn, count: int) -> None:
    for _ in range(count):
        with gact.step():
            loss = loss_fn(batch())
        loss.backward()


@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_regions_are_compressed_from_the_second_step_on_and_compiled_once(what):
    model = model_of(what)
    gact = gact_dist.attach(model, config=ROUNDED)
    torch._dynamo.utils.counters.clear()
    steps(gact, loss_of(model), 3)
    assert not torch._dynamo.utils.counters["graph_break"]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1  # the second block runs the first one's code
    report = gact.report()
    regions = [row for row in report.rows if ":Compiled" in row.name]
    assert {row.codec for row in regions if row.shape[-1:] == (1,) or row.shape == (8, 4, 40)} == {"exact"}
    assert {row.codec for row in regions if row.dtype == torch.float32 and row.shape[-1:] == (256,)} == {"quantised"}
    assert report.ratio > 6


def test_parameters_of_a_region_are_looked_up_once_a_forward(monkeypatch):
    """Not for each tensor that it saves, which would be quadratic in the size of a model that is compiled whole."""
    looked_up, parts = [], compiled._parameter_parts
    monkeypatch.setattr(compiled, "_parameter_parts", lambda region: looked_up.append(region) or parts(region))
    model = model_of("whole")
    gact = gact_dist.attach(model, config=ROUNDED)
    steps(gact, loss_of(model), 2)
    looked_up.clear()
    steps(gact, loss_of(model), 1)
    assert len([row for row in gact.report().rows if ":Compiled" in row.name]) > 10
    assert len(looked_up) == 1


def test_a_model_compiled_after_attaching_is_noticed():
    model = model_of("not yet")
    gact = gact_dist.attach(model, config=ROUNDED)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    steps(gact, loss_of(model), 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert gact.report().ratio > 6


@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_casts_of_parameters_inside_a_region_stay_exact(what):
    model = model_of(what)
    gact = gact_dist.attach(model, config=ROUNDED)
    for _ in range(2):
        with gact.step(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model)(batch())
        loss.backward()
    shapes = {tuple(sorted(p.shape)) for p in model.parameters() if p.dim() == 2}
    rounded = {tuple(sorted(row.shape)) for row in gact.report().rows if row.codec == "quantised"}
    assert not shapes & rounded


def test_compiled_sensitivities_are_those_of_the_eager_model():
    """Perturbation against one double backward: each within its own sampling error, all tensors together within 25%."""
    found = []
    for what in ("eager", "blocks"):
        model = model_of(what).eval()
        gact = gact_dist.attach(model, config=Config(min_numel=16))
        for _ in range(2):
            gact.calibrate(loss_of(model), batch(), samples=8)
        found.append(gact.adaptation)
    eager, compiled = found
    assert sum(compiled.sensitivity.values()) == pytest.approx(sum(eager.sensitivity.values()), rel=0.25)


class Checkpointed(TinyGPT):
    """TinyGPT whose blocks are compiled, each under a checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("policy", "codec"), [("uniform", "exact"), ("gact", "quantised")])
def test_inputs_of_checkpointed_regions_need_an_adaptation_to_be_rounded(policy, codec):
    """Whether a block takes discrete decisions shows in eager mode only, and only an adaptation runs that."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Checkpointed(37)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    gact = gact_dist.attach(model, config=Config(policy=policy, bits=4, min_numel=16))
    for _ in range(2):
        with gact.step(loss_of(model), batch()):
            loss = loss_of(model)(batch())
        loss.backward()
    assert [row.codec for row in gact.report().rows if row.name.startswith(":BlockInput")] == [codec, codec]
