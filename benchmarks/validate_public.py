#!/usr/bin/env python
"""Score predictions from tables against published sweeps of bucket sizes, which the model was not fitted to.

    benchmarks/validate_public.py [public_bucket_sweeps.csv]

A row of the CSV is one sweep of a transformer in float32 on two GPUs: seconds of forward, backward and the rest of a
step on one rank, all-reduce times and step times as `MB:seconds`. If a source reports only the sum of forward and
backward, a third of it counts as forward. Ready times are proportional to parameter counts. No input comes from the
sweep.

1. Predictions from the tables alone, with the contention assumed for NCCL.
2. The same with the speed of messages during compute, and the width of the intervals, fitted to all other sources, and
   without contention.
3. Predictions fitted to one measured step (`--measured`), for each of the other sizes.
4. The slowdown of the recommended size, compared with the best measured size: of the measured sizes in the recommended
   range the slowest counts, or the nearest if there is none.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.predict.predictor import Prediction
from paceline.predict.search import estimate_caps
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.tables import TABLE_ERROR, TabledJob
from paceline.records import CapTimeRecord, CollectiveRecord, LayerSizeRecord, LayerTimeRecord
from paceline.records.environment import capture_environment
from paceline.records.samples import Summary, group_by
from paceline.records.store import Run
from paceline.report.predictions import CapsResult
from paceline.units import MIB

HERE = capture_environment()
VOCABULARY = 10_000
DEFAULT_BYTES, CLOSE = 25 * MIB, 0.02
RATES = [place / 20 for place in range(6, 21)]  # candidate speeds of messages during compute
NOISES = [place / 500 for place in range(101)]  # candidates for `TABLE_ERROR`
INSIDE_90 = 1.645  # standard deviations to each side
GOALS = (
    ("mean error from the tables", "at most 5 %"),
    ("steps in their 90 % interval", "80 to 95 %"),
    ("recommended sizes within 2 % of the best", "90 %, and none more than 2 % slower"),
)


@dataclass(frozen=True)
class Judged:
    """A measured step and its prediction."""

    source: str
    measured_s: float
    predicted: Prediction

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.measured_s - 1

    @property
    def is_covered(self) -> bool:
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s


class Sweep:
    """One published sweep, as tables for `paceline predict --csv`."""

    def __init__(self, row: dict[str, str]) -> None:
        # Two runs of one author are not independent, so they are held out together.
        self.source, self.name = row["source"].split(" (")[0], f"{row['source']}, {row['case']}"
        self.steps_s = {round(1e6 * megabytes): time_s for megabytes, time_s in _read_pairs(row["steps"])}
        layers, width = int(row["layers"]), int(row["width"])
        block = {"ln1": width, **dict.fromkeys(("q", "k", "v", "o"), width**2), "ln2": width}
        block |= dict.fromkeys(("w1", "w2", "w3"), 4 * width**2)
        names = {"embedding": VOCABULARY * width}
        names |= {f"layer {i} {name}": size for i in range(layers) for name, size in block.items()}
        names |= {"ln_final": width, "head": VOCABULARY * width}
        self.sizes = [LayerSizeRecord(layer=name, num_params=size) for name, size in names.items()]
        share_s = float(row["backward_s"]) / sum(names.values())
        times = {f"{name} grad": size * share_s for name, size in names.items()}
        times |= {"forward": float(row["forward_s"]), "step": float(row["rest_s"])}
        self.times = [LayerTimeRecord(layer=name, timing=Summary(mean_s=time_s)) for name, time_s in times.items()]
        self.messages = [
            CollectiveRecord(
                collective="all_reduce", backend="nccl", device="cuda", world_size=2, num_bytes=round(1e6 * megabytes),
                dtype="float32", op="sum", timing=Summary(mean_s=time_s), source="imported",
            )
            for megabytes, time_s in _read_pairs(row["allreduce"])
        ]  # fmt: skip
        self.alone = TabledJob(self.sizes, self.times, self.messages, untied=True)

    def list_measured(self, known_bytes: Sequence[int]) -> list[CapTimeRecord]:
        return [
            CapTimeRecord(cap_bytes=size, of="step", timing=Summary(mean_s=self.steps_s[size]), source="imported")
            for size in known_bytes
        ]

    def judge(self, *known_bytes: int) -> Iterator[Judged]:
        """Predict the sizes that the job was not fitted to."""
        tabled = TabledJob(self.sizes, self.times, self.messages, self.list_measured(known_bytes), untied=True)
        model = tabled.build_predictor()
        for size, time_s in self.steps_s.items():
            if size not in known_bytes:
                yield Judged(self.source, time_s, model.predict(tabled.job.cut(size)))

    def judge_with(self, costs: MachineCosts) -> list[Judged]:
        """Predict all sizes with these costs, without intervals."""
        job, found = self.alone.job, []
        for size, time_s in self.steps_s.items():
            step_s = simulate(job, job.cut(size), costs).step_s
            found.append(Judged(self.source, time_s, Prediction(step_s=step_s, low_s=step_s, high_s=step_s)))
        return found

    def slow_down(self, message_rate: float) -> MachineCosts:
        """The costs of the tables, with messages that run at this rate while the GPU computes."""
        contention = replace(self.alone.contention, message_rates=(message_rate,))
        return replace(self.alone.costs, contention=contention.spread_over(self.alone.curve))

    def recommend(self, *known_bytes: int) -> int:
        """The measured size that counts for the answer of `paceline predict --csv`."""
        records = (*self.sizes, *self.times, *self.messages, *self.list_measured(known_bytes))
        result = CapsResult(Run("predict csv", {"csv": self.name, "untied": True}, HERE, records))
        low, high = (DEFAULT_BYTES, DEFAULT_BYTES) if result.keeps_default else result.recommended
        if inside := [size for size in self.steps_s if low <= size <= high]:
            return max(inside, key=self.steps_s.__getitem__)
        return self.find_nearest(low, high)

    def find_nearest(self, *targets: int) -> int:
        return min(self.steps_s, key=lambda size: min(abs(math.log(size / target)) for target in targets))

    def find_excess(self, size: int) -> float:
        return self.steps_s[size] / min(self.steps_s.values()) - 1

    def choose_shortest(self, costs: MachineCosts) -> int:
        """The measured size with the shortest prediction."""
        points = estimate_caps(self.alone.job, costs).points
        return min(self.steps_s, key=lambda size: next(p.backward_s for p in points if p.high_bytes >= size))


def is_covered(point: Judged, noise: float) -> bool:
    """Whether the step would be inside the interval if `TABLE_ERROR` were `noise`."""
    found = point.predicted
    end_s = found.high_s if point.error < 0 else found.low_s
    own = abs(math.log(end_s / found.step_s)) ** 2 - (INSIDE_90 * TABLE_ERROR) ** 2
    return abs(math.log1p(point.error)) <= math.sqrt(max(0.0, own) + (INSIDE_90 * noise) ** 2)


def fit_noise(judged: Sequence[Judged]) -> float:
    """The smallest `TABLE_ERROR` for which the intervals cover 90 %."""
    return next(noise for noise in NOISES if statistics.fmean(is_covered(p, noise) for p in judged) >= 0.9)


def print_noises(title: str, judged: Sequence[Judged]) -> None:
    by_source = group_by(judged, lambda point: point.source)
    noises = {source: fit_noise([p for p in judged if p.source != source]) for source in by_source}
    covered = statistics.fmean(is_covered(point, noises[point.source]) for point in judged)
    listed = ", ".join(f"{noise:.1%} without {source}" for source, noise in noises.items())
    fitted = f"table error fitted to the other sources ({listed}; in use {TABLE_ERROR:.1%})"
    print(f"\n{title}: {fitted}: {covered:.0%} covered")


def _read_pairs(text: str) -> list[tuple[float, float]]:
    return [(float(size), float(time_s)) for size, time_s in (pair.split(":") for pair in text.split())]


def find_error(judged: Sequence[Judged]) -> float:
    return statistics.fmean(abs(point.error) for point in judged)


def fit_rate(sweeps: Sequence[Sweep]) -> float:
    """The speed of messages during compute with the smallest mean error, weighting all sources equally."""

    def loss(rate: float) -> float:
        judged = [point for sweep in sweeps for point in sweep.judge_with(sweep.slow_down(rate))]
        return statistics.fmean(map(find_error, group_by(judged, lambda point: point.source).values()))

    return min(RATES, key=loss)


def hold_out(sweeps: Sequence[Sweep]) -> tuple[list[Judged], dict[str, float]]:
    """Predictions for each source with the rate fitted to the others, and these rates."""
    rates = {}
    for source in dict.fromkeys(sweep.source for sweep in sweeps):
        rates[source] = fit_rate([other for other in sweeps if other.source != source])
    return [point for sweep in sweeps for point in sweep.judge_with(sweep.slow_down(rates[sweep.source]))], rates


def print_rows(title: str, judged: Sequence[Judged]) -> None:
    for name, found in ({"all": judged} | group_by(judged, lambda point: point.source)).items():
        errors = [point.error for point in found]
        covered = f"{statistics.fmean(point.is_covered for point in found):.0%}"
        width = statistics.median((p.predicted.high_s - p.predicted.low_s) / 2 / p.predicted.step_s for p in found)
        interval = f"{covered} | {width:.1%}" if width else " | "
        errors_of = f"{find_error(found):.1%} | {statistics.fmean(errors):+.1%}"
        print(f"| {title}: {name} | {len(found)} | {errors_of} | {interval} |")


def print_choices(sweeps: Sequence[Sweep]) -> list[float]:
    """Print the slowdown of each choice among the measured sizes; returns those of the recommendation."""
    ways: dict[str, Callable[[Sweep], int]] = {
        "`predict --csv`": lambda sweep: sweep.recommend(),
        "`predict --csv --measured` at the size nearest to 25 MiB": lambda sweep: sweep.recommend(
            sweep.find_nearest(DEFAULT_BYTES)
        ),
        "the shortest prediction, tables": lambda sweep: sweep.choose_shortest(sweep.alone.costs),
        "the shortest prediction, tables and contention": lambda sweep: sweep.choose_shortest(sweep.alone.slowed),
        "always the size nearest to 25 MiB": lambda sweep: sweep.find_nearest(DEFAULT_BYTES),
    }
    print("\n| chosen by | within 2 % of the best | worst |\n|---|--:|--:|")
    found = {}
    for name, choose in ways.items():
        found[name] = [sweep.find_excess(choose(sweep)) for sweep in sweeps]
        print(f"| {name} | {sum(e <= CLOSE for e in found[name])} of {len(sweeps)} | {max(found[name]):.1%} |")
    return next(iter(found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=Path(__file__).with_name("public_bucket_sweeps.csv"))
    with parser.parse_args().csv.open() as file:
        sweeps = [Sweep(row) for row in csv.DictReader(file)]
    print("| prediction | steps | mean error | bias | in the 90 % | half-width |\n|---|--:|--:|--:|--:|--:|")
    alone = [point for sweep in sweeps for point in sweep.judge()]
    print_rows("from the tables alone", alone)
    held, rates = hold_out(sweeps)
    print_rows("message rate fitted to the other sources", held)
    print_rows("without contention", [point for sweep in sweeps for point in sweep.judge_with(sweep.alone.costs)])
    fitted = [p for s in sweeps for size in s.steps_s for p in s.judge(size)]
    print_rows("fitted to one step", fitted)
    print_noises("from the tables alone", alone)
    print_noises("fitted to one step", fitted)
    used = Contention.assume("cuda", is_on_host=False).message_rates[0]
    print(f"\nmessage rates without each source: {rates}; in use: {used}")
    excesses = print_choices(sweeps)
    error, covered = find_error(alone), statistics.fmean(point.is_covered for point in alone)
    close, most = sum(excess <= CLOSE for excess in excesses), max(excesses)
    results = (
        (f"{error:.1%}", error <= 0.05),
        (f"{covered:.0%}", 0.8 <= covered <= 0.95),
        (f"{close} of {len(sweeps)}, at most {most:.1%}", close >= 0.9 * len(sweeps) and most <= CLOSE),
    )
    print("\n| audit | goal | found | |\n|---|---|--:|---|")
    for (what, goal), (found, is_met) in zip(GOALS, results, strict=True):
        print(f"| {what} | {goal} | {found} | {'met' if is_met else 'missed'} |")


if __name__ == "__main__":
    main()
