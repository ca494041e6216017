"""`paceline run`: a command on several hosts, over ssh, by Slurm, or as a manifest for Kubernetes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError, LaunchError, PacelineError, refuse
from paceline.measure.hosts import Wanted, check_survey, find_port, survey_hosts
from paceline.runtime import slurm as scheduler
from paceline.runtime.agent import LOGS
from paceline.runtime.hosts import Show, build_program, build_requests, open_agents, parse_hosts, run_agents
from paceline.runtime.kubernetes import render_manifest

# Which way of starting each option belongs to; the others are for all.
_OWN = {
    "hosts": ("interface", "port", "ssh", "python"),
    "slurm": ("nodes", "ranks_per_node", "time", "partition", "gpus_per_node", "sbatch", "requeues", "wait",
              "interface"),
    "kubernetes": ("nodes", "ranks_per_node", "image", "kind", "volume", "gpus_per_node"),
}  # fmt: skip


def parse_variables(given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    variables = {}
    for text in given:
        name, is_set, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or (not is_set and name not in os.environ):
            raise ConfigError(f"--env {text}: write NAME=VALUE, or NAME of a variable that is set here")
        variables[name] = value if is_set else os.environ[name]
    return variables


def run(
    command: Sequence[str] = (), *, hosts: str = "", slurm: bool = False, kubernetes: bool = False, nodes: int = 1,
    ranks_per_node: int = 1, name: str = "", folder: str = "", env: Sequence[str] = (), grace: float = 60.0,
    interface: str = "", port: int = 0, ssh: str = "ssh", python: str = "", time: str = "", partition: str = "",
    gpus_per_node: int = 0, sbatch: str = "", requeues: int = 10, wait: bool = False, image: str = "",
    kind: str = "job", volume: str = "", dry_run: bool = False, show: Show | None = None,
) -> int:  # fmt: skip
    """Run a command on several hosts and return its exit code; `show` gets what there is to see.

    `hosts` ("a:8,b:8"): over ssh, with torchrun on each. `slurm`: write an sbatch script, show it and submit it.
    `kubernetes`: show a manifest. `dry_run` shows what would be run.
    """
    given, defaults = dict(locals()), run.__kwdefaults__ or {}
    chosen = [key for key in _OWN if given[key]]
    refuse(
        (not command, "no command: write it behind --, as in: paceline run --hosts a:8,b:8 -- python train.py"),
        (len(chosen) != 1, "give one of --hosts, --slurm and --kubernetes: where is the command to run?"),
        (grace <= 0 or requeues < 0, f"--grace {grace:g}, --requeues {requeues}: above 0 s, and not below 0"),
        (nodes < 1 or ranks_per_node < 1, f"--nodes {nodes}, --ranks-per-node {ranks_per_node}: at least 1 of each"),
    )
    (way,) = chosen
    strange = [key for own in _OWN.values() for key in own if key not in _OWN[way] and given[key] != defaults[key]]
    flags = ", ".join(f"--{key.replace('_', '-')}" for key in dict.fromkeys(strange))
    refuse((flags, f"{flags} with --{way}, which has no use for it: leave it out"))
    variables, show = parse_variables(env), show or (lambda stream, text: None)
    if way == "hosts":
        variables = {"PACELINE_RUN": name, **variables} if name else variables
        at = folder or os.getcwd()
        return _run_hosts(command, hosts, variables, at, interface, port, ssh, python, grace, dry_run, show)
    name = name or _choose_name(command)
    if way == "kubernetes":
        program = build_program(command, "python")
        show("out", render_manifest(
            program, name=name, nodes=nodes, ranks_per_node=ranks_per_node, image=image, gpus_per_node=gpus_per_node,
            variables=variables, volume=volume, folder=folder, grace_s=grace, kind=kind,
        ))  # fmt: skip
        return 0
    script = scheduler.render_script(
        build_program(command, sys.executable), name=name, nodes=nodes, ranks_per_node=ranks_per_node, time=time,
        partition=partition, gpus_per_node=gpus_per_node, sbatch=shlex.split(sbatch), variables=variables,
        interface=interface, folder=folder, grace_s=grace, requeues=requeues,
    )  # fmt: skip
    show("out", script)
    if dry_run:
        return 0
    path = Path(f"{name}.sbatch")
    job_id = scheduler.submit(script, path)
    log = Path(folder or ".") / f"{name}-{job_id}.log"
    show("err", f"paceline: submitted job {job_id} ({path}); its output: {log}; to end it: scancel {job_id}\n")
    return scheduler.follow(job_id, log, show) if wait else 0


def _choose_name(command: Sequence[str]) -> str:
    """A name for the job from its command: `train` of `python train.py`, and of `paceline train`."""
    words = [Path(word).stem for word in command if not word.startswith("-")]
    words = [word for word in words if word not in ("python", "python3", "paceline")] or ["job"]
    return re.sub(r"[^a-z0-9]+", "-", words[0].lower()).strip("-") or "job"


def _run_hosts(
    command: Sequence[str], text: str, variables: dict[str, str], folder: str, interface: str, port: int, ssh: str,
    python: str, grace_s: float, dry_run: bool, show: Show,
) -> int:  # fmt: skip
    """Check the hosts, then run the command on all of them."""
    hosts, python = parse_hosts(text), python or sys.executable
    program = build_program(command, python)
    script = program[1] if program[0] == python and program[1:] and not program[1].startswith("-") else ""
    wanted = Wanted(folder, "" if program[0] == python else program[0], script, interface, port, "paceline" in program)
    if dry_run:
        ranks, first = {name: given or 1 for name, given in hosts.items()}, next(iter(hosts)).rpartition("@")[2]
        interfaces = dict.fromkeys(hosts, interface)
        requests = build_requests(program, python, ranks, interfaces, first, port or 29400, variables, grace_s)
        for name, request in zip(hosts, requests, strict=True):
            words = [f"{key}={value}" for key, value in request["variables"].items()]
            line = shlex.join(["env", *words, *request["arguments"]]).replace(shlex.quote(LOGS), "logs")
            show("out", f"{ssh} {name} {line}\n")
        return 0
    with open_agents(hosts, ssh, python, variables) as agents:
        surveyed = survey_hosts(agents, wanted)
        for error in surveyed.values():
            if isinstance(error, PacelineError):
                raise error
        facts = {name: found for name, found in surveyed.items() if isinstance(found, dict)}
        checks = list(check_survey(surveyed, wanted))
        failed = [check for check in checks if check.status == "fail"]
        more = f" (and {len(failed) - 1} more: paceline doctor --hosts lists all)" if len(failed) > 1 else ""
        for check in failed:
            raise LaunchError(f"{check.name}: {check.found}: {check.advice}{more}", code="not-ready")
        for check in checks:
            if check.status == "warn":
                show("err", f"paceline: warning: {check.name}: {check.found}: {check.advice}\n")
        port, first = find_port(agents, facts, wanted), facts[agents[0].name]["address"]
        ranks = {name: given or facts[name]["gpus"] or 1 for name, given in hosts.items()}
        interfaces = {name: one["interface"] for name, one in facts.items()}
        requests = build_requests(program, python, ranks, interfaces, first, port, variables, grace_s)
        return run_agents(agents, requests, show, grace_s)
