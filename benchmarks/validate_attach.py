#!/usr/bin/env python
"""Measure the overhead of attaching and the accuracy of `paceline tune -- COMMAND` over a link of 1 Gb/s.

    benchmarks/validate_attach.py overhead [--rounds 6] [--seconds 300]
    benchmarks/validate_attach.py link [--rate 1gbit] [--steps 48] [--rounds 3] [--judges 2] [--only wide,flat]

`overhead`: alternating runs of tests/scripts/plain_loop.py, plain and attached. Step times come from two lines in the
script's output, and exclude recorded steps. Run-to-run noise exceeds the overhead goal, so one more run of `--seconds`
alternates between a few steps with and without the attached calls, which yields thousands of pairs. Finally, the
script times the calls themselves, with the least noise but without their effect on other code.

`link`: the same program on two network namespaces with one rank each. The script tunes it, and then runs it twice with
alternating bucket sizes that the prediction has not seen. It scores the predicted steps relative to the program's own
buckets in the same run, and relative to the first run's step, which includes machine drift. The regret is the slowdown
of the chosen bucket size compared with the best one, each relative to the program's own buckets in the same round. A
case that mostly waits for data should be flat. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from limited_link import check_rights
from torch.optim import optimizer as hooked
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import paceline
from paceline.measure.observer import Observer, Settings
from paceline.predict.race import estimate_ratio
from paceline.report.observed import AttachedResult
from paceline.studies.fault_places import HOST_ADDRESS, HOST_PORT, link_hosts
from paceline.units import MIB, format_bytes, format_ms, parse_sizes

SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "plain_loop.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CASES = {
    "wide": "--width 768 --depth 8 --batch-size 32",
    "deep": "--width 384 --depth 24 --batch-size 32",
    "flat": "--width 256 --depth 4 --batch-size 32 --decode-ms 15",
}
TURN = 4  # steps; noise outlasts a turn, so turns should alternate quickly
JUDGED = 16  # steps before the comparison in a run that validates predictions
HOOKS = hooked._global_optimizer_pre_hooks, hooked._global_optimizer_post_hooks
CAPS = "256KiB,1MiB,4MiB,10MiB,25MiB"


def time_steps(variables: dict[str, str]) -> float:
    """Read the seconds per step from the program's output at steps 60 and 180."""
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


