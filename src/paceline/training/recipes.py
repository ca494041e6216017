"""Recipes for large batches: what each changes in the settings of a run, by name. Imports no torch.

Training by them is in `loop` and in studies; what they did is in `records.training`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.training.schedules import scale_rate
from paceline.training.settings import TrainSettings

NO_RECIPE = "none"
_TRUST = 0.02


@dataclass(frozen=True)
class _Context:
    """The number of a switch, the batch that it is for, the batch of the base settings, and the run's updates."""

    value: float
    global_batch_size: int
    base_batch_size: int
    num_updates: int

    @property
    def growth(self) -> float:
        return self.global_batch_size / self.base_batch_size


def _scale(rule: str) -> Callable[[TrainSettings, _Context], TrainSettings]:
    def change(settings: TrainSettings, context: _Context) -> TrainSettings:
        rate = scale_rate(settings.lr, context.global_batch_size, context.base_batch_size, rule)
        return replace(settings, lr=rate * context.value)

    return change


def _lars(settings: TrainSettings, context: _Context) -> TrainSettings:
    """A layer-wise optimizer needs its own rate: the number is that at the base batch.

    Biases and norms have the rate but no trust ratio. So the coefficient is larger than the paper's, and the rate
    smaller by the same factor: layers step as far, and biases and norms not much farther than with SGD.
    """
    rate = context.value * math.sqrt(context.growth)
    return replace(settings, optimizer="lars", trust_coefficient=_TRUST, lr=rate)


def _lamb(settings: TrainSettings, context: _Context) -> TrainSettings:
    return replace(settings, optimizer="lamb", lr=context.value * math.sqrt(context.growth))


def _warm_up(settings: TrainSettings, context: _Context) -> TrainSettings:
    return replace(settings, lr_warmup=max(1, round(context.value * context.num_updates)))


def _grow(settings: TrainSettings, context: _Context) -> TrainSettings:
    """From the base batch to this one by factors of up to four, from the share on; the rate stays constant, because
    growth replaces its decay."""
    factors, factor = [], 1
    while factor < context.growth:
        factor = min(4 * factor, int(context.growth))
        factors.append(factor)
    spacing = (1 - context.value) / (len(factors) + 1)
    growths = tuple((round(context.value + spacing * number, 4), factor) for number, factor in enumerate(factors))
    size = context.base_batch_size
    return replace(settings, global_batch_size=size, batch_growth=growths, schedule="constant", lr_drops=())


@dataclass(frozen=True)
class Switch:
    """What a name in a recipe does. `default` is its number where none is typed; NaN: the base batch size."""

    help: str
    default: float
    change: Callable[[TrainSettings, _Context], TrainSettings]
    excludes: tuple[str, ...] = ()
    is_for_norms: bool = False


SWITCHES: Mapping[str, Switch] = {
    "linear": Switch("the rate times the growth of the batch", 1.0, _scale("linear"), ("sqrt", "lars", "lamb")),
    "sqrt": Switch("the rate times the root of the growth", 1.0, _scale("sqrt"), ("linear", "lars", "lamb")),
    "lars": Switch("LARS, with its rate at the base batch", 0.15, _lars, ("lamb",)),
    "lamb": Switch("LAMB, with its rate at the base batch", 0.004, _lamb, ("lars",)),
    "warmup": Switch("the rate climbs over this share of the updates", 0.2, _warm_up),
    "grow": Switch(
        "the batch grows from the base, from this share of the run on",
        0.4,
        _grow,
        ("linear", "sqrt", "lars", "lamb", "warmup"),  # rates for the large batch, and it starts with the small one
    ),
    "ghost": Switch(
        "BatchNorm over this number of samples at a time",
        math.nan,
        lambda settings, context: replace(settings, ghost_batchnorm=int(context.value)),
        ("sync",),
        True,
    ),
    "sync": Switch(
        "BatchNorm over the micro-batches of all ranks",
        1.0,
        lambda settings, context: replace(settings, sync_batchnorm=True),
        ("ghost",),
        True,
    ),
    "smoothing": Switch(
        "label smoothing", 0.1, lambda settings, context: replace(settings, label_smoothing=context.value)
    ),
}


@dataclass(frozen=True)
class Recipe:
    """Switches that are on together, with their numbers: `linear+warmup:0.1`. None of them is `none`."""

    text: str
    switches: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Recipe:
        text = "".join(text.split())  # one recipe has one name, whatever its spaces
        if text == NO_RECIPE:
            return cls(text, ())
        found: list[tuple[str, float]] = []
        for part in text.split("+"):
            name, colon, number = part.strip().partition(":")
            if name not in SWITCHES:
                raise ConfigError(f"recipe {text!r}: {name!r} is unknown; known are none, {', '.join(SWITCHES)}")
            try:
                value = float(number) if colon else SWITCHES[name].default
            except ValueError:
                raise ConfigError(f"recipe {text!r}: {number!r} after {name} is not a number") from None
            if value <= 0 or math.isinf(value) or (colon and math.isnan(value)):
                raise ConfigError(f"recipe {text!r}: {number} after {name}: a number above 0 is needed")
            if name in ("warmup", "grow", "smoothing") and value >= 1:
                raise ConfigError(f"recipe {text!r}: {number} after {name} is a share: below 1 is needed")
            if name == "ghost" and colon and (value < 2 or value != int(value)):
                raise ConfigError(f"recipe {text!r}: {number} after {name}: an integer of at least 2 is needed")
            if name == "sync" and colon:
                raise ConfigError(f"recipe {text!r}: {number} after {name}, which takes no number")
            found.append((name, value))
        names = [name for name, _ in found]
        for name in names:
            clash = next((other for other in SWITCHES[name].excludes if other in names), None)
            if clash is not None or names.count(name) > 1:
                raise ConfigError(f"recipe {text!r}: {name} and {clash or name} exclude each other; leave one out")
        return cls(text, tuple(found))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.switches)

    @property
    def is_for_norms(self) -> bool:
        """Whether it changes BatchNorm, so that a model without one cannot have it."""
        return any(SWITCHES[name].is_for_norms for name in self.names)

    def apply(
        self, base: TrainSettings, global_batch_size: int, base_batch_size: int, num_updates: int
    ) -> TrainSettings:
        """The base settings at this global batch with all switches on, in the order of `SWITCHES`."""
        settings = replace(base, global_batch_size=global_batch_size)
        for name, switch in SWITCHES.items():
            if name in self.names:
                value = dict(self.switches)[name]
                value = float(base_batch_size) if math.isnan(value) else value
                context = _Context(value, global_batch_size, base_batch_size, num_updates)
                settings = switch.change(settings, context)
        return settings


def share_batch(settings: TrainSettings, most_at_once: int) -> TrainSettings:
    """Cut the global batch into micro-batches of at most `most_at_once` samples on each rank, all of one size.

    A growing batch makes micro-batches larger as long as they fit, and then adds more of them.
    """
    size, ranks = settings.global_batch_size, settings.ranks
    assert size is not None
    if size % ranks:
        raise ConfigError(f"a global batch of {size} cannot be shared by {ranks} ranks: use a multiple of {ranks}")
    share = size // ranks
    accumulate = next(count for count in range(-(-share // most_at_once), share + 1) if share % count == 0)
    largest = share * max((factor for _, factor in settings.batch_growth), default=1)
    grow = "batch-size" if settings.batch_growth and largest <= most_at_once else "accumulate"
    return replace(settings, batch_size=share // accumulate, accumulate=accumulate, grow=grow)
