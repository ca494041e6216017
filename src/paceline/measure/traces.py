"""Recording: steps of each rank under torch's profiler, as a `RankTrace`. What they say is in `predict.overview`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from paceline.errors import ConfigError, MeasurementError
from paceline.measure.engine import synchronize
from paceline.measure.steps import MeasuredJob, OwnJob, OwnStep, Replica, TrainingJob, wrap
from paceline.parallel import DDP
from paceline.parallel.timeline import StepTimes
from paceline.predict.advice import StepFacts
from paceline.predict.overview import find_lanes
from paceline.predict.traces import BACKWARD_OVER, BUCKET, BUCKET_WAIT, WAITED, Event, RankTrace, read_chrome
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, join_world
from paceline.training.build import build_job, open_world
from paceline.training.settings import TrainSettings
from paceline.training.step import PhaseTimes
from paceline.units import format_bytes

# What can be recorded besides times; each makes steps slower and traces larger.
EXTRAS = ("memory", "shapes")
_LOG_LEVEL = "KINETO_LOG_LEVEL"
# The process of the wrapper's buckets in a trace.
_PID = "buckets"


def record_trace(
    step: Callable[[], None],
    *,
    warmup: int = 2,
    active: int = 3,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | None = None,
    model: nn.Module | None = None,
    extras: Collection[str] = (),
    meet: Callable[[], None] | None = None,
) -> RankTrace:
    """Run `warmup` steps, then record `active` ones. Each is a range `step N` that ends when the device is done.

    The buckets of `model`, if that is our wrapper, become events too. `meet` is called before each step, outside its
    range: give a barrier, so that the profiler's own start on one rank is not taken for its lateness. Collective, where
    the step or `meet` is.
    """
    device = device or torch.device("cpu")
    if warmup < 1 or active < 1:
        raise ConfigError(
            f"warmup={warmup} and active={active}: both must be at least 1, the profiler starts in a warm-up"
        )
    if unknown := sorted(set(extras) - set(EXTRAS)):
        raise ConfigError(f"unknown extra {unknown[0]!r}: known are {', '.join(EXTRAS)}")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=warmup, active=active, repeat=1),
        record_shapes="shapes" in extras,
        profile_memory="memory" in extras,
        acc_events=True,  # there is one cycle, and without this torch warns that the others are forgotten
    )

    timed: list[StepTimes] = []

    def take_step(number: int) -> None:
        if meet is not None:
            meet()
        with record_function(f"step {number}"):
            step()
            synchronize(device)
        profiler.step()

    with _quiet_profiler(), profiler:
        for number in range(warmup):
            take_step(number - warmup)
        for number in range(active):
            if isinstance(model, DDP):
                model.time_next_step()
            take_step(number)
            if device.type != "cuda" or world_size > 1:  # NCCL sends nothing on one rank
                timed += _read_times(model)
    trace = read_chrome(_export(profiler), rank)
    events = [*trace.events, *_bucket_events(trace, timed)]
    return replace(trace, world_size=world_size, device=device.type, events=events)


@contextlib.contextmanager
def _quiet_profiler() -> Iterator[None]:
    """torch 2.13 writes a line to stderr when a profile starts and stops, unless this says otherwise."""
    asked = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "6")
    try:
        yield
    finally:
        if asked is None:
            del os.environ[_LOG_LEVEL]


def _export(profiler: Any) -> dict[str, Any]:
    """The profiler writes files only."""
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        try:
            document: dict[str, Any] = json.loads(path.read_text(errors="replace"))
        except ValueError as error:
            raise MeasurementError(f"torch's profiler wrote no readable trace: {error}; record fewer steps") from None
        return document


def _read_times(model: nn.Module | None) -> list[StepTimes]:
    """When the buckets of the last step left and were done; nothing where the wrapper keeps no times."""
    if not isinstance(model, DDP) or model.plan is None:
        return []
    times = model.report().times
    return [] if times is None else [times]


def _bucket_events(trace: RankTrace, timed: list[StepTimes]) -> list[Event]:
    # The profiler's times are of the Unix clock, the wrapper's of the monotonic one.
    apart_ns = min((_clock_offset_ns() for _ in range(5)), key=lambda pair: pair[1])[0]
    origin_s = (trace.origin_ns - apart_ns) / 1e9
    return [event for step in timed for event in build_bucket_events(trace.rank, step, origin_s)]


def _clock_offset_ns() -> tuple[int, int]:
    """Unix clock minus `time.perf_counter`, and how long reading both took."""
    before = time.perf_counter_ns()
    unix = time.time_ns()
    after = time.perf_counter_ns()
    return unix - (before + after) // 2, after - before


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


# -- traces of a job --------------------------------------------------------------------------------------------------


class _TracedPhases:
    """Ranges in the trace, one for each phase."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def enter(self, phase: str) -> None:
        self.end()
        self._range = record_function(phase)
        self._range.__enter__()

    def end(self) -> PhaseTimes:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        return PhaseTimes()


@dataclass(frozen=True)
class Traced:
    """The traces of all ranks, and what they do not show of the job."""

    traces: tuple[RankTrace, ...]
    facts: StepFacts


def trace_job(settings: TrainSettings, warmup: int, active: int, extras: tuple[str, ...], for_all: bool) -> Traced:
    """Record steps of a job of ours. Collective: every rank must call this.

    Rank 0 gets the traces of all ranks; with `for_all` every rank does.
    """
    with open_world(settings) as world:
        job = TrainingJob(build_job(dataclasses.replace(settings, ranks=world.world_size), world))
        replica = job.as_replica(job.job.learner)
        try:
            return _trace(world, job, replica, warmup, active, extras, for_all, settings.compile)
        finally:
            replica.close()


def trace_own(
    model: nn.Module | Callable[[], Any],
    step: OwnStep | None,
    wrapper: str,
    options: dict[str, Any],
    warmup: int,
    active: int,
    extras: tuple[str, ...],
    for_all: bool,
) -> Traced:
    """The same of a user's own module and step, or of a factory of both; `options` are those of `join_world`."""
    with join_world(**options) as world:
        job = OwnJob(model, step)
        try:
            replica = job.build(world, None if wrapper == "none" else lambda module: wrap(module, wrapper))
            replica.activate()
            try:
                return _trace(world, job, replica, warmup, active, extras, for_all)
            finally:
                replica.close()
        finally:
            job.close()


def _trace(
    world: World,
    job: MeasuredJob,
    replica: Replica,
    warmup: int,
    active: int,
    extras: tuple[str, ...],
    for_all: bool,
    is_compiled: bool = False,
) -> Traced:
    phases, num_steps = _TracedPhases(), 0

    def step() -> None:
        nonlocal num_steps
        if world.rank == 0:
            post(Progress(num_steps, 1 + warmup + active, "trace"))
        num_steps += 1
        with record_function("data"):
            given = replica.load()
        replica.run(given, phases)
        phases.end()

    step()  # the wrapper plans in its first step
    mine = record_trace(
        step,
        warmup=warmup,
        active=active,
        rank=world.rank,
        world_size=world.world_size,
        device=replica.device,
        model=replica.model,
        extras=extras,
        meet=world.barrier,
    )
    everyone: list[RankTrace] = world.share(mine)
    labels = job.labels
    facts = StepFacts(
        labels["batch_size"], labels.get("accumulate", 1), labels["precision"], world.world_size, is_compiled
    )
    return Traced(tuple(everyone) if for_all or world.rank == 0 else (), facts)
