"""Parsing hosts, explaining ssh failures, building requests, and checking hosts."""

from __future__ import annotations

import ast
import dataclasses
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.errors import ConfigError, LaunchError
from paceline.measure.host_checks import Wanted, check_survey, survey_hosts
from paceline.records.environment import capture_environment
from paceline.records.kinds import CheckRecord, LinkRecord, record_from_json, record_to_json
from paceline.records.samples import Samples
from paceline.records.store import Run
from paceline.report.result import DoctorResult
from paceline.runtime.hosts import agent
from paceline.runtime.hosts import ssh as remote
from paceline.runtime.hosts.ssh import build_program, build_requests, explain_end, open_agents, parse_hosts
from paceline.units import GIB, MIB
from paceline.verbs.doctor import doctor
from paceline.verbs.run import parse_variables, run
from tests.conftest import wait_until


def test_parse_hosts():
    found = parse_hosts("a:8, me@b.example:2,[fe80::1]:4,10.0.0.1")
    assert found == {"a": 8, "me@b.example": 2, "fe80::1": 4, "10.0.0.1": None}


@pytest.mark.parametrize("text", ["", "a:0", "a:x", "-oProxyCommand=x", "a b", "a,,b", "a:1,a:2", "a;b"])
def test_malformed_lists_of_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("code", "said", "name", "words"),
    [
        (255, "No ED25519 host key is known for b.\r\nHost key verification failed.", "host-key", "run `ssh b` once"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "host-key",
            "-R b",
        ),
        (255, "me@b: Permission denied (publickey).", "no-key", "ssh-copy-id b"),
        (255, "ssh: Could not resolve hostname b: Name or service not known", "name", "does not resolve"),
        (255, "ssh: connect to host b port 22: Connection refused", "port", "start sshd"),
        (255, "ssh: connect to host b port 22: Connection timed out", "port", "does not answer"),
        (127, "env: '/x/python': No such file or directory", "no-python", "no Python at /x/python"),
        (1, '  File "<string>", line 121\nSyntaxError: invalid syntax', "no-python", "too old"),
        (3, "something else", "ssh", "code 3 (something else)"),
    ],
)
def test_a_failed_connection_is_explained_in_one_line(code, said, name, words):
    error = explain_end("b", code, said, "/x/python")
    assert error.code == name and words in str(error) and str(error).startswith("host b: ")
    assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python train.py --lr 1", "PY train.py --lr 1"),
        ("python3 -m train", "PY -m train"),
        ("paceline train", "PY -m paceline train"),
        ("train.py", "PY train.py"),
        ("./train x", "./train x"),
    ],
)
def test_programs_run_with_the_python_of_the_hosts(command, program):
    assert build_program(command.split(), "PY") == program.split()


def test_a_nested_launcher_is_refused():
    with pytest.raises(ConfigError, match="torchrun inside"):
        build_program(["torchrun", "--nproc-per-node", "2", "train.py"], "PY")


