"""CIFAR-10 as its authors give it out: pickled batches in a folder or a tar archive. Parquet is read elsewhere.

A pickle is a program. Here one may build numpy arrays and plain containers, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.workloads.data.checks import Bytes, Labels, brief, check_labels, told_of_trouble

__all__ = ["load_batches", "load_tar"]

_SHAPE = (3, 32, 32)
_NUM_CLASSES = 10
_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"asks for the encoding {encoding!r}")
    return text.encode("latin1")


# The same function under the names that numpy 1 and numpy 2 write. Python 3 writes bytes by `_codecs.encode`.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; any other name in the pickle is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ConfigError(f"asks for {module}.{name}")
        return _ALLOWED[module, name]


def load_batches(files: Sequence[Path]) -> tuple[Bytes, Labels]:
    """Images (n, 3, 32, 32) and labels of the files, in their order."""
    parts = []
    for file in files:
        with told_of_trouble(file, "batch"):
            data = file.read_bytes()
        parts.append(_read_batch(file, data))
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def load_tar(path: Path, split: str) -> tuple[Bytes, Labels]:
    """The same from the archive, of which nothing is written to disk."""
    found: dict[str, bytes] = {}
    with (
        told_of_trouble(path, "archive", tarfile.TarError, EOFError, zlib.error),
        tarfile.open(path) as archive,
    ):
        for member in archive:
            name = Path(member.name).name
            if name in _BATCHES[split] and member.isfile() and (file := archive.extractfile(member)):
                found[name] = file.read()
    missing = [name for name in _BATCHES[split] if name not in found]
    if missing:
        raise ConfigError(f"{path}: no {', '.join(missing)} inside: needed is cifar-10-python.tar.gz as given out")
    parts = [_read_batch(path / name, found[name]) for name in _BATCHES[split]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _read_batch(path: Path, data: bytes) -> tuple[Bytes, Labels]:
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except ConfigError as error:
        raise ConfigError(f"{path}: refused: the pickle {error}, and a batch needs numpy arrays alone") from None
    except Exception as error:  # what damaged bytes raise in a pickle has no bounds
        raise ConfigError(f"{path}: truncated or damaged batch ({brief(error)}): get the file again") from error
    # Python 2 wrote the keys as bytes, Python 3 writes text.
    entries = {}
    if isinstance(content, dict):
        entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    images, labels = entries.get("data"), entries.get("labels")
    row = int(np.prod(_SHAPE))
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (row,):
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ConfigError(f"{path}: 'data' is {found}: needed is a uint8 array of rows of {row}")
    try:
        classes = np.asarray(labels).astype(np.int64, casting="same_kind").reshape(-1)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: 'labels' is {type(labels).__name__}: needed is a list of whole numbers") from None
    check_labels(path, classes, _NUM_CLASSES, len(images))
    return images.reshape(-1, *_SHAPE), classes
