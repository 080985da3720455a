"""What attach() is given, checked: a level or a config, and the ranks that share one plan."""

import math
from typing import Any

from torch import nn

from . import distributed
from .config import Config
from .distributed import sharding

_default_level = "L2"


def set_optimization_level(level: str) -> None:
    """Set the level of controllers that are made from now on without a level or a config (it is "L2" at first).

    level: a name in gact_dist.LEVELS. Raises ValueError for an unknown one.
    """
    global _default_level
    Config.from_level(level)
    _default_level = level


def data_parallel_groups(process_group: Any, tensor_parallel: list[Any]) -> list[Any]:
    """The data-parallel group in a list, which is empty where every rank belongs to one tensor-parallel group."""
    if process_group is None and tensor_parallel:
        if math.prod(distributed.world_size(group) for group in tensor_parallel) == distributed.world_size():
            return []
        raise ValueError(
            "the model's parameters are split over a tensor-parallel mesh and process_group was not given, expected "
            'the data-parallel part of that mesh: attach(model, process_group=mesh["dp"]), with the name you gave it'
        )
    return [distributed.data_parallel_group(process_group)]


def check_inlined(config: Config, model: nn.Module) -> None:
    """Raise ValueError where hooks that are traced into compiled graphs cannot do what is asked."""
    if config.compile_hooks == "inlined" and config.offload.enabled:
        raise ValueError(
            "compile_hooks is 'inlined' and offload.enabled is true, expected one of them: what a compiled graph packs "
            "it keeps among its own tensors, where no copy to the host can take its place; use 'eager' with offload"
        )
    by = sharding(model) if config.compile_hooks == "inlined" else None
    if by is not None:
        raise ValueError(
            f"compile_hooks is 'inlined' and {by} splits the model's parameters, expected 'eager' there: which of a "
            "graph's inputs are parameters is known only where they stay in place"
        )


def settings(level: str | None, config: Config | None) -> Config:
    """Those of a level or of a config, of the default level without either. Raises TypeError or ValueError."""
    if isinstance(level, Config):
        raise TypeError(
            "level is a gact_dist.Config, expected a level's name; settings go in as attach(model, config=...)"
        )
    if level is not None and config is not None:
        raise ValueError(
            f"both level={level!r} and config were given, expected one: Config.from_level(level, bits=...) has both"
        )
    if config is None:
        return Config.from_level(level if level is not None else _default_level)
    if not isinstance(config, Config):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a gact_dist.Config; a dict goes through Config.from_dict"
        )
    return config
