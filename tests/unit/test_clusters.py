"""The sbatch script, run by bash with fake Slurm commands; and manifests, checked against the Kubernetes schema."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import ConfigError
from paceline.runtime.hosts import kubernetes, slurm
from paceline.verbs.run import run
from tests.unit.kubernetes_schema import find_mistakes

JOB = {
    "command": ["python", "train.py", "--text", "it's $HOME"], "name": "train", "nodes": 2, "ranks_per_node": 4,
    "time": "1:00:00", "gpus_per_node": 0, "partition": "", "sbatch": "", "variables": {}, "folder": "",
    "grace_s": 90.0,
}  # fmt: skip


def test_the_script_has_exactly_the_given_options():
    lines = slurm.render_script(**JOB).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=train", "nodes=2", "ntasks-per-node=4", "time=1:00:00", "output=train-%j.log", "open-mode=append",
        "signal=USR1@90", "requeue",
    ]  # fmt: skip
    given = {"partition": "gpu", "gpus_per_node": 8, "sbatch": '--qos=high --comment="a b"'}
    given |= {"variables": {"A": "x y"}, "folder": "/my data"}
    script = slurm.render_script(**JOB | given)
    options = re.findall(r"#SBATCH (.*)", script)
    for option in ("--partition=gpu", "--gpus-per-node=8", '--qos=high --comment="a b"', "--chdir='/my data'"):
        assert option in options
    assert "export A='x y'" in script.splitlines()
    assert "@" not in re.sub(r"USR1@\d+|\"\$@\"", "", script)


@pytest.fixture
def run_script(tmp_path):
    """`run_script(code, saved, state, restarts)`: run the script with an `srun` that starts one rank, which can report
    that it has saved and then exits with `code`; returns the commands called and the rank's variables."""

    def run(
        code: int, saved: bool = False, state: str = "RUNNING", restarts: int = 0, **job
    ) -> tuple[int, list[str], dict]:
        tools = tmp_path / "tools"
        tools.mkdir()
        environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
        environment |= {
            "SLURM_LOCALID": "1",
            "SLURM_RESTART_COUNT": str(restarts),
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        fakes = {
            "srun": f'while [ "$1" != bash ]; do shift; done\n"$@" > "{tmp_path}/rank.json"\n'
            f'[ {saved} = False ] || echo yes > "$PACELINE_SAVED"\nexit {code}',
            "scontrol": f'echo "$@" >> "{tmp_path}/called"\n[ "$1" = show ] && echo n1 && echo n2',
            "squeue": f"echo {state}",
        }
        for name, text in fakes.items():
            (tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (tools / name).chmod(0o755)
        dump = "import json, os, sys; print(json.dumps({'arguments': sys.argv[1:], **os.environ}))"
        command = ["python3", "-c", dump, *JOB["command"][1:]]
        script = slurm.render_script(**JOB | {"command": command} | job)
        done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, timeout=100)
        assert not done.stderr, done.stderr
        return (
            done.returncode,
            (tmp_path / "called").read_text().splitlines(),
            json.loads((tmp_path / "rank.json").read_text()),
        )

    return run


def test_a_rank_gets_torchruns_variables_and_the_whole_command(run_script):
    code, called, rank = run_script(0, variables={"MORE": "a 'b'"})
    assert code == 0 and called == ["show hostnames n[1-2]"]
    assert rank["arguments"] == JOB["command"][1:]
    found = {
        name: rank[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MORE")
    }
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1",
        "MORE": "a 'b'",
    }  # fmt: skip
    assert rank["MASTER_PORT"] == str(15000 + 707) and rank["PACELINE_RUN"] == "job-7"


def test_variables_that_attach_to_a_program_reach_its_ranks(run_script, monkeypatch):
    """The variables arrive even if Slurm does not pass on the submitter's environment, as in `run_script`."""
    asked, shown = {"PACELINE_ATTACH": json.dumps({"folder": "/it's here", "steps": 9}), "PACELINE_WRAPPER": "1"}, []
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    command = ["python", "train.py"]
    assert run(command, slurm=True, dry_run=True, show=lambda stream, text: shown.append(text)) == 0
    (script,) = shown
    exports = dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))
    assert {name: shlex.split(exports[name]) for name in asked} == {name: [value] for name, value in asked.items()}
    _, _, rank = run_script(0, variables=asked)
    assert {name: rank[name] for name in asked} == asked
    with pytest.raises(ConfigError) as error:  # nobody would read the output
        run(command, slurm=True)
    assert error.value.code == "wait"
    run(command, kubernetes=True, image="x", show=lambda stream, text: shown.append(text))
    assert "PACELINE_ATTACH" not in shown[-1]
    for name in asked:
        monkeypatch.delenv(name)
    run(command, slurm=True, dry_run=True, show=lambda stream, text: shown.append(text))
    assert "PACELINE_ATTACH" not in shown[-1] and "PACELINE_WRAPPER" not in shown[-1]


