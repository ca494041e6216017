"""Imported tables become records and tables again; errors in damaged files name the line."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.records import LayerSizeRecord, LayerTimeRecord, Samples, Summary
from paceline.records.exchange import (
    export_allreduce_times,
    export_layer_sizes,
    export_layer_times,
    load_layer_sizes,
    load_layer_times,
    load_table,
)
from paceline.records.kinds import MemoryBounds, record_to_json
from paceline.records.store import Run, save_run
from paceline.report.result import load_result
from paceline.report.sweeps import build_columns
from paceline.report.table import Table
from paceline.verbs.report import save_records

RESULTS = Path(__file__).parents[2] / "results" / "neoverse-n1-2-cores"
ALLREDUCE = "backend,world_size,total_elements,total_bytes,average_time,stdev_time\n"
PUBLISHED = "source,backend,world_size,nodes,hardware,interconnect,bytes,time_s,std_s,stat,note\n"
SIZES = ",Name,No. Params\n"
TIMES = "Name,min,max,mean,std,median\n"
DOCUMENT = """# A report

| Model | Size |
|---|---|
| tiny | 1MB |

Results were as follows:

| Backend      | Processes | Size   | Avg Time (ms) | Effective Bandwidth (GB/s) |
|:-------------|----------:|--------|---------------|----------------------------|
| gloo (CPU)   | 2         | 1MB    | 1.5           | 1.92                       |
| nccl   (GPU) | 4         | 1024MB | 250           | 3.04                       |

