"""Strategies: test accuracy by what is sent, and when a target is reached."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from paceline.predict.strategies import describe_update
from paceline.records import LargeBatchRecord
from paceline.records.training import RecipeSummary, summarize_recipes
from paceline.report.large_batch import plot_curves, say_gap, say_score, spread_columns
from paceline.report.plots import build_panels, place_legend
from paceline.report.scaling import StudyResult
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.strategy import Strategy
from paceline.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BASELINE, _FULL = "bf16", "dense"
# From this test accuracy on there is no room for a difference.
_SATURATED = 0.995


def _say_kind(summary: RecipeSummary) -> str:
    return describe_update(Strategy.parse(summary.first.recipe))


class StrategiesResult(StudyResult):
    """`scale strategies`: test accuracy, or loss, of each strategy, compared with bf16, and the bytes it sends."""

    topic = "Strategies"

    def _derive(self) -> None:
        self.runs = self.only(LargeBatchRecord)
        self.summaries = summarize_recipes(self.runs, _BASELINE)
        self.target: float | None = self.run.config.get("target")
        self.on_ranks = any(run.world_size > 1 for run in self.runs)

    def find_ratio(self, summary: RecipeSummary) -> float | None:
        """How many times fewer bytes than the all-reduce of float32 it sends."""
        full = next((s.first.sent_bytes for s in self.summaries if s.first.recipe == _FULL), None)
        sent = summary.first.sent_bytes
        return full / sent if full and sent else None

    def find_seconds(self, summary: RecipeSummary) -> float | None:
        """The mean time until the target is reached, by the first evaluation that has it; None where a seed never
        does."""
        if self.target is None or not summary.finished:
            return None
        found = []
        for run in summary.finished:
            reached = [point for point in run.curve if self._is_reached(point.test_accuracy, point.test_loss)]
            if not reached or reached[0].seconds is None:
                return None
            found.append(reached[0].seconds)
        return statistics.fmean(found)

    def _is_reached(self, accuracy: float | None, loss: float) -> bool:
        assert self.target is not None
        return loss <= self.target if accuracy is None else accuracy >= self.target

    def tables(self) -> list[Table]:
        timed = [
            Column("step (ms)", lambda s: 1e3 * statistics.fmean(r.seconds / r.num_updates for r in s.finished)
                   if s.finished else None, "{:.1f}".format, "step_ms", priority=1),
        ] if self.on_ranks else []  # fmt: skip
        target = [Column("to target (s)", self.find_seconds, "{:.1f}".format, "target_s", priority=1)]
        columns = (
            *text_columns("first.model", "first.data"),
            *raw_columns("first.device", "first.precision", "first.world_size", "first.num_workers"),
            Column("strategy", "first.recipe", key="strategy", is_key=True),
            Column("update", _say_kind, key="kind", priority=0),
            Column("sent per step", "first.sent_bytes", format_bytes, "sent_bytes", priority=3),
            Column("fewer bytes", self.find_ratio, lambda v: f"{v:.3g} x", "ratio", priority=2),
            *spread_columns("test accuracy (%)", "accuracy", "test_accuracy", lambda v: f"{100 * v:.2f}", 4),
            *spread_columns("test loss", "test_loss", "test_loss", "{:.4f}".format, 1),
            Column("gap (points)", lambda s: s.gap if s.accuracy else None, lambda v: f"{100 * v:.2f}", priority=3),
            Column("gap (test loss)", lambda s: None if s.accuracy else s.gap, "{:.4f}".format, priority=3),
            *raw_columns("gap"),
            *timed, *(target if self.target is not None else []),
            Column("updates", "first.num_updates", "number", "num_updates", priority=-1),
            Column("seeds", lambda s: len(s.runs), "number", "num_seeds", priority=-1),
            Column("failed", "num_failed", "number", "num_failed", priority=0),
            Column("source", lambda s: ", ".join(sorted({run.source for run in s.runs})), key="source"),
        )  # fmt: skip
        return [Table("strategies", "strategies", columns, self.summaries)]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        drawn: dict[str, Callable[[], Figure]] = {}
        if any(summary.score for summary in self.summaries):
            drawn["strategies"] = partial(plot_strategies, self.summaries, self.machine)
        if any(run.curve and not run.failure for run in self.runs):
            drawn["curves"] = partial(plot_curves, self.runs, self.machine, "strategies")
        return drawn

    @cached_property
    def sentences(self) -> list[str]:  # type: ignore[override]
        """First the strategy that sends least without a loss beyond the spread over seeds, which is the answer; or why
        the runs do not tell."""
        tried = [s for s in self.summaries if s.gap is not None and s.first.recipe not in (_BASELINE, _FULL)]
        lines = [self._describe(summary) for summary in tried]
        good = [s for s in tried if s.gap is not None and s.gap <= _spread(s)]
        if doubt := self._find_doubt(tried):
            first = doubt
        elif good:
            best = min(good, key=lambda s: s.first.sent_bytes or 0)
            ratio = self.find_ratio(best)
            fewer = "" if ratio is None else f" with {ratio:.3g} times fewer bytes than float32"
            first = f"{best.first.recipe} is as good as {_BASELINE}{fewer}: {say_gap(best, _BASELINE)}."
        elif tried:
            best = min(tried, key=lambda s: s.gap or 0.0)
            first = (
                f"No strategy is as good as {_BASELINE}; the best is {best.first.recipe}: {say_gap(best, _BASELINE)}."
            )
        else:
            first = f"Nothing was compared with {_BASELINE}."
        failed = [
            f"{s.first.recipe}: {s.num_failed} of {len(s.runs)} seeds failed ({s.runs[-1].failure})."
            for s in self.summaries
            if s.num_failed
        ]
        return [first, *lines, *failed]

    def _find_doubt(self, tried: Sequence[RecipeSummary]) -> str:
        """Why these runs do not tell strategies apart; empty where they do."""
        baseline = next((s for s in self.summaries if s.first.recipe == _BASELINE), None)
        if not tried or baseline is None or baseline.score is None:
            return ""
        compared = (baseline, *tried)
        if failed := [run for run in baseline.runs if not run.has_learned]:
            end = failed[0].failure or _say_end(failed[0])
            count = f"{len(failed)} of {len(baseline.runs)} seeds" if len(baseline.runs) > 1 else "its run"
            why = f"{_BASELINE} itself has not learned ({count}: {end})"
            return f"Nothing can be compared: {why}; try another --lr, or more --epochs."
        if all(s.accuracy is not None and s.accuracy.mean >= _SATURATED for s in compared):
            easy = f"all reach {_SATURATED:.1%} or more, with and without a strategy"
            return f"The job is too easy to tell strategies apart: {easy}; use harder data, or fewer --samples."
        if any(len(s.finished) < 2 for s in compared):
            best = min(tried, key=lambda s: s.gap or 0.0)
            found = f"the best is {best.first.recipe}, {say_gap(best, _BASELINE)}"
            return f"One seed does not tell strategies apart: {found}; give --seeds 3 or more to see the spread."
        return ""

    def _describe(self, summary: RecipeSummary) -> str:
        score, first = summary.score, summary.first
        assert score is not None
        sure = "one seed" if score.deviation is None else f"± {say_score(summary, score.deviation)}"
        mean = f"{say_score(summary, score.mean)}{' %' if summary.accuracy else ''}"
        sent = "" if first.sent_bytes is None else f", {format_bytes(first.sent_bytes)} sent in a step"
        return f"{first.recipe}: {mean} ({sure}), {say_gap(summary, _BASELINE)}{sent}."


def _say_end(run: LargeBatchRecord) -> str:
    last = run.curve[-1]
    accuracy = f"test accuracy {last.test_accuracy:.1%}, " if last.test_accuracy is not None else ""
    return f"{accuracy}test loss {last.test_loss:.4g}, {run.num_classes} classes"


def _spread(summary: RecipeSummary) -> float:
    """The larger of the deviations over seeds, of it and of the baseline."""
    known = [s.score.deviation or 0.0 for s in (summary, summary.baseline) if s and s.score]
    return max(known, default=0.0)


def plot_strategies(summaries: Sequence[RecipeSummary], subtitle: str) -> Figure:
    """Test accuracy, or loss, against the bytes that a rank sends in a step, ± the deviation over seeds."""
    kept = [s for s in summaries if s.score and s.first.sent_bytes]
    of, unit = ("test accuracy (%)", 100) if any(s.accuracy for s in kept) else ("test loss", 1)
    figure, (axes,) = build_panels(["against what a rank sends"], f"strategies: {of}", subtitle)
    for number, summary in enumerate(kept):
        score = summary.score
        assert score is not None and summary.first.sent_bytes is not None
        y, spread = unit * score.mean, unit * (score.deviation or 0.0)
        label = f"{summary.first.recipe} ({summary.first.source})"
        axes.errorbar(
            [summary.first.sent_bytes], [y], yerr=[spread], fmt="o", capsize=3, color=f"C{number}", label=label
        )
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a rank sends in a step", fontsize=9)
    axes.set_ylabel(f"{of}, ± deviation over seeds")
    place_legend(figure, axes)
    return figure
