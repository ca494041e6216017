"""`paceline doctor`: its findings, its advice, and a reliable exit code."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline import machine, torch_internals
from paceline.measure import health
from paceline.records.kinds import CheckRecord


def test_a_sane_machine_passes_with_a_real_all_reduce(command):
    answer = command("doctor", "--json")
    document = json.loads(answer.out)
    assert answer.code == 0 and document["ok"], document
    checks = {check["name"]: check for check in document["checks"]}
    for name in ("Python", "torch", "backends", "cores", "threads", "memory", "/dev/shm", "network", "GPU", "launcher"):
        assert checks[name]["status"] in ("ok", "warn") and checks[name]["found"]
    assert "0 wrong" in checks["2-rank all-reduce"]["found"]


def without_ranks(monkeypatch):
    ok = CheckRecord(name="2-rank all-reduce", status="ok", found="not run in this test")
    monkeypatch.setattr(health, "_check_allreduce", lambda *args: ok)


@pytest.mark.parametrize(
    ("variables", "name", "words"),
    [
        ({"RANK": "0"}, "launcher", "WORLD_SIZE is not"),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, "network", "no interface nowhere0"),
    ],
)
def test_a_failed_check_is_reported_with_its_fix_and_exits_1(command, monkeypatch, variables, name, words):
    without_ranks(monkeypatch)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    answer = command("doctor")
    assert answer.code == 1
    assert f"Failed: {name}" in answer.out.splitlines()[0] and words in answer.out
    assert f"paceline: failed: {name}" in answer.err
    document = json.loads(command("doctor", "--json").out)
    (broken,) = [check for check in document["checks"] if check["status"] == "fail"]
    assert not document["ok"] and broken["name"] == name and broken["advice"]


def test_a_warning_does_not_fail(command, monkeypatch):
    without_ranks(monkeypatch)
    monkeypatch.setattr("paceline.machine.available_memory_bytes", lambda: 2**28)
    answer = command("doctor", "--json")
    (memory,) = [check for check in json.loads(answer.out)["checks"] if check["name"] == "memory"]
    assert answer.code == 0 and memory["status"] == "warn" and memory["advice"]


def test_ranks_that_cannot_reduce_are_a_failure(command, monkeypatch):
    def refuse(*args, **kwargs):
        raise health.PacelineError("rank 1 of 2 was killed by SIGKILL\nand more lines")

    monkeypatch.setattr(health, "RankPool", refuse)
    answer = command("doctor")
    assert answer.code == 1
    assert "rank 1 of 2 was killed by SIGKILL" in answer.out and "and more lines" not in answer.out


@pytest.mark.parametrize(
    ("load", "stolen_s", "status", "found"),
    [
        (0.5, 0.0, "ok", "0.5 on 2 cores"),
        (16.0, 0.0, "warn", "load 16.0 on 2 cores"),
        (16.0, 0.6, "warn", "the hypervisor stole 60% of CPU time, load 16.0 on 2 cores"),
    ],
)
def test_a_loaded_machine_is_reported(command, monkeypatch, load, stolen_s, status, found):
    without_ranks(monkeypatch)
    times_s = iter((0.0, stolen_s * (os.cpu_count() or 1)))
    monkeypatch.setattr("paceline.machine.find_load", lambda: load)
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(machine, "read_stolen_s", lambda: next(times_s))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: 5.0))
    answer = command("doctor", "--json")
    document = json.loads(answer.out)
    (check,) = [check for check in document["checks"] if check["name"] == "load"]
    assert answer.code == 0 and (check["status"], check["found"]) == (status, found)
    assert bool(check["advice"]) is (status == "warn") and ("load" in document["answer"]) is (status == "warn")


@pytest.mark.parametrize(("quota", "status"), [(float("inf"), "ok"), (8.0, "ok"), (1.5, "warn")])
def test_a_quota_below_the_cores_is_reported(monkeypatch, quota, status):
    monkeypatch.setattr(machine, "read_quota", lambda: quota)
    monkeypatch.setattr(machine, "count_cores", lambda: int(min(4, quota)))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    cores = next(check for check in health._check_host() if check.name == "cores")
    assert cores.status == status and ("1.5" in cores.advice) is (status == "warn")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.9.1", "fail"), ("2.10.0", "fail"), ("2.11.0+cpu", "ok"), ("2.15.1", "ok"), ("2.16.0a0+git1f", "warn")],
)
def test_an_untested_torch_is_reported(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    check = next(check for check in health._check_torch() if check.name == "torch")
    assert check.status == status and ("2.11 to 2.15" in check.advice) is (status != "ok")


@pytest.mark.parametrize(("version", "status"), [((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 14, 0), "warn")])
def test_an_untested_python_is_reported(monkeypatch, version, status):
    monkeypatch.setattr(health, "sys", SimpleNamespace(version_info=version, implementation=SimpleNamespace(name="x")))
    check = next(check for check in health._check_host() if check.name == "Python")
    assert check.status == status and ("3.11 to 3.13" in check.advice) is (status != "ok")


def test_doctor_pip_and_make_agree_on_the_versions():
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (_, first), (major, last) = health.TESTED_TORCH
    bounds = f">={major}.{first},<{major}.{last + 1}"
    assert f"torch{bounds}" in project["dependencies"]
    assert health._INSTALL == torch_internals._INSTALL == f"pip install 'torch{bounds}'"
    assert re.findall(r'"(2\.\d+)"', (root / "Makefile").read_text()) == [f"{major}.{first}", f"{major}.{last + 1}"]
    pythons = re.findall(r"Python :: (\d)\.(\d+)", " ".join(project["classifiers"]))
    tested = range(health.TESTED_PYTHON[0][1], health.TESTED_PYTHON[1][1] + 1)
    assert pythons == [("3", str(minor)) for minor in tested] and project["requires-python"] == f">=3.{tested[0]}"


def test_a_torch_without_required_features_fails(monkeypatch):
    monkeypatch.setattr(torch_internals, "MEMBERS", {"torch.Tensor._no_such_name": "nothing works"})
    check = next(check for check in health._check_torch() if check.name == "torch")
    assert check.status == "fail" and "torch.Tensor._no_such_name (nothing works)" in check.advice
