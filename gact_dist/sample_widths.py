"""Which saved tensors are made of the samples of a batch, and packing each sample at a width of its own.

See [Note: widths by rank] in per_sample.py.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from . import codec, mixed_widths
from .batches import batch_size
from .per_sample import Bits, counts_of, one_width
from .sample_gradients import SampleGradients, numbers_of
from .wrappers import unwrap


def made_of_samples(tensor: Tensor, samples: int | None) -> bool:
    """Whether a tensor's memory is `samples` equal parts, one for each sample of the batch.

    So it is where the first dimension is the batch, flattened with the next one ([samples * length, channels]) or not,
    and has the widest stride. Dimensions of one are passed over.
    """
    dimensions = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if samples is None or samples < 2 or not dimensions or tensor.numel() == 0 or tensor.is_conj():
        return False
    (stride, rows), inner = dimensions[0], dimensions[1:]
    if rows != samples and (len(inner) != 1 or rows % samples):
        return False
    span = 1  # elements between the first and the last of one row
    for inner_stride, size in sorted(inner):
        if inner_stride < span:
            return False
        span += inner_stride * (size - 1)
    return stride >= span


class SampleWidths:
    """Packs the saved tensors of one model; it learns the size of the batch from the inputs of each forward."""

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        """enabled: whether a plan may hold several widths for a tensor."""
        self.enabled = enabled
        self.samples: int | None = None
        """of the forward that runs or ran last; None where its inputs share no first dimension"""
        self.gradients = SampleGradients(model)
        self._gradient_sizes: Tensor | None = None
        self._handle = None
        if enabled:
            self._handle = unwrap(model).register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.samples = batch_size((args, kwargs))

    def begin(self, sample_index: Tensor | Sequence[int] | None, batch: Any) -> AbstractContextManager[None]:
        """Start a step: what is known of its samples, if it says which they are. Within the context, more is learnt.

        Raises ValueError or TypeError for numbers that are none of the batch's.
        """
        self._gradient_sizes = None
        if not self.enabled or sample_index is None:
            return nullcontext()
        index = numbers_of(sample_index, None if batch is None else batch_size(batch))
        self._gradient_sizes = self.gradients.of(index)
        return self.gradients.watched(index)

    def remove(self) -> None:
        """Take the hook off the model."""
        if self._handle is not None:
            self._handle.remove()

    def pack(self, tensor: Tensor, bits: Bits, seed: int, group_size: int) -> codec.Packed:
        """Store a tensor at one width, or its samples at theirs; at one, the average, if it is not made of samples."""
        if not isinstance(bits, tuple) or not self.applies_to(tensor):
            return codec.pack(tensor, one_width(bits), seed, group_size)
        samples = self.samples or 1
        units = mixed_widths.ranked(self.keys(tensor, group_size), counts_of(bits, samples))
        return codec.pack(tensor, units, seed, group_size)

    def applies_to(self, tensor: Tensor) -> bool:
        """Whether the samples of a tensor may have widths of their own."""
        return self.enabled and made_of_samples(tensor, self.samples)

    def keys(self, tensor: Tensor, group_size: int) -> Tensor:
        """float32 [samples] by which the samples are ranked: about proportional to what rounding each adds to the
        gradient's variance. The tensor must be made of samples."""
        keys = mixed_widths.squared_ranges(codec.stored_values(tensor), self.samples or 1, group_size)
        sizes = self._gradient_sizes
        if sizes is None or len(sizes) < len(keys):
            return keys
        return keys * sizes[: len(keys)]  # a measurement sees the batch's first samples
