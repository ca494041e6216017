"""Authenticates the peers of gloo's connections as ranks of this job, before anything else is sent through them.

gloo listens on a TCP port, and accepts any connection as a peer if it first sends a small number. Any process on the
host can find the port in /proc, so each pair of ranks exchanges HMACs with a key from the private store.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from paceline.errors import LaunchError
from paceline.torch_internals import c10d

_BYTES = 32
_POLL_S = 0.5
_key: bytes = b""
_store: Any = None


def use_key(key: bytes, store: Any = None) -> None:
    """Authenticate later groups with this key, or not at all if it is empty. Refusals are reported in `store`."""
    global _key, _store
    _key, _store = key, store


def check_group(group: Any) -> None:
    """Authenticate the connections of a torch group, if it uses gloo. Collective."""
    if not isinstance(group, c10d.ProcessGroup):  # this rank is not a member
        return
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for the CPU
        return
    if isinstance(backend, c10d.ProcessGroupGloo):
        check_pairs(backend, group.group_name)


def check_pairs(backend: Any, name: str) -> None:
    """Exchange proofs over every connection of a gloo group with this name. Collective."""
    rank, size = backend.rank(), backend.size()
    if not _key or size == 1:
        return
    mine = b"".join(_prove(name, rank, other) for other in range(size))
    theirs = torch.empty(size * _BYTES, dtype=torch.uint8)
    work = backend.alltoall_base(theirs, torch.frombuffer(bytearray(mine), dtype=torch.uint8), [], [])
    failure = ""
    while not failure and not work.is_completed():
        try:
            work.wait(timedelta(seconds=_POLL_S))
        except RuntimeError as error:
            if text := _read_refusal():
                raise LaunchError(text, code="stranger") from None
            if not work.is_completed() and _find_foreign_peers():  # otherwise `work.wait` below reports the error
                failure = str(error).partition("\n")[0]
    if not failure:
        try:
            work.wait()
        except RuntimeError as error:
            failure = str(error).partition("\n")[0]
    found = theirs.numpy().tobytes()
    proofs = {other: found[other * _BYTES :][:_BYTES] for other in range(size)}
    bad = [other for other, proof in proofs.items() if not hmac.compare_digest(proof, _prove(name, other, rank))]
    if not bad and not failure:
        return
    text = ""
    if users := ", ".join(map(str, _find_foreign_peers())):
        text = f"a process of another user (uid {users}) connected in place of a rank"
    elif not failure:
        text = f"the process that connected as rank {bad[0]} of {size} is not a rank of this job"
    if text:
        text = f"rejected an unauthenticated connection: {text}; start the job again"
        if _store is not None:
            with contextlib.suppress(RuntimeError):
                _store.set("stranger", text)  # the other ranks, which may be waiting for this one, also raise the error
    else:
        text = _read_refusal()
    if text:
        raise LaunchError(text, code="stranger")
    raise LaunchError(f"ranks lost contact during authentication: {failure}", code="peer-lost")


def _read_refusal() -> str:
    """Another rank's report of an unauthenticated connection; empty if there is none."""
    if _store is not None:
        with contextlib.suppress(RuntimeError):
            if _store.check(["stranger"]):
                return str(_store.get("stranger"), "utf-8")
    return ""


def _prove(name: str, source: int, target: int) -> bytes:
    return hmac.new(_key, f"pair\0{name}\0{source}\0{target}".encode(), hashlib.sha256).digest()


def _find_foreign_peers() -> list[int]:
    """Other users whose processes are peers of this process's TCP connections on this host."""
    own = set()
    for entry in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed in the meantime
            own.add(os.readlink(entry))
    ends: dict[tuple[str, str], tuple[int, str]] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for words in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()):
                if words[3] == "01":  # established
                    ends[words[1], words[2]] = int(words[7]), words[9]
    peers = [ends.get((there, here)) for (here, there), (_, inode) in ends.items() if f"socket:[{inode}]" in own]
    return sorted({peer[0] for peer in peers if peer is not None and peer[0] != os.geteuid() and peer[1] != "0"})
