"""Wrappers beside each other: paired ratios, their noise, and what a wrapper adds to the bare module."""

import random
import statistics

import pytest

from paceline.errors import RecordError
from paceline.records.samples import Ratio
from paceline.records.steps import compare_steps, compare_wrappers


def test_a_ratio_is_of_steps_in_the_same_repetition(build_wrapper):
    """A spell that slows both sides by ten leaves the paired ratio alone; a ratio of medians would be off."""
    torch = build_wrapper("torch", (1.0, 10.0, 10.0, 1.0, 1.0, 1.0))
    ours = build_wrapper("paceline", (0.9, 9.0, 9.0, 9.0, 0.9, 0.9))
    ratio = compare_steps(ours, torch)
    assert ratio.value == pytest.approx(0.9)
    assert ours.timing.median_s / torch.timing.median_s != pytest.approx(0.9)


def test_the_slowest_rank_is_what_counts(build_wrapper, build_samples):
    both = build_samples(1.0, 1.0)
    ours = build_wrapper("paceline", (1.0, 1.0), timing=type(both)(seconds=((1.0, 2.0), (2.0, 1.0))))
    assert compare_steps(ours, build_wrapper("torch", (1.0, 1.0))).value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(2, 0, 1), (5, 0, 4), (6, 0, 5), (9, 1, 7), (20, 5, 14), (100, 40, 59)]
)
def test_noise_reaches_to_the_order_statistics_of_the_median(build_wrapper, count, low, high):
    ratios = [1 + 0.01 * k**2 for k in range(count)]
    shuffled = random.Random(1).sample(ratios, count)
    ratio = compare_steps(build_wrapper("paceline", shuffled), build_wrapper("torch", (1.0,) * count))
    middle = statistics.median(ratios)
    assert ratio.noise == pytest.approx(max(ratios[high] - middle, middle - ratios[low]))


def test_the_noise_covers_the_truth_about_as_often_as_it_says(build_wrapper):
    """1,000 made-up benchmarks of two equal wrappers: a difference is claimed in about 5 % of them, not in 20 %."""
    generator = random.Random(3)
    torch, claimed = build_wrapper("torch", (1.0,) * 20), 0
    for _ in range(1000):
        times = [generator.lognormvariate(0, 0.1) for _ in range(20)]
        claimed += compare_steps(build_wrapper("paceline", times), torch).is_clear
    assert 0 < claimed < 80


@pytest.mark.parametrize(
    ("ratio", "is_clear"),
    [(Ratio(0.9, 0.05), True), (Ratio(0.9, 0.15), False), (Ratio(1.1, 0.05), True), (Ratio(2.0, None), False)],
)
def test_a_difference_is_clear_beyond_the_noise(ratio, is_clear):
    assert ratio.is_clear is is_clear


def test_one_repetition_has_no_noise_to_tell(build_wrapper):
    ratio = compare_steps(build_wrapper("paceline", (1.0,)), build_wrapper("torch", (2.0,)))
    assert (ratio.value, ratio.noise, ratio.is_clear) == (0.5, None, False)


@pytest.mark.parametrize("changes", [{"model": "mlp"}, {"world_size": 3}, {"batch_size": 9}, {"times_s": (1.0,)}])
def test_what_was_not_timed_in_turns_is_not_compared(build_wrapper, changes):
    with pytest.raises(RecordError, match="were not timed in turns"):
        compare_steps(build_wrapper("paceline", **changes), build_wrapper("torch"))


def test_each_wrapper_stands_beside_those_of_its_own_cell(build_wrapper):
    records = [
        build_wrapper("bare", (1.0, 1.0)), build_wrapper("torch", (2.0, 2.0)), build_wrapper("paceline", (1.5, 1.5)),
        build_wrapper("torch", (8.0, 8.0), model="mlp"), build_wrapper("torch-tuned", (4.0, 4.0), model="mlp"),
    ]  # fmt: skip
    bare, torch, ours, mlp_torch, mlp_tuned = compare_wrappers(records)
    assert [s.record for s in (bare, torch, ours, mlp_torch, mlp_tuned)] == records
    assert (ours.to_torch.value, ours.to_bare.value, ours.to_tuned) == (0.75, 1.5, None)
    assert (bare.to_torch.value, torch.to_torch) == (0.5, Ratio(1.0, 0.0))
    assert (mlp_torch.to_tuned.value, mlp_tuned.to_torch.value, mlp_torch.to_bare) == (2.0, 0.5, None)


def test_host_time_per_parameter_is_told_for_one_rank_on_cpu_alone(build_wrapper):
    def per_parameter(times_s=(1.1, 2.1, 3.2), **changes):
        records = [build_wrapper("bare", (1.0, 2.0, 3.0), **changes), build_wrapper("paceline", times_s, **changes)]
        return compare_wrappers(records)[1].host_s_per_parameter

    assert per_parameter(world_size=1) == pytest.approx(0.1 / 100)
    assert per_parameter((1.1, 1.9, 3.2), world_size=1) is None  # inside the noise
    assert per_parameter(world_size=2) is None
    assert per_parameter(world_size=1, device="cuda") is None
    assert compare_wrappers([build_wrapper("paceline", world_size=1)])[0].host_s_per_parameter is None


def test_added_memory_is_the_peak_above_the_bare_modules_peak(build_wrapper):
    records = [
        build_wrapper("bare", held_bytes=1000, peak_step_bytes=1500),
        build_wrapper("torch", held_bytes=2000, peak_step_bytes=1600),
    ]
    assert [s.added_bytes for s in compare_wrappers(records)] == [0, 1100]
    assert [s.added_bytes for s in compare_wrappers([build_wrapper("bare"), build_wrapper("torch")])] == [None, None]


def test_across_backends_torch_on_gloo_is_the_measure(build_wrapper):
    records = [
        build_wrapper("torch", (2.0, 4.0)), build_wrapper("paceline", (1.0, 2.0)),
        build_wrapper("torch", (1.0, 2.0), backend="paceline"),
        build_wrapper("paceline", (0.5, 1.0), backend="paceline"),
        build_wrapper("paceline", (8.0, 8.0), backend="paceline", model="mlp"),
    ]  # fmt: skip
    on_gloo, ours_on_gloo, there, ours, alone = compare_wrappers(records)
    assert [s.to_torch_on_gloo.value for s in (on_gloo, ours_on_gloo, there, ours)] == [1.0, 0.5, 0.5, 0.25]
    assert [s.to_torch.value for s in (on_gloo, ours_on_gloo, there, ours)] == [1.0, 0.5, 1.0, 0.5]
    assert (alone.to_torch_on_gloo, alone.to_torch) == (None, None)  # another model


def test_across_backends_a_slow_spell_hits_both(build_wrapper):
    records = [
        build_wrapper("torch", (1.0, 10.0, 10.0, 1.0, 1.0, 1.0)),
        build_wrapper("torch", (0.5, 5.0, 5.0, 5.0, 0.5, 0.5), backend="paceline"),
    ]
    ratio = compare_wrappers(records)[1].to_torch_on_gloo
    assert ratio.value == pytest.approx(0.5)
    assert records[1].timing.median_s / records[0].timing.median_s != pytest.approx(0.5)


def test_another_device_is_another_job(build_wrapper):
    records = [build_wrapper("torch"), build_wrapper("torch", backend="nccl", device="cuda")]
    assert compare_wrappers(records)[1].to_torch_on_gloo is None
    with pytest.raises(RecordError, match="were not timed in turns"):
        compare_steps(*records)
