"""Messages between ranks other than gradients: values as JSON and bytes, which cannot run code when they are decoded.

Supports plain values, tensors, arrays, and Paceline's own records and errors; nothing from another rank is unpickled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
import torch.distributed as dist

from paceline.errors import CollectiveError, ConfigError, LaunchError, PacelineError

_TAG = "$"  # key of JSON objects that encode types JSON lacks
_HEAD = struct.Struct("<QQ")  # size of the JSON in bytes, and number of blocks that follow
_BLOCK = struct.Struct("<Q")
_PLAIN = (bool, int, float, str, type(None))
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, struct.error)


class NotPlainError(ConfigError):
    """A value cannot be sent to other ranks."""


def encode(value: Any) -> bytes:
    """A value as bytes; NotPlainError names the type that cannot be sent."""
    blocks: list[bytes] = []
    try:
        text = json.dumps(_pack(value, blocks)).encode()
    except RecursionError:
        raise NotPlainError("a value that contains itself or is nested too deeply cannot be sent to ranks") from None
    parts = [_HEAD.pack(len(text), len(blocks)), text]
    for block in blocks:
        parts += [_BLOCK.pack(len(block)), block]
    return b"".join(parts)


def decode(data: bytes) -> Any:
    """The value that was passed to `encode`; CollectiveError for malformed bytes."""
    try:
        length, count = _HEAD.unpack_from(data)
        at = _HEAD.size + length
        blocks = []
        for _ in range(count):
            (size,) = _BLOCK.unpack_from(data, at)
            at += _BLOCK.size + size
            blocks.append(data[at - size : at])
        if at != len(data):
            raise ValueError(f"{len(data)} bytes instead of {at}")
        text = data[_HEAD.size : _HEAD.size + length].decode()
        return json.loads(text, object_hook=functools.partial(_unpack, blocks))
    except _INVALID as error:
        raise CollectiveError(f"malformed message from another rank: {error}", code="message") from None


def _pack(value: Any, blocks: list[bytes]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [item if type(item) in _PLAIN else _pack(item, blocks) for item in value]
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: item if type(item) in _PLAIN else _pack(item, blocks) for key, item in value.items()}
    name, content = _describe(value)
    if name in ("bytes", "tensor", "array"):
        blocks.append(content.pop())
        content.append(len(blocks) - 1)
    return {_TAG: name, "of": _pack(content, blocks)}


def _describe(value: Any) -> tuple[str, list[Any]]:
    """The tag of a value, and its content."""
    kind = type(value)
    if kind in (tuple, torch.Size):
        return "tuple", list(value)
    if isinstance(value, dict):  # with other keys, or an OrderedDict
        return "dict", [part for pair in value.items() for part in pair]
    if kind in (set, frozenset):
        return kind.__name__, list(value)
    if kind in (bytes, bytearray):
        return "bytes", [bytes(value)]
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.layout is torch.strided:
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return "tensor", [str(value.dtype).removeprefix("torch."), list(value.shape), content]
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return "number", [value.item()]
    if kind is numpy.ndarray and value.dtype.kind in "biufc":
        return "array", [value.dtype.str, list(value.shape), numpy.ascontiguousarray(value).tobytes()]
    if kind is torch.dtype:
        return "dtype", [str(value).removeprefix("torch.")]
    if kind is complex:
        return "complex", [value.real, value.imag]
    if isinstance(value, PurePath):
        return "path", [str(value)]
    if isinstance(value, functools.partial) and _is_ours(value.func) and not value.args:
        return "partial", [_name(value.func), dict(value.keywords)]
    if _is_ours(kind):
        if isinstance(value, enum.Enum):
            return "enum", [_name(kind), value.name]
        if isinstance(value, PacelineError):
            more = (value.rank, value.rank_traceback) if isinstance(value, LaunchError) else (None, "")
            return "error", [_name(kind), str(value), value.code, *more, list(getattr(value, "__notes__", []))]
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return "record", [_name(kind), {field.name: getattr(value, field.name) for field in fields}]
        return "record", [_name(kind), dict(zip(value._fields, value, strict=True))]
    for plain in (str, int, float):  # subclasses, such as numpy's or an enum's
        if isinstance(value, plain):
            return "number", [plain(value)]
    kinds = "numbers, text, bytes, tensors, arrays, and lists, tuples, sets and dicts of these"
    raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks: use {kinds}")


def _unpack(blocks: list[bytes], found: dict[str, Any]) -> Any:
    if _TAG not in found:
        return found
    build: Callable[..., Any] = _BUILD[found[_TAG]]
    content = found["of"]
    if found[_TAG] in ("bytes", "tensor", "array"):
        content[-1] = blocks[content[-1]]
    return build(*content)


def _build_tensor(dtype: str, shape: list[int], content: bytes) -> torch.Tensor:
    flat = torch.empty(len(content), dtype=torch.uint8)
    if content:
        flat.numpy()[:] = numpy.frombuffer(content, numpy.uint8)
    return flat.view(_read_dtype(dtype)).reshape(shape)


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def _build_array(dtype: str, shape: list[int], content: bytes) -> numpy.ndarray[Any, Any]:
    kind = numpy.dtype(dtype)
    if kind.kind not in "biufc":
        raise TypeError(f"{dtype!r} is not a numeric type")
    return numpy.frombuffer(content, kind).reshape(shape).copy()


def _build_record(name: str, fields: dict[str, Any]) -> Any:
    cls: Any = _find(name)
    if not dataclasses.is_dataclass(cls):
        return cls(**fields)
    known = dataclasses.fields(cls)
    made = _find(name)(**{field.name: fields[field.name] for field in known if field.init})
    for field in known:
        if not field.init:
            object.__setattr__(made, field.name, fields[field.name])
    return made


def _build_error(name: str, text: str, code: str, rank: int | None, trace: str, notes: list[str]) -> PacelineError:
    cls = _find(name)
    error: PacelineError = cls.__new__(cls, text)
    Exception.__init__(error, text)
    error.code = code
    if isinstance(error, LaunchError):
        error.rank, error.rank_traceback = rank, trace
    for note in notes:
        error.add_note(str(note))
    return error


_BUILD: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "dict": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "bytes": lambda content: content,
    "tensor": _build_tensor,
    "number": lambda value: value,
    "array": _build_array,
    "dtype": _read_dtype,
    "complex": complex,
    "path": Path,
    "partial": lambda name, keywords: functools.partial(_find(name), **keywords),
    "enum": lambda name, member: _find(name)[member],
    "error": _build_error,
    "record": _build_record,
}


def _is_ours(cls: Any) -> bool:
    """Whether a class is a record, enum or error of Paceline: building one does not run code from the sender."""
    if not isinstance(cls, type) or cls.__module__.partition(".")[0] != "paceline":
        return False
    is_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_tuple or dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum | PacelineError)


def _name(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    """A Paceline class by name. Imports nothing: all ranks have already imported what they exchange."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module] if module.partition(".")[0] == "paceline" else None
    for part in path.split("."):
        found = vars(found)[part]
    if not _is_ours(found):
        raise TypeError(f"{name} is not a Paceline record")
    return found


