"""`paceline run --hosts` and `doctor --hosts` on two hosts with one sshd each, in namespaces of this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.records.training import load_metrics
from paceline.studies.fault_places import link_hosts, why_not
from tests.conftest import wait_until
from tests.dist.made_hosts import (
    ROOT,
    VERBS,
    MadeHosts,
    find_commands,
    make_hosts,
    paths,
    remove_abandoned,
    run_ip,
    write_tools,
)

pytestmark = pytest.mark.slow

CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
SetEnv PYTHONPATH={path}
"""
CLIENT = """\
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""
PATIENT = ("--check-timeout", "60")  # long enough for a loaded machine
# sshd requires a folder there; only sshd sees this one.
RUN_FOLDER = "mount -t tmpfs tmpfs /run; mkdir /run/sshd;"
TRAIN = [
    "paceline", "train", "--model", "mlp", "--hidden", "8", "--samples", "64", "--batch-size", "8", "--epochs", "4000",
    "--save-every", "1000s",
]  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[MadeHosts]:
    """Two hosts, a and b, which ssh reaches by name."""
    if shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("SEVERAL HOSTS ARE NOT TESTED: there is no sshd here")
    folder = tmp_path_factory.mktemp("hosts")
    with make_hosts(folder) as made:
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        public = (folder / "host_key.pub").read_text()
        (folder / "known").write_text("".join(f"{name} {public}[{name}]:2222 {public}" for name in made.names))
        (folder / "client").write_text(CLIENT.format(folder=folder))
        (folder / "sshd_config").write_text(CONFIG.format(folder=folder, path=paths()))
        write_tools(folder, ssh=f'exec {shutil.which("ssh")} -F {folder}/client "$@"')
        (folder / "examples").mkdir()
        for example in (ROOT / "examples").glob("*.py"):
            shutil.copy(example, folder / "examples")
        shutil.copy(ROOT / "tests" / "scripts" / "plain_loop.py", folder / "train.py")
        add_interface(made, "a", "only-a", "10.93.0.1/24")
        for name in made.names:
            serve_ssh(made, name)
            add_interface(made, name, "apart", "172.17.0.1/16")  # like Docker's: the same on every host
        yield made
        made.expect_nothing_left()


def add_interface(made: MadeHosts, name: str, interface: str, address: str) -> None:
    """Add an interface that is not connected to anything."""
    space = made.space(name)
    run_ip("-n", space, "link", "add", interface, "type", "veth", "peer", f"{interface}-peer")
    run_ip("-n", space, "address", "add", address, "dev", interface)
    run_ip("-n", space, "link", "set", interface, "up")


def serve_ssh(made: MadeHosts, name: str, setup: str = "", port: int = 22) -> subprocess.Popen[str]:
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    command = [sshd, "-D", "-e", "-p", str(port), "-f", str(made.folder / "sshd_config")]
    service = made.serve(name, command, RUN_FOLDER + setup)
    answers = made.wrap("a", ["sh", "-c", f'"{made.folder}/tools/ssh" -p {port} {name} true'])
    wait_until(lambda: subprocess.run(answers, capture_output=True, timeout=10).returncode == 0)
    return service


def launch(made: MadeHosts, *words: str, program: Sequence[str] = ("paceline",), **options) -> subprocess.Popen[str]:
    """`paceline ...` on host a."""
    path = f"{made.folder}/tools:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": paths(), "HOME": str(made.folder)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment} | options
    return made.start("a", [*program, *words], **options)


def finish(job: subprocess.Popen[str], code: int = 0, timeout_s: float = 100) -> tuple[str, str]:
    try:
        out, err = job.communicate(timeout=timeout_s)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == code, f"{job.returncode}\n{out[-3000:]}\n{err[-12000:]}"
    return out, err


def test_doctor_finds_two_hosts_ready_and_measures_their_links(hosts):
    out, _ = finish(launch(hosts, "doctor", "--hosts", "a,b", "--json"))
    document = json.loads(out)
    assert document["ok"], document["answer"]
    found = {check["name"]: check["found"] for check in document["checks"]}
    assert found["b: network"] == "eth0 (10.92.0.2)" and "10.92.0.1 over eth0" in found["b to a"]
    assert {(link["sender"], link["receiver"]) for link in document["links"]} == {("a", "b"), ("b", "a")}
    assert all(link["bandwidth_gbps"] > 0 and link["latency_s"] > 0 for link in document["links"])
    hosts.expect_nothing_left()


def test_doctor_names_links_that_are_blocked_in_either_direction(hosts):
    out, _ = finish(launch(hosts, "doctor", "--hosts", "a,b", "--interface", "apart", "--json"), 1)
    found = {check["name"]: check["found"] for check in json.loads(out)["checks"] if check["status"] == "fail"}
    assert set(found) == {"a to b", "b to a"} and "b cannot reach a at 172.17.0.1 port" in found["b to a"]


def test_two_hosts_train_and_every_line_names_host_and_rank(hosts):
    job = launch(
        hosts,
        "run",
        *PATIENT,
        "--hosts",
        "a:2,b:1",
        "--",
        "python",
        "-c",
        "import os; print('rank', os.environ['RANK'])",
    )
    out, _ = finish(job)
    assert sorted(out.splitlines()) == ["[a:0] rank 0", "[a:1] rank 1", "[b:2] rank 2"]
    train = [word if word != "4000" else "2" for word in TRAIN]
    out, err = finish(launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--", *train, "--out", "trained"))
    assert "[a:0] " in out and "2 ranks on gloo" in out + err
    (folder,) = (hosts.folder / "trained").iterdir()
    assert load_metrics(folder / "metrics.jsonl")[-1]["step"] == 8
    hosts.expect_nothing_left()


def wait_for_steps(job: subprocess.Popen[str], out: Path) -> Path:
    wait_until(lambda: job.poll() is not None or list(out.glob("*/metrics.jsonl")))
    assert job.poll() is None, job.communicate()
    (metrics,) = out.glob("*/metrics.jsonl")
    return metrics.parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_ends_all_hosts(hosts, number):
    out = hosts.folder / f"signal-{number}"
    job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--", *TRAIN, "--out", str(out))
    folder = wait_for_steps(job, out)
    job.send_signal(number)
    _, err = finish(job, 128 + number)
    last = load_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert "ending all hosts" in err and (folder / "checkpoints" / f"step-{last:08}").exists()
    hosts.expect_nothing_left()


def find_ranks(hosts: MadeHosts, name: str) -> list[int]:
    lines = [
        line for line in hosts.list_processes() if " -m paceline train" in line and "torch.distributed.run" not in line
    ]
    return [int(line.split()[1]) for line in lines if line.startswith(f"{name}: ") and " -m paceline run" not in line]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb.split()[:2]))
def test_every_verb_runs_on_two_hosts(hosts, verb):
    out, _ = finish(
        launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--", "paceline", *verb.split(), "--out", "verbs")
    )
    lines = out.splitlines()
    assert lines and all(line.startswith("[a:0] ") for line in lines)  # a single answer, from the first rank
    hosts.expect_nothing_left()


STUCK = "import signal, time; signal.signal(15, signal.SIG_IGN); print('stuck', flush=True); time.sleep(1000)"


def launch_stuck(hosts: MadeHosts) -> subprocess.Popen[str]:
    job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--grace", "5", "--", "python", "-c", STUCK)
    assert {job.stdout.readline(), job.stdout.readline()} == {"[a:0] stuck\n", "[b:1] stuck\n"}
    return job


def test_a_second_interrupt_ends_ranks_that_do_not_stop(hosts):
    job = launch_stuck(hosts)
    job.send_signal(signal.SIGINT)
    time.sleep(1.5)
    job.send_signal(signal.SIGINT)
    finish(job, 130, timeout_s=20)
    hosts.expect_nothing_left(5)


def find_agents(hosts: MadeHosts) -> list[int]:
    """The processes of host b's agent: the parent, then the child."""
    lines = [line for line in hosts.list_processes(but=()) if line.startswith("b: ")]
    found = {int(line.split()[1]) for line in lines if "sys.stdin.buffer.read" in line and "sh -c" not in line}
    parent_of = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return sorted(found, key=lambda pid: parent_of[pid] in found)


