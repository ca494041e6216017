"""Settings of scaling studies: refusals, JSON, and the resulting cells."""

import contextlib
import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import machine
from paceline.errors import ConfigError
from paceline.studies import scale, study
from paceline.studies.batch_sizes import BatchSettings
from paceline.studies.large_batches import LargeBatchSettings, Recipe
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.training.train_settings import TrainSettings
from paceline.units import MIB

JOB = TrainSettings(channels=(2, 4), hidden=8, threads=1, device="cpu", wrapper="none", lr_drops=())
GLOO, OURS = Setup("torch", "gloo"), Setup("paceline", "paceline")
RANKS = ScaleSettings(
    job=JOB, ranks=(1, 2, 4), setups=(GLOO, OURS), batch_sizes=(8, 32), global_batch_sizes=(64,), iters=3
)
SWEEP = BatchSettings(job=JOB, batch_sizes=(4, 8), epochs=3)
LARGE = LargeBatchSettings(
    job=TrainSettings(epochs=3, lr_drops=(0.5,), schedule="piecewise"), base_batch_size=8, global_batch_sizes=(32, 64),
    recipes=("none", "linear+warmup", "grow"), seeds=(5, 6),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)


@pytest.mark.parametrize("settings", [RANKS, SWEEP, LARGE], ids=lambda s: type(s).__name__)
def test_settings_come_back_from_json_as_they_were(settings):
    settings.check()
    config = json.loads(json.dumps(settings.to_json() | {"machine": "some box"}))
    assert type(settings).from_json(config) == settings


@given(
    st.builds(
        LargeBatchSettings,
        job=st.builds(TrainSettings, channels=st.sampled_from([None, (2, 4)]), lr=st.floats(0, 10)),
        base_batch_size=st.integers(1, 99),
        global_batch_sizes=st.lists(st.integers(100, 999), max_size=3).map(tuple),
        recipes=st.lists(st.sampled_from(["none", "linear", "lars:3+warmup"]), max_size=3).map(tuple),
        seeds=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        updates=st.none() | st.integers(0, 99),
    )
)
def test_any_large_batch_study_comes_back_from_json(settings):
    assert LargeBatchSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (RANKS, {"setups": ()}, "--wrapper: no name; use one of paceline, torch, dp"),
        (RANKS, {"setups": (Setup("trch", "gloo"),)}, "wrapper 'trch' is unknown"),
        (RANKS, {"setups": (Setup("none", "gloo"),)}, "wrapper 'none' is unknown"),
        (RANKS, {"setups": (Setup("torch", "glo"),)}, "backend 'glo' is unknown"),
        (RANKS, {"ranks": (1,)}, "--ranks 1: scaling compares one rank with two or more"),
        (RANKS, {"global_batch_sizes": (64, 6)}, "--global-batch-size 6 cannot be divided evenly among 4 ranks: use a"),
        (RANKS, {"setups": (Setup("dp", "gloo"),)}, "--wrapper dp uses 4 GPUs in one process, but 0 can"),
        (
            SWEEP,
            {"job": dataclasses.replace(JOB, samples=7)},
            "--batch-size 8 is more than --samples 7: leave it out, or pass more samples",
        ),
        (LARGE, {"global_batch_sizes": (16, 8)}, "--global-batch-size 16,8: must be above the base of 8"),
        (LARGE, {"recipes": ("none", "liner")}, "recipe 'liner': 'liner' is unknown"),
        (LARGE, {"recipes": ("sync",)}, "recipe 'sync': sync needs several ranks; use ghost"),
        (LARGE, {"global_batch_sizes": (32, 36)}, "recipe 'grow': 36 is not a multiple of the base 8"),
    ],
)
def test_impossible_values_are_refused_in_one_line(settings, changes, words):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(settings, **changes).check()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_dp_is_for_as_many_gpus_as_there_are(monkeypatch):
    monkeypatch.setattr(machine, "count_gpus", lambda: 4)
    on_gpus = dataclasses.replace(RANKS, setups=(Setup("dp", "nccl"),), job=dataclasses.replace(JOB, device="cuda"))
    on_gpus.check()
    assert on_gpus.backends == ()
    with pytest.raises(ConfigError, match="--wrapper dp"):
        dataclasses.replace(on_gpus, ranks=(1, 8), global_batch_sizes=()).check()
    with pytest.raises(ConfigError, match="--wrapper dp"):
        dataclasses.replace(on_gpus, job=JOB).check()


