"""The page of a run: verdict, figures, numbers, and names that contain markup."""

from __future__ import annotations

import base64
import gzip
import html.parser
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from paceline.errors import ConfigError
from paceline.records.samples import compare_medians
from paceline.records.store import Run, load_run
from paceline.report.compared import ComparisonResult, TrainComparisonResult, compare_results
from paceline.report.page import PAGE_FILE, render_markdown, render_page, save_page, split_verdict
from paceline.report.result import build_result, load_result
from paceline.verbs.report import save_report
from tests.unit.made_runs import PLANTED, Job, make_folder, make_result, make_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
HOSTILE = '</script><img src=x onerror="window.hacked=1">&amp;\'"<b>'


class Reader(html.parser.HTMLParser):
    """Tags with their attributes and the visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._hidden = ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._hidden = tag if tag in ("script", "style", "title") else ""

    def handle_endtag(self, tag):
        self._hidden = ""

    def handle_data(self, text):
        if not self._hidden:
            self.words.append(text)


def read_data(page: str):
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def list_points(data, figure: str, **wanted):
    """The coordinates of the marks with these fields."""
    (found,) = (one for one in data["figures"] if one["name"] == figure)
    marks = [m for p in found["panels"] for m in p["marks"] if all(m.get(k) == v for k, v in wanted.items())]
    return [list(zip(data["lists"][m["x"]], data["lists"][m["y"]], strict=True)) for m in marks]


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_sentence_names_the_planted_cause(name):
    kind, job = PLANTED[name]
    result = make_result(make_rows(job))
    words = {"data": "Data", "late rank": "late rank", "buckets": "bucket size", "batch": "batch", "network": "Exposed"}
    verdict, rest = split_verdict(result.headline)
    assert result.observed is not None and result.observed.bottleneck.kind == kind
    assert words[kind] in verdict.partition(" is the bottleneck")[0] and "loss" in rest
    assert "To fix it, " in rest


def test_a_healthy_run_and_one_without_messages_have_no_bottleneck():
    alone = [{key: value for key, value in row.items() if key != "messages"} for row in make_rows(ranks=1)]
    for result in (make_result(make_rows()), make_result(alone, ranks=1)):
        assert split_verdict(result.headline)[0].startswith("Healthy")


def test_a_late_rank_is_found_over_all_steps_not_by_the_recorded_ones_alone():
    rows = make_rows(Job(late_s=0.05))
    for number, row in enumerate(rows):  # the ranks are late alternately
        if number % 2:
            for times in row["ranks"].values():
                times.reverse()
    assert "late rank" not in make_result(rows).headline


def test_figures_have_the_numbers_of_the_rows_to_the_microsecond():
    rows = make_rows(ranks=3)
    data = read_data(render_page([make_result(rows, ranks=3)]))
    (losses,) = list_points(data, "training", gid="loss")
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    for rank in range(3):
        (times,) = list_points(data, "ranks", gid=f"ms:ranks.exposed_comm_s.{rank}")
        assert times == [(row["step"], pytest.approx(1e3 * row["ranks"]["exposed_comm_s"][rank])) for row in rows]


def test_lines_bars_areas_logarithms_and_second_axes_are_read():
    data = read_data(render_page([load_result(RESULTS / "neoverse-n1-2-cores" / "scale-ranks")]))
    panels = [panel for figure in data["figures"] for panel in figure["panels"]]
    marks = [mark for panel in panels for mark in panel["marks"]]
    assert {mark["kind"] for mark in marks} == {"line", "area", "text"} and any("log" in p["x"] for p in panels)
    assert {"compute (measured)", "ideal", "paceline on shm (measured)"} <= {mark.get("label") for mark in marks}
    data = read_data(render_page([load_result(RESULTS / "h200-16-cores" / "train-cifar10-resnet18")]))
    (accuracy,) = list_points(data, "training", right=1)
    assert 0 < accuracy[0][1] <= 100 and data["figures"][0]["panels"][0]["right"]["label"] == "test accuracy (%)"


# -- every number of the page is in the records ------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?![\w]*\.\w)")
_SCALES = (1.0, 1e3, 1e6, 1e2, 1e-9, 8e-9, 1 / 2**10, 1 / 2**20, 1 / 2**30, 1e-6, 1e-3)


def collect(document) -> list[float]:
    """All numbers in a document, including those inside words."""
    if isinstance(document, bool) or document is None:
        return []
    if isinstance(document, int | float):
        return [float(document)]
    if isinstance(document, str):
        return [float(found.replace(",", "")) for found in _NUMBER.findall(document)]
    if not isinstance(document, dict | list | tuple):
        return collect(str(document))
    return [v for each in (document.values() if isinstance(document, dict) else document) for v in collect(each)]


def find_strangers(page: str, result) -> list[str]:
    """Numbers on the page that are neither in the records nor derived from them by the result."""
    tables = {t.name: [[c.find(row) for c in t.columns] for row in t.rows] for t in result.page_tables()}
    environment = [str(result.run.environment), result.run.created, result.machine]
    known = collect([result.to_json(), tables, result.config, getattr(result, "rows", []), environment])
    known += collect([getattr(table, "title", "") for table in result.page_tables()])
    known += [len(rows) for rows in tables.values()] + [90, 95, len(result.warnings)]
    if (observed := getattr(result, "observed", None)) is not None:
        known += collect([observed.to_json(), observed.findings])
    strangers = []
    for word in _NUMBER.findall(re.sub(r"(?<=\d) (?=\d{3}\b)", "", "\n".join(Reader(page).words))):
        value, digits = float(word.replace(",", "")), len(word.partition(".")[2])
        slack = 0.51 * 10.0**-digits
        if not any(abs(abs(one) * scale - abs(value)) <= slack for one in known for scale in _SCALES):
            strangers.append(word)
    return strangers


@pytest.mark.parametrize("job", [Job(), Job(late_s=0.05)], ids=["healthy", "late"])
def test_every_number_of_a_training_page_is_in_its_records(job):
    result = make_result(make_rows(job))
    page = render_page([result])
    assert len(_NUMBER.findall("\n".join(Reader(page).words))) > 40
    assert find_strangers(page, result) == []
    assert find_strangers(page.replace("</h1>", " by 77.43 ms</h1>"), result) == ["77.43"]


@pytest.mark.parametrize("run", ["allreduce-2-ranks", "wrappers-2-ranks", "phases-gpt2-mini", "scale-batch-cpu"])
def test_every_number_of_a_measured_page_is_in_its_records(run):
    result = load_result(RESULTS / "neoverse-n1-2-cores" / run)
    assert find_strangers(render_page([result]), result) == []


# -- names -------------------------------------------------------------------------------------------------------------


def expect_inert(page: str) -> None:
    reader = Reader(page)
    allowed = {"html", "head", "meta", "link", "title", "style", "body", "main", "section", "h1", "h2", "p", "ul", "li",
               "div", "figure", "figcaption", "b", "a", "table", "caption", "tr", "th", "td", "code", "details",
               "summary", "dl", "dt", "dd", "noscript", "script", "button"}  # fmt: skip
    assert {tag for tag, _ in reader.tags} <= allowed
    assert [dict(about) for tag, about in reader.tags if tag == "script"] == [{"type": "text/plain", "id": "data"}, {}]
    assert not [about for _, about in reader.tags if any(name.startswith("on") for name in about)]
    links = [about["href"] for tag, about in reader.tags if tag == "a"]
    assert all(link.startswith(("data:text/csv;base64,", "#", "trace")) for link in links)


def test_names_that_are_markup_stay_text(tmp_path):
    folder = make_folder(tmp_path / "<script>alert(1)<-script>", make_rows(), model=HOSTILE, wrapper=HOSTILE)
    (folder / "trace.json.gz").touch()
    page = save_page([load_result(folder)], folder).read_text()
    expect_inert(page)
    assert "alert(1)" in page and "<b>'" not in page and HOSTILE in str(read_data(page)["figures"][0]["title"])
    run = load_run(RESULTS / "neoverse-n1-2-cores" / "wrappers-2-ranks")
    records = tuple(type(r)(**{**vars(r), "model": HOSTILE}) for r in run.records)
    expect_inert(render_page([build_result(Run(run.verb, run.config, run.environment, records, (HOSTILE,)))]))


def test_only_the_script_of_the_page_may_run():
    page = render_page([make_result(make_rows())])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "http" not in policy
    assert not re.findall(r'(?:src|href)="https?:', page)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_page_is_replaced_and_another_file_is_not(tmp_path):
    folder = make_folder(tmp_path / "run", make_rows())
    result = save_report([folder])
    assert result.page == folder / PAGE_FILE and f"page: {folder / PAGE_FILE}" in result.text()
    save_report([folder])
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        save_report([folder], page=other)
    assert caught.value.code == "exists" and other.read_text() == "mine"
    with pytest.raises(ConfigError):
        save_report([])


@pytest.mark.slow
def test_a_page_of_many_steps_and_ranks_is_small():
    rows = make_rows(steps=10_000, ranks=8, recorded=range(2, 18))
    page = render_page([make_result(rows, ranks=8)])
    assert len(page) < 2_000_000
    assert [len(line) for line in list_points(read_data(page), "ranks", gid="ms:ranks.step_s.7")] == [10_000]


# -- screenshots in the documents --------------------------------------------------------------------------------------

# For each picture: the run, the width, whether the page is dark, and the height that is shown.
SHOTS = {
    "report-profile": ("xeon-2-cores/profile-text-classifier", 1120, False, 1350),
    "report-profile-phone": ("xeon-2-cores/profile-text-classifier", 390, True, 1350),
    "report-allreduce": ("neoverse-n1-2-cores/allreduce", 1120, False, 1350),
}


def describe_page(page: str) -> str:
    """The headline and the titles of the figures, which a screenshot stores."""
    return "\n".join(
        re.sub("<[^>]*>", "", found) for found in re.findall("<(?:h1|figcaption).*?</(?:h1|figcaption)>", page)
    )


@pytest.mark.parametrize("name", SHOTS)
def test_a_screenshot_in_the_documents_shows_the_current_page(name):
    with Image.open(ROOT / "docs" / "images" / f"{name}.png") as picture:
        shown = picture.text["Description"]
    assert shown == describe_page(render_page([load_result(RESULTS / SHOTS[name][0])]))


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_medians_of_two_runs_have_an_interval_and_one_repetition_has_none():
    ratio = compare_medians([2.0, 2.2, 2.1, 1.9, 2.0] * 8, [1.0, 1.1, 0.9, 1.0, 1.0] * 8)
    assert ratio.value == pytest.approx(2.0) and ratio.noise is not None and 0 < ratio.noise < 0.3 and ratio.is_clear
    assert compare_medians([2.0], [1.0]).noise is None


def test_two_training_runs_are_compared_with_their_uncertainty(tmp_path):
    fast, slow = make_rows(seed=1), make_rows(Job(wait_s=0.05), seed=2)
    folders = [make_folder(tmp_path / name, rows) for name, rows in (("fast", fast), ("slow", slow))]
    result = save_report(folders, page=tmp_path / "both.html")
    assert isinstance(result, TrainComparisonResult)
    rows = {row.name: row.change for row in result.numbers}
    expected = sorted(row["step_s"] for row in slow)[20] / sorted(row["step_s"] for row in fast)[20]
    assert rows["step"].value == pytest.approx(expected, rel=0.01) and rows["step"].is_clear
    assert not rows["test accuracy"].is_clear and rows["test accuracy"].noise == pytest.approx(0.08, abs=0.01)
    page = (tmp_path / "both.html").read_text()
    assert "more than their noise" in page and "±" in page and page.count("<section>") == 3
    assert [figure["name"] for figure in read_data(page)["figures"]].count("ranks") == 2


def test_runs_of_one_kind_are_compared_record_by_record(tmp_path):
    runs = [RESULTS / "neoverse-n1-2-cores" / name for name in ("allreduce-2-ranks", "allreduce")]
    result = save_report(runs, page=tmp_path / "both.html")
    assert isinstance(result, ComparisonResult) and len({row.name for row in result.rows}) == len(result.rows) > 10
    same = compare_results([load_result(runs[0])] * 2, result.run.environment)
    assert {row.ratio for row in same.rows} == {1.0} and not any(row.change.is_clear for row in same.rows)


def test_every_compared_record_has_a_name_even_if_all_its_fields_are_shared():
    folder = RESULTS / "neoverse-n1-2-cores"
    runs = [load_result(folder / f"layers-cnn-{size}") for size in ("large", "medium")]
    names = [row.name for row in compare_results(runs, runs[0].run.environment).rows]
    assert len(set(names)) == len(names) == 4 and "layer profile" in names


def test_two_tunings_differ_in_their_settings_and_not_in_what_follows_from_them(build_environment):
    folder = RESULTS / "neoverse-n1-2-cores" / "tuning"
    runs = [load_result(folder / name) for name in ("gpt2-mini-gloo", "gpt2-mini-1Gb-8-ranks-torch")]
    result = compare_results(runs, build_environment())
    assert {"wrapper", "network", "network_ranks"} <= set(result.differences)
    assert not {"tune", "predictions", "gradients", "default_plan"} & set(result.differences)
    assert " ".join(result.table().terminal().split()).endswith("The runs were not interleaved.")


def test_runs_that_share_no_number_still_make_a_page(tmp_path):
    runs = [RESULTS / "neoverse-n1-2-cores" / f"layers-{name}" for name in ("cnn-tiny", "mlp")]
    result = save_report(runs, page=tmp_path / "both.html")
    assert isinstance(result, ComparisonResult) and result.rows == [] and "model" in result.differences
    assert (tmp_path / "both.html").read_text().count("<section>") == 3


def test_markdown_has_the_answer_the_main_table_and_the_rest_folded():
    result = load_result(RESULTS / "neoverse-n1-2-cores/tune-1Gb-link-torch")
    text = render_markdown([result])
    assert len(result.tables()) > 1
    visible, _, folded = text.partition("<details>")
    assert text.startswith(f"### {split_verdict(result.headline)[0]}\n")
    assert result.table().markdown().rstrip() in visible
    others = [table for table in result.tables()[1:] if table.rows]
    assert all(table.markdown().rstrip() in folded and table.markdown() not in visible for table in others)
    assert text.count("<details>") == text.count("</details>")
