"""What is the largest batch that fits into a given memory, and how fast are steps of it?

    python -m benchmarks.step.bench_batch --json benchmarks/results/batch.json --part bert-large --gib 16
    python -m benchmarks.step.bench_batch --device cpu --small --part gpt-2048 --gib 0.25 --strategies untouched L1

Every probe is a process of its own: a model of shapes.py, a strategy of strategies.py, an adaptation where the level
has one, and training steps with fused AdamW, at one batch size. torch may use --gib of the device (a fraction of it by
set_per_process_memory_fraction), so that a row takes a minute and not an hour. On a CPU the process's data segment is
limited instead, beyond what it has when the model is there. batch_search.py says which batch comes next.

BERT-large is measured with materialised attention, as GACT measured it, and under a checkpoint with fused attention as
well: GACT's combination for its largest batch. The others have fused attention only.

Results are written after every probe, and a second run goes on where the first stopped; --minutes ends a run in time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.step.bench_step import Machine, Training, environment, optimizer_of
from benchmarks.step.shapes import SHAPES, SMALL_SHAPES, Shape
from benchmarks.step.strategies import STRATEGIES
from gact_dist._errors import OUT_OF_MEMORY
from gact_dist.cli.batch_search import Probe, largest, next_batch

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.step.bench_batch"
PROBED = (
    "untouched", "L1", "L2", "L2.2", "L3", "L3, all leave",
    "checkpoint", "checkpoint + L2", "checkpoint + L3", "checkpoint + L3, all leave",
)  # fmt: skip
FUSED = ("checkpoint", "checkpoint + L2")
"""under a checkpoint, measured with fused attention where the rest has the materialised one"""
_TIMED_STEPS = 5
_KILLED = -9  # by the kernel, when the host has no memory left


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is searched for one largest batch."""

    part: str
    strategy: str
    attention: str
    gib: float

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.part}, {self.attention}, {self.strategy}, {self.gib:g} GiB"


def rows_of(part: str, shape: Shape, strategies: Sequence[str], gib: float) -> list[Row]:
    """The rows of a part, with the attention that each is measured with."""
    slowest = shape.attentions[-1]
    rows = [Row(part=part, strategy=name, attention=slowest, gib=gib) for name in strategies]
    fused = [name for name in strategies if name in FUSED and shape.attentions[0] != slowest]
    return rows + [Row(part=part, strategy=name, attention=shape.attentions[0], gib=gib) for name in fused]


# -- in a probe's process ------------------------------------------------------------------------------------------


def limit_memory(device: torch.device, gib: float) -> None:
    """Let this process have no more memory than that. Raises ValueError where the device has less."""
    limit_bytes = int(gib * 2**30)
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        if limit_bytes > total_bytes:
            raise ValueError(f"--gib is {gib:g}, expected at most the {total_bytes / 2**30:.1f} of the device")
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
        return
    status = Path("/proc/self/status").read_text().splitlines()
    now_bytes = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + limit_bytes, resource.RLIM_INFINITY))


def probe_here(shape: Shape, row: Row, batch: int, device: torch.device) -> Probe:
    """Train a few steps in this process."""
    machine = Machine(device)
    if machine.is_gpu:
        limit_memory(device, row.gib)
    model = shape.model(device, row.attention)
    training = Training(row.strategy, model, optimizer_of(model, device), shape.inputs(batch, device))
    if not machine.is_gpu:  # by now all is imported, which takes memory of the same kind
        limit_memory(device, row.gib)
    machine.settle()
    training.warm_up(shape.calibration_samples)
    step_s = statistics.median(machine.seconds(training.step) for _ in range(_TIMED_STEPS))
    return Probe(batch=batch, fits=True, peak_bytes=machine.allocated_bytes(peak=True), step_s=step_s)


# -- in the searching process --------------------------------------------------------------------------------------


