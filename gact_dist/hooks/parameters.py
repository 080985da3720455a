"""Which saved tensors are parameters or buffers, or computed from parameters alone: they are kept as they are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch_internals import raw_slot, saved_handle, saved_handles, storage_id, storage_reference
from ..distributed import own_part, unwrap
from .accounting import parts_of
from .handles import Kept, Noted, Replaceable, Stored
from .naming import operator_name
from .way import Way, find_way

_VIEWS_AND_CASTS = frozenset({
    "T", "Numpy_T", "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "ToCopy", "Split", "SplitWithSizes",
    "Slice", "Select", "Squeeze", "Unsqueeze", "Expand", "Alias", "AsStrided", "Unbind", "Clone", "Chunk", "Narrow",
})  # fmt: skip
_PARAMETER_ARITHMETIC = frozenset({
    "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Abs", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Pow",
    "Reciprocal", "Sigmoid", "Tanh", "Softplus", "Softmax", "Clamp", "ClampMin", "ClampMax", "Tril", "Triu", "Sum",
    "Mean", "Std", "Var", "VarMean", "StdMean", "Norm", "LinalgVectorNorm", "WeightNormInterface", "BatchNorm",
    "LayerNorm", "Cat", "Stack", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Dot",
})  # fmt: skip
_SUMS = frozenset({"Add", "Sub", "Rsub"})
_PRODUCTS = frozenset({"Mul", "Div"})
_MOST_NODES = 64
FROM_ACTIVATIONS = "gact_dist: computed from activations"
"""in a node's metadata"""
_LEAF = "torch::autograd::AccumulateGrad"
_MAY_KEEP_PARAMETERS = _VIEWS_AND_CASTS | _PARAMETER_ARITHMETIC | {_LEAF}
"""the operators whose result is made from parameters if their operands are"""


def made_from_parameters(node: Any) -> bool:
    """Whether everything below an autograd node is a view, a cast or arithmetic on parameters: an average, a low-rank
    update of a weight, its spectral norm. See [Note: operands without a graph]."""
    if node is None or not may_be_from_parameters(node):
        return False
    made = _is_made_from_parameters(node)
    if not made:
        node.metadata[FROM_ACTIVATIONS] = True  # so that those which are computed from it are known at once
    return made


