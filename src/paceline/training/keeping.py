"""What a run keeps on disk: its metrics, its checkpoints, its weights; and how a run goes on from them.

How a checkpoint is written whole or not at all is in `checkpoints`.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from paceline.errors import ConfigError, PacelineError
from paceline.parallel import DataParallel
from paceline.plan import Plan
from paceline.runtime.ranks import set_seed
from paceline.runtime.world import World
from paceline.training.build import Job
from paceline.training.checkpoints import CheckpointStore, Loaded, load_checkpoint
from paceline.training.metrics import EventsLog, MetricsLog
from paceline.training.settings import SaveEvery, TrainSettings
from paceline.training.weights import check_fingerprint, export_weights, fingerprint

__all__ = ["CHECKPOINTS", "METRICS", "WEIGHTS", "Found", "Keeper", "Position"]

CHECKPOINTS, METRICS, WEIGHTS, EVENTS = "checkpoints", "metrics.jsonl", "weights.safetensors", "events"
# The ranks of a run that was killed live on for a moment.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Position:
    """How far a run is: the next window of an epoch, and the steps that were taken."""

    epoch: int
    window: int
    step: int


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from, and the plan that the gradients were sent by."""

    loaded: Loaded
    plan: Plan | None


class Keeper:
    """Rank 0 writes; the others take part where their random numbers are asked for."""

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
        self._held: int | None = None

    # -- the folder is one run's --------------------------------------------------------------------------------------

    def _hold_folder(self) -> None:
        """Refuse a folder that a living run writes to: each would cut off the other's metrics and checkpoints.

        The system lets go of it when this process ends, in whatever way.
        """
        if self._held is not None or self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, until_s = os.open(self._folder, os.O_RDONLY), time.monotonic() + _PATIENCE_S
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
                    f"{self._folder} is written to by another run: wait for its end, or stop it"
                ) from None
            except OSError:  # a file system without locks
                os.close(handle)
                return
        self._held = handle

    def release(self) -> None:
        """Let others write to the folder."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    # -- going on -----------------------------------------------------------------------------------------------------

    def find(self) -> Found | None:
        """The newest checkpoint that is whole; None where the run was ended before its first one.

        Collective: every rank must call this.
        """
        assert self._store is not None and self._folder is not None
        loaded, problem = None, ""
        if self._world.rank == 0:
            try:
                self._hold_folder()
                loaded = self._store.load_latest()
                if loaded is None and (self._folder / WEIGHTS).exists():
                    problem = f"{self._folder} is finished and holds no checkpoint to go on from: start anew"
            except PacelineError as error:
                problem = str(error)
        path, problem = self._world.share((None if loaded is None else str(loaded.path), problem))[0]
        if problem:
            raise ConfigError(problem)
        if path is None:
            return None
        if loaded is None:
            loaded = load_checkpoint(path)
        plan = loaded.meta.get("plan")
        return Found(loaded, None if plan is None else Plan.from_json(plan))

    def restore(self, job: Job, found: Found) -> Position:
        """Put the job where it was. Collective: every rank must call this."""
        loaded, learner = found.loaded, job.learner
        meta, state = loaded.meta, loaded.state
        if meta["global_batch_size"] != job.batches.global_batch_size or meta["num_samples"] != len(job.train):
            raise ConfigError(
                f"{loaded.path} is at window {meta['window']} of {meta['num_samples']} samples in batches of "
                f"{meta['global_batch_size']}, and now there are {len(job.train)} samples in batches of "
                f"{job.batches.global_batch_size}: the place in the data would be another; keep both"
            )
        grown, wanted = ([tuple(mark) for mark in meta.get("growth", [])], list(job.batch_schedule.marks))
        if grown != wanted:
            raise ConfigError(
                f"{loaded.path} is of a run whose global batch grows as {_describe_marks(grown)}, and now it would as "
                f"{_describe_marks(wanted)}: the place in the data would be another; keep --batch-growth and --epochs"
            )
        if meta.get("checksum", job.train.checksum) != job.train.checksum:
            raise ConfigError(
                f"{loaded.path} was trained on other samples than {job.train.describe()}: name the data that it was "
                "trained on (synthetic data also differs between cpu and cuda)"
            )
        check_fingerprint(loaded.fingerprint, fingerprint(learner.module.state_dict()), f"checkpoint {loaded.path}")
        learner.module.load_state_dict(loaded.model)
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.scaler.load_state_dict(state["scaler"])
        position = Position(meta["epoch"], meta["window"], meta["step"])
        if meta["world_size"] == self._world.world_size:
            _set_random(state["random"][self._world.rank])
        else:
            # Another number of ranks: no rank's random numbers fit, so draw new ones that no step has seen.
            set_seed((job.settings.seed + 1_000_003 * position.step) % 2**31, per_rank=True)
        self._last = position.step
        return position

    def begin(self, step: int) -> None:
        """Make the folder ready for the rows after this step, without what a killed run left of later ones."""
        if not self._writes:
            return
        assert self._folder is not None and self._store is not None
        self._hold_folder()
        self._store.remove_leftovers()
        for name in (METRICS, WEIGHTS):
            for path in self._folder.glob(f".{name}.*"):
                path.unlink(missing_ok=True)
        self._metrics = MetricsLog.resume(self._folder / METRICS, step)
        if self._tensorboard:
            self._events = EventsLog.resume(self._folder / EVENTS, step)

    # -- saving -------------------------------------------------------------------------------------------------------

    @property
    def is_due_by_time(self) -> bool:
        return self._every.seconds is not None and time.monotonic() - self._saved_s >= self._every.seconds

    def is_due_by_steps(self, step: int) -> bool:
        return self._every.steps is not None and step % self._every.steps == 0

    @property
    def every_epoch(self) -> bool:
        return self._every.seconds is None and self._every.steps is None

    def save(self, job: Job, position: Position) -> None:
        """Keep everything that the next step depends on. Collective: every rank must call this."""
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
        """The trained weights for others to load, under the names of the model itself."""
        if self._writes:
            assert self._folder is not None
            (self._folder / WEIGHTS).unlink(missing_ok=True)  # of a run that went on for more epochs
            export_weights(self._folder / WEIGHTS, job.learner.module.state_dict())

    def close(self) -> None:
        """Wait until all is on disk; says if it is not."""
        if self._writes and self._store is not None:
            self._store.wait()
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()

    def describe_last(self) -> str:
        if self._last is None:
            return "no checkpoint had been written yet"
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
