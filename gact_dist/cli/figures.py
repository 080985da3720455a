"""The figures of a report, as plain values that plotly draws: in the page and, with kaleido, as PNG.

Colours of text and lines come from the page, which is light or dark; those of data show on both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import LEVELS
from ..profile import KINDS, UNTOUCHED
from .layers import layer_of, layers_of
from .output import shown_bytes
from .run_files import Run

PALETTE = ("#94a3b8", "#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6")
"""of runs: the untouched one first"""
BLUE, AMBER, SLATE, RED = "#3b82f6", "#f59e0b", "#94a3b8", "#ef4444"
_LAYERS = ("#1d4ed8", "#0ea5e9", "#14b8a6", "#84cc16", "#f59e0b", "#ef4444")
_BITS = [[0.0, "#fef3c7"], [0.3, "#fbbf24"], [0.55, "#f97316"], [0.8, "#be185d"], [1.0, "#4c1d95"]]
_POINTS = 240  # of a line or of bars; more cannot be seen
_LABEL, _MOST_LABELS = 26, 24
_CELLS_WITH_TEXT = 16
_ROW_PIXELS = 34
_BESIDE_BARS = 1.25  # for the number of a bar that is too short for it


@dataclass(frozen=True)
class Figure:
    """One figure of the page."""

    key: str
    """of its PNG"""
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 320
    is_wide: bool = False
    """whether it takes both columns"""


def figures_of(runs: Sequence[Run], profile: Mapping[str, Any] | None = None) -> list[Figure]:
    """All that the runs have something for. The last run is the one that is looked at in depth.

    profile: of the same job, as `gact-dist profile --json` gives it.
    """
    run = runs[-1]
    level = None if profile is None else level_of(run, profile)
    made = [
        _losses(runs),
        _bytes(run),
        _peaks(runs),
        _over_a_step(run),
        _by_layer(run),
        None if level is None or profile is None else _memory(level, profile),
        None if level is None or profile is None else _peak_by_layer(level, profile),
        _bits(run),
        _sensitivities(run),
        _gradient_error(run),
        _time(run),
    ]
    return _without_gaps([figure for figure in made if figure is not None])


def _without_gaps(figures: Sequence[Figure]) -> list[Figure]:
    """The figures, those in both columns that would have no neighbour in theirs."""
    placed: list[Figure] = []
    is_alone = False
    for number, figure in enumerate(figures):
        following = figures[number + 1] if number + 1 < len(figures) else None
        is_alone = not figure.is_wide and not is_alone
        if is_alone and (following is None or following.is_wide):
            figure, is_alone = replace(figure, is_wide=True), False
        placed.append(figure)
    return placed


# -- one figure each -------------------------------------------------------------------------------------------------


def _losses(runs: Sequence[Run]) -> Figure | None:
    data = []
    for run, colour in zip(runs, _colours(runs), strict=True):
        steps, losses = run.losses
        if not steps:
            continue
        window = max(1, len(steps) // 20)
        if window > 1:
            data.append(_line(steps, losses, run.name, colour, opacity=0.25, width=1, showlegend=False))
        width = 2.5 if run.compresses else 5.0  # to be seen below the others
        data.append(_line(steps, _smooth(losses, window), run.name, colour, width=width))
    if not data:
        return None
    caption = "Training loss of each run; the thick line is a moving average." if len(data) > len(runs) else ""
    return Figure("losses", "Loss", caption or "Training loss of each run.", data, _axes("step", "loss"), is_wide=True)


def _bytes(run: Run) -> Figure | None:
    lines = [line for line in run.steps if "retained_bytes" in line]
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    unit, name = _unit(max(line["exact_bytes"] for line in lines))
    data = [
        _line(steps, [line["exact_bytes"] / unit for line in lines], "untouched", SLATE, dash="dot"),
        _line(steps, [line["retained_bytes"] / unit for line in lines], "retained", BLUE, fill="tozeroy"),
    ]
    caption = f"What {run.name} kept from forward to backward, and what it would have kept without compression."
    return Figure("activations", "Activations in each step", caption, data, _axes("step", name, from_zero=True))


def _peaks(runs: Sequence[Run]) -> Figure | None:
    known = [(run, colour) for run, colour in zip(runs, _colours(runs), strict=True) if run.peaks_bytes]
    if not known:
        return None
    of_training = known[-1][0].knows_training_alone
    found = [(run, colour) for run, colour in known if run.knows_training_alone == of_training]
    unit, name = _unit(max(max(run.peaks_bytes) for run, _ in found))
    data = [
        _line(range(1, len(run.peaks_bytes) + 1), [peak / unit for peak in run.peaks_bytes], run.name, colour)
        for run, colour in found
    ]
    caption = (
        "The most memory within each of the first steps, above what the process had before training."
        if of_training
        else "The most memory until then: of the GPU's allocator, or of the process on a CPU, libraries included."
    )
    if len(found) < len(known):
        others = ", ".join(run.name for run, _ in known if run.knows_training_alone != of_training)
        caption += f" What is known of {others} is of another kind, as a run that did not end has it."
    return Figure("peak", "Peak memory", caption, data, _axes("step", name, from_zero=True))


def _over_a_step(run: Run) -> Figure | None:
    rows = run.rows
    if not rows:
        return None
    layers = list(dict.fromkeys(layer_of(row["name"]) for row in rows))
    at = sorted({round(i * len(rows) / _POINTS) for i in range(_POINTS + 1)}) if len(rows) > _POINTS else None
    points = at if at is not None else list(range(len(rows) + 1))
    there_and_back = [*points, *(2 * len(rows) - point for point in reversed(points[:-1]))]
    exact = _cumulated([row["exact_bytes"] for row in rows], points)
    unit, name = _unit(max(exact))
    data = []
    for layer, colour in zip(layers, _shades(len(layers)), strict=True):
        own = _cumulated([row["bytes"] if layer_of(row["name"]) == layer else 0 for row in rows], points)
        heights = [size / unit for size in (*own, *reversed(own[:-1]))]
        area = {"stackgroup": "kept", "fillcolor": colour, "hoverinfo": "name+y", "showlegend": len(layers) <= 10}
        data.append({**_line(there_and_back, heights, _short(layer), colour, width=0.3), **area})
    whole = [size / unit for size in (*exact, *reversed(exact[:-1]))]
    data.append(_line(there_and_back, whole, "untouched, all layers", SLATE, dash="dot"))
    layout = _axes("", name, from_zero=True)
    layout["xaxis"] |= {
        "tickvals": [0, len(rows), 2 * len(rows)],
        "ticktext": ["forward begins", "loss", "backward ends"],
    }
    layout["hovermode"] = "closest"
    layout["margin"] |= {"l": 40, "r": 50}
    caption = "What each layer keeps as the forward saves its tensors and the backward frees them, added up."
    return Figure("step", "Activations over one step, by layer", caption, data, layout, 380, is_wide=True)


def _by_layer(run: Run) -> Figure | None:
    layers = [layer for layer in layers_of(run.rows) if layer.exact_bytes]
    if not layers:
        return None
    unit, name = _unit(max(layer.exact_bytes for layer in layers))
    names = [_short(layer.name) for layer in layers]
    data = [
        _bars([layer.exact_bytes / unit for layer in layers], names, "untouched", SLATE),
        _bars([layer.retained_bytes / unit for layer in layers], names, "retained", BLUE),
    ]
    layout = _axes(name, "")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "tickmode": "linear", "dtick": 1}
    layout |= {"barmode": "group", "bargap": 0.25, "hovermode": "y unified"}
    caption = "Memory that tensors share is counted where it is saved first."
    return Figure("layers", "Activations by layer", caption, data, layout, _height(len(layers), _ROW_PIXELS))


def _bits(run: Run) -> Figure | None:
    plans = [line for line in run.adaptations if line.get("tensors")]
    if not plans:
        return None
    sizes = {row["name"]: float(math.prod(row["shape"])) for saved in run.saved for row in saved["rows"]}
    sizes |= {row["name"]: float(math.prod(row["shape"])) for row in run.rows}
    layers = list(dict.fromkeys(layer_of(name) for line in plans for name in line["tensors"]))
    plans = plans[:: -(-len(plans) // _POINTS)]
    values = [[_layer_bits(layer, line["tensors"], sizes) for line in plans] for layer in layers]
    shows_text = len(plans) <= _CELLS_WITH_TEXT
    cells = {
        "type": "heatmap", "z": values, "x": [f"step {line['step']}" for line in plans],
        "y": [_short(layer) for layer in layers], "zmin": 1, "zmax": 8, "colorscale": _BITS,
        "xgap": 2 if shows_text else 0, "ygap": 2,
        "colorbar": {"title": {"text": "bits", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        "hovertemplate": "%{y}<br>%{x}: %{z:.2f} bits<extra></extra>",
    }  # fmt: skip
    if shows_text:
        cells["texttemplate"] = "%{z:.1f}"
    layout = _axes("", "")
    layout["yaxis"] |= {
        "autorange": "reversed",
        "type": "category",
        "tickmode": "linear",
        "dtick": 1,
        "showgrid": False,
    }
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["hovermode"] = "closest"
    caption = "Average bits of an element of each layer, as each adaptation chose them. Empty: all stored exactly."
    return Figure("bits", "Bits by layer and adaptation", caption, [cells], layout, _height(len(layers), _ROW_PIXELS))


def _sensitivities(run: Run) -> Figure | None:
    plans = [line for line in run.adaptations if any(t.get("sensitivity") for t in line.get("tensors", {}).values())]
    if not plans:
        return None
    tensors = [
        (name, entry["sensitivity"], _one_width(entry["bits"]))
        for name, entry in plans[-1]["tensors"].items()
        if entry.get("sensitivity")
    ]
    places = _middles([layer_of(name) for name, *_ in tensors])
    dots = {
        "type": "scatter", "mode": "markers", "x": list(range(len(tensors))), "y": [entry[1] for entry in tensors],
        "text": [f"{name}<br>{'exact' if bits is None else f'{bits:g} bits'}" for name, _, bits in tensors],
        "marker": {
            "size": 9, "color": [8 if bits is None else bits for *_, bits in tensors], "cmin": 1, "cmax": 8,
            "colorscale": _BITS, "line": {"width": 0.6, "color": SLATE},
            "colorbar": {"title": {"text": "bits", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        },
        "hovertemplate": "%{text}<br>sensitivity %{y:.3g}<extra></extra>", "showlegend": False,
    }  # fmt: skip
    layout = _axes("", "sensitivity")
    layout["xaxis"] |= {
        "tickvals": list(places.values()),
        "ticktext": [_short(layer, 16) for layer in places],
        "tickangle": -40,
    }
    layout["yaxis"] |= _logarithmic([value for _, value, _ in tensors])
    layout["hovermode"] = "closest"
    caption = f"How much each tensor moves the gradient, as measured at step {plans[-1]['step']}, and the bits it got."
    return Figure("sensitivities", "Sensitivity of each tensor", caption, [dots], layout, 380)


def _gradient_error(run: Run) -> Figure | None:
    found = [line for line in run.comparisons if line.get("squared_gradient")]
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for name in ("predicted", "measured"):
        known = [line for line in found if line.get(name)]
        lines[name] = [line["step"] for line in known], [line[name] / line["squared_gradient"] for line in known]
    bounded = [line for line in run.adaptations if line.get("gradient_error")]
    if bounded:  # relative to the second moment already
        for name in ("predicted", "measured", "tolerated"):
            lines[name] = [line["step"] for line in bounded], [line["gradient_error"][name] for line in bounded]
    colours = {"predicted": SLATE, "measured": BLUE, "tolerated": RED}
    dashes = {"predicted": "dot", "measured": "solid", "tolerated": "dash"}
    data = [
        {**_line(steps, values, name, colours[name], dash=dashes[name]), "mode": "lines+markers"}
        for name, (steps, values) in lines.items()
        if steps
    ]
    if not data:
        return None
    layout = _axes("step", "squared error / squared gradient")
    values = [value for line in data for value in line["y"]]
    if max(values) > 10 * min(values):
        layout["yaxis"] |= _logarithmic(values)
    else:
        layout["yaxis"] |= {"rangemode": "tozero", "exponentformat": "power"}
    caption = "The gradient under the plan beside the exact one, and what the sensitivities had predicted."
    return Figure("gradient", "Error of the gradient", caption, data, layout)


def _time(run: Run) -> Figure | None:
    lines = [line for line in run.steps if "time_s" in line]
    if not lines:
        return None
    share = -(-len(lines) // _POINTS)
    parts = [lines[i : i + share] for i in range(0, len(lines), share)]
    steps = [part[0]["step"] for part in parts]
    scale, name = (1000.0, "ms") if statistics.median(line["time_s"] for line in lines) < 1 else (1.0, "s")
    packing = [scale * statistics.fmean(line["compressing_s"] for line in part) for part in parts]
    measuring = [scale * statistics.fmean(line["measuring_s"] for line in part) for part in parts]
    whole = [scale * statistics.fmean(line["time_s"] for line in part) for part in parts]
    rest = [max(0.0, all_of_it - a - b) for all_of_it, a, b in zip(whole, packing, measuring, strict=True)]
    series = (
        ("the job", rest, SLATE),
        ("compression", packing, BLUE),
        ("adaptations and comparisons", measuring, AMBER),
    )
    data = [
        {"type": "bar", "x": steps, "y": values, "name": title, "marker": {"color": colour, "line": {"width": 0}}}
        for title, values, colour in series
    ]
    layout = _axes("step", name, from_zero=True) | {"barmode": "stack", "bargap": 0.05}
    caption = "Where the time of each step went, as the host sees it: on a GPU compression is the time of its launches."
    return Figure("time", "Time of a step", caption, data, layout, is_wide=True)


def level_of(run: Run, profile: Mapping[str, Any]) -> Mapping[str, Any]:
    """The level of a profile that a run had; the last one where it had none of them."""
    config = run.about.get("config", {})
    found, most = profile["levels"][-1], 0
    for level in profile["levels"]:
        name, *behind = level["level"].split("+")
        settings = LEVELS.get(name, {"policy": "off"}) | dict.fromkeys(behind, True)
        if settings.items() <= config.items() and len(settings) > most:
            found, most = level, len(settings)
    return found


def _untouched(profile: Mapping[str, Any], beside: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a level is compared with: the untouched job, if it was profiled and is another."""
    return [level for level in profile["levels"] if level["level"] == UNTOUCHED and level is not beside]


