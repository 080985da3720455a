"""Packed bytes to pinned host memory and back, ahead of time, without a wait on the host."""

from .manager import OffloadStatistics, Payload, Storage, open_storage, require_cuda

__all__ = ["OffloadStatistics", "Payload", "Storage", "open_storage", "require_cuda"]
