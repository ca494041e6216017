"""Large batches: test accuracy by batch size and recipe, the gradient noise scale, and their figures.

What the numbers mean is in `records.training`; the page and the other scaling studies are in `scaling`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from paceline.records import CurvePoint, LargeBatchRecord, NoiseRecord
from paceline.records.samples import group_by
from paceline.records.training import RecipeSummary, summarize_recipes
from paceline.report.plots import build_panels, draw_line, label_values, place_legend
from paceline.report.scaling import StudyResult
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.units import format_number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def spread_columns(name: str, of: str, key: str, render: Callable[[float], str], priority: int) -> list[Column]:
    return [
        Column(name, f"{of}.mean", render, key, priority=priority),
        Column("±", f"{of}.deviation", render, f"{key}_deviation", priority=priority - 1),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


# Accuracies and the gap are fractions of 1, deviations those of a sample; null is what no run finished. Where numbers
# are predicted there is no accuracy, and the gap is one of test losses.
RECIPES = (
    *text_columns("first.model", "first.data"),
    *raw_columns("first.device", "first.precision", "first.world_size", "first.batch_size", "first.largest_batch_size"),
    *raw_columns("first.configuration", baseline_batch_size="baseline.first.global_batch_size"),
    *text_columns("first.budget", is_key=True),
    Column("global batch", "first.global_batch_size", "number", "global_batch_size", is_key=True),
    *text_columns("first.recipe", is_key=True),
    Column("updates", "first.num_updates", "number", "num_updates", priority=2),
    Column("epochs", "first.epochs", lambda v: f"{round(v, 2):g}", "epochs", priority=-1),
    Column("lr", "first.lr", "{:g}".format, "lr", priority=-2),
    *spread_columns("test accuracy (%)", "accuracy", "test_accuracy", _percent, 4),
    Column("gap (points)", lambda s: s.gap if s.accuracy else None, _percent, priority=3),
    Column("gap (test loss)", lambda s: None if s.accuracy else s.gap, "{:.4f}".format, priority=3),
    *raw_columns("gap"),
    *spread_columns("test loss", "test_loss", "test_loss", "{:.4f}".format, -2),
    *spread_columns("train loss", "train_loss", "train_loss", "{:.4f}".format, -2),
    Column("seeds", lambda s: len(s.runs), "number", "num_seeds", priority=-1),
    Column("failed", "num_failed", "number", "num_failed", priority=0),
    Column(None, lambda s: statistics.fmean(r.seconds for r in s.finished) if s.finished else None, key="run_s"),
    Column("source", lambda s: ", ".join(sorted({run.source for run in s.runs})), key="source"),
)


def say_score(summary: RecipeSummary, value: float) -> str:
    """An accuracy, in percent, or a loss."""
    return f"{100 * value:.1f}" if summary.accuracy else f"{value:.4g}"


def say_gap(summary: RecipeSummary, baseline: str = "the baseline") -> str:
    """How far its score is from the baseline's, and whether that is less than the spread over seeds of either."""
    gap, spreads = summary.gap or 0.0, (summary.score, summary.baseline and summary.baseline.score)
    known = [spread.deviation for spread in spreads if spread and spread.deviation is not None]
    inside = " (less than the spread over seeds)" if known and abs(gap) <= max(known) else ""
    points, worse, better = (" points", "below", "above") if summary.accuracy else ("", "above", "below")
    return f"{say_score(summary, abs(gap))}{points} {worse if gap >= 0 else better} {baseline}{inside}"


def _describe(summary: RecipeSummary) -> str:
    first, score = summary.first, summary.score
    what = f"{first.global_batch_size} {'without a recipe' if first.recipe == 'none' else f'with {first.recipe}'}"
    if score is None:
        return f"{what}: no seed finished ({first.failure})"
    seeds = f"{len(summary.finished)} seeds"
    sure = "one seed" if score.deviation is None else f"± {say_score(summary, score.deviation)}, {seeds}"
    failed = f", {summary.num_failed} of {len(summary.runs)} seeds failed" if summary.num_failed else ""
    gap = "" if summary.gap is None else f", {say_gap(summary)}"
    epochs = round(first.epochs, 2)
    length = f"{format_number_of(first.num_updates, 'update')} in {epochs:g} epoch{'' if epochs == 1 else 's'}"
    mean = f"{say_score(summary, score.mean)} %" if summary.accuracy else f"test loss {say_score(summary, score.mean)}"
    return f"{what}: {mean} ({sure}{failed}){gap}, after {length}"


