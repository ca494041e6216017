"""Runs ranks on several hosts over ssh: an agent on each starts torchrun, forwards its output, and cleans up."""

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
from subprocess import PIPE
from typing import IO, Any, TypeVar

from paceline.errors import ConfigError, LaunchError, PacelineError, refuse
from paceline.runtime.hosts import agent
from paceline.runtime.ranks.launch import handle_requests

T = TypeVar("T")
# A function of "out" or "err" and one or more lines of text.
Show = Callable[[str, str], None]

# The last two detect a lost connection within 15 s.
_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
CHECK_S = 5.0  # time limit for all checks of a host, from the start of ssh
_FOR_PYTHON = ("PYTHON", "PATH", "LD_")  # prefixes of variables that affect the agent's findings
_BEAT_S = 5.0
_LOOK_S = 0.05
_KILL_S = 3.0  # time for torchrun to kill ranks after their grace period
_AFTERMATH_S = 1.0  # after the first failure, wait for reports of other hosts, one of which may be the cause
_LEAVE_S = 3.0  # time for ssh to exit after its agent
_HANG_UP_S = 0.5  # time for ssh to exit if no ranks were started, when killing ssh is harmless
# Text that ssh prints, the error code, the finding, and the advice. The first match is used.
_SSH_SAYS = (
    ("IDENTIFICATION HAS CHANGED", "host-key", "its host key has changed",
     "if the host was reinstalled, run `ssh-keygen -R {0}`, then `ssh {0}` once"),
    ("Host key verification failed", "host-key", "its host key is not known here", "check it and run `ssh {0}` once"),
    ("Permission denied", "no-key", "it does not accept this user's keys", "run `ssh-copy-id {0}` once"),
    ("Could not resolve", "name", "the name does not resolve", "check its spelling, /etc/hosts and ~/.ssh/config"),
    ("Connection refused", "port", "its ssh port is closed", "start sshd, or use another port: --ssh 'ssh -p PORT'"),
    ("timed out", "port", "its ssh port does not answer", "check that the host is up and that no firewall blocks it"),
    ("SyntaxError", "no-python", "its Python is too old", "install Python 3.11 or newer, or point to it with --python"),
    ("No route to host", "port", "there is no route to it", "check that the host is up, and the network"),
)  # fmt: skip


