"""Checkpoints on disk: nested state as JSON and safetensors, in atomically written, verified folders."""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from paceline.errors import ConfigError, RecordError
from paceline.records.store import write_new
from paceline.runtime.ranks.messages import pack, unpack
from paceline.units import format_bytes

# Errors raised by malformed files or structures, but not when out of memory (RuntimeError, MemoryError).
_INVALID = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError, struct.error)

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64,
    "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_PAGE_BYTES = 4096


class TensorBuffer:
    """A buffer in host memory for a complete file, allocated once and reused; pinned if tensors come from a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def fill(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> memoryview:
        """Copy the tensors and return the file's bytes, valid until the next `fill`.

        GPU copies are queued on the current stream, so later work on it cannot change them. All CUDA tensors must be on
        the current device.
        """
        entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
        num_bytes = 0
        # Largest element size first, as in the safetensors library: this aligns every tensor.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        for name in order:
            tensor, start = tensors[name], num_bytes
            if name == _METADATA:
                raise ConfigError(f"a tensor cannot be saved as {name!r}: the name is reserved, choose another")
            if tensor.dtype not in _NAMES:
                raise ConfigError(f"tensor {name!r} of {tensor.dtype} cannot be saved: use one of {', '.join(_DTYPES)}")
            num_bytes += tensor.nbytes
            place = [start, num_bytes]
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        num_bytes += len(header)
        if self._buffer.numel() < num_bytes + _PAGE_BYTES or (on_gpu and not self._buffer.is_pinned()):
            self._buffer = torch.empty(num_bytes + _PAGE_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        # Start at a page boundary, which direct I/O requires.
        first = -self._buffer.data_ptr() % _PAGE_BYTES
        file = self._buffer[first : first + num_bytes]
        view = file.numpy().data
        view[: len(header)] = header
        for name in order:
            tensor = tensors[name].detach()
            start, end = (len(header) + offset for offset in entries[name]["data_offsets"])
            file[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=tensor.is_cuda)
        return view


def load_tensors(file: BinaryIO) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file; raises one of `_INVALID` if its header does not match its bytes.

    Each tensor gets its own, aligned memory: torch crashes on an unaligned random state.
    """
    header_bytes = int.from_bytes(file.read(8), "little")
    data_bytes = os.fstat(file.fileno()).st_size - 8 - header_bytes
    if data_bytes < 0:
        raise ValueError(f"its header claims {header_bytes} bytes")
    entries = json.loads(file.read(header_bytes))
    entries.pop(_METADATA, None)
    tensors, at = {}, 0
    # Tensors must be contiguous: no overlaps and no unused bytes.
    for name, entry in sorted(entries.items(), key=lambda item: cast(Any, item[1]["data_offsets"])):
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        start, at = at, at + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [start, at] or at > data_bytes or min(shape, default=0) < 0:
            raise ValueError(f"{entry} of tensor {name!r} at byte {start} of {data_bytes}")
        tensors[name] = torch.empty(shape, dtype=dtype)
        if at > start:
            cast(Any, file).readinto(tensors[name].view(-1).view(torch.uint8).numpy().data)
    if at != data_bytes:
        raise ValueError(f"its tensors end at byte {at} of {data_bytes} data bytes")
    return tensors


