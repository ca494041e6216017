"""The runs of a large-batch study: what none of them could do is refused before the first is trained."""

import pytest

from paceline.errors import ConfigError
from paceline.measure.large_batch_settings import LargeBatchSettings
from paceline.training.recipes import Recipe
from paceline.training.settings import TrainSettings


def build(*recipes, size=64, epochs=4, updates=0):
    return LargeBatchSettings(
        job=TrainSettings(epochs=epochs),
        base_batch_size=8,
        global_batch_sizes=(size,),
        recipes=recipes,
        updates=updates,
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (build("none", size=128), "64 samples are fewer than a batch of 128"),
        (build("none", "linear+warmup", epochs=1), "a warm-up of 1 updates in a run of 1"),
        (build("none", "grow:0.98", epochs=1), "no step has the growth"),
    ],
    ids=["batch", "warmup", "growth"],
)
def test_what_a_later_run_would_refuse_is_refused_before_the_first(settings, why):
    with pytest.raises(ConfigError, match=why):
        settings.list_cells(64)


def test_runs_that_can_be_are_listed_baseline_first():
    cells = build("none", "grow", "linear+warmup", size=32).list_cells(64)
    assert [cell.recipe for cell in cells[::3]] == ["none", "none", "grow", "linear+warmup"]
    assert cells[0].probes and not any(cell.probes for cell in cells[1:])


def test_a_recipe_has_one_name_however_it_is_spaced():
    assert Recipe.parse(" lars: 0.5 + warmup ").text == "lars:0.5+warmup"
