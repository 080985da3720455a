"""Packing saved tensors as a plan says: at one width, their samples at widths of their own, or within a bound.

See [Note: widths by rank] in per_sample.py, and error_bounded.py.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import codec
from ..config import Config
from ..distributed import unwrap
from ..policies import Bits, counts_of, one_width
from .batches import batch_size
from .per_sample import SampleGradients, numbers_of

_log = logging.getLogger(__name__)


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


class Packer:
    """Packs the saved tensors of one model; it learns the size of the batch from the inputs of each forward."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.group_size = config.group_size
        self._error_bounded = config.compressor == "error-bounded"
        self._warned = False
        self._per_sample = config.policy == "actnn"
        self.samples: int | None = None
        """of the forward that runs or ran last; None where its inputs share no first dimension"""
        self.gradients = SampleGradients(model)
        self._gradient_sizes: Tensor | None = None
        self._handle = None
        if self._per_sample:
            self._handle = unwrap(model).register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)

    def _note(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.samples = batch_size((args, kwargs))

    def begin(self, sample_index: Tensor | Sequence[int] | None, batch: Any) -> AbstractContextManager[None]:
        """Start a step: what is known of its samples, if it says which they are. Within the context more is learnt, and
        after it the numbers are forgotten.

        Raises ValueError or TypeError for numbers that are none of the batch's.
        """
        self._gradient_sizes = None
        if not self._per_sample or sample_index is None:
            return nullcontext()
        index = numbers_of(sample_index, None if batch is None else batch_size(batch))
        self._gradient_sizes = self.gradients.of(index)
        return self._watched(index)

    @contextmanager
    def _watched(self, index: Tensor) -> Iterator[None]:
        try:
            with self.gradients.watched(index):
                yield
        finally:
            self._gradient_sizes = None

    def remove(self) -> None:
        """Take the hook off the model."""
        if self._handle is not None:
            self._handle.remove()

    def pack(self, tensor: Tensor, bits: Bits, seed: int) -> codec.Packed:
        """Store a tensor as its bits say: their average where they are for samples and it is not made of samples."""
        if isinstance(bits, tuple) and self.applies_to(tensor):
            units = codec.ranked(self.keys(tensor), counts_of(bits, self.samples or 1))
            return codec.pack(tensor, units, seed, self.group_size)
        width = one_width(bits)
        bounded = self._within_bound(tensor, width, seed) if self._error_bounded and width is not None else None
        return bounded or codec.pack(tensor, width, seed, self.group_size)

    def _within_bound(self, tensor: Tensor, width: int, seed: int) -> codec.Packed | None:
        """A tensor's groups at widths of their own, where that takes fewer bytes than one width."""
        if tensor.device.type != "cpu":
            self._warn_of_one_width(tensor)
            return None
        return codec.pack_error_bounded(tensor, width, seed, self.group_size)

    def _warn_of_one_width(self, tensor: Tensor) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "compressor is 'error-bounded' and tensors are on %s: there they keep one width for all groups, as "
                "with 'fixed-point', for the size of a payload would have to wait for the device",
                tensor.device,
            )

    def applies_to(self, tensor: Tensor) -> bool:
        """Whether the samples of a tensor may have widths of their own."""
        return self._per_sample and made_of_samples(tensor, self.samples)

    def columns_of(self, tensor: Tensor) -> int:
        """By which a tensor is grouped, as codec.columns_of says, or its samples with widths of their own."""
        columns = codec.columns_of(tensor, self.group_size)
        if not self.applies_to(tensor):
            return columns
        numel = tensor.numel() * (2 if tensor.is_complex() else 1)
        return codec.columns_within(numel, self.samples or 1, self.group_size, columns)

    def keys(self, tensor: Tensor) -> Tensor:
        """float32 [samples] by which the samples are ranked: about proportional to what rounding each adds to the
        gradient's variance. The tensor must be made of samples."""
        keys = codec.squared_ranges(codec.stored_values(tensor), self.samples or 1, self.group_size)
        sizes = self._gradient_sizes
        if sizes is None or len(sizes) < len(keys):
            return keys
        return keys * sizes[: len(keys)]  # a measurement sees the batch's first samples
