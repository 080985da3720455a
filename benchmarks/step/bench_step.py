"""What does a training step cost with gact_dist, beside the untouched job and what else saves activation memory?

    python -m benchmarks.step.bench_step --json benchmarks/results/step.json --part gpt-2048
    python -m benchmarks.step.bench_step --device cpu --small --part gpt-2048 --strategies untouched L1

A step is forward, backward and fused AdamW. All strategies (strategies.py) of a part, one model of shapes.py, live in
one process on the same weights. They take turns of a few steps, and every round starts with another one, so that a
change of the machine's speed meets all; medians over the rounds are reported. Levels that adapt do so once, before.

"floor" is what the device needs to copy as many bytes as packing and unpacking move: for every tensor that is stored
compressed two copies of (its bytes + its payload's) / 2, so that each reads and writes what one of them does. It takes
its turn in every round as well. "added" is the median of a round's difference to the untouched job, in its steps; "to
floor" the same in floors, for levels under a checkpoint the difference to that checkpoint; "offload" the difference to
the level that keeps its payloads on the device; with "all leave" those leave as well that backward then waits for.
Held: device bytes between forward and backward; peak: the most during a step; both by the allocator and above what is
there before the step (weights, optimizer state). On a CPU there is no such count.

Results are written after every part; parts of earlier runs in the same file stay. A strategy that fails is a row with
its error, and the run ends with status 1. On an H200 each part is meant to fit into ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.shapes import SHAPES, SMALL_SHAPES, Shape
from benchmarks.step.strategies import STRATEGIES, Run, without_level, without_offload
from gact_dist.codec import nvrtc
from gact_dist.report import MemoryReport

WARM_UP_STEPS = 4  # one to learn roles, one to plan offload, one by that plan, one to spare
_FLOOR_BUFFER_BYTES = 2**30  # many times the cache of a GPU, so that copies reach its memory


class Machine:
    """The device: how long something takes on it, and what its allocator counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"

    def seconds(self, action: Callable[[], object]) -> float:
        """Time of an action: of the device's queue on a GPU, of the process on a CPU."""
        if not self.is_gpu:
            start_s = time.perf_counter()
            action()
            return time.perf_counter() - start_s
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        action()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3

    def settle(self) -> int | None:
        """Start counting anew from an idle device; bytes that are allocated now."""
        gc.collect()
        if not self.is_gpu:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def allocated_bytes(self, peak: bool = False) -> int | None:
        """Bytes allocated now, or the most since settle(); None on a CPU."""
        if not self.is_gpu:
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) if peak else torch.cuda.memory_allocated(self.device)


class Training:
    """A strategy that trains, and what was measured of it."""

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.run = Run(STRATEGIES[name], model)
        self._optimizer, self._batch = optimizer, batch
        self.times_s: list[float] = []

    def step(self) -> None:
        """One training step."""
        self.run.forward(self._batch).backward()
        self.update()

    def update(self) -> None:
        """The optimizer's part of it."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def warm_up(self, samples: int) -> None:
        """Adapt on so many samples, compile, plan."""
        self.run.adapt(self._batch, samples)
        for _ in range(WARM_UP_STEPS):
            self.step()

    def memory(self, machine: Machine) -> dict[str, int | None]:
        """Device bytes held between forward and backward and at the peak of a step, above those before it."""
        before = machine.settle()
        loss = self.run.forward(self._batch)
        held = machine.allocated_bytes()
        loss.backward()
        self.update()
        peak = machine.allocated_bytes(peak=True)
        above = [None if found is None or before is None else found - before for found in (held, peak)]
        return {"held_bytes": above[0], "peak_bytes": above[1]}


class Floor:
    """Device copies of the bytes that packing and unpacking of one step move."""

    def __init__(self, report: MemoryReport) -> None:
        stored = [row for row in report.rows if row.codec != "exact"]
        exact = [row.dtype.itemsize * torch.Size(row.shape).numel() for row in stored]
        self.sizes = [(before + row.bytes) // 2 for before, row in zip(exact, stored, strict=True)]
        self.scratch: tuple[Tensor, Tensor] | None = None
        """uint8, both as large as the largest copy at least"""
        self.times_s: list[float] = []

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written by packing and unpacking."""
        return sum(4 * size for size in self.sizes)

    def step(self) -> None:
        """All copies of one step, each somewhere else than the one before."""
        if self.scratch is None:
            raise RuntimeError("scratch is None, expected two tensors to copy between")
        source, target = self.scratch
        start = 0
        for size in (*self.sizes, *reversed(self.sizes)):
            start = start if start + size <= source.numel() else 0
            target[start : start + size].copy_(source[start : start + size])
            start += size


