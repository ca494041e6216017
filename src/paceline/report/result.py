"""The result of a command: a view of one run for people and programs that needs neither torch nor the ranks."""

from __future__ import annotations

import base64
import html
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.errors import RecordError
from paceline.records.findings import NOISY, Finding, find_doubts
from paceline.records.kinds import CheckRecord, LinkRecord, Record
from paceline.records.store import RUN_FILE, Run, find_file, load_run, save_run, write_new
from paceline.records.training import CONFIG_FILE
from paceline.report.plots import Drawings, Figure, render_png, render_svg
from paceline.report.table import Column, Table, build_row, raw_columns, text_columns, wrap

R = TypeVar("R", bound=Record)
T = TypeVar("T")
# The result class of each verb, by module name. The module is imported when such a run is shown.
_CLASSES = {
    "bench allreduce": "report.sweeps.CollectiveResult",
    "bench chunks": "report.sweeps.ChunksResult",
    "bench wrappers": "report.step_tables.WrappersResult",
    "compare": "report.compared.ComparisonResult",
    "doctor": "report.result.DoctorResult",
    "faults": "studies.fault_trials.FaultsResult",
    "predict": "report.predictions.PredictResult",
    "predict csv": "report.predictions.CapsResult",
    "predict goodput": "report.fault_policies.GoodputResult",
    "predict scale": "report.outlook.OutlookResult",
    "predict strategies": "report.strategy_steps.StrategyStepsResult",
    "predict trace": "report.observed.TracedResult",
    "profile": "report.profiles.ProfileResult",
    "profile attach": "report.observed.AttachedResult",
    "profile comm-table": "report.profiles.CommTableResult",
    "profile layers": "report.profiles.ProfileResult",
    "profile phases": "report.step_tables.PhasesResult",
    "profile trace": "report.profiles.TraceResult",
    "scale batch": "studies.batch_sizes.BatchResult",
    "scale large-batch": "studies.large_batches.LargeBatchResult",
    "scale strategies": "studies.strategy_accuracy.StrategiesResult",
    "scale ranks": "studies.rank_scaling.RanksResult",
    "scale report": "studies.scale.ReportResult",
    "train": "report.training_result.TrainRunResult",
    "train --compare": "report.compared.TrainComparisonResult",
    "tune": "report.predictions.TuneResult",
    "tune attach": "report.observed.AttachedResult",
    "watch": "report.observed.AttachedResult",
}
_WITHOUT_RECORDS = ("compare", "profile trace", "scale report", "train", "train --compare")


