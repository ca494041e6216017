"""Ranks start, reply, fail with an error that names them, and never outlive their parent."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import ConfigError, LaunchError, machine
from paceline.runtime.faults.recovery import RankProcess
from paceline.runtime.ranks import launch, rendezvous
from paceline.runtime.ranks import world as worlds
from paceline.runtime.ranks.place import read_place
from paceline.runtime.ranks.worker import post
from tests.conftest import descendants, wait_until

needs_fork = pytest.mark.skipif(not launch._can_fork, reason="ranks cannot be forked here")


def add_ranks(start: int) -> tuple[int, list[float]]:
    with paceline.init(announce=None) as world:
        vector = torch.full((3,), float(world.rank + start))
        dist.all_reduce(vector)
        return world.rank, vector.tolist()


def test_values_come_back_in_rank_order(on_ranks):
    assert on_ranks(3, add_ranks, 1) == [(rank, [6.0] * 3) for rank in range(3)]


def test_warm_ranks_run_jobs_in_worlds_of_any_size(on_ranks):
    first = on_ranks(2, os.getpid)
    assert on_ranks(2, add_ranks, 0)[0] == (0, [1.0] * 3)
    assert on_ranks(3, add_ranks, 0)[0] == (0, [3.0] * 3)
    assert on_ranks(2, os.getpid) == first


def hold_a_lock(folder: str) -> str:
    """Hold a named semaphore, as tqdm does, and write a file when it is removed."""
    lock = multiprocessing.get_context("spawn").Lock()
    mark = Path(folder, os.environ["RANK"])
    multiprocessing.util.Finalize(lock, mark.write_text, ("removed",), exitpriority=0)
    _held.append(lock)
    return str(mark)


_held: list[object] = []


def test_idle_ranks_exit_cleanly_and_leave_no_locks(tmp_path):
    with launch.RankPool(2) as pool:
        marks = pool.run(hold_a_lock, (str(tmp_path),), timeout_s=60)
        assert not any(map(os.path.exists, marks))
    assert [Path(mark).read_text() for mark in marks] == ["removed"] * 2


def return_tensor() -> torch.Tensor:
    return torch.arange(5) * int(os.environ["RANK"])


def test_tensors_are_returned_by_value_and_outlive_their_rank():
    values = paceline.run_ranks(return_tensor, 2, timeout_s=60)
    assert [v.tolist() for v in values] == [[0] * 5, [0, 1, 2, 3, 4]]


def read_variables() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SPECIAL")}


def set_variable() -> None:
    os.environ["SPECIAL"] = "left by a job"


def test_a_rank_sees_torchruns_variables_and_no_job_leaks_its_own(on_ranks):
    on_ranks(2, set_variable)
    seen = on_ranks(2, read_variables)
    assert seen[1] == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "SPECIAL": ""}


def init_by_torch_itself() -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)  # without destroying the group


def test_a_function_written_for_torchrun_runs_unchanged(on_ranks):
    assert on_ranks(2, init_by_torch_itself) == [2, 2]
    assert on_ranks(2, init_by_torch_itself) == [2, 2]


def fail_on(rank: int) -> None:
    with paceline.init(announce=None) as world:
        if world.rank == rank:
            raise KeyError("the culprit's own words")
        dist.barrier()


@pytest.mark.parametrize("culprit", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_rank_that_failed_first_is_named_with_its_traceback(on_ranks, culprit):
    with pytest.raises(LaunchError, match=f"rank {culprit} of 3 .*KeyError") as caught:
        on_ranks(3, fail_on, culprit)
    assert caught.value.rank == culprit
    assert "in fail_on" in caught.value.rank_traceback and "the culprit's own words" in caught.value.rank_traceback


def raise_config_error() -> None:
    raise ConfigError(f"raised by rank {os.environ['RANK']}")


def test_a_paceline_error_is_raised_as_itself(on_ranks):
    with pytest.raises(ConfigError, match="raised by rank"):
        on_ranks(2, raise_config_error)


def die(rank: int, how: str) -> None:
    with paceline.init(announce=None) as world:
        dist.barrier()
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(7)
        vector = torch.zeros(2**20)
        while True:
            dist.all_reduce(vector)


@pytest.mark.parametrize(("how", "words"), [("kill", "killed by SIGKILL"), ("exit", "exited with code 7")])
def test_a_dead_rank_is_named_although_its_peers_fail_first(on_ranks, warm_pool, how, words):
    with pytest.raises(LaunchError, match=f"rank 1 of 3 .*{words}"):
        on_ranks(3, die, 1, how)
    assert warm_pool.pids() == []


@needs_fork
def test_a_rank_that_ends_after_the_limit_does_not_replace_the_error(monkeypatch):
    with paceline.RankPool(2) as pool:
        assert pool.run(abs, (-1,), timeout_s=60) == [1, 1]  # on warm ranks
        read_stack = RankProcess.read_stack

        def end_first(rank: RankProcess) -> str:
            pid = rank.process.pid
            if rank is pool._ranks[1]:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not Path(f"/proc/{pid}").exists())
            return read_stack(rank)

        monkeypatch.setattr(RankProcess, "read_stack", end_first)
        with pytest.raises(LaunchError, match=r"rank 0, 1 of 2 .* 1 s") as caught:
            pool.run(time.sleep, (60,), timeout_s=1.0)
    assert "Rank 0 is at" in str(caught.value) and "Rank 1 is at:\n(ended)" in str(caught.value)


@needs_fork
def test_a_signal_is_not_sent_to_a_reused_process_id(monkeypatch):
    with paceline.RankPool(2) as pool:
        assert pool.run(abs, (-1,), timeout_s=60) == [1, 1]
        first, second = pool.pids()
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{second}").exists())
        sent: list[str] = []
        monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(f"{number} to {pid}"))
        pool.signal(signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{first}").exists())
        assert not sent


class LikeAVictim(OSError):
    """Makes rank 0 fail only when this error's text is read, after the time of the error was recorded."""

    def __str__(self) -> str:
        Path(self.args[0]).touch()
        return "Broken pipe while writing the checkpoint"


