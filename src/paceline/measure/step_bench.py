"""The step bench: variants of one job take interleaved steps of several kinds, which become step records.

`StepBench._take` times one step. The job is built from settings (`TrainingJob`) or is a user's module and step
function (`OwnJob`). The caller chooses the variants to compare: wrappers, phases, plans or ranks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError, MeasurementError, refuse
from paceline.measure.engine import Pace, Report, build_control, build_samples, run_rounds, synchronize
from paceline.measure.observer import list_bucket_bytes
from paceline.parallel import DDP, is_torchs
from paceline.parallel.channel import Sent
from paceline.parallel.graph import find_tensors
from paceline.parallel.timeline import BucketTimes, StepTimes
from paceline.plan import Gradient, Plan
from paceline.records import Samples, StepRecord
from paceline.records.steps import EXTRA_SAMPLES, PHASES
from paceline.runtime.ranks.world import World
from paceline.torch_internals import tree_map_only
from paceline.training.build import Job, build_learner, wrap_models
from paceline.training.loader import Window, load_windows
from paceline.training.step import (
    Learner,
    NoPhases,
    PhaseClock,
    Phases,
    PhaseTimes,
    list_models,
    mark_phases,
    take_step,
)
from paceline.units import MIB
from paceline.workloads.data.sharding import EpochOrder

Wrap = Callable[[nn.Module], nn.Module]
Windows = Generator[Window, None, None]
OwnModel = nn.Module | Callable[[], Any]  # a module, or a factory of (model, step)
OwnStep = Callable[[nn.Module], Any]


@dataclass
class Replica:
    """A model that takes training steps on this rank: `load` gets the next input, `run(input, phases)` takes a step.
    The bench calls `activate` before each step, ahead of the barrier."""

    model: nn.Module
    module: nn.Module
    device: torch.device
    run: Callable[[Any, Phases], Any]
    load: Callable[[], Any] = lambda: None
    activate: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    def close(self) -> None:
        self.finish()
        for model in list_models(self.model):
            if isinstance(model, DDP):
                model.stop()


def wrap(
    module: nn.Module, wrapper: str, group: dist.ProcessGroup | None = None, plan: Plan | None = None,
    cap_bytes: int = 0, **options: Any,
) -> nn.Module:  # fmt: skip
    """Wrap the module for data parallelism with `paceline` or `torch`, using a plan, a cap, or the wrapper's defaults.
    Several models each get their own wrapper."""
    if list_models(module) != [module]:
        return wrap_models(module, lambda part: wrap(part, wrapper, group, plan, cap_bytes, **options))
    if cap_bytes:
        options["bucket_cap_mb"] = cap_bytes / MIB
    if wrapper == "paceline":
        # Steps without communication make replicas diverge: do not check for it.
        return DDP(module, process_group=group, plan=plan, **{"check_replicas_every": 0} | options)
    options |= {} if plan is None else plan.as_torch_kwargs()
    return DistributedDataParallel(module, process_group=group, **options)


def list_gradients(module: nn.Module) -> tuple[Gradient, ...]:
    """The gradients of a bare module in definition order, with their names in a plan."""
    return tuple(
        Gradient(name, p.nbytes, p.element_size(), str(p.dtype).removeprefix("torch."), p.device.type, tuple(p.shape))
        for name, p in module.named_parameters()
        if p.requires_grad
    )


def read_buckets(model: nn.Module) -> tuple[int, ...]:
    """Each bucket's bytes in launch order, as reported by the wrapper; empty for a bare model."""
    if (models := list_models(model)) != [model]:
        return tuple(size for part in models for size in read_buckets(part))
    if isinstance(model, DDP):
        return model.plan.bucket_bytes if model.plan is not None else ()
    return tuple(list_bucket_bytes(model)) if isinstance(model, DistributedDataParallel) else ()


