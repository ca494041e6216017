"""What verbs share: how arguments are read, the job (by name, or a user's own), its ranks, and the end of a run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, refuse
from paceline.machine import canonical_backend
from paceline.records.store import Run
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.session import Session, find_place, open_session
from paceline.training.settings import NAMES, TrainSettings, check_job
from paceline.units import parse_size, parse_sizes

Place = str | Path | None
Build = Callable[[Run, Path | None], Any]
Counts = int | Sequence[int]
Names = str | Sequence[str]
Sizes = str | Sequence[str | int]
# The options of a job that say where it runs, for `join_world`.
_WHERE = ("backend", "device", "threads")


def list_counts(counts: Counts, name: str = "ranks") -> tuple[int, ...]:
    """One number or several, without repeats."""
    found = (counts,) if isinstance(counts, int) else tuple(dict.fromkeys(counts))
    if not found or min(found) < 1:
        raise ConfigError(f"{name} {counts}: at least one number of at least 1 is needed")
    return found


def list_names(names: Names) -> tuple[str, ...]:
    """The names of a comma-separated text, or of several, without repeats."""
    found = (names if isinstance(names, str) else ",".join(names)).split(",")
    return tuple(dict.fromkeys(name.strip() for name in found if name.strip()))


def list_sizes(sizes: Sizes) -> tuple[int, ...]:
    """Bytes of sizes that carry their unit, or are bytes already."""
    if isinstance(sizes, str):
        return parse_sizes(sizes)
    return tuple(dict.fromkeys(parse_size(size) if isinstance(size, str) else size for size in sizes))


def choose_worlds(ranks: Counts | None, default: int) -> tuple[int, ...]:
    """The requested numbers of ranks, which must be that of the launched world where there is one."""
    launched = read_place().world_size if is_launched() else None
    if ranks is None:
        return (default if launched is None else launched,)
    counts = list_counts(ranks)
    asked = f"--ranks {','.join(map(str, counts))} in a launched world of {launched}"
    wrong = launched not in (None, 1) and counts != (launched,)
    refuse((wrong, f"{asked}: leave out --ranks, or launch as many"), code="launched")
    return counts


def choose_world(ranks: Counts | None, default: int) -> int:
    """The same where one number is needed."""
    counts = choose_worlds(ranks, default)
    refuse((len(counts) != 1, f"--ranks {','.join(map(str, counts))}: one number is needed here"))
    return counts[0]


def build_settings(**job: Any) -> TrainSettings:
    """A job of ours, with everything checked that can be refused before a rank starts."""
    if unknown := sorted(set(job) - set(NAMES)):
        raise ConfigError(f"{unknown[0]} is no option of a training job: known are {', '.join(sorted(NAMES))}")
    settings = TrainSettings(**job)
    check_job(settings)
    return settings


def finish(
    session: Session, records: Sequence[Any], details: dict[str, Any] | None = None, build: Build | None = None
) -> Any:
    """Save the run first, for a table may refuse its records, and then the tables and figures of its result."""
    from paceline.report.result import build_result

    result = (build or build_result)(session.save(records, details), session.folder)
    session.write(result)
    return result


def check_own(model: Any, step: Callable[[Any], Any] | None, job: dict[str, Any]) -> bool:
    """Whether a user's own job is a module with its step, and not a factory of both; refuses anything else."""
    is_module, kind = hasattr(model, "named_parameters"), type(model).__name__
    is_alone, others = is_module and step is None, [name for name in job if name not in ("wrapper", *_WHERE)]
    refuse((is_alone, f"{kind} without a step: pass step(model), one forward and backward"), code="no-step")
    refuse(
        (is_module != (step is not None) or not callable(step or model),
         f"model is {kind} and step is {type(step).__name__}: pass a module and a function "
         "step(model), a factory that returns both, or the name of a built-in model"),
        (others, f"{', '.join(others)}: options of a model by name; your own job decides them itself"),
    )  # fmt: skip
    return is_module


def open_job(
    verb: str, model: Any, step: Callable[[Any], Any] | None, ranks: int, job: dict[str, Any], out: Place,
    progress: bool | None, here: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """The session of a job, and what says on its ranks which job it is: settings, or a user's own model and step, its
    wrapper, and the options of `join_world`. `here`: in this process, and not on ranks to which a factory is sent."""
    if isinstance(model, str):
        refuse((step is not None, f"model {model!r} with a step: a model by name has its own; pass a module with it"))
        settings = build_settings(model=model, ranks=ranks, **job)
        return open_session(verb, settings.to_json(), ranks=ranks, out=out, progress=progress), settings
    where = {name: job[name] for name in _WHERE} | {"backend": canonical_backend(job["backend"])}
    name = getattr(model, "__name__", "factory") if step is None else type(model).__name__
    if step is not None and where["device"] == "auto":
        where["device"] = next((str(param.device) for param in model.parameters()), "auto")
    if here and where["threads"] is None and "torch" in sys.modules:
        where["threads"] = sys.modules["torch"].get_num_threads()  # the user's own choice
    if not here and find_place() is None:
        try:
            pickle.dumps(model)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            what = f"the factory {name} cannot be sent to another process ({error})"
            raise ConfigError(f"{what}: define it at the top level of a module", code="not-picklable") from None
    config = {"model": name, "ranks": ranks, "wrapper": job["wrapper"], **where}
    opened = open_session(verb, config, ranks=ranks, out=out, progress=progress, here=here)
    return opened, (model, step, job["wrapper"], where)
