"""The rendezvous store, open only to the ranks of one job: every connection is authenticated by the kernel or a secret.

On one host it is a Unix socket that serves only processes of the same user. Between hosts it is a TCP socket, and both
ends prove that they know the job's secret before anything else is read. Other connections are refused and reported.
This file needs only the standard library: rank 0 runs it as a separate process, which a hanging rank cannot block.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

SET, GET, ADD, CHECK, WAIT, DELETE, COMPARE_SET, APPEND, COUNT, MULTI_SET = range(10)
DONE, LATE = 0, 1
NONCE_BYTES = PROOF_BYTES = 32
HELLO_S = 5.0  # handshake timeout
_MOST_UNKNOWN = 256  # maximum number of unauthenticated connections
_HEAD, _LENGTH = struct.Struct("<IB"), struct.Struct("<I")
_MOST_REPORTED = 5
_CHUNK = 1 << 18


def pack(kind: int, fields: Sequence[bytes]) -> bytes:
    """A request or an answer: its length, its kind, and its length-prefixed fields."""
    parts = [part for field in fields for part in (_LENGTH.pack(len(field)), field)]
    return b"".join([_HEAD.pack(1 + sum(map(len, parts)), kind), *parts])


def unpack(buffer: bytes | bytearray) -> tuple[int, list[bytes], int] | None:
    """The kind and fields of the first message in a buffer, and its size; None while it is incomplete."""
    if len(buffer) < _HEAD.size:
        return None
    length, kind = _HEAD.unpack_from(buffer)
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    at, fields = _HEAD.size, []
    while at < end:
        (size,) = _LENGTH.unpack_from(buffer, at)
        at += _LENGTH.size
        fields.append(bytes(buffer[at : at + size]))
        at += size
    if at != end:
        raise ValueError("malformed message")
    return kind, fields, end


def prove(secret: bytes, who: bytes, *nonces: bytes) -> bytes:
    """The answer to these nonces that requires knowing the secret."""
    return hmac.new(secret, b"\0".join([b"paceline", who, *nonces]), hashlib.sha256).digest()


def peer_user(link: socket.socket) -> tuple[int, int] | None:
    """The user and process at the other end of a Unix socket, according to the kernel; None if it cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None  # the socket's folder is closed to other users
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user, pid


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


class _Peer:
    """One connection: unparsed input and unsent output."""

    def __init__(self, link: socket.socket, is_known: bool) -> None:
        self.link, self.is_known = link, is_known
        self.read, self.unsent = bytearray(), bytearray()
        self.nonce, self.until_s = secrets.token_bytes(NONCE_BYTES), time.monotonic() + HELLO_S


class _Waiter:
    def __init__(self, peer: _Peer, keys: list[bytes], missing: set[bytes], until_s: float, gives_values: bool) -> None:
        self.peer, self.keys, self.missing = peer, keys, missing
        self.until_s, self.gives_values = until_s, gives_values


