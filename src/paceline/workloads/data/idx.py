"""Images and labels in idx files, as MNIST and Fashion-MNIST are given out. Other formats do not belong here."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError
from paceline.workloads.data.checks import Bytes, Labels, check_labels, told_of_trouble

__all__ = ["load_idx"]

_UNSIGNED_BYTE = 0x08


def load_idx(images: Path, labels: Path, num_classes: int) -> tuple[Bytes, Labels]:
    """Images (n, 1, height, width) and their labels; either file may be gzipped."""
    pixels = _load_array(images, 3)
    classes = _load_array(labels, 1).astype(np.int64)
    check_labels(labels, classes, num_classes, len(pixels))
    return pixels[:, None], classes


def _load_array(path: Path, num_dims: int) -> Bytes:
    with told_of_trouble(path, "gzip file", EOFError, gzip.BadGzipFile, zlib.error):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    magic, needed = data[:4].hex(), f"{_UNSIGNED_BYTE << 8 | num_dims:08x}"
    if magic != needed:
        raise ConfigError(f"{path}: magic number {magic or 'missing'}: needed is {needed}, an idx file of bytes")
    header_bytes = 4 + 4 * num_dims
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header_bytes, 4)]
    expected_bytes = header_bytes + math.prod(shape)
    if len(data) != expected_bytes:
        raise ConfigError(
            f"{path}: {len(data):,} bytes: needed are {expected_bytes:,} for {' x '.join(map(str, shape))}: "
            "get the file again"
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)
