"""The transport under constraints: few cores, a small /dev/shm, several groups and jobs at once."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.transport import native
from tests.dist.forked_ranks import Ranks

if native.why_not():
    pytest.skip(f"NOT TESTED: {native.why_not()}", allow_module_level=True)

HERE = "tests.dist.test_transport_places:"
MIB = 2**20


def exercise(rank: int, say: Any, base: int = 0, rounds: int = 5) -> None:
    """Every collective, small and large. `base` distinguishes the values of two jobs."""
    size = dist.get_world_size()
    total = sum(base + r for r in range(size))
    say("ready")
    for step in range(rounds):
        for count in (1, 5_000, 300_000):
            mine = torch.full((count,), float(base + rank))
            works = [dist.all_reduce(mine.clone(), async_op=True) for _ in range(3)]
            whole = mine.clone()
            dist.all_reduce(whole)
            assert (whole == total).all(), (step, count, whole[0], total)
            for work in works:
                work.wait()
                assert (work.result()[0] == total).all()
            every = torch.empty(size * count)
            dist.all_gather_into_tensor(every, mine)
            assert (every.view(size, count) == torch.arange(base, base + size).unsqueeze(1)).all()
            part = torch.empty(count)
            dist.reduce_scatter_tensor(part, every * (rank + 1))
            assert (part == (base + rank) * (size * (size + 1) // 2)).all()
            dist.broadcast(mine, size - 1)
            assert (mine == base + size - 1).all()
        dist.barrier()


def on_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with Ranks(2, exercise) as ranks:
        ranks.hear_all()
        ranks.conclude()


def test_two_ranks_on_one_core(forked):
    forked(HERE + "on_one_core")


def many_on_few_cores() -> None:
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:2]))
    with Ranks(8, exercise, 0, 2) as ranks:
        ranks.hear_all()
        ranks.conclude()


@pytest.mark.slow
def test_eight_ranks_on_two_cores(forked):
    forked(HERE + "many_on_few_cores")


def two_jobs() -> None:
    with Ranks(2, exercise, 100) as one, Ranks(3, exercise, 5000) as other:
        one.hear_all()
        other.hear_all()
        one.conclude()
        other.conclude()


def test_two_jobs_at_once(forked):
    forked(HERE + "two_jobs")


def reduce_in_groups(rank: int, say: Any) -> list[str]:
    members = [[0, 1], [1, 2], [0, 1, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    failed: list[str] = []

    def use(number: int) -> None:
        group, ranks = groups[number], members[number]
        for step in range(40):
            tensor = torch.full((1 + 3001 * (step % 5),), float(10**number * (rank + 1)))
            work = dist.all_reduce(tensor, group=group, async_op=bool(step % 2))
            if work is not None:
                work.wait()
            wanted = 10**number * sum(r + 1 for r in ranks)
            if not (tensor == wanted).all():
                failed.append(f"group {ranks}, step {step}: {tensor[0]}, not {wanted}")

    threads = [threading.Thread(target=use, args=(n,)) for n, ranks in enumerate(members) if rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def overlapping_groups() -> list[list[str]]:
    with Ranks(3, reduce_in_groups) as ranks:
        return list(ranks.conclude().values())


def test_overlapping_groups_on_several_threads(forked):
    assert forked(HERE + "overlapping_groups") == [[], [], []]


def wait_in_a_callback(rank: int, say: Any) -> float:
    """Chain callbacks like torch's PowerSGD hook. Rank 0 adds one before the result, so it runs on another thread."""
    first, second = torch.ones(3), torch.ones(50_000)
    if rank == 1:
        time.sleep(0.3)
    future = dist.all_reduce(first, async_op=True).get_future()
    chained = future.then(lambda _: dist.all_reduce(second, async_op=True).get_future().wait()[0].sum().item())
    return chained.wait()


def callbacks() -> list[float]:
    with Ranks(2, wait_in_a_callback) as ranks:
        return list(ranks.conclude().values())


def test_a_callback_may_wait_for_another_operation(forked):
    assert forked(HERE + "callbacks") == [100_000.0] * 2


# -- a small /dev/shm --------------------------------------------------------------------------------------------------


def reduce_more_than_fits(rank: int, say: Any) -> None:
    count = 65 * MIB // 4
    ordinary = torch.full((count,), float(rank + 1))
    dist.all_reduce(ordinary)
    assert (ordinary == 3).all()
    shared = dist.group.WORLD.allocate(4 * count).view(torch.float32)
    shared.fill_(rank + 1)
    dist.all_reduce(shared)
    assert (shared == 3).all()


