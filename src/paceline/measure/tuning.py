"""One training job under many plans of buckets, and what its prediction learns from, all in turns on all ranks.

Each round: every size of all-reduce once, and one step of every sort. What is concluded is in `predict.calibrate`,
which never sees the steps of the job itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.measure.emulation import EmulatedNetwork
from paceline.measure.engine import Pace, build_samples, choose_control_backend, run_rounds, synchronize
from paceline.measure.layer_moments import LayerHooks, Moments
from paceline.measure.layers import order_by_ready
from paceline.measure.phases import cycle_windows
from paceline.measure.replicas import read_buckets
from paceline.measure.sweeps import SMALLEST_BYTES, Sweep
from paceline.measure.tune_settings import TuneSettings
from paceline.measure.tune_steps import (
    PHASES,
    Candidate,
    Disturbance,
    ReadyPhases,
    Variant,
    time_alone,
    wrap,
)
from paceline.measure.wrappers import order_turns
from paceline.parallel import DataParallel
from paceline.parallel.channel import Channel
from paceline.parallel.ddp import Options, has_spare_cores
from paceline.plan import Gradient, Plan, plan_like_torch
from paceline.predict.search import choose_caps
from paceline.records import LayerProfileRecord, ParameterTimes, Record, Samples, StepRecord
from paceline.runtime.world import World
from paceline.training.build import Job, build_job, build_learner
from paceline.training.step import Learner, PhaseClock, take_step
from paceline.units import format_bytes

__all__ = ["Candidate", "TuningBench"]

_WARMUP = 4
# Learning nothing: replicas whose gradients are not averaged must not drift apart.
_RATE = 0.0
# A message beside backward must be over before the next one starts; it is slowed by up to this factor.
_SLOWEST, _MOST_MESSAGES = 6.0, 4
_ONE_BUCKET = 1 << 50


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
        self._control = dist.new_group(backend=choose_control_backend(world))
        self._alone = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)][world.rank]
        self._params = self._job.learner.parameters
        self._num_bytes = sum(param.nbytes for param in self._params)
        self._channel = Channel(group, world.device)
        self._moments = Moments(world.device)
        self._ready: list[tuple[dict[int, float], float]] = []
        self._variants: list[Variant] = []
        curve = settings.build_curve()
        # Steps whose buckets cost only what the wrapper does with them, and steps on a network that is modelled.
        self._networks = None if curve is None else (EmulatedNetwork(None), EmulatedNetwork(curve))

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """In the order of the model's definition, as a plan names them."""
        names = {param: name for name, param in self._job.learner.module.named_parameters()}
        return tuple(
            Gradient(names[p], p.nbytes, p.element_size(), str(p.dtype).removeprefix("torch."), p.device.type)
            for p in self._params
        )

    def build_default_plan(self) -> Plan:
        """The buckets of the wrapper where nobody says anything, by the order that was profiled on rank 0."""
        place = {gradient.name: index for index, gradient in enumerate(self.gradients)}
        order = [place[parameter.name] for parameter in self._profile.parameters]
        if self._settings.job.wrapper == "torch":
            return plan_like_torch(self.gradients, order)
        planner = Options().make_planner(
            on_nccl=self._channel.is_nccl,
            with_hook=self._networks is not None,
            world_size=self._world.world_size,
            has_spare_cores=has_spare_cores(self._world.world_size),
        )
        return planner(self.gradients, order)

    def calibrate(self) -> list[Record]:
        """Sweep, plain steps, ready times, contention, the wrapper's own cost; and the job itself at a grid of caps."""
        effort, on_cpu = self._settings.effort, self._world.device.type == "cpu"
        self._plain = self._add("plain", "plain", self._build())
        self._profiled = self._add("plain", "profiled", self._build())
        self._hooks = LayerHooks(self._profiled.learner.parameters, [], self._moments)
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
        sweep = Sweep(self._channel, self._world, self._control, self._allocate(), self._find_extra())
        self._disturbing = self._allocate()
        num_warmup = self._run(effort.budget_s, sweep, "measuring")
        records: list[Record] = list(sweep.build_records(num_warmup))
        shown = [variant for variant in self._variants if variant is not self._profiled]
        records += [self._build_record(variant, num_warmup) for variant in shown]
        self._profile = self._build_profile(num_warmup)
        return [*records, self._profile]

    def confirm(self, candidates: Sequence[Candidate]) -> list[Record]:
        """Steps of the job under these plans, in turns."""
        self._drop_variants()
        for candidate in candidates:
            self._add_plan(candidate)
        num_warmup = self._run(self._settings.effort.confirm_s, None, "confirming")
        records = [self._build_record(variant, num_warmup) for variant in self._variants]
        return [dataclasses.replace(record, note="confirmed") for record in records]

    def close(self) -> None:
        self._windows.close()
        self._drop_variants()
        for network in self._networks or ():
            network.close()

    def _drop_variants(self) -> None:
        for variant in self._variants:
            if isinstance(variant.learner.model, DataParallel):
                variant.learner.model.stop()
        self._variants.clear()

    # -- variants -----------------------------------------------------------------------------------------------------

    def _add(self, role: str, label: str, learner: Learner, cap_bytes: int = 0, message_bytes: int = 0) -> Variant:
        learner.model.train()
        self._variants.append(Variant(role, label, learner, cap_bytes, message_bytes))
        return self._variants[-1]

    def _add_plan(self, candidate: Candidate) -> None:
        self._add("job", candidate.label, self._build(candidate, self._group), candidate.cap_bytes)

    def _build(self, candidate: Candidate | None = None, group: dist.ProcessGroup | None = None) -> Learner:
        """A replica of its own, bare or in the wrapper with these buckets."""
        learner = build_learner(self._job.settings, self._world, self._job.train, like=self._job.learner.module)
        if candidate is None:
            return learner
        wrapped = wrap(learner.module, self._settings.job.wrapper, candidate, group)
        if self._networks is not None:
            self._networks[group is self._group].attach(wrapped)
        return dataclasses.replace(learner, model=wrapped)

    def _allocate(self) -> torch.Tensor:
        """Memory for as much as all gradients, of the kind in which the wrapper's buckets lie."""
        elements = max(self._num_bytes, 2 * SMALLEST_BYTES) // 4
        if self._settings.job.wrapper == "torch":
            return torch.zeros(elements, device=self._world.device)
        return self._channel.allocate(elements, torch.float32, self._world.device)

    def _find_extra(self) -> tuple[str, int]:
        """The collective that the wrapper adds to each step for buffers, and its bytes."""
        buffers = [b for b in self._job.learner.module.buffers() if b.is_floating_point()]
        collective = "broadcast" if self._settings.job.wrapper == "torch" else "all_reduce"
        return collective, sum(buffer.nbytes for buffer in buffers)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _run(self, budget_s: float, sweep: Sweep | None, what: str) -> int:
        effort, num_warmup = self._settings.effort, [0]

        def end_warmup(number: int) -> None:
            num_warmup[0] = number

        def run_round(repetition: int) -> float:
            begin_s = time.perf_counter()
            for place, index in enumerate(order_turns(len(self._variants), repetition)):
                self._take(self._variants[index])
                if sweep is not None:
                    # A few sizes after each step: a message in a step finds threads asleep and caches full of others.
                    sweep.run_part(place, len(self._variants), repetition)
            return time.perf_counter() - begin_s

        pace = Pace(budget_s=budget_s, min_iters=effort.min_rounds, max_iters=effort.max_rounds, warmup=_WARMUP)
        self._tell(0.0, what)
        run_rounds(
            run_round, self._control, pace, self._settings.iters, None, lambda share: self._tell(share, what),
            end_warmup,
        )  # fmt: skip
        return num_warmup[0]

    def _take(self, variant: Variant) -> None:
        """One step, begun by all ranks together; where messages disturb, another in which they are asked for their
        times, which disturbs by itself."""
        if variant.role == "disturbed":
            self._take_once(variant, True)
        self._take_once(variant, False)

    def _take_once(self, variant: Variant, is_asked: bool) -> None:
        learner, device = variant.learner, self._world.device
        window = next(self._windows)
        phases: PhaseClock = PhaseClock(device)
        handles: list[tuple[Any, Any]] = []
        disturbance = None
        hooked = variant.label == "profiled"
        if hooked:
            self._moments.restart()
            phases = ReadyPhases(device, self._hooks, self._moments)
            attached = self._hooks.attached()
            attached.__enter__()
        elif variant.role == "disturbed":
            disturbance = Disturbance(self._channel, self._disturbing, variant.message_bytes, is_asked)
            handles = self._set_fuses(variant, disturbance)
        synchronize(device)
        dist.barrier(group=self._control)
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
            assert isinstance(phases, ReadyPhases)
            self._note_ready(phases)
        if disturbance is not None:
            under_way_s, overlapped_s = disturbance.finish(end_s - times["optimizer"])
            if is_asked:
                variant.under_way_s.append(under_way_s)
                variant.overlapped_s.append(overlapped_s)
                return
        variant.step_s.append(end_s - begin_s)
        for phase in PHASES:
            variant.phases_s[phase].append(times[phase])

    def _note_ready(self, phases: ReadyPhases) -> None:
        at_s = self._moments.read_s()
        begin, end = phases.borders
        ready_s = {index: at_s[moment] - at_s[begin] for index, moment in self._hooks.ready.items()}
        self._ready.append((ready_s, at_s[end] - at_s[begin]))

    def _set_fuses(self, variant: Variant, disturbance: Disturbance) -> list[tuple[Any, Any]]:
        """Hooks that send a message at even moments of backward; as many as do not run into each other."""
        from torch.autograd.graph import get_gradient_edge

        if not variant.num_messages:
            alone_s = time_alone(self._channel, self._disturbing, variant.message_bytes)
            ready_s, total_s = self._ready[-1] if self._ready else ({}, 0.0)
            # One gradient sends one message.
            mine = max(1, min(_MOST_MESSAGES, len(ready_s), int(total_s / (_SLOWEST * alone_s))))
            variant.num_messages = min(self._world.share(mine))
        # All ranks at the same gradients, by the record of rank 0.
        places = self._world.share(self._pick_places(variant.num_messages))[0]
        params = variant.learner.parameters
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
        return build_samples(self._world.share(mine), num_warmup)

    def _build_record(self, variant: Variant, num_warmup: int) -> StepRecord:
        job, world = self._settings.job, self._world
        forward, backward, optimizer = (self._samples(variant.phases_s[phase], num_warmup) for phase in PHASES)
        is_disturbed = variant.role == "disturbed"
        return StepRecord(
            model=job.model, wrapper=job.wrapper, backend=world.backend, device=world.device.type,
            world_size=world.world_size, batch_size=self._job.batches.batch_size, role=variant.role,
            label=variant.label, cap_bytes=variant.cap_bytes if variant.role == "job" else 0,
            bucket_bytes=read_buckets(variant.learner.model), message_bytes=variant.message_bytes,
            num_messages=variant.num_messages if is_disturbed else 0,
            timing=self._samples(variant.step_s, num_warmup), forward=forward, backward=backward, optimizer=optimizer,
            source="emulated" if self._networks is not None and variant.role == "job" else "measured",
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
        plain, profiled = self._plain, self._profiled

        def first(values: list[float]) -> Samples:
            return build_samples(self._world.share(values)[:1], num_warmup)

        backward = Samples(seconds=tuple((total_s,) for _, total_s in ready))
        return LayerProfileRecord(
            model=job.model, device=self._world.device.type, dtype=job.precision,
            batch_size=self._job.batches.batch_size, parameters=tuple(order_by_ready(parameters)), blocks=(),
            timing=first(plain.step_s), forward=first(plain.phases_s["forward"]),
            backward=first(plain.phases_s["backward"]), optimizer=first(plain.phases_s["optimizer"]),
            profiled_step=first(profiled.step_s), profiled_forward=first(profiled.phases_s["forward"]),
            profiled_backward=backward, note=f"of rank 0, while {self._world.world_size} ranks computed",
        )  # fmt: skip
