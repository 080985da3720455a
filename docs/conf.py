"""Sphinx settings of the documentation; `bash tools/build_docs.sh` builds it.

The source directory is the root of the repository, so a relative link between two Markdown files leads to the same file
on the site as on a repository host, and one to any other file becomes a download.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx
from sphinx.ext import napoleon

ROOT = Path(__file__).resolve().parents[1]

project = "gact_dist"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "benchmarks/results/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
# Folders that are not even looked into: Sphinx walks the source directory.
exclude_patterns = [".*", "runs", "build", "dist", "shared", "docs/_build", "csrc", "gact_dist", "tests", "tools"]

myst_heading_anchors = 4  # the anchors that repository hosts give to headings

autodoc_member_order = "bysource"
autodoc_mock_imports = ["deepspeed", "hjson"]  # importing them takes longer than all of the rest
autodoc_typehints_format = "short"
# There is no network: only names of this package can be links.
nitpick_ignore_regex = [(r"py:.*", r"(?!gact_dist\.).*")]

smartquotes = False  # "dp" in a docstring is code
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gact_dist {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
highlight_language = "none"  # of indented blocks: shell commands and diagrams
pygments_style, pygments_dark_style = "default", "monokai"

_SECTIONS = napoleon.Config(napoleon_use_ivar=True, napoleon_use_rtype=False)


def read_sections(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Args, Raises and Attributes of a docstring become lists. napoleon itself, as an extension, would also take what
    stands before a colon under a field for the type of that field."""
    if what in ("class", "exception", "function", "method"):
        lines[:] = napoleon.GoogleDocstring(lines, _SECTIONS, what=what).lines()


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", read_sections)
