#!/usr/bin/env python
"""Score the predictions of `paceline tune` on unseen steps, in tables and against goals.

    benchmarks/validate_tuning.py [OUT] [--kind real|link|emulated|gpu|nccl] [--only NAME] [--keep] [--stored]

Each case is a `paceline tune` in a separate process, with predictions written before the comparison begins:

- real: two ranks on this host.
- link: one rank in each of two network namespaces, joined by a link of 1, 2.5 or 10 Gb/s (root, `ip` and `tc`).
- emulated: one rank on an emulated network. The emulation's delays come from the predictor's own curve, so it tests the
  simulator, not the predictions.
- gpu: gpt2-large on one GPU, on an emulated network.
- nccl: two, four and eight NCCL ranks that share a GPU; set PACELINE_SHARE_GPUS=1 and start CUDA MPS first.

Measures real cases and links twice, at least ten minutes apart, and scores the predictions of one pass on the steps of
the other. Measures a few again next to a process that keeps one core busy. Builds all tables from the runs in OUT, by
default this host's folder `tuning` under results/. `--keep` measures only the missing runs, and `--stored` none. Real
cases and links take about 35 minutes on two quiet cores, emulated ones another six.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline import load_result
from paceline.predict.curves import MeasuredCurve, fit_line
from paceline.predict.job import Job
from paceline.predict.predictor import Prediction
from paceline.predict.race import estimate_ratio
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.tuning import (
    PREDICTIONS,
    hash_predictions,
    score_predictions,
)
from paceline.records.findings import is_busy
from paceline.records.store import RUN_FILE, find_file, load_json
from paceline.report.predictions import TuneResult
from paceline.report.table import Column, Table
from paceline.units import format_duration

MODELS = {
    "mlp": "--model mlp --hidden 2048 --batch-size 4",
    "cnn": "--model cnn --batch-size 16",
    "resnet18": "--model resnet18 --batch-size 2",
    "gpt2-tiny": "--model gpt2-tiny --batch-size 4",
    "gpt2-mini": "--model gpt2-mini --batch-size 4",
}
NETWORKS = {"1Gb": "1Gb/s,50us", "10Gb": "10Gb/s,20us"}
ALONE = "--ranks 1 --threads 1"  # the other core runs the emulation thread
GPU = "--model gpt2-large --batch-size 4 --precision bf16 --device cuda --ranks 1 --network 100GB/s,5us"
APART_S = 600.0
WIDE = 0.05  # minimum spread of a sweep for scoring differences
KINDS = ("real", "link", "emulated", "gpu", "nccl")
ON_NCCL = {"gpt2-mini": 16, "resnet18": 64, "gpt2": 4}  # samples per rank
# Folders of OUT: two passes at least ten minutes apart, one on a loaded machine, and the emulated cases.
FIRST, SECOND, LOADED, EMULATED = "pass-1", "pass-2", "loaded", "emulated"


# Two measured steps differ if the interval of their paired ratios (this error probability per side) excludes 1.
_CLEAR = 0.005


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    arguments: str  # for `tune`
    rate: str = ""  # the link's rate


def list_cases() -> list[Case]:
    def real(name: str, model: str, backend: str, more: str = "") -> Case:
        return Case("real", name, f"{MODELS[model]} --ranks 2 --backend {backend} --quick{more}")

    def emulated(model: str, network: str, ranks: int, more: str = "") -> Case:
        name = f"{model}-{network}-{ranks}-ranks{'-torch' if more else ''}"
        options = f"{ALONE} --quick --network {NETWORKS[network]} --network-ranks {ranks}{more}"
        return Case("emulated", name, f"{MODELS[model]} {options}")

    torch = " --wrapper torch"
    on_gloo = ("mlp", "resnet18", "gpt2-tiny", "gpt2-mini")
    return [
        *(real(f"{model}-gloo", model, "gloo") for model in on_gloo),
        *(real(f"{model}-shm", model, "shm") for model in ("mlp", "gpt2-mini")),
        real("gpt2-mini-gloo-torch", "gpt2-mini", "gloo", torch),
        *(
            Case("link", f"{model}-{rate}", f"{MODELS[model]} --backend gloo --quick{more}", rate)
            for rate in ("1gbit", "2.5gbit", "10gbit")
            for model, more in (("resnet18", ""), ("gpt2-mini", torch))
        ),
        emulated("mlp", "10Gb", 64), emulated("cnn", "1Gb", 64), emulated("resnet18", "1Gb", 2),
        emulated("gpt2-mini", "1Gb", 64), emulated("gpt2-mini", "10Gb", 2), emulated("gpt2-mini", "1Gb", 8, torch),
        Case("gpu", "gpt2-large-gpu", f"{GPU} --network-ranks 16"),
        *(
            Case("nccl", f"{model}-nccl-{ranks}-ranks",
                 f"--model {model} --batch-size {size} --device cuda --backend nccl --ranks {ranks} --quick")
            for model, size in ON_NCCL.items()
            for ranks in (2, 4, 8)
        ),
    ]  # fmt: skip


IN_LOAD = ("mlp-gloo", "gpt2-mini-gloo", "gpt2-mini-shm")


def find_missing(kind: str) -> str:
    """The reason why this machine cannot run cases of this kind, or an empty string."""
    if kind == "link" and (os.geteuid() or not shutil.which("ip") or not shutil.which("tc")):
        return "root, `ip` and `tc` are needed"
    if kind == "nccl" and os.environ.get("PACELINE_SHARE_GPUS") != "1":
        return "PACELINE_SHARE_GPUS=1 is needed"
    return "no GPU is available" if kind in ("gpu", "nccl") and not shutil.which("nvidia-smi") else ""


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case, folder: Path, more: Sequence[str]) -> bool:
    """Run one tuning in a separate process; False if it failed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    tune = ["tune", *case.arguments.split(), *more]
    command = [sys.executable, "-m", "paceline", *tune, "--out", str(new)]
    if case.rate:
        script = Path(__file__).with_name("limited_link.py")
        command = [sys.executable, str(script), "--rate", case.rate, str(new), "--", *tune]
    begin_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    took = format_duration(time.monotonic() - begin_s)
    found = list(new.iterdir())
    if done.returncode or len(found) != 1:
        print(f"{folder.parent.name}/{case.name}: failed after {took}: {done.stderr.strip()[-500:]}", flush=True)
        shutil.rmtree(new)
        return False
    for picture in found[0].glob("*.svg"):
        picture.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    found[0].rename(folder)
    new.rmdir()
    print(f"{folder.parent.name}/{case.name} ({took}): {done.stdout.strip().splitlines()[0]}", flush=True)
    return True