class TrainingJob:
    """A job built from settings. `labels` are fields of its records. Steps use full global batches and a learning rate
    of 0, which keeps replicas identical. A user's step may update parameters, so each replica then has a new model."""

    steps_per_turn = 1

    def __init__(self, job: Job) -> None:
        self.job = job
        self.module = job.learner.module
        self._built = [job.learner]
        self._windows = cycle_windows(job)
        check_whole(job, job.batches.global_batch_size)
        self.labels: dict[str, Any] = {"model": job.settings.model, "data": job.train.name}
        self.labels |= {"batch_size": job.batches.batch_size, "accumulate": job.batches.accumulate}
        self.labels |= {"precision": job.settings.precision, "wrapper": job.settings.wrapper}

    def build(self, wrap: Wrap | None = None, windows: Windows | None = None, num_ranks: int = 0) -> Replica:
        """Build a replica, bare or wrapped, with the job's parameter values. `windows` and `num_ranks` default to the
        job's. Collective if building the wrapper is collective."""
        bare = dataclasses.replace(self.job.settings, wrapper="none")
        like = self.module if self.job.learner.own_step is None else None
        learner = build_learner(bare, self.job.world, self.job.train, like=like)
        if wrap is not None:
            learner.model = wrap(learner.module)
        learner.world_size = num_ranks or learner.world_size
        return self._take_steps(learner, windows or cycle_windows(self.job))

    def build_own(self) -> Replica:
        """Build a replica in the job's own wrapper. Collective if building the wrapper is collective."""
        job = self.job
        wrapper = job.settings.wrapper
        if job.learner.own_step is not None and wrapper != "none":
            return self.build(functools.partial(wrap, wrapper=wrapper), self._windows)
        learner = self._built.pop() if self._built else build_learner(job.settings, job.world, job.train)
        return self._take_steps(learner, self._windows)

    def _take_steps(self, learner: Learner, windows: Windows) -> Replica:
        learner.model.train()

        def run(window: Window, phases: Phases) -> None:
            num_targets = window.num_samples * learner.form.targets_per_sample
            take_step(learner, window.batches, num_targets, 0.0, phases)

        return Replica(learner.model, learner.module, learner.device, run, lambda: next(windows), finish=windows.close)


