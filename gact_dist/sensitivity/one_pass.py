"""How much the gradient moves when one saved tensor is stored with an error, for all saved tensors at once.

Let g(h_1 .. h_L) be the parameter gradient as a function of the saved tensors, each an independent input of the
backward pass. Rounding tensor l at b bits adds the variance  c_l(b) = sum_i var_i(b) (J_l^T J_l)_ii,  with J_l the
Jacobian of g with respect to h_l and var_i(b) the variance of stochastic rounding of element i. GACT (Liu et al., ICML
2022, section 4) estimates each c_l with forward and backward passes of its own; here one product of a random
v ~ N(0, I) over the parameters with all J_l gives every (J_l^T v)_i at once, and E[(J_l^T v)_i^2] = (J_l^T J_l)_ii.

[Note: double backward] With create_graph, a saved tensor that is unpacked is wired to the node that produced it. The
derivative of <v, g> with respect to that edge is J_l^T v plus what flows back through the forward graph from saved
tensors further down; a prehook on every producing node cuts this flow, after the hooks has captured the edge.

[Note: operating point] J_l is taken where the job will run: in the first backward every tensor is rounded to the width
that the current plan gives it. In the limit of many bits this is the derivative at the exact tensors; at 2 or 3 bits
it accounts for layer norm and attention responding to rounding more than linearly. For a fine-tuned MiniLM at 2 bits,
relative to the squared gradient, the plan from the exact point has a variance of 420 where 0.70 is predicted; the plan
from this point has 3.5 where 80 is predicted. At 4 bits both plans have 0.037; 0.030 and 0.036 are predicted.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from .. import codec
from .._torch_internals import keeps_tensors
from ..codec import MAX_BITS
from ..hooks import Recorded, SavedTensorHooks, has_compiled_parts
from ..policies import Bits, one_width, statistics
from .autograd_graph import scalar
from .checkpoint import measurable
from .isolation import untouched
from .measuring_mode import MeasuringMode
from .perturbation import RecordedGraph, measure_by_rerun, perturb, rounding_of

_log = logging.getLogger(__name__)
_LEAST_PROBE_BITS = 2  # with one bit the gradient would not respond linearly
_EXAMPLE_BITS = 2  # the width at which examples of one tensor are compared
_ERROR_NODES = ("torch::autograd::Error", "torch::autograd::DelayedError", "torch::autograd::NotImplemented")


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The measured effect of one saved tensor on the gradient."""

    name: str
    numel: int
    itemsize_bits: int
    variance: Tensor
    """float64 [8]: variance added to the gradient, summed over all parameters, if stored in 1, 2 .. 8 bits"""
    by_perturbation: bool
    examples: NDArray[np.float64] | None = None
    """policies.statistics; None for a tensor whose examples have no widths of their own"""


def measure(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Tensor | None],
    *,
    seed: int,
    fraction: float = 1.0,
    probes: int = 1,
    estimator: str = "one-pass",
) -> list[Sensitivity]:
    """Sensitivity of every compressible saved tensor of one forward pass, in the order they are saved.

    forward: runs the model and returns the scalar loss, or calls backward on it; run once, with the job left untouched
    (see isolation.py). seed: of the random directions and of the rounding in perturbations; different on every rank.
    fraction: of a step's examples that forward sees. probes: random directions to average over, on this rank.
    estimator: see Config.
    Raises ValueError when forward gives no scalar that depends on a parameter, torch.OutOfMemoryError where a smaller
    fraction might fit.
    """
    if has_compiled_parts(model):
        rerun = measure_by_rerun(hooks, model, forward, seed, fraction)
        return [_sensitivity_of(record, variance, by_perturbation=True) for record, variance in rerun.items()]
    mode = MeasuringMode()
    with untouched(model), measurable(mode):
        with hooks.recording(mode, fraction) as records:
            result = forward()
        graph = RecordedGraph(scalar(mode.root_of(result)), records, hooks.encoder, seed)
        if estimator == "one-pass":
            return _by_one_pass(graph, hooks, probes)
        return list(_perturbed(hooks, perturb(graph, graph.compressible)).values())


