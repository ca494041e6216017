#!/usr/bin/env python
"""Score how well stored tunings predict measured sweeps of bucket sizes and choose a size.

    benchmarks/validate_sizes.py RUN...     # runs of `paceline tune` that measured several bucket sizes

The predictor uses only a run's calibration, never its timed steps. Each variant removes or changes one part of the
model. The excess is the measured step at the size with the smallest predicted step, relative to the best measured one;
R2 scores differences within a run (`score_differences` in `validate_tuning.py`). Emulated networks wait according to
the curve that predicts, so they are listed apart.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from validate_tuning import ABLATIONS, Change, score_differences

from paceline.predict.predictor import Prediction
from paceline.predict.simulate import simulate
from paceline.predict.tuning import Tuning, load_tuning, score_predictions
from paceline.records.store import load_run


def predict(tuning: Tuning, change: Change) -> list[Prediction]:
    """Predict the measured bucket sizes with a variant of the model, and with the full model's intervals."""
    job, costs = change(tuning.model.job, tuning.model.costs)
    points = tuning.measured
    times = (simulate(job, job.cut(point.cap_bytes), costs).step_s for point in points)
    return [replace(point, step_s=step_s) for point, step_s in zip(points, times, strict=True)]


def build_row(name: str, cases: Sequence[Sequence[Prediction]]) -> str:
    points = list(itertools.chain(*cases))
    excesses = [
        min(case, key=lambda point: point.step_s).best_s / min(point.best_s for point in case) - 1 for case in cases
    ]
    scores, r2 = score_predictions(points), score_differences(cases).r2
    bias = statistics.fmean(point.error or 0.0 for point in points)
    cells = [
        name, str(len(points)), f"{scores['mape']:.1%}", f"{scores['max_error']:.1%}", f"{bias:+.1%}",
        f"{scores['coverage']:.0%}", f"{scores['width']:.1%}",
        f"{sum(excess <= 0.02 for excess in excesses)} of {len(cases)}", f"{max(excesses):.1%}",
        "" if r2 is None else f"{r2:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = "sizes | MAPE | largest error | bias | in the 90 % | half-width | chosen size within 2 % | largest excess | R2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    loaded = [(run.config, run.records) for run in map(load_run, parser.parse_args().runs)]
    tunings = [tuning for tuning in itertools.starmap(load_tuning, loaded) if len(tuning.measured) > 1]
    for is_emulated, title in ((False, "measured"), (True, "on emulated networks")):
        found = [tuning for tuning in tunings if bool(tuning.settings.network) == is_emulated]
        if found:
            print(f"\n| {title} | {HEAD} |\n|---|{'--:|' * (HEAD.count('|') + 1)}")
            for name, change in ABLATIONS.items():
                print(build_row(name, [predict(tuning, change) for tuning in found]))


if __name__ == "__main__":
    main()