class Result:
    """The return value of a verb; subclasses interpret the records of their verb. Everything is derived from `run`, so
    a saved run gives the same result again (`load_result`). `folder` is where the run was saved, or None."""

    json_columns: ClassVar[Sequence[Column]] = ()  # further keys of the JSON document: columns of the result itself

    def __init__(self, run: Run, folder: Path | None = None) -> None:
        self.run = run
        self.folder = folder
        self.page: Path | None = None  # the HTML page written for this result
        self._derive()

    def _derive(self) -> None:
        """Set the attributes that are always derived from the run."""

    @property
    def answer(self) -> str:
        """The answer in one or two sentences, printed first."""
        if not self.records:
            return f"Nothing was measured: the run of `paceline {self.run.verb}` has no records."
        return f"{len(self.records)} records of `paceline {self.run.verb}`."

    @property
    def headline(self) -> str:
        """The answer on a page; its first sentence is the verdict."""
        return self.answer

    @property
    def caption(self) -> str:
        return f"paceline {self.run.verb}" + (f": {self.folder}" if self.folder is not None else "")

    @property
    def findings(self) -> Sequence[str]:
        """More findings about the records, one sentence each."""
        return ()

    def tables(self) -> list[Table]:
        """All tables; the first is the main one."""
        return []

    def page_tables(self) -> list[Table]:
        return self.tables()

    def page_figures(self) -> Drawings:
        """The figures on a page, as in `figures`."""
        return self.figures()

    def figures(self) -> Drawings:
        """Functions that draw the figures, by file name."""
        return {}

    def files(self) -> dict[str, str | bytes]:
        """Further files of the run folder, by name."""
        return {}

    @property
    def next_steps(self) -> Sequence[str]:
        """Commands to try next."""
        return ()

    @property
    def places(self) -> list[str]:
        """The paths of the result's files, one per line."""
        found = {"run": self.folder, "page": self.page}
        return [f"{name}: {path}" for name, path in found.items() if path is not None]

    @property
    def failure(self) -> str:
        """Why the result counts as a failure, which makes the command exit with 1; empty if it is not a failure."""
        return next((doubt.text for doubt in self.doubts if doubt.kind == "wrong"), "")

    @property
    def records(self) -> tuple[Record, ...]:
        return self.run.records

    def only(self, kind: type[R]) -> list[R]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    @property
    def config(self) -> dict[str, Any]:
        return self.run.config

    @property
    def machine(self) -> str:
        """The machine for a figure's subtitle, without an unused GPU."""
        devices = {record.device for record in self.records if hasattr(record, "device")} or {self.config.get("device")}
        return replace(self.run.environment, details=self.run.environment.details if devices != {"cpu"} else {}).machine

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.run.warnings

    @property
    def doubts(self) -> list[Finding]:
        """Reasons why the measurement may be unreliable, from its records and the machine's load."""
        return find_doubts(self.records, self.run.environment)

    @property
    def noise(self) -> list[str]:
        """The findings of `doubts` that make `--strict` fail, because another run may give a different answer."""
        return [doubt.text for doubt in self.doubts if doubt.kind in NOISY]

    def table(self, name: str | None = None) -> Table:
        return _pick({table.name: table for table in self.tables()}, name, "table")

    def figure(self, name: str | None = None) -> Figure:
        return _pick(self.figures(), name, "figure")()

    def to_json(self) -> dict[str, Any]:
        """One JSON document: the answer, the rows of every table, the warnings, and the run's folder."""
        return {
            "verb": self.run.verb,
            "answer": self.answer,
            "findings": list(self.findings),
            **{table.key or table.name: table.rows_json() for table in self.tables()},
            "warnings": list(self.warnings),
            "run": None if self.folder is None else str(self.folder),
            **build_row(self.json_columns, self),
        }

    def log_to(self, logger: Any, step: int = 0) -> None:
        """Send the answer, the numbers of the main table and the gain of each finding to a logger: a `SummaryWriter` of
        TensorBoard, a run of Weights & Biases, or any object with `add_scalar` or `log`."""
        table = next((table for table in self.tables() if table.rows), None)
        numbers: dict[str, float] = {}
        if table is not None:
            name = next(column.key for column in table.columns if column.key)
            rows = table.rows_json()
            for place, row in enumerate(rows):
                label = f"{name}_{row[name]}" if len({other[name] for other in rows}) == len(rows) else f"row_{place}"
                is_number = {key: isinstance(value, int | float) for key, value in row.items() if key != name}
                numbers |= {f"paceline/{label}/{key}": row[key] for key, is_one in is_number.items() if is_one}
        for finding in getattr(self, "bottlenecks", ()):
            numbers[f"paceline/gain_s/{finding.kind}"] = finding.gain_s
        if hasattr(logger, "add_scalar"):
            for key, value in numbers.items():
                logger.add_scalar(key, value, step)
            logger.add_text("paceline/answer", self.headline, step)
        else:
            logger.log({**numbers, "paceline/answer": self.headline}, step=step)

    def save(self, folder: str | Path) -> Path:
        """Write the run, its tables and its figures into a folder, and return the folder. Never overwrites the records
        of another run; tables and figures follow from the records and are replaced."""
        folder = Path(folder)
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot write {folder}: {error.strerror}") from None
        self._save_run(folder)
        self.folder = self.folder or folder
        files: dict[str, str | bytes] = {}
        for table in self.tables():
            files |= {f"{table.name}.md": table.markdown(), f"{table.name}.csv": table.csv()}
        for name, draw in self.figures().items():
            figure = draw()
            files |= {f"{name}.png": render_png(figure), f"{name}.svg": render_svg(figure)}
        for name, content in (files | self.files()).items():
            for old in (folder / name, *folder.glob(f".{name}.*")):  # left by an earlier call or a killed one
                old.unlink(missing_ok=True)
            write_new(folder / name, content)
        return folder

    def _save_run(self, folder: Path) -> None:
        if find_file(folder / RUN_FILE) is None:
            save_run(self.run, folder / RUN_FILE)
        elif ((there := load_run(folder)).created, there.verb) != (self.run.created, self.run.verb):
            raise RecordError(
                f"{folder} contains another run and is not overwritten: choose another folder", code="exists"
            )

    def text(self, width: int | None = 80, details: bool = False) -> str:
        """Text for a terminal of this width: the answer, the main table, the first warning and the next step; with
        `details`, everything. A width of None shows every column of a table at full width."""
        most = None if details else 1
        tables = [replace(table, shown=None) if details and table.shown else table for table in self.tables()]
        shown = [text for table in tables if (text := table.terminal(width))][:most]
        warnings = [f"warning: {warning}" for warning in self.warnings]
        if len(warnings) > 1 and not details:
            warnings = [f"{warnings[0]} (--details shows {len(warnings) - 1} more)"]
        lines = self.answer.splitlines()
        answer = [part for line in lines for part in wrap(line, width, "  " if len(lines) > 1 else "")]
        blocks = [answer, *([table] for table in shown)]
        blocks += [
            [part for line in lines for part in wrap(line, width, "  ")]
            for lines in (self.findings if details else (), warnings)
        ]
        blocks.append([*self.places, *(f"next: {command}" for command in self.next_steps[:most])])
        return "\n\n".join(filter(None, map("\n".join, blocks)))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of `paceline {self.run.verb}`: {len(self.records)} records>"

    def _repr_html_(self) -> str:
        said = [*self.findings, *(f"warning: {line}" for line in self.warnings)]
        parts = [f"<p><b>{html.escape(self.answer)}</b></p>", *(table.html() for table in self.tables())]
        parts += [f"<p>{html.escape(line)}</p>" for line in said]
        for name, draw in self.figures().items():
            data = base64.b64encode(render_png(draw())).decode()
            parts.append(f'<img alt="{html.escape(name)}" style="max-width:760px" src="data:image/png;base64,{data}">')
        return "\n".join(parts)


