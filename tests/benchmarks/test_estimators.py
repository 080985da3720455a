"""The comparison of estimators with direct measurement (bench_estimators.py), at a size for CI."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.adaptation import bench_estimators
from benchmarks.adaptation.acgc_bounds import LayerBounds
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity.measuring_mode import MeasuringMode


# 12 draws of a squared norm with some tens of effective dimensions leave 0.1 on a tensor, and the median over 12
# tensors a fraction of that; a tensor with few dimensions may be 0.3 off, as may 8 directions or 6 perturbations.
@pytest.mark.parametrize("kind", ["transformer", "GCN"])
def test_the_estimators_agree_with_rounding_each_tensor_alone(kind):
    found = {row["estimator"]: row for row in bench_estimators.rows(kind, bits=6, draws=12, probes=8, repeats=6)}
    for estimator in ("one-pass", "perturbation"):
        row = found[estimator]
        assert row["tensors"] == row["of"] == {"transformer": 12, "GCN": 2}[kind]
        assert row["median_ratio"] == pytest.approx(1.0, rel=0.10)
        assert 0.6 < row["worst_ratio"] < 1.67, row["worst"]


def layer_bound(layer, x, error_of):
    """(bound of what an error of the layer's saved input does to the gradient, what it does).

    error_of: the error, from the gradient at the layer's outputs.
    """
    first = nn.Linear(x.shape[1], x.shape[1]) if x.dim() == 2 else nn.Conv2d(x.shape[1], x.shape[1], 1)
    model = nn.Sequential(first, layer)
    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    with LayerBounds(model) as layers, hooks.recording(MeasuringMode()) as records:
        y = model(x)
        loss = functional.softplus(y).square().mean()
    error = error_of(torch.autograd.grad(loss, y, retain_graph=True)[0])
    exact = bench_estimators.gradient(model, loss)
    record = next(r for r in records if r.node is not None and r.compressible and r.tensor.shape == error.shape)
    (bound,) = layers.bounds(loss, [record], lambda _: error).values()
    record.replacement = record.tensor + error
    moved = bench_estimators.gradient(model, loss)
    hooks.close()
    return bound, float((moved - exact).square().sum())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        pytest.param(partial(nn.Conv2d, 6, 5, 3, padding=1), (4, 6, 8, 8), id="convolution"),
        pytest.param(partial(nn.Conv2d, 6, 5, 3, stride=2, padding=1), (4, 6, 8, 8), id="strided convolution"),
        pytest.param(partial(nn.BatchNorm2d, 6), (4, 6, 8, 8), id="batch norm"),
        pytest.param(partial(nn.Linear, 6, 5), (64, 6), id="linear"),
    ],
)
def test_the_layer_wise_bounds_are_bounds(make, shape):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(shape)
    for scale in (1e-3, 1e-1):
        noise = scale * torch.randn_like(x)
        bound, moved = layer_bound(layer, x, lambda _, noise=noise: noise)
        assert 0 < moved <= bound


def over_inputs(gradient):
    """An error of six inputs, each as large as the gradient of the one output that it belongs to."""
    return gradient.expand(-1, 6)


def over_windows(gradient):
    """The same for the inputs of windows of 2 x 2 that do not overlap."""
    return gradient.repeat_interleave(2, 2).repeat_interleave(2, 3).expand(-1, 6, -1, -1)


@pytest.mark.parametrize(
    ("make", "shape", "error_of"),
    [
        pytest.param(partial(nn.Linear, 6, 1), (64, 6), over_inputs, id="linear"),
        pytest.param(partial(nn.Conv2d, 6, 1, 2, stride=2), (4, 6, 8, 8), over_windows, id="strided convolution"),
    ],
)
def test_an_error_along_the_gradient_does_half_of_what_a_bound_allows(make, shape, error_of):
    """One output, windows that do not overlap: the squared change of the weight gradient is |gy|^2 |dx|^2."""
    torch.manual_seed(0)
    bound, moved = layer_bound(make(), torch.randn(shape), error_of)
    assert bound == pytest.approx(2.0 * moved, rel=1e-3)  # of float32
