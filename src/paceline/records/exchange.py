"""Import and export of tables in other formats: CSV, Markdown and nccl-tests, detected by their content, and Parquet.

The tables are all-reduce times (`allreduce-times.csv`), layer sizes (`layer-sizes*.csv`), layer times
(`layer-times*.csv`), published all-reduce times, and Markdown tables of backend, processes, size and time. `store`
reads run files.
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError
from paceline.records.kinds import CollectiveRecord, Record, record_to_json
from paceline.records.layers import CapTimeRecord, LayerSizeRecord, LayerTimeRecord
from paceline.records.nccl_tests import import_all_reduce, is_nccl_text, read_nccl_json, read_nccl_text
from paceline.records.samples import Summary
from paceline.records.store import RUN_FORMAT, Run, is_run_path, load_json, load_run
from paceline.units import parse_size

ALLREDUCE_HEADER = ["backend", "world_size", "total_elements", "total_bytes", "average_time", "stdev_time"]
LAYER_SIZES_HEADER = ["", "Name", "No. Params"]
LAYER_TIMES_HEADER = ["Name", "min", "max", "mean", "std", "median"]
# `allreduce-times.csv` has no column for the memory, so the backend gets a suffix.
_SHARED = "-shared"

Row = dict[str, str]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read as text: {error}") from None


def _read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file with their line numbers, header first."""
    reader = csv.reader(io.StringIO(_read_text(path)))
    try:
        lines = [(reader.line_num, line) for line in reader if line]
    except csv.Error as error:
        raise RecordError(f"{path}, line {reader.line_num}: {error}") from None
    if not lines:
        raise RecordError(f"{path} is empty: expected a header and rows")
    return [(lines[0][0], [name.strip() for name in lines[0][1]]), *lines[1:]]


def _parse(path: Path, lines: Sequence[tuple[int, list[str]]], parse: Callable[[Row], Any]) -> list[Any]:
    """Parse the lines after the header; an error names its line."""
    header, records = lines[0][1], []
    for number, line in lines[1:]:
        try:
            if len(line) != len(header):
                raise ValueError(f"{len(line)} cells where the header has {len(header)}")
            records.append(parse(dict(zip(header, line, strict=True))))
        except (ValueError, RecordError, ConfigError) as error:
            raise RecordError(f"{path}, line {number}: {error}") from None
    if not records:
        raise RecordError(f"{path} has a header but no rows: expected at least one")
    return records


def _number(cell: str) -> float | None:
    return float(cell) if cell.strip() else None


