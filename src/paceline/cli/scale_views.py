"""What is shown of a study of `scale`: tables, pictures and findings, from its records and what was asked alone.

The same for a study that was just made and for one that was found; writing and printing is in `scale_studies`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import MeasurementError
from paceline.measure.large_batch_settings import LargeBatchSettings
from paceline.measure.scale_settings import ScaleSettings
from paceline.records import BatchRecord, CollectiveRecord, LargeBatchRecord, NoiseRecord, Record, Run, StepRecord
from paceline.records.layers import LayerProfileRecord
from paceline.report import noise_tables, predicted_tables, scaling_plots, scaling_report, scaling_tables
from paceline.units import format_memory, parse_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.predict.scaling import PredictedPoint
    from paceline.report.scaling_report import Section
    from paceline.report.tables import Column

__all__ = ["Table", "View", "build_view"]

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Table:
    """A table of the run: the name of its files, its columns and lines, and its rows as plain values.

    `shown` are the lines that a terminal gets; the files have all.
    """

    name: str
    title: str
    columns: Sequence[Column]
    items: Sequence[Any]
    rows: Sequence[dict[str, Any]]

    @property
    def shown(self) -> Sequence[Any]:
        # Of predictions those that can be held against something: the others are many, and in the findings.
        return [item for item in self.items if getattr(item, "point", True) is not None]


@dataclass(frozen=True)
class View:
    """All of a study. `pictures` are (name, caption, figure); `assumptions` are those of its predictions; `refusal` is
    why a table is missing."""

    sections: list[Section]
    tables: list[Table]
    pictures: list[tuple[str, str, Figure]]
    assumptions: list[str] = field(default_factory=list)
    refusal: MeasurementError | None = None

    @property
    def findings(self) -> list[str]:
        return [line for section in self.sections for line in section.findings]

    def locate(self, place: str) -> list[Section]:
        """The sections, with their pictures in this folder, seen from the page; empty: beside it."""
        found = []
        for section in self.sections:
            figures = [(caption, f"{place}/{name}" if place else name) for caption, name in section.figures]
            found.append(dataclasses.replace(section, figures=figures))
        return found


def build_view(run: Run) -> View:
    """Everything that is shown of a run of `scale batch`, `ranks` or `large-batch`."""
    return {"scale batch": _view_batch, "scale ranks": _view_ranks, "scale large-batch": _view_large_batch}[run.verb](
        run
    )


def _only(records: Sequence[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def _table(
    name: str, title: str, columns: Sequence[Column], items: Sequence[Any], row: Callable[[Any], dict[str, Any]]
) -> Table:
    return Table(name, title, columns, items, [row(item) for item in items])


def _describe(run: Run) -> str:
    """The machine, for the subtitle of a picture."""
    here = run.environment
    is_on_gpu = any(getattr(record, "device", "cpu") == "cuda" for record in run.records)
    gpu = f"{here.details['gpu']}; " if is_on_gpu and here.details.get("gpu") else ""
    return f"{gpu}{here.cpu}, {here.cores} cores, {format_memory(here.memory_bytes)}"


def _list_figures(pictures: Sequence[tuple[str, str, Figure]]) -> list[tuple[str, str]]:
    return [(caption, f"{name}.png") for name, caption, _ in pictures]


def _view_batch(run: Run) -> View:
    records = _only(run.records, BatchRecord)
    lines = scaling_tables.mark_knee(records)
    table = _table("batch", "batch size on one rank", scaling_tables.batch_table, lines, scaling_tables.batch_row)
    pictures = []
    if any(record.timing is not None for record in records):
        figure = scaling_plots.plot_batches(records, _describe(run))
        pictures.append(("batch", "Throughput and memory by batch size", figure))
    return View([scaling_report.batch_section(records, _list_figures(pictures))], [table], pictures)


def _view_ranks(run: Run) -> View:
    from paceline.records.steps import list_points

    records, sweeps = _only(run.records, StepRecord), _only(run.records, CollectiveRecord)
    points, about = list_points(records), _describe(run)
    several = [record for record in records if record.world_size > 1]
    predicted, assumptions = _predict(run)
    refusal, rates = None, []
    try:
        rates = scaling_tables.list_bandwidths(records, sweeps)
    except MeasurementError as error:
        refusal, sweeps = error, []
    tables = [
        _table(
            "scaling", "ranks", scaling_tables.scale_table, scaling_tables.compare_with_torch(points),
            scaling_tables.scale_row,
        ),
        _table(
            "communication", "compute and communication", scaling_tables.communication_table, several,
            scaling_tables.communication_row,
        ),
        _table(
            "bandwidth", "bandwidth beside its peak", scaling_tables.bandwidth_table, rates,
            scaling_tables.bandwidth_row,
        ),
        _table(
            "predicted", "predicted", predicted_tables.predicted_table,
            predicted_tables.match_predictions(predicted, points), predicted_tables.predicted_row,
        ),
    ]  # fmt: skip
    pictures = []
    for mode, plot in (("weak", scaling_plots.plot_weak), ("strong", scaling_plots.plot_strong)):
        if any(point.record.mode == mode for point in points):
            pictures.append((mode, f"{mode.capitalize()} scaling", plot(points, about, predicted)))
    if several:
        figure = scaling_plots.plot_communication(several, about)
        pictures.append(("communication", "Compute and exposed communication", figure))
    sections = [scaling_report.scaling_section(records, sweeps, _list_figures(pictures))]
    if predicted:
        sections.append(scaling_report.predicted_section(predicted, points))
    return View(sections, [table for table in tables if table.items], pictures, assumptions, refusal)


def _predict(run: Run) -> tuple[list[PredictedPoint], list[str]]:
    """Ranks beyond those at hand from all that was measured; and the largest measured number from half as many, which
    it can be held against. Nothing where no layers were profiled."""
    from paceline.predict.networks import find_networks
    from paceline.predict.scaling import ScalingEvidence, describe_assumptions, simulate_scaling

    if not _only(run.records, LayerProfileRecord):
        return [], []
    settings, networks = ScaleSettings.from_json(run.config), find_networks(run.config["network"])
    most = max(settings.ranks)
    hand = most if settings.job.device == "cuda" else max(run.environment.cores // (settings.job.threads or 1), most)
    asked = [n for n in parse_counts(run.config["predict_ranks"], "--predict-ranks") if n > most]
    points: list[PredictedPoint] = []
    notes: dict[str, None] = {}
    for cell in settings.cells:
        samples = cell.count_samples(settings.job.accumulate or 1)
        ranks = [n for n in asked if cell.mode == "weak" or samples % n == 0]
        for contestant in settings.contestants:
            if contestant.wrapper == "dp":
                continue
            known = ScalingEvidence.sort(
                run.records, contestant.wrapper, contestant.backend, (cell.mode, samples), hand
            )
            points += simulate_scaling(known.calibrated_up_to(most // 2), [most])
            points += simulate_scaling(known, ranks, networks) if ranks else []
            notes |= dict.fromkeys(describe_assumptions(known, networks))
    return points, list(notes)


def _view_large_batch(run: Run) -> View:
    from paceline.records.training import summarize_recipes

    records, noise = _only(run.records, LargeBatchRecord), _only(run.records, NoiseRecord)
    settings, about = LargeBatchSettings.from_json(run.config), _describe(run)
    summaries = summarize_recipes(records)
    largest = max(settings.global_batch_sizes)
    ends = [record for record in records if record.global_batch_size in (largest, settings.base_batch_size)]
    tables = [_table("recipes", "large batches", scaling_tables.recipe_table, summaries, scaling_tables.recipe_row)]
    pictures = []
    if any(summary.accuracy is not None for summary in summaries):
        figure = scaling_plots.plot_accuracy(summaries, about)
        pictures.append(("accuracy", "Test accuracy by global batch size", figure))
    if any(record.curve for record in ends):
        pictures.append(("curves", "Test accuracy on the way", scaling_plots.plot_curves(ends, about)))
    told: list[str] = []
    if noise:
        title = "gradient noise of the baseline"
        tables.append(_table("noise", title, noise_tables.noise_table, noise, noise_tables.noise_row))
        figure = noise_tables.plot_noise(noise, "Gradient noise scale of the baseline", about)
        pictures.append(("noise", "Gradient noise scale of the baseline", figure))
        told = [line.rstrip(".") for line in noise_tables.describe_noise(noise, largest)]
    section = scaling_report.recipe_section(records, _list_figures(pictures))
    section = dataclasses.replace(section, findings=[*section.findings, *told])
    return View([section], tables, pictures)
