"""Two hosts made of network namespaces: ranks share memory inside each, and leaders communicate between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.transport import why_not
from tests.dist.made_hosts import MadeHosts, make_hosts, paths

SCRIPT = Path(__file__).with_name("two_hosts.py")
LIMIT_S = 100


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[MadeHosts]:
    if why_not():
        pytest.skip(f"no shared memory between ranks: {why_not()}")
    with make_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made
        made.expect_nothing_left()


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def job(hosts: MadeHosts) -> Iterator[Callable[..., list[Ended]]]:
    """`job((2, 2), ...)`: run this many ranks on each host; returns how they ended, in rank order, within `LIMIT_S`."""
    started: list[subprocess.Popen[str]] = []

    def run(counts: tuple[int, int], *arguments: str) -> list[Ended]:
        for name, count in zip(hosts.names, counts, strict=True):
            for local_rank in range(count):
                variables = {
                    "RANK": str(len(started)), "WORLD_SIZE": str(sum(counts)), "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": hosts.names[0], "MASTER_PORT": "29411",
                    "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths(),
                }  # fmt: skip
                outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                command = [sys.executable, str(SCRIPT), *arguments]
                started.append(hosts.start(name, command, env=os.environ | variables, **outputs))
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
    """The victim is the leader of its host, or a rank that only shares memory with the leader."""
    for rank, end in enumerate(job(counts, str(victim))):
        lines = end.out.splitlines()
        assert lines[:2] == [f"rank {rank} has trained", f"rank {rank} has reduced"], end.err
        if rank == victim:
            assert end.code == -9 and len(lines) == 2
            continue
        assert end.code == 0, end.err
        found = json.loads(lines[2])
        assert f"rank {victim} " in found["error"] and found["after_s"] < 15, found
