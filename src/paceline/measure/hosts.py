"""Are these hosts ready to train together? What each has, how they reach each other, and how fast their links are."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError, PacelineError
from paceline.records.kinds import CheckRecord, LinkRecord, Record
from paceline.records.samples import Samples
from paceline.runtime.hosts import Agent, Meeting, ask_all
from paceline.units import GIB, MIB, format_duration, format_memory

_ASKS = 5  # for the time; the quickest answer counts
_SKEW_S = 0.5
_FULL_BYTES, _LITTLE_BYTES = 100 * MIB, 2 * GIB
_BUDGET_S = 0.4  # of large messages, on each link
_OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Surveyed:
    """What one host said. `offset_s` is how much its clock is ahead of the launcher's, to within `within_s`."""

    name: str
    facts: dict[str, Any]
    offset_s: float
    within_s: float
    answered_s: float
    address: str = ""
    interface: str = ""


@dataclass(frozen=True)
class Wanted:
    """What the hosts are to run: in which folder, which program and script, over which interface and port ("" and 0:
    as they choose); whether it needs Paceline there."""

    folder: str
    program: str = ""
    script: str = ""
    interface: str = ""
    port: int = 0
    needs_paceline: bool = True


def survey_hosts(agents: Sequence[Agent], wanted: Wanted) -> list[Surveyed | PacelineError]:
    """Ask every host for what it has, all at a time; the error of one that could not be reached."""
    begin_s = time.monotonic()

    def ask(agent: Agent) -> Surveyed:
        facts = agent.ask("facts", folder=wanted.folder, program=wanted.program, script=wanted.script)
        answered_s = time.monotonic() - begin_s
        times = []
        for _ in range(_ASKS):
            sent_s = time.time()
            theirs_s = agent.ask("time")["time_s"]
            back_s = time.time()
            times.append(((back_s - sent_s) / 2, theirs_s - (sent_s + back_s) / 2))
        within_s, offset_s = min(times)
        return Surveyed(agent.host.name, facts, offset_s, within_s, answered_s)

    found = ask_all(agents, ask)
    reached = {one.name: one.facts["reached_at"] or "127.0.0.1" for one in found if isinstance(one, Surveyed)}

    def choose(agent: Agent) -> Surveyed:
        """The address at which others reach this host: that of the interface, or of the route to another host."""
        one = next(one for one in found if isinstance(one, Surveyed) and one.name == agent.host.name)
        own = one.facts["addresses"]
        if wanted.interface:
            return dataclasses.replace(one, address=own.get(wanted.interface, [""])[0], interface=wanted.interface)
        others = [address for name, address in reached.items() if name != one.name] or [reached[one.name]]
        far = next((address for address in others if not address.startswith("127.")), others[0])
        route = agent.ask("route", address=far)
        return dataclasses.replace(one, address=route["address"], interface=route["interface"])

    answered = [agent for agent in agents if agent.host.name in reached]
    chosen = dict(zip((agent.host.name for agent in answered), ask_all(answered, choose), strict=True))
    return [chosen[one.name] if isinstance(one, Surveyed) else one for one in found]


def _report(name: str, found: str, advice: str = "", status: str = "fail") -> CheckRecord:
    return CheckRecord(name=name, status=status if advice else "ok", found=found, advice=advice)


def check_survey(
    names: Sequence[str], surveyed: Sequence[Surveyed | PacelineError], wanted: Wanted
) -> Iterator[CheckRecord]:
    """One check for each thing that a host needs. Versions are compared with those of the first host that answered."""
    first = next((one for one in surveyed if isinstance(one, Surveyed)), None)
    for name, one in zip(names, surveyed, strict=True):
        if isinstance(one, PacelineError) or first is None:
            found, _, advice = str(one).removeprefix(f"host {name}: ").partition(": ")
            yield _report(f"{name}: ssh", found, advice or "try it by hand: ssh " + name)
        else:
            yield _report(f"{name}: ssh", f"answered after {format_duration(one.answered_s)}")
            yield from _check_versions(one, first, wanted)
            yield _check_clock(one)
            yield _check_network(one, wanted)
            yield from _check_files(one, wanted)


def _check_versions(one: Surveyed, first: Surveyed, wanted: Wanted) -> Iterator[CheckRecord]:
    version = tuple(int(part) for part in one.facts["python"].split(".")[:2])
    for title, key in (("Python", "python"), ("torch", "torch"), ("Paceline", "paceline")):
        here, other = one.facts[key], first.facts[key]
        name, advice, status = f"{one.name}: {title}", "", "fail"
        if key == "python" and version < _OLDEST_PYTHON:
            advice = "Python 3.11 or newer is needed: install it there, or give it with --python"
        elif not here:
            advice = f"install it there, into the Python of the other hosts: pip install {key}"
            status = "warn" if key == "paceline" and not wanted.needs_paceline else "fail"
        elif here.split(".")[: 2 if key == "python" else None] != other.split(".")[: 2 if key == "python" else None]:
            advice = f"{first.name} has {other or 'none'}: install one version on all hosts"
            status = "warn" if key == "paceline" and not wanted.needs_paceline else "fail"
        yield _report(name, here or "not installed", advice, status)


