"""A user's own data and step in a job: checks what the user's functions returned, and uses it in place of ours."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.errors import ConfigError, refuse
from paceline.runtime.world import World, set_seed
from paceline.training.settings import TrainSettings
from paceline.training.step import Learner, list_models
from paceline.workloads.data import DataForm
from paceline.workloads.data.own import OwnData, find_form, open_data
from paceline.workloads.data.sets import DataSet
from paceline.workloads.external import OwnParts, call_own, open_own

# The training set, and the test set if there is one.
Sets = tuple[DataSet | OwnData, DataSet | OwnData | None]
# Settings that have no effect on a user's own step.
_OURS = (
    "optimizer", "lr", "momentum", "trust_coefficient", "weight_decay", "schedule", "lr_warmup", "lr_drops", "clip",
    "label_smoothing", "precision", "batch_growth",
)  # fmt: skip


def _list_facts(settings: TrainSettings, world: World) -> dict[str, Any]:
    """The arguments that a user's function may take."""
    facts = {"rank": world.rank, "world_size": world.world_size, "device": world.device, "seed": settings.seed}
    return facts | {"batch_size": settings.batches.batch_size}


def open_parts(settings: TrainSettings, world: World, form: DataForm | None) -> tuple[OwnParts, frozenset[str]]:
    """What the user's model function returned, and the names of the arguments it took."""
    parts, taken = open_own(settings.model, form, **_list_facts(settings, world))
    name = settings.model
    models = list_models(parts.model)
    defaults = TrainSettings(accumulate=1)
    several = models != [parts.model]
    params = [p for model in models for p in model.parameters() if p.requires_grad]
    refuse(
        (several and parts.step is None, f"model {name} returned several models: return a step with them"),
        (len(set(params)) < len(params),
         f"two models of {name} share a parameter, but each has its own wrapper: put shared layers into one model"),
        (several and settings.plan, f"--plan: {name} has several models, but a plan is for one; leave it out"),
        code="own-type",
    )  # fmt: skip
    given = {option: getattr(settings, option) for option in _OURS} | {"accumulate": settings.batches.accumulate}
    for option, value in given.items() if parts.step is not None else ():
        what = f"--{option.replace('_', '-')} {value}: the step of {name} decides it; leave it out"
        refuse((value != getattr(defaults, option), what), code="unused")
    return parts, taken


def open_whole(settings: TrainSettings, world: World) -> tuple[OwnParts, Sets]:
    """The model, data and step from a user's function that returns all three."""
    set_seed(settings.seed)  # all ranks build equal models
    parts, taken = open_parts(settings, world, None)
    if parts.data is None:
        advice = "name it, such as --data synthetic:images or --data FILE.py:FUNCTION, or return (model, data, step)"
        raise ConfigError(f"model {settings.model} returned no data: {advice}", code="no-data")
    return parts, _open_sets(parts.data, settings, settings.model, taken)


def load_own(settings: TrainSettings, world: World) -> Sets:
    """Load the data that the user's data function returns."""
    set_seed(settings.seed)  # a random split is the same on all ranks and after a resume
    found, taken = call_own(settings.data, "data", **_list_facts(settings, world))
    return _open_sets(found, settings, settings.data, taken)


def _open_sets(found: Any, settings: TrainSettings, name: str, taken: frozenset[str]) -> Sets:
    """Open one set, or (train, test). If the function took the rank, its streams are already sharded."""
    two = found if isinstance(found, tuple) else (found, None)
    refuse((len(two) != 2, f"data {name} returned {len(two)} sets: return one, or (train, test)"), code="own-type")
    shared: dict[str, Any] = {"seed": settings.seed, "batch_size": settings.batches.batch_size}
    shared["is_sharded"] = not taken.isdisjoint(("rank", "world_size"))
    train = open_data(two[0], name, "train", **shared)
    test = None if two[1] is None else open_data(two[1], name, "test", **shared)
    train = train if settings.samples is None else train.first(settings.samples)
    train.form = train.form if settings.is_whole else find_form(train)
    return train, test if test is None or settings.test_samples is None else test.first(settings.test_samples)