def _memory(level: Mapping[str, Any], profile: Mapping[str, Any]) -> Figure:
    """Live memory by kind, as the phases of the step go on; they take the same room under every level."""
    untouched = _untouched(profile, level)
    unit, name = _unit(max(each["peak_bytes"] for each in (level, *untouched)))
    times, phases = _times(level["timeline"])
    kinds = [kind for kind in KINDS if any(moment["nbytes"].get(kind) for moment in level["timeline"])]
    data = []
    for kind, colour in zip(kinds, _shades(len(kinds)), strict=True):
        heights = [moment["nbytes"].get(kind, 0) / unit for moment in level["timeline"]]
        area = {"stackgroup": "live", "fillcolor": colour, "hoverinfo": "name+y"}
        data.append({**_line(times, heights, kind, colour, width=0.3), **area})
    for other in untouched:
        whole = [sum(moment["nbytes"].values()) / unit for moment in other["timeline"]]
        data.append(_line(_times(other["timeline"])[0], whole, "untouched, all of it", SLATE, dash="dot"))
    layout = _axes("", name, from_zero=True)
    layout["xaxis"] |= {
        "tickvals": [*range(len(phases)), len(phases)],
        "ticktext": [*(f"{phase} begins" for phase in phases), "end"],
    }
    layout["hovermode"] = "closest"
    layout["margin"] |= {"l": 40, "r": 50}
    caption = f"Live memory within a step after the first, of rank 0, as a profile of level {level['level']} found it."
    return Figure("memory", "Memory over one step, by what it is for", caption, data, layout, 400, is_wide=True)


