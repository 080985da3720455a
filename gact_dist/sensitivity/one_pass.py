"""How much the gradient moves when one saved tensor is stored with an error, for all saved tensors at once.

Let g(h_1 .. h_L) be the parameter gradient as a function of the saved tensors, each an independent input of the
backward pass. Rounding tensor l at b bits adds the variance  c_l(b) = sum_i var_i(b) (J_l^T J_l)_ii,  with J_l the
Jacobian of g with respect to h_l and var_i(b) the variance of stochastic rounding of element i. GACT (Liu et al., ICML
2022, section 4) estimates each c_l with forward and backward passes of its own; here one product of a random
v ~ N(0, I) over the parameters with all J_l gives every (J_l^T v)_i at once, and E[(J_l^T v)_i^2] = (J_l^T J_l)_ii.

[Note: double backward] With create_graph, a saved tensor that is unpacked is wired to the node that produced it. The
derivative of <v, g> with respect to that edge is J_l^T v plus what flows back through the forward graph from saved
tensors further down; a prehook on every producing node cuts this flow, after the engine has captured the edge.

[Note: operating point] J_l is taken where the job will run: in the first backward every tensor is rounded to the width
that the plan in force gives it. In the limit of many bits this is the derivative at the exact tensors; at 2 or 3 bits
it sees that layer norm and attention answer to rounding more than linearly. A fine-tuned MiniLM at 2 bits, relative to
the squared gradient: the plan from the exact point has variance 420 and predicts 0.70; from this point 3.5, predicting
80. At 4 bits both plans have 0.037, predicting 0.030 and 0.036.

[Note: perturbation] GACT's own estimator (section 4 of the paper) takes half the squared difference of two gradients
between which only the rounding of tensor l has another seed; its expectation is c_l(b). Here all tensors are rounded to
PROBE_BITS, and it costs one backward of the recorded graph for all and one for each tensor, without another forward;
tensors that move the gradients of different parameters share one ([Note: influence] in influence.py).
It measures every tensor with Config(estimator="perturbation"), else those that the one pass does not reach: an input
without a graph, an operator whose backward is not differentiable. These are rounded to their widths in the plan in
force, and as often as the one pass has directions. The features of a graph added 10 to 35% more at 6 bits than at 4
carried there by the rounding of all elements alike; one squared difference of theirs has a deviation of up to 30%.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from .. import codec
from ..codec import MAX_BITS
from ..hooks import Engine, OperatorObserver, Recorded, has_compiled_parts, measurable
from ..policies import Bits, one_width, statistics
from .autograd_graph import nodes_below, parameters_among
from .influence import Influence, disjoint
from .isolation import untouched
from .standins import StandInMode
from .tensor_sensitivity import Sensitivity, from_change, rounding_of, sensitivity_of, square_distance

_log = logging.getLogger(__name__)
PROBE_BITS = 4  # of a perturbation of all tensors
_LEAST_PROBE_BITS = 2  # with one bit the gradient would not answer linearly
_SAMPLE_BITS = 2  # the width at which samples of one tensor are compared
_ERROR_NODES = ("torch::autograd::Error", "torch::autograd::DelayedError", "torch::autograd::NotImplemented")


def measure(
    engine: Engine,
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
    fraction: of a step's samples that forward sees. probes: random directions to average over, on this rank.
    estimator: see Config.
    Raises ValueError when forward gives no scalar that depends on a parameter, torch.OutOfMemoryError where a smaller
    fraction might fit.
    """
    if has_compiled_parts(model):
        return _measure_by_rerun(engine, model, forward, seed, fraction)
    mode = StandInMode()
    with untouched(model), measurable(mode):
        with engine.recording(mode, fraction) as records:
            result = forward()
        loss = mode.root if mode.root is not None else result
        probe = _Probe(scalar(loss), records, engine, seed)
        if estimator == "one-pass":
            return probe.run(probes)
        return probe.perturb([record for record in records if record.compressible])