def measure_all(out: Path, cases: Sequence[Case], keep: bool, more: Sequence[str], apart_s: float) -> list[str]:
    """Measure pass by pass, which separates two runs of a case; returns the names of failed cases."""
    failed = []

    def run(name: str, chosen: Iterable[Case]) -> None:
        for case in chosen:
            folder, first = out / name / case.name, find_file(out / FIRST / case.name / RUN_FILE)
            if keep and folder.exists():
                continue
            if name == SECOND and first is not None:
                time.sleep(max(0.0, first.stat().st_mtime + apart_s - time.time()))
            if not measure(case, folder, more):
                failed.append(f"{name}/{case.name}")

    twice = [case for case in cases if case.kind in ("real", "link")]
    once = [case for case in cases if case.kind == "nccl"]
    run(FIRST, (*twice, *once))
    run(EMULATED, (case for case in cases if case not in twice and case not in once))
    run(SECOND, twice)
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        run(LOADED, (case for case in cases if case.name in IN_LOAD))
    finally:
        load.kill()
        load.wait()
    return failed


# -- scoring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One stored tuning. `predicted_at_s` is the time of writing its predictions."""

    case: Case
    place: str
    result: TuneResult
    predicted_at_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.place}/{self.case.name}"

    @property
    def spread(self) -> float:
        """The spread of step times across the bucket sizes of the sweep."""
        times_s = [point.measured_s for point in self.result.tuning.measured]
        return max(times_s) / min(times_s) - 1

    @property
    def is_wide(self) -> bool:
        return self.spread >= WIDE and score_differences([self.result.tuning.measured]).num_pairs > 0


