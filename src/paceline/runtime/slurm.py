"""A job for Slurm: the sbatch script, which saves and is requeued on a signal; submitting it; and following it."""

from __future__ import annotations

import codecs
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import ConfigError, LaunchError, refuse
from paceline.runtime.hosts import Show, split_words

_POLL_S = 1.0
_COMMAND_S = 60.0
_RESTARTS = 100
_WAITING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING",
            "SIGNALING", "STAGE_OUT", "STOPPED")  # fmt: skip

# Ranks become the command itself (exec): where Slurm tracks by cgroups, its signals reach only the tasks, and not their
# children. So no shell can translate exit codes, and of those srun returns the highest: "saved" is said by a file. Who
# has saved ends with 0, as any other code ends the ranks that still save. What they print names the rank (--label).
# The script waits for them also when it gets the signal. A job that is cancelled is no longer RUNNING.
_BODY = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((15000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0}) % 17000))
export PACELINE_LAUNCHER=slurm PACELINE_RUN=job-$SLURM_JOB_ID PYTHONUNBUFFERED=1
export PACELINE_SECRET=$(od -An -v -N32 -tx1 /dev/urandom | tr -d " \\n") # what ranks prove to know when they meet
export PACELINE_SAVED=$(mktemp) # written by rank 0, which runs on this node, when it has saved to be started again
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
[[ $code != 0 || ! -s $PACELINE_SAVED ]] || saved=yes
rm -f "$PACELINE_SAVED"
[[ $saved ]] || exit $code

# All ranks have ended well, and saved when they were asked to stop: train on, in a later job.
if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
  if ((${SLURM_RESTART_COUNT:-0} < @restarts)); then
    echo "paceline: job $SLURM_JOB_ID has saved, and is requeued"
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "paceline: job $SLURM_JOB_ID was requeued @restarts times, which is the limit: submit it anew"
  fi
fi
exit 75 # not finished
"""


def render_script(
    command: Sequence[str], name: str, nodes: int, ranks_per_node: int, gpus_per_node: int, time: str, partition: str,
    sbatch: str, variables: Mapping[str, str], folder: str, grace_s: float,
) -> str:  # fmt: skip
    """The script for `sbatch`, with further options `sbatch` as typed; empty and 0 are what the cluster chooses.

    `grace_s` before its time limit the job is asked to save.
    """
    if time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise ConfigError(f"--time {time}: write minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, as in 1:00:00")
    refuse(
        (
            not re.fullmatch(r"[\w.-]+", name),
            f"--name {name}: letters, digits, -, _ and . alone; files are named by it",
        ),
        (
            split_words("--sbatch", sbatch)[:1] and not sbatch.startswith("-"),
            f"--sbatch {sbatch}: options begin with -",
        ),
        ("\n" in sbatch + folder, "--sbatch and --folder: one line each"),
    )
    options = {
        "job-name": name, "nodes": nodes, "ntasks-per-node": ranks_per_node, "gpus-per-node": gpus_per_node,
        "time": time, "partition": partition, "chdir": folder, "output": f"{name}-%j.log", "open-mode": "append",
        "signal": f"USR1@{round(grace_s)}",
    }  # fmt: skip
    lines = [f"--{option}={shlex.quote(str(value))}" for option, value in options.items() if value]
    lines += ["--requeue", sbatch] if sbatch else ["--requeue"]
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())
    texts = {
        "exports\n": exports, "ranks": str(ranks_per_node), "restarts": str(_RESTARTS), "command": shlex.join(command),
    }  # fmt: skip
    body = re.sub(f"@({'|'.join(texts)})", lambda match: texts[match[1]], _BODY)
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "", body])


def _call(*command: str, given: str = "") -> str:
    """What a command of Slurm prints; it reads what is `given`."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_COMMAND_S, check=False,
            start_new_session=True,  # Ctrl-C is for who calls it
        )  # fmt: skip
    except FileNotFoundError:
        text = f"there is no {command[0]} here: submit from a host of the cluster, or give --dry-run for the script"
        raise ConfigError(text, code="no-slurm") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} did not end within {_COMMAND_S:g} s: is slurmctld up?") from None
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")
        raise LaunchError(f"{command[0]} failed: {said}", code="no-job" if "Invalid job id" in said else "slurm")
    return done.stdout


def submit(script: str) -> str:
    """Submit the script, and return the number of the job."""
    return _call("sbatch", "--parsable", given=script).strip().partition(";")[0]


def _read_job(job: str) -> dict[str, str]:
    """What `scontrol show job` says of a job, by its names."""
    said = _call("scontrol", "--oneliner", "show", "job", job)
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w:/]+=|\s*$)", said))


def _find_lost_nodes(nodes: str) -> set[str]:
    """Of these nodes, those whose slurmd does not respond, or that Slurm has given up."""
    said = _call("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") if nodes else ""
    rows = [row.split() for row in said.splitlines()]
    return {row[0] for row in rows if row[1].endswith("*") or row[1].startswith(("down", "fail"))}


def follow(job: str, log: Path, show: Show) -> int:
    """Show what a job prints, its states, and nodes that are lost, until it has ended; returns its exit code.

    A job that is requeued is followed on, and Slurm is asked again when it does not answer. An interrupt ends the
    following, and not the job.
    """
    state, nodes, named, place, trouble = "", "", set[str](), 0, ""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # the log may end inside of a character
    try:
        while True:
            found, lost, now, before, trouble = dict[str, str](), named, state, trouble, ""
            try:
                found = _read_job(job)
                log = Path(found.get("StdOut", log))  # which --sbatch may have named
                now = found.get("JobState", "UNKNOWN")
                nodes = nodes if found.get("NodeList", "(null)") == "(null)" else found["NodeList"]
                lost = _find_lost_nodes(nodes)
            except LaunchError as error:
                trouble, hint = str(error), "asking again"
                if error.code == "no-job":  # which ended too long ago
                    now, hint = "UNKNOWN", f"how it ended is not known; `sacct -j {job}` may say it"
                if trouble != before:
                    show("err", f"paceline: job {job}: {trouble}: {hint}\n")
            if log.exists():
                with log.open("rb") as file:
                    file.seek(place)
                    show("out", decoder.decode(file.read()))
                    place = file.tell()
            for node in sorted(lost - named):
                hint = f"Slurm ends the job and requeues it; see `scontrol show node {node}`"
                show("err", f"paceline: node {node} does not respond, its slurmd or the host is down: {hint}\n")
            named = lost
            if now != state:
                state, where = now, f" on {nodes}" if now == "RUNNING" else ""
                show("err", f"paceline: job {job}: {now.lower()}{where}\n")
            if state and state not in _WAITING:
                code = int(found.get("ExitCode", "0:0").partition(":")[0])
                return 0 if state == "COMPLETED" else code or 1
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        what = "runs on" if state == "RUNNING" else "stays submitted"
        show("err", f"paceline: job {job} {what}, and its output goes to {log}; to end it: scancel {job}\n")
        return 130
