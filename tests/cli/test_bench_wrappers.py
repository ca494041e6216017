"""`paceline bench wrappers` end to end, as a user types it."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

from paceline import load_run
from paceline.measure.settings import WRAPPERS
from paceline.records import StepRecord

ROW_KEYS = {
    "model", "wrapper", "world_size", "backend", "step_median_s", "backward_median_s", "ratio_to_torch",
    "ratio_to_torch_tuned", "noise",
}  # fmt: skip
SMALL = ("bench", "wrappers", "--model", "cnn", "--wrapper", "bare", "--wrapper", "torch", "--iters", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_json_is_one_document_and_the_run_folder_holds_everything(command, tmp_path):
    answer = command(*SMALL, "--batch-size", "4", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert set(document) >= {"answer", "rows", "run", "warnings"}
    rows = document["rows"]
    assert [(row["model"], row["wrapper"], row["world_size"], row["batch_size"]) for row in rows] == [
        ("cnn", "bare", 2, 4), ("cnn", "torch", 2, 4),
    ]  # fmt: skip
    for row in rows:
        assert set(row) >= ROW_KEYS
        assert 0 < row["backward_median_s"] < row["step_median_s"]
        assert row["ratio_to_torch"] > 0 and row["ratio_to_torch_tuned"] is None
    assert rows[1]["ratio_to_torch"] == 1.0 and rows[1]["nwrong"] == 0
    folder = Path(document["run"])
    files = {path.name for path in folder.iterdir()}
    assert files == {"run.json", "table.md", "table.csv", "wrappers.png", "wrappers.svg"}
    run = load_run(folder)
    assert run.complete and run.verb == "bench wrappers" and run.config["wrappers"] == ["bare", "torch"]
    for row, record in zip(rows, run.records, strict=True):
        assert isinstance(record, StepRecord)
        assert record.timing.median_s == row["step_median_s"]
        assert record.backward.median_s == row["backward_median_s"]


def test_a_person_gets_a_table_with_all_wrappers_at_world_size_1(command, tmp_path):
    answer = command(
        "bench",
        "wrappers",
        "--model",
        "cnn",
        "--ranks",
        "1",
        "--batch-size",
        "2",
        "--iters",
        "5",
        "--out",
        str(tmp_path),
    )
    assert answer.code == 0, answer.err
    for words in (*WRAPPERS, "step (ms)", "/ torch", "/ tuned", "/ bare", "than torch", "fastest of"):
        assert words in answer.out
    assert "steps of data-parallel wrappers (cnn, gloo, cpu, fp32" in answer.out
    assert answer.out.startswith("A step of cnn on 1 rank (gloo) in Paceline's wrapper takes ")


def test_torch_and_ours_on_both_backends_in_one_run(command, tmp_path):
    asked = ("bench", "wrappers", "--model", "cnn", "--wrapper", "torch,paceline", "--backend", "gloo,paceline")
    answer = command(*asked, "--batch-size", "2", "--iters", "3", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)["rows"]
    assert [(row["backend"], row["wrapper"], row["nwrong"]) for row in rows] == [
        ("gloo", "torch", 0), ("gloo", "paceline", 0), ("shm", "torch", 0), ("shm", "paceline", 0),
    ]  # fmt: skip
    records = load_run(next(tmp_path.iterdir())).records
    for row, record in zip(rows, records, strict=True):
        assert isinstance(record, StepRecord)
        for name, other in (
            ("ratio_to_torch_on_gloo", records[0]),
            ("ratio_to_torch", records[rows.index(row) // 2 * 2]),
        ):
            pairs = zip(record.timing.reduced_s, other.timing.reduced_s, strict=True)
            assert row[name] == pytest.approx(statistics.median(here / there for here, there in pairs))
    assert rows[0]["ratio_to_torch_on_gloo"] == rows[2]["ratio_to_torch"] == 1.0
    folder = next(tmp_path.iterdir())
    assert "| / torch on gloo |" in (folder / "table.md").read_text()
    assert "paceline on shm" in (folder / "wrappers.svg").read_text()


DIVERGING = """
import torch
import torch.distributed as dist
from paceline.cli.main import main

real = torch.optim.SGD.step

def damaged(self, *args, **kwargs):
    real(self, *args, **kwargs)
    if dist.get_rank() == 1:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-6)

torch.optim.SGD.step = damaged
main()
"""


@pytest.mark.timeout(180)
def test_a_replica_that_drifts_on_one_rank_is_reported_and_exits_1_on_all(start, tmp_path):
    script = tmp_path / "diverging.py"
    script.write_text(DIVERGING)
    job = start(
        *TORCHRUN, "--no-python", "bash", "-c", f'{sys.executable} {script} "$@" ; echo "exit $?" >&2', "x",
        *SMALL, "--batch-size", "2", "--json",
    )  # fmt: skip
    out, err = job.communicate(timeout=150)
    assert err.count("exit 1") == 2, err
    document = json.loads(out)
    assert [(row["nwrong"], row["nchecked"]) for row in document["rows"]] == [(None, None), (1, 16)]
    assert any("WRONG PARAMETERS of cnn in torch (1 of 16 parameters)" in text for text in document["warnings"])
