"""What one rank's trace says: where the time of a step goes, and which operators and kernels take it.

Each instant of a step counts once. With kernels in the trace it belongs to the first of: a kernel that computes, a
message, a copy, waiting for data, the host (an operator or a call of the runtime), other. Without kernels the operators
are what computes and come before messages, but those that fetch data are waited for. So `communication` is what is
exposed: a message behind arithmetic is free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import RecordError
from paceline.measure.trace_events import (
    Event,
    RankTrace,
    find_messages,
    find_steps,
    is_collective,
    is_matmul,
    uses_tensor_cores,
)
from paceline.measure.trace_phases import find_phases
from paceline.measure.trace_sweep import Floats, attribute_time, self_times, sum_clipped, union_time

__all__ = ["CATEGORIES", "GpuUse", "KernelRow", "OperatorRow", "Overview", "StepShares", "build_overview"]

CATEGORIES = ("kernel", "communication", "copy", "data", "cpu", "other")

# Operators that only hold others, and those that start messages: while nothing runs in them, a message is exposed.
_FRAME = re.compile(r"autograd::engine::|torch::autograd::AccumulateGrad|c10d::|_c10d_functional::|record_param_comms")
_DATA = re.compile(r"enumerate\(DataLoader\)|data$")
# Calls in which the host waits for the device; the host has time there.
_WAITING = re.compile(r"(cuda|hip|cu)\w*Synchronize")
_LAUNCH = re.compile(r"(cuda|hip|cu)\w*LaunchKernel")
_MAX_ROWS = 200


@dataclass(frozen=True)
class StepShares:
    """One step: its wall time, and the seconds of it that belong to each of `CATEGORIES`; they sum to it."""

    name: str
    wall_s: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class OperatorRow:
    """An operator of the host: calls and seconds per step; `self_s` is without the operators inside it."""

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
    """How a GPU was used. Shares are of 1; `busy` and `sm_efficiency` of the wall time, the others of kernel time.

    `sm_efficiency` weighs each instant by min(1, blocks / SMs) of what runs; `occupancy` is the kernels' estimated
    one, weighted by their time. `missed_s` is the time per step of kernels that could use tensor cores and do not.
    """

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
    """The steps of one rank's trace. Everything that is not of one step is a mean per step.

    `message_s` is when at least one message was on its way, hidden or not; `host_s` when the host worked.
    `optimizer_passes` counts the kinds of operators that take most of the optimizer's time: a fused one has one.
    """

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
    peak_bytes: int | None = None
    source: str = "measured"

    @property
    def step_s(self) -> float:
        return sum(step.wall_s for step in self.steps) / len(self.steps)

    def seconds(self, category: str) -> float:
        """Seconds per step that belong to one of `CATEGORIES`."""
        return sum(step.seconds[category] for step in self.steps) / len(self.steps)

    def share(self, category: str) -> float:
        return self.seconds(category) / self.step_s


def build_overview(trace: RankTrace) -> Overview:
    """Analyse the whole steps of one rank's trace."""
    steps = find_steps(trace.events)
    if not steps:
        raise RecordError(f"the trace of rank {trace.rank} has no step: annotate each as 'step N', or use prof.step()")
    windows = np.array([[step["ts"], step["ts"] + step["dur"]] for step in steps], dtype=np.float64)
    windows[1:, 0] = np.maximum(windows[1:, 0], windows[:-1, 1])
    begin, end = windows[0, 0], windows[-1, 1]
    events = [e for e in trace.events if e["ph"] == "X" and e["ts"] < end and e["ts"] + e["dur"] > begin]
    begun = _begun_inside(events, windows)
    kernels = [event for event in begun if event.get("cat") == "kernel"]
    spans = find_phases(begun, windows)
    messages = find_messages(events)
    groups = _group(events, messages)
    shares = attribute_time([_edges(groups[name]) for name in groups], windows)
    scale = 1e-6 / len(steps)
    return Overview(
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device,
        steps=tuple(
            _build_shares(step["name"], windows[number], list(groups), shares[number])
            for number, step in enumerate(steps)
        ),
        phases_s={name: union_time(*_columns(spans[name]), windows) * scale for name in spans},
        message_s=union_time(*_edges(messages), windows) * scale,
        host_s=_host_time(events, windows) * scale,
        optimizer_passes=_count_passes(begun, windows),
        operators=_operators(begun, len(steps)),
        kernels=_kernels(kernels, len(steps)),
        gpu=_gpu_use(trace, events, kernels, windows),
        peak_bytes=_peak_bytes(trace.events),
    )


