"""Measure the goodput of a job whose ranks are killed at random, and compare it with the prediction.

python benchmarks/goodput.py [--on-fault restart] [--mtbf 20,40,80] [--seconds 200] [--rounds 1] [--out FILE]

Every round has a run without faults and one for each mean time between faults; the next round reverses the order.
Before the rounds, kills at fixed times measure recovery times; the prediction uses nothing else from runs with faults.

Goodput is useful step time, plus the gaps between steps of a run without faults or saves, divided by the time from the
first step to the last. This definition cancels out speed differences between runs. The result also includes the
slowdown of steps after a recovery compared with those before the fault. With `--on-fault resume`, `paceline train
--resume` restarts the command after each fault; with other policies, only if a second fault during recovery ended the
command.

Times between faults are exponential, drawn from equal parts of the distribution in random order, so even a small
sample has the requested mean. All rounds at one fault rate continue the same sequence of faults. A fault kills one
rank; with `spare` and `shrink`, it kills a rank of the current world, and waits until there is one. A replica survives,
so the prediction assumes that nearly all faults leave a replica intact. The script rewrites FILE after each run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.records.training import METRICS_FILE, load_config, load_metrics
from paceline.runtime.faults import pulse

_PACELINE = (sys.executable, "-m", "paceline")
_LOOK_S = 0.02
_BLIND_S = 0.1  # time after a kill in which ranks may still write the last completed step
_MOST_S = 1800.0
_AFTER = 300  # number of steps to compare before a fault and after a recovery


@dataclass
class Outcome:
    """The times of a run: `first_s` and `last_s` are the ends of its first and last step (`time.monotonic`);
    `num_resumed` counts restarts of the command."""

    folder: Path = Path()
    first_s: float = 0.0
    last_s: float = 0.0
    first_step: int = 0
    last_step: int = 0
    kills_s: list[float] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    num_resumed: int = 0
    left_s: float = math.inf  # time from the end of the run to the next scheduled fault
    busy_s: float = 0.0  # total time of useful steps, after the first
    slower_s: list[float] = field(default_factory=list)  # extra time of `_AFTER` steps after each recovery

    @property
    def wall_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step

    def read_steps(self) -> None:
        """Read the total time of useful steps, and the slowdown after each recovery, from the run's files."""
        rows = load_metrics(self.folder / METRICS_FILE)
        faults = load_config(self.folder).get("faults", ())
        steps_s = [row["step_s"] for row in rows]
        self.busy_s = sum(steps_s[self.first_step :])
        for fault in faults:
            at = fault["step"] - fault["steps_lost"]
            before, after = steps_s[max(0, at - _AFTER) : at], steps_s[at : at + _AFTER]
            if len(before) == len(after) == _AFTER:
                self.slower_s.append(sum(after) - sum(before))


def find_ranks(pid: int, in_world: bool = False) -> list[int]:
    """List the running rank processes and spares of a launcher, in order. `in_world`: only the ranks of its current
    world, which have a status page."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                name = Path(f"/proc/{child.pid}/comm").read_text().strip()
                if name.startswith("paceline-rank-") and child.status() != psutil.STATUS_ZOMBIE:
                    found.append((name, child.pid))
    members = read_pages(pid) if in_world else {child for _, child in found}
    return [child for _, child in sorted(found) if child in members]


def read_pages(pid: int) -> set[int]:
    """List the processes with a status page that the launcher reads."""
    found = set()
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file).startswith("/memfd:paceline-page"):
                    found.add(memoryview(file.read_bytes()).cast("q")[pulse.PID])
    return found


def check_faults(outcome: Outcome, policy: str) -> str:
    """Warn if the number of faults recorded by the run differs from the number of kills."""
    faults = json.loads((outcome.folder / "config.json").read_text()).get("faults", ())
    if policy == "resume" or len(faults) == len(outcome.kills_s):
        return ""
    return f"warning: {len(outcome.kills_s)} kills, but the run recorded {len(faults)} faults: see its config.json"


def read_step(path: Path) -> int:
    """Read the step number of the last row, or 0."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 50_000))
            *lines, _ = file.read().split(b"\n")
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError):
        return 0


def build_command(asked: argparse.Namespace, steps: int, save_every: str, out: Path) -> list[str]:
    command = [*_PACELINE, "train", *asked.job.split(), "--ranks", str(asked.ranks), "--steps", str(steps)]
    command += ["--save-every", save_every, "--out", str(out)]
    if asked.on_fault != "resume":
        command += ["--on-fault", asked.on_fault, *asked.more.split()]
    return command


