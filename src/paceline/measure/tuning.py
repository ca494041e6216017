"""One training job under many plans of buckets, and what its prediction learns from, all in turns on all ranks.

Each round: every size of all-reduce once, and one step of every sort. What is concluded is in `predict.calibrate`, which
never sees the steps of the job itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError
from paceline.measure.engine import synchronize
from paceline.measure.layer_moments import LayerHooks, Moments
from paceline.measure.phases import cycle_windows
from paceline.measure.rounds import Pace, run_rounds
from paceline.measure.sweeps import Sweep
from paceline.measure.tune_settings import TuneSettings
from paceline.measure.wrappers import order_turns
from paceline.parallel import DataParallel
from paceline.parallel.channel import Channel
from paceline.plan import Plan
from paceline.predict.search import choose_caps
from paceline.records import LayerProfileRecord, ParameterTimes, Record, Samples, TuneStepRecord
from paceline.runtime.world import World
from paceline.training.build import Job, build_job, build_learner
from paceline.training.phases import PhaseClock
from paceline.training.step import Learner, take_step
from paceline.units import MIB, format_bytes

__all__ = ["Candidate", "TuningBench"]

_PHASES = ("forward", "backward", "optimizer")
_WARMUP = 4
# Learning nothing: replicas whose gradients are not averaged must not drift apart.
_RATE = 0.0
# A message beside backward must be over before the next one starts; it is slowed by up to this factor.
_SLOWEST, _MOST_MESSAGES = 6.0, 4
_ONE_BUCKET = 1 << 50


@dataclass(frozen=True)
class Candidate:
    """A way to cut the job's gradients: a cap, a plan, or neither, which is the wrapper's own default."""

    label: str
    cap_bytes: int = 0
    plan: Plan | None = None


@dataclass
class _Variant:
    """Steps of one sort on this rank."""

    role: str
    label: str
    learner: Learner
    cap_bytes: int = 0
    message_bytes: int = 0
    num_messages: int = 0
    step_s: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in _PHASES})
    under_way_s: list[float] = field(default_factory=list)
    overlapped_s: list[float] = field(default_factory=list)


class _ReadyPhases(PhaseClock):
    """Notes when each gradient is ready, besides the phases."""

    def __init__(self, device: torch.device, hooks: LayerHooks, moments: Moments) -> None:
        super().__init__(device)
        self._hooks, self._marks = hooks, moments
        self.borders: list[int] = []

    def enter(self, phase: str) -> None:
        if phase == "backward":
            self.borders = [self._marks.mark()]
            self._hooks.begin_backward(self.borders[0])
        elif phase == "optimizer":
            self.borders.append(self._marks.mark())
        super().enter(phase)


class _Disturbance:
    """Messages of one size that leave when certain gradients are ready, as buckets do, and nobody waits for."""

    def __init__(self, channel: Channel, memory: torch.Tensor, num_bytes: int) -> None:
        self._channel, self._memory, self._num_bytes = channel, memory, num_bytes
        self._works: list[dist.Work] = []
        self._spans: list[list[float]] = []

    def fire(self, *grads: Any) -> None:
        span = [time.perf_counter(), 0.0]
        number = len(self._works)
        elements = self._num_bytes // self._memory.element_size()
        start = number * elements % max(1, self._memory.numel() - elements + 1)
        work = self._channel.start_sum(self._memory[start : start + elements])
        self._works.append(work)
        self._spans.append(span)

        def note(_: Any) -> None:
            span[1] = span[1] or time.perf_counter()

        work.get_future().add_done_callback(note)

    def finish(self, backward_end_s: float) -> tuple[float, float]:
        """Wait for all; the mean seconds from start to end, and of that before the end of backward."""
        for work, span in zip(self._works, self._spans, strict=True):
            work.wait()
            span[1] = span[1] or time.perf_counter()
        count = max(1, len(self._spans))
        under_way_s = sum(end - begin for begin, end in self._spans) / count
        before_s = sum(max(0.0, min(end, backward_end_s) - begin) for begin, end in self._spans) / count
        return under_way_s, before_s


class TuningBench:
    """The job in all its variants on this rank. Build it, `calibrate`, and `confirm` what was found; then `close`.

    Collective throughout: every rank of the world must make the same calls.
    """

    def __init__(self, settings: TuneSettings, world: World, tell: Callable[[float, str], None]) -> None:
        self._settings, self._world, self._tell = settings, world, tell
        self._job: Job = build_job(dataclasses.replace(settings.job, ranks=world.world_size, wrapper="none"), world)
        self._windows = cycle_windows(self._job)
        group = dist.group.WORLD
        assert group is not None
        self._group = group
        self._alone = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)][world.rank]
        self._params = [param for param in self._job.learner.module.parameters() if param.requires_grad]
        self._num_bytes = sum(param.nbytes for param in self._params)
        self._channel = Channel(group, world.device)
        self._moments = Moments(world.device)
        self._ready: list[tuple[dict[int, float], float]] = []
        self._variants: list[_Variant] = []

    def calibrate(self) -> list[Record]:
        """Sweep, plain steps, ready times, contention, the wrapper's own cost; and the job itself at a grid of caps."""
        effort, on_cpu = self._settings.effort, self._world.device.type == "cpu"
        self._plain = self._add("plain", "plain", self._build())
        self._profiled = self._add("plain", "profiled", self._build())
        self._hooks = LayerHooks(self._find_params(self._profiled.learner), [], self._moments)
        if self._world.world_size > 1 and on_cpu:
            for num_bytes in effort.message_bytes:
                if 2 * num_bytes <= self._num_bytes:
                    label = f"messages of {format_bytes(num_bytes)}"
                    self._add("disturbed", label, self._build(), message_bytes=num_bytes)
        self._add("local", "one bucket", self._build(Candidate("", _ONE_BUCKET), self._alone))
        self._add("local", "a bucket each", self._build(Candidate("", 1), self._alone))
        sizes = [param.nbytes for param in reversed(self._params)]
        caps = self._settings.caps_bytes or choose_caps(sizes, effort.num_caps)
        if self._settings.confirms:
            for cap in caps:
                self._add_plan(Candidate(f"cap {format_bytes(cap)}", cap))
        sweep = Sweep(self._channel, self._world, self._num_bytes, self._find_extra())
        self._disturbing = self._channel.allocate(self._num_bytes // 4, torch.float32, self._world.device)
        num_warmup = self._run(effort.budget_s, sweep.run_once, "measuring")
        records: list[Record] = list(sweep.build_records(num_warmup))
        records += [self._build_record(variant, num_warmup) for variant in self._variants if variant.label != "profiled"]
        records.append(self._build_profile(num_warmup))
        return records

    def confirm(self, candidates: Sequence[Candidate]) -> list[Record]:
        """Steps of the job under these plans, in turns."""
        self.close()
        for candidate in candidates:
            self._add_plan(candidate)
        num_warmup = self._run(self._settings.effort.confirm_s, lambda: None, "confirming")
        return [self._build_record(variant, num_warmup) for variant in self._variants]

    def close(self) -> None:
        for variant in self._variants:
            if isinstance(variant.learner.model, DataParallel):
                variant.learner.model.stop()
        self._variants.clear()

    # -- variants -----------------------------------------------------------------------------------------------------

    def _add(self, role: str, label: str, learner: Learner, cap_bytes: int = 0, message_bytes: int = 0) -> _Variant:
        learner.model.train()
        self._variants.append(_Variant(role, label, learner, cap_bytes, message_bytes))
        return self._variants[-1]

    def _add_plan(self, candidate: Candidate) -> None:
        self._add("plan", candidate.label, self._build(candidate, self._group), candidate.cap_bytes)

    def _build(self, candidate: Candidate | None = None, group: dist.ProcessGroup | None = None) -> Learner:
        """A replica of its own, bare or in the wrapper with these buckets."""
        learner = build_learner(self._job.settings, self._world, self._job.train)
        if candidate is None:
            return learner
        wrapped = _wrap(learner.module, self._settings.job.wrapper, candidate, group)
        return dataclasses.replace(learner, model=wrapped)

    def _find_params(self, learner: Learner) -> list[nn.Parameter]:
        return [param for param in learner.module.parameters() if param.requires_grad]

    def _find_extra(self) -> tuple[str, int]:
        """The collective that the wrapper adds to each step for buffers, and its bytes."""
        buffers = [b for b in self._job.learner.module.buffers() if b.is_floating_point()]
        collective = "broadcast" if self._settings.job.wrapper == "torch" else "all_reduce"
        return collective, sum(buffer.nbytes for buffer in buffers)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _run(self, budget_s: float, first: Callable[[], None], what: str) -> int:
        effort, num_warmup = self._settings.effort, [0]

        def end_warmup(number: int) -> None:
            num_warmup[0] = number

        def run_round(repetition: int) -> float:
            begin_s = time.perf_counter()
            first()
            for index in order_turns(len(self._variants), repetition):
                self._take(self._variants[index])
            return time.perf_counter() - begin_s

        pace = Pace(budget_s=budget_s, min_iters=effort.min_rounds, max_iters=effort.max_rounds, warmup=_WARMUP)
        self._tell(0.0, what)
        run_rounds(
            run_round, self._world.control, pace, self._settings.iters, None, lambda share: self._tell(share, what),
            end_warmup,
        )  # fmt: skip
        return num_warmup[0]

    def _take(self, variant: _Variant) -> None:
        """One step, begun by all ranks together."""
        learner, device = variant.learner, self._world.device
        window = next(self._windows)
        phases: PhaseClock = PhaseClock(device)
        handles: list[tuple[Any, Any]] = []
        disturbance = None
        hooked = variant.label == "profiled"
        if hooked:
            self._moments.restart()
            phases = _ReadyPhases(device, self._hooks, self._moments)
            attached = self._hooks.attached()
            attached.__enter__()
        elif variant.role == "disturbed":
            disturbance = _Disturbance(self._channel, self._disturbing, variant.message_bytes)
            handles = self._set_fuses(variant, disturbance)
        synchronize(device)
        dist.barrier(group=self._world.control)
        begin_s = time.perf_counter()
        take_step(learner, window.batches, window.num_samples * learner.form.targets_per_sample, _RATE, phases)
        marked = phases.end()
        synchronize(device)
        end_s = time.perf_counter()
        times = marked.read()
        for _, handle in handles:
            handle.remove()
        if hooked:
            attached.__exit__(None, None, None)
            assert isinstance(phases, _ReadyPhases)
            self._note_ready(phases)
        if disturbance is not None:
            under_way_s, overlapped_s = disturbance.finish(end_s - times["optimizer"])
            variant.under_way_s.append(under_way_s)
            variant.overlapped_s.append(overlapped_s)
        variant.step_s.append(end_s - begin_s)
        for phase in _PHASES:
            variant.phases_s[phase].append(times[phase])

    def _note_ready(self, phases: _ReadyPhases) -> None:
        at_s = self._moments.read_s()
        begin, end = phases.borders
        ready_s = {index: at_s[moment] - at_s[begin] for index, moment in self._hooks.ready.items()}
        self._ready.append((ready_s, at_s[end] - at_s[begin]))

    def _set_fuses(self, variant: _Variant, disturbance: _Disturbance) -> list[tuple[Any, Any]]:
        """Hooks that send a message at even moments of backward; as many as do not run into each other."""
        from torch.autograd.graph import get_gradient_edge

        if not variant.num_messages:
            alone_s = _time_alone(self._channel, self._disturbing, variant.message_bytes)
            fitting = self._ready[-1][1] / (_SLOWEST * alone_s) if self._ready else 1.0
            mine = max(1, min(_MOST_MESSAGES, int(fitting)))
            variant.num_messages = min(self._world.share(mine))
        # All ranks at the same gradients, by the record of rank 0.
        places = self._world.share(self._pick_places(variant.num_messages))[0]
        params = self._find_params(variant.learner)
        # Nodes are held with their hooks: one that nobody holds is made anew by the forward, without any.
        nodes = [get_gradient_edge(params[index]).node for index in places]
        return [(node, node.register_hook(disturbance.fire)) for node in nodes]

    def _pick_places(self, count: int) -> list[int]:
        if not self._ready:
            return list(range(len(self._params)))[:: max(1, len(self._params) // count)][:count]
        ready_s, total_s = self._ready[-1]
        wanted = [total_s * (number + 0.5) / count for number in range(count)]
        found: list[int] = []
        for moment in wanted:
            left = [index for index in ready_s if index not in found]
            if left:
                found.append(min(left, key=lambda index: abs(ready_s[index] - moment)))
        return found

    # -- records ------------------------------------------------------------------------------------------------------

    def _samples(self, mine: list[float], num_warmup: int) -> Samples:
        rows = tuple(zip(*self._world.share(mine), strict=True))
        return Samples(seconds=rows[num_warmup:], warmup_seconds=rows[:num_warmup])

    def _build_record(self, variant: _Variant, num_warmup: int) -> TuneStepRecord:
        job, world = self._settings.job, self._world
        times = {phase: self._samples(variant.phases_s[phase], num_warmup) for phase in _PHASES}
        is_disturbed = variant.role == "disturbed"
        return TuneStepRecord(
            model=job.model, wrapper=job.wrapper, backend=world.backend, device=world.device.type,
            world_size=world.world_size, batch_size=self._job.batches.batch_size, role=variant.role,
            label=variant.label, cap_bytes=variant.cap_bytes if variant.role == "plan" else 0,
            bucket_bytes=read_buckets(variant.learner.model), message_bytes=variant.message_bytes,
            num_messages=variant.num_messages if is_disturbed else 0,
            timing=self._samples(variant.step_s, num_warmup), **times,
            under_way=self._samples(variant.under_way_s, num_warmup) if is_disturbed else None,
            overlapped=self._samples(variant.overlapped_s, num_warmup) if is_disturbed else None,
        )  # fmt: skip

    def _build_profile(self, num_warmup: int) -> LayerProfileRecord:
        """Rank 0's layers, profiled while all ranks computed."""
        job = self._settings.job
        ready: list[tuple[dict[int, float], float]] = self._world.share(self._ready)[0][num_warmup:]
        names = {param: name for name, param in self._job.learner.module.named_parameters()}
        parameters = [
            ParameterTimes(
                name=names[param],
                num_bytes=param.nbytes,
                num_elements=param.numel(),
                dtype=str(param.dtype).removeprefix("torch."),
                block="",
                ready_s=tuple(min(seen[index], total_s) if index in seen else None for seen, total_s in ready),
            )
            for index, param in enumerate(self._params)
        ]
        medians = {p.name: float("inf") if p.median_s is None else p.median_s for p in parameters}
        ordered = sorted(reversed(parameters), key=lambda parameter: medians[parameter.name])
        plain, profiled = self._plain, self._profiled

        def first(values: list[float]) -> Samples:
            rows = tuple((value,) for value in self._world.share(values)[0])
            return Samples(seconds=rows[num_warmup:], warmup_seconds=rows[:num_warmup])

        backward = Samples(seconds=tuple((total_s,) for _, total_s in ready))
        return LayerProfileRecord(
            model=job.model, device=self._world.device.type, dtype=job.precision,
            batch_size=self._job.batches.batch_size, parameters=tuple(ordered), blocks=(),
            timing=first(plain.step_s), forward=first(plain.phases_s["forward"]),
            backward=first(plain.phases_s["backward"]), optimizer=first(plain.phases_s["optimizer"]),
            profiled_step=first(profiled.step_s), profiled_forward=first(profiled.phases_s["forward"]),
            profiled_backward=backward, note=f"of rank 0, while {self._world.world_size} ranks computed",
        )  # fmt: skip


def _time_alone(channel: Channel, memory: torch.Tensor, num_bytes: int) -> float:
    """Seconds of one message, the quicker of a few. Collective: every rank must call this."""
    part = memory[: max(1, num_bytes // memory.element_size())]
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        channel.wait(channel.start_sum(part), "a message that is timed")
        times.append(time.perf_counter() - begin_s)
    return min(times)


def _wrap(module: nn.Module, wrapper: str, candidate: Candidate, group: dist.ProcessGroup | None) -> nn.Module:
    cap = {"bucket_cap_mb": candidate.cap_bytes / MIB} if candidate.cap_bytes else {}
    if wrapper == "paceline":
        return DataParallel(module, process_group=group, plan=candidate.plan, **cap)
    kwargs: dict[str, Any] = candidate.plan.as_torch_kwargs() if candidate.plan is not None else dict(cap)
    return DistributedDataParallel(module, process_group=group, **kwargs)


def read_buckets(model: nn.Module) -> tuple[int, ...]:
    """The bytes of each bucket as the wrapper itself tells them, in the order in which they leave; none if bare."""
    if isinstance(model, DataParallel):
        return model.plan.bucket_bytes if model.plan is not None else ()
    if isinstance(model, DistributedDataParallel):
        told = model._get_ddp_logging_data()
        listed = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or "")
        sizes = tuple(int(size) for size in listed.split(",") if size.strip())
        if not sizes:
            raise ConfigError("torch's wrapper tells no bucket sizes: it needs two steps to settle them")
        return sizes
    return ()
