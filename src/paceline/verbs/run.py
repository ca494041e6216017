"""`paceline run`: a command on several hosts, over ssh, with Slurm, or as a Kubernetes manifest."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.errors import ConfigError, LaunchError, PacelineError, refuse
from paceline.measure.host_checks import Wanted, check_survey, find_port, survey_hosts
from paceline.options import Option, refuse_given
from paceline.runtime.faults.monitor import TIMEOUT_VARIABLE
from paceline.runtime.hosts import slurm as scheduler
from paceline.runtime.hosts import ssh as remote
from paceline.runtime.hosts.kubernetes import render_manifest
from paceline.runtime.ranks.launch import defer_signals

# Options that apply to only some ways of starting.
_OWN = {
    "hosts": ("interface", "port", "ssh", "python", "check_timeout"),
    "slurm": ("nodes", "ranks_per_node", "gpus_per_node", "time", "partition", "sbatch", "wait", "dry_run"),
    "kubernetes": ("nodes", "ranks_per_node", "gpus_per_node", "image", "kind", "volume"),
}


def parse_variables(given: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE`, or `NAME`, which takes its value from this host."""
    variables = {}
    for text in given:
        name, is_set, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or (not is_set and name not in os.environ):
            raise ConfigError(f"--env {text}: write NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if is_set else os.environ[name]
    return variables


def run(
    command: Sequence[str] = (),
    *,
    hosts: str = "",
    slurm: bool = False,
    kubernetes: bool = False,
    nodes: int = 1,
    ranks_per_node: int = 1,
    gpus_per_node: int = 0,
    name: str = "",
    folder: str = "",
    env: Sequence[str] = (),
    grace: float = 60.0,
    interface: str = "",
    port: int = 0,
    ssh: str = "ssh",
    python: str = "",
    check_timeout: float = remote.CHECK_S,
    time: str = "",
    partition: str = "",
    sbatch: str = "",
    wait: bool = False,
    dry_run: bool = False,
    image: str = "",
    kind: str = "job",
    volume: str = "",
    show: remote.Show | None = None,
) -> int:
    """Run a command on several hosts and return its exit code; `show` receives the output.

    Args:
        command: The command to run, after --, as in -- python train.py.
        hosts: Hosts to use over ssh, with ranks: a:8,b:8. Default ranks: the host's GPUs, else 1.
        slurm: Write an sbatch script, show it and submit it.
        kubernetes: Print a manifest without submitting it.
        nodes: Slurm, Kubernetes: number of hosts.
        ranks_per_node: Slurm, Kubernetes: ranks on each host.
        gpus_per_node: Slurm, Kubernetes: GPUs per host. Default: as the cluster decides.
        name: Name of the job. With --hosts: name of the run's folder, which is resumed if it exists.
        folder: Working folder on the hosts. Default: the current one.
        env: Variable for the ranks: NAME=VALUE, or NAME to pass its value from here.
        grace: Seconds that ranks get to save after a request to stop.
        interface: Network interface between the hosts. Default: chosen by the route between them.
        port: Rendezvous port on the first host. Default: a free one.
        ssh: The ssh command, such as 'ssh -p 2222'
        python: Python on the hosts. Default: the same path as here.
        check_timeout: Timeout in seconds for the checks of all hosts.
        time: Slurm: time limit, such as 1:00:00
        partition: Slurm: partition.
        sbatch: Slurm: additional sbatch options, such as '--qos=high --mem=0'
        wait: Slurm: show the job's output until it ends, and return its exit code.
        dry_run: Slurm: only print the script.
        image: Kubernetes: container image.
        kind: Kubernetes: job (plain, with its Service), jobset (restarts all pods together) or trainjob (Kubeflow)
        volume: Kubernetes: CLAIM:/PATH, a PersistentVolumeClaim and its mount path.
    """
    given = dict(locals())
    defaults = run.__kwdefaults__ or {}
    chosen = [key for key in _OWN if given[key]]
    refuse(
        (not command, "no command: write it after --, as in: paceline run --hosts a:8,b:8 -- python train.py"),
        (len(chosen) != 1, "no place to run the command: pass one of --hosts, --slurm and --kubernetes"),
    )
    for key in ("grace", "check_timeout", "nodes", "ranks_per_node"):
        Option(least=1).check(key, given[key])
    Option(least=0).check("gpus_per_node", gpus_per_node)
    Option(least=0, below=65536).check("port", port)
    way = chosen[0]
    others = dict.fromkeys(key for own in _OWN.values() for key in own if key not in _OWN[way])
    refuse_given([key for key in others if given[key] != defaults[key]], f"with --{way} has no effect: leave it out")
    # As under plain torchrun, ranks inherit variables that attach to the program or replace its wrapper. Pods do not:
    # they cannot see the folder named there.
    passed = [TIMEOUT_VARIABLE]
    if not kubernetes:
        passed += ["PACELINE_ATTACH", "PACELINE_WRAPPER", "TORCH_DEVICE_BACKEND_AUTOLOAD"]
    variables = {"PACELINE_MONITOR": os.environ.get("PACELINE_MONITOR", "1")}
    variables |= {key: os.environ[key] for key in passed if key in os.environ} | parse_variables(env)
    must_wait = slurm and "PACELINE_ATTACH" in variables and not (wait or dry_run)
    refuse((must_wait, "attaching to a Slurm job needs --wait after `paceline run`: add it"), code="wait")
    show = show or (lambda stream, text: None)
    if way == "hosts":
        variables = ({"PACELINE_RUN": name} if name else {}) | variables
        wanted = Wanted(folder or os.getcwd(), interface=interface, port=port)
        places = remote.parse_hosts(hosts)
        python = python or sys.executable
        program = remote.build_program(command, python)
        with remote.open_agents(places, ssh, python, variables, check_timeout) as agents:
            return _run_hosts(program, places, agents, wanted, python, variables, grace, show)
    words = [Path(word).stem for word in command if not re.match("-|python|paceline", Path(word).stem)]
    name = name or re.sub(r"[^a-z0-9]+", "-", "".join(words[:1]).lower()).strip("-") or "job"
    if way == "kubernetes":
        program = remote.build_program(command, "python")
        own = {key: given[key] for key in _OWN[way]}
        show("out", render_manifest(program, name=name, variables=variables, folder=folder, grace_s=grace, **own))
        return 0
    script = scheduler.render_script(
        remote.build_program(command, sys.executable), name, nodes, ranks_per_node, gpus_per_node, time, partition,
        sbatch, variables, folder, grace,
    )  # fmt: skip
    show("out", script)
    if dry_run:
        return 0
    try:
        with defer_signals():  # an interrupt must not leave a job with an unknown id
            job = scheduler.submit(script)
            path = Path(f"{name}-{job}.sbatch")
            log = Path(folder or ".") / f"{name}-{job}.log"
            show("err", f"paceline: submitted job {job} ({path}), which logs to {log}; to cancel it: scancel {job}\n")
    except KeyboardInterrupt:
        return 130
    try:
        path.write_text(script)  # the job id keeps it from replacing a user's file
    except OSError as error:
        show("err", f"paceline: warning: cannot write {path}: {error.strerror}\n")
    return scheduler.follow(job, log, show) if wait else 0


def _run_hosts(
    program: Sequence[str], hosts: dict[str, int | None], agents: Sequence[remote.Agent], wanted: Wanted, python: str,
    variables: dict[str, str], grace_s: float, show: remote.Show,
) -> int:  # fmt: skip
    """Check the hosts, then run the program on all of them."""
    script = program[1] if program[0] == python and program[1:] and not program[1].startswith("-") else ""
    other = "" if program[0] == python else program[0]
    wanted = replace(wanted, program=other, script=script, needs_paceline="paceline" in program)
    surveyed = survey_hosts(agents, wanted)
    for error in surveyed.values():
        if isinstance(error, PacelineError):
            raise error
    checks = list(check_survey(surveyed, wanted))
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more: paceline doctor --hosts lists all)" if len(failed) > 1 else ""
        topic = first.name.rpartition(": ")[2].lower()
        raise LaunchError(f"{first.name}: {first.found}: {first.advice}{more}", code=topic)
    for check in checks:
        if check.status == "warn":
            show("err", f"paceline: warning: {check.name}: {check.found}: {check.advice}\n")
    facts = {name: found for name, found in surveyed.items() if isinstance(found, dict)}
    ranks = {name: given or facts[name]["gpus"] or 1 for name, given in hosts.items()}
    interfaces = {name: found["interface"] for name, found in facts.items()}
    address, port = facts[agents[0].name]["address"], find_port(agents, facts, wanted)
    # Ranks authenticate each other with this key. It is sent over ssh, never on a command line.
    variables = {"PACELINE_SECRET": secrets.token_hex(32)} | variables
    requests = remote.build_requests(program, python, ranks, interfaces, address, port, variables, grace_s)
    return remote.run_agents(agents, requests, show, grace_s)
