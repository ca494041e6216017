"""Images and pairs of sentences in parquet files, as the hub keeps them. Where they lie is in `files`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.workloads.data.checks import Bytes, Labels, brief, check_labels, told_of_trouble

__all__ = ["load_parquet_images", "load_parquet_pairs"]

_MODES = {1: "L", 3: "RGB"}


def load_parquet_images(
    files: Sequence[Path], channels: int, num_classes: int, limit: int | None
) -> tuple[Bytes, Labels]:
    """The first `limit` images (n, channels, height, width), decoded, and their labels."""
    from PIL import Image

    images: list[Bytes] = []
    labels: list[int] = []
    for file, row, (cell, label) in _rows(files, (("img", "image"), ("label",)), limit):
        try:
            with Image.open(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell)) as picture:
                pixels = np.asarray(picture.convert(_MODES[channels]))
        except Exception as error:  # Pillow's decoders raise what they like
            raise ConfigError(f"{file}: the image of row {row} (from 0) cannot be decoded: {brief(error)}") from error
        pixels = pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)
        if images and pixels.shape != images[0].shape:
            raise ConfigError(f"{file}: the image of row {row} is {pixels.shape}: the first one is {images[0].shape}")
        images.append(pixels)
        labels.append(label)
    classes = np.array(labels, np.int64)
    check_labels(files[0], classes, num_classes, len(images))
    return np.stack(images), classes


def load_parquet_pairs(files: Sequence[Path], limit: int | None) -> tuple[list[str], list[str], Labels]:
    """The first `limit` first sentences, second sentences and labels."""
    rows = [cells for _, _, cells in _rows(files, (("sentence1",), ("sentence2",), ("label",)), limit)]
    labels = np.array([row[2] for row in rows], np.int64)
    check_labels(files[0], labels, 2, len(rows))
    return [row[0] for row in rows], [row[1] for row in rows], labels


def _rows(
    files: Sequence[Path], wanted: Sequence[tuple[str, ...]], limit: int | None
) -> Iterator[tuple[Path, int, tuple[Any, ...]]]:
    """File, row in it and cells of one row after the other; of the names of a wanted column, the first that is there.

    Only what is asked for is read: a few samples of a large file come at once.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    left = limit
    for path in files:
        row = 0
        with told_of_trouble(path, "parquet file", ArrowException), ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [next((name for name in options if name in names), "") for options in wanted]
            for options, column in zip(wanted, columns, strict=True):
                if not column:
                    raise ConfigError(f"{path}: no column {' or '.join(options)}: it has {', '.join(names)}")
            for batch in file.iter_batches(columns=columns, batch_size=1024 if left is None else min(left, 1024)):
                cells = [batch.column(column).to_pylist() for column in columns]
                for values in zip(*cells, strict=True):
                    if None in values:
                        raise ConfigError(f"{path}: row {row} (from 0) has an empty cell: all of {columns} are needed")
                    yield path, row, values
                    row += 1
                    if left is not None:
                        left -= 1
                        if left == 0:
                            return
    if limit is None and row == 0:
        raise ConfigError(f"{files[-1]}: no rows")
