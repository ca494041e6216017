"""One list of columns for people and programs; no width truncates a key or a number."""

import csv
import io
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from paceline.records.samples import Ratio
from paceline.report.table import Column, Table, ratio_columns


@dataclass
class Row:
    name: str = "alpha"
    kind: str = "cpu"
    size: int = 2**20
    time_s: float | None = 0.0123456
    rate: float | None = 2.5e9
    words: str = "some text that explains the row at length, so that it must be wrapped on a narrow terminal"


COLUMNS = (
    Column("name", lambda r: r.name, key="name", is_key=True),
    Column("kind", lambda r: r.kind, key="kind"),
    Column("size", lambda r: r.size, "bytes", "num_bytes", is_key=True),
    Column("count", lambda r: r.size // 4, "count", priority=-2),
    Column("time", lambda r: r.time_s, "ms", "time_s", priority=2),
    Column("rate", lambda r: r.rate, "GB/s", "rate_gbps", priority=1),
    Column("share", lambda r: None if r.time_s is None else 0.25, "percent", "share"),
    Column(None, lambda r: r.time_s and r.time_s * 2, key="double_s"),
    Column("nothing", lambda r: None, "ms", "nothing_s"),
)


def build(*rows, **fields):
    return Table("table", "title", COLUMNS, rows, **fields)


@pytest.mark.parametrize(
    ("path", "value"),
    [("a.b", (1, 2)), ("a.b.1", 2), ("named.x.b.0", 1), ("named.y.b.0", None), ("none.b", None)],
)
def test_a_path_goes_through_attributes_items_and_keys(path, value):
    inner = SimpleNamespace(b=(1, 2))
    row = SimpleNamespace(a=inner, named={"x": inner}, none=None)
    assert Column("", path).find(row) == value


def test_json_and_csv_hold_the_raw_values_under_their_keys():
    table = build(Row(), Row(time_s=None))
    rows = table.rows_json()
    assert rows[0] == {
        "name": "alpha", "kind": "cpu", "num_bytes": 2**20, "time_s": 0.0123456, "rate_gbps": 2.5, "share": 0.25,
        "double_s": 0.0246912, "nothing_s": None,
    }  # fmt: skip
    assert rows[1]["time_s"] is None and rows[1]["double_s"] is None
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert list(lines[0]) == list(rows[0])
    assert (float(lines[0]["time_s"]), lines[1]["time_s"]) == (0.0123456, "")


def test_non_finite_values_are_null_for_programs_and_empty_for_people():
    table = build(Row(time_s=float("inf")), Row(time_s=float("nan")), Row())
    assert [row["time_s"] for row in table.rows_json()] == [None, None, 0.0123456]
    assert "inf" not in table.markdown() and "nan" not in table.terminal()


def test_markdown_has_every_non_empty_column_for_people():
    header, rule, row = build(Row(name="a|b")).markdown().splitlines()
    assert header == "| name | kind | size | count | time (ms) | rate (GB/s) | share |"
    assert rule == "|---|---|--:|--:|--:|--:|--:|"
    assert row == "| a\\|b | cpu | 1 MiB | 262 144 | 12.3 | 2.50 | 25% |"


def test_html_escapes_what_it_shows():
    text = build(Row(name="<b>")).html()
    assert "&lt;b&gt;" in text and "<b>" not in text and "12.3" in text


def find_header(text):
    return re.split(r"\s{2,}", text.splitlines()[1].strip())


def test_a_value_common_to_all_rows_is_in_the_title():
    text = build(Row("one"), Row("two")).terminal(None)
    assert text.splitlines()[0] == "title (cpu)" and "kind" not in text
    text = build(Row("one"), Row("two", kind="cuda")).terminal(None)
    assert text.splitlines()[0] == "title" and "kind" in find_header(text)


def test_a_narrow_terminal_drops_columns_by_priority_and_says_which_and_how_to_see_them():
    rows = [Row("one"), Row("two")]
    everything = find_header(build(*rows).terminal(None))
    assert everything == ["name", "size", "count", "time (ms)", "rate (GB/s)", "share"]
    seen = []
    for width in range(80, 20, -1):
        text = build(*rows).terminal(width)
        header = find_header(text)
        assert {"name", "size"} <= set(header)
        dropped = [name for name in everything if name not in header]
        if dropped and dropped not in seen:
            seen.append(dropped)
        note = text[text.index("(not shown") :].replace("\n", " ") if dropped else ""
        assert all(name.split(" (")[0] in note for name in dropped) and ("--details" in note or not dropped)
    assert seen == [["count"], ["count", "share"], ["count", "rate (GB/s)", "share"],
                    ["count", "time (ms)", "rate (GB/s)", "share"]]  # fmt: skip


@pytest.mark.parametrize("width", [80, 120, 60, 40, 20])
def test_no_line_is_wider_than_the_terminal_and_no_key_or_number_is_cut(width):
    rows = [Row("a rather long name of a row", time_s=1234.5), Row("b", size=3 * 2**40, rate=1e12)]
    text = build(*rows).terminal(width)
    assert all(len(line) <= width for line in text.splitlines())
    for row in rows:
        for column in (COLUMNS[0], COLUMNS[2]):
            words = column.cell(row).split() if width < 40 else [column.cell(row)]
            assert all(word in text for word in words)
    assert "…" not in text


def test_keys_that_do_not_fit_side_by_side_are_stacked_with_everything_else():
    rows = [Row("a name of forty characters, or even more"), Row("b", kind="cuda")]
    text = build(*rows).terminal(40)
    assert "size: 1 MiB" in text and "time (ms): 12.3" in text and "kind: cuda" in text and "--details" not in text


def test_words_are_wrapped_under_their_column_and_never_dropped_before_they_must():
    columns = (*COLUMNS[:1], Column("found", lambda r: r.words, "words"))
    text = Table("t", "", columns, [Row("a"), Row("b", words="short")]).terminal(50)
    assert max(map(len, text.splitlines())) <= 50
    starts = {line.index(word) for word in ("found", "some", "short") for line in text.splitlines() if word in line}
    assert len(starts) == 1
    assert " ".join(text.split()).count("wrapped on a narrow terminal") == 1


def test_a_pivot_has_the_same_numbers_as_a_matrix():
    columns = (
        *COLUMNS[:2], Column("ranks", lambda r: r.size, "number", "num_ranks"), *COLUMNS[4:6], COLUMNS[-1],
    )  # fmt: skip
    rows = [Row("a", "x", 2, 0.1), Row("b", "x", 2, 0.2), Row("a", "x", 4, 0.3), Row("b", "y", 4, 0.4, None)]
    table = Table("t", "title", columns, rows)
    matrix = table.pivot(("name", "kind"), "ranks", ("time", "rate", "nothing"))
    assert matrix.markdown().splitlines() == [
        "| name | kind | 2 ranks: time (ms) | 2 ranks: rate (GB/s) | 4 ranks: time (ms) | 4 ranks: rate (GB/s) |",
        "|---|---|--:|--:|--:|--:|",
        "| a | x | 100 | 2.50 | 300 | 2.50 |",
        "| b | x | 200 | 2.50 |  |  |",
        "| b | y |  |  | 400 |  |",
    ]
    assert next(csv.DictReader(io.StringIO(matrix.csv()))) == {
        "name": "a", "kind": "x", "time_s_2_ranks": "0.1", "rate_gbps_2_ranks": "2.5", "nothing_s_2_ranks": "",
        "time_s_4_ranks": "0.3", "rate_gbps_4_ranks": "2.5", "nothing_s_4_ranks": "",
    }  # fmt: skip
    by_words = table.pivot(("name",), "kind", ("time",))
    assert by_words.markdown().splitlines()[0] == "| name | x: time (ms) | y: time (ms) |"


def test_hidden_rows_are_only_in_the_files():
    table = build(Row("one"), Row("two"), shown=[])
    assert table.terminal() == "" and len(table.rows_json()) == 2 and "two" in table.markdown()
    assert "two" not in build(Row("one"), Row("two"), shown=[Row("one")]).terminal()


def test_a_table_with_ratios_explains_their_marks_below():
    columns = (*COLUMNS, *ratio_columns("/ torch", "ratio", "ratio"))
    row = SimpleNamespace(**vars(Row()), ratio=Ratio(1.5, None))
    text = Table("table", "title", columns, [row]).terminal(None)
    assert "1.500 ?" in text and "? a single repetition" in text.splitlines()[-1]
    assert "repetition" not in build(Row()).terminal()


def test_a_table_without_rows_has_a_header_in_files():
    table = build()
    assert table.terminal() == "" and table.rows_json() == [] and len(table.markdown().splitlines()) == 2
    assert table.csv().startswith("name,kind,")


def test_a_table_is_one_in_a_notebook_and_names_stay_text():
    shown = build(Row(name="<b>alpha"))._repr_html_()
    assert shown.startswith("<table>") and "&lt;b&gt;alpha" in shown and "12.3" in shown and "<b>" not in shown


def test_hidden_rows_are_counted():
    table = Table("t", "", [Column("n", lambda n: n, "number", "n", is_key=True)], range(30), shown=range(20, 30))
    assert "20 of 30 rows" in table.terminal(80) and "20 of 30" not in table.html() and len(table.rows_json()) == 30
