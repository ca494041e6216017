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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError, MeasurementError, refuse
from paceline.measure import fault_places
from paceline.measure.fault_places import OUT, Place, open_place
from paceline.records.kinds import FaultRecord
from paceline.runtime.agent import build_guard
from paceline.runtime.monitor import TIMEOUT_VARIABLE

SYSTEMS = ("train", "script", "torch")
ATTACHED = "attached"  # torch's wrapper, in a script that knows nothing of the monitor


class Fault(NamedTuple):
    """`place`: where in a step it happens. `cause`: the words by which its cause is known; none: an honest pause, or a
    network that is only slow. `needs`: a place of its own. `names_rank`: the words are of the rank. `rank`: where only
    one can have it. `is_saved`: afterwards a run must resume from its newest checkpoint. `is_final`: whatever its
    policy, a run does not continue."""

    place: str
    cause: str
    needs: str = ""
    names_rank: bool = True
    rank: int | None = None
    is_saved: bool = False
    is_final: bool = False
    systems: tuple[str, ...] = (*SYSTEMS, ATTACHED)


FAULTS: dict[str, Fault] = {
    "kill": Fault("forward", "SIGKILL"),
    "stop": Fault("forward", "stopped"),
    "segv": Fault("backward", "SIGSEGV"),
    "abrt": Fault("forward", "SIGABRT"),
    "exit": Fault("forward", r"code\s*:? 3\b"),
    "term": Fault("forward", "SIGTERM", is_final=True),  # asks all ranks to save and stop
    "oom": Fault("forward", "by the kernel, as memory ran out", "memory"),
    "gil": Fault("forward", "GIL"),
    "loop": Fault("forward", "has been computing"),
    "deadlock": Fault("backward", "has been blocked"),
    "endless-kernel": Fault("forward", "GPU that does not finish", "gpu"),
    "exception": Fault("forward", "ValueError: a bad sample"),
    "exception-in-backward": Fault("backward", "ValueError: a bad sample"),
    "exception-in-optimizer": Fault("optimizer", "ValueError: a bad sample"),
    "exception-in-loader": Fault("between", "ValueError: a bad sample"),
    "extra-collective": Fault("between", "collective|a barrier"),
    "other-shape": Fault("between", "different operations|size doesn't match|different collectives", names_rank=False),
    "skipped-step": Fault("optimizer", "drifted apart", names_rank=False, is_final=True, systems=SYSTEMS),
    "early-end": Fault("between", "closed its world|has left", systems=("script", "torch")),
    "nan": Fault("forward", "not finite", is_final=True, systems=("train", "torch")),
    "flipped-weight": Fault("between", "drifted apart", names_rank=False, is_final=True, systems=SYSTEMS),
    "disk-full": Fault(
        "between", "No space left", "disk", names_rank=False, is_saved=True, is_final=True, systems=("train", "torch")
    ),
    "kill-in-save": Fault("between", "SIGKILL", rank=0, is_saved=True, is_final=True),
    "flipped-byte": Fault("start", "damaged", names_rank=False, is_final=True, systems=("train", "torch")),
    "link-down": Fault("forward", "is lost", "hosts", names_rank=False, is_final=True),
    "host-lost": Fault("forward", "is lost", "hosts", rank=1, is_final=True),
    "store-lost": Fault("forward", "is lost", "hosts", rank=0, is_final=True),
    "slow-link": Fault("forward", "", "hosts"),
    "stall": Fault("between", ""),
    "evaluate": Fault("between", ""),
    "straggle": Fault("forward", ""),
    "noise": Fault("between", "", systems=("train", "script", ATTACHED)),  # all of these, for as long as is waited
}
_JOB = Path(__file__).with_name("fault_job.py")
_LONG_STEPS = 1_000_000  # a job that ends by its fault
_START_S = 120.0
_WARM_S = 8.0  # how long a spare may take to get ready before the fault
_SAVED_BYTES = {"kill-in-save": 32 << 20, "noise": 8 << 20}  # of a state that takes a while to be written
_STOP_S = 60.0  # how long a job may take to end that was asked to
_HANGS, _HANG_TIMEOUT = ("gil", "loop", "deadlock", "endless-kernel", "extra-collective"), "5s"
_LEAVE_S = 2.0, 8.0  # how long processes may take to end after the command, on one host and on two