def is_parameter_or_view(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one: a transposed weight, mostly."""
    if type(tensor) is nn.Parameter:
        return True
    base = tensor._base
    return type(base) is nn.Parameter and base.grad_fn is None


def may_be_from_parameters(node: Any) -> bool:
    """Whether a node of this type may make a tensor from parameters alone. node: None for a tensor without a graph."""
    return node is None or operator_name(node.name()) in _MAY_KEEP_PARAMETERS


class Evidence(NamedTuple):
    """Where a look shows that something is not made from parameters alone, in each step's graph anew.

    What is computed from a node that was seen at the end of a way has the note in its own metadata from then on.
    """

    way: Way
    by_type: bool
    """whether the last node's type shows it"""
    slot: str | None = None
    """attribute in which the last node has saved a factor that is stored, of several elements and without a graph,
    which shows it"""
    edge: int = 0
    """of that factor"""
    # neither: a note in the last node's metadata shows it, of what was computed from it


def evidence_of_activations(node: Any) -> Evidence | None:
    """Such a place for what a node made; None where only all of its operands tell."""

    def shows(found: Any) -> bool:
        if not may_be_from_parameters(found) or (found is not node and _is_from_activations(found)):
            return True
        return _stored_factor(found) is not None

    def deciding(found: Any) -> list[Any]:
        operator = operator_name(found.name())
        if operator in _VIEWS_AND_CASTS:
            return [found.next_functions[0][0]]
        return [] if operator == _LEAF else _operands(found, operator)

    way = None if node is None else find_way(node, lambda found: found is not None and shows(found), deciding)
    if way is None:
        return None
    last = (way.follow(node) or [None])[-1]
    by_type = not may_be_from_parameters(last)
    return Evidence(way, by_type, *(() if by_type else _stored_factor(last) or ()))


def _stored_factor(node: Any) -> tuple[str, int] | None:
    """The slot and edge of a node's factor that is no part of the model, as dropout's noise: see _operands()."""
    if operator_name(node.name()) not in _PRODUCTS:
        return None
    for edge, (slot, (below, _)) in enumerate(zip(("self", "other"), node.next_functions, strict=False)):
        handle = saved_handle(node, slot) if below is None else None
        if type(handle) is Stored and not _is_constant(handle):
            return raw_slot(slot), edge
    return None


def _is_from_activations(node: Any) -> bool:
    """Whether that is known of a node without a look at its operands."""
    return not may_be_from_parameters(node) or FROM_ACTIVATIONS in node.metadata


def _is_made_from_parameters(node: Any) -> bool:
    pending, left = [node], _MOST_NODES
    while pending:
        node = pending.pop()
        if node is None:
            return False
        operator = operator_name(node.name())
        if operator == _LEAF:
            if not isinstance(node.variable, nn.Parameter):
                return False
            continue
        if FROM_ACTIVATIONS in node.metadata:
            return False
        left -= 1
        if operator in _VIEWS_AND_CASTS:
            pending.append(node.next_functions[0][0])
        elif left > 0 and operator in _PARAMETER_ARITHMETIC:
            operands = _operands(node, operator)
            if not operands or any(map(_is_from_activations, operands)):
                return False
            pending.extend(operands)
        else:
            return False
    return True


def _operands(node: Any, operator: str) -> list[Any]:
    """The nodes of the operands that decide whether a result is made from parameters; none if it is not.

    [Note: operands without a graph] A number, a buffer, a frozen weight and an input of the model alike appear in
    next_functions as None. What the node saved tells them apart where it is a product: x * weight saves x. A sum saves
    nothing; but what is added to a weight has its shape, and an input of the model has that of a batch. Nor does it
    matter what a whole weight is scaled by.
    """
    edges = node.next_functions
    if operator in _PRODUCTS and len(edges) == 2:
        rest = [edge for edge in edges if edge[0] is None or not _is_scalar(edge)]
        edges = rest or edges
    operands = [below for below, _ in edges if below is not None]
    if len(operands) == len(edges) or not operands:
        return operands
    if operator in _SUMS:
        own = _shape(node, 0)
        same = [edge for edge in edges if edge[0] is not None and _shape(*edge) == own]
        return operands if own is not None and same else []
    if operator in ("Cat", "Stack"):
        return []
    return operands if all(_is_constant(handle) for handle in _saved_handles(node)) else []


def _shape(node: Any, output_number: int) -> Any:
    metadata = getattr(node, "_input_metadata", ())
    if output_number < len(metadata):
        return tuple(metadata[output_number].shape)
    return tuple(node.variable.shape) if hasattr(node, "variable") else None


def _is_scalar(edge: tuple[Any, int]) -> bool:
    return _shape(*edge) == ()


def _saved_handles(node: Any) -> list[Any]:
    """What a node holds of the tensors that it saved; nothing for a number."""
    return [handle for _, handle in saved_handles(node)]


def _is_constant(handle: Any) -> bool:
    """Whether a saved operand without a graph is part of the model, or has one element."""
    if isinstance(handle, Kept):
        return handle.of_model
    if isinstance(handle, Tensor):
        return isinstance(handle, nn.Parameter) or isinstance(handle._base, nn.Parameter) or handle.numel() == 1
    if isinstance(handle, Stored):
        return handle.payload.shape.numel() == 1
    return isinstance(handle, (Replaceable, Noted)) and handle.numel == 1


class ParameterRecognition:
    """Recognises parameters and buffers, and what is computed from them, among the tensors that autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self.owned: set[int] = set()
        """storage_id() of what is the model's"""
        self._weak: list[Any] = []
        self.remember(model.buffers())
        self.of_buffers = set(self.owned)
        """the same of its buffers"""
        self.remember(model.parameters())

    def remember(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that live as long as the model; held weakly, so that sharding may free their storage."""
        for tensor in tensors:
            if is_lazy(tensor):  # without memory yet
                continue
            for part in parts_of(own_part(tensor)):  # this is what a compiled region saves, without a graph
                if part.untyped_storage().nbytes():
                    self._weak.append(storage_reference(part))
                    self.owned.add(storage_id(part))

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a parameter or a buffer."""
        if isinstance(tensor, nn.Parameter):
            return True
        return all(storage_id(part) in self.owned for part in parts_of(tensor))

    def is_buffer(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is that of a buffer."""
        return type(tensor) is Tensor and storage_id(tensor) in self.of_buffers

    @contextmanager
    def with_buffers(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model's present buffers count as well: the clones that replace its own during a
        measurement. See [Note: isolation] in sensitivity/isolation.py."""
        owned, weak = set(self.owned), list(self._weak)
        self.remember(unwrap(model).buffers())
        try:
            yield
        finally:
            self.owned, self._weak = owned, weak

    def is_parameter(self, tensor: Tensor, module: nn.Module | None) -> bool:
        """Whether a saved tensor is a parameter or buffer, a view of one, or computed from parameters only.

        module: the one whose forward is running; autocast copies of its frozen weights carry no graph and are
        recognised by shape and type against its own parameters.
        """
        if is_parameter_or_view(tensor) or (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)):
            return True
        node, base = tensor.grad_fn, tensor._base
        if node is not None:
            return may_be_from_parameters(node) and made_from_parameters(node)
        if base is not None and isinstance(base, nn.Parameter):
            return True
        if storage_id(tensor) in self.owned:
            return True
        if tensor.requires_grad:
            return False
        return module is not None and _is_cast_of_frozen(tensor, module)


def _is_cast_of_frozen(tensor: Tensor, module: nn.Module) -> bool:
    for parameter in module._parameters.values():
        if parameter is None or parameter.requires_grad or parameter.dtype == tensor.dtype:
            continue
        if sorted(own_part(parameter).shape) == sorted(tensor.shape):
            return True
    return False
