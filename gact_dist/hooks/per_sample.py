"""How large the gradient of each sample of a data set was when it was last seen (ActNN's use_gradient)."""

import base64
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..distributed import unwrap
from .batches import tensors_of

_SMALLEST = 1e-30  # of a sample that was seen: its gradient may underflow


class SampleGradients:
    """Squared norms of the gradient at the model's outputs, by the sample's number in the data set.

    ActNN keeps one for each layer and sample; that at the outputs is common to all layers. All of it stays on the
    device, and nothing waits for it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self.sizes: Tensor | None = None
        """float32 [largest number + 1, or more]: 0 for samples that were not seen; None before any was"""

    @property
    def device(self) -> torch.device:
        """Where the sizes are: with the model's parameters."""
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    def of(self, index: Tensor) -> Tensor | None:
        """float32 [samples] for the samples of a batch, the average for those not seen; None before any was.

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
        """Within the context a forward of the model notes its outputs; their gradients are kept when they come by."""
        handle = self._model.register_forward_hook(partial(self._watch, index=index))
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

    def load_state_dict(self, state: str | None) -> None:
        """Go on with what state_dict() gave."""
        if state is None:
            self.sizes = None
            return
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(state)), dtype="<f4").copy()
        self.sizes = torch.from_numpy(numbers).to(self.device)

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


def numbers_of(sample_index: Tensor | Sequence[int], samples: int | None) -> Tensor:
    """Numbers of a batch's samples as int64 [samples] on the CPU.

    samples: of the batch, None if it is not known. Raises ValueError or TypeError for anything else.
    """
    if isinstance(sample_index, Tensor) and sample_index.device.type != "cpu":
        raise ValueError(
            f"sample_index is on {sample_index.device}, expected a tensor on the CPU, as the data loader gives it: "
            "reading it would wait for the device"
        )
    index = torch.as_tensor(sample_index)
    if index.dtype not in (torch.int64, torch.int32) or index.dim() != 1 or len(index) == 0:
        raise TypeError(f"sample_index is {index.dtype} {list(index.shape)}, expected integers [samples of the batch]")
    if samples is not None and len(index) != samples:
        raise ValueError(f"sample_index has {len(index)} numbers, the batch has {samples} samples: give one for each")
    if int(index.min()) < 0:
        raise ValueError(f"sample_index holds {int(index.min())}, expected numbers from 0 up")
    return index.long()
