"""Figures as PNG, which plotly draws in a browser of its own."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects

from .figures import Figure
from .loading import UserCode

_WIDTH, _SCALE, _BESIDE_PLOT = 900, 2, 120
_NEEDS = "drawing a PNG (it needs `pip install kaleido` and a browser: `plotly_get_chrome`, or chromium)"


def write_png(figure: Figure, path: Path) -> None:
    """Draw a figure on white. Raises CommandError where kaleido or a browser is lacking, OSError."""
    white = {"paper_bgcolor": "white", "plot_bgcolor": "white", "font": {"color": "#1f2937", "size": 13}}
    layout = {**figure.layout, **white, "title": {"text": figure.title, "x": 0.02}}
    layout["margin"] = {"l": 20, "r": 20, "t": 80, "b": 20}
    for axis in [name for name in layout if name.startswith(("xaxis", "yaxis"))]:
        layout[axis] = {**figure.layout[axis], "gridcolor": "#e5e7eb"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with UserCode(_NEEDS):
        drawn = plotly.graph_objects.Figure({"data": figure.data, "layout": layout})
        drawn.write_image(path, width=_WIDTH, height=figure.height + _BESIDE_PLOT, scale=_SCALE)
