"""Rendezvous: a store that only the ranks of a job can open, and exchanges through it before any group exists."""

import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import glob
import hashlib
import json
import math
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from paceline import machine
from paceline.errors import ConfigError, LaunchError
from paceline.runtime.faults.processes import Failure, describe_failure, make_error
from paceline.runtime.ranks import messages, store_server
from paceline.runtime.ranks.place import Place, read_place
from paceline.transport import proof

# How long to try to open the launcher's store, and how long rank 0 keeps it open for the others at the end.
_STORE_S, _LINGER_S = 120.0, 3.0
_STALE = "{0} is left over from an earlier run, or in use by another run: remove it and {0}.*, or use a new path"
# Stores by address and job, with the number of times each was opened. A second world at the same address reuses the
# store under a new prefix: it still has the keys of the first, and a reopened store could be mistaken for the old one.
_stores: dict[tuple[str, ...], tuple[dist.Store, Counter[str]]] = {}
# The address of our launcher's store, and the secret that ranks on several hosts must know.
STORE, SECRET = "PACELINE_STORE", "PACELINE_SECRET"
_BIND_S = 3.0  # how long the store of an earlier world may take to release its name
_ANSWER_S = 3.0  # time allowed for an answer in transit, on top of the timeout for waiting for a key
_LONGEST_S = 1e6  # the kernel does not accept infinity
# Keepalive probes detect a host that has vanished: idle seconds, probe interval, number of probes, timeout in ms.
_KEEPALIVE = (5, 2, 3, 11_000)
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
        if isinstance(_stores[key][0], PrivateStore):
            _stores[key][0].set_timeout(timedelta(seconds=timeout_s))
    store, counts = _stores[key]
    counts[topic] += 1
    return dist.PrefixStore(f"paceline/{attempt}/{topic}{counts[topic]}", store)


def gather(
    place: Place, make: Callable[[], Any], timeout_s: float | None, late: str = "did not return within {:g} s"
) -> list[Any]:
    """Call `make` on every rank and return the values in rank order; if it fails on one rank, all ranks raise.

    Collective: every rank must call this. Its store outlives the worlds of a program.
    """
    store = open_store("env://", place, _STORE_S, "gather-")
    try:
        mine = _encode(make(), is_private(store))
    except BaseException as error:
        failure = describe_failure(place.rank, error)
        # Another rank's failure may have caused this one.
        cause = _find_failure(store) if failure.is_secondary else None
        with contextlib.suppress(RuntimeError):
            store.compare_set("failed", "", _encode_failure(failure))  # only the first failure is reported
            _leave(store, place)
        if cause is not None:
            raise make_error(cause, place.world_size) from error
        raise
    limit_s = math.inf if timeout_s is None else timeout_s
    try:
        values = _exchange(store, place, "value", mine, limit_s, late.format(limit_s), lambda: store.check(["failed"]))
        cause = None if values else _find_failure(store)
    except dist.DistError as error:
        text = f"lost the store of the job, probably with rank 0: {str(error).splitlines()[0]}"
        raise LaunchError(f"rank {place.rank} {text}", code="peer-lost") from None
    _leave(store, place)
    if cause is not None:
        raise make_error(cause, place.world_size)
    return [_decode(value, is_private(store)) for value in values]


def _encode(value: Any, private: bool) -> bytes:
    """Encode a user's value. Values that are not plain are pickled, but only for a private store."""
    try:
        return b"m" + messages.encode(value)
    except messages.NotPlainError as error:
        if not private:
            hint = f"or give all ranks of the job the same random {SECRET}, as `paceline run` does"
            text = f"unauthenticated ranks can send only plain values: {error}; {hint}"
            raise ConfigError(text, code="not-plain") from None
        return b"p" + pickle.dumps(value)


def _decode(content: bytes, private: bool) -> Any:
    if content[:1] == b"p" and private:
        return pickle.loads(content[1:])
    return messages.decode(content[1:])


def _encode_failure(failure: Failure) -> bytes:
    try:
        return messages.encode(failure)
    except messages.NotPlainError:  # a user's error class; its text and traceback remain
        return messages.encode(dataclasses.replace(failure, error=None))


def _find_failure(store: Any) -> Failure | None:
    """The report of the first rank that failed."""
    if not store.check(["failed"]):
        return None
    found = messages.decode(store.get("failed"))
    if not isinstance(found, Failure):
        raise LaunchError("another rank failed, but its error report could not be decoded")
    return found


