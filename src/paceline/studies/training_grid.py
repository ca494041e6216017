"""Studies of test accuracy: a grid of configurations and seeds, and scores with their spread over seeds.

`large_batches` and `strategy_accuracy` define the configurations; `training_runs` trains them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from paceline.errors import RecordError
from paceline.options import option
from paceline.records import CurvePoint, LargeBatchRecord, Record
from paceline.records.samples import group_by
from paceline.report.plots import Drawings, Figure, build_panels, draw_line, label_values, place_legend
from paceline.report.table import Column, raw_columns, text_columns
from paceline.runtime.ranks.session import Session, Task
from paceline.studies.study import StudyResult, StudySettings
from paceline.training.train_settings import TrainSettings
from paceline.units import format_number_of

_RUNS = "paceline.studies.training_runs:"
_ACCURACY, _LOSS = "test accuracy (%)", "test loss"


@dataclass(frozen=True)
class TrainingCell:
    """One training run of a study. Compared runs share the `budget` ("epochs" or "updates"). `recipe` is the
    configuration's name, and `probes` enables measuring gradient noise."""

    settings: TrainSettings
    budget: str
    recipe: str
    global_batch_size: int
    probes: bool = False

    @property
    def name(self) -> str:
        return f"{self.budget} {self.global_batch_size} {self.recipe} seed {self.settings.seed}"

    @property
    def configuration(self) -> str:
        """The recipe's settings, for a table."""
        s = self.settings
        grown = ", ".join(f"x{factor} at {share:g}" for share, factor in s.batch_growth)
        parts = [
            (True, f"{s.optimizer}, lr {s.lr:.4g}, {s.schedule}"),
            (s.lr_warmup, f"warm-up {s.lr_warmup}"),
            (s.batch_growth, f"from {s.global_batch_size}: {grown}"),
            (s.ghost_batchnorm, f"ghosts of {s.ghost_batchnorm}"),
            (s.sync_batchnorm, "sync BatchNorm"),
            (s.label_smoothing, f"smoothing {s.label_smoothing:g}"),
        ]
        return ", ".join(words for is_on, words in parts if is_on)


@dataclass(frozen=True, kw_only=True)
class GridSettings(StudySettings):
    """Every configuration of the job with every seed, with `evaluations` tests per run."""

    is_timed: ClassVar[bool] = False

    seeds: tuple[int, ...] = (1, 2, 3)
    evaluations: int = option(10, least=1, each_s=0.01)

    def list_configurations(self, num_samples: int) -> list[TrainingCell]:
        """List a run of each configuration with the job's seed, for this number of training samples."""
        raise NotImplementedError

    def check_model(self, has_norm: bool) -> None:
        """Reject configurations that do not fit the model. `has_norm`: the model has BatchNorm."""

    def list_cells(self, num_samples: int) -> list[TrainingCell]:
        """List all runs, seed by seed: an interrupted study can then still compare configurations."""
        found = self.list_configurations(num_samples)
        return [
            replace(cell, settings=replace(cell.settings, seed=seed), probes=cell.probes and seed == self.seeds[0])
            for seed in self.seeds
            for cell in found
        ]

    def measure(self, session: Session, at_once: int) -> list[Record]:
        num_samples, has_norm = session.ask(f"{_RUNS}survey_job", (self.job,), self.job.ranks)
        self.check_model(has_norm)
        tasks = []
        for cell in self.list_cells(num_samples):
            steps = cell.settings.steps
            weight = num_samples * cell.settings.epochs if steps is None else steps * cell.global_batch_size
            arguments = (cell, self.evaluations, self.seeds[0])
            tasks.append(Task(cell.name, f"{_RUNS}measure_training", arguments, self.job.ranks, float(weight)))
        return session.run(tasks, _describe_run, at_once)


def _describe_run(records: Sequence[Record]) -> str:
    record = next(record for record in records if isinstance(record, LargeBatchRecord))
    if record.failure:
        return record.failure
    loss, accuracy = record.curve[-1].test_loss, record.curve[-1].test_accuracy
    return f"test loss {loss:.4g}" if accuracy is None else f"test accuracy {accuracy:.2%}"


def choose_small_job(model: str | None, job: dict[str, Any]) -> dict[str, Any]:
    """Fill in a schedule, and a model small enough for a study of a few minutes."""
    if job["schedule"] is None:
        job["schedule"] = "piecewise" if job.get("lr_drops") else "cosine"
    is_given = model is not None or {"channels", "hidden"} & set(job)
    return job if is_given else job | {"channels": (8, 16), "hidden": 64}


