"""How studies run their cells on real ranks: in order, several at once, past a killed rank, kept at an error."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.records import BatchRecord
from paceline.records.environment import Environment
from paceline.records.store import Study
from paceline.runtime.session import Task, open_session
from paceline.training.settings import TrainSettings
from paceline.verbs.scale import build_killed

JOB = TrainSettings(data="synthetic:images", device="cpu", threads=2)
ROW = BatchRecord(
    model="cnn", data="synthetic", device="cpu", precision="fp32", threads=1, batch_size=1, num_samples=4, num_steps=4,
    failure="made",
)  # fmt: skip


def answer(batch_size: int) -> list[Any]:
    return [replace(ROW, batch_size=batch_size)]


def die(how: str, *_: Any) -> list[Any]:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


@pytest.fixture
def session(tmp_path):
    """A study under way; its ranks end with the test."""
    with open_session("scale batch", {}, out=tmp_path, progress=False, cells=True) as opened:
        yield opened


def make_task(size: int, how: str = "") -> Task:
    """A cell of one rank: one that answers, or one that dies; its row is that of a batch that did not fit."""
    function, arguments = (die, (how, size)) if how else (answer, (size,))
    return Task(
        f"batch size {size}",
        lambda: function,
        arguments,
        on_death=lambda error: build_killed(JOB, size) if error.code == "killed" else None,
    )


def test_a_killed_rank_is_a_row_and_the_study_goes_on(session):
    records = session.run([make_task(4), make_task(8, "killed"), make_task(2)])
    assert [record.batch_size for record in records] == [4, 8, 2]
    assert [record.failure for record in records] == [
        "made", "killed, as by the kernel when memory is exhausted", "made"
    ]  # fmt: skip
    row = records[1]
    assert (row.data, row.device, row.threads, row.timing) == ("synthetic:images", "cpu", 2, None)
    assert session.study.count() == 3 and session.study.find("batch size 8") == records[1:2]
    # Kept cells are not made again, nor is a rank started for them.
    session.close()
    assert session.run([make_task(8, "exited"), make_task(4, "exited")]) == [records[1], records[0]]
    assert not session._pools


def test_a_rank_that_ends_otherwise_ends_the_study_and_what_is_done_is_kept(session):
    with pytest.raises(LaunchError, match="code 3"):
        session.run([make_task(4), make_task(8, "exited"), make_task(2)])
    assert session.study.count() == 1 and session.study.find("batch size 4") == answer(4)


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        (("here", "here"), None),
        (("there", "there"), "2 cells on there; 0 cells on here"),
        (("here", "there"), "1 cell on here; 1 cell on there"),  # there in between, and back
        ((None, "here"), "1 cell on begun; 1 cell on here"),  # a cell from before machines were named
    ],
)
def test_a_run_of_several_machines_names_them(tmp_path, monkeypatch, machines, wanted):
    monkeypatch.setattr(Environment, "machine_and_torch", property(lambda environment: "here"))
    study = Study.begin(tmp_path, "scale batch", {"machine": "begun"})
    for size, machine in zip((4, 8), machines, strict=True):
        study.keep(f"batch size {size}", answer(size), machine)
    with open_session("scale batch", {}, resume=tmp_path, progress=False, cells=True) as session:
        saved = session.save(session.run([make_task(4), make_task(8)]))
    found = [warning for warning in saved.warnings if "more than one machine" in warning]
    assert len(found) == (wanted is not None) and (wanted is None or wanted in found[0])


def test_several_at_once_keep_their_order(session):
    sizes = [5, 3, 9, 1, 7]
    records = session.run([make_task(size, "killed" if size == 3 else "") for size in sizes], at_once=2)
    assert [record.batch_size for record in records] == sizes and session.study.count() == 5
    with pytest.raises(LaunchError, match="code 3"):
        session.run([make_task(11), make_task(12, "exited"), make_task(13)], at_once=2)
    assert session.study.find("batch size 12") is None and not session._pools
