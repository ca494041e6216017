"""One training job under many plans of buckets, and what its prediction learns from, all in turns on all ranks.

Each round: every size of all-reduce once, and one step of every variant. What follows is in `predict`, which never sees
the steps of the job itself when it calibrates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.measure.engine import Pace, build_samples, synchronize
from paceline.measure.profiles import LayerClock, order_by_ready
from paceline.measure.steps import MeasuredJob, OwnJob, OwnStep, Probe, StepBench, TrainingJob, Variant, wrap
from paceline.parallel import DDP
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Options
from paceline.plan import Gradient, Plan, plan_like_torch
from paceline.predict.curves import CostCurve
from paceline.predict.search import choose_caps
from paceline.predict.tuning import TuneSettings, list_candidates
from paceline.records import (
    ChunksRecord,
    CollectiveRecord,
    LayerProfileRecord,
    ParameterTimes,
    Record,
    Samples,
    StepRecord,
)
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, join_world
from paceline.training.build import build_job, open_world
from paceline.training.settings import TrainSettings
from paceline.training.step import Phases
from paceline.units import format_bytes

_WARMUP = 4
# A message during backward must be over before the next one starts; it is slowed by up to this factor.
_SLOWEST, _MOST_MESSAGES = 6.0, 4
_ONE_BUCKET = 1 << 50
# With less than twice this there is no curve.
_SMALLEST_BYTES = 4 << 10
_DENSE_BYTES = 64 << 10
_PAIR_BYTES = (64 << 10, 1 << 20, 4 << 20)
# A thread of the emulated network that wakes up must not wait long for the interpreter.
_SWITCH_S = 1e-4
_CYCLES = 50_000_000

# The records, the gradients in the order of the model's definition, and the default plan.
Tuned = tuple[list[Record], tuple[Gradient, ...], Plan]


def tune_job(settings: TuneSettings, job: TrainSettings) -> Tuned:
    """Tune a job of ours. Collective: every rank of the launched world must call this."""
    with open_world(job) as world:
        bare = dataclasses.replace(job, ranks=world.world_size, wrapper="none")
        return _run(settings, TrainingJob(build_job(bare, world)), world)


def tune_own(
    settings: TuneSettings,
    model: nn.Module | Callable[[], Any],
    step: OwnStep | None,
    name: str,
    where: dict[str, Any],
) -> Tuned:
    """Tune a user's own module and step, or what a factory returns. Collective: every rank must call this."""
    with join_world(**where) as world:
        return _run(settings, OwnJob(model, step, name), world)


def _run(settings: TuneSettings, job: MeasuredJob, world: World) -> Tuned:
    """Measure on all ranks, choose on rank 0, confirm on all."""

    def tell(share: float, what: str) -> None:
        if world.rank == 0:
            post(Progress((what == "confirming") + share, 2 if settings.confirms else 1, what))

    bench = TuningBench(settings, job, world, tell)
    try:
        records = bench.calibrate()
        gradients, default_plan = job.gradients, bench.build_default_plan()
        if settings.confirms:
            found: list[Candidate] | PacelineError | None = None
            if world.rank == 0:
                try:
                    listed = list_candidates(settings, records, gradients, default_plan)
                    found = [Candidate(*candidate) for candidate in listed]
                except PacelineError as error:  # raised on all ranks: the others would wait for the answer
                    found = error
            candidates = world.share(found)[0]
            if isinstance(candidates, PacelineError):
                raise candidates
            records += bench.confirm(candidates)
        return records, gradients, default_plan
    finally:
        bench.close()


@dataclass(frozen=True)
class Candidate:
    """A way to cut the job's gradients into buckets: a cap, a plan, or neither, which is the wrapper's default."""

    label: str
    cap_bytes: int = 0
    plan: Plan | None = None


