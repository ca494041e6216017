"""`paceline scale strategies`: how much accuracy does sending less cost, and how soon does it reach a target?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self, cast

from paceline.errors import refuse
from paceline.options import check_counts
from paceline.predict.strategy_costs import describe_update, list_strategies
from paceline.records import LargeBatchRecord
from paceline.report.plots import Drawings
from paceline.report.table import Column, Table, raw_columns
from paceline.strategy import Strategy
from paceline.studies import training_grid as grid
from paceline.studies.study import run_study
from paceline.studies.training_grid import SeedSummary, TrainingCell
from paceline.training.train_settings import TrainSettings
from paceline.units import format_bytes
from paceline.verbs.jobs import Names, Place, choose_world

_BASELINE, _FULL = "bf16", "dense"
_STRATEGIES = "int8,int4,topk:0.01,powersgd:4"
# Test accuracy above which strategies are indistinguishable.
_SATURATED = 0.995


def strategies(
    model: str | None = None, strategies: Names | None = None, *, workers: int | None = None, ranks: int | None = None,
    seeds: int = 3, epochs: int | None = None, lr: float = 0.02, schedule: str | None = None, evaluations: int = 6,
    target: float | None = None, at_once: int | None = None, out: Place = None, resume: Place = None,
    progress: bool | None = None, **job: Any,
) -> StrategiesResult:  # fmt: skip
    """How much test accuracy does sending less cost? Trains the same job with each strategy and several seeds.

    The other arguments are those of `large_batch`.

    Args:
        model: By default a small cnn, on synthetic images too noisy for perfect accuracy.
        strategies: "all", or a list such as "int8,powersgd:4". float32 (`dense`) and `bf16` are always included.
        workers: Number of replicas in one process that exchange data as ranks would. Default: 4.
        ranks: Number of ranks to run the job on instead, which makes its times meaningful.
        epochs: 6 by default, unless `steps` are given.
        target: A test accuracy (0 to 1), or a test loss; reports when each strategy reaches it.
    """
    return cast("StrategiesResult", run_study(StrategiesSettings, locals()))


@dataclass(frozen=True, kw_only=True)
class StrategiesSettings(grid.GridSettings):
    """The job with every strategy. `target` is a test accuracy (in regression, a test loss); the study reports each
    strategy's time to reach it."""

    verb = staticmethod(strategies)

    strategies: tuple[str, ...]
    target: float | None = None

    @classmethod
    def build(
        cls, *, model: str | None, strategies: Names | None, workers: int | None, ranks: int | None, seeds: int,
        epochs: int | None, evaluations: int, target: float | None, **job: Any,
    ) -> Self:  # fmt: skip
        check_counts(seeds=seeds, workers=workers)
        both = f"--steps {job.get('steps')} with --epochs {epochs}: a run has only one length; leave one out"
        refuse(("steps" in job and epochs is not None, both))
        job = grid.choose_small_job(model, job)
        if "steps" not in job:
            job["epochs"] = 6 if epochs is None else epochs
        if model is None:
            job.setdefault("data", "synthetic:noisy")
        if job.get("data", "synthetic").startswith("synthetic"):
            job.setdefault("samples", 1024)
        if workers is None:
            workers = 4 if ranks is None else 1
        count = 1 if ranks is None else choose_world(ranks, 1)
        train = TrainSettings(model=model or "cnn", ranks=count, workers=workers, **job)
        names = list_strategies(_STRATEGIES if strategies is None else strategies, can_shard=train.workers == 1)
        return cls(
            job=train,
            strategies=tuple(strategy.text for strategy in names),
            evaluations=evaluations,
            target=target,
            seeds=tuple(train.seed + number for number in range(seeds)),
        )

    def check(self) -> None:
        super().check()
        several = max(self.job.ranks, self.job.workers) > 1
        refuse((not several, "one rank and one worker send no messages: use --workers 4, or --ranks"))
        for text in self.strategies:
            replace(self.job, strategy=text).check()

    def list_configurations(self, num_samples: int) -> list[TrainingCell]:
        budget, size = "epochs" if self.job.steps is None else "updates", self.job.batches.global_batch_size
        return [TrainingCell(replace(self.job, strategy=text), budget, text, size) for text in self.strategies]