def test_a_host_runs_torchrun_with_its_own_place_and_interface():
    program, interfaces = ["PY", "-m", "paceline", "train"], {"a": "eth0", "b": "eth1"}
    _, request = build_requests(program, "PY", {"a": 2, "b": 3}, interfaces, "10.0.0.1", 2000, {"A": "1"}, 30)
    words = " ".join(request["arguments"])
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 3 --master-addr 10.0.0.1 --master-port 2000" in words
    assert words.endswith(f"--log-dir {agent.LOGS} --no-python {agent.GUARD} PY -m paceline train")
    assert request["arguments"][0] == agent.GUARD and request["grace_s"] > 30  # torchrun kills ranks first
    variables = request["variables"]
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"], variables["A"]) == ("eth1", "=eth1", "1")
    assert variables["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[b:${rank}] "
    given = {"GLOO_SOCKET_IFNAME": "ib0"}
    (request,) = build_requests(program, "PY", {"a": 1}, interfaces, "10.0.0.1", 2000, given, 30)
    assert request["variables"]["GLOO_SOCKET_IFNAME"] == "ib0"


def write_ssh(folder: Path, text: str) -> str:
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{text}\n")
    ssh.chmod(0o755)
    return str(ssh)


def answer_with(*numbers: int) -> str:
    """A script for `write_ssh` that answers all of these requests when the last one arrives."""
    answers = "; ".join(f"""echo '{agent.MARK}{{"number": {number}}}'""" for number in numbers)
    return f"""while read -r line; do case $line in '{{"ask"'*'"number": {numbers[-1]}'*) {answers};; esac; done"""


def test_a_late_answer_is_not_mistaken_for_a_later_one(tmp_path):
    with open_agents(["a"], write_ssh(tmp_path, answer_with(1, 2)), limit_s=60) as (one,):
        with pytest.raises(LaunchError) as caught:
            one.ask("tell_time", 0.1)
        assert caught.value.code == "timeout" and "within 0.1 s" in str(caught.value)
        assert one.ask("tell_time") == {"number": 2}


def test_a_host_that_does_not_answer_in_time_is_named(tmp_path):
    ssh = write_ssh(tmp_path, f"echo $$ > {tmp_path}/pid; trap '' HUP TERM; exec sleep 60")  # and does not exit
    with pytest.raises(LaunchError, match=r"host a: .*--check-timeout") as caught:
        run(["true"], hosts="a", ssh=ssh, check_timeout=1)
    assert caught.value.code == "timeout" and not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert run.__kwdefaults__["check_timeout"] == doctor.__kwdefaults__["check_timeout"] == 5.0


def test_all_requests_share_one_timeout(tmp_path):
    ssh = write_ssh(tmp_path, answer_with(1))
    with open_agents(["a"], ssh, limit_s=0.0) as (one,), pytest.raises(LaunchError, match="0 s"):
        one.ask("tell_time")


@pytest.mark.parametrize("bytes_per_s", [0, 1_000_000])
def test_timed_messages_are_shorter_on_a_slow_link(monkeypatch, bytes_per_s):
    class Slow(socket.socket):
        def recv_into(self, place, num_bytes):
            count = super().recv_into(place, num_bytes)
            time.sleep(count / bytes_per_s)
            return count

    def accept(listener):
        link, address = listener._accept()
        return Slow(fileno=link), address

    if bytes_per_s:
        monkeypatch.setattr(socket.socket, "accept", accept)
    port = agent.listen("127.0.0.1", 0)["port"]
    try:
        found = agent.time_messages("127.0.0.1", port, "127.0.0.1", 1 << 19, 0.02 if bytes_per_s else 60.0)
    finally:
        agent.close()
    assert len(found["short"]) >= 4 <= len(found["long"])
    assert found["num_bytes"] < 1 << 19 if bytes_per_s else found["num_bytes"] == 1 << 19


def test_reach_reports_an_error_per_address():
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        places = [closed.getsockname(), there.getsockname()]
        assert agent.reach(places, "127.0.0.1", 5.0) == {"errors": ["Connection refused", ""]}


def test_an_interrupt_does_not_wait_for_answers(tmp_path):
    ssh = write_ssh(tmp_path, "exec cat > /dev/null")  # never answers, and exits when its input closes
    ended, is_waiting = [], threading.Event()

    def ask(one: remote.Agent) -> None:
        if one.name == "a":
            is_waiting.wait(100)
            raise KeyboardInterrupt
        is_waiting.set()
        try:
            one.ask("tell_time")
        except LaunchError as error:
            ended.append(error.code)
            raise

    with open_agents(["a", "b"], ssh, limit_s=60) as agents, pytest.raises(KeyboardInterrupt):
        remote.ask_all(agents, ask)
    assert ended == ["ssh"]  # and not "timeout"


def test_secret_variables_are_not_on_a_command_line(tmp_path):
    ssh = write_ssh(tmp_path, f'echo "$@" > {tmp_path}/words\ncat > /dev/null')
    with open_agents(["a"], ssh, variables={"TOKEN": "secret", "PYTHONPATH": "/mine"}):
        pass
    words = (tmp_path / "words").read_text()
    assert "PYTHONPATH=/mine" in words and "secret" not in words


def test_slowly_shown_output_is_shown_completely(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "_LEAVE_S", 2.0)
    # wait for the request, which follows the source
    wait = "while read -r line; do case $line in '{\"ask\"'*) break;; esac; done"
    ssh = write_ssh(tmp_path, f"{wait}\nfor line in 1 2 3 4 5 6; do echo $line; done")
    shown = []

    def show(stream: str, text: str) -> None:
        time.sleep(0.4)
        shown.append(text)

    with open_agents(["a"], ssh) as (one,):
        one.show = show
        one.tell("run")
        wait_until(lambda: one.code is not None)  # ssh exited without being killed
    assert shown == [f"[a] {line}\n" for line in range(1, 7)]


GOOD = {
    "python": "3.12.1", "torch": "2.13.0+cpu", "paceline": "0.1.0", "folder": "", "program": True, "script": True,
    "free_bytes": {"/data": 50 * GIB, "/tmp": 50 * GIB}, "addresses": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "reached_at": "10.0.0.1", "gpus": 0, "answered_s": 0.2, "offset_s": 0.001, "within_s": 0.0005,
    "address": "10.0.0.1", "interface": "eth0",
}  # fmt: skip
WANTED = Wanted("/data", script="train.py")


def check(facts: dict, wanted: Wanted = WANTED) -> list[CheckRecord]:
    checks = list(check_survey({"a": GOOD, "b": GOOD | facts}, wanted))
    assert all(one.status == "ok" for one in checks if one.name.startswith("a:"))
    return [one for one in checks if one.status != "ok"]


def test_identical_hosts_pass_all_checks():
    assert check({"python": "3.12.7"}) == []


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        ({"torch": "2.11.0"}, "b: torch", "fail", "a has 2.13.0+cpu"),
        ({"torch": ""}, "b: torch", "fail", "pip install torch"),
        ({"paceline": ""}, "b: Paceline", "fail", "pip install paceline"),
        ({"python": "3.11.2"}, "b: Python", "fail", "a has 3.12.1"),
        ({"python": "3.9.2"}, "b: Python", "fail", "3.11 or newer"),
        ({"offset_s": 3.0}, "b: clock", "warn", "NTP"),
        ({"offset_s": -3.0}, "b: clock", "warn", "NTP"),
        ({"address": "", "interface": "ib9"}, "b: network", "fail", "--interface: eth0"),
        ({"free_bytes": {"/data": 3 * MIB}}, "b: disk", "fail", "free some space"),
        ({"free_bytes": {"/data": GIB}}, "b: disk", "warn", "free some space"),
        ({"free_bytes": {"/data": 9 * GIB, "/tmp": 0}}, "b: disk", "fail", "free some space"),
        ({"folder": "No such file or directory"}, "b: folder", "fail", "--folder"),
        ({"script": False}, "b: script", "fail", "copy it there"),
    ],
)
def test_each_problem_of_a_host_comes_with_advice(facts, name, status, advice):
    (found,) = check(facts)
    assert (found.name, found.status) == (name, status) and advice in found.advice


