"""Which stored format adds the least variance to the gradient at equal bytes? Formats tried for the codec.

    python -m benchmarks.codec.bench_formats --json benchmarks/results/formats.json

For each configuration of configs/, after a short untouched training: every saved tensor with its elements'
sensitivities (two probes of the one-pass estimator). For each format the expected variance at 1 to 8 bits of payload,
computed from the rounding itself and summed with the sensitivities; then the best allocation over the tensors within a
budget of bits an element that counts the format's metadata. What is printed is that variance divided by the one of the
format in use, measured with the codec's own operators: below 1 is better at equal bytes.

For the choices, in which every tensor may take one of several formats: for each kind of tensor (the operator that made
it) the share of its elements that did not take the format in use, and the variance of an allocation over the tensors of
this kind alone, again divided by that of the format in use.

Then the variance of groups that lie far from zero, in units of their range, where an offset of one byte does not reach:
divided by that of the format in use at the same payload. Last, about what the better candidates would take to pack and
unpack (format_times.py). With --formats only these are measured, and take the place of their rows in the file.
"""

import argparse
import datetime
import json
import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import gact_dist
from benchmarks.codec import format_times, formats
from benchmarks.codec.formats import Options, Saved, allocated
from benchmarks.gradient.bench_variance import trained
from gact_dist.hooks import Encoder, SavedTensorHooks
from gact_dist.sensitivity import one_pass as sensitivity

BUDGETS = (2.5, 3.0, 4.2, 8.2)
KIND_BUDGETS = (3.0, 4.2)
IN_USE = "codec, by column, groups of 128"
SIZES = (512, 256, 128, 64)

_group, _codec, _own_width = formats.group_format, formats.codec_format, formats.own_width_format
_one_byte = {"scale": formats.SCALE_E4M3, "offset": formats.OFFSET_BYTE}
FORMATS = {
    IN_USE: _codec,
    **{f"codec, by column, groups of {size}": partial(_codec, size=size) for size in SIZES if size != 128},
    **{f"codec, memory order, groups of {size}": partial(_codec, size=size, by_column=False) for size in SIZES},
    "version 2: memory order, 256, float32 offset": partial(
        _group, size=256, order="memory", offset=formats.OFFSET_FLOAT32
    ),
    "without dither": partial(_group, dither=False),
    "groups of one channel, of NCHW too": partial(_group, order="channel"),
    "scale float16": partial(_group, scale=formats.SCALE_FLOAT16),
    "scale float32": partial(_group, scale=formats.SCALE_FLOAT32),
    "scale e5m3": partial(_group, scale=formats.SCALE_E5M3),
    "scale e5m3, groups of 64": partial(_group, size=64, scale=formats.SCALE_E5M3),
    "scale e8m0": partial(_group, scale=formats.SCALE_E8M0),
    "scale e8m0, groups of 64": partial(_group, size=64, scale=formats.SCALE_E8M0),
    "offset float32": partial(_group, offset=formats.OFFSET_FLOAT32),
    "offset bfloat16": partial(_group, offset=formats.OFFSET_BFLOAT16),
    "offset one byte": partial(_group, offset=formats.OFFSET_BYTE),
    "offset one byte, groups of 64": partial(_group, size=64, offset=formats.OFFSET_BYTE),
    "scale e4m3, offset one byte": partial(_group, **_one_byte),
    "scale e4m3, offset one byte, groups of 64": partial(_group, size=64, **_one_byte),
    "scale e4m3 of any exponent, offset one byte, groups of 64": partial(
        _group, size=64, scale=formats.SCALE_E4M3_ANY, offset=formats.OFFSET_BYTE
    ),
    "2 outliers apart": formats.outlier_format,
    "squared levels": formats.squared_format,
    **{
        f"rotated, {order}, groups of {size}": partial(formats.rotated_format, size=size, order=order)
        for size in (64, 256)
        for order in ("memory", "column")
    },
    **{f"one step, widths by group of {size}": partial(formats.one_step_format, size=size) for size in (32, 64, 128)},
    **{
        f"one step, fractional widths by group of {size}": partial(formats.one_step_format, size=size, counted="levels")
        for size in (32, 64, 128)
    },
    "scale and width by group": _own_width,
    "scale by group, width by column": partial(_own_width, whole_columns=True),
    "scale and width by group of 64, one byte each": partial(_own_width, size=64, **_one_byte),
}
CHOICES = {
    "memory order": ["codec, memory order, groups of 128"],
    "rotated by 64": ["rotated, memory, groups of 64", "rotated, column, groups of 64"],
    "rotated by 256": ["rotated, memory, groups of 256", "rotated, column, groups of 256"],
    "squared levels": ["squared levels"],
    "one step, 32": ["one step, widths by group of 32"],
    "one step, 64": ["one step, widths by group of 64"],
    "2 outliers apart": ["2 outliers apart"],
    "scale and width by group": ["scale and width by group"],
}
CHOICES["any of memory order, rotated, squared, outliers"] = [
    name for choice in ("memory order", "rotated by 64", "rotated by 256", "squared levels", "2 outliers apart")
    for name in CHOICES[choice]
]  # fmt: skip

