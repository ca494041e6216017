#!/usr/bin/env python
"""Score `paceline predict --trace`: trace a stock DDP job at one bucket size, predict other sizes, and measure them.

    benchmarks/validate_traces.py [OUT] [--only NAME] [--rounds N]

The job is torch's own DistributedDataParallel on two gloo ranks with one thread each; no Paceline code runs in a step.
Writes the prediction before timing any other bucket size; then all sizes alternate in random order. Profiling slows
steps, so also prints the error of the ratio to the traced bucket size. Takes about four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import paceline

STEPS, WARMUP, TURN = 20, 5, 4


def build_mlp() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = itertools.chain.from_iterable((torch.nn.Linear(768, 768), torch.nn.ReLU()) for _ in range(10))
    return torch.nn.Sequential(*layers), torch.randn(32, 768)


def build_wide() -> tuple[torch.nn.Module, torch.Tensor]:
    """Build a model with gradients of large layers ready first and of small ones last, as in most image networks."""
    widths = (256, 256, 512, 512, 1024, 2048, 2048)
    layers = itertools.chain.from_iterable(
        (torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(widths)
    )
    return torch.nn.Sequential(*layers), torch.randn(64, 256)


def build_transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 64, 256)


def build_convolutions() -> tuple[torch.nn.Module, torch.Tensor]:
    widths = (3, 32, 64, 128, 256, 256)
    layers = [
        layer for a, b in itertools.pairwise(widths)
        for layer in (torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    ]  # fmt: skip
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(256, 1024)), torch.randn(8, 3, 32, 32)


# For each case: the model, the traced bucket size in MiB, and the sizes to predict.
CASES: dict[str, tuple[Any, float, tuple[float, ...]]] = {
    "mlp": (build_mlp, 5.0, (1.0, 2.5, 10.0, 25.0)),
    "mlp, traced at 25": (build_mlp, 25.0, (1.0, 2.5, 5.0, 10.0)),
    "wide": (build_wide, 4.0, (0.5, 2.0, 12.0, 32.0)),
    "transformer": (build_transformer, 4.0, (0.25, 1.0, 8.0, 25.0)),
    "convolutions": (build_convolutions, 1.0, (0.1, 0.5, 2.0, 8.0)),
}


def run_case(name: str, folder: str, rounds: int) -> dict[str, Any] | None:
    """Trace, predict and measure; rank 0 returns the predictions and measurements. Collective: call on every rank."""
    build, traced_cap, other_caps = CASES[name]
    with paceline.init("gloo", announce=None) as world:
        torch.set_num_threads(1)
        torch.manual_seed(world.rank)
        net, inputs = build()
        caps, jobs = (traced_cap, *other_caps), []
        for cap in caps:
            model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=cap)
            jobs.append((model, torch.optim.SGD(model.parameters(), lr=1e-3)))

        def step(number: int) -> None:
            model, optimizer = jobs[number]
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for number in [n for n in range(len(caps)) for _ in range(WARMUP)]:
            step(number)
        file = Path(folder) / f"trace-rank-{world.rank}.json"
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for _ in range(STEPS):
                step(0)
        profiler.export_chrome_trace(str(file))
        dist.barrier()
        found: list[Any] = [None]
        if world.rank == 0:
            files = sorted(Path(folder).glob("trace-rank-*.json"))
            found = [{str(len(some)): predict(some, caps) for some in (files[:1], files)}]
        dist.broadcast_object_list(found)  # all ranks wait for the prediction before timing
        seconds: dict[int, list[float]] = {number: [] for number in range(len(caps))}
        source = random.Random(1)
        for _ in range(rounds):
            for number in source.sample(range(len(caps)), len(caps)):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(TURN):
                    step(number)
                seconds[number].append((time.perf_counter() - begin) / TURN)
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, seconds)
        buckets = [model._get_ddp_logging_data()["rebuilt_bucket_sizes"] for model, _ in jobs]
        if world.rank:
            return None
        slowest = [[max(times) for times in zip(*(one[n] for one in everyone), strict=True)] for n in range(len(caps))]
        return {"name": name, "caps": caps, "buckets": buckets, "measured_s": slowest, "predicted": found[0]}


def predict(files: list[Path], caps: tuple[float, ...]) -> dict[str, Any]:
    result = paceline.predict_trace(files)
    rows = []
    for cap in caps:
        cuts = result.job.cut(int(cap * 2**20))
        estimate = result.model.predict(cuts)
        sizes = [bucket.num_bytes for bucket in estimate.step.buckets]
        rows.append({"step_s": estimate.step_s, "low_s": estimate.low_s, "high_s": estimate.high_s, "sizes": sizes})
    plain = {"rows": rows, "answer": result.answer, "self_check": result.traced.fit.error}
    return plain | {"hash": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]}


def render(found: list[dict[str, Any]]) -> str:
    """Render a table of all bucket sizes and the scores of each case."""
    head = "case, traces, bucket_cap_mb, buckets, measured (ms), predicted (ms), 90 % (ms), error, error of the ratio"
    judged = "case, traces, MAPE, MAPE of the ratios, in the 90 %, best measured, predicted best, regret, hash"
    lines, scores = ([f"| {one.replace(', ', ' | ')} |", "|---|" + "--:|" * 8] for one in (head, judged))
    for case, (traces, predicted) in [(one, item) for one in found for item in one["predicted"].items()]:
        medians, rows = [statistics.median(times) for times in case["measured_s"]], predicted["rows"]
        errors, ratios, inside = [], [], []
        for number, (cap, measured_s, row) in enumerate(zip(case["caps"], medians, rows, strict=True)):
            error = row["step_s"] / measured_s - 1
            ratio = row["step_s"] / rows[0]["step_s"] / (measured_s / medians[0]) - 1
            if number:
                errors, ratios = [*errors, abs(error)], [*ratios, abs(ratio)]
                inside.append(row["low_s"] <= measured_s <= row["high_s"])
            label = f"{cap:g}{'' if number else ', traced'}"
            lines.append(
                f"| {case['name']} | {traces} | {label} | {len(row['sizes'])} | {measured_s * 1e3:.2f} | "
                f"{row['step_s'] * 1e3:.2f} | {row['low_s'] * 1e3:.2f} to {row['high_s'] * 1e3:.2f} | {error:+.1%} | "
                f"{ratio:+.1%} |"
            )
        best = min(range(len(medians)), key=lambda number: medians[number])
        chosen = min(range(len(rows)), key=lambda number: rows[number]["step_s"])
        scores.append(
            f"| {case['name']} | {traces} | {statistics.fmean(errors):.1%} | {statistics.fmean(ratios):.1%} | "
            f"{sum(inside)} of {len(inside)} | {case['caps'][best]:g} | {case['caps'][chosen]:g} | "
            f"{medians[chosen] / medians[best] - 1:.1%} | {predicted['hash']} |"
        )
    return "\n".join([*scores, "", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", default="runs/validate-traces", type=Path)
    parser.add_argument("--only", default="", help="run only cases with this text in their names")
    parser.add_argument("--rounds", default=30, type=int, help="number of turns per bucket size")
    asked = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    found = []
    for number, name in enumerate(name for name in CASES if asked.only in name):
        folder = asked.out / f"case-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        found.append(paceline.run_ranks(run_case, 2, (name, str(folder), asked.rounds))[0])
        print(name, found[-1]["predicted"]["2"]["answer"], flush=True)
    (asked.out / "found.json").write_text(json.dumps(found))
    text = f"{platform.processor() or platform.machine()}, torch {torch.__version__}\n\n{render(found)}"
    (asked.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
