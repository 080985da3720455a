"""A run that was: what gact_dist wrote into Config.run_dir (run_log.py), or what examples/train wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .layers import with_exact_bytes
from .loading import UserCode
from .output import CommandError

_ROW = ("name", "shape", "dtype", "codec", "bits", "bytes")
_NUMBERS = ("loss", "retained_bytes", "exact_bytes", "time_s", "compressing_s", "measuring_s", "peak_bytes")
_NAMES = "run.json of Config(run_dir=...), or result.json of examples/train"


@dataclass
class Run:
    """The lines of one run. Those of a step that a resumed run did again are those of the last time."""

    name: str
    about: dict[str, Any] = field(default_factory=dict)
    """run.json"""
    steps: list[dict[str, Any]] = field(default_factory=list)
    adaptations: list[dict[str, Any]] = field(default_factory=list)
    saved: list[dict[str, Any]] = field(default_factory=list)
    """of some steps: {"step", "rows": the saved tensors}"""
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    ranks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """what each rank says of its plans"""
    unread: dict[str, int] = field(default_factory=dict)
    """lines by file that are not as they were written: a job that was killed leaves half of the last one"""
    result: dict[str, Any] = field(default_factory=dict)
    """result.json of examples/train: peaks above the start of training, accuracy"""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return int(self.about.get("world_size", 1))

    @cached_property
    def losses(self) -> tuple[list[int], list[float]]:
        """(steps, loss in each of them)"""
        if "losses" in self.result:  # means over the ranks
            return list(range(1, len(self.result["losses"]) + 1)), self.result["losses"]
        found = [(line["step"], line["loss"]) for line in self.steps if line.get("loss") is not None]
        return [step for step, _ in found], [loss for _, loss in found]

    @cached_property
    def compresses(self) -> bool:
        """Whether anything was compressed, or exact under the machinery."""
        return any("retained_bytes" in line for line in self.steps) or bool(self.result.get("report"))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The saved tensors of the last step that lists them; see layers.with_exact_bytes()."""
        rows = self.saved[-1]["rows"] if self.saved else (self.result.get("report") or {}).get("rows", [])
        return with_exact_bytes(rows, self.last_bytes[0]) if rows and self.last_bytes else []

    @cached_property
    def last_bytes(self) -> tuple[int, int] | None:
        """(exact, retained) of the last step."""
        for line in reversed(self.steps):
            if "retained_bytes" in line:
                return line["exact_bytes"], line["retained_bytes"]
        report = self.result.get("report")
        return (report["exact_bytes"], report["retained_bytes"]) if report else None

    @cached_property
    def step_s(self) -> float | None:
        """The median time of a step that measures nothing."""
        if "step_time_median_s" in self.result:
            return float(self.result["step_time_median_s"])
        plain = [line["time_s"] for line in self.steps if "time_s" in line and not line.get("measuring_s")]
        timed = plain or [line["time_s"] for line in self.steps if "time_s" in line]
        return statistics.median(timed) if timed else None

    @property
    def knows_training_alone(self) -> bool:
        """Whether its peaks are above what the process had before training; those of one that did not end are not."""
        return "step_peaks_bytes" in self.result

    @cached_property
    def peaks_bytes(self) -> list[int]:
        """The most memory: in each step of training alone if that is known, else of the process or the GPU's allocator
        until then."""
        if self.knows_training_alone:
            return self.result["step_peaks_bytes"]
        return [line["peak_bytes"] for line in self.steps if "peak_bytes" in line]

    @cached_property
    def peak_bytes(self) -> int | None:
        """The most of all steps."""
        return max(self.peaks_bytes, default=None)

    @cached_property
    def average_bits(self) -> float | None:
        """Bits of an element under the last plan."""
        chosen = [line["average_bits"] for line in self.adaptations if line.get("average_bits")]
        return chosen[-1] if chosen else None


def find_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in some folders, each one run or a folder of runs; untouched ones first. Raises CommandError."""
    paths: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise CommandError(f"there is no folder {folder}, expected a run's: with {_NAMES}")
        inside = [folder] if _is_run(folder) else sorted(path for path in folder.iterdir() if _is_run(path))
        if not inside:
            raise CommandError(f"{folder} holds no run, expected {_NAMES}, in it or in its folders")
        paths += inside
    different = list({path.resolve(): path for path in paths}.values())
    names = [path.resolve().name for path in different]
    found = []
    for path, name in zip(different, names, strict=True):
        with UserCode(f"reading the run in {path}"):  # others may have written it
            found.append(_read(path, name if names.count(name) == 1 else str(path)))
    return sorted(found, key=lambda run: run.compresses)


def read_profile(path: Path) -> dict[str, Any]:
    """What `gact-dist profile --json` wrote. Raises CommandError."""
    expected = f"expected what `gact-dist profile JOB --json > {path}` writes"
    try:
        content = json.loads(path.read_text())
        levels = content["levels"]
        found = [(level["level"], level["peak_bytes"], level["modules"], level["timeline"][0]) for level in levels]
    except (ValueError, OSError) as error:
        raise CommandError(f"the profile {path} cannot be read: {error}; {expected}") from None
    except (KeyError, TypeError, IndexError):
        found = []
    if not found:
        raise CommandError(f"{path} holds no profile, {expected}")
    return content


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "result.json").is_file()


def _read(folder: Path, name: str) -> Run:
    run = Run(name, about=_object(folder / "run.json"), result=_object(folder / "result.json"))

    def lines(file: str) -> list[dict[str, Any]]:
        found, unread = _lines(folder / file)
        if unread:
            run.unread[file] = unread
        return found

    run.steps = _of_last_time(lines("steps.jsonl"))
    adaptations = lines("adaptations.jsonl") or lines("history.jsonl")
    run.adaptations = _of_last_time([line for line in adaptations if "event" not in line])
    run.comparisons = _of_last_time(lines("gradient.jsonl"))
    run.saved = [
        {"step": line["step"], "rows": [dict(zip(_ROW, row, strict=True)) for row in line["rows"]]}
        for line in _of_last_time(lines("saved.jsonl"))
    ]
    for rank in range(run.world_size):
        plans = _of_last_time(lines(f"ranks/rank{rank}.jsonl"))
        if plans:
            run.ranks[str(rank)] = plans
    return run


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise CommandError(
            f"{path} cannot be read: {error}; expected the JSON object that a run writes when it begins: leave this "
            "run out"
        ) from None
    if not isinstance(content, dict):
        raise CommandError(f"{path} holds a {type(content).__name__}, expected a JSON object: leave this run out")
    return content


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a file, each of a step, and how many could not be read."""
    if not path.is_file():
        return [], 0
    try:
        texts = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error}") from None
    found = [line for line in map(_line, texts) if line is not None]
    return found, len(texts) - len(found)


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return line if isinstance(step, int) and _are_numbers(line, _NUMBERS) else None


def _are_numbers(line: dict[str, Any], names: Iterable[str]) -> bool:
    return all(isinstance(line.get(name, 0), (int, float, type(None))) for name in names)


def _of_last_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the lines that a run wrote before it went back to an earlier step, or began anew."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return kept
