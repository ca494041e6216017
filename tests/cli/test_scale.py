"""`paceline scale` end to end, on jobs too small for the results to mean anything.

Interrupted and resumed studies are tested in `test_scale_resume`.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest

import paceline
from paceline import load_run, machine
from paceline.records import (
    BatchRecord,
    CollectiveRecord,
    LargeBatchRecord,
    LayerProfileRecord,
    NoiseRecord,
    StepRecord,
)
from tests.cli.test_train import one_launched_rank, type_alone, type_command
from tests.cli.test_train_bad_input import LAUNCH_VARIABLES, assert_refused

TINY = ("--channels", "2,4", "--hidden", "8", "--threads", "1", "--device", "cpu")
BATCH = ("scale", "batch", *TINY, "--samples", "24", "--batch-size", "4,8", "--epochs", "3")
RANKS = (
    "scale", "ranks", *TINY, "--ranks", "2", "--batch-size", "4", "--global-batch-size", "8", "--iters", "2",
    "--samples", "16", "--backend", "gloo",
)  # fmt: skip
LARGE = (
    "scale", "large-batch", *TINY, "--samples", "48", "--test-samples", "16", "--base-batch-size", "4",
    "--global-batch-size", "16", "--recipes", "linear+warmup", "--seeds", "2", "--epochs", "2", "--evaluations", "2",
    "--updates", "3", "--ranks", "1",
)  # fmt: skip
STUDIED = {"run.json", "study.json", "cells", "report.md"}
TABLES = {
    "batch": ("batch",),
    "ranks": ("scaling", "communication", "bandwidth", "predicted"),
    "large-batch": ("recipes", "noise"),
}
PICTURES = {
    "batch": ("batch",),
    "ranks": ("weak", "strong", "communication"),
    "large-batch": ("accuracy", "curves"),
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def list_tables(document: dict, name: str) -> list[str]:
    """The tables of a study. On a busy machine possibly no model fits the times; the study then reports that."""
    is_predicted = not all(line.startswith("No prediction for") for line in document["assumptions"])
    return [table for table in TABLES[name] if table != "predicted" or is_predicted]


def read_csv(run: str, name: str) -> list[dict[str, str]]:
    with (Path(run) / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", list(TABLES))
def test_a_study_leaves_its_records_tables_pictures_and_page(studies, name):
    document = studies[name]
    folder = Path(document["run"])
    expected = list_tables(document, name)
    tables = {f"{table}.{kind}" for table in expected for kind in ("md", "csv")}
    pictures = {f"{picture}.{kind}" for picture in PICTURES[name] for kind in ("png", "svg")}
    assert {path.name for path in folder.iterdir()} == STUDIED | tables | pictures
    assert set(document) == {"verb", "answer", "run", *expected, "findings", "assumptions", "warnings"}
    assert document["answer"] and document["findings"]
    run = load_run(folder)
    assert run.complete and run.verb == f"scale {name}"
    assert json.loads((folder / "study.json").read_text())["config"] == run.config
    for table in expected:
        rows = read_csv(document["run"], table)
        assert len(rows) == len(document[table]) > 0 and list(rows[0]) == list(document[table][0])
    page = (folder / "report.md").read_text()
    assert all(line in page for line in (document["answer"], *document["findings"]))
    for png in folder.glob("*.png"):
        assert png.read_bytes().startswith(b"\x89PNG")
    assert_links(folder / "report.md", {path.name for path in folder.glob("*.png")})


def assert_links(page: Path, names: set[str]) -> None:
    """The page shows images with these names, and the files exist."""
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    assert {Path(link).name for link in links} == names
    assert all((page.parent / link).is_file() for link in links)


def test_the_cells_together_are_the_run(studies):
    for name, document in studies.items():
        folder = Path(document["run"])
        kept = [json.loads(path.read_text()) for path in (folder / "cells").iterdir()]
        records = [record for cell in kept for record in cell["records"]]
        saved = json.loads((folder / "run.json").read_text())["records"]
        assert sorted(records, key=json.dumps) == sorted(saved, key=json.dumps), name


def test_batch_sizes_are_timed_over_whole_epochs(studies):
    document = studies["batch"]
    records = load_run(Path(document["run"])).records
    assert all(isinstance(record, BatchRecord) for record in records)
    for record, row in zip(records, read_csv(document["run"], "batch"), strict=True):
        (first_s,), (second_s,) = record.timing.seconds
        assert (int(row["batch_size"]), int(row["num_steps"])) in ((4, 6), (8, 3))
        assert float(row["epoch_s"]) == pytest.approx((first_s + second_s) / 2)
        assert float(row["samples_per_s"]) == pytest.approx(24 / ((first_s + second_s) / 2))
        assert float(row["step_s"]) == pytest.approx((first_s + second_s) / 2 / int(row["num_steps"]))
    small, large = (record.samples_per_s for record in records)
    assert [row["is_knee"] for row in document["batch"]] == [small >= 0.9 * large, False]


def test_scaling_numbers_are_those_of_the_raw_seconds(studies):
    """Recompute the table from run.json, without the classes that produced it."""
    folder = studies["ranks"]["run"]
    saved = json.loads((Path(folder) / "run.json").read_text())["records"]
    records = [record for record in saved if record["kind"] == "step" and record["role"] == "job"]
    rows = read_csv(folder, "scaling")
    assert len(records) == len(rows) == 6  # weak and strong: one rank, and two wrappers on two
    slowest = [[max(ranks) for ranks in record["samples"]["seconds"]] for record in records]
    for record, times_s, row in zip(records, slowest, rows, strict=True):
        n, weak = record["world_size"], record["mode"] == "weak"
        assert (row["wrapper"], int(row["world_size"]), row["mode"]) == (record["wrapper"], n, record["mode"])
        alone_s = slowest[0 if weak else 3]
        assert len(times_s) == 2 == int(row["num_repetitions"])
        assert float(row["step_s"]) == pytest.approx(statistics.median(times_s))
        assert float(row["samples_per_s"]) == pytest.approx((4 * n if weak else 8) / statistics.median(times_s))
        ratio = statistics.median(a / b for a, b in zip(alone_s, times_s, strict=True))
        assert float(row["speedup"]) == pytest.approx(ratio * (n if weak else 1))
        assert float(row["efficiency"]) == pytest.approx(ratio if weak else ratio / n)
    for record, row in zip([r for r in records if r["world_size"] > 1], read_csv(folder, "communication"), strict=True):
        plain, silent, busy = (
            [max(ranks) for ranks in record[kind]["seconds"]] for kind in ("samples", "no_comm", "busy")
        )
        exposed_s = max(0.0, statistics.median(a - b for a, b in zip(plain, silent, strict=True)))
        assert float(row["exposed_s"]) == pytest.approx(exposed_s)
        assert float(row["overlap"]) == pytest.approx(1 - exposed_s / statistics.median(busy))
    for record, row in zip([r for r in records if r["world_size"] > 1], read_csv(folder, "bandwidth"), strict=True):
        busy_s = statistics.median(max(ranks) for ranks in record["busy"]["seconds"])
        rate = sum(record["bucket_bytes"]) / busy_s  # two ranks: each byte crosses the bus once
        assert float(row["busbw_bytes_per_s"]) == pytest.approx(rate)
        assert float(row["peak_share"]) == pytest.approx(rate / float(row["peak_bytes_per_s"])) and rate > 0


def test_ranks_are_measured_with_their_layers_and_all_reduces(studies):
    run = load_run(Path(studies["ranks"]["run"]))
    counts = {kind: sum(isinstance(r, kind) for r in run.records) for kind in (StepRecord, LayerProfileRecord)}
    # For each cell: one rank, each wrapper on one rank, two ranks that send nothing, and each wrapper on two.
    assert counts == {StepRecord: 2 * 6, LayerProfileRecord: 2}
    sweep = [record for record in run.records if isinstance(record, CollectiveRecord)]
    assert {(record.backend, record.world_size) for record in sweep} == {("gloo", 2)}
    assert max(record.num_bytes for record in sweep) >= 1 << 20
    if "predicted" not in list_tables(studies["ranks"], "ranks"):
        return
    predicted = {(row["world_size"], row["source"]) for row in studies["ranks"]["predicted"]}
    assert (64, "simulated") in predicted and (2, "simulated") in predicted


def test_large_batches_have_a_baseline_recipes_seeds_and_noise(studies):
    run = load_run(Path(studies["large-batch"]["run"]))
    runs = [record for record in run.records if isinstance(record, LargeBatchRecord)]
    assert [(r.budget, r.global_batch_size, r.recipe, r.seed) for r in runs] == [
        (*cell, seed)
        for seed in (1, 2)
        for cell in (
            ("epochs", 4, "none"), ("epochs", 16, "none"), ("epochs", 16, "linear+warmup"),
            ("updates", 4, "none"), ("updates", 16, "none"),
        )
    ]  # fmt: skip
    assert {(r.world_size, r.batch_size) for r in runs} == {(1, 4), (1, 16)}
    assert [r.num_updates for r in runs] == [24, 6, 6, 3, 3] * 2
    assert [r.lr for r in runs[:3]] == pytest.approx([0.005, 0.005, 0.02])
    assert all(len(r.curve) == 2 and r.curve[-1].update == r.num_updates for r in runs)
    # Other seeds give other runs of the same task.
    assert len({r.curve[-1].test_loss for r in runs}) == len(runs)
    noise = [record for record in run.records if isinstance(record, NoiseRecord)]
    assert [record.step for record in noise] == [2, 7, 14, 24]  # 0.1, 0.3, 0.6 and all of 24 updates
    rows = read_csv(studies["large-batch"]["run"], "recipes")
    for row, (one, other) in zip(rows, zip(runs[:5], runs[5:], strict=True), strict=True):
        accuracies = one.curve[-1].test_accuracy, other.curve[-1].test_accuracy
        assert float(row["test_accuracy"]) == pytest.approx(statistics.mean(accuracies))
        assert float(row["test_accuracy_deviation"]) == pytest.approx(statistics.stdev(accuracies))


def test_strategies_are_compared_with_bf16_by_accuracy_and_bytes(tmp_path):
    answer = type_alone(
        "scale", "strategies", *TINY, "--samples", "32", "--test-samples", "16", "--strategies", "topk:0.1,localsgd:3",
        "--workers", "2", "--seeds", "2", "--epochs", "2", "--evaluations", "2", "--batch-size", "8", "--target", "0",
        "--json", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    rows = {row["strategy"]: row for row in document["strategies"]}
    assert list(rows) == ["dense", "bf16", "topk:0.1", "localsgd:3"]
    runs = [record for record in load_run(Path(document["run"])).records if isinstance(record, LargeBatchRecord)]
    assert [(run.recipe, run.seed, run.num_workers, run.num_updates) for run in runs] == [
        (name, seed, 2, 8) for seed in (1, 2) for name in rows
    ]
    assert rows["bf16"]["gap"] is None
    for name, row in rows.items():
        accuracy = statistics.mean(run.curve[-1].test_accuracy for run in runs if run.recipe == name)
        # a target of 0 is reached at once
        assert row["test_accuracy"] == pytest.approx(accuracy) and row["target_s"] > 0
        if name != "bf16":
            assert row["gap"] == pytest.approx(rows["bf16"]["test_accuracy"] - accuracy)
    sent = {name: row["sent_bytes"] for name, row in rows.items()}
    assert sent["bf16"] == sent["dense"] / 2 and sent["localsgd:3"] == pytest.approx(sent["dense"] / 3)
    assert rows["topk:0.1"]["ratio"] == pytest.approx(sent["dense"] / sent["topk:0.1"])
    assert {"strategies.png", "curves.png"} <= {path.name for path in Path(document["run"]).iterdir()}


NUMBERS = (
    "scale", "large-batch", "--model", "mlp", "--hidden", "4", "--threads", "1", "--device", "cpu", "--samples", "32",
    "--test-samples", "8", "--base-batch-size", "4", "--global-batch-size", "8", "--seeds", "1", "--epochs", "2",
    "--evaluations", "1", "--updates", "0", "--ranks", "1",
)  # fmt: skip


@pytest.mark.slow
def test_large_batches_of_a_model_that_predicts_numbers(tmp_path):
    """By default, compare every recipe that fits such a job by test loss."""
    answer = type_alone(*NUMBERS, "--json", "--out", str(tmp_path / "out"))
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    recipes = [row["recipe"] for row in document["recipes"]]
    assert recipes == ["none", "none", "sqrt", "linear", "linear+warmup", "lars+warmup", "lamb+warmup", "grow"]
    assert "8 without a recipe: test loss " in document["answer"]
    assert any("compares test losses" in line for line in document["findings"])
    assert all(row["test_accuracy"] is None and row["test_loss"] > 0 for row in document["recipes"])
    folder = Path(document["run"])
    assert (folder / "loss.png").is_file() and not (folder / "accuracy.png").exists()


def test_a_person_gets_tables_findings_and_the_location_of_the_page(studies, tmp_path):
    """Resuming a finished study shows it again: nothing is measured, and its files are redrawn."""
    folder = tmp_path / "copy"
    shutil.copytree(studies["ranks"]["run"], folder)
    (folder / "weak.png").unlink()
    before = (folder / "run.json").read_bytes()
    answer = type_command("scale", "ranks", "--resume", str(folder), "--details")
    assert answer.code == 0, answer.err
    for words in ("speed-up", "efficiency", "exposed", "of peak", f"page: {folder / 'report.md'}"):
        assert words in answer.out
    assert f"\nrun: {folder}\n" in answer.out
    assert (folder / "weak.png").is_file() and (folder / "run.json").read_bytes() == before


def test_a_page_of_several_runs_shows_existing_figures(studies, tmp_path):
    runs = [document["run"] for document in studies.values()]
    answer = type_command("scale", "report", *runs, "--json", "--out", "pages")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    (folder,) = Path("pages").iterdir()
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.json", "run.json"}
    assert json.loads((folder / "report.json").read_text()) == document
    assert document["runs"] == runs and list(document["tables"]) == runs
    assert [list(tables) for tables in document["tables"].values()] == [
        list_tables(study, name) for name, study in studies.items()
    ]
    assert document["findings"] == [line for study in studies.values() for line in study["findings"]]
    assert_links(folder / "report.md", {path.name for run in runs for path in Path(run).glob("*.png")})


def change_records(run: str, folder: Path, change) -> Path:
    """A copy of a run with modified records."""
    shutil.copytree(run, folder)
    document = json.loads((folder / "run.json").read_text())
    for record in document["records"]:
        change(record)
    (folder / "run.json").write_text(json.dumps(document))
    return folder


@pytest.mark.slow
def test_a_bandwidth_above_the_peak_is_refused(studies, tmp_path):
    def slow_down(record: dict) -> None:
        if record["kind"] == "collective":
            record["samples"]["seconds"] = [[1000 * s for s in row] for row in record["samples"]["seconds"]]

    run = change_records(studies["ranks"]["run"], tmp_path / "changed", slow_down)
    for verb in (("report", str(run)), ("ranks", "--resume", str(run))):
        answer = type_command("scale", *verb)
        assert answer.code == 1 and "above the peak" in answer.err and "saved" not in answer.err
        assert "above the peak" not in answer.out and "of peak" not in answer.out
    assert "efficiency" in answer.out  # the other measurements are still shown


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*RANKS, "--network", "10gb"), "unknown network '10gb'"),
        ((*RANKS, "--predict-ranks", "many"), "--predict-ranks 'many' is not a whole number"),
        ((*BATCH, "--batch-size", "4,x"), "--batch-size 'x' is not a whole number"),
        ((*LARGE, "--at-once", "0"), "--at-once 0: must be at least 1"),
        (("scale", "batch", "--resume", "nowhere"), "--resume nowhere: nowhere/study.json does not exist"),
        (("scale", "report", "nowhere"), "nowhere"),
        (("scale", "report", "--resume", "nowhere"), "--resume nowhere: it contains none of batch, ranks, large-batch"),
    ],
)
def test_bad_input_is_refused_in_one_line(command, monkeypatch, arguments, words):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    assert_refused(command(*arguments), words)


@pytest.mark.parametrize(
    ("verb", "study", "more", "words"),
    [
        ("batch", "ranks", (), "it is a run of `scale ranks`, but this is `scale batch`"),
        ("large-batch", "batch", (), "it is a run of `scale batch`, but this is `scale large-batch`"),
        (
            "ranks",
            "ranks",
            ("--iters", "3"),
            "--iters with --resume: a study keeps the settings it was started with",
        ),
        ("large-batch", "large-batch", ("--base-batch-size", "4"), "--base-batch-size with --resume"),
        ("large-batch", "large-batch", ("--seeds", "3"), "--seeds with --resume"),  # the default
        ("batch", "batch", ("--out", "elsewhere"), "--out with --resume"),
        ("report", "batch", ("{run}",), "with runs: a page of finished runs has nothing to resume"),
    ],
)
def test_a_study_is_resumed_as_it_was_started(command, studies, verb, study, more, words):
    run = studies[study]["run"]
    assert_refused(command("scale", verb, *(part.format(run=run) for part in more), "--resume", run), words)


@pytest.mark.parametrize("verb", ["batch", "ranks"])
def test_times_of_another_machine_are_not_mixed_in(command, studies, tmp_path, verb):
    folder = tmp_path / "copy"
    shutil.copytree(studies[verb]["run"], folder)
    document = json.loads((folder / "study.json").read_text())
    document["config"]["machine"] = "a faster box"
    (folder / "study.json").write_text(json.dumps(document))
    (folder / "run.json").unlink()
    answer = command("scale", verb, "--resume", str(folder))
    assert_refused(answer, "it was started on a faster box, but this is")
    # The study is also refused as part of a page.
    shutil.copytree(folder, tmp_path / "page" / verb)
    if verb == "batch":
        assert_refused(command("scale", "report", "--resume", "page"), "it was started on a faster box")


def test_a_page_accepts_only_studies(command, studies, tmp_path):
    def pass_by(record: dict) -> None:
        pass

    folder = change_records(studies["batch"]["run"], tmp_path / "changed", pass_by)
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(document | {"verb": "tune"}))
    assert_refused(command("scale", "report", str(folder)), "is a run of `tune`: use runs of scale batch")


def test_an_impossible_study_leaves_nothing_behind():
    """Ranks detect that the study is impossible only after its folder has been created."""
    assert_refused(
        type_alone(*LARGE, "--global-batch-size", "64"), "48 samples are fewer than a batch of 64: leave it out"
    )


@pytest.mark.parametrize(
    ("verb", "arguments", "code"),
    [
        ("batch", {"wrapper": "torch"}, "unused"),
        ("ranks", {"sync_batchnorm": True}, "unused"),
        ("large_batch", {"accumulate": 2}, "unused"),
        ("batch", {"resume": "somewhere", "samples": 8}, "resume"),
        ("report", {"resume": "somewhere"}, "missing"),
    ],
)
def test_a_program_gets_the_same_refusals_with_codes(verb, arguments, code):
    with pytest.raises(paceline.ConfigError) as caught:
        getattr(paceline.scale, verb)(**arguments)
    assert caught.value.code == code


def test_a_program_gets_the_result_and_nothing_is_written(tmp_path):
    with one_launched_rank():
        result = paceline.scale.batch(
            channels=(2, 4), hidden=8, threads=1, device="cpu", samples=24, batch_size=(4, 8), epochs=2
        )
    assert [row["batch_size"] for row in result.table().rows_json()] == [4, 8] and result.folder is None
    assert str(result).startswith(result.answer[:30]) and not list(tmp_path.iterdir())
