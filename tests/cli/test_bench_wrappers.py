"""`paceline bench wrappers` end to end, as users run it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from paceline import load_run
from paceline.measure.bench_settings import DEFAULT_WRAPPERS
from paceline.records import StepRecord

ROW_KEYS = {
    "model", "wrapper", "world_size", "backend", "step_median_s", "backward_median_s", "ratio_to_torch",
    "ratio_to_torch_tuned", "noise",
}  # fmt: skip


@pytest.mark.slow
def test_json_is_one_document_of_both_backends_and_the_run_folder_holds_everything(command, rendered, tmp_path):
    asked = ("bench", "wrappers", "--model", "cnn", "--wrapper", "bare,torch,paceline", "--backend", "gloo,paceline")
    answer = command(*asked, "--batch-size", "4", "--iters", "3", "--json", "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert set(document) >= {"answer", "rows", "run", "warnings"}
    rows = document["rows"]
    assert [(row["backend"], row["wrapper"], row["nwrong"]) for row in rows] == [
        (backend, wrapper, wrong)
        for backend in ("gloo", "shm")
        for wrapper, wrong in (("bare", None), ("torch", 0), ("paceline", 0))
    ]
    folder = Path(document["run"])
    files = {path.name for path in folder.iterdir()}
    assert files == {"run.json", "table.md", "table.csv", "wrappers.png", "wrappers.svg"}
    run = load_run(folder)
    assert run.complete and run.verb == "bench wrappers" and run.config["wrappers"] == ["bare", "torch", "paceline"]
    for number, (row, record) in enumerate(zip(rows, run.records, strict=True)):
        assert isinstance(record, StepRecord) and set(row) >= ROW_KEYS
        assert (row["model"], row["world_size"], row["batch_size"]) == ("cnn", 2, 4)
        assert 0 < row["backward_median_s"] < row["step_median_s"] and row["ratio_to_torch_tuned"] is None
        assert record.timing.median_s == row["step_median_s"]
        assert record.backward.median_s == row["backward_median_s"]
        for name, other in (("ratio_to_torch_on_gloo", 1), ("ratio_to_torch", 1 + number // 3 * 3)):
            pairs = zip(record.timing.reduced_s, run.records[other].timing.reduced_s, strict=True)
            assert row[name] == pytest.approx(statistics.median(here / there for here, there in pairs))
    assert rows[1]["ratio_to_torch_on_gloo"] == rows[4]["ratio_to_torch"] == 1.0
    assert "| / torch on gloo |" in (folder / "table.md").read_text()
    assert "paceline on shm" in (folder / "wrappers.svg").read_text()


@pytest.mark.slow
def test_a_person_gets_a_table_with_all_wrappers_at_world_size_1(command, tmp_path):
    asked = ("bench", "wrappers", "--model", "cnn", "--ranks", "1", "--batch-size", "2", "--iters", "5", "--details")
    answer = command(*asked, "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    for words in (*DEFAULT_WRAPPERS, "step (ms)", "/ torch", "/ tuned", "/ bare", "fastest of"):
        assert words in answer.out
    assert "steps of data-parallel wrappers (cnn, gloo, cpu, fp32" in answer.out
    assert answer.out.startswith("A step of cnn on 1 rank (gloo) in Paceline's wrapper takes ")
