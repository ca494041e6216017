"""`paceline faults` without a job: stored trials, their summary, and noise."""

from __future__ import annotations

import itertools
import json

import pytest

from paceline.errors import ConfigError, MeasurementError
from paceline.records.environment import capture_environment
from paceline.records.kinds import FaultRecord
from paceline.records.store import Run
from paceline.studies import fault_job
from paceline.studies import fault_trials as verb
from paceline.studies.fault_trials import FaultsResult, Trial


def make_trial(fault="kill", system="train", trial=0, **changes):
    return make_outcome(Trial(fault, system, "gloo", number=trial), **changes)


def make_outcome(trial, **changes):
    outcome = {
        "detected_s": 0.1 * (trial.number + 1), "is_right": True, "ended_s": 1.0,
        "steps_lost": 0 if trial.kind.cause else None, "restart_s": None, "left_over": (), "said": "",
        "policy": trial.policy, "names_step": True,
    }  # fmt: skip
    return trial.build_record(**(outcome | changes))


def make_result(*trials: FaultRecord) -> FaultsResult:
    return FaultsResult(Run("faults", {}, capture_environment(), trials))


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """The folder of an 8-trial run that was interrupted in the third, and the trials measured after that."""
    done: list[Trial] = []

    def measure(trial):
        done.append(trial)
        if len(done) == 3:
            raise KeyboardInterrupt
        return make_outcome(trial)

    monkeypatch.setattr(verb, "measure_fault", measure)
    with pytest.raises(KeyboardInterrupt):
        verb.faults("kill,stop", systems="train", trials=2, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(list((folder / "cells").iterdir())) == 2 and not (folder / "run.json").exists()
    return folder, done


def test_an_interrupted_run_is_resumed_where_it_was(interrupted):
    folder, done = interrupted
    result = verb.faults(resume=folder)
    names = [(one.trial, one.fault, one.backend) for one in result.only(FaultRecord)]
    assert names == list(itertools.product((0, 1), ("kill", "stop"), ("gloo", "shm")))
    assert len(done) == 9 and done[3] == done[2] and (folder / "faults.md").exists()
    assert len(verb.faults(resume=folder).records) == 8 and len(done) == 9  # the run is complete
    assert len(verb.faults(resume=folder, trials=2).records) == 8
    with pytest.raises(ConfigError, match=r"--trials 3.*--trials 2") as caught:
        verb.faults(resume=folder, trials=3)
    assert caught.value.code == "resume"


def test_a_run_may_end_with_fewer_trials(interrupted):
    folder, done = interrupted
    result = verb.faults(resume=folder, trials=1)
    assert len(result.records) == 4 and len(done) == 5 and result.config["trials"] == 1


def test_a_resumed_run_has_its_own_settings(interrupted):
    folder, _ = interrupted
    for changes in ({"faults": "kill"}, {"ranks": 3}, {"out": folder.parent}):
        with pytest.raises(ConfigError) as caught:
            verb.faults(resume=folder, **changes)
        assert caught.value.code == "resume"


def test_a_job_that_does_not_reach_its_fault_is_a_failed_trial(monkeypatch):
    def fail(_):
        raise MeasurementError("it said: nothing", code="no-fault")

    monkeypatch.setattr(verb, "measure_fault", fail)
    result = verb.faults("kill,stall", systems="train", backend="gloo")
    assert [one.is_right for one in result.only(FaultRecord)] == [False, False]
    assert "kill on gloo under paceline train: it said: nothing" in result.failure
    assert "identified 0 of 1 fault" in result.answer and "false alarms in 1 of 1 pause" in result.answer


def test_policies_are_interleaved_and_have_separate_rows(monkeypatch):
    monkeypatch.setattr(verb, "measure_fault", lambda trial: make_outcome(trial, recovered_s=trial.number + 1.0))
    result = verb.faults("kill", systems="train,script", backend="gloo", on_fault="spare,shrink", trials=2)
    rows = [(row.system, row.policy, row.num_trials, row.recovered_s, row.recovered_p95_s) for row in result.rows]
    assert rows == [("paceline train", "spare", 2, 1.5, 2.0), ("script, paceline", "", 2, 1.5, 2.0),
                    ("paceline train", "shrink", 2, 1.5, 2.0)]  # fmt: skip
    with pytest.raises(ConfigError, match="--on-fault 'hope'"):
        verb.faults(on_fault="spare,hope")


def test_columns_of_one_trial_keep_their_names():
    (table,) = make_result(make_trial()).tables()
    *title, header, _, row = table.terminal(80).splitlines()
    assert " ".join(title).endswith("(kill, gloo, paceline train)")
    assert header.split()[0] == "correct" and "steps lost" in header and "left over" in header
    assert row.split()[:4] == ["1", "of", "1", "0.10"]


@pytest.mark.parametrize("changes", [{"on_fault": " "}, {"systems": ""}, {"backend": ","}, {"ranks": 10**10}])
def test_impossible_requests_are_refused(changes):
    with pytest.raises(ConfigError):
        verb.faults(**changes)


@pytest.mark.parametrize(("num_missing", "p95_s"), [(0, 1.9), (1, 2.0), (2, None)])
def test_the_95th_percentile_is_that_of_all_trials(num_missing, p95_s):
    trials = [make_trial(trial=trial) for trial in range(num_missing, 20)]
    missing = [make_trial(detected_s=None, is_right=False, names_step=None)] * num_missing
    (row,) = make_result(*trials, *missing).rows
    assert row.num_right == 20 - num_missing and row.p95_s == (None if p95_s is None else pytest.approx(p95_s))


def test_all_trials_together():
    noise = make_trial("noise", ended_s=3600.0, detected_s=None, names_step=None)
    result = make_result(
        make_trial(), make_trial(names_step=False), make_trial(detected_s=None, is_right=False, names_step=None),
        make_trial(system="torch", is_right=False), noise, make_trial("noise", is_right=False, ended_s=12.0),
        make_trial("exit", left_over=("1 processes",)), make_trial("stop", detected_s=1.8),
    )  # fmt: skip
    assert "false alarms in 1 of 2 pauses (60 min 12 s of noise)" in result.answer
    right, left = result.findings
    assert "4 of 5 faults (80.0%)" in right and "in 3 of 4 reports" in right
    assert left.startswith("1 trial left")


def test_noise_contains_everything_except_faults(monkeypatch, tmp_path):
    made, now = [], itertools.count(0.0, 0.5)
    monkeypatch.setattr(fault_job.time, "monotonic", lambda: next(now))
    for name in ("inject", "_compile", "_load_machine"):
        monkeypatch.setattr(fault_job, name, lambda what, name=name: made.append((name, what)))
    noise = fault_job.Noise(tmp_path / "noise-1", 1)
    for place in ["between", "forward", "backward", "optimizer"] * 500:
        noise.reach(place)
    counts = json.loads((tmp_path / "noise-1").read_text())
    assert made[0] == ("_compile", 65) and set(counts) == set(fault_job.NOISES) and sum(counts.values()) == len(made)
    assert len({size for name, size in made if name == "_compile"}) == counts["compile"]  # no result comes from a cache
    assert set(name for name, _ in made) == {"inject", "_compile", "_load_machine"}