def measure_overhead(rounds: int, seconds: float) -> None:
    times: dict[str, list[float]] = {"plain": [], "attached": []}
    for number in range(rounds):
        for kind in list(times)[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                given = json.dumps({"folder": folder, "steps": 0, "warmup": 10, "record": 8})
                variables = {"PACELINE_ATTACH": given, "KINETO_LOG_LEVEL": "6"}
                times[kind].append(time_steps({} if kind == "plain" else variables))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    if rounds:
        show_ratio("alternating runs", times)
    command = [*TORCHRUN, __file__, "turns", "--seconds", f"{seconds:g}"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    show_ratio(f"turns of {TURN} steps in one run", found["times"])
    spent_s, step_s = statistics.median(found["spent_s"]), statistics.median(found["times"]["plain"])
    print(f"time in attached calls: {spent_s * 1e6:.1f} us per step, {spent_s / step_s:.3%} of it")


def show_ratio(what: str, times: dict[str, list[float]]) -> None:
    """Print the median of paired ratios and its 95 % interval, as in a plan comparison."""
    ratio, plain_s = estimate_ratio(times["attached"], times["plain"], 0.025), statistics.median(times["plain"])
    said = f"{ratio.value:.4f} times as long (95 %: {ratio.low:.4f} to {ratio.high:.4f})"
    print(f"{what}: {len(times['plain'])} pairs, {format_ms(plain_s)} ms per step; attached {said}")


class Cycled(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """An endless dataset that repeats a thousand samples."""

    def __init__(self) -> None:
        self.inputs, self.targets = torch.randn(1000, 256), torch.randint(0, 10, (1000,))

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index % 1000], self.targets[index % 1000]


def take_turns(seconds: float) -> None:
    """Run one rank: pairs of turns as in plain_loop.py, with and without the attached calls, in the same random order
    on all ranks; then steps that time those calls."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = iter(DataLoader(Cycled(), 32, sampler=itertools.count()))
    source, times = random.Random(7), {"plain": list[float](), "attached": list[float]()}

    def train(steps: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(steps):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return (time.perf_counter() - begin_s) / steps

    with tempfile.TemporaryDirectory() as folder:
        plain = Attached()
        Observer(Settings(folder, 0)).install()
        states = {"plain": plain, "attached": Attached()}
        train(20)
        step_s = torch.tensor([train(50)])
        dist.broadcast(step_s, 0)
        for _ in range(max(8, round(seconds / (2 * TURN * float(step_s))))):
            for kind in source.sample(list(times), 2):
                states[kind].switch_on()
                times[kind].append(train(TURN))
        plain.switch_on()
        spent_s = time_calls(folder, train)
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "spent_s": spent_s}))
    dist.destroy_process_group()


class Attached:
    """The current values of all torch attributes that attaching changes."""

    def __init__(self) -> None:
        self._hooks = [dict(each) for each in HOOKS]
        self._next = _BaseDataLoaderIter.__next__

    def switch_on(self) -> None:
        _BaseDataLoaderIter.__next__ = self._next  # type: ignore[method-assign]
        for each, own in zip(HOOKS, self._hooks, strict=True):
            each.clear()
            each.update(own)


def time_calls(folder: str, train: Callable[[int], float]) -> list[float]:
    """Measure the seconds per step, over 300 steps, spent in attached code: the hooks, and the loader minus the calls
    that it wraps."""
    clock, spent = time.perf_counter, [0.0]

    def timed(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin_s = clock()
            try:
                return function(*args)
            finally:
                spent[0] += sign * (clock() - begin_s)

        return call

    _BaseDataLoaderIter.__next__ = timed(_BaseDataLoaderIter.__next__, -1)  # type: ignore[method-assign]
    Observer(Settings(folder, 0)).install()
    _BaseDataLoaderIter.__next__ = timed(_BaseDataLoaderIter.__next__, 1)  # type: ignore[method-assign]
    for each in HOOKS:
        each.update({key: timed(hook, 1) for key, hook in each.items()})
    train(10)
    found = []
    for _ in range(300):
        spent[0] = 0.0
        train(1)
        found.append(spent[0])
    return found


def run_on_hosts(names: list[str], arguments: list[str]) -> int:
    """Start one rank of the program in each namespace, as a launcher would."""
    ranks = []
    for rank, name in enumerate(names):
        place = {
            "MASTER_ADDR": f"{HOST_ADDRESS}.1", "MASTER_PORT": str(HOST_PORT), "RANK": str(rank),
            "WORLD_SIZE": str(len(names)), "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable, str(SCRIPT), *arguments]
        ranks.append(subprocess.Popen(command, env=os.environ | place))
    return max(abs(rank.wait()) for rank in ranks)


def judge_link(rate: str, steps: int, rounds: int, judges: int, only: list[str]) -> None:
    check_rights()
    tuned: dict[str, list[AttachedResult]] = {name: [] for name in only}
    chosen: dict[str, list[tuple[int, ...]]] = {name: [] for name in only}  # as bucket bytes
    # For each bucket size: its turns, and those of the program's own buckets in the same rounds.
    turns: dict[str, dict[tuple[int, ...], tuple[list[float], list[float]]]] = {name: {} for name in only}
    errors: dict[str, list[float]] = {name: [] for name in only}
    late: dict[str, list[float]] = {name: [] for name in only}  # relative to the first run's step
    with link_hosts(rate) as names:
        for number, name in itertools.product(range(rounds), only):
            command = [sys.executable, __file__, "ranks", *names, "--", "--steps", "400", *CASES[name].split()]
            found = paceline.attach(command, race=True, steps=steps, progress=False)
            print(f"\n{name}, round {number + 1}: {found.answer}", flush=True)
            for warning in found.warnings:
                print(f"  warning: {warning}")
            tuned[name].append(found)
            # Compare the chosen cap again, together with caps that the prediction has not seen.
            own = round((found.cap_mib or 0) * MIB)  # 0: the program's own buckets
            caps = list(dict.fromkeys([*parse_sizes(CAPS), *filter(None, [own])]))
            for _ in range(judges):
                truth = paceline.attach(command, race=True, steps=JUDGED, caps=caps, progress=False)
                raced = {round((truth.config["plans"][label] or 0) * MIB): r for label, r in truth.raced.items()}
                own_s = raced[0].timing.median_s
                for cap, record in raced.items():
                    measured_s, gain = record.timing.median_s, 0.0
                    mine, theirs = turns[name].setdefault(record.bucket_bytes, ([], []))
                    mine.extend(record.turns_s)
                    theirs.extend(raced[0].turns_s)
                    if cap and found.buckets is not None:
                        model, now = found.buckets.model, found.buckets.now
                        gain = model.compare(model.predict(found.buckets.job.cut(cap)), now).saved[0]
                    error, with_change = ((1 - gain) * base_s / measured_s - 1 for base_s in (own_s, found.step_s))
                    if cap:  # the prediction has seen the program's own buckets
                        errors[name].append(error)
                        late[name].append(with_change)
                    said = f"measured {format_ms(measured_s)} ms, predicted {format_ms((1 - gain) * own_s)} ms"
                    said += f" ({error:+.1%}; from the first run {with_change:+.1%})"
                    print(f"  {format_bytes(cap) if cap else 'own buckets'}: {said}", flush=True)
            chosen[name].append(raced[own].bucket_bytes)
    for name in only:
        ratios = {layout: estimate_ratio(*both, 0.025) for layout, both in turns[name].items()}
        best = min(ratios, key=lambda layout: ratios[layout].value)
        regrets = [ratios[layout].value / ratios[best].value - 1 for layout in chosen[name]]
        num_steps = max(steps + (4 + found.race.num_rounds * 10 if found.race else 0) for found in tuned[name])
        verdicts = ", ".join(found.verdict for found in tuned[name])
        spread = f"{min(errors[name]):+.1%} to {max(errors[name]):+.1%}"
        print(f"\n{name}: verdicts {verdicts}; at most {num_steps} steps")
        print(f"  error {statistics.fmean(map(abs, errors[name])):.1%} of {len(errors[name])} steps, {spread}")
        print(f"  error {statistics.fmean(map(abs, late[name])):.1%} relative to the first run's step")
        print(f"  regret {statistics.fmean(regrets):.1%}, at most {max(regrets):.1%}")
        for layout, ratio in ratios.items():
            is_chosen = f", chosen {chosen[name].count(layout)} times" if layout in chosen[name] else ""
            said = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of its own buckets{is_chosen}"
            print(f"  {len(layout)} buckets: {said}, {len(turns[name][layout][0])} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("overhead", "link", "ranks", "turns"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=None, help="default: 6 for overhead, 3 for link")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--judges", type=int, default=2, help="number of runs to check each tuning")
    if "ranks" in sys.argv[1:2]:  # started by `link`
        place = sys.argv.index("--")
        sys.exit(run_on_hosts(sys.argv[2:place], sys.argv[place + 1 :]))
    asked = parser.parse_args()
    if asked.part == "overhead":
        measure_overhead(6 if asked.rounds is None else asked.rounds, asked.seconds)
    elif asked.part == "turns":  # started by `overhead`
        take_turns(asked.seconds)
    else:
        judge_link(asked.rate, asked.steps, asked.rounds or 3, asked.judges, asked.only.split(","))


if __name__ == "__main__":
    main()