def load_measured(case: Case, folder: Path) -> Measured:
    """Load a run; rejects it if its predictions are not the ones written before its comparison."""
    result, file = load_result(folder), load_json(folder / PREDICTIONS, "")
    assert isinstance(result, TuneResult), folder
    if file["sha256"] != hash_predictions(result.config["predictions"]):
        raise SystemExit(f"{folder}: {PREDICTIONS} does not contain this run's predictions: measure it again")
    return Measured(case, folder.parent.name, result, file["unix_s"])


def judge(predicting: TuneResult, measuring: TuneResult) -> tuple[list[Prediction], list[Prediction]]:
    """Pair the predictions of one run with the steps of another, or of the same run. For bucket sizes in the sweep they
    use only the first run's calibration; for plans they were written before the comparison."""
    sizes = {point.cap_bytes: point for point in predicting.tuning.points}
    sweep = [
        replace(known, measured=point.measured)
        for point in measuring.tuning.measured
        if (known := sizes.get(point.cap_bytes)) is not None
    ]
    ran = {one.label: one.measured for one in predicting.tuning.candidates if one.measured is not None}
    written = {ran[one["label"]].bucket_bytes: one for one in predicting.config["predictions"] if one["label"] in ran}
    race = []
    for record in (one.measured for one in measuring.tuning.candidates):
        if record is not None and (known := written.get(record.bucket_bytes)) is not None:
            times_s = {name: known[name] for name in ("step_s", "low_s", "high_s")}
            race.append(Prediction(**times_s, measured=record))
    return sweep, race


def repeat(first: TuneResult, again: TuneResult) -> list[Prediction]:
    """Predict one run's steps from those of another, to measure the machine drift that no prediction can foresee."""
    steps = {point.cap_bytes: point.best_s for point in first.tuning.measured}
    return [
        Prediction(step_s=known_s, low_s=known_s, high_s=known_s, measured=point.measured)
        for point in again.tuning.measured
        if (known_s := steps.get(point.cap_bytes)) is not None
    ]


