"""`paceline.train`: train a model on one rank or many, save it, resume it, and see where the time goes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError
from paceline.machine import canonical_backend
from paceline.records.store import Run, write_new
from paceline.records.training import CONFIG_FILE, METRICS_FILE, load_config, load_metrics
from paceline.report.training import TrainRunResult, render_config
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.session import Session, open_session
from paceline.training.schedules import format_growths
from paceline.training.settings import TrainSettings, check_job
from paceline.workloads.data.sources import parse_data

# What a resumed run may change: how it is run, and for how long, but not what is computed. Data may move.
_CHANGEABLE = (
    "ranks", "backend", "device", "threads", "epochs", "save_every", "keep", "profile", "tensorboard", "batch_size",
    "accumulate", "steps", "grow",
)  # fmt: skip
_NAMES = tuple(field.name for field in dataclasses.fields(TrainSettings))


def train(
    model: str | None = None,
    data: str | None = None,
    ranks: int | None = None,
    epochs: int | None = None,
    *,
    resume: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> TrainRunResult:
    """Train a model, and return its epochs, its metrics and where the time went.

    `model`: a name ("cnn", the default, "resnet18", "gpt2-tiny", "hf:NAME") or "FILE.py:FUNCTION". `data`: "synthetic"
    (the default) or "mnist:FOLDER" and so on. `ranks`: by default those of the launched world or, in a plain process,
    1. `epochs`: 1 by default. `settings` are the fields of `TrainSettings`, named as the options of `paceline train`:
    `batch_size`, `lr`, `optimizer`, `schedule`, `wrapper`, `backend`, `steps`, `save_every`, ...

    `out`: save the run in a new folder there: metrics, checkpoints and the trained weights. Without it nothing is
    written. `resume`: the folder of a run, which resumes from its newest checkpoint; its own settings hold, and only
    those that do not change the result may be given.
    Inside a launched world this is collective: every rank must call it and gets the same result.
    """
    named = {"model": model, "data": data, "ranks": ranks, "epochs": epochs}
    given = {name: value for name, value in named.items() if value is not None} | settings
    if unknown := sorted(set(given) - set(_NAMES)):
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; known are {', '.join(_NAMES)}")
    if "backend" in given:
        given["backend"] = canonical_backend(given["backend"])
    _check_given(given, resume, out)
    if resume is None:
        wanted = TrainSettings(**given | {"ranks": _choose_ranks(given.get("ranks"))})
        num_before = 0
    else:
        resume = Path(resume)
        wanted, num_before = _load_resumed(resume, given)
    check_job(wanted)

    config = wanted.to_json()
    with open_session(
        "train", config, ranks=wanted.ranks, out=out, resume=resume, progress=progress, can_resume=True
    ) as session:
        folder = session.folder
        session.saved = lambda: _describe_saved(folder)
        _save_settings(session, wanted, resume)
        rows_wanted = folder is None or session.place is not None
        with _discard_false_start(folder if resume is None and session.is_leader else None):
            arguments = (wanted, folder, resume is not None, rows_wanted)
            outcome = session.ask(
                "paceline.training.loop:train", arguments, on_interrupt="stop" if folder is None else "save"
            )
        if outcome.signal:  # to ranks that this process started, Ctrl-C is a SIGTERM
            number = session.signal or outcome.signal
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        ended = {
            "steps": outcome.step, "world_size": wanted.ranks, "backend": outcome.backend, "device": outcome.device,
            "num_parameters": outcome.num_parameters,
        }  # fmt: skip
        if folder is not None and session.is_leader:
            update_config(folder, outcome=ended)
        notes = list(outcome.notes)
        if resume is not None and outcome.step == num_before:
            more = "--epochs" if wanted.steps is None else "--steps"
            notes.append(f"the run was already finished, after {outcome.step} steps; to train on, give more {more}")
        run = Run("train", config | {"outcome": ended}, session.environment, (), tuple(notes))
        result = TrainRunResult(run, folder, outcome.rows if rows_wanted else None)
        session.write(result)
        return result


def _choose_ranks(ranks: int | None) -> int:
    launched = read_place().world_size if is_launched() else 1
    if ranks is None:
        return launched
    if launched not in (1, ranks):
        raise ConfigError(f"--ranks {ranks} in a launched world of {launched}: leave out --ranks, or launch as many")
    return ranks


def _check_given(given: dict[str, Any], resume: str | Path | None, out: str | Path | None) -> None:
    """Refuse what only the caller's words show: two lengths, a momentum that nothing uses, two folders."""
    if given.get("steps") is not None and "epochs" in given:
        raise ConfigError(
            f"--steps {given['steps']} with --epochs {given['epochs']}: a run has one length; leave the other out"
        )
    optimizer = given.get("optimizer", "sgd")
    if "momentum" in given and optimizer not in ("sgd", "lars"):
        raise ConfigError(
            f"--momentum {given['momentum']}: {optimizer} has moments of its own; leave it out, or use sgd"
        )
    if resume is not None and out is not None:
        raise ConfigError(f"--out {out} with --resume: a run stays in its own folder {resume}; leave out --out")


