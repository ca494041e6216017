"""The ranks of one host: who they are, and memory that only they share.

It is an anonymous file, which the first rank creates and the others open through /proc. It goes with the last of them,
however that ends, and does not count against /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline import machine
from paceline.errors import CollectiveError, LaunchError

_PAGE = mmap.PAGESIZE
# Linux: have part of a mapping in memory now, and get an error where there is none instead of being killed later.
_POPULATE_WRITE, _HUGE_PAGES = 23, 14


def exchange_places(store: dist.Store, rank: int, size: int) -> list[dict[str, Any]]:
    """Every rank's host, process, cores and requested lanes, in rank order. Collective: every rank must call this."""
    # To share memory, ranks need one kernel, one user, and namespaces in which they find each other.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = " ".join([boot, str(os.geteuid()), *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))])
    place = {"host": host, "pid": os.getpid(), "cores": machine.count_cores()}
    store.set(f"place/{rank}", json.dumps(place | {"lanes": os.environ.get("PACELINE_LANES", "")}))
    return [json.loads(store.get(f"place/{other}")) for other in range(size)]


def pass_by_store(store: dist.Store, key: str, first: int, timeout_s: float, path: str) -> str:
    """The first rank's path, on the other ranks of its host; `first` is its name in errors."""
    if path:
        store.set(key, path)
        return path
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise LaunchError(f"rank {first} did not share its memory within {timeout_s:g} s", code="timeout") from error
    return store.get(key).decode()


class Mapping:
    """Memory with a part of whole pages for each of the ranks on a host, all zero; `index` counts them.

    Collective. `pass_path` takes the first rank's path, and "" on the others, and returns the first rank's on all; the
    first must keep its mapping until the others have theirs. The memory lives as long as this or a tensor in it.
    """

    def __init__(self, index: int, names: list[int], part_bytes: int, pass_path: Callable[[str], str]) -> None:
        self.part_bytes = max(_PAGE, -(-part_bytes // _PAGE) * _PAGE)
        self.num_bytes = total = self.part_bytes * len(names)
        if index == 0:
            descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        else:
            path = pass_path("")
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError as error:
                text = f"rank {names[0]} left while memory was being shared, or this process may not open {path}"
                raise CollectiveError(f"{text}: {error.strerror}", code="peer-lost") from error
        weakref.finalize(self, os.close, descriptor)
        if index == 0:
            os.ftruncate(descriptor, total)
            pass_path(f"/proc/{os.readlink('/proc/self')}/fd/{descriptor}")  # as /proc counts, whatever its namespace
        elif (found := os.fstat(descriptor).st_size) != total:
            sizes = f"rank {names[0]} {found} bytes, rank {names[index]} {total}"
            raise CollectiveError(f"ranks share memory of different sizes: {sizes}", code="mismatch")
        self._memory = mmap.mmap(descriptor, total)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._advise(0, total, _HUGE_PAGES)
        # Now and not in the first step; and too little memory is an error here.
        self.populate(index * self.part_bytes, self.part_bytes)

    def part(self, index: int) -> Any:
        """The bytes of a rank, as an object that keeps the memory and can be watched."""
        return (ctypes.c_char * self.part_bytes).from_buffer(self._memory, index * self.part_bytes)

    def populate(self, begin: int, num_bytes: int) -> None:
        """Have these bytes in memory, near this rank if they are not in memory yet."""
        if self._advise(begin, num_bytes, _POPULATE_WRITE) in (errno.ENOMEM, errno.EFAULT):
            raise CollectiveError(f"there is no memory for {num_bytes} bytes of shared buffers", code="memory")

    def _advise(self, begin: int, num_bytes: int, advice: int) -> int:
        """The result of madvise: 0, or an error number. Older kernels know fewer kinds of advice."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return ctypes.get_errno() if libc.madvise(self.address + begin, num_bytes, advice) else 0
