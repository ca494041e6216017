"""An unprivileged user who knows every port and every socket name in /proc can neither join a world nor run code.

Only root can become another user, so these tests are skipped for others. The attacker is forked here, where torch is
already imported, and does what worked against torch's own store: it writes pickles for whoever reads them, takes a
rank's place in gloo's connections, and asks for memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import LaunchError
from paceline.runtime.faults.processes import find_code
from paceline.runtime.ranks import rendezvous, store_server
from paceline.transport import why_not
from tests.conftest import wait_until

NOBODY = 65534
BACKENDS = ["gloo", pytest.param("shm", marks=pytest.mark.skipif(bool(why_not()), reason="no shared memory here"))]
# The attacker tries every job on the host, including those of concurrent tests.
IS_SHARED = "PYTEST_XDIST_WORKER" in os.environ
as_root = pytest.mark.skipif(os.geteuid() != 0 or IS_SHARED, reason="needs root, and the host for itself: no `-n`")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.system, (f"id -u > {self.place}",)


def list_sockets() -> set[tuple[str, str]]:
    """The listening sockets that every user can see: ("tcp", port) and ("unix", name)."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            found.add(("tcp", str(int(words[1].split(":")[1], 16))))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7].startswith("@paceline-"):
            found.add(("unix", words[7]))
    return found


def note(loot: Path, kind: str) -> None:
    """Record a connection of this kind: an attack that reaches nothing proves nothing."""
    with (loot / f"reached {kind}").open("a") as file:
        file.write("x")


def attack(before: set[tuple[str, str]], loot: Path, place: Path) -> None:
    """Run as another user: attack every socket that was not listening `before`, until killed."""
    "".encode("idna")  # connecting needs this codec; another user may not be able to read the modules of this Python
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    kept, tried, evil = [], set(before), pickle.dumps(Evil(place))
    while True:
        for kind, name in sorted(list_sockets() - tried, reverse=True):  # a world's store exists only briefly
            tried.add((kind, name))
            with contextlib.suppress(Exception):
                if kind == "unix":
                    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    link.settimeout(0.5)
                    link.connect(store_server.address(name))
                    note(loot, kind)
                    for number in range(3):
                        keys = [f"paceline/0/gather-{number}/failed", f"paceline/0/gather-{number}/value/1"]
                        for key in keys:
                            link.sendall(store_server.pack(store_server.SET, [key.encode(), evil]))
                    with (loot / "said").open("ab") as file:
                        file.write(link.recv(1024))
                    kept.append(link)
                    continue
                # gloo accepts anyone who sends the number of its pair as a rank, so try all numbers.
                for number in range(8):
                    link = socket.create_connection(("127.0.0.1", int(name)), 0.5)
                    link.sendall(struct.pack("<q", number))
                    kept.append(link)
                note(loot, kind)
                with contextlib.suppress(Exception):
                    store = dist.TCPStore("127.0.0.1", int(name), is_master=False, wait_for_workers=False,
                                          timeout=timedelta(seconds=0.3))  # fmt: skip
                    for number in range(3):
                        store.set(f"paceline/0/gather-{number}/failed", evil)
                    (loot / "joined").write_text(name)
        for link in kept:  # whatever a rank sends to its peer
            with contextlib.suppress(OSError):
                link.setblocking(False)
                if content := link.recv(1 << 16):
                    with (loot / "read").open("ab") as file:
                        file.write(content)
        time.sleep(0.001)


@pytest.fixture
def attacker(tmp_path):
    """Another user who attacks everything started from now on; `loot` collects the results."""
    loot = tmp_path / "loot"
    loot.mkdir()
    loot.chmod(0o777)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    before = list_sockets()
    pid = os.fork()
    if not pid:
        try:
            attack(before, loot, tmp_path / "owned")
        finally:
            os._exit(0)
    try:
        yield loot
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


SECRET = 1234.5678


def reduce_secrets(backend: str, pause_s: float) -> tuple[str, str]:
    """A small version of training's traffic: a world, objects, gradients. Returns the outcome and a detail.

    Rank 1 connects late to gloo, so the attacker is first.
    """
    agree = rendezvous.agree_on_backend

    def agree_late(store, place, *rest):
        agree(store, place, *rest)
        time.sleep(pause_s * place.rank)

    rendezvous.agree_on_backend = agree_late
    try:
        with paceline.init(backend, "cpu", announce=None, timeout_s=60) as world:
            world.share({"rank": world.rank})
            dist.all_reduce(torch.full((1024,), SECRET))
            values = paceline.run_ranks(os.getpid, world.world_size)
            return "trained", str(len(values))
    except LaunchError as error:
        return error.code, str(error)
    except RuntimeError as error:  # from gloo: the other rank rejected a connection and left
        return find_code(error), str(error)
    finally:
        rendezvous.agree_on_backend = agree


def check_refused(on_ranks, attacker: Path, backend: str, pause_s: float) -> set[str]:
    found = on_ranks(2, reduce_secrets, backend, pause_s)
    for how, text in found:
        # An attacker that connects first can stop the job, but cannot join it.
        assert how in ("trained", "stranger", "peer-lost"), text
        assert how != "stranger" or "unauthenticated connection" in text
    assert {file.name for file in attacker.glob("reached *")} == {"reached tcp", "reached unix"}
    assert not (attacker.parent / "owned").exists(), "a pickle of another user was read"
    assert not (attacker / "joined").exists()
    read = (attacker / "read").read_bytes() if (attacker / "read").exists() else b""
    assert struct.pack("<f", SECRET) * 4 not in read, "another user has read gradients"
    assert not (attacker / "said").exists() or (attacker / "said").read_bytes() == b""
    return {how for how, _ in found}


