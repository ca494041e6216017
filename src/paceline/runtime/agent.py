"""What `paceline run --hosts` and `doctor --hosts` start on each host: a program of the standard library alone.

`runtime/hosts.py` sends this file over ssh, so that a host without Paceline, torch or a recent Python can still say
what it lacks. Requests come as lines of JSON on stdin, and each is answered by one line on stdout that begins with
`MARK`. The last one starts the ranks; from then on both outputs are theirs.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

MARK = "paceline-agent "
LOGS = "{logs}"  # an argument of a command that stands for a folder that is removed at its end
_SILENCE_S = 30.0  # without a word from the launcher it is lost, and with it the reason to run
_LOOK_S = 0.1
_CONNECT_S = 3.0
_BLOCK_BYTES = 1 << 20
_listeners: dict[int, socket.socket] = {}
_libc = ctypes.CDLL(None)  # now: between fork and exec nothing may be loaded


def find_version(package: str) -> str:
    """The version of a package, read from its source, for importing torch takes seconds; empty where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return ""
    for name in ("version.py", "__init__.py"):
        path = os.path.join(os.path.dirname(spec.origin), name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found = re.search(r"^__version__(?:: \w+)? = ['\"](.+)['\"]", file.read(), re.MULTILINE)
            if found:
                return found.group(1)
    return "unknown"


def list_addresses() -> dict[str, list[str]]:
    """The addresses of each interface that has one: its first IPv4 address, then those of IPv6 that need no scope."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            found[name] = [socket.inet_ntoa(answer[20:24])]
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6", encoding="utf-8") as file:
            for digits, _, _, scope, _, name in map(str.split, file):
                if scope != "20":  # not local to the link
                    address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                    found.setdefault(name, []).append(address)
    return found


def _measure_free(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _tell(folder: str, program: str, script: str) -> dict[str, Any]:
    """What this host has. `program` and `script` are looked for from `folder`, in which the ranks are to run."""
    missing = ""
    try:
        os.chdir(folder)
    except OSError as error:
        missing = str(error.strerror)
    return {
        "python": platform.python_version(),
        "torch": find_version("torch"),
        "paceline": find_version("paceline"),
        "folder": missing,
        "program": not program or shutil.which(program) is not None,
        "script": not script or os.path.exists(script),
        "free_bytes": _measure_free("."),
        "temporary": tempfile.gettempdir(),
        "temporary_bytes": _measure_free(tempfile.gettempdir()),
        "addresses": list_addresses(),
        "reached_at": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def _tell_route(address: str) -> dict[str, Any]:
    """The interface, and its address, by which packets leave for this address; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(place)
        here = asked.getsockname()[0]
    return {"address": here, "interface": next((n for n, found in list_addresses().items() if here in found), "")}


def _tell_time() -> dict[str, Any]:
    return {"time_s": time.time()}


def _open(address: str, port: int) -> dict[str, Any]:
    """Listen for the others; port 0 is one that the kernel chooses."""
    listener = socket.create_server((address, port), family=socket.getaddrinfo(address, port)[0][0])
    _listeners[listener.getsockname()[1]] = listener
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def _close(port: int) -> dict[str, Any]:
    """Close the port again, so that torchrun can have it."""
    listener = _listeners.pop(port)
    listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, and that would keep it open
    listener.close()
    return {}


def _serve(listener: socket.socket) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_answer_messages, args=(link,), daemon=True).start()


def _answer_messages(link: socket.socket) -> None:
    """A message is its length and as many bytes; each is answered by one byte."""
    place = memoryview(bytearray(_BLOCK_BYTES))
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while head := link.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(head, "big")
                while left > 0:
                    left -= link.recv_into(place, min(left, _BLOCK_BYTES)) or left
                link.sendall(b"!")
        except OSError:  # the other end reports it
            return


def _time_message(link: socket.socket, num_bytes: int) -> float:
    block, left = bytes(min(num_bytes, _BLOCK_BYTES)), num_bytes
    begin_s = time.perf_counter()
    link.sendall(num_bytes.to_bytes(8, "big"))
    while left > 0:
        link.sendall(block[:left])
        left -= len(block)
    if link.recv(1) != b"!":
        raise OSError("the connection was closed")
    return time.perf_counter() - begin_s


