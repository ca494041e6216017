"""Readers of data files as they are distributed: idx, CIFAR, parquet, MRPC and text; and tokenizers."""

import csv
import gzip
import io
import math
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.workloads.data import BATCHES, import_hf, shorten_error

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
NUM_CLASSES = 10  # of every set of images


@contextmanager
def _refuse_unreadable(path: Path, what: str, *damage: type[Exception]) -> Iterator[None]:
    """Turn an unreadable file, or one whose bytes raise one of `damage`, into one line that names it."""
    try:
        yield
    except damage as error:
        text = f"{path}: truncated or damaged {what} ({shorten_error(error)}): get the file again"
        raise ConfigError(text) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_labels(path: Path, labels: Labels, num_classes: int, num_samples: int, what: str = "rows") -> None:
    """Refuse labels that are missing, too few or too many, or that name no class."""
    if num_samples == 0:
        raise ConfigError(f"{path}: no {what}: get the file again")
    if len(labels) != num_samples:
        raise ConfigError(f"{path}: {len(labels)} labels for {num_samples} samples: the files do not belong together")
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= num_classes))):
        row = wrong[0]
        raise ConfigError(f"{path}: label {labels[row]} of row {row} (from 0): needed is 0 to {num_classes - 1}")


def load_images(
    layout: str, files: Sequence[Path], split: str, channels: int, limit: int | None
) -> tuple[Bytes, Labels]:
    """Images (n, channels, height, width) and their labels; only the first `limit`, where that saves time."""
    if layout == "idx":
        pixels, classes = _load_array(files[0], 3), _load_array(files[1], 1).astype(np.int64)
        _check_labels(files[1], classes, NUM_CLASSES, len(pixels))
        return pixels[:, None], classes
    if layout == "parquet":
        return _load_parquet_images(files, channels, limit)
    batches = _read_archive(files[0], split) if layout == "tar" else ((path, _read_bytes(path)) for path in files)
    images, labels = zip(*(_parse_batch(path, data) for path, data in batches), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read_bytes(path: Path) -> bytes:
    with _refuse_unreadable(path, "gzip file", EOFError, gzip.BadGzipFile, zlib.error):
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _load_array(path: Path, num_dims: int) -> Bytes:
    """An idx file of bytes, which may be gzipped."""
    data = _read_bytes(path)
    magic, needed = data[:4].hex(), f"{0x0800 | num_dims:08x}"
    if magic != needed:
        raise ConfigError(f"{path}: magic number {magic or 'missing'}: needed is {needed}, an idx file of bytes")
    header_bytes = 4 + 4 * num_dims
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header_bytes, 4)]
    if len(data) != header_bytes + math.prod(shape):
        needed = f"needed are {header_bytes + math.prod(shape):,} for {' x '.join(map(str, shape))}"
        raise ConfigError(f"{path}: {len(data):,} bytes: {needed}: get the file again")
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


_ALLOWED: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    # The same function under the names that numpy 1 and numpy 2 write.
    **{f"numpy.{core}.multiarray._reconstruct": np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    # Python 3 writes bytes as a call of this, always with latin1.
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; any other name in the pickle is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (wanted := f"{module}.{name}") not in _ALLOWED:
            raise ConfigError(f"asks for {wanted}")
        return _ALLOWED[wanted]


def _read_archive(path: Path, split: str) -> Iterator[tuple[Path, bytes]]:
    """The batches of the archive, of which nothing is written to disk."""
    found: dict[str, bytes] = {}
    damage = (tarfile.TarError, EOFError, zlib.error)
    with _refuse_unreadable(path, "archive", *damage), tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if name in BATCHES[split] and member.isfile() and (file := archive.extractfile(member)):
                found[name] = file.read()
    if missing := [name for name in BATCHES[split] if name not in found]:
        raise ConfigError(f"{path}: no {', '.join(missing)} inside: needed is cifar-10-python.tar.gz as given out")
    return ((path / name, found[name]) for name in BATCHES[split])


def _parse_batch(path: Path, data: bytes) -> tuple[Bytes, Labels]:
    """The images and labels in a file of CIFAR-10."""
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except ConfigError as error:
        raise ConfigError(f"{path}: refused: the pickle {error}, and a batch needs numpy arrays alone") from None
    except Exception as error:  # damaged bytes in a pickle can raise anything
        raise ConfigError(f"{path}: truncated or damaged batch ({shorten_error(error)}): get the file again") from error
    # Python 2 wrote the keys as bytes, Python 3 writes text.
    items = content.items() if isinstance(content, dict) else ()
    entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in items}
    images, labels, row = entries.get("data"), entries.get("labels"), 3 * 32 * 32
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (row,):
        found = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ConfigError(f"{path}: 'data' is {found}: needed is a uint8 array of rows of {row}")
    try:
        classes = np.asarray(labels).astype(np.int64, casting="same_kind").reshape(-1)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: 'labels' is {type(labels).__name__}: needed is a list of integers") from None
    _check_labels(path, classes, NUM_CLASSES, len(images))
    return images.reshape(-1, 3, 32, 32), classes


