"""How the studies of `scale` are run: their cells, what they leave behind, and the page of all of them.

What was typed becomes settings in `scale`; running cells one by one, and going on, is in `studies`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli import session
from paceline.cli.studies import StudyRun, Task, check_same_machine, hold, open_study, tell_how_to_go_on
from paceline.errors import ConfigError, LaunchError, MeasurementError
from paceline.measure.large_batch_settings import LargeBatchSettings
from paceline.measure.scale_settings import BatchSweepSettings, ScaleSettings
from paceline.records import BatchRecord, LargeBatchRecord, Record, Run, RunFolder, StepRecord, load_run
from paceline.records.store import RUN_FILE, STUDY_FILE, Study
from paceline.runtime.environment import is_launched
from paceline.units import parse_counts
from paceline.workloads.data.sources import parse_data

__all__ = [
    "Beyond",
    "finish",
    "load_batch",
    "load_large_batch",
    "load_ranks",
    "make_batch",
    "make_large_batch",
    "make_ranks",
    "report_all",
    "report_runs",
]

_PARTS = ("batch", "ranks", "large-batch")
_VERBS = tuple(f"scale {name}" for name in _PARTS)
PAGE = "report.md"
_Settings = BatchSweepSettings | ScaleSettings | LargeBatchSettings


@dataclass(frozen=True)
class Beyond:
    """Where the predicted curve goes on to: so many ranks, on hosts joined by these networks."""

    network: str = "10gbe,100gbe"
    predict_ranks: str = "64,1024"

    def check(self) -> None:
        from paceline.predict.networks import find_networks

        find_networks(self.network)
        parse_counts(self.predict_ranks, "--predict-ranks")


# -- cells -------------------------------------------------------------------------------------------------------------


def load_batch(resume: Path) -> BatchSweepSettings:
    config = Study.load(resume, "scale batch").config
    check_same_machine(config, resume)
    return BatchSweepSettings.from_json(config)


def make_batch(run: StudyRun, settings: BatchSweepSettings) -> list[Record]:
    def load() -> Callable[..., Any]:
        from paceline.measure.batch_sweep import measure_batch

        return measure_batch

    tasks = []
    for size in settings.batch_sizes:
        job = dataclasses.replace(settings.job, batch_size=size)

        def bury(error: LaunchError, size: int = size) -> list[Record] | None:
            return _bury(settings, size, error)

        tasks.append(Task(f"batch size {size}", load, (job, settings.epochs), on_death=bury))
    return run.make(tasks, _describe_batch)


def _bury(settings: BatchSweepSettings, size: int, error: LaunchError) -> list[Record] | None:
    """The row of a batch for which the kernel ended the process; None where it ended in another way."""
    if "SIGKILL" not in str(error):
        return None
    job = settings.job
    return [
        BatchRecord(
            model=job.model,
            data=parse_data(job.data)[0],
            device=job.device,
            precision=job.precision,
            threads=job.threads or 1,
            batch_size=size,
            num_samples=size,
            num_steps=1,
            failure="killed, as by the kernel when memory is over",
        )
    ]


def _describe_batch(records: Sequence[Record]) -> str:
    record = next(record for record in records if isinstance(record, BatchRecord))
    return record.failure or f"{record.samples_per_s:.0f} samples/s"


def load_ranks(resume: Path) -> tuple[ScaleSettings, Beyond]:
    config = Study.load(resume, "scale ranks").config
    check_same_machine(config, resume)
    return ScaleSettings.from_json(config), Beyond(config["network"], config["predict_ranks"])


def make_ranks(run: StudyRun, settings: ScaleSettings) -> list[Record]:
    """The cells of all ranks, the job's layers on one, and the all-reduces alone."""

    def load() -> Callable[..., Any]:
        from paceline.measure.scaling import measure_scaling

        return measure_scaling

    def load_layers() -> Callable[..., Any]:
        from paceline.measure.scaling import measure_layers_alone

        return measure_layers_alone

    def load_sweep() -> Callable[..., Any]:
        from paceline.measure.scaling import measure_allreduce

        return measure_allreduce

    def sweep_up_to_all(records: Sequence[Record]) -> tuple[Any, ...]:
        return (settings.sweep(max(record.num_bytes for record in records if isinstance(record, StepRecord))),)

    most = max(settings.ranks)
    tasks = [Task(cell.name, load, (settings, cell), most, weight=4.0) for cell in settings.cells]
    if not is_launched():
        # Ranks of our own: one of them can be alone. In a launched world the others would compute beside it.
        sizes = sorted({cell.batch_size(1, settings.job.accumulate or 1) for cell in settings.cells})
        jobs = [dataclasses.replace(settings.job, batch_size=size) for size in sizes]
        tasks += [Task(f"layers {job.batch_size}", load_layers, (job,)) for job in jobs]
    if settings.backends and most > 1:
        tasks.append(Task("allreduce", load_sweep, ranks=most, weight=2.0, follow=sweep_up_to_all))
    return run.make(tasks)


