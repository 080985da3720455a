"""Does the format of 2026-11-23 round as well as the one before it? Variance of the gradient, and what is left of bias.

    python -m benchmarks.codec.bench_format_change --json benchmarks/results/format_change.json

Until commit 79207de codes were bit planes, noise and fractions had 16 bits, and memory order was a layout of its own;
since then codes are words of columns, noise and fractions have 8 bits, and one fused multiply-add makes a fraction. The
earlier codec is built from the last revision before that, under another name, in --earlier (once, two minutes), and
takes the place of today's beneath the same hooks.

Part "gradient": for each model of benchmarks.fidelity, after a third of its steps: the mean squared distance of rounded
from exact gradients of one batch at uniform widths, under both codecs, over many draws of the rounding; their ratio and
its standard error, and what a step keeps with each. At equal bytes a bit of each rounded element is a factor of four. A
typical draw is the geometric mean of them, for at few bits single draws of some models are many times the others.

Part "noise": for each tensor that a step saves after 20 steps (as bench_formats.py has them), at 1 to 8 bits: the
predicted variance of the gradient under both codecs, summed over the model; and of today's the bias that rounding to
1/256 step leaves: its square, summed over the elements, to the variance; and the bias of the sum of all elements to the
standard deviation of that sum. The largest of each over the tensors.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import gact_dist
from benchmarks.codec.bench_formats import saved_tensors
from benchmarks.codec.formats import Saved
from benchmarks.fidelity.run import MODELS
from benchmarks.gradient.bench_variance import trained
from benchmarks.gradient.gradients import Point, gradient
from examples.train.config import ROOT, load_config
from gact_dist import codec
from gact_dist.codec import ops, packed, reference
from gact_dist.codec.format import DEFAULT_GROUP_SIZE

BEFORE = "79207de^"
NAME = "gact_before"
BITS = (2, 3, 4, 8)
NOISE_BITS = range(1, 9)
NOISE_STEPS = 20
BLOCK_DRAWS = 16
_CHUNK_GROUPS = 1 << 13


# ---- the earlier codec


def earlier_codec(folder: Path) -> Any:
    """The module of its operators, built where it is not there yet."""
    if not list(folder.glob(f"{NAME}/_native*.so")):
        _build(folder)
    sys.path.insert(0, str(folder))
    found = importlib.import_module(f"{NAME}.codec.ops")
    if found.isa() == "reference":
        raise RuntimeError(f"the earlier codec has no native library: {found.native_error}")
    return found


def _build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = ("gact_dist", "csrc", "setup.py", "pyproject.toml", "README.md")
    archive = subprocess.run(["git", "archive", BEFORE, *parts], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    (folder / "gact_dist").rename(folder / NAME)
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"gact_dist", NAME.encode()))
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(build, cwd=folder, check=True, capture_output=True, env=os.environ | {"CC": "gcc"})


@contextmanager
def in_place_of_ours(before: Any) -> Iterator[Counter[str]]:
    """Within it the package rounds with the earlier codec. Yields how often that was called."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Tensor]:
        def call(first: Tensor, *rest: Any) -> Tensor:
            calls[name] += 1
            return getattr(before, name)(first.view(-1), *rest)

        return call

    def unpack_part(
        buffer: Tensor,
        bits: int,
        size: int,
        numel: int,
        dtype: torch.dtype,
        seed: int,
        out: Tensor,
        columns: int,
        first: int,
    ) -> None:
        whole = ops.unpack(buffer, bits, size, numel, dtype, seed, columns)
        out.copy_(whole[first : first + out.numel()])

    with ExitStack() as stack:
        for name in ("pack", "pack_out", "unpack", "unpack_out"):
            stack.enter_context(mock.patch.object(ops, name, counted(name)))
        stack.enter_context(mock.patch.object(ops, "unpack_part", unpack_part))
        stack.enter_context(mock.patch.object(ops, "unpack_through", ops._unpack_through))
        stack.enter_context(mock.patch.object(ops, "unpack_gradient", ops._unpack_gradient))
        stack.enter_context(mock.patch.object(ops, "plain_calls", return_value=None))
        stack.enter_context(mock.patch.object(ops, "has_native", return_value=False))
        stack.enter_context(mock.patch.object(packed, "_packers", {}))
        yield calls


# ---- the variance of the gradient


def point_of(name: str) -> Point:
    """A model after a third of its steps, and its next batch."""
    steps = round(load_config(name, MODELS[name]).steps / 3)
    model, loss_fn, batch = trained(name, steps, MODELS[name])
    return Point(model, loss_fn, [batch])


