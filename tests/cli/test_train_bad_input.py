"""Bad input of `train` and `profile`: one line with the problem and the fix, exit code 2, and no run folder."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from paceline.plan import Gradient, plan_like_torch
from tests.cli.test_train import TINY, one_launched_rank, save_mnist

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
TRAIN = ("train", *TINY)
PHASES = ("profile", "phases", *TINY)
LAYERS = ("profile", "layers", *TINY)
TRACE = ("profile", "trace", *TINY)
TABLE = ("profile", "comm-table", *TINY)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def assert_refused(answer, words: str) -> None:
    assert answer.code == 2, answer.err
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("paceline: error: ") and words in lines[0], answer.err
    assert not any(Path("runs").glob("*"))


def break_magic(folder: Path) -> None:
    file = folder / "train-images-idx3-ubyte"
    file.write_bytes(struct.pack(">I", 0x1234) + file.read_bytes()[4:])


def lose_a_label(folder: Path) -> None:
    save_mnist(folder, num_train=63)
    labels = (folder / "train-labels-idx1-ubyte").read_bytes()
    save_mnist(folder)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)


@pytest.mark.parametrize(
    ("verb", "spoil", "words"),
    [
        (("train",), break_magic, "train-images-idx3-ubyte"),
        (("profile", "layers"), lose_a_label, "63"),
    ],
)
def test_a_damaged_file_is_named(command, tmp_path, verb, spoil, words):
    spoil(save_mnist(tmp_path / "mnist"))
    with one_launched_rank():
        assert_refused(command(*verb, *TINY, "--data", "mnist:mnist"), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--data", "synthetic:tokens"), "model cnn takes images, but the data is tokens: models for tokens"),
        (("train", "--data", "mnist:mnist", "--samples", "65"), "--samples 65: mnist has only 64"),
        ((*TRAIN, "--ghost-batchnorm", "4"), "--ghost-batchnorm 4: cnn has no BatchNorm; leave it out"),
        (("train", "--samples", "8", "--tail", "drop"), "8 samples do not fill one global batch of 32"),
        ((*PHASES, "--samples", "8", "--batch-size", "4,16"), "less than one global batch of 16"),
        ((*TRAIN, "--device", "cuda"), "device 'cuda' needs a GPU"),
        ((*TRAIN, "--plan", "plan.json"), "the plan"),
        ((*TRAIN, "--plan", "half.json"), "--plan half.json: not a plan"),
    ],
)
def test_problems_found_by_the_ranks_are_refused_in_one_line(command, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_mnist(tmp_path / "mnist")
    other = Gradient("weight", 40, 4, "float32", "cpu")
    (tmp_path / "plan.json").write_text(plan_like_torch([other], [0]).to_json())
    (tmp_path / "half.json").write_text(plan_like_torch([other], [0]).to_json()[:40])
    with one_launched_rank():
        assert_refused(command(*arguments), words)


def test_a_set_smaller_than_the_world_is_refused_by_all_ranks(command):
    assert_refused(command(*TRAIN, "--samples", "1", "--ranks", "2"), "fewer samples than 2 ranks")


@pytest.mark.parametrize("verb", [TRAIN, TABLE])
def test_a_folder_that_cannot_be_written_is_found_before_the_work(command, tmp_path, verb):
    (tmp_path / "file").write_text("in the way")
    assert_refused(command(*verb, "--out", "file/below"), "cannot write results to file/below")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("verb", [LAYERS, TABLE])
def test_layers_are_not_timed_by_several_launched_ranks(command, monkeypatch, verb):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(command(*verb), "layers are timed on one rank, but 2 were launched")