@pytest.mark.parametrize("loop", ["127.0.0.1", "127.0.1.1", "::1"])
def test_the_address_of_a_host_is_reachable_from_others(loop):
    """A host reached over loopback (the launcher's own) must not be announced to others as a loopback address."""
    asked = {}

    def make(name: str, place: str) -> SimpleNamespace:
        def ask(what: str, **values) -> dict:
            if what == "tell_route":
                asked[name] = values["address"]
            return {"tell_facts": {"reached_at": place}, "tell_time": {"time_s": 0.0}, "tell_route": {}}[what]

        return SimpleNamespace(name=name, ask=ask)

    survey_hosts([make("a", loop), make("b", "10.0.0.2")], WANTED)
    assert asked == {"a": "10.0.0.2", "b": "10.0.0.2"}
    survey_hosts([make("a", "10.0.0.1"), make("b", "10.0.0.2"), make("c", loop)], WANTED)
    assert asked == {"a": "10.0.0.2", "b": "10.0.0.1", "c": "10.0.0.1"}
    asked.clear()
    survey_hosts([make("a", loop)], WANTED)
    assert asked == {"a": loop}


def test_a_slow_answer_is_not_mistaken_for_a_wrong_clock():
    assert check({"offset_s": 3.0, "within_s": 2.9}) == []


