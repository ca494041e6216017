#!/usr/bin/env python
"""Predict the cells of stored `paceline scale ranks` studies from half as many ranks.

    benchmarks/validate_ranks.py RUN... [--out FILE]

For each combination of wrapper, backend, cell and rank count with a measurement on half as many ranks, predicts the
step from at most half the ranks, with and without steps of all ranks without messages. If a study lacks such steps,
uses the wrappers' steps with communication off instead. Measures nothing, and never uses the held-out steps with
messages or their sweeps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import load_result
from paceline.errors import PacelineError
from paceline.predict.predictor import Prediction
from paceline.predict.scaling import ScalingEvidence, simulate_scaling
from paceline.records import Record, StepRecord
from paceline.records.samples import group_by
from paceline.report.table import Column, Table
from paceline.studies.rank_scaling import RanksResult, match_predictions

CLOSE = 0.10


@dataclass(frozen=True)
class HeldOut:
    """One cell and its predicted steps, without and with message-free steps at the same number of ranks."""

    study: str
    without: Prediction
    silent: Prediction


def lend_together(records: list[Record]) -> list[Record]:
    """Substitute wrappers' steps without communication for missing bare-model steps on several ranks."""
    steps = [r for r in records if isinstance(r, StepRecord) and r.mode and r.world_size > 1]
    if any(record.role == "together" for record in steps):
        return []
    lent: list[Record] = []
    for group in group_by((r for r in steps if r.no_comm), lambda r: (r.cell, r.world_size)).values():
        samples = [record.no_comm for record in group if record.no_comm is not None]
        middle = sorted(samples, key=lambda one: one.median_s)[len(samples) // 2]
        silent = {name: None for name in ("marked", "no_comm", "no_comm_backward", "busy")}
        lent.append(replace(group[0], role="together", wrapper="none", timing=middle, bucket_bytes=(), **silent))
    return lent


def judge(path: Path) -> Iterator[HeldOut]:
    result = load_result(path)
    assert isinstance(result, RanksResult), f"{path} is not a run of `paceline scale ranks`"
    records = list(result.records)
    bare = [r for r in records if getattr(r, "role", "") != "together"]
    all_records = [*records, *lend_together(records)]
    counts = sorted({record.world_size for record in result.steps})
    first = result.several[0]
    at_hand = counts[-1] if first.device == "cuda" else max(result.run.environment.cores // first.threads, counts[-1])
    for mode, size, wrapper, backend in dict.fromkeys((*r.cell, r.wrapper, r.backend) for r in result.several):
        for count in (n for n in counts if n > 1 and n % 2 == 0 and n // 2 in counts):
            if wrapper == "dp":
                continue
            try:
                points = [
                    simulate_scaling(
                        ScalingEvidence(known, wrapper, backend, (mode, size), at_hand, count // 2), [count]
                    )
                    for known in (bare, all_records)
                ]
            except PacelineError as error:
                print(f"{path.name}: {mode} {size}, {wrapper} on {backend}, {count} ranks: {error}")
                continue
            found = [match_predictions(one, result.points)[0] for one in points]
            if found[0].error is not None:
                yield HeldOut(path.parent.name, *found)


COLUMNS = (
    Column("study", "study", is_key=True),
    Column("cell", lambda h: f"{h.silent.mode} {h.silent.cell_size}", is_key=True),
    Column("wrapper", "silent.label", is_key=True),
    Column("from", lambda h: h.silent.world_size // 2, "number", "from_ranks"),
    Column("ranks", "silent.world_size", "number", "world_size", is_key=True),
    Column("measured", "silent.measured_s", "ms", "measured_s"),
    Column("error, fewer ranks alone", "without.error", "{:+.1%}".format, "error_without"),
    Column("error", "silent.error", "{:+.1%}".format, "error"),
    Column("in the 90 %", "silent.is_covered", "yes", "is_covered"),
    Column("± 90 %", lambda h: (h.silent.high_s - h.silent.low_s) / 2 / h.silent.step_s, "percent.1", "width"),
)


def summarize(name: str, cells: list[HeldOut]) -> list[str]:
    lines = []
    for title, kind in (("from fewer ranks only", "without"), ("with message-free steps on all ranks", "silent")):
        points: list[Prediction] = [getattr(cell, kind) for cell in cells]
        errors = [point.error or 0.0 for point in points]
        close, covered = (sum(abs(e) <= CLOSE for e in errors), sum(bool(p.is_covered) for p in points))
        width = statistics.median((p.high_s - p.low_s) / 2 / p.step_s for p in points)
        lines.append(
            f"{name}, {title}: within {CLOSE:.0%} in {close} of {len(cells)}; bias {statistics.fmean(errors):+.1%} "
            f"(median {statistics.median(errors):+.1%}); in the 90 % interval {covered}, which is ± {width:.0%} wide"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    asked = parser.parse_args()
    cells = [cell for path in asked.runs for cell in judge(path)]
    table = Table("ranks", "twice the ranks, held out", COLUMNS, cells)
    groups = {"all": cells, **group_by(cells, lambda cell: cell.study)}
    lines = [line for name, group in groups.items() for line in summarize(name, group)]
    text = table.markdown() + "\n" + "\n".join(f"- {line}" for line in lines) + "\n"
    print(text)
    if asked.out is not None:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