def sound_like_a_victim(sign: str) -> None:
    if os.environ["RANK"] == "1":
        raise LikeAVictim(sign)
    wait_until(Path(sign).exists)
    raise ValueError("later, and because of rank 1")


def test_the_first_failure_is_named_even_if_it_looks_like_a_lost_peer(on_ranks, tmp_path):
    with pytest.raises(LaunchError, match="Broken pipe") as caught:
        on_ranks(2, sound_like_a_victim, str(tmp_path / "sign"))
    assert caught.value.rank == 1


def test_a_pool_may_be_used_from_a_thread_and_then_from_another():
    with paceline.RankPool(2) as pool:
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.extend(pool.run(os.getpid, timeout_s=60)))
        thread.start()
        thread.join()
        time.sleep(0.3)  # the thread that started the ranks is gone, but the ranks are not
        assert pool.run(os.getpid, timeout_s=60) == first and len(first) == 2


def sleep_on(rank: int) -> None:
    with paceline.init(announce=None) as world:
        if world.rank == rank:
            time.sleep(600)
        dist.barrier()


def test_a_hang_ends_at_the_timeout_and_shows_where_each_rank_is(on_ranks):
    on_ranks(2, os.getpid)
    with pytest.raises(LaunchError, match=r"rank 0, 1 of 2 .* 10 s") as caught:
        on_ranks(2, sleep_on, 1, timeout_s=10)
    rank_0, rank_1 = str(caught.value).split("Rank 1 is at:")
    assert "in barrier" in rank_0 and "in sleep_on" in rank_1 and "in barrier" not in rank_1


def return_early() -> None:
    with paceline.init(announce=None) as world:
        if world.rank == 1:
            return
        dist.barrier()


