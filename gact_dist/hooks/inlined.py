"""Saved-tensor hooks that torch.compile traces into a region's graphs, as two operators, instead of running around it.

[Note: inlined hooks] Hooks around a compiled region run when its forward is over, and again before its backward begins:
all that the region saves is there at once, exactly. Hooks that are FX graph modules are traced into its graphs instead,
where the compiler may pack a tensor after its last use and unpack it before the first. What they trace to is an
operator that calls the engine whose hooks are on. The width comes from the current plan and the random bits from the
step, so neither is a constant of the graph: blocks share one graph, and no adaptation triggers a recompilation. The
price is a buffer whose size is known only once it exists, an unbacked size to the compiler. Parameters, and what a
graph computes from parameters and buffers alone (autocast's casts), are not packed; the graph shows which these are.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from .. import codec
from .._torch_internals import graphs_being_made, hooks_in_graphs, is_being_noted, static_inputs, storage_id
from ..config import Config
from ..distributed import sharding


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


class _Packer(NamedTuple):
    """The engine whose hooks are on."""

    around: Callable[[Tensor], Any]
    """packs what an operator outside of compiled regions saves, to a handle"""
    inside: Callable[[Tensor, str, bool], codec.Packed]
    """packs what a region's graph saves: its label in that graph, whether that saves the same memory twice"""


class _Serving(threading.local):
    """The packers of this thread, innermost last: hooks are thread-local too."""

    def __init__(self) -> None:
        self.packers: list[_Packer] = []


_serving = _Serving()


@contextmanager
def serving(around: Callable[[Tensor], Any], inside: Callable[[Tensor, str, bool], codec.Packed]) -> Iterator[None]:
    """Within the context hooks() hand tensors to these two (see _Packer), and regions are compiled accordingly."""
    _serving.packers.append(_Packer(around, inside))
    try:
        with hooks_in_graphs():
            yield
    finally:
        _serving.packers.pop()


@cache
def hooks() -> tuple[GraphModule, GraphModule]:
    """The pack and the unpack hook: always the same two, for every compiled graph is guarded on their identity."""
    return _graph_module(_pack, _PACK), _graph_module(_unpack, None)


def _graph_module(function: Callable[[Any], Any], mark: Any) -> GraphModule:
    """A graph module that runs a Python function; the mark stands in its graph, and so in the compiler's cache key."""
    graph = Graph()
    value = graph.placeholder("value")
    graph.output(value if mark is None else graph.call_function(mark, (value, "", False)))
    module = GraphModule({}, graph)
    call = torch.compiler.disable(function)  # where a graph breaks the compiler would compile the hooks as well
    setattr(type(module), "__call__", lambda _, value: call(value))  # noqa: B010 (each graph module has its own class)
    return module


def _pack(tensor: Tensor) -> Any:
    graphs = graphs_being_made()
    if graphs is None:
        return _serving.packers[-1].around(tensor)
    saved = graphs["_node"]
    if _is_static(saved):
        return tensor
    packed = _PACK(tensor, _label(saved), _is_alias(saved))
    return *packed, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _unpack(packed: Any) -> Tensor:
    graphs = graphs_being_made()
    if graphs is None:
        return packed.restore()
    _place(graphs["_node"], graphs["_bw_graph"])
    if isinstance(packed, Tensor):
        return packed
    buffer, header, dtype, size, stride = packed
    return _UNPACK(buffer, header, dtype, size, stride)


def _place(saved: Node, backward: Graph) -> None:
    """Pack right after a value's last use in forward, unpack right before the first one in backward.

    torch puts the first at the end of its graph, the second at the start, where the compiler leaves them.
    """
    uses = [user for user in saved.users if user.target is not _PACK and user.op != "output"]
    last = max(uses, default=saved)
    inputs = saved.graph.find_nodes(op="placeholder")
    for pack in [user for user in saved.users if user.target is _PACK]:
        results = sorted(pack.users)
        for node in reversed([pack, *results]):
            max(last, inputs[-1]).append(node)
    # of this value it is not there yet: it will be in its place when the next one is looked at
    for unpack in backward.find_nodes(op="call_function", target=_UNPACK):
        min(unpack.users).prepend(unpack)


