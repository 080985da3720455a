"""`gact-dist report`: a page about one run, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from .figures import Figure, figures_of
from .output import CommandError, JsonOption, show, working
from .page import cards_of, page_of
from .pictures import write_png
from .run_files import find_runs


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folders of runs (Config(run_dir=...)), or a folder that holds some."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page to write; report.html in the first folder.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write each plot to this folder as well; needs kaleido and a browser.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about a run: losses, memory, bits, sensitivities, error of the gradient, agreement of ranks.

    The page needs no network. Runs are what Config(run_dir="...") and examples/train write; several are drawn together.

    [dim]Example:[/dim]
    gact_dist.attach(model, config=gact_dist.Config(run_dir="runs/L2"))
    $ gact-dist report runs/untouched runs/L2 --output report.html
    """
    found = find_runs(runs)
    path = runs[0] / "report.html" if output is None else output
    with working("drawing", as_json) as now:
        figures = figures_of(found)
        if not figures:
            raise CommandError(f"{found[-1].name} has no lines yet, expected a run of at least two steps")
        written = _write(path, page_of(found, figures))
        pictures = [] if png is None else _pictures(png, figures, now)
    cards = cards_of(found)
    values = {
        "page": str(written),
        "runs": [run.name for run in found],
        "figures": [figure.key for figure in figures],
        "png": [str(picture) for picture in pictures],
        "key_figures": [{"what": what, "value": value, "note": note} for what, value, note in cards],
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for what, value, note in cards:
        table.add_row(what, f"[bold]{value}[/]", f"[dim]{note}[/]")
    show(
        values, as_json, table, Text(f"\n{len(figures)} figures of {', '.join(run.name for run in found)} in {written}")
    )


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise CommandError(f"the page cannot be written to {path}: {refused}") from None
    return path


def _pictures(folder: Path, figures: Sequence[Figure], now: Callable[[str], None]) -> list[Path]:
    written = []
    for figure in figures:
        now(f"drawing {figure.key}.png")
        written.append(folder / f"{figure.key}.png")
        try:
            write_png(figure, written[-1])
        except OSError as refused:
            raise CommandError(f"the picture cannot be written to {written[-1]}: {refused}") from None
    return written
