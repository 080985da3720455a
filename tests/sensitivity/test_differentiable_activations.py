"""GELU and SiLU as they are measured: torch's values, gradients and second derivatives, in its types and layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gact_dist.sensitivity import differentiable_activations
from gact_dist.sensitivity.differentiable_activations import Gelu, Silu, gelu, silu
from gact_dist.sensitivity.measuring_mode import MeasuringMode

PAIRS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "gelu": (F.gelu, gelu),
    "gelu with tanh": (partial(F.gelu, approximate="tanh"), partial(gelu, approximate="tanh")),
    "silu": (F.silu, silu),
}
# The second derivative is computed in float32 here, by torch operator by operator in the type itself: some of its
# roundings (2^-8 of bfloat16, 2^-24 of float32), in a sum of a few terms that partly cancel.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.03}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: torch.full_like(x[0, 0], 0.7),
}


def derivatives(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> list[Tensor]:
    """f(x), its gradient times a tensor, and the derivatives of that in two directions: by the tensor and by x."""
    generator = torch.Generator().manual_seed(seed)
    x = x.detach().requires_grad_()
    given, along = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for _ in range(2))
    value = function(x)
    (gradient,) = torch.autograd.grad(value, x, given.requires_grad_(), create_graph=True)
    return [tensor.detach() for tensor in (value, gradient, *torch.autograd.grad(gradient, (given, x), along))]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_derivatives_are_those_of_torch(name, layout, dtype, monkeypatch):
    monkeypatch.setattr(differentiable_activations, "_AT_ONCE", 100)
    of_torch, ours = PAIRS[name]
    values = 3.0 * torch.randn(24, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = LAYOUTS[layout](values.to(dtype))
    for expected, found in zip(derivatives(of_torch, x, 1), derivatives(ours, x, 1), strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert (found - expected).double().norm() <= TOLERANCES[dtype] * expected.double().norm()


FUNCTIONS = {
    "gelu": lambda x: Gelu.apply(x, "none"),
    "gelu with tanh": lambda x: Gelu.apply(x, "tanh"),
    "silu": Silu.apply,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_are_those_of_the_gradient(name):
    x = torch.linspace(-4.0, 4.0, 33, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name], x)


@pytest.mark.parametrize("name", PAIRS)
def test_they_are_what_a_measurement_runs_and_save_what_torch_saves(name):
    function, _ = PAIRS[name]
    x = torch.randn(4, 4, requires_grad=True)
    with MeasuringMode():
        y = function(x)
    assert y.grad_fn.name() == function(x).grad_fn.name().rstrip("0")
    assert torch.equal(y.grad_fn.saved_tensors[0], x)


def test_in_place_and_inside_of_transforms_torch_runs_its_own():
    x = torch.randn(5)
    with MeasuringMode():
        y = x.clone()
        assert F.silu(y, inplace=True) is y
        slope = torch.func.grad(lambda z: (F.gelu(z) + F.silu(z)).sum())(x)
    assert torch.equal(y, F.silu(x))
    assert torch.equal(slope, torch.func.grad(lambda z: (F.gelu(z) + F.silu(z)).sum())(x))
