"""A study that is interrupted and resumed, or has concurrent runs, equals an undisturbed one."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from paceline import load_run
from paceline.records import LargeBatchRecord, Record
from paceline.records.environment import Environment
from paceline.records.store import Study
from paceline.runtime.ranks.session import Session
from paceline.studies import scale
from tests.cli.test_scale import BATCH, LARGE, PICTURES, RANKS, TINY, assert_links
from tests.cli.test_train import type_alone, type_command
from tests.cli.test_train_bad_input import assert_refused
from tests.cli.test_train_stops import gone
from tests.conftest import descendants, wait_until

pytestmark = pytest.mark.slow

# Long enough that a signal arrives in the middle of it, on one rank.
LONG = (
    "scale", "large-batch", *TINY, "--samples", "160", "--test-samples", "16", "--base-batch-size", "2",
    "--global-batch-size", "4", "--recipes", "none", "--seeds", "5", "--epochs", "1", "--evaluations", "1",
    "--updates", "0", "--out", "out",
)  # fmt: skip


def read_run(out: str) -> Path:
    return Path(json.loads(out)["run"])


def list_records(folder: Path) -> list[Record]:
    """The findings of a run, without durations."""
    found: list[Record] = []
    for record in load_run(folder).records:
        if isinstance(record, LargeBatchRecord):
            curve = tuple(dataclasses.replace(point, seconds=1.0) for point in record.curve)
            record = dataclasses.replace(record, seconds=1.0, curve=curve)
        found.append(record)
    return found


def list_cells(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "cells").glob("*.json")}


@pytest.fixture
def whole(studies) -> Path:
    """The folder of the undisturbed study, with sequential runs in this process."""
    return Path(studies["large-batch"]["run"])


def break_off(whole: Path, folder: Path, lost: set[str]) -> Path:
    """A copy of the study as if it had ended before these cells."""
    shutil.copytree(whole, folder)
    for path in folder.iterdir():
        if path.is_file() and path.name != "study.json":
            path.unlink()
    for name in lost:
        (folder / "cells" / f"{name}.json").unlink()
    return folder


def look_at(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (folder / "cells").iterdir()}


def test_a_resumed_study_is_the_one_that_never_stopped(whole, tmp_path):
    lost = {"epochs-4-none-seed-1", "epochs-16-none-seed-2", "updates-4-none-seed-1"}
    folder = break_off(whole, tmp_path / "broken", lost)
    (folder / "cells" / ".epochs-4-none-seed-1.json.1234").write_text("half of a fi")
    before = look_at(folder)
    answer = type_alone("scale", "large-batch", "--resume", str(folder))
    assert answer.code == 0, answer.err
    assert "7 of 10 cells" in answer.err and "10 of 10 cells" in answer.err
    assert list_records(folder) == list_records(whole)
    kept = look_at(folder)
    assert {name: kept[name] for name in before} == before and list_cells(folder) == list_cells(whole)
    wanted = {path.name for path in whole.iterdir()}
    assert {path.name for path in folder.iterdir()} == wanted
    assert (folder / "noise.csv").read_bytes() == (whole / "noise.csv").read_bytes()


@pytest.mark.slow
def test_concurrent_runs_give_the_same_results(whole, tmp_path):
    answer = type_command(*LARGE, "--at-once", "2", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert list_records(read_run(answer.out)) == list_records(whole)


def test_a_study_with_all_cells_finished_runs_nothing(whole, tmp_path):
    folder = break_off(whole, tmp_path / "broken", set())
    before = look_at(folder)
    for _ in range(2):  # the second time, the study is complete and needs no rank
        answer = type_alone("scale", "large-batch", "--resume", str(folder), "--json")
        assert answer.code == 0, answer.err
        assert load_run(folder).records == load_run(whole).records and look_at(folder) == before
        assert read_run(answer.out) == folder


def test_a_damaged_cell_is_named_and_nothing_is_lost(whole, tmp_path):
    folder = break_off(whole, tmp_path / "broken", {"epochs-16-none-seed-2"})
    damaged = folder / "cells" / "updates-16-none-seed-1.json"
    damaged.write_text(damaged.read_text()[:-40])
    before = look_at(folder)
    answer = type_alone("scale", "large-batch", "--resume", str(folder))
    assert answer.code == 2 and f"{damaged} is not the cell" in answer.err.replace("\n", " ")
    assert "delete it to measure that cell again" in answer.err and look_at(folder) == before


def stop_in_the_middle(job: subprocess.Popen[str], out: Path) -> tuple[Path, str]:
    """Ctrl-C during a cell, after some are finished; returns (the folder, the output)."""

    def count() -> int:
        return len(list(out.glob("*/cells/*.json")))

    wait_until(lambda: job.poll() is not None or count() >= 2)
    assert job.poll() is None, job.communicate()
    below = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 130, err
    assert "Traceback" not in err
    wait_until(lambda: gone(below))
    (folder,) = out.iterdir()
    return folder, err


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_resume(start, tmp_path):
    job = start("-m", "paceline", *LONG, "--at-once", "2")
    folder, err = stop_in_the_middle(job, tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {"study.json", "cells"}
    before = look_at(folder)
    assert 2 <= len(before) < 10 and not [name for name in before if name.startswith(".")]
    place = Path("out") / folder.name
    words = f"interrupted: {len(before)} of 10 cells saved; resume with: paceline scale large-batch --resume {place}"
    assert words in err
    # The number of concurrent runs may have changed; a launched world allows one.
    answer = type_alone("scale", "large-batch", "--resume", str(folder), "--at-once", "1", "--json")
    assert answer.code == 0, answer.err
    after = look_at(folder)
    assert {name: after[name] for name in before} == before and len(after) == 10
    assert len(load_run(folder).records) == 10 + 4


def test_ctrl_c_before_the_first_cell_leaves_nothing(start, tmp_path):
    job = start("-m", "paceline", *LONG)
    wait_until(lambda: list((tmp_path / "out").glob("*/study.json")))
    below = wait_until(lambda: descendants(job.pid))
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 130 and "Traceback" not in err, err
    wait_until(lambda: gone(below))
    assert not list((tmp_path / "out").iterdir()) and "resume with" not in err


# -- replayed cells ----------------------------------------------------------------------------------------------------


@pytest.fixture
def play(monkeypatch, studies):
    """`play(n)`: replay cells from the finished studies without starting ranks; Ctrl-C arrives before the n-th.

    Returns a list that collects the names of the cells run from then on.
    """

    def begin(num_cells: int = -1) -> list[str]:
        made: list[str] = []

        def answer(session, task, display) -> list[Record]:
            if len(made) == num_cells:
                raise KeyboardInterrupt
            made.append(task.name)
            return Study.load(Path(studies[session.verb.removeprefix("scale ")]["run"]), session.verb).find(task.name)

        monkeypatch.setattr(Session, "_call", answer)
        return made

    monkeypatch.setattr(Session, "ask", lambda *_: (48, False))  # the batch size found by the survey of LARGE
    return begin


def read_hint(err: str) -> tuple[str, str, Path]:
    """The saved output, the verb to resume, and the folder; the hint must appear exactly once."""
    ((kept, verb, path),) = re.findall(r"interrupted: (.+) saved; resume with: paceline (scale .+) --resume (.+)", err)
    return kept, verb, Path(path)


@pytest.mark.parametrize(("name", "asked"), [("batch", BATCH), ("ranks", RANKS), ("large-batch", LARGE)])
def test_every_study_is_resumed_and_is_the_run_of_its_first_command(play, studies, tmp_path, name, asked):
    command = (*asked, "--out", str(tmp_path))
    made = play(1)
    answer = type_command(*command)
    assert answer.code == 130, answer.err
    kept, verb, folder = read_hint(answer.err)
    count = len(list_cells(Path(studies[name]["run"])))
    assert (kept, verb) == (f"1 of {count} cells", f"scale {name}") and len(made) == 1
    before = look_at(folder)
    rest = play()
    answer = type_command("scale", name, "--resume", str(folder), "--json")
    assert answer.code == 0, answer.err
    after = look_at(folder)
    assert {cell: after[cell] for cell in before} == before and not set(made) & set(rest)
    assert len(after) == 1 + len(rest) == len(list_cells(Path(studies[name]["run"])))
    run = load_run(folder)
    assert run.records == load_run(studies[name]["run"]).records
    assert run.environment.command_line == " ".join(("paceline", *command))
    assert not any("more than one machine" in warning for warning in run.warnings)
    page = (folder / "report.md").read_text()
    assert f"`{run.environment.command_line}`" in page and "--resume" not in page


def test_a_resumed_study_has_as_many_runs_at_once_as_before(play, monkeypatch, tmp_path):
    seen, run = [], Session.run

    def note(session, tasks, describe=None, at_once=1):
        seen.append(at_once)
        return run(session, tasks, describe)

    monkeypatch.setattr(Session, "run", note)
    asked = (*LARGE, "--at-once", "2", "--out", str(tmp_path))
    for more in ((), ("--at-once", "3")):
        play(1)
        answer = type_command(*asked)
        assert answer.code == 130, answer.err
        asked = ("scale", "large-batch", "--resume", str(read_hint(answer.err)[2]), *more)
    play()
    assert type_command(*asked).code == 0 and seen == [2, 2, 3]


@pytest.mark.parametrize(
    ("name", "lost", "type_it"),
    [
        ("batch", {"batch-size-8"}, type_alone),
        pytest.param("ranks", {"strong-8", "allreduce"}, type_command, marks=pytest.mark.slow),
    ],
)
def test_only_lost_cells_are_measured_again(studies, tmp_path, name, lost, type_it):
    """Resume with real ranks."""
    whole = Path(studies[name]["run"])
    folder = break_off(whole, tmp_path / "broken", lost)
    before = look_at(folder)
    answer = type_it("scale", name, "--resume", str(folder), "--json")
    assert answer.code == 0, answer.err
    after = look_at(folder)
    assert {cell: after[cell] for cell in before} == before and list_cells(folder) == list_cells(whole)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    there, here = load_run(whole).records, load_run(folder).records
    assert [type(record) for record in here] == [type(record) for record in there]
    assert 0 < sum(a != b for a, b in zip(here, there, strict=True)) < len(there)


def test_a_study_resumed_on_another_machine_reports_it(whole, monkeypatch, tmp_path):
    """Accuracy does not depend on the machine, but the reader should know that the machine changed."""
    folder = break_off(whole, tmp_path / "broken", {"epochs-16-none-seed-2"})
    monkeypatch.setattr(Environment, "machine_and_torch", property(lambda environment: "a faster box"))
    answer = type_alone("scale", "large-batch", "--resume", str(folder), "--json")
    assert answer.code == 0, answer.err
    run = load_run(folder)
    (warning,) = (warning for warning in run.warnings if "more than one machine" in warning)
    assert f"9 cells on {run.config['machine']}; 1 cell on a faster box" in warning
    assert warning in json.loads(answer.out)["warnings"]
    assert f"\n- {warning}\n" in (folder / "report.md").read_text().split("## Warnings")[1]
    answer = type_command("scale", "report", str(folder), "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert f"`scale large-batch`: {warning}" in json.loads(answer.out)["warnings"]


def test_runs_at_once_in_a_launched_world_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert_refused(type_alone(*LARGE, "--at-once", "2"), "--at-once 2 in a launched world")


# -- the combined report -----------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch, studies) -> None:
    """Request the three parts of `scale report` with the settings of the finished studies."""
    for name in studies:
        kind = scale.STUDIES[name]
        settings = kind.from_json(load_run(studies[name]["run"]).config)
        monkeypatch.setattr(kind, "build", lambda settings=settings, **_: settings)


def assert_whole(folder: Path, studies: dict[str, dict], command_line: str) -> None:
    """The page and its parts equal the finished studies, and all belong to one command."""
    assert {path.name for path in folder.iterdir()} == {
        "batch", "ranks", "large-batch", "report.md", "report.json", "run.json",
    }  # fmt: skip
    for name, document in studies.items():
        run = load_run(folder / name)
        assert run.records == load_run(document["run"]).records and run.environment.command_line == command_line
        assert {path.name for path in (folder / name).iterdir()} == {
            path.name for path in Path(document["run"]).iterdir()
        }
    names = [f"{picture}.png" for pictures in PICTURES.values() for picture in pictures]
    assert_links(folder / "report.md", set(names))


def test_a_report_measures_all_three_studies(play, small, studies, tmp_path):
    made = play()
    command = ("scale", "report", "--json", "--out", str(tmp_path))
    answer = type_command(*command)
    assert answer.code == 0, answer.err
    (folder,) = tmp_path.iterdir()
    assert_whole(folder, studies, " ".join(("paceline", *command)))
    document = json.loads(answer.out)
    assert document == json.loads((folder / "report.json").read_text())
    assert document["runs"] == [str(folder / name) for name in studies]
    assert len(made) == sum(len(list_cells(Path(study["run"]))) for study in studies.values())
    assert "interrupted" not in answer.err


@pytest.mark.slow
def test_a_report_is_resumed_wherever_it_was_interrupted(play, small, studies, monkeypatch, tmp_path):
    counts = {name: len(list_cells(Path(study["run"]))) for name, study in studies.items()}
    command = ("scale", "report", "--out", str(tmp_path))
    play(0)
    answer = type_command(*command)
    assert answer.code == 130 and "resume with" not in answer.err and not list(tmp_path.iterdir())
    asked, made = command, []
    for more, wanted in (
        (1, f"batch (1 of {counts['batch']} cells)"),
        (counts["batch"] - 1, "batch (finished)"),  # before the first cell of the next part
        (2, f"batch (finished), ranks (2 of {counts['ranks']} cells)"),
    ):
        now = play(more)
        answer = type_command(*asked)
        made += now
        assert answer.code == 130, answer.err
        kept, verb, folder = read_hint(answer.err)
        assert (kept, verb) == (wanted, "scale report") and not (folder / "report.md").exists()
        asked = ("scale", "report", "--resume", str(folder))
    now = play()
    with monkeypatch.context() as patch:  # the last records are saved, but the figures are not drawn

        def stop(session, result) -> None:
            if result.run.verb == "scale large-batch":
                raise KeyboardInterrupt
            write(session, result)

        write = Session.write
        patch.setattr(Session, "write", stop)
        answer = type_command(*asked)
    made += now
    assert answer.code == 130, answer.err
    assert read_hint(answer.err)[0] == "batch (finished), ranks (finished), large-batch (finished)"
    assert play() == [] and len(made) == len(set(made)) == sum(counts.values())
    answer = type_command(*asked)
    assert answer.code == 0 and "interrupted" not in answer.err, answer.err
    assert_whole(folder, studies, " ".join(("paceline", *command)))