def _group(events: Sequence[Event], messages: list[Event]) -> dict[str, list[Event]]:
    """The events of each class in the order of precedence; `compute` is the operators of a trace without kernels."""
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    # On a CPU the operators inside the range of the data are what fetches it, and compute nothing.
    order = (
        ("kernel", "compute", "communication", "copy", "data", "cpu")
        if on_gpu
        else ("data", "compute", "communication", "copy", "cpu", "kernel")
    )
    groups: dict[str, list[Event]] = {name: [] for name in order}
    for event in events:
        kind, name = event.get("cat"), event["name"]
        if is_collective(event):
            continue
        if kind == "kernel":
            groups["kernel"].append(event)
        elif kind in ("gpu_memcpy", "gpu_memset"):
            groups["copy"].append(event)
        elif kind in ("user_annotation", "cpu_op") and _DATA.match(name):
            groups["data"].append(event)
        elif kind == "cpu_op":
            groups["cpu" if on_gpu or _FRAME.match(name) else "compute"].append(event)
        elif kind in ("cuda_runtime", "cuda_driver") and not _WAITING.match(name):
            groups["cpu"].append(event)
    groups["communication"] = messages
    return groups


def _build_shares(name: str, window: Floats, groups: Sequence[str], times: Floats) -> StepShares:
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for group, time_us in zip([*groups, "other"], times, strict=True):
        seconds["cpu" if group == "compute" else group] += float(time_us) * 1e-6
    return StepShares(name, float(window[1] - window[0]) * 1e-6, seconds)


def _edges(events: Sequence[Event]) -> tuple[Floats, Floats]:
    starts = np.array([event["ts"] for event in events], dtype=np.float64)
    return starts, starts + np.array([event["dur"] for event in events], dtype=np.float64)


def _columns(spans: Floats) -> tuple[Floats, Floats]:
    return spans[:, 0], spans[:, 1]


def _host_time(events: Sequence[Event], windows: Floats) -> float:
    """Time in which the host works. An operator that asks the device for a number, and waits for it, does not."""
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    waiting = [event for event in calls if _WAITING.match(event["name"])]
    working = [event for event in events if event.get("cat") == "cpu_op"] + calls
    return float(attribute_time([_edges(waiting), _edges(working)], windows)[:, 1].sum())


def _begun_inside(events: Sequence[Event], windows: Floats) -> list[Event]:
    """The events that begin in a step; a trace has events between steps too."""
    begins = np.array([event["ts"] for event in events], dtype=np.float64)
    place = np.searchsorted(windows[:, 0], begins, side="right") - 1
    inside = (place >= 0) & (begins < windows[np.maximum(place, 0), 1])
    return [event for event, is_inside in zip(events, inside.tolist(), strict=True) if is_inside]


def _own_times(events: Sequence[Event]) -> dict[str, list[float]]:
    """Of each operator: calls, self time and total time, in µs."""
    threads: dict[tuple[object, object], list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            ranges = threads.setdefault((event.get("pid"), event.get("tid")), [])
            ranges.append((event["ts"], event["dur"], event["name"]))
    sums: dict[str, list[float]] = {}
    for ranges in threads.values():
        for name, total, alone in self_times(ranges):
            row = sums.setdefault(name, [0, 0.0, 0.0])
            row[0] += 1
            row[1] += alone
            row[2] += total
    return sums


def _count_passes(events: Sequence[Event], windows: Floats) -> int:
    # Operators are the host's, and so must the range be in which they are looked for.
    on_host = [event for event in events if event.get("cat") != "gpu_user_annotation"]
    spans = find_phases(on_host, windows).get("optimizer")
    if spans is None:
        return 0
    inside = _begun_inside(events, spans)
    alone = {name: row[1] for name, row in _own_times(inside).items() if name.startswith("aten::")}
    return sum(time_us > 0.05 * sum(alone.values()) for time_us in alone.values())


def _operators(events: Sequence[Event], num_steps: int) -> tuple[OperatorRow, ...]:
    sums, scale = _own_times(events), 1e-6 / num_steps
    rows = [OperatorRow(n, c / num_steps, own * scale, total * scale) for n, (c, own, total) in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.self_s)[:_MAX_ROWS])


