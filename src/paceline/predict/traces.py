"""Traces: their events, the merged document of all ranks, and the analysis of their steps.

Each instant of a step counts once. With kernels in the trace it belongs to the first of: a compute kernel, a message, a
copy, waiting for data, the host (an operator or a runtime call), other. Without kernels, operators are the compute and
take precedence over messages, but operators that fetch data count as waiting for data. So `communication` is exposed
communication: a message hidden by compute is free. Recording is in `measure.recorder`.
"""

import dataclasses
import functools
import gzip
import itertools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import RecordError
from paceline.predict.memory_use import MemoryMarks, MemoryUse, build_memory
from paceline.predict.simulate import BucketSpan
from paceline.records.checked import decode
from paceline.records.samples import group_by
from paceline.records.store import check_format, name_format

Event = dict[str, Any]

# Paceline's own events: a bucket in flight, a ready bucket that waits for its turn (`WAITED`: the wait in µs), and the
# end of a rank's own backward.
BUCKET, BUCKET_WAIT, WAITED, BACKWARD_OVER = "bucket", "bucket_wait", "waited us", "backward over"
# Event arguments needed by the analysis or by a reader; the others make up most of a trace's size.
_KEPT_ARGUMENTS = {
    "stream", "device", "grid", "block", "blocks per SM", "warps per SM", "est. achieved occupancy %", "bytes",
    "correlation", "Input Dims", "Total Allocated", "Total Reserved", "Bytes", "Addr", "Device Type", "Device Id",
    "name", "labels", "Collective name", "In msg nelems", "Group size", "dtype", "Input type", WAITED,
}  # fmt: skip
_COLLECTIVE_KERNEL = re.compile(r"nccl(Dev)?Kernel|^nccl|rcclGeneric|mscclKernel|(one|two)_shot_all_reduce")
# `nccl:` ranges on the host are launches; the kernel is the message. Other backends move data on the host.
_COLLECTIVE_RANGE = re.compile(
    r"(?!nccl:)[a-z_]+:_?(all_?reduce|all_?gather|reduce|broadcast|all_?to_?all|gather|scatter|send|recv|barrier)"
)
_MATMUL = re.compile(
    r"(?i)gemm|_mm_|matmul|nvjet|xmma|wgmma|hmma|flash|fmha|sdpa|attention|fprop|[dw]grad|convolve|conv\dd|winograd"
)
_ON_TENSOR_CORES = re.compile(
    # The last alternative is torch's masked attention, whose name contains the dtype but not the instruction.
    r"(?i)tensorop|tensor\d+x|hmma|imma|wgmma|nvjet|16816|1688|884|flash|xmma|tf32|fmha_cutlass[FB]_b?f16"
)
# Names of kernels that certainly do not use tensor cores.
_ON_ORDINARY_CORES = re.compile(r"simt|ffma|_f32_aligned|winograd", re.I)


@dataclass(frozen=True)
class RankTrace:
    """The events of one rank; `ts` and `dur` are µs since `origin_ns` of the Unix clock. `properties` describe the
    rank's GPUs, as torch writes them. `memory` has the marks of one more step, if requested."""

    rank: int
    world_size: int
    device: str
    host: str
    origin_ns: int
    events: list[Event]
    properties: list[dict[str, Any]] = field(default_factory=list)
    memory: MemoryMarks | None = None


def read_chrome(document: Mapping[str, Any], rank: int = 0, world_size: int = 1) -> RankTrace:
    """Read a trace exported by torch.profiler, and drop the events and arguments that are not needed here."""
    # Unnamed tracks, "Spans" and "Traces" describe the profiler itself.
    named = [e for e in document["traceEvents"] if "name" in e and e.get("pid") not in ("Spans", "Traces", "")]
    known = [e for e in named if e.get("cat") != "Trace" and "ph" in e and ("ts" in e or e["ph"] == "M")]
    first_us = min(event["ts"] for event in known if event["ph"] != "M")
    device = "cuda" if any(event.get("cat") == "kernel" for event in known) else "cpu"
    # Without a base time, timestamps are µs of the Unix clock, as written by torch before 2.2.
    origin_ns = int(document.get("baseTimeNanoseconds", 0)) + round(first_us * 1e3)
    events, properties = [_compact(event, first_us) for event in known], list(document.get("deviceProperties") or [])
    return RankTrace(rank, world_size, device, str(document.get("host_name", "")), origin_ns, events, properties)


