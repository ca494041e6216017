"""Several hosts over ssh: an agent on each, ranks by torchrun, one output, and nothing left behind on any of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.errors import ConfigError, LaunchError, PacelineError, refuse
from paceline.runtime import agent
from paceline.runtime.launch import handle_requests

T = TypeVar("T")
# ("out" or "err", text): what is to be shown, a line or more at a time.
Show = Callable[[str, str], None]

_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3", "-o", "ServerAliveInterval=5", "-o",
    "ServerAliveCountMax=3",  # a lost host is noticed after 15 s
)  # fmt: skip
_ANSWER_S = 20.0
_BEAT_S = 5.0
_LOOK_S = 0.05
_AFTERMATH_S = 1.0  # after the first failure, for the others to say what they know: one of them may be the cause
_LEAVE_S = 3.0  # how long ssh may take to end once its agent has
# What ssh prints, the code of the error, what was found, and what to do. The first that matches counts.
_SSH_SAYS = (
    ("IDENTIFICATION HAS CHANGED", "host-key", "its host key is not the known one",
     "if the host was set up anew, run `ssh-keygen -R {0}`, then `ssh {0}` once"),
    ("Host key verification failed", "host-key", "its host key is not known here", "check it and run `ssh {0}` once"),
    ("Permission denied", "no-key", "it accepts no key of this user", "run `ssh-copy-id {0}` once"),
    ("Could not resolve", "name", "the name does not resolve", "check its spelling, /etc/hosts and ~/.ssh/config"),
    ("Connection refused", "port", "its ssh port is closed", "start sshd there, or give the port: --ssh 'ssh -p PORT'"),
    ("timed out", "port", "its ssh port does not answer", "check that the host is up and that no firewall is between"),
    ("SyntaxError", "no-python", "its Python is too old", "install Python 3.11 or newer, or give it with --python"),
    ("No route to host", "port", "there is no route to it", "check that the host is up, and the network between"),
)  # fmt: skip


def parse_hosts(text: str) -> dict[str, int | None]:
    """`a:8,user@b:8,[fe80::1]:2`: hosts, each with its number of ranks, or None where it is left out."""
    hosts: dict[str, int | None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*((?:[\w.-]+@)?(?:\w[\w.%-]*|\[[\w:.%]+\]))(?::(\d+))?\s*", part)
        if not match or match[2] == "0":
            raise ConfigError(f"--hosts {text!r}: {part.strip()!r} is no host; write NAME or NAME:RANKS, as in a:8,b:8")
        name = match[1].replace("[", "").replace("]", "")
        refuse((name in hosts, f"--hosts {text!r} has {name} twice: give all its ranks at once, as in {name}:2"))
        hosts[name] = int(match[2]) if match[2] else None
    return hosts


def explain_end(host: str, code: int, said: str, python: str) -> LaunchError:
    """Why a connection ended before the agent answered, from ssh's exit code and what it printed."""
    if code in (126, 127):
        text = f"there is no Python at {python}: install it there, or give another with --python"
        return LaunchError(f"host {host}: {text}", code="no-python")
    for words, name, found, advice in _SSH_SAYS:
        if words in said:
            return LaunchError(f"host {host}: {found}: {advice.format(host)}", code=name)
    last = next(iter(said.strip().splitlines()[-1:]), "nothing was printed")
    return LaunchError(f"host {host}: ssh ended with code {code} ({last}): try `ssh {host} true`", code="ssh")