def _by_one_pass(graph: RecordedGraph, hooks: SavedTensorHooks, probes: int) -> list[Sensitivity]:
    """The sensitivities of all compressible tensors; by perturbation for those that the pass does not reach."""
    squares = _OnePass(graph).squared_products(hooks.plan.bits_of, probes)
    found = {}
    for record in graph.compressible:
        weight = None if record.tensor.is_complex() else squares.get((record.node, record.output_number))
        if weight is not None:
            weight = _seen_through(record, weight)
            variance = rounding_of(record.tensor, weight, hooks.encoder)
            found[record] = _sensitivity_of(record, variance, False, _example_statistics(hooks, record.tensor, weight))
    missed = [record for record in graph.compressible if record not in found]
    if missed:
        _log.debug("measured by perturbation: %s", ", ".join(record.name for record in missed))
        # if all are missed, draws would cost more than GACT's procedure
        how: tuple = (partial(_own_bits, hooks), probes) if found else ()
        found |= _perturbed(hooks, perturb(graph, missed, *how))
    return [found[record] for record in graph.compressible]


def _perturbed(hooks: SavedTensorHooks, variances: dict[Recorded, Tensor]) -> dict[Recorded, Sensitivity]:
    return {
        record: _sensitivity_of(record, variance, True, _example_statistics(hooks, record.tensor))
        for record, variance in variances.items()
    }


def _sensitivity_of(
    record: Recorded, variance: Tensor, by_perturbation: bool, examples: NDArray[np.float64] | None = None
) -> Sensitivity:
    tensor = record.tensor
    return Sensitivity(record.name, tensor.numel(), 8 * tensor.element_size(), variance, by_perturbation, examples)


def _example_statistics(
    hooks: SavedTensorHooks, tensor: Tensor, weight: Tensor | None = None
) -> NDArray[np.float64] | None:
    """What policies.statistics says of the examples in a tensor; None unless they have widths of their own."""
    encoder, average_bits = hooks.encoder, hooks.config.bits or 0.0
    if not encoder.examples.make_up(tensor):
        return None
    keys = encoder.examples.keys(tensor).cpu().numpy()
    if weight is None:
        return statistics(keys, None, average_bits)
    values, weights = (codec.stored_values(t).view(len(keys), -1) for t in (tensor, weight))
    form = encoder.group_size, encoder.examples.columns_of(tensor)
    variance = [codec.rounding_variance(x, w, *form)[_EXAMPLE_BITS - 1] for x, w in zip(values, weights, strict=True)]
    return statistics(keys, torch.stack(variance).cpu().numpy(), average_bits)


def _own_bits(hooks: SavedTensorHooks, name: str) -> int:
    """The width of a tensor in the current plan, or the nearest one at which its effect can be measured."""
    return max(_LEAST_PROBE_BITS, one_width(hooks.plan.bits_of(name) or MAX_BITS) or MAX_BITS)


