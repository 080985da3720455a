"""Sensitivity by GACT's own procedure: what another rounding of one saved tensor does to the gradient.

[Note: perturbation] GACT's estimator (Liu et al., ICML 2022, section 4) takes half the squared difference of two
gradients between which only the rounding of tensor l has another seed; its expectation is c_l(b), the variance that
tensor l adds to the gradient at b bits. Here all tensors are rounded to PROBE_BITS. It costs one backward of the
recorded graph for all tensors and one for each, without another forward; tensors that move the gradients of different
parameters share one ([Note: influence] in influence.py).
With Config(estimator="perturbation") it measures every tensor; otherwise those that the one pass does not reach: an
input without a graph, an operator whose backward is not differentiable. These are rounded to their widths in the
current plan, as many times as the one pass has directions. An estimate at one width is extrapolated to the others as if
all elements mattered alike: the features of a graph added 10 to 35% more at 6 bits than the estimate at 4 bits
predicts. A single squared difference of theirs has a relative standard deviation of up to 30%.

[Note: jumps] A checkpoint computes its block again from inputs that are rounded. Where the block has a relu, a few
elements change sides, and with them what its backward lets through. As many do as the rounding is large, each changes
the gradient by as much however small the rounding was, and a derivative shows nothing of it: with relu after each batch
norm of a U-Net these jumps are a hundred times what the products predict at 5 bits, and from 8 to 4 bits grow 17-fold,
not 256-fold. So what a block input adds is also seen by rounding it anew at its width in the plan; where that is more
than twice what the products predict there, the difference counts as jumps, in proportion to the standard deviation of
the rounding. Less may be the error of one estimate.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import codec
from .._torch_internals import next_sequence_number
from ..codec import MAX_BITS
from ..distributed import whole_value
from ..hooks import Encoder, OperatorObserver, Recorded, SavedTensorHooks
from ..policies import Bits, Plan, one_width
from .autograd_graph import float32_parts, gradients_of_parameters, nodes_below, parameters_among, scalar, values_of
from .checkpoint import measurable
from .influence import Influence, disjoint
from .isolation import generators_restored, untouched

PROBE_BITS = 4  # of a perturbation of all tensors
_LEAST_BITS = 2  # with one bit the gradient would not respond linearly


class RecordedGraph:
    """The graph of one recorded forward, whose backward can be run with some saved tensors rounded."""

    def __init__(self, loss: Tensor, records: Sequence[Recorded], encoder: Encoder, seed: int) -> None:
        self.loss, self.records, self.encoder, self.seed = loss, records, encoder, seed
        self.compressible = [record for record in records if record.compressible]
        self.nodes = nodes_below([loss])
        self.leaves = parameters_among(self.nodes)

    @contextmanager
    def rounded(self, bits_of: Callable[[str], Bits]) -> Iterator[None]:
        """Within the context backward sees each compressible tensor rounded to its own width; None leaves it exact."""
        for number, record in enumerate(self.compressible):
            bits = bits_of(record.name)
            if bits is not None:
                record.replacement = self.round(record, bits, number)
        try:
            yield
        finally:
            for record in self.compressible:
                record.replacement = None

    def round(self, record: Recorded, bits: Bits, number: int) -> Tensor:
        """One tensor rounded to some bits; a different number gives a different rounding."""
        return codec.unpack(self.encoder.pack(record.tensor, bits, self.seed + number, record.limits))

    def gradients_with(self, others: Mapping[Recorded, Tensor]) -> Sequence[Tensor | None]:
        """Gradients of the leaves with some tensors replacing those that backward sees now."""
        rounded = {record: record.replacement for record in others}
        for record, replacement in others.items():
            record.replacement = replacement
        try:
            return torch.autograd.grad(self.loss, self.leaves, retain_graph=True, allow_unused=True)
        finally:
            for record, before in rounded.items():
                record.replacement = before


def perturb(
    graph: RecordedGraph,
    wanted: Sequence[Recorded],
    bits_of: Callable[[str], int] = lambda _: PROBE_BITS,
    draws: int = 1,
) -> dict[Recorded, Tensor]:
    """Variance that some of the compressible tensors add to the gradient, as from_change has it.

    bits_of: the width to which a tensor is rounded. draws: roundings of each, every one compared with that before.
    """
    roundings = {record.name: rounding_of(record.tensor, None, graph.encoder) for record in wanted}
    names = [record.name for record in graph.compressible]
    bits = {name: widest_inexact(bits_of(name), roundings.get(name)) for name in names}
    others = {record: number for number, record in enumerate(graph.compressible, start=len(names))}

    def other(record: Recorded, draw: int = 0) -> Tensor:
        return graph.round(record, bits[record.name], others[record] + draw * len(names))

    change = dict.fromkeys(wanted, 0.0)
    with graph.rounded(lambda name: bits[name]):
        influence = Influence(graph.nodes, graph.leaves, other)
        base = influence.backward(graph.loss, wanted)
        for group in disjoint(influence.moved):
            before: Sequence[Tensor | None] = base
            for draw in range(draws):
                moved = graph.gradients_with({record: other(record, draw) for record in group})
                for record in group:
                    own = [k for k in range(len(graph.leaves)) if influence.moved[record] >> k & 1]
                    change[record] += square_distance([moved[k] for k in own], [before[k] for k in own]) / draws
                before = moved
    return {record: from_change(change[record], roundings[record.name], bits[record.name]) for record in wanted}


class CompiledRuns:
    """Forwards of a model with compiled regions, each with at most one backward.

    A compiled backward can run neither twice nor differentiated, because it overwrites what it was given.
    """

    def __init__(
        self, hooks: SavedTensorHooks, model: nn.Module, forward: Callable[[], Tensor | None], fraction: float
    ) -> None:
        """forward, fraction: as for one_pass.measure."""
        self.hooks, self._model, self._forward, self._fraction = hooks, model, forward, fraction

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """The context that the other methods are called in."""
        with untouched(self._model), measurable(nullcontext()):
            yield

    def eager(self) -> list[Recorded]:
        """What the model saves where nothing is compiled.

        Which checkpointed blocks take discrete decisions shows in this mode only, and in no more than a forward.
        """
        with torch.compiler.set_stance("force_eager"):
            return self._run(OperatorObserver(), {})[1]

    def compiled(self) -> list[Recorded]:
        """What the model saves as it is."""
        known = self.hooks.state_dict()
        records = self._run(None, {})[1]
        if self.hooks.state_dict() == known:
            return records
        del records  # the roles of what a region saves are known once it has been seen
        return self._run(None, {})[1]

    def gradients(self, rounded: Mapping[str, tuple[int, int]]) -> list[Tensor | None]:
        """Of the parameters, with some saved tensors rounded: name -> (bits, seed)."""
        began = next_sequence_number()
        return gradients_of_parameters(self._run(None, rounded)[0], began)

    def _run(
        self, observer: OperatorObserver | None, rounded: Mapping[str, tuple[int, int]]
    ) -> tuple[Tensor, list[Recorded]]:
        # every forward draws the same random numbers
        with generators_restored(), self.hooks.recording(observer, self._fraction, rounded) as records:
            loss = self._forward()
        return scalar(loss), [record for record in records if isinstance(record, Recorded)]


def measure_by_rerun(
    runs: CompiledRuns, names: Sequence[str], wanted: Mapping[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """The same for tensors of a compiled model, with a forward and backward for each and one more, as GACT does it.

    names: of all compressible tensors, in the order in which they are saved. wanted: what rounding_of() gives for
    those to be measured.
    """
    seeds = {name: (PROBE_BITS, seed + number) for number, name in enumerate(names)}
    chosen = [(number, name) for number, name in enumerate(names, len(names)) if name in wanted]
    found: dict[str, Tensor] = {}
    if not chosen:
        return found
    with runs.isolated():
        base = runs.gradients(seeds)
        for number, name in chosen:
            moved = runs.gradients({**seeds, name: (PROBE_BITS, seed + number)})
            found[name] = from_change(square_distance(moved, base), wanted[name], PROBE_BITS)
    return found


def from_change(change: float, rounding: Tensor, bits: int) -> Tensor:
    """float64 [8]: the variance that a tensor adds to the gradient at 1 to 8 bits. See [Note: perturbation].

    change: squared difference of the gradients with two roundings to some bits. rounding: see rounding_of; it carries
    what was found at that width to the others.
    """
    at_probe = float(rounding[bits - 1])
    return rounding * (0.5 * change / at_probe) if at_probe > 0 else torch.zeros(8, dtype=torch.float64, device="cpu")


class Shown(NamedTuple):
    """What one more rounding of a saved tensor to some bits did to the gradient."""

    change: float
    """squared difference of the gradients with two roundings"""
    rounding: Tensor
    """see rounding_of"""
    bits: int

    def plus(self, elsewhere: "Shown | None") -> "Shown":
        """With what it did by way of other parts of the model."""
        return self if elsewhere is None else self._replace(change=self.change + elsewhere.change)

    def variance(self) -> Tensor:
        """float64 [8]: see from_change."""
        return from_change(*self)

    def beyond(self, predicted: Tensor) -> Tensor:
        """float64 [8]: the variance that products predict, and jumps besides. See [Note: jumps]."""
        slopes, scale = 2.0 * float(predicted[self.bits - 1]), float(self.rounding[self.bits - 1])
        jumps = self.change - slopes
        if not jumps > slopes or not scale > 0.0:
            return predicted
        return predicted + jumps * (0.5 * self.rounding / scale).sqrt()


def own_bits(plan: Plan, name: str) -> int:
    """The width of a tensor in a plan, or the nearest one at which its effect can be measured."""
    return max(_LEAST_BITS, one_width(plan.bits_of(name) or MAX_BITS) or MAX_BITS)


def square_distance(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Squared norm of the difference of two gradients of the same parameters, in the same order."""
    pairs = zip(first, second, strict=True)
    return sum(
        whole_value(float32_parts(values_of(a - b)).square().sum()) for a, b in pairs if a is not None and b is not None
    )


