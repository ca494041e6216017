"""Reads the output of all_reduce_perf from nccl-tests: text pasted into a file, or JSON (`-J`). Times are out-of-place.

The `# Rank` lines name ranks and nodes. Without them the number of ranks follows from busbw = algbw * 2(n-1)/n. That
ratio is also checked, so that no other collective is mistaken for an all-reduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import RecordError
from paceline.records.kinds import CollectiveRecord, bus_factor
from paceline.records.samples import Summary
from paceline.units import format_bytes

_DTYPES = {"float": "float32", "double": "float64", "half": "float16"}
_DTYPES |= {name: name for name in ("bfloat16", "int8", "uint8", "int32", "int64")}
_NEEDED = ("size", "type", "redop", "time", "algbw", "busbw")
# Prefixes added by mpirun and srun (`[1,0]<stdout>:`, `[0] `, `0: `), and e-mail quote marks.
_PREFIX = re.compile(r"^\s*>?\s*(?:\[\d+(?:,\d+)?\](?:<\w+>)?:?|\d+:)?\s?")
_RANK = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_STARTING = re.compile(r"Collective test starting:\s*(\S+)")
_MOST_RANKS = 1 << 20
_LAUNCH_ONLY = "cputime is only the time of the launch: run nccl-tests without -C"


class _Row(NamedTuple):
    """The result for one size: its place in the file, fields, and the range of busbw / algbw within its rounding."""

    place: str
    fields: dict[str, Any]
    least_ratio: float
    most_ratio: float


@dataclass
class _Run:
    """One run of the program: (rank, group, host) of each named rank, and its table."""

    ranks: list[tuple[int, int, str]] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)


def is_nccl_text(text: str) -> bool:
    """Whether the text has the header or rows of an nccl-tests table."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    return any(_find_header(line) or _find_cells(line) for line in lines)


def _find_header(line: str) -> list[str]:
    names = line.replace("#wrong", "wrong").lstrip("#> \t").split()
    is_header = {"count", "redop"} <= set(names) and {"size", "time", "algbw"} & set(names)
    return names if is_header else []


def _find_cells(line: str) -> list[str]:
    """The cells of a result line, which begins with bytes, elements and a dtype; empty for other lines."""
    cells = re.sub(r"\[\d+\]", " ", line).split()
    is_row = len(cells) > 3 and cells[0].isdigit() and cells[1].isdigit() and cells[2].isidentifier()
    return cells if is_row else []


def read_nccl_text(path: Path, text: str) -> list[CollectiveRecord]:
    """The records of all runs of all_reduce_perf in the text."""
    runs, columns = [_Run()], list[str]()
    for number, prefixed in enumerate(text.splitlines(), 1):
        line, place = _PREFIX.sub("", prefixed), f"{path}, line {number}"
        rank, header, cells = _RANK.search(line), _find_header(line), _find_cells(line)
        if found := _STARTING.search(line):
            _refuse_other(path, found[1])
        if (rank or header) and runs[-1].rows:  # another run begins
            runs.append(_Run())
        if rank:
            runs[-1].ranks.append((int(rank[1]), int(rank[2] or 0), rank[3]))
        elif header:
            columns = _read_header(place, header)
        elif cells and not columns:
            raise RecordError(f"{place}: nccl-tests results without the header `# size count ...` above")
        elif cells and len(cells) < len(columns):
            raise RecordError(f"{place}: {len(cells)} cells where the header has {len(columns)} out of place")
        elif cells:
            runs[-1].rows.append(_read_row(place, dict(zip(columns, cells, strict=False))))
    runs = [run for run in runs if run.rows]
    if not runs:
        raise RecordError(f"{path} has an nccl-tests header but no results below it")
    return [record for run in runs for record in _build_records(path, run)]


def _refuse_other(path: Path, program: str) -> None:
    if "all_reduce" not in program:
        raise RecordError(f"{path} is output of {program}: only that of all_reduce_perf can be read")


def _read_header(place: str, names: list[str]) -> list[str]:
    """The names of the columns with out-of-place results."""
    if "cputime" in names:
        raise RecordError(f"{place}: {_LAUNCH_ONLY}")
    if missing := [name for name in _NEEDED if name not in names]:
        raise RecordError(f"{place}: the table lacks {', '.join(missing)}")
    end = names.index("time", names.index("time") + 1) if names.count("time") > 1 else len(names)
    return names[:end]


def read_nccl_json(path: Path, document: Any) -> list[CollectiveRecord]:
    """The records of a file written by nccl-tests with `-J`."""
    try:
        config = document["config"]
        _refuse_other(path, Path(document.get("args", ["all_reduce"])[0]).name)
        # Each process lists only its first device, and has threads x GPUs ranks.
        each = int(config["nthreads"]) * int(config["ngpus"])
        devices = [(d["rank"], d.get("group", 0), d["hostname"]) for d in config["devices"]]
        run = _Run([(rank + more, group, host) for rank, group, host in devices for more in range(each)])
        for number, row in enumerate(document["results"], 1):
            place, found = f"{path}, result {number}", row["out_of_place"] or row["in_place"]
            if "time" not in found:
                raise RecordError(f"{place}: {_LAUNCH_ONLY}")
            named = {"algbw": found["alg_bw"], "busbw": found["bus_bw"], "wrong": found.get("nwrong")}
            named |= {"time": found["time"], "each": row.get("out_of_place_per_iter") or {}}
            run.rows.append(_read_row(place, row | named))
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError(f"{path} is not the JSON of nccl-tests: {type(error).__name__} {error}") from None
    if not run.rows:
        raise RecordError(f"{path} has no results")
    return _build_records(path, run)


