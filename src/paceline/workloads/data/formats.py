"""Readers for data files in their published formats (idx, CIFAR-10 batches, parquet, MRPC, text), and tokenizers."""

import gzip
import io
import pickle
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, refuse
from paceline.workloads.data import BATCHES, import_hf, shorten_error

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Images = tuple[Bytes, Labels]
NUM_CLASSES = 10  # in every image data set


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    """Parse a file, gzipped or plain. Errors include the path and have the code `data-file`."""
    try:
        content = path.read_bytes()
        return parse(gzip.decompress(content) if path.suffix == ".gz" else content)
    except Exception as error:  # pickle, Pillow and Arrow raise errors of any type on damaged bytes
        found = str(error)
        if not isinstance(error, ConfigError):
            found = f"cannot be read ({type(error).__name__}: {shorten_error(error)})"
        raise ConfigError(f"{path}: {found}: check the file, or download it again", code="data-file") from error


def _check_labels(labels: Labels, num_classes: int, num_samples: int) -> None:
    if num_samples == 0 or labels.shape != (num_samples,):
        raise ConfigError(f"{len(labels)} labels for {num_samples} samples")
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= num_classes))):
        raise ConfigError(f"label {labels[wrong[0]]} in row {wrong[0]}, but the classes are 0 to {num_classes - 1}")


def load_images(layout: str, files: Sequence[Path], split: str, channels: int, limit: int | None) -> Images:
    """Load images (n, channels, height, width) and their labels. `limit` only avoids needless decoding: the result may
    have more images."""
    if layout == "idx":
        pixels = _read(files[0], partial(_parse_idx, 3))[:, None]
        return pixels, _read(files[1], partial(_parse_idx_labels, len(pixels)))
    if layout == "tar":
        parts = _read(files[0], partial(_parse_archive, split))
    elif layout == "parquet":
        parts = [_read(file, partial(_parse_pictures, channels, limit)) for file in files]
    else:
        parts = [_read(file, _parse_batch) for file in files]
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _parse_idx(num_dims: int, content: bytes) -> Bytes:
    magic = bytes([0, 0, 8, num_dims])
    if content[:4] != magic:
        raise ConfigError(f"magic number {content[:4].hex() or 'missing'} instead of {magic.hex()}")
    start = 4 + 4 * num_dims
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _parse_idx_labels(num_samples: int, content: bytes) -> Labels:
    labels = _parse_idx(1, content).astype(np.int64)
    _check_labels(labels, NUM_CLASSES, num_samples)
    return labels


_RECONSTRUCT = np.empty(0).__reduce__()[0]
_ALLOWED: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,  # numpy 1
    "numpy._core.multiarray._reconstruct": _RECONSTRUCT,  # numpy 2
}


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; rejects every other name before importing it."""

    def find_class(self, module: str, name: str) -> Any:
        if (wanted := f"{module}.{name}") not in _ALLOWED:
            raise ConfigError(f"refused: the pickle loads {wanted}, but a batch needs only numpy arrays")
        return _ALLOWED[wanted]


def _parse_batch(content: bytes) -> Images:
    """Parse one CIFAR-10 batch, a Python 2 pickle with bytes as keys."""
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    images = np.asarray(batch[b"data"]).astype(np.uint8, casting="safe").reshape(-1, 3, 32, 32)
    labels = np.asarray(batch[b"labels"], np.int64)
    _check_labels(labels, NUM_CLASSES, len(images))
    return images, labels


def _parse_archive(split: str, content: bytes) -> list[Images]:
    """Parse the batches in cifar-10-python.tar.gz, without extracting it to disk."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        found = [file.read() for name in BATCHES[split] if (file := files.get(name))]
    if len(found) < len(BATCHES[split]):
        raise ConfigError(f"contains {', '.join(files)}, but must contain {', '.join(BATCHES[split])}")
    return [_parse_batch(batch) for batch in found]


def _parse_columns(names: Sequence[str], limit: int | None, content: bytes) -> list[list[Any]]:
    """Parse the first `limit` values of these columns of a parquet file."""
    from pyarrow import BufferReader, parquet

    table = parquet.ParquetFile(BufferReader(content)).read(columns=list(names)).slice(0, limit)
    if empty := [name for name in names if table[name].null_count]:
        raise ConfigError(f"column {empty[0]} has empty cells")
    return [table[name].to_pylist() for name in names]


def _parse_pictures(channels: int, limit: int | None, content: bytes) -> Images:
    from PIL import Image

    column, mode = ("image", "L") if channels == 1 else ("img", "RGB")
    cells, classes = _parse_columns((column, "label"), limit, content)
    pictures = [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert(mode)) for cell in cells]
    images = np.stack(pictures)
    labels = np.array(classes, np.int64)
    _check_labels(labels, NUM_CLASSES, len(images))
    return images.reshape(*images.shape[:3], channels).transpose(0, 3, 1, 2), labels


