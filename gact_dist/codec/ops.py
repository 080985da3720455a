"""The operators torch.ops.gact_dist.*: schemas, fakes, the PyTorch reference and the native library.

The reference (reference.py) serves every device that has no kernel of its own. The native library, built by
setup.py from csrc/, registers the CPU kernels. GACT_DIST_ISA=reference|scalar|avx2|avx512 in the environment forces
one implementation; without it the fastest one that the processor supports is used. CUDA tensors go to cuda.py; where
its kernels cannot be used, they go to the reference, with a warning.
"""

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._paths import PACKAGE_ROOT
from .._sources import OTHER_SOURCES, is_of_these_sources
from .._torch_internals import dispatch_modes
from . import cuda, nvrtc, reference, sampling
from . import format as payload_format
from .plain_calls import PlainCalls

ISAS = ("scalar", "avx2", "avx512")

_library = torch.library.Library("gact_dist", "DEF")
_warned: set[str] = set()


def _warn_slow(device_type: str, reason: str) -> None:
    """Warn once for each type of device that the slow reference is in use there, and say why."""
    if device_type in _warned:
        return
    _warned.add(device_type)
    warnings.warn(
        f"gact_dist compresses {device_type} tensors with its slow PyTorch reference: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )


def _serve_reference(function: Callable) -> Callable:
    """``function`` as a kernel that warns where it replaces a native one."""

    def kernel(tensor: Tensor, *args):
        device_type = tensor.device.type
        _warn_slow(device_type, native_error if device_type == "cpu" else "gact_dist has no kernels for this device")
        return function(tensor, *args)

    return kernel


def _serve_cuda(function: Callable, definition: Callable) -> Callable:
    """``function`` of cuda.py as a kernel, with ``definition`` as fallback where GPU kernels cannot be used."""

    def kernel(tensor: Tensor, *args):
        try:
            return function(tensor, *args)
        except nvrtc.KernelsUnavailableError as error:
            _warn_slow("cuda", str(error))
            return definition(tensor, *args)

    return kernel


def _fake_pack(x: Tensor, bits: int, group_size: int, seed: int, columns: int = 1) -> Tensor:
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_contiguous(x, "x")
    payload_format.check_columns(x.numel(), columns)
    total_bytes = payload_format.sections(x.numel(), bits, group_size, columns).total_bytes
    return x.new_empty(total_bytes, dtype=torch.uint8)


def _fake_pack_out(x: Tensor, bits: int, group_size: int, seed: int, out: Tensor, columns: int = 1) -> None:
    payload_format.check_format(bits, group_size, x.dtype)
    payload_format.check_contiguous(x, "x")
    payload_format.check_columns(x.numel(), columns)
    payload_format.check_buffer(out, payload_format.sections(x.numel(), bits, group_size, columns).total_bytes)


def _fake_unpack(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int = 1
) -> Tensor:
    payload_format.check_format(bits, group_size, dtype)
    payload_format.check_columns(numel, columns)
    return buffer.new_empty(numel, dtype=dtype)


def _fake_unpack_out(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int = 1,
) -> None:
    payload_format.check_out(out, numel, dtype)
    _fake_unpack_part(buffer, bits, group_size, numel, dtype, seed, out, columns, 0)


def _fake_unpack_part(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int,
    first: int,
) -> None:
    payload_format.check_format(bits, group_size, dtype)
    payload_format.check_columns(numel, columns)
    payload_format.check_part(out, numel, dtype, first, payload_format.part_unit(group_size, columns))


def _unpack_through(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int,
    first: int,
    function: int,
) -> None:
    payload_format.check_function(dtype, function)
    unpack_part(buffer, bits, group_size, numel, dtype, seed, out, columns, first)
    out.copy_(F.gelu(out, approximate=payload_format.FUNCTIONS[function]))


def _fake_unpack_through(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    out: Tensor,
    columns: int,
    first: int,
    function: int,
) -> None:
    payload_format.check_function(dtype, function)
    _fake_unpack_part(buffer, bits, group_size, numel, dtype, seed, out, columns, first)


def _unpack_gradient(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    grad: Tensor,
    columns: int,
    function: int,
) -> Tensor:
    payload_format.check_function(dtype, function)
    payload_format.check_out(grad, numel, dtype)
    x = unpack(buffer, bits, group_size, numel, dtype, seed, columns)
    approximate = payload_format.FUNCTIONS[function]
    return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=x)


