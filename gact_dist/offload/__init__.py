"""Packed bytes to pinned host memory and back, ahead of time, without a wait on the host."""

from .manager import HostOffload, OffloadStatistics, Payload, open_offload, require_cuda
from .pack_stream import PackStream, open_pack_stream

__all__ = [
    "HostOffload", "OffloadStatistics", "PackStream", "Payload", "open_offload", "open_pack_stream", "require_cuda",
]  # fmt: skip
