"""Encodes messages between ranks, and checkpoint state, as JSON and tensors, which cannot run code when loaded.

`pack` turns plain values and tensors into a structure that `json` can write. Messages add arrays, sets, and Paceline's
own records and errors. Nothing from another rank is unpickled.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import functools
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
import torch.distributed as dist

from paceline.errors import CollectiveError, ConfigError, LaunchError, PacelineError

# Tags for values that JSON lacks, each written as an object with the tag as its only key. A dict that itself has a key
# starting with "$" is written as pairs, so it cannot be mistaken for a tag. Checkpoints on disk contain these four.
_TENSOR, _DICT, _TUPLE, _FLOAT = "$tensor", "$dict", "$tuple", "$float"
_PLAIN = (bool, int, str, type(None))
_MOST_LEVELS = 100  # far deeper than real values
_HEAD = struct.Struct("<QQ")  # bytes of the tensor list and of the structure
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, struct.error)
# Returns the tag and content for a value of a type unknown to `pack`; None if the type is not supported.
Extend = Callable[[Any], tuple[str, Any] | None]


class NotPlainError(ConfigError):
    """A value cannot be packed."""


# -- structures --------------------------------------------------------------------------------------------------------


def pack(value: Any, tensors: dict[str, torch.Tensor], path: tuple[Any, ...] = (), extend: Extend | None = None) -> Any:
    """Turn a value into a structure that `json` can write. Tensors go into `tensors` under flat names, without a copy.

    Accepts dicts (keys: strings and integers), lists, tuples, tensors, int, float, bool, str and None, but not
    subclasses, and values for which `extend` returns a tag; an OrderedDict comes back as a dict. Any other value raises
    NotPlainError, which names it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        # json writes the shortest digits that round-trip exactly, but cannot represent inf and nan.
        return value if math.isfinite(value) else {_FLOAT: struct.pack(">d", value).hex()}
    if len(path) > _MOST_LEVELS:
        place = _name_place(path)[:60]
        raise NotPlainError(f"{place}... is nested more than {_MOST_LEVELS} levels deep: it may contain itself")
    if kind in (list, tuple):
        items = [pack(item, tensors, (*path, number), extend) for number, item in enumerate(value)]
        return items if kind is list else {_TUPLE: items}
    if kind in (dict, collections.OrderedDict):
        odd = [key for key in value if type(key) not in (str, int)]
        if odd and extend is None:
            found = f"{_name_place(path)} has the key {odd[0]!r} of type {type(odd[0]).__name__}"
            raise NotPlainError(f"{found}: use str or int")
        pairs = [[pack(part, tensors, (*path, key), extend) for part in (key, item)] for key, item in value.items()]
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if is_plain else {_DICT: pairs}
    is_tensor = kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if is_tensor and value.layout is torch.strided and not value.is_meta:
        place = _name_place(path)
        while place in tensors:  # {"a.b": x, "a": {"b": y}}
            place += "'"
        tensors[place] = value.detach()
        return {_TENSOR: place}
    if extend is not None and (described := extend(value)) is not None:
        tag, content = described
        packed = pack(content, tensors, (*path, tag), extend)
        return {tag: packed} if tag else packed
    found = f"a tensor ({value.layout}, on {value.device})" if is_tensor else f"of type {kind.__name__}"
    kinds = "dense tensors, int, float, bool, str, None, and dicts, lists and tuples of these"
    if extend is not None:
        kinds += ", or bytes, complex, sets, paths, dtypes, and NumPy's numbers and arrays"
    raise NotPlainError(f"{_name_place(path)} is {found}, which cannot be saved or sent to other ranks: use {kinds}")


def _name_place(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)) or "the value"


