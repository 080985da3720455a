"""A model that has too little memory to be measured on many examples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import gact_dist


class Scarce:
    """A model that has too little memory for more than some examples in a forward that is not the job's."""

    __slots__ = ("gact", "most_examples", "seen")  # a measurement would set back what it finds in other objects

    def __init__(self, model: nn.Module, gact: gact_dist.Controller, most_examples: int) -> None:
        self.gact, self.most_examples = gact, most_examples
        self.seen: list[int] = []
        model.register_forward_pre_hook(self._check)

    def _check(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self.gact._schedule.measuring:
            self.seen.append(len(args[0]))
            if len(args[0]) > self.most_examples:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