class Kept(NamedTuple):
    """Of a step."""

    retained_bytes: int
    rounded_elements: int


def squared_distances(point: Point, exact: Tensor, bits: int, block: int, before: Any) -> tuple[list[float], Kept]:
    """Of some draws, and what a step keeps. before: the earlier codec, None for today's."""
    with torch.random.fork_rng(), nullcontext(Counter()) if before is None else in_place_of_ours(before) as calls:
        gact = gact_dist.attach(point._model, config=gact_dist.Config(policy="uniform", bits=bits, seed=block))
        found = []
        for _ in range(BLOCK_DRAWS + 1):
            calls.clear()
            with gact.step(batch=point._batches[0]):
                loss = point.loss(0)
            found.append(float((gradient(point._model, loss) - exact).square().sum()))
        report = gact.report()
        gact.detach()
    rounded = [row for row in report.rows if row.codec == "quantised"]
    if before is not None and not (0 < len(rounded) <= calls["pack"] and calls["unpack"]):
        raise RuntimeError(f"the earlier codec packed {calls['pack']} and unpacked {calls['unpack']} of {len(rounded)}")
    elements = sum(torch.Size(row.shape).numel() for row in rounded)
    return found[1:], Kept(report.retained_bytes, elements)  # the first step only learns which tensors are what


def ratio_of(after: Sequence[float], earlier: Sequence[float]) -> tuple[float, float]:
    """The ratio of two means, and its standard error."""
    means = np.mean(after), np.mean(earlier)
    relative = [
        np.std(part, ddof=1) / mean / len(part) ** 0.5 for part, mean in zip((after, earlier), means, strict=True)
    ]
    ratio = float(means[0] / means[1])
    return ratio, ratio * float(np.hypot(*relative))


def typical_ratio(after: Sequence[float], earlier: Sequence[float]) -> tuple[float, float]:
    """The ratio of two geometric means, which single large draws hardly move, and its standard error."""
    logs = [np.log(part) for part in (after, earlier)]
    ratio = float(np.exp(np.mean(logs[0]) - np.mean(logs[1])))
    return ratio, ratio * float(np.hypot(*(np.std(part, ddof=1) / len(part) ** 0.5 for part in logs)))


def gradient_rows(
    name: str, before: Any, seconds: float, *, widths: Sequence[int], most_error: float, seed: int
) -> Iterator[dict[str, Any]]:
    """One row a width; draws are taken in turns until the ratio is known well enough, or so much time is over."""
    point = point_of(name)
    exact = point._exact[0]
    for bits in widths:
        distances: dict[str, list[float]] = {"after": [], "before": []}
        kept: dict[str, Kept] = {}
        end_s, block = time.monotonic() + seconds, 0
        ratio, error = float("nan"), float("inf")
        while block < 2 or (error > most_error * ratio and time.monotonic() < end_s):
            for label, ours in (("after", None), ("before", before)):
                found, kept[label] = squared_distances(point, exact, bits, 1000 * seed + block, ours)
                distances[label] += found
            ratio, error = ratio_of(distances["after"], distances["before"])
            block += 1
        size = float(exact.square().sum())
        typical, typical_error = typical_ratio(distances["after"], distances["before"])
        more_bytes = kept["after"].retained_bytes - kept["before"].retained_bytes
        yield {
            "model": name,
            "bits": bits,
            "seed": seed,
            "draws": len(distances["after"]),
            "ratio": ratio,
            "standard_error": error,
            "typical_ratio": typical,
            "typical_standard_error": typical_error,
            "largest_draw_to_mean": {label: float(max(part) / np.mean(part)) for label, part in distances.items()},
            "ratio_at_equal_bytes": ratio * 4 ** (8 * more_bytes / kept["after"].rounded_elements),
            "relative_variance": {label: float(np.mean(part)) / size for label, part in distances.items()},
            "retained_bytes": {label: found.retained_bytes for label, found in kept.items()},
        }


# ---- what eight bits of noise leave


