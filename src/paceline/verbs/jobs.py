"""Shared code of all verbs: parsing arguments, opening a job (by name or from a user), choosing ranks, finishing a
run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, refuse, suggest
from paceline.machine import canonical_backend
from paceline.options import RESUMED, Option, refuse_given
from paceline.records.store import Run
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.runtime.ranks.session import Session, find_place, open_session
from paceline.training.train_settings import NAMES, TrainSettings, check_job
from paceline.units import parse_size, parse_sizes
from paceline.workloads.data import is_own, is_own_data

Place = str | Path | None
Build = Callable[[Run, Path | None], Any]
Counts = int | Sequence[int]
Names = str | Sequence[str]
Sizes = str | Sequence[str | int]


def list_counts(counts: Counts, name: str = "ranks") -> tuple[int, ...]:
    """Parse one or several numbers, without repeats."""
    found = (counts,) if isinstance(counts, int) else tuple(dict.fromkeys(counts))
    if not found or min(found) < 1:
        raise ConfigError(f"{name} {counts}: must be one or more numbers of at least 1")
    return found


def list_names(names: Names) -> tuple[str, ...]:
    """The names in one or several comma-separated strings, without repeats."""
    found = (names if isinstance(names, str) else ",".join(names)).split(",")
    return tuple(dict.fromkeys(name.strip() for name in found if name.strip()))


def list_sizes(sizes: Sizes) -> tuple[int, ...]:
    """Sizes in bytes, from strings with a unit or numbers of bytes."""
    if isinstance(sizes, str):
        return parse_sizes(sizes)
    return tuple(dict.fromkeys(parse_size(size) if isinstance(size, str) else size for size in sizes))


def choose_worlds(ranks: Counts | None, default: int) -> tuple[int, ...]:
    """The requested numbers of ranks; in a launched world, its size is the only valid one."""
    size = read_place().world_size
    if ranks is None:
        return (size if is_launched() else default,)
    counts = list_counts(ranks)
    if size > 1 and counts != (size,):
        several = "the command starts these ranks itself; run it without a launcher"
        advice = several if len(counts) > 1 else "leave out --ranks, or launch that many"
        asked = f"--ranks {','.join(map(str, counts))} in a launched world of {size}"
        raise ConfigError(f"{asked}: {advice}", code="launched")
    return counts


def choose_world(ranks: Counts | None, default: int) -> int:
    """Like `choose_worlds`, but a single number."""
    counts = choose_worlds(ranks, default)
    refuse((len(counts) != 1, f"--ranks {','.join(map(str, counts))}: must be a single number here"))
    return counts[0]


def choose_up_to(ranks: Counts | None, default: int) -> tuple[tuple[int, ...], list[str]]:
    """The requested numbers of ranks that fit in the launched world, and a warning about the others.

    A launched world of one rank, such as the shell of a batch job, is not a limit: local ranks are started instead.
    """
    if ranks is None:
        return choose_worlds(None, default), []
    counts, size = list_counts(ranks), read_place().world_size
    fitting = tuple(count for count in counts if size == 1 or count <= size)
    others = ", ".join(str(count) for count in counts if count not in fitting)
    advice = "start more ranks, or leave out --ranks"
    refuse((not fitting, f"--ranks {others} in a launched world of {size}: {advice}"), code="launched")
    return fitting, [f"not measured: {others} ranks, because the launched world has {size}"] if others else []


def brings_data(model: str, data: str | None) -> bool:
    """Whether a job uses the user's data, which may have its own batch size."""
    return is_own_data(data) if data else is_own(model)


def refuse_unknown(job: Iterable[str]) -> None:
    """Refuse names that are not settings of a training job."""
    if unknown := sorted(set(job) - set(NAMES)):
        what = f"{unknown[0]!r} is not an option of a training job"
        raise ConfigError(f"{what}: {suggest(unknown[0], NAMES)}use one of {', '.join(sorted(NAMES))}")


def build_settings(**job: Any) -> TrainSettings:
    """The settings of a built-in job, checked as far as possible before a rank starts."""
    refuse_unknown(job)
    settings = TrainSettings(**job)
    check_job(settings)
    return settings


def finish(
    session: Session, records: Sequence[Any], details: dict[str, Any] | None = None, build: Build | None = None
) -> Any:
    """Save the run, then the tables and figures of its result. The run comes first, because a table may raise."""
    from paceline.report.result import build_result

    result = (build or build_result)(session.save(records, details), session.folder)
    session.write(result)
    return result


def check_resume(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> None:
    """Refuse options that a resumed study would ignore."""
    changed = [name for name, value in given.items() if value != (defaults or {}).get(name)]
    refuse_given(changed, RESUMED, code="resume")


def open_job(
    verb: str, model: Any, step: Callable[[Any], Any] | None, ranks: Counts | None, job: dict[str, Any], out: Place,
    progress: bool | None,
) -> tuple[Any, Any]:  # fmt: skip
    """The session of a job, and a description of the job for its ranks: the settings of a built-in job, by default on
    two ranks; or a user's model and step, the wrapper, and the options of `join_world`.

    A module runs in this process. So does a factory, unless `ranks` requests new processes, which then receive the
    factory. Jobs in this process keep the process's number of threads.
    """
    if isinstance(model, str):
        refuse((step is not None, f"model {model!r} with a step: a built-in model has its own; pass a module instead"))
        settings = build_settings(model=model, ranks=choose_world(ranks, 2), **job)
        return open_session(verb, settings.to_json(), ranks=settings.ranks, out=out, progress=progress), settings
    is_module = hasattr(model, "named_parameters")
    kind = type(model).__name__
    name = kind if is_module else getattr(model, "__name__", "factory")
    if is_module and step is None:
        raise ConfigError(
            f"{kind} without a step: pass step(model), which runs one forward and backward pass", code="no-step"
        )
    if is_module != (step is not None) or not callable(step or model):
        advice = "a module and a function step(model), a factory that returns both, or the name of a built-in model"
        raise ConfigError(f"model is {kind} and step is {type(step).__name__}: pass {advice}")
    wrapper = job.pop("wrapper")
    Option(choices=("paceline", "torch", "none")).check("wrapper", wrapper)
    where = {name: job.pop(name) for name in ("backend", "device", "threads")}
    place = find_place()
    world_size = place.world_size if place is not None else 1
    counts = (world_size,) if ranks is None else list_counts(ranks)
    here = is_module or ranks is None or world_size > 1
    what = "a module runs in this process" if is_module else f"this process is one of {world_size} ranks"
    advice = "in a process that is not a rank, pass a factory that returns (model, step)"
    refuse(
        (job, f"{', '.join(job)}: only for built-in models; your own job decides this itself"),
        (len(counts) != 1, f"ranks={ranks}: must be a single number"),
        (here and counts != (world_size,), f"ranks={ranks}: {what}; {advice}"),
    )
    where["backend"] = canonical_backend(where["backend"])
    if is_module and where["device"] == "auto":
        where["device"] = next((str(param.device) for param in model.parameters()), "auto")
    if here and where["threads"] is None and "torch" in sys.modules:
        where["threads"] = sys.modules["torch"].get_num_threads()  # as the user chose
    if not here and place is None:
        try:
            pickle.dumps(model)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = f"the factory {name} cannot be sent to another process ({error})"
            raise ConfigError(f"{what}: define it at the top level of a module", code="not-picklable") from None
    config = {"model": name, "ranks": counts[0], "wrapper": wrapper, **where}
    opened = open_session(verb, config, ranks=counts[0], out=out, progress=progress, here=here)
    return opened, (model, step, wrapper, where)
