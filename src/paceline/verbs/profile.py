"""`paceline.profile` and what belongs to it: where the time of training steps goes.

The job is the user's own (a module and a step, or a factory of both) or one of ours, by the name of its model.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.machine import canonical_backend
from paceline.records.environment import capture_environment
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.session import Session, find_place, open_session
from paceline.training.settings import WRAPPERS, TrainSettings, check_job

if TYPE_CHECKING:
    from paceline.records import LayerProfileRecord
    from paceline.report.profiles import CommTableResult, ComparisonResult, ProfileResult, TraceResult
    from paceline.report.result import Result
    from paceline.report.steps import PhasesResult

KINDS = ("all", "phases", "layers", "trace")
NETWORKS = "nvlink,pcie4,hdr,10gbe"

Counts = int | Sequence[int] | None


def profile(
    model: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    kind: str = "all",
    ranks: Counts = None,
    wrapper: str = "paceline",
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> Any:
    """Where does the time of a training step go? Layers of the bare model and, on several ranks, phases of its steps.

    `model` and `step`: a module, and a function `step(model)` that runs one forward and backward with any inputs, and
    may update. Inside a launched world this is collective, and every rank gets the same result; in a plain process it
    runs here, in a world of one. Values of the module and of its optimizers are restored at the end.
    `model` alone: a picklable factory that returns such a pair, for which `ranks` local ranks are started; or the name
    of a built-in model, with the options of a training job (`batch_size=4`, `data="mnist:PATH"`, ...).

    `kind`: "all" returns a `ProfileResult`, which `paceline.predict` reads; "layers" the layers alone, on one rank;
    "phases" the phases alone (a `PhasesResult`); "trace" a recording of every rank (a `TraceResult`; see `trace`).
    `wrapper`: paceline, torch or none, for the phases. `iters`, `warmup`: by default as the time allows.
    `out`: save the run in a new folder there.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} of a profile is unknown: known are {', '.join(KINDS)}")
    shared: dict[str, Any] = {"backend": backend, "device": device, "threads": threads, "warmup": warmup}
    shared |= {"out": out, "progress": progress}
    if kind == "trace":
        return trace(model, step, ranks=ranks, wrapper=wrapper, **shared, **job)
    check_counts(iters=iters, warmup=warmup)
    if not isinstance(model, str):
        own = _OwnJob(model, step, ranks, wrapper, backend, device, threads, job)
        return _profile_own(own, kind, iters, warmup, out, progress)
    shared["iters"] = iters
    if kind == "phases":
        return phases(model, ranks=ranks, wrapper=wrapper, **shared, **job)
    if kind == "layers":
        if _read_counts(ranks, "ranks") not in (None, (1,)):
            raise ConfigError(f"ranks={ranks}: layers are timed on one rank, where no message disturbs them")
        return layers(model, **shared, **job)
    (count,) = _choose_one(ranks, "a profile")
    settings = _build_settings(model, count, wrapper, backend, device, threads, job)

    with open_session("profile", settings.to_json(), ranks=count, out=out, progress=progress) as session:
        return _finish(
            session, session.ask("paceline.measure.profiles:measure_profile", (settings, "all", iters, warmup))
        )