def why_not(fault: str, device: str, ranks: int) -> str:
    """Why it cannot be done here; empty where it can."""
    needs = FAULTS[fault].needs
    if needs == "hosts" and ranks != 2:
        return "there is one rank on each of two hosts; use --ranks 2"
    return "it needs --device cuda" if needs == "gpu" and device != "cuda" else fault_places.why_not(needs)


def parse_faults(names: str, device: str = "cpu", ranks: int = 2) -> tuple[list[str], dict[str, str]]:
    """Those that were named, and of "all" those that can be done here; the others, and why not."""
    chosen = list(FAULTS) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise ConfigError(f"unknown faults: {', '.join(unknown)}; known are {', '.join(FAULTS)}")
    skipped = {name: why for name in chosen if (why := why_not(name, device, ranks))}
    if names != "all":
        refuse(*((True, f"--faults {name}: {why}") for name, why in skipped.items()))
    return [name for name in chosen if name not in skipped], skipped


class _Job:
    """A command in a session of its own, what it prints and when, and all processes that it started."""

    def __init__(self, command: list[str], folder: Path, asked: dict[str, Any], is_attached: bool = False) -> None:
        self.token, self.lines = secrets.token_hex(8), list[tuple[float, str]]()
        variables = {"PACELINE_FAULT": json.dumps(asked), "PACELINE_FAULT_TRIAL": self.token, "PYTHONUNBUFFERED": "1"}
        variables |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)}
        variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables |= {"PACELINE_MONITOR": "1"} if is_attached else {}
        # A hang is named at once, and ended after this time; pauses have the time that they have elsewhere.
        variables |= {TIMEOUT_VARIABLE: _HANG_TIMEOUT} if asked["fault"] in _HANGS else {}
        (folder / "tmp").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*build_guard(signal.SIGTERM), *command], cwd=folder, env=os.environ | variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, text=True, errors="replace",
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

    def find_lines(self, pattern: str, before_s: float = math.inf) -> Iterator[tuple[float, str, str]]:
        """When the pattern was complete, the line with its end, and all its lines: it may go over three."""
        lines = [one for one in self.lines if one[0] < before_s]
        for number, (when_s, line) in enumerate(lines):
            text = "\n".join(one for _, one in lines[max(0, number - 2) : number + 1])
            if found := re.search(pattern, text):
                yield when_s, line, text[text.rfind("\n", 0, found.start()) + 1 :]

    def find_last(self) -> str:
        """What it said in the end: its error, or the last line with a word."""
        lines = [line for _, line in reversed(self.lines) if re.search("[a-zA-Z]", line)]
        errors = [line for line in lines if re.search(r"^paceline: |\w(Error|Exception): ", line)]
        return next(iter((*errors, *lines)), "").strip()

    def stop(self) -> None:
        """Ask it to end, as a person or a job manager does."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)

    def end(self) -> None:
        for pid in (*self.find_processes(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(2.0)


@contextlib.contextmanager
def _open_job(command: list[str], folder: Path, asked: dict[str, Any], system: str) -> Iterator[_Job]:
    job = _Job(command, folder, asked, system == ATTACHED)
    try:
        yield job
    finally:
        job.end()


def build_command(
    system: str, backend: str, ranks: int, asked: dict[str, Any], folder: Path, policy: str = "stop",
    place: Place | None = None,
) -> list[str]:  # fmt: skip
    place = place or Place()
    has_hosts = place.torchrun != Place.torchrun
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place.torchrun, "--nproc-per-node"]
    torchrun += ["1" if has_hosts else str(ranks)]
    if system != "train":
        return place.wrap([*torchrun, str(_JOB)])
    runs = sorted((folder / OUT).glob("*/checkpoints"))
    train = [*torchrun, "-m", "paceline", "train"] if has_hosts else [sys.executable, "-m", "paceline", "train"]
    if runs:
        return place.wrap([*train, "--resume", str(runs[-1].parent), "--steps", str(asked["steps"])])
    train += [] if has_hosts else ["--ranks", str(ranks), "--on-fault", policy]
    return place.wrap([
        *train, "--model", f"{_JOB}:build", "--data", "synthetic:images", "--backend", backend, "--device",
        asked["device"], "--batch-size", str(asked["batch_size"]), "--steps", str(asked["steps"]), "--save-every",
        f"{asked['save_every']}steps", "--out", str(folder / OUT),
    ])  # fmt: skip


def _find_saved(system: str, folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    if system == "train":
        steps = [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{OUT}/*/checkpoints/step-*")]
        return max(steps, default=0)
    import torch

    path = folder / OUT / "saved.pt"
    with contextlib.suppress(RuntimeError):  # damaged, for a fault
        return int(torch.load(path)["step"]) if path.exists() else 0
    return 0


def measure_fault(
    fault: str, system: str, backend: str, ranks: int = 2, trial: int = 0, limit_s: float = 30.0, restart: bool = False,
    policy: str = "stop", state_bytes: int = 0, device: str = "cpu",
) -> FaultRecord:  # fmt: skip
    """Do one fault to one job; `limit_s` is how long to wait, after it, for its cause to be named, and how long noise
    lasts. `policy` is that of `paceline train`, and `state_bytes` those of its model and momentum; 0: a small one."""
    kind, asked_policy, is_noise = FAULTS[fault], policy, fault == "noise"
    is_pause, step = not kind.cause, 40 + trial % 7
    rank = (trial + 1) % ranks if kind.rank is None else kind.rank
    policy = "stop" if kind.is_saved else policy
    goes_on = policy != "stop" and system == "train" and not is_pause and not kind.is_final
    ends, more = (is_pause and not is_noise) or kind.place == "start", 1 if fault == "slow-link" else 40
    asked = {
        "fault": "exception" if fault.startswith("exception") else fault, "place": kind.place, "rank": rank,
        "step": step, "steps": step + more if ends else step + 4 if goes_on else _LONG_STEPS,
        "save_every": 100 if is_noise else 10, "batch_size": 8, "backend": backend, "device": device,
        "wrapper": "torch" if system in ("torch", ATTACHED) else "paceline",
    }  # fmt: skip
    asked |= {"pause_s": _WARM_S} if goes_on else {}
    state_bytes = state_bytes or _SAVED_BYTES.get(fault, 0)
    asked |= {"width": _find_width(state_bytes)} if state_bytes else {}
    shared = _list_shared()
    with tempfile.TemporaryDirectory(prefix="paceline-fault-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        asked["folder"] = name
        place = stack.enter_context(open_place(kind.needs, folder))
        asked |= place.asked
        again = _make_damaged(system, backend, ranks, asked, folder, step) if kind.place == "start" else None
        command = build_command(system, backend, ranks, asked, folder, policy, place)
        with _open_job(command, folder, asked, system) as job:
            fault_s, noted = _await_fault(job, folder)
            place.act(fault, rank)
            until_s = fault_s + limit_s * (2 if fault == "slow-link" else 1)  # its last step is slow
            while job.process.poll() is None and time.monotonic() < until_s:
                time.sleep(0.02)
            waited_s = time.monotonic()
            if is_through := is_noise and job.process.poll() is None:
                job.stop()
            is_over = job.process.poll() is not None
            ended_s = waited_s - fault_s if is_over else None
            deadline_s = time.monotonic() + (_LEAVE_S[kind.needs == "hosts"] if is_over else 0.0)
            while (left := job.find_processes()) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            pattern, code = _build_pattern(kind, rank), job.process.returncode
            matches = list(job.find_lines(pattern, waited_s if is_through else math.inf))
            found = matches[0] if matches else None
            text = job.find_last() if found is None else found[1].strip()
        left_over = [f"{len(left)} processes"] if left and is_over else []
        left_over += sorted(_list_shared() - shared)
        left_over += sorted(path.name for path in (folder / "tmp").iterdir() if path.name.startswith("paceline"))
        lost = max(0, noted - 1 - _find_saved(system, folder)) if again is None else again
        restart_s, recovered = None, _find_recovered(folder) if goes_on else {}
        if (restart and not is_pause) or kind.is_saved:
            restart_s = _measure_restart(system, backend, ranks, asked, folder, step)
        noises = Counter[str]()
        for path in folder.glob("noise-*"):
            with contextlib.suppress(ValueError):  # it was killed while it wrote
                noises.update(json.loads(path.read_text()))
    if is_pause:
        is_right, detected_s = (is_through or code == 0) and found is None, None
    else:
        is_right, detected_s = found is not None, None if found is None else found[0] - fault_s
        is_right = is_right and (not goes_on or code == 0) and (not kind.is_saved or restart_s is not None)
    if is_right and noises:
        text = ", ".join(f"{name} {count}" for name, count in sorted(noises.items()))
    return FaultRecord(
        fault=fault, system=system, backend=backend, ranks=ranks, trial=trial, rank=rank, step=step,
        detected_s=detected_s, is_right=is_right, ended_s=ended_s, limit_s=limit_s,
        steps_lost=None if is_pause else recovered.get("steps_lost", lost), restart_s=restart_s,
        left_over=tuple(left_over), said=text[:2000], policy=recovered.get("policy", "stop"),
        recovered_s=recovered.get("recovered_s"), on_fault=asked_policy,
        names_step=any(_names_step(kind, lines, noted) for _, _, lines in matches)
        if found and kind.cause and kind.names_rank else None,
    )  # fmt: skip


def build_failed(
    why: str, fault: str, system: str, backend: str, ranks: int, trial: int, limit_s: float, restart: bool, policy: str,
    *_: Any,
) -> FaultRecord:  # fmt: skip
    """Of a job that did not come to its fault: that counts as one which was not named rightly."""
    return FaultRecord(
        fault=fault, system=system, backend=backend, ranks=ranks, trial=trial, rank=0, step=0, detected_s=None,
        is_right=False, ended_s=None, limit_s=limit_s, steps_lost=0 if FAULTS[fault].cause else None, restart_s=None,
        left_over=(), said=why[:2000], on_fault=policy,
    )  # fmt: skip


def _build_pattern(kind: Fault, rank: int) -> str:
    """Of what names the fault, or of what must not be said in a pause."""
    if not kind.cause:
        return r"paceline: (\w+: )?(rank \d|ranks \d|all ranks|the host )"
    named = rf"(?i)rank\s*:?\s*{rank}\b((?!\brank)[^\n])*(\n[^\n]*){{0,2}}"  # and no other rank before the cause
    return f"{named}({kind.cause})" if kind.names_rank else kind.cause


def _names_step(kind: Fault, text: str, step: int) -> bool:
    """Whether a verdict names this step; what is between two steps, or during a save, may be of either."""
    found = re.search(r"(?i)\bstep (\d+)", text)
    return found is not None and int(found[1]) - step in ((-1, 0) if kind.place == "between" else (0,))


def _make_damaged(system: str, backend: str, ranks: int, asked: dict[str, Any], folder: Path, step: int) -> int:
    """Run the job to its step, and flip one bit of the newest checkpoint; what resumes from it comes to its fault.
    Returns how many steps lie between that one and the one before it."""
    _measure_restart(system, backend, ranks, asked, folder, step)
    paths = sorted(folder.glob(f"{OUT}/*/checkpoints/step-*/model.safetensors")) or [folder / OUT / "saved.pt"]
    content = bytearray(paths[-1].read_bytes())
    content[len(content) // 2] ^= 1
    paths[-1].write_bytes(content)
    (folder / "injected").write_text(f"{time.monotonic()} {step}")
    steps = [int(path.parent.name.rpartition("-")[2]) for path in paths[-2:] if path.name != "saved.pt"]
    return steps[-1] - steps[0] if steps else 0


def _find_width(state_bytes: int) -> int:
    """Of the layers of a model that has as many bytes of weights and momentum."""
    return max(1, round(math.sqrt(state_bytes / 8 + 397**2) - 397))


def _find_recovered(folder: Path) -> dict[str, Any]:
    """What a run that went on noted of its fault; empty where it did not."""
    for path in folder.glob(f"{OUT}/*/config.json"):
        for fault in json.loads(path.read_text()).get("faults", []):
            return {name: value for name, value in fault.items() if value is not None}
    return {}


def _list_shared() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir("/dev/shm") if "paceline" in name or "torch" in name}
    return set()


def _await_fault(job: _Job, folder: Path) -> tuple[float, int]:
    """When it happened, and in which step."""
    until_s, path = time.monotonic() + _START_S, folder / "injected"
    while not path.exists() or not path.read_text():
        if job.process.poll() is not None or time.monotonic() > until_s:
            job.end()
            said = job.find_last() or "nothing"
            raise MeasurementError(f"the job did not come to its fault; it said: {said}", code="no-fault")
        time.sleep(0.01)
    when_s, step = path.read_text().split()
    return float(when_s), int(step)


def _measure_restart(
    system: str, backend: str, ranks: int, asked: dict[str, Any], folder: Path, step: int
) -> float | None:
    """Seconds from a restart of the same job until it ends with the step in which the fault was; None: it did not."""
    again = asked | {"fault": "", "steps": step}
    begin_s = time.monotonic()
    with _open_job(build_command(system, backend, ranks, again, folder), folder, again, system) as job:
        try:
            code = job.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            code = 1
    return None if code else time.monotonic() - begin_s
