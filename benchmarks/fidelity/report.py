"""Tables and pictures of what benchmarks/fidelity/run.py measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

UNTOUCHED = "untouched"
STORED = "stored 2"  # policy gact with what backward can make again stored as well
IN_BYTES_OF_STORED = f"gact in the bytes of {STORED}"
LESS_BYTES = 0.75  # of those of a plan that derives nothing
COLOURS = {"uniform": "#7f7f7f", "gact": "#1f4e79", "acgc": "#d1495b", "actnn": "#3a7d44", "stored": "#e08e1b"}
MARKS = {"uniform": "o", "gact": "s", "acgc": "*", "actnn": "^", "stored": "d"}
LABELS = {"uniform": (6, -10), "gact": (6, 4), "acgc": (6, 4), "actnn": (-11, 4), "stored": (6, -10)}  # in points
Rows = list[dict[str, Any]]


def tables(held: dict[str, Any]) -> str:
    """Markdown: every model with its settings, then adaptive against uniform widths, then the error bound of acgc."""
    parts = [model_table(model, held["runs"]) for model in model_names(held["runs"])]
    compared = [table(held["comparisons"]) for table in (same_bytes_table, fewer_bytes_table)]
    return "\n\n".join([*parts, *compared, error_bound_table(held)])


def model_names(runs: Rows) -> list[str]:
    """In the order of their first run."""
    return list(dict.fromkeys(row["model"] for row in runs))


def untouched_by_seed(runs: Rows) -> dict[int, dict[str, Any]]:
    """The untouched run of each seed, of one model's runs."""
    return {row["seed"]: row for row in runs if row["setting"] == UNTOUCHED}


