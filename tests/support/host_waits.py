"""Where the host waits for a CUDA device: read off a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Calls of CUDA's runtime and driver that return only when the device has come to some point, or that have it come to
# one (freeing does). Asynchronous copies are other calls: cudaMemcpyAsync.
WAITS = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset", "cudaFree",
    "cudaFreeHost", "cudaHostUnregister", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
})  # fmt: skip


def host_waits(events: Iterable[Any], within: str) -> list[str]:
    """Names of the waiting calls of a trace that began inside a record_function(within), in order of time.

    events: what torch.profiler.profile.events() has. Raises ValueError where no such range was recorded.
    """
    events = list(events)
    ranges = [event.time_range for event in events if event.name == within]
    if not ranges:
        raise ValueError(
            f"there is no range named {within!r} in the trace, expected a record_function around the steps"
        )
    calls = sorted((event.time_range.start, event.name) for event in events if event.name in WAITS)
    return [name for start, name in calls if any(found.start <= start < found.end for found in ranges)]
