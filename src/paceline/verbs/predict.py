"""`paceline.predict`: the cost of a step elsewhere and the productive time of a job under faults. Needs no torch."""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import ConfigError, RecordError, refuse
from paceline.machine import canonical_backend
from paceline.records import (
    CapTimeRecord,
    CodecRecord,
    CollectiveRecord,
    LayerProfileRecord,
    Record,
    StepRecord,
    Summary,
    TracedStepRecord,
)
from paceline.records.environment import capture_environment
from paceline.records.exchange import (
    list_collectives,
    load_cap_times,
    load_layer_sizes,
    load_layer_times,
    load_table,
)
from paceline.records.findings import find_doubts, is_busy
from paceline.records.kinds import COSTS, CostRecord, FaultRecord
from paceline.records.store import Run, create_folder, is_run_path, load_run, naming_damage, pause_collection
from paceline.records.training import count_usable_ranks, pick_like_last
from paceline.strategy import parse_strategies
from paceline.units import parse_duration, parse_size

if TYPE_CHECKING:
    from paceline.report.fault_policies import GoodputResult
    from paceline.report.observed import TracedResult
    from paceline.report.outlook import OutlookResult
    from paceline.report.predictions import CapsResult, PredictResult
    from paceline.report.result import Result
    from paceline.report.strategy_steps import StrategyStepsResult

Place = str | Path | None
R = TypeVar("R", bound="Result")


@naming_damage()
def predict(
    profile: Result | str | Path, *, network: str | None = None, ranks: int | Sequence[int] = (8, 64, 1024, 16384),
    allreduce: Result | Place = None, backend: str | None = None, ranks_per_node: int | None = None,
    inside: str | None = None, algorithm: str = "auto", accumulate: int = 1, gradients: str | None = None,
    straggler: str = "0%", slow_rank: str = "0%", strategy: str | Sequence[str] | None = None, out: Place = None,
) -> PredictResult | StrategyStepsResult:  # fmt: skip
    """What will a step cost? Predicts steps on networks x ranks from a profile of layers, with 90 % intervals.

    Args:
        profile: A result of `paceline.profile`, or the folder of a run of `profile layers`.
        network: nvlink, pcie4, hdr, 100gbe, 10gbe, ..., bandwidth and latency (10Gb/s,50us), or a measured cluster:
            a100-hdr, h100-rdma, gh200-slingshot, ...
        ranks: One or more numbers of ranks.
        allreduce: A measured sweep (a run, nccl-tests text or JSON, or a CSV), scaled beyond its ranks.
        backend: The backend to use from the sweep.
        ranks_per_node: Number of ranks that share a node and its link. Default: 1, or as in the sweep.
        inside: The network inside a node. Default: the sweep, if there is also a network, else nvlink.
        algorithm: auto, ring, tree, two-level, gloo or shared.
        accumulate: Micro-batches per step.
        gradients: fp32 or bf16. Default: as in the profile.
        straggler: Variation between ranks: 3% (standard deviation), or profile to use the measured one.
        slow_rank: One rank is always slower than the others by this fraction: 20%.
        strategy: Compare strategies, each with its best buckets: "all", or a list ("bf16,int8").
        out: Save the run in a new subfolder of this folder.

    Returns:
        A `PredictResult`; with `strategy`, a `StrategyStepsResult`.
    """
    from paceline.predict.curves import check_algorithm
    from paceline.predict.strategy_costs import list_strategies
    from paceline.report.predictions import PredictResult
    from paceline.report.strategy_steps import StrategyStepsResult

    check_algorithm(algorithm)
    strategies = () if strategy is None else list_strategies(strategy)
    counts = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    has_network, has_sweep = network is not None, allreduce is not None
    sets_dtype = f"--gradients {gradients} with --strategy, which already defines what is sent: leave it out"
    refuse(
        (not has_network and not has_sweep, "no network to predict for: pass --network, --allreduce RUN, or both"),
        (backend is not None and not has_sweep, f"--backend {backend} selects from an --allreduce run: pass one"),
        (strategies and gradients is not None, sets_dtype),
        (strategies and max(counts, default=1) < 2, "--strategy with one rank, which sends nothing: use more --ranks"),
    )
    _check_place(network, counts, ranks_per_node, inside)
    run = _get_run(profile)
    layers = find_profile(run)
    inputs = {"profile": replace(run, records=(layers,))}
    sweep: list[CollectiveRecord] = []
    cores = 0
    if allreduce is not None:
        sweep, measured = _load_sweep(allreduce)
        if measured is not None:
            inputs["all-reduce"] = measured
            cores = measured.environment.cores if all(r.device == "cpu" and r.nodes == 1 for r in sweep) else 0
    doubts, busy = list_doubts(inputs)
    config = {
        "network": network, "ranks": list(counts), "backend": backend, "ranks_per_node": ranks_per_node,
        "cores": cores, "inside": inside, "algorithm": algorithm, "accumulate": accumulate, "gradients": gradients,
        "spread": _read_spread(straggler, layers),
        "slow": _read_share(slow_rank, "--slow-rank"),
        "is_own": run.config.get("data") in (None, "own"),  # the profile of a user's module
        "busy": busy,
    }  # fmt: skip
    build = StrategyStepsResult if strategies else PredictResult
    config |= {"strategies": [one.text for one in strategies]} if strategies else {}
    try:  # check the sweep here, because the result builds it again without knowing its source
        if allreduce is not None:
            PredictResult.build_sweep(sweep, config)
    except (ConfigError, RecordError) as error:
        raise type(error)(f"--allreduce {allreduce}: {error}", code=error.code) from None
    verb = "predict strategies" if strategies else "predict"
    return _finish(build, verb, config, (layers, *list_carried(run), *sweep), doubts, out)


