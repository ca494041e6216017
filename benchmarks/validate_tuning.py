#!/usr/bin/env python
"""How wrong are the predictions of `paceline tune`? All cases, an ablation and baselines, as tables.

    benchmarks/validate_tuning.py [OUT] [--only NAME] [--keep]

Runs `paceline tune` for each case, then makes every table anew from the runs in OUT, by default the folder `tuning` of
this host under results/. `--keep` judges the stored runs and measures only what is missing, so that a change of the
model is judged without measuring again. Measuring takes about half an hour on two quiet cores.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import load_result
from paceline.predict.curves import MeasuredCurve, fit_line
from paceline.predict.job import Job, build_job_from_profile
from paceline.predict.networks import build_measured_fabric
from paceline.predict.search import enumerate_caps
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.tuning import Tuning
from paceline.records import CollectiveRecord, LayerProfileRecord
from paceline.report.predictions import TuneResult
from paceline.units import MIB

MODELS = {
    "mlp": "--model mlp --hidden 2048 --batch-size 4",
    "cnn": "--model cnn --batch-size 16",
    "resnet18": "--model resnet18 --batch-size 2",
    "gpt2-mini": "--model gpt2-mini --batch-size 4",
}
# Name, bit/s and latency of the emulated networks, and their ranks.
NETWORKS = {"1Gb": "1Gb/s,50us", "10Gb": "10Gb/s,20us", "100Gb": "100Gb/s,5us"}
ALONE = "--ranks 1 --threads 1 --quick"  # the other core is for the thread that is the network
EMULATED = (
    ("mlp", "1Gb", 2), ("mlp", "10Gb", 64), ("mlp", "100Gb", 1024), ("cnn", "1Gb", 64), ("cnn", "10Gb", 2),
    ("cnn", "100Gb", 1024), ("resnet18", "1Gb", 2), ("resnet18", "10Gb", 1024), ("gpt2-mini", "1Gb", 64),
    ("gpt2-mini", "10Gb", 2), ("gpt2-mini", "100Gb", 1024),
)  # fmt: skip


def list_cases() -> Iterator[tuple[str, str]]:
    """The name of each case, and the arguments of `tune`."""
    for model, backend in itertools.product(MODELS, ("gloo", "paceline")):
        yield f"{model}-{backend}", f"{MODELS[model]} --ranks 2 --backend {backend}"
    for model, backend in (("mlp", "gloo"), ("gpt2-mini", "gloo"), ("gpt2-mini", "paceline")):
        yield f"{model}-{backend}-torch", f"{MODELS[model]} --ranks 2 --backend {backend} --wrapper torch"
    for model, network, ranks in EMULATED:
        name = f"{model}-{network}-{ranks}-ranks"
        yield name, f"{MODELS[model]} {ALONE} --network {NETWORKS[network]} --network-ranks {ranks}"
    torch = f"--wrapper torch --network {NETWORKS['1Gb']} --network-ranks 8"
    yield "gpt2-mini-1Gb-8-ranks-torch", f"{MODELS['gpt2-mini']} {ALONE} {torch}"


def measure(out: Path, name: str, arguments: str) -> None:
    new = Path(tempfile.mkdtemp(prefix="new-", dir=out))
    command = [sys.executable, "-m", "paceline", "tune", *arguments.split(), "--out", str(new)]
    print(name, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}")
    print(done.stdout.split("\n\n", 1)[0], flush=True)
    (folder,) = new.iterdir()
    for picture in folder.glob("*.svg"):
        picture.unlink()
    shutil.rmtree(out / name, ignore_errors=True)
    folder.rename(out / name)
    new.rmdir()


@dataclass(frozen=True)
class Case:
    name: str
    tuning: Tuning
    is_emulated: bool


def load_case(folder: Path) -> Case:
    """Everything from the records alone: what the run printed is not used."""
    result = load_result(folder)
    assert isinstance(result, TuneResult), folder
    return Case(folder.name, result.tuning, result.tuning.settings.network is not None)


# -- tables -----------------------------------------------------------------------------------------------------------


def render(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['--:'] * (len(head) - 1)])}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def render_cases(cases: list[Case]) -> str:
    rows = []
    for case in cases:
        j, tuning = case.tuning.judgement, case.tuning
        score = j.scores
        gain = j.gain
        measured = "default kept" if gain is None else f"{1 - gain.value:+.1%} ± {gain.noise or 0:.1%}"
        rows.append([
            f"[{case.name}]({case.name}/grid.md)", str(len(j.measured)), percent(score["mape"]),
            percent(score["max_error"]), percent(score["exposed_error"]), percent(score["exposed_step_error"]),
            percent(score["coverage"]), "" if score["kendall_tau"] is None else f"{score['kendall_tau']:.2f}",
            percent(j.noise), "yes" if j.is_flat else "no", percent(j.regret), f"{tuning.choice.gain:.1%}", measured,
        ])  # fmt: skip
    for what, chosen in (
        ("measured", [c for c in cases if not c.is_emulated]),
        ("emulated", [c for c in cases if c.is_emulated]),
    ):
        points = [p for case in chosen for p in case.tuning.judgement.measured]
        if not points:
            continue
        errors = [abs(p.error or 0.0) for p in points]
        exposed = [(abs((p.estimate.exposed_s) - (p.exposed_s or 0.0)), abs(p.exposed_s or 0.0)) for p in points]
        regrets = [c.tuning.judgement.regret or 0.0 for c in chosen]
        within = sum(r <= max(0.01, c.tuning.judgement.noise) for r, c in zip(regrets, chosen, strict=True))
        rows.append([
            f"**all {what}**", str(len(points)), percent(statistics.fmean(errors)), percent(max(errors)),
            percent(sum(e for e, _ in exposed) / sum(x for _, x in exposed)), "",
            percent(statistics.fmean(bool(p.is_covered) for p in points)), "", "", "",
            f"{within} of {len(chosen)} within 1 % or the noise", "", "",
        ])  # fmt: skip
    head = ["case", "points", "MAPE", "largest error", "error on what is added", "of the step", "in the 90 %", "tau",
            "noise", "flat", "regret", "gain predicted", "gain measured"]  # fmt: skip
    return render(head, rows)


# What a change of the model makes of a job and its costs.
Change = Callable[[Job, MachineCosts], tuple[Job, MachineCosts]]


def _line(job: Job, costs: MachineCosts) -> tuple[Job, MachineCosts]:
    curve = costs.curve
    if not isinstance(curve, MeasuredCurve):
        return job, costs
    return job, replace(costs, curve=fit_line(zip(curve.sizes, curve.seconds, strict=True)))


def _even(job: Job, costs: MachineCosts) -> tuple[Job, MachineCosts]:
    """Gradients ready in proportion to their bytes, as where no layer was timed."""
    return replace(job, ready_s=tuple(job.backward_s * part / job.num_bytes for part in job.totals[1:])), costs


ABLATIONS: dict[str, Change] = {
    "the whole model": lambda job, costs: (job, costs),
    "without contention": lambda job, costs: (job, replace(costs, contention=Contention())),
    "contention as assumed": lambda job, costs: (job, _assume(job, costs)),
    "one message at a time": lambda job, costs: (job, replace(costs, servers=1)),
    "no cost of a bucket": lambda job, costs: (job, replace(costs, launch_s=0.0)),
    "no copies": lambda job, costs: (job, replace(costs, gather_s_per_byte=0.0)),
    "a line for the curve": _line,
    "ready by bytes": _even,
    "nothing after the last bucket": lambda job, costs: (job, replace(costs, finish_s=0.0)),
}


def _assume(job: Job, costs: MachineCosts) -> MachineCosts:
    """Half a core for a message, as `predict` and `scale` take it; an emulated network still takes none."""
    is_fitted = len(costs.contention.sizes) > 1
    return replace(costs, contention=Contention.assume(job.device, is_on_host=True)) if is_fitted else costs


def render_ablation(cases: list[Case]) -> str:
    rows = []
    for name, change in ABLATIONS.items():
        cells = []
        for is_emulated in (False, True):
            errors, added = [], []
            for case in (c for c in cases if c.is_emulated == is_emulated):
                job, costs = change(case.tuning.model.job, case.tuning.model.costs)
                for point in case.tuning.judgement.measured:
                    step_s = simulate(job, job.cut(point.cap_bytes), costs).step_s
                    errors.append(abs(step_s / (point.measured_s or math.nan) - 1))
                    added.append((abs(step_s - (point.measured_s or 0.0)), abs(point.exposed_s or 0.0)))
            cells += ["", "", ""] if not errors else [
                percent(statistics.fmean(errors)), percent(max(errors)),
                percent(sum(e for e, _ in added) / sum(x for _, x in added)),
            ]  # fmt: skip
        rows.append([name, *cells])
    head = [
        "",
        *(f"{what}, {kind}" for kind in ("measured", "emulated") for what in ("MAPE", "largest", "of what is added")),
    ]
    return render(head, rows)


def _greedy(job: Job, costs: MachineCosts) -> tuple[int, ...]:
    """MG-WFBP's idea: wait for the next gradient if it comes before the latency of a message of its own is paid."""
    alpha_s = costs.curve.estimate_s(1)
    cuts: list[int] = []
    free_s, first = 0.0, 0
    for index in range(len(job.sizes)):
        start_s = max(free_s, job.ready_s[index])
        if index + 1 < len(job.sizes) and job.ready_s[index + 1] < start_s + alpha_s:
            continue
        free_s = start_s + costs.curve.estimate_s(sum(job.sizes[first : index + 1]))
        cuts.append(index + 1)
        first = index + 1
    return tuple(cuts)


