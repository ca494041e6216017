"""What runs on each host of `paceline run --hosts` and `doctor --hosts`: answers questions, then runs torchrun.

`runtime/hosts.py` sends this file over ssh. It uses the standard library alone: a host without Paceline, torch or a
recent Python can still say what it lacks. Requests are lines of JSON on stdin, and each is answered by one line on
stdout that begins with `MARK` and has the request's number. The last one starts the ranks; from then on both outputs
are theirs.
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
# Words of a command, which no argument can contain, for what only the host knows: a folder that is removed at its end,
# and a program that runs the words behind it, and is killed when its parent ends.
LOGS, GUARD = "\0logs", "\0guard"
_GUARD = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {}, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
_SILENCE_S = 30.0  # a launcher that is silent for so long is lost
_LOOK_S = 0.1
_MESSAGE_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_listeners: list[socket.socket] = []


def build_guard(number: int) -> list[str]:
    """The first words of a command that gets this signal when its parent ends."""
    return [sys.executable, "-IS", "-c", _GUARD.format(int(number))]


def find_version(package: str) -> str:
    """The version of a package, without its import, which takes seconds for torch; empty where there is none."""
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def list_addresses() -> dict[str, list[str]]:
    """The addresses of each interface that has one: its first IPv4 address, then those of IPv6 that need no scope."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = [socket.inet_ntoa(answer[20:24])]
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6", encoding="utf-8") as file:
        for digits, _, _, scope, _, name in map(str.split, file):
            if scope != "20":  # not local to the link
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def tell_facts(folder: str, program: str, script: str) -> dict[str, Any]:
    """What this host has. `program` and `script` are looked for from `folder`, in which the ranks are to run."""
    missing = ""
    try:
        os.chdir(folder)
    except OSError as error:
        missing = str(error.strerror)
    return {
        "python": platform.python_version(), "torch": find_version("torch"), "paceline": find_version("paceline"),
        "folder": missing,
        "program": not program or shutil.which(program) is not None,
        "script": not script or os.path.exists(script),
        "free_bytes": {place: shutil.disk_usage(place).free for place in (os.getcwd(), tempfile.gettempdir())},
        "addresses": list_addresses(),
        "reached_at": os.environ.get("SSH_CONNECTION", "- - 127.0.0.1").split()[2],
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
    }  # fmt: skip


def tell_route(address: str) -> dict[str, Any]:
    """The interface, and its address, by which packets leave for this address; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(place)
        here = asked.getsockname()[0]
    return {"address": here, "interface": next((n for n, found in list_addresses().items() if here in found), "")}


def tell_time() -> dict[str, Any]:
    return {"time_s": time.time()}


def listen(address: str, port: int) -> dict[str, Any]:
    """Listen for the others, on one port at a time; 0 is one that the kernel chooses."""
    close()
    listener = socket.create_server((address, port), family=socket.getaddrinfo(address, port)[0][0])
    _listeners.append(listener)
    threading.Thread(target=_answer_messages, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def close() -> dict[str, Any]:
    """Close the port again, so that torchrun can have it."""
    while _listeners:
        _listeners[-1].shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, and that would keep it open
        _listeners.pop().close()
    return {}


def _answer_messages(listener: socket.socket) -> None:
    """One connection after the other. A message is its length and as many bytes, and is answered by one byte."""
    place = memoryview(bytearray(1 << 20))
    with contextlib.suppress(OSError):
        while True:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):  # which the other end reports
                while head := link.recv(8, socket.MSG_WAITALL):
                    left = int.from_bytes(head, "big")
                    while left > 0:
                        left -= link.recv_into(place, min(left, len(place))) or left
                    link.sendall(b"!")


def reach(places: list[tuple[str, int]], source: str, timeout_s: float) -> dict[str, Any]:
    """Why each of these addresses and ports cannot be connected to from the address `source`; "" where it can."""

    def find_error(place: tuple[str, int]) -> str:
        try:
            with socket.create_connection((place[0], place[1]), timeout_s, (source, 0)):
                return ""
        except OSError as error:
            return error.strerror or str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as workers:
        return {"errors": list(workers.map(find_error, places))}


def time_messages(address: str, port: int, source: str, limit_bytes: int, budget_s: float) -> dict[str, Any]:
    """Seconds of messages to another host until their answers: those of one byte, and those of `num_bytes`, as many as
    take a part of the budget, and much longer than one byte."""

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
    """Kill the children, and what becomes a child by the death of its parent, until there is none."""
    until_s = time.monotonic() + 5.0
    with contextlib.suppress(ChildProcessError):  # there is none
        while time.monotonic() < until_s:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for path in glob.glob("/proc/self/task/*/children"):
                with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                    for number in file.read().split():
                        os.kill(int(number), signal.SIGKILL)
            time.sleep(0.01)


def run(arguments: list[str], variables: dict[str, str], grace_s: float, requests: queue.SimpleQueue[Any]) -> int:
    """Run a command until it ends, the launcher asks to `end` or `kill` it, or is lost; then nothing of it is left.

    Returns the exit code.
    """
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
    code = child.returncode  # now: below, all children are waited for
    _end_children()
    return 137 if code is None else 128 - code if code < 0 else code


def serve(logs: str) -> NoReturn:
    """Answer requests, then run what the last one says, with a folder for its logs."""
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
        os.write(1, f"\n{MARK}{text}\n".encode())  # after what a login script printed
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
    os._exit(code)  # the thread that reads would hold up an ordinary exit


def main() -> NoReturn:
    """Serve in a child. Whichever of the two is killed, the other one ends the ranks: the parent adopts what the child
    leaves, and the child finds its input closed. Where both are killed, the guard of each program ends it."""
    logs = ""
    with contextlib.suppress(OSError):  # a disk that is full is reported with the facts
        logs = tempfile.mkdtemp(prefix="paceline-run-")
    child = os.fork()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: adopt what loses its parent
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