def _leave(store: Any, place: Place) -> None:
    """On rank 0, which may serve the store, wait until the other ranks no longer need it."""
    left, deadline = store.add("left", 1), time.monotonic() + _LINGER_S
    while place.rank == 0 and left < place.world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        left = store.add("left", 0)


def close_stores() -> None:
    """Close every store that this process opened and remove their files; idempotent."""
    atexit.unregister(close_stores)
    for store, _ in _stores.values():
        if isinstance(store, PrivateStore):
            store.close()
    _stores.clear()
    _closers.close()


class PrivateStore(dist.Store):
    """A torch store over a connection to a `store_server`. `connect` returns an authenticated socket."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        super().__init__()
        self._connect = connect
        self._lock = threading.Lock()
        self._link: socket.socket | None = connect()
        # C++ may hold the store indefinitely and calls its methods, which live in Python.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._link, self._connect = None, _refuse_closed

    def _ask(self, kind: int, *fields: str | bytes, limit_s: float = 0.0) -> list[bytes]:
        """The store's answer, within `limit_s` or this store's timeout."""
        request = store_server.pack(kind, [field.encode() if isinstance(field, str) else field for field in fields])
        with self._lock:
            try:
                link = self._link = self._link or self._connect()
                limit_s = min(limit_s or self._limit_s(), _LONGEST_S)
                until_s = time.monotonic() + limit_s
                link.settimeout(limit_s)
                link.sendall(request)
                return store_server.receive_message(link, until_s)[1]
            except BaseException as error:  # also after an interrupt, because nothing would read the rest of the answer
                if self._link is not None:
                    self._link.close()
                self._link = None
                if isinstance(error, OSError | LaunchError):
                    is_late = isinstance(error, TimeoutError)
                    what = "Timed out waiting for its answer" if is_late else "Connection closed by peer"
                    text = f"the job's Store: {what}, probably because rank 0, its host or the launcher is gone"
                    raise dist.DistNetworkError(text) from None
                raise

    def _limit_s(self, timeout: timedelta | None = None) -> float:
        return float((timeout or self.timeout).total_seconds())  # type: ignore[attr-defined]

    def _await(self, kind: int, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """The answer to GET or CHECK, once all keys exist. Other threads can use the store meanwhile."""
        deadline, pause_s = time.monotonic() + self._limit_s(timeout), 0.001
        while not (answer := self._ask(kind, *keys, limit_s=max(0.0, deadline - time.monotonic()) + _ANSWER_S)):
            if time.monotonic() > deadline:
                raise dist.DistStoreError("the job's Store: Timed out waiting for another rank's key")
            time.sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)
        return answer

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self._ask(store_server.SET, key, value)

    def get(self, key: str) -> bytes:
        return self._await(store_server.GET, [key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(store_server.ADD, key, str(amount))[0])

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return bool(self._ask(store_server.CHECK, *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        self._await(store_server.CHECK, keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(store_server.DELETE, key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:  # type: ignore[override]
        return self._ask(store_server.COMPARE_SET, key, expected, desired)[0]

    def append(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self._ask(store_server.APPEND, key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        return self._await(store_server.GET, keys) if keys else []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:  # type: ignore[override]
        self._ask(store_server.SET, *(part for pair in zip(keys, values, strict=True) for part in pair))

    def has_extended_api(self) -> bool:
        return True

    def num_keys(self) -> int:
        return int(self._ask(store_server.COUNT)[0])

    def clone(self) -> "PrivateStore":
        found = PrivateStore(self._connect)
        found.set_timeout(self.timeout)  # type: ignore[attr-defined]
        _closers.callback(found.close)
        return found

    # Names that torch's C++ uses.
    deleteKey, getNumKeys = delete_key, num_keys


def _refuse_closed() -> socket.socket:
    raise ConnectionError("this store is closed")


def is_private(store: Any) -> bool:
    """Whether only authenticated ranks of this job can read and write a store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, PrivateStore | dist.FileStore | dist.HashStore)


def find_key(store: dist.PrefixStore) -> bytes:
    """The random key of the world that uses this store, the same on every rank; empty if the store is not private."""
    if not is_private(store):
        return b""
    return bytes(store.compare_set("key", "", secrets.token_hex(32)))


