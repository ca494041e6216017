"""Records steps of each rank with torch's profiler as a `RankTrace`. `predict.traces` analyzes them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from paceline.errors import MeasurementError
from paceline.measure.engine import synchronize
from paceline.measure.job_profile import Given, open_job
from paceline.measure.step_bench import Replica, read_buckets
from paceline.parallel import DDP
from paceline.parallel.graph import find_tensors
from paceline.parallel.timeline import StepTimes
from paceline.predict import traces
from paceline.predict.advice import StepFacts
from paceline.predict.memory_use import MARK, MemoryMark, MemoryMarks
from paceline.predict.traces import Event, RankTrace, find_lanes, read_chrome
from paceline.runtime.ranks.session import Progress
from paceline.runtime.ranks.worker import post
from paceline.runtime.ranks.world import World
from paceline.training.step import PhaseTimes
from paceline.training.train_settings import TrainSettings
from paceline.units import format_bytes

_PID = "buckets"  # process name of the wrapper's buckets in a trace


def trace_job(
    given: Given, warmup: int, active: int, extras: tuple[str, ...], for_all: bool
) -> tuple[list[RankTrace], StepFacts]:
    """Trace steps of a wrapped job. Returns the traces of all ranks (on rank 0 or, with `for_all`, on every rank) and
    facts about the job that traces do not contain. Collective: call on every rank."""
    with open_job(given) as (world, job):
        with contextlib.closing(job.build_own()) as replica:
            replica.activate()
            traces: list[RankTrace] = world.share(record_trace(world, replica, warmup, active, extras))
        labels = job.labels
        is_compiled = isinstance(given, TrainSettings) and given.compile
        facts = (labels["batch_size"], labels.get("accumulate", 1), labels["precision"], world.world_size, is_compiled)
        return traces if for_all or world.rank == 0 else [], StepFacts(*facts)


def record_trace(world: World, replica: Replica, warmup: int, active: int, extras: Collection[str] = ()) -> RankTrace:
    """Take one step and `warmup` others, then record `active` steps. Each is a range `step N` that ends when the device
    has finished. Our wrapper's buckets also become events. `extras` ("memory", "shapes") slow the steps; "memory" also
    records an untimed step with marks that list its tensors."""
    device = replica.device
    phases = _TracedPhases()
    memory = _TracedMemory(replica) if "memory" in extras else None
    num_steps = active if memory is None else active + 1
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
        schedule=schedule(wait=0, warmup=warmup, active=num_steps, repeat=1),
        record_shapes="shapes" in extras,
        profile_memory=memory is not None,
        acc_events=True,  # avoid torch's warning that events of earlier cycles are discarded
    )

    def step(number: int, phases: _TracedPhases) -> None:
        if world.rank == 0:
            post(Progress(number + warmup + 1, 1 + warmup + num_steps, "trace"))
        with record_function("data"):
            phases.loaded = replica.load()
        replica.run(phases.loaded, phases)
        phases.end()
        synchronize(device)

    timed: list[StepTimes | None] = []
    sends = device.type != "cuda" or world.world_size > 1  # NCCL sends nothing in a single-rank world
    wrapped = replica.model if isinstance(replica.model, DDP) and sends else None
    with contextlib.ExitStack() as recording:
        if memory is not None:
            recording.callback(register_optimizer_step_post_hook(memory.note_optimizer).remove)
        step(-warmup - 1, phases)  # the wrapper plans in its first step
        if "KINETO_LOG_LEVEL" not in os.environ:  # silences torch 2.13, which logs when a profile starts and stops
            os.environ["KINETO_LOG_LEVEL"] = "6"
            recording.callback(os.environ.pop, "KINETO_LOG_LEVEL")
        recording.enter_context(profiler)
        for number in range(-warmup, active):
            if wrapped is not None and number >= 0:
                wrapped.time_next_step()
            world.barrier()  # outside the range: a slow profiler must not make the rank look late
            with record_function(f"step {number}"):
                step(number, phases)
            profiler.step()
            if wrapped is not None and number >= 0 and wrapped.plan is not None:
                timed.append(wrapped.report().times)
        if memory is not None:
            with record_function("memory step"), memory.observe():
                step(active, memory)
            profiler.step()
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as folder:  # the profiler can only export to a file
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        try:
            trace = read_chrome(json.loads(path.read_text(errors="replace")), world.rank, world.world_size)
        except ValueError as error:
            raise MeasurementError(f"torch's profiler wrote an unreadable trace: {error}; record fewer steps") from None
    # The profiler uses the Unix clock, the wrapper the monotonic clock.
    _, apart_ns = min(_clock_offset_ns() for _ in range(5))
    origin_s = (trace.origin_ns - apart_ns) / 1e9
    buckets = [event for one in timed if one for event in build_bucket_events(world.rank, one, origin_s)]
    marks = None if memory is None else memory.build_marks()
    return replace(trace, device=device.type, events=[*trace.events, *buckets], memory=marks)


class _TracedPhases:
    """Marks each phase as a range in the trace. `loaded` is the step's input."""

    def __init__(self) -> None:
        self._range = contextlib.ExitStack()
        self.loaded: Any = None

    def enter(self, phase: str) -> None:
        self._range.close()
        self._range.enter_context(record_function(phase))

    def end(self) -> PhaseTimes:
        self._range.close()
        self.loaded = None
        return PhaseTimes()


