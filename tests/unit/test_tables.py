"""Tables of records, for the terminal, as Markdown, as CSV and as JSON rows."""

import csv
import io
import json

import pytest
import rich.console

from paceline.records import Samples, Summary
from paceline.records.bounds import MemoryBounds
from paceline.report import tables

ROW_KEYS = {
    "collective", "backend", "device", "world_size", "num_bytes", "dtype", "median_s", "p10_s", "p90_s", "algbw_gbps",
    "busbw_gbps", "nwrong", "iters", "memory", "memory_bound_s", "fraction_of_memory",
}  # fmt: skip


@pytest.fixture
def record(build_collective):
    samples = Samples(
        seconds=tuple((t / 1e3,) * 4 for t in range(11)), arrivals_s=((0.0, 0.0, 0.001, 0.0),) * 11
    )  # median 5 ms, p10 1 ms, p90 9 ms
    return build_collective(num_bytes=10 * 2**20, world_size=4, timing=samples, num_wrong=3)


@pytest.fixture
def imported(build_collective):
    return build_collective(
        timing=Summary(mean_s=0.002), num_wrong=None, num_checked=None, source="imported", note="somebody"
    )


def test_a_json_row_has_every_key_in_plain_values(record):
    row = tables.collective_row(record)
    assert set(row) >= ROW_KEYS
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["collective"], row["backend"], row["device"], row["dtype"]) == ("all_reduce", "gloo", "cpu", "float32")
    assert (row["world_size"], row["num_bytes"], row["iters"], row["nwrong"]) == (4, 10 * 2**20, 11, 3)
    assert (row["median_s"], row["p10_s"], row["p90_s"]) == pytest.approx((0.005, 0.001, 0.009))
    assert row["algbw_gbps"] == pytest.approx(10 * 2**20 / 0.005 / 1e9)
    assert row["busbw_gbps"] == pytest.approx(1.5 * row["algbw_gbps"])
    assert (row["skew_s"], row["source"]) == (0.001, "measured")


def test_a_json_row_of_an_import_says_what_nobody_knows(imported):
    row = tables.collective_row(imported)
    assert set(row) >= ROW_KEYS
    assert [name for name, value in row.items() if value is None] == [
        "p10_s", "p90_s", "nwrong", "iters", "skew_s", "memory_bound_s", "fraction_of_memory",
    ]  # fmt: skip
    assert (row["median_s"], row["source"]) == (0.002, "imported")


def test_a_json_row_of_chunks(build_chunks, build_samples):
    row = tables.chunk_row(build_chunks(total_bytes=4000, chunk_bytes=1500, timing=build_samples(2e-6)))
    assert set(row) >= (ROW_KEYS - {"collective", "num_bytes", "memory", "memory_bound_s", "fraction_of_memory"}) | {
        "total_bytes",
        "chunk_bytes",
        "num_messages",
    }
    assert (row["num_messages"], row["algbw_gbps"], row["busbw_gbps"]) == (3, pytest.approx(2.0), pytest.approx(2.0))


def test_csv_keeps_full_precision_and_the_order_of_the_keys(build_collective, build_samples):
    rows = [tables.collective_row(build_collective(timing=build_samples(1 / 3), num_bytes=n)) for n in (4, 8)]
    lines = list(csv.DictReader(io.StringIO(tables.render_csv(rows))))
    assert list(lines[0]) == list(rows[0])
    assert [int(line["num_bytes"]) for line in lines] == [4, 8]
    assert float(lines[0]["median_s"]) == 1 / 3
    assert lines[0]["skew_s"] == ""


def _cells(markdown):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]


def test_markdown_keeps_every_column(record, imported):
    header, rule, *rows = _cells(tables.render_markdown(tables.collective_table, [record, imported]))
    assert header == [column.name for column in tables.collective_table]
    assert rule == ["--:" if column.is_number else "---" for column in tables.collective_table]
    measured, published = (dict(zip(header, row, strict=True)) for row in rows)
    assert measured == {
        "backend": "gloo", "device": "cpu", "ranks": "4", "size": "10 MiB", "count": "2 621 440", "type": "float32",
        "redop": "sum", "time (ms)": "5.0000", "p10 (ms)": "1.0000", "p90 (ms)": "9.0000", "algbw (GB/s)": "2.10",
        "busbw (GB/s)": "3.15", "#wrong": "3", "iters": "11", "source": "measured",
    }  # fmt: skip
    assert [name for name, cell in published.items() if not cell] == ["p10 (ms)", "p90 (ms)", "#wrong", "iters"]
    assert published["source"] == "imported"


def test_markdown_of_chunks(build_chunks, build_samples):
    record = build_chunks(total_bytes=4 * 10**6, chunk_bytes=40_000, timing=build_samples(0.004))
    header, _, row = _cells(tables.render_markdown(tables.chunk_table, [record]))
    cells = dict(zip(header, row, strict=True))
    assert (cells["elements per all-reduce"], cells["messages"]) == ("10 000", "100")
    assert (cells["total time (ms)"], cells["algbw (GB/s)"], cells["source"]) == ("4.0000", "1.00", "measured")


