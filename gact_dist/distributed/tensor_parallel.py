"""Tensor parallelism: DTensors whose shards take part in a forward without being gathered."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .._patches import replaced
from .collectives import max_over_groups, reduce_over, world_size
from .framework import Framework, OptionalClass
from .fsdp2 import meshes_gathered

_DTENSOR = OptionalClass("torch.distributed.tensor", "DTensor")
_PENDING = OptionalClass("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
TENSOR_PARALLELISM = "tensor parallelism"
"""what sharding() says of it"""
_SAME = 1e-3
"""Relative to its norm, how far the projections of copies of a tensor may be apart; those of parts are about 1."""


class TensorParallel(Framework):
    """parallelize_module, and DTensor parameters in general."""

    name = TENSOR_PARALLELISM

    def shards(self, model: nn.Module) -> bool:
        return any(_DTENSOR.made(parameter) for parameter in model.parameters())


def local_part(tensor: Tensor) -> Tensor | None:
    """This rank's part of a distributed tensor, or of one whose collective is in flight; None for a plain tensor."""
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


class Layout(NamedTuple):
    """How a distributed tensor lies on its ranks."""

    mesh: Any
    placements: tuple[Any, ...]
    """one for each dimension of the mesh"""
    shape: tuple[int, ...]
    """of the whole"""

    @property
    def is_pending(self) -> bool:
        """Whether its value is a reduction over ranks, so that no rank has an element of it."""
        return any(placement.is_partial() for placement in self.placements)

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds all of it."""
        return all(placement.is_replicate() for placement in self.placements)

    def fits(self, other: "Layout") -> bool:
        """Whether what lies so can be multiplied with the other without communication, and the product lies as that.

        The shape is that of the other, or can be broadcast to it.
        """
        if self.mesh != other.mesh:
            return False
        missing = len(other.shape) - len(self.shape)
        for own, placement in zip(self.placements, other.placements, strict=True):
            if placement.is_shard():
                dimension = placement.dim - missing
                size = self.shape[dimension] if dimension >= 0 else 1
                if size == 1 and own.is_replicate():
                    continue
                if not own.is_shard(dimension) or type(own) is not type(placement):
                    return False
                if size != other.shape[placement.dim]:
                    return False
            elif not (own.is_replicate() and placement.is_replicate()):
                return False
        return True


def layout_of(tensor: Tensor) -> Layout | None:
    """How a tensor lies on its ranks; None for one that is not distributed."""
    if not _DTENSOR.made(tensor):
        return None
    like = cast(Any, tensor)
    return Layout(like.device_mesh, tuple(like.placements), tuple(like.shape))


def whole_part(tensor: Tensor) -> Tensor | None:
    """What this rank holds of a tensor, if that is all of it; else None."""
    layout = layout_of(tensor)
    return own_part(tensor) if layout is None or layout.is_whole else None


def distributed_again(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that turns a local part back into a distributed tensor like the one given here."""
    if not _DTENSOR.made(tensor):
        return lambda local: local
    like = cast(Any, tensor)
    place = {"device_mesh": like.device_mesh, "placements": like.placements}
    whole = {"shape": like.shape, "stride": like.stride()}
    return lambda local: _DTENSOR.get().from_local(local, **place, **whole, run_check=False)


