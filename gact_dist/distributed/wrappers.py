"""The wrappers that a job puts around a model and its modules: what lies inside, and how to run it without them.

[Note: sharded probe] Sensitivity needs a double backward over an ordinary module. Sharding frees parameters after use
and answers every forward and backward with collectives and state of its own. So, for one measurement, parameters are
gathered through the wrapper's own public call (FSDPModule.unshard, FSDP.summon_full_params, zero.GatheredParameters),
in the type the job computes in; the wrapper's hooks are taken off the modules, its casts of inputs and outputs
excepted; and both come back afterwards. The wrapper never sees that a forward ran. What it costs: the collectives that
gather, and for the time of the measurement the whole parameters on every rank.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map_only

# attributes under which a wrapper holds the module it wraps; a path through them names the same module without them
_INNER = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
_SHARDING_HOOKS = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed")


@dataclass(frozen=True)
class _Optional:
    """A class of a module that is slow to import or not installed: what is not imported cannot wrap anything."""

    module: str
    name: str

    def loaded(self) -> bool:
        return hasattr(sys.modules.get(self.module), self.name)

    def get(self) -> Any:
        return getattr(sys.modules[self.module], self.name)

    def made(self, candidate: object) -> bool:
        """Whether a module is an instance."""
        return self.loaded() and isinstance(candidate, self.get())


_FSDP1 = _Optional("torch.distributed.fsdp", "FullyShardedDataParallel")
_FSDP2 = _Optional("torch.distributed.fsdp", "FSDPModule")
_ENGINE = _Optional("deepspeed", "DeepSpeedEngine")
_DTENSOR = _Optional("torch.distributed.tensor", "DTensor")
_PENDING = _Optional("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside wrappers, so that names do not depend on wrapping."""
    inner: Any = model
    while True:
        if isinstance(inner, (DistributedDataParallel, DataParallel)) or _ENGINE.made(inner):
            inner = inner.module
            continue
        below = next((inner._modules[name] for name in _INNER if name in inner._modules), None)
        if below is None:
            return inner
        inner = below


def user_path(path: str) -> str:
    """A module's dotted path without the wrappers on the way to it."""
    return ".".join(part for part in path.split(".") if part not in _INNER)


def local_part(tensor: Tensor) -> Tensor | None:
    """This rank's own memory of a distributed tensor, or of one whose collective is under way; None of a plain one."""
    if _PENDING.made(tensor):
        return cast(Any, tensor).wait()
    if _DTENSOR.made(tensor):
        local = cast(Any, tensor)._local_tensor
        return local.wait() if _PENDING.made(local) else local
    return None


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its local part, or itself where it is a plain one."""
    local = local_part(tensor)
    return tensor if local is None else local


def distributed_again(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that makes the kind of tensor given here out of its local part."""
    if not _DTENSOR.made(tensor):
        return lambda local: local
    like = cast(Any, tensor)
    place = {"device_mesh": like.device_mesh, "placements": like.placements}
    whole = {"shape": like.shape, "stride": like.stride()}
    return lambda local: _DTENSOR.get().from_local(local, **place, **whole, run_check=False)


def tensor_parallel_groups(model: nn.Module) -> list[Any]:
    """The process groups over which parameters are split without being gathered for a forward (tensor parallelism).

    Their ranks see the same samples, and hold the same replicated parameters: they must round alike.
    """
    if not _DTENSOR.loaded():
        return []
    gathered = {
        name
        for module in model.modules()
        if _FSDP2.made(module)
        for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups
        for name in _dimensions(group.mesh_info.mesh)
    }
    groups: dict[str, Any] = {}
    for parameter in model.parameters():
        if _DTENSOR.made(parameter):
            mesh = cast(Any, parameter).device_mesh
            for dimension, name in enumerate(_dimensions(mesh)):
                if name not in gathered:
                    group = mesh.get_group(dimension)
                    groups[group.group_name] = group
    return list(groups.values())


def sharding(model: nn.Module) -> str | None:
    """What splits the parameters of a model between ranks, None where every rank holds them whole."""
    if any(_FSDP1.made(module) or _FSDP2.made(module) for module in model.modules()):
        return "FSDP"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "ZeRO-3"
    return "tensor parallelism" if any(_DTENSOR.made(parameter) for parameter in model.parameters()) else None