DISTANCES = (0, 1, 2, 4, 8, 16, 64, 1000)  # of the smallest element of a group from zero, in ranges of the group
FAR_BITS = (2, 4, 8)
FAR = {"offset one byte": {"offset": formats.OFFSET_BYTE}, "scale e4m3, offset one byte": _one_byte}

# Without allocation and metadata, every tensor at the same width: one step for each group, and one for the tensor.
_memory_order = {"size": 256, "order": "memory", "dither": False}
EQUAL_PAYLOAD = {
    "one step a group": partial(_group, **_memory_order),
    **{
        f"one step, widths counted in {counted}": partial(formats.one_step_format, counted=counted, **_memory_order)
        for counted in ("bits", "levels", "steps")
    },
}


def saved_tensors(model_name: str, steps: int) -> list[Saved]:
    """What autograd saves in one step of a configuration, and how much each element counts."""
    model, loss_fn, batch = trained(model_name, steps)
    found: list[tuple[Tensor, Tensor]] = []

    def keep(tensor: Tensor, weight: Tensor | None, encoder: Encoder, *_: object) -> Tensor:
        if weight is not None:
            values = tensor.detach().float().clone()
            found.append((values, torch.empty_like(values).copy_(weight.detach())))
        return torch.zeros(8, dtype=torch.float64)

    hooks = SavedTensorHooks(model, gact_dist.Config(bits=8), 0)
    with mock.patch.object(sensitivity, "rounding_of", keep):
        measured = sensitivity.measure(hooks, model, lambda: loss_fn(batch), seed=1, probes=2)
    hooks.close()
    names = [each.name for each in measured if not each.by_perturbation]
    return [Saved(kind_of(name), *pair) for name, pair in zip(names, found, strict=True)]


def kind_of(name: str) -> str:
    """The operator and the line of a tensor's name: "encoder.attention:Softmax@7#1" is of the kind "Softmax@7"."""
    return name.rpartition(":")[2].partition("#")[0]


def kinds_of_choice(
    kinds: list[str], sizes: np.ndarray, plain: list[Options], both: list[Options], budget: float
) -> dict[str, tuple[float, float]]:
    """For each kind of which some took another format: (the share of elements that did, variance over plain alone)."""
    choice = allocated(both, sizes, budget).choice
    other = (choice >= len(plain[0].bits)) & (choice < len(both[0].bits))
    found = {}
    for kind in dict.fromkeys(kinds):
        rows = np.flatnonzero(np.array(kinds) == kind)
        if other[rows].any():
            share = float(sizes[rows][other[rows]].sum() / sizes[rows].sum())
            alone = [allocated([options[row] for row in rows], sizes[rows], budget) for options in (both, plain)]
            found[kind] = share, alone[0].interpolated / alone[1].interpolated
    return found