def run_probe(command: Sequence[str], batch: int, timeout_s: float) -> Probe:
    """Run a probe's command, which prints its Probe as JSON; one that dies for want of memory does not fit, nor does
    one that takes longer than timeout_s.

    Raises RuntimeError with the end of its output where it failed otherwise.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Probe(batch=batch, fits=False, reason=f"not over after {timeout_s:g} s")
    if done.returncode == 0:
        return Probe(**json.loads(done.stdout.splitlines()[-1]))
    said = [line for line in done.stderr.splitlines() if any(words in line for words in OUT_OF_MEMORY)]
    if said or done.returncode == _KILLED:
        return Probe(batch=batch, fits=False, reason=said[-1][:300] if said else "killed by the host's kernel")
    raise RuntimeError(f"a probe of batch {batch} ended with status {done.returncode}: {done.stderr[-2000:]}")


class Results:
    """The file of results: rows by key, each with its probes, written at every change."""

    def __init__(self, path: Path | None, where: dict[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {"rows": {}}
        if path is not None and path.is_file():
            self.content = json.loads(path.read_text())
        self.content["environment"] = where

    def probes(self, row: Row) -> list[Probe]:
        """What is known of a row."""
        return [Probe(**probe) for probe in self.content["rows"].get(row.key, {}).get("probes", [])]

    def note(self, row: Row, probes: Sequence[Probe], finished: bool) -> None:
        """Write a row as it stands."""
        best = largest(probes)
        found = {**asdict(row), "probes": [asdict(probe) for probe in probes], "finished": finished}
        found |= {"batch": best.batch if best else 0}
        if best is not None and best.step_s:
            found["samples_per_s"] = best.batch / best.step_s
        self.content["rows"][row.key] = found
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.content, indent=1) + "\n")


def search(row: Row, first: int, options: argparse.Namespace, results: Results, deadline_s: float) -> bool:
    """Probe until the row's largest batch is known; False if time ran out before."""
    probes = results.probes(row)
    limit_bytes = int(row.gib * 2**30)
    while (batch := next_batch(probes, limit_bytes, first)) is not None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        command = [sys.executable, "-m", MODULE, "--probe", str(batch), "--part", row.part, "--gib", str(row.gib)]
        command += ["--device", options.device, "--strategies", row.strategy, "--attention", row.attention]
        probes.append(run_probe(command + ["--small"] * options.small, batch, options.timeout))
        results.note(row, probes, finished=False)
    results.note(row, probes, finished=True)
    return True


def print_row(results: Results, row: Row) -> None:
    """The largest batch, and its throughput."""
    found = results.content["rows"][row.key]
    speed = f"{found['samples_per_s']:8.1f} samples/s" if "samples_per_s" in found else ""
    state = "" if found["finished"] else " (not finished)"
    print(f"{row.key:56s} {found['batch']:6d} {speed} after {len(found['probes'])} probes{state}", flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(SHAPES), default=["bert-large"])
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(PROBED))
    parser.add_argument("--gib", type=float, default=16.0, help="memory that a probe may use")
    parser.add_argument("--first", type=int, default=8, help="the batch to begin with")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models of the same build, for a CPU")
    parser.add_argument("--minutes", type=float, default=8.5, help="no probe starts later than this")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds; a probe that takes longer does not fit")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--probe", type=int, metavar="BATCH", help="run one batch in this process")
    parser.add_argument("--attention", default="", help="of that one")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu --small shows that the script works")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Search every row, and print it; 1 if one is not finished."""
    options = options_of(arguments)
    shapes = SMALL_SHAPES if options.small else SHAPES
    device = torch.device(options.device)
    if options.probe:
        part = options.part[0]
        row = Row(part=part, strategy=options.strategies[0], attention=options.attention, gib=options.gib)
        print(json.dumps(asdict(probe_here(shapes[part], row, options.probe, device))))
        return 0
    deadline_s = time.monotonic() + 60 * options.minutes
    results = Results(options.json, environment(device))
    unfinished = False
    for part in options.part:
        for row in rows_of(part, shapes[part], options.strategies, options.gib):
            if STRATEGIES[row.strategy].needs_cuda and device.type != "cuda":
                print(f"{row.key:56s} not run: needs a CUDA device")
                continue
            unfinished |= not search(row, options.first, options, results, deadline_s)
            if row.key in results.content["rows"]:
                print_row(results, row)
    return int(unfinished)


if __name__ == "__main__":
    sys.exit(main())
