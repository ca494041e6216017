"""`paceline.init`: rendezvous by environment, TCP or file, and a clean exit on every path."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import ConfigError, LaunchError, machine
from paceline.parallel.channel import Channel, open_group
from paceline.runtime.ranks import rendezvous
from paceline.runtime.ranks.world import current_world
from tests.conftest import BACKEND, wait_until

FORGET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PACELINE_LAUNCHER", "PACELINE_STORE")


def describe() -> dict:
    lines: list[str] = []
    with paceline.init(announce=lines.append) as world:
        return {
            "rank": world.rank,
            "size": world.world_size,
            "backend": world.backend,
            "device": world.device.type,
            "threads": torch.get_num_threads(),
            "control": dist.get_backend(world.control),
            "shared": world.share(f"from {world.rank}"),
            "clock": world.shares_clock,
            "lines": lines,
        }


def test_a_world_of_two_on_the_cpu(on_ranks):
    first, second = on_ranks(2, describe)
    threads = max(1, machine.count_cores() // 2)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["size"] == second["size"] == 2
    if not torch.cuda.is_available():
        assert first["backend"] == BACKEND and first["device"] == "cpu"
    assert first["control"] == "gloo"
    assert first["threads"] == second["threads"] == threads
    assert first["shared"] == second["shared"] == ["from 0", "from 1"]
    assert first["clock"]
    assert len(first["lines"]) == 1 and f"{threads} thread" in first["lines"][0] and second["lines"] == []


def test_without_a_launcher_it_is_a_world_of_one(monkeypatch):
    for name in FORGET:
        monkeypatch.delenv(name, raising=False)
    with paceline.init("gloo", "cpu", announce=None) as world:
        assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)
        assert current_world() is world
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1]
    assert not dist.is_initialized() and current_world() is None


def test_the_plain_pair_of_calls_and_idempotent_shutdown():
    paceline.init("gloo", "cpu", announce=None)
    paceline.shutdown()
    paceline.shutdown()
    assert not dist.is_initialized()


def test_an_exception_in_the_block_destroys_the_group_and_propagates():
    with pytest.raises(ZeroDivisionError), paceline.init("gloo", "cpu", announce=None):
        1 / 0  # noqa: B018
    assert not dist.is_initialized()


def test_sharing_in_a_closed_world_is_an_error():
    world = paceline.init("gloo", "cpu", announce=None)
    world.close()
    with pytest.raises(LaunchError, match="closed"):
        world.share(1)


def test_a_second_init_is_refused_and_the_first_survives():
    with paceline.init("gloo", "cpu", announce=None):
        with pytest.raises(ConfigError, match=r"already open.*paceline\.shutdown"):
            paceline.init("gloo", "cpu")
        assert dist.is_initialized()


def test_the_hint_differs_if_the_program_opened_the_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="already open") as refused:
            paceline.init("gloo", "cpu")
        assert "paceline.DDP" in str(refused.value) and "shutdown" not in str(refused.value)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "glo"}, "backend 'glo' is unknown"),
        ({"backend": "cpu:gloo,tpu:gloo"}, "unknown device 'tpu'"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"rank": 2, "world_size": 2}, "0 <= rank < world_size"),
        ({"rank": 0}, "pass both"),
        ({"threads": 0}, "at least 1"),
        ({"rendezvous": "http://here"}, "rendezvous 'http://here' is unknown"),
        ({"rendezvous": "tcp://here"}, "lacks a host or a port"),
        ({"rendezvous": "file://relative"}, "is not a file"),
        ({"rendezvous": "file:///tmp"}, "is not a file"),
        ({"rendezvous": "file:///tmp/a#b"}, "is not a file"),
        ({"timeout_s": 0}, "must be above 0"),
        ({"backend": "fake"}, "backend 'fake' is unknown"),
        ({"rank": 1, "world_size": 2}, "MASTER_ADDR is not set"),
    ],
)
def test_bad_arguments_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        paceline.init(**{"backend": "gloo", "device": "cpu", "announce": None} | options)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.parametrize("options", [{"backend": "nccl"}, {"device": "cuda"}, {"backend": "cpu:gloo,cuda:nccl"}])
def test_cuda_without_a_gpu_is_refused(options):
    with pytest.raises(ConfigError, match="GPU"):
        paceline.init(**options, announce=None)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "2")])
def test_an_incomplete_world_is_refused(monkeypatch, name, value):
    for other in FORGET:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        paceline.init(announce=None)


def meet(rendezvous: str, forget: bool = True) -> tuple[int, float, int]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if forget:
        for name in FORGET:
            os.environ.pop(name, None)
    with paceline.init("gloo", "cpu", rendezvous=rendezvous, rank=rank, world_size=world_size, announce=None) as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        return world.local_rank, float(total), world.local_world_size


def test_ranks_meet_by_file_and_remove_it(on_ranks, tmp_path):
    path, mine = tmp_path / "meeting", tmp_path / "meeting.20261116"
    mine.write_text("not of a rendezvous")
    (tmp_path / "meeting.paceline-0").touch()  # left by an earlier world
    for _ in range(3):  # later worlds at the same path find no leftovers
        assert on_ranks(3, meet, f"file://{path}") == [(0, 3.0, 3), (1, 3.0, 3), (2, 3.0, 3)]
        wait_until(lambda: set(tmp_path.iterdir()) == {mine})  # warm ranks answer before they close their stores


def test_a_rank_may_open_the_store_as_soon_as_rank_0_has_written_the_token(monkeypatch, tmp_path):
    write = os.write

    def write_and_open(handle: int, data: bytes) -> int:
        count = write(handle, data)
        (tmp_path / f"meeting.paceline-{data.decode()}").touch()  # like a rank that reads the token at once
        return count

    old = tmp_path / "meeting.paceline-0"
    old.touch()
    monkeypatch.setattr(rendezvous.os, "write", write_and_open)
    token = rendezvous._claim(tmp_path / "meeting")
    assert {path.name for path in tmp_path.iterdir()} == {"meeting", f"meeting.paceline-{token}"}
    rendezvous.close_stores()
    assert not (tmp_path / "meeting").exists()


def test_ranks_meet_by_tcp_and_derive_their_local_ranks(on_ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert on_ranks(2, meet, f"tcp://127.0.0.1:{port}") == [(0, 2.0, 2), (1, 2.0, 2)]


def meet_at_stale(path: str, only_rank: int) -> str:
    rank = int(os.environ["RANK"])
    if only_rank not in (-1, rank):
        return "not asked"
    try:
        paceline.init("gloo", "cpu", rendezvous=f"file://{path}", rank=rank, world_size=2, announce=None)
    except LaunchError as error:
        return str(error)
    return "met"


@pytest.mark.parametrize("only_rank", [-1, 0, 1])
def test_a_stale_file_is_refused_on_every_rank(on_ranks, tmp_path, only_rank):
    path = tmp_path / "meeting"
    path.write_bytes(b"left by a run that crashed")
    answers = [answer for answer in on_ranks(2, meet_at_stale, str(path), only_rank) if answer != "not asked"]
    assert len(set(answers)) == 1 and f"{path} is left over from an earlier run" in answers[0]


def crash_after_meeting(path: str) -> None:
    paceline.init("gloo", "cpu", rendezvous=f"file://{path}", rank=int(os.environ["RANK"]), world_size=2, announce=None)
    with contextlib.suppress(RuntimeError):  # the other may be gone, but both have met
        dist.barrier()
    os._exit(9)


def test_a_file_left_by_a_crash_is_stale(on_ranks, tmp_path):
    path = tmp_path / "meeting"
    with pytest.raises(LaunchError, match="code 9"):
        on_ranks(2, crash_after_meeting, str(path))
    assert path.exists()
    assert all("left over" in answer for answer in on_ranks(2, meet_at_stale, str(path), -1))


def arrive_late(path: str) -> int:
    """Rank 1 arrives long before rank 0, and must not report a stale file."""
    if os.environ["RANK"] == "0":
        time.sleep(0.7)
    return meet(f"file://{path}")[0]


def test_rank_0_may_arrive_last(on_ranks, tmp_path):
    assert on_ranks(2, arrive_late, str(tmp_path / "meeting")) == [0, 1]


def meet_again_and_again(rounds: int, address: str) -> list[float]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums = []
    for number in range(rounds):
        options = {"rank": rank, "world_size": world_size} if address != "env://" else {}
        place = address.format(number)
        with paceline.init("gloo", "cpu", rendezvous=place, announce=None, **options) as world:
            total = torch.full((1,), float(number))
            if (rank + number) % 3 == 0:
                time.sleep(0.01)  # either rank may then be the first to leave and return
            dist.all_reduce(total)
            sums.append(float(total) / world.world_size)
        if place != address:
            rendezvous.close_stores()  # on all ranks at nearly the same moment
    return sums


@pytest.mark.parametrize(
    "kind", ["tcp", "file", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("env", "files"))]
)
def test_a_process_can_reuse_a_rendezvous(on_ranks, tmp_path, kind):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        places = {
            "tcp": f"tcp://127.0.0.1:{probe.getsockname()[1]}",
            "file": f"file://{tmp_path}/meeting",
            "files": f"file://{tmp_path}/meeting-{{}}",
            "env": "env://",
        }
    rounds = 150 if kind == "files" else 30
    assert on_ranks(3, meet_again_and_again, rounds, places[kind]) == [[float(n) for n in range(rounds)]] * 3
    assert list(tmp_path.iterdir()) == []


def fall_back() -> str:
    """Users implement their own `auto` like this: a refused `init` must not affect the next one."""
    try:
        paceline.init("gloo", "cuda:99", announce=None)
    except ConfigError:
        with paceline.init("gloo", "cpu", announce=None) as world:
            return world.device.type
    return "no refusal"


def test_init_works_after_a_refused_one(on_ranks):
    assert on_ranks(2, fall_back) == ["cpu", "cpu"]


def claim_another_place(rank: str, world_size: str) -> str:
    if os.environ["RANK"] == "1":
        time.sleep(0.3)  # after rank 0 has registered
        os.environ.update(RANK=rank, WORLD_SIZE=world_size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world_size)
    try:
        paceline.init("gloo", "cpu", announce=None, rendezvous_timeout_s=4)
    except LaunchError as error:
        return str(error)
    return "met"


@pytest.mark.slow
def test_duplicate_ranks_and_different_world_sizes_are_refused(on_ranks):
    assert "two processes have rank 0 of 2" in on_ranks(2, claim_another_place, "0", "2")[1]
    assert "rank 1 has WORLD_SIZE 3 but rank 0 has 2" in on_ranks(2, claim_another_place, "1", "3")[1]


def wait_for_a_third(timeout_s: float) -> str:
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    try:
        paceline.init(announce=None, rendezvous_timeout_s=timeout_s)
    except LaunchError as error:
        return str(error)
    return "met"


def test_a_missing_rank_is_named(on_ranks):
    answers = on_ranks(2, wait_for_a_third, 3.0)
    assert all(answer.startswith("rank 2 of 3 did not arrive within 3 s") for answer in answers)


def refuse_on(rank: int, backends: tuple[str, str]) -> str:
    """If one rank cannot continue or chooses differently, the others must not wait for it."""
    me = int(os.environ["RANK"])
    try:
        paceline.init(backends[me], "cpu", threads=0 if me == rank else 1, announce=None)
    except ConfigError as error:
        return str(error)
    return "went on"


def test_a_refusal_on_one_rank_is_raised_on_all(on_ranks):
    answers = on_ranks(2, refuse_on, 1, ("gloo", "gloo"))
    assert answers == ["threads=0: a rank needs at least 1 (on rank 1 of 2)"] * 2


def test_different_backends_are_refused_on_every_rank(on_ranks):
    answers = on_ranks(2, refuse_on, -1, ("gloo", "cpu:gloo"))
    words = "the ranks chose different backends (gloo on rank 0, cpu:gloo on rank 1)"
    assert all(answer.startswith(words) for answer in answers)


def test_an_address_in_use_is_named(monkeypatch):
    monkeypatch.setattr(rendezvous, "_BIND_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place, where = rendezvous.Place(0, 2, None, None, "arguments"), f"tcp://127.0.0.1:{port}"
    store = rendezvous.open_store(where, place, 5.0)
    try:
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port}") as caught:
            rendezvous._connect_store(where, place, 5.0)
        assert caught.value.code == "taken" and rendezvous.is_private(store)
    finally:
        rendezvous.close_stores()
    with socket.create_server(("", 0)) as taken, pytest.raises(LaunchError, match="is taken"):
        rendezvous._listen(taken.getsockname()[1], "somewhere")


def test_an_unreachable_rank_0_is_named():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        port = probe.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port} .*0.5 s"):
            paceline.init(
                "gloo",
                "cpu",
                rendezvous=f"tcp://127.0.0.1:{port}",
                rank=1,
                world_size=2,
                rendezvous_timeout_s=0.5,
                announce=None,
            )


@pytest.mark.parametrize("ending", [pytest.param("sys.exit(0)", marks=pytest.mark.slow), "paceline.shutdown()"])
def test_exiting_without_shutdown_causes_no_warning_of_torch(start, tmp_path, ending):
    script = Path(tmp_path, "plain.py")
    script.write_text(f"import sys, paceline\npaceline.init('gloo', 'cpu', announce=None)\n{ending}\n")
    job = start("-W", "error", str(script))
    out, err = job.communicate(timeout=100)
    assert (job.returncode, out, err) == (0, "", "")


SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "localhost"}


def test_slurm_variables_make_a_world(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with paceline.init("gloo", "cpu", announce=None) as world:
        assert (world.launcher, world.world_size) == ("slurm", 1)


def choose_threads(asked: str, under_torchrun: bool) -> int:
    os.environ["OMP_NUM_THREADS"] = asked
    if under_torchrun:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    with paceline.init("gloo", "cpu", announce=None) as world:
        return world.threads


def test_threads_set_by_the_user_are_kept_but_not_torchruns_default(on_ranks):
    fair = max(1, machine.count_cores() // 2)
    assert on_ranks(2, choose_threads, "3", False) == [3, 3]
    assert on_ranks(2, choose_threads, "3", True) == [3, 3]
    assert on_ranks(1, choose_threads, "1", True) == [machine.count_cores()]
    assert on_ranks(2, choose_threads, "1", True) == [fair, fair]


def fail_with_a_pending_collective() -> None:
    with paceline.init("gloo", "cpu", announce=None) as world:
        if world.rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)  # which rank 1 never joins
            raise ValueError(f"said at once, not after {type(work)}")
        time.sleep(200)


def test_an_error_does_not_wait_for_a_collective_that_nobody_joins(on_ranks):
    with pytest.raises(LaunchError, match=r"rank 0 of 2 .*ValueError: said at once"):
        on_ranks(2, fail_with_a_pending_collective, timeout_s=100.0)


def close_under_a_callback():
    with paceline.init("gloo", "cpu", announce=None) as world:
        if world.rank == 0:
            time.sleep(0.3)  # rank 1 must add its callback before the sum
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        group = dist.group.WORLD
        future.add_done_callback(lambda _, held=(group, group._get_backend(torch.device("cpu"))): time.sleep(0.7))
        del group
        future.wait()  # before the callback ends
    time.sleep(1.0)
    return not dist.is_initialized()


def test_a_callback_that_outlives_its_world_does_not_abort_the_rank(on_ranks):
    assert on_ranks(2, close_under_a_callback) == [True, True]


class Owner:
    """Owns a group that outlives its world."""


def open_and_close() -> list[str]:
    for _ in range(3):
        owner = Owner()
        with paceline.init("gloo", "cpu", announce=None) as world:
            dist.all_reduce(torch.ones(1))
            open_group(Channel(dist.group.WORLD, world.device), owner)
        del owner, world  # both hold groups
    wait_until(lambda: [one.name for one in threading.enumerate()] == ["MainThread"])
    return [one.name for one in threading.enumerate()]


def test_the_groups_of_a_closed_world_are_freed(on_ranks):
    assert on_ranks(2, open_and_close) == [["MainThread"]] * 2