def noise_row(name: str, before: Any) -> dict[str, Any]:
    """Predicted variance under both codecs, and the bias of today's, at 1 to 8 bits."""
    tensors = saved_tensors(name, NOISE_STEPS)
    variance = {"after": torch.zeros(8, dtype=torch.float64), "before": torch.zeros(8, dtype=torch.float64)}
    squares, sums = np.zeros((len(tensors), 8)), np.zeros((len(tensors), 8))
    for number, saved in enumerate(tensors):
        columns = codec.columns_of(saved.values, DEFAULT_GROUP_SIZE)
        form = codec.stored_values(saved.values), codec.stored_values(saved.weights), DEFAULT_GROUP_SIZE, columns
        variance["after"] += ops.rounding_variance(*form)
        variance["before"] += before.rounding_variance(*form)
        squares[number], sums[number] = bias_of(saved)
    worst = sums.argmax(0)
    return {
        "model": name,
        "tensors": len(tensors),
        "variance_ratio": (variance["after"] / variance["before"]).tolist(),
        "bias_squared_to_variance": squares.max(0).tolist(),
        "bias_of_sum_to_deviation": sums.max(0).tolist(),
        "worst_sum": [tensors[number].kind for number in worst],
    }


def bias_of(saved: Saved) -> tuple[np.ndarray, np.ndarray]:
    """[8] each: squared bias of elements to their variance, and bias of the sum to its deviation; 0 without variance.

    The mean of what decodes is offset + v / 256 steps, with and without dither.
    """
    flat = codec.stored_values(saved.values)
    columns = codec.columns_of(saved.values, DEFAULT_GROUP_SIZE)
    rows = max(_CHUNK_GROUPS // columns, 1) * DEFAULT_GROUP_SIZE * columns
    squares, sums, variances = np.zeros(8), np.zeros(8), np.zeros(8)
    for part in flat.split(rows):
        for bits in NOISE_BITS:
            groups = reference.describe_groups(part, bits, DEFAULT_GROUP_SIZE, columns)
            scaled = reference.scaled_values(groups)
            step, fraction = groups.scale.double(), (scaled & 0xFF).double() / 256
            mean = groups.offset.double() + scaled.double() / 256 * step
            bias = torch.where(groups.valid & ~groups.special, mean - groups.values.double(), 0.0)
            plain = torch.where(reference.dithered(groups, scaled), 1 / 12, fraction * (1 - fraction))
            variance = torch.where(groups.valid & ~groups.special, plain * step.square(), 0.0)
            squares[bits - 1] += float(bias.square().sum())
            sums[bits - 1] += float(bias.sum())
            variances[bits - 1] += float(variance.sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            np.where(variances > 0, squares / variances, 0.0),
            np.where(variances > 0, np.abs(sums) / np.sqrt(variances), 0.0),
        )


# ---- what is written


class Results:
    """The file; a row takes the place of the one that is about the same."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        held = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.held: dict[str, Any] = {"gradient": [], "noise": []} | held

    def add(self, part: str, row: dict[str, Any], *about: str) -> None:
        """about: the names of what tells rows of a part from one another."""
        others = [held for held in self.held[part] if any(held[name] != row[name] for name in about)]
        self.held[part] = [*others, row | {"date": str(datetime.date.today())}]
        self.held |= {"machine": platform.machine(), "torch": torch.__version__, "before": BEFORE}
        if self.path is not None:
            self.path.write_text(json.dumps(self.held, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--earlier", type=Path, default=ROOT / ".cache" / "earlier_codec")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--parts", nargs="+", default=["gradient", "noise"], choices=["gradient", "noise"])
    parser.add_argument("--bits", type=int, nargs="+", default=BITS, help="widths of the gradient's part")
    parser.add_argument("--seconds", type=float, default=60, help="the most for a model and width")
    parser.add_argument("--error", type=float, default=0.005, help="standard error of a ratio that is enough")
    parser.add_argument("--seed", type=int, default=0, help="of the rounding")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, before = Results(options.json), earlier_codec(options.earlier)
    for name in options.models:
        if "gradient" in options.parts:
            chosen = {"widths": options.bits, "most_error": options.error, "seed": options.seed}
            for row in gradient_rows(name, before, options.seconds, **chosen):
                results.add("gradient", row, "model", "bits", "seed")
                ratio = f"{row['ratio']:.4f} +- {row['standard_error']:.4f} of {row['draws']} draws"
                typical = f"typical {row['typical_ratio']:.4f} +- {row['typical_standard_error']:.4f}"
                largest = f"largest {row['largest_draw_to_mean']}"
                print(f"{name:9s} {row['bits']} bits: {ratio}, {typical}, {largest}", flush=True)
        if "noise" in options.parts:
            row = noise_row(name, before)
            results.add("noise", row, "model")
            for key in ("variance_ratio", "bias_squared_to_variance", "bias_of_sum_to_deviation"):
                print(f"{name:9s} {key}: " + ", ".join(f"{value:.3g}" for value in row[key]), flush=True)


if __name__ == "__main__":
    main()
