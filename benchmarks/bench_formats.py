"""Which stored format adds the least variance to the gradient at equal bytes? Formats tried for the codec.

    .venv/bin/python benchmarks/bench_formats.py --json benchmarks/results/formats.json

For each configuration of configs/, after a short untouched training: every saved tensor with its elements'
sensitivities (two probes of the one-pass estimator). For each format the expected variance at 1 to 8 bits of payload,
computed from the rounding itself and summed with the sensitivities; then the best allocation over the tensors within a
budget of bits an element that counts the format's metadata. What is printed is that variance divided by the one of the
first format, version 2 of the codec (groups of 256 in memory order with dither, a scale of 2 bytes and an offset of 4):
below 1 is better at equal bytes. The rows "codec" are measured with the codec's own operators.
"""

import argparse
import datetime
import json
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gact_dist
from benchmarks.bench_variance import trained
from gact_dist import codec, ops, sensitivity
from gact_dist.allocation import minimum_variance
from gact_dist.engine import Engine
from gact_dist.packing import Packer
from gact_dist.payload_format import sections

BUDGETS = (2.5, 3.0, 4.2, 8.2)
WIDTHS = range(1, 9)
SIZES = (512, 256, 128, 64)
OUTLIER_BITS = 16 + 8  # a bfloat16 and its place in a group of 256


@dataclass(frozen=True)
class Saved:
    """A saved tensor and the mean square of each element's derivative of the gradient, in its own shape."""

    values: Tensor
    weights: Tensor


def saved_tensors(name: str, steps: int) -> list[Saved]:
    """What autograd saves in one step of a configuration, and how much each element counts."""
    model, loss_fn, batch = trained(name, steps)
    found: list[Saved] = []

    def keep(tensor: Tensor, weight: Tensor | None, packer: Packer) -> Tensor:
        if weight is not None and tensor.is_floating_point():
            values = tensor.detach().float().clone()
            found.append(Saved(values, torch.empty_like(values).copy_(weight.detach())))
        return torch.zeros(8, dtype=torch.float64)

    engine = Engine(model, gact_dist.Config(bits=8), 0)
    with mock.patch.object(sensitivity, "_rounding", keep):
        sensitivity.measure(engine, model, lambda: loss_fn(batch), seed=1, probes=2)
    engine.close()
    return found


def in_groups(flat: Tensor, size: int, fill: float) -> Tensor:
    """[G, size] of a flat tensor, the last group filled up."""
    missing = -flat.numel() % size
    return torch.cat([flat, flat.new_full((missing,), fill)]).view(-1, size)


def outward(step: Tensor, mantissa_step: int) -> Tensor:
    """``step`` rounded up to a float whose bits are a multiple of ``mantissa_step``."""
    return ((step.view(torch.int32) + mantissa_step - 1) & -mantissa_step).view(torch.float32)


def fraction_variance(distance: Tensor, step: Tensor) -> Tensor:
    """f (1 - f) of distances counted in steps; 0 where the step is."""
    units = torch.where(step > 0, distance / step, 0.0)
    fraction = units - units.floor()
    return fraction * (1 - fraction)


def variance_of(values: Tensor, weights: Tensor, low: Tensor, step: Tensor, dither: bool) -> float:
    """Expected weighted variance of groups [G, n] with offsets ``low`` and steps ``step`` [G, 1]."""
    plain = fraction_variance(values - low, step)
    if dither:
        high = values.amax(1, True)
        allowed = ((low < 0) & (high > 0)) | (low > step / 2) | (high < -step / 2)
        plain = torch.where(allowed & (plain.mean(1, True) > 1 / 12), 1 / 12, plain)
    return float((weights * plain * step.square()).double().sum())


def flat_of(saved: Saved, order: str) -> tuple[Tensor, Tensor]:
    """Values and weights in memory order, or by channels: the second dimension of images, the last of all others."""
    values, weights = saved.values, saved.weights
    if order == "channels" and values.dim() > 1:
        channel = 1 if values.dim() == 4 else values.dim() - 1
        return values.movedim(channel, 0).reshape(-1), weights.movedim(channel, 0).reshape(-1)
    return codec.stored_values(values), codec.stored_values(weights)


