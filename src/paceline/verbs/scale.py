"""`paceline.scale`: does a job scale? Batch sizes on one rank, more ranks, large batches, and a page of all of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import ConfigError, LaunchError
from paceline.measure.scale_settings import (
    BatchSettings,
    Counts,
    LargeBatchSettings,
    Names,
    ScaleSettings,
    build_batch,
    build_large_batch,
    build_ranks,
    list_counts,
)
from paceline.predict.networks import find_networks
from paceline.records import BatchRecord, LargeBatchRecord, Record, StepRecord
from paceline.records.store import STUDY_FILE, Run, Study, load_run
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.session import Session, Task, open_session
from paceline.training.settings import TrainSettings
from paceline.workloads.data.sources import parse_data

if TYPE_CHECKING:
    from paceline.report.large_batch import LargeBatchResult
    from paceline.report.result import Result
    from paceline.report.scaling import BatchResult, RanksResult, ReportResult

Place = str | Path | None
Settings = BatchSettings | ScaleSettings | LargeBatchSettings

_ROOM = "paceline.measure.scaling:"
PARTS = ("batch", "ranks", "large-batch")


# -- batch sizes on one rank -------------------------------------------------------------------------------------------


def batch(
    model: str = "cnn",
    batch_size: Counts = (32, 128, 512, 2048),
    *,
    epochs: int = 3,
    device: str = "auto",
    out: Place = None,
    resume: Place = None,
    progress: bool | None = None,
    **job: Any,
) -> BatchResult:
    """Which batch size keeps one rank busy? Whole epochs at each size, the first of them a warm-up.

    `job`: further settings of the job, under the names of the options of `paceline train` (data, precision, channels,
    ...). `out`: save the study in a new folder there, cell by cell. `resume`: the folder of an interrupted study, which
    has its own settings: other arguments must be left out.
    """
    _check_resume(resume, out, job)
    _refuse_launched("batch sizes are compared on one rank")
    if resume is not None:
        settings = BatchSettings.from_json(Study.load(Path(resume), "scale batch").config)
    else:
        settings = build_batch(model=model, batch_size=batch_size, epochs=epochs, device=device, **job)
    with open_session(
        "scale batch", settings.to_json(), out=out, resume=resume, progress=progress, cells=True, same_machine=True
    ) as session:
        return cast("BatchResult", _finish(session, lambda: _measure_batch(session, settings)))


def _measure_batch(session: Session, settings: BatchSettings) -> list[Record]:
    def describe(records: Sequence[Record]) -> str:
        record = next(record for record in records if isinstance(record, BatchRecord))
        return record.failure or f"{record.samples_per_s:.0f} samples/s"

    tasks = []
    for size in settings.batch_sizes:
        job = dataclasses.replace(settings.job, batch_size=size)

        def on_death(error: LaunchError, size: int = size) -> list[Record] | None:
            return build_killed(settings.job, size) if error.code == "killed" else None

        tasks.append(Task(f"batch size {size}", _ROOM + "measure_batch", (job, settings.epochs), on_death=on_death))
    return session.run(tasks, describe)


def build_killed(job: TrainSettings, batch_size: int) -> list[Record]:
    """The row of a batch size at which the kernel killed the process."""
    return [
        BatchRecord(
            model=job.model, data=parse_data(job.data)[0], device=job.device, precision=job.precision,
            threads=job.threads or 1, batch_size=batch_size, num_samples=batch_size, num_steps=1,
            failure="killed, as by the kernel when memory is exhausted",
        )
    ]  # fmt: skip


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks(
    model: str = "cnn",
    ranks: Counts | None = None,
    batch_size: Counts = (8, 32),
    global_batch_size: Counts | None = None,
    *,
    wrapper: Names = ("paceline", "torch"),
    backend: Names = "auto",
    network: str = "10gbe,100gbe",
    predict_ranks: Counts = (64, 1024),
    iters: int | None = None,
    device: str = "auto",
    out: Place = None,
    resume: Place = None,
    progress: bool | None = None,
    **job: Any,
) -> RanksResult:
    """Do more ranks help? Weak and strong scaling, all wrappers and backends in turns, compared with one rank.

    `ranks`: by default 1, 2, 4, ... up to the cores or GPUs, or to the launched world. `batch_size`: samples per rank
    (weak scaling). `global_batch_size`: samples over all ranks (strong scaling); by default one that all can share.
    `network` and `predict_ranks`: for which networks and numbers of ranks the curve is predicted. `job`, `out` and
    `resume` as for `batch`. Inside a launched world this is collective: every rank must call it.
    """
    _check_resume(resume, out, job)
    if resume is not None:
        config = Study.load(Path(resume), "scale ranks").config
        settings = ScaleSettings.from_json(config)
    else:
        settings = build_ranks(
            model=model, ranks=ranks, batch_size=batch_size, global_batch_size=global_batch_size, wrapper=wrapper,
            backend=backend, iters=iters, device=device, **job,
        )  # fmt: skip
        config = _build_ranks_config(settings, network, predict_ranks)
    with open_session(
        "scale ranks", config, ranks=max(settings.ranks), out=out, resume=resume, progress=progress, cells=True,
        same_machine=True,
    ) as session:  # fmt: skip
        return cast("RanksResult", _finish(session, lambda: _measure_ranks(session, settings)))


def _build_ranks_config(settings: ScaleSettings, network: str, predict_ranks: Counts) -> dict[str, Any]:
    find_networks(network)  # refuses an unknown one
    return settings.to_json() | {"network": network, "predict_ranks": ",".join(map(str, list_counts(predict_ranks)))}


def _measure_ranks(session: Session, settings: ScaleSettings) -> list[Record]:
    """The cells of all ranks, the job's layers on one, and the all-reduces alone."""

    def sweep_up_to_all(records: Sequence[Record]) -> tuple[Any, ...]:
        return (settings.sweep(max(record.num_bytes for record in records if isinstance(record, StepRecord))),)

    most = max(settings.ranks)
    tasks = [Task(cell.name, _ROOM + "measure_scaling", (settings, cell), most, weight=4.0) for cell in settings.cells]
    if session.place is None:  # in a launched world the other ranks would compute at the same time
        sizes = sorted({cell.batch_size(1, settings.job.accumulate or 1) for cell in settings.cells})
        jobs = [dataclasses.replace(settings.job, batch_size=size) for size in sizes]
        tasks += [Task(f"layers {job.batch_size}", _ROOM + "measure_layers_alone", (job,)) for job in jobs]
    if settings.backends and most > 1:
        tasks.append(Task("allreduce", _ROOM + "measure_allreduce", ranks=most, weight=2.0, follow=sweep_up_to_all))
    return session.run(tasks)


