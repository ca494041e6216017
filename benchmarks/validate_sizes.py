#!/usr/bin/env python
"""Score how well stored tunings predict measured sweeps of bucket sizes and choose a size.

    benchmarks/validate_sizes.py RUN...     # runs of `paceline tune` that measured several bucket sizes

The predictor uses only a run's calibration, never its timed steps. Each variant changes one part of the model. The
excess is the measured step at the size with the smallest predicted step, relative to the best measured one; R2 scores
differences within a run (`score_differences` in `validate_tuning.py`).
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from validate_tuning import score_differences

from paceline.predict.curves import MeasuredCurve, smooth_curve
from paceline.predict.predictor import Prediction
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.tuning import Tuning, load_tuning, score_predictions
from paceline.records.store import load_run


def smooth(costs: MachineCosts) -> MachineCosts:
    curve = costs.curve
    if not isinstance(curve, MeasuredCurve):
        return costs
    return replace(costs, curve=smooth_curve(zip(curve.sizes, curve.seconds, strict=True)))


VARIANTS: dict[str, Callable[[MachineCosts], MachineCosts]] = {
    "the model": lambda costs: costs,
    "the line through the sweep": smooth,
    "without contention": lambda costs: replace(costs, contention=Contention()),
    "the line, without contention": lambda costs: replace(smooth(costs), contention=Contention()),
}


def predict(tuning: Tuning, change: Callable[[MachineCosts], MachineCosts]) -> list[Prediction]:
    """Predict the measured bucket sizes with a variant of the model, and with the full model's intervals."""
    job, costs = tuning.model.job, change(tuning.model.costs)
    points = tuning.measured
    times = (simulate(job, job.cut(point.cap_bytes), costs).step_s for point in points)
    return [replace(point, step_s=step_s) for point, step_s in zip(points, times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    loaded = [(run.config, run.records) for run in map(load_run, parser.parse_args().runs)]
    tunings = [tuning for tuning in itertools.starmap(load_tuning, loaded) if len(tuning.measured) > 1]
    head = "variant | sizes | MAPE | bias | in the 90 % | half-width | chosen size within 2 % | largest excess | R2"
    print(f"| {head} |\n|---|{'--:|' * head.count('|')}")
    for name, change in VARIANTS.items():
        cases = [predict(tuning, change) for tuning in tunings]
        points = list(itertools.chain(*cases))
        excesses = [
            min(case, key=lambda point: point.step_s).best_s / min(point.best_s for point in case) - 1 for case in cases
        ]
        scores, r2 = score_predictions(points), score_differences(cases).r2
        bias = statistics.fmean(point.error or 0.0 for point in points)
        cells = [
            name, str(len(points)), f"{scores['mape']:.1%}", f"{bias:+.1%}", f"{scores['coverage']:.0%}",
            f"{scores['width']:.1%}", f"{sum(excess <= 0.02 for excess in excesses)} of {len(cases)}",
            f"{max(excesses):.1%}", "" if r2 is None else f"{r2:.2f}",
        ]  # fmt: skip
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