def _read_row(place: str, row: Mapping[str, Any]) -> _Row:
    """Parse the result for one size from its values by column; `each` has raw times, which only the JSON contains."""
    try:
        num_bytes, op, root = int(row["size"]), row["redop"], int(row.get("root", -1))
        num_wrong = None if row.get("wrong") in (None, "N/A") else int(float(row["wrong"]))
        if op == "none" or root >= 0:
            raise RecordError(f"redop {op} with root {root} is not an all-reduce: only all-reduces can be read")
        if num_wrong:
            what = f"{num_wrong} wrong values at size {format_bytes(num_bytes)} (#wrong)"
            raise RecordError(f"{what}: wrong results have no valid time; run nccl-tests again")
        each = row.get("each", {})
        stdev_s = float(each["stdev_us"]) * 1e-6 if "stdev_us" in each else None
        timing = Summary(float(row["time"]) * 1e-6, stdev_s, count=len(each.get("times_us", ())) or None)
        (alg, alg_off), (bus, bus_off) = _read_rounded(row["algbw"]), _read_rounded(row["busbw"])
    except ValueError as error:
        raise RecordError(f"{place}: {error}") from None
    fields = {"num_bytes": num_bytes, "timing": timing, "op": op, "num_wrong": num_wrong}
    fields["dtype"] = _DTYPES.get(row["type"], "unknown")
    return _Row(place, fields, max(0.0, bus - bus_off) / (alg + alg_off), (bus + bus_off) / max(alg - alg_off, 1e-12))


def _read_rounded(value: Any) -> tuple[float, float]:
    """A number and its rounding error: half a unit of the last digit printed."""
    if not isinstance(value, str):
        return float(value), 1e-6
    digits = len(value.partition(".")[2].partition("e")[0])
    return float(value), 0.51 * 10.0**-digits if "e" not in value else 0.1 * float(value)


def _build_records(path: Path, run: _Run) -> list[CollectiveRecord]:
    world_size, nodes = _count_ranks(path, run)
    records = []
    for row in run.rows:
        try:
            more = row.fields | {"nodes": nodes, "note": path.name}
            records.append(import_all_reduce("nccl", world_size, **more))
        except RecordError as error:
            raise RecordError(f"{row.place}: {error}") from None
    return records


def import_all_reduce(backend: str, world_size: int, num_bytes: int, timing: Summary, **more: Any) -> CollectiveRecord:
    """A row of a table. `more` are further fields of its record."""
    fields = {"device": "cuda" if backend == "nccl" else "cpu", "dtype": "unknown", "op": "sum"} | more
    fields |= {"backend": backend, "world_size": world_size, "num_bytes": num_bytes, "timing": timing}
    return CollectiveRecord(collective="all_reduce", source="imported", **fields)


def _count_ranks(path: Path, run: _Run) -> tuple[int, int]:
    """The number of ranks and nodes of a run; 0 nodes if no line names a host."""
    numbers = [rank for rank, _, _ in run.ranks]
    if len(set(numbers)) < len(numbers):
        found = f"{path}: rank {max(set(numbers), key=numbers.count)} is listed twice in one run"
        raise RecordError(f"{found}: build nccl-tests with MPI=1, or write each output to its own file")
    if not numbers:
        return _find_ranks(path, run.rows), 0
    own = [host for _, group, host in run.ranks if group == run.ranks[0][1]]
    wanted = bus_factor("all_reduce", len(own))
    for row in run.rows:
        if not row.least_ratio <= wanted <= row.most_ratio:
            allowed = f"{row.least_ratio:.2f} to {row.most_ratio:.2f}"
            has = f"busbw / algbw is {allowed}, but should be {wanted:.2f} on the {len(own)} listed ranks"
            raise RecordError(f"{row.place}: {has}: this is another collective, or the list of ranks is wrong")
    if len(own) == 1:
        raise RecordError(f"{path}: each process measured one rank alone: build nccl-tests with MPI=1")
    return len(own), len(set(own))


def _find_ranks(path: Path, rows: Sequence[_Row]) -> int:
    """The number of ranks from the ratio of the bandwidths, 2 - 2/n, which must fit every row."""
    low, high = max(row.least_ratio for row in rows), min(row.most_ratio for row in rows)
    if low > high:
        raise RecordError(f"{path}: busbw / algbw differs between rows: they are from different numbers of ranks")
    if high < 0.99:
        raise RecordError(f"{path}: busbw is at most {high:.2f} of algbw: not an all-reduce on two or more ranks")
    least, most = (2 / (2 - ratio) if ratio < 2 else float(_MOST_RANKS) for ratio in (max(low, 0.99), high))
    first, last = max(2, math.ceil(least - 1e-9)), math.floor(most + 1e-9)
    if first != last:
        what = f"{path} does not state its number of ranks (busbw / algbw allows {first} to {last})"
        raise RecordError(f"{what}: keep the `# Rank` lines of nccl-tests")
    return first
