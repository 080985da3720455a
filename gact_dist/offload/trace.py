"""What happened to the payloads of one step, and what a planner learns from it.

Bandwidth is that of the job's own copies, by events on their streams. The ranks of a host copy in the same phases of a
step, so what each of them measures is its share, beside whatever else uses bus and memory; no collective is needed.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..config import Offload
from .device import Event
from .schedule import Limits, Passage, choose

_PATIENCE_STEPS = 16  # between two plans for the same tensors
_WORTH_A_PLAN = 0.02  # part of a step that stalls, or of its bytes that changed


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: once `ready` had passed it waited only for the copies queued before it; `end` follows it."""

    nbytes: int
    ready: tuple[Event, ...]
    end: Event


@dataclass(frozen=True, slots=True)
class PackEvent:
    """A payload as it was placed."""

    name: str
    nbytes: int
    reached: Event


@dataclass(slots=True, eq=False)
class Trace:
    """The payloads of one forward, from packing until their graph is freed."""

    alive: dict[str, Any] = field(default_factory=dict)
    """name -> what the manager holds of each payload that the graph still owns"""
    packed: list[PackEvent] = field(default_factory=list)
    sent: list[Copy] = field(default_factory=list)
    returned: list[Copy] = field(default_factory=list)
    uses: list[tuple[str, Event]] = field(default_factory=list)
    """(name, when the device reached it) of every unpacking"""
    waits: list[tuple[Event, Event]] = field(default_factory=list)
    """(when the device reached it, what it waited for)"""
    sent_bytes: int = 0
    peak_device_bytes: int = 0
    away: list[str] = field(default_factory=list)
    """names that were sent to the host, in the order of packing"""
    resident: deque[str] = field(default_factory=deque)
    """names that are back on the device, or on their way, and not fetched yet"""
    route: list[str] | None = None
    """names of `away` in the order in which backward is expected to ask for them"""
    position: int = 0
    """in the route, right after what was fetched last"""
    window: list[str] = field(default_factory=list)
    """the next names of the route, as many as are brought back ahead"""

    @property
    def is_over(self) -> bool:
        """Whether its graph is gone and all its events have passed."""
        if self.alive:
            return False
        events = [copies[-1].end for copies in (self.sent, self.returned) if copies]  # each list is one stream's
        events += [reached for reached, _ in self.waits]
        events += [reached for _, reached in self.uses]
        events += [packed.reached for packed in self.packed]
        return all(event.done() for event in events)

    def note_packed(self, name: str, nbytes: int, held: Any, reached: Event) -> None:
        """A payload was placed. held: what the manager has of it."""
        self.alive[name] = held
        self.packed.append(PackEvent(name, nbytes, reached))

    def note_sent(self, name: str, copy: Copy) -> None:
        """A payload's copy to the host was queued."""
        self.sent.append(copy)
        self.away.append(name)
        self.sent_bytes += copy.nbytes

    def note_returned(self, name: str, copy: Copy) -> None:
        """A payload's copy back to the device was queued."""
        self.returned.append(copy)
        self.resident.append(name)

    def note_kept(self, name: str) -> None:
        """A payload reached the host, and its device memory stays because backward is about to ask for it."""
        self.resident.append(name)

    def note_released(self, name: str) -> None:
        """The device memory of a payload that was resident is dropped."""
        self.resident.remove(name)

    def note_wait(self, reached: Event, awaited: Event) -> None:
        """A stream was told to wait for a copy."""
        self.waits.append((reached, awaited))

    def note_device_bytes(self, device_bytes: int) -> None:
        """Payloads hold so many bytes on the device now."""
        self.peak_device_bytes = max(self.peak_device_bytes, device_bytes)

    def note_used(self, name: str, reached: Event, order: Sequence[str]) -> None:
        """A payload is being unpacked; the first one starts the backward. order: see start_backward."""
        self.uses.append((name, reached))
        if self.route is None:
            self.start_backward(order)

    def note_dropped(self, name: str, held: Any) -> None:
        """The graph no longer owns a payload."""
        if self.alive.get(name) is held:
            del self.alive[name]

    def start_backward(self, order: Sequence[str]) -> list[str]:
        """Set and return the route: the order of an earlier step. A name that is not in it follows the one that was
        packed after it, as in a backward that runs the forward in reverse."""
        away = set(self.away)
        places = [(float(place), name) for place, name in enumerate(order) if name in away]
        first = dict(reversed([(name, place) for place, name in places]))
        place = -1.0
        for name in reversed(self.away):
            if name in first:
                place = first[name]
            else:
                places.append((place + 0.5, name))
        self.route = [name for _, name in sorted(places, key=lambda entry: entry[0])]
        return self.route

    def advance(self, name: str) -> None:
        """Move behind a name of the route; a backward that starts over (retain_graph) goes back to it."""
        route = self.route or []
        if self.position < len(route) and route[self.position] == name:  # as expected: no need to search the rest
            self.position += 1
        elif name in route:
            start = self.position if name in route[self.position :] else 0
            self.position = route.index(name, start) + 1

    def look_ahead(self, count: int) -> list[str]:
        """Set and return the window: the next `count` names of the route."""
        self.window = (self.route or [])[self.position : self.position + count]
        return self.window