def test_a_rank_that_returned_too_early_is_mentioned(on_ranks):
    with pytest.raises(LaunchError, match=r"rank 1 .*returned"):
        on_ranks(2, return_early)


def post_twice() -> None:
    post({"from": os.environ["RANK"]})
    post("done")


def test_ranks_can_post_messages_while_they_work(warm_pool):
    heard = []
    warm_pool.run(post_twice, num_ranks=2, on_message=lambda rank, message: heard.append((rank, message)))
    assert sorted(heard, key=str) == sorted([(0, {"from": "0"}), (0, "done"), (1, {"from": "1"}), (1, "done")], key=str)


def test_an_unpicklable_function_is_refused_before_ranks_start(monkeypatch):
    monkeypatch.setattr("paceline.runtime.ranks.by_value.is_interactive", lambda: False)  # unlike pytest's
    with pytest.raises(ConfigError, match="lambda"):
        paceline.run_ranks(lambda: None, 2)


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_an_impossible_number_of_ranks_is_refused(count):
    with pytest.raises(ConfigError, match=f"{count} ranks"):
        paceline.run_ranks(os.getpid, count)


# -- run_ranks in an already launched world ---------------------------------------------------------------------------


def run_nested(num_ranks: int, failing: int = -1) -> tuple[str, object]:
    try:
        values = paceline.run_ranks(report_world, num_ranks, (failing,), timeout_s=60)
    except paceline.PacelineError as error:
        return type(error).__name__, (error.code, getattr(error, "rank", None), str(error).splitlines()[0])
    except KeyError as error:
        return "own", str(error)
    return "values", (values, len(psutil.Process().children()))


def report_world(failing: int = -1) -> tuple[int, int, float]:
    with paceline.init(announce=None) as world:
        if world.rank == failing:
            raise KeyError("of this rank")
        total = torch.ones(1)
        if failing < 0:
            dist.all_reduce(total)
        return world.rank, world.world_size, float(total)


def test_run_ranks_in_a_launched_world_gives_every_rank_all_values(on_ranks):
    assert on_ranks(2, run_nested, 2) == [("values", ([(0, 2, 2.0), (1, 2, 2.0)], 0))] * 2
    assert on_ranks(1, run_nested, 1) == [("values", ([(0, 1, 1.0)], 0))]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_run_ranks_refuses_another_number_than_the_launched_world(on_ranks, num_ranks):
    first, second = on_ranks(2, run_nested, num_ranks)
    assert first == second and first[0] == "ConfigError" and first[1][0] == "world-size"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_of_a_launched_world_reaches_the_others(on_ranks, failing):
    answers = on_ranks(2, run_nested, 2, failing)
    assert answers[failing] == ("own", "'of this rank'")
    name, (_, rank, text) = answers[1 - failing]
    assert (name, rank) == ("LaunchError", failing) and "KeyError" in text


def share_with(failing: int, timeout_s: float) -> str:
    place = read_place()
    if place.rank == failing:
        with pytest.raises(KeyError):
            rendezvous.gather(place, lambda: {}["k"], 1.0)
        return ""
    if failing < 0:
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(LaunchError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "SHARE_S", timeout_s)
        worlds.share_first(read_place(), "value")
    return str(caught.value)


def test_sharing_does_not_wait_for_a_failed_or_missing_rank(on_ranks):
    assert on_ranks(2, share_with, 0, 60.0)[1].startswith("rank 0 of 2 ")
    assert all(text.startswith("rank 2 of 3 did not arrive within 1 s") for text in on_ranks(2, share_with, -1, 1.0))


PROGRAM = """
import sys
import paceline

def train():
    import torch

    with paceline.init(announce=None) as world:
        model = paceline.DataParallel(torch.nn.Linear(10, 1).to(world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(8, 10, device=world.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.module.weight.sum().item()
        sys.stdout.write(f"{world.rank} of {world.world_size} {weight}\\n")
        sys.stdout.flush()

if __name__ == "__main__":
    paceline.run_ranks(train, 2)
"""


