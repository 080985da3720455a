"""Running the job's forward without changing anything in the job.

[Note: isolation] While sensitivity is measured the model's forward runs once more. What it would change is restored:
random number generators of torch (every device in use), Python and NumPy; buffers (BatchNorm's statistics), which are
replaced by clones rather than written back, so that not even their version counters move; .grad, which autograd.grad
never touches and which is set aside in case the caller's closure clears it; the autocast cache. Wrappers are bypassed
(see distributed/bypass.py), so that no reducer and no sharding changes its state.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..distributed import bypassed, gathered_in_turn


@contextmanager
def untouched(model: nn.Module, blocks: Sequence[nn.Module] = (), *, forward_only: bool = False) -> Iterator[None]:
    """What a forward pass of the model changes is restored when the context ends. See [Note: isolation].

    blocks: whose sharded parameters are not gathered at once: distributed.gathered() does that for each of them.
    forward_only: they are gathered while their forward runs, and no backward follows.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_restored())
        stack.enter_context(_cloned_buffers(model))
        stack.enter_context(_gradients_aside(model))
        stack.enter_context((gathered_in_turn if forward_only else bypassed)(model, blocks))
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """The generators of torch (every device in use), Python and NumPy are restored when the context ends."""
    python_state = random.getstate()
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy_random is not None:
                numpy_random.set_state(numpy_state)


@contextmanager
def _cloned_buffers(model: nn.Module) -> Iterator[None]:
    originals = [(module._buffers, dict(module._buffers)) for module in model.modules() if module._buffers]
    clones: dict[int, torch.Tensor] = {}
    for buffers, entries in originals:
        for name, buffer in entries.items():
            if buffer is not None:
                buffers[name] = clones.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for buffers, entries in originals:
            buffers.clear()
            buffers.update(entries)


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
