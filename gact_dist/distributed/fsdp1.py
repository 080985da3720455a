"""FullyShardedDataParallel (FSDP1): a wrapper with flat parameters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from .._patches import replaced
from .framework import Framework, OptionalClass, cast_floating

_WRAPPER = OptionalClass("torch.distributed.fsdp", "FullyShardedDataParallel")


class Fsdp1(Framework):
    """FullyShardedDataParallel."""

    name = "FSDP"
    path_parts = ("_fsdp_wrapped_module",)

    def shards(self, model: nn.Module) -> bool:
        return any(_WRAPPER.made(module) for module in model.modules())

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        wrapped = [module for module in model.modules() if _WRAPPER.made(module)]
        if not wrapped:
            yield
            return
        with _WRAPPER.get().summon_full_params(model, writeback=False), _compute_types(wrapped):
            yield

    def plain_forward(self) -> AbstractContextManager[None]:
        return replaced(_WRAPPER.get(), "forward", _forward) if _WRAPPER.loaded() else nullcontext()


def _forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    policy = self.mixed_precision
    if policy.param_dtype is not None and (
        policy.cast_forward_inputs or (self._is_root and policy.cast_root_forward_inputs)
    ):
        inputs, kwargs = cast_floating((inputs, kwargs), policy.param_dtype)
    return self._fsdp_wrapped_module(*inputs, **kwargs)


@contextmanager
def _compute_types(wrapped: list[Any]) -> Iterator[None]:
    """Parameters in the type that mixed precision computes in; summon_full_params gives the type they are stored in."""
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
    """The modules inside a wrapper, except those inside a wrapper further down."""
    for child in wrapper.children():
        if id(child) not in others:
            yield child
            yield from _own_modules(child, others)
