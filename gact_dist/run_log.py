"""What a run writes about itself into Config.run_dir, for `gact-dist report` and for anyone who reads lines of JSON.

    run.json            settings, versions and ranks of the run
    steps.jsonl         rank 0, a line a step: bytes, peak, seconds, and what Controller.log() was given
    saved.jsonl         rank 0, in the first step and after adaptations: every saved tensor and what was kept of it
    adaptations.jsonl   rank 0, a line an adaptation: Adaptation.to_dict()
    gradient.jsonl      rank 0, a line a comparison with the exact gradient: squared errors, predicted and measured
    ranks/rank0.jsonl   every rank, a line a plan: its digest, and the bytes of the first step under it

A resumed run goes on in the same files; a reader takes the last line of a step.

[Note: no waiting] Nothing here may hold up a step. A number that is still on its way from a GPU is copied to pinned
memory, and its line is written in a later step, when the copy's event has passed. What was written reaches the disk
once a second. Where the disk refuses, one warning is all that happens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import resource
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
VERSION = 1
"""of the files"""
_FLUSH_S = 1.0
_DIGEST_BYTES = 8


class _Number:
    """A number of a tensor that may be on its way from a device. See [Note: no waiting]."""

    def __init__(self, tensor: Tensor) -> None:
        value = tensor.detach()
        self._event: torch.cuda.Event | None = None
        self._host = value
        if value.device.type == "cuda":
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        elif value.device.type == "cpu":
            self._host = value.clone()  # the job may write over it

    def arrived(self) -> bool:
        """Whether it can be read without a wait."""
        return self._event is None or self._event.query()

    def value(self) -> float:
        """The number; waits where it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)


class _Files:
    """Lines of JSON in the files of one folder, and those whose numbers have not arrived."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TextIO] = {}
        self._broken = False
        self._flushed_s = 0.0
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self.current: dict[str, Any] = {}
        """the line of the step that goes on"""

    def write_whole(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of its own."""
        try:
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._give_up(error)

    def add(self, name: str, line: dict[str, Any]) -> None:
        """Write a line, as soon as all before it can be written."""
        self._waiting.append((name, line))
        while self._waiting and all(number.arrived() for number in _numbers(self._waiting[0][1])):
            self._write(*self._waiting.popleft())
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Write what is left, the line of the current step included. May wait for a device."""
        if len(self.current) > 1:
            self._waiting.append(("steps.jsonl", self.current))
        self.current = {}
        while self._waiting:
            self._write(*self._waiting.popleft())
        self._flush()
        for file in self._open.values():
            with suppress(OSError):  # said already
                file.close()
        self._open.clear()

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if self._broken:
            return
        plain = {key: value.value() if isinstance(value, _Number) else value for key, value in line.items()}
        try:
            if name not in self._open:
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                self._open[name] = (self._folder / name).open("a")
            self._open[name].write(json.dumps(_finite(plain)) + "\n")
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        self._flushed_s = time.monotonic()
        try:
            for file in self._open.values():
                file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            _log.warning("the log of this run cannot be written to run_dir (%s): the job goes on without it", error)


class RunLog:
    """The log of one attached model on one rank."""

    def __init__(self, folder: str, rank: int, about: Mapping[str, Any], device: torch.device) -> None:
        """rank: of the job; 0 writes all, the others say which plan they have. about: the run, for run.json."""
        self._files, self._is_first = _Files(Path(folder).expanduser()), rank == 0
        self._of_rank, self._device = f"ranks/rank{rank}.jsonl", device
        self._began_s: float | None = None
        self._plan_line: dict[str, Any] | None = None
        self._shows_saved = True
        self._measuring_s = 0.0  # in the current step, of adaptations and comparisons
        self._comparison: Mapping[str, Any] | None = None
        if self._is_first:
            started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self._files.write_whole("run.json", {"version": VERSION, "started": started, **about})
        self._closing = weakref.finalize(self, _Files.close, self._files)  # at the latest when the process ends

    def begin(self, step: int, compressing_s: float = 0.0) -> None:
        """A step begins, and the one before is over. compressing_s: that the hooks took in that one."""
        now_s = time.perf_counter()
        self._end(now_s, compressing_s)
        self._began_s, self._files.current = now_s, {"step": step}

    def stored(self, rows: Sequence[Any], exact_bytes: int) -> None:
        """After the step's forward. rows: hooks.ReportRow of each saved tensor. exact_bytes: of the untouched job."""
        retained_bytes = sum(row.bytes for row in rows)
        self._files.current |= {"retained_bytes": retained_bytes, "exact_bytes": exact_bytes}
        if self._plan_line is not None:
            line, self._plan_line = self._plan_line, None
            self._files.add(self._of_rank, {**line, "retained_bytes": retained_bytes, "exact_bytes": exact_bytes})
        if self._shows_saved and self._is_first:
            self._shows_saved = False
            saved = [
                [row.name, list(row.shape), str(row.dtype).removeprefix("torch."), row.codec, row.bits, row.bytes]
                for row in rows
            ]
            self._files.add("saved.jsonl", {"step": self._files.current.get("step"), "rows": saved})

    def add(self, values: Mapping[str, float | Tensor]) -> None:
        """Values of the current step. Raises ValueError for a tensor with several elements."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"log({name}=...) got a tensor of shape {tuple(value.shape)}, expected one number")
        if self._is_first:
            found = {name: _Number(v) if isinstance(v, Tensor) else float(v) for name, v in values.items()}
            self._files.current |= found

    def adapted(self, entry: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        """An adaptation set a plan. entry: its line. plan: bits by name."""
        text = json.dumps(sorted((name, bits) for name, bits in plan.items()))
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        self._plan_line = {"step": entry["step"], "plan": digest, "tensors": len(plan)}
        self._shows_saved = True
        if self._is_first:
            self._files.add("adaptations.jsonl", dict(entry))

    def measured(self, seconds: float, comparison: Mapping[str, Any] | None) -> None:
        """Something was measured. comparison: the latest of the gradient with the exact one, and its step."""
        self._measuring_s += seconds
        if self._is_first and comparison is not None and comparison != self._comparison:
            self._comparison = comparison
            self._files.add("gradient.jsonl", dict(comparison))

    def close(self, compressing_s: float = 0.0) -> None:
        """The run is over, or the controller detached. compressing_s: see begin()."""
        self._end(time.perf_counter(), compressing_s)
        self._closing()

    def _end(self, now_s: float, compressing_s: float) -> None:
        """The current step is over: its line is complete."""
        line, self._files.current = self._files.current, {}
        if self._began_s is None or not self._is_first or not line:
            return
        line["time_s"] = now_s - self._began_s
        line["compressing_s"], line["measuring_s"] = compressing_s, self._measuring_s
        self._measuring_s = 0.0
        line["peak_bytes"] = self._peak_bytes()
        self._files.add("steps.jsonl", line)

    def _peak_bytes(self) -> int:
        """The most memory so far: of the GPU's allocator, or of the process. Waits for nothing."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory that this process had so far. getrusage() on Linux counts what its parent had as well."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _numbers(line: Mapping[str, Any]) -> list[_Number]:
    return [value for value in line.values() if isinstance(value, _Number)]


def _finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value
