"""The wrappers that a job puts around a model and its modules: what lies inside, and how to run it without them.

[Note: sharded probe] Sensitivity needs a double backward over an ordinary module. Sharding frees parameters after use
and answers every forward and backward with collectives and state of its own. So, for one measurement, parameters are
gathered through the wrapper's own public call (FSDPModule.unshard, FSDP.summon_full_params, zero.GatheredParameters),
in the type the job computes in; the wrapper's hooks are taken off the modules, its casts of inputs and outputs
excepted; and both come back afterwards. The wrapper never sees that a forward ran. What it costs: the collectives that
gather, and for the time of the measurement the whole parameters on every rank.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .._torch_internals import ORIGINAL_MODULE
from .ddp import Ddp
from .framework import Framework, cast_floating
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2
from .tensor_parallel import TensorParallel
from .zero import Zero


class _TorchWrappers(Framework):
    """Wrappers of torch that have nothing to do with ranks: checkpoint_wrapper and torch.compile."""

    name = "torch"
    path_parts = ("_checkpoint_wrapped_module", ORIGINAL_MODULE)


_FRAMEWORKS: tuple[Framework, ...] = (Ddp(), Fsdp1(), Fsdp2(), Zero(), TensorParallel(), _TorchWrappers())
_PATH_PARTS = frozenset(part for framework in _FRAMEWORKS for part in framework.path_parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside wrappers, so that names do not depend on wrapping."""
    inner = _inner(model)
    while inner is not None:
        model, inner = inner, _inner(inner)
    return model


def _inner(module: nn.Module) -> nn.Module | None:
    found = (framework.inner(module) for framework in _FRAMEWORKS)
    return next((inner for inner in found if inner is not None), None)


def user_path(path: str) -> str:
    """A module's dotted path without the wrappers on the way to it."""
    return ".".join(part for part in path.split(".") if part not in _PATH_PARTS)


def sharding(model: nn.Module) -> str | None:
    """What splits the parameters of a model between ranks, None where every rank holds them whole."""
    return next((framework.name for framework in _FRAMEWORKS if framework.shards(model)), None)


def forwarding_nodes() -> frozenset[str]:
    """Names of the autograd nodes by which wrappers notice a backward: they pass on what they are given."""
    return frozenset(name for framework in _FRAMEWORKS for name in framework.forwarding_nodes)


def operator_aliases() -> dict[str, str]:
    """Names of wrappers' autograd functions -> the operators that they replace."""
    return dict(alias for framework in _FRAMEWORKS for alias in framework.operator_aliases)


def plumbing() -> tuple[str, ...]:
    """Parts of the names of files whose frames are a wrapper's and not the user's."""
    return tuple(part for framework in _FRAMEWORKS for part in framework.plumbing)


def checkpoint_files() -> tuple[str, ...]:
    """Suffixes of the names of files in which a framework has a checkpoint() of its own."""
    return tuple(file for framework in _FRAMEWORKS for file in framework.checkpoint_files)


def checkpoint_savers() -> tuple[str, ...]:
    """Files of this package in which the inputs of such a checkpoint are handed to a pack hook."""
    return tuple(file for framework in _FRAMEWORKS for file in framework.checkpoint_savers)


@contextmanager
def checkpoints_as(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """The frameworks' own checkpoints call checkpoint(function, *args) instead."""
    with ExitStack() as stack:
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.checkpoints_as(checkpoint))
        yield


@contextmanager
def checkpoints_offering_inputs(pack: Callable[[Tensor], Any]) -> Iterator[None]:
    """The frameworks' own checkpoints hand their inputs to a pack hook, while it is the innermost of its thread.

    Their backward restores them itself, and does not need the context.
    """
    with ExitStack() as stack:
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.offering_inputs(pack))
        yield


@contextmanager
def bypassed(model: nn.Module) -> Iterator[None]:
    """Parameters whole, and every wrapper passed over as if it were not there. See [Note: sharded probe].

    A collective call where parameters are sharded: all ranks of the sharding group must enter it.
    """
    with ExitStack() as stack:
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.plain_forward())
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.whole(model))
        stack.enter_context(_hooks_aside(model))
        yield


@contextmanager
def _hooks_aside(model: nn.Module) -> Iterator[None]:
    """Within the context the frameworks' forward hooks on modules are gone, except for their casts."""
    changed: list[tuple[dict, dict]] = []
    for module in model.modules():
        for hooks, cast in ((module._forward_pre_hooks, _input_cast), (module._forward_hooks, _output_cast)):
            theirs = {key: owner for key, hook in hooks.items() if (owner := _owner(hook)) is not None}
            if theirs:
                changed.append((hooks, dict(hooks)))
                hooks.update({key: cast(module, owner) for key, owner in theirs.items()})
    try:
        yield
    finally:
        for hooks, original in changed:
            hooks.clear()
            hooks.update(original)


def _owner(hook: Callable[..., Any]) -> Framework | None:
    """The framework that registered a hook; None for the user's own."""
    module = getattr(hook, "__module__", None) or ""
    return next((framework for framework in _FRAMEWORKS if module.startswith(framework.hook_modules)), None)


def _input_cast(module: nn.Module, owner: Framework) -> Callable[..., Any]:
    dtype, _ = owner.hook_casts(module)
    return _nothing if dtype is None else lambda _module, args, kwargs: cast_floating((args, kwargs), dtype)


def _output_cast(module: nn.Module, owner: Framework) -> Callable[..., Any]:
    _, dtype = owner.hook_casts(module)
    return _nothing if dtype is None else lambda _module, _inputs, output: cast_floating(output, dtype)


def _nothing(*_: Any) -> None:
    return None


@contextmanager
def gathered(part: nn.Module) -> Iterator[None]:
    """Stub."""
    yield


def units(model: nn.Module) -> list[nn.Module]:
    """Stub."""
    return []