def rounding_of(
    tensor: Tensor, weight: Tensor | None, encoder: Encoder, columns: int | None = None, fraction: float = 1.0
) -> Tensor:
    """float64 [8]: the rounding variance at 1 to 8 bits, weighted and summed over the tensor.

    columns: by which it is grouped, None for those of its own layout. fraction: of the rows of the tensor that will be
    stored, which are there. Where they are fewer than a group has then, the group's range grows as that of normal
    numbers does.
    """
    values = codec.stored_values(tensor)
    weights = torch.ones_like(values, dtype=torch.float32) if weight is None else codec.stored_values(weight)
    if columns is None:
        columns = encoder.examples.columns_of(tensor)
        if columns == 1 and not encoder.examples.make_up(tensor):
            columns = encoder.columns_of(tensor, fraction)
    variance = codec.rounding_variance(values, weights, encoder.group_size, columns).cpu()
    rows = values.numel() // columns
    if columns == 1 or rows >= encoder.group_size or rows < 2:
        return variance
    stored_rows = rows / fraction
    in_a_group = stored_rows / math.ceil(stored_rows / encoder.group_size)
    return variance * (_range_of(in_a_group) / _range_of(rows)) ** 2


def _range_of(count: float) -> float:
    """The expected range of so many standard normal numbers (Blom, 1958)."""
    return 2.0 * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def widest_inexact(bits: int, rounding: Tensor | None) -> int:
    """Some bits, or the most bits below them at which a tensor with this rounding variance is not exact."""
    inexact = [width for width in range(1, bits + 1) if rounding is None or float(rounding[width - 1]) > 0]
    return max(inexact, default=1)