def group_format(
    saved: Saved,
    size: int,
    dither: bool = True,
    short_offset: bool = False,
    order: str = "memory",
    outliers: int = 0,
) -> tuple[list[float], float]:
    """Variance at 1..8 bits and metadata bits an element: one scale and one offset for each group."""
    flat, flat_weights = flat_of(saved, order)
    values = in_groups(flat, size, float(flat[-1]))
    weights = in_groups(flat_weights, size, 0.0)
    metadata = 16 + (16 if short_offset else 32)
    if outliers:  # the farthest elements of each group are stored apart, the others have the range to themselves
        middle = values.median(1, True).values
        far = (values - middle).abs().topk(outliers, 1).indices
        values = values.scatter(1, far, middle.expand(-1, outliers))
        weights = weights.scatter(1, far, 0.0)
        metadata += outliers * OUTLIER_BITS
    low, high = values.amin(1, True), values.amax(1, True)
    if short_offset:  # towards minus infinity in bfloat16
        bits_of_low = low.view(torch.int32)
        low = torch.where(low < 0, bits_of_low + 0xFFFF, bits_of_low).bitwise_and(-0x10000).view(torch.float32)
    found = []
    for bits in WIDTHS:
        step = outward((high - low) / (2**bits - 1), 0x20000 if dither else 0x10000)
        found.append(variance_of(values, weights, low, step, dither))
    return found, metadata / size


def codec_format(saved: Saved, size: int, by_column: bool = True) -> tuple[list[float], float]:
    """The codec itself, float32, with groups in memory order or of one column where it takes them."""
    values, weights = codec.stored_values(saved.values), codec.stored_values(saved.weights)
    columns = codec.columns_of(saved.values, size) if by_column else 1
    metadata_bytes = sections(values.numel(), 1, size, columns).total_bytes - (values.numel() + 7) // 8
    return ops.rounding_variance(values, weights, size, columns).tolist(), 8 * metadata_bytes / values.numel()


def width_format(saved: Saved, size: int, dither: bool = True) -> tuple[list[float], float]:
    """One step for the tensor, and for each group as many bits as its range needs, none for a constant."""
    flat, flat_weights = flat_of(saved, "memory")
    values = in_groups(flat, size, float(flat[-1]))
    weights = in_groups(flat_weights, size, 0.0)
    low = values.amin(1, True)
    spread = (values.amax(1, True) - low).double()
    found = []
    for bits in WIDTHS:
        least, most = float(spread.max()) * 2.0**-24 + 1e-38, float(spread.max()) + 1e-38
        for _ in range(40):  # the smallest step whose average width is at most `bits`
            step = (least * most) ** 0.5
            widths = torch.ceil(torch.log2(torch.ceil(spread / step) + 1)).clamp(max=16)
            least, most = (step, most) if float(widths.mean()) > bits else (least, step)
        steps = torch.where(spread > 0, most, 0.0).float()
        found.append(variance_of(values, weights, low, steps, dither))
    return found, (16 + 4) / size


def companded_format(saved: Saved, size: int) -> tuple[list[float], float]:
    """Levels at squares of evenly spaced numbers from the end of the group that lies nearer to zero, without dither."""
    flat, flat_weights = flat_of(saved, "memory")
    values = in_groups(flat, size, float(flat[-1]))
    weights = in_groups(flat_weights, size, 0.0)
    low, high = values.amin(1, True), values.amax(1, True)
    spread = high - low
    from_low = low.abs() <= high.abs()
    distance = torch.where(spread > 0, torch.where(from_low, values - low, high - values) / spread, 0.0)
    found = []
    for bits in WIDTHS:
        levels = 2**bits - 1
        below = (distance.sqrt() * levels).floor().clamp(max=levels - 1)
        lower, upper = (below / levels).square(), ((below + 1) / levels).square()
        found.append(float((weights * (distance - lower).clamp(min=0) * (upper - distance) * spread**2).double().sum()))
    return found, 48 / size