def _parse_allreduce_time(row: Row) -> CollectiveRecord:
    num_bytes, elements, backend = int(row["total_bytes"]), int(row["total_elements"]), row["backend"].strip()
    types = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}
    dtype = types.get(num_bytes // elements if elements else 0, "unknown")
    timing = Summary(mean_s=float(row["average_time"]), stdev_s=float(row["stdev_time"]))
    memory = "shared" if backend.endswith(_SHARED) else "ordinary"
    world_size = int(row["world_size"])
    return import_all_reduce(backend.removesuffix(_SHARED), world_size, num_bytes, timing, dtype=dtype, memory=memory)


def _parse_published(row: Row) -> CollectiveRecord:
    backend, _, device = row["backend"].strip().partition("-")
    values: dict[str, Any] = {"median_s" if row["stat"].startswith("median") else "mean_s": float(row["time_s"])}
    timing = Summary(stdev_s=_number(row["std_s"]), **values)
    kind = "cuda" if backend == "nccl" else device or "cpu"  # treat "nccl" and "nccl-tests" alike
    more = {"device": kind, "note": row["source"].strip(), "nodes": int(row.get("nodes") or 0)}
    return import_all_reduce(backend, int(row["world_size"]), int(row["bytes"]), timing, **more)


def _parse_own(row: Row) -> CollectiveRecord:
    values: dict[str, Any] = {name: row[name] for name in ("collective", "backend", "memory", "device", "dtype", "op")}
    values |= {name: int(row[name]) for name in ("world_size", "num_bytes")}
    count, num_wrong = (int(row[name]) if row[name] else None for name in ("iters", "nwrong"))
    timing = Summary(median_s=float(row["median_s"]), count=count)
    return CollectiveRecord(**values, timing=timing, num_wrong=num_wrong, source="imported")


def _parse_markdown_row(row: Row) -> CollectiveRecord:
    # In these tables 1MB means 2^20 bytes.
    size = re.sub(r"(?i)\b(\d+(?:\.\d+)?)\s*([KMG])B\b", r"\1\2iB", row["size"])
    timing = Summary(mean_s=float(row["time"]) / 1e3)
    backend = row["backend"].split("(")[0].strip()
    return import_all_reduce(backend, int(row["processes"]), parse_size(size), timing, dtype="float32")


# The required columns of each CSV format for collectives, and the parser of its rows.
_TABLES: list[tuple[list[str], Callable[[Row], Any]]] = [
    (ALLREDUCE_HEADER, _parse_allreduce_time),
    (["source", "backend", "world_size", "bytes", "time_s", "std_s", "stat"], _parse_published),
    (["collective", "backend", "memory", "device", "world_size", "dtype", "op", "num_bytes", "median_s", "iters",
      "nwrong"], _parse_own),
]  # fmt: skip


def _load_csv(path: Path, tables: Sequence[tuple[list[str], Callable[[Row], Any]]]) -> list[Any]:
    """The records of a CSV file, parsed as the best-matching table. The file must have all columns of that table."""
    lines = _read_csv(path)
    header = lines[0][1]
    columns, parse = max(tables, key=lambda table: len(set(table[0]) & set(header)) / len(table[0]))
    if missing := [name for name in columns if name not in header]:
        raise RecordError(f"{path} has the columns {', '.join(header) or '(none)'} and lacks {', '.join(missing)}")
    if repeated := [name for name in columns if header.count(name) > 1]:
        raise RecordError(f"{path} repeats the columns {', '.join(repeated)}: list each once")
    return _parse(path, lines, parse)


def load_table(path: str | Path) -> list[CollectiveRecord]:
    """All-reduce times from a run, its CSV, nccl-tests output (text or JSON), or a table in CSV or Markdown. The
    records of a run keep their source (such as `measured`); all others are `imported`."""
    path = Path(path)
    if is_run_path(path):
        folder = path if path.is_dir() else path.parent
        # The note distinguishes the curves of two runs in a chart.
        return list_collectives(load_run(path), path, folder.resolve().name)
    text = _read_text(path)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        document = load_json(path, "pass a run or a table")
        if isinstance(document, dict) and "results" in document and document.get("format") != RUN_FORMAT[0]:
            return read_nccl_json(path, document)
        return list_collectives(load_run(path), path, path.name)
    if is_nccl_text(text):
        return read_nccl_text(path, text)
    if path.suffix.lower() in (".md", ".txt", ".markdown"):
        return _parse(path, _read_markdown(path), _parse_markdown_row)
    return _load_csv(path, _TABLES)


def list_collectives(run: Run, place: str | Path, note: str = "") -> list[CollectiveRecord]:
    """The collectives of a run, with the nodes on which its ranks ran."""
    found = [record for record in run.records if isinstance(record, CollectiveRecord)]
    if not found:
        raise RecordError(f"{place} has no record of a collective: make one with `paceline bench allreduce`")
    details = run.environment.details
    hosts = int(details.get("hosts", 0))
    each = math.ceil(int(details.get("world_size", 1)) / hosts) if hosts > 1 else 0

    def count_nodes(record: CollectiveRecord) -> int:
        return record.nodes or (math.ceil(record.world_size / each) if each else hosts)

    return [replace(record, note=record.note or note, nodes=count_nodes(record)) for record in found]


def _read_markdown(path: Path) -> list[tuple[int, list[str]]]:
    """The first Markdown table with columns for backend, processes, size and a time in ms, with its line numbers."""
    lines = [line.strip() for line in _read_text(path).splitlines()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else [] for line in lines]
    for number, row in enumerate(rows, 1):
        header = ["time" if "time (ms)" in cell.lower() else cell.lower() for cell in row]
        if {"backend", "processes", "size", "time"} <= set(header):
            # The table ends at the first line without cells. The line below the header has only dashes.
            below = itertools.takewhile(itemgetter(1), enumerate(rows[number:], number + 1))
            values = [(n, cells) for n, cells in below if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
            return [(number, header), *values]
    raise RecordError(
        f"{path} has no table with the columns Backend, Processes, Size and Time (ms), and no nccl-tests output"
    )


def load_layer_sizes(path: str | Path) -> list[LayerSizeRecord]:
    """Parameters per layer from a `layer-sizes` CSV, in file order. Tied layers appear twice."""

    def parse(row: Row) -> LayerSizeRecord:
        return LayerSizeRecord(layer=row["Name"], num_params=int(row["No. Params"]), source="imported")

    return _load_csv(Path(path), [(LAYER_SIZES_HEADER[1:], parse)])


def load_layer_times(path: str | Path) -> list[LayerTimeRecord]:
    """Seconds per layer and phase from a `layer-times` CSV, in file order, which is not model order."""

    def parse(row: Row) -> LayerTimeRecord:
        low, high, mean, stdev, median = (_number(row[name]) for name in LAYER_TIMES_HEADER[1:])
        timing = Summary(min_s=low, max_s=high, mean_s=mean, stdev_s=stdev, median_s=median)
        return LayerTimeRecord(layer=row["Name"], timing=timing, source="imported")

    return _load_csv(Path(path), [(LAYER_TIMES_HEADER, parse)])


def load_cap_times(path: str | Path) -> list[CapTimeRecord]:
    """Measured times by bucket size from a CSV with the columns `bucket_size` and `step_s` or `backward_s`."""

    def parse(of: str) -> Callable[[Row], CapTimeRecord]:
        def parse_row(row: Row) -> CapTimeRecord:
            timing = Summary(mean_s=float(row[f"{of}_s"]))
            return CapTimeRecord(cap_bytes=parse_size(row["bucket_size"]), of=of, timing=timing, source="imported")

        return parse_row

    return _load_csv(Path(path), [(["bucket_size", f"{of}_s"], parse(of)) for of in ("step", "backward")])


def _to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def export_allreduce_times(records: Iterable[Record]) -> str:
    """The all-reduce records as `allreduce-times.csv`; other records are ignored."""
    rows = []
    for r in records:
        if isinstance(r, CollectiveRecord) and r.collective == "all_reduce":
            mean_s = r.time_s if r.timing.mean_s is None else r.timing.mean_s
            times = [f"{mean_s:.9f}", f"{r.timing.stdev_s or 0:.9f}"]
            backend = r.backend + (_SHARED if r.memory == "shared" else "")
            rows.append([backend, r.world_size, r.num_elements, r.num_bytes, *times])
    return _to_csv(ALLREDUCE_HEADER, rows)


def export_layer_sizes(records: Iterable[LayerSizeRecord]) -> str:
    return _to_csv(LAYER_SIZES_HEADER, [[i, r.layer, r.num_params] for i, r in enumerate(records)])


def export_layer_times(records: Iterable[LayerTimeRecord]) -> str:
    fields = ("layer", *(f"timing.{name}_s" for name in ("min", "max", "mean", "stdev", "median")))
    return _to_csv(LAYER_TIMES_HEADER, map(attrgetter(*fields), records))


def export_parquet(runs: Mapping[str, Run]) -> bytes:
    """The records of these runs as a Parquet file: one row per record, with the name and the verb of its run. Columns
    are the fields of `run.json`, and raw samples are nested lists."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("pyarrow is not installed: install paceline[parquet]", code="no-parquet") from None
    rows = [
        {"run": name, "verb": run.verb, "created": run.created, **record_to_json(record)}
        for name, run in runs.items()
        for record in run.records
    ]
    columns = dict.fromkeys(column for row in rows for column in row)
    table = pyarrow.table({column: [row.get(column) for row in rows] for column in columns})
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd")
    return file.getvalue()
