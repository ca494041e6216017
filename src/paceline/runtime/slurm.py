"""A job for Slurm: the sbatch script, which saves and is requeued on a signal; submitting it; and following it."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import ConfigError, LaunchError
from paceline.runtime.hosts import Show

_POLL_S = 1.0
_COMMAND_S = 60.0
_WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING",
            "SIGNALING", "STAGE_OUT", "STOPPED")  # fmt: skip

# Ranks become the command itself (exec), so that Slurm's signals reach them; what they print names the rank (--label).
# The script waits for them also when it gets the signal. A job that is cancelled is no longer RUNNING.
_BODY = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((15000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0}) % 17000))
export PACELINE_LAUNCHER=slurm PACELINE_RUN=job-$SLURM_JOB_ID PYTHONUNBUFFERED=1
[[ -z $SLURM_CPUS_PER_TASK ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # which srun does not take over
@exports
trap : TERM USR1
echo "paceline: job $SLURM_JOB_ID, attempt $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST"

# Every rank gets torchrun's variables.
srun --label --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=@ranks
  exec "$@"' paceline \\
  @command
code=$?

# 138 (SIGUSR1) and 143 (SIGTERM) mean that the ranks were asked to stop, and saved: train on, in a later job.
if [[ $code == 138 || $code == 143 ]] &&
  [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
  echo "paceline: job $SLURM_JOB_ID is requeued after code $code"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def render_script(
    command: Sequence[str], name: str, nodes: int, ranks_per_node: int, gpus_per_node: int, time: str, partition: str,
    sbatch: Sequence[str], variables: Mapping[str, str], folder: str, grace_s: float,
) -> str:  # fmt: skip
    """The script for `sbatch`, with further options `sbatch`; empty and 0 are what the cluster chooses.

    `grace_s` before its time limit the job is asked to save.
    """
    if time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise ConfigError(f"--time {time}: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as in 1:00:00")
    options = {
        "job-name": name, "nodes": nodes, "ntasks-per-node": ranks_per_node, "gpus-per-node": gpus_per_node,
        "time": time, "partition": partition, "chdir": folder, "output": f"{name}-%j.log", "open-mode": "append",
        "signal": f"USR1@{round(grace_s)}",
    }  # fmt: skip
    lines = [*(f"--{option}={value}" for option, value in options.items() if value), "--requeue", *sbatch]
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())
    texts = {"exports\n": exports, "ranks": str(ranks_per_node), "command": shlex.join(command)}
    body = re.sub(f"@({'|'.join(texts)})", lambda match: texts[match[1]], _BODY)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", body])


def _call(*command: str) -> str:
    """What a command of Slurm prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except FileNotFoundError:
        text = f"there is no {command[0]} here: submit from a host of the cluster, or give --dry-run for the script"
        raise ConfigError(text, code="no-slurm") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not end within {_COMMAND_S:g} s: is slurmctld up?") from None
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
        raise LaunchError(f"{command[0]} failed: {said}", code="slurm")
    return done.stdout


def submit(script: str, path: Path) -> str:
    """Write the script, submit it, and return the number of the job."""
    try:
        path.write_text(script)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; change to another folder") from None
    return _call("sbatch", "--parsable", str(path)).strip().partition(";")[0]


def _read_job(job: str) -> dict[str, str]:
    """What `scontrol show job` says of a job, by its names; empty once Slurm has forgotten it."""
    try:
        return dict(re.findall(r"(\w+)=(\S*)", _call("scontrol", "--oneliner", "show", "job", job)))
    except LaunchError:
        return {}


def _find_lost_nodes(nodes: str) -> set[str]:
    """Of these nodes, those whose slurmd does not respond, or that Slurm has given up."""
    said = _call("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") if nodes else ""
    rows = [row.split() for row in said.splitlines()]
    return {row[0] for row in rows if row[1].endswith("*") or row[1].startswith(("down", "fail"))}


def follow(job: str, log: Path, show: Show) -> int:
    """Show what a job prints, its states, and nodes that are lost, until it has ended; returns its exit code.

    A job that is requeued is followed on. An interrupt ends the following, and not the job.
    """
    state, nodes, named, place = "", "", set[str](), 0
    try:
        while True:
            found = _read_job(job)
            nodes = nodes if found.get("NodeList", "(null)") == "(null)" else found["NodeList"]
            if log.exists():
                with log.open(errors="replace") as file:
                    file.seek(place)
                    show("out", file.read())
                    place = file.tell()
            lost = _find_lost_nodes(nodes)
            for node in sorted(lost - named):
                hint = f"Slurm ends the job and requeues it; see `scontrol show node {node}`"
                show("err", f"paceline: node {node} does not respond, its slurmd or the host is down: {hint}\n")
            named = lost
            now = found.get("JobState", "COMPLETED" if state else "UNKNOWN")
            if now != state:
                state, where = now, f" on {nodes}" if now == "RUNNING" else ""
                show("err", f"paceline: job {job}: {now.lower()}{where}\n")
            if state not in _WAITING:
                code = int(found.get("ExitCode", "0:0").partition(":")[0])
                return 0 if state == "COMPLETED" else code or 1
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        show("err", f"paceline: job {job} runs on; to end it: scancel {job}\n")
        return 130
