"""Bytes that a step keeps, for every width of every tensor: what a budget in bytes is held against.

[Note: weighing] How much a step keeps follows from its shapes, from views that share memory, and from what is a mask, a
statistic or noise; no formula over the tensors of a slice gives it. So the whole batch's forward is run once with every
compressible tensor at one bit, through the same hooks as a step, and what they keep is noted. That takes no more memory
than the narrowest plan.
"""

import torch
from torch import Tensor

from ..codec import Packed, Scheme

WIDTHS = 8


class Footprint:
    """What one step of this rank keeps for backward."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """float64 [9] for each compressible tensor: bytes at 1 to 8 bits, and at most this many when stored exactly"""
        self.other_bytes = 0
        """masks, statistics, small tensors and all else that has no choice"""
        self.exact_bytes = 0
        """what the untouched job would keep"""

    def add(self, name: str, tensor: Tensor, payload: Tensor | Packed, retained_bytes: int) -> None:
        """Note what was kept of one saved tensor."""
        if isinstance(payload, Tensor) or payload.scheme is not Scheme.QUANTISED:
            self.other_bytes += retained_bytes
            return
        widths = [payload.nbytes_at(bits) for bits in range(1, WIDTHS + 1)]
        # stored exactly it may keep all of its storage alive
        exact = tensor.untyped_storage().nbytes() if tensor.grad_fn is not None else tensor.nbytes
        row = torch.tensor([*widths, exact], dtype=torch.float64)
        self.tensors[name] = self.tensors[name] + row if name in self.tensors else row
