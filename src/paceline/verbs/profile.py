"""`paceline.profile` and related verbs: where the time of training steps goes, for a user-defined or built-in job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline import machine
from paceline.errors import ConfigError, refuse
from paceline.options import Option, check_counts, refuse_given
from paceline.records import CollectiveRecord
from paceline.records.environment import capture_environment
from paceline.records.store import Run, load_run, naming_damage
from paceline.runtime.ranks.session import Session, find_place, open_session
from paceline.training.train_settings import DEFAULT_BATCH_SIZE, TrainSettings, list_job_warnings
from paceline.verbs.jobs import Counts, Place, brings_data, build_settings, choose_worlds, finish, list_counts, open_job
from paceline.verbs.predict import find_profile, list_carried, list_doubts

if TYPE_CHECKING:
    from paceline.report.compared import ComparisonResult, TrainComparisonResult
    from paceline.report.profiles import CommTableResult, ProfileResult, TraceResult
    from paceline.report.result import Result

_ROOM = "paceline.measure.job_profile:"
_PART_S = 15.0  # approximate duration of each part of a profile


def profile(
    model: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    kind: str = "all",
    ranks: Counts | None = None,
    batch_size: Counts | None = None,
    wrapper: str = "paceline",
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    warmup: int | None = None,
    out: Place = None,
    progress: bool | None = None,
    **job: Any,
) -> Any:
    """Where does the time of a training step go? Profiles the layers of the bare model and, on several ranks, the
    phases of its steps.

    Inside a launched world this is collective, and every rank gets the same result. In a plain process, a module runs
    here, on one rank. At the end, the values of the module and its optimizers are restored.

    Args:
        model: A module, with `step`. Or a picklable factory that returns both, to run on `ranks` local ranks. Or the
            name of a built-in model.
        step: `step(model)` runs one forward and backward pass with any inputs, and may step the optimizer.
        kind: "all" returns a `ProfileResult`, which `paceline.predict` reads; "layers" only the layers, on one rank;
            "phases" only the phases (a `PhasesResult`); "trace" a recording of every rank (a `TraceResult`; see
            `trace`).
        ranks: Number of ranks, for a factory or a built-in model. Default: the launched world's, else 2.
        batch_size: Samples per rank in a micro-batch of a built-in model; several to compare phases. Default: 32.
        wrapper: paceline, torch or none, for the phases.
        iters: Number of timed steps. Default: as time allows.
        out: Save the run in a new subfolder of this folder.
        job: Options of a training job, for a built-in model (`batch_size=4`, `data="mnist:PATH"`, ...).
    """
    Option(choices=("all", "phases", "layers", "trace")).check("kind", kind)
    job |= {"wrapper": wrapper, "backend": backend, "device": device, "threads": threads}
    sizes = () if batch_size is None else list_counts(batch_size, "batch_size")
    if sizes and kind != "phases":
        refuse((len(sizes) > 1, f"--batch-size {','.join(map(str, sizes))}: pass a single number"))
        job["batch_size"] = sizes[0]
    if kind == "trace":
        return trace(model, step, ranks=ranks, warmup=warmup, out=out, progress=progress, **job)
    check_counts(iters=iters, warmup=warmup)
    verb = "profile" if kind == "all" else f"profile {kind}"
    is_named = isinstance(model, str)
    if is_named and kind == "phases":
        counts = choose_worlds(ranks, 2)
        if not sizes and not brings_data(model, job.get("data")):
            sizes = (DEFAULT_BATCH_SIZE,)
        asked = sizes or (None,)  # None: the data's own batch size
        jobs: list[Any] = [build_settings(model=model, ranks=n, batch_size=b, **job) for n in counts for b in asked]
        config = jobs[0].to_json() | {"batch_sizes": list(sizes), "ranks": list(counts)}
        opened: Any = open_session(verb, config, ranks=max(counts), out=out, progress=progress)
    elif is_named and kind == "layers":
        jobs = [_build_bare(model, job | {"ranks": ranks})]
        opened = open_session(verb, jobs[0].to_json(), out=out, progress=progress)
    else:
        opened, given = open_job(verb, model, step, ranks, job, out, progress)
        jobs = [given]
    with opened as session:
        session.warnings += list_job_warnings(jobs[0]) if is_named else []
        if iters is None:
            session.say_long(_PART_S * (1 + len(jobs) * (4 if kind == "all" else 1)))
        records = _measure_together(session, jobs[0], iters, warmup) if kind != "phases" else []
        for number, given in enumerate(jobs):
            arguments = (given, kind, iters, warmup, number, len(jobs), max(sizes, default=0))
            records += session.ask(_ROOM + "measure_profile", arguments, getattr(given, "ranks", None))
        return finish(session, records)


def _measure_together(session: Session, given: Any, iters: int | None, warmup: int | None) -> list[Any]:
    """Measure on a CPU how much ranks slow each other down if a host has twice as many. Each rank needs a core.

    Called first, so that the profile finds its ranks warm.
    """
    device = given.device if isinstance(given, TrainSettings) else given[3]["device"]
    is_on_cpu = device == "cpu" or (device == "auto" and not machine.count_gpus())
    ranks = session.ranks
    if session.place is not None or session.here or not is_on_cpu or 2 * ranks > machine.count_cores():
        return []
    records: list[Any] = session.ask(_ROOM + "measure_together", (given, ranks, iters, warmup), 2 * ranks)
    return records


def trace(
    model: Any, step: Callable[[Any], Any] | None = None, *, ranks: Counts | None = None, steps: int = 3,
    warmup: int | None = None, memory: bool = False, shapes: bool = False, plot: bool = True, wrapper: str = "paceline",
    backend: str = "auto", device: str = "auto", threads: int | None = None, out: Place = None,
    progress: bool | None = None, **job: Any,
) -> TraceResult:  # fmt: skip
    """Record steps on all ranks as one Perfetto trace, and estimate what would make them faster.

    `model`, `step` and the options of a job are as in `profile`.

    Args:
        steps: Number of steps to record.
        warmup: Number of warm-up steps. Default: 3.
        memory: Show memory use over one more step, by category, and the cause of its peak.
        shapes: Record the shapes of operator inputs.
        plot: Draw one step of all ranks.
    """
    check_counts(steps=steps)
    Option(least=1, each_s=1e-6, advice=", because torch's profiler starts in a warm-up").check("warmup", warmup)
    extras = tuple(name for name, is_on in (("memory", memory), ("shapes", shapes)) if is_on)
    job |= {"wrapper": wrapper, "backend": backend, "device": device, "threads": threads}
    opened, given = open_job("profile trace", model, step, ranks, job, out, progress)
    with _quiet_allocator(memory), opened as session:
        session.warnings += list_job_warnings(given) if isinstance(model, str) else []
        arguments = (given, 3 if warmup is None else warmup, steps, extras, session.place is not None)
        traces, facts = session.ask("paceline.measure.recorder:trace_job", arguments)

        def build(run: Run, folder: Path | None) -> TraceResult:
            from paceline.predict.advice import advise
            from paceline.predict.traces import build_overview, find_lateness
            from paceline.report.profiles import TraceResult

            overviews = [build_overview(trace) for trace in traces]
            document = TraceResult.build_document(overviews, facts, advise(overviews, facts, find_lateness(traces)))
            return TraceResult(run, folder, document, traces, plot)

        return cast("TraceResult", finish(session, [], build=build))


@contextlib.contextmanager
def _quiet_allocator(is_on: bool) -> Iterator[None]:
    """Silence torch's messages, in ranks started inside, about blocks that were allocated before a profile started."""
    is_on = is_on and "TORCH_CPP_LOG_LEVEL" not in os.environ
    if is_on:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    try:
        yield
    finally:
        if is_on:
            del os.environ["TORCH_CPP_LOG_LEVEL"]


