"""Folders that appear whole or not at all, with a manifest by which any changed bit is found.

What the files mean does not belong here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError

__all__ = ["MANIFEST", "remove_folder", "remove_leftovers", "save_folder", "verify_folder"]

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "paceline-checkpoint", 1
_SAVING, _REMOVING = ".saving-", ".removing-"
_CHUNK_BYTES = 2**22
_SUM = b', "crc32": "'


def save_folder(path: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Write the files and their manifest as a new folder; one of that name goes once the new one is complete.

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
    """Compare the named files with the folder's manifest, which must know just these; RecordError says what differs."""
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
            raise RecordError(f"{name} has another checksum than its manifest")


def remove_folder(path: Path) -> None:
    """Remove a folder so that it is never seen half removed."""
    doomed = path.with_name(_REMOVING + path.name)
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what an interrupted process left in a folder that nobody else writes to."""
    for path in parent.glob(".*"):
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, data: bytes | memoryview) -> str:
    """Write and fsync a new file; its checksum.

    Large ones go past the page cache where the file system can: copying 90 MB into it takes 30 to 120 ms of a core, and
    writing them from where they lie takes 6.
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
    """Have writes pass by the page cache; False where that cannot be."""
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
            raise RecordError(f"{MANIFEST} has another checksum than it says")
        document = json.loads(content)
        if document["format"] == _FORMAT and document["version"] != _VERSION:
            # Not damaged: passing over it to an older one would lose what a newer Paceline trained.
            raise ConfigError(
                f"{path.parent} has version {document['version']!r} and this Paceline reads version {_VERSION}: "
                "use the Paceline that wrote it, or choose another folder"
            )
        files: dict[str, Any] = document["files"]
        return {name: {"bytes": int(sums["bytes"]), "crc32": str(sums["crc32"])} for name, sums in files.items()}
    except OSError as error:
        raise RecordError(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ConfigError, RecordError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RecordError(f"{MANIFEST} is not a manifest: {type(error).__name__} {error}") from None
