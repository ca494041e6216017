"""Paceline's exceptions. A message states what was found, what is needed and what to do."""

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base class of all exceptions that Paceline raises on purpose.

    `code` is a short, stable name for errors that code reacts to ("peer-lost", "timeout", "mismatch", ...), or empty.
    """

    code: str = ""

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code or self.code


class ConfigError(PacelineError, ValueError):
    """The request is inconsistent, unknown, or impossible on this machine."""


def refuse(*cases: tuple[object, str], code: str = "", error: type[PacelineError] = ConfigError) -> None:
    """Raise an error for the first case (condition, message) whose condition holds."""
    for condition, message in cases:
        if condition:
            raise error(message, code=code)


class LaunchError(PacelineError, RuntimeError):
    """Ranks could not be started or connected, or one of them failed.

    `rank` is the rank that failed first (None if it was not a single rank), and `rank_traceback` its traceback as text.
    """

    def __init__(self, message: str, rank: int | None = None, rank_traceback: str = "", code: str = "") -> None:
        super().__init__(message, code=code)
        self.rank, self.rank_traceback = rank, rank_traceback

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str, str]]:
        return type(self), (str(self.args[0]), self.rank, self.rank_traceback, self.code)


class CollectiveError(PacelineError, RuntimeError):
    """A collective failed or delivered wrong data."""


class MeasurementError(PacelineError, RuntimeError):
    """A measurement is impossible, or its result is invalid."""


class RecordError(PacelineError, ValueError):
    """A record file is missing, damaged, of another version, or must not be overwritten."""


class TrainingError(PacelineError, RuntimeError):
    """Training cannot continue, for example because the loss is NaN."""


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean NAME? `, or an empty string if no known name is close."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}? " if near else ""
