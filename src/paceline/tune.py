"""Measure, predict, confirm, plan: which buckets are best for a training job on these ranks.

One tuning, top to bottom. What is measured is in `measure.tuning`, the model in `predict`, the words in `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.measure.tune_settings import TuneSettings
from paceline.plan import Gradient, Plan
from paceline.predict.predictor import Choice, Evidence, GridPoint, Judgement, Predictor, judge
from paceline.predict.search import choose_caps
from paceline.records import Record, StepRecord
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.measure.tuning import Candidate

__all__ = ["Tuning", "find_plan", "judge_tuning", "run_tuning"]

RECOMMENDED = "recommended"


@dataclass(frozen=True)
class Tuning:
    """All of it: the records, the model fitted to those that may calibrate it, what it chose, and how right it was."""

    records: tuple[Record, ...]
    model: Predictor
    choice: Choice
    default_plan: Plan
    recommended_plan: Plan
    judgement: Judgement

    @property
    def keeps_default(self) -> bool:
        """Whether the default is the answer: nothing better was predicted, or what was did not prove better."""
        gain = self.judgement.gain
        if gain is None:
            return self.choice.is_default or self.judgement.is_flat
        return not (gain.is_clear and gain.value < 1)

    @property
    def is_of_torch(self) -> bool:
        return any(isinstance(record, StepRecord) and record.wrapper == "torch" for record in self.records)

    @property
    def plan(self) -> Plan:
        """The answer."""
        return self.default_plan if self.keeps_default else self.recommended_plan


def find_plan(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan
) -> tuple[Predictor, Choice, Plan]:
    """The plan that the model recommends, from the records that may calibrate it. Pure."""
    model = Predictor(Evidence.sort(records), settings.build_curve())
    choice = model.choose(model.cut_like(default_plan.bucket_bytes), only_caps=not settings.takes_lists)
    if choice.is_default:
        return model, choice, default_plan
    what = f"cap {format_bytes(choice.cap_bytes)}" if choice.cap_bytes else "free"
    plan = model.build_plan(gradients, choice.estimate.cuts, f"tuned: {what}")
    if settings.wrapper == "torch":
        plan.as_torch_kwargs()  # refuses what torch's rule cannot make, before anything is confirmed
    return model, choice, plan


def run_tuning(settings: TuneSettings) -> tuple[list[Record], tuple[Gradient, ...], Plan]:
    """Measure on all ranks, choose on rank 0, confirm on all; the records, the gradients and the default plan.

    Collective: every rank of the launched world must call this.
    """
    from paceline.measure.steps import TrainingJob
    from paceline.measure.tuning import TuningBench
    from paceline.runtime.session import Progress
    from paceline.runtime.worker import post
    from paceline.training.build import build_job, open_world

    assert settings.job is not None
    with open_world(settings.job) as world:

        def tell(share: float, what: str) -> None:
            if world.rank == 0:
                post(Progress((what == "confirming") + share, 2 if settings.confirms else 1, what))

        assert settings.job is not None
        alone = replace(settings.job, ranks=world.world_size, wrapper="none")
        bench = TuningBench(settings, TrainingJob(build_job(alone, world)), world, tell)
        try:
            records = bench.calibrate()
            default_plan = bench.build_default_plan()
            if not settings.confirms:
                return records, bench.job.gradients, default_plan
            found: list[Candidate] | PacelineError | None = None
            if world.rank == 0:
                try:
                    found = _list_candidates(settings, records, bench.job.gradients, default_plan)
                except PacelineError as error:  # raised on all ranks: the others would wait for the answer
                    found = error
            candidates = world.share(found)[0]
            if isinstance(candidates, PacelineError):
                raise candidates
            records += bench.confirm(candidates)
            return records, bench.job.gradients, default_plan
        finally:
            bench.close()


def _list_candidates(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan
) -> list[Candidate]:
    """What is confirmed in turns: the default, the recommended plan if it is another, and the best cap of the sweep."""
    from paceline.measure.tuning import Candidate

    _, choice, plan = find_plan(settings, records, gradients, default_plan)
    candidates = [Candidate("default")]
    if not choice.is_default:
        candidates.append(Candidate(RECOMMENDED, plan=plan))
    best = _find_best(records)
    if best is not None:
        candidates.append(Candidate(best.label, best.cap_bytes))
    return candidates


def _find_best(records: Sequence[Record]) -> StepRecord | None:
    """The fastest cap of the sweep, to hold the recommended plan against."""
    plans = [record for record in records if isinstance(record, StepRecord) and record.role == "job"]
    return min(plans, key=lambda record: record.timing.median_s, default=None)


def judge_tuning(
    settings: TuneSettings, records: Sequence[Record], gradients: Sequence[Gradient], default_plan: Plan
) -> Tuning:
    """Everything that follows from the records of a tuning. Pure."""
    model, choice, plan = find_plan(settings, records, gradients, default_plan)
    plans = [record for record in records if isinstance(record, StepRecord) and record.role == "job"]
    grid = [record for record in plans if not record.note]
    confirmed = [record for record in plans if record.note]
    if grid:
        points = [GridPoint(r.cap_bytes, model.estimate_cap(r.cap_bytes), model.plain_s, r) for r in grid]
    else:
        caps = settings.caps_bytes or choose_caps(model.job.sizes, settings.effort.num_caps)
        points = [GridPoint(cap, model.estimate_cap(cap), model.plain_s) for cap in caps]
    told = next((record for record in confirmed if record.label == RECOMMENDED), None)
    if told is not None and told.bucket_bytes != plan.bucket_bytes:
        # Judged is what was recommended when it was confirmed, not what would be today.
        estimate = model.estimate(model.cut_like(told.bucket_bytes))
        plan = model.build_plan(gradients, estimate.cuts, "tuned")
        default = model.estimate(model.cut_like(default_plan.bucket_bytes))
        choice = Choice(estimate, 0, False, 1 - estimate.step_s / default.step_s)
    elif told is None and confirmed:
        choice = replace(choice, is_default=True)
    recommended = "default" if choice.is_default else RECOMMENDED
    return Tuning(tuple(records), model, choice, default_plan, plan, judge(points, confirmed, recommended))
