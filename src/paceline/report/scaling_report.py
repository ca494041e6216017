"""A scaling study on one page of Markdown: findings first, then tables and pictures, the machine, the definitions.

A section for each sort of study, made from its records alone, so that a page with some of them works. The sentences are
in `scaling_findings`, the pictures in `scaling_plots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.predict.scaling import PredictedPoint
from paceline.records.environment import Environment
from paceline.records.kinds import CollectiveRecord, Record
from paceline.records.steps import ScalePoint, StepRecord, list_points
from paceline.records.training import BatchRecord, LargeBatchRecord, summarize_recipes
from paceline.report import predicted_tables, scaling_findings, scaling_matrices, scaling_tables
from paceline.report.predicted_tables import match_predictions
from paceline.report.tables import render_markdown
from paceline.units import format_memory

__all__ = [
    "Section",
    "batch_section",
    "describe_machine",
    "predicted_section",
    "recipe_section",
    "render_report",
    "scaling_section",
]

Figures = Sequence[tuple[str, str]]

_DEFINITIONS = (
    ("weak scaling", "the samples per rank stay the same; efficiency is T(1) / T(n)"),
    ("strong scaling", "the samples over all ranks stay the same; speed-up is T(1) / T(n), efficiency is that over n"),
    ("speed-up", "samples/s of n ranks over those of one; T(1) is one rank by itself, without a wrapper"),
    ("compute", "the step with communication off"),
    ("exposed", "the step minus the same step with communication off; of step: exposed over compute plus exposed"),
    ("busy", "how long at least one message was under way in a step; overlap is 1 - exposed / busy"),
    ("bandwidth", "busbw = 2(n-1)/n * bytes / t, with the bytes that a rank hands to all-reduce and t = busy"),
    ("peak", "the largest busbw of an all-reduce alone, on the same backend and as many ranks"),
    ("knee", "the smallest batch size with nine tenths of the best samples/s"),
    ("gap", "the mean test accuracy of the baseline (the smallest batch without a recipe) minus this one's, in points"),
    ("±", "of times: half the 95 % interval of the median over paired repetitions; of accuracies: the standard "
     "deviation over seeds"),
    ("measured, emulated, simulated", "timed here; timed here with a slower network played; computed by the model"),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One study: what it found, its tables (caption, Markdown), its pictures (caption, file) and where from."""

    title: str
    findings: Sequence[str]
    tables: Sequence[tuple[str, str]]
    figures: Figures = ()
    sources: Sequence[str] = ("measured",)


def _sources(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.source for record in records))


def _jobs(records: Iterable[BatchRecord | StepRecord | LargeBatchRecord]) -> str:
    return "; ".join(dict.fromkeys(f"{r.model} on {r.data}, {r.precision} on {r.device}" for r in records))


def batch_section(records: Sequence[BatchRecord], figures: Figures = ()) -> Section:
    """One rank at several batch sizes."""
    table = render_markdown(scaling_tables.batch_table, scaling_tables.mark_knee(records))
    return Section(
        f"Batch size on one rank: {_jobs(records)}",
        scaling_findings.describe_batches(records),
        [("Epochs by batch size", table)],
        figures,
        _sources(records),
    )


def scaling_section(
    records: Sequence[StepRecord], collectives: Sequence[CollectiveRecord] = (), figures: Figures = ()
) -> Section:
    """Ranks and wrappers: speed-up, efficiency, communication and bandwidth; MeasurementError where a bandwidth is
    above the peak."""
    points = list_points(records)
    lines = scaling_tables.compare_with_torch(points)
    rates = scaling_tables.list_bandwidths(records, collectives)
    findings = [
        *scaling_findings.describe_stragglers(records),
        *scaling_findings.describe_points(leaders := scaling_findings.pick_leaders(points)),
        *scaling_findings.describe_contests(lines),
        *scaling_findings.describe_limits([p for p in points if p.record.variant in _name_strong(leaders)]),
        *scaling_findings.describe_bandwidths(rates),
    ]
    several = [record for record in records if record.world_size > 1]
    tables = [
        ("Speed-up by batch size and ranks", scaling_matrices.render_speedups(points)),
        ("Compute and exposed communication by ranks and batch size", scaling_matrices.render_communication(several)),
        ("Bandwidth by ranks and batch size", scaling_matrices.render_bandwidths(rates)),
    ]
    for caption, columns, rows in (
        ("Every number of ranks and wrapper", scaling_tables.scale_table, lines),
        ("Where the time of a step goes", scaling_tables.communication_table, several),
        ("What messages use of the peak", scaling_tables.bandwidth_table, rates),
    ):
        tables.append((caption, render_markdown(columns, rows) if rows else ""))
    shown = [(caption, text) for caption, text in tables if text]
    return Section(f"Ranks: {_jobs(records)}", findings, shown, figures, _sources([*records, *collectives]))


