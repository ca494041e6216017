"""`paceline predict goodput`: from run folders, from specified costs, and one-line errors for missing input."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import load_result
from paceline.records.environment import capture_environment
from paceline.records.kinds import FaultRecord
from paceline.records.store import Run, save_run
from paceline.runtime.faults.monitor import Monitor
from paceline.verbs.predict import predict_goodput
from tests.unit.made_runs import make_folder, make_rows

GOODPUT = ("predict", "goodput")
TYPED = ("--step-seconds", "0.2", "--save-seconds", "0.5", "--restart-seconds", "30")
STALLS_S = (0.9, 0.2, 0.3, 0.4)


def make_fault(**changes):
    fields = {
        "fault": "kill", "system": "train", "backend": "gloo", "ranks": 2, "trial": 0, "rank": 1, "step": 40,
        "detected_s": 0.5, "is_right": True, "ended_s": 1.0, "limit_s": 30.0, "steps_lost": 9, "restart_s": 6.0,
        "left_over": (), "said": "",
    }  # fmt: skip
    return FaultRecord(**(fields | changes))


@pytest.fixture
def trained(tmp_path) -> Path:
    """A run on two ranks with four saves, the first of them slow."""
    folder = make_folder(tmp_path / "trained", make_rows(steps=20))
    rows = [{"step": 5 * n, "stall_s": stall_s, "wait_s": 0.0, "write_s": 1.5} for n, stall_s in enumerate(STALLS_S, 1)]
    (folder / "saves.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def harmed(tmp_path) -> Path:
    faults = (
        make_fault(),
        make_fault(trial=1, detected_s=0.7, ended_s=0.9, restart_s=8.0),
        make_fault(system="torch", restart_s=90.0),
    )
    folder = tmp_path / "harmed"
    folder.mkdir()
    save_run(Run("faults", {}, capture_environment(), faults), folder / "run.json")
    return folder


def test_costs_come_from_the_runs(command, trained, harmed, tmp_path):
    asked = ("--mtbf", "3h", "--ranks", "1024", "--json", "--out", str(tmp_path / "runs"))
    answer = command(*GOODPUT, *asked, str(trained), str(harmed))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    costs = {row["name"]: row["mean_s"] for row in document["costs"]}
    assert costs == pytest.approx({"step": 0.1, "save": 0.3, "write": 1.5, "detect": 0.6, "restart": 7.35}, rel=0.1)
    (row,) = document["policies"]
    assert row["policy"] == document["policy"] == "restart"
    assert 0.95 < row["useful_low"] < row["useful_share"] < row["useful_high"] < 1
    assert row["interval_s"] == document["interval_s"] == pytest.approx((2 * 0.3 * 10800) ** 0.5, rel=0.02)
    assert row["steps_lost_per_fault"] * costs["step"] == pytest.approx(row["interval_s"] / 2 + 1.5, rel=0.05)
    assert (document["mtbf_s"], document["ranks"], document["source"]) == (10800, 1024, "simulated")
    again = load_result(document["run"])
    assert again.answer == document["answer"] and again.interval == (row["useful_low"], row["useful_high"])
    assert {path.name for path in Path(document["run"]).iterdir()} >= {
        "run.json",
        "table.md",
        "costs.csv",
        "goodput.svg",
    }
    assert "<table>" in again._repr_html_()
    page = command("report", document["run"])
    assert page.code == 0 and "1,024 ranks" in (Path(document["run"]) / "report.html").read_text()


def test_typed_costs_replace_measured_ones_and_policies_are_compared(command, trained, tmp_path):
    more = ("--restart-seconds", "30", "--spare-seconds", "2", "--shrink-seconds", "30", "--detect-seconds", "1")
    asked = ("--mtbf-per-rank", "90d", "--ranks", "512", "--out", str(tmp_path))
    answer = command(*GOODPUT, str(trained), *asked, *more, "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["mtbf_s"] == pytest.approx(90 * 86400 / 512)
    assert [row["policy"] for row in document["policies"]] == ["spare", "shrink", "restart"]
    assert document["policies"][0]["idle_ranks"] == 1
    # 8 samples per rank: a global batch of 4,096, which 511 ranks cannot share.
    assert any("256 of 512 ranks continue" in line for line in document["findings"])
    (train,) = load_result(document["run"]).next_steps
    assert train.startswith("paceline run --hosts HOSTS -- paceline train --model gpt2-tiny --batch-size 8 ")
    assert train.endswith(" --save-every auto --mtbf 15188s")
    assert any(line.startswith("spare and shrink work within one host") for line in document["findings"])
    assert any(line.startswith("spare is better than restart") for line in document["findings"])
    restart = next(row for row in document["costs"] if row["name"] == "restart")
    assert restart["source"] == "imported" and restart["mean_s"] == 30


def test_recoveries_of_a_training_run_are_costs_of_policies(trained):
    document = json.loads((trained / "config.json").read_text())
    result = load_result(trained)
    faults = [("spare", 1.1), ("spare", 3.1), ("shrink", 2.1), ("restart", 9.1), ("restart", None), ("stop", None)]
    result.run.config["faults"] = [{"policy": policy, "recovered_s": seconds} for policy, seconds in faults]
    found = predict_goodput(result, mtbf="3h")
    costs = {record.name: record.seconds for record in found.records}
    assert costs["spare"] == pytest.approx((1.0, 3.0), abs=0.05) and len(costs["restart"]) == 1
    assert {row.policy.name for row in found.rows} == {"restart", "spare", "shrink"}
    assert found.faults.ranks == document["settings"]["ranks"]


def test_the_text_has_a_sentence_and_two_tables(command, tmp_path):
    answer = command(*GOODPUT, "--mtbf", "2d", "--ranks", "8", *TYPED, "--details", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    assert answer.out.startswith("8 ranks with a fault every 2 d: with restart, 99.")
    assert "Input costs" in answer.out
    assert "--save-every auto --mtbf 172800s --on-fault restart" in " ".join(answer.out.split())
    assert "left out: spare and shrink" in answer.out
    assert "see docs/faults.md for the model's error" in " ".join(answer.out.split())


def test_without_a_training_run_it_is_assumed_that_all_other_ranks_continue():
    found = predict_goodput(mtbf="3h", ranks=8, step_seconds=1, save_seconds=1, restart_seconds=9, shrink_seconds=1)
    assert found.faults.ranks_after == 7 and "--save-every auto" in found.next_steps[0]
    assert any(line.startswith("assumed: with shrink all other ranks") for line in found.findings)


def test_the_next_command_has_the_interval_if_auto_would_choose_another():
    costs = {"step_seconds": 1, "save_seconds": 1, "restart_seconds": 9, "spare_seconds": 1}
    found = predict_goodput(mtbf="3h", ranks=16, all_lost="20%", repair="1d", **costs)
    assert f" --save-every {found.save_interval_s:.0f}s --on-fault spare --spares 16" in found.next_steps[0]
    assert found.next_steps[0].startswith("paceline train --ranks 16 ")


def test_the_wait_for_the_previous_save_is_not_part_of_a_stall(trained):
    rows = [{"step": n, "stall_s": 3.0, "wait_s": 2.5, "write_s": 9.0} for n in range(5)]
    (trained / "saves.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = predict_goodput(trained, mtbf="3h", restart_seconds=9)
    assert next(one for one in found.records if one.name == "save").seconds == pytest.approx([0.5] * 4)


def test_a_job_without_progress_is_reported(tmp_path):
    result = predict_goodput(mtbf="1s", ranks=8, step_seconds=0.2, save_seconds=0.5, restart_seconds=60)
    assert result.share < 0.01 and "make no progress" in result.answer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (TYPED, "how often do faults occur"),
        ((*TYPED, "--mtbf", "3h", "--mtbf-per-rank", "3h"), "leave one out"),
        ((*TYPED, "--mtbf", "3h"), "how many ranks"),
        ((*TYPED, "--mtbf", "3", "--ranks", "2"), "--mtbf '3' is not a time with a unit"),
        ((*TYPED, "--mtbf", "0h", "--ranks", "2"), "must be above 0"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "0"), "--ranks 0: must be at least 1"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "2", "--all-lost", "0%"), "--all-lost 0"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "2", "--all-lost", "few"), "not a percentage such as 3%"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "2", "--horizon", "0d"), "--horizon 0d: must be above 0"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "2", "--save-seconds", "-1"), "--save-seconds -1.0: must be finite"),
        (
            (*TYPED, "--mtbf", "3h", "--ranks", "2", "--step-seconds", "0"),
            "--step-seconds 0.0: must be finite and above",
        ),
        (
            (*TYPED[2:], "--mtbf", "3h", "--ranks", "2"),
            "how long does a step take? no run was passed: pass --step-seco",
        ),
        ((*TYPED[:4], "--mtbf", "3h", "--ranks", "2"), "pass --restart-seconds, or the folder of a run of `paceline"),
        ((*TYPED, "--mtbf", "3h", "--ranks", "2", "nowhere"), "nowhere"),
    ],
)
def test_invalid_requests_are_refused_in_one_line(command, tmp_path, arguments, words):
    answer = command(*GOODPUT, *arguments, "--out", str(tmp_path / "runs"))
    assert answer.code == 2 and words in answer.err and not answer.out
    assert len(answer.err.strip().splitlines()) == 1 and not (tmp_path / "runs").exists()


def test_a_cost_that_no_run_measured_names_the_option_to_give(command, trained, harmed, tmp_path):
    (trained / "saves.jsonl").unlink()
    asked = ("--mtbf", "3h", "--out", str(tmp_path / "runs"))
    answer = command(*GOODPUT, str(trained), *asked)
    assert answer.code == 2
    assert "how long does a save take? trained did not measure it: pass --save-seconds" in answer.err
    answer = command(*GOODPUT, str(trained), "--save-seconds", "1", *asked)
    assert answer.code == 2 and "pass --restart-seconds" in answer.err
    document = json.loads((harmed / "run.json").read_text())
    (harmed / "run.json").write_text(json.dumps(document | {"records": [], "verb": "bench allreduce"}))
    answer = command(*GOODPUT, str(harmed), *asked)
    assert answer.code == 2 and "harmed is a run of `paceline bench allreduce`" in answer.err
    (trained / "saves.jsonl").write_text('{"step": 3}\n')
    answer = command(*GOODPUT, str(trained), *asked)
    assert answer.code == 2 and len(answer.err.strip().splitlines()) == 1


def test_options_before_the_command_are_refused(command):
    answer = command("predict", "--network", "10gbe", "goodput", "--mtbf", "3h")
    assert answer.code == 2 and "--network before goodput has no effect" in answer.err


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("goodput", Path(__file__).parents[2] / "benchmarks" / "goodput.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "goodput", module)  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_kills_ranks_of_the_world_and_no_spares(benchmark, tmp_path):
    """Only one of two processes with a rank's name has a monitor page, which shows that it is in the world."""
    processes = []
    try:
        for rank in range(2):
            program = tmp_path / f"paceline-rank-{rank}"
            program.symlink_to(shutil.which("sleep"))
            processes.append(subprocess.Popen([program, "60"]))
        pids = [process.pid for process in processes]
        with Monitor([0], 1) as monitor:
            with open(monitor.find_pages(0)[0], "r+b") as page:
                page.write(pids[1].to_bytes(8, sys.byteorder))
            assert set(benchmark.find_ranks(os.getpid())) >= set(pids)
            assert benchmark.find_ranks(os.getpid(), in_world=True) == pids[1:]
        assert benchmark.find_ranks(os.getpid(), in_world=True) == []
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_benchmark_warns_where_kills_are_not_the_faults_of_the_run(benchmark, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"faults": [{"policy": "spare"}]}))
    outcome = benchmark.Outcome(tmp_path, kills_s=[1.0, 2.0])
    assert "2 kills, but the run recorded 1 faults" in benchmark.check_faults(outcome, "spare")
    assert not benchmark.check_faults(outcome, "resume")
    assert not benchmark.check_faults(benchmark.Outcome(tmp_path, kills_s=[1.0]), "spare")
