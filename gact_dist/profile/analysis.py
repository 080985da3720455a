"""From the lives of storages to where the memory of a step goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from .result import KINDS, Moment, Share
from .tracker import Event, Mark, Origin, Phase, Storage

_MOMENTS = 200  # of a timeline, at most
_Key = Callable[[Storage], str]


class Step:
    """One step of what a tracker wrote down, which is over, on one type of device."""

    def __init__(self, storages: list[Storage], events: list[Event], marks: list[Mark], step: int, device: str) -> None:
        self._counted = [made.device == device for made in storages]
        own = [mark for mark in marks if mark.step == step]
        end = next((mark.event for mark in marks if mark.step > step), len(events))
        self._storages, self._step = storages, step
        self._marks = own
        self._before = self._alive({}, events[: own[0].event])
        self._events = events[own[0].event : end]
        backward = next(mark.event for mark in own if mark.phase is Phase.BACKWARD)
        after_forward = self._alive(self._before, events[own[0].event : backward])
        self._kept = {number: size for number, size in after_forward.items() if storages[number].step == step}
        self._kinds = [self._kind(made, number) for number, made in enumerate(storages)]
        self._walk()

    def _kind(self, made: Storage, number: int) -> str:
        """What a storage is for; see result.KINDS."""
        if made.kind:
            return made.kind
        if made.origin is Origin.SHARDING:
            return "sharding"
        if made.step < self._step:
            return "other"
        if number in self._kept:
            return "compressed activations" if made.origin is Origin.COMPRESSION else "activations"
        return "recomputed activations" if made.recomputed else "temporaries"

    def _alive(self, before: dict[int, int], events: list[Event]) -> dict[int, int]:
        """Bytes by the number of the storage, after these events."""
        alive = dict(before)
        for event in events:
            if self._counted[event.storage]:
                alive[event.storage] = event.nbytes
        return {number: size for number, size in alive.items() if size}

    def _walk(self) -> None:
        """Find the peaks and the timeline."""
        alive, now = dict(self._before), dict.fromkeys(KINDS, 0)
        for number, size in alive.items():
            now[self._kinds[number]] += size
        total = sum(now.values())
        self.peak_bytes, self.peak_phase, peak_event = total, Phase.FORWARD, -1
        self.phase_peaks: dict[Phase, int] = {}
        self.without_optimizer_bytes = 0
        stretch = max(1, -(-len(self._events) // _MOMENTS))
        highest: list[tuple[int, Moment]] = []
        for index, (event, phase) in enumerate(self._in_phases()):
            if not self._counted[event.storage]:
                continue
            kind, change = self._kinds[event.storage], event.nbytes - alive.get(event.storage, 0)
            now[kind], total = now[kind] + change, total + change
            alive[event.storage] = event.nbytes
            if total > self.peak_bytes:
                self.peak_bytes, self.peak_phase, peak_event = total, phase, index
            self.phase_peaks[phase] = max(total, self.phase_peaks.get(phase, 0))
            if phase is not Phase.OPTIMIZER:
                self.without_optimizer_bytes = max(total - now["optimizer state"], self.without_optimizer_bytes)
            is_new = index // stretch >= len(highest)
            if is_new or total > highest[-1][0]:
                moment = Moment(event.time - self._marks[0].time, phase.value, dict(now))
                highest = [*highest, (total, moment)] if is_new else [*highest[:-1], (total, moment)]
        self.timeline = tuple(moment for _, moment in highest)
        self._at_peak = self._alive(self._before, self._events[: peak_event + 1])
        self.peak_site = self._described(self._events[peak_event].storage) if peak_event >= 0 else ""

    def _in_phases(self) -> Iterator[tuple[Event, Phase]]:
        first = self._marks[0].event
        ends = [mark.event - first for mark in self._marks[1:]] + [len(self._events)]
        begin = 0
        for mark, end in zip(self._marks, ends, strict=True):
            for event in self._events[begin:end]:
                yield event, mark.phase
            begin = end

    def _described(self, number: int) -> str:
        """What made a storage, and where."""
        made = self._storages[number]
        return " ".join(part for part in (made.operator, made.site.module, made.site.line) if part)

    def peak(self) -> dict[str, int]:
        """Bytes at the peak by kind."""
        return self._by_kind(self._at_peak, lambda _: "")[""]

    @property
    def activation_bytes(self) -> int:
        """What the forward made and left for the backward."""
        return sum(size for number, size in self._kept.items() if self._kinds[number] == "activations")

    def by_module(self) -> tuple[Share, ...]:
        """What modules have; "" is what belongs to none."""
        return self._shares(lambda made: made.site.module)

    def by_operator(self) -> tuple[Share, ...]:
        """What operators have made; "" is what was there before."""
        return self._shares(lambda made: made.operator)

    def by_line(self) -> tuple[Share, ...]:
        """What lines have made; "" is what has none, such as parameters."""
        return self._shares(lambda made: made.site.line)

    def _shares(self, key: _Key) -> tuple[Share, ...]:
        """The largest at the peak first."""
        peak, kept = self._by_kind(self._at_peak, key), self._by_kind(self._kept, key)
        shares = [Share(name, peak.get(name, {}), kept.get(name, {})) for name in {**peak, **kept}]
        return tuple(sorted(shares, key=lambda share: (-share.peak_bytes, -share.kept_bytes, share.name)))

    def _by_kind(self, alive: dict[int, int], key: _Key) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for number, size in alive.items():
            found[key(self._storages[number])][self._kinds[number]] += size
        return {name: {kind: sizes[kind] for kind in KINDS if kind in sizes} for name, sizes in found.items()}
