"""`paceline.train`: train a model on one rank or many, save it, resume it, and see where the time goes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.errors import ConfigError, RecordError, refuse
from paceline.records.environment import Environment
from paceline.records.store import Run, naming_damage, write_new
from paceline.records.training import CONFIG_FILE, METRICS_FILE, load_config, load_metrics
from paceline.report.result import Result, load_result
from paceline.runtime.faults.monitor import find_hang_timeout
from paceline.runtime.faults.recovery import Fault, Recovery
from paceline.runtime.ranks.launch import check_rank_count
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.runtime.ranks.session import Session, joins_world, open_session
from paceline.training.schedules import format_growths
from paceline.training.train_settings import AUTO, TrainSettings, check_job, list_job_warnings
from paceline.units import format_number_of, name_ranks
from paceline.verbs.jobs import Counts, Place, brings_data, choose_world, choose_worlds, list_counts, refuse_unknown
from paceline.workloads.data import parse_data

# Reports load NumPy, which `paceline train --help` does not need, so they are imported where they are used.
if TYPE_CHECKING:
    from paceline.report.compared import TrainComparisonResult
    from paceline.report.training_result import TrainRunResult

# Settings that a resumed run may change. They affect how and how long it runs, but not its results. Data may also move.
_CHANGEABLE = (
    "ranks", "backend", "device", "threads", "epochs", "save_every", "keep", "profile", "tensorboard", "batch_size",
    "accumulate", "steps", "grow", "mtbf", "on_fault", "max_faults", "spares", "hang_timeout",
)  # fmt: skip


# Modules that a rank imports before its first step; importing them once in the fork server saves each rank the time.
# torch imports the compiler when the first optimizer is created.
JOB_MODULES = ("paceline.training.loop", "torch._dynamo")


def train(
    model: str | None = None, data: str | None = None, ranks: Counts | None = None, epochs: int | None = None, *,
    resume: Place = None, out: Place = None, progress: bool | None = None, watch: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Train a model, and return its epochs, its metrics and where the time was spent.

    Inside a launched world this is collective: every rank must call it and gets the same result.

    Args:
        model: A name ("cnn", the default, "resnet18", "gpt2-tiny", "hf:NAME") or "FILE.py:FUNCTION", which returns a
            module, or a whole job: (model, data, step).
        data: "synthetic" (the default), "mnist:FOLDER" and so on, or "FILE.py:FUNCTION".
        ranks: Number of ranks. Default: the launched world's, or 1 in a plain process. Several numbers
            (`ranks=(1, 2)`) train the same job with the same global batches, one run after the other.
        epochs: Number of epochs. Default: 1.
        resume: The folder of a run to resume from its newest checkpoint. The run keeps its settings; you can specify
            only settings that do not change the result.
        out: Save the run in a new subfolder of this folder: metrics, checkpoints and the trained weights. Without it
            nothing is written. If the variable PACELINE_RUN names the new folder and this already has a run, the run
            is resumed, for example when a scheduler restarts a job.
        watch: Serve a live page from a separate process, and print its address.
        settings: The fields of `TrainSettings`, named like the options of `paceline train`: `batch_size`, `lr`,
            `optimizer`, `schedule`, `wrapper`, `backend`, `steps`, `save_every`, ...

    Returns:
        A `TrainRunResult`. For several numbers of ranks, a `TrainComparisonResult` of accuracy and speed, whose `parts`
        are the runs.
    """
    counts = () if ranks is None else list_counts(ranks)
    alone = counts[0] if len(counts) == 1 else None
    named = {"model": model, "data": data, "ranks": alone, "epochs": epochs}
    given = {name: value for name, value in named.items() if value is not None} | settings
    refuse_unknown(given)
    steps, momentum, optimizer = given.get("steps"), given.get("momentum"), given.get("optimizer", "sgd")
    refuse(
        (steps is not None and epochs is not None,
         f"--steps {steps} with --epochs {epochs}: a run has only one length; leave one out"),
        (momentum is not None and optimizer not in ("sgd", "lars"),
         f"--momentum {momentum}: {optimizer} has its own moments; leave it out, or use sgd"),
        (resume is not None and out is not None,
         f"--out {out} with --resume: a run stays in its own folder {resume}; leave out --out"),
        (watch and (len(counts) > 1 or (out is None and resume is None)),
         "--watch shows a single saved run: pass one number of ranks, and --out"),
        (resume is not None and len(counts) > 1,
         f"--ranks {','.join(map(str, counts))} with --resume: a run resumes on one number of ranks; pass one"),
    )  # fmt: skip
    name = os.environ.get("PACELINE_RUN", "") if len(counts) < 2 else ""
    if resume is None and name and out is not None and _is_begun(Path(out) / name):
        resume = Path(out) / name
        out = None
    if resume is not None:
        wanted, num_before = _load_resumed(Path(resume), given)
        check_job(wanted)
        return _train(wanted, progress, resume=resume, num_before=num_before, watch=watch)
    jobs = _build_jobs(choose_worlds(ranks, 1), given)
    if len(jobs) == 1:
        return _train(jobs[0], progress, out, name, watch=watch)
    with open_session("train --compare", {}, ranks=max(counts), out=out, progress=progress) as session:
        parts: list[TrainRunResult] = []
        session.saved = lambda: ", ".join(f"{part.folder.name} (finished)" for part in parts if part.folder)
        for job in jobs:
            if session.signal:  # arrived in the last step of the previous run, too late to stop its ranks
                _interrupt(session.signal)
            name = format_number_of(job.ranks, "rank").replace(" ", "-")
            parts.append(_train(job, progress, session.folder, name, whole=session))
        return _compare(session, parts)


