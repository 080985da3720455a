"""What does one adaptation cost, in plain steps of the job's own batch, and how long is the longest step of it?

    python -m benchmarks.adaptation.bench_adaptation [--json FILE] [--rounds 5]

Small GPTs with batches of 1, 2, 8, 64 and 256 examples of 32 tokens, and of 1, 2 and 8 examples of a length with which
steps take a few hundred milliseconds; and at 8 examples two more depths, which keep about 50 and 400 tensors for
backward. Three copies of a model take turns, one step each, so that a change of the machine's speed meets all: the
untouched job, level L2 with one adaptation before the measurement, and level L2 with
an adaptation every few steps. An adaptation may be spread over steps, so whole steps are timed, from the end of one
adaptation to the end of the next. Its total is the sum of their differences to the compressed step that was taken in
the same turn; its longest step is counted whole. The unit of both is the median plain step of these turns; medians
over the rounds are reported. Plans are compared with the exact gradient when they are made, and not again between.

Of the shapes with long steps the first adaptation of a job is measured as well, from its first step on: each round has
a new model.

Below stands GACT's own procedure, written here from the paper (Liu et al., ICML 2022, section 4): for each tensor three
forward and backward passes of the compressed model, in which all that changes is the rounding of that tensor. Its
passes all cost the same, so one tensor is measured and the number of tensors multiplied in; all of it is one step.

Times are processor seconds of a single thread: other work on the machine hardly shows in them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import gact_dist
from examples.train.models import LanguageModel
from gact_dist import Config, codec
from gact_dist.adaptation.adapter import _PROBES

VOCABULARY, WIDTH, HEADS = 256, 128, 4
INTERVAL = 10
"""steps from one adaptation to the next; one that is spread over steps has to fit"""
SLICE = 8
"""examples that GACT's procedure is measured on as well, the default of calibration_samples"""
GACT_BITS = 4
GACT_PASSES = 3
BATCH_OF_TOKENS = tuple[Tensor, Tensor]


class GactProcedure:
    """Sensitivity one tensor at a time, by running the job again."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any], Tensor], batch: Any) -> None:
        self.model, self.loss_fn, self.batch = model, loss_fn, batch
        self.own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.reseeded, self.redraw, self.count = -1, 0, 0

    def sensitivity(self, tensor: int) -> float:
        """c_l of one saved tensor: the variance over re-seeded runs, divided by that of the rounding.

        (2^b - 1)^-2 is the variance of rounding at b bits up to a factor that all tensors share.
        """
        gradients = torch.stack([self._gradient(tensor, redraw) for redraw in range(GACT_PASSES)])
        return float(gradients.var(dim=0).sum()) * (2**GACT_BITS - 1) ** 2

    def _gradient(self, tensor: int, redraw: int) -> Tensor:
        """All parameter gradients of a run whose rounding differs from other runs in one tensor only."""
        self.reseeded, self.redraw, self.count = tensor, redraw, 0
        with saved_tensors_hooks(self._pack, self._unpack):
            loss = self.loss_fn(self.batch)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])

    def _pack(self, tensor: Tensor) -> Tensor | codec.Packed:
        if tensor.untyped_storage().data_ptr() in self.own or not tensor.is_floating_point():
            return tensor
        seed = 2 * self.count + (1_000_003 * self.redraw if self.count == self.reseeded else 0)
        self.count += 1
        return codec.pack(tensor, bits=GACT_BITS, seed=seed)

    @staticmethod
    def _unpack(kept: Tensor | codec.Packed) -> Tensor:
        return kept if isinstance(kept, Tensor) else codec.unpack(kept)


@dataclass(frozen=True)
class Case:
    """A model and the shape of its batch."""

    blocks: int
    batch: int
    length: int


LONG_CASES = Case(6, 1, 1024), Case(6, 2, 512), Case(6, 8, 256)
CASES = (
    *(Case(6, batch, 32) for batch in (1, 2, 8, 64, 256)),
    *LONG_CASES,
    Case(3, 8, 32),
    Case(26, 8, 32),
)
GACT_CASE = Case(6, 64, 32)
FIRST = "one pass, first adaptation"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case. Multiples are in plain steps of its batch, medians over the rounds."""

    blocks: int
    batch: int
    length: int
    method: str
    compressible_tensors: int
    plain_step_s: float
    compressed_step_s: float | None = None
    total_steps: float
    """what one adaptation adds, summed over the steps that it is spread over"""
    longest_step_steps: float
    """the longest of these steps, with the training that it does as well"""


