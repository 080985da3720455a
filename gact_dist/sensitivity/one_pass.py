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

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import codec
from .._torch_internals import has_compiled_parts
from ..distributed import TENSOR_PARALLELISM, fingerprint, ranks_sharing, sharding
from ..hooks import Recorded, ReplayError, SavedTensorHooks
from ..policies import statistics
from .autograd_graph import BackwardError, MeasurementError, backward, scalar
from .blocks import BlockForward, CutError, synchronises
from .checkpoint import measurable
from .compiled_blocks import CompiledBlocks, Result
from .compiled_match import EagerTensor, EagerTensors, seen
from .compressed_perturbation import CompressedPerturbation
from .halfway import Halfway, ResumeError, stop_of
from .inner_backward import (
    InnerBackwardError,
    InnerBackwards,
    Reruns,
    perturb_by_rerun,
    run_alone_in_blocks,
    squared_products,
)
from .isolation import untouched
from .measuring_mode import MeasuringMode
from .partition import blocks_as_run, blocks_of, may_not_be_whole, parts_of_block
from .parts import OpaqueError
from .perturbation import CompiledRuns, RecordedGraph, measure_by_rerun, own_bits, perturb, rounding_of
from .sections import MOST
from .surroundings import Generators
from .walk import Measured, Walk

_log = logging.getLogger(__name__)
_EXAMPLE_BITS = 2  # the width at which examples of one tensor are compared
BOUNDARY_BITS: int | None = 8
"""at which tensors at the borders of blocks are kept, None for exactly"""


# What a block too large for the one pass takes is told by what its double backward holds, in sections of it; where all
# is small nobody minds, and where a block saves more tensors their perturbation takes too long.
_SECOND_DERIVATIVE = 3
_LEAST_BYTES, _MOST_TENSORS = 32 << 20, 24


class TooLargeError(Exception):
    """One pass would hold more than the untouched job. See [Note: compressed perturbation]."""


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


def of_whole_batch(parts: Sequence[tuple[Sequence[Sensitivity], float]]) -> list[Sensitivity]:
    """What parts of a batch, each with the fraction that it is, say of the whole batch.

    A mean loss over n of N examples has N/n times the variance of the whole batch, and n/N of its elements. A tensor
    that only some of the parts saved counts as these have it.
    """
    found: dict[str, list[tuple[Sensitivity, float]]] = {}
    for measured, fraction in parts:
        for item in measured:
            found.setdefault(item.name, []).append((item, fraction))
    return [_mean(items) for items in found.values()]


def _mean(items: Sequence[tuple[Sensitivity, float]]) -> Sensitivity:
    total = sum(fraction for _, fraction in items)
    shares = [fraction / total for _, fraction in items]
    examples = [item.examples for item, _ in items]
    return replace(
        items[0][0],
        numel=round(sum(item.numel / fraction * share for (item, fraction), share in zip(items, shares, strict=True))),
        variance=sum(
            (item.variance * (fraction * share) for (item, fraction), share in zip(items, shares, strict=True)),
            torch.zeros_like(items[0][0].variance),
        ),
        by_perturbation=any(item.by_perturbation for item, _ in items),
        examples=_mean_of_present(examples, shares),
    )


def _mean_of_present(
    statistics_of_parts: Sequence[NDArray[np.float64] | None], shares: Sequence[float]
) -> NDArray[np.float64] | None:
    present = [(found, share) for found, share in zip(statistics_of_parts, shares, strict=True) if found is not None]
    return np.average([f for f, _ in present], axis=0, weights=[s for _, s in present]) if present else None


