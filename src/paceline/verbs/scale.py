"""`paceline.scale`: does a job scale? Batch sizes on one rank, more ranks, large batches, and a page of all of it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline import machine
from paceline.errors import LaunchError, refuse
from paceline.measure.settings import (
    BatchSettings,
    LargeBatchSettings,
    ScaleSettings,
    Setup,
    StrategiesSettings,
    StudySettings,
    check_counts,
)
from paceline.predict.networks import find_links
from paceline.predict.strategies import list_strategies
from paceline.records import BatchRecord, LargeBatchRecord, Record, StepRecord
from paceline.records.store import Run, Study, load_run
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.session import Session, Task, open_session
from paceline.training.recipes import NO_RECIPE, Recipe
from paceline.training.settings import TrainSettings, check_job
from paceline.verbs.jobs import (
    Counts,
    Names,
    Place,
    brings_data,
    check_resume,
    choose_world,
    finish,
    list_counts,
    list_names,
)
from paceline.workloads.data import parse_data

if TYPE_CHECKING:
    from paceline.report.large_batch import LargeBatchResult
    from paceline.report.result import Result
    from paceline.report.scaling import BatchResult, RanksResult, ReportResult
    from paceline.report.strategies import StrategiesResult

_ROOM = "paceline.measure.scaling:"
_STRATEGIES = "int8,int4,topk:0.01,powersgd:4"
_RECIPES = ("none", "sqrt", "linear", "linear+warmup", "linear+warmup+smoothing", "lars+warmup", "lamb+warmup", "grow")


def batch(
    model: str = "cnn", batch_size: Counts = (32, 128, 512, 2048), *, epochs: int = 3, device: str = "auto",
    out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> BatchResult:  # fmt: skip
    """Which batch size keeps one rank busy? Whole epochs at each size, the first of them a warm-up.

    Args:
        model: A name, or "FILE.py:FUNCTION", as in `paceline.train`.
        batch_size: The sizes to compare.
        epochs: At each size.
        device: cpu or cuda. `auto` takes GPUs where each rank has one.
        out: Save the study in a new folder there, cell by cell.
        resume: The folder of an interrupted study, which has its own settings: other arguments must be left out.
        job: Further settings of the job, under the names of the options of `paceline train` (data, precision,
            channels, ...).
    """
    _refuse_launched("batch sizes are compared on one rank")
    return cast("BatchResult", _run_study("batch", locals()))


def _build_batch(*, batch_size: Counts, epochs: int, device: str, **job: Any) -> BatchSettings:
    _refuse(job, ("ranks", "wrapper", "backend", "plan", "sync_batchnorm", "accumulate"), "one rank computes alone")
    _refuse(job, ("steps",), "whole epochs are timed; give --epochs")
    sizes = list_counts(batch_size, "batch_size")
    train = TrainSettings(batch_size=sizes[0], wrapper="none", device=_choose_device(device), **job)
    return BatchSettings(job=train, batch_sizes=sizes, epochs=epochs)


def _measure_batch(session: Session, settings: BatchSettings, at_once: int = 1) -> list[Record]:
    def describe(records: Sequence[Record]) -> str:
        record = next(record for record in records if isinstance(record, BatchRecord))
        return record.failure or f"{record.samples_per_s:.0f} samples/s"

    tasks = []
    for size in settings.batch_sizes:
        job = dataclasses.replace(settings.job, batch_size=size)
        on_death, arguments = functools.partial(build_killed, job, size), (job, settings.epochs)
        tasks.append(Task(f"batch size {size}", _ROOM + "measure_batch", arguments, on_death=on_death))
    return session.run(tasks, describe)


def build_killed(job: TrainSettings, size: int, error: LaunchError) -> list[Record] | None:
    """The row of a batch size at which the kernel killed the process."""
    record = BatchRecord(
        model=job.model, data=parse_data(job.data)[0], device=job.device, precision=job.precision,
        threads=job.threads or 1, batch_size=size, num_samples=size, num_steps=1,
        failure="killed, as by the kernel when memory is exhausted",
    )  # fmt: skip
    return [record] if error.code == "killed" else None


def ranks(
    model: str = "cnn", ranks: Counts | None = None, batch_size: Counts = (8, 32),
    global_batch_size: Counts | None = None, *, wrapper: Names = ("paceline", "torch"), backend: Names = "auto",
    network: str = "10gbe,100gbe", predict_ranks: Counts = (64, 1024), iters: int | None = None, device: str = "auto",
    out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> RanksResult:  # fmt: skip
    """Do more ranks help? Weak and strong scaling, all wrappers and backends in turns, compared with one rank.

    The other arguments are those of `batch`.
    Inside a launched world this is collective: every rank must call it.

    Args:
        ranks: By default 1, 2, 4, ... up to the cores or GPUs, or to the launched world.
        batch_size: Samples per rank (weak scaling).
        global_batch_size: Samples over all ranks (strong scaling). By default one that all can share.
        wrapper: Wrappers to compare.
        backend: Backends to compare.
        network: For which networks the curve is predicted.
        predict_ranks: For which numbers of ranks it is.
        iters: Steps that are timed. By default as the time allows.
    """
    return cast("RanksResult", _run_study("ranks", locals()))


def _build_ranks(
    *, ranks: Counts | None, batch_size: Counts, global_batch_size: Counts | None, wrapper: Names, backend: Names,
    network: str, predict_ranks: Counts, iters: int | None, device: str, **job: Any,
) -> ScaleSettings:  # fmt: skip
    _refuse(job, ("plan",), "wrappers are compared with their default buckets")
    _refuse(job, ("sync_batchnorm",), "it would wait for ranks that do not take part in a turn")
    find_links(network)  # refuses an unknown one
    counts, sizes, device = _choose_counts(ranks), list_counts(batch_size, "batch_size"), _choose_device(device)
    wrappers, backends, most = list_names(wrapper), list_names(backend), max(counts)
    if backends == ("auto",):
        gpus = machine.count_gpus()
        on_gpu = ("nccl",) if machine.can_serve_nccl(gpus, most) else ("gloo",)
        backends = on_gpu if device == "cuda" else ("gloo", "shm")
    setups = [Setup(w, b) for b in backends for w in wrappers if w != "dp"]
    setups += [Setup("dp", backends[0])] if "dp" in wrappers else []
    accumulate = job.get("accumulate") or 1
    # By default the least from twice the largest batch on that all of them can share.
    shares = math.lcm(*counts) * accumulate
    least = shares * -(-2 * max(sizes) // shares)
    strong = list_counts(least if global_batch_size is None else global_batch_size, "global_batch_size")
    # A rank has the same number of threads alone as among others: the study compares ranks, not machines.
    job["threads"] = job.get("threads") or max(1, machine.count_cores() // most)
    is_made = not brings_data(job["model"], job.get("data")) and job.get("data", "synthetic").startswith("synthetic")
    if job.get("samples") is None and is_made:
        job["samples"] = max(2048, max(max(sizes) * most, *strong, 0) * accumulate)
    train = TrainSettings(batch_size=sizes[0], wrapper="none", backend="gloo", device=device, **job)
    return ScaleSettings(
        job=train, ranks=counts, setups=tuple(setups), batch_sizes=sizes, global_batch_sizes=strong, iters=iters,
        network=network, predict_ranks=",".join(map(str, list_counts(predict_ranks, "predict_ranks"))),
    )  # fmt: skip


def _choose_counts(ranks: Counts | None) -> tuple[int, ...]:
    """1, 2, 4, ... up to the cores (or GPUs), or to the launched world; one rank is always there to compare with."""
    launched = read_place().world_size if is_launched() else 1
    most = launched if launched > 1 else max(2, machine.count_gpus() or machine.count_cores())
    counts = list_counts(ranks) if ranks is not None else tuple(2**k for k in range(most.bit_length()))
    asked = f"{max(counts)} ranks in a launched world of {launched}"
    refuse((1 < launched < max(counts), f"{asked}: use at most that many"), code="launched")
    return tuple(sorted({1, *counts}))


def _measure_ranks(session: Session, settings: ScaleSettings, at_once: int = 1) -> list[Record]:
    """The cells of all ranks, the job's layers on one, and the all-reduces alone."""

    def sweep_up_to_all(records: Sequence[Record]) -> tuple[Any, ...]:
        most_bytes, place = max(one.num_bytes for one in records if isinstance(one, StepRecord)), session.place
        return (settings.sweep(most_bytes, place is None or place.local_world_size in (None, place.world_size)),)

    most = settings.num_ranks
    tasks = [Task(cell.name, _ROOM + "measure_scaling", (settings, cell), most, weight=4.0) for cell in settings.cells]
    if session.place is None:  # in a launched world the other ranks would compute at the same time
        sizes = sorted({cell.batch_size(1, settings.job.accumulate or 1) for cell in settings.cells})
        jobs = [dataclasses.replace(settings.job, batch_size=size) for size in sizes]
        layers = "paceline.measure.profiles:measure_profile"
        # The cells have steps of the wrapper on one rank themselves.
        asked = "layers", 12, 2, 0, 1, 0, False
        tasks += [Task(f"layers {job.batch_size}", layers, (job, *asked)) for job in jobs]
    if settings.backends and most > 1:
        tasks.append(Task("allreduce", _ROOM + "measure_allreduce", ranks=most, weight=2.0, follow=sweep_up_to_all))
    return session.run(tasks)