@pytest.mark.slow  # the README's program, in tests/cli/test_examples.py, is the same without the values
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_a_program_has_one_world_of_two_ranks_alone_and_under_torchrun(start, tmp_path, launcher):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    job = start(*launcher, str(script))
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    lines = sorted(line.rsplit(" ", 1) for line in out.splitlines())
    assert [who for who, _ in lines] == ["0 of 2", "1 of 2"]
    assert lines[0][1] == lines[1][1]  # replicas of one world


SCRIPT = """
import os, sys, time
import paceline

def work(folder):
    import torch, torch.distributed as dist  # only on the ranks: the launcher starts immediately

    with paceline.init(announce=None) as world:
        open(os.path.join(folder, f"up-{world.rank}"), "w").close()
        vector = torch.zeros(2**22)
        while True:
            if world.rank == 1:
                time.sleep(0.2)  # rank 0 is then mostly in the collective, where Python cannot handle signals
            dist.all_reduce(vector)

if __name__ == "__main__":
    paceline.run_ranks(work, 2, (sys.argv[1],))
"""


@pytest.mark.parametrize(
    "ending",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)),
        signal.SIGKILL,
    ],
)
def test_no_rank_outlives_its_parent(start, tmp_path, ending):
    """Ctrl-C reaches the whole process group; suspended ranks also end if the launcher is killed."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    job = start(str(script), str(tmp_path))
    wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    processes = descendants(job.pid)
    sockets = [c.laddr.port for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    shm = set(os.listdir("/dev/shm"))
    if ending == signal.SIGKILL:
        ranks = [process for process in processes if process.ppid() != job.pid]
        assert len(ranks) >= 2
        for rank in ranks:
            rank.suspend()
    (os.killpg if ending == signal.SIGINT else os.kill)(job.pid, ending)
    _, err = job.communicate(timeout=100)
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
    assert job.returncode != 0 and err.count("KeyboardInterrupt") == (ending == signal.SIGINT), err
    assert set(os.listdir("/dev/shm")) <= shm
    wait_until(lambda: not find_listeners() & set(sockets))  # other threads of a zombie may take a moment


def find_listeners() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


# -- forked ranks ------------------------------------------------------------------------------------------------------


def square(value: int) -> int:
    return value * value


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index * index


def describe_process() -> dict[str, object]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        forked = pool.map(square, [3])
    loader = torch.utils.data.DataLoader(Squares(), batch_size=None, num_workers=1 - int(os.environ["RANK"]))
    return {
        "server": os.getppid(),
        "random": (random.random(), float(numpy.random.rand())),
        "bad fork": torch.cuda._is_in_bad_fork(),
        "threads": torch.get_num_threads(),
        "method": multiprocessing.get_start_method(),
        "forked": forked,
        "loaded": [int(value) for value in loader],  # loaded by a spawned worker of rank 0
        "sum": float(torch.ones(2**20).sum()),  # OpenMP in a fork
    }


@pytest.mark.slow
def test_a_forked_rank_behaves_like_a_fresh_process(on_ranks):
    first, second = on_ranks(2, describe_process)
    assert first["server"] == second["server"] != os.getpid()
    assert all(mine != other for mine, other in zip(first["random"], second["random"], strict=True))
    for rank in (first, second):
        assert not rank["bad fork"] and rank["method"] == "spawn" and rank["sum"] == 2**20
        assert rank["forked"] == [9] and rank["loaded"] == [0, 1, 4, 9]


def count_threads_of_parent() -> tuple[int, int]:
    return os.getppid(), len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_one_server_with_one_thread_forks_the_ranks_of_every_pool():
    first = paceline.run_ranks(count_threads_of_parent, 2, timeout_s=60)
    second = paceline.run_ranks(count_threads_of_parent, 1, timeout_s=60)
    assert {*first, *second} == {(first[0][0], 1)}


def read_threads() -> tuple[int, str, int]:
    return os.getppid(), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


@pytest.mark.slow
def test_a_server_is_replaced_when_it_is_killed_or_its_imports_are_stale(monkeypatch):
    with paceline.RankPool(1) as pool:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # libraries read it at import
        ((first, *found),) = pool.run(read_threads, timeout_s=60)
        assert found == ["1", 1]
        os.kill(first, signal.SIGKILL)
        with pytest.raises(LaunchError, match="SIGKILL"):
            pool.run(time.sleep, (5,), timeout_s=60)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        ((second, *found),) = pool.run(read_threads, timeout_s=60)
        assert found == ["2", min(2, machine.count_cores())]
    monkeypatch.undo()
    assert len({first, second, *paceline.run_ranks(os.getppid, 1, timeout_s=60)}) == 3


def test_a_rank_writes_to_the_launchers_current_outputs(capfd):
    paceline.run_ranks(print, 1, ("first",), timeout_s=60)
    assert capfd.readouterr().out == "first\n"
    paceline.run_ranks(print, 1, ("second",), timeout_s=60)
    assert capfd.readouterr().out == "second\n"


WITHOUT_TORCH = """
import os, sys
import paceline
if __name__ == "__main__":
    with paceline.RankPool(2) as pool:
        assert len(set(pool.run(os.getpid, timeout_s=60))) == 2
        assert pool.run("torch:is_grad_enabled", timeout_s=60) == [True, True]
    print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_a_launcher_does_not_import_torch(start, tmp_path):
    script = tmp_path / "light.py"
    script.write_text(WITHOUT_TORCH)
    job = start(str(script))
    out, err = job.communicate(timeout=100)
    assert (job.returncode, out) == (0, "False\n"), err


