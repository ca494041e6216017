"""`paceline.doctor`: is this machine, or are these hosts, ready to train?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from paceline.measure.health import check_health
from paceline.measure.host_checks import Wanted, check_links, check_survey, survey_hosts
from paceline.options import refuse_given
from paceline.records.environment import capture_environment
from paceline.records.kinds import CheckRecord, Record
from paceline.records.store import Run
from paceline.report.result import DoctorResult
from paceline.runtime.hosts.ssh import CHECK_S, open_agents, parse_hosts
from paceline.runtime.ranks.session import Progress, ProgressDisplay
from paceline.verbs.run import parse_variables


def doctor(
    hosts: str = "", *, interface: str = "", port: int = 0, folder: str = "", ssh: str = "ssh", python: str = "",
    env: Sequence[str] = (), check_timeout: float = CHECK_S, progress: bool | None = None,
) -> DoctorResult:  # fmt: skip
    """Check everything that ranks need, then run a real all-reduce on two ranks.

    With `hosts`, check reachability, versions, clocks, interfaces, free space, and the bandwidth between each pair; the
    other arguments are then as in `paceline run --hosts`.

    Args:
        hosts: Check these hosts over ssh instead: a,b
        check_timeout: Timeout in seconds for each check except bandwidth.

    Returns:
        A `DoctorResult`. Its `failure` names the failed checks, and is empty if everything is ready to train.
    """
    given = {"interface": interface, "port": port, "folder": folder, "python": python, "env": env}
    given["check_timeout"] = check_timeout != CHECK_S
    ignored = [] if hosts else [name for name, value in given.items() if value]
    refuse_given(ignored, "without --hosts: it applies only to checks over ssh; pass --hosts, or leave it out")
    # Do not open a session, so that doctor works even where that fails.
    environment = capture_environment()
    names = list(parse_hosts(hosts)) if hosts else []
    if hosts:
        wanted = Wanted(folder or os.getcwd(), interface=interface, port=port)
        checks = _check_hosts(names, wanted, ssh, python, parse_variables(env), check_timeout)
    else:
        checks = check_health(environment)
    count = len(names) * (len(names) + 7) or 15  # approximate number of checks
    records: list[Record] = []
    with ProgressDisplay("doctor", progress) as display:
        for done, record in enumerate(checks, 1):
            records.append(record)
            if isinstance(record, CheckRecord):
                display.hear("", Progress(min(done, count), count, f"{record.name}: {record.status}"))
    return DoctorResult(Run("doctor", {"hosts": names} if hosts else {}, environment, tuple(records)))


def _check_hosts(
    names: Sequence[str], wanted: Wanted, ssh: str, python: str, variables: dict[str, str], limit_s: float
) -> Iterator[Record]:
    with open_agents(names, ssh, python, variables, limit_s) as agents:
        surveyed = survey_hosts(agents, wanted)
        yield from check_survey(surveyed, wanted)
        ready = {name: one for name, one in surveyed.items() if isinstance(one, dict) and one["address"]}
        yield from check_links([agent for agent in agents if agent.name in ready], ready, wanted)
