"""Does the mean of many rounded gradients come to the exact one, with tensors that are made again and without?

    python -m benchmarks.gradient.bench_bias --json benchmarks/results/bias.json

Rounding is unbiased, but a function of a rounded tensor is biased in second order: GELU of a rounded input has another
mean than GELU of the input. For each of the models of benchmarks.fidelity, after a short untouched training: rounded
gradients of one batch, in groups. The errors of the means of two groups are independent, so the mean of their inner
products over all pairs of groups is the square of the bias, itself without bias; its standard error is the jackknife's
over the groups. It is given relative to V, the variance of one gradient (summed over all parameters): a part B of V is
what is left of V after the mean of 1 / B gradients, if all of them were of the same weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import gact_dist
from benchmarks.fidelity.run import MODELS
from benchmarks.gradient.bench_variance import trained
from benchmarks.gradient.gradients import Point

BITS = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model under one configuration."""

    model: str
    bits: int
    derive: bool
    variance: float
    """V, relative to |g|^2"""
    bias: float
    """square of the bias, relative to V; by chance it may be less than zero"""
    standard_error: float
    """of that"""


def row_of(point: Point, model: str, bits: int, derive: bool, groups: int, draws: int) -> Row:
    """draws: in each group."""
    config = gact_dist.Config(
        policy="gact", bits=bits, group_size=256 if bits == 2 else 128, derive=derive, calibration_samples=64
    )
    means: list[torch.Tensor] = []
    total = 0.0
    for number, error in enumerate(point.errors(config, draws=groups * draws)):
        total += float(error.double().square().sum())
        if number % draws == 0:
            means.append(error / draws)
        else:
            means[-1] += error / draws
    square, standard_error = of_groups(torch.stack([torch.stack([a.dot(b) for b in means]) for a in means]).double())
    variance = total / (groups * draws) - square
    return Row(
        model=model,
        bits=bits,
        derive=derive,
        variance=variance / point.second_moment,
        bias=square / variance,
        standard_error=standard_error / variance,
    )


def of_groups(products: torch.Tensor) -> tuple[float, float]:
    """(the square of the bias, its standard error), of the inner products of the errors of all groups' means."""
    groups = len(products)

    def over_pairs(chosen: torch.Tensor) -> float:
        return float(chosen.sum() - chosen.diagonal().sum()) / (len(chosen) * (len(chosen) - 1))

    without = []
    for left_out in range(groups):
        others = [number for number in range(groups) if number != left_out]
        without.append(over_pairs(products[others][:, others]))
    spread = torch.tensor(without, dtype=torch.float64)
    return over_pairs(products), float(((groups - 1) * spread.var(correction=0)).sqrt())


def main() -> None:
    """Measure, show, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--steps", type=int, default=20, help="untouched training steps before measuring")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--draws", type=int, default=16, help="gradients in each group")
    options = parser.parse_args()
    rows = []
    print(f"{'model':10s} {'bits':>4s} {'derive':>6s} {'V/|g|^2':>10s} {'bias^2/V':>10s} {'+-':>8s}")
    for model in options.models:
        task_model, loss_fn, batch = trained(model, options.steps, MODELS[model])
        point = Point(task_model, loss_fn, [batch])
        for bits in BITS:
            for derive in (False, True):
                row = row_of(point, model, bits, derive, options.groups, options.draws)
                rows.append(asdict(row))
                print(
                    f"{row.model:10s} {row.bits:4d} {row.derive!s:>6s} {row.variance:10.2e} "
                    f"{row.bias:10.4f} {row.standard_error:8.4f}", flush=True,
                )  # fmt: skip
    if options.json:
        facts = {
            "date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__,
            "groups": options.groups, "draws": options.draws, "steps": options.steps,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
