"""Bad input of `train` and `profile`: one line that says what and what to do, exit 2, and no run folder."""

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--model", "resnet81"), "model 'resnet81' is unknown: did you mean resnet18"),
        (("train", "--model", "nowhere.py:build"), "model file nowhere.py does not exist"),
        (
            ("train", "--model", "mlp", "--label-smoothing", "0.1"),
            "--label-smoothing 0.1: targets are numbers; leave it out",
        ),
        (("train", "--model", "gpt2", "--channels", "4", "8"), "model gpt2 has no channels (given: 4 8)"),
        (("train", "--model", "linear", "--hidden", "8"), "model linear has no hidden"),
        ((*TRAIN, "--data", "minst"), "data 'minst' is unknown: did you mean mnist?"),
        ((*TRAIN, "--data", "mnist:nowhere"), "nowhere does not exist: get train-images"),
        ((*TRAIN, "--context", "8"), "--context 8: cnn is trained on images here"),
        ((*TRAIN, "--augment"), "synthetic cannot be augmented"),
        ((*TRAIN, "--batch-size", "0"), "--batch-size '0' is not a whole number of at least 1"),
        ((*TRAIN, "--batch-size", "8,16"), "--batch-size 8,16: one number is needed here"),
        ((*TRAIN, "--ranks", "2,4", "--batch-size", "8"), "--batch-size 8 with --ranks 2,4: it is per rank"),
        ((*TRAIN, "--ranks", "1,2", "--resume", "run"), "--ranks 1,2 with --resume"),
        (("train", "--compare", "a", "b"), "a does not exist"),
        (("train", "--compare", "a", "b", "--lr", "0.1"), "--lr with --compare, which does not train"),
        ((*TRAIN, "--wrapper", "dp"), "--wrapper dp is nn.DataParallel, which needs GPUs"),
        ((*PHASES, "--ranks", "1", "--wrapper", "dp"), "--wrapper dp is nn.DataParallel, which needs GPUs"),
        ((*TRAIN, "--ranks", "two"), "--ranks 'two' is not a whole number"),
        (
            (*TRAIN, "--ranks", "2", "--global-batch-size", "9"),
            "--global-batch-size 9 cannot be divided evenly among 2 ranks",
        ),
        ((*TRAIN, "--global-batch-size", "0"), "--global-batch-size 0: at least 1"),
        (
            (*TRAIN, "--ranks", "2", "--batch-size", "4", "--accumulate", "3", "--global-batch-size", "16"),
            "needs --accumulate 2 with 2 ranks",
        ),
        ((*TRAIN, "--wrapper", "ddp"), "--wrapper 'ddp' is unknown: use one of paceline, torch, none, dp"),
        ((*TRAIN, "--wrapper", "none", "--ranks", "2"), "--wrapper none trains in one process"),
        ((*TRAIN, "--wrapper", "none", "--plan", "plan.json"), "--plan needs --wrapper paceline or torch"),
        ((*TRAIN, "--plan", "nowhere.json"), "--plan nowhere.json: No such file"),
        ((*TRAIN, "--save-every", "often"), "--save-every 'often' is not understood"),
        ((*TRAIN, "--save-every", "0s"), "--save-every '0s' is not understood"),
        ((*TRAIN, "--optimizer", "adamw", "--momentum", "0.5"), "--momentum 0.5: adamw has its own moments"),
        ((*TRAIN, "--optimizer", "lamb", "--momentum", "0.5"), "--momentum 0.5: lamb has its own moments"),
        ((*TRAIN, "--trust-coefficient", "0.1"), "--trust-coefficient 0.1 with --optimizer sgd"),
        ((*TRAIN, "--schedule", "piecewise"), "--lr-drops none with schedule piecewise"),
        ((*TRAIN, "--schedule", "piecewise", "--lr-drops", "half"), "--lr-drops 'half' is not understood"),
        ((*TRAIN, "--schedule", "piecewise", "--lr-drops", "0.75,0.5"), "--lr-drops 0.75,0.5: increasing fractions"),
        ((*TRAIN, "--ghost-batchnorm", "1"), "--ghost-batchnorm 1: at least 2"),
        ((*TRAIN, "--lr", "nan"), "--lr nan: a finite number"),
        ((*TRAIN, "--precision", "fp8"), "--precision 'fp8' is unknown"),
        ((*TRAIN, "--epochs", "0"), "--epochs 0: at least 1"),
        ((*TRAIN, "--samples", "0"), "--samples 0: at least 1"),
        ((*TRAIN, "--steps", "0"), "--steps 0: at least 1"),
        ((*TRAIN, "--steps", "5", "--epochs", "1"), "--steps 5 with --epochs 1"),
        ((*TRAIN, "--steps", "5", "--batch-growth", "0.5:2"), "--batch-growth 0.5:2 with --steps 5"),
        (
            (*TRAIN, "--batch-growth", "half:2"),
            "--batch-growth 'half:2' is not understood at 'half:2': use SHARE:FACTOR",
        ),
        ((*TRAIN, "--batch-growth", "1.5:2"), "--batch-growth 1.5:2: 1.5 is not a fraction of the run"),
        ((*TRAIN, "--grow", "both"), "--grow 'both' is unknown: use one of accumulate, batch-size"),
        ((*TRAIN, "--grow", "batch-size"), "--grow batch-size has no effect without --batch-growth"),
        ((*TRAIN, "--channels", "8", "0"), "--channels '0' is not a whole number of at least 1"),
        (("train", "--dropout", "1.5"), "dropout 1.5: at least 0 and less than 1"),
        (("train", "--resume", "nowhere"), "give the folder of a training run"),
        ((*PHASES, "--iters", "0"), "--iters 0: at least 1"),
        ((*PHASES, "--warmup", "-1"), "--warmup -1: at least 0"),
        ((*PHASES, "--wrapper", "dp"), "--wrapper dp uses the GPUs of one process"),
        ((*LAYERS, "--iters", "0"), "--iters 0: at least 1"),
        ((*LAYERS, "--ranks", "2"), "--ranks 2: layers are timed on one rank"),
        ((*LAYERS, "--wrapper", "torch"), "--wrapper torch: layers are timed on the bare model"),
        ((*LAYERS, "--plan", "plan.json"), "--plan plan.json: layers are timed on the bare model"),
        ((*LAYERS, "--accumulate", "2"), "--accumulate 2: layers are timed over one micro-batch"),
        ((*LAYERS, "--batch-size", "4,8"), "--batch-size 4,8: one number is needed here"),
        ((*TRACE, "--steps", "0"), "--steps 0: at least 1"),
        ((*TRACE, "--warmup", "0"), "--warmup 0: torch's profiler starts in a warm-up"),
        ((*TRACE, "--ranks", "1,2"), "--ranks 1,2: one number is needed here"),
        ((*TABLE, "--network", "nvlnk"), "unknown network 'nvlnk': did you mean nvlink?"),
        ((*TABLE, "--network", ","), "--network ',' is empty: use one of nvlink"),
        ((*TABLE, "--curve", "nowhere"), "nowhere does not exist"),
        ((*TABLE, "--accumulate", "2"), "--accumulate 2: layers are timed over one micro-batch"),
        (("profile", "--json", "phases"), "write profile phases --json"),
        (("profile", "--compare", "a", "b", "phases"), "--compare cannot be combined with phases"),
        (("profile", "--compare", "a", "b"), "a does not exist"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(command, monkeypatch, arguments, words):
    def start(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("paceline.runtime.launch.RankPool.start", start)
    assert_refused(command(*arguments), words)


def break_magic(folder: Path) -> None:
    file = folder / "train-images-idx3-ubyte"
    file.write_bytes(struct.pack(">I", 0x1234) + file.read_bytes()[4:])


def lose_a_label(folder: Path) -> None:
    save_mnist(folder, num_train=63)
    labels = (folder / "train-labels-idx1-ubyte").read_bytes()
    save_mnist(folder)
    (folder / "train-labels-idx1-ubyte").write_bytes(labels)


@pytest.mark.parametrize("verb", [("train",), ("profile", "layers")])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (break_magic, "train-images-idx3-ubyte"),
        (lose_a_label, "63"),
    ],
)
def test_a_damaged_file_is_named(command, tmp_path, verb, spoil, words):
    spoil(save_mnist(tmp_path / "mnist"))
    with one_launched_rank():
        assert_refused(command(*verb, *TINY, "--data", "mnist:mnist"), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--data", "synthetic:tokens"), "model cnn takes images, and the data is tokens: models for tokens"),
        (("train", "--model", "gpt2-tiny", "--data", "mnist:mnist"), "gpt2-tiny takes tokens or pairs"),
        (("train", "--data", "mnist:mnist", "--samples", "65"), "--samples 65: mnist has only 64"),
        ((*TRAIN, "--ghost-batchnorm", "4"), "--ghost-batchnorm 4: cnn has no BatchNorm; leave it out"),
        ((*TRAIN, "--sync-batchnorm"), "--sync-batchnorm: cnn has no BatchNorm; leave it out"),
        (
            (*TRAIN, "--samples", "320", "--lr-warmup", "6", "--schedule", "piecewise", "--lr-drops", "0.5"),
            "a drop at 0.5 of 10 steps, inside the warm-up of 6",
        ),
        (("train", "--samples", "8", "--tail", "drop"), "8 samples do not fill one global batch of 32"),
        (("train", "--samples", "64", "--batch-growth", "0.5:4"), "4 x 32 is more than the 64"),
        ((*PHASES, "--samples", "8", "--batch-size", "4,16"), "less than one global batch of 16"),
        ((*TRACE, "--samples", "8"), "less than one global batch of 32"),
        ((*TRAIN, "--device", "cuda"), "device 'cuda' needs a GPU"),
        ((*TRAIN, "--plan", "plan.json"), "the plan"),
        ((*TRAIN, "--plan", "half.json"), "--plan half.json: not a plan"),
    ],
)
def test_what_the_ranks_find_out_is_refused_in_one_line(command, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    save_mnist(tmp_path / "mnist")
    other = Gradient("weight", 40, 4, "float32", "cpu")
    (tmp_path / "plan.json").write_text(plan_like_torch([other], [0]).to_json())
    (tmp_path / "half.json").write_text(plan_like_torch([other], [0]).to_json()[:40])
    with one_launched_rank():
        assert_refused(command(*arguments), words)


def test_a_set_smaller_than_the_world_is_refused_by_all_ranks(command):
    assert_refused(command(*TRAIN, "--samples", "1", "--ranks", "2"), "fewer samples than 2 ranks")


@pytest.mark.parametrize("verb", [TRAIN, PHASES, LAYERS, TRACE, TABLE])
def test_a_folder_that_cannot_be_written_is_found_before_the_work(command, tmp_path, verb):
    (tmp_path / "file").write_text("in the way")
    assert_refused(command(*verb, "--out", "file/below"), "cannot write results to file/below")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.parametrize("verb", [LAYERS, TABLE])
def test_layers_are_not_timed_by_several_launched_ranks(command, monkeypatch, verb):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(command(*verb), "layers are timed on one rank, but 2 were launched")