class Job:
    """A GPT, its batch and its optimizer."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(VOCABULARY, case.length, WIDTH, case.blocks, HEADS, dropout=0.0)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        tokens = torch.randint(0, VOCABULARY, (case.batch, case.length + 1))
        self.batch = tokens[:, :-1], tokens[:, 1:]

    def loss(self, batch: BATCH_OF_TOKENS) -> Tensor:
        """The mean cross entropy of the next token."""
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def step(self, gact: gact_dist.Controller | None = None) -> None:
        """One training step, compressed if there is a controller."""
        self._optimizer.zero_grad()
        with nullcontext() if gact is None else gact.step(self.loss, self.batch):
            loss = self.loss(self.batch)
        loss.backward()
        self._optimizer.step()


@dataclass
class Round:
    """Seconds of the steps from the end of one adaptation to the end of the next, turn by turn."""

    plain_s: list[float] = field(default_factory=list)
    compressed_s: list[float] = field(default_factory=list)
    adapting_s: list[float] = field(default_factory=list)

    @property
    def total_steps(self) -> float:
        """What the adaptation adds, in plain steps."""
        added_s = sum(self.adapting_s) - sum(self.compressed_s)
        return added_s / statistics.median(self.plain_s)

    @property
    def longest_step_steps(self) -> float:
        """The longest step, in plain steps."""
        return max(self.adapting_s) / statistics.median(self.plain_s)


class Turns:
    """Three copies of a model that take turns: untouched, compressed, and one that adapts."""

    def __init__(self, case: Case) -> None:
        self._case, self._plain, self._compressed = case, Job(case), Job(case)
        # settled after its first adaptation; no plan is compared with the exact gradient but a new one
        config = Config.from_level("L2", adapt_interval=10**9, watch_interval=0)
        self._settled = gact_dist.attach(self._compressed.model, config=config)
        self.restart()

    def restart(self) -> None:
        """From now on a new model adapts."""
        self._adapting = Job(self._case)
        # with tolerance 0 no plan is kept, which would make the next interval longer
        often = Config.from_level("L2", adapt_interval=INTERVAL, adapt_tolerance=0.0, watch_interval=0)
        self.gact = gact_dist.attach(self._adapting.model, config=often)

    def until_adapted(self) -> Round:
        """Take turns until an adaptation has ended."""
        current, adaptations = Round(), len(self.gact.history)
        while len(self.gact.history) == adaptations:
            current.plain_s.append(seconds(self._plain.step))
            current.compressed_s.append(seconds(lambda: self._compressed.step(self._settled)))
            current.adapting_s.append(seconds(lambda: self._adapting.step(self.gact)))
            if len(current.plain_s) > 10 * INTERVAL:
                raise RuntimeError(f"no adaptation ended within {len(current.plain_s)} steps at {self._case}")
        return current

    def row(self, method: str, found: Sequence[Round]) -> Row:
        """The medians over some rounds."""
        return Row(
            **asdict(self._case),
            method=method,
            compressible_tensors=len(self.gact.plan),
            plain_step_s=statistics.median(statistics.median(current.plain_s) for current in found),
            compressed_step_s=statistics.median(statistics.median(current.compressed_s) for current in found),
            total_steps=statistics.median(current.total_steps for current in found),
            longest_step_steps=statistics.median(current.longest_step_steps for current in found),
        )


def measure(case: Case, rounds: int) -> Row:
    """An adaptation of one case."""
    turns = Turns(case)
    turns.until_adapted()  # the first adaptation of both warms up
    return turns.row("one pass", [turns.until_adapted() for _ in range(rounds)])


def measure_first(case: Case, rounds: int) -> Row:
    """The first adaptation of one case."""
    turns, found = Turns(case), []
    turns.until_adapted()
    for _ in range(rounds):
        turns.restart()
        found.append(turns.until_adapted())
    return turns.row(FIRST, found)


def measure_gact(case: Case, rounds: int, tensors: int) -> list[Row]:
    """GACT's procedure for as many tensors, on the whole batch and on a slice of it."""
    job = Job(case)
    part = job.batch[0][:SLICE], job.batch[1][:SLICE]
    whole_batch, few = (GactProcedure(job.model, job.loss, batch) for batch in (job.batch, part))
    methods = {
        "GACT, whole batch": lambda: whole_batch.sensitivity(0),
        f"GACT, {SLICE} examples": lambda: few.sensitivity(0),
    }
    times = times_s({"plain": job.step, **methods}, rounds)
    rows = []
    for method in methods:
        steps = tensors * median_ratio(times[method], times["plain"])
        rows.append(
            Row(
                **asdict(case),
                method=method,
                compressible_tensors=tensors,
                plain_step_s=statistics.median(times["plain"]),
                total_steps=steps,
                longest_step_steps=steps + 1,
            )
        )
    return rows


def seconds(action: Callable[[], object]) -> float:
    """Processor seconds of an action."""
    start_s = time.process_time()
    action()
    return time.process_time() - start_s


def times_s(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each action in each of the rounds, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            time_s = seconds(action)
            if number > 0:
                times[name].append(time_s)
    return times


def median_ratio(values: list[float], plain: list[float]) -> float:
    """Median over the rounds of a time as a multiple of the plain step's."""
    return statistics.median(value / beside for value, beside in zip(values, plain, strict=True))


def processor() -> str:
    """The processor's name where the system tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def show(row: Row) -> None:
    """One line of the table."""
    print(
        f"{row.blocks:6} {row.batch:6} {row.length:7} {row.compressible_tensors:8} {1e3 * row.plain_step_s:8.1f}"
        f" {row.total_steps:8.1f} {row.longest_step_steps:8.1f}  {row.method}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure, show, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--rounds", type=int, default=5, help="adaptations of each case; the median counts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("cost of one adaptation, in plain training steps (forward, backward, AdamW) on the job's own batch")
    print(" blocks  batch  tokens  tensors  step ms    total  longest  method")
    rows = []
    for case in CASES:
        rows.append(measure(case, options.rounds))
        show(rows[-1])
        if case in LONG_CASES:
            rows.append(measure_first(case, options.rounds))
            show(rows[-1])
        if case == GACT_CASE:
            beside = measure_gact(case, options.rounds, rows[-1].compressible_tensors)
            rows += beside
            for row in beside:
                show(row)
    if options.json:
        report = {
            "benchmark": "adaptation",
            "date": datetime.date.today().isoformat(),
            "hardware": f"{processor()}, {os.cpu_count()} cores",
            "threads": 1,
            "clock": "processor seconds",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gact_dist": gact_dist.__version__,
            "model": f"width {WIDTH}, {HEADS} heads, {VOCABULARY} words",
            "level": "L2",
            "adapt_interval": INTERVAL,
            "rounds": options.rounds,
            "probes": _PROBES,
            "probes_note": "all on the one rank of this benchmark; in a job the ranks share them",
            "gact_note": "the three passes of one tensor are measured in each round, times the number of tensors",
            "rows": [asdict(row) for row in rows],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
