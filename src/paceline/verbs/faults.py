"""`paceline.faults`: do harm to a small job, again and again, and see how soon and how rightly it is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import refuse
from paceline.measure.faults import ATTACHED, FAULTS, SYSTEMS, measure_fault, parse_faults
from paceline.records.kinds import FaultRecord
from paceline.report.faults import FaultsResult
from paceline.runtime.session import Task, open_session
from paceline.training.settings import POLICIES
from paceline.units import parse_size
from paceline.verbs.jobs import Names, Place, list_names

_QUICK = "kill,stop,gil,loop,exception,term,stall"


def faults(
    faults: str = _QUICK, *, backend: Names = "gloo,shm", systems: Names = SYSTEMS, ranks: int = 2, trials: int = 1,
    patience: float = 30.0, restart: bool = False, on_fault: str = "stop", state: str | None = None,
    device: str = "cpu", out: Place = None, progress: bool | None = None,
) -> FaultsResult:  # fmt: skip
    """Do faults to a small job in processes of its own, under each system in turns, and return what followed.

    `faults`: names, or "all". `systems`: "train" (`paceline train`), "script" (a script with Paceline's wrapper and
    monitor, under torchrun), "torch" (one with torch's wrapper and torch.save), "attached" (that with
    PACELINE_MONITOR=1). `patience`: how many seconds to wait for a fault to be named. `restart`: restart each job
    once from its newest checkpoint. `on_fault`: what `paceline train` does after it ("stop", "restart", "spare" or
    "shrink"), and `state` the size of its model and optimizer, such as "100MB"; a small one by default. `device`:
    "cpu" or "cuda".
    """
    backends, named = list_names(backend), list_names(systems)
    known = (*SYSTEMS, ATTACHED)
    strange = [name for name in named if name not in known]
    refuse(
        (strange, f"--systems {', '.join(strange)}: unknown; there are {', '.join(known)}"),
        (trials < 1 or ranks < 2, f"--trials {trials} --ranks {ranks}: at least 1 trial, on at least 2 ranks"),
        (device not in ("cpu", "cuda"), f"--device {device}: cpu or cuda"),
        (patience <= 0, f"--patience {patience:g}: above 0"),
        (on_fault not in POLICIES, f"--on-fault {on_fault!r} is unknown: known are {', '.join(POLICIES)}"),
        (restart and on_fault != "stop", f"--restart with --on-fault {on_fault}: the run continues; leave one out"),
    )
    chosen, skipped = parse_faults(faults, device, ranks)
    state_bytes = 0 if state is None else parse_size(state)
    cells = [
        (fault, system, one, ranks, trial, patience, restart and trial == 0, on_fault, state_bytes, device)
        for trial in range(trials)
        for fault in chosen
        for one in backends
        for system in named
        if system in FAULTS[fault].systems and not (system in ("torch", ATTACHED) and one == "shm")
    ]
    tasks = [
        Task(f"{fault}-{one}-{system}-{trial}", _measure, (fault, system, one, *rest), ranks=1)
        for fault, system, one, *rest in cells
        for trial in [rest[1]]
    ]
    config = {"faults": chosen, "backends": list(backends), "systems": list(named), "ranks": ranks, "trials": trials}
    config |= {"on_fault": on_fault, "state_bytes": state_bytes, "device": device, "skipped": skipped}
    with open_session("faults", config, out=out, progress=progress, here=True) as session:
        session.is_timed = False
        records = session.run(tasks, describe=_describe)
        result = FaultsResult(session.save(records), session.folder)
        session.write(result)
        return result


def _measure(*arguments: Any) -> list[FaultRecord]:
    return [measure_fault(*arguments)]


def _describe(records: Sequence[Any]) -> str:
    (one,) = records
    took = "not named" if one.detected_s is None else f"named after {one.detected_s:.1f} s"
    took += "" if one.recovered_s is None else f", {one.policy} after {one.recovered_s:.1f} s more"
    return took if FAULTS[one.fault].cause else "not taken for a fault" if one.is_right else "taken for a fault"
