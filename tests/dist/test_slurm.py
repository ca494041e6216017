"""`paceline run --slurm` on two nodes: a real munged, slurmctld and two slurmd, in namespaces of this machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.records.training import load_metrics
from tests.conftest import wait_until
from tests.dist.made_hosts import VERBS, MadeHosts, find_commands, make_hosts, paths, write_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATH = f"{os.environ['PATH']}:/usr/sbin"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
CONFIG = """\
ClusterName=made
SlurmctldHost=n1(10.92.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=6817
SlurmdPort=6818
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=0
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=10
InactiveLimit=0
Waittime=0
MinJobAge=300
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
NodeName=n1 NodeAddr=10.92.0.1 NodeHostname=n1 CPUs=2 State=UNKNOWN
NodeName=n2 NodeAddr=10.92.0.2 NodeHostname=n2 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
RUN_FOLDER = "mount -t tmpfs tmpfs /run;"
TRAIN = [
    "paceline", "train", "--model", "mlp", "--hidden", "8", "--samples", "64", "--batch-size", "8",
    "--save-every", "1000s", "--backend", "gloo",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[MadeHosts]:
    """Two nodes, n1 and n2; the controller runs on n1."""
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        pytest.skip(f"SLURM IS NOT TESTED: there is no {', '.join(missing)} here")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with make_hosts(folder, ("n1", "n2")) as made:
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for name in ("state", "temporary"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        write_tools(folder)
        munge = f"--socket={folder}/munge.socket --pid-file={folder}/munge.pid --log-file={folder}/munge.log"
        more = f"--seed-file={folder}/munge.seed --key-file={key} --foreground --force --num-threads=2"
        made.serve("n1", [shutil.which("munged", path=PATH), *munge.split(), *more.split()], RUN_FOLDER)
        wait_until(lambda: (folder / "munge.socket").exists())
        start_service(made, "slurmctld", "n1", "-c")
        for name in made.names:
            start_service(made, "slurmd", name)
        wait_until(lambda: ask(made, "sinfo", "-h", "-o", "%t %D") == "idle 2")
        yield made
        made.expect_nothing_left(60)


def make_environment(made: MadeHosts) -> dict[str, str]:
    variables = {
        "SLURM_CONF": f"{made.folder}/slurm.conf",
        "PATH": f"{made.folder}/tools:{PATH}",
        "PYTHONPATH": paths(),
        "TMPDIR": f"{made.folder}/temporary",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PACELINE"))}
    return kept | variables | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}


def start_service(made: MadeHosts, tool: str, name: str, *options: str) -> subprocess.Popen[str]:
    command = [shutil.which(tool, path=PATH), "-D", "-f", f"{made.folder}/slurm.conf", *options]
    return made.serve(name, command, RUN_FOLDER, env=make_environment(made))


def find_slurmd(made: MadeHosts, name: str) -> subprocess.Popen[str]:
    words = [[str(word) for word in one.args] for one in made.services]
    found = [any(f"hostname {name};" in w for w in one) and any(w.endswith("/slurmd") for w in one) for one in words]
    return made.services[len(found) - 1 - found[::-1].index(True)]


def ask(made: MadeHosts, *command: str) -> str:
    done = subprocess.run(
        made.wrap("n1", command),
        cwd=made.folder,
        env=make_environment(made),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


def submit(made: MadeHosts, *words: str, name: str) -> str:
    """Submit a job with `paceline run --slurm`; returns its id."""
    done = subprocess.run(
        made.wrap("n1", ["paceline", "run", "--slurm", "--nodes", "2", "--name", name, *words]),
        cwd=made.folder, env=make_environment(made), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = re.search(r"submitted job (\d+)", done.stderr)[1]
    assert "#SBATCH --nodes=2" in done.stdout and (made.folder / f"{name}-{job}.sbatch").read_text() == done.stdout
    return job


def read_state(made: MadeHosts, job: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", ask(made, "scontrol", "-o", "show", "job", job)))


def wait_for(made: MadeHosts, job: str, state: str, name: str, timeout_s: float = 120) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def look() -> dict[str, str] | None:
        found = read_state(made, job)
        assert found.get("JobState") == state or found.get("JobState") not in ended, read_log(made, name, job)
        return found if found.get("JobState") == state else None

    return wait_until(look, timeout_s)


def read_log(made: MadeHosts, name: str, job: str) -> str:
    path = made.folder / f"{name}-{job}.log"
    return path.read_text() if path.exists() else ""


def wait_for_steps(made: MadeHosts, name: str, job: str) -> Path:
    folder = made.folder / name / f"job-{job}"
    wait_until(lambda: (folder / "metrics.jsonl").exists() or read_state(made, job).get("JobState") == "FAILED")
    assert (folder / "metrics.jsonl").exists(), read_log(made, name, job)
    return folder


def read_weights(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(cluster) -> Path:
    """An uninterrupted run on two nodes."""
    job = submit(cluster, "--", *TRAIN, "--epochs", "500", "--out", "whole", name="whole")
    wait_for(cluster, job, "COMPLETED", "whole")
    log = read_log(cluster, "whole", job)
    assert f"job {job}, attempt 1, on n[1-2]" in log and "2 ranks on gloo" in log
    return cluster.folder / "whole" / f"job-{job}"


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_saves_and_the_requeued_job_resumes_bit_identically(cluster, whole, number):
    name = f"asked-{number.lower()}"
    job = submit(cluster, "--grace", "30", "--", *TRAIN, "--epochs", "500", "--out", name, name=name)
    folder = wait_for_steps(cluster, name, job)
    ask(cluster, "scancel", f"--signal={number}", job)
    wait_until(lambda: read_state(cluster, job).get("Restarts") == "1")
    (saved,) = (folder / "checkpoints").glob("step-*")
    assert "saved and is requeued" in read_log(cluster, name, job)
    wait_for(cluster, job, "COMPLETED", name)
    log = read_log(cluster, name, job)
    assert "attempt 2, on n[1-2]" in log and f"resumes at step {int(saved.name.removeprefix('step-'))}" in log
    assert read_weights(folder) == read_weights(whole)
    losses = [[row["loss"] for row in load_metrics(run / "metrics.jsonl")] for run in (folder, whole)]
    assert losses[0] == losses[1]
    cluster.expect_nothing_left()


def test_a_canceled_job_is_not_requeued(cluster):
    job = submit(cluster, "--", *TRAIN, "--epochs", "100000", "--out", "gone", name="gone")
    wait_for_steps(cluster, "gone", job)
    ask(cluster, "scancel", job)
    wait_for(cluster, job, "CANCELLED", "gone")
    assert read_state(cluster, job)["Restarts"] == "0" and "requeued" not in read_log(cluster, "gone", job)
    cluster.expect_nothing_left(30)


SLOW_SAVER = """
import os, pathlib, signal, sys, time
rank, saved = int(os.environ["RANK"]), pathlib.Path("slow-saver.saved")
if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
    sys.exit(0 if saved.read_text() == "whole" else 3)
def save(*_):
    if rank == 0:
        saved.write_text("begun")
        time.sleep(4)
        saved.write_text("whole")
        pathlib.Path(os.environ["PACELINE_SAVED"]).write_text("yes")
    os._exit(0)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(300)
"""


def test_the_job_waits_for_a_rank_that_saves_slowly(cluster):
    (cluster.folder / "slow_saver.py").write_text(SLOW_SAVER)
    job = submit(cluster, "--", "python", "slow_saver.py", name="slow")
    wait_until(lambda: read_log(cluster, "slow", job).count(": ready") == 2)
    ask(cluster, "scancel", "--signal=USR1", job)
    wait_for(cluster, job, "COMPLETED", "slow")
    assert read_state(cluster, job)["Restarts"] == "1" and "attempt 2" in read_log(cluster, "slow", job)
    cluster.expect_nothing_left()


@pytest.mark.parametrize("way", ["exit", "signal"])
def test_a_job_that_fails_is_not_requeued(cluster, way):
    """One rank exits, or the program does not handle the signal before the time limit."""
    fail = "[[ $RANK == 1 ]] && exit 1; " if way == "exit" else ""
    job = submit(cluster, "--", "bash", "-c", f"echo ready; {fail}sleep 300", name=way)
    if way == "signal":
        wait_until(lambda: read_log(cluster, way, job).count(": ready") == 2)
        ask(cluster, "scancel", "--signal=USR1", job)
    wait_for(cluster, job, "FAILED", way)
    assert read_state(cluster, job)["Restarts"] == "0" and "requeued" not in read_log(cluster, way, job)
    cluster.expect_nothing_left()


def follow(made: MadeHosts, *words: str, **options) -> subprocess.Popen[str]:
    """`paceline run --slurm --wait` on n1."""
    command = ["paceline", "run", "--slurm", "--wait", "--nodes", "2", *words]
    return made.start("n1", command, env=make_environment(made), **options)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb.split()[:2]))
def test_every_verb_runs_on_two_nodes_and_its_answer_is_printed_once(cluster, verb):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = follow(cluster, "--name", "verb", "--", "paceline", *verb.split(), "--out", "verbs", **pipes)
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err + out
    lines = out.partition(", attempt 1, on n[1-2]\n")[2].splitlines()  # after the script
    # Only the first rank prints to stdout; Slurm's --label does not tell stdout from stderr.
    assert [line for line in lines if line.startswith("0: ")]
    assert not [line for line in lines if line.startswith("1: ") and "socket.cpp" not in line]
    cluster.expect_nothing_left()


def test_folders_and_options_with_spaces_arrive(cluster):
    (cluster.folder / "my runs").mkdir()
    words = ["--folder", f"{cluster.folder}/my runs", "--sbatch", '--comment="a b" --exclusive']
    job = submit(cluster, *words, "--", "bash", "-c", "pwd", name="spaces")
    wait_for(cluster, job, "COMPLETED", "my runs/spaces")
    assert f"1: {cluster.folder}/my runs\n" in read_log(cluster, "my runs/spaces", job)
    assert "Comment=a b" in ask(cluster, "scontrol", "-o", "show", "job", job)


def test_an_interrupt_stops_following_but_not_the_job(cluster):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    follower = follow(cluster, "--name", "left", "--", "bash", "-c", "echo ready; sleep 300", **pipes)
    while ": ready" not in follower.stdout.readline():
        assert follower.poll() is None
    os.killpg(follower.pid, signal.SIGINT)  # as Ctrl-C does, including for scontrol
    _, err = follower.communicate(timeout=100)
    assert follower.returncode == 130
    said = err.splitlines()[-1]
    job = re.search(r"job (\d+) keeps running", said)[1]
    assert f"to cancel it: scancel {job}" in said and read_state(cluster, job)["JobState"] == "RUNNING"
    ask(cluster, "scancel", job)
    wait_for(cluster, job, "CANCELLED", "left")
    cluster.expect_nothing_left(30)


def test_twenty_of_twenty_jobs_leave_nothing(cluster):
    jobs = []
    for number in range(20):
        command = ["bash", "-c", f"[[ $RANK != {number % 2} ]] || exit {number % 3}"]
        jobs.append(submit(cluster, "--", *command, name="twenty"))
    for number, job in enumerate(jobs):
        wait_for(cluster, job, "FAILED" if number % 3 else "COMPLETED", "twenty")
    cluster.expect_nothing_left()
    left = [path.name for path in (cluster.folder / "temporary").iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")], left  # torch's cache, one per user


@pytest.mark.parametrize("line", find_commands("--slurm"))
def test_every_command_of_slurm_in_the_document_runs(cluster, line):
    done = subprocess.run(
        cluster.wrap("n1", shlex.split(line)), cwd=cluster.folder, env=make_environment(cluster), capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for job in re.findall(r"submitted job (\d+)", done.stderr):
        ask(cluster, "scancel", job)


def test_a_killed_slurmd_is_named_and_the_job_is_requeued(cluster):
    # The last test: node n2 stays down.
    words = ["--name", "lost", "--", *TRAIN, "--epochs", "100000", "--out", "lost"]
    with (cluster.folder / "said").open("w") as said:
        follower = follow(cluster, *words, stdout=subprocess.PIPE, stderr=said)
    try:
        said = cluster.folder / "said"
        wait_until(lambda: "submitted job" in said.read_text())
        job = re.search(r"submitted job (\d+)", said.read_text())[1]
        wait_for_steps(cluster, "lost", job)
        slurmd = find_slurmd(cluster, "n2")
        slurmd.kill()
        slurmd.wait()
        wait_until(lambda: "node n2 does not respond" in said.read_text())
        wait_until(lambda: read_state(cluster, job)["Restarts"] == "1")
        # Nothing kills the ranks of that node; they exit once the others are gone.
        wait_until(lambda: not [line for line in cluster.list_processes() if " -m paceline train" in line])
        ask(cluster, "scancel", job)
        follower.communicate(timeout=100)
        assert follower.returncode != 0  # the job was canceled
        cluster.expect_nothing_left(60)
    finally:
        if follower.poll() is None:
            follower.kill()
        follower.communicate()
