"""What an operator of a backward reads is decoded as it goes on, not before.

[Note: streamed] What is decoded for a backward is often the largest tensor of the moment, and its operator needs no
more of it at a time than its kernel works on. The product that gives a linear layer's weight its gradient is a sum over
rows, that of a convolution one over examples: a piece of the operand is decoded, multiplied and forgotten (on a CPU, as
the GPU's kernels decode no parts). The backward of a pointwise operator writes its result over what was decoded; on a
CPU, kernels of ours compute GELU's gradient and products with masks while they decode. And the other gradient of an
operator, which mostly is computed first, is computed before anything is decoded at all.

The backward of a cross entropy works with three tensors of all words: of nll_loss, which reads no more of the
log-softmax than its shape, zeros but for the targets; the log-softmax; and the gradient at the logits. The first is
left unmade: it comes as a tensor without memory as well. The backward of log_softmax then makes both for some rows at a
time (of images for some examples), and holds one such tensor, or two where the log-softmax is kept exactly. Rows come
out bit for bit as with the whole.

So where the node that runs is known to do so, the unpack hook returns a tensor without memory, which has pieces to give
to the operators below. Any other operator that meets it gets the whole tensor, as all do where several read what is
decoded, where a backward makes a graph, and within a dispatch mode: it would not see the memory of pieces, unless it
leaves what is streamed to its own dispatch, as that of the profiler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import lcm
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import codec
from .._torch_internals import (
    PLAIN,
    all_dispatch_modes,
    dispatch_modes,
    innermost_transform,
    node_in_backward,
    tensor_without_memory,
    without_torch_function,
)

_aten = torch.ops.aten

LEAST_NUMEL = 1 << 17
"""elements of the smallest tensor that is streamed"""
_MOST_PIECES = 4
_AT_ONCE = 1 << 16
"""elements of a piece that several operators work on one after the other, in the processor's caches"""
_AT_ONCE_ELSEWHERE = 1 << 24
"""the same on an accelerator, whose kernels take longer to start"""
_MOST_ORDERS = 1024


class _Least(NamedTuple):
    """Of a piece: with fewer, kernels would take longer on all pieces than on the whole."""

    nbytes: int
    rows: int


_OF_PRODUCT = _Least(2 << 20, 512)
_OF_EXAMPLES = _Least(4 << 20, 1)
_CONVOLUTION = "ConvolutionBackward0"
_IN_PIECES = {"AddmmBackward0": _OF_PRODUCT, "MmBackward0": _OF_PRODUCT, _CONVOLUTION: _OF_EXAMPLES}
"""nodes that read along the first dimension"""
_WRITTEN_OVER = frozenset((
    "GeluBackward0", "SiluBackward0", "ReluBackward0", "LeakyReluBackward0", "HardtanhBackward0", "EluBackward0",
    "SoftplusBackward0", "MulBackward0",
))  # fmt: skip
"""nodes whose result is of the shape and type of what they read"""
_LOG_SOFTMAX, _PICKS = "LogSoftmaxBackward0", frozenset(("NllLossBackward0", "NllLoss2DBackward0"))
NODES = {**dict.fromkeys(_IN_PIECES, False), **dict.fromkeys((*_WRITTEN_OVER, *_PICKS, _LOG_SOFTMAX), True)}
"""all of these nodes, and whether they do so on a GPU"""

Order = tuple[Any, ...]
"""in which a tensor's elements lie in memory: empty where it is contiguous, else its shape and strides"""


