"""Running the job's forward without changing anything in the job.

[Note: isolation] While sensitivity is measured the model's forward runs once more. What it would change is restored:
random number generators of torch (every device in use), Python and NumPy, and those of the model's own; buffers
(BatchNorm's statistics), which are replaced by clones rather than written back, so that not even their version counters
move; plain attributes of modules (attributes.py), and parameters and other tensors that it writes to (in_place.py);
.grad, which autograd.grad never touches and which is set aside in case the caller's closure clears it; the autocast
cache. What the model warns of is neither shown nor counted as shown: it will warn in the job's own forward. Users'
hooks on parameters, and backward hooks on modules, are not called. Forward hooks are, as they may change what is
computed. Wrappers are bypassed (see distributed/bypass.py), so that no reducer and no sharding changes its state.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import nn

from .._patches import SharedPatch
from .._paths import PACKAGE_ROOT
from .._torch_internals import global_backward_hooks, has_compiled_parts
from ..distributed import bypassed, gathered_in_turn, sharding, unwrap
from .attributes import Attributes
from .autograd_graph import scalar
from .in_place import InPlace
from .measuring_mode import MeasuringMode
from .surroundings import Generators


@contextmanager
def untouched(model: nn.Module, blocks: Sequence[nn.Module] = (), *, forward_only: bool = False) -> Iterator[None]:
    """What a forward pass of the model changes is restored when the context ends. See [Note: isolation].

    blocks: whose sharded parameters are not gathered at once: distributed.gathered() does that for each of them.
    forward_only: they are gathered while their forward runs, and no backward follows.
    """
    with ExitStack() as stack:
        stack.enter_context(generators_restored())
        attributes = Attributes(module for module in model.modules() if unwrap(module) is module)
        stack.callback(attributes.restore)
        stack.enter_context(_cloned_buffers(attributes.modules))
        stack.enter_context(_gradients_aside(model))
        stack.enter_context(_backward_hooks_aside(model))
        stack.enter_context((gathered_in_turn if forward_only else bypassed)(model, blocks))
        stack.enter_context(_writes_undone(model, attributes))
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.enable_grad())
        if not has_compiled_parts(model):  # which would be compiled anew
            stack.enter_context(_quiet.listening(warnings, get_ident()))
        yield


def run_alone(
    model: nn.Module, forward: Callable[[], Any], blocks: Sequence[nn.Module] = (), *, gives_loss: bool = True
) -> None:
    """Run a model once with the job left untouched and nothing stored, without a backward.

    forward: runs the model. blocks: gathered one by one. gives_loss: whether it returns the scalar loss or calls
    backward on it. Raises what forward raises, ValueError where a loss is no scalar that depends on a parameter.
    """
    mode = None if has_compiled_parts(model) else MeasuringMode(differentiable=False)
    with untouched(model, blocks, forward_only=True), mode or nullcontext():
        result = forward()
    if gives_loss:
        scalar(result if mode is None else mode.root_of(result))


def _without_warnings(warn: Callable[..., None], threads: Sequence[int]) -> Callable[..., None]:
    """warnings.warn where some threads measure: there only this package warns.

    catch_warnings() would forget what has been shown, and all of it would be shown once more.
    """

    @wraps(warn)
    def warn_elsewhere(message: Any, category: Any = None, stacklevel: int = 1, *rest: Any, **options: Any) -> None:
        if get_ident() not in threads or sys._getframe(1).f_code.co_filename.startswith(PACKAGE_ROOT):
            warn(message, category, stacklevel + 1, *rest, **options)

    return warn_elsewhere


_quiet = SharedPatch("warn", _without_warnings)


@contextmanager
def generators_restored() -> Iterator[None]:
    """The generators of torch (every device in use), Python and NumPy are restored when the context ends."""
    generators = Generators()
    try:
        yield
    finally:
        generators.restore()


@contextmanager
def _cloned_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    # a scripted module without buffers has no dictionary to restore, and a forward adds none to it
    modules = [module for module in modules if module._buffers or isinstance(module._buffers, dict)]
    originals = [(module._buffers, dict(module._buffers)) for module in modules]
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
    # within a forward of FSDP1 parameters are views, which have none
    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.is_leaf]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _writes_undone(model: nn.Module, attributes: Attributes) -> Iterator[None]:
    """Sharding writes to parameters itself; and a compiled region would be compiled anew under the mode."""
    whole = sharding(model) is None
    in_place = InPlace([*model.parameters(), *attributes.tensors] if whole else ())
    try:
        if has_compiled_parts(model):
            yield
        else:
            with in_place:
                yield
    finally:
        in_place.restore()


@contextmanager
def _backward_hooks_aside(model: nn.Module) -> Iterator[None]:
    """Hooks on parameters are gone; those of modules, which show in the graph, are replaced by some that do nothing."""
    changed: list[tuple[Any, dict]] = []
    for parameter in model.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                changed.append((hooks, dict(hooks)))
                hooks.clear()
    of_modules = [hooks for module in model.modules() for hooks in (module._backward_hooks, module._backward_pre_hooks)]
    for hooks in (*of_modules, *global_backward_hooks()):
        if hooks:
            changed.append((hooks, dict(hooks)))
            hooks.update(dict.fromkeys(hooks, _nothing))
    try:
        yield
    finally:
        for hooks, original in changed:
            hooks.clear()
            hooks.update(original)


def _nothing(*_: Any) -> None:
    return None
