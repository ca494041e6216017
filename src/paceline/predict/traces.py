"""Traces: what their events are, and the ranks of a run merged into one document.

Recording is in `measure.traces`, what a trace says about a step in `overview`.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RecordError

Event = dict[str, Any]

# The categories of our own events: a bucket on its way, and a bucket that is ready and waits for its turn.
BUCKET, BUCKET_WAIT = "bucket", "bucket_wait"
# The instant at which a rank's own backward was over, and how long a bucket waited for its turn, in µs.
BACKWARD_OVER, WAITED = "backward over", "waited us"
# What the analysis or a reader of the picture needs; the rest is most of a trace's size.
_KEPT_ARGUMENTS = {
    "stream", "device", "grid", "block", "blocks per SM", "warps per SM", "est. achieved occupancy %", "bytes",
    "correlation", "Input Dims", "Total Allocated", "Total Reserved", "Bytes", "Device Type", "name", "labels",
    "Collective name", "In msg nelems", "Group size", WAITED,
}  # fmt: skip
_FOREIGN = ("Spans", "Traces", "")  # tracks about the profiler itself
_STEP = re.compile(r"step \d+|ProfilerStep#\d+")

_COLLECTIVE_KERNEL = re.compile(r"nccl(Dev)?Kernel|^nccl|rcclGeneric|mscclKernel|(one|two)_shot_all_reduce")
# `nccl:` ranges of the host are launches: the kernel is the message. Other backends move data on the host.
_COLLECTIVE_RANGE = re.compile(
    r"(?!nccl:)[a-z_]+:_?(all_?reduce|all_?gather|reduce|broadcast|all_?to_?all|gather|scatter|send|recv|barrier)"
)
_MATMUL = re.compile(
    r"(?i)gemm|_mm_|matmul|nvjet|xmma|wgmma|hmma|flash|fmha|sdpa|attention|fprop|[dw]grad|convolve|conv\dd|winograd"
)
_ON_TENSOR_CORES = re.compile(
    # The last are torch's attention with a mask, which names the type and not the instruction.
    r"(?i)tensorop|tensor\d+x|hmma|imma|wgmma|nvjet|16816|1688|884|flash|xmma|tf32|fmha_cutlass[FB]_b?f16"
)
# Their names say that they multiply on the ordinary cores, whatever else they say.
_ON_ORDINARY_CORES = re.compile(r"simt|ffma|_f32_aligned|winograd", re.I)


@dataclass(frozen=True)
class RankTrace:
    """The events of one rank. Their `ts` and `dur` are µs, as in Chrome's format, since `origin_ns` of the Unix clock.

    `properties` are those of the rank's GPUs, as torch writes them; empty on CPU.
    """

    rank: int
    world_size: int
    device: str
    host: str
    origin_ns: int
    events: list[Event]
    properties: list[dict[str, Any]] = field(default_factory=list)


def read_chrome(document: Mapping[str, Any], rank: int | None = None) -> RankTrace:
    """A trace as torch's profiler exports it, without what nobody here needs. `rank` None takes that of the trace."""
    if not isinstance(document.get("traceEvents"), list):
        raise RecordError('this is not a Chrome trace: it lacks a list "traceEvents"; export one with torch.profiler')
    place = document.get("distributedInfo") or {}
    found = [event for event in document["traceEvents"] if _is_wanted(event)]
    timed = [event["ts"] for event in found if event["ph"] != "M"]
    if not timed:
        raise RecordError("the trace has no events: record at least one active step")
    first_us = min(timed)
    events = [_compact(event, first_us) for event in found]
    return RankTrace(
        rank=int(place.get("rank", 0)) if rank is None else rank,
        world_size=int(place.get("world_size", 1)),
        device="cuda" if any(event.get("cat") == "kernel" for event in events) else "cpu",
        host=str(document.get("host_name", "")),
        # Without a base, times are µs of the Unix clock: so wrote torch before 2.2.
        origin_ns=int(document.get("baseTimeNanoseconds", 0)) + round(first_us * 1e3),
        events=events,
        properties=list(document.get("deviceProperties") or []),
    )


def _is_wanted(event: Mapping[str, Any]) -> bool:
    is_known = "name" in event and event.get("pid") not in _FOREIGN and event.get("cat") != "Trace"
    return is_known and (event.get("ph") == "M" or ("ph" in event and "ts" in event))