def measure(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Tensor | None],
    *,
    seed: int,
    fraction: float = 1.0,
    probes: int = 1,
    estimator: str = "one-pass",
    shares: int = 1,
    in_steps: bool = False,
) -> list[Sensitivity] | Paused:
    """Sensitivity of every compressible saved tensor of one forward pass, in the order they are saved.

    forward: runs the model and returns the scalar loss, or calls backward on it; run once, with the job left untouched
    (see isolation.py). seed: of the random directions and of the rounding in perturbations; different on every rank.
    fraction: of a step's examples that forward sees. probes: random directions to average over, on this rank.
    estimator: see Config. shares: in how many calls it is done, if it can pause: this one returns what goes on with it;
    the same on all ranks where parameters are sharded. in_steps: whether it may also take several calls where it needs
    no examples of an earlier one.
    Raises ValueError when forward gives no scalar that depends on a parameter, torch.OutOfMemoryError where a smaller
    fraction might fit, MeasurementError where it would take a whole model whose parameters are sharded.
    """
    blocks = blocks_of(model, hooks.config.blocks)
    whole = not blocks or not may_not_be_whole(model)
    if has_compiled_parts(model):
        matches = estimator == "one-pass" and not synchronises(model)  # what is left to perturb may differ by rank
        found = _of_compiled_blocks(hooks, model, forward, seed, fraction, probes, matches, whole)
        if found is None:
            matches = matches and sharding(model) is None
            found = _of_compiled(hooks, model, forward, seed, fraction, probes, matches)
        return found
    way = _ByWalk(hooks, model, seed, fraction, probes, perturbs=estimator == "perturbation")
    too_large = in_parts = False
    while estimator == "one-pass" or not whole:
        try:
            if shares > 1 and not way.perturbs:
                return way.first_share(blocks, forward, shares)
            return way.measured(blocks, forward)
        except TooLargeError as error:
            _log.debug("%s", error)
            too_large = True
            break  # and hold nothing of this forward any more
        except InnerBackwardError as error:
            if not whole:
                raise MeasurementError(str(error)) from error
            return _with_inner_backward(hooks, Reruns(hooks, model, forward, fraction), seed, probes)
        except (CutError, OpaqueError, ReplayError, BackwardError) as error:
            if not whole:
                raise MeasurementError(str(error)) from error
            is_opaque = isinstance(error, OpaqueError)
            if blocks and not (is_opaque and in_parts):
                _log.debug("%s: measuring it with what is around it", error)
                blocks = _blocks_after(error, blocks)
            elif is_opaque and not in_parts and (blocks := parts_of_block(model)):
                _log.debug("%s: measuring the parts of the model", error)
                in_parts = True
            else:
                _log.debug("%s: measuring by perturbation", error)
                break
    if too_large:
        return PausedPerturbation(hooks, model, seed, fraction).share(forward, in_steps or shares > 1)
    mode = MeasuringMode()
    with untouched(model), measurable(mode):
        with hooks.recording(mode, fraction) as records:
            root = mode.root_of(forward())
        if not mode.inner_backward:
            exact = [record for record in records if isinstance(record, Recorded)]
            graph = RecordedGraph(scalar(root), exact, hooks.encoder, seed)
            try:
                with backward():
                    return _perturbed(hooks, perturb(graph, graph.compressible))
            except BackwardError as error:
                _log.debug("%s: measuring by perturbation, with a forward for every tensor", error)
            del graph, exact
    records.clear()
    del root
    return _with_inner_backward(hooks, Reruns(hooks, model, forward, fraction), seed, 0)


def _of_compiled_blocks(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Tensor | None],
    seed: int,
    fraction: float,
    probes: int,
    matches: bool,
    whole: bool,
) -> list[Sensitivity] | None:
    """As _of_compiled(), block by block; None where the model can only be measured as a whole.

    whole: whether it may be. See [Note: compiled blocks] in compiled_blocks.py.
    """
    blocks = blocks_as_run(model, hooks.config.blocks, hooks.packs_in_graphs)
    if not blocks or sharding(model) == TENSOR_PARALLELISM:
        return None
    try:
        regions = CompiledBlocks(
            hooks, model, blocks, forward, fraction, matches=matches, boundary_bits=BOUNDARY_BITS, seed=seed
        )
        way = _ByWalk(hooks, model, seed, fraction, probes, columns=regions.columns, regions=regions)
        with torch.compiler.set_stance("force_eager"):
            found = {item.name: item for item in way.measured(blocks, forward)}
    except (InnerBackwardError, CutError, OpaqueError, ReplayError, BackwardError) as error:
        if not whole:
            raise MeasurementError(str(error)) from error
        _log.debug("%s: measuring compiled regions with what is around them", error)
        return None
    return [item for result in regions.results() if (item := _of_region(result, found)) is not None]


def _of_region(result: Result, found: Mapping[str, Sensitivity]) -> Sensitivity | None:
    """found: by name, where nothing is compiled. None where nothing is known."""
    saved, name = result.saved, result.saved.name
    if result.elsewhere is not None:
        item = found.get(result.elsewhere)
        return None if item is None else replace(item, name=name, examples=None)
    by_perturbation, variance = result.perturbed is not None, result.perturbed
    if variance is None:  # the loss does not depend on it
        variance = torch.zeros(8, dtype=torch.float64, device="cpu")
    return Sensitivity(name, saved.numel, saved.itemsize_bits, variance, by_perturbation)


