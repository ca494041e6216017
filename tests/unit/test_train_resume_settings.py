"""Settings that a resumed run may change: they affect how it runs, but not its results."""

import dataclasses
import json

import pytest

from paceline.errors import ConfigError
from paceline.report.training_result import render_config
from paceline.training.train_settings import Batches, TrainSettings
from paceline.verbs.train import change_settings, update_config


def test_the_configuration_is_written_again_only_if_it_has_changed(tmp_path, build_environment):
    path = tmp_path / "config.json"
    path.write_text(render_config(TrainSettings(epochs=2).to_json(), build_environment()))
    before = path.stat().st_ino
    update_config(tmp_path, epochs=1)
    assert path.stat().st_ino == before
    update_config(tmp_path, epochs=3)
    assert path.stat().st_ino != before and json.loads(path.read_text())["settings"]["epochs"] == 3
    # a resumed run keeps the larger value
    for load, stolen, expected in ((9.0, None, [9.0, 0.0]), (1.0, 0.2, [9.0, 0.2])):
        update_config(tmp_path, environment=build_environment(load_average=load, stolen=stolen))
        kept = json.loads(path.read_text())["environment"]
        assert [kept["load_average"], kept["stolen"]] == expected


@pytest.mark.parametrize(
    ("saved", "ranks", "batches"),
    [
        ((4, 8, 16), 1, Batches(1, 8, 64)),  # instead of one micro-batch of 512
        ((2, 8, 1), 1, Batches(1, 8, 2)),
        ((2, 8, 4), 4, Batches(4, 8, 2)),
        ((2, 8, 1), 4, Batches(4, 4, 1)),  # 8 no longer fit
    ],
)
def test_on_other_ranks_the_micro_batch_stays_where_it_can(saved, ranks, batches):
    run = TrainSettings(ranks=saved[0], batch_size=saved[1], accumulate=saved[2])
    assert change_settings(run, {"ranks": ranks}).batches == batches


@pytest.mark.parametrize(
    ("saved", "typed", "words"),
    [
        ({"epochs": 2}, {"steps": 9}, "--steps 9 with --resume: the run ends after --epochs 2; pass more --epochs"),
        ({"steps": 9}, {"epochs": 2}, "--epochs 2 with --resume: the run ends after --steps 9; pass more --steps"),
        (
            {"epochs": 2, "batch_growth": ((0.5, 4),)},
            {"epochs": 3},
            "--epochs 3 with --resume: the batch grows at fractions (0.5:4) of the run's 2 epochs",
        ),
        ({}, {"batch_growth": ((0.5, 4),)}, "--batch-growth 0.5:4 with --resume: the run was started with none"),
        (
            {"batch_growth": ((0.5, 4),)},
            {"batch_growth": ((0.5, 4), (0.75, 8))},
            "--batch-growth 0.5:4,0.75:8 with --resume: the run was started with 0.5:4",
        ),
    ],
)
def test_length_and_growth_of_a_continued_run(saved, typed, words):
    run = TrainSettings(**saved)
    with pytest.raises(ConfigError) as caught:
        change_settings(run, typed)
    assert words in str(caught.value)


def test_options_that_do_not_change_a_run_may_be_repeated():
    run = TrainSettings(epochs=2, batch_growth=((0.5, 4),))
    typed = dataclasses.replace(run, grow="batch-size")
    assert change_settings(run, {"epochs": 2, "batch_growth": ((0.5, 4),), "grow": "batch-size"}) == typed
    assert change_settings(TrainSettings(steps=9), {"steps": 12}).steps == 12


def test_what_belongs_to_a_policy_goes_with_it():
    run = TrainSettings(ranks=2, on_fault="spare", spares=2, max_faults=5)
    for policy, spares, max_faults in (("restart", 1, 5), ("stop", 1, 10), ("spare", 2, 5)):
        found = change_settings(run, {"on_fault": policy})
        found.check()
        assert (found.on_fault, found.spares, found.max_faults) == (policy, spares, max_faults)
    with pytest.raises(ConfigError, match="--max-faults 5"):
        TrainSettings(max_faults=5).check()
    with pytest.raises(ConfigError, match="--on-fault 'hope'"):
        TrainSettings(on_fault="hope").check()


def test_the_faults_that_auto_expects_go_with_it():
    run = TrainSettings(save_every="auto", mtbf="3h")
    assert change_settings(run, {"save_every": "60s"}).mtbf is None
    assert change_settings(run, {"mtbf": "5h"}).mtbf == "5h"
    assert change_settings(run, {"keep": 2}).mtbf == "3h"
