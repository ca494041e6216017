"""One training job under many plans of buckets, and what its prediction learns from, all in turns on all ranks.

Each round: every size of all-reduce once, and one step of every variant. What follows is in `predict`, which never sees
the steps of the job itself when it calibrates.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError, refuse
from paceline.measure.codecs import measure_codecs, take_gradients
from paceline.measure.disturbance import Disturbance, build_traffic
from paceline.measure.engine import Pace, Timed, Timing, agree_on_max, build_samples, follow, time_once
from paceline.measure.profiles import Given, Layers, open_job
from paceline.measure.steps import MeasuredJob, StepBench, Variant, list_gradients, wrap
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Options
from paceline.plan import Gradient, Plan, plan_like_torch
from paceline.predict.curves import CostCurve
from paceline.predict.job import build_job_from_profile
from paceline.predict.race import is_look, judge_race
from paceline.predict.search import choose_caps
from paceline.predict.strategy_costs import list_strategies
from paceline.predict.tuning import DEFAULT, PREDICTIONS, Candidate, TuneSettings, judge_tuning, render_predictions
from paceline.records import ChunksRecord, CollectiveRecord, Record
from paceline.records.steps import RACED, reduce_turns
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World
from paceline.strategy import DENSE, Strategy
from paceline.torch_internals import gpu_sleep
from paceline.training.step import list_models
from paceline.units import format_bytes

# With less than twice this there is no curve.
_SMALLEST_BYTES = 4 << 10
_PAIR_BYTES = (64 << 10, 1 << 20, 4 << 20)
# A thread of the emulated network that wakes up must not wait long for the interpreter.
_SWITCH_S = 1e-4
_CYCLES = 50_000_000

# The least time of a turn of the race, the most steps in it, and the most rounds. Longer turns need more time for the
# same interval: noise lasts longer than a turn, so what matters is how soon the other plan follows.
_TURN_S, _MOST_STEPS, _MOST_ROUNDS = 0.002, 16, 1 << 16

# The records, the gradients in the order of the model's definition, the default plan, and what was predicted for the
# plans of the race.
Tuned = tuple[list[Record], tuple[Gradient, ...], Plan, list[dict[str, Any]]]


def tune_job(settings: TuneSettings, given: Given) -> Tuned:
    """Measure on all ranks, predict on rank 0, race on all. Collective: every rank must call this."""
    with open_job(given, is_bare=True) as (world, job):
        several = list_models(job.module)
        text = f"the job has {len(several)} models, and a plan is of one: tune each alone, or profile the job"
        refuse((several != [job.module], text), code="several")
        variants = _Variants(settings, job, world)
        try:
            records, default_plan = variants.calibrate()
            predictions: list[dict[str, Any]] = []
            if settings.confirms:
                found: list[Any] | PacelineError | None = None
                if world.rank == 0:
                    try:
                        tuning = judge_tuning(settings, records, variants.gradients, default_plan)
                        found = [tuning.candidates, tuning.predictions]
                        # Before the first of these steps: nobody can say later that the predictions knew them.
                        post(Progress(
                            1, 2, "racing", tuple(records), files={PREDICTIONS: render_predictions(tuning.predictions)},
                            config=settings.to_json(variants.gradients, default_plan, tuning.predictions),
                        ))  # fmt: skip
                    except PacelineError as error:  # raised on all ranks: the others would wait for the answer
                        found = error
                shared = world.share(found)[0]
                if isinstance(shared, PacelineError):
                    raise shared
                candidates, predictions = shared
                records += variants.confirm(candidates)
            return records, variants.gradients, default_plan, predictions
        finally:
            variants.close()


class _Variants:
    """The job in all its variants on one step bench: `calibrate`, and `confirm` what was found; then `close`.
    Collective throughout: every rank of the world must make the same calls."""

    def __init__(self, settings: TuneSettings, job: MeasuredJob, world: World) -> None:
        self._settings, self._job, self._world, self.gradients = settings, job, world, list_gradients(job.module)
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._bench = StepBench(world, job.labels | {"wrapper": settings.wrapper}, steps_per_turn=job.steps_per_turn)
        self._alone = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)][world.rank]
        self._num_bytes = sum(gradient.num_bytes for gradient in self.gradients)
        self._channel = Channel(self._group, world.device)
        curve = settings.build_curve()
        # Steps whose buckets cost only what the wrapper does with them, and steps on a network that is modelled.
        self._networks = None if curve is None else (EmulatedNetwork(None), EmulatedNetwork(curve))

    def calibrate(self) -> tuple[list[Record], Plan]:
        """Sweep, plain steps, ready times, contention, the wrapper's own cost; the job itself at a grid of caps. And
        the wrapper's default plan, by the order that was profiled."""
        settings, effort = self._settings, self._settings.amount
        plain = self._add("plain", "plain")
        assert plain.replica is not None
        plain.kinds = ("marked", "profiled")
        plain.probe = layers = Layers(plain.replica, self._job.labels["model"], ())
        traffic = self._networks is None and build_traffic(self._world, self._channel, self._allocate())
        if traffic:
            for num_bytes in (size for size in effort.message_bytes if 2 * size <= self._num_bytes):
                label = f"messages of {format_bytes(num_bytes)}"
                variant = self._add("disturbed", label, message_bytes=num_bytes)
                Disturbance(self._world, traffic, variant, layers.look)
        self._add("local", "one bucket", self._alone, 1 << 50)
        self._add("local", "a bucket each", self._alone, 1)
        # Two buckets: a codec computes while backward goes on, and while another bucket is under way.
        for strategy in list_strategies(settings.strategies) if settings.strategies else ():
            if strategy.is_hook and not strategy.is_dense:
                self._add("coded", strategy.text, self._group, self._num_bytes // 2, None, strategy)
        if settings.confirms:
            sizes = [gradient.num_bytes for gradient in reversed(self.gradients)]
            for cap in settings.caps_bytes or choose_caps(sizes, effort.num_caps):
                self._add("job", f"cap {format_bytes(cap)}", self._group, cap)
        buffers = sum(buffer.nbytes for buffer in self._job.module.buffers() if buffer.is_floating_point())
        sweep = _build_sweep(self._world, self._channel, self._allocate(), settings.wrapper, buffers)
        self._run(sweep)
        timings = [build_samples(self._world.share(one.timing.seconds), self._bench.num_warmup) for one in sweep]
        records: list[Record] = [one.record(timing=timing) for one, timing in zip(sweep, timings, strict=True)]
        records += [self._bench.build_record(variant) for variant in self._bench.variants]
        if settings.strategies:
            grads, ranks = take_gradients(plain.replica), (2, max(2, self._world.world_size))
            records += measure_codecs(grads, plain.replica.device, ranks=ranks, bench=self._bench)
        profile = layers.build_record(self._bench, plain)
        self._step_s = profile.timing.median_s
        job, is_ours = build_job_from_profile(profile), settings.wrapper != "torch"
        is_near = self._channel.shares_memory or self._channel.device.type == "cuda"  # there rows are not sent
        if is_ours and self._networks is None and not is_near:
            job = job.split(self._world.world_size)
        order, rows = job.order(self.gradients), job.list_rows(self.gradients)
        plan = plan_like_torch(self.gradients, order)
        if is_ours:
            planner = Options().make_planner(self._channel, self.gradients, self._networks is not None)
            plan = planner(order, rows)
        return [*records, profile], plan

    def confirm(self, candidates: Sequence[Candidate], stops: bool = True) -> list[Record]:
        """The race of these plans: rounds until it is decided, or the time is over. A plan that is shown to be slower
        than another leaves it. Unless it `stops`, all run until the time is over."""
        self._bench.clear()
        for c in candidates:
            plan = None if c.label == DEFAULT or c.cap_bytes else c.plan
            self._add("job", c.label, self._group, c.cap_bytes, plan, c.strategy)
        effort, bench = self._settings.amount, self._bench
        # Very short steps are taken several to a turn: what changes between them would be most of it.
        bench.steps_per_turn = max(self._job.steps_per_turn, min(_MOST_STEPS, math.ceil(_TURN_S / self._step_s)))
        report, begin_s = follow(self._world, "racing", 1, 2), time.perf_counter()
        most_s = effort.confirm_s if self._settings.race_s is None else self._settings.race_s

        def is_over(number: int) -> bool:
            spent = agree_on_max((time.perf_counter() - begin_s) / most_s, bench.meeting)
            report(min(1.0, max(spent, number / (self._settings.iters or _MOST_ROUNDS))))
            if not stops or not is_look(number):
                return spent >= 1
            mine = [variant.times["marked"][bench.num_warm_steps :] for variant in bench.variants]
            by_plan, turns_s = zip(*self._world.share(mine), strict=True), dict[str, Sequence[float]]()
            for candidate, by_rank in zip(candidates, by_plan, strict=True):
                steps_s = [max(row) for row in zip(*by_rank, strict=True)]
                turns_s[candidate.label] = reduce_turns(steps_s, bench.steps_per_turn)
            race = judge_race(turns_s, DEFAULT)
            for variant in bench.variants:  # of several strategies each is compared with the others to the end
                is_left = self._settings.strategies or variant.labels["label"] in (*race.left, DEFAULT)
                variant.is_dropped = not is_left
            return race.is_decided or spent >= 1

        pace = Pace(most_s, min_iters=2, max_iters=_MOST_ROUNDS, warmup=4)
        seed = self._world.share(secrets.randbits(32))[0]
        bench.run(pace, self._settings.iters or _MOST_ROUNDS, is_over=is_over, seed=seed)
        return [dataclasses.replace(bench.build_record(variant), note=RACED) for variant in bench.variants]

    def close(self) -> None:
        self._bench.clear()
        for network in self._networks or ():
            network.close()

    def _add(
        self, role: str, label: str, group: dist.ProcessGroup | None = None, cap_bytes: int = 0,
        plan: Plan | None = None, strategy: Strategy = DENSE, **labels: Any,
    ) -> Variant:  # fmt: skip
        """A replica of its own: bare or, on a group, in the wrapper with a cap, a plan, or its default buckets."""
        is_job = role == "job"

        def wrap_by(module: nn.Module) -> nn.Module:
            options = {} if strategy.is_dense else {"strategy": strategy}
            wrapped = wrap(module, self._settings.wrapper, group, plan, cap_bytes, **options)
            if self._networks is not None:
                self._networks[is_job].attach(wrapped)
            return wrapped

        if is_job:
            labels = {"cap_bytes": cap_bytes, "source": "measured" if self._networks is None else "emulated"}
        replica = self._job.build(None if group is None else wrap_by)
        return self._bench.add(Variant({"role": role, "label": label, **labels}, replica, ("marked",)))

    def _allocate(self) -> torch.Tensor:
        """Memory for as much as all gradients, of the kind in which the wrapper's buckets lie."""
        elements = max(self._num_bytes, 2 * _SMALLEST_BYTES) // 4
        if self._settings.wrapper == "torch":
            return torch.zeros(elements, device=self._world.device)
        return self._channel.allocate(elements, torch.float32, self._world.device)

    def _run(self, sweep: Sequence[_Messages]) -> None:
        effort, num_parts = self._settings.amount, 2 if self._settings.confirms else 1
        report = follow(self._world, "measuring", 0, num_parts)
        pace = Pace(effort.budget_s, min_iters=effort.min_rounds, max_iters=effort.max_rounds, warmup=4)

        # A few sizes after each step: a message in a step finds threads asleep and caches full of other data. Which,
        # changes from round to round.
        def send_some(place: int, num_places: int, repetition: int) -> None:
            for messages in (one for i, one in enumerate(sweep) if (i + repetition) % num_places == place):
                time_once(messages, self._bench.meeting, repetition)

        self._bench.run(pace, self._settings.iters, report=report, after=send_some)


class _Messages(Timed):
    """Messages of a wrapper that leave together; what they carry is not checked."""

    def __init__(self, channel: Channel, parts: Sequence[torch.Tensor], record: Callable[..., Record]) -> None:
        self._channel, self._parts, self.device, self.num_elements = channel, parts, channel.device, 0
        self.record, self.timing = record, Timing()

    def prepare(self, repetition: int) -> None:
        for part in self._parts:
            part.fill_(1.0)  # a bucket was written just before it leaves

    def call(self) -> None:
        works = [self._channel.start_sum(part) for part in self._parts]
        for work in works:
            self._channel.wait(work, "a timed message")

    def check(self, repetition: int) -> int:
        return 0


class _Broadcast(_Messages):
    def call(self) -> None:
        dist.broadcast(self._parts[0], 0, self._channel.group)


def _build_sweep(world: World, channel: Channel, memory: torch.Tensor, wrapper: str, buffers: int) -> list[_Messages]:
    """From small messages to all gradients at once, in `memory`, where the wrapper's buckets would lie; pairs; and what
    the wrapper adds to each step for this many bytes of buffers."""
    if world.world_size == 1:
        return []
    where: dict[str, Any] = {"backend": world.backend, "device": world.device.type, "world_size": world.world_size}
    where["dtype"] = "float32"
    single, pair = partial(CollectiveRecord, op="sum", **where), partial(ChunksRecord, **where)
    sizes, size = [memory.nbytes // 4 * 4], _SMALLEST_BYTES
    while size < memory.nbytes * 0.75:
        sizes.append(size)
        size *= 4 if size < 64 << 10 else 2
    sweep = []
    for size in sorted(sizes):
        record = partial(single, collective="all_reduce", num_bytes=size)
        sweep.append(_Messages(channel, [memory[: size // 4]], record))
    for size in (size for size in _PAIR_BYTES if 2 * size <= memory.nbytes):
        parts = torch.split(memory[: size // 2], size // 4)
        sweep.append(_Messages(channel, parts, partial(pair, total_bytes=2 * size, chunk_bytes=size)))
    if buffers:
        kind, collective = (_Broadcast, "broadcast") if wrapper == "torch" else (_Messages, "all_reduce")
        record = partial(single, collective=collective, num_bytes=buffers, note="buffers")
        sweep.append(kind(channel, [torch.zeros(max(1, buffers // 4), device=world.device)], record))
    return sweep


class EmulatedNetwork:
    """First in, first out, one message at a time, each taking as long as the curve says; no curve: no time at all."""

    def __init__(self, curve: CostCurve | None) -> None:
        self._curve, self._free_s = curve, 0.0
        self._pending: queue.SimpleQueue[tuple[float, Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()
        self._stream: torch.cuda.Stream | None = None

    def attach(self, model: nn.Module) -> None:
        """Send the model's buckets here; before its first step."""
        if self._curve is not None and self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            self._thread = threading.Thread(target=self._work, name="paceline-emulated-network", daemon=True)
            self._thread.start()
        assert isinstance(model, DistributedDataParallel)
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
        devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda and self._curve is not None else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if self._curve is None:
            future.set_result(buffer)
        elif buffer.is_cuda:
            self._wait_on_gpu(buffer.device, self._curve.estimate_s(buffer.nbytes), partial(future.set_result, buffer))
        else:
            self._free_s = max(time.perf_counter(), self._free_s) + self._curve.estimate_s(buffer.nbytes)
            self._pending.put((self._free_s, future, buffer))
        return future

    def _wait_on_gpu(self, device: torch.device, seconds: float, finish: Callable[[], None]) -> None:
        """A kernel that only waits, on a stream of its own, behind the work that fills the buffer."""
        if self._stream is None:
            self._stream, self._cycles_per_s = torch.cuda.Stream(device), 0.0  # type: ignore[no-untyped-call]
            for _ in range(5):  # the best of a few: clocks rise from rest
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                gpu_sleep(_CYCLES)
                end.record()
                torch.cuda.synchronize(device)
                self._cycles_per_s = max(self._cycles_per_s, _CYCLES / (begin.elapsed_time(end) / 1e3))
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            gpu_sleep(max(1, int(seconds * self._cycles_per_s)))
            finish()

    def _work(self) -> None:
        while (item := self._pending.get()) is not None:
            done_s, future, buffer = item
            if (left_s := done_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            future.set_result(buffer)
