"""The pages: what they link to and name exists, the architecture has every file, and every message has its row."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gact_dist

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(gact_dist.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "benchmarks" / "results").glob("*.md"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
# Quoted inside another message, which has a row: "state cannot be used: …".
# caught, and shown as a part of another message
WITHOUT_A_ROW = {"StateError", "_fields.StateError", "ReplayError", "OpaqueError"}
SOURCES = ("benchmarks", "configs", "csrc", "docs", "examples", "gact_dist", "launch", "tests", "tools")
NAMES_A_FILE = re.compile(r"[\w./*-]+\.(cpp|cu|h|json|md|png|py|sh|toml|txt)|[\w-]+(/[\w-]+)*/")
# Named by a page and not in the repository: made by a run, or the reader's own.
ELSEWHERE = {
    "benchmarks/results/batch.json", "benchmarks/results/codec_cuda.json", "benchmarks/results/step.json",
    "run.json", "runs/demo/", "train.py", "gact_dist.json",
}  # fmt: skip


def path_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its fenced blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@functools.cache
def paths() -> str:
    """Every file and folder of the repository, each path after a slash and before a line's end."""
    inside = (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    found = [*ROOT.iterdir(), *(ROOT / folder for folder in SOURCES), *inside]
    return "".join(f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}\n" for path in found)


def exists(name: str) -> bool:
    """Whether a path, or the end of one, leads to something in the repository."""
    return re.search("/" + re.escape(name.removeprefix("./")).replace(r"\*", "[^/\n]*") + "\n", paths()) is not None


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_every_file_that_a_page_names_exists(page):
    words = (word for quoted in re.findall(r"`([^`\n]+)`", prose(page)) for word in quoted.split())
    named = {word for word in words if NAMES_A_FILE.fullmatch(word)}
    assert {name for name in named - ELSEWHERE if not exists(name)} == set()


def test_the_architecture_is_short_and_names_every_file_of_the_package_and_no_other():
    page = ARCHITECTURE.read_text()
    assert page.count("\n") <= 150
    files = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")}
    rooms = {file.parts[0] for file in files if len(file.parts) > 1}
    named = {Path(*found) for found in re.findall(rf"\b({'|'.join(rooms)})/(\w+)", page)}
    assert named <= files
    rows = {row.split("`")[1].rstrip("/"): row for row in page.splitlines() if row.startswith("| `")}
    for file in files:
        if file.name != "__init__":
            row = rows.get(file.parts[0], "") if len(file.parts) > 1 else page
            assert f"`{file.name}`" in row, f"{file} is missing"


def test_every_test_that_the_page_on_reliability_names_exists():
    texts = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = {name for text in texts for name in re.findall(r"def (test_\w+)", text)}
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    assert len(named) > 40
    assert named <= defined


def nodes() -> Iterator[ast.AST]:
    """What the package's files are made of."""
    for path in PACKAGE.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def text_of(message: ast.expr) -> str:
    """The literal text of a message, with … in place of what is put in."""
    if isinstance(message, ast.Constant):
        return re.sub(r"%(\.\d+)?[dgs]", "…", str(message.value))
    if isinstance(message, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "…" for part in message.values)
    return "…"


def messages() -> list[str]:
    """The texts of all errors and warnings of the package."""
    found = []
    for node in nodes():
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args:
            function = ast.unparse(call.func)
            raised = isinstance(node, ast.Raise) and function not in WITHOUT_A_ROW
            if raised or function in ("_log.warning", "warnings.warn"):
                found.append(text_of(call.args[0]))
    return [text for text in found if len(text) > 10]


def patterns() -> dict[str, re.Pattern[str]]:
    """The messages in the first column of the tables."""
    rows = [line.split(" | ")[0] for line in TROUBLESHOOTING.read_text().splitlines() if line.startswith("| `")]
    quoted = [text for row in rows for text in re.findall("`([^`]+)`", row) if " " in text]
    return {text: re.compile(".*".join(map(re.escape, text.strip("…").split("…")))) for text in quoted}


def test_every_error_and_warning_has_a_row_in_the_troubleshooting_page():
    rows = patterns().values()
    assert [text for text in messages() if not any(row.search(text) for row in rows)] == []


def test_every_row_of_the_troubleshooting_page_is_a_text_of_the_package():
    texts = [text_of(node) for node in nodes() if isinstance(node, (ast.Constant, ast.JoinedStr))]
    assert [text for text, row in patterns().items() if not any(row.search(text) for text in texts)] == []
