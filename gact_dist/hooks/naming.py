"""Names of saved tensors: module path, operator and occurrence, the same in every step, on every rank, after a resume.

[Note: names] A name is built from where a tensor is saved (the module whose forward is running and the line in it)
and from what produced it (the autograd node, views passed over). Order of saving plays a part only among tensors that
agree in all of these, so a branch that is taken in one step and not in the next shifts no other name. At top level
(outside every module of the model) the line is left out: the job's loop and its loss function then give one name. What
a backward with create_graph=True saves has the line of its call, at top level too: a penalty that is left out of some
steps, or one of two, then shifts no other name. A job's loop and its loss function call it in a function they share.
"""

import re
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_dynamo_compiling
from torch.jit import RecursiveScriptModule
from torch.nn.utils.parametrize import ParametrizationList

from .._torch_internals import storage_id, storage_reference
from ..distributed import forwarding_nodes, modules_by_path, operator_aliases, own_part
from .accounting import parts_of
from .call_stack import CallSite, current_line, is_users
from .own_hooks import Calling, OwnHook, after_forward, before_forward

_ALIASES = {
    "CudnnBatchNorm": "BatchNorm",
    "MiopenBatchNorm": "BatchNorm",
    "NativeBatchNorm": "BatchNorm",
    "NativeLayerNorm": "LayerNorm",
    "NativeGroupNorm": "GroupNorm",
    "FusedRmsNorm": "RmsNorm",
    **operator_aliases(),
}

Entry = tuple[str, nn.Module]
"""a module with its path"""