def _square_root(job: Job, costs: MachineCosts) -> tuple[int, ...]:
    return job.cut(max(1, round(job.num_bytes * math.sqrt(costs.curve.estimate_s(1) / job.backward_s))))


def _find_quickest(job: Job, costs: MachineCosts, tried: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return min(tried, key=lambda cuts: simulate(job, cuts, costs).step_s)


def _random(job: Job, costs: MachineCosts) -> tuple[int, ...]:
    source = random.Random(1)
    tried = [job.cut(max(1, round(job.num_bytes * 0.01 ** source.random()))) for _ in range(20)]
    return _find_quickest(job, costs, tried)


BASELINES: dict[str, Callable[[Job, MachineCosts], tuple[int, ...]]] = {
    "25 MiB": lambda job, costs: job.cut(25 * MIB),
    "100 MB": lambda job, costs: job.cut(100_000_000),
    "Megatron's rule, 40 M elements": lambda job, costs: job.cut(160_000_000),
    "the square-root formula": _square_root,
    "MG-WFBP's greedy merge": _greedy,
    "the best of 20 random caps": _random,
    "the best cap": lambda job, costs: _find_quickest(job, costs, (i.cuts for i in enumerate_caps(job.sizes))),
}


def render_baselines(cases: list[Case]) -> str:
    """Steps under other rules over steps under the recommended plan, all simulated on the same calibration."""
    rows = []
    for case in cases:
        job, costs = case.tuning.model.job, case.tuning.model.costs
        ours = case.tuning.choice.estimate.step_s
        steps = [simulate(job, rule(job, costs), costs).step_s for rule in BASELINES.values()]
        cells = [f"{step_s / ours - 1:+.1%}" for step_s in steps]
        rows.append([case.name, *cells])
    return render(["case", *BASELINES], rows)


def render_what_if(cases: list[Case]) -> str:
    """Measured cases from the bare profile and the sweep alone, as `predict --allreduce` takes them."""
    errors: dict[str, list[float]] = {}
    for case in (c for c in cases if not c.is_emulated):
        records = case.tuning.records
        job = build_job_from_profile(next(r for r in records if isinstance(r, LayerProfileRecord)))
        sweep = [r for r in records if isinstance(r, CollectiveRecord) and r.note != "buffers"]
        fabric = build_measured_fabric(sweep, None)
        curve = fabric.build_curve(sweep[0].world_size)
        for contention in (Contention.assume(job.device, is_on_host=True), Contention()):
            costs = MachineCosts.assume(curve, fabric.servers, contention)
            errors.setdefault(contention.basis, []).extend(
                simulate(job, job.cut(point.cap_bytes), costs).step_s / (point.measured_s or math.nan) - 1
                for point in case.tuning.judgement.measured
            )
    rows = [
        [basis, str(len(found)), percent(statistics.fmean(map(abs, found))), percent(max(map(abs, found)))]
        for basis, found in errors.items()
    ]
    return render(["contention", "points", "MAPE", "largest error"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    host = os.environ.get("PACELINE_HOST") or platform.node()
    parser.add_argument("out", type=Path, nargs="?", default=Path("results") / host / "tuning")
    parser.add_argument("--only", help="cases whose names contain this")
    parser.add_argument("--keep", action="store_true", help="do not measure again what is there")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    names = []
    for name, arguments in list_cases():
        names.append(name)
        if (not asked.only or asked.only in name) and not (asked.keep and (asked.out / name).exists()):
            measure(asked.out, name, arguments)
    cases = [load_case(asked.out / name) for name in names if (asked.out / name).exists()]
    for name, text in (
        ("cases", render_cases(cases)), ("ablation", render_ablation(cases)), ("baselines", render_baselines(cases)),
        ("whatif", render_what_if(cases)),
    ):  # fmt: skip
        (asked.out / f"{name}.md").write_text(text)
        print(f"\n{name}\n{text}")


if __name__ == "__main__":
    main()