def _of_compiled(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Tensor | None],
    seed: int,
    fraction: float,
    probes: int,
    matches: bool,
) -> list[Sensitivity]:
    """The sensitivities of a model with compiled regions. See [Note: matching] in compiled_match.py.

    matches: whether those of the model as it was before torch.compile are taken over; otherwise all are perturbed.
    """
    runs = CompiledRuns(hooks, model, forward, fraction)
    with runs.isolated():
        eager = EagerTensors()
        eager.add([EagerTensor.of(record, record.tensor, record.node) for record in runs.eager()])
        records = runs.compiled()
        saved = [seen(record, record.tensor, hooks.encoder) for record in records]
        partners = eager.partners(saved) if matches else {}
        roundings = _roundings(hooks, records, partners)
        del records
    compressible = {item.name: item for item in saved if item.compressible}
    columns = {partner: compressible[name].columns for name, partner in partners.items()}
    found = _without_compiler(hooks, model, forward, seed, fraction, probes, columns) if partners else {}
    known = {name: found[partner] for name, partner in partners.items() if partner in found}
    if partners.keys() - known:
        with runs.isolated():
            roundings = _roundings(hooks, runs.compiled(), known)
    perturbed = measure_by_rerun(runs, list(compressible), roundings, seed)
    _log.debug("compiled regions: %d tensors measured in one pass, %d by perturbation", len(known), len(perturbed))
    return [
        replace(known[name], name=name, examples=None)
        if name in known
        else Sensitivity(name, item.numel, item.itemsize_bits, perturbed[name], True)
        for name, item in compressible.items()
    ]


def _roundings(hooks: SavedTensorHooks, records: Sequence[Recorded], known: Container[str]) -> dict[str, Tensor]:
    """By name, what rounding_of() gives for the compressible tensors that are not known."""
    wanted = [record for record in records if record.compressible and record.name not in known]
    return {record.name: rounding_of(record.tensor, None, hooks.encoder) for record in wanted}


def _without_compiler(
    hooks: SavedTensorHooks,
    model: nn.Module,
    forward: Callable[[], Tensor | None],
    seed: int,
    fraction: float,
    probes: int,
    columns: Mapping[str, int],
) -> dict[str, Sensitivity]:
    """By name, the sensitivities of the model as it was before torch.compile; none where one pass is not possible."""
    blocks = blocks_of(model, hooks.config.blocks)
    way = _ByWalk(hooks, model, seed, fraction, probes, columns=columns)
    while True:
        try:
            with torch.compiler.set_stance("force_eager"):
                walked = way.measured(blocks, forward)
            return {item.name: item for item in walked}
        except (InnerBackwardError, CutError, OpaqueError, ReplayError, BackwardError) as error:
            _log.debug("%s: measuring %s", error, "it with what is around it" if blocks else "by perturbation")
            if not blocks or isinstance(error, InnerBackwardError):
                return {}
            blocks = _blocks_after(error, blocks)


