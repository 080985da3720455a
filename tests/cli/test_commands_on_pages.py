"""Every gact-dist command that a page, or the help of a command, shows is one that the command line understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from gact_dist.cli.app import _COMMANDS, app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHOWN = re.compile(rf"gact-dist (?:{'|'.join(_COMMANDS)}) [^`\n]*")
STANDS_FOR = {"S": ["--layout", "fsdp2", "--world-size", "64"]}  # in the table of docs/profile.md


def shown() -> Iterator[tuple[str, str]]:
    """The commands, and where each is."""
    texts = {page.stem: page.read_text() for page in PAGES if page.stem != "troubleshooting"}  # names parts of them
    texts |= {f"help of {name}": str(command.__doc__) for name, command in _COMMANDS.items()}
    for where, text in texts.items():
        for command in SHOWN.findall(text):
            yield where, command


@pytest.mark.parametrize(("where", "command"), sorted(set(shown())))
def test_a_command_on_a_page_is_understood(where, command):
    words = shlex.split(command.split(" > ")[0], comments=True)[1:]
    name, *arguments = [part for word in words for part in STANDS_FOR.get(word, [word])]
    group = typer.main.get_command(app)
    context = group.make_context("gact-dist", [name, *arguments])
    parsed = group.commands[name].make_context(name, arguments, parent=context)
    assert parsed.args == []


def test_pages_show_every_command():
    assert {command.split()[1] for _, command in shown()} | {"doctor"} == set(_COMMANDS)