def _times(timeline: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[str]]:
    """(for each moment the number of its phase, and how far it is in it; the phases)"""
    phases = list(dict.fromkeys(moment["phase"] for moment in timeline))
    times: list[float] = []
    for number, phase in enumerate(phases):
        own = [moment["operators"] for moment in timeline if moment["phase"] == phase]
        length = max(1, own[-1] - own[0])
        times += [number + (operators - own[0]) / (length + 1) for operators in own]
    return times, phases


def _peak_by_layer(level: Mapping[str, Any], profile: Mapping[str, Any]) -> Figure | None:
    """Whose memory is alive at the peak of the step."""
    looked_at = [*_untouched(profile, level), level]
    sizes = [_at_peak(each) for each in looked_at]
    layers = list(dict.fromkeys(layer for found in sizes for layer in found))
    if not layers:
        return None
    unit, name = _unit(max(max(found.values()) for found in sizes))
    data = [
        _bars([found.get(layer, 0) / unit for layer in layers], [*map(_short, layers)], each["level"], colour)
        for found, each, colour in zip(sizes, looked_at, (SLATE, BLUE)[-len(looked_at) :], strict=True)
    ]
    layout = _axes(name, "")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "tickmode": "linear", "dtick": 1}
    layout |= {"barmode": "group", "bargap": 0.25, "hovermode": "y unified"}
    peaks = " and ".join(
        f"{shown_bytes(each['peak_bytes'])} {each['level']} (in the {each['peak_phase']})" for each in looked_at
    )
    caption = f"What is alive of each layer at the peak, parameters and their state included: {peaks}."
    height = _height(len(layers), _ROW_PIXELS)
    return Figure("peak_layers", "Peak of a step, by layer", caption, data, layout, height, is_wide=True)


