"""The errors that Paceline raises. Anything that is not an error type does not belong here.

A message says what was found, what is needed and what to do, in one line.
"""

from __future__ import annotations

__all__ = [
    "CollectiveError",
    "ConfigError",
    "LaunchError",
    "MeasurementError",
    "PacelineError",
    "RecordError",
    "TrainingError",
]


class PacelineError(Exception):
    """The parent of every error that Paceline raises on purpose."""


class ConfigError(PacelineError, ValueError):
    """What the user asked for is contradictory, unknown or impossible here."""


class LaunchError(PacelineError, RuntimeError):
    """Ranks could not be started, could not meet, or one of them failed.

    `rank` is the rank that failed first (None where no single rank is to blame) and `rank_traceback`
    is its traceback as text, empty when it died without one.
    """

    def __init__(self, message: str, rank: int | None = None, rank_traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_traceback = rank_traceback

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str]]:
        return type(self), (str(self.args[0]), self.rank, self.rank_traceback)


class CollectiveError(PacelineError, RuntimeError):
    """A collective call failed or delivered wrong data."""


class MeasurementError(PacelineError, RuntimeError):
    """A measurement cannot be made or cannot be believed."""


class RecordError(PacelineError, ValueError):
    """A file of records is missing, damaged, of another version, or must not be overwritten."""


class TrainingError(PacelineError, RuntimeError):
    """Training cannot go on, because of what it has come to: a loss that is not a number."""
