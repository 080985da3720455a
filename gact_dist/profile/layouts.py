"""How a job is spread over ranks: a model and an optimizer as rank 0 of a layout has them.

A layout is torch's own code on a process group whose collectives move nothing. The exception is DDP: its reducer, in
C++, reads values, which fake tensors do not have. It is stood for by what it holds: buckets as large as all gradients.

    ddp     DistributedDataParallel
    fsdp2   fully_shard of the repeated blocks and of the model; with shard_ranks HSDP
    zero1   DistributedDataParallel and ZeroRedundancyOptimizer
    zero2   fsdp2 that keeps the gathered parameters from forward to backward
    zero3   fsdp2
    tp      parallelize_module by the model's own plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import real_meshes

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "tp")
_SHARDED = ("fsdp2", "zero2", "zero3")
OPTIMIZERS: dict[str, type[torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "none": None,
}
_RATE = 1e-5


class ProfileError(ValueError):
    """What cannot be profiled: what was got, what was expected and the mend."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the job runs."""

    world_size: int = 1
    layout: str | None = None
    """one of LAYOUTS; None: the model as it is, on one rank"""
    fake: bool = False
    """whether tensors have no memory, without a layout; with one they never have"""
    optimizer: str = "adamw"
    """one of OPTIMIZERS"""
    dtype: torch.dtype | None = None
    """that the model is converted to; None leaves it as it is"""
    compute_dtype: torch.dtype | None = None
    """of a sharded model: in which parameters are gathered"""
    reduce_dtype: torch.dtype | None = None
    """of a sharded model: in which gradients are reduced"""
    reshard: bool | int | None = None
    """of a sharded model: whether parameters are freed after forward, or to how many ranks they are sharded again;
    None: as the layout has it"""
    shard_ranks: int | None = None
    """of a sharded model: ranks that share one copy of it (HSDP); None: all"""
    wrap: tuple[str, ...] = ()
    """classes of the modules that are sharded, or checkpointed, on their own; without any the repeated blocks are"""
    checkpointing: bool = False
    """whether these modules are recomputed in backward"""
    measure: bool = True
    """whether bits are measured on the batch, where tensors have values; else all have the level's average"""

    @property
    def is_fake(self) -> bool:
        """Whether tensors have no memory."""
        return self.fake or self.layout is not None

    @property
    def measures(self) -> bool:
        """Whether bits are measured."""
        return self.measure and not self.is_fake

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ProfileError(f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}")
        if self.optimizer not in OPTIMIZERS:
            raise ProfileError(f"optimizer is {self.optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
        if self.world_size < 1:
            raise ProfileError(f"world_size is {self.world_size}, expected at least 1")
        if self.world_size > 1 and self.layout is None:
            raise ProfileError(
                f"world_size is {self.world_size} without a layout, expected one of {', '.join(LAYOUTS)}"
            )
        self._check_sharding()

    def _check_sharding(self) -> None:
        given = (self.compute_dtype, self.reduce_dtype, self.reshard, self.shard_ranks)
        if any(value is not None for value in given) and self.layout not in _SHARDED:
            raise ProfileError(
                f"compute_dtype, reduce_dtype, reshard or shard_ranks was given with layout {self.layout!r}, expected "
                f"one of {', '.join(_SHARDED)}"
            )
        if self.shard_ranks is not None and (self.shard_ranks < 1 or self.world_size % self.shard_ranks):
            raise ProfileError(f"shard_ranks is {self.shard_ranks}, expected a divisor of world_size={self.world_size}")
        ranks = self.shard_ranks or self.world_size
        to_ranks = ranks if self.reshard is None or isinstance(self.reshard, bool) else self.reshard
        if to_ranks < 1 or ranks % to_ranks:
            raise ProfileError(f"reshard is {self.reshard}, expected a divisor of the {ranks} ranks that share a copy")
        if self.optimizer == "none" and self.layout == "zero1":
            raise ProfileError("optimizer is 'none' with layout 'zero1', expected one whose state is shared")


@dataclass
class Spread:
    """A job as rank 0 has it."""

    model: nn.Module
    """that compression is attached to"""
    loss_fn: Callable[[Any], Tensor]
    """loss_fn(batch) runs a forward"""
    batch: Any
    optimizer: Any
    """None without one"""
    buckets: list[Tensor]
    """of the gradients that DDP reduces"""


def mesh_of(settings: Settings) -> Any:
    """The ranks of a layout; None where it needs no mesh. Made outside of fake tensors: it holds numbers."""
    from torch.distributed.device_mesh import init_device_mesh

    if settings.layout not in (*_SHARDED, "tp"):
        return None
    ranks = settings.shard_ranks or settings.world_size
    if ranks == settings.world_size:
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (settings.world_size // ranks, ranks), mesh_dim_names=("replicate", "shard"))


def spread(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor], settings: Settings, mesh: Any = None
) -> Spread:
    """The job as rank 0 of its layout has it. Needs fake ranks where there is a layout. mesh: see mesh_of."""
    if settings.dtype is not None:
        model.to(settings.dtype)
    blocks = _blocks(model, settings.wrap)
    if settings.checkpointing:
        _checkpoint(blocks)
    buckets: list[Tensor] = []
    if settings.layout in ("ddp", "zero1"):
        buckets = [torch.empty_like(parameter) for parameter in model.parameters() if parameter.requires_grad]
    elif settings.layout == "tp":
        _parallelize(model, mesh)
    elif settings.layout is not None:
        _shard(model, blocks, settings, mesh)
    return Spread(model, loss_fn, batch, _optimizer(model, settings), buckets)


def _optimizer(model: nn.Module, settings: Settings) -> Any:
    kind = OPTIMIZERS[settings.optimizer]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind is None:
        return None
    if not trained:
        raise ProfileError("no parameter of the model requires a gradient, expected a model that is trained")
    if settings.layout == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(trained, optimizer_class=kind, lr=_RATE)
    made: Any = kind  # each has a rate of its own kind
    return made(trained, lr=_RATE)


# -- modules ---------------------------------------------------------------------------------------------------------


def _blocks(model: nn.Module, classes: tuple[str, ...]) -> list[nn.Module]:
    """Modules of the named classes, or else the items of the outermost lists of modules."""
    if not classes:
        return list(_repeated(model))
    found = [module for module in model.modules() if type(module).__name__ in classes]
    known = {type(module).__name__ for module in model.modules()}
    unknown = [name for name in classes if name not in known]
    if unknown:
        raise ProfileError(
            f"the model has no module of class {unknown[0]!r}, expected one of {', '.join(sorted(known))}"
        )
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1:
            yield from (item for item in child if any(True for _ in item.parameters()))
        else:
            yield from _repeated(child)


def _checkpoint(blocks: list[nn.Module]) -> None:
    from torch.utils.checkpoint import checkpoint

    if not blocks:
        raise ProfileError("checkpointing was asked for and the model has no list of blocks, expected wrap=CLASS")
    for block in blocks:
        block.forward = _recomputed(checkpoint, block.forward)


def _recomputed(checkpoint: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


# -- sharding --------------------------------------------------------------------------------------------------------


def _shard(model: nn.Module, blocks: list[nn.Module], settings: Settings, mesh: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reshard = settings.layout != "zero2" if settings.reshard is None else settings.reshard
    policy = MixedPrecisionPolicy(param_dtype=settings.compute_dtype, reduce_dtype=settings.reduce_dtype)
    # as fully_shard has it by default, the outermost parameters stay: backward begins with them
    outermost = None if settings.reshard is None and settings.layout != "zero2" else reshard
    with real_meshes():
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=outermost, mp_policy=policy)


# -- tensor parallelism ----------------------------------------------------------------------------------------------


def _parallelize(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ProfileError(
            'layout "tp" needs a plan and the model has none, expected an attribute tp_plan = {path with * for '
            'numbers: "colwise", "rowwise" or a ParallelStyle}, as models of transformers have it'
        )
    parallelize_module(model, mesh, {path: _style(path, style) for path, style in plan.items()})


def _style(path: str, style: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    }
    if isinstance(style, ParallelStyle):
        return style
    if style not in styles:
        raise ProfileError(f"the model's plan splits {path!r} by {style!r}, expected one of {', '.join(styles)}")
    return styles[style]