def _split_tied(model_state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the state without aliases of tied tensors and a map from each alias to its tensor's first name."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for name, tensor in model_state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name!r} in the model's state is a {type(tensor).__name__}: it must be a tensor")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in names:
            aliases[name] = names[place]
        else:
            names[place], kept[name] = name, tensor
    return kept, aliases


def fingerprint(model_state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Dtype and shape of each tensor by name: equal for models that can load each other's weights."""
    return {name: f"{x.dtype} {list(x.shape)}".removeprefix("torch.") for name, x in model_state.items()}


def check_fingerprint(found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """Reject another model's weights; the error lists the first differences."""
    odd = [
        f"{name} is {found.get(name, 'missing')} and should be {expected.get(name, 'absent')}"
        for name in dict.fromkeys((*expected, *found))
        if found.get(name) != expected.get(name)
    ]
    if odd:
        some = f"{len(odd)} tensors differ ({', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''})"
        hint = "train the model that it was saved from, or choose another folder"
        raise ConfigError(f"{where} belongs to another model: {some}: {hint}", code="mismatch")


def export_weights(path: Path, model_state: Mapping[str, torch.Tensor]) -> None:
    """Write the weights as one safetensors file; refuses to overwrite.

    Tied tensors are stored once, with their other names in the metadata: `safetensors.torch.load_model` restores them.
    """
    kept, aliases = _split_tied(model_state)
    content = TensorBuffer().fill(kept, {**aliases, "format": "pt"})
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    write_new(path, cast(bytes, content))


MODEL_FILE, TENSORS_FILE, STATE_FILE = "model.safetensors", "state.safetensors", "state.json"
MANIFEST = "manifest.json"
_FORMAT, _VERSION = "paceline-checkpoint", 1
_CHUNK_BYTES = 2**22
_SUM = b', "crc32": "'


def save_folder(path: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Write the files and their manifest into a new folder, which replaces any existing one once it is complete."""
    temporary = path.with_name(f".saving-{path.name}")
    try:
        temporary.mkdir(0o700)
        sums = {name: {"bytes": len(data), "crc32": _write(temporary / name, data)} for name, data in files.items()}
        manifest = json.dumps({"format": _FORMAT, "version": _VERSION, "files": sums})[:-1].encode()
        _write(temporary / MANIFEST, _seal(manifest))
        _sync_folder(temporary)
        _remove_folder(path)
        temporary.rename(path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_folder(path: Path) -> None:
    """Remove a folder, if it exists, without ever exposing a partial one to readers."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path.rename(path.with_name(f".removing-{path.name}")))


def _seal(body: bytes) -> bytes:
    """Complete the manifest by appending its last entry, the checksum of all preceding bytes."""
    return body + _SUM + f'{zlib.crc32(body):08x}"}}\n'.encode()


def _write(path: Path, data: bytes | memoryview) -> str:
    """Write and fsync a new file; return its checksum.

    Large files bypass the page cache where supported: copying 90 MB into it takes 30 to 120 ms of CPU time, but a
    direct write takes 6 ms.
    """
    checksum, view, is_direct = 0, memoryview(data), False
    with path.open("xb", buffering=0) as file:
        if len(view) >= _CHUNK_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # raised if the file system or platform lacks support
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
                is_direct = True
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            checksum = zlib.crc32(chunk, checksum)
            while chunk:  # writes may be short, especially on a nearly full disk
                try:
                    chunk = chunk[file.write(chunk) :]
                except OSError as error:
                    if not is_direct or error.errno != errno.EINVAL:
                        raise
                    # Unaligned data: the end of the file, or the remainder after a short write.
                    is_direct = False
                    fcntl.fcntl(file, fcntl.F_SETFL, 0)
        os.fsync(file.fileno())
    return f"{checksum:08x}"


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in host memory. `refused` lists the reasons for skipping newer checkpoints, newest first."""

    step: int
    model: dict[str, torch.Tensor]
    state: dict[str, Any]
    meta: dict[str, Any]
    path: Path
    refused: list[str] = field(default_factory=list)


def load_checkpoint(path: Path) -> Loaded:
    """Verify all bytes of a checkpoint against its manifest and load it; raises a RecordError if it is damaged."""
    name = MANIFEST  # the current file, for the error message
    try:
        manifest = (path / MANIFEST).read_bytes()
        if manifest != _seal(manifest[: manifest.rfind(_SUM)]):
            raise RecordError("does not match its own checksum")
        document = json.loads(manifest)
        if document["version"] != _VERSION:
            # A ConfigError, not damage: falling back to an older checkpoint would discard newer training.
            text = f"{path} has version {document['version']!r}, but this Paceline reads version {_VERSION}"
            raise ConfigError(f"{text}: use the Paceline version that wrote it, or another folder", code="version")
        files, names = document["files"], (MODEL_FILE, TENSORS_FILE, STATE_FILE)
        if files.keys() != set(names):
            raise RecordError(f"lists {', '.join(files) or 'no files'} but should list {', '.join(names)}")
        contents: dict[str, Any] = {}
        for name in names:
            with (path / name).open("rb") as file:
                checksum = 0
                while chunk := file.read(_CHUNK_BYTES):
                    checksum = zlib.crc32(chunk, checksum)
                found = {"bytes": file.tell(), "crc32": f"{checksum:08x}"}
                if found != files[name]:
                    raise RecordError(f"does not match {MANIFEST}: found {found}, expected {files[name]}")
                file.seek(0)
                contents[name] = json.load(file) if name == STATE_FILE else load_tensors(file)
        saved, tensors, document = contents.values()
        model = {key: saved[document["aliases"].get(key, key)] for key in document["model"]}
        if fingerprint(model) != document["model"]:
            raise RecordError(f"does not describe the tensors in {MODEL_FILE}")
        if path.name.startswith("step-") and path.name != f"step-{document['step']:08}":
            raise RecordError(f"belongs to step {document['step']}")
        state, meta = unpack(document["state"], tensors), unpack(document["meta"], {})
        return Loaded(document["step"], model, state, meta, path)
    except ConfigError:
        raise
    except _INVALID as error:
        reason = str(error) if isinstance(error, RecordError) else f"is not valid: {type(error).__name__} {error}"
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else reason
        raise RecordError(f"checkpoint {path.name} is damaged: {name} {reason}", code="damaged") from None


class CheckpointStore:
    """The checkpoints of one run: `folder/step-00000120/` and so on. Keeps the newest `keep` checkpoints.

    `save` copies the state to host memory and returns; a low-priority thread writes the copy. Only one store may save
    into a folder; any number of stores may load from it.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep
        self._model_buffer, self._state_buffer = TensorBuffer(), TensorBuffer()
        self._writer: tuple[ThreadPoolExecutor, Future[None]] | None = None
        self._refused: set[int] = set()  # steps whose checkpoints are damaged or incomplete
        self.written_s = 0.0  # time of the last completed write, by `time.monotonic`

    def find(self) -> list[int]:
        """Steps of the existing checkpoints, newest first."""
        found = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.glob("step-*/"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def remove_leftovers(self) -> None:
        """Remove the remains of interrupted saves. Call only in the process that saves."""
        self.wait()
        for path in self.folder.glob(".*-step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def save(
        self, step: int, model_state: Mapping[str, torch.Tensor], state: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint of this step; returns once the tensors are copied, or the copies are queued on the GPU.

        Waits for the previous save, and raises its error. See `messages.pack` for valid contents of `state` and `meta`;
        `meta` must not contain tensors.
        """
        self.remove_leftovers()
        later = [there for there in self.find() if there >= step and there not in self._refused]
        if later:
            found = f"{self.folder} already has step {later[0]}, and step {step} is not later"
            raise ConfigError(f"{found}: resume that run, remove its checkpoints, or choose another folder")
        kept, aliases = _split_tied(model_state)
        tensors: dict[str, torch.Tensor] = {}
        document = {
            "step": step,
            "meta": pack(dict(meta), {}),
            "model": fingerprint(model_state),
            "aliases": aliases,
            "state": pack(dict(state), tensors),
        }
        files: dict[str, bytes | memoryview] = {
            STATE_FILE: json.dumps(document, allow_nan=False).encode(),
            MODEL_FILE: self._model_buffer.fill(kept, {**aliases, "format": "pt"}),
            TENSORS_FILE: self._state_buffer.fill(tensors, {}),
        }
        copied = None
        if torch.cuda.is_initialized():
            # A blocking event sleeps while it waits for the copies and leaves the core to training.
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        with _disk_errors(self.path(step), files):
            self._refused.add(step)
            # Executor threads are joined at exit, so even a failing program waits for its checkpoint.
            thread = ThreadPoolExecutor(1, "checkpoint")
            self._writer = thread, thread.submit(self._write, step, files, copied)

    def wait(self) -> None:
        """Wait until the last save is on disk. Raises an error of the save once."""
        if self._writer is not None:
            thread, saving = self._writer
            thread.shutdown()
            self._writer = None
            saving.result()

    def load_latest(self) -> Loaded | None:
        """Load the newest intact checkpoint, or None if there are no checkpoints; RecordError if all are damaged."""
        self.wait()
        refused: list[RecordError] = []
        for step in self.find():
            try:
                loaded = load_checkpoint(self.path(step))
                loaded.refused.extend(f"{error}; using the previous one" for error in refused)
                return loaded
            except RecordError as error:
                refused.append(error)
                self._refused.add(step)
        if refused:
            found = f"none of the {len(refused)} checkpoints in {self.folder} is intact ({refused[0]})"
            raise RecordError(f"{found}: restore one, or remove them to start from the beginning", code="damaged")
        return None

    def _write(self, step: int, files: Mapping[str, bytes | memoryview], copied: torch.cuda.Event | None) -> None:
        if sys.platform == "linux":  # elsewhere priorities apply to whole processes
            with contextlib.suppress(OSError):
                # A niceness of 19 would make writes so slow on busy cores that the next save would have to wait.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        if copied is not None:
            copied.synchronize()
        with _disk_errors(self.path(step), files):
            save_folder(self.path(step), files)
            self.written_s = time.monotonic()
            self._refused.discard(step)
            existing = self.find()
            kept = [step for step in existing if step not in self._refused][: self.keep]
            for old in set(existing) - set(kept):
                _remove_folder(self.path(old))


@contextlib.contextmanager
def _disk_errors(path: Path, files: Mapping[str, bytes | memoryview]) -> Iterator[None]:
    """Check that the files fit on the disk, and turn an OSError into a RecordError with advice."""
    needed_bytes = sum(len(data) for data in files.values()) + _PAGE_BYTES
    free = "an unknown amount"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(path.parent).free
        free = format_bytes(free_bytes)
        if free_bytes < needed_bytes:
            raise OSError(errno.ENOSPC, "the disk is too full")
        yield
    except OSError as error:
        found = f"{error.strerror}; it needs {format_bytes(needed_bytes)} and {free} is free"
        hint = "free some space, keep fewer checkpoints, or choose another folder"
        raise RecordError(f"cannot save checkpoint {path}: {found}: {hint}", code="disk") from None
