"""The comparison of estimators with direct measurement (benchmarks/bench_estimators.py), at a size for CI."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import bench_estimators
from benchmarks.white_box import LayerBounds
from gact_dist import Config
from gact_dist.engine import Engine
from gact_dist.standins import StandInMode


# 12 draws of a squared norm with some tens of effective dimensions leave 0.1 on a tensor, and the median over 12
# tensors a fraction of that; a tensor with few dimensions may be 0.3 off, as may 8 directions or 6 perturbations.
@pytest.mark.parametrize("kind", ["transformer", "GCN"])
def test_the_estimators_agree_with_rounding_each_tensor_alone(kind):
    found = {row["estimator"]: row for row in bench_estimators.rows(kind, bits=6, draws=12, probes=8, repeats=6)}
    for estimator in ("one-pass", "perturbation"):
        row = found[estimator]
        assert row["tensors"] == row["of"] == {"transformer": 12, "GCN": 3}[kind]
        assert row["median_ratio"] == pytest.approx(1.0, rel=0.10)
        assert 0.6 < row["worst_ratio"] < 1.67, row["worst"]


def layer_bound(layer, x, error):
    """(bound of what an error of the layer's saved input does to the gradient, what it does)."""
    model = nn.Sequential(nn.Conv2d(x.shape[1], x.shape[1], 1), layer)
    engine = Engine(model, Config(min_numel=0), 0)
    with LayerBounds(model) as layers, engine.recording(StandInMode()) as records:
        loss = functional.softplus(model(x)).square().mean()
    exact = bench_estimators.gradient(model, loss)
    record = next(r for r in records if r.node is not None and r.compressible and r.tensor.shape == error.shape)
    (bound,) = layers.bounds(loss, [record], lambda _: error).values()
    record.replacement = record.tensor + error
    moved = bench_estimators.gradient(model, loss)
    engine.close()
    return bound, float((moved - exact).square().sum())


@pytest.mark.parametrize("layer", ["convolution", "batch norm"])
def test_the_layer_wise_bounds_are_bounds(layer):
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 8)
    module = nn.Conv2d(6, 5, 3, padding=1) if layer == "convolution" else nn.BatchNorm2d(6)
    for scale in (1e-3, 1e-1):
        bound, moved = layer_bound(module, x, scale * torch.randn(4, 6, 8, 8))
        assert 0 < moved <= bound