def far_from_zero() -> list[dict]:
    """For each of FAR and FAR_BITS: the variance of normal groups at DISTANCES, to that of the format in use there."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, 128, generator=generator)
    values = (values - values.amin(1, True)) / (values.amax(1, True) - values.amin(1, True))
    weights = torch.ones_like(values)
    in_use = {"scale": formats.SCALE_IN_USE, "offset": formats.OFFSET_IN_USE}
    rows = []
    for name, types in FAR.items():
        for bits in FAR_BITS:
            ratios = []
            for distance in DISTANCES:
                moved, levels = values + distance, formats.same_levels(values, bits)
                found = [formats.grid_variance(moved, weights, levels, **chosen) for chosen in (in_use | types, in_use)]
                ratios.append(found[0] / found[1])
            rows.append({"format": name, "bits": bits, "distances": DISTANCES, "ratio": ratios})
    return rows


def rows_of(model: str, tensors: list[Saved], names: Sequence[str]):
    """One row a format and, where all formats are there, a choice, printed as it is found."""
    sizes = np.array([saved.values.numel() for saved in tensors], dtype=float)
    kinds = [saved.kind for saved in tensors]
    print(f"{model}: {len(tensors)} tensors; variance at {', '.join(map(str, BUDGETS))} bits an element, all counted")
    options = {name: [form(saved) for saved in tensors] for name, form in FORMATS.items() if name in (IN_USE, *names)}
    for choice, others in CHOICES.items() if len(options) == len(FORMATS) else ():
        both = zip(*(options[name] for name in (IN_USE, *others)), strict=True)
        options[f"in use or {choice}"] = [formats.either(found) for found in both]
    first = [allocated(options[IN_USE], sizes, budget).variance for budget in BUDGETS]
    for name, found in options.items():
        variance = [allocated(found, sizes, budget).variance for budget in BUDGETS]
        ratios = [value / reference for value, reference in zip(variance, first, strict=True)]
        row = {"model": model, "format": name, "variance": variance, "ratio": ratios}
        print(f"  {name:62s}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)
        if name not in FORMATS:
            row["kinds"] = {b: kinds_of_choice(kinds, sizes, options[IN_USE], found, b) for b in KIND_BUDGETS}
            for kind, (share, ratio) in row["kinds"][KIND_BUDGETS[0]].items():
                print(f"      {kind:45s} {share:.0%} of the elements, variance {ratio:.2f}")
        yield row


def gains_of_one_step(model: str, tensors: list[Saved]):
    """How many times less variance one step a tensor has at 2, 3 and 4 bits of payload, by how widths are counted."""
    totals = {name: sum(form(saved).variance for saved in tensors)[1:4] for name, form in EQUAL_PAYLOAD.items()}
    first = totals["one step a group"]
    for name, total in totals.items():
        gains = (first / total).tolist()
        print(f"  {name:62s}" + "".join(f"{gain:8.2f}" for gain in gains) + " times less at 2, 3, 4 bits of payload")
        yield {"model": model, "format": name, "gain_at_2_3_4_bits": gains}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=["text", "image", "language", "graph"])
    parser.add_argument("--steps", type=int, default=20, help="untouched training steps before measuring")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, metavar="FORMAT", help="these only")
    options = parser.parse_args()
    rows, gains = [], []
    for model in options.models:
        tensors = saved_tensors(model, options.steps)
        rows += rows_of(model, tensors, options.formats or list(FORMATS))
        gains += [] if options.formats else gains_of_one_step(model, tensors)
    far = far_from_zero()
    for row in far:
        print(f"{row['format']:30s} {row['bits']} bits" + "".join(f"{ratio:10.2f}" for ratio in row["ratio"]))
    times = [] if options.formats else format_times.measured()
    print(f"pack and unpack of float32 {list(format_times.SHAPE)} at {format_times.BITS} bits, one thread")
    for row in times:
        print(f"  {row['kernels']:10s} {row['candidate']:20s} {row['ms']:8.1f} ms {row['to_in_use']:6.2f}")
    if options.json:
        facts = {
            "date": str(datetime.date.today()),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "budgets": BUDGETS,
        }
        found = facts | {"rows": rows, "one_step_at_equal_payload": gains, "far_from_zero": far, "times": times}
        if options.formats:
            found = with_rows(json.loads(options.json.read_text()), rows, far, facts["date"])
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def with_rows(held: dict, rows: list[dict], far: list[dict], date: str) -> dict:
    """What a file holds, with some rows in place of those of the same model and format, but for the format in use."""
    new = {(row["model"], row["format"]): row | {"date": date} for row in rows if row["format"] != IN_USE}
    kept = [row for row in held["rows"] if (row["model"], row["format"]) not in new]
    return held | {"rows": [*kept, *new.values()], "far_from_zero": far}


if __name__ == "__main__":
    main()
