"""The page of a report: one HTML file that needs nothing else, plotly included."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from plotly.offline import get_plotlyjs

from .figures import Figure
from .output import shown_bytes
from .run_files import Run

_TEMPLATE = Path(__file__).with_name("page.html")
_LAST_LOSSES = 10
_MINUTES = len("2026-01-31T23:59")
_SHOWN_PLANS, _SHOWN_RANKS = 6, 64
_Key = TypeVar("_Key", int, str)


def page_of(runs: Sequence[Run], figures: Sequence[Figure]) -> str:
    """The page. The last run is the one that is looked at in depth."""
    run = runs[-1]
    heading = f"{run.name} beside {', '.join(other.name for other in runs[:-1])}" if len(runs) > 1 else run.name
    tables = _ranks(run) + _stored_exactly(run)
    return page_of_figures(heading, " · ".join(_facts(run)), figures, cards_of(runs), tables, _versions(run))


def page_of_figures(
    heading: str,
    subtitle: str,
    figures: Sequence[Figure],
    cards: Sequence[tuple[str, str, str]] = (),
    tables: str = "",
    footer: str = "",
) -> str:
    """A page of figures. cards: see cards_of(). tables: HTML that follows them."""
    drawn = [{"key": figure.key, "data": figure.data, "layout": figure.layout} for figure in figures]
    parts = {
        "title": f"{escape(heading)} - gact_dist",
        "heading": escape(heading),
        "subtitle": escape(subtitle),
        "cards": "".join(_card(*card) for card in cards),
        "figures": "".join(_figure(figure) for figure in figures) + tables,
        "footer": escape(footer),
        "plotly": get_plotlyjs(),
        "data": json.dumps(drawn).replace("</", "<\\/"),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part, 1)
    return text


# -- the key figures ---------------------------------------------------------------------------------------------------


def cards_of(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """(what, value, note) of each key figure of the last run, beside the first where there are several."""
    run, other = runs[-1], runs[0] if len(runs) > 1 else None
    cards = []
    if run.last_bytes is not None:
        exact, retained = run.last_bytes
        ratio = f"{exact / retained:.1f}x" if retained else "-"
        cards.append(("Compression of activations", ratio, f"{shown_bytes(exact)} → {shown_bytes(retained)} a step"))
    if run.average_bits is not None:
        count = len(run.adaptations)
        cards.append(("Average bits", f"{run.average_bits:.2f}", f"{count} adaptation{'s' if count > 1 else ''}"))
    if run.peak_bytes is not None:
        note = "worst step" if run.knows_training_alone else "of the process or device, so far"
        if other is not None and other.peak_bytes and other.knows_training_alone == run.knows_training_alone:
            note = f"{other.name}: {shown_bytes(other.peak_bytes)}, {note}"
        cards.append(("Peak memory", shown_bytes(run.peak_bytes), note))
    if run.step_s is not None:
        note = "median"
        if other is not None and other.step_s:
            note = f"{other.name}: {_shown_s(other.step_s)}, {run.step_s / other.step_s:.2f} times as long"
        cards.append(("Time of a step", _shown_s(run.step_s), note))
    cards += [*_time_card(run), *_loss_card(run, other), *_accuracy_card(run, other), *_ranks_card(run)]
    return cards


def _time_card(run: Run) -> list[tuple[str, str, str]]:
    timed = [line for line in run.steps if "compressing_s" in line]
    whole = sum(line["time_s"] for line in timed)
    if not run.compresses or not whole:
        return []
    packing = sum(line["compressing_s"] for line in timed) / whole
    measuring = sum(line["measuring_s"] for line in timed) / whole
    return [("Time in compression", f"{packing:.0%}", f"adaptations: {measuring:.0%} of the run")]


def _loss_card(run: Run, other: Run | None) -> list[tuple[str, str, str]]:
    if not run.losses[1]:
        return []
    note = f"mean of the last {min(_LAST_LOSSES, len(run.losses[1]))} steps"
    if other is not None and other.losses[1]:
        note = f"{other.name}: {_last_loss(other):.4f}, {note}"
    return [("Loss", f"{_last_loss(run):.4f}", note)]


def _last_loss(run: Run) -> float:
    return statistics.fmean(run.losses[1][-_LAST_LOSSES:])


def _accuracy_card(run: Run, other: Run | None) -> list[tuple[str, str, str]]:
    if "accuracy" not in run.result:
        return []
    note = "on test examples"
    if other is not None and "accuracy" in other.result:
        note = f"{other.name}: {other.result['accuracy']:.1%}"
    return [("Test accuracy", f"{run.result['accuracy']:.1%}", note)]


def _ranks_card(run: Run) -> list[tuple[str, str, str]]:
    known, expected = len(run.ranks), max(run.world_size, len(run.ranks))
    if expected < 2 or not known:
        return []
    if known == 1:
        [rank] = run.ranks
        return [
            ("Ranks", "unknown", f"only rank {rank} of {expected} left a file in ranks: did others write elsewhere?")
        ]
    different = _disagreeing(run)
    if different:
        return [("Ranks", "differ", f"in the plans of steps {', '.join(map(str, different[:4]))}")]
    whose = f"all {expected} ranks" if known == expected else f"{known} of {expected} ranks (others wrote elsewhere)"
    return [("Ranks", "agree", f"{whose}, {len(next(iter(run.ranks.values())))} plans")]


def _disagreeing(run: Run) -> list[int]:
    """The steps whose plans differ between ranks."""
    digests: dict[int, set[str]] = {}
    for lines in run.ranks.values():
        for line in lines:
            digests.setdefault(line["step"], set()).add(line["plan"])
    return sorted(step for step, found in digests.items() if len(found) > 1)


def _shown_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# -- parts of the page -------------------------------------------------------------------------------------------------


def _facts(run: Run) -> list[str]:
    """What ran, where and how."""
    about, result = run.about, run.result
    config = about.get("config", {})
    world_size = about.get("world_size", result.get("world_size"))
    facts = [
        about.get("model", result.get("config_name")),
        f"{about['parameters'] / 1e6:.3g} million parameters" if about.get("parameters") else None,
        f"{world_size} rank{'s' if world_size > 1 else ''}" if world_size else None,
        about.get("device", result.get("device")),
        _budget(config) if config else None,
        f"{max(len(run.steps), len(run.losses[0]))} steps",
        str(about.get("started", ""))[:_MINUTES].replace("T", " "),
    ]
    return [str(fact) for fact in facts if fact]


def _budget(config: dict[str, Any]) -> str:
    budgets = {"bits": "{:g} bits", "retained_bytes": "{} bytes", "error": "error {:g}"}
    given = [text.format(config[key]) for key, text in budgets.items() if config.get(key) is not None]
    return f"policy {config.get('policy')}{', ' if given else ''}{', '.join(given)}"


def _versions(run: Run) -> str:
    torch = run.about.get("torch") or run.result.get("versions", {}).get("torch", "unknown")
    return f"gact_dist {run.about.get('gact_dist', '')}, torch {torch}. Made by gact-dist report."


def _card(what: str, value: str, note: str) -> str:
    mark = {"agree": " good", "differ": " bad"}.get(value, "")
    return (
        f'<div class="card"><div class="what">{escape(what)}</div><div class="value{mark}">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _figure(figure: Figure) -> str:
    wide = ' class="wide"' if figure.is_wide else ""
    return (
        f"<figure{wide}><h2>{escape(figure.title)}</h2><figcaption>{escape(figure.caption)}</figcaption>"
        f'<div id="{figure.key}" style="height:{figure.height}px"></div></figure>'
    )


def _ranks(run: Run) -> str:
    """Each rank's plans by their digests, and the bytes of its first step under the last one."""
    if not run.ranks or max(run.world_size, len(run.ranks)) < 2:
        return ""
    every = sorted({line["step"] for lines in run.ranks.values() for line in lines})
    steps = _some(every, _disagreeing(run), _SHOWN_PLANS)
    usual = {
        step: statistics.mode(line["plan"] for lines in run.ranks.values() for line in lines if line["step"] == step)
        for step in steps
    }
    plans_of = {rank: {line["step"]: line["plan"] for line in lines} for rank, lines in run.ranks.items()}
    apart = [rank for rank, plans in plans_of.items() if any(plans.get(at, usual[at]) != usual[at] for at in steps)]
    rows = []
    for rank in _some(list(run.ranks)[::-1], apart, _SHOWN_RANKS)[::-1]:
        lines, plans = run.ranks[rank], plans_of[rank]
        cells = "".join(_plan_cell(plans.get(step), usual[step]) for step in steps)
        rows.append(f"<tr><td>{rank}</td>{cells}<td>{shown_bytes(lines[-1]['retained_bytes'])}</td></tr>")
    head = "".join(f"<th>step {step}</th>" for step in steps)
    caption = "A digest of the bits that each rank stores its tensors at; those of one step have to be the same."
    return (
        f'<section class="table"><h2>Agreement of ranks</h2><div class="caption">{caption}</div><table class="plans">'
        f"<tr><th>rank</th>{head}<th>retained</th></tr>{''.join(rows)}</table></section>"
    )


def _some(every: Sequence[_Key], first: Sequence[_Key], most: int) -> list[_Key]:
    """At most so many of `every`, in its order: the beginning of `first`, and from the end what there is room for."""
    preferred = [*first, *(one for one in reversed(every) if one not in first)]
    chosen = preferred[:most]
    return [one for one in every if one in chosen]


def _plan_cell(plan: str | None, usual: str) -> str:
    if plan is None:
        return "<td>-</td>"
    same = plan == usual
    return f'<td class="name {"good" if same else "bad"}">{"✓" if same else "✗"} {escape(plan[:8])}</td>'


def _stored_exactly(run: Run) -> str:
    """The tensors that were found not to bear rounding."""
    found = {name: why for line in run.adaptations for name, why in (line.get("stored_exactly") or {}).items()}
    if not found:
        return ""
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td><td>{escape(why)}</td></tr>' for name, why in found.items()
    )
    return (
        '<section class="table"><h2>Stored exactly after all</h2><div class="caption">Tensors whose rounding the '
        f"gradient could not bear.</div><table><tr><th>saved tensor</th><th>because</th></tr>{rows}</table></section>"
    )