def _is_static(saved: Node) -> bool:
    """Whether a value is computed from the graph's static inputs alone, which are parameters and buffers."""
    static = static_inputs(sys._getframe(1))
    inputs = {node: number for number, node in enumerate(saved.graph.find_nodes(op="placeholder"))}
    pending, seen, found = [saved], {saved}, False
    while pending:
        node = pending.pop()
        if node in inputs:
            if inputs[node] not in static:
                return False
            found = True
        fresh = [below for below in node.all_input_nodes if below not in seen]
        seen.update(fresh)
        pending += fresh
    return found


def _handed_out(graph: Graph) -> list[Node]:
    """What a graph returns: results, then what it saves for backward."""
    returned: Any = graph.output_node().args[0]
    return [node for node in returned if isinstance(node, Node)]


def _label(saved: Node) -> str:
    """How it looks, and its number among those of the same look that the graph hands out."""
    handed_out = _handed_out(saved.graph)
    last = len(handed_out) - 1 - handed_out[::-1].index(saved)
    look = _look(saved)
    number = sum(_look(node) == look for node in handed_out[:last])
    return look + (f".{number}" if number else "")


def _is_alias(saved: Node) -> bool:
    """Whether the graph hands out the same memory under another node before this one."""
    value = saved.meta["val"]
    for node in _handed_out(saved.graph):
        if node is saved:
            return False
        other = node.meta["val"]
        if isinstance(other, Tensor) and other.numel() == value.numel() and other.dtype == value.dtype:
            same_start = other.storage_offset() == value.storage_offset()
            if same_start and storage_id(other) == storage_id(value):
                return True
    return False


def _look(node: Node) -> str:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return "Size"
    last = value.shape[-1] if value.dim() else 1
    return f"Compiled{value.dim()}D{last if isinstance(last, int) else 'N'}"


# -- the operators ----------------------------------------------------------------------------------------------


def _pack_saved(tensor: Tensor, label: str, alias: bool) -> tuple[Tensor, Tensor]:
    return codec.to_tensors(_serving.packers[-1].inside(tensor, label, alias))


def _unpack_saved(buffer: Tensor, header: Tensor, dtype: torch.dtype, size: list[int], stride: list[int]) -> Tensor:
    return codec.from_tensors(buffer, header, dtype, torch.Size(size), tuple(stride))


def _fake_pack_saved(tensor: Any, label: str, alias: bool) -> tuple[Tensor, Tensor]:
    shapes = tensor.fake_mode.shape_env
    # besides tracing a hook, the compiler calls it twice without noting what it returns
    unnoted = graphs_being_made() is not None and not is_being_noted()
    with shapes.ignore_fresh_unbacked_symbols() if unnoted else nullcontext():
        size = shapes.create_unbacked_symint()
    torch._check(size >= 0)
    return tensor.new_empty(size, dtype=torch.uint8), torch.empty(4, dtype=torch.int64, device="cpu")


def _fake_unpack_saved(buffer: Tensor, header: Tensor, dtype: torch.dtype, size: Any, stride: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=buffer.device)


_library = torch.library.Library("gact_dist", "FRAGMENT")
# Two results of one call differ (another step), and a recorded CUDA graph would keep the step of its recording.
_library.define(
    "pack_saved(Tensor tensor, str label, bool alias) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
_library.define(
    "unpack_saved(Tensor buffer, Tensor header, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor"
)
_library.impl("pack_saved", _pack_saved, "CompositeExplicitAutograd")
_library.impl("unpack_saved", _unpack_saved, "CompositeExplicitAutograd")
torch.library.register_fake("gact_dist::pack_saved", _fake_pack_saved, lib=_library)
torch.library.register_fake("gact_dist::unpack_saved", _fake_unpack_saved, lib=_library)
_PACK = torch.ops.gact_dist.pack_saved.default
_UNPACK = torch.ops.gact_dist.unpack_saved.default