class TuningBench:
    """The job in all its variants. Build it, `calibrate`, and `confirm` what was found; then `close`.

    Collective throughout: every rank of the world must make the same calls.
    """

    def __init__(
        self, settings: TuneSettings, job: MeasuredJob, world: World, tell: Callable[[float, str], None]
    ) -> None:
        self._settings, self._world, self._tell, self.job = settings, world, tell, job
        group = dist.group.WORLD
        assert group is not None
        self._group = group
        self._bench = StepBench(world, job.labels | {"wrapper": settings.wrapper}, steps_per_turn=job.steps_per_turn)
        self._alone = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)][world.rank]
        self._num_bytes = sum(gradient.num_bytes for gradient in job.gradients)
        self._channel = Channel(group, world.device)
        curve = settings.build_curve()
        # Steps whose buckets cost only what the wrapper does with them, and steps on a network that is modelled.
        self._networks = None if curve is None else (EmulatedNetwork(None), EmulatedNetwork(curve))

    def build_default_plan(self) -> Plan:
        """The buckets of the wrapper without any option, by the order that was profiled on rank 0."""
        gradients = self.job.gradients
        place = {gradient.name: index for index, gradient in enumerate(gradients)}
        order = [place[parameter.name] for parameter in self._profile.parameters]
        if self._settings.wrapper == "torch":
            return plan_like_torch(gradients, order)
        return Options().make_planner(self._channel, with_hook=self._networks is not None)(gradients, order)

    def calibrate(self) -> list[Record]:
        """Sweep, plain steps, ready times, contention, the wrapper's own cost; and the job itself at a grid of caps."""
        effort, on_cpu = self._settings.amount, self._world.device.type == "cpu"
        plain = self._add("plain", "plain")
        profiled = self._add("plain", "profiled")
        assert profiled.replica is not None
        ready = profiled.probe = _ReadyTimes(profiled.replica.parameters, self._world.device)
        if self._world.world_size > 1 and on_cpu:
            memory = self._allocate()
            for num_bytes in effort.message_bytes:
                if 2 * num_bytes <= self._num_bytes:
                    variant = self._add("disturbed", f"messages of {format_bytes(num_bytes)}", message_bytes=num_bytes)
                    variant.kinds = ("messages", "marked")
                    variant.probe = _Disturbance(self._world, self._channel, memory, variant, ready)
        self._add("local", "one bucket", Candidate("", _ONE_BUCKET), self._alone)
        self._add("local", "a bucket each", Candidate("", 1), self._alone)
        sizes = [gradient.num_bytes for gradient in reversed(self.job.gradients)]
        if self._settings.confirms:
            for cap in self._settings.caps_bytes or choose_caps(sizes, effort.num_caps):
                self._add_job(Candidate(f"cap {format_bytes(cap)}", cap))
        sweep = Sweep(self._channel, self._world, self._bench.meeting, self._allocate(), self._find_extra())
        self._run(effort.budget_s, sweep, "measuring")
        records: list[Record] = list(sweep.build_records(self._bench.num_warmup))
        records += [self._build_record(variant) for variant in self._bench.variants if variant is not profiled]
        self._profile = self._build_profile(plain, profiled, ready)
        return [*records, self._profile]

    def confirm(self, candidates: Sequence[Candidate]) -> list[Record]:
        """Steps of the job under these plans, in turns."""
        self._bench.clear()
        for candidate in candidates:
            self._add_job(candidate)
        self._run(self._settings.amount.confirm_s, None, "confirming")
        return [dataclasses.replace(self._build_record(v), note="confirmed") for v in self._bench.variants]

    def close(self) -> None:
        self._bench.clear()
        self.job.close()
        for network in self._networks or ():
            network.close()

    # -- variants -----------------------------------------------------------------------------------------------------

    def _add(
        self,
        role: str,
        label: str,
        candidate: Candidate | None = None,
        group: dist.ProcessGroup | None = None,
        **labels: Any,
    ) -> Variant:
        """A replica of its own, bare or in the wrapper with these buckets."""

        def wrap_by(module: torch.nn.Module) -> torch.nn.Module:
            assert candidate is not None
            plan, cap = candidate.plan, candidate.cap_bytes
            wrapped = wrap(module, self._settings.wrapper, group, plan=plan, cap_bytes=cap)
            if self._networks is not None:
                self._networks[group is self._group].attach(wrapped)
            return wrapped

        replica = self.job.build(self._world, None if candidate is None else wrap_by)
        return self._bench.add(Variant({"role": role, "label": label, **labels}, replica, ("marked",)))

    def _add_job(self, candidate: Candidate) -> None:
        source = "measured" if self._networks is None else "emulated"
        self._add("job", candidate.label, candidate, self._group, cap_bytes=candidate.cap_bytes, source=source)

    def _allocate(self) -> torch.Tensor:
        """Memory for as much as all gradients, of the kind in which the wrapper's buckets lie."""
        elements = max(self._num_bytes, 2 * _SMALLEST_BYTES) // 4
        if self._settings.wrapper == "torch":
            return torch.zeros(elements, device=self._world.device)
        return self._channel.allocate(elements, torch.float32, self._world.device)

    def _find_extra(self) -> tuple[str, int]:
        """The collective that the wrapper adds to each step for buffers, and its bytes."""
        buffers = [b for b in self.job.module.buffers() if b.is_floating_point()]
        collective = "broadcast" if self._settings.wrapper == "torch" else "all_reduce"
        return collective, sum(buffer.nbytes for buffer in buffers)

    # -- rounds and records -------------------------------------------------------------------------------------------

    def _run(self, budget_s: float, sweep: Sweep | None, what: str) -> None:
        effort = self._settings.amount
        self._tell(0.0, what)
        self._bench.run(
            Pace(budget_s=budget_s, min_iters=effort.min_rounds, max_iters=effort.max_rounds, warmup=_WARMUP),
            self._settings.iters,
            tell=lambda share: self._tell(share, what),
            # A few sizes after each step: a message in a step finds threads asleep and caches full of other data.
            after=None if sweep is None else sweep.run_part,
        )

    def _build_record(self, variant: Variant) -> StepRecord:
        if isinstance(variant.probe, _Disturbance):
            return self._bench.build_record(variant, num_messages=variant.probe.num_messages)
        return self._bench.build_record(variant)

    def _build_profile(self, plain: Variant, profiled: Variant, probe: _ReadyTimes) -> LayerProfileRecord:
        """Rank 0's layers, profiled while all ranks computed."""
        ready: list[tuple[dict[int, float], float]] = self._world.share(probe.ready)[0][self._bench.num_warm_steps :]
        assert profiled.replica is not None
        parameters = [
            ParameterTimes(
                name=gradient.name,
                num_bytes=gradient.num_bytes,
                num_elements=param.numel(),
                dtype=gradient.dtype,
                block="",
                ready_s=tuple(min(seen[index], total_s) if index in seen else None for seen, total_s in ready),
            )
            for index, (gradient, param) in enumerate(zip(self.job.gradients, profiled.replica.parameters, strict=True))
        ]
        here, there = self._build_record(plain), self._build_record(profiled)

        def first(record: StepRecord, name: str) -> Samples:
            samples: Samples = record.phase(name)
            rows, warm = samples.seconds, samples.warmup_seconds
            return Samples(seconds=tuple(row[:1] for row in rows), warmup_seconds=tuple(row[:1] for row in warm))

        return LayerProfileRecord(
            model=here.model, device=here.device, dtype=here.precision, batch_size=here.batch_size,
            parameters=tuple(order_by_ready(parameters)), blocks=(),
            timing=first(here, "timing"), forward=first(here, "forward"), backward=first(here, "backward"),
            optimizer=first(here, "optimizer"), profiled_step=first(there, "timing"),
            profiled_forward=first(there, "forward"),
            profiled_backward=Samples(seconds=tuple((total_s,) for _, total_s in ready)),
            note=f"of rank 0, while {self._world.world_size} ranks computed",
        )  # fmt: skip