def _connect(address: str, port: int, source: str, budget_s: float) -> dict[str, Any]:
    """Connect to another host, from the address `source` if there is one; with a budget, time messages of 1 byte and
    then large ones, each until its answer."""
    bound = (source, 0) if source else None
    with socket.create_connection((address, port), timeout=_CONNECT_S, source_address=bound) as link:
        if not budget_s:
            return {}
        link.settimeout(30.0)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        short_s = [_time_message(link, 1) for _ in range(25)]
        num_bytes = 1 << 16
        warm_s = [_time_message(link, num_bytes) for _ in range(2)]
        while warm_s[-1] < budget_s / 20 and num_bytes < 1 << 30:  # of a size that takes a tenth of the time
            num_bytes *= 2
            warm_s = [_time_message(link, num_bytes)]
        begin_s, long_s = time.perf_counter(), list[float]()
        while len(long_s) < 3 or time.perf_counter() - begin_s < budget_s:
            long_s.append(_time_message(link, num_bytes))
    return {"short_s": short_s[5:], "short_warm_s": short_s[:5], "num_bytes": num_bytes, "long_s": long_s,
            "long_warm_s": warm_s}  # fmt: skip


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": _tell, "route": _tell_route, "time": _tell_time, "open": _open, "close": _close, "connect": _connect,
}  # fmt: skip


def _control(option: int, value: int) -> None:
    """prctl, where there is one."""
    if hasattr(_libc, "prctl"):
        _libc.prctl(option, value, 0, 0, 0)


def _list_descendants() -> list[int]:
    """The processes below this one, those included that lost their parent."""
    parents: dict[int, int] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(path.split("/")[2])] = int(parent)
    found, known = [], {os.getpid()}
    while more := [number for number, parent in parents.items() if parent in known and number not in known]:
        found += more
        known |= set(more)
    return found


def _end_descendants() -> None:
    """Kill what is left below this process, until nothing is."""
    until_s = time.monotonic() + 5.0
    while (left := _list_descendants()) and time.monotonic() < until_s:
        for number in left:
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.01)


def run(arguments: list[str], variables: dict[str, str], grace_s: float, requests: queue.SimpleQueue[Any]) -> int:
    """Run a command until it ends, the launcher asks to end it, or the launcher is lost; then nothing of it is left.

    `requests` has {"ask": "end"}, {"ask": "kill"}, or None for a lost connection. Returns the exit code.
    """
    _control(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes a child of this process
    with tempfile.TemporaryDirectory(prefix="paceline-run-", ignore_cleanup_errors=True) as logs:
        child = subprocess.Popen(
            [logs if argument == LOGS else argument for argument in arguments], env={**os.environ, **variables},
            stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: _control(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: also where this process is killed
        )  # fmt: skip
        heard_s, until_s = time.monotonic(), float("inf")
        while child.poll() is None and time.monotonic() < until_s:
            try:
                request = requests.get(timeout=_LOOK_S)
                heard_s = time.monotonic()
            except queue.Empty:
                if time.monotonic() - heard_s < _SILENCE_S:
                    continue
                request = None
            if request is not None and request["ask"] == "kill":
                break
            if until_s == float("inf") and (request is None or request["ask"] == "end"):
                child.send_signal(signal.SIGTERM)
                until_s = time.monotonic() + grace_s
            if request is None:
                heard_s = float("inf")
        code = child.returncode  # now: below, all children are waited for
        _end_descendants()
    return 137 if code is None else 128 - code if code < 0 else code


def main() -> None:
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(json.loads(line))
        requests.put(None)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: requests.put(None))
    threading.Thread(target=read, daemon=True).start()
    while True:
        request = requests.get()
        if request is None:
            os._exit(0)
        ask = request.pop("ask")
        if ask == "run":
            code = 1
            try:
                code = run(requests=requests, **request)
            except OSError as error:
                print(f"paceline: {error.filename or request['arguments'][0]}: {error.strerror}", file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(code)  # the thread that reads would hold up an ordinary exit
        if ask in _ANSWERS:
            try:
                answer = _ANSWERS[ask](**request)
            except (OSError, ValueError) as error:
                answer = {"error": getattr(error, "strerror", None) or str(error)}
            os.write(1, (MARK + json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
