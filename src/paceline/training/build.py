"""Builds a job from settings on each rank: data, model, wrapper and optimizer. `loop` runs the job."""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import machine
from paceline.errors import ConfigError, refuse
from paceline.options import LEARNING
from paceline.parallel import DataParallel, GhostBatchNorm, SyncBatchNorm, comm_hook
from paceline.plan import Plan
from paceline.runtime.faults.monitor import find_hang_timeout
from paceline.runtime.faults.monitored import monitor
from paceline.runtime.ranks.world import World, join_world, set_seed
from paceline.torch_internals import BatchNorm, raise_recompile_limit
from paceline.training.optimizers import LAMB, LARS, split_parameters
from paceline.training.schedules import BatchSchedule, Schedule
from paceline.training.step import Learner, OwnState, fixed_kernels, list_models
from paceline.training.train_settings import Batches, TrainSettings, load_plan, takes_cap_lists
from paceline.training.workers import build_workers
from paceline.workloads.data import DataForm, is_own, is_own_data
from paceline.workloads.data.own import OWN_FORM, OwnData, find_form, open_data
from paceline.workloads.data.sets import DataSet, load_data
from paceline.workloads.data.sharding import EpochOrder, derive_seed
from paceline.workloads.external import OwnParts, call_own, open_own
from paceline.workloads.models import find_blocks
from paceline.workloads.registry import build_model, default_form