class StrategiesResult(grid.GridResult):
    """`scale strategies`: each strategy's bytes sent and its test accuracy (or loss) compared with bf16."""

    topic = "Strategies"
    baseline = _BASELINE

    @property
    def target(self) -> float | None:
        found: float | None = self.config.get("target")
        return found

    def find_ratio(self, summary: SeedSummary) -> float | None:
        """The bytes of a float32 all-reduce divided by the bytes that the strategy sends."""
        full = next((s.first.sent_bytes for s in self.summaries if s.first.recipe == _FULL), None)
        sent = summary.first.sent_bytes
        return full / sent if full and sent else None

    def find_seconds(self, summary: SeedSummary) -> float | None:
        """The mean time to the first evaluation that reaches the target; None if a seed never does."""
        found = [self._find_first(run) for run in summary.finished]
        known = [seconds for seconds in found if seconds is not None]
        return statistics.fmean(known) if known and len(known) == len(found) else None

    def _find_first(self, run: LargeBatchRecord) -> float | None:
        assert self.target is not None
        for point in run.curve:
            accuracy = point.test_accuracy
            if point.test_loss <= self.target if accuracy is None else accuracy >= self.target:
                return point.seconds
        return None

    def tables(self) -> list[Table]:
        timed = Column("step (ms)", _find_step_ms, "{:.1f}".format, "step_ms", priority=1)
        target = Column("to target (s)", self.find_seconds, "{:.1f}".format, "target_s", priority=1)
        columns = (
            *grid.JOB_COLUMNS,
            *raw_columns("first.num_workers"),
            Column("strategy", "first.recipe", key="strategy", is_key=True),
            Column("update", lambda s: describe_update(Strategy.parse(s.first.recipe)), key="kind", priority=0),
            Column("sent per step", "first.sent_bytes", format_bytes, "sent_bytes", priority=3),
            Column("fewer bytes", self.find_ratio, lambda v: f"{v:.3g} x", "ratio", priority=2),
            *grid.SCORE_COLUMNS,
            *grid.spread_columns("test loss", "test_loss", "test_loss", "{:.4f}".format, 1),
            *([timed] if any(run.world_size > 1 for run in self.runs) else []),
            *([target] if self.target is not None else []),
            Column("updates", "first.num_updates", "number", "num_updates", priority=-1),
            *grid.RUN_COLUMNS,
        )
        return [Table("strategies", "strategies", columns, self.summaries)]

    def figures(self) -> Drawings:
        drawn: Drawings = {}
        if any(summary.score and summary.first.sent_bytes for summary in self.summaries):
            drawn["strategies"] = partial(
                self._plot_scores,
                lambda s: s.first.sent_bytes or None,
                "bytes sent per rank and step",
                lambda run: "against bytes sent per rank",
                format_bytes,
            )
        return drawn | self.draw_curves(self.runs)

    @cached_property
    def sentences(self) -> list[str]:  # type: ignore[override]
        """The answer comes first: the strategy with the fewest bytes sent and no loss beyond the spread over seeds, or
        why the runs are inconclusive."""
        tried = [s for s in self.summaries if s.gap is not None and s.first.recipe not in (_BASELINE, _FULL)]
        failed = [
            f"{s.first.recipe}: {s.num_failed} of {len(s.runs)} seeds failed ({s.runs[-1].failure})."
            for s in self.summaries
            if s.num_failed
        ]
        return [self._find_obstacle(tried) or self._choose(tried), *map(self._describe, tried), *failed]

    def _choose(self, tried: Sequence[SeedSummary]) -> str:
        if not tried:
            return f"Nothing was compared with {_BASELINE}."
        if good := [s for s in tried if s.gap is not None and s.gap <= (s.widest or 0.0)]:
            best = min(good, key=lambda s: s.first.sent_bytes or 0)
            ratio = self.find_ratio(best)
            fewer = "" if ratio is None else f" with {ratio:.3g} times fewer bytes than float32"
            return f"{best.first.recipe} is as good as {_BASELINE}{fewer}: {grid.describe_gap(best, _BASELINE)}."
        best = min(tried, key=lambda s: s.gap or 0.0)
        gap = grid.describe_gap(best, _BASELINE)
        return f"No strategy is as good as {_BASELINE}; the best is {best.first.recipe}: {gap}."

    def _find_obstacle(self, tried: Sequence[SeedSummary]) -> str:
        """Why these runs are inconclusive, or an empty string."""
        baseline = next((s for s in self.summaries if s.first.recipe == _BASELINE), None)
        if not tried or baseline is None or baseline.score is None:
            return ""
        compared = (baseline, *tried)
        if failed := [run for run in baseline.runs if not run.has_learned]:
            end = failed[0].failure or _describe_end(failed[0])
            count = f"{len(failed)} of {len(baseline.runs)} seeds" if len(baseline.runs) > 1 else "its run"
            why = f"{_BASELINE} itself did not learn ({count}: {end})"
            return f"The comparison is invalid: {why}; try another --lr, or more --epochs."
        if all(s.accuracy is not None and s.accuracy.mean >= _SATURATED for s in compared):
            easy = f"all reach {_SATURATED:.1%} or more, with and without a strategy"
            return f"The job is too easy to compare strategies: {easy}; use harder data, or fewer --samples."
        if any(len(s.finished) < 2 for s in compared):
            best = min(tried, key=lambda s: s.gap or 0.0)
            found = f"the best is {best.first.recipe}, {grid.describe_gap(best, _BASELINE)}"
            return f"One seed is not enough to compare strategies: {found}; pass --seeds 3 or more to see the spread."
        return ""

    def _describe(self, summary: SeedSummary) -> str:
        first = summary.first
        sent = "" if first.sent_bytes is None else f", {format_bytes(first.sent_bytes)} sent per step"
        return f"{first.recipe}: {grid.describe_score(summary, _BASELINE)}{sent}."


def _find_step_ms(summary: SeedSummary) -> float | None:
    steps_s = [run.seconds / run.num_updates for run in summary.finished]
    return 1e3 * statistics.fmean(steps_s) if steps_s else None


def _describe_end(run: LargeBatchRecord) -> str:
    last = run.curve[-1]
    accuracy = f"test accuracy {last.test_accuracy:.1%}, " if last.test_accuracy is not None else ""
    return f"{accuracy}test loss {last.test_loss:.4g}, {run.num_classes} classes"