def large_batch(
    model: str | None = None, base_batch_size: int = 16, global_batch_size: Counts | None = None, *,
    recipes: Names | None = None, seeds: int = 3, epochs: int = 6, updates: int | None = None, lr: float = 0.005,
    schedule: str | None = None, batch_size: int = 512, evaluations: int = 6, ranks: int | None = None,
    at_once: int | None = None, out: Place = None, resume: Place = None, progress: bool | None = None, **job: Any,
) -> LargeBatchResult:  # fmt: skip
    """What does a large global batch cost in test accuracy, and which recipe repairs it? Several seeds each.

    Where numbers are predicted, test losses are compared. The other arguments are those of `batch`.
    Inside a launched world this is collective: every rank must call it.

    Args:
        model: By default a cnn so small that the study takes minutes.
        base_batch_size: The baseline, for which the learning rate is right.
        global_batch_size: By default 16 times as large.
        recipes: Switches joined by +, such as "linear+warmup". By default all usual ones that the job can take.
        seeds: How many runs each batch and recipe has.
        updates: Also runs of this many updates. By default twice those of the largest batch; 0 for none.
        lr: The learning rate of the baseline.
        schedule: By default cosine, or piecewise with `lr_drops`.
        batch_size: What a rank computes at once.
        evaluations: How often a run is tested.
        at_once: Runs that share the machine. By default 1, or as many as the resumed study had.
    """
    return cast("LargeBatchResult", _run_study("large-batch", locals()))


