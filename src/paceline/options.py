"""Options: settings declare each one in a field, with its help and limits. Checks and the command line derive from it.

An option takes its name, type and default from the settings field or the verb's argument.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError, refuse, suggest
from paceline.units import format_duration, shorten

_YEAR_S = 365 * 24 * 3600
# The reason given when a resumed study refuses other options.
RESUMED = "with --resume: a study keeps the settings it was started with; leave it out"
# Help panels, in display order.
PANELS = JOB, DATA, MODEL, LEARNING, MEASUREMENT, OUTPUT = "Job", "Data", "Model", "Learning", "Measurement", "Output"
# Flags that differ from the option's name.
FLAGS = {
    "backends": "--backend",
    "batch_sizes": "--batch-size",
    "caps_bytes": "--caps",
    "curves": "--curve",
    "factor": "--factor -f",
    "global_batch_sizes": "--global-batch-size",
    "iters": "--iters -n",
    "max_size": "--max-size -e",
    "memories": "--memory",
    "min_size": "--min-size -b",
    "models": "--model",
    "most_at_once": "--batch-size",
    "profiles": "--model-profile",
    "race_s": "--budget",
    "total_bytes": "--total",
    "traces": "--trace",
    "warmup": "--warmup -w",
    "wrappers": "--wrapper",
}


def find_flag(name: str) -> str:
    """The flag of an option, without its short form."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}").split()[0]


@dataclass(frozen=True)
class Option:
    """An option's help text and accepted values: one of `choices`, text that matches `pattern`, or a number within
    limits. `each_s` is the minimum time of one repetition, used to refuse requests that would never finish; `advice` is
    appended to the message about a limit."""

    help: str = ""
    panel: str = JOB
    choices: Collection[str] = ()
    pattern: str = ""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    each_s: float | None = None
    advice: str = ""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value, or one of several values, that this option does not accept. None means not specified."""
        flag = find_flag(name)
        known = f"use one of {', '.join(self.choices)}"
        is_empty = isinstance(value, list | tuple) and not value
        refuse(
            (self.choices and is_empty, f"{flag}: no name; {known}"),
            (self.least is not None and is_empty, f"{flag}: no number"),
        )
        if value is None:
            return
        for one in value if isinstance(value, list | tuple) else (value,):
            shown = f"{flag} {str(one)[:40]!r}"
            if self.choices and one not in tuple(self.choices):
                raise ConfigError(f"{shown} is unknown: {suggest(str(one), self.choices)}{known}")
            if self.pattern and not (isinstance(one, str) and re.fullmatch(self.pattern, one)):
                raise ConfigError(f"{shown} cannot be parsed: use {self.help}")
            self._check_number(flag, one)

    def _check_number(self, flag: str, value: Any) -> None:
        limits = {"at least": self.least, "above": self.above, "below": self.below}
        needed = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
        if not needed and self.each_s is None:
            return
        is_number = isinstance(value, numbers.Real)
        if not is_number:
            raise ConfigError(f"{flag} {str(value)[:40]!r}: must be a number")
        is_low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        is_high = self.below is not None and value >= self.below
        is_finite = isinstance(value, int) or math.isfinite(value)
        refuse(
            (not is_finite, f"{flag} {value}: must be finite{self.advice}"),
            (is_low or is_high, f"{flag} {value}: must be {needed}{self.advice}"),
        )
        if self.each_s is not None and value > _YEAR_S / self.each_s:
            found = f"takes more than a year, even at {format_duration(self.each_s)} each"
            most = shorten(int(_YEAR_S / self.each_s))
            raise ConfigError(f"{flag} {shorten(value)} {found}: use at most {most}", code="endless")


def option(default: Any = dataclasses.MISSING, help: str = "", panel: str = JOB, **limits: Any) -> Any:
    """Declare a settings field as an option. `limits` are passed to `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, panel, **limits)})


def check_options(settings: Any, names: Collection[str] = ()) -> None:
    for field in dataclasses.fields(settings):
        if "option" in field.metadata and (not names or field.name in names):
            value, flag = getattr(settings, field.name), find_flag(field.name)
            is_list = isinstance(value, list | tuple) and not str(field.type).startswith(("tuple", "Growths"))
            refuse(
                (value is None and field.default is not None, f"{flag}: must not be None"),
                (is_list, f"{flag} {str(value)[:40]}: must be a single value"),
            )
            field.metadata["option"].check(field.name, value)


def refuse_given(names: Iterable[str], why: str, code: str = "") -> None:
    """Refuse options that have no effect here; the message is `--first, --second WHY`."""
    flags = ", ".join(map(find_flag, names))
    refuse((flags, f"{flags} {why}"), code=code)


# Counts that are arguments of verbs. Unlisted ones must be at least 1, and each repetition takes at least 1 µs.
_COUNTS = {
    "at_once": Option(least=1, each_s=1e4),
    "seeds": Option(least=1, each_s=10.0),
    "steps": Option(least=1, each_s=1e-5),
    "warmup": Option(least=0, each_s=1e-6),
    "workers": Option(least=1, each_s=1.0),
}


def check_counts(**counts: int | None) -> None:
    """Refuse invalid numbers of repetitions; None means not specified."""
    for name, count in counts.items():
        _COUNTS.get(name, Option(least=1, each_s=1e-6)).check(name, count)
