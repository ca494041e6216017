"""The ranks of one host: who they are, and memory that only they share.

It is an anonymous file whose descriptor the first rank hands to the others over a Unix socket. It goes with the last of
them, however that ends, and does not count against /dev/shm.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline import machine
from paceline.errors import CollectiveError, LaunchError

_PAGE = mmap.PAGESIZE
# Linux: have part of a mapping in memory now, and get an error where there is none instead of being killed later.
_POPULATE_WRITE, _HUGE_PAGES = 23, 14
_ACCEPTED = b"accepted"


def exchange_places(store: dist.Store, rank: int, size: int) -> list[dict[str, Any]]:
    """Every rank's host, process, cores and requested lanes, in rank order. Collective: every rank must call this."""
    # To share memory, ranks need one kernel, one user, and namespaces in which they find each other.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = " ".join([boot, str(os.geteuid()), *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))])
    place = {"host": host, "pid": os.getpid(), "cores": machine.count_cores()}
    store.set(f"place/{rank}", json.dumps(place | {"lanes": os.environ.get("PACELINE_LANES", "")}))
    return [json.loads(store.get(f"place/{other}")) for other in range(size)]


class Mapping:
    """Shared memory in this process; unmapped when neither it nor a tensor in it is left."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            self.memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.num_bytes = num_bytes

    def part(self, begin: int, num_bytes: int) -> Any:
        """Some of its bytes, as an object that keeps the memory and can be watched."""
        return (ctypes.c_char * num_bytes).from_buffer(self.memory, begin)


class HostGroup:
    """This host's ranks of one group, in the group's order; the first one creates the memory.

    Collective: every rank in `members` must make one, and must call `share` in the same order with the same sizes.
    """

    def __init__(self, store: dist.Store, members: Sequence[int], pids: Sequence[int], rank: int, timeout_s: float):
        self.size, self.index, self.pids = len(members), list(members).index(rank), list(pids)
        self._names, self._timeout_s = list(members), timeout_s
        self._peers: dict[int, socket.socket] = {}
        if self.size > 1:
            try:
                self._connect_all(store, f"host/{members[0]}")
            except BaseException:
                self.close()  # or ranks that are connected would wait until their time is up
                raise

    def share(self, part_bytes: int) -> tuple[Mapping, int]:
        """Memory with a part for each rank, all zero, and the bytes of a part, which are whole pages. Collective."""
        part_bytes = max(_PAGE, -(-part_bytes // _PAGE) * _PAGE)
        total = part_bytes * self.size
        mapping = Mapping(self._exchange(total), total)
        _advise(mapping, 0, total, _HUGE_PAGES)
        # Now and not in the first step; and too little memory is an error here.
        self.populate(mapping, self.index * part_bytes, part_bytes)
        return mapping, part_bytes

    def populate(self, mapping: Mapping, begin: int, num_bytes: int) -> None:
        """Have these bytes in memory, near this rank if they are not in memory yet."""
        if _advise(mapping, begin, num_bytes, _POPULATE_WRITE) in (errno.ENOMEM, errno.EFAULT):
            raise CollectiveError(f"there is no memory for {num_bytes} bytes of shared buffers", code="memory")

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _connect_all(self, store: dist.Store, key: str) -> None:
        """Connect every rank to the first. It accepts only the processes of its peers, and only with the secret."""
        if self.index:
            first = self._names[0]
            try:
                store.wait([key], timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                message = f"rank {first} did not open shared memory within {self._timeout_s:g} s"
                raise LaunchError(message, code="timeout") from error
            address, secret = json.loads(store.get(key))
            link = self._peers[0] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.settimeout(self._timeout_s)
            try:
                link.connect("\0" + address)
                link.sendall(json.dumps([secret, self.index]).encode())
                answer = link.recv(64)
            except OSError as error:
                message = f"rank {first} left, or did not share its memory in time: {error}"
                raise LaunchError(message, code="peer-lost") from error
            if answer != _ACCEPTED:
                raise LaunchError(f"rank {first} refused to share its memory with this process")
            return
        address, secret = f"paceline-{secrets.token_hex(16)}", secrets.token_hex(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + address)
            listener.listen(max(64, self.size))
            store.set(key, json.dumps([address, secret]))
            self._accept_all(listener, secret)
        for link in self._peers.values():
            link.sendall(_ACCEPTED)

    def _accept_all(self, listener: socket.socket, secret: str) -> None:
        """Accept all peers. Other processes, or connections that send nothing, do not hold them up."""
        deadline = time.monotonic() + self._timeout_s
        pending: list[socket.socket] = []  # connected, and yet to send
        try:
            while len(self._peers) < self.size - 1:
                ready = wait([listener, *pending], max(0.0, min(1.0, deadline - time.monotonic())))
                if not ready and time.monotonic() > deadline:
                    missing = self._names[next(i for i in range(1, self.size) if i not in self._peers)]
                    message = f"rank {missing} did not connect to share memory within {self._timeout_s:g} s"
                    raise LaunchError(message, code="timeout")
                for link in [link for link in pending if link in ready]:
                    pending.remove(link)
                    self._admit(link, secret)
                if listener in ready:
                    pending.append(listener.accept()[0])
                    if _pid_of(pending[-1]) not in self.pids:
                        pending.pop().close()
        finally:
            for link in pending:
                link.close()

    def _admit(self, link: socket.socket, secret: str) -> None:
        """Accept a process that has sent its index, if it is that peer."""
        link.settimeout(self._timeout_s)
        try:
            given, index = json.loads(link.recv(256))
            is_peer = 0 < index < self.size and index not in self._peers and _pid_of(link) == self.pids[index]
            is_peer = is_peer and secrets.compare_digest(str(given), secret)
        except (ValueError, TypeError, IndexError, OSError):
            is_peer = False
        if is_peer:
            self._peers[index] = link
        else:
            link.close()

    def _exchange(self, total: int) -> int:
        """The first rank's new anonymous file, as a descriptor of this process."""
        try:
            if self.index:
                message, descriptors, _, _ = socket.recv_fds(self._peers[0], 64, 1, socket.MSG_CMSG_CLOEXEC)
                if not descriptors:
                    raise CollectiveError(f"rank {self._names[0]} left while memory was being shared", code="peer-lost")
                if int(message) != total:
                    os.close(descriptors[0])
                    sizes = f"rank {self._names[0]} {int(message)} bytes, rank {self._names[self.index]} {total}"
                    raise CollectiveError(f"ranks share memory of different sizes: {sizes}", code="mismatch")
                return descriptors[0]
            descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total)
            for link in self._peers.values():
                socket.send_fds(link, [str(total).encode()], [descriptor])
            return descriptor
        except (ConnectionError, TimeoutError) as error:
            text = f"another rank left, or did not answer, while memory was being shared: {error}"
            raise CollectiveError(text, code="peer-lost") from error


def _pid_of(link: socket.socket) -> int:
    """The process at the other end, if it is this user's; the kernel vouches for it."""
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid) if user == os.geteuid() else -1


def _advise(mapping: Mapping, begin: int, num_bytes: int, advice: int) -> int:
    """The result of madvise: 0, or an error number. Older kernels know fewer kinds of advice."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return ctypes.get_errno() if libc.madvise(mapping.address + begin, num_bytes, advice) else 0
