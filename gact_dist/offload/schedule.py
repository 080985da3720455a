"""Which stored tensors leave the device: (their times and sizes in a step, copy bandwidth, limits) -> names. Pure.

A payload is packed at some time in the forward and unpacked at some time in the backward. The replay below runs the
copies of a step by the rules that manager.py follows, on the times that a step took without its stalls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

IN_FLIGHT_FRACTION = 8
"""Copies in flight in one direction hold at most 1/8 of what a step sends (two payloads are always allowed)."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One payload of a step: when it was packed and first unpacked, in seconds, and its size."""

    name: str
    nbytes: int
    packed_s: float
    unpacked_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What copies may use."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    prefetch: int
    """payloads brought back ahead of the one that backward asks for"""
    max_host_bytes: int
    max_device_bytes: int
    """payload bytes that may stay on the device; 0 where no stall is worth the memory"""


def in_flight_bound(sent_bytes: int, nbytes: int) -> int:
    """Bytes that copies in one direction may hold on the device, counting a new one of nbytes."""
    return max(2 * nbytes, sent_bytes // IN_FLIGHT_FRACTION)


def choose(passages: Sequence[Passage], limits: Limits) -> frozenset[str]:
    """Names of the payloads to send to the host, given all payloads of a step in the order of packing.

    With max_device_bytes 0: as many as can go and come back without a stall, those that are away longest first.
    Otherwise: the first of these and then of the others, until the rest fits on the device, even if that causes stalls.
    """
    longest_first = sorted(passages, key=lambda passage: passage.packed_s - passage.unpacked_s)
    free = _without_stall(passages, longest_first, limits)
    if limits.max_device_bytes == 0:
        return free
    total = sum(passage.nbytes for passage in passages)
    chosen: set[str] = set()
    sent = largest = 0
    for passage in sorted(longest_first, key=lambda passage: passage.name not in free):
        if total - sent + (in_flight_bound(sent, largest) if sent else 0) <= limits.max_device_bytes:
            break
        if sent + passage.nbytes <= limits.max_host_bytes:
            chosen.add(passage.name)
            sent, largest = sent + passage.nbytes, max(largest, passage.nbytes)
    return frozenset(chosen)


def _without_stall(passages: Sequence[Passage], candidates: Sequence[Passage], limits: Limits) -> frozenset[str]:
    """Candidates taken greedily while a replay has no stall, in runs whose length doubles on success, else halves."""
    chosen: set[str] = set()
    start, length = 0, len(candidates)
    while start < len(candidates):
        more = {passage.name for passage in candidates[start : start + length]}
        if replay(passages, chosen | more, limits):
            chosen |= more
            start, length = start + length, 2 * length
        elif length > 1:
            length //= 2
        else:
            start += 1
    return frozenset(chosen)


def replay(passages: Sequence[Passage], leaving: set[str], limits: Limits) -> bool:
    """Whether these payloads go and come back without a stall, and fit into the host's memory."""
    away = [passage for passage in passages if passage.name in leaving]
    if sum(passage.nbytes for passage in away) > limits.max_host_bytes:
        return False
    arrived = _send(away, limits)
    if arrived is None:
        return False
    first_unpack = min((passage.unpacked_s for passage in passages), default=0.0)
    return _bring_back(sorted(away, key=lambda passage: passage.unpacked_s), arrived, first_unpack, limits)


def _send(away: Sequence[Passage], limits: Limits) -> dict[str, float] | None:
    """When each payload has reached the host; None where the device would have to wait for one to leave."""
    arrived: dict[str, float] = {}
    queue: list[tuple[float, int]] = []
    sent = in_flight = 0
    free_s = 0.0
    for passage in away:
        while queue and queue[0][0] <= passage.packed_s:
            in_flight -= queue.pop(0)[1]
        sent += passage.nbytes
        in_flight += passage.nbytes
        if in_flight > in_flight_bound(sent, passage.nbytes):
            return None
        free_s = max(free_s, passage.packed_s) + passage.nbytes / limits.out_bytes_per_s
        queue.append((free_s, passage.nbytes))
        arrived[passage.name] = free_s
    return arrived


def _bring_back(route: Sequence[Passage], arrived: dict[str, float], first_unpack: float, limits: Limits) -> bool:
    """Whether every payload is back when it is unpacked; route: those away, in the order of unpacking."""
    total = sum(passage.nbytes for passage in route)
    ready: list[float] = []
    resident, free_s = 0, 0.0
    for used, moment in enumerate([first_unpack, *(passage.unpacked_s for passage in route)]):
        # at this moment the first `used` payloads have been unpacked, and as many as `prefetch` more may be asked for
        if used and (len(ready) < used or ready[used - 1] > moment):
            return False
        resident -= route[used - 1].nbytes if used else 0
        while len(ready) < min(len(route), used + limits.prefetch):
            passage = route[len(ready)]
            if resident and resident + passage.nbytes > in_flight_bound(total, passage.nbytes):
                break
            resident += passage.nbytes
            start = max(free_s, moment, arrived[passage.name])
            free_s = start + passage.nbytes / limits.in_bytes_per_s
            ready.append(free_s)
    return True
