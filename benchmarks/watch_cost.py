#!/usr/bin/env python
"""Measure a page's size and load time; for a live page, its delay and its overhead per step.

    benchmarks/watch_cost.py [page] [live] [--seconds 240]

`page`: a synthetic run of 10,000 steps on 8 ranks, with incompressible times, in headless Chromium.
`live`: `paceline train` on two ranks with `paceline watch`, with the page open in Chromium. A step's delay is the time
from its row in the run's file, which ranks write every quarter of a second, to its text on the page. For the overhead,
the script alternately suspends the watcher (SIGSTOP) and resumes it, for two seconds each, and compares steps with
those in the pauses around them; this part reads only the event stream. Two busy cores increase both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.browser import CHROMIUM, Browser
from tests.unit.made_runs import make_folder, make_rows

from paceline.predict.race import estimate_ratio
from paceline.records.training import METRICS_FILE, load_metrics
from paceline.verbs.report import save_report

TRAIN = ("train", "--model", "cnn", "--ranks", "2", "--threads", "1", "--steps", "1000000", "--backend", "gloo",
         "--batch-size", "16")  # fmt: skip
TURN_S, LEAST = 2.0, 8


def measure_page(place: Path) -> None:
    draw = random.Random(0)
    rows = make_rows(steps=10_000, ranks=8)
    for row in rows:
        row["loss"] = draw.gauss(2.0, 0.1)
        for times in row["ranks"].values():
            times[:] = [round(seconds * draw.uniform(0.8, 1.2), 6) for seconds in times]
    page = save_report([make_folder(place / "large", rows, ranks=8)]).page
    assert page is not None
    took = []
    if CHROMIUM:
        with Browser() as browser:
            for _ in range(5):
                browser.open(f"file://{page}")
                took.append(browser.evaluate("performance.mark('now').startTime") / 1e3)
    soon = f"ready {statistics.median(took):.2f} s after opening" if took else "Chromium is not installed"
    print(f"page of 10,000 steps on 8 ranks: {page.stat().st_size / 1e6:.2f} MB; {soon}")


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-m", "paceline", *command], stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_steps(folder: Path, count: int) -> None:
    until_s = time.monotonic() + 120
    while not list(folder.glob(f"*/{METRICS_FILE}")) or len(load_metrics(find_metrics(folder))) < count:
        if time.monotonic() > until_s:
            raise SystemExit("the run takes no steps")
        time.sleep(0.2)


def find_metrics(folder: Path) -> Path:
    return next(folder.glob(f"*/{METRICS_FILE}"))


def read_last(file: Path) -> int:
    """Read the file's last step."""
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - 60_000))
        return int(re.findall(rb'\n\{"step": (\d+)', opened.read())[-1])


def measure_lateness(file: Path, address: str, seconds: float) -> list[float]:
    """Measure the seconds from a step's row in the file to its text on the page, for a few steps."""
    late = []
    with Browser() as browser:
        browser.open(address)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            step, begin_s = read_last(file), time.monotonic()
            while read_last(file) == step:
                time.sleep(0.005)
            step, begin_s = read_last(file), time.monotonic()
            said = "Number(document.getElementById('status').textContent.match(/step (\\d+)/)?.[1] ?? 0)"
            while browser.evaluate(said) < step:
                time.sleep(0.01)
            late.append(time.monotonic() - begin_s)
    return late


def measure_cost(file: Path, watcher: subprocess.Popen[str], seconds: float) -> str:
    ends, is_stopped = [(read_last(file), False)], False
    begin_s, used_s = time.monotonic(), sum(psutil.Process(watcher.pid).cpu_times()[:2])
    until_s = begin_s + seconds
    while time.monotonic() < until_s:
        time.sleep(TURN_S)
        is_stopped = not is_stopped
        watcher.send_signal(signal.SIGSTOP if is_stopped else signal.SIGCONT)
        ends.append((read_last(file), is_stopped))
    used_s, took_s = sum(psutil.Process(watcher.pid).cpu_times()[:2]) - used_s, time.monotonic() - begin_s
    times = {row["step"]: row["step_s"] for row in load_metrics(file)}
    turns = []
    for (first, is_off), (last, _) in itertools.pairwise(ends):
        # Rows reach the file up to a quarter of a second after their step, so rows at the ends of a turn may belong to
        # the other kind.
        width = (last - first) // 5
        steps = sorted(times[step] for step in range(first + width, last - width))
        if len(steps) > LEAST:
            turns.append((is_off, statistics.fmean(steps[: int(0.9 * len(steps))])))  # drop outliers
    pairs = [(b[1], (a[1] + c[1]) / 2) for a, b, c in zip(turns, turns[1:], turns[2:], strict=False)
             if not b[0] and a[0] and c[0]]  # fmt: skip
    if len(pairs) < LEAST:
        raise SystemExit(f"only {len(pairs)} pairs of turns had more than {LEAST} steps: increase --seconds")
    ratio = estimate_ratio([on for on, _ in pairs], [off for _, off in pairs], 0.025)
    found = f"{ratio.value - 1:+.2%} [{ratio.low - 1:+.2%}, {ratio.high - 1:+.2%}] of a step, 95 %, {len(pairs)} pairs"
    return f"{found}; CPU time is {2 * used_s / took_s:.2%} of the time while it runs"


def measure_live(place: Path, seconds: float) -> None:
    with started(*TRAIN, "--out", str(place / "runs")):
        wait_for_steps(place / "runs", 50)
        file = find_metrics(place / "runs")
        with started("watch", str(file.parent), "--no-browser") as watcher:
            assert watcher.stderr is not None
            address = re.findall(r"http://\S+", watcher.stderr.readline())[0]
            if CHROMIUM:
                late = measure_lateness(file, address, min(40.0, seconds / 4))
                print(f"a step appears {statistics.median(late):.2f} s after its row was written, at most "
                      f"{max(late):.2f} s ({len(late)} steps); ranks write every 0.25 s")  # fmt: skip
            base, _, query = address.partition("?")
            place_s = file.stat().st_size
            stream = urllib.request.urlopen(f"{base}events?{query}&from={place_s}")
            threading.Thread(target=stream.read, daemon=True).start()
            print(f"overhead of watching: {measure_cost(file, watcher, seconds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["page", "live"], choices=["page", "live"])
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # run the cleanup that ends child processes
    with tempfile.TemporaryDirectory() as folder:
        if "page" in args.parts:
            measure_page(Path(folder))
        if "live" in args.parts:
            measure_live(Path(folder), args.seconds)


if __name__ == "__main__":
    main()
