"""Import and export of tables in other formats: CSV and Markdown, recognised by their headers.

All-reduce times (`allreduce-times.csv`), layer sizes (`layer-sizes*.csv`), layer times (`layer-times*.csv`), published
all-reduce times, and Markdown tables of backend, processes, size and time. Run files are in `store`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.errors import ConfigError, RecordError
from paceline.records.kinds import CollectiveRecord, LayerSizeRecord, LayerTimeRecord, Record
from paceline.records.samples import Samples, Summary
from paceline.records.store import RUN_FILE, load_run
from paceline.units import parse_size

ALLREDUCE_HEADER = ["backend", "world_size", "total_elements", "total_bytes", "average_time", "stdev_time"]
LAYER_SIZES_HEADER = ["", "Name", "No. Params"]
LAYER_TIMES_HEADER = ["Name", "min", "max", "mean", "std", "median"]
_PUBLISHED_COLUMNS = {"source", "backend", "world_size", "bytes", "time_s", "std_s", "stat"}
# The format has no column for the memory: the backend gets a suffix instead.
_SHARED = "-shared"
_FLOAT_BYTES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}

Row = dict[str, str]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read as text: {error}") from None


def _read_rows(path: Path) -> tuple[list[str], list[tuple[int, Row]]]:
    """The header and the rows of a CSV, each row with its line number."""
    text = _read_text(path)
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, line) for line in reader if line]
    except csv.Error as error:
        raise RecordError(f"{path}, line {reader.line_num}: {error}") from None
    if not lines:
        raise RecordError(f"{path} is empty: a header and rows are needed")
    header = [name.strip() for name in lines[0][1]]
    rows = []
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise RecordError(f"{path}, line {number}: {len(line)} cells where the header has {len(header)}")
        rows.append((number, dict(zip(header, line, strict=True))))
    if not rows:
        raise RecordError(f"{path} has a header but no row")
    return header, rows


def _parse(path: Path, rows: Iterable[tuple[int, Row]], parse: Callable[[Row], Any]) -> list[Any]:
    """The rows parsed one by one; an error names the line."""
    records = []
    for number, row in rows:
        try:
            records.append(parse(row))
        except (ValueError, RecordError) as error:
            raise RecordError(f"{path}, line {number}: {error}") from None
    return records


def _number(cell: str) -> float | None:
    """The number in a cell; None if the cell is empty."""
    return float(cell) if cell.strip() else None


def _parse_allreduce_time(row: Row) -> CollectiveRecord:
    num_bytes, elements = int(row["total_bytes"]), int(row["total_elements"])
    return CollectiveRecord(
        collective="all_reduce",
        backend=machine.canonical_backend(row["backend"].strip().removesuffix(_SHARED)),
        memory="shared" if row["backend"].strip().endswith(_SHARED) else "ordinary",
        device="cuda" if row["backend"].strip() == "nccl" else "cpu",
        world_size=int(row["world_size"]),
        num_bytes=num_bytes,
        dtype=_FLOAT_BYTES.get(num_bytes // elements if elements else 0, "unknown"),
        op="sum",
        timing=Summary(mean_s=float(row["average_time"]), stdev_s=float(row["stdev_time"])),
        source="imported",
    )


def _parse_published(row: Row) -> CollectiveRecord:
    backend, _, device = row["backend"].strip().partition("-")
    if backend == "nccl":  # "nccl" and "nccl-tests" alike
        device = "cuda"
    time_s, is_median = float(row["time_s"]), row["stat"].startswith("median")
    stdev_s = _number(row["std_s"])
    return CollectiveRecord(
        collective="all_reduce",
        backend=backend,
        device=device or "cpu",
        world_size=int(row["world_size"]),
        num_bytes=int(row["bytes"]),
        dtype="unknown",
        op="sum",
        timing=Summary(median_s=time_s, stdev_s=stdev_s) if is_median else Summary(mean_s=time_s, stdev_s=stdev_s),
        source="imported",
        note=row["source"].strip(),
    )


def _parse_paceline_row(row: Row) -> CollectiveRecord:
    return CollectiveRecord(
        collective=row["collective"],
        backend=machine.canonical_backend(row["backend"]),
        device=row["device"],
        world_size=int(row["world_size"]),
        num_bytes=int(row["num_bytes"]),
        dtype=row["dtype"],
        op=row["op"],
        memory=row.get("memory") or "ordinary",
        timing=Summary(median_s=float(row["median_s"]), count=int(row["iters"]) if row["iters"] else None),
        num_wrong=int(row["nwrong"]) if row["nwrong"] else None,
        source="imported",
    )


def load_table(path: str | Path) -> list[CollectiveRecord]:
    """All-reduce times from a run, its CSV, or a table in CSV or Markdown.

    The records of a run keep their source (such as `measured`); all others are `imported`.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".json":
        # The note keeps the curves of two runs apart in a chart.
        name = path.resolve().parent.name if path.name == RUN_FILE else path.resolve().name
        found = [replace(r, note=r.note or name) for r in load_run(path).records if isinstance(r, CollectiveRecord)]
        if not found:
            raise RecordError(f"{path} has no record of a collective")
        return found
    if path.suffix.lower() in (".md", ".txt", ".markdown"):
        return _load_markdown(path)
    header, rows = _read_rows(path)
    if header == ALLREDUCE_HEADER:
        return _parse(path, rows, _parse_allreduce_time)
    if set(header) >= _PUBLISHED_COLUMNS:
        return _parse(path, rows, _parse_published)
    if "num_bytes" in header and "median_s" in header:
        missing = {"collective", "backend", "device", "world_size", "dtype", "op", "iters", "nwrong"} - set(header)
        if missing:
            raise RecordError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        return _parse(path, rows, _parse_paceline_row)
    raise RecordError(
        f"{path} has the columns {', '.join(header) or '(none)'}: known tables of all-reduce times have "
        f"{', '.join(ALLREDUCE_HEADER)}, or those of Paceline's own table.csv"
    )


