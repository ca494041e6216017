"""Output of all_reduce_perf from nccl-tests: its text, pasted into a file, and its JSON (`-J`). Times are out-of-place.

The lines `# Rank` name ranks and nodes. Without them the number of ranks follows from busbw = algbw * 2(n-1)/n. That
ratio is also checked, so that no other collective is mistaken for an all-reduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.records.kinds import CollectiveRecord, bus_factor
from paceline.records.samples import Summary
from paceline.units import format_bytes

_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "int8": "int8",
    "uint8": "uint8", "int32": "int32", "int64": "int64",
}  # fmt: skip
_NEEDED = ("size", "type", "redop", "time", "algbw", "busbw")
# Prefixes that mpirun and srun add: `[1,0]<stdout>:`, `[0] `, `0: `; and quote marks of an e-mail.
_PREFIX = re.compile(r"^\s*>?\s*(?:\[\d+(?:,\d+)?\](?:<\w+>)?:?|\d+:)?\s?")
_RANK = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_STARTING = re.compile(r"Collective test starting:\s*(\S+)")
_MOST_RANKS = 1 << 20


@dataclass
class _Row:
    """One size: its place in the file, its properties by column, and its bandwidths, each with its largest rounding
    error."""

    place: str
    values: Mapping[str, Any]
    timing: Summary
    algbw: tuple[float, float]
    busbw: tuple[float, float]
    num_wrong: int | None

    @property
    def ratios(self) -> tuple[float, float]:
        """The smallest and the largest busbw / algbw that round to these numbers."""
        (alg, alg_off), (bus, bus_off) = self.algbw, self.busbw
        return max(0.0, bus - bus_off) / (alg + alg_off), (bus + bus_off) / max(alg - alg_off, 1e-12)


@dataclass
class _Run:
    """One run of the program: (rank, group, host) of each named rank, and its table."""

    ranks: list[tuple[int, int, str]] = field(default_factory=list)
    rows: list[_Row] = field(default_factory=list)


def is_nccl_text(text: str) -> bool:
    """Whether a text has the header or rows of an nccl-tests table."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    return any(_find_header(line) or _find_cells(line) for line in lines)


def _find_header(line: str) -> list[str] | None:
    names = line.replace("#wrong", "wrong").lstrip("#> \t").split()
    return names if {"count", "redop"} <= set(names) and {"size", "time", "algbw"} & set(names) else None


def read_nccl_text(path: Path, text: str) -> list[CollectiveRecord]:
    """The records of all runs of all_reduce_perf in a text."""
    runs, columns = [_Run()], None
    for number, line in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", line)
        if found := _STARTING.search(line):
            _refuse_other(path, found[1])
        if found := _RANK.search(line):
            if runs[-1].rows:
                runs.append(_Run())
            runs[-1].ranks.append((int(found[1]), int(found[2] or 0), found[3]))
        elif header := _find_header(line):
            columns = _read_header(path, number, header)
            if runs[-1].rows:
                runs.append(_Run())
        elif cells := _find_cells(line):
            if columns is None:
                raise RecordError(
                    f"{path}, line {number}: results of nccl-tests without its line `# size count ...` above"
                )
            runs[-1].rows.append(_read_row(path, number, columns, cells))
    runs = [run for run in runs if run.rows]
    if not runs:
        raise RecordError(f"{path} has the header of nccl-tests and no results below it")
    return [record for run in runs for record in _build_records(path, run)]


def _refuse_other(path: Path, program: str) -> None:
    if "all_reduce" not in program:
        raise RecordError(f"{path} is output of {program}: only that of all_reduce_perf can be read")


def _find_cells(line: str) -> list[str]:
    """The cells of a result line, which begins with bytes, elements and a dtype; empty for other lines."""
    cells = re.sub(r"\[\d+\]", " ", line).split()
    is_row = len(cells) > 3 and cells[0].isdigit() and cells[1].isdigit() and cells[2].isidentifier()
    return cells if is_row else []


def _read_header(path: Path, number: int, names: list[str]) -> list[str]:
    if "cputime" in names:
        raise RecordError(f"{path}, line {number}: cputime is the time of the launch alone: run nccl-tests without -C")
    if missing := [name for name in _NEEDED if name not in names]:
        raise RecordError(f"{path}, line {number}: the table lacks {', '.join(missing)}")
    end = names.index("time", names.index("time") + 1) if names.count("time") > 1 else len(names)
    return names[:end]


def _read_row(path: Path, number: int, columns: list[str], cells: list[str]) -> _Row:
    place = f"{path}, line {number}"
    if len(cells) < len(columns):
        raise RecordError(f"{place}: {len(cells)} cells where the header has {len(columns)} out of place")
    row = dict(zip(columns, cells, strict=False))
    try:
        timing = Summary(mean_s=float(row["time"]) * 1e-6)
        wrong = row.get("wrong", "N/A")
        num_wrong = None if wrong == "N/A" else int(float(wrong))
        return _Row(place, row, timing, _read_rounded(row["algbw"]), _read_rounded(row["busbw"]), num_wrong)
    except ValueError as error:
        raise RecordError(f"{place}: {error}") from None


