"""What the package needs to know about a framework that wraps a model; each has a file of its own.

A framework that is optional or slow to import is never imported for this: what is not loaded cannot wrap anything.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Framework:
    """One framework. What a subclass does not override, its framework does not do."""

    name: str
    """its name in error messages"""
    path_parts: tuple[str, ...] = ()
    """attributes that hold a wrapped module; the user's path of a module leaves them out"""
    forwarding_nodes: tuple[str, ...] = ()
    """autograd nodes by which it notices a backward: in some steps and modes, they pass on what they are given"""
    operator_aliases: tuple[tuple[str, str], ...] = ()
    """(one of its own autograd functions, the operator that it replaces)"""
    plumbing: tuple[str, ...] = ()
    """parts of file names: frames of such files are not the user's"""
    hook_modules: tuple[str, ...] = ()
    """Python modules whose functions it registers as forward hooks"""
    checkpoint_files: tuple[str, ...] = ()
    """suffixes of the names of files with a checkpoint() of its own"""
    checkpoint_savers: tuple[str, ...] = ()
    """files of this package in which such a checkpoint's inputs are handed to a pack hook"""

    def inner(self, module: nn.Module) -> nn.Module | None:
        """The module inside a wrapper of this framework; None for any other module."""
        return next((module._modules[part] for part in self.path_parts if part in module._modules), None)

    def unit(self, module: nn.Module) -> nn.Module | None:
        """The module whose parameters it shards as a unit of their own: this one, or the one that it wraps."""
        return None

    def shards(self, model: nn.Module) -> bool:
        """Whether it splits parameters of the model between ranks."""
        return any(self.unit(module) is not None for module in model.modules())

    def gathered(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """The parameters that these modules hold themselves, whole, in the type that the job computes in.

        What it shards together it gathers together. Parameters that are whole already are left as they are.
        A collective call where it shards them. modules: outer before inner; wrappers are among them.
        """
        return nullcontext()

    def sharding_groups(self, model: nn.Module) -> list[Any]:
        """The process groups over which it gathers parameters of the model."""
        return []

    def plain_forward(self) -> AbstractContextManager[None]:
        """Within the context its wrappers run what they wrap, and otherwise only move and cast inputs."""
        return nullcontext()

    def hook_casts(self, module: nn.Module) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The types that its forward hooks cast a module's inputs and outputs to; None where they do not."""
        return None, None

    def steps_optimizer(self, module: nn.Module) -> bool:
        """Whether a module is a wrapper that steps the optimizer itself, with a number of forwards for each step."""
        return False

    def checkpoints_as(self, checkpoint: Callable[..., Any]) -> AbstractContextManager[None]:
        """Checkpoints of its own call checkpoint(function, *args) instead."""
        return nullcontext()

    def offering_inputs(self, pack: Callable[[Tensor], Any]) -> AbstractContextManager[None]:
        """Checkpoints of its own hand their inputs to a pack hook while it is the innermost one."""
        return nullcontext()


@dataclass(frozen=True)
class OptionalClass:
    """A class in a module that is slow to import or may not be installed."""

    module: str
    name: str

    def loaded(self) -> bool:
        return hasattr(sys.modules.get(self.module), self.name)

    def get(self) -> Any:
        return getattr(sys.modules[self.module], self.name)

    def made(self, candidate: object) -> bool:
        """Whether an object is an instance."""
        return self.loaded() and isinstance(candidate, self.get())


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Nested values with their floating-point tensors in another type."""
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
