"""What does one adaptation cost, in multiples of one plain training step, and does it grow with the number of tensors?

    python -m benchmarks.adaptation.bench_adaptation [--json FILE] [--rounds 9]

Language models of 3, 6 and 26 blocks, which keep about 50, 100 and 400 tensors for backward. Beside the adaptation
stands GACT's own procedure, written here from the paper (Liu et al., ICML 2022, section 4): for each tensor three
forward and backward passes of the compressed model, in which all that changes is the rounding of that tensor. Its
passes all cost the same, so one tensor is measured and the number of tensors multiplied in. What is compared runs in
turns, so that a change of the machine's speed meets all; medians are reported, each of the ratio to the plain step
beside it. Times are processor seconds of a single thread: other work on the machine hardly shows in them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import gact_dist
from examples.train.models import LanguageModel
from gact_dist import codec
from gact_dist.adaptation import _PROBES

BLOCKS = (3, 6, 26)
VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, SLICE = 256, 128, 4, 32, 32, 8
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model. The multiples are medians of the ratio to the plain step of the same round."""

    blocks: int
    saved_tensors: int
    compressible_tensors: int
    plain_step_s: float
    adaptation_slice_s: float
    adaptation_full_s: float
    adaptation_slice_steps: float
    """one adaptation on 8 samples, in plain steps on the whole batch"""
    adaptation_full_steps: float
    gact_full_steps: float
    """GACT's procedure on the whole batch for all compressible tensors: measured for one of them, times their number"""
    gact_slice_steps: float
    """the same on the 8 samples of the slice"""


def measure(blocks: int, rounds: int) -> Row:
    """Times of one model, everything once in each round."""
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, LENGTH, WIDTH, blocks, HEADS, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    part = batch[0][:SLICE], batch[1][:SLICE]

    def loss_fn(inputs_and_targets: BATCH_OF_TOKENS) -> Tensor:
        inputs, targets = inputs_and_targets
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def plain_step() -> None:
        optimizer.zero_grad()
        loss_fn(batch).backward()
        optimizer.step()

    gact = gact_dist.attach(model, level="L2")
    with gact.step(loss_fn, batch):
        loss_fn(batch)
    saved, compressible = len(gact.report().rows), len(gact.plan)
    whole_batch, few_samples = GactProcedure(model, loss_fn, batch), GactProcedure(model, loss_fn, part)
    times = times_s(
        {
            "plain": plain_step,
            "slice": lambda: gact.calibrate(loss_fn, batch, samples=SLICE),
            "full": lambda: gact.calibrate(loss_fn, batch, samples=BATCH),
            "gact full": lambda: whole_batch.sensitivity(0),
            "gact slice": lambda: few_samples.sensitivity(0),
        },
        rounds,
    )
    gact.detach()
    steps = {name: median_ratio(values, times["plain"]) for name, values in times.items()}
    return Row(
        blocks=blocks,
        saved_tensors=saved,
        compressible_tensors=compressible,
        plain_step_s=statistics.median(times["plain"]),
        adaptation_slice_s=statistics.median(times["slice"]),
        adaptation_full_s=statistics.median(times["full"]),
        adaptation_slice_steps=steps["slice"],
        adaptation_full_steps=steps["full"],
        gact_full_steps=steps["gact full"] * compressible,
        gact_slice_steps=steps["gact slice"] * compressible,
    )


def times_s(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each action in each of the rounds, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            start_s = time.process_time()
            action()
            if number > 0:
                times[name].append(time.process_time() - start_s)
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


def show(rows: list[Row]) -> None:
    """The table."""
    print("cost of one adaptation, in plain training steps (forward, backward, AdamW) on the whole batch")
    print(f"{'':>42} {'one pass':>17} {'GACT, 3 a tensor':>17}")
    columns = ("blocks", "saved", "compressible", "step ms")
    print(" ".join(f"{c:>{w}}" for c, w in zip(columns, (6, 8, 13, 12), strict=True)), end="")
    print(f" {'8 samples':>10} {'all':>6} {'8 samples':>10} {'all':>6}")
    for row in rows:
        print(
            f"{row.blocks:6} {row.saved_tensors:8} {row.compressible_tensors:13} {1e3 * row.plain_step_s:12.1f}"
            f" {row.adaptation_slice_steps:10.2f} {row.adaptation_full_steps:6.2f}"
            f" {row.gact_slice_steps:10.0f} {row.gact_full_steps:6.0f}"
        )


def main() -> None:
    """Measure, show, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each case; the median counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(blocks, arguments.rounds) for blocks in BLOCKS]
    show(rows)
    if arguments.json:
        report = {
            "benchmark": "adaptation",
            "date": datetime.date.today().isoformat(),
            "hardware": f"{processor()}, {os.cpu_count()} cores",
            "threads": 1,
            "clock": "processor seconds",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gact_dist": gact_dist.__version__,
            "model": f"width {WIDTH}, {HEADS} heads, {LENGTH} tokens, batch {BATCH}, slice of {SLICE} samples",
            "rounds": arguments.rounds,
            "probes": _PROBES,
            "probes_note": "all on the one rank of this benchmark; in a job the ranks share them",
            "gact_note": "the three passes of one tensor are measured in each round, times the number of tensors",
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
