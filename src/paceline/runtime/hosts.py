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

_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")  # lost is noticed after 15 s
CHECK_S = 5.0  # how long all questions to a host may take, from the start of ssh on
_FOR_PYTHON = ("PYTHON", "PATH", "LD_")  # variables that decide what the agent finds
_BEAT_S = 5.0
_LOOK_S = 0.05
_KILL_S = 3.0  # how long torchrun may take to kill ranks, once their grace is over
_AFTERMATH_S = 1.0  # after the first failure, for the others to say what they know: one of them may be the cause
_LEAVE_S = 3.0  # how long ssh may take to end once its agent has
_HANG_UP_S = 0.5  # the same where nothing was started, so that its end can do no harm
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


def split_words(option: str, text: str) -> list[str]:
    """The words of an option, as a shell reads them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {str(error).lower()}; quote it as for a shell") from None


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

    def __init__(
        self, name: str, ssh: Sequence[str], python: str, variables: Mapping[str, str], limit_s: float = CHECK_S
    ) -> None:
        self.name, self._python, self._limit_s, self._number = name, python, limit_s, 0
        self._until_s = time.monotonic() + limit_s
        self.show: Show | None = None  # who gets the output, once the ranks were started
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._said: list[str] = []
        self._showing: set[str] = set()
        source = Path(agent.__file__).read_bytes()
        begin = f"import sys; exec(sys.stdin.buffer.read({len(source)}))"
        # The others, which may be secret, come with the request to run: a command line is seen by all users of a host.
        own = [f"{key}={value}" for key, value in variables.items() if key.startswith(_FOR_PYTHON)]
        there = shlex.join(["env", *own, python, "-c", begin])
        try:
            self._process = subprocess.Popen(
                [*ssh, *_OPTIONS, f"-oConnectTimeout={max(1, round(0.6 * limit_s))}", name, there],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
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
                    self._showing.add(stream)
                    try:
                        if text.startswith(f"[{self.name}:"):
                            self.show(stream, text)
                        elif not is_frame:  # those of torchrun itself say nothing about the ranks
                            self.show(stream, f"[{self.name}] {text}")
                    finally:
                        self._showing.discard(stream)
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

    @property
    def left_s(self) -> float:
        """What is left of the time for questions."""
        return max(0.0, self._until_s - time.monotonic())

    def ask(self, ask: str, limit_s: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a request and return its answer; LaunchError where the host cannot be reached, or refuses it.

        `limit_s` is for questions that do not share the time of the others.
        """
        self._number += 1
        self.tell(ask, number=self._number, **values)
        until_s = self._until_s if limit_s is None else time.monotonic() + limit_s
        answer: dict[str, Any] | None = {"number": 0}
        while answer is not None and answer["number"] != self._number:  # an earlier question's, which came too late
            try:
                answer = self._answers.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                text = f"no answer within {limit_s or self._limit_s:g} s: try `ssh {self.name} true`"
                more = "" if limit_s else ", or give it longer with --check-timeout"
                raise LaunchError(f"host {self.name}: {text}{more}", code="timeout") from None
        if answer is None:
            self._answers.put(None)  # for the next question
            self._join()
            raise explain_end(self.name, self._process.wait(), "".join(self._said), self._python)
        if "error" in answer:
            raise LaunchError(f"host {self.name}: {answer['error']}", code="refused")
        return answer

    @property
    def code(self) -> int | None:
        """The exit code of what runs there; None while it does, 255 where the connection is lost."""
        return self._process.poll()

    def _join(self, all_of_it: bool = True) -> None:
        """Wait until the output was read, `all_of_it` however slowly it is shown. It need not end with ssh, which may
        keep a connection for later (ControlPersist)."""
        until_s = time.monotonic() + _LEAVE_S
        while any(reader.is_alive() for reader in self._readers) and time.monotonic() < until_s:
            if all_of_it and self._showing:
                until_s = time.monotonic() + _LEAVE_S
            time.sleep(_LOOK_S / 10)

    def hang_up(self) -> None:
        """Ask for the end of the connection, and with it of the agent and its ranks."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, until_s: float) -> None:
        """Wait for the end of the connection, and end it then; does nothing the second time."""
        has_ended = True
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            has_ended = False
            self._process.kill()
            self._process.wait()
        self._join(all_of_it=has_ended)


@contextlib.contextmanager
def open_agents(
    names: Iterable[str], ssh: str = "ssh", python: str = "", variables: Mapping[str, str] | None = None,
    limit_s: float = CHECK_S,
) -> Iterator[list[Agent]]:  # fmt: skip
    """An agent on every host, being connected; who asks one finds out whether it could be reached, within `limit_s`."""
    words = split_words("--ssh", ssh)
    refuse((not words, "--ssh is empty: write how to call ssh, as in --ssh 'ssh -p 2222'"))
    agents: list[Agent] = []
    try:
        for name in names:  # one by one: those that were started are ended where another cannot be
            agents += [Agent(name, words, python or sys.executable, variables or {}, limit_s)]
        yield agents
    finally:
        close_agents(agents)


def close_agents(agents: Iterable[Agent]) -> None:
    """End the connections, all at a time; does nothing the second time."""
    for one in agents:
        one.hang_up()
    until_s = time.monotonic() + (_LEAVE_S if any(one.show for one in agents) else _HANG_UP_S)
    for one in agents:
        one.close(until_s)


def ask_all(agents: Sequence[Agent], ask: Callable[[Agent], T]) -> list[T | PacelineError]:
    """What a function returns for each agent, all at a time, or the error that it raises."""

    def call(one: Agent) -> T | PacelineError:
        try:
            return ask(one)
        except PacelineError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(max(1, len(agents))) as workers:
        try:
            return list(workers.map(call, agents))
        except BaseException:  # an interrupt: nobody waits for the answers
            close_agents(agents)
            raise


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
            agent.GUARD, python, "-m", "torch.distributed.run", "--nnodes", str(len(ranks)), "--node-rank", str(number),
            "--nproc-per-node", str(count), "--master-addr", address, "--master-port", str(port),
            "--tee", "3", "--log-dir", agent.LOGS, "--no-python", agent.GUARD,
        ]  # fmt: skip
        own = {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{name}:${{rank}}] ",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_s)),
            "PYTHONUNBUFFERED": "1",  # torchrun reads what ranks print from files
        }
        if interface := interfaces[name]:
            own |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        arguments, patience_s = [*torchrun, *program], grace_s + _KILL_S
        requests.append({"arguments": arguments, "variables": {**own, **variables}, "grace_s": patience_s})
    return requests


def run_agents(agents: Sequence[Agent], requests: Sequence[dict[str, Any]], show: Show, grace_s: float) -> int:
    """Run every agent's request, show the output of all, and return the exit code of the first that failed, or 0.

    Once one has failed, or with the first Ctrl-C or SIGTERM, all are asked to end, and may take `grace_s` to save; a
    second signal ends them at once. So does nobody who reads the output (`| head`): BrokenPipeError.
    """
    signals, asked_s, failed_s, unread = list[int](), list[float](), dict[Agent, float](), list[BrokenPipeError]()

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
        show_line("err", "paceline: ending all hosts; interrupt once more to end them at once\n")
        end()

    def look() -> bool:
        """Note who has failed, and when; whether any still runs."""
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
        if one.code == 255 or (one.code or 0) < 0:  # by ssh itself: what failed earlier may have been its victim
            raise LaunchError(f"lost the connection to host {one.name}: all hosts were ended", code="host-lost")
    for one in failed_s:
        show("err", f"paceline: host {one.name} ended first, with code {one.code}: its lines are above\n")
        return one.code or 1
    return 0
