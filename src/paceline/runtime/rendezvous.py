"""The rendezvous of ranks: a store by TCP, by file or in memory, and what ranks exchange on it before any group."""

import atexit
import contextlib
import ctypes
import fcntl
import glob
import math
import os
import pickle
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from paceline.errors import ConfigError, LaunchError
from paceline.runtime.environment import Place
from paceline.runtime.worker import describe_failure, make_error

# How long to try to open the launcher's store, and how long rank 0 keeps it open for the others at the end.
_STORE_S, _LINGER_S = 120.0, 3.0
_STALE = "{0} is left over from an earlier run, or in use by another: remove it and {0}.*, or use a new path"
# By address and job, with how often each was opened. A second world at the same address reuses the store under a prefix
# of its own: the keys of the first are still there, and a store that rank 0 opened again could be mistaken for the old.
_stores: dict[tuple[str, ...], tuple[dist.Store, Counter[str]]] = {}
_closers = contextlib.ExitStack()
ABSENT = "did not arrive within {:g} s: check that they started (on Slurm: `srun`, not a bare call in the batch script)"


def open_store(rendezvous: str, place: Place, timeout_s: float, topic: str = "") -> Any:
    """The store of a new world. `rendezvous` is `env://`, `tcp://HOST:PORT` or `file:///PATH`.

    Collective: every rank must call this, the n-th time for the n-th world at an address (and topic).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    where = (rendezvous, str(place.master_addr), str(place.master_port))
    key = (*where, os.environ.get("PACELINE_JOB", ""), attempt, f"{place.rank}/{place.world_size}")
    if key not in _stores:
        atexit.register(close_stores)
        _stores[key] = _connect_store(rendezvous, place, timeout_s), Counter()
    store, counts = _stores[key]
    counts[topic] += 1
    return dist.PrefixStore(f"paceline/{attempt}/{topic}{counts[topic]}", store)


def gather(
    place: Place, make: Callable[[], Any], timeout_s: float | None, late: str = "did not return within {:g} s"
) -> list[Any]:
    """What `make` returned on every rank, in rank order; once it has failed on one, all of them raise.

    Collective: every rank must call this. Its store outlives the worlds of a program.
    """
    store = open_store("env://", place, _STORE_S, "gather-")
    try:
        mine = pickle.dumps(make())
    except BaseException as error:
        failure = describe_failure(place.rank, error)
        # Another rank's failure may be the cause of this one.
        cause = _find_failure(store) if failure.is_secondary else b""
        with contextlib.suppress(RuntimeError):
            if store.add("failures", 1) == 1:
                store.set("failed", pickle.dumps(failure))
            _leave(store, place)
        if cause:
            raise make_error(pickle.loads(cause), place.world_size) from error
        raise
    limit_s = math.inf if timeout_s is None else timeout_s
    try:
        values = _exchange(store, place, "value", mine, limit_s, late.format(limit_s), lambda: _find_failure(store))
        failed = b"" if values else _find_failure(store)
    except dist.DistError as error:
        text = f"lost the store of the job, probably with rank 0: {str(error).splitlines()[0]}"
        raise LaunchError(f"rank {place.rank} {text}", code="peer-lost") from None
    _leave(store, place)
    if failed:
        raise make_error(pickle.loads(failed), place.world_size)
    return [pickle.loads(value) for value in values]


def _find_failure(store: Any) -> bytes:
    """What the first rank to fail reported."""
    return bytes(store.get("failed")) if store.check(["failed"]) else b""


def _leave(store: Any, place: Place) -> None:
    """Rank 0 may serve the store, and then must not exit before the others have read it."""
    left, deadline = store.add("left", 1), time.monotonic() + _LINGER_S
    while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        left = store.add("left", 0)


def close_stores() -> None:
    """Close every store that this process opened; does nothing the second time. Rank 0 removes the file that ranks meet
    at, and the last rank that of the store."""
    atexit.unregister(close_stores)
    _stores.clear()
    _closers.close()


def serve_local_store(listener: int) -> dist.TCPStore:
    """A store for ranks on this host, on a socket that listens on the loopback interface."""
    with socket.socket(fileno=os.dup(listener)) as bound:
        port = bound.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)


def _connect_store(rendezvous: str, place: Place, timeout_s: float) -> dist.Store:
    url = urlparse(rendezvous)
    if url.scheme == "env":
        host, port = place.master_addr, place.master_port
        if place.world_size == 1 and host is None:
            return dist.HashStore()
        if host is None or port is None:
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            text = f"rank {place.rank} of {place.world_size} has no rendezvous, for {missing} is not set: start it with"
            raise ConfigError(f"{text} torchrun, or pass rendezvous='tcp://HOST:PORT' or 'file:///PATH'")
        # Under torchrun and under our own launcher the agent serves the store, and every rank is a client of it.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _open_tcp(host, port, place, place.rank == 0 and not served, timeout_s)
    if url.scheme == "tcp":
        with contextlib.suppress(ValueError):  # a port that is none
            if url.hostname and url.port:
                return _open_tcp(url.hostname, url.port, place, place.rank == 0, timeout_s)
        raise ConfigError(f"rendezvous {rendezvous!r} lacks a host or a port: write tcp://HOST:PORT")
    if url.scheme == "file":
        if not url.path or url.netloc or url.fragment or url.query or Path(url.path).is_dir():
            raise ConfigError(f"rendezvous {rendezvous!r} names no file: write file:///PATH, absolute, without # and ?")
        return _open_file(Path(url.path), place, timeout_s)
    raise ConfigError(f"rendezvous {rendezvous!r} is unknown: use env://, tcp://HOST:PORT or file:///PATH")


def _open_tcp(host: str, port: int, place: Place, serve: bool, timeout_s: float) -> dist.Store:
    deadline, reason = time.monotonic() + timeout_s, ""
    while not serve:  # until rank 0 listens; torch would wait too, and end with a page of text
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            break
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, socket.gaierror):
                reason = f"the name does not resolve: {reason}"
        if time.monotonic() > deadline:
            text = f"rank {place.rank} could not reach {host}:{port} within {timeout_s:g} s"
            raise LaunchError(f"{text} ({reason}): is rank 0 running, and may this host reach it?")
        time.sleep(0.05)
    limit = timedelta(seconds=timeout_s)
    try:
        # `await_ranks` waits for the others, and names the missing ranks.
        return dist.TCPStore(host, port, place.world_size, serve, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text:
            text = "is taken, probably by another job: choose another MASTER_PORT, or use `torchrun --standalone`"
            raise LaunchError(f"port {port} on {host} {text}") from None
        raise LaunchError(f"rank {place.rank} could not open the store at {host}:{port}: {text}") from None


def _open_file(path: Path, place: Place, timeout_s: float) -> dist.Store:
    """A store in a file next to `path`. Rank 0 holds a lock on `path`, so that a stale file is found at once."""
    deadline = time.monotonic() + timeout_s
    if place.rank == 0:
        token = _claim(path)
    else:
        while not (token := _read_claim(path)):
            if time.monotonic() > deadline:
                text = f"rank {place.rank} of {place.world_size} waited {timeout_s:g} s for rank 0 to open {path}"
                raise LaunchError(f"{text}: is rank 0 running, and does it see the same file system?")
            time.sleep(0.02)
    # A name of its own for every claim: a late rank of an old store cannot touch a new one.
    own = path.with_name(f"{path.name}.paceline-{token}")
    store = dist.FileStore(str(own), place.world_size)
    # Of two FileStores that are freed at the same moment, each may leave the file to the other, or make it again. So
    # this one is never freed, and the last rank to close its stores removes the file.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    _closers.callback(_leave_file, store, own, place.world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _leave_file(store: dist.Store, file: Path, world_size: int) -> None:
    store.set_timeout(timedelta(seconds=1))
    with contextlib.suppress(RuntimeError, OSError):  # the disk is full, or the folder may not be written any more
        # A store makes its file again: it is gone with its folder, or rank 0 has opened the next one at this place.
        if file.exists() and store.add("closed", 1) >= world_size:
            file.unlink(missing_ok=True)


def _claim(path: Path) -> str:
    """Create and lock the file, until the stores are closed; the token in it is written when it is locked."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        raise LaunchError(_STALE.format(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}; choose another path for rendezvous") from None
    _closers.callback(os.close, handle)
    _closers.callback(path.unlink, missing_ok=True)
    fcntl.flock(handle, fcntl.LOCK_EX)
    # Files of processes that died. Before the token is written: from then on another rank may have opened the new one.
    for old in path.parent.glob(f"{glob.escape(path.name)}.paceline-*"):
        old.unlink(missing_ok=True)
    token = secrets.token_hex(4)
    os.write(handle, token.encode())
    return token