def distributed_as(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that all ranks hold whole, distributed as a gradient is; itself where the gradient is a plain tensor.

    No communication. What is pending a reduction in the gradient is whole on every rank.
    """
    if not _DTENSOR.made(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh = cast(Any, like).device_mesh
    return distribute_tensor(whole, mesh, _reduced(cast(Any, like).placements), src_data_rank=None)


def part_of_gradient(gradient: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of the gradient of a tensor, for the part of the tensor that the rank holds.

    A collective call where the gradient is distributed otherwise than the tensor.
    """
    if not _DTENSOR.made(gradient):
        return own_part(gradient)
    placements = _reduced(cast(Any, tensor if _DTENSOR.made(tensor) else gradient).placements)
    return own_part(cast(Any, gradient).redistribute(placements=placements))


def whole_value(tensor: Tensor) -> float:
    """The value of a tensor of one element; of a distributed one it is the same on all ranks. A collective call."""
    return float(cast(Any, tensor).full_tensor() if _DTENSOR.made(tensor) else tensor)


def fingerprint(tensor: Tensor) -> Tensor:
    """float64 [5] on the CPU: four random projections of a tensor, the same on every rank, and its norm."""
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    values = values.detach().float().flatten()
    generator = torch.Generator(device=values.device).manual_seed(0)
    projected = values * torch.randn(values.shape, generator=generator, device=values.device)
    sums = [projected[start::4].sum() for start in range(4)]
    return torch.stack([*sums, values.norm()]).double().cpu()


def ranks_sharing(fingerprints: Mapping[str, Tensor], groups: Sequence[Any]) -> dict[str, int]:
    """By name, how many ranks of tensor-parallel groups hold a part of a tensor: 1 where all of them hold a copy.

    A plain tensor does not say whether it is the local part of a distributed one: other ranks then have other values.
    """
    ranks = dict.fromkeys(fingerprints, 1)
    if not ranks:
        return ranks
    table = torch.stack(list(fingerprints.values()))
    table = torch.cat([table, -table[:, :-1]], 1)
    for group in groups:
        names, most = max_over_groups(list(fingerprints), table, [group])
        spread = (most[:, :4] + most[:, 5:]).amax(1)
        differs = spread > _SAME * most[:, 4]
        for name, parts in zip(names, differs.tolist(), strict=True):
            ranks[name] = ranks.get(name, 1) * (world_size(group) if parts else 1)
    return ranks


def sum_over_parts(value: float, tensor: Tensor, groups: Sequence[Any]) -> float:
    """The sum over tensor-parallel groups of what each rank computed from its part of a plain tensor.

    Of a copy, or of a distributed tensor, the value is that of the whole already. Collectives, if there are groups.
    """
    if not groups or _DTENSOR.made(tensor):
        return value
    parts = ranks_sharing({"": fingerprint(tensor)}, groups)[""]
    return parts * float(reduce_over([""], torch.tensor([[value]], device="cpu"), groups).mean)


@contextmanager
def differentiable_twice(nodes: Sequence[Any]) -> Iterator[None]:
    """Within the context the backward of a graph with DTensors, of which these are the nodes, can be differentiated.

    The backward of DTensor.from_local redistributes gradients by collectives that autograd does not see: a hook does so
    before, by one that it sees. Neither it nor redistribution takes a gradient that is not there.
    """
    if not _DTENSOR.loaded():
        yield
        return
    made = [node for node in nodes if node.name() == _FROM_LOCAL and hasattr(node, "forward_input_placements")]
    with ExitStack() as stack:
        for node in made:
            stack.callback(node.register_prehook(_redistribution(node)).remove)
        for wrapped, made_by in (
            (_with_graph, (_TO_TORCH, _REDISTRIBUTE)),
            (_of_what_is_there, (_FROM_TORCH, _REDISTRIBUTE, _NESTED)),
        ):
            for function in (optional.get() for optional in made_by if optional.loaded()):
                stack.enter_context(replaced(function, "backward", staticmethod(wrapped(function.backward))))
        yield


_FROM_LOCAL = "_FromTorchTensorBackward"
CONVERSIONS = (_FROM_LOCAL, "_ToTorchTensorBackward")
"""nodes of DTensor.from_local() and to_local(), whose results are in the memory of their operands"""
_FROM_TORCH = OptionalClass("torch.distributed.tensor._api", "_FromTorchTensor")
_TO_TORCH = OptionalClass("torch.distributed.tensor._api", "_ToTorchTensor")
_REDISTRIBUTE = OptionalClass("torch.distributed.tensor._redistribute", "Redistribute")
_NESTED = OptionalClass("torch.distributed.tensor._redistribute", "NestedRedistribute")


def _of_what_is_there(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of one tensor that may get zeros, which autograd makes as plain tensors where there is no gradient."""

    def of_distributed(ctx: Any, gradient: Tensor) -> Any:
        return backward(ctx, gradient) if _DTENSOR.made(gradient) else (None,) * len(ctx.needs_input_grad)

    return of_distributed


def _with_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that makes a DTensor, in an older torch (2.11) by what autograd does not see."""

    def seen(ctx: Any, gradient: Any) -> tuple:
        made, *others = backward(ctx, gradient)
        if torch.is_grad_enabled() and made is not None and made.requires_grad and made.grad_fn is None:
            if _DTENSOR.made(gradient):
                made = gradient.redistribute(placements=made.placements).to(made.dtype)
            else:
                made = distributed_again(made)(gradient)
        return made, *others

    return seen


def _redistribution(node: Any) -> Callable[[Sequence[Any]], tuple]:
    placements = _reduced(getattr(node, "grad_placements", None) or node.forward_input_placements)

    def prehook(gradients: Sequence[Any]) -> tuple:
        return tuple(
            gradient.redistribute(placements=placements) if _DTENSOR.made(gradient) else gradient
            for gradient in gradients
        )

    return prehook


def _reduced(placements: Sequence[Any]) -> tuple[Any, ...]:
    """Placements of a gradient: what would be pending a reduction is replicated."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def tensor_parallel_groups(model: nn.Module) -> list[Any]:
    """The process groups over which parameters are split without being gathered for a forward (tensor parallelism).

    Their ranks see the same examples and hold the same replicated parameters, so they must round alike.
    """
    if not _DTENSOR.loaded():
        return []
    gathered = {name for mesh in meshes_gathered(model) for name in _dimensions(mesh)}
    groups: dict[str, Any] = {}
    for parameter in model.parameters():
        if _DTENSOR.made(parameter):
            mesh = cast(Any, parameter).device_mesh
            for dimension, name in enumerate(_dimensions(mesh)):
                if name not in gathered:
                    group = mesh.get_group(dimension)
                    groups[group.group_name] = group
    return list(groups.values())


def _dimensions(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"dimension {number}" for number in range(mesh.ndim))
