#!/usr/bin/env python
"""Score predicted strategies on steps that the predictions have not seen, and check the choice of the fastest one.

    benchmarks/validate_strategies.py OUT [--only NAME] [--keep] [--quick]

Each cell is a `paceline tune --strategy ...` in a separate process: two ranks that share memory, or one rank in each of
two network namespaces joined by a link of 100 Mb/s, 1 or 10 Gb/s (root, `ip` and `tc`). Strategies that send in every
step run in alternating steps, after writing their predictions. Schedules, sharded strategies and, for comparison, the
dense strategy train in the same environment with their predicted best buckets; the score uses mean steps. `--keep`
measures only the missing runs in OUT. A cell takes three to fifteen minutes, more for slower links.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline import load_result
from paceline.report.predictions import TuneResult
from paceline.report.table import Column, Table
from paceline.units import format_duration

MODELS = {
    "mlp": "--model mlp --hidden 2048 --batch-size 4",
    "cnn": "--model cnn --batch-size 16",
    "gpt2-mini": "--model gpt2-mini --batch-size 4",
}
EVERY_STEP = "bf16,int8,int4,topk:0.01,powersgd:4"
# Steps per run: the first period and further full periods.
TRAINED = {"dense": 40, "localsgd:8": 64, "diloco:50": 150, "diloco:50+int8": 150, "zero1": 40}
# Required speed-up over bf16, with tuned buckets.
GAINS = {
    ("mlp-1gbit", "int8"): 1.5, ("mlp-1gbit", "powersgd:4"): 2.5, ("mlp-100mbit", "powersgd:4"): 10,
    ("mlp-100mbit", "topk:0.01"): 7, ("mlp-100mbit", "diloco:50+int8"): 12, ("gpt2-mini-100mbit", "int8"): 1.5,
    ("gpt2-mini-100mbit", "diloco:50"): 2.3, ("mlp-shm", "default"): 0.98, ("gpt2-mini-shm", "default"): 0.98,
}  # fmt: skip
WINS = 1.01  # a chosen strategy is correct if its step takes at most this multiple of the fastest one's


@dataclass(frozen=True)
class Case:
    """One job on a link with this `rate`, or in shared memory if it is empty."""

    model: str
    rate: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.rate or 'shm'}"

    @property
    def backend(self) -> str:
        return "gloo" if self.rate else "shm"


CASES = [
    *(Case(model, rate) for model in MODELS for rate in ("100mbit", "1gbit")),
    *(Case(model, rate) for model in ("mlp", "gpt2-mini") for rate in ("10gbit", "")),
]


def run(case: Case, arguments: list[str], folder: Path) -> bool:
    """Run one command in a separate process, saving its run in this folder; False if it failed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    command = [sys.executable, "-m", "paceline", *arguments, "--out", str(new)]
    if case.rate:
        script = Path(__file__).with_name("limited_link.py")
        command = [sys.executable, str(script), "--rate", case.rate, str(new), "--", *arguments]
    else:
        command += ["--ranks", "2"]
    begin_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    found = [path for path in new.iterdir() if path.is_dir()]
    is_fine = not done.returncode and len(found) == 1
    took = format_duration(time.monotonic() - begin_s)
    said = "" if is_fine else f" failed: {(done.stderr.strip() or done.stdout.strip())[-400:]}"
    print(f"{folder.parent.name}/{folder.name}: {took}{said}", flush=True)
    if is_fine:
        found[0].rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    return is_fine


def measure(case: Case, out: Path, keep: bool, quick: bool) -> None:
    job = [*MODELS[case.model].split(), "--backend", case.backend]
    more = ["--quick"] if quick else ["--budget", "90"]
    if not (keep and (out / case.name / "tune").exists()):
        names = ",".join([EVERY_STEP, *(name for name in TRAINED if name != "dense")])
        run(case, ["tune", *job, "--strategy", names, *more], out / case.name / "tune")
    for name, steps in {} if quick else TRAINED.items():
        if not (keep and (out / case.name / name).exists()):
            train = ["train", *job, "--strategy", name, "--steps", str(steps + 10), "--save-every", "1000steps"]
            train += ["--lr", "0.0001"]  # only times matter, and a wide mlp diverges with the default
            if name == "zero1":  # use the prediction's buckets
                tuning = load_tuned(out / case.name / "tune").tuning
                gradients, cuts = tuning.answer.plan.gradients, tuning.predicted[name].cuts
                file = out / case.name / "zero1-plan.json"
                file.write_text(tuning.model.build_plan(gradients, cuts, "predicted").to_json())
                train += ["--plan", str(file.resolve())]
            run(case, train, out / case.name / name)