@pytest.mark.parametrize("who", ["launcher", "parent of the agent", "agent", "both", "torchrun", "connection"])
def test_whatever_is_killed_ranks_that_do_not_stop_are_ended_on_all_hosts(hosts, who):
    job = launch_stuck(hosts)
    lines = hosts.list_processes(but=())
    victims = {
        "launcher": lambda: [job.pid],
        "parent of the agent": lambda: find_agents(hosts)[:1],
        "agent": lambda: find_agents(hosts)[1:],
        "both": lambda: find_agents(hosts),
        "torchrun": lambda: [int(x.split()[1]) for x in lines if x[:2] == "b:" and "-m torch.distributed.run" in x],
        "connection": lambda: [int(x.split()[1]) for x in lines if x[:2] == "a:" and "ssh -F" in x and " b env " in x],
    }[who]()
    subprocess.run(["kill", "-9", *map(str, victims)], check=True)  # all at once
    _, err = job.communicate(timeout=100)
    assert job.returncode not in (0, None), err
    if who != "launcher":
        assert ("host b failed first, with code 137" if who == "torchrun" else "connection to host b") in err, err
    hosts.expect_nothing_left(30)


def test_when_the_launcher_is_killed_training_ends_on_all_hosts(hosts):
    """With the default grace period: ranks that handle signals end immediately."""
    out = hosts.folder / "launcher-killed"
    job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--", *TRAIN, "--out", str(out))
    wait_for_steps(job, out)
    job.kill()
    job.communicate(timeout=100)
    hosts.expect_nothing_left(30)