def _check_place(network: str | None, ranks: Sequence[int], ranks_per_node: int | None, inside: str | None) -> None:
    is_flat = ranks_per_node in (None, 1)
    refuse(
        (inside and network and is_flat, f"--inside {inside} connects the ranks of a node: pass --ranks-per-node"),
        (inside and not network, f"--inside {inside} needs a --network"),
        (ranks_per_node is not None and ranks_per_node < 1, f"{ranks_per_node} ranks per node: must be at least 1"),
        (min(ranks, default=0) < 1, f"ranks {list(ranks)}: must be one or more numbers of at least 1"),
    )


@naming_damage()
def predict_csv(
    folder: str | Path, *, ranks: int | None = None, backend: str | None = None, measured: Place = None,
    untied: bool = False, out: Place = None,
) -> CapsResult:  # fmt: skip
    """Predict backward times by bucket size from a folder with layer-sizes, layer-times and allreduce-times (CSV).

    Args:
        folder: The folder with the three tables.
        ranks: Select from an all-reduce table with several numbers of ranks.
        backend: Select from an all-reduce table with several backends.
        measured: Times of your own job at one or more bucket sizes, used to fit the prediction: "25MiB=724ms",
            or a table (columns `bucket_size` and `step_s` or `backward_s`). These are steps if layer-times has the rows
            `forward` and `step` (the optimizer), otherwise backward passes with communication.
        untied: The token embedding and the head are two tensors, although their sizes are equal.
        out: Save the run in a new subfolder of this folder.
    """
    from paceline.report.predictions import CapsResult

    folder = Path(folder)
    sweep = [r for r in load_table(_find_file(folder, "allreduce-times")) if r.world_size > 1]
    wanted = None if backend is None else canonical_backend(backend)
    chosen = [r for r in sweep if ranks in (None, r.world_size) and wanted in (None, canonical_backend(r.backend))]
    if len({(record.backend, record.world_size) for record in chosen}) != 1:
        pairs = sorted({(r.backend, r.world_size) for r in sweep})
        there = ", ".join(f"{name} on {size} ranks" for name, size in pairs) or "no two ranks"
        asked = " ".join(f"--{name} {value}" for name, value in (("ranks", ranks), ("backend", backend)) if value)
        missing = f", and none for {asked}" if asked and not chosen else ""
        raise ConfigError(f"--csv {folder} has all-reduce of {there}{missing}; choose one with --ranks and --backend")
    # Our wrapper's buckets are in shared memory.
    chosen = [record for record in chosen if record.memory == "shared"] or chosen
    sizes, times = (_find_file(folder, stem) for stem in ("layer-sizes", "layer-times"))
    timed = load_layer_times(times)
    absent = [name for name in ("forward", "step") if name not in {record.layer for record in timed}]
    steps = read_measured(measured, "backward" if absent else "step")
    what = f"--measured {measured} has step_s, but {times} has no row {' and no row '.join(absent)}"
    needs_rows = absent and any(record.of == "step" for record in steps)
    refuse((needs_rows, f"{what}, so steps cannot be predicted: add it, or use backward_s"))
    records = (*load_layer_sizes(sizes), *timed, *chosen, *steps)
    return _finish(CapsResult, "predict csv", {"csv": folder.name, "untied": untied}, records, out=out)


