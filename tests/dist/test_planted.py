"""Real runs with a problem that was planted: the first sentence of their page names it, and none in a healthy run."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

import paceline
from paceline.report.page import render_page, split_verdict
from tests.dist import planted_job
from tests.unit.test_page import Reader

JOB = Path(planted_job.__file__)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SAYS = {
    "data": "Waiting for data stands out", "late rank": "A late rank stands out",
    "buckets": "The size of the buckets stands out", "batch": "The small batch stands out",
    "network": "Exposed communication stands out", "nothing": "Nothing stands out",
}  # fmt: skip


def find_first_sentence(result: paceline.Result) -> str:
    """What people read first on its page, after the name of the run."""
    _, verdict, *_ = (word for word in Reader(render_page([result])).words if word.strip())
    assert verdict == split_verdict(result.headline)[0]
    return verdict


def train_planted(job: str, plan: str | None = None, steps: int = 40) -> paceline.Result:
    return paceline.train(
        f"{job}:build", f"{job}:load", 2, steps=steps, plan=plan, lr=0.01, backend="gloo", threads=1, progress=False
    )


def train_on_rank(kind: str, job: str) -> str:
    os.environ["PLANTED"] = kind
    try:
        return find_first_sentence(train_planted(job, steps=14))
    finally:
        del os.environ["PLANTED"]


@pytest.mark.parametrize("kind", ["data", "late rank"])
def test_what_was_planted_is_the_first_sentence(on_ranks, kind, tmp_path):
    job = shutil.copy(JOB, tmp_path)  # a file is imported once
    assert {said.partition(":")[0] for said in on_ranks(2, train_on_rank, kind, str(job))} == {SAYS[kind]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAYS)
@pytest.mark.parametrize("how", ["train", "attach"])
def test_ten_runs_and_healthy_ones(how, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED", kind)
    if how == "attach":
        result = paceline.attach([*TORCHRUN, str(JOB)], steps=48, stop=True, progress=False)
    else:
        plan = None
        if kind == "buckets":
            plan = str(tmp_path / "plan.json")
            importlib.reload(planted_job).save_plan(Path(plan))
        result = train_planted(str(JOB), plan)
    assert find_first_sentence(result).startswith(SAYS[kind]), result.text(None)
