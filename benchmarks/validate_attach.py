#!/usr/bin/env python
"""What does attaching to a program cost, and how right is `paceline tune -- COMMAND` over a link of 1 Gb/s?

    benchmarks/validate_attach.py overhead [--rounds 8]
    benchmarks/validate_attach.py link [--rate 1gbit] [--steps 48] [--rounds 3] [--only wide,flat]

`overhead`: runs of tests/scripts/plain_loop.py in turns, plain and attached; the time of its steps is that between two
lines that it prints itself. The steps that are recorded are not among them. Runs differ more than that, so in one more
run, of the same training, steps take turns with and without what attaching puts around them.
`link`: the same program on two network namespaces, one rank on each. It is tuned first; then it runs with a range of
bucket sizes in turns, which the prediction has not seen: the error of the predicted steps, and how much longer than
the best of them the chosen one takes, by all rounds. A case that mostly waits for its data should be flat. Needs root,
`ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
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
from paceline.report.attached import AttachedResult
from paceline.units import MIB, format_bytes, format_ms, parse_sizes

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "plain_loop.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CASES = {
    "wide": "--width 768 --depth 8 --batch-size 32",
    "deep": "--width 384 --depth 24 --batch-size 32",
    "flat": "--width 256 --depth 4 --batch-size 32 --decode-ms 15",
}
NUM_TURNS, TURN = 200, 20  # of steps, in one run
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
    done = subprocess.run([*TORCHRUN, __file__, "turns"], check=True, stdout=subprocess.PIPE, text=True)
    show_ratios(times)
    print("turns of steps in one run:")
    show_ratios(json.loads(done.stdout))


def show_ratios(times: dict[str, list[float]]) -> None:
    for kind, seconds in times.items():
        ratio = compare_times(seconds, times["plain"])
        print(f"{kind}: {format_ms(statistics.median(seconds))} ms a step, {ratio.value:.4f} ± {ratio.noise or 0:.4f}")


def take_turns() -> None:
    """One rank: turns of steps as in plain_loop.py, with and without what attaching puts around them."""
    import torch
    import torch.distributed as dist
    from torch.optim import optimizer as hooked
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from paceline.measure.attach import Observer, Settings

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(32 * NUM_TURNS * TURN, 256), torch.randint(0, 10, (32 * NUM_TURNS * TURN,)))
    batches, originals = iter(DataLoader(data, 32)), _BaseDataLoaderIter.__next__
    times: dict[str, list[float]] = {"plain": [], "attached": []}
    with tempfile.TemporaryDirectory() as folder:
        Observer(Settings(folder, 0)).install()
        hooks = [hooked._global_optimizer_pre_hooks, hooked._global_optimizer_post_hooks]
        known, observed = [dict(each) for each in hooks], _BaseDataLoaderIter.__next__
        for number in range(NUM_TURNS):
            kind = list(times)[(number + number // 2) % 2]
            _BaseDataLoaderIter.__next__ = observed if kind == "attached" else originals  # type: ignore[method-assign]
            for each, own in zip(hooks, known, strict=True):
                each.clear()
                each.update(own if kind == "attached" else {})
            begin_s = time.perf_counter()
            for _ in range(TURN):
                inputs, targets = next(batches)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            if number >= NUM_TURNS // 10:
                times[kind].append((time.perf_counter() - begin_s) / TURN)
    if dist.get_rank() == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


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


def judge_link(rate: str, steps: int, rounds: int, only: list[str]) -> None:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("validate_attach: root, `ip` and `tc` are needed: network namespaces are made here")
    tuned: dict[str, list[AttachedResult]] = {name: [] for name in only}
    chosen: dict[str, list[tuple[int, ...]]] = {name: [] for name in only}  # their buckets
    measured: dict[str, dict[tuple[int, ...], list[float]]] = {name: {} for name in only}  # by buckets
    errors: dict[str, list[float]] = {name: [] for name in only}
    ratios: dict[str, list[float]] = {name: [] for name in only}  # errors of the ratio to its own buckets
    with linked_hosts(rate) as names:
        for number, name in itertools.product(range(rounds), only):
            command = [sys.executable, __file__, "ranks", *names, "--", "--steps", "400", *CASES[name].split()]
            found = paceline.attach(command, race=True, steps=steps, progress=False)
            print(f"\n{name}, round {number + 1}: {found.answer}", flush=True)
            for warning in found.warnings:
                print(f"  warning: {warning}")
            tuned[name].append(found)
            # The chosen cap races again, with those that the prediction has not seen.
            own = round((found.cap_mib or 0) * MIB)  # 0: the program's own buckets
            caps = list(dict.fromkeys([*parse_sizes(CAPS), *filter(None, [own])]))
            truth = paceline.attach(command, race=True, steps=steps, caps=caps, progress=False)
            raced = {round((truth.config["plans"][label] or 0) * MIB): r for label, r in truth.raced.items()}
            chosen[name].append(raced[own].bucket_bytes)
            for cap, record in raced.items():
                timing, gain = record.timing, 0.0
                measured[name].setdefault(record.bucket_bytes, []).extend(timing.reduced_s)
                if cap and found.buckets is not None:
                    now = found.buckets.now.estimate.cuts
                    gain = found.buckets.model.estimate_gain(found.buckets.job.cut(cap), now)[0]
                error = found.step_s * (1 - gain) / timing.median_s - 1
                if cap:  # its own buckets were seen
                    errors[name].append(error)
                    ratios[name].append((1 - gain) * raced[0].timing.median_s / timing.median_s - 1)
                said = f"measured {format_ms(timing.median_s)} ms, predicted {format_ms(found.step_s * (1 - gain))} ms"
                print(f"  {format_bytes(cap) if cap else 'as it is'}: {said} ({error:+.1%})", flush=True)
    for name in only:
        medians = {layout: statistics.median(times) for layout, times in measured[name].items()}
        least, most = min(medians.values()), max(medians.values())
        regrets = [medians[layout] / least - 1 for layout in chosen[name]]
        num_steps = max(steps + (4 + found.race.num_rounds * 10 if found.race else 0) for found in tuned[name])
        verdicts = ", ".join(found.verdict for found in tuned[name])
        spread = f"{min(errors[name]):+.1%} to {max(errors[name]):+.1%}"
        print(f"\n{name}: verdicts {verdicts}; at most {num_steps} steps")
        print(f"  error {statistics.fmean(map(abs, errors[name])):.1%} of {len(errors[name])} steps, {spread}")
        print(f"  error {statistics.fmean(map(abs, ratios[name])):.1%} of the ratios to its own buckets, in turns")
        print(f"  regret {statistics.fmean(regrets):.1%}, at most {max(regrets):.1%}")
        print(f"  measured from {format_ms(least)} to {format_ms(most)} ms a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("overhead", "link", "ranks", "turns"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=0, help="8 of overhead, 3 of link")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=48)
    if "ranks" in sys.argv[1:2]:  # what `link` starts
        place = sys.argv.index("--")
        sys.exit(run_on_hosts(sys.argv[2:place], sys.argv[place + 1 :]))
    asked = parser.parse_args()
    if asked.part == "overhead":
        measure_overhead(asked.rounds or 8)
    elif asked.part == "turns":  # what `overhead` starts
        take_turns()
    else:
        judge_link(asked.rate, asked.steps, asked.rounds or 3, asked.only.split(","))


if __name__ == "__main__":
    main()
