"""`paceline faults`: repeatedly injects faults into a small job. How quickly and accurately are they identified?

The job is `fault_job`, in separate processes: under `paceline train`, as a script with Paceline's wrapper and monitor
under torchrun, and as a script with only torch's wrapper.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil

from paceline.errors import ConfigError, MeasurementError, refuse
from paceline.options import Option, check_counts
from paceline.records.kinds import FaultRecord
from paceline.records.samples import group_by
from paceline.records.store import RUN_FILE, Study, find_file
from paceline.report.result import Result
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.runtime.faults.monitor import TIMEOUT_VARIABLE
from paceline.runtime.hosts.agent import build_guard
from paceline.runtime.ranks.launch import check_rank_count
from paceline.runtime.ranks.session import Task, open_session
from paceline.studies import fault_places
from paceline.studies.fault_places import BATCH_SIZE, OUT, VARIABLE, Asked, open_place
from paceline.training.train_settings import POLICIES
from paceline.units import format_duration, format_number_of, parse_size
from paceline.verbs.jobs import Names, Place, check_resume, finish, list_names

SYSTEMS = ("train", "script", "torch")
ATTACHED = "attached"  # torch's wrapper, in a script without any monitor code
_MOST_TRIALS = 10_000
_QUICK = "kill,stop,gil,loop,exception,term,stall"


class Fault(NamedTuple):
    """A kind of fault.

    `place`: the part of a step in which it happens. `cause`: the pattern of a correct report; empty for pauses and slow
    networks, which are not faults. `needs`: a special environment (`fault_places`). `names_rank`: whether the report
    must identify the rank. `rank`: the only rank that can have this fault. `is_saved`: afterward, a run must resume
    from its newest checkpoint. `is_final`: the run ends under every policy.
    """

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
    "term": Fault("forward", "SIGTERM", is_final=True),  # a request to all ranks to save and stop
    "oom": Fault("forward", "by the kernel: out of memory", "memory"),
    "gil": Fault("forward", "GIL"),
    "loop": Fault("forward", "has been computing"),
    "deadlock": Fault("backward", "has been blocked"),
    "endless-kernel": Fault("forward", "has been waiting for its GPU", "gpu"),
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
    "noise": Fault("between", "", systems=("train", "script", ATTACHED)),  # every kind of pause, at random times
}
_JOB = Path(__file__).with_name("fault_job.py")
_LONG_STEPS = 1_000_000  # the fault ends the job before it has taken this many
_START_S = 120.0
_TRIAL_S = 20.0  # approximate duration of a trial: two starts, the fault, and the end of all processes
_WARM_S = 8.0  # time for a spare to get ready before the fault
_SAVED_BYTES = {"kill-in-save": 32 << 20, "noise": 8 << 20}  # large enough to take a while to write
_STOP_S = 60.0  # timeout for a job to exit after SIGTERM
_HANGS, _HANG_TIMEOUT = ("gil", "loop", "deadlock", "endless-kernel", "extra-collective"), "5s"
_TOKEN = "PACELINE_FAULT_TRIAL"  # marks the processes of a job
_LEAVE_S = 2.0, 8.0  # time limit for processes to exit after the command, on one host and on two


@dataclass(frozen=True)
class Trial:
    """One fault to inject into one job. `limit_s` is the timeout for identifying the fault and the duration of noise.
    `policy` applies under `paceline train`; `state_bytes` is the size of the model and momentum, 0 for a small one."""

    fault: str
    system: str
    backend: str
    ranks: int = 2
    number: int = 0
    limit_s: float = 30.0
    restart: bool = False
    policy: str = "stop"
    state_bytes: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        policy = [self.policy] if self.policy != "stop" else []
        return "-".join((self.fault, self.backend, self.system, *policy, str(self.number)))

    @property
    def kind(self) -> Fault:
        return FAULTS[self.fault]

    @property
    def step(self) -> int:
        return 40 + self.number % 7

    @property
    def rank(self) -> int:
        return (self.number + 1) % self.ranks if self.kind.rank is None else self.kind.rank

    @property
    def continues(self) -> bool:
        """Whether the run should continue after the fault, according to its policy."""
        can = self.kind.cause and not self.kind.is_final and not self.kind.is_saved
        return bool(can) and self.policy != "stop" and self.system == "train"

    def build_request(self, folder: Path, group: str = "") -> Asked:
        """Build the request to the job. `group` is the control group that runs out of memory."""
        fault, place = self.fault, self.kind.place
        steps = _LONG_STEPS
        if (not self.kind.cause and fault != "noise") or place == "start":
            steps = self.step + (1 if fault == "slow-link" else 40)
        elif self.continues:
            steps = self.step + 4
        asked = Asked(
            str(folder), "exception" if fault.startswith("exception") else fault, place, self.rank, self.step, steps,
            save_every=100 if fault == "noise" else 10, backend=self.backend, device=self.device,
            wrapper="torch" if self.system in ("torch", ATTACHED) else "paceline", group=group,
            pause_s=_WARM_S if self.continues else 0.0,
        )  # fmt: skip
        if not (state_bytes := self.state_bytes or _SAVED_BYTES.get(fault, 0)):
            return asked
        # Solve for the layer width at which weights and momentum have this size.
        return asked._replace(width=max(1, round(math.sqrt(state_bytes / 8 + 397**2) - 397)))

    def build_record(self, **outcome: Any) -> FaultRecord:
        return FaultRecord(
            fault=self.fault, system=self.system, backend=self.backend, ranks=self.ranks, trial=self.number,
            rank=self.rank, step=self.step, limit_s=self.limit_s, on_fault=self.policy, **outcome,
        )  # fmt: skip


def faults(
    faults: str = _QUICK, *, backend: Names = "gloo,shm", systems: Names = SYSTEMS, ranks: int = 2,
    trials: int | None = None, patience: float = 30.0, restart: bool = False, on_fault: Names = "stop",
    state: str | None = None, device: str = "cpu", out: Place = None, resume: Place = None,
    progress: bool | None = None,
) -> FaultsResult:  # fmt: skip
    """Inject faults into a small job in separate processes, alternating between systems, and measure the outcome.

    Args:
        faults: all, or a list: kill, stop, gil, loop, nan, oom, link-down, disk-full, stall, ...
        backend: gloo, shm, or both.
        ranks: Number of ranks.
        systems: train (`paceline train`), script (a script with Paceline's wrapper and monitor, under torchrun), torch
            (a script with torch's wrapper and torch.save), attached (the same script with PACELINE_MONITOR=1).
        trials: Number of trials per fault. Default: 1, or as in the resumed run.
        patience: Seconds to wait for a fault to be identified, and duration of the noise in a healthy job.
        restart: Restart each job once from its newest checkpoint.
        on_fault: Recovery policy of `paceline train`: stop, restart, spare or shrink; several are interleaved.
        state: Size of the model and optimizer: 100MB. Default: small.
        device: cpu or cuda.
        out: Save the run in a new subfolder of this folder, trial by trial.
        resume: The folder of an interrupted run, which keeps its own settings: only the number of trials may change.
    """
    given = {name: value for name, value in locals().items() if name not in ("trials", "resume", "progress")}
    check_counts(trials=trials)
    refuse(((trials or 1) > _MOST_TRIALS, f"--trials {trials} would take weeks: use at most {_MOST_TRIALS}"))
    if resume is None:
        config = _build_config(**{name: value for name, value in given.items() if name != "out"}, trials=trials or 1)
    else:
        check_resume(given, _get_defaults())
        config = Study.load(Path(resume), "faults").config
        is_other = trials not in (None, config["trials"]) and find_file(Path(resume) / RUN_FILE) is not None
        done = f"is finished, with --trials {config['trials']}; start a new one"
        refuse((is_other, f"--trials {trials}: the run in {resume} {done}"), code="resume")
    with open_session("faults", config, out=out, resume=resume, progress=progress, cells=True, here=True) as session:
        session.is_timed = False
        session.config |= {} if trials is None else {"trials": trials}
        tasks = [] if session.is_finished else _list_tasks(session.config)
        return cast("FaultsResult", finish(session, session.run(tasks, describe=_describe)))


def _get_defaults() -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(faults).parameters.items()}


def _build_config(
    *, faults: str, backend: Names, systems: Names, ranks: int, trials: int, patience: float, restart: bool,
    on_fault: Names, state: str | None, device: str,
) -> dict[str, Any]:  # fmt: skip
    """Build the run's configuration, after all checks that do not need a job."""
    named, policies, backends = list_names(systems), list_names(on_fault), list_names(backend)
    known = (*SYSTEMS, ATTACHED)
    Option(choices=known).check("systems", named)
    Option(choices=POLICIES).check("on_fault", policies)
    Option(choices=("cpu", "cuda")).check("device", device)
    Option(least=2).check("ranks", ranks)
    Option(above=0).check("patience", patience)
    refuse(
        (not backends, "--backend: no name"),
        ("nccl" in backends and device != "cuda", "--backend nccl needs --device cuda"),
        (restart and policies != ("stop",), f"--restart with --on-fault {on_fault}: the run continues; leave one out"),
    )
    state_bytes = 0 if state is None else parse_size(state)
    check_rank_count(ranks, 2 * state_bytes)
    chosen, skipped = parse_faults(faults, device, ranks)
    return {
        "faults": chosen, "backends": list(backends), "systems": list(named), "ranks": ranks,
        "trials": trials, "patience_s": patience, "restart": restart, "on_fault": list(policies),
        "state_bytes": state_bytes, "device": device, "skipped": skipped,
    }  # fmt: skip


def _list_tasks(config: dict[str, Any]) -> list[Task]:
    """List all trials, alternating between faults and systems. Only `train` has a policy."""
    tasks = list[Task]()
    policies = config["on_fault"]
    turns = itertools.product(
        range(config["trials"]), config["faults"], config["backends"], policies, config["systems"]
    )
    for number, fault, backend, policy, system in turns:
        has_backend = backend != "shm" or system not in ("torch", ATTACHED)
        has_policy = system == "train" or policy == policies[0]
        if system in FAULTS[fault].systems and has_backend and has_policy:
            trial = Trial(
                fault, system, backend, config["ranks"], number, config["patience_s"],
                restart=config["restart"] and number == 0, policy=policy if system == "train" else "stop",
                state_bytes=config["state_bytes"], device=config["device"],
            )  # fmt: skip
            tasks.append(Task(trial.name, _measure, (trial,), expected_s=_TRIAL_S))
    return tasks


def _measure(trial: Trial) -> list[FaultRecord]:
    try:
        return [measure_fault(trial)]
    except MeasurementError as error:
        if error.code != "no-fault":
            raise
        # The job ended before its fault: count the fault as not identified.
        outcome = {"steps_lost": 0 if trial.kind.cause else None, "said": str(error)[:2000], "left_over": ()}
        return [trial.build_record(detected_s=None, is_right=False, ended_s=None, restart_s=None, **outcome)]


def _describe(records: Sequence[Any]) -> str:
    (one,) = records
    took = "not identified" if one.detected_s is None else f"identified after {one.detected_s:.1f} s"
    took += "" if one.recovered_s is None else f", {one.policy} took another {one.recovered_s:.1f} s"
    return took if FAULTS[one.fault].cause else "no false alarm" if one.is_right else "false alarm"


def why_not(fault: str, device: str, ranks: int) -> str:
    """The reason why the fault cannot be injected here, or an empty string."""
    needs = FAULTS[fault].needs
    if needs == "hosts" and ranks != 2:
        return "it needs one rank on each of two hosts; use --ranks 2"
    return "it needs --device cuda" if needs == "gpu" and device != "cuda" else fault_places.why_not(needs)


def parse_faults(names: str, device: str = "cpu", ranks: int = 2) -> tuple[list[str], dict[str, str]]:
    """The chosen faults, or all that can be injected here, and the skipped faults, each with the reason."""
    chosen = list(FAULTS) if names == "all" else [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise ConfigError(f"unknown faults: {', '.join(unknown)}; use {', '.join(FAULTS)}")
    skipped = {name: why for name in chosen if (why := why_not(name, device, ranks))}
    if names != "all":
        refuse(*((True, f"--faults {name}: {why}") for name, why in skipped.items()))
    return [name for name in chosen if name not in skipped], skipped


class _Job:
    """A trial's job in a separate session, its output with times, and all of its processes."""

    def __init__(self, trial: Trial, asked: Asked, place: fault_places.Place, policy: str = "stop") -> None:
        self.token, self.lines = secrets.token_hex(8), list[tuple[float, str]]()
        variables = {VARIABLE: json.dumps(asked._asdict()), _TOKEN: self.token, "PYTHONUNBUFFERED": "1"}
        variables |= {"TMPDIR": f"{asked.folder}/tmp", "PYTHONPATH": os.pathsep.join(sys.path)}
        variables |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        variables |= {"PACELINE_MONITOR": "1"} if trial.system == ATTACHED else {}
        # Hangs are reported immediately and end the job after this time. Pauses have the default timeout.
        variables |= {TIMEOUT_VARIABLE: _HANG_TIMEOUT} if asked.fault in _HANGS else {}
        Path(variables["TMPDIR"]).mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [*build_guard(signal.SIGTERM), *place.wrap(_build_command(trial, asked, place, policy))],
            cwd=asked.folder, env=os.environ | variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def find_processes(self) -> list[psutil.Process]:
        """All processes with this job's token in their environment, except the job's own."""
        return [
            one
            for one in psutil.process_iter(["environ", "status"])
            if (one.info["environ"] or {}).get(_TOKEN) == self.token
            and one.info["status"] != psutil.STATUS_ZOMBIE
            and one.pid != self.process.pid
        ]

    def find_lines(self, pattern: str, before_s: float = math.inf) -> Iterator[tuple[float, str, str]]:
        """Yield each match: the time of its last line, that line, and the whole match, which may span three lines."""
        lines = [one for one in self.lines if one[0] < before_s]
        for number, (when_s, line) in enumerate(lines):
            text = "\n".join(one for _, one in lines[max(0, number - 2) : number + 1])
            if found := re.search(pattern, text):
                yield when_s, line, text[text.rfind("\n", 0, found.start()) + 1 :]

    def find_last(self) -> str:
        """The last error in the output or, without an error, the last line with a word."""
        lines = [line for _, line in reversed(self.lines) if re.search("[a-zA-Z]", line)]
        errors = [line for line in lines if re.search(r"^paceline: |\w(Error|Exception): ", line)]
        return next(iter((*errors, *lines)), "").strip()

    def stop(self) -> None:
        """Ask the job to stop, as a user or a scheduler would."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)

    def close(self) -> None:
        for process in self.find_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._reader.join(2.0)


def _build_command(trial: Trial, asked: Asked, place: fault_places.Place, policy: str) -> list[str]:
    ranks = "1" if place.spaces else str(trial.ranks)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place.torchrun, "--nproc-per-node", ranks]
    if trial.system != "train":
        return [*torchrun, str(_JOB)]
    out = Path(asked.folder, OUT)
    train = [*torchrun, "-m", "paceline", "train"] if place.spaces else [sys.executable, "-m", "paceline", "train"]
    if runs := sorted(out.glob("*/checkpoints")):
        return [*train, "--resume", str(runs[-1].parent), "--steps", str(asked.steps)]
    train += [] if place.spaces else ["--ranks", ranks, "--on-fault", policy]
    return [
        *train, "--model", f"{_JOB}:build", "--data", "synthetic:images", "--backend", trial.backend, "--device",
        trial.device, "--batch-size", str(BATCH_SIZE), "--steps", str(asked.steps), "--save-every",
        f"{asked.save_every}steps", "--out", str(out),
    ]  # fmt: skip


def _find_saved(trial: Trial, folder: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    if trial.system == "train":
        steps = [int(path.name.rpartition("-")[2]) for path in folder.glob(f"{OUT}/*/checkpoints/step-*")]
        return max(steps, default=0)
    import torch

    path = folder / OUT / "saved.pt"
    with contextlib.suppress(RuntimeError):  # raised if a fault damaged the file
        return int(torch.load(path)["step"]) if path.exists() else 0
    return 0


def measure_fault(trial: Trial) -> FaultRecord:
    """Inject one fault into one job."""
    kind = trial.kind
    is_noise = trial.fault == "noise"
    is_pause = not kind.cause
    shared = _list_shared()
    with tempfile.TemporaryDirectory(prefix="paceline-fault-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        place = stack.enter_context(open_place(kind.needs, folder))
        asked = trial.build_request(folder, place.group)
        again = _make_damaged(trial, asked) if kind.place == "start" else None
        policy = "stop" if kind.is_saved else trial.policy
        with contextlib.closing(_Job(trial, asked, place, policy)) as job:
            fault_s, noted = _await_fault(job, folder)
            place.act(trial.fault, trial.rank)
            until_s = fault_s + trial.limit_s * (2 if trial.fault == "slow-link" else 1)  # the last step is slow
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
            code = job.process.returncode
            matches = list(job.find_lines(_build_pattern(kind, trial.rank), waited_s if is_through else math.inf))
            found = matches[0] if matches else None
            text = job.find_last() if found is None else found[1].strip()
        left_over = [f"{len(left)} processes"] if left and is_over else []
        left_over += sorted(_list_shared() - shared)
        left_over += sorted(path.name for path in (folder / "tmp").iterdir() if path.name.startswith("paceline"))
        lost = max(0, noted - 1 - _find_saved(trial, folder)) if again is None else again
        recovered = _find_recovered(folder) if trial.continues else {}
        restart_s = None
        if (trial.restart and not is_pause) or kind.is_saved:
            restart_s = _measure_restart(trial, asked)
        noises = Counter[str]()
        for path in folder.glob("noise-*"):
            with contextlib.suppress(ValueError):  # the process was killed while writing
                noises.update(json.loads(path.read_text()))
    detected_s = None
    if is_pause:
        is_right = (is_through or code == 0) and found is None
    else:
        is_right = found is not None and (not trial.continues or code == 0) and (not kind.is_saved or bool(restart_s))
        detected_s = None if found is None else found[0] - fault_s
    if is_right and noises:
        text = ", ".join(f"{name} {count}" for name, count in sorted(noises.items()))
    return trial.build_record(
        detected_s=detected_s, is_right=is_right, ended_s=ended_s,
        steps_lost=None if is_pause else recovered.get("steps_lost", lost), restart_s=restart_s,
        left_over=tuple(left_over), said=text[:2000], policy=recovered.get("policy", "stop"),
        recovered_s=recovered.get("recovered_s"),
        names_step=any(_names_step(kind, lines, noted) for _, _, lines in matches)
        if found and kind.cause and kind.names_rank else None,
    )  # fmt: skip


def _build_pattern(kind: Fault, rank: int) -> str:
    """The pattern of a correct report. For a pause, it matches any report, because every report is wrong."""
    if not kind.cause:
        return r"paceline: (\w+: )?(rank \d|ranks \d|all ranks|the host )"
    named = rf"(?i)rank\s*:?\s*{rank}\b((?!\brank)[^\n])*(\n[^\n]*){{0,2}}"  # no other rank before the cause
    return f"{named}({kind.cause})" if kind.names_rank else kind.cause


def _names_step(kind: Fault, text: str, step: int) -> bool:
    """Whether a report identifies this step; a fault between two steps, or during a save, may belong to either."""
    found = re.search(r"(?i)\bstep (\d+)", text)
    return found is not None and int(found[1]) - step in ((-1, 0) if kind.place == "between" else (0,))


def _make_damaged(trial: Trial, asked: Asked) -> int:
    """Run the job up to the fault's step, and flip one bit of the newest checkpoint. The fault then consists of
    resuming from that checkpoint. Returns the number of steps between this checkpoint and the previous one."""
    _measure_restart(trial, asked)
    folder = Path(asked.folder)
    paths = sorted(folder.glob(f"{OUT}/*/checkpoints/step-*/model.safetensors")) or [folder / OUT / "saved.pt"]
    content = bytearray(paths[-1].read_bytes())
    content[len(content) // 2] ^= 1
    paths[-1].write_bytes(content)
    (folder / "injected").write_text(f"{time.monotonic()} {trial.step}")
    steps = [int(path.parent.name.rpartition("-")[2]) for path in paths[-2:] if path.name != "saved.pt"]
    return steps[-1] - steps[0] if steps else 0


def _find_recovered(folder: Path) -> dict[str, Any]:
    """Read the fault that a continued run recorded; empty if the run did not continue."""
    for path in folder.glob(f"{OUT}/*/config.json"):
        for fault in json.loads(path.read_text()).get("faults", []):
            return {name: value for name, value in fault.items() if value is not None}
    return {}


def _list_shared() -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir("/dev/shm") if "paceline" in name or "torch" in name}
    return set()


def _await_fault(job: _Job, folder: Path) -> tuple[float, int]:
    """Wait for the fault. Returns its time and its step."""
    until_s, path = time.monotonic() + _START_S, folder / "injected"
    while not path.exists() or not path.read_text():
        if job.process.poll() is not None or time.monotonic() > until_s:
            job.close()
            said = job.find_last() or "nothing"
            raise MeasurementError(f"the job did not reach its fault; its output ends with: {said}", code="no-fault")
        time.sleep(0.01)
    when_s, step = path.read_text().split()
    return float(when_s), int(step)


def _measure_restart(trial: Trial, asked: Asked) -> float | None:
    """Seconds from a restart of the job until it completes the step of the fault; None if the restart failed."""
    again = asked._replace(fault="", steps=trial.step)
    begin_s = time.monotonic()
    with contextlib.closing(_Job(trial, again, fault_places.Place())) as job:
        try:
            code = job.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            code = 1
    return None if code else time.monotonic() - begin_s


_NAMES = {
    "train": "paceline train",
    "script": "script, paceline",
    "torch": "script, torch",
    "attached": "script, attached",
}


_format_s = "{:.2f}".format


def _summarize(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The median of the known values, and the 95th percentile of all values; the latter is None if it falls on an
    unknown value."""
    known = sorted(one for one in values if one is not None)
    place = math.ceil(0.95 * len(values)) - 1
    return statistics.median(known) if known else None, known[place] if 0 <= place < len(known) else None


class _Row:
    """All trials of one fault, with the same backend, system and policy."""

    def __init__(self, trials: Sequence[FaultRecord]) -> None:
        first = trials[0]
        self.fault, self.backend, self.system = first.fault, first.backend, _NAMES[first.system]
        self.num_trials, self.num_right = len(trials), sum(one.is_right for one in trials)
        self.right = f"{self.num_right} of {self.num_trials}"
        num_ended = sum(one.ended_s is not None for one in trials)
        self.ended = "all" if num_ended == self.num_trials else f"{num_ended} of {self.num_trials}"
        self.left_over = sum(bool(one.left_over) for one in trials)
        self.steps_lost = max((one.steps_lost for one in trials if one.steps_lost is not None), default=None)
        self.policy = ", ".join(sorted({one.policy for one in trials} - {"stop"}))
        self.median_s, self.p95_s = _summarize([one.detected_s for one in trials])
        restart_s = [one.restart_s for one in trials if one.restart_s is not None]  # only some trials are restarted
        self.restart_s, self.restart_p95_s = _summarize(restart_s)
        # Measured from the fault report to the end of the next step, if the run continued.
        recovered_s = [one.recovered_s for one in trials if one.recovered_s is not None]
        self.recovered_s, self.recovered_p95_s = _summarize(recovered_s)
        # Counts only identified faults with a known step.
        steps = [one.names_step for one in trials if one.names_step is not None]
        self.step_right = f"{sum(steps)} of {len(steps)}" if steps else ""


class FaultsResult(Result):
    """`paceline faults`: one record for each injected fault."""

    @property
    def rows(self) -> list[_Row]:
        groups = group_by(self.only(FaultRecord), lambda one: (one.fault, one.backend, one.system, one.on_fault))
        return [_Row(trials) for trials in groups.values()]

    @property
    def answer(self) -> str:
        parts = []
        for system in _NAMES:
            trials = [one for one in self.only(FaultRecord) if one.system == system]
            if faults := [one for one in trials if one.steps_lost is not None]:
                parts.append(f"{_NAMES[system]}: identified {_count(faults)} correctly")
            if pauses := [one for one in trials if one.steps_lost is None]:
                wrong, what = sum(not one.is_right for one in pauses), format_number_of(len(pauses), "pause")
                noise_s = sum(one.ended_s or 0.0 for one in pauses if one.fault == "noise")
                took = f" ({format_duration(noise_s)} of noise)" if noise_s else ""
                parts.append(f"{_NAMES[system]}: false alarms in {wrong} of {what}{took}")
        skipped = "".join(f" {name} was not injected: {why}." for name, why in self.config.get("skipped", {}).items())
        return "; ".join(parts) + "." + skipped

    @property
    def findings(self) -> Sequence[str]:
        """Totals over all trials except those that use only torch's wrapper."""
        ours = [one for one in self.only(FaultRecord) if one.system != "torch"]
        faults = [one for one in ours if one.steps_lost is not None]
        stepped = [one for one in faults if one.names_step is not None]
        lines = []
        if faults:
            right = sum(one.is_right for one in faults) / len(faults)
            text = f"Paceline identified rank and cause correctly in {_count(faults)} ({right:.1%})"
            steps = sum(bool(one.names_step) for one in stepped)
            text += f", and the step in {steps} of {len(stepped)} reports with a step" if stepped else ""
            lines.append(text)
        if faults := [one for one in ours if one.left_over]:
            lines.append(
                f"{format_number_of(len(faults), 'trial')} left processes or files behind: {faults[0].left_over[0]}"
            )
        return lines

    @property
    def failure(self) -> str:
        for one in self.only(FaultRecord):
            if one.system != "torch" and not one.is_right:
                return f"{one.fault} on {one.backend} under {_NAMES[one.system]}: {one.said}"
        return ""

    def tables(self) -> list[Table]:
        columns = (
            *text_columns("fault", "backend", "system", is_key=True),
            Column("correct", "right", str, key="named_right", priority=2),
            Column("median (s)", "median_s", _format_s, key="detected_median_s", priority=2),
            Column("p95 (s)", "p95_s", _format_s, key="detected_p95_s", priority=2),
            Column("ended", "ended", str, key="ended"),
            Column("steps lost", "steps_lost", "number", key="steps_lost", priority=1),
            Column("restart (s)", "restart_s", _format_s, key="restart_s"),
            Column("restart p95 (s)", "restart_p95_s", _format_s, key="restart_p95_s", priority=-1),
            Column("then", "policy", "text", key="policy", priority=1),
            Column("recovered (s)", "recovered_s", _format_s, key="recovered_s", priority=1),
            Column("recovered p95 (s)", "recovered_p95_s", _format_s, key="recovered_p95_s", priority=1),
            Column("left over", "left_over", "number", key="left_over", priority=1),
            Column("correct step", "step_right", str, key="step_right", priority=-1),
            *raw_columns("num_trials", "num_right"),
        )
        title = "Seconds to identify a fault, and from then on to restart or recover the job"
        return [Table("faults", title, columns, self.rows)]


def _count(faults: Sequence[FaultRecord]) -> str:
    return f"{sum(one.is_right for one in faults)} of {format_number_of(len(faults), 'fault')}"