@pytest.mark.parametrize(
    ("code", "saved", "state", "restarts", "ended", "requeued"),
    [
        (0, True, "RUNNING", 0, 75, True),
        (0, True, "RUNNING", 99, 75, True),
        (0, True, "RUNNING", 100, 75, False),  # no time limit
        (0, True, "COMPLETING", 0, 75, False),  # canceled by scancel
        (0, False, "RUNNING", 0, 0, False),
        (1, False, "RUNNING", 0, 1, False),
        (143, False, "RUNNING", 0, 143, False),  # srun's exit code if one rank fails and the others are killed
        (138, False, "RUNNING", 0, 138, False),  # exit code of a program that does not handle SIGUSR1
        (1, True, "RUNNING", 0, 1, False),  # rank 0 has saved, and another rank failed
    ],
)
def test_only_a_job_that_has_saved_is_requeued(run_script, code, saved, state, restarts, ended, requeued):
    found, called, rank = run_script(code, saved, state, restarts)
    assert found == ended and ("requeue 7" in called) == requeued
    assert not Path(rank["PACELINE_SAVED"]).exists()


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"time": "1h"}, "--time 1h"),
        ({"name": "../a b"}, "--name ../a b"),
        ({"sbatch": "--comment='a"}, "--sbatch --comment"),
        ({"sbatch": "qos=high"}, "--sbatch qos=high"),
        ({"folder": "a\nb"}, "--folder"),
    ],
)
def test_options_that_slurm_would_refuse_are_refused(given, option):
    with pytest.raises(ConfigError, match=option):
        slurm.render_script(**JOB | given)


def test_user_files_are_not_overwritten(monkeypatch, tmp_path):
    scripts: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "_call", lambda *command, given="": scripts.append(given) or "7;cluster\n")
    own = tmp_path / "train.sbatch"
    own.write_text("mine")
    assert run(["python", "train.py"], slurm=True) == 0
    assert own.read_text() == "mine" and [(tmp_path / "train-7.sbatch").read_text()] == scripts
    assert scripts[0].startswith("#!/bin/bash\n")


