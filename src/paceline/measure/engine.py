"""The engine that times anything ranks do together, top to bottom: groups, cells, turns, the timed call, the check.

What is called and what its data must be comes from the benchmark that uses it; settings are checked in `settings`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.rounds import Pace, run_rounds
from paceline.measure.settings import GroupSettings, Progress
from paceline.records import Record, Samples
from paceline.runtime.worker import post
from paceline.runtime.world import World, check_backend, init
from paceline.transport import why_not
from paceline.units import format_bytes

__all__ = [
    "Allocator",
    "Contestant",
    "Group",
    "Measured",
    "Timing",
    "choose_meeting",
    "measure_cells",
    "merge_timings",
    "run_cells",
    "synchronize",
    "time_interleaved",
]

Turn = TypeVar("Turn")
Point = TypeVar("Point")
Answer = TypeVar("Answer")

_PACE = Pace(budget_s=2.0, min_iters=5, max_iters=100, warmup=3, warmup_s=2.0)
# Idle ranks wait for a cell that they are not part of; a cell on a slow network may take long.
_PATIENCE_S = 24 * 3600.0


@dataclass(frozen=True)
class Group:
    """The first n ranks on one backend, and their control group for barriers and agreement."""

    backend: str
    device: torch.device
    world_size: int
    data: dist.ProcessGroup
    control: dist.ProcessGroup


@dataclass(frozen=True)
class Measured:
    """What a measurement returns, equal on every rank: records, and what only a rank knows of its environment."""

    records: tuple[Record, ...]
    details: dict[str, Any]


@dataclass
class Timing:
    """One rank's raw times of one cell: when each repetition began (this host's clock) and how long it took."""

    starts_s: list[float]
    seconds: list[float]
    num_warmup: int
    num_wrong: int = 0
    num_checked: int = 0


@dataclass(frozen=True)
class Contestant:
    """One of the things that are timed in turns: made ready, called (this alone is timed), checked."""

    device: torch.device
    prepare: Callable[[int], None]
    call: Callable[[], Any]
    count_wrong: Callable[[int], int]
    num_elements: int


def measure_cells(
    settings: GroupSettings,
    points: Sequence[int],
    list_turns: Callable[[Sequence[Group]], Sequence[Turn]],
    build_contestant: Callable[[Turn, int, int, Allocator], Contestant],
    build_record: Callable[..., Record],
) -> Measured:
    """Time and check every cell: each number of ranks x each point (a size in bytes), all that take turns in turns.

    `list_turns(groups)` says who takes turns, given one group per backend; `build_contestant(turn, rank, point,
    allocate)` makes what is timed; `build_record(turn, point, timing=, num_wrong=, num_checked=)` makes the record.
    Worlds smaller than the launched one are its first n ranks, and the others wait. Collective: every rank of the
    launched world must call this.
    """

    def measure(groups: Sequence[Group], rank: int, point: int, tell: Callable[[float], None] | None) -> list[Timing]:
        allocate = Allocator()  # one per cell, so that the memory of the last cell is free again
        contestants = [build_contestant(turn, rank, point, allocate) for turn in list_turns(groups)]
        return time_interleaved(contestants, groups[0].control, settings.iters, settings.warmup, tell)

    def build_records(groups: Sequence[Group], point: int, timings: list[list[Timing]], clock: bool) -> list[Record]:
        return [
            build_record(
                turn,
                point,
                timing=merge_timings([timing[place] for timing in timings], clock),
                num_wrong=sum(timing[place].num_wrong for timing in timings),
                num_checked=sum(timing[place].num_checked for timing in timings),
            )
            for place, turn in enumerate(list_turns(groups))
        ]

    return run_cells(settings, points, format_bytes, measure, build_records)


def run_cells(
    settings: GroupSettings,
    points: Sequence[Point],
    name_point: Callable[[Point], str],
    measure: Callable[[Sequence[Group], int, Point, Callable[[float], None] | None], Answer],
    build_records: Callable[[Sequence[Group], Point, list[Answer], bool], Sequence[Record]],
) -> Measured:
    """Open the world, measure every cell (each number of ranks x each point) and post its records.

    `measure(groups, rank, point, tell)` runs on the ranks of the cell, with one group per backend;
    `build_records(groups, point, answers, shares_clock)` makes records of what they returned, on every rank.
    Collective: every rank of the launched world must call this.
    """
    cells = [(n, point) for n in settings.ranks for point in points]
    records: list[Record] = []
    with _open_world(settings) as world:
        groups = _build_groups(settings, world)
        for index, (n, point) in enumerate(cells):

            def tell(share: float, index: int = index, n: int = n, point: Point = point) -> None:
                post(Progress(index + share, len(cells), f"{n} rank{'s' if n > 1 else ''}, {name_point(point)}"))

            if world.rank == 0:
                tell(0.0)
            mine = None
            if world.rank < n:
                mine = measure(groups[n], world.rank, point, tell if world.rank == 0 else None)
            # Also what the ranks outside the cell wait for.
            answers = [answer for answer in world.share(mine) if answer is not None]
            new = tuple(build_records(groups[n], point, answers, world.shares_clock))
            records += new
            if world.rank == 0:
                post(Progress(index + 1, len(cells), "done", new))
        return Measured(tuple(records), _describe_rank(world))


class Allocator:
    """Vectors by name and device, made once and shared by the contestants that take turns on them."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[str, torch.device], torch.Tensor] = {}

    def __call__(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if (name, device) not in self._vectors:
            need = elements * dtype.itemsize
            if device.type == "cuda" and need > (free := torch.cuda.mem_get_info(device)[0]):
                raise ConfigError(f"{format_bytes(need)} do not fit the {format_bytes(free)} free on {device}")
            # Zeroed, not empty: touching fresh pages must not be part of the first repetition.
            self._vectors[name, device] = torch.zeros(elements, dtype=dtype, device=device)
        return self._vectors[name, device]


def time_interleaved(
    contestants: list[Contestant],
    control: dist.ProcessGroup,
    iters: int | None,
    warmup: int | None,
    tell: Callable[[float], None] | None = None,
) -> list[Timing]:
    """Time the contestants in turns: A B A B ... Collective: every rank of `control` must call this.

    Each repetition: make the data, synchronise the device, meet at a barrier, read the clock, call, synchronise,
    read the clock, check the data. Nothing but the call is between the two readings.
    """
    timings = [Timing([], [], 0) for _ in contestants]

    def run_once(repetition: int) -> float:
        slowest_s = 0.0
        for contestant, timing in zip(contestants, timings, strict=True):
            contestant.prepare(repetition)
            synchronize(contestant.device)
            dist.barrier(group=control)
            start_s = time.perf_counter()
            contestant.call()
            synchronize(contestant.device)
            timing.starts_s.append(start_s)
            timing.seconds.append(time.perf_counter() - start_s)
            timing.num_wrong += contestant.count_wrong(repetition)
            timing.num_checked += contestant.num_elements
            slowest_s = max(slowest_s, timing.seconds[-1])
        return slowest_s

    def end_warmup(num_warmup: int) -> None:
        for timing in timings:
            timing.num_warmup = num_warmup

    run_rounds(run_once, control, _PACE, iters, warmup, tell, end_warmup)
    return timings


def merge_timings(timings: list[Timing], shares_clock: bool) -> Samples:
    """The ranks' timings as one set of samples, repetition by repetition."""
    warm = timings[0].num_warmup
    rows = list(zip(*(timing.seconds for timing in timings), strict=True))
    starts = list(zip(*(timing.starts_s for timing in timings), strict=True))
    arrivals = tuple(tuple(start - min(row) for start in row) for row in starts[warm:]) if shares_clock else ()
    return Samples(seconds=tuple(rows[warm:]), warmup_seconds=tuple(rows[:warm]), arrivals_s=arrivals)


def _open_world(settings: GroupSettings) -> World:
    """A world whose own group is gloo, for control; the measured groups are made inside it.

    One thread per rank unless asked otherwise: with more, filling and checking the data wakes OpenMP's threads, which
    then spin on the cores that the timed call needs (`engine_against_loop.py --threads 8` shows it).
    """
    device = "cuda" if any(settings.device_of(backend) == "cuda" for backend in settings.backends) else "cpu"
    return init("gloo", device, threads=settings.threads, timeout_s=_PATIENCE_S, announce=None)


def choose_meeting(world: World) -> str:
    """The backend of the barriers before timed calls: ranks leave one in shared memory within microseconds of each
    other, and one of gloo's far apart."""
    return "shm" if world.shares_clock and not why_not() else "gloo"


def _build_groups(settings: GroupSettings, world: World) -> dict[int, list[Group]]:
    """For each number of ranks, one group per backend. Collective: every rank must call this, in or out of a group."""
    groups: dict[int, list[Group]] = {}
    for n in settings.ranks:
        if n > world.world_size:
            raise ConfigError(f"{n} ranks asked of a world of {world.world_size}")
        members = list(range(n))
        control = dist.new_group(members, backend=choose_meeting(world), timeout=timedelta(seconds=_PATIENCE_S))
        groups[n] = []
        for backend in settings.backends:
            kind = settings.device_of(backend)
            check_backend(backend, kind, min(n, world.local_world_size))
            data = dist.new_group(members, backend=backend)
            device = world.device if kind == "cuda" else torch.device("cpu")
            groups[n].append(Group(backend, device, n, data, control))
    return groups


def _describe_rank(world: World) -> dict[str, Any]:
    """What only a rank knows of the environment: threads, launcher, GPUs, NCCL."""
    details: dict[str, Any] = {
        "launcher": world.launcher,
        "threads_per_rank": world.threads,
        "hosts": len(set(world.hosts)),
        "world_size": world.world_size,
    }
    if world.device.type == "cuda":
        details["gpu"] = torch.cuda.get_device_name(world.device)
        details["cuda"] = torch.version.cuda
        if dist.is_nccl_available():
            details["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return details


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
