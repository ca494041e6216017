"""Large-batch recipes: each switch against manual arithmetic, refusals, and how a batch is divided."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.studies.large_batches import NO_RECIPE, SWITCHES, Recipe, share_batch
from paceline.training.train_settings import TrainSettings

BASE = TrainSettings(lr=0.05, schedule="cosine", global_batch_size=16)
GROWN, SMALL, UPDATES = 256, 16, 40
COUNTS = st.integers(1, 4096)


def apply(text, global_batch_size=GROWN, base_batch_size=SMALL, num_updates=UPDATES, base=BASE):
    return Recipe.parse(text).apply(base, global_batch_size, base_batch_size, num_updates)


def changes(settings):
    """The settings that change at the larger batch."""
    at_larger = dataclasses.replace(BASE, global_batch_size=GROWN).to_json()
    return {name: value for name, value in settings.to_json().items() if value != at_larger[name]}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", {}),
        ("linear", {"lr": 0.05 * 16}),
        ("linear:0.5", {"lr": 0.05 * 8}),
        ("sqrt", {"lr": 0.05 * 4}),
        ("sqrt:2", {"lr": 0.05 * 8}),
        ("lars", {"optimizer": "lars", "lr": 0.15 * 4, "trust_coefficient": 0.02}),
        ("lars:0.5", {"optimizer": "lars", "lr": 0.5 * 4, "trust_coefficient": 0.02}),
        ("lamb", {"optimizer": "lamb", "lr": 0.004 * 4}),
        ("lamb:0.01", {"optimizer": "lamb", "lr": 0.01 * 4}),
        ("warmup", {"lr_warmup": 8}),
        ("warmup:0.1", {"lr_warmup": 4}),
        ("warmup:0.001", {"lr_warmup": 1}),
        ("ghost", {"ghost_batchnorm": 16}),
        ("ghost:8", {"ghost_batchnorm": 8}),
        ("sync", {"sync_batchnorm": True}),
        ("smoothing", {"label_smoothing": 0.1}),
        ("smoothing:0.2", {"label_smoothing": 0.2}),
        ("grow", {"global_batch_size": 16, "batch_growth": ((0.4, 4), (0.6, 16)), "schedule": "constant"}),
        ("grow:0.1", {"global_batch_size": 16, "batch_growth": ((0.1, 4), (0.4, 16)), "schedule": "constant"}),
        ("linear+warmup+smoothing", {"lr": 0.8, "lr_warmup": 8, "label_smoothing": 0.1}),
        (" linear + ghost:4 ", {"lr": 0.8, "ghost_batchnorm": 4}),
    ],
)  # fmt: skip
def test_a_recipe_changes_only_its_own_settings(text, wanted):
    settings = apply(text)
    found = changes(settings)
    assert found.pop("lr", BASE.lr) == pytest.approx(wanted.get("lr", BASE.lr))
    assert found == {name: value for name, value in wanted.items() if name != "lr"}
    settings.check()


def test_every_switch_is_tested_and_can_be_used_alone():
    for name in SWITCHES:
        assert changes(apply(name)), name
        assert Recipe.parse(name).names == (name,)


@pytest.mark.parametrize(
    ("growth", "factors", "shares"),
    [
        (2, (2,), (0.4,)),
        (4, (4,), (0.4,)),
        (6, (4, 6), (0.4, 0.6)),
        (64, (4, 16, 64), (0.4, 0.55, 0.7)),
    ],
)
def test_a_batch_grows_by_four_and_ends_at_the_requested_one(growth, factors, shares):
    settings = apply("grow", SMALL * growth)
    assert tuple(factor for _, factor in settings.batch_growth) == factors
    assert [share for share, _ in settings.batch_growth] == pytest.approx(shares)
    assert settings.global_batch_size == SMALL


@given(growth=st.integers(2, 5000), share=st.floats(0.01, 0.95))
def test_growth_rises_to_the_batch_within_the_run(growth, share):
    settings = apply(f"grow:{share!r}", SMALL * growth)
    shares, factors = zip(*settings.batch_growth, strict=True)
    assert factors[-1] == growth and shares[0] == pytest.approx(share, abs=1e-4)
    assert all(2 <= after / before <= 4 for before, after in itertools.pairwise((1, *factors[:-1])))
    assert factors[-1] / (1, *factors)[-2] <= 4
    # The last batch size lasts twice as long as the interval between two growths.
    gaps = [after - before for before, after in itertools.pairwise((*shares, 1.0))]
    assert gaps[-1] == pytest.approx(2 * gaps[0] if len(gaps) > 1 else 1 - share, abs=1e-3)
    settings.check()


def test_growth_replaces_drops():
    base = dataclasses.replace(BASE, schedule="piecewise", lr_drops=(0.5, 0.75))
    settings = apply("grow", base=base)
    assert (settings.schedule, settings.lr_drops) == ("constant", ())
    settings.check()


@given(size=COUNTS, base_size=COUNTS, rate=st.floats(1e-4, 10))
def test_rates_follow_the_growth_of_the_batch(size, base_size, rate):
    base = dataclasses.replace(BASE, lr=rate)
    growth = size / base_size
    wanted = {"linear": rate * growth, "sqrt": rate * growth**0.5, f"lars:{rate!r}": rate * growth**0.5}
    for text, lr in wanted.items():
        assert apply(text, size, base_size, base=base).lr == pytest.approx(lr)


@given(st.lists(st.sampled_from(sorted(SWITCHES)), unique=True, min_size=1))
def test_the_order_of_switches_does_not_matter(names):
    clash = any(other in names for name in names for other in SWITCHES[name].excludes)
    if clash:
        with pytest.raises(ConfigError, match="exclude each other"):
            Recipe.parse("+".join(names))
        return
    one, other = apply("+".join(names)), apply("+".join(reversed(names)))
    assert one == other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("linaer", "recipe 'linaer': 'linaer' is unknown; use none, linear, sqrt"),
        ("", "recipe '': '' is unknown"),
        ("linear+", "'' is unknown"),
        ("none+linear", "'none' is unknown"),
        ("linear:", "'' after linear is not a number"),
        ("lars:high", "'high' after lars is not a number"),
        ("lars:0", "0 after lars: must be a number above 0"),
        ("lars:-1", "-1 after lars: must be a number above 0"),
        ("ghost:nan", "nan after ghost: must be a number above 0"),
        ("lamb:inf", "inf after lamb: must be a number above 0"),
        ("ghost:2.5", "2.5 after ghost: must be an integer of at least 2"),
        ("ghost:1", "1 after ghost: must be an integer of at least 2"),
        ("sync:4", "4 after sync"),
        ("warmup:1", "1 after warmup is a fraction"),
        ("grow:1.5", "1.5 after grow is a fraction"),
        ("smoothing:1", "1 after smoothing is a fraction"),
        ("linear+sqrt", "linear and sqrt exclude each other; leave one out"),
        ("lars+lamb", "lars and lamb exclude each other"),
        ("lars+linear", "linear exclude each other|linear and lars exclude"),
        ("warmup+grow", "grow and warmup exclude each other"),
        ("ghost+sync", "ghost and sync exclude each other"),
        ("linear+linear", "linear and linear exclude each other"),
    ],
)
def test_impossible_values_are_refused_in_one_line(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Recipe.parse(text)
    assert "\n" not in str(caught.value)


def test_only_recipes_for_norms_need_a_norm():
    found = {name for name in SWITCHES if Recipe.parse(name).is_for_norms}
    assert found == {"ghost", "sync"}
    assert not Recipe.parse(NO_RECIPE).is_for_norms and Recipe.parse("linear+ghost").is_for_norms


@given(share=st.integers(1, 5000), ranks=st.integers(1, 16), most=st.integers(1, 600))
def test_a_shared_batch_has_the_fewest_equal_parts(share, ranks, most):
    settings = share_batch(dataclasses.replace(BASE, ranks=ranks, global_batch_size=share * ranks), most)
    assert settings.batch_size <= most
    assert settings.batches.global_batch_size == share * ranks
    larger = [size for size in range(settings.batch_size + 1, most + 1) if share % size == 0]
    assert not larger
    settings.check()


@given(share=COUNTS, ranks=st.integers(2, 16))
def test_a_batch_that_ranks_cannot_share_is_refused(share, ranks):
    assume(share % ranks)
    with pytest.raises(ConfigError, match=f"{share} .*{ranks} ranks"):
        share_batch(dataclasses.replace(BASE, ranks=ranks, global_batch_size=share), 512)


@pytest.mark.parametrize(
    ("most", "grow", "batch_size", "accumulate"),
    [
        (256, "batch-size", 16, 1),  # the grown batch fits in one pass
        (255, "accumulate", 16, 1),
        (16, "accumulate", 16, 1),
        (8, "accumulate", 8, 2),
    ],
)
def test_a_growing_batch_grows_in_one_piece_as_long_as_it_fits(most, grow, batch_size, accumulate):
    settings = share_batch(apply("grow"), most)
    assert (settings.grow, settings.batch_size, settings.accumulate) == (grow, batch_size, accumulate)
    settings.check()


def test_a_constant_batch_ignores_how_to_grow():
    assert share_batch(apply("linear"), 1024).grow == "accumulate"
