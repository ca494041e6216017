"""Plain text for language models, cut into blocks of ids. What an id means is in `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError
from paceline.workloads.data.checks import told_of_trouble
from paceline.workloads.data.tokenizers import Ids, Tokenizer

__all__ = ["load_text"]


def load_text(files: Sequence[Path], split: str, tokenizer: Tokenizer, context: int) -> Ids:
    """The ids of a split in a row, each file ended by the end's id; at least context + 1 of them.

    The last tenth of each file, by bytes, is the test split: a folder's files may differ, and both splits see all.
    """
    parts: list[Ids] = []
    for file in files:
        with told_of_trouble(file, "UTF-8 text", UnicodeDecodeError):
            text = file.read_bytes()
            cut = len(text) * 9 // 10
            while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character
                cut += 1
            ids = tokenizer.encode(text[:cut] if split == "train" else text[cut:])
        parts.append(np.append(ids, np.int32(tokenizer.end)))
    stream = np.concatenate(parts)
    if len(stream) < context + 1:
        raise ConfigError(
            f"{files[0] if len(files) == 1 else files[0].parent}: {len(stream)} tokens in the {split} split: "
            f"needed are at least {context + 1} for a context of {context}: give more text, or a smaller context"
        )
    return stream
