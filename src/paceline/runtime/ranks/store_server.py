"""The rendezvous store, open only to the ranks of one job: every connection is authenticated by the kernel or a secret.

On one host it is a Unix socket that serves only processes of the same user. Between hosts it is a TCP socket, and both
ends prove that they know the job's secret before anything else is read. Other connections are refused and reported.
This file needs only the standard library: rank 0 runs it as a separate process, which a hanging rank cannot block.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import multiprocessing.connection
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

SET, GET, ADD, CHECK, DELETE, COMPARE_SET, APPEND, COUNT = range(8)
NONCE_BYTES = PROOF_BYTES = 32
HELLO_S = 5.0  # handshake timeout
MOST_UNKNOWN = 256  # maximum number of unauthenticated connections
_LENGTH = struct.Struct("<I")
_MOST_REPORTED = 5
_PAUSE_S = 0.05
_PROBES = (1, 1, 4, 5000)  # used while the server waits for the last connection to end


# -- messages ----------------------------------------------------------------------------------------------------------


def pack(kind: int, fields: Sequence[bytes]) -> bytes:
    """A request or an answer: its length, its kind, and its length-prefixed fields."""
    parts = [part for field in fields for part in (_LENGTH.pack(len(field)), field)]
    return b"".join([_LENGTH.pack(1 + sum(map(len, parts))), bytes([kind]), *parts])


def receive(link: socket.socket, num_bytes: int, until_s: float = math.inf) -> bytearray:
    """Exactly `num_bytes` bytes; OSError if they do not arrive in time."""
    content = bytearray(num_bytes)
    left = memoryview(content)
    while left:
        if until_s < math.inf:
            link.settimeout(max(0.001, until_s - time.monotonic()))
        if not (count := link.recv_into(left)):
            raise ConnectionError("closed")
        left = left[count:]
    return content


def receive_message(link: socket.socket, until_s: float = math.inf) -> tuple[int, list[bytes]]:
    """The kind and fields of the next message; ValueError, IndexError or struct.error if it is malformed."""
    content = receive(link, _LENGTH.unpack(receive(link, _LENGTH.size, until_s))[0], until_s)
    at = 1
    fields = []
    while at < len(content):
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        fields.append(bytes(content[at : at + size]))
        at += size
    if at != len(content):
        raise ValueError("malformed message")
    return content[0], fields


# -- authentication ----------------------------------------------------------------------------------------------------


def check_client(link: socket.socket, secret: bytes) -> str:
    """The server's half of the handshake: why the client is refused, or ""; OSError if it is gone."""
    until_s = time.monotonic() + HELLO_S
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        link.settimeout(HELLO_S)
        link.sendall(nonce)
        hello = bytes(receive(link, NONCE_BYTES + PROOF_BYTES, until_s))
        theirs, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _prove(secret, b"rank", nonce, theirs)):
            return "does not know the secret of the job"
        link.sendall(_prove(secret, b"store", nonce, theirs))
        link.settimeout(None)
    except TimeoutError:
        return f"did not authenticate within {HELLO_S:g} s"
    return ""


def check_server(link: socket.socket, secret: bytes) -> bool:
    """The client's half of the handshake: whether the server knows the secret. Raises OSError if the server does not
    begin the handshake; the client should then retry, because the server may have too many connections. Waits for at
    most HELLO_S."""
    until_s = time.monotonic() + HELLO_S
    mine = secrets.token_bytes(NONCE_BYTES)
    nonce = bytes(receive(link, NONCE_BYTES, until_s))
    try:
        link.sendall(mine + _prove(secret, b"rank", nonce, mine))
        answer = bytes(receive(link, PROOF_BYTES, until_s))
    except OSError:
        return False
    return hmac.compare_digest(answer, _prove(secret, b"store", nonce, mine))


def _prove(secret: bytes, who: bytes, *nonces: bytes) -> bytes:
    """Compute the answer to these nonces, which requires the secret."""
    return hmac.new(secret, b"\0".join([b"paceline", who, *nonces]), hashlib.sha256).digest()


def find_other_user(link: socket.socket) -> tuple[int, int] | None:
    """The user and process at the other end of a Unix socket, according to the kernel; None if it is this user's."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None  # other users cannot enter the socket's folder
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return None if user == os.geteuid() else (user, pid)


def address(name: str) -> str:
    """The address of a named Unix socket; a leading @ makes it abstract, without a file."""
    return "\0" + name[1:] if name.startswith("@") else name


def bind(name: str) -> socket.socket:
    """A Unix socket that listens at this name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address(name))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def connect(name: str) -> socket.socket:
    """A connection to the Unix socket of this name."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.connect(address(name))
    except OSError:
        link.close()
        raise
    return link


def keep_alive(link: socket.socket, values: tuple[int, int, int, int]) -> None:
    """Probe a silent connection to another host: idle seconds, interval, number of probes, timeout in ms."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip(("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT"), values, strict=True):
            if hasattr(socket, f"TCP_{name}"):  # all exist on Linux
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


