"""Gradient variance and memory with one width a tensor and with one a sample (policy actnn), at equal average bits.

    python -m benchmarks.gradient.bench_per_sample --json benchmarks/results/per_sample.json

The image model after an untouched training, one batch; the mean squared distance between the compressed and the exact
gradient relative to its square, over `--draws` draws of the rounding. Three kinds of actnn: without the samples'
numbers, with gradient sizes that were learnt one epoch before, and with those of the step before.
"""

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

import gact_dist
from benchmarks.gradient.bench_variance import trained
from benchmarks.gradient.gradients import gradient

SETTINGS: list[tuple[str, str | None]] = [
    ("uniform", None),
    ("gact", None),
    ("actnn", None),
    ("actnn", "an epoch ago"),
    ("actnn", "a step ago"),
]


def learn(gact, model, loss_fn, batch, index):
    """Let a controller see the gradient of each sample of a batch."""
    with gact.step(sample_index=index):
        loss = loss_fn(batch)
    gradient(model, loss)


def measured(model, loss_fn, batch, exact, config, index, sizes, draws):
    """(relative variance, ratio of exact to retained bytes) with a plan from the whole batch."""
    gact = gact_dist.attach(model, config=config)
    if sizes is not None:
        gact.load_state_dict(sizes)
    rows = index if sizes is not None else None
    with gact.step(None if config.policy == "uniform" else loss_fn, batch, sample_index=rows):
        loss_fn(batch)
    total = 0.0
    for _ in range(draws):
        with gact.step(sample_index=rows):
            loss = loss_fn(batch)
        total += float((gradient(model, loss) - exact).square().sum()) / draws
    ratio = gact.report().ratio
    gact.detach()
    return total / float(exact.square().sum()), ratio


def rows_of(name, steps, epoch, options):
    model, loss_fn, batch = trained(name, steps)
    samples = len(batch["labels"])
    index = torch.arange(samples)
    exact = gradient(model, loss_fn(batch))
    learnt: dict[str | None, Any] = {None: None}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    for age, state in (("a step ago", weights), ("an epoch ago", trained(name, steps - epoch)[0].state_dict())):
        model.load_state_dict(state)
        gact = gact_dist.attach(model, config=gact_dist.Config(policy="actnn"))
        learn(gact, model, loss_fn, batch, index)
        learnt[age] = gact.state_dict()
        gact.detach()
        model.load_state_dict(weights)
    for bits in options.bits:
        for policy, age in SETTINGS:
            config = gact_dist.Config(policy=policy, bits=bits, calibration_samples=options.samples)
            variance, ratio = measured(model, loss_fn, batch, exact, config, index, learnt[age], options.draws)
            row = {"model": name, "policy": policy, "gradient sizes": age, "bits": bits, "ratio": ratio}
            yield row | {"relative_variance": variance}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=["image"])
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=100, help="untouched training steps before measuring")
    parser.add_argument("--epoch", type=int, default=46, help="steps in an epoch")
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    rows = []
    print(f"{'model':8s} {'policy':8s} {'gradient sizes':>14s} {'bits':>4s} {'ratio':>6s} {'variance/|g|^2':>15s}")
    for name in options.models:
        for row in rows_of(name, options.steps, options.epoch, options):
            rows.append(row)
            print(
                f"{row['model']:8s} {row['policy']:8s} {row['gradient sizes'] or '':>14s} {row['bits']:4d} "
                f"{row['ratio']:6.2f} {row['relative_variance']:15.3e}", flush=True,
            )  # fmt: skip
    if options.json:
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        facts |= {"steps": options.steps, "draws": options.draws, "calibration_samples": options.samples}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