def row_of(name: str, trainings: Mapping[str, Training], floor: Floor | None) -> dict[str, Any]:
    """What the times of a strategy say, in seconds, beside those that were timed in the same rounds."""
    training = trainings[name]
    row: dict[str, Any] = {"step_s": statistics.median(training.times_s), "times_s": training.times_s}
    if floor is not None and floor.sizes:
        row["floor_s"] = statistics.median(floor.times_s)
        row["floor_bytes_per_s"] = floor.moved_bytes / row["floor_s"]
        if without_level(name) in trainings:
            row["added_to_floor"] = _added_s(training, trainings[without_level(name)]) / row["floor_s"]
    if "untouched" in trainings:
        step_s = statistics.median(trainings["untouched"].times_s)
        row["added_s"] = _added_s(training, trainings["untouched"])
        row["added_to_step"] = row["added_s"] / step_s
        resident = without_offload(name)
        if resident != name and resident in trainings:
            row["offload_to_step"] = _added_s(training, trainings[resident]) / step_s
    return row


def _added_s(training: Training, other: Training) -> float:
    return statistics.median(mine - theirs for mine, theirs in zip(training.times_s, other.times_s, strict=True))


def reported(report: MemoryReport) -> dict[str, Any]:
    """What gact_dist itself says of its last step."""
    found: dict[str, Any] = {"exact_bytes": report.exact_bytes, "retained_bytes": report.retained_bytes}
    if report.offload is not None:
        found |= {"host_bytes": report.host_bytes, "stalls": report.offload.stalls, "stall_s": report.offload.stall_s}
    return found


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """AdamW in one kernel where there is one, with a rate that hardly moves the weights."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")


class Part:
    """One model, and all strategies on it."""

    def __init__(self, shape: Shape, batch_size: int, device: torch.device) -> None:
        self.machine = Machine(device)
        self.samples = shape.calibration_samples
        self.model = shape.model(device)
        self.batch = shape.inputs(batch_size, device)
        self.optimizer = optimizer_of(self.model, device)
        self.rows: dict[str, dict[str, Any]] = {}
        self.trainings: dict[str, Training] = {}
        self.floors: dict[str, Floor] = {}

    def prepare(self, name: str) -> None:
        """Set up a strategy and measure its memory; what fails becomes a row, for the others' minutes are lent ones."""
        try:
            training = Training(name, self.model, self.optimizer, self.batch)
            training.warm_up(self.samples)
            self.rows[name] = training.memory(self.machine)
        except Exception:
            self._fail(name)
            return
        self.trainings[name] = training
        if training.run.gact is not None:
            report = training.run.gact.report()
            self.rows[name] |= reported(report)
            self.floors[name] = Floor(report)

    def measure(self, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
        """Rows of all strategies that were prepared."""
        self._share_scratch()
        for number in range(rounds):
            self._take_turns(number, steps)
        for name, training in self.trainings.items():
            self.rows[name] |= row_of(name, self.trainings, self.floors.get(name))
            if training.run.gact is not None:
                self.rows[name] |= reported(training.run.gact.report())
            training.run.close()
        return self.rows

    def _take_turns(self, number: int, steps: int) -> None:
        """Append seconds of a step to the times of each; what fails has no turn in later rounds."""
        actors = [*self.trainings.items(), *self.floors.items()]
        first = number % max(1, len(actors))
        for name, actor in (*actors[first:], *actors[:first]):
            if name not in self.trainings:  # its floor or its training has failed in this round
                continue
            try:
                elapsed_s = self.machine.seconds(lambda actor=actor: [actor.step() for _ in range(steps)])
                actor.times_s.append(elapsed_s / steps)
            except Exception:
                self._fail(name)

    def _fail(self, name: str) -> None:
        """Let the row end with the exception that is handled, and the strategy's memory go."""
        self.rows[name] = self.rows.get(name, {}) | {"error": traceback.format_exc()}
        for known in (self.trainings, self.floors):
            known.pop(name, None)
        self.optimizer.zero_grad(set_to_none=True)

    def _share_scratch(self) -> None:
        least = _FLOOR_BUFFER_BYTES if self.machine.is_gpu else 0
        room = max([least, *(size for floor in self.floors.values() for size in floor.sizes)])
        source, target = (torch.ones(room, dtype=torch.uint8, device=self.machine.device) for _ in range(2))
        for floor in self.floors.values():
            floor.scratch = source, target


def run_part(shape: Shape, batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen strategies on one model; those that this machine cannot run are named with the reason."""
    device = torch.device(options.device)
    chosen = [name for name in options.strategies if device.type == "cuda" or not STRATEGIES[name].needs_cuda]
    not_run = {name: "needs a CUDA device" for name in options.strategies if name not in chosen}
    part = Part(shape, batch_size, device)
    for name in chosen:
        part.prepare(name)
    rows = part.measure(options.rounds, options.steps)
    return {
        "batch_size": batch_size,
        "rounds": options.rounds,
        "steps": options.steps,
        "rows": rows,
        "not_run": not_run,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and date."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found["nvrtc"] = ".".join(map(str, nvrtc.find_nvrtc().version()))
    return found


def print_table(name: str, part: dict[str, Any]) -> None:
    """One line for each strategy."""
    print(f"{name}, batch {part['batch_size']}:")
    titles = ("step ms", 9), ("added %", 8), ("to floor", 8), ("offload %", 9), ("held MiB", 9), ("peak MiB", 9)
    print(" " * 28, *(f"{title:>{width}s}" for title, width in (*titles, ("stalls", 6))))
    for strategy, row in part["rows"].items():
        if "error" in row:
            print(f"  {strategy:26s} failed: {row['error'].splitlines()[-1]}")
            continue
        cells = [
            _cell(row.get("step_s"), 9, 2, 1e3), _cell(row.get("added_to_step"), 8, 1, 100),
            _cell(row.get("added_to_floor"), 8, 2), _cell(row.get("offload_to_step"), 9, 1, 100),
            _cell(row["held_bytes"], 9, 1, 2**-20), _cell(row["peak_bytes"], 9, 1, 2**-20),
            _cell(row.get("stalls"), 6, 0),
        ]  # fmt: skip
        print(f"  {strategy:26s} {' '.join(cells)}")
    for strategy, why in part["not_run"].items():
        print(f"  {strategy:26s} not run: {why}")


def _cell(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
    return " " * width if value is None else f"{value * factor:{width}.{digits}f}"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="models; all of them")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models of the same build, for a CPU")
    parser.add_argument("--batch", type=int, help="samples of a step; each model has its own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu --small shows that the script works")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every part, print its table, and write the results; 1 if a strategy failed."""
    options = options_of(arguments)
    results: dict[str, Any] = {"parts": {}}
    if options.json and options.json.is_file():
        results = json.loads(options.json.read_text())
    failed = False
    for name in options.part:
        shape = (SMALL_SHAPES if options.small else SHAPES)[name]
        part = run_part(shape, options.batch or shape.batch, options)
        part["environment"] = environment(torch.device(options.device))
        results["parts"][name] = part
        print_table(name, part)
        failed |= any("error" in row for row in part["rows"].values())
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