def _measure_by_rerun(
    engine: Engine, model: nn.Module, forward: Callable[[], Tensor | None], seed: int, fraction: float
) -> list[Sensitivity]:
    """By perturbation, with a forward and a backward for every tensor and one besides: GACT's procedure.

    A compiled backward can be differentiated neither twice nor again, for it overwrites what it was given.
    """

    def fork() -> AbstractContextManager[Any]:
        """Every forward draws the same random numbers."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        return torch.random.fork_rng(devices=devices)

    def run(rounded: dict[str, tuple[int, int]]) -> tuple[Tensor, list[Recorded]]:
        with fork(), engine.recording(None, fraction, rounded) as records:
            return scalar(forward()), records

    def gradients(loss: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(loss, parameters_among(nodes_below([loss])), allow_unused=True))

    found = []
    with untouched(model), measurable(nullcontext()):
        # which blocks take discrete decisions shows in eager mode only, and in no more than a forward
        with torch.compiler.set_stance("force_eager"), engine.recording(OperatorObserver(), fraction), fork():
            forward()
        run({})  # the roles of what a region saves are known once it has been seen
        loss, records = run({})
        # before its backward, which may write into what was saved
        measured = [(r, rounding_of(r.tensor, None, engine.packer)) for r in records if r.compressible]
        del loss
        seeds = {record.name: (PROBE_BITS, seed + number) for number, (record, _) in enumerate(measured)}
        base = gradients(run(seeds)[0])
        for number, (record, rounding) in enumerate(measured, start=len(measured)):
            moved = gradients(run({**seeds, record.name: (PROBE_BITS, seed + number)})[0])
            found.append(from_change(record, square_distance(moved, base), rounding, PROBE_BITS))
    return found


def scalar(loss: Any) -> Tensor:
    """A loss as it is. Raises ValueError unless it is a scalar with a graph."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss function gave {got}, expected a scalar loss that depends on the model's parameters; return the "
            "loss from loss_fn(batch), or call backward() on it inside the closure"
        )
    return loss