def find_span(trace: RankTrace) -> tuple[int, int]:
    """Start and end of a trace, in ns on the Unix clock."""
    ends = (event["ts"] + event.get("dur", 0.0) for event in trace.events if event["ph"] != "M")
    return trace.origin_ns, trace.origin_ns + round(max(ends, default=0.0) * 1e3)


def read_ranks(document: Any) -> list[RankTrace]:
    """The ranks in a trace: the one that a torch.profiler export names, or all that `merge_traces` combined."""
    try:
        processes = [e for e in document["traceEvents"] if e.get("name") == "process_name" and e["ph"] == "M"]
        named = {e["pid"]: re.match(r"rank (\d+) \(", str(e["args"].get("name"))) for e in processes}
        merged = {pid: int(match[1]) for pid, match in named.items() if match}
        if not merged:
            place = document.get("distributedInfo") or {}
            if "rank" not in place:
                raise RecordError("it does not name its rank: trace with torch.profiler inside the ranks")
            return [read_chrome(document, int(place["rank"]), int(place["world_size"]))]
        by_process = group_by(document["traceEvents"], lambda event: event.get("pid"))
        parts = {rank: dict(document) | {"traceEvents": by_process[pid]} for pid, rank in merged.items()}
        return [read_chrome(part, rank, len(parts)) for rank, part in parts.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(
            f"it is not a torch.profiler trace: {type(error).__name__}: {error}", code="damaged"
        ) from None


def _compact(event: Mapping[str, Any], first_us: float) -> Event:
    compact = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "id", "bp", "s") if key in event}
    kept = dict(event.get("args") or {})
    if event["ph"] != "M":
        compact["ts"] = round(event["ts"] - first_us, 3)  # to 1 ns: epoch time as a float is no more precise
        kept = {key: value for key, value in kept.items() if key in _KEPT_ARGUMENTS}
    if event["ph"] == "X":
        compact["dur"] = max(0.0, float(event.get("dur", 0.0)))
    return compact | ({"args": kept} if kept else {})