class DoctorResult(Result):
    """Result of `paceline doctor`: one record per check and, for several hosts, per link."""

    json_columns = (Column(None, lambda result: not result.failure, key="ok"),)

    def _list(self, status: str) -> str:
        return ", ".join(check.name for check in self.only(CheckRecord) if check.status == status)

    @property
    def failure(self) -> str:
        return self._list("fail")

    @property
    def answer(self) -> str:
        hosts = self.config.get("hosts", [])
        who = f"These {len(hosts)} hosts are" if len(hosts) > 1 else "This host is" if hosts else "This machine is"
        if self.failure:
            return f"{who} not ready to train. Failed: {self.failure}. The table shows how to fix it."
        note = f" Check: {self._list('warn')}." if self._list("warn") else ""
        if hosts:
            return f"{who} ready to train: ranks can start and connect there.{note}"
        if "2-rank all-reduce" not in self._list("ok"):
            return f"Nothing failed, but no rank was started.{note}"
        return f"This machine is ready to train: ranks start, connect and reduce correctly.{note}"

    def tables(self) -> list[Table]:
        columns = (
            Column("", "status", str, "status", is_key=True),
            Column("check", "name", key="name", is_key=True),
            *raw_columns("found", "advice"),
            Column("found", lambda check: check.found + (f" -> {check.advice}" if check.advice else ""), "words"),
        )
        checks = Table("checks", "", columns, self.only(CheckRecord))
        return [checks, *self._list_links()]

    def _list_links(self) -> list[Table]:
        """The links between hosts: one by one for programs, and as a bandwidth matrix for people."""
        hosts, links = self.config.get("hosts", []), self.only(LinkRecord)
        if not links:
            return []
        rates = {(link.sender, link.receiver): link.bytes_per_s for link in links}
        columns = (
            *text_columns("sender", "receiver", "interface"),
            *raw_columns("num_bytes", "latency_s"),
            Column("bandwidth", "bytes_per_s", "GB/s", key="bandwidth_gbps"),
        )

        def read(receiver: str) -> Callable[[str], float | None]:
            return lambda sender: rates.get((sender, receiver))

        matrix = [Column("from", lambda sender: sender, key="sender", is_key=True)]
        matrix += [Column(f"to {host}", read(host), "GB/s", key=f"to_{host}_gbps") for host in hosts]
        title = "Bandwidth of one TCP connection between hosts"
        return [Table("links", title, columns, links, shown=[]), Table("bandwidth", title, matrix, hosts)]

    @property
    def next_steps(self) -> Sequence[str]:
        if hosts := ",".join(self.config.get("hosts", [])):
            run = f"paceline run --hosts {hosts} -- paceline bench allreduce"
            return (f"paceline doctor --hosts {hosts}" if self.failure else run,)
        return ("paceline doctor",) if self.failure else ("paceline bench allreduce --ranks 2",)