class Spread(NamedTuple):
    """The mean and sample standard deviation over seeds. With a single seed, the deviation is None."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class SeedSummary:
    """All seeds of one configuration, compared with `baseline`. Spreads cover finished runs."""

    runs: tuple[LargeBatchRecord, ...]
    baseline: SeedSummary | None = None
    accuracy: Spread | None = field(init=False)
    test_loss: Spread | None = field(init=False)
    train_loss: Spread | None = field(init=False)

    def __post_init__(self) -> None:
        if len({run.seed for run in self.runs}) != len(self.runs):
            raise RecordError(f"{self.first.recipe} at {self.first.global_batch_size}: a seed appears twice")
        for name, of in (("accuracy", "test_accuracy"), ("test_loss", "test_loss"), ("train_loss", "train_loss")):
            values = [value for run in self.finished if (value := getattr(run.curve[-1], of)) is not None]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            object.__setattr__(self, name, Spread(statistics.fmean(values), deviation) if values else None)

    @property
    def first(self) -> LargeBatchRecord:
        """The representative run: the first finished one, or the first of all."""
        return [*self.finished, *self.runs][0]

    @property
    def finished(self) -> list[LargeBatchRecord]:
        return [run for run in self.runs if not run.failure]

    @property
    def num_failed(self) -> int:
        return len(self.runs) - len(self.finished)

    @property
    def sources(self) -> str:
        return ", ".join(sorted({run.source for run in self.runs}))

    @property
    def score(self) -> Spread | None:
        """The score for comparing configurations: test accuracy, or test loss in regression."""
        return self.accuracy or self.test_loss

    @property
    def gap(self) -> float | None:
        """The baseline's mean test accuracy minus this configuration's, as a fraction. In regression, this
        configuration's mean test loss minus the baseline's."""
        if self.baseline is None or self.baseline.score is None or self.score is None:
            return None
        return (self.baseline.score.mean - self.score.mean) * (1 if self.accuracy else -1)

    @property
    def widest(self) -> float | None:
        """The larger of this configuration's and the baseline's deviation over seeds; None if both have one seed."""
        scores = [summary.score for summary in (self, self.baseline) if summary is not None]
        return max((s.deviation for s in scores if s is not None and s.deviation is not None), default=None)


def summarize_seeds(records: Sequence[LargeBatchRecord], baseline: str = "none") -> list[SeedSummary]:
    """Summarize each cell, in order. The baseline of a budget is its smallest batch size with the `baseline` recipe."""
    cells = group_by(records, lambda record: record.cell)
    found = {cell: SeedSummary(tuple(runs)) for cell, runs in cells.items()}
    plain = sorted((cell for cell in found if cell[2] == baseline), key=lambda cell: cell[1], reverse=True)
    baselines = {cell[0]: found[cell] for cell in plain}  # the last baseline of each budget has the smallest batch
    pairs = [(summary, baselines.get(summary.first.budget)) for summary in found.values()]
    return [summary if summary is base else SeedSummary(summary.runs, base) for summary, base in pairs]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def spread_columns(name: str, of: str, key: str, render: Callable[[float], str], priority: int) -> list[Column]:
    return [
        Column(name, f"{of}.mean", render, key, priority=priority),
        Column("±", f"{of}.deviation", render, f"{key}_deviation", priority=priority - 1),
    ]


JOB_COLUMNS = (
    *text_columns("first.model", "first.data"),
    *raw_columns("first.device", "first.precision", "first.world_size"),
)
# Accuracies and the gap are fractions of 1, deviations are sample standard deviations; null if no run finished.
# Regression has no accuracy, so the gap compares test losses.
SCORE_COLUMNS = (
    *spread_columns("test accuracy (%)", "accuracy", "test_accuracy", _percent, 4),
    Column("gap (points)", lambda s: s.gap if s.accuracy else None, _percent, priority=3),
    Column("gap (test loss)", lambda s: None if s.accuracy else s.gap, "{:.4f}".format, priority=3),
    *raw_columns("gap"),
)
RUN_COLUMNS = (
    Column("seeds", lambda s: len(s.runs), "number", "num_seeds", priority=-1),
    Column("failed", "num_failed", "number", "num_failed", priority=0),
    Column("source", "sources", key="source"),
)


class GridResult(StudyResult):
    """Scores of every configuration, compared with the `baseline`."""

    baseline: ClassVar[str]

    def _derive(self) -> None:
        self.runs = self.only(LargeBatchRecord)
        self.summaries = summarize_seeds(self.runs, self.baseline)
        # Regression has no accuracy.
        self.has_losses = any(point.test_accuracy is None for run in self.runs for point in run.curve)

    @property
    def score_name(self) -> str:
        return _LOSS if self.has_losses else _ACCURACY

    def name_line(self, recipe: str) -> str:
        """A configuration's name in a legend."""
        return recipe

    def _plot_scores(
        self,
        x: Callable[[SeedSummary], float | None],
        x_label: str,
        title: Callable[[LargeBatchRecord], str],
        say: Callable[[Any], str] = "{:,}".format,
    ) -> Figure:
        """Plot test accuracy, or loss, against x, ± the deviation over seeds: a line per configuration, a panel per
        title."""
        unit = 1 if self.has_losses else 100
        groups = group_by(self.summaries, lambda s: title(s.first))
        recipes = list(dict.fromkeys(s.first.recipe for s in self.summaries))
        figure, panels = build_panels(list(groups), f"{self.topic.lower()}: {self.score_name}", self.machine)
        for axes, group in zip(panels, groups.values(), strict=True):
            for number, recipe in enumerate(recipes):
                line = [(x(s), s) for s in group if s.first.recipe == recipe]
                found = [(place, s.score) for place, s in line if place is not None and s.score is not None]
                points = [
                    (place, *(unit * (y.mean + side * (y.deviation or 0.0)) for side in (0, -1, 1)))
                    for place, y in sorted(found, key=lambda pair: pair[0])
                ]
                if points:
                    source = ", ".join(dict.fromkeys(run.source for _, s in line for run in s.runs))
                    draw_line(axes, number, points, f"{self.name_line(recipe)} ({source})")
            axes.set_xlabel(x_label, fontsize=9)
            label_values(axes, [place for s in group if (place := x(s)) is not None], say)
        panels[0].set_ylabel(f"{self.score_name}, ± deviation over seeds")
        place_legend(figure, *panels)
        return figure

    def _plot_curves(self, records: Sequence[LargeBatchRecord]) -> Figure:
        """Plot test accuracy, or loss, during training, against epochs and against updates: each cell's mean over
        seeds, with a band from the worst to the best seed. Omits failed runs."""
        cells = group_by((record for record in records if not record.failure), lambda record: record.cell)
        title = f"{self.topic.lower()}: {self.score_name} during training"
        figure, panels = build_panels(["against epochs", "against updates"], title, self.machine)
        for number, ((budget, size, recipe), runs) in enumerate(cells.items()):
            seeds_of = format_number_of(len(runs), "seed")
            label = f"{self.name_line(recipe)} at {size:,}, same {budget} ({runs[0].source}, {seeds_of})"
            first, seeds = runs[0], [{point.update: _read_score(point) for point in run.curve} for run in runs]
            # Use only points at which every seed was evaluated.
            points = [point for point in first.curve if all(point.update in seed for seed in seeds)]
            rows = [[seed[point.update] for seed in seeds] for point in points]
            epochs = [point.num_samples * first.epochs / first.curve[-1].num_samples for point in points]
            for axes, xs in zip(panels, (epochs, [float(point.update) for point in points]), strict=True):
                found = [(x, statistics.fmean(row), min(row), max(row)) for x, row in zip(xs, rows, strict=True)]
                draw_line(axes, number, found, label, marker="")
        panels[0].set_xlabel("epochs", fontsize=9)
        panels[1].set_xlabel("updates", fontsize=9)
        longest = [runs[0].num_updates for runs in cells.values()]
        panels[1].set_xscale("log" if max(longest) >= 8 * min(longest) else "linear")
        panels[1].xaxis.set_major_formatter("{x:,.0f}")
        panels[0].set_ylabel(f"{self.score_name}, mean, band over seeds")
        place_legend(figure, *panels)
        return figure

    def draw_curves(self, records: Iterable[LargeBatchRecord]) -> Drawings:
        kept = list(records)
        is_drawn = any(record.curve and not record.failure for record in kept)
        return {"curves": partial(self._plot_curves, kept)} if is_drawn else {}