def test_cells_are_weak_ones_and_then_strong_ones():
    assert [cell.name for cell in RANKS.cells] == ["weak 8", "weak 32", "strong 64"]
    assert [ScalingCell("weak", 8).batch_size(n) for n in (1, 2, 4)] == [8, 8, 8]
    assert [ScalingCell("strong", 64).batch_size(n) for n in (1, 2, 4)] == [64, 32, 16]


@pytest.mark.parametrize("num_bytes", [1, 1 << 14, (1 << 14) + 1, 5_000_000])
def test_the_sweep_of_all_reduces_reaches_all_gradients_at_once(num_bytes):
    sweep = RANKS.sweep(num_bytes)
    assert sweep.ranks == (2, 4) and sweep.backends == ("gloo", "shm") and sweep.threads == 1
    assert max(sweep.sizes) >= max(num_bytes, MIB) and list(sweep.sizes) == sorted(set(sweep.sizes))
    assert all(size < num_bytes for size in sweep.sizes[:-1])
    sweep.check()


def test_the_sweep_uses_shared_memory_where_all_ranks_are_on_one_host():
    assert RANKS.sweep(MIB).memories == ("ordinary", "shared")
    assert RANKS.sweep(MIB, on_one_host=False).memories == ("ordinary",)


# -- large batches: the runs of a study --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "num_samples", "size", "wanted"),
    [
        ("keep", 100, 32, 3 * 4), ("pad", 100, 32, 3 * 4), ("drop", 100, 32, 3 * 3), ("keep", 96, 32, 3 * 3),
        ("drop", 96, 32, 3 * 3), ("keep", 20, 32, 3), ("drop", 20, 32, 0),
    ],
)  # fmt: skip
def test_updates_count_a_smaller_last_batch_according_to_the_tail(tail, num_samples, size, wanted):
    settings = dataclasses.replace(LARGE, job=dataclasses.replace(LARGE.job, tail=tail))
    assert settings.count_updates(size, num_samples) == wanted


@pytest.fixture(scope="module")
def cells():
    return LARGE.list_cells(200)


def test_the_baseline_is_first_and_every_run_is_listed_once(cells):
    named = [(cell.budget, cell.global_batch_size, cell.recipe, cell.settings.seed) for cell in cells]
    plan = [("epochs", 8, "none"), *(("epochs", *pair) for pair in itertools.product((32, 64), LARGE.recipes))]
    plan += [("updates", size, "none") for size in (8, 32, 64)]
    assert named == [(*cell, seed) for seed in (5, 6) for cell in plan]
    assert len({cell.name for cell in cells}) == len(cells)
    assert cells[0].name == "epochs 8 none seed 5"


def test_noise_is_probed_once_in_the_baselines_first_seed(cells):
    assert [cell.name for cell in cells if cell.probes] == ["epochs 8 none seed 5"]


def test_recipes_are_checked_against_the_base_batch(cells):
    of = {cell.name: cell.settings for cell in cells}
    plain, warmed = of["epochs 64 none seed 5"], of["epochs 64 linear+warmup seed 5"]
    assert (plain.lr, plain.lr_warmup, plain.schedule) == (LARGE.job.lr, 0, "piecewise")
    assert warmed.lr == pytest.approx(8 * LARGE.job.lr)
    assert warmed.lr_warmup == round(0.2 * 3 * 4)  # 200 samples in batches of 64, three times
    assert of["epochs 64 grow seed 5"].batch_growth == ((0.4, 4), (0.6, 8))
    assert {cell.settings.epochs for cell in cells if cell.budget == "epochs"} == {3}


@pytest.mark.parametrize(("updates", "wanted"), [(None, 2 * 3 * 4), (7, 7), (0, None)])
def test_runs_of_equal_updates_have_twice_those_of_the_largest_batch_or_so_many_or_none(updates, wanted):
    found = dataclasses.replace(LARGE, updates=updates).list_cells(200)
    limited = [cell for cell in found if cell.budget == "updates"]
    assert {(cell.settings.steps, cell.settings.epochs) for cell in limited} == ({(wanted, 1)} if wanted else set())
    assert len(limited) == (6 if wanted else 0)
    assert all(cell.settings.steps is None for cell in found if cell.budget == "epochs")


def test_micro_batches_are_bounded():
    bounded = dataclasses.replace(LARGE, most_at_once=12, job=dataclasses.replace(LARGE.job, ranks=2))
    for cell in bounded.list_cells(200):
        assert cell.settings.batches.batch_size <= 12
        first = 8 if cell.settings.batch_growth else cell.global_batch_size
        assert cell.settings.batches.global_batch_size == first