| Backend | Processes | Size | Avg Time (ms) |
|---|---|---|---|
| mpi | 2 | 1MB | 7 |
"""


def write_csv(records):
    return Table("", "", build_columns(records, MemoryBounds(())), records).csv()


@pytest.fixture
def write(tmp_path):
    def write(text, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def _labels(record):
    return record.backend, record.device, record.world_size, record.num_bytes, record.dtype, record.timing


def test_allreduce_times_are_imported(write):
    path = write(ALLREDUCE + "nccl,8,1,4,0.002,0.0001\ngloo,2,100,800,0.003,0.0\nmpi,2,0,10,1.0,0.0\n")
    records = load_table(path)
    assert [_labels(r) for r in records] == [
        ("nccl", "cuda", 8, 4, "float32", Summary(mean_s=0.002, stdev_s=0.0001)),
        ("gloo", "cpu", 2, 800, "float64", Summary(mean_s=0.003, stdev_s=0.0)),
        ("mpi", "cpu", 2, 10, "unknown", Summary(mean_s=1.0, stdev_s=0.0)),
    ]
    assert {(r.source, r.collective, r.op) for r in records} == {("imported", "all_reduce", "sum")}


def test_published_times_are_imported_with_their_statistic_and_source(write):
    path = write(
        PUBLISHED
        + "somebody,gloo,2,1,\"a CPU, old\",loopback,1048576,0.001,,mean,\n"
        + "another,nccl-tests,8,1,GPUs,NVLink,8,4e-05,1e-06,median of 20,rounded\n"
        + "third,gloo-cuda,2,1,GPU,PCIe,16,0.5,,mean,\n"
    )  # fmt: skip
    records = load_table(path)
    assert [_labels(r) for r in records] == [
        ("gloo", "cpu", 2, 1048576, "unknown", Summary(mean_s=0.001)),
        ("nccl", "cuda", 8, 8, "unknown", Summary(median_s=4e-05, stdev_s=1e-06)),
        ("gloo", "cuda", 2, 16, "unknown", Summary(mean_s=0.5)),
    ]
    assert [(r.source, r.note) for r in records] == [("imported", s) for s in ("somebody", "another", "third")]


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_fine(write):
    records = load_table(write(("\ufeff" + ALLREDUCE + "\ngloo,2,1,4,0.5,0\n\n").replace("\n", "\r\n")))
    assert [_labels(r) for r in records] == [("gloo", "cpu", 2, 4, "float32", Summary(mean_s=0.5, stdev_s=0.0))]


@pytest.mark.parametrize("name", ["report.md", "report.txt", "REPORT.MD"])
def test_the_first_fitting_markdown_table_is_imported_and_no_other(write, name):
    records = load_table(write(DOCUMENT, name))
    assert [_labels(r) for r in records] == [
        ("gloo", "cpu", 2, 2**20, "float32", Summary(mean_s=0.0015)),
        ("nccl", "cuda", 4, 2**30, "float32", Summary(mean_s=0.25)),
    ]
    assert {r.source for r in records} == {"imported"}


def test_a_run_keeps_its_source_and_gives_its_collectives_only(tmp_path, build_collective, build_environment):
    record = build_collective()
    layer = LayerSizeRecord(layer="a", num_params=1)
    save_run(Run("bench", {}, build_environment(), (record, layer)), tmp_path / "run.json")
    # The note prevents a chart from joining two runs.
    named = dataclasses.replace(record, note=tmp_path.name, nodes=build_environment().details.get("hosts", 0))
    assert load_table(tmp_path) == load_table(tmp_path / "run.json") == [named]


@pytest.mark.parametrize(
    ("details", "nodes"),
    [({}, [0, 0, 0]), ({"hosts": 1, "world_size": 8}, [1, 1, 1]), ({"hosts": 2, "world_size": 8}, [1, 1, 2])],
)
def test_a_run_knows_the_nodes_of_its_ranks(
    tmp_path, build_collective, build_samples, build_environment, details, nodes
):
    records = tuple(
        build_collective(world_size=n, timing=build_samples(0.1, ranks=n)) for n in (2, 4, 6)
    )  # fmt: skip
    environment = dataclasses.replace(build_environment(), details=details)
    save_run(Run("bench", {}, environment, records), tmp_path / "run.json")
    assert [record.nodes for record in load_table(tmp_path)] == nodes


def test_a_run_without_a_collective_is_refused(tmp_path, build_environment):
    save_run(Run("bench", {}, build_environment(), (LayerSizeRecord(layer="a", num_params=1),)), tmp_path / "run.json")
    with pytest.raises(RecordError, match="collective"):
        load_table(tmp_path)


def test_our_own_table_csv_is_imported(write, build_collective, build_samples):
    ours = [
        build_collective(collective="all_gather", op="none", timing=build_samples(0.1, 1 / 3, 0.5)),
        build_collective(num_wrong=None, num_bytes=8, backend="nccl", device="cuda"),
        build_collective(num_wrong=7),
    ]
    theirs = load_table(write(write_csv(ours)))
    assert [r.key for r in theirs] == [r.key for r in ours]
    assert [r.num_wrong for r in theirs] == [0, None, 7]
    assert [(r.num_bytes, r.time_s, r.timing.count) for r in theirs] == [
        (r.num_bytes, r.time_s, r.timing.count) for r in ours
    ]
    assert {r.source for r in theirs} == {"imported"}


def test_allreduce_times_survive_export(write, build_collective):
    measured = build_collective(timing=Samples(seconds=((0.001, 0.002), (0.004, 0.003)), reducer="max"))
    imported = load_table(write(ALLREDUCE + "nccl,8,100,400,0.002881,0.000102\n"))
    others = [build_collective(collective="broadcast"), LayerSizeRecord(layer="a", num_params=1)]
    text = export_allreduce_times([*imported, *others, measured])
    assert text.startswith(ALLREDUCE)
    copies = load_table(write(text, "copy.csv"))
    assert copies[0] == imported[0]
    assert len(copies) == 2
    assert copies[1].timing.mean_s == pytest.approx(0.003)
    assert copies[1].timing.stdev_s == pytest.approx(2**0.5 * 1e-3, abs=1e-9)
    assert copies[1].key == measured.key


def test_a_median_replaces_an_unknown_mean(write, build_collective):
    text = export_allreduce_times([build_collective(timing=Summary(median_s=0.25))])
    assert load_table(write(text))[0].timing == Summary(mean_s=0.25, stdev_s=0.0)


def test_layer_sizes_survive_import_and_export(write):
    text = SIZES + '0,"Embedding, token",1000\n1,Block 0,77\n2,"Embedding, token",1000\n'
    records = load_layer_sizes(write(text))
    assert [(r.layer, r.num_params) for r in records] == [
        ("Embedding, token", 1000),
        ("Block 0", 77),
        ("Embedding, token", 1000),
    ]
    assert {r.source for r in records} == {"imported"}
    assert export_layer_sizes(records) == text


def test_layer_times_survive_import_and_export(write):
    text = TIMES + "backward,1e-06,3e-06,2e-06,5.505391297022706e-08,1.5e-06\nblock_0 grad,0.1,0.3,0.2,0.01,0.19\n"
    records = load_layer_times(write(text))
    assert records[1] == LayerTimeRecord(
        layer="block_0 grad",
        timing=Summary(min_s=0.1, max_s=0.3, mean_s=0.2, stdev_s=0.01, median_s=0.19),
        source="imported",
    )
    assert export_layer_times(records) == text


def test_measured_layer_times_are_exported_with_their_five_numbers(write, build_samples):
    record = LayerTimeRecord(layer="a", timing=build_samples(1.0, 2.0, 6.0))
    (copy,) = load_layer_times(write(export_layer_times([record])))
    assert copy.timing == Summary(min_s=1.0, max_s=6.0, mean_s=3.0, stdev_s=7**0.5, median_s=2.0)


GOOD = {
    load_table: (ALLREDUCE, "gloo,2,1,4,0.5,0.1"),
    load_layer_sizes: (SIZES, "0,a,10"),
    load_layer_times: (TIMES, "a,1,3,2,0.5,2"),
}


@pytest.mark.parametrize(
    ("load", "row", "reason"),
    [
        (load_table, "gloo,2,1,4,0.5", "5 cells where the header has 6"),
        (load_table, "gloo,2,1,4,0.5,0.1,9", "7 cells where the header has 6"),
        (load_table, "gloo,two,1,4,0.5,0.1", "'two'"),
        (load_table, "gloo,2,1,4.5,0.5,0.1", "'4.5'"),
        (load_table, "gloo,2,1,4,fast,0.1", "'fast'"),
        (load_table, "gloo,2,1,4,,0.1", "could not convert"),
        (load_table, "gloo,2,1,4,-0.5,0.1", "mean_s is -0.5"),
        (load_table, "gloo,2,1,4,nan,0.1", "mean_s is nan"),
        (load_table, "gloo,2,1,4,inf,0.1", "mean_s is inf"),
        (load_table, "gloo,0,1,4,0.5,0.1", "world_size is 0"),
        (load_table, "gloo,2,1,0,0.5,0.1", "num_bytes is 0"),
        (load_table, "gloo,2,1,4,0.000000,0.0", "."),  # a time that was rounded to zero yields no bandwidth
        (load_layer_sizes, "0,a", "2 cells where the header has 3"),
        (load_layer_sizes, "0,a,many", "'many'"),
        (load_layer_sizes, "0,a,-5", "num_params is -5"),
        (load_layer_times, "a,1,3,2,0.5", "5 cells"),
        (load_layer_times, "a,1,3,slow,0.5,2", "'slow'"),
        (load_layer_times, "a,1,3,-2,0.5,2", "mean_s is -2.0"),
    ],
)
def test_a_broken_row_is_refused_with_file_and_line(write, load, row, reason):
    header, good = GOOD[load]
    path = write(f"{header}{good}\n{row}\n{good}\n")
    with pytest.raises(RecordError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize("load", GOOD)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("HEADER", "has a header but no row"),
        ("x,y\n1,2\n", "has the columns x, y"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\x00", "cannot be read as text"),
        ('HEADER"' + "x" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_a_file_without_a_table_is_refused_by_name(write, load, content, reason):
    if isinstance(content, str):
        content = content.replace("HEADER", GOOD[load][0])
    path = write(content)
    with pytest.raises(RecordError, match=reason) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("load", GOOD)
def test_a_missing_file_is_refused_by_name(tmp_path, load):
    with pytest.raises(RecordError, match=r"gone\.csv"):
        load(tmp_path / "gone.csv")


@pytest.mark.parametrize(
    ("load", "column"),
    [(load_table, "stdev_time"), (load_layer_sizes, "No. Params"), (load_layer_times, "median")],
)
def test_a_missing_column_is_named(write, load, column):
    header, row = (text.strip().split(",") for text in GOOD[load])
    at = header.index(column)
    del header[at], row[at]
    with pytest.raises(RecordError, match=f"{column}$"):
        load(write(f"{','.join(header)}\n{','.join(row)}\n"))


def test_a_column_missing_from_our_own_table_is_named(write):
    columns = "collective, backend, memory, device, world_size, dtype, iters, nwrong"
    with pytest.raises(RecordError, match=f"num_bytes, median_s, op .*{columns}$"):
        load_table(write("num_bytes,median_s,op\n4,1.0,sum\n"))


@pytest.mark.parametrize("load", GOOD)
def test_a_repeated_column_is_refused(write, load):
    header, row = (text.strip() for text in GOOD[load])
    column, cell = header.rpartition(",")[2], row.rpartition(",")[2]
    with pytest.raises(RecordError, match=f"columns {column}"):
        load(write(f"{header},{column}\n{row},{cell}\n"))


ROW = "| gloo (CPU)   | 2         | 1MB    | 1.5           | 1.92                       |"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("| gloo | 2 | 1MB | 1.5 |", "4 cells where the header has 5"),
        ("| gloo | 2 | 1024 | 1.5 | 1 |", "has no unit"),
        ("| gloo | 2 | big | 1.5 | 1 |", "'big'"),
        ("| gloo | two | 1MB | 1.5 | 1 |", "'two'"),
        ("| gloo | 2 | 1MB | fast | 1 |", "'fast'"),
        ("| gloo | 2 | 1MB | -1.5 | 1 |", "mean_s is -0.0015"),
        ("| gloo | 2 | 1MB | 0.00 | 1 |", "."),
    ],
)
def test_a_broken_markdown_row_is_refused_with_file_and_line(write, row, reason):
    text = DOCUMENT.replace(ROW, row)
    path, line = write(text, "report.md"), text.splitlines().index(row) + 1
    with pytest.raises(RecordError, match=reason) as caught:
        load_table(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no table"),
        ("# Only words\n\n| Model | Size |\n|---|---|\n| a | 1MB |\n", "has no table"),
        ("| Backend | Processes | Size | Time (s) |\n|---|---|---|---|\n| gloo | 2 | 1MB | 1 |\n", "has no table"),
        ("| Backend | Processes | Size | Time (ms) |\n|---|---|---|---|\n\nafter\n", "no rows: expected at least one"),
    ],
)
def test_markdown_without_the_table_is_refused(write, text, reason):
    with pytest.raises(RecordError, match=reason) as caught:
        load_table(write(text, "report.md"))
    assert "report.md" in str(caught.value)


def test_shared_memory_survives_both_of_our_tables(write, build_collective, build_samples):
    records = [
        build_collective(backend="shm", memory=memory, timing=build_samples(t))
        for memory, t in (("ordinary", 0.002), ("shared", 0.001))
    ]
    ours = load_table(write(write_csv(records)))
    text = export_allreduce_times(records)
    theirs = load_table(write(text, "allreduce-times.csv"))
    assert "\nshm-shared,2," in text
    for loaded in (ours, theirs):
        assert [(r.backend, r.memory, r.time_s) for r in loaded] == [
            ("shm", "ordinary", 0.002), ("shm", "shared", 0.001),
        ]  # fmt: skip


def test_a_pass_over_memory_is_not_a_row_of_a_table(tmp_path, build_collective, build_pass, build_environment):
    save_run(Run("bench", {}, build_environment(), (build_collective(), build_pass())), tmp_path / "run.json")
    assert [r.kind for r in load_table(tmp_path)] == ["collective"]
    assert export_allreduce_times([build_pass()]).count("\n") == 1


RUNS = [
    "allreduce", "wrappers-2-ranks", "layers-mlp", "phases-gpt2-mini", "faults-saves", "scale-large-batch-cpu",
    "tune-1Gb-link-torch",
]  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_parquet_file_has_every_record_with_its_samples(name, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    folder = RESULTS / name
    file = save_records([folder], page=tmp_path / "records.parquet")
    rows, run = parquet.read_table(file).to_pylist(), load_result(folder).run
    assert len(rows) == len(run.records) > 0
    assert {(row["run"], row["verb"]) for row in rows} == {(str(folder), run.verb)}
    for row, record in zip(rows, map(record_to_json, run.records), strict=True):
        for key in ("kind", "source", "world_size", "num_bytes", "label"):
            assert row.get(key) == record.get(key)
        seconds = (record.get("samples") or {}).get("seconds")
        assert (row.get("samples") or {}).get("seconds") == (seconds and [list(times) for times in seconds])
    with pytest.raises(RecordError, match="is never overwritten"):
        save_records([folder], page=file)


def test_several_runs_become_one_parquet_file(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    monkeypatch.chdir(tmp_path)
    folders = [str(RESULTS / name) for name in ("allreduce", "layers-mlp")]
    for _ in range(2):  # the default file follows from the records and is replaced
        file = save_records(folders)
    assert file == Path("records.parquet")
    assert set(parquet.read_table(file)["run"].to_pylist()) == set(folders)


def test_without_pyarrow_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=re.escape("paceline[parquet]")):
        save_records([RESULTS / "allreduce"])


@pytest.mark.parametrize("name", ["trace-1Gb-link-default", "train-cifar10-2-ranks"])
def test_a_run_without_records_has_nothing_to_export(name):
    with pytest.raises(ConfigError, match="no records to export"):
        save_records([RESULTS / name])
