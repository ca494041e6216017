"""Simulated hosts in namespaces of this machine, each with its own name, network and mounts, connected by a cable.

Needs root, `ip` and `unshare`. Nothing is visible outside the namespaces, and everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120
TINY = "--model cnn --channels 2,4 --hidden 8 --batch-size 4 --samples 64"
# The verbs other than train; every launcher must run them.
VERBS = (
    "bench allreduce --sizes 64KiB --iters 5", "bench wrappers --model cnn --batch-size 2 --iters 3",
    f"profile phases {TINY} --iters 3", f"profile trace {TINY} --steps 2",
    f"tune {TINY} --caps 16B,1KiB,4MiB --iters 2", f"scale ranks {TINY} --global-batch-size 8 --iters 2",
)  # fmt: skip


def run_ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
    return done.stdout


@dataclass
class MadeHosts:
    """`names` are the host names; the addresses are 10.92.0.1 and so on."""

    folder: Path
    names: tuple[str, ...]
    mark: str
    services: list[subprocess.Popen[str]] = field(default_factory=list)

    def space(self, name: str) -> str:
        return f"paceline-tests-{self.mark}-{name}"

    def wrap(self, name: str, command: Sequence[str], setup: str = "") -> list[str]:
        """The command, wrapped to run on this host after the shell commands in `setup`, with private mounts."""
        begin = f'hostname {name}; mount --bind "{self.folder}/hosts" /etc/hosts; {setup}'
        return ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "--mount", "sh", "-ec",
                f'{begin} exec "$@"', "sh", *command]  # fmt: skip

    def start(self, name: str, command: Sequence[str], setup: str = "", **options) -> subprocess.Popen[str]:
        options = {"cwd": self.folder, "text": True, "start_new_session": True} | options
        return subprocess.Popen(self.wrap(name, command, setup), **options)

    def serve(self, name: str, command: Sequence[str], setup: str = "", **options) -> subprocess.Popen[str]:
        """Start a service with its output in a file; it stops together with the hosts."""
        log = (self.folder / f"{Path(command[0]).name}-{name}.log").open("a")
        with log:
            service = self.start(name, command, setup, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **options)
        self.services.append(service)
        return service

    def end(self, service: subprocess.Popen[str]) -> None:
        if service.poll() is None:
            service.terminate()
            try:
                service.wait(5)
            except subprocess.TimeoutExpired:
                service.kill()
        service.wait()

    def list_processes(self, but: Sequence[str] = ("sshd", "munged", "slurmctld", "slurmd")) -> list[str]:
        """The processes on the hosts, except their services."""
        found = []
        for name in self.names:
            for pid in run_ip("netns", "pids", self.space(name)).split():
                with contextlib.suppress(OSError):
                    line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    if line.strip() and not any(word in line.partition(" ")[0] for word in but):
                        found.append(f"{name}: {pid} {line}")
        return found

    def expect_nothing_left(self, within_s: float = 15.0) -> None:
        until_s = time.monotonic() + within_s
        while (left := self.list_processes()) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert not left


@contextlib.contextmanager
def make_hosts(folder: Path, names: tuple[str, ...] = ("a", "b")) -> Iterator[MadeHosts]:
    """Hosts on one network, with an interface named `eth0`; skips the test if they cannot be created."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"SEVERAL HOSTS ARE NOT TESTED: there is no `{tool}` here")
    if os.geteuid():
        pytest.skip("SEVERAL HOSTS ARE NOT TESTED: namespaces need root")
    remove_abandoned()
    hosts = MadeHosts(folder, names, f"{os.getpid()}-{secrets.token_hex(2)}")
    lines = ["127.0.0.1 localhost", *(f"10.92.0.{number} {name}" for number, name in enumerate(names, 1))]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    first = hosts.space(names[0])

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    # `timeout` or a closed terminal that stops the tests must also stop the hosts.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        try:
            for name in names:
                run_ip("netns", "add", hosts.space(name))
            run_ip(
                "link", "add", "eth0", "netns", first, "type", "veth", "peer", "eth0", "netns", hosts.space(names[1])
            )
            for number, name in enumerate(names, 1):
                space = hosts.space(name)
                run_ip("-n", space, "address", "add", f"10.92.0.{number}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    run_ip("-n", space, "link", "set", interface, "up")
            subprocess.run(hosts.wrap(names[0], ["true"]), check=True, capture_output=True, text=True, timeout=10)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"SEVERAL HOSTS ARE NOT TESTED: namespaces are not allowed here: {error.stderr.strip()}")
        yield hosts
    finally:
        for number in (signal.SIGINT, *before):  # must not be interrupted
            before[number] = before.get(number) or signal.getsignal(number)
            signal.signal(number, signal.SIG_IGN)
        for service in reversed(hosts.services):
            hosts.end(service)
        for name in names:
            remove_space(hosts.space(name))
        for number, handler in before.items():
            signal.signal(number, handler)


def remove_space(space: str) -> None:
    """Kill everything in a namespace and remove it; parts of it may already be gone."""
    with contextlib.suppress(subprocess.SubprocessError):
        for pid in run_ip("netns", "pids", space).split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        run_ip("netns", "delete", space)


def remove_abandoned() -> None:
    """Remove hosts left over from killed test runs."""
    for space, pid in re.findall(r"^(paceline-tests-(\d+)-\S+)", run_ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            remove_space(space)


def write_tools(folder: Path, **tools: str) -> Path:
    """Write small programs, including `paceline`, to a folder for PATH."""
    place = folder / "tools"
    place.mkdir(exist_ok=True)
    for name, text in ({"paceline": f'exec {sys.executable} -m paceline "$@"'} | tools).items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    return place


def paths() -> str:
    """PYTHONPATH for programs on the hosts."""
    return os.pathsep.join([str(ROOT / "src"), str(ROOT)])


def find_commands(way: str) -> list[str]:
    """The commands of docs/several-hosts.md with this option; each command has one of the three, so all are tested."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "several-hosts.md").read_text())
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    by_way = {word: [line for line in lines if f" {word} " in line] for word in ("--hosts", "--slurm", "--kubernetes")}
    assert sorted(lines) == sorted(line for found in by_way.values() for line in found) and all(by_way.values())
    return by_way[way]
