"""Which operator is running while a tensor is saved, and what that says of a tensor that carries no graph.

[Note: roles] A tensor with a graph says itself what produced it. One without may be an input or a frozen activation
(compressible), a statistic such as an attention's logsumexp or an attention mask (to be kept exactly), or the noise of
a dropout (two values: 1 bit). autograd does not tell a pack hook which operator saves; a torch function mode does. The
mode costs a few microseconds an operator, so it is on only in steps that met a tensor without a known role; the role
is then remembered by name.

[Note: masks] An additive mask holds zeros, or ordinary scores, beside values such as -1e4, -1e9 or -inf. In a group of
both, rounding leaves nothing of the ordinary ones. Values are not looked at: that would wait for the device, and
the batch that is seen first may have no padding. In an observed step the mode sees who writes such a number into a
tensor (masked_fill, where, full, a product), and what is made of that by sums, casts and copies. A block's input that
has no graph is exact anyway: a mask of the data loader is one, and all blocks share its memory.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .. import codec
from .._torch_internals import (
    PLAIN_OR_PARAMETER,
    is_fake,
    is_inside_transform,
    node_of,
    saves_own_result,
    storage_id,
    storage_reference,
    without_modes,
)
from .attention_calls import WRAPPER, mask_given
from .hidden_scores import may_hide, note_hiding


class Role(Enum):
    """What a saved tensor without a graph is to its operator."""

    ACTIVATION = "activation"  # an operand: compressible
    STATISTIC = "statistic"  # made inside the operator, or an attention mask: kept exactly
    BINARY = "binary"  # dropout noise: zero or one other value
    SIGN = "sign"  # what relu itself saves: only where it is positive is read
    ONE_BIT = "one bit"  # of other operators that read one bit of each element: see one_bit.py
    LOG_SOFTMAX = "log-softmax"  # of which exp() alone is read: see log_softmax.py
    UNREAD = "unread"  # an activation until it shows who reads it: see readers.py

    @property
    def is_one_bit(self) -> bool:
        """Whether no more than one bit of each element is kept, of which no recipe is made."""
        return self in (Role.SIGN, Role.ONE_BIT)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """What torch.nn.functional has now, which may be a wrapper."""
    return F.scaled_dot_product_attention(*args, **kwargs)


def _with_interception(function: Callable) -> FunctionType:
    """A copy of a composite Python function of torch that does not dispatch to the mode, so that its parts do."""
    own = {"has_torch_function": lambda *_: False, "scaled_dot_product_attention": _attention}
    scope = {**function.__globals__, **own}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_COMPOSITES = {F.multi_head_attention_forward: _with_interception(F.multi_head_attention_forward)}

BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""what a call of a backward is to a function mode"""

_ATTENTION = F.scaled_dot_product_attention  # itself: see attention_calls.py
_NORMALISATIONS = {F.layer_norm, F.batch_norm, F.group_norm, F.instance_norm, F.rms_norm, F.local_response_norm}


def _named(*names: str) -> frozenset[Callable]:
    return frozenset(getattr(owner, name) for owner in (torch, Tensor) for name in names if hasattr(owner, name))


_RECURRENT = _named("lstm", "gru", "rnn_tanh", "rnn_relu")
"""a network of several layers, with dropout between them"""

_MASK_VALUE = 1e4
"""what is at least so far from zero stands for "not at all" where it is written into a mask"""

_MASK_MAKERS = _named(
    "masked_fill", "masked_fill_", "where", "full", "full_like", "new_full", "fill_", "mul", "mul_", "multiply",
    "__mul__", "__rmul__", "__imul__", "tensor", "new_tensor", "scalar_tensor",
)  # fmt: skip
_MASK_CARRIERS = _MASK_MAKERS | _named(
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "div", "div_",
    "__truediv__", "neg", "__neg__", "to", "type", "type_as", "float", "half", "bfloat16", "double", "clone",
    "contiguous", "reshape", "flatten", "repeat", "repeat_interleave", "cat", "stack", "triu", "tril", "triu_", "tril_",
    "minimum", "maximum", "__getitem__", "__setitem__", "copy_", "index_select", "gather", "roll",
)  # fmt: skip


_DISCRETE = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "topk", "sort", "argsort", "argmax",
        "argmin", "kthvalue", "multinomial", "bincount", "item", "tolist", "__bool__", "__int__", "__float__",
        "__index__",
    )
    if hasattr(owner, name)
)  # fmt: skip
"""Functions whose results, or the shapes of their results, jump when their operands change a little."""


Instruction = tuple[int, int]
"""(id of a code object, where in it)"""

_COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)
_NORMALISATION_NODES = ("NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0")
_NEXT_TO_LOSS = "LogSoftmaxBackward0"


def role_of_itself(tensor: Tensor) -> Role | None:
    """The role of a floating tensor as far as its type, its shape and the node that made it tell."""
    shape = tensor.shape
    if tensor.dtype not in _COMPRESSIBLE or tensor.numel() == 1 or (len(shape) > 1 and shape[-1] == 1):
        # a last dimension of one is what a reduction leaves behind, and one element takes more room packed
        return Role.STATISTIC
    node = tensor.grad_fn
    if node is None:
        return None
    operator = node.name()
    if operator == _NEXT_TO_LOSS or (operator in _NORMALISATION_NODES and tensor.output_nr > 0):
        return Role.STATISTIC
    return Role.ACTIVATION


def is_own_relu_save(tensor: Tensor) -> bool:
    """Whether relu itself is saving its result; its backward needs only to know where that is positive.

    At that moment, and at no other, the node's own slot for the result is still empty. Rounding would set small
    positive values to zero and so bias the gradient. So relu keeps a mask beside what the next operator stores.
    """
    node: Any = tensor.grad_fn
    return node is not None and node.name() == "ReluBackward0" and saves_own_result(node)


class OperatorObserver(TorchFunctionMode):
    """Knows which operator is being called, and with which operands."""

    def __init__(self, on_discrete: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._calls: list[tuple[Callable, tuple, dict]] = []
        self._masks: dict[int, Any] = {}  # weak references to storages with mask values, by their ids
        self.on_discrete = on_discrete
        """called before a function that takes a discrete decision on its operands"""
        self.readers: Any = None
        """are shown what goes into, and comes out of, every function; see readers.py"""
        self.observes = True
        """whether what is called is remembered; not where all is known, as where a block runs again"""
        self.owned: Callable[[Tensor], bool] | None = None
        """tells parameters and buffers"""
        self._made_of_owned: dict[int, Any] = {}
        """what was computed from these alone and has no graph, by storage: dequantised weights"""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__set__":
            # Of an attribute. Nothing is computed, and torch sets some while it makes the node of a view anew and holds
            # its lock: to ask for a node then would wait for ever.
            return function(*args, **kwargs)
        if name == "__get__":
            result = function(*args, **kwargs)
            return self._seen(function, (args, kwargs), result) if self.observes else result
        if self.on_discrete is not None and _is_discrete(function, args):
            self.on_discrete()
        composite = _COMPOSITES.get(function)
        if composite is not None:
            with self:
                return composite(*args, **kwargs)
        if not self.observes:
            return self.call(function, args, kwargs)
        if self.readers is not None:
            with without_modes():
                self.readers.examine_operands((args, kwargs))
                if function in BACKWARDS:
                    self.readers.decide_all()
        self._calls.append((function, args, kwargs))
        try:
            result = self.call(function, args, kwargs)
        finally:
            self._calls.pop()
        return self._seen(function, (args, kwargs), result)

    def _seen(self, function: Callable, operands: Any, result: Any) -> Any:
        """Remember what is to be known of a function's result, and return it."""
        if not (result is None or isinstance(result, (Tensor, tuple, list, Mapping))):
            return result  # a size, a type
        with without_modes():
            if isinstance(result, Tensor) and not result.requires_grad and self._is_made_of_owned(operands, result):
                self._made_of_owned[storage_id(result)] = storage_reference(result)
            if self.readers is not None:
                self.readers.examine(result)
                self._note_mask(function, operands, result)
                self._note_hiding(operands, result)
        return result

    def _note_hiding(self, operands: Any, result: Any) -> None:
        # to look at the node of a view that was modified would make it anew
        node = node_of(result) if isinstance(result, Tensor) and not result._is_view() else None
        if node is not None and may_hide(node):
            numbers = [leaf for leaf in leaves_of(operands) if type(leaf) in (int, float)]
            plain = [tensor for tensor in _tensors(operands) if type(tensor) in PLAIN_OR_PARAMETER]
            note_hiding(node, plain, numbers, self.holds_mask)

    def _is_made_of_owned(self, operands: Any, result: Tensor) -> bool:
        found = list(_tensors(operands))
        if self.owned is None or not found or not list(_tensors(result)):
            return False
        return all(storage_id(operand) in self._made_of_owned or self.owned(operand) for operand in found)

    def holds_mask(self, tensor: Tensor) -> bool:
        """Whether values such as -inf were written into a tensor, or into what it was made of. See [Note: masks]."""
        return storage_id(tensor) in self._masks

    def _note_mask(self, function: Callable, arguments: Any, result: Any) -> None:
        if function not in _MASK_CARRIERS:
            return
        operands = list(_tensors(arguments))
        if (function in _MASK_MAKERS and _has_mask_value(arguments)) or any(map(self.holds_mask, operands)):
            written = operands[:1] if function is Tensor.__setitem__ else _tensors(result)
            for tensor in written:
                self._masks[storage_id(tensor)] = storage_reference(tensor)

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the operator; a subclass may run something else in its place."""
        return function(*args, **kwargs)

    def role(self, tensor: Tensor) -> Role:
        """The role of a floating tensor without a graph that is being saved now; may wait for the device."""
        if not self._calls:
            return Role.STATISTIC  # a custom autograd function: nothing is known, so nothing is lost
        if storage_id(tensor) in self._made_of_owned:
            return Role.STATISTIC
        function, args, kwargs = self._calls[-1]
        operands = list(_tensors((args, kwargs)))
        storage = storage_id(tensor)
        if any(storage_id(operand) == storage for operand in operands):
            return Role.STATISTIC if _is_attention_mask(tensor, function, args, kwargs) else Role.ACTIVATION
        if _draws_noise(function) and (_is_dropout(function) if is_fake(tensor) else _is_noise(tensor)):
            return Role.BINARY
        if function in _NORMALISATIONS:
            return Role.STATISTIC
        if function is _ATTENTION:
            # its logsumexp may have as many numbers as a mask has, or few keys
            mask = mask_given(args, kwargs)
            converted = any(operand.shape == tensor.shape for operand in operands if operand is not mask)
        else:
            converted = any(operand.is_floating_point() and operand.numel() == tensor.numel() for operand in operands)
        return Role.ACTIVATION if converted else Role.STATISTIC


OWN = (OperatorObserver.__torch_function__.__code__, OperatorObserver.call.__code__, _attention.__code__)
"""the code of frames that lie between an operator and what has called it, in a step that is observed"""


def instruction(frame: FrameType, observed: bool) -> Instruction:
    """Which instruction called the operator that is saving.

    frame: of the pack hook's caller, which may be an observer's frame or a wrapper's. observed: whether an observer is
    there.
    In the same place of another step it shows another operator: on another branch in one line, or behind a call of a
    function of torch.nn.functional. Builtin operators that one instruction calls in turn look alike.
    """
    while frame.f_back is not None and (frame.f_code is WRAPPER or (observed and frame.f_code in OWN)):
        frame = frame.f_back
    return id(frame.f_code), frame.f_lasti


def outside_observer(frame: FrameType) -> FrameType:
    """The frame that called the operator that is saving. frame: of the pack hook's caller."""
    while frame.f_back is not None and frame.f_code in OWN:
        frame = frame.f_back
    return frame


def _is_discrete(function: Callable, args: tuple) -> bool:
    if function in _DISCRETE:
        return True
    if function is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return function is torch.where and len(args) == 1


def leaves_of(value: Any) -> Iterator[Any]:
    """What the tuples, lists and mappings in a value hold."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, Mapping):
        yield from leaves_of(list(value.values()))
    else:
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not _is_special(leaf):
            yield leaf


def _is_special(tensor: Tensor) -> bool:
    return is_lazy(tensor) or tensor.is_meta or tensor.is_nested or is_inside_transform(tensor)


def nodes_of(value: Any, *, of_views: bool = True) -> Iterator[Any]:
    """The nodes that made the tensors in a value."""
    for leaf in leaves_of(value):
        node = node_of(leaf) if isinstance(leaf, Tensor) and (of_views or not leaf._is_view()) else None
        if node is not None:
            yield node


def _has_mask_value(value: Any) -> bool:
    return any(isinstance(leaf, float) and abs(leaf) >= _MASK_VALUE for leaf in leaves_of(value))


def _is_attention_mask(tensor: Tensor, function: Callable, args: tuple, kwargs: dict) -> bool:
    if function is not _ATTENTION:
        return False
    mask = mask_given(args, kwargs)
    return isinstance(mask, Tensor) and storage_id(mask) == storage_id(tensor)


def _draws_noise(function: Callable) -> bool:
    return _is_dropout(function) or function is _ATTENTION or function in _RECURRENT


def _is_noise(tensor: Tensor) -> bool:
    """Whether a tensor has the values of a dropout's noise; may wait for the device. All zeros may be a first state."""
    return codec.is_binary(tensor) and bool(tensor.any())


def _is_dropout(function: Callable) -> bool:
    return "dropout" in getattr(function, "__name__", "")
