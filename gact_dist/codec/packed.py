"""Tensors to packed buffers and back: any strided tensor in, a private tensor with the same strides out.

Nothing here waits for a device or touches the global random state; the random bits of stochastic rounding come from
Philox4x32-10 keyed by ``seed``. docs/codec.md describes the stored bytes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._short_ways import IS_BUILT, native_base
from .._torch_internals import (
    current_device,
    current_raw_stream,
    dispatch_modes,
    innermost_transform,
    is_fake,
    negative_view,
)
from . import mixed_widths, ops, sampled
from .format import (
    BINARY_DTYPES,
    DEFAULT_GROUP_SIZE,
    FUNCTION_DTYPES,
    FUNCTIONS,
    GROUP_SIZES,
    MASK_DTYPES,
    MAX_BITS,
    MIN_BITS,
    PACK_DTYPES,
    check_binary_dtype,
    sections,
)
from .format import part_unit as format_part_unit
from .layout import Fill, Layout, flatten, layout_of, pitch_of, restore
from .mixed_widths import UnitWidths
from .plain_calls import PlainCalls

_COMPLEX_PARTS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class Scheme(Enum):
    """How the payload of a Packed holds its elements."""

    EXACT = auto()  # the elements themselves
    QUANTISED = auto()  # groups of 1..8-bit codes
    MASK = auto()  # one bit each: zero or not
    BINARY = auto()  # one bit each: zero or `constant`
    NARROW = auto()  # integers in a smaller integer type
    MIXED = auto()  # as QUANTISED, with a width for each example or group: see mixed_widths.py
    SAMPLED = auto()  # log-probabilities, mostly one bit each: see sampled.py


_KINDS = {scheme: scheme.name.lower() for scheme in Scheme}  # Enum's own properties are slow


@dataclass(slots=True, eq=False)  # frozen, it would take four times as long to make one
class Packed:
    """A stored tensor, not to be changed. It owns its buffers and keeps nothing else alive.

    Attributes:
        payload: uint8 buffer, or for EXACT the elements in memory order.
        scheme: how to read ``payload``.
        bits: bits for each element, None when exact, for MIXED and SAMPLED.
        dtype, shape, strides: of the tensor that was packed.
        layout: how its elements were laid out in memory.
        group_size: elements that share a scale and an offset (QUANTISED, MIXED).
        columns: of the rows whose columns are grouped, 1 for groups in memory order (QUANTISED, MIXED).
        seed: of the rounding noise, part of which is subtracted again (QUANTISED, MIXED).
        counts: how many equal parts of the tensor are stored at 0, 1 .. 8 bits (MIXED).
        one_width_bytes: what one width of the same rounding variance would take, 0 unless made by pack_error_bounded.
        constant: 0-d tensor, the value other than zero (BINARY).
        limits: (low, high), between which elements stay if they were there, and beyond which otherwise (QUANTISED).
        sides: uint8 buffer, one bit for each element that was at or below `low`, then one for each at or above `high`.
        conjugate: the tensor was a lazily conjugated complex one.
        negated: the tensor was a lazily negated one (EXACT).
        ready: lets the current stream wait until the payload is there; None if it was packed on that stream.
        packer: what has packed it by a plain call, and unpacks it so; None for operators.
    """

    payload: Tensor
    scheme: Scheme
    bits: int | None
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    layout: Layout
    group_size: int = DEFAULT_GROUP_SIZE
    columns: int = 1
    seed: int = 0
    counts: tuple[int, ...] = ()
    one_width_bytes: int = 0
    constant: Tensor | None = None
    limits: tuple[float, float] | None = None
    sides: Tensor | None = None
    conjugate: bool = False
    negated: bool = False
    ready: Callable[[], None] | None = None
    packer: Any = None

    @property
    def kind(self) -> str:
        """The name of its scheme, as reports have it."""
        return _KINDS[self.scheme]

    @property
    def is_rounded(self) -> bool:
        """Whether it consists of groups of codes."""
        return self.scheme in (Scheme.QUANTISED, Scheme.MIXED)

    @property
    def average_bits(self) -> float:
        """Payload bits for an element."""
        if self.scheme is Scheme.SAMPLED:
            return sampled.AVERAGE_BITS
        if self.counts:
            return sum(width * count for width, count in enumerate(self.counts)) / sum(self.counts)
        if self.bits is None:
            return 8.0 * self.dtype.itemsize
        return float(self.bits if self.sides is None else self.bits + 2)

    def described(self) -> tuple[str, float, int, int]:
        """(kind, average_bits, nbytes, one_width_bytes), as reports have them."""
        if self.bits is None or self.constant is not None or self.sides is not None:
            return self.kind, self.average_bits, self.nbytes, self.one_width_bytes
        return _KINDS[self.scheme], float(self.bits), self.payload.nbytes, self.one_width_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that this object owns."""
        others = (other.nbytes for other in (self.constant, self.sides) if other is not None)
        return self.payload.nbytes + sum(others)

    def nbytes_at(self, bits: int) -> int:
        """Bytes that a QUANTISED tensor would take at another width, 1 to 8 bits."""
        values = self.layout.stored_numel * (2 if self.dtype.is_complex else 1)
        sides_bytes = 0 if self.sides is None else self.sides.nbytes
        return sections(values, bits, self.group_size, self.columns).total_bytes + sides_bytes


