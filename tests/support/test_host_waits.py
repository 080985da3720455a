"""The reading of traces that tests/gpu relies on, on traces made up and of a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from host_waits import host_waits
from torch.profiler import ProfilerActivity, profile, record_function


def event(name: str, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_only_calls_that_wait_inside_the_steps_are_found_in_order():
    trace = [
        event("cudaStreamSynchronize", 50.0, 51.0),
        event("steps", 10.0, 20.0),
        event("cudaMemcpyAsync", 12.0, 12.5),
        event("cudaEventSynchronize", 15.0, 30.0),
        event("cudaLaunchKernel", 13.0, 13.1),
        event("cudaDeviceSynchronize", 20.0, 21.0),  # begins when the steps are over
        event("steps", 40.0, 60.0),
        event("cudaMemcpy", 11.0, 14.0),
    ]
    assert host_waits(trace, "steps") == ["cudaMemcpy", "cudaEventSynchronize", "cudaStreamSynchronize"]


def test_a_trace_without_the_range_is_an_error_and_not_a_pass():
    with pytest.raises(ValueError, match="no range named 'steps'"):
        host_waits([event("cudaMemcpy", 1.0, 2.0)], "steps")


def test_the_profiler_of_this_torch_has_such_ranges():
    with profile(activities=[ProfilerActivity.CPU]) as trace, record_function("steps"):
        torch.ones(10).sum()
    assert host_waits(trace.events(), "steps") == []