@pytest.mark.slow
def test_ranks_are_spawned_if_they_cannot_be_forked(monkeypatch):
    monkeypatch.setattr(launch, "_can_fork", False)
    with paceline.RankPool(2) as pool:
        assert pool.run(os.getppid, timeout_s=60) == [os.getpid()] * 2
        with pytest.raises(LaunchError, match="KeyError"):
            pool.run(fail_on, (1,), timeout_s=60)


@pytest.mark.slow
def test_a_script_without_a_main_guard_gets_a_hint(start, tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text("import os, paceline\npaceline.run_ranks(os.getpid, 2)\n")
    job = start(str(script))
    _, err = job.communicate(timeout=100)
    assert job.returncode == 1
    assert "must start ranks under `if __name__ == '__main__':`" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_function_typed_at_a_prompt_runs_with_its_globals(start):
    source = "import os, paceline\nk = 3\ndef g(n): return n * k\ndef f(m): return g(int(os.environ['RANK'])) + m\n"
    job = start("-c", source + "print(paceline.run_ranks(f, 2, (1,), timeout_s=60))")
    out, err = job.communicate(timeout=90)
    assert out == "[1, 4]\n", err


def test_unpicklable_arguments_are_named_in_one_line(start):
    source = "import paceline, threading\ndef f(): return lock\nlock = threading.Lock()\n"
    job = start("-c", source + "paceline.run_ranks(f, 2)")
    _, err = job.communicate(timeout=100)
    assert job.returncode == 1 and "f and its arguments cannot be" in err.splitlines()[-1]


def spawn_grandchild(folder: str) -> int:
    if os.environ["RANK"] == "0":
        pid = os.fork()
        if pid == 0:  # keeps every descriptor of its rank open
            time.sleep(30)
            os._exit(0)
        Path(folder, "grandchild").write_text(str(pid))
    else:
        wait_until(lambda: Path(folder, "grandchild").exists())
        return 0
    os._exit(3)


def test_a_grandchild_that_holds_the_link_does_not_hide_a_death(on_ranks, tmp_path):
    try:
        with pytest.raises(LaunchError, match=r"rank 0 of 2 .*code 3"):
            on_ranks(2, spawn_grandchild, str(tmp_path))
    finally:
        os.kill(int((tmp_path / "grandchild").read_text()), signal.SIGKILL)
