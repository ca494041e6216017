"""A nested state as flat tensors and a structure of plain JSON, and back, exactly. Files do not belong here.

Nothing is pickled: a state holds data and can run nothing when it is read.
"""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ConfigError, RecordError

__all__ = ["pack_state", "unpack_state"]

# A one-key object with one of these stands for what JSON lacks. A dict with a key that begins with "$" is written as
# pairs, so a state cannot be mistaken for one.
_TENSOR, _DICT, _TUPLE, _FLOAT = "$tensor", "$dict", "$tuple", "$float"
_MAX_DEPTH = 100  # far above any real state; ends a dict that holds itself
_MAX_INT_BITS = 8192  # Python refuses to print integers that are much larger
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def pack_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a state under flat names, and the rest as a structure that `json` can write.

    Takes dicts (keys: strings and integers), lists, tuples, tensors, int, float, bool, str and None, of exactly these
    types; an OrderedDict comes back as a dict. Tensors are not copied.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _pack(state, (), tensors)
    return tensors, structure


def unpack_state(tensors: Mapping[str, torch.Tensor], structure: Any) -> Any:
    """The state that `pack_state` took apart; RecordError where the structure is not one of its making."""
    try:
        return _unpack(structure, tensors)
    except (KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
        raise RecordError(f"the structure of the state is wrong: {type(error).__name__} {error}") from None


def _pack(value: Any, path: tuple[str | int, ...], tensors: dict[str, torch.Tensor]) -> Any:
    kind = type(value)
    if len(path) > _MAX_DEPTH:
        raise ConfigError(
            f"the state at {_name(path[:4])}... is nested more than {_MAX_DEPTH} deep: it may hold itself"
        )
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MAX_INT_BITS):
        return value
    if kind is float:
        # json prints the shortest digits that read back to the same bits, but has no word for inf and nan.
        return value if math.isfinite(value) else {_FLOAT: struct.pack(">d", value).hex()}
    if kind is list:
        return [_pack(item, (*path, number), tensors) for number, item in enumerate(value)]
    if kind is tuple:
        return {_TUPLE: [_pack(item, (*path, number), tensors) for number, item in enumerate(value)]}
    if kind in (dict, collections.OrderedDict):
        for key in value:
            if type(key) not in (str, int):
                raise ConfigError(
                    f"the state at {_name(path)} has the key {key!r}, {_type(key)}: use strings or integers"
                )
        pairs = [(key, _pack(item, (*path, key), tensors)) for key, item in value.items()]
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {_DICT: [list(pair) for pair in pairs]}
    if kind in _TENSOR_TYPES and value.layout is torch.strided and not value.is_quantized and not value.is_meta:
        key = ".".join(map(str, path)) or "state"
        while key in tensors:  # {"a.b": x, "a": {"b": y}}
            key += "'"
        tensors[key] = value.detach()
        return {_TENSOR: key}
    raise ConfigError(
        f"the state at {_name(path)} is {_type(value)}: a checkpoint holds dense tensors, int, float, bool, str, None, "
        "and dicts, lists and tuples of these; convert it"
    )


def _unpack(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(structure, list):
        return [_unpack(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    tag = next(iter(structure), "")
    if not tag.startswith("$"):
        return {key: _unpack(item, tensors) for key, item in structure.items()}
    ((tag, content),) = structure.items()
    if tag == _TENSOR:
        return tensors[content]
    if tag == _FLOAT:
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == _TUPLE:
        return tuple(_unpack(item, tensors) for item in content)
    if tag == _DICT:
        return {key: _unpack(item, tensors) for key, item in content}
    raise ValueError(f"unknown tag {tag!r}")


def _name(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{part!r}]" for part in path) or "its top"


def _type(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"a tensor ({name}, {value.layout}, {value.dtype}, on {value.device})"
    return f"an integer of {value.bit_length()} bits" if kind is int else f"of type {name}"
