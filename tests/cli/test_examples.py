"""Every example runs and prints the output promised in its docstring."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import paceline
from paceline.records import CollectiveRecord, Samples
from paceline.records.environment import capture_environment
from paceline.records.exchange import load_cap_times
from paceline.records.store import Run, save_run
from paceline.transport import why_not
from tests.cli.test_models_and_data import save_mrpc
from tests.cli.test_train import type_alone
from tests.conftest import BACKEND, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_example(start, name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    job = start(*prefix, str(EXAMPLES / name), *arguments)
    out, err = job.communicate(timeout=200)
    assert job.returncode == 0, err
    return out


@pytest.fixture
def run_here(monkeypatch, capfd) -> Callable[..., str]:
    """`run_here(name, *arguments)`: an example in this process, which has imported torch already, as has the server
    that forks its ranks."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


def test_every_example_has_a_test():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_allreduce_by_hand(start, prefix):
    assert run_example(start, "allreduce_by_hand.py", prefix=prefix) == "the sum over 2 ranks is 3\n"


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_minimal_ddp(start, prefix):
    loss, *ranks, waits, _, _, _, _, _ = lines = run_example(start, "minimal_ddp.py", prefix=prefix).splitlines()
    assert re.fullmatch(r"loss 0\.0\d+ after 60 steps of 2 x 32 samples", loss) and "waiting" in waits
    assert [line.split(":")[0] for line in ranks] == ["rank 0", "rank 1"]
    for line in ranks:
        total_s, batch_s = map(float, re.findall(r"[\d.]+(?= s)", line))
        assert batch_s * 60 == pytest.approx(total_s, abs=0.01)
    sizes = lines[-4:]
    assert [line.split()[0] for line in sizes] == ["4", "256", "4096", "16384"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--by-length",)])
def test_the_program_that_the_readme_profiles(start, options):
    out = run_example(start, "train.py", "--steps", "3", *options, prefix=TORCHRUN)
    assert re.fullmatch(r"step 0: loss \d\.\d+\n", out)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_train_by_hand(start, prefix):
    out = run_example(start, "train_by_hand.py", prefix=prefix)
    first, *report = out.splitlines()
    assert first.startswith("loss 0.0") and first.endswith("after training on 2 ranks")
    assert report[0].startswith(f"rank 0 of 2 on {BACKEND}") and "bucket" in report[1]


def test_the_program_of_the_readme_is_one_world_of_two_ranks(run_here):
    out = run_here("quick_start.py")
    assert out.count("rank 0 of 2 on") == 1 and "rank 1" not in out


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_the_program_of_the_readme_in_its_own_process(start, prefix):
    out = run_example(start, "quick_start.py", prefix=prefix)
    assert out.count("rank 0 of 2 on") == 1 and "rank 1" not in out


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_own_model(start, prefix):
    profiled, predicted, tuned = run_example(start, "own_model.py", prefix=prefix).splitlines()
    assert profiled.startswith("profile: A step of Matcher takes ")
    assert re.fullmatch(r"predicted on 64 ranks: [\d.]+ ms \([\d.]+ to [\d.]+\)", predicted)
    assert re.fullmatch(r"tuned: (use|default|flat|undecided), \d+ bucket\(s\)", tuned)


@pytest.mark.slow
def test_who_am_i(start):
    lines = run_example(start, "who_am_i.py").splitlines()
    assert lines == [f"global rank {r} of 4 is rank {r % 2} of 2 on its row" for r in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [(), TORCHRUN])
def test_gather_objects(start, prefix):
    lines = run_example(start, "gather_objects.py", prefix=prefix).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["in two groups", "in one group", "world.share"] * 2
    assert all("Timed out waiting 2000ms" in line for line in lines[::3])
    assert all(line.endswith("['rank 0', 'rank 1']") for line in lines[1::3] + lines[2::3])


def test_read_a_run(run_here, tmp_path):
    # Synthetic records with known times, from which the example must derive its numbers.
    def record(num_bytes: int, seconds: float) -> CollectiveRecord:
        return CollectiveRecord(
            collective="all_reduce", backend="gloo", device="cpu", world_size=2, num_bytes=num_bytes, dtype="float32",
            op="sum", timing=Samples(seconds=((seconds, seconds / 2),) * 5),
        )  # fmt: skip

    records = (record(2**20, 0.003), record(3 * 2**20, 0.007))
    save_run(Run("bench allreduce", {}, capture_environment(), records), tmp_path / "run.json")
    out = run_here("read_a_run.py", str(tmp_path))
    assert "1048576 bytes: 5 repetitions, median 0.003000 s, noise 0%" in out
    assert "gloo, 2 ranks: a 2 MiB message takes about 0.005000 s" in out


def test_tables_for_predict(run_here, tmp_path):
    run = EXAMPLES.parent / "results" / "neoverse-n1-2-cores" / "tune-1Gb-link-torch"
    out = run_here("tables_for_predict.py", str(run), str(tmp_path / "tables"))
    sample = EXAMPLES / "bucket-tables"
    assert {path.name: path.read_text() for path in (tmp_path / "tables").iterdir()} == {
        path.name: path.read_text() for path in sample.glob("*.csv")
    }
    assert "bucket size" in out
    caps = paceline.predict_csv(sample, measured=sample / "steps.csv")
    assert caps.table("caps").rows_json() and len(load_cap_times(sample / "steps.csv")) == 7


def test_large_batch(run_here):
    found = re.fullmatch(r"(\d+) steps, the last of 256 samples; accuracy (\d+)%\n", run_here("large_batch.py"))
    assert found and int(found[1]) == 4 * 32 + 2 * 8 + 2 * 2 and int(found[2]) > 80


@pytest.mark.slow
def test_paraphrase(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_mrpc(tmp_path / "mrpc")
    asked = ("--data", "mrpc:mrpc", "--context", "64", "--batch-size", "4", "--optimizer", "adamw", "--lr", "0.01")
    model = EXAMPLES / "paraphrase.py"
    answer = type_alone("train", "--model", f"{model}:build", *asked, "--epochs", "8", "--json")
    assert answer.code == 0, answer.err
    first, *_, last = json.loads(answer.out)["epochs"]
    assert last["accuracy"] > first["accuracy"] and last["loss"] < first["loss"]


def train_in_one_process(epochs: int) -> float:
    """The loop of ray_train.py on the batches of both ranks, without interruption: the last loss on rank 0's batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 1024), nn.ReLU(), nn.Linear(1024, 1))
    momentum = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for epoch in range(epochs):
        generators = [torch.Generator().manual_seed(1000 * epoch + rank) for rank in range(2)]
        for _ in range(20):
            batches = [torch.randn(32, 10, generator=generator) for generator in generators]
            losses = [nn.functional.mse_loss(net(inputs).squeeze(1), inputs.mean(1)) for inputs in batches]
            gradients = torch.autograd.grad(sum(losses) / 2, list(net.parameters()))
            with torch.no_grad():  # by hand: torch.optim would leave an environment variable in this process
                for parameter, velocity, gradient in zip(net.parameters(), momentum, gradients, strict=True):
                    parameter -= 0.01 * velocity.mul_(0.9).add_(gradient)
    return losses[0].item()


def find_processes(variable: str, value: str) -> list[str]:
    """The processes that inherited this variable: Ray's daemons are not children of the process that started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
        except psutil.Error:  # the process has exited, or belongs to another user
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray")
@pytest.mark.skipif(bool(why_not()), reason="the example uses the backend shm")
def test_ray_train(start, tmp_path):
    # Not in tmp_path: Ray puts its sockets in this folder, and their paths are limited to 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment = {**os.environ, "HOME": str(tmp_path), "RAY_TMPDIR": folder, "RAY_DEDUP_LOGS": "0"}
        job = start(str(EXAMPLES / "ray_train.py"), str(tmp_path / "runs"), env=environment)
        out, err = job.communicate(timeout=500)
        assert job.returncode == 0, err
        wait_until(lambda: not find_processes("RAY_TMPDIR", folder))
    assert out.count("rank 0 of 2 on shm, 40 synchronized steps; buckets: 3") == 2 and "rank 1 of" not in out
    first, second = (ast.literal_eval(line) for line in re.findall(r"^(?:first|second) run: (.*)$", out, re.MULTILINE))
    assert (first["epoch"], first["buckets"], second["epoch"], second["buckets"]) == (2, 3, 4, 3)
    assert first["loss"] == pytest.approx(train_in_one_process(2), rel=1e-3)
    assert second["loss"] == pytest.approx(train_in_one_process(4), rel=1e-3)  # resumed from the state of the first
