"""`paceline.faults`: do harm to a small job, again and again, and see how soon and how rightly it is named."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from paceline.errors import MeasurementError, refuse
from paceline.measure.faults import ATTACHED, FAULTS, SYSTEMS, build_failed, measure_fault, parse_faults
from paceline.measure.settings import check_counts
from paceline.records.kinds import FaultRecord
from paceline.records.store import RUN_FILE, Study, find_file
from paceline.report.faults import FaultsResult
from paceline.runtime.launch import check_rank_count
from paceline.runtime.session import Task, open_session
from paceline.training.settings import POLICIES
from paceline.units import parse_size
from paceline.verbs.jobs import Names, Place, check_resume, finish, list_names

_MOST_TRIALS = 10_000
_QUICK = "kill,stop,gil,loop,exception,term,stall"


def faults(
    faults: str = _QUICK, *, backend: Names = "gloo,shm", systems: Names = SYSTEMS, ranks: int = 2,
    trials: int | None = None, patience: float = 30.0, restart: bool = False, on_fault: Names = "stop",
    state: str | None = None, device: str = "cpu", out: Place = None, resume: Place = None,
    progress: bool | None = None,
) -> FaultsResult:  # fmt: skip
    """Do faults to a small job in processes of its own, under each system in turns, and return what followed.

    `faults`: names, or "all". `systems`: "train" (`paceline train`), "script" (a script with Paceline's wrapper and
    monitor, under torchrun), "torch" (one with torch's wrapper and torch.save), "attached" (that with
    PACELINE_MONITOR=1). `trials`: how often each is done; once by default. `patience`: how many seconds to wait for a
    fault to be named; the noise of a healthy job lasts as long. `restart`: restart each job once from its newest
    checkpoint. `on_fault`: what `paceline train` does after it ("stop", "restart", "spare" or "shrink"), or several in
    turns, and `state` the size of its model and optimizer, such as "100MB"; a small one by default. `device`: "cpu" or
    "cuda". `out`: save the run in a new folder there, trial by trial. `resume`: the folder of an interrupted run, which
    has its own settings, but for the number of `trials`: other arguments must be left out.
    """
    given = {name: value for name, value in locals().items() if name not in ("trials", "resume", "progress")}
    check_counts(trials=trials)
    refuse(((trials or 1) > _MOST_TRIALS, f"--trials {trials}: at most {_MOST_TRIALS}, which take weeks"))
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
    """What is done, with everything checked that can be refused before it is."""
    named, policies, backends = list_names(systems), list_names(on_fault), list_names(backend)
    known = (*SYSTEMS, ATTACHED)
    strange = [one for one in named if one not in known]
    unknown = [one for one in policies if one not in POLICIES]
    refuse(
        (not named or not policies or not backends, "--systems, --backend and --on-fault: each needs a name"),
        (strange, f"--systems {', '.join(strange)}: unknown; there are {', '.join(known)}"),
        (ranks < 2, f"--ranks {ranks}: at least 2"),
        (device not in ("cpu", "cuda"), f"--device {device}: cpu or cuda"),
        ("nccl" in backends and device != "cuda", "--backend nccl needs --device cuda"),
        (patience <= 0, f"--patience {patience:g}: above 0"),
        (unknown, f"--on-fault {', '.join(unknown)}: unknown; there are {', '.join(POLICIES)}"),
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
    """All trials, in turns. Only `train` has a policy."""
    tasks, policies = list[Task](), config["on_fault"]
    turns = itertools.product(
        range(config["trials"]), config["faults"], config["backends"], policies, config["systems"]
    )
    for trial, fault, backend, policy, system in turns:
        has_backend = backend != "shm" or system not in ("torch", ATTACHED)
        has_policy = system == "train" or policy == policies[0]
        if system in FAULTS[fault].systems and has_backend and has_policy:
            policy = policy if system == "train" else "stop"
            rest = config["patience_s"], config["restart"] and trial == 0, policy, config["state_bytes"]
            name = "-".join((fault, backend, system, *([policy] if policy != "stop" else []), str(trial)))
            arguments = fault, system, backend, config["ranks"], trial, *rest, config["device"]
            tasks.append(Task(name, _measure, arguments))
    return tasks


def _measure(*arguments: Any) -> list[FaultRecord]:
    try:
        return [measure_fault(*arguments)]
    except MeasurementError as error:
        if error.code != "no-fault":
            raise
        return [build_failed(str(error), *arguments)]


def _describe(records: Sequence[Any]) -> str:
    (one,) = records
    took = "not named" if one.detected_s is None else f"named after {one.detected_s:.1f} s"
    took += "" if one.recovered_s is None else f", {one.policy} after {one.recovered_s:.1f} s more"
    return took if FAULTS[one.fault].cause else "not taken for a fault" if one.is_right else "taken for a fault"