class _Probe:
    """One recorded graph, and the passes over it."""

    def __init__(self, loss: Tensor, records: Sequence[Recorded], engine: Engine, seed: int) -> None:
        self.loss = loss
        self.records = records
        self.operating_bits = engine.bits_of
        self.packer = engine.packer
        self.average_bits = engine.config.bits or 0.0
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        self.nodes = nodes_below([loss])
        self.leaves = parameters_among(self.nodes)

    def run(self, probes: int) -> list[Sensitivity]:
        compressible = [record for record in self.records if record.compressible]
        squares = self._squared_products(compressible, probes)
        found, missed = [], []
        for record in compressible:
            weight = None if record.tensor.is_complex() else squares.get((record.node, record.output_number))
            if weight is None:
                missed.append(record)
            else:
                found.append(self._by_rule(record, weight))
        if missed:
            _log.debug("measured by perturbation: %s", ", ".join(record.name for record in missed))
            # if all are missed, draws would cost more than GACT's procedure
            found += self.perturb(missed, self._own_bits, probes) if found else self.perturb(missed)
        order = {record.name: position for position, record in enumerate(compressible)}
        return sorted(found, key=lambda sensitivity: order[sensitivity.name])

    def _squared_products(self, compressible: Sequence[Recorded], probes: int) -> dict[tuple, Tensor]:
        """{edge: mean of (J^T v)^2 over the probes, in the shape of the node's output}, for edges that it reaches."""
        edges = list(dict.fromkeys((r.node, r.output_number) for r in compressible if r.node is not None))
        squares: dict[tuple, Tensor] = {}
        if not edges:
            return squares
        with self._rounded(compressible, self.operating_bits):  # see [Note: operating point]
            gradients = self._differentiable_gradients()
        if gradients is None:
            return squares
        handles = [node.register_prehook(_cut(numbers)) for node, numbers in self._produced().items()]
        try:
            for _ in range(probes):
                products = self._products(gradients, edges)
                for edge, product in zip(edges, products, strict=True):
                    if product is not None:
                        square = product.detach().float().square() / probes
                        squares[edge] = squares[edge] + square if edge in squares else square
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operator whose missing derivative shows only here
            _log.info("one-pass sensitivity is not possible here (%s): measuring by perturbation", _first_line(error))
            return {}
        finally:
            for handle in handles:
                handle.remove()
        return {edge: square for edge, square in squares.items() if bool(square.any())}

    def _differentiable_gradients(self) -> Sequence[Tensor | None] | None:
        """The gradient with its graph; None if some backward leaves it (a kernel that autograd cannot see)."""
        opaque: list[str] = []
        handles = [node.register_hook(_watch(node, opaque)) for node in self.nodes]
        try:
            gradients = torch.autograd.grad(self.loss, self.leaves, create_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        if opaque:
            _log.info("backward of %s has no derivative: measuring by perturbation", ", ".join(sorted(set(opaque))))
        return None if opaque else gradients

    def _products(self, gradients: Sequence[Tensor | None], edges: Sequence[tuple]) -> Sequence[Tensor | None]:
        terms = [
            (g * self._direction(g)).sum(dtype=torch.float32) for g in gradients if g is not None and g.requires_grad
        ]
        if not terms:
            return [None] * len(edges)
        inner = torch.stack(terms).sum()
        return torch.autograd.grad(inner, [GradientEdge(*edge) for edge in edges], retain_graph=True, allow_unused=True)

    def _direction(self, gradient: Tensor) -> Tensor:
        device = gradient.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device=device).manual_seed(self.seed & (2**63 - 1))
        direction = torch.randn(gradient.shape, generator=self.generators[device], device=device, dtype=torch.float32)
        return direction.to(gradient.dtype)

    def _produced(self) -> dict[Any, set[int]]:
        outputs: dict[Any, set[int]] = defaultdict(set)
        for record in self.records:
            if record.node is not None:
                outputs[record.node].add(record.output_number)
        return outputs

    def _by_rule(self, record: Recorded, square: Tensor) -> Sensitivity:
        weight = _seen_through(record, square)
        rounding = rounding_of(record.tensor, weight, self.packer)
        return sensitivity_of(record, rounding, by_perturbation=False, samples=self._samples(record, weight))

    def _samples(self, record: Recorded, weight: Tensor | None = None) -> NDArray[np.float64] | None:
        """Of a tensor that is made of samples, what per_sample.statistics says of them."""
        tensor = record.tensor
        if not self.packer.applies_to(tensor):
            return None
        keys, average_bits = self.packer.keys(tensor).cpu().numpy(), self.average_bits
        if weight is None:
            return statistics(keys, None, average_bits)
        values, weights = (codec.stored_values(t).view(len(keys), -1) for t in (tensor, weight))
        pairs = zip(values, weights, strict=True)
        form = self.packer.group_size, self.packer.columns_of(tensor)
        variance = [codec.rounding_variance(x, w, *form)[_SAMPLE_BITS - 1] for x, w in pairs]
        return statistics(keys, torch.stack(variance).cpu().numpy(), average_bits)

    def _own_bits(self, name: str) -> int:
        """The width of a tensor in the plan in force, or the nearest one at which its effect can be told."""
        return max(_LEAST_PROBE_BITS, one_width(self.operating_bits(name) or MAX_BITS) or MAX_BITS)

    def perturb(
        self, wanted: Sequence[Recorded], bits_of: Callable[[str], int] = lambda _: PROBE_BITS, draws: int = 1
    ) -> list[Sensitivity]:
        """Of some of the compressible tensors. See [Note: perturbation].

        bits_of: the width to which a tensor is rounded. draws: roundings of each, every one compared with that before.
        """
        compressible = [record for record in self.records if record.compressible]
        others = {record: number for number, record in enumerate(compressible, start=len(compressible))}
        roundings = {record.name: rounding_of(record.tensor, None, self.packer) for record in wanted}
        change = dict.fromkeys(wanted, 0.0)

        def bits(name: str) -> int:
            """The width, or the widest below at which the tensor is not stored exactly."""
            inexact = [
                w for w in range(1, bits_of(name) + 1) if name not in roundings or float(roundings[name][w - 1]) > 0
            ]
            return max(inexact, default=1)

        def other(record: Recorded, draw: int = 0) -> Tensor:
            return self._round(record, bits(record.name), others[record] + draw * len(compressible))

        with self._rounded(compressible, bits):
            influence = Influence(self.nodes, self.leaves, other)
            base = influence.backward(self.loss, wanted)
            for group in disjoint(influence.moved):
                before: Sequence[Tensor | None] = base
                for draw in range(draws):
                    moved = self._gradients_with({record: other(record, draw) for record in group})
                    for record in group:
                        own = [k for k in range(len(self.leaves)) if influence.moved[record] >> k & 1]
                        distance = square_distance([moved[k] for k in own], [before[k] for k in own])
                        change[record] += distance / draws
                    before = moved
        return [
            from_change(record, change[record], roundings[record.name], bits(record.name), self._samples(record))
            for record in wanted
        ]

    def _gradients_with(self, others: Mapping[Recorded, Tensor]) -> Sequence[Tensor | None]:
        """With some tensors in place of those that backward sees."""
        rounded = {record: record.replacement for record in others}
        for record, replacement in others.items():
            record.replacement = replacement
        try:
            return torch.autograd.grad(self.loss, self.leaves, retain_graph=True, allow_unused=True)
        finally:
            for record, before in rounded.items():
                record.replacement = before

    @contextmanager
    def _rounded(self, records: Sequence[Recorded], bits_of: Callable[[str], Bits]) -> Iterator[None]:
        """Backward sees every tensor rounded to a width of its own; None leaves it exact."""
        for number, record in enumerate(records):
            bits = bits_of(record.name)
            if bits is not None:
                record.replacement = self._round(record, bits, number)
        try:
            yield
        finally:
            for record in records:
                record.replacement = None

    def _round(self, record: Recorded, bits: Bits, number: int) -> Tensor:
        return codec.unpack(self.packer.pack(record.tensor, bits, self.seed + number))


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
                varies = varies or (isinstance(node, BackwardCFunction) and bool(node._raw_saved_tensors))
                underivable = varies and not result.requires_grad and bool(result.any())
            if underivable:
                opaque.append(node.name())

    return hook


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
