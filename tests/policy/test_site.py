"""The documentation site builds without warnings, dead links or requests to other hosts, and fits a phone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import paceline
from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[2]
LOADED = {"src", "srcset", "data", "poster"}  # attributes of resources that a page loads; also `href` of a link element


class Page(HTMLParser):
    """The links, loaded resources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set(re.findall(r"url\([\"']?([^)\"']+)", text))
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "href" and tag == "a":
                self.links.add(value or "")
            elif name in LOADED or (name == "href" and tag in ("link", "use", "image")):
                self.loads.add(value or "")


def find_other_hosts(addresses: set[str]) -> list[str]:
    return sorted(address for address in addresses if urlsplit(address).netloc)


def find_dead_links(site: Path) -> list[str]:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        for address in sorted(page.links | page.loads):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                dead.append(f"{path.relative_to(site)}: {address}")
    return dead


def test_requests_to_other_hosts_are_found():
    page = Page(
        '<link href="//a.example/x.css"><script src="https://b.example/y.js"></script><img src="z.png">'
        '<style>@font-face {src: url("https://c.example/f.woff")}</style><a href="https://d.example">only a link</a>'
    )
    assert find_other_hosts(page.loads) == ["//a.example/x.css", "https://b.example/y.js", "https://c.example/f.woff"]


def test_dead_links_of_a_site_are_found(tmp_path: Path):
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a> <a href="b.html#there">2</a> <a href="#">3</a> <img src="none.png">'
    )
    assert find_dead_links(tmp_path) == ["a.html: b.html#there", "a.html: none.png"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("sphinx", "furo", "myst_nb", "latex2mathml"):
        pytest.importorskip(name, reason=f"needs {name}: make docs installs it")
    place = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-c", str(ROOT / "docs")]
    done = subprocess.run(
        [*sphinx, "-d", str(place / "cache"), str(ROOT), str(place / "site")],
        capture_output=True, text=True, timeout=200, cwd=place,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return place / "site"


@pytest.mark.slow
def test_the_site_has_every_document_and_no_dead_link(site: Path):
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/tutorial/*.ipynb")]
    assert {path.relative_to(ROOT).with_suffix("").as_posix() for path in sources} | {"index", "search"} <= pages
    assert find_dead_links(site) == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_another_host(site: Path):
    for path in site.rglob("*.html"):
        assert find_other_hosts(Page(path.read_text(encoding="utf-8")).loads) == [], path
    for path in (*site.rglob("*.css"), *site.rglob("*.js")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\([\"']?(https?:)?//|@import|(fetch|import)\([\"'`]https?:", text), path


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path):
    anchors = Page((site / "docs" / "api.html").read_text(encoding="utf-8")).anchors
    names = set(paceline.__all__) - {"__version__", "bench", "scale"}
    assert {f"paceline.{name}" for name in (*names, "bench.allreduce", "scale.ranks", "DDP.no_sync")} <= anchors


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("needs Chromium: apt-get install chromium")
    with Browser() as found:
        yield found


SHOWN: Any = "document.readyState === 'complete'"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "docs/api", "docs/faq", "docs/results-format", "docs/tutorial/*"])
def test_a_page_of_the_site_fits_and_asks_for_nothing(site: Path, browser: Browser, name: str):
    for path in site.glob(f"{name}.html"):
        for width in (390, 1440):
            browser.open(f"file://{path}", width, dark=width == 390, ready=SHOWN)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, path
            assert browser.find_complaints() == []
            assert [one for one in browser.list_requests() if not one.startswith("file://")] == []


@pytest.mark.slow
def test_the_search_works_without_a_server(site: Path, browser: Browser):
    found = "document.querySelector('#search-results')?.innerText.includes('Glossary')"
    browser.open(f"file://{site}/search.html?q=exposed", ready=found)
    assert browser.find_complaints() == []