def test_a_comparison_shows_both_sides_and_leaves_gaps(build_collective, build_samples, imported):
    here = build_collective(timing=build_samples(0.001))
    header, _, *rows = _cells(
        tables.render_markdown(tables.compare_table, [(here, imported), (here, None), (None, imported)])
    )
    both, ours, theirs = (dict(zip(header, row, strict=True)) for row in rows)
    assert (both["here (ms)"], both["there (ms)"], both["here / there"]) == ("1.0000", "2.0000", "0.50")
    assert (both["there is"], both["from"]) == ("imported, mean", "somebody")
    assert (ours["there (ms)"], ours["here / there"], ours["there is"], ours["from"]) == ("", "", "", "")
    assert (theirs["here (ms)"], theirs["here busbw (GB/s)"], theirs["size"]) == ("", "", "1 MiB")


def _names(table):
    return [column.header for column in table.columns]


def test_a_wide_terminal_shows_every_number_and_tells_constant_words_once(record):
    table = tables.render_terminal(tables.collective_table, [record, record], "all_reduce", 200)
    assert _names(table) == [column.name for column in tables.collective_table if column.is_number]
    assert table.title == "all_reduce (gloo, cpu, float32, sum, measured)"
    assert table.row_count == 2


def test_words_that_differ_stay_columns(record, imported):
    table = tables.render_terminal(tables.collective_table, [record, imported], "all_reduce", 200)
    assert _names(table)[-1] == "source"
    assert table.title == "all_reduce (gloo, cpu, float32, sum)"


def test_constant_words_that_are_empty_are_not_told(build_collective):
    table = tables.render_terminal(tables.compare_table, [(build_collective(), None)], "beside", 200)
    assert table.title == "beside (gloo)"


def test_a_narrow_terminal_drops_the_optional_columns_from_the_right_until_it_fits(record):
    optional = [column.name for column in tables.collective_table if column.is_optional]
    everything = _names(tables.render_terminal(tables.collective_table, [record], "t", 200))
    seen = set()
    for width in range(200, 10, -1):
        names = _names(tables.render_terminal(tables.collective_table, [record], "t", width))
        dropped = [name for name in everything if name not in names]
        assert dropped == optional[len(optional) - len(dropped) :]
        seen.add(len(dropped))
    assert seen == set(range(len(optional) + 1))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_what_is_left_fits_the_terminal_uncut(record, width):
    table = tables.render_terminal(tables.collective_table, [record], "t", width)
    console = rich.console.Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    assert "…" not in text
    assert all(name in text for name in _names(table))


def test_a_table_without_records_has_a_header_alone():
    table = tables.render_terminal(tables.collective_table, [], "nothing", 200)
    assert (table.title, table.row_count) == ("nothing", 0)
    assert len(tables.render_markdown(tables.collective_table, []).splitlines()) == 2


@pytest.fixture
def bounded(build_collective, build_pass, build_samples):
    """gloo in 1 ms and paceline's shared memory in 0.25 ms, where memory allows 0.2 ms."""
    records = [
        build_collective(),
        build_collective(backend="paceline", memory="shared", timing=build_samples(*(2.5e-4,) * 10)),
    ]
    return records, MemoryBounds.of([build_pass("add", 3e-4), build_pass("copy", 2e-4)])


def test_a_row_tells_its_memory_and_what_memory_allows(bounded):
    records, bounds = bounded
    rows = [tables.collective_row(record, bounds) for record in records]
    assert [(row["backend"], row["memory"]) for row in rows] == [("gloo", "ordinary"), ("paceline", "shared")]
    assert [row["fraction_of_memory"] for row in rows] == pytest.approx([0.2, 0.8])
    assert [row["memory_bound_s"] for row in rows] == pytest.approx([2e-4, 2e-4])
    lines = list(csv.DictReader(io.StringIO(tables.render_csv(rows))))
    assert [(line["memory"], float(line["fraction_of_memory"])) for line in lines] == [
        ("ordinary", pytest.approx(0.2)), ("shared", pytest.approx(0.8)),
    ]  # fmt: skip


def test_the_columns_of_memory_appear_where_there_is_something_to_tell(bounded):
    records, bounds = bounded
    header, _, *rows = _cells(tables.render_markdown(tables.choose_columns(records, bounds), records))
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["memory"], row["bound (ms)"], row["of memory"]) for row in cells] == [
        ("ordinary", "0.2000", "20%"), ("shared", "0.2000", "80%"),
    ]  # fmt: skip
    plain, nothing = list(tables.collective_table), MemoryBounds(())
    assert list(tables.choose_columns(records[:1], nothing)) == plain
    assert len(tables.choose_columns(records, nothing)) == len(plain) + 1
    assert len(tables.choose_columns(records[:1], bounds)) == len(plain) + 2
    alone = tables.render_terminal(tables.choose_columns(records[1:], nothing), records[1:], "all_reduce", 200)
    assert alone.title == "all_reduce (paceline, shared, cpu, float32, sum, measured)"


def test_a_comparison_names_the_memory_that_is_not_ordinary(bounded):
    (here, ours), _ = bounded
    header, _, *rows = _cells(tables.render_markdown(tables.compare_table, [(here, None), (ours, None)]))
    assert [row[header.index("backend")] for row in rows] == ["gloo", "paceline (shared)"]
