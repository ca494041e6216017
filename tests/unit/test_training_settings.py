"""Training settings: consistent batch sizes and every refusal before a rank starts."""

import dataclasses
import json
import math

import pytest

from paceline.errors import ConfigError
from paceline.training.train_settings import Batches, TrainSettings, check_job, parse_save_every


def build_batches(ranks, batch_size, global_batch_size, accumulate):
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size, "accumulate": accumulate}
    return TrainSettings(ranks=ranks, **sizes).batches


@pytest.mark.parametrize(
    ("ranks", "batch_size", "global_batch_size", "accumulate", "wanted"),
    [
        (1, None, None, None, (32, 1, 32)),
        (4, None, None, None, (32, 1, 128)),
        (2, 5, None, 3, (5, 3, 30)),
        (2, None, None, 3, (32, 3, 192)),
        (2, None, 24, None, (12, 1, 24)),
        (3, None, 24, 4, (2, 4, 24)),
        (2, 4, 24, None, (4, 3, 24)),
        (2, 4, 24, 3, (4, 3, 24)),
    ],
)
def test_batches_follow_from_the_settings(ranks, batch_size, global_batch_size, accumulate, wanted):
    found = build_batches(ranks, batch_size, global_batch_size, accumulate)
    assert (found.batch_size, found.accumulate, found.global_batch_size) == wanted
    assert found.world_size == ranks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, 0, None, None), "--batch-size 0"),
        ((1, None, 0, None), "--global-batch-size 0"),
        ((1, None, None, 0), "--accumulate 0"),
        ((3, None, 25, None), "25 cannot be divided evenly among 3 ranks: use a multiple of 3"),
        ((2, None, 6, 2), "a multiple of 4"),
        ((2, 4, 20, None), "not a multiple of 8"),
        ((2, 4, 24, 2), "needs --accumulate 3"),
    ],
)  # fmt: skip
def test_batches_that_do_not_add_up_are_refused(arguments, words):
    with pytest.raises(ConfigError) as caught:
        build_batches(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("epoch", (None, None)),
        ("10s", (10, None)),
        ("0.5 s", (0.5, None)),
        ("2min", (120, None)),
        ("3 h 5 min", (11100, None)),
        ("2d", (172800, None)),
        ("100steps", (None, 100)),
        ("1 step", (None, 1)),
        ("auto", (5, None)),
    ],
)
def test_save_intervals_are_parsed(text, wanted):
    assert parse_save_every(text) == wanted


@pytest.mark.parametrize("text", ["", "10", "0s", "0steps", "1.5steps", "-3s", "3hours", "often", "1e3s", "steps"])
def test_ambiguous_save_intervals_are_refused(text):
    with pytest.raises(ConfigError, match="--save-every"):
        parse_save_every(text)


BAD = [
    ({"steps": 5, "epochs": 2}, "--steps 5 with --epochs 2"),
    ({"steps": 5, "batch_growth": ((0.5, 4),)}, "--batch-growth 0.5:4 with --steps 5"),
    ({"batch_growth": ((0.5, 4), (0.25, 8))}, "--batch-growth 0.5:4,0.25:8: 0.25 comes after 0.5"),
    ({"grow": "batch-size"}, "--grow batch-size has no effect without --batch-growth"),
    ({"save_every": "soon"}, "--save-every 'soon'"),
    ({"mtbf": "3h"}, "--mtbf 3h with --save-every 60s"),
    ({"mtbf": "3", "save_every": "auto"}, "--mtbf '3' is not a time with a unit"),
    ({"mtbf": "0h", "save_every": "auto"}, "--mtbf 0h: must be above 0"),
    ({"ranks": 2, "global_batch_size": 5}, "--global-batch-size 5"),
    ({"wrapper": "none", "ranks": 2}, "--wrapper none trains in one process, but --ranks is 2"),
    ({"wrapper": "dp", "ranks": 2}, "--wrapper dp uses the GPUs of one process"),
    ({"wrapper": "none", "plan": "p.json"}, "--plan needs --wrapper paceline or torch"),
    ({"wrapper": "dp", "sync_batchnorm": True}, "--sync-batchnorm does not work with --wrapper dp"),
    ({"trust_coefficient": 0.1}, "--trust-coefficient 0.1 with --optimizer sgd: leave it out, or use lars"),
    (
        {"strategy": "topk:0.1,dgc", "momentum": 0.5},
        "--momentum 0.5 with --strategy topk:0.1,dgc, whose momentum is 0.9: write dgc=0.5",
    ),
    ({"optimizer": "lamb", "trust_coefficient": 0.1}, "--optimizer lamb: leave it out"),
    ({"schedule": "piecewise"}, "--lr-drops none with schedule piecewise"),
    ({"lr_drops": (0.5,)}, "--lr-drops 0.5 with schedule constant"),
    ({"schedule": "piecewise", "lr_drops": (0.5, 0.5)}, "--lr-drops 0.5,0.5: must be increasing fractions"),
    ({"schedule": "piecewise", "lr_drops": (0.5, 1.0)}, "--lr-drops 0.5,1.0: must be increasing fractions"),
    ({"schedule": "piecewise", "lr_drops": (math.nan,)}, "--lr-drops nan: must be increasing fractions"),
    ({"ghost_batchnorm": 4, "sync_batchnorm": True}, "--ghost-batchnorm 4 with --sync-batchnorm"),
]


