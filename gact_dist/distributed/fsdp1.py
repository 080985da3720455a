"""FullyShardedDataParallel (FSDP1): a wrapper with flat parameters."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from .._patches import replaced
from .framework import Framework, OptionalClass, cast_floating

_WRAPPER = OptionalClass("torch.distributed.fsdp", "FullyShardedDataParallel")
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_VIEWS = "torch.distributed.fsdp._unshard_param_utils"


class Fsdp1(Framework):
    """FullyShardedDataParallel."""

    name = "FSDP"
    path_parts = ("_fsdp_wrapped_module",)

    def unit(self, module: nn.Module) -> nn.Module | None:
        """The wrapped module: the wrapper casts its inputs before they reach it."""
        return self.inner(module) if _WRAPPER.made(module) else None

    @contextmanager
    def gathered(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules:
                if _WRAPPER.made(module):
                    stack.enter_context(_gathered(module))
            yield

    def sharding_groups(self, model: nn.Module) -> list[Any]:
        return [module.process_group for module in model.modules() if _WRAPPER.made(module)]

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
def _gathered(wrapper: Any) -> Iterator[None]:
    """The wrapper's flat parameter is whole, and the original parameters are views of it.

    summon_full_params would do, but it gathers the type that parameters are stored in, and mixed precision would need a
    copy besides: three times the memory of the job's own forward. So this is what it does, less its training state.
    """
    runtime = sys.modules[_RUNTIME]
    runtime._lazy_init(wrapper, wrapper)  # before the first forward; afterwards it does nothing
    handle, summoned = wrapper._handle, runtime.TrainingState.SUMMON_FULL_PARAMS
    if handle is None or wrapper.training_state is summoned:
        yield
        return
    runtime._reset_flat_param_grad_info_if_needed(handle)
    release, stream = handle.needs_unshard(), wrapper._device_handle.current_stream()
    runtime._unshard(wrapper, handle, stream, stream)
    state, wrapper.training_state = wrapper.training_state, summoned
    try:
        with nullcontext() if wrapper._use_orig_params else sys.modules[_VIEWS]._unflatten_as_params(wrapper, wrapper):
            yield
    finally:
        runtime._reshard(wrapper, handle, release)
        wrapper.training_state = state