def test_a_table_can_show_the_settings_of_a_recipe(cells):
    received = {cell.name: cell.configuration for cell in cells}
    assert received["epochs 8 none seed 5"] == "sgd, lr 0.05, piecewise"
    assert received["epochs 64 linear+warmup seed 6"] == "sgd, lr 0.4, piecewise, warm-up 2"
    assert received["epochs 64 grow seed 5"] == "sgd, lr 0.05, constant, from 8: x4 at 0.4, x8 at 0.6"
    ghosts = dataclasses.replace(LARGE, recipes=("ghost:4+smoothing",)).list_cells(200)
    assert ghosts[1].configuration.endswith("ghosts of 4, smoothing 0.1")


@pytest.mark.parametrize(
    ("changes", "num_samples", "words"),
    [
        ({}, 63, "63 samples are fewer than a batch of 64"),
        (
            {"job": dataclasses.replace(LARGE.job, ranks=3)},
            200,
            "a global batch of 8 cannot be divided evenly among 3 ranks",
        ),
        (
            {"recipes": ("warmup:0.9",), "global_batch_sizes": (64,)},
            64,
            "'warmup:0.9' at 64: --lr-warmup 3 covers all 3 steps",
        ),
        (
            {"recipes": ("grow:0.9",), "global_batch_sizes": (64,)},
            64,
            "'grow:0.9' at 64: --batch-growth 0.9:4,0.9333:8",
        ),
    ],
)
def test_impossible_runs_are_refused_before_any_training(changes, num_samples, words):
    settings = dataclasses.replace(LARGE, **changes)
    settings.check()
    with pytest.raises(ConfigError) as caught:
        settings.list_cells(num_samples)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_has_one_name_however_it_is_spaced():
    assert Recipe.parse(" lars: 0.5 + warmup ").text == "lars:0.5+warmup"


@pytest.mark.parametrize(
    ("job", "is_so"),
    [
        ({"model": "mlp"}, True), ({"model": "linear"}, True),
        ({"model": "own.py:f", "data": "synthetic:numbers"}, True),
        ({"model": "mlp", "data": "synthetic:images"}, False), ({"model": "cnn"}, False), ({"model": "gpt2"}, False),
        ({"model": "hf:some", "data": "synthetic:tokens"}, False), ({"model": "nonsense"}, False),
    ],
)  # fmt: skip
def test_labels_are_smoothed_only_where_there_are_classes(job, is_so):
    train = TrainSettings(**job)
    assert train.predicts_numbers is is_so
    large = dataclasses.replace(LARGE, job=train, recipes=("none", "linear+smoothing:0.2", "grow"))
    with pytest.raises(ConfigError, match="smoothing") if is_so else contextlib.nullcontext():
        large.check()


@pytest.mark.parametrize(("ranks", "accumulate", "size"), [((1, 2), None, 64), ((1, 3), None, 66), ((2, 3, 4), 2, 72)])
def test_the_default_global_batch_can_be_shared_by_all_ranks(monkeypatch, ranks, accumulate, size):
    configs = []

    def open_session(verb, config, **_):
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "open_session", open_session)
    with pytest.raises(KeyboardInterrupt):
        scale.ranks(ranks=ranks, accumulate=accumulate, batch_size=(8, 32))
    assert configs[0]["global_batch_sizes"] == (size,)


def test_a_default_does_not_collide_with_what_was_given():
    def build_study(name, **given):
        kind = scale.STUDIES[name]
        return study.build_settings(kind, **kind.get_defaults() | given)

    short = build_study("strategies", steps=7)
    assert (short.job.steps, short.job.epochs) == (7, 1)
    assert build_study("strategies").job.epochs == 6 and build_study("strategies", epochs=2).job.epochs == 2
    assert build_study("strategies").job.data == "synthetic:noisy"
    with pytest.raises(ConfigError, match=r"--steps 7 .*--epochs 6"):
        build_study("strategies", steps=7, epochs=6)
    for name in ("strategies", "large-batch"):
        assert build_study(name).job.schedule == "cosine"
        assert build_study(name, lr_drops=(0.5, 0.75)).job.schedule == "piecewise"
        with pytest.raises(ConfigError, match=r"--lr-drops 0\.5"):
            build_study(name, lr_drops=(0.5,), schedule="cosine")
    for name in ("batch", "large-batch"):
        with pytest.raises(ConfigError, match=r"--steps: .*epochs"):
            build_study(name, steps=7)