def _kernels(kernels: Sequence[Event], num_steps: int) -> tuple[KernelRow, ...]:
    found: dict[str, list[Event]] = {}
    for event in kernels:
        found.setdefault(event["name"], []).append(event)
    rows = [
        KernelRow(
            name=name,
            kind="communication" if is_collective(same[0]) else "matmul" if is_matmul(name) else "other",
            calls=len(same) / num_steps,
            time_s=sum(event["dur"] for event in same) * 1e-6 / num_steps,
            uses_tensor_cores=uses_tensor_cores(name),
            occupancy=_mean_occupancy(same),
        )
        for name, same in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_s)[:_MAX_ROWS])


def _argument(event: Event, name: str) -> float | None:
    value = (event.get("args") or {}).get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _mean_occupancy(kernels: Sequence[Event]) -> float | None:
    """The mean over time of those kernels that tell; those of messages occupy few SMs on purpose and tell nothing."""
    told = [(e["dur"], _argument(e, "est. achieved occupancy %")) for e in kernels]
    pairs = [(time_us, percent / 100) for time_us, percent in told if percent]  # 0 is how the profiler says unknown
    total = sum(time_us for time_us, _ in pairs)
    return sum(time_us * share for time_us, share in pairs) / total if total else None


def _blocks_per_sm(event: Event, num_sms: int) -> float | None:
    told = _argument(event, "blocks per SM")
    if told is not None:
        return told
    grid = (event.get("args") or {}).get("grid")
    return math.prod(grid) / num_sms if isinstance(grid, list) and num_sms else None


def _gpu_use(trace: RankTrace, events: Sequence[Event], kernels: Sequence[Event], windows: Floats) -> GpuUse | None:
    scale = 1e-6 / len(windows)
    total_us = sum(event["dur"] for event in kernels)
    if not total_us:
        return None
    wall_us = float(np.diff(windows).sum())
    properties = trace.properties[0] if trace.properties else {}
    filled = [(e, _blocks_per_sm(e, int(properties.get("numSms", 0)))) for e in kernels]
    told = [(event, min(1.0, blocks)) for event, blocks in filled if blocks is not None]
    efficiency = None
    if told:
        weights = np.array([share for _, share in told])
        efficiency = sum_clipped(*_edges([event for event, _ in told]), weights, windows) / wall_us

    def share_us(chosen: Sequence[Event]) -> float:
        return float(sum(event["dur"] for event in chosen))

    computing = [event for event in kernels if not is_collective(event)]
    matmuls = [event for event in computing if is_matmul(event["name"])]
    on_tensor_cores = share_us([event for event in matmuls if uses_tensor_cores(event["name"])])
    launches = [e["dur"] for e in events if e.get("cat") == "cuda_runtime" and _LAUNCH.match(e["name"])]
    return GpuUse(
        name=str(properties.get("name", "")),
        busy=union_time(*_edges(kernels), windows) / wall_us,
        sm_efficiency=efficiency,
        occupancy=_mean_occupancy(computing),
        kernel_s=total_us * scale,
        num_kernels=len(kernels) / len(windows),
        tensor_core_share=on_tensor_cores / total_us,
        matmul_share=share_us(matmuls) / total_us,
        communication_share=1 - share_us(computing) / total_us,
        missed_s=(share_us(matmuls) - on_tensor_cores) * scale,
        launch_s=sum(launches) / len(launches) * 1e-6 if launches else 0.0,
    )


def _peak_bytes(events: Sequence[Event]) -> int | None:
    """The most that was allocated while the trace ran, on the GPU if it has one; None if memory was not recorded."""
    peaks: dict[int, int] = {}
    for event in events:
        if event["name"] == "[memory]":
            kind, total = _argument(event, "Device Type"), _argument(event, "Total Allocated")
            if kind is not None and total is not None:
                peaks[int(kind)] = max(peaks.get(int(kind), 0), int(total))
    return peaks[max(peaks)] if peaks else None
