"""Checkpoints of a run: what is saved, when, and how a run resumes from it.

The files themselves are in `checkpoint_files`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy
import torch

from paceline.errors import ConfigError, PacelineError, RecordError
from paceline.parallel import DataParallel
from paceline.plan import Plan
from paceline.records.training import METRICS_FILE, MetricsLog
from paceline.runtime.ranks import set_seed
from paceline.runtime.world import World
from paceline.training.build import Job
from paceline.training.checkpoint_files import (
    TensorBuffer,
    check_fingerprint,
    export_weights,
    fingerprint,
    load_tensors,
    pack_state,
    plain_names,
    remove_folder,
    remove_leftovers,
    save_folder,
    split_tied,
    unpack_state,
    verify_folder,
)
from paceline.training.journal import EventsLog
from paceline.training.settings import SaveEvery, TrainSettings
from paceline.units import format_bytes

MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "state.safetensors", "state.json"
_FILES = (MODEL_FILE, TENSORS_FILE, STATE_FILE)
_NAME = re.compile(r"step-(\d{8,})")
# Nice, not the nicest: at 19 a save on busy cores took longer than the time to the next one, which then waited for it.
_PRIORITY = 10
_MANIFEST_BYTES = 4096  # more than it has; and a file system rounds up


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, on the CPU. `refused` says why newer ones were not used, newest first."""

    step: int
    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]
    path: Path
    fingerprint: dict[str, str]
    refused: list[str] = field(default_factory=list)