def _blocks_after(error: Exception, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks to go on with when some cannot be run alone."""
    return [block for block in blocks if isinstance(error, CutError) and not error.concerns(block)]


@dataclass(frozen=True)
class _ByWalk:
    """How a model is measured block by block: all compressible tensors, by perturbation those that the directions do
    not reach."""

    hooks: SavedTensorHooks
    model: nn.Module
    seed: int
    fraction: float
    probes: int
    perturbs: bool = False
    columns: Mapping[str, int] | None = None
    """for a model with compiled regions, by which these group some of the tensors, by name"""
    regions: CompiledBlocks | None = None
    """of one whose regions lie in blocks"""

    def measured(self, blocks: list[nn.Module], forward: Callable[[], Tensor | None]) -> list[Sensitivity]:
        """As measure(), at once."""
        with self._begun(blocks, forward) as (cut, walk):
            self._refuse_large(cut)
            walk.first()
            return self._noted(walk.second(), cut, _Found()).in_order(cut)

    def first_share(
        self, blocks: list[nn.Module], forward: Callable[[], Tensor | None], shares: int
    ) -> list[Sensitivity] | Paused:
        """As measure(), no more than the first of some shares if there are blocks enough."""
        generators = Generators()
        with self._begun(blocks, forward) as (cut, walk):
            self._refuse_large(cut)
            stop = stop_of(cut, self._counts_alike, 1 / shares)
            walk.first()
            found = self._noted(walk.second(stop), cut, _Found())
            if stop is None:
                return found.in_order(cut)
            return PausedWalk(self, blocks, generators, found, walk.halfway(stop), 1, shares)

    def next_share(self, paused: PausedWalk, forward: Callable[[], Tensor | None]) -> list[Sensitivity] | Paused:
        """What goes on with it; after the last share the sensitivities of all."""
        done, halfway = paused.done + 1, paused.halfway
        with self._begun(paused.blocks, forward, paused.generators) as (cut, walk):
            stop = None
            if done < paused.shares:
                stop = stop_of(cut, self._counts_alike, done / paused.shares, halfway.stop)
            found = self._noted(walk.resume(halfway, stop), cut, paused.found)
            if stop is None:
                return found.in_order(cut)
            return replace(paused, halfway=walk.halfway(stop), done=done)

    def _refuse_large(self, cut: BlockForward) -> None:
        """Raise TooLargeError where the largest block takes more than the job's own step of the whole batch."""
        is_split = cut.groups or sharding(self.model) is not None
        if self.perturbs or self.columns is not None or is_split or self.hooks.policy.example_columns:
            return
        saved = sum(record.nbytes for record in cut.found)
        tensors = sum(record.compressible for record in cut.found)
        if saved < _LEAST_BYTES or tensors > _MOST_TENSORS:
            return
        blocks = [[record.nbytes for record in visit.own] for visit in cut.visits]
        blocks.append([item.record.nbytes for item in cut.between])
        needed = max((sum(b) + _SECOND_DERIVATIVE * max(*b, sum(b) // MOST) for b in blocks if b), default=0)
        gradients = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        if needed > saved / self.fraction + 2 * gradients:
            raise TooLargeError(
                f"one pass would hold {needed} bytes, all that the model saves takes {saved}: measuring by perturbation"
            )

    @property
    def _counts_alike(self) -> bool:
        """See stop_of()."""
        return sharding(self.model) is not None

    @contextmanager
    def _begun(
        self, blocks: list[nn.Module], forward: Callable[[], Tensor | None], generators: Generators | None = None
    ) -> Iterator[tuple[BlockForward, Walk]]:
        """Within the context the forward has run, by default with the random numbers that come next."""
        mode, beside = MeasuringMode(fits=self.columns is None), None
        cut = BlockForward(self.hooks, self.model, blocks, mode, boundary_bits=BOUNDARY_BITS, seed=self.seed)
        with run_alone_in_blocks(cut, self.model, blocks, forward, self.fraction, generators):
            if self.regions is not None:
                self.regions.begin(cut)
                beside = self.regions.perturb
            directions, perturbs = self.probes, self.perturbs
            yield cut, Walk(self.hooks, cut, seed=self.seed, directions=directions, perturbs=perturbs, beside=beside)

    def _noted(self, walked: Iterable[Measured], cut: BlockForward, found: _Found) -> _Found:
        """What was found before, and what a walk finds now."""
        for item in walked:
            name = item.first.name
            found.by_name[name] = _measured(self.hooks, item, self.columns or {}, self.fraction)
            if cut.groups and item.tensor is not None and item.weight is not None:
                found.fingerprints[name] = fingerprint(item.tensor)
            del item  # which is as large as two saved tensors, before the walk goes on
        return found


@dataclass(frozen=True)
class _Found:
    """What a walk has found so far, by the name of the tensor."""

    by_name: dict[str, Sensitivity] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """with tensor parallelism, by which its ranks find the tensors that all of them hold"""

    def in_order(self, cut: BlockForward) -> list[Sensitivity]:
        """In the order of a forward; what only another one saved comes first. With tensor parallelism collective."""
        ranks = ranks_sharing(self.fingerprints, cut.groups)
        saved = {record.name: None for record in cut.found if record.compressible and record.name in self.by_name}
        earlier = [name for name in self.by_name if name not in saved]
        return [_of_all_ranks(self.by_name[name], ranks) for name in (*earlier, *saved)]


class Paused(ABC):
    """A measurement of which some shares are done."""

    needs_examples: ClassVar[bool]
    """whether it has to go on with the same ones"""

    @abstractmethod
    def resume(self, forward: Callable[[], Tensor | None]) -> list[Sensitivity] | Paused:
        """The next share: what goes on with the measurement, or at its end the sensitivities. Can be called once.

        forward: of measure(), on as many examples; the parameters may have changed.
        Raises ResumeError if it runs otherwise than the first time, torch.OutOfMemoryError, what forward raises.
        """


@dataclass(frozen=True)
class PausedWalk(Paused):
    """See [Note: shares of a measurement] in halfway.py."""

    needs_examples: ClassVar[bool] = True
    way: _ByWalk
    blocks: list[nn.Module]
    generators: Generators
    found: _Found
    """in all shares that are done"""
    halfway: Halfway
    done: int
    shares: int

    def resume(self, forward: Callable[[], Tensor | None]) -> list[Sensitivity] | Paused:
        """See Paused.resume."""
        try:
            return self.way.next_share(self, forward)
        except (InnerBackwardError, CutError, OpaqueError, ReplayError, BackwardError) as error:
            raise ResumeError(str(error)) from error


class PausedPerturbation(Paused):
    """See [Note: compressed perturbation] in compressed_perturbation.py."""

    needs_examples: ClassVar[bool] = False

    def __init__(self, hooks: SavedTensorHooks, model: nn.Module, seed: int, fraction: float) -> None:
        """As for measure()."""
        self._perturbation = CompressedPerturbation(hooks, model, seed, fraction)

    def share(self, forward: Callable[[], Tensor | None], in_one_step: bool) -> list[Sensitivity] | Paused:
        """Measure what one step has time for, or all."""
        if not self._perturbation.go_on(forward, in_one_step):
            return self
        return [Sensitivity(name, *found, by_perturbation=True) for name, found in self._perturbation.found.items()]

    def resume(self, forward: Callable[[], Tensor | None]) -> list[Sensitivity] | Paused:
        """See Paused.resume."""
        try:
            return self.share(forward, True)
        except BackwardError as error:
            raise ResumeError(str(error)) from error


def _of_all_ranks(own: Sensitivity, ranks: Mapping[str, int]) -> Sensitivity:
    """What a rank adds to the mean over ranks: of a tensor of which it holds a part, the sum over the parts counts."""
    return replace(own, variance=own.variance * ranks.get(own.name, 1))


def _with_inner_backward(hooks: SavedTensorHooks, reruns: Reruns, seed: int, probes: int) -> list[Sensitivity]:
    """The sensitivities where the forward runs a backward; by perturbation alone without probes.

    See [Note: inner backward] in inner_backward.py.
    """
    found = _by_reads(hooks, reruns, seed, probes)
    missed = {item.name: item.variance for item in found if item.by_perturbation}
    if missed:
        _log.debug("measured by perturbation: %s", ", ".join(missed))
    variances = perturb_by_rerun(reruns, missed, partial(own_bits, hooks.plan), seed)
    return [replace(item, variance=variances.get(item.name, item.variance)) for item in found]


def _by_reads(hooks: SavedTensorHooks, reruns: Reruns, seed: int, probes: int) -> list[Sensitivity]:
    """The sensitivities of what one pass over the reads reaches; of all else, marked as perturbed, what rounding_of()
    gives."""
    found = []
    with closing(InnerBackwards()) as inner, reruns.recorded(inner, {}) as (loss, records):
        compressible = [record for record in records if record.compressible]
        squares = squared_products(loss, compressible, inner, seed, probes) if probes else {}
        for record in compressible:
            weight = squares.get(record)
            variance = rounding_of(record.tensor, weight, hooks.encoder)
            item = _sensitivity_of(record, variance, _example_statistics(hooks, record.tensor, weight))
            found.append(replace(item, by_perturbation=weight is None))
    return found


def _measured(hooks: SavedTensorHooks, item: Measured, columns: Mapping[str, int], fraction: float) -> Sensitivity:
    first, tensor = item.first, item.tensor
    if tensor is None:  # the loss does not depend on it
        return Sensitivity(
            first.name, first.numel, first.itemsize_bits, torch.zeros(8, dtype=torch.float64, device="cpu"), False
        )
    if item.weight is None and item.shown is not None:
        variance = item.shown.variance()
    else:
        variance = rounding_of(tensor, item.weight, hooks.encoder, columns.get(first.name), fraction)
        variance = variance if item.shown is None else item.shown.beyond(variance)
    statistics_of_examples = _example_statistics(hooks, tensor, item.weight)
    return Sensitivity(
        first.name, tensor.numel(), 8 * tensor.element_size(), variance, item.weight is None, statistics_of_examples
    )


def _perturbed(hooks: SavedTensorHooks, variances: dict[Recorded, Tensor]) -> list[Sensitivity]:
    return [
        _sensitivity_of(record, variance, _example_statistics(hooks, record.tensor))
        for record, variance in variances.items()
    ]


def _sensitivity_of(record: Recorded, variance: Tensor, examples: NDArray[np.float64] | None = None) -> Sensitivity:
    tensor = record.tensor
    return Sensitivity(record.name, tensor.numel(), 8 * tensor.element_size(), variance, True, examples)


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