class _Clock:
    """Times of a trace's events in seconds from its first; with the stalls, or as if there had been none."""

    def __init__(self, trace: Trace) -> None:
        self._origin = trace.packed[0].reached
        stalls = [(self.at(reached), self.at(awaited) - self.at(reached)) for reached, awaited in trace.waits]
        stalls = sorted(stall for stall in stalls if stall[1] > 0)
        self.stalls = len(stalls)
        self._starts = [start for start, _ in stalls]
        self._lost = [0.0, *accumulate(length for _, length in stalls)]

    @property
    def stall_s(self) -> float:
        return self._lost[-1]

    def at(self, event: Event) -> float:
        return event.seconds_since(self._origin)

    def without_stalls(self, event: Event) -> float:
        moment = self.at(event)
        return moment - self._lost[bisect_left(self._starts, moment)]

    def bandwidth(self, copies: Sequence[Copy]) -> float | None:
        """Bytes a second while copying; None without a copy."""
        busy, free = 0.0, float("-inf")
        for copy in copies:
            end = self.at(copy.end)
            busy += end - max(free, *(self.at(event) for event in copy.ready))
            free = end
        return sum(copy.nbytes for copy in copies) / busy if busy > 0 else None


class Planner:
    """Learns from the steps that are over what to send, and the order in which backward asks for it."""

    def __init__(self, settings: Offload, max_host_bytes: int) -> None:
        self.order: list[str] = []
        self.last: Trace | None = None
        """the last step that had a backward"""
        self._settings = settings
        self._max_host_bytes = max_host_bytes
        self._pending: list[Trace] = []
        self._sizes: dict[str, int] = {}
        self._chosen: frozenset[str] = frozenset()
        self._bandwidth: list[float | None] = [None, None]
        self._age = 0

    def leaves(self, name: str) -> bool:
        """Whether a payload is to be sent to the host; one that is in no plan yet is sent."""
        return name in self._chosen or name not in self._sizes

    def add(self, trace: Trace) -> None:
        """Take over the trace of a step whose forward is over."""
        if trace.packed:
            self._pending.append(trace)

    def learn(self) -> None:
        """Learn from the traces that are over by now; one without a backward is left out."""
        for trace in self._take_over():
            if not trace.uses:
                continue
            complete = {name for name, _ in trace.uses} >= {packed.name for packed in trace.packed}
            if complete or not self.order:
                self.order = [name for name, _ in trace.uses]
            self.last = trace
            self._age += 1
            self._plan(trace)

    def _take_over(self) -> Iterator[Trace]:
        for trace in list(self._pending):
            if trace.is_over:
                self._pending.remove(trace)
                yield trace

    def _plan(self, trace: Trace) -> None:
        sizes = {packed.name: packed.nbytes for packed in trace.packed}
        known = sizes.keys() <= self._sizes.keys()
        if known and self._age < _PATIENCE_STEPS:
            return
        self._age = 0
        clock = _Clock(trace)
        self._measure(trace, clock)
        passages = _passages(trace, clock)
        if known and not self._is_due(sizes, clock.stall_s, clock.without_stalls(trace.uses[-1][1])):
            return
        out_rate, in_rate = self._bandwidth
        if out_rate is None:
            return  # nothing has left so far: there was no host memory
        limits = Limits(
            out_rate,
            in_rate or out_rate,
            self._settings.prefetch,
            self._max_host_bytes,
            self._settings.max_device_bytes,
        )
        self._chosen = (self._chosen - sizes.keys()) | choose(passages, limits)
        self._sizes |= sizes

    def _measure(self, trace: Trace, clock: _Clock) -> None:
        found = clock.bandwidth(trace.sent), clock.bandwidth(trace.returned)
        self._bandwidth = [new or old for new, old in zip(found, self._bandwidth, strict=True)]

    def _is_due(self, sizes: dict[str, int], stall_s: float, step_s: float) -> bool:
        """Whether a plan for tensors that are all known is out of date."""
        changed = sum(abs(nbytes - self._sizes[name]) for name, nbytes in sizes.items())
        stalled = self._settings.max_device_bytes == 0 and stall_s > _WORTH_A_PLAN * step_s
        return stalled or changed > _WORTH_A_PLAN * sum(sizes.values())


def stalls(trace: Trace) -> tuple[int, float]:
    """How often, and for how many seconds, the device waited for a copy in a step that is over."""
    clock = _Clock(trace)
    return clock.stalls, clock.stall_s


def _passages(trace: Trace, clock: _Clock) -> list[Passage]:
    """The payloads of a step in the order of packing; what was never unpacked counts as unpacked last."""
    first: dict[str, Event] = dict(reversed(trace.uses))
    last = trace.uses[-1][1]
    return [
        Passage(
            packed.name,
            packed.nbytes,
            clock.without_stalls(packed.reached),
            clock.without_stalls(first.get(packed.name, last)),
        )
        for packed in trace.packed
    ]