def _compact(event: Mapping[str, Any], first_us: float) -> Event:
    compact = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "id", "bp", "s") if key in event}
    kept = dict(event.get("args") or {})
    if event["ph"] != "M":
        compact["ts"] = round(event["ts"] - first_us, 3)  # ns: a float of seconds since 1970 has no better
        kept = {key: value for key, value in kept.items() if key in _KEPT_ARGUMENTS}
    if event["ph"] == "X":
        compact["dur"] = max(0.0, float(event.get("dur", 0.0)))
    return compact | ({"args": kept} if kept else {})


def find_steps(events: Iterable[Event]) -> list[Event]:
    """The ranges of whole steps, in order: ours where the trace has them, else the profiler's."""
    found = [e for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X" and _STEP.fullmatch(e["name"])]
    ours = [e for e in found if e["name"].startswith("step ")]
    return sorted(ours or found, key=lambda event: float(event["ts"]))


def is_collective(event: Event) -> bool:
    """Whether the event is a message between ranks: a kernel of NCCL, a range of gloo's, a bucket of our wrapper."""
    return _names_collective(event.get("cat"), event["name"])


# Traces have millions of events and hundreds of names.
@functools.lru_cache(maxsize=10_000)
def _names_collective(kind: str | None, name: str) -> bool:
    if kind == "kernel":
        return _COLLECTIVE_KERNEL.search(name) is not None
    return kind == BUCKET or (kind == "user_annotation" and _COLLECTIVE_RANGE.match(name) is not None)


def find_messages(events: Iterable[Event]) -> list[Event]:
    """The messages of a trace. Where kernels show them, a bucket's own times, queueing included, would count twice; and
    where NCCL was called and no kernel shows it, as on one rank, nothing was sent."""
    timed = [event for event in events if event["ph"] == "X"]
    by_nccl = any(event.get("cat") == "user_annotation" and event["name"].startswith("nccl:") for event in timed)
    found = [event for event in timed if is_collective(event)]
    on_gpu = by_nccl or any(event["cat"] == "kernel" for event in found)
    return [event for event in found if not on_gpu or event["cat"] != BUCKET]


@functools.lru_cache(maxsize=10_000)
def is_matmul(kernel: str) -> bool:
    """Whether a kernel of this name multiplies matrices, convolves or attends: what tensor cores are for."""
    return _MATMUL.search(kernel) is not None


@functools.lru_cache(maxsize=10_000)
def uses_tensor_cores(kernel: str) -> bool:
    """Whether the name of a kernel says that it uses tensor cores; a name that says nothing counts as not."""
    return is_matmul(kernel) and not _ON_ORDINARY_CORES.search(kernel) and _ON_TENSOR_CORES.search(kernel) is not None


# -- all ranks in one document -----------------------------------------------------------------------------------------


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
    # Viewers take process 0 and thread 0 for the idle task, and some identify threads by their number alone.
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
    thread_of: defaultdict[Any, int] = defaultdict(lambda: next(threads))
    flow_of: defaultdict[Any, int] = defaultdict(lambda: next(flows))
    names: dict[Any, str] = {}
    for event in trace.events:
        place = event.get("pid"), event.get("tid")
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[place] = str(event.get("args", {}).get("name", ""))
            continue
        flow = {"id": flow_of[event.get("cat"), event["id"]]} if "id" in event else {}
        moved = {"pid": trace.rank + 1, "tid": thread_of[place], "ts": round(event["ts"] + later_us, 3)}
        yield {**event, **moved, **flow}
    where = f"{trace.device}, {trace.host}" if trace.host else trace.device
    metadata: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {trace.rank} ({trace.device})"}),
        ("process_labels", 0, {"labels": where}),
        ("process_sort_index", 0, {"sort_index": trace.rank}),
    ]
    for place, tid in thread_of.items():
        metadata.append(("thread_name", tid, {"name": names.get(place) or f"thread {place[1]}"}))
        metadata.append(("thread_sort_index", tid, {"sort_index": tid}))
    for kind, tid, arguments in metadata:
        yield {"ph": "M", "name": kind, "pid": trace.rank + 1, "tid": tid, "args": arguments}


def render_trace(document: Mapping[str, Any]) -> bytes:
    """The compressed file of a trace, which Perfetto and chrome://tracing open as it is."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)