def describe_recipes(summaries: Sequence[RecipeSummary]) -> list[str]:
    """What each batch size costs without a recipe, and the recipe that does best for it."""
    lines = []
    groups = group_by(summaries, lambda summary: (summary.first.budget, summary.first.global_batch_size))
    for (budget, _), group in groups.items():
        plain = [s for s in group if s.first.recipe == "none"]
        tried = [(s.gap, s) for s in group if s not in plain and s.gap is not None]
        if not plain or plain[0].baseline is None:
            lines += [f"{f'Baseline (the same {budget}): ' if s in plain else ''}{_describe(s)}." for s in group]
            continue
        text, lost = _describe(plain[0]), plain[0].gap
        if tried and (lost is None or lost > 0):
            gap, best = min(tried, key=lambda pair: pair[0])
            text += "; the best recipe" if lost is None or gap < lost else "; no recipe repairs it; the best"
            text += f", {best.first.recipe}: {say_gap(best)}"
            if (num_updates := best.first.num_updates) != plain[0].first.num_updates:
                text += f", after {format_number_of(num_updates, 'update')}"
        lines.append(f"{text}.")
    return lines


def _say_number(value: float) -> str:
    """A number of samples, no finer than it is known."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _say_scale(record: NoiseRecord) -> str:
    interval = record.estimate.interval
    if record.noise_scale is not None:
        return _say_number(record.noise_scale)
    return "" if interval is None else f"> {_say_number(interval[0])}"


def _say_interval(record: NoiseRecord) -> str:
    if record.estimate.interval is None:
        return ""
    low, high = record.estimate.interval
    return f"{_say_number(low)} to {_say_number(high)}" if high < math.inf else f"from {_say_number(low)}"


# The noise scale is null where it is only bounded from below, and its upper end where it has none.
NOISE = (
    *text_columns("model", "data"),
    Column("recipe", "note", key="note"),
    *text_columns("device", "precision"),
    *raw_columns("seed", "small_batch_size", "big_batch_size", "noise_scale"),
    Column("ranks", "world_size", "number", "world_size", priority=-1),
    Column("step", "step", "number", "step", is_key=True),
    Column("epoch", "epoch", "{:.3g}".format, "epoch", is_key=True),
    Column("batches", lambda r: f"{r.small_batch_size}, {r.big_batch_size}", str, priority=-2),
    Column("probes", lambda r: len(r.probes), "number", "num_probes", priority=-2),
    Column("norm(G)^2", "estimate.gradient_square", "{:.3g}".format, "gradient_square", priority=0),
    Column("tr(Sigma)", "estimate.noise_trace", "{:.3g}".format, "noise_trace", priority=0),
    Column("noise scale", _say_scale, str, priority=2),
    Column("90 %", _say_interval, str, priority=1),
    Column(None, lambda r: (r.estimate.interval or (None, None))[0], key="noise_scale_low"),
    Column(None, lambda r: (r.estimate.interval or (None, None))[1], key="noise_scale_high"),
    *text_columns("source"),
)


def describe_noise(records: Sequence[NoiseRecord], size: int) -> list[str]:
    """For each job its first and last noise scales, and what a global batch of this size would cost by it."""
    lines = []
    ordered = sorted(records, key=lambda r: r.step)
    for series in group_by(ordered, lambda r: (r.model, r.data, r.note, r.precision, r.seed)).values():
        last = [record for record in series if record.noise_scale is not None or record is series[0]][-1]
        found = []
        for record in (record for record in series if record in (series[0], last, series[-1])):
            sure = f" (90 %: {_say_interval(record)})" if record.estimate.interval else ""
            lost = "" if record.noise_scale is not None else ", where the gradient is lost in the noise"
            found.append(f"{_say_scale(record) or 'unknown'}{sure} at epoch {record.epoch:.3g}{lost}")
        text = f"{', '.join(filter(None, (last.model, last.note)))}: gradient noise scale {'; '.join(found)}."
        scale, interval = last.noise_scale, last.estimate.interval
        if scale and (interval is None or interval[1] < math.inf):
            why = "far above it save few steps" if size >= 2 * scale else "up to about it cost few more samples"
            cost = f"{1 + size / scale:.1f} times the fewest samples for {1 + scale / size:.1f} times the fewest steps"
            text += f" Batches {why}: at {size}, {cost}."
        lines.append(text)
    return lines


_ACCURACY, _LOSS = "test accuracy (%)", "test loss"


def _read_score(point: CurvePoint) -> float:
    """The number of a curve: test accuracy in percent, or test loss where numbers are predicted."""
    return point.test_loss if point.test_accuracy is None else 100 * point.test_accuracy


def plot_scores(summaries: Sequence[RecipeSummary], subtitle: str) -> Figure:
    """Test accuracy, or loss, against global batch size, a line for each recipe, ± the deviation over seeds; a panel
    for each budget."""
    kept = sorted((s for s in summaries if s.score), key=lambda s: s.first.global_batch_size)
    budgets, recipes = (list(dict.fromkeys(getattr(s.first, n) for s in summaries)) for n in ("budget", "recipe"))
    titles = [f"the same {budget}" for budget in budgets]
    of, unit = (_ACCURACY, 100) if any(s.accuracy for s in kept) else (_LOSS, 1)
    figure, panels = build_panels(titles, f"large batches: {of}", subtitle)
    for axes, budget in zip(panels, budgets, strict=True):
        for number, recipe in enumerate(recipes):
            line = [s for s in kept if (s.first.budget, s.first.recipe) == (budget, recipe)]
            source = ", ".join(dict.fromkeys(run.source for s in line for run in s.runs))
            found = [(s.first.global_batch_size, s.score) for s in line if s.score]
            points = [(x, *(unit * (y.mean + side * (y.deviation or 0.0)) for side in (0, -1, 1))) for x, y in found]
            if points:
                name = "no recipe" if recipe == "none" else f"recipe {recipe}"
                draw_line(axes, number, points, f"{name} ({source})")
        axes.set_xlabel("global batch size", fontsize=9)
        label_values(axes, [s.first.global_batch_size for s in summaries if s.first.budget == budget])
    panels[0].set_ylabel(f"{of}, ± deviation over seeds")
    place_legend(figure, *panels)
    return figure


def plot_curves(records: Sequence[LargeBatchRecord], subtitle: str, title: str = "large batches") -> Figure:
    """Test accuracy, or loss, on the way, against epochs and against updates: the mean over seeds of each cell, with a
    band from the worst to the best seed. Runs that failed are left out."""
    cells = group_by((record for record in records if not record.failure), lambda record: record.cell)
    of = _LOSS if any(p.test_accuracy is None for record in records for p in record.curve) else _ACCURACY
    figure, panels = build_panels(["against epochs", "against updates"], f"{title}: {of} on the way", subtitle)
    for number, ((budget, size, recipe), runs) in enumerate(cells.items()):
        seeds_of = format_number_of(len(runs), "seed")
        name = recipe if title != "large batches" else "no recipe" if recipe == "none" else f"recipe {recipe}"
        label = f"{name} at {size:,}, same {budget} ({runs[0].source}, {seeds_of})"
        first, seeds = runs[0], [{point.update: _read_score(point) for point in run.curve} for run in runs]
        # Wherever every seed was evaluated.
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
    panels[0].set_ylabel(f"{of}, mean, band over seeds")
    place_legend(figure, *panels)
    return figure


class LargeBatchResult(StudyResult):
    """`scale large-batch`: test accuracy, or loss, by global batch size and recipe, and the gradient noise scale."""

    topic = "Large batches"

    def _derive(self) -> None:
        self.runs, self.noise_records = self.only(LargeBatchRecord), self.only(NoiseRecord)
        self.has_losses = any(run.num_classes == 0 for run in self.runs)  # numbers have no accuracy
        self.summaries = summarize_recipes(self.runs)

    def tables(self) -> list[Table]:
        noise = Table("noise", "gradient noise of the baseline", NOISE, self.noise_records)
        return [Table("recipes", "large batches", RECIPES, self.summaries), *([noise] if self.noise_records else [])]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        sizes = {record.global_batch_size for record in self.runs}
        ends = [record for record in self.runs if record.global_batch_size in (min(sizes), max(sizes))]
        drawn: dict[str, Callable[[], Figure]] = {}
        if any(summary.score for summary in self.summaries):
            drawn["loss" if self.has_losses else "accuracy"] = partial(plot_scores, self.summaries, self.machine)
        if any(record.curve and not record.failure for record in ends):
            drawn["curves"] = partial(plot_curves, ends, self.machine)
        return drawn

    @cached_property
    def sentences(self) -> list[str]:  # type: ignore[override]
        """First the largest batch of as many epochs, which is the answer."""
        epochs = [summary for summary in self.summaries if summary.first.budget == "epochs"]
        lines = describe_recipes(sorted(epochs, key=lambda summary: summary.first.global_batch_size))
        others = describe_recipes([s for s in self.summaries if s.first.budget != "epochs"])
        largest = max((record.global_batch_size for record in self.runs), default=1)
        why = "Numbers are predicted and have no accuracy: test losses are compared, and label smoothing is left out."
        noise = describe_noise(self.noise_records, largest)
        return [*lines[-1:], *lines[:-1], *others, *([why] if self.has_losses else []), *noise]
