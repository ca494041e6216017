"""The engine on real ranks: every collective is timed and checked, wrong data is counted, and times are plausible."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline import ConfigError
from paceline.measure.bench_settings import ChunkSettings, CollectiveSettings, Measured
from paceline.measure.collectives import measure_chunks, measure_collectives
from paceline.records import CollectiveRecord, MemoryRecord, Samples
from paceline.units import MIB

KIB = 2**10
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "engine_against_loop.py"


def settings(**options) -> CollectiveSettings:
    made = CollectiveSettings(**{"sizes": (4 * KIB,), "iters": 3, "warmup": 1} | options)
    made.check()
    return made


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
def test_every_collective_passes_its_own_check(on_ranks, collective, dtype):
    wanted = settings(collective=collective, dtype=dtype, ranks=(2, 3), sizes=(1008, MIB + 336))
    answers = on_ranks(3, measure_collectives, wanted)
    assert answers[0].records == answers[1].records == answers[2].records
    assert [(r.world_size, r.num_wrong) for r in answers[0].records] == [(2, 0), (2, 0), (3, 0), (3, 0)]
    for record in answers[0].records:
        share = 1 / record.world_size if collective == "reduce_scatter" else 1
        repetitions = 4  # three and a warm-up
        assert record.num_checked == record.num_elements * share * record.world_size * repetitions


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_every_reduction_is_checked_against_its_own_answer(on_ranks, op, dtype):
    assert on_ranks(3, measure_collectives, settings(op=op, dtype=dtype, ranks=(3,)))[0].records[0].num_wrong == 0


BOTH = {"backends": ("gloo", "paceline"), "memories": ("ordinary", "shared"), "limit": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_both_kinds_of_memory_and_the_limit_are_interleaved_in_one_cell(on_ranks, dtype):
    wanted = settings(**BOTH, dtype=dtype, ranks=(2, 3), sizes=(4 * KIB, MIB + 24))
    answers = on_ranks(3, measure_collectives, wanted)
    assert answers[0].records == answers[1].records == answers[2].records
    received = [
        (r.world_size, r.num_bytes, r.operation if isinstance(r, MemoryRecord) else (r.backend, r.memory))
        for r in answers[0].records
    ]
    turns = [("gloo", "ordinary"), ("shm", "ordinary"), ("shm", "shared"), "add", "copy"]
    assert received == [(n, size, turn) for n in (2, 3) for size in (4 * KIB, MIB + 24) for turn in turns]
    for record in answers[0].records:
        assert isinstance(record, CollectiveRecord | MemoryRecord) and isinstance(record.timing, Samples)
        elements = record.num_bytes // wanted.item_bytes
        assert (record.num_wrong, record.num_checked) == (0, elements * record.world_size * 4)
        assert (record.timing.count, record.timing.num_ranks) == (3, record.world_size)


def watch_vectors(wanted: CollectiveSettings) -> list[bool]:
    """For each all-reduce on shm, in order: whether its vector was allocated by the group."""
    from paceline.transport.group import PacelineGroup

    places: list[tuple[int, int]] = []
    seen: list[bool] = []
    allocate, reduce = PacelineGroup.allocate, dist.all_reduce

    def remember(self: PacelineGroup, num_bytes: int) -> torch.Tensor:
        given = allocate(self, num_bytes)
        places.append((given.data_ptr(), given.data_ptr() + num_bytes))
        return given

    def look(tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        # a single element is used by ranks to agree on a time
        if isinstance(group, PacelineGroup) and tensor.numel() > 1:
            seen.append(any(begin <= tensor.data_ptr() < end for begin, end in places))
        return reduce(tensor, op, group, async_op)

    PacelineGroup.allocate, dist.all_reduce = remember, look
    try:
        measure_collectives(wanted)
    finally:
        PacelineGroup.allocate, dist.all_reduce = allocate, reduce
    return seen


def test_only_shared_memory_belongs_to_the_group(on_ranks):
    wanted = settings(**BOTH, ranks=(2,), iters=2, warmup=1)
    assert on_ranks(2, watch_vectors, wanted) == [[False, True] * 3] * 2


def skip_an_element(wanted: CollectiveSettings, how: str) -> Measured:
    """On rank 1, skip the last element of every add, or of every copy."""
    from paceline.measure.collectives import MemoryAdd, MemoryCopy

    kind = MemoryAdd if how == "add" else MemoryCopy
    real = kind.call

    def call(self: MemoryAdd) -> None:
        part = slice(0, self.num_elements - (self.rank == 1))
        self.vector[part].add_(1) if how == "add" else self.target[part].copy_(self.vector[part])

    kind.call = call
    try:
        return measure_collectives(wanted)
    finally:
        kind.call = real


@pytest.mark.parametrize(("how", "wrong"), [("add", [0, 4, 0]), ("copy", [0, 0, 4])])
def test_an_incomplete_pass_does_not_count_as_a_bound(on_ranks, how, wrong):
    records = on_ranks(2, skip_an_element, settings(limit=True), how)[0].records
    assert [record.num_wrong for record in records] == wrong  # one element, four repetitions


def test_samples_hold_all_repetitions_of_all_ranks_and_warm_ups_separately(on_ranks):
    record = on_ranks(3, measure_collectives, settings(ranks=(2,), iters=4, warmup=2))[0].records[0]
    assert isinstance(record.timing, Samples)
    assert [len(row) for row in record.timing.seconds] == [2] * 4
    assert [len(row) for row in record.timing.warmup_seconds] == [2] * 2
    assert all(min(row) == 0 for row in record.timing.arrivals_s) and len(record.timing.arrivals_s) == 4
    assert all(value > 0 for row in record.timing.seconds for value in row)


def test_by_default_small_messages_get_many_repetitions(on_ranks):
    record = on_ranks(2, measure_collectives, settings(iters=None, warmup=None))[0].records[0]
    assert isinstance(record.timing, Samples)
    assert 5 <= record.timing.count <= 100 and 1 <= len(record.timing.warmup_seconds) <= 3


def corrupt_one_rank(wanted: CollectiveSettings, how: str) -> Measured:
    """Corrupt the all-reduce of rank 1 in this way, without telling the engine."""
    real = dist.all_reduce

    def damaged(tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.numel() > 100 and dist.get_rank() == 1:  # a single element is used by ranks to agree on a time
            match how:
                case "one element":
                    work = real(tensor, op, group, async_op)
                    tensor[17] += 1
                    return work
                case "one rank missing":
                    tensor.zero_()
                case "not reduced":
                    mine = tensor.clone()
                    work = real(tensor, op, group, async_op)
                    tensor.copy_(mine)
                    return work
                case "shifted":
                    work = real(tensor, op, group, async_op)
                    tensor.copy_(tensor.roll(1))
                    return work
        return real(tensor, op, group, async_op)

    dist.all_reduce = damaged
    try:
        return measure_collectives(wanted)
    finally:
        dist.all_reduce = real


@pytest.mark.parametrize(
    ("how", "least", "most"),
    [("one element", 4, 4), ("one rank missing", 4000, 8192), ("not reduced", 2000, 4096), ("shifted", 2000, 4096)],
)
def test_wrong_data_is_counted(on_ranks, how, least, most):
    # 1024 elements, 4 repetitions, 2 ranks: 8192 elements in all.
    record = on_ranks(2, corrupt_one_rank, settings(), how)[0].records[0]
    assert record.num_checked == 8192
    assert least <= record.num_wrong <= most


def test_chunks_cover_the_total_and_are_checked(on_ranks):
    wanted = ChunkSettings(total_bytes=100_000, chunks=(400, 30_000, 100_000), ranks=(2,), iters=2, warmup=1)
    wanted.check()
    records = on_ranks(2, measure_chunks, wanted)[0].records
    assert [r.num_messages for r in records] == [250, 4, 1]
    assert [(r.num_wrong, r.num_checked) for r in records] == [(0, 25_000 * 2 * 3)] * 3


def corrupt_chunks(wanted: ChunkSettings) -> Measured:
    real = dist.all_reduce

    def skip_short_tail(tensor: torch.Tensor, *args, **kwargs):
        return real(torch.empty_like(tensor) if tensor.numel() == 2500 else tensor, *args, **kwargs)

    dist.all_reduce = skip_short_tail
    try:
        return measure_chunks(wanted)
    finally:
        dist.all_reduce = real


def test_a_chunk_that_was_not_reduced_is_counted(on_ranks):
    wanted = ChunkSettings(total_bytes=100_000, chunks=(30_000,), ranks=(2,), iters=1, warmup=0)
    assert on_ranks(2, corrupt_chunks, wanted)[0].records[0].num_wrong > 1000


def test_too_many_ranks_are_an_error_on_all_ranks(on_ranks):
    with pytest.raises(ConfigError) as caught:
        on_ranks(2, measure_collectives, dataclasses.replace(settings(), ranks=(4,)))
    assert caught.value.code == "world-size"


def test_the_engine_agrees_with_a_hand_written_loop(warm_pool):
    # Interleaved, and with a wide margin; `make bench` prints the exact ratio.
    rows = warm_pool.run(_compare, ((4 * MIB,), 5, 10), num_ranks=2, timeout_s=90)[0]
    assert 0.3 < rows[0]["ratio"] < 3.0, rows


def _compare(sizes: tuple[int, ...], rounds: int, iters: int) -> list[dict]:
    return runpy.run_path(str(BENCHMARK))["compare"](sizes, rounds, iters)
