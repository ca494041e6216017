"""The compiled core by its C interface: loading it, and a group of ranks in memory that is already shared.

Tensors and torch do not belong here (`group`), neither does who shares memory with whom (`shared`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import CollectiveError, ConfigError

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER = range(5)
F32, F64, BF16, F16, I32, I64, BYTES = range(7)
SUM, AVG, MIN, MAX = range(4)
ITEM_BYTES = {F32: 4, F64: 8, BF16: 2, F16: 2, I32: 4, I64: 8, BYTES: 1}
OK, DEAD, STOPPED, LEFT, TIMEOUT, MISMATCH, CLOSED, BAD, FORKED, RUNNING = range(10)

# An operation: kind, type, reduction, root, addresses of input and output, number of elements.
Operation = tuple[int, int, int, int, int, int, int]

SOURCES = Path(__file__).parent / "native"
# No contraction of products and sums: every kind of processor must round alike.
COMPILE_FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-pthread"]
COMPILE_FLAGS += ["-fvisibility=hidden"]  # only what the header declares is exported
_VERSION = 3  # PLN_VERSION in the header


_ERROR_CODES = {
    DEAD: "peer-lost", STOPPED: "peer-lost", LEFT: "peer-lost", TIMEOUT: "timeout", MISMATCH: "mismatch",
}  # fmt: skip


class TransportError(CollectiveError, RuntimeError):
    """A group in shared memory that can be used no more; a `RuntimeError` too, as torch's own backends raise."""


def find_library() -> Path | None:
    """The compiled core beside this module, if it was built for this machine."""
    override = os.environ.get("PACELINE_NATIVE_LIBRARY")
    if override:
        return Path(override)
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return path
    return None


