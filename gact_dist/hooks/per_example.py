"""What a step knows about the examples of its batch (ActNN): which tensors are made of them, and how they are ranked.

See [Note: widths by rank] in policies/actnn.py.
"""

import base64
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import _fields, codec
from ..codec import UnitWidths
from ..distributed import unwrap
from ..policies import counts_of
from .batches import batch_size, tensors_of
from .own_hooks import Calling, Registration, after_forward, before_forward

_SMALLEST = 1e-30  # of an example that was seen: its gradient may underflow


def made_of_examples(tensor: Tensor, count: int | None) -> bool:
    """Whether a tensor's memory consists of `count` equal parts, one for each example of the batch.

    It does if the first dimension is the batch, flattened with the next one ([examples * length, channels]) or not,
    and has the widest stride. Dimensions of size one are ignored.
    """
    dimensions = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if count is None or count < 2 or not dimensions or tensor.numel() == 0 or tensor.is_conj():
        return False
    (stride, rows), inner = dimensions[0], dimensions[1:]
    if rows != count and (len(inner) != 1 or rows % count):
        return False
    span = 1  # elements between the first and the last of one row
    for inner_stride, size in sorted(inner):
        if inner_stride < span:
            return False
        span += inner_stride * (size - 1)
    return stride >= span


class Examples:
    """The examples of one model's batches; it learns how many there are from the inputs of each forward.

    ranked: whether they may have widths of their own; without that nothing is watched.
    """

    def __init__(self, model: nn.Module, group_size: int, ranked: bool, by_column: bool = True) -> None:
        self._ranked, self._by_column = ranked, by_column
        self._group_size = group_size
        self.count: int | None = None
        """in the current or last forward; None if its inputs share no first dimension"""
        self.gradients = ExampleGradients(model)
        self._sizes: Tensor | None = None
        self._model = unwrap(model)
        self._handle: Registration | None = None
        self.watch()

    def watch(self) -> None:
        """Put the hook on the model, if examples are watched."""
        if self._ranked:
            self._handle = before_forward(self._model, Calling(self._note), prepend=True, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.count = batch_size((args, kwargs))

    def begin(self, sample_index: Tensor | Sequence[int] | None, batch: Any) -> AbstractContextManager[None]:
        """Start a step: look up what is known about its examples, if the step names them. Within the context more is
        learnt, and after it the numbers are forgotten.

        Raises ValueError or TypeError for numbers that do not fit the batch.
        """
        self._sizes = None
        if not self._ranked or sample_index is None:
            return nullcontext()
        index = numbers_of(sample_index, None if batch is None else batch_size(batch))
        self._sizes = self.gradients.of(index)
        return self._watched(index)

    @contextmanager
    def _watched(self, index: Tensor) -> Iterator[None]:
        try:
            with self.gradients.watched(index):
                yield
        finally:
            self._sizes = None

    def remove(self) -> None:
        """Take the hook off the model."""
        if self._handle is not None:
            self._handle.remove()

    def make_up(self, tensor: Tensor) -> bool:
        """Whether the examples of a tensor may have widths of their own."""
        return self._ranked and made_of_examples(tensor, self.count)

    def columns_of(self, tensor: Tensor) -> int:
        """Columns by which the codec groups a tensor, or its examples if they have widths of their own."""
        columns = codec.columns_of(tensor, self._group_size, by_column=self._by_column)
        if not self.make_up(tensor):
            return columns
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        return codec.columns_within(numel, self.count or 1, self._group_size, columns)

    def widths_of(self, tensor: Tensor, bits: tuple[int, ...]) -> UnitWidths:
        """The width of each example of a tensor that is made of examples. bits: of equal shares, widest first."""
        return ranked(self.keys(tensor), counts_of(bits, self.count or 1))

    def keys(self, tensor: Tensor) -> Tensor:
        """float32 [examples], the key by which examples are ranked: about proportional to what rounding each of them
        adds to the gradient's variance. The tensor must be made of examples."""
        keys = squared_ranges(codec.stored_values(tensor), self.count or 1, self._group_size)
        if self._sizes is None or len(self._sizes) < len(keys):
            return keys
        return keys * self._sizes[: len(keys)]  # a measurement sees the batch's first examples


def ranked(keys: Tensor, counts: tuple[int, ...]) -> UnitWidths:
    """A width for each unit, the widest for those with the largest keys; ``counts``: how many have each width.

    keys: float [units] on any device; nothing waits for it. Of equal keys the first unit comes first.
    """
    by_rank = torch.empty(len(keys), dtype=torch.uint8, device=keys.device)
    last = len(keys)
    for width, count in enumerate(counts):
        by_rank[last - count : last] = width
        last -= count
    order = torch.argsort(keys, descending=True, stable=True)
    return UnitWidths(torch.empty_like(by_rank).index_copy_(0, order, by_rank), counts)


def squared_ranges(values: Tensor, units: int, group_size: int) -> Tensor:
    """float32 [units]: the sum over the groups of a unit of (max - min)^2, to which its rounding variance is about
    proportional at any width (ActNN, Chen et al., ICML 2021, section 4.1).

    values: flat [N]. Elements beyond the last full group of a unit are left out.
    """
    rows = values.view(units, -1)
    size = min(group_size, rows.shape[1])
    groups = rows.shape[1] // size
    grouped = rows[:, : groups * size].unflatten(1, (groups, size))
    # two reductions: together (aminmax) they take twenty times as long on a CPU
    return (grouped.amax(2).float() - grouped.amin(2).float()).square().sum(1)


class ExampleGradients:
    """Squared norms of the gradient at the model's outputs, by the example's number in the data set.

    ActNN keeps one for each layer and example; the one at the outputs serves all layers. Everything stays on the
    device, and nothing waits for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self.sizes: Tensor | None = None
        """float32 [largest number + 1, or more]: 0 for examples that were never seen; None before the first"""

    @property
    def device(self) -> torch.device:
        """Where the sizes are: with the model's parameters."""
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    def of(self, index: Tensor) -> Tensor | None:
        """float32 [examples] for a batch, with the average for examples that were never seen; None before the first.

        index: from numbers_of().
        """
        if self.sizes is None:
            return None
        self._grow(int(index.max()) + 1)
        seen = self.sizes > 0
        average = self.sizes.sum() / seen.sum().clamp(min=1)
        found = self.sizes[self._on_device(index)]
        return torch.where(found > 0, found, average)

    @contextmanager
    def watched(self, index: Tensor) -> Iterator[None]:
        """Within the context a forward of the model notes its outputs, and a backward keeps their gradients."""
        handle = after_forward(self._model, Calling(partial(self._watch, index=index)))
        try:
            yield
        finally:
            handle.remove()

    def state_dict(self) -> str | None:
        """The sizes as text: float32, little endian, deflated, base64."""
        if self.sizes is None:
            return None
        numbers = self.sizes.cpu().numpy().astype("<f4")
        return base64.b64encode(zlib.compress(numbers.tobytes())).decode()

    @staticmethod
    def parse_state(name: str, state: Any) -> np.ndarray | None:
        """What load_state() takes, from what state_dict() gave. Raises StateError."""
        if state is None:
            return None
        try:
            data = zlib.decompress(base64.b64decode(_fields.text(name, state), validate=True))
            return np.frombuffer(data, dtype="<f4").copy()
        except (ValueError, zlib.error) as error:
            raise _fields.StateError(f"{name!r} is not a deflated array of float32 ({error})") from None

    def load_state(self, sizes: np.ndarray | None) -> None:
        """Go on with what parse_state() returned."""
        self.sizes = None if sizes is None else torch.from_numpy(sizes).to(self.device)

    def _on_device(self, index: Tensor) -> Tensor:
        return index.to(self.device, non_blocking=True)

    def _grow(self, length: int) -> None:
        known = 0 if self.sizes is None else len(self.sizes)
        if length > known:
            grown = torch.zeros(max(length, 2 * known), device=self.device)
            if self.sizes is not None:
                grown[:known] = self.sizes
            self.sizes = grown

    def _watch(self, _: nn.Module, args: tuple, outputs: Any, *, index: Tensor) -> None:
        found: dict[int, Tensor] = {}
        for number, output in enumerate(tensors_of(outputs)):
            if output.requires_grad and output.dim() > 0 and output.shape[0] % len(index) == 0:
                output.register_hook(partial(self._keep, index, found, number))

    def _keep(self, index: Tensor, found: dict[int, Tensor], number: int, gradient: Tensor | None) -> None:
        """Add up over the outputs of one forward; of a second backward the latest gradient counts."""
        if gradient is None:  # of an output that a double backward passes by
            return
        with torch.no_grad():
            found[number] = gradient.detach().float().reshape(len(index), -1).square().sum(1)
            self._grow(int(index.max()) + 1)
            total, place = torch.stack(list(found.values())).sum(0), self._on_device(index)
            if self.sizes is not None:
                # under a loss scale a gradient may overflow
                self.sizes[place] = torch.where(
                    total.isfinite(), total.clamp(min=_SMALLEST).to(self.device), self.sizes[place]
                )


def numbers_of(sample_index: Tensor | Sequence[int], examples: int | None) -> Tensor:
    """Numbers of a batch's examples as int64 [examples] on the CPU.

    examples: of the batch, None if it is not known. Raises ValueError or TypeError for anything else.
    """
    if isinstance(sample_index, Tensor) and sample_index.device.type != "cpu":
        raise ValueError(
            f"sample_index is on {sample_index.device}, expected a tensor on the CPU, as the data loader gives it: "
            "reading it would wait for the device"
        )
    index = torch.as_tensor(sample_index, device="cpu")
    if index.dtype not in (torch.int64, torch.int32) or index.dim() != 1 or len(index) == 0:
        raise TypeError(f"sample_index is {index.dtype} {list(index.shape)}, expected integers [examples of the batch]")
    if examples is not None and len(index) != examples:
        raise ValueError(f"sample_index has {len(index)} numbers, the batch has {examples} examples: give one for each")
    if int(index.min()) < 0:
        raise ValueError(f"sample_index holds {int(index.min())}, expected numbers from 0 up")
    return index.long()
