"""Two hosts made of network namespaces: ranks share memory inside each, and leaders communicate between them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.transport import why_not

SCRIPT = Path(__file__).with_name("two_hosts.py")
ROOT = SCRIPT.parents[2]
LIMIT_S = 100


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The names of two connected namespaces, 10.91.0.1 and 10.91.0.2, on an interface named `cable`."""
    if why_not():
        pytest.skip(f"no shared memory between ranks: {why_not()}")
    if shutil.which("ip") is None:
        pytest.skip("TWO HOSTS ARE NOT TESTED: there is no `ip` here to make network namespaces with")
    names = [f"paceline-tests-{os.getpid()}-{side}" for side in ("a", "b")]
    try:
        try:
            for name in names:
                run_ip("netns", "add", name)
            run_ip(
                "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1]
            )
            for number, name in enumerate(names, start=1):
                run_ip("-n", name, "address", "add", f"10.91.0.{number}/24", "dev", "cable")
                run_ip("-n", name, "link", "set", "cable", "up")
                run_ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"TWO HOSTS ARE NOT TESTED: network namespaces are not allowed here: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:  # the link disappears with its ends
            with contextlib.suppress(subprocess.SubprocessError):
                run_ip("netns", "delete", name)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def job(hosts: list[str], tmp_path: Path) -> Iterator[Callable[..., list[Ended]]]:
    """`job((2, 2), ...)`: this number of ranks on each host; how they ended, in rank order, within `LIMIT_S`."""
    started: list[subprocess.Popen[str]] = []

    def run(counts: tuple[int, int], *arguments: str) -> list[Ended]:
        for host, count in enumerate(counts):
            for local_rank in range(count):
                rank = local_rank + sum(counts[:host])
                variables = {
                    "RANK": str(rank), "WORLD_SIZE": str(sum(counts)), "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "10.91.0.1", "MASTER_PORT": "29411",
                    "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
                }  # fmt: skip
                command = ["ip", "netns", "exec", hosts[host], sys.executable, str(SCRIPT), *arguments]
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=tmp_path,
                        env=os.environ | variables,
                        text=True,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                    )
                )
        deadline = time.monotonic() + LIMIT_S
        ended = []
        for process in started:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ended.append(Ended(process.returncode, out, err))
        return ended

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "victim"), [((2, 2), 2), ((2, 1), 1)])
def test_two_hosts_train_reduce_and_name_a_rank_that_dies(job, counts, victim):
    """The victim is the leader of its host, or one that only shares memory with its leader."""
    for rank, end in enumerate(job(counts, str(victim))):
        lines = end.out.splitlines()
        assert lines[:2] == [f"rank {rank} has trained", f"rank {rank} has reduced"], end.err
        if rank == victim:
            assert end.code == -9 and len(lines) == 2
            continue
        assert end.code == 0, end.err
        found = json.loads(lines[2])
        assert f"rank {victim} " in found["error"] and found["after_s"] < 15, found