class OwnJob:
    """A user's module and step: `step(model)` runs one forward and backward on any inputs, and may update parameters.

    A factory builds a new (model, step) pair for each replica. Without one, all replicas share the module: each replica
    rewraps it before its turn and takes a few untimed steps. The state of the module and of the optimizers in `step` is
    restored at the end, because steps without communication make ranks diverge.
    """

    def __init__(self, model: OwnModel, step: OwnStep | None = None, wrapper: str = "none") -> None:
        self.is_shared = isinstance(model, nn.Module)  # all replicas share this module
        self._factory: Callable[[], Any] = (lambda: (model, step)) if isinstance(model, nn.Module) else model
        self._spare: tuple[nn.Module, OwnStep] | None = self._make()
        self.module, self._step = self._spare
        trained = [p for p in self.module.parameters() if p.requires_grad]
        kind = type(self.module)
        refuse(
            (issubclass(kind, DistributedDataParallel), f"{kind.__name__} is a wrapper: pass the bare module"),
            (not trained, "the module has no parameter that requires a gradient: nothing to measure"),
        )
        self.steps_per_turn = 4 if self.is_shared else 1  # changing the wrapper is expensive
        self._active: Replica | None = None
        # Saved in host memory: copies on the GPU would count toward measured memory.
        self._saved = {key: value.detach().to("cpu", copy=True) for key, value in self.module.state_dict().items()}
        self._optimizers: dict[torch.optim.Optimizer, dict[str, Any]] = {}
        self._device = trained[0].device
        self._was_training = self.module.training
        self.labels: dict[str, Any] = {
            "model": type(self.module).__name__,
            "data": "own",
            "precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(trained[0].dtype, "fp32"),
            "batch_size": self._count_samples(),
            "wrapper": wrapper,
        }

    def _make(self) -> tuple[nn.Module, OwnStep]:
        made = self._factory()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            found = f"the factory returned {type(made).__name__}"
            raise ConfigError(f"{found}: it must return (model, step), a module and a function")
        return made

    def _count_samples(self) -> int:
        """Take one bare step and read the batch size from the inputs of its first forward."""
        found: list[int] = []

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            found.extend(tensor.size(0) for tensor in find_tensors((args, kwargs)) if tensor.dim())

        def save(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer not in self._optimizers:
                state: dict[str, Any] = optimizer.state_dict()
                on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, state["state"])
                self._optimizers[optimizer] = copy.deepcopy(state | {"state": on_host})

        with self.module.register_forward_pre_hook(look, with_kwargs=True), register_optimizer_step_pre_hook(save):
            self._step(self.module)
        self.module.zero_grad()
        return max(1, found[0]) if found else 1

    def build_own(self) -> Replica:
        wrapper = self.labels["wrapper"]
        return self.build(None if wrapper == "none" else lambda module: wrap(module, wrapper))

    def build(self, wrap: Wrap | None = None) -> Replica:
        (module, step), self._spare = self._spare or self._make(), None
        replica = Replica(module, module, self._device, lambda _, phases: None)

        def run(_: Any, phases: Phases) -> None:
            with mark_phases(replica.model, phases):
                step(replica.model)
            module.zero_grad()  # gradients would accumulate if the step does not clear them

        def activate() -> None:
            if self._active is replica:
                return
            if self._active is not None:
                self._active.close()
                was_torchs = is_torchs(self._active.model)
                self._active.model = module
                if was_torchs:  # torch's wrapper removes its hooks when it is freed
                    gc.collect()
            self._active = replica
            replica.model = module if wrap is None else wrap(module)
            for _ in range(2 if wrap is not None else 1):  # torch's wrapper builds its final buckets in the second step
                run(None, NoPhases())

        replica.run = run
        if self.is_shared:
            replica.activate = activate
        elif wrap is not None:
            replica.model = wrap(module)
        return replica

    def close(self) -> None:
        if self._active is not None:
            self._active.close()
        self.module.load_state_dict(self._saved)
        for optimizer, state in self._optimizers.items():
            optimizer.load_state_dict(state)
        self.module.train(self._was_training)


MeasuredJob = TrainingJob | OwnJob


def check_whole(job: Job, size: int, smaller: str = "a smaller --batch-size") -> None:
    found = f"{job.train.describe()}: less than one global batch of {size}"
    refuse(
        (not job.train.is_stream and len(job.train) < size, f"{found}; use {smaller}, or more --samples"),
        (job.settings.batch_growth, "--batch-growth: steps are measured at a single batch size; leave it out"),
    )


def cycle_windows(job: Job, batch_size: int = 0, world_size: int = 0) -> Windows:
    """Yield this rank's part of full global batches, epoch after epoch. Drops short last batches, because their steps
    would not be comparable. `batch_size` and `world_size` default to the job's."""
    batch_size = batch_size or job.batches.batch_size
    world_size = world_size or job.world.world_size
    size = batch_size * world_size * job.batches.accumulate
    data = job.train.at(batch_size)
    for epoch in itertools.count():
        order = EpochOrder(size if data.is_stream else len(data), size, job.settings.seed, epoch, "drop", data.shuffles)
        windows = load_windows(data, order, 0, job.world.rank, world_size, batch_size, job.world.device)
        with contextlib.closing(windows):
            # Skip a smaller last batch, unless it is the only one.
            yield from (w for w in windows if w.number == 0 or not w.is_last or w.num_samples == size)


def hook_gradients(params: Sequence[nn.Parameter], hooks: contextlib.ExitStack, note: Callable[..., None]) -> None:
    """Call `note(index, *gradients)` after each accumulation of a parameter's gradient, until `hooks` closes."""
    # Keep the nodes alive, so that later graphs, including those built in backward (checkpointing), reuse them.
    nodes = [get_gradient_edge(param).node for param in params]
    hooks.callback(nodes.clear)
    for index, node in enumerate(nodes):
        hooks.callback(node.register_hook(functools.partial(note, index)).remove)