@pytest.mark.parametrize(("changes", "words"), BAD, ids=lambda value: str(value)[:40])
def test_impossible_values_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        TrainSettings(**changes).check()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0.0, "momentum": 0.0, "clip": 1e-9, "lr_warmup": 0, "seed": 0},
        {"ranks": 4, "global_batch_size": 64, "plan": "p.json", "wrapper": "torch", "sync_batchnorm": True},
        {"wrapper": "none", "precision": "fp16", "optimizer": "adamw", "schedule": "cosine", "tail": "pad"},
        {"wrapper": "dp", "ghost_batchnorm": 2},
        {"optimizer": "lars", "trust_coefficient": 0.01, "schedule": "piecewise", "lr_drops": (0.3, 0.6)},
        {"optimizer": "lamb"},
        {"steps": 1},
        {"batch_growth": ((0.5, 4), (0.75, 16)), "grow": "batch-size", "epochs": 3},
    ],
)
def test_possible_settings_are_accepted(changes):
    TrainSettings(**changes).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "cnm"}, "cnn"),
        ({"model": "resnet18", "hidden": 3}, "hidden"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"channels": (4, 0)}, "channels"),
        ({"data": "nothing"}, "nothing"),
        ({"model": "mlp", "label_smoothing": 0.1}, "--label-smoothing 0.1: this is a regression"),
        ({"context": 8}, "--context 8: cnn is trained on images"),
    ],
)
def test_models_and_data_are_checked_too(changes, words):
    with pytest.raises(ConfigError) as caught:
        check_job(TrainSettings(**changes))
    assert words in str(caught.value)


def test_settings_survive_json():
    settings = TrainSettings(
        channels=(4, 8), global_batch_size=12, ranks=3, clip=0.5, augment=False, batch_growth=((0.5, 4),)
    )
    assert TrainSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    dropping = TrainSettings(schedule="piecewise", lr_drops=(0.5, 0.75))
    assert TrainSettings.from_json(json.loads(json.dumps(dropping.to_json()))) == dropping
    assert TrainSettings.from_json({}) == TrainSettings()
    assert set(settings.to_json()) == {field.name for field in dataclasses.fields(TrainSettings)}
    assert settings.batches == Batches(3, 4, 1)


def test_settings_of_another_version_are_refused():
    with pytest.raises(ConfigError, match="a, zeal"):
        TrainSettings.from_json({"zeal": 1, "lr": 0.1, "a": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", "8"), ("save_every", 5), ("lr", "0.1"), ("lr", True), ("batch_growth", [1]), ("compile", "yes"),
        ("channels", "32"), ("channels", [None]), ("epochs", 1.5), ("model", None), ("steps", {}), ("lr_drops", ["a"]),
    ],
)  # fmt: skip
def test_a_saved_setting_of_another_type_is_refused(name, value):
    with pytest.raises(ConfigError) as caught:
        TrainSettings.from_json(TrainSettings().to_json() | {name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_saved_settings_come_back_as_they_were():
    settings = TrainSettings(channels=(8, 16), batch_growth=((0.5, 2),), lr_drops=(0.5,), hidden=8, augment=False)
    assert TrainSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"batch_size": 10**12}, "memory"), ({"model": "mlp", "hidden": 10**9}, "memory"),
        ({"samples": 10**12}, "memory"), ({"model": "gpt2-tiny", "context": 10**8}, "memory"),
        ({"steps": 10**24}, "endless"),
        ({"epochs": 10**30}, "endless"), ({"channels": (10**9,)}, "memory"),
    ],
)  # fmt: skip
def test_jobs_that_fit_no_memory_or_never_end_are_refused(monkeypatch, given, code):
    monkeypatch.setattr("paceline.machine.count_gpus", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        check_job(TrainSettings(**given))
    assert caught.value.code == code and len(str(caught.value)) < 200
