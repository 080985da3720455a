"""Packed bytes to pinned host memory and back, ahead of time, without a wait on the host."""

from .manager import HostOffload, OffloadStatistics, Payload, open_offload, require_cuda

__all__ = ["HostOffload", "OffloadStatistics", "Payload", "open_offload", "require_cuda"]
