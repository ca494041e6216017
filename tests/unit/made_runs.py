"""Synthetic training runs of several ranks over a network, with or without a problem."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

from matplotlib.text import Text

from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.records.training import CONFIG_FILE, METRICS_FILE, MetricsLog
from paceline.report.training_result import TrainRunResult, render_config
from paceline.units import KIB, MIB


def list_texts(figure):
    """All text in a figure, without rendering it."""
    return {found.get_text() for found in figure.findobj(Text)}


CONFIG = {"model": "gpt2-tiny", "data": "synthetic", "wrapper": "paceline", "backend": "gloo", "device": "cpu",
          "ranks": 2, "epochs": 1, "steps": 40, "batch_size": 8}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """Seconds of each part of a step; gradients become ready at an even rate. `cuts` are the ends of the buckets."""

    forward_s: float = 0.030
    backward_s: float = 0.060
    after_s: float = 0.006
    wait_s: float = 0.0004
    late_s: float = 0.0  # for the last rank
    sizes: tuple[int, ...] = (MIB,) * 16
    cuts: tuple[int, ...] = (4, 8, 12, 15, 16)
    latency_s: float = 2e-4
    bandwidth: float = 2e9
    where: tuple[str, str] = ("nccl", "cuda")


# For each problem, two runs and the expected verdict.
PLANTED = {
    "data, little": ("data", Job(wait_s=0.02)),
    "data, most of the step": ("data", Job(wait_s=0.5)),
    "late rank, little": ("late rank", Job(late_s=0.02)),
    "late rank, much": ("late rank", Job(late_s=0.2)),
    "one bucket": ("buckets", Job(sizes=(4 * MIB,) * 8, cuts=(8,), bandwidth=1.5e9)),
    "a bucket for each gradient": (
        "buckets",
        Job(sizes=(64 * KIB,) * 96, cuts=tuple(range(1, 97)), latency_s=1.5e-3, where=("gloo", "cpu")),
    ),
    "tiny batch": ("batch", Job(forward_s=0.004, backward_s=0.008, bandwidth=3e8)),
    "tiny batch, slow network": ("batch", Job(forward_s=0.010, backward_s=0.020, bandwidth=1e8)),
    "exposed, short backward": ("network", Job(forward_s=0.1, backward_s=0.02, bandwidth=3.4e8)),
    "exposed, long forward": ("network", Job(forward_s=0.4, backward_s=0.05, bandwidth=1e8)),
}


def make_rows(job=Job(), steps=40, ranks=2, seed=0, recorded=(2, 3, 4, 5, 34)):
    source, rows = random.Random(seed), []
    ends = [sum(job.sizes[:cut]) for cut in (0, *job.cuts)]
    for step in range(1, steps + 1):
        vary = [source.gauss(1.0, 0.004) for _ in range(ranks)]
        late = [job.late_s if rank == ranks - 1 else 0.0 for rank in range(ranks)]
        before = [(job.wait_s + job.forward_s) * one + more for one, more in zip(vary, late, strict=True)]
        backward = [job.backward_s * one for one in vary]
        ready = [[b * min(1.0, end / ends[-1]) for end in ends[1:]] for b in backward]
        # A message starts once every rank has launched it; times are relative to the start of the step.
        free, done = 0.0, []
        for number, (first, last) in enumerate(itertools.pairwise(ends)):
            launched = max(before[rank] + ready[rank][number] for rank in range(ranks))
            free = max(free, launched) + job.latency_s + (last - first) / job.bandwidth
            done.append(free)
        over = [max(free, before[rank] + backward[rank]) for rank in range(ranks)]
        took = [round(end + job.after_s, 6) for end in over]
        exposed = [round(over[rank] - before[rank] - backward[rank], 6) for rank in range(ranks)]
        waits = [round(job.wait_s * one, 6) for one in vary]
        row = {
            "step": step, "epoch": 0, "loss": 2.0 / step, "accuracy": None, "samples": 16, "lr": 0.1,
            "exposed_comm_s": sum(exposed) / ranks, "step_s": max(took), "data_wait_s": max(waits),
            "ranks": {"step_s": took, "data_wait_s": waits, "exposed_comm_s": exposed},
        }  # fmt: skip
        if step in recorded:
            row["messages"] = [
                {"backend": job.where[0], "device": job.where[1], "host": "box", "before_s": before[rank],
                 "backward_s": backward[rank],
                 "over_s": over[rank] - before[rank], "ready_s": ready[rank], "launch_s": ready[rank],
                 "gradient_bytes": [list(job.sizes[a:b]) for a, b in zip((0, *job.cuts), job.cuts, strict=False)],
                 "done_s": [moment - before[rank] for moment in done]}
                for rank in range(ranks)
            ]  # fmt: skip
        rows.append(row)
    rows[-1] |= {"test_loss": 0.5, "test_accuracy": 0.75, "test_samples": 400}
    return rows


def make_result(rows, ranks=2, **config):
    outcome = {"steps": rows[-1]["step"], "world_size": ranks, "backend": "gloo", "device": "cpu", "num_parameters": 9}
    run = Run("train", {**CONFIG, "ranks": ranks, **config, "outcome": outcome}, capture_environment(), ())
    return TrainRunResult(run, None, rows)


def make_folder(folder: Path, rows, ranks=2, ended=True, **config) -> Path:
    """The files of a run; with `ended=False`, no outcome is written."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = {"steps": rows[-1]["step"], "world_size": ranks, "backend": "gloo", "device": "cpu"} if ended else None
    settings = {**CONFIG, "ranks": ranks, **config}
    (folder / CONFIG_FILE).write_text(render_config(settings, capture_environment(), outcome))
    log = MetricsLog(folder / METRICS_FILE)
    log.append(*rows)
    log.close()
    return folder


def note_end(folder: Path, text: str) -> None:
    document = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(document | {"end": text}))
