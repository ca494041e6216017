"""Dataclasses that check their own values: a field's annotation says which values it may have, as in `Count`.

What several fields must have in common is in `find_faults`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from paceline.errors import RecordError


class Rule(NamedTuple):
    """Which values are valid, and what to say about others."""

    is_valid: Callable[[Any], bool]
    needed: str


def at_least(least: float) -> Rule:
    return Rule(lambda value: least <= value < math.inf, f"it must be finite and at least {least}")


def one_of(known: Collection[str]) -> Rule:
    return Rule(lambda value: value in known, f"known are {', '.join(known)}")


Count = Annotated[int, at_least(0)]
PositiveCount = Annotated[int, at_least(1)]
Seconds = Annotated[float, at_least(0)]


@dataclass(frozen=True)
class Checked:
    """The base of records and their parts. A rule in an annotation also holds for each item of a tuple; None is valid
    where the type allows it."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, rule in _list_rules(kind):
            values = [getattr(self, name)]
            while values and isinstance(values[0], tuple):
                values = list(itertools.chain.from_iterable(values))
            for value in values:
                if value is not None and not rule.is_valid(value):
                    raise RecordError(f"{self.place}: {name} is {value!r}; {rule.needed}")
        for fault in self.find_faults():
            raise RecordError(f"{self.place}: {fault}")

    def find_faults(self) -> Iterator[str]:
        """What is wrong with values that are valid each by itself."""
        yield from ()

    @property
    def place(self) -> str:
        """Identifies the object in errors: `CollectiveRecord` is a collective record."""
        return re.sub(r"(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()


@functools.cache
def _list_rules(cls: type) -> list[tuple[str, Rule]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(field.name, rule) for field in dataclasses.fields(cls) for rule in _find_rules(hints[field.name])]


def _find_rules(hint: Any) -> Iterator[Rule]:
    yield from getattr(hint, "__metadata__", ())
    for argument in typing.get_args(hint):
        yield from _find_rules(argument)
