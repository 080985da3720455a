"""How kernels are called without an operator: what csrc/hooks/packer.h needs to know of a device's."""

from typing import Any, NamedTuple


class PlainCalls(NamedTuple):
    """Of the kernels "pack" and "unpack" of one format, for tensors of one number of elements."""

    pack: int
    """the address of a function of csrc/cpu/plain.h, or of the driver's for a kernel"""
    unpack: int
    """likewise"""
    launch: int = 0
    """the address of cuLaunchKernel; 0 for functions that are called as they are"""
    driver: Any = None
    """of a GPU"""
    blocks: int = 0
    threads: int = 0
    """in a block"""
    alignment: int = 1
    """bytes at whose multiples elements have to begin"""
