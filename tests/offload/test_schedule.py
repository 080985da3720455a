"""Which payloads leave: as many as cost no stall, or just enough to fit."""

from __future__ import annotations

import pytest

from gact_dist.offload.schedule import Limits, Passage, choose, in_flight_bound, replay

MB = 10**6


def steps(count: int, nbytes: int = MB, every_s: float = 1e-3) -> list[Passage]:
    """A forward that packs one payload after the other, and a backward that unpacks them in reverse, twice as slow."""
    forward = count * every_s
    return [Passage(f"t{i}", nbytes, i * every_s, forward + (count - 1 - i) * 2 * every_s) for i in range(count)]


def limits(rate: float = 1e9, prefetch: int = 2, host: int = 2**40, device: int = 0) -> Limits:
    return Limits(rate, rate, prefetch, host, device)


def test_the_last_of_the_forward_stay_and_all_others_leave_where_copies_are_fast():
    # 10 us a copy, 1 ms between packs: the last one is unpacked 1 ms after it was packed, but it is also the first that
    # backward asks for, and nothing can be asked for before that
    assert choose(steps(20), limits(rate=1e11)) == {f"t{i}" for i in range(19)}


def test_what_cannot_be_back_in_time_stays():
    # 4 ms a copy: of the payloads that are packed every 1 ms, one in four can leave
    chosen = choose(steps(40), limits(rate=MB / 4e-3))
    assert {"t0", "t4", "t8", "t12", "t16", "t20", "t24", "t28", "t32"} <= chosen
    assert len(chosen) <= 40 / 4


def test_no_payload_could_be_added_without_a_stall():
    for rate in (MB / 5e-4, MB / 1e-3, MB / 3e-3):
        payloads, bounds = steps(30), limits(rate)
        chosen = set(choose(payloads, bounds))
        assert replay(payloads, chosen, bounds)
        rest = {passage.name for passage in payloads} - chosen
        assert rest
        assert not any(replay(payloads, chosen | {name}, bounds) for name in rest)


def test_slower_copies_never_let_more_leave():
    counts = [len(choose(steps(40), limits(rate=MB / copy_s))) for copy_s in (1e-4, 1e-3, 2e-3, 4e-3, 1e-2, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_without_looking_ahead_nothing_leaves_freely():
    assert choose(steps(20), limits(prefetch=0)) == frozenset()


def test_host_memory_bounds_what_leaves():
    assert len(choose(steps(20), limits(rate=1e11, host=5 * MB))) == 5


@pytest.mark.parametrize("device", [4 * MB, 10 * MB, 16 * MB])
def test_just_enough_leave_to_fit(device):
    # 50 ms a copy: hardly anything comes back without a stall, and still it has to leave
    payloads = steps(20)
    chosen = choose(payloads, limits(rate=MB / 0.05, device=device))
    sent = len(chosen) * MB
    assert 20 * MB - sent + in_flight_bound(sent, MB) <= device
    assert 20 * MB - (sent - MB) + in_flight_bound(sent - MB, MB) > device  # one less would not do
    assert chosen == {f"t{i}" for i in range(len(chosen))}  # away longest


def test_nothing_leaves_that_already_fits():
    assert choose(steps(20), limits(device=20 * MB)) == frozenset()


def test_a_step_without_payloads_has_an_empty_plan():
    assert choose([], limits()) == frozenset()
