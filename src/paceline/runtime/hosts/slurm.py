"""Slurm jobs: render the sbatch script, which requeues itself once its ranks have saved; submit and follow jobs."""

from __future__ import annotations

import codecs
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from paceline.errors import ConfigError, LaunchError, refuse
from paceline.runtime.hosts.ssh import Show, split_words

_POLL_S = 1.0
_COMMAND_S = 60.0
_RESTARTS = 100
_UNFINISHED = (
    "PENDING CONFIGURING RUNNING COMPLETING REQUEUED REQUEUE_HOLD SUSPENDED RESIZING SIGNALING STAGE_OUT STOPPED"
)


class _Script(Template):
    delimiter = "@"  # $ belongs to the shell


def render_script(
    command: Sequence[str], name: str, nodes: int, ranks_per_node: int, gpus_per_node: int, time: str, partition: str,
    sbatch: str, variables: Mapping[str, str], folder: str, grace_s: float,
) -> str:  # fmt: skip
    """The script for `sbatch`. `sbatch` contains further options as typed. Empty strings and 0 leave the choice to the
    cluster.

    The job is asked to save `grace_s` before its time limit.
    """
    is_time = re.fullmatch(r"((\d+-)?\d+(:\d+){0,2})?", time)
    is_name = re.fullmatch(r"[\w.-]+", name)
    more = split_words("--sbatch", sbatch)
    refuse(
        (not is_time, f"--time {time}: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as in 1:00:00"),
        (not is_name, f"--name {name}: use letters, digits, -, _ and .; files are named after it"),
        (more and not sbatch.startswith("-"), f"--sbatch {sbatch}: options start with -"),
        ("\n" in sbatch + folder, "--sbatch and --folder: remove the line break"),
    )
    options = {
        "job-name": name,
        "nodes": nodes,
        "ntasks-per-node": ranks_per_node,
        "gpus-per-node": gpus_per_node,
        "time": time,
        "partition": partition,
        "chdir": folder,
        "output": f"{name}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{round(grace_s)}",
    }
    words = [f"--{option}={shlex.quote(str(value))}" for option, value in options.items() if value]
    return _Script(Path(__file__).with_name("slurm.sbatch").read_text()).substitute(
        options="\n".join(f"#SBATCH {word}" for word in (*words, "--requeue", sbatch) if word),
        exports="\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
        ranks=ranks_per_node,
        restarts=_RESTARTS,
        command=shlex.join(command),
    )


def _call(*command: str, given: str = "") -> str:
    """The output of a Slurm command, with `given` as its input."""
    # In a separate session, so that Ctrl-C reaches only the caller.
    options: dict[str, Any] = {"input": given, "capture_output": True, "text": True, "start_new_session": True}
    try:
        done = subprocess.run(command, timeout=_COMMAND_S, check=False, **options)
    except FileNotFoundError:
        hint = "submit from a host of the cluster, or print the script with --dry-run"
        raise ConfigError(f"{command[0]} is not installed here: {hint}", code="no-slurm") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not return within {_COMMAND_S:g} s: is slurmctld up?") from None
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
        raise LaunchError(f"{command[0]} failed: {said}", code="no-job" if "Invalid job id" in said else "slurm")
    return str(done.stdout)


def submit(script: str) -> str:
    """Submit the script and return the job id."""
    return _call("sbatch", "--parsable", given=script).strip().partition(";")[0]


def _read_job(job: str) -> dict[str, str]:
    """The fields that `scontrol show job` prints."""
    said = _call("scontrol", "--oneliner", "show", "job", job)
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w:/]+=|\s*$)", said))


def _find_lost_nodes(nodes: str) -> set[str]:
    """The nodes whose slurmd does not respond or that Slurm has marked down."""
    said = _call("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") if nodes else ""
    rows = [row.split() for row in said.splitlines()]
    return {row[0] for row in rows if row[1].endswith("*") or row[1].startswith(("down", "fail"))}


def follow(job: str, log: Path, show: Show) -> int:
    """Show a job's output, its states and lost nodes until it ends, and return its exit code.

    Keeps following a job that is requeued, and keeps asking when Slurm does not answer. An interrupt ends this
    function, not the job.
    """
    state, nodes, trouble = "", "", ""
    lost: set[str] = set()
    shown_bytes = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # the log may end inside a character
    try:
        while True:
            found: dict[str, str] = {}
            now = state
            try:
                found = _read_job(job)
                log = Path(found.get("StdOut", log))  # --sbatch may have renamed the log
                now = found.get("JobState", "UNKNOWN")
                nodes = nodes if found.get("NodeList", "(null)") == "(null)" else found["NodeList"]
                known, lost = lost, _find_lost_nodes(nodes)
                for node in sorted(lost - known):
                    hint = f"Slurm ends the job and requeues it; see `scontrol show node {node}`"
                    show("err", f"paceline: node {node} does not respond (slurmd or the host is down): {hint}\n")
                trouble = ""
            except LaunchError as error:
                hint = "trying again"
                if error.code == "no-job":  # Slurm has already forgotten the job
                    now = "UNKNOWN"
                    hint = f"its result is unknown; try `sacct -j {job}`"
                if str(error) != trouble:
                    trouble = str(error)
                    show("err", f"paceline: job {job}: {trouble}: {hint}\n")
            if log.exists():
                with log.open("rb") as file:
                    file.seek(shown_bytes)
                    show("out", decoder.decode(file.read()))
                    shown_bytes = file.tell()
            if now != state:
                state = now
                show("err", f"paceline: job {job}: {now.lower()}{f' on {nodes}' if now == 'RUNNING' else ''}\n")
            if state and state not in _UNFINISHED.split():
                code = int(found.get("ExitCode", "0:0").partition(":")[0])
                return 0 if state == "COMPLETED" else code or 1
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        what = "keeps running" if state == "RUNNING" else "stays queued"
        show("err", f"paceline: job {job} {what} and logs to {log}; to end it: scancel {job}\n")
        return 130
