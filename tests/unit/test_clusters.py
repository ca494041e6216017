"""The sbatch script, run by bash with Slurm's commands replaced; and manifests, against the fields of Kubernetes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.runtime import kubernetes, slurm
from tests.unit.kubernetes_schema import find_mistakes

JOB = {
    "command": ["python", "train.py", "--text", "it's $HOME"], "name": "train", "nodes": 2, "ranks_per_node": 4,
    "time": "1:00:00", "gpus_per_node": 0, "partition": "", "sbatch": (), "variables": {}, "folder": "",
    "grace_s": 90.0,
}  # fmt: skip


def test_the_script_has_the_options_that_were_given_and_no_others():
    lines = slurm.render_script(**JOB).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=train", "nodes=2", "ntasks-per-node=4", "time=1:00:00", "output=train-%j.log", "open-mode=append",
        "signal=USR1@90", "requeue",
    ]  # fmt: skip
    given = {"partition": "gpu", "gpus_per_node": 8, "sbatch": ("--qos=high",)}
    given |= {"variables": {"A": "x y"}, "folder": "/data"}
    script = slurm.render_script(**JOB | given)
    options = re.findall(r"#SBATCH (.*)", script)
    for option in ("--partition=gpu", "--gpus-per-node=8", "--qos=high", "--chdir=/data"):
        assert option in options
    assert "export A='x y'" in script.splitlines()
    assert "@" not in re.sub(r"USR1@\d+|\"\$@\"", "", script)


@pytest.fixture
def run_script(tmp_path):
    """`run_script(code, state, restarts)`: run the script where `srun` runs one rank and ends with this code; what was
    called, with the rank's variables."""

    def run(code: int, state: str = "RUNNING", restarts: int = 0, **job) -> tuple[int, list[str], dict]:
        tools = tmp_path / "tools"
        tools.mkdir()
        environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
        environment |= {
            "SLURM_LOCALID": "1",
            "SLURM_RESTART_COUNT": str(restarts),
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        fakes = {
            "srun": f'while [ "$1" != bash ]; do shift; done\n"$@" > "{tmp_path}/rank.json"\nexit {code}',
            "scontrol": f'echo "$@" >> "{tmp_path}/called"\n[ "$1" = show ] && echo n1 && echo n2',
            "squeue": f"echo {state}",
        }
        for name, text in fakes.items():
            (tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (tools / name).chmod(0o755)
        dump = "import json, os, sys; print(json.dumps({'arguments': sys.argv[1:], **os.environ}))"
        command = ["python3", "-c", dump, *JOB["command"][1:]]
        script = slurm.render_script(**JOB | {"command": command} | job)
        done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment, timeout=20)
        assert not done.stderr, done.stderr
        return (
            done.returncode,
            (tmp_path / "called").read_text().splitlines(),
            json.loads((tmp_path / "rank.json").read_text()),
        )

    return run


def test_a_rank_gets_torchruns_variables_and_the_words_of_the_command(run_script):
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


@pytest.mark.parametrize(
    ("code", "state", "restarts", "requeued"),
    [
        (138, "RUNNING", 0, True),
        (143, "RUNNING", 2, True),
        (143, "COMPLETING", 0, False),  # by scancel
        (1, "RUNNING", 0, False),
        (0, "RUNNING", 0, False),
    ],
)
def test_a_job_that_was_asked_to_stop_is_requeued_and_no_other(run_script, code, state, restarts, requeued):
    ended, called, _ = run_script(code, state, restarts)
    assert ended == code and ("requeue 7" in called) == requeued


def test_a_time_that_slurm_does_not_know_is_refused():
    with pytest.raises(ConfigError, match="--time 1h: write minutes"):
        slurm.render_script(**JOB | {"time": "1h"})


def test_following_shows_the_log_names_a_lost_node_and_ends_with_the_job(monkeypatch, tmp_path):
    log, polls = tmp_path / "log", []
    states = [
        ("JobState=PENDING NodeList=(null)", "", ""),
        ("JobState=RUNNING NodeList=n[1-2]", "n1 allocated\nn2 allocated\n", "one\n"),
        ("JobState=RUNNING NodeList=n[1-2]", "n1 allocated\nn2 allocated*\n", "two\n"),
        ("JobState=PENDING NodeList=(null)", "n1 idle\nn2 down*\n", ""),
        ("JobState=RUNNING NodeList=n1", "n1 allocated\n", "three\n"),
        ("JobState=FAILED NodeList=n1 ExitCode=3:0", "n1 idle\n", ""),
    ]

    def call(*command: str) -> str:
        if command[0] == "scontrol":
            with log.open("a") as file:
                file.write(states[len(polls)][2])
            polls.append(command)
            return states[len(polls) - 1][0]
        return states[len(polls) - 1][1]

    monkeypatch.setattr(slurm, "_call", call)
    monkeypatch.setattr(slurm, "_POLL_S", 0)
    shown: list[tuple[str, str]] = []
    assert slurm.follow("7", log, lambda *item: shown.append(item)) == 3
    assert "".join(text for stream, text in shown if stream == "out") == "one\ntwo\nthree\n"
    said = [text for stream, text in shown if stream == "err"]
    assert sum("node n2 does not respond" in text for text in said) == 1
    assert [text.split(": ")[2].strip() for text in said if "job 7" in text] == [
        "pending", "running on n[1-2]", "pending", "running on n1", "failed",
    ]  # fmt: skip


PODS = {
    "command": ["python", "train.py"], "name": "train", "nodes": 2, "ranks_per_node": 8, "image": "me/train:1",
    "gpus_per_node": 8, "variables": {"A": 'x "y"'},
}  # fmt: skip


@pytest.mark.parametrize("kind", kubernetes.KINDS)
@pytest.mark.parametrize(
    "changes", [{}, {"gpus_per_node": 0, "variables": {}}, {"volume": "data:/data", "folder": "/data"}]
)
def test_manifests_have_fields_that_kubernetes_knows(kind, changes):
    if kind == "trainjob" and "volume" in changes:
        with pytest.raises(ConfigError, match="training runtime"):
            kubernetes.build_manifest(**PODS | changes, kind=kind)
        return
    manifest = kubernetes.build_manifest(**PODS | changes, kind=kind)
    assert [one["kind"] for one in manifest] == (["Service", "Job"] if kind == "job" else ["TrainJob"])
    for one in manifest:
        assert find_mistakes(one, one["kind"], one["kind"]) == []


def test_the_check_of_manifests_finds_mistakes():
    (_, job) = kubernetes.build_manifest(**PODS)
    pod = job["spec"]["template"]["spec"]
    pod["restartPolicy"], pod["grace"], job["spec"]["completions"] = "Always", 3, "2"
    del pod["containers"][0]["image"]
    found = find_mistakes(job, "Job", "Job")
    assert len(found) == 4 and any("no such field" in text for text in found) and any("lacks image" in t for t in found)


def test_pods_meet_at_the_first_and_end_by_signals():
    service, job = kubernetes.build_manifest(**PODS, volume="claim:/data")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    start = container["command"][2]
    assert start.startswith("exec torchrun ") and "--node-rank $JOB_COMPLETION_INDEX" in start
    assert "--nnodes 2 " in start and "--nproc-per-node 8 " in start and "--master-addr train-0.train " in start
    assert container["command"][3:] == ["paceline", "python", "train.py"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["terminationGracePeriodSeconds"] == 60
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]
    (train,) = kubernetes.build_manifest(**PODS, kind="trainjob")
    assert train["spec"]["trainer"]["command"] == ["torchrun", "--no-python", "python", "train.py"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": ""}, "needs --image"),
        ({"name": "Train_1"}, "--name Train_1"),
        ({"volume": "data"}, "--volume data: write CLAIM:/PATH"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        kubernetes.build_manifest(**PODS | changes, kind="job")


@pytest.mark.parametrize("kind", kubernetes.KINDS)
def test_the_manifest_is_yaml_of_its_objects(kind):
    yaml = pytest.importorskip("yaml")
    pods = PODS | {"command": ["sh", "-c", "a: 'b' # \"c\"\n- d"], "kind": kind}
    assert list(yaml.safe_load_all(kubernetes.render_manifest(**pods))) == kubernetes.build_manifest(**pods)


def test_the_manifest_reads_like_this():
    text = kubernetes.render_manifest(**PODS | {"gpus_per_node": 0, "kind": "trainjob"})
    assert text == Path(__file__).with_name("trainjob.yaml").read_text()
