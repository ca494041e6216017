"""The request from a fault trial to its job, and environments for faults: a small disk, a memory limit, or two hosts.

Each environment exists for one job. Hosts are network namespaces of this machine, which need root.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.errors import MeasurementError

VARIABLE = "PACELINE_FAULT"  # the fields of `Asked` as JSON
OUT = "out"  # the job's output folder, in its own folder
BATCH_SIZE = 8
_DISK_BYTES, _MEMORY_BYTES = 64 << 20, 64 << 20
# Addresses of the two hosts, which have separate namespaces.
HOST_ADDRESS, HOST_PORT = "10.213.9", 29400
_NAMES = ("a", "b")
_BURSTS = {"100mbit": "16kb", "1gbit": "64kb"}
_SLOW = ("root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")


class Asked(NamedTuple):
    """A request for `fault` at a `place` of step `step` on rank `rank`. The job writes its files into `folder`."""

    folder: str
    fault: str = ""
    place: str = "forward"
    rank: int = 1
    step: int = 40
    steps: int = 100
    save_every: int = 10
    wrapper: str = "paceline"
    backend: str = "gloo"
    device: str = "cpu"
    width: int = 256
    group: str = ""  # the control group whose memory runs out
    pause_s: float = 0.0  # pause before the step of the fault, to let a spare get ready


@dataclass(frozen=True)
class Place:
    """A job's environment: by default this machine, unchanged. `prefix` starts a command in it, `group` is a control
    group for the rank to join, and `spaces` are the network namespaces of two hosts with one rank each."""

    prefix: list[str] = field(default_factory=list)
    group: str = ""
    spaces: tuple[str, ...] = ()

    @property
    def torchrun(self) -> list[str]:
        """torchrun's options in this environment."""
        if not self.spaces:
            return ["--standalone"]
        return ["--nnodes", "2", "--master-addr", f"{HOST_ADDRESS}.1", "--master-port", str(HOST_PORT)]

    def wrap(self, command: list[str]) -> list[str]:
        """Build a command that runs `command` in this environment."""
        if not self.spaces:
            return [*self.prefix, *command]
        variables = [f"PACELINE_SECRET={secrets.token_hex(16)}", "GLOO_SOCKET_IFNAME=eth0"]
        parts = []
        for number, (name, space) in enumerate(zip(_NAMES, self.spaces, strict=True)):
            enter = ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-ec", f'hostname {name}; exec "$@"', "sh"]
            parts.append(shlex.join([*enter, "env", *variables, f"PET_NODE_RANK={number}", *command]))
        first, second = parts
        return ["sh", "-c", f"{first} & a=$!; {second} & b=$!; wait $a; code=$?; wait $b && exit $code"]

    def act(self, fault: str, rank: int) -> None:
        """Inject a fault from outside the job, which has just reached the fault's step."""
        match fault:
            case "link-down":
                _call("ip", "-n", self.spaces[rank], "link", "set", "eth0", "down")
            case "slow-link":
                for space in self.spaces:
                    _call("tc", "-n", space, "qdisc", "add", "dev", "eth0", *_SLOW)
            case "host-lost" | "store-lost":
                _end_all(self.spaces[rank])


@contextlib.contextmanager
def open_place(needs: str, folder: Path) -> Iterator[Place]:
    """Create the environment, and remove it at the end, even after an error."""
    with contextlib.ExitStack() as undo:
        match needs:
            case "disk":
                yield Place([*_find_private(), "sh", "-ec", _SMALL_DISK, "sh", str(folder / OUT)])
            case "memory":
                yield Place(group=str(_make_group(undo)))
            case "hosts":
                yield Place(spaces=undo.enter_context(link_hosts()))
            case _:
                yield Place()


# The job saves to a small disk. When the job exits, the content of the disk is copied to the real disk.
_SMALL_DISK = f"""
out=$1; shift
mkdir -p $out; mount -t tmpfs -o size={_DISK_BYTES} tmpfs $out
set +e; "$@"; code=$?
rm -f $out/filler; cp -a $out $out.kept; umount $out
cp -a $out.kept/. $out; exit $code
"""


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise MeasurementError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}", code="no-fault")
    return done.stdout