def comm_table(
    model: str | ProfileResult | None = None, *, profiles: Sequence[str | Path] = (),
    network: str = "nvlink,pcie4,hdr,10gbe", curves: Sequence[str | Path] = (), ranks: Counts = (2, 4, 8, 64),
    iters: int | None = None, warmup: int | None = None, out: Place = None, progress: bool | None = None, **job: Any,
) -> CommTableResult:  # fmt: skip
    """What does sending a step's gradients cost on other networks? Measures compute and predicts communication.

    Args:
        model: A built-in model (default: cnn), which is measured on one rank, or a result of `profile`.
        profiles: Runs of `profile layers`, instead of a model; all rows go into one table.
        network: nvlink, pcie4, hdr, 100gbe, 10gbe, ..., bandwidth and latency (10Gb/s,50us), or a measured cluster:
            a100-hdr, h100-rdma, gh200-slingshot, ...
        curves: Runs of `bench allreduce` as additional networks.
        ranks: Numbers of ranks.
        out: Save the run in a new subfolder of this folder.
        job: Options of a training job (`batch_size=4`, `device="cpu"`, ...).
    """
    from paceline.predict.networks import find_networks
    from paceline.report.profiles import ProfileResult, load_sweeps

    check_counts(iters=iters, warmup=warmup)
    counts = list_counts(ranks)
    find_networks(network)
    inputs: dict[str, Run] = {}
    for path in curves:
        flag = f"--curve {path}"
        inputs[flag] = run = load_run(path)
        if not any(isinstance(record, CollectiveRecord) for record in run.records):
            advice = "pass a run of `paceline bench allreduce`"
            raise ConfigError(f"{flag} is a run of `{run.verb}`: {advice}", code="mismatch")
        if not load_sweeps(path, counts):
            raise ConfigError(f"{flag} has no measured all-reduce on {', '.join(map(str, counts))} ranks")
    records: list[Any] = []
    if profiles:
        others = {"model": model, "iters": iters, "warmup": warmup, **job}
        given = [name for name, value in others.items() if value is not None]
        refuse_given(given, "with --model-profile: the profile has its own settings; leave it out")
        runs = {str(path): load_run(path) for path in profiles}
        config = {"profiles": list(runs)}
        records = [record for run in runs.values() for record in (find_profile(run), *list_carried(run))]
        inputs |= runs
    elif isinstance(model, ProfileResult):
        config, inputs = model.config, inputs | {"profile": model.run}
        records = [model.profile, *list_carried(model.run)]
        refuse((model.profile is None, 'this profile has no layers: use kind="all" or kind="layers"'), code="mismatch")
    else:
        settings = _build_bare("cnn" if model is None else model, job)
        config = settings.to_json()
    doubts, busy = list_doubts(inputs)
    more = {"networks": network, "ranks": list(counts), "curves": [str(path) for path in curves], "busy": busy}
    with open_session("profile comm-table", config | more, out=out, progress=progress) as session:
        session.is_timed, session.warnings = not records, doubts
        if not records:
            arguments = (settings, "layers", iters or 10, 2 if warmup is None else warmup)
            records = session.ask(_ROOM + "measure_profile", arguments)
        return cast("CommTableResult", finish(session, records))