class Gate:
    """Accepts connections and authenticates each in its own thread, so that a silent one does not delay the others.
    `serve(link)` then runs in that thread if the connection belongs to this job; the link is closed when it returns."""

    def __init__(self, listener: socket.socket, secret: bytes, serve: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._secret = secret
        self._serve = serve
        self._lock = threading.Lock()
        self._num_refused = 0
        self._is_closing = False
        self._near, self._far = socket.socketpair()  # closing one wakes the thread
        self._links: dict[socket.socket, threading.Thread] = {}
        self._unknown: dict[socket.socket, str] = {}  # addresses of unauthenticated connections, oldest first
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._accept_all, name="paceline-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the listener and all connections, and wait for their threads."""
        self._is_closing = True
        self._near.close()
        self._thread.join()
        self._far.close()
        self._listener.close()
        with self._lock:
            links = dict(self._links)
        for link in links:
            _hang_up(link)
        for thread in links.values():
            thread.join()

    def list_links(self) -> list[socket.socket]:
        """All open connections."""
        with self._lock:
            return list(self._links)

    def _accept_all(self) -> None:
        while not self._is_closing:
            multiprocessing.connection.wait([self._listener, self._far])
            try:
                link, where = self._listener.accept()
            except BlockingIOError:  # the connection is gone, or the gate is closing
                continue
            except OSError:  # too many files are open
                time.sleep(_PAUSE_S)
                continue
            link.setblocking(True)
            self._accept(link, "" if link.family == socket.AF_UNIX else where[0])

    def _accept(self, link: socket.socket, host: str) -> None:
        """Serve a connection in a thread. Unauthenticated connections, however many, must not keep a rank out."""
        thread = threading.Thread(target=self._run, args=(link, host), name="paceline-link", daemon=True)
        dropped = ""
        with self._lock:
            if host and len(self._unknown) >= MOST_UNKNOWN:
                oldest = next(iter(self._unknown))
                dropped = self._unknown.pop(oldest)
                _hang_up(oldest)  # the connection's thread closes it
            if host:
                self._unknown[link] = host
            self._links[link] = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._forget(link)
            report(f"cannot serve a connection: {error}")
        if dropped:
            self._refuse(f"{dropped}: too many unauthenticated connections")

    def _run(self, link: socket.socket, host: str) -> None:
        try:
            with contextlib.suppress(OSError):  # the client is gone
                problem = self._check_host(link, host) if host else _check_user(link)
                if problem:
                    link.close()
                    self._refuse(problem)
                else:
                    self._serve(link)
        finally:
            self._forget(link)

    def _forget(self, link: socket.socket) -> None:
        with self._lock:
            del self._links[link]
            self._unknown.pop(link, None)
        link.close()

    def _check_host(self, link: socket.socket, host: str) -> str:
        try:
            problem = check_client(link, self._secret)
        finally:
            with self._lock:
                self._unknown.pop(link, None)
        return problem and f"a connection from {host}, which {problem}"

    def _refuse(self, who: str) -> None:
        with self._lock:
            self._num_refused += 1
            number = self._num_refused
        if number <= _MOST_REPORTED:
            more = "; further refusals are not reported" if number == _MOST_REPORTED else ""
            report(f"refused {who}: it is not a rank of this job{more}")


def _check_user(link: socket.socket) -> str:
    """A description of the process at the other end of a Unix socket if it belongs to another user; otherwise ""."""
    found = find_other_user(link)
    return "" if found is None else f"a process of another user (uid {found[0]}, pid {found[1]})"


def _hang_up(link: socket.socket) -> None:
    """Wake threads that wait on a socket."""
    with contextlib.suppress(OSError):  # the socket is already closed
        link.shutdown(socket.SHUT_RDWR)


def report(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed
        print(f"paceline: {text}", file=sys.stderr, flush=True)


# -- the store ---------------------------------------------------------------------------------------------------------


class Server:
    """Serves a listening socket until `stop`; with `secret`, only to clients that prove that they know it.

    It answers immediately: clients that wait for a key must poll.
    """

    def __init__(self, listener: socket.socket, secret: bytes = b"") -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, bytes] = {}
        self._gate = Gate(listener, secret, self._serve_link)

    def linger(self) -> None:
        """Wait until no connection is left. A host that was cut off closes nothing; keepalive detects it."""
        probed = set[socket.socket]()
        while links := set(self._gate.list_links()):
            for link in links - probed:
                with contextlib.suppress(OSError):  # the socket is already closed
                    keep_alive(link, _PROBES)
            probed |= links
            time.sleep(_PAUSE_S)

    def stop(self) -> None:
        """Close all connections."""
        self._gate.close()

    def _serve_link(self, link: socket.socket) -> None:
        """Answer one request after another, in the thread of their connection."""
        with contextlib.suppress(ValueError, IndexError, struct.error):  # malformed
            if link.family != socket.AF_UNIX:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                kind, fields = receive_message(link)
                with self._lock:
                    answer = self._answer(kind, fields)
                link.sendall(pack(kind, answer))

    def _answer(self, kind: int, fields: list[bytes]) -> list[bytes]:
        values = self._values
        if kind == GET:
            return [values[key] for key in fields] if all(key in values for key in fields) else []
        if kind == CHECK:
            return [b"1"] if all(key in values for key in fields) else []
        if kind == DELETE:
            return [] if values.pop(fields[0], None) is None else [b"1"]
        if kind == COUNT:
            return [b"%d" % len(values)]
        if kind == COMPARE_SET:
            key, expected, desired = fields
            if values.get(key, b"") == expected:
                values[key] = desired
            return [values.get(key, expected)]
        if kind == SET:
            values.update(zip(fields[::2], fields[1::2], strict=True))
        elif kind == APPEND:
            values[fields[0]] = values.get(fields[0], b"") + fields[1]
        elif kind == ADD:
            values[fields[0]] = b"%d" % (int(values.get(fields[0], b"0")) + int(fields[1]))
        else:
            raise ValueError(f"request {kind}")
        return [values[fields[0]]] if kind == ADD else []


def main() -> None:
    """Serve the socket named in the first line of stdin, until stdin is closed and all ranks are gone."""
    about = json.loads(sys.stdin.readline())
    server = Server(socket.socket(fileno=about["listener"]), bytes.fromhex(about["secret"]))
    while sys.stdin.buffer.read(1 << 10):
        pass
    server.linger()


if __name__ == "__main__":
    main()