def test_following_shows_the_log_names_a_lost_node_and_ends_with_the_job(monkeypatch, tmp_path):
    log, polls = tmp_path / "my log", []
    states = [
        ("JobState=PENDING NodeList=(null)", "", b""),
        (f"JobState=RUNNING NodeList=n[1-2] StdOut={log} Power=\n", "n1 allocated\nn2 allocated\n", b"one \xc3"),
        ("JobState=RUNNING NodeList=n[1-2]", "n1 allocated\nn2 allocated*\n", b"\xa9\ntwo\n"),
        ("JobState=PENDING NodeList=(null)", "n1 idle\nn2 down*\n", b""),
        (f"JobState=RUNNING NodeList=n1 StdOut={log} Power= Socks/Node=*\n", "n1 allocated\n", b"three\xff\n"),
        ("JobState=FAILED NodeList=n1 ExitCode=3:0", "n1 idle\n", b""),
    ]

    def call(*command: str) -> str:
        if command[0] == "scontrol":
            with log.open("ab") as file:
                file.write(states[len(polls)][2])
            polls.append(command)
            return states[len(polls) - 1][0]
        return states[len(polls) - 1][1]

    monkeypatch.setattr(slurm, "_call", call)
    monkeypatch.setattr(slurm, "_POLL_S", 0)
    shown: list[tuple[str, str]] = []
    assert slurm.follow("7", tmp_path / "given", lambda *item: shown.append(item)) == 3
    assert "".join(text for stream, text in shown if stream == "out") == "one é\ntwo\nthree\ufffd\n"
    said = [text for stream, text in shown if stream == "err"]
    assert sum("node n2 does not respond" in text for text in said) == 1
    assert [text.split(": ")[2].strip() for text in said if "job 7" in text] == [
        "pending", "running on n[1-2]", "pending", "running on n1", "failed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (["down", "RUNNING", "down", "down", "COMPLETED"], 0),
        (["RUNNING", "no sinfo", "FAILED"], 3),
        (["RUNNING", "Invalid job id specified"], 1),
        (["Invalid job id specified"], 1),
    ],
)
def test_following_continues_while_slurm_does_not_answer(monkeypatch, tmp_path, answers, code):
    left, sinfo_fails = list(answers), "no sinfo" in answers

    def call(command: tuple[str, ...], **_) -> SimpleNamespace:
        if command[0] == "sinfo":
            is_down = len(left) == 1 and sinfo_fails
            return SimpleNamespace(returncode=int(is_down), stdout="n1 allocated\n", stderr="timed out")
        state = left.pop(0).replace("no sinfo", "RUNNING")
        text = f"JobState={state} NodeList=n1 ExitCode={3 if state == 'FAILED' else 0}:0"
        return SimpleNamespace(returncode=int(not state.isupper()), stdout=text, stderr=f"error: {state}\n")

    monkeypatch.setattr(slurm.subprocess, "run", call)
    monkeypatch.setattr(slurm, "_POLL_S", 0)
    shown: list[str] = []
    assert slurm.follow("7", tmp_path / "log", lambda stream, text: shown.append(text)) == code
    assert left == [] and sum("trying again" in text for text in shown) == {5: 2, 3: 1}.get(len(answers), 0)
    assert any("sacct -j 7" in text for text in shown) == (answers[-1] == "Invalid job id specified")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_an_interrupt_stops_following_and_explains_the_state_of_the_job(monkeypatch, tmp_path, state):
    called = []

    def call(*command: str) -> str:
        called.append(command[0])
        if len(called) > 2:
            raise KeyboardInterrupt
        return f"JobState={state} NodeList=(null)"

    monkeypatch.setattr(slurm, "_call", call)
    monkeypatch.setattr(slurm, "_POLL_S", 0)
    shown: list[str] = []
    assert slurm.follow("7", tmp_path / "log", lambda stream, text: shown.append(text)) == 130
    assert set(called) == {"scontrol"}  # scancel is not called
    assert ("keeps running" if state == "RUNNING" else "stays queued") in shown[-1] and "scancel 7" in shown[-1]


def test_an_interrupt_during_submission_still_prints_the_job_id(monkeypatch, tmp_path):
    def call(*command: str, given: str = "") -> str:
        signal.raise_signal(signal.SIGINT)
        return "7\n"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm, "_call", call)
    shown: list[str] = []
    assert run(["python", "train.py"], slurm=True, wait=True, show=lambda stream, text: shown.append(text)) == 130
    assert "submitted job 7" in shown[-1] and "scancel 7" in shown[-1]


PODS = {
    "command": ["python", "train.py"], "name": "train", "nodes": 2, "ranks_per_node": 8, "image": "me/train:1",
    "gpus_per_node": 8, "variables": {"A": 'x "y"'},
}  # fmt: skip


