"""The buckets of our wrapper as events of a trace: on CPU no kernel shows a message, and a bucket is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.measure.trace_events import BACKWARD_OVER, BUCKET, BUCKET_WAIT, WAITED, Event
from paceline.measure.trace_sweep import find_lanes
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.parallel.timeline import StepTimes

__all__ = ["build_bucket_events"]

_PID = "buckets"


def build_bucket_events(rank: int, step: StepTimes, origin_s: float) -> list[Event]:
    """Events of one step's buckets on tracks of their own: waiting for their turn, and on their way.

    `origin_s` is the moment of `time.perf_counter` from which the events count. Two messages at a time take two tracks.
    """
    begin_us = (step.begin_s - origin_s) * 1e6
    buckets = [bucket for bucket in step.buckets if bucket.done_s > 0]
    lanes = find_lanes((bucket.launch_s, bucket.done_s) for bucket in buckets)
    waiting = find_lanes((bucket.ready_s, bucket.launch_s) for bucket in buckets)
    over_us = round(begin_us + step.backward_s * 1e6, 3)
    events: list[Event] = [
        {"ph": "i", "s": "p", "name": BACKWARD_OVER, "pid": _PID, "tid": "buckets 0", "ts": over_us},
    ]
    for number, bucket in enumerate(buckets):
        name = f"bucket {number}, {format_bytes(bucket.num_bytes)}"
        waited_us = max(0.0, bucket.launch_s - bucket.ready_s) * 1e6
        spans = [(BUCKET, bucket.launch_s, bucket.done_s, f"buckets {lanes[number]}")]
        if waited_us:
            spans.append((BUCKET_WAIT, bucket.ready_s, bucket.launch_s, f"buckets ready {waiting[number]}"))
        events += [
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "pid": _PID,
                "tid": track,
                "ts": round(begin_us + first_s * 1e6, 3),
                "dur": round(max(0.0, last_s - first_s) * 1e6, 3),
                "args": {"bytes": bucket.num_bytes, WAITED: round(waited_us, 3)},
            }
            for kind, first_s, last_s, track in spans
        ]
    return _name_tracks(rank, events) + events


def _name_tracks(rank: int, events: Sequence[Event]) -> list[Event]:
    tracks = dict.fromkeys(event["tid"] for event in events)
    return [
        {"ph": "M", "name": "thread_name", "pid": _PID, "tid": track, "args": {"name": f"rank {rank}: {track}"}}
        for track in tracks
    ]