def _load_markdown(path: Path) -> list[CollectiveRecord]:
    """The first Markdown table whose header names backend, processes, size and a time in ms."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] if line.strip().startswith("|") else None
        for line in _read_text(path).splitlines()
    ]
    wanted = {"backend", "processes", "size"}
    headers = [[cell.lower() for cell in cells or ()] for cells in lines]
    starts = [i for i, cells in enumerate(headers) if wanted <= set(cells) and any("time (ms)" in c for c in cells)]
    if not starts:
        raise RecordError(f"{path} has no table with the columns Backend, Processes, Size and Time (ms)")
    start = starts[0]
    names = ["time" if "time (ms)" in name else name for name in headers[start]]
    rows = []
    for number, cells in enumerate(lines[start + 1 :], start + 2):
        if cells is None:  # the table ends at the first line without cells
            break
        if len(cells) != len(names):
            raise RecordError(f"{path}, line {number}: {len(cells)} cells where the header has {len(names)}")
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            rows.append((number, dict(zip(names, cells, strict=True))))
    if not rows:
        raise RecordError(f"{path} has a table of all-reduce times without a row")
    return _parse(path, rows, _parse_markdown_row)


def _parse_markdown_row(row: Row) -> CollectiveRecord:
    backend = row["backend"].split("(")[0].strip()
    # Such tables write 1MB and 1024MB for powers of two.
    size = re.sub(r"(?i)\b(\d+(?:\.\d+)?)\s*([KMG])B\b", r"\1\2iB", row["size"])
    try:
        num_bytes = parse_size(size)
    except ConfigError as error:
        raise RecordError(str(error)) from None
    return CollectiveRecord(
        collective="all_reduce",
        backend=backend,
        device="cuda" if backend == "nccl" else "cpu",
        world_size=int(row["processes"]),
        num_bytes=num_bytes,
        dtype="float32",
        op="sum",
        timing=Summary(mean_s=float(row["time"]) / 1e3),
        source="imported",
    )


def load_layer_sizes(path: str | Path) -> list[LayerSizeRecord]:
    """Parameters per layer from a `layer-sizes` CSV, in its order. Tied layers appear twice."""
    path = Path(path)
    header, rows = _read_rows(path)
    if header[-2:] != LAYER_SIZES_HEADER[1:]:
        raise RecordError(f"{path} has the columns {', '.join(header)}: Name and No. Params are needed")

    def parse(row: Row) -> LayerSizeRecord:
        return LayerSizeRecord(layer=row["Name"], num_params=int(row["No. Params"]), source="imported")

    return _parse(path, rows, parse)


def load_layer_times(path: str | Path) -> list[LayerTimeRecord]:
    """Seconds per layer and phase from a `layer-times` CSV, in its order (which is not the model's)."""
    path = Path(path)
    header, rows = _read_rows(path)
    if header != LAYER_TIMES_HEADER:
        raise RecordError(f"{path} has the columns {', '.join(header)}: {', '.join(LAYER_TIMES_HEADER)} are needed")

    def parse(row: Row) -> LayerTimeRecord:
        values = {name: _number(row[name]) for name in LAYER_TIMES_HEADER[1:]}
        timing = Summary(
            min_s=values["min"], max_s=values["max"], mean_s=values["mean"],
            stdev_s=values["std"], median_s=values["median"],
        )  # fmt: skip
        return LayerTimeRecord(layer=row["Name"], timing=timing, source="imported")

    return _parse(path, rows, parse)


def _to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _five_numbers(timing: Samples | Summary) -> tuple[float | None, ...]:
    if isinstance(timing, Samples):
        s = timing.reduced_s
        return min(s), max(s), timing.mean_s, timing.stdev_s, timing.median_s
    return timing.min_s, timing.max_s, timing.mean_s, timing.stdev_s, timing.median_s


def export_allreduce_times(records: Iterable[Record]) -> str:
    """The all-reduce records as `allreduce-times.csv`; other records are left out."""
    rows = []
    for r in records:
        if isinstance(r, CollectiveRecord) and r.collective == "all_reduce":
            mean_s = r.time_s if r.timing.mean_s is None else r.timing.mean_s
            times = [f"{mean_s:.9f}", f"{r.timing.stdev_s or 0:.9f}"]
            backend = r.backend + (_SHARED if r.memory == "shared" else "")
            rows.append([backend, r.world_size, r.num_elements, r.num_bytes, *times])
    return _to_csv(ALLREDUCE_HEADER, rows)


def export_layer_sizes(records: Iterable[LayerSizeRecord]) -> str:
    """The records as a `layer-sizes` CSV."""
    return _to_csv(LAYER_SIZES_HEADER, [[i, r.layer, r.num_params] for i, r in enumerate(records)])


def export_layer_times(records: Iterable[LayerTimeRecord]) -> str:
    """The records as a `layer-times` CSV."""
    return _to_csv(LAYER_TIMES_HEADER, [[r.layer, *_five_numbers(r.timing)] for r in records])