def _is_begun(folder: Path) -> bool:
    """Whether an earlier attempt of this job started the run. Collective: rank 0 checks before creating a run."""
    found = (folder / CONFIG_FILE).exists()
    place = read_place()
    if place.world_size == 1:
        return found
    from paceline.runtime.ranks.world import share_first

    return bool(share_first(place, found))


@naming_damage()
def compare_runs(runs: Sequence[str | Path | Result], out: Place = None) -> TrainComparisonResult:
    """Compare the accuracy and speed of finished runs with the first of them."""
    parts = [run if isinstance(run, Result) else load_result(run) for run in runs]
    with open_session("train --compare", {}, out=out) as session:
        return _compare(session, parts)


def _compare(session: Session, parts: Sequence[Result]) -> TrainComparisonResult:
    from paceline.report.compared import TrainComparisonResult

    result = TrainComparisonResult.of(parts, session.environment)
    session.write(result)
    return result


def _build_jobs(counts: Sequence[int], given: dict[str, Any]) -> list[TrainSettings]:
    """The job on each number of ranks. All have the same global batch, by default that of a single rank."""
    if len(counts) > 1 and given.get("global_batch_size") is None:
        size = given.get("batch_size")
        asked = f"--batch-size {size} with --ranks {','.join(map(str, counts))}"
        what = "it is per rank, so global batches would differ; pass --global-batch-size instead"
        refuse((size is not None, f"{asked}: {what}"))
        first = TrainSettings(**given | {"ranks": 1}).batches
        shared, each = first.global_batch_size, math.lcm(*counts) * first.accumulate
        found = f"--ranks {','.join(map(str, counts))} with a global batch of {shared}, the default for one rank"
        refuse((shared % each, f"{found}: pass --global-batch-size, a multiple of {each}"))
        given = given | {"global_batch_size": shared}
    jobs = [TrainSettings(**given | {"ranks": count}) for count in counts]
    for job in jobs:
        check_job(job)
    return jobs


