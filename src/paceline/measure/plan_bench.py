"""Runs one training job under many bucket plans, interleaved with the measurements that calibrate the prediction.

Each round has one all-reduce of every size and one turn of every variant, on all ranks. `predict` evaluates the
records; the calibration never uses steps of the job itself.
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError, refuse
from paceline.measure.codec_bench import measure_codecs, take_gradients
from paceline.measure.disturbance import build_traffic
from paceline.measure.engine import Pace, Timed, Timing, agree_on_max, build_samples, follow, time_once
from paceline.measure.job_profile import Given, Layers, add_costs, open_job
from paceline.measure.step_bench import MeasuredJob, Replica, StepBench, Variant, list_gradients, wrap
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Options
from paceline.plan import Gradient, Plan, plan_like_torch
from paceline.predict.curves import CostCurve
from paceline.predict.job import build_job_from_profile
from paceline.predict.predictor import Prediction
from paceline.predict.race import is_look, judge_race
from paceline.predict.search import choose_caps
from paceline.predict.strategy_costs import list_strategies
from paceline.predict.tuning import DEFAULT, PREDICTIONS, TuneSettings, derive_tuning, render_predictions
from paceline.records import ChunksRecord, CollectiveRecord, Record
from paceline.records.steps import RACED, reduce_turns
from paceline.runtime.ranks.session import Progress
from paceline.runtime.ranks.worker import post
from paceline.runtime.ranks.world import World
from paceline.strategy import DENSE, Strategy
from paceline.torch_internals import gpu_sleep
from paceline.training.step import list_models
from paceline.units import format_bytes

# Smallest message in the sweep; a cost curve also needs one of at least twice this size.
_SMALLEST_BYTES = 4 << 10
_PAIR_BYTES = (64 << 10, 1 << 20, 4 << 20)
# Interpreter switch interval: the emulated network's thread must not wait long for the GIL.
_SWITCH_S = 1e-4
_CYCLES = 50_000_000

# Plan comparison: minimum time per turn, maximum steps per turn, maximum rounds. With longer turns the same interval
# would take more time: noise outlasts a turn, so the plans should alternate quickly.
_TURN_S = 0.002
_MOST_STEPS = 16
_MOST_ROUNDS = 1 << 16

# The tuning result: records, gradients in definition order, the default plan, and predictions for the compared plans.
Tuned = tuple[list[Record], tuple[Gradient, ...], Plan, list[dict[str, Any]]]


def tune_job(settings: TuneSettings, given: Given) -> Tuned:
    """Measure on all ranks, predict on rank 0, compare plans on all ranks. Collective: call on every rank."""
    with open_job(given, is_bare=True) as (world, job):
        several = list_models(job.module)
        text = f"the job has {len(several)} models, but a plan is for one: tune them separately, or profile the job"
        refuse((several != [job.module], text), code="several")
        variants = _Variants(settings, job, world)
        try:
            records, default_plan = variants.calibrate()
            predictions: list[dict[str, Any]] = []
            if settings.confirms:
                found: list[Any] | PacelineError | None = None
                if world.rank == 0:
                    try:
                        tuning = derive_tuning(settings, records, variants.gradients, default_plan)
                        found = [tuning.candidates, tuning.predictions]
                        # Saved before the plans run, as evidence that the predictions did not use their steps.
                        files = {PREDICTIONS: render_predictions(tuning.predictions)}
                        config = settings.to_json(variants.gradients, default_plan, tuning.predictions)
                        post(Progress(1, 2, "comparing plans", tuple(records), files=files, config=config))
                    except PacelineError as error:  # the other ranks wait for the result: raise it on all ranks below
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
    """All variants of the job on one step bench: `calibrate`, then `confirm` the candidates, then `close`.
    Collective: call on every rank."""

    def __init__(self, settings: TuneSettings, job: MeasuredJob, world: World) -> None:
        self._settings = settings
        self._job = job
        self._world = world
        self.gradients = list_gradients(job.module)
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD
        self._bench = StepBench(world, job.labels | {"wrapper": settings.wrapper}, steps_per_turn=job.steps_per_turn)
        self._num_bytes = sum(gradient.num_bytes for gradient in self.gradients)
        self._channel = Channel(self._group, world.device)
        curve = settings.build_curve()
        # A zero-cost network, which isolates the wrapper's own cost, and a network that follows the modeled curve.
        self._networks = None if curve is None else (EmulatedNetwork(None), EmulatedNetwork(curve))

    def calibrate(self) -> tuple[list[Record], Plan]:
        """Measure the sweep, plain steps, ready times, contention, wrapper overhead, and the job itself on a grid of
        caps. Also returns the wrapper's default plan for the profiled order."""
        settings = self._settings
        effort = settings.amount
        replica = self._build()
        plain = self._bench.add(Variant({"role": "plain", "label": "plain"}, replica, ("marked", "profiled")))
        plain.probe = layers = Layers(replica, self._job.labels["model"], ())
        traffic = build_traffic(self._world, self._channel, self._allocate()) if self._networks is None else None
        add_costs(self._bench, replica, layers, traffic, effort.message_bytes, self._build)
        # With two buckets, a codec runs during backward and while another bucket is in flight.
        for strategy in list_strategies(settings.strategies) if settings.strategies else ():
            if strategy.is_hook and not strategy.is_dense:
                self._add("coded", strategy.text, self._num_bytes // 2, None, strategy)
        if settings.confirms:
            sizes = [gradient.num_bytes for gradient in reversed(self.gradients)]
            for cap in settings.caps_bytes or choose_caps(sizes, effort.num_caps):
                self._add("job", f"cap {format_bytes(cap)}", cap)
        buffers = sum(buffer.nbytes for buffer in self._job.module.buffers() if buffer.is_floating_point())
        sweep = _build_sweep(self._world, self._channel, self._allocate(), settings.wrapper, buffers)
        self._run(sweep)
        timings = [build_samples(self._world.share(one.timing.seconds), self._bench.num_warmup) for one in sweep]
        records: list[Record] = [one.record(timing=timing) for one, timing in zip(sweep, timings, strict=True)]
        records += [self._bench.build_record(variant) for variant in self._bench.variants]
        if settings.strategies:
            ranks = (2, max(2, self._world.world_size))
            records += measure_codecs(take_gradients(replica), replica.device, self._bench, ranks=ranks)
        profile = layers.build_record(self._bench, plain)
        self._step_s = profile.timing.median_s
        job, is_ours = build_job_from_profile(profile), settings.wrapper != "torch"
        is_near = self._channel.shares_memory or self._channel.device.type == "cuda"  # rows are not sent separately
        if is_ours and self._networks is None and not is_near:
            job = job.split(self._world.world_size)
        order, rows = job.order(self.gradients), job.list_rows(self.gradients)
        plan = plan_like_torch(self.gradients, order)
        if is_ours:
            planner = Options().make_planner(self._channel, self.gradients, self._networks is not None)
            plan = planner(order, rows)
        return [*records, profile], plan

    def confirm(self, candidates: Sequence[Prediction], stops: bool = True) -> list[Record]:
        """Compare these plans in interleaved rounds until there is a decision or time runs out.

        Plans shown to be slower than another are dropped. Without `stops`, all plans run until time runs out.
        """
        self._bench.clear()
        for c in candidates:
            plan = None if c.label == DEFAULT or c.cap_bytes else c.plan
            self._add("job", c.label, c.cap_bytes, plan, c.strategy)
        effort = self._settings.amount
        bench = self._bench
        # Group very short steps into turns: otherwise switching between plans would dominate their time.
        bench.steps_per_turn = max(self._job.steps_per_turn, min(_MOST_STEPS, math.ceil(_TURN_S / self._step_s)))
        report = follow(self._world, "comparing plans", 1, 2)
        begin_s = time.perf_counter()
        most_s = effort.confirm_s if self._settings.race_s is None else self._settings.race_s

        def is_over(number: int) -> bool:
            spent = agree_on_max((time.perf_counter() - begin_s) / most_s, bench.control)
            report(min(1.0, max(spent, number / (self._settings.iters or _MOST_ROUNDS))))
            if not stops or not is_look(number):
                return spent >= 1
            mine = [variant.times["marked"][bench.num_warm_steps :] for variant in bench.variants]
            by_plan = zip(*self._world.share(mine), strict=True)
            turns_s: dict[str, Sequence[float]] = {}
            for candidate, by_rank in zip(candidates, by_plan, strict=True):
                steps_s = [max(row) for row in zip(*by_rank, strict=True)]
                turns_s[candidate.label] = reduce_turns(steps_s, bench.steps_per_turn)
            race = judge_race(turns_s, DEFAULT)
            for variant in bench.variants:  # strategies are never dropped
                is_left = self._settings.strategies or variant.labels["label"] in (*race.left, DEFAULT)
                variant.is_dropped = not is_left
            return race.is_decided or spent >= 1

        pace = Pace(most_s, min_iters=2, max_iters=_MOST_ROUNDS, warmup=4)
        seed = self._world.share(secrets.randbits(32))[0]
        bench.run(pace, self._settings.iters or _MOST_ROUNDS, is_over=is_over, seed=seed)
        return [bench.build_record(variant, note=RACED) for variant in bench.variants]

    def close(self) -> None:
        self._bench.clear()
        for network in self._networks or ():
            network.close()

    def _add(
        self, role: str, label: str, cap_bytes: int = 0, plan: Plan | None = None, strategy: Strategy = DENSE
    ) -> Variant:
        """Add a variant with a cap, a plan or default buckets: the job itself, or with a codec (role `coded`)."""
        is_job = role == "job"
        labels: dict[str, Any] = {"role": role, "label": label}
        if is_job:
            labels |= {"cap_bytes": cap_bytes, "source": "measured" if self._networks is None else "emulated"}
        replica = self._build(self._group, cap_bytes, plan, strategy, is_job)
        return self._bench.add(Variant(labels, replica, ("marked",)))

    def _build(
        self, group: dist.ProcessGroup | None = None, cap_bytes: int = 0, plan: Plan | None = None,
        strategy: Strategy = DENSE, is_job: bool = False,
    ) -> Replica:  # fmt: skip
        """A replica, bare or wrapped, on this group."""

        def wrap_by(module: nn.Module) -> nn.Module:
            options = {} if strategy.is_dense else {"strategy": strategy}
            wrapped = wrap(module, self._settings.wrapper, group, plan, cap_bytes, **options)
            if self._networks is not None:
                self._networks[is_job].attach(wrapped)
            return wrapped

        return self._job.build(None if group is None else wrap_by)

    def _allocate(self) -> torch.Tensor:
        """Allocate memory for all gradients the way the wrapper allocates its buckets."""
        elements = max(self._num_bytes, 2 * _SMALLEST_BYTES) // 4
        if self._settings.wrapper == "torch":
            return torch.zeros(elements, device=self._world.device)
        return self._channel.allocate(elements, torch.float32, self._world.device)

    def _run(self, sweep: Sequence[_Messages]) -> None:
        effort, num_parts = self._settings.amount, 2 if self._settings.confirms else 1
        report = follow(self._world, "measuring", 0, num_parts)
        pace = Pace(effort.budget_s, min_iters=effort.min_rounds, max_iters=effort.max_rounds, warmup=4)

        # Send a few sizes after each turn, varying by round: as inside a step, threads are then asleep and the caches
        # are cold.
        def send_some(place: int, num_places: int, repetition: int) -> None:
            for messages in (one for i, one in enumerate(sweep) if (i + repetition) % num_places == place):
                time_once(messages, self._bench.control, repetition)

        self._bench.run(pace, self._settings.iters, report=report, after=send_some)


class _Messages(Timed):
    """A wrapper's messages, launched together. Their content is not checked."""

    def __init__(self, channel: Channel, parts: Sequence[torch.Tensor], record: Callable[..., Record]) -> None:
        self._channel = channel
        self._parts = parts
        self.device = channel.device
        self.record = record
        self.timing = Timing()

    def prepare(self, repetition: int) -> None:
        for part in self._parts:
            part.fill_(1.0)  # like a bucket, which is written just before it is sent

    def call(self) -> None:
        works = [self._channel.start_sum(part) for part in self._parts]
        for work in works:
            self._channel.wait(work, "a timed message")


class _Broadcast(_Messages):
    def call(self) -> None:
        dist.broadcast(self._parts[0], 0, self._channel.group)


def _build_sweep(world: World, channel: Channel, memory: torch.Tensor, wrapper: str, buffers: int) -> list[_Messages]:
    """Build the messages to time: single messages from small ones up to the size of all gradients, stored in `memory`
    like the wrapper's buckets; pairs of concurrent messages; and the message that the wrapper sends in every step for
    `buffers` bytes of buffers."""
    if world.world_size == 1:
        return []
    where: dict[str, Any] = {
        "backend": world.backend,
        "device": world.device.type,
        "world_size": world.world_size,
        "dtype": "float32",
    }
    single = partial(CollectiveRecord, op="sum", **where)
    record: Callable[..., Record]
    sizes = []
    size = _SMALLEST_BYTES
    while size < memory.nbytes * 0.75:
        sizes.append(size)
        size *= 4 if size < 64 << 10 else 2
    sweep = []
    for size in (*sizes, memory.nbytes // 4 * 4):
        record = partial(single, collective="all_reduce", num_bytes=size)
        sweep.append(_Messages(channel, [memory[: size // 4]], record))
    for size in (size for size in _PAIR_BYTES if 2 * size <= memory.nbytes):
        parts = torch.split(memory[: size // 2], size // 4)
        record = partial(ChunksRecord, total_bytes=2 * size, chunk_bytes=size, **where)
        sweep.append(_Messages(channel, parts, record))
    if buffers:
        kind, collective = (_Broadcast, "broadcast") if wrapper == "torch" else (_Messages, "all_reduce")
        record = partial(single, collective=collective, num_bytes=buffers, note="buffers")
        sweep.append(kind(channel, [torch.zeros(max(1, buffers // 4), device=world.device)], record))
    return sweep


class EmulatedNetwork:
    """A FIFO network that sends one message at a time, with durations from the curve. Without a curve, messages take no
    time."""

    def __init__(self, curve: CostCurve | None) -> None:
        self._curve = curve
        self._free_s = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._switch_s = sys.getswitchinterval()
        self._stream: torch.cuda.Stream | None = None

    def attach(self, model: nn.Module) -> None:
        """Send the model's buckets through this network. Call before its first step."""
        if self._curve is not None and self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            self._thread = ThreadPoolExecutor(1, "paceline-emulated-network")
        assert isinstance(model, DistributedDataParallel)
        # A lambda: torch compares annotations with types, and ours are strings.
        model.register_comm_hook(None, lambda state, bucket: self._send(bucket.buffer()))

    def close(self) -> None:
        """Stop the thread. No messages may be in flight."""
        if self._thread is not None:
            self._thread.shutdown()
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
            assert self._thread is not None
            self._free_s = max(time.perf_counter(), self._free_s) + self._curve.estimate_s(buffer.nbytes)
            self._thread.submit(_deliver, self._free_s, future, buffer)
        return future

    def _wait_on_gpu(self, device: torch.device, seconds: float, finish: Callable[[], None]) -> None:
        """Launch a sleep kernel on a separate stream, after the work that fills the buffer."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._cycles_per_s = 0.0
            for _ in range(5):  # best of five: an idle GPU starts at a low clock rate
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


def _deliver(done_s: float, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor) -> None:
    time.sleep(max(0.0, done_s - time.perf_counter()))
    future.set_result(buffer)
