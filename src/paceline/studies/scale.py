"""`paceline.scale`: does a job scale? Its studies by name, and a report that combines them on one page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import refuse
from paceline.records.store import Run, load_run
from paceline.report.result import Result, load_result
from paceline.runtime.ranks.session import open_session
from paceline.studies.batch_sizes import BatchSettings, batch
from paceline.studies.large_batches import LargeBatchSettings, large_batch
from paceline.studies.rank_scaling import ScaleSettings, ranks
from paceline.studies.strategy_accuracy import StrategiesSettings, strategies
from paceline.studies.study import (
    PAGE,
    StudyResult,
    StudySettings,
    build_settings,
    finish_study,
    refuse_launched,
    render_page,
)
from paceline.verbs.jobs import Place, check_resume

__all__ = ["batch", "large_batch", "ranks", "report", "strategies"]

STUDIES: dict[str, type[StudySettings]] = {
    kind.get_name(): kind for kind in (BatchSettings, ScaleSettings, LargeBatchSettings, StrategiesSettings)
}


def report(
    runs: Sequence[str | Path] = (), *, out: Place = None, resume: Place = None, progress: bool | None = None
) -> ReportResult:
    """Put all studies on one page, from finished or new runs of `batch`, `ranks` and `large_batch`.

    Args:
        runs: Folders of finished runs. By default runs the three studies with their default settings, each in its own
            folder inside the report's folder.
        out: Save the report in a new subfolder of this folder.
        resume: The folder of an interrupted report.
    """
    refuse_launched("the report itself starts the ranks of its studies")
    if resume is not None:
        is_none = not any((Path(resume) / name).is_dir() for name in STUDIES)
        refuse((runs, f"--resume {resume} with runs: a page of finished runs has nothing to resume"), code="resume")
        check_resume({"out": out})
        known = ", ".join(STUDIES)
        found = f"--resume {resume}: it contains none of {known}"
        refuse((is_none, f"{found}; pass the folder of a report"), code="missing")
    parts: list[Result] = [load_result(path) for path in runs]
    for part in parts:
        found, taken = f"{part.folder} is a run of `{part.run.verb}`", [f"scale {name}" for name in STUDIES]
        refuse((part.run.verb not in taken, f"{found}: use runs of {', '.join(taken)}"), code="other-verb")
    usual = [] if runs else [kind for name, kind in STUDIES.items() if name != "strategies"]
    settings = [build_settings(kind, **kind.get_defaults()) for kind in usual]
    most = max((each.num_ranks for each in settings), default=1)
    with open_session(
        "scale report", {}, ranks=most, out=out, resume=resume, progress=progress, can_resume=True
    ) as session:
        for each in settings:
            name, config = each.get_name(), each.to_json()
            verb = f"scale {name}"
            if session.folder is None:
                opened = open_session(verb, config, ranks=session.ranks, progress=session.progress)
            else:
                opened = session.open_part(name, verb, config, same_machine=each.is_timed)
            with opened as study:  # a resumed study keeps its settings
                study.share_load(session)
                parts.append(finish_study(study, type(each).from_json(study.config)))
        if session.is_finished and session.folder is not None:
            run = load_run(session.folder)
        else:
            places = [str(part.folder.absolute()) for part in parts if part.folder is not None]
            here = [os.path.relpath(place, session.folder) for place in places] if session.folder else places
            run = Run("scale report", {"runs": here}, session.environment, ())
        result = ReportResult(run, session.folder, parts)
        session.write(result)
        return result


class ReportResult(StudyResult):
    """`scale report`: several studies on one page. `config["runs"]` lists their folders, relative to its own."""

    def __init__(self, run: Run, folder: Path | None = None, parts: Sequence[Result] | None = None) -> None:
        super().__init__(run, folder)
        if parts is None:
            parts = [load_result((folder or Path()) / path) for path in run.config["runs"]]
        self.parts = [part for part in parts if isinstance(part, StudyResult)]
        self.assumptions = [line for part in self.parts for line in part.assumptions]

    @property
    def answer(self) -> str:
        return " ".join(part.answer for part in self.parts)

    @property
    def findings(self) -> list[str]:
        return [line for part in self.parts for line in part.findings]

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(f"`{part.run.verb}`: {line}" for part in self.parts for line in part.warnings)

    @property
    def failure(self) -> str:
        return next((part.failure for part in self.parts if part.failure), "")

    def to_json(self) -> dict[str, Any]:
        tables = {str(p.folder or p.run.verb): {t.name: t.rows_json() for t in p.tables()} for p in self.parts}
        runs = [None if part.folder is None else str(part.folder) for part in self.parts]
        page = None if self.folder is None else str(self.folder / PAGE)
        return super().to_json() | {"page": page, "runs": runs, "tables": tables}

    def files(self) -> dict[str, str | bytes]:
        page = render_page("Does it scale?", self.parts, self.folder, self.warnings)
        return {PAGE: page, "report.json": json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"}