class TimedMessages:
    """Times a replica's messages. Call `begin` before a step and `read` after the step.

    torch's wrapper accepts a hook only before its first step, so `build` creates another replica in the same wrapper.
    Its messages cannot be timed on a GPU.
    """

    def __init__(self, replica: Replica, build: Callable[[], Replica], group: dist.ProcessGroup | None = None) -> None:
        self.replica = replica
        self._before = Sent(0, 0)  # traffic of Paceline's wrapper up to `begin`
        self._buckets: list[BucketTimes] = []  # sent by torch's hook since `begin`
        self._group = group
        self._has_hook = is_torchs(replica.model) and replica.device.type == "cpu"
        if self._has_hook:
            self.replica = build()
            assert isinstance(self.replica.model, DistributedDataParallel)
            # A lambda: torch compares annotations with types, and ours are strings.
            self.replica.model.register_comm_hook(None, lambda state, bucket: self._send(bucket))

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as torch's wrapper does without a hook, and record its launch and completion."""
        times = BucketTimes(bucket.buffer().nbytes, launch_s=time.perf_counter())
        self._buckets.append(times)
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        future = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()

        def record(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            times.done_s = time.perf_counter()
            return done.value()[0]

        timed: torch.futures.Future[torch.Tensor] = future.then(record)
        return timed

    def begin(self) -> None:
        self._buckets.clear()
        if isinstance(self.replica.model, DDP):
            self.replica.model.time_next_step()
            self._before = self.replica.model.count_sent()

    def read(self) -> tuple[float, Sent] | None:
        """Seconds with at least one message of the last step in flight, and the messages and bytes sent.

        Counts gradients only: control words and BatchNorm statistics are not part of a bucket plan. None if messages
        cannot be timed.
        """
        model = self.replica.model
        if self._has_hook:
            sent = Sent(len(self._buckets), sum(bucket.num_bytes for bucket in self._buckets))
            return StepTimes(self._buckets, backward_s=0.0, over_s=0.0, begin_s=0.0).busy_s, sent
        if not isinstance(model, DDP):
            return None
        now = model.count_sent()
        times = model.report().times
        sent = Sent(now.num_messages - self._before.num_messages, now.num_bytes - self._before.num_bytes)
        return 0.0 if times is None else times.busy_s, sent

    def close(self) -> None:
        if self._has_hook:
            self.replica.close()


def check_sent(by_rank: Sequence[Sequence[Sent]], planned: Sent, who: str) -> None:
    """Raise an error if any rank's traffic in a step differs from the plan."""
    for number, step in enumerate(zip(*by_rank, strict=True), start=1):
        for rank, sent in enumerate(step):
            if sent != planned:
                raise MeasurementError(
                    f"{who}: in step {number} rank {rank} sent {sent.num_bytes} bytes of gradients in "
                    f"{sent.num_messages} messages but the plan has {planned.num_bytes} in {planned.num_messages}: "
                    "bandwidth cannot be computed; please report this bug",
                    code="mismatch",
                )


class Probe:
    """Observes a variant's steps: `begin` is called before the barrier, `end` after the step has finished."""

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        """Return the probe's phases, or None for the usual ones. `hooks` closes after the step, even if it fails."""
        return None

    def end(self, kind: str, times: PhaseTimes) -> None:
        pass


@dataclass
class Variant:
    """One variant of the job and its times on this rank, by record field. `replica` is None on ranks that only join the
    barrier.

    `labels` are fields of its record. Each round takes steps of each of its `kinds`, until it `is_dropped`. Kinds:
    plain; marked (with phases); no_comm (without communication); timed (with message times); messages (the probe times
    its messages); profiled (with the probe's own phases).
    """

    labels: dict[str, Any]
    replica: Replica | None
    kinds: tuple[str, ...] = ("plain",)
    timed: TimedMessages | None = None
    probe: Probe | None = None
    times: dict[str, list[float]] = field(default_factory=dict)
    starts_s: list[float] = field(default_factory=list)
    bucket_bytes: tuple[int, ...] = ()
    sent: list[Sent] = field(default_factory=list)
    is_dropped: bool = False

    def note(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def close(self) -> None:
        if self.timed is not None:
            self.timed.close()
        if self.replica is not None:
            self.replica.close()


class StepBench:
    """Times interleaved steps of several variants on all ranks of a world. Collective: call on every rank.

    With `loads_inside`, waiting for data is part of the step. A turn has `steps_per_turn` steps of each kind.
    """

    def __init__(
        self, world: World, labels: dict[str, Any], loads_inside: bool = False, steps_per_turn: int = 1
    ) -> None:
        self.world = world
        self.labels = labels
        self._loads_inside = loads_inside
        self.steps_per_turn = steps_per_turn
        self.control = build_control(world)
        self.variants: list[Variant] = []
        self.num_warmup = 0  # warm-up rounds
        self.order_seed: int | None = None

    @property
    def num_warm_steps(self) -> int:
        """Warm-up steps of each kind."""
        return self.num_warmup * self.steps_per_turn

    def __enter__(self) -> StepBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def add(self, variant: Variant) -> Variant:
        self.variants.append(variant)
        return variant

    def clear(self) -> None:
        for variant in self.variants:
            variant.close()
        self.variants.clear()
        gc.collect()  # wrapped modules contain reference cycles

    def run(
        self, pace: Pace, iters: int | None = None, warmup: int | None = None, report: Report | None = None, *,
        after: Callable[[int, int, int], None] | None = None, end_warmup: Callable[[], None] = lambda: None,
        is_over: Callable[[int], bool] = lambda number: False, seed: int | None = None,
    ) -> None:  # fmt: skip
        """Run all rounds. In each round, every remaining variant takes `steps_per_turn` steps of each of its kinds.

        The order changes from round to round in a balanced design, or at random with a `seed`. Callbacks:
        `after(place, num_places, round)` after each turn, `end_warmup` after the warm-ups, and `is_over(number)` after
        each later round, which may end the run.
        """

        self.order_seed = seed

        def run_round(repetition: int) -> float:
            begin_s = time.perf_counter()
            running = [variant for variant in self.variants if not variant.is_dropped]
            if self.steps_per_turn == 1:
                turns = [[(variant, kind)] for variant in running for kind in variant.kinds]
            else:  # keep a variant's kinds together: switching variants is expensive
                turns = [[(v, kind) for kind in v.kinds for _ in range(self.steps_per_turn)] for v in running]
            order = order_turns(len(turns), repetition) if seed is None else draw_turns(len(turns), repetition, seed)
            for place, index in enumerate(order):
                for variant, kind in turns[index]:
                    self._take(variant, kind)
                if after is not None:
                    after(place, len(turns), repetition)
            return time.perf_counter() - begin_s

        def note_warmup(number: int) -> None:
            self.num_warmup = number
            end_warmup()

        run_rounds(run_round, self.control, pace, iters, warmup, report, note_warmup, is_over)

    def _take(self, variant: Variant, kind: str) -> None:
        """Time one step, after a barrier; ranks without a replica only join the barrier."""
        timed = variant.timed if kind == "timed" else None
        replica = timed.replica if timed is not None else variant.replica
        if replica is None:
            dist.barrier(group=self.control)
            return
        with contextlib.ExitStack() as hooks:
            replica.activate()
            given = None if self._loads_inside else replica.load()
            phases = None if variant.probe is None else variant.probe.begin(kind, hooks)
            if phases is None:
                phases = PhaseClock(replica.device) if kind in ("marked", "no_comm", "messages") else NoPhases()
            if timed is not None:
                timed.begin()
            synchronize(replica.device)
            dist.barrier(group=self.control)
            begin_s = loaded_s = time.perf_counter()
            if self._loads_inside:
                given = replica.load()
                loaded_s = time.perf_counter()
            no_sync = getattr(replica.model, "no_sync", contextlib.nullcontext)
            with no_sync() if kind == "no_comm" else contextlib.nullcontext():
                replica.run(given, phases)
            times = phases.end()
            synchronize(replica.device)
            end_s = time.perf_counter()
            parts_s = times.read()
            if variant.probe is not None:
                variant.probe.end(kind, times)
        if kind in ("plain", "marked", "no_comm", "profiled"):
            variant.note(kind, end_s - begin_s)
        if kind == variant.kinds[0]:
            variant.starts_s.append(begin_s)
            variant.bucket_bytes = read_buckets(replica.model)  # read now: a shared module may be unwrapped later
        if kind == "marked":
            parts_s["data_wait"] = loaded_s - begin_s + parts_s.get("data_wait", 0.0)
            for name in PHASES:
                variant.note(name, parts_s.get(name, 0.0))
        elif kind == "no_comm":
            variant.note("no_comm_backward", parts_s.get("backward", 0.0))
        elif timed is not None and (found := timed.read()) is not None:
            variant.note("busy", found[0])
            variant.sent.append(found[1])

    def build_record(self, variant: Variant, **more: Any) -> StepRecord:
        """Build a variant's record, identical on every rank. Collective: call on every rank."""
        labels = self.labels | variant.labels | more
        warm = self.num_warm_steps
        mine = None
        if variant.replica is not None:
            device, buckets = variant.replica.device.type, variant.bucket_bytes
            mine = variant.times, variant.starts_s, variant.sent, device, buckets
        everyone = [one for one in self.world.share(mine) if one is not None]
        times, starts, sent, (device, *_), (buckets, *_) = zip(*everyone, strict=True)
        found: dict[str, Samples | None] = {}
        for name in ("plain", *EXTRA_SAMPLES):
            by_rank = [one.get(name, []) for one in times]
            has_starts = name == variant.kinds[0] and self.world.shares_clock
            is_timed = all(len(row) > warm for row in by_rank)
            found[name] = build_samples(by_rank, warm, starts if has_starts else ()) if is_timed else None
        timing = found.pop("plain")
        if timing is None:
            timing = found.pop("marked")
        if not self._loads_inside and labels.get("data") != "own":
            found["data_wait"] = None
        planned = Sent(sum(size > 0 for size in buckets), sum(buckets))
        settled = [steps[warm:] for steps in sent]  # the wrapper may rebuild its buckets during warm-up
        check_sent(settled, planned, f"{labels.get('wrapper')} on {labels.get('backend')}, {len(everyone)} ranks")
        defaults: dict[str, Any] = {
            "world_size": self.world.world_size,
            "backend": self.world.backend,
            "device": device,
            "bucket_bytes": buckets,
            **planned._asdict(),
            "steps_per_turn": self.steps_per_turn,
            "order_seed": self.order_seed,
        }
        return StepRecord(**(defaults | found | labels | {"timing": timing}))


def draw_turns(count: int, repetition: int, seed: int) -> list[int]:
    """Draw a random order for this round, the same on all ranks.

    A disturbance of any length is then equally likely to hit either of two variants.
    """
    return random.Random(f"{seed} {repetition}").sample(range(count), count)


def order_turns(count: int, repetition: int) -> list[int]:
    """Order the turns of one round. Over many rounds, each turn follows every other turn equally often.

    The order is a Williams design: 0, 1, n-1, 2, n-2, ... shifted by the repetition, and reversed in every second
    cycle, which also balances odd numbers. Relabeling turns at random after each such block prevents periodic
    disturbances from favoring any turn. The first block keeps its labels: a probe may need an earlier probe's results.
    """
    zigzag = [(k + 1) // 2 if k % 2 else (count - k // 2) % count for k in range(count)]
    order = [(place + repetition) % count for place in zigzag]
    block = repetition // (2 * count)
    drawn = random.Random(block).sample(range(count), count) if block else range(count)  # the same on all ranks
    return [drawn[place] for place in (order[::-1] if (repetition // count) % 2 else order)]
