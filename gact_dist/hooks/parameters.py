"""Which saved tensors are parameters or buffers, or computed from parameters alone: they are kept as they are."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch_internals import storage_id, storage_reference
from ..distributed import own_part, unwrap
from .naming import operator_name

_VIEWS_AND_CASTS = frozenset({
    "T", "Numpy_T", "View", "UnsafeView", "ReshapeAlias", "Transpose", "Permute", "ToCopy", "Split", "SplitWithSizes",
    "Slice", "Select", "Squeeze", "Unsqueeze", "Expand", "Alias", "AsStrided", "Unbind", "Clone", "Chunk", "Narrow",
})  # fmt: skip
_PARAMETER_ARITHMETIC = frozenset({
    "Mul", "Div", "Add", "Sub", "Neg", "Exp", "Sqrt", "Rsqrt", "Pow", "Reciprocal", "Sigmoid", "Tanh", "Softplus",
    "Sum", "Norm", "LinalgVectorNorm", "WeightNormInterface",
})  # fmt: skip
_DEPTH = 6


def made_from_parameters(node: Any, depth: int = _DEPTH) -> bool:
    """Whether everything below an autograd node is a view, a cast or arithmetic on parameters.

    An input that needs no gradient appears in next_functions as None, so x * weight is not mistaken for a parameter.
    """
    if node is None or depth == 0:
        return False
    operator = operator_name(node.name())
    if operator == "torch::autograd::AccumulateGrad":
        return isinstance(node.variable, nn.Parameter)
    if operator in _VIEWS_AND_CASTS:
        return made_from_parameters(node.next_functions[0][0], depth)
    if operator in _PARAMETER_ARITHMETIC:
        return all(made_from_parameters(below, depth - 1) for below, _ in node.next_functions)
    return False


class ParameterRecognition:
    """Recognises parameters and buffers, and what is computed from them, among the tensors that autograd saves."""

    def __init__(self, model: nn.Module) -> None:
        self._owned: set[int] = set()
        self._weak: list[Any] = []
        self.remember([*model.parameters(), *model.buffers()])

    def remember(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that live as long as the model; held weakly, so that sharding may free their storage."""
        for tensor in tensors:
            if is_lazy(tensor) or tensor.layout != torch.strided:  # without memory yet, or without a single storage
                continue
            part = own_part(tensor)  # this is what a compiled region saves, without a graph
            if part.untyped_storage().nbytes():
                self._weak.append(storage_reference(part))
                self._owned.add(storage_id(part))

    @contextmanager
    def with_buffers(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model's present buffers count as well: the clones that replace its own during a
        measurement. See [Note: isolation] in sensitivity/isolation.py."""
        owned, weak = set(self._owned), list(self._weak)
        self.remember(unwrap(model).buffers())
        try:
            yield
        finally:
            self._owned, self._weak = owned, weak

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with a parameter or buffer of the model."""
        return isinstance(tensor, nn.Parameter) or storage_id(tensor) in self._owned

    def is_parameter(self, tensor: Tensor, module: nn.Module | None) -> bool:
        """Whether a saved tensor is a parameter or buffer, a view of one, or computed from parameters only.

        module: the one whose forward is running; autocast copies of its frozen weights carry no graph and are
        recognised by shape and type against its own parameters.
        """
        if isinstance(tensor, nn.Parameter):
            return True
        if tensor.grad_fn is not None:
            return made_from_parameters(tensor.grad_fn)
        if tensor.requires_grad or isinstance(tensor._base, nn.Parameter):
            return True
        if storage_id(tensor) in self._owned:
            return True
        return module is not None and _is_cast_of_frozen(tensor, module)


def _is_cast_of_frozen(tensor: Tensor, module: nn.Module) -> bool:
    for parameter in module._parameters.values():
        if parameter is None or parameter.requires_grad or parameter.dtype == tensor.dtype:
            continue
        if sorted(own_part(parameter).shape) == sorted(tensor.shape):
            return True
    return False
