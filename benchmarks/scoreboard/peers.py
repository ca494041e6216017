"""Interpret the answers of other tools as their documentation recommends.

TraceML prints a verdict. HTA and torch.profiler produce tables that need interpretation: the rules below are the best
we found, and do not depend on the planted problem. Run `peers.py hta FOLDER` in an environment with HTA.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from score import Answer

# TraceML's verdicts, with all causes listed for them in its documentation.
TRACEML = {
    "INPUT_BOUND": ("data",), "INPUT_STRAGGLER": ("data",), "H2D_BOUND": ("copies",), "H2D_STRAGGLER": ("copies",),
    "COMPUTE_STRAGGLER": ("late rank", "uneven batches", "shared cores"),
    "STRAGGLER": ("late rank", "uneven batches", "shared cores"),
    "COMPUTE_BOUND": ("healthy",), "BALANCED": ("healthy",),
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": ("healthy",),
    "RESIDUAL_HEAVY": ("evaluation", "checkpoint", "collectives", "garbage collection"), "HIGH_PRESSURE": ("memory",),
}  # fmt: skip
_MUCH = 0.1  # fraction of a step that a reader of the profiler table would notice
_COMMUNICATION = ("gloo:", "nccl:", "c10d::", "record_param_comms", "DistributedDataParallel", "ProfilerStep")
_MANY_MESSAGES = 20


def read_traceml(summary: Mapping[str, Any]) -> Answer:
    """Read the primary diagnosis from `final_summary.json`."""
    found = summary.get("primary_diagnosis") or {}
    kind = str(found.get("kind") or "")
    text = str(found.get("summary") or "")
    named = re.search(r"\br(\d+)\b", text)  # "r1 waited 16.0 ms for input, compared with 0.2 ms on r0."
    rank = int(named[1]) if named and "STRAGGLER" in kind else None
    return Answer(TRACEML.get(kind, ()), rank, text=f"{kind}: {text}")


def read_profiler(tables: Sequence[Sequence[Mapping[str, Any]]]) -> Answer:
    """Look for a slow loader, a large difference between two ranks, a slow optimizer and slow messages, in this order.
    Each table lists the self times of one rank's operators."""
    ranks = [{row["name"]: row for row in table} for table in tables]
    steps = [next((row for name, row in rank.items() if name.startswith("ProfilerStep")), None) for rank in ranks]
    if not all(steps):
        return Answer()
    num_steps = steps[0]["count"]
    step_us = max(step["total_us"] for step in steps) / num_steps

    def share(rank: Mapping[str, Any], prefix: str, of: str = "self_us") -> float:
        found = sum(row[of] for name, row in rank.items() if name.startswith(prefix))
        return found / num_steps / step_us

    data = [share(rank, "enumerate(DataLoader", "total_us") for rank in ranks]
    if max(data) >= _MUCH:
        late = data.index(max(data)) if min(data) < max(data) / 2 else None
        return Answer(("data",), late, text=f"DataLoader: {max(data):.0%} of a step")
    names = {name for rank in ranks for name in rank if not name.startswith(_COMMUNICATION)}
    apart = {"": (0.0, 0)}
    for name in names:
        times = [rank.get(name, {"self_us": 0.0})["self_us"] / num_steps / step_us for rank in ranks]
        apart[name] = (max(times) - min(times), times.index(max(times)))
    worst = max(apart, key=lambda name: apart[name][0])
    if apart[worst][0] >= _MUCH:
        causes = ("late rank", "uneven batches", "shared cores")
        return Answer(causes, apart[worst][1], text=f"{worst}: {apart[worst][0]:.0%} of a step more on one rank")
    optimizer = max(share(rank, "Optimizer.step", "total_us") for rank in ranks)
    if optimizer >= 2 * _MUCH:
        return Answer(("optimizer",), text=f"Optimizer.step: {optimizer:.0%} of a step")
    sent = [row for prefix in ("gloo:all_reduce", "nccl:all_reduce") for row in _select(ranks[0], prefix)]
    messages = max(share(rank, "gloo:") + share(rank, "nccl:") for rank in ranks)
    if messages >= 2 * _MUCH:
        many = sum(row["count"] for row in sent) / num_steps > _MANY_MESSAGES
        causes = ("buckets", "collectives") if many else ("network", "compress", "backend", "batch")
        return Answer(causes, text=f"all_reduce: {messages:.0%} of a step")
    return Answer(("healthy",), text="nothing takes much of a step")


def _select(rank: Mapping[str, Any], prefix: str) -> list[Any]:
    return [row for name, row in rank.items() if name.startswith(prefix)]


def read_hta(found: Mapping[str, Any]) -> Answer:
    """Interpret HTA's temporal breakdown of the GPUs."""
    if found.get("error"):
        return Answer(text=f"no answer: {found['error']}")
    idle, overlap, communication = found["idle"], found["overlap"], found["communication"]
    if idle >= 2 * _MUCH:
        return Answer(("host", "launches", "synchronization", "data"), text=f"GPU idle for {idle:.0%}")
    if communication >= 2 * _MUCH:
        return Answer(("network", "compress", "buckets", "batch"), text=f"{overlap:.0%} of communication overlaps")
    return Answer(("healthy",), text=f"GPU idle for {idle:.0%}")


def analyse_hta(folder: Path) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    try:
        analysis = TraceAnalysis(trace_dir=str(folder / "traces"))
        times = analysis.get_temporal_breakdown(visualize=False)
        overlap = analysis.get_comm_comp_overlap(visualize=False)
        total = times["non_compute_time_pctg"].max() / 100
        first = {"idle": times["idle_time_pctg"].max() / 100, "communication": total}
        found = {name: float(value) for name, value in first.items()}
        found["overlap"] = float(overlap["comp_comm_overlap_pctg"].min()) / 100
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    known = all(value == value for value in found.values())
    return found if known else {"error": "no GPU kernels in the traces"}


if __name__ == "__main__":
    print(json.dumps(analyse_hta(Path(sys.argv[2]))))