def test_when_nobody_reads_the_output_all_hosts_end_quietly(hosts):
    text = "import time\nwhile True: print('line', flush=True); time.sleep(0.05)"
    job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--", "python", "-c", text)
    assert job.stdout.readline().endswith("line\n")
    job.stdout.close()
    assert job.wait(100) == 1
    assert "Traceback" not in job.stderr.read() and job.stderr.close() is None
    hosts.expect_nothing_left()


def test_a_disconnected_host_is_named_and_ends_its_ranks(hosts):
    job = launch_stuck(hosts)
    run_ip("-n", hosts.space("b"), "link", "set", "eth0", "down")
    try:
        _, err = finish(job, 2)
        assert "lost the connection to host b" in err
        hosts.expect_nothing_left(60)
    finally:
        run_ip("-n", hosts.space("b"), "link", "set", "eth0", "up")


def test_a_rank_that_is_killed_is_named_and_ends_all_hosts(hosts):
    out = hosts.folder / "killed"
    job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--grace", "5", "--", *TRAIN, "--out", str(out))
    wait_for_steps(job, out)
    os.kill(find_ranks(hosts, "b")[-1], signal.SIGKILL)
    text = "".join(job.communicate(timeout=100))
    assert job.returncode not in (0, None) and "Signal 9" in text, text
    hosts.expect_nothing_left(30)


def test_twenty_of_twenty_runs_leave_nothing(hosts):
    for number in range(20):
        code = number % 3
        words = f"import sys, os; sys.exit({code} if os.environ['RANK'] == '{number % 2}' else 0)"
        job = launch(hosts, "run", *PATIENT, "--hosts", "a:1,b:1", "--grace", "5", "--", "python", "-c", words)
        _, err = job.communicate(timeout=200)
        assert (job.returncode != 0) == (code != 0), err
        hosts.expect_nothing_left()
    left = [path for path in Path("/tmp").glob("paceline-run-*") if path.stat().st_mtime > hosts.folder.stat().st_ctime]
    assert not left


# Problems of host b only: options, the ssh configuration, its mounts, the code of the error, and its message. {0} is
# the folder visible to both hosts.
OTHER_SSHD = "Host b\n  Port 2222\n"  # the host with these mounts
BAD = {
    "wrong interface": ("--interface only-a", OTHER_SSHD, "", "network", "b: network: no interface only-a: give"),
    "interface without a way": ("--interface apart", OTHER_SSHD, "", "link", "b cannot reach a at 172.17.0.1 port"),
    "other torch version": ("", OTHER_SSHD, "mount --bind {0}/other {0}/same;", "torch", "b: torch: 1.0.0: a has 2."),
    "no Python": (
        "--python {0}/only-a/python", OTHER_SSHD, "mount -t tmpfs tmpfs {0}/only-a;", "no-python",
        "host b: no Python at {0}/only-a/python: install it there",
    ),
    "unknown host key": (
        "", "Host b\n  UserKnownHostsFile /dev/null\n", "", "host-key",
        "host b: its host key is not known here: check it and run `ssh b` once",
    ),
    "closed port": ("", "Host b\n  Port 23\n", "", "port", "host b: its ssh port is closed: start sshd"),
    "clock skew": (
        "", OTHER_SSHD, "mount --bind {0}/late {0}/same;", "",
        "paceline: warning: b: clock: 1 min 30 s behind this machine's",
    ),
    "missing script": (
        "", OTHER_SSHD, "mount -t tmpfs tmpfs {0}/examples;", "script",
        "b: script: {0}/examples/quick_start.py does not exist: copy it there",
    ),
    "full disk": (
        "--folder {0}/full", OTHER_SSHD, "mount -t tmpfs -o size=1m tmpfs {0}/full;", "disk",
        "b: disk: 0.0 GiB free in {0}/full: nothing can be saved there",
    ),
}  # fmt: skip
# The command line, which also prints the code of an error.
NAMED = """\
import sys
from paceline.cli.main import app
from paceline.errors import PacelineError
try:
    app(args=sys.argv[1:])
except PacelineError as error:
    print(error.code)
    sys.exit(str(error))
"""