def _build_large_batch(
    *, model: str | None, base_batch_size: int, global_batch_size: Counts | None, recipes: Names | None, seeds: int,
    updates: int | None, batch_size: int, evaluations: int, ranks: int | None, **job: Any,
) -> LargeBatchSettings:  # fmt: skip
    _refuse(job, ("accumulate",), "it follows from the batches; batch_size is what a rank computes at once")
    _refuse(job, ("steps",), "batches are compared after equal epochs, and after equal --updates")
    check_counts(base_batch_size=base_batch_size, seeds=seeds)
    _choose_schedule(job)
    if model is None and not {"channels", "hidden"} & set(job):
        job |= {"channels": (8, 16), "hidden": 64}
    whole = f"model {model}: its step would decide learning rates and batches; return a module, and name the data"
    refuse((brings_data(model or "", job.get("data")) and not job.get("data"), whole), code="own-type")
    if job.get("data", "synthetic") == "synthetic":
        job = {"samples": 1024} | job
    job = {"global_batch_size": base_batch_size} | job
    train = TrainSettings(model=model or "cnn", ranks=choose_world(ranks, 1), **job)
    # By default all that this job can have: what changes BatchNorm only where there is one, as far as is known here.
    for_norms = ("linear+warmup+ghost", *(["linear+warmup+sync"] if train.ranks > 1 else []))
    usual = [*_RECIPES, *(for_norms if train.model.startswith("resnet") else ())]
    usual = [text for text in usual if not (train.predicts_numbers and Recipe.parse(text).is_for_classes)]
    names = tuple(dict.fromkeys(Recipe.parse(text).text for text in list_names(usual if recipes is None else recipes)))
    larger = 16 * base_batch_size if global_batch_size is None else global_batch_size
    return LargeBatchSettings(
        job=train, base_batch_size=base_batch_size, global_batch_sizes=list_counts(larger, "global_batch_size"),
        recipes=names if NO_RECIPE in names else (NO_RECIPE, *names),  # to compare the others with
        seeds=tuple(train.seed + number for number in range(seeds)),
        updates=updates, most_at_once=batch_size, evaluations=evaluations,
    )  # fmt: skip


def _describe_run(records: Sequence[Record]) -> str:
    record = next(record for record in records if isinstance(record, LargeBatchRecord))
    if record.failure:
        return record.failure
    loss, accuracy = record.curve[-1].test_loss, record.curve[-1].test_accuracy
    return f"test loss {loss:.4g}" if accuracy is None else f"test accuracy {accuracy:.2%}"