class CheckpointStore:
    """The checkpoints of one run: `folder/step-00000120/` and so on, of which the newest `keep` stay.

    `save` copies the state to host memory and returns; a thread of low priority writes. Only one store may save into
    a folder; any number may load. Leaving the `with` block waits for the last save.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}: at least 1 checkpoint must stay")
        self.folder = Path(folder)
        self.keep = keep
        self._model_buffer, self._state_buffer = TensorBuffer(), TensorBuffer()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._current: int | None = None  # the step that was loaded or saved last
        self._refused: set[int] = set()  # steps that were found damaged
        self._is_clean = False

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._writer is not None:  # the error that is under way matters more than one of the writer
            self._writer.join()

    def find(self) -> list[int]:
        """The steps of the checkpoints that are there, newest first."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.is_dir()]
        except FileNotFoundError:
            return []
        return sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def remove_leftovers(self) -> None:
        """Remove what an interrupted save left. For the process that saves; the first `save` does it as well."""
        self.wait()
        remove_leftovers(self.folder)
        self._is_clean = True

    def save(
        self, step: int, model_state: Mapping[str, torch.Tensor], state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint of this step; returns when the tensors are copied, or their copies are queued on the GPU.

        Waits for the previous save, and raises its error. `state` and `meta` are nested as `pack_state` takes them,
        `meta` without tensors: the position in the data, the world size and what else a person may want to read.
        """
        self.wait()
        if step == self._current:
            return  # one step has one state
        self._check_order(step)
        kept, aliases = split_tied(plain_names(model_state))
        tensors, structure = pack_state(dict(state))
        meta_tensors, meta_structure = pack_state(dict(meta))
        if meta_tensors:
            raise ConfigError(f"meta holds the tensor {next(iter(meta_tensors))!r}: put tensors into the state")
        document = {
            "step": step, "meta": meta_structure, "model": fingerprint(model_state), "aliases": aliases,
            "state": structure,
        }  # fmt: skip
        files: dict[str, bytes | memoryview] = {
            STATE_FILE: json.dumps(document, allow_nan=False).encode(),
            MODEL_FILE: self._model_buffer.fill(kept, {**aliases, "format": "pt"}),
            TENSORS_FILE: self._state_buffer.fill(tensors, {}),
        }
        needed_bytes = sum(len(data) for data in files.values()) + _MANIFEST_BYTES
        with _explained(self.path(step), needed_bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self.folder).free < needed_bytes:
                raise OSError(None, "the disk is too full")
        if not self._is_clean:
            self.remove_leftovers()
        # Not a daemon: a program that ends, even by an error, ends after the checkpoint is there.
        self._writer = threading.Thread(target=self._write, args=(step, files, needed_bytes), name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Wait until the last save is on disk; raises its error, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load_latest(self) -> Loaded | None:
        """The newest checkpoint that is intact; None where there are none.

        RecordError where all are damaged: a run must not silently start from the beginning then.
        """
        self.wait()
        refused: list[str] = []
        for step in (steps := self.find()):
            try:
                loaded = load_checkpoint(self.path(step))
                if loaded.step != step:
                    raise _build_damaged(loaded.path, f"it is of step {loaded.step}")
            except RecordError as error:
                refused.append(f"{error}; the one before it is used")
                self._refused.add(step)
                continue
            self._current = step
            loaded.refused.extend(refused)
            return loaded
        if steps:
            first = refused[0].removesuffix("; the one before it is used")
            raise RecordError(
                f"no checkpoint in {self.folder} is intact, of {len(steps)} ({first}): restore one, or remove them to "
                "start from the beginning",
                code="damaged",
            )
        return None

    def _check_order(self, step: int) -> None:
        """Refuse to save before an existing step: it belongs to a run that this one did not resume from."""
        if step < 0:
            raise ConfigError(f"step is {step}: steps count from 0")
        later = [there for there in self.find() if there >= step and there not in self._refused]
        if later:
            raise ConfigError(
                f"{self.folder} holds step {later[0]}, and step {step} cannot be saved before it: resume that run, "
                "remove its checkpoints, or choose another folder"
            )

    def _write(self, step: int, files: Mapping[str, bytes | memoryview], needed_bytes: int) -> None:
        try:
            if sys.platform == "linux":  # elsewhere a priority belongs to the process
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
            self._model_buffer.synchronize()
            self._state_buffer.synchronize()
            with _explained(self.path(step), needed_bytes):
                save_folder(self.path(step), files)
                self._current = step
                self._refused.discard(step)
                stay = [there for there in self.find() if there not in self._refused][: self.keep]
                for there in self.find():
                    if there not in stay:
                        remove_folder(self.path(there))
        except Exception as error:
            self._error = error
            if self._current != step:
                self._refused.add(step)


@contextlib.contextmanager
def _explained(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turn an OSError during a save into one line that says what to do."""
    try:
        yield
    except OSError as error:
        try:
            free = format_bytes(shutil.disk_usage(path.parent).free)
        except OSError:
            free = "an unknown amount"
        raise RecordError(
            f"cannot save checkpoint {path}: {error.strerror}; it needs {format_bytes(needed_bytes)} and {free} is "
            "free: make room, keep fewer, or choose another folder",
            code="disk",
        ) from None


def load_checkpoint(path: str | Path) -> Loaded:
    """Compare all bytes of a checkpoint with its manifest, and read it; RecordError says what is wrong with it."""
    path = Path(path)
    try:
        verify_folder(path, _FILES)
        document = json.loads((path / STATE_FILE).read_bytes())
        model = load_tensors(path / MODEL_FILE)
        tensors = load_tensors(path / TENSORS_FILE)
        model = {name: model[document["aliases"].get(name, name)] for name in document["model"]}
        if fingerprint(model) != document["model"]:
            raise RecordError(f"{MODEL_FILE} holds other tensors than {STATE_FILE} says")
        return Loaded(
            step=document["step"],
            model=model,
            state=unpack_state(tensors, document["state"]),
            meta=unpack_state({}, document["meta"]),
            path=path,
            fingerprint=document["model"],
        )
    except OSError as error:
        raise _build_damaged(path, f"{STATE_FILE} cannot be read: {error.strerror}") from None
    except RecordError as error:
        raise _build_damaged(path, str(error)) from None
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{STATE_FILE} is not the state of a run: {type(error).__name__} {error}"
        raise _build_damaged(path, reason) from None


def _build_damaged(path: Path, reason: str) -> RecordError:
    return RecordError(f"checkpoint {path.name} is damaged: {reason}", code="damaged")


CHECKPOINTS, WEIGHTS, EVENTS = "checkpoints", "weights.safetensors", "events"
# The ranks of a run that was killed live on for a moment, and hold its lock.
_LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Position:
    """A place in a run: the next window of an epoch, and the number of steps taken."""

    epoch: int
    window: int
    step: int


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and the plan by which its gradients were sent."""

    loaded: Loaded
    plan: Plan | None


class RunFiles:
    """The files of one run: metrics, checkpoints, weights. Rank 0 writes; the others only contribute their state."""

    def __init__(self, folder: Path | None, settings: TrainSettings, world: World) -> None:
        self._folder, self._world = folder, world
        self._writes = world.rank == 0 and folder is not None
        self._every = SaveEvery.parse(settings.save_every)
        self._saved_s = time.monotonic()
        self._last: int | None = None
        self._store = CheckpointStore(folder / CHECKPOINTS, settings.keep) if folder is not None else None
        self._tensorboard = settings.tensorboard
        self._metrics: MetricsLog | None = None
        self._events: EventsLog | None = None
        self._lock: int | None = None

    def _lock_folder(self) -> None:
        """Refuse a folder that a living run writes to: each would cut off the other's metrics and checkpoints.

        The system releases the lock when this process ends, however it ends.
        """
        if self._lock is not None or self._folder is None:
            return
        place = self._folder / CHECKPOINTS  # the session that started this rank has locked the folder itself
        place.mkdir(parents=True, exist_ok=True)
        handle, until_s = os.open(place, os.O_RDONLY), time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < until_s:
                    time.sleep(0.05)
                    continue
                os.close(handle)
                raise ConfigError(
                    f"another run writes to {self._folder}: wait for its end, or stop it", code="locked"
                ) from None
            except OSError:  # a file system without locks
                os.close(handle)
                return
        self._lock = handle

    def unlock(self) -> None:
        """Let other runs write to the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find_checkpoint(self) -> ResumePoint | None:
        """The newest intact checkpoint; None where the run ended before its first one. Collective: call on every rank.

        A problem of rank 0 is raised on all ranks.
        """
        assert self._store is not None and self._folder is not None
        loaded, problem, code = None, "", ""
        if self._world.rank == 0:
            try:
                self._lock_folder()
                loaded = self._store.load_latest()
                if loaded is None and (self._folder / WEIGHTS).exists():
                    problem = f"{self._folder} is finished and holds no checkpoint to resume from: start a new run"
                    code = "finished"
            except PacelineError as error:
                problem, code = str(error), error.code
        path, problem, code = self._world.share((None if loaded is None else str(loaded.path), problem, code))[0]
        if problem:
            raise ConfigError(problem, code=code)
        if path is None:
            return None
        if loaded is None:
            loaded = load_checkpoint(path)
        plan = loaded.meta.get("plan")
        return ResumePoint(loaded, None if plan is None else Plan.from_json(plan))

    def restore(self, job: Job, found: ResumePoint) -> Position:
        """Put the job into the state of the checkpoint; ConfigError where it is of another job."""
        loaded, learner = found.loaded, job.learner
        meta, state = loaded.meta, loaded.state
        if meta["global_batch_size"] != job.batches.global_batch_size or meta["num_samples"] != len(job.train):
            raise ConfigError(
                f"{loaded.path} is at window {meta['window']} of {meta['num_samples']} samples in batches of "
                f"{meta['global_batch_size']}, and now there are {len(job.train)} samples in batches of "
                f"{job.batches.global_batch_size}: keep both, or the place in the data would change",
                code="mismatch",
            )
        grown, wanted = ([tuple(mark) for mark in meta.get("growth", [])], list(job.batch_schedule.marks))
        if grown != wanted:
            raise ConfigError(
                f"{loaded.path} has a global batch that grows as {_describe_marks(grown)}, and now it would grow as "
                f"{_describe_marks(wanted)}: keep --batch-growth and --epochs, or the place in the data would change",
                code="mismatch",
            )
        if meta.get("checksum", job.train.checksum) != job.train.checksum:
            raise ConfigError(
                f"{loaded.path} was trained on other samples than {job.train.describe()}: name the data that it was "
                "trained on (synthetic data also differs between cpu and cuda)",
                code="mismatch",
            )
        check_fingerprint(loaded.fingerprint, fingerprint(learner.module.state_dict()), f"checkpoint {loaded.path}")
        learner.module.load_state_dict(loaded.model)
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.scaler.load_state_dict(state["scaler"])
        position = Position(meta["epoch"], meta["window"], meta["step"])
        if meta["world_size"] == self._world.world_size:
            _set_random(state["random"][self._world.rank])
        else:
            # Another number of ranks: no rank's random state fits, so draw from a seed that no step has used.
            set_seed((job.settings.seed + 1_000_003 * position.step) % 2**31, per_rank=True)
        self._last = position.step
        return position

    def open(self, step: int) -> None:
        """Prepare the folder for the rows after this step; removes what a killed run left of later ones."""
        if not self._writes:
            return
        assert self._folder is not None and self._store is not None
        self._lock_folder()
        self._store.remove_leftovers()
        for name in (METRICS_FILE, WEIGHTS):
            for path in self._folder.glob(f".{name}.*"):
                path.unlink(missing_ok=True)
        self._metrics = MetricsLog.resume(self._folder / METRICS_FILE, step)
        if self._tensorboard:
            self._events = EventsLog(self._folder / EVENTS, after_step=step)

    @property
    def is_due_by_time(self) -> bool:
        return self._every.seconds is not None and time.monotonic() - self._saved_s >= self._every.seconds

    def is_due_by_steps(self, step: int) -> bool:
        return self._every.steps is not None and step % self._every.steps == 0

    @property
    def every_epoch(self) -> bool:
        return self._every.seconds is None and self._every.steps is None

    def save(self, job: Job, position: Position) -> None:
        """Save everything that the next step depends on. Collective: call on every rank."""
        if position.step == self._last:
            return
        randoms = self._world.share(_get_random(job.world.device))
        self._saved_s = time.monotonic()
        self._last = position.step
        if not self._writes:
            return
        assert self._store is not None
        learner = job.learner
        plan = learner.model.plan if isinstance(learner.model, DataParallel) else None
        state = {
            "optimizer": learner.optimizer.state_dict(),
            "scaler": learner.scaler.state_dict(),
            "random": randoms,
        }
        meta = {
            "epoch": position.epoch,
            "window": position.window,
            "step": position.step,
            "world_size": self._world.world_size,
            "global_batch_size": job.batches.global_batch_size,
            "growth": [list(mark) for mark in job.batch_schedule.marks],
            "num_samples": len(job.train),
            "checksum": job.train.checksum,
            "plan": None if plan is None else plan.to_json(),
        }
        self._store.save(position.step, learner.module.state_dict(), state, meta)

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        if not self._writes or not rows:
            return
        assert self._metrics is not None
        self._metrics.append(*rows)
        if self._events is not None:
            self._events.append(*rows)

    def export(self, job: Job) -> None:
        """Write the trained weights under the names of the bare model, for other programs to load."""
        if self._writes:
            assert self._folder is not None
            (self._folder / WEIGHTS).unlink(missing_ok=True)  # of a finished run that was resumed for more epochs
            export_weights(self._folder / WEIGHTS, job.learner.module.state_dict())

    def close(self) -> None:
        """Wait until everything is on disk; raises the error of a save that failed."""
        if self._writes and self._store is not None:
            self._store.wait()
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()

    def describe_last(self) -> str:
        if self._last is None:
            return "no checkpoint was saved yet"
        return f"the checkpoint of step {self._last} is kept"


def _describe_marks(marks: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{size} from sample {start} on" for start, size in marks) or "none"


def _get_random(device: torch.device) -> dict[str, Any]:
    """The state of every source of random numbers of this rank, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, internal, spare = random.getstate()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [name, torch.from_numpy(numpy.asarray(keys, dtype="int64")), int(place), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(internal, dtype=torch.int64), spare],
    }


def _set_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), place, has_gauss, gauss))
    version, internal, spare = state["python"]
    random.setstate((version, tuple(internal.tolist()), spare))