# The training set and the optional test set.
Sets = tuple[DataSet | OwnData, DataSet | OwnData | None]
# Settings that have no effect on a user's step.
_LEARNING = (field.name for field in dataclasses.fields(TrainSettings) if field.metadata["option"].panel == LEARNING)
_OURS = ("accumulate", "precision", *(name for name in _LEARNING if name not in ("epochs", "steps")))


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

    def check_length(self) -> None:
        """Reject epoch-based training on a stream of unknown length."""
        train = self.train
        if self.settings.steps is not None or not isinstance(train, OwnData) or not train.is_stream:
            return
        if not train.count_windows(self.batches.accumulate, self.world.world_size):
            what = f"{train.describe()}: the length of an epoch is unknown"
            raise ConfigError(f"{what}; give the data a __len__, or train with --steps", code="no-length")

    def seed_step(self, step: int) -> None:
        """Seed a step's random numbers (dropout) only from the run's seed, the rank and the step number.

        A replacement rank or a resumed run then draws the same numbers.
        """
        seed = derive_seed("step", self.settings.seed, self.world.rank, step)
        device = self.world.device
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        if is_own(self.settings.model):  # built-in models use only torch's generator
            random.seed(seed)
            numpy.random.seed(seed % 2**32)

    def order(self, epoch: int) -> EpochOrder:
        """The windows of an epoch, independent of the rank and number of ranks; for a stream, a single full window."""
        size, seed, tail = self.batches.global_batch_size, self.settings.seed, self.settings.tail
        if self.train.is_stream:
            return EpochOrder(size, size, seed, epoch)
        sizes = self.batch_schedule.window_sizes(epoch)
        return EpochOrder(len(self.train), sizes, seed, epoch, tail, self.train.shuffles)

    def micro_batch_sizes(self, epoch: int) -> int | tuple[int, ...]:
        """Maximum samples in a rank's micro-batch: one value for all windows of an epoch, or one per window."""
        if self.settings.grow == "accumulate" or self.train.is_stream:
            return self.batches.batch_size
        parts = self.batches.world_size * self.batches.accumulate
        return tuple(size // parts for size in self.batch_schedule.window_sizes(epoch))


@contextlib.contextmanager
def open_world(settings: TrainSettings) -> Iterator[World]:
    """Join the open world, or start one with these settings. Collective: call on every rank."""
    with (
        join_world(settings.backend, settings.device, threads=settings.threads) as world,
        fixed_kernels(world.device, settings.precision),
    ):
        monitor(find_hang_timeout(settings.hang_timeout))
        yield world


def build_job(
    settings: TrainSettings,
    world: World,
    plan: Plan | None = None,
    sets: Sets | None = None,
    like: nn.Module | None = None,
) -> Job:
    """Build a job. `sets` is already loaded data; `like` is a model to copy instead of building a new one.
    Collective: call on every rank."""
    parts = None
    if sets is None:
        sets, parts = load_sets(settings, world)
    train, test = sets
    num_samples = len(train)
    if num_samples < world.world_size and not train.is_stream:
        raise ConfigError(f"{train.describe()}: fewer samples than {world.world_size} ranks; use fewer ranks")
    learner = build_learner(settings, world, train, plan, like=like, parts=parts)
    settings, (train, test) = adapt_settings(settings, world, (train, test), learner)
    if isinstance(train, OwnData) and train.is_stream:
        # Expected number of global batches per epoch; one if neither the length nor --steps is known.
        per_epoch = train.count_windows(settings.batches.accumulate, world.world_size)
        num_samples = (per_epoch or settings.steps or 1) * settings.batches.global_batch_size
    schedule, batch_schedule = settings.build_schedules(num_samples)
    return Job(settings, world, settings.batches, train, test, learner, schedule, batch_schedule)


def load_sets(settings: TrainSettings, world: World) -> tuple[Sets, OwnParts | None]:
    """Load the training and test sets in the model's data form. A user's data may have no test set.

    Also returns the result of the user's model function if it provided the data.
    """
    if settings.is_whole or is_own_data(settings.data):
        return _load_own(settings, world)
    # A user's model has no default data form, and needs one only for plain "synthetic".
    needs_form = not is_own(settings.model) or settings.data == "synthetic"
    form = default_form(settings.model) if needs_form else None
    folder = settings.model.removeprefix("hf:") if settings.model.startswith("hf:") else None
    train, test = (load_data(settings.data_request, split, form, world.device, folder) for split in ("train", "test"))
    return (train, test if settings.test_samples is None else test.first(settings.test_samples)), None


def _list_facts(settings: TrainSettings, world: World) -> dict[str, Any]:
    """The optional arguments that a user's function may accept."""
    facts = {"rank": world.rank, "world_size": world.world_size, "device": world.device, "seed": settings.seed}
    return facts | {"batch_size": settings.batches.batch_size}


def open_parts(settings: TrainSettings, world: World, form: DataForm | None) -> tuple[OwnParts, frozenset[str]]:
    """Call the user's model function. Returns its result and the names of the arguments that it accepts."""
    parts, taken = open_own(settings.model, form, **_list_facts(settings, world))
    name = settings.model
    models = list_models(parts.model)
    several = models != [parts.model]
    params = [p for model in models for p in model.parameters() if p.requires_grad]
    is_shared = len(set(params)) < len(params)
    shared = f"two models of {name} share a parameter, but each has its own wrapper: put shared layers into one model"
    refuse(
        (several and parts.step is None, f"model {name} returned several models: return a step with them"),
        (is_shared, shared),
        (several and settings.plan, f"--plan: {name} has several models, but a plan covers one; leave it out"),
        code="own-type",
    )
    if parts.step is not None:
        given = dataclasses.replace(settings, accumulate=settings.batches.accumulate)
        for option in _OURS:
            if (value := getattr(given, option)) != getattr(TrainSettings(accumulate=1), option):
                what = f"--{option.replace('_', '-')} {value}: set by the step of {name}; leave it out"
                raise ConfigError(what, code="unused")
    return parts, taken


def _load_own(settings: TrainSettings, world: World) -> tuple[Sets, OwnParts | None]:
    """Load data from the user's data function, or from a model function that returns both.

    If the function accepts the rank, its streams are already sharded.
    """
    set_seed(settings.seed)  # makes models and random splits equal on all ranks and after a resume
    parts = None
    name = settings.model if settings.is_whole else settings.data
    if settings.is_whole:
        parts, taken = open_parts(settings, world, None)
        found = parts.data
        advice = "name it, such as --data synthetic:images or --data FILE.py:FUNCTION, or return (model, data, step)"
        refuse((found is None, f"model {name} returned no data: {advice}"), code="no-data")
    else:
        found, taken = call_own(name, "data", **_list_facts(settings, world))
    two = found if isinstance(found, tuple) else (found, None)
    refuse((len(two) != 2, f"data {name} returned {len(two)} sets: return one, or (train, test)"), code="own-type")
    shared: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batches.batch_size}
    shared["is_sharded"] = not taken.isdisjoint(("rank", "world_size"))
    train = open_data(two[0], name, "train", **shared)
    test = None if two[1] is None else open_data(two[1], name, "test", **shared)
    train = train if settings.samples is None else train.first(settings.samples)
    train.form = train.form if settings.is_whole else find_form(train)
    return (train, test if test is None or settings.test_samples is None else test.first(settings.test_samples)), parts