_HEADER = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
Pairs = tuple[list[str], list[str], Labels]


def load_pairs(layout: str, files: Sequence[Path], limit: int | None) -> Pairs:
    """Load first sentences, second sentences and labels of the first `limit` pairs; label 1 is a paraphrase."""
    parse = _parse_tsv if layout == "tsv" else partial(_parse_columns, ("sentence1", "sentence2", "label"), limit)
    return _read(files[0], lambda content: _check_pairs(*parse(content), limit=limit))


def _parse_tsv(content: bytes) -> list[list[Any]]:
    """Parse the columns of an MRPC file, in which quotes are part of the text."""
    text = content.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n")
    header, *rows = [line.split("\t") for line in text.split("\n")]
    if header != _HEADER:
        raise ConfigError(f"the header is {header} instead of {_HEADER}")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(_HEADER):
            raise ConfigError(f"line {number} has {len(row)} fields instead of {len(_HEADER)}")
    return [[row[3] for row in rows], [row[4] for row in rows], [int(row[0]) for row in rows]]


def _check_pairs(first: list[str], second: list[str], classes: list[int], *, limit: int | None) -> Pairs:
    labels = np.array(classes, np.int64)
    _check_labels(labels, 2, len(first))
    return first[:limit], second[:limit], labels[:limit]


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class ByteTokenizer:
    """A tokenizer for UTF-8 bytes (ids 0 to 255); 256 is padding, 257 separates sentences, 258 ends a text or pair."""

    name, vocabulary = "bytes", 259
    pad, separator, end = 256, 257, 258
    pair_context = 384  # 99.3 % of the MRPC pairs fit; the median is 234

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]:
        """Encode pairs as sentence, separator, sentence, end. Truncates the longer sentence first."""
        refuse((context < 4, f"--context {context}: a pair of sentences needs at least 4"))
        room = context - 2
        pairs = []
        for one, two in zip(first, second, strict=True):
            left, right = self.encode(one.encode()), self.encode(two.encode())
            kept = min(len(left), max(room // 2, room - len(right)))
            pairs.append(np.concatenate([left[:kept], [self.separator], right[: room - kept], [self.end]]))
        return pairs


class FolderTokenizer(ByteTokenizer):
    """A model's own tokenizer, loaded from its folder without any download."""

    pair_context = 128

    def __init__(self, folder: str) -> None:
        try:
            self._own: Any = import_hf("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises errors of any type
            text = f"transformers cannot load the tokenizer in {folder} ({shorten_error(error)}): use --tokenizer bytes"
            raise ConfigError(text, code="tokenizer") from error
        self.name = Path(folder).name
        self.vocabulary = len(self._own)
        self.end = next((i for i in (self._own.eos_token_id, self._own.sep_token_id) if i is not None), 0)
        self.pad = self._own.pad_token_id if self._own.pad_token_id is not None else self.end

    def encode(self, text: bytes) -> Ids:
        return np.array(self._own(text.decode(), add_special_tokens=False)["input_ids"], np.int32)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]:
        rows = self._own(list(first), list(second), truncation=True, max_length=context)["input_ids"]
        return [np.array(row, np.int32) for row in rows]


def load_tokenizer(choice: str, model_folder: str | None) -> ByteTokenizer:
    """Load the tokenizer for `bytes`, a folder, or `auto`: the model's own if its folder has one, else bytes."""
    if choice == "auto" and model_folder and any((Path(model_folder) / file).is_file() for file in _TOKENIZERS):
        choice = model_folder
    return ByteTokenizer() if choice in ("auto", "bytes") else FolderTokenizer(choice)


def load_text(files: Sequence[Path], split: str, tokenizer: ByteTokenizer, context: int) -> Ids:
    """Load the concatenated ids of a split, with the end id after each file; requires at least context + 1 ids.

    The last tenth of each file is the test split, so both splits include every file.
    """

    def encode(text: bytes) -> Ids:
        cut = len(text) * 9 // 10
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # do not split a UTF-8 character
            cut += 1
        return np.append(tokenizer.encode(text[:cut] if split == "train" else text[cut:]), np.int32(tokenizer.end))

    stream = np.concatenate([_read(file, encode) for file in files])
    if len(stream) < context + 1:
        place = files[0] if len(files) == 1 else files[0].parent
        found = f"{place}: the {split} split has {len(stream)} tokens, and --context {context} needs {context + 1}"
        raise ConfigError(f"{found}: add text, or use a smaller context", code="data-file")
    return stream
