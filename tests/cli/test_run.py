"""`paceline run` with two names for this host and a fake ssh; bad setups; dry runs."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys

import psutil
import pytest

from paceline.errors import LaunchError
from paceline.runtime.hosts import agent
from paceline.runtime.hosts.ssh import open_agents, run_agents
from tests.conftest import wait_until
from tests.dist.made_hosts import find_commands

SSH = """\
#!/bin/sh
while [ $# -gt 2 ]; do shift; done
unset SSH_CONNECTION
export MADE_HOST=$1
eval "exec $2"
"""
PYTHON = """\
#!/bin/sh
[ "$MADE_HOST" = b ] && export PYTHONPATH={folder}:$PYTHONPATH
exec {python} "$@"
"""


@pytest.fixture
def ssh(tmp_path) -> str:
    """A program that runs the command here, with the host's name in MADE_HOST."""
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def other_python(tmp_path) -> str:
    """A Python that searches `tmp_path/there` first for modules, only on host b."""
    (tmp_path / "there").mkdir()
    path = tmp_path / "python"
    path.write_text(PYTHON.format(folder=tmp_path / "there", python=sys.executable))
    path.chmod(0o755)
    return str(path)


OTHER = {"torch/__init__.py": "", "torch-1.0.0.dist-info/METADATA": "Version: 1.0.0\n"}
SHIFTED = "import time\nreal = time.time\ntime.time = lambda: real() + 120\n"
FULL = "import shutil\nusage = shutil.disk_usage\nshutil.disk_usage = lambda p: usage(p)._replace(free=4096)\n"


@pytest.mark.parametrize(
    ("there", "words", "name", "advice"),
    [
        (OTHER, (), "b: torch: 1.0.0", "install the same version"),
        ({"sitecustomize.py": SHIFTED}, (), "b: clock", "NTP"),
        ({"sitecustomize.py": FULL}, (), "b: disk", "free some space"),
        ({}, ("--interface", "nowhere0"), "a: network: no interface nowhere0", "--interface"),
        ({}, ("--folder", "/nowhere"), "a: folder", "--folder"),
        ({}, ("-- nowhere.py",), "a: script: nowhere.py does not exist", "copy it there"),
        ({}, ("-- ./nowhere",), "a: program: ./nowhere does not exist", "copy it there"),
    ],
)  # fmt: skip
def test_a_bad_setup_is_named_in_one_line(
    command, ssh, other_python, tmp_path, monkeypatch, there, words, name, advice
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    for file, text in there.items():
        path = tmp_path / "there" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    program = words[0].removeprefix("-- ") if words and words[0].startswith("-- ") else "true"
    words = ("--check-timeout", "60", *words)
    options = [word for word in words if not word.startswith("-- ")]
    asked = ["run", "--hosts", "a:1,b:1", "--ssh", ssh, "--python", other_python, *options, "--", program]
    if "clock" in name:  # only a warning: the run would start, so just the checks of `doctor` are tested
        answer = command("doctor", *asked[1:-2])
        (line,) = [text for text in answer.out.splitlines() if "b: clock" in text and text.split()[0] == "warn"]
        assert answer.code == 0 and advice in answer.out.replace("\n", " ")
    else:
        answer = command(*asked)
        assert answer.code == 2
        (line,) = answer.err.splitlines()
        assert f"paceline: error: {name}" in line and advice in line


def test_a_host_without_python_is_named(command, ssh):
    answer = command("run", "--hosts", "a", "--ssh", ssh, "--python", "/nowhere/python", "--", "true")
    (line,) = answer.err.splitlines()
    assert answer.code == 2 and "host a: no Python at /nowhere/python" in line and "--python" in line


def test_a_closed_port_is_named(command):
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        ssh = f"ssh -F none -p {taken.getsockname()[1]}"
        answer = command("run", "--hosts", "127.0.0.1", "--ssh", ssh, "--", "true")
    (line,) = answer.err.splitlines()
    assert answer.code == 2 and "host 127.0.0.1: its ssh port is closed" in line and "--ssh" in line


def test_a_taken_port_is_named(command, ssh, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--port", str(port), "--check-timeout", "60"]
        answer = command("run", "--hosts", "a,b", "--ssh", ssh, *words, "--", "true")
    (line,) = answer.err.splitlines()
    assert answer.code == 2 and f"a cannot listen on 127.0.0.1:{port}" in line and "--port" in line


def run_on(
    ssh: str, commands: dict[str, str], grace_s: float = 5.0, is_read: bool = True
) -> tuple[int, list[tuple[str, str]]]:
    """Run a shell command on each host; returns the exit code and the output."""
    shown: list[tuple[str, str]] = []

    def show(stream: str, text: str) -> None:
        if not is_read:
            raise BrokenPipeError
        shown.append((stream, text))

    with open_agents(commands, ssh) as agents:
        requests = [
            {"arguments": ["sh", "-c", text], "variables": {}, "grace_s": grace_s} for text in commands.values()
        ]
        return run_agents(agents, requests, show, grace_s), shown


def test_lines_name_their_host_and_streams_stay_apart(ssh):
    code, shown = run_on(ssh, {"a": "echo one; echo two >&2", "b": "echo '[b:1] three'"})
    assert code == 0 and sorted(shown) == [("err", "[a] two\n"), ("out", "[a] one\n"), ("out", "[b:1] three\n")]


def test_torchruns_own_traceback_is_shortened_but_not_that_of_a_rank(ssh):
    own = "Traceback (most recent call last):\n  File x\n    main()\nChildFailedError: 1\n  more\n"
    rank = "[a:0] Traceback (most recent call last):\n[a:0]   File y\n"
    _, shown = run_on(ssh, {"a": f"printf {shlex.quote(own + rank)}"})
    assert "".join(text for _, text in shown) == f"[a] ChildFailedError: 1\n[a]   more\n{rank}"


def test_when_one_host_fails_all_processes_on_the_others_end(ssh, tmp_path):
    # The grandchild has its own session, ignores SIGTERM, and loses its parent.
    stubborn = "trap '' TERM; (setsid sh -c 'trap \"\" TERM; echo $$ > pid; sleep 60' &) ; while :; do sleep 0.1; done"
    text = f"cd {tmp_path}; {stubborn}"
    code, shown = run_on(
        ssh, {"a": text, "b": f"while [ ! -s {tmp_path}/pid ]; do sleep 0.05; done; exit 3"}, grace_s=0.5
    )
    assert code == 3 and ("err", "paceline: host b failed first, with code 3: see its output above\n") in shown
    grandchild = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie")


def test_a_lost_host_is_named_instead_of_its_victim(ssh, tmp_path):
    wait = f"while [ ! -e {tmp_path}/failed ]; do sleep 0.05; done; sleep 0.3"
    lost = f"trap '' TERM; echo $$ > {tmp_path}/pid; {wait}; kill -9 $PPID; exec sleep 60"  # kills the agent
    with pytest.raises(LaunchError, match="host b") as caught:
        run_on(ssh, {"a": f"touch {tmp_path}/failed; exit 3", "b": lost})
    assert caught.value.code == "host-lost"
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


def test_when_nobody_reads_the_output_all_hosts_end(ssh, tmp_path):
    with pytest.raises(BrokenPipeError):
        run_on(ssh, {"a": f"echo $$ > {tmp_path}/pid; echo one; exec sleep 60"}, is_read=False)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_rank_ends_if_both_processes_of_the_agent_are_killed(ssh, tmp_path):
    text = f"echo $$ > {tmp_path}/pid; kill -9 $(cut -d' ' -f4 /proc/$PPID/stat) $PPID; exec sleep 60"
    with open_agents(["a"], ssh) as agents, pytest.raises(LaunchError, match="host a"):
        request = {"arguments": [agent.GUARD, "sh", "-c", text], "variables": {}, "grace_s": 5.0}
        run_agents(agents, [request], lambda *_: None, 5.0)
    rank = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == "zombie")


def test_ranks_end_with_the_launcher(ssh, tmp_path):
    """The launcher is killed, and everything it started is gone."""
    source = (
        "import sys\nfrom paceline.runtime.hosts.ssh import open_agents, run_agents\n"
        "with open_agents(['a'], sys.argv[1]) as agents:\n"
        "    request = {'arguments': ['sh', '-c', 'echo $$ > pid; exec sleep 60'], 'variables': {}, 'grace_s': 5}\n"
        "    run_agents(agents, [request], lambda *_: None, 5)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    launcher = subprocess.Popen([sys.executable, "-c", source, ssh], cwd=tmp_path, env=environment)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    finally:
        launcher.kill()
        launcher.wait()
    rank = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(rank))


def test_dry_runs_print_and_do_nothing(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["paceline", "train", "--channels", "8", "16", "--debug"]
    answer = command("run", "--slurm", "--nodes", "2", "--dry-run", "--", *words)
    # passed on verbatim: these options belong to the program
    assert " -m paceline train --channels 8 16 --debug\n" in answer.out
    assert answer.code == 0 and "#SBATCH --nodes=2" in answer.out and not answer.err
    answer = command("run", "--kubernetes", "--image", "x", "--name", "job", "--", "paceline", "train")
    assert answer.code == 0 and "kind: Job" in answer.out
    assert list(tmp_path.iterdir()) == []


def test_a_missing_slurm_is_reported(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = command("run", "--slurm", "--", "python", "train.py")
    (line,) = answer.err.splitlines()
    assert answer.code == 2 and "sbatch is not installed here" in line and "--dry-run" in line


@pytest.mark.parametrize("line", find_commands("--kubernetes"))
def test_every_command_of_kubernetes_in_the_document_runs(command, line):
    answer = command(*shlex.split(line)[1:])
    assert answer.code == 0 and "apiVersion: " in answer.out and not answer.err
