"""Errors on the other ranks when a rank is killed, suspended, absent, leaves or differs; and no leftovers."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.transport import native
from tests.dist.forked_ranks import Ranks

if native.why_not():
    pytest.skip(f"NOT TESTED: {native.why_not()}", allow_module_level=True)

HERE = "tests.dist.test_transport_failures:"
SOON_S = 40.0  # after the death, or after the configured timeout; the timeouts of surviving ranks are longer
STOPPED_S = 1.2  # the transport's own timeout
SIZES = (1, 1_000, 40_000, 300_000, 1_500_000)


def all_reduce(tensor: torch.Tensor, timeout_s: float) -> Any:
    """An all-reduce with its own timeout, which torch's function does not support."""
    options = c10d.AllreduceOptions()
    options.timeout = timedelta(seconds=timeout_s)
    return dist.group.WORLD.allreduce([tensor], options)


def catch(call: Any) -> dict[str, Any]:
    try:
        while True:
            call()
    except RuntimeError as error:
        return {"when_s": time.monotonic(), "error": str(error), "code": getattr(error, "code", None)}


def work_until_it_fails(rank: int, say: Any, seed: int, timeout_s: float) -> dict[str, Any]:
    """All-reduces of mixed sizes, some waited for immediately, in the same order on all ranks."""
    draw = random.Random(seed)
    tensors = {size: torch.ones(size) for size in SIZES}
    shared = dist.group.WORLD.allocate(4 * 300_000).view(torch.float32)
    pending: list[Any] = []

    def step() -> None:
        tensor = shared if draw.random() < 0.2 else tensors[draw.choice(SIZES)]
        pending.append(all_reduce(tensor, timeout_s))
        if draw.random() < 0.5 or len(pending) > 10:
            while pending:
                pending.pop(0).wait()

    for _ in range(3):
        step()
    say("working")
    received = catch(step)
    again = catch(lambda: dist.all_reduce(tensors[1]))
    assert again["error"] == received["error"]  # the group stays broken
    return received


def harm(trials: int, seed: int, number: int, timeout_s: float, code: str, limit_s: float) -> list[float]:
    """Repeatedly signal one of three ranks. Returns the seconds until the last survivor had an error."""
    draw, took = random.Random(seed), []
    for trial in range(trials):
        with Ranks(3, work_until_it_fails, draw.random(), timeout_s) as ranks:
            ranks.hear_all()
            victim = draw.randrange(3)
            time.sleep(draw.random() * 0.05)
            harmed = time.monotonic()
            os.kill(ranks.pids[victim], number)
            for rank, received in ranks.conclude(victim).items():
                late = received["when_s"] - harmed
                about = f"trial {trial} (seed {seed}): rank {rank} got {received} after {late:.2f} s"
                assert f"rank {victim} (process {ranks.pids[victim]})" in received["error"], about
                assert received["code"] == code and late < limit_s + SOON_S, about
                took.append(late)
    return took


def in_shared_folder() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "paceline" in name}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_killed_rank_is_named_by_every_survivor(forked, seed):
    before = in_shared_folder()
    trials = 8 if seed else 3  # the fast suite has one seed
    took = forked(HERE + "harm", trials, seed, signal.SIGKILL, 90.0, "peer-lost", 0.0)
    assert len(took) == 2 * trials
    assert in_shared_folder() <= before


def test_a_suspended_rank_is_named_by_every_survivor(forked):
    took = forked(HERE + "harm", 2, 10, signal.SIGSTOP, 90.0, "peer-lost", STOPPED_S)
    assert min(took) > STOPPED_S  # otherwise a briefly suspended rank would be lost


@pytest.mark.slow  # on a busy machine the longer timeout may be reported first
def test_a_suspended_rank_is_named_with_a_shorter_limit(forked):
    forked(HERE + "harm", 3, 20, signal.SIGSTOP, 0.5, "timeout", 0.5)


def stop_for_a_moment() -> None:
    took_s = [STOPPED_S]
    while max(took_s) >= STOPPED_S:  # on a busy machine even a moment may be too long
        took_s = []
        with Ranks(2, work_until_it_fails, 5, 90.0) as ranks:
            ranks.hear_all()
            for _ in range(3):
                stopped_s = time.monotonic()
                os.kill(ranks.pids[1], signal.SIGSTOP)
                time.sleep(STOPPED_S / 3)
                os.kill(ranks.pids[1], signal.SIGCONT)
                took_s.append(time.monotonic() - stopped_s)
                time.sleep(0.1)
            killed_s = time.monotonic()
            os.kill(ranks.pids[1], signal.SIGKILL)
            received = ranks.conclude(1)[0]
    assert received["code"] == "peer-lost" and received["when_s"] > killed_s


def test_a_briefly_suspended_rank_is_not_lost(forked):
    forked(HERE + "stop_for_a_moment")


def not_come(missing: int) -> None:
    with Ranks(3, stay_away_asleep, missing) as ranks:
        answers = ranks.conclude()
        for rank in {0, 1, 2} - {missing}:
            assert f"rank {missing} (process {ranks.pids[missing]})" in answers[rank]["error"]
            assert answers[rank]["code"] == "timeout"
            assert answers[rank]["took_s"] < 2.0 + SOON_S, answers


