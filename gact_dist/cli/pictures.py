"""Figures as PNG, which plotly draws in a browser of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plotly.graph_objects

from .figures import Figure
from .loading import UserCode
from .output import CommandError

_WIDTH, _SCALE, _BESIDE_PLOT, _EDGE = 900, 2, 120, 20
_TITLE, _LEGEND_ROW = 50, 20
_OF_ENTRY, _OF_LETTER = 50, 7.5  # pixels of a legend: its line and the space behind it, and what a letter takes
_HOW = "`pip install kaleido` and a browser: `plotly_get_chrome`, or chromium"


def check_can_draw() -> None:
    """Raise CommandError where pictures surely cannot be drawn, before the long work that they are of."""
    if find_spec("kaleido") is None:
        raise CommandError(f"drawing a PNG needs {_HOW}; an HTML page needs neither")


def write_png(figure: Figure, path: Path) -> None:
    """Draw a figure on white. Raises CommandError where kaleido or a browser is lacking, OSError."""
    layout, height = layout_of(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with UserCode(f"drawing a PNG (it needs {_HOW})"):
        drawn = plotly.graph_objects.Figure({"data": figure.data, "layout": layout})
        drawn.write_image(path, width=_WIDTH, height=height, scale=_SCALE)


def layout_of(figure: Figure) -> tuple[dict[str, Any], int]:
    """The layout of a picture, which has its title on it and room for each row of the legend below that; its height."""
    above = _TITLE + _LEGEND_ROW * _legend_rows(figure)
    own = figure.layout["margin"]
    white = {"paper_bgcolor": "white", "plot_bgcolor": "white", "font": {"color": "#1f2937", "size": 13}}
    title = {"text": figure.title, "x": 0.02, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 16}}
    margin = {"l": max(own["l"], _EDGE), "r": max(own["r"], _EDGE), "t": above, "b": _EDGE}
    layout = {**figure.layout, **white, "title": title, "margin": margin}
    for axis in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        layout[axis] = {**figure.layout[axis], "gridcolor": "#e5e7eb"}
    return layout, figure.height + _BESIDE_PLOT - _TITLE + above


def _legend_rows(figure: Figure) -> int:
    """Rows of a legend above a plot: its entries have one width, that of the longest."""
    names = [line["name"] for line in figure.data if "name" in line and line.get("showlegend", True)]
    if not names or len(figure.data) < 2 or not figure.layout.get("showlegend", True):
        return 0
    in_a_row = int((_WIDTH - 4 * _EDGE) / (_OF_ENTRY + _OF_LETTER * max(map(len, names))))
    return -(-len(names) // max(1, in_a_row))