@lru_cache(_MOST_ORDERS)
def order_of(shape: Sequence[int], strides: Sequence[int]) -> Order:
    """See Order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return tuple(shape), tuple(strides)
        expected *= size
    return ()


_unit_of, _granule_of = attrgetter("unit"), attrgetter("granule")


class Pieces(Protocol):
    """The elements of a tensor in the order of its memory, piece by piece."""

    numel: int
    device: torch.device
    unit: int
    """elements at whose multiples pieces begin and end"""
    granule: int
    """elements at whose multiples they are decoded"""

    def read(self, first: int, last: int) -> Tensor:
        """Elements first .. last - 1, 1-D, in memory that may be written to, until the next piece is read."""


class Decoded:
    """Pieces of what is packed, or of a function of it."""

    __slots__ = ("_function", "_memory", "_packed", "device", "granule", "numel", "unit")

    def __init__(self, packed: codec.Packed, granule: int) -> None:
        """granule: its part_unit()."""
        self._packed, self.granule, self.unit = packed, granule, 1
        self._memory: Tensor | None = None
        self._function: str | None = None
        self.numel, self.device = packed.shape.numel(), packed.payload.device

    def apply(self, function: str) -> bool:
        """Let the pieces be those of a function, see codec.function_part(); whether that is possible."""
        if self._function is not None or not codec.has_functions(self._packed):
            return False
        self._function = function
        return True

    def read(self, first: int, last: int) -> Tensor:
        """See Pieces."""
        granule = self.granule
        start, stop = first // granule * granule, min(-(-last // granule) * granule, self.numel)
        memory = None if self._memory is None else self._memory[: stop - start]
        if memory is not None and memory.numel() < stop - start:
            memory = None
        if self._function is None:
            part = codec.unpack_part(self._packed, start, stop, memory)
        else:
            part = codec.function_part(self._packed, self._function, start, stop, memory)
        self._memory = part if memory is None else self._memory
        return part[first - start : last - start]


class Made:
    """Pieces of what is made of others."""

    __slots__ = ("_function", "_operands", "device", "granule", "numel", "unit")

    def __init__(self, function: Callable[..., Tensor], operands: Sequence[Pieces], unit: int) -> None:
        """function(first, last, *pieces of the operands): 1-D; may write over the first."""
        self._function, self._operands = function, operands
        self.numel, self.device = operands[0].numel, operands[0].device
        self.unit = lcm(unit, *map(_unit_of, operands))
        self.granule = lcm(*map(_granule_of, operands))

    def read(self, first: int, last: int) -> Tensor:
        """See Pieces."""
        return self._function(first, last, *[operand.read(first, last) for operand in self._operands])


class Whole:
    """Pieces of a tensor that is there, and stays."""

    __slots__ = ("_copies", "_elements", "device", "granule", "numel", "unit")

    def __init__(self, tensor: Tensor, copies: bool = True) -> None:
        """tensor: contiguous. copies: whether its pieces may be written to."""
        self._elements, self._copies = tensor.view(-1), copies
        self.numel, self.device, self.unit, self.granule = tensor.numel(), tensor.device, 1, 1

    def read(self, first: int, last: int) -> Tensor:
        """See Pieces."""
        part = self._elements[first:last]
        return part.clone() if self._copies else part


class Picked:
    """Pieces of the gradient at what nll_loss picks the targets of: zero but for one class of each token or pixel."""

    __slots__ = ("_arguments", "_blank", "_grad", "_memory", "_shape", "_target", "device", "granule", "numel", "unit")

    def __init__(self, grad: Tensor, shape: torch.Size, dtype: torch.dtype, target: Tensor, *arguments: Any) -> None:
        """shape: [examples, classes], of images [examples, classes, height, width]. arguments: of nll_loss_backward,
        after the target."""
        self._grad, self._target, self._arguments, self._shape = grad, target, arguments, shape[1:]
        self._blank = torch.zeros((), dtype=dtype, device=target.device)  # for the operator to know the shape
        self._memory: Tensor | None = None
        self.numel, self.device, self.unit, self.granule = shape.numel(), target.device, shape[1:].numel(), 1

    def read(self, first: int, last: int) -> Tensor:
        """See Pieces."""
        examples = slice(first // self.unit, last // self.unit)
        shape = examples.stop - examples.start, *self._shape
        if self._memory is None or len(self._memory) < shape[0]:
            self._memory = self._blank.new_empty(shape)
        made = self._memory[: shape[0]]
        grad = self._grad[examples] if self._grad.dim() else self._grad
        write = _aten.nll_loss_backward if len(shape) == 2 else _aten.nll_loss2d_backward
        write.grad_input(grad, self._blank.expand(shape), self._target[examples], *self._arguments, grad_input=made)
        return made.view(-1)

    def whole(self) -> Tensor:
        """All of them, in memory of their own."""
        made = self.read(0, self.numel).view(-1, *self._shape)
        self._memory = None
        return made


def small_pieces(pieces: Pieces) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, elements first .. last - 1) of a tensor."""
    step = _small_step(lcm(pieces.unit, pieces.granule), pieces.device)
    for first in range(0, pieces.numel, step):
        last = min(first + step, pieces.numel)
        yield first, last, pieces.read(first, last)