def unpack(
    structure: Any, tensors: Mapping[str, torch.Tensor], build: Mapping[str, Callable[[Any], Any]] | None = None
) -> Any:
    """The inverse of `pack`. `build` maps each tag from `extend` to a function of its content. Raises one of
    `_INVALID`."""
    if isinstance(structure, list):
        return [unpack(item, tensors, build) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if not next(iter(structure), "").startswith("$"):
        return {key: unpack(item, tensors, build) for key, item in structure.items()}
    ((tag, content),) = structure.items()
    if tag == _TENSOR:
        return tensors[content]
    if tag == _FLOAT:
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == _TUPLE:
        return tuple(unpack(item, tensors, build) for item in content)
    if tag == _DICT:
        return {unpack(key, tensors, build): unpack(item, tensors, build) for key, item in content}
    if build is None or tag not in build:
        raise ValueError(f"unknown tag {tag!r}")
    return build[tag](unpack(content, tensors, build))


# -- messages ----------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """A value as bytes; NotPlainError names the type that cannot be sent."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(value, tensors, extend=_describe)).encode()
    entries, blocks = [], []
    for name, tensor in tensors.items():
        flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        entries.append([name, _name_dtype(tensor.dtype), list(tensor.shape)])
        blocks.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    listed = json.dumps(entries).encode()
    return b"".join([_HEAD.pack(len(listed), len(text)), listed, text, *blocks])


def decode(data: bytes) -> Any:
    """The value that was passed to `encode`; CollectiveError for malformed bytes."""
    try:
        listed_bytes, text_bytes = _HEAD.unpack_from(data)
        at = _HEAD.size + listed_bytes
        entries, text = json.loads(data[_HEAD.size : at].decode()), data[at : at + text_bytes].decode()
        at += text_bytes
        tensors = {}
        for name, dtype_name, shape in entries:
            dtype = _read_dtype(dtype_name)
            block = bytearray(data[at : at + math.prod(shape) * dtype.itemsize])
            at += len(block)
            flat = torch.frombuffer(block, dtype=dtype) if block else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
        if at != len(data):
            raise ValueError(f"{len(data)} bytes instead of {at}")
        return unpack(json.loads(text), tensors, _BUILD)
    except _INVALID as error:
        raise CollectiveError(f"malformed message from another rank: {error}", code="message") from None


def _describe(value: Any) -> tuple[str, Any] | None:
    """The tag and content of a value that only messages support. If the tag is empty, the content replaces the
    value."""
    kind = type(value)
    if kind is torch.Size:
        return "", tuple(value)
    if isinstance(value, dict):  # a subclass
        return "", dict(value)
    if kind in (set, frozenset):
        return f"${kind.__name__}", list(value)
    if kind in (bytes, bytearray):
        return "$bytes", base64.b64encode(value).decode()
    if kind is torch.dtype:
        return "$dtype", _name_dtype(value)
    if kind is complex:
        return "$complex", [value.real, value.imag]
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf" and value.dtype.char != "g":
        return "", value.item()
    if kind is numpy.ndarray and value.dtype.kind in "biufc" and value.dtype.char not in "gG":
        return "$array", torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, PurePath):
        return "$path", str(value)
    if isinstance(value, functools.partial) and _is_ours(value.func) and not value.args:
        return "$partial", [_name(value.func), dict(value.keywords)]
    if _is_ours(kind):
        if isinstance(value, enum.Enum):
            return "$enum", [_name(kind), value.name]
        if isinstance(value, PacelineError):
            more = (value.rank, value.rank_traceback) if isinstance(value, LaunchError) else (None, "")
            return "$error", [_name(kind), str(value), value.code, *more, list(getattr(value, "__notes__", []))]
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else kind._fields
        return "$record", [_name(kind), {name: getattr(value, name) for name in names}]
    for plain in (str, int, float):  # subclasses, such as numpy's or an enum's
        if isinstance(value, plain):
            return "", plain(value)
    return None


def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def _build_record(name: str, fields: dict[str, Any]) -> Any:
    cls = _find(name)
    if not dataclasses.is_dataclass(cls):
        return cls(**fields)
    known = dataclasses.fields(cls)
    made: Any = _find(name)(**{field.name: fields[field.name] for field in known if field.init})
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


_BUILD: dict[str, Callable[[Any], Any]] = {
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$array": lambda tensor: tensor.numpy(),
    "$dtype": _read_dtype,
    "$complex": lambda parts: complex(*parts),
    "$path": Path,
    "$partial": lambda parts: functools.partial(_find(parts[0]), **parts[1]),
    "$enum": lambda parts: _find(parts[0])[parts[1]],
    "$error": lambda parts: _build_error(*parts),
    "$record": lambda parts: _build_record(*parts),
}


def _is_ours(cls: Any) -> bool:
    """Whether a class is a Paceline record, enum or error: constructing one does not run code from the sender."""
    if not isinstance(cls, type) or cls.__module__.partition(".")[0] != "paceline":
        return False
    is_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_tuple or dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum | PacelineError)


def _name(cls: Any) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> Any:
    """A Paceline class by name. Imports nothing, because all ranks have already imported the classes that they
    exchange."""
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
    rows = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(rows, mine, group=group)
    return _decode_rows(rows, sizes)


def gather(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """`share`, but only the first rank of the group gets the values; the others get an empty list. Collective."""
    mine, sizes = _announce(value, group, device)
    rows = [torch.empty_like(mine) for _ in sizes] if group.rank() == 0 else []
    dist.gather(mine, rows or None, group=group, group_dst=0)
    return _decode_rows(rows, sizes)


def _announce(value: Any, group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The encoded value, padded to the size of the longest, and all sizes. If a value cannot be sent, every rank raises
    an error."""
    problem = ""
    try:
        mine = encode(value)
    except NotPlainError as error:
        mine, problem = b"", str(error)
    own = torch.tensor([len(mine)], device=device)
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everyone, own, group=group)
    sizes = [int(size) for size in everyone]
    if problem:
        raise NotPlainError(problem)
    if 0 in sizes:
        text = f"rank {sizes.index(0)} of the group has a value that cannot be sent"
        raise CollectiveError(text, code="message")
    padded = numpy.zeros(max(sizes), numpy.uint8)
    padded[: len(mine)] = numpy.frombuffer(mine, numpy.uint8)
    return torch.from_numpy(padded).to(device), sizes


def _decode_rows(rows: list[torch.Tensor], sizes: list[int]) -> list[Any]:
    return [decode(row[:size].cpu().numpy().tobytes()) for row, size in zip(rows, sizes, strict=False)]