def _plain(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph; TypeError unless it has strided memory of its own."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"got {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided:
        raise TypeError(f"got a tensor of layout {tensor.layout}, expected a strided one; pack its values and indices")
    if tensor.is_quantized:
        raise TypeError(f"got a quantised tensor of {tensor.dtype}; it is small already, keep it as it is")
    if tensor.device.type == "meta":
        raise TypeError("got a meta tensor, which has no data to pack; use a FakeTensorMode to trace shapes")
    return tensor.detach()


def _in_memory(data: Tensor) -> Tensor:
    """The same memory, shape and strides without the lazy bits. Resolving these would copy to other strides."""
    data = data.conj() if data.is_conj() else data
    return negative_view(data) if data.is_neg() else data


def _flat_values(data: Tensor, layout: Layout) -> Tensor:
    """The stored elements in memory order, 1-D contiguous: negated where the tensor is, but not conjugated."""
    flat = flatten(_in_memory(data), layout)
    return -flat if data.is_neg() else flat


def metadata_bits(group_size: int) -> float:
    """Bits of scale and offset for an element, where groups are full."""
    numel = max(GROUP_SIZES)  # whole tiles and whole groups of every size
    return 8.0 * sections(numel, MIN_BITS, group_size).total_bytes / numel - MIN_BITS


def pack(
    tensor: Tensor,
    bits: int | UnitWidths | None,
    seed: int = 0,
    group_size: int = DEFAULT_GROUP_SIZE,
    by_column: bool = True,
) -> Packed:
    """Store ``tensor`` at ``bits`` bits for each element, rounded stochastically without bias.

    A group is ``group_size`` elements of one column where ``columns_of`` finds columns, otherwise in a row of memory.
    An element of a finite group decodes to at most one step of its group away: (max - min) / (2^bits - 1), rounded up
    to 7 significant bits. Groups with infinities keep them exactly and give up two codes; groups with NaN decode to
    NaN. float64 and complex128 are converted to float32 first: values beyond 3.4e38 become infinite, and the conversion
    adds a relative error of 2^-24.

    Args:
        tensor: any shape and strides; float32, float16, bfloat16, float64 or complex. bool with bits=1 is exact.
        bits: 1 to 8, or None for an exact private copy of any dtype; or a width for each of the equal parts of the
            tensor's memory (a tensor whose elements share memory between gaps is then stored exactly).
        seed: 64-bit integer that selects the random bits.
        group_size: 64, 128, 256 or 512.
        by_column: False groups in memory order in any case.

    Raises:
        ValueError: bits, seed or group_size out of range.
        TypeError: a dtype or layout that cannot be packed; the message says what to do.
    """
    _check_numbers(None if isinstance(bits, UnitWidths) else bits, seed, group_size)
    if type(bits) is int and type(tensor) is Tensor and tensor.dtype in PACK_DTYPES:
        packer = packer_of(tensor, bits, group_size, by_column)
        if packer is not None:
            return packer.pack(tensor, seed)
    data = _plain(tensor)
    layout = layout_of(data)
    if data.dtype == torch.bool and bits == 1:
        return pack_mask(tensor)
    if bits is None or layout.fill is Fill.TANGLED:
        if bits is not None:
            _real_dtype(data.dtype)
        return _pack_exact(data, layout)
    part = _real_dtype(data.dtype)
    conjugate, flat = data.is_conj(), _flat_values(data, layout)
    values = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    values = values if values.dtype == part else values.to(part)
    columns = layout.columns(group_size, data.dtype.is_complex) if by_column else 1
    about = data.dtype, data.shape, data.stride(), layout, group_size
    if isinstance(bits, UnitWidths):
        columns = mixed_widths.columns_within(values.numel(), len(bits.widths), group_size, columns)
        payload = mixed_widths.pack(values, bits, group_size, seed, columns)
        return Packed(payload, Scheme.MIXED, None, *about, columns, seed, bits.counts, conjugate=conjugate)
    payload = ops.pack(values, bits, group_size, seed, columns)
    return Packed(payload, Scheme.QUANTISED, bits, *about, columns, seed, conjugate=conjugate)


def pack_within(
    tensor: Tensor,
    bits: int,
    limits: tuple[float, float],
    seed: int = 0,
    group_size: int = DEFAULT_GROUP_SIZE,
    by_column: bool = True,
) -> Packed:
    """The same for a function that jumps at two limits: each element comes back on the side of them where it was.

    Two more bits of each element say whether it was at or below the first limit, and whether at or above the second.
    What would be decoded on another side becomes the value of that type next to the limit.

    Args:
        tensor: any shape and strides; float32, float16, bfloat16 or float64.
        limits: finite, the lower one first.
    """
    packed = pack(tensor, bits, seed, group_size, by_column)
    if packed.scheme is Scheme.EXACT:
        return packed
    flat = _flat_values(_plain(tensor), packed.layout)
    packed.limits, packed.sides = limits, ops.pack_mask(torch.cat((flat <= limits[0], flat >= limits[1])))
    packed.packer = None  # which knows of no limits
    return packed


def _on_its_side(packed: Packed, flat: Tensor) -> Tensor:
    """What was decoded, each element on its own side of the limits. May write to it."""
    if packed.sides is None or packed.limits is None:
        return flat
    numel, (low, high) = flat.numel(), packed.limits
    below, above = ops.unpack_mask(packed.sides, 2 * numel, torch.bool).view(2, numel)
    outer = torch.where(below, flat.clamp(max=_beside(low, flat.dtype, -1)), flat)
    torch.where(above, flat.clamp(min=_beside(high, flat.dtype, 1)), outer, out=outer)
    inner = flat.clamp_(_beside(low, flat.dtype, 1), _beside(high, flat.dtype, -1))
    return torch.where(below.logical_or_(above), outer, inner, out=outer)


def _beside(limit: float, dtype: torch.dtype, sign: int) -> float:
    """A value of a type next to a limit, on the side of that sign."""
    return limit + sign * torch.finfo(dtype).eps * 2.0 ** math.frexp(limit)[1] / 2


class _Form(NamedTuple):
    """What is to be known of a tensor whose memory is handed to an operator as it is, or with its gaps left out."""

    shape: torch.Size
    strides: tuple[int, ...]
    layout: Layout
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    """sizes and strides of its memory, 1-D; of one with gaps as Layout has them"""
    columns: int
    pitch: int
    """elements from one row of `columns` to the next, where all are equally far apart; else 0, as without gaps"""
    is_contiguous: bool


_forms: dict[tuple[torch.Size, tuple[int, ...], int, bool], _Form | None] = {}
_MOST_FORMS = 4096  # a job's batches may have many sizes
_UNIT_STRIDE = (1,)


def _form_of(tensor: Tensor, group_size: int, by_column: bool) -> _Form | None:
    """The form of a real tensor, None where it takes more than that. The Python around the operator takes longer than
    the operator on a small tensor, so what follows from shape and strides is found out once."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_neg():
        return None
    shape, strides = tensor.shape, tensor.stride()
    key = shape, strides, group_size, by_column
    try:
        return _forms[key]
    except KeyError:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        layout = layout_of(tensor)
        form = None
        if layout.fill is not Fill.TANGLED:
            columns = layout.columns(group_size, is_complex=False) if by_column else 1
            if layout.fill is Fill.SCATTERED:
                memory, pitch = (layout.sizes, layout.strides), pitch_of(layout, columns)
            else:
                memory, pitch = ((layout.span,), _UNIT_STRIDE), 0
            form = _Form(shape, strides, layout, *memory, columns, pitch, tensor.is_contiguous())
        _forms[key] = form
        return form


def _memory(tensor: Tensor, form: _Form) -> Tensor:
    """The elements of a tensor in that form in the order of its memory, 1-D, without a graph.

    On a GPU [rows, columns] where rows lie equally far apart: there they are read where they are.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        tensor = tensor.detach()
    if form.pitch and tensor.is_cuda:
        return tensor.as_strided((tensor.numel() // form.columns, form.columns), (form.pitch, 1))
    memory = tensor.as_strided(form.sizes, form.steps)
    return memory if len(form.sizes) == 1 and form.steps == _UNIT_STRIDE else memory.contiguous().view(-1)


def _pack_whole(tensor: Tensor, form: _Form, bits: int, seed: int, group_size: int) -> Packed:
    # a view of so few elements takes longer than rounding them
    memory = tensor.detach() if form.is_contiguous and tensor.is_cpu else _memory(tensor, form)
    payload = ops.pack_plain(memory, bits, group_size, seed, form.columns)
    about = tensor.dtype, form.shape, form.strides, form.layout, group_size, form.columns, seed
    return Packed(payload, Scheme.QUANTISED, bits, *about)


_Packer: Any = native_base("Packer")
_OF_EACH = ("payload", "seed", "packer")  # of a Packed, what is not the same for all tensors of a form


class Packer(_Packer):
    """``pack`` for tensors of one shape, strides, type and device, with all but the seed known.

    Where csrc/hooks is built, by one call of a kernel, without an operator: see csrc/hooks/packer.h.
    """

    __slots__ = ("_form",) if IS_BUILT else ("_form", "bits", "group_size")

    def __init__(self, form: _Form, bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype, device: of the tensors."""
        self._form, self.bits, self.group_size = form, bits, group_size
        if IS_BUILT and form.layout.stored_numel == form.shape.numel() > 0:
            calls = ops.plain_calls(device, dtype, bits, group_size, form.layout.stored_numel, form.columns)
            if calls is not None:
                self._prepare(calls, dtype, device)

    @property
    def is_prepared(self) -> bool:
        """Whether packed() and unpacked() use kernels."""
        return IS_BUILT and self.unpack_function != 0

    def _prepare(self, calls: PlainCalls, dtype: torch.dtype, device: torch.device) -> None:
        """Let packed() and unpacked() use these kernels."""
        form, layout = self._form, self._form.layout
        has_gaps = layout.fill is Fill.SCATTERED
        self.numel, self.columns, self.element = layout.stored_numel, form.columns, PACK_DTYPES.index(dtype)
        self.device, self.pitch, self.alignment = device.index or 0, form.pitch or form.columns, calls.alignment
        where = sections(self.numel, self.bits, self.group_size, self.columns)
        self.scale_start, self.offset_start = where.scale_start_bytes, where.offset_start_bytes
        self.buffer_bytes, self.blocks, self.threads = where.total_bytes, calls.blocks, calls.threads
        strides = _dense(form.shape, form.strides, layout.row_numel)[0] if has_gaps else form.strides
        self.empty, self.empty_strided = torch.empty, torch.empty_strided
        self.of_buffer, self.buffer_options = (where.total_bytes,), {"dtype": torch.uint8, "device": device}
        self.of_tensor, self.options = (form.shape, strides), {"dtype": dtype, "device": device}
        about = Packed(
            torch.empty(0, device=device),
            Scheme.QUANTISED,
            self.bits,
            dtype,
            form.shape,
            form.strides,
            layout,
            self.group_size,
            form.columns,
        )
        same = [field.name for field in fields(Packed) if field.name not in _OF_EACH]
        self.fields = tuple(item for name in same for item in (name, getattr(about, name)))
        self.packed_type, self.tensor_type = Packed, Tensor
        self.modes, self.transform = dispatch_modes, innermost_transform
        self.current_device, self.current_stream, self.driver = current_device, current_raw_stream, calls.driver
        self.launch, self.unpack_function = calls.launch, calls.unpack
        # rows with gaps between them are read where they are on a GPU, where each begins at a pair of elements
        on_cpu = calls.launch == 0
        self.of_memory = (form.sizes, form.steps) if on_cpu and has_gaps else None
        is_even = on_cpu or form.columns == 1 or self.pitch % 2 == 0
        self.pack_function = calls.pack if is_even and (on_cpu or form.pitch > 0 or not has_gaps) else 0

    def pack(self, tensor: Tensor, seed: int) -> Packed:
        """What ``pack`` returns. tensor: no subclass, not lazily negated."""
        packed: Packed | None = self.packed(tensor, seed) if IS_BUILT else None
        return _pack_whole(tensor, self._form, self.bits, seed, self.group_size) if packed is None else packed


_packers: dict[Any, Packer] = {}


def packer_of(tensor: Tensor, bits: int, group_size: int, by_column: bool) -> Packer | None:
    """How ``pack`` packs tensors like this one; None where that takes more than rounding them in memory order."""
    form = _form_of(tensor, group_size, by_column) if tensor.dtype in PACK_DTYPES else None
    if form is None:
        return None
    key = form.shape, form.strides, group_size, by_column, bits, tensor.dtype, tensor.device
    packer = _packers.get(key)
    if packer is None:
        packer = Packer(form, bits, group_size, tensor.dtype, tensor.device)
        if tensor.is_cpu or packer.is_prepared:  # what a GPU cannot load now it may load later
            if len(_packers) >= _MOST_FORMS:
                _packers.clear()
            _packers[key] = packer
    return packer


def columns_of(tensor: Tensor, group_size: int, fraction: float = 1.0, by_column: bool = True) -> int:
    """Columns of the rows of a strided tensor that ``pack`` groups by column, 1 where it groups in memory order.

    fraction: of the rows of the tensor that is meant, which are there. by_column: as for ``pack``.
    """
    if not by_column:
        return 1
    return layout_of(tensor).columns(group_size, tensor.dtype.is_complex, fraction)


def _check_numbers(bits: int | None, seed: int, group_size: int) -> None:
    if bits is not None and (not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS):
        raise ValueError(f"bits is {bits!r}, expected an integer {MIN_BITS} to {MAX_BITS}, or None for an exact copy")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size!r}, expected one of {GROUP_SIZES}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}, expected a signed 64-bit integer; take it modulo 2**63")


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The float type in which a tensor of ``dtype`` is quantised; TypeError if it cannot be."""
    part = _COMPLEX_PARTS.get(dtype, dtype)
    if part == torch.float64:
        return torch.float32
    if part not in PACK_DTYPES:
        raise TypeError(
            f"cannot quantise {dtype}, expected float32, float16, bfloat16, float64 or complex; "
            "use bits=None for an exact copy, or pack_mask for a tensor of zeros and ones"
        )
    return part


def borrow(tensor: Tensor) -> Packed:
    """An exact Packed whose payload is the tensor's own memory unless that has gaps; for a caller that copies it."""
    data = _plain(tensor)
    return _pack_exact(data, layout_of(data), private=False)


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of the payload that borrow() returns for a strided tensor."""
    return layout_of(tensor).stored_numel * tensor.element_size()


def without_payload(packed: Packed) -> Packed:
    """Everything but the payload, which is kept elsewhere."""
    return replace(packed, payload=packed.payload.new_empty(0))


def with_payload(packed: Packed, payload: Tensor) -> Packed:
    """The inverse of without_payload."""
    return replace(packed, payload=payload)


def _pack_exact(data: Tensor, layout: Layout, private: bool = True) -> Packed:
    flat = flatten(_in_memory(data), layout)
    payload = flat.clone() if private and layout.fill is not Fill.SCATTERED else flat
    about = data.dtype, data.shape, data.stride(), layout
    return Packed(payload, Scheme.EXACT, None, *about, conjugate=data.is_conj(), negated=data.is_neg())


def pack_mask(tensor: Tensor) -> Packed:
    """Store which elements are not zero, one bit each; they come back as 1 (True) in the same dtype.

    Exact for bool, and for a tensor that holds only zeros and ones.

    Raises:
        TypeError: the dtype is not bool, uint8 or a float type.
    """
    if type(tensor) is Tensor and tensor.dtype in MASK_DTYPES:
        form = _form_of(tensor, DEFAULT_GROUP_SIZE, True)
        if form is not None:
            payload = ops.pack_mask(_memory(tensor, form))
            return Packed(payload, Scheme.MASK, 1, tensor.dtype, form.shape, form.strides, form.layout)
    data = _plain(tensor)
    if data.dtype not in MASK_DTYPES:
        raise TypeError(f"a mask cannot have dtype {data.dtype}, expected one of {MASK_DTYPES}; use .to(torch.bool)")
    layout = layout_of(data)
    if layout.fill is Fill.TANGLED:
        return _pack_exact(data, layout)
    flat = flatten(_in_memory(data), layout)
    return Packed(ops.pack_mask(flat), Scheme.MASK, 1, data.dtype, data.shape, data.stride(), layout)


def pack_flags(tensor: Tensor, is_set: Callable[[Tensor], Tensor], value: float) -> Packed:
    """Store one bit of each element: a tensor comes back that has a value where the bit is set, and zero elsewhere.

    is_set: of elements in any shape; bool, or a number that is zero where the bit is not set.
    """
    data = _plain(tensor)
    layout = layout_of(data)
    if layout.fill is Fill.TANGLED:
        return _pack_exact(data, layout)
    payload = ops.pack_mask(is_set(_flat_values(data, layout)))
    about = data.dtype, data.shape, data.stride(), layout
    if value == 1:
        return Packed(payload, Scheme.MASK, 1, *about)
    constant = torch.full((), value, dtype=data.dtype, device=data.device)
    return Packed(payload, Scheme.BINARY, 1, *about, constant=constant)


def pack_binary(tensor: Tensor) -> Packed:
    """Store a tensor that holds only zeros and one other finite value (dropout noise): one bit each, exact.

    The caller must know that there are no others (see is_binary), as checking it would wait for the device; on a CPU a
    tensor that holds others is stored in its own type.

    Raises:
        TypeError: the dtype is not float32, float16, bfloat16 or float64.
    """
    form = _form_of(tensor, DEFAULT_GROUP_SIZE, by_column=False)
    if form is not None and tensor.dtype in BINARY_DTYPES and tensor.is_cpu and tensor.numel():
        data, layout, flat = tensor, form.layout, _memory(tensor, form)
    else:
        data = _plain(tensor)
        check_binary_dtype(data.dtype)
        layout = layout_of(data)
        if layout.fill is Fill.TANGLED or layout.stored_numel == 0:
            return _pack_exact(data, layout)
        flat = _flat_values(data, layout)
    if data.is_cpu and not is_fake(data):
        constant = ops.binary_value(flat)
        if math.isnan(constant.item()):
            return _pack_exact(data.detach(), layout)
    else:
        high = flat.amax()
        constant = torch.where(high != 0, high, flat.amin())
    return Packed(
        ops.pack_mask(flat), Scheme.BINARY, 1, data.dtype, data.shape, data.stride(), layout, constant=constant
    )


def is_binary(tensor: Tensor) -> bool:
    """Whether pack_binary() gives a tensor back bit for bit: its elements are 0.0 or one other finite value.

    False of an empty tensor, and of one that it would store in its own type. Waits for the device.
    """
    data = _plain(tensor)
    if data.dtype not in BINARY_DTYPES:
        return False
    layout = layout_of(data)
    if layout.fill is Fill.TANGLED or layout.stored_numel == 0:
        return False
    return not ops.binary_value(_flat_values(data, layout)).isnan().item()


def pack_log_probabilities(tensor: Tensor, seed: int = 0) -> Packed | None:
    """Store the result of a log-softmax over the last dimension for a backward that takes nothing but exp() of it.

    exp() of what comes back is exp() of the tensor on average, and each element is either very near its own or one of
    two values, -inf and the largest of 32 neighbours: see [Note: sampled] in sampled.py. -inf and NaN survive.
    None where rows are short, or do not follow each other in memory.

    Args:
        tensor: [..., words], float32, float16, bfloat16 or float64.
        seed: 64-bit integer that selects the random numbers.
    """
    data = _plain(tensor)
    rows_in_memory = data.dim() > 0 and data.numel() > 0 and data.is_contiguous() and not data.is_neg()
    if not rows_in_memory or data.dtype not in BINARY_DTYPES or data.shape[-1] < sampled.MIN_WORDS:
        return None
    words = data.shape[-1]
    if is_fake(data):
        total_bytes = sampled.total_bytes(data.numel() // words, words)
        payload = data.new_empty(total_bytes, dtype=torch.uint8)
    else:
        payload = sampled.pack(data.view(-1, words), seed)
    about = data.dtype, data.shape, data.stride(), layout_of(data)
    return Packed(payload, Scheme.SAMPLED, None, *about)


_WITHOUT_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)  # torch finds no minimum of these
_NARROW_TYPES = ((torch.uint8, 0, 255), (torch.int16, -(2**15), 2**15 - 1), (torch.int32, -(2**31), 2**31 - 1))


def pack_narrow(tensor: Tensor, count: int | None = None) -> Packed | None:
    """Store integers exactly in the smallest type that holds them (the indices of max pooling, of a gather).

    count: where it is known that all of them are from 0 to count - 1; by default they are looked at.
    None where that saves nothing. To look at them would wait for an accelerator, so it is None there without a count,
    and of a fake tensor, which has no values.
    """
    data = _plain(tensor)
    layout = layout_of(data)
    if data.numel() == 0 or layout.fill is Fill.TANGLED or data.dtype in _WITHOUT_ARITHMETIC:
        return None
    if count is None and (data.device.type != "cpu" or is_fake(data)):
        return None
    flat = _flat_values(data, layout)
    low, high = (int(bound) for bound in flat.aminmax()) if count is None else (0, count - 1)
    for narrow, least, most in _NARROW_TYPES:
        if narrow.itemsize < data.dtype.itemsize and least <= low and high <= most:
            bits = 8 * narrow.itemsize
            return Packed(flat.to(narrow), Scheme.NARROW, bits, data.dtype, data.shape, data.stride(), layout)
    return None


def in_parts(tensor: Tensor) -> bool:
    """Whether ``pack`` takes widths for parts of the memory of a strided tensor."""
    return tensor.numel() > 0 and layout_of(tensor).fill is not Fill.TANGLED


def stored_values(tensor: Tensor) -> Tensor:
    """The real numbers that ``pack`` would quantise, 1-D, in the order in which it groups them."""
    data = _plain(tensor)
    flat = _flat_values(data, layout_of(data))
    values = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return values.to(_real_dtype(data.dtype))


def exact(tensor: Tensor) -> Tensor | Packed:
    """An alias of the tensor, or a copy where an alias of a small view would keep a much larger storage alive."""
    view_bytes = tensor.numel() * tensor.element_size()
    if tensor.grad_fn is not None and 2 * view_bytes < tensor.untyped_storage().nbytes():
        return pack(tensor, bits=None)
    return tensor.detach()


def unpack(packed: Packed) -> Tensor:
    """A private tensor with the dtype, shape and strides of the one that was packed."""
    return _unpack(packed, packed.strides, packed.layout)


def unpack_without_gaps(packed: Packed) -> Tensor:
    """The same without the gaps that the tensor had between its elements; its dimensions keep their order in memory.

    One of several heads that lie beside each other takes as much memory, with its own strides, as all of them, and what
    is decoded would have to be copied into it.
    """
    if packed.layout.fill is not Fill.SCATTERED:
        return _unpack(packed, packed.strides, packed.layout)
    return _unpack(packed, *_dense(packed.shape, packed.strides, packed.layout.row_numel))


def _unpack(packed: Packed, strides: tuple[int, ...], layout: Layout) -> Tensor:
    if packed.ready is not None:
        packed.ready()
    scheme = packed.scheme
    if layout.fill is Fill.SPAN:
        if packed.packer is not None:
            unpacked: Tensor | None = packed.packer.unpacked(packed)
            if unpacked is not None:
                return unpacked
        if scheme is Scheme.QUANTISED and packed.bits is not None and packed.dtype in PACK_DTYPES:
            form = packed.group_size, layout.span, packed.dtype, packed.seed, packed.columns
            flat = _on_its_side(packed, ops.unpack_plain(packed.payload, packed.bits, *form))
            return flat.as_strided(packed.shape, strides)
        if scheme is Scheme.MASK:
            return ops.unpack_mask(packed.payload, layout.span, packed.dtype).as_strided(packed.shape, strides)
        if scheme is Scheme.BINARY and packed.constant is not None:
            flat = ops.unpack_binary(packed.payload, layout.span, packed.constant)
            return flat.as_strided(packed.shape, strides)
    out = restore(_decode(packed), packed.shape, strides, layout)
    out = out.conj() if packed.conjugate else out
    return negative_view(out) if packed.negated else out


def part_unit(packed: Packed) -> int:
    """Elements at whose multiples unpack_part() begins; 0 for what can only be decoded as a whole."""
    if packed.layout.fill is not Fill.SPAN or packed.layout.span != packed.shape.numel() or packed.sides is not None:
        return 0
    if packed.scheme is Scheme.MASK:
        return 8
    if packed.scheme is Scheme.SAMPLED:
        return sampled.ranked_rows(packed.shape[-1]) * packed.shape[-1]
    is_plain = packed.scheme is Scheme.QUANTISED and packed.dtype in PACK_DTYPES
    return format_part_unit(packed.group_size, packed.columns) if is_plain else 0


def unpack_part(packed: Packed, first: int, last: int, memory: Tensor | None = None) -> Tensor:
    """Elements first .. last - 1 in the order of memory, 1-D, as unpack() gives them.

    Args:
        first, last: multiples of part_unit(), or the end.
        memory: that the result may take, of as many elements.
    """
    if packed.ready is not None:
        packed.ready()
    if packed.scheme is Scheme.MASK:
        return ops.unpack_mask(packed.payload[first // 8 : -(-last // 8)], last - first, packed.dtype)
    if memory is None:
        memory = torch.empty(last - first, dtype=packed.dtype, device=packed.payload.device)
    if packed.scheme is Scheme.SAMPLED:
        words = packed.shape[-1]
        sampled.unpack_rows(packed.payload, packed.shape.numel() // words, first // words, memory.view(-1, words))
        return memory
    form = packed.bits, packed.group_size, packed.layout.span, packed.dtype, packed.seed
    ops.unpack_part(packed.payload, *form, memory, packed.columns, first)
    return memory


def has_functions(packed: Packed) -> bool:
    """Whether kernels apply functions to it while they decode it: function_part(), gelu_gradient()."""
    is_plain = packed.scheme is Scheme.QUANTISED and packed.dtype in FUNCTION_DTYPES and packed.sides is None
    is_plain = is_plain and packed.layout.fill is Fill.SPAN
    return is_plain and packed.layout.span == packed.shape.numel() and ops.has_native(packed.payload.device)


def function_part(packed: Packed, function: str, first: int, last: int, memory: Tensor | None = None) -> Tensor:
    """GELU of elements first .. last - 1, as unpack_part() gives them; within 5e-7 times an element of torch's.

    Args:
        packed: of which has_functions() is true.
        function: one of FUNCTIONS.
    """
    if memory is None:
        memory = torch.empty(last - first, dtype=packed.dtype, device=packed.payload.device)
    form = packed.bits, packed.group_size, packed.layout.span, packed.dtype, packed.seed
    ops.unpack_through(packed.payload, *form, memory, packed.columns, first, FUNCTIONS.index(function))
    return memory


def gelu_gradient(packed: Packed, function: str, grad: Tensor) -> Tensor:
    """What GELU's backward gives for a gradient, if what it saved is packed; within 5e-7 times the gradient of torch's.

    Args:
        packed, function: as for function_part().
        grad: of the same type, shape and strides.
    """
    flat = grad.as_strided((packed.layout.span,), (1,))
    form = packed.bits, packed.group_size, packed.layout.span, packed.dtype, packed.seed
    made = ops.unpack_gradient(packed.payload, *form, flat, packed.columns, FUNCTIONS.index(function))
    return made.as_strided(packed.shape, packed.strides)


def has_products(packed: Packed) -> bool:
    """Whether mask_product() takes it."""
    is_mask = packed.scheme is Scheme.MASK or (packed.scheme is Scheme.BINARY and packed.constant is not None)
    is_plain = is_mask and packed.dtype in FUNCTION_DTYPES and packed.layout.fill is Fill.SPAN
    return is_plain and packed.layout.span == packed.shape.numel() and ops.has_native(packed.payload.device)


def mask_product(packed: Packed, grad: Tensor, selects: bool = False) -> Tensor:
    """The product of a gradient with a mask, bit for bit (but for those of NaN) torch's with what unpack() gives.

    Args:
        packed: of which has_products() is true.
        grad: of the same type, shape and strides.
        selects: give the gradient where the mask is not zero, and zero elsewhere, whatever the gradient is there.
    """
    flat, value = grad.as_strided((packed.layout.span,), (1,)), packed.constant
    value = torch.ones((), dtype=packed.dtype, device=flat.device) if value is None else value
    return ops.mask_product(packed.payload, flat, value, selects).as_strided(packed.shape, packed.strides)


@functools.lru_cache(_MOST_FORMS)
def _dense(shape: torch.Size, strides: tuple[int, ...], row_numel: int) -> tuple[tuple[int, ...], Layout]:
    """(strides, layout) without gaps."""
    found = [0 if stride == 0 else 1 for stride in strides]
    dims = [dim for dim, size in enumerate(shape) if size > 1 and found[dim]]
    span = 1
    for dim in sorted(dims, key=lambda dim: strides[dim]):
        found[dim] = span
        span *= shape[dim]
    return tuple(found), Layout(Fill.SPAN, (span,), (1,), span, row_numel)


def _decode(packed: Packed) -> Tensor:
    """The stored elements in memory order, in a new tensor."""
    if packed.scheme is Scheme.EXACT:
        return packed.payload.clone()
    if packed.scheme is Scheme.SAMPLED:
        return _unpack_sampled(packed).view(-1)
    if packed.scheme is Scheme.NARROW:
        return packed.payload.to(packed.dtype)
    if packed.is_rounded:
        return _on_its_side(packed, _dequantise(packed, packed.layout.stored_numel))
    if packed.constant is not None:
        return ops.unpack_binary(packed.payload, packed.layout.stored_numel, packed.constant)
    return ops.unpack_mask(packed.payload, packed.layout.stored_numel, packed.dtype)


def _unpack_sampled(packed: Packed) -> Tensor:
    words = packed.shape[-1]
    rows = packed.shape.numel() // words
    if is_fake(packed.payload):
        return packed.payload.new_empty((rows, words), dtype=packed.dtype)
    return sampled.unpack(packed.payload, rows, words, packed.dtype)


def _dequantise(packed: Packed, numel: int) -> Tensor:
    part = _COMPLEX_PARTS.get(packed.dtype, packed.dtype)
    values = numel * 2 if packed.dtype.is_complex else numel
    stored = _real_dtype(packed.dtype)
    form = packed.group_size, values, stored, packed.seed, packed.columns
    if packed.scheme is Scheme.MIXED:
        flat = mixed_widths.unpack(packed.payload, packed.counts, *form)
    else:
        flat = ops.unpack(packed.payload, packed.bits, *form)
    flat = flat if stored == part else flat.to(part)
    return torch.view_as_complex(flat.view(-1, 2)) if packed.dtype.is_complex else flat


# -- a Packed as two plain tensors, for graphs that hold nothing else ---------------------------------------------


def to_tensors(packed: Packed) -> tuple[Tensor, Tensor]:
    """(buffer, header) for from_tensors(): uint8 [bytes] on the device, int64 [4] on the CPU.

    Raises ValueError for BINARY, MIXED, SAMPLED, conjugated and negated tensors, and for those with limits, which hold
    more than that.
    """
    if (
        packed.scheme is Scheme.SAMPLED
        or packed.constant is not None
        or packed.sides is not None
        or packed.conjugate
        or packed.negated
        or packed.counts
    ):
        raise ValueError(
            f"got {packed.scheme} (conjugate: {packed.conjugate}, negated: {packed.negated}), "
            "expected one buffer and its format"
        )
    if packed.ready is not None:
        packed.ready()
    buffer = torch.view_as_real(packed.payload) if packed.payload.is_complex() else packed.payload
    # the sign is that of the order of groups: a fifth number would not fit what compilers keep on disk of earlier jobs
    signed_size = packed.group_size if packed.columns > 1 else -packed.group_size
    header = torch.tensor([packed.scheme.value, packed.bits or 0, signed_size, packed.seed], device="cpu")
    return buffer.view(-1).view(torch.uint8), header


def from_tensors(
    buffer: Tensor, header: Tensor, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]
) -> Tensor:
    """What unpack() returns for the Packed that went through to_tensors(), given its dtype, shape and strides."""
    number, bits, signed_size, seed = header.tolist()
    scheme = Scheme(number)
    if scheme is Scheme.EXACT:
        buffer = buffer.view(dtype)
    elif scheme is Scheme.NARROW:
        buffer = buffer.view(next(narrow for narrow, _, _ in _NARROW_TYPES if 8 * narrow.itemsize == bits))
    layout = layout_of(torch.empty_strided(shape, strides, device="meta"))
    group_size = abs(signed_size)
    columns = layout.columns(group_size, dtype.is_complex) if signed_size > 0 else 1
    return unpack(Packed(buffer, scheme, bits or None, dtype, shape, strides, layout, group_size, columns, seed))
