"""DDP steps in torch.profiler traces of any program.

`read_steps` finds the steps of one rank in its events. It needs only what torch records in any job: autograd nodes, the
calls that launch all-reduces, the all-reduces, and the optimizer. On a GPU, times are those of the kernels, matched to
the calls that launched them, since the host runs ahead. `traced_job` builds a job from the steps.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import RecordError, refuse
from paceline.predict.accounting import PhaseFinder
from paceline.predict.traces import BUCKET, Event, Floats, RankTrace, find_messages, is_collective, union_time
from paceline.records.samples import group_by
from paceline.records.steps import SERVERS, TracedMessage, TracedStepRecord

_NODE, _ACCUMULATE = "autograd::engine::evaluate_function: ", "torch::autograd::AccumulateGrad"
_LAUNCH, _ALL_REDUCE = re.compile(r"c10d::_?all_?reduce"), re.compile(r"(?i)all_?reduce")
# At most one backward lies between two of these events. The second alternative of each pattern is Paceline's.
_FORWARDS, _MARKS = ("DistributedDataParallel.forward", "forward"), re.compile(r"ProfilerStep#\d+|step \d+")
_OPTIMIZER = "Optimizer.step#"
# torch.profiler's names of element types, in lower case and without namespace.
_ITEM_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2}
_INTEGERS = ("int", "long", "byte", "char", "bool", "unsigned", "signed")
_ByName = dict[str, list[Event]]
_CALLS, _WORKS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class _Backward(NamedTuple):
    """The autograd nodes between two forwards or optimizer steps; `limit` is when the next of those begins."""

    begin: float
    end: float
    limit: float
    nodes: list[Event]


class _Pair(NamedTuple):
    """An all-reduce and the call that launched it if the trace has one."""

    call: Event | None
    message: Event

    @property
    def handed(self) -> float:
        return float((self.call or self.message)["ts"])


def read_steps(trace: RankTrace) -> list[TracedStepRecord]:
    """The complete steps of one rank's trace, in order. RecordError names the missing information."""
    timed = sorted((event for event in trace.events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    ranges = [event for event in timed if event.get("cat") == "user_annotation"]
    backwards, device, phases = _find_backwards(timed, ranges), _Device(timed), PhaseFinder(timed)
    named = group_by(timed, lambda event: str(event["name"]))
    messages, calls = _find_sent(timed)
    refuse(
        (trace.world_size < 2, "it has only one rank, which sends nothing: trace a job with two or more"),
        (not backwards, "it has no backward: trace steps of training, with ProfilerActivity.CPU"),
        (not messages, "it has no all-reduce: trace steps of DistributedDataParallel on two or more ranks"),
        error=RecordError,
    )
    windows = _find_windows(timed, ranges, backwards)
    steps: list[TracedStepRecord] = []
    first = reached = previous = 0.0
    for number, (begin, end) in enumerate(windows):
        # Time between two step ranges, such as a barrier in the loop, belongs to no step. A GPU that lags behind works
        # through it.
        later = min(reached + begin - previous, max(reached, begin))
        first = later if number else device.find_start(begin, end)
        reached, previous = device.find_end(begin, end), end
        inside = [backward for backward in backwards if begin <= backward.begin < end]
        sent = [_pair(backward, calls, messages, device) for backward in inside]
        chosen = max((k for k, (pairs, _) in enumerate(sent) if pairs), default=len(inside) - 1)
        alone = [device.place(one) for k, one in enumerate(inside) if k != chosen and not sent[k][0]]
        if inside:
            pairs, num_other = sent[chosen]
            step = _build_step(trace, len(steps), inside[chosen], pairs, named, device, (begin, end), (first, reached))
            alone_s = tuple((last - first) * 1e-6 for first, last in alone)
            ids = [{id(pair.message) for pair in one} for one, _ in sent]
            resent = set().union(*ids) - ids[chosen]
            of_step = (begin, end), (first, reached), inside[: chosen + 1], ids[chosen], resent
            steps.append(replace(step, alone_s=alone_s, num_other=num_other, **phases.find(device, *of_step)))
    if not steps:
        raise RecordError("it has no complete step: trace two or more, up to the end of an optimizer step")
    return steps


def _find_backwards(timed: Sequence[Event], ranges: Sequence[Event]) -> list[_Backward]:
    nodes = [event for event in timed if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE)]
    names = [e for e in ranges if e["name"] in _FORWARDS or e["name"].startswith(_OPTIMIZER)]
    borders = sorted(e["ts"] for e in [*names, *(e for e in ranges if _MARKS.fullmatch(e["name"]))])
    found = []
    for place, run in group_by(nodes, lambda node: bisect.bisect(borders, node["ts"])).items():
        if any(node["name"].endswith(_ACCUMULATE) for node in run):
            limit = borders[place] if place < len(borders) else math.inf
            found.append(_Backward(run[0]["ts"], max(map(_end, run)), limit, run))
    return found


def _find_windows(
    timed: Sequence[Event], ranges: Sequence[Event], backwards: Sequence[_Backward]
) -> list[tuple[float, float]]:
    """Start and end of each step: its annotated range if every range contains an optimizer step (which may end later),
    otherwise from one optimizer step's end to the next."""
    optimizers = [event for event in ranges if event["name"].startswith(_OPTIMIZER)]
    ends = [_end(event) for event in optimizers]
    marks = [(event["ts"], _end(event)) for event in ranges if _MARKS.fullmatch(event["name"])]
    used = [mark for mark in marks if any(mark[0] <= backward.begin < mark[1] for backward in backwards)]
    if used and (not ends or all(any(begin <= e["ts"] < last for e in optimizers) for begin, last in used)):
        return used
    host = [event for event in timed if event.get("cat") in ("user_annotation", "cpu_op")]
    begins = [backward.begin for backward in backwards]
    if not ends:  # a step ends where the next forward begins
        ends = [min(backward.limit, max(map(_end, host))) for backward in backwards]
    # Several optimizers in one step end together.
    last = {bisect.bisect(begins, end): end for end in sorted(ends)}
    return list(itertools.pairwise([host[0]["ts"], *(end for count, end in sorted(last.items()) if count)]))


class _Device:
    """The compute device. On a GPU, a moment on the host maps to when all kernels launched by then are done."""

    def __init__(self, timed: Sequence[Event]) -> None:
        called = {_get(e, "correlation"): e for e in timed if e.get("cat") in _CALLS}
        works = (e for e in timed if e.get("cat") in _WORKS)
        calls = [(called[_get(e, "correlation")], e) for e in works if _get(e, "correlation") in called]
        calls.sort(key=lambda pair: _begin(pair[0]))
        linked = [(_begin(call), event) for call, event in calls]
        self.launched = {id(event): moment for moment, event in linked}
        self._all = _Kernels(linked)
        self._computing = _Kernels([pair for pair in linked if not is_collective(pair[1]["cat"], pair[1]["name"])])
        self.is_gpu = bool(self._computing.moments)
        shaped = (e for e in timed if e.get("cat") == "cpu_op" and _get(e, "Input Dims"))
        self._shaped, self._calls = group_by(shaped, lambda event: event.get("tid")), calls

    def find_start(self, begin: float, end: float) -> float:
        """When a GPU could start the first step of a trace, launched from `begin` to `end`. If it was busy with earlier
        work, its first kernel waited longer than the host needed to launch it."""
        own = (e for e in self._computing.list_within(begin, end) if e["cat"] == "kernel")
        if (kernel := next(own, None)) is None:
            return begin
        launch = self.launched[id(kernel)]
        return _begin(kernel) if _begin(kernel) - launch > launch - begin else begin

    def find_end(self, begin: float, end: float) -> float:
        """When the work that the host launched from `begin` to `end` is done."""
        return self._all.find_end(begin, end, end) if self.is_gpu else end

    def place(self, backward: _Backward) -> tuple[float, float]:
        part = backward.begin, backward.end
        begin = min(map(_begin, self._computing.list_within(*part)), default=part[0])
        return begin, self._computing.find_end(*part, part[1])

    def find_ready(self, begin: float, moment: float) -> float:
        """When the compute that a backward had launched by this moment is done. The backward began at `begin`."""
        return self._computing.find_end(begin, moment, 0.0) if self.is_gpu else moment

    def measure(self, begin: float, end: float) -> float:
        """Duration of the work that the host did or launched from `begin` to `end`."""
        return sum(event["dur"] for event in self._computing.list_within(begin, end)) if self.is_gpu else end - begin

    def measure_idle(self, begin: float, end: float, *parts: tuple[float, float]) -> float:
        """How long the GPU was idle within `parts`, given the work that the host launched from `begin` to `end`."""
        windows = np.array([part for part in parts if part[0] < part[1]])
        if not self.is_gpu or not windows.size:
            return 0.0
        works = self._all.list_within(begin, end)
        starts, ends = (np.array([moment(event) for event in works]) for moment in (_begin, _end))
        return float(np.diff(windows).sum()) - union_time(starts, ends, windows)

    def compare(self, begin: float, end: float, messages: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """The time of kernels that ran during messages, and of the same kernels without, for launches from `begin` to
        `end`. Counts only equal names and grids, launched by the same operators with inputs of the same shapes."""
        groups: defaultdict[Any, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for call, event in self._calls[self._all.find_within(begin, end)]:
            operators, first, last = self._shaped.get(call.get("tid"), []), _begin(event), _end(event)
            place = bisect.bisect(operators, _begin(call), key=_begin)
            if event["cat"] != "kernel" or is_collective("kernel", event["name"]) or not place:
                continue
            by = operators[place - 1]
            key = event["name"], str(_get(event, "grid")), by["name"], str(_get(by, "Input Dims"))
            if any(start <= first and last <= done for start, done in messages):
                groups[key][0].append(event["dur"])
            elif all(last <= start or done <= first for start, done in messages):
                groups[key][1].append(event["dur"])
        both = [(beside, alone) for beside, alone in groups.values() if beside and alone]
        return sum(sum(b) for b, _ in both) * 1e-6, sum(len(b) * statistics.median(a) for b, a in both) * 1e-6


class _Kernels:
    """GPU work in launch order."""

    def __init__(self, linked: Sequence[tuple[float, Event]]) -> None:
        self.moments, self._events = [moment for moment, _ in linked], [event for _, event in linked]
        self._ends = list(map(_end, self._events))

    def find_within(self, begin: float, end: float) -> slice:
        return slice(bisect.bisect_left(self.moments, begin), bisect.bisect_left(self.moments, end))

    def list_within(self, begin: float, end: float) -> list[Event]:
        return self._events[self.find_within(begin, end)]

    def find_end(self, begin: float, end: float, default: float) -> float:
        return max(self._ends[self.find_within(begin, end)], default=default)


def _find_sent(timed: Sequence[Event]) -> tuple[list[Event], list[Event]]:
    """The all-reduces, and the calls that launched them. Buckets recorded by Paceline's wrapper serve as the calls, or
    as the messages if the backend records none."""
    found = find_messages(timed)
    buckets, others = [e for e in found if e["cat"] == BUCKET], [e for e in found if e["cat"] != BUCKET]
    messages = [e for e in others if _ALL_REDUCE.search(f"{e['name']} {_get(e, 'Collective name')}")]
    if buckets:
        return (messages, buckets) if len(messages) == len(buckets) else (buckets, [])
    return messages, [e for e in timed if e.get("cat") == "cpu_op" and _LAUNCH.match(e["name"])]


def _pair(
    backward: _Backward, calls: Sequence[Event], messages: Sequence[Event], device: _Device
) -> tuple[list[_Pair], int]:
    """The buckets of a backward, matched with their calls, and the number of other all-reduces inside it. A backend
    starts them in call order, except that gloo's threads may swap adjacent ones, so the first ones belong to backward;
    later reductions by the program do not. The flags of unused parameters are integers, not buckets; nor are
    all-reduces launched by autograd nodes other than gradient hooks, such as SyncBatchNorm's."""
    moments = [device.launched.get(id(event), _begin(event)) for event in messages]
    launched = sorted(zip(moments, messages, strict=True), key=lambda pair: pair[0])
    sent = [event for moment, event in launched if backward.begin <= moment < backward.limit]
    own = [e for e in calls if backward.begin <= e["ts"] <= (backward.limit if e["cat"] == BUCKET else backward.end)]
    # If no hook launched an all-reduce, the all-reduces after the nodes belong to the end of backward.
    rest = [] if any(_is_of_hook(backward, e) for e in own) else [None] * max(0, len(sent) - len(own))
    pairs = list[_Pair]()
    for call in [*own, *rest][: len(sent)]:
        alike = (event for event in sent[: max(SERVERS.values())] if _find_elements(event) == _find_elements(call))
        pairs.append(_Pair(call, next(alike, sent[0])))
        sent.remove(pairs[-1].message)
    pairs = [pair for pair in pairs if not _name_type(pair.message, pair.call).startswith(_INTEGERS)]
    buckets = [pair for pair in pairs if _is_of_hook(backward, pair.call)]
    return buckets, len(pairs) - len(buckets)


def _is_of_hook(backward: _Backward, call: Event | None) -> bool:
    """Whether a gradient hook made the call, or no node on its thread did. Another node may run a nested backward."""
    if call is None or call["cat"] == BUCKET:
        return True
    same = [node for node in backward.nodes if node.get("tid") == call.get("tid")]
    around = [node["name"] for node in same if node["ts"] <= call["ts"] <= _end(node)]
    return not around or any(name.endswith(_ACCUMULATE) for name in around)


def _build_step(
    trace: RankTrace, number: int, backward: _Backward, pairs: Sequence[_Pair], named: _ByName, device: _Device,
    window: tuple[float, float], span: tuple[float, float],
) -> TracedStepRecord:  # fmt: skip
    """`window` is the step in host time, `span` in device time."""
    begin, end = device.place(backward)
    handed = [pair.handed for pair in pairs]
    hooks = [node for node in backward.nodes if node["name"].endswith(_ACCUMULATE)]
    # A gradient is ready when its hook ends, or when the hook launches a bucket.
    moments = [next((t for t in handed if node["ts"] <= t <= _end(node)), _end(node)) for node in hooks]
    ready = sorted(zip(moments, hooks, strict=True), key=lambda pair: pair[0])
    gradients, sent, are_known = _find_sizes(named, pairs, ready, device)
    backend, messages = _name_backend(pairs), list[TracedMessage]()
    servers = SERVERS.get(backend, 1)
    done, moving = [begin] * servers, list[tuple[float, float]]()
    for pair, num_bytes in zip(pairs, sent, strict=True):
        launch = max(begin, device.find_ready(backward.begin, pair.handed))
        # A range may begin before its data is ready, or before an earlier message is done.
        start = max(launch, pair.message["ts"], sorted(done)[-servers])
        # A backend's thread may record the end late, after the optimizer has started to use the result.
        done.append(max(start, _end(pair.message) if device.is_gpu else min(_end(pair.message), backward.limit)))
        moving.append((start, done[-1]))
        messages.append(TracedMessage(num_bytes, *((moment - begin) * 1e-6 for moment in (launch, start, done[-1]))))
    calls = [pair.call["dur"] for pair in pairs if pair.call is not None and pair.call["cat"] != BUCKET]
    beside_s, alone_s = device.compare(*window, moving)
    over = max(end, *done)
    idle = device.measure_idle(*window, (span[0], end), (over, span[1]))
    there = (min(end, max(begin, device.find_ready(backward.begin, moment))) for moment, _ in ready)
    return TracedStepRecord(
        rank=trace.rank, world_size=trace.world_size, device="cuda" if device.is_gpu else "cpu", backend=backend,
        host=trace.host, number=number, before_s=max(0.0, begin - span[0]) * 1e-6, backward_s=(end - begin) * 1e-6,
        after_s=max(0.0, span[1] - over) * 1e-6, gradient_bytes=tuple(gradients),
        ready_s=tuple((moment - begin) * 1e-6 for moment in there), messages=tuple(messages), are_sizes_known=are_known,
        launch_s=statistics.median(calls) * 1e-6 if calls and not device.is_gpu else 0.0,
        idle_s=max(0.0, idle) * 1e-6, beside_s=beside_s, without_s=alone_s,
    )  # fmt: skip


def _find_sizes(
    named: _ByName, pairs: Sequence[_Pair], ready: Sequence[tuple[float, Event]], device: _Device
) -> tuple[list[int], list[int], bool]:
    """Bytes of the gradients and of the messages, and whether the trace has the gradients' sizes. Otherwise each
    message is divided by the time of its gradients' hooks, which mostly copy into the bucket."""
    inner, comms = named.get(_ACCUMULATE, []), named.get("record_param_comms", [])
    handed = [pair.handed for pair in pairs]
    bucket_of = [min(bisect.bisect_left(handed, moment), len(handed) - 1) for moment, _ in ready]
    shapes = [size for _, node in ready if (size := _count_bytes(node, *_find_within(node, inner)))]
    sent = [size for p in pairs if (size := _count_bytes(p.message, p.call, *_find_within(p.call, comms)))]
    if len(shapes) < len(ready):
        if len(sent) < len(pairs):
            raise RecordError("it lacks the sizes of its all-reduces: trace with profile(..., record_shapes=True)")
        times = [device.measure(node["ts"], moment) for moment, node in ready]
        return _distribute(sent, bucket_of, np.array(times) - min(times) + 1e-3), sent, False
    if len(sent) < len(pairs):
        members = [[s for s, k in zip(shapes, bucket_of, strict=True) if k == n] for n in range(len(pairs))]
        sent = [max(1, sum(sizes)) for sizes in members]
    if pairs:  # unused parameters' gradients are also sent
        shapes[-1] += max(0, sum(sent) - sum(shapes))
    # A compressed message counts as the bytes of its gradients, as in bucket caps.
    return shapes, [round(size * sum(shapes) / sum(sent)) for size in sent], True


def _distribute(sent: Sequence[int], bucket_of: Sequence[int], weights: Floats) -> list[int]:
    shares = np.zeros(len(weights), dtype=np.int64)
    for number, size in enumerate(sent):
        # If buckets are launched together, all gradients map to the first, whose last gradient gets the others' bytes.
        own = [k for k, bucket in enumerate(bucket_of) if bucket == number]
        own = own or [max((k for k, bucket in enumerate(bucket_of) if bucket < number), default=0)]
        ends = np.round(np.cumsum(weights[own]) / weights[own].sum() * size / 4).astype(np.int64) * 4
        ends[-1] = size
        shares[own] += np.diff(ends, prepend=0)
    return [int(share) for share in shares]


def _find_within(event: Event | None, others: list[Event]) -> list[Event]:
    if event is None:
        return []
    return others[bisect.bisect_left(others, event["ts"], key=_begin) : bisect.bisect(others, _end(event), key=_begin)]


def _count_bytes(*events: Event | None) -> int:
    """Bytes from the arguments of the first event that has them; 0 if none does."""
    for event in events:
        count = _find_elements(event)
        if num_bytes := _get(event, "bytes") or count * _ITEM_BYTES.get(_name_type(*events), 4):
            return int(num_bytes)
    return 0


def _find_elements(event: Event | None) -> int:
    return _get(event, "In msg nelems") or _count_elements(_get(event, "Input Dims"))


def _count_elements(dims: Any) -> int:
    """The number of elements in all of these shapes. A zero-dimensional tensor counts only if it is the only one."""
    if not isinstance(dims, list) or not dims:
        return 0
    if dims == [[]]:
        return 1
    return sum(map(_count_elements, dims)) if isinstance(dims[0], list) else math.prod(dims)


def _name_type(*events: Event | None) -> str:
    """The element type of the first event that has one, as in `_ITEM_BYTES`; empty if none does."""
    for event in events:
        found = _get(event, "dtype") or next(iter(_get(event, "Input type") or ()), "")
        if found and "List" not in str(found):
            return str(found).rpartition("::")[2].lower()
    return ""


def _name_backend(pairs: Sequence[_Pair]) -> str:
    kinds = {("nccl" if pair.message["cat"] == "kernel" else pair.message["name"].partition(":")[0]) for pair in pairs}
    return "" if not pairs else "shm" if pairs[0].message["cat"] == BUCKET else sorted(kinds)[0]


def _get(event: Event | None, name: str) -> Any:
    return None if event is None else (event.get("args") or {}).get(name)


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