_MEASURED = re.compile(r"\s*([^=]+)=\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*")


def read_measured(measured: Place, of: str) -> list[CapTimeRecord]:
    """Times by bucket size, from text such as `25MiB=724ms,100MiB=0.7s` or from a table. `of` says what times in text
    measure: a step or its backward."""
    if measured is None or "=" not in str(measured) or Path(measured).exists():
        return [] if measured is None else load_cap_times(measured)
    found = []
    for part in str(measured).split(","):
        if (match := _MEASURED.fullmatch(part)) is None:
            raise ConfigError(f"--measured {part[:40]!r} is not a bucket size and its time: write it like 25MiB=724ms")
        seconds = float(match[2]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[3]]
        size, timing = parse_size(match[1].strip()), Summary(mean_s=seconds)
        found.append(CapTimeRecord(cap_bytes=size, of=of, timing=timing, source="imported"))
    return found


@naming_damage()
def predict_trace(
    traces: str | Path | Sequence[str | Path], *, network: str | None = None, ranks: int | Sequence[int] | None = None,
    ranks_per_node: int | None = None, inside: str | None = None, algorithm: str = "auto", measured: Place = None,
    out: Place = None,
) -> TracedResult:  # fmt: skip
    """Which bucket size is best for a DDP job, and what would a step cost elsewhere? Uses only torch.profiler traces.

    By default, the answer is for the ranks and the network of the trace.

    Args:
        traces: Files (JSON, or compressed with gzip) of one or more ranks, or folders with them. `paceline.trace` also
            writes such files.
        network: Predict for other networks, as in `predict`. Without one, the traced messages are scaled.
        ranks: Predict for other numbers of ranks.
        ranks_per_node: Number of ranks that share a node.
        inside: The network inside a node.
        algorithm: auto, ring, tree, two-level, gloo or shared.
        measured: Times of steps without the profiler at one or more bucket sizes, used to fit the prediction:
            "25MiB=724ms", or a table (columns `bucket_size` and `step_s`).
        out: Save the run in a new subfolder of this folder.
    """
    from paceline.predict.curves import check_algorithm
    from paceline.report.observed import TracedResult

    check_algorithm(algorithm)
    places = (traces,) if isinstance(traces, str | Path) else tuple(traces)
    counts = None if ranks is None else [ranks] if isinstance(ranks, int) else list(ranks)
    is_here = network is None and ranks is None
    elsewhere = f"--ranks-per-node {ranks_per_node} is for other networks or ranks: pass --network, --ranks, or both"
    refuse(
        (not places, "no trace: pass one or more files"),
        (ranks_per_node is not None and is_here, elsewhere),
    )
    _check_place(network, [1] if counts is None else counts, ranks_per_node, inside)
    steps = read_measured(measured, "step")
    only_steps = f"--measured {measured}: a trace is compared with steps, not with backward_s"
    refuse((any(record.of != "step" for record in steps), only_steps))
    records = (*load_traced_steps([file for place in places for file in _list_traces(Path(place))]), *steps)
    config = {
        "traces": [Path(place).name for place in places], "network": network, "ranks": counts, "inside": inside,
        "ranks_per_node": ranks_per_node, "algorithm": algorithm,
    }  # fmt: skip
    return _finish(TracedResult, "predict trace", config, records, out=out)


