"""Gradient variance on the real models: predicted and measured, uniform and adaptive widths, at equal average bits.

    python -m benchmarks.gradient.bench_variance --json benchmarks/results/variance.json

For each configuration of configs/: the model after a short untouched training, one batch; for each policy and width the
mean squared distance between the compressed and the exact gradient, over `--draws` draws of the rounding, next to what
the one-pass sensitivity predicted. It answers whether adaptive 4 bits have less gradient variance than uniform 8 bits.
"""

import argparse
import datetime
import json
import platform
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

import gact_dist
from benchmarks.gradient.gradients import Point
from examples.train.config import load_config
from examples.train.tasks import batch_rows, build_task, select
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies.allocation import minimum_variance
from gact_dist.sensitivity.one_pass import measure

SETTINGS = [("uniform", 2), ("uniform", 4), ("uniform", 8), ("gact", 2), ("gact", 3), ("gact", 4), ("gact", 6)]


def trained(name: str, steps: int, overrides: Iterable[str] = ()):
    """The model of a configuration after `steps` untouched steps, and the loss function and batch to measure with."""
    config = load_config(name, overrides)
    torch.manual_seed(0)
    task = build_task(config, torch.device("cpu"))

    def loss_fn(batch):
        return functional.cross_entropy(task.logits(task.model, batch), batch["labels"])

    def batch_of(step):
        sizes = {"examples": len(task.train["labels"]), "batch_size": config.batch_size}
        return select(task.train, batch_rows(step, seed=0, rank=0, world_size=1, **sizes))

    task.model.train()
    optimizer = torch.optim.AdamW(task.model.parameters(), min(config.learning_rate, 1e-3))
    for step in range(steps):
        loss_fn(batch_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return task.model, loss_fn, batch_of(steps)


def rows_of(name, steps, draws, probes):
    model, loss_fn, batch = trained(name, steps)
    point = Point(model, loss_fn, [batch])
    size = point.second_moment
    # the exact point as nearly as widths allow: what a 4-bit allocation could reach at best is asked of linear costs
    hooks = SavedTensorHooks(model, gact_dist.Config(bits=8), 0)
    found = measure(hooks, model, lambda: point.loss(0), seed=1, probes=probes)
    hooks.close()
    costs = np.array([item.variance.numpy() for item in found])
    sizes = np.array([item.numel for item in found], dtype=float)
    bound = minimum_variance(costs, sizes, average_bits=4, exact_bits=32).lower_bound / size
    uniform = float(costs[:, 7].sum()) / size
    print(f"{name:8s} predicted: no 4-bit allocation has less than {bound:.3e}, uniform 8 bits have {uniform:.3e}")
    yield {"model": name, "bound_at_4_bits": bound, "uniform_8_predicted": uniform}
    for policy, bits in SETTINGS:
        noise = point.noise(gact_dist.Config(policy=policy, bits=bits, calibration_samples=64), draws=draws)
        ratio = noise.exact_bytes / noise.retained_bytes
        predicted = sum(float(item.variance[bits - 1]) for item in found) if policy == "uniform" else None
        row = {"model": name, "policy": policy, "bits": bits, "ratio": ratio, "relative_variance": noise.measured}
        yield row | {"predicted": None if predicted is None else predicted / size}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=["text", "image", "graph"])
    parser.add_argument("--steps", type=int, default=20, help="untouched training steps before measuring")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--probes", type=int, default=4)
    options = parser.parse_args()
    rows = []
    print(f"{'model':8s} {'policy':8s} {'bits':>4s} {'ratio':>6s} {'variance/|g|^2':>15s} {'predicted':>11s}")
    for name in options.models:
        for row in rows_of(name, options.steps, options.draws, options.probes):
            rows.append(row)
            if "policy" not in row:
                continue
            predicted = "" if row["predicted"] is None else f"{row['predicted']:.3e}"
            print(
                f"{row['model']:8s} {row['policy']:8s} {row['bits']:4d} {row['ratio']:6.2f} "
                f"{row['relative_variance']:15.3e} {predicted:>11s}", flush=True,
            )  # fmt: skip
    if options.json:
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts | {"draws": options.draws, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
