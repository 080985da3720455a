"""The layer-wise bounds of AC-GC for convolution, linear and batch norm, to compare the estimators with.

Evans and Aamodt (NeurIPS 2021) bound what an error of a layer's saved input does to that layer's gradient, from norms
that its backward has at hand. The forms here are those of their published code, which follows appendix B of their
supplement; |dx|^2 is the squared error of the input, M the number of elements of a channel.

* Convolution with an R x S kernel and stride T: |dgw|^2 <= 2 (R S / T^2) |gy|^2 |dx|^2; linear is R = S = T = 1.
  Where the stride exceeds the kernel it is one of an error that is spread evenly over the input, as rounding's is.
* Batch norm: |dgx|^2 <= sum_k gamma_k^2 rstd_k^4 (ggamma_k^2 + dggamma_k^2) dx_k^2 / M, with dx_k^2 the mean squared
  error of a channel and dggamma_k^2 <= rstd_k^2 n_k^2 max(gy)^2 max|dx|^2, n_k the number of gy that are not zero.

They are no run-time mode: attention, layer norm, GELU and the operators of graph networks have no published bound, so
that a model with any of them would be left without bits for it; and each layer is bounded against its own gradient. For
the comparison an error of gx relative to |gx|^2 is taken to be one of all gradients before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gact_dist.hooks.handles import Recorded
from gact_dist.sensitivity.autograd_graph import nodes_below, parameters_among


class LayerBounds:
    """Bounds of one forward and backward. Context: the forward has to run inside it."""

    def __init__(self, model: nn.Module) -> None:
        """model: any; its convolutions, linears and batch norms in training mode are looked at."""
        self._calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        kinds = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)
        self._modules = [module for module in model.modules() if isinstance(module, kinds)]
        self._handles: list[Any] = []

    def __enter__(self) -> LayerBounds:
        self._handles = [module.register_forward_hook(self._note) for module in self._modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._calls.append((module, inputs[0], output))

    def bounds(
        self, loss: Tensor, records: Sequence[Recorded], error_of: Callable[[Recorded], Tensor]
    ) -> dict[str, float]:
        """{name: bound of the squared error of the gradient} of the recorded tensors that are the input of such layers.

        error_of: the error of a tensor, in its shape.
        """
        parameters = parameters_among(nodes_below([loss]))
        total = float(sum(g.square().sum() for g in _gradients(loss, parameters)))
        found = {}
        for record in records:
            calls = [call for call in self._calls if _same(call[1], record.tensor)]
            if calls:
                found[record.name] = sum(self._bound(loss, call, error_of(record), total) for call in calls)
        return found

    def _bound(self, loss: Tensor, call: tuple[nn.Module, Tensor, Tensor], error: Tensor, total: float) -> float:
        module, x, y = call
        (gy,) = _gradients(loss, [y])
        if isinstance(module, nn.BatchNorm2d):
            return _of_batch_norm(module, x, gy, error, _gradients(loss, [x])[0], total)
        overlap = 1.0
        if isinstance(module, nn.Conv2d):
            overlap = module.kernel_size[0] * module.kernel_size[1] / (module.stride[0] * module.stride[1])
        return float(2.0 * overlap * gy.square().sum() * error.square().sum())


def _of_batch_norm(module: nn.BatchNorm2d, x: Tensor, gy: Tensor, error: Tensor, gx: Tensor, total: float) -> float:
    x = x.detach()
    dims, count = (0, 2, 3), x.numel() / x.shape[1]
    rstd2 = 1.0 / (x.var(dims, unbiased=False) + module.eps)
    normalised = (x - x.mean(dims, keepdim=True)) * rstd2.sqrt().view(1, -1, 1, 1)
    squared_gamma_gradient = (gy * normalised).sum(dims).square()
    nonzero2 = (gy != 0).sum(dims).square()
    moved = rstd2 * nonzero2 * gy.square().amax(dims) * error.abs().amax(dims).square()
    mean_squared_error = error.square().mean(dims)
    weight = module.weight.detach().square() * rstd2.square() * (squared_gamma_gradient + moved)
    relative = (weight * mean_squared_error / count).sum() / gx.square().sum()
    return float(relative) * total


def _same(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.numel() == second.numel()


def _gradients(loss: Tensor, of: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.autograd.grad(loss, of, retain_graph=True)
