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


def choose_up_to(ranks: Counts | None, default: int) -> tuple[tuple[int, ...], list[str]]:
    """The requested numbers of ranks that the launched world can hold, and a warning about the others.

    A launched world of one rank, such as a shell of a batch job, does not limit them: local ranks are started.
    """
    if ranks is None:
        return choose_worlds(None, default), []
    counts, size = list_counts(ranks), read_place().world_size
    fitting = tuple(count for count in counts if size == 1 or count <= size)
    others = ", ".join(str(count) for count in counts if count not in fitting)
    text = f"--ranks {others} in a launched world of {size}: start more ranks, or leave out --ranks"
    refuse((not fitting, text), code="launched")
    return fitting, [f"not measured: {others} ranks, because the launched world has {size}"] if others else []


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


class OwnJob:
    """A user's own module and step, or a factory of both. `where`: backend, device and threads, for `join_world`."""

    def __init__(self, model: Any, step: Callable[[Any], Any] | None, wrapper: str, job: dict[str, Any], **where: Any):
        is_module, kind = hasattr(model, "named_parameters"), type(model).__name__
        is_alone = is_module and step is None
        refuse((is_alone, f"{kind} without a step: pass step(model), one forward and backward"), code="no-step")
        refuse(
            (is_module != (step is not None) or not callable(step or model),
             f"model is {kind} and step is {type(step).__name__}: pass a module and a function "
             "step(model), a factory that returns both, or the name of a built-in model"),
            (job, f"{', '.join(job)}: options of a model by name; your own job decides them itself"),
        )  # fmt: skip
        self.model, self.step, self.wrapper, self.is_pair = model, step, wrapper, is_module
        self.name = kind if is_module else getattr(model, "__name__", "factory")
        self.where = where | {"backend": canonical_backend(where["backend"])}

    def open(self, verb: str, ranks: int, here: bool, out: Place, progress: bool | None) -> Any:
        """The session of the job, in this process (`here`), or on ranks to which the factory is sent."""
        if self.is_pair and self.where["device"] == "auto":
            self.where["device"] = next((str(param.device) for param in self.model.parameters()), "auto")
        if here and self.where["threads"] is None and "torch" in sys.modules:
            self.where["threads"] = sys.modules["torch"].get_num_threads()  # the user's own choice
        if not here and find_place() is None:
            try:
                pickle.dumps(self.model)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                what = f"the factory {self.name} cannot be sent to another process ({error})"
                raise ConfigError(f"{what}: define it at the top level of a module", code="not-picklable") from None
        config = {"model": self.name, "ranks": ranks, "wrapper": self.wrapper, **self.where}
        return open_session(verb, config, ranks=ranks, out=out, progress=progress, here=here)
