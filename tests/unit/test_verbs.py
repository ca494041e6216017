"""Arguments of verbs, as far as they are read before any rank starts."""

import pytest

from paceline.errors import ConfigError
from paceline.measure.settings import ChunkSettings
from paceline.verbs import bench, profile, scale


@pytest.mark.parametrize("ranks", [None, 1, (1,), [1]])
def test_layers_are_of_one_rank_however_it_is_written(ranks):
    assert profile._build_bare("cnn", {"ranks": ranks, "batch_size": None}).batches.batch_size == 32


@pytest.mark.parametrize("ranks", [0, 2, [1, 2]])
def test_layers_are_of_no_other_number_of_ranks(ranks):
    with pytest.raises(ConfigError, match="ranks"):
        profile._build_bare("cnn", {"ranks": ranks})


def test_no_batch_size_is_the_default_one(monkeypatch):
    def open_session(verb, config, **_):
        raise ConfigError(str(config["batch_sizes"]))

    monkeypatch.setattr(profile, "open_session", open_session)
    with pytest.raises(ConfigError, match="32"):
        profile.profile("cnn", kind="phases", ranks=1, batch_size=None)


def test_an_argument_that_nothing_reads_is_a_mistake():
    given = {"ranks": 2, "backend": "gloo", "out": None, "progress": None, "itres": 3}
    with pytest.raises(AssertionError, match="bench chunks ignores itres"):
        bench._measure("bench chunks", "", ChunkSettings, given, {"chunks": (4,), "total_bytes": 4})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size 0: at least"),
        ({"seeds": -1}, "--seeds -1: at least 1"),
        ({"base_batch_size": 0}, "--base-batch-size 0: at least 1"),
    ],
)
def test_what_a_study_of_large_batches_refuses(arguments, words):
    with pytest.raises(ConfigError, match=words):
        scale.large_batch(**arguments)