# -- large batches -----------------------------------------------------------------------------------------------------


def large_batch(
    model: str | None = None,
    base_batch_size: int = 16,
    global_batch_size: Counts | None = None,
    *,
    recipes: Names | None = None,
    seeds: int = 3,
    epochs: int = 6,
    updates: int | None = None,
    batch_size: int = 512,
    evaluations: int = 6,
    ranks: int | None = None,
    at_once: int = 1,
    out: Place = None,
    resume: Place = None,
    progress: bool | None = None,
    **job: Any,
) -> LargeBatchResult:
    """What does a large global batch cost in test accuracy, and which recipe repairs it? Several seeds each.

    `model`: by default a cnn so small that the study takes minutes. `base_batch_size`: the baseline, for which the
    learning rate (`lr`) is right. `global_batch_size`: by default 16 times as large. `recipes`: switches joined by +,
    such as "linear+warmup". `updates`: also runs of this many updates; by default twice those of the largest batch, 0
    for none. `batch_size`: what a rank computes at once. `at_once`: runs that share the machine. `job`, `out` and
    `resume` as for `batch`. Inside a launched world this is collective: every rank must call it.
    """
    _check_resume(resume, out, job)
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once}: at least 1 is needed")
    if resume is not None:
        settings = LargeBatchSettings.from_json(Study.load(Path(resume), "scale large-batch").config)
    else:
        settings = build_large_batch(
            model=model, base_batch_size=base_batch_size, global_batch_size=global_batch_size, recipes=recipes,
            seeds=seeds, epochs=epochs, updates=updates, batch_size=batch_size, evaluations=evaluations, ranks=ranks,
            **job,
        )  # fmt: skip
    with open_session(
        "scale large-batch", settings.to_json(), ranks=settings.job.ranks, out=out, resume=resume, progress=progress,
        cells=True,
    ) as session:  # fmt: skip
        return cast("LargeBatchResult", _finish(session, lambda: _measure_large_batch(session, settings, at_once)))


def _measure_large_batch(session: Session, settings: LargeBatchSettings, at_once: int = 1) -> list[Record]:
    def describe(records: Sequence[Record]) -> str:
        record = next(record for record in records if isinstance(record, LargeBatchRecord))
        return record.failure or f"test accuracy {record.test_accuracy:.2%}"

    num_samples, has_norm = session.ask(_ROOM + "survey_job", (settings.job,), settings.job.ranks)
    settings.check_norms(has_norm)
    tasks = []
    for cell in settings.list_cells(num_samples):
        steps = cell.settings.steps
        weight = steps * cell.global_batch_size if steps is not None else num_samples * cell.settings.epochs
        arguments = (cell, settings.evaluations, settings.seeds[0])
        tasks.append(Task(cell.name, _ROOM + "measure_large_batch", arguments, settings.job.ranks, float(weight)))
    return session.run(tasks, describe, at_once)