def _train(
    wanted: TrainSettings, progress: bool | None, out: Place = None, name: str = "", resume: Place = None,
    num_before: int | None = None, whole: Session | None = None, watch: bool = False,
) -> TrainRunResult:  # fmt: skip
    """Train one run, in a new folder in `out` or, with `resume`, continuing after `num_before` steps. `whole` is the
    enclosing session, which is notified of a signal that came too late to stop this run."""
    from paceline.report.training_result import TrainRunResult, render_config

    config = wanted.to_json()
    _check_recovery(wanted, out is not None or resume is not None)
    with open_session(
        "train", config, ranks=wanted.ranks, out=out, name=name, resume=resume, progress=progress, can_resume=True
    ) as session:
        folder = session.folder
        if whole is not None:
            session.share_load(whole)
        ends = "epochs" if wanted.steps is None else "steps"
        session.saved = lambda: _describe_saved(folder)
        if folder is not None and session.is_leader:
            if resume is None:
                write_new(folder / CONFIG_FILE, render_config(config, session.environment))
            else:
                update_config(folder, end="", **{ends: getattr(wanted, ends)})
            if watch:
                from paceline.verbs.watch import start_watching

                start_watching(folder)
        rows_wanted = folder is None or session.place is not None
        recovery = _build_recovery(session, wanted, rows_wanted)
        try:
            arguments = (wanted, folder, resume is not None, rows_wanted)
            outcome = session.ask(
                "paceline.training.loop:train", arguments, saves=folder is not None, recovery=recovery,
                hang_timeout_s=find_hang_timeout(wanted.hang_timeout),
            )  # fmt: skip
        except BaseException as error:
            if folder is not None and resume is None and session.is_leader and not (folder / METRICS_FILE).exists():
                for entry in folder.iterdir():  # failed before the first metrics: there is nothing to resume
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            elif folder is not None and session.is_leader:
                text = f"failed: {str(error).partition(chr(10))[0]}" if isinstance(error, Exception) else "interrupted"
                update_config(folder, end=text)
            raise
        mark = os.environ.get("PACELINE_SAVED")  # set by `run --slurm`, which requeues the job if this file exists
        if mark and outcome.signal in (signal.SIGTERM, signal.SIGUSR1):
            if folder is not None:  # on rank 0
                Path(mark).write_text("saved\n")
            if folder is not None or not session.is_leader:
                raise SystemExit(0)
        if outcome.signal and folder is not None and session.is_leader:
            update_config(folder, end="interrupted")
        if outcome.signal and not session.signal and len(outcome.asked) < wanted.ranks and session.is_leader:
            who, name = name_ranks(outcome.asked), signal.Signals(outcome.signal).name
            text = f"only {who} of {wanted.ranks} received {name}, sent manually or by a job manager"
            print(f"paceline: {text}: all ranks stopped after step {outcome.step}", file=sys.stderr, flush=True)
        if outcome.signal:  # ranks started by this process receive Ctrl-C as SIGTERM
            _interrupt(session.signal or outcome.signal)
        if whole is not None:
            whole.signal = session.signal
        ended = {"steps": outcome.step, **outcome.facts}
        environment = session.observe()
        if folder is not None and session.is_leader:
            update_config(folder, ended, environment if outcome.step != num_before else None)
        notes = [*list_job_warnings(wanted), *outcome.notes]
        if outcome.step == num_before:
            notes.append(f"the run was already finished after {outcome.step} steps; pass more --{ends} to continue")
        faults = [] if folder is None else load_config(folder).get("faults", [])  # includes those before a resume
        run = Run("train", config | {"outcome": ended, "faults": faults}, environment, (), tuple(notes))
        result = TrainRunResult(run, folder, outcome.rows if rows_wanted else None)
        session.write(result)
        return result


def _check_recovery(wanted: TrainSettings, is_saved: bool) -> None:
    """Refuse impossible recovery policies before anything is written."""
    if wanted.on_fault == "stop":
        return
    launcher = read_place().launcher if joins_world(wanted.ranks) else ""
    asked = f"--on-fault {wanted.on_fault}"
    refuse(
        (launcher,
         f"{asked} in a world launched by {launcher}: let the launcher restart ranks (torchrun --max-restarts) and set "
         "PACELINE_RUN, so that the job resumes from its last checkpoint; use --on-fault stop"),
        (not is_saved, f"{asked} needs --out: without checkpoints there is nothing to restart from"),
        code="on-fault",
    )  # fmt: skip


def _build_recovery(session: Session, wanted: TrainSettings, rows_wanted: bool) -> Recovery | None:
    """The recovery after a fault; None if a fault ends the run."""
    folder = session.folder
    if wanted.on_fault == "stop" or folder is None:
        return None
    before = load_config(folder).get("faults", [])

    def report(faults: Sequence[Fault], line: str) -> None:
        print(f"paceline: {line}", file=sys.stderr, flush=True)
        update_config(folder, faults=[*before, *map(dataclasses.asdict, faults)])

    if wanted.on_fault == "spare":
        check_rank_count(wanted.ranks + wanted.spares)
    return Recovery(
        wanted.on_fault, wanted.ranks, (wanted, folder, True, rows_wanted), report, wanted.max_faults, wanted.spares,
        JOB_MODULES, wanted.usable_ranks, lambda: session.signal,
    )  # fmt: skip


