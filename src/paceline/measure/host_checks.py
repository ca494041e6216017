"""Checks whether hosts can train together: their software, their connections, and the speed of their links."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError, PacelineError
from paceline.records.kinds import CheckRecord, LinkRecord, Record
from paceline.records.samples import Samples
from paceline.runtime.hosts.ssh import Agent, ask_all
from paceline.units import GIB, MIB, format_duration, format_memory

# A host's reply to `agent.tell_facts`, plus the `address` and `interface` at which others reach it, and `offset_s`: how
# far its clock is ahead of the launcher's, accurate to `within_s`.
Facts = dict[str, Any]

_ASKS = 5  # clock queries per host; the fastest reply is used
_SKEW_S = 0.5  # clock skew that causes a warning
_FULL_BYTES = 100 * MIB  # free disk space below which a check fails
_LITTLE_BYTES = 2 * GIB  # free disk space below which the check warns
# Test messages on each link: maximum size, seconds per kind (short, long), timeout.
_LINK_BYTES = 16 * MIB
_BUDGET_S = 0.3
_LINK_S = 20.0
_OLDEST_PYTHON = (3, 11)
_report = functools.partial(CheckRecord.build, status="fail")


@dataclass(frozen=True)
class Wanted:
    """The job's requirements: folder, program and script, interface and port ("" and 0 mean automatic), and whether
    each host needs Paceline."""

    folder: str
    program: str = ""
    script: str = ""
    interface: str = ""
    port: int = 0
    needs_paceline: bool = True


def survey_hosts(agents: Sequence[Agent], wanted: Wanted) -> dict[str, Facts | PacelineError]:
    """Query all hosts in parallel. Returns each host's facts, or the error if it could not be reached."""
    begin_s = time.monotonic()

    def ask(agent: Agent) -> Facts:
        facts = agent.ask("tell_facts", folder=wanted.folder, program=wanted.program, script=wanted.script)
        facts["answered_s"] = time.monotonic() - begin_s
        times = []
        for _ in range(_ASKS):
            sent_s = time.time()
            theirs_s = agent.ask("tell_time")["time_s"]
            back_s = time.time()
            times.append(((back_s - sent_s) / 2, theirs_s - (sent_s + back_s) / 2))
        facts["within_s"], facts["offset_s"] = min(times)
        return facts

    found = dict(zip((agent.name for agent in agents), ask_all(agents, ask), strict=True))

    def choose(agent: Agent) -> Facts:
        """Add the address at which others reach this host: from the interface, or from the route to another host."""
        own = found[agent.name]
        if isinstance(own, PacelineError):
            raise own
        if wanted.interface:
            address = own["addresses"].get(wanted.interface, [""])[0]
            return own | {"address": address, "interface": wanted.interface}
        others = [one["reached_at"] for one in found.values() if isinstance(one, dict) and one is not own]
        places = [*others, own["reached_at"]]
        places.sort(key=lambda address: address.startswith("127.") or address == "::1")  # last: loopback addresses
        return own | agent.ask("tell_route", address=places[0])

    return dict(zip(found, ask_all(agents, choose), strict=True))


def check_survey(surveyed: Mapping[str, Facts | PacelineError], wanted: Wanted) -> Iterator[CheckRecord]:
    """Yield one check per host and requirement. Versions are compared with those of the first host that answered."""
    first = next((name for name, facts in surveyed.items() if isinstance(facts, dict)), "")
    for name, facts in surveyed.items():
        if isinstance(facts, PacelineError):
            found, _, advice = str(facts).removeprefix(f"host {name}: ").partition(": ")
            yield _report(f"{name}: ssh", found, advice or "try it by hand: ssh " + name)
        else:
            yield _report(f"{name}: ssh", f"answered after {format_duration(facts['answered_s'])}")
            yield from _check_versions(name, facts, first, surveyed[first], wanted)
            yield _check_clock(name, facts)
            yield _check_network(name, facts, wanted)
            yield from _check_files(name, facts, wanted)


def _check_versions(name: str, facts: Facts, first: str, others: Any, wanted: Wanted) -> Iterator[CheckRecord]:
    for title, key in (("Python", "python"), ("torch", "torch"), ("Paceline", "paceline")):
        here, other, advice = facts[key], others[key], ""
        kept = 2 if key == "python" else None  # Python's patch version does not matter
        if key == "python" and tuple(map(int, here.split(".")[:2])) < _OLDEST_PYTHON:
            advice = "Python 3.11 or newer is required: install it there, or specify it with --python"
        elif not here:
            advice = f"install it there, for the same Python as on the other hosts: pip install {key}"
        elif here.split(".")[:kept] != other.split(".")[:kept]:
            advice = f"{first} has {other or 'none'}: install the same version on all hosts"
        status = "warn" if key == "paceline" and not wanted.needs_paceline else "fail"
        yield _report(f"{name}: {title}", here or "not installed", advice, status=status)


def _check_clock(name: str, facts: Facts) -> CheckRecord:
    off_s, within_s = facts["offset_s"], facts["within_s"]
    side = "ahead of" if off_s > 0 else "behind"
    found = f"{format_duration(abs(off_s))} {side} this machine's, to within {format_duration(within_s)}"
    advice = "times in files and logs will not match: use NTP, for example `timedatectl set-ntp true`"
    return _report(f"{name}: clock", found, advice if abs(off_s) - within_s > _SKEW_S else "", status="warn")