class _OnePass:
    """Products of random directions with the Jacobians of one recorded graph."""

    def __init__(self, graph: RecordedGraph) -> None:
        self.graph = graph
        self._generators: dict[torch.device, torch.Generator] = {}

    def squared_products(self, bits_of: Callable[[str], Bits], probes: int) -> dict[tuple, Tensor]:
        """{edge: mean of (J^T v)^2 over the probes, in the shape of the node's output}, for edges that it reaches.

        Empty if an operator's backward refuses to be differentiated. If it does not run at all, the plain backward of a
        perturbation raises the error.
        """
        edges = list(dict.fromkeys((r.node, r.output_number) for r in self.graph.compressible if r.node is not None))
        if not edges:
            return {}
        try:
            with self.graph.rounded(bits_of):  # see [Note: operating point]
                gradients = self._differentiable_gradients()
            return {} if gradients is None else self._mean_squares(gradients, edges, probes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _log.info("one-pass sensitivity is not possible here (%s): measuring by perturbation", _first_line(error))
            return {}

    def _mean_squares(
        self, gradients: Sequence[Tensor | None], edges: Sequence[tuple], probes: int
    ) -> dict[tuple, Tensor]:
        squares: dict[tuple, Tensor] = {}
        handles = [node.register_prehook(_cut(numbers)) for node, numbers in self._produced().items()]
        try:
            for _ in range(probes):
                for edge, product in zip(edges, self._products(gradients, edges), strict=True):
                    if product is not None:
                        square = product.detach().float().square() / probes
                        squares[edge] = squares[edge] + square if edge in squares else square
        finally:
            for handle in handles:
                handle.remove()
        return {edge: square for edge, square in squares.items() if bool(square.any())}

    def _differentiable_gradients(self) -> Sequence[Tensor | None] | None:
        """The gradient with its graph; None if some backward leaves it (a kernel that autograd cannot see)."""
        opaque: list[str] = []
        handles = [node.register_hook(_watch(node, opaque)) for node in self.graph.nodes]
        try:
            gradients = torch.autograd.grad(self.graph.loss, self.graph.leaves, create_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        if opaque:
            _log.info("backward of %s has no derivative: measuring by perturbation", ", ".join(sorted(set(opaque))))
        return None if opaque else gradients

    def _products(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple]) -> Sequence[Tensor | None]:
        used = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        terms = [(g * self._direction(g).conj()).real.sum(dtype=torch.float32) for g in used]  # over both parts
        if not terms:
            return [None] * len(edges)
        inner = torch.stack(terms).sum()
        ends = [GradientEdge(*edge) for edge in edges]
        found = torch.autograd.grad(inner, ends, retain_graph=True, allow_unused=True)
        # complex tensors are left to perturbation
        return [None if product is None or product.is_complex() else product for product in found]

    def _direction(self, gradient: Tensor) -> Tensor:
        """Random numbers of variance one, for real and imaginary parts alike."""
        device = gradient.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device=device).manual_seed(self.graph.seed & (2**63 - 1))
        shape = (*gradient.shape, 2) if gradient.is_complex() else gradient.shape
        direction = torch.randn(shape, generator=self._generators[device], device=device, dtype=torch.float32)
        return (torch.view_as_complex(direction) if gradient.is_complex() else direction).to(gradient.dtype)

    def _produced(self) -> dict[Any, set[int]]:
        outputs: dict[Any, set[int]] = defaultdict(set)
        for record in self.graph.records:
            if record.node is not None:
                outputs[record.node].add(record.output_number)
        return outputs


def _cut(numbers: set[int]) -> Callable[[Sequence[Tensor]], tuple]:
    def prehook(inputs: Sequence[Tensor]) -> tuple:
        return tuple(None if number in numbers else value for number, value in enumerate(inputs))

    return prehook


def _seen_through(record: Recorded, square: Tensor) -> Tensor:
    """The part of an edge's values that lies under the saved view, in the view's shape."""
    origin, tensor = record.origin, record.tensor
    laid_out = torch.empty_strided(origin.shape, origin.stride(), dtype=square.dtype, device=square.device)
    laid_out.copy_(square)
    return laid_out.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - origin.storage_offset())


def _watch(node: Any, opaque: list[str]) -> Callable[..., None]:
    """A hook that notes a node whose results do not depend, for autograd, on what they are computed from."""

    def hook(results: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        for result in results:
            if result is None:
                continue
            if result.grad_fn is not None:
                underivable = result.grad_fn.name() in _ERROR_NODES
            else:
                varies = any(gradient is not None and gradient.requires_grad for gradient in given)
                varies = varies or (isinstance(node, BackwardCFunction) and keeps_tensors(node))
                underivable = varies and not result.requires_grad and bool(result.any())
            if underivable:
                opaque.append(node.name())

    return hook


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