def run_job(
    asked: argparse.Namespace, steps: int, save_every: str, gaps_s: Iterator[float], out: Path, calm: bool
) -> Outcome:
    """Train for `steps` steps, and kill a rank after each interval of `gaps_s` seconds, counted from the first step or
    the previous kill (with `calm`, from the previous recovery)."""
    outcome, source, begin_s = Outcome(), random.Random(asked.seed), time.monotonic()
    has_spares = asked.on_fault in ("spare", "shrink")
    command = build_command(asked, steps, save_every, out)
    due_s, recovering, seen = math.inf, False, 0
    log = (out / "log").open("ab")
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            if time.monotonic() - begin_s > _MOST_S:
                raise SystemExit(f"a run takes longer than {_MOST_S:.0f} s: {command}")
            time.sleep(_LOOK_S)
            now_s, files = time.monotonic(), list(out.glob("*/metrics.jsonl"))
            has_ended = process.poll() is not None
            if files:
                found = files[0].stat()
                # The file grows with new rows, and shrinks when a resumed run truncates the rows that it will repeat.
                if found.st_size not in (0, seen):
                    grows, seen = found.st_size > seen, found.st_size
                    step = read_step(files[0])
                    if not outcome.first_s and step:
                        outcome.folder, outcome.first_s, outcome.first_step = files[0].parent, now_s, step
                        due_s = now_s + next(gaps_s, math.inf)
                    if recovering and grows and now_s - outcome.kills_s[-1] > _BLIND_S:
                        outcome.recoveries_s.append(now_s - outcome.kills_s[-1])
                        recovering = False
                        due_s = now_s + next(gaps_s, math.inf) if calm else due_s
                    outcome.last_s, outcome.last_step = now_s, step
            if has_ended and outcome.last_step >= steps:
                outcome.left_s = max(0.0, due_s - outcome.last_s)
                outcome.read_steps()
                return outcome
            if has_ended and (not files or not outcome.kills_s):
                raise SystemExit(f"the job did not train: {(out / 'log').read_text()[-2000:]}")
            if has_ended:
                outcome.num_resumed += 1
                words = [*_PACELINE, "train", "--resume", str(files[0].parent)]
                process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            is_due = now_s >= due_s and outcome.last_step < steps
            if ranks := find_ranks(process.pid, has_spares) if is_due else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(source.choice(ranks), signal.SIGKILL)
                    outcome.kills_s.append(now_s)
                    recovering, due_s = True, math.inf if calm else now_s + next(gaps_s, math.inf)
    finally:
        for pid in (*find_ranks(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        log.close()


def draw_gaps(mean_s: float, num: int, source: random.Random) -> Iterator[float]:
    """Draw exponential intervals; the mean of every `num` intervals is nearly exact."""
    while True:
        shares = [(place + source.random()) / num for place in range(num)]
        source.shuffle(shares)
        yield from (-mean_s * math.log1p(-share) for share in shares)


def predict(asked: argparse.Namespace, healthy: Path, mtbf_s: float, recovery_s: Sequence[float]) -> dict[str, Any]:
    """Run `paceline predict goodput` for this job."""
    flag = "--restart-seconds" if asked.on_fault in ("restart", "resume") else f"--{asked.on_fault}-seconds"
    words = [*_PACELINE, "predict", "goodput", str(healthy), "--mtbf", f"{mtbf_s:.3f}s", "--json"]
    words += ["--save-every", asked.save_every, "--horizon", f"{asked.seconds * asked.rounds:.0f}s"]
    words += [flag, str(statistics.fmean(recovery_s)), "--out", str(healthy.parent / "predicted")]
    if flag != "--restart-seconds":
        words += ["--restart-seconds", asked.restart_seconds, "--all-lost", "0.001%"]
    document = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True).stdout)
    name = "restart" if asked.on_fault == "resume" else asked.on_fault
    return next(row for row in document["policies"] if row["policy"] == name)


def compare(
    asked: argparse.Namespace, alone: Sequence[Outcome], measured: Mapping[float, Sequence[Outcome]], saved: Outcome,
    calibration: Outcome,
) -> dict[str, Any]:  # fmt: skip
    """Compare the measurements so far with their predictions."""
    step_s = sum(one.wall_s for one in alone) / sum(one.num_steps for one in alone)
    around = sum(one.wall_s for one in alone) / sum(one.busy_s for one in alone)
    rows = []
    for rate, outcomes in measured.items():
        if not outcomes:
            continue
        wall_s = sum(one.wall_s for one in outcomes)
        share = around * sum(one.busy_s for one in outcomes) / wall_s
        num_faults = sum(len(one.kills_s) for one in outcomes)
        row = predict(asked, saved.folder, rate, calibration.recoveries_s)
        as_drawn = predict(asked, saved.folder, wall_s / (num_faults or 1e-6), calibration.recoveries_s)
        rows.append({
            "mtbf_s": rate, "num_faults": num_faults, "wall_s": wall_s, "measured": share,
            "predicted": row["useful_share"], "low": row["useful_low"], "high": row["useful_high"],
            "predicted_for_the_faults_that_came": as_drawn["useful_share"],
        })  # fmt: skip
    slower_s = [one_s for outcomes in (*measured.values(), [calibration]) for one in outcomes for one_s in one.slower_s]
    about = {"on_fault": asked.on_fault, "job": asked.job, "ranks": asked.ranks, "step_s": step_s}
    about["slower_after_s"] = statistics.median(slower_s) if slower_s else None
    return about | {"recoveries_s": calibration.recoveries_s, "save_every": asked.save_every, "rows": rows}


