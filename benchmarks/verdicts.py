#!/usr/bin/env python
"""Score the verdicts of `paceline tune` in comparisons with a known difference and in complete tunings.

    benchmarks/verdicts.py [--trials N] [--found N] [--tunings N] [--budget S]

Two gloo ranks take steps of a small MLP. In an A/A trial both plans are the same, so every winner is a false positive.
In a trial with a known effect, each step of the default is delayed by 5 % of its duration, so the other plan should
win. A long comparison of the plans of all tunings, in a separate process that neither drops plans nor stops early,
checks each complete tuning (`tune --model mlp --quick --backend gloo`). By its medians, a recommended plan must be
faster than the default and within 1 % of the fastest plan of its tuning; `default` is correct if the default is within
1 % of the fastest; `flat` if all plans are within 1 %. Prints one line for each kind.
"""

from __future__ import annotations

import argparse
import collections
import time
from typing import Any

import paceline
from paceline.measure.job_profile import open_job
from paceline.measure.plan_bench import _Variants
from paceline.measure.step_bench import Variant
from paceline.plan import Plan, plan_like_torch
from paceline.predict.predictor import Prediction
from paceline.predict.race import Race, judge_race
from paceline.predict.tuning import DEFAULT, TuneSettings
from paceline.records import StepRecord
from paceline.report.predictions import TuneResult
from paceline.training.train_settings import TrainSettings

TWIN = "twin"
Trial = tuple[float, str, int, float, float, bool]


class Trials(_Variants):
    """Compare the default plan with itself, delayed by a known fraction."""

    effect = 0.0

    def _add(self, role: str, label: str, *rest: Any, **more: Any) -> Variant:
        variant = super()._add(role, label, *rest, **more)
        run, effect = variant.replica.run, self.effect
        if label == DEFAULT and effect:

            def run_and_wait(given: Any, phases: Any) -> None:
                begin_s = time.perf_counter()
                run(given, phases)
                until_s = time.perf_counter() + effect * (time.perf_counter() - begin_s)
                while time.perf_counter() < until_s:
                    pass

            variant.replica.run = run_and_wait
        return variant

    def race(self, plan: Plan) -> tuple[Race, float]:
        begin_s = time.perf_counter()
        records = self.confirm([build_candidate(name, plan) for name in (DEFAULT, TWIN)])
        steps = {r.label: r.turns_s for r in records if isinstance(r, StepRecord)}
        return judge_race(steps, DEFAULT), time.perf_counter() - begin_s


def build_candidate(name: str, plan: Plan) -> Prediction:
    """Build a candidate without a prediction."""
    return Prediction(step_s=0.0, low_s=0.0, high_s=0.0, label=name, plan=plan)


def run_trials(effects: list[float], budget_s: float) -> list[Trial]:
    """Run the trials. Returns each trial's effect, verdict, rounds, seconds, measured ratio, and whether the ratio
    differs significantly from 1; the same on every rank."""
    settings = TrainSettings(model="mlp", ranks=2, batch_size=4, backend="gloo")
    found = []
    with open_job(settings, is_bare=True) as (world, job):
        trials = Trials(TuneSettings(race_s=budget_s), job, world)
        try:
            plan = plan_like_torch(trials.gradients, range(len(trials.gradients))[::-1])
            trials._step_s = 1.0  # one step per turn, to measure its duration
            trials._settings = TuneSettings(race_s=1.0)
            records = trials.confirm([build_candidate(DEFAULT, plan)])
            trials._step_s = records[0].timing.median_s
            trials._settings = TuneSettings(race_s=budget_s)
            for number, trials.effect in enumerate(effects):
                race, took_s = trials.race(plan)
                ratio = race.to_default[TWIN]
                found.append((trials.effect, race.verdict, race.num_rounds, took_s, ratio.value, ratio.is_clear))
                if world.rank == 0 and number % 20 == 19:
                    print(f"  {number + 1} of {len(effects)} trials", flush=True)
        finally:
            trials.close()
    return found


def describe(name: str, found: list[Trial]) -> None:
    counts = collections.Counter(verdict for _, verdict, *_ in found)
    times_s, ratios = sorted(one[3] for one in found), sorted(one[4] for one in found)
    middle, listed = len(found) // 2, ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())
    print(
        f"{name}: {len(found)} trials: {listed}; {sum(one[5] for one in found)} with a significant difference; "
        f"{times_s[middle]:.1f} s each (median; at most {times_s[-1]:.1f}); "
        f"the other plan over the default: median {ratios[middle]:.4f}, from {ratios[0]:.4f} to {ratios[-1]:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="A/A trials")
    parser.add_argument("--found", type=int, default=40, help="number of trials with an effect of 5 %%")
    parser.add_argument("--tunings", type=int, default=10, help="whole tunings")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per A/A trial (60 with an effect)")
    asked = parser.parse_args()
    if asked.trials:
        describe("A/A", run_ranks([0.0] * asked.trials, asked.budget))
    if asked.found:
        describe("5 % less", run_ranks([0.05] * asked.found, 60.0))
    if asked.tunings:
        derive_tunings(asked.tunings)


def run_ranks(effects: list[float], budget_s: float) -> list[Trial]:
    return paceline.run_ranks(run_trials, 2, (effects, budget_s))[0]


def race_long(plans: dict[str, Plan], budget_s: float) -> dict[tuple[int, ...], float]:
    """Measure each plan's median ratio to the default, keyed by buckets, in a comparison that uses the whole budget."""
    settings = TrainSettings(model="mlp", ranks=2, batch_size=4, backend="gloo")
    with open_job(settings, is_bare=True) as (world, job):
        trials = Trials(TuneSettings(race_s=budget_s), job, world)
        try:
            trials._step_s = 1.0  # one step per turn
            records = trials.confirm([build_candidate(*one) for one in plans.items()], stops=False)
        finally:
            trials.close()
    race = judge_race({record.label: record.turns_s for record in records}, DEFAULT)
    return {record.bucket_bytes: race.to_default[record.label].value for record in records}


def derive_tunings(count: int) -> None:
    results: list[TuneResult] = [
        paceline.tune("mlp", ranks=2, backend="gloo", quick=True, progress=False) for _ in range(count)
    ]
    plans: dict[str, Plan] = {}
    for row in (row for result in results for row in result.rows):
        if row.candidate.plan.bucket_bytes not in {plan.bucket_bytes for plan in plans.values()}:
            plans[DEFAULT if not plans else f"plan {len(plans)}"] = row.candidate.plan
    truth = paceline.run_ranks(race_long, 2, (plans, 120.0))[0]
    print(f"all plans: {', '.join(f'{len(sizes)} buckets {ratio:.4f}' for sizes, ratio in truth.items())}", flush=True)
    counts = collections.Counter[str]()
    for number, result in enumerate(results, 1):
        own = [truth[row.record.bucket_bytes] for row in result.rows]
        chosen = next(truth[row.record.bucket_bytes] for row in result.rows if row.status in ("use", "keep"))
        is_right = {
            "use": chosen < 1 and chosen <= 1.01 * min(own),
            "default": min(own) >= 0.99,
            "flat": min(own) >= 0.99 and max(own) <= 1.01,
        }
        said = "undecided" if result.verdict == "undecided" else "right" if is_right[result.verdict] else "wrong"
        counts[said] += 1
        print(f"tuning {number}: {said}: {result.answer}", flush=True)
    print(f"{count} tunings: {', '.join(f'{said} {times}' for said, times in counts.most_common())}")


if __name__ == "__main__":
    main()
