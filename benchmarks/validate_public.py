#!/usr/bin/env python
"""Score predictions from tables against published sweeps of bucket sizes, which the model was not fitted to.

    benchmarks/validate_public.py [public_bucket_sweeps.csv]

A row of the CSV is one sweep of a transformer with 48 layers of width 1600 (7.99 GB of float32 gradients in 435
tensors) on two GPUs: seconds of forward, backward and the rest of a step on one rank, all-reduce times and step times
as `MB:seconds`. If a source reports only the sum of forward and backward, a third of it counts as forward. Ready times
are proportional to parameter counts. No input comes from the sweep.

1. Predictions from the tables alone, with the contention assumed for NCCL.
2. Predictions fitted to one measured step (`--measured`), for each of the other sizes.
3. The slowdown of the size with the shortest prediction, compared with the best measured size.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.predict.predictor import Prediction
from paceline.predict.search import estimate_caps
from paceline.predict.tables import TabledJob
from paceline.records import CapTimeRecord, CollectiveRecord, LayerSizeRecord, LayerTimeRecord
from paceline.records.samples import Summary
from paceline.units import MIB

LAYERS, WIDTH, VOCABULARY = 48, 1600, 10_000
BLOCK = {
    "ln1": WIDTH, **dict.fromkeys(("q", "k", "v", "o"), WIDTH**2), "ln2": WIDTH,
    **dict.fromkeys(("w1", "w2", "w3"), 4 * WIDTH**2),
}  # fmt: skip
DEFAULT_BYTES, CLOSE = 25 * MIB, 0.02


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
        self.source, self.name = row["source"], f"{row['source']}, {row['case']}"
        self.steps_s = {round(1e6 * megabytes): time_s for megabytes, time_s in _read_pairs(row["steps"])}
        names = {"embedding": VOCABULARY * WIDTH}
        names |= {f"layer {i} {name}": size for i in range(LAYERS) for name, size in BLOCK.items()}
        names |= {"ln_final": WIDTH, "head": VOCABULARY * WIDTH}
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

    def build(self, *known_bytes: int) -> TabledJob:
        """Build the job, fitted to the steps with these bucket sizes."""
        measured = [
            CapTimeRecord(cap_bytes=size, of="step", timing=Summary(mean_s=self.steps_s[size]), source="imported")
            for size in known_bytes
        ]
        return TabledJob(self.sizes, self.times, self.messages, measured, untied=True)

    def judge(self, *known_bytes: int) -> Iterator[Judged]:
        """Predict the sizes that the job was not fitted to."""
        tabled = self.build(*known_bytes)
        model = tabled.build_predictor()
        for size, time_s in self.steps_s.items():
            if size not in known_bytes:
                yield Judged(self.source, time_s, model.predict(tabled.job.cut(size)))


def _read_pairs(text: str) -> list[tuple[float, float]]:
    return [(float(size), float(time_s)) for size, time_s in (pair.split(":") for pair in text.split())]


def print_rows(title: str, judged: Sequence[Judged]) -> None:
    for name in ("all", *dict.fromkeys(point.source for point in judged)):
        found = [point for point in judged if name in ("all", point.source)]
        errors = [point.error for point in found]
        covered = statistics.fmean(point.is_covered for point in found)
        width = statistics.median((p.predicted.high_s - p.predicted.low_s) / 2 / p.predicted.step_s for p in found)
        error, bias = statistics.fmean(map(abs, errors)), statistics.fmean(errors)
        print(f"| {title}: {name} | {len(found)} | {error:.1%} | {bias:+.1%} | {covered:.0%} | {width:.1%} |")


def print_choices(sweeps: Sequence[Sweep]) -> None:
    """Print the slowdown of each choice among the measured sizes, compared with the best one."""
    print("\n| chosen by | within 2 % of the best | worst |\n|---|--:|--:|")
    ways: dict[str, list[float]] = {}
    for sweep in sweeps:
        tabled, best_s = sweep.build(), min(sweep.steps_s.values())
        for name, costs in (("the tables", tabled.costs), ("the tables and contention", tabled.slowed)):
            points = estimate_caps(tabled.job, costs).points
            predicted = {b: next(p.backward_s for p in points if p.high_bytes >= b) for b in sweep.steps_s}
            found = min(predicted, key=lambda size: predicted[size])
            ways.setdefault(name, []).append(sweep.steps_s[found] / best_s - 1)
        near = min(sweep.steps_s, key=lambda size: abs(size - DEFAULT_BYTES))
        ways.setdefault(f"nearest to {DEFAULT_BYTES // MIB} MiB", []).append(sweep.steps_s[near] / best_s - 1)
    for name, excesses in ways.items():
        print(f"| {name} | {sum(e <= CLOSE for e in excesses)} of {len(excesses)} | {max(excesses):.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=Path(__file__).with_name("public_bucket_sweeps.csv"))
    with parser.parse_args().csv.open() as file:
        sweeps = [Sweep(row) for row in csv.DictReader(file)]
    print("| prediction | steps | mean error | bias | in the 90 % | half-width |\n|---|--:|--:|--:|--:|--:|")
    print_rows("from the tables alone", [point for sweep in sweeps for point in sweep.judge()])
    print_rows("fitted to one step", [p for s in sweeps for size in s.steps_s for p in s.judge(size)])
    print_choices(sweeps)


if __name__ == "__main__":
    main()