def _small_step(unit: int, device: torch.device) -> int:
    """Elements of a small piece."""
    return unit * max(1, (_AT_ONCE if device.type == "cpu" else _AT_ONCE_ELSEWHERE) // unit)


class Source(NamedTuple):
    """What a streamed tensor is decoded from."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole: Callable[[], Tensor]
    """gives the tensor, in memory of its own"""
    pieces: Pieces | None = None
    step: int = 0
    """elements of a piece"""
    packed: codec.Packed | None = None
    """that it is decoded from as it is"""

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(where, what is there) along the first dimension."""
        if self.pieces is None or self.step == 0:
            yield slice(None), self.whole()
            return
        row, numel = self.shape[1:].numel(), self.pieces.numel
        for first in range(0, numel, self.step):
            last = min(first + self.step, numel)
            where = slice(first // row, last // row)
            shape = where.stop - where.start, *self.shape[1:]
            yield where, self.pieces.read(first, last).as_strided(shape, self.strides)


def _dispatch(_: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Hand what is streamed to the operators of this module, and decode it for any other."""
    kwargs = kwargs or {}
    serve = _SERVING.get(id(function))
    result = NotImplemented if serve is None else serve(*args, **kwargs)
    if result is not NotImplemented:
        return result
    decoded = Streamed.settled if function._schema.is_mutable else Streamed.decoded
    args, kwargs = tree_map_only(Streamed, decoded, (args, kwargs))
    return function(*args, **kwargs)


class Streamed(Tensor):
    """A tensor that one operator of a backward decodes as it reads it."""

    __torch_function__ = without_torch_function
    __torch_dispatch__: Any = classmethod(_dispatch)
    source: Source
    is_transposed: bool

    @classmethod
    def of(cls, source: Source, is_transposed: bool = False) -> Streamed:
        """is_transposed: whether it is the transpose of its source, a matrix."""
        shape, strides, dtype, device, *_ = source
        if is_transposed:
            shape, strides = shape[::-1], strides[::-1]
        made: Streamed = tensor_without_memory(cls, shape, strides=strides, dtype=dtype, device=device)
        made.source, made.is_transposed = source, is_transposed
        return made

    def decoded(self) -> Tensor:
        """The tensor."""
        whole = self.source.whole()
        return whole.t() if self.is_transposed else whole

    def settled(self) -> Tensor:
        """The tensor, which is also what anybody gets from now on: it is about to be written to."""
        whole = self.source.whole()
        self.source = self.source._replace(whole=lambda: whole, pieces=None, packed=None)
        return self.decoded()


def _leaves_streamed(mode: Any) -> bool:
    """Whether a dispatch mode returns NotImplemented where it meets what is streamed."""
    return bool(getattr(mode, "leaves_streamed", False))


def may_stream() -> bool:
    """Whether nothing is to see the operators that read what is streamed."""
    if innermost_transform() is not None:
        return False
    return not dispatch_modes() or all_dispatch_modes(_leaves_streamed)


def streaming_node(readers: int) -> str | None:
    """The name of the node whose backward runs, if it decodes as it goes on what so many read; else None.

    A convolution takes so much longer than its input takes to be decoded that each of several decodes it on its own. Of
    those that read a log-softmax only its own backward decodes it.
    """
    if torch.is_grad_enabled() or not may_stream():
        return None
    node = node_in_backward()
    name = "" if node is None else node.name()
    streams = name in (_CONVOLUTION, _LOG_SOFTMAX) or name in _PICKS
    streams = streams or (readers == 1 and (name in _IN_PIECES or name in _WRITTEN_OVER))
    return name if streams else None


class Content(Protocol):
    """What a tensor is decoded from."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def streamed(
    content: Content, node: str, whole: Callable[[], Tensor], find_pieces: Callable[[Order], Pieces | None]
) -> Streamed | None:
    """What the unpack hook returns for a streaming_node(); None where it has to be decoded first.

    whole: gives the tensor, in memory of its own. find_pieces: of the tensor whose elements lie in an order.
    """
    shape, strides, dtype = content.shape, content.strides, content.dtype
    if isinstance(content, codec.Packed) and (content.conjugate or content.negated):
        return None  # it comes back as a lazy view, into which the operators below cannot write
    if node == _LOG_SOFTMAX or node in _PICKS:
        packed = content if isinstance(content, codec.Packed) and content.scheme is codec.Scheme.SAMPLED else None
        pieces = None if packed is None else find_pieces(order_of(shape, strides))
        if packed is None or pieces is None:
            return None
        return Streamed.of(Source(shape, strides, dtype, packed.payload.device, whole, pieces))
    least = _IN_PIECES.get(node)
    if least is None:
        # what is not packed is made of others, on a device that nothing here shows; gaps are left out by decoding
        if not isinstance(content, codec.Packed) or content.layout.span != shape.numel():
            return None
        return Streamed.of(Source(shape, strides, dtype, content.payload.device, whole, packed=content))
    row = shape[1:].numel()
    fewest = max(least.nbytes // dtype.itemsize, least.rows * row)
    order = order_of(shape, strides)
    if shape.numel() < 2 * fewest or (order and strides[0] != row):
        return None
    pieces = find_pieces(order)
    step = 0 if pieces is None else _step(pieces, row, fewest)
    if pieces is None or step >= pieces.numel or pieces.device.type != "cpu":
        return None
    return Streamed.of(Source(shape, strides, dtype, pieces.device, whole, pieces, step))


def without_reading(shape: torch.Size, strides: Sequence[int], like: Tensor, whole: Callable[[], Tensor]) -> Any:
    """For the node whose backward runs, if it reads nothing of a tensor but its shape: that; else None.

    like: of its type and device. whole: gives the tensor, which others may hold: its reader does not write to it.
    """
    if shape.numel() < LEAST_NUMEL or streaming_node(1) not in _PICKS:
        return None
    return Streamed.of(Source(shape, tuple(strides), like.dtype, like.device, whole))


def _step(pieces: Pieces, row: int, fewest: int) -> int:
    """Elements of a piece, at least `fewest`: rows of the first dimension, where they can be decoded without what lies
    beside them."""
    count = min(_MOST_PIECES, pieces.numel // fewest)
    if row % pieces.unit != 0 or count < 2:
        return pieces.numel
    step = -(-pieces.numel // count)
    granule = lcm(row, pieces.granule)
    granule = granule if granule <= step else row
    return -(-step // granule) * granule


# -- operators ----------------------------------------------------------------------------------------------------


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN


class _Sum:
    """Of what pieces give; of 16-bit types in float32, as a kernel adds up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._wide = dtype, torch.float32 if dtype.itemsize < 4 else dtype
        self.total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add what one piece gives."""
        self.total = part.to(self._wide) if self.total is None else self.total.add_(part)

    def add_product(self, first: Tensor, second: Tensor) -> None:
        """The same of a product."""
        if self.total is not None and self._wide == self._dtype:
            torch.addmm(self.total, first, second, out=self.total)
        else:
            self.add(torch.mm(first, second))

    def result(self) -> Tensor | None:
        """In the type of a piece's."""
        return None if self.total is None else self.total.to(self._dtype)


def _product(first: Tensor, second: Tensor) -> Any:
    """mm, where one factor is streamed along the dimension that is added up."""
    total = _Sum(first.dtype)
    if isinstance(second, Streamed) and not second.is_transposed and _is_plain(first):
        for rows, part in second.source.parts():
            total.add_product(first[:, rows], part)
    elif isinstance(first, Streamed) and first.is_transposed and _is_plain(second):
        for rows, part in first.source.parts():
            total.add_product(part.t(), second[rows])
    else:
        return NotImplemented
    return total.result()


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    """args: the last of them are three flags, which gradients are wanted."""
    if not isinstance(x, Streamed) or not _is_plain(grad) or not _is_plain(weight):
        return NotImplemented
    of_x: Tensor | None = None
    of_weight, of_bias = _Sum(weight.dtype), _Sum(grad.dtype)
    for examples, part in x.source.parts():
        found = _aten.convolution_backward(grad[examples], part, weight, *args)
        for total, of_part in zip((of_weight, of_bias), found[1:], strict=True):
            if of_part is not None:
                total.add(of_part)
        if found[0] is not None:
            of_x = _like_examples(found[0], len(x)) if of_x is None else of_x
            of_x[examples] = found[0]
    return of_x, of_weight.result(), of_bias.result()


def _like_examples(part: Tensor, examples: int) -> Tensor:
    """Empty, for as many examples."""
    is_last = part.dim() == 4 and not part.is_contiguous() and part.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty((examples, *part.shape[1:]), dtype=part.dtype, device=part.device, memory_format=memory_format)


def _over(
    function: Any, out: str, place: int = 1, kernel: Callable[..., Tensor | None] | None = None
) -> Callable[..., Any]:
    """A pointwise operator of a gradient and of what is streamed, in the memory of what is decoded.

    function: with the result as an argument of the name `out`. place: of what is streamed among the arguments, which
    may be the first as well. kernel: gives the result from what is packed and the gradient, or None.
    """

    def serve(*args: Any, **kwargs: Any) -> Any:
        at = place if type(args[place]) is Streamed else 0
        grad, x = args[0 if at else 1], args[at]
        if type(x) is not Streamed or type(grad) not in PLAIN:
            return NotImplemented
        shape, strides, dtype, _, _, _, _, packed = x.source
        if x.is_transposed or grad.shape != shape or grad.stride() != strides or grad.dtype != dtype:
            return NotImplemented
        if kernel is not None and packed is not None:
            made = kernel(packed, grad, *args[place + 1 :], **kwargs)
            if made is not None:
                return made
        kwargs[out] = made = x.decoded()
        return function(*args[:at], made, *args[at + 1 :], **kwargs)

    return serve


def _gelu_gradient(packed: codec.Packed, grad: Tensor, approximate: str = "none") -> Tensor | None:
    return codec.gelu_gradient(packed, approximate, grad) if codec.has_functions(packed) else None


def _product_with_mask(packed: codec.Packed, grad: Tensor) -> Tensor | None:
    return codec.mask_product(packed, grad) if codec.has_products(packed) else None


def _where_mask(packed: codec.Packed, grad: Tensor, threshold: float) -> Tensor | None:
    """Of what is zero and one."""
    is_mask = threshold == 0 and packed.scheme is codec.Scheme.MASK and codec.has_products(packed)
    return codec.mask_product(packed, grad, selects=True) if is_mask else None


def _nll_loss_backward(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, *args: Any) -> Any:
    """Without memory. See [Note: streamed]."""
    plain = (each for each in (grad, target, weight) if each is not None)
    if type(x) is not Streamed or x.dim() not in (2, 4) or not all(map(_is_plain, plain)):
        return NotImplemented
    picked = Picked(grad, x.shape, x.dtype, target, weight, *args)
    strides = tuple(x.shape[number + 1 :].numel() for number in range(x.dim()))  # without gaps, as torch makes it
    return Streamed.of(Source(x.shape, strides, x.dtype, x.device, picked.whole, picked))


def _log_softmax_backward(grad: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Any:
    """Some rows at a time, or some examples where classes are not the last dimension."""
    sources = [source for source in map(_in_rows, (grad, result)) if source is not None]
    dim %= result.dim()
    if dim == 0 or dtype != result.dtype or len(sources) < 2:
        return NotImplemented
    shape = result.shape[-1:] if dim == result.dim() - 1 else result.shape[1:]
    made = torch.empty(result.shape, dtype=dtype, device=result.device)
    unit = lcm(shape.numel(), *(granule for source in sources for granule in (source.unit, source.granule)))
    step = _small_step(unit, made.device)
    for first in range(0, made.numel(), step):
        last = min(first + step, made.numel())
        parts = [source.read(first, last).view(-1, *shape) for source in sources]
        out = made.view(-1)[first:last].view(-1, *shape)
        _aten._log_softmax_backward_data.out(*parts, dim if len(shape) > 1 else 1, dtype, out=out)
    return made


def _in_rows(x: Tensor) -> Pieces | None:
    """That of an operand, to be read and not written to; None where it has to be there as a whole."""
    if type(x) is Streamed:
        return None if x.is_transposed else x.source.pieces
    return Whole(x, copies=False) if type(x) in PLAIN and x.is_contiguous() else None


_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: lambda x: Streamed.of(x.source, x.is_transposed),
    _aten.t.default: lambda x: Streamed.of(x.source, not x.is_transposed),
    _aten.mm.default: _product,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.nll_loss2d_backward.default: _nll_loss_backward,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.mul.Tensor: _over(_aten.mul.out, "out", kernel=_product_with_mask),
    _aten.gelu_backward.default: _over(_aten.gelu_backward.grad_input, "grad_input", kernel=_gelu_gradient),
    _aten.threshold_backward.default: _over(_aten.threshold_backward.grad_input, "grad_input", kernel=_where_mask),
    _aten.elu_backward.default: _over(_aten.elu_backward.grad_input, "grad_input", 5),
    **{
        getattr(_aten, name).default: _over(getattr(_aten, name).grad_input, "grad_input")
        for name in ("silu_backward", "leaky_relu_backward", "hardtanh_backward", "softplus_backward")
    },
}
_SERVING = {id(operator): serve for operator, serve in _OPERATORS.items()}  # whose hash is a function of Python's
