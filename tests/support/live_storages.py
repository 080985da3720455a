"""Bytes of live storages, counted in other ways than gact_dist.profile: independent measures of a job's peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gact_dist
from benchmarks.step.bench_peak import live_peaks
from gact_dist import Config


def allocated_peaks(step: Callable[[], None], steps: int, *owners: Any) -> list[int]:
    """Live bytes at the peak of each step, by the events of torch's CPU allocator: workspaces of operators included.

    owners: what is alive already and stays: modules, optimizers, tensors.
    """
    resident = {storage.data_ptr(): storage.nbytes() for storage in map(_storage_of, _tensors(owners))}
    return [sum(resident.values()) + peak for peak in live_peaks(lambda: None, step, steps)]


def saved_bytes(model: nn.Module, run: Callable[[], Any]) -> int:
    """What autograd saves in run(), each storage once, without parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def derived_peak(model: nn.Module, x: Tensor) -> int:
    """Of a step at 4 bits with what is derived, once it is known who reads what."""
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))

    def step() -> None:
        with gact.step():
            loss = model(x).square().mean()
        loss.backward()

    step()
    step()
    return allocated_peaks(step, 1, model, x)[0]


class StorageCount(TorchDispatchMode):
    """Live bytes of the storages that operators return in the context, and of those that are there before."""

    def __init__(self, *owners: Any) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.peak_bytes = 0
        for tensor in _tensors(owners):
            self._add(_storage_of(tensor))

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key and key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
            self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(_storage_of(tensor))
        return result


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _tensors(owner: Any) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    if isinstance(owner, torch.optim.Optimizer):
        owner = list(owner.state.values())
    leaves = tree_leaves(owner)
    inner = [part for leaf in leaves if isinstance(leaf, (nn.Module, torch.optim.Optimizer)) for part in _tensors(leaf)]
    return [*inner, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