def load_large_batch(resume: Path) -> LargeBatchSettings:
    return LargeBatchSettings.from_json(Study.load(resume, "scale large-batch").config)


def make_large_batch(run: StudyRun, settings: LargeBatchSettings) -> list[Record]:
    def load() -> Callable[..., Any]:
        from paceline.measure.large_batch import measure_large_batch

        return measure_large_batch

    def load_survey() -> Callable[..., Any]:
        from paceline.measure.large_batch import survey_job

        return survey_job

    num_samples, has_norm = run.ask(load_survey, (settings.job,), settings.job.ranks)
    settings.check_norms(has_norm)
    tasks = []
    for cell in settings.list_cells(num_samples):
        steps = cell.settings.steps
        weight = steps * cell.global_batch_size if steps is not None else num_samples * cell.settings.epochs
        arguments = (cell, settings.evaluations, settings.seeds[0])
        tasks.append(Task(cell.name, load, arguments, settings.job.ranks, float(weight)))
    return run.make(tasks, _describe_training)


def _describe_training(records: Sequence[Record]) -> str:
    record = next(record for record in records if isinstance(record, LargeBatchRecord))
    return record.failure or f"test accuracy {record.test_accuracy:.2%}"


# -- what is left behind -----------------------------------------------------------------------------------------------


def finish(run: StudyRun, make: Callable[[], Sequence[Record]], json: bool) -> None:
    """Make what is missing; then tables, pictures, the page and the run's own file, and what a person wants to read.

    A study that is over has its records in that file: no rank is asked, and nothing is measured anew, whatever became
    of its cells.
    The records are saved first: a table may refuse them, and they must not be lost.
    """
    from paceline.cli.scale_views import build_view
    from paceline.report.scaling_report import describe_machine, render_report

    records = () if run.was_over else make()
    if not run.writes:
        return
    done = run.save(records)
    run.was_over = True  # whatever comes now, there is nothing to go on with
    view = build_view(done)
    for table in view.tables:
        run.write_table(table.name, table.columns, table.items, table.rows)
        run.print_table(table.columns, table.shown, table.title)
    for name, _, figure in view.pictures:
        run.write_figure(name, figure)
    page = render_report(view.sections, done.verb, [describe_machine(done.environment)])
    page_path = run.write(PAGE, page + _render_notes(view.assumptions, done.warnings))
    if json:
        tables = {table.name: table.rows for table in view.tables}
        closing = {"findings": view.findings, "assumptions": view.assumptions, "warnings": list(done.warnings)}
        session.print_json({"run": str(run.path), **tables, **closing})
    run.print_lines([*view.findings, f"page: {page_path}", f"run: {run.path}"])
    _print_warnings(done.warnings)
    if view.refusal is not None:
        raise view.refusal


def _render_notes(assumptions: Sequence[str], warnings: Sequence[str]) -> str:
    notes = (("Assumed in predictions", assumptions), ("Warnings", warnings))
    return "".join(f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in lines) for title, lines in notes if lines)


def _print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        session.stderr().print(f"paceline: warning: {warning}", markup=False)


