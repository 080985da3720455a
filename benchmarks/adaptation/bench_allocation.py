"""How close to the optimum is an allocation, how long does it take, and does either matter beside the estimates' noise?

    python -m benchmarks.adaptation.bench_allocation [--json FILE] [--tensors 2 3 5 8 15 22 60 400 10000] [--seeds 4]

Two solvers: greedy alone (the linear relaxation, its last step rounded down, what is left spent on single tensors), and
the package's, which enumerates the tensors of the largest steps. Problems: the least variance within an average of
bits, within bytes with metadata, and the fewest bits within a variance (dual), each at 2, 2.5, 3 and 4 bits, over five
kinds of sizes and two of curves. "above" is how far what was minimised lies above the optimum, mean and worst; the
optimum is that of a front without practical limits up to 60 tensors, and a lower bound beyond.

"noise" is what users see: plans made from sensitivities with 8% of noise, and how far their true variance lies above
that of the plan made from the true ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from gact_dist.policies import knapsack
from gact_dist.policies.knapsack import ROUNDING, Problem

COUNTS = (2, 3, 5, 8, 15, 22, 60, 400, 10_000)
AVERAGES = (2.0, 2.5, 3.0, 4.0)
ROUNDING_VARIANCE = (2.0 ** np.arange(1, 9) - 1) ** -2
NOISE = 0.08  # standard deviation of the logarithm, of an estimate from one probe
GROUP, METADATA_BYTES = 256, 4
LARGEST_ENUMERATED = 60
"""With more tensors than this the optimum is replaced by a bound."""

Floats = NDArray[np.float64]
Choice = NDArray[np.int64]


# -- instances ---------------------------------------------------------------------------------------------------------


def transformer(generator: np.random.Generator, count: int) -> Floats:
    """Blocks of six activations and two of the MLP, four times as wide."""
    return np.resize([1.0, 1, 1, 1, 1, 1, 4, 4], count) * 2**21


def convolutions(generator: np.random.Generator, count: int) -> Floats:
    """Powers of two, as stages of halved resolution have."""
    return 2.0 ** generator.integers(12, 21, count)


def equal(generator: np.random.Generator, count: int) -> Floats:
    return np.full(count, 2.0**16)


def five_decades(generator: np.random.Generator, count: int) -> Floats:
    return np.floor(10 ** generator.uniform(2, 7, count))


def one_giant(generator: np.random.Generator, count: int) -> Floats:
    """One tensor of twenty times all others: logits, or the features of a graph."""
    sizes = np.floor(10 ** generator.uniform(2, 5, count))
    sizes[0] = 20 * sizes[1:].sum()
    return sizes


SIZES = (transformer, convolutions, equal, five_decades, one_giant)


def curves(generator: np.random.Generator, sizes: Floats, perturbed: bool) -> Floats:
    """Variance [L, 8]: c / (2^b - 1)^2, c in proportion to size over several decades; each 30% off if perturbed."""
    scale = sizes * np.exp(generator.normal(0, 2, len(sizes)))
    return scale[:, None] * ROUNDING_VARIANCE * np.exp(generator.normal(0, 0.3 * perturbed, (len(sizes), 8)))


def with_exact(costs: Floats) -> Floats:
    return np.column_stack([costs, np.zeros(len(costs))])


def problems(costs: Floats, sizes: Floats, bits: float) -> dict[str, Problem]:
    """The three problems that policies ask about, at about ``bits`` bits."""
    widths = np.arange(1, 9)
    weights = np.column_stack([widths * sizes[:, None], 32 * sizes])
    payload = np.ceil(widths * sizes[:, None] / 8) + METADATA_BYTES * np.ceil(sizes[:, None] / GROUP)
    retained = np.column_stack([payload, 4 * sizes])
    narrow, wide = int(np.floor(bits)) - 1, int(np.ceil(bits)) - 1
    budget = (retained[:, narrow] + (retained[:, wide] - retained[:, narrow]) * (bits % 1)).sum()
    variance = np.sqrt(costs[:, narrow].sum() * costs[:, wide].sum())
    return {
        "variance": Problem.build(with_exact(costs), weights, bits * sizes.sum() * ROUNDING),
        "bytes": Problem.build(with_exact(costs), retained, budget * ROUNDING),
        "dual": Problem.build(weights, with_exact(costs), variance * ROUNDING),
    }


def instances(count: int, seeds: int) -> Iterator[tuple[str, Floats, Floats, np.random.Generator]]:
    """Kind, costs [L, 8] and sizes [L], with the generator that made them."""
    for kind in SIZES:
        for perturbed in (False, True):
            for seed in range(seeds if count < 1000 else 1):
                generator = np.random.default_rng(seed)
                sizes = kind(generator, count)
                yield kind.__name__, curves(generator, sizes, perturbed), sizes, generator


# -- solvers -----------------------------------------------------------------------------------------------------------


def greedy(problem: Problem) -> Choice:
    return knapsack._fill(problem, knapsack._relaxation(problem)[0])


def package(problem: Problem) -> Choice:
    return knapsack.minimise(problem)[0]


SOLVERS: dict[str, Callable[[Problem], Choice]] = {"greedy": greedy, "package": package}


def optimum(problem: Problem, found: float) -> float:
    """The least cost there is, or a bound: the relaxation with the largest row at each of its options."""
    count = len(problem.base)
    if count <= LARGEST_ENUMERATED:
        ample = {"_ENUMERATED_ROWS": count, "_FRONT_STATES": 2**14, "_GAP_TOLERANCE": 0.0}
        with mock.patch.multiple(knapsack, **ample):
            return min(found, problem.totals(package(problem))[0])
    span = np.ptp(np.where(np.isfinite(problem.cost), problem.weight, problem.weight[:, :1]), axis=1)
    row = int(span.argmax())
    bounds = []
    for option in np.flatnonzero(np.isfinite(problem.cost[row])):
        only = problem.cost.copy()
        only[row] = np.where(np.arange(only.shape[1]) == option, only[row], np.inf)
        fixed = Problem.build(only, problem.weight, problem.capacity)
        if fixed.totals(fixed.base)[1] <= fixed.capacity:
            bounds.append(knapsack._relaxation(fixed)[1])
    return min(bounds)


# -- measurement -------------------------------------------------------------------------------------------------------


def above(cost: float, least: float) -> float:
    return cost / least - 1 if least > 0 else 0.0


def row_of(count: int, seeds: int) -> dict[str, Any]:
    """What one number of tensors gives: percentages above the optimum by problem and solver, noise, times."""
    excess: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    times: dict[str, list[float]] = defaultdict(list)
    for _, costs, sizes, generator in instances(count, seeds):
        noisy = costs * np.exp(generator.normal(0, NOISE, (count, 1)))
        for bits in AVERAGES:
            true = problems(costs, sizes, bits)
            for name, problem in true.items():
                costs_found = {}
                for solver, solve in SOLVERS.items():
                    start = time.perf_counter()
                    choice = solve(problem)
                    times[solver].append(time.perf_counter() - start)
                    costs_found[solver] = problem.totals(choice)[0]
                least = optimum(problem, min(costs_found.values()))
                for solver, cost in costs_found.items():
                    excess[name][solver].append(above(cost, least))
            exact_plan = true["variance"].totals(package(true["variance"]))[0]
            estimated = problems(noisy, sizes, bits)["variance"]
            for solver, solve in SOLVERS.items():
                excess["noise"][solver].append(above(true["variance"].totals(solve(estimated))[0], exact_plan))
    return {
        "tensors": count,
        "above": {
            name: {solver: {"mean": statistics.fmean(v), "worst": max(v)} for solver, v in by_solver.items()}
            for name, by_solver in excess.items()
        },
        "seconds": {s: {"mean": statistics.fmean(v), "worst": max(v)} for s, v in times.items()},
    }


def processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def print_row(row: dict[str, Any]) -> None:
    for solver in SOLVERS:
        cells = (
            f"{name} {100 * found[solver]['mean']:6.2f} ({100 * found[solver]['worst']:6.1f})"
            for name, found in row["above"].items()
        )
        seconds = row["seconds"][solver]
        took = f"{1e3 * seconds['mean']:.1f} ms ({1e3 * seconds['worst']:.0f})"
        print(f"{row['tensors']:6d} {solver:8s} {'  '.join(cells)}  {took}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--tensors", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--seeds", type=int, default=4, help="instances of each kind; one of each beyond 1000 tensors")
    options = parser.parse_args()
    print("percent above the optimum: mean (worst)")
    rows = []
    for count in options.tensors:
        rows.append(row_of(count, options.seeds))
        print_row(rows[-1])
    if options.json:
        report = {
            "benchmark": "allocation",
            "date": datetime.date.today().isoformat(),
            "hardware": f"{processor()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "numpy": np.__version__,
            "seeds": options.seeds,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
