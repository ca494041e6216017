"""`paceline train` end to end: one rank and several, its folder, its output, and resuming."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.report.result import load_result
from paceline.verbs import train as verb
from tests.conftest import Answer

TINY = ("--channels", "4", "8", "--hidden", "16")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def type_command(*arguments: str) -> Answer:
    """The command line in this process, for fixtures that outlive a test."""
    from paceline.cli.main import main

    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["paceline", *arguments])
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
    return Answer(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def one_launched_rank():
    """This process is the only rank of a launched world: a job on one rank needs no other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR", raising=False)
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        yield


def type_alone(*arguments: str) -> Answer:
    with one_launched_rank():
        return type_command(*arguments)


def save_mnist(folder: Path, num_train: int = 64, num_test: int = 16) -> Path:
    """The four idx files; each digit's class is written in large into its pixels."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        images = draw.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), labels * 2] = 255
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
        )
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    return folder


@pytest.fixture(scope="module")
def mnist(tmp_path_factory) -> str:
    return f"mnist:{save_mnist(tmp_path_factory.mktemp('data') / 'mnist')}"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def trained(mnist, out) -> tuple[Answer, Path]:
    """Two ranks, two epochs of four steps, with phases."""
    asked = ("--data", mnist, "--ranks", "2", "--batch-size", "8", "--epochs", "2", "--profile", "--out", str(out))
    answer = type_command("train", *TINY, *asked)
    assert answer.code == 0, answer.err
    return answer, Path(answer.out.rsplit("run: ", 1)[1].split()[0])


def load_rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_person_sees_epochs_phases_and_the_folder(trained):
    answer, run = trained
    for words in ("epoch", "test accuracy", "samples/s", "exposed"):
        assert words in answer.out
    assert "cnn with" in answer.err and "2 ranks" in answer.err and "global batch 16 = 2 x 8" in answer.err
    assert "step 8 of 8, epoch 2" in answer.err
    assert {path.name for path in run.iterdir()} >= {
        "config.json", "metrics.jsonl", "table.csv", "table.md", "training.png", "training.svg", "weights.safetensors",
        "checkpoints",
    }  # fmt: skip


def test_profile_notes_every_phase_of_every_step(trained):
    rows = load_rows(trained[1])
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        phases_s = [row[name] for name in ("forward_s", "backward_s", "optimizer_s")]
        # Each phase reports its slowest rank, so their sum may exceed the step time; no single phase can.
        assert all(0 < seconds <= row["step_s"] for seconds in phases_s)


@pytest.fixture(scope="module")
def compared(mnist, out) -> Answer:
    """Two epochs of four steps on one rank, which is this process, and then on two."""
    asked = ("--data", mnist, "--ranks", "1,2", "--global-batch-size", "16", "--epochs", "2", "--out", str(out))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.report.plots.render_png", lambda figure: b"")
        patch.setattr("paceline.report.plots.render_svg", lambda figure: b"")
        answer = type_alone("train", *TINY, *asked, "--json")
    assert answer.code == 0, answer.err
    return answer


def test_the_number_of_ranks_does_not_change_the_training(compared, trained):
    document = json.loads(compared.out)
    folder = Path(document["run"])
    assert (document["verb"], document["learned_the_same"]) == ("train --compare", True)
    assert [(row["ranks"], row["steps"], row["test_f1"]) for row in document["runs"]] == [(1, 8, None), (2, 8, None)]
    assert document["runs"][0]["speed_up"] == 1.0 and document["runs"][1]["largest_difference"] < 1e-4
    runs = [load_result(folder / name) for name in ("1-rank", "2-ranks")]
    assert [(run.world_size, run.finished, run.steps) for run in runs] == [(1, True, 8), (2, True, 8)]
    assert runs[0].to_json()["phases"] is None and [epoch.num_samples for epoch in runs[0].epochs] == [64, 64]
    for there in (runs[1].rows, load_rows(trained[1])):  # micro-batches of 8 by either name
        assert [row["loss"] for row in runs[0].rows] == pytest.approx([row["loss"] for row in there], rel=1e-4)
    assert [row["seconds"] for row in document["runs"]] == pytest.approx([run.total.seconds for run in runs])
    assert {"losses.png", "comparison.md", "comparison.csv", "run.json"} <= {path.name for path in folder.iterdir()}
    assert load_result(folder).to_json() == document


def test_stored_runs_are_compared_as_those_just_trained(compared, command, tmp_path):
    document = json.loads(compared.out)
    folders = [f"{document['run']}/{name}" for name in ("1-rank", "2-ranks")]
    answer = command("train", "--compare", *folders, "--out", str(tmp_path), "--json")
    assert answer.code == 0, answer.err
    again = json.loads(answer.out)
    assert again["run"] != document["run"] and again | {"run": document["run"]} == document
    assert paceline.compare(*folders).to_json()["runs"] == document["runs"]
    other = command("train", "--compare", folders[0], document["run"])
    assert other.code == 2 and "is a run of `paceline train --compare`: use runs of `paceline train`" in other.err


def test_an_interrupt_of_the_second_run_names_the_first(mnist, monkeypatch, tmp_path):
    run = verb._train

    def interrupt(wanted, *rest, **options):
        if wanted.ranks == 2:
            raise KeyboardInterrupt
        return run(wanted, *rest, **options)

    monkeypatch.setattr(verb, "_train", interrupt)
    answer = type_alone("train", *TINY, "--data", mnist, "--ranks", "1,2", "--out", str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert answer.code == 130 and f"interrupted: 1-rank (finished) saved in {folder}" in answer.err
    assert load_result(folder / "1-rank").finished


def test_torchs_dataparallel_on_one_gpu_is_the_bare_model_and_says_so(mnist, monkeypatch, tmp_path):
    for name, value in (("count_gpus", 1), ("gpu_name", "")):  # the CPU computes in its place
        monkeypatch.setattr(f"paceline.machine.{name}", lambda value=value: value)
    monkeypatch.setattr("paceline.machine.find_load", lambda: 0.0)
    asked = ("--data", mnist, "--wrapper", "dp", "--steps", "2", "--json", "--out", str(tmp_path))
    (warning,) = json.loads(type_alone("train", *TINY, *asked).out)["warnings"]
    assert warning.startswith("--wrapper dp on one GPU")


@pytest.mark.slow
def test_values_that_torchs_wrapper_does_not_report_are_not_shown(mnist, tmp_path):
    asked = ("--data", mnist, "--wrapper", "torch", "--profile", "--details", "--out", str(tmp_path))
    answer = type_alone("train", *TINY, *asked)
    assert answer.code == 0, answer.err
    assert "exposed comm" not in answer.out and "`paceline profile phases` measures" in " ".join(answer.out.split())
    (run,) = tmp_path.iterdir()
    phases = load_result(run).to_json()["phases"]
    assert set(phases) == {"step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s"}


def test_the_cnn_has_the_requested_layers(mnist, tmp_path):
    asked = ("--channels", "4", "4", "--hidden", "8", "--data", mnist, "--samples", "2", "--json")
    answer = type_alone("train", *asked, "--out", str(tmp_path))
    assert answer.code == 0, answer.err
    num_parameters = 4 * 10 + 4 * 37 + 8 * (4 * 12**2 + 1) + 10 * 9
    assert json.loads(answer.out)["num_parameters"] == num_parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "rates"),
    [
        (
            "--optimizer lars --momentum 0.8 --trust-coefficient 0.01 --lr 4 --schedule piecewise --lr-drops 0.5,0.75",
            [4.0, 4.0, 0.4, 0.04],
        ),
        ("--optimizer lamb --lr 0.01 --schedule linear", [0.01, 0.0075, 0.005, 0.0025]),
    ],
    ids=["lars", "lamb"],
)
def test_options_for_large_batches(mnist, asked, rates, tmp_path):
    more = ("--data", mnist, "--batch-size", "16", "--seed", "2", "--json", "--out", str(tmp_path))
    answer = type_alone("train", *TINY, *asked.split(), *more)
    assert answer.code == 0, answer.err
    run = Path(json.loads(answer.out)["run"])
    assert [row["lr"] for row in load_rows(run)] == pytest.approx(rates)
    again = type_alone("train", "--resume", str(run))  # the run's settings, including drops, survive JSON
    assert again.code == 0 and "the run was already finished" in again.out


def test_a_run_continues_with_fewer_ranks_and_moved_data(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.machine.find_load", lambda: 0.0)
    run = trained[1]
    moved = save_mnist(tmp_path / "elsewhere")
    answer = type_alone("train", "--resume", str(run), "--epochs", "3", "--data", f"mnist:{moved}", "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert (document["steps"], document["world_size"], len(document["epochs"])) == (12, 1, 3)
    assert "resumes at step 8" in answer.err
    assert [row["step"] for row in load_rows(run)] == list(range(1, 13))
    assert len((run / "table.csv").read_text().splitlines()) == 4
    again = type_alone("train", "--resume", str(run), "--epochs", "3", "--data", f"mnist:{moved}")
    assert again.code == 0 and "the run was already finished after 12 steps" in again.out
    assert json.loads(answer.out)["warnings"] == []


def test_a_run_of_steps_ends_inside_an_epoch_and_can_be_extended(mnist, tmp_path):
    asked = ("--data", mnist, "--batch-size", "8", "--seed", "3", "--json")
    answer = type_alone("train", *TINY, *asked, "--steps", "11", "--out", str(tmp_path))
    assert answer.code == 0 and "11 steps in 2 epochs" in answer.err, answer.err
    document = json.loads(answer.out)
    run = Path(document["run"])
    assert (document["steps"], [epoch["steps"] for epoch in document["epochs"]]) == (11, [8, 3])
    assert [row["step"] for row in load_rows(run) if "test_loss" in row] == [8, 11]
    again = type_alone("train", "--resume", str(run), "--steps", "18", "--json")
    assert again.code == 0 and json.loads(again.out)["steps"] == 18, again.err
    assert json.loads((run / "config.json").read_text())["settings"]["steps"] == 18
    back = type_alone("train", "--resume", str(run), "--steps", "12")
    assert back.code == 2 and "--steps 12 ends after step 12, but the run is already at step 18" in back.err


def test_a_batch_grows_as_it_was_typed(mnist, tmp_path):
    asked = ("--data", mnist, "--batch-size", "4", "--epochs", "2", "--batch-growth", "0.25:2,0.75:8", "--json")
    answer = type_alone("train", *TINY, *asked, "--grow", "batch-size", "--out", str(tmp_path))
    assert answer.code == 0 and "8 from step 9 on, 32 from step 17 on, 17 steps in 2 epochs" in answer.err, answer.err
    rows = load_rows(Path(json.loads(answer.out)["run"]))
    assert [row["samples"] for row in rows] == [4] * 8 + [8] * 8 + [32]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--lr", "0.1"), "--lr 0.1 with --resume: the run was started with 0.05"),
        (("--channels", "8", "8"), "--channels 8 8 with --resume: the run was started with 4 8"),
        (("--hidden", "17"), "--hidden 17 with --resume: the run was started with 16"),
        (("--model", "mlp"), "--model mlp with --resume: the run was started with cnn"),
        (("--seed", "2"), "--seed 2 with --resume: the run was started with 1"),
        (("--ranks", "3"), "3 ranks cannot divide the run's global batch of 16 samples evenly"),
        (("--global-batch-size", "32"), "the run was started with 16"),
        (("--data", "synthetic"), "--data synthetic with --resume"),
        (("--out", "elsewhere"), "--out elsewhere with --resume"),
        (("--batch-size", "3"), "--global-batch-size 16 is not a multiple of 3"),
    ],
)
def test_options_that_would_change_the_run_are_refused(trained, asked, words):
    run = trained[1]
    before = sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir())
    answer = type_alone("train", "--resume", str(run), *asked)
    assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1
    assert sorted((path.name, path.stat().st_mtime_ns) for path in run.iterdir()) == before


@pytest.mark.slow
def test_the_same_command_under_torchrun(start, mnist, tmp_path):
    asked = ("train", *TINY, "--data", mnist, "--batch-size", "8", "--json")
    job = start(*TORCHRUN, "-m", "paceline", *asked)
    printed, err = job.communicate(timeout=150)
    assert job.returncode == 0, err
    document = json.loads(printed)
    assert (document["world_size"], document["steps"]) == (2, 4)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(document["run"]).name]