_OTHER, _PLUMBING, _LAYER = range(3)
_LAYERS = frozenset(
    kind.forward.__code__
    for kind in vars(nn).values()
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind.forward.__code__.co_varnames in (("self", "input"), ("self", "x"))
    and kind.forward is not nn.Module.forward
) | {nn.BatchNorm2d.forward.__code__}
"""of layers of torch.nn, whose frames hold no tensor but the input: one that is looked into may hold it longer"""
_FORWARD_OF_LAYERS = {kind.forward.__code__: kind._conv_forward.__code__ for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
"""of some, what does the work"""
_IN_LAYERS = _LAYERS | set(_FORWARD_OF_LAYERS.values())
LEAVES_CHECKPOINT = "LeavesCheckpointBackward"
"""the node by which a measurement tells what a checkpoint hands out from the same tensor in it"""
FORWARDING = forwarding_nodes() | {LEAVES_CHECKPOINT}
"""names of nodes that only hand on what another has made"""
_RESHAPE, _LINEAR = "UnsafeViewBackward0", "AddmmBackward0"
WORKSPACE = "Workspace"
"""in place of an operator, in the name of what an operator saves that it alone can read"""
RECOMPUTED = "~"
"""after the operator, in the name of what is saved inside of a checkpointed block"""


@cache
def operator_name(node_name: str) -> str:
    """The operator behind an autograd node's name: 'NativeLayerNormBackward0' -> 'LayerNorm'."""
    operator = re.sub(r"Backward\d*$", "", node_name)
    if operator.startswith("ScaledDotProduct"):
        return "ScaledDotProductAttention"
    return _ALIASES.get(operator, operator)


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether a module is a layer of torch.nn, with no other in it and the forward of torch's class."""
    forward = _code_of(module, "forward")
    if module._modules or "forward" in vars(module) or forward not in _LAYERS:
        return False
    return forward not in _FORWARD_OF_LAYERS or _code_of(module, "_conv_forward") is _FORWARD_OF_LAYERS[forward]


def _code_of(module: nn.Module, method: str) -> CodeType | None:
    """None where a class has no such method of Python's, as what is traced has no forward."""
    return getattr(getattr(type(module), method, None), "__code__", None)


class _Enter(OwnHook):
    """Before a module's forward."""

    __slots__ = ("_entry", "_stack")

    def __init__(self, stack: list[Entry], entry: Entry) -> None:
        self._stack, self._entry = stack, entry

    def __call__(self, *_: Any) -> None:
        if not is_dynamo_compiling():
            self._stack.append(self._entry)


class _Leave(OwnHook):
    """After a module's forward."""

    __slots__ = ("_entry", "_scope")

    def __init__(self, scope: "ModuleScope", entry: Entry) -> None:
        self._scope, self._entry = scope, entry

    def __call__(self, *call: Any) -> None:
        if is_dynamo_compiling():
            return
        scope = self._scope
        if scope.readers is not None:
            scope.readers.examine(call[-1])
        # pop to this module's own entry: a child whose forward raised and was caught may have left some behind
        stack = scope.stack
        while stack and stack.pop() is not self._entry:
            continue


class ModuleScope:
    """Keeps track of which module of a model is running its forward, by hooks that are removed with remove().

    A layer of torch.nn has no hooks, whose time would fall on one or two saved tensors: within() finds it in the frame
    of its forward. What a user's hook on it saves has its parent's name.
    In a compiled region the hooks are not there: nothing breaks its graph, and what it saves has the region's name.
    compiled: the model has such regions. The compiler would then guard on hooks that also run after an exception, and
    recompile every module; without them a name may be off in a step in which a module raised and its caller went on.
    """

    def __init__(self, model: nn.Module, compiled: bool) -> None:
        self.compiled = compiled
        self.readers: Any = None
        """are shown what each module returns; see readers.py"""
        self.stack: list[Entry] = []
        self.paths: dict[int, str] = {}
        self.made: dict[int, Any] = {}
        """storages that parametrizations have made weights in, in this step, with a reference to each"""
        self.parametrized = False
        """whether any module is a parametrization"""
        self.unhooked: dict[int, Entry] = {}
        """layers without hooks, by id"""
        self._codes: dict[int, tuple[CodeType, int]] = {}
        self._handles = []
        for path, module in modules_by_path(model):
            entry = (path, module)
            self.paths[id(module)] = entry[0]
            self.parametrized |= "parametrizations." in path
            if isinstance(module, RecursiveScriptModule):
                continue  # takes no hooks; what it saves has its caller's name
            if not compiled and _is_plain_layer(module):
                self.unhooked[id(module)] = entry
                continue
            if isinstance(module, ParametrizationList):
                self._handles.append(after_forward(module, Calling(self._note_made)))
            self._handles.append(before_forward(module, _Enter(self.stack, entry)))
            self._handles.append(after_forward(module, _Leave(self, entry), always_call=not compiled))

    def _note_made(self, _: nn.Module, __: Any, weight: Any) -> None:
        if isinstance(weight, Tensor) and not is_dynamo_compiling():
            for part in parts_of(own_part(weight)):
                self.made[storage_id(part)] = storage_reference(part)

    def within(self, frame: FrameType | None, pack: Callable[[Tensor, Any], Any], tensor: Tensor) -> Any:
        """What pack(tensor, frame) returns, in the module whose forward is saving. frame: of the pack hook's caller."""
        entry = self.unhooked_at(frame) if self.unhooked else None
        if entry is None:
            return pack(tensor, frame)
        self.stack.append(entry)
        try:
            return pack(tensor, frame)
        finally:
            self.stack.pop()

    def unhooked_at(self, frame: FrameType | None) -> Entry | None:
        """The layer without hooks whose forward is running."""
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                kind = _PLUMBING if not is_users(code) else _LAYER if code in _IN_LAYERS else _OTHER
                known = self._codes[id(code)] = (code, kind)
            if known[1] is _OTHER:
                return None
            if known[1] is _LAYER:
                return self.unhooked.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return None

    @property
    def makes_a_weight(self) -> bool:
        """Whether a parametrization is running: all that it saves is made from parameters."""
        return bool(self.stack) and "parametrizations." in self.stack[-1][0]

    @property
    def innermost(self) -> nn.Module | None:
        """The module whose forward is running; None outside of the model."""
        return self.stack[-1][1] if self.stack else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.unhooked.clear()
        self.stack.clear()
        self.made.clear()


class Series:
    """Names that differ in their number alone."""

    __slots__ = ("count", "names")

    def __init__(self) -> None:
        self.count = 0
        """of those that the step has given out"""
        self.names: list[str] = []
        """in order of occurrence"""


class Namer:
    """Gives each saved tensor of one step its name; reset() starts the next step."""

    def __init__(self, scope: ModuleScope, recomputed: bool = False) -> None:
        """recomputed: whether what is named is saved inside of a checkpointed block."""
        self.scope, self.recomputed = scope, recomputed
        self._series: dict[tuple, Series] = {}
        self.latest = Series()
        """of the name that was given last"""

    def reset(self) -> None:
        for series in self._series.values():
            series.count = 0
        self.scope.stack.clear()
        self.scope.made.clear()

    def block_input(self, site: CallSite) -> str:
        """The name of a checkpointed block's input that is being saved right now: compiled or not, reentrant or not."""
        return self._numbered(self._path, "BlockInput", site.line)

    def bypassing(self, operator: str) -> str:
        """The name of what a checkpoint keeps past all hooks, of a call or an operator that is running right now."""
        return self._numbered(self._path, operator, current_line())

    def place(self, site: CallSite, function: str) -> str:
        """The name of the place that calls a custom function right now; of no tensor."""
        return _spell(self._path, f"{function}()", site.line, 0)

    def name_of_operand(self, site: CallSite, function: str) -> str:
        """The name of an input of a custom function whose memory another operator has stored rounded."""
        return self._numbered(self._path, f"{function}Input", site.line)

    def kept(self, kind: str, site: CallSite) -> str:
        """The name of a tensor of a kind that is always kept exactly. It takes no number from the others."""
        return self._numbered(self._path, kind, None if self._path is None and not site.in_backward else site.line)

    def name(self, tensor: Tensor, site: CallSite) -> str:
        """The name of a tensor that is being saved right now. See [Note: names]."""
        if site.region is not None:
            # In order of saving, which a compiled graph fixes, among those that look alike: what else it saves (views
            # of parameters), and what produced its inputs, differs between wrappers.
            last = tensor.shape[-1] if tensor.dim() else 1
            return self._numbered(self.scope.paths.get(id(site.region)), f"Compiled{tensor.dim()}D{last}", None)
        node, name = _producer_with_name(origin(tensor))
        # the input of a pipeline stage, or of a gradient penalty, takes no number from the others
        given = "Leaf" if tensor.requires_grad else "Input"
        operator = given if node is None else operator_name(name)
        operator = WORKSPACE if site.workspace else operator
        stack = self.scope.stack
        if stack:
            return self._numbered(stack[-1][0], operator, site.line)
        return self._numbered(None, operator, site.line if site.in_backward else None)

    def name_in_graph(self, region: nn.Module | None, label: str) -> str:
        """The name of a tensor that the graph of a compiled region packs itself. label: its own within that graph."""
        return self._numbered(self.scope.paths.get(id(region)), label, None)

    @property
    def _path(self) -> str | None:
        return self.scope.stack[-1][0] if self.scope.stack else None

    def _numbered(self, path: str | None, operator: str, site: str | None) -> str:
        if self.recomputed:
            operator += RECOMPUTED
        key = (path, operator, site)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
        self.latest, occurrence, names = series, series.count, series.names
        series.count = occurrence + 1
        if occurrence == len(names):
            names.append(_spell(path, operator, site, occurrence))
        return names[occurrence]


def producer(tensor: Tensor) -> Any:
    """The node that computed a tensor, past the nodes by which wrappers pass inputs and outputs on.

    The result of a linear layer of more than two dimensions is no view of the product in every torch (2.15).
    """
    return _producer_with_name(tensor)[0]


def _producer_with_name(tensor: Tensor) -> tuple[Any, str]:
    node = tensor.grad_fn
    if node is None:
        return None, ""
    name = node.name()
    if name in FORWARDING:
        number = tensor.output_nr
        while name in FORWARDING:
            below = node.next_functions
            node, number = below[number] if number < len(below) else below[-1]
            if node is None:
                return None, ""
            name = node.name()
    if name == _RESHAPE:
        product: Any = node.next_functions[0][0]
        if product is not None and product.name() == _LINEAR:
            return product, _LINEAR
    return node, name


def passes_on(node: Any) -> bool:
    """Whether a node only hands on what another has made."""
    return node.name() in FORWARDING


def _spell(path: str | None, operator: str, site: str | None, occurrence: int) -> str:
    where = f"@{site}" if site else ""
    return f"{path or ''}:{operator}{where}" + (f"#{occurrence}" if occurrence else "")


def origin(tensor: Tensor) -> Tensor:
    """The tensor that an operator computed and of which this one is a view; the tensor itself if it is no view."""
    base = tensor._base if tensor._is_view() else None
    return base if base is not None and base.grad_fn is not None else tensor


def edge_to(source: Tensor) -> tuple[Any, int]:
    """(node, number of its output) that a tensor's gradient flows to: of a leaf what accumulates it; None without a
    graph."""
    if source.grad_fn is None and not source.requires_grad:
        return None, 0
    return get_gradient_edge(source)[:2]
