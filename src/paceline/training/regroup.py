"""Continues a run in a new world: processes keep their state, and the new world's ranks agree on one of these states.

After a fault, ranks may be one step apart. The most advanced rank sends its state to the others. The state in memory
has the form of a checkpoint, and `RunFiles.restore` accepts both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError, refuse
from paceline.parallel import DataParallel
from paceline.parallel.channel import Channel
from paceline.runtime.faults import pulse
from paceline.runtime.faults.processes import find_code
from paceline.runtime.ranks.messages import pack, unpack
from paceline.runtime.ranks.world import World, has_lost_rank
from paceline.training import checkpoint_files as disk
from paceline.training.build import Job, Sets, build_job, open_world
from paceline.training.checkpoints import RunFiles, build_meta, find_strategy
from paceline.training.journal import Journal, Position, TakenStep, Unwritten
from paceline.training.step import StepOutcome
from paceline.training.train_settings import Batches, TrainSettings
from paceline.workloads.data import is_own_data
from paceline.workloads.data.own import OwnData

_IN_MEMORY = Path("the state in memory")  # a snapshot's origin in error messages


class MoreRanksError(PacelineError):
    """Raised on all ranks after the same step, so that they leave their world for a larger one."""


def may_stay(error: BaseException) -> bool:
    """Whether a rank may continue in another world after this error: a peer was lost, or more ranks are available."""
    if isinstance(error, Exception) and has_lost_rank():  # an aborted message can cause any kind of error
        return True
    return isinstance(error, MoreRanksError) or find_code(error) == "peer-lost"


def check_policy(job: Job) -> None:
    """Reject recovery policies that the built job does not support; the result is the same on every rank."""
    asked = f"--on-fault {job.settings.on_fault}"
    stream = job.train if isinstance(job.train, OwnData) and job.train.is_stream else None
    refuse(
        (job.learner.own_step is not None,
         f"{asked}: {job.learner.name} has its own step, which may be half done when a rank is lost; use restart"),
        (stream is not None and job.settings.on_fault == "shrink",
         f"{asked}: {job.train.describe()}, which cannot be re-sharded within an epoch; use spare"),
        ("nccl" in job.world.backend and not pulse.is_open(),
         f"{asked} on nccl without a monitor: NCCL ranks cannot detect a lost peer; use restart, or the gloo "
         "backend"),
        (stream is not None and stream.is_sharded,
         f"{asked}: {job.train.describe()}, and no other rank can read a lost rank's part; use restart"),
        code="on-fault",
    )  # fmt: skip


@dataclass
class Carried:
    """A process's state of the run between two worlds.

    A spare has only the data and an untrained model, and no `position`. `snapshot` is the state at `position`, taken
    when a world ends. `taken` is the last step, if its follow-up work (metrics, evaluation, saving) is not finished.
    Do not reference a process group here: gloo closes its connections with the last reference, and only then do other
    ranks notice that this one has left.
    """

    sets: Sets | None = None
    module: nn.Module | None = None
    device: torch.device | None = None
    position: Position | None = None
    snapshot: disk.Loaded | None = None
    batches: Batches | None = None
    files: RunFiles | None = None
    journal: Journal | None = None
    unwritten: Unwritten | None = None
    taken: TakenStep | None = None

    @property
    def step(self) -> int:
        return -1 if self.position is None else self.position.step

    def keep(self, job: Job) -> None:
        """Keep the state needed in the next world; drop the wrapper with its buckets and groups."""
        learner = job.learner
        self.sets, self.module, self.device = (job.train, job.test), learner.module, learner.device
        if self.position is not None:
            strategy = find_strategy(learner.model)[0]()
            state: dict[str, Any] = {"optimizer": learner.optimizer.state_dict(), "scaler": learner.scaler.state_dict()}
            state["strategy"] = [[strategy]] if strategy else []
            meta = build_meta(job, self.position)
            self.snapshot = disk.Loaded(self.step, dict(learner.module.state_dict()), state, meta, _IN_MEMORY)
        self.batches = self.batches or job.batches
        if self.journal is not None:
            self.unwritten = self.journal.list_unwritten()
            self.journal = None
        learner.optimizer.zero_grad(set_to_none=True)
        if isinstance(learner.model, DataParallel):
            learner.model.stop()

    def agree_on_source(self, settings: TrainSettings, world: World) -> tuple[TrainSettings, int | None]:
        """Agree on the settings for this number of ranks, and on the rank to take the state from (None in a new run).
        Collective: call on every rank."""
        files, self.files = self.files, None
        if files is not None:  # close the files before any rank opens them in this world
            files.close()
        settings = dataclasses.replace(settings, ranks=world.world_size)
        if not settings.stays_in_memory:
            return settings, None
        everyone = world.share((self.step, self.batches))
        source = max(range(world.world_size), key=lambda rank: (everyone[rank][0], -rank))
        step, batches = everyone[source]
        if step < 0:
            return settings, None
        self.batches = batches
        sizes = {"batch_size": batches.batch_size, "accumulate": batches.accumulate}
        before = dataclasses.replace(
            settings, ranks=batches.world_size, global_batch_size=batches.global_batch_size, **sizes
        )
        return before.on_ranks(world.world_size), source

    def broadcast_state(self, world: World, source: int) -> disk.Loaded:
        """Send the state of rank `source` to every rank. Collective: call on every rank."""
        tensors: dict[str, torch.Tensor] = {}
        mine: Any = None
        if world.rank == source:
            assert self.snapshot is not None
            parts = {name: getattr(self.snapshot, name) for name in ("model", "state", "meta")}
            mine = pack(parts, tensors)
            tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        structure, about = world.share((mine, about))[source]
        if world.rank != source:
            tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in about.items()}
        Channel(world.control, torch.device("cpu")).broadcast(tensors.values(), source)
        found = unpack(structure, tensors)
        state, meta = found["state"], found["meta"]
        state["strategy"] = [*state["strategy"], *state["strategy"] * (world.world_size - 1)]
        return disk.Loaded(meta["step"], found["model"], state, meta, _IN_MEMORY)

    def agree_on_taken(self, world: World, step: int) -> TakenStep | None:
        """The last step, if any rank has not finished its follow-up work. Collective: call on every rank."""
        nothing = StepOutcome(torch.zeros(()), None)  # this rank's own outcome is in `unwritten`
        mine = None if self.taken is None else dataclasses.replace(self.taken, outcome=nothing)
        found = [taken for taken in world.share(mine) if taken is not None and taken.position.step == step]
        self.taken = None
        return found[0] if found else None


def warm_up(settings: TrainSettings) -> Carried:
    """Prepare this process to become a rank: import modules and build data and model in a separate world."""
    carried = Carried()
    if settings.batch_size or settings.global_batch_size or not (settings.is_whole or is_own_data(settings.data)):
        settings = settings.on_ranks(1)  # keeps the number of steps
    # A spare takes no steps here, so do not check settings that depend on their number.
    takes_none: dict[str, Any] = {"lr_warmup": 0, "batch_growth": (), "grow": "accumulate", "plan": None, "threads": 1}
    alone = dataclasses.replace(settings, ranks=1, wrapper="none", strategy="dense", **takes_none)
    with open_world(alone) as world:
        carried.keep(build_job(alone, world))
    carried.batches = None
    return carried


class BufferGuard:
    """Restores a model's buffers, such as BatchNorm statistics, when a step fails."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = list(module.buffers())
        self._versions = [-1] * len(self._buffers)
        self._kept = [torch.empty(0) for _ in self._buffers]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        for place, buffer in enumerate(self._buffers):
            # Most buffers never change. Norms may update their statistics (vectors) without a new version.
            if (buffer.dim() == 1 and buffer.is_floating_point()) or buffer._version != self._versions[place]:
                self._kept[place], self._versions[place] = buffer.clone(), buffer._version
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._kept, strict=True):
                    buffer.copy_(before)
            raise
