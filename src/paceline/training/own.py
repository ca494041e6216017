"""A user's own data and step in a job: what the functions of a file returned, checked and put where ours would be."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError, refuse
from paceline.runtime.world import World, set_seed
from paceline.training.loader import load_windows
from paceline.training.settings import TrainSettings
from paceline.training.step import Learner, list_models
from paceline.workloads.data import DataForm
from paceline.workloads.data.own import OwnData, find_form, open_data, peek
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder
from paceline.workloads.external import OwnParts, call_own, open_own

# The training set, and the test set if there is one.
Sets = tuple[DataSet | OwnData, DataSet | OwnData | None]
# What has no effect on a step of the user's own.
_OURS = (
    "optimizer", "lr", "momentum", "trust_coefficient", "weight_decay", "schedule", "lr_warmup", "lr_drops", "clip",
    "label_smoothing", "precision", "batch_growth",
)  # fmt: skip


def _list_facts(settings: TrainSettings, world: World) -> dict[str, Any]:
    """What a user's function may take."""
    facts = {"rank": world.rank, "world_size": world.world_size, "device": world.device, "seed": settings.seed}
    return facts | {"batch_size": settings.batches.batch_size}


def open_parts(settings: TrainSettings, world: World, form: DataForm | None) -> tuple[OwnParts, frozenset[str]]:
    """What the user's function for the model returned, and the names of what it took."""
    parts, taken = open_own(settings.model, form, **_list_facts(settings, world))
    name, models, defaults = settings.model, list_models(parts.model), TrainSettings(accumulate=1)
    several, params = models != [parts.model], [p for model in models for p in model.parameters() if p.requires_grad]
    refuse(
        (several and parts.step is None, f"model {name} returned several models: return a step with them"),
        (len(set(params)) < len(params),
         f"two models of {name} share a parameter, and each has a wrapper of its own: put what they share into one"),
        (several and settings.plan, f"--plan: {name} has several models, and a plan is of one; leave it out"),
        code="own-type",
    )  # fmt: skip
    given = {option: getattr(settings, option) for option in _OURS} | {"accumulate": settings.batches.accumulate}
    for option, value in given.items() if parts.step is not None else ():
        what = f"--{option.replace('_', '-')} {value}: the step of {name} decides it; leave it out"
        refuse((value != getattr(defaults, option), what), code="unused")
    return parts, taken


def open_whole(settings: TrainSettings, world: World) -> tuple[OwnParts, Sets]:
    """The model, data and step of a user's function that returns all of them."""
    set_seed(settings.seed)  # all ranks build equal models
    parts, taken = open_parts(settings, world, None)
    if parts.data is None:
        advice = "name it, such as --data synthetic:images or --data FILE.py:FUNCTION, or return (model, data, step)"
        raise ConfigError(f"model {settings.model} returned no data: {advice}", code="no-data")
    return parts, _open_sets(parts.data, settings, settings.model, taken)


def load_own(settings: TrainSettings, world: World) -> Sets:
    """What the user's function for the data returned."""
    found, taken = call_own(settings.data, "data", **_list_facts(settings, world))
    return _open_sets(found, settings, settings.data, taken)


def _open_sets(found: Any, settings: TrainSettings, name: str, taken: frozenset[str]) -> Sets:
    """One set, or (train, test). A function that takes the rank has sharded its streams."""
    two = found if isinstance(found, tuple) else (found, None)
    refuse((len(two) != 2, f"data {name} returned {len(two)} sets: one is needed, or (train, test)"), code="own-type")
    sizes = {"train": settings.samples, "test": settings.test_samples}
    sets: list[Any] = []
    for (split, size), part in zip(sizes.items(), two, strict=True):
        shared = {"seed": settings.seed, "batch_size": settings.batches.batch_size}
        is_sharded = not taken.isdisjoint(("rank", "world_size"))
        data = None if part is None and sets else open_data(part, name, split, **shared, is_sharded=is_sharded)
        sets.append(data if size is None or data is None else data.first(size))
    train, test = sets
    if not settings.is_whole:
        train.form = find_form(peek(train), train.items)
    return train, test


def settle(
    settings: TrainSettings, world: World, train: DataSet | OwnData, learner: Learner
) -> tuple[TrainSettings, DataSet | OwnData]:
    """The settings that follow from a user's data and step, and the data in batches of their size. Collective."""
    if isinstance(train, OwnData):
        if settings.batch_size is None and settings.global_batch_size is None:
            settings = replace(settings, batch_size=train.batch_size)
        tail, grows = f"--tail {settings.tail}: {train.describe()}", settings.batch_growth
        refuse(
            (train.is_stream and settings.tail != "keep", f"{tail}; its own end decides (drop_last), leave it out"),
            (train.is_stream and grows, f"--batch-growth: {train.describe()}; a stream has batches of one size"),
        )
        train = train.at(settings.batches.batch_size)
        _check_shares(train, settings, world)
    rest = len(train) % settings.batches.global_batch_size
    # A step of the user's own counts every sample that it gets, so no rank can do without one.
    needs_all = learner.own_step is not None and 0 < rest < world.world_size
    if needs_all or (isinstance(train, OwnData) and train.drops_last):
        settings = replace(settings, tail="drop")
    return settings, train


def _check_shares(train: OwnData, settings: TrainSettings, world: World) -> None:
    """Refuse ranks that have other data than the first, or the same where each should have its own. Collective."""
    if world.world_size == 1:
        return
    name, seen, batches = f"data {train.name}", train.checksum, settings.batches
    if train.is_stream:
        size = batches.global_batch_size
        order = EpochOrder(size, size, settings.seed, 0)
        windows = load_windows(train, order, 0, world.rank, world.world_size, batches.batch_size, world.device)
        with contextlib.closing(windows):
            next(windows)
        seen = train.digest
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


class OwnState:
    """What a step of the user's own has of state, saved and loaded as an optimizer is."""

    def __init__(self, name: str, parts: Mapping[str, Any]) -> None:
        self._name, self._parts, self._seen = name, parts, dict[torch.optim.Optimizer, None]()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        odd = ", ".join(sorted(state.keys() ^ self._parts.keys()))
        found = f"model {self._name} and the checkpoint differ in their state: {odd}"
        refuse((odd, f"{found}; return the same parts, or start a new run"), code="mismatch")
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
    def unsaved(self) -> str:
        """The optimizers whose state is not among the parts, by their class: a run cannot resume without it."""
        groups = [group for part in self._parts.values() for group in getattr(part, "param_groups", ())]
        saved = {param for group in groups for param in group["params"]}
        used = {o: (p for group in o.param_groups for p in group["params"]) for o in self._seen if o.state}
        return ", ".join(type(o).__name__ for o, params in used.items() if not saved.issuperset(params))


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
    assert isinstance(module, nn.ModuleDict)
    trains = {name: any(p.requires_grad for p in part.parameters()) for name, part in module.items()}
    return Models({name: wrap(part) if trains[name] else part for name, part in module.items()})
