"""The files of a run: metrics, checkpoints and weights. Decides what and when to save, and resumes a run.

`checkpoint_files` defines the layout of a checkpoint on disk.
"""

import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy
import torch
from torch import nn

from paceline.errors import ConfigError, PacelineError, refuse
from paceline.parallel import DataParallel
from paceline.parallel.strategies import find_hook_state
from paceline.predict.goodput import ALL_LOST, estimate_save_interval
from paceline.records.training import METRICS_FILE, SAVES_FILE, MetricsLog, load_metrics
from paceline.runtime.ranks.session import lock_folder
from paceline.runtime.ranks.world import World, set_seed
from paceline.training import checkpoint_files as disk
from paceline.training.build import Job
from paceline.training.journal import Position
from paceline.training.optimizers import match_strides
from paceline.training.step import list_models
from paceline.training.train_settings import AUTO, FIRST_SAVE_S, HOST_MTBF_S, TrainSettings, parse_save_every
from paceline.units import format_number_of, parse_duration
from paceline.workloads.data.own import OwnData

CHECKPOINTS, WEIGHTS, EVENTS = "checkpoints", "weights.safetensors", "events"
# The ranks of a killed run may briefly outlive the run and keep its lock.
_LOCK_TIMEOUT_S = 5.0
# With --save-every auto, the maximum factor by which the interval grows at a time toward the optimum.
_GROWTH = 4.0
# Number of recent saves over which to average stalls. The first save also allocates buffers, so it counts only until
# there are other saves.
_NUM_STALLS = 20


class SaveTimes:
    """A file with one row per save: its training stall and its write time after the stall."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file of a run that has reached this step, to continue it."""
        self._log = MetricsLog(path, step)
        self.close = self._log.close
        self._begun: dict[str, Any] = {}
        self._ended_s = 0.0
        self._interval_s = FIRST_SAVE_S
        self._stalls_s: list[float] = []
        self._write_s = 0.0
        for row in load_metrics(path):
            if all(isinstance(row.get(name), float) for name in ("stall_s", "wait_s", "write_s")):
                self._stalls_s.append(row["stall_s"] - row["wait_s"])
                self._write_s, self._interval_s = row["write_s"], row.get("next_s", self._interval_s)

    def begin(self, step: int, begin_s: float, end_s: float, wait_s: float = 0.0) -> None:
        """Record a save's training stall, as times of `time.monotonic`; the write starts now.

        `wait_s` is the part of the stall spent waiting for the previous save.
        """
        self._begun, self._ended_s = {"step": step, "stall_s": end_s - begin_s, "wait_s": wait_s}, end_s
        self._stalls_s.append(end_s - begin_s - wait_s)

    def end(self, written_s: float) -> None:
        """Record the end of the write."""
        if self._begun:
            self._write_s = max(0.0, written_s - self._ended_s)
            self._log.append(self._begun | {"write_s": self._write_s})
            self._begun = {}

    def choose_interval(self, mtbf_s: float, lost: float = 1.0) -> float:
        """Choose the save interval in seconds, given that a fraction `lost` of the faults needs a checkpoint."""
        if stalls_s := (self._stalls_s[1:] or self._stalls_s)[-_NUM_STALLS:]:
            best_s = estimate_save_interval(stalls_s, self._write_s, mtbf_s, lost)
            self._interval_s = min(best_s, _GROWTH * self._interval_s)
            self._begun |= {"next_s": self._interval_s} if self._begun else {}
        return self._interval_s