class Server:
    """Serves a listening socket until `stop`; with `secret`, only to clients that prove that they know it."""

    def __init__(
        self, listener: socket.socket, secret: bytes = b"", report: Callable[[str], None] | None = None
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._report = report or _print
        self._values: dict[bytes, bytes] = {}
        self._waiters: dict[bytes, list[_Waiter]] = {}
        self._selector = selectors.DefaultSelector()
        self._num_refused = 0
        self._peers: set[_Peer] = set()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._near, self._far = socket.socketpair()
        self._selector.register(self._far, selectors.EVENT_READ, None)

    def start(self) -> threading.Thread:
        """Serve from a thread of this process, until `stop`."""
        thread = threading.Thread(target=self.serve, name="paceline-store", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        self._near.close()

    def serve(self, lingers: bool = False) -> None:
        """Serve until `stop` and, if it `lingers`, until nobody is connected."""
        is_stopped = False
        try:
            while not is_stopped or (lingers and self._peers):
                for key, events in self._selector.select(self._next_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._far:
                        is_stopped = True
                        self._selector.unregister(self._far)
                        for peer in self._peers:
                            _probe(peer.link)
                    elif key.data in self._peers:
                        self._serve_peer(key.data, events)
                self._end_late()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()
            self._listener.close()
            self._far.close()
            self._near.close()

    def _next_s(self) -> float | None:
        limits = [peer.until_s for peer in self._peers if not peer.is_known]
        limits += [waiter.until_s for waiters in self._waiters.values() for waiter in waiters]
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    def _accept(self) -> None:
        try:
            link, address = self._listener.accept()
        except OSError:
            return
        is_known = False
        if link.family == socket.AF_UNIX:
            found = peer_user(link)
            if found is not None and found[0] != os.geteuid():
                self._refuse(link, f"a process of another user (uid {found[0]}, pid {found[1]})")
                return
            is_known = True
        elif sum(not peer.is_known for peer in self._peers) >= _MOST_UNKNOWN:
            self._refuse(link, f"{address[0]}: too many unauthenticated connections")
            return
        link.setblocking(False)
        peer = _Peer(link, is_known)
        self._peers.add(peer)
        self._selector.register(link, selectors.EVENT_READ, peer)
        if not is_known:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send(peer, peer.nonce)

    def _refuse(self, link: socket.socket, who: str) -> None:
        link.close()
        self._num_refused += 1
        if self._num_refused <= _MOST_REPORTED:
            more = "; further refusals are not reported" if self._num_refused == _MOST_REPORTED else ""
            self._report(f"refused {who}: it is not a rank of this job{more}")

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.discard(peer)
            self._selector.unregister(peer.link)
            peer.link.close()

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(peer, b"")
            if not events & selectors.EVENT_READ:
                return
            content = peer.link.recv(_CHUNK if peer.is_known else NONCE_BYTES + PROOF_BYTES - len(peer.read))
            if not content:
                self._drop(peer)
                return
            peer.read += content
            if not peer.is_known:
                self._greet(peer)
            while peer.is_known and (found := unpack(peer.read)) is not None:
                del peer.read[: found[2]]
                self._answer(peer, *found[:2])
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError, struct.error):
            self._drop(peer)

    def _greet(self, peer: _Peer) -> None:
        if len(peer.read) < NONCE_BYTES + PROOF_BYTES:
            return
        nonce, proof = bytes(peer.read[:NONCE_BYTES]), bytes(peer.read[NONCE_BYTES:])
        peer.read.clear()
        if hmac.compare_digest(proof, prove(self._secret, b"rank", peer.nonce, nonce)):
            peer.is_known = True
            self._send(peer, prove(self._secret, b"store", peer.nonce, nonce))
        else:
            self._turn_away(peer, "does not know the secret of the job")

    def _turn_away(self, peer: _Peer, why: str) -> None:
        try:
            who = f"a connection from {peer.link.getpeername()[0]}, which {why}"
        except OSError:
            who = f"a connection that {why}"
        self._peers.discard(peer)
        self._selector.unregister(peer.link)
        self._refuse(peer.link, who)

    def _send(self, peer: _Peer, content: bytes) -> None:
        peer.unsent += content
        try:
            while peer.unsent:
                del peer.unsent[: peer.link.send(peer.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.link, wanted, peer)

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiters.pop(key, []):
            waiter.missing.discard(key)
            if not waiter.missing and waiter.peer in self._peers:
                self._finish(waiter)

    def _finish(self, waiter: _Waiter) -> None:
        found = [self._values.get(key, b"") for key in waiter.keys] if waiter.gives_values else []
        self._send(waiter.peer, pack(DONE, found))

    def _answer(self, peer: _Peer, kind: int, fields: list[bytes]) -> None:
        values, answer = self._values, list[bytes]()
        if kind in (GET, WAIT):
            limit_s, keys = float(fields[0]), fields[1:]
            missing = {key for key in keys if key not in values}
            waiter = _Waiter(peer, keys, missing, time.monotonic() + limit_s, kind == GET)
            for key in missing:
                self._waiters.setdefault(key, []).append(waiter)
            if not missing:
                self._finish(waiter)
            return
        if kind in (SET, MULTI_SET):
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                self._put(key, value)
        elif kind == APPEND:
            self._put(fields[0], values.get(fields[0], b"") + fields[1])
        elif kind == ADD:
            self._put(fields[0], b"%d" % (int(values.get(fields[0], b"0")) + int(fields[1])))
            answer = [values[fields[0]]]
        elif kind == CHECK:
            answer = [b"1" if all(key in values for key in fields) else b""]
        elif kind == DELETE:
            answer = [b"" if values.pop(fields[0], None) is None else b"1"]
        elif kind == COMPARE_SET:
            key, expected, desired = fields
            current = values.get(key, b"")
            if current == expected:
                self._put(key, desired)
            answer = [values.get(key, expected)]
        elif kind == COUNT:
            answer = [b"%d" % len(values)]
        else:
            raise ValueError(f"request {kind}")
        self._send(peer, pack(DONE, answer))

    def _end_late(self) -> None:
        """Answer waiters that timed out, and refuse connections that missed the handshake timeout."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.is_known and peer.until_s <= now_s]:
            self._turn_away(peer, f"did not authenticate within {HELLO_S:g} s")
        late = {waiter for waiters in self._waiters.values() for waiter in waiters if waiter.until_s <= now_s}
        gone = {w for waiters in self._waiters.values() for w in waiters if w.peer not in self._peers}
        for key in list(self._waiters) if late or gone else ():
            kept = [waiter for waiter in self._waiters.pop(key) if waiter not in late and waiter not in gone]
            if kept:
                self._waiters[key] = kept
        for waiter in late - gone:
            self._send(waiter.peer, pack(LATE, []))


def _probe(link: socket.socket) -> None:
    """Enable keepalive: a host that was cut off does not close its connections."""
    if link.family != socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", 1), ("KEEPINTVL", 1), ("KEEPCNT", 4), ("USER_TIMEOUT", 5000)):
            if hasattr(socket, f"TCP_{name}"):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)


def _print(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Serve the socket given in the first line of stdin, until stdin is closed and all ranks are gone."""
    about = json.loads(sys.stdin.readline())
    server = Server(socket.socket(fileno=about["listener"]), bytes.fromhex(about["secret"]))

    def wait_for_end() -> None:
        while sys.stdin.buffer.read(1 << 10):
            pass
        server.stop()

    threading.Thread(target=wait_for_end, daemon=True).start()
    server.serve(lingers=True)


if __name__ == "__main__":
    main()