def _check_network(name: str, facts: Facts, wanted: Wanted) -> CheckRecord:
    address, interface, known = facts["address"], facts["interface"], facts["addresses"]
    others = ", ".join(key for key, found in known.items() if found[0] not in ("127.0.0.1", "::1"))
    advice = f"choose another with --interface: {others or 'none has an address'}"
    title = f"{name}: network"
    if not address:
        return _report(title, f"no interface {wanted.interface}", advice)
    if not interface:
        return _report(title, f"{address} is not the first address of any interface", advice, status="warn")
    return _report(title, f"{interface} ({address})")


def _check_files(name: str, facts: Facts, wanted: Wanted) -> Iterator[CheckRecord]:
    if facts["folder"]:
        advice = "create it there, share it between the hosts, or choose another with --folder"
        yield _report(f"{name}: folder", f"{wanted.folder}: {facts['folder']}", advice)
        return
    for place, free in facts["free_bytes"].items():
        is_full = free < _FULL_BYTES
        advice = f"{'nothing' if is_full else 'little'} can be saved there: free some space"
        found = f"{format_memory(free)} free in {place}"
        advice = advice if free < _LITTLE_BYTES else ""
        yield _report(f"{name}: disk", found, advice, status="fail" if is_full else "warn")
    for what, path in (("script", wanted.script), ("program", wanted.program)):
        if not facts[what]:
            advice = "copy it there, or run in a folder that the hosts share (--folder)"
            yield _report(f"{name}: {what}", f"{path} does not exist", advice)


def check_links(agents: Sequence[Agent], facts: Mapping[str, Facts], wanted: Wanted) -> Iterator[Record]:
    """Connect every host to every other in parallel; then time messages, one link at a time."""
    ports = dict(zip(agents, ask_all(agents, lambda agent: _listen(agent, facts, wanted)), strict=True))
    places = {agent: port for agent, port in ports.items() if isinstance(port, int)}
    reached = dict(zip(agents, ask_all(agents, lambda agent: _reach(agent, places, facts)), strict=True))
    for receiver, sender in itertools.permutations(agents, 2):
        found, port = reached[sender], ports[receiver]
        try:
            for error in (port, found, found.get(receiver) if isinstance(found, dict) else None):
                if isinstance(error, PacelineError):
                    raise error
            link = _time_link(sender, receiver, places[receiver], facts)
        except PacelineError as error:
            what, _, advice = str(error).partition(": ")
            yield _report(f"{sender.name} to {receiver.name}", what, advice)
        else:
            where = f"{facts[receiver.name]['address']} over {link.interface}"
            latency = f"{format_duration(link.latency_s)} one way"
            yield _report(f"{sender.name} to {receiver.name}", f"{where}, {latency}")
            yield link


def find_port(agents: Sequence[Agent], facts: Mapping[str, Facts], wanted: Wanted) -> int:
    """Return a rendezvous port on the first host. Every other host has connected to this port."""
    first = agents[0]
    port = _listen(first, facts, wanted)
    for found in ask_all(agents[1:], lambda agent: _reach(agent, {first: port}, facts)):
        for error in [found] if isinstance(found, PacelineError) else found.values():
            raise error
    first.ask("close")
    return port


def _listen(host: Agent, facts: Mapping[str, Facts], wanted: Wanted) -> int:
    address = facts[host.name]["address"]
    try:
        return int(host.ask("listen", address=address, port=wanted.port)["port"])
    except LaunchError as error:
        found = f"{host.name} cannot listen on {address}:{wanted.port} ({_reason(error)})"
        raise LaunchError(f"{found}: free the port, or choose another with --port", code="port") from None


def _reach(sender: Agent, ports: Mapping[Agent, int], facts: Mapping[str, Facts]) -> dict[Agent, LaunchError]:
    """The hosts that this host cannot reach at these ports, with the reasons."""
    others = {agent: port for agent, port in ports.items() if agent is not sender}
    if not others:
        return {}
    places = [(facts[agent.name]["address"], port) for agent, port in others.items()]
    source = facts[sender.name]["address"]
    errors = sender.ask("reach", places=places, source=source, timeout_s=sender.left_s / 2)["errors"]
    failed = ((agent, reason) for agent, reason in zip(others, errors, strict=True) if reason)
    return {agent: _explain_link(sender, agent, others[agent], facts, reason) for agent, reason in failed}


def _explain_link(sender: Agent, receiver: Agent, port: int, facts: Mapping[str, Facts], reason: str) -> LaunchError:
    there, interface = facts[receiver.name]["address"], facts[sender.name]["interface"]
    text = f"{sender.name} cannot reach {receiver.name} at {there} port {port} over {interface} ({reason.lower()})"
    advice = "open the port in the firewall (--port chooses it), or choose another --interface"
    return LaunchError(f"{text}: {advice}", code="link")


def _time_link(sender: Agent, receiver: Agent, port: int, facts: Mapping[str, Facts]) -> LinkRecord:
    try:
        found = sender.ask(
            "time_messages", _LINK_S, address=facts[receiver.name]["address"], port=port,
            source=facts[sender.name]["address"], limit_bytes=_LINK_BYTES, budget_s=_BUDGET_S,
        )  # fmt: skip
    except LaunchError as error:
        raise _explain_link(sender, receiver, port, facts, _reason(error)) from None
    short, long = (Samples(tuple((s,) for s in found[key][1:]), ((found[key][0],),)) for key in ("short", "long"))
    return LinkRecord(
        sender=sender.name, receiver=receiver.name, interface=facts[sender.name]["interface"],
        num_bytes=found["num_bytes"], timing=long, short=short,
    )  # fmt: skip


def _reason(error: PacelineError) -> str:
    return str(error).rpartition(": ")[2].lower()
