"""A measurement, top to bottom: groups, cells, rounds, repetitions, the timed call, the check, the samples.

The engine times any multi-rank operation; `collectives` and `wrappers` define the operations.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.bench_settings import GroupSettings, Measured
from paceline.records import Record, Samples
from paceline.records.store import pause_collection
from paceline.runtime.ranks.session import Progress
from paceline.runtime.ranks.worker import post
from paceline.runtime.ranks.world import World, check_backend, init
from paceline.transport import why_not
from paceline.units import format_bytes, format_number_of

Point = TypeVar("Point")
Report = Callable[[float], None]
Allocator = Callable[[str, int, torch.dtype, torch.device], torch.Tensor]

# Timeout for ranks outside a cell: other ranks may measure it for a long time on a slow network.
PATIENCE = timedelta(hours=24)
_REPORT_S = 0.2


@dataclass(frozen=True)
class Pace:
    """Default pace: repetitions fill `budget_s` after `warmup` warm-ups, or after `warmup_s` seconds of warm-ups."""

    budget_s: float
    min_iters: int
    max_iters: int
    warmup: int
    warmup_s: float = math.inf


_PACE = Pace(budget_s=GroupSettings.cell_s, min_iters=5, max_iters=100, warmup=3, warmup_s=2.0)


@dataclass(frozen=True)
class Group:
    """The first n ranks on one backend, with a control group for barriers and agreement."""

    backend: str
    device: torch.device
    world_size: int
    data: dist.ProcessGroup
    control: dist.ProcessGroup


@dataclass
class Timing:
    """One rank's raw times for one cell: start (this host's clock) and duration of each repetition."""

    starts_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_warmup: int = 0
    num_wrong: int = 0
    num_checked: int = 0


class Timed:
    """An operation to time. The engine prepares, calls and checks it; only the call is timed.

    Every repetition checks `num_elements`. `record(timing=, num_wrong=, num_checked=)` builds the record; it is sent to
    other ranks, so it must be picklable (a `functools.partial` of a record class).
    """

    device: torch.device
    num_elements: int = 0
    record: Callable[..., Record]
    timing: Timing

    def prepare(self, repetition: int) -> None:
        """Write fresh data, different for every repetition."""
        raise NotImplementedError

    def call(self) -> Any:
        raise NotImplementedError

    def check(self, repetition: int) -> int:
        """The number of wrong elements on this rank."""
        return 0


def measure_cells(
    settings: GroupSettings, sizes: Sequence[int], build: Callable[[Sequence[Group], int, Allocator], list[Timed]]
) -> Measured:
    """Time and check every cell: each number of ranks x each size in bytes. Operations in a cell are interleaved.

    `build(groups, size, allocate)` builds the operations of a cell, given one group per backend.
    Collective: call on every rank of the launched world.
    """

    def measure(world: World, groups: Sequence[Group], size: int, report: Report) -> list[Record]:
        mine = None
        if world.rank < groups[0].world_size:
            # Interleaved operations share vectors. A new cache for each cell frees the memory of the previous one.
            timed = build(groups, size, functools.cache(allocate))
            time_interleaved(timed, groups[0].control, settings.iters, settings.warmup, report)
            mine = [(item.record, item.timing) for item in timed]
        # Ranks outside the cell wait here for the others.
        answers = [answer for answer in world.share(mine) if answer is not None]
        records = []
        for by_rank in zip(*answers, strict=True):
            build_record = by_rank[0][0]
            timings = [timing for _, timing in by_rank]
            starts = [timing.starts_s for timing in timings] if world.shares_clock else ()
            samples = build_samples([timing.seconds for timing in timings], timings[0].num_warmup, starts)
            wrong, checked = (sum(getattr(t, name) for t in timings) for name in ("num_wrong", "num_checked"))
            records.append(build_record(timing=samples, num_wrong=wrong, num_checked=checked))
        return records

    return run_cells(settings, sizes, format_bytes, measure)


def run_cells(
    settings: GroupSettings, points: Sequence[Point], name_point: Callable[[Point], str],
    measure: Callable[[World, Sequence[Group], Point, Report], Sequence[Record]],
) -> Measured:  # fmt: skip
    """Open the world, measure every cell (each number of ranks x each point) and post its records.

    `measure(world, groups, point, report)` gets one group per backend and returns the records. It runs on every rank of
    the world: the first n ranks measure a cell of n ranks while the others wait. Collective: call on every rank of the
    launched world.
    """
    cells = [(n, point) for n in settings.ranks for point in points]
    records: list[Record] = []
    on_gpu = any(settings.device_of(backend) == "cuda" for backend in settings.backends)
    # One thread per rank by default: with more, filling and checking the data wakes OpenMP threads, which then spin on
    # the cores that the timed call needs (`engine_against_loop.py --threads 8` shows it).
    # The world's default group is gloo, for control; the measured groups are created inside it.
    device = "cuda" if on_gpu else "cpu"
    with init("gloo", device, threads=settings.threads, timeout_s=PATIENCE.total_seconds(), announce=None) as world:
        groups = _build_groups(settings, world)
        for index, (n, point) in enumerate(cells):
            label = f"{format_number_of(n, 'rank')}, {name_point(point)}"
            new = measure(world, groups[n], point, follow(world, label, index, len(cells)))
            if world.rank == 0:
                post(Progress(index + 1, len(cells), label, tuple(new)))
            records += new
        return Measured(tuple(records), _describe_rank(world))


def follow(world: World, label: str, number: int = 0, total: int = 1) -> Report:
    """Return a function that posts the progress of part `number` of `total`, on rank 0 and at a limited rate."""
    posted_s = -math.inf

    def report(share: float) -> None:
        nonlocal posted_s
        if world.rank == 0 and time.perf_counter() - posted_s > _REPORT_S:
            posted_s = time.perf_counter()
            post(Progress(number + share, total, label))

    report(0.0)
    return report


def build_control(world: World, members: list[int] | None = None) -> dist.ProcessGroup:
    """Build a group for barriers before timed calls. Ranks leave a shared-memory barrier within microseconds of each
    other, unlike a gloo barrier."""
    backend = "shm" if world.shares_clock and not why_not() else "gloo"
    group: dist.ProcessGroup = dist.new_group(members, backend=backend, timeout=PATIENCE)
    return group


def _build_groups(settings: GroupSettings, world: World) -> dict[int, list[Group]]:
    """For each number of ranks, build one group per backend. Collective: call on every rank, even outside a group."""
    groups: dict[int, list[Group]] = {}
    for n in settings.ranks:
        if n > world.world_size:
            raise ConfigError(f"{n} ranks requested in a world of {world.world_size}", code="world-size")
        members = list(range(n))
        control = build_control(world, members)
        groups[n] = []
        for backend in settings.backends:
            kind = settings.device_of(backend)
            check_backend(backend, kind, min(n, world.local_world_size))
            data = dist.new_group(members, backend=backend)
            device = world.device if kind == "cuda" else torch.device("cpu")
            groups[n].append(Group(backend, device, n, data, control))
    return groups


def _describe_rank(world: World) -> dict[str, Any]:
    """The environment details that only a rank can query: threads, launcher, GPUs, NCCL."""
    details: dict[str, Any] = {
        "launcher": world.launcher,
        "threads_per_rank": world.threads,
        "hosts": len(set(world.hosts)),
        "world_size": world.world_size,
    }
    if world.device.type == "cuda":
        details |= {"gpu": torch.cuda.get_device_name(world.device), "cuda": torch.version.cuda}
        if dist.is_nccl_available():
            details["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return details


def allocate(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a vector. Each cell caches the results, so its operations share vectors by name."""
    need = elements * dtype.itemsize
    if device.type == "cuda" and need > (free := torch.cuda.mem_get_info(device)[0]):
        found = f"{format_bytes(need)} does not fit in the {format_bytes(free)} free on {device}"
        raise ConfigError(f"{found}: use smaller sizes", code="memory")
    # Writing zeros avoids page faults in the first repetition.
    return torch.zeros(elements, dtype=dtype, device=device)