def _fake_unpack_gradient(
    buffer: Tensor,
    bits: int,
    group_size: int,
    numel: int,
    dtype: torch.dtype,
    seed: int,
    grad: Tensor,
    columns: int,
    function: int,
) -> Tensor:
    payload_format.check_function(dtype, function)
    payload_format.check_out(grad, numel, dtype)
    return torch.empty_like(grad)


def _mask_product(buffer: Tensor, grad: Tensor, value: Tensor, selects: bool) -> Tensor:
    payload_format.check_function(grad.dtype, 0)
    if selects:
        return torch.where(unpack_mask(buffer, grad.numel(), torch.bool), grad, 0)
    return unpack_binary(buffer, grad.numel(), value).mul_(grad)


def _fake_mask_product(buffer: Tensor, grad: Tensor, value: Tensor, selects: bool) -> Tensor:
    payload_format.check_function(grad.dtype, 0)
    payload_format.check_flat(grad, "grad")
    return torch.empty_like(grad)


def _fake_pack_mask(x: Tensor) -> Tensor:
    payload_format.check_mask_dtype(x.dtype)
    payload_format.check_flat(x, "x")
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def _fake_unpack_mask(buffer: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    payload_format.check_mask_dtype(dtype)
    return buffer.new_empty(numel, dtype=dtype)


def _unpack_binary(buffer: Tensor, numel: int, value: Tensor) -> Tensor:
    # masked_fill_ would have the host read the value, and so wait for the device
    return torch.where(unpack_mask(buffer, numel, torch.bool), value, 0)


def _fake_unpack_binary(buffer: Tensor, numel: int, value: Tensor) -> Tensor:
    payload_format.check_binary_dtype(value.dtype)
    return buffer.new_empty(numel, dtype=value.dtype)


def _fake_binary_value(x: Tensor) -> Tensor:
    payload_format.check_binary_dtype(x.dtype)
    payload_format.check_flat(x, "x")
    return x.new_empty(())


def _fake_sample(x: Tensor, seed: int, first: int, bits: Tensor, logarithms: Tensor) -> Tensor:
    sampling.check_groups(x, bits, logarithms, "x")
    return x.new_empty(bits.numel(), dtype=torch.float32)


def _fake_sampled_words(bits: Tensor, logarithms: Tensor, out: Tensor) -> None:
    sampling.check_groups(out, bits, logarithms, "out")


def _fake_rounding_variance(x: Tensor, weight: Tensor, group_size: int, columns: int = 1) -> Tensor:
    payload_format.check_format(payload_format.MIN_BITS, group_size, x.dtype)
    payload_format.check_columns(x.numel(), columns)
    payload_format.check_weight(weight, x)
    return x.new_empty(payload_format.MAX_BITS, dtype=torch.float64)


def _define(schema: str, definition: Callable, fake: Callable, *, on_gpu: bool = True) -> None:
    """on_gpu: whether cuda.py has a kernel of its own; otherwise the definition, of a few operators, is meant there."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, _serve_reference(definition) if on_gpu else definition, "CompositeExplicitAutograd")
    if on_gpu:
        _library.impl(name, _serve_cuda(getattr(cuda, name), definition), "CUDA")
    torch.library.register_fake(f"gact_dist::{name}", fake, lib=_library)


_FORMAT = "int bits, int group_size"
_STORED = f"Tensor buffer, {_FORMAT}, int numel, ScalarType dtype, int seed"
_define(f"pack(Tensor x, {_FORMAT}, int seed, int columns=1) -> Tensor", reference.pack, _fake_pack)
_define(
    f"pack_out(Tensor x, {_FORMAT}, int seed, Tensor(a!) out, int columns=1) -> ()", reference.pack_out, _fake_pack_out
)
_define(f"unpack({_STORED}, int columns=1) -> Tensor", reference.unpack, _fake_unpack)
_define(f"unpack_out({_STORED}, Tensor(a!) out, int columns=1) -> ()", reference.unpack_out, _fake_unpack_out)
_define(
    f"unpack_part({_STORED}, Tensor(a!) out, int columns, int first) -> ()",
    reference.unpack_part,
    _fake_unpack_part,
    on_gpu=False,
)
_define(
    f"unpack_through({_STORED}, Tensor(a!) out, int columns, int first, int function) -> ()",
    _unpack_through,
    _fake_unpack_through,
    on_gpu=False,
)
_define(
    f"unpack_gradient({_STORED}, Tensor grad, int columns, int function) -> Tensor",
    _unpack_gradient,
    _fake_unpack_gradient,
    on_gpu=False,
)
_define(
    "mask_product(Tensor buffer, Tensor grad, Tensor value, bool selects) -> Tensor",
    _mask_product,
    _fake_mask_product,
    on_gpu=False,
)
_define("pack_mask(Tensor x) -> Tensor", reference.pack_mask, _fake_pack_mask)
_define("unpack_mask(Tensor buffer, int numel, ScalarType dtype) -> Tensor", reference.unpack_mask, _fake_unpack_mask)
_define(
    "unpack_binary(Tensor buffer, int numel, Tensor value) -> Tensor",
    _unpack_binary,
    _fake_unpack_binary,
    on_gpu=False,
)
_define("binary_value(Tensor x) -> Tensor", reference.binary_value, _fake_binary_value, on_gpu=False)
_define(
    "sample(Tensor x, int seed, int first, Tensor(a!) bits, Tensor(b!) logarithms) -> Tensor",
    sampling.sample,
    _fake_sample,
)
_define(
    "sampled_words(Tensor bits, Tensor logarithms, Tensor(a!) out) -> ()",
    sampling.sampled_words,
    _fake_sampled_words,
)
_define(
    "rounding_variance(Tensor x, Tensor weight, int group_size, int columns=1) -> Tensor",
    reference.rounding_variance,
    _fake_rounding_variance,
)

pack = torch.ops.gact_dist.pack.default
pack_out = torch.ops.gact_dist.pack_out.default
unpack = torch.ops.gact_dist.unpack.default
unpack_out = torch.ops.gact_dist.unpack_out.default
unpack_part = torch.ops.gact_dist.unpack_part.default
unpack_through = torch.ops.gact_dist.unpack_through.default
unpack_gradient = torch.ops.gact_dist.unpack_gradient.default
mask_product = torch.ops.gact_dist.mask_product.default
pack_mask = torch.ops.gact_dist.pack_mask.default
unpack_mask = torch.ops.gact_dist.unpack_mask.default
unpack_binary = torch.ops.gact_dist.unpack_binary.default
binary_value = torch.ops.gact_dist.binary_value.default
sample = torch.ops.gact_dist.sample.default
sampled_words = torch.ops.gact_dist.sampled_words.default
rounding_variance = torch.ops.gact_dist.rounding_variance.default


def pack_plain(x: Tensor, bits: int, group_size: int, seed: int, columns: int) -> Tensor:
    """``pack`` of a tensor that is no subclass, by arguments that are known to be right.

    On a GPU without the dispatcher and the checks, which take the host as long as the launch.

    Args:
        x: contiguous; on a GPU flat, or [rows, columns] with gaps between the rows.
    """
    if x.is_cuda and not dispatch_modes():
        with suppress(nvrtc.KernelsUnavailableError):  # the operator warns
            return cuda.pack_checked(x, bits, group_size, seed, columns)
    return pack(x.contiguous(), bits, group_size, seed, columns)


def unpack_plain(
    buffer: Tensor, bits: int, group_size: int, numel: int, dtype: torch.dtype, seed: int, columns: int
) -> Tensor:
    """``unpack`` in the same way."""
    if buffer.is_cuda and not dispatch_modes() and type(buffer) is Tensor:
        with suppress(nvrtc.KernelsUnavailableError):
            return cuda.unpack_checked(buffer, bits, group_size, numel, dtype, seed, columns)
    return unpack(buffer, bits, group_size, numel, dtype, seed, columns)


def plain_calls(
    device: torch.device, dtype: torch.dtype, bits: int, group_size: int, numel: int, columns: int
) -> PlainCalls | None:
    """How a device's kernels pack and unpack so many elements without an operator; None where they cannot."""
    if device.type == "cuda":
        return cuda.plain_calls(device, dtype, bits, group_size, numel, columns)
    if device.type != "cpu" or _native is None:
        return None
    calls = _native.gact_dist_pack, _native.gact_dist_unpack  # of csrc/cpu/plain.h
    return PlainCalls(*(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls))


def can_normalise(x: Tensor, mean: Tensor | None, rstd: Tensor, vectors: Sequence[Tensor]) -> bool:
    """As in cuda.py, on a CPU."""
    return _native is not None and x.dtype in _NORMALISED and payload_format.are_of_rows(x, mean, rstd, vectors)


def normalise(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """See norms.normalised(), for tensors that can_normalise() has seen. out: like x, and maybe x itself."""
    rows = rstd.numel()
    places = (None if each is None else each.data_ptr() for each in (mean, rstd, weight, bias, out))
    _normalise(x.data_ptr(), rows, x.numel() // rows, _NORMALISED[x.dtype], *places)


@functools.cache
def has_native(device: torch.device) -> bool:
    """Whether the kernels of csrc/cpu serve tensors of a device."""
    return device.type == "cpu" and _native is not None


def _load_native(wanted: str | None) -> tuple[ctypes.CDLL | None, str]:
    """(the native library, "") or (None, the reason why there is none)."""
    if wanted == "reference":
        return None, "GACT_DIST_ISA=reference asks for it"
    paths = sorted(Path(PACKAGE_ROOT).glob("_native*.so"))
    if not paths:
        return None, "the native library was not built; install a C++17 compiler and run pip install again"
    try:
        if not is_of_these_sources(paths[0]):
            return None, f"the native library is not used: {OTHER_SOURCES}"
        torch.ops.load_library(str(paths[0]))
        return ctypes.CDLL(str(paths[0])), ""
    except OSError as error:
        return None, f"the native library does not load ({error}); run pip install again with this torch version"


def isa() -> str:
    """The implementation in use for CPU tensors: "reference", "scalar", "avx2" or "avx512"."""
    return "reference" if _native is None else ISAS[_native.gact_dist_isa()]


def available_isas() -> tuple[str, ...]:
    """The native implementations that this build and this processor can run, for tests and benchmarks."""
    if _native is None:
        return ()
    before = _native.gact_dist_isa()
    names = tuple(name for number, name in enumerate(ISAS) if _native.gact_dist_set_isa(number) == 0)
    _native.gact_dist_set_isa(before)
    return names


def set_isa(name: str) -> None:
    """Choose the native implementation by name, for tests and benchmarks; all give the same bits.

    Raises ValueError when the name is unknown or this machine cannot run it.
    """
    if name not in ISAS:
        raise ValueError(f"the implementation {name!r} is unknown, expected one of {ISAS}")
    if _native is None:
        raise ValueError(f"cannot choose {name!r}: {native_error}")
    if _native.gact_dist_set_isa(ISAS.index(name)) != 0:
        raise ValueError(f"this processor or this build cannot run {name!r}; it runs {isa()!r}")


_wanted_isa = os.environ.get("GACT_DIST_ISA")
_native, native_error = _load_native(_wanted_isa)
_NORMALISED = {torch.float32: 0, torch.bfloat16: 2}
"""by what its kernel works on, the number of the Element in csrc/cpu/kernels.h"""
if _native is not None:
    _normalise: Any = _native.gact_dist_normalise
    _normalise.restype, _pointer, _count = None, ctypes.c_void_p, ctypes.c_int64
    _normalise.argtypes = (_pointer, _count, _count, ctypes.c_int, *(5 * (_pointer,)))
if _native is not None and _wanted_isa is not None:
    set_isa(_wanted_isa)
