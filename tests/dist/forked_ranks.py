"""Dozens of ranks for tests that kill them: one process imports torch, and each rank is forked from it.

`forked("module:function", ...)` runs a function in a fork of that process. The function starts `Ranks`, acts on them,
and returns or raises. Ranks of the launcher import torch, which takes seconds; these take milliseconds. The parent
never uses a thread, so that forking it is safe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    folder = tmp_path_factory.mktemp("forked")
    variables = {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")]),
    }  # fmt: skip
    zygote = subprocess.Popen(
        [sys.executable, "-m", "tests.dist.forked_ranks"],
        cwd=REPOSITORY, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert zygote.stdin is not None and zygote.stdout is not None
    requests, answers = zygote.stdin, zygote.stdout

    def run(function: str, *args: Any) -> Any:
        requests.write(json.dumps([function, args]) + "\n")
        requests.flush()
        line = answers.readline()
        assert line and answers.readline() == "gone\n", "the process that forks ranks has died"
        answer = json.loads(line)
        if "trace" in answer:
            pytest.fail(answer["trace"], pytrace=False)
        assert not list(folder.iterdir()), "files left behind"
        return answer["value"]

    yield run
    requests.close()
    zygote.wait(timeout=100)
    answers.close()


def serve() -> None:
    """Fork for every request, and reply with the function's result or error."""
    import torch.distributed  # noqa: F401

    from paceline.transport import group, register

    assert group.PacelineGroup and len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    register()
    for line in sys.stdin:
        name, args = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                module, function = name.split(":")
                answer = {"value": getattr(importlib.import_module(module), function)(*args)}
            except BaseException:
                answer = {"trace": traceback.format_exc()}
            os.write(1, (json.dumps(answer) + "\n").encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")  # processes exit before their test ends


class Ranks:
    """Forked ranks of one job, each with an open default group on the shm backend.

    `work(rank, say, *args)` runs on each rank; its results and everything passed to `say` are sent back. Afterward
    every rank destroys its group and reports leftovers. Leaving the block terminates the remaining ranks.
    """

    def __init__(self, size: int, work: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> None:
        self.size, self._heard = size, [b""] * size
        handle, self._meeting = tempfile.mkstemp(prefix="meeting-")
        os.close(handle)
        self.pids, self._links = [], []
        for rank in range(size):
            link, far = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, size, self._meeting, far, timeout_s, work, args)
            os.close(far)
            self.pids.append(pid)
            self._links.append(link)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for link in self._links:
            os.close(link)
        Path(self._meeting).unlink(missing_ok=True)  # the last rank's store may already have removed the file

    def hear(self, rank: int, timeout_s: float = TIMEOUT_S) -> Any:
        """The next message of a rank. Errors there are raised here."""
        import select

        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._heard[rank]:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._links[rank]], [], [], left)[0], f"rank {rank} says nothing"
            piece = os.read(self._links[rank], 65536)
            assert piece, f"rank {rank} is gone"
            self._heard[rank] += piece
        line, self._heard[rank] = self._heard[rank].split(b"\n", 1)
        said = json.loads(line)
        if isinstance(said, dict) and "trace" in said:
            raise AssertionError(f"rank {rank} of {self.size} failed:\n{said['trace']}")
        return said

    def hear_all(self) -> list[Any]:
        return [self.hear(rank) for rank in range(self.size)]

    def conclude(self, *except_ranks: int) -> dict[int, Any]:
        """The results of the ranks; fails if a rank has not released all resources of a group."""
        answers = {rank: self.hear(rank) for rank in range(self.size) if rank not in except_ranks}
        for rank, answer in answers.items():
            assert not answer["left"], f"rank {rank} still has {answer['left']}"
        return {rank: answer["value"] for rank, answer in answers.items()}


def _be_rank(
    rank: int, size: int, meeting: str, link: int, timeout_s: float, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    def say(something: Any) -> None:
        os.write(link, (json.dumps(something) + "\n").encode())

    try:
        import torch.distributed as dist

        before = list_descriptors()
        limit = timedelta(seconds=timeout_s)
        store: Any = dist.FileStore(meeting, size)
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=limit)
        value = work(rank, say, *args)
        del store
        if dist.is_initialized():
            dist.destroy_process_group()
        say({"value": value, "left": find_leftovers(before)})
    except BaseException:
        say({"trace": traceback.format_exc()})
    os._exit(0)


def list_descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def find_leftovers(before: dict[str, str]) -> list[str]:
    """New file descriptors, and shared memory that is still mapped."""
    gc.collect()
    now = list_descriptors()
    left = [f"descriptor {name} -> {now[name]}" for name in now if before.get(name) != now[name]]
    maps = Path("/proc/self/maps").read_text()
    return left + re.findall(r".*memfd:paceline.*", maps)


if __name__ == "__main__":
    serve()