def serve_env_for_torch() -> None:
    """Make `torch.distributed.init_process_group()` also use the private store in ranks of our own launcher."""
    from paceline.torch_internals import rendezvous_handlers as handlers

    by_torch = handlers["env"]

    def connect(url: str, timeout: timedelta = timedelta(seconds=_STORE_S), **options: Any) -> Iterator[Any]:
        if STORE not in os.environ:
            yield from by_torch(url, timeout=timeout, **options)
            return
        place = read_place()
        store = open_store("env://", place, timeout.total_seconds(), "torch-")
        proof.use_key(find_key(store), store)
        yield store, place.rank, place.world_size

    handlers["env"] = connect


def _connect_store(rendezvous: str, place: Place, timeout_s: float) -> dist.Store:
    url = urlparse(rendezvous)
    if url.scheme == "env":
        if place.world_size == 1:
            return dist.HashStore()
        if name := os.environ.get(STORE):  # the store of our own launcher
            # The store exists before any rank: if it is gone, its world has ended.
            return PrivateStore(lambda: _call(name, place, 0.0, "the store of the launcher", code="peer-lost"))
        host, port = place.master_addr, place.master_port
        if host is None or port is None:
            missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
            text = f"rank {place.rank} of {place.world_size} has no rendezvous because {missing} is not set"
            raise ConfigError(f"{text}: use torchrun, or pass rendezvous='tcp://HOST:PORT' or 'file:///PATH'")
        # torchrun's agent serves a store on this port, and every rank is a client.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _open_at(host, port, place, served, timeout_s)
    if url.scheme == "tcp":
        with contextlib.suppress(ValueError):  # not a valid port
            if url.hostname and url.port:
                return _open_at(url.hostname, url.port, place, False, timeout_s)
        raise ConfigError(f"rendezvous {rendezvous!r} lacks a host or a port: use tcp://HOST:PORT")
    if url.scheme == "file":
        if not url.path or url.netloc or url.fragment or url.query or Path(url.path).is_dir():
            raise ConfigError(f"rendezvous {rendezvous!r} is not a file: use an absolute file:///PATH without # or ?")
        return _open_file(Path(url.path), place, timeout_s)
    raise ConfigError(f"rendezvous {rendezvous!r} is unknown: use env://, tcp://HOST:PORT or file:///PATH")


def _open_at(host: str, port: int, place: Place, served: bool, timeout_s: float) -> dist.Store:
    """The store of a world at an address: private on one host, and with a secret between hosts.

    Without a secret it is torch's own, which serves anyone who can reach it; `paceline doctor` reports that.
    """
    where, secret = f"{host}:{port}", os.environ.get(SECRET, "").encode()
    is_local = place.local_world_size == place.world_size or host in ("localhost", "::1") or host.startswith("127.")
    if is_local and not secret and sys.platform == "linux":
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
        facts = [os.geteuid(), host, port, place.world_size, *(os.environ.get(name, "") for name in names)]
        name = f"@paceline-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"
        if place.rank == 0:
            _serve(_bind(name, where), b"")
        return PrivateStore(lambda: _call(name, place, timeout_s, where))
    if not secret:
        return _open_tcp(host, port, place, place.rank == 0 and not served, timeout_s)
    if not served:
        if place.rank == 0:
            _serve(_listen(port, where), secret)
        return PrivateStore(lambda: _call_host(host, port, secret, place, timeout_s))
    known = _open_tcp(host, port, place, False, timeout_s)
    key = f"paceline/port/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:
        listener = _listen(0, where)
        known.set(key, str(listener.getsockname()[1]))
        _serve(listener, secret)
    return PrivateStore(lambda: _call_host(host, _read_port(known, key), secret, place, timeout_s))


def _read_port(known: dist.Store, key: str) -> int:
    """Rank 0's port. Anyone may have written it, so the listening process must prove that it is rank 0."""
    text = known.get(key).decode(errors="replace")
    return int(text) if text.isdigit() and int(text) < 65536 else 0


def _bind(name: str, where: str) -> socket.socket:
    until_s = time.monotonic() + _BIND_S
    while True:
        try:
            return store_server.bind(name)
        except OSError as error:
            if time.monotonic() > until_s:
                holder = _find_holder(name)
                who = "probably by another job" if holder is None else f"by a process of another user (uid {holder})"
                raise _describe_taken(f"{where} is taken, {who}", error) from None
        time.sleep(0.05)