def _read_score(point: CurvePoint) -> float:
    """Test accuracy in percent, or test loss in regression."""
    return point.test_loss if point.test_accuracy is None else 100 * point.test_accuracy


def format_score(summary: SeedSummary, value: float) -> str:
    """Format an accuracy in percent, or a loss."""
    return f"{100 * value:.1f}" if summary.accuracy else f"{value:.4g}"


def describe_gap(summary: SeedSummary, baseline: str = "the baseline") -> str:
    """Describe the gap to the baseline's score and whether it is within the spread over seeds."""
    gap, widest = summary.gap or 0.0, summary.widest
    inside = " (less than the spread over seeds)" if widest is not None and abs(gap) <= widest else ""
    points, worse, better = (" points", "below", "above") if summary.accuracy else ("", "above", "below")
    return f"{format_score(summary, abs(gap))}{points} {worse if gap >= 0 else better} {baseline}{inside}"


def describe_score(summary: SeedSummary, baseline: str = "the baseline") -> str:
    """Describe the mean over seeds with its spread and the gap to the baseline."""
    score = summary.score
    if score is None:
        return f"no seed finished ({summary.first.failure})"
    seeds = f"{len(summary.finished)} seeds"
    sure = "one seed" if score.deviation is None else f"± {format_score(summary, score.deviation)}, {seeds}"
    failed = f", {summary.num_failed} of {len(summary.runs)} seeds failed" if summary.num_failed else ""
    gap = "" if summary.gap is None else f", {describe_gap(summary, baseline)}"
    mean = format_score(summary, score.mean)
    return f"{f'{mean} %' if summary.accuracy else f'test loss {mean}'} ({sure}{failed}){gap}"