def _at_peak(level: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by layer, in the order of the layers' names."""
    found: dict[str, int] = {}
    for share in sorted(level["modules"], key=lambda share: _numbered(share["name"])):
        nbytes = sum(share["peak"].values())
        if nbytes:
            layer = layer_of(share["name"] + ":")
            found[layer] = found.get(layer, 0) + nbytes
    return found


def _numbered(name: str) -> list[tuple[bool, int, str]]:
    """By which layer 2 is before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


SPEEDS = {"batch": ("samples_per_s", "samples/s"), "sequence": ("tokens_per_s", "tokens/s")}
"""what compares the speed of steps whose size is looked for: its key and its unit; samples differ with the sequence"""


def max_batch_figures(values: dict[str, Any]) -> list[Figure]:
    """The figure of `gact-dist max-batch`: sizes that fit, and their speeds, in two panels."""
    rows = values["methods"]
    names = [row["method"] for row in rows]
    sizes = _bars([row[values["of"]] for row in rows], names, f"largest {values['of']}", BLUE)
    key, unit = SPEEDS[values["of"]]
    speeds = _bars([row[key] or 0.0 for row in rows], names, unit, AMBER)
    sizes |= {"texttemplate": "%{x:,}", "textposition": "auto"}
    speeds |= {"texttemplate": "%{x:,.3r}", "textposition": "auto", "xaxis": "x2"}
    layout = _axes(f"largest {values['of']}", "", from_zero=True)
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "tickmode": "linear", "dtick": 1}
    ranges = [[0, _BESIDE_BARS * max([1e-9, *bars["x"]])] for bars in (sizes, speeds)]
    layout["xaxis"] |= {"domain": [0, 0.48], "range": ranges[0]}
    second = {"domain": [0.52, 1], "range": ranges[1], "title": {"text": unit, "standoff": 10}}
    layout["xaxis2"] = {**layout["xaxis"], **second}
    layout |= {"showlegend": False, "hovermode": "closest", "bargap": 0.3}
    caption = "At equal memory: what fits, and how fast the steps of the largest are."
    title = f"Largest {values['of']}"
    return [Figure("max_batch", title, caption, [sizes, speeds], layout, _height(len(rows), 40), is_wide=True)]


# -- parts of figures ------------------------------------------------------------------------------------------------


def _axes(x: str, y: str, from_zero: bool = False) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False, "ticks": "", "title": {"text": "", "standoff": 10}}
    layout: dict[str, Any] = {
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "xaxis": {**axis, "title": {"text": x, "standoff": 10}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 10}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
    }
    if from_zero:
        layout["yaxis"]["rangemode"] = "tozero"
    return layout


def _logarithmic(values: Sequence[float]) -> dict[str, Any]:
    """What makes an axis logarithmic: labelled at each power of ten, and where these are few at 2 and 5 times too."""
    return {"type": "log", "dtick": 1 if max(values) > 1000 * min(values) else "D2", "exponentformat": "power"}


def _line(
    x: Iterable[float], y: Sequence[float], name: str, colour: str, *, width: float = 2, dash: str = "solid",
    opacity: float = 1.0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    values = [round(value, 6) if abs(value) > 1e-3 else value for value in y]
    return {
        "type": "scatter", "mode": "lines", "x": list(x), "y": values, "name": name, "opacity": opacity,
        "line": {"color": colour, "width": width, "dash": dash}, **more,
    }  # fmt: skip


def _bars(values: list[float], names: list[str], title: str, colour: str) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "x": values, "y": names, "name": title, "marker": {"color": colour},
        "hovertemplate": "%{x:.4g}<extra>" + title + "</extra>",
    }  # fmt: skip


def _colours(runs: Sequence[Run]) -> list[str]:
    """Grey for an untouched run, which comes first; colours for the others."""
    start = 0 if len(runs) > 1 or not runs[0].compresses else 1
    return [PALETTE[(start + number) % len(PALETTE)] for number in range(len(runs))]


def _shades(count: int) -> list[str]:
    """Colours of layers from the first to the last."""
    anchors = [tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) for colour in _LAYERS]
    shades = []
    for number in range(count):
        place = number * (len(anchors) - 1) / max(1, count - 1)
        low = min(int(place), len(anchors) - 2)
        mixed = (a + (b - a) * (place - low) for a, b in zip(anchors[low], anchors[low + 1], strict=True))
        shades.append("#" + "".join(f"{round(part):02x}" for part in mixed))
    return shades


def _unit(largest: float) -> tuple[float, str]:
    for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if largest >= size:
            return float(size), name
    return 1.0, "bytes"


def _cumulated(sizes: Sequence[float], points: Sequence[int]) -> list[float]:
    """The sum of the first sizes, at some numbers of them."""
    sums = [0.0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return [sums[point] for point in points]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _middles(layers: Sequence[str]) -> dict[str, float]:
    """Where the tensors of each layer are, without those whose labels would cover another's. layers: of each tensor."""
    found: dict[str, float] = {}
    for layer in dict.fromkeys(layers):
        own = [position for position, name in enumerate(layers) if name == layer]
        middle = statistics.fmean(own)
        if not found or middle - max(found.values()) >= len(layers) / _MOST_LABELS:
            found[layer] = middle
    return found


def _short(name: str, longest: int = _LABEL) -> str:
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _height(rows: int, pixels: int) -> int:
    return max(320, 110 + rows * pixels)


def _one_width(bits: Any) -> float | None:
    return statistics.fmean(bits) if isinstance(bits, list) else bits


def _layer_bits(layer: str, tensors: dict[str, Any], sizes: dict[str, float]) -> float | None:
    """The average over the tensors of a layer that are rounded, by their sizes where these are known."""
    own = [
        (sizes.get(name, 1.0), _one_width(entry["bits"])) for name, entry in tensors.items() if layer_of(name) == layer
    ]
    rounded = [(size, bits) for size, bits in own if bits is not None]
    elements = sum(size for size, _ in rounded)
    return round(sum(size * bits for size, bits in rounded) / elements, 3) if elements else None