def test_paceline_is_required_only_if_the_program_uses_it():
    (found,) = check({"paceline": ""}, dataclasses.replace(WANTED, needs_paceline=False))
    assert found.status == "warn"


def test_an_unreachable_host_is_a_failed_check():
    error = LaunchError("host b: its ssh port is closed: start sshd there", code="port")
    found = [one for one in check_survey({"a": GOOD, "b": error}, WANTED) if one.status != "ok"]
    assert [(one.name, one.found, one.advice) for one in found] == [
        ("b: ssh", "its ssh port is closed", "start sshd there")
    ]


def make_link(sender: str, receiver: str, seconds: float) -> LinkRecord:
    timing, short = Samples(((seconds,), (seconds,))), Samples(((2e-4,), (2e-4,)))
    return LinkRecord(sender=sender, receiver=receiver, interface="eth0", num_bytes=10**8, timing=timing, short=short)


def test_links_are_records_and_print_as_a_matrix():
    links = [make_link("b", "a", 0.1), make_link("a", "b", 0.8)]
    assert [record_from_json(record_to_json(link)) for link in links] == links
    assert links[0].latency_s == pytest.approx(1e-4) and links[0].bytes_per_s == pytest.approx(1e9)
    ready = CheckRecord(name="a: ssh", status="ok", found="answered")
    result = DoctorResult(Run("doctor", {"hosts": ["a", "b"]}, capture_environment(), (ready, *links)))
    assert result.answer.startswith("These 2 hosts are ready") and not result.failure
    rows = [line.split() for line in result.text(80, details=True).splitlines() if line.split()[:1] in (["a"], ["b"])]
    assert rows == [["a", "0.125"], ["b", "1.00"]]
    document = result.to_json()["links"]
    assert [(row["sender"], row["receiver"], row["bandwidth_gbps"]) for row in document] == [
        ("b", "a", pytest.approx(1.0)), ("a", "b", pytest.approx(0.125)),
    ]  # fmt: skip
    assert "paceline run --hosts a,b" in result.text(80)


def test_the_agent_parses_on_old_pythons_and_needs_only_the_standard_library():
    tree = ast.parse(Path(agent.__file__).read_text(), feature_version=(3, 8))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_variables_have_a_value_or_are_inherited(monkeypatch):
    monkeypatch.setenv("TAKEN", "x=y")
    assert parse_variables(["A=1", "B=", "TAKEN"]) == {"A": "1", "B": "", "TAKEN": "x=y"}
    for text in ("1A=2", "NOT_SET_HERE", "=3"):
        with pytest.raises(ConfigError, match="--env"):
            parse_variables([text])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass one of --hosts"),
        ({"hosts": "a", "slurm": True}, "pass one of"),
        ({"slurm": True, "ssh": "ssh -p 1", "image": "x"}, "--ssh, --image with --slurm"),
        ({"slurm": True, "nodes": 0}, "--nodes 0: must be at least 1"),
        ({"hosts": "a", "grace": 0.5}, "--grace 0.5"),
        ({"hosts": "a", "check_timeout": 0.5}, "--check-timeout 0.5"),
        ({"hosts": "a", "dry_run": True}, "--dry-run with --hosts"),
        ({"hosts": "a", "ssh": ""}, "--ssh is empty"),
        ({"hosts": "a", "ssh": "ssh 'a"}, "no closing quotation"),
        ({"hosts": "a", "port": 70000}, "--port 70000"),
        ({"slurm": True, "gpus_per_node": -1}, "--gpus-per-node -1"),
    ],
)
def test_conflicting_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        run(["python", "train.py"], **options)


def test_an_empty_command_is_refused():
    with pytest.raises(ConfigError, match="no command"):
        run([], hosts="a")
