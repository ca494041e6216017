"""Forward, backward and optimizer in a trace, and the step of every rank as lanes of a picture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import RecordError
from paceline.measure.trace_events import BACKWARD_OVER, BUCKET, WAITED, Event, RankTrace, find_steps
from paceline.measure.trace_sweep import Floats
from paceline.report.timeline import BucketSpan, PhaseSpan, StepLane

__all__ = ["build_lanes", "find_phases", "phase_spans"]

PHASES = ("forward", "backward", "optimizer")
_BACKWARD, _OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer.step#"


def phase_spans(events: Sequence[Event], begin: float, end: float) -> list[tuple[str, float, float]]:
    """The phases between two moments: as annotated, by the GPU's times where it has them (the host runs ahead of it),
    else as autograd and the optimizer show them.

    Without annotations backward is from the first to the last node of autograd, and forward what is before it: with
    accumulation, where they take turns, only annotations tell them apart.
    """
    own = [e for e in events if e["ph"] == "X" and begin <= e["ts"] < end]
    annotated = [e for e in own if e.get("cat") == "user_annotation"]
    on_gpu = [e for e in own if e.get("cat") == "gpu_user_annotation" and e["name"] in PHASES]
    timed = {e["name"] for e in on_gpu}
    marks = on_gpu + [e for e in annotated if e["name"] in PHASES and e["name"] not in timed]
    spans = [(e["name"], e["ts"], min(end, e["ts"] + e["dur"])) for e in marks]
    named = {name for name, _, _ in spans}
    if "backward" not in named:
        nodes = [e for e in own if e.get("cat") == "cpu_op" and e["name"].startswith(_BACKWARD)]
        if nodes:
            first, last = min(e["ts"] for e in nodes), max(e["ts"] + e["dur"] for e in nodes)
            spans.append(("backward", first, last))
            if "forward" not in named:
                spans.append(("forward", begin, first))
    if "optimizer" not in named:
        steps = [e for e in annotated if e["name"].startswith(_OPTIMIZER)]
        spans += [("optimizer", e["ts"], e["ts"] + e["dur"]) for e in steps]
    return sorted(spans, key=lambda span: span[1])


def find_phases(events: Sequence[Event], windows: Floats) -> dict[str, Floats]:
    """Begin and end of each span of each phase, in order; a phase that the trace does not show is left out."""
    ranges = ("user_annotation", "gpu_user_annotation")
    telling = [e for e in events if e.get("cat") in ranges or e["name"].startswith(_BACKWARD)]
    spans = [span for begin, end in windows for span in phase_spans(telling, begin, end)]
    chosen = {phase: [span[1:] for span in spans if span[0] == phase] for phase in PHASES}
    return {phase: np.array(found, dtype=np.float64) for phase, found in chosen.items() if found}


def build_lanes(traces: Sequence[RankTrace], step: int = -1) -> list[StepLane]:
    """One step of each rank, by its place among the recorded ones, on the clock of the rank that began it first."""
    if not traces:
        raise RecordError("no trace to draw: record at least one rank")
    found = {trace.rank: find_steps(trace.events) for trace in traces}
    least = min(len(steps) for steps in found.values())
    if not -least <= step < least:
        raise RecordError(f"step {step} is not in the traces, which have {least} steps: choose one of them")
    begins_ns = {trace.rank: trace.origin_ns + found[trace.rank][step]["ts"] * 1e3 for trace in traces}
    first_ns = min(begins_ns.values())
    return [
        _build_lane(trace, found[trace.rank][step], (begins_ns[trace.rank] - first_ns) / 1e9)
        for trace in sorted(traces, key=lambda trace: trace.rank)
    ]


def _build_lane(trace: RankTrace, step: Event, later_s: float) -> StepLane:
    begin = float(step["ts"])
    end = begin + float(step["dur"])

    def at(ts: float) -> float:
        return later_s + (ts - begin) * 1e-6

    spans = phase_spans(trace.events, begin, end)
    own = [event for event in trace.events if begin <= event.get("ts", -1.0) < end]
    over = _backward_end(own, spans)
    # A call of backward() also waits for the last messages: that is no work, and drawn as what it is.
    spans = [(name, first, min(last, over) if over and name == "backward" else last) for name, first, last in spans]
    return StepLane(
        rank=trace.rank,
        phases=tuple(PhaseSpan(name, at(first), at(last)) for name, first, last in spans if last > first),
        buckets=tuple(
            BucketSpan(
                num_bytes=int(event["args"]["bytes"]),
                ready_s=at(event["ts"] - event["args"].get(WAITED, 0.0)),
                launch_s=at(event["ts"]),
                done_s=at(event["ts"] + event["dur"]),
            )
            for event in own
            if event.get("cat") == BUCKET
        ),
        backward_end_s=None if over is None else at(over),
        end_s=at(end),
    )


def _backward_end(events: Sequence[Event], spans: Sequence[tuple[str, float, float]]) -> float | None:
    """When the last backward of a step was over: as the wrapper tells, else autograd, else the annotation."""
    told = [e["ts"] for e in events if e["name"] == BACKWARD_OVER]
    nodes = [e["ts"] + e["dur"] for e in events if e.get("cat") == "cpu_op" and e["name"].startswith(_BACKWARD)]
    return max(told or nodes or [last for name, _, last in spans if name == "backward"], default=None)
