"""Files of tensors in the safetensors format: filled into one reusable host buffer, read with every offset checked.

The file is laid out here, not by the safetensors package, because that one makes a second copy in memory. Which
tensors a file holds does not belong here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError, RecordError

__all__ = ["TensorBuffer", "load_tensors"]

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_METADATA = "__metadata__"
_PAGE_BYTES = 4096


class TensorBuffer:
    """A whole file in host memory, allocated once and filled again and again; pinned where tensors come from a GPU.

    After `fill`, `view` is the bytes of the file. Copies from a GPU may still be under way: `synchronize` waits.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._events: list[torch.cuda.Event] = []

    def fill(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> memoryview:
        """Copy the tensors; the bytes of the file, valid until the next `fill`.

        A copy from a GPU is queued on its current stream, so work that is queued there later cannot change it.
        """
        # Large elements first, as the format's own writer does: then every tensor is aligned.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header, num_bytes = _render_header({name: tensors[name] for name in order}, metadata)
        on_gpu = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        total_bytes = len(header) + num_bytes
        if self._buffer.numel() < total_bytes + _PAGE_BYTES or (on_gpu and not self._buffer.is_pinned()):
            self._buffer = torch.empty(total_bytes + _PAGE_BYTES, dtype=torch.uint8, pin_memory=bool(on_gpu))
        # From the start of a page on: only then can it be written past the page cache.
        first = -self._buffer.data_ptr() % _PAGE_BYTES
        file = self._buffer[first : first + total_bytes]
        view = file.numpy().data
        view[: len(header)] = header
        start = len(header)
        with torch.no_grad():
            for name in order:
                tensor = tensors[name]
                end = start + tensor.numel() * tensor.element_size()
                file[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
                start = end
        self._events = [_record_event(device) for device in on_gpu]
        return view

    def synchronize(self) -> None:
        """Wait until the bytes of the last `fill` are there."""
        for event in self._events:
            event.synchronize()


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)  # sleeps while it waits, so that the core stays with the training
    event.record(torch.cuda.current_stream(device))
    return event


def _render_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """The start of the file, padded to a multiple of 8 bytes, and how many bytes of tensors follow it."""
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or name == _METADATA:
            raise ConfigError(
                f"tensor {name!r} of {tensor.dtype} cannot be saved: safetensors knows {', '.join(map(str, _NAMES))}, "
                f"and takes any name but {_METADATA}"
            )
        end = start + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, start


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU, each with memory of its own.

    RecordError where the header does not describe exactly the bytes that follow it; nothing large is allocated before
    that is known.
    """
    try:
        with path.open("rb") as file:
            layout = _load_layout(file, path.stat().st_size)
            tensors = {}
            for name, (dtype, shape) in layout.items():
                tensor = torch.empty(shape, dtype=dtype)
                view = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
                if view and file.readinto(view) != len(view):
                    raise RecordError(f"the file ends inside tensor {name!r}")
                tensors[name] = tensor
            return tensors
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None
    except (RecordError, ValueError, RecursionError) as error:
        raise RecordError(f"{path.name} is not a sound safetensors file: {error}") from None


def _load_layout(file: BufferedReader, num_bytes: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Type and shape of each tensor in the order of the data; leaves the file at its first byte."""
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    data_bytes = num_bytes - _LENGTH_BYTES - header_bytes
    if data_bytes < 0 or header_bytes > _MAX_HEADER_BYTES:
        raise RecordError(f"it says that its header has {header_bytes} bytes, and the file has {num_bytes}")
    entries = json.loads(file.read(header_bytes), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise RecordError("its header is no JSON object")
    entries.pop(_METADATA, None)
    found: list[tuple[int, int, str, torch.dtype, list[int]]] = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
                pass
            case _:
                raise RecordError(f"its header has no type, shape and offsets for tensor {name!r}")
        if dtype not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
            raise RecordError(f"tensor {name!r} has the type {dtype!r} and the shape {shape}")
        if end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise RecordError(f"tensor {name!r} of {dtype} {shape} has the offsets {start} to {end}")
        found.append((start, end, name, _DTYPES[dtype], shape))
    found.sort(key=lambda entry: entry[:2])
    at = 0
    for start, end, name, *_ in found:  # one after the other: no tensor overlaps another, and no byte is unseen
        if start != at:
            raise RecordError(f"tensor {name!r} starts at byte {start} of the data, and the one before it ends at {at}")
        at = end
    if at != data_bytes:
        raise RecordError(f"its tensors end at byte {at} of the data, and there are {data_bytes}")
    return {name: (dtype, shape) for _, _, name, dtype, shape in found}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise RecordError("a name occurs twice in its header")
    return found