def model_table(model: str, runs: Rows) -> str:
    """One row for each setting of a model: means over the seeds, differences seed by seed to the untouched run."""
    chosen = [row for row in runs if row["model"] == model]
    untouched = untouched_by_seed(chosen)
    lines = [
        f"**{model}**, untouched: {_spread(100 * row['accuracy'] for row in untouched.values())} % accuracy, "
        f"{_spread(row['test_loss'] for row in untouched.values())} test loss, seeds {len(untouched)}",
        "",
        "| setting | accuracy against untouched | test loss against untouched | bits | retained MB | ratio | "
        "variance predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for setting in dict.fromkeys(row["setting"] for row in chosen if row["setting"] != UNTOUCHED):
        paired = [row for row in chosen if row["setting"] == setting and row["seed"] in untouched]
        if paired:
            lines.append(_setting_line(setting, paired, untouched))
    return "\n".join([*lines, *_dates(chosen)])


def _dates(rows: Rows) -> list[str]:
    """A line that says which settings were measured when, if not all were on one day."""
    dates: dict[str, str] = {}
    for row in rows:
        dates[row["setting"]] = max(row.get("date", ""), dates.get(row["setting"], ""))
    days = sorted(set(dates.values()))
    settings = {day: ", ".join(name for name, other in dates.items() if other == day) for day in days}
    return ["", "; ".join(f"{day}: {settings[day]}" for day in days) + "."] if len(days) > 1 else []


def _setting_line(setting: str, paired: Rows, untouched: dict[int, dict[str, Any]]) -> str:
    points = differences(paired, untouched, "accuracy", scale=100)
    losses = differences(paired, untouched, "test_loss")
    moments = [moment for row in paired for moment in row["moments"]]
    bits = statistics.mean(row["average_bits"] for row in paired)
    megabytes = statistics.mean(row["retained_bytes"] for row in paired) / 1e6
    ratio = statistics.mean(row["exact_bytes"] / row["retained_bytes"] for row in paired)
    variances = [f"{_geometric_mean(moment[key] for moment in moments):.2g}" for key in ("predicted", "measured")]
    spreads = [100 * row["accuracy"] for row in untouched.values()], [row["test_loss"] for row in untouched.values()]
    mean_points, mean_losses = statistics.mean(points), statistics.mean(losses)
    first = f"{mean_points:+.2f}{_star(-mean_points, spreads[0])}"
    second = f"{mean_losses:+.4f}{_star(mean_losses, spreads[1])}"
    sizes = f"{bits:.2f} | {megabytes:.3g} | {ratio:.1f}"
    return f"| {setting} | {first} | {second} | {sizes} | {' | '.join(variances)} |"


def differences(paired: Rows, untouched: dict[int, dict[str, Any]], key: str, scale: float = 1.0) -> list[float]:
    """Of each run to the untouched run of its seed."""
    return [scale * (row[key] - untouched[row["seed"]][key]) for row in paired]


def same_bytes_table(comparisons: Rows) -> str:
    """Measured variance of a uniform width, divided by that of adaptive ones in no more bytes, at the same weights."""
    lines = ["| model | " + " | ".join(f"bytes of uniform {bits}" for bits in _compared_bits(comparisons)) + " |"]
    lines.append("|---" * len(lines[0].split("|")[1:-1]) + "|")
    for model in dict.fromkeys(row["model"] for row in comparisons):
        cells = []
        for bits in _compared_bits(comparisons):
            gains = [gain for name, gain in gains_in_same_bytes(comparisons, bits) if name == model]
            cells.append(_range(gains, ".3g"))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compared_bits(comparisons: Rows) -> list[int]:
    words = [row["setting"].split() for row in comparisons if row["setting"].startswith("gact in the bytes")]
    return sorted({int(parts[-1]) for parts in words})


def gains_in_same_bytes(comparisons: Rows, bits: int) -> list[tuple[str, float]]:
    """(model, how many times less variance adaptive widths have) of each seed and moment."""
    found = []
    adaptive = _by_point(comparisons, f"gact in the bytes of uniform {bits}")
    for point, uniform in _by_point(comparisons, f"uniform {bits}").items():
        if point in adaptive:
            found.append((point[0], uniform["measured"] / adaptive[point]["measured"]))
    return found


def _by_point(comparisons: Rows, setting: str) -> dict[tuple, dict[str, Any]]:
    return {(row["model"], row["seed"], row["step"]): row for row in comparisons if row["setting"] == setting}


def fewer_bytes_table(comparisons: Rows) -> str:
    """Measured variance of plans that derive, in fewer bytes, divided by that of plans that store."""
    widths = sorted({int(row["setting"].split()[1]) for row in comparisons if row["setting"].startswith("stored ")})
    titles = " | ".join(f"variance in {LESS_BYTES:g} of the bytes of stored {bits}, over its" for bits in widths)
    lines = [f"| model | {titles} |", "|---" * (len(widths) + 1) + "|"]
    for model in dict.fromkeys(row["model"] for row in comparisons):
        rows = [row for row in comparisons if row["model"] == model]
        cells = [_range(variance_in_fewer_bytes(rows, bits), ".3g") for bits in widths]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def variance_in_fewer_bytes(comparisons: Rows, bits: int) -> list[float]:
    """Of each point: measured variance of a plan that derives, in fewer bytes, over that of one that stores."""
    stored = _by_point(comparisons, f"stored {bits}")
    derived = _by_point(comparisons, f"derived in fewer bytes than stored {bits}")
    return [derived[point]["measured"] / row["measured"] for point, row in stored.items() if point in derived]


def error_bound_table(held: dict[str, Any]) -> str:
    """Policy acgc: the increase of the gradient's second moment in its runs, and its bytes against uniform widths."""
    lines = [
        "| model | e^2 | increase in the runs, mean (worst) | moments within | bits, mean of the runs | "
        "at the untouched weights: within | bytes, over those of the narrowest uniform width within | its bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, setting in dict.fromkeys((row["model"], row["setting"]) for row in held["runs"]):
        if not setting.startswith("acgc"):
            continue
        chosen = [row for row in held["runs"] if (row["model"], row["setting"]) == (model, setting)]
        error = float(setting.split()[1])
        increases = [moment["measured"] for row in chosen for moment in row["moments"]]
        within = sum(increase <= error for increase in increases)
        bits = statistics.mean(row["average_bits"] for row in chosen)
        comparisons = [row for row in held["comparisons"] if row["model"] == model]
        lines.append(
            f"| {model} | {setting.removeprefix('acgc ')} | {statistics.mean(increases):.3g} ({max(increases):.3g}) | "
            f"{within} of {len(increases)} | {bits:.2f} | {_against_uniform(comparisons, setting, error)} |"
        )
    return "\n".join(lines)


def _against_uniform(comparisons: Rows, setting: str, error: float) -> str:
    """Three cells: how often it kept to the error, its bytes over the uniform width's where one does, and the width."""
    within = [row["measured"] <= error for row in comparisons if row["setting"] == setting]
    widths = {int(uniform["setting"].split()[1]) for _, uniform in beside_uniform(comparisons, setting, error)}
    ratios = bytes_over_uniform(comparisons, setting, error)
    return f"{sum(within)} of {len(within)} | {_range(ratios, '.2f')} | {', '.join(map(str, sorted(widths)))}"


def bytes_over_uniform(comparisons: Rows, setting: str, error: float) -> list[float]:
    """Of each point where a uniform width keeps to the error: the setting's bytes over those of the narrowest."""
    pairs = beside_uniform(comparisons, setting, error)
    return [found["retained_bytes"] / uniform["retained_bytes"] for found, uniform in pairs]


def beside_uniform(comparisons: Rows, setting: str, error: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(the setting's row, that of the narrowest uniform width that keeps to the error) of each point with one."""
    pairs = []
    for point, found in _by_point(comparisons, setting).items():
        beside = [row for row in comparisons if (row["model"], row["seed"], row["step"]) == point]
        uniform = narrowest_uniform(beside, error)
        if uniform is not None:
            pairs.append((found, uniform))
    return pairs


def narrowest_uniform(rows: Rows, error: float) -> dict[str, Any] | None:
    """The row of the fewest uniform bits whose measured increase is within the error."""
    kept = [row for row in rows if row["setting"].startswith("uniform") and row["measured"] <= error]
    return min(kept, key=lambda row: row["retained_bytes"], default=None)


def _geometric_mean(values: Iterable[float]) -> float:
    found = list(values)
    usable = all(value > 0 for value in found)  # and no NaN
    return math.exp(statistics.mean(math.log(value) for value in found)) if usable else math.nan


def _range(values: Sequence[float], form: str) -> str:
    """The geometric mean, and the smallest and largest value."""
    return f"{_geometric_mean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else ""


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.mean(found):.4g} (deviation {deviation(found):.2g})" if found else "not run"


def _star(loss: float, untouched: Sequence[float]) -> str:
    """A mark where the mean is worse by more than the untouched job's own standard deviation over its seeds."""
    return " *" if loss > deviation(untouched) else ""


def plot(held: dict[str, Any], path: Path) -> list[Path]:
    """Three pictures beside the file; returns their paths."""
    pictures = {"accuracy": _plot_accuracy, "variance": _plot_variance, "error_bound": _plot_error_bound}
    paths = []
    for name, draw in pictures.items():
        paths.append(path.with_name(f"{path.stem}_{name}.png"))
        _figure(held, draw, paths[-1])
    return paths


def _figure(held: dict[str, Any], draw: Any, path: Path) -> None:
    """One panel for each model, and one legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = model_names(held["runs"])
    rows, columns = math.ceil(len(models) / 3), min(3, len(models))
    figure = Figure(figsize=(4.4 * columns, 3.8 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, model in zip(panels, models, strict=False):
        axes.set_title(model)
        axes.grid(alpha=0.25)
        draw(axes, *([row for row in held[kind] if row["model"] == model] for kind in ("runs", "comparisons")))
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    entries = [axes.get_legend_handles_labels() for axes in panels]
    unique = {label: handle for handles, labels in entries for handle, label in zip(handles, labels, strict=True)}
    seeds = len({row["seed"] for row in held["runs"]})
    title = f"{held['date']}, seeds: {seeds}"
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=6, frameon=False, title=title)
    figure.savefig(path, dpi=110)


def _plot_accuracy(axes: Any, runs: Rows, _: Rows) -> None:
    """Accuracy against the untouched job, over the ratio of bytes."""
    untouched = {row["seed"]: row for row in runs if row["setting"] == UNTOUCHED}
    accuracies = [100 * row["accuracy"] for row in untouched.values()]
    if len(accuracies) > 1:
        spread = deviation(accuracies)
        axes.axhspan(-spread, spread, color="#cccccc", alpha=0.5, label="untouched, one deviation over seeds")
    axes.axhline(0, color="black", linewidth=0.8)
    for setting in dict.fromkeys(row["setting"] for row in runs if row["setting"] != UNTOUCHED):
        paired = [row for row in runs if row["setting"] == setting and row["seed"] in untouched]
        if not paired:
            continue
        ratios = [row["exact_bytes"] / row["retained_bytes"] for row in paired]
        points = differences(paired, untouched, "accuracy", scale=100)
        policy = setting.split()[0]
        axes.plot(ratios, points, ".", color=COLOURS[policy], alpha=0.4)
        where = statistics.mean(ratios), statistics.mean(points)
        look = {"color": COLOURS[policy], "fillstyle": "none", "markeredgewidth": 1.6}  # what lies beneath can be seen
        axes.plot(*where, MARKS[policy], label=policy, **look)
        place = {"textcoords": "offset points", "xytext": LABELS[policy], "fontsize": 8, "color": COLOURS[policy]}
        axes.annotate("" if setting == IN_BYTES_OF_STORED else setting.removeprefix(policy), where, **place)
    axes.margins(x=0.12)
    axes.set(xlabel="exact / retained bytes", ylabel="accuracy against untouched (points)")


def _plot_variance(axes: Any, _: Rows, comparisons: Rows) -> None:
    """Variance over retained bytes at the untouched weights: measured as marks, predicted as lines."""
    for policy in ("uniform", "gact", "acgc"):
        chosen = [row for row in comparisons if row["setting"].startswith(policy)]
        for point in dict.fromkeys((row["seed"], row["step"]) for row in chosen):
            rows = [row for row in chosen if (row["seed"], row["step"]) == point]
            rows.sort(key=lambda row: row["retained_bytes"])
            shares = [100 * row["retained_bytes"] / row["exact_bytes"] for row in rows]
            look = {"color": COLOURS[policy], "markersize": 5, "linewidth": 0.9}
            measured = [row["measured"] for row in rows]
            axes.plot(shares, measured, MARKS[policy], label=f"{policy}, measured", **look)
            if policy != "acgc":
                axes.plot(shares, [row["predicted"] for row in rows], "-", label=f"{policy}, predicted", **look)
    axes.set_yscale("log")
    axes.set_ylim(top=min(axes.get_ylim()[1], 100))
    axes.set(xlabel="retained bytes (% of exact)", ylabel="variance added / squared gradient")


def _plot_error_bound(axes: Any, runs: Rows, _: Rows) -> None:
    """Increase of the gradient's second moment in the runs of acgc, over what was tolerated."""
    settings = [setting for setting in dict.fromkeys(row["setting"] for row in runs) if setting.startswith("acgc")]
    for place, setting in enumerate(settings):
        error = float(setting.split()[1])
        moments = [moment for row in runs if row["setting"] == setting for moment in row["moments"]]
        adaptations = [entry for row in runs if row["setting"] == setting for entry in row["history"][1:]]
        errors = [entry["gradient_error"] for entry in adaptations if entry["gradient_error"] is not None]
        before = [found["measured_before"] / error for found in errors]
        axes.plot(
            [place] * len(before), before, "_", color=COLOURS["gact"], markersize=12, label="before an adaptation"
        )
        increases = [moment["measured"] / error for moment in moments]
        axes.plot([place] * len(increases), increases, "o", color=COLOURS["acgc"], label="on batches to come")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(0.01, 20)
    names = [f"e² = {setting.removeprefix('acgc ')}".replace(" error", "\nerror") for setting in settings]
    axes.set_xticks(range(len(settings)), names)
    axes.margins(x=0.4)
    axes.set_ylabel("measured increase / tolerated")
