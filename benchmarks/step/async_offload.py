"""Offload of exact tensors beside the computation, by the design of torchtune's OffloadActivations, to compare with.

What makes its design (torchtune/training/_activation_offloading.py, read on 2026-11-21): one side stream for both
directions, pinned memory from torch's own pool, tensors from 1 KiB on, the last five that left kept until the computing
stream has been told to wait for them, and a copy back that starts when backward asks for the tensor. Nothing is brought
back ahead. Written anew; in favour of it, views of parameters stay, where torchtune's takes all but Parameter objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 1024
KEPT_TENSORS = 5


@dataclass(frozen=True, eq=False)
class _Kept:
    """A tensor that stays where it is."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class _Left:
    """A tensor of the current CUDA device, on the host."""

    host: Tensor


class AsyncOffload:
    """Hooks for one forward at a time on the current CUDA device; the same object serves all steps of a job."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._stream = torch.cuda.Stream()
        self._leaving: OrderedDict[_Left, tuple[Tensor, Any]] = OrderedDict()

    def hooks(self) -> saved_tensors_hooks:
        """The context around a forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Kept | _Left:
        if tensor.nbytes < MIN_BYTES or not tensor.is_cuda or tensor.untyped_storage().data_ptr() in self._own:
            return _Kept(tensor.detach())
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        left = _Left(host)
        self._leaving[left] = tensor.detach(), self._stream.record_event()
        self._let_go(KEPT_TENSORS)
        return left

    def _unpack(self, packed: _Kept | _Left) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.tensor
        leaving = self._leaving.get(packed)
        if leaving is not None:
            return leaving[0]
        self._let_go(0)  # once backward asks for what has left, what was about to leave is on the host as well
        with torch.cuda.stream(self._stream):
            tensor = packed.host.to("cuda", non_blocking=True)
        stream = torch.cuda.current_stream()
        stream.wait_stream(self._stream)
        tensor.record_stream(stream)
        return tensor

    def _let_go(self, kept: int) -> None:
        """Drop the device memory of all but the last few that left, after the computing stream waits for them."""
        while len(self._leaving) > kept:
            _, (_, copied) = self._leaving.popitem(last=False)
            torch.cuda.current_stream().wait_event(copied)
