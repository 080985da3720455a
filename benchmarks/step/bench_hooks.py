"""What does the Python way of one small saved tensor cost, forward and backward together?

    python -m benchmarks.step.bench_hooks --json benchmarks/results/hooks.json

Each job is a chain of small modules of one kind on [64, 32] float32, so that next to nothing is computed. A step is a
forward and a backward. It is timed untouched, under hooks that return what they are given, and under level L1 with all
roles known; the three take turns. Medians of the process's own time on one thread are reported, and in "shortest" the
shortest times, which other processes on the machine disturb least. "tensors" counts calls of a pack hook in a step,
"packed" those of them that the codec stores in fewer bits. "codec" is codec.pack and codec.unpack of one such tensor by
themselves, called again and again, in the same rounds.

    identity    (identity - untouched) / tensors
    all         (L1 - untouched) / tensors
    beyond      (L1 - untouched - packed * codec) / tensors: hooks on tensors and modules, naming and accounting

All in microseconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import gact_dist
from gact_dist import codec

ROWS, WIDTH = 64, 32
WARM_UP_STEPS = 4  # until all roles are known
CODEC_CALLS = 20


class Shared(nn.Module):
    """Two linear layers that read the same tensor: the second saves an alias of what the first saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


class Block(nn.Module):
    """A residual block, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Product(nn.Module):
    """Of an activation and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),  # an activation and a parameter
    "layer norm": lambda: nn.LayerNorm(WIDTH),  # an activation, two statistics, two parameters
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),  # a mask beside what the next layer saves
    "gelu": nn.GELU,  # an activation
    "product": Product,
    "alias": Shared,
    "block": Block,
}


class Job:
    """A chain of modules of one kind, and its three ways to run a step."""

    def __init__(self, kind: str, length: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(KINDS[kind]() for _ in range(length)))
        self.x = torch.randn(ROWS, WIDTH, requires_grad=True)
        self.tensors = 0
        self._gact = gact_dist.attach(self.model, "L1")
        for _ in range(WARM_UP_STEPS):
            self.step(self._gact.step())
        rows = self._gact.report().rows
        self.packed = sum(row.codec in ("quantised", "mask") for row in rows)
        self._gact.detach()
        self.step(saved_tensors_hooks(self._count, _same))

    def _count(self, tensor: Tensor) -> Tensor:
        self.tensors += 1
        return tensor

    def step(self, context: AbstractContextManager[Any]) -> None:
        """Forward and backward."""
        with context:
            loss = self.model(self.x).sum()
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None

    def measure(self, rounds: int, steps: int) -> dict[str, list[float]]:
        """Seconds of the process in each round, of a step or of the codec."""
        times: dict[str, list[float]] = {"untouched": [], "identity": [], "L1": [], "codec": []}
        packed = codec.pack(self.x, 4, 1)
        for _ in range(rounds):
            times["untouched"].append(_seconds(lambda: self.step(nullcontext()), steps))
            times["identity"].append(_seconds(lambda: self.step(saved_tensors_hooks(_same, _same)), steps))
            gact = gact_dist.attach(self.model, "L1")
            for _ in range(WARM_UP_STEPS):
                self.step(gact.step())
            times["L1"].append(_seconds(lambda gact=gact: self.step(gact.step()), steps))
            gact.detach()
            both = [_seconds(lambda: codec.pack(self.x, 4, 1), CODEC_CALLS * steps)]
            both.append(_seconds(lambda: codec.unpack(packed), CODEC_CALLS * steps))
            times["codec"].append(sum(both))
        return times


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _seconds(action: Callable[[], object], calls: int) -> float:
    start_s = time.process_time()
    for _ in range(calls):
        action()
    return (time.process_time() - start_s) / calls


def row_of(kind: str, length: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure one kind."""
    job = Job(kind, length)
    times_s = job.measure(rounds, steps)
    row: dict[str, Any] = {"kind": kind, "tensors": job.tensors, "packed": job.packed}
    row |= _of(job, {name: statistics.median(values) for name, values in times_s.items()})
    return row | {"shortest": _of(job, {name: min(values) for name, values in times_s.items()})}


def _of(job: Job, seconds: dict[str, float]) -> dict[str, float]:
    us = {name: 1e6 * value for name, value in seconds.items()}
    added = us["L1"] - us["untouched"]
    return {
        "identity_us": (us["identity"] - us["untouched"]) / job.tensors,
        "all_us": added / job.tensors,
        "beyond_us": (added - job.packed * us["codec"]) / job.tensors,
        "codec_us": us["codec"],
        "untouched_step_us": us["untouched"],
    }


def environment() -> dict[str, str]:
    """Date, processor and versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


COLUMNS = ("identity", "all", "beyond", "codec")


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    cells = [f"{of[f'{name}_us']:9.1f}" for of in (row, row["shortest"]) for name in COLUMNS]
    print(f"{row['kind']:11s} {row['tensors']:7d} {row['packed']:6d} {' '.join(cells)}", flush=True)


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--length", type=int, default=32, help="modules of a chain")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    titles = " ".join(f"{name:>9s}" for name in 2 * COLUMNS)
    print(f"{'us':11s} {'tensors':>7s} {'packed':>6s} {titles}  (the last four: of the shortest times)")
    rows = []
    for kind in arguments.kinds:
        rows.append(row_of(kind, arguments.length, arguments.rounds, arguments.steps))
        print_row(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
