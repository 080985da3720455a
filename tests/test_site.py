"""The documentation as a site: it builds without a warning and without the network, and every link in it resolves."""

from __future__ import annotations

import re
import subprocess
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import gact_dist

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "tools" / "build_docs.sh"
LONGEST_BUILD_S = 300  # it takes some ten seconds; a busy machine is not a fault of the pages
REFERENCES = {"a": "href", "link": "href", "img": "src", "script": "src"}


class Page(HTMLParser):
    """The anchors of a page and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.anchors: set[str] = set()
        self.references: list[tuple[str, str]] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        target = given.get(REFERENCES.get(tag, ""))
        if target:
            self.references.append((tag, target))


class Site:
    """A built site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> dict[Path, Page]:
        return {path: Page(path) for path in self.folder.rglob("*.html") if "_static" not in path.parts}

    def page(self, name: str) -> Page:
        return self.pages[self.folder / name]

    def leads_somewhere(self, page: Page, target: str) -> bool:
        """Whether a reference without a host has a file, and its anchor if it names one."""
        parts = urlsplit(target)
        path = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
        linked = self.pages.get(path)
        return path.is_file() and (not parts.fragment or linked is None or unquote(parts.fragment) in linked.anchors)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site").resolve()
    # setup.sh has run, or this test would not
    command = ["env", "GACT_DIST_SKIP_SETUP=1", "bash", str(BUILD), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_BUILD_S)
    assert built.returncode == 0, built.stdout + built.stderr
    return Site(folder)


def test_every_page_of_the_documentation_is_on_the_site(site):
    sources = {path.relative_to(ROOT) for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]}
    assert {path.with_suffix(".html") for path in sources} <= {path.relative_to(site.folder) for path in site.pages}


def test_every_internal_link_and_anchor_resolves(site):
    local = [
        (page.path.name, target)
        for page in site.pages.values()
        for _, target in page.references
        if not urlsplit(target).scheme
    ]
    broken = [
        (page.path.name, target)
        for page in site.pages.values()
        for _, target in page.references
        if not urlsplit(target).scheme and not site.leads_somewhere(page, target)
    ]
    assert broken == []
    assert len(local) > 1000  # the sidebar alone has thirty on each of thirty pages


def test_a_link_that_leads_nowhere_would_be_seen(site):
    page = site.page("docs/quickstart.html")
    assert site.leads_somewhere(page, "#ddp")
    assert not site.leads_somewhere(page, "#dpd")
    assert not site.leads_somewhere(page, "quickstrat.html")


def test_the_site_works_without_a_network(site):
    remote = [
        (page.path.name, target)
        for page in site.pages.values()
        for tag, target in page.references
        if tag != "a" and urlsplit(target).netloc
    ]
    assert remote == []


def test_the_sidebar_begins_with_what_a_new_user_needs(site):
    text = site.page("docs/index.html").path.read_text()
    assert re.findall(r'class="caption-text">([^<]+)<', text) == ["Start", "Use", "Reference", "Measurements"]


def test_the_root_of_the_site_leads_to_the_first_page(site):
    assert "url=docs/index.html" in (site.folder / "index.html").read_text()


def test_the_reference_has_every_public_name(site):
    anchors = site.page("docs/api.html").anchors
    names = {f"gact_dist.{name}" for name in gact_dist.__all__} - {"gact_dist.codec"}
    methods = {f"gact_dist.Controller.{name}" for name in vars(gact_dist.Controller) if not name.startswith("_")}
    assert names | methods | {"gact_dist.codec.pack", "gact_dist.deepspeed.initialize"} <= anchors
    assert not {anchor for anchor in anchors if re.search(r"^gact_dist\b.*\._", anchor)}