def _find_holder(name: str) -> int | None:
    """The uid of another user whose process listens at this name, or None."""
    with contextlib.suppress(OSError), store_server.connect(name) as link:
        found = store_server.find_other_user(link)
        return None if found is None else found[0]
    return None


def _listen(port: int, where: str) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        raise _describe_taken(f"{where} is taken, probably by another job", error) from None


def _describe_taken(found: str, error: OSError | None = None) -> LaunchError:
    why = "" if error is None else f" ({error.strerror})"
    return LaunchError(f"{found}: choose another MASTER_PORT, or use `torchrun --standalone`{why}", code="taken")


def _serve(listener: socket.socket, secret: bytes) -> None:
    """Serve a store from a separate process: this rank may hang, and the others must still be able to use it."""
    with listener:
        command = [sys.executable, "-I", "-S", store_server.__file__]
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], **options)
        assert process.stdin is not None
        about = {"listener": listener.fileno(), "secret": secret.hex()}
        process.stdin.write(json.dumps(about).encode() + b"\n")
        process.stdin.flush()
    _closers.callback(_end_server, process)


def _end_server(process: "subprocess.Popen[bytes]") -> None:
    """Let the server exit with the last rank, and wait for it if this rank is the last."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_BIND_S / 3)


def _dial(
    connect: Callable[[float], socket.socket], place: Place, timeout_s: float, where: str, code: str = "timeout"
) -> socket.socket:
    """Retry `connect`, which gets the seconds that are left: rank 0 or the launcher may not listen yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return connect(max(0.1, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or str(error)
                if isinstance(error, socket.gaierror):
                    reason = f"the name does not resolve: {reason}"
                text = f"rank {place.rank} could not reach {where} within {timeout_s:g} s ({reason})"
                raise LaunchError(f"{text}: is rank 0 running and reachable from this host?", code=code) from None
        time.sleep(0.02)


def _call(name: str, place: Place, timeout_s: float, where: str, code: str = "timeout") -> socket.socket:
    """A connection to the store of this name, if its server belongs to this user."""
    link = _dial(lambda _: store_server.connect(name), place, timeout_s, where, code)
    if (found := store_server.find_other_user(link)) is not None:
        link.close()
        text = f"{where} is served by a process of another user (uid {found[0]}), not by a rank of this job"
        raise LaunchError(f"connection refused: {text}; choose another MASTER_PORT", code="stranger")
    return link


def _call_host(host: str, port: int, secret: bytes, place: Place, timeout_s: float) -> socket.socket:
    """A connection to a store on another host, after both ends have proved that they know the secret."""

    def connect(left_s: float) -> socket.socket:
        link = socket.create_connection((host, port), left_s)
        try:
            is_known = store_server.check_server(link, secret)
        except OSError:
            link.close()
            raise
        if not is_known:
            link.close()
            text = f"the process that listens at {host}:{port} does not know the {SECRET} of rank {place.rank}"
            raise LaunchError(f"{text}: give all ranks of the job the same {SECRET}", code="stranger")
        return link

    link = _dial(connect, place, timeout_s, f"{host}:{port}")
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    store_server.keep_alive(link, _KEEPALIVE)
    return link


def _open_tcp(host: str, port: int, place: Place, serve: bool, timeout_s: float) -> dist.Store:
    if not serve:  # torch would also wait for rank 0, but print a page of output on failure
        _dial(lambda left_s: socket.create_connection((host, port), left_s), place, timeout_s, f"{host}:{port}").close()
    limit = timedelta(seconds=timeout_s)
    try:
        # `await_ranks` waits for the others and names the missing ranks.
        return dist.TCPStore(host, port, place.world_size, serve, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "EADDRINUSE" in text:
            raise _describe_taken(f"port {port} on {host} is taken, probably by another job") from None
        raise LaunchError(f"rank {place.rank} could not open the store at {host}:{port}: {text}") from None


def _open_file(path: Path, place: Place, timeout_s: float) -> dist.Store:
    """A store in a file next to `path`. Rank 0 holds a lock on `path`, so that a stale file is detected immediately."""
    deadline = time.monotonic() + timeout_s
    if place.rank == 0:
        token = _claim(path)
    else:
        while not (token := _read_claim(path)):
            if time.monotonic() > deadline:
                text = f"rank {place.rank} of {place.world_size} waited {timeout_s:g} s for rank 0 to open {path}"
                raise LaunchError(f"{text}: is rank 0 running, and does it see the same file system?")
            time.sleep(0.02)
    # Each claim has its own name, so that a late rank of an old store cannot modify a new store.
    own = path.with_name(f"{path.name}.paceline-{token}")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(own, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))  # torch would apply the umask
    _check_owner(own)
    store = dist.FileStore(str(own), place.world_size)
    # If two FileStores are freed at the same moment, each may leave the file to the other or recreate it. So this one
    # is never freed, and the last rank to close its stores removes the file.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    _closers.callback(_leave_file, store, own, place.world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _check_owner(path: Path) -> None:
    """Raise LaunchError if another user owns a file or can write to it."""
    about = path.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        found = f"{path} belongs to uid {about.st_uid} with mode {about.st_mode & 0o777:o}"
        hint = "use a path in a folder that you own"
        raise LaunchError(f"{found}, but must be writable only by this user; {hint}", code="stranger")


def _leave_file(store: dist.Store, file: Path, world_size: int) -> None:
    store.set_timeout(timedelta(seconds=1))
    with contextlib.suppress(RuntimeError, OSError):  # the disk is full, or the folder is no longer writable
        # Using a store recreates its file, but the folder may be gone, or rank 0 may have opened the next store here.
        if file.exists() and store.add("closed", 1) >= world_size:
            file.unlink(missing_ok=True)


def _claim(path: Path) -> str:
    """Create and lock the file until the stores are closed. Its token is written once it is locked."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        raise LaunchError(_STALE.format(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}; choose another path for rendezvous") from None
    _closers.callback(os.close, handle)
    _closers.callback(path.unlink, missing_ok=True)
    fcntl.flock(handle, fcntl.LOCK_EX)
    # Remove files of dead processes, before writing the token: after that, another rank may open the new file.
    for old in path.parent.glob(f"{glob.escape(path.name)}.paceline-*"):
        old.unlink(missing_ok=True)
    token = secrets.token_hex(4)
    os.write(handle, token.encode())
    return token


def _read_claim(path: Path) -> str:
    """The token of a running rank 0, or "" if there is none yet; raises if the file belongs to a dead one."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                _check_owner(path)
                return file.read().decode(errors="replace")
            is_stale = bool(file.read())  # otherwise rank 0 is about to lock it
    except FileNotFoundError:
        return ""
    if is_stale and path.exists():  # otherwise a run that just ended removed it
        raise LaunchError(_STALE.format(path))
    return ""


def await_ranks(store: dist.Store, place: Place, timeout_s: float) -> list[str]:
    """Wait until every rank has arrived and return their hosts in rank order. Collective: every rank must call this."""
    if store.add(f"arrived/{place.rank}", 1) > 1:
        raise LaunchError(f"two processes have rank {place.rank} of {place.world_size}: check RANK")
    if place.rank == 0:
        store.set("size", str(place.world_size))
    elif store.check(["size"]) and (size := store.get("size").decode()) != str(place.world_size):
        raise LaunchError(f"rank {place.rank} has WORLD_SIZE {place.world_size} but rank 0 has {size}: they must agree")
    mine, late = machine.name_host().encode(), ABSENT.format(timeout_s)
    return [host.decode() for host in _exchange(store, place, "here", mine, timeout_s, late)]


def agree_on_backend(store: dist.Store, place: Place, backend: str, refusal: str, timeout_s: float) -> None:
    """Return only if no rank refuses and all chose the same backend; otherwise raise the same error on every rank.

    Without this, the others would wait in torch for the rank that refused. Collective: every rank must call this.
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
        raise ConfigError(f"the ranks chose different backends ({different}): set one with backend=")


def _exchange(
    store: Any, place: Place, topic: str, mine: bytes, timeout_s: float, late: str,
    is_over: Callable[[], Any] = lambda: False,
) -> list[bytes]:  # fmt: skip
    """Exchange bytes through the store only, and return them in rank order; empty once it `is_over`. `late` completes
    the error."""
    store.set(f"{topic}/{place.rank}", mine)
    keys = [f"{topic}/{rank}" for rank in range(place.world_size)]
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    # Polled, because on a timeout `wait` logs a page of output and does not name the missing key.
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
