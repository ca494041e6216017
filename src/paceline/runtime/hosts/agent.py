"""The agent on each host of `paceline run --hosts` and `doctor --hosts`: answers requests, then runs torchrun.

`ssh.py` in this folder sends this file over ssh. It uses only the standard library, so that a host without Paceline,
torch or a recent Python can report what is missing. Requests are lines of JSON on stdin; each answer is one line on
stdout with `MARK` and the request's number. The last request starts the ranks, which own stdout and stderr from then
on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, NoReturn

MARK = "paceline-agent "
# Placeholders in a command (with a null byte, which no argument can contain): a temporary folder, and a prefix that
# makes the kernel kill the command when its parent dies.
LOGS, GUARD = "\0logs", "\0guard"
_GUARD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {}, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
_SILENCE_S = 30.0  # a launcher silent for this long is considered lost
_LOOK_S = 0.1
_MESSAGE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_listeners: list[socket.socket] = []


def build_guard(number: int) -> list[str]:
    """The prefix that makes a command receive this signal when its parent dies."""
    return [sys.executable, "-IS", "-c", _GUARD.format(int(number))]


def find_version(package: str) -> str:
    """The version of a package, without importing it (torch takes seconds); empty if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def list_addresses() -> dict[str, list[str]]:
    """The addresses of each interface: its first IPv4 address, then its IPv6 addresses without a scope."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = [socket.inet_ntoa(answer[20:24])]
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6", encoding="utf-8") as file:
        for digits, _, _, scope, _, name in map(str.split, file):
            if scope != "20":  # not link-local
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def tell_facts(folder: str, program: str, script: str) -> dict[str, Any]:
    """Facts about this host. `program` and `script` are resolved relative to `folder`, where the ranks will run."""
    problem = ""
    try:
        os.chdir(folder)
    except OSError as error:
        problem = str(error.strerror)
    return {
        "python": platform.python_version(),
        "torch": find_version("torch"),
        "paceline": find_version("paceline"),
        "folder": problem,
        "program": not program or shutil.which(program) is not None,
        "script": not script or os.path.exists(script),
        "free_bytes": {place: shutil.disk_usage(place).free for place in (os.getcwd(), tempfile.gettempdir())},
        "addresses": list_addresses(),
        "reached_at": os.environ.get("SSH_CONNECTION", "- - 127.0.0.1").split()[2],
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
    }


def tell_route(address: str) -> dict[str, Any]:
    """The interface that packets to `address` would use, and its address; sends nothing."""
    family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(place)
        here = asked.getsockname()[0]
    return {"address": here, "interface": next((n for n, found in list_addresses().items() if here in found), "")}


def tell_time() -> dict[str, Any]:
    return {"time_s": time.time()}


def listen(address: str, port: int) -> dict[str, Any]:
    """Listen for other hosts, on one port at a time; 0 lets the kernel choose."""
    close()
    listener = socket.create_server((address, port), family=socket.getaddrinfo(address, port)[0][0])
    _listeners.append(listener)
    threading.Thread(target=_answer_messages, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def close() -> dict[str, Any]:
    """Close the port, so that torchrun can use it."""
    while _listeners:
        _listeners[-1].shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which would keep the port open
        _listeners.pop().close()
    return {}


def _answer_messages(listener: socket.socket) -> None:
    """Serve one connection at a time. A message is its length and that many bytes; the answer is one byte."""
    place = memoryview(bytearray(1 << 20))
    with contextlib.suppress(OSError):
        while True:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):  # the sender reports the error
                while head := link.recv(8, socket.MSG_WAITALL):
                    left = int.from_bytes(head, "big")
                    while left > 0:
                        left -= link.recv_into(place, min(left, len(place))) or left
                    link.sendall(b"!")


def reach(places: list[tuple[str, int]], source: str, timeout_s: float) -> dict[str, Any]:
    """Connect from `source` to each (address, port), and return the errors; "" means success."""

    def find_error(place: tuple[str, int]) -> str:
        try:
            with socket.create_connection((place[0], place[1]), timeout_s, (source, 0)):
                return ""
        except OSError as error:
            return error.strerror or str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as workers:
        return {"errors": list(workers.map(find_error, places))}


def time_messages(address: str, port: int, source: str, limit_bytes: int, budget_s: float) -> dict[str, Any]:
    """Round-trip seconds of one-byte messages and of `num_bytes` messages to another host. `num_bytes` grows until a
    message takes a substantial part of the budget, and much longer than one byte."""

    def send(num_bytes: int) -> float:
        message, begin_s = num_bytes.to_bytes(8, "big") + bytes(num_bytes), time.perf_counter()
        link.sendall(message)
        if link.recv(1) != b"!":
            raise OSError("the connection was closed")
        return time.perf_counter() - begin_s

    def repeat(num_bytes: int) -> list[float]:
        until_s, taken = time.monotonic() + budget_s, [send(num_bytes)]
        while len(taken) < 4 or (len(taken) < 50 and time.monotonic() < until_s):
            taken.append(send(num_bytes))
        return taken

    with socket.create_connection((address, port), _MESSAGE_S, (source, 0)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        short, num_bytes = repeat(1), 1 << 14
        while num_bytes < limit_bytes and send(num_bytes) < max(budget_s / 4, 10 * min(short)):
            num_bytes *= 2
        return {"short": short, "num_bytes": num_bytes, "long": repeat(num_bytes)}


def _end_children() -> None:
    """Kill all children, and the orphans that this process then adopts, until none are left."""
    until_s = time.monotonic() + 5.0
    with contextlib.suppress(ChildProcessError):  # no children left
        while time.monotonic() < until_s:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for path in glob.glob("/proc/self/task/*/children"):
                with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                    for number in file.read().split():
                        os.kill(int(number), signal.SIGKILL)
            time.sleep(0.01)


def run(arguments: list[str], variables: dict[str, str], grace_s: float, requests: queue.SimpleQueue[Any]) -> int:
    """Run a command until it exits, `end` or `kill` is requested, or the launcher is lost; returns its exit code."""
    child = subprocess.Popen(arguments, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    heard_s, until_s = time.monotonic(), float("inf")
    while child.poll() is None and time.monotonic() < until_s:
        try:
            ask = requests.get(timeout=_LOOK_S)["ask"]
            heard_s = time.monotonic()
        except queue.Empty:
            ask = "end" if time.monotonic() - heard_s > _SILENCE_S else ""
        if ask == "kill":
            break
        if ask == "end" and until_s == float("inf"):
            child.terminate()
            until_s = time.monotonic() + grace_s
    code = child.returncode  # before _end_children waits for all children
    _end_children()
    return 137 if code is None else 128 - code if code < 0 else code


def serve(logs: str) -> NoReturn:
    """Answer requests, then run the command of the last one."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def end(*_: object) -> None:
        requests.put({"ask": "end"})

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(json.loads(line))
        end()  # the connection is lost

    for number in _SIGNALS:
        signal.signal(number, end)
    threading.Thread(target=read, daemon=True).start()
    functions = (tell_facts, tell_route, tell_time, listen, close, reach, time_messages)
    known = {function.__name__: function for function in functions}
    while (request := requests.get())["ask"] not in ("end", "run"):
        number = request.pop("number")
        try:
            answer = known[request.pop("ask")](**request)
        except (OSError, ValueError) as error:
            answer = {"error": getattr(error, "strerror", None) or str(error)}
        text = json.dumps({"number": number, **answer})
        os.write(1, f"\n{MARK}{text}\n".encode())  # a login script may have printed part of a line
    code = 0
    if request.pop("ask") == "run":
        words = {LOGS: [logs], GUARD: build_guard(signal.SIGKILL)}
        request["arguments"] = [word for given in request["arguments"] for word in words.get(given, [given])]
        try:
            code = run(requests=requests, **request)
        except OSError as error:
            print(f"paceline: {request['arguments'][0]}: {error.strerror}", file=sys.stderr, flush=True)
            code = 1
    shutil.rmtree(logs, ignore_errors=True)
    os._exit(code)  # a normal exit would wait for the reading thread


def main() -> NoReturn:
    """Serve in a child process. If either process is killed, the other kills the ranks: the parent adopts and kills the
    child's orphans, and the child sees its stdin close. If both are killed, the guards kill the programs."""
    logs = ""
    with contextlib.suppress(OSError):  # a full disk is reported with the facts
        logs = tempfile.mkdtemp(prefix="paceline-run-")
    child = os.fork()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: adopt orphans
    if not child:
        serve(logs)
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    _end_children()
    shutil.rmtree(logs, ignore_errors=True)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 255)


if __name__ == "__main__":
    main()