def _read_rounded(text: str) -> tuple[float, float]:
    """A printed number and its rounding error: half a unit of its last digit."""
    digits = len(text.partition(".")[2].partition("e")[0])
    return float(text), 0.51 * 10.0**-digits if "e" not in text else 0.1 * float(text)


def read_nccl_json(path: Path, document: Any) -> list[CollectiveRecord]:
    """The records of a file written by nccl-tests with `-J`."""
    try:
        config = document["config"]
        _refuse_other(path, Path(document.get("args", ["all_reduce"])[0]).name)
        # Each process lists only its first device, and has threads x GPUs ranks.
        each = int(config["nthreads"]) * int(config["ngpus"])
        devices = [(d["rank"], d.get("group", 0), d["hostname"]) for d in config["devices"]]
        ranks = [(rank + more, group, host) for rank, group, host in devices for more in range(each)]
        run = _Run(ranks, list(_read_results(path, document["results"])))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordError(f"{path} is not the JSON of nccl-tests: {type(error).__name__} {error}") from None
    if not run.rows:
        raise RecordError(f"{path} has no results")
    return _build_records(path, run)


def _read_results(path: Path, results: Sequence[dict[str, Any]]) -> Iterator[_Row]:
    for number, row in enumerate(results, 1):
        place, found = f"{path}, result {number}", row["out_of_place"] or row["in_place"]
        if "time" not in found:
            raise RecordError(f"{place}: cpu_time is the time of the launch alone: run nccl-tests without -C")
        if missing := {"size", "type", "redop"} - row.keys():
            raise KeyError(*sorted(missing))
        each, wrong = row.get("out_of_place_per_iter") or {}, found.get("nwrong")
        timing = Summary(
            mean_s=float(found["time"]) * 1e-6, count=len(each.get("times_us", ())) or None,
            stdev_s=float(each["stdev_us"]) * 1e-6 if "stdev_us" in each else None,
        )  # fmt: skip
        alg, bus = ((float(found[name]), 1e-6) for name in ("alg_bw", "bus_bw"))
        yield _Row(place, row, timing, alg, bus, None if wrong is None else int(wrong))


def _build_records(path: Path, run: _Run) -> list[CollectiveRecord]:
    world_size, nodes = _count_ranks(path, run)
    records = []
    for row in run.rows:
        try:
            num_bytes, op, root = int(row.values["size"]), row.values["redop"], int(row.values.get("root", -1))
            if op == "none" or root >= 0:
                raise RecordError(f"redop {op} with root {root} is not an all-reduce, and only that is read")
            if row.num_wrong:
                what = f"{row.num_wrong} values of {format_bytes(num_bytes)} are wrong (#wrong)"
                raise RecordError(f"{what}: wrong results have no valid time; run nccl-tests again")
            dtype = _DTYPES.get(row.values["type"], "unknown")
            records.append(
                import_all_reduce(
                    "nccl", world_size, num_bytes, row.timing,
                    dtype=dtype, op=op, num_wrong=row.num_wrong, nodes=nodes, note=path.name,
                )
            )  # fmt: skip
        except (ValueError, TypeError) as error:
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
        found = f"{path}: rank {max(set(numbers), key=numbers.count)} is named twice in one run"
        raise RecordError(f"{found}: build nccl-tests with MPI=1, or give each output a file")
    if not numbers:
        return _find_ranks(path, run.rows), 0
    own = [host for _, group, host in run.ranks if group == run.ranks[0][1]]
    wanted = bus_factor("all_reduce", len(own))
    for row in run.rows:
        low, high = row.ratios
        if not low <= wanted <= high:
            has = f"busbw is {low:.2f} to {high:.2f} of algbw, and {wanted:.2f} on the {len(own)} ranks that are named"
            raise RecordError(f"{row.place}: {has}: another collective, or other ranks than those")
    if len(own) == 1:
        raise RecordError(f"{path}: each process measured one rank alone: build nccl-tests with MPI=1")
    return len(own), len(set(own))


def _find_ranks(path: Path, rows: Sequence[_Row]) -> int:
    """The number of ranks from the ratio of the bandwidths, 2 - 2/n, which must fit every row."""
    low, high = (pick(row.ratios[end] for row in rows) for end, pick in enumerate((max, min)))
    if low > high:
        raise RecordError(f"{path}: busbw / algbw differs between rows: they are of different numbers of ranks")
    if high < 0.99:
        raise RecordError(f"{path}: busbw is at most {high:.2f} of algbw: not an all-reduce on two or more ranks")
    least, most = (2 / (2 - ratio) if ratio < 2 else float(_MOST_RANKS) for ratio in (max(low, 0.99), high))
    first, last = max(2, math.ceil(least - 1e-9)), math.floor(most + 1e-9)
    if first != last:
        what = f"{path} does not say its ranks (busbw / algbw allows {first} to {last})"
        raise RecordError(f"{what}: keep the lines `# Rank` of nccl-tests")
    return first
