"""How the studies of `scale` are run: their cells, what they leave behind, and the page of all of them.

What was typed becomes settings in `scale`; running cells one by one, and going on, is in `studies`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli import session
from paceline.cli.studies import StudyRun, Task, check_same_machine, open_study
from paceline.errors import ConfigError, LaunchError
from paceline.measure.large_batch_settings import LargeBatchSettings
from paceline.measure.scale_settings import BatchSweepSettings, ScaleSettings
from paceline.records import BatchRecord, LargeBatchRecord, Record, Run, RunFolder, ScaleRecord, load_run
from paceline.records.cells import STUDY_FILE, Study
from paceline.records.store import RUN_FILE
from paceline.runtime.environment import is_launched
from paceline.units import parse_counts
from paceline.workloads.data.requests import parse_data

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

_VERBS = ("scale batch", "scale ranks", "scale large-batch")
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
        return (settings.sweep(max(record.num_bytes for record in records if isinstance(record, ScaleRecord))),)

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
    page_path = run.write(PAGE, page + _render_assumptions(view.assumptions))
    if json:
        tables = {table.name: table.rows for table in view.tables}
        closing = {"findings": view.findings, "assumptions": view.assumptions}
        session.print_json({"run": str(run.path), **tables, **closing})
    run.print_lines([*view.findings, f"page: {page_path}", f"run: {run.path}"])
    if view.refusal is not None:
        raise view.refusal


def _render_assumptions(lines: Sequence[str]) -> str:
    return "\n## Assumed in predictions\n\n" + "".join(f"- {line}\n" for line in lines) if lines else ""


def report_runs(paths: Sequence[Path], out: Path, json: bool) -> None:
    """One page of studies that are finished."""
    runs = [load_run(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if run.verb not in _VERBS:
            raise ConfigError(f"{path} is a run of `{run.verb}`: those of {', '.join(_VERBS)} make the page")
    with RunFolder.create(out, "scale report") as folder:
        _write_page(folder, list(zip(paths, runs, strict=True)), json)


def report_all(
    batch: BatchSweepSettings,
    ranks: ScaleSettings,
    large_batch: LargeBatchSettings,
    out: Path,
    resume: Path | None,
    json: bool,
) -> None:
    """Make all three studies, each in a folder of its own in the page's, or go on with them; then the page."""
    names = ("batch", "ranks", "large-batch")
    with contextlib.ExitStack() as stack:
        if resume is None:
            folder = stack.enter_context(RunFolder.create(out, "scale report"))
        elif any((resume / name).is_dir() for name in names):
            folder = RunFolder(resume)
        else:
            raise ConfigError(f"--resume {resume}: it holds none of {', '.join(names)}; give the folder of a report")
        parts: tuple[_Settings, ...] = (batch, ranks, large_batch)
        for name, settings in zip(names, parts, strict=True):
            _make_part(name, settings, folder.path / name, out, json)
        paths = [folder.path / name for name in names]
        _write_page(folder, [(path, load_run(path)) for path in paths], json)


def _make_part(name: str, settings: _Settings, at: Path, out: Path, json: bool) -> None:
    """One of the studies, unless it was finished before; one that is gone on with has its own settings."""
    more = dataclasses.asdict(Beyond()) if name == "ranks" else {}
    if not isinstance(settings, LargeBatchSettings) and (at / STUDY_FILE).exists() and not (at / RUN_FILE).exists():
        check_same_machine(Study.load(at, f"scale {name}").config, at)
    with open_study(f"scale {name}", settings.to_json() | more, out, None, json, at=at) as run:
        if run.was_over:
            return
        assert run.study is not None
        config = run.study.config
        if isinstance(settings, BatchSweepSettings):
            finish(run, lambda: make_batch(run, BatchSweepSettings.from_json(config)), False)
        elif isinstance(settings, ScaleSettings):
            finish(run, lambda: make_ranks(run, ScaleSettings.from_json(config)), False)
        else:
            finish(run, lambda: make_large_batch(run, LargeBatchSettings.from_json(config)), False)


def _write_page(folder: RunFolder, runs: Sequence[tuple[Path, Run]], json: bool) -> None:
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
    page = render_report(sections, "Does it scale?", [describe_machine(run.environment) for _, run in runs])
    document = {
        "page": str(folder.path / PAGE),
        "runs": [str(path) for path, _ in runs],
        "findings": [line for view in views for line in view.findings],
        "assumptions": assumptions,
        "tables": {
            str(path): {table.name: table.rows for table in view.tables}
            for (path, _), view in zip(runs, views, strict=True)
        },
    }
    for name, content in (
        (PAGE, page + _render_assumptions(assumptions)),
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
    for view in views:
        if view.refusal is not None:
            raise view.refusal