class Agent:
    """The launcher's end of the connection to one host. The agent there ends with the connection."""

    def __init__(self, name: str, ssh: Sequence[str], python: str, variables: Mapping[str, str]) -> None:
        self.name, self._python = name, python
        self.show: Show | None = None  # who gets the output, once the ranks were started
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: list[str] = []
        source = Path(agent.__file__).read_bytes()
        begin = f"import sys; exec(sys.stdin.buffer.read({len(source)}))"
        there = shlex.join(["env", *(f"{key}={value}" for key, value in variables.items()), python, "-c", begin])
        try:
            self._process = subprocess.Popen(
                [*ssh, *_OPTIONS, name, there], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the launcher
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"cannot run {ssh[0]}: {error.strerror}; install ssh, or give it with --ssh") from None
        outputs = (("out", self._process.stdout), ("err", self._process.stderr))
        self._readers = [threading.Thread(target=self._read, args=output, daemon=True) for output in outputs]
        for reader in self._readers:
            reader.start()
        self._write(source)

    def _read(self, stream: str, pipe: IO[bytes]) -> None:
        is_frame = False
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                is_frame = text.startswith("Traceback") or (is_frame and text.startswith(" "))
                if self.show is not None:
                    if text.startswith(f"[{self.name}:"):
                        self.show(stream, text)
                    elif not is_frame:  # those of torchrun itself say nothing about the ranks
                        self.show(stream, f"[{self.name}] {text}")
                elif stream == "err":
                    self._said.append(text)
                elif text.startswith(agent.MARK):  # else it is from a login script
                    self._answers.put(json.loads(text[len(agent.MARK) :]))
        if stream == "out":
            self._answers.put(None)

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the connection is gone: who waits for an answer finds out why
            while content:  # not buffered: a signal may come in the middle, and its handler writes, too
                content = content[os.write(self._process.stdin.fileno(), content) :]

    def tell(self, ask: str, **values: Any) -> None:
        """Send a request that has no answer."""
        self._write(json.dumps({"ask": ask, **values}).encode() + b"\n")

    def ask(self, ask: str, **values: Any) -> dict[str, Any]:
        """Send a request and return its answer; LaunchError where the host cannot be reached, or refuses it."""
        self.tell(ask, **values)
        try:
            answer = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            text = f"host {self.name} did not answer within {_ANSWER_S:g} s: is it overloaded?"
            raise LaunchError(text, code="timeout") from None
        if answer is None:
            self._answers.put(None)  # for the next question
            self._join()
            raise explain_end(self.name, self._process.wait(), "".join(self._said), self._python)
        if "error" in answer:
            raise LaunchError(f"host {self.name}: {answer['error']}", code="refused")
        return dict(answer)

    @property
    def code(self) -> int | None:
        """The exit code of what runs there; None while it does, 255 where the connection is lost."""
        return self._process.poll()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(_LEAVE_S)

    def close(self) -> None:
        """End the connection, and with it the agent and its ranks; does nothing the second time."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        self._process.kill()
        self._process.wait()
        self._join()


@contextlib.contextmanager
def open_agents(
    names: Iterable[str], ssh: str = "ssh", python: str = "", variables: Mapping[str, str] | None = None
) -> Iterator[list[Agent]]:
    """An agent on every host, being connected; who asks one finds out whether it could be reached."""
    with contextlib.ExitStack() as stack:
        agents = []
        for name in names:
            agents.append(Agent(name, shlex.split(ssh), python or sys.executable, variables or {}))
            stack.callback(agents[-1].close)
        yield agents


def ask_all(agents: Sequence[Agent], ask: Callable[[Agent], T]) -> list[T | PacelineError]:
    """What a function returns for each agent, all at a time, or the error that it raises."""

    def call(one: Agent) -> T | PacelineError:
        try:
            return ask(one)
        except PacelineError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, len(agents))) as workers:
        return list(workers.map(call, agents))


def build_program(command: Sequence[str], python: str) -> list[str]:
    """The command that a rank runs: `python`, `paceline` and a script run in this interpreter."""
    first, rest = command[0], list(command[1:])
    name = first.rpartition("/")[2]
    inside = "run starts the ranks itself: leave it out, and give the number of ranks to run"
    refuse((name in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun"), f"{name} inside of run: {inside}"))
    if first in ("python", "python3"):
        return [python, *rest]
    if first == "paceline":
        return [python, "-m", "paceline", *rest]
    return [python, first, *rest] if first.endswith(".py") else [first, *rest]


def build_requests(
    program: Sequence[str], python: str, ranks: Mapping[str, int], interfaces: Mapping[str, str], address: str,
    port: int, variables: Mapping[str, str], grace_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each host runs: torchrun, with a prefix for every line of its ranks. All meet at this address and port."""
    requests = []
    for number, (name, count) in enumerate(ranks.items()):
        torchrun = [
            python, "-m", "torch.distributed.run", "--nnodes", str(len(ranks)), "--node-rank", str(number),
            "--nproc-per-node", str(count), "--master-addr", address, "--master-port", str(port),
            "--tee", "3", "--log-dir", agent.LOGS, "--no-python",
        ]  # fmt: skip
        own = {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{name}:${{rank}}] ",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_s)),
            "PYTHONUNBUFFERED": "1",  # torchrun reads what ranks print from files
        }
        if interface := interfaces[name]:
            own |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        requests.append({"arguments": [*torchrun, *program], "variables": {**own, **variables}, "grace_s": grace_s})
    return requests


def run_agents(agents: Sequence[Agent], requests: Sequence[dict[str, Any]], show: Show, grace_s: float) -> int:
    """Run every agent's request, show the output of all, and return the exit code of the first that failed, or 0.

    Once one has failed, or with the first Ctrl-C or SIGTERM, all are asked to end, and may take `grace_s` to save; a
    second signal ends them at once.
    """
    signals, asked_s, failed_s = list[int](), list[float](), dict[Agent, float]()

    def end(ask: str = "end") -> None:
        asked_s.append(time.monotonic())
        for one in agents:
            one.tell(ask)

    def stop(number: int) -> None:
        signals.append(number)
        show("err", "paceline: ending all hosts; interrupt once more to end them at once\n")
        end()

    def look() -> bool:
        """Note who has failed, and when; whether any still runs."""
        codes = {one: one.code for one in agents}
        for one, code in codes.items():
            if code:
                failed_s.setdefault(one, time.monotonic())
        return None in codes.values()

    for one, request in zip(agents, requests, strict=True):
        one.show = show
        one.tell("run", **request)
    beat_s = time.monotonic()
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    with handle_requests(stop, lambda _: end("kill"), *wanted):
        while look():
            now_s = time.monotonic()
            if failed_s and not asked_s and now_s - min(failed_s.values()) > _AFTERMATH_S:
                end()
            if asked_s and now_s - asked_s[0] > grace_s + 2 * _LEAVE_S:  # an agent that is stuck itself
                break
            if now_s - beat_s > _BEAT_S:
                beat_s = now_s
                for one in agents:
                    one.tell("beat")
            time.sleep(_LOOK_S)
    for one in agents:
        one.close()
    if signals:
        return 128 + signals[0]
    for one in failed_s:
        if one.code == 255 or (one.code or 0) < 0:  # by ssh itself: what failed earlier may have been its victim
            raise LaunchError(f"lost the connection to host {one.name}: all hosts were ended", code="host-lost")
    for one in failed_s:
        show("err", f"paceline: host {one.name} ended first, with code {one.code}: its lines are above\n")
        return one.code or 1
    return 0