def show(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    times = found["recoveries_s"]
    print(
        f"{asked.on_fault}, {asked.ranks} ranks, {asked.job}: a step takes {found['step_s'] * 1e3:.2f} ms, a recovery "
        f"{statistics.fmean(times):.2f} s ({', '.join(f'{one:.1f}' for one in times)}), a save every "
        f"{asked.save_every}; the {_AFTER} steps after a recovery take {found['slower_after_s'] or 0.0:+.2f} s "
        "compared with those before the fault (median)\n"
        "| MTBF (s) | faults | measured goodput | predicted | 90 % | error (points) | predicted for the actual number "
        "of faults | error (points) |\n|--:|--:|--:|--:|---|--:|--:|--:|"
    )
    for row in found["rows"]:
        off, less = row["measured"] - row["predicted"], row["measured"] - row["predicted_for_the_faults_that_came"]
        print(
            f"| {row['mtbf_s']:g} | {row['num_faults']} | {row['measured']:.1%} | {row['predicted']:.1%} | "
            f"{row['low']:.1%} to {row['high']:.1%} | {100 * off:+.1f} | "
            f"{row['predicted_for_the_faults_that_came']:.1%} | {100 * less:+.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on-fault", default="restart", help="restart, spare, shrink, or resume (a new command)")
    parser.add_argument("--mtbf", default="20,40,80", help="mean seconds between faults")
    parser.add_argument("--seconds", type=float, default=200.0, help="useful step time per run of a round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=4, help="number of kills to measure recovery times")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--job", default="--model mlp --batch-size 64 --samples 6400", help="options for train")
    parser.add_argument("--more", default="--max-faults 100000", help="further options for recovery")
    parser.add_argument("--save-every", default="5s")
    parser.add_argument("--restart-seconds", default="10", help="for spare and shrink")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit through the cleanup that terminates the job
    rates = [float(one) for one in asked.mtbf.split(",")]
    source, measured = random.Random(asked.seed), {rate: list[Outcome]() for rate in rates}
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as name:

        def run(label: str, steps: int, save_every: str, gaps_s: Iterator[float], calm: bool = False) -> Outcome:
            folder = Path(name) / f"{label}-{time.monotonic_ns()}"
            folder.mkdir()
            outcome = run_job(asked, steps, save_every, gaps_s, folder, calm)
            took = f"{outcome.num_steps} steps in {outcome.wall_s:.1f} s, {len(outcome.kills_s)} faults"
            took += f", resumed {outcome.num_resumed} times" if outcome.num_resumed else ""
            print(f"{label}: {took}", file=sys.stderr, flush=True)
            if warning := check_faults(outcome, asked.on_fault):
                print(f"{label}: {warning}", file=sys.stderr, flush=True)
            return outcome

        short = run("measuring the step time", 500, "1000s", iter(()))
        saved = run("saves", max(500, round(40 * short.num_steps / short.wall_s)), asked.save_every, iter(()))
        # Use the longer run: steps get slower after a thousand, when momentum becomes denormal.
        steps = max(500, round(asked.seconds * saved.num_steps / saved.wall_s))
        gap_s = 0.8 * asked.seconds / (asked.kills + 1)
        calibration = run("recovery", steps, asked.save_every, iter([gap_s] * asked.kills), calm=True)
        alone, found = list[Outcome](), dict[str, Any]()
        draws = {rate: draw_gaps(rate, max(2, round(asked.seconds * asked.rounds / rate)), source) for rate in rates}
        left_s = {rate: next(draws[rate]) for rate in rates}
        for number in range(asked.rounds):
            order = [0.0, *rates]
            for rate in order[:: 1 if number % 2 == 0 else -1]:
                label = f"a fault every {rate:g} s" if rate else "no faults"
                gaps_s = itertools.chain([left_s[rate]], draws[rate]) if rate else iter(())
                outcome = run(label, steps, asked.save_every if rate else "1000s", gaps_s)
                (measured[rate] if rate else alone).append(outcome)
                left_s[rate] = outcome.left_s
                if len(alone) == number + 1:
                    found = compare(asked, alone, measured, saved, calibration)
                    if asked.out is not None:
                        asked.out.write_text(json.dumps(found, indent=1) + "\n")
        show(asked, found)


if __name__ == "__main__":
    main()