class _TracedMemory(_TracedPhases):
    """The phases of one step. Also adds marks to the trace that list the replica's tensors: all of them at the start of
    each phase, the inputs of each forward, and each gradient before it is accumulated, because a wrapper may copy it
    immediately."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._device = replica.parameters[0].device
        self._optimizers: dict[torch.optim.Optimizer, None] = {}
        self._marks: list[MemoryMark] = []
        self._allocated_bytes: int | None = None

    def note_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers[optimizer] = None

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Mark the enclosed step."""
        if self._device.type == "cuda":
            self._allocated_bytes = torch.cuda.memory_allocated(self._device)
        # Keep the nodes alive until the end, so that a graph built in backward (checkpointing) reuses them.
        nodes = [get_gradient_edge(param).node for param in self._replica.parameters]
        register = self._replica.model.register_forward_pre_hook
        with contextlib.ExitStack() as hooks:
            for node in nodes:
                hooks.callback(node.register_prehook(lambda grads: self._mark("", {"gradients": grads})).remove)
            hooks.callback(register(lambda model, *given: self._mark("", {"data": given}), with_kwargs=True).remove)
            self.enter("data")
            yield

    def enter(self, phase: str) -> None:
        self._mark("data" if phase == "data_wait" else phase, self._list_all())
        super().enter(phase)

    def end(self) -> PhaseTimes:
        self._mark("end", self._list_all())
        return super().end()

    def build_marks(self) -> MemoryMarks:
        # torch's wrapper reports the sizes of its buckets, but not their addresses.
        sizes = () if isinstance(self._replica.model, DDP) else read_buckets(self._replica.model)
        buckets = tuple((-number, size, "buckets") for number, size in enumerate(sizes, 1))
        first, *others = self._marks
        marks = (MemoryMark(first.phase, first.blocks + buckets), *others)
        return MemoryMarks(self._device.type, self._device.index or 0, self._allocated_bytes, marks)

    def _list_all(self) -> dict[str, Any]:
        module, model = self._replica.module, self._replica.model
        return {
            "parameters": [*module.parameters(), *module.buffers()],
            "gradients": [param.grad for param in module.parameters()],
            "optimizer": [optimizer.state for optimizer in self._optimizers],
            "buckets": model.bucket_memory if isinstance(model, DDP) else (),
            "data": self.loaded,
        }

    def _mark(self, phase: str, listed: dict[str, Any]) -> None:
        with record_function(f"{MARK} {len(self._marks)}"):
            self._marks.append(MemoryMark(phase, list_blocks(listed, self._device)))


def list_blocks(listed: dict[str, Any], device: torch.device) -> tuple[tuple[int, int, str], ...]:
    """Address, bytes and category of each memory block on a device, from tensors by category.

    A batch may be a view of a whole data set, so only the bytes between its first and last element count, not the whole
    storage.
    """
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for category, tensor in ((name, tensor) for name, value in listed.items() for tensor in find_tensors(value)):
        parts = (tensor._values(), tensor._indices()) if tensor.is_sparse else (tensor,)
        for part in parts[:1] if category == "gradients" else parts:  # indices of a sparse gradient may be inputs
            if part.device == device and part.numel():
                storage, first, last = part.untyped_storage(), 0, part.untyped_storage().nbytes()
                if category == "data":
                    first = int(part.storage_offset()) * part.itemsize
                    steps = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
                    last = first + (1 + steps) * part.itemsize
                known = spans.get((storage.data_ptr(), category), (first, last))
                spans[storage.data_ptr(), category] = min(first, known[0]), max(last, known[1])
    return tuple((address, last - first, category) for (address, category), (first, last) in spans.items())


def _clock_offset_ns() -> tuple[int, int]:
    """Nanoseconds that reading both clocks takes, and the offset of the Unix clock from `time.perf_counter` in
    nanoseconds."""
    before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
    return after - before, unix - (before + after) // 2


def build_bucket_events(rank: int, step: StepTimes, origin_s: float) -> list[Event]:
    """Build trace events for one step's buckets: waiting for launch, and in flight. Concurrent messages get separate
    tracks. `origin_s` is the origin of event times, by `time.perf_counter`."""
    begin_us = (step.begin_s - origin_s) * 1e6
    buckets = [bucket for bucket in step.buckets if bucket.done_s > 0]
    lanes = find_lanes((bucket.launch_s, bucket.done_s) for bucket in buckets)
    waiting = find_lanes((bucket.ready_s, bucket.launch_s) for bucket in buckets)
    over_us = round(begin_us + step.backward_s * 1e6, 3)
    over: Event = {"ph": "i", "s": "p", "name": traces.BACKWARD_OVER, "pid": _PID, "tid": "buckets 0", "ts": over_us}
    events = [over]
    for number, bucket in enumerate(buckets):
        waited_us = max(0.0, bucket.launch_s - bucket.ready_s) * 1e6
        spans = [(traces.BUCKET, bucket.launch_s, bucket.done_s, f"buckets {lanes[number]}")]
        if waited_us:
            spans.append((traces.BUCKET_WAIT, bucket.ready_s, bucket.launch_s, f"buckets ready {waiting[number]}"))
        shared = {
            "ph": "X", "name": f"bucket {number}, {format_bytes(bucket.num_bytes)}", "pid": _PID,
            "args": {"bytes": bucket.num_bytes, traces.WAITED: round(waited_us, 3)},
        }  # fmt: skip
        for kind, first_s, last_s, track in spans:
            at_us, took_us = round(begin_us + first_s * 1e6, 3), round(max(0.0, last_s - first_s) * 1e6, 3)
            events.append(shared | {"cat": kind, "tid": track, "ts": at_us, "dur": took_us})
    tracks = dict.fromkeys(event["tid"] for event in events)
    named: Event = {"ph": "M", "name": "thread_name", "pid": _PID}
    return [named | {"tid": track, "args": {"name": f"rank {rank}: {track}"}} for track in tracks] + events
