#!/usr/bin/env python
"""What does attaching to a program cost, and how right is `paceline tune -- COMMAND` over a link of 1 Gb/s?

    benchmarks/validate_attach.py overhead [--rounds 8]
    benchmarks/validate_attach.py link [--rate 1gbit] [--steps 48]

`overhead`: runs of tests/scripts/plain_loop.py in turns, plain and attached; the time of its steps is that between two
lines that it prints itself. The steps that are recorded are not among them.
`link`: the same program on two network namespaces, one rank on each. It is tuned first; then it runs with a range of
bucket sizes in turns, which the prediction has not seen: the error of the predicted steps, and how much longer than
the best of them the chosen one takes. A case with little to send should be flat. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from limited_link import PORT, linked_hosts

import paceline
from paceline.records.samples import compare_times
from paceline.units import MIB, format_bytes, format_ms, parse_sizes

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "plain_loop.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CASES = {
    "wide": "--width 768 --depth 8 --batch-size 32",
    "deep": "--width 384 --depth 24 --batch-size 32",
    "flat": "--width 64 --depth 2 --batch-size 8192 --steps 160",
}
CAPS = "256KiB,1MiB,4MiB,10MiB,25MiB"


def time_steps(variables: dict[str, str]) -> float:
    """Seconds of a step of the program, by the lines that it prints at steps 60 and 180."""
    command = [*TORCHRUN, str(SCRIPT), "--steps", "181", "--width", "256", "--depth", "6"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    moments = {}
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step "):
            moments[int(line.split()[1])] = time.perf_counter()
    if process.wait():
        raise SystemExit(f"{shlex.join(command)} failed")
    return (moments[180] - moments[60]) / 120


def measure_overhead(rounds: int) -> None:
    times: dict[str, list[float]] = {"plain": [], "attached": [], "attached, all steps": []}
    for number in range(rounds):
        for kind in list(times)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                steps = 0 if kind.endswith("all steps") else 48
                given = json.dumps({"folder": folder, "steps": steps, "warmup": 10, "record": 8})
                variables = {"PACELINE_ATTACH": given, "KINETO_LOG_LEVEL": "6"}
                times[kind].append(time_steps({} if kind == "plain" else variables))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    for kind, seconds in times.items():
        ratio = compare_times(seconds, times["plain"])
        print(f"{kind}: {format_ms(statistics.median(seconds))} ms a step, {ratio.value:.4f} ± {ratio.noise or 0:.4f}")


def run_on_hosts(names: list[str], arguments: list[str]) -> int:
    """One rank of the program in each namespace, as a launcher starts them."""
    ranks = []
    for rank, name in enumerate(names):
        place = {
            "MASTER_ADDR": "10.213.7.1", "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(len(names)),
            "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable, str(SCRIPT), *arguments]
        ranks.append(subprocess.Popen(command, env=os.environ | place))
    return max(abs(rank.wait()) for rank in ranks)


def judge_link(rate: str, steps: int) -> None:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("validate_attach: root, `ip` and `tc` are needed: network namespaces are made here")
    with linked_hosts(rate) as names:
        for name, arguments in CASES.items():
            command = [sys.executable, __file__, "ranks", *names, "--", "--steps", "400", *arguments.split()]
            tuned = paceline.attach(command, race=True, steps=steps, progress=False)
            print(f"\n{name}: {tuned.answer}", flush=True)
            for warning in tuned.warnings:
                print(f"  warning: {warning}")
            if tuned.buckets is None:
                continue
            # The chosen cap races again, with those that the prediction has not seen.
            chosen = [] if tuned.cap_mib is None else [round(tuned.cap_mib * MIB)]
            caps = list(dict.fromkeys([*parse_sizes(CAPS), *chosen]))
            truth = paceline.attach(command, race=True, steps=steps, caps=caps, progress=False)
            plans = truth.config["plans"]  # 0: the program's own
            measured = {round((plans[label] or 0) * MIB): r.timing.median_s for label, r in truth.raced.items()}
            errors, now = [], tuned.buckets.now.estimate.cuts
            for cap in caps:
                gain = tuned.buckets.model.estimate_gain(tuned.buckets.job.cut(cap), now)[0]
                predicted_s = tuned.step_s * (1 - gain)
                errors.append(abs(predicted_s / measured[cap] - 1))
                said = f"measured {format_ms(measured[cap])} ms, predicted {format_ms(predicted_s)} ms"
                print(f"  {format_bytes(cap)}: {said} ({predicted_s / measured[cap] - 1:+.1%})")
            regret = measured[next(iter(chosen), 0)] / min(measured.values()) - 1
            steps_of = f"at most {steps} + {4 + 140} steps"
            print(f"  verdict {tuned.verdict}; error {statistics.fmean(errors):.1%}, regret {regret:.1%}; {steps_of}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("overhead", "link", "ranks"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=48)
    if "ranks" in sys.argv[1:2]:  # what `link` starts
        place = sys.argv.index("--")
        sys.exit(run_on_hosts(sys.argv[2:place], sys.argv[place + 1 :]))
    asked = parser.parse_args()
    if asked.part == "overhead":
        measure_overhead(asked.rounds)
    else:
        judge_link(asked.rate, asked.steps)


if __name__ == "__main__":
    main()
