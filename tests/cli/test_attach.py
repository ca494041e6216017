"""`paceline profile -- COMMAND`, `tune -- COMMAND`, `watch -- COMMAND`: their arguments, and one real program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import _join_lists

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_arguments_after_the_dashes_belong_to_the_program():
    typed = ["profile", "--steps", "9", "--", "python", "train.py", "--trace", "a", "b", "--channels", "1", "2"]
    assert _join_lists(typed) == ["profile", "attach", *typed[1:]]
    for words in (["profile", "attach", "--", "x"], ["tune", "--", "x"], ["profile", "phases"], ["--version"]):
        assert _join_lists(words) == words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["profile", "--"], "no command"),
        (["profile", "--", "no-such-program-here"], "no-such-program-here"),
        (["profile", "--steps", "3", "--", sys.executable], "--steps 3"),
        (["profile", "--stop", "--steps", "0", "--", sys.executable], "--stop"),
        (["tune", "--model", "cnn", "--", sys.executable], "--model"),
        (["tune", "--steps", "9"], "--steps"),
        (["watch", "--every", "0", "--", sys.executable, "-c", "pass"], "every"),
        (["profile", "--", sys.executable, "-c", "pass"], "import torch"),
        (["profile", "--", sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
    ],
)
def test_programs_that_cannot_be_observed_are_refused_in_one_line(command, tmp_path, words, found):
    place = words.index("--") if "--" in words else len(words)
    answer = command(*words[:place], "--out", str(tmp_path / "runs"), *words[place:])
    lines = [line for line in answer.err.splitlines() if not line.startswith("paceline: profile attach: observing")]
    assert (answer.code, answer.out, len(lines)) == (2, "", 1) and found in lines[0], answer.err
    assert not list((tmp_path / "runs").glob("*"))


def test_a_program_that_starts_its_ranks_is_profiled_and_stopped(command, tmp_path):
    program = [sys.executable, str(SCRIPTS / "mixed_precision.py"), "--steps", "400", "--save", str(tmp_path / "w.pt")]
    answer = command("profile", "--steps", "20", "--stop", "--json", "--out", str(tmp_path / "runs"), "--", *program)
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert not (tmp_path / "w.pt").exists()  # the program was stopped early
    assert (document["world_size"], document["backend"], document["device"]) == (2, "gloo", "cpu")
    assert document["step_s"] > document["exposed_s"] >= 0 and len(document["where"]) == 2
    assert (
        document["verdict"] in ("use", "keep", "flat", "undecided")
        and document["gain_low"] <= document["gain"] <= document["gain_high"]
    )
    assert bool(document["lines"]) == (document["verdict"] == "use")
    folder = Path(document["run"])
    assert {"run.json", "where.md", "caps.csv", "trace.json.gz"} <= {path.name for path in folder.iterdir()}
    again = paceline.load_result(folder)
    assert again.to_json() == document and again.config["command"] == program
    (steps,) = [record for record in again.records if record.kind == "step"]
    assert steps.timing.num_ranks == 2 and steps.model == "Sequential" and sum(steps.bucket_bytes) == 396_292
