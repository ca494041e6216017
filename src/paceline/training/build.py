"""From settings to a job: data, model, wrapper, optimizer. Every rank builds its own; `loop` is what they do."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError, refuse
from paceline.parallel import DataParallel, GhostBatchNorm, SyncBatchNorm
from paceline.plan import Plan
from paceline.runtime.world import World, join_world, set_seed
from paceline.training.loader import load_windows
from paceline.training.optimizers import LAMB, LARS, split_parameters
from paceline.training.schedules import BatchSchedule, Schedule
from paceline.training.settings import Batches, TrainSettings, load_plan, takes_cap_lists
from paceline.training.step import Learner, list_models, settled_kernels
from paceline.workloads.data import DataForm, is_own, is_own_data
from paceline.workloads.data.own import OWN_FORM, NoBatches, OwnData, find_form, open_data, peek
from paceline.workloads.data.sets import DataSet, load_data
from paceline.workloads.data.sharding import EpochOrder
from paceline.workloads.external import OwnParts, call_own, check_signature, open_own
from paceline.workloads.models import find_blocks
from paceline.workloads.registry import build_model, default_form

# The training set, and the test set if there is one.
Sets = tuple[DataSet | OwnData, DataSet | OwnData | None]


@dataclass(frozen=True)
class Job:
    """A training run on one rank, ready to start."""

    settings: TrainSettings
    world: World
    batches: Batches
    train: DataSet | OwnData
    test: DataSet | OwnData | None
    learner: Learner
    schedule: Schedule
    batch_schedule: BatchSchedule

    @property
    def why_not_evaluated(self) -> str:
        """Why a test set is not used; empty where it is, or there is none."""
        learner = self.learner
        if self.test is None or learner.own_step is None or learner.own_evaluate is not None:
            return ""
        return f"not evaluated: {learner.name} has a step, and no evaluate(model, batch); return it in a dict"

    def check_length(self) -> None:
        """Refuse to train for whole epochs of a stream that does not say how long they are."""
        train, size = self.train, self.batches.global_batch_size
        if isinstance(train, OwnData) and isinstance(train.items, NoBatches):
            advice = "return (model, data, step), whose step gets a batch"
            raise ConfigError(f"model {train.name} returned no data, which training needs: {advice}", code="no-data")
        if isinstance(train, OwnData) and train.is_stream and self.settings.steps is None:
            is_known = train.count_windows(size, self.batches.accumulate, self.world.world_size) > 0
            unknown = f"{train.describe()}: the length of an epoch is not known; give --steps, or the data a __len__"
            refuse((not is_known, unknown), code="no-length")

    def order(self, epoch: int) -> EpochOrder:
        """The windows of an epoch: the same on every rank and for every number of ranks. Of a stream, all are alike."""
        if self.train.is_stream:
            size = self.batches.global_batch_size
            return EpochOrder(size, size, self.settings.seed, epoch, self.settings.tail)
        sizes = self.batch_schedule.window_sizes(epoch)
        return EpochOrder(len(self.train), sizes, self.settings.seed, epoch, self.settings.tail, self.train.shuffles)

    def micro_batch_sizes(self, epoch: int) -> int | tuple[int, ...]:
        """The most samples of a rank's micro-batch, in all windows of an epoch or in each."""
        if self.settings.grow == "accumulate":
            return self.batches.batch_size
        parts = self.batches.world_size * self.batches.accumulate
        return tuple(size // parts for size in self.batch_schedule.window_sizes(epoch))


@contextlib.contextmanager
def open_world(settings: TrainSettings) -> Iterator[World]:
    """The world of these settings: the one that is open, or a new one. Collective: call on every rank."""
    with (
        join_world(settings.backend, settings.device, threads=settings.threads) as world,
        settled_kernels(world.device, settings.precision),
    ):
        yield world


def build_job(settings: TrainSettings, world: World, plan: Plan | None = None, sets: Sets | None = None) -> Job:
    """Build everything; `sets` is data that is already loaded. Collective: call on every rank."""
    parts = None
    if sets is None and settings.is_whole:
        parts, sets = _open_whole(settings, world)
    train, test = load_sets(settings, world) if sets is None else sets
    learner = build_learner(settings, world, train, plan, parts=parts)
    settings, train = _settle(settings, world, train, learner)
    size, epochs, num_steps, num_samples = (
        settings.batches.global_batch_size,
        settings.epochs,
        settings.steps,
        len(train),
    )
    if isinstance(train, OwnData):
        _check_shares(train, settings, world)
        num_samples = _count_samples(train, settings, world)
    if num_samples < world.world_size:
        raise ConfigError(f"{train.describe()}: fewer samples than the {world.world_size} ranks; use fewer ranks")
    # Refuses data that is smaller than one batch.
    per_epoch = EpochOrder(num_samples, size, settings.seed, 0, settings.tail).num_windows
    if num_steps is not None:
        epochs = -(-num_steps // per_epoch)
    batch_schedule = BatchSchedule(
        global_batch_size=size,
        num_samples=num_samples,
        epochs=epochs,
        growths=settings.batch_growth,
        tail=settings.tail,
    )
    batch_schedule.check()
    num_steps = num_steps or batch_schedule.num_steps
    if settings.lr_warmup >= num_steps:
        raise ConfigError(f"--lr-warmup {settings.lr_warmup} of {num_steps} steps in all: leave some to train at --lr")
    schedule = Schedule(
        shape=settings.schedule, peak=settings.lr, num_steps=num_steps, warmup_steps=settings.lr_warmup,
        drops=settings.lr_drops,
    )  # fmt: skip
    return Job(settings, world, settings.batches, train, test, learner, schedule, batch_schedule)


def load_sets(settings: TrainSettings, world: World) -> Sets:
    """The training set and the test set, in the form that suits the model; of a user's own data there may be no test
    set."""
    if is_own_data(settings.data):
        found, taken = call_own(settings.data, "data", **_list_facts(settings, world))
        return _open_sets(found, settings, world, settings.data, taken)
    # A user's own model has no default data; it needs none where a data set or a kind is named.
    needs_form = not is_own(settings.model) or settings.data == "synthetic"
    form = default_form(settings.model) if needs_form else None
    folder = settings.model.removeprefix("hf:") if settings.model.startswith("hf:") else None
    train, test = (load_data(settings.data_request, split, form, world.device, folder) for split in ("train", "test"))
    return train, test if settings.test_samples is None else test.first(settings.test_samples)


# -- a user's own data and step ---------------------------------------------------------------------------------------


def _list_facts(settings: TrainSettings, world: World) -> dict[str, Any]:
    """What a user's function may take."""
    facts = {"rank": world.rank, "world_size": world.world_size, "device": world.device, "seed": settings.seed}
    return facts | {"batch_size": settings.batches.batch_size}


def _open_parts(settings: TrainSettings, world: World, form: DataForm | None) -> tuple[OwnParts, frozenset[str]]:
    """What a user's function for the model returns. A step that loads its own data is called without a batch."""
    parts, taken = open_own(settings.model, form, **_list_facts(settings, world))
    if settings.is_whole and parts.step is not None and parts.data is None:
        step = parts.step
        check_signature(settings.model, "step", step, "model")
        parts = parts._replace(data=NoBatches(), step=lambda model, batch: step(model))
    elif parts.step is not None:
        check_signature(settings.model, "step", parts.step, "model", "batch")
    return parts, taken


def _open_whole(settings: TrainSettings, world: World) -> tuple[OwnParts, Sets]:
    """The model, data and step of a user's function that returns all of them."""
    set_seed(settings.seed)  # all ranks build equal models
    parts, taken = _open_parts(settings, world, None)
    if parts.data is None:
        advice = "name it, such as --data synthetic:images or --data FILE.py:FUNCTION, or return (model, data, step)"
        raise ConfigError(f"model {settings.model} returned no data: {advice}", code="no-data")
    return parts, _open_sets(parts.data, settings, world, settings.model, taken)


def _open_sets(found: Any, settings: TrainSettings, world: World, name: str, taken: frozenset[str]) -> Sets:
    """What a function returned as data: one set, or (train, test)."""
    two = found if isinstance(found, tuple) else (found, None)
    refuse((len(two) != 2, f"data {name} returned {len(two)} sets: one is needed, or (train, test)"), code="own-type")
    shared: dict[str, Any] = {"seed": settings.seed, "world_size": world.world_size}
    shared["is_sharded"] = isinstance(found, NoBatches) or not taken.isdisjoint(("rank", "world_size"))
    train = open_data(two[0], name, "train", **shared)
    test = None if two[1] is None else open_data(two[1], name, "test", **shared)
    refuse((train.is_stream and settings.samples, f"--samples {settings.samples}: {train.describe()}; leave it out"))
    if "batch_size" in taken:

        def reopen(batch_size: int) -> Any:
            changed = replace(settings, batch_size=batch_size, global_batch_size=None)
            return (_open_whole(changed, world)[1] if settings.is_whole else load_sets(changed, world))[0]

        train.reopen = reopen
    train = train if settings.samples is None else train.first(settings.samples)
    first = peek(train)
    if train.kind == "batches" and train.batch_size is None:
        train.batch_size = len(first)
    if not settings.is_whole:
        train.form = find_form(first, train.items)
    return train, test if test is None or settings.test_samples is None else test.first(settings.test_samples)


def _settle(
    settings: TrainSettings, world: World, train: DataSet | OwnData, learner: Learner
) -> tuple[TrainSettings, DataSet | OwnData]:
    """The settings that follow from a user's data and step, and the data in batches of their size."""
    if isinstance(train, OwnData) and settings.batch_size is None and settings.global_batch_size is None:
        settings = replace(settings, batch_size=train.batch_size)
    batches = settings.batches
    if isinstance(train, OwnData):
        found, grows = train.describe(), settings.batch_growth
        refuse(
            (train.is_stream and settings.tail == "pad", f"--tail pad: {found}; a stream cannot be padded"),
            (train.is_stream and grows, f"--batch-growth: {found}; a stream has batches of one size"),
        )
        train = train.at(batches.batch_size)
        if train.drops_last:
            settings = replace(settings, tail="drop")
    if learner.own_step is not None:
        refuse((batches.accumulate > 1, _say_own(settings, "accumulate", batches.accumulate)), code="unused")
        rest = len(train) % batches.global_batch_size
        # It counts every sample that it gets, so no rank can do without one.
        if 0 < rest < world.world_size or (train.is_stream and world.world_size > 1):
            settings = replace(settings, tail="drop")
    return settings, train


def _check_shares(train: OwnData, settings: TrainSettings, world: World) -> None:
    """Refuse ranks that have other data than the first, or the same where each should have its own. Collective."""
    if world.world_size == 1 or isinstance(train.items, NoBatches):
        return
    name, seen = f"data {train.name}", train.checksum
    if train.is_stream:
        batch_size = settings.batches.batch_size
        size = batch_size * settings.batches.accumulate * world.world_size
        order = EpochOrder(size, size, settings.seed, 0, settings.tail)
        windows = load_windows(train, order, 0, world.rank, world.world_size, batch_size, world.device)
        with contextlib.closing(windows):
            next(windows)
        seen, train.digest = train.digest, 0
    everyone = world.share((len(train), seen))
    advice = "make the order of the stream follow from the seed, or shard it yourself by rank and world_size"
    if not train.is_stream:
        advice = "return the same whole set on every rank, whose samples are then shared out"
    for rank in range(1, world.world_size):
        before = [other for other in range(rank) if everyone[other][1] == everyone[rank][1]]
        refuse(
            (train.is_sharded and before,
             f"{name}: ranks {(*before, 0)[0]} and {rank} get the same samples; give each its own part, by the rank "
             "and world_size that the function takes"),
            (not train.is_sharded and everyone[rank] != everyone[0],
             f"{name}: rank {rank} has other samples than rank 0, and would take its share of another set; {advice}"),
            code="shares",
        )  # fmt: skip


def _count_samples(train: OwnData, settings: TrainSettings, world: World) -> int:
    """Of an epoch; of a stream, those of the global batches that are expected, one where that is not known."""
    if not train.is_stream:
        return len(train)
    size = settings.batches.global_batch_size
    per_epoch = train.count_windows(size, settings.batches.accumulate, world.world_size)
    return (per_epoch or settings.steps or 1) * size


# What has no effect on a step of the user's own.
_OURS = (
    "optimizer", "lr", "momentum", "trust_coefficient", "weight_decay", "schedule", "lr_warmup", "lr_drops", "clip",
    "label_smoothing", "precision", "batch_growth",
)  # fmt: skip


def _say_own(settings: TrainSettings, option: str, value: Any) -> str:
    return f"--{option.replace('_', '-')} {value}: the step of {settings.model} decides it; leave it out"


class OwnState:
    """What a step of the user's own has of state, saved and loaded as an optimizer is."""

    def __init__(self, name: str, parts: Mapping[str, Any]) -> None:
        self._name, self._parts = name, parts
        self._seen: dict[torch.optim.Optimizer, None] = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if odd := sorted(state.keys() ^ self._parts.keys()):
            found = f"model {self._name} and the checkpoint differ in their state: {', '.join(odd)}"
            raise ConfigError(f"{found}; return the same parts, or start a new run", code="mismatch")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Note the optimizers that take steps."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: self._seen.update({optimizer: None}))
        try:
            yield
        finally:
            handle.remove()

    @property
    def warning(self) -> str:
        advice = "return it in a dict, as state"
        return (
            f"not saved: the state of {self.unsaved}, so this run cannot be resumed; {advice}" if self.unsaved else ""
        )

    @property
    def unsaved(self) -> str:
        """The optimizers whose state is not among the parts, by their class: a run cannot resume without it."""
        groups = [group for part in self._parts.values() for group in getattr(part, "param_groups", ())]
        saved = {id(param) for group in groups for param in group["params"]}
        odd = [
            type(optimizer).__name__
            for optimizer in self._seen
            if optimizer.state and not all(id(p) in saved for group in optimizer.param_groups for p in group["params"])
        ]
        return ", ".join(odd)


class Models(nn.ModuleDict):
    """Several models, each in a wrapper of its own."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.values():
                stack.enter_context(getattr(model, "no_sync", contextlib.nullcontext)())
            yield


def wrap_models(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The module in a wrapper; of several models, each that is trained."""
    if list_models(module) == [module]:
        return wrap(module)
    is_trained = {name: any(p.requires_grad for p in part.parameters()) for name, part in module.named_children()}
    return Models({name: wrap(part) if is_trained[name] else part for name, part in module.named_children()})


# -- the learner ------------------------------------------------------------------------------------------------------


def _compile_blocks(module: torch.nn.Module, backend: str = "inductor") -> None:
    """Block by block: compiled as one, a model hands over all its gradients at the end of backward."""
    blocks = find_blocks(module)
    # torch counts compilations per code object, which equal blocks share, and stops compiling for good at the limit:
    # each needs its forward for training and for evaluation, at a batch, at the last one of an epoch, and at any size.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * len(blocks))
    for _, block in blocks:
        block.compile(backend=backend)


def build_learner(
    settings: TrainSettings, world: World, data: DataSet | OwnData, plan: Plan | None = None,
    like: nn.Module | None = None, parts: OwnParts | None = None,
) -> Learner:  # fmt: skip
    """The model in its wrapper with its optimizer. `plan` is used where the settings name no plan of their own.

    `like` is a bare model of the same settings: its copy is used, which takes less time than another one. `parts` are
    those of a user's function that was called already.
    """
    set_seed(settings.seed)
    if like is not None:
        module = copy.deepcopy(like)
    elif is_own(settings.model):
        if parts is None:
            form = None if settings.is_whole else data.form
            parts, _ = _open_parts(settings, world, form)
        module = parts.model.to(world.device)
        two = f"--data {settings.data}: model {settings.model} returned data of its own; leave it out"
        refuse((parts.data is not None and not settings.is_whole, two), code="unused")
    else:
        module = build_model(settings.model, data.form, settings.model_options).to(world.device)
    ghost = settings.ghost_batchnorm
    if settings.sync_batchnorm or ghost is not None:
        if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            flag = "--sync-batchnorm" if ghost is None else f"--ghost-batchnorm {ghost}"
            raise ConfigError(f"{flag}: {settings.model} has no BatchNorm; leave it out")
        to_sync = SyncBatchNorm.convert_sync_batchnorm
        module = to_sync(module) if ghost is None else GhostBatchNorm.convert(module, ghost)
    if world.device.type == "cuda" and data.form.kind == "images":
        # The layout in which cuDNN's convolutions are fastest, tensor cores or not; the numbers are the same.
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.compile:
        _compile_blocks(module)
    # Random numbers from here on (dropout) differ between ranks.
    set_seed(settings.seed, per_rank=True)
    if settings.plan is not None:
        plan = load_plan(Path(settings.plan))
    several = list_models(module) != [module]
    own_step, form = (None, data.form) if parts is None or parts.step is None else (parts.step, OWN_FORM)
    if own_step is None:
        alone = f"model {settings.model} returned several models: return a step with them, which says how they learn"
        refuse((several, alone), code="own-type")
        optimizer = _build_optimizer(module, settings, world.device)
    else:
        assert parts is not None
        defaults = TrainSettings()
        for option in _OURS:
            value = getattr(settings, option)
            refuse((value != getattr(defaults, option), _say_own(settings, option, value)), code="unused")
        optimizer = cast(torch.optim.Optimizer, OwnState(settings.model, parts.state))
    scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
    refuse((several and plan is not None, f"--plan: {settings.model} has several models, and a plan is of one"))
    model = module if settings.wrapper == "none" else wrap_models(module, lambda part: _wrap(part, settings, plan))
    return Learner(
        model, module, optimizer, scaler, form, world.device, world.world_size, settings.precision, settings.clip,
        settings.label_smoothing, settings.model, own_step, parts.evaluate if parts is not None else None,
    )  # fmt: skip


def _wrap(module: nn.Module, settings: TrainSettings, plan: Plan | None) -> nn.Module:
    if settings.wrapper == "dp":
        return nn.DataParallel(module)
    if settings.wrapper == "paceline":
        return DataParallel(module, plan=plan)
    if plan is None:
        return DistributedDataParallel(module)
    # Refuse a plan of another model: torch takes only its caps, and would not notice.
    planned = {gradient.name: gradient.num_bytes for gradient in plan.gradients}
    here = {name: param.nbytes for name, param in module.named_parameters() if param.requires_grad}
    if planned != here:
        odd = sorted(planned.items() ^ here.items())[0][0]
        found = f"--plan is of {len(planned)} gradients and the model has {len(here)} (the first that differs is {odd})"
        raise ConfigError(f"{found}: make a plan for this model")
    kwargs = plan.as_torch_kwargs()
    if "bucket_cap_mb_list" in kwargs and not takes_cap_lists():
        found = "--plan has buckets that no single cap gives, and a cap for each needs torch 2.13 or newer"
        raise ConfigError(f"{found}: use --wrapper paceline, or a plan of `tune --wrapper torch` on this torch")
    return DistributedDataParallel(module, **kwargs)


def _build_optimizer(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    """Weight decay and trust ratios apply to matrices and filters only, not to biases and norms."""
    groups = split_parameters(module, settings.weight_decay)
    options: dict[str, Any] = {"lr": settings.lr}
    if settings.optimizer in ("sgd", "lars"):
        options |= {"momentum": settings.momentum, "nesterov": settings.momentum > 0}
    if settings.trust_coefficient is not None:
        options["trust_coefficient"] = settings.trust_coefficient
    if settings.optimizer in ("sgd", "adamw"):
        options["fused"] = device.type == "cuda"
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lars": LARS, "lamb": LAMB}
    optimizer: torch.optim.Optimizer = kinds[settings.optimizer](groups, **options)
    return optimizer