def find_steps(events: Iterable[Event]) -> list[Event]:
    """The annotated ranges of complete steps, in order."""
    found = [e for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    return sorted((e for e in found if re.fullmatch(r"step \d+", e["name"])), key=lambda event: float(event["ts"]))


@functools.lru_cache(maxsize=10_000)  # traces have millions of events but hundreds of names
def is_collective(kind: str | None, name: str) -> bool:
    """Whether this is a message between ranks: an NCCL kernel, a gloo range, or a bucket of Paceline's wrapper."""
    if kind == "kernel":
        return _COLLECTIVE_KERNEL.search(name) is not None
    return kind == BUCKET or (kind == "user_annotation" and _COLLECTIVE_RANGE.match(name) is not None)


def find_messages(events: Iterable[Event]) -> list[Event]:
    """The messages of a trace. If the trace has communication kernels, buckets are dropped, since their times include
    queueing and would count twice. If NCCL was called but there is no kernel, as on one rank, nothing was sent."""
    timed = [event for event in events if event["ph"] == "X"]
    by_nccl = any(event.get("cat") == "user_annotation" and event["name"].startswith("nccl:") for event in timed)
    found = [event for event in timed if is_collective(event.get("cat"), event["name"])]
    on_gpu = by_nccl or any(event["cat"] == "kernel" for event in found)
    return [event for event in found if not on_gpu or event["cat"] != BUCKET]


@functools.lru_cache(maxsize=10_000)
def is_matmul(kernel: str) -> bool:
    """Whether this does matrix products, convolutions or attention, which can use tensor cores."""
    return _MATMUL.search(kernel) is not None


@functools.lru_cache(maxsize=10_000)
def uses_tensor_cores(kernel: str) -> bool:
    """Whether the kernel's name shows that it uses tensor cores; False for unknown names."""
    return is_matmul(kernel) and not _ON_ORDINARY_CORES.search(kernel) and _ON_TENSOR_CORES.search(kernel) is not None


# -- all ranks in one document -----------------------------------------------------------------------------------------


def merge_traces(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One Chrome trace with a process per rank, starting at 0, by the Unix clocks of their hosts."""
    origin_ns = min(trace.origin_ns for trace in traces)
    # Viewers treat process 0 and thread 0 as the idle task, and some identify threads by number alone.
    threads, flows = itertools.count(1), itertools.count(1)
    ordered = sorted(traces, key=lambda trace: trace.rank)
    events = [e for t in ordered for e in _renumber(t, (t.origin_ns - origin_ns) / 1e3, threads, flows)]
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    properties = [properties for trace in traces for properties in trace.properties]
    document = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
    return document | {"deviceProperties": properties, "traceEvents": events}


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
    metadata: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"rank {trace.rank} ({trace.device})"}),
        ("process_labels", 0, {"labels": ", ".join(filter(None, (trace.device, trace.host)))}),
        ("process_sort_index", 0, {"sort_index": trace.rank}),
    ]
    for place, tid in thread_of.items():
        metadata.append(("thread_name", tid, {"name": names.get(place) or f"thread {place[1]}"}))
        metadata.append(("thread_sort_index", tid, {"sort_index": tid}))
    for kind, tid, arguments in metadata:
        yield {"ph": "M", "name": kind, "pid": trace.rank + 1, "tid": tid, "args": arguments}


def render_trace(document: Mapping[str, Any]) -> bytes:
    """The compressed trace file, which Perfetto and chrome://tracing can open."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


Floats = npt.NDArray[np.float64]
Edges = tuple[Floats, Floats]  # starts and ends of intervals
Span = tuple[str, float, float]  # name, start and end


def _cover(points: Floats, starts: Floats, ends: Floats, weights: Floats | None = None) -> Floats:
    """For each segment between two points, the sum of the weights (1 by default) of the intervals that cover it."""
    begun, ended = (np.bincount(np.searchsorted(points, at), weights, minlength=len(points)) for at in (starts, ends))
    covered: Floats = np.cumsum(begun - ended, dtype=np.float64)[:-1]
    return covered


def _find_windows(moments: Floats, windows: Floats) -> npt.NDArray[np.intp]:
    """The window that contains each moment, or -1. Windows are rows of start and end, sorted and disjoint."""
    place = np.searchsorted(windows[:, 0], moments, side="right") - 1
    return np.where((place >= 0) & (moments < windows[np.maximum(place, 0), 1]), place, -1)


def _cut(edges: Iterable[Floats], windows: Floats) -> tuple[Floats, npt.NDArray[np.intp]]:
    """All start and end points in order, and the window that contains each segment between two of them."""
    points = np.unique(np.concatenate([windows.ravel(), *edges]))
    return points, _find_windows((points[1:] + points[:-1]) / 2, windows)


def attribute_time(classes: Sequence[Edges], windows: Floats) -> Floats:
    """The time of each window (row) in each class (column), and in none (last column). Each instant belongs to the
    first class that covers it, so the columns of a row sum to its window."""
    points, place = _cut(itertools.chain(*classes), windows)
    inside, width = place >= 0, len(classes) + 1
    owner = np.full(len(points) - 1, len(classes))
    for number in reversed(range(len(classes))):
        owner[_cover(points, *classes[number]) > 0.5] = number
    cells = place[inside] * width + owner[inside]
    times = np.bincount(cells, np.diff(points)[inside], minlength=len(windows) * width).astype(np.float64)
    return times.reshape(len(windows), width)


def union_time(starts: Floats, ends: Floats, windows: Floats) -> float:
    return float(attribute_time([(starts, ends)], windows)[:, 0].sum())


def sum_clipped(starts: Floats, ends: Floats, weights: Floats, windows: Floats) -> float:
    """The integral over the windows of the active intervals' weights, capped at 1 at each instant."""
    points, place = _cut((starts, ends), windows)
    return float((np.minimum(_cover(points, starts, ends, weights), 1.0) * np.diff(points))[place >= 0].sum())


def find_lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """A lane for each interval, in this order, such that intervals in a lane do not overlap; as few as possible."""
    free_at: list[float] = []
    lanes = []
    for start, end in intervals:
        lane = next((number for number, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


PHASES = ("forward", "backward", "optimizer")


def _find_phases(events: Iterable[Event], windows: Iterable[tuple[float, float]]) -> list[Span]:
    """The annotated phases of each window in order, in GPU times if available, since the host runs ahead."""
    kinds = ("gpu_user_annotation", "user_annotation")
    marked = [e for e in events if e["name"] in PHASES and e["ph"] == "X" and e.get("cat") in kinds]
    spans: list[Span] = []
    for begin, end in windows:
        own = [e for e in marked if begin <= e["ts"] < end]
        timed = {e["name"] for e in own if e["cat"] == kinds[0]}
        shown = [e for e in own if e["cat"] == kinds[0] or e["name"] not in timed]
        spans += sorted(((e["name"], e["ts"], min(end, e["ts"] + e["dur"])) for e in shown), key=lambda span: span[1])
    return spans


@dataclass(frozen=True)
class StepLane:
    """One step of one rank, in seconds of a clock shared by all ranks; `backward_end_s` is None without a backward."""

    rank: int
    phases: tuple[Span, ...]
    buckets: tuple[BucketSpan, ...]
    backward_end_s: float | None
    end_s: float

    @property
    def exposed_s(self) -> float:
        """Time from the end of backward to the end of the last message."""
        last_s = max((bucket.done_s for bucket in self.buckets), default=0.0)
        return 0.0 if self.backward_end_s is None else max(0.0, last_s - self.backward_end_s)


def build_lanes(traces: Sequence[RankTrace]) -> list[StepLane]:
    """The last step of each rank, on the clock of the rank that started it first."""
    steps = [(trace, find_steps(trace.events)[-1]) for trace in sorted(traces, key=lambda trace: trace.rank)]
    begins_ns = [trace.origin_ns + step["ts"] * 1e3 for trace, step in steps]
    return [
        _build_lane(trace, step["ts"], step["ts"] + step["dur"], (begin_ns - min(begins_ns)) / 1e9)
        for (trace, step), begin_ns in zip(steps, begins_ns, strict=True)
    ]


def _build_lane(trace: RankTrace, begin: float, end: float, later_s: float) -> StepLane:
    def at(ts: float) -> float:
        return later_s + (ts - begin) * 1e-6

    own = [e for e in trace.events if begin <= e.get("ts", -1.0) < end]
    spans = _find_phases(trace.events, [(begin, end)])
    # End of the last backward: from the wrapper, else from autograd, else from the annotation.
    marked = [e["ts"] for e in own if e["name"] == BACKWARD_OVER]
    operators = (e for e in own if e.get("cat") == "cpu_op")
    nodes = [e["ts"] + e["dur"] for e in operators if e["name"].startswith("autograd::engine::evaluate_function")]
    over = max(marked or nodes or [last for name, _, last in spans if name == "backward"], default=None)
    # A call of backward() also waits for the last messages; that is not compute and is not drawn as such.
    spans = [(name, first, min(last, over) if over and name == "backward" else last) for name, first, last in spans]
    phases = tuple((name, at(first), at(last)) for name, first, last in spans if last > first)
    buckets = []
    for args, first, took in ((e["args"], e["ts"], e["dur"]) for e in own if e.get("cat") == BUCKET):
        moments = (first - args.get(WAITED, 0.0), first, first, first + took)
        buckets.append(BucketSpan(int(args["bytes"]), *map(at, moments)))
    return StepLane(trace.rank, phases, tuple(buckets), None if over is None else at(over), at(end))


# -- the overview of one rank ------------------------------------------------------------------------------------------

CATEGORIES = ("kernel", "communication", "copy", "data", "cpu", "other")

# Operators that only contain other operators, and operators that launch messages: while nothing runs inside them,
# messages are exposed.
_FRAME = re.compile(r"autograd::engine::|torch::autograd::AccumulateGrad|c10d::|_c10d_functional::|record_param_comms")
_DATA = re.compile(r"enumerate\(DataLoader\)|data$")
# Calls that block the host until the device is done.
_WAITING = re.compile(r"(cuda|hip|cu)\w*Synchronize")
_CALLS = ("cuda_runtime", "cuda_driver")
_MAX_ROWS = 200


@dataclass(frozen=True)
class StepShares:
    """The wall time of a step, and the seconds in each of `CATEGORIES`, which sum to it."""

    name: str
    wall_s: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class OperatorRow:
    """A host operator: calls and seconds per step; `self_s` excludes the operators inside it."""

    name: str
    calls: float
    self_s: float
    total_s: float


@dataclass(frozen=True)
class KernelRow:
    """A kernel: calls and seconds per step. `kind` is `communication`, `matmul` or `other`."""

    name: str
    kind: str
    calls: float
    time_s: float
    uses_tensor_cores: bool
    occupancy: float | None = None

    @property
    def mean_s(self) -> float:
        return self.time_s / self.calls


@dataclass(frozen=True)
class GpuUse:
    """GPU utilization, as fractions: `busy` and `sm_efficiency` of wall time, the others of kernel time.
    `sm_efficiency` weights each instant by min(1, blocks / SMs) of the running kernels; `occupancy` is estimated, and
    weighted by time. `missed_s` is the time per step of kernels that could use tensor cores but do not."""

    name: str
    busy: float
    sm_efficiency: float | None
    occupancy: float | None
    kernel_s: float
    num_kernels: float
    tensor_core_share: float
    matmul_share: float
    communication_share: float
    missed_s: float
    launch_s: float


@dataclass(frozen=True)
class Overview:
    """The steps of one rank's trace. Values that do not belong to a single step are means per step. `message_s` is the
    time with at least one message in flight, hidden or not; `host_s` is the time the host worked. `optimizer_passes`
    counts the kinds of operators that take most of the optimizer's time: a fused optimizer has one."""

    rank: int
    world_size: int
    device: str
    steps: tuple[StepShares, ...]
    phases_s: dict[str, float]
    message_s: float
    host_s: float
    optimizer_passes: int = 0
    operators: tuple[OperatorRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    gpu: GpuUse | None = None
    memory: MemoryUse | None = None
    source: str = "measured"

    @property
    def step_s(self) -> float:
        return sum(step.wall_s for step in self.steps) / len(self.steps)

    def seconds(self, category: str) -> float:
        return sum(step.seconds[category] for step in self.steps) / len(self.steps)

    def share(self, category: str) -> float:
        return self.seconds(category) / self.step_s


def build_overview(trace: RankTrace) -> Overview:
    found = find_steps(trace.events)
    if not found:
        raise RecordError(f"the trace of rank {trace.rank} has no step: annotate each as 'step N'")
    windows = np.array([[step["ts"], step["ts"] + step["dur"]] for step in found], dtype=np.float64)
    windows[1:, 0] = np.maximum(windows[1:, 0], windows[:-1, 1])
    begin, end = windows[0, 0], windows[-1, 1]
    events = [e for e in trace.events if e["ph"] == "X" and e["ts"] < end and e["ts"] + e["dur"] > begin]
    begun = _begun_inside(events, windows)
    messages = find_messages(events)
    groups = _group(events, messages)
    times_us = attribute_time([_edges(group) for group in groups.values()], windows)
    steps = []
    for step, wall_us, row_us in zip(found, np.diff(windows)[:, 0], times_us, strict=True):
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        for group, time_us in zip([*groups, "other"], row_us, strict=True):
            seconds["cpu" if group == "compute" else group] += float(time_us) * 1e-6
        steps.append(StepShares(step["name"], float(wall_us) * 1e-6, seconds))
    scale, phases = 1e-6 / len(steps), _find_phases(begun, windows)
    spans = {name: np.array([span[1:] for span in phases if span[0] == name]).T for name in PHASES}
    # The host works in operators and calls, except in calls that wait for the device.
    working = [e for e in events if e.get("cat") in ("cpu_op", *_CALLS)]
    waiting = [e for e in working if e["cat"] in _CALLS and _WAITING.match(e["name"])]
    return Overview(
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device,
        steps=tuple(steps),
        phases_s={name: union_time(edges[0], edges[1], windows) * scale for name, edges in spans.items() if edges.size},
        message_s=union_time(*_edges(messages), windows) * scale,
        host_s=float(attribute_time([_edges(waiting), _edges(working)], windows)[:, 1].sum()) * scale,
        optimizer_passes=_count_passes(begun, windows),
        operators=_operators(begun, len(steps)),
        kernels=_kernels(begun, len(steps)),
        gpu=_gpu_use(trace, events, begun, windows),
        memory=None if trace.memory is None else build_memory(trace.events, trace.memory),
    )


def _group(events: Sequence[Event], messages: list[Event]) -> dict[str, list[Event]]:
    """The events of each class in order of precedence; `compute` has the operators of a trace without kernels."""
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    # On a CPU, operators inside the data range fetch data and are not compute.
    order = "kernel compute communication copy data cpu" if on_gpu else "data compute communication copy cpu kernel"
    groups: dict[str, list[Event]] = {name: [] for name in order.split()}
    for event in events:
        kind, name = event.get("cat"), event["name"]
        if is_collective(kind, name):
            continue
        if kind == "kernel":
            groups["kernel"].append(event)
        elif kind in ("gpu_memcpy", "gpu_memset"):
            groups["copy"].append(event)
        elif kind in ("user_annotation", "cpu_op") and _DATA.match(name):
            groups["data"].append(event)
        elif kind == "cpu_op":
            groups["cpu" if on_gpu or _FRAME.match(name) else "compute"].append(event)
        elif kind in _CALLS and not _WAITING.match(name):
            groups["cpu"].append(event)
    groups["communication"] = messages
    return groups


def _edges(events: Sequence[Event]) -> Edges:
    starts = np.array([event["ts"] for event in events], dtype=np.float64)
    return starts, starts + np.array([event["dur"] for event in events], dtype=np.float64)


def _begun_inside(events: Sequence[Event], windows: Floats) -> list[Event]:
    """The events that begin in a step; a trace also has events between steps."""
    place = _find_windows(np.array([event["ts"] for event in events], dtype=np.float64), windows)
    return [event for event, window in zip(events, place.tolist(), strict=True) if window >= 0]


def _own_times(events: Sequence[Event]) -> dict[str, list[float]]:
    """Calls, self time and total time of each operator, in µs."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    operators = (event for event in events if event.get("cat") == "cpu_op")
    for own in group_by(operators, lambda event: (event.get("pid"), event.get("tid"))).values():
        # an operator's end, the operator, and its children's times
        stack: list[tuple[float, Event, list[float]]] = []
        last: Event = {"ts": math.inf, "dur": 0.0}
        for event in [*sorted(own, key=lambda e: (e["ts"], -e["dur"])), last]:
            while stack and stack[-1][0] <= event["ts"]:
                _, done, inner = stack.pop()
                row = sums[done["name"]]
                row[:] = row[0] + 1, row[1] + max(0.0, done["dur"] - sum(inner)), row[2] + done["dur"]
            if stack:
                stack[-1][2].append(event["dur"])
            stack.append((event["ts"] + event["dur"], event, []))
    return sums


def _count_passes(events: Sequence[Event], windows: Floats) -> int:
    # Operators run on the host, so use the optimizer's range on the host.
    on_host = _find_phases((event for event in events if event.get("cat") != "gpu_user_annotation"), windows)
    spans = np.array([span[1:] for span in on_host if span[0] == "optimizer"], dtype=np.float64)
    inside = _begun_inside(events, spans) if spans.size else []
    alone = [row[1] for name, row in _own_times(inside).items() if name.startswith("aten::")]
    return sum(time_us > 0.05 * sum(alone) for time_us in alone)


def _operators(events: Sequence[Event], num_steps: int) -> tuple[OperatorRow, ...]:
    sums, scale = _own_times(events), 1e-6 / num_steps
    rows = [OperatorRow(n, c / num_steps, own * scale, total * scale) for n, (c, own, total) in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.self_s)[:_MAX_ROWS])


def _kernels(events: Sequence[Event], num_steps: int) -> tuple[KernelRow, ...]:
    rows = []
    kernels = (event for event in events if event.get("cat") == "kernel")
    for name, same in group_by(kernels, lambda event: str(event["name"])).items():
        kind = "communication" if is_collective("kernel", name) else "matmul" if is_matmul(name) else "other"
        calls, time_s = len(same) / num_steps, _sum_us(same) * 1e-6 / num_steps
        rows.append(KernelRow(name, kind, calls, time_s, uses_tensor_cores(name), _mean_occupancy(same)))
    return tuple(sorted(rows, key=lambda row: -row.time_s)[:_MAX_ROWS])


def _sum_us(events: Iterable[Event]) -> float:
    return float(sum(event["dur"] for event in events))


def _argument(event: Event, name: str) -> float | None:
    value = (event.get("args") or {}).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _mean_occupancy(kernels: Sequence[Event]) -> float | None:
    """The time-weighted mean over kernels with a known occupancy; communication kernels have none."""
    known = [(e["dur"], _argument(e, "est. achieved occupancy %")) for e in kernels]
    pairs = [(time_us, percent / 100) for time_us, percent in known if percent]  # the profiler writes 0 for unknown
    total = sum(time_us for time_us, _ in pairs)
    return sum(time_us * share for time_us, share in pairs) / total if total else None


def _gpu_use(trace: RankTrace, events: Sequence[Event], begun: Sequence[Event], windows: Floats) -> GpuUse | None:
    kernels = [event for event in begun if event.get("cat") == "kernel"]
    total_us, wall_us, scale = _sum_us(kernels), float(np.diff(windows).sum()), 1e-6 / len(windows)
    if not total_us:
        return None
    properties = trace.properties[0] if trace.properties else {}
    known, num_sms = [], int(properties.get("numSms", 0))
    for event in kernels:
        blocks, grid = _argument(event, "blocks per SM"), (event.get("args") or {}).get("grid")
        if blocks is None and isinstance(grid, list) and num_sms:
            blocks = math.prod(grid) / num_sms
        if blocks is not None:
            known.append((event, min(1.0, blocks)))
    weights = np.array([share for _, share in known])
    computing = [event for event in kernels if not is_collective("kernel", event["name"])]
    matmuls = [event for event in computing if is_matmul(event["name"])]
    matmul_us = _sum_us(matmuls)
    tensor_us = _sum_us(event for event in matmuls if uses_tensor_cores(event["name"]))
    launches = [
        e for e in events if e.get("cat") == "cuda_runtime" and re.match(r"(cuda|hip|cu)\w*LaunchKernel", e["name"])
    ]
    return GpuUse(
        name=str(properties.get("name", "")),
        busy=union_time(*_edges(kernels), windows) / wall_us,
        sm_efficiency=sum_clipped(*_edges([e for e, _ in known]), weights, windows) / wall_us if known else None,
        occupancy=_mean_occupancy(computing),
        kernel_s=total_us * scale,
        num_kernels=len(kernels) / len(windows),
        tensor_core_share=tensor_us / total_us,
        matmul_share=matmul_us / total_us,
        communication_share=1 - _sum_us(computing) / total_us,
        missed_s=(matmul_us - tensor_us) * scale,
        launch_s=_sum_us(launches) / len(launches) * 1e-6 if launches else 0.0,
    )


_FORMAT = ("paceline-overview", 1)


def overview_to_json(overview: Overview) -> dict[str, Any]:
    return name_format(_FORMAT) | dataclasses.asdict(overview)


def overview_from_json(document: Mapping[str, Any]) -> Overview:
    fields = {key: value for key, value in document.items() if key not in name_format(_FORMAT)}
    check_format(document, _FORMAT, "an overview")
    overview: Overview = decode(Overview, fields, "overview")
    return overview


@dataclass(frozen=True)
class Lateness:
    """The rank that is most often last, and the fraction of steps in which it is. `mean_s` is how long the other ranks
    waited on average, as a median over steps."""

    rank: int
    share: float
    mean_s: float


def find_late(steps: Iterable[Iterable[Mapping[int, float]]]) -> Lateness | None:
    """The rank that the others wait for, from the seconds that each rank spends in each message of each step. Moving
    the bytes takes the same time on all ranks; the rest is waiting. Later messages inherit the lateness of earlier
    ones, so only the worst message of a step counts. None if no message has times from two ranks."""
    last = Counter[int]()
    late_s = []
    for messages in steps:
        compared = [row for row in messages if len(row) > 1]
        if compared:
            worst = max(compared, key=lambda row: sum(row.values()) - len(row) * min(row.values()))
            rank = min(worst, key=worst.__getitem__)
            last[rank] += 1
            late_s.append((sum(worst.values()) - worst[rank]) / (len(worst) - 1) - worst[rank])
    if not late_s:
        return None
    rank, times = last.most_common(1)[0]
    return Lateness(rank, times / len(late_s), statistics.median(late_s))


def _list_arrivals_ns(trace: RankTrace) -> list[list[float]]:
    """For each step, when this rank reached each message, in order."""
    found = find_messages(trace.events)
    # On gloo, a bucket appears twice, from the wrapper and from gloo; use the same event on every rank.
    found = [event for event in found if event["cat"] == BUCKET] or found
    messages = sorted(trace.origin_ns + event["ts"] * 1e3 for event in found)
    begins = [(trace.origin_ns + step["ts"] * 1e3, step["dur"] * 1e3) for step in find_steps(trace.events)]
    return [[moment for moment in messages if begin <= moment < begin + took] for begin, took in begins]


def find_lateness(traces: Sequence[RankTrace]) -> Lateness | None:
    """The late rank, from the times at which ranks reach messages. The ranks' clocks must agree, as they do on one
    host. None if there is nothing to compare: one rank, no messages, or ranks with different messages."""
    ranks = [trace.rank for trace in traces]
    steps = []
    for arrivals in zip(*map(_list_arrivals_ns, traces), strict=False):
        if len({len(moments) for moments in arrivals}) == 1:
            messages = zip(*arrivals, strict=True)
            steps.append([{r: (max(row) - at) / 1e9 for r, at in zip(ranks, row, strict=True)} for row in messages])
    return find_late(steps)