@naming_damage()
def compare(first: str | Path | Result, second: str | Path | Result) -> ComparisonResult | TrainComparisonResult:
    """Compare two runs of one verb: their numbers, and the operators and kernels of two traces.

    Args:
        first: A result, or a run folder.
        second: Another result or run folder of the same kind.
    """
    from paceline.report.compared import ComparisonResult
    from paceline.report.result import Result, load_result
    from paceline.verbs.train import compare_runs

    one, two = (given if isinstance(given, Result) else load_result(given) for given in (first, second))
    if one.run.verb == two.run.verb == "train":
        return compare_runs((one, two))
    result = ComparisonResult.of((one, two), capture_environment())
    pairs = zip(result.config["runs"], (one, two), strict=True)
    names = " and ".join(f"{name} (`paceline {part.run.verb}`)" for name, part in pairs)
    needed = "compare two runs of one verb on the same numbers of ranks and with the same sizes"
    refuse((not result.rows, f"{names} have no numbers in common: {needed}"), code="mismatch")
    return result


def _build_bare(model: str, job: dict[str, Any]) -> TrainSettings:
    """The settings of a built-in job on a single rank; refuses options that would have no effect."""
    place = find_place()
    bare = "layers are timed on the bare model, which sends nothing; leave it out"
    ranks, wrapper, plan, accumulate = (job.pop(name, None) for name in ("ranks", "wrapper", "plan", "accumulate"))
    counts = list_counts(1 if ranks is None else ranks)
    launched = 1 if place is None else place.world_size
    refuse(
        (counts != (1,), f"--ranks {','.join(map(str, counts))}: layers are timed on one rank; leave it out"),
        (launched > 1, f"layers are timed on one rank, but {launched} were launched: run it without a launcher"),
        (plan is not None, f"--plan {plan}: {bare}"),
        (wrapper not in (None, "paceline", "none"), f"--wrapper {wrapper}: {bare}"),
        (accumulate not in (None, 1), f"--accumulate {accumulate}: layers are timed over one micro-batch"),
    )
    return build_settings(model=model, wrapper="none", **job)
