"""The commands, one file each.

A command's file has `command`, with typer's annotations and a docstring that is its help: one line of what it says,
then an example. It is wrapped in `reporting_errors`, has an option `JsonOption`, and shows what it found with `show`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import typer

import gact_dist

from . import doctor, max_batch, plan, profiling, report
from .output import COULD_NOT, report_error, reporting_errors

app = typer.Typer(
    name="gact-dist",
    help="Compressed activations for distributed training: what they would save in your job, and what they did.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gact-dist {gact_dist.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    pass


_COMMANDS: dict[str, Callable[..., None]] = {
    "profile": profiling.command,
    "plan": plan.command,
    "max-batch": max_batch.command,
    "report": report.command,
    "doctor": doctor.command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(reporting_errors(_command))

_UsageError: Any = typer.BadParameter.__base__  # of click, which typer brings under a name of its own or not


def run(arguments: Sequence[str]) -> int:
    """Run a command line. What it does not understand of it is one message, as an error of a command is."""
    try:
        return int(app(list(arguments), prog_name="gact-dist", standalone_mode=False) or 0)
    except _UsageError as wrong:
        name = "gact-dist" if wrong.ctx is None else wrong.ctx.command_path
        text = wrong.format_message().rstrip(".")
        report_error(f"{text}; {name} --help shows what is expected", "--json" in arguments)
        return COULD_NOT
