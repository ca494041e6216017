"""Real runs with an injected problem: the first sentence of the page names it; a healthy run has none."""

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
    "data": "Data loading", "late rank": "A late rank", "buckets": "The bucket size",
    "batch": ("The small batch", "The gloo backend"), "network": "The gloo backend", "nothing": "Healthy",
}  # fmt: skip
PROBLEMS = ("garbage collection", "evaluation", "uneven batches")  # the others of ailing.py are not yet confirmed


def find_first_sentence(result: paceline.Result) -> str:
    """The first sentence of its page, after the name of the run."""
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


@pytest.mark.slow  # a busy machine may have another bottleneck; `tests/unit/test_page.py` uses synthetic times
@pytest.mark.parametrize("kind", ["data", "late rank"])
def test_the_first_sentence_names_the_planted_problem(on_ranks, kind, tmp_path):
    job = shutil.copy(JOB, tmp_path)  # a file is imported only once
    assert all(said.startswith(SAYS[kind]) for said in on_ranks(2, train_on_rank, kind, str(job)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nine_of_ten_runs_are_diagnosed_correctly_including_healthy_ones(tmp_path, monkeypatch):
    """Each problem once in a `paceline train` run, and once in an attached program with torch's wrapper."""
    found = {}
    for kind in SAYS:
        monkeypatch.setenv("PLANTED", kind)
        plan = tmp_path / "plan.json" if kind == "buckets" else None
        if plan is not None:
            importlib.reload(planted_job).save_plan(plan)
        found["train", kind] = find_first_sentence(train_planted(str(JOB), plan and str(plan)))
        attached = paceline.attach([*TORCHRUN, str(JOB)], steps=48, stop=True, progress=False)
        found["attach", kind] = find_first_sentence(attached)
    wrong = {key: said for key, said in found.items() if not said.startswith(SAYS[key[1]])}
    assert len(wrong) <= 1 and not any(kind == "nothing" for _, kind in wrong), wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_planted_problem_is_found_with_its_rank(kind):
    program = str(Path(__file__).with_name("ailing.py"))
    result = paceline.attach([*TORCHRUN, program, kind], progress=False)
    found = {one.kind: one for one in result.bottlenecks}
    assert kind in found, result.text(None)
    assert found[kind].rank == {"uneven batches": 1}.get(kind)
