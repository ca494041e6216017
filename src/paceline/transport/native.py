"""Bindings to the C core: loading it, memory shared by the ranks of one host, and their group in that memory.

The memory is an anonymous file of the first rank, which the others open through /proc. It is freed with the last rank,
however that rank ends, and does not count against /dev/shm.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import CollectiveError, ConfigError, LaunchError

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER = range(5)
F32, F64, BF16, F16, I32, I64, BYTES = range(7)
SUM, AVG, MIN, MAX, ROUNDED = range(5)
ITEM_BYTES = {F32: 4, F64: 8, BF16: 2, F16: 2, I32: 4, I64: 8, BYTES: 1}
OK, DEAD, STOPPED, LEFT, TIMEOUT, MISMATCH, CLOSED, BAD, FORKED, RUNNING = range(10)

_PAGE = mmap.PAGESIZE
# madvise on Linux: allocate part of a mapping now, and fail if memory is short, rather than be killed later.
_POPULATE_WRITE, _HUGE_PAGES = 23, 14
# Shorter pieces do not pay off: waking another thread costs tens of microseconds.
_LANE_BYTES, _LINE_BYTES = 512 << 10, 128

# Collective, dtype, reduction, root, input address, output address, number of elements.
Operation = tuple[int, int, int, int, int, int, int]
# Each lane that an operation uses, and the operation's number in it.
Ticket = list[tuple[int, int]]

_VERSION = 6  # PLN_VERSION in the header
_FORKED = "this process was forked from a rank and cannot use the rank's group: start it with `spawn`"
# The code of each failure, and its text if the core provides none.
_ERRORS = {
    DEAD: ("peer-lost", ""), STOPPED: ("peer-lost", ""), LEFT: ("peer-lost", ""), TIMEOUT: ("timeout", ""),
    MISMATCH: ("mismatch", ""), CLOSED: ("closed", "the process group is closed"), FORKED: ("forked", _FORKED),
    BAD: ("invalid", "the shared-memory transport does not support this operation"),
}  # fmt: skip


class TransportError(CollectiveError):
    """A shared-memory group that can no longer be used. Also a `RuntimeError`, like the errors of torch's backends."""


