"""Offload of exact tensors beside the computation, by the design of torchtune's OffloadActivations, to compare with.

What makes its design (torchtune/training/_activation_offloading.py, read on 2026-11-21): one side stream for both
directions, pinned memory from torch's own pool, tensors from 1 KiB on, the last five that left kept until the computing
stream has been told to wait for them, and a copy back that starts when backward asks for the tensor. Nothing is brought
back ahead. Written anew; in favour of it, views of parameters stay, where torchtune's takes all but Parameter objects.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 1024
KEPT_TENSORS = 5


class AsyncOffload:
    """Hooks for one forward at a time on the current CUDA device; the same object serves all steps of a job."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._stream = torch.cuda.Stream()
        self._leaving: OrderedDict[int, tuple[Tensor, Tensor, Any]] = OrderedDict()

    def hooks(self) -> saved_tensors_hooks:
        """The context around a forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < MIN_BYTES or not tensor.is_cuda or tensor.untyped_storage().data_ptr() in self._own:
            return tensor.detach()
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        self._leaving[id(host)] = host, tensor.detach(), self._stream.record_event()
        self._let_go(KEPT_TENSORS)
        return host

    def _unpack(self, kept: Tensor) -> Tensor:
        if kept.is_cuda:
            return kept
        leaving = self._leaving.get(id(kept))
        if leaving is not None:
            return leaving[1]
        self._let_go(0)  # once backward asks for what has left, what was about to leave is on the host as well
        with torch.cuda.stream(self._stream):
            tensor = kept.to("cuda", non_blocking=True)
        stream = torch.cuda.current_stream()
        stream.wait_stream(self._stream)
        tensor.record_stream(stream)
        return tensor

    def _let_go(self, kept: int) -> None:
        """Drop the device memory of all but the last few that left, after the computing stream waits for them."""
        while len(self._leaving) > kept:
            _, (_, _, left) = self._leaving.popitem(last=False)
            torch.cuda.current_stream().wait_event(left)