def _read_claim(path: Path) -> str:
    """The token of a living rank 0, or nothing while there is none; raises for a file that a dead one left."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().decode(errors="replace")
            is_stale = bool(file.read())  # else rank 0 is just about to lock it
    except FileNotFoundError:
        return ""
    if is_stale and path.exists():  # else it was removed by a run that ended just now
        raise LaunchError(_STALE.format(path))
    return ""


def find_host_id() -> str:
    """A name that two ranks share exactly when they run on one booted host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()}/{boot}"


def await_ranks(store: dist.Store, place: Place, timeout_s: float) -> list[str]:
    """Wait until every rank has arrived and return their hosts in rank order. Collective: every rank must call this."""
    if store.add(f"arrived/{place.rank}", 1) > 1:
        raise LaunchError(f"two processes have rank {place.rank} of {place.world_size}: check RANK")
    if place.rank == 0:
        store.set("size", str(place.world_size))
    elif store.check(["size"]) and (size := store.get("size").decode()) != str(place.world_size):
        raise LaunchError(f"rank {place.rank} has WORLD_SIZE {place.world_size} and rank 0 has {size}: they must agree")
    mine, late = find_host_id().encode(), ABSENT.format(timeout_s)
    return [host.decode() for host in _exchange(store, place, "here", mine, timeout_s, late)]


