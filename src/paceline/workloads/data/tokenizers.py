"""Text to ids: bytes, or a Hugging Face tokenizer from a local folder. Reading the text does not belong here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.workloads.data.checks import brief

__all__ = ["ByteTokenizer", "FolderTokenizer", "Ids", "Tokenizer", "load_tokenizer"]

Ids = npt.NDArray[np.int32]
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Tokenizer(Protocol):
    """`pair_context` is a length that nearly all pairs of sentences of MRPC fit in."""

    name: str
    vocabulary: int
    pad: int
    end: int
    pair_context: int

    def encode(self, text: bytes) -> Ids: ...

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]: ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 pads, 257 stands between two sentences, 258 ends a text or pair."""

    name = "bytes"
    vocabulary = 259
    pad, separator, end = 256, 257, 258
    # 99.3 % of MRPC's pairs fit; half of them take 234 or less.
    pair_context = 384

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


class FolderTokenizer:
    """A tokenizer that a model came with. Nothing is fetched."""

    pair_context = 128

    def __init__(self, folder: str) -> None:
        if find_spec("transformers") is None:
            raise ConfigError(f"the tokenizer in {folder} needs transformers: install paceline[hf], or use bytes")
        from transformers import AutoTokenizer

        try:
            self._own: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises of every kind
            raise ConfigError(f"{folder}: no tokenizer that transformers can load ({brief(error)})") from error
        self.name = Path(folder).name
        self.vocabulary = len(self._own)
        self.end = next((i for i in (self._own.eos_token_id, self._own.sep_token_id) if i is not None), 0)
        self.pad = self._own.pad_token_id if self._own.pad_token_id is not None else self.end

    def encode(self, text: bytes) -> Ids:
        return np.array(self._own(text.decode(), add_special_tokens=False)["input_ids"], np.int32)

    def encode_pairs(self, first: Sequence[str], second: Sequence[str], context: int) -> list[Ids]:
        rows = self._own(list(first), list(second), truncation=True, max_length=context)["input_ids"]
        return [np.array(row, np.int32) for row in rows]


def load_tokenizer(choice: str, model_folder: str | None) -> Tokenizer:
    """`bytes`, a folder's, or for `auto` that of the model's folder where it has one, else bytes."""
    if choice == "auto" and model_folder and any((Path(model_folder) / file).is_file() for file in _FILES):
        choice = model_folder
    return ByteTokenizer() if choice in ("auto", "bytes") else FolderTokenizer(choice)
