"""Dataclasses that check their own values and can be read from JSON. A field's annotation states its valid values.

Constraints across fields are in `find_faults`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from paceline.errors import RecordError


class Rule(NamedTuple):
    """A test for valid values and the message for invalid values, which `show` formats."""

    is_valid: Callable[[Any], bool]
    needed: str
    show: Callable[[Any], str] = repr


def at_least(least: float) -> Rule:
    return Rule(lambda value: least <= value < math.inf, f"it must be finite and at least {least}")


def one_of(known: Collection[str]) -> Rule:
    return Rule(lambda value: value in known, f"it must be one of {', '.join(known)}")


Count = Annotated[int, at_least(0)]
PositiveCount = Annotated[int, at_least(1)]
Seconds = Annotated[float, at_least(0)]


@dataclass(frozen=True)
class Checked:
    """The base of records and their parts. A rule in an annotation also applies to each item of a tuple; None is valid
    where the type allows it."""

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, rule in _list_rules(kind):
            values = [getattr(self, name)]
            while values and isinstance(values[0], tuple):
                values = list(itertools.chain.from_iterable(values))
            for value in values:
                if value is not None and not rule.is_valid(value):
                    raise RecordError(f"{self.place}: {name} is {rule.show(value)}; {rule.needed}")
        for fault in self.find_faults():
            raise RecordError(f"{self.place}: {fault}")

    def find_faults(self) -> Iterator[str]:
        """Why these values, each valid on its own, are invalid together."""
        yield from ()

    @property
    def place(self) -> str:
        """The object's name in errors: the words of its class name, and its name or model if it has one."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()
        name = getattr(self, "name", "") or getattr(self, "model", "")
        return f"{kind} {name}" if name else kind


@functools.cache
def _list_rules(cls: type) -> list[tuple[str, Rule]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(field.name, rule) for field in dataclasses.fields(cls) for rule in _find_rules(hints[field.name])]


def _find_rules(hint: Any) -> Iterator[Rule]:
    yield from getattr(hint, "__metadata__", ())
    for argument in typing.get_args(hint):
        yield from _find_rules(argument)


# -- JSON --------------------------------------------------------------------------------------------------------------

# For each field type: the accepted types of JSON values, and their name in errors. bool is an int, but not a number.
_JSON: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "str"),
    int: ((int,), "int"),
    bool: ((bool,), "bool"),
    float: ((int, float), "a number"),
    tuple: ((list, tuple), "a list"),
    dict: ((dict,), "a JSON object"),
}


def check_type(kind: Any, value: Any, name: str) -> None:
    allowed, needed = _JSON.get(kind, ((), ""))
    if allowed and type(value) not in allowed:
        raise RecordError(f"{name} must be {needed}, not {type(value).__name__} {value!r:.40}")


@functools.cache
def _find_types(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def decode(kind: Any, value: Any, name: str = "") -> Any:
    """Convert a JSON value to the type of a field and check it: dataclasses, tuples, optional values, strings, numbers.
    `name` locates the value in errors."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if dataclasses.is_dataclass(value):
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None and types.NoneType in arguments else decode(arguments[0], value, name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        check_type(dict, value, name)
        known = _find_types(kind)
        if unknown := sorted(set(value) - set(known)):
            raise RecordError(f"{kind.__name__} has no field {', '.join(unknown)}")
        where = f"{name}." if name else ""
        found = {key: decode(known[key], item, where + key) for key, item in value.items()}
        try:
            return kind(**found)
        except TypeError as error:  # a field is missing
            raise RecordError(f"{name or kind.__name__}: {error}") from None
    check_type(origin, value, name)
    try:
        if origin is tuple:
            item_type = arguments[0]
            if item_type is float and set(map(type, value)) <= {int, float}:  # fast, for raw samples
                return tuple(map(float, value))
            return tuple(decode(item_type, item, name) for item in value)
        return float(value) if kind is float else value
    except OverflowError as error:
        raise RecordError(f"{name}: {error}") from None