def load_tuned(folder: Path) -> TuneResult:
    result = load_result(folder)
    assert isinstance(result, TuneResult)
    return result


def find_step_s(folder: Path, strategy: str) -> float | None:
    """Find a training run's mean step over full periods, without its first ten steps."""
    if not folder.exists():
        return None
    steps = [row["step_s"] for row in load_result(folder).rows if "step_s" in row][10 : 10 + TRAINED[strategy]]
    return statistics.fmean(steps) if steps else None


@dataclass(frozen=True)
class Row:
    """A strategy in one cell: its step relative to the default (dense), predicted and measured."""

    cell: str
    strategy: str
    predicted_s: float
    measured_s: float
    sent_bytes: float
    is_in: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def judge(case: Case, out: Path) -> list[Row]:
    folder = out / case.name / "tune"
    if not folder.exists():
        return []
    result = load_tuned(folder)
    sent = {row["strategy"]: row["sent_bytes"] for row in result.to_json()["strategies"]}
    rows = []
    for raced in result.rows:
        name = raced.strategy.text
        label = name if raced.label != "default" else "default"
        rows.append(Row(case.name, label, raced.step_s, raced.measured_s, sent[name], raced.is_covered))
    # A training step does more than a step in `tune`, so compare it with a dense training step.
    dense_s, base = find_step_s(out / case.name / "dense", "dense"), rows[0]
    for name in TRAINED:
        trained_s = find_step_s(out / case.name / name, name)
        if name != "dense" and dense_s is not None and trained_s is not None:
            found, measured_s = result.tuning.predicted[name], trained_s / dense_s * base.measured_s
            is_in = found.low_s <= measured_s <= found.high_s
            rows.append(Row(case.name, name, found.step_s, measured_s, sent[name], is_in))
    return rows


COLUMNS = (
    Column("cell", "cell", is_key=True, key="cell"),
    Column("strategy", "strategy", is_key=True, key="strategy"),
    Column("sent", "sent_bytes", lambda size: f"{size:,.0f}", "sent_bytes"),
    Column("predicted", "predicted_s", "ms", "predicted_s"),
    Column("measured", "measured_s", "ms", "measured_s"),
    Column("error", "error", "{:+.1%}".format, "error"),
    Column("in its interval", "is_in", "yes", "is_in"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="cells whose names contain this")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--quick", action="store_true", help="short comparisons, without training")
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in case.name]
    for case in cases:
        measure(case, asked.out, asked.keep, asked.quick)
    rows = [row for case in cases for row in judge(case, asked.out)]
    if not rows:
        raise SystemExit("validate_strategies: no measurements found")
    print(Table("strategies", "steps under each strategy", COLUMNS, rows).terminal(None))
    errors = [abs(row.error) for row in rows]
    scores = {"mape": statistics.fmean(errors), "max_error": max(errors)}
    right, cells = 0, dict.fromkeys(row.cell for row in rows)
    for cell in cells:
        mine = [row for row in rows if row.cell == cell]
        fastest, chosen = (min(mine, key=lambda row: getattr(row, name)) for name in ("measured_s", "predicted_s"))
        is_right = chosen.measured_s <= WINS * fastest.measured_s
        right += is_right
        said = (
            "right"
            if is_right
            else f"wrong: {fastest.strategy} is {1 - fastest.measured_s / chosen.measured_s:.1%} faster"
        )
        print(f"{cell}: predicted fastest: {chosen.strategy}, which is {said}")
    steps = {(row.cell, row.strategy): row.measured_s for row in rows}
    gains = {key: steps[key[0], "bf16"] / steps[key] for key in GAINS if {key, (key[0], "bf16")} <= steps.keys()}
    for (cell, name), gain in gains.items():
        if name == "default":  # bf16 cannot help here, but must not be slower either
            print(f"{cell}: bf16 is {1 / gain:.2f} times as fast as float32 (bar: {GAINS[cell, name]})")
        else:
            print(f"{cell}: {name} is {gain:.2f} times as fast as bf16 (bar: {GAINS[cell, name]})")
    inside = statistics.fmean(row.is_in for row in rows)
    print(f"\nsteps: mean error {scores['mape']:.1%}, largest {scores['max_error']:.1%} (goals: 5 %, 10 %)")
    print(f"fastest strategy: correct in {right} of {len(cells)} cells (goal: 9 of 10); {inside:.0%} in 90 % intervals")
    summary = {"mape": scores["mape"], "max_error": scores["max_error"], "right": right, "cells": len(cells),
               "coverage": inside, "gains": {" ".join(key): gain for key, gain in gains.items()},
               "rows": [vars(row) | {"error": row.error} for row in rows]}  # fmt: skip
    (asked.out / "strategies.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
