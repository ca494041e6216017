"""Simulated steps as a trace that Perfetto and chrome://tracing open. Traces of real steps are made in `measure`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.predict.simulate import SimulatedStep
from paceline.units import format_bytes

_COMPUTE, _FIRST_LANE = 1, 2


def render_timeline(steps: Mapping[str, SimulatedStep]) -> str:
    """A process for each named step: its phases on one track, and each bucket ready, queued and under way on others."""
    events: list[dict[str, Any]] = []
    for pid, (name, step) in enumerate(steps.items(), 1):
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{name} (simulated)"}},
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": _COMPUTE, "args": {"name": "this rank"}},
        ]
        begin = step.before_s
        exposed_s = max(0.0, step.over_s - step.backward_s)
        phases = (
            ("data and forward", 0.0, begin), ("backward", begin, step.backward_s),
            ("exposed communication", begin + step.backward_s, exposed_s),
            ("optimizer", begin + step.over_s, step.after_s),
        )  # fmt: skip
        events += [_span(pid, _COMPUTE, what, start_s, length_s) for what, start_s, length_s in phases if length_s > 0]
        for number, bucket in enumerate(step.buckets):
            lane = _FIRST_LANE + number
            size = format_bytes(bucket.num_bytes)
            label = f"bucket {number}, {size}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": label}})
            for what, start_s, end_s in (
                ("gathered", bucket.ready_s, bucket.launch_s), ("queued", bucket.launch_s, bucket.start_s),
                ("under way", bucket.start_s, bucket.done_s),
            ):  # fmt: skip
                if end_s > start_s:
                    events.append(_span(pid, lane, f"{what}, {size}", begin + start_s, end_s - start_s))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=None) + "\n"


def _span(pid: int, tid: int, name: str, start_s: float, length_s: float) -> dict[str, Any]:
    times = {"ts": round(start_s * 1e6, 3), "dur": round(length_s * 1e6, 3)}
    return {"ph": "X", "cat": "simulated", "name": name, "pid": pid, "tid": tid, **times}
