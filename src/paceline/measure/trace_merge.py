"""The traces of all ranks as one document for a trace viewer, on one clock. What it says is in `trace_overview`."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.measure.trace_events import Event, RankTrace
from paceline.records.store import write_new

__all__ = ["check_trace", "load_trace", "merge_traces", "save_trace"]

_PHASES = frozenset("BEXiIsftbneCM")
_METADATA = frozenset({"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"})


def merge_traces(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One Chrome trace with a process for each rank; its earliest event is at 0.

    The ranks' clocks are the Unix clocks of their hosts: on one host that is one clock.
    """
    if not traces:
        raise RecordError("no trace to merge: record at least one rank")
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise RecordError(f"two traces of one rank among {ranks}: merge one of each")
    origin_ns = min(trace.origin_ns for trace in traces)
    # Viewers take process 0 and thread 0 for the idle task, and some tell threads apart by their number alone.
    threads, flows = itertools.count(1), itertools.count(1)
    events: list[Event] = []
    for trace in sorted(traces, key=lambda trace: trace.rank):
        events += _renumber(trace, (trace.origin_ns - origin_ns) / 1e3, threads, flows)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin_ns,
        "deviceProperties": [properties for trace in traces for properties in trace.properties],
        "traceEvents": events,
    }


def _renumber(trace: RankTrace, later_us: float, threads: Iterator[int], flows: Iterator[int]) -> Iterator[Event]:
    pid = trace.rank + 1
    thread_of: dict[tuple[Any, Any], int] = {}
    flow_of: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in trace.events:
        place = event.get("pid"), event.get("tid")
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[place] = str(event.get("args", {}).get("name", ""))
            continue
        if place not in thread_of:
            thread_of[place] = next(threads)
        renumbered = {**event, "pid": pid, "tid": thread_of[place], "ts": round(event["ts"] + later_us, 3)}
        if "id" in event:
            flow = event.get("cat"), event["id"]
            if flow not in flow_of:
                flow_of[flow] = next(flows)
            renumbered["id"] = flow_of[flow]
        yield renumbered
    where = f"{trace.device}, {trace.host}" if trace.host else trace.device
    yield _metadata("process_name", pid, 0, name=f"rank {trace.rank} ({trace.device})")
    yield _metadata("process_labels", pid, 0, labels=where)
    yield _metadata("process_sort_index", pid, 0, sort_index=trace.rank)
    for place, tid in thread_of.items():
        yield _metadata("thread_name", pid, tid, name=names.get(place) or f"thread {place[1]}")
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _metadata(kind: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def check_trace(document: Mapping[str, Any]) -> list[str]:
    """What is wrong with a Chrome trace, one line each, worded as found; empty where a viewer can show it."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        return ['no list "traceEvents"']
    found: Counter[str] = Counter()
    named = {e.get("pid") for e in events if isinstance(e, dict) and e.get("name") == "process_name"}
    opened: dict[tuple[Any, Any], list[Any]] = {}
    flows: dict[Any, list[int]] = {}
    for event in events:
        if not isinstance(event, dict):
            found[f"an event that is a {type(event).__name__}"] += 1
            continue
        phase, place = event.get("ph"), (event.get("pid"), event.get("tid"))
        if phase not in _PHASES:
            found[f"unknown phase {phase!r}"] += 1
        elif phase == "M":
            found.update(_check_metadata(event))
            continue
        found.update(_check_times(event))
        if event.get("pid") not in named:
            found[f"process {event.get('pid')!r} has no name"] += 1
        if phase == "B":
            opened.setdefault(place, []).append(event.get("name"))
        elif phase == "E" and not (opened.get(place) and opened[place].pop()):
            found[f"an end without a begin on thread {place[1]!r}"] += 1
        elif phase in ("s", "f"):
            flows.setdefault((event.get("cat"), event.get("id")), [0, 0])["sf".index(phase)] += 1
    for (_, tid), names in opened.items():
        found.update(f"{name!r} begins and never ends on thread {tid!r}" for name in names)
    found.update(f"{count[0]} flows begin with one id" for count in flows.values() if count[0] > 1)
    return [line if count == 1 else f"{line} ({count} times)" for line, count in found.items()]


def _check_metadata(event: Event) -> Iterator[str]:
    if event.get("name") not in _METADATA:
        yield f"unknown metadata {event.get('name')!r}"
    elif not isinstance(event.get("args"), dict):
        yield f"metadata {event['name']} says nothing"


def _check_times(event: Event) -> Iterator[str]:
    for key in ("ts", "dur") if event.get("ph") == "X" else ("ts",):
        value = event.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            yield f"{key} is {value!r} in {event.get('name')!r}"


def save_trace(document: Mapping[str, Any], path: Path) -> None:
    """Write the trace to a new file `*.json.gz`, which Perfetto and chrome://tracing open as it is."""
    if not path.name.endswith(".json.gz"):
        raise RecordError(f"a trace is written compressed and {path.name!r} does not end in .json.gz: name it so")
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    write_new(path, gzip.compress(text.encode(), compresslevel=6, mtime=0))


def load_trace(path: str | Path) -> dict[str, Any]:
    """Read a Chrome trace, compressed or not."""
    try:
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist: give a trace, *.json or *.json.gz") from None
    except (OSError, EOFError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as a trace: {error}") from None
    if not isinstance(document, dict) or "traceEvents" not in document:
        raise RecordError(f'{path} is not a Chrome trace: it lacks "traceEvents"')
    return document