def _measure_large_batch(session: Session, settings: LargeBatchSettings, at_once: int = 1) -> list[Record]:
    num_samples, has_norm = session.ask(_ROOM + "survey_job", (settings.job,), settings.job.ranks)
    settings.check_norms(has_norm)
    tasks = []
    for cell in settings.list_cells(num_samples):
        steps = cell.settings.steps
        weight = steps * cell.global_batch_size if steps is not None else num_samples * cell.settings.epochs
        arguments = (cell, settings.evaluations, settings.seeds[0])
        tasks.append(Task(cell.name, _ROOM + "measure_training", arguments, settings.job.ranks, float(weight)))
    return session.run(tasks, _describe_run, at_once)


def strategies(
    model: str | None = None, strategies: Names | None = None, *, workers: int | None = None, ranks: int | None = None,
    seeds: int = 3, epochs: int | None = None, lr: float = 0.02, schedule: str | None = None, evaluations: int = 6,
    target: float | None = None, at_once: int | None = None, out: Place = None, resume: Place = None,
    progress: bool | None = None, **job: Any,
) -> StrategiesResult:  # fmt: skip
    """What does sending less cost in test accuracy? The same job with each strategy, several seeds each.

    The other arguments are those of `large_batch`.

    Args:
        model: By default a small cnn, on synthetic images under so much noise that no strategy gets all of them right.
        strategies: "all", or such as "int8,powersgd:4". float32 (`dense`) and `bf16` are always there, to compare with.
        workers: Replicas in one process that exchange as ranks would, 4 by default.
        ranks: Run the job on ranks instead; then its times count.
        epochs: 6 by default, unless `steps` are given.
        target: A test accuracy (0 to 1), or a test loss: when does each strategy reach it?
    """
    return cast("StrategiesResult", _run_study("strategies", locals()))


def _build_strategies(
    *, model: str | None, strategies: Names | None, workers: int | None, ranks: int | None, seeds: int,
    epochs: int | None, evaluations: int, target: float | None, **job: Any,
) -> StrategiesSettings:  # fmt: skip
    check_counts(seeds=seeds, workers=workers)
    both = f"--steps {job.get('steps')} with --epochs {epochs}: a run has one length; leave one out"
    refuse(("steps" in job and epochs is not None, both))
    _choose_schedule(job)
    if "steps" not in job:
        job["epochs"] = 6 if epochs is None else epochs
    if model is None and not {"channels", "hidden"} & set(job):
        job |= {"channels": (8, 16), "hidden": 64}
    if model is None:
        job = {"data": "synthetic:noisy"} | job
    if job.get("data", "synthetic").startswith("synthetic"):
        job = {"samples": 1024} | job
    count = 1 if ranks is None else choose_world(ranks, 1)
    train = TrainSettings(
        model=model or "cnn", ranks=count, workers=(4 if ranks is None else 1) if workers is None else workers, **job
    )
    names = list_strategies(_STRATEGIES if strategies is None else strategies, can_shard=train.workers == 1)
    return StrategiesSettings(
        job=train, strategies=tuple(strategy.text for strategy in names), evaluations=evaluations, target=target,
        seeds=tuple(train.seed + number for number in range(seeds)),
    )  # fmt: skip


def _measure_strategies(session: Session, settings: StrategiesSettings, at_once: int = 1) -> list[Record]:
    ranks, seed = settings.job.ranks, settings.seeds[0]
    session.ask(_ROOM + "survey_job", (settings.job,), ranks)  # refuses data without an end, and without a test set
    tasks = [
        Task(cell.name, _ROOM + "measure_training", (cell, settings.evaluations, seed), ranks)
        for cell in settings.list_cells()
    ]
    return session.run(tasks, _describe_run, at_once)