def _interrupt(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def update_config(
    run: Path, outcome: dict[str, Any] | None = None, environment: Environment | None = None, end: str = "",
    faults: Sequence[dict[str, Any]] = (), **lengths: int,
) -> None:  # fmt: skip
    """Record in `config.json` how a run ended and how busy the machine was, or record the run's new length. `end` says
    why the run stopped early; `faults` lists all faults so far."""
    document, before = load_config(run), load_config(run)
    for name, length in lengths.items():
        document["settings"][name] = max(length, document["settings"][name])
    document.pop("end", None)
    if end:
        document["end"] = end
    if outcome is not None:
        document["outcome"] = outcome
    if faults:
        document["faults"] = list(faults)
    if environment is not None and document.get("environment"):
        for name in ("load_average", "stolen"):  # for a resumed run, keep the larger value
            known = document["environment"].get(name) or 0.0
            document["environment"][name] = max(known, getattr(environment, name) or 0.0)
    if document != before:
        write_new(run / CONFIG_FILE, json.dumps(document, indent=1) + "\n", replace=True)


def _describe_saved(folder: Path | None) -> str:
    """The newest checkpoint on disk, for the message after an interrupt; empty if there is none."""
    saved = [] if folder is None else sorted((folder / "checkpoints").glob("step-*"))
    return f"step {int(saved[-1].name.removeprefix('step-'))}" if saved else ""


def _load_resumed(run: Path, given: dict[str, Any]) -> tuple[TrainSettings, int]:
    """The settings of a run to resume, with the requested changes, and the number of steps that it has taken."""
    try:
        document = load_config(run)
    except RecordError as error:
        raise ConfigError(f"--resume {run}: {error}", code=error.code) from None
    saved = TrainSettings.from_json(document["settings"])
    if is_launched():
        given = {"ranks": choose_world(given.get("ranks"), 1)} | given
    metrics = run / METRICS_FILE
    rows = load_metrics(metrics) if metrics.exists() else []  # empty if even the first row is incomplete
    is_moved = given.get("ranks", saved.ranks) != saved.ranks
    is_datas = saved.batch_size is None and saved.global_batch_size is None
    if rows and is_moved and is_datas and brings_data(saved.model, None if saved.data == "synthetic" else saved.data):
        # The data determines the batch size, which only the ranks know.
        saved = dataclasses.replace(saved, global_batch_size=rows[0]["samples"])
    return change_settings(saved, given), rows[-1]["step"] if rows else 0


def change_settings(saved: TrainSettings, given: dict[str, Any]) -> TrainSettings:
    """The run's settings with those specified for a resume; ConfigError if one would change the result."""
    ends = "epochs" if saved.steps is None else "steps"
    growth = format_growths(saved.batch_growth)
    size = saved.batches.global_batch_size
    for name, value in given.items():
        before = size if name == "global_batch_size" else getattr(saved, name)
        is_moved = name == "data" and parse_data(value)[0] == parse_data(saved.data)[0]
        asked = f"--{name.replace('_', '-')} {_show(value)} with --resume"
        refuse(
            (value != before and name not in _CHANGEABLE and not is_moved,
             f"{asked}: the run was started with {_show(before)}, and this would change its result; leave it out, or "
             "start a new one"),
            # A run can be extended in the unit that ends it, unless its batch grows at fractions of its length.
            (name in ("epochs", "steps") and name != ends,
             f"{asked}: the run ends after --{ends} {getattr(saved, ends)}; pass more --{ends}, or start a new one"),
            (name == "epochs" and saved.batch_growth and value != saved.epochs,
             f"{asked}: the batch grows at fractions ({growth}) of the run's {saved.epochs} epochs, and would have "
             "grown at other steps; leave it out, or start a new one"),
            code="other-run",
        )  # fmt: skip
    if given.get("save_every", AUTO) != AUTO:
        given = {"mtbf": None} | given  # only used with auto
    if given.get("on_fault", "spare") != "spare":  # spares belong to the previous policy
        given = {"spares": TrainSettings.spares} | given
    if given.get("on_fault") == "stop":
        given = {"max_faults": TrainSettings.max_faults} | given
    settings = dataclasses.replace(saved, **given)
    if settings.ranks == saved.ranks:
        return settings
    moved = saved.on_ranks(settings.ranks)
    batch_size, accumulate = given.get("batch_size"), given.get("accumulate")
    if batch_size is None and accumulate is None:
        batch_size = moved.batch_size
    sizes: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate}
    return dataclasses.replace(settings, global_batch_size=moved.global_batch_size, **sizes)


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        grows = not value or isinstance(value[0], tuple)
        return format_growths(tuple(value)) if grows else " ".join(map(str, value))
    return str(value)
