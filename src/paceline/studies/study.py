"""Shared code of all scaling studies: settings, running and resuming, the result and the page."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from paceline import machine
from paceline.errors import refuse
from paceline.options import Option, check_counts, check_options
from paceline.records import BatchRecord, LargeBatchRecord, Record, StepRecord
from paceline.records.checked import decode
from paceline.records.environment import Environment
from paceline.records.store import Study
from paceline.report.result import Result
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.runtime.ranks.session import Session, open_session
from paceline.training.train_settings import TrainSettings, check_job, check_size
from paceline.verbs.jobs import check_resume, finish

PAGE = "report.md"


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """The settings of a study, with the method that runs its measurement. With `is_timed`, cells contain times, which
    must not be mixed with times from another machine."""

    verb: ClassVar[Callable[..., Any]]
    is_timed: ClassVar[bool] = True

    job: TrainSettings

    @classmethod
    def get_name(cls) -> str:
        """The study's name on the command line."""
        return cls.verb.__name__.replace("_", "-")

    @classmethod
    def get_defaults(cls) -> dict[str, Any]:
        """Defaults of the verb's arguments that are settings."""
        leave_out = ("out", "resume", "progress", "at_once", "job")
        return {n: p.default for n, p in inspect.signature(cls.verb).parameters.items() if n not in leave_out}

    @classmethod
    def build(cls, *args: Any, **given: Any) -> Self:
        """Build the settings from the verb's arguments."""
        raise NotImplementedError

    def measure(self, session: Session, at_once: int) -> list[Record]:
        """Measure the session's missing cells, `at_once` of them concurrently."""
        raise NotImplementedError

    @property
    def num_ranks(self) -> int:
        """Maximum number of concurrent ranks."""
        return self.job.ranks

    def check(self) -> None:
        """Reject invalid settings of the study; the job has a separate check."""
        check_options(self)

    def check_size(self) -> None:
        """Reject cells that do not fit in this host's memory or that would never finish."""
        given = asdict(self)
        sizes = (*given.get("batch_sizes", ()), given.get("most_at_once", 1))
        check_size(replace(self.job, batch_size=max(sizes), global_batch_size=None, accumulate=None))
        Option(each_s=1e-6).check("global_batch_size", given.get("global_batch_sizes"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        found: Self = decode(cls, known | {"job": TrainSettings.from_json(values["job"])})
        return found


def build_settings(kind: type[StudySettings], **given: Any) -> StudySettings:
    """Build a study's settings, and run all checks that do not need a rank."""
    settings = kind.build(**given)
    settings.check()
    check_job(settings.job)
    settings.check_size()
    return settings


def run_study(kind: type[StudySettings], given: dict[str, Any]) -> Any:
    """Run a study with the arguments of its verb, or finish an interrupted study with its saved settings."""
    out, resume, progress, job = (given.pop(name) for name in ("out", "resume", "progress", "job"))
    at_once, command, defaults = given.pop("at_once", None), f"scale {kind.get_name()}", kind.get_defaults()
    assert set(given) == set(defaults), f"{command}: arguments and no other locals, not {sorted(given)}"
    check_counts(at_once=at_once)
    if resume is None:
        settings = build_settings(kind, **given, **job)
    else:
        check_resume({"out": out, **given, **job}, defaults)
        saved = Study.load(Path(resume), command).config
        settings, at_once = kind.from_json(saved), at_once or saved.get("at_once")
    config = settings.to_json() | ({} if at_once is None else {"at_once": at_once})
    with open_session(
        command, config, ranks=settings.num_ranks, out=out, resume=resume, progress=progress, cells=True,
        same_machine=settings.is_timed,
    ) as session:  # fmt: skip
        return finish_study(session, settings, at_once or 1)


def finish_study(session: Session, settings: StudySettings, at_once: int = 1) -> Any:
    """Measure the missing cells. A finished study has no missing cells and starts no ranks."""
    session.is_timed = settings.is_timed
    return finish(session, [] if session.is_finished else settings.measure(session, at_once))


def refuse_unused(job: dict[str, Any], names: Sequence[str], why: str) -> None:
    """Reject options that would have no effect."""
    refuse(*((name in job, f"--{name.replace('_', '-')}: {why}; leave it out") for name in names), code="unused")


def refuse_launched(why: str) -> None:
    size = read_place().world_size if is_launched() else 1
    refuse((size > 1, f"in a launched world of {size}: {why}; start it without the launcher"), code="launched")


def choose_device(device: str) -> str:
    return device if device != "auto" else "cuda" if machine.count_gpus() else "cpu"


class StudyResult(Result):
    """The result of a scaling study: sentences, starting with the answer, and a page."""

    topic: ClassVar[str] = ""
    sentences: Sequence[str] = ()
    assumptions: Sequence[str] = ()  # assumptions of the predictions

    @property
    def title(self) -> str:
        jobs = [record for record in self.records if isinstance(record, BatchRecord | StepRecord | LargeBatchRecord)]
        named = dict.fromkeys(f"{job.model} on {job.data}, {job.precision} on {job.device}" for job in jobs)
        return f"{self.topic}: {'; '.join(named)}"

    @property
    def answer(self) -> str:
        return self.sentences[0] if self.sentences else "Scaling was not measured."

    @property
    def findings(self) -> list[str]:
        return list(self.sentences[1:])

    @property
    def places(self) -> list[str]:
        page = [] if self.folder is None else [f"page: {self.folder / PAGE}"]
        return [*page, *super().places]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"assumptions": list(self.assumptions)}

    def files(self) -> dict[str, str | bytes]:
        return {PAGE: render_page(self.run.verb, [self], self.folder, self.warnings)}


_DEFINITIONS = (
    ("weak scaling", "the samples per rank stay the same; efficiency is T(1) / T(n), 1 is ideal, and the ratio "
     "is sometimes called the speed-up"),
    ("strong scaling", "the samples over all ranks stay the same; speed-up is T(1) / T(n), efficiency is speed-up / n"),
    ("speed-up", "samples/s of n ranks divided by those of one; T(1) is the step of one rank alone, without a wrapper"),
    ("compute", "the step with communication off"),
    ("exposed", "the step minus the same step with communication off; of step: exposed over compute plus exposed"),
    ("busy", "the time in a step with at least one message in flight; overlap is 1 - exposed / busy"),
    ("bandwidth", "busbw = 2(n-1)/n * bytes / t, with the bytes that a rank passes to all-reduce and t = busy"),
    ("peak", "the largest busbw of a plain all-reduce, outside of steps, on the same backend and number of ranks"),
    ("disturbed", "one rank was slower than the others even without communication; do not use the cell"),
    ("knee", "the smallest batch size with at least 90 % of the best samples/s; none if only the largest reaches it"),
    ("gap", "the mean test accuracy of the baseline (the smallest batch without a recipe) minus this one's, in points; "
     "for regression, this one's mean test loss minus the baseline's"),
    ("±", "for times: half the 95 % interval of the median over paired repetitions; for accuracies: the standard "
     "deviation over seeds"),
    ("measured, emulated, simulated", "timed here; timed here on an emulated slower network; computed by the model"),
)  # fmt: skip


def describe_machine(environment: Environment) -> str:
    """Describe the machine and the software of a run in one line."""
    known = {"Python": environment.python} | environment.versions | environment.details
    listed = ", ".join(f"{name} {value}" for name, value in known.items() if name != "gpu")
    parts = (f"{environment.host}: {environment.machine}", environment.system, listed, f"`{environment.command_line}`")
    return "; ".join([*parts, *([f"commit {environment.git_commit}"] if environment.git_commit else [])])


def render_page(title: str, parts: Sequence[StudyResult], folder: Path | None, warnings: Sequence[str]) -> str:
    """Render findings first, then figures and tables, the machine and definitions. `folder` will contain the page."""
    blocks, details = [f"# {title}", "## Findings"], []
    for part in parts:
        lines = part.sentences or ["There is nothing to report."]
        sources = dict.fromkeys(row["source"] for table in part.tables() for row in table.rows_json())
        blocks += [f"**{part.title}.** Source: {', '.join(sources)}.", "\n".join(f"- {line}" for line in lines)]
        place = os.path.relpath(part.folder, folder) + "/" if part.folder and folder and part.folder != folder else ""
        details += [f"## {part.title}", *(f"![{part.topic}: {name}]({place}{name}.png)" for name in part.figures())]
        for table in part.page_tables():
            details += [f"### {table.title.capitalize()}", table.markdown().strip()]
    for heading, lines in (
        ("Machine", list(dict.fromkeys(describe_machine(part.run.environment) for part in parts))),
        ("Definitions", [f"*{word}*: {meaning}." for word, meaning in _DEFINITIONS]),
        ("Assumptions of predictions", [line for part in parts for line in part.assumptions]),
        ("Warnings", list(warnings)),
    ):
        if lines:
            details += [f"## {heading}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join([*blocks, *details]) + "\n"
