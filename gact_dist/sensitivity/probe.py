"""The probe batch: the examples of a batch that sensitivity is measured on, and the loss to measure with.

[Note: observed loss] What a saved tensor inside the model does to the parameter gradient depends on the loss only
through its gradient G at the model's outputs. So <G, outputs>, with G as the job's own backward had it and held
constant, has the same sensitivities as the loss. It works for every loop: whoever computes the loss, wherever (the next
stage of a pipeline), and under any loss scale, which multiplies all sensitivities alike and so changes no plan.

[Note: direct gradient] An output may be computed from another one: a loss that is returned beside its logits, a hidden
state beside the next. The gradient that autograd passes to the logits then includes what comes through the loss, which
<G, loss> contains already. Only what reaches an output from outside the model counts: what the model's own nodes, those
between two outputs, pass to it is subtracted. Where nothing else reaches it, the difference is zero, or a rounding
error where several such nodes add up.
"""

import copy
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from .._errors import first_line, is_out_of_memory
from ..distributed import say_once
from ..hooks import batch_size, map_tensors, may_hold_adjacency, samples_of, tensors_of
from .autograd_graph import ExamplesRefusedError, MeasurementError, float32_parts, nodes_below

_log = logging.getLogger(__name__)
_PARTS = 4
REFUSALS = (AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""what a model may raise on a batch of another size, or a loss of another kind, than it expects"""


class ProbePart(NamedTuple):
    """Some examples of a batch, which are measured at once."""

    forward: Callable[[], Any]
    """runs the model on them; the scalar loss, or None if the loss function called backward on it"""
    fraction: float
    """of the batch"""
    number: int
    parts: int
    """how many there are"""
    examples: Any
    """as the loss function takes them"""


class ProbeBatch:
    """The first examples of a batch, to measure on; and the whole batch, for what is measured on all of it.

    [Note: parts] A step's memory at its peak is mostly proportional to the examples that are in flight. So no more than
    a quarter of the batch is measured at once, where it has as many examples, and the measurements of such parts are
    averaged as those of ranks are. A part has two examples where the batch has, unless one alone is known to save what
    several do: a dimension of size 1 lets an operator save a view where it makes a copy in the step, as a matrix
    product does of heads, and what is saved would have another name.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        batch: Any,
        examples: int = sys.maxsize,
        *,
        forward: Callable[[], Any] | None = None,
        unit: float | None = None,
        is_guess: bool = False,
    ) -> None:
        """loss_fn(batch): runs the model and returns the scalar loss, or calls backward on it.

        batch: the whole batch, as loss_fn takes it; an Observation slices itself. examples: how many to measure on, the
        same on all ranks; a batch may have fewer. forward: runs the model as the next step will, if loss_fn does not.
        unit, is_guess: see the attributes.
        """
        self._loss_fn, self._batch, self._forward = loss_fn, batch, forward
        self.count = examples
        """examples that were asked for"""
        self.unit = unit
        """where the job may have scaled the loss: its squared gradient at the model's outputs, scaled alike"""
        self.is_guess = is_guess
        """whether the loss is not the job's: then what it raises, in its backward too, is not the job's error"""
        self.fewest = 2
        """examples that a part has at least, if there are as many"""
        self._refuses_parts = False
        self._refusal = "as another rank says"
        self._part, self._share = _examples_of(batch, 0, examples)
        self.fraction = self._share * (batch.fraction if isinstance(batch, Observation) else 1.0)
        """the fraction of the batch's examples that are measured on"""

    def parts(self, times: int = 1) -> int:
        """In how many parts to measure the examples: so many that none is more than a quarter of the batch, and of
        the fewest at least, if there are as many; or that many times more, at most as many as there are examples."""
        size = self._size_of(self._part)
        if size is None:
            return 1
        return min(max(1, size // self.fewest) if times == 1 else size, times * math.ceil(_PARTS * self.fraction))

    def _size_of(self, batch: Any) -> int | None:
        """How many examples it has, None where it is not divided."""
        inputs = inputs_of(batch)
        is_whole = self._refuses_parts or self.count == sys.maxsize or may_hold_adjacency(inputs)
        return None if is_whole else batch_size(inputs)

    @property
    def divides_further(self) -> bool:
        """Whether there were more parts if one could have one example."""
        size = self._size_of(self._part)
        return size is not None and self.parts() < min(size, math.ceil(_PARTS * self.fraction))

    def first(self) -> ProbePart:
        """The first example, all where the batch is not divided."""
        part, share = _examples_of(self._part, 0, 1 if self._size_of(self._part) else sys.maxsize)
        return ProbePart(partial(self._loss_of, part, share * self._share), share * self.fraction, 0, 1, part)

    def divisions(self, parts: int = 1, only: int | None = None) -> Iterator[Iterable[ProbePart]]:
        """The examples in so many parts; where the loss function refuses one of them, the next division has larger
        ones, and the last is the whole batch. only: one of the parts, or none where there are fewer.

        The rows of a batch need not be examples: those of a dense adjacency matrix are the nodes of one graph.
        """
        while parts > 1 and not self._refuses_parts:
            yield (part for part in self._split(parts) if only in (None, part.number))
            parts = (parts + 1) // 2
        if not self._refuses_parts:
            part = ProbePart(partial(self._loss_of, self._part, self._share), self.fraction, 0, 1, self._part)
            yield [part] if only in (None, 0) else []
            say_once(
                _log,
                "the model does not run on the first %d examples of a batch (%s): sensitivity is measured on all of it",
                self.count, self._refusal,
            )  # fmt: skip
            self._part, self._share, self.fraction, self._refuses_parts = self._batch, 1.0, 1.0, True
        yield [self._all()]

    def beginnings(self, parts: int) -> Iterator[ProbePart]:
        """The first of so many parts of the batch, of which an observation may have fewer examples; where the loss
        function refuses them, the next has more of them, and the last all."""
        size, known = self._size_of(self._batch), self._known
        parts = 1 if size is None else min(parts, max(1, size // self.fewest))
        while parts > 1:
            part, share = _examples_of(self._batch, 0, math.ceil((size or 1) / known / parts))
            yield ProbePart(partial(self._loss_of, part, share), share * known, 0, parts, part)
            parts //= 2
        yield self._all()

    def _split(self, parts: int) -> Iterator[ProbePart]:
        size = batch_size(inputs_of(self._part)) or 1
        for number in range(parts):
            part, share = _examples_of(self._part, size * number // parts, size * (number + 1) // parts)
            loss = partial(self._loss_of, part, share * self._share)
            yield ProbePart(loss, share * self.fraction, number, parts, part)

    def _all(self) -> ProbePart:
        return ProbePart(self.loss_of_whole, self._known, 0, 1, self._batch)

    @property
    def _known(self) -> float:
        """The fraction of the batch's examples that are there."""
        return self._batch.fraction if isinstance(self._batch, Observation) else 1.0

    def _loss_of(self, part: Any, share: float) -> Any:
        """Run the model on some examples; the scalar loss, or None if the loss function called backward on it.

        share: of those that are there.
        """
        try:
            return self._loss_fn(part)
        except REFUSALS as error:
            if is_out_of_memory(error):
                raise
            self._refusal = first_line(error)
            if share < 1.0:
                raise ExamplesRefusedError(self._refusal) from error
            if not isinstance(part, Observation):
                raise
            if self._known < 1.0:
                raise MeasurementError(
                    f"the model does not run on the first {self.count} examples of a batch: {self._refusal}; set "
                    "calibration_samples to the size of a batch"
                ) from error
            # The job may have changed the model since the step that was observed: its dtype, its device, its last
            # layer. If the model is broken, the job's own forward says so.
            raise MeasurementError(
                f"the model does not run on the inputs of an earlier step: {self._refusal}"
            ) from error

    @property
    def can_be_kept(self) -> bool:
        """Whether its examples can outlast the step: not if it has no tensors, or they have a graph."""
        tensors = tensors_of(inputs_of(self._part))
        return bool(tensors) and all(tensor.grad_fn is None for tensor in tensors)

    def on_earlier(self, examples: Any) -> Any:
        """Run the model on examples of an earlier step, from kept(); the loss as loss_of_whole() gives it.

        Raises ExamplesRefusedError if the loss function, which may depend on more of its step, refuses them.
        """
        try:
            return self._loss_fn(examples)
        except REFUSALS as error:
            if is_out_of_memory(error):
                raise
            raise ExamplesRefusedError(f"the loss function refuses examples of an earlier step: {error}") from error

    def loss_of_whole(self) -> Any:
        """Run the model on the whole batch; the scalar loss, or None if the loss function called backward on it.

        Raises MeasurementError where the model no longer runs on what was observed.
        """
        return self._loss_of(self._batch, 1.0)

    def whole(self) -> Any:
        """Run the model on the whole batch, as the next step will."""
        return self.loss_of_whole() if self._forward is None else self._forward()


def inputs_of(batch: Any) -> Any:
    """The tensors of a batch, which may be an observation, in what holds them."""
    return batch.inputs if isinstance(batch, Observation) else batch


def kept(examples: Any) -> Any:
    """Examples of a batch for later steps, in memory of their own: a loop may receive the next batch into the same.

    What shares memory among them still does, and is recognised as one tensor.
    """
    if isinstance(examples, Observation):
        return examples.kept()
    ends: dict[Any, int] = {}
    starts: dict[Any, int] = {}
    for tensor in filter(_has_memory, tensors_of(examples)):
        key, start, end = _memory_of(tensor)
        starts[key], ends[key] = min(start, starts.get(key, start)), max(end, ends.get(key, end))
    memory: dict[Any, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if not _has_memory(tensor):
            return _copy(tensor)
        key, start, _ = _memory_of(tensor)
        if key not in memory:
            whole = tensor.detach().as_strided((ends[key] - starts[key],), (1,), starts[key])
            memory[key] = whole.clone()
        view = memory[key].as_strided(tensor.shape, tensor.stride(), start - starts[key])
        return view.detach().requires_grad_(tensor.requires_grad)

    return map_tensors(examples, copied)


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and tensor.numel() > 0


def _memory_of(tensor: Tensor) -> tuple[Any, int, int]:
    """(what stands for its storage; the first of its elements in it, and the one after the last)"""
    start = int(tensor.storage_offset())
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype), start, start + length


def _examples_of(batch: Any, start: int, stop: int) -> tuple[Any, float]:
    """(some examples of a batch, which may be an observation; the fraction of the batch that they are)"""
    if isinstance(batch, Observation):
        part = batch.part(start, stop)
        return part, part.fraction / batch.fraction
    return samples_of(batch, start, stop)


class Observation:
    """The inputs of one forward, sliced to their first examples, and the loss's gradient at its outputs."""

    def __init__(self, inputs: tuple[tuple, dict], examples: int, *, in_doubt: bool = False) -> None:
        """in_doubt: slice the inputs even if their rows may not be examples; they are kept whole otherwise."""
        if not in_doubt and may_hold_adjacency(inputs):
            examples = sys.maxsize
        self._batch, self._rows = batch_size(inputs), slice(0, examples)
        inputs, self.fraction = samples_of(inputs, 0, examples)
        self.inputs = map_tensors(inputs, _copy)  # a pipeline receives the next microbatch into the same memory
        self._autocast = [_autocast_of(device) for device in _device_types(inputs)]
        self._gradients: dict[int, Tensor] = {}
        self._from_inside: dict[int, Tensor] = {}  # what the current backward passes to an output through others

    def part(self, start: int, stop: int) -> "Observation":
        """Some of the examples that are remembered, which may be all of them."""
        part = copy.copy(self)
        part._batch, part._rows = batch_size(self.inputs), slice(start, stop)
        part.inputs, share = samples_of(self.inputs, start, stop)
        part._gradients = {number: part._slice(gradient) for number, gradient in self._gradients.items()}
        part.fraction = share * self.fraction
        return part

    def kept(self) -> "Observation":
        """The same, without the memory of the other examples of which it is a part."""
        kept = copy.copy(self)
        kept.inputs = map_tensors(self.inputs, _without_more)
        kept._gradients = {number: _without_more(gradient) for number, gradient in self._gradients.items()}
        return kept

    def outputs(self, outputs: Any) -> bool:
        """Watch that forward's outputs until the job's backward reaches them; False if there are none: it raised."""
        tensors = tensors_of(outputs)
        if any(_has_no_gradient_to_keep(tensor) for tensor in tensors):
            return False
        # a tensor that is returned twice is one output
        edges = {get_gradient_edge(tensor)[:2]: number for number, tensor in enumerate(tensors) if tensor.requires_grad}
        for number in edges.values():
            tensors[number].register_hook(partial(self._keep, number))
        if len(edges) > 1:
            self._watch_inside(edges, nodes_below([tensors[number] for number in edges.values()]))
        return bool(edges)

    def _watch_inside(self, edges: Mapping[tuple[Any, int], int], nodes: Sequence[Any]) -> None:
        """Watch what nodes between two outputs pass to the first of them. edges: of the outputs, and their numbers."""
        for node in nodes:
            places = [(place, edges[edge]) for place, edge in enumerate(node.next_functions) if edge in edges]
            if places:
                node.register_hook(partial(self._keep_inside, places))

    def _keep(self, number: int, gradient: Tensor | None) -> None:
        inside = self._from_inside.pop(number, None)
        if gradient is not None:  # DDP passes none to an output that is not in the loss
            gradient = self._slice(_plain(gradient)).detach()
            self._gradients[number] = gradient.clone() if inside is None else gradient - inside

    def _keep_inside(self, places: Sequence[tuple[int, int]], results: Sequence[Tensor | None], *_: Any) -> None:
        for place, number in places:
            result = results[place]
            if result is not None:
                part, earlier = self._slice(result).detach(), self._from_inside.get(number)
                self._from_inside[number] = part.clone() if earlier is None else earlier + part

    def _slice(self, tensor: Tensor) -> Tensor:
        """The rows that belong to the remembered examples; a flattened [batch * length, ...] has `length` for each."""
        if self._batch is None or tensor.dim() == 0 or tensor.shape[0] % self._batch:
            return tensor
        length = tensor.shape[0] // self._batch
        return tensor[length * self._rows.start : length * min(self._rows.stop, self._batch)]

    @property
    def complete(self) -> bool:
        """Whether backward has reached the outputs with a finite gradient; not so if a loss scale overflowed."""
        return bool(self._gradients) and all(bool(g.isfinite().all()) for g in self._gradients.values())

    @property
    def squared_gradient(self) -> float:
        """The loss's squared gradient at the outputs, on the remembered examples."""
        return sum(float(float32_parts(gradient).square().sum()) for gradient in self._gradients.values())

    def loss(self, model: nn.Module) -> Tensor:
        """A scalar with the sensitivities of the job's loss, on the remembered examples.

        Raises RuntimeError when the job ran no backward through the outputs.
        """
        if not self.complete:
            raise RuntimeError("no backward reached the outputs of the forward that was observed")
        args, kwargs = self.inputs
        with self._under_autocast():
            outputs = tensors_of(model(*args, **kwargs))
        terms = []
        direct = {number: gradient for number, gradient in self._gradients.items() if bool(gradient.any())}
        for number, gradient in (direct or self._gradients).items():
            output = _plain(outputs[number])
            # the gradient of a mean over the batch is 1/batch for each example; that of a scalar output is not
            scale = 1.0 / self.fraction if output.dim() > 0 else 1.0
            terms.append(_Product.apply(output, gradient.to(output.dtype) * scale))
        return torch.stack(terms).sum()

    def any_loss(self, model: nn.Module) -> Tensor:
        """A scalar for a job whose loss is not known yet: its outputs of one element, or else in random directions.

        Raises MeasurementError where no output has a graph.
        """
        args, kwargs = self.inputs
        with self._under_autocast():
            outputs = [output for output in tensors_of(model(*args, **kwargs)) if output.requires_grad]
        if not outputs or any(_has_no_gradient_to_keep(output) for output in outputs):
            raise MeasurementError("no output of the model has a graph and a gradient that can be given")
        outputs = [_plain(output) for output in outputs]
        scalars = [output for output in outputs if output.numel() == 1]
        terms = [_Product.apply(output, torch.ones_like(output)) for output in scalars]
        terms = terms or [_Product.apply(output, torch.randn_like(output)) for output in outputs]
        return torch.stack(terms).sum()

    @contextmanager
    def _under_autocast(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device_type, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
            yield


class _Product(Function):
    """<output, gradient> as float32, without saving a tensor: what is saved during a measurement must be the job's."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return (float32_parts(output) * float32_parts(gradient)).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # It carries a graph, as that of a loss would: from a constant a node can make a constant (ZeRO-3's linear the
        # gradient of its bias), and is then taken for one whose backward autograd cannot see.
        gradient = ctx.gradient.detach().requires_grad_(torch.is_grad_enabled())
        return grads[0].to(gradient.dtype) * gradient, None


def _has_no_gradient_to_keep(tensor: Tensor) -> bool:
    return tensor.is_nested and tensor.layout == torch.strided


def _plain(tensor: Tensor) -> Tensor:
    """The rows of a jagged tensor, one after the other (torch multiplies no two of them); any other as it is."""
    return tensor.values() if tensor.layout == torch.jagged else tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _without_more(tensor: Tensor) -> Tensor:
    """The tensor itself unless it lies in memory that holds more."""
    lies_in_more = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return _copy(tensor) if lies_in_more else tensor


def _device_types(inputs: Any) -> list[str]:
    return sorted({tensor.device.type for tensor in tensors_of(inputs)})


def _autocast_of(device_type: str) -> tuple[str, bool, torch.dtype]:
    return device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
