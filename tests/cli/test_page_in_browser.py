"""Pages in a headless Chromium: no errors or requests, on a phone and a desktop, and escaped names.

Skipped without Chromium. Set PACELINE_AXE to the path of axe-core's `axe.min.js` to add an accessibility check, and
PACELINE_UPDATE_SCREENSHOTS to write the screenshots in docs/images.
"""

from __future__ import annotations

import functools
import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from paceline.report.page import save_page
from paceline.report.result import load_result
from paceline.runtime.ranks.session import lock_folder
from paceline.verbs import watch as watching
from tests.browser import CHROMIUM, Browser
from tests.unit.made_runs import Job, make_folder, make_rows
from tests.unit.test_page import HOSTILE, RESULTS, ROOT, SHOTS, describe_page
from tests.unit.test_watch import append

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(rendered: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`pages(name)`: the page of this run, written once."""
    place = tmp_path_factory.mktemp("pages")

    @functools.cache
    def find(name: str) -> Path:
        if name == "large":
            run = make_folder(place / "large", make_rows(Job(late_s=0.02), steps=10_000, ranks=8), ranks=8)
        elif name == "hostile":
            run = make_folder(place / "<img src=x onerror=hacked=1>", make_rows(), model=HOSTILE, wrapper=HOSTILE)
        else:
            run = RESULTS / STORED[name]
        return save_page([load_result(run)], place / f"{name}.html")

    return find


STORED = {name: f"neoverse-n1-2-cores/{name}" for name in ("allreduce", "wrappers-2-ranks", "scale-ranks")}
STORED |= {"tune": "neoverse-n1-2-cores/tuning/gpt2-mini-gloo", "memory": "xeon-2-cores/memory-gpt2-mini"}
QUICK = ("allreduce", "scale-ranks", "hostile")
RARE = ("wrappers-2-ranks", "tune", "large", "memory")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)])
def test_a_page_renders_without_errors_requests_or_overflow(browser: Browser, pages: Callable[[str], Path], name: str):
    for width in (390, 1440):
        browser.open(f"file://{pages(name)}", width, dark=width == 390)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.find_complaints() == [] and len(browser.list_requests()) == 1
        figures, panels = (
            browser.evaluate(f"document.querySelectorAll('{what}').length") for what in ("figure", ".panels svg")
        )
        assert panels >= figures > 0
        empty = "[...document.querySelectorAll('.panels svg')].filter((s) => !s.querySelector('g path')).length"
        assert browser.evaluate(empty) == 0
        assert not browser.evaluate("document.querySelector('main').innerHTML.includes('NaN')")


def test_names_that_contain_markup_are_escaped(browser: Browser, pages: Callable[[str], Path]):
    browser.open(f"file://{pages('hostile')}")
    assert browser.evaluate("window.hacked === undefined && !document.querySelector('img')")
    assert browser.evaluate("document.querySelector('figcaption').textContent").startswith(HOSTILE)


@pytest.mark.slow
def test_a_simplified_line_keeps_its_peaks_and_its_data(browser: Browser, pages: Callable[[str], Path], tmp_path: Path):
    rows = make_rows(steps=10_000)
    rows[7_777]["ranks"]["step_s"][0] = 3.0
    page = save_page([load_result(make_folder(tmp_path / "run", rows))], tmp_path)
    browser.open(f"file://{page}")
    path = browser.evaluate("document.querySelector('#figure-1 .panels svg g path').getAttribute('d')")
    places = [tuple(map(float, pair.split(","))) for pair in path[1:].split("L")]
    assert len(places) < 4_000
    top = min(y for _, y in places)
    assert sum(y < top + 20 for _, y in places) == 1  # only the peak is that high
    link = "document.querySelector('[data-figure=\"1\"]')"
    browser.evaluate("window.made = []; URL.createObjectURL = (blob) => (made.push(blob), '#')")
    browser.evaluate(f"{link}.click()")
    lines = browser.evaluate("made[0].text()").splitlines()
    assert lines[0] == "panel,series,x,y" and "step,rank 0,7778,3000" in lines


def test_a_tooltip_has_the_values_of_the_nearest_step(browser: Browser, pages: Callable[[str], Path]):
    browser.open(f"file://{pages('hostile')}")
    browser.evaluate("document.querySelector('#figure-0 .panels svg').scrollIntoView()")
    area = browser.evaluate(
        "JSON.parse(JSON.stringify(document.querySelector('#figure-0 .panels svg').getBoundingClientRect()))"
    )
    where = {"x": area["x"] + area["width"] / 2, "y": area["y"] + area["height"] / 2}
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", **where)
    text = browser.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    step = int(text.partition("step: ")[2].partition("training")[0])
    assert f"training loss: {float(f'{2 / step:.6g}'):g}"[:18] in text
    browser.evaluate("document.querySelector('#figure-0 .panels svg').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert "step: 1" in browser.evaluate("document.getElementById('tip').textContent")


@pytest.mark.slow
def test_a_live_page_draws_new_steps_and_says_how_the_run_ended(tmp_path: Path, monkeypatch):
    rows = make_rows()
    folder = make_folder(tmp_path / "run", rows[:10], ended=False)
    handle = lock_folder(folder)
    monkeypatch.setattr(watching, "_SILENT_S", 0.0)
    says = "document.getElementById('status')?.textContent.includes('{}')"
    with watching.serve(watching.Follower(folder)) as server, Browser() as browser:
        try:
            browser.open(server.address, 390)
            count = "document.querySelector('#figure-1 .panels svg g path').getAttribute('d').split('L').length"
            assert browser.evaluate(count) == 10 and browser.evaluate(says.format("Running: step 10"))
            append(folder, rows[10])
            server.follower.update()
            browser.wait_for(says.format("Running: step 11"))
            browser.wait_for(f"{count} === 11")
            assert browser.find_complaints() == [] and browser.evaluate("document.documentElement.scrollWidth") <= 390
        finally:
            os.close(handle)
        server.follower.update()
        browser.wait_for(says.format("Killed"))


def save_picture(browser: Browser, name: str, height: int, said: str, place: Path) -> None:
    """Write a screenshot into the documents, with a palette and with the words that `test_page.py` compares."""
    browser.save_screenshot(place / "large.png", height)
    about = PngImagePlugin.PngInfo()
    about.add_text("Description", said)
    with Image.open(place / "large.png") as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(ROOT / "docs" / "images" / f"{name}.png", optimize=True, pnginfo=about)


@pytest.mark.parametrize("name", SHOTS)
def test_screenshots_for_the_documents(browser: Browser, tmp_path: Path, monkeypatch, name: str):
    run, width, is_dark, height = SHOTS[name]
    monkeypatch.chdir(ROOT)  # the page names the run by a relative path
    page = save_page([load_result(Path("results") / run)], tmp_path / "page.html")
    browser.open(f"file://{page}", width, dark=is_dark)
    top = browser.evaluate("document.querySelector('.next, figure').getBoundingClientRect().top")
    assert top < 900 and browser.find_complaints() == []  # the first screen has the picture or the next step
    if os.environ.get("PACELINE_UPDATE_SCREENSHOTS"):
        save_picture(browser, name, height, describe_page(page.read_text()), tmp_path)


@pytest.mark.slow
def test_a_screenshot_of_a_live_page(browser: Browser, tmp_path: Path, monkeypatch):
    source = RESULTS / "neoverse-n1-2-cores" / "train-cifar10-2-ranks"
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/20261118-090000-train")
    folder.mkdir(parents=True)
    rows = gzip.decompress((source / "metrics.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    (folder / "metrics.jsonl").write_bytes(b"".join(rows[: len(rows) // 2]))
    handle = lock_folder(folder)
    monkeypatch.setattr(watching, "_SILENT_S", 1e9)
    try:
        with watching.serve(watching.Follower(folder)) as server:
            browser.open(server.address, 1120)
            said = browser.evaluate("document.getElementById('status').textContent")
            assert said.startswith("Running: step") and browser.find_complaints() == []
            if os.environ.get("PACELINE_UPDATE_SCREENSHOTS"):
                save_picture(browser, "report-live", 1350, said, tmp_path)
    finally:
        os.close(handle)


@pytest.mark.parametrize("name", ["large", "scale-ranks", "tune", "hostile"])
def test_accessibility(browser: Browser, pages: Callable[[str], Path], name: str):
    script = os.environ.get("PACELINE_AXE", "")
    if not Path(script).is_file():
        pytest.skip("needs axe-core: npm pack axe-core, and its axe.min.js in PACELINE_AXE")
    for dark in (False, True):
        browser.open(f"file://{pages(name)}", 390 if dark else 1440, dark)
        browser.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        browser.evaluate(Path(script).read_text() + ";1")
        found = browser.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.impact, v.nodes[0].html]))")
        assert [one for one in found if one[1] in ("serious", "critical")] == []
