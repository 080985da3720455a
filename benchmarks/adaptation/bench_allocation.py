"""How long an allocation takes and how far it is from its Lagrangian bound, by number of tensors.

    python -m benchmarks.adaptation.bench_allocation [--json FILE] [--repeats 20]

Times are medians over the repeats, worst over the averages 1.5 to 6 bits. The excess over the bound is the worst
too; with few tensors it includes what no allocation can reach.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gact_dist.policies.allocation import minimum_bits, minimum_variance

AVERAGES = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
COUNTS = (50, 400, 2000, 10_000)
ROUNDING_VARIANCE = (2.0 ** np.arange(1, 9) - 1) ** -2

Instance = tuple[NDArray[np.float64], NDArray[np.int64]]


def spread(generator: np.random.Generator, count: int) -> Instance:
    """Sensitivities over some five decades, sizes over three, 50% noise on every measured cost."""
    scale = np.exp(generator.normal(0, 3, count))[:, None]
    noise = np.exp(generator.normal(0, 0.5, (count, 8)))
    return scale * ROUNDING_VARIANCE * noise, generator.integers(1, 1000, count)


def skewed(generator: np.random.Generator, count: int) -> Instance:
    """As spread, with sizes over six decades."""
    costs, _ = spread(generator, count)
    return costs, (10 ** generator.uniform(0, 6, count)).astype(np.int64)


def giant(generator: np.random.Generator, count: int) -> Instance:
    """As spread, with one tensor of twenty times all others: the case that takes longest."""
    costs, sizes = spread(generator, count)
    sizes[0] = 20 * sizes.sum()
    return costs, sizes


def lower_bound(costs: NDArray[np.float64], sizes: NDArray[np.int64], average_bits: float) -> float:
    """Least over the widths of the first tensor: the Lagrangian bound alone splits a giant between two widths."""
    bounds = []
    for bits in range(1, 9):
        left = (average_bits * sizes.sum() - bits * sizes[0]) / sizes[1:].sum()
        if left >= 1:
            others = minimum_variance(costs[1:], sizes[1:], average_bits=left, exact_bits=32)
            bounds.append(costs[0, bits - 1] + others.lower_bound)
    return min(bounds)


def measure(kind: Callable[[np.random.Generator, int], Instance], count: int, repeats: int) -> dict[str, Any]:
    costs, sizes = kind(np.random.default_rng(0), count)
    primal_s, dual_s, excess = [], [], []
    for average_bits in AVERAGES:
        primal = partial(minimum_variance, costs, sizes, average_bits=average_bits, exact_bits=32)
        result = primal()
        dual = partial(minimum_bits, costs, sizes, variance_budget=result.variance, exact_bits=32)
        primal_s.append(median_s(repeats, primal))
        dual_s.append(median_s(repeats, dual))
        excess.append(result.variance / lower_bound(costs, sizes, average_bits) - 1)
    return {
        "kind": kind.__name__,
        "tensors": count,
        "minimum_variance_s": max(primal_s),
        "minimum_bits_s": max(dual_s),
        "excess_over_bound": max(excess),
    }


def median_s(repeats: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each case; the median counts")
    arguments = parser.parse_args()
    rows = [measure(kind, count, arguments.repeats) for kind in (spread, skewed, giant) for count in COUNTS]
    print(f"{'kind':8} {'tensors':>7} {'variance ms':>12} {'bits ms':>8} {'over bound %':>13}")
    for row in rows:
        print(
            f"{row['kind']:8} {row['tensors']:7} {1e3 * row['minimum_variance_s']:12.2f} "
            f"{1e3 * row['minimum_bits_s']:8.2f} {100 * row['excess_over_bound']:13.3f}"
        )
    if arguments.json:
        report = {
            "benchmark": "allocation",
            "date": datetime.date.today().isoformat(),
            "hardware": f"{processor()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "repeats": arguments.repeats,
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
