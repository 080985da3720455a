"""The wrappers that a job puts around a model and its modules: what lies inside, and how to run it without them.

[Note: sharded probe] Sensitivity needs a double backward over an ordinary module. Sharding frees parameters after use
and answers every forward and backward with collectives and state of its own. So, for one measurement, the wrapper's
hooks are taken off the modules, except for its casts of inputs and outputs, and come back afterwards: the wrapper never
sees that a forward ran. Parameters are gathered as the wrapper itself gathers them (FSDPModule.unshard, the unshard of
FSDP's handles, zero.GatheredParameters), in the type the job computes in. bypassed() gathers what lies outside the
given parts of the model, and gathered() one part at a time, so that a rank holds no more than these two at once. What
is whole already is left alone: a parameter that two parts share, or a unit that the job itself keeps unsharded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn

from .._patches import replaced
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
_NOTHING = nullcontext()
_modules_of_parts: dict[nn.Module, list[nn.Module]] = {}
"""while a sharded model is bypassed, the modules of each part, with the wrappers around it"""


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


def units(model: nn.Module) -> list[nn.Module]:
    """The outermost modules below the root that a framework shards as units of their own; none if there is only a root.

    They are the modules whose forward may be replaced: a wrapper casts inputs before they reach the module inside it.
    The root: the one unit, if there is one, that all others are in.
    """
    found = _outermost_units(model)
    if len(found) == 1:
        found = _units_inside(found[0])
        while len(found) == 1 and (inside := _units_inside(found[0])):
            found = inside
    return found


def _outermost_units(module: nn.Module) -> list[nn.Module]:
    own = next((unit for framework in _FRAMEWORKS if (unit := framework.unit(module)) is not None), None)
    return _units_inside(module) if own is None else [own]


def _units_inside(module: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys(unit for child in module.children() for unit in _outermost_units(child)))


@contextmanager
def bypassed(model: nn.Module, parts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Every wrapper passed over as if it were not there, and parameters outside the parts whole.

    parts: modules inside the model, none inside another; gathered() gathers their parameters. Parameters that are
    sharded as one with any outside the parts are gathered as well.
    A collective call where parameters are sharded: all ranks of the sharding group must enter it, with the same parts.
    See [Note: sharded probe].
    """
    with ExitStack() as stack:
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.plain_forward())
        if sharding(model) is not None:
            outside, inside = _divided(model, parts)
            stack.enter_context(_gathered(outside))
            stack.enter_context(_known(inside))
        stack.enter_context(_hooks_aside(model))
        yield


def gathered(part: nn.Module) -> AbstractContextManager[None]:
    """Within bypassed(model, parts): the parameters of one of the parts whole, in the type that the job computes in.

    Its parameters must be read within the context: they may be other objects at every entry.
    A collective call where parameters are sharded; nothing, and quickly so, where they are not.
    """
    modules = _modules_of_parts.get(part)
    return _NOTHING if modules is None else _gathered(modules)


@contextmanager
def gathered_in_turn(model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[None]:
    """bypassed(), with each part gathered for every forward of its own, and for no longer: no backward can follow."""
    with bypassed(model, parts), ExitStack() as stack:
        for part in parts:
            stack.enter_context(replaced(part, "forward", _gathering(part)))
        yield


def _gathering(part: nn.Module) -> Callable[..., Any]:
    forward = part.forward

    @wraps(forward)
    def gathering(*inputs: Any, **kwargs: Any) -> Any:
        with gathered(part):
            return forward(*inputs, **kwargs)

    return gathering


@contextmanager
def _gathered(modules: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for framework in _FRAMEWORKS:
            stack.enter_context(framework.gathered(modules))
        yield


def _divided(model: nn.Module, parts: Sequence[nn.Module]) -> tuple[list[nn.Module], dict[nn.Module, list[nn.Module]]]:
    """The modules outside the parts, and those of each part; a wrapper belongs to the part that it wraps."""
    owners = {module: part for part in parts for module in part.modules()}
    outside: list[nn.Module] = []
    inside: dict[nn.Module, list[nn.Module]] = {part: [] for part in parts}
    for module in model.modules():
        part = owners.get(unwrap(module))
        (outside if part is None else inside[part]).append(module)
    return outside, inside


@contextmanager
def _known(parts: dict[nn.Module, list[nn.Module]]) -> Iterator[None]:
    """Within the context gathered() knows these parts."""
    _modules_of_parts.update(parts)
    try:
        yield
    finally:
        for part in parts:
            del _modules_of_parts[part]


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
