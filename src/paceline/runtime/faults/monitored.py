"""A monitor for ranks that another launcher started: one process per host, which outlives every rank.

Programs call `monitor`; PACELINE_MONITOR=1 calls it in any program that opens a process group. The first rank of a host
starts the process, and the others find it through their group's store. The monitor reports ranks that are dead,
suspended, slow or hung, and terminates all ranks if the job cannot continue. Monitors of several hosts are
connected over TCP (`Links`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import platform
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError, refuse
from paceline.runtime.faults import pulse
from paceline.runtime.faults.monitor import LOOK_S, VARIABLE, Monitor, Verdict, find_hang_timeout, why_not
from paceline.runtime.faults.processes import describe_failure
from paceline.runtime.ranks.store_server import Gate, check_server
from paceline.units import name_ranks

_MEET_S = 60.0  # how long a rank waits for the others and for its host's monitor
_AFTERMATH_S = 0.5
# The failed rank is killed first, so that its launcher reports it. The others then get the first period to exit on
# their own, and the second to obey a signal.
_TURN_S, _GRACE_S = 0.5, 3.0
_BEAT_S, _SILENT_S = 0.5, 4.0  # heartbeats between hosts
_PAUSE_S = 0.1  # before the next attempt to reach rank 0's monitor
_started: subprocess.Popen[bytes] | None = None


# -- in a rank ---------------------------------------------------------------------------------------------------------


def monitor(hang_timeout_s: float | None = None) -> None:
    """Monitor the ranks of the open process group. A warning reports a slow or hung rank within seconds, with its step,
    phase and stack. All ranks are terminated if one is dead or suspended, if they wait for different collectives, or if
    one hangs for `hang_timeout_s` (by default PACELINE_HANG_TIMEOUT, or 10 minutes). Call this on every rank once the
    group is open; it sends no message."""
    import torch.distributed as dist

    from paceline import machine
    from paceline.torch_internals import get_default_store

    hang_timeout_s = find_hang_timeout() if hang_timeout_s is None else hang_timeout_s
    refuse((not hang_timeout_s > 0, f"hang_timeout_s={hang_timeout_s}: must be above 0"), code="hang_timeout_s")
    if why_not() or pulse.is_open() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"paceline-monitor/{attempt}", get_default_store())
    store.set(f"place/{rank}", machine.name_host())
    places = [_await(store, f"place/{other}") for other in range(world_size)]
    here = [other for other in range(world_size) if places[other] == places[rank]]
    if rank == here[0]:
        token = _await(store, "token") if rank else secrets.token_hex(16)
        hub = "" if rank == 0 else _await(store, "hub")
        answer = _start_process(here, places, token, hub, hang_timeout_s)
        if rank == 0:
            store.set("hub", answer["hub"])
            store.set("token", token)
        for other, page in zip(here, answer["pages"], strict=True):
            store.set(f"page/{other}", json.dumps(page))
    pulse.open_page(*json.loads(_await(store, f"page/{rank}")))
    _note_errors(rank)
    atexit.register(pulse.close_page)


def _await(store: Any, key: str) -> str:
    until_s = time.monotonic() + _MEET_S
    while not store.check([key]):
        if time.monotonic() > until_s:
            text = f"the monitor's {key!r} did not appear within {_MEET_S:g} s: call paceline.monitor() on every rank"
            raise LaunchError(text, code="timeout")
        time.sleep(0.005)
    return str(store.get(key), "utf-8")


def _start_process(
    ranks: Sequence[int], places: Sequence[str], token: str, hub: str, hang_timeout_s: float
) -> dict[str, Any]:
    """Start this host's monitor process in its own session and return its answer."""
    global _started
    asked = {"ranks": list(ranks), "places": list(places), "token": token, "hub": hub}
    asked |= {"address": os.environ.get("MASTER_ADDR", ""), "hang_timeout_s": hang_timeout_s}
    source = f"import sys; sys.path[:] = {sys.path!r}; from paceline.runtime.faults import monitored; monitored.serve()"
    _started = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
    )
    assert _started.stdin is not None and _started.stdout is not None
    with _started.stdin, _started.stdout:
        _started.stdin.write(json.dumps(asked).encode())
        _started.stdin.close()
        line = _started.stdout.readline()
    if not line:
        raise LaunchError("the monitor process ended before it was ready", code="monitor")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _note_errors(rank: int) -> None:
    """If an error terminates this process, report it to the monitor and close the world as failed: on NCCL, a normal
    close at exit would wait for collectives that never end."""
    from paceline.runtime.ranks.world import current_world

    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception):
            failure = describe_failure(rank, error)
            pulse.fail(failure.summary, failure.is_secondary)
        before(kind, error, trace)
        if isinstance(error, Exception) and (world := current_world()) is not None:
            pulse.note_exit()  # closing may take seconds; without this, the error would count as handled
            world.__exit__(kind, error, None)

    sys.excepthook = note