def adapt_settings(settings: TrainSettings, world: World, sets: Sets, learner: Learner) -> tuple[TrainSettings, Sets]:
    """Adapt the settings to a user's data and step, and batch the data accordingly. Collective: call on every rank."""
    train, test = sets
    if isinstance(train, OwnData):
        if settings.batch_size is None and settings.global_batch_size is None:
            settings = dataclasses.replace(settings, batch_size=train.batch_size)
        tail = f"--tail {settings.tail} cannot be used: {train.describe()}"
        grows = settings.batch_growth
        refuse(
            (train.is_stream and settings.tail != "keep", f"{tail}, and its loader decides (drop_last); omit --tail"),
            (train.is_stream and grows, f"--batch-growth: {train.describe()}; the batches of a stream cannot grow"),
        )
        train = train.at(settings.batches.batch_size)
        everyone = _check_shares(train, world)
        if train.is_sharded:
            train.checksum = 0  # a checkpoint has a single checksum, but shards have different ones
            # 0 if the length is unknown on any rank.
            train.num_batches = min(size // (train.batch_size or 1) for size, _ in everyone)
        is_tested = isinstance(test, OwnData) and learner.can_evaluate
        some = f"data {train.name} has a test set on only some ranks: return the same kinds of sets on every rank"
        refuse((len(set(world.share(is_tested))) > 1, some), code="shares")
        if isinstance(test, OwnData) and is_tested:
            _check_shares(test, world)
    rest = len(train) % settings.batches.global_batch_size
    # A user's step counts every sample it gets, including fillers, so every rank needs a real sample.
    needs_all = learner.own_step is not None and 0 < rest < world.world_size
    drops = isinstance(train, OwnData) and train.drops_last
    what = f"--tail pad: the loader of {settings.data or settings.model} has drop_last=True; remove one of them"
    refuse((drops and settings.tail == "pad", what))
    if drops or (needs_all and settings.tail == "keep"):
        settings = dataclasses.replace(settings, tail="drop")
    return settings, (train, test)


def _check_shares(data: OwnData, world: World) -> list[tuple[int, int]]:
    """Reject data that differs between ranks although it is shared or is the same although it is sharded.

    Returns each rank's number of samples and checksum. Collective: call on every rank.
    """
    name = f"data {data.name}, {data.split}"
    everyone = world.share((len(data), data.checksum))
    checksums = [checksum for _, checksum in everyone]
    for rank in range(1, world.world_size):
        first = checksums.index(checksums[rank])
        if data.is_sharded and first < rank:
            advice = "use the function's rank and world_size arguments to give each rank its own part"
            raise ConfigError(f"{name}: ranks {first} and {rank} get the same samples; {advice}", code="shares")
        if not data.is_sharded and everyone[rank] != everyone[0]:
            advice = "return the same full set on every rank; Paceline then divides its samples"
            if data.is_stream:
                advice = "derive the stream's order from the seed, or shard it by rank and world_size"
            found = f"{name}: rank {rank} has different samples from rank 0, so they cannot be divided"
            raise ConfigError(f"{found}; {advice}", code="shares")
    return everyone


def _compile_blocks(module: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile block by block: a model compiled as a whole produces all its gradients at the end of backward."""
    blocks = find_blocks(module)
    # Identical blocks share a code object, for which torch limits the number of compilations. Each block compiles
    # forwards for training and evaluation: full batch, last batch of an epoch, dynamic size.
    raise_recompile_limit(8 * len(blocks))
    for _, block in blocks:
        block.compile(backend=backend)


def build_learner(
    settings: TrainSettings, world: World, data: DataSet | OwnData, plan: Plan | None = None,
    like: nn.Module | None = None, parts: OwnParts | None = None,
) -> Learner:  # fmt: skip
    """Build the wrapped model and its optimizer. `plan` applies if the settings specify none.

    `like` is a bare model built from the same settings; copying it is faster than building a new one. `parts` is the
    result of the user's function, if it has already been called.
    """
    set_seed(settings.seed)
    if like is None and is_own(settings.model):
        parts = parts or open_parts(settings, world, None if settings.is_whole else data.form)[0]
    if isinstance(data, OwnData) and (parts is None or parts.step is None):
        data.head.split()  # rejects batches that the built-in step cannot use
    if like is not None:
        module = copy.deepcopy(like).to(world.device)
    elif parts is not None:
        module = parts.model.to(world.device)
        two = f"--data {settings.data}: model {settings.model} returned its own data; leave it out"
        refuse((parts.data is not None and not settings.is_whole, two), code="unused")
    else:
        module = build_model(settings.model, data.form, settings.model_options).to(world.device)
    ghost = settings.ghost_batchnorm
    if settings.sync_batchnorm or ghost is not None:
        if not any(isinstance(layer, BatchNorm) for layer in module.modules()):
            flag = "--sync-batchnorm" if ghost is None else f"--ghost-batchnorm {ghost}"
            raise ConfigError(f"{flag}: {settings.model} has no BatchNorm; leave it out")
        to_sync = SyncBatchNorm.convert_sync_batchnorm
        module = to_sync(module) if ghost is None else GhostBatchNorm.convert(module, ghost)
    is_shared = machine.must_share_gpus(torch.cuda.device_count(), world.local_world_size)
    if world.device.type == "cuda" and data.form.kind == "images" and not is_shared:
        # cuDNN's convolutions are fastest in this layout, with or without tensor cores, with the same results. On a
        # shared GPU its BatchNorm kernels for this layout deadlock: each waits until all its blocks are running.
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if settings.compile:
        _compile_blocks(module)
    # From now on, random numbers (dropout) must differ between ranks.
    set_seed(settings.seed, per_rank=True)
    if settings.plan is not None:
        plan = load_plan(Path(settings.plan))
    if parts is None or parts.step is None:
        optimizer = _build_optimizer(module, settings, world.device)
    else:
        optimizer = cast(torch.optim.Optimizer, OwnState(settings.model, parts.state))
    own = (parts.step, parts.evaluate) if parts is not None else (None, None)
    form = data.form if own[0] is None else OWN_FORM
    scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
    model = wrap_models(module, lambda part: _wrap(part, settings, plan))
    if settings.parsed_strategy.is_sharded:
        text = f"--strategy {settings.strategy}: the step of {settings.model} has its own optimizers; leave it out"
        refuse((isinstance(optimizer, OwnState), text), code="unused")
        assert isinstance(model, DataParallel)
        optimizer = model.shard_optimizer(optimizer, overlap=True)
    learner = Learner(
        model, module, optimizer, scaler, form, world.device,
        world.world_size, settings.precision, settings.clip, settings.label_smoothing, settings.model, *own,
    )  # fmt: skip
    return learner if settings.workers == 1 else build_workers(learner, settings.workers, settings.parsed_strategy)


class Models(nn.ModuleDict):
    """Several models, each in its own wrapper."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.values():
                stack.enter_context(getattr(model, "no_sync", contextlib.nullcontext)())
            yield


def wrap_models(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap the module, or each trained model of several."""
    if list_models(module) == [module]:
        return wrap(module)
    assert isinstance(module, nn.ModuleDict)
    trains = {name: any(p.requires_grad for p in part.parameters()) for name, part in module.items()}
    return Models({name: wrap(part) if trains[name] else part for name, part in module.items()})


def _wrap(module: nn.Module, settings: TrainSettings, plan: Plan | None) -> nn.Module:
    if settings.wrapper == "none" or settings.workers > 1:
        return module
    if settings.wrapper == "dp":
        return nn.DataParallel(module)
    if settings.wrapper == "paceline":
        return DataParallel(module, plan=plan, strategy=settings.strategy)
    wrapped = DistributedDataParallel(module, **_get_caps(module, plan))
    if not settings.parsed_strategy.is_dense:
        wrapped.register_comm_hook(*comm_hook(settings.strategy, module))
    return wrapped


def _get_caps(module: nn.Module, plan: Plan | None) -> dict[str, Any]:
    """Convert the plan to arguments of torch's wrapper."""
    if plan is None:
        return {}
    # Reject a plan for another model: torch gets only bucket sizes and would not notice.
    planned = {gradient.name: gradient.num_bytes for gradient in plan.gradients}
    here = {name: param.nbytes for name, param in module.named_parameters() if param.requires_grad}
    if planned != here:
        odd = sorted(planned.items() ^ here.items())[0][0]
        found = f"--plan is for {len(planned)} gradients, but the model has {len(here)} (first difference: {odd})"
        raise ConfigError(f"{found}: run `paceline tune` on this model")
    kwargs = plan.as_torch_kwargs()
    if "bucket_cap_mb_list" in kwargs and not takes_cap_lists():
        found = "--plan needs a cap per bucket, which requires torch 2.13 or newer"
        raise ConfigError(f"{found}: use --wrapper paceline, or a plan from `tune --wrapper torch` with this torch")
    return kwargs


def _build_optimizer(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer. Weight decay and trust ratios apply to matrices and filters, not to biases and norms."""
    # DGC applies momentum before sending gradients, so the optimizer has none. The factor 1 / (1 - momentum) scales
    # weight decay as the optimizer's momentum would.
    dgc = settings.parsed_strategy.dgc
    groups = split_parameters(module, settings.weight_decay / (1 - dgc))
    options: dict[str, Any] = {"lr": settings.lr}
    if settings.optimizer in ("sgd", "lars"):
        momentum = 0.0 if dgc else settings.momentum
        options |= {"momentum": momentum, "nesterov": momentum > 0}
    if settings.trust_coefficient is not None:
        options["trust_coefficient"] = settings.trust_coefficient
    if settings.optimizer in ("sgd", "adamw"):
        options["fused"] = device.type == "cuda"
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "lars": LARS, "lamb": LAMB}
    optimizer: torch.optim.Optimizer = kinds[settings.optimizer](groups, **options)
    return optimizer