def phases(
    model: str,
    *,
    ranks: Counts = None,
    batch_size: Counts = None,
    wrapper: str = "paceline",
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> PhasesResult:
    """The phases of a built-in model's steps, at each number of ranks and each batch size per rank."""
    check_counts(iters=iters, warmup=warmup)
    sizes = _read_counts(batch_size, "batch_size") or (32,)
    counts = _choose_worlds(ranks, 2)
    all_settings = [
        _build_settings(model, count, wrapper, backend, device, threads, job | {"batch_size": sizes[0]})
        for count in counts
    ]

    config = all_settings[0].to_json() | {"batch_sizes": list(sizes), "ranks": list(counts)}
    with open_session("profile phases", config, ranks=max(counts), out=out, progress=progress) as session:
        records: list[Any] = []
        for number, settings in enumerate(all_settings):
            before, after = (count * len(sizes) for count in (number, len(counts) - number - 1))
            arguments = (settings, sizes, iters, warmup, before, after)
            records += session.ask("paceline.measure.profiles:measure_phases", arguments, ranks=settings.ranks)
        result: PhasesResult = _finish(session, records)
        return result


def layers(
    model: str,
    *,
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> ProfileResult:
    """When each gradient of a built-in model is ready, and what its blocks take, on one rank."""
    check_counts(iters=iters, warmup=warmup)
    settings = _build_settings(model, 1, "none", backend, device, threads, job)
    with open_session("profile layers", settings.to_json(), out=out, progress=progress) as session:
        result: ProfileResult = _finish(session, [_measure_layers(session, settings, iters or 20, warmup, 3)])
        return result


def trace(
    model: Any,
    step: Callable[[Any], Any] | None = None,
    *,
    ranks: Counts = None,
    steps: int = 3,
    warmup: int | None = None,
    memory: bool = False,
    shapes: bool = False,
    plot: bool = True,
    wrapper: str = "paceline",
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> TraceResult:
    """Record steps on every rank as one Perfetto trace, and say with numbers what would make them faster.

    `model`, `step` and the options of a job are those of `profile`. `steps` are recorded, after `warmup` others.
    `memory`: record allocations. `shapes`: record the shapes of operators' inputs. `plot`: draw one step of all ranks.
    """
    check_counts(steps=steps)
    if warmup == 0:
        raise ConfigError("--warmup 0: torch's profiler starts in a warm-up; at least 1 is needed")
    check_counts(warmup=warmup)
    recorded = (
        3 if warmup is None else warmup,
        steps,
        tuple(n for n, on in (("memory", memory), ("shapes", shapes)) if on),
    )

    if isinstance(model, str):
        (count,) = _choose_one(ranks, "a trace")
        settings = _build_settings(model, count, wrapper, backend, device, threads, job)

        with open_session("profile trace", settings.to_json(), ranks=count, out=out, progress=progress) as session:
            return _finish_trace(
                session,
                session.ask("paceline.measure.traces:trace_job", (settings, *recorded, session.place is not None)),
                plot,
            )
    own = _OwnJob(model, step, ranks, wrapper, backend, device, threads, job)

    with own.open("profile trace", out, progress) as session:
        arguments = (own.given, *recorded, session.place is not None)
        return _finish_trace(session, session.ask("paceline.measure.traces:trace_job", arguments), plot)


def comm_table(
    model: str | ProfileResult,
    *,
    network: str = NETWORKS,
    curves: Sequence[str | Path] = (),
    ranks: Counts = (2, 4, 8, 64),
    backend: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    warmup: int | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **job: Any,
) -> CommTableResult:
    """What do the gradients of a step cost on other networks? The computation is measured, the messages are predicted.

    `model`: a built-in model, which is measured on one rank, or a result of `profile`. `network`: names, or bandwidth
    and latency ("10Gb/s,50us"). `curves`: runs of `bench allreduce` that are used as networks, too.
    """
    from paceline.predict.networks import find_networks
    from paceline.report.profiles import CommTableResult, ProfileResult

    check_counts(iters=iters, warmup=warmup)
    counts = _read_counts(ranks, "ranks") or (2, 4, 8, 64)
    find_networks(network)
    sweeps = _load_sweeps(curves, counts)
    more = {"networks": network, "ranks": list(counts), "curves": [str(path) for path in curves]}
    if isinstance(model, ProfileResult):
        if model.profile is None:
            raise ConfigError('this profile has no layers: use kind="all" or kind="layers"', code="mismatch")
        config = model.config
    else:
        settings = _build_settings(model, 1, "none", backend, device, threads, job)
        config = settings.to_json()
    with open_session("profile comm-table", config | more, out=out, progress=progress) as session:
        record = (
            model.profile
            if isinstance(model, ProfileResult)
            else _measure_layers(session, settings, iters or 10, warmup, 2)
        )
        assert record is not None
        result = CommTableResult(session.save([record]), session.folder, sweeps)
        session.write(result)
        return result


def compare(first: str | Path | Result, second: str | Path | Result) -> ComparisonResult:
    """Two traces, or the phases of two runs, given as results or as run folders, and the ratio of each quantity."""
    from paceline.report.profiles import ComparisonResult
    from paceline.report.result import Result, load_result

    one, two = (given if isinstance(given, Result) else load_result(given) for given in (first, second))
    return ComparisonResult.of(one, two, capture_environment())


# -- jobs --------------------------------------------------------------------------------------------------------------


def check_counts(**counts: int | None) -> None:
    """Refuse impossible numbers of repetitions, by the names of their flags; None was not given."""
    for name, count in counts.items():
        least = 0 if name == "warmup" else 1
        if count is not None and count < least:
            raise ConfigError(f"--{name} {count}: at least {least} is needed")


def _read_counts(counts: Counts, name: str) -> tuple[int, ...] | None:
    found = (counts,) if isinstance(counts, int) else None if counts is None else tuple(dict.fromkeys(counts))
    if found is not None and (not found or min(found) < 1):
        raise ConfigError(f"{name}={counts}: at least one number of at least 1 is needed")
    return found


def _choose_worlds(ranks: Counts, default: int) -> tuple[int, ...]:
    """The requested numbers of ranks, which must be that of the launched world where there is one."""
    counts, launched = _read_counts(ranks, "ranks"), read_place().world_size if is_launched() else None
    if counts is None:
        return (default if launched is None else launched,)
    if launched is not None and launched > 1 and counts != (launched,):
        listed = ",".join(map(str, counts))
        raise ConfigError(
            f"--ranks {listed} in a launched world of {launched}: leave out --ranks, or launch as many", code="launched"
        )
    return counts


def _choose_one(ranks: Counts, what: str) -> tuple[int]:
    counts = _choose_worlds(ranks, 2)
    if len(counts) != 1:
        raise ConfigError(f"--ranks {','.join(map(str, counts))}: {what} is of one number of ranks")
    return (counts[0],)


def _build_settings(
    model: str, ranks: int, wrapper: str, backend: str, device: str, threads: int | None, job: dict[str, Any]
) -> TrainSettings:
    """A job of ours, with everything checked that can be refused before a rank starts."""

    known = {field.name for field in dataclasses.fields(TrainSettings)}
    if unknown := sorted(set(job) - known):
        raise ConfigError(f"{unknown[0]} is no option of a training job: known are {', '.join(sorted(known))}")
    settings = TrainSettings(
        model=model,
        ranks=ranks,
        wrapper=wrapper,
        backend=canonical_backend(backend),
        device=device,
        threads=threads,
        **job,
    )
    check_job(settings)
    return settings


class _OwnJob:
    """A user's own module and step, or a factory of both: where it runs, and the session that it runs in."""

    def __init__(
        self,
        model: Any,
        step: Callable[[Any], Any] | None,
        ranks: Counts,
        wrapper: str,
        backend: str,
        device: str,
        threads: int | None,
        job: dict[str, Any],
    ) -> None:
        nn = sys.modules.get("torch.nn")
        self.model, self.step, self.wrapper = model, step, wrapper
        is_module = nn is not None and isinstance(model, nn.Module)
        if not is_module and (not callable(model) or step is not None):
            raise ConfigError(
                "profile takes a module and its step, a factory that returns both, or the name of a built-in model; "
                f"it got {type(model).__name__}" + ("" if step is None else " and a step")
            )
        if job:
            raise ConfigError(f"{sorted(job)[0]} is an option of built-in models: a step of your own decides it")
        if wrapper not in WRAPPERS or wrapper == "dp":
            raise ConfigError(f"wrapper {wrapper!r} is unknown here: known are paceline, torch, none")
        counts, place = _read_counts(ranks, "ranks"), find_place()
        if counts is not None and len(counts) != 1:
            raise ConfigError(f"ranks={ranks}: a profile is of one number of ranks")
        world_size = place.world_size if place is not None else 1
        self.ranks = counts[0] if counts is not None else world_size
        # A factory can go to ranks that are started for it; a module stays.
        self.here = is_module or counts is None or (place is not None and world_size > 1)
        if self.here and self.ranks != world_size:
            what = "a module stays in its process" if is_module else f"this process is one of {world_size} ranks"
            raise ConfigError(f"ranks={self.ranks}: {what}; pass a factory of (model, step) in a plain process")
        if self.here and threads is None and nn is not None:
            threads = sys.modules["torch"].get_num_threads()  # the user's own choice
        if is_module and device == "auto":
            device = next((str(param.device) for param in model.parameters()), "auto")
        self.options = {"backend": canonical_backend(backend), "device": device, "threads": threads}
        self.given = (model, step, wrapper, self.options)

    def open(self, verb: str, out: str | Path | None, progress: bool | None) -> Any:
        name = type(self.model).__name__ if self.step is not None else getattr(self.model, "__name__", "factory")
        config = {"model": name, "data": "own", "ranks": self.ranks, "wrapper": self.wrapper} | self.options
        return open_session(verb, config, ranks=self.ranks, out=out, progress=progress, here=self.here)


def _profile_own(
    own: _OwnJob, kind: str, iters: int | None, warmup: int | None, out: str | Path | None, progress: bool | None
) -> Any:
    with own.open("profile" if kind == "all" else f"profile {kind}", out, progress) as session:
        return _finish(
            session,
            session.ask(
                "paceline.measure.profiles:measure_profile",
                (own.given, kind, iters, warmup),
            ),
        )


# -- measuring and results ---------------------------------------------------------------------------------------------


def _measure_layers(
    session: Session, settings: TrainSettings, iters: int, warmup: int | None, default: int
) -> LayerProfileRecord:
    arguments = (settings, "layers", iters, default if warmup is None else warmup)
    record: LayerProfileRecord = session.ask("paceline.measure.profiles:measure_profile", arguments)[0]
    return record


def _finish(session: Session, records: Sequence[Any]) -> Any:
    """Save the run, and its tables and figures."""
    from paceline.report.result import build_result

    result = build_result(session.save(records), session.folder)
    session.write(result)
    return result


def _finish_trace(session: Session, traced: Any, plot: bool) -> TraceResult:
    from paceline.predict.advice import advise
    from paceline.predict.traces import build_overview, find_lateness
    from paceline.report.profiles import TraceResult

    traces, facts = traced
    overviews = [build_overview(trace) for trace in traces]
    document = TraceResult.build_document(overviews, facts, advise(overviews, facts, find_lateness(traces)))
    result = TraceResult(session.save([]), session.folder, document, traces, plot)
    session.write(result)
    return result


def _load_sweeps(paths: Sequence[str | Path], ranks: Sequence[int]) -> list[Any]:
    from paceline.predict.networks import build_sweeps
    from paceline.records import CollectiveRecord, load_run

    sweeps: list[Any] = []
    for path in paths:
        run = load_run(path)
        records = [record for record in run.records if isinstance(record, CollectiveRecord)]
        if not records:
            raise ConfigError(
                f"--curve {path} is a run of `{run.verb}`: give one of `paceline bench allreduce`", code="mismatch"
            )
        found = [sweep for sweep in build_sweeps(records) if set(sweep.ranks) & set(ranks)]
        if not found:
            raise ConfigError(f"--curve {path}: no measured all-reduce of {', '.join(map(str, ranks))} ranks is in it")
        sweeps += found
    return sweeps
