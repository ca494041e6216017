"""Works, Futures, lanes and barriers of shared-memory operations, and when their results are available."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.transport import native, register, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")

LONG = 3_000_001  # one piece per lane


def on_paceline(program: Callable[[], Any], lanes: int) -> Any:
    """Run a program in a world on paceline with this number of lanes."""
    register()
    os.environ["PACELINE_LANES"] = str(lanes)
    dist.init_process_group("shm", timeout=timedelta(seconds=60))
    try:
        return program()
    finally:
        dist.destroy_process_group()
        del os.environ["PACELINE_LANES"]


def all_of_several() -> None:
    for _ in range(20):
        scattered, long, short = torch.ones(6, 2).t(), torch.ones(LONG), torch.ones(3)
        dist.all_reduce_coalesced([scattered, long, short], async_op=True).wait()
        assert all((tensor == 2).all() for tensor in (scattered, long, short))


def outputs_after_wait() -> None:
    for _ in range(30):
        parts = [torch.zeros(200_000) for _ in range(2)]
        work = dist.all_gather(parts, torch.full((200_000,), 1.0 + dist.get_rank()), async_op=True)
        work.get_future()  # another thread also writes the outputs
        work.wait()
        assert (parts[0] == 1).all() and (parts[1] == 2).all()


def results_after_a_barrier() -> None:
    for _ in range(10):
        long, scattered, parts = torch.ones(LONG), torch.ones(6, 2).t(), [torch.zeros(2) for _ in range(2)]
        dist.all_reduce(long, async_op=True)
        dist.all_reduce(scattered, async_op=True)
        dist.all_gather(parts, torch.ones(2), async_op=True)
        dist.barrier()
        assert (long == 2).all() and (scattered == 2).all() and all((part == 1).all() for part in parts)


def more_than_the_queue_holds() -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3000)]
    assert all(work.wait() for work in works)
    assert not dist.group.WORLD._pending  # type: ignore[union-attr]


def futures_while_others_start() -> None:
    """The thread that completes Futures removes Works from a list while starting another Work iterates over it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # makes threads interleave
    try:
        works = (dist.all_reduce(torch.full((4,), float(number)), async_op=True) for number in range(2000))
        received = [work.get_future().then(lambda done: float(done.value()[0][0])) for work in works]
        found = torch.futures.wait_all(received)
    finally:
        sys.setswitchinterval(before_s)
    assert found == [2.0 * number for number in range(2000)]
    assert not dist.group.WORLD._pending  # type: ignore[union-attr]


def tensors_that_stand_for_others() -> None:
    from torch.distributed._functional_collectives import all_reduce

    promised = all_reduce(torch.ones(5), "sum", dist.group.WORLD)
    dist.all_reduce(promised)
    assert (promised == 4).all()


def small_ones_in_any_way() -> None:
    """A short operation is staged by its caller, and finished by any thread that queries it in any way."""
    group: Any = dist.group.WORLD
    for number in range(200):
        way, vector = (number + dist.get_rank()) % 5, torch.full((5,), 1.0 + dist.get_rank())
        if way == 0:
            dist.all_reduce(vector)
        elif way == 1:
            dist.all_reduce(vector, async_op=True).wait()
        elif way == 2:
            work = dist.all_reduce(vector, async_op=True)
            while not work.is_completed():
                pass
        elif way == 3:
            assert dist.all_reduce(vector, async_op=True).get_future().wait()[0] is vector
        else:
            dist.all_reduce(vector, async_op=True)
            dist.all_reduce(torch.zeros(1))  # finishes earlier operations
        if way != 4:
            dist.all_reduce(torch.zeros(1))
        assert (vector == 3).all()
    for op, expected in ((dist.ReduceOp.AVG, 1.5), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 2)):
        vector = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(vector, op)
        assert (vector == expected).all()
    vector = torch.full((3,), 1.0 + dist.get_rank())
    dist.all_reduce(vector, dist.ReduceOp.PRODUCT)  # on gloo
    assert (vector == 2).all() and not group._pending


def a_rank_is_lost_while_others_ask() -> None:
    """Nobody waits for a short operation, but repeated polling still gets the error."""
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        while not work.is_completed():
            pass
        assert "closed" in str(work.exception())


def results_that_have_no_room() -> None:
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(RuntimeError, match="expected length 2"):
        dist.all_gather([torch.zeros(2)], torch.ones(2), async_op=True)
    whole = torch.ones(2)
    dist.all_reduce(whole)  # no rank has sent anything
    assert (whole == 2).all()


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "program",
    [
        all_of_several, outputs_after_wait, results_after_a_barrier, more_than_the_queue_holds,
        futures_while_others_start, tensors_that_stand_for_others, small_ones_in_any_way,
        a_rank_is_lost_while_others_ask, results_that_have_no_room,
    ],
)  # fmt: skip
def test_results_are_available_when_reported(on_ranks, program, lanes):
    on_ranks(2, on_paceline, program, lanes)


def disagree_and_go_on() -> tuple[str, bool]:
    """One rank requests something else; then the failed operation's memory is reused."""
    code = "nothing was found"
    first = torch.ones(LONG)
    try:
        dist.all_reduce(first) if dist.get_rank() == 0 else dist.broadcast(torch.ones(3), 0)
    except native.TransportError as error:
        code = error.code
    del first
    innocent = torch.full((LONG,), 7.0)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(LONG))
    return code, bool((innocent == 7).all())


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_failure_breaks_all_lanes(on_ranks, lanes):
    results = on_ranks(2, on_paceline, disagree_and_go_on, lanes)
    assert results == [("mismatch", True)] * 2


def ask_for_a_future_late() -> list[torch.Tensor]:
    register()
    dist.init_process_group("shm", timeout=timedelta(seconds=60))
    parts = [torch.zeros(2) for _ in range(2)]
    work = dist.all_gather(parts, torch.ones(2), async_op=True)
    dist.barrier()
    dist.destroy_process_group()
    result: list[torch.Tensor] = work.get_future().wait()
    return result


def test_get_future_works_after_the_group_is_gone(on_ranks):
    for parts in on_ranks(2, ask_for_a_future_late):
        assert all((part == 1).all() for part in parts)
