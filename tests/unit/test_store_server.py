"""The rendezvous store: clients that wait for keys and authentication of connections."""

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.runtime.ranks import rendezvous, store_server
from paceline.runtime.ranks.place import Place
from paceline.runtime.ranks.rendezvous import PrivateStore
from paceline.runtime.ranks.store_server import Gate, Server
from tests.conftest import wait_until


@pytest.fixture
def local() -> Iterator[tuple[Server, Callable[[], PrivateStore]]]:
    """A store on a Unix socket and a function that connects to it."""
    name = f"@paceline-test-{secrets.token_hex(8)}"
    server = Server(store_server.bind(name))

    def connect() -> PrivateStore:
        store = PrivateStore(lambda: store_server.connect(name))
        store.set_timeout(timedelta(seconds=60))
        return store

    yield server, connect
    server.stop()


def in_threads(*calls: Callable[[], object]) -> tuple[list[threading.Thread], list[object]]:
    results: list[object] = []

    def run(call: Callable[[], object]) -> None:
        try:
            results.append(call())
        except dist.DistError as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads, results


def test_clients_that_wait_get_an_error_when_the_store_stops(local):
    server, connect = local
    getter = connect()
    waiter = connect()
    threads, results = in_threads(lambda: getter.get("a"), lambda: waiter.wait(["b"]))
    time.sleep(0.05)
    assert not results
    server.stop()
    for thread in threads:
        thread.join(60)
    assert [type(one) for one in results] == [dist.DistNetworkError] * 2


def test_a_key_that_never_arrives_is_a_timeout(local):
    _, connect = local
    store = connect()
    with pytest.raises(dist.DistStoreError):
        store.wait(["a"], timedelta(seconds=0.01))


def test_a_thread_that_waits_for_a_key_does_not_block_another(local):
    _, connect = local
    store = connect()
    store.set("b", "")
    (thread,), results = in_threads(lambda: store.multi_get(["a", "b"]))
    time.sleep(0.05)
    assert not results and not store.check(["a"])
    store.set("a", "new")
    thread.join(60)
    assert results == [[b"new", b""]] and store.multi_get([]) == []


@contextlib.contextmanager
def open_gate() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    gate = Gate(listener, b"the secret", lambda link: link.sendall(b"welcome"))
    try:
        yield listener.getsockname()
    finally:
        gate.close()


def test_a_rank_is_admitted_even_if_reports_fail(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("stderr is closed")

    monkeypatch.setattr(store_server, "print", fail, raising=False)
    monkeypatch.setattr(store_server, "MOST_UNKNOWN", 1)
    with open_gate() as where, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(where))
        link = stack.enter_context(socket.create_connection(where, timeout=60))
        assert store_server.check_server(link, b"the secret")
        link.settimeout(60)
        assert link.recv(7) == b"welcome"


def test_an_unauthenticated_connection_that_resets_is_reported(monkeypatch):
    reports: list[str] = []
    monkeypatch.setattr(store_server, "report", reports.append)
    with open_gate() as where:
        with socket.create_connection(where, timeout=60) as link:
            store_server.receive(link, store_server.NONCE_BYTES)
            link.sendall(b"x" * (store_server.NONCE_BYTES + store_server.PROOF_BYTES))
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: reports)
    assert "127.0.0.1, which does not know the secret" in reports[0]


def test_a_rank_that_is_dropped_before_the_handshake_retries():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        servers: list[Server] = []

        def serve() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            servers.append(Server(listener.dup(), b"the secret"))

        thread = threading.Thread(target=serve)
        thread.start()
        place = Place(1, 2, 0, 1, "torchrun")
        host, port = listener.getsockname()
        with rendezvous._call_host(host, port, b"the secret", place, 60.0):
            thread.join(60)
        servers[0].stop()