def with_a_small_shm() -> str:
    """Mount in a private namespace. Returns the reason why this is impossible, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_user, private, recursive = 0x20000, 0x10000000, 1 << 18, 1 << 14
    if libc.unshare(new_mounts) and libc.unshare(new_mounts | new_user):
        return f"mount name spaces: {os.strerror(ctypes.get_errno())}"
    mounts = [(b"none", b"/", None, private | recursive, None), (b"small", b"/dev/shm", b"tmpfs", 0, b"size=8m")]
    for source, target, kind, flags, options in mounts:
        if libc.mount(source, target, kind, ctypes.c_ulong(flags), options):
            return f"mounting at {target.decode()}: {os.strerror(ctypes.get_errno())}"
    room = os.statvfs("/dev/shm")
    assert room.f_blocks * room.f_frsize == 8 * MIB
    with Ranks(2, reduce_more_than_fits) as ranks:
        ranks.conclude()
    assert os.listdir("/dev/shm") == []
    return ""


def test_a_message_larger_than_dev_shm(forked):
    forbidden = forked(HERE + "with_a_small_shm")
    if forbidden:
        pytest.skip(f"NOT TESTED: a small /dev/shm cannot be made here ({forbidden})")


# -- allocated memory --------------------------------------------------------------------------------------------------


def share_here(first_bytes: int, second_bytes: int, first_pid: int) -> list[Any]:
    """This process as rank 4 and rank 7, each on a thread: what each gets, a mapping or an error."""
    names = queue.SimpleQueue[str]()
    found: list[Any] = [None, None]

    def pass_on(name: str) -> str:
        names.put(name)
        return name

    def play(index: int, num_bytes: int, pass_name: Any) -> None:
        try:
            found[index] = native.Mapping(index, [4, 7], [first_pid, os.getpid()], num_bytes, pass_name)
        except paceline.PacelineError as error:
            found[index] = error

    second = threading.Thread(target=play, args=(1, second_bytes, lambda _: names.get()))
    second.start()
    play(0, first_bytes, pass_on)
    second.join()
    return found


def test_ranks_share_memory():
    first, second = share_here(100, 100, os.getpid())
    first.part(1)[0] = b"x"
    assert second.part(1)[0] == b"x" and second.part(0)[0] == b"\0"


def test_memory_that_cannot_be_shared_names_the_rank_and_the_reason():
    _, error = share_here(100, 5000, os.getpid())
    assert error.code == "mismatch" and "rank 4 8192 bytes, rank 7 16384" in str(error)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    _, error = share_here(100, 100, gone.pid)
    assert error.code == "peer-lost" and "rank 4 left" in str(error)


def mapped_bytes() -> int:
    lines = re.findall(r"^(\w+)-(\w+) .*memfd:paceline", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return sum(int(end, 16) - int(begin, 16) for begin, end in lines)


def allocate_and_free(rank: int, say: Any) -> None:
    group: Any = dist.group.WORLD
    before, descriptors = mapped_bytes(), len(os.listdir("/proc/self/fd"))
    library, handle = native.load_library(), group._native._first
    for serial in range(1, 80):  # more than fit at once
        memory = group.allocate(MIB + serial)
        assert memory.numel() == MIB + serial and not memory.any()
        assert mapped_bytes() >= before + 2 * MIB
        part = memory[: 4 * (MIB // 4)].view(torch.float32)
        part.fill_(rank + serial)
        work = dist.all_reduce(part, async_op=True)
        del memory, part
        work.wait()
        assert (work.result()[0] == 2 * serial + 1).all()
        del work
        for _ in range(2):  # the group keeps a Work until the next one finds it finished
            dist.barrier(async_op=True).wait()
        assert mapped_bytes() == before and len(os.listdir("/proc/self/fd")) == descriptors
        assert library.pln_remove_arena(handle, serial) == native.BAD  # removed along with the memory
    kept = [group.allocate(4096).view(torch.float32) for _ in range(70)]
    for tensor in kept:
        tensor.fill_(rank)
        dist.all_reduce(tensor)
        assert (tensor == 1).all()


def free_memory() -> None:
    with Ranks(2, allocate_and_free) as ranks:
        ranks.conclude()


def test_freed_memory_is_returned(forked):
    forked(HERE + "free_memory")
