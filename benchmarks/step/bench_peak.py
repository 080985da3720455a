"""What is the peak memory of a job's worst step, and of the steps that follow?

    python -m benchmarks.step.bench_peak --json benchmarks/results/peak.json
    python -m benchmarks.step.bench_peak --json benchmarks/results/peak.json --jobs unet vit --methods untouched L2
    python -m benchmarks.step.bench_peak --table benchmarks/results/peak.json

The jobs are those of peak_jobs.py: on one process, and with FSDP2 on two ranks (gloo; each has half of the batch, or
all of one sequence; figures are rank 0's). A method is the untouched job, gradient checkpointing of its blocks
(non-reentrant), a level, or both; "L2 with recomputed" is both with Config.recomputed. Every job and method is measured
in a fresh process, on two threads, with two ranks on one each (or OMP_NUM_THREADS). A level trains with
gact.step(loss_fn, batch), which begins to adapt in the first step and, where steps are long, takes six of them;
adapt_interval is half of the steps, so that a second adaptation starts from an adapted plan. A level that does not
adapt compares its gradient with the exact one in steps 1, 2 and 4:
it runs six steps. Methods without compression run three. Worst: the largest peak of all steps. Later: the median of the
peaks after the last adaptation (after the first step where nothing adapts).

Two figures for each step, both above what the process held before the first one: model, optimizer state, batch, and
what torch keeps of kernels. The same for all methods: one step on the batch without gact_dist comes before, then freed
memory is returned to the system (malloc_trim), and only then gact_dist is attached. Every step frees its gradients.

* resident: the high-water mark of the resident set, reset before each step. The child's allocator (glibc) returns freed
  blocks of 64 KiB or more to the system at once and has one arena.
* live: the largest sum of the bytes that torch's CPU allocator had given out, from the memory events of torch.profiler
  in a second pass of the same process, which attaches anew. This counts tensors and the workspaces of operators, those
  of gloo's threads as far as they are alive when the training thread allocates or frees.

Results are written after every process; other rows of the same file stay.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import gact_dist
from benchmarks.adaptation.bench_adaptation import processor
from benchmarks.step.peak_jobs import JOBS, SIZES_ON_TWO_RANKS, SMALL_SIZES, UNSHARDED, Job
from examples.train.peak_memory import PeakMemory

METHODS = ("untouched", "checkpointing", "L1", "L2", "L2 with checkpointing", "L2 with recomputed")
STEPS = 24
STEPS_OF_A_FIXED_LEVEL = 6
"""so many that most of those after the first do not compare"""
STEPS_WITHOUT_COMPRESSION = 3
RETURN_FROM_BYTES = 64 * 1024
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(RETURN_FROM_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(2 * RETURN_FROM_BYTES),
    "MALLOC_ARENA_MAX": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}
"""of a child; it fixes the allocator from the start of the process"""
LONGEST_S = 1800
_STEP = "bench_peak step"
_MB = 1e6
Row = dict[str, Any]


# -- in the child ------------------------------------------------------------------------------------------------------


class Training:
    """A job under one method: start() attaches what the method needs, step() is one training step, stop() detaches."""

    def __init__(self, job: Job, method: str, *, sharded: bool = False, follow: bool = False, steps: int = STEPS):
        level, _, also = method.partition(" with ")
        if "checkpointing" in (level, also) or also == "recomputed":
            checkpoint_blocks(job)
        if sharded:
            for block in job.blocks:
                fully_shard(block)
            fully_shard(job.model)
        self.job = job
        self.level = level if level in gact_dist.LEVELS else ""
        self._recomputed = also == "recomputed"
        fixed = STEPS_OF_A_FIXED_LEVEL if self.level else STEPS_WITHOUT_COMPRESSION
        self.steps = steps if self._adapts else fixed
        self.gact: gact_dist.Controller | None = None
        self._follow = follow
        self._optimizer = job.optimizer(parameter for parameter in job.model.parameters() if parameter.requires_grad)
        job.model.train()
        self._update(self.loss(job.batch))

    @property
    def _adapts(self) -> bool:
        return self.level != "" and gact_dist.Config.from_level(self.level).policy == "gact"

    def start(self) -> None:
        """Attach gact_dist, if the method is a level."""
        if self.level:
            settings = {"adapt_interval": self.steps // 2, "recomputed": self._recomputed}
            config = gact_dist.Config.from_level(self.level, **settings)
            self.gact = gact_dist.attach(self.job.model, config=config)
            if self._follow:
                self.gact.follow()

    def step(self) -> None:
        """Forward, backward and update; gradients are freed."""
        if self.gact is None or self._follow:
            loss = self.loss(self.job.batch)
        else:
            with self.gact.step(self.loss, self.job.batch):
                loss = self.loss(self.job.batch)
        self._update(loss)

    def loss(self, batch: Any) -> Tensor:
        """The job's loss."""
        return self.job.loss(self.job.model, batch)

    def adapted_at(self) -> list[int]:
        """The steps in which a plan was set, from 0."""
        return [] if self.gact is None else [entry["step"] - 1 for entry in self.gact.history]

    def stop(self) -> None:
        """Leave the job as it was before start()."""
        if self.gact is not None:
            self.gact.detach()
            self.gact = None

    def _update(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def checkpoint_blocks(job: Job) -> None:
    """Recompute every block of a job in backward: as transformers does it for its models, else by torch's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        apply_activation_checkpointing,
    )

    if job.pretrained is not None:
        job.pretrained.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = set(job.blocks)
    apply_activation_checkpointing(job.model, check_fn=lambda module: module in blocks)
    job.blocks[:] = [module for module in job.model.modules() if isinstance(module, CheckpointWrapper)]


def resident_peaks(training: Training) -> tuple[list[int], list[int], list[float]]:
    """Peak of the resident set in each step, the steps that adapted, and the seconds of each.

    Raises RuntimeError where a process cannot reset its high-water mark.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = PeakMemory(torch.device("cpu"), steps=training.steps, return_from_bytes=RETURN_FROM_BYTES)
    if not memory.resettable:
        raise RuntimeError("this process cannot reset its high-water mark through /proc/self/clear_refs")
    training.start()
    times_s = []
    for _ in range(training.steps):
        start_s = time.perf_counter()
        training.step()
        times_s.append(time.perf_counter() - start_s)
        memory.end_step()
    adapted_at = training.adapted_at()
    training.stop()
    return memory.steps_bytes, adapted_at, times_s


def live_peaks(start: Callable[[], None], step: Callable[[], None], steps: int) -> list[int]:
    """Largest sum of live bytes of torch's CPU allocator in each step, above those before start()."""
    gc.collect()
    with counting_all_threads(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        start()
        for _ in range(steps):
            with record_function(_STEP):
                step()
    events = events_of(profiler)
    ends = [event.end_time_ns for event in events if event.name == _STEP]
    totals = [
        (event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size)
        for event in events
        if event.tag == _EventType.Allocation
    ]
    before = totals[0][1] - totals[0][2] if totals else 0
    peaks, live, number = [0] * steps, 0, 0
    for time_ns, total, _ in totals:
        while number < steps - 1 and time_ns > ends[number]:
            number += 1
            peaks[number] = live
        live = total - before
        peaks[number] = max(peaks[number], live)
    return peaks


@contextmanager
def counting_all_threads() -> Iterator[None]:
    """Count what other threads allocate and free as well: gloo's free tensors that this one has allocated.

    The profiler records events of this thread alone, but each has the total of the allocator.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def events_of(profiler: profile) -> list[Any]:
    """All that the profiler recorded, in the order of time."""
    events, rest = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while rest:
        event = rest.pop()
        events.append(event)
        rest += event.children
    return sorted(events, key=lambda event: event.start_time_ns)


def measure(name: str, method: str, *, sharded: bool, follow: bool, steps: int, small: bool) -> Row:
    """One job under one method, in this process."""
    torch.manual_seed(0)
    sizes = SIZES_ON_TWO_RANKS.get(name, {}) if sharded else {}
    job = JOBS[name](**SMALL_SIZES[name] if small else sizes)
    training = Training(job, method, sharded=sharded, follow=follow, steps=steps)
    resident, adapted_at, times_s = resident_peaks(training)
    live = live_peaks(training.start, training.step, training.steps)
    return {"resident_bytes": resident, "live_bytes": live, "adapted_at": adapted_at, "step_s": times_s}


def child(options: argparse.Namespace) -> None:
    """Measure and print the row as one line; with several ranks, rank 0 prints."""
    name, method = options.one
    sharded = "RANK" in os.environ
    if sharded:
        dist.init_process_group("gloo")
    row = measure(name, method, sharded=sharded, follow=options.follow, steps=options.steps, small=options.small)
    if not sharded or dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    if sharded:
        dist.destroy_process_group()


# -- in the parent -----------------------------------------------------------------------------------------------------


def run(name: str, method: str, ranks: int, options: argparse.Namespace) -> Row:
    """Measure one job under one method in a fresh process, or one for each rank; a row with its error if that fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "benchmarks.step.bench_peak", "--one", name, method]
    command += ["--steps", str(options.steps), *(["--follow"] * options.follow), *(["--small"] * options.small)]
    environment = {"OMP_NUM_THREADS": str(2 // ranks), **os.environ, **ENVIRONMENT}
    where = {"job": name, "method": method, "ranks": ranks, "follow": options.follow}
    where |= {"date": datetime.date.today().isoformat(), "commit": commit()}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, env=environment)
    except subprocess.TimeoutExpired:
        return {**where, "error": f"no result after {LONGEST_S} s"}
    if done.returncode:
        return {**where, "error": done.stderr.strip() or f"exit status {done.returncode}"}
    return {**where, **json.loads(done.stdout.splitlines()[-1])}


def commit() -> str:
    """The commit of this checkout, as far as git knows it."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def cases(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(job, method, ranks) of everything that is to be measured."""
    wanted = product(options.ranks, options.jobs, options.methods)
    return [(name, method, ranks) for ranks, name, method in wanted if ranks == 1 or name not in UNSHARDED]


def worst_and_later(row: Row, figure: str) -> tuple[int, float]:
    """Largest peak of all steps, and median of those after the last adaptation, in bytes."""
    peaks = row[f"{figure}_bytes"]
    later = peaks[max(row["adapted_at"], default=0) + 1 :]
    return max(peaks), statistics.median(later or peaks[-1:])


def table(report: dict[str, Any]) -> str:
    """A table in Markdown for each figure: one row for a job, one column for a method."""
    rows = {(row["job"], row["ranks"], row["method"]): row for row in report["rows"]}
    jobs = dict.fromkeys((job, ranks) for job, ranks, _ in rows)
    methods = [method for method in METHODS if any(method == of for *_, of in rows)]
    lines = []
    for figure, title in (("resident", "resident set"), ("live", "live storages")):
        lines += [f"Peak above the model, {title}, MB: worst step / later steps", ""]
        lines += [f"| job | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
        for job, ranks in jobs:
            cells = [_cell(rows.get((job, ranks, method)), figure) for method in methods]
            lines.append(f"| {job}{f', FSDP2 on {ranks} ranks' if ranks > 1 else ''} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(row: Row | None, figure: str) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    worst, later = worst_and_later(row, figure)
    return f"{worst / _MB:.0f} / {later / _MB:.0f}"


def write(path: Path, rows: Iterable[Row], steps: int) -> None:
    """The results with what they were measured on."""
    report = {
        "benchmark": "peak",
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gact_dist": gact_dist.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", "2 on one process, 1 on each of two ranks"),
        "environment": ENVIRONMENT,
        "steps": steps,
        "steps_of_a_fixed_level": STEPS_OF_A_FIXED_LEVEL,
        "steps_without_compression": STEPS_WITHOUT_COMPRESSION,
        "adapt_interval": steps // 2,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=(1, 2), help="2: FSDP2 (default: both)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of a level that adapts")
    parser.add_argument("--follow", action="store_true", help="follow() in place of step(); use a file of its own")
    parser.add_argument("--small", action="store_true", help="tiny sizes: whether the script works")
    parser.add_argument("--json", type=Path, help="write the results to this file; its other rows stay")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print the table of this file")
    parser.add_argument("--one", nargs=2, metavar=("JOB", "METHOD"), help="measure this one in this process")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure every case, print the table. Returns 1 if one failed."""
    options = parse(arguments)
    if options.one:
        child(options)
        return 0
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    earlier = json.loads(options.json.read_text())["rows"] if options.json and options.json.is_file() else []
    rows = {(row["job"], row["ranks"], row["method"]): row for row in earlier}
    measured = []
    for name, method, ranks in cases(options):
        start_s = time.perf_counter()
        row = run(name, method, ranks, options)
        measured.append(row)
        rows[name, ranks, method] = row
        found = row["error"].splitlines()[-1] if "error" in row else f"{_cell(row, 'resident')}, {_cell(row, 'live')}"
        print(f"{name}, {ranks} rank(s), {method}: {found} ({time.perf_counter() - start_s:.0f} s)", flush=True)
        if options.json:
            write(options.json, rows.values(), options.steps)
    print("\n" + table({"rows": measured}))
    return int(any("error" in row for row in measured))


if __name__ == "__main__":
    sys.exit(main())
