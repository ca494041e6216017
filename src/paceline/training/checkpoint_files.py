"""The files of a checkpoint: nested state as tensors and JSON, safetensors, folders that appear whole and verified."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import struct
import zlib
from collections.abc import Collection, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch

from paceline.errors import ConfigError, RecordError
from paceline.records.store import write_new

# A one-key object with one of these represents what JSON lacks. A dict with a key that begins with "$" is written as
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
    """The state that `pack_state` took apart; RecordError where the structure is invalid."""
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
    """A whole file in host memory, allocated once and reused; pinned where tensors come from a GPU.

    Copies from a GPU may still be running after `fill`: `synchronize` waits for them.
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
        raise RecordError(f"{path.name} is not a valid safetensors file: {error}") from None


def _load_layout(file: BufferedReader, num_bytes: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Type and shape of each tensor in the order of the data; leaves the file at its first byte."""
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    data_bytes = num_bytes - _LENGTH_BYTES - header_bytes
    if data_bytes < 0 or header_bytes > _MAX_HEADER_BYTES:
        raise RecordError(f"its header claims {header_bytes} bytes, and the file has {num_bytes}")
    entries = json.loads(file.read(header_bytes), object_pairs_hook=_unique)
    if not isinstance(entries, dict):
        raise RecordError("its header is not a JSON object")
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
    for start, end, name, *_ in found:  # contiguous: no tensor overlaps another, and no byte is unused
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


MANIFEST = "manifest.json"
_FORMAT, _VERSION = "paceline-checkpoint", 1
_SAVING, _REMOVING = ".saving-", ".removing-"
_CHUNK_BYTES = 2**22
_SUM = b', "crc32": "'


def save_folder(path: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Write the files and their manifest as a new folder; it replaces one of that name when it is complete.

    OSError where that fails; then nothing of the new folder is left.
    """
    temporary = path.with_name(_SAVING + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        sums = {name: {"bytes": len(data), "crc32": _write(temporary / name, data)} for name, data in files.items()}
        _write(temporary / MANIFEST, _render_manifest(sums))
        _sync_folder(temporary)
        remove_folder(path)
        temporary.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify_folder(path: Path, names: Collection[str]) -> None:
    """Compare files with the folder's manifest, which must list exactly these; RecordError says what differs."""
    files = _load_manifest(path / MANIFEST)
    if files.keys() != set(names):
        raise RecordError(f"{MANIFEST} lists {', '.join(files) or 'no files'} and should list {', '.join(names)}")
    for name, expected in files.items():
        try:
            num_bytes, checksum = _read_sum(path / name)
        except OSError as error:
            raise RecordError(f"{name} cannot be read: {error.strerror}") from None
        if num_bytes != expected["bytes"]:
            raise RecordError(f"{name} has {num_bytes} bytes and its manifest says {expected['bytes']}")
        if checksum != expected["crc32"]:
            raise RecordError(f"{name} does not match the checksum in {MANIFEST}")


def remove_folder(path: Path) -> None:
    """Remove a folder so that no reader sees it half removed."""
    removed = path.with_name(_REMOVING + path.name)
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what an interrupted process left in a folder that no other process writes to."""
    for path in parent.glob(".*"):
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, data: bytes | memoryview) -> str:
    """Write and fsync a new file; returns its checksum.

    Large files bypass the page cache where the file system supports it: copying 90 MB into it takes 30 to 120 ms of a
    core, and writing them directly takes 6.
    """
    checksum, view = 0, memoryview(data)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        is_direct = len(view) >= _CHUNK_BYTES and _write_direct(handle)
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            while chunk:  # a write may be short, above all on a disk that is nearly full
                try:
                    chunk = chunk[os.write(handle, chunk) :]
                except OSError as error:
                    if not is_direct or error.errno != errno.EINVAL:
                        raise
                    # Not aligned: the end of the file, or what follows a short write.
                    is_direct = False
                    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
        os.fsync(handle)
    finally:
        os.close(handle)
    return f"{checksum:08x}"


def _write_direct(handle: int) -> bool:
    """Let writes bypass the page cache; False where that is not supported."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):  # another file system, or another system
        return False
    return True


def _read_sum(path: Path) -> tuple[int, str]:
    num_bytes = checksum = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return num_bytes, f"{checksum:08x}"


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _render_manifest(sums: Mapping[str, Any]) -> bytes:
    """JSON of which the last entry is the checksum of all bytes before it."""
    body = json.dumps({"format": _FORMAT, "version": _VERSION, "files": sums})[:-1].encode()
    return body + _SUM + f'{zlib.crc32(body):08x}"}}\n'.encode()


def _load_manifest(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        body = content[: content.rfind(_SUM)]
        if content != body + _SUM + f'{zlib.crc32(body):08x}"}}\n'.encode():
            raise RecordError(f"{MANIFEST} does not match its own checksum")
        document = json.loads(content)
        if document["format"] == _FORMAT and document["version"] != _VERSION:
            # Not damaged: falling back to an older one would lose what a newer Paceline trained.
            raise ConfigError(
                f"{path.parent} has version {document['version']!r} and this Paceline reads version {_VERSION}: "
                "use the Paceline that wrote it, or choose another folder",
                code="version",
            )
        files: dict[str, Any] = document["files"]
        return {name: {"bytes": int(sums["bytes"]), "crc32": str(sums["crc32"])} for name, sums in files.items()}
    except OSError as error:
        raise RecordError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ConfigError, RecordError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"{MANIFEST} is not a manifest: {type(error).__name__} {error}") from None


# Prefixes of wrappers for data parallelism and of torch.compile.
_PREFIXES = ("module.", "_orig_mod.")
_SHOWN = 3


def plain_names(model_state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under the names of the bare model. A prefix is removed only where every name has it."""
    state = dict(model_state)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name!r} in the model's state is a {type(tensor).__name__}: weights are tensors")
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), ""):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def split_tied(model_state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state with each tensor once, under its first name, and for each other name of a tensor that first name."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in model_state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in names:
            aliases[name] = names[place]
        else:
            names[place] = name
            kept[name] = tensor
    return kept, aliases


def fingerprint(model_state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Type and shape of each tensor by plain name: equal for models that can take each other's weights."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in plain_names(model_state).items()
    }


def check_fingerprint(found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """Refuse weights of another model; the error names the first differences."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f"{name} is {found[name]} and should be {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    parts = [
        f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
        for what, names in (("missing", missing), ("extra", extra), ("of another type or shape", other))
        if names
    ]
    if parts:
        raise ConfigError(
            f"{where} is of another model: of {len(expected)} tensors {'; '.join(parts)}: "
            "train the model that it was saved from, or choose another folder",
            code="mismatch",
        )


def export_weights(path: str | Path, model_state: Mapping[str, torch.Tensor]) -> None:
    """Write the weights as one safetensors file under plain names; refuses to overwrite.

    A tied tensor is stored once, its other names are in the file's metadata: `safetensors.torch.load_model` ties them.
    """
    path = Path(path)
    if path.exists():  # before the copy; `write_new` checks it only after
        raise RecordError(f"{path} exists and is never overwritten: choose another name")
    kept, aliases = split_tied(plain_names(model_state))
    buffer = TensorBuffer()
    content = buffer.fill(kept, {**aliases, "format": "pt"})
    buffer.synchronize()
    write_new(path, cast(bytes, content))
