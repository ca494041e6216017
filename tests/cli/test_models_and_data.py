"""Models and data by name: a user's own model, files of every dataset, every kind of synthetic data."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_train import TINY, save_mnist, type_alone, type_command

OWN = """
from torch import nn

def build(form):
    size = 1
    for count in form.shape:
        size *= count
    return nn.Sequential(nn.Flatten(), nn.Linear(size, form.num_classes))
"""
SENTENCES = ("a line of riders", "riders in a line", "they take turns", "the whole goes faster")


def train(type_, *arguments: str) -> dict:
    answer = type_("train", *arguments, "--json")
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["finished"] and all(np.isfinite(epoch["loss"]) for epoch in document["epochs"])
    return document | {"received": answer.err}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def save_mrpc(folder: Path) -> None:
    folder.mkdir()
    for name, count in (("msr_paraphrase_train.txt", 12), ("msr_paraphrase_test.txt", 4)):
        rows = [f"{i % 2}\t{i}\t{i + 1}\t{SENTENCES[i % 4]}\t{SENTENCES[(i + 1) % 4]}" for i in range(count)]
        text = "\n".join(["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows])
        (folder / name).write_text("\ufeff" + text + "\n", encoding="utf-8")


def save_cifar_batches(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {b"data": draw.integers(0, 256, (8, 3072), dtype=np.uint8), b"labels": draw.integers(0, 10, 8).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))


def save_cifar_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 8)):
        cells = []
        for _ in range(count):
            written = io.BytesIO()
            image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(written, "PNG")
            cells.append({"bytes": written.getvalue(), "path": None})
        table = pyarrow.table({"img": cells, "label": draw.integers(0, 10, count).tolist()})
        parquet.write_table(table, folder / f"{name}.parquet")


@pytest.mark.slow
def test_cifar10_from_its_batches_on_two_ranks(tmp_path):
    save_cifar_batches(tmp_path / "cifar")
    document = train(type_command, *TINY, "--data", "cifar10:cifar", "--ranks", "2", "--batch-size", "10")
    assert (document["world_size"], document["steps"]) == (2, 2)
    assert document["epochs"][0]["samples"] == 40
    assert "40 images of 3 x 32 x 32 in 10 classes" in document["received"]


def test_cifar10_from_parquet(tmp_path):
    save_cifar_parquet(tmp_path / "cifar")
    document = train(type_alone, *TINY, "--data", "cifar10:cifar", "--batch-size", "20")
    assert document["epochs"][0]["samples"] == 40
    assert "40 images of 3 x 32 x 32 in 10 classes" in document["received"]


def test_mrpc_from_its_files(tmp_path):
    save_mrpc(tmp_path / "mrpc")
    asked = ("--model", "gpt2-tiny", "--data", "mrpc:mrpc", "--context", "24", "--batch-size", "4")
    document = train(type_alone, *asked)
    assert (document["steps"], document["epochs"][0]["samples"]) == (3, 12)
    assert document["epochs"][0]["test_accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert f"test F1 {document['epochs'][0]['test_f1']:.3f}" in document["answer"]


def test_text_from_a_file(tmp_path):
    (tmp_path / "rides.txt").write_text(". ".join(SENTENCES * 40))
    asked = ("--model", "gpt2-tiny", "--data", "text:rides.txt", "--context", "16", "--batch-size", "4")
    document = train(type_alone, *asked, "--samples", "8", "--optimizer", "adamw", "--lr", "1e-3")
    assert document["epochs"][0]["samples"] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "has_accuracy"),
    [
        (("--model", "linear", "--data", "synthetic"), False),
        (("--model", "mlp", "--data", "synthetic:numbers"), False),
        (("--model", "mlp", "--data", "synthetic:images"), True),
        (("--model", "gpt2-tiny", "--data", "synthetic:tokens", "--context", "8"), True),
        (("--model", "gpt2-tiny", "--data", "synthetic:pairs", "--context", "8"), True),
    ],
)
def test_every_kind_of_synthetic_data(arguments, has_accuracy):
    document = train(type_alone, *arguments, "--samples", "32", "--batch-size", "16")
    assert document["steps"] == 2
    assert (document["epochs"][0]["accuracy"] is not None) == has_accuracy


@pytest.mark.parametrize(("data", "inputs"), [("mnist:mnist", 28 * 28), ("synthetic:images", 3 * 32 * 32)])
def test_a_users_own_model(tmp_path, data, inputs):
    (tmp_path / "own.py").write_text(OWN)
    save_mnist(tmp_path / "mnist")
    document = train(type_alone, "--model", "own.py:build", "--data", data, "--samples", "8")
    assert document["num_parameters"] == 10 * (inputs + 1)


def test_a_users_own_model_without_data_says_what_to_give(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    answer = type_alone("train", "--model", "own.py:build")
    assert answer.code == 2 and "--data synthetic:images" in answer.err
    assert not any((tmp_path / "runs").glob("*"))
