"""Memory that the C library keeps after tensors on the CPU were freed."""

import ctypes
import sys


def trim() -> None:
    """Return what glibc's allocator holds unused to the system; nothing with another C library.

    An adaptation allocates several times what a step does, in pieces that lie between what stays: a small GPT had
    2,000 MB resident after it, of which 320 were in use.
    """
    if sys.platform == "linux":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)