def _dimensions(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dimension {number}" for number in range(mesh.ndim))


@contextmanager
def bypassed(model: nn.Module) -> Iterator[None]:
    """Parameters whole, and every wrapper passed over as if it were not there. See [Note: sharded probe].

    A collective call where parameters are sharded: all ranks of the sharding group must enter it.
    """
    with ExitStack() as stack:
        stack.enter_context(_forward_of(DistributedDataParallel, _data_parallel_forward))
        if _FSDP1.loaded():
            stack.enter_context(_forward_of(_FSDP1.get(), _fsdp1_forward))
        if _ENGINE.loaded():
            stack.enter_context(_forward_of(_ENGINE.get(), _deepspeed_forward))
        stack.enter_context(_fsdp1_whole(model))
        stack.enter_context(_fsdp2_whole(model))
        stack.enter_context(_zero3_whole(model))
        stack.enter_context(_hooks_aside(model))
        yield


@contextmanager
def _forward_of(wrapper: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """All modules of a wrapper class run `forward`; a class, because the model attached to may lie inside it."""
    original = wrapper.forward
    wrapper.forward = forward
    try:
        yield
    finally:
        wrapper.forward = original


def _data_parallel_forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = self.device_ids[0]
        inputs, kwargs = tree_map_only(Tensor, lambda x: x.to(device), (inputs, kwargs))
    return self.module(*inputs, **kwargs)


# -- FSDP1 ------------------------------------------------------------------------------------------------------


def _fsdp1_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    policy = self.mixed_precision
    if policy.param_dtype is not None and (
        policy.cast_forward_inputs or (self._is_root and policy.cast_root_forward_inputs)
    ):
        inputs, kwargs = _cast((inputs, kwargs), policy.param_dtype)
    return self._fsdp_wrapped_module(*inputs, **kwargs)


@contextmanager
def _fsdp1_whole(model: nn.Module) -> Iterator[None]:
    wrapped = [module for module in model.modules() if _FSDP1.made(module)]
    if not wrapped:
        yield
        return
    with _FSDP1.get().summon_full_params(model, writeback=False), _compute_types(wrapped):
        yield


@contextmanager
def _compute_types(wrapped: list[Any]) -> Iterator[None]:
    """Parameters in the type that mixed precision computes in: summon_full_params gives the stored one."""
    changed: list[tuple[dict, str, nn.Parameter]] = []
    cast: dict[int, nn.Parameter] = {}
    inner = {id(module) for module in wrapped}
    for wrapper in wrapped:
        dtype = wrapper.mixed_precision.param_dtype
        if dtype is None:
            continue
        for module in _own_modules(wrapper, inner):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    low = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    changed.append((module._parameters, name, parameter))
                    module._parameters[name] = cast.setdefault(id(parameter), low)
    try:
        yield
    finally:
        for parameters, name, parameter in changed:
            parameters[name] = parameter


def _own_modules(wrapper: nn.Module, others: set[int]) -> Iterator[nn.Module]:
    """The modules below a wrapper that belong to it and not to another wrapper further down."""
    for child in wrapper.children():
        if id(child) not in others:
            yield child
            yield from _own_modules(child, others)


# -- FSDP2 ------------------------------------------------------------------------------------------------------


@contextmanager
def _fsdp2_whole(model: nn.Module) -> Iterator[None]:
    sharding: list[Any] = [module for module in model.modules() if _FSDP2.made(module)]
    roots = _outermost(model, sharding)
    for module in roots:
        module._get_fsdp_state()._lazy_init()  # before the first forward; afterwards it does nothing
    sharded = [module for module in sharding if _is_sharded(module)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def _outermost(model: nn.Module, chosen: list[Any]) -> list[Any]:
    below = {id(inner) for module in chosen for inner in module.modules() if inner is not module}
    return [module for module in chosen if id(module) not in below]


def _is_sharded(module: Any) -> bool:
    return any(not group.is_unsharded for group in module._get_fsdp_state()._fsdp_param_groups)


# -- DeepSpeed --------------------------------------------------------------------------------------------------


def _deepspeed_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    autocast: Any = nullcontext()
    if self.torch_autocast_enabled():
        autocast = torch.autocast(self.device.type, dtype=self.torch_autocast_dtype())
    with autocast:
        return self.module(*inputs, **kwargs)


@contextmanager
def _zero3_whole(model: nn.Module) -> Iterator[None]:
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not partitioned:
        yield
        return
    with sys.modules["deepspeed"].zero.GatheredParameters(partitioned):
        yield


# -- hooks ------------------------------------------------------------------------------------------------------


@contextmanager
def _hooks_aside(model: nn.Module) -> Iterator[None]:
    """Forward hooks that sharding put on modules are away, but for what they cast."""
    changed: list[tuple[dict, dict]] = []
    for module in model.modules():
        for hooks, replace in ((module._forward_pre_hooks, _input_cast), (module._forward_hooks, _output_cast)):
            if not any(_belongs_to_sharding(hook) for hook in hooks.values()):
                continue
            changed.append((hooks, dict(hooks)))
            for key, hook in list(hooks.items()):
                if _belongs_to_sharding(hook):
                    hooks[key] = replace(module, hook)
    try:
        yield
    finally:
        for hooks, original in changed:
            hooks.clear()
            hooks.update(original)


def _belongs_to_sharding(hook: Callable[..., Any]) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_SHARDING_HOOKS)


def _input_cast(module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    policy = _policy(module)
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return _nothing

    def cast(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _cast((args, kwargs), policy.param_dtype)

    return cast


def _output_cast(module: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    policy = _policy(module)
    if policy is None or policy.output_dtype is None:
        return _nothing
    return lambda _module, _inputs, output: _cast(output, policy.output_dtype)


def _policy(module: Any) -> Any:
    """FSDP2's mixed precision of a module; None where it is not sharded."""
    return module._get_fsdp_state()._mp_policy if _FSDP2.made(module) else None


def _nothing(*_: Any) -> None:
    return None


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
