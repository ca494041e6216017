"""Steps of a job on one rank and on many, in every wrapper, all in turns: the cells of a scaling study.

What follows from the times (efficiency, speed-up) is in `records.steps`; which cells there are in `scale_settings`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.measure.busy import AskedSteps, agree_on_sent
from paceline.measure.collectives import measure_collectives
from paceline.measure.engine import Pace, build_samples, choose_control_backend, run_rounds, synchronize
from paceline.measure.replicas import read_buckets
from paceline.measure.scale_settings import Cell, Contestant, ScaleSettings
from paceline.measure.settings import CollectiveSettings
from paceline.measure.training_traces import measure_job_layers
from paceline.measure.tune_steps import Candidate, wrap
from paceline.measure.wrappers import order_turns
from paceline.parallel import DataParallel
from paceline.parallel.channel import Sent
from paceline.parallel.ddp import only_computing
from paceline.records import Record, Samples, StepRecord
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, check_backend
from paceline.training.build import Job, build_job, build_learner, open_world
from paceline.training.loader import Window, load_windows
from paceline.training.settings import TrainSettings
from paceline.training.step import Learner, NoPhases, take_step
from paceline.workloads.data.sharding import EpochOrder

__all__ = ["measure_allreduce", "measure_layers_alone", "measure_scaling"]

_LAYER_ITERS = 12
_PACE = Pace(budget_s=20.0, min_iters=10, max_iters=60, warmup=3)
# Learning nothing: replicas whose gradients are not averaged in every step must not drift apart.
_RATE = 0.0
# Ranks that are not part of a turn wait for the others' steps.
_PATIENCE = timedelta(hours=24)


def measure_allreduce(settings: CollectiveSettings) -> list[Record]:
    """The all-reduces alone. Collective: every rank of the launched world must call this."""
    return list(measure_collectives(settings).records)


def measure_layers_alone(settings: TrainSettings) -> list[Record]:
    """The layers of the job on one rank."""
    return [measure_job_layers(settings, _LAYER_ITERS, 2)]


def measure_scaling(settings: ScaleSettings, cell: Cell) -> list[Record]:
    """All of one cell, in turns. Collective: every rank of the launched world must call this."""
    with open_world(dataclasses.replace(settings.job, backend="gloo")) as world:
        bench = _Bench(settings, cell, world)
        try:
            num_warmup = bench.run()
            return [record for turn in bench.turns if (record := bench.build_record(turn, num_warmup)) is not None]
        finally:
            bench.close()


@dataclass
class _Turn:
    """A wrapper on the first `world_size` ranks; `asked` and `learner` are None on a rank outside."""

    contestant: Contestant
    world_size: int
    learner: Learner | None = None
    asked: AskedSteps | None = None
    windows: Generator[Window, None, None] | None = None
    plain_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("plain",) if self.contestant.wrapper in ("none", "dp") else ("plain", "silent", "asked")


class _Bench:
    """Replicas of one job on one number of ranks and another, on this rank."""

    def __init__(self, settings: ScaleSettings, cell: Cell, world: World) -> None:
        if max(settings.ranks) > world.world_size:
            raise ConfigError(f"{max(settings.ranks)} ranks asked of a world of {world.world_size}")
        self._settings, self._cell, self._world = settings, cell, world
        alone = dataclasses.replace(
            settings.job,
            ranks=1,
            wrapper="none",
            batch_size=cell.batch_size(1, settings.job.accumulate or 1),
            global_batch_size=None,
        )
        self._job: Job = build_job(alone, world)
        largest = cell.count_samples(self._job.batches.accumulate) * (max(settings.ranks) if cell.mode == "weak" else 1)
        if len(self._job.train) < largest:
            raise ConfigError(
                f"{self._job.train.describe()}: less than one global batch of {largest}; use fewer ranks, a smaller "
                "batch, or more --samples"
            )
        self._meeting = dist.new_group(backend=choose_control_backend(world), timeout=_PATIENCE)
        self.turns = [self._add(Contestant("none", ""), 1, None)]
        for world_size in (n for n in settings.ranks if n > 1):
            groups: dict[str, dist.ProcessGroup] = {}
            for backend in settings.backends:
                check_backend(backend, world.device.type, min(world_size, world.local_world_size))
                groups[backend] = dist.new_group(list(range(world_size)), backend=backend, timeout=_PATIENCE)
            for contestant in settings.contestants:
                self.turns.append(self._add(contestant, world_size, groups.get(contestant.backend)))

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _add(self, contestant: Contestant, world_size: int, group: dist.ProcessGroup | None) -> _Turn:
        turn = _Turn(contestant, world_size)
        is_one_process = contestant.wrapper in ("none", "dp")
        if self._world.rank >= (1 if is_one_process else world_size):
            return turn

        def build() -> Learner:
            learner = build_learner(self._job.settings, self._world, self._job.train, like=self._job.learner.module)
            if contestant.wrapper == "dp":
                model: nn.Module = nn.DataParallel(learner.module, device_ids=list(range(world_size)))
            elif is_one_process:
                model = learner.module
            else:
                with only_computing(world_size):
                    model = wrap(learner.module, contestant.wrapper, Candidate(""), group)
            model.train()
            # The loss is divided by the samples of all ranks, and the wrapper averages: see `take_step`.
            return dataclasses.replace(learner, model=model, world_size=1 if is_one_process else world_size)

        turn.learner = build()
        turn.asked = AskedSteps(turn.learner, build, group) if "asked" in turn.kinds else None
        turn.windows = self._cycle(world_size, is_one_process)
        return turn

    def _cycle(self, world_size: int, is_one_process: bool) -> Generator[Window, None, None]:
        """Whole global batches of this number of ranks, epoch after epoch; this rank's share of each."""
        job, accumulate = self._job, self._job.batches.accumulate
        batch_size, epoch = self._cell.batch_size(world_size, accumulate), 0
        rank, shares = (0, 1) if is_one_process else (self._world.rank, world_size)
        micro = batch_size * (world_size if is_one_process else 1)
        while True:
            size = world_size * batch_size * accumulate
            order = EpochOrder(len(job.train), size, job.settings.seed, epoch, "drop")
            yield from load_windows(job.train, order, 0, rank, shares, micro, self._world.device)
            epoch += 1

    def close(self) -> None:
        for turn in self.turns:
            if turn.asked is not None:
                turn.asked.close()
            if turn.windows is not None:
                turn.windows.close()
            if turn.learner is not None and isinstance(turn.learner.model, DataParallel):
                turn.learner.model.stop()
        self.turns.clear()
        gc.collect()  # a wrapped module is full of cycles

    # -- steps --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """All rounds; returns how many were warm-ups."""
        steps = [(turn, kind) for turn in self.turns for kind in turn.kinds]
        num_warmup = [0]

        def end_warmup(number: int) -> None:
            num_warmup[0] = number

        def run_round(repetition: int) -> float:
            begin_s = time.perf_counter()
            for index in order_turns(len(steps), repetition):
                self._take(*steps[index])
            return time.perf_counter() - begin_s

        run_rounds(run_round, self._meeting, _PACE, self._settings.iters, None, self._build_tell(), end_warmup)
        return num_warmup[0]

    def _build_tell(self) -> Callable[[float], None] | None:
        if self._world.rank:
            return None
        return lambda share: post(Progress(share, 1, self._cell.name))

    def _take(self, turn: _Turn, kind: str) -> None:
        """One step, begun by its ranks together; the others wait at the next one."""
        device = self._world.device
        learner = turn.learner
        window = None if turn.windows is None else next(turn.windows)
        synchronize(device)
        dist.barrier(group=self._meeting)
        if learner is None or window is None:
            return
        if kind == "asked":
            assert turn.asked is not None
            turn.asked.begin()
            learner = turn.asked.learner
        quiet = learner.no_sync() if kind == "silent" else contextlib.nullcontext()
        num_targets = window.num_samples * learner.form.targets_per_sample
        begin_s = time.perf_counter()
        with quiet:
            take_step(learner, window.batches, num_targets, _RATE, NoPhases())
        synchronize(device)
        seconds = time.perf_counter() - begin_s
        if kind == "plain":
            turn.plain_s.append(seconds)
        elif kind == "silent":
            turn.silent_s.append(seconds)
        elif turn.asked is not None:
            busy_s, sent = turn.asked.take_busy_s(), turn.asked.count_sent()
            if busy_s is not None and sent is not None:
                turn.busy_s.append(busy_s)
                turn.sent.append(sent)

    # -- records ------------------------------------------------------------------------------------------------------

    def build_record(self, turn: _Turn, num_warmup: int) -> StepRecord | None:
        """Collective: every rank must call this, and every rank gets the record."""
        mine = None if turn.learner is None else (turn.plain_s, turn.silent_s, turn.busy_s)
        told: list[tuple[list[float], ...] | None] = self._world.share(mine)
        parts = [of_rank for of_rank in told if of_rank is not None]
        plain, silent, busy = ([part[number] for part in parts] for number in range(3))
        buckets = self._world.share(() if turn.learner is None else read_buckets(turn.learner.model))[0]
        counted: list[list[Sent] | None] = self._world.share(None if turn.learner is None else turn.sent[num_warmup:])
        sent = agree_on_sent(
            # In a warm-up a wrapper may still have other buckets.
            [of_rank for of_rank in counted if of_rank is not None],
            Sent(sum(size > 0 for size in buckets), sum(buckets)),
            f"{turn.contestant.wrapper} on {turn.contestant.backend}, {turn.world_size} ranks",
        )
        job = self._job

        def samples(by_rank: list[list[float]]) -> Samples | None:
            return build_samples(by_rank, num_warmup) if all(len(row) > num_warmup for row in by_rank) else None

        timing = samples(plain)
        assert timing is not None
        return StepRecord(
            mode=self._cell.mode,
            cell_size=self._cell.count_samples(job.batches.accumulate),
            model=job.settings.model,
            data=job.train.name,
            wrapper=turn.contestant.wrapper,
            backend=turn.contestant.backend,
            device=self._world.device.type,
            world_size=turn.world_size,
            threads=torch.get_num_threads(),
            precision=job.settings.precision,
            batch_size=self._cell.batch_size(turn.world_size, job.batches.accumulate),
            accumulate=job.batches.accumulate,
            num_bytes=sent.num_bytes,
            num_messages=sent.num_messages,
            bucket_bytes=tuple(buckets),
            timing=timing,
            no_comm=samples(silent),
            busy=samples(busy),
        )
