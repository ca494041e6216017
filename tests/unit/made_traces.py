"""Synthetic traces, in ms, with known results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.predict.traces import Event, RankTrace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SGEMM, TENSOR_GEMM = "ampere_sgemm_128x64_nn", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"


class MadeTrace:
    """Events from start and end times in ms; host events are on thread 1, kernels on stream 7."""

    def __init__(self, rank: int = 0, origin_ms: float = 0.0, properties: dict[str, Any] | None = None) -> None:
        self.rank, self.origin_ms = rank, origin_ms
        self.properties = [properties] if properties else []
        self.events: list[Event] = []

    def add(self, kind: str, name: str, begin: float, end: float, tid: object = None, **arguments: Any) -> MadeTrace:
        on_device = kind in ("kernel", "gpu_memcpy", "gpu_memset")
        place = (0, tid or 7) if on_device else (100, tid or 1)
        self.events.append(
            {
                "ph": "X", "cat": kind, "name": name, "pid": place[0], "tid": place[1], "ts": begin * 1e3,
                "dur": (end - begin) * 1e3, "args": arguments,
            }
        )  # fmt: skip
        return self

    def step(self, begin: float = 0.0, end: float = 10.0, number: int = 0) -> MadeTrace:
        return self.add("user_annotation", f"step {number}", begin, end)

    def phase(self, name: str, begin: float, end: float) -> MadeTrace:
        return self.add("user_annotation", name, begin, end)

    def op(self, name: str, begin: float, end: float, **options: Any) -> MadeTrace:
        return self.add("cpu_op", name, begin, end, **options)

    def kernel(self, name: str, begin: float, end: float, **arguments: Any) -> MadeTrace:
        return self.add("kernel", name, begin, end, **arguments)

    def bucket(self, begin: float, end: float, num_bytes: int = 2**20) -> MadeTrace:
        return self.add("bucket", "bucket", begin, end, tid="buckets 0", bytes=num_bytes)

    def build(self) -> RankTrace:
        device = "cuda" if any(event.get("cat") == "kernel" for event in self.events) else "cpu"
        return RankTrace(self.rank, 2, device, "box", round(self.origin_ms * 1e6), self.events, self.properties)


_PHASES = frozenset("BEXiIsftbneCM")
_METADATA = frozenset({"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"})


def check_trace(document: Mapping[str, Any]) -> list[str]:
    """Errors in a Chrome trace, one per line; empty if a viewer can show it."""
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