def report(
    runs: Sequence[str | Path] = (), *, out: Place = None, resume: Place = None, progress: bool | None = None
) -> ReportResult:
    """The whole study on one page, from finished runs of `batch`, `ranks` and `large_batch`, or measured here.

    Args:
        runs: Folders of finished runs. Without them the three studies are measured with their defaults, each in its own
            folder inside that of the report.
        out: Save the report in a new folder there.
        resume: The folder of an interrupted report.
    """
    from paceline.report.result import load_result
    from paceline.report.scaling import ReportResult

    _refuse_launched("a report starts the ranks of its studies itself")
    if resume is not None:
        is_none = not any((Path(resume) / name).is_dir() for name in STUDIES)
        refuse((runs, f"--resume {resume} with runs: a page of finished runs has nothing to resume"), code="resume")
        check_resume({"out": out})
        known = ", ".join(STUDIES)
        refuse((is_none, f"--resume {resume}: it holds none of {known}; give the folder of a report"), code="missing")
    parts: list[Result] = [load_result(path) for path in runs]
    for part in parts:
        found, taken = f"{part.folder} is a run of `{part.run.verb}`", [f"scale {name}" for name in STUDIES]
        refuse((part.run.verb not in taken, f"{found}: a report takes those of {', '.join(taken)}"), code="other-verb")
    usual = [name for name in STUDIES if name != "strategies"]
    settings = {} if runs else {name: _build(name, **_get_defaults(name)) for name in usual}
    most = max((each.num_ranks for each in settings.values()), default=1)
    with open_session(
        "scale report", {}, ranks=most, out=out, resume=resume, progress=progress, can_resume=True
    ) as session:
        for name, each in settings.items():
            verb, config = f"scale {name}", each.to_json()
            if session.folder is None:
                opened = open_session(verb, config, ranks=session.ranks, progress=session.progress)
            else:
                opened = session.open_part(name, verb, config, same_machine=each.is_timed)
            with opened as study:  # one that is resumed has its own settings
                study.share_load(session)
                parts.append(_finish(study, name, type(each).from_json(study.config)))
        if session.is_finished and session.folder is not None:
            run = load_run(session.folder)
        else:
            places = [str(part.folder.absolute()) for part in parts if part.folder is not None]
            here = [os.path.relpath(place, session.folder) for place in places] if session.folder else places
            run = Run("scale report", {"runs": here}, session.environment, ())
        result = ReportResult(run, session.folder, parts)
        session.write(result)
        return result


# How each study is built from the arguments of its verb, and measured; and the verb.
STUDIES: dict[str, tuple[type[StudySettings], Callable[..., StudySettings], Callable[..., list[Record]], Any]] = {
    "batch": (BatchSettings, _build_batch, _measure_batch, batch),
    "ranks": (ScaleSettings, _build_ranks, _measure_ranks, ranks),
    "large-batch": (LargeBatchSettings, _build_large_batch, _measure_large_batch, large_batch),
    "strategies": (StrategiesSettings, _build_strategies, _measure_strategies, strategies),
}


def _get_defaults(name: str) -> dict[str, Any]:
    """The settings of a study that its verb has by default."""
    leave_out = ("out", "resume", "progress", "at_once", "job")
    return {n: p.default for n, p in inspect.signature(STUDIES[name][3]).parameters.items() if n not in leave_out}


def _build(name: str, **given: Any) -> StudySettings:
    """The settings of a study, with everything checked that can be refused before a rank starts."""
    settings = STUDIES[name][1](**given)
    settings.check()
    check_job(settings.job)
    settings.check_size()
    return settings


def _run_study(name: str, given: dict[str, Any]) -> Any:
    """Run the study of a verb with these arguments, or what is missing of one that is resumed with its own settings."""
    out, resume, progress, job = (given.pop(name) for name in ("out", "resume", "progress", "job"))
    at_once, verb = given.pop("at_once", None), f"scale {name}"
    assert set(given) == set(_get_defaults(name)), f"{verb}: arguments and no other locals, not {sorted(given)}"
    check_counts(at_once=at_once)
    if resume is None:
        settings = _build(name, **given, **job)
    else:
        check_resume({"out": out, **given, **job}, _get_defaults(name))
        saved = Study.load(Path(resume), verb).config
        settings, at_once = STUDIES[name][0].from_json(saved), at_once or saved.get("at_once")
    config = settings.to_json() | ({} if at_once is None else {"at_once": at_once})
    with open_session(
        verb, config, ranks=settings.num_ranks, out=out, resume=resume, progress=progress, cells=True,
        same_machine=settings.is_timed,
    ) as session:  # fmt: skip
        return _finish(session, name, settings, at_once or 1)


def _finish(session: Session, name: str, settings: StudySettings, at_once: int = 1) -> Any:
    """A finished study has its records in its run: no rank is started."""
    session.is_timed = settings.is_timed
    return finish(session, [] if session.is_finished else STUDIES[name][2](session, settings, at_once))


def _choose_schedule(job: dict[str, Any]) -> None:
    """One that fits, where none was given."""
    if job["schedule"] is None:
        job["schedule"] = "piecewise" if job.get("lr_drops") else "cosine"


def _refuse(job: dict[str, Any], names: Sequence[str], why: str) -> None:
    """An option that would change nothing is refused, not ignored."""
    refuse(*((name in job, f"--{name.replace('_', '-')}: {why}; leave it out") for name in names), code="unused")


def _choose_device(device: str) -> str:
    return device if device != "auto" else "cuda" if machine.count_gpus() else "cpu"


def _refuse_launched(why: str) -> None:
    size = read_place().world_size if is_launched() else 1
    refuse((size > 1, f"in a launched world of {size}: {why}; start it without the launcher"), code="launched")