@as_root
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_user_cannot_join_read_gradients_or_run_code(on_ranks, attacker, backend, capfd):
    check_refused(on_ranks, attacker, backend, 0.3)
    # The attacker finds the store's socket first, and the store reports the attack.
    assert f"refused a process of another user (uid {NOBODY}" in capfd.readouterr().err


seen: dict[str, list[str]] = {}


@as_root
@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(50))
@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_tries_of_another_user_are_refused(on_ranks, attacker, backend, attempt):
    seen.setdefault(backend, []).extend(check_refused(on_ranks, attacker, backend, 0.005 * attempt))
    # Either rank of a pair may be the listening one; in some attempts, the attacker has found its port.
    assert attempt < 49 or len(seen[backend]) < 50 or "stranger" in seen[backend]


def test_a_store_serves_only_clients_that_know_its_secret(monkeypatch):
    listener, said = socket.create_server(("127.0.0.1", 0)), []
    monkeypatch.setattr(store_server, "report", said.append)
    port, place = listener.getsockname()[1], rendezvous.Place(1, 2, 0, 1, "torchrun")
    server = store_server.Server(listener, b"the secret")
    try:
        store = rendezvous.PrivateStore(lambda: rendezvous._call_host("127.0.0.1", port, b"the secret", place, 5.0))
        store.set("a", "1")
        with pytest.raises(LaunchError, match="PACELINE_SECRET") as caught:
            rendezvous._call_host("127.0.0.1", port, b"a guess", place, 5.0)
        assert caught.value.code == "stranger"
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(store_server.pack(store_server.SET, [b"a", b"x" * 100]))
            link.settimeout(5.0)
            with contextlib.suppress(OSError):
                while link.recv(1024):  # the store's nonce, and then the end of the stream
                    pass
        wait_until(lambda: len(said) == 2)
        assert all("127.0.0.1, which does not know the secret of the job" in line for line in said)
        assert store.get("a") == b"1" and store.num_keys() == 1
        store.close()
    finally:
        server.stop()


ASKED = {
    "check": lambda store: store.check(["a"]), "get": lambda store: store.get("a"),
    "set": lambda store: store.set("a", ""), "add": lambda store: store.add("a", 1),
    "wait": lambda store: store.wait(["a"], timedelta(seconds=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_silent_store_is_abandoned_after_the_timeout(monkeypatch, name):
    """A silent connection may come from a host that vanished, or from a suspended process."""
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.1)
    near, far = socket.socketpair()
    store, ended = rendezvous.PrivateStore(lambda: near), list[BaseException]()
    store.set_timeout(timedelta(seconds=0.2))

    def ask() -> None:
        try:
            ASKED[name](store)
        except dist.DistNetworkError as error:
            ended.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    with far:
        thread.start()
        thread.join(30.0)
    assert [find_code(error) for error in ended] == ["peer-lost"]


def test_a_silent_connection_to_another_host_is_probed():
    listener = socket.create_server(("127.0.0.1", 0))
    server = store_server.Server(listener, b"the secret")
    try:
        place = rendezvous.Place(1, 2, 0, 1, "torchrun")
        with rendezvous._call_host("127.0.0.1", listener.getsockname()[1], b"the secret", place, 5.0) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, each, count, unsent_ms = (
                link.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
            )
            assert idle + each * count <= 15 and 0 < unsent_ms <= 15_000
    finally:
        server.stop()


def test_a_server_in_place_of_rank_0_must_know_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if not pid:
            link, _ = listener.accept()
            link.sendall(b"n" * store_server.NONCE_BYTES + b"p" * store_server.PROOF_BYTES)
            time.sleep(5)
            os._exit(0)
        try:
            place = rendezvous.Place(1, 2, 0, 1, "torchrun")
            with pytest.raises(LaunchError) as caught:
                rendezvous._call_host("127.0.0.1", listener.getsockname()[1], b"the secret", place, 5.0)
            assert caught.value.code == "stranger"
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def meet_as_torch_does() -> tuple[bool, int]:
    dist.init_process_group("gloo")
    try:
        return rendezvous.is_private(dist.distributed_c10d._get_default_store()), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def test_torchs_own_init_uses_the_private_store(on_ranks):
    assert on_ranks(2, meet_as_torch_does) == [(True, 2)] * 2


class Kept:
    """An object that is not a plain value."""

    def __init__(self, number: int) -> None:
        self.number = number


def return_object() -> Kept:
    return Kept(int(os.environ["RANK"]))


def nest(is_private: bool) -> list[int] | str:
    check, rendezvous.is_private = rendezvous.is_private, lambda store: is_private
    try:
        return [kept.number for kept in paceline.run_ranks(return_object, 2)]
    except paceline.ConfigError as error:
        return error.code
    finally:
        rendezvous.is_private = check


def test_user_objects_are_sent_only_over_a_private_store(on_ranks):
    assert on_ranks(2, nest, True) == [[0, 1]] * 2
    assert on_ranks(2, nest, False) == ["not-plain"] * 2


def test_a_rendezvous_file_that_others_can_write_is_refused(tmp_path):
    path = tmp_path / "meet"
    path.touch(0o666)
    path.chmod(0o666)
    with pytest.raises(LaunchError) as caught:
        rendezvous._check_owner(path)
    assert caught.value.code == "stranger"
    path.chmod(0o600)
    rendezvous._check_owner(path)
