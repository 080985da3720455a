"""What does an adaptation cost in each mode, in multiples of a plain step of the same job?

    python -m benchmarks.adaptation.bench_adaptation_modes [--json FILE] [--rows DDP FSDP2 ...]

The jobs are those of the table of modes (tests/support/modes.py): two blocks of a small GPT on real ranks (gloo,
CPU, one thread a rank), fp32, without checkpoints. A step of two adapts, so that a change of the machine's speed meets
both kinds; the difference of their medians, divided by the plain one, is what the adaptation costs. Times are wall
clock of the slowest rank. The model is tiny: what a mode adds to a step weighs more than it would in a real one. The
stages of a pipeline adapt in different steps and wait for one another, so that row is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from modes import ROWS, Cell, adamw, batch_of
from ranks import close_pools, run_ranks

from gact_dist import Config

MEASURED = [name for name in ROWS if name != "PP"]
WARM_UP, STEPS = 4, 18
CALIBRATION_SAMPLES = 4


def step_times(cell: Cell) -> tuple[list[float], list[float], int]:
    """On this rank: seconds of plain steps, of steps that adapt, and the number of tensors in the plan."""
    torch._dynamo.reset()
    config = Config(
        bits=4, adapt_interval=2, adapt_tolerance=0.0, calibration_samples=CALIBRATION_SAMPLES, min_numel=16
    )
    job = ROWS[cell.row](cell, adamw)
    gact, times_s = job.attach(config), ([], [])
    for step in range(WARM_UP + STEPS):
        before = gact.adaptation
        dist.barrier()
        started_s = time.perf_counter()
        job.forward_backward(*batch_of(step, job.data_rank()))
        job.update()
        dist.barrier()
        if step >= WARM_UP:
            times_s[gact.adaptation is not before].append(time.perf_counter() - started_s)
    tensors = len(gact.plan)
    gact.detach()
    job.close()
    return *times_s, tensors


def row_of(cell: Cell) -> dict[str, Any]:
    """What one job says."""
    found = run_ranks(step_times, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
    plain_s, adapting_s, tensors = max(found, key=lambda on_rank: statistics.median(on_rank[0]))
    plain, adapting = statistics.median(plain_s), statistics.median(adapting_s)
    steps = (adapting - plain) / plain
    return {"mode": cell.row, "execution": cell.execution, "tensors": tensors, "plain_step_s": plain, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", nargs="+", choices=MEASURED, default=MEASURED, metavar="ROW")
    options = parser.parse_args()
    rows = []
    for name in options.rows:
        for execution in ("eager", "compile"):
            rows.append(row_of(Cell(name, "none", "fp32", execution)))
            row = rows[-1]
            print(f"{name}, {execution}: {row['steps']:.1f} steps, {row['tensors']} tensors", flush=True)
    if options.json:
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    # the jobs travel to the ranks by name, which must be this module's under the name that it has there
    from benchmarks.adaptation import bench_adaptation_modes

    bench_adaptation_modes.main()
    close_pools()