def _check_clock(one: Surveyed) -> CheckRecord:
    side = "ahead of" if one.offset_s > 0 else "behind"
    far = abs(one.offset_s) - one.within_s > _SKEW_S
    found = f"{format_duration(abs(one.offset_s))} {side} this machine's, to within {format_duration(one.within_s)}"
    advice = "times of files and logs will not fit: set the clocks by NTP, as by `timedatectl set-ntp true`"
    return _report(f"{one.name}: clock", found, advice if far else "", "warn")


def _check_network(one: Surveyed, wanted: Wanted) -> CheckRecord:
    name, known = f"{one.name}: network", one.facts["addresses"]
    others = (
        ", ".join(key for key, found in known.items() if found[0] not in ("127.0.0.1", "::1")) or "none has an address"
    )
    if not one.address:
        return _report(name, f"no interface {wanted.interface}", f"give another with --interface: {others}")
    if not one.interface:
        found = f"{one.address}, which is not the first address of an interface"
        return _report(name, found, f"give an interface with --interface: {others}", "warn")
    return _report(name, f"{one.interface} ({one.address})")


def _check_files(one: Surveyed, wanted: Wanted) -> Iterator[CheckRecord]:
    facts = one.facts
    if facts["folder"]:
        advice = "make it there, share it between the hosts, or give another with --folder"
        yield _report(f"{one.name}: folder", f"{wanted.folder}: {facts['folder']}", advice)
        return
    for title, place, free in (
        ("disk", wanted.folder, facts["free_bytes"]),
        ("temporary files", facts["temporary"], facts["temporary_bytes"]),
    ):
        if free is not None:
            full, little = free < _FULL_BYTES, free < _LITTLE_BYTES
            advice = f"{'nothing' if full else 'little'} can be saved there: free some space"
            found = f"{format_memory(free)} free in {place}"
            yield _report(f"{one.name}: {title}", found, advice if little else "", "fail" if full else "warn")
    for title, what, is_there in (
        ("script", wanted.script, facts["script"]),
        ("program", wanted.program, facts["program"]),
    ):
        if what and not is_there:
            advice = "copy it there, or run in a folder that the hosts share (--folder)"
            yield _report(f"{one.name}: {title}", f"{what} does not exist", advice)


def check_links(agents: Sequence[Agent], surveyed: Sequence[Surveyed], wanted: Wanted) -> Iterator[Record]:
    """Connect every host to every other, and time messages, one link after the other."""
    for host, receiver in zip(agents, surveyed, strict=True):
        try:
            port = _listen(host, receiver, wanted)
            for sender, one in zip(agents, surveyed, strict=True):
                if one is not receiver:
                    yield from _check_link(sender, one, receiver, port)
            host.ask("close", port=port)
        except PacelineError as error:
            found, _, advice = str(error).partition(": ")
            yield _report(f"{receiver.name}: port", found, advice)


def find_meeting(agents: Sequence[Agent], surveyed: Sequence[Surveyed], wanted: Wanted) -> Meeting:
    """The address and port of the first host at which ranks meet, once all the others have reached it."""
    first = surveyed[0]
    port = _listen(agents[0], first, wanted)
    others = dict(zip((agent.host.name for agent in agents), surveyed, strict=True))
    for found in ask_all(agents[1:], lambda agent: _connect(agent, others[agent.host.name], first, port, 0.0)):
        if isinstance(found, PacelineError):
            raise found
    agents[0].ask("close", port=port)
    return Meeting(first.address, port, first.interface)


def _listen(host: Agent, receiver: Surveyed, wanted: Wanted) -> int:
    try:
        return int(host.ask("open", address=receiver.address, port=wanted.port)["port"])
    except LaunchError as error:
        found = f"{receiver.name} cannot listen on {receiver.address}:{wanted.port} ({_reason(error)})"
        raise LaunchError(f"{found}: end what uses it, or give another with --port", code="port") from None


def _connect(sender: Agent, one: Surveyed, receiver: Surveyed, port: int, budget_s: float) -> dict[str, Any]:
    try:
        return sender.ask("connect", address=receiver.address, port=port, source=one.address, budget_s=budget_s)
    except LaunchError as error:
        found = f"{one.name} cannot reach {receiver.name} at {receiver.address} port {port} over {one.interface}"
        advice = "open the port in the firewall (--port chooses it), or give another --interface"
        raise LaunchError(f"{found} ({_reason(error)}): {advice}", code="port") from None


def _reason(error: PacelineError) -> str:
    return str(error).rpartition(": ")[2].lower()


def _check_link(sender: Agent, one: Surveyed, receiver: Surveyed, port: int) -> Iterator[Record]:
    name = f"{one.name} to {receiver.name}"
    try:
        found = _connect(sender, one, receiver, port, _BUDGET_S)
    except PacelineError as error:
        text, _, advice = str(error).partition(": ")
        yield _report(name, text, advice)
        return
    link = LinkRecord(
        sender=one.name, receiver=receiver.name, interface=one.interface, num_bytes=found["num_bytes"],
        timing=_sample(found["long_s"], found["long_warm_s"]), short=_sample(found["short_s"], found["short_warm_s"]),
    )  # fmt: skip
    yield _report(name, f"{receiver.address} over {one.interface}, {format_duration(link.latency_s)} one way")
    yield link


def _sample(seconds: Sequence[float], warmup: Sequence[float]) -> Samples:
    return Samples(tuple((value,) for value in seconds), tuple((value,) for value in warmup))
