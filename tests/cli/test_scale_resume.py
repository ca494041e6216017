"""A large-batch study that is broken off and goes on, or has several runs at once, is the study that never was."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from paceline import load_run
from paceline.records import LargeBatchRecord, Record
from tests.cli.test_scale import TINY
from tests.cli.test_train import type_alone, type_command
from tests.cli.test_train_stops import gone
from tests.conftest import descendants, wait_until

STUDY = (
    "scale", "large-batch", *TINY, "--samples", "40", "--test-samples", "16", "--base-batch-size", "4",
    "--global-batch-size", "16", "--recipes", "lamb,grow", "--seeds", "1", "--epochs", "2", "--evaluations", "2",
    "--updates", "3",
)  # fmt: skip
NAMES = {
    "epochs-4-none-seed-1", "epochs-16-none-seed-1", "epochs-16-lamb-seed-1", "epochs-16-grow-seed-1",
    "updates-4-none-seed-1", "updates-16-none-seed-1",
}  # fmt: skip
# Long enough that a signal comes in the middle of it, on one rank.
LONG = (
    "scale", "large-batch", *TINY, "--samples", "160", "--test-samples", "16", "--base-batch-size", "2",
    "--global-batch-size", "4", "--recipes", "none", "--seeds", "5", "--epochs", "1", "--evaluations", "1",
    "--updates", "0", "--out", "out",
)  # fmt: skip


def read_run(out: str) -> Path:
    return Path(json.loads(out)["run"])


def list_records(folder: Path) -> list[Record]:
    """What a run found, without how long that took."""
    return [
        dataclasses.replace(record, seconds=1.0) if isinstance(record, LargeBatchRecord) else record
        for record in load_run(folder).records
    ]


def list_cells(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "cells").glob("*.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of the undisturbed study, one run after the other in this process."""
    answer = type_alone(*STUDY, "--json", "--out", str(tmp_path_factory.mktemp("runs")))
    assert answer.code == 0, answer.err
    folder = read_run(answer.out)
    assert list_cells(folder) == NAMES
    return folder


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


def test_a_study_that_goes_on_is_the_one_that_never_stopped(whole, tmp_path):
    lost = {"epochs-4-none-seed-1", "epochs-16-grow-seed-1", "updates-4-none-seed-1"}
    folder = break_off(whole, tmp_path / "broken", lost)
    (folder / "cells" / ".epochs-4-none-seed-1.json.1234").write_text("half of a fi")
    before = look_at(folder)
    # How many run at once is not the study's: it may be told anew.
    answer = type_alone("scale", "large-batch", "--resume", str(folder), "--at-once", "2")
    assert answer.code == 0, answer.err
    assert "3 of 6 cells were kept" in answer.err and "6 of 6 cells" in answer.err
    assert list_records(folder) == list_records(whole)
    kept = look_at(folder)
    assert {name: kept[name] for name in before} == before and list_cells(folder) == NAMES
    wanted = {path.name for path in whole.iterdir()}
    assert {path.name for path in folder.iterdir()} == wanted
    for name in ("accuracy.png", "noise.csv"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_several_runs_at_once_find_the_same(whole, tmp_path):
    answer = type_command(*STUDY, "--at-once", "2", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert list_records(read_run(answer.out)) == list_records(whole)


def test_a_study_whose_cells_are_all_there_needs_no_run(whole, tmp_path):
    folder = break_off(whole, tmp_path / "broken", set())
    before = look_at(folder)
    for _ in range(2):  # the second time it is over, and needs no rank
        answer = type_alone("scale", "large-batch", "--resume", str(folder), "--json")
        assert answer.code == 0, answer.err
        assert load_run(folder).records == load_run(whole).records and look_at(folder) == before
        assert read_run(answer.out) == folder


def test_a_damaged_cell_is_named_and_nothing_is_lost(whole, tmp_path):
    folder = break_off(whole, tmp_path / "broken", {"epochs-16-grow-seed-1"})
    damaged = folder / "cells" / "updates-16-none-seed-1.json"
    damaged.write_text(damaged.read_text()[:-40])
    before = look_at(folder)
    answer = type_alone("scale", "large-batch", "--resume", str(folder))
    assert answer.code == 2 and f"{damaged} is not the cell" in answer.err.replace("\n", " ")
    assert "delete it to measure that anew" in answer.err and look_at(folder) == before


def stop_in_the_middle(job: subprocess.Popen[str], out: Path) -> tuple[Path, str]:
    """Ctrl-C while a cell runs, after some are finished; (the folder, what it said)."""

    def count() -> int:
        return len(list(out.glob("*/cells/*.json")))

    wait_until(lambda: job.poll() is not None or count() >= 2, 60)
    assert job.poll() is None, job.communicate()
    below = descendants(job.pid)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130, err
    assert "Traceback" not in err
    wait_until(lambda: gone(below), 10)
    (folder,) = out.iterdir()
    return folder, err


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(start, tmp_path, at_once):
    job = start("-m", "paceline", *LONG, "--at-once", at_once)
    folder, err = stop_in_the_middle(job, tmp_path / "out")
    assert {path.name for path in folder.iterdir()} == {"study.json", "cells"}
    before = look_at(folder)
    assert 2 <= len(before) < 10 and not [name for name in before if name.startswith(".")]
    place = Path("out") / folder.name
    words = f"broken off; {len(before)} finished cells are kept: go on with paceline scale large-batch --resume {place}"
    assert words in err
    if at_once != "1":
        return
    answer = type_command("scale", "large-batch", "--resume", str(folder), "--json")
    assert answer.code == 0, answer.err
    after = look_at(folder)
    assert {name: after[name] for name in before} == before and len(after) == 10
    assert len(load_run(folder).records) == 10 + 4


def test_ctrl_c_before_the_first_cell_leaves_nothing(start, tmp_path):
    job = start("-m", "paceline", *LONG)
    wait_until(lambda: list((tmp_path / "out").glob("*/study.json")), 60)
    below = wait_until(lambda: descendants(job.pid), 60)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130 and "Traceback" not in err, err
    wait_until(lambda: gone(below), 10)
    assert not list((tmp_path / "out").iterdir()) and "go on with" not in err