@pytest.mark.parametrize("what", BAD)
def test_a_bad_setup_is_named_before_anything_starts(hosts, what):
    """The command stops its checks after 5 s, so it must report a bad setup within that time."""
    options, client, setup, code, sentence = BAD[what]
    folder = hosts.folder
    for name in ("same", "other/torch", "other/torch-1.0.0.dist-info", "late", "only-a", "full"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "other/torch/__init__.py").write_text("")
    (folder / "other/torch-1.0.0.dist-info/METADATA").write_text("Version: 1.0.0\n")
    (folder / "late/sitecustomize.py").write_text("import time\nt = time.time\ntime.time = lambda: t() - 90.2\n")
    (folder / "only-a/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "only-a/python").chmod(0o755)
    (folder / "client-other").write_text(client + (folder / "client").read_text())
    service = serve_ssh(hosts, "b", setup.format(folder), 2222)
    script = ["python", "-c", "pass"] if what == "clock skew" else [str(folder / "examples/quick_start.py")]
    words = ["run", "--hosts", "a:1,b:1", "--env", f"PYTHONPATH={folder}/same:{paths()}"]
    words += options.format(folder).split()
    words += ["--ssh", f"{shutil.which('ssh')} -F {folder}/client-other", "--", *script]
    try:
        begin_s = time.monotonic()
        job = launch(hosts, *words, program=[sys.executable, "-c", NAMED])
        line = job.stderr.readline()
        print(f"{what}: {time.monotonic() - begin_s:.1f} s: {line.strip()}")
        out, err = finish(job, 1 if code else 0)
        assert line.startswith(sentence.format(folder))
        assert not code or (out, err) == (f"{code}\n", "")  # and nothing else; it runs despite a wrong clock
    finally:
        hosts.services.remove(service)
        hosts.end(service)
    hosts.expect_nothing_left()


def test_a_silent_port_is_named(hosts):
    way = ("-n", hosts.space("b"), "route"), ("blackhole", "10.92.0.1/32")
    run_ip(*way[0], "add", *way[1])
    try:
        _, err = finish(launch(hosts, "run", "--hosts", "a,b", "--", "true"), 2)
        assert "host b: its ssh port does not answer: check that the host is up" in err
    finally:
        run_ip(*way[0], "delete", *way[1])


@pytest.mark.parametrize("line", find_commands("--hosts"))
def test_every_command_over_ssh_in_the_document_runs(hosts, line):
    out, _ = finish(launch(hosts, *shlex.split(line)[1:]), timeout_s=200)
    assert "profile" not in line or "on 2 ranks" in out
    hosts.expect_nothing_left()


def test_only_abandoned_hosts_of_tests_are_removed():
    if why := why_not("hosts"):
        pytest.skip(f"SEVERAL HOSTS ARE NOT TESTED: {why}")
    abandoned = f"paceline-tests-{2**22 + 1}-0000-a"  # no process has this id
    run_ip("netns", "add", abandoned)
    with link_hosts("1mbit") as spaces:
        remove_abandoned()
        listed = run_ip("netns", "list").split()
        assert abandoned not in listed and set(spaces) <= set(listed)
        limits = [subprocess.check_output(["tc", "-n", s, "qdisc", "show", "dev", "eth0"], text=True) for s in spaces]
        assert all("tbf" in text and "rate 1Mbit" in text for text in limits)
    assert not set(spaces) & set(run_ip("netns", "list").split())