# -- one page of all ---------------------------------------------------------------------------------------------------


def report(
    runs: Sequence[str | Path] = (),
    *,
    out: Place = None,
    resume: Place = None,
    progress: bool | None = None,
) -> ReportResult:
    """The whole study on one page, from finished runs of `batch`, `ranks` and `large_batch`, or measured here.

    Without `runs` the three studies are measured with their defaults, each in its own folder inside that of the report.
    """
    from paceline.report.result import load_result
    from paceline.report.scaling import STUDIES, ReportResult

    _refuse_launched("a report starts the ranks of its studies itself")
    if runs and resume is not None:
        raise ConfigError(f"--resume {resume} with runs: a page of finished runs has nothing to resume", code="resume")
    _check_resume(resume, out, {})
    if resume is not None and not any((Path(resume) / name).is_dir() for name in PARTS):
        raise ConfigError(
            f"--resume {resume}: it holds none of {', '.join(PARTS)}; give the folder of a report", code="missing"
        )
    parts: list[Result] = [load_result(path) for path in runs]
    for part in parts:
        if part.run.verb not in STUDIES:
            found = f"{part.folder} is a run of `{part.run.verb}`"
            raise ConfigError(f"{found}: a report takes those of {', '.join(STUDIES)}", code="other-verb")
    settings: list[Settings] = [] if runs else [build_batch(), build_ranks(), build_large_batch()]
    most = max((max(each.ranks) for each in settings if isinstance(each, ScaleSettings)), default=1)
    with open_session(
        "scale report", {}, ranks=most, out=out, resume=resume, progress=progress, can_resume=True
    ) as session:
        if settings:
            _keep_command_line(session)
            parts = [_make_part(session, name, each) for name, each in zip(PARTS, settings, strict=True)]
        if session.is_finished and session.folder is not None:
            run = load_run(session.folder)
        else:
            places = [str(part.folder.absolute()) for part in parts if part.folder is not None]
            here = [os.path.relpath(place, session.folder) for place in places] if session.folder else places
            run = Run("scale report", {"runs": here}, session.environment, ())
        result = ReportResult(run, session.folder, parts)
        session.write(result)
        return result


def _make_part(session: Session, name: str, settings: Settings) -> Result:
    """One of the studies, unless it is finished; one that is resumed has its own settings."""
    config, verb = settings.to_json(), f"scale {name}"
    if isinstance(settings, ScaleSettings):
        config = _build_ranks_config(settings, "10gbe,100gbe", (64, 1024))
    is_timed = not isinstance(settings, LargeBatchSettings)
    if session.folder is None:
        opened = open_session(verb, config, ranks=session.ranks, progress=session.progress)
    else:
        opened = session.open_part(name, verb, config, same_machine=is_timed)
    with opened as part:
        settings = type(settings).from_json(part.config)
        return _finish(part, lambda: _MEASURE[type(settings)](part, settings))


_MEASURE: dict[type, Callable[[Session, Any], list[Record]]] = {
    BatchSettings: _measure_batch,
    ScaleSettings: _measure_ranks,
    LargeBatchSettings: _measure_large_batch,
}


def _keep_command_line(session: Session) -> None:
    """A part that a resumed report starts belongs to the command that started the report."""
    folders = [] if session.folder is None else [session.folder / name for name in PARTS]
    begun = next((folder for folder in folders if (folder / STUDY_FILE).exists()), None)
    if begun is not None and (command_line := Study.load(begun, f"scale {begun.name}").command_line):
        session.environment = dataclasses.replace(session.environment, command_line=command_line)


# -- what they share ---------------------------------------------------------------------------------------------------


def _finish(session: Session, measure: Callable[[], list[Record]]) -> Result:
    """Measure what is missing, save the run, and write its tables, figures and page.

    The records are saved first: a table may refuse them, and they must not be lost. A finished study has its records in
    its run: no rank is started.
    """
    from paceline.report.result import build_result

    run = session.save([] if session.is_finished else measure())
    result = build_result(run, session.folder)
    session.write(result)
    return result


def _check_resume(resume: Place, out: Place, job: dict[str, Any]) -> None:
    given = [*(["out"] if out is not None else []), *job]
    if resume is not None and given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} with --resume: a study is resumed as it was started; leave it out",
            code="resume",
        )


def _refuse_launched(why: str) -> None:
    if is_launched() and read_place().world_size > 1:
        raise ConfigError(
            f"in a launched world of {read_place().world_size}: {why}; start it without the launcher", code="launched"
        )