def attach() -> None:
    """Implement PACELINE_MONITOR=1, when torch is imported: call `monitor` for the first process group, and mark the
    steps of torch's own wrapper."""
    import torch
    import torch.distributed as dist

    from paceline.runtime.ranks.world import shorten_nccl_dump
    from paceline.torch_internals import engine
    from paceline.transport.works import keep_from_compiler

    shorten_nccl_dump()
    keep_from_compiler(pulse.enter)
    open_group, backward, wrapper = dist.init_process_group, torch.autograd.backward, torch.nn.parallel
    make = wrapper.DistributedDataParallel.__init__

    @functools.wraps(open_group)
    def open_and_monitor(*args: Any, **kwargs: Any) -> None:
        open_group(*args, **kwargs)
        try:
            monitor()
        except Exception as error:
            print(f"paceline: the monitor could not start: {error}", file=sys.stderr, flush=True)

    @functools.wraps(make)
    def make_marked(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_forward_pre_hook(lambda *_: pulse.enter(pulse.FORWARD))
        self.register_forward_hook(lambda *_: pulse.enter(pulse.BETWEEN))

    def mark_wait_at_end(_: Any) -> None:
        """Queue a callback, from the first hook of a backward pass. It runs once all gradients are ready, but before
        the callback in which torch's wrapper waits for its buckets, which is queued later."""
        engine.queue_callback(lambda: pulse.enter(pulse.WAIT))

    @functools.wraps(backward)
    def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        pulse.enter(pulse.BACKWARD)
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        with contextlib.ExitStack() as undo:
            if pulse.is_open() and isinstance(first, torch.Tensor) and first.requires_grad:
                undo.callback(first.register_hook(mark_wait_at_end).remove)
            backward(tensors, *args, **kwargs)
        pulse.enter(pulse.BETWEEN)

    dist.init_process_group = dist.distributed_c10d.init_process_group = open_and_monitor
    wrapper.DistributedDataParallel.__init__ = make_marked  # type: ignore[method-assign]
    torch.autograd.backward = run_backward


# -- the monitor process of a host -------------------------------------------------------------------------------------


def serve() -> None:
    """Monitor the ranks of this host until all have left; reads the request from stdin and answers on stdout."""
    for number in (signal.SIGINT, signal.SIGHUP):  # sent by a terminal; the ranks handle these signals
        signal.signal(number, signal.SIG_IGN)
    asked = json.loads(sys.stdin.buffer.read())
    ranks, places = asked["ranks"], asked["places"]
    hosts = {place: [rank for rank, one in enumerate(places) if one == place] for place in dict.fromkeys(places)}
    with Monitor(ranks, len(places), asked["hang_timeout_s"]) as found, Links(hosts, asked) as links:
        pages = [found.find_pages(rank) for rank in ranks]
        os.write(1, json.dumps({"pages": pages, "hub": links.address}).encode() + b"\n")
        os.close(1)
        _Host(found, links, platform.node()).run()


class _Host:
    def __init__(self, monitor: Monitor, links: Links, name: str) -> None:
        self.monitor, self.links, self.name = monitor, links, name
        self._failed_s: dict[int, float] = {}

    def run(self) -> None:
        begin_s = time.monotonic()
        while True:
            verdict = self._find_ended() or self.monitor.look()
            if verdict is not None and verdict.ends:
                culprit = verdict.rank if verdict.kind != "ended" else None
                self._conclude(self._describe(verdict), culprit, verdict.stack)
                return
            if verdict is not None:
                text = f"warning: {self._describe(verdict)}"
                self.links.send({"warning": text})
                self.monitor.announce(text, verdict.rank, verdict.stack)
            heard = self.links.look()
            for text in self.links.take_warnings():
                self.monitor.announce(text)
            if heard is None and (lost := self.links.find_lost()) is not None:
                heard = self._add_place(lost)
            if heard is not None:
                self._conclude(heard, None)
                return
            if self.monitor.have_all_left() and not self._failed_s:
                self.links.leave()
                return
            if not self.monitor.pids() and time.monotonic() - begin_s > _MEET_S:
                return
            self.monitor.wait(LOOK_S)

    def _find_ended(self) -> Verdict | None:
        """The rank that failed first. An error that only reports a lost rank is reported with a short delay."""
        now_s, ended = time.monotonic(), self.monitor.find_ended()
        for rank in ended:
            self._failed_s.setdefault(rank, now_s)
        causes = [rank for rank, (_, is_secondary) in ended.items() if not is_secondary]
        late = [rank for rank in ended if now_s - self._failed_s[rank] > self.links.aftermath_s]
        for rank in (*causes, *late):
            return Verdict("ended", rank, ended[rank][0], "")
        return None

    def _add_place(self, text: str) -> str:
        """Add where the ranks of this host, which are waiting or have failed by now, are in the code."""
        first = min(self.monitor.pids(), default=None)
        where = self.monitor.describe_waiting(None)
        if not where and first is not None:
            where = f"rank {first} was {self.monitor.describe(first)}"
        return f"{text}; {where}" if where else text

    def _describe(self, verdict: Verdict) -> str:
        if (rank := verdict.rank) is None:
            return f"on {self.name} {verdict.summary}"
        who = f"rank {rank} of {self.monitor.world_size} on {self.name} (process {self.monitor.pids()[rank]})"
        return f"{who} {verdict.summary}"

    def _conclude(self, text: str, culprit: int | None, stack: str = "") -> None:
        self.links.send({"verdict": text})
        self.monitor.announce(text, culprit, stack)
        for pid in self.monitor.pids().values():
            _explain_end(pid, text)
        if culprit is not None:
            self.monitor.signal([culprit], signal.SIGKILL)
        for number, limit_s in ((0, _TURN_S), (signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            if number:
                self.monitor.signal(None, number)
            until_s = time.monotonic() + limit_s
            while time.monotonic() < until_s:
                if self.monitor.are_all_gone():
                    return
                time.sleep(0.02)


def _explain_end(pid: int, text: str) -> None:
    """Tell torchrun why this process is about to end, so that its report shows this instead of "Signal 9 (SIGKILL)"."""
    name = b"TORCHELASTIC_ERROR_FILE="
    with contextlib.suppress(OSError):  # the process has ended, or its launcher is not torchrun
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for path in [os.fsdecode(one.removeprefix(name)) for one in variables if one.startswith(name)]:
            about = {"message": f"ended by Paceline: {text}", "extraInfo": {"timestamp": str(int(time.time()))}}
            with open(path, "x") as file:  # an existing file is the rank's own report
                json.dump({"message": about}, file)


class Links(contextlib.AbstractContextManager["Links"]):
    """Exchanges JSON lines between the monitors of several hosts. Rank 0's monitor forwards warnings and verdicts.

    Both ends of a connection prove that they know a secret from the ranks' store. Each end sends heartbeats; a host
    that falls silent without leaving counts as lost. A thread reads each connection.
    """

    def __init__(self, hosts: dict[str, list[int]], asked: dict[str, Any]) -> None:
        self._hosts = list(hosts.values())
        self._mine = next(number for number, ranks in enumerate(self._hosts) if ranks == asked["ranks"])
        self._names = [place.split()[0] for place in hosts]
        self._gate: Gate | None = None
        self._peers: dict[int, socket.socket] = {}  # by host number
        self._heard_s: dict[int, float] = {}
        self._left: set[int] = set()
        self._closed_s: dict[int, float] = {}
        self._warnings: list[str] = []
        self._verdict: str | None = None
        self._lock = threading.Lock()
        # How long to look for the root cause of an error, which may be on another rank.
        self.aftermath_s = _AFTERMATH_S if len(self._hosts) == 1 else _SILENT_S + 2 * _AFTERMATH_S
        self._sent_s, self.address = 0.0, ""
        if len(self._hosts) == 1:
            return
        secret = asked["token"].encode()
        if self._mine == 0:
            self._heard_s = dict.fromkeys(range(1, len(self._hosts)), time.monotonic() + _MEET_S)
            self._gate = Gate(self._listen(asked["address"]), secret, self._read)
        else:
            link = self._call(asked["hub"], secret)
            self._heard_s[0] = time.monotonic()
            self._add_peer(0, link)
            self.send({"host": self._mine})
            threading.Thread(target=self._read, args=(link, 0), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        for link in list(self._peers.values()):
            with contextlib.suppress(OSError):  # the connection's thread may have closed it
                link.shutdown(socket.SHUT_RDWR)
        if self._gate is not None:
            self._gate.close()

    def _listen(self, address: str) -> socket.socket:
        """Listen on the address at which other hosts reach rank 0."""
        listener = None
        with contextlib.suppress(OSError):
            family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(place[:2], family=family)
        if listener is None:  # not an address of this host, which is behind NAT
            listener = socket.create_server(("", 0))
        self.address = f"{address}:{listener.getsockname()[1]}"
        return listener

    @staticmethod
    def _call(hub: str, secret: bytes) -> socket.socket:
        """Connect to the monitor of rank 0."""
        host, _, port = hub.rpartition(":")
        until_s = time.monotonic() + _MEET_S
        while True:
            link = socket.create_connection((host, int(port)), timeout=_SILENT_S)
            try:
                is_known = check_server(link, secret)
            except OSError as error:
                link.close()
                if time.monotonic() > until_s:
                    text = f"the process at {hub} did not authenticate within {_MEET_S:g} s ({error})"
                    raise LaunchError(text, code="timeout") from None
                time.sleep(_PAUSE_S)
                continue
            if not is_known:
                link.close()
                raise LaunchError(f"the process at {hub} is not the monitor of rank 0", code="stranger")
            link.settimeout(None)
            return link

    def _add_peer(self, number: int, link: socket.socket) -> None:
        # Sending must not wait for a host that does not read.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
        self._peers[number] = link

    def send(self, message: dict[str, Any], but: int = -1) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for number, link in list(self._peers.items()):
                if number != but:
                    with contextlib.suppress(OSError):
                        link.sendall(data)

    def leave(self) -> None:
        self.send({"left": [self._mine]})

    def take_warnings(self) -> list[str]:
        """The warnings received from other hosts since the last call."""
        with self._lock:
            found = self._warnings
            self._warnings = []
        return found

    def look(self) -> str | None:
        """Send heartbeats. Returns another host's verdict, if any."""
        if len(self._hosts) > 1 and time.monotonic() - self._sent_s > _BEAT_S:
            self._sent_s = time.monotonic()
            self.send({"left": sorted(self._left)})
        with self._lock:
            found = self._verdict
            self._verdict = None
        return found

    def find_lost(self) -> str | None:
        """Describe a host that disappeared without leaving."""
        now_s = time.monotonic()
        for number, heard_s in self._heard_s.items():
            if number in self._left:
                continue
            text = f"the host {self._names[number]} ({name_ranks(self._hosts[number])}) is lost"
            if now_s - self._closed_s.get(number, now_s) > _AFTERMATH_S:
                return f"{text}: its monitor has exited: all processes there were killed, or the host is shutting down"
            if now_s - heard_s > _SILENT_S:
                why = f"it is down, or the network between it and {self._names[self._mine]} is cut"
                return f"{text}: no heartbeat for {now_s - heard_s:.1f} s: {why}"
        return None

    def _read(self, link: socket.socket, number: int = -1) -> None:
        """Read a connection in a thread until it is closed; the first line has the host's number if it is unknown."""
        try:
            with contextlib.suppress(OSError, ValueError, TypeError), link, link.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        return
                    if number < 0:
                        host = message.get("host")
                        if host not in self._heard_s:
                            return
                        number = int(host)
                        self._add_peer(number, link)
                    self._receive(number, message)
        finally:
            if number >= 0:  # the host is lost, unless it has left
                self._peers.pop(number, None)
                self._closed_s[number] = time.monotonic()

    def _receive(self, number: int, message: dict[str, Any]) -> None:
        self._heard_s[number] = time.monotonic()
        self._left |= set(message.get("left", ()))
        if "warning" in message or "verdict" in message:
            self.send(message, but=number)
        with self._lock:
            if "warning" in message:
                self._warnings.append(str(message["warning"]))
            if "verdict" in message and self._verdict is None:
                self._verdict = str(message["verdict"])