def pair_passes(runs: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """Pair (predicting run, measured run) for cases in both passes, in both directions."""
    by_case = {(run.place, run.case.name): run for run in runs}
    firsts = [run for run in runs if run.place == FIRST and (SECOND, run.case.name) in by_case]
    pairs = [(run, by_case[SECOND, run.case.name]) for run in firsts]
    return [*pairs, *((second, first) for first, second in pairs)]


@dataclass(frozen=True)
class Differences:
    """Accuracy of predicted differences between the plans of a case. `r2` is 1 - sum (p - m)^2 / sum m^2, where m is a
    measured step minus the mean of its case, p is the same for the predicted step, and both are divided by the measured
    mean. `num_pairs` pairs of plans have clearly different measured steps; the order of `num_right` is predicted
    correctly."""

    r2: float | None
    num_pairs: int
    num_right: int


def score_differences(cases: Sequence[Sequence[Prediction]]) -> Differences:
    """Score all cases; each case's plans were interleaved in one run."""
    wrong = total = 0.0
    num_pairs = num_right = 0
    for points in cases:
        measured, predicted = np.array([(point.best_s, point.step_s) for point in points]).T
        here, there = measured - measured.mean(), predicted - predicted.mean()
        wrong += float(((there - here) ** 2).sum() / measured.mean() ** 2)
        total += float((here**2).sum() / measured.mean() ** 2)
        for one, other in itertools.combinations(points, 2):
            if one.measured is None or other.measured is None:
                continue
            ratio = estimate_ratio(one.measured.turns_s, other.measured.turns_s, _CLEAR)
            if ratio.is_clear:
                num_pairs += 1
                num_right += (one.step_s < other.step_s) == (ratio.high < 1)
    return Differences(1 - wrong / total if total else None, num_pairs, num_right)


# -- tables -----------------------------------------------------------------------------------------------------------


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def build_table(name: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> Table:
    """Build a Markdown table; the first `words` columns are text, the others numbers."""
    columns = [
        Column(text, lambda row, place=place: row[place], "text" if place < words else str)
        for place, text in enumerate(head)
    ]
    return Table(name, title, columns, rows)


SCORES = ("points", "MAPE", "largest error", "in the 90 %", "half-width")


def list_scores(points: Sequence[Prediction]) -> list[str]:
    """List the scores; coverage always comes with the interval width."""
    if not points:
        return [""] * len(SCORES)
    scores = score_predictions(points)
    # a width of 0 means predictions without intervals
    names = ("mape", "max_error", "coverage", "width") if scores["width"] else ("mape", "max_error")
    return [str(len(points)), *map(percent, map(scores.get, names)), *[""] * (4 - len(names))]


def build_cases(name: str, title: str, runs: Sequence[Measured]) -> Table:
    """Build the table of scores within each run, with only bucket sizes held out."""
    rows = []
    for run in runs:
        race, verdict, gain = run.result.tuning.race, run.result.verdict, ""
        if race is not None and race.gain.is_known and verdict == "use":
            gain = f"{1 - race.gain.value:.1%} [{1 - race.gain.high:.1%}, {1 - race.gain.low:.1%}]"
        regret = "" if race is None else percent(race.regret[0])
        most = "" if race is None or race.regret[2] == math.inf else percent(race.regret[2])
        busy, spread = "yes" if is_busy(run.result.doubts) else "", percent(run.spread)
        rows.append([run.name, verdict, gain, regret, most, spread, *list_scores(run.result.tuning.measured), busy])
    head = ["run", "verdict", "gain", "regret", "at most", "spread", *SCORES, "says it was busy"]
    return build_table(name, title, head, rows, words=2)


def list_differences(found: Differences) -> list[str]:
    pairs = f"{found.num_right} of {found.num_pairs}" if found.num_pairs else ""
    return ["" if found.r2 is None else f"{found.r2:.2f}", pairs]


def find_differences(runs: Sequence[Measured]) -> tuple[list[Measured], dict[str, Differences]]:
    """Find runs with a spread of at least 5 %, and the accuracy of predicted differences by kind of hold-out."""
    wide = [run for run in runs if run.is_wide]
    names = {run.name for run in wide}
    crossed = [judge(here.result, there.result)[0] for here, there in pair_passes(runs) if there.name in names]
    held_out = {"other bucket sizes": [run.result.tuning.measured for run in wide], "and a process, later": crossed}
    return wide, {what: score_differences(cases) for what, cases in held_out.items()}


def build_differences(runs: Sequence[Measured]) -> Table:
    wide, over_all = find_differences(runs)
    crossed = {there.name: judge(here.result, there.result)[0] for here, there in pair_passes(runs)}
    rows = []
    for run in wide:
        found = [[run.result.tuning.measured], [crossed[run.name]] if run.name in crossed else []]
        cells = [cell for cases in found for cell in list_differences(score_differences(cases))]
        rows.append([run.name, percent(run.spread), *cells])
    unclear = sum(run.spread >= WIDE for run in runs) - len(wide)
    name = f"all {len(wide)}; in {unclear} more, no two bucket sizes differ clearly"
    rows.append([name, "", *(cell for found in over_all.values() for cell in list_differences(found))])
    head = ["run", "spread"]
    for what in over_all:
        head += [f"R2, {what}", f"pairs in order, {what}"]
    title = f"real cases and links whose bucket sizes differ by at least {WIDE:.0%}"
    return build_table("differences", title, head, rows)


def find_held_out(runs: Sequence[Measured], loaded: Sequence[Measured]) -> dict[str, list[Prediction]]:
    """Group predictions by kind of hold-out."""
    pairs, quiet = pair_passes(runs), {run.case.name: run for run in runs if run.place == FIRST}
    held: dict[str, list[Prediction]] = {}
    for kind in dict.fromkeys(run.case.kind for run in runs):
        own = [(run, run) for run in runs if run.case.kind == kind]
        crossed = [(here, there) for here, there in pairs if here.case.kind == kind]
        for when, chosen in (("the same run", own), ("another process, later", crossed)):
            found = [judge(here.result, there.result) for here, there in chosen]
            for what, points in zip(("bucket sizes", "plans of the race"), zip(*found, strict=True), strict=False):
                held[f"{kind}: {what}, {when}"] = list(itertools.chain(*points))
        again = [repeat(here.result, there.result) for here, there in crossed]
        held[f"{kind}: bucket sizes, the measured steps of the other pass as prediction"] = list(
            itertools.chain(*again)
        )
    busy = [(run, run) for run in loaded], [(quiet[run.case.name], run) for run in loaded if run.case.name in quiet]
    for who, chosen in zip(("", ", predicted on the quiet one"), busy, strict=True):
        points = [point for here, there in chosen for part in judge(here.result, there.result) for point in part]
        held[f"a loaded machine{who}"] = points
    return {what: points for what, points in held.items() if points}


def build_held_out(runs: Sequence[Measured], loaded: Sequence[Measured]) -> Table:
    rows = [[what, *list_scores(points)] for what, points in find_held_out(runs, loaded).items()]
    return build_table("held-out", "predictions by what was held out", ["steps of", *SCORES], rows)


def build_bars(runs: Sequence[Measured], gpu: Sequence[Measured]) -> Table:
    """Build the table of goals and results."""
    rows: list[list[str]] = []

    def add(what: str, held_out: str, goal: str, found: str, is_met: bool) -> None:
        rows.append([what, held_out, goal, found, "met" if is_met else "missed"])

    wide, over_all = find_differences(runs)
    for held_out, found in over_all.items():
        if found.r2 is not None and found.num_pairs:
            share = found.num_right / found.num_pairs
            what = f"{len(wide)} runs with a spread of at least {WIDE:.0%}"
            add(f"{what}: R2 of differences", held_out, "at least 0.8", f"{found.r2:.2f}", found.r2 >= 0.8)
            pairs = f"{share:.1%} of {found.num_pairs}"
            add(f"{what}: pairs in order", held_out, "at least 95 %", pairs, share >= 0.95)
    pairs = pair_passes(runs)
    later = [p for here, there in pairs for part in judge(here.result, there.result) for p in part]
    if later:
        scores = score_predictions(later)
        apart_s = min(abs(here.predicted_at_s - there.predicted_at_s) for here, there in pairs)
        held_out = f"another process, {apart_s / 60:.0f} minutes apart or more"
        add("MAPE of a step", held_out, "at most 2.5 %", percent(scores["mape"]), scores["mape"] <= 0.025)
        found = f"{scores['coverage']:.1%} of {len(later)}, ± {scores['width']:.1%}"
        add("in the 90 %", held_out, "85 to 95 %", found, 0.85 <= scores["coverage"] <= 0.95)
    for run in gpu:
        points = run.result.tuning.measured
        mape = score_predictions(points)["mape"]
        found = f"{mape:.1%} over {len(points)}"
        add(f"{run.case.name}: MAPE", "8 bucket sizes", "at most 2 %", found, mape <= 0.02 and len(points) >= 8)
    return build_table("bars", "bars", ["what", "held out", "goal", "found", ""], rows, words=5)


# An ablation's change to a job and its costs.
Change = Callable[[Job, MachineCosts], tuple[Job, MachineCosts]]


def _line(job: Job, costs: MachineCosts) -> tuple[Job, MachineCosts]:
    curve = costs.curve
    if not isinstance(curve, MeasuredCurve):
        return job, costs
    return job, replace(costs, curve=fit_line(zip(curve.sizes, curve.seconds, strict=True)))


def _even(job: Job, costs: MachineCosts) -> tuple[Job, MachineCosts]:
    """Make ready times proportional to bytes, as without a layer profile."""
    return replace(job, ready_s=tuple(job.backward_s * part / job.num_bytes for part in job.totals[1:])), costs


def _assume(job: Job, costs: MachineCosts) -> tuple[Job, MachineCosts]:
    """Use half a core per message, as `predict` and `scale` assume for ranks on one host."""
    return job, replace(costs, contention=Contention.assume(job.device, is_on_host=True))


ABLATIONS: dict[str, Change] = {
    "the whole model": lambda job, costs: (job, costs),
    "without contention": lambda job, costs: (job, replace(costs, contention=Contention())),
    "contention as assumed on a host": _assume,
    "one message at a time": lambda job, costs: (job, replace(costs, servers=1)),
    "no cost of a bucket": lambda job, costs: (job, replace(costs, launch_s=0.0)),
    "no copies": lambda job, costs: (job, replace(costs, gather_s_per_byte=0.0)),
    "a line for the curve": _line,
    "ready by bytes": _even,
    "nothing after the last bucket": lambda job, costs: (job, replace(costs, finish_s=0.0)),
}


def build_ablation(runs: Sequence[Measured]) -> Table:
    """Build the table of mean errors over all bucket sizes when removing one part of the model at a time."""
    kinds = list(dict.fromkeys(run.case.kind for run in runs))
    rows = []
    for name, change in ABLATIONS.items():
        cells = []
        for kind in kinds:
            errors = []
            for tuning in (run.result.tuning for run in runs if run.case.kind == kind):
                job, costs = change(tuning.model.job, tuning.model.costs)
                steps = ((simulate(job, job.cut(p.cap_bytes), costs).step_s, p.best_s) for p in tuning.measured)
                errors += [abs(here / there - 1) for here, there in steps]
            cells += [percent(statistics.fmean(errors)), percent(max(errors))]
        rows.append([name, *cells])
    head = ["", *(f"{what}, {kind}" for kind in kinds for what in ("MAPE", "largest error"))]
    return build_table("ablation", "parts of the model removed one by one", head, rows)


def build_tables(runs: Sequence[Measured]) -> list[Table]:
    """Build all tables."""
    twice = [run for run in runs if run.place in (FIRST, SECOND)]
    loaded = [run for run in runs if run.place == LOADED]
    alone = [run for run in runs if run.place == EMULATED]
    tables = []
    if twice:
        tables += [build_cases("cases", "real cases and links", twice), build_differences(twice)]
        tables += [build_held_out(twice, loaded), build_ablation(twice)]
    if loaded:
        tables.append(build_cases("loaded", "next to a process that computes", loaded))
    if alone:
        tables.append(build_cases("emulated", "emulated networks: a test of the simulator", alone))
    return [*tables, build_bars(twice, [run for run in alone if run.case.kind == "gpu"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    host = os.environ.get("PACELINE_HOST") or platform.node()
    parser.add_argument("out", type=Path, nargs="?", default=Path("results") / host / "tuning")
    parser.add_argument("--kind", choices=KINDS, help="measure only cases of this kind")
    parser.add_argument("--only", help="measure only cases with this text in their names")
    parser.add_argument("--keep", action="store_true", help="keep existing measurements")
    parser.add_argument("--stored", action="store_true", help="score the runs in OUT without measuring")
    parser.add_argument("--iters", type=int, help="rounds per tuning; a few suffice to try this script")
    parser.add_argument("--apart", type=float, default=APART_S, help="seconds between the two passes of a case")
    asked = parser.parse_args()
    every, chosen = list_cases(), []
    for kind in KINDS:
        wanted = [
            case
            for case in every
            if case.kind == kind and asked.kind in (None, kind) and (not asked.only or asked.only in case.name)
        ]
        if asked.stored:
            continue
        if missing := wanted and find_missing(kind):
            print(f"{kind}: skipped, {missing}", flush=True)
        else:
            chosen += wanted
    more = [] if asked.iters is None else ["--iters", str(asked.iters)]
    failed = [] if asked.stored else measure_all(asked.out, chosen, asked.keep, more, asked.apart)
    stored = [(case, asked.out / place / case.name) for place in (FIRST, SECOND, LOADED, EMULATED) for case in every]
    runs = [load_measured(case, folder) for case, folder in stored if folder.exists()]
    for table in build_tables(runs):
        (asked.out / f"{table.name}.md").write_text(table.markdown())
        print(f"\n{table.title}\n\n{table.markdown()}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