def _end_all(space: str) -> None:
    for pid in _call("ip", "netns", "pids", space).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _find_private() -> list[str]:
    """The command prefix that starts a command in a separate mount namespace."""
    return ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]


def _can(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=30).returncode == 0


def why_not(needs: str) -> str:
    """The reason why this machine cannot create the environment, or an empty string."""
    tools = {"disk": ["unshare"], "hosts": ["unshare", "ip", "tc"]}.get(needs, [])
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"`{missing[0]}` is not installed"
    if needs == "disk":
        can = _can([*_find_private(), "sh", "-c", "mount -t tmpfs tmpfs /tmp"])
        return "" if can else "mounting a disk needs root"
    if needs == "hosts":
        can = os.geteuid() == 0 and _can(["unshare", "--mount", "--net", "--uts", "true"])
        return "" if can else "creating two hosts (network namespaces) needs root"
    return _find_group()[1] if needs == "memory" else ""


def _find_group() -> tuple[Path, str]:
    """This process's control group for memory limits, or the reason why it has none."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return Path(), "this system has no control groups"
    for _, kinds, path in lines:
        group = Path("/sys/fs/cgroup", "memory" if kinds else "", path.lstrip("/"))
        controllers = kinds.split(",")
        with contextlib.suppress(OSError):  # only version 2 has this file
            controllers += (group / "cgroup.subtree_control").read_text().split()
        if "memory" in controllers and os.access(group, os.W_OK):
            return group, ""
    return Path(), "creating a control group with a memory limit needs root"


def _make_group(undo: contextlib.ExitStack) -> Path:
    group = _find_group()[0] / f"paceline-{secrets.token_hex(4)}"
    group.mkdir()
    undo.callback(_remove_group, group)
    is_new = (group / "memory.max").exists()  # control groups version 2
    (group / ("memory.max" if is_new else "memory.limit_in_bytes")).write_text(str(_MEMORY_BYTES))
    with contextlib.suppress(OSError):  # the host has no swap
        if is_new:
            (group / "memory.swap.max").write_text("0")
        else:  # memory and swap together
            (group / "memory.memsw.limit_in_bytes").write_text(str(_MEMORY_BYTES))
    return group


def _remove_group(group: Path) -> None:
    until_s = time.monotonic() + 5.0
    while group.exists() and time.monotonic() < until_s:
        with contextlib.suppress(OSError):  # raised while a process in the group is still exiting
            group.rmdir()
        time.sleep(0.05)


@contextlib.contextmanager
def link_hosts(rate: str = "") -> Iterator[tuple[str, ...]]:
    """Create two network namespaces that reach only each other, at `HOST_ADDRESS`.1 and .2, optionally with a link
    limited to `rate`. Removes them at the end, with all processes in them."""
    for space, pid in re.findall(r"^(paceline-hosts-(\d+)-\S+)", _call("ip", "netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():  # its owner was killed
            _remove_space(space)
    mark = secrets.token_hex(3)
    spaces = tuple(f"paceline-hosts-{os.getpid()}-{mark}-{name}" for name in _NAMES)
    with contextlib.ExitStack() as undo:
        for space in spaces:
            _call("ip", "netns", "add", space)
            undo.callback(_remove_space, space)
        _call("ip", "link", "add", "eth0", "netns", spaces[0], "type", "veth", "peer", "eth0", "netns", spaces[1])
        for number, space in enumerate(spaces, 1):
            _call("ip", "-n", space, "address", "add", f"{HOST_ADDRESS}.{number}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _call("ip", "-n", space, "link", "set", interface, "up")
            if rate:
                # Use the smallest burst that sustains the rate: a real link does not burst after a pause.
                limit = ("tbf", "rate", rate, "burst", _BURSTS.get(rate, "256kb"), "latency", "50ms")
                _call("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *limit)
        yield spaces


def _remove_space(space: str) -> None:
    with contextlib.suppress(subprocess.SubprocessError, MeasurementError):
        _end_all(space)
    with contextlib.suppress(subprocess.SubprocessError, MeasurementError):
        _call("ip", "netns", "delete", space)