def stay_away_asleep(rank: int, say: Any, missing: int) -> dict[str, Any]:
    dist.barrier()
    began = time.monotonic()
    if rank == missing:
        time.sleep(4.0)
        # If it is late, it learns that the others have left, and does not wait for them.
        received = catch(lambda: all_reduce(torch.ones(50_000), 90.0).wait())
        assert time.monotonic() - began < 4.0 + SOON_S and f"rank {missing}" in received["error"], received
        return received
    received = catch(lambda: all_reduce(torch.ones(50_000), 2.0).wait())
    return received | {"took_s": received["when_s"] - began}


@pytest.mark.parametrize("missing", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_absent_rank_is_named(forked, missing):
    forked(HERE + "not_come", missing)


def wait_for_two(rank: int, say: Any) -> dict[str, Any]:
    """Rank 0 waits for both others: the first sleeps, and the second dies."""
    dist.barrier()
    say("ready")
    if rank == 0:
        return catch(lambda: dist.all_reduce(torch.ones(9)))
    time.sleep(90)
    return {}


def kill_behind_a_sleeper() -> None:
    with Ranks(3, wait_for_two) as ranks:
        ranks.hear_all()
        killed = time.monotonic()
        os.kill(ranks.pids[2], signal.SIGKILL)
        received = ranks.conclude(1, 2)[0]
        assert f"rank 2 (process {ranks.pids[2]})" in received["error"] and received["code"] == "peer-lost"
        assert received["when_s"] - killed < SOON_S


def test_a_death_is_detected_while_another_rank_sleeps(forked):
    forked(HERE + "kill_behind_a_sleeper")


def leave_or_wait(rank: int, say: Any, size: int) -> dict[str, Any]:
    dist.barrier()
    if rank != 1:
        time.sleep(0.2)
    else:
        group: Any = dist.group.WORLD
        waiting = group.allreduce([torch.ones(size)])  # the others arrive too late for this
        later = threading.Thread(target=lambda: say(catch(waiting.wait)["code"]))
        later.start()
        dist.destroy_process_group()
        later.join()
        # Objects that outlive the group raise errors instead of crashing.
        received = [catch(call)["code"] for call in (waiting.wait, lambda: group.allreduce([torch.ones(3)]))]
        assert waiting.is_completed() and not waiting.is_success(), received
        received.append(catch(waiting.get_future().wait)["code"])
        assert received == ["closed"] * 3
        return {}
    # A small one may still finish, since rank 1 has already contributed to it; the next one cannot.
    return catch(lambda: dist.all_reduce(torch.ones(size)))


def leave(size: int) -> None:
    with Ranks(3, leave_or_wait, size) as ranks:
        assert ranks.hear(1) == "closed"
        answers = ranks.conclude()
    received = {(answers[rank]["code"], answers[rank]["error"]) for rank in (0, 2)}
    assert len(received) == 1 and min(received)[0] == "peer-lost" and "rank 1 (process" in min(received)[1], received


@pytest.mark.parametrize("size", [4, 500_000])
def test_a_rank_that_leaves_is_named(forked, size):
    forked(HERE + "leave", size)


def differ(rank: int, say: Any, how: str) -> str:
    tensor, op = torch.ones(20), dist.ReduceOp.SUM
    if rank == 1:
        match how:
            case "count":
                tensor = torch.ones(21)
            case "dtype":
                tensor = torch.ones(20, dtype=torch.float64)
            case "op":
                op = dist.ReduceOp.MAX
            case "kind":
                return describe(catch(lambda: dist.broadcast(tensor, 2)))
    return describe(catch(lambda: dist.all_reduce(tensor, op)))


def describe(received: dict[str, Any]) -> str:
    return f"{received['code']}: {received['error']}"


def differ_in(how: str) -> list[str]:
    with Ranks(3, differ, how) as ranks:
        return list(ranks.conclude().values())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("count", "rank 0 an all-reduce (sum) of 20 float32, rank 1 an all-reduce (sum) of 21 float32"),
        ("dtype", "rank 0 an all-reduce (sum) of 20 float32, rank 1 an all-reduce (sum) of 20 float64"),
        ("op", "rank 0 an all-reduce (sum) of 20 float32, rank 1 an all-reduce (max) of 20 float32"),
        ("kind", "rank 0 an all-reduce (sum) of 20 float32, rank 1 a broadcast of 80 bytes from rank 2"),
    ],
)
def test_a_mismatch_is_the_same_error_on_all_ranks(forked, how, words):
    received = forked(HERE + "differ_in", how)
    assert (
        len(received) == 3 and len(set(received)) == 1 and received[0].startswith("mismatch: ") and words in received[0]
    )


def fork_in_between(rank: int, say: Any) -> list[float]:
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, async_op=True).wait()  # a worker thread runs
    link, far = os.pipe()
    child = os.fork()
    if child == 0:
        group: Any = dist.group.WORLD
        calls = [
            lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor, async_op=True), lambda: dist.barrier(),
            lambda: group.allocate(100),
        ]  # fmt: skip
        received = [catch(call)["code"] for call in calls]
        group.shutdown()  # the child's exit does not count as the parent's leaving
        os.write(far, "\n".join(received).encode())
        os._exit(0)
    os.close(far)
    with os.fdopen(link) as reader:
        received = reader.read().splitlines()
    os.waitpid(child, 0)
    assert received == ["forked"] * 4
    dist.all_reduce(tensor)
    assert dist.group.WORLD.allocate(100).sum() == 0
    return [tensor.min().item(), tensor.max().item()]


def fork_children() -> list[list[float]]:
    with Ranks(2, fork_in_between) as ranks:
        return list(ranks.conclude().values())


def test_a_forked_child_is_refused_without_disturbing_ranks(forked):
    assert forked(HERE + "fork_children") == [[4.0, 4.0]] * 2