def report_runs(paths: Sequence[Path], out: Path, json: bool) -> None:
    """One page of studies that are finished."""
    runs = [load_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if run.verb not in _VERBS:
            raise ConfigError(f"{path} is a run of `{run.verb}`: those of {', '.join(_VERBS)} make the page")
    with RunFolder.create(out, "scale report") as folder:
        refusal = _write_page(folder, list(zip(paths, runs, strict=True)), json)
    if refusal is not None:
        raise refusal


def report_all(
    batch: BatchSweepSettings,
    ranks: ScaleSettings,
    large_batch: LargeBatchSettings,
    out: Path,
    resume: Path | None,
    json: bool,
) -> None:
    """Make all three studies, each in a folder of its own in the page's, or go on with them; then the page."""
    with contextlib.ExitStack() as stack:
        if resume is None:
            folder = stack.enter_context(RunFolder.create(out, "scale report"))
        elif any((resume / name).is_dir() for name in _PARTS):
            folder = RunFolder(resume)
        else:
            raise ConfigError(f"--resume {resume}: it holds none of {', '.join(_PARTS)}; give the folder of a report")
        stack.enter_context(hold(folder.path))
        command_line = _check_parts(folder.path)
        parts: tuple[_Settings, ...] = (batch, ranks, large_batch)
        with _keep_parts(folder.path):
            for name, settings in zip(_PARTS, parts, strict=True):
                _make_part(name, settings, folder.path / name, command_line, json)
            paths = [folder.path / name for name in _PARTS]
            refusal = _write_page(folder, [(path, load_run(path)) for path in paths], json)
    if refusal is not None:
        raise refusal


def _check_parts(folder: Path) -> str:
    """Refuse what cannot go on here before anything is made; the command line that began the report, where it is known.

    A part that is begun later belongs to that command, too.
    """
    begun = [Study.load(folder / name, f"scale {name}") for name in _PARTS if (folder / name / STUDY_FILE).exists()]
    for study in begun:
        if study.verb != "scale large-batch" and not (study.path / RUN_FILE).exists():
            check_same_machine(study.config, study.path)
    return next((study.command_line for study in begun), "")


@contextlib.contextmanager
def _keep_parts(folder: Path) -> Iterator[None]:
    """Say how to go on with the report where it is broken off and anything of it is there."""
    try:
        yield
    except BaseException:
        kept = []
        for name in _PARTS:
            path = folder / name
            with contextlib.suppress(OSError):
                path.rmdir()  # of a part without a cell the empty folder is left
            count = Study(path, f"scale {name}", {}).count()
            if (path / RUN_FILE).exists():
                kept.append(f"{name} (finished)")
            elif count:
                kept.append(f"{name} ({count} finished cell{'s' if count != 1 else ''})")
        if kept:
            tell_how_to_go_on(f"{', '.join(kept)} {'are' if len(kept) > 1 else 'is'}", "scale report", folder)
        raise


def _make_part(name: str, settings: _Settings, at: Path, command_line: str, json: bool) -> None:
    """One of the studies, unless it was finished before; one that is gone on with has its own settings."""
    more = dataclasses.asdict(Beyond()) if name == "ranks" else {}
    config = settings.to_json() | more
    with open_study(f"scale {name}", config, at.parent, None, json, at=at, command_line=command_line) as run:
        if run.was_over and (at / PAGE).exists():  # its page comes last: where it is missing, pictures may be, too
            return
        assert run.study is not None
        config = run.study.config
        if isinstance(settings, BatchSweepSettings):
            finish(run, lambda: make_batch(run, BatchSweepSettings.from_json(config)), False)
        elif isinstance(settings, ScaleSettings):
            finish(run, lambda: make_ranks(run, ScaleSettings.from_json(config)), False)
        else:
            finish(run, lambda: make_large_batch(run, LargeBatchSettings.from_json(config)), False)


def _write_page(folder: RunFolder, runs: Sequence[tuple[Path, Run]], json: bool) -> MeasurementError | None:
    """The page of these runs and its JSON, printed; what a run's table refused is returned, since the page is there."""
    import json as encoder

    from paceline.cli.scale_views import build_view
    from paceline.report.scaling_report import describe_machine, render_report

    views = [build_view(run) for _, run in runs]
    sections = [
        section
        for (path, _), view in zip(runs, views, strict=True)
        for section in view.locate(os.path.relpath(path, folder.path))
    ]
    assumptions = [line for view in views for line in view.assumptions]
    warnings = [f"`{run.verb}`: {line}" for _, run in runs for line in run.warnings]
    page = render_report(sections, "Does it scale?", [describe_machine(run.environment) for _, run in runs])
    document = {
        "page": str(folder.path / PAGE),
        "runs": [str(path) for path, _ in runs],
        "findings": [line for view in views for line in view.findings],
        "assumptions": assumptions,
        "warnings": warnings,
        "tables": {
            str(path): {table.name: table.rows for table in view.tables}
            for (path, _), view in zip(runs, views, strict=True)
        },
    }
    for name, content in (
        (PAGE, page + _render_notes(assumptions, warnings)),
        ("report.json", encoder.dumps(document, indent=1, allow_nan=False) + "\n"),
    ):
        (folder.path / name).unlink(missing_ok=True)
        folder.write(name, content)
    if json:
        session.print_json(document)
    else:
        console = session.stdout()
        for section in sections:
            console.print(f"{section.title}", markup=False, style="bold")
            for line in section.findings:
                console.print(f"- {line}", markup=False)
        console.print(f"page: {folder.path / PAGE}")
    _print_warnings(warnings)
    return next((view.refusal for view in views if view.refusal is not None), None)