def share(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order. Collective: every rank of the group must call this."""
    mine, sizes = _announce(value, group, device)
    everyone = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(everyone, _pad(mine, max(sizes), device), group=group)
    return [decode(row[:size].cpu().numpy().tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def gather(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Every rank's value on the first rank of the group, and an empty list elsewhere. Collective: every rank of the
    group must call this."""
    mine, sizes = _announce(value, group, device)
    rows = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes] if group.rank() == 0 else None
    dist.gather(_pad(mine, max(sizes), device), rows, group=group, group_dst=0)
    return [decode(row[:size].cpu().numpy().tobytes()) for row, size in zip(rows or [], sizes, strict=False)]


def _announce(value: Any, group: dist.ProcessGroup, device: torch.device) -> tuple[bytes, list[int]]:
    """The encoded value, and the size on each rank. A value that cannot be sent is an error on every rank."""
    problem = ""
    try:
        mine = encode(value)
    except NotPlainError as error:
        mine, problem = b"", str(error)
    own = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(sizes, own, group=group)
    counts = [int(size) for size in sizes]
    if problem:
        raise NotPlainError(problem)
    if bad := [rank for rank, count in enumerate(counts) if count <= 0]:
        raise CollectiveError(f"rank {bad[0]} of the group has a value that cannot be sent", code="message")
    return mine, counts


def _pad(mine: bytes, size: int, device: torch.device) -> torch.Tensor:
    padded = numpy.zeros(size, numpy.uint8)
    padded[: len(mine)] = numpy.frombuffer(mine, numpy.uint8)
    return torch.from_numpy(padded).to(device)
