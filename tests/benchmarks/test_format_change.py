"""benchmarks/codec/bench_format_change.py: another codec beneath the same hooks, and what eight bits of noise leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gact_dist
from benchmarks.codec.bench_format_change import Results, bias_of, in_place_of_ours, ratio_of, typical_ratio
from benchmarks.codec.formats import Saved
from benchmarks.gradient.gradients import gradient
from gact_dist.codec import reference


def test_another_codec_rounds_in_place_of_ours() -> None:
    """The reference takes its place, which gives the same bits; the counts show that it was asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(512, 64)

    def rounded() -> torch.Tensor:
        gact = gact_dist.attach(model, config=gact_dist.Config(policy="uniform", bits=3))
        for _ in range(3):
            with gact.step(batch=x):
                found = gradient(model, model(x * 1.5).square().mean())
        gact.detach()
        return found

    ours = rounded()
    with in_place_of_ours(reference) as calls:
        theirs = rounded()
    assert torch.equal(ours, theirs)
    assert calls["pack"] >= 2
    assert calls["unpack"] >= 2
    again = calls.copy()
    assert torch.equal(rounded(), ours)
    assert calls == again


def test_the_error_of_a_ratio_is_that_of_its_parts() -> None:
    generator = np.random.default_rng(0)
    ratio, error = ratio_of(list(generator.normal(2, 0.2, 400)), list(generator.normal(4, 0.8, 1600)))
    # a tenth over 20 and a fifth over 40, both 0.005
    assert error / ratio == pytest.approx(0.005 * 2**0.5, rel=0.1)
    assert ratio == pytest.approx(0.5, abs=5 * error)


def test_the_bias_of_fractions_that_are_spread_evenly() -> None:
    """A 256th of a step is rounded, with a variance of a 12th of its square, and a step has a 12th with dither."""
    values = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0))
    squares, sums = bias_of(Saved("test", values, torch.ones_like(values)))
    assert squares[3:] == pytest.approx(np.full(5, 2.0**-16), rel=0.05)
    # the deviation of its sum is 1/256 of that of the rounding; four of them
    assert max(sums) < 4 / 256


def test_a_row_takes_the_place_of_the_one_about_the_same(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for bits, ratio in ((2, 1.0), (4, 1.1), (2, 0.9)):
        Results(path).add("gradient", {"model": "text", "bits": bits, "ratio": ratio}, "model", "bits")
    assert {row["bits"]: row["ratio"] for row in Results(path).held["gradient"]} == {2: 0.9, 4: 1.1}


def test_a_typical_ratio_does_not_move_with_one_large_draw() -> None:
    draws = list(np.random.default_rng(0).lognormal(0.0, 0.2, 400))
    ratio, error = typical_ratio([*draws, 10.0], draws)
    assert error == pytest.approx(0.2 * (2 / 400) ** 0.5, rel=0.5)
    assert abs(ratio - 1) < 3 * error
