"""A session on real ranks: sequential or concurrent tasks, saving and resuming, killed ranks, and interrupts."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import machine
from paceline.errors import ConfigError, LaunchError
from paceline.records.kinds import CollectiveRecord
from paceline.records.samples import Samples
from paceline.records.store import load_run
from paceline.runtime.ranks import session as module
from paceline.runtime.ranks.launch import SAME_REQUEST_S
from paceline.runtime.ranks.place import Place
from paceline.runtime.ranks.session import Progress, ProgressDisplay, Task, open_session
from paceline.runtime.ranks.worker import post
from paceline.studies.batch_sizes import build_killed
from paceline.training.train_settings import TrainSettings
from paceline.verbs.jobs import choose_up_to
from tests.conftest import descendants, wait_until

RECORD = CollectiveRecord(
    collective="all_reduce", backend="gloo", device="cpu", world_size=2, num_bytes=4, dtype="float32", op="sum",
    timing=Samples(seconds=((1e-3, 1e-3),) * 5),
)  # fmt: skip
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def answer(size: int, *_: Any) -> list[Any]:
    return [replace(RECORD, num_bytes=size)]


def answer_slowly(size: int, seconds: float) -> list[Any]:
    for step in range(100):
        post(Progress(step, 100, f"step {step}"))
        time.sleep(seconds / 100)
    return answer(size)


def die(how: str, *_: Any) -> list[Any]:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


def post_cells(num_cells: int, pause_s: float = 0.0) -> str:
    """A function for ranks that posts its own cells."""
    if os.environ["RANK"] == "0":
        for number in range(num_cells):
            post(Progress(number + 1, num_cells, f"cell {number}", tuple(answer(number + 1))))
            time.sleep(pause_s)
    return "value"


def save_on_sigterm() -> str:
    """A function for ranks that saves and returns on SIGTERM, as training does."""
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        post(Progress(0, 1, line="listening"))
        while not came:
            time.sleep(0.02)
    finally:
        signal.signal(signal.SIGTERM, before)
    return "saved"


def wait_deafly() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    post(Progress(0, 1, line="listening"))
    time.sleep(600)


def make_task(size: int, how: str = "", **options: Any) -> Task:
    function, arguments = (die, (how, size)) if how else (answer, (size,))
    return Task(f"cell {size}", function, arguments, on_death=replace_killed, **options)


def replace_killed(error: LaunchError) -> list[Any] | None:
    return [replace(RECORD, note="killed")] if "SIGKILL" in str(error) else None


def open_cells(out: Path | None = None, resume: Path | None = None, **options: Any) -> Any:
    return open_session("scale batch", {"a": 1}, out=out, resume=resume, cells=True, progress=False, **options)


def read_sizes(records: list[Any]) -> list[int]:
    return [record.num_bytes for record in records]


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_run_in_order_and_a_killed_rank_is_replaced(tmp_path):
    with open_cells(tmp_path) as session:
        records = session.run([make_task(4), make_task(8, "killed"), make_task(2)])
        assert read_sizes(records) == [4, 4, 2] and [r.note for r in records] == ["", "killed", ""]
        run = session.save(records)
    assert load_run(session.folder) == run and run.records == tuple(records) and run.config["a"] == 1
    # The run is complete: no rank is started, and the saved run is returned.
    with open_cells(resume=session.folder) as again:
        assert again.is_finished and again.save(()) == run and not again._pools


def test_a_rank_that_exits_ends_the_run_and_a_resumed_one_measures_what_is_missing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(module, "find_doubts", lambda *_: [])
    with pytest.raises(LaunchError, match="code 3"), open_cells(tmp_path) as session:
        session.run([make_task(4), make_task(8, "exited"), make_task(2)])
    how = f"1 of 3 cells saved; resume with: paceline scale batch --resume {session.folder}"
    assert f"paceline: stopped by an error: {how}" in capfd.readouterr().err
    (kept,) = (session.folder / "cells").iterdir()
    before = kept.stat().st_mtime_ns
    with open_cells(resume=session.folder) as again:
        assert read_sizes(again.run([make_task(4, "exited"), make_task(8), make_task(2)])) == [4, 8, 2]
        run = again.save(again.run([make_task(4), make_task(8), make_task(2)]))
    assert kept.stat().st_mtime_ns == before and len(run.records) == 3 and run.warnings == ()


def test_arguments_may_depend_on_earlier_records(tmp_path):
    def double(records: Any) -> tuple[Any, ...]:
        return (2 * max(read_sizes(records)),)

    with open_cells(tmp_path) as session:
        tasks = [make_task(4), make_task(6), Task("last", answer, follow=double)]
        assert read_sizes(session.run(tasks)) == [4, 6, 12]


@pytest.mark.parametrize("at_once", [1, 2])
def test_concurrent_tasks_may_depend_on_all_earlier_records(tmp_path, at_once):
    seen: list[list[int]] = []

    def add(records: Any) -> tuple[Any, ...]:
        seen.append(read_sizes(records))
        return (sum(seen[-1]),)

    with open_cells(tmp_path) as session:
        first, second = Task("sum", answer, follow=add), Task("all", answer, follow=add)
        tasks = [make_task(4), make_task(6), first, make_task(1), second]
        assert read_sizes(session.run(tasks, at_once=at_once)) == [4, 6, 10, 1, 21]
    assert seen == [[4, 6], [4, 6, 10, 1]]


def test_concurrent_tasks_keep_their_order(tmp_path):
    sizes = [5, 3, 9, 1, 7]
    with open_cells(tmp_path) as session:
        records = session.run([make_task(size, "killed" if size == 3 else "") for size in sizes], at_once=2)
        assert read_sizes(records) == [5, 4, 9, 1, 7] and session.study.count() == 5
        with pytest.raises(LaunchError, match="code 3"):
            session.run([make_task(11), make_task(12, "exited"), make_task(13)], at_once=2)
        assert session.study.find("cell 12") is None and not session._pools


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_cells() as session:
        run = session.save(session.run([make_task(4)]))
    assert read_sizes(run.records) == [4] and session.folder is None and list(tmp_path.iterdir()) == []


def test_an_unused_folder_is_removed(tmp_path, capfd):
    with pytest.raises(ConfigError), open_cells(tmp_path):
        raise ConfigError("refused late")
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        (("here", "here"), None),
        (("there", "there"), "measured on there, but the environment saved with this run is here"),
        (("here", "there"), "1 cell on here; 1 cell on there"),
    ],
)
def test_a_run_on_several_machines_names_them(tmp_path, monkeypatch, machines, expected):
    monkeypatch.setattr(module, "find_doubts", lambda *_: [])
    monkeypatch.setattr(module.Environment, "machine_and_torch", "begun")
    with open_cells(tmp_path) as session:
        monkeypatch.setattr(module.Environment, "machine_and_torch", "here")
        for size, machine in zip((4, 8), machines, strict=True):
            session.study.keep(f"cell {size}", answer(size), machine)
        run = session.save(session.run([make_task(4), make_task(8)]))
    assert len(run.warnings) == (expected is not None) and (expected is None or expected in run.warnings[0])


def test_times_are_not_resumed_on_another_machine(tmp_path, monkeypatch):
    with open_cells(tmp_path) as session:
        session.run([make_task(4)])
    monkeypatch.setattr(module.Environment, "machine_and_torch", "a faster box")
    with (
        pytest.raises(ConfigError, match="a faster box") as caught,
        open_cells(resume=session.folder, same_machine=True),
    ):
        pytest.fail("it was resumed")
    assert caught.value.code == "other-machine"
    with open_cells(resume=session.folder) as again:
        assert again.study.count() == 1


def test_a_folder_is_locked_for_one_process(tmp_path):
    with open_cells(tmp_path) as session, pytest.raises(ConfigError) as caught, open_cells(resume=session.folder):
        pytest.fail("both would measure the same cells")
    assert caught.value.code == "locked"


def test_parts_are_started_resumed_and_reported_with_the_whole_run(tmp_path, capfd):
    def make(session: Any, how: str) -> None:
        with session.open_part("one", "scale batch", {}) as part:
            if not part.is_finished:
                part.save(part.run([make_task(4), make_task(8)]))
        with session.open_part("two", "scale ranks", {}) as part:
            part.save(part.run([make_task(2), make_task(3, how)]))

    def open_whole(**options: Any) -> Any:
        return open_session("scale report", {}, progress=False, can_resume=True, **options)

    with pytest.raises(LaunchError), open_whole(out=tmp_path) as session:
        make(session, "exited")
    assert (
        f"one (finished), two (1 of 2 cells) saved; resume with: paceline scale report --resume {session.folder}"
        in capfd.readouterr().err
    )
    with open_whole(resume=session.folder) as session:
        make(session, "")
    assert [len(load_run(session.folder / name).records) for name in ("one", "two")] == [2, 2]


def test_a_batch_whose_ranks_were_killed_is_a_row():
    job = TrainSettings(data="synthetic:images", device="cpu", threads=2)
    (row,) = build_killed(job, 8, LaunchError("rank 0 was killed", code="killed"))
    assert build_killed(job, 8, LaunchError("rank 0 failed")) is None
    assert (row.batch_size, row.data, row.device, row.threads, row.timing) == (8, "synthetic:images", "cpu", 2, None)
    assert row.failure == "killed, probably by the kernel's out-of-memory killer"


# -- prompts and progress ---------------------------------------------------------------------------------------------


def test_ask_returns_the_value_of_rank_0_and_shows_its_cells(tmp_path, capfd):
    with open_session("bench x", {}, ranks=2, out=tmp_path, progress=True) as session:
        assert session.ask(post_cells, (3,)) == "value"
        session.save(answer(1))
    # A slow machine also prints the time left.
    lines = [line.partition(", about ")[0] for line in capfd.readouterr().err.splitlines()]
    lines = [line for line in lines if line.startswith("paceline: bench x: ")]  # others may try to connect
    assert lines == [f"paceline: bench x: {number + 1} of 3 cells (cell {number})" for number in range(3)]


def test_only_long_runs_announce_their_time(capfd):
    for times_s, said in (((100.0, 50.0), "2 min 30 s"), ((10.0, 5.0), ""), ((None, 5.0), "2 cells"), ((None,), "")):
        tasks = [Task(f"cell {n}", answer, (n + 1,), expected_s=time_s) for n, time_s in enumerate(times_s)]
        with open_session("test", {}, progress=True, here=True) as session:
            session.run(tasks)
        first = capfd.readouterr().err.splitlines()[0]
        assert said in first and ("Ctrl-C" in first) == bool(said)


def test_progress_lines_estimate_the_time_left(capfd):
    display = ProgressDisplay("scale batch", True, [make_task(4), make_task(8)])
    display._begin_s -= 10  # as if the first task had taken this long
    display.finish("cell 4", [])
    display.finish("cell 8", [])
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("1 of 2 cells (cell 4), about 10 s left") and second.endswith("2 of 2 cells (cell 8)")


def test_progress_lines_name_a_cell_once(capfd):
    display = ProgressDisplay("scale batch", True, [make_task(4), make_task(8)])
    for label in ("cell 4", "step 3", ""):
        display._line_s = -math.inf  # makes each line due
        display.hear("cell 4", Progress(1, 2, label))
    lines = [line.split("(")[1].split(")")[0] for line in capfd.readouterr().err.splitlines()]
    assert lines == ["cell 4", "cell 4 step 3", "cell 4"]


@pytest.mark.parametrize("progress", [None, False])
def test_progress_is_silent_by_default_without_a_terminal(capfd, progress):
    with open_session("bench x", {}, ranks=1, progress=progress) as session:
        session.ask(post_cells, (2,))
        session.run([make_task(4)])
    assert capfd.readouterr() == ("", "")


def test_progress_lines_name_finished_and_saved_tasks(tmp_path, capfd):
    def run(**options: Any) -> Any:
        with open_session("scale batch", {}, cells=True, progress=True, **options) as session:
            session.run([make_task(4), make_task(8)], lambda records: f"{records[0].num_bytes} bytes")
        return session

    session = run(out=tmp_path)
    assert "paceline: scale batch: 2 of 2 cells (cell 8: 8 bytes)" in capfd.readouterr().err
    next((session.folder / "cells").glob("cell-8.json")).unlink()
    run(resume=session.folder)
    err = capfd.readouterr().err
    assert "1 of 2 cells already saved" in err and "2 of 2 cells (cell 8: 8 bytes)" in err and "(cell 4" not in err


# -- launched worlds ---------------------------------------------------------------------------------------------------


@pytest.fixture
def launch(monkeypatch):
    def launch(rank: int | None, world_size: int = 0) -> None:
        for name in LAUNCH_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world_size))

    monkeypatch.setattr("paceline.runtime.ranks.world.share_first", lambda place, value: value)  # no other rank exists
    launch(None)
    return launch


@pytest.mark.parametrize(
    ("world_size", "requested", "expected", "left_out"),
    [
        (None, None, (2,), ""), (None, (3, 4), (3, 4), ""), (4, None, (4,), ""), (4, (2, 4), (2, 4), ""),
        (4, (2, 8, 16), (2,), "8, 16 ranks"), (1, (2, 4), (2, 4), ""), (1, None, (1,), ""),
    ],
)  # fmt: skip
def test_numbers_of_ranks_are_limited_by_the_launched_world(launch, world_size, requested, expected, left_out):
    if world_size is not None:
        launch(0, world_size)
    ranks, notes = choose_up_to(requested, 2)
    assert ranks == expected and len(notes) == bool(left_out) and all(left_out in note for note in notes)


def test_a_launched_world_that_is_too_small_is_refused(launch):
    launch(0, 2)
    with pytest.raises(ConfigError) as caught:
        choose_up_to((4, 8), 2)
    assert caught.value.code == "launched"
    with pytest.raises(ConfigError) as caught, open_session("bench x", {}, ranks=4):
        pytest.fail("opened")
    assert caught.value.code == "launched"


def test_in_a_launched_world_only_rank_0_writes_and_shows_progress(launch, tmp_path, capfd):
    for rank in (1, 0):
        launch(rank, 2)
        with open_session("scale batch", {}, ranks=2, out=tmp_path, cells=True, progress=True) as session:
            assert read_sizes(session.run([make_task(4, ranks=2)])) == [4] and not session._pools
            assert session.save(answer(4)).records == tuple(answer(4)) and session.is_leader == (rank == 0)
        assert bool(list(tmp_path.iterdir())) == bool(capfd.readouterr().err) == (rank == 0)
    launch(1, 2)  # reads the saved tasks
    with open_session("scale batch", {}, ranks=2, resume=session.folder, cells=True) as reader:
        assert reader.is_finished and reader.save(()).records == tuple(answer(4))
        with pytest.raises(ConfigError) as caught:
            reader.run([make_task(9)], at_once=2)
        assert caught.value.code == "launched"


def test_a_launched_world_of_one_starts_the_ranks_that_are_requested(launch):
    launch(0, 1)
    with open_session("bench x", {}, ranks=2) as session:
        assert session.place is None
    with open_session("bench x", {}, ranks=1) as session:
        assert session.place is not None


# -- interrupts --------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from paceline.cli.main import main
from paceline.cli import main as cli
from paceline.runtime.ranks.session import Task, open_session
from tests.dist.test_session import answer, answer_slowly, post_cells, save_on_sigterm, wait_deafly

@cli.app.command("play")
def play(what: str):
    if what == "cells":
        with open_session("scale batch", {}, out="runs", cells=True, progress=True) as session:
            session.run([Task("quick", answer, (4,)), Task("slow", answer_slowly, (8, 600.0))])
    elif what == "posted":
        with open_session("bench x", {}, out="runs", progress=True) as session:
            session.ask(post_cells, (3, 300.0))
    elif what == "nothing":
        with open_session("scale batch", {}, out="runs", cells=True, progress=True) as session:
            print("paceline: open", file=sys.stderr, flush=True)
            session.run([Task("slow", answer_slowly, (8, 600.0))])
    elif what == "save":
        with open_session("train", {}, ranks=2, out="runs", progress=True, can_resume=True) as session:
            value = session.ask(save_on_sigterm, saves=True)
            print(value, session.signal)
    elif what == "deaf":
        with open_session("train", {}, ranks=2, out="runs", progress=True, can_resume=True) as session:
            session.saved = lambda: "step 40"
            session.ask(wait_deafly, saves=True)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def play(start, tmp_path):
    """`play(what, until)`: start the program and wait for this output."""
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])

    def play(what: str, until: str) -> Any:
        job = start("program.py", "play", what, env=os.environ | {"PYTHONPATH": path})
        wait_until(lambda: until in job.stderr.readline())
        return job

    return play


def finish(job: Any, number: int) -> tuple[str, str]:
    below = descendants(job.pid)
    os.killpg(job.pid, number)
    out, err = job.communicate(timeout=100)
    wait_until(lambda: not [process for process in below if process.is_running()])
    assert "Traceback" not in err, err
    return out, err


@pytest.mark.slow  # tests/cli interrupts commands and resumes them
@pytest.mark.parametrize(
    ("number", "what", "until", "kept"),
    [
        (signal.SIGINT, "cells", "1 of 2 cells", "1 of 2 cells saved; resume with: paceline scale batch --resume "),
        (signal.SIGTERM, "posted", "1 of 3 cells", "1 of 3 cells saved in runs/"),
        (signal.SIGINT, "nothing", "paceline: open", "nothing was saved"),
    ],
)
def test_an_interrupt_reports_what_is_saved(play, tmp_path, number, what, until, kept):
    job = play(what, until)
    _, err = finish(job, number)
    assert job.returncode == 128 + number
    (line,) = [line for line in err.splitlines() if "interrupted" in line]
    assert line.startswith(f"paceline: interrupted: {kept}")
    folders = list((tmp_path / "runs").iterdir())
    if what == "nothing":
        assert folders == []
    elif what == "posted":
        run = load_run(folders[0])
        assert not run.complete and len(run.records) == 1
    else:
        assert json.loads((folders[0] / "cells" / "quick.json").read_text())["cell"] == "quick"


@pytest.mark.slow
def test_ranks_are_asked_to_save_and_stop(play):
    job = play("save", "listening")
    job.stderr.readline()  # output of the other rank
    out, err = finish(job, signal.SIGTERM)
    assert (job.returncode, out.split()) == (0, ["saved", "15"]) and "interrupt again" in err


@pytest.mark.slow
def test_the_second_interrupt_ends_ranks_that_do_not_listen(play):
    job = play("deaf", "listening")
    job.stderr.readline()
    job.send_signal(signal.SIGINT)
    wait_until(lambda: "interrupt once more" in job.stderr.readline())
    time.sleep(SAME_REQUEST_S + 0.2)
    _, err = finish(job, signal.SIGINT)
    assert job.returncode == 130
    assert "paceline: interrupted: step 40 saved; resume with: paceline train --resume runs/" in err


def test_a_run_records_the_stolen_time(monkeypatch):
    times_s = iter((100.0, 100.0 + 0.5 * (os.cpu_count() or 1), 200.0))
    monkeypatch.setattr(machine, "read_stolen_s", lambda: next(times_s))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: 5.0))
    with open_session("bench allreduce", {}, ranks=2) as session:
        run = session.save([RECORD])
        assert run.environment.stolen == pytest.approx(0.5)  # of a second, the shortest time that is counted
        assert any("the hypervisor stole 50% of CPU time" in text for text in run.warnings)
        launched = replace(session, place=Place(1, 2, 1, 2, "torchrun"))
        assert launched.save([RECORD]).environment.stolen is None  # each rank would measure a different fraction


def test_untimed_runs_record_no_load_and_parts_the_load_of_the_whole_run(monkeypatch):
    loads = iter((16.0, 0.0, 99.0))
    monkeypatch.setattr("paceline.machine.find_load", lambda: next(loads))
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(machine, "read_stolen_s", lambda: 0.0)
    with open_session("scale report", {}) as whole:
        assert whole.save([RECORD]).warnings == (
            "the machine was busy before the run (load 16.0 on 2 cores): the times may include other work",
        )
        whole.is_timed = False
        run = whole.save([RECORD])
        assert run.warnings == () and run.environment.load_average is None and run.environment.stolen is None
    with open_session("scale report", {}) as quiet, open_session("scale batch", {}) as part:
        part.share_load(quiet)  # otherwise it would see the load of the previous parts
        assert part.save([RECORD]).warnings == ()