def rotated_format(saved: Saved, size: int) -> tuple[list[float], float]:
    """Groups times an orthonormal Hadamard matrix before rounding."""
    flat, flat_weights = flat_of(saved, "memory")
    values = in_groups(flat, size, 0.0)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    turned = values @ matrix
    # every entry of the matrix has the same square, so that each element gets the mean variance of its group
    mean_weight = in_groups(flat_weights, size, 0.0).mean(1, True).expand_as(turned)
    low, high = turned.amin(1, True), turned.amax(1, True)
    found = []
    for bits in WIDTHS:
        step = outward((high - low) / (2**bits - 1), 0x20000)
        found.append(variance_of(turned, mean_weight, low, step, dither=True))
    return found, 48 / size


FORMATS = {
    "groups of 256 (version 2)": partial(group_format, size=256),
    **{f"codec, memory order, groups of {size}": partial(codec_format, size=size, by_column=False) for size in SIZES},
    **{f"codec, by column, groups of {size}": partial(codec_format, size=size) for size in SIZES},
    "groups of 256, without dither": partial(group_format, size=256, dither=False),
    "groups of 64": partial(group_format, size=64),
    "groups of 128": partial(group_format, size=128),
    "groups of 512": partial(group_format, size=512),
    "groups of 32, offset 2 bytes": partial(group_format, size=32, short_offset=True),
    "groups of 64, offset 2 bytes": partial(group_format, size=64, short_offset=True),
    "groups of 128, offset 2 bytes": partial(group_format, size=128, short_offset=True),
    "groups of 256, offset 2 bytes": partial(group_format, size=256, short_offset=True),
    "groups of 256 within a channel": partial(group_format, size=256, order="channels"),
    "groups of 64 within a channel": partial(group_format, size=64, order="channels"),
    "groups of 256, 2 outliers apart": partial(group_format, size=256, outliers=2),
    "the same within a channel": partial(group_format, size=256, outliers=2, order="channels"),
    "groups of 128 within a channel, offset 2 bytes": partial(
        group_format, size=128, order="channels", short_offset=True
    ),
    "one step, width by group of 64": partial(width_format, size=64),
    "one step, width by group of 256": partial(width_format, size=256),
    "squared levels, groups of 64": partial(companded_format, size=64),
    "rotated groups of 64": partial(rotated_format, size=64),
    "rotated groups of 256": partial(rotated_format, size=256),
}


def best_variance(tensors: list[Saved], form, budget: float) -> float:
    """Least total variance of an allocation whose payload and metadata are at most ``budget`` bits an element."""
    costs, metadata = zip(*(form(saved) for saved in tensors), strict=True)
    sizes = np.array([saved.values.numel() for saved in tensors], dtype=float)
    return minimum_variance(
        np.array(costs), sizes, average_bits=budget, exact_bits=32, metadata_bits=np.array(metadata)
    ).variance


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=["text", "image", "graph"])
    parser.add_argument("--steps", type=int, default=20, help="untouched training steps before measuring")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        tensors = saved_tensors(model, options.steps)
        print(
            f"{model}: {len(tensors)} tensors; variance at {', '.join(map(str, BUDGETS))} bits an element, all counted"
        )
        first = None
        for name, form in FORMATS.items():
            found = []
            for budget in BUDGETS:
                try:
                    found.append(best_variance(tensors, form, budget))
                except ValueError:  # the metadata alone is over the budget
                    found.append(float("nan"))
            first = first or found
            ratios = [value / reference for value, reference in zip(found, first, strict=True)]
            print(f"  {name:46s}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
            rows.append({"model": model, "format": name, "budgets": BUDGETS, "variance": found, "ratio": ratios})
    if options.json:
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