def _load_parquet_images(files: Sequence[Path], channels: int, limit: int | None) -> tuple[Bytes, Labels]:
    from PIL import Image

    images: list[Bytes] = []
    labels: list[int] = []
    for file, row, (cell, label) in islice(_rows(files, (("img", "image"), ("label",))), limit):
        try:
            with Image.open(io.BytesIO(cell["bytes"] if isinstance(cell, dict) else cell)) as picture:
                pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
        except Exception as error:  # Pillow's decoders raise errors of every type
            text = f"{file}: the image of row {row} (from 0) cannot be decoded: {shorten_error(error)}"
            raise ConfigError(text) from error
        pixels = pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)
        if images and pixels.shape != images[0].shape:
            raise ConfigError(f"{file}: the image of row {row} is {pixels.shape}: the first one is {images[0].shape}")
        images.append(pixels)
        labels.append(label)
    classes = np.array(labels, np.int64)
    _check_labels(files[0], classes, NUM_CLASSES, len(images))
    return np.stack(images), classes


def _rows(files: Sequence[Path], wanted: Sequence[tuple[str, ...]]) -> Iterator[tuple[Path, int, tuple[Any, ...]]]:
    """File, row in it and cells of each row; of the names of a wanted column, the first that is there."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    for path in files:
        row = 0
        with _refuse_unreadable(path, "parquet file", ArrowException), ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [next((name for name in options if name in names), "") for options in wanted]
            for options, column in zip(wanted, columns, strict=True):
                if not column:
                    raise ConfigError(f"{path}: no column {' or '.join(options)}: it has {', '.join(names)}")
            for batch in file.iter_batches(columns=columns, batch_size=1024):
                for values in zip(*(batch.column(column).to_pylist() for column in columns), strict=True):
                    if None in values:
                        raise ConfigError(f"{path}: row {row} (from 0) has an empty cell: all of {columns} are needed")
                    yield path, row, values
                    row += 1


_HEADER = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
_QUOTED = r'(?:"(?:[^"]|"")*"|[^"\t]*)'


def load_pairs(layout: str, files: Sequence[Path], limit: int | None) -> tuple[Sequence[str], Sequence[str], Labels]:
    """First sentences, second sentences and labels, of the first `limit` pairs; 1 is a paraphrase."""
    if layout == "tsv":
        rows = _read_paraphrases(files[0])
    else:
        columns = (("sentence1",), ("sentence2",), ("label",))
        rows = [cells for *_, cells in islice(_rows(files, columns), limit)]
    labels = np.array([label for *_, label in rows], np.int64)
    _check_labels(files[0], labels, 2, len(rows), "lines below the header" if layout == "tsv" else "rows")
    first, second, _ = zip(*rows[:limit], strict=True)
    return first, second, labels[:limit]


def _read_paraphrases(path: Path) -> list[tuple[Any, ...]]:
    """Sentences and label of MRPC's lines. In the files as given out a quote is a quote. Copies go around that a
    spreadsheet has rewritten: there a field with quotes is in quotes itself and its own are doubled. A copy is known by
    its lines, of which all obey that rule."""
    with _refuse_unreadable(path, "text", UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    if not lines or lines[0].split("\t") != _HEADER:
        first = lines[0][:80] if lines else ""
        raise ConfigError(f"{path}: the first line is {first!r}: needed are the tab-separated names {_HEADER}")
    marked = [line for line in lines if '"' in line]
    is_copy = any('""' in line for line in marked)
    is_copy = is_copy and all(re.fullmatch(f"{_QUOTED}(?:\t{_QUOTED})*", line) for line in marked)
    table = csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_MINIMAL if is_copy else csv.QUOTE_NONE)
    rows = []
    for number, fields in enumerate(table, start=2):
        if len(fields) != len(_HEADER):
            raise ConfigError(f"{path}, line {number}: {len(fields)} fields: needed are {len(_HEADER)}")
        if not re.fullmatch(r"-?\d+", fields[0]):
            raise ConfigError(f"{path}, line {number}: the label is {fields[0]!r}: needed is 0 or 1")
        # A tab cannot be in a field of this corpus: one in quotes is a comma that was taken for a separator.
        first, second = (field.replace("\t", ",") for field in fields[3:])
        rows.append((first, second, int(fields[0])))
    return rows


_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 pads, 257 separates two sentences, 258 ends a text or pair."""

    name, vocabulary = "bytes", 259
    pad, separator, end = 256, 257, 258
    pair_context = 384  # 99.3 % of MRPC's pairs fit; half of them take 234 or less

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]:
        """Sentence, separator, sentence, end. Where that is too long, the longer sentence is cut first."""
        if context < 4:
            raise ConfigError(f"context is {context}: a pair needs at least 4")
        room = context - 2
        pairs = []
        for one, two in zip(first, second, strict=True):
            left, right = self.encode(one.encode()), self.encode(two.encode())
            kept = min(len(left), max(room // 2, room - len(right)))
            pairs.append(np.concatenate([left[:kept], [self.separator], right[: room - kept], [self.end]]))
        return pairs


class FolderTokenizer(ByteTokenizer):
    """A tokenizer that a model came with. Nothing is fetched."""

    pair_context = 128

    def __init__(self, folder: str) -> None:
        try:
            self._own: Any = import_hf("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises errors of every type
            raise ConfigError(f"{folder}: no tokenizer that transformers can load ({shorten_error(error)})") from error
        self.name, self.vocabulary = Path(folder).name, len(self._own)
        self.end = next((i for i in (self._own.eos_token_id, self._own.sep_token_id) if i is not None), 0)
        self.pad = self._own.pad_token_id if self._own.pad_token_id is not None else self.end

    def encode(self, text: bytes) -> Ids:
        return np.array(self._own(text.decode(), add_special_tokens=False)["input_ids"], np.int32)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]:
        rows = self._own(list(first), list(second), truncation=True, max_length=context)["input_ids"]
        return [np.array(row, np.int32) for row in rows]


def load_tokenizer(choice: str, model_folder: str | None) -> ByteTokenizer:
    """`bytes`, a folder's, or for `auto` that of the model's folder where it has one, else bytes."""
    if choice == "auto" and model_folder and any((Path(model_folder) / file).is_file() for file in _FILES):
        choice = model_folder
    return ByteTokenizer() if choice in ("auto", "bytes") else FolderTokenizer(choice)


def load_text(files: Sequence[Path], split: str, tokenizer: ByteTokenizer, context: int) -> Ids:
    """The concatenated ids of a split, with the end id after each file; at least context + 1 of them. The last tenth of
    each file, by bytes, is the test split: a folder's files may differ, and both splits see all."""
    parts: list[Ids] = []
    for file in files:
        with _refuse_unreadable(file, "UTF-8 text", UnicodeDecodeError):
            text = file.read_bytes()
            cut = len(text) * 9 // 10
            while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character
                cut += 1
            ids = tokenizer.encode(text[:cut] if split == "train" else text[cut:])
        parts.append(np.append(ids, np.int32(tokenizer.end)))
    stream = np.concatenate(parts)
    if len(stream) < context + 1:
        found = f"{files[0] if len(files) == 1 else files[0].parent}: {len(stream)} tokens in the {split} split"
        raise ConfigError(f"{found}: needed are at least {context + 1}: give more text, or a smaller context")
    return stream
