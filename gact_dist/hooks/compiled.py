"""Regions that torch.compile has compiled, as saved-tensor hooks see them.

[Note: compiled regions] Hooks around a compiled region see all that its forward saves at once, and most of it without a
graph that would say what produced it. Which of these tensors are statistics of an operator (an attention's logsumexp, a
mean) is inferred from their size: in every operator that saves both, statistics have one number where activations have
a row of them. A region's tensors are kept exactly in the first step that meets them, and classified after it.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType

import torch.autograd.function as autograd_function
from torch import Tensor, nn
from torch.fx import GraphModule

from .._torch_internals import APPLY_HAS_FRAME, COMPILED_RUNTIME, COMPILER, ORIGINAL_MODULE, storage_id
from ..distributed import own_part
from .roles import Role

_INLINED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inlined.py")
_MODULE = nn.modules.module.__file__
# Shorter rows cannot be told from statistics and are kept exactly: attention heads have 16 numbers or more.
_SHORTEST_ROW = 8
BETWEEN_HOOK_AND_REGION = (COMPILER, _INLINED)
"""where the functions stand by which the compiler keeps off a hook"""


def behind_compiler(frame: FrameType) -> FrameType:
    """The frame that called a hook, without those of the wrapper that keeps the compiler from tracing it."""
    while frame.f_code.co_filename.startswith(BETWEEN_HOOK_AND_REGION) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def compiled_region(frame: FrameType) -> nn.Module | None:
    """The module whose compiled forward is saving a tensor; None where something else saves.

    frame: of the caller of a pack hook.
    """
    caller: FrameType | None = frame
    if APPLY_HAS_FRAME:
        caller = frame.f_back if frame.f_code.co_filename == autograd_function.__file__ else None
    if caller is None or not caller.f_code.co_filename.startswith(COMPILED_RUNTIME):
        return None
    return running_region(caller)


def running_region(frame: FrameType | None) -> nn.Module | None:
    """The module whose compiled forward a frame belongs to."""
    while frame is not None:
        if frame.f_code.co_filename == _MODULE and frame.f_code.co_name == "_wrapped_call_impl":
            module = frame.f_locals["self"]
            if not isinstance(module, GraphModule):  # one that the compiler made
                return module._modules.get(ORIGINAL_MODULE, module)
        frame = frame.f_back
    return None


class RegionRoles:
    """The roles of what regions save without a graph, by name."""

    def __init__(self, roles: dict[str, Role]) -> None:
        self._roles = roles
        self._met: dict[nn.Module, list[tuple[str, int]]] = defaultdict(list)

    def role(self, region: nn.Module, name: str, tensor: Tensor) -> Role:
        """The role found after an earlier step; exact until then."""
        known = self._roles.get(name)
        if known is None and _is_cast_of_parameter(tensor, region):
            known = self._roles[name] = Role.STATISTIC
        if known is None:
            self._met[region].append((name, tensor.numel()))
        return known or Role.STATISTIC

    def classify(self) -> None:
        """At the end of a step: what is new in it. See [Note: compiled regions]."""
        for met in self._met.values():
            largest = max(numel for _, numel in met)
            for name, numel in met:
                self._roles[name] = Role.ACTIVATION if numel * _SHORTEST_ROW > largest else Role.STATISTIC
        self._met.clear()


class RegionParameters:
    """Where the parameters of regions are in memory, looked up once for all the tensors that a region saves."""

    def __init__(self) -> None:
        self._region: nn.Module | None = None
        self._storages: set[int] = set()

    def share(self, tensor: Tensor, region: nn.Module) -> bool:
        """Whether a tensor that a region saves shares memory with one of its parameters in this forward."""
        if region is not self._region:
            self._region = region
            self._storages = {storage_id(part) for part in _parameter_parts(region)}
        return storage_id(tensor) in self._storages

    def forget(self) -> None:
        """At the end of a step: in the next one they may be elsewhere."""
        self._region = None


def _is_cast_of_parameter(tensor: Tensor, region: nn.Module) -> bool:
    """Whether it may be a parameter in autocast's type; a copy made inside the graph shows only type and shape."""
    shape = sorted(tensor.shape)
    return any(part.dtype != tensor.dtype and sorted(part.shape) == shape for part in _parameter_parts(region))


def _parameter_parts(region: nn.Module) -> Iterator[Tensor]:
    """What this rank holds of a region's parameters; for FSDP1 with use_orig_params their views that a forward uses."""
    for module in region.modules():
        found = (*module._parameters.values(), *vars(module).values())
        yield from (own_part(tensor) for tensor in found if isinstance(tensor, Tensor))
