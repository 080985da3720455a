"""Tensors to packed bytes and back: the format, its definition in plain PyTorch, and kernels that give the same bits.

Knows nothing of autograd, plans or jobs. docs/codec.md describes the stored bytes.
"""

from .driver import DriverError, find_driver
from .error_bounded import pack_error_bounded
from .format import DEFAULT_GROUP_SIZE, GROUP_SIZES, MAX_BITS
from .mixed_widths import UnitWidths, columns_within
from .norms import normalised
from .nvrtc import KernelsUnavailableError, find_nvrtc
from .ops import isa, native_error, rounding_variance
from .packed import (
    Packed,
    Packer,
    Scheme,
    borrow,
    columns_of,
    exact,
    from_tensors,
    function_part,
    gelu_gradient,
    has_functions,
    has_products,
    is_binary,
    mask_product,
    metadata_bits,
    pack,
    pack_binary,
    pack_flags,
    pack_log_probabilities,
    pack_mask,
    pack_narrow,
    pack_within,
    packer_of,
    part_unit,
    stored_bytes,
    stored_values,
    to_tensors,
    unpack,
    unpack_part,
    unpack_without_gaps,
    with_payload,
    without_payload,
)

__all__ = [
    "DEFAULT_GROUP_SIZE", "GROUP_SIZES", "MAX_BITS", "DriverError", "KernelsUnavailableError", "Packed",
    "Packer", "Scheme", "UnitWidths", "borrow", "columns_of", "columns_within", "exact", "find_driver", "find_nvrtc",
    "from_tensors", "function_part", "gelu_gradient", "has_functions", "has_products", "is_binary", "isa",
    "mask_product", "metadata_bits", "native_error", "normalised", "pack", "pack_binary", "pack_error_bounded",
    "pack_flags", "pack_log_probabilities", "pack_mask", "pack_narrow", "pack_within", "packer_of", "part_unit",
    "rounding_variance", "stored_bytes", "stored_values", "to_tensors", "unpack", "unpack_part",
    "unpack_without_gaps", "with_payload", "without_payload",
]  # fmt: skip