def _name_strong(leaders: Sequence[ScalePoint]) -> set[str]:
    return {point.record.variant for point in leaders if point.record.mode == "strong"}


def recipe_section(records: Sequence[LargeBatchRecord], figures: Figures = ()) -> Section:
    """Training runs with large batches."""
    summaries = summarize_recipes(records)
    return Section(
        f"Large batches: {_jobs(records)}",
        scaling_findings.describe_recipes(summaries),
        [("Test accuracy by global batch size and recipe", render_markdown(scaling_tables.recipe_table, summaries))],
        figures,
        _sources(records),
    )


def predicted_section(
    predicted: Sequence[PredictedPoint], points: Sequence[ScalePoint] = (), figures: Figures = ()
) -> Section:
    """Predictions, beside what was measured of them."""
    lines = match_predictions(predicted, points)
    # Of ranks that nobody has, the best contestant of the largest cell of each mode tells enough.
    told = [line for line in lines if _is_leading(line.predicted, predicted)]
    sources = [p.source for p in predicted] + [line.point.record.source for line in lines if line.point]
    return Section(
        "More ranks than at hand",
        [*scaling_findings.describe_errors(lines), *scaling_findings.describe_predictions(told)],
        [("Predicted beside measured", render_markdown(predicted_tables.predicted_table, lines))],
        figures,
        list(dict.fromkeys(sources)),
    )


def _is_leading(one: PredictedPoint, predicted: Sequence[PredictedPoint]) -> bool:
    """Whether it is of the largest cell of its mode, and of the contestant that is best there."""
    beyond = [p for p in predicted if p.network and p.mode == one.mode]
    if not one.network or one.cell_size != max(p.cell_size for p in beyond):
        return False
    rivals = [p for p in beyond if (p.cell_size, p.network) == (one.cell_size, one.network)]
    most = max(p.world_size for p in rivals)
    best = max((p for p in rivals if p.world_size == most), key=lambda p: p.efficiency)
    return one.variant == best.variant


def describe_machine(environment: Environment) -> str:
    """The machine and the software of a run in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    details = ", ".join(f"{name} {value}" for name, value in environment.details.items())
    parts = (
        f"{environment.host}: {environment.cpu}, {environment.cores} cores, {format_memory(environment.memory_bytes)}",
        f"{environment.system}, Python {environment.python}, {versions}",
        details,
        f"`{environment.command_line}`",
        f"commit {environment.git_commit}" if environment.git_commit else "",
    )
    return "; ".join(part for part in parts if part)


def render_report(sections: Sequence[Section], title: str = "Scaling", machines: Sequence[str] = ()) -> str:
    """The page; `machines` are lines of `describe_machine`, one for each run."""
    blocks = [f"# {title}", "## Findings"]
    for section in sections:
        origin = f"Source: {', '.join(section.sources)}."
        findings = section.findings or ["nothing that these records tell"]
        blocks += [f"**{section.title}.** {origin}", "\n".join(f"- {line}." for line in findings)]
    for section in sections:
        blocks += [f"## {section.title}", f"Source: {', '.join(section.sources)}."]
        blocks += [f"![{caption}]({name})" for caption, name in section.figures]
        for caption, table in section.tables:
            blocks += [f"### {caption}", table.strip()]
    if machines:
        blocks += ["## Machine", "\n".join(f"- {line}" for line in dict.fromkeys(machines))]
    blocks += ["## Definitions", "\n".join(f"- *{word}*: {meaning}." for word, meaning in _DEFINITIONS)]
    return "\n\n".join(blocks) + "\n"