def adapt_settings(settings: TrainSettings, world: World, sets: Sets, learner: Learner) -> tuple[TrainSettings, Sets]:
    """Adapt the settings to a user's data and step, and batch the data accordingly. Collective."""
    train, test = sets
    if isinstance(train, OwnData):
        if settings.batch_size is None and settings.global_batch_size is None:
            settings = replace(settings, batch_size=train.batch_size)
        tail = f"--tail {settings.tail}: {train.describe()}"
        grows = settings.batch_growth
        refuse(
            (train.is_stream and settings.tail != "keep", f"{tail}; its loader decides (drop_last), leave it out"),
            (train.is_stream and grows, f"--batch-growth: {train.describe()}; the batches of a stream cannot grow"),
        )
        train = train.at(settings.batches.batch_size)
        everyone = _check_shares(train, world)
        if train.is_sharded:
            train.checksum = 0  # a checkpoint has a single checksum, but shards differ
            # 0 if any rank does not know its length.
            train.num_batches = min(size // (train.batch_size or 1) for size, _ in everyone)
        is_tested = isinstance(test, OwnData) and learner.can_evaluate
        some = f"data {train.name} has a test set on some ranks and none on others: return the same kinds on every rank"
        refuse((len(set(world.share(is_tested))) > 1, some), code="shares")
        if isinstance(test, OwnData) and is_tested:
            _check_shares(test, world)
    rest = len(train) % settings.batches.global_batch_size
    # A user's own step counts every sample it gets, so it cannot get a filler: every rank needs a real sample.
    needs_all = learner.own_step is not None and 0 < rest < world.world_size
    drops = isinstance(train, OwnData) and train.drops_last
    what = f"--tail pad: the loader of {settings.data or settings.model} has drop_last=True; remove one of them"
    refuse((drops and settings.tail == "pad", what))
    if drops or (needs_all and settings.tail == "keep"):
        settings = replace(settings, tail="drop")
    return settings, (train, test)


def _check_shares(data: OwnData, world: World) -> list[tuple[int, int]]:
    """Refuse ranks whose data differs although it should be shared, or is the same although it should be sharded.

    Returns the number of samples and the checksum of each rank. Collective.
    """
    name = f"data {data.name}, {data.split}"
    everyone = world.share((len(data), data.checksum))
    advice = "make the order of the stream follow from the seed, or shard it yourself by rank and world_size"
    if not data.is_stream:
        advice = "return the same whole set on every rank; Paceline then divides its samples"
    for rank in range(1, world.world_size):
        before = [other for other in range(rank) if everyone[other][1] == everyone[rank][1]]
        refuse(
            (data.is_sharded and before,
             f"{name}: ranks {(*before, 0)[0]} and {rank} get the same samples; use the function's rank and world_size "
             "arguments to give each rank its own part"),
            (not data.is_sharded and everyone[rank] != everyone[0],
             f"{name}: rank {rank} has different samples from rank 0, so they cannot be divided; {advice}"),
            code="shares",
        )  # fmt: skip
    return everyone


class OwnState:
    """The state of a user's own step, saved and loaded like an optimizer. `parts` is None if the user returned none."""

    def __init__(self, name: str, parts: Mapping[str, Any] | None) -> None:
        self._name, self.parts = name, parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in (self.parts or {}).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        odd = ", ".join(sorted(state.keys() ^ (self.parts or {}).keys()))
        found = f"model {self._name} and the checkpoint have different state: {odd}"
        if self.parts is None:
            found = f"model {self._name} did not return the state of its optimizers, so the checkpoint lacks it"
        refuse((self.parts is None or odd, f"{found}; return it in a dict, and start a new run"), code="mismatch")
        for name, part in (self.parts or {}).items():
            part.load_state_dict(state[name])


class Models(nn.ModuleDict):
    """Several models, each in its own wrapper."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.values():
                stack.enter_context(getattr(model, "no_sync", contextlib.nullcontext)())
            yield


def wrap_models(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Wrap the module; if there are several models, wrap each one that is trained."""
    if list_models(module) == [module]:
        return wrap(module)
    assert isinstance(module, nn.ModuleDict)
    trains = {name: any(p.requires_grad for p in part.parameters()) for name, part in module.items()}
    return Models({name: wrap(part) if trains[name] else part for name, part in module.items()})