def agree_on_backend(store: dist.Store, place: Place, backend: str, refusal: str, timeout_s: float) -> None:
    """Return only if no rank refuses and all chose one backend; otherwise raise the same error on every rank.

    Without this, the others would wait in torch for the one that refused. Collective: every rank must call this.
    """
    late = f"arrived and then sent nothing for {timeout_s:g} s: check its own output"
    mine = f"{backend}\n{refusal}".encode()
    answers = [answer.decode() for answer in _exchange(store, place, "ready", mine, timeout_s, late)]
    choices, refusals = zip(*(answer.split("\n", 1) for answer in answers), strict=True)
    for rank, reason in enumerate(refusals):
        if reason:
            raise ConfigError(reason if place.world_size == 1 else f"{reason} (on rank {rank} of {place.world_size})")
    if len(set(choices)) > 1:
        different = ", ".join(f"{choice} on rank {choices.index(choice)}" for choice in dict.fromkeys(choices))
        raise ConfigError(f"the ranks chose different backends ({different}): name one with backend=")


def _exchange(
    store: Any, place: Place, topic: str, mine: bytes, timeout_s: float, late: str,
    is_over: Callable[[], Any] = lambda: False,
) -> list[bytes]:  # fmt: skip
    """Every rank's bytes, in rank order, over the store alone; nothing once it `is_over`. `late` ends the error."""
    store.set(f"{topic}/{place.rank}", mine)
    keys = [f"{topic}/{rank}" for rank in range(place.world_size)]
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    # Polled: `wait` would log a page of its own on a time-out, and cannot say which key is missing.
    while not store.check(keys):
        if is_over():
            return []
        if time.monotonic() > deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:16])} of {place.world_size}"
            raise LaunchError(f"{who} {late}", code="timeout")
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return [store.get(key) for key in keys]
