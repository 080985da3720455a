"""Two runs compared: a table for the terminal and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gact_dist.cli.layers import layer_of

MIB = 2**20
LAST_STEPS = 10
TITLE_WIDTH = 38


@dataclass(frozen=True, kw_only=True)
class LayerBits:
    """The saved tensors of one layer: bytes retained for backward, and bits per element."""

    layer: str
    retained_bytes: int
    bits: float
    """Payload bits per element, averaged over the quantised elements of the layer; nan if there are none."""


def bits_per_layer(rows: Sequence[dict[str, Any]]) -> list[LayerBits]:
    """The rows of a report, grouped by layer in the order of the forward pass, without aliases."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["bytes"]:
            layers.setdefault(layer_of(row["name"]), []).append(row)
    return [_layer_bits(layer, entries) for layer, entries in layers.items()]


def _layer_bits(layer: str, rows: Sequence[dict[str, Any]]) -> LayerBits:
    quantised = [(math.prod(row["shape"]), row["bits"]) for row in rows if row["codec"] in ("quantised", "mixed")]
    elements = sum(count for count, _ in quantised)
    return LayerBits(
        layer=layer,
        retained_bytes=sum(row["bytes"] for row in rows),
        bits=sum(count * bits for count, bits in quantised) / elements if elements else math.nan,
    )


def table(untouched: dict[str, Any], compressed: dict[str, Any]) -> str:
    """Memory, time and accuracy of two runs, then the bits of each layer. Takes the contents of two result.json."""
    report = compressed["report"]
    lines = [
        f"config {compressed['config_name']}: {compressed['world_size']} ranks on {compressed['device']}, "
        f"{len(compressed['losses'])} steps, seed {compressed['seed']}",
        f"{'':{TITLE_WIDTH}s} {'untouched':>12s} {compressed['level']:>12s}",
        _line(
            "activations kept for backward (MiB)", report["exact_bytes"] / MIB, report["retained_bytes"] / MIB, ".1f"
        ),
        _line("compression ratio", 1.0, report["ratio"], ".2f"),
        *(_compare(title, key, untouched, compressed, scale, form) for title, key, scale, form in _MEASURES),
        _line(f"training loss, mean of last {LAST_STEPS} steps", last_loss(untouched), last_loss(compressed), ".4f"),
        "",
        f"{'layer':{TITLE_WIDTH}s} {'kept (MiB)':>12s} {'bits/element':>12s}",
        *(_layer_line(entry) for entry in bits_per_layer(report["rows"])),
    ]
    return "\n".join(lines)


_MEASURES = (
    ("peak memory, median step (MiB)", "step_peak_median_bytes", MIB, ".1f"),
    ("peak memory, worst step (MiB)", "peak_bytes", MIB, ".1f"),
    ("step time, median (s)", "step_time_median_s", 1, ".3f"),
    ("step time, mean with adaptations (s)", "step_time_mean_s", 1, ".3f"),
    ("test accuracy (%)", "accuracy", 0.01, ".2f"),
    ("test loss", "test_loss", 1, ".4f"),
)


def last_loss(result: dict[str, Any]) -> float:
    """The mean training loss over the last steps."""
    losses = result["losses"][-LAST_STEPS:]
    return sum(losses) / len(losses)


def _compare(
    title: str, key: str, untouched: dict[str, Any], compressed: dict[str, Any], scale: float, form: str
) -> str:
    return _line(title, untouched[key] / scale, compressed[key] / scale, form)


def _line(title: str, first: float, second: float, form: str) -> str:
    return f"{title:{TITLE_WIDTH}s} {first:12{form}} {second:12{form}}"


def _layer_line(entry: LayerBits) -> str:
    bits = "-" if math.isnan(entry.bits) else f"{entry.bits:.2f}"
    return f"{entry.layer:{TITLE_WIDTH}s} {entry.retained_bytes / MIB:12.2f} {bits:>12s}"


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The moving average: for each value the mean of the last `window` values up to it."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]


def plot(untouched: dict[str, Any], compressed: dict[str, Any], path: Path) -> None:
    """Draw both loss curves in one diagram and the bits of each layer in another, and write them as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = [entry for entry in bits_per_layer(compressed["report"]["rows"]) if not math.isnan(entry.bits)]
    figure = Figure(figsize=(12, max(4.2, 0.34 * len(layers) + 1.6)), layout="constrained")
    FigureCanvasAgg(figure)
    losses, bits = figure.subplots(1, 2, width_ratios=(1.35, 1))
    _plot_losses(losses, untouched, compressed)
    _plot_bits(bits, layers, compressed)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_losses(axes: Any, untouched: dict[str, Any], compressed: dict[str, Any]) -> None:
    window = max(1, len(compressed["losses"]) // 15)
    runs = ((untouched, "untouched", "#1f4e79", "-"), (compressed, f"gact_dist {compressed['level']}", "#d1495b", "--"))
    for result, title, colour, style in runs:
        steps = range(1, len(result["losses"]) + 1)
        axes.plot(steps, result["losses"], color=colour, alpha=0.22, linewidth=0.8)
        label = f"{title}: test accuracy {result['accuracy'] * 100:.1f} %"
        axes.plot(steps, smooth(result["losses"], window), style, color=colour, linewidth=1.8, label=label)
    axes.set(xlabel="step", ylabel=f"training loss (bold: mean over {window} steps)")
    axes.set_title(f"{compressed['config_name']}, {compressed['world_size']} ranks: two runs with the same seed")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _plot_bits(axes: Any, layers: Sequence[LayerBits], compressed: dict[str, Any]) -> None:
    report = compressed["report"]
    bars = axes.barh([entry.layer for entry in layers], [entry.bits for entry in layers], color="#3a7d44", height=0.7)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 9)
    axes.set_xlabel("bits per element, mean over the layer's quantised tensors")
    axes.set_title(
        f"activations {report['exact_bytes'] / MIB:.0f} -> {report['retained_bytes'] / MIB:.0f} MiB "
        f"({report['ratio']:.1f} times smaller)"
    )
    axes.spines[["top", "right"]].set_visible(False)
