"""The wrappers that a job puts around a model and its modules: what lies inside them, and what they shard."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .._torch_internals import ORIGINAL_MODULE
from .collectives import rank, world_size
from .ddp import Ddp
from .framework import Framework
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2
from .tensor_parallel import TensorParallel
from .zero import Zero


class _TorchWrappers(Framework):
    """Wrappers of torch that have nothing to do with ranks: checkpoint_wrapper and torch.compile."""

    name = "torch"
    path_parts = ("_checkpoint_wrapped_module", ORIGINAL_MODULE)


FRAMEWORKS: tuple[Framework, ...] = (Ddp(), Fsdp1(), Fsdp2(), Zero(), TensorParallel(), _TorchWrappers())
_PATH_PARTS = frozenset(part for framework in FRAMEWORKS for part in framework.path_parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside wrappers, so that names do not depend on wrapping."""
    inner = _inner(model)
    while inner is not None:
        model, inner = inner, _inner(inner)
    return model


def _inner(module: nn.Module) -> nn.Module | None:
    found = (framework.inner(module) for framework in FRAMEWORKS)
    return next((inner for inner in found if inner is not None), None)


def user_path(path: str) -> str:
    """A module's dotted path without the wrappers on the way to it."""
    return ".".join(part for part in path.split(".") if part not in _PATH_PARTS)


def modules_by_path(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module inside a model's wrappers, with the path that the user gave it.

    Where ranks hold different parameters under one name, as those of experts are, the path has the rank's number: what
    is measured of one expert says nothing of another.
    """
    model = unwrap(model)
    own = {id(parameter) for parameter in _unshared(model)} if world_size() > 1 else set()
    inside: set[int] = set()
    for path, module in model.named_modules():
        if own and id(module) not in inside:
            parameters = list(module.parameters())
            if parameters and all(id(parameter) in own for parameter in parameters):
                inside.update(id(part) for part in module.modules())
        yield user_path(path) + (f"[rank {rank()}]" if id(module) in inside else ""), module


def _unshared(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that data parallelism leaves alone: DDP was told to ignore them, or they have the mark by which
    DeepSpeed and Megatron know experts."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for name, parameter in model.named_parameters():
        if name in ignored or not getattr(parameter, "allreduce", True):
            yield parameter


def sharding(model: nn.Module) -> str | None:
    """What splits the parameters of a model between ranks, None where every rank holds them whole."""
    return next((framework.name for framework in FRAMEWORKS if framework.shards(model)), None)


def steps_optimizer(model: nn.Module) -> bool:
    """Whether a model's outermost wrapper steps the optimizer itself, as an engine does."""
    return any(framework.steps_optimizer(model) for framework in FRAMEWORKS)


def forwarding_nodes() -> frozenset[str]:
    """Names of the autograd nodes by which wrappers notice a backward: they pass on what they are given."""
    return frozenset(name for framework in FRAMEWORKS for name in framework.forwarding_nodes)


def operator_aliases() -> dict[str, str]:
    """Names of wrappers' autograd functions -> the operators that they replace."""
    return dict(alias for framework in FRAMEWORKS for alias in framework.operator_aliases)


def framework_libraries() -> frozenset[str]:
    """The libraries that frameworks' hooks on modules belong to."""
    return frozenset(part.partition(".")[0] for framework in FRAMEWORKS for part in framework.hook_modules)


def plumbing() -> tuple[str, ...]:
    """Parts of the names of files whose frames are a wrapper's and not the user's."""
    return tuple(part for framework in FRAMEWORKS for part in framework.plumbing)


def checkpoint_files() -> tuple[str, ...]:
    """Suffixes of the names of files in which a framework has a checkpoint() of its own."""
    return tuple(file for framework in FRAMEWORKS for file in framework.checkpoint_files)


def checkpoint_savers() -> tuple[str, ...]:
    """Files of this package in which the inputs of such a checkpoint are handed to a pack hook."""
    return tuple(file for framework in FRAMEWORKS for file in framework.checkpoint_savers)


@contextmanager
def checkpoints_as(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """The frameworks' own checkpoints call checkpoint(function, *args) instead."""
    with ExitStack() as stack:
        for framework in FRAMEWORKS:
            stack.enter_context(framework.checkpoints_as(checkpoint))
        yield


@contextmanager
def checkpoints_offering_inputs(pack: Callable[[Tensor], Any]) -> Iterator[None]:
    """The frameworks' own checkpoints hand their inputs to a pack hook, while it is the innermost of its thread.

    Their backward restores them itself, and does not need the context.
    """
    with ExitStack() as stack:
        for framework in FRAMEWORKS:
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
    own = next((unit for framework in FRAMEWORKS if (unit := framework.unit(module)) is not None), None)
    return _units_inside(module) if own is None else [own]


def _units_inside(module: nn.Module) -> list[nn.Module]:
    return list(dict.fromkeys(unit for child in module.children() for unit in _outermost_units(child)))