class EventsLog:
    """Writes the numbers in rows as TensorBoard scalars; skips strings and empty values."""

    def __init__(self, folder: Path, after_step: int) -> None:
        """Open a new event file; TensorBoard then ignores later steps in earlier files."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("--tensorboard needs the tensorboard package: install paceline[tensorboard]") from None
        self._writer: Any = SummaryWriter(str(folder), purge_step=after_step + 1)  # type: ignore[no-untyped-call]
        self.close = self._writer.close

    def append(self, *rows: Mapping[str, Any]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step" and type(value) in (int, float):
                    self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()


class RunFiles:
    """The files of a run. Rank 0 writes into `folder`, if any; other ranks only contribute their state."""

    def __init__(self, folder: Path | None, settings: TrainSettings, world: World) -> None:
        self._world, self._tensorboard = world, settings.tensorboard
        self._every_s, self._every_steps = parse_save_every(settings.save_every)
        self._saved_s = time.monotonic()
        self._mtbf_s: float | None = None
        self._lost = ALL_LOST if settings.stays_in_memory else 1.0
        if settings.save_every == AUTO:
            hosts_s = HOST_MTBF_S / len(set(world.hosts))
            self._mtbf_s = hosts_s if settings.mtbf is None else parse_duration(settings.mtbf, "--mtbf")
            self._every_s = self._every_s if folder is not None else math.inf  # without a folder nothing is saved
        self._saves: SaveTimes | None = None
        self._idle_s: float | None = None  # end of the last step before a save, when its stall begins
        self.last: int | None = None  # step of the last checkpoint
        self.written = 0  # last step in the metrics file when it was opened
        self._folder = folder or Path()
        self._store: disk.CheckpointStore | None = None
        if folder is not None and world.rank == 0:
            self._store = disk.CheckpointStore(folder / CHECKPOINTS, settings.keep)
        self._logs: list[MetricsLog | EventsLog] = []
        self._rows: list[dict[str, Any]] = []  # only without a folder
        self._lock: int | None = None

    def lock(self, resume: bool) -> disk.Loaded | None:
        """Lock the folder. Rejects a folder in use by another run, since each would truncate the other's files.

        With `resume`, returns the newest intact checkpoint, or None if the run ended before its first one. An error on
        rank 0 is raised on all ranks. Collective: call on every rank.
        """
        loaded, problem, code = None, "", ""
        if self._store is not None:
            try:
                self._store.folder.mkdir(0o700, parents=True, exist_ok=True)
                # Lock the subfolder: the session that started this rank has already locked the run's folder.
                self._lock = lock_folder(self._store.folder, _LOCK_TIMEOUT_S)
                loaded = self._store.load_latest() if resume else None
                # Count from the newest checkpoint or the start of the run: a timer that restarts with every world would
                # never expire if all worlds are short-lived.
                newest = next(map(self._store.path, self._store.find()), self._store.folder)
                self._saved_s -= max(0.0, time.time() - newest.stat().st_mtime)
                if resume and loaded is None and (self._folder / WEIGHTS).exists():
                    problem = f"{self._folder} is finished and has no checkpoint to resume from: start a new run"
                    code = "finished"
            except PacelineError as error:
                problem, code = str(error), error.code
        saved = [] if self._store is None else self._store.find()
        mine = loaded and loaded.path, problem, code, loaded.step if loaded is not None else max(saved, default=None)
        path, problem, code, self.last = self._world.share(mine)[0]
        if problem:
            raise ConfigError(problem, code=code)
        return disk.load_checkpoint(path) if path is not None and loaded is None else loaded

    def restore(self, job: Job, loaded: disk.Loaded) -> Position:
        """Load the checkpoint into the job; ConfigError if it belongs to another job."""
        meta, state, learner = loaded.meta, loaded.state, job.learner
        found, size = f"checkpoint {loaded.path}", job.batches.global_batch_size
        num_workers = 1 if learner.workers is None else len(learner.workers.learners)
        had_workers = len(state["workers"]["memory"]) if "workers" in state else 1
        grown = [tuple(mark) for mark in meta["growth"]]
        wanted = list(job.batch_schedule.marks)
        other = ""
        if (meta["num_samples"], meta["global_batch_size"]) != (len(job.train), size):
            other = f"was trained on {meta['num_samples']} samples in batches of {meta['global_batch_size']}, but this "
            other += f"job has {len(job.train)} in batches of {size}: use the original ones"
        elif meta["tail"] != job.settings.tail:
            other = (
                f"was trained with --tail {meta['tail']}, but now it is {job.settings.tail} (because of the loader's "
            )
            other += f"drop_last or the {self._world.world_size} ranks), which changes the steps per epoch: "
            other += "use the original --tail"
        elif had_workers != num_workers:
            other = f"has {format_number_of(had_workers, 'worker')}, but this job has {num_workers}: keep --workers"
        elif grown != wanted:
            other = f"grows its batch {_format_growth(grown)}, but this job grows it {_format_growth(wanted)}: "
            other += "keep --batch-growth and --epochs"
        elif meta["checksum"] != job.train.checksum:
            other = f"was trained on different samples from {job.train.describe()}: use its original data "
            other += "(synthetic data also differs between cpu and cuda)"
        refuse((other, f"{found} {other}"), code="mismatch")
        expected = disk.fingerprint(learner.module.state_dict())
        disk.check_fingerprint(disk.fingerprint(loaded.model), expected, found)
        learner.module.load_state_dict(loaded.model)
        # With local steps each rank has its own optimizer state.
        inner = state["inner"][self._world.rank % len(state["inner"])] if state.get("inner") else state
        learner.optimizer.load_state_dict(inner["optimizer"])
        learner.scaler.load_state_dict(inner["scaler"])
        if learner.workers is not None:
            learner.workers.load(state["workers"])
        for optimizer in learner.optimizers:
            match_strides(optimizer)
        for number, model in enumerate(list_models(learner.model)):
            load = find_strategy(model)[1]
            load([states[number] for states in state.get("strategy", ())], *learner.optimizers)
        position = Position(meta["epoch"], meta["window"], meta["step"])
        if isinstance(job.train, OwnData) and job.train.is_stream and position.window:
            before, now = meta["world_size"], self._world.world_size
            moved = f"{found} is in the middle of an epoch of a stream for {before} ranks, but now there are {now}"
            refuse((before != now, f"{moved}: resume on {before} ranks"), code="mismatch")
        # Random numbers inside a step depend only on its number. A user's program may also draw between steps: restore
        # that random state or, on another number of ranks, use a seed that no step has used.
        if "random" in state and meta["world_size"] == self._world.world_size:
            _set_random(state["random"][self._world.rank])
        else:
            set_seed((job.settings.seed + 1_000_003 * position.step) % 2**31, per_rank=True)
        return position

    def open(self, step: int) -> None:
        """Prepare the folder for rows after this step; removes any later rows of a killed run."""
        if self._store is None:
            return
        self._store.remove_leftovers()
        for path in self._folder.glob(f".{WEIGHTS}.*"):
            path.unlink(missing_ok=True)
        log = MetricsLog(self._folder / METRICS_FILE, step)
        self._logs.append(log)
        self.written = log.last_step
        self._saves = SaveTimes(self._folder / SAVES_FILE, step)
        self._choose_interval()
        if self._tensorboard:
            self._logs.append(EventsLog(self._folder / EVENTS, after_step=step))

    @property
    def is_due_by_time(self) -> bool:
        return self._every_s is not None and time.monotonic() - self._saved_s >= self._every_s

    def is_due(self, step: int, is_epoch_end: bool) -> bool:
        """Whether a save is due after this step, apart from time-based saves."""
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return is_epoch_end and self._every_s is None

    def save(self, job: Job, position: Position) -> None:
        """Save all state that the next step depends on, unless already saved. Collective: call on every rank."""
        if position.step == self.last:
            return
        begin_s = self._idle_s or time.monotonic()
        randoms = self._world.share(_get_random(job.world.device))
        strategies = self._world.gather([find_strategy(model)[0]() for model in list_models(job.learner.model)])
        learner = job.learner
        inner = []
        # A sharded optimizer gathers its state from all ranks.
        optimizer = learner.optimizer.state_dict() if job.settings.parsed_strategy.is_sharded else None
        if job.settings.parsed_strategy.outer:
            own = {"optimizer": learner.optimizer.state_dict(), "scaler": learner.scaler.state_dict()}
            inner = self._world.gather(own)
        self._saved_s = time.monotonic()
        self.last = position.step
        if self._store is None:
            return
        wait_s = self._finish_save()
        optimizer, scaler = optimizer or learner.optimizer.state_dict(), learner.scaler.state_dict()
        state = {"optimizer": optimizer, "scaler": scaler, "random": randoms, "strategy": strategies}
        state |= {"inner": inner} if inner else {}
        state |= {"workers": learner.workers.state()} if learner.workers is not None else {}
        self._store.save(position.step, learner.module.state_dict(), state, build_meta(job, position))
        self._saved_s = time.monotonic()
        self._idle_s = None
        if self._saves is not None:
            self._saves.begin(position.step, begin_s, self._saved_s, wait_s)
            self._choose_interval()

    def _choose_interval(self) -> None:
        """Update the save interval on rank 0, which decides when a save is due."""
        if self._saves is not None and self._mtbf_s is not None:
            self._every_s = self._saves.choose_interval(self._mtbf_s, self._lost)

    def _finish_save(self) -> float:
        """Wait for the last save to reach the disk and record its times; returns the seconds waited."""
        begin_s = end_s = time.monotonic()
        if self._store is not None:
            self._store.wait()
            end_s = time.monotonic()
            if self._saves is not None:
                self._saves.end(self._store.written_s)
        return end_s - begin_s

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        for log in self._logs:
            log.append(*rows)
        if self._store is None and self._world.rank == 0:
            self._rows += rows
        self._idle_s = time.monotonic()

    def read_rows(self) -> list[dict[str, Any]]:
        """Read all rows of the run, including those before a resume. Collective: call on every rank."""
        rows = self._rows if self._store is None else load_metrics(self._folder / METRICS_FILE)
        shared: list[list[dict[str, Any]]] = self._world.share(rows)
        return shared[0]

    def export(self, job: Job) -> None:
        """Write the trained weights under the names of the bare model, for other programs to load."""
        if self._store is not None:
            (self._folder / WEIGHTS).unlink(missing_ok=True)  # present if a finished run was resumed for more epochs
            module = job.learner.module
            disk.export_weights(self._folder / WEIGHTS, getattr(module, "_orig_mod", module).state_dict())

    def leave_world(self) -> Self:
        """Drop the reference to a closed world. Afterward, call only `close`."""
        del self._world
        return self

    def close(self, has_failed: bool = False) -> None:
        """Wait for pending writes, unless the run has failed; then unlock the folder."""
        try:
            if not has_failed:
                self._finish_save()
        finally:
            while self._logs:
                self._logs.pop().close()
            if self._saves is not None:
                self._saves.close()
                self._saves = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None


def build_meta(job: Job, position: Position) -> dict[str, Any]:
    """The run's position and the properties that must not change when it resumes."""
    model = job.learner.model
    plan = model.plan if isinstance(model, DataParallel) else None
    return dataclasses.asdict(position) | {
        "world_size": job.world.world_size, "global_batch_size": job.batches.global_batch_size,
        "growth": [list(mark) for mark in job.batch_schedule.marks], "num_samples": len(job.train),
        "tail": job.settings.tail, "checksum": job.train.checksum, "plan": None if plan is None else plan.to_json(),
    }  # fmt: skip


def find_strategy(model: nn.Module) -> tuple[Callable[[], dict[str, Any]], Callable[..., None]]:
    """Functions to save and load the state of a model's strategy, in our wrapper or in torch's."""
    if isinstance(model, DataParallel):
        return model.strategy_state, model.load_strategy_state
    if (hook := find_hook_state(model)) is not None:
        return hook.state, hook.load
    return dict, lambda *_: None


def _get_random(device: torch.device) -> dict[str, Any]:
    """The states of all random number generators of this rank, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    version, internal, spare = random.getstate()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [name, torch.from_numpy(numpy.asarray(keys, dtype="int64")), int(place), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(internal, dtype=torch.int64), spare],
    }


def _format_growth(marks: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"to {size} from sample {sample} on" for sample, size in marks) or "not at all"


def _set_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, place, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), place, has_gauss, gauss))
    version, internal, spare = state["python"]
    random.setstate((version, tuple(internal.tolist()), spare))