def load_manifest(**given) -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(kubernetes.render_manifest(**PODS | given)))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("job", {}),
        ("job", {"gpus_per_node": 0, "variables": {}}),
        ("job", {"volume": "data:/data", "folder": "/data"}),
        ("job", {"name": "on"}),
        ("trainjob", {}),
        ("trainjob", {"gpus_per_node": 0, "variables": {}}),
    ],
)
def test_manifests_match_the_kubernetes_schema(kind, changes):
    manifest = load_manifest(**changes, kind=kind)
    assert [one["kind"] for one in manifest] == (["Service", "Job"] if kind == "job" else ["TrainJob"])
    for one in manifest:
        assert find_mistakes(one, one["kind"], one["kind"]) == []


def test_the_schema_check_finds_mistakes():
    (_, job) = load_manifest()
    pod = job["spec"]["template"]["spec"]
    pod["restartPolicy"], pod["grace"], job["spec"]["completions"] = "Always", 3, "2"
    del pod["containers"][0]["image"]
    found = find_mistakes(job, "Job", "Job")
    assert len(found) == 4 and any("no such field" in text for text in found) and any("lacks image" in t for t in found)


def test_pods_meet_at_the_first_and_end_by_signals():
    service, job = load_manifest(volume="claim:/data", folder="/data")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["workingDir"] == "/data"
    start = container["command"][2]
    assert start.startswith("exec torchrun ") and "--node-rank $JOB_COMPLETION_INDEX" in start
    assert "--nnodes 2 " in start and "--nproc-per-node 8 " in start and "--master-addr train-0.train " in start
    assert container["command"][3:] == ["paceline", "python", "train.py"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["terminationGracePeriodSeconds"] == 65
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "60"} in container["env"]
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]
    (train,) = load_manifest(kind="trainjob")
    assert train["spec"]["trainer"]["command"] == ["torchrun", "--no-python", "python", "train.py"]


def test_a_jobset_restarts_all_pods_and_they_meet_at_the_first():
    (jobset,) = load_manifest(kind="jobset", volume="claim:/data", folder="/data")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": replicated["template"]["spec"]}
    assert find_mistakes(job, "Job", "Job") == []
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert f"--master-addr {first} " in job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert job["spec"]["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"image": ""}, "--image"),
        ({"name": "Train_1"}, "--name Train_1"),
        ({"volume": "data"}, "--volume data"),
        ({"volume": "data-:/x"}, "--volume data-:/x"),
        ({"volume": "data:/x:ro"}, "--volume data:/x:ro"),
        ({"variables": {"PET_NNODES": "1"}}, "--env PET_"),
        ({"kind": "trainjob", "grace_s": 90.0}, "--grace with --kind trainjob"),
        ({"kind": "trainjob", "volume": "data:/data"}, "--volume"),
        ({"kind": "jobset", "name": "t" * 45}, "--name"),
    ],
)
def test_values_that_kubernetes_would_refuse_are_refused(changes, option):
    with pytest.raises(ConfigError, match=option):
        kubernetes.render_manifest(**PODS | changes)


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_arguments_and_values_are_passed_unchanged(kind):
    """Kubernetes expands $(NAME) and turns $$ into $; YAML does not accept surrogate pairs."""
    words = ["sh", "-c", "echo $(A) 😀 # \"c\": 'b'\n- d"]
    *_, job = load_manifest(command=words, variables={"A": "$(B)", "EMPTY": ""}, kind=kind)
    if kind == "jobset":
        job = job["spec"]["replicatedJobs"][0]["template"]
    place = job["spec"]["trainer"] if kind == "trainjob" else job["spec"]["template"]["spec"]["containers"][0]
    assert place["command"][-3:] == [word.replace("$", "$$") for word in words]
    assert {"name": "A", "value": "$$(B)"} in place["env"] and {"name": "EMPTY", "value": ""} in place["env"]


def test_golden_manifest():
    text = kubernetes.render_manifest(**PODS | {"gpus_per_node": 0, "kind": "trainjob"})
    assert text == Path(__file__).with_name("trainjob.yaml").read_text()