_MOST_STEPS = 1000  # maximum number of step times kept from a run
_MOST_SECONDS = 1e9
_MOST_RANKS = 10**6
# Required costs, and how to measure each.
_SOURCES = {
    "step": "the folder of a training run", "save": "the folder of a training run that saved a checkpoint",
    "restart": "the folder of a run of `paceline faults --restart`",
}  # fmt: skip


@naming_damage()
def predict_goodput(
    runs: Result | str | Path | Sequence[Result | str | Path] = (), *, mtbf: str | None = None,
    mtbf_per_rank: str | None = None, ranks: int | None = None, step_seconds: float | None = None,
    save_seconds: float | None = None, detect_seconds: float | None = None, restart_seconds: float | None = None,
    spare_seconds: float | None = None, shrink_seconds: float | None = None, all_lost: str = "5%",
    repair: str = "0s", horizon: str = "30d", save_every: str | None = None, out: Place = None,
) -> GoodputResult:  # fmt: skip
    """What fraction of a job's time is productive under random faults? Evaluates each policy at its best save interval.

    Args:
        runs: Runs that measured costs: training runs (steps, saves and recoveries from faults), and runs of `faults`
            with `restart`.
        mtbf: The mean time between faults of the whole job: 3h, 120s, 2d.
        mtbf_per_rank: The mean time between faults of one rank, instead of that of the whole job.
        ranks: Number of ranks. Default: as in the training run.
        step_seconds: Seconds per step. This and the following override measurements.
        save_seconds: Seconds that each save stalls training.
        detect_seconds: Seconds until a fault is detected.
        restart_seconds: Seconds from detection until a restarted job takes steps again.
        spare_seconds: Seconds from detection until a spare replaces a lost rank.
        shrink_seconds: Seconds from detection until the other ranks continue without a lost one.
        all_lost: The fraction of faults that leave no replica, so that any policy needs a checkpoint.
        repair: How long the slot of a lost rank stays unavailable.
        horizon: The length of the job, for the interval.
        save_every: Evaluate this save interval (10s, 5min, 2h) instead of the best one.
        out: Save the run in a new subfolder of this folder.
    """
    from paceline.predict.goodput import Faults
    from paceline.report.fault_policies import GoodputResult
    from paceline.report.result import describe_job

    both = f"--mtbf {mtbf} and --mtbf-per-rank {mtbf_per_rank}: both set the fault rate; leave one out"
    rates = [rate for rate in (mtbf, mtbf_per_rank) if rate is not None]
    refuse(
        (len(rates) > 1, both),
        (not rates, "how often do faults occur? Pass --mtbf 3h for the whole job, or --mtbf-per-rank 90d"),
    )
    sources = [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else list(runs)
    loaded = [_load_measured(source) for source in sources]
    trained = [getattr(result, "world_size", 1) for result, _ in loaded if result.run.verb == "train"]
    count = ranks if ranks is not None else trained[-1] if trained else 0
    refuse(
        (ranks is None and not trained, "how many ranks does the job have? Pass --ranks, or a training run"),
        (count < 1, f"--ranks {count}: must be at least 1"),
    )
    typed = {"step": step_seconds, "save": save_seconds, "detect": detect_seconds}
    typed |= {"restart": restart_seconds, "spare": spare_seconds, "shrink": shrink_seconds}
    for name, seconds in typed.items():
        asked = f"--{name}-seconds {seconds}: must be finite and {'above' if name == 'step' else 'at least'} 0"
        is_good = seconds is None or 0 < seconds <= _MOST_SECONDS or (seconds == 0 and name != "step")
        refuse((not is_good, asked))
    mtbf_s = parse_duration(rates[0], "--mtbf-per-rank" if mtbf is None else "--mtbf") / (count if mtbf is None else 1)
    usable = [_count_usable(result, count) for result, _ in loaded if result.run.verb == "train"]
    all_lost_share, repair_s = _read_share(all_lost, "--all-lost"), parse_duration(repair, "--repair")
    faults = Faults(mtbf_s, count, all_lost_share, repair_s, usable[-1] if usable else None)
    horizon_s = parse_duration(horizon, "--horizon")
    interval_s = None if save_every is None else parse_duration(save_every, "--save-every")
    refuse(
        (horizon_s <= 0, f"--horizon {horizon}: must be above 0"),
        (interval_s == 0, f"--save-every {save_every}: must be above 0"),
    )
    records = []
    gave = f"{', '.join(map(_name_source, sources))} did not measure it" if sources else "no run was passed"
    for name in COSTS:
        parts = [one for _, found in loaded for one in found if one.name == name]
        seconds = typed.get(name)
        if seconds is not None:
            records.append(CostRecord(name=name, seconds=(seconds,), source="imported", note="as specified"))
        elif parts:
            note = ", ".join(dict.fromkeys(one.note for one in parts))
            records.append(CostRecord(name=name, seconds=sum((one.seconds for one in parts), ()), note=note))
        elif name in _SOURCES:
            missing = f"how long does a {name} take? {gave}: pass --{name}-seconds, or {_SOURCES[name]}"
            raise ConfigError(missing)
    measured = {_name_source(source): one.run for source, (one, _) in zip(sources, loaded, strict=True)}
    doubts, busy = list_doubts(measured)
    config = {
        "mtbf_s": faults.mtbf_s, "ranks": count, "all_lost": faults.all_lost, "repair_s": faults.repair_s,
        "horizon_s": horizon_s, "interval_s": interval_s, "busy": busy,
        "measured_ranks": trained[-1] if trained else None, "usable_ranks": faults.usable,
        "job": next((describe_job(one.config) for one, _ in reversed(loaded) if one.run.verb == "train"), ""),
    }  # fmt: skip
    return _finish(GoodputResult, "predict goodput", config, records, doubts, out)


@naming_damage()
def predict_scale(
    profile: Result | str | Path | None = None, *, network: str = "nvlink,100gbe,10gbe,1Gb/s,100ms",
    ranks: int | Sequence[int] = (8, 64, 1024, 16384), ranks_per_node: int = 8, inside: str = "nvlink",
    strategy: str | Sequence[str] = "zero1,fsdp,powersgd:4+hosts,diloco:100,diloco:100+int8",
    total_samples: str = "1e9", gpu_memory: str | None = None, mtbf_per_rank: str = "2100d",
    detect_seconds: float = 10.0, restart_seconds: float = 300.0, save_rate: str = "1GB", out: Place = None,
) -> OutlookResult:  # fmt: skip
    """How long does training take on other machines? Predicts steps, faults and memory, and the fastest strategy.

    Args:
        profile: A result of `paceline.profile`, or the folder of a run of `profile layers`.
        network: The networks between nodes, as in `predict`.
        ranks: One or more numbers of ranks.
        ranks_per_node: Number of ranks that share a node and its link.
        inside: The network inside a node.
        strategy: Strategies to compare with dense gradients and bf16; fsdp is fully sharded data parallel.
        total_samples: Number of samples to train on: 1e9.
        gpu_memory: Memory of a rank: 80GB. Strategies that need more are not chosen.
        mtbf_per_rank: The mean time between faults of one rank. Default: 2100d, as published for 16,384 GPUs.
        detect_seconds: Seconds until a fault is detected.
        restart_seconds: Seconds from detection until the restarted job takes steps again.
        save_rate: Bytes per second that a rank writes to a checkpoint.
        out: Save the run in a new subfolder of this folder.
    """
    from paceline.predict.fully_sharded import FULLY_SHARDED
    from paceline.report.outlook import OutlookResult

    counts = [ranks] if isinstance(ranks, int) else list(ranks)
    _check_place(network, counts, ranks_per_node, inside)
    if profile is None:
        raise ConfigError("nothing to predict from: pass --model-profile, a run of `paceline profile layers`")
    run = _get_run(profile)
    layers = find_profile(run)
    named = [one.strip() for one in strategy.split(",")] if isinstance(strategy, str) else list(strategy)
    others = ",".join(name for name in named if name != FULLY_SHARDED)
    texts = [one.text for one in parse_strategies(others)] + [FULLY_SHARDED] * (FULLY_SHARDED in named)
    mtbf_s = parse_duration(mtbf_per_rank, "--mtbf-per-rank")
    samples = _read_samples(total_samples)
    times = {"--detect-seconds": detect_seconds, "--restart-seconds": restart_seconds}
    refuse(
        (max(counts) < 2, f"--ranks {','.join(map(str, counts))}: one rank needs no network: pass more"),
        (not parse_size(save_rate) > 0, f"--save-rate {save_rate}: must be above 0"),
        (not mtbf_s > 0, f"--mtbf-per-rank {mtbf_per_rank}: must be above 0"),
        *((not 0 <= s <= _MOST_SECONDS, f"{flag} {s}: must be finite and at least 0") for flag, s in times.items()),
    )
    doubts, busy = list_doubts({"profile": replace(run, records=(layers,))})
    config = {
        "network": network, "ranks": counts, "backend": None, "ranks_per_node": ranks_per_node, "cores": 0,
        "inside": inside, "algorithm": "auto", "accumulate": 1, "gradients": None, "spread": 0.0,
        "is_own": run.config.get("data") in (None, "own"), "busy": busy, "strategies": texts,
        "optimizer": run.config.get("optimizer", "sgd"), "momentum": run.config.get("momentum", 0.9),
        "total_samples": samples, "memory_bytes": None if gpu_memory is None else parse_size(gpu_memory),
        "save_bytes_per_s": parse_size(save_rate), "mtbf_per_rank_s": mtbf_s, "detect_s": detect_seconds,
        "restart_s": restart_seconds,
    }  # fmt: skip
    return _finish(OutlookResult, "predict scale", config, (layers, *list_carried(run)), doubts, out)


def _read_samples(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    refuse((not 1 <= found <= 1e18, f"--total-samples {text[:40]}: must be a number from 1 to 1e18, such as 1e9"))
    return found


def _name_source(source: Result | str | Path) -> str:
    folder = source if isinstance(source, str | Path) else source.folder
    return "the result" if folder is None else Path(folder).name or str(folder)


def _count_usable(result: Result, count: int) -> int | None:
    """How many of `count` ranks can divide the global batch evenly while one is missing, with this run's batch per
    rank; None if the batch is unknown."""
    rows = getattr(result, "rows", ())
    if not rows or not 1 < count <= _MOST_RANKS:
        return None
    size = statistics.mode(row["samples"] for row in rows)  # the last batch of an epoch may be smaller
    return count_usable_ranks(size * count // getattr(result, "world_size", 1), count - 1)


def _load_measured(source: Result | str | Path) -> tuple[Result, list[CostRecord]]:
    """A result and the measured costs in it that determine goodput."""
    from paceline.report.result import load_result
    from paceline.report.training_result import TrainRunResult

    result = load_result(source) if isinstance(source, str | Path) else source
    times: dict[str, list[float]] = {}
    if isinstance(result, TrainRunResult):
        rows = pick_like_last(result.rows)
        times["step"] = [row["step_s"] for row in rows[min(5, len(rows) // 2) :] if row["step_s"]][-_MOST_STEPS:]
        saves = result.saves[len(result.saves) > 2 :]  # the first also allocates its buffers
        times["save"] = [row["stall_s"] - row["wait_s"] for row in saves]
        times["write"] = [row["write_s"] for row in saves]
        step_s = statistics.median(times["step"] or [0.0])
        for fault in result.config.get("faults") or ():  # recovery times end with a step
            if fault["policy"] in COSTS and fault["recovered_s"] is not None:
                times.setdefault(fault["policy"], []).append(max(0.0, fault["recovered_s"] - step_s))
    else:
        faults = [one for one in result.only(FaultRecord) if one.system == "train" and one.steps_lost is not None]
        named = [(one, one.detected_s) for one in faults if one.detected_s is not None]
        times["detect"] = [detected_s for _, detected_s in named]
        times["restart"] = [  # includes stopping the old command and starting a new one
            (one.ended_s or detected_s) - detected_s + one.restart_s
            for one, detected_s in named
            if one.restart_s is not None
        ]
        for one in faults:  # recoveries by the run itself
            policy, recovered_s = getattr(one, "policy", "stop"), getattr(one, "recovered_s", None)
            if policy in COSTS and recovered_s is not None:
                times.setdefault(policy, []).append(recovered_s)
        what = f"{_name_source(source)} is a run of `paceline {result.run.verb}`"
        refuse((not faults, f"{what}: pass one of `paceline train`, or of `paceline faults --restart`"))
    found = {name: tuple(one for one in seconds if 0 <= one < float("inf")) for name, seconds in times.items()}
    note = _name_source(source)
    return result, [CostRecord(name=name, seconds=s, note=note) for name, s in found.items() if s]


def _list_traces(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    found = [path for path in sorted(place.iterdir()) if path.name.endswith((".json", ".json.gz")) and _is_trace(path)]
    refuse((not found, f"--trace {place}: no *.json or *.json.gz in this folder is a trace of torch.profiler"))
    return found


def _is_trace(file: Path) -> bool:
    """Whether a file has events. Also true for an unreadable file, so that loading it reports the error."""
    try:
        return file.is_file() and b'"traceEvents"' in _read_content(file)
    except (OSError, EOFError, zlib.error):
        return True


@pause_collection()
def load_traced_steps(files: Sequence[Path]) -> tuple[TracedStepRecord, ...]:
    """The steps in the traces of one job. RecordError names the bad file and the problem."""
    from paceline.predict.trace_steps import read_steps
    from paceline.predict.traces import find_span, read_ranks

    file_of: dict[int, Path] = {}
    spans: dict[str, tuple[Path, int, int]] = {}  # file, start and end of the first trace of each host
    records: list[TracedStepRecord] = []
    size = 0
    for file in files:
        try:
            for trace in read_ranks(_load_document(file)):
                first = file_of.setdefault(trace.rank, file)
                size = size or trace.world_size
                begin, end = find_span(trace)
                other, least, most = spans.setdefault(trace.host, (file, begin, end))
                is_apart = trace.host and (end < least or most < begin)
                counts = f"it has {trace.world_size} ranks, but others have {size}"
                times = f"it was recorded at a different time from {other} on the same host"
                refuse(
                    (first != file, f"it is of rank {trace.rank}, and so is {first}: pass one trace per rank"),
                    (trace.world_size != size, f"{counts}: pass traces of one job"),
                    (is_apart, f"{times}: pass traces of one run"),
                    error=RecordError,
                )
                records += read_steps(trace)
        except RecordError as error:
            raise RecordError(f"--trace {file}: {error}", code=error.code) from None
    return tuple(records)


def _read_content(file: Path) -> bytes:
    content = file.read_bytes()
    return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content


def _load_document(file: Path) -> Any:
    try:
        return json.loads(_read_content(file).decode(errors="replace"))
    except OSError as error:  # includes gzip checksum errors
        raise RecordError(f"it cannot be read: {error.strerror or error}", code="missing") from None
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        raise RecordError(f"it is not a complete JSON file: {error}", code="damaged") from None


def _finish(
    build: Callable[[Run], R],
    verb: str,
    config: dict[str, Any],
    records: Iterable[Record],
    doubts: Iterable[str] = (),
    out: Place = None,
) -> R:
    """The result, saved in a new folder in `out` unless that is None. Refuses requests that cannot be simulated, before
    saving."""
    here = replace(capture_environment(), load_average=None)  # this verb times nothing
    result = build(Run(verb, config, here, tuple(records), tuple(doubts)))
    if out is not None:
        with create_folder(out, "predict") as folder:
            result.save(folder)
    return result


def find_profile(run: Run) -> LayerProfileRecord:
    """The layer profile of a run, which must have exactly one."""
    found = [record for record in run.records if isinstance(record, LayerProfileRecord)]
    if len(found) != 1:
        what = f"this run of `{run.verb}` has {len(found)} layer profiles; expected one"
        raise RecordError(f"{what}: make one with `paceline profile layers` or `paceline.profile`", code="no-profile")
    return found[0]


def list_carried(run: Run) -> list[StepRecord | CodecRecord]:
    """The records of a profile with the costs of messages, the wrapper, other ranks and codecs."""
    found = [record for record in run.records if isinstance(record, StepRecord | CodecRecord)]
    return [record for record in found if isinstance(record, CodecRecord) or record.role != "job"]


def list_doubts(inputs: Mapping[str, Run]) -> tuple[list[str], list[str]]:
    """Warnings about the runs that a prediction is based on, with the names of the runs; and the names of runs that
    were measured on a busy machine."""
    found = {name: find_doubts(run.records, run.environment) for name, run in inputs.items()}
    # A run derived from others, such as a comm-table, keeps the warnings about them.
    kept = {
        name: any(not one.startswith("--curve") for one in run.config.get("busy", ())) for name, run in inputs.items()
    }
    texts = dict.fromkeys(f"{name}: {doubt.text}" for name, doubts in found.items() for doubt in doubts)
    texts |= dict.fromkeys(f"{name}: {text}" for name, run in inputs.items() if kept[name] for text in run.warnings)
    return list(texts), [name for name, doubts in found.items() if is_busy(doubts) or kept[name]]


def _get_run(source: Result | str | Path) -> Run:
    return load_run(source) if isinstance(source, str | Path) else source.run


def _load_sweep(source: Result | str | Path) -> tuple[list[CollectiveRecord], Run | None]:
    """The collectives of a run or a table, and the run unless the source is a table."""
    if isinstance(source, str | Path) and not is_run_path(source):
        return load_table(source), None
    run = _get_run(source)
    return list_collectives(run, source if isinstance(source, str | Path) else "the result"), run


def _read_spread(straggler: str, record: LayerProfileRecord) -> float:
    from paceline.predict.scaling import estimate_spread

    if straggler == "profile":
        return estimate_spread(record.timing.reduced_s)
    return _read_share(straggler, "--straggler", " nor `profile`")


def _read_share(text: str, flag: str, more: str = "") -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise ConfigError(f"{flag} {text[:40]!r} is {'neither' if more else 'not'} a percentage such as 3%{more}")
    return float(match[1]) / 100


def _find_file(folder: Path, stem: str) -> Path:
    found = sorted(folder.glob(f"{stem}*.csv"))
    what = "no file" if not found else f"{len(found)} files"
    refuse(
        (not folder.is_dir(), f"--csv {folder}: no such folder"),
        (len(found) != 1, f"--csv {folder}: {what} named {stem}*.csv; expected one"),
    )
    return found[0]