_JOB_DEFAULTS = {
    "model": None, "wrapper": "paceline", "data": "synthetic", "batch_size": None, "precision": "fp32",
    "backend": "auto", "channels": None, "hidden": None, "context": None,
}  # fmt: skip


def describe_job(config: dict[str, Any]) -> str:
    """The command-line options that describe the job of this configuration."""
    given = {name: value for name in _JOB_DEFAULTS if (value := config.get(name)) not in (None, _JOB_DEFAULTS[name])}
    words = {name: value if isinstance(value, list | tuple) else [value] for name, value in given.items()}
    return " ".join(f"--{name.replace('_', '-')} {' '.join(map(str, value))}" for name, value in words.items())


def _pick(named: dict[str, T], name: str | None, what: str) -> T:
    chosen = next(iter(named), "") if name is None else name
    if chosen not in named:
        asked = what if name is None else f"{what} {name!r}"
        raise KeyError(f"this result has no {asked}: it has {', '.join(named) or 'none'}")
    return named[chosen]


def _find_class(verb: str) -> type[Result]:
    """The class of a verb's results, imported on demand, because often a study that imports this package has it."""
    module, _, name = _CLASSES.get(verb, "report.result.Result").rpartition(".")
    kind: type[Result] = getattr(importlib.import_module(f"paceline.{module}"), name)
    return kind


def build_result(run: Run, folder: Path | None = None) -> Result:
    is_empty = run.verb not in _WITHOUT_RECORDS and not run.records  # interrupted before its first cell
    return (Result if is_empty else _find_class(run.verb))(run, folder)


def load_result(path: str | Path) -> Result:
    """The result of a run from its folder or its `run.json`, as the original command or call returned it."""
    path = Path(path)
    if path.is_dir() and find_file(path / RUN_FILE) is None and (path / CONFIG_FILE).exists():
        result: Result = _find_class("train").load(path)  # type: ignore[attr-defined]
        return result
    if path.is_dir() and find_file(path / RUN_FILE) is None:
        runs = sorted(file.parent for file in path.glob(f"**/{RUN_FILE}*"))
        advice = f"did you mean {runs[-1]}?" if runs else "pass a run folder or its run.json"
        raise RecordError(f"{path} is not the folder of a run: {advice}", code="not-a-run")
    return build_result(load_run(path), path if path.is_dir() else path.parent)