def find_library() -> Path | None:
    """The path of the compiled core, if it exists."""
    if override := os.environ.get("PACELINE_NATIVE_LIBRARY"):
        return Path(override)
    path = Path(__file__).with_name("_native.so")
    return path if path.exists() else None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The core with typed functions; `ConfigError` if it is not available. Calls release the GIL."""
    if reason := why_not():
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
        "pln_quantize": (None, [pointer, pointer, pointer, pointer, number, number, size, pointer]),
        "pln_average_quantized": (None, [pointer, number, number, size, pointer, pointer, pointer, number, size]),
        "pln_dequantize": (number, [pointer, number, size, pointer, pointer, number]),
        "pln_to_bf16": (None, [pointer, ctypes.c_float, size, pointer]),
        "pln_select": (size, [pointer, pointer, pointer, size, ctypes.c_float, pointer, size]),
        "pln_subtract_product": (None, [pointer, pointer, pointer, size, size, number, pointer]),
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
        return "its C core is not built: install a Paceline wheel, or reinstall it on a machine with a C compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"its C core does not load: {error}"
    if not hasattr(library, "pln_version") or library.pln_version() != _VERSION:
        return f"its C core ({path}) was built from other sources: reinstall Paceline"
    return ""


def choose_lanes(cores: Sequence[int], requested: str = "") -> int:
    """The lanes of a host's ranks: PACELINE_LANES of the first rank, else one, or more if there are spare cores."""
    if not requested:
        return max(1, min(4, min(cores) // len(cores)))
    if requested not in map(str, range(1, 17)):
        raise ConfigError(f"PACELINE_LANES={requested!r}: use a number from 1 to 16")
    return int(requested)


class Mapping:
    """Zeroed memory with a page-aligned part for each rank of a host; `index` is the index of this rank's part.

    Collective. `pass_name` gets the first rank's text (the others pass "") and returns it on all ranks. The memory
    lives as long as this object or a tensor in it. Keep this object until every rank has one.
    """

    def __init__(
        self, index: int, names: list[int], pids: list[int], part_bytes: int, pass_name: Callable[[str], str]
    ) -> None:
        self.part_bytes = max(_PAGE, -(-part_bytes // _PAGE) * _PAGE)
        self.num_bytes = total = self.part_bytes * len(names)
        if index == 0:
            descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        else:
            descriptor = _open_file(names[0], pids[0], pass_name(""))
        weakref.finalize(self, os.close, descriptor)
        if index == 0:
            os.ftruncate(descriptor, total)
            pass_name(str(descriptor))
        elif (found := os.fstat(descriptor).st_size) != total:
            sizes = f"rank {names[0]} {found} bytes, rank {names[index]} {total}"
            raise CollectiveError(f"ranks share memory of different sizes: {sizes}", code="mismatch")
        self._memory = mmap.mmap(descriptor, total)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._advise(0, total, _HUGE_PAGES)
        # Allocate now rather than in the first step, so that a lack of memory is an error here.
        self.populate(index * self.part_bytes, self.part_bytes)

    def part(self, index: int) -> Any:
        """A rank's bytes, as an object that keeps the memory alive and can be finalized."""
        return (ctypes.c_char * self.part_bytes).from_buffer(self._memory, index * self.part_bytes)

    def populate(self, begin: int, num_bytes: int) -> None:
        """Allocate these bytes, near this rank unless they are already allocated."""
        if self._advise(begin, num_bytes, _POPULATE_WRITE) in (errno.ENOMEM, errno.EFAULT):
            raise CollectiveError(f"not enough memory for {num_bytes} bytes of shared buffers", code="memory")

    def _advise(self, begin: int, num_bytes: int, advice: int) -> int:
        """The result of madvise: 0 or an error number. Older kernels do not support every kind of advice."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return ctypes.get_errno() if libc.madvise(self.address + begin, num_bytes, advice) else 0


def _open_file(name: int, pid: int, descriptor: str) -> int:
    """Open the first rank's file, which the kernel allows only to processes of the same user."""
    try:
        found = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"rank {name} left, or did not share its memory: {error}", code="peer-lost") from error
    if os.fstat(found).st_uid != os.geteuid():  # root can open any file
        os.close(found)
        raise LaunchError(f"rank {name} belongs to another user and cannot share memory with this one", code="stranger")
    return found


def check_alive(name: int, pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            return
    raise LaunchError(f"rank {name} left while memory was being shared", code="peer-lost")


class Lanes:
    """Ranks that share memory, in one or more parallel groups of the core, each with its own segment.

    A single core mostly waits for memory. If a host has more cores than ranks, a long vector is cut into pieces, each
    handled by its own group and thread. The result does not depend on the split: every element is summed in rank order.
    The C objects live as long as this one, not just until `close`, because another thread may be inside a call.
    """

    def __init__(
        self, segments: list[Mapping], slot_bytes: int, rank: int, names: list[int], pids: list[int], *limits_s: float
    ) -> None:
        self._handles: list[int] = []
        self._library, self._segments, size = load_library(), segments, len(names)
        c_names, c_pids = (ctypes.c_int32 * size)(*names), (ctypes.c_int64 * size)(*pids)
        for segment in segments:
            handle = self._library.pln_open(segment.address, slot_bytes, rank, size, c_names, c_pids, *limits_s)
            if not handle:
                raise ConfigError(f"{size} ranks cannot share one segment")
            self._handles.append(handle)
        self._first, *self._others = self._handles
        # Looked up once, because a small message takes only a few microseconds.
        self._run, self._submit, self._wait = self._library.pln_run, self._library.pln_submit, self._library.pln_wait

    @property
    def first(self) -> tuple[int, Any]:
        """The lane for small operations, and the function that runs one there (`pln_run`)."""
        return self._first, self._run

    def build_error(self, code: int) -> TransportError:
        """The error for an operation that used only the first lane."""
        return self._fail(self._first, code, [])

    def run(self, operation: Operation, timeout_s: float = 0.0) -> None:
        """Run one operation to completion. A timeout of 0 means the group's own."""
        ticket: Ticket = []
        if self._others:
            operation, *others = self._cut(operation)
            ticket = self._submit_all(self._others, others, timeout_s) if others else []
        code = self._run(self._first, *operation, timeout_s)
        if code:
            raise self._fail(self._first, code, ticket)
        if ticket:
            self.wait(ticket)

    def submit(self, operation: Operation, timeout_s: float = 0.0) -> Ticket:
        """Queue an operation."""
        pieces = self._cut(operation) if self._others else [operation]
        return self._submit_all(self._handles, pieces, timeout_s)

    def _submit_all(self, handles: Sequence[int], pieces: Sequence[Operation], timeout_s: float) -> Ticket:
        ticket: Ticket = []
        for handle, piece in zip(handles, pieces, strict=False):
            number = self._submit(handle, *piece, timeout_s)
            if number < 0:
                raise self._fail(handle, -number, ticket)
            ticket.append((handle, number))
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Wait for a ticket. After an error other than a timeout of this call, no part of the operation is still
        running in any lane."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for handle, number in ticket:
            code = self._wait(handle, number, -1.0 if deadline is None else max(1e-6, deadline - time.monotonic()))
            if code == RUNNING:
                raise TransportError(f"an operation in shared memory took longer than {timeout_s:g} s", code="timeout")
            if code:
                raise self._fail(handle, code, ticket)

    def is_done(self, ticket: Ticket) -> bool:
        return all([self._library.pln_is_done(handle, number) for handle, number in ticket])

    def try_finish(self, ticket: Ticket) -> bool:
        """Whether an operation has ended. Finishes it here if that requires no waiting."""
        return all([self._wait(handle, number, 0.0) != RUNNING for handle, number in ticket])

    def add_arena(self, serial: int, address: int, part_bytes: int) -> bool:
        return all([self._library.pln_add_arena(handle, serial, address, part_bytes) == OK for handle in self._handles])

    def remove_arena(self, serial: int) -> None:
        for handle in self._handles:
            self._library.pln_remove_arena(handle, serial)

    def close(self) -> None:
        """Leave the group. Operations in progress, on any thread, end with an error."""
        for handle in self._handles:
            self._library.pln_close(handle)

    def __del__(self) -> None:
        for handle in self._handles:
            self._library.pln_free(handle)

    def _cut(self, operation: Operation) -> list[Operation]:
        """Cut a long all-reduce into one piece per lane; anything else stays whole."""
        kind, dtype, op, root, source, target, count = operation
        item = ITEM_BYTES[dtype]
        if kind != ALL_REDUCE or count * item < 2 * _LANE_BYTES:
            return [operation]
        number = min(len(self._handles), count * item // _LANE_BYTES)
        line = _LINE_BYTES // item
        each = -(-count // (number * line)) * line
        pieces = [(at, min(each, count - at)) for at in range(0, count, each)]
        return [(kind, dtype, op, root, source + at * item, target + at * item, length) for at, length in pieces]

    def _fail(self, handle: int, code: int, ticket: Ticket) -> TransportError:
        """Make the other lanes fail as well, so that no lane writes to memory that the caller may free."""
        short, text = _ERRORS[code]
        if not text:
            buffer = ctypes.create_string_buffer(512)
            self._library.pln_explain(handle, buffer, len(buffer))
            text = f"a collective in shared memory failed: {buffer.value.decode()}"
        for failed in self._handles:
            for other in self._handles:
                self._library.pln_break_too(other, failed)
        for other, number in ticket:
            self._wait(other, number, -1.0)
        return TransportError(text, code=short)
