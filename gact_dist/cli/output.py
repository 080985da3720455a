"""What a command shows: tables for people on stdout, JSON for programs, errors in one message, progress on stderr.

Exit codes: 0; 1 where `doctor` finds something broken, or `max-batch` nothing that fits; 2 where a command could not do
what was asked; 130 where it was interrupted, 143 where SIGTERM did that.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, ParamSpec, TextIO

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .stopping import exit_code_of

FOUND_BROKEN, FOUND_NOTHING, COULD_NOT = 1, 1, 2
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs in place of tables.")]
Arguments = ParamSpec("Arguments")
_BETWEEN_LINES_S = 10.0
"""of progress, where there is no terminal"""
_UNITS = {
    "": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip


_json_to: list[TextIO] = []
"""where --json goes, while sys.stdout is not that"""


class CommandError(Exception):
    """What a command could not do: what was got, what was expected and the mend, for the person who typed it."""


def console(*, to_stderr: bool = False) -> Console:
    """A console of the current stream: a test may have replaced it."""
    return Console(stderr=to_stderr, soft_wrap=to_stderr, highlight=False)


def show(found: dict[str, Any], as_json: bool, *shown: RenderableType) -> None:
    """Print what a command found: as JSON, or as people read it."""
    if as_json:
        to = _json_to[-1] if _json_to else sys.stdout
        to.write(json.dumps(found, indent=1) + "\n")
        return
    for part in shown:
        screen = console()
        if isinstance(part, Table):  # one that says how wide it has to be is not to be cut
            screen.width = max(screen.width, part.min_width or 0)
        screen.print(part, soft_wrap=isinstance(part, Text))  # nor a line of code to be broken


@contextmanager
def only_json(as_json: bool) -> Iterator[None]:
    """With --json, what the user's code prints, and what it starts, goes to stderr: on stdout is what show() writes."""
    if not as_json:
        yield
        return
    with ExitStack() as stack:
        _json_to.append(_apart(sys.stdout, stack))
        stack.callback(_json_to.pop)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _apart(stdout: TextIO, stack: ExitStack) -> TextIO:
    """Standard output where its descriptor is that of standard error until the stack is left."""
    try:
        own, errors = stdout.fileno(), sys.stderr.fileno()
    except (OSError, AttributeError):  # it is no file, such as what a test reads
        return stdout
    stdout.flush()
    kept = os.dup(own)
    os.dup2(errors, own)
    apart = os.fdopen(kept, "w", encoding="utf-8")

    def put_back() -> None:
        apart.flush()
        stdout.flush()
        os.dup2(kept, own)
        apart.close()

    stack.callback(put_back)
    return apart


def reporting_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The command with a CommandError as one message: on stderr, or with --json as an object on stdout."""

    @functools.wraps(command)
    def reporting(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        try:
            with only_json(bool(options.get("as_json"))):
                command(*args, **options)
        except CommandError as error:
            report_error(str(error), bool(options.get("as_json")))
            raise typer.Exit(COULD_NOT) from None
        except KeyboardInterrupt as stopped:
            sys.stderr.write("interrupted\n")
            raise typer.Exit(exit_code_of(stopped)) from None

    return reporting


def report_error(text: str, as_json: bool) -> None:
    """Say what could not be done: on stderr, or as an object on stdout."""
    if as_json:
        sys.stdout.write(json.dumps({"error": text}, indent=1) + "\n")
    else:
        console(to_stderr=True).print(f"[bold red]error:[/] {escape(text)}")


@contextmanager
def working(doing: str, as_json: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on stderr that long work goes on. Yields a function that says what it is at.

    Where that is no terminal, as in the log of a cluster's job, it is a line now and then; with JSON nothing is shown.
    """
    shown = console(to_stderr=True)
    if as_json or not shown.is_terminal:
        yield _quiet if as_json else _lines(shown)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True) as progress:
        task = progress.add_task(doing)
        yield lambda now: progress.update(task, description=now)


def _quiet(_: str) -> None:
    """Show nothing."""


def _lines(shown: Console) -> Callable[[str], None]:
    began_s = said_s = perf_counter()

    def say(now: str) -> None:
        nonlocal said_s
        time_s = perf_counter()
        if time_s - said_s >= _BETWEEN_LINES_S:
            said_s = time_s
            shown.print(f"{time_s - began_s:.0f} s: {escape(now)}")

    return say


def report_left_out(left_out: Iterable[str], interrupted: bool) -> None:
    """Say what is not in what was shown: the user did not wait for it, or an error came before."""
    console(to_stderr=True).print(
        f"{'interrupted; ' if interrupted else ''}not tried to the end: {', '.join(left_out)}"
    )


def check_writable(path: Path, what: str) -> None:
    """Raise CommandError where a file surely cannot be written, before the long work whose result goes into it."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder} for the {what}, expected one that exists")
    if path.is_dir():
        raise CommandError(f"{path} is a folder, expected the name of a file for the {what}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"the {what} cannot be written to {path}: permission denied; expected a name elsewhere")


def bytes_of(text: str) -> int:
    """The bytes that "2GiB", "512MiB", "1.5 GB" or "1000000" stand for. Raises CommandError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, flags=re.IGNORECASE)
    if found is None or not float(found[1]):
        raise CommandError(f"{text!r} is no size in bytes, expected one such as 2GiB, 512MiB or 1000000")
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()])


def unit_of(size: float) -> tuple[int, str]:
    """The largest binary unit that a size has one of: its bytes and its name."""
    units = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return next(((unit, name) for unit, name in units if abs(size) >= unit), (1, "bytes"))


def shown_bytes(size: float) -> str:
    """A size for people."""
    unit, name = unit_of(size)
    return f"{size / unit:.{0 if unit == 1 or abs(size) >= 100 * unit else 2}f} {name}"
