"""One fault, done to a real job: how long until it is named, rightly or not, what is lost, and what is left behind.

The job is `fault_job`, in processes of its own: under `paceline train`, as a script with Paceline's wrapper and monitor
under torchrun, and as a script with torch's wrapper alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, MeasurementError, refuse
from paceline.records.kinds import FaultRecord

# Each fault: where it happens, and the words by which its cause is known. No words: an honest pause.
FAULTS: dict[str, tuple[str, str]] = {
    "kill": ("forward", "SIGKILL"),
    "stop": ("forward", "stopped"),
    "segv": ("backward", "SIGSEGV"),
    "abrt": ("forward", "SIGABRT"),
    "exit": ("forward", r"code\s*:? 3\b"),
    "term": ("forward", "SIGTERM"),
    "gil": ("forward", "GIL"),
    "loop": ("forward", "does not come to an end"),
    "deadlock": ("backward", "hangs"),
    "endless-kernel": ("forward", "GPU that does not finish"),
    "exception": ("forward", "ValueError: a bad sample"),
    "exception-in-backward": ("backward", "ValueError: a bad sample"),
    "exception-in-optimizer": ("optimizer", "ValueError: a bad sample"),
    "exception-in-loader": ("between", "ValueError: a bad sample"),
    "extra-collective": ("between", "collective"),
    "stall": ("between", ""),
    "evaluate": ("between", ""),
    "straggle": ("forward", ""),
}
SYSTEMS = ("train", "script", "torch")
_JOB = Path(__file__).with_name("fault_job.py")
_LONG_STEPS = 1_000_000  # a job that ends by its fault
_START_S = 120.0
_WARM_S = 8.0  # how long a spare may take to get ready before the fault
_LEAVE_S = 2.0  # how long processes may take to end after the command


def why_not(fault: str, device: str) -> str:
    """Why it cannot be done here; empty where it can."""
    return "it needs --device cuda" if fault == "endless-kernel" and device != "cuda" else ""


def parse_faults(names: str, device: str = "cpu") -> list[str]:
    """Those that were named; of "all", those that can be done here."""
    if names == "all":
        return [name for name in FAULTS if not why_not(name, device)]
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise ConfigError(f"unknown faults: {', '.join(unknown)}; known are {', '.join(FAULTS)}")
    refuse(*((bool(why), f"--faults {name}: {why}") for name in chosen for why in [why_not(name, device)]))
    return chosen


class _Job:
    """A command in a session of its own, what it prints and when, and all processes that it started."""

    def __init__(self, command: list[str], folder: Path, asked: dict[str, Any]) -> None:
        self.token, self.lines = secrets.token_hex(8), list[tuple[float, str]]()
        variables = {"PACELINE_FAULT": json.dumps(asked), "PACELINE_FAULT_TRIAL": self.token, "PYTHONUNBUFFERED": "1"}
        variables |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)}
        variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        (folder / "tmp").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            command, cwd=folder, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def find_processes(self) -> list[int]:
        """Those that have the mark of this job in their environment, its own process aside."""
        found, mark = [], f"PACELINE_FAULT_TRIAL={self.token}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                is_ours = entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0")
                if is_ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.process.pid]

    def find_line(self, pattern: str) -> tuple[float, str] | None:
        """When the pattern was complete, and the line with its end; it may go over three lines."""
        lines = list(self.lines)
        for number, (when_s, line) in enumerate(lines):
            text = "\n".join(one for _, one in lines[max(0, number - 2) : number + 1])
            if re.search(pattern, text):
                return when_s, line
        return None

    def end(self) -> None:
        for pid in (*self.find_processes(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(2.0)


@contextlib.contextmanager
def _open_job(command: list[str], folder: Path, asked: dict[str, Any]) -> Iterator[_Job]:
    job = _Job(command, folder, asked)
    try:
        yield job
    finally:
        job.end()


def build_command(
    system: str, backend: str, ranks: int, asked: dict[str, Any], folder: Path, policy: str = "stop"
) -> list[str]:
    if system == "train":
        runs = sorted((folder / "out").glob("*/checkpoints"))
        train = [sys.executable, "-m", "paceline", "train"]
        if runs:
            return [*train, "--resume", str(runs[-1].parent), "--steps", str(asked["steps"])]
        return [
            *train, "--model", f"{_JOB}:build", "--data", "synthetic:images", "--ranks", str(ranks),
            "--backend", backend, "--device", asked["device"], "--batch-size", str(asked["batch_size"]),
            "--steps", str(asked["steps"]), "--save-every", f"{asked['save_every']}steps",
            "--out", str(folder / "out"), "--on-fault", policy,
        ]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, str(_JOB)]


def _find_saved(system: str, folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    if system == "train":
        steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("out/*/checkpoints/step-*")]
        return max(steps, default=0)
    import torch

    path = folder / "saved.pt"
    return int(torch.load(path)["step"]) if path.exists() else 0


def measure_fault(
    fault: str, system: str, backend: str, ranks: int = 2, trial: int = 0, limit_s: float = 30.0, restart: bool = False,
    policy: str = "stop", state_bytes: int = 0, device: str = "cpu",
) -> FaultRecord:  # fmt: skip
    """Do one fault to one job; `limit_s` is how long to wait, after it, for its cause to be named. `policy` is that of
    `paceline train`, and `state_bytes` those of its model and momentum; 0: a small one."""
    place, cause = FAULTS[fault]
    is_pause, rank, step = not cause, (trial + 1) % ranks, 40 + trial % 7
    # SIGTERM asks all ranks to save and stop: nothing is to be recovered.
    goes_on = policy != "stop" and system == "train" and not is_pause and fault != "term"
    asked = {
        "fault": fault.partition("-in-")[0], "place": place, "rank": rank, "step": step,
        "steps": step + 40 if is_pause else step + 4 if goes_on else _LONG_STEPS, "save_every": 10, "batch_size": 8,
        "backend": backend, "device": device, "wrapper": "torch" if system == "torch" else "paceline",
    }  # fmt: skip
    asked |= {"pause_s": _WARM_S} if goes_on else {}
    asked |= {"width": _find_width(state_bytes)} if state_bytes else {}
    shared = _list_shared()
    with tempfile.TemporaryDirectory(prefix="paceline-fault-") as name:
        folder = Path(name)
        asked["folder"] = str(folder)
        command = build_command(system, backend, ranks, asked, folder, policy)
        with _open_job(command, folder, asked) as job:
            fault_s = _await_fault(job, folder)
            pattern = rf"(?i)rank\s*:?\s*{rank}\b[^\n]*(\n[^\n]*){{0,2}}({cause})" if cause else r"paceline: .*rank"
            until_s = fault_s + limit_s
            while job.process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
            is_over = job.process.poll() is not None
            ended_s = time.monotonic() - fault_s if is_over else None
            deadline_s = time.monotonic() + (_LEAVE_S if is_over else 0.0)
            while (left := job.find_processes()) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            found, code = job.find_line(pattern), job.process.returncode
            said = [line for _, line in job.lines]
        left_over = [f"{len(left)} processes"] if left and is_over else []
        left_over += sorted(_list_shared() - shared)
        saved = _find_saved(system, folder)
        restart_s, recovered = None, _find_recovered(folder) if goes_on else {}
        if restart and cause:
            restart_s = _measure_restart(system, backend, ranks, asked, folder, step)
    if is_pause:
        is_right, detected_s = code == 0 and found is None, None
    else:
        is_right, detected_s = found is not None, None if found is None else found[0] - fault_s
        is_right = is_right and (not goes_on or code == 0)
    text = found[1] if found is not None else next((line for line in reversed(said) if line.strip()), "")
    return FaultRecord(
        fault=fault, system=system, backend=backend, ranks=ranks, trial=trial, rank=rank, step=step,
        detected_s=detected_s, is_right=is_right, ended_s=ended_s, limit_s=limit_s,
        steps_lost=None if is_pause else recovered.get("steps_lost", step - 1 - saved), restart_s=restart_s,
        left_over=tuple(left_over), said=text.strip()[:2000], policy=recovered.get("policy", "stop"),
        recovered_s=recovered.get("recovered_s"),
    )  # fmt: skip


def _find_width(state_bytes: int) -> int:
    """Of the layers of a model that has as many bytes of weights and momentum."""
    return max(1, round(math.sqrt(state_bytes / 8 + 397**2) - 397))


def _find_recovered(folder: Path) -> dict[str, Any]:
    """What a run that went on noted of its fault; empty where it did not."""
    for path in folder.glob("out/*/config.json"):
        for fault in json.loads(path.read_text()).get("faults", []):
            return {name: value for name, value in fault.items() if value is not None}
    return {}


def _list_shared() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir("/dev/shm") if "paceline" in name or "torch" in name}
    return set()


def _await_fault(job: _Job, folder: Path) -> float:
    """When it happened."""
    until_s, path = time.monotonic() + _START_S, folder / "injected"
    while not path.exists() or not path.read_text():
        if job.process.poll() is not None or time.monotonic() > until_s:
            job.end()
            last = next((line for _, line in reversed(job.lines) if line.strip()), "nothing")
            raise MeasurementError(f"the job did not come to its fault; it said: {last}", code="no-fault")
        time.sleep(0.01)
    return float(path.read_text().split()[0])


def _measure_restart(system: str, backend: str, ranks: int, asked: dict[str, Any], folder: Path, step: int) -> float:
    """Seconds from a restart of the same job until it ends with the step in which the fault was."""
    again = asked | {"fault": "", "steps": step}
    begin_s = time.monotonic()
    with _open_job(build_command(system, backend, ranks, again, folder), folder, again) as job:
        try:
            job.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            return float("inf")
    return time.monotonic() - begin_s
