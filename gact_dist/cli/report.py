"""`gact-dist report`: a page about one run, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .figures import Figure, figures_of
from .loading import UserCode
from .output import CommandError, JsonOption, show, working
from .page import cards_of, page_of
from .pictures import check_can_draw, write_png
from .run_files import find_runs, read_profile


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
    profile: Annotated[
        Path | None,
        typer.Option(help="What `gact-dist profile JOB --json` wrote: memory within a step, and its peak by layer."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about a run: losses, memory, bits, sensitivities, error of the gradient, agreement of ranks.

    The page needs no network. Runs are what Config(run_dir="...") and examples/train write; several are drawn together.

    [dim]Example:[/dim]
    gact_dist.attach(model, config=gact_dist.Config(run_dir="runs/L2"))
    $ gact-dist report runs/untouched runs/L2 --output report.html
    """
    if png is not None:
        check_can_draw()
    found = find_runs(runs)
    of_job = None if profile is None else read_profile(profile)
    path = runs[0] / "report.html" if output is None else output
    with working("drawing", as_json) as now:
        with UserCode(f"drawing {', '.join(run.name for run in found)} (is each file as its run wrote it?)"):
            figures = figures_of(found, of_job)
            if not figures:
                raise CommandError(f"{found[-1].name} has no lines yet, expected a run of at least two steps")
            text, cards = page_of(found, figures), cards_of(found)
        written = _write(path, text)
        pictures = [] if png is None else _pictures(png, figures, now)
    values: dict[str, Any] = {
        "page": str(written),
        "runs": [run.name for run in found],
        "figures": [figure.key for figure in figures],
        "png": [str(picture) for picture in pictures],
        "key_figures": [{"what": what, "value": value, "note": note} for what, value, note in cards],
        "unread_lines": {f"{run.name}/{file}": count for run in found for file, count in run.unread.items()},
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for what, value, note in cards:
        table.add_row(what, f"[bold]{value}[/]", f"[dim]{note}[/]")
    unread = "".join(
        f"\n{file}: {count} line{'s' if count > 1 else ''} cannot be read and {'are' if count > 1 else 'is'} left out"
        for file, count in values["unread_lines"].items()
    )
    names = ", ".join(run.name for run in found)
    show(values, as_json, table, Text(f"{unread}\n{len(figures)} figures of {names} in {written}"))


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise CommandError(f"the page cannot be written to {path}: {refused}; give another --output") from None
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