def parse_hosts(text: str) -> dict[str, int | None]:
    """Parse `a:8,user@b:8,[fe80::1]:2` into hosts and their numbers of ranks; None where omitted."""
    hosts: dict[str, int | None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*((?:[\w.-]+@)?(?:\w[\w.%-]*|\[[\w:.%]+\]))(?::(\d+))?\s*", part)
        if not match or match[2] == "0":
            what = f"--hosts {text!r}: {part.strip()!r} is not a host"
            raise ConfigError(f"{what}; write NAME or NAME:RANKS, as in a:8,b:8")
        name = match[1].replace("[", "").replace("]", "")
        refuse((name in hosts, f"--hosts {text!r} lists {name} twice: give all its ranks at once, as in {name}:2"))
        hosts[name] = int(match[2]) if match[2] else None
    return hosts


def split_words(option: str, text: str) -> list[str]:
    """Split an option into words, as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {str(error).lower()}; quote it as in a shell") from None


def explain_end(host: str, code: int, said: str, python: str) -> LaunchError:
    """Why a connection ended before the agent answered, from ssh's exit code and output."""
    if code in (126, 127):
        text = f"no Python at {python}: install it there, or use another with --python"
        return LaunchError(f"host {host}: {text}", code="no-python")
    for words, name, found, advice in _SSH_SAYS:
        if words in said:
            return LaunchError(f"host {host}: {found}: {advice.format(host)}", code=name)
    last = next(iter(said.strip().splitlines()[-1:]), "no output")
    return LaunchError(f"host {host}: ssh ended with code {code} ({last}): try `ssh {host} true`", code="ssh")


class Agent:
    """The launcher's end of the connection to one host. The remote agent exits with the connection."""

    def __init__(
        self, name: str, ssh: Sequence[str], python: str, variables: Mapping[str, str], limit_s: float = CHECK_S
    ) -> None:
        self.name = name
        self._python = python
        self._limit_s = limit_s
        self._number = 0  # of the last request
        self._until_s = time.monotonic() + limit_s
        self.show: Show | None = None  # receives the output once the ranks have been started
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: list[str] = []
        self._showing: set[str] = set()
        source = Path(agent.__file__).read_bytes()
        begin = f"import sys; exec(sys.stdin.buffer.read({len(source)}))"
        # The other variables may be secret. They come with the request to run, because all users of a host see command
        # lines.
        own = [f"{key}={value}" for key, value in variables.items() if key.startswith(_FOR_PYTHON)]
        there = shlex.join(["env", *own, python, "-c", begin])
        words = [*ssh, *_OPTIONS, f"-oConnectTimeout={max(1, round(0.6 * limit_s))}", name, there]
        try:  # in a separate session, so that Ctrl-C reaches only the launcher
            self._process = subprocess.Popen(words, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"cannot run {ssh[0]}: {error.strerror}; install ssh, or name it with --ssh") from None
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
                    self._showing.add(stream)
                    try:
                        if text.startswith(f"[{self.name}:"):
                            self.show(stream, text)
                        elif not is_frame:  # torchrun's own stack frames do not concern the ranks
                            self.show(stream, f"[{self.name}] {text}")
                    finally:
                        self._showing.discard(stream)
                elif stream == "err":
                    self._said.append(text)
                elif text.startswith(agent.MARK):  # other lines are from a login script
                    self._answers.put(json.loads(text[len(agent.MARK) :]))
        if stream == "out":
            self._answers.put(None)

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the connection is lost; `ask` will find out why
            while content:  # unbuffered, because a signal handler may write in between
                content = content[os.write(self._process.stdin.fileno(), content) :]

    def tell(self, ask: str, **values: Any) -> None:
        """Send a request without waiting for an answer."""
        self._write(json.dumps({"ask": ask, **values}).encode() + b"\n")

    @property
    def left_s(self) -> float:
        """The seconds left for checks."""
        return max(0.0, self._until_s - time.monotonic())

    def ask(self, ask: str, limit_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer; LaunchError if the host cannot be reached or refuses it.

        `limit_s` replaces the time limit that all checks share.
        """
        self._number += 1
        self.tell(ask, number=self._number, **values)
        until_s = self._until_s if limit_s is None else time.monotonic() + limit_s
        answer: dict[str, Any] | None = {"number": 0}
        while answer is not None and answer["number"] != self._number:  # skip late answers to earlier requests
            try:
                answer = self._answers.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                text = f"no answer within {limit_s or self._limit_s:g} s: try `ssh {self.name} true`"
                more = "" if limit_s else ", or raise --check-timeout"
                raise LaunchError(f"host {self.name}: {text}{more}", code="timeout") from None
        if answer is None:
            self._answers.put(None)  # for the next request
            self._join()
            raise explain_end(self.name, self._process.wait(), "".join(self._said), self._python)
        if "error" in answer:
            raise LaunchError(f"host {self.name}: {answer['error']}", code="refused")
        return answer

    @property
    def code(self) -> int | None:
        """The exit code of the remote command; None while it runs, 255 if the connection was lost."""
        return self._process.poll()

    def _join(self, all_of_it: bool = True) -> None:
        """Wait until the output has been read; with `all_of_it`, no matter how slowly it is shown. ssh may leave the
        pipes open."""
        until_s = time.monotonic() + _LEAVE_S
        while any(reader.is_alive() for reader in self._readers) and time.monotonic() < until_s:
            if all_of_it and self._showing:
                until_s = time.monotonic() + _LEAVE_S
            time.sleep(_LOOK_S / 10)

    def hang_up(self) -> None:
        """Close our end, which makes the agent terminate its ranks and exit."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, until_s: float) -> None:
        """Wait for ssh to exit and kill it at `until_s`. Idempotent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until_s - time.monotonic()))
        has_ended = self.code is not None
        self._process.kill()  # does nothing once ssh has exited
        self._process.wait()
        self._join(all_of_it=has_ended)


@contextlib.contextmanager
def open_agents(
    names: Iterable[str],
    ssh: str = "ssh",
    python: str = "",
    variables: Mapping[str, str] | None = None,
    limit_s: float = CHECK_S,
) -> Iterator[list[Agent]]:
    """Start connecting to an agent on every host. `ask` raises an error if a host is not reached within `limit_s`."""
    words = split_words("--ssh", ssh)
    refuse((not words, "--ssh is empty: give the ssh command, as in --ssh 'ssh -p 2222'"))
    agents: list[Agent] = []
    try:
        for name in names:  # one by one, so that those already started are closed if one fails
            agents += [Agent(name, words, python or sys.executable, variables or {}, limit_s)]
        yield agents
    finally:
        close_agents(agents)


def close_agents(agents: Iterable[Agent]) -> None:
    """Close all connections in parallel. Idempotent."""
    for one in agents:
        one.hang_up()
    until_s = time.monotonic() + (_LEAVE_S if any(one.show for one in agents) else _HANG_UP_S)
    for one in agents:
        one.close(until_s)


def ask_all(agents: Sequence[Agent], ask: Callable[[Agent], T]) -> list[T | PacelineError]:
    """Call a function on every agent in parallel. Returns its results, or the errors that it raised."""

    def call(one: Agent) -> T | PacelineError:
        try:
            return ask(one)
        except PacelineError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, len(agents))) as workers:
        try:
            return list(workers.map(call, agents))
        except BaseException:  # an interrupt: do not wait for the answers
            close_agents(agents)
            raise


def build_program(command: Sequence[str], python: str) -> list[str]:
    """The command of a rank, with `python`, `paceline` and scripts run by this interpreter."""
    first, *rest = command
    name = first.rpartition("/")[2]
    if name in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun"):
        hint = "`paceline run` starts the ranks itself: leave it out, and give the number of ranks to `paceline run`"
        raise ConfigError(f"{name} inside `paceline run`: {hint}")
    if first in ("python", "python3"):
        return [python, *rest]
    if first == "paceline":
        return [python, "-m", "paceline", *rest]
    return [python, first, *rest] if first.endswith(".py") else [first, *rest]


def build_requests(
    program: Sequence[str], python: str, ranks: Mapping[str, int], interfaces: Mapping[str, str], address: str,
    port: int, variables: Mapping[str, str], grace_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """The request for each host: torchrun with a prefix for its ranks' output. All ranks meet at `address`:`port`."""
    requests = []
    for number, (name, count) in enumerate(ranks.items()):
        place = f"--nnodes {len(ranks)} --node-rank {number} --nproc-per-node {count}"
        options = f"{place} --master-addr {address} --master-port {port} --tee 3".split()
        torchrun = [agent.GUARD, python, "-m", "torch.distributed.run", *options]
        torchrun += ["--log-dir", agent.LOGS, "--no-python", agent.GUARD]
        own = {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{name}:${{rank}}] ",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_s)),
            "PYTHONUNBUFFERED": "1",  # torchrun reads the output of ranks from files
        }
        if interface := interfaces[name]:
            own |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        request = {"arguments": [*torchrun, *program], "variables": {**own, **variables}, "grace_s": grace_s + _KILL_S}
        requests.append(request)
    return requests


def run_agents(agents: Sequence[Agent], requests: Sequence[dict[str, Any]], show: Show, grace_s: float) -> int:
    """Run every agent's request, show all output, and return the exit code of the first that failed, or 0.

    When one fails, or on the first Ctrl-C or SIGTERM, all are asked to end and get `grace_s` to save; a second signal
    kills them. All are also asked to end, with BrokenPipeError, when nothing reads the output any longer (`| head`).
    """
    signals: list[int] = []
    asked_s: list[float] = []
    failed_s: dict[Agent, float] = {}
    unread: list[BrokenPipeError] = []

    def show_line(stream: str, text: str) -> None:
        try:
            show(stream, text)
        except BrokenPipeError as error:
            unread.append(error)

    def end(ask: str = "end") -> None:
        asked_s.append(time.monotonic())
        for one in agents:
            one.tell(ask)

    def stop(number: int) -> None:
        signals.append(number)
        show_line("err", "paceline: ending all hosts; interrupt again to kill them\n")
        end()

    def look() -> bool:
        """Record new failures. Returns whether any host is still running."""
        codes = {one: one.code for one in agents}
        for one, code in codes.items():
            if code:
                failed_s.setdefault(one, time.monotonic())
        return None in codes.values()

    for one, request in zip(agents, requests, strict=True):
        one.show = show_line
        one.tell("run", **request)
    beat_s = time.monotonic()
    wanted = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    with handle_requests(stop, lambda _: end("kill"), *wanted):
        while look():
            now_s = time.monotonic()
            if not asked_s and (unread or (failed_s and now_s - min(failed_s.values()) > _AFTERMATH_S)):
                end()
            if asked_s and now_s - asked_s[0] > grace_s + _KILL_S + 2 * _LEAVE_S:  # an agent is stuck
                break
            if now_s - beat_s > _BEAT_S:
                beat_s = now_s
                for one in agents:
                    one.tell("beat")
            time.sleep(_LOOK_S)
    close_agents(agents)
    if signals:
        return 128 + signals[0]
    if unread:
        raise unread[0]
    for one in failed_s:
        if one.code == 255 or (one.code or 0) < 0:  # ssh itself failed; earlier failures may be a consequence
            raise LaunchError(f"lost the connection to host {one.name}: ended all hosts", code="host-lost")
    for one in failed_s:
        show("err", f"paceline: host {one.name} failed first, with code {one.code}: see its output above\n")
        return one.code or 1
    return 0
