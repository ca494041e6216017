"""The environment that a run records, and what makes two of them incomparable."""

import subprocess
from types import SimpleNamespace

import pytest

from paceline.records import environment as module
from paceline.records.environment import capture_environment


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    """Capturing asks git for the commit; unit tests start no process."""
    answer = SimpleNamespace(stdout="0123456789ab-dirty\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.delenv("PACELINE_COMMIT", raising=False)


@pytest.mark.parametrize(("override", "host"), [("published-name", "published-name"), ("", "node7"), (None, "node7")])
def test_the_host_can_be_renamed_and_its_name_does_not_leak(monkeypatch, override, host):
    monkeypatch.setattr(module.platform, "node", lambda: "node7")
    if override is None:
        monkeypatch.delenv("PACELINE_HOST", raising=False)
    else:
        monkeypatch.setenv("PACELINE_HOST", override)
    environment = capture_environment()
    assert environment.host == host
    assert "PACELINE_HOST" not in environment.variables


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/opt/venv/bin/paceline", "bench", "--ranks", "2"], "paceline bench --ranks 2"),
        (["paceline", "doctor"], "paceline doctor"),
        (["/opt/lib/paceline/__main__.py", "doctor"], "paceline doctor"),
        ([""], "paceline"),
    ],
)
def test_the_command_line_does_not_tell_where_the_program_lies(monkeypatch, argv, line):
    monkeypatch.setattr(module.sys, "argv", argv)
    assert capture_environment().command_line == line


def test_only_variables_that_steer_the_measurement_are_kept(monkeypatch):
    for name in ("NCCL_ALGO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MY_SECRET_TOKEN"):
        monkeypatch.setenv(name, "value")
    variables = capture_environment().variables
    assert {"NCCL_ALGO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"} <= set(variables)
    assert "MY_SECRET_TOKEN" not in variables


def test_the_commit_and_the_versions_are_recorded():
    environment = capture_environment()
    assert environment.git_commit == "0123456789ab-dirty"
    assert {"paceline", "torch", "numpy"} <= set(environment.versions)
    assert environment.cores >= 1
    assert environment.memory_bytes > 0


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_no_commit(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module.subprocess, "run", fail)
    assert capture_environment().git_commit is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("host", "other"), ("cpu", "Other CPU"), ("cores", 4), ("versions", {"torch": "2.11"}), ("details", {"hosts": 2})],
)
def test_a_difference_that_matters_is_named_with_both_values(build_environment, field, value):
    here, there = build_environment(), build_environment(**{field: value})
    (difference,) = here.differences(there)
    assert difference.startswith(f"{field}: ")
    assert str(getattr(here, field)) in difference
    assert str(value) in difference


def test_command_line_commit_and_load_do_not_make_runs_incomparable(build_environment):
    there = build_environment(command_line="paceline bench chunks", git_commit=None, load_average=7.0)
    assert build_environment().differences(there) == []