def build_library(target: Path | None = None, flags: Sequence[str] = (), compiler: str | None = None) -> Path:
    """Compile the core; by default where `find_library` looks, as `pip install` does."""
    compiler = compiler or os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ConfigError("no C compiler (cc, gcc or clang) is here: the shared-memory transport cannot be built")
    target = target or Path(__file__).with_name(f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    command = [*compiler.split(), *COMPILE_FLAGS, *flags, "-shared", *sources, "-o", str(draft)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the shared-memory transport does not compile: {done.stderr.strip() or done.stdout.strip()}")
    draft.replace(target)
    return target


@functools.cache
def load_library() -> ctypes.CDLL:
    """The core, with its functions typed; `ConfigError` where it cannot be had. Calls release the GIL."""
    reason = why_not()
    if reason:
        raise ConfigError(f"the shared-memory transport is not available: {reason}")
    library = ctypes.CDLL(str(find_library()))
    pointer, number, size, seconds = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_double
    operation = [pointer, number, number, number, number, pointer, pointer, size, seconds]
    types: dict[str, tuple[Any, list[Any]]] = {
        "pln_segment_bytes": (size, [number, size]),
        "pln_open": (pointer, [pointer, size, number, number, pointer, pointer, seconds, seconds]),
        "pln_close": (None, [pointer]),
        "pln_free": (None, [pointer]),
        "pln_add_arena": (number, [pointer, number, pointer, size]),
        "pln_remove_arena": (number, [pointer, number]),
        "pln_submit": (ctypes.c_int64, operation),
        "pln_run": (number, operation),
        "pln_wait": (number, [pointer, ctypes.c_int64, seconds]),
        "pln_is_done": (number, [pointer, ctypes.c_int64]),
        "pln_break_too": (None, [pointer, pointer]),
        "pln_explain": (None, [pointer, ctypes.c_char_p, ctypes.c_size_t]),
        "pln_reduce": (None, [number, number, pointer, number, pointer, number, ctypes.c_size_t, number]),
        "pln_cpu": (ctypes.c_char_p, []),
        "pln_use_cpu": (number, [ctypes.c_char_p]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def why_not() -> str:
    """Why ranks on this machine cannot share memory; empty if they can."""
    if platform.system() != "Linux" or not hasattr(os, "memfd_create"):
        return "it needs Linux with memfd_create"
    path = find_library()
    if path is None:
        return "its C core is not built: install Paceline again where a C compiler is"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"its C core does not load: {error}"
    if not hasattr(library, "pln_version") or library.pln_version() != _VERSION:
        return f"its C core ({path}) was built from other sources: install Paceline again"
    return ""


class Segment(Protocol):
    """Memory that stays mapped as long as this object."""

    address: int


class NativeGroup:
    """Ranks that share a segment, which must stay until `close`, and what operations are on until they are over.

    The C side lives as long as this object and not only until `close`: another thread may be inside a call.
    """

    def __init__(
        self,
        segment: Segment,
        slot_bytes: int,
        rank: int,
        names: Sequence[int],
        pids: Sequence[int],
        timeout_s: float,
        stopped_s: float,
    ) -> None:
        self._handle: int | None = None
        self._library, size = load_library(), len(names)
        c_names, c_pids = (ctypes.c_int32 * size)(*names), (ctypes.c_int64 * size)(*pids)
        handle = self._library.pln_open(segment.address, slot_bytes, rank, size, c_names, c_pids, timeout_s, stopped_s)
        if not handle:
            raise ConfigError(f"{size} ranks cannot share one segment")
        self._handle, self._segment = handle, segment
        # Bound once: a small message takes a few microseconds.
        self._run, self._submit, self._wait = self._library.pln_run, self._library.pln_submit, self._library.pln_wait

    def run(self, operation: Operation, timeout_s: float = 0.0) -> None:
        """One operation, from its beginning to its end. A time limit of 0 is the group's."""
        code = self._run(self._handle, *operation, timeout_s)
        if code:
            raise self._explain(code)

    def submit(self, operation: Operation, timeout_s: float = 0.0) -> int:
        """Start an operation behind those before it; its ticket."""
        ticket: int = self._submit(self._handle, *operation, timeout_s)
        if ticket < 0:
            raise self._explain(-ticket)
        return ticket

    def wait(self, ticket: int, timeout_s: float | None = None) -> None:
        """Wait for a ticket; `TransportError` if it failed, or if it takes longer than `timeout_s`."""
        code = self._wait(self._handle, ticket, -1.0 if timeout_s is None else timeout_s)
        if code:
            if code == RUNNING:
                raise TransportError(f"an operation in shared memory took longer than {timeout_s:g} s", code="timeout")
            raise self._explain(code)

    def is_done(self, ticket: int) -> bool:
        return bool(self._library.pln_is_done(self._handle, ticket))

    def add_arena(self, serial: int, address: int, part_bytes: int) -> bool:
        return bool(self._library.pln_add_arena(self._handle, serial, address, part_bytes) == OK)

    def remove_arena(self, serial: int) -> None:
        self._library.pln_remove_arena(self._handle, serial)

    def fail_like(self, other: NativeGroup) -> None:
        """Fail this group for the reason for which another one failed, if it did."""
        self._library.pln_break_too(self._handle, other._handle)

    def close(self) -> None:
        """Leave the group; what still runs or waits here, on any thread, ends with an error."""
        self._library.pln_close(self._handle)

    def __del__(self) -> None:
        if self._handle:
            self._library.pln_free(self._handle)

    def _explain(self, code: int) -> TransportError:
        if code == FORKED:
            return TransportError(
                "this process was forked from a rank, and the rank's process group is not its own: "
                "start processes with `spawn`, or open a group here",
                code="forked",
            )
        if code == CLOSED:
            return TransportError("the process group is closed", code="closed")
        if code == BAD:
            return TransportError("the shared-memory transport does not support this operation", code="invalid")
        text = ctypes.create_string_buffer(512)
        self._library.pln_explain(self._handle, text, len(text))
        return TransportError(f"a collective in shared memory failed: {text.value.decode()}", code=_ERROR_CODES[code])
