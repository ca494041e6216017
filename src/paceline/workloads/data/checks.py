"""What every reader asks of files: that they can be read, and that labels fit. Formats do not belong here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError

__all__ = ["Bytes", "Labels", "brief", "check_labels", "told_of_trouble"]

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


def brief(error: Exception) -> str:
    """What another library says, in one line that is not too long."""
    return " ".join(str(error).split())[:160]


@contextmanager
def told_of_trouble(path: Path, what: str, *damage: type[Exception]) -> Iterator[None]:
    """Turn a file that cannot be read, or whose bytes raise one of `damage`, into one line that names it."""
    try:
        yield
    except ConfigError:
        raise
    except damage as error:
        raise ConfigError(f"{path}: truncated or damaged {what} ({brief(error)}): get the file again") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_labels(path: Path, labels: Labels, num_classes: int, num_samples: int) -> None:
    """Refuse labels that are too few or too many, or that name no class."""
    if len(labels) != num_samples:
        raise ConfigError(f"{path}: {len(labels)} labels for {num_samples} samples: the files do not belong together")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise ConfigError(
            f"{path}: label {labels[wrong[0]]} of row {wrong[0]} (from 0): needed is 0 to {num_classes - 1}"
        )