def time_interleaved(
    timed: Sequence[Timed], control: dist.ProcessGroup, iters: int | None, warmup: int | None,
    report: Report | None = None,
) -> None:  # fmt: skip
    """Time all operations, interleaved: A B A B ... Collective: call on every rank of `control`."""
    for item in timed:
        item.timing = Timing()

    def run_once(repetition: int) -> float:
        for item in timed:
            time_once(item, control, repetition)
        return max(item.timing.seconds[-1] for item in timed)

    def end_warmup(num_warmup: int) -> None:
        for item in timed:
            item.timing.num_warmup = num_warmup

    run_rounds(run_once, control, _PACE, iters, warmup, report, end_warmup)


def time_once(item: Timed, control: dist.ProcessGroup, repetition: int) -> None:
    """Write the data, synchronize the device, wait at a barrier, time the call up to the end of its device work, and
    check the data. Collective: call on every rank."""
    item.prepare(repetition)
    synchronize(item.device)
    dist.barrier(group=control)
    start_s = time.perf_counter()
    item.call()
    synchronize(item.device)
    item.timing.seconds.append(time.perf_counter() - start_s)
    item.timing.starts_s.append(start_s)
    item.timing.num_wrong += item.check(repetition)
    item.timing.num_checked += item.num_elements


def run_rounds(
    run_round: Callable[[int], float],
    control: dist.ProcessGroup,
    pace: Pace,
    iters: int | None = None,
    warmup: int | None = None,
    report: Report | None = None,
    end_warmup: Callable[[int], None] = lambda number: None,
    is_over: Callable[[int], bool] = lambda number: False,
) -> None:
    """Call `run_round(number)`, which returns its seconds on this rank, for every warm-up and every repetition.

    Calls `end_warmup` with the number of warm-ups and `report` with the finished fraction of repetitions. After each
    repetition, calls `is_over` with their number so far; `is_over` must return the same answer on all ranks.
    Collective: call on every rank of `control`.
    """
    with pause_collection():  # a garbage collection would add to a timed call
        warm_s: list[float] = []
        while len(warm_s) < (pace.warmup if warmup is None else warmup):
            warm_s.append(agree_on_max(run_round(len(warm_s)), control))
            if warmup is None and sum(warm_s) > pace.warmup_s:
                break
        end_warmup(len(warm_s))
        if iters is None:
            # Use the fastest warm-up: a single hiccup must not reduce the number of repetitions.
            fitting = int(pace.budget_s / min(warm_s)) if warm_s else pace.min_iters
            iters = min(pace.max_iters, max(pace.min_iters, fitting))
        for repetition in range(iters):
            run_round(len(warm_s) + repetition)
            if report is not None:
                report((repetition + 1) / iters)
            if is_over(repetition + 1):
                break


def agree_on_max(value: float, control: dist.ProcessGroup) -> float:
    """The maximum over all ranks. Collective: call on every rank of `control`."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, control)
    return float(tensor)


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_samples(
    by_rank: Sequence[Sequence[float]], num_warmup: int, starts_by_rank: Sequence[Sequence[float]] = ()
) -> Samples:
    """Build samples from each rank's times, warm-ups first. Start times on a shared clock become arrivals."""
    rows = tuple(zip(*by_rank, strict=True))
    starts = tuple(zip(*starts_by_rank, strict=True))
    arrivals = tuple(tuple(start - min(row) for start in row) for row in starts[num_warmup:])
    return Samples(rows[num_warmup:], rows[:num_warmup], arrivals)