# -- what looks into steps ------------------------------------------------------------------------------------------


class _ReadyTimes(Probe):
    """When each gradient is ready, in every step: seconds since backward began by parameter, and of all of backward."""

    def __init__(self, params: Sequence[torch.Tensor], device: torch.device) -> None:
        self._clock, self._attached = LayerClock(params, [], device), contextlib.ExitStack()
        self.num_params = len(params)
        self.ready: list[tuple[dict[int, float], float]] = []

    def begin(self, kind: str) -> Phases | None:
        self._attached.enter_context(self._clock.attached())
        return self._clock

    def end(self, kind: str, end_s: float, phases_s: dict[str, float]) -> None:
        self._attached.close()
        at_s, marks = self._clock.read_s(), self._clock.marks
        begin, end = (next(m for phase, m in marks if phase == border) for border in ("backward", "optimizer"))
        ready_s = {index: at_s[moment] - at_s[begin] for index, moment in self._clock.ready.items()}
        self.ready.append((ready_s, at_s[end] - at_s[begin]))


class _Disturbance(Probe):
    """Messages of one size that leave when certain gradients are ready, as buckets do, and nobody waits for.

    In steps of kind `messages` they are timed, which disturbs too; so other steps are timed without that.
    """

    def __init__(
        self, world: World, channel: Channel, memory: torch.Tensor, variant: Variant, ready: _ReadyTimes
    ) -> None:
        self._world, self._channel, self._memory, self._variant, self._ready = world, channel, memory, variant, ready
        self._num_bytes: int = variant.labels["message_bytes"]
        self.num_messages = 0
        self._is_timed = False
        self._works: list[dist.Work] = []
        self._spans: list[list[float]] = []
        self._handles: list[tuple[Any, Any]] = []

    def begin(self, kind: str) -> Phases | None:
        """Hooks that send a message at evenly spaced moments of backward; as many as do not run into each other."""
        self._is_timed, self._works, self._spans = kind == "messages", [], []
        if not self.num_messages:
            alone_s = time_alone(self._channel, self._memory, self._num_bytes)
            ready_s, total_s = self._ready.ready[-1] if self._ready.ready else ({}, 0.0)
            # One gradient sends one message.
            mine = max(1, min(_MOST_MESSAGES, len(ready_s), int(total_s / (_SLOWEST * alone_s))))
            self.num_messages = min(self._world.share(mine))
        # All ranks at the same gradients, by the times of rank 0.
        places = self._world.share(self._pick_places())[0]
        assert self._variant.replica is not None
        params = self._variant.replica.parameters
        # Nodes are held with their hooks: one that nobody holds is made anew by the forward, without any.
        nodes = [get_gradient_edge(params[index]).node for index in places]
        self._handles = [(node, node.register_hook(self._fire)) for node in nodes]
        return None

    def _pick_places(self) -> list[int]:
        count = self.num_messages
        if not self._ready.ready:
            return list(range(self._ready.num_params))[:: max(1, self._ready.num_params // count)][:count]
        ready_s, total_s = self._ready.ready[-1]
        found: list[int] = []
        for number in range(count):
            left = [index for index in ready_s if index not in found]
            if left:
                found.append(min(left, key=lambda i: abs(ready_s[i] - total_s * (number + 0.5) / count)))
        return found

    def _fire(self, *grads: Any) -> None:
        span = [time.perf_counter(), 0.0]
        elements = self._num_bytes // self._memory.element_size()
        start = len(self._works) * elements % max(1, self._memory.numel() - elements + 1)
        work = self._channel.start_sum(self._memory[start : start + elements])
        self._works.append(work)
        self._spans.append(span)
        if not self._is_timed:
            return

        def note(_: Any) -> None:
            span[1] = span[1] or time.perf_counter()

        work.get_future().add_done_callback(note)

    def end(self, kind: str, end_s: float, phases_s: dict[str, float]) -> None:
        """Wait for all; the mean seconds from start to end, and of that before the end of backward."""
        for _, handle in self._handles:
            handle.remove()
        self._handles = []
        backward_end_s = end_s - phases_s["optimizer"]
        for work, span in zip(self._works, self._spans, strict=True):
            work.wait()
            span[1] = span[1] or time.perf_counter()
        if self._is_timed:
            count = max(1, len(self._spans))
            self._variant.note("under_way", sum(end - begin for begin, end in self._spans) / count)
            before = [max(0.0, min(end, backward_end_s) - begin) for begin, end in self._spans]
            self._variant.note("overlapped", sum(before) / count)


def time_alone(channel: Channel, memory: torch.Tensor, num_bytes: int) -> float:
    """Seconds of one message, the fastest of a few. Collective: every rank must call this."""
    part = memory[: max(1, num_bytes // memory.element_size())]
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        channel.wait(channel.start_sum(part), "a timed message")
        times.append(time.perf_counter() - begin_s)
    return min(times)


# -- messages alone ---------------------------------------------------------------------------------------------------


class Sweep:
    """The wrapper's own messages, from small to all gradients at once; pairs; and what else a step sends.

    `memory` is where the wrapper's buckets would lie, and `extra` a collective and its bytes, 0 for none. Collective:
    every rank must make the same calls.
    """

    def __init__(
        self,
        channel: Channel,
        world: World,
        control: dist.ProcessGroup,
        memory: torch.Tensor,
        extra: tuple[str, int],
    ) -> None:
        self._channel, self._world, self._control, self._extra = channel, world, control, extra
        self._memory, num_bytes = memory, memory.nbytes
        is_alone = world.world_size == 1
        self._singles: dict[int, list[float]] = {} if is_alone else {size: [] for size in _choose_sizes(num_bytes)}
        pairs = [size for size in _PAIR_BYTES if 2 * size <= num_bytes]
        self._pairs: dict[int, list[float]] = {} if is_alone else {size: [] for size in pairs}
        self._extras: list[float] = []
        self._tasks = list(self._build_tasks())

    def run_part(self, place: int, num_places: int, repetition: int) -> None:
        """The part of a round that belongs to one of its places; which, changes from round to round."""
        tasks = self._tasks
        for index in range(len(tasks)):
            if (index + repetition) % num_places == place:
                tasks[index]()

    def _build_tasks(self) -> Iterator[Callable[[], None]]:
        for size, times in self._singles.items():
            yield functools.partial(self._time, (size,), times)
        for size, times in self._pairs.items():
            yield functools.partial(self._time, (size, size), times)
        if self._extra[1] and self._singles:
            yield self._time_extra

    def _time_extra(self) -> None:
        collective, num_bytes = self._extra
        part = torch.zeros(max(1, num_bytes // 4), device=self._world.device)
        self._meet()
        begin_s = time.perf_counter()
        if collective == "broadcast":
            dist.broadcast(part, 0, self._channel.group)
        else:
            self._channel.wait(self._channel.start_sum(part), "a timed message")
        synchronize(self._world.device)
        self._extras.append(time.perf_counter() - begin_s)

    def _meet(self) -> None:
        synchronize(self._world.device)
        dist.barrier(group=self._control)

    def _time(self, sizes: tuple[int, ...], times: list[float]) -> None:
        parts = torch.split(self._memory[: sum(sizes) // 4], [size // 4 for size in sizes])
        for part in parts:
            part.fill_(1.0)  # a bucket was written just before it leaves
        self._meet()
        begin_s = time.perf_counter()
        works = [self._channel.start_sum(part) for part in parts]
        for work in works:
            self._channel.wait(work, "a timed message")
        synchronize(self._world.device)
        times.append(time.perf_counter() - begin_s)

    def build_records(self, num_warmup: int) -> Iterator[Record]:
        world = self._world
        where: dict[str, Any] = {
            "backend": world.backend,
            "device": world.device.type,
            "world_size": world.world_size,
        }

        def samples(mine: list[float]) -> Samples:
            return build_samples(world.share(mine), num_warmup)

        for size, times in self._singles.items():
            yield CollectiveRecord(
                collective="all_reduce", num_bytes=size, dtype="float32", op="sum", timing=samples(times), **where
            )
        for size, times in self._pairs.items():
            yield ChunksRecord(total_bytes=2 * size, chunk_bytes=size, dtype="float32", timing=samples(times), **where)
        collective, num_bytes = self._extra
        if self._extras:
            yield CollectiveRecord(
                collective=collective, num_bytes=num_bytes, dtype="float32", op="sum", timing=samples(self._extras),
                note="buffers", **where,
            )  # fmt: skip


def _choose_sizes(num_bytes: int) -> list[int]:
    sizes, size = [], _SMALLEST_BYTES
    while size < num_bytes * 0.75:
        sizes.append(size)
        size *= 4 if size < _DENSE_BYTES else 2
    return [*sizes, num_bytes // 4 * 4]


# -- a network that does not exist ------------------------------------------------------------------------------------


class EmulatedNetwork:
    """First in, first out, one message at a time, each taking as long as the curve says; no curve: no time at all."""

    def __init__(self, curve: CostCurve | None) -> None:
        self._curve = curve
        self._free_s = 0.0
        self._pending: queue.SimpleQueue[tuple[float, Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()
        self._stream: torch.cuda.Stream | None = None
        self._cycles_per_s = 0.0

    def attach(self, model: nn.Module) -> None:
        """Send the model's buckets here; before its first step."""
        if self._curve is not None and self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            self._thread = threading.Thread(target=self._work, name="paceline-emulated-network", daemon=True)
            self._thread.start()
        assert isinstance(model, DDP | DistributedDataParallel)
        # torch compares annotations with types, and a lambda has none.
        model.register_comm_hook(None, lambda state, bucket: self._send(bucket.buffer()))

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch_s)

    def _send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._curve is None:
            future.set_result(buffer)
            return future
        if buffer.is_cuda:
            return self._send_on_gpu(buffer, self._curve.estimate_s(buffer.nbytes))
        start_s = max(time.perf_counter(), self._free_s)
        self._free_s = start_s + self._curve.estimate_s(buffer.nbytes)
        self._pending.put((self._free_s, future, buffer))
        return future

    def _send_on_gpu(self, buffer: torch.Tensor, seconds: float) -> torch.futures.Future[torch.Tensor]:
        """A kernel that only waits, on a stream of its own, behind the work that fills the buffer."""
        device = buffer.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._cycles_per_s = _count_cycles(device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(max(1, int(seconds * self._cycles_per_s)))
            future.set_result(buffer)
        return future

    def _work(self) -> None:
        while (item := self._pending.get()) is not None:
            done_s, future, buffer = item
            left_s = done_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            future.set_result(buffer)


def _count_cycles(device: torch.device) -> float:
    """The cycles that the GPU's waiting kernel counts in a second, the best of a few: clocks rise from rest."""
    rates = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda._sleep(_CYCLES)
        end.record()
        torch.cuda.synchronize(device)
        rates.append(_CYCLES / (begin.elapsed_time(end) / 1e3))
    return float(max(rates))
