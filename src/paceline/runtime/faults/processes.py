"""A rank's process: its state, its stack, how it ended, and why its rank failed.

Used by the launcher, the monitor and the notebook. Does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.connection
import os
import pickle
import re
import signal
import struct
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError, PacelineError

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Files with functions that wait for other ranks, and files that call such functions in torch's C++. The latter count
# only as the innermost frame.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives.py",
    "paceline/parallel/channel.py",
)
_CALLERS = ("torch/distributed/utils.py", "torch/nn/parallel/distributed.py")


class Handle:
    """A process on this host, which is never confused with a later process that reuses its ID. `fd` is readable once
    the process has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = -1
        with contextlib.suppress(ProcessLookupError):
            self.fd = os.pidfd_open(pid)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    @property
    def is_gone(self) -> bool:
        # Uses `poll`, because `select` does not support descriptors above 1023, which a launcher of many ranks may
        # have.
        return self.fd < 0 or bool(multiprocessing.connection.wait([self.fd], 0))

    def read_state(self) -> tuple[str, float]:
        """The process state as in /proc (R runs, S sleeps, D waits for a disk or driver, T is suspended; "" if it is
        gone), and its CPU time in seconds."""
        return ("", 0.0) if self.is_gone else read_state(self.pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.fd, number)

    def find_status(self) -> int | None:
        """The exit status as reported by `os.wait`, kept while a handle or zombie exists; None if unknown."""
        answer = bytearray(struct.pack("Q", 1 << 3).ljust(64, b"\0"))  # PIDFD_INFO_EXIT, since Linux 6.15
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, 0xC040FF0B, answer)
            if struct.unpack_from("Q", answer)[0] & 1 << 3:
                return int(struct.unpack_from("i", answer, 60)[0])
        with contextlib.suppress(OSError, IndexError):
            fields = _read_stat(self.pid)
            if fields[0] == "Z":
                return int(fields[49])
        return None


def read_state(pid: int) -> tuple[str, float]:
    """`Handle.read_state` for a process whose ID cannot have been reused, such as a child."""
    try:
        fields = _read_stat(pid)
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) * _TICK_S


def _read_stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# -- the stack of a process --------------------------------------------------------------------------------------------


def find_frames(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function of the main thread's frames, innermost first, from faulthandler's output."""
    threads = [part for part in re.split(r"\n\s*\n", stack) if 'File "' in part] or [""]
    # The thread that started first comes last, followed by other details of a crash.
    return re.findall(r'File "([^"]*)", line (\S+) in (\S+)', threads[-1])


def describe_frames(stack: str, most: int = 4) -> str:
    return " < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in find_frames(stack)[:most])


def is_in_collective(stack: str) -> bool:
    """Whether the main thread is in a function that waits for other ranks."""
    frames = [file for file, _, _ in find_frames(stack)[:6]]
    return any(file.endswith(_COLLECTIVES) for file in frames) or any(one.endswith(_CALLERS) for one in frames[:1])


def is_importing(stack: str) -> bool:
    """Whether the main thread is importing a module in the middle of a step, which takes as long as the disk needs."""
    for file, _, _ in find_frames(stack):
        if file.endswith("torch/nn/modules/module.py"):
            return False
        if file.startswith("<frozen importlib"):
            return True
    return False


# -- how a process ended -----------------------------------------------------------------------------------------------


def describe_end(code: int, where: str = "", is_oom: bool = False, stack: str = "") -> str:
    """Describe how a process ended, from its exit code, which is negative if a signal killed it. `where` is its step
    and phase, `is_oom` whether the OOM killer recently killed a process, and `stack` the output of a crash."""
    where = f" {where}" if where else ""
    if code >= 0:
        return f"exited with code {code}{where}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    why = ""
    if code == -signal.SIGKILL:
        why = " (by the kernel: out of memory)" if is_oom else " (manually, or by the kernel when memory ran out)"
    at = f"; it was at {describe_frames(stack)}" if find_frames(stack) else ""
    if code == -signal.SIGABRT and is_in_collective(stack):
        at += "; gloo aborts a process that receives a message of unexpected size: use equal shapes on all ranks"
    return f"was killed by {name}{why}{where}{at}"


def count_oom_kills() -> int:
    """The number of processes killed on this system by the OOM killer, including those in control groups."""
    with contextlib.suppress(OSError, AttributeError):
        return int(re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])  # type: ignore
    return 0


# -- the failure of a rank ---------------------------------------------------------------------------------------------

# Phrases that gloo, NCCL and torch's stores use for a peer that is gone or late. They have no error codes.
_BACKENDS = ("gloo", "c10d", "NCCL", "Store")
_PEER_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Timed out waiting",
    "Application timeout caused pair closure", "Connection refused", "communicator was aborted",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """Why a rank returned no value. Outlives the rank."""

    rank: int | None  # None if no single rank is the cause
    when_s: float
    summary: str
    trace: str = ""
    error: PacelineError | None = None
    is_secondary: bool = False  # only reports that another rank failed
    code: str = ""


def find_code(error: BaseException | None) -> str:
    """The code of an error or its cause; "peer-lost" for messages of torch's backends about a lost peer."""
    while error is not None:
        if isinstance(error, PacelineError) and error.code:
            return error.code
        text = str(error) if isinstance(error, RuntimeError) else ""
        if any(name in text for name in _BACKENDS) and any(phrase in text for phrase in _PEER_LOST):
            return "peer-lost"
        error = error.__cause__
    return ""


def describe_failure(rank: int, error: BaseException) -> Failure:
    when_s = time.monotonic()  # first, because the earliest failure is reported and the rest is slow
    trace, lines = "".join(traceback.format_exception(error)), str(error).splitlines()
    summary = f"failed: {type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    ours = error if isinstance(error, PacelineError) else None
    try:
        pickle.loads(pickle.dumps(ours))
    except Exception:  # for an error that cannot be pickled, report only the traceback
        ours = None
    return Failure(rank, when_s, summary, trace, ours, find_code(error) in ("peer-lost", "timeout"))


def make_error(failure: Failure, num_ranks: int, returned: Sequence[int] = ()) -> PacelineError:
    """The error of the rank that failed first. If it only lost a peer, the peer may be one that has `returned`."""
    lost = f" (rank {', '.join(map(str, returned))} had already returned)" if failure.is_secondary and returned else ""
    if failure.error is not None and not lost:
        failure.error.add_note(f"(on rank {failure.rank} of {num_ranks})")
        return failure.error
    trace = f"\n\nTraceback of rank {failure.rank}:\n{failure.trace}" if failure.trace else ""
    who = "" if failure.rank is None else f"rank {failure.rank} of {num_ranks} "
    message = f"{who}{failure.summary}{lost}{trace}"
    return LaunchError(message, failure.rank, failure.trace, failure.code)