# -- the folder --------------------------------------------------------------------------------------------------------


def _save_settings(session: Session, settings: TrainSettings, resume: Path | None) -> None:
    """Write `config.json` of a new run; note that a resumed one is to be longer."""
    if session.folder is None or not session.is_leader:
        return
    if resume is None:
        write_new(session.folder / CONFIG_FILE, render_config(settings.to_json(), session.environment))
    else:
        name = "epochs" if settings.steps is None else "steps"
        update_config(resume, **{name: getattr(settings, name)})


def update_config(run: Path, outcome: dict[str, Any] | None = None, **lengths: int) -> None:
    """Note in `config.json` how a run ended, or that it is longer now, so that the next resume knows."""
    document = load_config(run)
    before = json.dumps(document)
    for name, length in lengths.items():
        document["settings"][name] = max(length, document["settings"][name])
    if outcome is not None:
        document["outcome"] = outcome
    if json.dumps(document) == before:
        return
    file = run / CONFIG_FILE
    new = file.with_name(f".{CONFIG_FILE}.new")
    try:
        new.write_text(json.dumps(document, indent=1) + "\n")
        new.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be changed: {error.strerror}") from None


@contextlib.contextmanager
def _discard_false_start(folder: Path | None) -> Iterator[None]:
    """Empty the folder of a run that failed before its first rows of metrics: there is nothing to resume."""
    try:
        yield
    except BaseException:
        if folder is not None and not (folder / METRICS_FILE).exists():
            for entry in folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _describe_saved(folder: Path | None) -> str:
    """The newest checkpoint on disk, for the message of an interrupt; empty where there is none."""
    saved = [] if folder is None else sorted((folder / "checkpoints").glob("step-*"))
    return f"step {int(saved[-1].name.removeprefix('step-'))}" if saved else ""


# -- resuming ----------------------------------------------------------------------------------------------------------


def _load_resumed(run: Path, given: dict[str, Any]) -> tuple[TrainSettings, int]:
    """The settings of a run that is to be resumed, with what may change, and the steps that it has."""
    try:
        document = load_config(run)
    except RecordError as error:
        raise ConfigError(f"--resume {run}: {error}", code=error.code) from None
    saved = TrainSettings.from_json(document["settings"])
    if is_launched():
        given = {"ranks": _choose_ranks(given.get("ranks"))} | given
    metrics = run / METRICS_FILE
    rows = load_metrics(metrics) if metrics.exists() else []  # none where only a part of the first was written
    return change_settings(saved, given), rows[-1]["step"] if rows else 0


def change_settings(saved: TrainSettings, given: dict[str, Any]) -> TrainSettings:
    """The run's own settings with those that were given for a resume; ConfigError where one would change the result."""
    for name, value in given.items():
        before = saved.batches.global_batch_size if name == "global_batch_size" else getattr(saved, name)
        is_moved = name == "data" and parse_data(value)[0] == parse_data(saved.data)[0]
        if value != before and name not in _CHANGEABLE and not is_moved:
            raise ConfigError(
                f"--{name.replace('_', '-')} {_show(value)} with --resume: the run was started with {_show(before)}, "
                "and another value would make it another run; leave it out, or start a new one",
                code="other-run",
            )
        _check_length(saved, name, value)
    settings = dataclasses.replace(saved, **given)
    if settings.ranks == saved.ranks:
        return settings
    # The global batch stays as it was; how it is shared follows.
    size = saved.batches.global_batch_size
    if size % settings.ranks:
        fits = ", ".join(str(ranks) for ranks in range(1, size + 1) if size % ranks == 0)
        raise ConfigError(
            f"{settings.ranks} ranks cannot share the run's global batch of {size} samples equally, and with "
            f"another it would be another run: use one of {fits} ranks",
            code="other-run",
        )
    batch_size, accumulate = given.get("batch_size"), given.get("accumulate")
    same = saved.batches.batch_size
    if batch_size is None and accumulate is None and size % (settings.ranks * same) == 0:
        batch_size = same  # what fits into memory, and what BatchNorm sees at a time, stay as they were
    return dataclasses.replace(settings, global_batch_size=size, batch_size=batch_size, accumulate=accumulate)


def _check_length(saved: TrainSettings, name: str, value: Any) -> None:
    """A run becomes longer by what ends it; one whose batch grows at shares of it, not at all."""
    ends = "epochs" if saved.steps is None else "steps"
    if name in ("epochs", "steps") and name != ends:
        raise ConfigError(
            f"--{name} {value} with --resume: the run ends by --{ends} {getattr(saved, ends)}; give more --{ends}, "
            "or start a new one",
            code="other-run",
        )
    if name == "epochs" and saved.batch_growth and value != saved.epochs:
        raise ConfigError(
            f"--epochs {value} with --resume: the batch grows at shares ({_show(saved.batch_growth)}) of the run's "
            f"{saved.epochs} epochs, and would have grown elsewhere; leave it out, or start a new one",
            code="other-run",
        )


def _show(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        grows = not value or isinstance(value[0], tuple)
        return format_growths(tuple(value)) if grows else " ".join(map(str, value))
    return str(value)
