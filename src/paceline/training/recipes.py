"""Recipes for large batches: named changes to the settings of a run. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from paceline.errors import ConfigError, refuse
from paceline.training.settings import TrainSettings

NO_RECIPE = "none"


@dataclass(frozen=True)
class _Context:
    """What a switch needs to know. `value` is its number; `growth` is the batch size relative to the base batch."""

    settings: TrainSettings
    value: float
    growth: float
    base_batch_size: int
    num_updates: int


def _grow(context: _Context) -> dict[str, Any]:
    """Grow from the base batch to the full one by factors of up to four, starting at this fraction of the run.

    The learning rate stays constant, because growth replaces its decay.
    """
    factors, factor = [], 1
    while factor < context.growth:
        factor = min(4 * factor, int(context.growth))
        factors.append(factor)
    spacing = (1 - context.value) / (len(factors) + 1)
    growths = tuple((round(context.value + spacing * number, 4), factor) for number, factor in enumerate(factors))
    size = context.base_batch_size
    return {"global_batch_size": size, "batch_growth": growths, "schedule": "constant", "lr_drops": ()}


@dataclass(frozen=True)
class Switch:
    """One named change in a recipe. `default` is its number if none is given; NaN means the base batch size."""

    default: float
    change: Callable[[_Context], dict[str, Any]]
    excludes: tuple[str, ...] = ()
    is_share: bool = False


SWITCHES: Mapping[str, Switch] = {
    # Linear scaling keeps the progress per epoch as long as gradients change little within a batch; it needs a warm-up
    # (Goyal 2017). Square-root scaling keeps the noise of a step (Krizhevsky 2014).
    "linear": Switch(1.0, lambda c: {"lr": c.settings.lr * c.growth * c.value}, ("sqrt", "lars", "lamb")),
    "sqrt": Switch(1.0, lambda c: {"lr": c.settings.lr * sqrt(c.growth) * c.value}, ("linear", "lars", "lamb")),
    # A layer-wise optimizer needs its own learning rate; the number is the rate at the base batch. LARS applies the
    # rate without a trust ratio to biases and norms. So the coefficient is larger than in the paper and the rate
    # smaller by the same factor: layers move as far, and biases and norms not much farther than with SGD.
    "lars": Switch(
        0.15, lambda c: {"optimizer": "lars", "trust_coefficient": 0.02, "lr": c.value * sqrt(c.growth)}, ("lamb",)
    ),
    "lamb": Switch(0.004, lambda c: {"optimizer": "lamb", "lr": c.value * sqrt(c.growth)}, ("lars",)),
    "warmup": Switch(0.2, lambda c: {"lr_warmup": max(1, round(c.value * c.num_updates))}, is_share=True),
    # Excludes the switches that set a rate for the large batch: growth starts with the small one.
    "grow": Switch(0.4, _grow, ("linear", "sqrt", "lars", "lamb", "warmup"), is_share=True),
    "ghost": Switch(math.nan, lambda c: {"ghost_batchnorm": int(c.value)}, ("sync",)),
    "sync": Switch(1.0, lambda c: {"sync_batchnorm": True}, ("ghost",)),
    "smoothing": Switch(0.1, lambda c: {"label_smoothing": c.value}, is_share=True),
}


@dataclass(frozen=True)
class Recipe:
    """A combination of switches with their numbers, such as `linear+warmup:0.1`; `none` has no switches."""

    text: str
    switches: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Recipe:
        text = "".join(text.split())  # the name of a recipe does not depend on spaces
        if text == NO_RECIPE:
            return cls(text, ())
        found: list[tuple[str, float]] = []
        for part in text.split("+"):
            name, colon, number = part.strip().partition(":")
            if name not in SWITCHES:
                raise ConfigError(f"recipe {text!r}: {name!r} is unknown; use none, {', '.join(SWITCHES)}")
            try:
                value = float(number) if colon else SWITCHES[name].default
            except ValueError:
                raise ConfigError(f"recipe {text!r}: {number!r} after {name} is not a number") from None
            is_size = value >= 2 and value % 1 == 0
            is_odd = value <= 0 or math.isinf(value) or (colon and math.isnan(value))
            typed = f"recipe {text!r}: {number} after {name}"
            refuse(
                (is_odd, f"{typed}: a number above 0 is needed"),
                (SWITCHES[name].is_share and value >= 1, f"{typed} is a fraction: below 1 is needed"),
                (name == "ghost" and colon and not is_size, f"{typed}: an integer of at least 2 is needed"),
                (name == "sync" and colon, f"{typed}, which does not take a number"),
            )
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
        """Whether it changes BatchNorm, and so needs a model that has one."""
        return not {"ghost", "sync"}.isdisjoint(self.names)

    @property
    def is_for_classes(self) -> bool:
        """Whether it changes class labels, and so does not apply to regression."""
        return "smoothing" in self.names

    def apply(
        self, base: TrainSettings, global_batch_size: int, base_batch_size: int, num_updates: int
    ) -> TrainSettings:
        """The base settings at this global batch with all switches applied, in the order of `SWITCHES`."""
        settings = replace(base, global_batch_size=global_batch_size)
        values = dict(self.switches)
        for name, switch in SWITCHES.items():
            if name in values:
                value = float(base_batch_size) if math.isnan(values[name]) else values[name]
                growth = global_batch_size / base_batch_size
                context = _Context(settings, value, growth, base_batch_size, num_updates)
                settings = replace(settings, **switch.change(context))
        return settings


def share_batch(settings: TrainSettings, most_at_once: int) -> TrainSettings:
    """Split the global batch into equal micro-batches of at most `most_at_once` samples on each rank.

    A growing batch uses larger micro-batches if its largest one fits, and more micro-batches otherwise.
    """
    size, ranks = settings.global_batch_size, settings.ranks
    assert size is not None
    if size % ranks:
        raise ConfigError(
            f"a global batch of {size} cannot be divided evenly among {ranks} ranks: use a multiple of {ranks}"
        )
    share = size // ranks
    accumulate = next(count for count in range(-(-share // most_at_once), share + 1) if share % count == 0)
    largest = share * max((factor for _, factor in settings.batch_growth), default=1)
    grow = "batch-size" if settings.batch_growth and largest <= most_at_once else "accumulate"
    return replace(settings, batch_size=share // accumulate, accumulate=accumulate, grow=grow)
